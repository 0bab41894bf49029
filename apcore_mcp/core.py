"""The bridge: apcore modules in, an MCP server or OpenAI tool definitions out.

The file reads top to bottom, and each room uses only what stands above it; `grep '^# ----'` lists the rooms. What
decides what a client is told and what runs is here. How modules run (`execution.py`), who is asked first
(`approval.py`) and what a folder holds (`discovery.py`) stand beside it, at sockets that apcore has; so does what can
be switched on (`tasks.py`, `search.py`, `explorer.py`, `metrics.py`), which is imported only then.

The file keeps these promises. Every call goes through apcore's Executor, and only tools that are listed can be called.
One bad module never takes the others down. No traceback, path, class name, caller or sensitive value reaches a client.
Nothing of apcore, of the MCP SDK or of a user's objects is changed, but for an Executor's steps and approval handler
while a server or a call uses it. The server parts of `mcp` are imported where they are used, so that a program that
only wants OpenAI definitions does not load an HTTP stack.

Ids such as FR-EXEC-002 and F-013 name the requirements that the project was specified by; the tests carry them too:
`grep -rA3 '"FR-EXEC-002"' tests` finds what proves one.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import dataclasses
import functools
import hashlib
import inspect
import ipaddress
import itertools
import json
import logging
import math
import os
import posixpath
import re
import secrets
import signal
import socket
import stat
import sys
import threading
import time
import traceback
import weakref
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from datetime import date
from decimal import Decimal
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar, cast, get_origin
from urllib.parse import quote, urljoin

from annotated_types import Predicate
from apcore import ACL, APCore, Config, Executor, ModuleAnnotations, ModuleDescriptor, ModuleError, Registry, errors
from apcore.approval import ApprovalHandler
from apcore.builtin_steps import BuiltinACLCheck
from apcore.cancel import CancelToken
from apcore.context import Context, Identity
from apcore.observability import MetricsCollector, MetricsMiddleware
from apcore.pipeline import ExecutionStrategy
from apcore.schema.openai_strict import SUPPORTED_FORMATS, detect_openai_strict_incompatibilities
from apcore.trace_context import TraceContext, TraceParent
from apcore.utils.redaction import REDACTED_VALUE
from jsonschema import Draft202012Validator
from jsonschema import ValidationError as InvalidValue
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from pydantic import BaseModel, ConfigDict, Field, SkipValidation, TypeAdapter, ValidationError, create_model
from pydantic.dataclasses import dataclass
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import from_json, to_json, to_jsonable_python
from referencing import Registry as SchemaResources
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012
from typing_extensions import TypedDict

from . import __version__
from . import approval as approvals
from .approval import CALL_KEY, CURRENT_CALL, NOBODY, QUESTION_KEY
from .discovery import Folder
from .execution import THREADS_MAX, Function, busy_threads, daemon_threads, function_of, silence, steps_in_place
from .log import log_to_stderr

if TYPE_CHECKING:
    from mcp.server.context import CallNext, ServerRequestContext
    from mcp.server.extension import MethodBinding
    from mcp.shared.message import SessionMessage
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Receive, Scope, Send

    from .search import SearchTools
    from .tasks import Task, Tasks

    RequestContext = ServerRequestContext[Any, Any]

logger = logging.getLogger("apcore_mcp")
access_logger = logging.getLogger("apcore_mcp.access")  # a line for each call that ends

MCP_PROGRESS_KEY = "_mcp_progress"
"""The key of the function in `context.data` that sends the call's progress (FR-EXT-003)."""

MCP_ELICIT_KEY = "_mcp_elicit"
"""The key of the function in `context.data` that asks the user of the call (FR-EXT-003)."""

JSONObject = dict[str, Any]
JSONSchema = JSONObject
P = ParamSpec("P")
T = TypeVar("T")


def text_of(value: object) -> str:
    """A text of a module's for people to read, as JSON can carry it: half of a surrogate pair becomes `?`."""
    return str(value).encode(errors="replace").decode()


