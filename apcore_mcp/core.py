"""The bridge: apcore modules in, an MCP server or OpenAI tool definitions out.

The file reads top to bottom. Each section uses only what stands above it, and `grep '^# ----'` lists the sections.

It keeps these promises. Every call goes through apcore's Executor, and only tools that are listed can be called. One
bad module never takes the others down. No traceback, path, class name, caller or sensitive value reaches a client.
Nothing of apcore, of the MCP SDK or of a user's classes is patched. The server parts of `mcp` are imported where they
are used, so that a program that only wants OpenAI definitions does not load an HTTP stack.

Ids such as FR-EXEC-002 and F-013 name the requirements that the project was specified by; the tests carry them too:
`grep -rA3 '"FR-EXEC-002"' tests` finds what proves one.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import copy
import dataclasses
import functools
import hashlib
import inspect
import ipaddress
import itertools
import json
import logging
import logging.handlers
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
import sysconfig
import threading
import time
import traceback
import unicodedata
import weakref
from collections import Counter, deque
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Generator,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType, NoneType, UnionType, coroutine
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)
from urllib.parse import quote, urljoin, urlsplit

import yaml
from annotated_types import Predicate
from apcore import (
    ACL,
    APCore,
    Config,
    ExecutionPolicy,
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
from apcore.builtin_steps import (
    BuiltinACLCheck,
    BuiltinApprovalGate,
    BuiltinExecute,
    BuiltinInputValidation,
    BuiltinModuleLookup,
    BuiltinOutputValidation,
)
from apcore.cancel import CancelToken
from apcore.context import Context, Identity
from apcore.errors import ApprovalDeniedError, BindingFileInvalidError, ErrorCodeRegistry, ModuleExecuteError
from apcore.observability import MetricsCollector, MetricsMiddleware
from apcore.pipeline import BaseStep, ExecutionStrategy, PipelineContext, StepResult
from apcore.registry import load_metadata
from apcore.schema.openai_strict import (
    SUPPORTED_FORMATS,
    UNSUPPORTED_KEYWORDS,
    detect_openai_strict_incompatibilities,
)
from apcore.streaming import StreamingModule
from apcore.trace_context import TraceContext, TraceParent
from apcore.utils.redaction import REDACTED_VALUE
from jsonschema import Draft202012Validator
from jsonschema import ValidationError as InvalidValue
from jsonschema.validators import extend
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    RootModel,
    SkipValidation,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
    field_validator,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import from_json, to_json, to_jsonable_python
from referencing import Registry as SchemaResources
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012
from typing_extensions import TypedDict

from . import __version__

if TYPE_CHECKING:
    from mcp.server.context import CallNext, ServerRequestContext
    from mcp.shared.message import SessionMessage
    from mcp_types import CallToolRequestParams, ReadResourceRequestParams
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import BaseRoute
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


def _text_of(value: object) -> str:
    """A text of a module's for people to read, as JSON can carry it: half of a surrogate pair becomes `?`."""
    return str(value).encode(errors="replace").decode()


def _one_line(text: str) -> str:
    """`text` with escapes for line breaks, control characters and characters that reverse what follows them."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def _in_quotes(text: str) -> str:
    """`text` as it stands between the quotes of a JSON text, with escapes as in `_one_line`."""
    inside = json.dumps(text, ensure_ascii=False)[1:-1]
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in inside)


_TRACEBACK_LINES_MAX = 80
_TRACEBACK_LINE_CHARACTERS = 250


def _indent_traceback(record: logging.LogRecord) -> bool:
    """A filter of the log, which keeps the traceback of a record recognizable as that, and short.

    An error may repeat what a caller wrote: with a line break in it, the rest would look like a record of its own. And
    an error that follows arguments into 700 levels has a traceback of 160 KB, of which both ends are kept. The text is
    left where `logging.Formatter` looks for it; what reads the exception itself finds all of it."""
    if record.exc_info and record.exc_info[1] is not None:
        lines = "".join(traceback.format_exception(record.exc_info[1])).rstrip("\n").split("\n")
        left_out = len(lines) - _TRACEBACK_LINES_MAX
        if left_out > 0:
            half = _TRACEBACK_LINES_MAX // 2
            lines[half:-half] = [f"... {left_out} more lines ..."]
        limit = _TRACEBACK_LINE_CHARACTERS
        record.exc_text = "\n".join(f"  {_one_line(line[:limit])[:limit]}" for line in lines)
    return True


logger.addFilter(_indent_traceback)


# ---- Log: its lines on stderr, for which neither a call nor the end of the process waits; any thread ----

_LOG_FORMAT = "%(asctime)s %(levelname)s: %(message)s"
_UNWRITTEN_MAX = 1_000  # lines of the log
_LOG_END_SECONDS = 1.0  # how long the end of the process waits for who reads the log


class _LogToStderr(logging.handlers.QueueHandler):
    """The log of a server, whose calls and whose end never wait for who reads it: a client may never read its stderr.

    Lines are handed to a thread, which writes them. At most 1,000 wait for it; more are lost, and it says how many. It
    writes to the descriptor, as whatever ends the process would wait for the lock and the buffer of `sys.stderr`. What
    was logged before the end is written then, if it is read. Any thread may log."""

    def __init__(self) -> None:
        self._unwritten = queue.SimpleQueue[str | threading.Event]()
        super().__init__(self._unwritten)
        self.setFormatter(logging.Formatter(_LOG_FORMAT))
        self._lost = 0
        self._process = os.getpid()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def prepare(self, record: logging.LogRecord) -> str:
        return self.format(record)

    def enqueue(self, record: str) -> None:  # type: ignore[override]  # what `prepare` makes of one
        if os.getpid() != self._process:  # one that a module has forked has no thread that writes
            _write_to_stderr(record)
        elif self._unwritten.qsize() < _UNWRITTEN_MAX:
            self._unwritten.put(record)
        else:
            self._lost += 1

    def flush(self) -> None:
        """Wait until what was logged so far is written, a second at most. The process does so at its end."""
        if os.getpid() == self._process:
            written = threading.Event()
            self._unwritten.put(written)
            written.wait(_LOG_END_SECONDS)

    def _write(self) -> None:
        told = 0
        while True:
            waiting = [self._unwritten.get()]
            while not self._unwritten.empty():  # all at once: each write may have to wait for Python's lock
                waiting.append(self._unwritten.get())
            lines = [each for each in waiting if isinstance(each, str)]
            if lines:
                _write_to_stderr("\n".join(lines))
            if self._lost > told:
                told = self._lost
                _write_to_stderr(f"WARNING: {told} lines of this log are lost, as nobody has read it in time")
            for each in waiting:
                if isinstance(each, threading.Event):
                    each.set()


def _write_to_stderr(lines: str) -> None:
    left = f"{lines}\n".encode(errors="backslashreplace")
    with suppress(OSError):  # it is closed: there is nowhere to say so
        while left:
            left = left[os.write(2, left) :]


def _log_to_stderr() -> _LogToStderr | None:
    """Write the log of a program that has not set one up. Returns the handler; None where there is another."""
    if logging.root.handlers:
        return None
    if sys.stderr is not sys.__stderr__:  # of a notebook, say, which shows its own
        logging.basicConfig(format=_LOG_FORMAT)
        return None
    handler = _LogToStderr()
    logging.root.addHandler(handler)
    return handler


# ---- Options: every option of `serve()`, once ----

_TOOL_NAMES_HELP = "names with dots (module-id), with hyphens (portable), or as the client can take them (auto)"
_APPROVAL_HELP = "ask the user, or refuse where the client cannot (require) or let run then (auto); deny; off"
_STATELESS_HELP = "keep no sessions, for servers behind a load balancer (streamable-http)"
_STATE_KEY_HELP = "secret of 32 bytes or more that --stateless servers share; rather by APCORE_MCP_STATE_KEY than here"
_MAX_SESSIONS_HELP = "sessions of handshake clients at a time; one more gets 503"
_SESSION_IDLE_HELP = "seconds without a request until a session ends"
_ALLOWED_HOSTS_HELP = "Host headers accepted beside addresses, localhost and --host; NAME:* for any port"
_TIMEOUT_HELP = "seconds a call may take, 0 for no limit; without it apcore's 30 a module and 60 a call"
_TASK_AFTER_HELP = "seconds until a call goes on as a task; without a number, only those of modules marked as long do"
_EXPLORER_HELP = "serve the Tool Explorer, a page to look at the tools (HTTP transports)"
_ROUTES = ("mcp", "sse", "messages", "health", "ready", "metrics")  # the first parts of paths that have an owner
_EXPLORER_PREFIX = re.compile(rf"(?!/({'|'.join(_ROUTES)})(/|$)|.*/\.\.?(/|$))(/[\w.~-]+)+")


_TRANSPORTS = ("stdio", "streamable-http", "sse")
_HTTP = ("streamable-http", "sse")


def _option(default: T, text: str, *, repr: bool = True, only: Sequence[str] = _TRANSPORTS, **flag: Any) -> T:
    """A field of `_Options`; `text` and `flag` also make its command line flag. `repr=False` is for a secret, `only`
    says which transports it means anything to."""
    return dataclasses.field(default=default, repr=repr, metadata={"help": text, "transports": only, **flag})


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True))
class _Options:
    """What `serve()`, `async_serve()`, `MCPServer` and the command line take: the one list. `_options_of` makes it.

    Values are checked and never converted, so `"8000"` is no port; only the case of a choice does not matter."""

    registry_or_executor: SkipValidation[Registry | Executor | APCore]
    _: dataclasses.KW_ONLY
    transport: str = _option("stdio", "MCP transport", choices=_TRANSPORTS)
    host: str = _option("127.0.0.1", "address to listen on (HTTP transports)", only=_HTTP)
    port: int = _option(8000, "port to listen on, 1 to 65535 (HTTP transports)", only=_HTTP, type=int)
    name: str = _option("apcore-mcp", "server name sent to clients, 255 characters at most")
    version: str | None = _option(None, "server version sent to clients; alone, print the package's, the default")
    instructions: str | None = _option(None, "what the server says about itself to agents")
    tags: Sequence[str] | None = _option(None, "serve only modules with all of these tags", nargs="+")
    prefix: str | None = _option(None, "serve only modules whose id starts with this")
    exclude: Sequence[str] | None = _option(None, "leave out modules whose id starts with one of these", nargs="+")
    read_only: bool = _option(False, "serve only modules annotated readonly")
    log_level: str | None = _option(None, "log level, on stderr", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    on_startup: Callable[[], Any] | None = None
    on_shutdown: Callable[[], Any] | None = None
    dynamic: bool = _option(False, "load the files of the extensions directory again when they change")
    timeout: float | None = _option(None, _TIMEOUT_HELP, type=float)
    task_after: float | None = _option(5.0, _TASK_AFTER_HELP, type=float, nargs="?")
    validate_inputs: bool = _option(False, "check arguments against the advertised schema before apcore does")
    tool_names: str = _option("auto", _TOOL_NAMES_HELP, choices=("auto", "module-id", "portable"))
    redact_output: bool = _option(True, "replace the values of output fields marked x-sensitive")
    approval: str | ApprovalHandler = _option("require", _APPROVAL_HELP, choices=("auto", "require", "deny", "off"))
    search: bool = _option(False, "list two tools, which find and call the others, for agents that take few")
    stateless: bool = _option(False, _STATELESS_HELP, only=_HTTP[:1])
    max_sessions: int = _option(10_000, _MAX_SESSIONS_HELP, only=_HTTP[:1], type=int)
    session_idle_seconds: float = _option(1_800.0, _SESSION_IDLE_HELP, only=_HTTP[:1], type=float)
    shutdown_seconds: float = _option(5.0, "seconds that running calls have when the server ends", type=float)
    state_key: str | bytes | None = _option(None, _STATE_KEY_HELP, repr=False, only=_HTTP[:1], metavar="KEY")
    allowed_hosts: Sequence[str] | None = _option(None, _ALLOWED_HOSTS_HELP, only=_HTTP, nargs="+")
    metrics_collector: Any = None
    middleware: Sequence[Any] | None = None
    output_formatter: Callable[[Any], str] | None = None
    max_result: int = _option(6 * 2**20, "bytes of a result as it is sent, more is an error; 0 for any", type=int)
    explorer: bool = _option(False, _EXPLORER_HELP, only=_HTTP)
    explorer_prefix: str = _option("/explorer", "path of the Tool Explorer", only=_HTTP)
    allow_execute: bool = _option(False, "let the Tool Explorer run tools", only=_HTTP)

    @field_validator("transport", "log_level", "tool_names", "approval")
    @classmethod
    def _one_of_its_choices(cls, value: Any, info: ValidationInfo) -> Any:
        """One of the field's choices, as it is written there."""
        field = cls.__dataclass_fields__[str(info.field_name)]
        choices = field.metadata["choices"]
        if not isinstance(value, str):  # None, or an approval handler
            return value
        for choice in choices:
            if choice.lower() == value.lower():
                return choice
        label = field.name.replace("_", " ")
        raise ValueError(f"Unknown {label}: {value!r}. Must be one of: {', '.join(choices)}")

    @field_validator("explorer_prefix")
    @classmethod
    def _path_of_its_own(cls, prefix: str) -> str:
        """The path without a slash at its end."""
        path = prefix.rstrip("/")
        if not _EXPLORER_PREFIX.fullmatch(path):
            allowed = f"a path such as '/explorer', and none of {', '.join(f'/{name}' for name in _ROUTES)}"
            raise ValueError(f"explorer_prefix must be {allowed}; got {path!r}")
        return path

    @model_validator(mode="after")
    def _within_bounds(self) -> _Options:
        for name in ("name", "version", "instructions", "prefix"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} must not be empty")
        if len(self.name) > 255:
            raise ValueError("name must not exceed 255 characters")
        if not all(self.tags or ()):
            raise ValueError("Tag values must not be empty")
        for name in ("exclude", "allowed_hosts"):
            if not all(getattr(self, name) or ()):
                raise ValueError(f"{name} must not hold an empty text")
        if self.max_result < 0:
            raise ValueError(f"max_result must be a number of bytes, 0 for any; got {self.max_result}")
        if self.timeout is not None and not 0 <= self.timeout < math.inf:
            raise ValueError(f"timeout must be a number of seconds, 0 for no limit; got {self.timeout}")
        if self.max_sessions < 1:
            raise ValueError(f"max_sessions must be 1 or more; got {self.max_sessions}")
        idle = self.session_idle_seconds
        if not 0 < idle < math.inf:
            raise ValueError(f"session_idle_seconds must be a number of seconds above 0; got {idle}")
        if not 0 <= self.shutdown_seconds < math.inf:
            raise ValueError(f"shutdown_seconds must be a number of seconds, 0 or more; got {self.shutdown_seconds}")
        if self.state_key is not None:
            if len(self.state_key_bytes or b"") < 32:
                raise ValueError("state_key must be a secret of 32 bytes or more")
            if not self.stateless:
                raise ValueError("state_key is for servers without sessions: it goes with stateless=True")
        if self.task_after is not None and not 0 <= self.task_after < math.inf:
            raise ValueError(f"task_after must be a number of seconds, or None; got {self.task_after}")
        if self.transport != "stdio":
            if not self.host:
                raise ValueError("Host must not be empty")
            if not 1 <= self.port <= 65535:
                raise ValueError(f"Port must be between 1 and 65535, got {self.port}")
        return self

    @property
    def executor(self) -> Executor:
        """What runs calls."""
        return cast(Executor, self.registry_or_executor)  # `_options_of` has made it one

    @property
    def registry(self) -> Registry:
        """Where the modules are."""
        return self.executor.registry

    @property
    def state_key_bytes(self) -> bytes | None:
        """The key of servers without sessions; what a variable of the environment holds may be no Unicode."""
        key = self.state_key
        return key.encode(errors="surrogatepass") if isinstance(key, str) else key

    @property
    def url(self) -> str:
        """Where clients connect (HTTP transports)."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}{'/sse' if self.transport == 'sse' else '/mcp'}"


# Options that packages built on this one pass too: those that change nothing here, and those that may only be off.
_WITHOUT_EFFECT = (
    "require_auth exempt_paths explorer_title explorer_project_name explorer_project_url async_max_concurrent"
    " async_max_tasks"
).split()
_ONLY_OFF = "approval_handler authenticator strategy trace observability output_format".split()


def _options_of(door: str, /, *sources: Any, **options: Any) -> _Options:
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
    try:
        checked = _Options(*sources, **options)
    except ValidationError as invalid:
        error = invalid.errors()[0]
        refusal = error.get("ctx", {}).get("error")
        if isinstance(refusal, ValueError):  # of a validator above
            raise refusal from None
        option = error["loc"][0]
        hint = " (authentication goes into middleware=)" if option == "authenticator" else ""
        raise TypeError(f"{door} {option}: {error['msg']}{hint}") from None
    # Not the root's level: the SDK logs whole messages at DEBUG, sensitive arguments included.
    if checked.log_level is not None:
        if not logger.hasHandlers():
            _log_to_stderr()
        logger.setLevel(checked.log_level)
    if unused:
        logger.debug("%s: without effect here: %s", door, ", ".join(unused))
    return dataclasses.replace(checked, registry_or_executor=_executor_of(checked))


def _executor_of(options: _Options) -> Executor:
    """The Executor to serve: the user's own, that of apcore's client, or a new one for a Registry."""
    source = options.registry_or_executor
    source = getattr(source, "executor", source)
    if isinstance(source, Executor):
        if options.timeout is not None:
            raise ValueError("timeout is for a Registry: an Executor brings its own, of its Config")
        return source
    if not isinstance(source, Registry):
        raise TypeError(f"Expected Registry or Executor instance, got {type(options.registry_or_executor).__name__}")
    config = None
    if options.timeout is not None:
        milliseconds = math.ceil(options.timeout * 1000)
        config = Config({"executor": {"default_timeout": milliseconds, "global_timeout": milliseconds}})
    executor = Executor(source, config=config)
    if isinstance(options.metrics_collector, MetricsCollector):
        executor.use(MetricsMiddleware(options.metrics_collector))
    return executor


@contextmanager
def _metrics_counted(options: _Options) -> Iterator[_Options]:
    """While a server runs, count the calls of its Executor if the options ask for a collector by `True`."""
    if options.metrics_collector is not True:
        yield options
        return
    collector = MetricsCollector()
    middleware = MetricsMiddleware(collector)
    options.executor.use(middleware)
    try:
        yield dataclasses.replace(options, metrics_collector=collector)
    finally:
        options.executor.remove(middleware)


# ---- Schemas: JSON Schema in, a self-contained one out; pure ----

# The keywords that hold schemas, those of older drafts included. Under any other one a `$ref` is no reference.
_SCHEMA_MAPS = frozenset("properties patternProperties dependentSchemas dependencies $defs definitions".split())
_WITH_SCHEMAS = _SCHEMA_MAPS.union(
    "anyOf oneOf allOf not if then else prefixItems items additionalItems unevaluatedItems contains"
    " additionalProperties unevaluatedProperties propertyNames contentSchema".split()
)
_VALUES = frozenset("const enum default examples".split())  # hold data
_CONSTRAINTS = Draft202012Validator.VALIDATORS.keys()  # other keywords describe a value and constrain nothing
_OTHER_PROPERTIES = frozenset("patternProperties additionalProperties unevaluatedProperties".split())

_Model = type(BaseModel)  # the metaclass of pydantic's models
_PYDANTIC_NAMES = GenerateJsonSchema()  # makes titles and the names of definitions
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
# Keywords that say where references lead, and the dialect: without meaning once references are inlined.
_FOR_REFERENCES = frozenset("$schema $defs definitions $id id $anchor $dynamicAnchor discriminator".split())
_REF_DEPTH_MAX = 32  # references inside references (FR-SCHEMA-002)
_NODES_MAX = 50_000  # schemas in one inlined schema; definitions that use each other twice double it at every level

# What the metaschema of 2020-12 says of one schema, without the schemas inside it, as a type of pydantic's. A server
# of 1,000 modules checks 2,000 schemas when it starts: by jsonschema's `check_schema`, 3 ms for one that has fourteen
# schemas in it; by this, 0.05 ms.
_Schema = JSONObject | bool
_Type = Literal["null", "boolean", "object", "array", "number", "string", "integer"]
_Distinct = Predicate(lambda names: len({*names}) == len(names))
_Names = Annotated[list[str], _Distinct]
_Some = Field(min_length=1)
_LEGAL: JSONObject = {
    **dict.fromkeys(_WITH_SCHEMAS, _Schema),
    "properties dependentSchemas $defs definitions": dict[str, _Schema],
    "patternProperties": dict[re.Pattern[str], _Schema],
    "anyOf oneOf allOf prefixItems": Annotated[list[_Schema], _Some],
    "type": _Type | Annotated[list[_Type], _Some, _Distinct],
    "required": _Names,
    "dependentRequired": dict[str, _Names],
    "enum": Annotated[list[Any], _Some],  # or it is legal, but not to AJV
    "examples": list[Any],
    "minimum maximum exclusiveMinimum exclusiveMaximum": float,
    "multipleOf": PositiveFloat,
    "minLength maxLength minItems maxItems minProperties maxProperties minContains maxContains": NonNegativeInt,
    "uniqueItems deprecated readOnly writeOnly": bool,
    "pattern": re.Pattern[str],
    "$dynamicRef": None,  # not supported
    "$ref $comment title description format contentEncoding contentMediaType": str,
}
_KEYWORDS = {keyword: value_type for keywords, value_type in _LEGAL.items() for keyword in keywords.split()}
_METASCHEMA = TypeAdapter[Any](cast(Any, TypedDict)("JSON Schema (2020-12)", _KEYWORDS, total=False))


def _map_subschemas(schema: JSONSchema, change: Callable[[Any], object]) -> JSONSchema:
    """Copy `schema` with `change` applied to each schema directly inside it.

    `additionalProperties: false` and its like are kept as they are: everybody writes them to close an object."""

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


def _subschemas(schema: Any) -> Iterator[JSONSchema]:
    """`schema` and every schema in it, at any depth and each once, legal or not, but for boolean ones.

    What stands under an unknown keyword counts as a schema too: a reference may lead there."""
    pending = [schema]
    visited = set()
    while pending:
        part = pending.pop()
        if isinstance(part, list | tuple):
            pending += part
        elif isinstance(part, dict) and id(part) not in visited:
            visited.add(id(part))
            yield part
            for keyword, value in part.items():
                if keyword in _SCHEMA_MAPS and isinstance(value, dict):
                    pending += value.values()
                elif keyword not in _VALUES and not isinstance(value, str):
                    pending.append(value)


def _branches(schema: JSONSchema, keywords: Collection[str]) -> list[JSONSchema]:
    """The schemas directly inside `schema` that stand under `keywords`, but for boolean ones."""
    branches: list[JSONSchema] = []
    for keyword, value in schema.items():
        if keyword in keywords:
            if keyword in _SCHEMA_MAPS:
                value = [*value.values()]
            items = value if isinstance(value, list) else [value]
            branches += [item for item in items if isinstance(item, dict)]
    return branches


def _marks_sensitive(schema: JSONSchema) -> bool:
    """Whether anything in `schema` is marked `x-sensitive`."""
    return any(part.get("x-sensitive") is True for part in _subschemas(schema))


def _plain(value: Any) -> Any:
    """Copy `value` into plain JSON types; ValueError for what JSON cannot say, NaN included."""
    return from_json(to_json(value), allow_inf_nan=False)


_DEPTH_MAX = 300  # containers in containers; pydantic writes 255 of them
_SCALARS = frozenset({str, int, float, bool, NoneType})


def _is_plain(value: Any, depth: int = 0) -> bool:
    """Whether `value` holds JSON's own types and nothing else: a cheap look, before a walk that does something. What is
    too deep for JSON is not plain, as what holds itself is."""
    items: Iterable[Any] = value
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                return False
        items = value.values()
    elif type(value) is not list:
        return type(value) in _SCALARS
    for item in items:
        if type(item) in _SCALARS:
            continue
        if type(item) not in (dict, list) or depth == _DEPTH_MAX or not _is_plain(item, depth + 1):
            return False
    return True


_ADDRESS = re.compile(r"<.* at 0x[0-9A-Fa-f]+>+", re.DOTALL)  # the text of an object that has none of its own


def _plain_value(value: Any) -> Any:
    """What is sent for an object that JSON does not know: the values of an array or of any container, and of anything
    else its text (FR-EXEC-002). TypeError where that is no more than its address, which names the type."""
    if hasattr(value, "tolist"):  # NumPy's arrays and scalars, and whatever works like them
        return value.tolist()
    if isinstance(value, Mapping):  # their texts would be Python's, and show what a model in them marks
        return dict(value)
    if isinstance(value, KeysView | ValuesView | ItemsView | Sequence):
        return list(value)
    text = str(value)
    if _ADDRESS.fullmatch(text):
        raise TypeError(f"nothing says what a {type(value).__module__}.{type(value).__qualname__} is in JSON")
    return text


def _is_json(value: Any) -> bool:
    try:
        _plain(value)
    except ValueError:
        return False
    return True


def _properties(schema: JSONSchema) -> Any:
    return schema.get("properties", {})


def _types(schema: JSONSchema) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


class _Unconvertible(ValueError):
    """A legal schema whose references cannot be inlined. An output schema like that costs its tool no more than the
    `outputSchema`."""


class _SchemaConverter:
    """Put what each `$ref` points at in its place: `{"$ref": "#/$defs/Size"}` becomes the schema of a size.

    The result accepts exactly what apcore accepts by the schema, which it reads as 2020-12 whatever `$schema` says.
    ValueError for a schema that the metaschema refuses, for one that refers to itself or has references inside
    references more than 32 deep, and for a result of more than 50,000 schemas; KeyError for a reference to nothing.
    `is_pydantics` says that pydantic wrote the schema, of a class called `class_name`, and checks values by it. The
    titles that it makes of the names of fields and classes say nothing and are left out; an author's own are kept."""

    def __init__(self, *, is_pydantics: bool = False, class_name: str = "") -> None:
        self._is_pydantics = is_pydantics
        self._class_name = class_name

    def inline(self, schema: JSONSchema) -> JSONSchema:
        """Return `schema` without references and without definitions. Source: FR-SCHEMA-002."""
        self._nodes = 0
        self._targets: dict[tuple[int, int], tuple[JSONSchema, int]] = {}  # written out, with their nodes
        resolver = SchemaResources().resolver_with_root(DRAFT202012.create_resource(schema))
        inlined = self._visit(schema, resolver, ["#"])
        self._drop_class_name(inlined, self._class_name)
        return inlined

    def _visit(self, node: Any, resolver: Any, opened: list[str]) -> JSONSchema:
        """Copy `node`, with `{}` for `true` and `{"not": {}}` for `false`, as MCP wants objects. `opened` are the
        references that led to it, outermost first."""
        if isinstance(node, bool):
            return {} if node else {"not": {}}
        self._count(1)
        result = {key: value for key, value in node.items() if key not in _FOR_REFERENCES or value == _DIALECT}
        if self._is_pydantics and ("pattern" in result or "patternProperties" in result):
            result = _with_readable_patterns(result)
        _METASCHEMA.validate_python(result, strict=True)
        result = _map_subschemas(result, lambda inner: self._visit(inner, resolver, opened))
        if "$ref" in result:
            target = self._target(result.pop("$ref"), resolver, opened)
            if result.keys() & _CONSTRAINTS:
                # Both hold. If the two were merged, a constraint of one could replace the other's.
                result["allOf"] = [target, *result.get("allOf", ())]
            else:
                result = {**target, **result}
        if self._is_pydantics:
            for name, field in _properties(result).items():
                if field.get("title") == _PYDANTIC_NAMES.get_title_from_name(name):
                    del field["title"]
        for keyword in ("default", "examples"):
            # A marked value's would be a secret, and one that JSON cannot say would cost the tool its module.
            if keyword in result and (not _is_json(result[keyword]) or _marks_sensitive(result)):
                del result[keyword]
        return result

    def _target(self, ref: str, resolver: Any, opened: list[str]) -> JSONSchema:
        if ref in opened:
            path = map(posixpath.basename, [*opened[opened.index(ref) :], ref])
            raise _Unconvertible(f"Circular reference: {' -> '.join(path)}")
        if len(opened) > _REF_DEPTH_MAX:
            raise _Unconvertible(f"Maximum recursion depth exceeded: more than {_REF_DEPTH_MAX} references")
        try:
            target = resolver.lookup(ref)
        except Unresolvable:
            raise KeyError(f"definition {posixpath.basename(ref)} is missing") from None
        # At each depth a definition is written out once, or two that use each other twice would double the time.
        key = (id(target.contents), len(opened))
        if key in self._targets:
            schema, nodes = self._targets[key]
            self._count(nodes)
            return schema
        nodes_before = self._nodes
        schema = self._visit(target.contents, target.resolver, [*opened, ref])
        self._drop_class_name(schema, posixpath.basename(ref))
        self._targets[key] = (schema, self._nodes - nodes_before)
        return schema

    def _drop_class_name(self, schema: JSONSchema, name: str) -> None:
        """Delete the title of a class's schema where it is the class's name, which is all of `name` or, where two
        classes have the same, a part of it: `shop__models__Order__1`."""
        if self._is_pydantics and "title" in schema:
            title = _PYDANTIC_NAMES.normalize_name(schema["title"])
            if f"__{title}__" in f"__{_PYDANTIC_NAMES.normalize_name(name)}__":
                del schema["title"]

    def _count(self, nodes: int) -> None:
        """Add `nodes` schemas to the result."""
        self._nodes += nodes
        if self._nodes > _NODES_MAX:
            raise _Unconvertible(f"Maximum recursion depth exceeded: more than {_NODES_MAX} nodes")


def _with_readable_patterns(schema: JSONSchema) -> JSONSchema:
    r"""Move a pattern that only pydantic's engine knows into the description, where clients can read it:
    `{"pattern": r"^\p{L}+$"}` becomes `{"description": r"(pattern: ^\p{L}+$)"}`. The same for a pattern of names: what
    it says of their values then stands under `additionalProperties`."""
    readable = {**schema}
    notes = [schema.get("description", "")]
    if not _is_regex(schema.get("pattern", "")):
        notes.append(f"(pattern: {readable.pop('pattern')})")
    names = [*schema.get("patternProperties", ())]
    if len(names) == 1 and not _is_regex(names[0]):  # pydantic writes one, for the keys of a dict
        notes.append(f"(names: {names[0]})")
        readable["additionalProperties"] = readable.pop("patternProperties")[names[0]]
    if len(notes) > 1:
        readable["description"] = " ".join(notes).lstrip()
    return readable


