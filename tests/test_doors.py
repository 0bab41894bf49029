"""`serve()`, `MCPServer` and `async_serve()`, from their start to their end (FR-SERVER-002 to -006)."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import os
import signal
import socket
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import anyio
import httpx
import pytest
from apcore import ACL, ACLRule, APCore, Config, Executor, InvalidInputError, Middleware, Registry
from apcore.observability import MetricsCollector, MetricsMiddleware
from conftest import (
    HANDSHAKE,
    Clock,
    FunctionalModule,
    RawClient,
    client_of,
    connect,
    echo,
    free_port,
    hosting,
    program,
    registry_of,
    serving,
    until,
)
from starlette.middleware import Middleware as ASGIMiddleware
from support import (
    ERAS,
    LOGGER,
    Caplog,
    Capture,
    CountingRegistry,
    Gate,
    Monkeypatch,
    answer,
    asgi_client,
    ended_well,
    entered,
    every_door,
    followed,
    listed,
    messages_logged,
    modern,
    on_clock,
    text_of,
    wait_for_stderr,
)

from apcore_mcp import MCPServer, async_serve, from_openai_call, serve, to_openai_tools

# ---- Servers ----


class Source(Registry):
    """Can be seen to be forgotten."""


def held() -> tuple[int, int]:
    """How many descriptors and threads this process has."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