def one_line(text: str) -> str:
    """`text` with escapes for line breaks, control characters and characters that reverse what follows them."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def warn(text: str, messages: list[str]) -> None:
    """Log a WARNING about a module, and keep it in `messages`, whatever the log level is."""
    messages.append(one_line(text))
    logger.warning("%s", messages[-1])


# ---- Options: every option of `serve()`, once ----

TRANSPORTS = ("stdio", "streamable-http", "sse")
_ROUTES = ("mcp", "sse", "messages", "health", "ready", "metrics")  # the first parts of paths that have an owner
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Texts = Sequence[Annotated[str, Field(min_length=1)]]


def _option(default: T, text: str, *, repr: bool = True, **flag: Any) -> T:
    """A field of `Options`; `text` and `flag` also make its command line flag. `repr=False` is for a secret."""
    return dataclasses.field(default=default, repr=repr, metadata={"help": text, **flag})


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True))
class Options:
    """What `serve()`, `async_serve()`, `MCPServer` and the command line take: the one list. `options_of` makes it.

    Values are checked and never converted, so `"8000"` is no port; only the case of a choice does not matter."""

    registry_or_executor: SkipValidation[Registry | Executor | APCore]
    _: dataclasses.KW_ONLY
    transport: str = _option("stdio", "MCP transport", choices=TRANSPORTS)
    host: str = _option("127.0.0.1", "address to listen on (HTTP transports)")
    port: int = _option(8000, "port to listen on, 1 to 65535 (HTTP transports)", type=int)
    name: str = _option("apcore-mcp", "server name sent to clients, 255 characters at most")
    version: str | None = _option(None, "server version sent to clients; alone, print the package's, the default")
    instructions: str | None = _option(None, "what the server says about itself to agents")
    tags: Sequence[str] | None = _option(None, "serve only modules with all of these tags", nargs="+")
    prefix: str | None = _option(None, "serve only modules whose id starts with this")
    exclude: _Texts | None = _option(None, "leave out modules whose id starts with one of these", nargs="+")
    read_only: bool = _option(False, "serve only modules annotated readonly")
    log_level: str | None = _option(None, "log level, on stderr", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    access_log: bool = _option(False, "log a line for each call that ends")
    on_startup: Callable[[], Any] | None = None
    on_shutdown: Callable[[], Any] | None = None
    dynamic: bool = _option(False, "load the files of the extensions directory again when they change")
    timeout: _Seconds | None = _option(None, "seconds a call may take, 0 for any (apcore: 30 a module)", type=float)
    task_after: _Seconds | None = _option(5.0, "seconds until a call goes on as a task", type=float, nargs="?")
    validate_inputs: bool = _option(False, "check arguments against the advertised schema before apcore does")
    tool_names: str = _option("auto", "names with dots, hyphens, or both", choices=("auto", "module-id", "portable"))
    redact_output: bool = _option(True, "replace the values of output fields marked x-sensitive")
    mask_errors: bool = _option(True, "hide the type and text of unexpected exceptions from clients")
    approval: str | ApprovalHandler = _option("require", "ask users", choices=("auto", "require", "deny", "off"))
    search: bool = _option(False, "list two tools, which find and call the others, for agents that take few")
    stateless: bool = _option(False, "keep no sessions, for servers behind a load balancer")
    max_sessions: int = _option(10_000, "sessions of handshake clients at a time", type=int)
    session_idle_seconds: float = _option(1_800.0, "life of an idle session", type=float)
    shutdown_seconds: _Seconds = _option(5.0, "seconds that running calls have when the server ends", type=float)
    state_key: str | bytes | None = _option(None, "secret of --stateless servers", repr=False)
    allowed_hosts: _Texts | None = _option(None, "Host headers accepted beside addresses", nargs="+")
    metrics_collector: Any = None
    middleware: Sequence[Any] | None = None
    mcp_extensions: Sequence[Any] | None = None
    output_formatter: Callable[[Any], str] | None = None
    max_result: int = _option(6 * 2**20, "bytes of a result as it is sent, more is an error; 0 for any", type=int)
    explorer: bool = _option(False, "serve the Tool Explorer, a page to look at the tools")
    explorer_prefix: str = _option("/explorer", "path of the Tool Explorer")
    allow_execute: bool = _option(False, "let the Tool Explorer run tools")

    @property
    def executor(self) -> Executor:
        """What runs calls."""
        return cast(Executor, self.registry_or_executor)  # `options_of` has made it one

    @property
    def registry(self) -> Registry:
        """Where the modules are."""
        return self.executor.registry

    @property
    def url(self) -> str:
        """Where clients connect (HTTP transports)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{'/sse' if self.transport == 'sse' else '/mcp'}"

    def check(self) -> None:
        """Raise ValueError for a value that is of the right type, but not allowed."""
        for name in ("name", "version", "instructions", "prefix"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must not be empty")
        if len(self.name) > 255:
            raise ValueError("name must not exceed 255 characters")
        if not all(self.tags or ()):
            raise ValueError("Tag values must not be empty")
        if self.state_key is not None and not (self.stateless and len(self.state_key) >= 32):
            raise ValueError("state_key must be a secret of 32 bytes or more, and goes with stateless=True")
        if self.max_sessions < 1 or not 0 < self.session_idle_seconds < math.inf or self.max_result < 0:
            raise ValueError("max_sessions and session_idle_seconds must be above 0, and max_result not below")
        if self.transport != "stdio" and not self.host:
            raise ValueError("Host must not be empty")
        if self.transport != "stdio" and not 1 <= self.port <= 65535:
            raise ValueError(f"Port must be between 1 and 65535, got {self.port}")
        is_path = re.fullmatch(r"(/[\w~-][\w.~-]*)+/?", self.explorer_prefix)
        if not is_path or self.explorer_prefix.split("/")[1] in _ROUTES:
            raise ValueError(f"explorer_prefix must be a path of its own, like /explorer; got {self.explorer_prefix!r}")
        files = {"search": self.search, "explorer": self.explorer, "metrics": self.metrics_collector}
        files["tasks"] = self.task_after not in (5.0, None)
        for file, is_wanted in files.items():
            if is_wanted and not Path(__file__).with_name(f"{file}.py").exists():
                raise ValueError(f"an option needs {file}.py, which this copy of the package is without")


# Options that packages built on this one pass too: those that change nothing here, and those that may only be off.
_WITHOUT_EFFECT = (
    "require_auth exempt_paths explorer_title explorer_project_name explorer_project_url async_max_concurrent"
    " async_max_tasks"
).split()
_ONLY_OFF = "approval_handler authenticator strategy trace observability output_format".split()


def options_of(door: str, /, *sources: Any, **options: Any) -> Options:
    """The checked options of a call of the public `door`, with an Executor in the place of whatever is to be served.

    Also sets the level of this package's logger. TypeError that names the door for what is no option and for a value of
    a wrong type; ValueError for a value that is not allowed."""
    unused = []
    for name in sorted(options):
        if name in _WITHOUT_EFFECT or (name in _ONLY_OFF and options[name] in (None, False)):
            unused.append(name)
            del options[name]
    if "approval" not in options and "approval_handler" in options:
        options["approval"] = options.pop("approval_handler")
    for field in dataclasses.fields(Options):
        given = options.get(field.name)
        if isinstance(given, str) and "choices" in field.metadata:
            options[field.name] = _choice(field.name, given, field.metadata["choices"])
    try:
        checked = Options(*sources, **options)
    except ValidationError as invalid:
        error = invalid.errors()[0]
        option = error["loc"][0]
        hint = " (authentication goes into middleware=)" if option == "authenticator" else ""
        is_bound = error["type"] in ("greater_than_equal", "finite_number", "string_too_short")
        kind = ValueError if is_bound else TypeError
        raise kind(f"{door} {option}: {error['msg']}{hint}") from None
    checked.check()
    # Not the root's level: the SDK logs whole messages at DEBUG, sensitive arguments included.
    if checked.log_level is not None:
        if not logger.hasHandlers():
            log_to_stderr()
        logger.setLevel(checked.log_level)
    if unused:
        logger.debug("%s: without effect here: %s", door, ", ".join(unused))
    return dataclasses.replace(
        checked, registry_or_executor=_executor_of(checked), explorer_prefix=checked.explorer_prefix.rstrip("/")
    )


def _choice(option: str, value: str, choices: Sequence[str]) -> str:
    """One of the choices, as it is written there."""
    for choice in choices:
        if choice.lower() == value.lower():
            return choice
    raise ValueError(f"Unknown {option.replace('_', ' ')}: {value!r}. Must be one of: {', '.join(choices)}")


def _executor_of(options: Options) -> Executor:
    """The Executor to serve: the user's own, that of apcore's client, or a new one for a Registry."""
    given = options.registry_or_executor
    executor = getattr(given, "executor", given)
    if isinstance(executor, Registry):
        config = None
        if options.timeout is not None:
            milliseconds = math.ceil(options.timeout * 1000)
            config = Config({"executor": {"default_timeout": milliseconds, "global_timeout": milliseconds}})
        executor = Executor(executor, config=config)
        if isinstance(options.metrics_collector, MetricsCollector):
            executor.use(MetricsMiddleware(options.metrics_collector))
    elif options.timeout is not None:
        raise ValueError("timeout is for a Registry: an Executor brings its own, of its Config")
    if not isinstance(executor, Executor):
        raise TypeError(f"Expected Registry or Executor instance, got {type(given).__name__}")
    if options.dynamic and not isinstance(executor.registry, Folder):
        raise ValueError("dynamic follows the files of a folder: give it what discover() returns")
    return executor


# ---- Schemas: JSON Schema in, a self-contained one out; pure ----

# The keywords that hold schemas, those of older drafts included. Under any other one a `$ref` is no reference.
_SCHEMA_MAPS = frozenset("properties patternProperties dependentSchemas dependencies $defs definitions".split())
_WITH_SCHEMAS = _SCHEMA_MAPS.union(
    "anyOf oneOf allOf not if then else prefixItems items additionalItems unevaluatedItems contains"
    " additionalProperties unevaluatedProperties propertyNames contentSchema".split()
)
_CONSTRAINTS = Draft202012Validator.VALIDATORS.keys()  # other keywords describe a value and constrain nothing
_OTHER_PROPERTIES = frozenset("patternProperties additionalProperties unevaluatedProperties".split())
# The keywords whose schemas JSON Schema applies in place: to the very value that the schema around them applies to.
_IN_PLACE = frozenset("anyOf oneOf allOf not if then else dependentSchemas".split())

_Model = type(BaseModel)  # the metaclass of pydantic's models
_PYDANTIC_NAMES = GenerateJsonSchema()  # makes titles of names
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Keywords that say where references lead, and the dialect: without meaning once references are inlined.
_FOR_REFERENCES = frozenset("$schema $defs definitions $id id $anchor $dynamicAnchor discriminator".split())
# References of other drafts mean nothing to apcore, and some clients drop a tool that has them.
_FOREIGN = frozenset("$recursiveRef $recursiveAnchor $dynamicRef".split())
_REF_DEPTH_MAX = 32  # references inside references (FR-SCHEMA-002)
_NODES_MAX = 50_000  # schemas in one inlined schema; definitions that use each other twice double it at every level

# What the metaschema of 2020-12 says of one schema, without the schemas inside it, as a type of pydantic's: a server of
# 1,000 modules checks 2,000 schemas when it starts, which takes jsonschema's `check_schema` sixty times as long.
_Schema = JSONObject | bool
_Type = Literal["null", "boolean", "object", "array", "number", "string", "integer"]
_Count = Annotated[int, Field(ge=0)]
_Names = Annotated[list[str], Predicate(lambda names: len({*names}) == len(names))]
_LEGAL: JSONObject = {
    **dict.fromkeys(_WITH_SCHEMAS, _Schema),
    "properties dependentSchemas $defs definitions": dict[str, _Schema],
    "patternProperties": dict[re.Pattern[str], _Schema],
    "anyOf oneOf allOf prefixItems": Annotated[list[_Schema], Field(min_length=1)],
    "type": _Type | Annotated[list[_Type], Field(min_length=1)],
    "required": _Names,
    "dependentRequired": dict[str, _Names],
    "enum": Annotated[list[Any], Field(min_length=1)],  # or it is legal, but not to AJV
    "examples": list[Any],
    "minimum maximum exclusiveMinimum exclusiveMaximum": float,
    "multipleOf": Annotated[float, Field(gt=0)],
    "minLength maxLength minItems maxItems minProperties maxProperties minContains maxContains": _Count,
    "uniqueItems deprecated readOnly writeOnly": bool,
    "pattern": re.Pattern[str],
    "$ref $comment title description format contentEncoding contentMediaType": str,
}
_KEYWORDS = {keyword: value_type for keywords, value_type in _LEGAL.items() for keyword in keywords.split()}
_METASCHEMA = TypeAdapter[Any](cast(Any, TypedDict)("JSON Schema (2020-12)", _KEYWORDS, total=False))


class UnconvertibleSchema(ValueError):
    """A legal schema whose references cannot be inlined. An output schema like that costs its tool no more than the
    `outputSchema`."""


def _map_subschemas(schema: JSONSchema, change: Callable[[Any, str], object]) -> JSONSchema:
    """Copy `schema` with `change` applied to each schema directly inside it, and the name or keyword it stands under.

    `additionalProperties: false` and its like are kept as they are: everybody writes them to close an object."""

    def changed(item: Any, name: str) -> Any:
        if isinstance(item, list):
            return [changed(each, name) for each in item]
        return change(item, name) if isinstance(item, dict | bool) else item

    copied = {}
    for keyword, value in schema.items():
        if keyword in _SCHEMA_MAPS:
            value = {name: changed(each, name) for name, each in value.items()}
        elif keyword in _WITH_SCHEMAS and not (keyword in _OTHER_PROPERTIES and isinstance(value, bool)):
            value = changed(value, keyword)
        copied[keyword] = value
    return copied


def branches(schema: JSONSchema, keywords: Collection[str]) -> list[JSONSchema]:
    """The schemas directly inside `schema` that stand under `keywords`, but for boolean ones."""
    found: list[JSONSchema] = []
    for keyword in schema.keys() & keywords:
        value = [*schema[keyword].values()] if keyword in _SCHEMA_MAPS else schema[keyword]
        found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
    return found


def subschemas(schema: JSONSchema) -> Iterator[JSONSchema]:
    """`schema` and every schema in it, at any depth, but for boolean ones."""
    yield schema
    for inner in branches(schema, _WITH_SCHEMAS):
        yield from subschemas(inner)


def in_place(*schemas: JSONSchema) -> Iterator[JSONSchema]:
    """`schemas` and all the schemas in them that may apply to the same value."""
    for schema in schemas:
        yield schema
        yield from in_place(*branches(schema, _IN_PLACE))


def part_schemas(schemas: Iterable[JSONSchema], step: str | int) -> Iterator[JSONSchema]:
    """The schemas that may apply to one property or item of a value to which `schemas` may apply. Patterns of names are
    not tried: each counts."""
    for schema in schemas:
        if isinstance(step, int):
            yield from schema.get("prefixItems", ())[step : step + 1] or branches(schema, ["items", "unevaluatedItems"])
        elif step in properties_of(schema):
            yield schema["properties"][step]
        else:
            yield from branches(schema, _OTHER_PROPERTIES)


def properties_of(schema: JSONSchema) -> Any:
    return schema.get("properties", {})


def types_of(schema: JSONSchema) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def is_valid(value: Any, schema: JSONSchema) -> bool:
    return Draft202012Validator(schema).is_valid(value)


def _plain(value: Any) -> Any:
    """Copy `value` into plain JSON types; ValueError for what JSON cannot say, NaN included."""
    return from_json(to_json(value, inf_nan_mode="constants"), allow_inf_nan=False)


def _is_json(value: Any) -> bool:
    try:
        _plain(value)
    except ValueError:
        return False
    return True


def _is_mark(schema: JSONSchema) -> bool:
    """Whether `schema` itself marks its values as sensitive, as pydantic's SecretStr does."""
    is_secret = schema.get("format") == "password" and schema.get("writeOnly") is True
    return is_secret or schema.get("x-sensitive") is True


def marks_sensitive(schema: JSONSchema) -> bool:
    """Whether anything in `schema` is marked as sensitive."""
    return any(map(_is_mark, subschemas(schema)))


def _mentions_mark(part: Any) -> bool:
    """Whether anything in it looks like a mark, wherever it stands: of what no reference can be followed in."""
    if isinstance(part, dict):
        return _is_mark(part) or any(map(_mentions_mark, part.values()))
    return isinstance(part, list) and any(map(_mentions_mark, part))


class _SchemaConverter:
    """Put what each `$ref` points at in its place: `{"$ref": "#/$defs/Size"}` becomes the schema of a size.

    The result accepts exactly what apcore accepts by the schema, which it reads as 2020-12 whatever `$schema` says.
    ValueError for a schema that the metaschema refuses, for one that refers to itself or has references inside
    references more than 32 deep, and for a result of more than 50,000 schemas; KeyError for a reference to nothing.
    `model` is the pydantic model that the schema is of, if any: the titles that pydantic makes of the names of fields
    and classes say nothing and are left out, while an author's own are kept."""

    def __init__(self, model: Any = None) -> None:
        self._model = model

    def inline(self, schema: JSONSchema) -> JSONSchema:
        """Return `schema` without references and without definitions. Source: FR-SCHEMA-002."""
        self._nodes = 0
        resolver = SchemaResources().resolver_with_root(DRAFT202012.create_resource(schema))
        name = _PYDANTIC_NAMES.normalize_name(getattr(self._model, "__name__", "-"))
        return self._without_class_name(self._visit(schema, resolver, ["#"]), name)

    def _visit(self, node: Any, resolver: Any, opened: list[str], place: str = "") -> JSONSchema:
        """Copy `node`, with `{}` for `true` and `{"not": {}}` for `false`, as MCP wants objects. `opened` are the
        references that led to it, outermost first, `place` the names."""
        if isinstance(node, bool):
            return {} if node else {"not": {}}
        self._nodes += 1
        if self._nodes > _NODES_MAX:
            raise UnconvertibleSchema(f"Maximum recursion depth exceeded: more than {_NODES_MAX} nodes")
        result = {key: value for key, value in node.items() if key not in _FOR_REFERENCES or value == _DIALECT}
        for keyword in _FOREIGN.intersection(result):
            del result[keyword]
        try:
            if self._model is None:  # pydantic writes no illegal ones, and patterns that Python cannot read
                _METASCHEMA.validate_python(result, strict=True)
        except ValidationError as error:
            fault = error.errors()[0]
            raise ValueError(f"illegal schema at {place or 'its root'}: {fault['loc'][0]}: {fault['msg']}") from None
        prefix = f"{place}." if place else ""
        result = _map_subschemas(result, lambda inner, name: self._visit(inner, resolver, opened, prefix + name))
        if "$ref" in result:
            target = self._target(result.pop("$ref"), resolver, opened, place)
            if result.keys() & _CONSTRAINTS:
                # Both hold. If the two were merged, a constraint of one could replace the other's.
                result["allOf"] = [target, *result.get("allOf", ())]
            else:
                result = {**target, **result}
        return self._complete(result)

    def _target(self, ref: str, resolver: Any, opened: list[str], place: str) -> JSONSchema:
        if ref in opened:
            path = map(posixpath.basename, [*opened[opened.index(ref) :], ref])
            raise UnconvertibleSchema(f"Circular reference: {' -> '.join(path)}")
        if len(opened) > _REF_DEPTH_MAX:
            raise UnconvertibleSchema(f"Maximum recursion depth exceeded: more than {_REF_DEPTH_MAX} references")
        try:
            target = resolver.lookup(ref)
        except Unresolvable:
            raise KeyError(f"definition {posixpath.basename(ref)} is missing") from None
        schema = self._visit(target.contents, target.resolver, [*opened, ref], place)
        return self._without_class_name(schema, posixpath.basename(ref))

    def _without_class_name(self, schema: JSONSchema, name: str) -> JSONSchema:
        """`schema` without a title that is all of `name`, or part of it as of `shop__models__Order__1`."""
        title = _PYDANTIC_NAMES.normalize_name(schema.get("title", ""))
        if self._model is not None and title and f"__{title}__" in f"__{name}__":
            del schema["title"]
        return schema

    def _complete(self, schema: JSONSchema) -> JSONSchema:
        """`schema` with what clients want to be said, and without what nobody has written."""
        if self._model is not None:
            for name, field in properties_of(schema).items():
                if field.get("title") == _PYDANTIC_NAMES.get_title_from_name(name):
                    del field["title"]
        for keyword in ("default", "examples"):
            # A marked value's would be a secret, and one that JSON cannot say would cost the tool its module.
            if keyword in schema and (not _is_json(schema[keyword]) or marks_sensitive(schema)):
                del schema[keyword]
        # VS Code refuses its whole request for one array or object without these.
        if "array" in types_of(schema):
            schema.setdefault("items", {})
        if "object" in types_of(schema):
            schema.setdefault("properties", {})
        return schema


class _WrittenForm(GenerateJsonSchema):
    """The JSON schema of what pydantic writes, not of what it reads; `{}` for what JSON Schema cannot say."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JSONSchema:
        return {}

    def ser_schema(self, schema: Any) -> JSONSchema | None:
        if schema["type"].startswith("function") and schema.get("return_schema") is None:
            return {"$comment": "as a serializer without a return type writes it"}
        return super().ser_schema(schema)


# To write the schema of a model takes longer than all else at a start; nothing is kept of a class that is gone.
_WRITTEN_FORMS: weakref.WeakKeyDictionary[type, JSONSchema] = weakref.WeakKeyDictionary()


def _written_form(hint: Any, adapter: TypeAdapter[Any] | None = None) -> JSONSchema:
    """The JSON schema of what pydantic writes by a model or another hint, which an `adapter` has at hand."""
    if isinstance(hint, type) and hint in _WRITTEN_FORMS:
        return _WRITTEN_FORMS[hint]
    schema = (adapter or TypeAdapter(hint)).json_schema(mode="serialization", schema_generator=_WrittenForm)
    if isinstance(hint, type):
        _WRITTEN_FORMS[hint] = schema
    return schema


def _admits_object(schema: JSONSchema) -> bool:
    """Whether `schema` lets objects through, as far as types and unions tell."""
    unions = branches(schema, ["anyOf", "oneOf"])
    return "object" in (types_of(schema) or ["object"]) and (not unions or any(map(_admits_object, unions)))


def _object_schema(schema: JSONSchema, model: Any = None) -> JSONSchema:
    """A module's arguments as a self-contained object schema (FR-SCHEMA-001, -003, -004, -006): `{}` becomes
    `{"type": "object", "properties": {}}`. ValueError or KeyError where that cannot be, or the root is no object."""
    inlined = _SchemaConverter(model).inline(schema)
    if not _admits_object(inlined):
        raise ValueError(f"Input schema must describe an object, got type {inlined.get('type')!r}")
    return {**inlined, "type": "object", "properties": properties_of(inlined)}


def _nullable(schema: JSONSchema) -> JSONSchema:
    """`schema`, changed to accept null as well."""
    if schema.keys() & _CONSTRAINTS == {"anyOf"} and {"type": "null"} in schema["anyOf"]:
        return schema  # pydantic's Optional; with a validator for it, a start with many tools would take longer by 7 %
    if is_valid(None, schema):
        return schema
    nullable = {**schema}
    if "type" in schema:
        nullable["type"] = [*dict.fromkeys([*types_of(schema), "null"])]
    if "enum" in schema:
        nullable["enum"] = [*schema["enum"], None]
    return nullable if is_valid(None, nullable) else {"anyOf": [schema, {"type": "null"}]}


# ---- Secrets: which values of a schema are marked, and what stands in their place; pure ----

# Keywords whose schemas apply to parts of the value that nobody looks for: a mark there hides the whole value.
_WHOLE = frozenset("patternProperties contains propertyNames contentSchema additionalItems dependencies".split())


def _marks(schema: JSONSchema) -> JSONSchema:
    """The marks and the names of a self-contained schema, and nothing else; `{}` where it marks nothing.

    `{"properties": {"a": {"type": "string", "x-sensitive": True}, "b": {}}}` becomes
    `{"properties": {"a": {"x-sensitive": True}, "b": {}}}`."""

    def outline(part: JSONSchema, _: str = "") -> JSONSchema:
        if _is_mark(part) or any(map(marks_sensitive, branches(part, _WHOLE))):
            return {"x-sensitive": True}
        return _map_subschemas({key: value for key, value in part.items() if key in _WITH_SCHEMAS}, outline)

    return outline(schema) if marks_sensitive(schema) else {}


def redact(value: Any, *marks: JSONSchema, hides_others: bool = True) -> Any:
    """Copy plain JSON with `***REDACTED***` in the place of each value that one of `marks`, from `_marks`, marks.

    Where something is marked, names that no schema has are hidden too (`hides_others`): whoever wrote them may have
    meant the marked one. Not by `apcore.redact_sensitive`, which overlooks the values of maps (`additionalProperties`)
    and by default blanks innocent keys that contain a word: "author", "tokens_used"."""
    applied = [mark for mark in in_place(*marks) if mark]
    if value is None or not applied:
        return value
    if any("x-sensitive" in mark for mark in applied):
        return REDACTED_VALUE
    if isinstance(value, list):
        items = enumerate(value)
        return [redact(item, *part_schemas(applied, index), hides_others=hides_others) for index, item in items]
    if not isinstance(value, dict):
        return value
    others: list[JSONSchema] = [{"x-sensitive": True}] if hides_others and any(map(properties_of, applied)) else []
    redacted = {}
    for name, item in value.items():
        parts = [*part_schemas(applied, name)] or others
        redacted[name] = redact(item, *parts, hides_others=hides_others)
    return redacted


def _marks_in_form(schema: JSONSchema) -> JSONSchema:
    """The marks of a schema with references; where these cannot be followed, any mark stands for the whole."""
    try:
        return _marks(_SchemaConverter().inline(schema))
    except UnconvertibleSchema:
        return {"x-sensitive": True} if _mentions_mark(schema) else {}


# What is marked in the models and dict schemas of modules; nothing is kept of a class that is gone.
_MARKS_OF: weakref.WeakKeyDictionary[Any, JSONSchema] = weakref.WeakKeyDictionary()


def marks_of(schema: Any) -> JSONSchema:
    """The marks of a model, a dataclass or what apcore makes of a dict schema, both as values are read and as they are
    written by it. All is marked where a model cannot be read: it may be a user's own class."""
    if schema is None or isinstance(schema, dict):
        return _marks(schema or {})
    if schema not in _MARKS_OF:
        marks: JSONSchema = {"x-sensitive": True} if hasattr(schema, "model_json_schema") else {}
        with suppress(Exception):
            forms = [schema.model_json_schema()] if marks else []
            forms += [_written_form(schema)] if isinstance(schema, type) else []
            marked = [*filter(None, map(_marks_in_form, forms))]
            marks = {"anyOf": marked} if marked else {}
        _MARKS_OF[schema] = marks
    return _MARKS_OF[schema]


# apcore's loggers that quote arguments, outputs, or errors that do.
_QUOTING = "schema.hardening executor pipeline middleware.manager middleware.logging".split()


def _hide_values(record: logging.LogRecord) -> bool:
    """Let a record of apcore's log show no values of a call in which something is marked: these are its arguments, or
    stand in its text."""
    call = approvals.call_of(None)
    if call is None or not call.is_secret():
        return True
    if isinstance(record.args, tuple) and record.args:
        record.args = tuple(each if isinstance(each, int | float) else REDACTED_VALUE for each in record.args)
    elif record.levelno >= logging.WARNING:
        record.msg = f"(not shown: it may quote sensitive values) at {record.filename}:{record.lineno}"
        record.args = ()
    record.exc_info = record.exc_text = None
    if hasattr(record, "error"):
        record.error = REDACTED_VALUE
    return True


@contextmanager
def _values_hidden() -> Iterator[None]:
    hide = functools.partial(_hide_values)  # one of its own: the log of another Executor stays hidden after the end
    loggers = [logging.getLogger(f"apcore.{name}") for name in _QUOTING]
    for logger in loggers:
        logger.addFilter(hide)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(hide)


# ---- Faults: what is wrong with arguments or an output, field by field; pure ----

_FAULTS_MAX = 20  # how many a client reads of one call
_FAULT_CHARACTERS = 1_000  # of a field's path, of a code and of a message, each
_IMPERSONAL = {  # messages of pydantic's that name a class or a function of the module's, by their type
    **dict.fromkeys(["model_type", "model_attributes_type", "dataclass_type"], "Input should be an object"),
    **dict.fromkeys(["union_tag_invalid", "union_tag_not_found"], "Input is none of the forms that are expected"),
    **dict.fromkeys(["is_instance_of", "is_subclass_of", "dataclass_exact_type"], "Input is not of the right type"),
}


def _fault(path: Iterable[Any], code: object, message: object) -> dict[str, str]:
    """What is wrong with one field, shortened: `{"field": "sizes.0", "code": "type", "message": "..."}`."""
    fault = {"field": ".".join(map(str, path)), "code": code, "message": message}
    return {key: text_of(value)[:_FAULT_CHARACTERS] for key, value in fault.items()}


def _faults_in(error: errors.SchemaValidationError) -> list[dict[str, str]]:
    """What an error of apcore's or of a module's says of fields: dicts with `path` and `keyword`, or `field` and
    `code`, or texts."""
    faults = []
    for each in (error.details.get("errors") or ())[:_FAULTS_MAX]:
        parts = each if isinstance(each, dict) else {"message": each}
        path = str(parts.get("field") or parts.get("path") or "").strip("/").split("/")
        code = parts.get("code") or parts.get("keyword") or "invalid"
        faults.append(_fault(path, code, parts.get("message") or ""))
    return faults


def _pydantic_faults(error: ValidationError, values: Any) -> list[dict[str, str]]:
    """What pydantic finds wrong with `values`. Its own paths also name classes and functions, where it has looked."""
    faults = []
    for each in error.errors(include_url=False)[:_FAULTS_MAX]:
        path = []
        value = values
        for step in cast(tuple[Any, ...], each["loc"]):
            is_item = isinstance(value, list | tuple) and isinstance(step, int) and step < len(value)
            if is_item or (isinstance(value, dict) and step in value):
                value = value[step]
                path.append(step)
        if each["type"] == "missing":
            path.append(each["loc"][-1])
        faults.append(_fault(path, each["type"], _IMPERSONAL.get(each["type"], each["msg"])))
    return faults


def _check_required(_: Any, names: list[str], value: object, _schema: JSONSchema) -> Iterator[InvalidValue]:
    """The keyword `required` with errors at the missing property, which jsonschema's own name only in a sentence."""
    for name in names:
        if isinstance(value, dict) and name not in value:
            yield InvalidValue("Field required", path=[name])


_NamingValidator: Any = cast(Any, extend)(Draft202012Validator, {"required": _check_required})


def _schema_faults(schema: JSONSchema, values: Any) -> list[dict[str, str]]:
    """What a dict schema refuses; of a union, what jsonschema takes for the most telling."""
    found = itertools.islice(_NamingValidator(schema).iter_errors(values), _FAULTS_MAX)
    leaves = [best_match([error]) if error.context else error for error in found]
    return [_fault(leaf.absolute_path, leaf.validator, leaf.message) for leaf in leaves]


def integral(value: Any) -> Any:
    """Copy plain JSON with whole numbers as such, as JSON Schema has them: `30.0` is an integer, and 30."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, dict):
        return {name: integral(item) for name, item in value.items()}
    return [*map(integral, value)] if isinstance(value, list) else value


# ---- Results: what a module gives, checked by what declares it and written once as plain JSON; pure ----


class RefusedOutput(errors.SchemaValidationError):
    """The output of a module does not fit what it declares: the module has run."""

    def __init__(self, faults: list[dict[str, str]], output: Any) -> None:
        kind = f"{type(output).__module__}.{type(output).__qualname__}"
        # No messages, which quote values.
        places = ", ".join(f"{fault['field'] or '(root)'}: {fault['code']}" for fault in faults)
        super().__init__(f"Output validation failed: {places} (it is a {kind})", faults)


def _not_json(error: Exception) -> ModuleError:
    reason = text_of(error).replace(" at result.", " at ")  # which the module has not written
    return ModuleError("OUTPUT_SERIALIZATION_ERROR", f"output is not JSON: {reason}")


class _OwnError(ModuleError):
    """An error of this package's, with a message that clients read as it is."""


def _unknown(value: Any) -> Any:
    """What is written for an object that nothing describes: its text (FR-EXEC-002).

    TypeError, which names the type, where that would say less than the object is: a callable, what can be counted,
    iterated over or collected (a frame, a generator), and what has no text but its address or `<NA>`."""
    text = str(value)
    says_less = callable(value) or any(hasattr(value, name) for name in ("__len__", "__iter__", "collect"))
    if says_less or re.fullmatch(r"<.*>", text, re.DOTALL):
        raise TypeError(f"nothing says what a {type(value).__module__}.{type(value).__qualname__} is in JSON")
    return text


def _without_numpy(value: Any) -> Any:
    """Copy containers with the values of NumPy's arrays and scalars; moments and durations are Python's. A
    frame or a Series is none of them: it has an index beside its values."""
    if isinstance(value, dict):
        return {_without_numpy(name): _without_numpy(item) for name, item in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_without_numpy, value))
    if not hasattr(value, "tolist") or hasattr(value, "index"):
        return value
    dtype = str(getattr(value, "dtype", ""))
    if dtype in ("datetime64[ns]", "timedelta64[ns]"):  # for which `tolist()` has numbers
        value = value.astype(dtype.replace("ns", "us"))
    return _without_numpy(value.tolist())


def _name_in_json(key: Any) -> str:
    return key if isinstance(key, str) else next(iter(from_json(to_json({key: None}, fallback=_unknown))))


_NO_FORM = object()


def _dumped(dump: Callable[..., Any], dump_json: Callable[..., bytes | str]) -> tuple[Any, Any]:
    """What pydantic makes of a value in Python's types, and in JSON's: null for what it does not know, and `_NO_FORM`
    where it cannot."""
    python = dump(by_alias=True, warnings=False)
    form: Any = _NO_FORM
    with suppress(ValueError):  # bytes that are no text
        form = from_json(dump_json(by_alias=True, warnings=False, fallback=lambda _: None))
    return python, form