def _is_regex(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def _admits_object(schema: JSONSchema) -> bool:
    """Whether `schema` lets objects through, as far as types and unions tell."""
    branches = _branches(schema, ["anyOf", "oneOf"])
    is_open = not branches or any(map(_admits_object, branches))
    return is_open and "object" in (_types(schema) or ["object"])


_CORE_VALUES = frozenset("default expected members metadata".split())  # of pydantic-core's schemas, hold data
_PYDANTIC = ("pydantic", "pydantic_core", "pydantic_extra_types")


def _core_schemas(core_schema: Any) -> Iterator[JSONObject]:
    """`core_schema`, one of pydantic-core's, and every schema in it."""
    pending = [core_schema]
    while pending:
        part = pending.pop()
        if isinstance(part, list | tuple):
            pending += part
        elif isinstance(part, dict):
            is_schema = isinstance(part.get("type"), str)  # else a map of fields, which may have any names
            if is_schema:
                yield part
            pending += [value for key, value in part.items() if not is_schema or key not in _CORE_VALUES]


def _rewrites(core: JSONObject) -> bool:
    """Whether a schema of pydantic-core's says that values are sent otherwise than JSON Schema describes them when they
    are validated: under other names, more or fewer of them, in another form, or as what a function makes of them."""
    if isinstance(core.get("validation_alias"), str | list) or isinstance(core.get("serialization_alias"), str):
        return True
    if core.get("computed_fields") or core.get("serialization_exclude") or core.get("serialization_exclude_if"):
        return True
    if core.get("type") == "json" or any(key.startswith("ser_json_t") for key in core.get("config") or ()):
        return True
    if core.get("type") not in ("function-before", "function-wrap", "function-plain"):
        return False
    function = core["function"]  # of a serializer, or in a dict that of a validator
    if isinstance(function, dict):
        function = function["function"]
    # Pydantic's own functions keep to the types that they are for.
    return str(getattr(function, "__module__", "")).partition(".")[0] not in _PYDANTIC


class _AnySchema(GenerateJsonSchema):
    """Write `{}` for what JSON Schema cannot say."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JSONSchema:
        return {}


def _pydantic_type(source: Any) -> Any:
    """`source` if it is a type that pydantic describes, a model or the `dict[str, ...]` of a function; else None."""
    return source if isinstance(source, _Model) or get_origin(source) is dict else None


def _representations(source: Any, schema: JSONSchema) -> list[JSONSchema]:
    """The schemas of each form in which values may be sent, or be written in Python.

    Dict schemas and most models have one form, which `schema`, apcore's, describes. A model with aliases, computed or
    excluded fields or serializers, and the `dict[str, ...]` of a function, have four: as validated and as serialised,
    by alias and by name. The core schema tells which models these are, as to write and to compare the four of every
    model would take a start half as long again."""
    if _pydantic_type(source) is None:
        return [schema]
    is_model = isinstance(source, _Model)
    adapter = TypeAdapter[Any](source, config=None if is_model else ConfigDict(arbitrary_types_allowed=True))
    core_schema = {**adapter.core_schema}  # a copy, as only looking into it builds one that pydantic has deferred
    if is_model and not any(map(_rewrites, _core_schemas(core_schema))):
        return [schema]
    schema_of = functools.partial(adapter.json_schema, schema_generator=_AnySchema)
    serialized = schema_of(mode="serialization")
    return [schema, serialized, schema_of(mode="serialization", by_alias=False), schema_of(by_alias=False)]


def _converter_of(pydantic_type: Any) -> _SchemaConverter:
    """The converter for a schema that pydantic wrote of `pydantic_type`, or of a dict schema (None)."""
    is_pydantics = pydantic_type is not None
    return _SchemaConverter(is_pydantics=is_pydantics, class_name=getattr(pydantic_type, "__name__", ""))


def _input_schema(schema: JSONSchema, pydantic_type: Any = None) -> JSONSchema:
    """A module's arguments as a self-contained object schema (FR-SCHEMA-001, -003, -004, -006): `{}` becomes
    `{"type": "object", "properties": {}}`. ValueError or KeyError where that cannot be, or the root is no object."""
    inlined = _converter_of(pydantic_type).inline(schema) or {"properties": {}}
    if not _admits_object(inlined):
        raise ValueError(f"Input schema must describe an object, got type {inlined.get('type')!r}")
    return {**inlined, "type": "object"}


def _function_of(module: FunctionModule) -> Callable[..., Any]:
    return module._func  # pyright: ignore[reportPrivateUsage]  # apcore has no public name for it


def _output_type(module: Any) -> Any:
    """The model or the dict schema of a module's output, or the `dict[str, ...]` that a function returns: of that,
    apcore makes a model without fields."""
    if isinstance(module, FunctionModule):
        with suppress(NameError):
            returned = get_type_hints(_function_of(module), include_extras=True).get("return")
            if get_origin(returned) is dict and not getattr(module.output_schema, "model_fields", True):
                return returned
    return getattr(module, "output_schema", None)


def _is_valid(value: Any, schema: JSONSchema) -> bool:
    return Draft202012Validator(schema).is_valid(value)


def _suits(value: Any, schema: JSONSchema) -> bool:
    """Whether `value`, without what is in it, is of the types and the constants of `schema`."""
    types = _types(schema)
    if types and not any(Draft202012Validator.TYPE_CHECKER.is_type(value, name) for name in types):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    return value is not None or "not" not in schema or not _is_valid(None, schema["not"])


def _nullable(schema: JSONSchema) -> JSONSchema:
    """`schema`, changed to accept null as well."""
    if schema.keys() & _CONSTRAINTS == {"anyOf"} and {"type": "null"} in schema["anyOf"]:
        return schema  # pydantic's Optional; with a validator for it, a start with many tools would take longer by 7 %
    if _is_valid(None, schema):
        return schema
    nullable = {**schema}
    if "type" in schema:
        nullable["type"] = [*dict.fromkeys([*_types(schema), "null"])]
    if "enum" in schema:
        nullable["enum"] = [*schema["enum"], None]
    return nullable if _is_valid(None, nullable) else {"anyOf": [schema, {"type": "null"}]}


# ---- Secrets: which values of a schema are marked, and what stands in their place; pure ----

# The keywords whose schemas JSON Schema applies in place: to the very value that the schema around them applies to.
_IN_PLACE = frozenset("anyOf oneOf allOf not if then else dependentSchemas".split())
# Keywords whose schemas apply to parts of the value that nobody looks for: a mark there hides the whole value.
_WHOLE = frozenset("patternProperties contains propertyNames contentSchema additionalItems dependencies".split())


def _marks(schema: JSONSchema) -> JSONSchema:
    """The marks of `schema` and nothing else: `{"properties": {"a": {"type": "string", "x-sensitive": True}, "b": {}}}`
    becomes `{"properties": {"a": {"x-sensitive": True}, "b": {}}}`."""
    if not _marks_sensitive(schema):
        return {}
    if schema.get("x-sensitive") is True or any(map(_marks_sensitive, _branches(schema, _WHOLE))):
        return {"x-sensitive": True}
    return _map_subschemas({key: value for key, value in schema.items() if key in _WITH_SCHEMAS}, _marks)


def _in_place(*schemas: JSONSchema) -> Iterator[JSONSchema]:
    """`schemas` and all the schemas in them that may apply to the same value."""
    for schema in schemas:
        yield schema
        yield from _in_place(*_branches(schema, _IN_PLACE))


def _part_schemas(schemas: Iterable[JSONSchema], step: str | int) -> Iterator[JSONSchema]:
    """The schemas that may apply to one property or item of a value to which `schemas` may apply. Patterns of names are
    not tried: each counts."""
    for schema in schemas:
        if isinstance(step, int):
            place = schema.get("prefixItems", ())[step : step + 1]
            yield from place or _branches(schema, ["items", "unevaluatedItems"])
        elif step in _properties(schema):
            yield schema["properties"][step]
        else:
            yield from _branches(schema, _OTHER_PROPERTIES)


def _admits(schema: JSONSchema, value: Any) -> bool:
    """Whether `schema` takes `value` with whatever is in it: it says nothing of the parts of such an object or list, or
    lets the object have any others."""
    alternatives = _branches(schema, ["anyOf", "oneOf"])
    if alternatives and "properties" not in schema:  # or they say more of the same object: what is required, say
        return any(_admits(alternative, value) for alternative in alternatives)
    if not _suits(value, schema) or not all(_admits(part, value) for part in _branches(schema, ["allOf"])):
        return False
    if isinstance(value, list):
        return not schema.keys() & {"items", "prefixItems", "unevaluatedItems"}
    if isinstance(value, dict) and (schema.keys() & _OTHER_PROPERTIES or "properties" in schema):
        return schema.get("additionalProperties") is True or schema.get("unevaluatedProperties") is True
    return "properties" not in schema


def _redact(value: Any, *marks: JSONSchema, forms: Sequence[JSONSchema] | None = None) -> Any:
    """Copy plain JSON with `***REDACTED***` in the place of each value that one of `marks`, from `_marks`, marks.

    With `forms`, the schemas that the marks were made of, a value is hidden too where something beside it is marked and
    none of them names or admits it: a model may take a secret in a form that its schema does not say. It only looks
    where there are marks. Not by `apcore.redact_sensitive`, which overlooks the values of maps (`additionalProperties`)
    and by default blanks innocent keys that contain a word: "author", "tokens_used"."""
    applied = [mark for mark in _in_place(*marks) if mark]
    if value is None or not applied:
        return value
    if any("x-sensitive" in mark for mark in applied):
        return REDACTED_VALUE
    hides_unknown = forms is not None and not any(_admits(form, value) for form in forms)
    if not isinstance(value, dict | list):
        return REDACTED_VALUE if hides_unknown else value
    places = [*_in_place(*forms or ())]

    def redact_part(step: str | int, part: Any) -> Any:
        part_marks = [*_part_schemas(applied, step)]
        part_forms = [*_part_schemas(places, step)]
        if hides_unknown and not part_marks and not part_forms:
            return REDACTED_VALUE
        return _redact(part, *part_marks, forms=None if forms is None else part_forms)

    if isinstance(value, list):
        return [redact_part(index, item) for index, item in enumerate(value)]
    return {name: redact_part(name, item) for name, item in value.items()}


def _inlined_or_marked(schema: JSONSchema) -> JSONSchema:
    """`schema` without references; where that cannot be, as it refers to itself, one that marks the whole."""
    try:  # as a model's: a pattern that Python cannot compile hides nothing
        return _SchemaConverter(is_pydantics=True).inline(schema)
    except (ValueError, KeyError):
        return {"x-sensitive": True}


_CLASS_MARKS = weakref.WeakKeyDictionary[type, JSONSchema]()


def _marks_of_class(cls: type) -> JSONSchema:
    """The marks of a pydantic model or a dataclass, in each form in which one may be sent."""
    marks = _CLASS_MARKS.get(cls)
    if marks is None:
        try:
            schema_of = functools.partial(TypeAdapter(cls).json_schema, schema_generator=_AnySchema)
            schemas = [schema_of(), schema_of(by_alias=False)]
            schemas += [schema_of(mode="serialization"), schema_of(mode="serialization", by_alias=False)]
            found = [_marks(_inlined_or_marked(schema)) for schema in schemas if _marks_sensitive(schema)]
            marks = {"anyOf": found} if found else {}
        except Exception:  # of a user's own class: a model fails closed, and a dataclass need not be pydantic's
            marks = {"x-sensitive": True} if issubclass(cls, BaseModel) else {}
        _CLASS_MARKS[cls] = marks
    return marks


class _Dump(dict[str, Any]):
    """The dict of a model that a module has returned: apcore takes dicts alone. By the model it is validated, and
    redacted, also where another module passes it on."""

    model: BaseModel
    marks: JSONSchema  # of the model


def _dumped(model: BaseModel) -> Any:
    """A model as apcore takes outputs: its dict, which still knows it. One that has no dict stays a model."""
    output = model.model_dump(warnings=False)  # they quote values
    if not isinstance(output, dict):
        return model
    dump = _Dump(output)
    dump.model = model
    dump.marks = _marks_in(model)
    return dump


def _marks_in(value: Any) -> JSONSchema:
    """The marks of the models in an output, each where it stands, as `_redact` takes them: of `[1, Model()]`
    `{"prefixItems": [{}, {"properties": ...}]}`, and `{}` where no model in it marks anything."""
    if isinstance(value, str | bytes | bytearray | type) or type(value) in _SCALARS:
        return {}
    if isinstance(value, dict):
        parts = {key: _marks_in(item) for key, item in value.items()}
        marked = {_key_text(key): marks for key, marks in parts.items() if marks}
        own_marks = value.marks if isinstance(value, _Dump) else {}
        return _any_of([own_marks, {"properties": marked} if marked else {}])
    if isinstance(value, list | tuple | set | frozenset | deque):
        items = [*map(_marks_in, value)]
        return {"prefixItems": items} if any(items) else {}
    if isinstance(value, BaseModel):
        aliases = {name: field.serialization_alias for name, field in type(value).model_fields.items()}
        fields = dict(value)
        for name, computed in type(value).model_computed_fields.items():
            aliases[name] = computed.alias
            fields[name] = getattr(value, name)
        return _marks_in_fields(value, aliases, fields)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return _marks_in_fields(value, {}, {name: getattr(value, name, None) for name in names})
    is_container = hasattr(value, "tolist") or isinstance(value, Mapping | KeysView | ValuesView | ItemsView | Sequence)
    return _marks_in(_plain_value(value)) if is_container else {}


def _marks_in_fields(model: Any, aliases: Mapping[str, str | None], fields: JSONObject) -> JSONSchema:
    """The marks of the class of `model`, and of what stands in its `fields`: under Any, or of a subclass."""
    marks = [_marks_of_class(type(model))]
    parts: JSONObject = {}
    for name, item in fields.items():
        part = _marks_in(item)
        if part:
            parts[name] = parts[aliases.get(name) or name] = part
    if parts:
        marks.append(parts["root"] if isinstance(model, RootModel) else {"properties": parts})
    return _any_of(marks)


def _any_of(marks: Iterable[JSONSchema]) -> JSONSchema:
    """What hides whatever one of `marks` hides."""
    found = [*filter(None, marks)]
    return {"anyOf": found} if found else {}


def _key_text(key: object) -> str:
    """A dict's key as JSON writes it."""
    if type(key) is str:
        return key
    return str(next(iter(from_json(to_json({key: None}, fallback=_plain_value, bytes_mode="base64")))))


# ---- Tools: a module as clients see it: its names, its description, its schemas; pure ----

_NAME_MAX = 64  # characters; the limit of OpenAI's function names and of Claude's tool names

_CLIENTS_WITHOUT_DOTS = re.compile(  # how `clientInfo.name` begins where one name with a dot loses all tools
    "claude-ai"  # Claude Desktop, claude.ai: ^[a-zA-Z0-9_-]{1,64}$; behind mcp-remote (pull request 63) more follows
    "|github-copilot-developer"  # Copilot CLI: its issues 1879 and 2581
    r"|JetBrains-\w+-copilot"  # Copilot in JetBrains' IDEs: microsoft/copilot-intellij-feedback, issue 1583
)
_ALIAS = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PAGE_MEDIA_TYPE = "text/html;profile=mcp-app"  # MCP Apps, SEP-1865, the specification of 2026-01-26


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


# Where the first paragraph of a docstring ends without an empty line: what apcore takes for the head of a section.
_SECTION = re.compile(r":\w|(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?|Warnings?)\s*:")


def _description_of(descriptor: ModuleDescriptor, module: Any) -> str:
    """A module's description. For a function, apcore takes the first line of the docstring, which may end inside a
    sentence: then it is the first paragraph, in one line."""
    if isinstance(module, FunctionModule):
        lines = (inspect.getdoc(_function_of(module)) or "").splitlines()
        paragraph = [*itertools.takewhile(lambda line: line.strip() and not _SECTION.match(line), lines)]
        if paragraph and paragraph[0].strip() == descriptor.description:
            return " ".join(line.strip() for line in paragraph)
    return descriptor.description


def _tags_of(descriptor: ModuleDescriptor, module: Any) -> list[str]:
    """The tags of a module, those that its definition has (from a `_meta.yaml`) and its own, as apcore's registry looks
    for them. ValueError where they are not texts."""
    own_tags = getattr(module, "tags", None) or []
    tags = [*descriptor.tags, *own_tags] if isinstance(own_tags, list | tuple | set | frozenset) else [own_tags]
    if isinstance(own_tags, str) or not all(isinstance(tag, str) for tag in tags):
        raise ValueError(f"its tags are no list of texts: {own_tags!r}")
    return [*dict.fromkeys(tags)]


def _is_reserved(name: str) -> bool:
    """Whether a name in a tool's `_meta` is not its author's: this file's, MCP's own by its prefix, or MCP Apps'."""
    prefix = name.partition("/")[0].lower() if "/" in name else ""
    labels = prefix.split(".")  # as `io.modelcontextprotocol` or, until 2025-11-25, `modelcontextprotocol.io`
    is_mcps = bool({"mcp", "modelcontextprotocol"} & {*labels[:-1], *labels[:2]})
    return name == "ui" or prefix in ("ui", "apcore") or is_mcps


class _AnnotationMapper:
    """Express what apcore knows about one module in the terms of MCP and OpenAI.

    The description is that of apcore's display overlay (in the metadata, or the `display` of an `@module` function) or
    else the module's own. The guidance, the advice and the deprecation notice follow, a paragraph each. `alias` is the
    overlay's name for the tool, and `page` the HTML in which hosts of MCP Apps show its results ("" without one)."""

    def __init__(self, descriptor: ModuleDescriptor, module: Any) -> None:
        self._version = descriptor.version
        self.tags = _tags_of(descriptor, module)
        self.annotations = descriptor.annotations or _DEFAULT_ANNOTATIONS
        self.title = descriptor.name or ""
        metadata = descriptor.metadata
        overlay: JSONObject = {}
        with suppress(KeyError, TypeError):  # apcore does not check what `display` holds
            overlay = {**(metadata.get("display") or getattr(module, "display", {}))["mcp"]}
        self._module_id = descriptor.module_id
        self._meta = overlay.get("meta") or {}
        self.alias = _text_of(overlay.get("alias") or descriptor.module_id)
        page = overlay.get("page")
        self.page = _text_of(page) if isinstance(page, str) else ""
        self.page_uri = f"ui://{descriptor.module_id}"
        marks = (metadata.get("async"), self.annotations.extra.get("mcp_async"))
        self.is_long = any(str(mark).lower() == "true" for mark in marks)  # runs for minutes, as its author says
        paragraphs = [overlay.get("description") or _description_of(descriptor, module)]
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
        hints = {hint: bool(getattr(self.annotations, name)) for hint, name in _HINTS.items()}
        flags = {f"apcore/{flag}": bool(getattr(self.annotations, flag)) for flag in _FLAGS}
        meta = {**flags, "apcore/version": self._version, "apcore/tags": self.tags}
        if self.page:
            meta["ui"] = {"resourceUri": self.page_uri}
        meta.update(self._own_meta())
        definition: JSONObject = {"description": self.description, "annotations": hints, "_meta": meta}
        if not self.title:
            return definition
        return {"title": self.title, **definition, "annotations": {"title": self.title, **hints}}

    def _own_meta(self) -> JSONObject:
        """The `meta` of the overlay, without names that are others' and what JSON cannot say, which are a WARNING."""
        if not isinstance(self._meta, dict):
            logger.warning("Module %s: its meta is left out, as it is no dict", self._module_id)
            return {}
        own: JSONObject = {}
        refused = []
        for name, value in self._meta.items():
            try:
                if _is_reserved(name):
                    raise ValueError
                own.update(_as_listed({name: value}))
            except Exception:  # boundary: what an author has put there may be anything
                refused.append(_one_line(_text_of(name)))
        if refused:
            names = ", ".join(refused)
            logger.warning("Module %s: of its meta is left out, as reserved or no JSON: %s", self._module_id, names)
        return own

    def to_suffix(self) -> str:
        r"""The annotations that differ from the defaults, for a function's description (FR-ANNOT-007):
        `"\n\n[Annotations: readonly=true, idempotent=true]"`, or `""` when nothing does."""
        different = []
        for name in _SUFFIX_FIELDS:
            value = getattr(self.annotations, name)
            if value != getattr(_DEFAULT_ANNOTATIONS, name):
                different.append(f"{name}={str(value).lower()}")
        return f"\n\n[Annotations: {', '.join(different)}]" if different else ""


class _Tool:
    """One listed module: everything about it that does not change from call to call.

    `name` is its alias, unless the catalog has another tool that could be meant by it. ValueError or KeyError when the
    module cannot be a tool."""

    def __init__(self, descriptor: ModuleDescriptor, module: Any, options: _Options) -> None:
        self.descriptor = descriptor
        self.module_id = descriptor.module_id
        self.documentation = _text_of(descriptor.documentation or "")
        self.about = _AnnotationMapper(descriptor, module)
        self.name = self.about.alias
        self.model: Any = getattr(module, "input_schema", None)  # by which apcore validates arguments
        self.is_closed = (  # a function that takes no arguments but those of its schema
            isinstance(module, FunctionModule)
            and inspect.getfullargspec(inspect.unwrap(_function_of(module))).varkw is None
            and (_pydantic_type(self.model) is not None or _lists_all_names(descriptor.input_schema))
        )
        outputs = self._outputs(_output_type(module))
        self.outputs = outputs  # the schemas of each form that results may have
        self.redacts = options.redact_output
        self.marks = [*filter(None, map(_marks, outputs))] if options.redact_output else []  # of results
        self.media = _media(*outputs)  # properties that are sent as files, with their media types
        promise = _promise_of_all(outputs)
        definition = {**self.about.to_mcp(), "inputSchema": self._inputs()}
        # A tool with files has no output schema: where there is structured content, Codex shows its model nothing else.
        if promise and not self.marks and not self.media:
            definition["outputSchema"] = promise
        self._definition = _as_listed(definition)
        self.input_schema = self._definition["inputSchema"]
        self.output_schema = self._definition.get("outputSchema", {})  # as advertised; {} when none is
        self.resources = self._resources()

    def _inputs(self) -> JSONSchema:
        """The schema of the arguments, as it is advertised."""
        schema = _input_schema(self.descriptor.input_schema, _pydantic_type(self.model))
        if self.is_closed:
            schema["additionalProperties"] = False
        return schema

    def _outputs(self, source: Any) -> list[JSONSchema]:
        """The schemas of each form that results may have; none where one refers to itself (FR-SCHEMA-005)."""
        schemas = _representations(source, self.descriptor.output_schema)
        try:
            return [_converter_of(_pydantic_type(source)).inline(schema) for schema in schemas]
        except _Unconvertible as error:
            if any(map(_marks_sensitive, schemas)):
                raise
            logger.warning("Module %s is served without its output schema: %s", self.module_id, error)
            return []

    def _resources(self) -> list[tuple[JSONObject, JSONObject]]:
        """The tool's documentation (FR-RESOURCE-001) and its page (MCP Apps), each as `resources/list` describes it
        and as `resources/read` sends it."""
        resources = []
        if self.documentation:
            description = self._resource(f"docs://{self.module_id}", "text/plain")
            resources.append((description, {**description, "text": self.documentation}))
        if self.about.page:
            description = self._resource(self.about.page_uri, _PAGE_MEDIA_TYPE)
            # Stated, because hosts differ in what they do without it.
            with_border = {"_meta": {"ui": {"prefersBorder": True}}}
            resources.append((description, {**description, "text": self.about.page, **with_border}))
        return resources

    def _resource(self, uri: str, media_type: str) -> JSONObject:
        title = self.descriptor.name or self.module_id
        return {"uri": uri, "name": self.module_id, "title": title, "mimeType": media_type}

    def name_as(self, names: str) -> str:
        """The tool's name in MCP, with `names` as the option `tool_names`."""
        return _portable_name(self.name) if names == "portable" else self.name

    def definition(self, names: str) -> JSONObject:
        """The tool as MCP's `tools/list` sends it (FR-SERVER-011), with `names` as the option `tool_names`."""
        return {"name": self.name_as(names), **self._definition}


def _lists_all_names(schema: JSONSchema) -> bool:
    """Whether the properties of an object's schema are all that it says of names; a binding's may say more."""
    return "properties" in schema and not schema.keys() & {"$ref", *_IN_PLACE, *_OTHER_PROPERTIES}


def _as_listed(definition: JSONObject) -> JSONObject:
    """A copy of a tool's definition in plain JSON types. ValueError where a parser could not read it in its place in
    the answer to `tools/list`, for its depth or for what JSON cannot say: it would cost a client the whole list."""
    answer: JSONObject = _plain({"result": {"tools": [definition]}})
    return cast(JSONObject, answer["result"]["tools"][0])


def _media(*schemas: JSONSchema) -> dict[str, str]:
    """The properties that are files, with their media types: strings of base64 that have one."""
    media_types: dict[str, str] = {}
    for schema in _in_place(*schemas):
        for name, field in _properties(schema).items():
            for part in _in_place(field):
                if part.get("contentEncoding") == "base64" and "contentMediaType" in part:
                    media_types.setdefault(name, part["contentMediaType"])
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
        promise.pop("items", None)
    if "patternProperties" in schema or schema.get("additionalProperties") is False:
        promise.pop("additionalProperties", None)
    if "oneOf" in promise:  # without the keywords that are left out, a value may fit several branches
        promise["anyOf"] = promise.pop("oneOf")
    promise = _map_subschemas(promise, _promise)
    # A default need not fit its field, as in `size: int = None`: pydantic and apcore do not check it.
    return _nullable(promise) if schema.get("default", promise) is None else promise


def _promise_of_all(outputs: list[JSONSchema]) -> JSONSchema:
    """What is advertised of results that each fit one of `outputs`; `{}` where that is no object. Of several schemas,
    no more is sure than that."""
    promise = _promise(outputs[0]) if outputs and outputs[0] else {"type": "null"}
    if not _admits_object(promise):
        return {}
    return {**(promise if len(outputs) == 1 else {}), "type": "object"}


# ---- Results: a module's output as an MCP result; pure ----


def _to_bytes(value: Any) -> bytes:
    return to_json(value, fallback=_plain_value, bytes_mode="base64")


def _to_text(value: Any) -> str:
    return _to_bytes(value).decode()


def _with_values(value: Any, *schemas: JSONSchema) -> Any:
    """Copy containers with a float for each Decimal, which would become text, where `schemas` ask for a number.

    TypeError for a generator and other iterators, which pydantic would use up: their text is their address."""
    applied = [*_in_place(*schemas)]
    if isinstance(value, Decimal):
        types = {name for schema in applied for name in _types(schema)}
        return float(value) if "string" not in types and types & {"number", "integer"} else value
    if isinstance(value, dict):
        return {name: _with_values(item, *_part_schemas(applied, name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_values(item, *_part_schemas(applied, index)) for index, item in enumerate(value)]
    return _plain_value(value) if isinstance(value, Iterator) else value


def _as_plain(output: Any, *schemas: JSONSchema) -> Any:
    """Copy an output into plain JSON types, as `schemas` describe it. ValueError, TypeError or RecursionError where
    that cannot be."""
    return from_json(_to_bytes(_with_values(output, *schemas)), allow_inf_nan=False)


def _as_json(tool: _Tool, output: Any, *marks: JSONSchema) -> tuple[bytes, Any, list[JSONObject]]:
    """A module's output, redacted: as JSON text, as the same value in plain types, and its files as MCP content.

    Dates become ISO text, enums their values, bytes base64, arrays lists, anything unknown its `str()` (FR-EXEC-002).
    What the tool's schema marks is redacted, what the models in the output mark, and what `marks` do. ModuleError
    OUTPUT_SERIALIZATION_ERROR for what JSON cannot express (NaN, infinity, a cycle, an object without a text) and a
    file that is not base64."""
    hidden = [*tool.marks, *marks]
    try:
        if _is_plain(output):
            plain = from_json(_to_bytes(output), allow_inf_nan=False)
        else:
            hidden.append(_marks_in(output))
            plain = _as_plain(output, *tool.outputs)
        value = _redact(plain or {}, *(hidden if tool.redacts else ()))
        files = _take_files(tool, value)
    except Exception as error:  # a module's own __str__ may raise anything
        raise ModuleError("OUTPUT_SERIALIZATION_ERROR", f"output is not JSON: {_text_of(error)}") from None
    return _to_bytes(value), value, files


def _take_files(tool: _Tool, value: Any) -> list[JSONObject]:
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


def _tool_result(text: str, *files: JSONObject, is_error: bool = False, **more: Any) -> JSONObject:
    """A tool result in MCP's form."""
    return {"content": [{"type": "text", "text": text}, *files], "isError": is_error, "resultType": "complete", **more}


class _OwnError(ModuleError):
    """An error of this package's, with a message that clients read as it is."""


class _RefusedOutput(SchemaValidationError):
    """The output of a module does not fit its schema: the module has run."""


def _size_on_the_wire(text: bytes) -> int:
    """How many bytes `text` takes in a message, which escapes quotes, backslashes and line breaks."""
    return len(text) + text.count(b'"') + text.count(b"\\") + text.count(b"\n")


@dataclasses.dataclass(frozen=True)
class _Results:
    """How one door has the results of tools: text, files and, where a schema is advertised or else as it says,
    structured content.

    `formatter` writes the text instead of JSON; when it fails, the text is JSON. A result of more than `bytes_max`
    bytes as it is sent is an error RESULT_TOO_LARGE (0: any size): clients end their connection, and all tools of the
    server with it."""

    bytes_max: int = 0
    formatter: Callable[[Any], str] | None = None
    structured: Literal["promised", "always", "never"] = "promised"

    def of(self, tool: _Tool, output: Any, marks: Iterable[JSONSchema], label: str, *, is_checked: bool) -> JSONObject:
        """A module's output as a tool result. The log has the `label` of the call.

        An output that apcore has not checked (`is_checked`), or that is empty (apcore does not check None, which
        becomes `{}`), is a `_RefusedOutput` where the advertised schema refuses it."""
        written, value, files = _as_json(tool, output, *marks)
        if not value or not is_checked or REDACTED_VALUE.encode() in written:
            # A client would refuse such a result.
            for error in Draft202012Validator(tool.output_schema).iter_errors(value):
                raise _RefusedOutput(f"Output validation failed: {error.message}")
        is_structured = self.structured == "always" or (self.structured == "promised" and bool(tool.output_schema))
        size = len(written) if is_structured else 0
        text = written.decode()
        if self.formatter is not None:
            try:
                text = _text_of(self.formatter(from_json(written)))  # a copy: the formatter may change what it gets
                written = text.encode()
            except Exception:  # a user's own function
                logger.exception("output_formatter failed, so %s is answered in JSON", label)
        self.check_size(size + _size_on_the_wire(written) + sum(map(_size_of_file, files)))
        result = _tool_result(text, *files)
        if is_structured:
            result["structuredContent"] = value
        return result

    def check_size(self, size: int) -> None:
        """Raise `_OwnError` where a result, or a part of it, is larger than what is sent."""
        if self.bytes_max and size > self.bytes_max:
            text = f"Result is too large: {size} bytes, and at most {self.bytes_max} are sent (the tool has run)"
            raise _OwnError("RESULT_TOO_LARGE", text, retryable=False)


def _size_of_file(file: JSONObject) -> int:
    part = file.get("resource", file)
    content: str = part.get("text") or part.get("data") or part.get("blob") or ""
    return _size_on_the_wire(content.encode()) if "text" in part else len(content)


# ---- Errors: what went wrong, in a plain sentence for the client and in full for the log; pure ----

_SENTENCES = {  # what a client reads, by apcore's error code (FR-ERROR-001 to -010)
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
_UNEXPECTED = "Internal error occurred"


def _sentence(code: str, *, is_withheld: bool = False) -> str:
    """What a client reads of an error, with places for the facts."""
    return _SENTENCES.get(code, "Module error: {code}") + ("" if is_withheld else _DETAILS.get(code, ""))


@dataclasses.dataclass(frozen=True)
class _Unasked(ApprovalResult):
    """The decision of our own approval handlers about a call that needs approval and whose user cannot be asked."""

    lacks_capability: bool = False  # whether a client that declares elicitation would have been asked


def _unasked(error: BaseException) -> _Unasked | None:
    """Why a call was refused, if that is because its user cannot be asked."""
    result = error.result if isinstance(error, ApprovalDeniedError) else None
    return result if isinstance(result, _Unasked) else None


def _failure(text: str, code: str, **report: Any) -> JSONObject:
    """An error as a tool result, with its machine-readable form in `_meta` (FR-ERROR-011). Without `structuredContent`,
    which the TypeScript client would validate against the output schema."""
    meta = {"apcore-mcp/error": {"status": "failure", "error_type": code, "error_message": text, **report}}
    return _tool_result(text, is_error=True, _meta=meta)


def _label(name: str, caller: Identity | None) -> str:
    """How lines of the log name a call: `image.resize (caller: ann)`, without the bracket for an anonymous caller."""
    return name if caller is None else f"{name} (caller: {_one_line(caller.id)})"


_ERRORS_MAX = 20  # how many errors of one call a client reads
_ERROR_CHARACTERS = 1_000  # of a field's path, of a code and of a message, each


def _fault(path: Iterable[Any], code: object, message: object) -> dict[str, str]:
    """What is wrong with one field, shortened: `{"field": "sizes.0", "code": "type", "message": "..."}`."""
    fault = {"field": ".".join(map(str, path)), "code": code, "message": message}
    return {key: _text_of(value)[:_ERROR_CHARACTERS] for key, value in fault.items()}


def _fault_of(error: object) -> dict[str, str]:
    """What is wrong with one field, from the forms in which it is reported: apcore's dicts (`path` and `keyword`, or
    `field` and `code`), pydantic's (`loc`, `type` and `msg`), or a text of a module's author."""
    parts = error if isinstance(error, dict) else {"message": error}
    path = parts.get("field") or parts.get("path") or parts.get("loc") or ""
    if not isinstance(path, list | tuple):
        path = str(path).strip("/").split("/")
    code = parts.get("code") or parts.get("keyword") or parts.get("type") or "invalid"
    return _fault(path, code, parts.get("message") or parts.get("msg") or "")


def _check_required(_: Any, names: list[str], value: object, _schema: JSONSchema) -> Iterator[InvalidValue]:
    """The keyword `required` with errors at the missing property, which jsonschema's own name only in a sentence."""
    for name in names:
        if isinstance(value, dict) and name not in value:
            yield InvalidValue("Field required", path=[name])


_ArgumentsValidator: Any = cast(Any, extend)(Draft202012Validator, {"required": _check_required})


def _faults(tool: _Tool, arguments: JSONObject) -> list[dict[str, str]]:
    """What apcore finds wrong with arguments, each field by its full path: `{"field": "sizes.0.width", ...}`; the first
    twenty.

    Only arguments for a dict schema are shown to jsonschema, as apcore does itself: for a pattern, it may take minutes
    where a pydantic model takes milliseconds."""
    return [*itertools.islice(_each_fault(tool, arguments), _ERRORS_MAX)]


def _each_fault(tool: _Tool, arguments: JSONObject) -> Iterator[dict[str, str]]:
    unknown = dict.fromkeys(_unknown_arguments(tool, arguments))  # in their order
    for name in unknown:
        yield _fault([name], "extra_forbidden", "Extra inputs are not permitted")
    if not hasattr(tool.model, "model_validate_json"):
        known = {name: value for name, value in arguments.items() if name not in unknown}
        for error in _ArgumentsValidator(tool.input_schema).iter_errors(known):
            yield from _leaves(error)
        return
    try:
        tool.model.model_validate_json(json.dumps(arguments, default=str), strict=True)
    except ValidationError as error:
        yield from _pydantic_faults(error, arguments)


# Messages of pydantic's that name a class or a function of the module's, by their type.
_IMPERSONAL = {
    **dict.fromkeys(["model_type", "model_attributes_type", "dataclass_type"], "Input should be an object"),
    **dict.fromkeys(["union_tag_invalid", "union_tag_not_found"], "Input is none of the forms that are expected"),
    **dict.fromkeys(["is_instance_of", "is_subclass_of", "dataclass_exact_type"], "Input is not of the right type"),
}


def _pydantic_faults(error: ValidationError, values: Any) -> Iterator[dict[str, str]]:
    """What pydantic finds wrong with `values`. Its own paths also name classes and functions, where it has looked."""
    for each in error.errors():
        path = []
        value = values
        for step in cast(tuple[Any, ...], each["loc"]):
            is_item = isinstance(value, list | tuple) and isinstance(step, int) and step < len(value)
            if is_item or (isinstance(value, dict) and step in value):
                value = value[step]
                path.append(step)
        if each["type"] == "missing":
            path.append(each["loc"][-1])
        message = each["msg"]
        if each["type"] in _IMPERSONAL and not str(each.get("ctx", {}).get("discriminator")).startswith("'"):
            message = _IMPERSONAL[each["type"]]
        yield _fault(path, each["type"], message)


def _unknown_arguments(tool: _Tool, arguments: JSONObject) -> list[str]:
    """The arguments that a function does not take. apcore would pass them on, and Python raise a TypeError."""
    return [name for name in arguments if tool.is_closed and name not in tool.input_schema["properties"]]


# An error of these keywords, this deep in a branch of a union, tells that another branch was meant: the type of the
# value itself, or a property that works as a tag.
_OTHER_BRANCH = {("type", 0), ("const", 1), ("enum", 1)}


def _leaves(error: Any) -> Iterator[dict[str, str]]:
    """An error of jsonschema's as faults; for a union those of the branches that may have been meant, or of all."""
    others = {inner.schema_path[0] for inner in error.context if (inner.validator, len(inner.path)) in _OTHER_BRANCH}
    meant = [inner for inner in error.context if inner.schema_path[0] not in others]
    for inner in meant or error.context:
        yield from _leaves(inner)
    if not error.context:
        yield _fault(error.absolute_path, error.validator, error.message)


_HAS_MARKS = weakref.WeakKeyDictionary[Any, bool]()  # by schema: to read one takes longer than a call


_SIDES = ("input_schema", "output_schema")


def _has_marks(module: Any, side: str) -> bool:
    """Whether a module marks anything `x-sensitive` in its `input_schema` or `output_schema` (the `side`), in any form
    that its values have."""
    schema: Any = getattr(module, side, None)
    if schema is None or isinstance(schema, dict):
        return _marks_sensitive(schema or {})
    try:
        if schema not in _HAS_MARKS:
            declared = _output_type(module) if side == "output_schema" else schema
            _HAS_MARKS[schema] = any(map(_marks_sensitive, _representations(declared, schema.model_json_schema())))
        return _HAS_MARKS[schema]
    except Exception:  # fail closed: it may be a user's own class, of which no JSON schema can be made
        return True


_LOG_CHARACTERS = 10_000  # of an error's text in the log
# Where Python itself and what is installed stand; and this file.
_LIBRARIES = (*(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")), __file__)


def _place_of(error: BaseException) -> str:
    """Where `error` was raised, as `shop.py:12 in charge`: the last line that is not in a library, or else the last."""
    frames = traceback.extract_tb(error.__traceback__)
    own_frames = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)] or frames
    if not own_frames:
        return "an unknown place"
    return f"{os.path.basename(own_frames[-1].filename)}:{own_frames[-1].lineno} in {own_frames[-1].name}"


def _cause_of(error: BaseException) -> BaseException:
    """What a module raised, where apcore's Executor has wrapped it, or else `error` itself."""
    return (error.cause if isinstance(error, ModuleExecuteError) else None) or error


@dataclasses.dataclass
class _ErrorMapper:
    """Says what went wrong with one call: to the client in a plain sentence, to the log in full. It never raises.

    Where a module that took part in the call has `x-sensitive` inputs, both learn no more than what failed and where:
    no text that a module or a validator wrote, as nobody can tell how it spells a secret. With `x-sensitive` outputs,
    the same holds for the log."""

    label: str
    tool: _Tool
    arguments: JSONObject
    modules: Iterable[Any]  # that took part in the call
    registry: Registry
    trace_id: str
    has_marks: bool = False  # whether a module has returned a model that marks something

    def to_result(self, error: BaseException) -> JSONObject:
        """The tool result for `error`, which is logged (FR-ERROR-001 to -011, FR-LOG-003)."""
        try:
            return self._told_and_logged(error)
        except Exception as failure:  # boundary: what a module's author puts into an error may be anything
            self._log(error, f"(not shown: reading it raised {type(failure).__name__})")
            return _failure(_UNEXPECTED, "GENERAL_INTERNAL_ERROR")

    def _told_and_logged(self, error: BaseException) -> JSONObject:
        """The result of `to_result`; may raise where a module's own exception has attributes of odd types."""
        step = getattr(error.__context__, "step_name", "")  # of apcore's pipeline
        if step == "output_validation" and isinstance(_cause_of(error), RecursionError):  # apcore follows a cycle
            error = ModuleError("OUTPUT_SERIALIZATION_ERROR", "output is not JSON: it holds itself")
        modules = [*self._modules_behind(error)]
        has_secret_inputs = any(_has_marks(module, "input_schema") for module in modules)
        has_secret_outputs = self.has_marks or any(_has_marks(module, "output_schema") for module in modules)
        result = self._failure_of(error, step, has_secret_inputs)
        self._log_cause(_cause_of(error), is_withheld=has_secret_inputs or has_secret_outputs)
        return result

    def _failure_of(self, error: BaseException, step: str, is_withheld: bool) -> JSONObject:
        """What the client is told of `error`, which came up in a `step` of apcore's pipeline."""
        cause = _cause_of(error)
        code = "GENERAL_INTERNAL_ERROR"
        text = _UNEXPECTED
        report: JSONObject = {}
        if isinstance(error, ModuleError):
            code = _text_of(error.code)
            report = {"retryable": error.retryable, "user_fixable": error.user_fixable}
        if isinstance(cause, ModuleError):
            text, details = self._explain(cause, step, is_withheld)
            report.update(details)
        failure = _failure(text, code, **{key: value for key, value in report.items() if value is not None})
        plain: JSONObject = _plain(failure)  # raises for what a module's author has put into it and JSON cannot say
        return plain

    def _modules_behind(self, error: BaseException | None) -> Iterator[Any]:
        """The modules that took part in the call. Those that another Executor ran are known only by apcore's errors."""
        yield self.tool.descriptor
        yield from self.modules
        while error is not None:
            if isinstance(error, ModuleError):
                yield from map(self.registry.get, error.details.get("call_chain", ()))
            error = error.__context__

    def _log_cause(self, cause: BaseException, *, is_withheld: bool) -> None:
        """Log what went wrong, with the traceback of what nobody expected."""
        if is_withheld:
            self._log(cause, f"(not shown: it may quote sensitive values) at {_place_of(cause)}")
        else:
            self._log(cause, str(getattr(cause, "message", cause)), None if isinstance(cause, ModuleError) else cause)

    def _log(self, error: BaseException, text: str, trace: BaseException | None = None) -> None:
        text = _one_line(text[:_LOG_CHARACTERS])[:_LOG_CHARACTERS]
        line = "Tool call error: %s - %s: %s (trace %s)"
        extra = {"trace_id": self.trace_id}
        kind = next(cls for cls in type(error).__mro__ if cls.__module__ != __name__)  # apcore's, of one of ours
        logger.error(line, self.label, kind.__name__, text, self.trace_id, exc_info=trace, extra=extra)

    def _explain(self, error: ModuleError, step: str, is_withheld: bool) -> tuple[str, JSONObject]:
        """What the client reads of apcore's or a module's `error`, and what is reported beside that text."""
        own_chain = [self.tool.module_id]
        is_own = error.details.get("call_chain", own_chain) == own_chain
        if isinstance(error, SchemaValidationError) and is_own:
            return self._explain_validation(error, step, is_withheld)
        if isinstance(error, _OwnError):
            return error.message, {}
        sentence = _sentence(error.code, is_withheld=is_withheld)
        if _unasked(error):
            return f"{sentence}: nobody can be asked", {}
        facts = {"timeout_ms": 0, **error.details, "code": error.code, "message": error.message}
        text = _text_of(sentence.format_map(facts))
        report: JSONObject = {}
        if isinstance(error, SchemaValidationError):  # this module called another one with wrong arguments
            report["user_fixable"] = False
        if error.code == "MODULE_TIMEOUT":
            report["error_details"] = {"timeout_ms": facts["timeout_ms"]}
        if is_own and not is_withheld and error.code not in ErrorCodeRegistry().all_codes:
            # The code and so the advice are the module's own; apcore's advice may name modules and callers.
            if error.suggestion:
                report["suggestion"] = _text_of(error.suggestion)
            if error.ai_guidance:
                report["ai_guidance"] = _text_of(error.ai_guidance)
                text += f"\n{report['ai_guidance']}"
        return text, report

    def _explain_validation(self, error: SchemaValidationError, step: str, is_withheld: bool) -> tuple[str, JSONObject]:
        """The text for arguments or an output of the tool itself that break their schema: a line for each field."""
        title = "Input validation failed"
        report: JSONObject = {}
        faults: list[dict[str, str]] = []
        # Of a dict schema's output, apcore 0.32 says that the input is invalid; the step that failed knows better.
        if isinstance(error, _RefusedOutput):
            title = "Output validation failed (the tool has run)"
            report["user_fixable"] = False
            is_withheld = True  # the values are the module's, and the client has no use for them
        elif step in ("approval_gate", "input_validation"):
            faults = _faults(self.tool, self.arguments)
        if not faults:  # the module itself refuses the arguments, or middleware has changed them
            faults = [*map(_fault_of, itertools.islice(error.details.get("errors") or (), _ERRORS_MAX))]
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


# ---- Documents: a tool's documentation for people; pure ----


def _sample(schema: JSONSchema) -> Any:
    """An example of `schema`: its own, or the plainest value of its type; None when it accepts neither."""
    own = [*schema.get("examples", ()), *schema.get("enum", ()), schema.get("const"), schema.get("default")]
    required = {name: _sample(_properties(schema).get(name, {})) for name in schema.get("required", ())}
    text = None if "format" in schema else "text"
    for value in [*own, text, 1, 0.5, True, [], required]:
        if value is not None and _is_valid(value, schema):
            return value
    return None


def _examples(tool: _Tool) -> list[JSONObject]:
    """The module's own examples that are valid calls, in plain JSON types."""
    with suppress(Exception):  # apcore checks nothing of what a module lists as examples
        examples = _plain(tool.descriptor.examples)
        return [each for each in examples if _is_valid(each["inputs"], tool.input_schema)]
    return []


def _fenced(value: Any) -> str:
    return f"```json\n{json.dumps(value, indent=2)}\n```"


def _fields(schema: JSONSchema) -> str:
    """A schema as a table of its properties, and as JSON."""
    table = "| Name | Type | Required | Description | Example |\n| --- | --- | --- | --- | --- |\n"
    for name, field in _properties(schema).items():
        types = " or ".join(dict.fromkeys(name for part in _in_place(field) for name in _types(part))) or "any"
        is_required = "Yes" if name in schema.get("required", ()) else "No"
        example = _sample(field)
        example_text = "" if example is None else f"`{to_json(example).decode()}`"
        cells = [f"`{name}`", types, is_required, field.get("description", ""), example_text]
        escaped = [" ".join(cell.replace("|", r"\|").split()) for cell in cells]
        table += f"| {' | '.join(escaped)} |\n"
    return f"{table}\n{_fenced(schema)}"


_NOTES = {
    "readonly": "It only reads.",
    "destructive": "It may destroy data that cannot be brought back.",
    "requires_approval": "A person has to approve each call.",
    "open_world": "It reaches systems outside of this one.",
}


def _document(tool: _Tool) -> str:
    """One tool in the eight sections of the tool document specification, from its descriptor."""
    module_id = tool.module_id
    annotations = tool.about.annotations
    documentation = re.sub(r"(?m)^(?=#{1,3} )", "###", tool.documentation)  # its headings go below ours
    purpose = f"{tool.about.description}\n\n{documentation}".strip()
    returns = _fields(tool.output_schema) if tool.output_schema else "Not declared."
    for name, media_type in tool.media.items():
        returns += f"\n\n`{name}` comes as content of type `{media_type}`."
    sentences = {code: _sentence(code) for code in _SENTENCES}
    errors = {"SCHEMA_VALIDATION_ERROR": "Input validation failed", **sentences, "MODULE_EXECUTE_ERROR": _UNEXPECTED}
    failures = "\n".join(f"- `{code}`: {text}" for code, text in errors.items())
    is_repeatable = annotations.readonly or annotations.idempotent
    usage = ""
    for example in _examples(tool) or [{"inputs": _sample(tool.input_schema)}]:
        if example["inputs"] is not None:
            params = {"name": module_id, "arguments": example["inputs"]}
            usage += _fenced({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}) + "\n\n"
    notes = [note for flag, note in _NOTES.items() if getattr(annotations, flag)]
    if tool.marks or _marks_sensitive(tool.input_schema):
        notes.append("It handles sensitive values: no message or log shows them, and results show `***REDACTED***`.")
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

{"Idempotent: to repeat it changes nothing." if is_repeatable else "Not idempotent: each counts."}

### 7. Usage Examples (for MCP context)

{usage.strip() or "None can be made up from the schema."}

### 8. Security Considerations

{" ".join(notes) or "None known."}
"""


# ---- Files: a folder's modules: loaded, loaded again when their files change, and removed with them; any thread ----

_IGNORED_NAMES = re.compile(r"[._]|node_modules$")  # of files and folders that are neither loaded nor looked at
_BINDING_FILES = (".binding.yaml", ".binding.yml")
_MODULE_FILES = (".py", "_meta.yaml", *_BINDING_FILES)
_LOOK_SECONDS = 0.5  # from one look at the files of modules to the next, with `dynamic`
_FileState = tuple[int, int, int] | str  # a file's inode, time and size; or what keeps it from being read


def _leave_out(what: object, reason: str, messages: list[str]) -> None:
    """Warn that something is not served and why, and keep that in `messages`, whatever the log level is."""
    messages.append(f"{what} is left out: {reason}")
    logger.warning("%s", messages[-1])


@contextmanager
def _left_out(what: str, messages: list[str], path: str = "") -> Iterator[None]:
    """One bad module never takes the others down: whatever it raises, SystemExit included, becomes a WARNING. Of what
    comes from a file, at `path`, it names the line."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        line = _line_in(path, error)
        place = f" ({os.path.basename(path)}:{line})" if line else ""
        _leave_out(what, f"{_reason(error)}{place}", messages)


def _line_in(path: str, error: BaseException) -> int | None:
    """The line of a file at which `error` was raised, as far as its own code went; None where it had no part in it."""
    if isinstance(error, SyntaxError) and error.filename == path:
        return error.lineno
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
    return lines[-1] if lines else None


def _reason(error: BaseException) -> str:
    """What went wrong with a module, and what that came from if its author said so."""
    if isinstance(error, PydanticSchemaGenerationError) and repr(CancelToken) in str(error):  # a Context has one
        return "apcore knows its Context in one form: write `context: Context`, without brackets and without None"
    said = error.msg if isinstance(error, SyntaxError) else error  # without the line, which `_left_out` adds
    text = f"{type(error).__name__}: {_text_of(said)}"
    if error.__cause__ is not None:
        text += f" ({type(error.__cause__).__name__}: {_text_of(error.__cause__)})"
    return text


@contextmanager
def _apcore_warnings() -> Iterator[list[logging.LogRecord]]:
    """What apcore warns of on this thread meanwhile, whatever the levels of its loggers: it is ours to tell, with the
    file that it is about."""
    records: list[logging.LogRecord] = []
    thread = threading.get_ident()
    loggers = [logging.getLogger(name) for name in [*logging.root.manager.loggerDict] if name.startswith("apcore.")]

    def take(record: logging.LogRecord) -> bool:
        is_ours = record.thread == thread and record.levelno >= logging.WARNING
        if is_ours:
            records.append(record)
        return not is_ours

    with ExitStack() as stack:
        for each in loggers:
            each.addFilter(take)
            stack.callback(each.removeFilter, take)
            if not each.isEnabledFor(logging.WARNING):
                stack.callback(each.setLevel, each.level)
                stack.callback(setattr, each, "disabled", each.disabled)
                each.setLevel(logging.WARNING)
                each.disabled = False
        yield records


_ANNOTATIONS = frozenset(field.name for field in dataclasses.fields(ModuleAnnotations))
# What a name that was meant for `annotations`, or for one without which more would run or be shown, has in it.
_MAY_GUARD = re.compile("ap+r?o|require|destr|uctiv|discov|annot", re.IGNORECASE)
_APCORE_DECORATOR = "apcore.decorator"  # the logger that tells which annotations of a function apcore drops


def _passed_over(annotations: Iterable[object], others: Iterable[str] = ()) -> str:
    """A sentence about the names in a module's `annotations`, of which there may be several, that apcore passes over,
    and about `others` that it has passed over; "" for none. ValueError where one may stand for a guard: a module that
    ought to be approved is not served as if it were none, unless it requires approval."""
    names = [*others]
    is_guarded = False
    for each in annotations:
        if isinstance(each, dict):
            names += [str(name) for name in each if name not in _ANNOTATIONS]
            is_guarded |= bool(each.get("requires_approval"))
        elif isinstance(each, ModuleAnnotations):
            is_guarded |= each.requires_approval
        elif each is not None:
            raise TypeError(f"its annotations are neither ModuleAnnotations nor a dict: {each!r}")
    if not names:
        return ""
    known = ", ".join(sorted(_ANNOTATIONS))
    sentence = f"apcore passes over {', '.join(names)}: the annotations of a module are {known}"
    if not is_guarded and any(map(_MAY_GUARD.search, names)):
        raise ValueError(sentence)
    return sentence


class _Files:
    """The files below a registry's extensions directories, and the modules that each of them has defined.

    `update()` loads what is new or has changed and unregisters what has gone, each at the cost of that file alone. What
    cannot be loaded is left out with a WARNING until its file changes, or the ID is free that another module has. A
    change counts when two looks agree on it: half of a save, such as metadata that is empty for a moment, may say that
    a module needs no approval. Any thread; one update at a time."""

    def __init__(self, registry: Registry) -> None:
        # Weak, so that `_files_of` keeps no registry alive. `Any`, because only private attributes tell where apcore
        # looks for files, which IDs it replaces and whom it asks before a file runs; nothing else reads them.
        self._registry: Any = weakref.proxy(registry)
        self._lock = threading.Lock()
        self._states: dict[str, _FileState] = {}  # by path, as they count
        self._seen: dict[str, _FileState] | None = None  # by path, as the last look found them
        self._looked_at = 0.0  # on the clock of `time.monotonic`
        self._registered: dict[str, str] = {}  # by module ID, the path of its file
        self._waiting: set[tuple[str, str]] = set()  # a path, and the module ID that another module has
        self.left_out: list[str] = []  # by the last update, as the WARNINGs say it
        self.warned: list[str] = []  # of what the last update has loaded all the same
        self.checked: set[str] = set()  # the IDs of modules that have been warned of where that is due
        self._records: list[Any] = []  # of what apcore warns while a file is loaded
        if registry.list():  # what its own `discover()` has loaded stays until its file changes
            self._states = self._seen = self._look()
            self._registered = {self._module_id(path): path for path in self._states}

    def update(self) -> None:
        """Take in what has changed and was the same at the last look: at first, everything."""
        with self._lock:
            if self._seen is not None and time.monotonic() - self._looked_at < _LOOK_SECONDS / 2:
                return  # two servers of one registry look at different times
            self.left_out = []
            self.warned = []
            before = self._states
            states = self._look()
            edited = _changed_files(states if self._seen is None else self._seen, states)
            self._seen = states
            self._looked_at = time.monotonic()
            self._states = {path: state for path, state in states.items() if _file_of(path) not in edited}
            self._states |= {path: state for path, state in before.items() if _file_of(path) in edited}
            changed = _changed_files(before, self._states)
            # Only what was free at the start, so that a file that is edited keeps its IDs.
            free = {path for path, module_id in self._waiting if not self._registry.has(module_id)}
            changed |= free - edited
            self._waiting = {(path, module_id) for path, module_id in self._waiting if path not in changed}
            # All that goes before any that comes: an ID may have moved from one file to another.
            for module_id, path in [*self._registered.items()]:
                if path in changed:
                    del self._registered[module_id]
                    self.checked.discard(module_id)
                    with _left_out(f"Module {module_id}", self.left_out):
                        self._registry.unregister(module_id)
            paths = sorted(changed.intersection(self._states))
            if paths:
                self._load_all(paths)

    def _roots(self) -> dict[str, JSONObject]:  # as the Registry was configured with them, by their real paths
        return {os.path.realpath(root["root"]): root for root in self._registry._extension_roots}

    def _look(self) -> dict[str, _FileState]:
        """Each file that may define modules, or describe them, by its path."""
        return {path: state for root in self._roots() for path, state in _walk(root, root, ())}

    def _module_id(self, path: str) -> str:
        """The ID that apcore makes of a path: `text.shout` of `text/shout.py`. A link has the ID of its own path;
        apcore's look-up follows it first, and a ConfigMap's `shop.py` would be `..2026_11_23.shop`."""
        roots = self._roots()
        folder = next(folder for folder in roots if Path(path).is_relative_to(folder))
        relative = os.path.relpath(path, folder)
        if relative in self._registry._id_map:
            return str(self._registry._id_map[relative]["id"])
        parts = Path(relative).with_suffix("").parts
        if len(roots) > 1 or "namespace" in roots[folder]:
            parts = (roots[folder].get("namespace") or Path(roots[folder]["root"]).name, *parts)
        return ".".join(parts)

    def _load_all(self, paths: Iterable[str]) -> None:
        """Load files, and tell what apcore warns of meanwhile with the file that it is about."""
        with _apcore_warnings() as self._records:
            for path in paths:
                with _left_out(path, self.left_out, path):
                    self._load(path)
                for record in self._records:
                    if record.name != _APCORE_DECORATOR:  # of which `_register` tells
                        self._warn(path, record.getMessage())
                self._records.clear()

    def _load(self, path: str) -> None:
        """Register what a file defines or binds. What of it cannot be is left out by its name."""
        self._check_state(path)
        if path.endswith(_BINDING_FILES):
            self._load_bindings(path)
            return
        metadata_path = path.removesuffix(".py") + "_meta.yaml"
        self._check_state(metadata_path)  # it may say that a module requires approval: never without it
        metadata = load_metadata(Path(metadata_path))
        self._check_state(metadata_path)
        if self._registry._pre_approval_hook:
            self._registry._pre_approval_hook(Path(path))
        module_id = self._module_id(path)
        contents = _run_file(path, f"apcore_ext.{module_id}")
        own = [value for value in contents.values() if getattr(value, "__module__", "") == contents["__name__"]]
        has_functions = self._load_functions(path, own)
        for name, value in contents.items():
            # `from apcore import module` is another one, which takes a function for an ID and returns its inner one.
            if inspect.isfunction(value) and value.__module__ == APCore.__module__:
                reason = "`from apcore import module` needs @module(): take `from apcore.decorator import module`"
                _leave_out(f"{path}: function {name}", reason, self.left_out)
        has_classes = self._load_class(path, own, module_id, metadata)
        if not has_functions and not has_classes:
            hint = "a function needs @module (from apcore.decorator import module), a class execute() and input_schema"
            logger.info("%s defines no module: %s", path, hint)

    def _check_state(self, path: str) -> None:
        """OSError for a file that cannot be read, and for one that has changed since the look."""
        state = self._states.get(path)
        if isinstance(state, str):
            raise OSError(f"{os.path.basename(path)} {state}")
        if state != _state_of(path):
            raise OSError(f"{os.path.basename(path)} is being written")

    def _load_bindings(self, path: str) -> None:
        """Register what a `*.binding.yaml` file binds, also of files beside it."""
        folder = os.path.dirname(path)
        if folder not in sys.path:
            sys.path.append(folder)
        document = _binding_document(path)
        self._check_state(path)
        if document.get("spec_version") != "1.0":
            self._warn(path, f"spec_version is {document.get('spec_version')!r}, and apcore knows '1.0'")
        for number, entry in enumerate(document["bindings"], 1):
            name = f"number {number}"
            if isinstance(entry, dict):
                name = entry.get("module_id", name)
            with _left_out(f"{path}: binding {name}", self.left_out):
                module = _bound(entry, path)
                self._register(path, module.module_id, module)

    def _load_functions(self, path: str, values: Iterable[Any]) -> bool:
        """Register the functions with `@module` among `values`, what a file defines; returns whether there are any."""
        functions = [value for value in values if hasattr(value, "apcore_module")]
        for function in dict.fromkeys(functions):  # each once, whatever names it has
            with _left_out(f"{path}: function {function.__name__}", self.left_out, path):
                module = function.apcore_module
                self._register(path, module.module_id.removeprefix("apcore_ext."), module)
        return bool(functions)

    def _load_class(self, path: str, values: Iterable[Any], module_id: str, metadata: JSONObject) -> bool:
        """Register the module class among `values`, what a file defines; returns whether anything looks like one."""
        entry_point = metadata.get("entry_point", "").rpartition(":")[2]
        classes = _module_classes(values, entry_point)
        complete = [cls for cls in classes if not _module_faults(cls)]
        complete.sort(key=_has_models, reverse=True)
        for cls in classes:
            with _left_out(f"{path}: class {cls.__name__}", self.left_out, path):
                if cls not in complete:
                    raise TypeError("; ".join(_module_faults(cls)))
                if cls is not complete[0]:
                    raise TypeError(f"{complete[0].__name__} is the module of this file: give it a file of its own")
                version = str(metadata.get("version") or getattr(cls, "version", "1.0.0"))
                self._register(path, module_id, cls(), version, metadata)
        if entry_point and not classes:
            reason = "entry_point in the file's metadata names it, and no such class has execute() and input_schema"
            _leave_out(f"{path}: class {entry_point}", reason, self.left_out)
        return bool(entry_point or classes)

    def _register(
        self, path: str, module_id: str, module: Any, version: str | None = None, metadata: JSONObject | None = None
    ) -> None:
        if self._registry.has(module_id):  # `register` would take a class for another version of what is there
            self._waiting.add((path, module_id))
            owner = self._registered.get(module_id, "a module that comes from no file")
            raise ValueError(f"the module ID {module_id} belongs to {owner}")
        fault = _execute_fault(module)
        if fault:
            raise TypeError(fault)
        metadata = metadata or {}
        misplaced = [name for name in map(str, metadata) if name in _ANNOTATIONS or re.match("annot(?!ations$)", name)]
        dropped = [  # of a function's, when apcore made a module of it: only its log tells
            str(name)
            for record in self._records
            if record.name == _APCORE_DECORATOR and record.args[0] == getattr(module, "module_id", None)
            for name in record.args[1]
        ]
        annotations = (getattr(module, "annotations", None), metadata.get("annotations"))
        text = _passed_over(annotations, [*dropped, *misplaced])
        if text:
            self._warn(path, f"module {module_id}: {text}")
        if isinstance(module, FunctionModule) and isinstance(module.input_schema, _Model):
            for parameter in inspect.signature(_function_of(module)).parameters.values():
                if parameter.kind is parameter.VAR_POSITIONAL:
                    lost = f"*{parameter.name} is no argument of the tool, and empty in each call: take a list"
                    self._warn(path, f"module {module_id}: {lost}")
        self.checked.add(module_id)
        self._registry.register(module_id, module, version, metadata)
        self._registered[module_id] = path

    def _warn(self, path: str, text: str) -> None:
        """Warn of what is served, and lets `--check` fail all the same."""
        self.warned.append(f"{path}: {text}")
        logger.warning("%s", self.warned[-1])


def _file_of(path: str) -> str:
    """The file that `path` is part of: metadata is part of the one that it describes."""
    return path.removesuffix("_meta.yaml") + ".py" if path.endswith("_meta.yaml") else path


def _changed_files(before: dict[str, _FileState], after: dict[str, _FileState]) -> set[str]:
    """The files that have changed, or whose metadata has."""
    return {_file_of(path) for path, _ in before.items() ^ after.items()}


_MODULE_PARTS = ("execute", "input_schema", "output_schema", "description")


def _module_classes(values: Iterable[Any], entry_point: str) -> list[type]:
    """The classes that have all or all but one of a module's parts and are meant to be one: the one that `entry_point`
    names, or all but those to derive from: private ones, those with abstract methods of their own, and unfinished
    bases."""
    classes = [cls for cls in dict.fromkeys(filter(inspect.isclass, values)) if _looks_like_module(cls)]
    if entry_point:
        return [cls for cls in classes if cls.__name__ == entry_point]
    modules = []
    for cls in classes:
        is_abstract = any(name in vars(cls) for name in getattr(cls, "__abstractmethods__", ()))
        is_base = any(other is not cls and issubclass(other, cls) for other in classes)
        if not (cls.__name__.startswith("_") or is_abstract or (is_base and _module_faults(cls))):
            modules.append(cls)
    return modules


def _looks_like_module(cls: type) -> bool:
    parts = [name for name in _MODULE_PARTS if getattr(cls, name, None) is not None]
    return {"execute", "input_schema"}.issubset(parts) or len(parts) == len(_MODULE_PARTS) - 1


def _has_models(cls: type) -> bool:
    """Whether apcore's own discovery would take a class: the one with models is the module, not a helper of dicts."""
    return all(isinstance(getattr(cls, name), _Model) for name in ("input_schema", "output_schema"))


def _module_faults(cls: type) -> list[str]:
    """What keeps a class from being a module; apcore's `validate_module` knows no dict schemas, `register` does."""
    faults = []
    for name in ("input_schema", "output_schema"):
        if not isinstance(getattr(cls, name, None), (dict, _Model)):
            faults.append(f"its {name} is neither a pydantic model nor a dict")
    description = getattr(cls, "description", None)
    if not description or not isinstance(description, str):
        faults.append("it has no description")
    if not callable(getattr(cls, "execute", None)):
        faults.append("it has no execute()")
    if inspect.isabstract(cls):
        faults.append("it is abstract")
    return faults


def _execute_fault(module: Any) -> str:
    """Why every call of a module would fail, whatever it is given; "" where that cannot be seen."""
    execute = _function_of(module) if isinstance(module, FunctionModule) else module.execute
    if inspect.isasyncgenfunction(execute) or inspect.isgeneratorfunction(execute):
        return f"{execute.__name__}() is a generator, which has no result: it returns a dict, and stream() yields"
    code = getattr(execute, "__code__", None)
    if code is not None and (code.co_argcount, code.co_kwonlyargcount) == (2 + inspect.ismethod(execute), 0):
        return ""  # as nearly all; to read a signature takes ten times as long
    if not isinstance(module, FunctionModule):
        with suppress(ValueError):  # written in C
            signature = inspect.signature(execute)
            try:
                signature.bind({}, None)
            except TypeError as error:
                return f"its execute() does not take (inputs, context): {error}"
    return ""


def _state_of(path: str) -> _FileState | None:
    """What tells a change of a file; None where there is none to read."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return (status.st_ino, status.st_mtime_ns, status.st_size)


def _walk(path: str, root: str, folders: tuple[str, ...]) -> Iterator[tuple[str, _FileState]]:
    """The files at and below `path` that are looked at, also through links as long as these stay below `root`.

    `folders` are the real paths of those that lead here: a link back to one of them would have no end."""
    is_module_file = path.endswith(_MODULE_FILES)
    try:
        status = os.stat(path)
        is_folder = stat.S_ISDIR(status.st_mode)
        real_path = os.path.realpath(path) if is_folder or os.path.islink(path) else path  # of files: only links ask
        if real_path != path and (is_folder or is_module_file) and not Path(real_path).is_relative_to(root):
            yield path, f"is a link out of the extensions directory, to {real_path}"
        elif is_folder and real_path not in folders:
            for name in itertools.filterfalse(_IGNORED_NAMES.match, os.listdir(path)):
                yield from _walk(os.path.join(path, name), root, (*folders, real_path))
        elif is_module_file and not is_folder:
            yield path, (status.st_ino, status.st_mtime_ns, status.st_size)
    except OSError as error:
        # A folder that has just gone is no fault, nor is a link to nothing by a name that is no module's.
        if is_module_file or not isinstance(error, FileNotFoundError):
            yield path, f"cannot be read: {error.strerror}"


def _run_file(path: str, name: str) -> JSONObject:
    """Run a file as the Python module `name`, of which `@module` makes the IDs of functions: what it contains, by name.
    From its source, as Python's cache takes two edits of one size within one second for the same."""
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # where dataclasses and pydantic look for what an annotation names
    sys.modules.setdefault("apcore_ext", ModuleType("apcore_ext"))  # pickle imports it, too
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(module))
    return dict(vars(module))


def _read_yaml(path: str | Path) -> Any:
    """What a YAML file says in the types of JSON, so that a date is a text, and in UTF-8 whatever the locale; apcore's
    error where it is no YAML."""
    try:
        return to_jsonable_python(yaml.safe_load(Path(path).read_bytes()))
    except yaml.YAMLError as error:
        raise BindingFileInvalidError(file_path=str(path), reason=f"YAML parse error: {error}") from None


_BINDING_KEYS = frozenset(
    "module_id target description documentation input_schema output_schema auto_schema schema_ref tags version"
    " annotations metadata".split()
)
_SCHEMAS = ("input_schema", "output_schema")


def _binding_document(path: str) -> JSONObject:
    """What a binding file says. apcore's own loader reads it in the locale's encoding, and loses all of a file by one
    bad entry; its rules and its words are kept."""
    document = _read_yaml(path)
    if document is None:
        reason = "File is empty"
    elif not isinstance(document, dict):
        reason = "Top-level must be a mapping"
    elif not document.keys() <= {"spec_version", "bindings"}:
        reason = f"Unknown top-level keys: {sorted(map(str, document.keys() - {'spec_version', 'bindings'}))}"
    elif "bindings" not in document:
        reason = "Missing 'bindings' key"
    elif not isinstance(document["bindings"], list):
        reason = "'bindings' must be a list"
    else:
        return document
    raise BindingFileInvalidError(file_path=path, reason=reason)


def _bound(entry: Any, path: str) -> FunctionModule:
    """The module of one entry of a binding file. Its schemas hold as they are written, dicts like those of a class: of
    what is in them, apcore would keep names and types. Without any, apcore makes models of the function's hints."""
    invalid = functools.partial(BindingFileInvalidError, file_path=path)
    if not isinstance(entry, dict):
        raise invalid(reason="Each binding entry must be a mapping")
    if not entry.keys() <= _BINDING_KEYS:
        raise invalid(reason=f"Unknown binding entry keys: {sorted(map(str, entry.keys() - _BINDING_KEYS))}")
    for key in ("module_id", "target"):
        if key not in entry:
            raise invalid(reason=f"Binding entry missing '{key}'")
    folder = os.path.dirname(path)
    outline = {**entry}  # the entry with schemas that say nothing
    reference = Path(folder, str(entry.get("schema_ref")))
    if not outline.keys() & {"auto_schema", *_SCHEMAS} and "schema_ref" in entry and reference.exists():
        written = _read_yaml(reference) or {}
        outline |= {side: written.get(side, {}) for side in _SCHEMAS}
        del outline["schema_ref"]
    schemas: dict[str, Any] = {side: outline[side] for side in _SCHEMAS if side in outline}
    outline |= {side: {} for side in schemas}
    # Private, as the public way into it takes a file and not an entry. It refuses what makes no schema, or more than
    # one, and knows each form of `auto_schema`.
    loader: Any = BindingLoader()
    module: FunctionModule = loader._create_module_from_binding(outline, folder, file_path=path)
    function = _function_of(module)
    beside = Path(folder, *function.__module__.split(".")).with_suffix(".py")
    if beside.exists() and not beside.samefile(str(sys.modules[function.__module__].__file__)):
        raise ImportError(f"another file has been imported as {function.__module__}: give {beside} a name of its own")
    for side, schema in schemas.items():
        if not isinstance(schema, dict):
            raise TypeError(f"its {side} is no mapping")
    if schemas:
        _check_parameters(function, schemas["input_schema"])
        # Without references: apcore checks the branches of a union alone, where none finds its definition. What cannot
        # be without them stays, and the catalog says what comes of it.
        with suppress(_Unconvertible):
            schemas["input_schema"] = _SchemaConverter().inline(schemas["input_schema"])
        with suppress(_Unconvertible):
            schemas["output_schema"] = _schema_of_results(_SchemaConverter().inline(schemas["output_schema"]))
        vars(module).update(schemas)  # it is declared to have models, and `register` takes dicts as well
    return module


def _check_parameters(function: Callable[..., Any], schema: JSONSchema) -> None:
    """TypeError where a function does not take what its schema names: each call with that would end as one."""
    with suppress(ValueError):  # written in C
        signature = inspect.signature(function, follow_wrapped=False)
        try:
            signature.bind_partial(**dict.fromkeys(_properties(schema)))
        except TypeError as error:
            raise TypeError(f"its input_schema names what {function.__name__}() does not take: {error}") from None


def _schema_of_results(schema: JSONSchema) -> JSONSchema:
    """The schema of what apcore makes of a function's results, which `schema` describes: a dict stays, None becomes
    `{}`, and any other value is put under `result`."""
    if _types(schema) == ["object"] or not schema.keys() & {"type", "anyOf", "oneOf", "enum", "const"}:
        return schema
    forms: list[JSONSchema] = [schema] if _admits_object(schema) else []
    forms.append({"type": "object", "properties": {"result": schema}, "required": ["result"]})
    if _is_valid(None, schema):
        forms.append({"type": "object", "maxProperties": 0})
    return forms[0] if len(forms) == 1 else {"anyOf": forms}


_FILES: weakref.WeakKeyDictionary[Registry, _Files] = weakref.WeakKeyDictionary()


def _files_of(registry: Registry) -> _Files:
    """The one loader of a registry: of two, each would load what the other has loaded."""
    return _FILES.get(registry) or _FILES.setdefault(registry, _Files(registry))


def _folder(extensions_dir: str) -> Registry:
    """A Registry of the files below one directory, none of them loaded."""
    if not os.path.exists(extensions_dir):
        raise ValueError(f"extensions directory does not exist: {extensions_dir}")
    if not os.path.isdir(extensions_dir):
        raise ValueError(f"extensions path is not a directory: {extensions_dir}")
    return Registry(extensions_dir=os.path.abspath(extensions_dir))


def discover(extensions_dir: str | os.PathLike[str]) -> Registry:
    """Load the modules of a directory, as the command line does: a Registry of them, to serve or to give an Executor.

    Takes module classes and functions with apcore's `@module` from `*.py` files, and what `*.binding.yaml` files bind.
    What cannot be loaded is left out with a WARNING that names it, and so is a link out of the directory. Names that
    begin with `_` or `.` and `node_modules` are not looked at. Source: FR-CLI-002. ValueError for no such directory.
    """
    registry = _folder(os.fspath(extensions_dir))
    _files_of(registry).update()
    return registry


# ---- Catalog: the registry as a list of tools that follows it, and who is offered which; any thread ----

# The IDs of modules that have been warned of: a catalog is made for each call of `run_openai_call`.
_WARNED: weakref.WeakKeyDictionary[Registry, set[str]] = weakref.WeakKeyDictionary()
_TOOLS_MAX = 128  # that OpenAI's API takes ("array too long. Expected an array with maximum length 128"), and VS Code


def _log_many(count: int) -> None:
    if count > _TOOLS_MAX:
        advice = "tags, prefix, exclude and read_only choose, or search lists two that find the others"
        logger.info("%d tools: OpenAI's API and VS Code take %d, Cursor some 40; %s", count, _TOOLS_MAX, advice)


class _ToolCatalog:
    """The registry's modules as listed tools, up to date whenever it is read.

    A registry event, from whatever thread, only notes which module changed; the next read builds that tool again and
    swaps in a new table. It follows the registry, and with `dynamic` the files, from `follow()` to `close()`."""

    def __init__(self, options: _Options) -> None:
        self._registry = options.registry
        self._options = options
        self._lock = threading.Lock()
        self._tools: dict[str, _Tool] = {}  # by module ID, sorted
        self._by_name: dict[str, _Tool] = {}  # by the portable form of ID and alias
        self._changed = {*self._registry.list()}
        self._closed = threading.Event()
        self.left_out: list[str] = []  # when modules were last built, as the WARNINGs say it

    def follow(self, on_change: Callable[[], object]) -> None:
        """Follow every change from now on; `on_change` is called on the thread of each."""
        self._on_change = on_change
        if self._options.dynamic:
            files = _files_of(self._registry)

            def look() -> None:
                while not self._closed.wait(_LOOK_SECONDS):
                    files.update()

            threading.Thread(target=look, name="apcore-mcp-files", daemon=True).start()
        for event in ("register", "unregister"):
            self._registry.on(event, self._note_change)
        self._changed.update(self._registry.list())  # listed after `on`, or a module could slip in between

    def close(self) -> None:
        self._closed.set()
        for event in ("register", "unregister"):
            self._registry.off(event, self._note_change)

    @property
    def tools(self) -> dict[str, _Tool]:
        """The listed tools by module ID, sorted by it; not to be written to."""
        self._refresh()
        return self._tools

    def why_empty(self) -> str:
        """Why no tool is listed, in the words of FR-SERVER-006 where there is none to list."""
        count = len(self._registry.list())
        if not count:
            return "No modules registered"
        causes = [name for name in ("prefix", "tags", "exclude", "read_only") if getattr(self._options, name)]
        if self.left_out:
            causes.append("the faults above")
        return f"All registered modules ({count}) are left out by {', '.join(causes)}"

    def find(self, name: str) -> _Tool | None:
        """The listed tool that a client calls `name`: its ID or its alias, with dots or with hyphens."""
        self._refresh()
        return self._by_name.get(_portable_name(name))

    @property
    def acls(self) -> list[ACL]:
        """The ACLs of the Executor, as it is now: those of its steps that have one."""
        steps = self._options.executor.current_strategy.steps
        return [step.acl for step in steps if isinstance(step, BuiltinACLCheck) and step.acl is not None]

    async def offered(self, tools: Iterable[_Tool], caller: Identity | None) -> list[_Tool]:
        """Those of `tools` that the Executor's ACL, as it is now, lets `caller` call: by a copy of its rules, as a list
        has no place in its audit. An ACL of another class may have more than rules, and decides about calls only."""
        offered = [*tools]
        for acl in self.acls:
            if type(acl) is ACL:
                check = ACL([*acl.rules], acl.default_effect).async_check_access
                context: Context[Any] = Context.create(identity=caller)
                offered = [tool for tool in offered if (await check(None, tool.module_id, context)).access == "allow"]
        return offered

    def build(self, module_id: str) -> _Tool | None:
        """The module as a tool; None when it cannot be one, or the options filter it out."""
        options = self._options
        if not module_id.startswith(options.prefix or "") or module_id.startswith(tuple(options.exclude or ())):
            return None
        with _left_out(f"Module {module_id}", self.left_out):
            module = self._registry.get(module_id)
            descriptor = self._registry.get_definition(module_id)
            if descriptor is None:
                raise ValueError("the registry has no definition of it")
            if not {*_tags_of(descriptor, module)}.issuperset(options.tags or ()):
                return None
            self._warn_once(module_id, module)
            if options.read_only and not (descriptor.annotations or _DEFAULT_ANNOTATIONS).readonly:
                return None
            return _Tool(descriptor, module, options)
        return None

    def _warn_once(self, module_id: str, module: Any) -> None:
        """Warn of a module registered by hand that says what apcore passes over, or that no call will get through to.
        ValueError where apcore may pass over its approval."""
        files = _FILES.get(self._registry)
        if isinstance(module, FunctionModule) or (files is not None and module_id in files.checked):
            return
        annotations = getattr(module, "annotations", None)
        texts = [text for text in (_passed_over([annotations]), _execute_fault(module)) if text]
        warned = _WARNED.setdefault(self._registry, set())
        if texts and module_id not in warned:
            warned.add(module_id)
            logger.warning("Module %s: %s", module_id, "; ".join(texts))

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
            tools = {module_id: tool for module_id, tool in self._tools.items() if module_id not in changed}
            for module_id in changed.intersection(self._registry.list()):
                tool = self.build(module_id)
                if tool is not None:
                    tools[module_id] = tool
            self._tools = dict(sorted(tools.items()))
            self._by_name = self._assign_names(self._tools.values())

    def _assign_names(self, tools: Collection[_Tool]) -> dict[str, _Tool]:
        """Name each tool by its alias where every client takes that name, and neither another's ID nor the alias of an
        earlier module is the same; else by its ID. Returns all by portable names."""
        by_name = {_portable_name(tool.module_id): tool for tool in tools}
        for tool in tools:
            alias = tool.about.alias
            if _ALIAS.fullmatch(alias) and by_name.setdefault(_portable_name(alias), tool) is tool:
                tool.name = alias
            elif tool.name != tool.module_id:  # or this has been warned of the last time
                tool.name = tool.module_id
                text = "The alias of module %s is not used: %s is no name for a tool, or another's as well"
                logger.warning(text, tool.module_id, alias)
        return by_name


# ---- Search: two tools in the place of all, one that finds tools and one that calls them; event loop only ----

_SEARCH_TOOLS = "search_tools"  # the names that the search transforms of FastMCP use
_CALL_TOOL = "call_tool"
_DESCRIPTORS = [
    ModuleDescriptor(
        module_id=_SEARCH_TOOLS,
        name="Search tools",
        description="Find tools of this server by what they do, as it lists none of them: up to ten, best first."
        " Call them with call_tool.",
        documentation=None,
        input_schema={
            "type": "object",
            "properties": {"query": {"type": "string", "description": "What a tool has to do, in a few words"}},
            "required": ["query"],
            "additionalProperties": False,
        },
        output_schema={},
        annotations=ModuleAnnotations(readonly=True, idempotent=True, open_world=False),
    ),
    ModuleDescriptor(
        module_id=_CALL_TOOL,
        name="Call a tool",
        description="Call a tool that search_tools has found, with arguments that fit its inputSchema.",
        documentation=None,
        input_schema={
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "The name of the tool"},
                "arguments": {"type": "object", "description": "Its arguments"},
            },
            "required": ["name"],
            "additionalProperties": False,
        },
        output_schema={},
        annotations=ModuleAnnotations(destructive=True),
    ),
]

_FOUND_MAX = 10  # tools in one answer
_QUERY_CHARACTERS_MAX = 1_000  # of a query, nothing behind these is read
_QUERY_WORDS_MAX = 50  # and no more words are looked for
_GROUPS_MAX = 50  # groups of tools that are named where nothing is found
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # where a word begins in camel case
# Chinese and Japanese put no spaces between words, so there each character is one.
_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
# Vowels and points that Python counts to no word: combining ones, Hebrew, Arabic, of India and of Thailand.
_VOWEL_SIGNS = r"\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0963\u0971-\u0dff\u0e31-\u0e4e"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|(?:[^\W_{_IDEOGRAPHS}]|[{_VOWEL_SIGNS}]){{2,}}")
# What plurals end in, and singulars whose plurals end otherwise: policies, boxes, branches, files; policy.
_ENDING = re.compile(r"(?<=\w\w)(ies|(?<=[sxz])es|(?<=[cs]h)es|s)$|(?<=\w{3}[^aeiou])y$")


def _words(text: str) -> list[str]:
    """The words of a text or a name, without case: `getUser_ids` has "get", "user" and "ids"."""
    return _WORD.findall(_HUMP.sub(" ", unicodedata.normalize("NFKC", text)).casefold())


@dataclasses.dataclass
class _Keywords:
    """The words of a tool's names, and all the words by which it is found, each with a space before it: `" repo" in
    everything` is true where a word begins with "repo". By `weight`, each word of a long name counts less."""

    names: str
    everything: str
    weight: float


def _keywords_of(tool: _Tool) -> _Keywords:
    names = [word for name in {tool.module_id, tool.name} for word in _words(name)]
    texts = [tool.about.title, tool.about.description, *tool.about.tags]
    for schema in _subschemas(tool.input_schema):
        texts += _properties(schema)
        texts.append(schema.get("description", ""))
    everything = names + _words("\n".join(texts))
    return _Keywords(" " + " ".join(names), " " + " ".join(everything), max(1, len(names)) ** -0.25)


def _rank(query: str, keywords: Mapping[_Tool, _Keywords]) -> list[_Tool]:
    """The tools that have any word of `query`, best first.

    A word also finds its plural and longer words; a rare one counts more, and one in a name three times as much. How
    well that works is measured by `python -m tests.benchmarks.search`."""
    scores = dict.fromkeys(keywords, 0.0)
    words = dict.fromkeys(_ENDING.sub("", word) for word in _words(query[:_QUERY_CHARACTERS_MAX]))
    for word in itertools.islice(words, _QUERY_WORDS_MAX):
        beginning = f" {word}"
        matching = [tool for tool in keywords if beginning in keywords[tool].everything]
        for tool in matching:
            rarity = math.log((len(keywords) + 1) / len(matching))
            scores[tool] += rarity * (3 if beginning in keywords[tool].names else 1)
    found = [tool for tool in keywords if scores[tool]]
    return sorted(found, key=lambda tool: scores[tool] * keywords[tool].weight, reverse=True)


class _SearchTools:
    """`search_tools` and `call_tool`, by which clients reach the tools of a catalog when the option `search` is on.

    `tools` are these two by name, or none. Neither can be called through the other: `call_tool` calls modules."""

    def __init__(self, catalog: _ToolCatalog, options: _Options) -> None:
        self._catalog = catalog
        self._registry = options.registry
        self._keywords = weakref.WeakKeyDictionary[_Tool, _Keywords]()
        self.tools: dict[str, _Tool] = {}
        if options.search:
            self.tools = {each.module_id: _Tool(each, None, options) for each in _DESCRIPTORS}

    def faults(self, name: str, arguments: JSONObject) -> list[dict[str, str]]:
        """What is wrong with the arguments of one of the two."""
        faults = _faults(self.tools[name], arguments)
        for fault in faults:
            # Not in jsonschema's words, which quote what may be marked in the schema of the tool that was meant.
            if name == _CALL_TOOL and fault["code"] != "required":
                fault["message"] = 'The form is {"name": "...", "arguments": {...}}, with an object as arguments'
        return faults

    async def answer(
        self, name: str, arguments: JSONObject, caller: Identity | None, name_of: Callable[[_Tool], str], trace_id: str
    ) -> JSONObject | None:
        """The result of a call of one of the two; None for a `call_tool` that is to call another.

        `search_tools` finds what `caller` is offered, under the name that `name_of` gives it."""
        label = _label(name, caller)
        faults = self.faults(name, arguments)
        if faults:
            error = SchemaValidationError("Input validation failed", faults)
            return _ErrorMapper(label, self.tools[name], arguments, [], self._registry, trace_id).to_result(error)
        if name == _CALL_TOOL:
            return None
        logger.debug("Tool call: %s", label)
        tools = await self._catalog.offered(self._catalog.tools.values(), caller)
        found = self._find(arguments["query"], tools)
        if not found:
            return _tool_result(_groups(tools))  # Codex shows its model nothing but structured content, if there is any
        listing = []
        for tool in found:
            schema = tool.input_schema
            listing.append({"name": name_of(tool), "description": tool.about.description, "inputSchema": schema})
        # Without structured content, Gemini CLI would take the text for it, and refuse an array.
        return _tool_result(_to_text(listing), structuredContent={"result": listing})

    def _find(self, query: str, tools: Iterable[_Tool]) -> list[_Tool]:
        keywords = {}
        for tool in tools:
            if tool not in self._keywords:
                self._keywords[tool] = _keywords_of(tool)
            keywords[tool] = self._keywords[tool]
        return _rank(query, keywords)[:_FOUND_MAX]


def _target_of(arguments: JSONObject) -> tuple[str, JSONObject]:
    """What the arguments of a `call_tool` name: the tool and the arguments to call it with."""
    return arguments["name"], arguments.get("arguments", {})


def _groups(tools: Iterable[_Tool]) -> str:
    """What there is, for a model whose search has found nothing: how many tools begin with which word."""
    counts = Counter(tool.module_id.partition(".")[0] for tool in tools)
    groups = [f"{name} ({count})" for name, count in counts.most_common(_GROUPS_MAX)]
    if len(counts) > _GROUPS_MAX:
        groups.append(f"and {len(counts) - _GROUPS_MAX} more")
    return f"No tool was found; the groups of tools are: {', '.join(groups) or 'none'}."


# ---- OpenAI: tools as function definitions, and a model's call back as a module's inputs ----

_SHORTENED = re.compile(r".{54}-0[0-9a-f]{8}")  # no segment of a module id starts with a digit
# Strict mode refuses these. A model reads them in the description instead, and the module's own validation holds them.
_FOR_DESCRIPTION = frozenset(
    "minLength maxLength uniqueItems minProperties maxProperties propertyNames dependentRequired contains minContains"
    " maxContains".split()
)
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")  # in a pattern, such as pydantic's for a Decimal


@dataclasses.dataclass
class _OpenAIConverter:
    """Write tools as OpenAI function definitions, with parameters that strict mode takes if it is on.

    A WARNING names each tool whose parameters strict mode refuses all the same, or takes something away from."""

    embed_annotations: bool = False
    strict: bool = False

    def convert(self, tool: _Tool) -> JSONObject:
        function: JSONObject = {"name": _portable_name(tool.module_id), "description": tool.about.description}
        if self.embed_annotations:
            function["description"] += tool.about.to_suffix()
        function["parameters"] = tool.input_schema
        if self.strict:
            parameters = _to_strict(tool.input_schema)
            problems = [*detect_openai_strict_incompatibilities(parameters), *_too_open(parameters, "$")]
            # Strict mode would close it. The arguments themselves are closed without a word: `{"type": "object"}` is
            # how a tool without any is written.
            if any(map(_is_open_map, _subschemas({"properties": {}, **tool.input_schema}))):
                problems.append("additionalProperties: true")
            if problems:
                text = "Schema for module '%s' uses %s, which is incompatible with strict mode"
                logger.warning(text, tool.module_id, ", ".join(problems))
            function |= {"parameters": parameters, "strict": True}
        return {"type": "function", "function": function}


def _is_open_map(schema: JSONSchema) -> bool:
    """Whether `schema` says that an object may have properties of any name."""
    is_bare = "object" in _types(schema) and "properties" not in schema
    return schema.get("additionalProperties", is_bare) is not False


def _too_open(schema: JSONSchema, place: str) -> Iterator[str]:
    """What strict mode refuses in a schema for what is missing in it, as apcore names places: `$.tags[]: any type`."""
    if not schema.keys() & {"type", "enum", "const", "anyOf", *UNSUPPORTED_KEYWORDS}:
        yield f"{place}: any type"
    if "array" in _types(schema) and not schema.keys() & {"items", "prefixItems"}:
        yield f"{place}: array without items"
    for name, field in _properties(schema).items():
        yield from _too_open(field, f"{place}.{name}")
    if "items" in schema:
        yield from _too_open(schema["items"], f"{place}[]")
    for number, branch in enumerate(schema.get("anyOf", ())):
        yield from _too_open(branch, f"{place}.anyOf[{number}]")


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
    strict = _map_subschemas(keywords, _to_strict)
    if limits:
        strict["description"] = f"{schema.get('description', '')} ({', '.join(limits)})".lstrip()
    if "properties" in schema or "object" in _types(schema):
        properties = _properties(strict)
        for name, field in _properties(schema).items():
            # A tag of a union has a default too, but pydantic cannot choose a branch by null.
            is_tag = "const" in field and field["const"] == field.get("default")
            if name not in schema.get("required", ()) and not is_tag:
                properties[name] = _nullable(properties[name])
        strict |= {"properties": properties, "required": sorted(properties), "additionalProperties": False}
    return strict


def _drop_nulls(value: Any, schema: JSONSchema, in_union: bool = False) -> tuple[Any, bool]:
    """Undo strict mode in what a model wrote: copy `value` without the nulls that stand for absent properties, at every
    depth, and say whether `schema` accepts the copy.

    A schema is told from others by types, constants and names alone: a pattern, or a list of distinct items, can take a
    validator minutes, and the module's own validation follows anyway. Inside a union, reading stops at the first
    mismatch; outside, nobody asks for the answer. Each part of `value` is read once by each schema that may describe
    it: if the branch that fits were read again, the time would double with each nested union."""
    fits = _suits(value, schema)
    if in_union and not fits:
        return value, False
    if isinstance(value, dict | list):
        parts: dict[Any, Any] = {}
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            item_schemas = [*_part_schemas([schema], step)]
            accepted = not item_schemas
            for item_schema in item_schemas:  # several where names have patterns: nothing tells which ones count
                item, item_fits = _drop_nulls(item, item_schema, in_union)
                accepted = accepted or item_fits
            if item is None and isinstance(value, dict) and not accepted:
                continue
            if in_union and not accepted:
                return value, False
            parts[step] = item
        if isinstance(value, dict):
            value = parts
            fits = fits and parts.keys() >= {*schema.get("required", ())}
        else:
            value = [*parts.values()]
    for inner in schema.get("allOf", ()):
        value, inner_fits = _drop_nulls(value, inner, in_union)
        fits = fits and inner_fits
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            value, inner_fits = _drop_nulls_in_union(value, schema, schema[keyword])
            fits = fits and inner_fits
    return value, fits


def _drop_nulls_in_union(value: Any, schema: JSONSchema, branches: list[JSONSchema]) -> tuple[Any, bool]:
    """Read `value` by the first of `branches`, a union inside `schema`, that accepts it and knows every name in it."""
    for branch in branches:
        if not isinstance(value, dict) or _knows(value, schema, branch):
            candidate, fits = _drop_nulls(value, branch, in_union=True)
            if fits:
                return candidate, True
    return value, False


def _knows(names: Iterable[str], schema: JSONSchema, branch: JSONSchema) -> bool:
    """Whether `branch`, one of a union inside `schema`, has every one of `names`: strict mode lets a model send no
    other. One that is no object's may have any."""
    unknown = {*names} - _properties(schema).keys()
    is_closed = False
    for view in _in_place(branch):
        unknown -= _properties(view).keys()
        if not unknown or any(view.get(keyword, False) is not False for keyword in _OTHER_PROPERTIES):
            return True
        is_closed = is_closed or "properties" in view or "object" in _types(view)
    return not is_closed


def to_openai_tools(
    registry_or_executor: Registry | Executor | APCore, *, embed_annotations: bool = False, strict: bool = False,
    tags: Sequence[str] | None = None, prefix: str | None = None, identity: Identity | None = None,
    search: bool = False,
) -> list[JSONObject]:  # fmt: skip
    """The modules as OpenAI tool definitions, plain dicts for `client.chat.completions.create(tools=...)`.

        [{"type": "function", "function": {"name": "image-resize", "description": "...", "parameters": {...}}}, ...]

    `embed_annotations` appends what an annotation says that is not the default to the description. `strict` adds
    `"strict": True` and rewrites the parameters for OpenAI's strict mode; what OpenAI will refuse all the same is
    logged as a WARNING per tool. `tags` (all of them) and `prefix` choose modules; with an `identity`, so does the ACL:
    only what it lets that caller call is offered. With `search` there are two functions in the place of all,
    `search_tools` and `call_tool`, for `run_openai_call(search=True)`; `call_tool` is never strict, as its arguments
    are open. A module that cannot be converted is left out with a WARNING. Raises TypeError for neither a Registry nor
    an Executor; ValueError for an empty tag or prefix, and for a module id with a hyphen, which nobody could tell from
    a dot. Source: FR-OPENAI-001 to -007.
    """
    options = _options_of("to_openai_tools()", registry_or_executor, tags=tags, prefix=prefix, search=search)
    catalog = _ToolCatalog(options)
    with_hyphen = [module_id for module_id in catalog.tools if "-" in module_id]
    if with_hyphen:
        raise ValueError(f"Module ids must not contain hyphens, which stand for dots in names: {with_hyphen}")
    converter = _OpenAIConverter(embed_annotations=embed_annotations, strict=strict)
    if search:
        two = _SearchTools(catalog, options).tools
        lenient = dataclasses.replace(converter, strict=False)
        return [converter.convert(two[_SEARCH_TOOLS]), lenient.convert(two[_CALL_TOOL])]
    tools: Collection[_Tool] = catalog.tools.values()
    if identity is not None:
        with ThreadPoolExecutor() as threads:  # the caller's own thread may run an event loop already
            tools = threads.submit(asyncio.run, catalog.offered(tools, identity)).result()
    _log_many(len(tools))
    return [converter.convert(tool) for tool in tools]


class _NotOffered(ValueError):
    """A model called a function that `to_openai_tools` does not offer."""


def from_openai_name(name: str, registry: Registry | None = None) -> str:
    """Turn an OpenAI function name back into the module id it was made from: `image-resize` into `image.resize`.

    A name that was shortened, for an id of more than 64 characters, needs the `registry` that it came from: ValueError
    without it, and when none of its modules has that name. Source: FR-OPENAI-002."""
    if not _SHORTENED.fullmatch(name):
        return name.replace("-", ".")
    if registry is not None:
        for module_id in registry.list():
            if _portable_name(module_id) == name:
                return module_id
    raise _NotOffered(f"Function name {name!r} was shortened, and there is no registry that has its module")


def from_openai_call(
    registry_or_executor: Registry | Executor | APCore, name: str, arguments: str | JSONObject,
    *, tags: Sequence[str] | None = None, prefix: str | None = None, search: bool = False,
) -> tuple[str, JSONObject]:  # fmt: skip
    """Turn the call a model sent back into a module id and inputs that module accepts.

        >>> from_openai_call(registry, "image-resize", '{"width": 800, "format": null}')
        ('image.resize', {'width': 800})

    `arguments` is the JSON text that came with `name`, or the dict of it. Strict mode makes a model write `null` for
    what it leaves out, so a null that the module's own schema forbids is dropped, at every depth; one that it allows
    stays. Nothing is executed: `await executor.call_async(module_id, inputs)` does. `tags`, `prefix` and `search` are
    those that `to_openai_tools` had; with `search`, a `call_tool` becomes what it calls, and only `run_openai_call` can
    answer a `search_tools`. Source: FR-OPENAI-003; OpenAI guide "Structured Outputs". Raises TypeError for neither a
    Registry nor an Executor; ValueError when `arguments` is no JSON object, for an empty tag or prefix, and for a
    module that `to_openai_tools` would not have offered.
    """
    options = _options_of("from_openai_call()", registry_or_executor, tags=tags, prefix=prefix, search=search)
    inputs = _read_arguments(name, arguments)
    catalog = _ToolCatalog(options)
    search_tools = _SearchTools(catalog, options)
    if name in search_tools.tools:
        if name == _SEARCH_TOOLS:
            raise ValueError(f"{name!r} calls no module: run_openai_call() answers it")
        for fault in search_tools.faults(name, inputs):
            raise ValueError(f"Arguments of {name!r} are not valid: {fault['field'] or '(root)'}: {fault['message']}")
        name, inputs = _target_of(inputs)
    tool = _called_tool(catalog, options, name)
    return tool.module_id, _drop_nulls(inputs, tool.input_schema)[0]


def _read_arguments(name: str, arguments: str | JSONObject) -> JSONObject:
    inputs = from_json(arguments or "{}", allow_inf_nan=False) if isinstance(arguments, str) else arguments
    if not isinstance(inputs, dict):
        raise ValueError(f"Arguments of {name!r} must be a JSON object, got {type(inputs).__name__}")
    return inputs


def _called_tool(catalog: _ToolCatalog, options: _Options, name: str) -> _Tool:
    """The tool that a model called by the name of its function; `_NotOffered` when `options` leave it out."""
    module_id = from_openai_name(name, options.registry)
    is_registered = module_id in options.registry.list(prefix=module_id)  # without what is hidden
    tool = catalog.build(module_id) if is_registered else None
    if tool is None:
        raise _NotOffered(f"to_openai_tools() offers no function {name!r}")
    return tool


# ---- Calls: one running tool call: progress, questions, cancellation, tasks; event loop only ----


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

    Raises ValueError, before anything is sent, for a schema that is not an object with properties of simple types, or
    has a pattern that pydantic's engine does not know. The module's own timeout goes on meanwhile: once it is over, or
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


_MODERN = "2026-07-28"  # from here on a server sends no requests: it answers `input_required`


def _caller(scope: Mapping[str, Any]) -> Identity | None:
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


def _trace_sent(ctx: RequestContext) -> dict[str, str]:
    """The client's span, where it sent one (SEP-414)."""
    meta: Mapping[str, Any] = ctx.meta or {}
    texts = {key: meta.get(key) for key in ("traceparent", "tracestate")}
    return {key: text for key, text in texts.items() if isinstance(text, str) and len(text) <= 512}


_PARKED_SECONDS = 600.0  # how long a user may think, and how long the result of a parked call is kept for its retry
_CONFIRMED_SECONDS = 300.0  # the same where nothing is kept, so that an answer could be sent again
# How many calls may wait for their users' answers, and how large their arguments may be together, as JSON; in memory,
# these can be ninety times as large. One more is refused. The same holds for tasks that run, of which one more is none.
# Nobody who has a name may take more than half, so that others can be asked.
_WAITING_MAX = 1_000
_WAITING_BYTES_MAX = 2 * 2**20
_TOO_MANY = "Too many calls, or too large ones, wait for their users' answers"

_TASKS_EXTENSION = "io.modelcontextprotocol/tasks"
_TASKS_MAX = 1_000
_TASK_SECONDS = 3_600.0  # how long a task is kept once it has ended
# How large the results may be, as JSON, of what has ended without a request: together, and of each caller.
_KEPT_BYTES_MAX = 64 * 2**20
_KEPT_BYTES_OF_CALLER_MAX = 16 * 2**20
_RESULT_BYTES = 6 * 2**20  # for which there must be room when a task begins
_STATUS_CHARACTERS = 500


def _texts_of(pattern: str) -> TypeAdapter[str]:
    """What accepts the texts that match `pattern`, by pydantic's engine: Python's `re`, which jsonschema asks, can take
    days for fifty characters. SchemaError for a pattern that the engine does not know: it does not look around."""
    return TypeAdapter(Annotated[str, Field(pattern=pattern)])


def _check_pattern(_: Any, pattern: str, value: object, _schema: JSONSchema) -> Iterator[InvalidValue]:
    """The keyword `pattern`, for jsonschema."""
    if isinstance(value, str):
        try:
            _texts_of(pattern).validate_python(value)
        except ValidationError:
            yield InvalidValue(f"{value!r} does not match {pattern!r}")


_AnswerValidator: Any = cast(Any, extend)(Draft202012Validator, {"pattern": _check_pattern})


def _form(requested_schema: JSONSchema | None) -> JSONSchema:
    """The schema that a client is sent with a question: self-contained, an object of fields of a simple type each.

    ValueError for any other, and for a pattern that an answer could not be held against."""
    from mcp.server.elicitation import render_elicitation_schema

    try:
        form = _input_schema(_plain({"properties": {}, **(requested_schema or {})}))
        if _branches(form, [*_IN_PLACE, "patternProperties"]):
            raise ValueError("it says more than which properties there are")
        fields: dict[str, Any] = {}
        for number, (name, field) in enumerate(form["properties"].items()):
            fields[f"field_{number}"] = (Annotated[Any, Field(alias=name), WithJsonSchema(field)], ...)
        render_elicitation_schema(create_model("Form", **fields))  # the SDK's check of fields takes a model
        for part in _subschemas(form):
            if isinstance(part.get("pattern"), str):
                _texts_of(part["pattern"])
    except Exception as error:
        raise ValueError(f"A question's schema is no flat object of simple types: {error}") from None
    return form


def _accepted(answer: Any, form: JSONSchema) -> JSONObject | None:
    """What a user has filled in; None for one who declined or cancelled.

    Some exception for what is no answer to a question, or one that the form does not accept."""
    if answer.action != "accept":
        return None
    content: JSONObject = answer.content or {}
    for name, field in form["properties"].items():
        items = field.get("items", {})
        options = items.get("enum") or items.get("anyOf") or ()
        chosen = content.get(name)
        # Jsonschema would look for each of a million in all the options, and every other client wait.
        if isinstance(chosen, list) and len(chosen) > len(options):
            raise ValueError("More was chosen than there is")
    _AnswerValidator(form).validate(content)
    return content


def _declares_tasks(ctx: RequestContext) -> bool:
    """Whether the client says with this very request that it knows tasks."""
    return _TASKS_EXTENSION in (getattr(ctx.session.client_capabilities, "extensions", None) or {})


def _json_bytes(value: Any) -> int:
    """How many bytes plain JSON takes; more than there is room for where it is too deep to be written."""
    try:
        return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
    except RecursionError:
        return sys.maxsize


def _silence(future: asyncio.Future[Any]) -> None:
    """Take note of what `future` raised, when nobody else will: or asyncio logs it, and it may quote secrets."""
    if not future.cancelled():
        future.exception()


def _call_later(seconds: float, callback: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
    """A timer in no context: it would keep its context until it rings, also one that is cancelled, and with it the call
    that it was made in."""
    return asyncio.get_running_loop().call_later(seconds, callback, *arguments, context=contextvars.Context())


def _elicitation(message: str, form: JSONSchema) -> JSONObject:
    """A question as a client of 2026-07-28 is sent it."""
    params = {"mode": "form", "message": message, "requestedSchema": form}
    return {"method": "elicitation/create", "params": params}


class _Asked(BaseException):
    """Ends a call before its module has begun: a question answers its request, and the retry begins it anew.

    No Exception, as asyncio's CancelledError is none: no middleware may take it for a failure and recover from it."""

    def __init__(self, question: JSONObject) -> None:
        self.question = question


@dataclasses.dataclass
class _Question:
    """What a call asks its user, until it is answered or given up."""

    request: JSONObject  # as a client of 2026-07-28 is sent it
    answer: asyncio.Future[Any]


@dataclasses.dataclass(eq=False)
class _Call:
    """One running tool call, and the way back to the user who made it.

    It may ask several questions at once, each of them under a key that it uses for no other. Its `outcome` is its
    result, or the JSON-RPC error that it is answered with. `report()` and `elicit()`, which modules find in their
    context, may be called from any thread and loop: a sync module may run an async one in a loop of its own. Everything
    else belongs to the server's event loop."""

    tool: _Tool
    arguments: JSONObject
    options: _Options
    caller: Identity | None
    results: _Results

    def __post_init__(self) -> None:
        self.label = _label(self.tool.module_id, self.caller)
        self.has_progress_token = False  # whether the request that the call answers next wants progress
        self.trace: dict[str, str] = {}  # the client's span, where it sent one (SEP-414)
        self.session: Any = None  # of the request that the call answers next; None when there is none
        self.parks = False  # whether questions answer that request, and the call waits for the client's retry
        self.can_ask = False
        self.confirms = False  # whether its own approval, and no other, is asked by `confirm()`
        self.confirmation: Any = None  # the answer to that, which the request has brought
        self.has_forms = False  # whether the client shows its user forms
        self.may_go_unasked = True  # whether what needs approval may run if its user cannot be asked (`auto`)
        self.questions: dict[str, _Question] = {}  # that are open, by their keys on the wire
        self.calls: _Calls | None = None  # among which it runs
        self.can_be_task = False  # whether a handle may answer that request, and the call goes on without one
        self.has_begun = False  # whether its module has: approval is asked before there is a task
        self.is_due = False  # whether it is to be a task once its module has begun
        self.kept: _Kept | None = None  # while no request waits for it
        self.is_refused = False  # whether it was ended as too many wait
        self.modules: dict[int, Any] = {}  # that have taken part, by identity: by id, one may replace another
        self.marks: list[JSONSchema] = []  # of models that its module has returned
        self.has_marks = False  # whether a module that took part has returned a model that marks something
        self.token = CancelToken()
        self.task: asyncio.Task[None] | None = None  # while it runs
        self.status = ""  # what was last reported, for its task
        self.changed = time.time()
        self.outcome: JSONObject | Exception | None = None
        self.progress = -math.inf  # the last number that was sent
        self._request_id: Any = None  # of the request that the call answers next
        self._keys: set[str] = set()  # of all questions that it has asked
        self._turn = asyncio.Event()  # set when it may have something to answer the request with
        self._unsent: Future[None] | None = None  # the last report from another loop
        self.loop = asyncio.get_running_loop()
        self.blocked_seconds = 0.0  # for how long its modules have held up the loop, as far as it was told

    def attach(self, ctx: RequestContext) -> None:
        """Let `ctx` be the request that the call answers next: the one that began it, or a retry."""
        self.session = ctx.session
        # No more of its `_meta`, which may be as large as a request and would be kept while the call waits.
        meta: Mapping[str, Any] = ctx.meta or {}
        self.has_progress_token = "progress_token" in meta
        self.trace = _trace_sent(ctx)
        self._request_id = ctx.request_id
        # A server without sessions may be one of many: the answer could reach another one than the one that asked.
        self.parks = ctx.protocol_version >= _MODERN and not self.options.stateless
        self.can_be_task = self.parks and _declares_tasks(ctx)
        capability = getattr(ctx.session.client_capabilities, "elicitation", None)
        self.has_forms = bool(capability and (capability.form or not capability.url))  # `{}`: forms (MCP 2025-11-25)
        self.can_ask = self.has_forms and (self.parks or ctx.session.can_send_request)
        self.confirms = ctx.protocol_version >= _MODERN and self.options.state_key is not None
        self.may_go_unasked = self.may_go_unasked and not self.can_ask

    @functools.cached_property
    def size(self) -> int:
        """How many bytes its arguments take as JSON."""
        return _json_bytes(self.arguments)

    def cancel(self) -> None:
        """End the call: its CancelToken tells code that looks at it, and its coroutines are cancelled."""
        self.token.cancel()
        if self.task is not None:
            self.task.cancel()

    @property
    def is_working(self) -> bool:
        """Whether it has nothing to answer a request with: no outcome and, from 2026-07-28 on, no question."""
        return self.outcome is None and not (self.parks and self.questions)

    async def change(self) -> None:
        """Wait until it may have stopped working, or has become a task."""
        self._turn.clear()
        await self._turn.wait()

    def begin_task(self) -> bool:
        """Go on as a task, now or once its module has begun, if its client knows tasks and there is room for one more.
        Returns whether it does."""
        self.is_due = True
        if self.calls is not None and self.can_be_task and self.has_begun and self.kept is None and self.is_working:
            self.calls.keep_task(self)
        return self.kept is not None and self.kept.is_task

    def go_on_without_request(self, kept: _Kept) -> None:
        self.kept = kept
        self.session = None  # what is sent to a request after its answer is an error
        self._turn.set()

    def answer(self, responses: Mapping[str, Any]) -> None:
        """Pass on what the client has answered, by the keys of the questions. Others than open ones are let pass."""
        for key in self.questions.keys() & responses.keys():
            answer = self.questions.pop(key).answer
            if not answer.done():  # it is when its time is over
                answer.set_result(responses[key])
        self.changed = time.time()

    def may_quote_secrets(self) -> bool:
        """Whether a module that has taken part marks anything, or has returned a model that does."""
        modules = [self.tool.descriptor, *self.modules.values()]
        return self.has_marks or any(_has_marks(each, side) for each in modules for side in _SIDES)

    def record(self, module: Any) -> None:
        """Note that a module takes part in this call, also where another module calls it.

        Whose secrets an error may quote is known by that. Exceptions do not tell: a module may catch the one that
        another raised, and later raise its own from what it remembers."""
        self.modules[id(module)] = module

    def end(self, outcome: JSONObject | Exception) -> None:
        """Let the request be answered; nothing more is reported or asked. Tasks that the module has left running hold
        on to the call, so it lets go of what is large: its arguments, and what its user is asked and has answered."""
        self.outcome = outcome
        self.changed = time.time()
        self.task = None
        self.arguments = {}
        self.modules.clear()
        self.marks.clear()
        self.session = None
        self.can_ask = False
        self.may_go_unasked = False
        for question in self.questions.values():
            question.answer.cancel()
        self.questions.clear()
        self._turn.set()

    def take_outcome(self) -> JSONObject:
        """The result of a call that has ended, which is not kept. Raises the JSON-RPC error that it ended with."""
        outcome = self.outcome
        self.outcome = None
        if isinstance(outcome, Exception):
            raise outcome
        return cast(JSONObject, outcome)

    async def report(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        """Send the client a progress notification, as `report_progress()` says."""
        number = float(progress)
        limit = None if total is None else float(total)
        if limit is not None and not math.isfinite(limit):  # JSON has no such number
            limit = None
        if asyncio.get_running_loop() is self.loop:
            if self.can_be_task and math.isfinite(number):
                parts = [f"{number:.15g}" if limit is None else f"{number:.15g}/{limit:.15g}", _text_of(message or "")]
                self.status = " ".join(filter(None, parts))[:_STATUS_CHARACTERS]
                self.changed = time.time()
            if self.session is not None and self.progress < number < math.inf:
                self.progress = number
                await self.session.report_progress(number, limit, message and _text_of(message))
        elif self._unsent is None or self._unsent.done():
            self._unsent = asyncio.run_coroutine_threadsafe(self.report(number, limit, message), self.loop)
            # So that reports arrive in order, and before the result; while one is still to be sent, others are dropped.
            # After a second the module goes on: the server's loop may be standing still, in an async module that waits
            # for a synchronous `executor.call()`.
            await asyncio.wait({asyncio.wrap_future(self._unsent)}, timeout=1)

    async def elicit(
        self, message: str, requested_schema: JSONSchema | None = None, key: str | None = None
    ) -> JSONObject | None:
        """Ask the user who made the call, as `elicit()` says."""
        if asyncio.get_running_loop() is not self.loop:
            work = self.elicit(message, requested_schema, key)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))
        form = _form(requested_schema)
        message = _text_of(message)
        if not self.can_ask or self.calls is None:
            return None
        if not self.calls.may_wait(self):
            self.is_refused = True
            self.cancel()
            return None
        key = self._unused(key or "input")
        answer: asyncio.Future[Any]
        if self.parks:
            answer = self.loop.create_future()
        else:
            answer = self.loop.create_task(self.session.elicit_form(message, form, self._request_id))
        answer.add_done_callback(_silence)
        self.questions[key] = _Question(_elicitation(message, form), answer)
        self.changed = time.time()
        self._turn.set()
        timer = _call_later(_PARKED_SECONDS, answer.cancel)
        try:
            await asyncio.wait({answer})
        finally:
            timer.cancel()
            answer.cancel()
            self.questions.pop(key, None)
        try:
            if answer.cancelled():
                raise TimeoutError
            return _accepted(answer.result(), form)
        except Exception as error:  # the client's fault or its connection's: the module goes on without an answer
            logger.warning("Question of %s was not answered: %s", self.label, type(error).__name__)
        return None

    def confirm(self, message: str, requested_schema: JSONSchema) -> JSONObject | None:
        """Ask the user, as `elicit()`, before the module begins, where any server may be sent the answer. `_Asked` is
        raised for the question, and the answer comes with the request that begins the call anew."""
        form = _form(requested_schema)
        if self.confirmation is None:
            raise _Asked(_elicitation(_text_of(message), form))
        try:
            return _accepted(self.confirmation, form)
        except Exception as error:  # the client's fault
            logger.warning("Question of %s was not answered: %s", self.label, type(error).__name__)
            return None

    def _unused(self, key: str) -> str:
        """`key`, or where a question of this call had it, one that is made of it: a client may take a key for the
        question that it has answered."""
        keys = itertools.chain([key], (f"{key}-{number}" for number in itertools.count(2)))
        unused = next(each for each in keys if each not in self._keys)
        self._keys.add(unused)
        return unused


def _name_of(caller: Identity | None) -> str | None:
    """Who a caller is, whatever roles a request gives him."""
    return None if caller is None else caller.id


@dataclasses.dataclass(eq=False)
class _Kept:
    """A call that goes on while no request waits for it: parked for its client's retry, or a task."""

    call: _Call
    is_task: bool

    def __post_init__(self) -> None:
        self.key = secrets.token_urlsafe(32)
        self.owner = _name_of(self.call.caller)
        self.size = 0  # of its result, once there is one
        self.created = time.time()
        self.timer: asyncio.TimerHandle | None = None  # that ends it
        self.is_cancelled = False  # by its client
        self.is_told = False  # whether its client has been told its outcome


def _fits(call: _Call, others: Collection[_Call]) -> bool:
    """Whether a call may hold its arguments beside those that `others` hold, and its caller not too much of that."""
    groups = [(others, 1)]
    if call.caller is not None:
        name = call.caller.id
        groups.append(([other for other in others if _name_of(other.caller) == name], 2))
    for group, share in groups:
        size = call.size + sum(other.size for other in group if other.outcome is None)
        if len(group) >= _WAITING_MAX // share or size > _WAITING_BYTES_MAX // share:
            return False
    return True


class _Calls:
    """The calls of one server: those that run, and those that are kept while no request waits for them.

    A call that asks its user is parked from that answer until its client's retry, for ten minutes at most, under a
    state that is good for one retry. A task is kept until an hour after its end. What ends meanwhile waits with its
    outcome. Only the caller who began a call comes by it again, and by its key, which cannot be guessed.

    At most 1,000 calls wait for their users, with 2 MiB of arguments in all, those of handshake clients included. There
    are at most 1,000 tasks, and those that run have 2 MiB of arguments, too. Results are bounded in bytes, together and
    for each caller: where there is no room, results go that clients have been told, the oldest first; if that does not
    do, a call does not become a task, and a result is an error that says so. Event loop only."""

    def __init__(self) -> None:
        self.running = set[_Call]()
        self._parked: dict[str, _Kept] = {}
        self._tasks: dict[str, _Kept] = {}
        self._sizes = Counter[str | None]()  # of what is kept, by its caller's name

    def may_wait(self, call: _Call) -> bool:
        """Whether this call may wait for its user, beside those that do."""
        waiting = {other for other in self.running if other.questions}
        waiting.update(kept.call for kept in self._parked.values())
        waiting.discard(call)
        return _fits(call, waiting)

    def park(self, call: _Call) -> str:
        """Keep a call for its client's retry. Returns its state."""
        kept = _Kept(call, is_task=False)
        kept.timer = _call_later(_PARKED_SECONDS, self._expire, kept)
        self._parked[kept.key] = kept
        call.go_on_without_request(kept)
        return kept.key

    def resume(self, state: str, caller: Identity | None) -> _Call | None:
        """The call that is parked under `state`, which is good for this once; None when there is none of the caller."""
        kept = self._parked.get(state)
        if kept is None or kept.owner != _name_of(caller):
            return None
        self._release(kept)
        return kept.call

    def keep_task(self, call: _Call) -> None:
        """Let a call go on as a task, if there is room for it."""
        kept = _Kept(call, is_task=True)
        working = [task.call for task in self._tasks.values() if task.call.outcome is None]
        if _fits(call, working) and self._make_room(kept, _RESULT_BYTES):
            self._resize(kept, 0)
            self._tasks[kept.key] = kept
            call.go_on_without_request(kept)

    def find_task(self, key: object, caller: Identity | None) -> _Kept | None:
        """The task of that key; None when there is none of the caller."""
        kept = self._tasks.get(str(key))
        return kept if kept is not None and kept.owner == _name_of(caller) else None

    def end(self, call: _Call, outcome: JSONObject | Exception) -> None:
        """Give a call its outcome, or what is told in the place of a result that cannot be kept."""
        self.running.discard(call)
        kept = call.kept
        if kept is not None:
            size = 0 if isinstance(outcome, Exception) else _json_bytes(outcome)
            if not self._make_room(kept, size):
                text = f"The tool has run, but its result of {size:,} bytes cannot be kept beside those of other calls"
                outcome = _failure(text, "RESULT_NOT_KEPT")
            if kept.is_task:
                kept.timer = _call_later(_TASK_SECONDS, self._expire, kept)
        call.end(outcome)

    async def finish_tasks(self) -> None:
        """Wait until no task is working: one that waits for an answer may wait for long."""
        for call in [*self.running]:
            while call.kept is not None and call.kept.is_task and call.is_working:
                await call.change()

    def _make_room(self, kept: _Kept, size: int) -> bool:
        """Let a call keep so many bytes from now on, and no more than before if there is no room for them (False)."""
        self._resize(kept, 0)
        for told in [*self._tasks.values()]:
            if self._has_room(kept, size):
                break
            # Where its own caller's bytes are too many already, results of others would go for nothing.
            is_own_too_much = self._sizes[kept.owner] + size > _KEPT_BYTES_OF_CALLER_MAX
            if told.is_told and (told.owner == kept.owner or not is_own_too_much):
                self._expire(told)
        has_room = self._has_room(kept, size)
        self._resize(kept, size if has_room else 0)
        return has_room

    def _has_room(self, kept: _Kept, size: int) -> bool:
        is_new_task = kept.is_task and kept.key not in self._tasks
        has_number = len(self._tasks) + is_new_task <= _TASKS_MAX
        if is_new_task and kept.owner is not None:
            of_owner = [task for task in self._tasks.values() if task.owner == kept.owner]
            has_number = has_number and len(of_owner) < _TASKS_MAX // 2
        has_bytes = self._sizes.total() + size <= _KEPT_BYTES_MAX
        return has_number and has_bytes and self._sizes[kept.owner] + size <= _KEPT_BYTES_OF_CALLER_MAX

    def _resize(self, kept: _Kept, size: int) -> None:
        self._sizes[kept.owner] += size - kept.size
        kept.size = size
        if not self._sizes[kept.owner]:
            del self._sizes[kept.owner]

    def _release(self, kept: _Kept) -> None:
        """Keep a call no longer."""
        (self._tasks if kept.is_task else self._parked).pop(kept.key)
        self._resize(kept, 0)
        kept.call.kept = None
        if kept.timer is not None:
            kept.timer.cancel()

    def _expire(self, kept: _Kept) -> None:
        """Keep a call no longer, nor what it has ended with."""
        self._release(kept)
        kept.call.outcome = None


# The call that code runs for: modules may call others without passing on their context, also from tasks and timers.
_CURRENT = contextvars.ContextVar[_Call | None]("apcore_mcp_call", default=None)
_CALL_KEY = "_mcp_call"


def _call_of(context: Context[Any]) -> _Call | None:
    """The tool call that a module runs for; None where no server was called. The module's context knows it, on threads
    that apcore starts as well, and otherwise the context variable does."""
    return context.data.get(_CALL_KEY) or _CURRENT.get()


# apcore's loggers that quote arguments, outputs, or errors that do.
_QUOTING = "schema.hardening executor pipeline middleware.manager middleware.logging".split()


def _hide_values(record: logging.LogRecord) -> bool:
    """A filter of apcore's loggers: while a call runs in which something is marked, their lines show no values."""
    call = _CURRENT.get()
    if call is None or not call.may_quote_secrets():
        return True
    if isinstance(record.args, tuple) and record.args:
        harmless = (int, float)
        record.args = tuple(each if isinstance(each, harmless) else REDACTED_VALUE for each in record.args)
    elif record.levelno >= logging.WARNING:  # the text holds them
        record.msg = f"(not shown: it may quote sensitive values) at {record.filename}:{record.lineno}"
        record.args = ()
    record.exc_info = record.exc_text = None
    if hasattr(record, "error"):
        record.error = REDACTED_VALUE
    return True


for _name in _QUOTING:
    logging.getLogger(f"apcore.{_name}").addFilter(_hide_values)


def _begins(call: _Call, context: Context[Any]) -> bool:
    """Whether `context` is that of the tool's own module, and not of what that calls."""
    return context.data.get(_CALL_KEY) is call and len(context.call_chain) == 1


# ---- Modules: what apcore's steps run in the calls of a server: threads, functions, outputs; event loop only ----

_THREADS_MAX = 256  # so that slow modules leave room for others


class _DaemonThreads(ThreadPoolExecutor):
    """Threads that do not keep the process alive: a ThreadPoolExecutor's own are joined at its exit. Each call has the
    context variables of its task.

    At most `limit` are started. They end with the process, as the servers in it share them. Any thread may submit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._calls = queue.SimpleQueue[Any]()
        self._idle = threading.Semaphore(0)  # counts the threads that wait for a call
        self.busy = set[int]()  # the threads that run one
        self._unstarted = limit  # how many threads may still be started

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        self._calls.put((future, functools.partial(contextvars.copy_context().run, fn, *args, **kwargs)))
        if not self._idle.acquire(blocking=False) and self._unstarted:
            self._unstarted -= 1
            threading.Thread(target=self._work, daemon=True).start()
        return future

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                self.busy.add(threading.get_ident())
                try:
                    future.set_result(call())
                except StopIteration as error:  # an asyncio future refuses it
                    future.set_exception(RuntimeError(repr(error)))
                except BaseException as error:  # a SystemExit ends the call, not this thread
                    future.set_exception(error)
            self.busy.discard(threading.get_ident())
            del future, call  # or what the module has returned would be kept until the next call
            self._idle.release()


class _Threads:
    """The threads of one process, which all servers in it share. Those of sync modules are not those of the event loop:
    where modules are stuck in all of theirs, apcore still runs the hooks of middleware in the loop's."""

    def __init__(self) -> None:
        self.of_modules = _DaemonThreads(_THREADS_MAX)
        # Without a limit of their own: each has a caller that holds a thread while it waits. Callers that held all
        # threads would wait for one for ever.
        self.of_inner_modules = _DaemonThreads(math.inf)
        self.of_loops = _DaemonThreads(_THREADS_MAX)


_THREADS: dict[int, _Threads] = {}  # by process: one that is forked has none of its parent's threads


def _threads() -> _Threads:
    """The threads of this process."""
    return _THREADS.get(os.getpid()) or _THREADS.setdefault(os.getpid(), _Threads())


class _View:
    """Something as apcore's steps see it: everything is its own but what a subclass says."""

    def __init__(self, viewed: Any) -> None:
        self.viewed = viewed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.viewed, name)


