"""The bridge: apcore modules in, an MCP server or OpenAI tool definitions out.

The file reads top to bottom, and each room uses only what stands above it; `grep '^# ----'` lists the rooms. What
decides what a client is told and what runs is here. Below it stand files that know nothing of it: functions of plain
data (`schemas.py`, `values.py`), and what plugs into apcore (`execution.py`: how modules run, `approval.py`: who is
asked first, `discovery.py`: what a folder holds). Above it stand the two ways in, `web.py` and `stdio.py`, and what can
be switched on (`tasks.py`, `search.py`, `explorer.py`, `metrics.py`); each is imported only where it is used.

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
import re
import secrets
import signal
import sys
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar, cast
from urllib.parse import quote, urljoin

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
from pydantic import ConfigDict, Field, SkipValidation, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from pydantic_core import from_json, to_json, to_jsonable_python

from . import __version__
from .approval import CALL_KEY, CONTROL, CURRENT_CALL, NOBODY, QUESTION_KEY, Way, approver_of, call_of, handler_in_place
from .discovery import Folder
from .execution import Function, daemon_threads, function_of, silence, steps_in_place
from .faults import FAULTS_MAX, fault_at, faults_in, pydantic_faults, schema_faults
from .hints import holds_secret, marks_of, marks_of_hint, read_form
from .log import log_to_stderr, values_hidden
from .output import Output, RefusedOutput
from .schemas import (
    CONSTRAINTS,
    FOREIGN_REFERENCES,
    IN_PLACE,
    OTHER_PROPERTIES,
    JSONObject,
    JSONSchema,
    ModelType,
    SchemaConverter,
    admits_object,
    branches,
    form_of,
    integral,
    is_valid,
    map_subschemas,
    marks_of_schema,
    marks_sensitive,
    media_types_of,
    nullable,
    object_schema,
    plain_json,
    promise_of,
    properties_of,
    subschemas,
    text_of,
    types_of,
)
from .values import as_json, marks_in, not_json, redact

if TYPE_CHECKING:
    from mcp.server.context import CallNext, ServerRequestContext
    from mcp.server.extension import MethodBinding
    from starlette.applications import Starlette

    from .search import SearchTools
    from .tasks import Task, Tasks

    RequestContext = ServerRequestContext[Any, Any]

logger = logging.getLogger("apcore_mcp")
access_logger = logging.getLogger("apcore_mcp.access")  # a line for each call that ends

MCP_PROGRESS_KEY = "_mcp_progress"
"""The key of the function in `context.data` that sends the call's progress (FR-EXT-003)."""

MCP_ELICIT_KEY = "_mcp_elicit"
"""The key of the function in `context.data` that asks the user of the call (FR-EXT-003)."""

P = ParamSpec("P")
T = TypeVar("T")


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
    def is_public(self) -> bool:
        """Whether others than this machine can reach the server (HTTP transports)."""
        address = address_of(self.host)
        return self.host.lower() != "localhost" if address is None else not address.is_loopback

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


