"""The bridge: apcore modules in, an MCP server or OpenAI tool definitions out.

The file reads top to bottom; each room uses only what stands above it, and `grep '^# ----'` lists the rooms:

    Options      every option of `serve()`, once
    Schemas      JSON Schema in, a self-contained one out
    Secrets      which values of a schema are marked, and what stands in their place
    Tools        a module as clients see it: its names, what is said of it, its schemas
    Results      a module's output as an MCP result
    Errors       what went wrong, in a plain sentence for the client and in full for the log
    Documents    what a person reads of a tool
    Files        a folder's modules: taken in, again when they change, and out when they go
    Catalog      the registry as a list of tools that follows it
    OpenAI       tools as function definitions, and a model's call back as a module's inputs
    Calls        one running tool call: progress, questions, cancellation, threads
    Approval     who is asked before a call runs
    Router       a `tools/call` to the Executor and back, also while its user is asked
    Server       the MCP handlers, in every protocol version the SDK speaks
    Explorer     one page, and as JSON what it shows and runs
    HTTP         the Starlette app and the guard before it
    stdio        pipes, and who owns the standard streams
    Doors        the command line's, and `async_serve`, `MCPServer`, `serve`

Promises. Every call goes through apcore's Executor, and only tools that are listed can be called. One bad module never
takes the others down. What a client is told contains no traceback, path, class name, caller or sensitive value. Nothing
of apcore, of the SDK or of a user's classes is patched. The server parts of `mcp` are imported where they are used: who
only wants OpenAI definitions does not wait for an HTTP stack.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import copy
import dataclasses
import enum
import functools
import hashlib
import inspect
import itertools
import json
import logging
import math
import os
import posixpath
import queue
import re
import secrets
import shlex
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import (
    AsyncExitStack,
    ExitStack,
    aclosing,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    ParamSpec,
    TypeVar,
    cast,
    get_origin,
    get_type_hints,
)
from urllib.parse import quote, unquote, urljoin, urlsplit

import apcore
from annotated_types import Predicate
from apcore import (
    APCore,
    Config,
    Executor,
    FunctionModule,
    ModuleAnnotations,
    ModuleDescriptor,
    ModuleError,
    Registry,
    SchemaValidationError,
)
from apcore.approval import AlwaysDenyHandler, ApprovalHandler, ApprovalRequest, ApprovalResult
from apcore.bindings import BindingLoader
from apcore.builtin_steps import BuiltinApprovalGate, BuiltinExecute
from apcore.cancel import CancelToken
from apcore.context import Context, Identity
from apcore.context_keys import METRICS_STARTS
from apcore.errors import (
    ApprovalDeniedError,
    ErrorCodeRegistry,
    ModuleExecuteError,
    ModuleTimeoutError,
)
from apcore.observability import MetricsCollector, MetricsMiddleware
from apcore.pipeline import PipelineContext, StepResult
from apcore.policy import ExecutionPolicy
from apcore.registry import load_metadata, validate_module
from apcore.schema.openai_strict import detect_openai_strict_incompatibilities
from apcore.trace_context import TraceContext
from apcore.utils.pattern import match_glob
from apcore.utils.redaction import REDACTED_VALUE
from jsonschema import Draft202012Validator
from jsonschema import ValidationError as InvalidAnswer
from jsonschema.validators import create, extend
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    RootModel,
    TypeAdapter,
    ValidationError,
)
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import (
    SchemaError,
    SchemaValidator,
    core_schema,
    from_json,
    to_json,
    to_jsonable_python,
)
from referencing import Registry as SchemaResources
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012
from typing_extensions import TypedDict

from . import __version__

if TYPE_CHECKING:
    from mcp.server.context import CallNext, ServerRequestContext
    from mcp.server.session import ServerSession
    from mcp.shared.message import SessionMessage
    from mcp_types import CallToolRequestParams, JSONRPCMessage, ReadResourceRequestParams
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

    RequestContext = ServerRequestContext[Any, Any]

logger = logging.getLogger("apcore_mcp")

MCP_PROGRESS_KEY = "_mcp_progress"
"""Where `context.data` holds the call's progress sender (SRS FR-EXT-003)."""

MCP_ELICIT_KEY = "_mcp_elicit"
"""Where `context.data` holds the call's way to ask its user (SRS FR-EXT-003)."""

JSONObject = dict[str, Any]
JSONSchema = JSONObject
P = ParamSpec("P")
T = TypeVar("T")


def _text_of(value: object) -> str:
    """What a module made for people to read, as text that any answer and log can hold; never raises."""
    try:
        return str(value).encode(errors="replace").decode()  # JSON cannot say half of a surrogate pair
    except BaseException:  # its class may do anything
        return "<not to be read>"


# What breaks a line, hides, moves or turns around what stands after it, or cannot be written.
_UNSEEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def _one_line(text: str) -> str:
    """`text` as it is, but for what would break its line: `a\\nb` for two lines."""
    return _UNSEEN.sub(lambda found: repr(found[0])[1:-1], text)


def _keep_to_its_lines(record: logging.LogRecord) -> bool:
    """Let no text of a client or a module begin a line of the log: of a traceback, all lines are indented."""
    if isinstance(record.args, tuple):
        record.args = tuple(_one_line(arg) if isinstance(arg, str) else arg for arg in record.args)
    if record.exc_info:
        trace = "".join(traceback.format_exception(record.exc_info[1]))
        record.exc_text = "\n".join(f"  {_one_line(line)}" for line in trace.split("\n"))
    return True


logger.addFilter(_keep_to_its_lines)


# ---- Options: every option of `serve()`, once ----

_TOOL_NAMES_HELP = "names with dots (module-id), with hyphens (portable), or as the client can take them (auto)"
_APPROVAL_HELP = "ask the user, or let run where the client cannot (auto); ask or refuse (require); deny; off"
_ALLOWED_HOSTS_HELP = "Host headers accepted beside addresses, localhost and --host; * stands for any port or name"
_EXCLUDE_HELP = "leave out modules whose id starts with one of these"
_TIMEOUT_HELP = "how long a call may take, 0 for no limit; without it apcore's 30 seconds a module and 60 a call"
_EXPLORER_PREFIX = re.compile(r"(?!/(mcp|sse|messages|health|metrics)(/|$)|.*/\.\.?(/|$))(/[\w.~-]+)+")


def _option(default: T, text: str, **flag: Any) -> T:
    """A field of `_Options`; `text` and `flag` also make its command line flag."""
    return dataclasses.field(default=default, metadata={"help": text, **flag})


class _OwnMetrics(MetricsCollector):
    """A collector made by an option, which nobody else feeds."""