# What apcore's redaction has to know of a schema; nothing is kept of a class that is gone.
_REDACTED_BY = weakref.WeakKeyDictionary[Any, JSONSchema]()
_PYDANTICS_METHOD = cast(Any, BaseModel.model_json_schema).__func__


class _SchemaView(_View):
    """A module's schema as apcore's steps see it, which ask for it as JSON to redact what hooks may log.

    They do so three times in every call (0.32): pydantic writes it anew each time, and then all of it is prepared for
    references and marks to be looked up. That is most of what a call with ten fields costs. Here it is at hand, and
    empty where it marks nothing, as all that it says else is not read."""

    def model_json_schema(self, *arguments: Any, **options: Any) -> JSONSchema:
        if arguments or options:
            return cast(JSONSchema, self.viewed.model_json_schema(*arguments, **options))
        schema = _REDACTED_BY.get(self.viewed)
        if schema is None:
            schema = self.viewed.model_json_schema()
            schema = _REDACTED_BY[self.viewed] = schema if _marks_sensitive(schema) else {}
        return schema


def _view_of(schema: Any) -> Any:
    """A module's schema as apcore's steps see it: a view of a pydantic model, and of what apcore makes of a dict where
    that says so much that a view costs less. A class that writes its JSON schema itself is left alone: it may write
    another one each time."""
    if isinstance(schema, _Model):
        is_viewed = getattr(schema.model_json_schema, "__func__", None) is _PYDANTICS_METHOD
    else:
        is_viewed = type(schema).__module__ == Registry.__module__ and "properties" in schema.model_json_schema()
    return _SchemaView(schema) if is_viewed else schema


