"""What happens while the server runs: tools come and go, calls tell how far they are, stream, and are cancelled.

FR-DYNAMIC-001 to -004, NFR-REL-003, FR-EXT-001, FR-STREAM-001 and the design's "Dynamic", "Progress and streaming" and
"Cancellation"; trace context is ours. Every server has a real socket or pipe, every client is the SDK's unless a test
needs to see the wire itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import logging
import math
import os
import queue
import re
import socket
import sys
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import apcore
import httpx
import httpx2
import mcp_types as types
import pytest
from apcore import ACLDeniedError, Config, Context, Executor, ModuleAnnotations, Registry
from apcore.cancel import CancelToken
from apcore.errors import ModuleTimeoutError
from conftest import (
    HANDSHAKE,
    ROOT,
    FunctionalModule,
    RawClient,
    connect,
    echo,
    free_port,
    hosting,
    registry_of,
    serving,
)
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from test_eras import handshake, message, modern

from apcore_mcp import MCPServer, async_serve, discover, report_progress

REDACTED = "***REDACTED***"
STEPS = [(1.0, 3.0, "step 1"), (2.0, 3.0, "step 2"), (3.0, 3.0, "step 3")]


def is_set_in_time(token: CancelToken) -> bool:
    """Whether `token` is set by now or at once: it may be set just before or just after the coroutine is ended."""
    limit = time.monotonic() + 10
    while not token.is_cancelled and time.monotonic() < limit:
        time.sleep(0.002)
    return token.is_cancelled


class StreamingModule(FunctionalModule):
    """Streams `chunks`, of which an exception is raised; called as a whole it says so."""

    def __init__(self, chunks: list[Any], **attributes: Any) -> None:
        super().__init__(
            lambda inputs, context: {"executed": True},
            **{"annotations": ModuleAnnotations(streaming=True), **attributes},
        )
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

    async def nested(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("steps", {}, context)

    async def deep(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("from_sync", {}, context)

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

    async def wait(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await report_progress(context, 1)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.put(["wait", context.cancel_token])
            raise
        return {}

    async def wait_below(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("wait", {}, context)

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
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                told.put(["wait_streaming", context.cancel_token])
                raise

    def ended(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        name, token = told.get(timeout=20)
        return {"told": name, "token_set": is_set_in_time(token)}

    async def tasks(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"tasks": [getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks()]}

    def grow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        registry.register("grown", FunctionalModule(echo))
        return {}

    def shrink(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        registry.unregister("grown")
        return {}

    async def burst(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        # Joined on the event loop itself: nothing can be announced before all of it has happened.
        def register(thread: int) -> None:
            for number in range(50):
                registry.register(f"burst.m{thread}_{number}", FunctionalModule(echo))

        threads = [threading.Thread(target=register, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {}

    functions = [steps, nested, deep, from_sync, beyond, release, wait, wait_below, watch_token]
    for function in [*functions, ended, tasks, grow, shrink, burst]:
        registry.register(function.__name__, FunctionalModule(function))
    registry.register("wait_streaming", WaitStreaming([]))
    return registry


STAGE_ON_STDIO = [sys.executable, "-c", "from test_live import stage; from apcore_mcp import serve; serve(stage())"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}


@contextlib.asynccontextmanager
async def followed(
    source: Registry | None, mode: str, *, transport: str = "streamable-http", url: str = "", **options: Any
) -> AsyncIterator[tuple[Client, asyncio.Queue[object]]]:
    """A client that has asked for nothing yet, and the changes of the tool list that it is told about.

    Serves `source` (on stdio, the stage), or connects to the server at `url`.
    """
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
            program, *rest = STAGE_ON_STDIO
            server = stdio_client(StdioServerParameters(command=program, args=rest, env=ENVIRONMENT))
        elif transport == "sse":
            server = sse_client(f"{url}/sse")
        else:
            hooks: dict[str, Any] = {"response": [note_stream]}
            http = await stack.enter_async_context(httpx2.AsyncClient(event_hooks=hooks, timeout=30))
            server = streamable_http_client(f"{url}/mcp", http_client=http)
        client = Client(server, mode=mode, cache=None, read_timeout_seconds=30, message_handler=handle)
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


def text_of(result: types.CallToolResult) -> str:
    [part] = result.content
    assert isinstance(part, types.TextContent)
    return part.text


# ---- Tools that come and go ----


@pytest.mark.parametrize("transport", ["streamable-http", "stdio"])
async def test_a_client_is_told_of_new_and_gone_modules_and_finds_the_list_changed(mode: str, transport: str) -> None:
    async with followed(None, mode, transport=transport) as (client, changes), asyncio.timeout(30):
        await client.session.call_tool("grow")  # the first it asks for; it has not listed
        await changes.get()
        assert "grown" in await listed(client)
        assert (await client.call_tool("grown", {"a": 1})).structured_content == {"a": 1}
        await client.call_tool("shrink")
        await changes.get()
        assert "grown" not in await listed(client)
        gone = await client.call_tool("grown", {"a": 1})
        assert gone.is_error
        assert text_of(gone) == "Module not found: grown"


async def test_the_handshake_promises_that_changes_are_announced() -> None:
    async with connect({"a": echo}, mode=HANDSHAKE) as client:
        assert client.server_capabilities.tools is not None
        assert client.server_capabilities.tools.list_changed is True


@pytest.mark.parametrize("transport", ["streamable-http", "stdio"])
async def test_a_client_that_says_hello_again_is_told_of_a_change_once_and_leaves_no_task(transport: str) -> None:
    about = types.InitializeRequestParams(
        protocol_version="2025-11-25",
        capabilities=types.ClientCapabilities(),
        client_info=types.Implementation(name="x", version="1"),
    )
    async with followed(None, HANDSHAKE, transport=transport) as (client, changes), asyncio.timeout(30):

        async def tasks() -> int:
            return len((await client.call_tool("tasks")).structured_content["tasks"])  # type: ignore[index]

        before = await tasks()
        for _ in range(5):
            await client.session.send_request(types.InitializeRequest(params=about), types.InitializeResult)
        while await tasks() > before:
            pass  # the timeout above is the limit
        for change in ("grow", "shrink"):
            await client.call_tool(change)
            await changes.get()
        await tasks()  # whatever else was sent meanwhile has arrived before this answer
        assert changes.empty()


async def test_two_hundred_registrations_from_four_threads_are_announced_as_one(mode: str) -> None:
    async with followed(None, mode) as (client, changes), asyncio.timeout(30):
        await client.call_tool("burst")
        await changes.get()
        assert sum(name.startswith("burst.") for name in await listed(client)) == 200
        for _ in range(20):  # whatever else was sent meanwhile arrives before these answers
            await client.call_tool("tasks")
        assert changes.qsize() <= 4


async def test_a_client_that_lists_only_when_told_ends_with_the_whole_list(mode: str) -> None:
    registry = registry_of()

    def register(thread: int) -> None:
        for number in range(50):
            registry.register(f"burst.m{thread}_{number}", FunctionalModule(echo))

    async with followed(registry, mode) as (client, changes), asyncio.timeout(30):
        threads = [threading.Thread(target=register, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        names: list[str] = []
        while len(names) < 200:
            await changes.get()
            names = await listed(client)
        assert names == sorted({f"burst.m{thread}_{number}" for thread in range(4) for number in range(50)})


async def test_lists_and_calls_stay_consistent_while_threads_change_the_registry() -> None:
    registry = registry_of({"stay": echo})
    churned = [f"churn.m{number}" for number in range(3)]
    end = threading.Event()

    def churn(module_id: str) -> None:
        while not end.wait(0.0005):
            registry.register(module_id, FunctionalModule(echo))
            registry.unregister(module_id)

    async def use(url: str, mode: str) -> None:
        async with Client(f"{url}/mcp", mode=mode, cache=None, read_timeout_seconds=30) as client:
            for turn in range(15):
                names = await listed(client)
                assert names == sorted(set(names))
                assert {"stay"} <= set(names) <= {"stay", *churned}
                for module_id in ("stay", churned[turn % 3]):
                    result = await client.session.call_tool(module_id, {"turn": turn})
                    if result.is_error:
                        assert text_of(result) == f"Module not found: {module_id}" != "Module not found: stay"
                    else:
                        assert result.structured_content == {"turn": turn}

    threads = [threading.Thread(target=churn, args=(module_id,)) for module_id in churned]
    with serving(registry) as url:
        for thread in threads:
            thread.start()
        try:
            await asyncio.gather(use(url, HANDSHAKE), use(url, "2026-07-28"))
        finally:
            end.set()
            for thread in threads:
                thread.join()
        async with Client(f"{url}/mcp", mode="2026-07-28", cache=None) as client:
            assert await listed(client) == ["stay"]


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

    def post(method: str, params: dict[str, Any], **request_id: int) -> None:
        message = {"jsonrpc": "2.0", "method": method, "params": params, **request_id}
        assert httpx.post(endpoint, json=message, trust_env=False).status_code == 202

    about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "clogged", "version": "1"}}
    post("initialize", about, id=1)
    read_until(b"serverInfo")
    post("notifications/initialized", {})
    post("tools/call", {"name": tool, "arguments": {}}, id=2)
    read_until(b"xxxx")
    return clogged


async def test_a_client_that_does_not_read_its_stream_holds_nobody_up() -> None:
    registry = registry_of({"big": lambda inputs, context: {"text": "x" * 8_000_000}})
    with serving(registry, transport="sse") as url, contextlib.closing(await asyncio.to_thread(clog, url)):
        async with followed(None, HANDSHAKE, transport="sse", url=url) as (client, changes), asyncio.timeout(20):
            for number in range(5):
                registry.register(f"m{number}", FunctionalModule(echo))
                await changes.get()
                assert f"m{number}" in await listed(client)


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


def test_a_server_that_has_ended_no_longer_listens_to_the_registry(caplog: pytest.LogCaptureFixture) -> None:
    registry = CountingRegistry()
    server = Executor(registry)
    before = list(registry.listeners)
    with serving(server):
        assert {event for event, _ in registry.listeners[len(before) :]} == {"register", "unregister"}
    assert registry.listeners == before
    caplog.clear()
    registry.register("late", FunctionalModule(echo, input_schema={"type": "string"}))  # a WARNING, if somebody looked
    assert not [record for record in caplog.records if record.name.startswith("apcore_mcp")]


def test_a_start_that_fails_leaves_nothing_on_the_registry() -> None:
    class Unlisted(CountingRegistry):
        def list(self, *args: Any, **kwargs: Any) -> list[str]:
            raise OSError("its store has gone")

    registry = Unlisted()
    server = MCPServer(registry, transport="streamable-http", port=free_port())
    with pytest.raises(OSError, match="its store has gone"):
        server.start()
    assert registry.listeners == []


@pytest.mark.parametrize("tags", [[["a"]], [{"a": 1}, "public"], "public", 7], ids=str)
async def test_tags_that_are_no_texts_keep_no_other_module_from_the_list(tags: Any) -> None:
    registry = registry_of({"t.odd": FunctionalModule(echo, tags=tags), "t.other": FunctionalModule(echo, tags=["x"])})
    async with connect(registry, tags=["public"]) as client:
        assert set(await listed(client)) <= {"t.odd"}
        registry.register("t.odder", FunctionalModule(echo, tags=tags))
        registry.register("t.new", FunctionalModule(echo, tags=["public"]))
        assert set(await listed(client)) - {"t.odd", "t.odder"} == {"t.new"}


# ---- The files of modules ----

MODULE_FILE = '''
from typing import Any
from pydantic import BaseModel

class Nothing(BaseModel):
    pass

class Said(BaseModel):
    said: str

class Hot:
    """A module that is edited while it is served."""
    description = "{words}"
    input_schema = Nothing
    output_schema = Said

    def execute(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {{"said": "{words}"}}

    {more}
'''
ENDS = "def {hook}(self): raise SystemExit('{hook}')"


def write(path: Path, words: str, more: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MODULE_FILE.format(words=words, more=more))


def registry_of_files(directory: Path) -> Registry:
    registry = Registry(extensions_dir=str(directory))
    registry.discover()
    return registry


Shown = tuple[Client, asyncio.Queue[object]]


async def wait_until_shown(following: Shown, expected: dict[str, str], *, only: bool = True) -> dict[str, str]:
    """Wait for tools with these descriptions, and with `only` for no others; all that is listed then."""
    client, changes = following
    async with asyncio.timeout(15):
        while True:
            shown = {tool.name: tool.description or "" for tool in (await client.list_tools()).tools}
            if shown == expected or (not only and expected.items() <= shown.items()):
                return shown
            await changes.get()


async def test_files_become_change_and_cease_to_be_tools(mode: str, tmp_path: Path) -> None:
    path = tmp_path / "hot" / "ping.py"
    async with followed(registry_of_files(tmp_path), mode, dynamic=True) as following:
        client, _ = following
        write(path, "once")
        await wait_until_shown(following, {"hot.ping": "once"})
        assert (await client.call_tool("hot.ping")).structured_content == {"said": "once"}
        write(path, "and again")
        await wait_until_shown(following, {"hot.ping": "and again"})
        assert (await client.call_tool("hot.ping")).structured_content == {"said": "and again"}
        path.with_name("ping_meta.yaml").write_text("description: from the metadata")
        await wait_until_shown(following, {"hot.ping": "from the metadata"})
        path.unlink()
        await wait_until_shown(following, {})
        assert text_of(await client.call_tool("hot.ping")) == "Module not found: hot.ping"


async def test_two_edits_of_one_size_within_one_second_are_both_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which Python's cache of bytecode cannot tell apart."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    written, path = tmp_path / "hot" / "ping.new", tmp_path / "hot" / "ping.py"
    async with followed(registry_of_files(tmp_path), HANDSHAKE, dynamic=True) as following:
        for number, said in enumerate(("one", "two")):
            write(written, said)
            os.utime(written, ns=(0, 1_700_000_000_000_000_000 + number))
            written.replace(path)
            await wait_until_shown(following, {"hot.ping": said})


async def test_only_what_a_file_made_goes_with_it_and_nothing_ends_the_following(tmp_path: Path) -> None:
    """Whatever is beside the modules, and whatever a module raises when it comes and goes."""
    extensions = tmp_path / "a[1]"  # what a pattern would be if it were none
    for name in ("moved/away", "stays/kept", "stays/stuck"):
        write(extensions / f"{name}.py", "old", ENDS.format(hook="on_unload") if "stuck" in name else "")
    (extensions / ".#kept.py").symlink_to("user@host.123:456")  # as Emacs locks a file
    (extensions / "linked.py").symlink_to("/nowhere/at/all.py")
    registry = registry_of_files(extensions)
    registry.register("image.resize", FunctionalModule(echo))
    registry.register("by.hand", FunctionalModule(echo))
    write(extensions / "helpers" / "size.py", "unregistered")
    by_hand = {"image.resize": "A module of a test", "by.hand": "A module of a test"}
    kept = {**by_hand, "stays.kept": "old"}
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        (extensions / "helpers" / "size.py").unlink()
        (extensions / "moved").rename(tmp_path / "moved")
        write(extensions / "by" / "hand.py", "not this one")
        write(extensions / "New-Dir" / "My-Tool.py", "no id")
        write(extensions / "system" / "health.py", "a reserved id")
        write(extensions / "stays" / "stuck.py", "new")
        write(extensions / "stays" / "late.py", "new", ENDS.format(hook="on_load"))
        (extensions / "stays" / "kept.py").write_text("def broken(:")
        write(extensions / "zz.py", "the last one")
        shown = await wait_until_shown(following, {"zz": "the last one"}, only=False)
        assert shown == {**kept, "stays.stuck": "new", "zz": "the last one"}
        write(extensions / "stays" / "kept.py", "new", ENDS.format(hook="on_load"))
        write(extensions / "stays" / "stuck.py", "newer", ENDS.format(hook="__init__"))
        write(extensions / "zz.py", "once more")
        shown = await wait_until_shown(following, {"zz": "once more"}, only=False)
        assert shown == {**by_hand, "stays.stuck": "new", "zz": "once more"}
        write(extensions / "stays" / "kept.py", "mended")
        await wait_until_shown(following, {**kept, "stays.kept": "mended", "stays.stuck": "new", "zz": "once more"})


FUNCTION_FILE = """
from apcore.decorator import module