def address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address that `host` is, with or without brackets; None for a name."""
    try:
        return ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return None


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
        self.summary = self.about.description
        self.model: Any = getattr(module, "input_schema", None)  # by which apcore validates arguments
        schema = descriptor.input_schema
        if function is not None and function.model not in (None, self.model):
            self.model = function.model
            schema = function.model.model_json_schema()
        if isinstance(self.model, ModelType) and holds_secret(self.model):
            schema = read_form(self.model)
        advertised = object_schema(schema, self.model if isinstance(self.model, ModelType) else None)
        names_all = not advertised.keys() & {*IN_PLACE, *OTHER_PROPERTIES}
        self.is_closed = function is not None and function.others is None and names_all
        if self.is_closed:  # apcore would pass on what it does not take, and Python raise a TypeError
            advertised["additionalProperties"] = False
        self.has_secret_inputs = marks_sensitive(advertised)
        self.output = Output(module, descriptor, function)
        self.redacts = options.redact_output
        output_schema = self.output.schema
        self.marks = self.output.marks if self.redacts else []
        self.media = media_types_of(output_schema)  # properties that are sent as files, with their media types
        definition = {**self.about.to_mcp(), "inputSchema": advertised}
        promise = promise_of(output_schema) if output_schema else {"type": "null"}
        # Where there is structured content, Codex and Claude Code show their models nothing else: no file, no format.
        if admits_object(promise) and not (self.marks or self.media or options.output_formatter):
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
        foreign = {keyword for part in subschemas(schema) for keyword in FOREIGN_REFERENCES.intersection(part)}
        if foreign:
            warnings.append(f"of its input schema, this is not sent: {', '.join(sorted(foreign))}")
        if self.output.fault:
            warnings.append(f"it is served without its output schema: {self.output.fault}")
        if self.output.unsent:
            warnings.append(
                f"pydantic does not know these fields, and they are not sent: {', '.join(self.output.unsent)}"
            )
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
        """The module's own examples that are valid calls, in plain JSON types, without what is marked."""
        with suppress(Exception):  # apcore checks nothing of what a module lists as examples
            valid = [one for one in plain_json(self.descriptor.examples) if is_valid(one["inputs"], self.input_schema)]
            marks = marks_of_schema(self.input_schema)
            for one in valid:
                one["inputs"] = redact(one["inputs"], marks, hides_others=False)
                if "output" in one:
                    one["output"] = redact(one["output"], *self.marks)
            return valid
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
        first = itertools.islice(unknown, FAULTS_MAX)
        faults = [fault_at([name], "extra_forbidden", "Extra inputs are not permitted") for name in first]
        if hasattr(self.model, "model_validate_json"):
            try:
                self._read(arguments)
            except ValidationError as error:
                faults += pydantic_faults(error, arguments)
        else:
            known = {name: value for name, value in arguments.items() if name not in unknown}
            faults += schema_faults(self.input_schema, known)
        return faults[:FAULTS_MAX]

    def _read(self, arguments: JSONObject) -> Any:
        """Read arguments as apcore does: as JSON or, where another module passes what JSON has not, as Python."""
        try:
            text = json.dumps(arguments)
        except (TypeError, ValueError):
            return self.model.model_validate(arguments, strict=True)
        return self.model.model_validate_json(text, strict=True)

    # What approval wants to know of a module.

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
        if self.has_secret_inputs and isinstance(self.model, ModelType):
            read = self._read(arguments)
            schema = TypeAdapter(self.model).json_schema(mode="serialization", by_alias=False)
            given = read.model_dump(mode="json", include=read.model_fields_set, fallback=_kind, warnings=False)
            known = redact(given, marks_of_schema(SchemaConverter().inline(schema)), marks_in(read), hides_others=False)
            return known, dict.fromkeys(plain.keys() - {*names, *self.model.model_fields, *given}, REDACTED_VALUE)
        plain = redact(plain, marks_of_schema(self.input_schema), marks_in(arguments), hides_others=False)
        if plain == REDACTED_VALUE:  # the schema as a whole is marked
            plain = dict.fromkeys(arguments, REDACTED_VALUE)
        known = {name: plain.pop(name) for name in names if name in plain}
        return known, plain


def _kind(item: Any) -> str:
    """What a question shows of a value that nothing describes: its text, but of one that holds others only its type, as
    its text may quote what these mark."""
    return f"<{type(item).__name__}>" if hasattr(item, "__iter__") else str(item)


def _to_show(item: Any) -> Any:
    """What a question shows of a value that JSON has not, without using up an iterator."""
    return _kind(item) if isinstance(item, Iterator) else to_jsonable_python(item, bytes_mode="base64", fallback=_kind)