class _ModuleView(_View):
    """A module as those of apcore's steps see it that read its schemas."""

    @property
    def input_schema(self) -> Any:
        return _view_of(self.viewed.input_schema)

    @property
    def output_schema(self) -> Any:
        return _view_of(self.viewed.output_schema)


class _RegistryView(_View):
    """A registry whose modules are views."""

    def get(self, *arguments: Any, **options: Any) -> _ModuleView | None:
        module = self.viewed.get(*arguments, **options)
        return None if module is None else _ModuleView(module)


def _is_apcores(thing: Any) -> bool:
    """Whether apcore has made `thing`, a class or a function, while it made a module of a function."""
    return getattr(thing, "__module__", None) == FunctionModule.__module__ and not hasattr(thing, "__wrapped__")


def _is_as_sent(hint: Any) -> bool:
    """Whether JSON's values are what a hint says, just as they are: for `str` and `dict[str, Any] | None`; not for
    `date`, nor for `float`, as a client may send `2`."""
    origin = get_origin(hint)
    parts = get_args(hint)
    if origin is dict:
        return parts[0] is str and _is_as_sent(parts[1])
    if origin in (list, Union, UnionType):
        return all(map(_is_as_sent, parts))
    return hint in (str, int, bool, NoneType, list, dict, Any)


