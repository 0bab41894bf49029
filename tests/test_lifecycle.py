"""From options to the end of a server (FR-SERVER-002 to -010, FR-LOG-001, -002, -004, -005, FR-TRANSPORT-005,
NFR-REL-001; tech design 6.10; design §3 "HTTP", "Shutdown", `async_serve`).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import anyio
import httpx
import pytest
from apcore import APCore, Config, Executor, Middleware, Registry
from conftest import HANDSHAKE, MODERN, PROGRAM, RawClient, connect, echo, free_port, hosting, registry_of, serving
from mcp.client import Client
from mcp.client.sse import sse_client
from starlette.applications import Starlette
from starlette.middleware import Middleware as ASGIMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.routing import Mount
from test_live import CountingRegistry
from test_stdio import ended_well, wait_for_stderr

import apcore_mcp
from apcore_mcp import MCPServer, async_serve, discover, from_openai_call, serve, to_openai_tools

LOGGER = logging.getLogger("apcore_mcp")

INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "raw", "version": "1"},
    },
}


def _run_async_serve(source: Any, **options: Any) -> None:
    async def enter() -> None:
        async with async_serve(source, **options):
            pass

    asyncio.run(enter())


every_door = pytest.mark.parametrize(
    "door", [serve, MCPServer, _run_async_serve], ids=["serve", "MCPServer", "async_serve"]
)


@pytest.fixture(autouse=True)
def _own_log_level() -> Iterator[None]:
    before = LOGGER.level
    yield
    LOGGER.setLevel(before)


def handshake(url: str) -> dict[str, Any]:
    """The result of `initialize`, asked with nothing but HTTP."""
    headers = {"Accept": "application/json, text/event-stream"}
    text = httpx.post(f"{url}/mcp", json=INITIALIZE, headers=headers, timeout=15).raise_for_status().text
    assert '"protocolVersion":"2025-11-25"' in text.replace(" ", "")
    return {"text": text}


def assert_free(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        pass


@every_door
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"port": 0}, "Port must be between 1 and 65535, got 0", id="port-0"),
        pytest.param({"port": 65536}, "Port must be between 1 and 65535, got 65536", id="port-65536"),
        pytest.param({"port": -1}, "Port must be between 1 and 65535, got -1", id="port-negative"),
        pytest.param({"port": 0, "transport": "sse"}, "Port must be between 1 and 65535, got 0", id="port-of-sse"),
        pytest.param({"host": ""}, "Host must not be empty", id="host"),
        pytest.param({"name": ""}, "name must not be empty", id="name-empty"),
        pytest.param({"name": "n" * 256}, "name must not exceed 255 characters", id="name-long"),
        pytest.param({"version": ""}, "version must not be empty", id="version"),
        pytest.param({"instructions": ""}, "instructions must not be empty", id="instructions"),
        pytest.param({"tags": [""]}, "Tag values must not be empty", id="tag"),
        pytest.param({"tags": ["public", ""]}, "Tag values must not be empty", id="second-tag"),
        pytest.param({"prefix": ""}, "prefix must not be empty", id="prefix"),
        *(
            pytest.param(
                {"transport": transport},
                f"Unknown transport: '{transport}'. Must be one of: stdio, streamable-http, sse",
                id=f"transport-{transport}",
            )
            for transport in ("websocket", "http", "")
        ),
        *(
            pytest.param(
                {"log_level": level},
                f"Unknown log level: '{level}'. Must be one of: DEBUG, INFO, WARNING, ERROR",
                id=f"log-level-{level}",
            )
            for level in ("verbose", "CRITICAL", "")
        ),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_before_anything_starts(
    door: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    started: list[str] = []
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole message is compared
        door(registry_of(), **{"transport": "streamable-http", "on_startup": lambda: started.append("up"), **options})
    assert str(refused.value) == message
    assert started == []


@every_door
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tags": "public"}, "tags must be Sequence[str] | None, got 'public'"),
        ({"tags": [1]}, "tags must be Sequence[str] | None, got [1]"),
        ({"allowed_hosts": "example.com"}, "allowed_hosts must be Sequence[str] | None, got 'example.com'"),
        ({"prefix": 3}, "prefix must be str | None, got 3"),
        ({"name": None}, "name must be str, got None"),
        ({"name": "\ud800"}, r"name must be str, got '\ud800'"),
        ({"version": 2}, "version must be str | None, got 2"),
        ({"instructions": 7}, "instructions must be str | None, got 7"),
        ({"host": 5}, "host must be str, got 5"),
        ({"port": "8000"}, "port must be int, got '8000'"),
        ({"port": True}, "port must be int, got True"),
        ({"explorer": 1}, "explorer must be bool, got 1"),
        ({"transport": None}, "transport must be str, got None"),
        ({"approval": 3}, "approval must be str | ApprovalHandler, got 3"),
        ({"on_startup": 3}, "on_startup must be Callable[[], Any] | None, got 3"),
        ({"on_shutdown": "later"}, "on_shutdown must be Callable[[], Any] | None, got 'later'"),
        ({"output_formatter": "json"}, "output_formatter must be Callable[[Any], str] | None, got 'json'"),
        ({"middleware": "gzip"}, "middleware must be a list of Starlette's Middleware(...), got 'gzip'"),
        ({"middleware": [1]}, "middleware must be a list of Starlette's Middleware(...), got [1]"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_value_of_a_wrong_type_is_a_type_error(
    door: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as refused:
        door(registry_of(), **{"transport": "streamable-http", **options})
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("door", "name"),
    [(serve, "serve()"), (MCPServer, "MCPServer"), (_run_async_serve, "async_serve()")],
    ids=["serve", "MCPServer", "async_serve"],
)
def test_what_is_no_option_is_a_type_error_that_names_the_door(door: Callable[..., Any], name: str) -> None:
    with pytest.raises(TypeError) as refused:
        door(registry_of(), no_such_option=1)
    assert str(refused.value) == f"{name} got an unexpected keyword argument 'no_such_option'"


def test_an_option_without_its_name_is_a_type_error_that_names_the_door() -> None:
    """And so is a call without anything to serve."""
    for door, name in ((serve, "serve()"), (async_serve, "async_serve()")):
        with pytest.raises(TypeError, match=re.escape(f"{name} too many positional arguments")):
            door(registry_of(), "streamable-http")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=re.escape(f"{name} missing a required argument: 'registry_or_executor'")):
            door()  # type: ignore[call-arg]


@every_door
@pytest.mark.parametrize(("source", "kind"), [("registry", "str"), (None, "NoneType"), (Registry, "type")], ids=str)
def test_only_a_registry_or_an_executor_can_be_served(door: Callable[..., Any], source: Any, kind: str) -> None:
    with pytest.raises(TypeError) as refused:
        door(source, transport="streamable-http")
    assert str(refused.value) == f"Expected Registry or Executor instance, got {kind}"


@pytest.mark.parametrize(
    "options",
    [
        {"transport": "stdio", "port": 0},
        {"transport": "STDIO", "host": "", "port": 70_000},
        {"transport": "SSE", "port": 1},
        {"transport": "Streamable-HTTP", "port": 65535, "host": "0.0.0.0"},
        {"name": "n" * 255, "version": "0"},
        {"tags": [], "prefix": "x", "log_level": None},
        {"tags": ("a", "b"), "allowed_hosts": ("example.com",)},
        {"on_startup": print, "on_shutdown": None},
        {"output_formatter": str, "middleware": [], "instructions": "Ask before you write."},
        {"middleware": [ASGIMiddleware(GZipMiddleware, minimum_size=500)]},
    ],
    ids=str,
)
def test_values_at_the_edge_of_what_is_allowed_are_accepted(options: dict[str, Any]) -> None:
    """FR-TRANSPORT-005: stdio has no address, so whatever is given as one is ignored."""
    MCPServer(registry_of(), **options)
    MCPServer(Executor(registry_of()), **options)


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
def test_a_port_in_use_is_an_os_error_and_the_server_can_start_later(transport: str) -> None:
    started: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = {"transport": transport, "port": taken.getsockname()[1], "on_startup": lambda: started.append("up")}
        with pytest.raises(OSError, match="in use"):
            serve(registry_of(), **options)
        server = MCPServer(registry_of(), **options)
        with pytest.raises(OSError, match="in use"):
            server.start()
        assert started == []
    server.start()
    server.stop()
    server.wait()
    assert started == ["up"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_blocks_until_a_signal_and_gives_the_handlers_back(number: signal.Signals) -> None:
    """FR-SERVER-005, NFR-REL-001."""
    calls: list[str] = []
    port = free_port()

    def not_handled(*_: object) -> None:
        raise AssertionError("the signal came through")

    before = signal.signal(number, not_handled)

    def on_startup() -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            calls.append("up")
        os.kill(os.getpid(), number)

    try:
        ended: Any = serve(  # type: ignore[func-returns-value]
            registry_of(),
            transport="streamable-http",
            port=port,
            on_startup=on_startup,
            on_shutdown=lambda: calls.append("down"),
        )
        assert signal.getsignal(number) is not_handled
    finally:
        signal.signal(number, before)
    assert (ended, calls) == (None, ["up", "down"])
    assert_free(port)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_clients_are_answered_inside_both_callbacks(kind: str) -> None:
    """After the server accepts, and before it stops; a sync callback blocks the loop, so it can only connect."""
    port = free_port()
    done: list[str] = []

    def connects(when: str) -> Callable[[], None]:
        def callback() -> None:
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                done.append(when)

        return callback

    def asks(when: str) -> Callable[[], Any]:
        async def callback() -> None:
            await asyncio.to_thread(handshake, f"http://127.0.0.1:{port}")
            done.append(when)

        return callback

    make: Callable[[str], Callable[[], Any]] = connects if kind == "sync" else asks
    with serving(registry_of(), port=port, on_startup=make("up"), on_shutdown=make("down")):
        assert done == ["up"]
    assert done == ["up", "down"]
    assert_free(port)


async def _fail_later() -> None:
    raise LookupError("of the callback")


def _fail() -> None:
    raise LookupError("of the callback")


@pytest.mark.parametrize("callback", [_fail, _fail_later], ids=["sync", "async"])
@every_door
def test_a_failing_on_startup_is_raised_and_leaves_the_port_free(
    door: Callable[..., Any], callback: Callable[[], Any]
) -> None:
    port = free_port()

    def live() -> None:
        server = door(registry_of(), transport="streamable-http", port=port, on_startup=callback)
        server.start()  # only an MCPServer gets here

    with pytest.raises(LookupError, match="of the callback"):
        live()
    assert_free(port)


class Silent(Executor):
    """An Executor that does not say how it works."""

    def governance_state(self) -> Any:
        raise LookupError("of the executor")

    @property
    def current_strategy(self) -> Any:
        raise LookupError("of the executor")


@every_door
@pytest.mark.parametrize("fault", ["on_startup", "executor", "port"])
def test_a_start_that_fails_leaves_nothing_on_the_registry(door: Callable[..., Any], fault: str) -> None:
    if (door, fault) == (_run_async_serve, "port"):
        pytest.skip("it listens on none")
    registry = CountingRegistry()
    source = Silent(registry) if fault == "executor" else Executor(registry)
    before = list(registry.listeners)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
        options |= {"port": taken.getsockname()[1]} if fault == "port" else {}
        options |= {"on_startup": _fail} if fault == "on_startup" else {}

        def live() -> None:
            door(source, **options).start()  # only an MCPServer gets to be started

        with pytest.raises((LookupError, OSError)):
            live()
    assert registry.listeners == before


async def _exit() -> None:
    sys.exit("of the callback")


@pytest.mark.parametrize("callback", [lambda: sys.exit("of the callback"), _exit], ids=["sync", "async"])
def test_an_on_startup_that_exits_ends_the_program_and_no_module_is_blamed(
    callback: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="of the callback"):
        serve(registry_of(), transport="streamable-http", port=free_port(), on_startup=callback)
    assert "A module raised" not in caplog.text


def test_a_server_can_be_stopped_from_its_own_on_startup() -> None:
    calls: list[str] = []

    def on_startup() -> None:
        calls.append("up")
        server.stop()

    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
    server = MCPServer(registry_of(), **options, on_startup=on_startup, on_shutdown=lambda: calls.append("down"))
    for _ in range(2):
        server.start()
        server.wait()
    assert calls == ["up", "down"] * 2


def test_a_server_that_is_started_from_its_own_on_startup_starts_all_the_same() -> None:
    server = MCPServer(registry_of(), transport="streamable-http", port=free_port(), on_startup=lambda: server.start())
    starter = threading.Thread(target=server.start, daemon=True)
    starter.start()
    starter.join(timeout=15)
    assert not starter.is_alive()
    server.stop()
    server.wait()


def test_a_server_that_is_stopped_while_it_starts_ends_at_once() -> None:
    """`on_startup` is cancelled, and may clean up; as it did not return, there is nothing to shut down."""
    calls: list[str] = []
    starting = threading.Event()

    async def on_startup() -> None:
        starting.set()
        try:
            await asyncio.sleep(60)
        finally:
            calls.append("cleaned up")

    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
    server = MCPServer(registry_of(), **options, on_startup=on_startup, on_shutdown=lambda: calls.append("down"))
    starter = threading.Thread(target=server.start, daemon=True)
    starter.start()
    assert starting.wait(15)
    server.stop()
    starter.join(timeout=15)
    assert not starter.is_alive()
    server.wait()
    assert calls == ["cleaned up"]


SLOW_START = """
import asyncio, sys
from apcore import Registry
from apcore_mcp import serve

