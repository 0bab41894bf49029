"""The list of tools while modules come and go: every answer is right for a moment of its call, and who listens ends
with the exact list (FR-DYNAMIC-*, NFR-REL-003).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from typing import Any

import mcp_types as types
import pytest
from apcore import Executor
from conftest import HANDSHAKE, FunctionalModule, client_of, echo, registry_of, serving
from mcp.client import Client
from mcp.shared.exceptions import MCPError
from starlette.testclient import TestClient
from support import ERAS, CountingRegistry, clog, followed, initialize_params, listed, text_of

from apcore_mcp import async_serve

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
        self.registry = registry_of({"stays": echo})
        self.newest = {f"shelf.m{number}": -1 for number in range(count)}
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._replace, args=(name,), daemon=True) for name in self.newest]

    def _put(self, module_id: str) -> None:
        self.newest[module_id] += 1
        self.registry.register(module_id, Edition(module_id, self.newest[module_id]))

    def _replace(self, module_id: str) -> None:
        while not self._end.wait(0.001):
            self._put(module_id)
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
            self._put(module_id)

    def __exit__(self, *_: object) -> None:
        self._end.set()


async def use(shelf: Shelf, client: Client, turns: int) -> None:
    """List, call each and read one: all of an answer is of one edition, and of one that was there meanwhile."""
    for turn in range(turns):
        oldest = dict(shelf.newest)
        tools = (await client.list_tools()).tools
        names = [tool.name for tool in tools]
        assert names == sorted(set(names))
        assert {"stays"} <= set(names) <= {"stays", *oldest}
        for tool in tools[:-1]:
            number = int(tool.description.removeprefix("edition "))
            assert tool.input_schema["properties"]["n"] == {"const": number}
            assert tool.output_schema == {"type": "object", "title": tool.description, "properties": {}}
            assert oldest[tool.name] <= number <= shelf.newest[tool.name]
        assert (await client.session.call_tool("stays", {"sent": turn})).structured_content == {"sent": turn}
        for module_id in oldest:
            oldest = dict(shelf.newest)
            result = await client.session.call_tool(module_id, {"sent": turn})
            if result.is_error:
                assert text_of(result) == f"Module not found: {module_id}"
            else:
                told = json.loads(text_of(result))
                assert result.structured_content == told
                assert (told["id"], told["sent"]) == (module_id, turn)
                assert oldest[module_id] <= told["n"] <= shelf.newest[module_id]
        try:
            (content,) = (await client.read_resource(f"docs://{module_id}")).contents
        except MCPError as error:
            refusal = error.error.model_dump(include={"message", "data"})
            assert refusal == {"message": "Resource not found", "data": {"uri": f"docs://{module_id}"}}
        else:
            number = int(content.text.removeprefix("documentation "))  # type: ignore[union-attr]
            assert oldest[module_id] <= number <= shelf.newest[module_id]


@pytest.mark.requirement("FR-DYNAMIC-004", "NFR-REL-003")
async def test_answers_are_right_while_threads_replace_modules(caplog: pytest.LogCaptureFixture) -> None:
    """Two clients of each era list, call and read; one of each only listens, and lists when it is told to."""
    with Shelf(4) as shelf, serving(shelf.registry) as url:
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(55):
            users, listeners = [], []
            for mode in ERAS:
                listeners.append(await stack.enter_async_context(followed(None, mode, url=url)))
                for _ in range(2):
                    client = client_of(url, mode)
                    users.append(await stack.enter_async_context(client))
            await asyncio.gather(*(use(shelf, client, 3) for client in users))
            assert min(shelf.newest.values()) > 20, "too little has changed to prove anything"
            await asyncio.to_thread(shelf.stop)
            expected = {name: f"edition {number}" for name, number in shelf.newest.items()}
            for client, changes in listeners:
                described: dict[str, Any] = {}
                while described != expected:
                    await changes.get()
                    described = {tool.name: tool.description for tool in (await client.list_tools()).tools[:-1]}
    ours = [record for record in caplog.records if not record.name.startswith("mcp.client")]  # which closes as it can
    left_out = [record.getMessage() for record in ours if record.levelno >= logging.ERROR]
    assert [text for text in left_out if "Module not found" not in text and "ModuleNotFound" not in text] == []


async def test_who_reads_while_a_change_is_taken_in_sees_the_change() -> None:
    """One app, asked by two threads; whoever takes the change in is held up by a module that is slow to describe."""
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
        counts[who] = TestClient(app, base_url="http://127.0.0.1:8000").get("/health").json()["tools_count"]

    def tell(app: Any) -> None:
        registry.register("slow", FunctionalModule(echo, output_schema=Slow))
        threads = [threading.Thread(target=ask, args=(app, who), daemon=True) for who in ("first", "second")]
        threads[0].start()
        assert entered.wait(10)
        threads[1].start()
        threads[1].join(0.5)  # it waits; if not, it has ended by now
        go_on.set()
        for thread in threads:
            thread.join(10)

    async with async_serve(registry) as app:
        await asyncio.to_thread(tell, app)
    assert counts == {"first": 2, "second": 2}


# ---- Tools that come and go ----


@pytest.mark.requirement("FR-DYNAMIC-001", "FR-DYNAMIC-002", "FR-DYNAMIC-003")
@pytest.mark.parametrize("transport", ["streamable-http", "stdio"])
async def test_a_client_is_told_of_new_and_gone_modules(mode: str, transport: str) -> None:
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


async def test_a_second_hello_makes_no_second_listener() -> None:
    async with followed(None, HANDSHAKE) as (client, changes), asyncio.timeout(30):

        async def tasks() -> int:
            return len((await client.call_tool("tasks")).structured_content["tasks"])  # type: ignore[index]

        before = await tasks()
        hello = types.InitializeRequestParams.model_validate(initialize_params("2025-11-25"))
        for _ in range(5):
            await client.session.send_request(types.InitializeRequest(params=hello), types.InitializeResult)
        while await tasks() > before:
            pass  # the timeout above is the limit
        for change in ("grow", "shrink"):
            await client.call_tool(change)
            await changes.get()
        await tasks()  # whatever else was sent meanwhile has arrived before this answer
        assert changes.empty()


async def test_many_registrations_at_once_are_announced_as_one(mode: str) -> None:
    async with followed(None, mode) as (client, changes), asyncio.timeout(30):
        await client.call_tool("burst")
        await changes.get()
        assert sum(name.startswith("burst.") for name in await listed(client)) == 200
        for _ in range(20):  # whatever else was sent meanwhile arrives before these answers
            await client.call_tool("tasks")
        assert changes.qsize() <= 4


async def test_a_clogged_client_holds_nobody_up() -> None:
    registry = registry_of({"big": lambda inputs, context: {"text": "x" * 8_000_000}})
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(registry, transport="sse", max_result=0))
        stack.enter_context(contextlib.closing(await asyncio.to_thread(clog, url)))
        async with followed(None, HANDSHAKE, transport="sse", url=url) as (client, changes), asyncio.timeout(20):
            for number in range(5):
                registry.register(f"m{number}", FunctionalModule(echo))
                await changes.get()
                assert f"m{number}" in await listed(client)


def test_a_server_that_has_ended_listens_no_more(caplog: pytest.LogCaptureFixture) -> None:
    registry = CountingRegistry()
    server = Executor(registry)
    before = list(registry.listeners)
    with serving(server):
        assert {event for event, _ in registry.listeners[len(before) :]} == {"register", "unregister"}
    assert registry.listeners == before
    caplog.clear()
    registry.register("late", FunctionalModule(echo, input_schema={"type": "string"}))  # a WARNING, if somebody looked
    assert not [record for record in caplog.records if record.name.startswith("apcore_mcp")]