def _type_of_others(function: Callable[..., Any]) -> TypeAdapter[JSONObject] | None:
    """The type of what `**kwargs` takes, as a dict; None where its hint says no more than JSON, or pydantic knows it
    not."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            hint = get_type_hints(function, include_extras=True).get(name, Any)
            with suppress(PydanticSchemaGenerationError):
                return None if _is_as_sent(hint) else TypeAdapter(cast(Any, dict)[str, hint])
    return None


def _read_strictly(read_json: Callable[..., T], read_python: Callable[..., T], values: JSONObject) -> T:
    """`values` read as apcore reads arguments: as JSON, or where another module passes what JSON has not, as Python."""
    try:
        text = json.dumps(values)
    except (TypeError, ValueError):
        return read_python(values, strict=True)
    return read_json(text, strict=True)


class _Signature:
    """What the calls of a function need to know of its signature, read once for each module that apcore made of one.

    It holds names alone: a type, a default or the function itself would keep the module that it is kept for."""

    def __init__(self, module: FunctionModule) -> None:
        hints: JSONObject = {}
        with suppress(NameError):  # as apcore looks for it
            hints = get_type_hints(_function_of(module), include_extras=True)
        # The parameters that are given the call's Context.
        self.contexts = [name for name, hint in hints.items() if hint is Context and name != "return"]
        self.hidden: list[str] = []  # those that nobody can send, as `_memo`
        self.positional_only: list[str] = []
        self.filled: list[str] = []  # those whose default is in the model: `limit: int = Field(10, le=50)`
        self.sent_as: dict[str, str] = {}  # of the parameters that do not take what was sent as it is: its name there
        self.reads_others = False  # whether `**kwargs` do not
        if _is_apcores(module.input_schema):
            self._read_hints(module)
        self.returns_dict = _is_apcores(module.input_schema) and hints.get("return", Any) not in (Any, NoneType)
        self.is_wrapped = _is_apcores(module.output_schema) and "result" in module.output_schema.model_fields
        # A model validates as what it is, whatever its aliases; but apcore's redaction looks into dicts alone.
        self.keeps_models = self.is_wrapped and not _has_marks(module, "output_schema")

    def _read_hints(self, module: FunctionModule) -> None:
        """What a model that apcore has made of the hints says. Another schema says nothing of the types that the
        function takes, and it is given what was sent."""
        function = _function_of(module)
        fields = module.input_schema.model_fields
        for name, parameter in inspect.signature(function).parameters.items():
            if name in ("self", "cls") or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                continue
            if name not in fields and name not in self.contexts:
                self.hidden.append(name)
            if parameter.kind is parameter.POSITIONAL_ONLY:
                self.positional_only.append(name)
            if isinstance(parameter.default, FieldInfo):
                self.filled.append(name)
        for name, field in fields.items():
            alias = field.validation_alias
            if alias is not None or field.metadata or name in self.filled or not _is_as_sent(field.annotation):
                self.sent_as[name] = alias if isinstance(alias, str) else name
        self.reads_others = _type_of_others(function) is not None  # apcore's model knows no type of `**kwargs`


_SIGNATURES = weakref.WeakKeyDictionary[FunctionModule, _Signature]()


_DIGITS = re.compile(r"[+-]?\d+(\.\d*)?")


def _is_guessed(sent: object, read: object) -> bool:
    """Whether pydantic has taken a text of digits for a Unix time, as it does where JSON's numbers are refused."""
    if isinstance(sent, str):
        return isinstance(read, date | timedelta) and _DIGITS.fullmatch(sent) is not None
    if isinstance(sent, dict) and isinstance(read, dict) and len(sent) == len(read):
        return any(map(_is_guessed, [*sent, *sent.values()], [*read, *read.values()]))
    if isinstance(sent, list) and isinstance(read, list | tuple):
        return any(map(_is_guessed, sent, read))
    if isinstance(sent, dict):
        return any(_is_guessed(item, getattr(read, name, None)) for name, item in sent.items())
    return False