async def on_startup():
    print("starting", file=sys.stderr, flush=True)
    await asyncio.sleep(60)

serve(Registry(), transport=sys.argv[1], port=int(sys.argv[2]), on_startup=on_startup)
"""


@pytest.mark.parametrize("transport", ["stdio", "streamable-http", "sse"])
def test_a_signal_does_not_wait_for_a_slow_on_startup(transport: str) -> None:
    """NFR-REL-001."""
    with RawClient([sys.executable, "-c", SLOW_START, transport, str(free_port())]) as client:
        wait_for_stderr(client, "starting\n")
        client.process.send_signal(signal.SIGTERM)
        ended_well(client)


@pytest.mark.parametrize("callback", [_fail, _fail_later], ids=["sync", "async"])
def test_a_failing_on_shutdown_is_raised_when_the_server_has_ended(callback: Callable[[], Any]) -> None:
    port = free_port()

    def interrupt() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)  # when this has returned

    with pytest.raises(LookupError, match="of the callback"):
        serve(registry_of(), transport="streamable-http", port=port, on_startup=interrupt, on_shutdown=callback)
    assert_free(port)


REFUSED_START = """
import contextlib, os, resource, sys
from conftest import free_port, registry_of
from apcore_mcp import MCPServer
server = MCPServer(registry_of(), transport="streamable-http", port=free_port())
server.start()
server.stop()
server.wait()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, limits[1]))
files = []
with contextlib.suppress(OSError):
    while True:
        files.append(open(os.devnull))
