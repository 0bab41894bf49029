"""The bridge: apcore modules in, an MCP server out.

The file reads top to bottom, and a room uses what stands above it; `grep '^# ----'` lists the rooms. What decides what
a client is told and what runs is here. The files below it know nothing of it: what can be set (`options.py`), what a
call and its client say to each other (`client.py`, `conversation.py`), what a module takes and gives (`arguments.py`,
`output.py`, and below them `hints.py`, `values.py`, `schemas.py`), and what plugs into apcore (`execution.py`: how
modules run, `approval.py`: who is asked first, `discovery.py`: what a folder holds). The files above it use it: the two
transports, `web.py` and `stdio.py`, OpenAI's format (`openai.py`), and what can be switched on, each imported only
where it is used.

The file keeps these promises. Every call goes through apcore's Executor, and only tools that a client is offered can be
called, listed or found by a search. One bad module never takes the others down. No traceback, path, class name, caller
or sensitive value reaches a client; with `mask_errors=False` it reads the text of an exception. While a server or a
call uses an Executor, that has steps and an approval handler of ours, apcore's loggers a filter, and a Registry two
listeners; before and afterwards, nothing of apcore, of the MCP SDK or of a user's objects is changed. The server parts
of `mcp` are imported where they are used, so that a program that only wants OpenAI definitions does not load an HTTP
stack.

Ids such as FR-EXEC-002 name the requirements that the project was specified by; the tests carry them too:
`grep -rA3 '"FR-EXEC-002"' tests` finds what proves one.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import hashlib
import inspect
import itertools
import json
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import AsyncExitStack, ExitStack, aclosing, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, cast
from urllib.parse import quote, urljoin

from apcore import ACL, Executor, ModuleAnnotations, ModuleDescriptor, ModuleError, Registry, errors
from apcore.approval import ApprovalHandler
from apcore.builtin_steps import BuiltinACLCheck
from apcore.context import Context, Identity
from apcore.pipeline import ExecutionStrategy
from apcore.trace_context import TraceContext, TraceParent
from apcore.utils.redaction import REDACTED_VALUE
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from . import __version__
from .approval import CONTROL, NOBODY, QUESTION_KEY, approver_of, handler_in_place
from .arguments import Arguments
from .call import CALL_KEY, CURRENT_CALL
from .client import MODERN, NO_CLIENT, TASKS_EXTENSION, Client, Way, caller_in, client_of, protocol_error
from .context import MCP_ELICIT_KEY, MCP_PROGRESS_KEY
from .conversation import (
    PARKED_SECONDS,
    Conversation,
    WaitingRoom,
    json_bytes,
    silence,
)
from .discovery import Folder
from .execution import daemon_threads, steps_in_place
from .faults import faults_in, schema_faults
from .functions import Function, function_of
from .hints import marks_of, marks_of_hint
from .log import one_line, values_hidden
from .options import Options, options_of
from .output import Output, RefusedOutput
from .schemas import (
    FOREIGN_REFERENCES,
    JSONObject,
    JSONSchema,
    admits_object,
    integral,
    is_valid,
    marks_sensitive,
    media_types_of,
    plain_json,
    promise_of,
    properties_of,
    subschemas,
    text_of,
)
from .values import as_json, marks_in, not_json, redact

if TYPE_CHECKING:
    from mcp.server.context import CallNext, ServerRequestContext
    from mcp.server.extension import MethodBinding
    from mcp.server.mcpserver.resources import Resource
    from starlette.applications import Starlette

    from .search import SearchTools
    from .tasks import Tasks

    RequestContext = ServerRequestContext[Any, Any]

logger = logging.getLogger("apcore_mcp")
access_logger = logging.getLogger("apcore_mcp.access")  # a line for each call that ends

P = ParamSpec("P")
T = TypeVar("T")


def warn(text: str, messages: list[str]) -> None:
    """Log a WARNING about a module, and keep it in `messages`, whatever the log level is."""
    messages.append(one_line(text))
    logger.warning("%s", messages[-1])


# ---- Tools: a module as clients see it: its names, its description, its schemas; pure ----

_NAME_MAX = 64  # characters; the limit of OpenAI's function names and of Claude's tool names

_CLIENTS_WITHOUT_DOTS = re.compile(  # how `clientInfo.name` begins for clients that drop all tools for one such name
    "claude-ai"  # Claude Desktop, claude.ai: ^[a-zA-Z0-9_-]{1,64}$; behind mcp-remote (pull request 63) more follows
    "|github-copilot-developer"  # Copilot CLI: its issues 1879 and 2581
    r"|JetBrains-\w+-copilot"  # Copilot in JetBrains' IDEs: microsoft/copilot-intellij-feedback, issue 1583
)
_API_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # what Anthropic's API accepts as an argument's name; so is an alias
_PAGE_MEDIA_TYPE = "text/html;profile=mcp-app"  # MCP Apps, SEP-1865, the specification of 2026-01-26


def portable_name(module_id: str) -> str:
    """`image.resize` becomes `image-resize`; past 64 characters, 54 of them and a hash that never changes, after a
    `-0`: no id has a part that begins with a digit."""
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
        self.title = descriptor.name or descriptor.module_id.rpartition(".")[2].replace("_", " ").capitalize()
        metadata = descriptor.metadata
        overlay: JSONObject = {}
        with suppress(KeyError, TypeError):  # apcore does not check what `display` holds
            overlay = {**(metadata.get("display") or getattr(module, "display", {}))["mcp"]}
        self._meta: JSONObject = {**(overlay.get("meta") or {})}
        self._icons = overlay.get("icons") or []
        if self._icons:  # clients would refuse the whole list of tools for a wrong one
            from mcp_types import Icon

            TypeAdapter(list[Icon]).validate_python(self._icons)
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
        title = {"title": self.title}
        icons = {"icons": self._icons} if self._icons else {}
        return {**title, **icons, "description": self.description, "annotations": {**title, **hints}, "_meta": meta}

    def to_suffix(self) -> str:
        r"""The annotations that differ from the defaults, for a function's description (FR-ANNOT-007):
        `"\n\n[Annotations: readonly=true, idempotent=true]"`, or `""` when nothing does."""
        values = {name: getattr(self.annotations, name) for name in _SUFFIX_FIELDS}
        different = [name for name in values if values[name] != getattr(_DEFAULT_ANNOTATIONS, name)]
        texts = ", ".join(f"{name}={str(values[name]).lower()}" for name in different)
        return f"\n\n[Annotations: {texts}]" if texts else ""


class Tool:
    """One listed module: everything about it that does not change from call to call.

    `name` is its alias, unless another tool of the catalog has that name. ValueError, TypeError or KeyError when the
    module cannot be a tool."""

    def __init__(self, descriptor: ModuleDescriptor, module: Any, options: Options) -> None:
        self.descriptor = descriptor
        self.module = module
        self.module_id = descriptor.module_id
        self.documentation = text_of(descriptor.documentation or "")
        self.arguments = Arguments(module, descriptor)
        function = self.arguments.function
        if function is not None and function.others is not None and function.others_hint is not Any:
            raise TypeError(f"nothing checks what `**{function.others.name}` is given: give it the hint Any, or none")
        if function is not None and function.unnamed is not None:
            raise TypeError(f"nothing can be given to `{function.unnamed.name}` by its name, as arguments are")
        self.about = _AnnotationMapper(descriptor, module, function)
        self.name = self.about.alias
        advertised = self.arguments.schema
        self.has_secret_inputs = marks_sensitive(advertised)
        self.output = Output(module, descriptor, function)
        self.redacts = options.redact_output
        output_schema = self.output.schema
        self.marks = self.output.marks if self.redacts else []
        self.media = media_types_of(output_schema)  # properties that are sent as files, with their media types
        definition = {**self.about.to_mcp(), "inputSchema": advertised}
        promise = promise_of(output_schema)
        # Where there is structured content, Codex and Claude Code show their models nothing else: no file, no format.
        # And where something is marked, `***REDACTED***` would not fit the promise.
        is_text_only = not options.structured or self.marks or self.media or options.output_formatter
        if output_schema and admits_object(promise) and not is_text_only:
            definition["outputSchema"] = {**promise, "type": "object"}
        self._definition = _as_listed(definition)
        self.input_schema: JSONSchema = self._definition["inputSchema"]
        self.output_schema: JSONSchema = self._definition.get("outputSchema", {})  # as advertised; {} when none is
        self.warnings = self._warnings(self.arguments.declared)
        self.resources = self._resources()

    @functools.cached_property
    def own_marks(self) -> list[JSONSchema]:
        """The marks of what an author has written, an example or a chunk: no serializer has hidden anything in it."""
        declared = getattr(self.module, "output_schema", None)
        return [*self.marks, marks_of(declared)] if self.redacts else []

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
            unsent = ", ".join(self.output.unsent)
            warnings.append(f"pydantic does not know these fields, and they are not sent: {unsent}")
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

    def name_as(self, naming: str) -> str:
        """The tool's name in MCP, with `naming` as the option `tool_names`."""
        return portable_name(self.name) if naming == "portable" else self.name

    def definition(self, naming: str) -> JSONObject:
        """The tool as MCP's `tools/list` sends it (FR-SERVER-011), with `naming` as the option `tool_names`."""
        return {"name": self.name_as(naming), **self._definition}

    @property
    def examples(self) -> list[JSONObject]:
        """The module's own examples that are valid calls, in plain JSON types, without what is marked."""
        with suppress(Exception):  # apcore checks nothing of what a module lists as examples
            examples = redact(plain_json(self.descriptor.examples), marks_in(self.descriptor.examples))
            valid = [one for one in examples if is_valid(one["inputs"], self.input_schema)]
            for one in valid:
                known, others = self.arguments.shown(one["inputs"])
                one["inputs"] = {**known, **others}
                if "output" in one:
                    one["output"] = redact(one["output"], *self.own_marks)
            return valid
        return []


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
        given = value.get(name)
        items = given if isinstance(given, list) else [given]
        if not items or REDACTED_VALUE in items:
            continue
        value.pop(name, None)
        for number, text in enumerate(items):
            place = f"{name}/{number}" if isinstance(given, list) else name
            files += _file(text or "", media_type, f"media://{tool.module_id}/{quote(place)}")
    return files