def _as_listed(definition: JSONObject) -> JSONObject:
    """A copy of a tool's definition in plain JSON types. ValueError where a parser could not read it in its place in
    the answer to `tools/list`, for its depth or for what JSON cannot say: it would cost a client the whole list."""
    answer: JSONObject = plain_json({"result": {"tools": [definition]}})
    return cast(JSONObject, answer["result"]["tools"][0])


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
        marks = [*self.tool.marks, marks_in(chunk)] if self.tool.redacts else []
        chunk = {name: value for name, value in chunk.items() if name not in self.tool.media}  # the result has them
        try:
            return to_json(redact(as_json(chunk), *marks)).decode()
        except Exception as error:  # a module's own __str__ may raise anything
            raise not_json(error) from None

    def to_result(self, output: Any, output_json: bytes | None) -> JSONObject:
        """The tool result for `output`, which was `output_json` unless middleware has changed it since (F-013)."""
        tool = self.tool
        files: list[JSONObject] = []
        text = b""
        try:
            with suppress(ValueError):
                text = to_json(output)
            is_changed = text != output_json
            value = as_json(output) if is_changed else output
            if is_changed or tool.marks or tool.media:
                value = redact(value, *tool.marks, marks_in(output) if is_changed and tool.redacts else {})
                if tool.media:
                    value = {**value}
                    files = _take_files(tool, value)
                text = to_json(value)
        except Exception as error:  # a module's own __str__ may raise anything
            raise not_json(error) from None
        if is_changed:  # a client would refuse what breaks the promise
            faults = schema_faults(tool.output_schema, value)
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
            details = {"size": size, "limit": limit}
            raise ModuleError("RESULT_TOO_LARGE", "Result is too large", details=details, retryable=False)


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
    "RESULT_TOO_LARGE": "Result is too large: {size} bytes, and at most {limit} are sent (the tool has run)",
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
    return bool(marks or (function is not None and marks_of_hint(function.returns)))


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
        plain: JSONObject = plain_json(result)  # raises for what a module's author has put into it and JSON cannot say
        return plain

    def _explain(self, error: ModuleError, is_withheld: bool) -> tuple[str, JSONObject]:
        """What the client reads of apcore's or a module's `error`, and what is reported beside that text."""
        own_chain = [self.tool.module_id]
        is_own = error.details.get("call_chain", own_chain) == own_chain
        if isinstance(error, errors.SchemaValidationError) and is_own:
            return self._explain_validation(error, is_withheld)
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
            found = re.search(r"(nan|-?inf|NaN|-?Infinity|NaT) at .*|two keys are .*", error.message)
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
            faults = faults_in(error)
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
        except (Exception, SystemExit) as error:  # one bad module never takes the others down
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
        elif keyword in CONSTRAINTS or keyword == "description":
            keywords[keyword] = value
    strict = map_subschemas(keywords, lambda inner, _: _to_strict(inner))
    if limits:
        strict["description"] = f"{schema.get('description', '')} ({', '.join(limits)})".lstrip()
    if "properties" in schema or "object" in types_of(schema):
        properties = properties_of(strict)
        for name, field in properties_of(schema).items():
            # A tag of a union has a default too, but pydantic cannot choose a branch by null.
            is_tag = "const" in field and field["const"] == field.get("default")
            if name not in schema.get("required", ()) and not is_tag:
                properties[name] = nullable(properties[name])
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
        self.output_json: bytes | None = None  # what its module gave, as JSON
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
        self.knows_tasks = False
        self.way = Way.NONE
        self.could_ask = False
        self.confirmation: Any = None
        self.is_parked = False
        self._keys: Counter[str] = Counter()  # of all questions that it has asked
        self._progress = -math.inf  # the last number that was sent
        self._unsent: Future[None] | None = None  # the last report from another loop
        self._turn = asyncio.Event()  # set when it may have something to answer the request with

    # For the request that it answers.

    def attach(self, ctx: RequestContext) -> None:
        """Let `ctx` be the request that the call answers next: the one that began it, or a retry."""
        options = self.router.options
        self.session = ctx.session
        # No more of its `_meta`, which may be as large as a request and would be kept while the call waits.
        meta: Mapping[str, Any] = ctx.meta or {}
        self.has_progress_token = "progress_token" in meta
        spans = {key: meta.get(key) for key in ("traceparent", "tracestate")}
        self.trace = {key: text for key, text in spans.items() if isinstance(text, str) and len(text) <= 512}
        capabilities = ctx.session.client_capabilities
        extensions = getattr(capabilities, "extensions", None) or {}
        forms = getattr(capabilities, "elicitation", None)
        has_forms = bool(forms and (forms.form or not forms.url))  # `{}` means forms (MCP 2025-11-25)
        self.knows_tasks = ctx.protocol_version >= MODERN and not options.stateless and TASKS_EXTENSION in extensions
        # A server without sessions may be one of many: the answer could reach another one than the one that asked.
        if ctx.protocol_version >= MODERN and (options.state_key or not options.stateless):
            by_retry = Way.STATE if options.stateless else Way.RESULT
            self.way = by_retry if has_forms else Way.UNDECLARED
        else:
            self.way = Way.REQUEST if has_forms and ctx.session.can_send_request else Way.NONE
            self.request_id = ctx.request_id  # kept for no other way: it may be as large as a request
        self.could_ask = self.could_ask or self.way in (Way.REQUEST, Way.RESULT)

    def detach(self) -> None:
        """Go on without a request: what is sent to one after its answer is an error."""
        self.session = None
        self._turn.set()

    @property
    def is_working(self) -> bool:
        """Whether it has nothing to answer a request with: no outcome and, from 2026-07-28 on, no question."""
        return self.outcome is None and (not self.questions or self.way is Way.REQUEST)

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
        self.output_json = None
        self.session = None
        self.way = Way.NONE
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
        written, self.output_json = self.tool.output.write(output, self.tool.redacts)
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
        form = form_of(requested_schema)
        message = text_of(message)
        if self.way not in (Way.REQUEST, Way.RESULT):
            return None
        if not self.router.may_wait(self):
            self.is_refused = True
            self.cancel()
            return None
        answer: asyncio.Future[Any]
        if self.way is Way.RESULT:
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
            stack.enter_context(steps_in_place(strategy, call_of, marks_of))
            stack.enter_context(handler_in_place(strategy))
            stack.enter_context(values_hidden(call_of))
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
        self.approver = approver_of(options.approval)
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

    async def run(self, call: Call) -> JSONObject:
        """Begin a call. Returns its result, or the question that it asks first. Without `attach()`, nobody can be
        asked."""
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
        if call is None or timer is None or (call.caller and call.caller.id) != (caller and caller.id):
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
        if call.output_json is None:  # middleware has answered, or a step of the user's own has run the module
            output = call.write(output)
        return results.to_result(output, call.output_json)

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
        call.output_json = None  # by a step that knew of no middleware's change, nor of a fault that apcore passes over
        return output

    def _outcome_of(self, call: Call, error: BaseException, trace_id: str) -> JSONObject | Exception:
        """What a call is answered with that has raised `error`."""
        if call.is_refused:
            # Agents of the handshake versions show their model a tool's error, but may stop at one of the protocol.
            result = failure(_TOO_MANY, "TOO_MANY_QUESTIONS")
            return protocol_error(-32000, _TOO_MANY) if call.way is Way.RESULT else result
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
        if isinstance(error, errors.ApprovalDeniedError) and error.reason == NOBODY and call.way is Way.UNDECLARED:
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