@dataclasses.dataclass
class _Options:
    """What `serve()`, `async_serve()`, `MCPServer` and the command line take: the one list, checked on construction."""

    registry_or_executor: Registry | Executor | APCore
    _: dataclasses.KW_ONLY
    transport: str = _option("stdio", "MCP transport", choices=("stdio", "streamable-http", "sse"))
    host: str = _option("127.0.0.1", "address to listen on (HTTP transports)")
    port: int = _option(8000, "port to listen on, 1 to 65535 (HTTP transports)", type=int)
    name: str = _option("apcore-mcp", "server name told to clients, 255 characters at most")
    version: str | None = _option(None, "server version told to clients; without one, the package's")
    instructions: str | None = _option(None, "what agents are told about the server", metavar="TEXT")
    tags: Sequence[str] | None = _option(None, "serve only modules with all of these tags", nargs="+", metavar="TAG")
    prefix: str | None = _option(None, "serve only modules whose id starts with this")
    exclude: Sequence[str] | None = _option(None, _EXCLUDE_HELP, nargs="+", metavar="PREFIX")
    read_only: bool = _option(False, "serve only modules annotated readonly")
    log_level: str | None = _option(None, "log level, on stderr", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    on_startup: Callable[[], Any] | None = None
    on_shutdown: Callable[[], Any] | None = None
    dynamic: bool = _option(False, "load the files of the extensions directory again when they change")
    timeout: float | None = _option(None, _TIMEOUT_HELP, type=float, metavar="SECONDS")
    validate_inputs: bool = _option(False, "check arguments against the advertised schema before apcore does")
    tool_names: str = _option("auto", _TOOL_NAMES_HELP, choices=("auto", "module-id", "portable"))
    redact_output: bool = _option(True, "replace the values of output fields marked x-sensitive")
    approval: str | ApprovalHandler = _option("auto", _APPROVAL_HELP, choices=("auto", "require", "deny", "off"))
    stateless: bool = _option(False, "keep no sessions, for servers behind a load balancer (streamable-http)")
    allowed_hosts: Sequence[str] | None = _option(None, _ALLOWED_HOSTS_HELP, nargs="+", metavar="HOST")
    metrics_collector: Any = None
    middleware: Sequence[Any] | None = None
    output_formatter: Callable[[Any], str] | None = None
    explorer: bool = _option(False, "serve the Tool Explorer, a page to look at the tools (HTTP transports)")
    explorer_prefix: str = _option("/explorer", "path of the Tool Explorer")
    allow_execute: bool = _option(False, "let the Tool Explorer run tools")

    def __post_init__(self) -> None:
        source = self.registry_or_executor
        executor = getattr(source, "executor", None)  # of apcore's client, or of whatever has one
        if isinstance(executor, Executor):
            self.registry_or_executor = executor
        elif not isinstance(source, Registry | Executor):
            raise TypeError(f"Expected Registry or Executor instance, got {type(source).__name__}")
        for field in dataclasses.fields(self):
            self._check(field, getattr(self, field.name))
        if len(self.name) > 255:
            raise ValueError("name must not exceed 255 characters")
        if not all(self.tags or ()):
            raise ValueError("Tag values must not be empty")
        if not all(self.exclude or ()):
            raise ValueError("exclude must not hold an empty prefix, which would leave out everything")
        if self.transport != "stdio":
            if not self.host:
                raise ValueError("Host must not be empty")
            if not 1 <= self.port <= 65535:
                raise ValueError(f"Port must be between 1 and 65535, got {self.port}")
        prefix = self.explorer_prefix.rstrip("/")
        if not _EXPLORER_PREFIX.fullmatch(prefix):
            plain = "a path such as '/explorer', and none of /mcp, /sse, /messages, /health, /metrics"
            raise ValueError(f"explorer_prefix must be {plain}; got {prefix!r}")
        self.explorer_prefix = prefix
        if self.timeout is not None:
            if not 0 <= self.timeout < math.inf:
                raise ValueError(f"timeout must be a number of seconds, 0 for no limit; got {self.timeout}")
            if isinstance(self.registry_or_executor, Executor):
                raise ValueError("timeout is for a Registry: an Executor brings its own, of its Config")
        if isinstance(self.metrics_collector, bool):
            self.metrics_collector = _OwnMetrics() if self.metrics_collector else None
        elif self.metrics_collector is not None and not hasattr(self.metrics_collector, "export_prometheus"):
            raise TypeError(f"metrics_collector must have export_prometheus(), got {self.metrics_collector!r:.80}")
        if not all(hasattr(item, "cls") for item in self.middleware or ()):
            raise TypeError(f"middleware must be a list of Starlette's Middleware(...), got {self.middleware!r:.80}")

    def _check(self, field: dataclasses.Field[Any], value: Any) -> None:
        """Hold one value against its annotation and its choices, of which it becomes the one it is in whatever case."""
        try:
            _validators()[field.name].validate_python(value)
        except ValidationError:
            raise TypeError(f"{field.name} must be {field.type}, got {value!r:.80}") from None
        # A class looks like its objects.
        if isinstance(value, type) and field.name in ("approval", "metrics_collector"):
            raise TypeError(f"{field.name} must be an object, got {value!r:.80}")
        choices = field.metadata.get("choices")
        if choices and isinstance(value, str):
            chosen = next((choice for choice in choices if choice.lower() == value.lower()), None)
            if chosen is None:
                label = field.name.replace("_", " ")
                raise ValueError(f"Unknown {label}: {value!r}. Must be one of: {', '.join(choices)}")
            setattr(self, field.name, chosen)
        elif value == "" and field.name != "host":  # stdio has none
            raise ValueError(f"{field.name} must not be empty")

    @property
    def registry(self) -> Registry:
        source = self.registry_or_executor
        return source if isinstance(source, Registry) else self.executor.registry

    def policies(self) -> list[ExecutionPolicy]:
        """What an operator demands of calls, whatever modules say of themselves."""
        source = self.registry_or_executor
        steps = source.current_strategy.steps if isinstance(source, Executor) else ()
        return [step.policy for step in steps if isinstance(step, BuiltinApprovalGate) and step.policy]

    @functools.cached_property
    def executor(self) -> Executor:
        """The Executor that was given, or one made for the registry."""
        source = self.registry_or_executor
        if isinstance(source, Executor):
            return source
        config = None
        if self.timeout is not None:
            milliseconds = math.ceil(self.timeout * 1000)
            config = Config({"executor": {"default_timeout": milliseconds, "global_timeout": milliseconds}})
        return Executor(self.registry, config=config)

    def metrics_middleware(self) -> MetricsMiddleware | None:
        """What feeds the collector while the server runs; None where the Executor that was given does so itself."""
        collector = self.metrics_collector
        is_fed = isinstance(self.registry_or_executor, Executor) and not isinstance(collector, _OwnMetrics)
        return MetricsMiddleware(collector) if isinstance(collector, MetricsCollector) and not is_fed else None

    @property
    def url(self) -> str:
        """Where clients connect (HTTP transports)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{'/sse' if self.transport == 'sse' else '/mcp'}"


# What packages that build on this one pass as well: words that change nothing here, and others that are let pass only
# while they ask for nothing.
_WITHOUT_EFFECT = frozenset(
    "require_auth exempt_paths explorer_title explorer_project_name explorer_project_url async_max_concurrent"
    " async_max_tasks".split()
)
_ONLY_OFF = frozenset("approval_handler authenticator strategy trace observability output_format".split())


def _options_of(door: str, /, *given: Any, **options: Any) -> _Options:
    """The options that a caller of the public `door` gave; TypeError that names it for what is none."""
    unused = {name for name, value in options.items() if name in _ONLY_OFF and (value is None or value is False)}
    unused |= options.keys() & _WITHOUT_EFFECT
    taken = {name: value for name, value in options.items() if name not in unused}
    if "approval_handler" in taken and "approval" not in taken:
        taken["approval"] = taken.pop("approval_handler")
    try:
        inspect.signature(_Options).bind(*given, **taken)
    except TypeError as error:
        hint = ""
        if "authenticator" in taken:
            hint = " (authentication goes into middleware=)"
        elif "approval_handler" in taken:
            hint = " (it is approval, given twice)"
        raise TypeError(f"{door} {error}{hint}") from None
    if unused:
        logger.debug("%s: without effect here: %s", door, ", ".join(sorted(unused)))
    return _Options(*given, **taken)


def _set_log_level(options: _Options) -> None:
    """Not the root's level: the SDK logs whole messages at DEBUG, sensitive arguments included."""
    if options.log_level is not None:
        logging.basicConfig()
        logger.setLevel(options.log_level)


@functools.cache
def _validators() -> dict[str, TypeAdapter[Any]]:
    """What holds a value against the annotation of each option: nothing is converted, so `"8000"` is no port."""
    # Any bound on its length makes pydantic read a text, and refuse what UTF-8 cannot say.
    config = ConfigDict(strict=True, arbitrary_types_allowed=True, str_min_length=0)
    kinds = get_type_hints(_Options)
    return {field.name: TypeAdapter(kinds[field.name], config=config) for field in dataclasses.fields(_Options)}


# ---- Schemas: JSON Schema in, a self-contained one out; pure ----

# Which keywords of a schema hold schemas: those of 2020-12, and older ones that mean nothing in it. What stands under
# any other keyword is data, so a "$ref" in a `const`, an `enum` or a `default` is no reference.
_SCHEMA_MAPS = frozenset("properties patternProperties dependentSchemas dependencies $defs definitions".split())
_WITH_SCHEMAS = _SCHEMA_MAPS.union(
    "anyOf oneOf allOf not if then else prefixItems items additionalItems unevaluatedItems contains"
    " additionalProperties unevaluatedProperties propertyNames contentSchema".split()
)
# What constrains a value, to apcore or to clients of another mind; any other keyword describes it.
_CONSTRAINTS = {*Draft202012Validator.VALIDATORS, "then", "else", "dependencies", "nullable"}
# Of properties that no name tells.
_OTHER_PROPERTIES = frozenset("patternProperties additionalProperties unevaluatedProperties".split())

_Model = type(BaseModel)  # what each model is one of
_EXAMPLES = frozenset("default examples".split())
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# What references lead to or by, and other dialects; nothing is left of it when references are written out. (MCP's
# conformance suite looks for a dialect that holds.)
_FOR_REFERENCES = frozenset("$schema $defs definitions $id id $anchor $dynamicAnchor discriminator".split())
_REF_DEPTH_MAX = 32  # references inside references (SRS FR-SCHEMA-002)
# Schemas in one inlined schema; definitions that use each other twice double it at every level. What a reference leads
# to counts as one for each 100 bytes: one long text may be referred to from everywhere.
_NODES_MAX = 50_000
_BYTES_A_NODE = 100

# What the metaschema of 2020-12 says of one schema; of those inside it only that they are some. It means the same to
# pydantic, a hundred times faster than the metaschema itself.
_Schema = JSONObject | bool
_Type = Literal["null", "boolean", "object", "array", "number", "string", "integer"]
_Distinct = Predicate(lambda names: len({*names}) == len(names))
_Names = Annotated[list[str], _Distinct]
_LEGAL: JSONObject = {
    **dict.fromkeys(_WITH_SCHEMAS, _Schema),
    "properties dependentSchemas $defs definitions": dict[str, _Schema],
    "patternProperties": dict[re.Pattern[str], _Schema],
    "anyOf oneOf allOf prefixItems": Annotated[list[_Schema], Field(min_length=1)],
    "type": _Type | Annotated[list[_Type], Field(min_length=1), _Distinct],
    "required": _Names,
    "dependentRequired": dict[str, _Names],
    "enum examples": list[Any],
    "minimum maximum exclusiveMinimum exclusiveMaximum": float,
    "multipleOf": PositiveFloat,
    "minLength maxLength minItems maxItems minProperties maxProperties minContains maxContains": NonNegativeInt,
    "uniqueItems deprecated readOnly writeOnly": bool,
    "pattern": re.Pattern[str],
    "$ref $comment title description format contentEncoding contentMediaType": str,
}
_KINDS = {keyword: kind for keywords, kind in _LEGAL.items() for keyword in keywords.split()}
_NODE = TypeAdapter[Any](cast(Any, TypedDict)("JSON Schema (2020-12)", _KINDS, total=False))


def _map_subschemas(schema: JSONSchema, change: Callable[[Any], object]) -> JSONSchema:
    """Copy `schema` with `change` applied to each schema directly inside it.

    It is not asked of `true` and `false` where everybody writes them to open and close an object.
    """

    def changed(item: Any) -> Any:
        if isinstance(item, list):
            return [changed(each) for each in item]
        return change(item) if isinstance(item, dict | bool) else item

    copied = {}
    for keyword, value in schema.items():
        if keyword in _SCHEMA_MAPS:
            value = {name: changed(each) for name, each in value.items()}
        elif keyword in _WITH_SCHEMAS and not (keyword in _OTHER_PROPERTIES and isinstance(value, bool)):
            value = changed(value)
        copied[keyword] = value
    return copied


def _branches(schema: JSONSchema, keywords: Collection[str]) -> list[JSONSchema]:
    """The schemas directly inside `schema` that stand under `keywords`."""
    found: list[JSONSchema] = []
    _map_subschemas({key: value for key, value in schema.items() if key in keywords}, found.append)
    return found


def _marks_sensitive(schema: JSONSchema) -> bool:
    """Whether anything in `schema`, legal or not, is marked `x-sensitive`."""
    return b'"x-sensitive":true' in to_json(schema, fallback=str)


def _plain(value: Any) -> Any:
    """Copy `value` into plain JSON types; ValueError for what JSON cannot say, NaN included."""
    return from_json(to_json(value), allow_inf_nan=False)


def _is_json(value: Any) -> bool:
    try:
        _plain(value)
    except ValueError:
        return False
    return True


def _properties(schema: JSONSchema) -> Any:
    return schema.get("properties", {})


def _required(schema: JSONSchema) -> Any:
    return schema.get("required", [])


def _types(schema: JSONSchema) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


class _Unconvertible(ValueError):
    """A legal schema that cannot be written out: an output schema costs its tool only that."""


class _SchemaConverter:
    """Write what each `$ref` points at in its place: `{"$ref": "#/$defs/Size"}` becomes the schema of a size.

    The result accepts exactly what apcore accepts by the schema, which it reads as 2020-12 whatever `$schema` says. It
    is refused with ValueError when the metaschema refuses it, for a reference to itself, one more than 32 references
    deep, a dynamic one, and a result of more than 50,000 nodes; with KeyError for a reference to nothing. A default
    that JSON cannot say is left out, and what else a marked value is when nobody gives one. When what is `declared` is
    a model, values are held against it by pydantic: a pattern that only its engine can read is left out.
    """

    def __init__(self, declared: object = None) -> None:
        self._by_pydantic = isinstance(declared, _Model)
        self._nodes = 0

    def inline(self, schema: JSONSchema) -> JSONSchema:
        """Return `schema` without references and without definitions. Source: SRS FR-SCHEMA-002."""
        resolver = SchemaResources().resolver_with_root(DRAFT202012.create_resource(schema))
        return self._visit(schema, resolver, {id(schema): "#"})

    def _visit(self, node: Any, resolver: Any, opened: dict[int, str]) -> JSONSchema:
        """Copy `node`. `opened` are the schemas that references led to, outermost first, and by which.

        `true` becomes `{}` and `false` `{"not": {}}`, as MCP wants objects.
        """
        if isinstance(node, bool) or node.get("enum") == []:  # which is legal, but not to AJV
            return {} if node is True else {"not": {}}
        self._nodes += 1
        if self._nodes > _NODES_MAX or len(opened) > _REF_DEPTH_MAX + 1:
            raise _Unconvertible(f"Maximum recursion depth exceeded: {_REF_DEPTH_MAX} references, {_NODES_MAX} nodes")
        if "$dynamicRef" in node or ("$id" in node and id(node) not in opened):
            raise _Unconvertible("$dynamicRef, and $id anywhere but in a definition, are not supported")
        kept = {key: value for key, value in node.items() if key not in _FOR_REFERENCES or value == _DIALECT}
        if self._by_pydantic:
            try:
                re.compile(kept.get("pattern", ""))
            except re.error:
                del kept["pattern"]
        _NODE.validate_python(kept, strict=True)
        result = _map_subschemas(kept, lambda inner: self._visit(inner, resolver, opened))
        if "$ref" in result:
            target = self._target(result.pop("$ref"), resolver, opened)
            if result.keys() & _CONSTRAINTS:
                # What a reference beside constraints means; merging would let one constraint replace another.
                result["allOf"] = [target, *result.get("allOf", ())]
            else:
                result = {**target, **result}
        if not _EXAMPLES.isdisjoint(result) and (_marks_sensitive(result) or not _is_json(result)):
            for keyword in _EXAMPLES:
                result.pop(keyword, None)
        return result

    def _target(self, ref: str, resolver: Any, opened: dict[int, str]) -> JSONSchema:
        name = posixpath.basename(unquote(ref))
        try:
            resolved = resolver.lookup(ref)
        except Unresolvable:
            raise KeyError(f"definition {name} is missing") from None
        target = resolved.contents
        self._nodes += len(to_json(target, fallback=str)) // _BYTES_A_NODE
        if id(target) in opened:
            path = [*opened.values(), name]
            raise _Unconvertible(f"Circular reference: {' -> '.join(path[path.index(name) :])}")
        return self._visit(target, resolved.resolver, {**opened, id(target): name})


def _admits_object(schema: JSONSchema) -> bool:
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(map(_admits_object, schema[keyword])):
            return False
    return "object" in (_types(schema) or ["object"])


_ALIASES = frozenset(["alias", "validation_alias", "serialization_alias"])  # of a field, to pydantic-core


class _SentSchema(GenerateJsonSchema):
    """A model's JSON schema where it says no more than what holds of all that is sent of the model."""

    has_aliases = False

    def generate_inner(self, schema: Any) -> JSONSchema:
        self.has_aliases = self.has_aliases or not _ALIASES.isdisjoint(schema)
        return super().generate_inner(schema)

    def ser_schema(self, schema: Any) -> JSONSchema | None:
        if "function" in schema and "return_schema" not in schema:
            return {}  # what a serializer gives that does not say it
        return super().ser_schema(schema)

    def enum_schema(self, schema: Any) -> JSONSchema:
        return {"type": "integer"} if issubclass(schema["cls"], enum.Flag) else super().enum_schema(schema)

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JSONSchema:
        return {}


def _either(schemas: list[JSONSchema]) -> JSONSchema:
    """What holds of a value that one of `schemas` accepts.

    Of objects it is what each says of its own properties, and that those are required which all of them require.
    """
    distinct: list[JSONSchema] = []
    for schema in schemas:
        if schema not in distinct:
            distinct.append(schema)
    if len(distinct) == 1:
        return distinct[0]
    if not all("properties" in schema for schema in distinct):
        return {"anyOf": distinct}
    properties = _each_of_either([schema["properties"] for schema in distinct])
    required = set.intersection(*({*_required(schema)} for schema in distinct))
    return {**distinct[0], "properties": properties, "required": sorted(required)}


def _each_of_either(maps: list[dict[str, JSONSchema]]) -> dict[str, JSONSchema]:
    names = dict.fromkeys(itertools.chain(*maps))
    return {name: _either([schemas[name] for schemas in maps if name in schemas]) for name in names}


def _in_every_form(declared: Any, described: JSONSchema) -> JSONSchema:
    """What holds of a module's values in each form in which they may be given or sent.

    `described` is what apcore says of them: all there is for a dict schema. A model takes and gives its fields by name
    or alias, and gives what its serializers make of them.
    """
    if not isinstance(declared, _Model):
        return described
    core = TypeAdapter(declared).core_schema
    generator = _SentSchema()
    forms = [{**described}, generator.generate(core, "serialization")]
    if generator.has_aliases:
        forms.append(_SentSchema(by_alias=False).generate(core, "validation"))
        forms.append(_SentSchema(by_alias=False).generate(core, "serialization"))
    definitions = _each_of_either([form.pop("$defs", {}) for form in forms])
    return {**_either(forms), "$defs": definitions}


def _input_schema(descriptor: ModuleDescriptor, declared: Any) -> JSONSchema:
    """The module's arguments as a self-contained object schema (SRS FR-SCHEMA-001, -003, -004, -006).

    `{}` becomes `{"type": "object", "properties": {}}`; a union of objects gets `"type": "object"` beside it.
    ValueError or KeyError for a schema that cannot be converted, or whose root is not an object.
    """
    schema = _SchemaConverter(declared).inline(descriptor.input_schema) or {"properties": {}}
    if not _admits_object(schema):
        raise ValueError(f"Input schema must describe an object, got type {schema.get('type')!r}")
    return {**schema, "type": "object"}


def _function_of(module: FunctionModule) -> Callable[..., Any]:
    return module._func  # pyright: ignore[reportPrivateUsage]  # of which there is no public name


def _is_closed(module: Any) -> bool:
    """Whether a module is a function that takes no other arguments than those of its schema."""
    if not isinstance(module, FunctionModule) or not isinstance(module.input_schema, _Model):
        return False  # a dict schema says it of itself
    if module.input_schema.model_config.get("extra") == "allow":
        return False
    # The schema of a binding does not say it of its function.
    return inspect.getfullargspec(inspect.unwrap(_function_of(module))).varkw is None


class _Returned(RootModel[T]):
    model_config = ConfigDict(arbitrary_types_allowed=True)


def _declared_output(module: Any) -> Any:
    """A module's output schema; for a function that returns a `dict[str, ...]` a model of it: apcore's says nothing."""
    if isinstance(module, FunctionModule):
        with suppress(NameError):
            returned = get_type_hints(_function_of(module), include_extras=True).get("return")
            if get_origin(returned) is dict and not getattr(module.output_schema, "model_fields", True):
                return cast(Any, _Returned)[returned]
    return getattr(module, "output_schema", None)


def _is_valid(value: Any, schema: JSONSchema) -> bool:
    return Draft202012Validator(schema).is_valid(value)


def _nullable(schema: JSONSchema) -> JSONSchema:
    """`schema`, letting null through."""
    if _is_valid(None, schema):
        return schema
    nullable = {**schema}
    if "type" in schema:
        nullable["type"] = [*dict.fromkeys([*_types(schema), "null"])]
    if "enum" in schema:
        nullable["enum"] = [*schema["enum"], None]
    return nullable if _is_valid(None, nullable) else {"anyOf": [schema, {"type": "null"}]}


# ---- Secrets: which values of a schema are marked, and what stands in their place; pure ----

# Schemas beside others apply to the same value. Of the rest, `_inside` finds which apply to a part of it; where it does
# not look, a mark hides the whole.
_BESIDE = frozenset("anyOf oneOf allOf not if then else dependentSchemas dependencies".split())
_ITEMS = frozenset("items additionalItems unevaluatedItems".split())
_NOT_FOLLOWED = frozenset("contains propertyNames contentSchema".split())


def _is_blanked(view: JSONSchema) -> bool:
    return view.get("x-sensitive") is True or any(map(_marks_sensitive, _branches(view, _NOT_FOLLOWED)))


def _marks(schema: JSONSchema) -> JSONSchema:
    """What `schema` marks `x-sensitive`, as a schema that says nothing else: what marks nothing is `{}`.

    `{"properties": {"a": {"type": "string", "x-sensitive": True}, "b": {"type": "string"}}, "title": "A"}` becomes
    `{"properties": {"a": {"x-sensitive": True}, "b": {}}}`.
    """
    if not _marks_sensitive(schema):
        return {}
    if _is_blanked(schema):
        return {"x-sensitive": True}
    marks = _map_subschemas({key: value for key, value in schema.items() if key in _WITH_SCHEMAS}, _marks)
    for keyword in ("anyOf", "oneOf", "allOf"):
        if keyword in marks:
            marks[keyword] = [branch for branch in marks[keyword] if branch]  # or each result looks into all of them
    return marks


def _views(*schemas: JSONSchema, under: Collection[str] = _BESIDE) -> Iterator[JSONSchema]:
    """`schemas` and everything in them that may apply to the same value, or whatever else stands `under` keywords."""
    for schema in schemas:
        yield schema
        yield from _views(*_branches(schema, under), under=under)


def _inside(views: Iterable[JSONSchema], step: str | int) -> Iterator[JSONSchema]:
    """What may apply to one property or item of the value that `views` describe."""
    for view in views:
        if isinstance(step, int):
            yield from view.get("prefixItems", ())[step : step + 1] or _branches(view, _ITEMS)
        elif step in _properties(view):
            yield view["properties"][step]
            for pattern, inner in view.get("patternProperties", {}).items():
                if re.search(pattern, step):
                    yield inner
        else:  # some patterns would keep Python's `re` busy with a name for hours: any of them may fit
            yield from _branches(view, _OTHER_PROPERTIES)


def _redact(value: Any, *marks: JSONSchema) -> Any:
    """Copy plain JSON with `***REDACTED***` for what one of `marks`, made by `_marks`, says is sensitive.

    It goes where there are marks and no further. apcore's own redaction passes over maps (`additionalProperties`), and
    by default blanks innocent keys by substring ("author", "tokens_used").
    """
    views = [view for view in _views(*marks) if view]
    if value is None or not views:
        return value
    if any("x-sensitive" in view for view in views):
        return REDACTED_VALUE
    if isinstance(value, list):
        return [_redact(item, *_inside(views, index)) for index, item in enumerate(value)]
    if isinstance(value, dict):
        return {name: _redact(item, *_inside(views, name)) for name, item in value.items()}
    return value


def _redact_arguments(arguments: JSONSchema, registry: Any, module_id: str) -> Any:
    """Copy what a module is called with, in plain JSON, without what its schema marks under any name.

    KeyError where that cannot be told: a model may know an argument by a name that its schema does not have.
    """
    declared = registry.get(module_id).input_schema
    known = _in_every_form(declared, registry.get_definition(module_id).input_schema)
    marks = _marks(_SchemaConverter(declared).inline(known))
    if marks and isinstance(declared, _Model) and not arguments.keys() <= marks["properties"].keys():
        raise KeyError(module_id)
    return _redact(arguments, marks)


# ---- Tools: a module as clients see it: its names, what is said of it, its schemas; pure ----

_NAME_MAX = 64  # characters; the limit of OpenAI's function names and of Claude's tool names

# How `clientInfo.name` begins for clients that lose all tools by one name with a dot; npm's `mcp-client-capabilities`
# lists what clients call themselves.
_CLIENTS_WITHOUT_DOTS = re.compile(
    "claude-ai"  # Claude Desktop, claude.ai: ^[a-zA-Z0-9_-]{1,64}$; behind mcp-remote (pull request 63) more follows
    "|github-copilot-developer"  # Copilot CLI: its issues 1879 and 2581
    r"|JetBrains-\w+-copilot"  # Copilot in JetBrains' IDEs: microsoft/copilot-intellij-feedback, issue 1583
)
_ALIAS = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def _portable_name(module_id: str) -> str:
    """`image.resize` becomes `image-resize`; past 64 characters, 54 of them and a hash that never changes."""
    name = module_id.replace(".", "-")
    if len(name) <= _NAME_MAX:
        return name
    return f"{name[: _NAME_MAX - 10]}-0{hashlib.sha256(module_id.encode()).hexdigest()[:8]}"


_HINTS = {
    "readOnlyHint": "readonly",
    "destructiveHint": "destructive",
    "idempotentHint": "idempotent",
    "openWorldHint": "open_world",
}
_FLAGS = ("requires_approval", "streaming", "cacheable", "paginated")
_SUFFIX_FIELDS = ("readonly", "destructive", "idempotent", "requires_approval", "open_world")
_DEFAULT_ANNOTATIONS = ModuleAnnotations()
_DEPRECATED = {"deprecated_since": "since", "sunset_version": "until", "sunset_date": "until"}
_FOR_AGENTS = ("When to use", "When not to use", "Common mistakes", "Workflow hints")  # in metadata, "x-when-to-use"


class _AnnotationMapper:
    """Say what apcore knows of one module in the words of MCP and OpenAI.

    `annotations` are the module's, but of approval they say what the `policies` of the Executor demand. `alias` is the
    name that apcore's display overlay wishes for; the overlay's description wins over the module's. A paragraph each
    follows of what else is there for agents, at last the notice of a deprecated module: "Deprecated since 1.2, until
    2.0. Use image.scale." The overlay stands in the metadata (apcore-toolkit puts it there), or is the `display` that a
    function or a binding was registered with.
    """

    def __init__(self, descriptor: ModuleDescriptor, policies: list[ExecutionPolicy], display: Any) -> None:
        self._descriptor = descriptor
        declared = descriptor.annotations or _DEFAULT_ANNOTATIONS
        asked = [policy.resolve(descriptor.module_id, declared).needs_approval for policy in policies]
        self.annotations = dataclasses.replace(declared, requires_approval=any(asked or [declared.requires_approval]))
        self.title = {"title": descriptor.name} if descriptor.name else {}
        metadata = descriptor.metadata
        overlay: JSONObject = {}
        with suppress(KeyError, TypeError):  # in apcore's metadata any word may mean anything
            overlay = {**(metadata.get("display") or display)["mcp"]}
        self.alias = _text_of(overlay.get("alias") or descriptor.module_id)
        paragraphs = [overlay.get("description") or descriptor.description]
        advice = {"Guidance": overlay.get("guidance")}
        for title in _FOR_AGENTS:
            advice[title] = metadata.get(f"x-{title.lower().replace(' ', '-')}")
        paragraphs += [f"{title}: {text}" for title, text in advice.items() if text]
        notice = metadata.get("x-deprecation")
        if notice:
            facts = [f" {word} {notice[key]}" for key, word in _DEPRECATED.items() if notice.get(key)]
            paragraphs.append(f"Deprecated{','.join(facts)}. {notice.get('migration_guide') or ''}")
        self.description = "\n\n".join(paragraphs).strip()

    def to_mcp(self) -> JSONObject:
        """What a tool's definition says beside its name and schemas (SRS FR-ANNOT-001 to -006)."""
        # To apcore anything is true or false, to clients only those two are.
        hints = {hint: bool(getattr(self.annotations, name)) for hint, name in _HINTS.items()}
        flags = {f"apcore/{flag}": bool(getattr(self.annotations, flag)) for flag in _FLAGS}
        meta = {**flags, "apcore/version": self._descriptor.version, "apcore/tags": self._descriptor.tags}
        return {**self.title, "description": self.description, "annotations": {**self.title, **hints}, "_meta": meta}

    def to_suffix(self) -> str:
        r"""What differs from the defaults, for a function's description (SRS FR-ANNOT-007).

        `"\n\n[Annotations: readonly=true, idempotent=true]"`, or `""` when nothing does.
        """
        different = []
        for name in _SUFFIX_FIELDS:
            value = getattr(self.annotations, name)
            if value != getattr(_DEFAULT_ANNOTATIONS, name):
                different.append(f"{name}={str(value).lower()}")
        return f"\n\n[Annotations: {', '.join(different)}]" if different else ""


class _Tool:
    """One listed module: everything about it that does not change from call to call.

    `name` is what clients call it: its alias as long as the catalog knows of no other tool that could be meant.
    ValueError or KeyError when the module cannot be a tool, saying why.
    """

    def __init__(self, descriptor: ModuleDescriptor, module: Any, options: _Options) -> None:
        self.descriptor = descriptor
        self.module_id = descriptor.module_id
        self.documentation = _text_of(descriptor.documentation or "")
        self.about = _AnnotationMapper(descriptor, options.policies(), getattr(module, "display", None))
        self.name = self.about.alias
        self.model: Any = getattr(module, "input_schema", None)  # what apcore holds arguments against
        self.is_closed = _is_closed(module)
        inputs = _input_schema(descriptor, self.model)
        if self.is_closed:
            inputs["additionalProperties"] = False
        output = self._output(_declared_output(module), options.redact_output)
        # What results are redacted by; {} when nothing is sensitive.
        self.marks = _marks(output) if options.redact_output else {}
        self.media = _media(output)  # properties that are sent as files, with their media types
        definition = {"name": self.name, **self.about.to_mcp(), "inputSchema": inputs}
        promise = _promise(output)
        # Codex shows its model the structured content instead of the content: with both, files would be lost.
        if output and _admits_object(promise) and not self.marks and not self.media:
            definition["outputSchema"] = {**promise, "type": "object"}
        # One tool that JSON cannot say would break the whole list, and so would one that nests too deeply for a parser
        # where it stands in the answer.
        answer = _plain({"result": {"tools": [definition]}})
        self._definition: JSONObject = answer["result"]["tools"][0]
        self.input_schema = self._definition["inputSchema"]
        self.output_schema = self._definition.get("outputSchema", {})  # as advertised; {} when none is
        # The documentation as MCP's `resources/list` sends it.
        uri = f"docs://{self.module_id}"
        self.resource = {"uri": uri, "name": self.module_id, **self.about.title, "mimeType": "text/plain"}

    def _output(self, declared: Any, redact_output: bool) -> JSONSchema:
        """What is known of results as they are sent; {} when nothing is (SRS FR-SCHEMA-005)."""
        known = _in_every_form(declared, self.descriptor.output_schema)
        try:
            return _SchemaConverter(declared).inline(known)
        except _Unconvertible as error:
            if redact_output and _marks_sensitive(known):
                raise
            logger.warning("Module %s is served without its output schema: %s", self.module_id, error)
            return {}

    @functools.cached_property
    def promise(self) -> SchemaValidator:
        """The advertised output schema to pydantic's engine, a hundred times faster than jsonschema."""
        return SchemaValidator(_core_schema(self.output_schema))

    def definition(self, *, portable: bool = False) -> JSONObject:
        """The tool as MCP's `tools/list` sends it (SRS FR-SERVER-011)."""
        return {**self._definition, "name": _portable_name(self.name) if portable else self.name}


def _media(schema: JSONSchema) -> dict[str, str]:
    """The properties that are files, with their media types: strings of base64 that have one."""
    found: dict[str, str] = {}
    for view in _views(schema):
        for name, field in _properties(view).items():
            for said in _views(field):
                if said.get("contentEncoding") == "base64" and "contentMediaType" in said:
                    found.setdefault(name, said["contentMediaType"])
    return found


# What an output schema says of a result: what still holds where less is said inside, and means the same to AJV, which
# TypeScript clients use. That reads draft 7, knows most of the rest not or in another sense, and stops at Python's
# everyday patterns; formats are checked by these clients alone, and not as Python means them (times without a zone,
# addresses in Unicode); 1.13 is no multiple of 0.01 where floats are not allowed for. Lengths are those of other texts
# than the one that is sent (bytes, secrets, what is stripped first), and what closes an object knows no computed field.
_PROMISED = frozenset(
    "type properties required additionalProperties items prefixItems anyOf oneOf allOf enum const minimum maximum"
    " exclusiveMinimum exclusiveMaximum minItems maxItems".split()
)


def _promise(schema: JSONSchema) -> JSONSchema:
    """What holds by `schema` of a value as it is sent: never stricter than that."""
    unsaid = {key for key in schema if key.startswith(("format", "$"))}  # AJV knows more of these
    unsaid |= _CONSTRAINTS - _PROMISED
    if "prefixItems" in schema:
        unsaid.add("items")
    if "patternProperties" in schema or schema.get("additionalProperties") is False:
        unsaid.add("additionalProperties")
    # Of several variants more than one may hold where less is said of each.
    said = {"anyOf" if key == "oneOf" else key: value for key, value in schema.items() if key not in unsaid}
    promise = _map_subschemas(said, _promise)
    # Nobody holds a default against its field, `size: int = None`.
    return _nullable(promise) if schema.get("default", promise) is None else promise


def _core_schema(schema: Any) -> Any:
    """What pydantic-core holds plain JSON against: it takes nothing that `schema` refuses, and most of the rest.

    `schema` says no more than what is promised of results.
    """
    if schema is True or not schema.keys() & _PROMISED:
        return core_schema.any_schema()
    said = schema.get
    number = core_schema.float_schema(
        strict=True, ge=said("minimum"), le=said("maximum"), gt=said("exclusiveMinimum"), lt=said("exclusiveMaximum")
    )
    items = [_core_schema(item) for item in schema.get("prefixItems", ())]
    required = _required(schema)
    properties = _properties(schema)
    fields: JSONObject = {}
    for name in {*required, *properties}:
        field = _core_schema(properties.get(name, {}))
        fields[name] = core_schema.typed_dict_field(field, required=name in required)
    kinds: JSONObject = {
        "null": core_schema.none_schema(),
        "boolean": core_schema.bool_schema(strict=True),
        "string": core_schema.str_schema(strict=True),
        "integer": core_schema.chain_schema([number, core_schema.int_schema()]),
        "number": number,
        "array": core_schema.tuple_schema(
            [*items, _core_schema(schema.get("items", {}))],
            variadic_item_index=len(items),
            min_length=said("minItems"),
            max_length=said("maxItems"),
        ),
        "object": core_schema.typed_dict_schema(
            fields,
            extra_behavior="allow",
            extras_schema=_core_schema(schema.get("additionalProperties", {})),
        ),
    }
    unions = [[kinds[kind] for kind in _types(schema) or kinds]]
    if "anyOf" in schema:
        unions.append([_core_schema(part) for part in schema["anyOf"]])
    every: list[Any] = [core_schema.union_schema(union, mode="left_to_right") for union in unions]
    every += [_core_schema(part) for part in schema.get("allOf", ())]
    if "const" in schema:
        every.append(core_schema.literal_schema([schema["const"]]))
    if "enum" in schema:
        every.append(core_schema.literal_schema(schema["enum"]))
    return core_schema.chain_schema(every)


# ---- Results: a module's output as an MCP result; pure ----


def _to_text(value: Any) -> str:
    return to_json(value, fallback=str, bytes_mode="base64").decode()


@functools.lru_cache
def _writer_of_bytes(kind: type) -> TypeAdapter[Any] | None:
    """What gives the fields of a model that holds bytes."""
    if not hasattr(kind, "__pydantic_core_schema__"):
        return None
    adapter = TypeAdapter[Any](kind)
    schema = _SentSchema().generate(adapter.core_schema, "serialization")
    return adapter if b'"format":"binary"' in to_json(schema, fallback=str) else None


def _written_out(value: Any, decimal: type) -> Any:
    """Copy containers without what JSON would misstate in them.

    That is models that hold bytes, which they would write as text, if that they are; and a Decimal, which would always
    become text, is made what `decimal` says: `str`, or `float` where apcore has taken it for a number.
    """
    if isinstance(value, dict):
        return {key: _written_out(item, decimal) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_written_out(item, decimal) for item in value]
    if isinstance(value, Decimal):
        return decimal(value)
    writer = _writer_of_bytes(cast(Any, type(value)))
    return writer.dump_python(value, by_alias=True) if writer else value


def _not_json(reason: object) -> ModuleError:
    return ModuleError("OUTPUT_SERIALIZATION_ERROR", f"output is not JSON: {_text_of(reason)}")


def _as_json(tool: _Tool, output: Any, decimal: type = str) -> tuple[str, Any, list[JSONObject]]:
    """A module's output as JSON text, the same value in plain types, and its files as MCP content.

    Sensitive fields are redacted. Dates become ISO text, enums their values, bytes base64, anything unknown `str()`
    (SRS FR-EXEC-002). ModuleError OUTPUT_SERIALIZATION_ERROR for what JSON cannot say (NaN, infinity, a cycle) and for
    a file that is not base64.
    """
    try:
        text = _to_text({} if output is None else _written_out(output, decimal))
        value = from_json(text, allow_inf_nan=False)
        if tool.marks:
            value = _redact(value, tool.marks)
        files = []
        for name, kind in tool.media.items():
            if value.get(name) != REDACTED_VALUE:
                data = value.pop(name, None)
                if data:
                    files.append(_media_content(tool, name, kind, data))
        if tool.marks or tool.media:
            text = _to_text(value)
        return text, value, files
    except Exception as error:  # a module's own __str__ may raise anything
        raise _not_json(error) from None


def _media_content(tool: _Tool, name: str, kind: str, data: str) -> JSONObject:
    """One file as MCP content; ValueError when `data` is no base64."""
    data = data.replace("-", "+").replace("_", "/")  # pydantic writes the alphabet of URLs, MCP reads the standard one
    base64.b64decode(data, validate=True)
    family = kind.split("/")[0]
    if family in ("image", "audio"):
        return {"type": family, "data": data, "mimeType": kind}
    resource = {"uri": f"media://{tool.module_id}/{quote(name)}", "mimeType": kind, "blob": data}
    return {"type": "resource", "resource": resource}


def _success(tool: _Tool, output: Any, formatter: Callable[[Any], str] | None = None, label: str = "") -> JSONObject:
    """A module's output as a tool result: text, files, and structured content where a schema is advertised (F-013).

    `formatter` writes the text from the plain value instead of JSON; when it fails, the text is JSON, and the log has
    the `label` of the call. SchemaValidationError for what the advertised schema refuses.
    """
    text, value, files = _as_json(tool, output)
    if not tool.promise.isinstance_python(value):
        text, value, files = _as_json(tool, output, float)
        # apcore holds most outputs against the schema, but not None, the whole of a stream, what its middleware or
        # a model's own validators make of them, nor as JSON. A client would refuse the result.
        errors: list[JSONObject] = []
        for error in Draft202012Validator(tool.output_schema).iter_errors(value):
            path = "/".join(map(str, error.absolute_path))
            errors.append({"path": path, "keyword": error.validator, "message": error.message})
        if errors:
            raise SchemaValidationError(f"Output validation failed: {errors}", errors)
    if formatter is not None:
        try:
            # It is given a copy, and what it writes may hold no half of a surrogate pair.
            text = str.encode(formatter(from_json(text)), errors="replace").decode()
        except Exception:  # a user's own function
            logger.exception("output_formatter failed, so %s is answered in JSON", label)
    result = {"content": [{"type": "text", "text": text}, *files], "isError": False, "resultType": "complete"}
    if tool.output_schema:
        result["structuredContent"] = value
    return result


# ---- Errors: what went wrong, in a plain sentence for the client and in full for the log; pure ----

# What a client is told, by apcore's error code (SRS 7.5).
_SENTENCES = {
    "MODULE_NOT_FOUND": "Module not found: {module_id}",
    "MODULE_DISABLED": "Module is disabled: {module_id}",
    "ACL_DENIED": "Access denied",
    "MODULE_TIMEOUT": "Module timed out after {timeout_ms}ms",
    "GENERAL_INVALID_INPUT": "Invalid input: {message}",
    "CALL_DEPTH_EXCEEDED": "Call depth limit exceeded",
    "CIRCULAR_CALL": "Circular call detected",
    "CALL_FREQUENCY_EXCEEDED": "Call frequency limit exceeded",
    "EXECUTION_CANCELLED": "Execution was cancelled",
    "APPROVAL_DENIED": "Approval was denied",
    "APPROVAL_TIMEOUT": "Approval was not given in time",
    "APPROVAL_PENDING": "Approval is still pending",
    "OUTPUT_SERIALIZATION_ERROR": "Failed to serialize module output",
}
_ANY_OTHER = "Module error: {code}"
_UNEXPECTED = "Internal error occurred"


def _failure(text: str, code: str, **report: Any) -> JSONObject:
    """An error as a tool result, with its machine-readable form in `_meta` (tool document specification, section 5).

    No `structuredContent`: the TypeScript client would hold it against the output schema.
    """
    meta = {"apcore-mcp/error": {"status": "failure", "error_type": code, "error_message": text, **report}}
    return {"content": [{"type": "text", "text": text}], "isError": True, "resultType": "complete", "_meta": meta}


_ERRORS_MAX = 20  # that a client is told of one call
_ERRORS_SEEN = 1_000  # to find these
_ERROR_CHARACTERS = 1_000  # of a field's path, and of what is wrong with it


# One thing that is wrong with arguments: where, a code, a message. As long as no branches of unions are chosen, the
# steps also name these: `("pet", "Dog", "kind")`.
_Steps = tuple[Any, ...]
_Fault = tuple[_Steps, str, str]


def _faults(tool: _Tool, arguments: JSONObject) -> Iterator[list[_Fault]]:
    """What apcore finds wrong with arguments: for each of its errors all that it leaves out.

    A pydantic model is asked as apcore does it: its engine takes no time for what keeps Python's `re` and jsonschema
    busy for minutes. They only see what apcore itself shows to them, the arguments of a module with a dict schema.
    """
    if not hasattr(tool.model, "model_validate_json"):
        for error in Draft202012Validator(tool.input_schema).iter_errors(arguments):
            yield [*_faults_of(error)]
        return
    for name in _unknown(tool, arguments):
        yield [((name,), "extra_forbidden", "Extra inputs are not permitted")]
    try:
        tool.model.model_validate_json(json.dumps(arguments, default=str), strict=True)
    except ValidationError as refusal:
        for error in refusal.errors():
            yield [(error["loc"], error["type"], error["msg"])]


def _unknown(tool: _Tool, arguments: JSONObject) -> list[str]:
    """The arguments that a function does not take; apcore passes them on, which is a TypeError."""
    return [name for name in arguments if tool.is_closed and name not in tool.input_schema["properties"]]


def _faults_of(error: Any, above: _Steps = ()) -> Iterator[_Fault]:
    """An error of jsonschema's, or in its place those by each branch of a union."""
    path = (*above, *error.relative_path)
    for inner in error.context:
        yield from _faults_of(inner, (*path, ("branch", inner.relative_schema_path[0])))
    if error.validator == "required":
        missing = error.message.removesuffix(" is a required property")  # in quotes
        yield (*path, missing[1:-1]), "required", "Field required"
    elif not error.context:
        yield path, error.validator, error.message


_MISSING = ("missing", "required")


def _meant_faults(faults: Iterable[_Fault], value: Any, path: _Steps = ()) -> list[_Fault]:
    """Of the `faults` in a value, which stands at `path`, those by the branch of each union that was meant, once each.

    That is one for values of this kind, if there is any, then one whose tag is right, then one with few faults.
    """
    kept: list[_Fault] = []
    inside: dict[Any, list[_Fault]] = {}
    for steps, code, message in faults:
        if not steps or (len(steps) == 1 and code in _MISSING):
            kept.append(((*path, *steps), code, message))
        else:
            inside.setdefault(steps[0], []).append((steps[1:], code, message))
    branches: dict[int, list[_Fault]] = {}  # by how much speaks against them
    for step, part in inside.items():
        try:
            item = value[step]
        except (LookupError, TypeError):  # it does not lead into the value
            branch = _meant_faults(part, value, path)
            branches.setdefault(sum(_misfit(fault, path) for fault in branch), []).extend(branch)
        else:
            kept += _meant_faults(part, item, (*path, step))
    if branches:
        kept += branches[min(branches)]
    return [*dict.fromkeys(kept)]


def _misfit(fault: _Fault, path: _Steps) -> int:
    """How much a fault speaks against a branch for the value at `path`."""
    place, code, message = fault
    if code.endswith("type") and place == path:
        return 1_000_000
    if code in ("const", "enum", "literal_error") and len(place) == len(path) + 1:
        return 10 if code == "enum" or " or " in message else 1_000  # a tag can be one thing only
    return 1


def _field(schema: JSONSchema, path: _Steps) -> str:
    """`a.0` for the place of a fault. Inside of a secret only names that its schema knows are told."""
    names: list[str] = []
    views = [schema]
    is_secret = False
    for step in path:
        views = [*_views(*views)]
        is_secret = is_secret or any(map(_is_blanked, views))
        if is_secret and isinstance(step, str) and not any(step in _properties(view) for view in views):
            step = "*"
        names.append(str(step))
        views = [*_inside(views, step)]
    return ".".join(names)


def _errors_of(tool: _Tool, arguments: JSONObject) -> tuple[list[dict[str, str]], int]:
    """What is wrong with arguments in the form that it is told in, and how many errors apcore makes of that."""
    faults = [*itertools.islice(_faults(tool, arguments), _ERRORS_SEEN)]
    errors: list[dict[str, str]] = []
    for path, code, message in _meant_faults(itertools.chain(*faults), arguments)[:_ERRORS_MAX]:
        errors.append({"field": _field(tool.input_schema, path), "code": code, "message": message})
    return errors, len(faults)


def _check_input(tool: _Tool, arguments: JSONObject) -> None:
    """Raise apcore's SchemaValidationError for arguments that the module refuses."""
    errors, _ = _errors_of(tool, arguments)
    if errors:
        raise SchemaValidationError(f"Input validation failed: {errors}", errors)


@dataclasses.dataclass
class _ErrorMapper:
    """Say what went wrong with one call: to the client a plain sentence, to the log what helps.

    `involved` is every module that took part in the call. Where one of them has `x-sensitive` inputs, neither says more
    than what failed and where: no text that a module or a validator wrote, as nobody can tell how it spells a secret.
    Where one has such outputs, the log does not. Whatever a module made of its error, there is an answer. Used after a
    call failed, so it may take its time.
    """

    label: str
    tool: _Tool
    arguments: JSONObject
    involved: Iterable[Any]
    registry: Registry

    def to_result(self, error: BaseException) -> JSONObject:
        """The tool result for `error`, which is logged (SRS FR-ERROR-001 to -011, FR-LOG-003)."""
        try:
            cause = error.cause if isinstance(error, ModuleExecuteError) and error.cause else error
            step = getattr(error.__context__, "step_name", "")  # of apcore's pipeline
            if isinstance(cause, RecursionError) and step == "output_validation":  # a cycle, which apcore stumbles over
                error = cause = _not_json(cause)
            withheld = self._is_sensitive(error, "input_schema")
            code = "GENERAL_INTERNAL_ERROR"
            text = _UNEXPECTED
            report: JSONObject = {}
            if isinstance(error, ModuleError):
                code = _text_of(error.code)
                for flag in ("retryable", "user_fixable"):
                    if isinstance(getattr(error, flag), bool):
                        report[flag] = getattr(error, flag)
                if isinstance(cause, ModuleError):
                    text = self._tell(error, code, step, withheld, report)
            self._log(cause, text, withheld or bool(self.tool.marks) or self._is_sensitive(error, "output_schema"))
            return _failure(text, code, **report)
        except BaseException as another:  # an error of a module's own class may do anything when it is looked at
            self._log(error, f"(raised {type(another).__name__} when it was looked at)", withheld=True)
            return _failure(_UNEXPECTED, "GENERAL_INTERNAL_ERROR")

    def _is_sensitive(self, error: BaseException, side: str) -> bool:
        """Whether a module that took part in the call marks something `x-sensitive`."""
        # Those that an error of apcore's names include what was called without the context of the call.
        chain = error.details.get("call_chain", ()) if isinstance(error, ModuleError) else ()
        for module in (self.tool.descriptor, *self.involved, *map(self.registry.get_definition, chain)):
            schema: Any = getattr(module, side, None)
            if hasattr(schema, "model_json_schema"):
                schema = schema.model_json_schema()
            if _marks_sensitive(schema):
                return True
        return False

    def _log(self, error: BaseException, text: str, withheld: bool) -> None:
        trace = None
        if isinstance(error, ModuleError):
            text = text if withheld else _text_of(error.message)
        elif withheld:
            frames = traceback.extract_tb(error.__traceback__)
            text = f"(not shown: it may quote sensitive values), raised in {frames}"
        else:
            text = _text_of(error)
            trace = error
        logger.error("Tool call error: %s - %s: %.40000s", self.label, type(error).__name__, text, exc_info=trace)

    def _tell(self, error: ModuleError, code: str, step: str, withheld: bool, report: JSONObject) -> str:
        """What the client is told; what there is beside it to report goes into `report`."""
        if isinstance(error, SchemaValidationError):
            return self._tell_validation(error, step, withheld, report)
        facts = {"module_id": "", **error.details, "code": code, "message": error.message}
        text = _text_of(_SENTENCES.get(code, _ANY_OTHER).format_map(facts))
        if withheld and code in _SENTENCES:
            text = text.partition(":")[0]
        if code == "MODULE_TIMEOUT":
            report["error_details"] = {"timeout_ms": int(error.details["timeout_ms"])}
        by_itself = error.details.get("call_chain") == [self.tool.module_id]
        if by_itself and not withheld and code not in ErrorCodeRegistry().all_codes:
            # What the module's author advises.
            if error.suggestion:
                report["suggestion"] = _text_of(error.suggestion)
            if error.ai_guidance:
                report["ai_guidance"] = _text_of(error.ai_guidance)
                text += f"\n{report['ai_guidance']}"
        return text

    def _tell_validation(self, error: SchemaValidationError, step: str, withheld: bool, report: JSONObject) -> str:
        # apcore says "Input validation failed" of a dict schema's output too; the step that failed knows better.
        of_output = step == "output_validation" or _text_of(error.message).startswith("Output")
        of_another = error.details.get("module_id", self.tool.module_id) != self.tool.module_id
        if of_output or of_another:
            report["user_fixable"] = False
        if of_another:  # which was given something wrong by this one: nothing that the client has to know
            return _ANY_OTHER.format(code=error.code)
        reported = error.details.get("errors") or []
        if step == "input_validation":
            found, count = _errors_of(self.tool, self.arguments)
            if count == len(reported[:_ERRORS_SEEN]):  # or middleware has changed the arguments
                reported = found
        errors = [_told_error(each) for each in reported[:_ERRORS_MAX]]
        title = "Output validation failed" if of_output else "Input validation failed"
        if not errors:
            return title
        lines = [f"{title}:"]
        for each in errors:
            if withheld or of_output:  # a message may quote the value, a part or the parent of it
                each["message"] = "Field required" if each["code"] in _MISSING else "Value is not valid"
            lines.append(f"- {each['field'] or '(root)'}: {each['message']} ({each['code']})")
        report["error_details"] = {"errors": errors}
        return "\n".join(lines)


def _told_error(error: Any) -> dict[str, str]:
    """`{"field": "a.0", "code": "type", "message": "..."}` from any form in which an invalid value is reported.

    apcore's is `{"path": "/a/0", "keyword": "type", "message": "..."}`; a module may have made up another, or a text.
    """
    if not isinstance(error, dict):
        error = {"message": error}
    fault = {
        "field": error.get("field") or _text_of(error.get("path", "")).strip("/").replace("/", "."),
        "code": error.get("code") or error.get("keyword") or "invalid",
        "message": error.get("message", ""),
    }
    return {key: _text_of(value)[:_ERROR_CHARACTERS] for key, value in fault.items()}


# ---- Documents: what a person reads of a tool; pure ----

_SAMPLE_MAX = 10_000  # characters of a list that is made up: one of 200 of 200 of 200 helps nobody
_TEXTS = {
    "date": "2025-01-31",
    "date-time": "2025-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "duration": "P1D",
    "uuid": "123e4567-e89b-12d3-a456-426614174000",
    "email": "ann@example.com",
    "uri": "https://a.example",
}


def _sample(schema: JSONSchema) -> Any:
    """A value that `schema` accepts, as telling as can be made up; None when no other is found."""
    for value in _candidates(schema):
        if value is not None and _is_valid(value, schema):
            return value
    return None


def _candidates(schema: JSONSchema) -> Iterator[Any]:
    yield from schema.get("examples", ())
    yield from schema.get("enum", ())
    for keyword in ("const", "default", "minimum", "maximum", "multipleOf"):
        yield schema.get(keyword)
    for branch in _branches(schema, _BESIDE):
        yield _sample(branch)
    needed = {name: _sample(_properties(schema).get(name, {})) for name in _required(schema)}
    if None not in needed.values():
        yield needed
    text = _TEXTS.get(schema.get("format", ""), "text").ljust(min(schema.get("minLength", 0), 1_000), "x")
    yield from (text[: schema.get("maxLength")], 1, 0.5, True)
    item = _sample(schema.get("items", {}))
    count = schema.get("minItems", 1)
    if item is not None and count * len(_to_text(item)) <= _SAMPLE_MAX:
        yield [item] * int(count)
    yield []


def _examples(tool: _Tool) -> list[JSONObject]:
    """The module's own examples that are valid calls, in plain JSON types."""
    with suppress(Exception):  # they are whatever a module lists
        examples = from_json(_to_text(tool.descriptor.examples), allow_inf_nan=False)
        return [each for each in examples if _is_valid(each["inputs"], tool.input_schema)]
    return []


def _further(tool: _Tool) -> str:
    """The module's documentation, without the description where it begins with that."""
    words = r"\s+".join(map(re.escape, tool.descriptor.description.split()))
    return re.sub(rf"\A\s*{words}((?<=[.!?])\s|\s*\n|\s*\Z)\s*", "", tool.documentation)


def _fenced(value: Any) -> str:
    return f"```json\n{json.dumps(value, indent=2)}\n```"


def _fields(schema: JSONSchema) -> str:
    """A schema as a table of the properties that it names, and as JSON."""
    rows = ["| Name | Type | Required | Description | Example |", "| --- | --- | --- | --- | --- |"]
    for name, field in _properties(schema).items():
        kinds = " or ".join(dict.fromkeys(kind for view in _views(field) for kind in _types(view))) or "any"
        needed = "Yes" if name in _required(schema) else "No"
        example = _sample(field)
        sample = "" if example is None else f"`{_to_text(example)}`"
        cells = [f"`{name}`", kinds, needed, field.get("description", ""), sample]
        written = [" ".join(cell.replace("|", r"\|").split()) for cell in cells]
        rows.append(f"| {' | '.join(written)} |")
    return "\n".join([*rows, "", _fenced(schema)])


_NOTES = {
    "readonly": "It only reads.",
    "destructive": "It may destroy data that cannot be brought back.",
    "requires_approval": "A person has to approve each call.",
    "open_world": "It reaches systems outside of this one.",
}


def _document(tool: _Tool) -> str:
    """One tool in the eight sections of the tool document specification, from its descriptor."""
    module_id = tool.module_id
    known = tool.about.annotations
    further = re.sub(r"(?m)^(?=#{1,3} )", "###", _further(tool))  # its headings, below ours
    purpose = f"{tool.about.description}\n\n{further}".strip()
    returns = _fields(tool.output_schema) if tool.output_schema else "Not declared."
    for name, kind in tool.media.items():
        returns += f"\n\n`{name}` comes as content of type `{kind}`."
    errors = {"SCHEMA_VALIDATION_ERROR": "Input validation failed", **_SENTENCES, "MODULE_EXECUTE_ERROR": _UNEXPECTED}
    failures = "\n".join(f"- `{code}`: {text}" for code, text in errors.items())
    repeatable = known.readonly or known.idempotent
    calls: list[str] = []
    for arguments in [each["inputs"] for each in _examples(tool)] or [_sample(tool.input_schema)]:
        if arguments is not None:
            params = {"name": module_id, "arguments": arguments}
            calls.append(_fenced({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}))
    usage = "\n\n".join(calls) or "None can be made up from the schema."
    notes = [note for flag, note in _NOTES.items() if getattr(known, flag)]
    if _marks_sensitive(tool.input_schema):
        notes.append("It takes sensitive values, which are kept out of messages and logs.")
    if tool.marks:
        notes.append("It returns sensitive values, which are replaced by `***REDACTED***`.")
    return f"""\
## {tool.descriptor.name or module_id}

### 1. Tool Purpose and Description

{purpose}

### 2. Invocation Name

`{tool.name}`, in portable form `{_portable_name(tool.name)}`; module `{module_id}`, version {tool.descriptor.version}

### 3. Input Schema (Parameters)

{_fields(tool.input_schema)}

### 4. Output Schema (Return Value)

{returns}

### 5. Error Handling

{failures}

### 6. Idempotency

{"Idempotent: to repeat it changes nothing." if repeatable else "Not idempotent: each counts."}

### 7. Usage Examples (for MCP context)

{usage}

### 8. Security Considerations

{" ".join(notes) or "None known."}
"""


# ---- Files: a folder's modules: taken in, again when they change, and out when they go; any thread ----


@contextmanager
def _left_out(what: object) -> Iterator[None]:
    """One bad module never takes the others down: whatever it raises, SystemExit included, becomes a WARNING."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        logger.warning("%s is left out: %s: %s", what, type(error).__name__, _text_of(error))


_Registration = tuple[Any, ...]  # what `Registry.register` takes: id, module, and for classes version and metadata


class _Files:
    """The files below a registry's extensions directories, and what each of them has registered.

    `update()` loads what is new, loads again what has changed and unregisters what has gone, each at the cost of that
    file alone. A file that cannot be loaded changes nothing; it is left out with a WARNING, and so is a link. What the
    registry refuses is tried again at the next change, as an id may be free by then. What apcore's own scan passes over
    is neither loaded nor looked at. Any thread; one update at a time.
    """

    def __init__(self, registry: Registry) -> None:
        # Only private names tell where it looks for files, and how.
        self._registry = cast(Any, weakref.proxy(registry))
        self._lock = threading.Lock()
        self._made: dict[str, tuple[str, Any]] = {}  # by id, the file and the module
        self._refused = set[str]()  # files of which the registry would not take everything
        # Size and time of each file. What the registry's own `discover()` has loaded stays until its file changes.
        self._seen = self._look() if registry.list() else {}
        for path in itertools.filterfalse(os.path.islink, self._seen):
            module_id = self._registry._canonical_id_for_path(path)
            module = self._registry.get(module_id)
            if type(module).__module__.startswith("apcore_ext"):
                self._made[module_id] = (path, module)

    def update(self) -> None:
        """Take in what has changed since the last time: at first, everything."""
        with self._lock:
            before = self._seen
            self._seen = self._look()
            changed = {re.sub(r"_meta\.yaml$", ".py", path) for path, _ in before.items() ^ self._seen.items()}
            if not changed:
                return
            changed |= self._refused
            self._refused = set()
            _forget({self._place(path) for path in changed if not os.path.islink(path)})
            defined: dict[str, list[_Registration]] = {}
            for path in sorted(changed):
                with _left_out(path):
                    defined[path] = [*self._define(path)] if path in self._seen else []
            # All that goes before any that comes: an id may have moved from one file to another.
            for module_id, (path, module) in [*self._made.items()]:
                if path in defined:
                    del self._made[module_id]
                    with _left_out(f"Module {module_id}"):
                        if self._registry.get(module_id) is module:  # or somebody has put another one in its place
                            self._registry.unregister(module_id)
            for path, registrations in defined.items():
                for module_id, module, *more in registrations:
                    with _left_out(path):
                        if self._registry.has(module_id):  # of classes, it would take another version
                            raise ValueError(f"Module ID '{module_id}' is already registered")
                        self._registry.register(module_id, module, *more)
                        self._made[module_id] = (path, module)
                        continue
                    self._refused.add(path)

    def _look(self) -> dict[str, tuple[int, int]]:
        """Size and time of each file that may define modules, or say what they are; and of each link to a folder."""
        max_depth, _, ignored = self._registry._scan_params()
        seen = {}

        def look(folder: str, depth: int) -> None:
            for entry in os.scandir(folder):
                if any(match_glob(pattern, entry.name) for pattern in (*ignored, "node_modules", ".*", "_*")):
                    continue
                with suppress(OSError):  # gone meanwhile
                    if entry.is_dir(follow_symlinks=False):
                        if depth < max_depth:
                            look(entry.path, depth + 1)
                    elif entry.name.endswith((".py", "_meta.yaml", ".binding.yaml")) or entry.is_dir():
                        found = entry.stat(follow_symlinks=False)
                        seen[entry.path] = (found.st_size, found.st_mtime_ns)

        for root in self._registry._extension_roots:
            with suppress(OSError):
                look(os.path.realpath(root["root"]), 1)
        return seen

    def _place(self, path: str) -> str:
        """What a file runs as, of which `@module` makes the ids of functions."""
        return f"apcore_ext.{self._registry._canonical_id_for_path(path)}"

    def _define(self, path: str) -> Iterator[_Registration]:
        """What a file defines, or binds."""
        if os.path.islink(path):
            raise ImportError("it is a link, and links are not followed")
        if path.endswith(".yaml"):
            yield from _bindings(path)
            return
        metadata = load_metadata(Path(path.removesuffix(".py") + "_meta.yaml"))
        chosen = metadata.get("entry_point", "").rpartition(":")[2]
        if self._registry._pre_approval_hook is not None:
            self._registry._pre_approval_hook(Path(path))
        place = self._place(path)
        functions: dict[Any, None] = {}  # each once, under whatever names
        classes: dict[Any, None] = {}
        for name, value in _run_file(path, place).items():
            if getattr(value, "__module__", "") != place:
                continue  # it comes from somewhere else
            if inspect.isfunction(value) and "apcore_module" in vars(value):
                functions[vars(value)["apcore_module"]] = None
            elif inspect.isclass(value) and chosen in ("", name) and not validate_module(value):
                classes[value] = None
        if len(classes) > 1 or not (classes or functions):
            logger.warning(
                "%s is left out: it has to define one module class (input_schema, output_schema, description, execute),"
                " or functions with @module (from apcore.decorator import module)",
                path,
            )
            return
        for one in functions:
            yield one.module_id.removeprefix("apcore_ext."), one
        for module in classes:
            version = metadata.get("version") or getattr(module, "version", "1.0.0")
            yield place.removeprefix("apcore_ext."), module(), str(version), metadata


def _run_file(path: str, place: str) -> JSONObject:
    """What a file defines when it runs as the module `place`.

    From its source: Python's cache of bytecode takes two edits of one size within one second for the same.
    """
    module = ModuleType(place)
    module.__file__ = path
    sys.modules[place] = module  # where dataclasses and pydantic look for what an annotation names
    sys.modules.setdefault("apcore_ext", ModuleType("apcore_ext"))  # pickle imports it, too
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(module))
    return dict(vars(module))


def _forget(places: set[str]) -> None:
    """Take files' functions out of apcore's default client, where `@apcore.module(...)` registers them only once."""
    default = cast(Any, apcore)._default_client.registry
    for module_id, module in default.iter(include_hidden=True):
        if getattr(getattr(module, "_func", None), "__module__", "") in places:
            default.unregister(module_id)


def _bindings(path: str) -> Iterator[_Registration]:
    """What a `*.binding.yaml` file binds, also of files beside it."""
    if b"x-sensitive" in Path(path).read_bytes():
        raise ImportError("apcore keeps no x-sensitive of a binding's schemas: mark it in a model of its function's")
    folder = os.path.dirname(path)
    if folder not in sys.path:
        sys.path.append(folder)
    for module in BindingLoader().load_bindings(path, Registry()):
        name = getattr(module._func, "__module__", "")
        beside = os.path.join(folder, f"{name}.py")
        if os.path.exists(beside) and sys.modules[name].__file__ != beside:
            raise ImportError(f"another file has been imported as {name}: give {beside} a name of its own")
        yield module.module_id, module


_FILES = weakref.WeakKeyDictionary[Registry, _Files]()


def _files_of(registry: Registry) -> _Files:
    """One for each registry, whoever follows it: else two would load each file, and know of none of the other's."""
    return _FILES.setdefault(registry, _Files(registry))


def _folder(extensions_dir: str) -> Registry:
    """A Registry of the files below one directory, none of them loaded."""
    if not os.path.exists(extensions_dir):
        raise ValueError(f"extensions directory does not exist: {extensions_dir}")
    if not os.path.isdir(extensions_dir):
        raise ValueError(f"extensions path is not a directory: {extensions_dir}")
    return Registry(extensions_dir=os.path.abspath(extensions_dir))


def discover(extensions_dir: str | os.PathLike[str]) -> Registry:
    """Load the modules of a directory, as the command line does: a Registry of them, to serve or to give an Executor.

        serve(discover("extensions"))

    Takes module classes and functions with apcore's `@module` from `*.py` files, and what `*.binding.yaml` files bind.
    A file that cannot be loaded is left out with a WARNING that names it. Names that begin with `_` or `.`,
    `node_modules` and links are passed over. Source: design, "Discovery".
    Raises ValueError where there is no such directory.
    """
    registry = _folder(os.fspath(extensions_dir))
    _files_of(registry).update()
    return registry


# ---- Catalog: the registry as a list of tools that follows it; any thread ----

_LOOK_SECONDS = 0.5  # from one look at the files of modules to the next, with `dynamic`


def _name(tools: Collection[_Tool]) -> dict[str, _Tool]:
    """Give each tool its alias as its name, where clients can take it and mean no other; all by portable names."""
    claims = Counter[str]()
    for tool in tools:
        claims.update({_portable_name(tool.module_id), _portable_name(tool.about.alias)})
    by_name = {}
    for tool in tools:
        alias = tool.about.alias
        if claims[_portable_name(alias)] == 1 and _ALIAS.fullmatch(alias):
            tool.name = alias
        elif tool.name != tool.module_id:  # said once
            tool.name = tool.module_id
            text = "The alias of module %s is not used: %s is no name for a tool, or another's as well"
            logger.warning(text, tool.module_id, alias)
        for name in (tool.name, tool.module_id):
            by_name[_portable_name(name)] = tool
    return by_name


class _ToolCatalog:
    """The registry's modules as listed tools, up to date whenever it is read.

    A registry event, from whatever thread, only notes which module changed; the next read builds that tool again and
    swaps in a new table, so a reader never sees half a change. A module that cannot become a tool is left out with a
    WARNING that names it. It follows the registry, and with `dynamic` the files, from `follow()` to `close()`.
    """

    def __init__(self, options: _Options) -> None:
        self._registry = options.registry
        self._options = options
        self._lock = threading.Lock()
        self._tools: dict[str, _Tool] = {}  # by module id, sorted
        self._by_name: dict[str, _Tool] = {}  # by id and alias, as they are sent to OpenAI
        self._changed = deque(self._registry.list())
        self._closed = threading.Event()

    def follow(self, on_change: Callable[[], object]) -> None:
        """Take in every change from now on; `on_change` is called on the thread of each."""
        self._on_change = on_change
        if self._options.dynamic:
            files = _files_of(self._registry)
            threading.Thread(target=self._follow_files, args=[files], name="apcore-mcp-files", daemon=True).start()
        for event in ("register", "unregister"):
            self._registry.on(event, self._note_change)
        self._changed.extend(self._registry.list())  # not before, or a module could slip in between

    def close(self) -> None:
        self._closed.set()
        for event in ("register", "unregister"):
            self._registry.off(event, self._note_change)

    @property
    def tools(self) -> dict[str, _Tool]:
        """The listed tools by module id, sorted by it; not to be written to."""
        self._take_in()
        return self._tools

    def find(self, name: str) -> _Tool | None:
        """The listed tool that a client calls `name`: its id or its alias, in either spelling."""
        self._take_in()
        return self._by_name.get(_portable_name(name))

    def listing(self, *, portable: bool = False) -> list[JSONObject]:
        """The tools as `tools/list` sends them, not to be written to."""
        return [tool.definition(portable=portable) for tool in self.tools.values()]

    def each(self, make: Callable[[_Tool], T]) -> list[T]:
        """What `make` gives for each listed tool; one for which it fails is left out with a WARNING."""
        made = []
        for tool in self.tools.values():
            with _left_out(f"Module {tool.module_id}"):
                made.append(make(tool))
        return made

    def _note_change(self, module_id: str, _module: object = None) -> None:
        self._changed.append(module_id)
        if not self._closed.is_set():  # or nobody may be left to tell
            self._on_change()

    def _take_in(self) -> None:
        """Build anew what has changed."""
        with self._lock:  # before the look whether anything has: another thread may be about to take it in
            if not self._changed:
                return
            changed = set()
            while self._changed:
                changed.add(self._changed.popleft())
            tools = {module_id: tool for module_id, tool in self._tools.items() if module_id not in changed}
            for module_id in changed.intersection(self._registry.list(prefix=self._options.prefix)):
                tool = self.build(module_id)
                if tool is not None:
                    tools[module_id] = tool
            self._tools = dict(sorted(tools.items()))
            self._by_name = _name(self._tools.values())

    def build(self, module_id: str) -> _Tool | None:
        """The module as a tool; None when it cannot be one, is not wanted, or gone meanwhile."""
        options = self._options
        if module_id.startswith(tuple(options.exclude or ())):
            return None
        with _left_out(f"Module {module_id}"):
            module = self._registry.get(module_id)
            descriptor = self._registry.get_definition(module_id)
            if module is not self._registry.get(module_id):  # what is said of it may be of its successor
                return self.build(module_id)
            if descriptor is None:
                return None
            tags = [*descriptor.tags, *(getattr(module, "tags", None) or ())]
            if not all(tag in tags for tag in options.tags or ()):
                return None
            if options.read_only and not (descriptor.annotations or _DEFAULT_ANNOTATIONS).readonly:
                return None
            return _Tool(descriptor, module, options)
        return None

    def _follow_files(self, files: _Files) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            files.update()


# ---- OpenAI: tools as function definitions, and a model's call back as a module's inputs ----

_SHORTENED = re.compile(r".{54}-0[0-9a-f]{8}")  # no segment of a module id starts with a digit
# What constrains a value, and the one description that a model is to read.
_STRICT_KEEPS = {*Draft202012Validator.VALIDATORS, "then", "else", "description"}
_STRICT_INSIDE = _WITH_SCHEMAS - _NOT_FOLLOWED
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")  # as pydantic's pattern of a Decimal does


@dataclasses.dataclass
class _OpenAIConverter:
    """Write tools as OpenAI function definitions, in strict mode with parameters that its API takes.

    What strict mode takes away from a module, and what OpenAI refuses of the rest, is logged as a WARNING.
    """

    embed_annotations: bool = False
    strict: bool = False

    def convert(self, tool: _Tool) -> JSONObject:
        function: JSONObject = {"name": _portable_name(tool.module_id), "description": tool.about.description}
        if self.embed_annotations:
            function["description"] += tool.about.to_suffix()
        function["parameters"] = tool.input_schema
        if self.strict:
            function |= {"parameters": self._strict_parameters(tool), "strict": True}
        return {"type": "function", "function": function}

    def _strict_parameters(self, tool: _Tool) -> JSONSchema:
        strict = _to_strict(tool.input_schema)
        found = detect_openai_strict_incompatibilities(strict)
        for node in _views(tool.input_schema, under=_STRICT_INSIDE):
            if node.get("additionalProperties", False) is not False:
                found.append("additionalProperties: true")
            if node.keys().isdisjoint(["type", "enum", "const", "anyOf", "oneOf"]):
                found.append("a value of any type")
        if found:
            text = "Schema for module '%s' uses %s, which is incompatible with strict mode"
            logger.warning(text, tool.module_id, ", ".join(dict.fromkeys(found)))
        return strict


def _is_told(keyword: str, value: Any) -> bool:
    """Whether OpenAI refuses what a model can be told in words; the module's own validation still holds it to that."""
    if keyword == "pattern":
        return _LOOKS_AROUND.search(value) is not None
    return keyword not in _STRICT_INSIDE and detect_openai_strict_incompatibilities({keyword: value}) != []


def _to_strict(schema: JSONSchema) -> JSONSchema:
    """Rewrite a self-contained schema for OpenAI's strict mode (SRS FR-OPENAI-003; tech design 8.3).

    `{"type": "string", "enum": ["png"], "default": "png"}` of an optional property becomes
    `{"type": ["string", "null"], "enum": ["png", None]}`; every object requires all its properties and forbids others.
    `{"maxLength": 40, "description": "Where to look."}` becomes `{"description": "Where to look. (maxLength: 40)"}`.
    """
    kept: JSONSchema = {}
    in_words: list[str] = []
    for keyword, value in schema.items():
        if _is_told(keyword, value):
            in_words.append(f"{keyword}: {value if isinstance(value, str) else _to_text(value)}")
        elif keyword == "oneOf" and "anyOf" not in schema:
            kept["anyOf"] = value
        elif keyword in _STRICT_KEEPS:
            kept[keyword] = value
    strict = _map_subschemas(kept, _to_strict)
    if in_words:
        strict["description"] = f"{schema.get('description', '')} ({', '.join(in_words)})".lstrip()
    if "properties" in schema or "object" in _types(schema):
        properties = _properties(strict)
        for name, field in _properties(schema).items():
            # Without the tag of a union nothing tells which branch was meant.
            is_tag = "const" in field and field["const"] == field.get("default")
            if name not in _required(schema) and not is_tag:
                properties[name] = _nullable(properties[name])
        strict |= {"properties": properties, "required": sorted(properties), "additionalProperties": False}
    return strict


def _written_properties(validator: Any, said: Any, value: Any, schema: Any) -> Iterator[InvalidAnswer]:
    """What speaks against an object that a model wrote: a name it cannot have, and what its properties cannot be."""
    if isinstance(value, dict) and schema.get("properties", said) is said:  # asked once, though it says both
        for name, item in value.items():
            inside = [*_inside([schema], name)]
            if not inside and schema.get("additionalProperties") is not True:
                yield InvalidAnswer(f"{name!r} is unknown")
            if item is not None or name in _required(schema):  # null may stand for what is absent
                for inner in inside:
                    yield from validator.descend(item, inner)


# Whether a model may have meant a schema by a value, as far as types, names and tags tell: some of the other keywords
# would keep jsonschema busy for long.
_TELLING = {
    key: Draft202012Validator.VALIDATORS[key] for key in "type enum const required items prefixItems anyOf".split()
}
_TELLING["oneOf"] = _TELLING["anyOf"]
_TELLING["properties"] = _written_properties
_TELLING["additionalProperties"] = _written_properties
_MeantValidator: Any = create({}, _TELLING)


def _meant(value: Any, *schemas: JSONSchema) -> Iterator[JSONSchema]:
    """`schemas` and all in them that apply to a value which a model wrote: of a union the branch that it meant."""
    for schema in schemas:
        yield schema
        yield from _meant(value, *schema.get("allOf", ()))
        for keyword in ("anyOf", "oneOf"):
            for branch in schema.get(keyword, ()):
                if _MeantValidator(branch).is_valid(value):
                    yield from _meant(value, branch)
                    break


def _drop_nulls(value: Any, *schemas: JSONSchema) -> Any:
    """Undo strict mode in what a model sent: drop each null that stands for an absent property, at every depth."""
    if not schemas:  # however deep it is
        return value
    views = [*_meant(value, *schemas)]
    if isinstance(value, list):
        return [_drop_nulls(item, *_inside(views, index)) for index, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    kept = {}
    for name, item in value.items():
        inside = [*_inside(views, name)]
        if item is not None or all(_is_valid(None, inner) for inner in inside):
            kept[name] = _drop_nulls(item, *inside)
    return kept


def to_openai_tools(
    registry_or_executor: Registry | Executor | APCore, *, embed_annotations: bool = False, strict: bool = False,
    tags: Sequence[str] | None = None, prefix: str | None = None,
) -> list[JSONObject]:  # fmt: skip
    """The modules as OpenAI tool definitions, plain dicts for `client.chat.completions.create(tools=...)`.

        [{"type": "function", "function": {"name": "image-resize", "description": "...", "parameters": {...}}}, ...]

    `embed_annotations` appends what an annotation says that is not the default to the description. `strict` adds
    `"strict": True` and rewrites the parameters for OpenAI's strict mode; what OpenAI will refuse all the same is
    logged as a WARNING per tool. `tags` (all of them) and `prefix` choose modules. A module that cannot be converted is
    left out with a WARNING. Needs neither the `openai` package nor a running server. Source: SRS FR-OPENAI-001 to -007.
    Raises TypeError for neither a Registry nor an Executor; ValueError for an empty tag or prefix.
    """
    catalog = _ToolCatalog(_Options(registry_or_executor, tags=tags, prefix=prefix))
    hyphened = [module_id for module_id in catalog.tools if "-" in module_id]
    if hyphened:
        raise ValueError(f"Module ids must not contain hyphens, which stand for dots in names: {hyphened}")
    return catalog.each(_OpenAIConverter(embed_annotations=embed_annotations, strict=strict).convert)


class _NotOffered(ValueError):
    """A model called a function that it was not offered."""


def from_openai_name(name: str, registry: Registry | None = None) -> str:
    """Turn an OpenAI function name back into the module id it was made from.

        >>> from_openai_name("image-resize")
        'image.resize'

    An id of more than 64 characters was shortened and needs the `registry` it came from. Source: SRS FR-OPENAI-002.
    Raises ValueError for a shortened name without a registry, or one that no module of it has.
    """
    if not _SHORTENED.fullmatch(name):
        return name.replace("-", ".")
    if registry is not None:
        for module_id in registry.list():
            if _portable_name(module_id) == name:
                return module_id
    raise _NotOffered(f"Function name {name!r} was shortened, and no registry is given that has its module")


def from_openai_call(
    registry_or_executor: Registry | Executor | APCore, name: str, arguments: str | JSONObject
) -> tuple[str, JSONObject]:
    """Turn the call a model sent back into a module id and inputs that module accepts.

    `name` is the function name as the model sent it, `arguments` the JSON text or dict next to it.

        >>> from_openai_call(registry, "image-resize", '{"width": 800, "format": null}')
        ('image.resize', {'width': 800})

    Strict mode makes a model write `null` for what it leaves out, so a null the module's own schema forbids is dropped,
    at every depth; one it allows is kept. Nothing is executed: `await executor.call_async(module_id, inputs)` does.
    Source: F-012; OpenAI guide "Structured Outputs". Raises TypeError for neither a Registry nor an Executor;
    ValueError when `arguments` is no JSON object, and for a module that `to_openai_tools` would not have offered.
    """
    tool, inputs = _read_call(_Options(registry_or_executor), name, arguments)
    return tool.module_id, inputs


def _read_call(options: _Options, name: str, arguments: str | JSONObject) -> tuple[_Tool, JSONObject]:
    """The tool that a model called, and what with."""
    module_id = from_openai_name(name, options.registry)
    is_listed = module_id in options.registry.list(prefix=module_id)
    tool = _ToolCatalog(options).build(module_id) if is_listed else None
    if tool is None:
        raise _NotOffered(f"to_openai_tools() offers no function {name!r}")
    inputs = from_json(arguments or "{}", allow_inf_nan=False) if isinstance(arguments, str) else arguments
    if not isinstance(inputs, dict):
        raise ValueError(f"Arguments of {name!r} must be a JSON object, got {type(inputs).__name__}")
    return tool, _drop_nulls(inputs, tool.input_schema)


# ---- Calls: one running tool call: progress, questions, cancellation, threads; event loop only ----


async def report_progress(
    context: Any, progress: float, total: float | None = None, message: str | None = None
) -> None:
    """Tell the client how far a running module is: `await report_progress(context, 50, total=100)`.

    A number that is not finite, or no higher than the last one, is not sent (MCP "Progress"). Does nothing when the
    module was not called through MCP (`context` may be None) or the client asked for no progress. TypeError or
    ValueError for what is no number. Source: SRS FR-EXT-001.
    """
    send = _given(context, MCP_PROGRESS_KEY)
    if send is not None:
        await send(progress, total, message)


async def elicit(
    context: Any, message: str, requested_schema: JSONSchema | None = None, *, key: str | None = None
) -> JSONObject | None:
    """Ask the user who made this call, and wait: `await elicit(context, "Which one?", {"type": "object", ...})`.

    Returns what the user filled in, a dict that `requested_schema` accepts (an object with properties of simple types;
    none means a bare confirmation). None when the user declined, cancelled or filled in something else, the client
    cannot ask, or the module was not called through MCP (`context` may be None). `key` names the question on the wire
    (from 2026-07-28). The module's own timeout goes on meanwhile: once it is over, or the call is cancelled, this
    raises ExecutionCancelledError. ValueError for a question that no form can ask.
    Source: SRS FR-EXT-002; MCP "Elicitation".
    """
    ask = _given(context, MCP_ELICIT_KEY)
    if ask is None:
        return None
    token: CancelToken = getattr(context, "cancel_token", None) or CancelToken()
    token.check()
    answer: JSONObject | None = await ask(message, requested_schema, key)
    token.check()  # or a module that was told to end meanwhile, by its timeout, would act on the answer
    return answer


def _given(context: object, key: str) -> Any:
    """What the server of a call put into its context; None for a context, or anything else, without an MCP client."""
    data = getattr(context, "data", None)
    return data.get(key) if isinstance(data, Mapping) else None


def _is_modern(version: str) -> bool:
    """Whether a protocol version is of the era that begins with 2026-07-28, and not of the handshake's before it.

    From then on a server sends no requests: it answers `input_required` (MCP "Multi Round-Trip Requests").
    """
    return version >= "2026-07-28"


_PARKED_SECONDS = 600.0  # how long a call waits for its user's answer before it is cancelled
_PARKED_MAX = 1_000  # how many calls may wait; one more is given up
_CALL_KEY = "_mcp_call"


def _question(message: str, schema: JSONSchema | None, key: str | None) -> tuple[str, JSONObject]:
    """A question's key, and the parameters to ask it; ValueError when MCP's forms cannot."""
    from mcp.server.elicitation import render_elicitation_schema

    form = {"mode": "form", "message": message, "requestedSchema": schema or {"type": "object", "properties": {}}}
    [(name, asked)] = _plain({key or "input": form}).items()
    try:
        fields = _SchemaConverter().inline(asked["requestedSchema"])
        # The SDK's check of the fields wants a pydantic model.
        render_elicitation_schema(cast(Any, SimpleNamespace(model_json_schema=lambda **_: fields)))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"A question's schema cannot be asked: {error}") from None
    is_flat = fields.get("type") == "object" and fields.keys() & _WITH_SCHEMAS == {"properties"}
    if not is_flat or not isinstance(message, str):
        raise ValueError("A question is a text, and its schema a flat object with properties of simple types")
    return name, {**asked, "requestedSchema": fields}


def _caller(scope: Mapping[str, Any]) -> Identity | None:
    """Whom ASGI middleware authenticated as the maker of a request; None for nobody."""
    user = scope.get("user")
    if not getattr(user, "is_authenticated", False):
        return None
    roles = tuple(getattr(scope.get("auth"), "scopes", None) or ())
    # The SDK's bearer user calls himself like the client that acts for him, who may act for many.
    token = getattr(user, "access_token", None)
    for holder, attribute in ((token, "subject"), (token, "client_id"), (user, "identity"), (user, "display_name")):
        with suppress(AttributeError, NotImplementedError):
            name = getattr(holder, attribute)
            if name:
                return Identity(str(name), roles=roles)
    return Identity(str(user), roles=roles)


def _label(name: str, caller: Identity | None) -> str:
    """A call as lines of the log name it: `image.resize`, with its caller where there is one."""
    return name if caller is None else f"{name} (caller: {caller.id})"


_State = Literal["runs", "asks", "parked", "cancelled", "ended"]
# What a call is, and what it may become (any other move is none).
_NEXT_STATES: dict[_State, tuple[_State, ...]] = {
    # The module works, and a request waits for its end. It asks when, from 2026-07-28, the module does.
    "runs": ("asks", "cancelled", "ended"),
    # A question is to be the answer to the request that waits; with that the call is parked.
    "asks": ("parked", "cancelled", "ended"),
    # No request waits, and nothing can be sent, until a retry brings the answer (it runs) or none (it asks again).
    "parked": ("runs", "asks", "cancelled", "ended"),
    # It was told to end: by its token, as a task.
    "cancelled": ("ended",),
    # The result is there, for the request that waits, or for the retry of a call that was parked.
    "ended": (),
}


def _match_answer(_validator: Any, pattern: str, value: Any, _schema: Any) -> Iterator[InvalidAnswer]:
    """As `pattern` of jsonschema, by the engine of pydantic, which always ends; what it does not know is let pass."""
    with suppress(SchemaError):
        matching = SchemaValidator(core_schema.str_schema(pattern=pattern))
        if isinstance(value, str) and not matching.isinstance_python(value):
            yield InvalidAnswer(f"An answer does not match {pattern!r}")


_AnswerValidator: Any = cast(Any, extend)(Draft202012Validator, {"pattern": _match_answer})


@dataclasses.dataclass(eq=False)
class _Call:
    """One running tool call, and the way back to the user who made it.

    `turn` is set while the request that waits, the one that was attached last, can be answered: the call asks or has
    ended. One question at a time: a module that asks two at once is asked for them in turn. What stands in the
    context of its modules works from any thread and loop, as a sync module may run an async one in a loop of its own.
    """

    tool: _Tool
    arguments: JSONObject
    options: _Options
    caller: Identity | None
    session: ServerSession | None = None
    parks: bool = False
    can_ask: bool = False
    state: _State = "runs"
    progress: float = -math.inf
    question: tuple[str, JSONObject] = ("", {})

    def __post_init__(self) -> None:
        self.label = _label(self.tool.module_id, self.caller)
        self.meta: Mapping[str, Any] = {}
        self.involved: JSONObject = {}  # the modules that it called, its own included
        self.token = CancelToken()
        self.turn = asyncio.Event()
        self._asking = asyncio.Lock()
        self._unsent: Future[None] | None = None  # what was last reported from another loop
        self._loop = asyncio.get_running_loop()
        self.answer: asyncio.Future[Any] = self._loop.create_future()  # to its last question
        self.task: asyncio.Task[JSONObject]

    def move(self, state: _State) -> bool:
        """Become what it may become; whether it did."""
        if state not in _NEXT_STATES[self.state]:
            return False
        self.state = state
        if state in ("asks", "ended"):
            self.turn.set()
        else:
            self.turn.clear()
        return True

    def attach(self, ctx: RequestContext) -> None:
        """Let `ctx` be the request that waits for the next answer."""
        self.session = ctx.session
        self.meta = ctx.meta or {}
        self._request_id = ctx.request_id
        # A server without sessions may be one of many, and the answer reach another than asked.
        self.parks = _is_modern(ctx.protocol_version) and not self.options.stateless
        way_back = self.parks or ctx.session.can_send_request
        declared = getattr(ctx.session.client_capabilities, "elicitation", None)
        self.can_ask = way_back and bool(declared and (declared.form or not declared.url))

    def cancel(self) -> None:
        """Tell it to end: code that looks at its CancelToken, and the coroutines that run for it."""
        if self.move("cancelled"):
            self.token.cancel()
            self.task.cancel()

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        number = progress if type(progress) is int else float(progress)
        whole = None if total is None or not math.isfinite(total) else float(total)
        if asyncio.get_running_loop() is self._loop:
            rises = self.progress < number <= sys.float_info.max  # more ends the SDK's client
            if self.session is not None and self.state == "runs" and rises:
                self.progress = number
                await self.session.report_progress(number, whole, message if message is None else _text_of(message))
        elif self._unsent is None or self._unsent.done():
            self._unsent = asyncio.run_coroutine_threadsafe(self.report(number, whole, message), self._loop)
            # Not for ever: the loop stands still while an async module waits for `executor.call()`.
            await asyncio.wait({asyncio.wrap_future(self._unsent)}, timeout=1)

    async def elicit(
        self, message: str, requested_schema: JSONSchema | None = None, key: str | None = None
    ) -> JSONObject | None:
        if asyncio.get_running_loop() is not self._loop:
            work = self.elicit(message, requested_schema, key)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        question = _question(message, requested_schema, key)
        schema = question[1]["requestedSchema"]
        async with self._asking:
            if self.session is None or not self.can_ask or self.state in ("cancelled", "ended"):
                return None
            self.question = question
            if not self.parks:
                self.answer = asyncio.ensure_future(self.session.elicit_form(message, schema, self._request_id))
            else:
                self.answer = self._loop.create_future()
                if self.state == "runs":  # or the retry of the question before it is answered with this one
                    self.move("asks")
            try:
                answer = await self.answer
                content = dict(answer.content or {}) if answer and answer.action == "accept" else None
                if content is not None:
                    _AnswerValidator(schema).validate(content)
                return content
            except Exception as error:  # the client's fault or its connection's: the module goes on without
                logger.warning("Question of %s was not answered: %s", self.label, type(error).__name__)
                return None


# For what modules call without its context, also in tasks, timers and threads that outlive the call.
_CURRENT = contextvars.ContextVar[_Call | None](_CALL_KEY, default=None)


def _call_of(context: Context[Any]) -> _Call | None:
    """The tool call that a module runs for, also where it was called by another without its context."""
    call: _Call | None = context.data.get(_CALL_KEY)
    return call or _CURRENT.get()


class _Execution(BuiltinExecute):
    """An Executor's step that runs a module, which for the calls of a server also ends it: in time, or when cancelled.

    apcore runs a coroutine in a task of its own, which goes on when nobody waits for it any more; and a stream that
    gives no further chunk is not held to the deadline of its call.
    """

    def __init__(self, step: BuiltinExecute) -> None:
        vars(self).update(vars(step))
        self._step = step

    async def execute(self, ctx: PipelineContext) -> StepResult:
        if _call_of(ctx.context) is None:
            return await self._step.execute(ctx)
        try:
            result = await self._step.execute(ctx)
        except (asyncio.CancelledError, ModuleTimeoutError) as error:
            _end_module(error)
            raise
        deadline = ctx.context.global_deadline
        if ctx.output_stream is not None and deadline is not None:
            ctx.output_stream = _until(deadline, ctx.output_stream, ctx.module_id)
        return result


def _end_module(error: BaseException) -> None:
    """Cancel what apcore's step waited for when it was interrupted by `error`; only its frame knows what that is."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code is BuiltinExecute.execute.__code__:
            for value in frame.f_locals.values():
                if isinstance(value, asyncio.Future):
                    value.cancel()
                    value.add_done_callback(_silence)


def _silence(future: asyncio.Future[Any]) -> None:
    """What it still raises is nobody's: asyncio would log it, and it may quote secrets."""
    if not future.cancelled():
        future.exception()


async def _until(deadline: float, stream: Any, module_id: str) -> AsyncIterator[Any]:
    """The chunks of a stream; ModuleTimeoutError when there is none at `deadline` (epoch seconds)."""
    seconds = deadline - time.time()
    async with aclosing(stream):
        while True:
            limit = asyncio.timeout(deadline - time.time())
            try:
                async with limit:
                    chunk = await anext(stream)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if not limit.expired():  # it is the module's own
                    raise
                raise ModuleTimeoutError(module_id=module_id, timeout_ms=int(seconds * 1000)) from None
            yield chunk


class _ModuleThreads(ThreadPoolExecutor):
    """Threads for sync modules, each call with the context variables of the task that makes it.

    Many, so that slow modules leave room, and daemons, so that one which never returns does not keep the process. More
    calls than `limit` wait for a thread to be free; one that is told to end meanwhile is not begun.
    """

    def __init__(self, limit: int = 256) -> None:
        super().__init__(limit)
        self._calls = queue.SimpleQueue[Callable[[], None] | None]()
        self._idle = threading.Semaphore(0)
        self._unstarted = limit

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future = Future[T]()
        context = contextvars.copy_context()

        def call() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(context.run(fn, *args, **kwargs))
                except BaseException as error:  # SystemExit included: the module's, not this thread's
                    # A future would never end with StopIteration.
                    future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)

        self._calls.put(call)
        if not self._idle.acquire(blocking=False) and self._unstarted:
            self._unstarted -= 1
            threading.Thread(target=self._work, daemon=True).start()
        return future

    def _work(self) -> None:
        while call := self._calls.get():
            call()
            del call  # and what the module returned
            self._idle.release()
        self._calls.put(None)  # for the next thread

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._calls.put(None)


