"""Modules and servers that come and go all the time: every answer is right for a moment of its call or a proper "not
found", who listens ends with the exact list, and of a server that has ended nothing is left (FR-DYNAMIC-*,
NFR-REL-003).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import sys
import threading
import weakref
from typing import Any

import httpx
import pytest
from apcore import Registry
from conftest import HANDSHAKE, MODERN, FunctionalModule, connect, echo, free_port, registry_of, serving, until
from mcp.client import Client
from mcp.shared.exceptions import MCPError
from test_live import followed, listed, text_of

from apcore_mcp import MCP_PROGRESS_KEY, MCPServer, async_serve, to_openai_tools

ERAS = (HANDSHAKE, MODERN)


# ---- Modules ----


class Edition(FunctionalModule):
    """The `number`th module of an id: every word and schema of it says so."""

    def __init__(self, module_id: str, number: int) -> None:
        super().__init__(
            lambda inputs, context: {"n": number, "id": module_id, "sent": inputs["sent"]},
            input_schema={"type": "object", "properties": {"n": {"const": number}, "sent": {"type": "integer"}}},
            output_schema={"type": "object", "title": f"edition {number}"},  # which a client may hold for the next one
            description=f"edition {number}",
            documentation=f"documentation {number}",
        )


class Shelf:
    """Module ids that each have a thread which keeps replacing the module: 0, 1, 2, ... with gaps in between."""

    def __init__(self, count: int) -> None:
        self.registry = registry_of({"stays": FunctionalModule(echo)})
        self.newest = {f"shelf.m{number}": -1 for number in range(count)}
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._replace, args=(name,), daemon=True) for name in self.newest]

    def _replace(self, module_id: str) -> None:
        while not self._end.wait(0.001):
            self.newest[module_id] += 1
            self.registry.register(module_id, Edition(module_id, self.newest[module_id]))
            self._end.wait(0.001)
            self.registry.unregister(module_id)

    def __enter__(self) -> Shelf:
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Leave each module in its last edition, in an order of its own."""
        self._end.set()
        for thread in self._threads:
            thread.join(timeout=10)
        for module_id in reversed(self.newest):
            self.newest[module_id] += 1
            self.registry.register(module_id, Edition(module_id, self.newest[module_id]))

    def __exit__(self, *_: object) -> None:
        self._end.set()


def check_listed(shelf: Shelf, tool: Any, oldest: dict[str, int]) -> None:
    """Every part of a listed tool is of one edition, and of one that was there since `oldest` was noted."""
    number = int(tool.description.removeprefix("edition "))
    assert tool.input_schema["properties"]["n"] == {"const": number}
    assert tool.output_schema == {"type": "object", "title": tool.description}
    assert oldest[tool.name] <= number <= shelf.newest[tool.name]


async def use(shelf: Shelf, client: Client, turns: int) -> None:
    for turn in range(turns):
        oldest = dict(shelf.newest)
        tools = (await client.list_tools()).tools
        names = [tool.name for tool in tools]
        assert names == sorted(set(names))
        assert {"stays"} <= set(names) <= {"stays", *oldest}
        for tool in tools:
            if tool.name != "stays":
                check_listed(shelf, tool, oldest)
        for module_id in ("stays", *oldest):
            oldest = dict(shelf.newest)
            result = await client.session.call_tool(module_id, {"sent": turn})
            if module_id == "stays":
                assert result.structured_content == {"sent": turn}
            elif result.is_error:
                assert text_of(result) == f"Module not found: {module_id}"
            else:
                told = json.loads(text_of(result))
                assert result.structured_content == told
                assert (told["id"], told["sent"]) == (module_id, turn)
                assert oldest[module_id] <= told["n"] <= shelf.newest[module_id]
        module_id = [*shelf.newest][turn % len(shelf.newest)]
        oldest = dict(shelf.newest)
        try:
            (content,) = (await client.read_resource(f"docs://{module_id}")).contents
        except MCPError as error:
            refusal = error.error.model_dump(include={"message", "data"})
        else:
            number = int(content.text.removeprefix("documentation "))  # type: ignore[union-attr]
            assert oldest[module_id] <= number <= shelf.newest[module_id]
            continue
        assert refusal == {"message": "Resource not found", "data": {"uri": f"docs://{module_id}"}}