def _file(text: str, media_type: str, uri: str) -> list[JSONObject]:
    """A file in base64 as MCP content: an image, audio or, of any other type, a resource; nothing for an empty one."""
    # Pydantic writes the alphabet of URLs, MCP reads the standard one.
    encoded = text.replace("-", "+").replace("_", "/")
    data = base64.b64decode(encoded, validate=True)
    family = media_type.split("/")[0]
    if not data:
        return []
    if family in ("image", "audio"):
        return [{"type": family, "data": encoded, "mimeType": media_type}]
    resource = {"uri": uri, "mimeType": media_type, "blob": encoded}
    if family == "text":
        with suppress(UnicodeDecodeError):  # in another encoding it stays a blob
            resource["text"] = data.decode()
            del resource["blob"]
    return [{"type": "resource", "resource": resource}]


@dataclasses.dataclass(frozen=True)
class _ResultMapper:
    """Makes tool results of what modules gave: text, files and structured content: always (`structured=True`), never
    (False) or, by default, where the tool advertises a schema. `label` names the call in the log.

    A result of more than `max_result` bytes is an error RESULT_TOO_LARGE (0: any size): clients end their connection,
    and all tools of the server with it."""

    options: Options
    tool: Tool
    label: str
    structured: bool | None = None

    def to_text(self, chunk: Any) -> str:
        """A chunk of a stream as JSON text, with marked values hidden."""
        own_marks = marks_in(chunk) if self.tool.redacts else {}
        chunk = {name: value for name, value in chunk.items() if name not in self.tool.media}  # the result has them
        try:
            return to_json(redact(redact(as_json(chunk), *self.tool.own_marks), own_marks)).decode()
        except Exception as error:  # a module's own __str__ may raise anything
            raise not_json(error) from None

    def to_result(self, output: Any, output_json: bytes | None) -> JSONObject:
        """The tool result for `output`, which was `output_json` unless middleware has changed it since."""
        tool = self.tool
        files: list[JSONObject] = []
        text = b""
        try:
            with suppress(ValueError):
                text = to_json(output)
            is_changed = text != output_json
            value = as_json(output) if is_changed else output
            if is_changed or tool.marks or tool.media:
                own_marks = marks_in(output) if is_changed and tool.redacts else {}
                value = redact(redact(value, *tool.marks), own_marks)
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
        """Raise an error where a result, or a part of it, is larger than may be sent."""
        limit = self.options.max_result
        if limit and size > limit:
            details = {"size": size, "limit": limit}
            raise ModuleError("RESULT_TOO_LARGE", "Result is too large", details=details, retryable=False)