class Activity:
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
    caller = caller_in(ctx)
    return json.dumps([authenticated_principal(ctx), caller and caller.id])


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
        self.activity = Activity()
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
        search = self.router.search
        tool = (search.tools.get(name) if search else None) or self.catalog.find(name)
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
    is_public = bool(address) and options.is_public and not options.middleware
    nothing = "%s; server starting with zero tools"
    if not tools:
        logger.warning(nothing, bridge.catalog.why_empty())
    elif is_anonymous and not await bridge.catalog.offered(tools, None):
        logger.warning(nothing, "The ACL leaves out all modules, for callers without an identity")
    if options.approval != "deny" and bridge.is_unprotected:
        logger.warning("Clients may reach %s*: protect them by an ACL or an approval handler", CONTROL)
    if any(tool.module_id.startswith("system.") for tool in tools):
        logger.warning("apcore's system.* are tools, and tell callers everybody's errors: exclude= leaves them out")
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
                    from .web import http_app

                    app = await http_app(bridge)
                elif options.transport == "stdio":
                    from .stdio import serve_stdio

                    serving = await closing.enter_async_context(serve_stdio(bridge))
                else:
                    from .web import serve_http

                    serving = await closing.enter_async_context(serve_http(bridge))
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
        loop.set_default_executor(daemon_threads)
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