@module(id="{id}", description="{words}")
def say() -> str:
    return "{words}"
"""


async def test_a_folder_behind_a_link_is_followed_through_it(tmp_path: Path) -> None:
    """Also back, and though the files of both versions are of one size and one time."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / f"{version}.py").write_text(FUNCTION_FILE.format(id=f"only.{version}", words=version))
        (tmp_path / version / "both.py").write_text(FUNCTION_FILE.format(id="in.both", words=version))
        os.utime(tmp_path / version / "both.py", ns=(0, 1_700_000_000_000_000_000))
    current = tmp_path / "current"
    current.symlink_to("v1")
    async with followed(discover(current), HANDSHAKE, dynamic=True) as following:
        for version in ("v1", "v2", "v1"):
            (tmp_path / "new").symlink_to(version)
            (tmp_path / "new").replace(current)
            await wait_until_shown(following, {f"only.{version}": version, "in.both": version})


async def test_a_function_of_apcores_default_client_is_loaded_again(tmp_path: Path) -> None:
    """Which refuses an id that it knows: after an edit, after a file that failed half-way, and from another file."""
    text = FUNCTION_FILE.replace("from apcore.decorator import", "from apcore import")
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text(text.format(id="shared.say", words="old") + "\nraise ValueError('half-way')\n")
    async with followed(discover(tmp_path), HANDSHAKE, dynamic=True) as following:
        first.write_text(text.format(id="shared.say", words="new"))
        await wait_until_shown(following, {"shared.say": "new"})
        assert apcore.call("shared.say") == {"result": "new"}
        first.rename(second)
        second.write_text(text.format(id="shared.say", words="moved"))
        await wait_until_shown(following, {"shared.say": "moved"})
        first.write_text(text.format(id="shared.say", words="back"))
        second.write_text("from apcore.decorator import module\n")
        await wait_until_shown(following, {"shared.say": "back"})