with contextlib.suppress(OSError):
    server.start()
    print("started without a file to be had")
for file in files:
    file.close()
server.start()
server.stop()
server.wait()
print("started")
"""


def test_a_start_that_the_system_refuses_leaves_a_server_that_can_be_started() -> None:
    script = [sys.executable, "-c", REFUSED_START]
    done = subprocess.run(script, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=40, check=False)
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


def test_starting_twice_changes_nothing_and_stopping_and_waiting_work_from_any_thread() -> None:
    port = free_port()
    started: list[str] = []
    server = MCPServer(registry_of(), transport="streamable-http", port=port, on_startup=lambda: started.append("up"))
    starters = [threading.Thread(target=server.start) for _ in range(4)]
    for thread in starters:
        thread.start()
    for thread in starters:
        thread.join(timeout=20)
    server.start()
    assert started == ["up"]
    handshake(f"http://127.0.0.1:{port}")
    waiters = [threading.Thread(target=server.wait) for _ in range(3)]
    stoppers = [threading.Thread(target=server.stop) for _ in range(3)]
    for thread in (*waiters, *stoppers):
        thread.start()
    for thread in (*waiters, *stoppers):
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert_free(port)


def test_stopping_and_waiting_before_the_start_and_after_the_end_return_at_once() -> None:
    server = MCPServer(registry_of(), transport="streamable-http", port=free_port())
    for _ in range(2):
        server.stop()
        server.wait()
        server.start()
        server.stop()
        server.wait()
    server.stop()
    server.wait()


def test_a_server_restarts_on_its_port_and_leaves_no_thread_and_no_descriptor() -> None:
    port = free_port()

    def call(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"thread": threading.current_thread().name}

    server = MCPServer(registry_of({"t.call": call}), transport="streamable-http", port=port)

    async def use() -> None:
        for mode in (HANDSHAKE, MODERN):
            async with Client(f"http://127.0.0.1:{port}/mcp", mode=mode, cache=None, read_timeout_seconds=15) as client:
                assert (await client.call_tool("t.call", {})).structured_content is not None

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def live_once() -> None:
        server.start()
        asyncio.run(use())
        server.stop()
        server.wait()

    live_once()  # whatever is imported and cached on first use is no leak
    threads = set(threading.enumerate())
    before = descriptors()
    for _ in range(4):
        live_once()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=5)
        assert not thread.is_alive(), thread
    assert descriptors() <= before
    assert_free(port)


async def test_a_sync_module_runs_in_a_thread_with_the_context_variables_of_its_call() -> None:
    """As tracing and web frameworks need it: what a middleware sets is set in the module."""
    tenant = contextvars.ContextVar("tenant", default="nobody")

    class Tenant(Middleware):
        def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
            tenant.set(inputs["tenant"])

    def tell(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"tenant": tenant.get(), "in_a_thread": threading.current_thread() is not server_thread}

    executor = Executor(registry_of({"t.tell": tell}))
    executor.use(Tenant())
    async with connect(executor) as client:
        server_thread = next(thread for thread in threading.enumerate() if thread.name == "apcore-mcp")
        for name in ("one", "two"):
            told = (await client.call_tool("t.tell", {"tenant": name})).structured_content
            assert told == {"tenant": name, "in_a_thread": True}
        assert tenant.get() == "nobody"


async def test_a_flood_of_blocking_calls_has_a_bounded_number_of_threads_and_what_waits_too_long_never_runs() -> None:
    """Calls that wait for a thread when their time is over have been answered so, and must not run after that."""
    gate, began = threading.Event(), []

    def block(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        began.append(1)
        gate.wait(30)
        return {}

    registry = registry_of({"t.block": block, "t.echo": echo})
    executor = Executor(registry, config=Config({"executor": {"default_timeout": 1000}}))
    threads = threading.active_count()
    with serving(executor, transport="sse") as url:  # one connection for all answers
        async with Client(sse_client(f"{url}/sse"), mode=HANDSHAKE, cache=None, read_timeout_seconds=30) as client:
            results = await asyncio.gather(*(client.session.call_tool("t.block", {}) for _ in range(300)))
            told = {result.content[0].text for result in results}  # type: ignore[union-attr]
            assert told == {"Module timed out after 1000ms"}
            assert 6 < len(began) <= 256
            assert threading.active_count() - threads < 256 + 20
            before = len(began)
            gate.set()
            await client.call_tool("t.echo", {})  # when all that waited before has left the queue
            assert len(began) == before


async def test_a_running_call_is_answered_before_a_stopped_server_ends() -> None:
    """NFR-REL-001; it ends only after the stop has been asked for."""
    running, gate = threading.Event(), threading.Event()

    async def wait(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.set()
        return {"done": await asyncio.to_thread(gate.wait, 15)}

    server = MCPServer(
        registry_of({"t.wait": wait}), transport="streamable-http", port=(port := free_port()), on_shutdown=gate.set
    )
    server.start()
    try:
        async with Client(f"http://127.0.0.1:{port}/mcp", mode=MODERN, cache=None, read_timeout_seconds=20) as client:
            await client.list_tools()  # the client wants the output schema of what it calls
            call = asyncio.create_task(client.call_tool("t.wait", {}))
            assert await asyncio.to_thread(running.wait, 15)
            server.stop()
            assert (await call).structured_content == {"done": True}
    finally:
        server.stop()
        await asyncio.to_thread(server.wait)


@pytest.mark.parametrize(
    ("options", "name", "version"),
    [
        pytest.param({}, "apcore-mcp", apcore_mcp.__version__, id="default"),
        pytest.param({"name": "my tools", "version": "7.8"}, "my tools", "7.8", id="given"),
        pytest.param({"name": "ü" * 255}, "ü" * 255, apcore_mcp.__version__, id="longest-name"),
    ],
)
async def test_clients_are_told_name_and_version(mode: str, options: dict[str, Any], name: str, version: str) -> None:
    """A 2026-07-28 client asks `server/discover` for them."""
    async with connect({}, mode="auto" if mode == MODERN else mode, **options) as client:
        assert client.protocol_version == (MODERN if mode == MODERN else "2025-11-25")
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == (name, version)


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_agents_are_told_the_servers_instructions(mode: str, transport: str) -> None:
    if transport == "sse" and mode == MODERN:
        pytest.skip("the deprecated transport is of the handshake era")
    for text in ("Ask units.convert.", None):
        with serving(registry_of(), transport=transport, instructions=text) as url:
            server: Any = sse_client(f"{url}/sse") if transport == "sse" else f"{url}/mcp"
            async with Client(server, mode="auto" if mode == MODERN else mode, cache=None) as client:
                assert client.instructions == text


@pytest.mark.parametrize(
    ("modules", "transport", "messages"),
    [
        pytest.param(
            ["a", "b"],
            "Streamable-HTTP",
            [("INFO", "apcore-mcp server started: 2 tools registered, transport=streamable-http, at {url}/mcp")],
            id="two-tools",
        ),
        pytest.param(
            [],
            "sse",
            [
                ("WARNING", "No modules registered; server starting with zero tools"),
                ("WARNING", "SSE transport is deprecated; use streamable-http instead"),
                ("INFO", "apcore-mcp server started: 0 tools registered, transport=sse, at {url}/sse"),
            ],
            id="none-over-sse",
        ),
    ],
)
def test_the_start_is_logged_and_so_is_what_is_unusual_about_it(
    modules: list[str], transport: str, messages: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="apcore_mcp")
    with serving(registry_of({f"t.{name}": echo for name in modules}), transport=transport) as url:
        logged = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "apcore_mcp"]
    assert sorted((level, text.format(url=url)) for level, text in messages) == sorted(logged)


@pytest.mark.parametrize(
    ("option", "level"),
    [("DEBUG", 10), ("debug", 10), ("Info", 20), ("WARNING", 30), ("error", 40), (None, 35)],
    ids=str,
)
@pytest.mark.parametrize("root_handlers", [0, 1], ids=["logging-not-configured", "configured"])
def test_log_level_sets_our_logger_and_no_other_and_adds_no_handler_to_it(
    option: str | None, level: int, root_handlers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the option, nothing at all is changed (FR-LOG-005)."""
    handlers: list[logging.Handler] = [logging.NullHandler()] * root_handlers
    monkeypatch.setattr(logging.root, "handlers", list(handlers))
    root_level = logging.root.level
    LOGGER.setLevel(35)
    with serving(registry_of(), log_level=option):
        assert LOGGER.level == level
    assert LOGGER.handlers == []
    assert logging.root.level == root_level
    if root_handlers or option is None:
        assert logging.root.handlers == handlers


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO], ids=["debug", "info"])
async def test_every_record_is_our_loggers_and_calls_are_logged_at_debug_only(
    level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """FR-LOG-002, -004, -005."""

    def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        raise LookupError("of the module")

    caplog.set_level(logging.DEBUG)
    LOGGER.setLevel(level)
    async with connect({"t.echo": echo, "t.fail": fail}) as client:
        await client.call_tool("t.echo", {})
        assert (await client.call_tool("t.fail", {})).is_error
    package = str(Path(apcore_mcp.__file__).parent)
    ours = [record for record in caplog.records if record.pathname.startswith(package)]
    assert {record.name.split(".")[0] for record in ours} == {"apcore_mcp"}
    assert any(record.levelno == logging.ERROR and "t.fail" in record.getMessage() for record in ours)
    calls = [record.getMessage() for record in ours if record.getMessage().startswith("Tool call: ")]
    assert calls == (["Tool call: t.echo", "Tool call: t.fail"] if level == logging.DEBUG else [])


async def test_serve_in_a_running_loop_points_to_async_serve() -> None:
    with pytest.raises(RuntimeError, match="async_serve"):
        serve(registry_of(), transport="streamable-http", port=free_port())


@contextlib.asynccontextmanager
async def asgi_client(app: Starlette) -> Any:
    """An HTTP client that needs no socket: it calls the app."""
    headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-11-25"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client


@pytest.mark.parametrize("prefix", ["", "/deep/tools"], ids=["by-itself", "mounted"])
@pytest.mark.parametrize("transport", ["stdio", "streamable-http"])
async def test_async_serve_yields_an_app_that_answers_also_under_a_prefix(prefix: str, transport: str) -> None:
    """Also with the default transport; the outer app runs no lifespan."""
    calls: list[str] = []
    async with asyncio.timeout(30):
        async with async_serve(
            registry_of({"t.echo": echo}),
            transport=transport,
            name="inside",
            on_startup=lambda: calls.append("up"),
            on_shutdown=lambda: calls.append("down"),
        ) as app:
            assert calls == ["up"]
            outer = Starlette(routes=[Mount(prefix, app=app)]) if prefix else app
            async with asgi_client(outer) as client:
                answer = await client.post(f"{prefix}/mcp", json=INITIALIZE)
                assert answer.status_code == 200, answer.text
                assert '"name":"inside"' in answer.text.replace(" ", "")
                session = {"Mcp-Session-Id": answer.headers["Mcp-Session-Id"]}
                initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
                assert (await client.post(f"{prefix}/mcp", json=initialized, headers=session)).status_code == 202
                call = {"name": "t.echo", "arguments": {"n": 5}}
                request = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
                answer = await client.post(f"{prefix}/mcp", json=request, headers=session)
                assert '"structuredContent":{"n":5}' in answer.text.replace(" ", "")
                assert (await client.get(f"{prefix}/nothing-here")).status_code == 404
    assert calls == ["up", "down"]


async def test_an_error_in_the_body_of_async_serve_comes_out_as_it_is_and_on_shutdown_is_called() -> None:
    calls: list[str] = []
    with pytest.raises(LookupError, match="of the body"):
        async with async_serve(registry_of(), on_shutdown=lambda: calls.append("down")):
            raise LookupError("of the body")
    assert calls == ["down"]


async def test_two_apps_of_one_registry_live_side_by_side_and_one_after_the_other() -> None:
    registry = registry_of({"t.echo": echo})
    for _ in range(2):
        async with async_serve(registry, name="one") as one, async_serve(registry, name="two") as two:
            for app, name in ((one, "one"), (two, "two")):
                async with asgi_client(app) as client:
                    answer = await client.post("/mcp", json=INITIALIZE)
                    assert f'"name":"{name}"' in answer.text.replace(" ", "")


FORKING = (
    PROGRAM
    + """
import multiprocessing, signal
children = []

@tool
def fork(inputs, context):
    ours, theirs = multiprocessing.Pipe()
    def live(pipe):
        pipe.send("up")
        threading.Event().wait(60)
    child = multiprocessing.get_context("fork").Process(target=live, args=(theirs,), daemon=True)
    child.start()
    children.append(child)
    assert ours.recv() == "up"
    return {"pid": child.pid}

@tool
def terminate(inputs, context):
    os.kill(children[0].pid, inputs["number"])
    children[0].join(10)
    return {"exit": children[0].exitcode}

serve(registry)
"""
)


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=str)
def test_a_process_that_a_module_forked_ends_by_a_signal_and_with_the_server(number: signal.Signals) -> None:
    with RawClient([sys.executable, "-c", FORKING]) as client:
        client.initialize()
        for _ in range(2):
            client.request("tools/call", {"name": "t.fork", "arguments": {}})
        told = client.request("tools/call", {"name": "t.terminate", "arguments": {"number": int(number)}})
        ended = told["result"]["structuredContent"]["exit"]
        assert ended == (-signal.SIGTERM if number is signal.SIGTERM else 1)  # of Ctrl-C, Python makes an error
        client.process.send_signal(signal.SIGTERM)  # the second child is a daemon: it is terminated and waited for
        assert client.process.wait(20) == 0