def _is_written(value: Any, form: Any) -> bool:
    """Whether `form`, the JSON that pydantic makes of a value, is to be sent: not of bytes, which are base64 here, and
    not the null of what it does not know. The parts of a container are looked at one by one."""
    if isinstance(value, bytes | bytearray | Set) or (isinstance(value, Mapping) and isinstance(form, dict)):
        return False
    if isinstance(value, Sequence) and isinstance(form, list):
        return len(form) != len(value)
    return form is not None or isinstance(value, float)


def _as_json(value: Any, schemas: Sequence[JSONSchema] = (), place: str = "the root", form: Any = _NO_FORM) -> Any:
    """Copy `value` into plain JSON types by JSON's rules: dates become ISO text, enums their values, bytes base64.

    A Decimal is a number where `schemas` ask for one. Where pydantic has dumped `value`, `form` is its JSON: what a
    model says of its JSON holds. ValueError for what JSON cannot say, with its `place`."""
    if isinstance(value, BaseModel):
        _check_values(value, place.removeprefix("the root"))
        value, form = _dumped(value.model_dump, value.model_dump_json)
    is_nat = isinstance(value, date) and value != value  # pandas' missing date
    if form is not _NO_FORM and not is_nat and _is_written(value, form):
        return form
    if isinstance(value, Decimal) and value.is_finite():
        types = {name for schema in schemas for name in types_of(schema)}
        value = float(value) if types & {"number", "integer"} and "string" not in types else str(value)
    value = _without_numpy(value.value if isinstance(value, Enum) else value)
    if is_nat or (isinstance(value, float | Decimal) and not math.isfinite(value)):
        raise ValueError(f"{value} at {place}")
    if value is None or type(value) in (str, bool, int, float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    prefix = "" if place == "the root" else f"{place}."
    if isinstance(value, Mapping):
        written: JSONObject = {}
        for key, item in value.items():
            name = _name_in_json(key)
            if name in written:
                raise ValueError(f"two keys are {name!r} at {place}")
            part = form.get(name, _NO_FORM) if isinstance(form, dict) else _NO_FORM
            written[name] = _as_json(item, [*in_place(*part_schemas(schemas, name))], prefix + name, part)
        return written
    if isinstance(value, Set) or (isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)):
        parts = [[*in_place(*part_schemas(schemas, index))] for index in range(len(value))]
        forms = form if isinstance(form, list) and not isinstance(value, Set) else [_NO_FORM] * len(value)
        return [_as_json(item, parts[index], f"{prefix}{index}", forms[index]) for index, item in enumerate(value)]
    if isinstance(value, Iterator):  # which pydantic would use up
        _unknown(value)
    if isinstance(value, bytes | bytearray):  # pydantic has the alphabet of URLs
        return base64.b64encode(value).decode()
    return to_jsonable_python(value, bytes_mode="base64", fallback=_unknown)


def _parts_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """What stands in a value, by the names under which it is written."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        parts = [((name in fields and fields[name].serialization_alias) or name, item) for name, item in value]
        computed = type(value).model_computed_fields
        return parts + [(field.alias or name, getattr(value, name)) for name, field in computed.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [(_name_in_json(key), item) for key, item in value.items()]
    return enumerate(value) if isinstance(value, list | tuple | deque | Set) else ()


def _check_values(value: Any, place: str = "", allows_nan: bool = False) -> None:
    """Raise ValueError for the first number in `value` that JSON cannot say ("nan at items.0.qty"), unless a model says
    how its own are written, by `ser_json_inf_nan`; TypeError for an iterator, which pydantic would use up."""
    if isinstance(value, Iterator):
        _unknown(value)
    if isinstance(value, float | Decimal) and not math.isfinite(value) and not allows_nan:
        raise ValueError(f"{value} at {place.strip('.') or 'the root'}")
    if isinstance(value, BaseModel):
        allows_nan = type(value).model_config.get("ser_json_inf_nan") in ("null", "strings")
    for name, item in _parts_of(value):
        _check_values(item, f"{place}.{name}", allows_nan)


def _marks_in(value: Any) -> JSONSchema:
    """The marks of the models in a value, each where it stands: of `[1, Model()]` `{"prefixItems": [{}, {...}]}`; `{}`
    where no model in it marks anything."""
    parts = {name: _marks_in(item) for name, item in _parts_of(value)}
    is_class = isinstance(value, BaseModel) or (dataclasses.is_dataclass(value) and not isinstance(value, type))
    own = marks_of(type(value)) if is_class else {}
    if not any(parts.values()):
        return own
    if isinstance(value, list | tuple | Set):
        return {"prefixItems": [*parts.values()]}
    return {"anyOf": [own, {"properties": parts, "additionalProperties": {}}]}


def _is_open(schema: JSONSchema) -> bool:
    """Whether `schema` leaves open how a value is written: it takes any value, or bytes."""
    is_any = not schema.keys() - {"title", "description", "default", "examples", "deprecated"}
    is_bytes = schema.get("format") == "binary" or "contentEncoding" in schema
    return is_any or is_bytes or schema.get("additionalProperties") is True


_CHECKS = ConfigDict(revalidate_instances="always", arbitrary_types_allowed=True)


class _Output:
    """What a module gives: checked by what declares it, and written once, in the form that `schema` describes.

    A function's return hint and a class's model are pydantic's, which checks and writes by them: its serializers and
    aliases hold. A dict schema, and what nothing declares, is written by JSON's rules. Everything but a dict and a
    model is put under `result`, as apcore promises it."""

    def __init__(self, module: Any, descriptor: ModuleDescriptor, function: Function | None) -> None:
        self._function = function
        self._declared = getattr(module, "output_schema", None)
        self._adapter: TypeAdapter[Any] | None = None
        schema = descriptor.output_schema
        if function is not None and get_origin(function.returns) is dict:
            self._adapter = TypeAdapter(function.returns, config=_CHECKS)
            schema = _written_form(function.returns, self._adapter)
        elif isinstance(self._declared, _Model) and (function is None or function.returns is not dict):
            self._adapter = TypeAdapter(self._declared)
            if function is not None and function.is_wrapped:  # for which apcore's model believes dataclasses
                self._adapter = TypeAdapter(create_model("Result", __config__=_CHECKS, result=(function.returns, ...)))
            schema = _written_form(self._declared, self._adapter)
        self.schema: JSONSchema = {}  # as written out; {} where nothing is declared, or it cannot be
        self.fault = ""  # why it cannot be
        try:
            self.schema = _SchemaConverter(self._declared if self._adapter else None).inline(schema)
        except UnconvertibleSchema as error:
            if _mentions_mark(schema):
                raise
            self.fault = str(error)
        # What JSON Schema leaves open, pydantic would guess; there, JSON's rules write what it makes of the rest.
        self._is_open = not self.schema or any(map(_is_open, subschemas(self.schema)))

    def write(self, output: Any, redacts: bool) -> JSONObject:
        """What a module gave as plain JSON; RefusedOutput for what does not fit. With `redacts`, what models mark is
        hidden that `schema` does not describe."""
        function = self._function
        if function is not None and function.is_wrapped:
            output = {"result": output}
        given = output  # with its models, which may mark something
        if function is not None and function.is_foreign:
            output = function.output(output)
        elif output is None and (self._adapter is None if function is None else function.returns is type(None)):
            output = {}
        try:
            written = self._serialize(output)
            if redacts and (self._adapter is None or self._is_open):
                written = redact(written, _marks_in(given))
        except (errors.SchemaValidationError, ModuleError):
            raise
        except Exception as error:  # a module's own __str__ may raise anything
            raise _not_json(error) from None
        if not isinstance(written, dict):
            raise RefusedOutput([_fault([], "type", "A module returns a dict or a model")], output)
        return written

    def _serialize(self, output: Any) -> Any:
        if self._adapter is not None:
            checked = self._validate(self._adapter, output)
            dump = functools.partial(self._adapter.dump_python, checked)
            written = None if self._is_open else dump(mode="json", by_alias=True, warnings=False)
            if written is not None and _is_json(written):
                return written
            _check_values(checked)
            python, form = _dumped(dump, functools.partial(self._adapter.dump_json, checked))
            return _plain(_as_json(python, form=form))
        written = None
        is_plain = False
        with suppress(ValueError, TypeError):
            written = _plain(output)
            is_plain = bool(written == output)  # not the key 1, a date or a set
        if not is_plain:
            written = _plain(_as_json(output, [*in_place(self.schema)]))
        if self._declared is not None and not isinstance(self._declared, _Model):
            try:
                self._declared.model_validate(written, strict=True)
            except errors.SchemaValidationError as error:
                raise RefusedOutput(_faults_in(error), output) from None
        return written

    def _validate(self, adapter: TypeAdapter[Any], output: Any) -> Any:
        with suppress(ValidationError):
            return adapter.validate_python(output, strict=True)
        plain = _without_numpy(output)
        try:
            return adapter.validate_python(plain, strict=True)
        except ValidationError as error:
            with suppress(ValueError):  # rows as a file or a frame gave them: the text of a date, of an enum
                if not _marks_in(output):  # what another type marks would be sent
                    return adapter.validate_json(to_json(plain, bytes_mode="utf8"), strict=True)
            is_wrapped = self._function is not None and self._function.is_wrapped
            raise RefusedOutput(_pydantic_faults(error, output), output["result"] if is_wrapped else output) from None


# ---- Tools: a module as clients see it: its names, its description, its schemas; pure ----

_NAME_MAX = 64  # characters; the limit of OpenAI's function names and of Claude's tool names

_CLIENTS_WITHOUT_DOTS = re.compile(  # how `clientInfo.name` begins where one name with a dot loses all tools
    "claude-ai"  # Claude Desktop, claude.ai: ^[a-zA-Z0-9_-]{1,64}$; behind mcp-remote (pull request 63) more follows
    "|github-copilot-developer"  # Copilot CLI: its issues 1879 and 2581
    r"|JetBrains-\w+-copilot"  # Copilot in JetBrains' IDEs: microsoft/copilot-intellij-feedback, issue 1583
)
_API_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # what Anthropic's API takes: of a tool's alias, and of its arguments
_PAGE_MEDIA_TYPE = "text/html;profile=mcp-app"  # MCP Apps, SEP-1865, the specification of 2026-01-26


def portable_name(module_id: str) -> str:
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

# Where the first paragraph of a docstring ends without an empty line: what apcore takes for the head of a section.
_SECTION = re.compile(r":\w|(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?|Warnings?)\s*:")


def _description_of(descriptor: ModuleDescriptor, function: Function | None) -> str:
    """A module's description. For a function, apcore takes the first line of the docstring, which may end inside a
    sentence: then it is the first paragraph, in one line."""
    lines = [] if function is None else (inspect.getdoc(function.function) or "").splitlines()
    paragraph = [*itertools.takewhile(lambda line: line.strip() and not _SECTION.match(line), lines)]
    if paragraph and paragraph[0].strip() == descriptor.description:
        return " ".join(line.strip() for line in paragraph)
    return descriptor.description


def _tags_of(descriptor: ModuleDescriptor, module: Any) -> list[str]:
    """The tags of a module: those that its definition has (from a `_meta.yaml`) and its own."""
    own_tags = getattr(module, "tags", None) or []
    tags = [*descriptor.tags, *own_tags]
    if isinstance(own_tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError("its tags are no list of texts")
    return [*dict.fromkeys(tags)]


class _AnnotationMapper:
    """Express what apcore knows about one module in the terms of MCP and OpenAI.

    The description is that of apcore's display overlay (in the metadata, or the `display` of an `@module` function) or
    else the module's own. The guidance, the advice and the deprecation notice follow, a paragraph each. `alias` is the
    overlay's name for the tool, and `page` the HTML in which hosts of MCP Apps show its results ("" without one)."""

    def __init__(self, descriptor: ModuleDescriptor, module: Any, function: Function | None) -> None:
        self._version = descriptor.version
        self.tags = _tags_of(descriptor, module)
        self.annotations = descriptor.annotations or _DEFAULT_ANNOTATIONS
        self.title = descriptor.name or ""
        metadata = descriptor.metadata
        overlay: JSONObject = {}
        with suppress(KeyError, TypeError):  # apcore does not check what `display` holds
            overlay = {**(metadata.get("display") or getattr(module, "display", {}))["mcp"]}
        self._meta: JSONObject = {**(overlay.get("meta") or {})}
        self.alias = text_of(overlay.get("alias") or descriptor.module_id)
        self.page = text_of(overlay["page"]) if isinstance(overlay.get("page"), str) else ""
        self.page_uri = f"ui://{descriptor.module_id}"
        marks = (metadata.get("async"), self.annotations.extra.get("mcp_async"))
        self.is_long = any(str(mark).lower() == "true" for mark in marks)  # runs for minutes, as its author says
        paragraphs = [overlay.get("description") or _description_of(descriptor, function)]
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
        """The tool's definition without its name and schemas (FR-ANNOT-001 to -006)."""
        # apcore takes whatever an author wrote; TypeScript clients lose the whole list by a hint that is no boolean.
        hints: JSONObject = {hint: bool(getattr(self.annotations, name)) for hint, name in _HINTS.items()}
        flags = {f"apcore/{flag}": bool(getattr(self.annotations, flag)) for flag in _FLAGS}
        meta = {**self._meta, **flags, "apcore/version": self._version, "apcore/tags": self.tags}
        if self.page:
            meta["ui"] = {"resourceUri": self.page_uri}
        title = {"title": self.title} if self.title else {}
        return {**title, "description": self.description, "annotations": {**title, **hints}, "_meta": meta}

    def to_suffix(self) -> str:
        r"""The annotations that differ from the defaults, for a function's description (FR-ANNOT-007):
        `"\n\n[Annotations: readonly=true, idempotent=true]"`, or `""` when nothing does."""
        values = {name: getattr(self.annotations, name) for name in _SUFFIX_FIELDS}
        different = [name for name in values if values[name] != getattr(_DEFAULT_ANNOTATIONS, name)]
        texts = ", ".join(f"{name}={str(values[name]).lower()}" for name in different)
        return f"\n\n[Annotations: {texts}]" if texts else ""


class Tool:
    """One listed module: everything about it that does not change from call to call.

    `name` is its alias, unless the catalog has another tool that could be meant by it. ValueError, TypeError or
    KeyError when the module cannot be a tool."""

    def __init__(self, descriptor: ModuleDescriptor, module: Any, options: Options) -> None:
        self.descriptor = descriptor
        self.module = module
        self.module_id = descriptor.module_id
        self.documentation = text_of(descriptor.documentation or "")
        self.function = function = function_of(module)
        if function is not None and function.others is not None and function.others_hint is not Any:
            raise TypeError(f"nothing checks what `**{function.others.name}` is given: give it the hint Any, or none")
        self.about = _AnnotationMapper(descriptor, module, function)
        self.name = self.about.alias
        self.model: Any = getattr(module, "input_schema", None)  # by which apcore validates arguments
        schema = descriptor.input_schema
        if function is not None and function.model not in (None, self.model):
            self.model = function.model
            schema = function.model.model_json_schema()
        advertised = _object_schema(schema, self.model if isinstance(self.model, _Model) else None)
        names_all = not advertised.keys() & {*_IN_PLACE, *_OTHER_PROPERTIES}
        self.is_closed = function is not None and function.others is None and names_all
        if self.is_closed:  # apcore would pass on what it does not take, and Python raise a TypeError
            advertised["additionalProperties"] = False
        self.has_secret_inputs = marks_sensitive(advertised)
        self.output = _Output(module, descriptor, function)
        self.redacts = options.redact_output
        self.marks = [_marks(self.output.schema)] if self.redacts and marks_sensitive(self.output.schema) else []
        self.media = _media(self.output.schema)  # properties that are sent as files, with their media types
        definition = {**self.about.to_mcp(), "inputSchema": advertised}
        promise = _promise(self.output.schema) if self.output.schema else {"type": "null"}
        # Where there is structured content, Codex and Claude Code show their models nothing else: no file, no format.
        if _admits_object(promise) and not (self.marks or self.media or options.output_formatter):
            definition["outputSchema"] = {**promise, "type": "object"}
        self._definition = _as_listed(definition)
        self.input_schema: JSONSchema = self._definition["inputSchema"]
        self.output_schema: JSONSchema = self._definition.get("outputSchema", {})  # as advertised; {} when none is
        self.warnings = self._warnings(schema)
        self.resources = self._resources()

    def _warnings(self, schema: JSONSchema) -> list[str]:
        """What makes clients leave out the tool in silence, or what is left out of it."""
        warnings = []
        refused = [name for name in properties_of(self.input_schema) if not _API_NAME.fullmatch(name)]
        if refused:
            warnings.append(f"Claude's API refuses the names of these arguments, and the tool: {', '.join(refused)}")
        foreign = {keyword for part in subschemas(schema) for keyword in _FOREIGN.intersection(part)}
        if foreign:
            warnings.append(f"of its input schema, this is not sent: {', '.join(sorted(foreign))}")
        if self.output.fault:
            warnings.append(f"it is served without its output schema: {self.output.fault}")
        return warnings

    def _resources(self) -> list[tuple[JSONObject, JSONObject]]:
        """The tool's documentation (FR-RESOURCE-001) and its page (MCP Apps), each as `resources/list` describes it
        and as `resources/read` sends it."""
        about = {"name": self.module_id, "title": self.descriptor.name or self.module_id}
        docs = {"uri": f"docs://{self.module_id}", **about, "mimeType": "text/plain"}
        page = {"uri": self.about.page_uri, **about, "mimeType": _PAGE_MEDIA_TYPE}
        # The border is stated, because hosts differ in what they do without it.
        bordered = {**page, "text": self.about.page, "_meta": {"ui": {"prefersBorder": True}}}
        resources: list[tuple[JSONObject, JSONObject]] = []
        resources += [(docs, {**docs, "text": self.documentation})] if self.documentation else []
        resources += [(page, bordered)] if self.about.page else []
        return resources

    def name_as(self, names: str) -> str:
        """The tool's name in MCP, with `names` as the option `tool_names`."""
        return portable_name(self.name) if names == "portable" else self.name

    def definition(self, names: str) -> JSONObject:
        """The tool as MCP's `tools/list` sends it (FR-SERVER-011), with `names` as the option `tool_names`."""
        return {"name": self.name_as(names), **self._definition}

    @property
    def examples(self) -> list[JSONObject]:
        """The module's own examples that are valid calls, in plain JSON types."""
        with suppress(Exception):  # apcore checks nothing of what a module lists as examples
            return [each for each in _plain(self.descriptor.examples) if is_valid(each["inputs"], self.input_schema)]
        return []

    def unknown(self, arguments: JSONObject) -> dict[str, Any]:
        """The arguments that a function does not take."""
        names = self.input_schema["properties"] if self.is_closed else arguments
        return {name: value for name, value in arguments.items() if name not in names}

    def faults(self, arguments: JSONObject) -> list[dict[str, str]]:
        """What apcore finds wrong with arguments, each field by its full path; the first twenty.

        Only arguments for a dict schema are shown to jsonschema, as apcore does itself: for a pattern, it may take
        minutes where a pydantic model takes milliseconds."""
        unknown = self.unknown(arguments)
        first = itertools.islice(unknown, _FAULTS_MAX)
        faults = [_fault([name], "extra_forbidden", "Extra inputs are not permitted") for name in first]
        if hasattr(self.model, "model_validate_json"):
            try:
                self._read(arguments)
            except ValidationError as error:
                faults += _pydantic_faults(error, arguments)
        else:
            known = {name: value for name, value in arguments.items() if name not in unknown}
            faults += _schema_faults(self.input_schema, known)
        return faults[:_FAULTS_MAX]

    def _read(self, arguments: JSONObject) -> Any:
        """Read arguments as apcore does: as JSON or, where another module passes what JSON has not, as Python."""
        try:
            text = json.dumps(arguments)
        except (TypeError, ValueError):
            return self.model.model_validate(arguments, strict=True)
        return self.model.model_validate_json(text, strict=True)

    # What approval wants to know of a module.

    @property
    def summary(self) -> str:
        return self.about.description

    def check(self, arguments: JSONObject) -> None:
        """Raise SchemaValidationError for arguments that the module would refuse."""
        faults = self.faults(arguments)
        if faults:
            raise errors.SchemaValidationError(f"Input validation failed: {faults}", faults)

    def shown(self, arguments: JSONObject) -> tuple[JSONObject, JSONObject]:
        """The arguments as plain JSON, without what is sensitive: those that the schema names, and the others.

        Of a model that marks something, what it reads is shown, by the names of its fields: so no other spelling of a
        name shows a value."""
        plain = json.loads(json.dumps(arguments, default=_to_show))
        names = [*properties_of(self.input_schema)]
        if self.has_secret_inputs and isinstance(self.model, _Model):
            read = self._read(arguments)
            schema = TypeAdapter(self.model).json_schema(mode="serialization", by_alias=False)
            given = read.model_dump(mode="json", include=read.model_fields_set, fallback=str, warnings=False)
            known = redact(given, _marks(_SchemaConverter().inline(schema)), hides_others=False)
            others = plain.keys() - {*names, *self.model.model_fields, *given}
            return known, dict.fromkeys(others, REDACTED_VALUE)
        plain = redact(plain, _marks(self.input_schema), _marks_in(arguments), hides_others=False)
        if plain == REDACTED_VALUE:  # the schema as a whole is marked
            plain = dict.fromkeys(arguments, REDACTED_VALUE)
        known = {name: plain.pop(name) for name in names if name in plain}
        return known, plain