# ---- Approval: who is asked before a call runs; event loop only ----

_NOBODY = "Nobody can be asked"
_CONTROL = "system.control."  # how the ids of apcore's modules begin that configure and reload the application
_SHOWN_MAX = 500  # characters of one text in a question


class ElicitationApprovalHandler(AlwaysDenyHandler):
    """Approval by the user who made a call, asked for by elicitation; an Executor takes it as its `approval_handler`.

    A call is rejected where its user cannot be asked, as when it does not come through MCP. Source: SRS FR-ANNOT-006.
    """

    async def request_approval(self, request: ApprovalRequest) -> ApprovalResult:
        call = _call_of(request.context)
        if call is None or not call.can_ask:
            return ApprovalResult(status="rejected", reason=_NOBODY)
        field = {"type": "boolean", "title": "Let it run", "default": False}
        schema = {"type": "object", "properties": {"approve": field}, "required": ["approve"]}
        answer = await call.elicit(_approval_question(request), schema, "approval")
        return ApprovalResult(status="approved" if answer and answer["approve"] else "rejected")


class _AskOrLetThrough(ElicitationApprovalHandler):
    """Approval where it is not required: a call whose user cannot be asked is let through, with a WARNING.

    Never one of apcore's own modules that change how the application runs: its caller may be anybody.
    """

    async def request_approval(self, request: ApprovalRequest) -> ApprovalResult:
        call = _call_of(request.context)
        if call is None or call.can_ask or request.module_id.startswith(_CONTROL):
            return await super().request_approval(request)
        label = _label(request.module_id, call.caller)
        logger.warning("%s is let through without approval: its user cannot be asked", label)
        return ApprovalResult(status="approved", reason=_NOBODY)