def test_a_signal_that_the_embedding_program_handles_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """C code installed its handler, so Python knows none to give back."""
    taken: list[int] = []
    real = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else real(number))
    server_up = threading.Event()

    def on_startup() -> None:
        taken.append(real(signal.SIGTERM) is before)
        server_up.set()
        os.kill(os.getpid(), signal.SIGINT)

    before = real(signal.SIGTERM)
    serve(registry_of(), transport="streamable-http", port=free_port(), on_startup=on_startup)
    assert taken == [True]
    assert real(signal.SIGTERM) is before


@pytest.mark.parametrize("ending", ["plain", "anyio-scope", "task-cancelled", "timeout"])
async def test_async_serve_leaves_nothing_in_its_hosts_loop_however_it_ends(ending: str) -> None:
    running, ended, left = asyncio.Event(), asyncio.Event(), []

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return {}

    downs: list[str] = []

    async def on_shutdown() -> None:
        await asyncio.sleep(0)
        downs.append("down")

    async def host() -> None:
        async with (
            async_serve(registry_of({"work": work}), on_shutdown=on_shutdown) as app,
            asgi_client(app) as client,
        ):
            about: dict[str, Any] = {"io.modelcontextprotocol/protocolVersion": MODERN}
            about |= {"io.modelcontextprotocol/clientInfo": {"name": "x", "version": "1"}}
            about |= {"io.modelcontextprotocol/clientCapabilities": {}}
            params = {"name": "work", "arguments": {}, "_meta": about}
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            headers = {"Accept": "application/json, text/event-stream", "Mcp-Method": "tools/call"}
            headers |= {"Mcp-Name": "work", "MCP-Protocol-Version": MODERN}
            call = asyncio.create_task(client.post("/mcp", json=body, headers=headers))
            left.append(call)
            await running.wait()
            if ending == "plain":
                return
            if ending == "anyio-scope":
                scope.cancel()
            elif ending == "task-cancelled":
                cast(Any, asyncio.current_task()).cancel()
            await asyncio.sleep(60)

    before = asyncio.all_tasks()
    with anyio.CancelScope() as scope, contextlib.suppress(TimeoutError, asyncio.CancelledError):
        async with asyncio.timeout(0.5 if ending == "timeout" else 30):
            await asyncio.create_task(host()) if ending == "task-cancelled" else await host()
    await asyncio.wait(left, timeout=10)
    assert ended.is_set()
    assert downs == ["down"]
    for _ in range(50):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()