def _to_show(value: Any) -> Any:
    """What a question shows of a value that JSON has not, without using up an iterator."""
    return str(value) if isinstance(value, Iterator) else to_jsonable_python(value, bytes_mode="base64", fallback=str)


def _as_listed(definition: JSONObject) -> JSONObject:
    """A copy of a tool's definition in plain JSON types. ValueError where a parser could not read it in its place in
    the answer to `tools/list`, for its depth or for what JSON cannot say: it would cost a client the whole list."""
    answer: JSONObject = _plain({"result": {"tools": [definition]}})
    return cast(JSONObject, answer["result"]["tools"][0])


def _media(schema: JSONSchema) -> dict[str, str]:
    """The properties that are files, with their media types: strings of base64 that have one."""
    media_types: dict[str, str] = {}
    for part in in_place(schema):
        for name, field in properties_of(part).items():
            for view in in_place(field):
                if view.get("contentEncoding") == "base64" and "contentMediaType" in view:
                    media_types.setdefault(name, view["contentMediaType"])
    return media_types


# The keywords of a module's output schema that are advertised. AJV, which TypeScript clients use, has to read them as
# Python does: it reads draft 7, stops at patterns that are everyday Python, checks formats in another sense, and finds
# 1.13 no multiple of 0.01. Limits of length hold for other texts than those that are sent (bytes, secrets).
_PROMISED = frozenset(
    "type properties required additionalProperties items prefixItems anyOf oneOf allOf enum const minimum maximum"
    " exclusiveMinimum exclusiveMaximum minItems maxItems title description default examples deprecated".split()
)


def _promise(schema: JSONSchema) -> JSONSchema:
    """What holds of each value that is sent by `schema`: never stricter than `schema` itself."""
    promise = {key: value for key, value in schema.items() if key in _PROMISED}
    if "prefixItems" in schema:  # AJV, by draft 7, would hold `items` against all of them
        promise["items"] = {}
    if "patternProperties" in schema or schema.get("additionalProperties") is False:
        promise.pop("additionalProperties", None)
    if "oneOf" in promise:  # without the keywords that are left out, a value may fit several branches
        promise["anyOf"] = promise.pop("oneOf")
    promise = _map_subschemas(promise, lambda inner, _: _promise(inner))
    # A default need not fit its field, as in `size: int = None`: pydantic and apcore do not check it.
    return _nullable(promise) if schema.get("default", promise) is None else promise


def tool_result(text: str, *files: JSONObject, is_error: bool = False, **more: Any) -> JSONObject:
    """A tool result in MCP's form."""
    return {"content": [{"type": "text", "text": text}, *files], "isError": is_error, "resultType": "complete", **more}


def _take_files(tool: Tool, value: JSONObject) -> list[JSONObject]:
    """Remove the files from `value` and return them as MCP content. ValueError for one that is not base64."""
    files: list[JSONObject] = []
    for name, media_type in tool.media.items():
        if value.get(name) == REDACTED_VALUE:
            continue
        # Pydantic writes the alphabet of URLs, MCP reads the standard one.
        encoded = (value.pop(name, None) or "").replace("-", "+").replace("_", "/")
        data = base64.b64decode(encoded, validate=True)
        family = media_type.split("/")[0]
        if data and family in ("image", "audio"):
            files.append({"type": family, "data": encoded, "mimeType": media_type})
        elif data:
            resource = {"uri": f"media://{tool.module_id}/{quote(name)}", "mimeType": media_type, "blob": encoded}
            if family == "text":
                with suppress(UnicodeDecodeError):  # in another encoding it stays a blob
                    resource["text"] = data.decode()
                    del resource["blob"]
            files.append({"type": "resource", "resource": resource})
    return files


@dataclasses.dataclass(frozen=True)
class _ResultMapper:
    """Makes tool results of what modules gave: text, files and, where `structured` says so or else a schema is
    advertised, structured content. `label` names the call in the log.

    A result of more than `max_result` bytes is an error RESULT_TOO_LARGE (0: any size): clients end their connection,
    and all tools of the server with it."""

    options: Options
    tool: Tool
    label: str
    structured: bool | None = None

    def to_text(self, chunk: Any) -> str:
        """A chunk of a stream as JSON text, with marked values hidden."""
        marks = [*self.tool.marks, _marks_in(chunk)] if self.tool.redacts else []
        chunk = {name: value for name, value in chunk.items() if name not in self.tool.media}  # the result has them
        try:
            return to_json(redact(_as_json(chunk), *marks)).decode()
        except Exception as error:  # a module's own __str__ may raise anything
            raise _not_json(error) from None

    def to_result(self, output: Any, written: bytes | None) -> JSONObject:
        """The tool result for `output`, which was `written` unless middleware has changed it since (F-013)."""
        tool = self.tool
        files: list[JSONObject] = []
        text = b""
        try:
            with suppress(ValueError):
                text = to_json(output)
            is_changed = text != written
            value = _as_json(output) if is_changed else output
            if is_changed or tool.marks or tool.media:
                value = redact(value, *tool.marks)
                if tool.media:
                    value = {**value}
                    files = _take_files(tool, value)
                text = to_json(value)
        except Exception as error:  # a module's own __str__ may raise anything
            raise _not_json(error) from None
        if is_changed:  # a client would refuse what breaks the promise
            faults = _schema_faults(tool.output_schema, value)
            if faults:
                raise RefusedOutput(faults, output)
        is_structured = bool(tool.output_schema) if self.structured is None else self.structured
        size = len(text) if is_structured else 0
        shown = text.decode()
        if self.options.output_formatter is not None and not self.structured:
            try:
                shown = text_of(self.options.output_formatter(from_json(text)))  # a copy, which it may change
            except Exception:  # a user's own function
                logger.exception("output_formatter failed, so %s is answered in JSON", self.label)
            text = shown.encode()
        self.check_size(size + len(text) + sum(len(json.dumps(file)) for file in files))
        result = tool_result(shown, *files)
        if is_structured:
            result["structuredContent"] = value
        return result

    def check_size(self, size: int) -> None:
        """Raise an error where a result, or a part of it, is larger than what is sent."""
        limit = self.options.max_result
        if limit and size > limit:
            text = f"Result is too large: {size} bytes, and at most {limit} are sent (the tool has run)"
            raise _OwnError("RESULT_TOO_LARGE", text, retryable=False)


# ---- Errors: what went wrong, in a plain sentence for the client and in full for the log; pure ----

SENTENCES = {  # what a client reads, by apcore's error code (FR-ERROR-001 to -010)
    "MODULE_NOT_FOUND": "Module not found",
    "MODULE_DISABLED": "Module is disabled",
    "ACL_DENIED": "Access denied",
    "MODULE_TIMEOUT": "Module timed out after {timeout_ms}ms",
    "GENERAL_INVALID_INPUT": "Invalid input",
    "CALL_DEPTH_EXCEEDED": "Call depth limit exceeded",
    "CIRCULAR_CALL": "Circular call detected",
    "CALL_FREQUENCY_EXCEEDED": "Call frequency limit exceeded",
    "EXECUTION_CANCELLED": "Execution was cancelled",
    "APPROVAL_DENIED": "Approval was denied",
    "APPROVAL_TIMEOUT": "Approval was not given in time",
    "APPROVAL_PENDING": "Approval is still pending",
    "OUTPUT_SERIALIZATION_ERROR": "Failed to serialize module output",
}
_DETAILS = {  # how a sentence goes on, unless that may quote what is marked
    "MODULE_NOT_FOUND": ": {module_id}",
    "MODULE_DISABLED": ": {module_id}",
    "GENERAL_INVALID_INPUT": ": {message}",
}
UNEXPECTED = "Internal error occurred"
_LOG_CHARACTERS = 10_000  # of an error's text in the log


def failure(text: str, code: str, **report: Any) -> JSONObject:
    """An error as a tool result, with its machine-readable form in `_meta` (FR-ERROR-011). Without `structuredContent`,
    which the TypeScript client would validate against the output schema."""
    meta = {"apcore-mcp/error": {"status": "failure", "error_type": code, "error_message": text, **report}}
    return tool_result(text, is_error=True, _meta=meta)


def label_of(name: str, caller: Identity | None) -> str:
    """How lines of the log name a call: `image.resize (caller: ann)`, without the bracket for an anonymous caller."""
    return name if caller is None else f"{name} (caller: {one_line(caller.id)})"


def has_marks(module: Any, side: Literal["input", "output"]) -> bool:
    """Whether a module marks anything of its input or output as sensitive."""
    function = function_of(module) if side == "output" else None
    marks = marks_of(getattr(module, f"{side}_schema", None))
    return bool(marks) or (function is not None and bool(_marks_in_form(_written_form(function.returns))))


def _cause_of(error: BaseException) -> BaseException:
    """What a module raised, where apcore's Executor has wrapped it, or else `error` itself."""
    return (error.cause if isinstance(error, errors.ModuleExecuteError) else None) or error


@dataclasses.dataclass
class _ErrorMapper:
    """Says what went wrong with one call: to the client in a plain sentence, to the log in full. It never raises.

    Where a module that took part in the call has sensitive inputs, both learn no more than what failed and where: no
    text that a module or a validator wrote, as nobody can tell how it spells a secret. With sensitive outputs, the same
    holds for the log."""

    label: str
    tool: Tool
    arguments: JSONObject
    modules: Iterable[Any]  # that took part in the call
    trace_id: str
    masks: bool = True  # whether clients are told nothing of what nobody expected

    def to_result(self, error: BaseException) -> JSONObject:
        """The tool result for `error`, which is logged (FR-ERROR-001 to -011, FR-LOG-003)."""
        try:
            has_secret_inputs = self.tool.has_secret_inputs or any(has_marks(m, "input") for m in self.modules)
            is_secret = has_secret_inputs or bool(self.tool.marks) or any(has_marks(m, "output") for m in self.modules)
            result = self._failure_of(error, has_secret_inputs, is_secret)
            self._log(_cause_of(error), is_secret)
            return result
        except Exception as fault:  # boundary: what a module's author puts into an error may be anything
            logger.error("Tool call error: %s - its error cannot be read: %s", self.label, type(fault).__name__)
            return failure(UNEXPECTED, "GENERAL_INTERNAL_ERROR")

    def _log(self, cause: BaseException, is_withheld: bool) -> None:
        """Log what went wrong, with the traceback of what nobody expected."""
        kind = next(cls for cls in type(cause).__mro__ if cls.__module__ != __name__)  # apcore's, of one of ours
        text = one_line(str(getattr(cause, "message", cause))[:_LOG_CHARACTERS])
        trace = None if isinstance(cause, ModuleError) or is_withheld else cause
        if is_withheld:
            frame = (traceback.extract_tb(cause.__traceback__) or [None])[-1]
            place = f"{os.path.basename(frame.filename)}:{frame.lineno}" if frame else "an unknown place"
            text = f"(not shown: it may quote sensitive values) at {place}"
        if getattr(cause, "code", "") == "MODULE_TIMEOUT":
            text += " (--timeout and the module's own resources say how long it may take)"
        line = "Tool call error: %s - %s: %s (trace %s)"
        extra = {"trace_id": self.trace_id}
        logger.error(line, self.label, kind.__name__, text, self.trace_id, exc_info=trace, extra=extra)

    def _failure_of(self, error: BaseException, is_withheld: bool, is_secret: bool) -> JSONObject:
        """What the client is told of `error`."""
        cause = _cause_of(error)
        code = "GENERAL_INTERNAL_ERROR"
        text = UNEXPECTED
        report: JSONObject = {}
        if isinstance(error, ModuleError):
            code = text_of(error.code)
            report = {"retryable": error.retryable, "user_fixable": error.user_fixable}
        if isinstance(cause, ModuleError):
            text, details = self._explain(cause, is_withheld)
            report.update(details)
        elif not self.masks and not is_secret:
            text = text_of(f"{UNEXPECTED}: {type(cause).__name__}: {cause}")[:_LOG_CHARACTERS]
        result = failure(text, code, **{key: value for key, value in report.items() if value is not None})
        plain: JSONObject = _plain(result)  # raises for what a module's author has put into it and JSON cannot say
        return plain

    def _explain(self, error: ModuleError, is_withheld: bool) -> tuple[str, JSONObject]:
        """What the client reads of apcore's or a module's `error`, and what is reported beside that text."""
        own_chain = [self.tool.module_id]
        is_own = error.details.get("call_chain", own_chain) == own_chain
        if isinstance(error, errors.SchemaValidationError) and is_own:
            return self._explain_validation(error, is_withheld)
        if isinstance(error, _OwnError):
            return error.message, {}
        sentence = SENTENCES.get(error.code, "Module error: {code}")
        sentence += "" if is_withheld else _DETAILS.get(error.code, "")
        if isinstance(error, errors.ApprovalDeniedError) and error.result.reason == NOBODY:
            return f"{sentence}: {NOBODY}", {}
        facts = {"timeout_ms": 0, **error.details, "code": error.code, "message": error.message}
        text = text_of(sentence.format_map(facts))
        report: JSONObject = {}
        if isinstance(error, errors.SchemaValidationError):  # this module called another one with wrong arguments
            report["user_fixable"] = False
        if error.code == "MODULE_TIMEOUT":
            report["error_details"] = {"timeout_ms": facts["timeout_ms"]}
        if error.code == "OUTPUT_SERIALIZATION_ERROR" and not is_withheld and not self.tool.marks:
            found = re.search(r"(nan|-?inf|NaN|-?Infinity|NaT) at .*", error.message)
            text += f": {found[0]}" if found else ""
        if is_own and not is_withheld and error.code not in errors.ErrorCodeRegistry().all_codes:
            # The code and so the advice are the module's own; apcore's advice may name modules and callers.
            if error.suggestion:
                report["suggestion"] = text_of(error.suggestion)
            if error.ai_guidance:
                report["ai_guidance"] = text_of(error.ai_guidance)
                text += f"\n{report['ai_guidance']}"
        return text, report

    def _explain_validation(self, error: errors.SchemaValidationError, is_withheld: bool) -> tuple[str, JSONObject]:
        """The text for arguments or an output of the tool itself that break their schema: a line for each field."""
        title = "Input validation failed"
        report: JSONObject = {}
        faults: list[dict[str, str]] = []
        if isinstance(error, RefusedOutput):
            title = "Output validation failed (the tool has run)"
            report["user_fixable"] = False
            is_withheld = True  # the values are the module's, and the client has no use for them
        elif getattr(error.__context__, "step_name", "") == "input_validation":
            faults = self.tool.faults(self.arguments)  # apcore's own list lacks the names of missing fields
        if not faults:  # the module itself refuses the arguments, or middleware has changed them
            faults = _faults_in(error)
        lines = [title]
        for fault in faults:
            if is_withheld:  # a message may quote the value, a part or the parent of it
                is_missing = fault["code"] in ("missing", "required")
                fault["message"] = "Field required" if is_missing else "Value is not valid"
            lines.append(f"- {fault['field'] or '(root)'}: {fault['message']} ({fault['code']})")
        if faults:
            lines[0] += ":"
            report["error_details"] = {"errors": faults}
        return "\n".join(lines), report


# ---- Catalog: the registry as a list of tools that follows it, and who is offered which; any thread ----