class _Function:
    """A function of which apcore made a module, in one call of a server: it is called with what its hints say.

    apcore (0.32) makes a model of the hints and validates by it, but hands on what was sent: the text of a date, the
    list of a set. And of every result but a model or a dict it promises `{"result": ...}`, but gives None, a model and
    a dict without it, also for the hints `Item | None` and `Any`."""

    def __init__(self, module: FunctionModule) -> None:
        signature = _SIGNATURES.get(module)
        if signature is None:
            signature = _SIGNATURES[module] = _Signature(module)
        self._signature = signature
        self._function = _function_of(module)
        self._model = module.input_schema

    def run(self, inputs: JSONObject, context: Context[Any]) -> Any:
        """Call a sync function, as `execute` of its module does."""
        positional, named = self._arguments(inputs, context)
        return self._function(*positional, **named)

    async def run_async(self, inputs: JSONObject, context: Context[Any]) -> Any:
        """Call an async function, as `execute` of its module does."""
        positional, named = self._arguments(inputs, context)
        return await self._function(*positional, **named)

    def _arguments(self, inputs: JSONObject, context: Context[Any]) -> tuple[list[Any], JSONObject]:
        """What the function is called with: the arguments that only take a place, and those by name."""
        named = {**self._read(inputs), **dict.fromkeys(self._signature.contexts, context)}
        positional = []
        if self._signature.positional_only:
            parameters = inspect.signature(self._function).parameters
            positional = [named.pop(name, parameters[name].default) for name in self._signature.positional_only]
        return positional, named

    def _read(self, inputs: JSONObject) -> JSONObject:
        """What was sent, by parameters and as their hints say: read as apcore has read it to validate it. What has not
        been sent is left to the function's own defaults, and what it does not take, to its refusal."""
        names = self._signature.sent_as
        for name in self._signature.hidden:
            if name in inputs:  # which a function with `**kwargs` would take
                raise TypeError(f"{name} is no argument")
        values = {name: value for name, value in inputs.items() if name not in names.values()}
        if self._signature.reads_others:
            fields = self._model.model_fields
            values |= self._read_others({name: value for name, value in values.items() if name not in fields})
        if not names:
            return values
        try:
            model = _read_strictly(self._model.model_validate_json, self._model.model_validate, inputs)
        except ValidationError:  # the Executor does without validation
            return inputs
        for name in names:
            if name in values:  # or a client could send what nothing has validated
                raise TypeError(f"{name} is sent as {names[name]}")
            if name in model.model_fields_set or name in self._signature.filled:
                values[name] = vars(model)[name]
                if _is_guessed(inputs.get(names[name]), values[name]):
                    faults = [_fault([names[name]], "format", "Digits alone are no date and no time")]
                    raise SchemaValidationError(f"Input validation failed: {faults}", faults)
        return values

    def _read_others(self, values: JSONObject) -> JSONObject:
        """What was sent for `**kwargs`."""
        others = cast(TypeAdapter[JSONObject], _type_of_others(self._function))
        try:
            return _read_strictly(others.validate_json, others.validate_python, values)
        except ValidationError as error:
            faults = [*_pydantic_faults(error, values)]
            raise SchemaValidationError(f"Input validation failed: {faults}", faults) from None

    def output(self, result: Any) -> JSONObject:
        """What the function returned, in the form that apcore has promised."""
        if isinstance(result, BaseModel) and not self._signature.keeps_models:
            result = _dumped(result)
        if self._signature.is_wrapped:
            return {"result": result}
        if result is None and self._signature.returns_dict:  # apcore takes a forgotten `return` for an empty dict
            raise _RefusedOutput("Output validation failed: None", [_fault([], "type", "Nothing was returned")])
        if result is None:
            return {}
        return result if isinstance(result, dict) else {"result": result}


def _as_output(result: Any) -> Any:
    """What a class returned, as apcore takes outputs: the dict of a model, the list of an array."""
    if isinstance(result, BaseModel):
        return _dumped(result)
    return result.tolist() if hasattr(result, "tolist") else result


def _execute_of(module: Any) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """What runs a module in the calls of a server, and what makes an output of what it has returned.

    A function is run here, and not by the `execute` that apcore has made of it, which dumps a model and with it what
    is marked."""
    execute: Callable[..., Any] = module.execute
    if not isinstance(module, FunctionModule) or not _is_apcores(execute):
        return execute, _as_output
    function = _Function(module)
    return function.run_async if inspect.iscoroutinefunction(execute) else function.run, function.output


_BLOCKED_SECONDS = 1.0  # of the event loop by one module, and it is told


@coroutine
def _watched(work: Coroutine[Any, Any, T], context: Context[Any], call: _Call) -> Generator[Any, Any, T]:
    """Run a coroutine of a module, and log when it has held up the event loop, which serves nobody meanwhile.

    Timed is what runs from one thing that it waits for to the next, and not the waiting; and not what a module that it
    calls has been told for, which may run within."""
    value: Any = None
    error: BaseException | None = None
    while True:
        told = call.blocked_seconds
        started = time.monotonic()
        try:
            awaited = work.send(value) if error is None else work.throw(error)
        except StopIteration as end:
            returned: T = end.value
            return returned
        finally:
            error = None  # its traceback holds this frame
            seconds = time.monotonic() - started - (call.blocked_seconds - told)
            if seconds >= _BLOCKED_SECONDS:
                call.blocked_seconds += seconds
                message = "Module %s blocked the event loop: for %.1f s nobody was served. What blocks needs a thread"
                logger.warning(message, context.call_chain[-1], seconds)
        try:
            value = yield awaited
        except GeneratorExit:  # nobody waits for it any longer, and the loop has ended
            work.close()
            raise
        except BaseException as thrown:  # a cancellation, and what was awaited has raised
            error = thrown


class _RunningModule(_ModuleView):
    """A module as the step sees it that runs it: what runs for the call can be ended."""

    def __init__(self, module: Any, is_streamed: bool) -> None:
        super().__init__(module)
        self.marks: JSONSchema = {}  # of the models that it has returned
        self._task: asyncio.Task[Any] | None = None
        if is_streamed and isinstance(module, StreamingModule):
            self.stream = module.stream  # from Python 3.12 on, a protocol looks past `__getattr__`

    async def execute(self, inputs: JSONObject, context: Context[Any]) -> Any:
        """Run the module as apcore does: a coroutine in this task, any other function in a thread."""
        execute, as_output = _execute_of(self.viewed)
        self._task = asyncio.current_task()
        try:
            loop = asyncio.get_running_loop()
            call = _call_of(context)
            has_sync_caller = call is not None and call.loop is not loop  # `Executor.call()` runs one of its own
            if inspect.iscoroutinefunction(execute):
                work = execute(inputs, context)
                result = await (work if call is None or has_sync_caller else _watched(work, context, call))
                return self._marked(as_output(result))
            # Not in the loop's pool: a host's may have six threads, and apcore needs one for the hooks of middleware.
            threads = _threads().of_inner_modules if has_sync_caller else _threads().of_modules
            return self._marked(as_output(await loop.run_in_executor(threads, execute, inputs, context)))
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio would let it out of this task, and end the loop
            raise RuntimeError(f"the module raised {type(error).__name__}: {error}") from error
        finally:
            self._task = None

    def _marked(self, output: Any) -> Any:
        """`output`, of which it is known then what the models in it mark."""
        if not _is_plain(output):
            with suppress(RecursionError):  # nothing that holds itself is sent
                self.marks = _marks_in(output)
        return output

    def end(self) -> None:
        """Cancel what still runs. A thread goes on, and what it returns or raises is dropped."""
        if self._task is not None:
            self._task.add_done_callback(_silence)
            self._task.cancel()


class _ModuleStep(BaseStep):
    """One of apcore's steps that, in the calls of a server, sees a view of the module. In other calls of the Executor
    it does what apcore's does, and the steps around it always see the module itself."""

    def __init__(self, step: BaseStep) -> None:
        vars(self).update(vars(step))  # its name, its time limit and the like
        self._step = step

    async def execute(self, ctx: PipelineContext) -> StepResult:
        module = ctx.module
        call = _call_of(ctx.context)
        if module is None or call is None:
            return await self._step.execute(ctx)
        call.record(module)
        try:
            return await self._execute_with(module, ctx, call)
        finally:
            ctx.module = module

    async def _execute_with(self, module: Any, ctx: PipelineContext, call: _Call) -> StepResult:
        ctx.module = _ModuleView(module)
        return await self._step.execute(ctx)


def _own_values(value: Any) -> Any:
    """What the models in a value hold, under the names of their fields."""
    if isinstance(value, RootModel):
        return _own_values(value.root)
    if isinstance(value, BaseModel | dict):
        return {name: _own_values(item) for name, item in dict(value).items()}
    return type(value)(map(_own_values, value)) if type(value) in (list, tuple) else value


def _is_serialized(field: JSONObject) -> bool:
    """Whether a function of a user's own says what becomes of a field, of which this is pydantic-core's schema."""
    part = field.get("schema")
    while part is not None:
        if _rewrites(part.get("serialization", {})):
            return True
        part = part.get("schema")
    return False


class _DumpForms:
    """In what the dumps of a model may differ from what it takes, by the names in it and in the models that it holds.

    A dump does not say which model a dict in it was. So a name counts wherever it stands."""

    def __init__(self, model: type[BaseModel]) -> None:
        self.fields: dict[str, str] = {}  # by the alias that they are serialized by
        self._excluded: set[str] = set()  # what dumps need not have
        self._computed: set[str] = set()  # what is in dumps alone
        self._serialized: set[str] = set()  # what is there in a form that only its author knows
        for core in _core_schemas({**TypeAdapter(model).core_schema}):
            if core["type"] == "model-fields":
                self._add(core)

    def _add(self, core: JSONObject) -> None:
        for name, field in core["fields"].items():
            aliases = [field.get("validation_alias"), field.get("serialization_alias")]
            names = {name, *(alias for alias in aliases if isinstance(alias, str))}
            if aliases[1] is not None and aliases[0] != aliases[1]:
                self.fields[aliases[1]] = name
            if field.get("serialization_exclude") or field.get("serialization_exclude_if"):
                self._excluded |= names
            if _is_serialized(field):
                self._serialized |= names
        for computed in core.get("computed_fields", ()):
            self._computed |= {computed["property_name"], computed.get("alias") or computed["property_name"]}

    def explain(self, error: ValidationError) -> bool:
        """Whether pydantic has found no more than what makes a dump."""
        return all(map(self._explain, error.errors(include_url=False, include_context=False)))

    def _explain(self, fault: Any) -> bool:
        path = {step for step in fault["loc"] if isinstance(step, str)}
        last = {*fault["loc"][-1:]}
        if fault["type"] == "missing":
            return bool(last & self._excluded)
        return bool(path & self._serialized) or (fault["type"] == "extra_forbidden" and bool(last & self._computed))


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Copy containers with other names of the keys in dicts; of arrays the values."""
    if isinstance(value, dict):
        return {names.get(key, key): _renamed(item, names) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_renamed(item, names) for item in value)
    return value.tolist() if hasattr(value, "tolist") else value


class _OutputSchema(_View):
    """A module's output schema as the step sees it that validates outputs: it refuses nothing for its form.

    A dict schema speaks of JSON: it is shown the output as JSON. A model may be dumped by its names or by either alias,
    and as JSON."""

    def __init__(self, schema: Any, output: Any) -> None:
        super().__init__(_view_of(schema))
        self._schema = schema
        self._output = output  # as the module gave it
        self.is_renamed = False  # whether it was dumped otherwise than the schema describes it

    def model_validate(self, data: Any, **options: Any) -> Any:
        # What apcore makes of a dict, and of the hint `dict[int, str]`: its keys are texts in JSON.
        if type(self._schema).__module__ == Registry.__module__ or not getattr(self._schema, "model_fields", True):
            return self._schema.model_validate(data, **options)
        try:
            return self._schema.model_validate(self._output, **options)
        except ValidationError as error:
            if not isinstance(self._schema, _Model):
                raise
            self.is_renamed = True
            return self._validate_dump(self._schema, error)

    def _validate_dump(self, model: type[BaseModel], error: ValidationError) -> Any:
        """Validate an output that a model does not take as it is, which is the `error`."""
        forms = _DumpForms(model)
        errors = [error]
        for read in self._readings(model, forms.fields):
            try:
                return read(strict=True)
            except ValidationError as other:
                errors.append(other)
        if not any(map(forms.explain, errors)):
            raise min(errors, key=ValidationError.error_count)  # in the form that was meant there is least to find
        return self._output

    def _readings(self, model: type[BaseModel], names: Mapping[str, str]) -> Iterator[Callable[..., Any]]:
        """The ways to read a dump: by the names of fields, by either alias, and each of these as JSON."""
        if isinstance(self._output, _Dump) and isinstance(self._output.model, model):
            values = _own_values(self._output.model)
            yield functools.partial(model.model_validate, values, by_alias=False, by_name=True)
            return
        output = _renamed(self._output, {})
        for values, by_name in ((output, None), (_renamed(output, names), True)):
            yield functools.partial(model.model_validate, values, by_name=by_name)
            if _is_plain(values):
                yield functools.partial(model.model_validate_json, _to_bytes(values), by_name=by_name)


class _OutputView(_ModuleView):
    """A module as the step sees it that validates outputs."""

    def __init__(self, module: Any, output: Any) -> None:
        super().__init__(module)
        schema = getattr(module, "output_schema", None)
        self.schema = None if schema is None else _OutputSchema(schema, output)

    @property
    def output_schema(self) -> Any:
        return self.schema


class _OutputValidation(_ModuleStep):
    """The step that validates outputs, and redacts them for hooks. In the calls of a server it sees the output as JSON,
    as apcore's redaction stops at what is not, and everything after it what the module gave."""

    async def _execute_with(self, module: Any, ctx: PipelineContext, call: _Call) -> StepResult:
        given = ctx.output
        view = ctx.module = _OutputView(module, given)
        try:
            if given is not None and not _is_plain(given):
                ctx.output = self._plain(given, module, call if _begins(call, ctx.context) else None)
            result = await self._step.execute(ctx)
        except SchemaValidationError as error:
            cause = error.__cause__
            faults = error.details.get("errors") or []
            if isinstance(cause, ValidationError):
                faults = [*_pydantic_faults(cause, given)]
            raise _RefusedOutput(f"Output validation failed: {faults}", faults) from cause
        finally:
            ctx.output = given
        if isinstance(given, _Dump) and not given.marks:  # from here on nobody needs the model
            ctx.output = {**given}
        ctx.validated_output = ctx.output
        if view.schema is not None and view.schema.is_renamed and _has_marks(module, "output_schema"):
            ctx.context.redacted_output = None  # apcore's redaction knows the names of the schema alone
        return result

    def _plain(self, output: Any, module: Any, call: _Call | None) -> Any:
        """`output` as JSON: as the `call` sends it, or without one where JSON has it, as another module gets it."""
        try:
            if call is not None:
                return _as_plain(output, *call.tool.outputs)
            return _as_plain(output, getattr(module.output_schema, "model_json_schema", dict)())
        except Exception as error:  # a module's own __str__ may raise anything
            if call is None:
                return output
            raise ModuleError("OUTPUT_SERIALIZATION_ERROR", f"output is not JSON: {_text_of(error)}") from None


class _ModuleLookup(_ModuleStep):
    """The step that looks a module up, and redacts its arguments for the hooks before validation.

    Here a call learns which modules take part in it: whatever may quote the arguments in an error comes later."""

    def __init__(self, step: BuiltinModuleLookup) -> None:
        super().__init__(step)
        self._lookup = step
        registry = getattr(step, "_registry", None)
        if isinstance(registry, Registry):
            # The registry that the step asks is not public. It is set on a copy, and only where there is such an
            # attribute: if apcore changes here, a call takes longer and is as right as before.
            self._lookup = copy.copy(step)
            self._lookup._registry = _RegistryView(registry)  # pyright: ignore[reportPrivateUsage]

    async def execute(self, ctx: PipelineContext) -> StepResult:
        call = _call_of(ctx.context)
        if call is None:
            return await self._step.execute(ctx)
        try:
            return await self._lookup.execute(ctx)
        finally:
            if isinstance(ctx.module, _ModuleView):
                ctx.module = ctx.module.viewed
            if ctx.module is not None:
                call.record(ctx.module)


@functools.cache
def _execution_without_limit() -> BuiltinExecute:
    """apcore's step that runs a module, with no time limit but the module's own."""
    return BuiltinExecute(config=Config({"executor": {"default_timeout": 0}}))


class _Execution(_ModuleStep):
    """The step that runs a module. In the calls of a server, what it runs ends with the call. A module that is marked
    as long goes on as a task, where that can be, and without apcore's limits.

    apcore (0.32) runs a coroutine in a task of its own, which goes on when the call is cancelled or times out, and it
    looks at the deadline of a stream only when a chunk has come."""

    async def _execute_with(self, module: Any, ctx: PipelineContext, call: _Call) -> StepResult:
        running = ctx.module = _RunningModule(module, ctx.stream)
        step = self._step
        is_called = _begins(call, ctx.context)
        if is_called:
            call.has_begun = True
            is_long = call.tool.about.is_long
            if (is_long or call.is_due) and call.begin_task() and is_long:
                step = _execution_without_limit()
                ctx.context.global_deadline = math.inf  # not None: what the module calls would be given one
        try:
            result = await step.execute(ctx)
        except BaseException:
            running.end()
            raise
        if running.marks:
            call.has_marks = True
            if is_called:
                call.marks = [running.marks]  # middleware may copy the output, and lose them
        if ctx.output is not None and not isinstance(ctx.output, Mapping):  # apcore would fail, and not say why
            fault = _fault([], "type", f"a module returns a dict or a model, not a {type(ctx.output).__name__}")
            raise _RefusedOutput(f"Output validation failed: {fault['message']}", [fault])
        deadline = ctx.context.global_deadline
        if ctx.output_stream is not None and deadline is not None:
            ctx.output_stream = _until(deadline, ctx.output_stream, ctx.context)
        return result


async def _until(deadline: float, stream: Any, context: Context[Any]) -> AsyncIterator[Any]:
    """The chunks of `stream`, and at `deadline` (epoch seconds) an empty one, in place of what does not come.

    apcore looks at the deadline whenever a chunk has come, and then ends the call with a ModuleTimeoutError of its own:
    the empty chunk is never sent."""

    async def next_chunk() -> Any:
        return await anext(stream)

    call = _call_of(context)
    while True:
        limit = asyncio.timeout(deadline - time.time() + 0.01)  # the clock that apcore reads must be past it, too
        try:
            async with limit:
                chunk = await (next_chunk() if call is None else _watched(next_chunk(), context, call))
        except StopAsyncIteration:
            return
        except TimeoutError:
            if not limit.expired():  # the module has raised it
                raise
            chunk = {}
        yield chunk


# ---- Approval: who is asked before a call runs; event loop only ----

_CONTROL = "system.control."  # begins the ids of apcore's modules that configure and reload the application


_APPROVAL = "approval"  # the key of its question on the wire
_NOBODY = "nobody can be asked"  # why our own handlers reject a call whose user cannot be asked


class ElicitationApprovalHandler:
    """Asks the user who made a call whether it may run, by elicitation: for the `approval_handler` of an Executor.

    A call is rejected when its user refuses, declines or says nothing for ten minutes, and when its user cannot be
    asked, as when it did not come through MCP. Source: FR-ANNOT-006."""

    async def request_approval(self, request: ApprovalRequest) -> ApprovalResult:
        call = _call_of(request.context)
        if call is None:
            return _Unasked("rejected", reason=_NOBODY)
        field = {"type": "boolean", "title": "Let it run", "default": False}
        schema = {"type": "object", "properties": {"approve": field}, "required": ["approve"]}
        is_own = call.confirms and _begins(call, request.context)
        if call.can_ask:
            answer = await call.elicit(_approval_question(request), schema, _APPROVAL)
        elif is_own and call.has_forms:
            answer = call.confirm(_approval_question(request), schema)
        else:
            return self._decide_unasked(request, call, is_own or call.parks)
        result = ApprovalResult(status="approved" if answer and answer["approve"] else "rejected")
        logger.info("%s was %s by its user", _label(request.module_id, call.caller), result.status)
        return result

    async def check_approval(self, approval_id: str) -> ApprovalResult:
        """Rejects: a user answers the question, and what a client sends as a token is no answer."""
        return ApprovalResult(status="rejected")

    def _decide_unasked(self, request: ApprovalRequest, call: _Call, lacks_capability: bool) -> ApprovalResult:
        """The decision about a call whose user cannot be asked."""
        label = _label(request.module_id, call.caller)
        logger.warning("%s is refused: its user cannot be asked for approval (see approval=, --approval)", label)
        return _Unasked("rejected", reason=_NOBODY, lacks_capability=lacks_capability)


class _AskOrLetThrough(ElicitationApprovalHandler):
    """Asks the user who made a call, and lets it through with a WARNING when its user cannot be asked.

    It rejects a call of one of apcore's control modules then: it changes how the application runs, and its caller may
    be anybody. And it rejects what is left of a call that has ended, or whose user could be asked before."""

    def _decide_unasked(self, request: ApprovalRequest, call: _Call, lacks_capability: bool) -> ApprovalResult:
        if request.module_id.startswith(_CONTROL) or not call.may_go_unasked:
            return super()._decide_unasked(request, call, lacks_capability)
        label = _label(request.module_id, call.caller)
        logger.warning("%s is let through without approval: its user cannot be asked", label)
        return ApprovalResult(status="approved")


