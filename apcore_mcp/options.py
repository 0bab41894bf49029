"""Options: every option of `serve()` once, checked, and the Executor that is served.

`serve()`, `async_serve()`, `MCPServer` and the command line all take them from here: a new field of `Options` is a
parameter of each door, and a flag where it has a help text. The functions for OpenAI name the few that they take.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from apcore import APCore, Config, Executor, Registry
from apcore.approval import ApprovalHandler
from apcore.observability import MetricsCollector, MetricsMiddleware
from pydantic import ConfigDict, Field, SkipValidation, ValidationError
from pydantic.dataclasses import dataclass

from .approval import has_handler
from .discovery import Folder
from .log import log_to_stderr

__all__ = ["Options", "address_of", "options_of"]

logger = logging.getLogger("apcore_mcp")

T = TypeVar("T")

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
    structured: bool = _option(True, "list output schemas, and send results as structured content beside their text")
    redact_output: bool = _option(True, "replace the values of output fields marked x-sensitive")
    mask_errors: bool = _option(True, "hide the type and text of unexpected exceptions from clients")
    approval: str | ApprovalHandler = _option("require", "ask users", choices=("auto", "require", "deny", "off"))
    search: bool = _option(False, "list two tools, which find and call the others, for agents that take few")
    stateless: bool = _option(False, "keep no sessions, for servers behind a load balancer")
    max_sessions: int = _option(10_000, "sessions of handshake clients at a time", type=int)
    session_idle_seconds: float = _option(1_800.0, "seconds until a session that is not used ends", type=float)
    shutdown_seconds: _Seconds = _option(5.0, "seconds that running calls have when the server ends", type=float)
    state_key: str | bytes | None = _option(None, "secret of --stateless servers", repr=False)
    allowed_hosts: _Texts | None = _option(None, "Host headers accepted beside addresses", nargs="+")
    metrics_collector: Any = None
    middleware: Sequence[Any] | None = None
    mcp_extensions: Sequence[Any] | None = None
    skills: str | Path | None = None
    output_formatter: Callable[[Any], str] | None = None
    max_result: int = _option(6 * 2**20, "bytes of a result in JSON, more is an error; 0 for any", type=int)
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
        if self.skills is not None and not any(Path(self.skills).glob("*/SKILL.md")):
            raise ValueError(f"skills must be a directory of folders with a SKILL.md each, got {str(self.skills)!r}")
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
    if options.approval == "deny" and has_handler(executor):
        raise ValueError("approval='deny' would deny nothing: the Executor has an approval handler, which decides")
    if options.dynamic and not isinstance(executor.registry, Folder):
        raise ValueError("dynamic follows the files of a folder: give it what discover() returns")
    return executor