class Catalog:
    """The registry's modules as listed tools, up to date whenever it is read.

    A registry event, from whatever thread, only notes which module changed; the next read builds that tool again and
    swaps in a new table. It follows the registry, and with `dynamic` the files, from `follow()` to `close()`.
    `left_out` and `warned` say what WARNINGs were given when modules were last built."""

    def __init__(self, options: Options) -> None:
        self._registry = options.registry
        self._options = options
        self._lock = threading.Lock()
        self._tools: dict[str, Tool] = {}  # by module ID, sorted
        self._by_name: dict[str, Tool] = {}  # by the portable form of ID and alias
        self._changed = {*self._registry.list()}
        self._closed = threading.Event()
        self.left_out: list[str] = []
        self.warned: list[str] = []

    def follow(self, on_change: Callable[[], object]) -> None:
        """Follow every change from now on; `on_change` is called on the thread of each."""
        self._on_change = on_change
        if self._options.dynamic:
            cast(Folder, self._registry).follow(self._closed)
        for event in ("register", "unregister"):
            self._registry.on(event, self._note_change)
        self._changed.update(self._registry.list())  # listed after `on`, or a module could slip in between

    def close(self) -> None:
        self._closed.set()
        for event in ("register", "unregister"):
            self._registry.off(event, self._note_change)

    @property
    def tools(self) -> dict[str, Tool]:
        """The listed tools by module ID, sorted by it; not to be written to."""
        self._refresh()
        return self._tools

    def why_empty(self) -> str:
        """Why no tool is listed, in the words of FR-SERVER-006 where there is none to list."""
        count = len(self._registry.list())
        return f"All {count} modules are left out: by an option, or as said above" if count else "No modules registered"

    def find(self, name: str) -> Tool | None:
        """The listed tool that a client calls `name`: its ID or its alias, with dots or with hyphens."""
        self._refresh()
        return self._by_name.get(portable_name(name))

    @property
    def acls(self) -> list[ACL]:
        """The ACLs of the Executor, as it is now: those of its steps that have one."""
        steps = self._options.executor.current_strategy.steps
        return [step.acl for step in steps if isinstance(step, BuiltinACLCheck) and step.acl is not None]

    async def offered(self, tools: Iterable[Tool], caller: Identity | None) -> list[Tool]:
        """Those of `tools` that the Executor's ACL, as it is now, lets `caller` call: by a copy of its rules, as a list
        has no place in its audit. An ACL of another class may have more than rules, and decides about calls only."""
        offered = [*tools]
        for acl in self.acls:
            if type(acl) is ACL:
                check = ACL([*acl.rules], acl.default_effect).async_check_access
                context: Context[Any] = Context.create(identity=caller)
                offered = [tool for tool in offered if (await check(None, tool.module_id, context)).access == "allow"]
        return offered

    def build(self, module_id: str) -> Tool | None:
        """The module as a tool; None when it cannot be one, or the options filter it out."""
        options = self._options
        if not module_id.startswith(options.prefix or "") or module_id.startswith(tuple(options.exclude or ())):
            return None
        try:
            module = self._registry.get(module_id)
            descriptor = self._registry.get_definition(module_id)
            if descriptor is None:
                raise ValueError("the registry has no definition of it")
            if not {*_tags_of(descriptor, module)}.issuperset(options.tags or ()):
                return None
            if options.read_only and not (descriptor.annotations or _DEFAULT_ANNOTATIONS).readonly:
                return None
            tool = Tool(descriptor, module, options)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # one bad module never takes the others down, whatever it raises
            warn(f"Module {module_id} is left out: {type(error).__name__}: {text_of(error)}", self.left_out)
            return None
        for warning in tool.warnings:
            warn(f"Module {module_id}: {warning}", self.warned)
        return tool

    def _note_change(self, module_id: str, _module: object = None) -> None:
        self._changed.add(module_id)
        self._on_change()

    def _refresh(self) -> None:
        """Build the tools of modules that have changed, and drop those of modules that have gone."""
        # The lock comes before the look at `_changed`: another thread may have emptied it and still be building.
        with self._lock:
            if not self._changed:
                return
            changed = self._changed.copy()
            self._changed -= changed  # before the look at modules: what changes from now on is for the next time
            self.left_out = []
            self.warned = []
            tools = {module_id: tool for module_id, tool in self._tools.items() if module_id not in changed}
            for module_id in changed.intersection(self._registry.list()):
                tool = self.build(module_id)
                if tool is not None:
                    tools[module_id] = tool
            self._tools = dict(sorted(tools.items()))
            self._by_name = self._assign_names(self._tools.values())

    def _assign_names(self, tools: Collection[Tool]) -> dict[str, Tool]:
        """Name each tool by its alias where every client takes that name, and neither another's ID nor the alias of an
        earlier module is the same; else by its ID. Returns all by portable names."""
        by_name = {portable_name(tool.module_id): tool for tool in tools}
        for tool in tools:
            alias = tool.about.alias
            if _API_NAME.fullmatch(alias) and by_name.setdefault(portable_name(alias), tool) is tool:
                tool.name = alias
            elif tool.name != tool.module_id:  # or this has been warned of the last time
                tool.name = tool.module_id
                text = f"The alias of module {tool.module_id} is not used: {alias} is no name for a tool, or another's"
                warn(text, self.warned)
        return by_name


# ---- OpenAI: tools as function definitions; what a model sends back is read in `openai.py` ----

# Strict mode refuses these. A model reads them in the description instead, and the module's own validation holds them.
_FOR_DESCRIPTION = frozenset(
    "minLength maxLength uniqueItems minProperties maxProperties propertyNames dependentRequired contains minContains"
    " maxContains".split()
)
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")  # in a pattern, such as pydantic's for a Decimal