def _approval_question(request: ApprovalRequest) -> str:
    shown: Any = sorted(request.arguments)  # without a schema, nothing tells what is sensitive
    with suppress(AttributeError, KeyError, ValueError):
        # A module may call another with tuples and models, inside of which a schema marks nothing.
        arguments = to_jsonable_python(request.arguments)
        shown = _redact_arguments(arguments, request.context.executor.registry, request.module_id)
    question = f"Let {request.module_id} run?"
    dangers = [name for name in _SUFFIX_FIELDS[:3] if getattr(request.annotations, name)]
    if dangers:
        question += f" It is annotated as {' and '.join(dangers)}."
    text = json.dumps(_shortened(shown), ensure_ascii=False, default=_text_of)
    return f"{question}\nArguments: {_one_line(text)}"


def _shortened(value: Any) -> Any:
    """Copy plain JSON with each long text cut by itself, which it then says: no other value goes unseen for it."""
    if isinstance(value, str) and len(value) > _SHOWN_MAX:
        return f"{value[:_SHOWN_MAX]}… ({_SHOWN_MAX} of {len(value):,} characters)"
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    return value


class _WatchfulApprovalGate(BuiltinApprovalGate):
    """An Executor's approval gate that notes who takes part in a server's call, and lets that server decide.

    The server decides where the Executor has no handler. Everything else is up to the gate behind this one, which the
    Executor had before: of a call that no server made, and of one that the Executor's own handler decides about. What
    a person takes to decide does not count against the call.
    """

    def __init__(self, gate: BuiltinApprovalGate) -> None:
        super().__init__()
        self.name = gate.name
        self.timeout_ms = gate.timeout_ms
        self._gate = gate

    @property
    def handler(self) -> Any:
        return self._gate.handler

    @property
    def policy(self) -> ExecutionPolicy | None:
        return self._gate.policy

    def set_handler(self, handler: Any) -> None:
        self._gate.set_handler(handler)

    def set_policy(self, policy: ExecutionPolicy | None) -> None:
        self._gate.set_policy(policy)

    async def execute(self, ctx: PipelineContext) -> StepResult:
        call = _call_of(ctx.context)
        if call is None:
            return await self._gate.execute(ctx)
        call.involved[ctx.module_id] = ctx.module
        gate = self._gate
        if gate.handler is None:
            gate = copy.copy(gate)  # other servers, and other calls at the same time, have the same one
            gate.set_handler(self._approver(call.options.approval))
        started = time.time()
        try:
            return await gate.execute(ctx)
        finally:
            if ctx.context.global_deadline is not None:
                ctx.context.global_deadline += time.time() - started

    def _approver(self, approval: str | ApprovalHandler) -> ApprovalHandler | None:
        if not isinstance(approval, str):
            return approval
        if approval == "off":
            return None
        if approval == "deny":
            return AlwaysDenyHandler()
        if approval == "require" or (self.policy is not None and self.policy.strict):
            return ElicitationApprovalHandler()
        return _AskOrLetThrough()