async def visit(url: str, server: MCPServer, mode: str) -> None:
    """Stop the server while its client listens and calls."""
    told: list[Any] = []
    with contextlib.suppress(Exception):  # what the client makes of a stream that ends is its own affair
        async with asyncio.timeout(15), followed(None, mode, url=url) as (client, _):
            told.append(await listed(client))
            running = asyncio.create_task(client.session.call_tool("waits", {}))
            await asyncio.to_thread(entered.acquire, timeout=10)
            server.stop()
            told.append((await running).structured_content)
    assert told == [["waits"], {"waited": True}]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_servers_that_end_leave_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """Each serves a registry of its own, of which nothing is left either."""
    registries: list[weakref.ref[Source]] = []

    async def waits(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        entered.release()
        await asyncio.sleep(0.4)  # longer than idle connections are given when a server ends
        return {"waited": True}

    def live(mode: str) -> None:
        registry = Source()
        registries.append(weakref.ref(registry))
        registry.register("waits", FunctionalModule(waits))
        port = free_port()
        server = MCPServer(registry, transport="streamable-http", port=port, explorer=True)
        server.start()
        asyncio.run(visit(f"http://127.0.0.1:{port}", server, mode))
        server.wait()

    for mode in ERAS:  # whatever is imported and cached on first use is no leak
        live(mode)
    before = held()
    recwarn.clear()
    warnings.simplefilter("always")
    for mode in ERAS:
        live(mode)
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    until(lambda: gc.collect() is not None and not [1 for registry in registries if registry() is not None])
    assert [warned for warned in recwarn if "unclosed" in str(warned.message)] == []


async def test_timeout_bounds_every_call() -> None:
    """Whatever its module declares."""

    async def slow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await asyncio.sleep(inputs["seconds"])
        return {"done": True}

    modules = {"slow": slow, "declared": FunctionalModule(slow, resources={"timeout": 60_000})}
    for timeout, seconds, told in ((0.1, 60, "timed out"), (0, 0.1, "done")):
        async with connect(modules, timeout=timeout) as client:
            for name in modules:
                assert told in text_of(await client.call_tool(name, {"seconds": seconds}))


def ask(url: str) -> None:
    """Have a request answered, with nothing but HTTP."""
    assert "tools" in answer(httpx.post(f"{url}/mcp", **modern("tools/list"), timeout=15))["result"]


def assert_free(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.requirement("FR-TRANSPORT-003")
def test_a_port_in_use_is_an_os_error() -> None:
    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
    server = MCPServer(registry_of(), **options)
    with socket.create_server(("127.0.0.1", options["port"])):
        with pytest.raises(OSError, match="in use"):
            serve(registry_of(), **options)
        with pytest.raises(OSError, match="in use"):
            server.start()
    server.start()
    server.stop()
    server.wait()


@pytest.mark.requirement("FR-SERVER-005")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_blocks_until_a_signal(number: signal.Signals) -> None:
    """FR-SERVER-005, NFR-REL-001; a second one ends the process, also while `on_shutdown` takes its time."""
    calls: list[Any] = []
    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
    options["on_startup"] = lambda: calls.append(signal.raise_signal(number))
    options["on_shutdown"] = lambda: calls.append(signal.getsignal(number))

    def not_handled(*_: object) -> None:
        raise AssertionError("the signal came through")

    before = signal.signal(number, not_handled)
    try:
        calls.append(serve(registry_of(), **options))  # type: ignore[func-returns-value]
        assert signal.getsignal(number) is not_handled
    finally:
        signal.signal(number, before)
    assert calls == [None, signal.SIG_DFL, None]
    assert_free(options["port"])


def test_clients_are_answered_inside_both_callbacks() -> None:
    """After the server accepts, and before it stops."""
    port = free_port()
    done: list[str] = []

    async def callback() -> None:
        await asyncio.to_thread(ask, f"http://127.0.0.1:{port}")
        done.append("answered")

    with serving(registry_of(), port=port, on_startup=callback, on_shutdown=callback):
        assert done == ["answered"]
    assert done == ["answered"] * 2
    assert_free(port)


def _fail() -> None:
    raise LookupError("of the callback")


@every_door
def test_a_start_that_fails_leaves_nothing(door: Callable[..., Any]) -> None:
    registry = CountingRegistry()
    before = list(registry.listeners)
    port = free_port()

    def live() -> None:
        server = door(registry, transport="streamable-http", port=port, on_startup=_fail)
        server.start()  # only an MCPServer gets here

    with pytest.raises(LookupError, match="of the callback"):
        live()
    assert registry.listeners == before
    assert_free(port)
    with socket.create_server(("127.0.0.1", port)), pytest.raises((OSError, LookupError)):
        live()
    assert registry.listeners == before


def test_what_a_callback_raises_comes_out_of_serve() -> None:
    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
    with pytest.raises(SystemExit, match="of the callback"):
        serve(registry_of(), **options, on_startup=lambda: sys.exit("of the callback"))
    with pytest.raises(LookupError, match="of the callback"):
        serve(registry_of(), **options, on_startup=lambda: signal.raise_signal(signal.SIGINT), on_shutdown=_fail)
    assert_free(options["port"])


def in_threads(*calls: Callable[[], None]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_a_server_starts_once_and_restarts() -> None:
    """Whether its end was waited for or not; stopping and waiting return at once when there is nothing to end."""
    started: list[str] = []
    port = free_port()
    server = MCPServer(registry_of(), transport="streamable-http", port=port, on_startup=lambda: started.append("up"))
    server.stop()
    server.wait()
    for life in (1, 2, 3):
        in_threads(server.start)
        server.start()
        assert len(started) == life
        ask(f"http://127.0.0.1:{port}")
        in_threads(*[server.stop] * 3, *[server.wait] * 3 * (life - 1))
    server.stop()
    assert_free(port)


async def test_sync_modules_have_context_variables_of_their_call() -> None:
    """As tracing and web frameworks need it: what a middleware sets is set in the module."""
    tenant = contextvars.ContextVar("tenant", default="nobody")

    def set_tenant(module_id: str, inputs: dict[str, Any], context: Any) -> None:
        tenant.set(inputs["tenant"])

    def tell(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"tenant": tenant.get(), "in_a_thread": threading.current_thread() is not server_thread}

    executor = Executor(registry_of({"t.tell": tell}))
    executor.use_before(set_tenant)
    async with connect(executor) as client:
        server_thread = next(thread for thread in threading.enumerate() if thread.name == "apcore-mcp")
        assert server_thread.daemon, "it would keep the program it serves"
        for name in ("one", "two"):
            told = (await client.call_tool("t.tell", {"tenant": name})).structured_content
            assert told == {"tenant": name, "in_a_thread": True}
        assert tenant.get() == "nobody"


async def test_threads_of_blocking_calls_are_bounded() -> None:
    """Calls whose time is over before they have a thread are not run any more, and keep no arguments."""
    gate = threading.Event()
    began: list[bool] = []
    kept = weakref.WeakSet[Any]()

    class Arguments(dict[str, Any]):
        __hash__ = object.__hash__  # type: ignore[assignment]

    class Note(Middleware):
        async def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> dict[str, Any]:  # type: ignore[override]
            arguments = Arguments(inputs)
            kept.add(arguments)
            return arguments

    def block(inputs: dict[str, Any], context: Any) -> Any:
        began.append(gate.wait(30))

    executor = Executor(registry_of({"block": block}), config=Config({"executor": {"default_timeout": 400}}))
    executor.use(Note())
    threads = threading.active_count()
    with serving(executor, transport="sse") as url:  # one connection for all answers
        async with client_of(f"{url}/sse", HANDSHAKE) as client:
            results = await asyncio.gather(*(client.session.call_tool("block", {}) for _ in range(300)))
            assert {text_of(result) for result in results} == {"Module timed out after 400ms"}
            running = threading.active_count() - threads
            assert 6 < running < 256 + 20
            until(lambda: gc.collect() is not None and len(kept) <= 256, 10)
            gate.set()
            await client.call_tool("block", {})  # when all that waited before has left the queue
            until(lambda: threading.active_count() - threads <= running)
            assert len(began) <= 256 + 1


@pytest.mark.parametrize(("mounted", "count"), [(False, 256), (True, 40)], ids=["serve", "async_serve"])
async def test_stuck_modules_withhold_nobodys_error(mounted: bool, count: int) -> None:
    """apcore runs the hooks of middleware in threads of the loop; a host's may have as few as five."""
    gate = Gate()

    def stuck(inputs: dict[str, Any], context: Any) -> Any:
        gate.enter()

    async def fails(inputs: dict[str, Any], context: Any) -> Any:
        raise InvalidInputError("No item 7")

    executor = Executor(registry_of({"stuck": stuck, "fails": fails}))
    executor.use(MetricsMiddleware(MetricsCollector()))
    async with contextlib.AsyncExitStack() as closing:
        closing.callback(gate.open)
        if mounted:
            app = await closing.enter_async_context(async_serve(executor, transport="sse"))
            url = await closing.enter_async_context(hosting(app))
        else:
            url = closing.enter_context(serving(executor, transport="sse"))  # one connection for all answers
        connecting = client_of(f"{url}/sse", HANDSHAKE)
        client = await closing.enter_async_context(connecting)
        calls = [asyncio.create_task(client.session.call_tool("stuck", {})) for _ in range(count)]
        await gate.entered(count)
        async with asyncio.timeout(20):
            assert text_of(await client.call_tool("fails", {})) == "Invalid input: No item 7"
        assert not any(call.done() for call in calls)
        gate.open()
        await asyncio.gather(*calls)


@pytest.mark.requirement("FR-SERVER-006", "FR-LOG-001", "FR-TRANSPORT-004")
def test_the_start_is_logged(caplog: Caplog) -> None:
    caplog.set_level(logging.INFO, logger="apcore_mcp")
    started = "apcore-mcp server started: "
    with serving(registry_of({"t.a": echo, "t.b": echo}), transport="Streamable-HTTP", explorer=True) as url:
        line = f"{started}2 tools registered, transport=streamable-http, at {url}/mcp, explorer at {url}/explorer/"
        assert messages_logged(caplog, logging.INFO) == [line]
    caplog.clear()
    with serving(registry_of(), transport="sse") as url:
        assert messages_logged(caplog, logging.INFO) == [f"{started}0 tools registered, transport=sse, at {url}/sse"]
        none, deprecated = messages_logged(caplog)
        assert none == "No modules registered; server starting with zero tools"
        assert deprecated == "SSE transport is deprecated; use streamable-http instead"


def test_a_program_without_a_log_is_told_where_it_listens(monkeypatch: Monkeypatch, capsys: Capture) -> None:
    monkeypatch.setattr(LOGGER, "hasHandlers", lambda: False)
    with serving(registry_of({"t.a": echo})) as url:
        told = capsys.readouterr()
    start = f"apcore-mcp server started: 1 tool registered, transport=streamable-http, at {url}/mcp\n"
    assert (told.out, told.err) == ("", start)


def allowing(**conditions: Any) -> Executor:
    rule = ACLRule(callers=["@external"], targets=["*"], effect="allow", conditions=conditions or None)
    return Executor(TWO, acl=ACL([rule], default_effect="deny"))


TWO = registry_of({"t.a": echo, "t.b": echo})
ODD = registry_of({"t.odd": FunctionalModule(echo, input_schema={"type": "string"})})
LOGIN = {"middleware": [ASGIMiddleware(lambda app: app)]}  # a caller may be known, and the ACL decides for each
ALL_LEFT_OUT = "All {} modules are left out: by an option, or as said above; server starting with zero tools"
EVERYBODY = "Everybody who can reach 0.0.0.0 may call these tools"
WARNINGS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "nothing": (TWO, {}, []),
    "left-out-by-options": (TWO, {"prefix": "x", "exclude": ["t.a"]}, [ALL_LEFT_OUT.format(2)]),
    "left-out-by-a-fault": (ODD, {}, ["Module t.odd is left out: ", ALL_LEFT_OUT.format(1)]),
    "left-out-by-the-acl": (
        allowing(roles=["staff"]),
        {},
        ["The ACL leaves out all modules, for callers without an identity; server starting with zero tools"],
    ),
    "left-out-of-what-the-acl-allows": (allowing(roles=["staff"]), {"prefix": "x"}, [ALL_LEFT_OUT.format(2)]),
    "acl-and-login": (allowing(roles=["staff"]), LOGIN, []),
    "public": (TWO, {"host": "0.0.0.0"}, [EVERYBODY]),
    "public-with-a-login": (TWO, {"host": "0.0.0.0", **LOGIN}, []),
    "public-with-an-acl": (allowing(), {"host": "0.0.0.0"}, []),
}


@pytest.mark.requirement("FR-SERVER-006")
@pytest.mark.parametrize("name", WARNINGS)
def test_what_is_unusual_at_the_start_is_a_warning(name: str, caplog: Caplog) -> None:
    source, options, expected = WARNINGS[name]
    with serving(source, **options):
        told = messages_logged(caplog)
    assert len(told) == len(expected), told
    assert all(text.startswith(start) for text, start in zip(told, expected, strict=True)), told


async def test_serve_in_a_running_loop_points_to_async_serve() -> None:
    """It may run in another thread, where nobody can handle a signal."""
    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port(), "on_startup": _fail}
    with pytest.raises(RuntimeError, match="async_serve"):
        serve(registry_of(), **options)
    with pytest.raises(LookupError, match="of the callback"):
        await asyncio.to_thread(serve, registry_of(), **options)


@pytest.mark.parametrize(("prefix", "transport"), [("", "stdio"), ("/deep/tools", "streamable-http")])
async def test_async_serve_answers_also_under_a_prefix(prefix: str, transport: str) -> None:
    """Also with the default transport; the outer app runs no lifespan. An error of the body comes out as it is."""
    calls: list[str] = []
    options: Any = {"on_startup": lambda: calls.append("up"), "on_shutdown": lambda: calls.append("down")}

    async def host() -> None:
        async with asgi_client(registry_of({"t.echo": echo}), mounted=prefix, transport=transport, **options) as client:
            assert calls == ["up"]
            told = await client.post("/mcp", **modern("tools/call", {"name": "t.echo"}))
            assert answer(told)["result"]["structuredContent"] == {}
            _fail()

    with pytest.raises(LookupError, match="of the callback"):
        await host()
    assert calls == ["up", "down"]


LEAVING = """
import contextlib, multiprocessing

@tool
def fork(inputs, context):
    ours, theirs = multiprocessing.Pipe()
    def live():
        theirs.send("up")
        while True:
            pass
    child = multiprocessing.get_context("fork").Process(target=live, daemon=True)
    child.start()
    assert ours.recv() == "up"
    if inputs["ends"]:
        child.terminate()
        child.join(10)
    return {"exit": child.exitcode}

async def deaf():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

async def tidy():
    try:
        await asyncio.sleep(3600)
    finally:
        print("tidied up", file=sys.stderr)
        raise LookupError("of the module")

@tool
async def leave(inputs, context):
    for each in (deaf(), tidy(), asyncio.to_thread(time.sleep, 3600)):
        asyncio.create_task(each)
    return {}

@tool
async def exit(inputs, context):
    sys.exit(3)

serve(registry)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_what_a_module_leaves_keeps_no_server() -> None:
    """Tasks, threads and processes that it forked, which end by a signal."""
    with RawClient(program(LEAVING)) as client:
        client.initialize()
        assert client.request("tools/call", {"name": "t.exit"})["result"]["isError"]
        forked = client.request("tools/call", {"name": "t.fork", "arguments": {"ends": True}})
        assert forked["result"]["structuredContent"]["exit"] == -signal.SIGTERM
        client.request("tools/call", {"name": "t.fork", "arguments": {"ends": False}})
        assert not client.request("tools/call", {"name": "t.leave"})["result"]["isError"]
        client.process.send_signal(signal.SIGTERM)  # the last child is a daemon: it is terminated and waited for
        wait_for_stderr(client, "tidied up")
        ended_well(client)


SERVED_BY_A_CHILD = """
import urllib.request

@tool
def echo(inputs, context):
    return inputs

port = int(sys.argv[1])
server = MCPServer(registry, transport="streamable-http", port=port, explorer=True, allow_execute=True)
server.start()
url = f"http://127.0.0.1:{port}/explorer/tools/t.echo/call"
urllib.request.urlopen(urllib.request.Request(url, b"{}", {"Content-Type": "application/json"}))
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
serve(registry)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_forked_server_has_threads_of_its_own() -> None:
    with RawClient(program(SERVED_BY_A_CHILD, str(free_port()))) as client:
        client.initialize()
        called = client.request("tools/call", {"name": "t.echo", "arguments": {"a": 1}})
        assert called["result"]["structuredContent"] == {"a": 1}
        assert client.end()[0] == 0


@pytest.mark.parametrize("ending", ["plain", "anyio-scope", "task-cancelled"])
@on_clock
async def test_async_serve_leaves_nothing_in_its_hosts_loop(clock: Clock, ending: str) -> None:
    """Not even the call that runs through the whole grace period, which a clock put forward makes short."""
    running, ended, scope = asyncio.Event(), asyncio.Event(), anyio.CancelScope()
    left, downs = list[Any](), list[str]()

    async def work(inputs: dict[str, Any], context: Any) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def on_shutdown() -> None:
        await asyncio.sleep(0)
        downs.append("down")

    async def host() -> None:
        with scope, contextlib.suppress(asyncio.CancelledError):
            async with asgi_client(registry_of({"work": work}), on_shutdown=on_shutdown) as client:
                left.append(asyncio.create_task(client.post("/mcp", **modern("tools/call", {"name": "work"}))))
                await running.wait()
                if ending != "plain":
                    await asyncio.sleep(60)

    before = asyncio.all_tasks()
    hosting = asyncio.create_task(host())
    await running.wait()
    if ending == "anyio-scope":
        scope.cancel()
    elif ending == "task-cancelled":
        hosting.cancel()
    while not hosting.done():
        await clock.put_forward(0.25)
    await hosting
    await asyncio.wait(left)
    assert ended.is_set()
    assert downs == ["down"]
    for _ in range(50):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()


async def test_async_serve_is_left_in_another_task() -> None:
    """As every fixture of pytest-asyncio is."""
    manager = async_serve(registry_of({"echo": echo}))
    app = await asyncio.create_task(manager.__aenter__())
    async with hosting(app) as url, client_of(url) as client:
        assert (await client.call_tool("echo", {"a": 1})).structured_content == {"a": 1}
    await asyncio.create_task(manager.__aexit__(None, None, None))


async def test_async_serve_cancelled_at_its_start_leaves_nothing() -> None:
    begun, ready = asyncio.Event(), asyncio.Event()

    async def on_startup() -> None:
        begun.set()
        await ready.wait()

    before = asyncio.all_tasks()
    entering = asyncio.create_task(async_serve(registry_of(), on_startup=on_startup).__aenter__())
    await begun.wait()
    entering.cancel()
    ready.set()
    await asyncio.wait({entering}, timeout=10)
    assert entering.cancelled()
    assert asyncio.all_tasks() - before == set()


async def test_apcores_client_is_served_at_every_door() -> None:
    """Or anything else whose `executor` is one."""
    application = APCore()
    seen: list[str] = []
    application.use_before(lambda module_id, inputs, context: seen.append(module_id))
    application.register("from.client", registry_of({"x": echo}).get("x"))
    with serving(application) as url:  # type: ignore[arg-type]
        async with client_of(url) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["from.client"]
            assert (await client.call_tool("from.client", {"a": 1})).structured_content == {"a": 1}
    assert seen == ["from.client"]
    async with async_serve(application):
        pass
    assert [tool["function"]["name"] for tool in to_openai_tools(application)] == ["from-client"]
    assert from_openai_call(application, "from-client", {"a": 1}) == ("from.client", {"a": 1})