def openai_function(tool: Tool, *, strict: bool = False, embed_annotations: bool = False) -> JSONObject:
    """A tool as an OpenAI function definition. A WARNING says where strict mode refuses its parameters all the same, or
    takes something away from them."""
    function: JSONObject = {"name": portable_name(tool.module_id), "description": tool.about.description}
    if embed_annotations:
        function["description"] += tool.about.to_suffix()
    function["parameters"] = tool.input_schema
    if strict:
        parameters = _to_strict(tool.input_schema)
        problems = [*detect_openai_strict_incompatibilities(parameters), *_too_open(tool.input_schema, "")]
        if problems:
            text = "Schema for module '%s' uses what is incompatible with strict mode: %s; export it without strict"
            logger.warning(text, tool.module_id, ", ".join(problems))
        function |= {"parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


def _too_open(schema: JSONSchema, place: str) -> Iterator[str]:
    """What strict mode cannot say, and where: `tags.items: any type`, `by.items: additionalProperties`."""
    types = types_of(schema)
    if not schema.keys() & {"type", "enum", "const", "anyOf", "oneOf", "allOf", "not"}:
        yield f"{place or 'the root'}: any type"
    if "array" in types and not schema.get("items"):  # or a tuple, which apcore finds
        if "prefixItems" not in schema:
            yield f"{place}: items of any type"
        return
    others = schema.get("additionalProperties", False if properties_of(schema) or not place else "object" in types)
    if others is not False:
        yield f"{place or 'the root'}: additionalProperties, of which a model can send none"
    for name, field in properties_of(schema).items():
        yield from _too_open(field, f"{place}.{name}".lstrip("."))
    for keyword in ("items", "anyOf", "oneOf", "allOf"):
        for number, branch in enumerate(branches(schema, [keyword])):
            yield from _too_open(branch, f"{place}.{keyword}" if keyword == "items" else f"{place}.{keyword}.{number}")


def _is_for_description(keyword: str, value: Any) -> bool:
    """Whether strict mode refuses a keyword with this value that a model can be told of in words."""
    if keyword == "pattern":
        return _LOOKS_AROUND.search(value) is not None
    if keyword == "format":
        return value not in SUPPORTED_FORMATS
    return keyword in _FOR_DESCRIPTION


def _to_strict(schema: JSONSchema) -> JSONSchema:
    """Rewrite a self-contained schema for OpenAI's strict mode (FR-OPENAI-003; OpenAI guide "Structured Outputs").

    `{"type": "string", "enum": ["png"], "default": "png"}` of an optional property becomes
    `{"type": ["string", "null"], "enum": ["png", None]}`; every object requires all its properties and forbids others.
    `{"maxLength": 40, "description": "Where to look."}` becomes `{"description": "Where to look. (maxLength: 40)"}`."""
    keywords: JSONSchema = {}
    limits: list[str] = []
    for keyword, value in schema.items():
        if _is_for_description(keyword, value):
            limits.append(f"{keyword}: {value if isinstance(value, str) else to_json(value).decode()}")
        elif keyword == "oneOf":
            keywords["anyOf"] = value
        elif keyword in _CONSTRAINTS or keyword == "description":
            keywords[keyword] = value
    strict = _map_subschemas(keywords, lambda inner, _: _to_strict(inner))
    if limits:
        strict["description"] = f"{schema.get('description', '')} ({', '.join(limits)})".lstrip()
    if "properties" in schema or "object" in types_of(schema):
        properties = properties_of(strict)
        for name, field in properties_of(schema).items():
            # A tag of a union has a default too, but pydantic cannot choose a branch by null.
            is_tag = "const" in field and field["const"] == field.get("default")
            if name not in schema.get("required", ()) and not is_tag:
                properties[name] = _nullable(properties[name])
        strict |= {"properties": properties, "required": sorted(properties), "additionalProperties": False}
    return strict


def to_openai_tools(
    registry_or_executor: Registry | Executor | APCore, *, embed_annotations: bool = False, strict: bool = False,
    tags: Sequence[str] | None = None, prefix: str | None = None, identity: Identity | None = None,
    search: bool = False,
) -> list[JSONObject]:  # fmt: skip
    """The modules as OpenAI tool definitions, plain dicts for `client.chat.completions.create(tools=...)`.

        [{"type": "function", "function": {"name": "image-resize", "description": "...", "parameters": {...}}}, ...]

    `embed_annotations` appends what an annotation says that is not the default to the description. `strict` adds
    `"strict": True` and rewrites the parameters for OpenAI's strict mode; a WARNING for each tool says where that mode
    cannot say what the module takes. `tags` (all of them) and `prefix` choose modules; with an `identity`, so does the
    ACL: only what it lets that caller call is offered. With `search` there are two functions in the place of all,
    `search_tools` and `call_tool`, for `run_openai_call(search=True)`; `call_tool` is never strict, as its arguments
    are open. A module that cannot be converted is left out with a WARNING. Raises TypeError for neither a Registry nor
    an Executor; ValueError for an empty tag or prefix, and for a module id with a hyphen, which nobody could tell from
    a dot. Source: FR-OPENAI-001 to -007.
    """
    options = options_of("to_openai_tools()", registry_or_executor, tags=tags, prefix=prefix, search=search)
    catalog = Catalog(options)
    with_hyphen = [module_id for module_id in catalog.tools if "-" in module_id]
    if with_hyphen:
        raise ValueError(f"Module ids must not contain hyphens, which stand for dots in names: {with_hyphen}")
    tools: Collection[Tool] = catalog.tools.values()
    lenient: Set[str] = set()
    if search:
        from .search import CALL_TOOL, SearchTools

        tools = SearchTools(catalog, options).tools.values()
        lenient = {CALL_TOOL}
    elif identity is not None:
        with ThreadPoolExecutor() as threads:  # the caller's own thread may run an event loop already
            tools = threads.submit(asyncio.run, catalog.offered(tools, identity)).result()
    functions = []
    for tool in tools:
        is_strict = strict and tool.module_id not in lenient
        functions.append(openai_function(tool, strict=is_strict, embed_annotations=embed_annotations))
    return functions


# ---- Calls: one running tool call: progress, questions, cancellation; event loop only ----


async def report_progress(
    context: Any, progress: float, total: float | None = None, message: str | None = None
) -> None:
    """Tell the client how far a running module is: `await report_progress(context, 50, total=100)`.

    A `progress` that is not finite, or no higher than the last one, is not sent (MCP, "Progress"), and neither is a
    `total` that is not finite. Does nothing when the module was not called through MCP (`context` may be None) or the
    client asked for no progress. Source: FR-EXT-001."""
    send = _from_context(context, MCP_PROGRESS_KEY)
    if send is not None:
        await send(progress, total, message)


async def elicit(
    context: Any, message: str, requested_schema: JSONSchema | None = None, *, key: str | None = None
) -> JSONObject | None:
    """Ask the user who made this call, and wait: `await elicit(context, "Which one?", {"type": "object", ...})`.

    Returns what the user filled in, a dict that `requested_schema` accepts (without a schema the question is a bare
    confirmation, and its answer `{}`). Returns None when the user declined, cancelled, filled in something else or said
    nothing for ten minutes, when the client cannot ask, and when the module was not called through MCP (`context` may
    be None). `key` names the question on the wire (from 2026-07-28).

    Raises ValueError, before anything is sent, for a schema that is not an object with properties of simple types
    without patterns. The module's own timeout goes on meanwhile: once it is over, or
    the call is cancelled, ExecutionCancelledError. Source: FR-EXT-002; MCP, "Elicitation"."""
    ask = _from_context(context, MCP_ELICIT_KEY)
    if ask is None:
        return None
    token = context.cancel_token or CancelToken()
    token.check()
    answer: JSONObject | None = await ask(message, requested_schema, key)
    token.check()  # or a module that has to end meanwhile, as its time is over, would act on the answer
    return answer


def _from_context(context: object, key: str) -> Any:
    """What the server of a call has put into its context under `key`; None where no server has."""
    data = getattr(context, "data", None)
    return data.get(key) if isinstance(data, Mapping) else None


MODERN = "2026-07-28"  # from here on a server sends no requests: it answers `input_required`
TASKS_EXTENSION = "io.modelcontextprotocol/tasks"
PARKED_SECONDS = 600.0  # how long a user may think, and how long the result of a parked call is kept for its retry
_CONFIRMED_SECONDS = 300.0  # the same where nothing is kept, so that an answer could be sent again
# How many calls may wait for their users' answers, and how large their arguments may be together, as JSON; in memory,
# these can be ninety times as large. One more is refused.
_WAITING_MAX = 1_000
_WAITING_BYTES_MAX = 2 * 2**20
_PARKED_BYTES_MAX = 64 * 2**10  # of the result of a call that ends before its client's retry
_TOO_MANY = "Too many calls, or too large ones, wait for their users' answers"


def caller_of(scope: Mapping[str, Any]) -> Identity | None:
    """The user whom ASGI middleware has authenticated for a request; None for an anonymous one."""
    user = scope.get("user")
    if not getattr(user, "is_authenticated", False):
        return None
    roles = tuple(getattr(scope.get("auth"), "scopes", None) or ())
    # The SDK's bearer user is called by its client, which may act for many users: the token's subject is the user.
    name: Any = getattr(getattr(user, "access_token", None), "subject", None)
    for attribute in ("identity", "display_name"):
        with suppress(NotImplementedError):  # Starlette's own users have no `identity`
            name = name or getattr(user, attribute, None)
    return Identity(str(name or user), roles=roles)


def caller_in(ctx: RequestContext) -> Identity | None:
    """Who makes an MCP request; None for an anonymous caller, and on stdio."""
    return caller_of(getattr(ctx.request, "scope", {}))


def protocol_error(code: int, message: str, data: Any = None) -> Exception:
    """What the SDK answers with a JSON-RPC error."""
    from mcp.shared.exceptions import MCPError

    return MCPError(code, message, data)


def json_bytes(value: Any) -> int:
    """How many bytes plain JSON takes."""
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def call_later(seconds: float, callback: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
    """A timer in no context: it would keep its context until it rings, also one that is cancelled, and with it the call
    that it was made in."""
    return asyncio.get_running_loop().call_later(seconds, callback, *arguments, context=contextvars.Context())


def _form(requested_schema: JSONSchema | None) -> JSONSchema:
    """The schema that a client is sent with a question: self-contained, an object of fields of a simple type each.

    ValueError for any other, and for a pattern: Python's `re` can take days to hold an answer against one."""
    try:
        form = _object_schema(_plain(requested_schema or {}))
    except (ValueError, KeyError) as error:
        raise ValueError(f"A question's schema cannot be sent: {error}") from None
    if branches(form, [*_IN_PLACE, "patternProperties"]):
        raise ValueError("A question's schema says no more than which properties there are")
    for name, field in form["properties"].items():
        is_choice = types_of(field) == ["array"] and {"enum", "anyOf"} & field["items"].keys()
        is_simple = len(types_of(field)) == 1 and types_of(field)[0] in ("string", "number", "integer", "boolean")
        if any("pattern" in part for part in subschemas(field)) or not (is_choice or is_simple):
            raise ValueError(f"A question's field is a simple type without a pattern, or a list of choices: {name}")
    return form


def _content_of(answer: Any, form: JSONSchema) -> JSONObject | None:
    """What a user has filled in; None for one who declined or cancelled.

    Some exception for what is no answer to a question, or one that the form does not accept."""
    if answer.action != "accept":
        return None
    content: JSONObject = answer.content or {}
    for name, field in form["properties"].items():
        choices = field.get("items", {}).get("enum") or field.get("items", {}).get("anyOf") or ()
        # Jsonschema would look for each of a million in all the choices, and every other client wait.
        if isinstance(content.get(name), list) and len(content[name]) > len(choices):
            raise ValueError("More was chosen than there is")
    Draft202012Validator(form).validate(content)
    return content


@dataclasses.dataclass
class _Question:
    """What a call asks its user, until it is answered or given up."""

    request: JSONObject  # as a client of 2026-07-28 is sent it
    answer: asyncio.Future[Any]


@dataclasses.dataclass(frozen=True)
class CallEnd:
    """What is told of a call that has ended. `outcome` is "ok" or the code of its error."""

    tool: str
    caller: Identity | None
    outcome: str
    seconds: float
    trace_id: str


def _trace_sent(ctx: RequestContext) -> dict[str, str]:
    """The client's span, where it sent one (SEP-414)."""
    meta: Mapping[str, Any] = ctx.meta or {}
    texts = {key: meta.get(key) for key in ("traceparent", "tracestate")}
    return {key: text for key, text in texts.items() if isinstance(text, str) and len(text) <= 512}


@dataclasses.dataclass(eq=False)
class Call:
    """One running tool call, and the way back to the user who made it.

    It may ask several questions at once, each of them under a key that it uses for no other. Its `outcome` is its
    result, or the JSON-RPC error that it is answered with. `report()` and `elicit()`, which modules find in their
    context, may be called from any thread and loop: a sync module may run an async one in a loop of its own. Everything
    else belongs to the server's event loop."""

    tool: Tool
    arguments: JSONObject
    caller: Identity | None
    router: ExecutionRouter
    structured: bool | None = None  # whether its result has structured content; None: where its tool promises it

    def __post_init__(self) -> None:
        self.label = label_of(self.tool.module_id, self.caller)
        self.loop = asyncio.get_running_loop()
        self.approver = self.router.approver
        self.token = CancelToken()
        self.running: asyncio.Task[None] | None = None
        self.outcome: JSONObject | Exception | None = None
        self.written: bytes | None = None  # what its module gave, as JSON
        self.modules: dict[int, Any] = {}  # that have taken part, by identity: by id, one may replace another
        self.task: Task | None = None  # where it may go on without a request
        self.questions: dict[str, _Question] = {}  # that are open, by their keys on the wire
        self.is_refused = False  # whether it was ended as too many wait
        self.status = ""  # what was last reported, as a task tells it
        # The request that it answers next, and what its client can.
        self.session: Any = None
        self.request_id: Any = None
        self.has_progress_token = False
        self.trace: dict[str, str] = {}  # the client's span, where it sent one (SEP-414)
        self.parks = False  # whether questions answer the request, and the call waits for the client's retry
        self.knows_tasks = False
        self.has_forms = False
        self.can_ask = False
        self.could_ask = False
        self.confirms = False
        self.confirmation: Any = None
        self.is_parked = False
        self._keys = Counter[str]()  # of all questions that it has asked
        self._progress = -math.inf  # the last number that was sent
        self._unsent: Future[None] | None = None  # the last report from another loop
        self._turn = asyncio.Event()  # set when it may have something to answer the request with

    # For the request that it answers.

    def attach(self, ctx: RequestContext) -> None:
        """Let `ctx` be the request that the call answers next: the one that began it, or a retry."""
        options = self.router.options
        self.session = ctx.session
        self.request_id = ctx.request_id
        # No more of its `_meta`, which may be as large as a request and would be kept while the call waits.
        meta: Mapping[str, Any] = ctx.meta or {}
        self.has_progress_token = "progress_token" in meta
        self.trace = _trace_sent(ctx)
        # A server without sessions may be one of many: the answer could reach another one than the one that asked.
        self.parks = ctx.protocol_version >= MODERN and not options.stateless
        capabilities = ctx.session.client_capabilities
        self.knows_tasks = self.parks and TASKS_EXTENSION in (getattr(capabilities, "extensions", None) or {})
        forms = getattr(capabilities, "elicitation", None)
        self.has_forms = bool(forms and (forms.form or not forms.url))  # `{}` means forms (MCP 2025-11-25)
        self.can_ask = self.has_forms and (self.parks or ctx.session.can_send_request)
        self.could_ask = self.could_ask or self.can_ask
        self.confirms = ctx.protocol_version >= MODERN and options.state_key is not None

    def detach(self) -> None:
        """Go on without a request: what is sent to one after its answer is an error."""
        self.session = None
        self._turn.set()

    @property
    def is_working(self) -> bool:
        """Whether it has nothing to answer a request with: no outcome and, from 2026-07-28 on, no question."""
        return self.outcome is None and not (self.parks and self.questions)

    async def turn(self) -> None:
        """Wait until it may have stopped working."""
        self._turn.clear()
        await self._turn.wait()

    def answer(self, responses: Mapping[str, Any]) -> None:
        """Pass on what the client has answered, by the keys of the questions. Others than open ones are let pass."""
        for key in self.questions.keys() & responses.keys():
            answer = self.questions.pop(key).answer
            if not answer.done():  # it is when its time is over
                answer.set_result(responses[key])

    def cancel(self) -> None:
        """End the call: its CancelToken tells code that looks at it, and its coroutines are cancelled."""
        self.token.cancel()
        if self.running is not None:
            self.running.cancel()

    def end(self, outcome: JSONObject | Exception) -> None:
        """Let the request be answered; nothing more is reported or asked. Tasks that the module has left running hold
        on to the call, so it lets go of what is large: its arguments, and what its user is asked and has answered."""
        self.outcome = outcome
        self.running = None
        self.arguments = {}
        self.modules.clear()
        self.written = None
        self.session = None
        self.can_ask = False
        self.could_ask = True  # for what is left of it, so that it is not let through
        for question in self.questions.values():
            question.answer.cancel()
        self.questions.clear()
        if self.task is not None:
            self.task.ended()
            self.task = None  # whatever the module has left running keeps the call, and would keep its result
        self._turn.set()

    def take_outcome(self) -> JSONObject:
        """The result of a call that has ended, which is not kept. Raises the JSON-RPC error that it ended with."""
        outcome = self.outcome
        self.outcome = None
        if isinstance(outcome, Exception):
            raise outcome
        return cast(JSONObject, outcome)

    # For the steps that run its modules (`execution.Call`).

    def owns(self, context: Context[Any]) -> bool:
        return context.data.get(CALL_KEY) is self and len(context.call_chain) == 1

    def record(self, module: Any) -> None:
        """Note that a module takes part in this call, also where another module calls it.

        Whose secrets an error may quote is known by that. Exceptions do not tell: a module may catch the one that
        another raised, and later raise its own from what it remembers."""
        self.modules[id(module)] = module

    def function(self, module_id: str, module: Any) -> Function | None:
        tool = self.tool if module_id == self.tool.module_id else self.router.catalog.find(module_id)
        return tool.function if tool is not None and tool.module is module else function_of(module)

    def begin(self) -> bool:
        return self.task is not None and self.task.begin()

    def write(self, output: Any) -> JSONObject:
        written = self.tool.output.write(output, self.tool.redacts)
        self.written = to_json(written)
        return written

    def is_secret(self) -> bool:
        modules = [self.tool.module, *self.modules.values()]
        return any(has_marks(each, "input") or has_marks(each, "output") for each in modules)

    # For approval (`approval.Call`).

    def subject(self, module_id: str) -> Tool:
        """The module of that id, listed or not."""
        if module_id == self.tool.module_id:
            return self.tool
        registry = self.router.options.registry
        descriptor = cast(ModuleDescriptor, registry.get_definition(module_id))
        return Tool(descriptor, registry.get(module_id), self.router.options)

    def content_of(self, answer: Any, schema: JSONSchema) -> JSONObject | None:
        try:
            return _content_of(answer, schema)
        except Exception as error:  # the client's fault or its connection's: the call goes on without an answer
            logger.warning("Question of %s was not answered: %s", self.label, type(error).__name__)
        return None

    # For modules.

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Send the client a progress notification, as `report_progress()` says."""
        number = float(progress)
        limit = None if total is None or not math.isfinite(float(total)) else float(total)  # JSON has no infinity
        if asyncio.get_running_loop() is self.loop:
            if self.task is not None and math.isfinite(number):
                share = f"{number:.15g}" if limit is None else f"{number:.15g}/{limit:.15g}"
                self.status = f"{share} {text_of(message or '')}".strip()
                self.task.touch()
            if self.session is not None and self._progress < number < math.inf:
                self._progress = number
                await self.session.report_progress(number, limit, message and text_of(message))
        elif self._unsent is None or self._unsent.done():
            self._unsent = asyncio.run_coroutine_threadsafe(self.report(number, limit, message), self.loop)
            # So that reports arrive in order, and before the result; while one is still to be sent, others are dropped.
            # After a second the module goes on: the server's loop may be standing still, in an async module that waits
            # for a synchronous `executor.call()`.
            await asyncio.wait({asyncio.wrap_future(self._unsent)}, timeout=1)

    async def report_chunk(self, text: str) -> None:
        """Send a chunk of a stream, as the next number of progress (FR-STREAM-001)."""
        await self.report(max(self._progress, 0) + 1, None, text)

    async def elicit(
        self, message: str, requested_schema: JSONSchema | None = None, key: str | None = None
    ) -> JSONObject | None:
        """Ask the user who made the call, as `elicit()` says."""
        if asyncio.get_running_loop() is not self.loop:
            work = self.elicit(message, requested_schema, key)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
        form = _form(requested_schema)
        message = text_of(message)
        if not self.can_ask:
            return None
        if not self.router.may_wait(self):
            self.is_refused = True
            self.cancel()
            return None
        answer: asyncio.Future[Any]
        if self.parks:
            answer = self.loop.create_future()
        else:
            answer = self.loop.create_task(self.session.elicit_form(message, form, self.request_id))
        answer.add_done_callback(silence)
        key = key or "input"
        self._keys[key] += 1
        if self._keys[key] > 1:  # a client may take a key for the question that it has answered
            key = f"{key}-{self._keys[key]}"
        params = {"mode": "form", "message": message, "requestedSchema": form}
        self.questions[key] = _Question({"method": "elicitation/create", "params": params}, answer)
        if self.task is not None:
            self.task.touch()
        self._turn.set()
        timer = call_later(PARKED_SECONDS, answer.cancel)
        try:
            await asyncio.wait({answer})
        finally:
            timer.cancel()
            answer.cancel()
            self.questions.pop(key, None)
        if answer.cancelled() or answer.exception() is not None:
            logger.warning("Question of %s was not answered", self.label)
            return None
        return self.content_of(answer.result(), form)


# ---- Router: a `tools/call` to the Executor and back, also while its user is asked; event loop only ----


def _trace_parent(trace: Mapping[str, str]) -> TraceParent | None:
    """The span that a call belongs to: OpenTelemetry's, such as the SDK's own, which is one of the client's trace; or,
    where nobody collects any, the client's."""
    from opentelemetry.trace import get_current_span

    span = get_current_span().get_span_context()
    if span.is_valid:
        trace = {**trace, "traceparent": f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"}
    return TraceContext.extract(trace)


def _merge(base: JSONObject, chunk: JSONObject) -> None:
    """Merge a streamed chunk as apcore's Executor does: objects by their keys, anything else replaced."""
    for key, value in chunk.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _name_of(caller: Identity | None) -> str | None:
    """Who a caller is, whatever roles a request gives him."""
    return None if caller is None else caller.id


def _log_end(end: CallEnd) -> None:
    """The line of the log for a call that has ended. What its caller wrote fits between the quotes of a JSON text."""
    texts = {"tool": end.tool, "caller": end.caller.id if end.caller else "", "outcome": end.outcome}
    quoted = {key: one_line(json.dumps(text, ensure_ascii=False)[1:-1]) for key, text in texts.items()}
    attributes = {**quoted, "duration_ms": end.seconds * 1000, "trace_id": end.trace_id}
    by = f" (caller: {quoted['caller']})" if end.caller else ""
    line = "Tool call ended: %(tool)s%(by)s, %(duration_ms).1f ms, trace %(trace_id)s: %(outcome)s"
    access_logger.info(line, {**attributes, "by": by}, extra=attributes)


_SERVED: weakref.WeakKeyDictionary[ExecutionStrategy, tuple[int, ExitStack]] = weakref.WeakKeyDictionary()
_SERVED_LOCK = threading.Lock()


@contextmanager
def installation(executor: Executor) -> Iterator[None]:
    """While any server or call uses an Executor, it has our steps and, where it has none, our approval handler."""
    strategy = executor.current_strategy
    with _SERVED_LOCK:
        count, stack = _SERVED.get(strategy, (0, ExitStack()))
        if not count:
            stack.enter_context(steps_in_place(strategy, approvals.call_of, marks_of))
            stack.enter_context(approvals.handler_in_place(strategy))
            stack.enter_context(_values_hidden())
        _SERVED[strategy] = count + 1, stack
    try:
        yield
    finally:
        with _SERVED_LOCK:
            count, stack = _SERVED.pop(strategy)
            if count > 1:
                _SERVED[strategy] = count - 1, stack
            else:
                stack.close()


class ExecutionRouter:
    """Sends a `tools/call` through apcore's Executor and brings back a tool result, whatever happens on the way.

    It raises nothing but cancellation and JSON-RPC errors. Those are for a retry whose state resumes no call, for a
    call that needs an answer which its client cannot give, and for one more than may wait (FR-EXEC-007).

    From 2026-07-28 on, a call that asks its user is parked from that answer until its client's retry, for ten minutes
    at most, under a state that is good for one retry of the caller who began it, and that the SDK's
    `RequestStateBoundary` seals and binds to the tool and its arguments. So its module never runs twice. On a server
    without sessions that has a key, the state says no more than that the user was asked for approval; a call begins
    with the retry then, on whichever server, and nothing is kept.

    At most 1,000 calls wait for their users, with 2 MiB of arguments in all, those of handshake clients included."""

    def __init__(self, catalog: Catalog, options: Options) -> None:
        self.catalog = catalog
        self.options = options
        self.approver = approvals.approver_of(options.approval)
        self.search: SearchTools | None = None
        if options.search:
            from .search import SearchTools

            self.search = SearchTools(catalog, options)
        self.tasks: Tasks | None = None  # where calls go on without a request
        self.running = set[Call]()
        self.listeners: list[Callable[[CallEnd], None]] = (
            [_log_end] if options.access_log or access_logger.level else []
        )
        self._parked: dict[str, tuple[Call, asyncio.TimerHandle]] = {}

    async def handle_call(self, ctx: RequestContext, params: Any) -> Any:
        """Answer a `tools/call`: one that begins, or a retry with the answers to what an earlier one asked."""
        caller = caller_in(ctx)
        responses = params.input_responses or {}
        state = params.request_state
        is_confirmed = state == QUESTION_KEY and self.options.state_key is not None and ctx.protocol_version >= MODERN
        if state is not None and not is_confirmed:
            return await self._resume(ctx, caller, state, responses)
        name = params.name
        arguments = integral(params.arguments or {})
        if self.search is not None and name in self.search.tools:
            from .search import target_of

            answer = await self.find(name, arguments, caller, self.names_for(ctx))
            if answer is not None:
                return answer
            name, arguments = target_of(arguments)
        tool = self.catalog.find(name)
        if tool is None:
            return self.not_found(name, caller)
        call = Call(tool, arguments, caller, self)
        call.attach(ctx)
        if is_confirmed:
            call.confirmation = responses.get(QUESTION_KEY)
            call.could_ask = True  # whatever its client declares now
        return await self.run(call)

    def names_for(self, ctx: RequestContext) -> str:
        """The option `tool_names` for the client of a request: "module-id" or "portable"."""
        names = self.options.tool_names
        client = ctx.session.client_params
        if names == "auto" and client is not None and _CLIENTS_WITHOUT_DOTS.match(client.client_info.name):
            return "portable"
        return "module-id" if names == "auto" else names

    async def find(self, name: str, arguments: JSONObject, caller: Identity | None, names: str) -> JSONObject | None:
        """The result of a call of one of the two tools of a search; None for a `call_tool` that is to call another."""
        started = time.perf_counter()
        result = await cast(Any, self.search).answer(name, arguments, caller, lambda tool: tool.name_as(names))
        if result is not None:
            self._tell_end(name, caller, result, started, secrets.token_hex(16))
        return cast("JSONObject | None", result)

    def not_found(self, name: str, caller: Identity | None) -> JSONObject:
        """The result of a call of a tool that there is not."""
        shown = one_line(name[:200])
        text = f"Module not found: {shown}"
        trace_id = secrets.token_hex(16)
        logger.debug("Tool call: %s", label_of(shown, caller))
        line = "Tool call error: %s - ModuleNotFoundError: %s (trace %s)"
        logger.error(line, label_of(shown, caller), text, trace_id, extra={"trace_id": trace_id})
        result = failure(text, "MODULE_NOT_FOUND")
        self._tell_end(name[:200], caller, result, time.perf_counter(), trace_id)
        return result

    async def call(self, tool: Tool, arguments: JSONObject, caller: Identity | None) -> JSONObject:
        """The result of a call whose user cannot be asked, with its output as structured content."""
        return await self.run(Call(tool, arguments, caller, self, structured=True))

    async def run(self, call: Call) -> JSONObject:
        """Begin a call. Returns its result, or the question that it asks first."""
        context: Context[Any] = Context.create(
            identity=call.caller,
            trace_parent=_trace_parent(call.trace),
            cancel_token=call.token,
            data={CALL_KEY: call, MCP_PROGRESS_KEY: call.report, MCP_ELICIT_KEY: call.elicit},
        )
        if self.tasks is not None and call.knows_tasks:
            self.tasks.prepare(call)
        call.running = asyncio.create_task(self._execute(call, context))
        return await self._reply(call)

    def may_wait(self, call: Call) -> bool:
        """Whether this call may wait for its user, beside those that do."""
        waiting = {other for other in self.running if other.questions}
        waiting.update(parked for parked, _ in self._parked.values())
        waiting.discard(call)
        size = sum(json_bytes(other.arguments) for other in waiting) + json_bytes(call.arguments)
        return len(waiting) < _WAITING_MAX and size <= _WAITING_BYTES_MAX

    async def _resume(
        self, ctx: RequestContext, caller: Identity | None, state: str, responses: Mapping[str, Any]
    ) -> JSONObject:
        """Go on with a parked call. Returns its result, or what it asks next, beside what was not answered."""
        call, timer = self._parked.get(state, (None, None))
        if call is None or timer is None or _name_of(call.caller) != _name_of(caller):
            raise protocol_error(-32602, "Invalid or expired requestState", {"reason": "invalid_request_state"})
        del self._parked[state]
        timer.cancel()
        call.is_parked = False
        if call.outcome is None:
            call.attach(ctx)
            call.answer(responses)
        return await self._reply(call)

    async def _reply(self, call: Call) -> JSONObject:
        """Wait for a call's result, the questions that it asks first, or until it is a task. To stop waiting for it is
        to cancel it."""
        try:
            if call.task is not None:
                handle = await call.task.follow()
                if handle is not None:
                    return handle
            while call.is_working:
                await call.turn()
        except asyncio.CancelledError:
            call.cancel()
            raise
        if call.outcome is not None:
            return call.take_outcome()
        state = secrets.token_urlsafe(32)
        self._parked[state] = (call, call_later(PARKED_SECONDS, self._forget, state))
        call.is_parked = True
        call.detach()
        questions = {key: question.request for key, question in call.questions.items()}
        return {"resultType": "input_required", "requestState": state, "inputRequests": questions}

    def _forget(self, state: str) -> None:
        """Keep a parked call no longer, nor what it has ended with."""
        self._parked.pop(state)[0].outcome = None

    async def _execute(self, call: Call, context: Context[Any]) -> None:
        """Run the module to its end. The outcome is a tool result, also for whatever it raises, or a JSON-RPC error."""
        started = time.perf_counter()
        logger.debug("Tool call: %s", call.label)
        self.running.add(call)
        CURRENT_CALL.set(call)
        outcome: JSONObject | Exception | None = None
        try:
            outcome = await self._run_module(call, context)
        except BaseException as error:  # a module may raise anything
            outcome = self._outcome_of(call, error, context.trace_id)
        finally:
            outcome = outcome or protocol_error(-32603, UNEXPECTED)  # whatever happens, the call ends
            self.running.discard(call)
            if call.is_parked and isinstance(outcome, dict) and json_bytes(outcome) > _PARKED_BYTES_MAX:
                outcome = failure("The tool has run, and its result is too large to be kept", "RESULT_NOT_KEPT")
            call.end(outcome)
        self._tell_end(call.tool.module_id, call.caller, outcome, started, context.trace_id)

    async def _run_module(self, call: Call, context: Context[Any]) -> JSONObject:
        """Check the arguments where apcore would not, and run the module: as a stream where its client follows it."""
        tool = call.tool
        needs_check = self.options.validate_inputs or tool.unknown(call.arguments)
        # A caller whom the ACL refuses learns that from the Executor, and nothing about the arguments.
        if needs_check and await self.catalog.offered([tool], call.caller):
            tool.check(call.arguments)
        results = _ResultMapper(self.options, tool, call.label, call.structured)
        if tool.about.annotations.streaming and call.has_progress_token:
            output = await self._stream(call, context, results)
        else:
            output = await self.options.executor.call_async(tool.module_id, call.arguments, context)
        if call.written is None:  # middleware has answered, or a step of the user's own has run the module
            output = call.write(output)
        return results.to_result(output, call.written)

    async def _stream(self, call: Call, context: Context[Any], results: _ResultMapper) -> JSONObject:
        """Send each chunk as a progress notification (FR-STREAM-001). Returns them put together."""
        output: JSONObject = {}
        stream: Any = self.options.executor.stream(call.tool.module_id, call.arguments, context)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                _merge(output, chunk)
                text = results.to_text(chunk)
                results.check_size(len(text))
                await call.report_chunk(text)
        call.written = None  # by a step that knew of no middleware's change, nor of a fault that apcore passes over
        return output

    def _outcome_of(self, call: Call, error: BaseException, trace_id: str) -> JSONObject | Exception:
        """What a call is answered with that has raised `error`."""
        if call.is_refused:
            # Agents of the handshake versions show their model a tool's error, but may stop at one of the protocol.
            return protocol_error(-32000, _TOO_MANY) if call.parks else failure(_TOO_MANY, "TOO_MANY_QUESTIONS")
        if call.running is not None and call.running.cancelling():
            return failure(SENTENCES["EXECUTION_CANCELLED"], "EXECUTION_CANCELLED")
        if isinstance(error, errors.ApprovalPendingError) and "requestedSchema" in (error.result.metadata or {}):
            question = {"method": "elicitation/create", "params": {"mode": "form", **error.result.metadata}}
            asked = {QUESTION_KEY: question}
            return {"resultType": "input_required", "requestState": QUESTION_KEY, "inputRequests": asked}
        modules = [*call.modules.values()]
        cause: BaseException | None = error
        while cause is not None:  # what another Executor has run is known by apcore's errors alone
            details = getattr(cause, "details", None)
            chain = details.get("call_chain") if isinstance(details, dict) else None
            modules += map(self.options.registry.get, chain if isinstance(chain, list) else ())
            cause = cause.__context__
        mapper = _ErrorMapper(call.label, call.tool, call.arguments, modules, trace_id, self.options.mask_errors)
        result = mapper.to_result(error)
        denied = error.result if isinstance(error, errors.ApprovalDeniedError) else None
        if denied is not None and denied.reason == NOBODY and (denied.metadata or {}).get("lacks_capability"):
            data: Any = {"requiredCapabilities": {"elicitation": {"form": {}}}}
            return protocol_error(-32021, "Client did not declare form elicitation", data)
        return result

    def _tell_end(
        self, tool: str, caller: Identity | None, outcome: JSONObject | Exception, started: float, trace_id: str
    ) -> None:
        """Tell who wants to know of a call that has ended, unless it is to go on later."""
        if not self.listeners or (isinstance(outcome, dict) and "inputRequests" in outcome):
            return
        code = "ok"
        if isinstance(outcome, Exception):
            code = str(cast(Any, outcome).error.code)  # of JSON-RPC
        elif outcome["isError"]:
            code = outcome["_meta"]["apcore-mcp/error"]["error_type"]
        for listener in self.listeners:
            listener(CallEnd(tool, caller, code, time.perf_counter() - started, trace_id))


# ---- Server: the MCP handlers, in every protocol version the SDK speaks; event loop only ----

# What 2026-07-28 requires of every list: it is stale at once, so a client that keeps it has to listen for changes.
_FRESH = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
_COALESCE_SECONDS = 0.02  # changes of the tool list this close together are one notification
_NOTIFY_SECONDS = 1.0  # how long the others wait for a client that does not read
_APPS_EXTENSION = "io.modelcontextprotocol/ui"


class _Activity:
    """Counts requests that were read and are neither answered nor cancelled; one may count where it is handled, too."""

    def __init__(self) -> None:
        self._count = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def begin(self) -> None:
        """Count one more request, until `end()`."""
        self._count += 1
        self.idle.clear()

    def end(self) -> None:
        self._count -= 1
        if self._count == 0:
            self.idle.set()


def _principal(ctx: RequestContext) -> str:
    """The caller of a request, to whom the state of a question is bound."""
    from mcp.server.request_state import authenticated_principal

    # The SDK's knows the token's issuer, too.
    return json.dumps([authenticated_principal(ctx), _name_of(caller_in(ctx))])


def _method_handler(method: MethodBinding) -> Any:
    """The handler of an extension's method, in the versions of the protocol that have it."""

    async def handle(ctx: RequestContext, params: Any) -> Any:
        if method.protocol_versions is not None and ctx.protocol_version not in method.protocol_versions:
            raise protocol_error(-32601, "Method not found", ctx.method)
        return await method.handler(ctx, params)

    return handle


class Bridge:
    """One registry served to any number of clients: the MCP handlers, and what lives as long as the server does.

    It lives from its construction to `finish()`. Once it has a `deadline`, the transports refuse new requests;
    `activity` says when the running ones have been answered. Clients hear of changed lists: those of the handshake
    versions on their connection, those of 2026-07-28 on the streams that they listen on."""

    def __init__(self, options: Options) -> None:
        from mcp.server.lowlevel import Server
        from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
        from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler

        self.options = options
        self.deadline = 0.0  # for whatever still runs, by the loop's clock; 0 until the server is told to end
        self.is_unprotected = options.executor.governance_state().unprotected_control_surface  # without our handler
        self.catalog = Catalog(options)
        self.router = ExecutionRouter(self.catalog, options)
        self.activity = _Activity()
        self.busy_threads = busy_threads
        self._bus = InMemorySubscriptionBus()
        self._listener = ListenHandler(self._bus)
        self._connections = weakref.WeakSet[Any]()  # of handshake clients that can be notified
        self._lists_changed = asyncio.Event()
        self.endless = weakref.WeakSet[Any]()  # tasks and cancel scopes that would never end by themselves
        self.entrance = ExitStack()  # closed as soon as the server is told to end: where clients connect
        self.streams = 0  # that SSE clients have open
        self.open_sessions: Mapping[str, Any] = {}  # of handshake clients: the SDK's transports, by session id
        self.sessions = AsyncExitStack()  # closed with the server
        self.server: Any = Server(
            options.name,
            version=options.version or __version__,
            instructions=options.instructions,
            on_list_tools=self._list_tools,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_resource_templates,
            on_read_resource=self._read_resource,
            on_subscriptions_listen=self._listen,
        )
        # Without it, the SDK runs tools/list for every 2026-07-28 HTTP call to check its headers.
        self.server.get_tool_input_schema = self._input_schema_of
        key = options.state_key or secrets.token_bytes(32)
        security = RequestStateSecurity(
            keys=[key.encode(errors="surrogatepass") if isinstance(key, str) else key],
            ttl=_CONFIRMED_SECONDS if options.state_key else PARKED_SECONDS,
            bind_principal=_principal,
        )
        self.server.middleware += [
            self._count_request,
            self._hide_unexpected_errors,
            self._declare_capabilities,
            self._fill_in_tools,
            RequestStateBoundary(security, default_audience=options.name),
        ]
        self._extend()
        loop = asyncio.get_running_loop()
        self.catalog.follow(lambda: loop.call_soon_threadsafe(self._lists_changed.set))
        self.sessions.callback(self.catalog.close)
        self.sessions.enter_context(installation(options.executor))
        self.endless.add(loop.create_task(self._notify_of_changes()))

    def _extend(self) -> None:
        """Take in the SDK's extensions: the user's own, and that of tasks. Of each its methods, what it does to calls,
        and its settings, which clients are told."""
        from mcp.server.extension import compose_tool_call_handler
        from mcp_types import CallToolRequestParams

        extensions = [*(self.options.mcp_extensions or ())]
        if not self.options.stateless and Path(__file__).with_name("tasks.py").exists():
            from .tasks import Tasks

            self.router.tasks = Tasks(self.options.task_after)
            extensions.append(self.router.tasks)
        for extension in extensions:
            if extension.tools() or extension.resources():
                raise ValueError(f"{extension.identifier} brings tools or resources: here they are made of modules")
            self.server.extensions[extension.identifier] = extension.settings()
            for method in extension.methods():
                self.server.add_request_handler(method.method, method.params_type, _method_handler(method))
        handler = compose_tool_call_handler(extensions, self.router.handle_call)
        self.server.add_request_handler("tools/call", CallToolRequestParams, handler)

    async def finish(self) -> None:
        """End the streams that clients listen on, wait for running requests (`shutdown_seconds` at most, NFR-REL-001),
        and end the rest."""
        from anyio import CancelScope, current_time

        self.deadline = self.deadline or current_time() + self.options.shutdown_seconds
        self.entrance.close()
        self._listener.close()
        async with self.sessions:
            with CancelScope(deadline=self.deadline):
                await self.activity.idle.wait()
                if self.router.tasks is not None:
                    await self.router.tasks.finish()
            for call in self.router.running:
                call.cancel()
            with CancelScope(deadline=self.deadline + 0.5):  # so that the clients of cancelled calls are answered
                await self.activity.idle.wait()
            for each in self.endless:
                each.cancel()
            # The SDK would cancel them all at once, and anyio then looks at all that are left again and again.
            for session in [*self.open_sessions.values()]:
                await session.terminate()
            for _ in range(100):  # a second at most; what has not ended by then is cancelled
                if not self.open_sessions:
                    break
                await asyncio.sleep(0.01)

    # Server middleware, outermost first; the SDK's own handling of a request is innermost.

    async def _count_request(self, ctx: RequestContext, call_next: CallNext) -> Any:
        """Let the end of the server wait for a request: over SSE its POST is answered at once."""
        if ctx.request_id is not None:
            self.activity.begin()
            # Not when this function returns: the answer is only handed over when the request's own task ends.
            cast(Any, asyncio.current_task()).add_done_callback(lambda _: self.activity.end())
        return await call_next(ctx)

    async def _hide_unexpected_errors(self, ctx: RequestContext, call_next: CallNext) -> Any:
        """Answer what a user's class or an ACL's condition raises without its text, which the SDK would send."""
        from mcp.shared.exceptions import MCPError

        try:
            return await call_next(ctx)
        except (MCPError, ValidationError):  # messages for the client
            raise
        except Exception:
            logger.exception("%s failed", ctx.method)
            raise protocol_error(-32603, UNEXPECTED) from None

    async def _declare_capabilities(self, ctx: RequestContext, call_next: CallNext) -> Any:
        """Tell a client which notifications it can get, and of MCP Apps as long as any tool has a page.

        The SDK's HTTP manager has no option for `listChanged`, and clients ignore notifications that they were told
        there are none of. In 2026-07-28 the SDK declares subscriptions to single resources; `_listen` honours none."""
        result: Any = await call_next(ctx)
        if ctx.method not in ("initialize", "server/discover"):
            return result
        capabilities = result["capabilities"]
        extensions: JSONObject = {**(capabilities.get("extensions") or {})}
        if any(tool.about.page for tool in self.catalog.tools.values()):
            extensions[_APPS_EXTENSION] = {}
        if ctx.method == "initialize":
            extensions.pop(TASKS_EXTENSION, None)  # which handshake clients cannot use
        capabilities.pop("extensions", None)
        if extensions:
            capabilities["extensions"] = extensions
        if ctx.method == "server/discover":
            capabilities["resources"]["subscribe"] = False
            return result
        # Private, as nothing public outlives the session of a single request.
        connection = ctx.session._connection  # pyright: ignore[reportPrivateUsage]
        can_notify = connection.has_standalone_channel
        if can_notify:
            self._connections.add(connection)
        for name in ("tools", "resources"):
            capabilities[name]["listChanged"] = can_notify
        return result

    async def _fill_in_tools(self, ctx: RequestContext, call_next: CallNext) -> Any:
        """Put the tools into the result of `tools/list`, behind the SDK's validation of results, which for 1,000 tools
        takes six times as long as everything else."""
        result: Any = await call_next(ctx)
        if ctx.method == "tools/list":
            names = self.router.names_for(ctx)
            search = self.router.search
            tools = await self._offered(ctx) if search is None else search.tools.values()
            result["tools"] = [tool.definition(names) for tool in tools]
        return result

    async def _list_tools(self, ctx: RequestContext, params: object) -> Any:
        return {"tools": [], **_FRESH}  # `_fill_in_tools` adds them

    def _input_schema_of(self, name: str) -> JSONSchema | None:
        tool = self.catalog.find(name)
        if self.router.search is not None and name in self.router.search.tools:
            tool = self.router.search.tools[name]
        return tool.input_schema if tool else None

    async def _list_resources(self, ctx: RequestContext, params: object) -> Any:
        tools = await self._offered(ctx)
        return {"resources": [description for tool in tools for description, _ in tool.resources], **_FRESH}

    async def _list_resource_templates(self, ctx: RequestContext, params: object) -> Any:
        return {"resourceTemplates": [], **_FRESH}

    async def _read_resource(self, ctx: RequestContext, params: Any) -> Any:
        for tool in await self._offered(ctx):
            for description, content in tool.resources:
                if description["uri"] == params.uri:
                    return {"contents": [content], **_FRESH}
        code = -32602 if ctx.protocol_version >= MODERN else -32002
        raise protocol_error(code, "Resource not found", {"uri": params.uri})

    async def _offered(self, ctx: RequestContext) -> list[Tool]:
        """The tools that the caller of a request may call."""
        return await self.catalog.offered(self.catalog.tools.values(), caller_in(ctx))

    async def _listen(self, ctx: RequestContext, params: Any) -> Any:
        """Open a stream of notifications (2026-07-28), of those that this server sends: changes of the lists."""
        # The SDK promises whatever is left in here.
        if "taskIds" in params.notifications.model_extra and self.router.tasks is not None:
            self.router.tasks.require(ctx)
        params.notifications.model_extra.clear()
        params.notifications.prompts_list_changed = None
        params.notifications.resource_subscriptions = None
        if self.deadline:  # `finish()` has closed the streams that there were: close this one as soon as it is open
            asyncio.get_running_loop().call_soon(self._listener.close)
        return await self._listener(ctx, params)

    async def _notify_of_changes(self) -> None:
        """Notify clients of every change of the lists, for as long as the server runs."""
        from mcp.server.subscriptions import ResourcesListChanged, ToolsListChanged

        while await self._lists_changed.wait():
            await asyncio.sleep(_COALESCE_SECONDS)
            self._lists_changed.clear()
            await self._bus.publish(ToolsListChanged())
            await self._bus.publish(ResourcesListChanged())
            await asyncio.gather(*map(self._notify, self._connections))

    async def _notify(self, connection: Any) -> None:
        """Notify one handshake client; one that does not read holds up the others for a second at most."""
        from anyio import move_on_after

        with move_on_after(_NOTIFY_SECONDS):
            await connection.send_tool_list_changed()
            await connection.send_resource_list_changed()


# ---- HTTP: the Starlette app and the guard before it ----

# A Host header, which is no more than a host and a port: the host of "a@b" would be b.
_HOST = re.compile(r"(\[[\w:.%]+\]|[\w.-]*)(:\d+)?", re.ASCII)
_SESSION_ID = re.compile(r"[!-~]{0,200}")  # the characters are MCP's; the SDK's own ids have 32 of them


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that `host` is, with or without brackets; None for a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    """Whether a server that listens on `host` can be reached from its own machine alone."""
    address = _address(host)
    return host.lower() == "localhost" if address is None else address.is_loopback


def _is_allowed(host: str, options: Options, is_page: bool) -> bool:
    """Whether a request may name `host`, a Host header in lower case.

    A program may name an IP address, `localhost`, the host that the server listens on, or what a pattern of
    `allowed_hosts` matches, where `*` is any text and `:*` any port or none. Without patterns, it may name anything
    where others than this machine can reach the server. A web page may name the first three, or a name that is spelt
    out: the owner of any other can make it resolve to this server while a page of it is open, and the browser takes
    both for one site (DNS rebinding). No address can be rebound."""
    parts = _HOST.fullmatch(host)
    if parts is None:
        return False
    name = parts[1]
    if name == "localhost" or _address(name):
        return True
    if not options.allowed_hosts and not is_page and not _is_loopback(options.host):
        return True
    for pattern in [f"{options.host}:*", *(options.allowed_hosts or ())]:
        named = name if pattern.endswith(":*") else host
        wanted = pattern.removesuffix(":*").lower()
        if named == wanted or (not is_page and fnmatchcase(named, wanted)):
            return True
    return False


class _Guard:
    """ASGI middleware: refuse requests whose host is not allowed, by their headers alone.

    A request with an Origin comes from a web page, and that must be of the very host and port that the request names;
    with `is_page`, all requests do, as browsers send no Origin with what a page loads from its own host. A POST must be
    JSON, which no form of a page can send."""

    def __init__(self, app: ASGIApp, options: Options, *, is_page: bool = False) -> None:
        self._app = app
        self._options = options
        self._is_page = is_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a WebSocket: no route is one
            await self._app(scope, receive, send)
            return
        answer = self._refusal(scope) or self._app
        # Without an event store, the SDK gives no response at all to a client that wants to resume a stream: it gets a
        # new one, as MCP allows.
        scope = {**scope, "headers": [each for each in scope["headers"] if each[0] != b"last-event-id"]}
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        from starlette.datastructures import Headers, QueryParams
        from starlette.responses import PlainTextResponse

        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        origins = headers.getlist("origin")
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        session_ids = [headers.get("mcp-session-id", ""), QueryParams(scope["query_string"]).get("session_id", "")]
        if not _is_allowed(host, self._options, self._is_page or bool(origins)):
            status, reason = 421, "Invalid Host header: to let it in, name it in allowed_hosts (--allowed-hosts)"
            reason += "; to let a web page in, without a wildcard, such as tools.example.com:*"
        elif not {origin.lower() for origin in origins} <= {f"http://{host}", f"https://{host}"}:
            status, reason = 403, "Invalid Origin header: a web page must come from the host that it names"
        elif scope["method"] == "POST" and media_type != "application/json":
            status, reason = 415, "Content-Type must be application/json"
        elif not all(map(_SESSION_ID.fullmatch, session_ids)):  # the SDK (2.3) logs them, line breaks included
            status, reason = 400, "Invalid session ID"
        else:
            return None
        origin = ", ".join(origins) or None
        logger.warning("HTTP request refused: %s (Host %.200r, Origin %.200r)", reason, headers.get("host"), origin)
        return PlainTextResponse(reason, status)


def _count_posts(app: ASGIApp, bridge: Bridge) -> ASGIApp:
    """ASGI middleware, where the body has been read: the end of the server waits for POSTs that it has taken, and then
    takes no more."""
    from starlette.responses import PlainTextResponse

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        answer = app
        if bridge.deadline and scope["type"] == "http":
            answer = PlainTextResponse("Server is shutting down", 503)
        is_awaited = scope.get("method") == "POST"  # a GET may be a stream without an end
        if is_awaited:
            bridge.activity.begin()
        try:
            await answer(scope, receive, send)
        finally:
            if is_awaited:
                bridge.activity.end()

    return count


def _own_sessions(app: ASGIApp) -> ASGIApp:
    """ASGI middleware behind the user's own: a session belongs to the caller who opened it, and to others it does not
    exist. The SDK sees to that for users of its own class, so every caller becomes one."""
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
    from mcp.server.auth.provider import AccessToken

    async def owned(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Exception):  # a caller that cannot be read owns nothing: each of its calls fails for that
            caller = caller_of(scope)
            if caller is not None:
                token = AccessToken(token="", client_id=caller.id, scopes=[])
                scope = {**scope, "user": AuthenticatedUser(token)}
        await app(scope, receive, send)

    return owned


def _answer_probes(app: ASGIApp, bridge: Bridge) -> ASGIApp:
    """ASGI middleware before everything else, as probes need no login and no name: whether the server is alive,
    `/health` (FR-HEALTH-001), and whether it can take on more, `/ready`."""
    from starlette.middleware.exceptions import ExceptionMiddleware
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route, Router

    options = bridge.options
    started = time.monotonic()

    async def health(request: Request) -> Response:
        count = len(bridge.catalog.tools)
        about = {"status": "ok", "module_count": count, "tools_count": count}
        uptime = time.monotonic() - started
        return JSONResponse({**about, "uptime_seconds": uptime, "version": options.version or __version__})

    async def ready(request: Request) -> Response:
        reason = "the server ends" if bridge.deadline else ""
        if len(bridge.open_sessions) >= options.max_sessions:
            reason = f"{options.max_sessions} sessions are open"
        if busy_threads() >= THREADS_MAX:
            reason = f"{THREADS_MAX} threads run modules"
        return PlainTextResponse(f"Not ready: {reason}", 503) if reason else PlainTextResponse("Ready")

    probes = [Route("/health", health), Route("/ready", ready)]
    return ExceptionMiddleware(Router(probes, default=app, redirect_slashes=False))  # 405 is raised


def _mcp_routes(bridge: Bridge, sessions: Any) -> list[BaseRoute]:
    """`/mcp`, or `/sse` and `/messages/`."""
    from anyio import CancelScope
    from mcp.server.sse import SseServerTransport
    from mcp.server.streamable_http_manager import StreamableHTTPASGIApp
    from starlette.routing import Mount, Route

    if bridge.options.transport != "sse":
        return [Route(path, StreamableHTTPASGIApp(sessions)) for path in ("/mcp", "/mcp/")]
    transport = SseServerTransport("/messages/")

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection: its stream is the answer to one GET."""
        async with transport.connect_sse(scope, receive, send) as streams:
            # The end of the server cancels the SDK's loop but not the stream, which still sends the last answers.
            with CancelScope() as connection:
                bridge.endless.add(connection)
                bridge.streams += 1
                try:
                    await bridge.server.run(*streams, bridge.server.create_initialization_options())
                finally:
                    bridge.streams -= 1

    # A Route would take these functions for ones that return a response, and a Mount alone would let WebSockets in.
    return [
        Route("/sse", Mount("", stream), methods=["GET"]),
        Route("/messages/", Mount("", transport.handle_post_message), methods=["POST"]),
    ]


async def _http_app(bridge: Bridge) -> Starlette:
    """The ASGI app of one bridge. By a request's headers, who may not come in is refused before its body is read."""
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
    from mcp.server.transport_security import DEFAULT_MAX_REQUEST_BODY_SIZE, RequestBodyLimitMiddleware
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Mount, Router

    options = bridge.options
    limits: dict[str, Any] = {}
    if not options.stateless:
        limits = {"session_idle_timeout": options.session_idle_seconds, "max_sessions": options.max_sessions}
    sessions = StreamableHTTPSessionManager(bridge.server, stateless=options.stateless, **limits)
    # Private, as nothing public tells of sessions. Without it, many sessions make the end take longer, and that is all.
    bridge.open_sessions = getattr(sessions, "_server_instances", {})
    routes = _mcp_routes(bridge, sessions)
    middleware = [
        Middleware(_answer_probes, bridge=bridge),
        Middleware(_Guard, options=options),
        *(options.middleware or ()),
        Middleware(RequestBodyLimitMiddleware, max_body_size=DEFAULT_MAX_REQUEST_BODY_SIZE),
        Middleware(_count_posts, bridge=bridge),
        Middleware(_own_sessions),
    ]
    if options.metrics_collector:
        from .metrics import Metrics

        metrics = Metrics(bridge)
        routes.append(metrics.route)
        middleware.insert(0, Middleware(metrics.count_refusals))
    if options.explorer:
        from .explorer import routes as explorer_routes

        explorer = _Guard(Router(explorer_routes(bridge)), options, is_page=True)
        routes.append(Mount(options.explorer_prefix, explorer))
    await bridge.sessions.enter_async_context(sessions.run())
    app = Starlette(routes=routes, middleware=middleware)
    # Starlette does it at the first request; here, middleware that cannot be made keeps the server from starting.
    app.middleware_stack = app.build_middleware_stack()
    return app


@asynccontextmanager
async def _serve_http(bridge: Bridge) -> AsyncIterator[asyncio.Task[None]]:
    """Serve HTTP on the options' host and port. Yields a task that only ends if the HTTP server does."""
    import uvicorn

    class Server(uvicorn.Server):
        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            """Leave the signals alone: uvicorn would take them over, and raise them again at its end."""
            yield

    host, port = bridge.options.host, bridge.options.port
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or answers wait 40 ms for a delayed ACK
    config = uvicorn.Config(await _http_app(bridge), lifespan="off", log_config=None, access_log=False)
    http = Server(config)
    serving = asyncio.create_task(http.serve([listener]))

    @bridge.entrance.callback
    def stop_listening() -> None:
        """Refuse connections, so that a load balancer goes elsewhere. Those that are open are still answered."""
        if http.started:
            for server in http.servers:
                server.close()

    try:
        yield serving
    finally:
        http.should_exit = True
        for connection in [*http.server_state.connections]:
            if getattr(getattr(connection, "cycle", None), "more_body", False):  # the rest of its body may never come
                connection.transport.abort()
        # Clients may read until the deadline. Then their connections are dropped, which ends what still writes to them.
        seconds_left = bridge.deadline - serving.get_loop().time()
        await asyncio.wait({serving}, timeout=max(0.2, seconds_left))
        for connection in [*http.server_state.connections]:
            connection.transport.abort()
        await asyncio.wait({serving}, timeout=2)


# ---- stdio: pipes, and who owns the standard streams ----

_WRITE_BUFFER_BYTES = 16 * 1024 * 1024  # of unread answers, before calls wait for the client: some send all calls first


@functools.cache
def take_standard_streams() -> tuple[int, int]:
    """Take stdin and stdout for the protocol, once and for good: two private file descriptors that nothing else reads
    or writes, for all servers that this process starts.

    From then on fd 0 is at its end and fd 1 is stderr, so that nothing that modules, C code or child processes print
    can reach the client. RuntimeError when the process was started without these streams."""
    if sys.__stdin__ is None or sys.__stdout__ is None:  # 0 and 1 may be files that were opened since
        raise RuntimeError("stdin or stdout cannot be opened: the process was started without")
    duplicates = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b", 0) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno() if sys.__stderr__ is None else 2, 1)
    with suppress(OSError):  # where it was a file, whose position is asked for when all is set
        sys.__stdout__.reconfigure(errors="backslashreplace")  # as stderr, which it is now
    sys.__stdout__.reconfigure(line_buffering=True)
    return duplicates


def _copy(source: Any, sink: Any) -> None:
    """Copy bytes until either end is closed, which a terminal reports as an error."""
    with suppress(OSError), source, sink:
        while data := source.read(65_536):
            sink.write(data)
            sink.flush()


@asynccontextmanager
async def _pipes() -> AsyncIterator[tuple[Any, Any]]:
    """stdin and stdout as files that the event loop can wait for: pipes and sockets are used as they are, and threads
    copy between sockets and whatever it cannot wait for, such as a terminal, a file or a pipe of Windows."""
    duplicates = [os.dup(fd) for fd in take_standard_streams()]
    source, sink = os.fdopen(duplicates[0], "rb", 0), os.fdopen(duplicates[1], "wb")
    statuses = [os.fstat(fd) for fd in duplicates]
    kinds = {stat.S_IFMT(status.st_mode) for status in statuses}
    # Where one socket serves both directions, asyncio would take arriving input for the reader's end being closed.
    if sys.platform != "win32" and kinds <= {stat.S_IFIFO, stat.S_IFSOCK} and not os.path.samestat(*statuses):
        yield source, sink
        return
    loop = asyncio.get_running_loop()
    incoming, filled = socket.socketpair()
    outgoing, drained = socket.socketpair()
    with filled, drained:  # each stays open until the file that is made of it is closed, too
        loop.run_in_executor(daemon_threads(), _copy, source, filled.makefile("wb"))
        writing = loop.run_in_executor(daemon_threads(), _copy, drained.makefile("rb", 0), sink)
    yield incoming, outgoing
    await asyncio.wait([writing], timeout=1)


def _error_line(request_id: str | int | None, code: int, message: str) -> bytes:
    """A JSON-RPC error as a line, in ASCII, as an id may hold half of a surrogate pair."""
    answer = {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}
    return json.dumps(answer).encode() + b"\n"


def _answer_to_no_message(line: bytes) -> bytes:
    """The answer to a line that is no message, under the id of its request where one can be made out."""
    request_id = None
    code = -32700
    with suppress(ValueError, RecursionError):
        decoded = json.loads(line)
        code = -32600
        if isinstance(decoded, dict) and "result" not in decoded and type(decoded.get("id")) in (str, int):
            request_id = decoded["id"]
    return _error_line(request_id, code, "Not a single JSON-RPC message")


class _StdioOutput:
    """The write stream that the SDK's `Server.run` takes: each message becomes a line of `writer`, which
    `_serve_stdio` closes."""

    def __init__(self, writer: asyncio.StreamWriter, activity: _Activity) -> None:
        self._writer = writer
        self._activity = activity

    async def send(self, item: SessionMessage) -> None:
        from mcp_types import JSONRPCError, JSONRPCResponse

        # No name for the text, or it would be kept while it is written: large lists would take a third longer.
        self._writer.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
        try:
            with suppress(OSError):  # the client has gone
                await self._writer.drain()
        finally:
            if isinstance(item.message, JSONRPCResponse | JSONRPCError):
                self._activity.end()

    async def __aenter__(self) -> _StdioOutput:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        pass


async def _stdio_messages(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bridge: Bridge
) -> AsyncIterator[SessionMessage]:
    """The read stream that the SDK's `Server.run` takes: a message for each line, and then the end of the server.

    A line that is no message is answered with an error here: the SDK would drop it, and its sender wait for ever. A
    request counts from now on until `_StdioOutput` has written its answer, or its client has cancelled it."""
    from mcp.shared.message import ServerMessageMetadata, SessionMessage
    from mcp_types import JSONRPCNotification, JSONRPCRequest, jsonrpc_message_adapter

    async def settle_unanswered() -> None:
        bridge.activity.end()

    metadata = ServerMessageMetadata(on_request_unanswered=settle_unanswered)
    while not reader.at_eof():
        line = await reader.readline()
        if not line.strip():
            continue
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            writer.write(_answer_to_no_message(line))
            continue
        if isinstance(message, JSONRPCNotification) and "id" in from_json(line):  # a request whose id is no id
            writer.write(_answer_to_no_message(line))
        elif not isinstance(message, JSONRPCRequest):
            yield SessionMessage(message)
        elif bridge.deadline:
            writer.write(_error_line(message.id, -32000, "Server is shutting down"))
        else:
            bridge.activity.begin()
            yield SessionMessage(message, metadata)
    await bridge.finish()


@asynccontextmanager
async def _serve_stdio(bridge: Bridge) -> AsyncIterator[asyncio.Task[None]]:
    """Serve the client at the other ends of stdin and stdout. Yields a task that ends when the client has gone.

    A client that closes its end of stdout has gone, so its input ends, too. When the input ends, the requests that were
    read before are answered, within `shutdown_seconds`; then the client is given a second to read."""
    loop = asyncio.get_running_loop()
    async with _pipes() as (source, sink):
        # No limit to a line: a request that is too long would be refused without its id, and its client wait for ever.
        reader = asyncio.StreamReader(limit=sys.maxsize)
        incoming, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
        # A StreamWriter waits by way of such a protocol, which wants a reader; nothing can be read here.
        unused = asyncio.StreamReader()
        outgoing, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(unused), sink)
        outgoing.set_write_buffer_limits(_WRITE_BUFFER_BYTES)
        writer = asyncio.StreamWriter(outgoing, protocol, None, loop)
        gone = asyncio.create_task(writer.wait_closed())
        gone.add_done_callback(silence)
        gone.add_done_callback(lambda _: incoming.close())
        messages = _stdio_messages(reader, writer, bridge)
        output = _StdioOutput(writer, bridge.activity)
        options = bridge.server.create_initialization_options()
        running = asyncio.create_task(bridge.server.run(messages, output, options))
        running.add_done_callback(silence)
        try:
            yield running
        finally:
            running.cancel()
            await asyncio.wait({running})
            writer.close()
            await asyncio.wait({gone}, timeout=1)
            if not gone.done():
                outgoing.abort()


# ---- Doors: `async_serve`, `MCPServer`, `serve` ----


async def _run_callback(callback: Callable[[], Any] | None) -> None:
    """Run `on_startup` or `on_shutdown`, a function or a coroutine function."""
    result = callback() if callback else None
    if inspect.isawaitable(result):
        await result


async def _log_start(bridge: Bridge, address: str) -> None:
    """Log that the server accepts clients, at what `address`, and what is unusual about it."""
    options = bridge.options
    tools = bridge.catalog.tools.values()
    is_anonymous = options.transport == "stdio" or (address and not options.middleware)  # nothing identifies a caller
    is_public = bool(address) and not _is_loopback(options.host) and not options.middleware
    nothing = "%s; server starting with zero tools"
    if not tools:
        logger.warning(nothing, bridge.catalog.why_empty())
    elif is_anonymous and not await bridge.catalog.offered(tools, None):
        logger.warning(nothing, "The ACL leaves out all modules, for callers without an identity")
    if options.approval != "deny" and bridge.is_unprotected:
        logger.warning("Clients may reach %s*: protect them by an ACL or an approval handler", approvals.CONTROL)
    if is_public and not bridge.catalog.acls:
        everybody = "Everybody who can reach %s may call these tools: there is neither a login (middleware) nor an ACL"
        logger.warning(everybody, options.host)
    if options.transport == "sse":
        logger.warning("SSE transport is deprecated; use streamable-http instead")
    count = "1 tool" if len(tools) == 1 else f"{len(tools)} tools"
    logger.info("apcore-mcp server started: %s registered, transport=%s%s", count, options.transport, address)


class _Life:
    """One life of a server, from whichever function: it accepts clients, waits until it is told to end, and closes.

    `started` is done once clients are accepted. Its result is the app, where another server runs that (`mounted`); its
    exception is what kept this server from starting. A later error is raised by `run()`. `ended` is done as soon as
    `stop()` has been called."""

    def __init__(self, options: Options, mounted: bool = False) -> None:
        self._options = options
        self._mounted = mounted
        self.started = Future[Any]()
        self.ended = Future[None]()

    def stop(self) -> None:
        """Tell it to end, at any time, from any thread or signal handler."""
        with suppress(InvalidStateError):  # not for the first time
            self.ended.set_result(None)

    async def run(self) -> None:
        """Accept clients, log it, wait for the end, close. Every step of closing runs, whatever another one raises."""
        app = None
        address = ""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        serving: asyncio.Future[Any] = ended
        # Not `wrap_future`: its result, set by a signal handler, does not wake the loop that the signal interrupts.
        self.ended.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set_result, None))
        try:
            async with AsyncExitStack() as closing:
                closing.callback(self.stop)  # before `wait()` returns: a server may be started again
                options = self._options
                if options.metrics_collector is True:
                    from .metrics import collecting

                    options = closing.enter_context(collecting(options))
                bridge = Bridge(options)
                closing.push_async_callback(bridge.finish)  # for a start that fails
                if self._mounted:
                    app = await _http_app(bridge)
                elif options.transport == "stdio":
                    serving = await closing.enter_async_context(_serve_stdio(bridge))
                else:
                    serving = await closing.enter_async_context(_serve_http(bridge))
                    address = f", at {options.url}"
                    if options.explorer:
                        address += f", explorer at {urljoin(options.url, options.explorer_prefix)}/"
                closing.push_async_callback(bridge.finish)  # before the transport closes, so that answers are sent
                await _log_start(bridge, address)
                await _run_callback(options.on_startup)
                closing.push_async_callback(_run_callback, options.on_shutdown)
                self.started.set_result(app)
                await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
        except BaseException as error:
            if self.started.done():
                raise
            self.started.set_exception(error)

    def block(self) -> None:
        """Run to the end, on an event loop of its own."""
        loop = asyncio.new_event_loop()
        loop.set_default_executor(daemon_threads())
        running = loop.create_task(self.run())
        try:
            while not running.done():
                # asyncio lets these out of any task that raises them. A module that does so may not end the server.
                with suppress(SystemExit, KeyboardInterrupt):
                    loop.run_until_complete(running)
        finally:
            tasks = asyncio.all_tasks(loop)  # as `asyncio.run` does, but without waiting for one that never ends
            for task in tasks:
                task.add_done_callback(silence)
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=1))
            loop.close()