async def test_a_registry_keeps_its_own_rules_for_files(tmp_path: Path) -> None:
    """What it ignores, and whom it asks before a file is run."""
    asked = []

    def ask(path: Path) -> None:
        asked.append(path.name)
        if path.name == "forbidden.py":
            raise PermissionError("not signed")

    config = Config({"extensions": {"root": str(tmp_path), "ignore_patterns": ["draft*"]}})
    registry = Registry(config, pre_approval_hook=ask)
    write(tmp_path / "kept.py", "old")
    registry.discover()
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        for name in ("draft1", "forbidden"):
            (tmp_path / f"{name}.py").write_text(FUNCTION_FILE.format(id=f"no.{name}", words="no"))
        (tmp_path / "function.py").write_text(FUNCTION_FILE.format(id="a.function", words="yes"))
        await wait_until_shown(following, {"kept": "old", "a.function": "yes"})
    assert sorted(asked) == ["forbidden.py", "function.py", "kept.py"]


async def test_what_changes_in_a_virtual_environment_is_told_by_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with followed(discover(tmp_path), HANDSHAKE, dynamic=True) as following:
        for folder in (".venv", "node_modules", "_old", "__pycache__"):
            write(tmp_path / folder / "lib" / "tool.py", "no")
        (tmp_path / "seen.py").write_text(FUNCTION_FILE.format(id="is.seen", words="yes"))
        await wait_until_shown(following, {"is.seen": "yes"})
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["No modules registered; server starting with zero tools"]


