"""What several test files share beside the fixtures: the wire of both eras by hand, users who answer, modules."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import gc
import inspect
import json
import logging
import os
import queue
import re
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date
from typing import Any

import httpx
import httpx2
import mcp_types as types
import pytest
from apcore import Config, Executor, FunctionModule, ModuleAnnotations, Registry
from apcore.cancel import CancelToken
from conftest import (
    HANDSHAKE,
    MODERN,
    ROOT,
    Clock,
    FunctionalModule,
    client_of,
    connect,
    echo,
    hosting,
    program,
    registry_of,
    serving,
    stdio,
)
from jsonschema import Draft202012Validator
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import CallToolResult, ElicitRequest, ElicitResult, InputRequiredResult
from pydantic import BaseModel, Field
from starlette.applications import Starlette
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.routing import Mount

from apcore_mcp import MCPServer, async_serve, elicit, report_progress, serve, to_openai_tools
from apcore_mcp.core import Catalog, Tool
from apcore_mcp.options import options_of

Caplog = pytest.LogCaptureFixture
Capture = pytest.CaptureFixture[str]
Monkeypatch = pytest.MonkeyPatch
ERAS = (HANDSHAKE, MODERN)
entered = threading.Semaphore(0)


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m apcore_mcp` with no input at all."""
    return subprocess.run(
        [sys.executable, "-m", "apcore_mcp", *arguments],
        **{"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 30, "cwd": ROOT, **options},
    )


def exported_names(output: str) -> list[str]:
    return [tool["function"]["name"] for tool in json.loads(output)]


ACCEPT = {"Accept": "application/json, text/event-stream"}
HANDSHAKE_VERSIONS = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"]
META = "io.modelcontextprotocol/"


def message(method: str, params: dict[str, Any] | None = None, request_id: int | str = 1) -> dict[str, Any]:
    """A JSON-RPC request."""
    return {"jsonrpc": "2.0", "id": request_id, "method": method, **({} if params is None else {"params": params})}


def enveloped(params: dict[str, Any] | None, version: str = MODERN) -> dict[str, Any]:
    """Params with what every request carries from 2026-07-28 on, if they do not bring it."""
    stamp = {"protocolVersion": version, "clientInfo": {"name": "raw", "version": "1"}, "clientCapabilities": {}}
    meta = {META + key: value for key, value in stamp.items()}
    return {**(params or {}), "_meta": meta | (params or {}).get("_meta", {})}


def modern(method: str, params: dict[str, Any] | None = None, **headers: str | None) -> dict[str, Any]:
    """What httpx posts to ask `method` as a client of 2026-07-28; `headers` overrides (None leaves one out)."""
    sent = {"mcp_protocol_version": MODERN, "mcp_method": method, "mcp_name": (params or {}).get("name"), **headers}
    routing = {name.replace("_", "-"): value for name, value in sent.items() if value is not None}
    return {"json": message(method, enveloped(params)), "headers": ACCEPT | routing}


def answer(response: httpx.Response) -> dict[str, Any]:
    """The JSON-RPC message of a response, be it JSON or a stream of one event."""
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    message: dict[str, Any] = json.loads(data[-1] if data else response.text)
    return message


def initialize_params(version: str) -> dict[str, Any]:
    return {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}


def handshake(
    client: httpx.Client, endpoint: str, version: str = HANDSHAKE_VERSIONS[-1], **capabilities: Any
) -> tuple[Any, dict[str, str]]:
    """Open a session; the `initialize` result, and the headers of the session's requests."""
    params = initialize_params(version) | {"capabilities": capabilities}
    response = client.post(endpoint, json=message("initialize", params), headers=ACCEPT)
    result = answer(response)["result"]
    session = {"Mcp-Session-Id": response.headers["mcp-session-id"], "MCP-Protocol-Version": result["protocolVersion"]}
    initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert client.post(endpoint, json=initialized, headers=ACCEPT | session).status_code == 202
    return result, ACCEPT | session


SECRET_TEXT = "S3CR3T"
"""Part of every secret text below, so that no form of it, quoted or escaped, goes unseen."""
REPORTED = {"status", "error_type", "error_message", "error_details", "retryable", "user_fixable"}
REPORTED |= {"ai_guidance", "suggestion"}


def failure(result: CallToolResult, text: str | None = None) -> dict[str, Any]:
    """Check what holds for every failed call (FR-ERROR-011); returns the report in `_meta`."""
    assert (result.is_error, result.structured_content) == (True, None)
    (part,) = result.content
    assert part.type == "text"
    assert text is None or part.text == text
    assert result.meta is not None
    report: dict[str, Any] = result.meta["apcore-mcp/error"]
    assert report["status"] == "failure"
    assert report["error_message"] == part.text
    assert report["error_type"]
    assert report.keys() <= REPORTED
    return report


def lines_of(report: dict[str, Any], title: str = "Input validation failed:") -> list[tuple[str, str, str]]:
    """The `- {field}: {message} ({code})` lines of a validation error, which `error_details` must repeat."""
    first, *rest = report["error_message"].split("\n")
    assert first == title
    found = [re.fullmatch(r"- (.*?): (.+) \(([A-Za-z_]+)\)", line) for line in rest]
    assert found, "no line at all"
    assert all(found), rest
    lines = [match.groups() for match in found if match]
    errors = report["error_details"]["errors"]
    told = [(e["field"] or line[0], e["message"], e["code"]) for e, line in zip(errors, lines, strict=True)]
    assert told == lines
    return lines


def logged(caplog: pytest.LogCaptureFixture, level: int | None = None) -> list[logging.LogRecord]:
    """The records of the package's own logger, at `level` or at any."""
    ours = [record for record in caplog.records if record.name.partition(".")[0] == "apcore_mcp"]
    return [record for record in ours if level in (None, record.levelno)]


def messages_logged(caplog: pytest.LogCaptureFixture, level: int | None = logging.WARNING) -> list[str]:
    """What the package's own logger says at `level`, or at any."""
    return [record.getMessage() for record in logged(caplog, level)]


def errors_logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The records of FR-LOG-003; what else the server may say of a call at that level is its own business."""
    return [each for each in logged(caplog, logging.ERROR) if each.getMessage().startswith("Tool call error: ")]


def everything_logged(caplog: pytest.LogCaptureFixture) -> str:
    """All that any handler of the package's logger could write: messages, arguments, tracebacks."""
    formatter = logging.Formatter("%(message)s")
    ours = logged(caplog)
    return "\n".join(f"{formatter.format(r)}\n{r.args!r}\n{r.exc_text}\n{r.exc_info!r}" for r in ours)


MARK: Any = {"x-sensitive": True}
MARKED: Any = Field(json_schema_extra=MARK)
SECRETIVE = {"type": "object", "properties": {"token": {"type": "string", **MARK}}}


def calls(module_id: str, **more: Any) -> Callable[..., Any]:
    """A module that calls another one with what it is given, and more."""

    async def call(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async(module_id, {**inputs, **more}, context)

    return call


WITHOUT_LIMIT = Config({"executor": {"default_timeout": 0, "global_timeout": 0}})
LOGGER = logging.getLogger("apcore_mcp")


def _run_async_serve(source: Any, **options: Any) -> None:
    asyncio.run(async_serve(source, **options).__aenter__())


def on_clock(test: Callable[..., Any]) -> Callable[..., None]:
    """Run an async test whose server and client share a loop with a `clock` that it may put forward."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=Clock) as runner:
            runner.run(test(clock=runner.get_loop(), **fixtures))

    signature = inspect.signature(test)
    fixtures = [each for name, each in signature.parameters.items() if name != "clock"]
    vars(run)["__signature__"] = signature.replace(parameters=fixtures)
    return run


every_door = pytest.mark.parametrize("door", [serve, MCPServer, _run_async_serve])


class Gate:
    """Where threads are held up until the test lets them all go on; it can wait until so many have entered."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self._entered = threading.Semaphore(0)

    def enter(self) -> None:
        self._entered.release()
        assert self.is_open.wait(30), "nobody let it go on"

    async def entered(self, times: int = 1) -> None:
        for number in range(times):
            assert await asyncio.to_thread(self._entered.acquire, timeout=20), f"{number} of {times} entered"

    def open(self) -> None:
        self.is_open.set()


def is_set_in_time(token: CancelToken) -> bool:
    """Whether `token` is set by now or at once: it may be set just before or just after the coroutine is ended."""
    limit = time.monotonic() + 10
    while not token.is_cancelled and time.monotonic() < limit:
        time.sleep(0.002)
    return token.is_cancelled


class Array:
    """As NumPy's arrays and scalars."""

    def __init__(self, values: Any, dtype: str = "int64") -> None:
        self.values = values
        self.dtype = dtype

    def tolist(self) -> Any:
        return self.values

    def __str__(self) -> str:
        return "[0 1 ... 9]"


class StreamingModule(FunctionalModule):
    """Streams `chunks`, of which an exception is raised; called as a whole it says so."""

    def __init__(self, chunks: list[Any], **attributes: Any) -> None:
        attributes = {"annotations": ModuleAnnotations(streaming=True), **attributes}
        super().__init__(lambda inputs, context: {"executed": True}, **attributes)
        self.chunks = chunks

    async def stream(self, inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        for chunk in self.chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield copy.deepcopy(chunk)  # apcore merges later chunks into the first ones


def stage(records: queue.Queue[list[Any]] | None = None) -> Registry:
    """Modules that change the registry, wait to be cancelled, and tell what became of each other."""
    told = records or queue.Queue()
    late = asyncio.Event()
    background: list[asyncio.Task[None]] = []
    registry = Registry()

    async def steps(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for number in (1, 2, 3):
            await report_progress(context, number, total=3, message=f"step {number}")
        return {"done": True}

    def from_sync(inputs: dict[str, Any], context: Any) -> Any:
        return context.executor.call("nested", {}, context)

    async def beyond(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await report_progress(context, 7)

        async def report_late() -> None:
            await late.wait()
            await report_progress(context, 8)

        background.append(asyncio.create_task(report_late()))
        return {}

    async def release(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        late.set()
        await asyncio.gather(*background)
        return {}

    async def wait(inputs: dict[str, Any], context: Any, name: str = "wait") -> Any:
        await report_progress(context, 1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.put([name, context.cancel_token])
            raise

    def watch_token(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        context.executor.call("steps", {}, context)
        while not context.cancel_token.is_cancelled:
            time.sleep(0.002)
        told.put(["watch_token", context.cancel_token])
        context.cancel_token.check()
        return {}

    class WaitStreaming(StreamingModule):
        async def stream(self, inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
            yield {"n": 1}
            await wait(inputs, context, "wait_streaming")

    def ended(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        name, token = told.get(timeout=20)
        return {"told": name, "token_set": is_set_in_time(token)}

    async def tasks(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"tasks": [getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks()]}

    async def burst(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for number in range(200):  # on the event loop: nothing can be announced before all of it has happened
            registry.register(f"burst.m{number}", FunctionalModule(echo))
        return {}

    def grow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        registry.register("grown", FunctionalModule(echo))
        return {}

    modules = {f.__name__: f for f in (steps, from_sync, beyond, release, wait, watch_token, ended, tasks, burst, grow)}
    modules |= {"nested": calls("steps"), "deep": calls("from_sync"), "wait_below": calls("wait")}
    modules["shrink"] = lambda inputs, context: {"gone": registry.unregister("grown")}
    for module_id, function in modules.items():
        registry.register(module_id, FunctionalModule(function))
    registry.register("wait_streaming", WaitStreaming([]))
    return registry


STAGE_ON_STDIO = program("import support; serve(support.stage())")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "tests")])}


@contextlib.asynccontextmanager
async def followed(
    source: Registry | None, mode: str, *, transport: str = "streamable-http", url: str = "", **options: Any
) -> AsyncIterator[tuple[Client, asyncio.Queue[object]]]:
    """A client of `source` (on stdio, of the stage; or of `url`), and the changes of the list that it is told of."""
    changes: asyncio.Queue[object] = asyncio.Queue()
    listening = asyncio.Event()

    async def handle(message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            changes.put_nowait(message)

    async def note_stream(response: httpx2.Response) -> None:
        if response.request.method == "GET" and response.status_code == 200:
            listening.set()

    async def pump(events: AsyncIterator[object]) -> None:
        async for event in events:
            changes.put_nowait(event)

    async with contextlib.AsyncExitStack() as stack:
        if transport != "stdio" and not url:
            url = stack.enter_context(serving(source or stage(), transport=transport, **options))
        server: Any
        if transport == "stdio":
            server = stdio(STAGE_ON_STDIO, **ENVIRONMENT)
        elif transport == "sse":
            server = f"{url}/sse"
        else:
            http = httpx2.AsyncClient(event_hooks={"response": [note_stream]}, timeout=30)
            await stack.enter_async_context(http)
            server = streamable_http_client(f"{url}/mcp", http_client=http)
        client = client_of(server, mode, message_handler=handle)
        await stack.enter_async_context(client)
        if mode != HANDSHAKE:
            subscription = await stack.enter_async_context(client.listen(tools_list_changed=True))
            task = asyncio.create_task(pump(subscription))
            stack.callback(task.cancel)
        elif transport == "streamable-http":
            await listening.wait()
        yield client, changes


async def listed(client: Client) -> list[str]:
    return [tool.name for tool in (await client.list_tools()).tools]


def noting() -> tuple[Any, list[tuple[float, float | None, str | None]]]:
    """A progress callback, and what it was told."""
    told: list[tuple[float, float | None, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, total, message))

    return note, told


async def start_call(client: Client, module_id: str, **arguments: Any) -> asyncio.Task[CallToolResult]:
    """A call of a module that reports progress once it runs."""
    running = asyncio.Event()

    async def note(progress: float, total: float | None, message: str | None) -> None:
        running.set()

    call = asyncio.create_task(client.call_tool(module_id, arguments, progress_callback=note))
    await running.wait()
    return call


async def cancel_call(call: asyncio.Task[Any]) -> None:
    call.cancel()
    await asyncio.wait({call})


def clog(url: str, tool: str = "big") -> socket.socket:
    """An SSE client that has asked for the 8 MB of `tool` and stopped reading after the first of them."""
    address = httpx.URL(url)
    clogged = socket.socket()
    clogged.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    clogged.settimeout(20)
    clogged.connect((address.host, address.port))
    clogged.sendall(f"GET /sse HTTP/1.1\r\nHost: {address.host}:{address.port}\r\n\r\n".encode())
    seen = b""

    def read_until(end: bytes) -> bytes:
        nonlocal seen
        while end not in seen:
            received = clogged.recv(1024)
            assert received, seen
            seen += received
        before, _, seen = seen.partition(end)
        return before

    read_until(b"data: ")
    endpoint = url + read_until(b"\r\n").decode()
    initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    call = message("tools/call", {"name": tool, "arguments": {}}, 2)
    hello = message("initialize", initialize_params("2025-06-18"))
    for sent, answered in ((hello, b"serverInfo"), (initialized, b"\r\n"), (call, b"xxxx")):
        assert httpx.post(endpoint, json=sent, trust_env=False).status_code == 202
        read_until(answered)
    return clogged


@contextlib.asynccontextmanager
async def keeping_little(client: Any) -> AsyncIterator[None]:
    """Fails when more than 4 MB are kept of what was asked meanwhile."""
    tracemalloc.start()
    try:
        yield
        await client.list_tools()  # by then the server is done with what it has answered
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 4_000_000


class CountingRegistry(Registry):
    """Knows who listens to it."""

    def __init__(self) -> None:
        self.listeners: list[tuple[str, Any]] = []
        super().__init__()

    def on(self, event: str, callback: Callable[..., Any]) -> None:
        self.listeners.append((event, callback))
        super().on(event, callback)

    def off(self, event: str, callback: Callable[..., Any]) -> bool:
        self.listeners.remove((event, callback))
        return super().off(event, callback)


SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
DENIED = "Approval was denied"
UNASKED = "Approval was denied: nobody can be asked"
Answer = Callable[[Any], ElicitResult]


def accept(**content: Any) -> ElicitResult:
    return ElicitResult(action="accept", content=content)


def asking(answer: ElicitResult | Answer | None) -> tuple[dict[str, Any], list[Any]]:
    """Arguments for a client whose user answers like this (None: a client that cannot ask), and what it was asked."""
    asked: list[Any] = []

    async def callback(context: Any, params: Any) -> ElicitResult:
        asked.append(params)
        assert answer is not None
        return answer if isinstance(answer, ElicitResult) else answer(params)

    return {} if answer is None else {"elicitation_callback": callback}, asked


async def ask(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"answer": await elicit(context, "Who are you?", SCHEMA)}


def text_of(result: CallToolResult) -> str:
    return "".join(part.text for part in result.content if part.type == "text")


class Wire:
    """A client that can ask, and calls whose questions it leaves to the test."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, name: str, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
        return await self.client.session.call_tool(name, arguments, allow_input_required=True, **options)

    async def question(self, *call: Any, **options: Any) -> tuple[str, str, str]:
        """The key, the message and the state of the one question a call is answered with."""
        result = await self.call(*call, **options)
        assert isinstance(result, InputRequiredResult), result
        [(key, request)] = (result.input_requests or {}).items()
        assert isinstance(request, ElicitRequest)
        assert result.request_state
        return key, request.params.message, result.request_state

    async def refused(self, state: str, name: str = "ask", arguments: dict[str, Any] | None = None) -> None:
        """Fails unless this retry is answered with a JSON-RPC error -32602."""
        with pytest.raises(MCPError) as caught:
            await self.call(name, arguments, request_state=state, input_responses={"name": accept(name="Eve")})
        assert caught.value.error.code == -32602


@contextlib.asynccontextmanager
async def wired(modules: dict[str, Any] | Registry | Executor, seconds: float = 40) -> AsyncIterator[Wire]:
    async with connect(modules, client=asking(accept())[0]) as client, asyncio.timeout(seconds):
        yield Wire(client)


def guarded(runs: list[dict[str, Any]], **attributes: Any) -> FunctionalModule:
    """A destructive module that needs approval and keeps a list of its runs."""

    def execute(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        runs.append(inputs)
        return {"ran": True}

    annotations = ModuleAnnotations(requires_approval=True, destructive=True)
    return FunctionalModule(execute, **{"annotations": annotations, **attributes})


@contextlib.asynccontextmanager
async def hosted(modules: Any, mode: str = MODERN, user: Any = None, **options: Any) -> AsyncIterator[Client]:
    """The SDK's client of a server in a host, on this very event loop; `user` are arguments for the client."""
    source = modules if isinstance(modules, Registry | Executor) else registry_of(modules)
    async with (
        async_serve(source, **options) as app,
        hosting(app) as url,
        client_of(url, mode, **(user or {})) as client,
    ):
        yield client


@contextlib.asynccontextmanager
async def asgi_client(source: Any, *, mounted: str = "", **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app that `async_serve()` yields, without a socket between them; at `mounted` in another app."""
    async with async_serve(source, **options) as app:
        outer = Starlette(routes=[Mount(mounted, app)]) if mounted else app
        url = f"http://127.0.0.1:8000{mounted}"
        async with httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url=url) as client:
            yield client


class _ByHeader(AuthenticationBackend):
    async def authenticate(self, conn: Any) -> tuple[AuthCredentials, SimpleUser] | None:
        name = conn.headers.get("x-user") or conn.headers.get("authorization")
        return (AuthCredentials([]), SimpleUser(name)) if name else None


LOGIN = [Middleware(AuthenticationMiddleware, backend=_ByHeader())]
"""For a server whose caller is whom the header `X-User` (or a whole `Authorization`) names."""


def everybody_is(name: str) -> list[Middleware]:
    """For a server whose every caller has this name."""
    user = {"user": SimpleUser(name)}
    return [Middleware(lambda app: lambda scope, receive, send: app({**scope, **user}, receive, send))]


def waiting() -> tuple[Any, asyncio.Event, asyncio.Event]:
    """A module that waits, an event that is set once it has begun, and the one that lets it go on."""
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def wait(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        begun.set()
        await go_on.wait()
        return {"done": True}

    return wait, begun, go_on


REDACTED = "***REDACTED***"


def success_text(result: CallToolResult) -> str:
    """The text of a result that is no error and is one text."""
    (part,) = result.content
    assert part.type == "text"
    assert result.is_error is False, part.text
    return part.text


def parsed(text: str) -> Any:
    return json.loads(text, parse_constant=pytest.fail)  # NaN, Infinity


def gives(output: Any, **attributes: Any) -> FunctionalModule:
    return FunctionalModule(lambda inputs, context: output, **attributes)


def overlay(**shown: Any) -> dict[str, Any]:
    """The metadata of a module whose display overlay has this for MCP."""
    return {"display": {"mcp": shown}}


def returning(hint: Any, value: Any) -> FunctionModule:
    """A module of a function with this return hint."""

    def give() -> Any:
        return value

    give.__annotations__["return"] = hint
    return FunctionModule(give, "a.function")


def tool_of(module: Any, **options: Any) -> Tool:
    """The one tool of a catalog, without a server."""
    (tool,) = Catalog(options_of("test", registry_of({"a.tool": module}), **options)).tools.values()
    return tool


def sent(module: Any, value: Any, **options: Any) -> Any:
    """What is sent of `value`, which `module` gives: JSON that its tool's advertised schema accepts."""
    tool = tool_of(module, **options)
    written, text = tool.output.write(value, tool.redacts)
    assert json.loads(text, parse_constant=pytest.fail) == written
    if tool.output_schema:
        Draft202012Validator(tool.output_schema).validate(written)
    return written


class Size(BaseModel):
    width: int
    made: date


INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def of(*names: str, **properties: Any) -> dict[str, Any]:
    """An object schema with these properties; those that are only named may be anything."""
    return {"type": "object", "properties": {**{name: {} for name in names}, **properties}}


def one(schema: Any, **rest: Any) -> dict[str, Any]:
    """An object schema whose one property, `p`, has `schema`."""
    return of(p=schema) | rest


def nested(levels: int, inner: Any = STRING) -> Any:
    for _ in range(levels):
        inner = one(inner)
    return inner


def subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Every schema in `schema`, by the keywords that hold schemas: what stands elsewhere is data."""
    if not isinstance(schema, dict):
        return
    yield schema
    inner = [value for keyword in MAPS for value in schema.get(keyword, {}).values()]
    inner += [value for keyword in LISTS for value in schema.get(keyword, ())]
    for value in inner + [schema.get(keyword) for keyword in SINGLE]:
        yield from subschemas(value)


MAPS = "properties patternProperties dependentSchemas $defs definitions".split()
LISTS = "anyOf oneOf allOf prefixItems".split()
SINGLE = "items contains additionalProperties propertyNames not if then else".split()
SINGLE += "unevaluatedItems unevaluatedProperties contentSchema".split()


def check(schema: dict[str, Any]) -> dict[str, Any]:
    """Convert `schema`, prove what holds for every conversion, and return the result."""
    before = copy.deepcopy(schema)
    registry = registry_of({"some.module": FunctionalModule(echo, input_schema=schema)})

    def convert() -> Any:
        (tool,) = to_openai_tools(registry)
        return tool["function"]["parameters"]

    result, untouched = convert(), convert()
    assert result == untouched
    assert result["type"] == "object"
    assert not result.keys() & {"$defs", "definitions"}
    assert not [node for node in subschemas(result) if "$ref" in node]
    Draft202012Validator.check_schema(result)
    result.clear()
    assert schema == before, "the module's own schema was changed"
    assert convert() == untouched
    return untouched


DATA: Any = []
for _ in range(5_000):
    DATA = [DATA]


def request(request_id: int | str, method: str, **params: Any) -> dict[str, Any]:
    """A request of 2026-07-28, which needs no handshake."""
    return message(method, enveloped(params), request_id)


def call(request_id: int | str, tool: str, **arguments: Any) -> dict[str, Any]:
    return request(request_id, "tools/call", name=tool, arguments=arguments)


def line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def messages(stdout: bytes) -> list[dict[str, Any]]:
    """What went to stdout, every line of which must be a JSON-RPC message."""
    decoded = [json.loads(text) for text in stdout.splitlines()]
    assert all(message["jsonrpc"] == "2.0" for message in decoded)
    return decoded


def wait_for_stderr(client: Any, words: str) -> str:
    """What the server says until a line has these `words`."""
    seen = []
    while text := client.process.stderr.readline().decode():
        seen.append(text)
        if words in text:
            return "".join(seen)
    return pytest.fail(f"the server ended without saying {words!r}: {''.join(seen)}")


def ended_well(client: Any, seconds: float = 15) -> None:
    """The server ends in time by itself: exit status 0 and no traceback. Its stdin is left as it is."""
    assert client.process.wait(timeout=seconds) == 0
    stderr = client.process.stderr.read().decode()
    assert "Traceback" not in stderr, stderr
    assert "Exception" not in stderr, stderr


ENDLESS = """
def tell(what):
    print(what, file=sys.stderr, flush=True)

opening = {}

async def opened(gate):
    while not Path(gate).exists():
        await asyncio.sleep(0.01)

@tool
async def gate(inputs, context):
    tell("running")
    gate = inputs["gate"]
    opening.setdefault(gate, asyncio.create_task(opened(gate)))
    try:
        await asyncio.shield(opening[gate])  # so that all calls are done at the same moment
    except asyncio.CancelledError:
        tell("coroutine cancelled")
        raise
    return {"done": True}

@tool
def stuck(inputs, context):
    tell("running")
    time.sleep(60)

@tool
async def big(inputs, context):
    tell("running")
    return {"text": "x" * 20_000_000}

@tool
async def deaf(inputs, context):
    tell("running")
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass
"""
"""Tools of a `program` that run until a file is there, for a minute, or for ever; and one with a large result."""