def _door(make: Callable[P, Options], enter: Callable[[Options], T]) -> Callable[P, T]:
    """Give a function of `Options` the options as its parameters, for completion and `help()`; checked first."""

    @functools.wraps(enter)
    def door(*args: P.args, **kwargs: P.kwargs) -> T:
        return enter(options_of(f"{enter.__name__}()", *args, **kwargs))

    vars(door)["__signature__"] = inspect.signature(make).replace(return_annotation=enter.__annotations__["return"])
    return door


@functools.partial(_door, Options)
@asynccontextmanager
async def async_serve(options: Options) -> AsyncIterator[Starlette]:
    """Serve from inside an asyncio program: an async context manager that yields a Starlette app, already working.

        async with async_serve(registry) as app:
            fastapi_app.mount("/tools", app)      # its MCP endpoint is then /tools/mcp

    Mount the app or run it under any ASGI server; it needs no lifespan of its own. `transport="sse"` gives `/sse` and
    `/messages/`, anything else `/mcp`. Nothing listens on `host` and `port`, but together with `allowed_hosts` they
    decide which Host headers are accepted: name the public ones. All else is as for `serve()`."""
    from anyio import CancelScope

    if options.transport == "stdio":
        options = dataclasses.replace(options, transport="streamable-http")  # for which the address is checked
    life = _Life(options, mounted=True)
    # A task of its own: what `run()` opens only the same task may close, and a test fixture enters and leaves in two.
    running = asyncio.create_task(life.run())
    try:
        yield await asyncio.shield(asyncio.wrap_future(life.started))
    finally:
        life.stop()
        with CancelScope(shield=True):  # also while the host is being cancelled
            await running