async def test_a_server_that_starts_again_takes_in_what_changed_meanwhile(tmp_path: Path) -> None:
    """Functions and classes alike, also where apcore's own `discover()` has loaded the first of them."""
    write(tmp_path / "hot.py", "old")
    registry = registry_of_files(tmp_path)
    function = tmp_path / "function.py"
    function.write_text(FUNCTION_FILE.format(id="a.function", words="old"))
    os.utime(function, ns=(0, 0))
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        function.write_text(FUNCTION_FILE.format(id="a.function", words="new"))
        await wait_until_shown(following, {"hot": "old", "a.function": "new"})
    write(tmp_path / "hot.py", "meanwhile")
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        await wait_until_shown(following, {"hot": "meanwhile", "a.function": "new"})
        function.write_text(FUNCTION_FILE.format(id="a.function", words="newest"))
        await wait_until_shown(following, {"hot": "meanwhile", "a.function": "newest"})
        function.unlink()
        await wait_until_shown(following, {"hot": "meanwhile"})


async def test_servers_that_share_a_registry_run_each_file_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = f"\nwith open({str(tmp_path / 'runs')!r}, 'a') as file: file.write('once ')\n"
    write(tmp_path / "hot.py", "old")
    registry = registry_of_files(tmp_path)
    with serving(registry, dynamic=True):
        async with followed(registry, HANDSHAKE, dynamic=True) as following:
            (tmp_path / "function.py").write_text(FUNCTION_FILE.format(id="a.function", words="yes") + runs)
            await wait_until_shown(following, {"hot": "old", "a.function": "yes"})
            write(tmp_path / "hot.py", "new")
            await wait_until_shown(following, {"hot": "new", "a.function": "yes"})
            write(tmp_path / "last.py", "last")
            await wait_until_shown(following, {"hot": "new", "a.function": "yes", "last": "last"})
    assert (tmp_path / "runs").read_text() == "once "
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_link_has_made_nothing_and_may_lead_nowhere(tmp_path: Path) -> None:
    """Neither where apcore's own `discover()` has loaded what it leads to, nor where it leads to itself."""
    write(tmp_path / "hot.py", "old")
    registry = registry_of_files(tmp_path)
    link, loop = tmp_path / "link.py", tmp_path / "loop.py"
    link.symlink_to("hot.py")
    loop.symlink_to("loop.py")
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        link.unlink()
        loop.unlink()
        loop.symlink_to("./loop.py")
        write(tmp_path / "last.py", "last")
        await wait_until_shown(following, {"hot": "old", "last": "last"})
    loop.unlink()
    loop.symlink_to("loop.py")
    assert discover(tmp_path).list() == ["hot", "last"]