# ---- Router: a `tools/call` to the Executor and back, also while its user is asked; event loop only ----


def _merge(base: JSONObject, chunk: JSONObject) -> None:
    """Merge a streamed chunk as apcore's Executor does: objects by their keys, anything else replaced."""
    for key, value in chunk.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _protocol_error(code: int, message: str, data: Any = None) -> Exception:
    from mcp.shared.exceptions import MCPError

    return MCPError(code, message, data)


class _ExecutionRouter:
    """Send a `tools/call` through apcore's Executor and bring back a tool result, whatever happens on the way.

    Nothing is raised but cancellation, and a JSON-RPC error for a retry whose state resumes no call, or a call that its
    client has to be able to answer a question for (SRS FR-EXEC-007). A call that waits for its user is `parked` between
    the `input_required` answer and the client's retry, under a state of 32 random bytes (which the SDK's
    RequestStateBoundary seals and binds to tool and arguments). It is resumed once, by who began it, so its module
    never runs twice; if it ends meanwhile, its result waits for the retry.
    """

    def __init__(self, catalog: _ToolCatalog, options: _Options) -> None:
        self._catalog = catalog
        self._executor = options.executor
        self._options = options
        self.place: Any = nullcontext  # what a call runs in: it may have to wait for it
        self._stopped = False
        self.parked: dict[str, tuple[_Call, asyncio.Future[Any]]] = {}
        self.running: set[_Call] = set()
        strategy = self._executor.current_strategy
        for step in strategy.steps:
            if isinstance(step, BuiltinApprovalGate) and not isinstance(step, _WatchfulApprovalGate):
                strategy.replace(step.name, _WatchfulApprovalGate(step))
            elif isinstance(step, BuiltinExecute) and not isinstance(step, _Execution):
                strategy.replace(step.name, _Execution(step))

    def stop(self) -> None:
        """End what still runs or waits; who asked for it is told so. Nothing begins from then on."""
        self._stopped = True
        for call in self.running:
            call.cancel()
        self.parked.clear()

    async def handle_call(self, ctx: RequestContext, params: CallToolRequestParams) -> JSONObject:
        async with self.place():
            if self._stopped:
                raise _protocol_error(-32000, "Server is shutting down")
            try:
                caller = _caller(getattr(ctx.request, "scope", {}))
            except Exception:  # a user of a class of its own
                logger.exception("Tool call error: %.200s - its caller cannot be read", params.name)
                return _failure(_UNEXPECTED, "GENERAL_INTERNAL_ERROR")
            if params.request_state is not None:
                return await self._resume(ctx, caller, params.request_state, params.input_responses or {})
            tool = self._catalog.find(params.name)
            if tool is None:
                name = params.name[:200]
                label = _label(name, caller)
                logger.debug("Tool call: %s", label)
                logger.error("Tool call error: %s - ModuleNotFoundError: Module not found: %s", label, name)
                return _failure(f"Module not found: {name}", "MODULE_NOT_FOUND")
            call = _Call(tool, params.arguments or {}, self._options, caller)
            call.attach(ctx)
            return await self.run(call, self._options.output_formatter)

    async def _resume(
        self, ctx: RequestContext, caller: Identity | None, state: str, responses: Mapping[str, Any]
    ) -> JSONObject:
        call, answer = self.parked.get(state) or (None, None)
        if call is None or call.caller != caller:
            raise _protocol_error(-32602, "Invalid or expired requestState", {"reason": "invalid_request_state"})
        del self.parked[state]
        call.attach(ctx)
        key = call.question[0]
        if call.answer.done():  # the module has given its question up, or has ended
            call.move("runs")
        elif call.can_ask and (answer is not call.answer or key not in responses):
            call.move("asks")
        else:
            call.answer.set_result(responses.get(key))
            call.move("runs")
        return await self._reply(call)

    async def run(self, call: _Call, formatter: Callable[[Any], str] | None = None) -> JSONObject:
        """Begin a call; its result, its text as `formatter` writes it, or the question that it asks before."""
        call.task = asyncio.create_task(self._execute(call, formatter))
        return await self._reply(call)

    async def _reply(self, call: _Call) -> JSONObject:
        """The call's result, or the question that it asks before; who waits for it no more has cancelled the call."""
        try:
            while not call.turn.is_set():
                await call.turn.wait()
        except asyncio.CancelledError:
            call.cancel()
            raise
        if call.state == "ended":
            result = call.task.result()
            del call.task  # or the result stays as long as the call
            return result
        if len(self.parked) == _PARKED_MAX:
            call.cancel()
            raise _protocol_error(-32000, "Too many calls wait for their users' answers")
        call.move("parked")
        state = secrets.token_urlsafe(32)
        self.parked[state] = (call, call.answer)
        asyncio.get_running_loop().call_later(_PARKED_SECONDS, self._expire, state)
        key, form = call.question
        asked = {key: {"method": "elicitation/create", "params": form}}
        return {"resultType": "input_required", "requestState": state, "inputRequests": asked}

    def _expire(self, state: str) -> None:
        call, _ = self.parked.pop(state, (None, None))
        if call is not None:
            logger.warning("Question of %s was not answered in time; its call is given up", call.label)
            call.cancel()

    async def _execute(self, call: _Call, formatter: Callable[[Any], str] | None) -> JSONObject:
        """Run the module to its end; the tool result, of whatever kind."""
        tool = call.tool
        started = time.perf_counter()
        logger.debug("Tool call: %s", call.label)
        # The client's span, when it sent one (W3C trace context, SEP-414).
        headers = {key: value for key, value in call.meta.items() if isinstance(value, str)}
        context: Context[Any] = Context.create(
            identity=call.caller,
            trace_parent=TraceContext.extract(headers),
            cancel_token=call.token,
            data={_CALL_KEY: call, MCP_PROGRESS_KEY: call.report, MCP_ELICIT_KEY: call.elicit},
        )
        self.running.add(call)
        _CURRENT.set(call)
        try:
            return _success(tool, await self._call_module(call, context), formatter, call.label)
        except BaseException as error:  # a module may raise anything
            if call.task.cancelling():
                call.token.cancel()
                return _failure(_SENTENCES["EXECUTION_CANCELLED"], "EXECUTION_CANCELLED")
            self._count_refusal(error, context, tool)
            mapper = _ErrorMapper(call.label, tool, call.arguments, call.involved.values(), self._options.registry)
            result = mapper.to_result(error)
            unasked = isinstance(error, ApprovalDeniedError) and error.reason == _NOBODY
            if unasked and call.parks:
                required: JSONObject = {"requiredCapabilities": {"elicitation": {"form": {}}}}
                raise _protocol_error(-32021, "Client did not declare form elicitation", required) from None
            return result
        finally:
            call.answer.cancel()
            call.move("ended")
            call.arguments = {}  # what the module left running keeps its call
            call.session = None
            self.running.discard(call)
            elapsed_ms = (time.perf_counter() - started) * 1000
            logger.debug("Tool call ended: %s, %.1f ms, trace %s", call.label, elapsed_ms, context.trace_id)

    def _count_refusal(self, error: BaseException, context: Context[Any], tool: _Tool) -> None:
        """Count a call that ended before apcore's middleware, which counts all others, had seen it."""
        collector = self._options.metrics_collector
        if not isinstance(error, ModuleError) or METRICS_STARTS.exists(context):
            return
        if isinstance(collector, MetricsCollector):
            collector.increment_calls(tool.module_id, "error")
            collector.increment_errors(tool.module_id, error.code)

    async def _call_module(self, call: _Call, context: Context[Any]) -> Any:
        tool = call.tool
        if self._options.validate_inputs or _unknown(tool, call.arguments):
            _check_input(tool, call.arguments)
        if not (tool.about.annotations.streaming and "progress_token" in call.meta):
            return await self._executor.call_async(tool.module_id, call.arguments, context)
        # A stream: the merged chunks, each sent as a progress notification (SRS FR-STREAM-001).
        merged: JSONObject = {}
        stream: Any = self._executor.stream(tool.module_id, call.arguments, context)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                _merge(merged, chunk)
                await call.report(max(call.progress, 0) + 1, None, _as_json(tool, chunk)[0])
        return merged