# ---- Errors: what went wrong, in a plain sentence for the client and in full for the log; pure ----

SENTENCES = {  # what a client reads, by apcore's error code (FR-ERROR-001 to -010)
    "MODULE_NOT_FOUND": "Module not found",
    "MODULE_DISABLED": "Module is disabled",
    "ACL_DENIED": "Access denied",
    "MODULE_TIMEOUT": "Module timed out",
    "GENERAL_INVALID_INPUT": "Invalid input",
    "CALL_DEPTH_EXCEEDED": "Call depth limit exceeded",
    "CIRCULAR_CALL": "Circular call detected",
    "CALL_FREQUENCY_EXCEEDED": "Call frequency limit exceeded",
    "EXECUTION_CANCELLED": "Execution was cancelled",
    "APPROVAL_DENIED": "Approval was denied",
    "APPROVAL_TIMEOUT": "Approval was not given in time",
    "APPROVAL_PENDING": "Approval is still pending",
    "OUTPUT_SERIALIZATION_ERROR": "Failed to serialize module output",
    "RESULT_TOO_LARGE": "Result is too large (the tool has run)",
}
_WITH_DETAILS = {  # the same where an error has these details, and they quote nothing that is marked
    "MODULE_NOT_FOUND": "Module not found: {module_id}",
    "MODULE_DISABLED": "Module is disabled: {module_id}",
    "MODULE_TIMEOUT": "Module timed out after {timeout_ms}ms",
    "GENERAL_INVALID_INPUT": "Invalid input: {message}",
    "RESULT_TOO_LARGE": "Result is too large: {size} bytes, and at most {limit} are sent (the tool has run)",
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


def _chains_of(error: BaseException | None) -> Iterator[str]:
    """The ids of the modules that apcore names in an error and what led to it, except one that does not exist."""
    while error is not None:
        details: Any = getattr(error, "details", None)
        chain = details.get("call_chain") if isinstance(details, dict) else None
        if isinstance(chain, list):
            is_missing = isinstance(error, errors.ModuleNotFoundError) and details["module_id"] == chain[-1]
            yield from chain[:-1] if is_missing else chain
        error = error.__context__


@dataclasses.dataclass
class _ErrorMapper:
    """Says what went wrong with one call: to the client in a plain sentence, to the log in full. It never raises.

    Where a module that took part in the call has sensitive inputs, both learn no more than what failed and where: no
    text that a module or a validator wrote, as nobody can tell how it spells a secret. With sensitive outputs, the same
    holds for the log."""

    label: str
    tool: Tool
    arguments: JSONObject
    modules: Collection[tuple[str, Any]]  # that took part in the call, with their ids
    trace_id: str
    masks_errors: bool = True  # the option `mask_errors`: clients are not told what a module did not mean to raise

    def to_result(self, error: BaseException) -> JSONObject:
        """The tool result for `error`, which is logged (FR-ERROR-001 to -011, FR-LOG-003)."""
        try:
            # What another Executor has run is known by name alone, and nobody knows what it marks.
            known = {self.tool.module_id, *(module_id for module_id, _ in self.modules)}
            modules = [module for _, module in self.modules]
            has_secret_inputs = self.tool.has_secret_inputs or not known.issuperset(_chains_of(error))
            has_secret_inputs = has_secret_inputs or any(has_marks(module, "input") for module in modules)
            has_secret_outputs = bool(self.tool.marks) or any(has_marks(module, "output") for module in modules)
            is_secret = has_secret_inputs or has_secret_outputs
            result = self._failure_of(error, has_secret_inputs, is_secret)
            self._log(_cause_of(error), hides_text=is_secret)
            return result
        except Exception as fault:  # boundary: what a module's author puts into an error may be anything
            logger.error("Tool call error: %s - its error cannot be read: %s", self.label, type(fault).__name__)
            return failure(UNEXPECTED, "GENERAL_INTERNAL_ERROR")

    def _log(self, cause: BaseException, hides_text: bool) -> None:
        """Log what went wrong, with the traceback of what nobody expected."""
        text = one_line(str(getattr(cause, "message", cause))[:_LOG_CHARACTERS])
        trace = None if isinstance(cause, ModuleError) or hides_text else cause
        if hides_text:
            frame = (traceback.extract_tb(cause.__traceback__) or [None])[-1]
            place = f"{os.path.basename(frame.filename)}:{frame.lineno}" if frame else "an unknown place"
            text = f"(not shown: it may quote sensitive values) at {place}"
        if getattr(cause, "code", "") == "MODULE_TIMEOUT":
            text += " (--timeout and the module's own resources say how long it may take)"
        line = "Tool call error: %s - %s: %s (trace %s)"
        extra = {"trace_id": self.trace_id}
        logger.error(line, self.label, type(cause).__name__, text, self.trace_id, exc_info=trace, extra=extra)

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
        elif not self.masks_errors and not is_secret:
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
        text = SENTENCES.get(error.code, f"Module error: {error.code}")
        if isinstance(error, errors.ApprovalDeniedError) and error.result.reason == NOBODY:
            return f"{text}: {NOBODY}", {}
        kinds = int if is_withheld else (int, str)
        facts = {**error.details, "message": error.message}
        facts = {name: fact for name, fact in facts.items() if isinstance(fact, kinds)}
        with suppress(KeyError):  # a module's own error may have a code of apcore's, and other details
            text = _WITH_DETAILS[error.code].format_map(facts)
        text = text_of(text)
        report: JSONObject = {}
        if isinstance(error, errors.SchemaValidationError):  # this module called another one with wrong arguments
            report["user_fixable"] = False
        if error.code == "MODULE_TIMEOUT" and "timeout_ms" in facts:
            report["error_details"] = {"timeout_ms": facts["timeout_ms"]}
        if error.code == "OUTPUT_SERIALIZATION_ERROR":
            found = re.search(r"(nan|-?inf|NaN|-?Infinity|NaT) at .*|two keys are .*", error.message)
            text += f": {found[0]}" if found and not is_withheld and not self.tool.marks else ""
            text += " (the tool has run)"
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
        elif getattr(error.__context__, "step_name", "") == "input_validation":  # apcore's PipelineStepError
            faults = self.tool.arguments.faults(self.arguments)  # apcore's own list lacks the names of missing fields
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
    `left_out` and `warned` have the WARNINGs about those modules that were built last."""

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
        """Name each tool by its alias where every client takes that name, unless it is another module's ID, or an
        earlier module has taken it; else by its ID. Returns all by portable names."""
        by_name = {portable_name(tool.module_id): tool for tool in tools}
        for tool in tools:
            alias = tool.about.alias
            if _API_NAME.fullmatch(alias) and by_name.setdefault(portable_name(alias), tool) is tool:
                tool.name = alias
            elif tool.name != tool.module_id:  # else the WARNING was given at an earlier build
                tool.name = tool.module_id
                text = f"The alias of module {tool.module_id} is not used: {alias} is no name for a tool, or another's"
                warn(text, self.warned)
        return by_name


# ---- Calls: one running tool call, as the rooms below know it ----


@dataclasses.dataclass(eq=False)
class Call:
    """One running tool call, as execution, approval and the log see it (`call.RunningCall`)."""

    tool: Tool
    conversation: Conversation
    catalog: Catalog
    executor: Executor
    approver: ApprovalHandler | None
    structured: bool | None = None  # whether its result has structured content; None: where its tool promises it
    output_json: bytes | None = None  # what its module gave, as JSON
    # What has taken part, by `id()`: while the call runs, another module may be registered under the same id.
    modules: dict[int, tuple[str, Any]] = dataclasses.field(default_factory=dict)

    def owns(self, context: Context[Any]) -> bool:
        is_first = context.call_chain == [self.tool.module_id] and context.executor is self.executor
        return is_first and context.data.get(CALL_KEY) is self

    def record(self, module_id: str, module: Any) -> None:
        """Note that a module takes part in this call, also where another module calls it.

        Whose secrets an error may quote is known by that. Exceptions do not tell: a module may catch the one that
        another raised, and later raise its own from what it remembers."""
        self.modules[id(module)] = (module_id, module)

    def write(self, output: Any) -> JSONObject:
        written, self.output_json = self.tool.output.write(output, self.tool.redacts)
        return written

    def described(self, module_id: str, registry: Registry) -> tuple[str, Arguments]:
        module = registry.get(module_id)
        tool = self._tool_of(module_id, module)
        if tool is not None:
            return tool.about.description, tool.arguments
        descriptor = cast(ModuleDescriptor, registry.get_definition(module_id))
        arguments = Arguments(module, descriptor)
        return _description_of(descriptor, arguments.function), arguments

    def function(self, module_id: str, module: Any) -> Function | None:
        tool = self._tool_of(module_id, module)
        return function_of(module) if tool is None else tool.arguments.function

    def _tool_of(self, module_id: str, module: Any) -> Tool | None:
        """The tool that a module is; None for one that is not listed, or has only the id of one."""
        tool = self.tool if module_id == self.tool.module_id else self.catalog.find(module_id)
        return tool if tool is not None and tool.module is module else None

    @property
    def is_secret(self) -> bool:
        modules = [self.tool.module, *(module for _, module in self.modules.values())]
        return any(has_marks(each, "input") or has_marks(each, "output") for each in modules)


# ---- Router: a `tools/call` to the Executor and back, also while its user is asked; event loop only ----


def _trace_parent(trace: Mapping[str, str]) -> TraceParent | None:
    """The parent span: OpenTelemetry's current one where there is one (the SDK's, itself in the client's trace), else
    the client's."""
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


def _log_end(tool: str, caller: Identity | None, outcome: str, seconds: float, trace_id: str) -> None:
    """The line of the log for a call that has ended. What its caller wrote fits between the quotes of a JSON text."""
    texts = {"tool": tool, "caller": caller.id if caller else "", "outcome": outcome}
    quoted = {key: one_line(json.dumps(text, ensure_ascii=False)[1:-1]) for key, text in texts.items()}
    attributes = {**quoted, "duration_ms": seconds * 1000, "trace_id": trace_id}
    by = f" (caller: {quoted['caller']})" if caller else ""
    line = "Tool call ended: %(tool)s%(by)s, %(duration_ms).1f ms, trace %(trace_id)s: %(outcome)s"
    access_logger.info(line, {**attributes, "by": by}, extra=attributes)


_SERVED: weakref.WeakKeyDictionary[ExecutionStrategy, tuple[int, ExitStack]] = weakref.WeakKeyDictionary()
_SERVED_LOCK = threading.Lock()


@contextmanager
def installation(executor: Executor) -> Iterator[None]:
    """While any server or call uses an Executor, it has our steps and, where it has none, our approval handler; and
    apcore's loggers have our filter."""
    strategy = executor.current_strategy
    with _SERVED_LOCK:
        count, stack = _SERVED.get(strategy, (0, ExitStack()))
        if not count:
            stack.enter_context(steps_in_place(strategy))
            stack.enter_context(handler_in_place(strategy))
            stack.enter_context(values_hidden())
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


_PARKED_BYTES_MAX = 64 * 2**10  # of the result of a call that ends before its client's retry
_TOO_MANY = "Too many calls, or too large ones, wait for their users' answers"


class ExecutionRouter:
    """Sends a `tools/call` through apcore's Executor and brings back a tool result, whatever happens on the way.

    It raises nothing but cancellation and JSON-RPC errors. Those are for a retry whose state resumes no call, for a
    call that needs an answer which its client cannot give, and for one more than may wait (FR-EXEC-007).

    A call that asks its user waits in the `room`. On a server without sessions that has a key, nothing waits: the
    sealed state only proves that the user was asked for approval, and the retry begins the call anew, on whichever
    server."""

    def __init__(self, catalog: Catalog, options: Options) -> None:
        self.catalog = catalog
        self.options = options
        self.room = WaitingRoom()
        self.search: SearchTools | None = None
        if options.search:
            from .search import SearchTools

            self.search = SearchTools(catalog, options)
        self.tasks: Tasks | None = None  # where calls go on without a request
        self.running = set[Call]()
        self.listeners: list[Callable[[str], None]] = []  # told "ok" or the error's code, of each call that ends
        self._approver = approver_of(options.approval)
        # A logging configuration may have set the level of that logger instead.
        self._logs_ends = options.access_log or bool(access_logger.level)

    async def handle_call(self, ctx: RequestContext, params: Any) -> Any:
        """Answer a `tools/call`: one that begins, or a retry with the answers to what an earlier one asked."""
        caller = caller_in(ctx)
        client = self.client_in(ctx)
        responses = params.input_responses or {}
        state = params.request_state
        if state is None:
            return await self.call(params.name, params.arguments or {}, caller, client)
        # The client cannot have made it up: the SDK's `RequestStateBoundary` has unsealed it.
        if state == QUESTION_KEY and self.options.state_key is not None and ctx.protocol_version >= MODERN:
            return await self.call(params.name, params.arguments or {}, caller, client, answers=responses)
        return await self.room.resume(state, caller, client, responses).reply()

    def client_in(self, ctx: RequestContext) -> Client:
        """The client that makes a request."""
        has_key = self.options.state_key is not None
        return client_of(ctx, self._naming_for(ctx), is_stateless=self.options.stateless, has_key=has_key)

    def _naming_for(self, ctx: RequestContext) -> Literal["module-id", "portable"]:
        """The option `tool_names` for the client of a request."""
        client = ctx.session.client_params
        is_portable = self.options.tool_names == "portable"
        if self.options.tool_names == "auto" and client is not None:
            is_portable = _CLIENTS_WITHOUT_DOTS.match(client.client_info.name) is not None
        return "portable" if is_portable else "module-id"

    def find(self, name: str, arguments: JSONObject) -> tuple[Tool | None, JSONObject]:
        """The tool that a client calls by that name, and the arguments for it; openai.py has another way."""
        return self.catalog.find(name), arguments

    async def call(
        self, name: str, arguments: JSONObject, caller: Identity | None, client: Client = NO_CLIENT,
        *, structured: bool | None = None, answers: Mapping[str, Any] | None = None,
    ) -> JSONObject:  # fmt: skip
        """Begin the call of a tool by its name. Returns its result, what it asks first, or a task. `answers` are those
        to what another server of the same key has asked."""
        tool = None
        if self.search is not None:
            tool, name, arguments = self.search.resolve(name, arguments)
        if tool is None:
            tool, arguments = self.find(name, arguments)
        if tool is None and self.tasks is not None:
            tool = self.tasks.find(name)
        if tool is None:
            return self.not_found(name, caller, client)
        conversation = Conversation(label_of(tool.module_id, caller), arguments, caller, client, self.room)
        if answers is not None:
            conversation.confirmation = answers.get(QUESTION_KEY)
            conversation.must_ask = True  # whatever the client declares now
        call = Call(tool, conversation, self.catalog, self.options.executor, self._approver, structured)
        context: Context[Any] = Context.create(
            identity=caller,
            trace_parent=_trace_parent(client.trace),
            cancel_token=conversation.token,
            data={CALL_KEY: call, MCP_PROGRESS_KEY: conversation.report, MCP_ELICIT_KEY: conversation.elicit},
        )
        if self.tasks is not None:
            conversation.task = self.tasks.task(conversation, tool)
        conversation.running = asyncio.create_task(self._execute(call, context))
        return await conversation.reply()

    def not_found(self, name: str, caller: Identity | None, client: Client = NO_CLIENT) -> JSONObject:
        """The result of a call of a tool that there is not."""
        shown = one_line(name[:200])
        text = f"Module not found: {shown}"
        context: Context[Any] = Context.create(trace_parent=_trace_parent(client.trace))
        trace_id = context.trace_id
        logger.debug("Tool call: %s", label_of(shown, caller))
        line = "Tool call error: %s - ModuleNotFoundError: %s (trace %s)"
        logger.error(line, label_of(shown, caller), text, trace_id, extra={"trace_id": trace_id})
        result = failure(text, "MODULE_NOT_FOUND")
        self._tell_end(name[:200], caller, result, time.perf_counter(), trace_id)
        return result

    async def _execute(self, call: Call, context: Context[Any]) -> None:
        """Run the module to its end. The outcome is a tool result, also for whatever it raises, or a JSON-RPC error."""
        started = time.perf_counter()
        conversation = call.conversation
        logger.debug("Tool call: %s", conversation.label)
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
            if conversation.is_parked and isinstance(outcome, dict) and json_bytes(outcome) > _PARKED_BYTES_MAX:
                outcome = failure("The tool has run, and its result is too large to be kept", "RESULT_NOT_KEPT")
            conversation.end(outcome)
            call.modules.clear()  # whatever the module has left running holds on to the call
            call.output_json = None
        self._tell_end(call.tool.module_id, conversation.caller, outcome, started, context.trace_id)

    async def _run_module(self, call: Call, context: Context[Any]) -> JSONObject:
        """Check the arguments where apcore would not, and run the module: as a stream where its client follows it."""
        tool, conversation = call.tool, call.conversation
        try:
            arguments = conversation.arguments = integral(conversation.arguments)
        except ValueError as error:
            raise errors.InvalidInputError(str(error)) from None
        if self.tasks is not None and tool is self.tasks.tool:
            return await self.tasks.answer(arguments, conversation)
        if self.search is not None and tool in self.search.tools.values():
            return await self.search.answer(tool, arguments, conversation.caller, conversation.client.naming)
        needs_check = self.options.validate_inputs or tool.arguments.unknown(arguments)
        # A caller whom the ACL refuses learns that from the Executor, and nothing about the arguments.
        if needs_check and await self.catalog.offered([tool], conversation.caller):
            tool.arguments.check(arguments)
        results = _ResultMapper(self.options, tool, conversation.label, call.structured)
        if tool.about.annotations.streaming and conversation.client.wants_progress:
            output = await self._stream(call, context, results)
        else:
            output = await self.options.executor.call_async(tool.module_id, arguments, context)
        if call.output_json is None:  # middleware has answered, or a step of the user's own has run the module
            output = call.write(output)
        return results.to_result(output, call.output_json)

    async def _stream(self, call: Call, context: Context[Any], results: _ResultMapper) -> JSONObject:
        """Send each chunk as a progress notification (FR-STREAM-001). Returns them put together."""
        output: JSONObject = {}
        conversation = call.conversation
        stream: Any = self.options.executor.stream(call.tool.module_id, conversation.arguments, context)
        async with aclosing(stream) as chunks:
            async for chunk in chunks:
                _merge(output, chunk)
                text = results.to_text(chunk)
                results.check_size(len(text.encode()))
                await conversation.report_chunk(text)
        # It was written before middleware ran, which may have changed it, and apcore passes over its faults: so that it
        # is checked and written once more.
        call.output_json = None
        return output

    def _outcome_of(self, call: Call, error: BaseException, trace_id: str) -> JSONObject | Exception:
        """What a call is answered with that has raised `error`."""
        conversation = call.conversation
        if conversation.is_refused:
            # Agents of the handshake versions show their model a tool's error, but may stop at one of the protocol.
            result = failure(_TOO_MANY, "TOO_MANY_QUESTIONS")
            return protocol_error(-32000, _TOO_MANY) if conversation.client.way is Way.RESULT else result
        if conversation.running is not None and conversation.running.cancelling():
            return failure(SENTENCES["EXECUTION_CANCELLED"], "EXECUTION_CANCELLED")
        if isinstance(error, errors.ApprovalPendingError) and conversation.first_question is not None:
            question = {"method": "elicitation/create", "params": {"mode": "form", **conversation.first_question}}
            asked = {QUESTION_KEY: question}
            return {"resultType": "input_required", "requestState": QUESTION_KEY, "inputRequests": asked}
        taken_part = [*call.modules.values()]
        masks = self.options.mask_errors
        mapper = _ErrorMapper(conversation.label, call.tool, conversation.arguments, taken_part, trace_id, masks)
        result = mapper.to_result(error)  # which logs it, also where the client is told by an error of the protocol
        is_undeclared = conversation.client.way is Way.UNDECLARED
        if isinstance(error, errors.ApprovalDeniedError) and error.reason == NOBODY and is_undeclared:
            data: Any = {"requiredCapabilities": {"elicitation": {"form": {}}}}
            return protocol_error(-32021, "Client did not declare form elicitation", data)
        return result

    def _tell_end(
        self, tool: str, caller: Identity | None, outcome: JSONObject | Exception, started: float, trace_id: str
    ) -> None:
        """Tell who wants to know of a call that has ended, unless it is to go on later."""
        if isinstance(outcome, dict) and "inputRequests" in outcome:
            return
        code = "ok"
        if isinstance(outcome, Exception):
            code = str(cast(Any, outcome).error.code)  # of JSON-RPC
        elif outcome["isError"]:
            code = outcome["_meta"]["apcore-mcp/error"]["error_type"]
        if self._logs_ends:
            _log_end(tool, caller, code, time.perf_counter() - started, trace_id)
        for listener in self.listeners:
            listener(code)


# ---- Server: the MCP handlers, in every protocol version the SDK speaks; event loop only ----

# What 2026-07-28 requires of every list: it is stale at once, so a client that keeps it has to listen for changes.
FRESH = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
_CONFIRMED_SECONDS = 300.0  # how long a user may think where nothing waits, so that an answer could be sent again
_COALESCE_SECONDS = 0.02  # changes of the tool list this close together are one notification
_NOTIFY_SECONDS = 1.0  # how long the others wait for a client that does not read
_APPS_EXTENSION = "io.modelcontextprotocol/ui"
SKILLS_EXTENSION = "io.modelcontextprotocol/skills"


class Activity:
    """Counts requests that were read and are neither answered nor cancelled; each may count twice, where it is read and
    where it is handled."""

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


def _resource_definition(resource: Resource) -> JSONObject:
    """A resource of an extension as `resources/list` describes it."""
    fields = ("uri", "name", "title", "description", "annotations", "icons")
    described = resource.model_dump(mode="json", by_alias=True, exclude_none=True, include={*fields})
    meta = {} if resource.meta is None else {"_meta": resource.meta}
    return {**described, "mimeType": resource.mime_type, **meta}


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
        # Asked before our own approval handler is there: apcore takes any for a protection.
        self.is_unprotected = options.executor.governance_state().unprotected_control_surface
        self.catalog = Catalog(options)
        self.router = ExecutionRouter(self.catalog, options)
        self.activity = Activity()
        self._bus = InMemorySubscriptionBus()
        self._listener = ListenHandler(self._bus)
        self._connections = weakref.WeakSet[Any]()  # of handshake clients that can be notified
        self._lists_changed = asyncio.Event()
        self.unending = weakref.WeakSet[Any]()  # tasks and cancel scopes that would never end by themselves
        self.listening = ExitStack()  # closed as soon as the server is told to end: what accepts connections
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
        # Without it, the SDK runs tools/list for every 2026-07-28 HTTP call to check its headers. The constructor of
        # 2.2 does not take it.
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
        self.unending.add(loop.create_task(self._notify_of_changes()))

    def _extend(self) -> None:
        """Take in the SDK's extensions: the user's own, and those of tasks and skills. Of each its methods, its
        resources, what it does to calls, and its settings, which clients are told."""
        from mcp.server.extension import compose_tool_call_handler
        from mcp_types import CallToolRequestParams

        extensions = [*(self.options.mcp_extensions or ())]
        is_asked_for = self.options.task_after not in (None, 5.0)  # the default, with which tasks.py may be missing
        if not self.options.stateless and (is_asked_for or Path(__file__).with_name("tasks.py").exists()):
            from .tasks import Tasks

            self.router.tasks = Tasks(self.options, self.catalog)
            extensions.append(self.router.tasks)
        if self.options.skills is not None:
            from .skills import Skills

            extensions.append(Skills(self.options.skills, self.options.dynamic))
        self.extensions = extensions
        for extension in extensions:
            if extension.tools():
                raise ValueError(f"{extension.identifier} brings tools: here they are made of modules")
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
        self.listening.close()
        self._listener.close()
        async with self.sessions:
            with CancelScope(deadline=self.deadline):
                await self.activity.idle.wait()
                if self.router.tasks is not None:
                    await self.router.tasks.finish()
            for call in self.router.running:
                call.conversation.cancel()
            with CancelScope(deadline=self.deadline + 0.5):  # so that the clients of cancelled calls are answered
                await self.activity.idle.wait()
            for each in self.unending:
                each.cancel()

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
        if ctx.method == "initialize":  # handshake clients cannot use their methods
            extensions.pop(TASKS_EXTENSION, None)
            extensions.pop(SKILLS_EXTENSION, None)
        capabilities.pop("extensions", None)
        if extensions:
            capabilities["extensions"] = extensions
        if ctx.method == "server/discover":
            capabilities["resources"]["subscribe"] = False
            return result
        # Private: the public session ends with its request, and notifications need the connection.
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
            client = self.router.client_in(ctx)
            search, tasks = self.router.search, self.router.tasks
            offered = await self._offered(ctx)
            tools = offered if search is None else search.tools.values()
            result["tools"] = [tool.definition(client.naming) for tool in tools]
            if tasks is not None:
                tasks.amend(result["tools"], offered, client)
        return result

    async def _list_tools(self, ctx: RequestContext, params: object) -> Any:
        return {"tools": [], **FRESH}  # `_fill_in_tools` adds them

    def _input_schema_of(self, name: str) -> JSONSchema | None:
        search, tasks = self.router.search, self.router.tasks
        tool = (search.tools.get(name) if search else None) or self.catalog.find(name)
        tool = tool or (tasks.find(name) if tasks else None)
        return tool.input_schema if tool else None

    async def _list_resources(self, ctx: RequestContext, params: object) -> Any:
        resources = [description for tool in await self._offered(ctx) for description, _ in tool.resources]
        resources += map(_resource_definition, self._added_resources())
        return {"resources": resources, **FRESH}

    async def _list_resource_templates(self, ctx: RequestContext, params: object) -> Any:
        return {"resourceTemplates": [], **FRESH}

    async def _read_resource(self, ctx: RequestContext, params: Any) -> Any:
        for tool in self.catalog.tools.values():
            for description, content in tool.resources:
                if description["uri"] == params.uri and await self.catalog.offered([tool], caller_in(ctx)):
                    return {"contents": [content], **FRESH}
        for resource in self._added_resources():
            if resource.uri == params.uri:
                content = {"uri": resource.uri, "mimeType": resource.mime_type}
                read = await resource.read()
                content |= {"text": read} if isinstance(read, str) else {"blob": base64.b64encode(read).decode()}
                return {"contents": [content], **FRESH}
        code = -32602 if ctx.protocol_version >= MODERN else -32002
        raise protocol_error(code, "Resource not found", {"uri": params.uri})

    def _added_resources(self) -> list[Resource]:
        """The resources of extensions, which are open to every caller."""
        return [binding.resource for extension in self.extensions for binding in extension.resources()]

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
    started = f"apcore-mcp server started: {count} registered, transport={options.transport}{address}"
    logger.info("%s", started)
    if address and not logger.hasHandlers():  # a program that has set up no log has to know, too
        print(started, file=sys.stderr)


class _Lifetime:
    """A server from its start to its end: it accepts clients, waits until it is told to end, and closes.

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


def _init(make: Callable[P, Options], enter: Callable[[T, Options], None]) -> Callable[Concatenate[T, P], None]:
    """The same for the `__init__` of `MCPServer`."""

    @functools.wraps(enter)
    def init(self: T, /, *args: P.args, **kwargs: P.kwargs) -> None:
        enter(self, options_of("MCPServer", *args, **kwargs))

    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    parameters += inspect.signature(make).parameters.values()
    vars(init)["__signature__"] = inspect.Signature(parameters, return_annotation=None)
    return init


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
    lifetime = _Lifetime(options, mounted=True)
    # A task of its own: what `run()` opens only the same task may close, and a test fixture enters and leaves in two.
    running = asyncio.create_task(lifetime.run())
    try:
        yield await asyncio.shield(asyncio.wrap_future(lifetime.started))
    finally:
        lifetime.stop()
        with CancelScope(shield=True):  # also while the host is being cancelled
            await running


class MCPServer:
    """A server in a thread of its own, beside the rest of a program: `MCPServer(registry, transport=..., port=...)`.

    Takes the options of `serve()` and checks them at once. Every method may be called from any thread, though not
    `start()` from two at once, and a server that has ended can be started again."""

    @functools.partial(_init, Options)
    def __init__(self, options: Options) -> None:
        self._options = options
        self._lifetime = _Lifetime(self._options)
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the server and return once it accepts clients, at once if it already does. Raises what keeps it from
        starting, as `serve()` would: OSError for a port in use, whatever `on_startup` raised."""
        if self._thread is None or self._lifetime.ended.done():
            self.wait()
            self._lifetime = _Lifetime(self._options)
            self._thread = threading.Thread(target=self._lifetime.block, name="apcore-mcp", daemon=True)
            self._thread.start()
        self._lifetime.started.result()

    def stop(self) -> None:
        """Ask the server to end, and return at once; running calls are given `shutdown_seconds`."""
        self._lifetime.stop()

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
    lifetime = _Lifetime(options)

    def handle(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # so that a second one ends the process at once
        lifetime.stop()

    with ExitStack() as former:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                former.callback(signal.signal, number, signal.signal(number, handle))
            # A process that a module forks has no server to end, and under Python 3.13 it might ignore the signal.
            if sys.platform != "win32":
                os.register_at_fork(after_in_child=former.close)
        lifetime.block()
    lifetime.started.result()


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
    ValueError for a value that is not allowed, OSError for a port in use; RuntimeError in a running event loop. Over
    HTTP, a program that has set up no log reads on stderr where it listens. Source: FR-SERVER-001 to -011."""
    run(options)