async def test_an_id_goes_over_to_the_file_that_had_to_wait_for_it(tmp_path: Path) -> None:
    """As when a file is copied, looked at, and only then deleted."""
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text(FUNCTION_FILE.format(id="in.both", words="first"))
    second.write_text(FUNCTION_FILE.format(id="in.both", words="second"))
    async with followed(discover(tmp_path), HANDSHAKE, dynamic=True) as following:
        await wait_until_shown(following, {"in.both": "first"})
        first.unlink()
        await wait_until_shown(following, {"in.both": "second"})


# ---- Progress ----


@pytest.mark.parametrize("module_id", ["steps", "nested", "from_sync", "deep"])
async def test_progress_arrives_in_order_and_before_the_result_from_any_depth(mode: str, module_id: str) -> None:
    note, told = noting()
    async with connect(stage(), mode=mode) as client:
        result = await client.call_tool(module_id, progress_callback=note)
        assert (result.structured_content, told) == ({"done": True}, STEPS)
        result = await client.call_tool(module_id)  # no token: nothing to report to
        assert (result.structured_content, told) == ({"done": True}, STEPS)


async def test_progress_outside_mcp_goes_nowhere() -> None:
    executor = Executor(stage())
    assert await executor.call_async("deep", {}) == {"done": True}
    await report_progress(Context.create(), 1)


def test_on_the_wire_progress_is_never_without_a_token_and_never_after_the_result() -> None:
    with RawClient(STAGE_ON_STDIO, env=ENVIRONMENT) as client:
        client.initialize()
        wire = []
        for name, meta in (("steps", {}), ("beyond", {"progressToken": "t"}), ("release", {}), ("ended", {})):
            if name != "ended":
                request_id = client.send("tools/call", {"name": name, "arguments": {}, "_meta": meta})
            else:
                request_id = client.send("ping")
            while (message := client.receive()).get("id") != request_id:
                wire.append(message["params"])
            wire.append(name)
        assert wire == ["steps", {"progressToken": "t", "progress": 7}, "beyond", "release", "ended"]


@pytest.mark.parametrize("era", [HANDSHAKE, "2026-07-28"])
def test_progress_only_rises_and_is_made_of_numbers(era: str) -> None:
    """MCP "Progress": MUST increase. What cannot be said as a number is no progress."""
    steps = [math.nan, 1, 1, 0.5, math.inf, Decimal("2.5"), -math.inf, Fraction(11, 4), True, 10**400, 3]
    totals = [None, math.nan, 10, 10, 10, Decimal(10), 10, math.inf, 10, None, 3]

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for step, total in zip(steps, totals, strict=True):
            await report_progress(context, step, total)  # type: ignore[arg-type]
        return {}

    with serving(registry_of({"work": work})) as url, httpx.Client(base_url=url, timeout=30) as client:
        if era == HANDSHAKE:
            _, headers = handshake(client, "/mcp")
            request: dict[str, Any] = {"json": message("tools/call", {"name": "work"}), "headers": headers}
        else:
            request = modern("tools/call", {"name": "work"})
        request["json"]["params"].setdefault("_meta", {})["progressToken"] = "t"
        events = [json.loads(line[6:]) for line in client.post("/mcp", **request).text.splitlines() if "{" in line]
    told = [event["params"] for event in events if "params" in event]
    assert told == [
        {"progressToken": "t", "progress": 1},
        {"progressToken": "t", "progress": 2.5, "total": 10},
        {"progressToken": "t", "progress": 2.75},
        {"progressToken": "t", "progress": 3, "total": 3},
    ]


# ---- Streaming ----


@pytest.mark.parametrize(
    ("chunks", "merged"),
    [
        pytest.param([], {}, id="nothing"),
        pytest.param([{"a": 1}], {"a": 1}, id="one"),
        pytest.param([{"a": 1}, {"b": 2}, {"a": 3}], {"a": 3, "b": 2}, id="later-wins"),
        pytest.param([{"o": {"x": 1, "y": {"z": 1}}}, {"o": {"y": {"w": 2}}}], {"o": {"x": 1, "y": {"z": 1, "w": 2}}},
                     id="objects-merge"),
        pytest.param([{"l": [1, 2]}, {"l": [3]}], {"l": [3]}, id="lists-are-replaced"),
        pytest.param([{"a": {"x": 1}}, {"a": 1}, {"b": 1}, {"b": {"x": 1}}], {"a": 1, "b": {"x": 1}}, id="kinds"),
    ],
)  # fmt: skip
async def test_a_stream_is_one_notification_a_chunk_and_then_the_merged_result(
    mode: str, chunks: list[dict[str, Any]], merged: dict[str, Any]
) -> None:
    note, told = noting()
    async with connect({"s": StreamingModule(chunks)}, mode=mode) as client:
        result = await client.call_tool("s", progress_callback=note)
    shown = [(number, total, json.loads(message or "")) for number, total, message in told]
    assert shown == [(number, None, chunk) for number, chunk in enumerate(chunks, 1)]
    assert not result.is_error
    assert result.structured_content == json.loads(text_of(result)) == merged


@pytest.mark.parametrize(
    ("last", "sentence"),
    [
        pytest.param(RuntimeError("/etc/passwd"), "Internal error occurred", id="unexpected"),
        pytest.param(ACLDeniedError("alice", "s"), "Access denied", id="acl"),
        pytest.param({"n": math.nan}, "Failed to serialize module output", id="not-json"),
    ],
)
async def test_an_error_in_mid_stream_is_answered_like_any_other(mode: str, last: Any, sentence: str) -> None:
    note, told = noting()
    async with connect({"s": StreamingModule([{"n": 1}, last, {"n": 3}])}, mode=mode) as client:
        result = await client.call_tool("s", progress_callback=note)
    assert [json.loads(message or "") for _, _, message in told] == [{"n": 1}]
    assert (result.is_error, text_of(result), result.structured_content) == (True, sentence, None)