# ---- Server: the MCP handlers, in every protocol version the SDK speaks; event loop only ----

_SHUTDOWN_SECONDS = 5.0  # what running calls are given when the server ends (SRS NFR-REL-001)
_MESSAGE_MAX_BYTES = 4 * 1024 * 1024  # one message of a client, on stdio as the SDK allows over HTTP
# What 2026-07-28 wants to know of every list: stale at once, as it may change at any time; who keeps it has to listen.
_FRESH = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
_ANNOUNCE_SECONDS = 0.02  # changes of the tool list this close together are announced once


class _Activity(asyncio.Queue[None]):
    """What has been asked and not answered yet, as a queue counts it: `join()` waits until that is nothing."""

    def begin(self) -> None:
        """Count one more, until `task_done()`."""
        self.put_nowait(None)
        self.get_nowait()


class _Bridge:
    """One registry served to any number of clients: the MCP handlers, and what lives as long as the server does.

    Use as an async context manager, once. `closing` refuses new requests; `activity` tells when the running ones are
    answered. Changes of the catalog are announced to handshake clients on their standalone stream and to clients of
    2026-07-28 on the streams they listen on; a client that does not read holds up only itself.
    """

    def __init__(self, options: _Options) -> None:
        from mcp.server.lowlevel import Server
        from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
        from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler

        self.options = options
        self.closing = False
        self.deadline = 0.0  # of the server and whatever goes on, by the loop's clock; 0 until it is told to end
        self.catalog = _ToolCatalog(options)
        self.router = _ExecutionRouter(self.catalog, options)
        self.activity = _Activity()
        self._bus = InMemorySubscriptionBus()
        self._listener = ListenHandler(self._bus)
        self._changed = asyncio.Event()
        self.endless = weakref.WeakSet[Any]()  # tasks and cancel scopes of what would go on for ever
        self.sessions = AsyncExitStack()  # closed with the server
        middleware = options.metrics_middleware()
        if middleware is not None:
            options.executor.use(middleware)
            self.sessions.callback(options.executor.remove, middleware)
        handlers: JSONObject = {
            "on_list_tools": self._list_tools,
            "on_call_tool": self.router.handle_call,
            "on_list_resources": self._list_resources,
            "on_list_resource_templates": self._list_resource_templates,
            "on_read_resource": self._read_resource,
            "on_subscriptions_listen": self._listen,
        }
        version = options.version or __version__
        self.server: Any = Server(options.name, version=version, instructions=options.instructions, **handlers)
        # Without it, the SDK runs tools/list for every 2026-07-28 HTTP call to check its headers (as before mcp 2.3).
        self.server.get_tool_input_schema = lambda name: getattr(self.catalog.find(name), "input_schema", None)
        security = RequestStateSecurity.ephemeral(ttl=_PARKED_SECONDS)
        self.server.middleware += [self._intercept, RequestStateBoundary(security, default_audience=options.name)]

    async def __aenter__(self) -> _Bridge:
        loop = asyncio.get_running_loop()
        self.catalog.follow(lambda: loop.call_soon_threadsafe(self._wake))
        self.endless.add(loop.create_task(self._publish()))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.catalog.close()
        await self.finish()

    async def finish(self, *, closing: bool = True) -> None:
        """End the streams that clients listen on, wait for what is being answered (5 seconds at most), end the rest."""
        from anyio import CancelScope, current_time

        self.closing = closing
        self.deadline = self.deadline or current_time() + _SHUTDOWN_SECONDS
        self._listener.close()
        async with self.sessions:
            with CancelScope(deadline=self.deadline):
                await self.activity.join()
            self.router.stop()
            with CancelScope(deadline=self.deadline + 0.5):  # so that who asked is told
                await self.activity.join()
            for each in self.endless:
                each.cancel()

    async def _intercept(self, ctx: RequestContext, call_next: CallNext) -> Any:
        """Server middleware: what must come before or after the SDK's own handling of a request."""
        if ctx.request_id is None:
            return await call_next(ctx)
        if self.closing:
            raise _protocol_error(-32000, "Server is shutting down")
        self.activity.begin()  # until the request's own task ends, when the answer has been handed over
        cast(Any, asyncio.current_task()).add_done_callback(lambda _: self.activity.task_done())
        # What outlives the session of each of its requests; the SDK gives no other handle on it.
        connection = ctx.session._connection  # pyright: ignore[reportPrivateUsage]
        version = (ctx.meta or {}).get("io.modelcontextprotocol/protocolVersion")
        if version not in (None, ctx.protocol_version) and ctx.method != "initialize":
            raise _protocol_error(-32020, "The header names another protocol version than the request's _meta")
        if ctx.method.endswith("/list") and (ctx.params or {}).get("cursor") is not None:
            raise _protocol_error(-32602, "Invalid cursor: every list has one page")
        is_new = not connection.initialize_accepted  # or it says hello again
        result: Any = await call_next(ctx)
        if ctx.method == "tools/list":  # only now, past the SDK's validation, which would go through every tool
            result["tools"] = self._listing(ctx.session)
        elif ctx.method == "initialize":
            follows = connection.has_standalone_channel
            if follows and is_new:
                connection.exit_stack.callback(asyncio.create_task(self._tell(ctx.session)).cancel)
            # The SDK's HTTP manager offers no way to say so, and a client that is told no ignores the notification.
            result["capabilities"]["tools"] = {"listChanged": follows}
            result["capabilities"]["resources"] = {"listChanged": follows, "subscribe": False}
        return result

    def _listing(self, session: ServerSession) -> list[JSONObject]:
        """The tools under the names that a client takes."""
        client = session.client_params
        names = self.options.tool_names
        if names == "auto" and client is not None and _CLIENTS_WITHOUT_DOTS.match(client.client_info.name):
            names = "portable"
        return self.catalog.listing(portable=names == "portable")

    async def _list_tools(self, ctx: RequestContext, params: object) -> JSONObject:
        return {"tools": [], **_FRESH}

    async def _list_resources(self, ctx: RequestContext, params: object) -> JSONObject:
        return {"resources": [tool.resource for tool in self._documented().values()], **_FRESH}

    async def _list_resource_templates(self, ctx: RequestContext, params: object) -> JSONObject:
        return {"resourceTemplates": [], **_FRESH}

    async def _read_resource(self, ctx: RequestContext, params: ReadResourceRequestParams) -> JSONObject:
        tool = self._documented().get(params.uri)
        if tool is None:
            code = -32602 if _is_modern(ctx.protocol_version) else -32002
            raise _protocol_error(code, "Resource not found", {"uri": params.uri})
        content = {"uri": params.uri, "mimeType": tool.resource["mimeType"], "text": tool.documentation}
        return {"contents": [content], **_FRESH}

    def _documented(self) -> dict[str, _Tool]:
        """The listed modules that have documentation, by its URI (SRS FR-RESOURCE-001, -002)."""
        return {tool.resource["uri"]: tool for tool in self.catalog.tools.values() if tool.documentation}

    async def _listen(self, ctx: RequestContext, params: Any) -> Any:
        params.notifications.prompts_list_changed = None  # or it would be promised, and there are none
        if self.deadline:  # what was asked right before the end is still begun, and would go on for ever
            asyncio.get_running_loop().call_soon(self._listener.close)
        return await self._listener(ctx, params)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _changes(self) -> AsyncIterator[None]:
        """Something for each change of the catalog from now on; what changes until it is asked for again is one."""
        changed = self._changed
        while await changed.wait():
            await asyncio.sleep(_ANNOUNCE_SECONDS)
            changed = self._changed
            yield

    async def _publish(self) -> None:
        """Tell clients of 2026-07-28 of every change: the lists, and each resource that is another or gone."""
        from mcp.server.subscriptions import ResourcesListChanged, ResourceUpdated, ToolsListChanged

        now = self._documented()
        async for _ in self._changes():
            before = now
            now = self._documented()
            await self._bus.publish(ToolsListChanged())
            await self._bus.publish(ResourcesListChanged())
            for uri in dict(before.items() ^ now.items()):
                await self._bus.publish(ResourceUpdated(uri))

    async def _tell(self, session: ServerSession) -> None:
        """Tell a handshake client of every change of the lists."""
        async for _ in self._changes():
            await session.send_tool_list_changed()
            await session.send_resource_list_changed()