async def test_every_answer_is_right_for_a_moment_of_its_call_while_threads_replace_modules(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two clients of each era list, call and read; one of each only listens, and lists when it is told to."""
    with Shelf(4) as shelf, serving(shelf.registry) as url:
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(40):
            users, listeners = [], []
            for mode in ERAS:
                listeners.append(await stack.enter_async_context(followed(None, mode, url=url)))
                for _ in range(2):
                    client = Client(f"{url}/mcp", mode=mode, cache=None, read_timeout_seconds=30)
                    users.append(await stack.enter_async_context(client))
            await asyncio.gather(*(use(shelf, client, 12) for client in users))
            assert min(shelf.newest.values()) > 20, "too little has changed to prove anything"
            await asyncio.to_thread(shelf.stop)
            expected = {"stays": None, **{name: f"edition {number}" for name, number in shelf.newest.items()}}
            for client, changes in listeners:
                described: dict[str, Any] = {}
                while described != expected:
                    await changes.get()
                    tools = (await client.list_tools()).tools
                    described = {tool.name: tool.description for tool in tools} | {"stays": None}
            for client in users:
                assert await listed(client) == sorted(expected)
    ours = [record for record in caplog.records if not record.name.startswith("mcp.client")]  # which closes as it can
    left_out = [record.getMessage() for record in ours if record.levelno >= logging.ERROR]
    assert [text for text in left_out if "Module not found" not in text and "ModuleNotFound" not in text] == []


def test_openai_definitions_are_each_of_one_edition_while_threads_replace_modules() -> None:
    with Shelf(4) as shelf:
        while min(shelf.newest.values()) < 40:
            oldest = dict(shelf.newest)
            for tool in to_openai_tools(shelf.registry):
                function = tool["function"]
                if function["name"] != "stays":
                    number = int(function["description"].removeprefix("edition "))
                    assert function["parameters"]["properties"]["n"] == {"const": number}
                    module_id = function["name"].replace("-", ".")
                    assert oldest[module_id] <= number <= shelf.newest[module_id]
        shelf.stop()
        assert [tool["function"]["description"] for tool in to_openai_tools(shelf.registry)][:4] == [
            f"edition {shelf.newest[name]}" for name in sorted(shelf.newest)
        ]


class Racing(Registry):
    """Changes a module just after it has been looked up: once at each of the first `times` lookups."""

    def __init__(self, change: str, times: int) -> None:
        super().__init__()
        self._change, self._left = change, times

    def get(self, module_id: str, *args: Any, **kwargs: Any) -> Any:
        module = super().get(module_id, *args, **kwargs)
        if module is not None and self._left:
            self._left -= 1
            self.unregister(module_id)
            if self._change == "replaced":
                self.register(module_id, Edition(module_id, 10 + self._left))
        return module


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("change", ["replaced", "gone"])
def test_a_module_that_changes_while_it_is_looked_at_is_of_one_edition_or_not_there(change: str, times: int) -> None:
    registry = Racing(change, times)
    registry.register("shelf.m0", Edition("shelf.m0", 1))
    registry.register("stays", FunctionalModule(echo))
    for tool in to_openai_tools(registry)[:-1]:
        said, schema = tool["function"]["description"], tool["function"]["parameters"]
        assert said == f"edition {schema['properties']['n']['const']}"


async def test_who_reads_while_another_thread_takes_a_change_in_sees_the_change() -> None:
    """One app, asked by two threads; the first is held up by a module that takes its time to describe itself."""
    entered, go_on = threading.Event(), threading.Event()

    class Slow:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            entered.set()
            go_on.wait(10)
            return {"type": "object"}

    registry = registry_of({"stays": echo})
    counts: dict[str, int] = {}

    def ask(app: Any, who: str) -> None:
        async def get() -> int:
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
                return int((await client.get("/health")).json()["tools_count"])

        counts[who] = asyncio.run(get())

    async with async_serve(registry) as app:
        registry.register("slow", FunctionalModule(echo, output_schema=Slow))
        threads = [threading.Thread(target=ask, args=(app, who), daemon=True) for who in ("first", "second")]
        threads[0].start()
        assert await asyncio.to_thread(entered.wait, 10)
        threads[1].start()
        await asyncio.to_thread(threads[1].join, 0.5)  # it waits for the first one; if not, it has ended by now
        go_on.set()
        for thread in threads:
            await asyncio.to_thread(thread.join, 10)
    assert counts == {"first": 2, "second": 2}


# ---- Servers ----


class Source(Registry):
    """Can be seen to be forgotten."""


def held() -> tuple[int, int]:
    """How many descriptors and threads this process has."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


entered = threading.Semaphore(0)


async def visit(url: str, server: MCPServer, mode: str) -> list[Any]:
    """Stop the server while its client listens and calls; what the client was told until then."""
    told: list[Any] = []
    with contextlib.suppress(Exception):  # what the client makes of a stream that ends is its own affair
        async with asyncio.timeout(15), followed(None, mode, url=url) as (client, _):
            told.append(await listed(client))
            told.append((await client.call_tool("stays", {"a": 1})).structured_content)
            running = asyncio.create_task(client.session.call_tool("waits", {}))
            await asyncio.to_thread(entered.acquire, timeout=10)
            server.stop()
            told.append((await running).structured_content)
    return told


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ten_servers_that_end_in_the_middle_of_things_leave_nothing() -> None:
    """Each serves a registry of its own, of which nothing is left either."""
    registries: list[weakref.ref[Source]] = []

    async def waits(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        entered.release()
        await asyncio.sleep(0.05)
        return {"waited": True}

    def live(turn: int) -> None:
        registry = Source()
        registries.append(weakref.ref(registry))
        registry.register("stays", FunctionalModule(echo))
        registry.register("waits", FunctionalModule(waits))
        port = free_port()
        server = MCPServer(registry, transport="streamable-http", port=port, explorer=True)
        server.start()
        told = asyncio.run(visit(f"http://127.0.0.1:{port}", server, ERAS[turn % 2]))
        assert told == [["stays", "waits"], {"a": 1}, {"waited": True}]
        server.wait()

    for turn in range(2):  # whatever is imported and cached on first use is no leak
        live(turn)
    before = held()
    for turn in range(10):
        live(turn)
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    until(lambda: gc.collect() is not None and not [1 for registry in registries if registry() is not None])


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_server_that_many_threads_start_and_stop_ends_as_it_was_told_last() -> None:
    server = MCPServer(registry_of({"stays": echo}), transport="streamable-http", port=free_port())
    server.start()
    server.stop()
    server.wait()
    before = held()
    errors: list[BaseException] = []

    def toggle() -> None:
        try:
            for _ in range(10):
                server.start()
                server.stop()
                server.wait()
        except BaseException as error:  # for the test to see
            errors.append(error)

    threads = [threading.Thread(target=toggle, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "start, stop and wait hold each other up"
    server.stop()
    server.wait()
    assert errors == []
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


async def test_a_call_that_has_ended_leaves_nothing_to_the_garbage_collector(mode: str) -> None:
    """Or each would bring the next collection nearer, which goes through all that the process holds."""
    held: list[weakref.ref[Any]] = []

    async def note(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        held.append(weakref.ref(context.data[MCP_PROGRESS_KEY]))
        return {}

    async with connect({"note": note}, mode=mode) as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await client.call_tool("note")
            assert [reference() for reference in held[:4]] == [None] * 4
        finally:
            gc.enable()