async def test_progress_that_a_module_reports_of_its_own_hides_no_chunk(mode: str) -> None:
    async def stream(inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        await report_progress(context, 50, 100)
        yield {"a": 1}
        yield {"b": 2}

    module = FunctionalModule(echo, stream=stream, annotations=ModuleAnnotations(streaming=True))
    note, told = noting()
    async with connect({"s": module}, mode=mode) as client:
        await client.call_tool("s", progress_callback=note)
    assert told == [(50, 100, None), (51, None, '{"a":1}'), (52, None, '{"b":2}')]


async def test_a_stream_that_breaks_the_output_schema_is_an_error(mode: str) -> None:
    """apcore only logs it, and the client would refuse the result."""
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    modules = {f"s.{name}": StreamingModule(chunks, output_schema=schema) for name, chunks in STREAMS.items()}
    note, _ = noting()
    async with connect(modules, mode=mode) as client:
        told = {name: text_of(await client.call_tool(f"s.{name}", progress_callback=note)) for name in STREAMS}
    assert told == {
        "nothing": "Output validation failed:\n- (root): Field required (required)",
        "wrong": "Output validation failed:\n- n: Value is not valid (type)",
        "right": '{"n":2}',
    }


STREAMS: dict[str, list[Any]] = {"nothing": [], "wrong": [{"n": "x"}], "right": [{"n": 1}, {"n": 2}]}


@pytest.mark.parametrize(
    ("streaming", "token"),
    [pytest.param(True, False, id="no-token"), pytest.param(False, True, id="not-annotated")],
)
async def test_without_token_or_annotation_a_streaming_module_is_simply_called(
    mode: str, streaming: bool, token: bool
) -> None:
    note, told = noting()
    module = StreamingModule([{"n": 1}], annotations=ModuleAnnotations(streaming=streaming))
    async with connect({"s": module}, mode=mode) as client:
        result = await client.call_tool("s", progress_callback=note if token else None)
    assert (result.structured_content, told) == ({"executed": True}, [])


@pytest.mark.parametrize(("redact", "shown"), [(True, REDACTED), (False, "hunter2")], ids=["redacted", "as-it-is"])
async def test_sensitive_fields_of_chunks_are_treated_like_those_of_results(
    mode: str, redact: bool, shown: str
) -> None:
    note, told = noting()
    field = {"type": "object", "properties": {"pin": {"type": "string", "x-sensitive": True}}}
    schema = {"type": "object", "properties": {"user": field, "n": {"type": "integer"}}}
    module = StreamingModule([{"n": 1}, {"user": {"pin": "hunter2"}}], output_schema=schema)
    async with connect({"s": module}, mode=mode, redact_output=redact) as client:
        result = await client.call_tool("s", progress_callback=note)
    assert [json.loads(message or "") for _, _, message in told] == [{"n": 1}, {"user": {"pin": shown}}]
    assert json.loads(text_of(result)) == {"n": 1, "user": {"pin": shown}}
    # Where something is hidden, nothing is promised of results.
    assert result.structured_content == (None if redact else {"n": 1, "user": {"pin": shown}})


# ---- Cancellation ----


async def start(client: Client, module_id: str) -> asyncio.Task[types.CallToolResult]:
    """A call of a module that reports progress once it runs."""
    running = asyncio.Event()

    async def note(progress: float, total: float | None, message: str | None) -> None:
        running.set()

    call = asyncio.create_task(client.call_tool(module_id, progress_callback=note))
    await running.wait()
    return call


@pytest.mark.parametrize("transport", ["streamable-http", "stdio"])
async def test_a_cancelled_call_ends_its_module_and_leaves_no_task_behind(
    mode: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with followed(None, mode, transport=transport) as (client, _), asyncio.timeout(40):

        async def tasks() -> Counter[str]:
            return Counter((await client.call_tool("tasks")).structured_content["tasks"])  # type: ignore[index]

        before = await tasks()
        for module_id, told in (
            ("wait", "wait"),
            ("wait_below", "wait"),
            ("wait_streaming", "wait_streaming"),
            ("watch_token", "watch_token"),
        ):
            call = await start(client, module_id)
            call.cancel()
            await asyncio.wait({call})
            assert (await client.call_tool("ended")).structured_content == {"told": told, "token_set": True}
            while left := await tasks() - before:
                assert left, "the timeout above is the limit"
    gc.collect()  # "Future exception was never retrieved" and the like
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize("module_id", ["slow", "above", "stubborn"])
async def test_what_a_cancelled_module_raises_is_not_told_to_its_hosts_loop(
    mode: str, module_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    running, proceed, raised = threading.Event(), threading.Event(), threading.Event()

    def slow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.set()
        proceed.wait(20)
        raised.set()
        raise RuntimeError("password hunter2")

    async def above(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("slow", {}, context)

    async def stubborn(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raised.set()
            raise RuntimeError("password hunter2") from None
        return {}

    modules = {"slow": slow, "above": above, "stubborn": stubborn, "echo": echo}
    async with (
        async_serve(registry_of(modules)) as app,
        hosting(app) as url,
        Client(f"{url}/mcp", mode=mode, cache=None, read_timeout_seconds=30) as client,
        asyncio.timeout(30),
    ):
        call = asyncio.create_task(client.call_tool(module_id))
        assert await asyncio.to_thread(running.wait, 10)
        call.cancel()
        await asyncio.wait({call})
        await client.call_tool("echo")  # the server has seen the cancellation when it answers this
        proceed.set()
        assert await asyncio.to_thread(raised.wait, 10)
        await asyncio.to_thread(gc.collect)
        await client.call_tool("echo")
        gc.collect()
    assert "hunter2" not in caplog.text
    assert "never retrieved" not in caplog.text


async def test_a_client_that_ends_its_session_cancels_its_calls() -> None:
    records: queue.Queue[list[Any]] = queue.Queue()
    with serving(stage(records)) as url:
        async with Client(f"{url}/mcp", mode=HANDSHAKE, cache=None) as client, asyncio.timeout(30):
            call = await start(client, "wait")
        await asyncio.gather(call, return_exceptions=True)
        name, token = await asyncio.to_thread(records.get, timeout=10)
        assert (name, is_set_in_time(token)) == ("wait", True)


async def test_a_dropped_handshake_post_is_no_cancellation() -> None:
    proceed, outcome = asyncio.Event(), queue.Queue[str]()
    running = threading.Event()

    async def slow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.set()
        try:
            await proceed.wait()
            outcome.put(f"finished, cancelled: {context.cancel_token.is_cancelled}")
        except asyncio.CancelledError:
            outcome.put("cancelled")
            raise
        return {}

    async def go_on(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        proceed.set()
        return {}

    with serving(registry_of({"slow": slow, "go_on": go_on, "echo": echo})) as url:
        headers = {"Accept": "application/json, text/event-stream"}
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as http:

            async def post(method: str, params: dict[str, Any], **request_id: int) -> httpx.Response:
                return await http.post("/mcp", json={"jsonrpc": "2.0", "method": method, "params": params} | request_id)

            about = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}
            http.headers["Mcp-Session-Id"] = (await post("initialize", about, id=1)).headers["Mcp-Session-Id"]
            await post("notifications/initialized", {})
            dropped = asyncio.create_task(post("tools/call", {"name": "slow", "arguments": {}}, id=2))
            assert await asyncio.to_thread(running.wait, 10)
            dropped.cancel()
            await asyncio.gather(dropped, return_exceptions=True)
            for turn in range(3, 13):  # the server has seen the connection close when it answers these
                await post("tools/call", {"name": "echo", "arguments": {}}, id=turn)
            await post("tools/call", {"name": "go_on", "arguments": {}}, id=13)
            assert await asyncio.to_thread(outcome.get, timeout=10) == "finished, cancelled: False"


async def test_a_stopping_server_cancels_what_still_runs_after_the_grace_period(
    caplog: pytest.LogCaptureFixture,
) -> None:
    records: queue.Queue[list[Any]] = queue.Queue()
    port = free_port()
    server = MCPServer(stage(records), transport="streamable-http", port=port)
    server.start()
    modules = ["wait", "wait_streaming", "watch_token"]
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(30):
        calls = []
        for mode in (HANDSHAKE, "2026-07-28"):
            client = Client(f"http://127.0.0.1:{port}/mcp", mode=mode, cache=None, read_timeout_seconds=30)
            await stack.enter_async_context(client)
            calls += [await start(client, module_id) for module_id in modules]
        server.stop()
        await asyncio.to_thread(server.wait)
        told = [await asyncio.to_thread(records.get, timeout=10) for _ in calls]
        assert sorted(name for name, _ in told) == sorted(modules * 2)
        assert all(is_set_in_time(token) for _, token in told)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []  # design: "no traceback"


def retrying(function: Any) -> Any:
    """A decorator as retry, timing and tracing are written: its own coroutine runs, which hides the module's."""

    async def inner(*args: Any, **kwargs: Any) -> Any:
        for _ in range(2):
            with contextlib.suppress(ConnectionError):
                return await function(*args, **kwargs)
            await asyncio.sleep(3600)
        return {}

    return inner


DECORATED: dict[str, Any] = {"as-it-is": lambda function: function, "decorated": retrying}


@pytest.mark.parametrize("decorate", DECORATED.values(), ids=DECORATED)
@pytest.mark.parametrize("where", ["module", "below", "between-attempts", "without-its-context"])
async def test_no_coroutine_of_a_cancelled_or_timed_out_call_goes_on(mode: str, where: str, decorate: Any) -> None:
    running, ended = threading.Event(), queue.Queue[str]()

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        if inputs.get("attempt") == "fails":
            asyncio.get_running_loop().call_soon(running.set)
            raise ConnectionError
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.put("work")
            raise
        return {}

    async def above(inputs: dict[str, Any], context: Any) -> Any:
        try:
            given = [] if inputs.get("alone") else [context]
            return await context.executor.call_async("work", {}, *given)
        finally:
            ended.put("above")

    modules: dict[str, Any] = {"work": decorate(work), "above": decorate(above), "echo": echo}
    inputs: dict[str, Any] = {}
    if where == "between-attempts":
        inputs = {"attempt": "fails"}
    elif where == "without-its-context":
        inputs = {"alone": True}
    name = "above" if where in ("below", "without-its-context") else "work"

    async def tasks(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        names = [getattr(task.get_coro(), "__qualname__", "?") for task in asyncio.all_tasks()]
        return {"left": [name for name in names if name.rpartition(".")[2] in ("work", "above", "inner")]}

    if where == "between-attempts" and decorate is not retrying:
        return  # there are none
    for limit in ({}, {"resources": {"timeout": 300}}):
        registry = registry_of({**modules, "tasks": tasks, name: FunctionalModule(modules[name], **limit)})
        running.clear()
        async with connect(registry, mode=mode) as client, asyncio.timeout(20):
            call = asyncio.create_task(client.call_tool(name, inputs))
            assert await asyncio.to_thread(running.wait, 10)
            if limit:
                assert "timed out" in (await call).content[0].text  # type: ignore[union-attr]
            else:
                call.cancel()
                await asyncio.wait({call})
            expected = {"work": ["work"], "above": ["above", "work"]}[name] if "attempt" not in inputs else []
            assert sorted([await asyncio.to_thread(ended.get, timeout=10) for _ in expected]) == expected
            while (await client.call_tool("tasks")).structured_content != {"left": []}:
                assert asyncio.current_task(), "the timeout above is the limit"


async def test_what_a_module_started_for_all_calls_outlives_the_call_that_was_cancelled(mode: str) -> None:
    """A pool or a browser, started by whichever call comes first, serves the later ones."""
    running = threading.Event()
    pool: list[asyncio.Task[None]] = []

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        if not pool:
            pool.append(asyncio.create_task(asyncio.sleep(3600)))
        if inputs:
            running.set()
            await asyncio.shield(pool[0])
        return {"pool": "runs" if not pool[0].done() else "gone"}

    async with connect({"work": work}, mode=mode) as client, asyncio.timeout(20):
        call = asyncio.create_task(client.call_tool("work", {"wait": True}))
        assert await asyncio.to_thread(running.wait, 10)
        call.cancel()
        await asyncio.wait({call})
        for _ in range(20):
            assert (await client.call_tool("work")).structured_content == {"pool": "runs"}


async def test_a_module_that_catches_a_timeout_of_another_is_rid_of_it(mode: str) -> None:
    ended = threading.Event()

    async def slow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return {}

    async def above(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        with contextlib.suppress(ModuleTimeoutError):
            await context.executor.call_async("slow", {}, context)
        await asyncio.sleep(0)
        return {"ended": await asyncio.to_thread(ended.wait, 10), "cancelled": context.cancel_token.is_cancelled}

    modules = {"slow": FunctionalModule(slow, resources={"timeout": 50}), "above": above}
    async with connect(modules, mode=mode) as client:
        result = await client.call_tool("above")
    assert result.structured_content == {"ended": True, "cancelled": False}


@pytest.mark.parametrize("fault", ["hangs", "times-out-itself", "ends"])
async def test_a_stream_that_gives_nothing_more_ends_with_its_calls_time(mode: str, fault: str) -> None:
    closed = threading.Event()

    class Stream(StreamingModule):
        async def stream(self, inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
            try:
                yield {"n": 1}
                if fault == "hangs":
                    await asyncio.Event().wait()
                elif fault == "times-out-itself":
                    raise TimeoutError("its own")
            finally:
                closed.set()

    config = Config(data={"executor": {"global_timeout": 500, "default_timeout": 400}})
    executor = Executor(registry_of({"stream": Stream([])}), config=config)
    async with connect(executor, mode=mode) as client, asyncio.timeout(20):
        result = await client.call_tool("stream", progress_callback=noting()[0])
        told = result.content[0].text  # type: ignore[union-attr]
        if fault == "hangs":
            assert re.fullmatch(r"Module timed out after (4\d\d|500)ms", told)
        elif fault == "times-out-itself":
            assert told == "Internal error occurred"
        else:
            assert told == '{"n":1}'
        assert await asyncio.to_thread(closed.wait, 10)


async def test_a_module_that_blocks_its_loop_for_another_that_reports_is_answered(mode: str) -> None:
    async def reporting(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for number in range(10):
            await report_progress(context, number)
        return {"done": True}

    async def blocking(inputs: dict[str, Any], context: Any) -> Any:
        return context.executor.call("reporting", {}, context)

    async with connect({"reporting": reporting, "blocking": blocking}, mode=mode) as client, asyncio.timeout(10):
        result = await client.call_tool("blocking", progress_callback=noting()[0])
    assert result.structured_content == {"done": True}


async def test_what_ended_calls_were_given_and_returned_is_freed_while_others_run(mode: str) -> None:
    """A timer keeps its copy of a call's context variables until it rings, even one that was cancelled."""
    proceed, running = asyncio.Event(), threading.Event()

    async def slow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.set()
        await proceed.wait()
        return {}

    async def give(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(3600, print)
        return {"text": "x" * 400_000}

    async def finish(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        proceed.set()
        return {}

    async with connect({"slow": slow, "give": give, "finish": finish}, mode=mode) as client, asyncio.timeout(30):
        waiting = asyncio.create_task(client.call_tool("slow"))
        assert await asyncio.to_thread(running.wait, 10)
        await client.call_tool("give")
        tracemalloc.start()
        try:
            for _ in range(30):
                await client.call_tool("give", {"text": "y" * 400_000})
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 8_000_000  # not of every call
        finally:
            tracemalloc.stop()
        await client.call_tool("finish")
        await waiting


# ---- Trace context ----

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.mark.parametrize(
    ("traceparent", "followed_up"),
    [
        pytest.param(f"00-{TRACE}-00f067aa0ba902b7-01", True, id="valid"),
        pytest.param("garbage", False, id="garbage"),
        pytest.param(f"00-{TRACE}-0000000000000000-01", False, id="no-parent"),
        pytest.param(f"00-{'0' * 32}-00f067aa0ba902b7-01", False, id="no-trace"),
        pytest.param(f"00-{'x' * 32}-00f067aa0ba902b7-01", False, id="not-hexadecimal"),
        pytest.param(7, False, id="not-text"),
        pytest.param(None, False, id="none"),
    ],
)
async def test_a_calls_trace_is_the_clients_when_it_names_one_and_is_logged(
    mode: str, traceparent: Any, followed_up: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    meta: Any = {"traceparent": traceparent}
    async with connect({"trace": lambda inputs, context: {"id": context.trace_id}}, mode=mode) as client:
        result = await client.call_tool("trace", meta=meta)
        assert not result.is_error
        trace_id = (result.structured_content or {})["id"]
    assert (trace_id == TRACE) == followed_up
    assert len(trace_id) == 32
    ours = [record for record in caplog.records if record.name == "apcore_mcp" and record.levelno == logging.DEBUG]
    assert any(trace_id in record.getMessage() for record in ours)