# ---- Explorer: one page, and as JSON what it shows and runs ----


class _Explorer:
    """The Tool Explorer: one page, and as JSON what it shows and runs (SRS FR-EXPLORER-001 to -006).

    The page may neither load nor send anything elsewhere, nor be framed; nobody else's page may read what is here.
    """

    def __init__(self, bridge: _Bridge) -> None:
        from starlette.responses import HTMLResponse, JSONResponse
        from starlette.routing import Route

        self._bridge = bridge
        self._options = bridge.options
        page = Path(__file__).with_name("explorer.html").read_text("utf-8")
        policy = "default-src 'none'; img-src data:; media-src data:; connect-src 'self'"
        policy += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        for tag, inside in re.findall(r"<(script|style)>(.*?)</\1>", page, re.DOTALL):
            digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
            policy += f"; {tag}-src 'sha256-{digest}'"
        headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
        headers |= {"Cross-Origin-Resource-Policy": "same-origin", "Referrer-Policy": "no-referrer"}
        self._answer = functools.partial(JSONResponse, headers=headers)
        prefix = self._options.explorer_prefix
        shown: JSONObject = {
            "/": HTMLResponse(page, headers=headers),
            "/server": self.server,
            "/tools": self.tools,
            "/tools/{name}": self.tool,
        }
        self.routes = [Route(prefix + path, endpoint, methods=["GET"]) for path, endpoint in shown.items()]
        call: Any = self._answer({"error": "Tool execution is disabled"}, 403)
        if self._options.allow_execute:
            call = self.call
        self.routes.append(Route(f"{prefix}/tools/{{name}}/call", call, methods=["POST"]))

    async def server(self, request: Request) -> Response:
        options = self._options
        facts = {
            "name": options.name,
            "version": options.version or __version__,
            "instructions": options.instructions,
            "transport": options.transport,
            # Relative to the page, which knows where it is: a proxy may have taken a prefix away.
            "endpoint": posixpath.relpath(urlsplit(options.url).path, options.explorer_prefix),
            "allowExecute": options.allow_execute,
        }
        return self._answer(facts)

    async def tools(self, request: Request) -> Response:
        listing = self._bridge.catalog.listing(portable=self._options.tool_names == "portable")
        return self._answer([{key: tool[key] for key in tool if not key.endswith("Schema")} for tool in listing])

    async def tool(self, request: Request) -> Response:
        """All there is to know of a tool."""
        tool = self._bridge.catalog.find(request.path_params["name"])
        if tool is None:
            return self._unknown(request)
        definition = tool.definition(portable=self._options.tool_names == "portable")
        return self._answer({**definition, "documentation": _further(tool), "examples": _examples(tool)})

    async def call(self, request: Request) -> Response:
        """Run a tool like any other call, by a client that cannot be asked; to go away cancels it.

        Answers its result in the Explorer's terms: `{"result", "content"}`, or `{"error", ...}`, and a status.
        """
        tool = self._bridge.catalog.find(request.path_params["name"])
        if tool is None:
            return self._unknown(request)
        try:
            arguments = {**from_json(await request.body(), allow_inf_nan=False)}
        except (TypeError, ValueError):
            return self._answer({"error": "Request body must be a JSON object: the tool's arguments"}, 400)
        call = _Call(tool, arguments, self._options, _caller(request.scope))
        gone = asyncio.ensure_future(request.receive())  # the body has been read, so all that can come is the end
        gone.add_done_callback(lambda _: call.cancel())
        result = await self._bridge.router.run(call)
        gone.cancel()
        text, *files = result["content"]
        if result["isError"]:
            status = 400 if text["text"].startswith("Input validation failed") else 500
            return self._answer({"error": text["text"], **result["_meta"]["apcore-mcp/error"]}, status)
        answer = {"result": json.loads(text["text"])}
        if files:
            answer["content"] = files
        return self._answer(answer)

    def _unknown(self, request: Request) -> Response:
        return self._answer({"error": f"Tool {request.path_params['name']!r} not found"}, 404)


# ---- HTTP: the Starlette app and the guard before it ----

# A Host header in lower case: a name, or this machine's own or an address (of "a@b", b would be the host).
_HOST = re.compile(r"((localhost|\d+(?:\.\d+){3}|\[[\w:.%]+\])|[\w.-]*)(:\d+)?", re.ASCII)
_LOOPBACK = re.compile(r"localhost|127\.[\d.]+|[0:]+1")