# What a question shows at most. It says what it leaves out, and how much that is.
_SHOWN_ARGUMENTS = 100
_SHOWN_CHARACTERS = 5_000  # of an argument, as JSON
_SHOWN_TEXT_CHARACTERS = 500  # of a text in it


def _approval_question(request: ApprovalRequest) -> str:
    """What a person is asked about a call: what the module does, what is dangerous about it, and what it is called
    with, a line for each argument. Those that its schema names come first, however many others the caller sends."""
    registry = request.context.executor.registry
    module = registry.get(request.module_id)
    definition = registry.get_definition(request.module_id)
    lines = [f"Let {request.module_id} run?"]
    description = _AnnotationMapper(definition, module).description
    if description:
        lines.append(_first_sentence(description))
    if request.annotations.destructive:
        lines.append("It is annotated as destructive: what it does may not be undone.")
    schemas = [definition.input_schema]
    model: Any = getattr(module, "input_schema", None)
    is_model = isinstance(model, _Model)
    if is_model:
        spelled = TypeAdapter(model).json_schema(by_alias=False, schema_generator=_AllSpellings)
        if spelled != schemas[0]:
            schemas.append(spelled)
    forms = [_inlined_or_marked(schema) for schema in schemas if _marks_sensitive(schema)]
    arguments = json.loads(json.dumps(request.arguments, default=_argument_as_json))
    shown = _redact(arguments, *map(_marks, forms), forms=forms if is_model else None)
    if shown == REDACTED_VALUE:  # the schema as a whole is marked
        shown = dict.fromkeys(arguments, shown)
    named = [*itertools.chain.from_iterable(map(_names_at_root, schemas))]
    known = [name for name in dict.fromkeys(named) if name in shown]
    names = [*dict.fromkeys([*known, *shown])]
    names_any = bool(named) or any("properties" in schema for schema in schemas)  # or all names are equal
    lines.append("Arguments:" if names else "Arguments: none")
    for index, name in enumerate(names[:_SHOWN_ARGUMENTS]):
        if index == len(known) and names_any:
            lines.append("(the module's schema does not name these:)")
        label = name if name.isascii() and name.isidentifier() and len(name) <= 100 else _written(name)
        lines.append(f"- {label}: {_shortened(_written(shown[name]), _SHOWN_CHARACTERS)}")
    if len(names) > _SHOWN_ARGUMENTS:
        lines.append(f"(arguments left out: {len(names) - _SHOWN_ARGUMENTS:,})")
    return "\n".join(lines)


def _names_at_root(schema: JSONSchema) -> Iterator[str]:
    """The properties that `schema` names, also in branches and behind references."""
    resolver = SchemaResources().resolver_with_root(DRAFT202012.create_resource(schema))
    pending = [schema]
    followed = set()
    while pending:
        part = pending.pop(0)
        yield from _properties(part)
        pending += _branches(part, _IN_PLACE)
        ref = part.get("$ref")
        if ref is not None and ref not in followed:
            followed.add(ref)
            with suppress(Unresolvable):
                pending += [target for target in [resolver.lookup(ref).contents] if isinstance(target, dict)]


class _AllSpellings(_AnySchema):
    """Writes models with each field under its name and under all aliases: a caller may write either, and apcore
    describes it by one of them. Of an alias that is a path, `AliasPath("login", 0)`, each step is a schema."""

    def model_fields_schema(self, schema: Any) -> JSONSchema:
        return self._spell(super().model_fields_schema(schema), schema["fields"])

    def typed_dict_schema(self, schema: Any) -> JSONSchema:
        return self._spell(super().typed_dict_schema(schema), schema["fields"])

    def dataclass_args_schema(self, schema: Any) -> JSONSchema:
        fields = {field["name"]: field for field in schema["fields"]}
        return self._spell(super().dataclass_args_schema(schema), fields)

    def _spell(self, json_schema: JSONSchema, fields: Mapping[str, Any]) -> JSONSchema:
        properties = json_schema.get("properties", {})
        for name, field in fields.items():
            aliases = field.get("validation_alias", [])  # a text, a path or a list of paths
            if isinstance(aliases, str):
                aliases = [aliases]
            if not all(isinstance(alias, list) for alias in aliases):
                aliases = [aliases]
            for first, *path in aliases if name in properties else ():
                spelled = copy.deepcopy(properties[name])
                for step in reversed(path):
                    spelled = {"properties": {step: spelled}} if isinstance(step, str) else _at_index(step, spelled)
                properties[first] = {"allOf": [properties[first], spelled]} if first in properties else spelled
        return json_schema


def _at_index(index: int, schema: JSONSchema) -> JSONSchema:
    """What says `schema` of the item at `index` of a list; counted from its end, of any."""
    return {"items": schema} if index < 0 else {"prefixItems": [*[{}] * index, schema]}


def _argument_as_json(value: object) -> Any:
    """What a module calls another one with, in plain JSON types, without using up an iterator."""
    if isinstance(value, Iterator):
        return "(cannot be shown)"
    plain = to_jsonable_python(value, bytes_mode="base64", fallback=str)
    if isinstance(value, BaseModel):
        return _redact(plain, _marks(_inlined_or_marked(type(value).model_json_schema(mode="serialization"))))
    return plain


def _first_sentence(text: str) -> str:
    """The first sentence of `text`, in one line. An abbreviation before a small letter, as "e.g.", does not end it."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[^a-z])", paragraph, maxsplit=1)[0]


def _written(value: Any) -> str:
    """Plain JSON as JSON text for a person, of which all can be seen. A long text is without its middle."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_written(name)}: {_written(item)}' for name, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    if isinstance(value, str) and len(value) > _SHOWN_TEXT_CHARACTERS:
        # Each half in quotes of its own, so that no text can say this of itself.
        return _shortened(value, _SHOWN_TEXT_CHARACTERS, _written)
    return _visible(json.dumps(value, ensure_ascii=False))


# What `str.isprintable()` takes for visible and is not: fillers of Hangul and Khitan, Khmer's inherent vowels,
# variation selectors, the grapheme joiner, and the blanks of Braille, of hieroglyphs and of notes.
_BLANK = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    "\U00013441\U00013442\U00016fe4\U0001d159\U000e0100-\U000e01ef]"
)
_OVERLAY = 1  # the combining class of what is drawn over a letter, as U+0336, which strikes it out
_ACCENTS_MAX = 6  # on one letter; more of them reach over other lines


def _visible(text: str) -> str:
    """`text` with JSON's escapes for what cannot be seen, moves what can, or is drawn over it.

    Letters of all scripts stay, with their accents, and emoji: so does U+FE0F behind a symbol, which makes it one. What
    joins several emoji to one (U+200D) is escaped, so that all of them are seen."""
    if text.isascii() and text.isprintable():
        return text
    written = []
    accents = 0
    before = ""  # the kind of the character before, if that is not escaped
    for char in text:
        kind = unicodedata.category(char)
        is_mark = kind.startswith("M")
        accents = accents + 1 if is_mark else 0
        if char == "\ufe0f":
            is_visible = before == "So"
        elif is_mark:
            is_on_letter = before[:1] in ("L", "M", "N") and accents <= _ACCENTS_MAX
            is_visible = is_on_letter and kind != "Me" and unicodedata.combining(char) != _OVERLAY
        else:
            is_visible = char.isprintable()
        if char != "\ufe0f" and _BLANK.match(char):
            is_visible = False
        before = kind if is_visible else ""
        written.append(char if is_visible else json.dumps(char)[1:-1])
    return "".join(written)


def _shortened(text: str, limit: int, write: Callable[[str], str] = str) -> str:
    """`text` with its two ends as `write` writes them and, if it is longer than `limit`, without its middle."""
    if len(text) <= limit:
        return write(text)
    half = limit // 2
    return f"{write(text[:half])} (characters left out: {len(text) - 2 * half:,}) {write(text[-half:])}"


# Who decides about the calls of a server, by its `approval=`; None leaves it to apcore.
_APPROVERS: dict[str, ApprovalHandler | None] = {
    "auto": _AskOrLetThrough(),
    "require": ElicitationApprovalHandler(),
    "deny": AlwaysDenyHandler(),
    "off": None,
}


@dataclasses.dataclass
class _ArgumentsFirst:
    """An approval handler that is asked once the arguments are valid: nobody should approve a call that then fails.

    apcore asks for approval first. Its own step validates here, and again in its place, where a middleware may have
    changed the arguments. A step that only warns, or holds for some modules only, is left in its place."""

    handler: ApprovalHandler
    ctx: PipelineContext

    async def request_approval(self, request: ApprovalRequest) -> ApprovalResult:
        for step in self.ctx.context.executor.current_strategy.steps:
            is_strict = isinstance(step, BaseStep) and not step.ignore_errors and step.match_modules is None
            if step.name == "input_validation" and is_strict:
                await step.execute(self.ctx)
        return await self.handler.request_approval(request)

    async def check_approval(self, approval_id: str) -> ApprovalResult:
        return await self.handler.check_approval(approval_id)


class _ApprovalGate(BuiltinApprovalGate):
    """An Executor's approval gate, which lets the server of a call decide where the Executor has no handler of its own.

    Everything else is up to the `gate` behind it: what apcore's Executor tells or asks this one, it tells or asks that
    one, so that a handler or a policy which is set later on either counts. A call that came through no server is that
    gate's alone. The time that a person takes to decide does not count against the call."""

    def __init__(self, gate: BuiltinApprovalGate) -> None:
        super().__init__()
        self._gate = gate
        self.name = gate.name
        self.timeout_ms = gate.timeout_ms

    def set_handler(self, handler: ApprovalHandler | None) -> None:
        self._gate.set_handler(handler)

    def set_policy(self, policy: ExecutionPolicy | None) -> None:
        self._gate.set_policy(policy)

    @property
    def handler(self) -> ApprovalHandler | None:
        return self._gate.handler

    @property
    def policy(self) -> ExecutionPolicy | None:
        return self._gate.policy

    async def execute(self, ctx: PipelineContext) -> StepResult:
        call = _call_of(ctx.context)
        if call is None:
            return await self._gate.execute(ctx)
        handler = self.handler
        if handler is None:
            handler = self._handler_of(call)
        gate = self._gate
        if handler is not None:
            gate = copy.copy(gate)  # for this call only: other calls and other servers share the gate
            gate.set_handler(_ArgumentsFirst(handler, ctx))
        started = time.time()
        try:
            return await gate.execute(ctx)
        finally:
            call.confirms = False  # what comes after is no longer before the module begins
            if ctx.context.global_deadline is not None:
                ctx.context.global_deadline += time.time() - started

    def _handler_of(self, call: _Call) -> ApprovalHandler | None:
        """Who decides by the `approval=` of the call's server; None leaves it to apcore."""
        approval = call.options.approval
        if not isinstance(approval, str):
            return approval
        if approval == "auto" and self.policy is not None and self.policy.strict:
            return _APPROVERS["require"]  # apcore itself would let nothing through
        return _APPROVERS[approval]


# ---- Router: a `tools/call` to the Executor and back, also while its user is asked; event loop only ----

_POLL_MS = 1_000  # how often a client is to ask for a task


def _merge(base: JSONObject, chunk: JSONObject) -> None:
    """Merge a streamed chunk as apcore's Executor does: objects by their keys, anything else replaced."""
    for key, value in chunk.items():
        if isinstance(value, dict) and isinstance(base.get(key), dict):
            _merge(base[key], value)
        else:
            base[key] = value


def _protocol_error(code: int, message: str, data: Any = None) -> Exception:
    """What the SDK answers with a JSON-RPC error."""
    from mcp.shared.exceptions import MCPError

    return MCPError(code, message, data)


def _task_state(task: _Kept) -> JSONObject:
    """What is said of a task whatever its status."""
    call = task.call
    kept_ms = None
    if call.outcome is not None:
        kept_ms = math.ceil((call.changed - task.created + _TASK_SECONDS) * 1000)
    return {
        "taskId": task.key,
        "createdAt": _timestamp(task.created),
        "lastUpdatedAt": _timestamp(max(task.created, call.changed)),
        "ttlMs": kept_ms,
        "pollIntervalMs": _POLL_MS,
    }


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _task_details(task: _Kept) -> JSONObject:
    """What `tasks/get` says of a task (`DetailedTask` of the extension)."""
    call = task.call
    outcome = call.outcome
    details: JSONObject
    if outcome is None and call.questions:
        questions = {key: question.request for key, question in call.questions.items()}
        details = {"status": "input_required", "inputRequests": questions}
    elif outcome is None:
        details = {"status": "working", **({"statusMessage": call.status} if call.status else {})}
    elif task.is_cancelled:
        details = {"status": "cancelled"}
    elif isinstance(outcome, Exception):
        error: Any = outcome
        report = error.error.model_dump(exclude_none=True)
        details = {"status": "failed", "error": report, "statusMessage": report["message"]}
    else:
        details = {"status": "completed", "result": outcome}
    return {**_task_state(task), **details}


def _install_steps(strategy: ExecutionStrategy) -> None:
    """Put the steps of these rooms in the places of apcore's that they extend.

    They stay there, as several servers may share an Executor: each step decides by the server of a call, and to a call
    that came to none it is the very step that it took the place of. Steps of the user's own classes are left alone."""
    for index, step in enumerate(strategy.steps):
        if isinstance(step, BuiltinApprovalGate) and not isinstance(step, _ApprovalGate):
            strategy.replace(step.name, _ApprovalGate(step))
        elif type(step) is BuiltinExecute:
            strategy.replace(step.name, _Execution(step))
        elif type(step) is BuiltinInputValidation:
            strategy.replace(step.name, _ModuleStep(step))
        elif type(step) is BuiltinOutputValidation:
            strategy.replace(step.name, _OutputValidation(step))
        elif type(step) is BuiltinModuleLookup:
            # `replace()` refuses this one, so that no pipeline loses its look-up; ours is that same look-up.
            strategy.steps[index] = _ModuleLookup(step)


def _tool_names(options: _Options, ctx: RequestContext) -> str:
    """The option `tool_names` for the client of a request: "module-id" or "portable"."""
    client = ctx.session.client_params
    if options.tool_names == "auto" and client is not None and _CLIENTS_WITHOUT_DOTS.match(client.client_info.name):
        return "portable"
    return "module-id" if options.tool_names == "auto" else options.tool_names


_OUTCOMES_MAX = 100  # of which calls are counted apart: a module's author may make up any number of codes
_OUTCOME_CHARACTERS = 100


def _code_of(outcome: JSONObject | Exception) -> str | None:
    """What the log calls the outcome of a call: "ok", or the code of its error; None where it is to go on later."""
    if isinstance(outcome, Exception):
        code = str(cast(Any, outcome).error.code)  # of JSON-RPC
    elif "inputRequests" in outcome:
        return None
    elif outcome["isError"]:
        code = outcome["_meta"]["apcore-mcp/error"]["error_type"]
    else:
        return "ok"
    return code[:_OUTCOME_CHARACTERS]


def _trace_parent(trace: Mapping[str, str]) -> TraceParent | None:
    """The span that a call belongs to: OpenTelemetry's, such as the SDK's own, which is one of the client's trace; or,
    where nobody collects any, the client's."""
    from opentelemetry.trace import get_current_span

    span = get_current_span().get_span_context()
    if span.is_valid:
        trace = {**trace, "traceparent": f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"}
    return TraceContext.extract(trace)


def _trace_id(trace: Mapping[str, str]) -> str:
    """The trace of a call that reaches no module."""
    parent = _trace_parent(trace)
    return secrets.token_hex(16) if parent is None else parent.trace_id


class _ExecutionRouter:
    """Sends a `tools/call` through apcore's Executor and brings back a tool result, whatever happens on the way.

    It raises nothing but cancellation and JSON-RPC errors. Those are for a retry whose state resumes no call, for a
    call that needs an answer which its client cannot give, and for one more than may wait (FR-EXEC-007).

    From 2026-07-28 on, a call that waits for its user is parked until its client's retry (`_Calls`), under a state that
    the SDK's `RequestStateBoundary` seals and binds to the tool, its arguments and the caller. So its module never runs
    twice. On a server without sessions that has a key, the state says no more than that the user was asked for
    approval; a call begins with the retry then, on whichever server, and nothing is kept."""

    def __init__(self, catalog: _ToolCatalog, options: _Options) -> None:
        self._catalog = catalog
        self._executor = options.executor
        self._options = options
        self._results = _Results(options.max_result, options.output_formatter)
        self.search = _SearchTools(catalog, options)
        self.calls = _Calls()
        self.ended = Counter[str]()  # how many calls have ended, by what came of them
        _install_steps(self._executor.current_strategy)
        # Where a step of the user's own runs modules, nothing says when one begins.
        self._knows_begin = any(isinstance(step, _Execution) for step in self._executor.current_strategy.steps)

    async def handle_call(self, ctx: RequestContext, params: CallToolRequestParams) -> Any:
        """Answer a `tools/call`: one that begins, or a retry with the answers to what an earlier one asked."""
        caller = _caller(getattr(ctx.request, "scope", {}))
        responses = params.input_responses or {}
        confirmation = None
        if params.request_state == _APPROVAL and self._options.state_key and ctx.protocol_version >= _MODERN:
            confirmation = responses.get(_APPROVAL)
        elif params.request_state is not None:
            return await self._resume(ctx, caller, params.request_state, responses)
        name = params.name
        arguments = params.arguments or {}
        if name in self.search.tools:
            names = _tool_names(self._options, ctx)
            answer = await self.find(name, arguments, caller, lambda tool: tool.name_as(names), _trace_sent(ctx))
            if answer is not None:
                return answer
            name, arguments = _target_of(arguments)
        tool = self._catalog.find(name)
        if tool is None:
            return self.not_found(name, caller, _trace_sent(ctx))
        call = _Call(tool, arguments, self._options, caller, self._results)
        call.attach(ctx)
        call.confirmation = confirmation
        if params.request_state is not None:  # whatever its client declares now, it could be asked
            call.may_go_unasked = False
        return await self.run(call)

    async def find(
        self,
        name: str,
        arguments: JSONObject,
        caller: Identity | None,
        name_of: Callable[[_Tool], str],
        trace: Mapping[str, str],
    ) -> JSONObject | None:
        """The result of a call of one of the two tools of a search; None for a `call_tool` that is to call another."""
        started = time.perf_counter()
        trace_id = _trace_id(trace)
        result = await self.search.answer(name, arguments, caller, name_of, trace_id)
        if result is not None:
            self._log_end(name, caller, result, started, trace_id)
        return result

    def not_found(self, name: str, caller: Identity | None, trace: Mapping[str, str]) -> JSONObject:
        """The result of a call of a tool that there is not."""
        started = time.perf_counter()
        trace_id = _trace_id(trace)
        name = name[:200]
        shown = _one_line(name)
        text = _sentence("MODULE_NOT_FOUND").format(module_id=shown)
        label = _label(shown, caller)
        logger.debug("Tool call: %s", label)
        line = "Tool call error: %s - ModuleNotFoundError: %s (trace %s)"
        logger.error(line, label, text, trace_id, extra={"trace_id": trace_id})
        result = _failure(text, "MODULE_NOT_FOUND")
        self._log_end(name, caller, result, started, trace_id)
        return result

    async def _resume(
        self, ctx: RequestContext, caller: Identity | None, state: str, responses: Mapping[str, Any]
    ) -> JSONObject:
        """Go on with a parked call. Returns its result, or what it asks next, beside what was not answered."""
        call = self.calls.resume(state, caller)
        if call is None:
            raise _protocol_error(-32602, "Invalid or expired requestState", {"reason": "invalid_request_state"})
        if call.outcome is None:
            call.attach(ctx)
            call.answer(responses)
        return await self._reply(call)

    async def run(self, call: _Call) -> JSONObject:
        """Begin a call. Returns its result, or the question that it asks first."""
        context: Context[Any] = Context.create(
            identity=call.caller,
            trace_parent=_trace_parent(call.trace),
            cancel_token=call.token,
            data={_CALL_KEY: call, MCP_PROGRESS_KEY: call.report, MCP_ELICIT_KEY: call.elicit},
        )
        call.calls = self.calls
        call.has_begun = not self._knows_begin
        call.task = asyncio.create_task(self._execute(call, context))
        return await self._reply(call)

    async def _reply(self, call: _Call) -> JSONObject:
        """Wait for a call's result, the questions that it asks first, or until it is a task. To stop waiting for it is
        to cancel it."""
        timer = None
        if call.can_be_task and self._options.task_after is not None:
            timer = _call_later(self._options.task_after, call.begin_task)
        try:
            while call.kept is None and call.is_working:
                await call.change()
        except asyncio.CancelledError:
            call.cancel()
            raise
        finally:
            if timer is not None:
                timer.cancel()
        if call.kept is not None:
            return {**_task_state(call.kept), "resultType": "task", "status": "working"}
        if call.outcome is not None:
            return call.take_outcome()
        questions = {key: question.request for key, question in call.questions.items()}
        return {"resultType": "input_required", "requestState": self.calls.park(call), "inputRequests": questions}

    async def _execute(self, call: _Call, context: Context[Any]) -> None:
        """Run the module to its end. The outcome is a tool result, also for whatever it raises, or a JSON-RPC error."""
        started = time.perf_counter()
        logger.debug("Tool call: %s", call.label)
        self.calls.running.add(call)
        _CURRENT.set(call)
        outcome: JSONObject | Exception | None = None
        try:
            outcome = await self._run_module(call, context)
        except BaseException as error:  # a module may raise anything
            outcome = self._outcome_of(call, error, context.trace_id)
        finally:
            outcome = outcome or _protocol_error(-32603, _UNEXPECTED)  # whatever happens, the call ends
            self.calls.end(call, outcome)
        self._log_end(call.tool.module_id, call.caller, outcome, started, context.trace_id)

    def _log_end(
        self, tool: str, caller: Identity | None, outcome: JSONObject | Exception, started: float, trace_id: str
    ) -> None:
        """Count a call that has ended, and log it. What its caller wrote fits between the quotes of a JSON text."""
        code = _code_of(outcome)
        if code is None:
            return
        self.ended[code if code in self.ended or len(self.ended) < _OUTCOMES_MAX else "other"] += 1
        if access_logger.isEnabledFor(logging.INFO):
            elapsed_ms = (time.perf_counter() - started) * 1000
            attributes = {
                "tool": _in_quotes(tool),
                "caller": "" if caller is None else _in_quotes(caller.id),
                "outcome": _in_quotes(code),
                "duration_ms": elapsed_ms,
                "trace_id": trace_id,
            }
            line = "Tool call ended: %(tool)s%(by)s, %(duration_ms).1f ms, trace %(trace_id)s: %(outcome)s"
            by = f" (caller: {attributes['caller']})" if caller is not None else ""
            access_logger.info(line, {**attributes, "by": by}, extra=attributes)

    def _outcome_of(self, call: _Call, error: BaseException, trace_id: str) -> JSONObject | Exception:
        """What a call is answered with that has raised `error`."""
        if isinstance(error, _Asked):
            questions = {_APPROVAL: error.question}
            return {"resultType": "input_required", "requestState": _APPROVAL, "inputRequests": questions}
        if call.is_refused:
            # Agents of the handshake versions show their model a tool's error, but may stop at one of the protocol.
            return _protocol_error(-32000, _TOO_MANY) if call.parks else _failure(_TOO_MANY, "TOO_MANY_QUESTIONS")
        if call.task is not None and call.task.cancelling():
            return _failure(_SENTENCES["EXECUTION_CANCELLED"], "EXECUTION_CANCELLED")
        modules = [*call.modules.values()]
        registry = self._options.registry
        mapper = _ErrorMapper(call.label, call.tool, call.arguments, modules, registry, trace_id, call.has_marks)
        result = mapper.to_result(error)
        unasked = _unasked(error)
        if unasked and unasked.lacks_capability:
            data: Any = {"requiredCapabilities": {"elicitation": {"form": {}}}}
            return _protocol_error(-32021, "Client did not declare form elicitation", data)
        return result

    async def _run_module(self, call: _Call, context: Context[Any]) -> JSONObject:
        """Check the arguments where apcore would not, and run the module: as a stream where its client follows it."""
        tool = call.tool
        needs_check = self._options.validate_inputs or _unknown_arguments(tool, call.arguments)
        # A caller whom the ACL refuses learns that from the Executor, and nothing about the arguments.
        if needs_check and await self._catalog.offered([tool], call.caller):
            errors = _faults(tool, call.arguments)
            if errors:
                raise SchemaValidationError(f"Input validation failed: {errors}", errors)
        is_streamed = tool.about.annotations.streaming and call.has_progress_token
        if is_streamed:  # the merged chunks, each sent as a progress notification (FR-STREAM-001)
            output: JSONObject = {}
            stream: Any = self._executor.stream(tool.module_id, call.arguments, context)
            async with aclosing(stream) as chunks:
                async for chunk in chunks:
                    _merge(output, chunk)
                    text = _as_json(tool, chunk)[0]
                    call.results.check_size(len(text))
                    await call.report(max(call.progress, 0) + 1, None, text.decode())
        else:
            output = await self._executor.call_async(tool.module_id, call.arguments, context)
        return call.results.of(tool, output, call.marks, call.label, is_checked=not is_streamed)


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

    caller = _caller(getattr(ctx.request, "scope", {}))
    return json.dumps([authenticated_principal(ctx), caller and caller.id])  # the SDK's knows the token's issuer, too


class _Bridge:
    """One registry served to any number of clients: the MCP handlers, and what lives as long as the server does.

    It lives from its construction to `finish()`. Once it has a `deadline`, the transports refuse new requests;
    `activity` says when the running ones have been answered. Clients hear of changed lists: those of the handshake
    versions on their connection, those of 2026-07-28 on the streams that they listen on."""

    def __init__(self, options: _Options) -> None:
        from mcp.server.lowlevel import Server
        from mcp.server.request_state import RequestStateBoundary, RequestStateSecurity
        from mcp.server.subscriptions import InMemorySubscriptionBus, ListenHandler
        from mcp_types import RequestParams

        self.options = options
        self.deadline = 0.0  # for whatever still runs, by the loop's clock; 0 until the server is told to end
        self.catalog = _ToolCatalog(options)
        self.router = _ExecutionRouter(self.catalog, options)
        self.activity = _Activity()
        self._bus = InMemorySubscriptionBus()
        self._listener = ListenHandler(self._bus)
        self._connections = weakref.WeakSet[Any]()  # of handshake clients that can be notified
        self._lists_changed = asyncio.Event()
        self.endless = weakref.WeakSet[Any]()  # tasks and cancel scopes that would never end by themselves
        self.entrance = ExitStack()  # closed as soon as the server is told to end: where clients connect
        self.refused = Counter[str]()  # how many HTTP requests were, by status
        self.streams = 0  # that SSE clients have open
        self.open_sessions: Mapping[str, Any] = {}  # of handshake clients: the SDK's transports, by session id
        self.max_sessions = math.inf  # of these; mcp 2.1 has no limit
        self.sessions = AsyncExitStack()  # closed with the server
        self.server: Any = Server(
            options.name,
            version=options.version or __version__,
            instructions=options.instructions,
            on_list_tools=self._list_tools,
            on_call_tool=self.router.handle_call,
            on_list_resources=self._list_resources,
            on_list_resource_templates=self._list_resource_templates,
            on_read_resource=self._read_resource,
            on_subscriptions_listen=self._listen,
        )
        if not options.stateless:
            for method, handler in (
                ("tasks/get", self._get_task),
                ("tasks/update", self._update_task),
                ("tasks/cancel", self._cancel_task),
            ):
                self.server.add_request_handler(method, RequestParams, handler)
        # Without it, the SDK runs tools/list for every 2026-07-28 HTTP call to check its headers (as before mcp 2.3).
        self.server.get_tool_input_schema = self._input_schema_of
        security = RequestStateSecurity(
            keys=[options.state_key_bytes or secrets.token_bytes(32)],
            ttl=_CONFIRMED_SECONDS if options.state_key else _PARKED_SECONDS,
            bind_principal=_principal,
        )
        self.server.middleware += [
            self._count_request,
            self._hide_unexpected_errors,
            self._declare_capabilities,
            self._fill_in_tools,
            RequestStateBoundary(security, default_audience=options.name),
        ]
        loop = asyncio.get_running_loop()
        self.catalog.follow(lambda: loop.call_soon_threadsafe(self._lists_changed.set))
        self.sessions.callback(self.catalog.close)
        self.endless.add(loop.create_task(self._notify_of_changes()))

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
                await self.router.calls.finish_tasks()
            for call in self.router.calls.running:
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
            raise _protocol_error(-32603, _UNEXPECTED) from None

    async def _declare_capabilities(self, ctx: RequestContext, call_next: CallNext) -> Any:
        """Tell a client which notifications it can get, and of MCP Apps as long as any tool has a page.

        The SDK's HTTP manager has no option for `listChanged`, and clients ignore notifications that they were told
        there are none of. In 2026-07-28 the SDK declares subscriptions to single resources; `_listen` honours none.
        On stdio it reads `Server.extensions` once, at the start."""
        result: Any = await call_next(ctx)
        if ctx.method not in ("initialize", "server/discover"):
            return result
        capabilities = result["capabilities"]
        extensions: JSONObject = {}
        if any(tool.about.page for tool in self.catalog.tools.values()):
            extensions[_APPS_EXTENSION] = {}
        if ctx.method == "server/discover" and not self.options.stateless:
            extensions[_TASKS_EXTENSION] = {}
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
            names = _tool_names(self.options, ctx)
            tools = self.router.search.tools.values() or await self._offered(ctx)
            result["tools"] = [tool.definition(names) for tool in tools]
        return result

    async def _list_tools(self, ctx: RequestContext, params: object) -> Any:
        return {"tools": [], **_FRESH}  # `_fill_in_tools` adds them

    def _input_schema_of(self, name: str) -> JSONSchema | None:
        tool = self.router.search.tools.get(name) or self.catalog.find(name)
        return tool.input_schema if tool else None

    async def _list_resources(self, ctx: RequestContext, params: object) -> Any:
        tools = await self._offered(ctx)
        return {"resources": [description for tool in tools for description, _ in tool.resources], **_FRESH}

    async def _list_resource_templates(self, ctx: RequestContext, params: object) -> Any:
        return {"resourceTemplates": [], **_FRESH}

    async def _read_resource(self, ctx: RequestContext, params: ReadResourceRequestParams) -> Any:
        for tool in await self._offered(ctx):
            for description, content in tool.resources:
                if description["uri"] == params.uri:
                    return {"contents": [content], **_FRESH}
        code = -32602 if ctx.protocol_version >= _MODERN else -32002
        raise _protocol_error(code, "Resource not found", {"uri": params.uri})

    async def _offered(self, ctx: RequestContext) -> list[_Tool]:
        """The tools that the caller of a request may call."""
        return await self.catalog.offered(self.catalog.tools.values(), _caller(getattr(ctx.request, "scope", {})))

    # The methods of the tasks extension (SEP-2663). Its answers are for clients that declare it with each request.

    async def _get_task(self, ctx: RequestContext, params: object) -> Any:
        task = self._task_of(ctx)
        task.is_told = task.call.outcome is not None
        return _task_details(task)

    async def _update_task(self, ctx: RequestContext, params: object) -> Any:
        from mcp_types import InputResponses

        call = self._task_of(ctx).call
        responses = (ctx.params or {}).get("inputResponses")
        if not isinstance(responses, Mapping):
            raise _protocol_error(-32602, "inputResponses must be an object")
        # Of what is no longer open, nothing has to be right.
        answers = {key: responses[key] for key in call.questions.keys() & responses.keys()}
        call.answer(TypeAdapter(InputResponses).validate_python(answers, by_name=False))
        return {}

    async def _cancel_task(self, ctx: RequestContext, params: object) -> Any:
        task = self._task_of(ctx)
        if task.call.outcome is None:
            task.is_cancelled = True
            task.call.cancel()
        return {}

    def _task_of(self, ctx: RequestContext) -> _Kept:
        """The task that a request names. Raises the JSON-RPC error of what is wrong with it first."""
        from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value

        if ctx.protocol_version < _MODERN:
            raise _protocol_error(-32601, "Method not found", ctx.method)
        self._require_tasks(ctx)
        task_id = (ctx.params or {}).get("taskId")
        if ctx.request is not None and decode_header_value(ctx.request.headers.get(MCP_NAME_HEADER)) != task_id:
            raise _protocol_error(-32020, "The Mcp-Name header must be the id of the task")
        task = self.router.calls.find_task(task_id, _caller(getattr(ctx.request, "scope", {})))
        if task is None:
            raise _protocol_error(-32602, "Task not found")
        return task

    def _require_tasks(self, ctx: RequestContext) -> None:
        if not _declares_tasks(ctx):
            data: Any = {"requiredCapabilities": {"extensions": {_TASKS_EXTENSION: {}}}}
            raise _protocol_error(-32021, f"Client did not declare the extension {_TASKS_EXTENSION}", data)

    async def _listen(self, ctx: RequestContext, params: Any) -> Any:
        """Open a stream of notifications (2026-07-28), of those that this server sends: changes of the lists."""
        # The SDK promises whatever is left in here.
        if "taskIds" in params.notifications.model_extra:
            self._require_tasks(ctx)
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


# ---- Explorer: one page, and as JSON what it shows and runs ----

# A tool's page (MCP Apps) must not run as the Explorer, nor carry its Authorization header. So the Explorer frames this
# document, which any caller may load, and posts the page to it (`sandbox-resource-ready` of the specification).
_FRAME = """<!doctype html>
<script>
addEventListener("message", ({ source, data }) => {
  if (source !== parent || data?.method !== "ui/notifications/sandbox-resource-ready") return;
  document.open(); // which also removes this listener
  document.write(data.params.html);
  document.close();
});
parent.postMessage({ jsonrpc: "2.0", method: "ui/notifications/sandbox-proxy-ready", params: {} }, "*");
</script>
"""
# The page keeps the headers of the document that it is written into. The policy is that of the specification for a page
# that declares no domains, without `'self'`. It repeats the sandbox of the Explorer's frame, because in a tab of its
# own the document would have the Explorer's origin.
_FRAME_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:; media-src data:"
        "; base-uri 'none'; form-action 'none'; frame-ancestors 'self'; sandbox allow-scripts"
    ),
    # For what no policy stops: WebRTC, and where a page sends its own frame. Chromium 156 knows it; others ignore it.
    "Connection-Allowlist": "()",  # https://wicg.github.io/connection-allowlists
}