async def test_async_serve_may_be_entered_in_one_task_and_left_in_another() -> None:
    """As every fixture of pytest-asyncio is."""
    manager = async_serve(registry_of({"echo": echo}))
    app = await asyncio.create_task(manager.__aenter__())
    async with hosting(app) as url, Client(f"{url}/mcp", cache=None) as client:
        assert (await client.call_tool("echo", {"a": 1})).structured_content == {"a": 1}
    await asyncio.create_task(manager.__aexit__(None, None, None))


async def test_async_serve_that_is_cancelled_while_it_starts_leaves_nothing() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def on_startup() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def host() -> None:
        async with async_serve(registry_of(), on_startup=on_startup):
            raise AssertionError("it has started")

    before = asyncio.all_tasks()
    task = asyncio.create_task(host())
    await begun.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()
    assert ended.is_set()
    assert asyncio.all_tasks() - before == set()


async def test_apcores_client_is_served_with_its_own_executor_at_every_door() -> None:
    """Or anything else whose `executor` is one (design, "Doors")."""
    application = APCore()
    seen: list[str] = []
    application.use_before(lambda module_id, inputs, context: seen.append(module_id))
    application.register("from.client", registry_of({"x": echo}).get("x"))
    with serving(application) as url:  # type: ignore[arg-type]
        async with Client(f"{url}/mcp", mode=MODERN, cache=None, read_timeout_seconds=30) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["from.client"]
            assert (await client.call_tool("from.client", {"a": 1})).structured_content == {"a": 1}
    assert seen == ["from.client"]
    async with async_serve(application):
        pass
    assert [tool["function"]["name"] for tool in to_openai_tools(application)] == ["from-client"]
    assert from_openai_call(application, "from-client", {"a": 1}) == ("from.client", {"a": 1})


def test_a_timeout_is_not_for_an_executor_that_has_its_own() -> None:
    with pytest.raises(ValueError, match="an Executor brings its own"):
        MCPServer(Executor(Registry()), timeout=60)


def test_a_folder_that_is_none_is_not_discovered(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"extensions directory does not exist: {tmp_path}/none"):
        discover(tmp_path / "none")
    with pytest.raises(ValueError, match=f"extensions path is not a directory: {tmp_path}/file"):
        discover(tmp_path / "file")