@dataclasses.dataclass
class _Guard:
    """ASGI middleware before every route: who may ask, and whether the server still takes requests.

    A request must name an address or `localhost` (which no DNS name that is rebound to this machine can be), the host
    that is listened on, or one of `allowed_hosts`; without these, and not on loopback, a program may name anything. A
    web page must come from the very host and port that it names, which a wildcard alone does not allow; and whoever
    asks for the Explorer is taken for a page. A POST must be JSON, so that no form can make one.
    """

    app: ASGIApp
    bridge: _Bridge

    def __post_init__(self) -> None:
        options = self.bridge.options
        own = options.host.lower()
        allowed = options.allowed_hosts or ([] if _LOOPBACK.fullmatch(own) else ["*"])
        self._allowed = [own, f"{own}:*", *map(str.lower, allowed)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        from starlette.requests import ClientDisconnect
        from starlette.websockets import WebSocketClose

        app = self.app
        if scope["type"] == "websocket":
            app = WebSocketClose()
        elif scope["type"] == "http":
            app = self._refusal(scope) or app
            # No stream can be resumed: who wants to is given a new one.
            headers = [header for header in scope["headers"] if header[0] != b"last-event-id"]
            scope = {**scope, "headers": headers}
        with ExitStack() as stack:
            stack.enter_context(suppress(ClientDisconnect))
            if scope.get("method") == "POST":  # a GET may be a stream without an end
                self.bridge.activity.begin()
                stack.callback(self.bridge.activity.task_done)
            await app(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        from starlette.datastructures import Headers
        from starlette.responses import PlainTextResponse

        options = self.bridge.options
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        origins = {origin.lower() for origin in headers.getlist("origin")}
        # A page's own GET carries no Origin.
        by_page = origins or (options.explorer and f"{options.explorer_prefix}/" in scope["path"])
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        named = _HOST.fullmatch(host)
        patterns = self._allowed
        if by_page:
            patterns = [pattern for pattern in patterns if re.search(r"\w", pattern.split(":")[0])]
        if named is None or not (named[2] or any(fnmatchcase(host, pattern) for pattern in patterns)):
            status, fault = 421, "Invalid Host header: to let it in, name it in allowed_hosts (--allowed-hosts)"
        elif not origins <= {f"http://{host}", f"https://{host}"}:
            status, fault = 403, "Invalid Origin header: a web page must come from the host that it names"
        elif scope["method"] == "POST" and media_type != "application/json":
            status, fault = 415, "Content-Type must be application/json"
        elif not unquote(scope["query_string"]).isprintable():  # the SDK logs a part of it as it is
            status, fault = 400, "Invalid query"
        elif self.bridge.closing:
            status, fault = 503, "Server is shutting down"
        else:
            return None
        logger.warning("HTTP request refused: %s (Host %.200r, Origin %.200r)", fault, host, origins)
        return PlainTextResponse(fault, status)


def _own_sessions(app: ASGIApp) -> ASGIApp:
    """ASGI middleware behind the user's own: a session belongs to the caller who opened it; to others there is none.

    The SDK sees to that for users of its own kind, so any other caller becomes one.
    """
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
    from mcp.server.auth.provider import AccessToken

    async def owned(scope: Scope, receive: Receive, send: Send) -> None:
        caller = None
        if not isinstance(scope.get("user"), AuthenticatedUser):
            with suppress(Exception):  # who cannot be read is nobody, and each call of his fails
                caller = _caller(scope)
        if caller is not None:
            token = AccessToken(token="", client_id=caller.id, scopes=[])
            scope = {**scope, "user": AuthenticatedUser(token)}
        await app(scope, receive, send)

    return owned


def _own_routes(bridge: _Bridge) -> list[BaseRoute]:
    """`/health`, and where asked for `/metrics` (SRS FR-HEALTH-001, F-021) and the Explorer."""
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    options = bridge.options
    started = time.monotonic()

    async def health(request: Request) -> Response:
        count = len(bridge.catalog.tools)
        facts = {
            "status": "ok",
            "module_count": count,
            "tools_count": count,
            "uptime_seconds": time.monotonic() - started,
            "version": options.version or __version__,
        }
        return JSONResponse(facts)

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(options.metrics_collector.export_prometheus(), media_type="text/plain; version=0.0.4")

    routes: list[BaseRoute] = [Route("/health", health)]
    if options.metrics_collector is not None:
        routes.append(Route("/metrics", metrics))
    if options.explorer:
        routes += _Explorer(bridge).routes
    return routes


async def _http_app(bridge: _Bridge) -> Starlette:
    """The app of one bridge: `/mcp`, or `/sse` and `/messages/`."""
    from anyio import CancelScope
    from mcp.server.sse import SseServerTransport
    from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
    from mcp.server.transport_security import RequestBodyLimitMiddleware
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Mount, Route

    options = bridge.options
    idle = None if options.stateless else 1_800.0  # seconds of silence, and a handshake client has to begin anew
    sessions = StreamableHTTPSessionManager(bridge.server, stateless=options.stateless, session_idle_timeout=idle)
    routes: list[BaseRoute] = [Route(path, StreamableHTTPASGIApp(sessions)) for path in ("/mcp", "/mcp/")]
    if options.transport == "sse":
        transport = SseServerTransport("/messages/")

        async def stream(scope: Scope, receive: Receive, send: Send) -> None:
            """One connection, whose stream is the answer to one GET."""
            async with transport.connect_sse(scope, receive, send) as streams:
                with CancelScope() as connection:  # not of the stream itself: what has been answered is still sent
                    bridge.endless.add(connection)
                    await bridge.server.run(*streams, bridge.server.create_initialization_options())

        get = Route("/sse", Mount("", stream), methods=["GET"])  # which itself would call a function for a response
        routes = [get, Mount("/messages/", transport.handle_post_message)]
    routes += _own_routes(bridge)
    middleware = [
        Middleware(RequestBodyLimitMiddleware, max_body_size=_MESSAGE_MAX_BYTES),
        Middleware(_Guard, bridge=bridge),  # second: a body may take its time, and while it does the server may end
        *(options.middleware or ()),
        Middleware(_own_sessions),
    ]
    await bridge.sessions.enter_async_context(sessions.run())
    app = Starlette(routes=routes, middleware=middleware)
    app.middleware_stack = app.build_middleware_stack()  # not with the first request, which would get the error
    return app


@asynccontextmanager
async def _serve_http(bridge: _Bridge) -> AsyncIterator[asyncio.Task[None]]:
    """Answer on the options' host and port. Yields a task that ends only if the HTTP server does."""
    import uvicorn

    host, port = bridge.options.host, bridge.options.port
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    # Each connection inherits it: or an answer would wait 40 ms for a delayed ACK.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    config = uvicorn.Config(await _http_app(bridge), lifespan="off", log_config=None, access_log=False)
    http: Any = uvicorn.Server(config)
    # Or it would take over the signals and raise them again at the end.
    http.capture_signals = nullcontext
    serving = asyncio.create_task(http.serve([listener]))
    try:
        yield serving
    finally:
        http.should_exit = True
        # Clients may read until the deadline; then they lose the rest, which ends whoever was sending it.
        left = bridge.deadline - serving.get_loop().time()
        await asyncio.wait({serving}, timeout=max(0.2, left))
        for connection in [*http.server_state.connections]:
            connection.transport.abort()
        await asyncio.wait({serving}, timeout=2)


# ---- stdio: pipes, and who owns the standard streams ----

_LINE_MAX_BYTES = 16 * 1024 * 1024  # what is kept of a line; twice as much may be read ahead
_WRITE_BUFFER_BYTES = 16 * 1024 * 1024  # answers left unread before a client is made to wait; some send all calls first
_claim_lock = threading.RLock()
_claimed: list[tuple[int, int]] = []


@contextmanager
def _standard_streams(*, for_good: bool = False) -> Iterator[tuple[int, int]]:
    """Take fd 0 and fd 1 for the protocol, as private duplicates that nobody else writes to.

    Until the outermost context ends, fd 0 is at its end and fd 1 is stderr: whatever modules, C code or child processes
    print misses the protocol; `for_good` also what they print while the process ends. The command line enters this
    before it imports the first module, `serve()` again inside. RuntimeError when the process has no standard streams,
    or another thread serves them.
    """
    if not _claim_lock.acquire(blocking=False):
        raise RuntimeError("stdin and stdout are taken: another server of this process uses them")
    with ExitStack() as stack:
        stack.callback(_claim_lock.release)
        if not _claimed:
            _divert()
            if not for_good:
                stack.callback(_restore)
        yield _claimed[0]


def _divert() -> None:
    if sys.__stdin__ is None or sys.__stdout__ is None:  # the numbers may long mean something else
        raise RuntimeError("stdin or stdout cannot be opened: the process was started without")
    with open(os.devnull, "r+b", 0) as nothing:
        wire = os.dup(0), os.dup(1)
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno() if sys.__stderr__ is None else 2, 1)
    _flush_stdout()
    _claimed.append(wire)


def _restore() -> None:
    _flush_stdout()
    for fd, private in enumerate(_claimed.pop()):
        os.dup2(private, fd)
        os.close(private)


def _flush_stdout() -> None:
    """Send what Python and C still hold where fd 1 points now; from then on Python does so after each line."""
    import ctypes

    with suppress(OSError, ValueError, AttributeError):  # it was closed or replaced
        cast(Any, sys.stdout).reconfigure(line_buffering=True)
    with suppress(TypeError):  # Windows has no such library
        ctypes.CDLL(None).fflush(None)


def _as_pipes(wire: tuple[int, int], stack: ExitStack) -> tuple[Any, Any]:
    """Both directions as files that the event loop can wait for; until `stack` ends.

    These are sockets in the place of what it cannot wait for: a terminal, a file, Windows' pipes. Threads copy then.
    """
    source, sink = os.fdopen(os.dup(wire[0]), "rb", 0), os.fdopen(os.dup(wire[1]), "wb")
    pipes = all(stat.S_IFMT(os.fstat(fd).st_mode) in (stat.S_IFIFO, stat.S_IFSOCK) for fd in wire)
    # Of one socket for both, asyncio's pipe transports would take the input for the end of the output.
    if sys.platform != "win32" and pipes and not os.path.sameopenfile(*wire):
        for fd in wire:
            stack.callback(os.set_blocking, fd, True)  # as it was found
        return source, sink

    def copy(source: Any, sink: Any) -> None:
        with suppress(OSError), source, sink:  # also when a terminal goes away, which is an error
            while data := source.read(65536):
                sink.write(data)
                sink.flush()

    incoming, filled = socket.socketpair()
    outgoing, drained = socket.socketpair()
    threads = _ModuleThreads()
    with filled, drained:  # open until these files are closed
        threads.submit(copy, source, filled.makefile("wb"))
        writing = threads.submit(copy, drained.makefile("rb", 0), sink)
    threads.shutdown()  # each ends with what it copies
    stack.callback(wait, [writing], 1)  # until everything is written
    return incoming, outgoing


class _StdioConnection(AsyncExitStack):
    """One client at the other end of a wire, as the streams of messages that the SDK's server runs on.

    The server also closes it, which does nothing: whoever opened the wire closes it.

    A line that is no message, or longer than 4 MiB, is answered with a JSON-RPC error, up to 16 MiB under its id; the
    SDK would drop it, and its sender wait for ever. When the input ends, what has been asked is still answered, for 5
    seconds at most: only then does the stream end.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bridge: _Bridge) -> None:
        super().__init__()
        self._reader = reader
        self._writer = writer
        self._bridge = bridge
        self._asked = list[int | str]()  # the ids of this server's own requests
        self._places = asyncio.Semaphore(250)  # as many calls may run; none of them has to wait for a thread
        self._writing = asyncio.Lock()
        bridge.router.place = self._place
        writer.transport.set_write_buffer_limits(_WRITE_BUFFER_BYTES)

    @asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """A place among the calls that run; once what was answered before is written, so that no more piles up."""
        async with self._places:
            await self._written()
            yield

    async def _written(self) -> None:
        """Wait until what was answered before is written: a client that does not read is not read either."""
        async with self._writing:
            pass

    async def receive(self) -> AsyncIterator[SessionMessage]:
        """The client's messages, to the end of its input."""
        from mcp.shared.message import ServerMessageMetadata, SessionMessage
        from mcp_types import ErrorData, JSONRPCError, JSONRPCNotification, JSONRPCRequest, jsonrpc_message_adapter

        settling = ServerMessageMetadata(on_request_unanswered=self._settle)
        while not self._reader.at_eof():
            await self._written()
            line = await self._read_line()
            if not line.strip():
                continue
            try:
                if len(line) > _MESSAGE_MAX_BYTES:
                    raise ValueError("It is too long")
                message = jsonrpc_message_adapter.validate_json(line, by_name=False)
                if isinstance(message, JSONRPCNotification) and "id" in json.loads(line):
                    raise ValueError("It is no id, or this would be a request")
            except ValueError:
                await self._refuse(line)
                continue
            if isinstance(message, JSONRPCRequest):
                self._bridge.activity.begin()  # until it is answered, or never will be as it has been cancelled
            yield SessionMessage(message, settling)
        gone = ErrorData(code=-32000, message="Connection closed")
        for request_id in self._asked:  # nobody is left to answer; of what has been answered, this is let pass
            yield SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=gone))
        await self._bridge.finish(closing=False)  # what has been read is still begun

    async def _read_line(self) -> bytes:
        """The next line, or of one that is longer than the reader's limit a part that is."""
        part = b""
        while True:
            try:
                rest = await self._reader.readuntil()
            except asyncio.IncompleteReadError as end:
                rest = end.partial
            except asyncio.LimitOverrunError as overrun:
                part = await self._reader.readexactly(overrun.consumed)
                continue
            return part or rest

    async def send(self, item: SessionMessage) -> None:
        from mcp_types import JSONRPCError, JSONRPCRequest, JSONRPCResponse

        message = item.message
        if isinstance(message, JSONRPCRequest):
            if self._reader.at_eof():
                raise _protocol_error(-32000, "Connection closed")  # there will be no answer
            self._asked.append(message.id)
        await self._write(message)
        if isinstance(message, JSONRPCResponse | JSONRPCError):
            await self._settle()

    async def _settle(self) -> None:
        self._bridge.activity.task_done()

    async def _write(self, message: JSONRPCMessage) -> None:
        """One at a time, or all would be text in memory while nobody reads; until most is read or the client gone."""
        async with self._writing:
            self._writer.write(message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
            with suppress(OSError):
                await self._writer.drain()

    async def _refuse(self, line: bytes) -> None:
        """Answer a line that is no message, under its id where one can be made out."""
        from mcp_types import ErrorData, JSONRPCError

        request_id = None
        try:
            decoded = json.loads(line)
            code = -32600
            reason = f"Invalid request: not a single JSON-RPC message of at most {_MESSAGE_MAX_BYTES} bytes"
            if isinstance(decoded, dict) and "result" not in decoded and type(decoded.get("id")) in (str, int):
                str(decoded["id"]).encode()  # or no answer can say it: half of a surrogate pair
                request_id = decoded["id"]
        except (ValueError, RecursionError):
            code = -32700
            reason = f"Parse error: line is not JSON, or longer than {_LINE_MAX_BYTES} bytes"
        await self._write(JSONRPCError(jsonrpc="2.0", id=request_id, error=ErrorData(code=code, message=reason)))


@asynccontextmanager
async def _serve_stdio(bridge: _Bridge) -> AsyncIterator[asyncio.Task[None]]:
    """Serve whoever holds the other ends of stdin and stdout. Yields a task that ends when they have gone.

    With pipes and sockets, no thread stands between a client and its answer. A client that reads no more has gone, so
    its input ends too. At the end it is given a second to read what it has been told; what is left then is dropped.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(_LINE_MAX_BYTES)
    with _standard_streams() as wire, ExitStack() as stack:
        source, sink = _as_pipes(wire, stack)
        incoming, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
        nothing = asyncio.StreamReader()
        outgoing, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(nothing), sink)
        writer = asyncio.StreamWriter(outgoing, protocol, None, loop)

        async def end() -> None:
            with suppress(OSError):
                await writer.wait_closed()
            incoming.close()

        gone = asyncio.create_task(end())
        connection = _StdioConnection(reader, writer, bridge)
        options = bridge.server.create_initialization_options()
        running = asyncio.create_task(bridge.server.run(connection.receive(), connection, options))
        try:
            yield running
        finally:
            running.add_done_callback(_silence)
            running.cancel()
            await asyncio.wait({running})
            writer.close()
            giving_up = loop.call_later(1, outgoing.abort)
            await gone
            giving_up.cancel()


# ---- Doors: the command line's, and `async_serve`, `MCPServer`, `serve` ----


async def run_openai_call(
    registry_or_executor: Registry | Executor | APCore,
    name: str,
    arguments: str | JSONObject,
    *,
    identity: Identity | None = None,
) -> str:
    """Run the call a model sent back; what the model is to be told, as text.

        output = await run_openai_call(executor, call.function.name, call.function.arguments)

    That is the result as an MCP client gets it (JSON, redacted, ISO dates, base64), with a line for each file, or the
    plain sentence of the error, also for a function that was not offered and arguments that are no JSON object. Nulls
    are dropped as by `from_openai_call`. `identity` is the caller to the ACL. Nobody can be asked for an approval: what
    apcore refuses without one is refused. Raises TypeError for neither a Registry nor an Executor, and nothing that a
    module raised.
    """
    options = _Options(registry_or_executor)
    try:
        tool, inputs = _read_call(options, name, arguments)
    except _NotOffered:
        return _SENTENCES["MODULE_NOT_FOUND"].format(module_id=name)
    except ValueError as error:
        return _SENTENCES["GENERAL_INVALID_INPUT"].format(message=error)
    router = _ExecutionRouter(_ToolCatalog(options), options)
    result = await router.run(_Call(tool, inputs, options, identity))
    text, *files = result["content"]
    kinds = [file.get("resource", file)["mimeType"] for file in files]
    return "\n".join([text["text"], *[f"[a file of type {kind}]" for kind in kinds]])


_EXPORTS = ("mcp", "openai", "openai-strict", "markdown", "client")


def _export(options: _Options, form: str, arguments: list[str]) -> str:
    """What `--export` prints: the tools of `tools/list`, OpenAI's, the tool document, or what clients start it by."""
    catalog = _ToolCatalog(options)
    if form == "markdown":
        return "\n".join([f"# Tools of {options.name}\n", *catalog.each(_document)])
    if form == "client":
        entry = _client_entry(options, arguments)
        # And the commands of clients that have one for it.
        print(f"code --add-mcp {shlex.quote(json.dumps({'name': options.name, **entry}))}", file=sys.stderr)
        print(f"claude mcp add-json {shlex.quote(options.name)} {shlex.quote(json.dumps(entry))}", file=sys.stderr)
        exported: Any = {"mcpServers": {options.name: entry}}
    elif form == "mcp":
        exported = catalog.listing(portable=options.tool_names == "portable")
    else:
        exported = catalog.each(_OpenAIConverter(strict=form == "openai-strict").convert)
    return json.dumps(exported, indent=2)


def _client_entry(options: _Options, arguments: list[str]) -> JSONObject:
    """How a client reaches this server: where it is, or how to start `python -m` this package with `arguments`."""
    if options.transport != "stdio":
        # Who listens everywhere is reached by this machine's own address.
        url = options.url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
        return {"type": options.transport.removeprefix("streamable-"), "url": url}
    # Where this process finds modules and the client's would not: in the working directory or the script's (the first
    # of its path), and by this shell's environment.
    paths = [sys.path[0], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "command": os.path.abspath(sys.executable),
        "args": ["-m", __package__, *arguments],
        "env": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(map(os.path.abspath, paths)))},
    }


async def _call_back(callback: Callable[[], Any] | None) -> None:
    if callback is not None:
        result = callback()
        if inspect.isawaitable(result):
            await result


def _announce(bridge: _Bridge, where: str) -> None:
    """Say that the server accepts, and `where` it does; and what is unusual about it."""
    options = bridge.options
    count = len(bridge.catalog.tools)
    if not count:
        logger.warning("No modules registered; server starting with zero tools")
    is_open = options.approval != "deny" and options.executor.governance_state().unprotected_control_surface
    if is_open and any(module_id.startswith(_CONTROL) for module_id in bridge.catalog.tools):
        logger.warning("Every client is offered %s*: protect them by an ACL or an approval handler", _CONTROL)
    if options.transport == "sse":
        logger.warning("SSE transport is deprecated; use streamable-http instead")
    tools = "1 tool" if count == 1 else f"{count} tools"
    logger.info("apcore-mcp server started: %s registered, transport=%s%s", tools, options.transport, where)


class _Life:
    """One life of a server: it begins with `run()`, and ends when told to or when its clients have.

    Its event loop is its own, or the running one where a host serves its app (`mounted`). `started` is done once
    clients are accepted, with that app; what keeps it from that is the outcome, and what ends it later is raised. Then,
    and from `stop()` on, it is `ending`.
    """

    def __init__(self, options: _Options, *, mounted: bool = False) -> None:
        _set_log_level(options)
        self._options = options
        self._mounted = mounted
        self._loop = asyncio.get_running_loop() if mounted else asyncio.new_event_loop()
        self._ended = self._loop.create_future()
        self.started = Future[Any]()
        self.ending = False

    def stop(self) -> None:
        """Tell it to end, at any time, from any thread or signal handler."""
        self.ending = True
        with suppress(RuntimeError):  # its loop has been closed
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def run(self) -> None:
        """Build, accept, announce, wait for the end, close: whatever one step of that raises, the others follow."""
        from anyio import CancelScope

        options = self._options
        app = None
        where = ""
        try:
            async with _Bridge(options) as bridge, AsyncExitStack() as closing:
                serving: asyncio.Future[None] = self._ended  # where a host does
                if self._mounted:
                    app = await _http_app(bridge)
                elif options.transport == "stdio":
                    serving = await closing.enter_async_context(_serve_stdio(bridge))
                else:
                    serving = await closing.enter_async_context(_serve_http(bridge))
                    where = f", at {options.url}"
                    if options.explorer:
                        where += f", explorer at {urljoin(options.url, options.explorer_prefix)}/"
                serving.add_done_callback(lambda _: self.stop())
                closing.push_async_callback(bridge.finish)
                _announce(bridge, where)
                with CancelScope() as starting:  # it may be told to end before `on_startup` has
                    self._ended.add_done_callback(lambda _: starting.cancel())
                    await _call_back(options.on_startup)
                    closing.push_async_callback(_call_back, options.on_shutdown)
                self.started.set_result(app)
                await self._ended
                if serving.done():
                    serving.result()  # an error that ended the transport is the caller's to see
        except BaseException as error:
            self.ending = True  # before anybody is told: a server may be started again
            if self.started.done():
                raise
            self.started.set_exception(error)

    def block(self) -> None:
        """Run on the loop that is its own, and close it."""
        loop = self._loop
        loop.set_default_executor(_ModuleThreads())
        loop.set_exception_handler(_log_quietly)
        running = loop.create_task(self.run())
        try:
            while not running.done():
                # asyncio lets these out of whatever task raises them; out of a module's, they are its own affair.
                with suppress(SystemExit, KeyboardInterrupt):
                    loop.run_until_complete(running)
            running.result()
        finally:
            # As `asyncio.run` ends, but without waiting for a task or a thread that does not want to, nor a word of it.
            loop.set_exception_handler(lambda *_: None)
            tasks = asyncio.all_tasks(loop)
            for task in tasks:
                task.cancel()
            with suppress(SystemExit, KeyboardInterrupt):
                tasks.add(loop.create_task(loop.shutdown_asyncgens()))
                loop.run_until_complete(asyncio.wait(tasks, timeout=1))
            loop.close()  # and the threads


def _log_quietly(_loop: asyncio.AbstractEventLoop, context: JSONObject) -> None:
    """Log what nobody awaits, as asyncio does, but not what it says: a module's task may quote a sensitive value."""
    error = context.get("exception")
    frames = traceback.extract_tb(getattr(error, "__traceback__", None))
    logger.error("%s: %s, raised in %s", context["message"], type(error).__name__, frames)


def _door(options: Callable[P, _Options], enter: Callable[[_Options], T]) -> Callable[P, T]:
    """Give a function of `_Options` the options themselves as its parameters, checked before it is entered."""

    @functools.wraps(enter)
    def door(*args: P.args, **kwargs: P.kwargs) -> T:
        return enter(_options_of(f"{enter.__name__}()", *args, **kwargs))

    vars(door)["__signature__"] = inspect.signature(options).replace(return_annotation=enter.__annotations__["return"])
    return door


@functools.partial(_door, _Options)
@asynccontextmanager
async def async_serve(options: _Options) -> AsyncIterator[Starlette]:
    """Serve from inside an asyncio program: an async context manager that yields a Starlette app, already working.

        async with async_serve(registry) as app:
            fastapi_app.mount("/tools", app)      # its MCP endpoint is then /tools/mcp

    Mount the app or run it under any ASGI server; it needs no lifespan of its own. `transport` "sse" gives `/sse` and
    `/messages/`, anything else `/mcp`. `host` and `port` are not listened on, but decide with `allowed_hosts` which
    Host headers are accepted: name the public ones. All other options are those of `serve()`, and so are the errors.
    """
    if options.transport == "stdio":
        options = dataclasses.replace(options, transport="streamable-http")
    from anyio import move_on_after

    life = _Life(options, mounted=True)
    running = asyncio.create_task(life.run())  # what it opens may be closed by no other task; a host may use two for us
    try:
        yield await asyncio.shield(asyncio.wrap_future(life.started))
    finally:
        life.stop()
        try:
            with move_on_after(_SHUTDOWN_SECONDS + 1, shield=True):  # also where the host is being cancelled
                await asyncio.wait({running})
            await asyncio.wait({running})  # `on_shutdown` may take longer
        finally:
            running.cancel()
        running.result()


class MCPServer:
    """A server in a thread of its own, beside the rest of a program: `MCPServer(registry, transport=..., port=...)`.

    Takes the options of `serve()` and checks them at once. Every method may be called from any thread, and a server
    that has ended can be started again. Source: tech design 6.10.
    """

    def __init__(self, registry_or_executor: Registry | Executor | APCore, **options: Any) -> None:
        self._options = _options_of("MCPServer", registry_or_executor, **options)
        self._lock = threading.Lock()
        self._life: _Life | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Return once the server accepts clients; nothing happens when it does already.

        Raises what keeps it from starting, as `serve()` would: OSError for a port in use, what `on_startup` raised.
        """
        if threading.current_thread() is self._thread:  # `on_startup` need not wait for its own server
            return
        with self._lock:
            if self._life is None or self._life.ending:
                self.wait()
                life = _Life(self._options)
                self._life = life
                self._thread = threading.Thread(target=life.block, name="apcore-mcp", daemon=True)
                self._thread.start()
            life = self._life
        life.started.result()

    def stop(self) -> None:
        """Ask the server to end, and return at once; running calls are given 5 seconds."""
        if self._life is not None:
            self._life.stop()

    def wait(self) -> None:
        """Block until the server has ended."""
        if self._thread is not None:
            self._thread.join()


@functools.partial(_door, _Options)
def serve(options: _Options) -> None:
    """Serve every module of a Registry (or of an Executor's) as an MCP tool, until the server is told to end.

        registry = Registry(extensions_dir="./extensions")
        registry.discover()
        serve(registry)                                           # stdio, for a client that starts this program
        serve(registry, transport="streamable-http", port=8000)   # http://127.0.0.1:8000/mcp

    Give an Executor to keep its ACL, middleware, approval handler and timeouts. Blocks; returns None after SIGINT or
    SIGTERM, or when a stdio client has gone, with running calls given 5 seconds. `on_startup` runs once clients are
    accepted, `on_shutdown` before they no longer are; both may be coroutine functions.

    Nothing is started before every option is checked: TypeError for something that is neither Registry nor Executor or
    has the wrong type, ValueError for a value that is not allowed (the message says what is), OSError for a port in
    use. RuntimeError inside a running event loop: there, use `async_serve()`. `apcore-mcp --help` describes each
    option. Source: SRS FR-SERVER-001 to -011.
    """
    # The public get_running_loop() says "none" by an exception.
    if asyncio.events._get_running_loop() is not None:  # pyright: ignore[reportPrivateUsage]
        raise RuntimeError("serve() blocks, so it cannot be called from a running event loop: use async_serve() there")
    life = _Life(options)
    process = os.getpid()
    former: dict[int, Any] = {}

    def handle(number: int, _frame: object) -> None:
        if os.getpid() == process:
            signal.signal(number, signal.SIG_DFL)  # a second one ends the process as if nobody had asked
            life.stop()
        else:  # a process that a module forked, where it does what it would have done without us
            signal.signal(number, former[number])
            signal.raise_signal(number)

    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                former[number] = signal.getsignal(number)
                if former[number] is not None:  # else it is the business of the program that Python is embedded in
                    stack.callback(signal.signal, number, former[number])
                    signal.signal(number, handle)
        life.block()
    life.started.result()