class MCPServer:
    """A server in a thread of its own, beside the rest of a program: `MCPServer(registry, transport=..., port=...)`.

    Takes the options of `serve()` and checks them at once. Every method may be called from any thread, though not
    `start()` from two at once, and a server that has ended can be started again."""

    def __init__(self, registry_or_executor: Registry | Executor | APCore, **options: Any) -> None:
        self._options = options_of("MCPServer", registry_or_executor, **options)
        self._life = _Life(self._options)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the server and return once it accepts clients, at once if it already does. Raises what keeps it from
        starting, as `serve()` would: OSError for a port in use, whatever `on_startup` raised."""
        if self._thread is None or self._life.ended.done():
            self.wait()
            self._life = _Life(self._options)
            self._thread = threading.Thread(target=self._life.block, name="apcore-mcp", daemon=True)
            self._thread.start()
        self._life.started.result()

    def stop(self) -> None:
        """Ask the server to end, and return at once; running calls are given `shutdown_seconds`."""
        self._life.stop()

    def wait(self) -> None:
        """Block until the server has ended."""
        if self._thread is not None:
            self._thread.join()


def run(options: Options) -> None:
    """What `serve()` does, with options that are checked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # there is none
        pass
    else:
        raise RuntimeError("serve() blocks, so it cannot be called from a running event loop: use async_serve() there")
    life = _Life(options)

    def handle(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # so that a second one ends the process at once
        life.stop()

    with ExitStack() as former:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                former.callback(signal.signal, number, signal.signal(number, handle))
            # A process that a module forks has no server to end, and under Python 3.13 it might ignore the signal.
            if sys.platform != "win32":
                os.register_at_fork(after_in_child=former.close)
        life.block()
    life.started.result()


@functools.partial(_door, Options)
def serve(options: Options) -> None:
    """Serve every module of a Registry (or of an Executor's) as an MCP tool, until the server is told to end.

        registry = Registry(extensions_dir="./extensions")
        registry.discover()
        serve(registry)                                           # stdio, for a client that starts this program
        serve(registry, transport="streamable-http", port=8000)   # http://127.0.0.1:8000/mcp

    Pass an Executor to keep its ACL, middleware, approval handler and timeouts. Blocks; returns None after SIGINT or
    SIGTERM, or when a stdio client has gone, once running calls have ended or had `shutdown_seconds`. `on_startup` runs
    as soon as clients are accepted, `on_shutdown` while they still are; both may be coroutine functions.
    `apcore-mcp --help` describes each option; all are checked before anything starts. TypeError for a wrong type,
    ValueError for a value that is not allowed, OSError for a port in use; RuntimeError in a running event loop.
    Source: FR-SERVER-001 to -011."""
    run(options)