def _explorer_headers(page: str) -> dict[str, str]:
    """The headers of all that the Explorer answers: its page may load, send and be framed nowhere else, and no page of
    another site may read anything here. `page` is its HTML, whose own script and style alone are let run."""
    policy = "default-src 'none'; img-src data:; media-src data:; connect-src 'self'; frame-src 'self'"
    policy += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    for tag, inside in re.findall(r"<(script|style)>(.*?)</\1>", page, re.DOTALL):
        digest = hashlib.sha256(inside.encode()).digest()
        policy += f"; {tag}-src 'sha256-{base64.b64encode(digest).decode()}'"
    return {
        "Content-Security-Policy": policy,
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


def _explorer_routes(bridge: _Bridge) -> list[BaseRoute]:
    """The routes below its prefix: the page, and as JSON what it shows and runs (FR-EXPLORER-001 to -006)."""
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    options = bridge.options
    page = Path(__file__).with_name("explorer.html").read_text("utf-8")
    headers = _explorer_headers(page)
    frame_headers = {**headers, **_FRAME_HEADERS}
    answer = functools.partial(JSONResponse, headers=headers)

    def not_found(request: Request) -> Response:
        return answer({"error": f"Tool {request.path_params['name']!r} not found"}, 404)

    async def about_server(request: Request) -> Response:
        about = {
            "name": options.name,
            "version": options.version or __version__,
            "instructions": options.instructions,
            "transport": options.transport,
            # Relative to the page, as its absolute path may have a prefix that a proxy removes.
            "endpoint": posixpath.relpath(urlsplit(options.url).path, options.explorer_prefix),
            "allowExecute": options.allow_execute,
            "hasACL": bool(bridge.catalog.acls),
        }
        return answer(about)

    async def summaries(request: Request) -> Response:
        tools = await bridge.catalog.offered(bridge.catalog.tools.values(), _caller(request.scope))
        definitions = [tool.definition(options.tool_names) for tool in tools]
        schemas = ("inputSchema", "outputSchema")
        return answer([{key: each[key] for key in each if key not in schemas} for each in definitions])

    async def detail(request: Request) -> Response:
        tool = bridge.catalog.find(request.path_params["name"])
        if tool is None or not await bridge.catalog.offered([tool], _caller(request.scope)):
            return not_found(request)
        definition = tool.definition(options.tool_names)
        about = {"documentation": tool.documentation, "examples": _examples(tool), "page": tool.about.page}
        return answer({**definition, **about})

    async def call(request: Request) -> Response:
        """Run a tool, as for a client that cannot be asked (FR-EXPLORER-004).

        The answer is `{"result": {...}}` with the output as JSON, and `"content"` with its files, or `{"error": "..."}`
        with the report that clients find in `_meta`."""
        if not options.allow_execute:
            return answer({"error": "Tool execution is disabled"}, 403)
        tool = bridge.catalog.find(request.path_params["name"])
        if tool is None:
            bridge.router.not_found(request.path_params["name"], _caller(request.scope), {})
            return not_found(request)
        try:
            arguments = from_json(await request.body(), allow_inf_nan=False)
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            return answer({"error": "Request body must be a JSON object: the tool's arguments"}, 400)
        result = await bridge.router.run(
            _Call(tool, arguments, options, _caller(request.scope), _Results(options.max_result, structured="always"))
        )
        text, *files = result["content"]
        if result["isError"]:
            report = result["_meta"]["apcore-mcp/error"]
            status = 500
            if report["error_type"] == "ACL_DENIED":
                status = 403
            elif report["error_type"] == "SCHEMA_VALIDATION_ERROR" and report.get("user_fixable"):  # not the output
                status = 400
            return answer({"error": text["text"], **report}, status)
        body = {"result": result["structuredContent"]}
        if files:
            body["content"] = files
        return answer(body)

    return [
        Route("/", HTMLResponse(page, headers=headers)),
        Route("/server", about_server),
        Route("/tools", summaries),
        Route("/tools/{name}", detail),
        Route("/tools/{name}/call", call, methods=["POST"]),
        Route("/tools/{name}/page", HTMLResponse(_FRAME, headers=frame_headers)),
    ]


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


def _is_allowed(host: str, options: _Options, is_page: bool) -> bool:
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


def _guarded(app: ASGIApp, bridge: _Bridge, *, is_page: bool = False, is_probe: bool = False) -> ASGIApp:
    """ASGI middleware: refuse requests whose host is not allowed, and all of them once the server ends.

    A request with an Origin comes from a web page, and that must be of the very host and port that the request names;
    where `is_page`, all requests do, as browsers send no Origin with what a page loads from its own host. A POST must
    be JSON, which no form of a page can send. Where `is_probe`, programs may name any host."""
    from starlette.datastructures import Headers, QueryParams
    from starlette.responses import PlainTextResponse

    def refusal(scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "").lower()
        origins = headers.getlist("origin")
        media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
        session_ids = [headers.get("mcp-session-id", ""), QueryParams(scope["query_string"]).get("session_id", "")]
        is_any_host = is_probe and not origins
        if not is_any_host and not _is_allowed(host, bridge.options, is_page or bool(origins)):
            status, reason = 421, "Invalid Host header: to let it in, name it in allowed_hosts (--allowed-hosts)"
            reason += "; to let a web page in, without a wildcard, such as tools.example.com:*"
        elif not {origin.lower() for origin in origins} <= {f"http://{host}", f"https://{host}"}:
            status, reason = 403, "Invalid Origin header: a web page must come from the host that it names"
        elif scope["method"] == "POST" and media_type != "application/json":
            status, reason = 415, "Content-Type must be application/json"
        elif not all(map(_SESSION_ID.fullmatch, session_ids)):  # the SDK (2.3) logs them, line breaks included
            status, reason = 400, "Invalid session ID"
        elif bridge.deadline:
            status, reason = 503, "Server is shutting down"
        else:
            return None
        origin = ", ".join(origins) or None
        logger.warning("HTTP request refused: %s (Host %.200r, Origin %.200r)", reason, headers.get("host"), origin)
        return PlainTextResponse(reason, status)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        answer = app
        if scope["type"] == "http":
            answer = refusal(scope) or app
            # Without an event store, the SDK gives no response at all to a client that wants to resume a stream: it
            # gets a new one, as MCP allows.
            scope = {**scope, "headers": [each for each in scope["headers"] if each[0] != b"last-event-id"]}
        is_awaited = scope.get("method") == "POST"  # a GET may be a stream without an end
        if is_awaited:
            bridge.activity.begin()
        try:
            await answer(scope, receive, send)
        finally:
            if is_awaited:
                bridge.activity.end()

    return guarded


def _whole(app: ASGIApp) -> ASGIApp:
    """ASGI middleware behind `RequestBodyLimitMiddleware`, which passes a body on in one message: drop a request whose
    client left before the end of its body. The SDK (2.3) would log a traceback."""

    async def whole(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        body = await receive()
        if body["type"] == "http.disconnect" or body["more_body"]:
            return
        messages = [body]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await app(scope, replay, send)

    return whole


def _own_sessions(app: ASGIApp) -> ASGIApp:
    """ASGI middleware behind the user's own: a session belongs to the caller who opened it, and to others it does not
    exist. The SDK sees to that for users of its own class, so every caller becomes one."""
    from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
    from mcp.server.auth.provider import AccessToken

    async def owned(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Exception):  # a caller that cannot be read owns nothing: each of its calls fails for that
            caller = _caller(scope)
            if caller is not None:
                token = AccessToken(token="", client_id=caller.id, scopes=[])
                scope = {**scope, "user": AuthenticatedUser(token)}
        await app(scope, receive, send)

    return owned


def _refusals_counted(app: ASGIApp, bridge: _Bridge) -> ASGIApp:
    """ASGI middleware, outermost: count the requests that are refused, whoever does it, by their status."""

    async def counted(scope: Scope, receive: Receive, send: Send) -> None:
        async def note(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                is_probe = status == 503 and scope["path"].endswith("/ready")
                if (400 <= status < 500 or status == 503) and not is_probe:
                    bridge.refused[str(status)] += 1
            await send(message)

        await app(scope, receive, note)

    return counted


def _metrics(bridge: _Bridge) -> list[str]:
    """What the server counts itself, in Prometheus' text format."""
    running = len(bridge.router.calls.running)
    sessions = len(bridge.open_sessions) + bridge.streams
    threads = _threads()
    busy = len(threads.of_modules.busy) + len(threads.of_inner_modules.busy)
    ended = {"ok": 0, **bridge.router.ended}
    return [
        *_metric("info gauge", "The version of apcore-mcp", "version", {__version__: 1}),
        *_metric("calls_running gauge", "Calls that have not ended", "", {"": running}),
        *_metric("sessions gauge", "Open sessions of handshake clients", "", {"": sessions}),
        *_metric("threads_busy gauge", "Threads of this process that run sync modules", "", {"": busy}),
        *_metric("calls_total counter", "Calls that have ended, by ok or the code of the error", "outcome", ended),
        *_metric("requests_refused_total counter", "HTTP requests that were refused", "status", bridge.refused),
    ]


def _metric(name_and_type: str, text: str, label: str, numbers: Mapping[str, int]) -> list[str]:
    """The lines of one metric: a number for each value of `label`, or a single one without."""
    name, _, kind = name_and_type.partition(" ")
    lines = [f"# HELP apcore_mcp_{name} {text}", f"# TYPE apcore_mcp_{name} {kind}"]
    for value, number in numbers.items():
        escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        labels = f'{{{label}="{escaped}"}}' if label else ""
        lines.append(f"apcore_mcp_{name}{labels} {number}")
    return lines


def _probe_routes(bridge: _Bridge) -> list[BaseRoute]:
    """Whether the server is alive, `/health` (FR-HEALTH-001), and whether it can take on more, `/ready`."""
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    options = bridge.options
    started = time.monotonic()

    async def health(request: Request) -> Response:
        count = len(bridge.catalog.tools)
        about = {"status": "ok", "module_count": count, "tools_count": count}
        uptime = time.monotonic() - started
        return JSONResponse({**about, "uptime_seconds": uptime, "version": options.version or __version__})

    async def ready(request: Request) -> Response:
        if len(bridge.open_sessions) >= bridge.max_sessions:
            return PlainTextResponse(f"No session is free: {options.max_sessions} are open", 503)
        if len(_threads().of_modules.busy) >= _THREADS_MAX:
            return PlainTextResponse(f"No thread is free: {_THREADS_MAX} run modules", 503)
        return PlainTextResponse("Ready")

    return [Route("/health", health), Route("/ready", ready)]


def _probed(app: ASGIApp, bridge: _Bridge, routes: list[BaseRoute]) -> ASGIApp:
    """ASGI middleware before the user's own: who asks whether the server is alive and ready needs no login."""
    from starlette.routing import Mount, Route, Router

    probes = Mount("", _guarded(Router(routes), bridge, is_probe=True))  # a Route would take it for a plain function
    router = Router([Route(path, probes) for path in ("/health", "/ready")], default=app, redirect_slashes=False)

    async def probed(scope: Scope, receive: Receive, send: Send) -> None:
        await (router if scope.get("method") in ("GET", "HEAD") else app)(scope, receive, send)

    return probed


def _own_routes(bridge: _Bridge) -> list[BaseRoute]:
    """The routes beside MCP's and the probes: by option `/metrics` (F-021) and the Explorer."""
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route, Router

    options = bridge.options

    async def metrics(request: Request) -> Response:
        collected = options.metrics_collector.export_prometheus().rstrip("\n")
        text = "\n".join([*filter(None, [collected]), *_metrics(bridge), ""])
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    routes: list[BaseRoute] = []
    if options.metrics_collector:
        routes.append(Route("/metrics", metrics))
    if options.explorer:
        explorer = Router(_explorer_routes(bridge))
        routes.append(Mount(options.explorer_prefix, _guarded(explorer, bridge, is_page=True)))
    return routes


async def _http_app(bridge: _Bridge) -> Starlette:
    """The ASGI app of one bridge: `/mcp`, or `/sse` and `/messages/`, and the routes beside these."""
    from anyio import CancelScope
    from mcp.server.sse import SseServerTransport
    from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
    from mcp.server.transport_security import DEFAULT_MAX_REQUEST_BODY_SIZE, RequestBodyLimitMiddleware
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.routing import Mount, Route

    options = bridge.options
    limits: dict[str, Any] = {}
    if not options.stateless:
        limits["session_idle_timeout"] = options.session_idle_seconds
    if "max_sessions" in inspect.signature(StreamableHTTPSessionManager).parameters:  # from mcp 2.2 on
        limits["max_sessions"] = bridge.max_sessions = options.max_sessions
    sessions = StreamableHTTPSessionManager(bridge.server, stateless=options.stateless, **limits)
    # Private, as nothing public tells of sessions. Without it, many sessions make the end take longer, and that is all.
    bridge.open_sessions = getattr(sessions, "_server_instances", {})
    routes: list[BaseRoute] = [Route(path, StreamableHTTPASGIApp(sessions)) for path in ("/mcp", "/mcp/")]
    if options.transport == "sse":
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
        routes = [
            Route("/sse", Mount("", stream), methods=["GET"]),
            Route("/messages/", Mount("", transport.handle_post_message), methods=["POST"]),
        ]
    probe_routes = _probe_routes(bridge)
    routes += [*probe_routes, *_own_routes(bridge)]
    middleware = [
        Middleware(RequestBodyLimitMiddleware, max_body_size=DEFAULT_MAX_REQUEST_BODY_SIZE),
        Middleware(_whole),
        Middleware(_probed, bridge=bridge, routes=probe_routes),
        # Behind what reads the whole body: that may take its time, and the server end meanwhile.
        Middleware(_guarded, bridge=bridge),
        *(options.middleware or ()),
        Middleware(_own_sessions),
    ]
    if options.metrics_collector:
        middleware.insert(0, Middleware(_refusals_counted, bridge=bridge))
    if options.explorer and options.allow_execute and not options.middleware and not _is_loopback(options.host):
        logger.warning("The Tool Explorer runs tools for everybody who can reach %s: it has no login", options.host)
    await bridge.sessions.enter_async_context(sessions.run())
    app = Starlette(routes=routes, middleware=middleware)
    # Starlette does it at the first request; here, middleware that cannot be made keeps the server from starting.
    app.middleware_stack = app.build_middleware_stack()
    return app


@asynccontextmanager
async def _serve_http(bridge: _Bridge) -> AsyncIterator[asyncio.Task[None]]:
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
        # Clients may read until the deadline. Then their connections are dropped, which ends what still writes to them.
        seconds_left = bridge.deadline - serving.get_loop().time()
        await asyncio.wait({serving}, timeout=max(0.2, seconds_left))
        for connection in [*http.server_state.connections]:
            connection.transport.abort()
        await asyncio.wait({serving}, timeout=2)


# ---- stdio: pipes, and who owns the standard streams ----

_WRITE_BUFFER_BYTES = 16 * 1024 * 1024  # of unread answers, before calls wait for the client: some send all calls first


def _take_standard_streams() -> tuple[int, int]:
    """Take stdin and stdout for the protocol: two private file descriptors that nothing else reads or writes.

    From then on fd 0 is at its end and fd 1 is stderr, so that nothing that modules, C code or child processes print
    can reach the client. RuntimeError when the process was started without these streams."""
    if sys.__stdin__ is None or sys.__stdout__ is None:  # 0 and 1 may be files that were opened since
        raise RuntimeError("stdin or stdout cannot be opened: the process was started without")
    duplicates = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b", 0) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno() if sys.__stderr__ is None else 2, 1)
    sys.__stdout__.reconfigure(line_buffering=True)
    return duplicates


class _StandardStreams:
    """The standard streams of this process, taken once and for good: the servers that it starts share them."""

    duplicates: tuple[int, int] | None = None

    def take(self) -> tuple[int, int]:
        if self.duplicates is None:
            self.duplicates = _take_standard_streams()
        return self.duplicates


_STANDARD_STREAMS = _StandardStreams()


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
    duplicates = [os.dup(fd) for fd in _STANDARD_STREAMS.take()]
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
        loop.run_in_executor(None, _copy, source, filled.makefile("wb"))
        writing = loop.run_in_executor(None, _copy, drained.makefile("rb", 0), sink)
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
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bridge: _Bridge
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
async def _serve_stdio(bridge: _Bridge) -> AsyncIterator[asyncio.Task[None]]:
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
        gone.add_done_callback(_silence)
        gone.add_done_callback(lambda _: incoming.close())
        messages = _stdio_messages(reader, writer, bridge)
        output = _StdioOutput(writer, bridge.activity)
        options = bridge.server.create_initialization_options()
        running = asyncio.create_task(bridge.server.run(messages, output, options))
        running.add_done_callback(_silence)
        try:
            yield running
        finally:
            running.cancel()
            await asyncio.wait({running})
            writer.close()
            await asyncio.wait({gone}, timeout=1)
            if not gone.done():
                outgoing.abort()


# ---- Doors: the command line's, and `async_serve`, `MCPServer`, `serve` ----


async def run_openai_call(
    registry_or_executor: Registry | Executor | APCore, name: str, arguments: str | JSONObject,
    *, tags: Sequence[str] | None = None, prefix: str | None = None, identity: Identity | None = None,
    search: bool = False, approval: str | ApprovalHandler = "require", max_result: int = 6 * 2**20,
) -> str:  # fmt: skip
    """Run the call a model sent back, and return what to tell the model, as text.

        output = await run_openai_call(executor, call.function.name, call.function.arguments)

    That is the result as an MCP client gets it (JSON, redacted, ISO dates, base64), then each text file and a line for
    any other, or the plain sentence of the error, also for a function that was not offered. Nulls are dropped as by
    `from_openai_call`. `tags`, `prefix`, `identity` (the caller, to the ACL) and `search` are those that
    `to_openai_tools` had. There is nobody to ask for an approval: "require" and "deny" refuse a call that needs one,
    "auto" lets it run with a WARNING and "off" without one; an apcore `ApprovalHandler` decides itself, and so does the
    one that an Executor already has. A text of more than `max_result` bytes is an error (0: of any length). Raises
    TypeError and ValueError for wrong options, and nothing that a module raised."""
    given: JSONObject = {"tags": tags, "prefix": prefix, "search": search, "approval": approval}
    options = _options_of("run_openai_call()", registry_or_executor, **given, max_result=max_result)
    catalog = _ToolCatalog(options)
    try:
        inputs = _read_arguments(name, arguments)
    except ValueError as error:
        return _sentence("GENERAL_INVALID_INPUT").format(message=error)
    router = _ExecutionRouter(catalog, options)
    if name in router.search.tools:
        answer = await router.find(name, inputs, identity, lambda tool: _portable_name(tool.module_id), {})
        if answer is not None:
            return str(answer["content"][0]["text"])
        name, inputs = _target_of(inputs)
    try:
        tool = _called_tool(catalog, options, name)
    except _NotOffered:
        router.not_found(name, identity, {})
        return _sentence("MODULE_NOT_FOUND").format(module_id=name)
    results = _Results(options.max_result, structured="never")
    call = _Call(tool, _drop_nulls(inputs, tool.input_schema)[0], options, identity, results)
    result = await router.run(call)
    text, *files = result["content"]
    lines = [text["text"]]
    for file in files:
        resource = file.get("resource", file)
        lines.append(resource.get("text") or f"[a file of type {resource['mimeType']}]")
    return "\n".join(lines)


def _count_of_tools(tools: Collection[object]) -> str:
    return "1 tool" if len(tools) == 1 else f"{len(tools)} tools"


def _check(options: _Options) -> tuple[str, int]:
    """What `--check` prints: each tool that would be served, and how much is left out; with the exit status."""
    catalog = _ToolCatalog(options)
    names = [tool.definition(options.tool_names)["name"] for tool in catalog.tools.values()]
    if not names:
        logger.warning("%s", catalog.why_empty())
    files = _files_of(options.registry)
    count = len(files.left_out) + len(catalog.left_out)
    summary = f"{_count_of_tools(names)} would be served, {count} left out"
    if files.warned:
        summary += f", {len(files.warned)} warned of"
    return "\n".join([*names, summary]), 1 if count or files.warned or not names else 0


_EXPORTS = ("mcp", "openai", "openai-strict", "markdown", "client")


def _export(options: _Options, form: str, arguments: list[str], environment: Mapping[str, str]) -> str:
    """What `--export` prints: the tools of `tools/list`, OpenAI's, the tool document, or what clients start it by, with
    `arguments` and `environment`."""
    catalog = _ToolCatalog(options)
    tools = catalog.tools.values()
    if not tools:
        logger.warning("%s", catalog.why_empty())
    if form == "markdown":
        return "\n".join([f"# Tools of {options.name}\n", *map(_document, tools)])
    if form == "client":
        entry = _client_entry(options, arguments, environment)
        # And the commands of clients that have one for it.
        print(f"code --add-mcp {shlex.quote(json.dumps({'name': options.name, **entry}))}", file=sys.stderr)
        print(f"claude mcp add-json {shlex.quote(options.name)} {shlex.quote(json.dumps(entry))}", file=sys.stderr)
        exported: Any = {"mcpServers": {options.name: entry}}
    elif form == "mcp":
        exported = [tool.definition(options.tool_names) for tool in tools]
    elif form in ("openai", "openai-strict"):
        exported = [*map(_OpenAIConverter(strict=form == "openai-strict").convert, tools)]
    else:
        raise ValueError(f"Unknown form of export: {form!r}")
    return json.dumps(exported, indent=2)


def _client_entry(options: _Options, arguments: list[str], environment: Mapping[str, str]) -> JSONObject:
    """How a client reaches this server: where it is, or how to start `python -m` this package with `arguments`."""
    if options.transport != "stdio":
        # Who listens everywhere is reached by this machine's own address (which Windows does not guess).
        url = options.url.replace("//0.0.0.0:", "//127.0.0.1:")
        return {"type": options.transport.removeprefix("streamable-"), "url": url}
    # Where this process finds modules and the client's would not.
    paths = [sys.path[0], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        "command": os.path.abspath(sys.executable),
        "args": ["-m", __package__, *arguments],
        "env": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(map(os.path.abspath, paths))), **environment},
    }


async def _run_callback(callback: Callable[[], Any] | None) -> None:
    """Run `on_startup` or `on_shutdown`, a function or a coroutine function."""
    result = callback() if callback else None
    if inspect.isawaitable(result):
        await result


def _log_unasked(options: _Options, tools: Iterable[_Tool]) -> None:
    """Warn of the modules that nobody can be asked about, on a server without sessions that has no key."""
    approval = options.approval
    governance = options.executor.governance_state()
    asks_users = approval in ("auto", "require") or isinstance(approval, ElicitationApprovalHandler)
    if not options.stateless or options.state_key or not asks_users or governance.approval_handler_configured:
        return
    gated = [tool.module_id for tool in tools if tool.about.annotations.requires_approval]
    if gated:
        fate = "run unasked" if approval == "auto" and not governance.policy_strict else "are refused"
        logger.warning("Nobody can be asked for approval without state_key: calls of %s %s", ", ".join(gated), fate)


async def _log_start(bridge: _Bridge, address: str) -> None:
    """Log that the server accepts clients, at what `address`, and what is unusual about it."""
    options = bridge.options
    tools = bridge.catalog.tools.values()
    is_anonymous = options.transport == "stdio" or (address and not options.middleware)  # nothing identifies a caller
    nothing = "%s; server starting with zero tools"
    if not tools:
        logger.warning(nothing, bridge.catalog.why_empty())
    elif is_anonymous and not await bridge.catalog.offered(tools, None):
        logger.warning(nothing, "The ACL leaves out all modules, for callers without an identity")
    if options.approval != "deny" and options.executor.governance_state().unprotected_control_surface:
        logger.warning("Clients may reach %s*: protect them by an ACL or an approval handler", _CONTROL)
    _log_unasked(options, tools)
    if address and not _is_loopback(options.host) and not options.middleware and not bridge.catalog.acls:
        everybody = "Everybody who can reach %s may call these tools: there is neither a login (middleware) nor an ACL"
        logger.warning(everybody, options.host)
    if options.transport == "sse":
        logger.warning("SSE transport is deprecated; use streamable-http instead")
    if not options.search:
        _log_many(len(tools))
    started = "apcore-mcp server started: %s registered, transport=%s%s"
    logger.info(started, _count_of_tools(tools), options.transport, address)


class _Life:
    """One life of a server, from whichever function: it accepts clients, waits until it is told to end, and closes.

    `started` is done once clients are accepted. Its result is the app, where another server runs that (`mounted`); its
    exception is what kept this server from starting. A later error is raised by `run()`. `ended` is done as soon as
    `stop()` has been called."""

    def __init__(self, options: _Options, mounted: bool = False) -> None:
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
                options = closing.enter_context(_metrics_counted(self._options))
                bridge = _Bridge(options)
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
        loop.set_default_executor(_threads().of_loops)
        running = loop.create_task(self.run())
        try:
            while not running.done():
                # asyncio lets these out of any task that raises them. A module that does so may not end the server.
                with suppress(SystemExit, KeyboardInterrupt):
                    loop.run_until_complete(running)
        finally:
            tasks = asyncio.all_tasks(loop)  # as `asyncio.run` does, but without waiting for one that never ends
            for task in tasks:
                task.add_done_callback(_silence)
                task.cancel()
            if tasks:
                loop.run_until_complete(asyncio.wait(tasks, timeout=1))
            loop.close()


def _door(options: Callable[P, _Options], enter: Callable[[_Options], T]) -> Callable[P, T]:
    """Give a function of `_Options` the options as its parameters, for completion and `help()`; checked first."""

    @functools.wraps(enter)
    def door(*args: P.args, **kwargs: P.kwargs) -> T:
        return enter(_options_of(f"{enter.__name__}()", *args, **kwargs))

    vars(door)["__signature__"] = inspect.signature(options).replace(return_annotation=enter.__annotations__["return"])
    return door


def _constructor(
    options: Callable[P, _Options], construct: Callable[[Any, _Options], None]
) -> Callable[Concatenate[Any, P], None]:
    """Give a constructor that takes `_Options` the options as its parameters, as `_door` does for a function."""

    @functools.wraps(construct)
    def constructor(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        construct(self, _options_of(type(self).__name__, *args, **kwargs))

    instance, *_ = inspect.signature(construct).parameters.values()
    parameters = [instance, *inspect.signature(options).parameters.values()]
    vars(constructor)["__signature__"] = inspect.Signature(parameters, return_annotation=None)
    return constructor


@functools.partial(_door, _Options)
@asynccontextmanager
async def async_serve(options: _Options) -> AsyncIterator[Starlette]:
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

    @functools.partial(_constructor, _Options)
    def __init__(self, options: _Options) -> None:
        self._options = options
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


def _serve(options: _Options) -> None:
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


@functools.partial(_door, _Options)
def serve(options: _Options) -> None:
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
    _serve(options)
