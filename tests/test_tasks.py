"""Long work: calls that go on as tasks of MCP's extension (SEP-2663), by hand on the wire of 2026-07-28."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import re
import threading
import time
import tracemalloc
from collections.abc import AsyncIterator
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest
from apcore import Config, Executor, ModuleAnnotations, Registry
from apcore.cancel import ExecutionCancelledError
from conftest import Clock, FunctionalModule, echo, hosting, registry_of, serving
from mcp_types import CallToolResult
from support import (
    INTEGER,
    LOGIN,
    SCHEMA,
    WITHOUT_LIMIT,
    Caplog,
    Monkeypatch,
    accept,
    answer,
    ask,
    calls,
    guarded,
    handshake,
    hosted,
    message,
    messages_logged,
    modern,
    of,
    on_clock,
    text_of,
    waiting,
)

from apcore_mcp import async_serve, elicit, report_progress, serve

TASKS = "io.modelcontextprotocol/tasks"
LONG = ModuleAnnotations(extra={"mcp_async": True})
CAPABILITIES = "io.modelcontextprotocol/clientCapabilities"
REQUIRED = {"requiredCapabilities": {"extensions": {TASKS: {}}}}
ADA = {"action": "accept", "content": {"name": "Ada"}}


def long(execute: Any, **attributes: Any) -> FunctionalModule:
    return FunctionalModule(execute, **{"annotations": LONG, **attributes})


class Wire:
    """A client of one server that declares tasks, and that its user can be asked, unless it is told otherwise."""

    def __init__(self, http: httpx.AsyncClient, user: str = "", **capabilities: Any) -> None:
        self.http = http
        self._user = {"x-user": user}
        self.capabilities = {"extensions": {TASKS: {}}, "elicitation": {}, **capabilities}

    async def send(self, method: str, params: dict[str, Any] | None = None, **headers: str | None) -> dict[str, Any]:
        """The JSON-RPC answer to a request."""
        params = {"_meta": {CAPABILITIES: self.capabilities}, **(params or {})}
        name = params.get("taskId") or params.get("name")
        sent = modern(method, params, **{"mcp_name": name, **headers})
        return answer(await self.http.post("/mcp", json=sent["json"], headers=sent["headers"] | self._user))

    async def ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """The result of a request."""
        answered = await self.send(method, params)
        assert "result" in answered, answered
        result: dict[str, Any] = answered["result"]
        return result

    async def refusal(self, method: str, params: dict[str, Any] | None = None, **headers: str | None) -> Any:
        """The code of the error that a request is answered with, and its data."""
        error = (await self.send(method, params, **headers))["error"]
        return error["code"], error.get("data")

    async def call(self, name: str, arguments: dict[str, Any] | None = None, **retry: Any) -> dict[str, Any]:
        return await self.ask("tools/call", {"name": name, "arguments": arguments or {}, **retry})

    async def begin(self, name: str, arguments: dict[str, Any] | None = None) -> str:
        """The id of the task that a call becomes."""
        result = await self.call(name, arguments)
        assert result["resultType"] == "task", result
        return str(result["taskId"])

    async def get(self, task_id: str) -> dict[str, Any]:
        return await self.ask("tasks/get", {"taskId": task_id})

    async def until(self, task_id: str, status: str) -> dict[str, Any]:
        """What is said of a task as soon as it has this status."""
        async with asyncio.timeout(20):
            while True:
                task = await self.get(task_id)
                if task["status"] == status:
                    return task
                assert task["status"] in ("working", "input_required"), task
                await asyncio.sleep(0.005)

    async def questions(self, task_id: str) -> dict[str, str]:
        """The keys and messages of what a task asks."""
        task = await self.until(task_id, "input_required")
        return {key: each["params"]["message"] for key, each in task["inputRequests"].items()}

    async def update(self, task_id: str, responses: Any) -> dict[str, Any]:
        return await self.ask("tasks/update", {"taskId": task_id, "inputResponses": responses})

    async def cancel(self, task_id: str) -> dict[str, Any]:
        return await self.ask("tasks/cancel", {"taskId": task_id})


@contextlib.asynccontextmanager
async def wired(source: Any, user: str = "", **options: Any) -> AsyncIterator[Wire]:
    source = source if isinstance(source, Registry | Executor) else registry_of(source)
    async with (
        async_serve(source, **options) as app,
        hosting(app) as url,
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http,
    ):
        yield Wire(http, user)


def endless() -> tuple[Any, asyncio.Event]:
    """A module that waits until it is cancelled, and an event that is set then."""
    ended = asyncio.Event()

    async def wait(inputs: dict[str, Any], context: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    return wait, ended


def without_meta(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if key != "_meta"}


# ---- What becomes a task ----


MARKS = {  # by metadata, and by `extra` of the annotations
    "task": [({}, {"mcp_async": True}), ({}, {"mcp_async": "true"}), ({"async": True}, {}), ({"async": "true"}, {})],
    "complete": [({}, {"mcp_async": "no"}), ({}, {"mcp_async": 1}), ({"async": False}, {}), ({}, {})],
}


async def test_which_modules_are_long() -> None:
    """Also through search."""
    registry = registry_of()
    async with wired(registry, search=True) as wire:
        for kind, marks in MARKS.items():
            for metadata, extra in marks:
                annotations = ModuleAnnotations(extra=extra)
                registry.register("m", FunctionalModule(echo, metadata=metadata, annotations=annotations))
                result = await wire.call("call_tool", {"name": "m", "arguments": {}})
                assert result["resultType"] == kind, (metadata, extra)
                registry.unregister("m")


async def test_a_long_call_is_a_task_at_once() -> None:
    async with wired({"long": long(echo)}) as wire:
        handle = await wire.call("long", {"n": 1})
        assert (handle["resultType"], handle["status"], handle["ttlMs"]) == ("task", "working", None)
        assert handle["pollIntervalMs"] == 1000
        assert len(handle["taskId"]) == 43  # 32 bytes
        task = await wire.until(handle["taskId"], "completed")
        assert task["resultType"] == "complete"
        assert task["createdAt"] == handle["createdAt"]
        assert datetime.fromisoformat(task["lastUpdatedAt"]) >= datetime.fromisoformat(task["createdAt"])
        assert 3_600_000 <= task["ttlMs"] < 3_620_000
        wire.capabilities = {}
        assert task["result"]["content"] == (await wire.call("long", {"n": 1}))["content"]


@on_clock
async def test_without_a_number_only_marked_modules_are_tasks(clock: Clock) -> None:
    slow, begun, go_on = waiting()
    executor = Executor(registry_of({"slow": slow, "long": long(slow)}), config=WITHOUT_LIMIT)
    async with wired(executor, task_after=None) as wire:
        wire.http.timeout = httpx.Timeout(None)  # or it would be over, too
        call = asyncio.create_task(wire.call("slow"))
        await asyncio.wait_for(begun.wait(), 20)
        await clock.put_forward(1_000)
        go_on.set()
        assert (await call)["resultType"] == "complete"
        assert (await wire.call("long"))["resultType"] == "task"


def test_task_after_is_seconds_or_none() -> None:
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="task_after"):
            serve(Registry(), task_after=seconds)


# ---- Who sees nothing of it ----


async def test_without_the_extension_there_are_no_tasks() -> None:
    async with wired({"echo": echo}, task_after=0) as wire:
        for capabilities in ({}, {"extensions": {}}, {"extensions": {"io.modelcontextprotocol/ui": {}}}):
            wire.capabilities = capabilities
            assert (await wire.call("echo", {"n": 1}))["structuredContent"] == {"n": 1}


def test_a_handshake_client_sees_no_tasks() -> None:
    with serving(registry_of({"long": long(echo)})) as url, httpx.Client(base_url=url, timeout=30) as http:
        opened, session = handshake(http, "/mcp", extensions={TASKS: {}})
        assert not opened["capabilities"].get("extensions")

        def send(method: str, params: dict[str, Any]) -> Any:
            return answer(http.post("/mcp", json=message(method, params), headers=session))

        called = send("tools/call", {"name": "long", "arguments": {"n": 1}})
        assert called["result"]["structuredContent"] == {"n": 1}
        for method in ("tasks/get", "tasks/update", "tasks/cancel"):
            assert send(method, {"taskId": "x", "inputResponses": {}})["error"]["code"] == -32601


async def test_a_stateless_server_offers_no_tasks() -> None:
    for stateless in (False, True):
        async with wired({"long": long(echo)}, stateless=stateless) as wire:
            capabilities = (await wire.ask("server/discover"))["capabilities"]
            assert capabilities.get("extensions") == (None if stateless else {TASKS: {}})
            assert "tasks" not in capabilities
            if stateless:
                assert (await wire.call("long"))["resultType"] == "complete"
                assert (await wire.refusal("tasks/get", {"taskId": "x"}))[0] == -32601


async def test_nobody_can_listen_to_tasks() -> None:
    params = {"notifications": {"toolsListChanged": True, "taskIds": ["x"]}}
    async with wired({"echo": echo}) as wire:
        sent = modern("subscriptions/listen", {"_meta": {CAPABILITIES: wire.capabilities}, **params})
        async with wire.http.stream("POST", "/mcp", **sent) as stream:
            first = await anext(line async for line in stream.aiter_lines() if line.startswith("data: {"))
        assert json.loads(first[6:])["params"]["notifications"] == {"toolsListChanged": True}
        wire.capabilities = {}
        assert await wire.refusal("subscriptions/listen", params) == (-32021, REQUIRED)


# ---- Who may ask for a task ----


async def test_what_is_wrong_with_a_request() -> None:
    """The extension, the header, the task: what is wrong first is told."""
    async with wired({"long": long(echo)}) as wire:
        task_id = await wire.begin("long")
        for method in ("tasks/get", "tasks/update", "tasks/cancel"):
            named = {"taskId": task_id, "inputResponses": {}}
            unknown = {"taskId": "unknown", "inputResponses": {}}
            wire.capabilities.pop("extensions", None)
            for params in (named, unknown, {}):
                assert await wire.refusal(method, params, mcp_name="x") == (-32021, REQUIRED)
            wire.capabilities["extensions"] = {TASKS: {}}
            for params in (named, unknown, {}):
                for header in (None, "x", task_id[:-1]):
                    expected = -32602 if header is None and not params else -32020
                    assert (await wire.refusal(method, params, mcp_name=header))[0] == expected
            assert (await wire.refusal(method, unknown))[0] == -32602
        assert (await wire.refusal("tasks/update", {"taskId": task_id}))[0] == -32602
        assert (await wire.get(task_id))["status"] == "completed"


async def test_a_task_is_its_callers_own() -> None:
    async with wired({"long": long(echo)}, user="ada", middleware=LOGIN) as ada:
        task_id = await ada.begin("long")
        for user in ("eve", ""):
            other = Wire(ada.http, user)
            for method in ("tasks/get", "tasks/update", "tasks/cancel"):
                assert (await other.refusal(method, {"taskId": task_id, "inputResponses": {}}))[0] == -32602
        await ada.until(task_id, "completed")


# ---- What is told of it ----


async def test_the_last_progress_is_told() -> None:
    steps: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue()
    told = asyncio.Event()

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        while step := await steps.get():
            await report_progress(context, *step)
            told.set()
        return {}

    async with wired({"work": work}, task_after=0.05) as wire:
        steps.put_nowait((0.5,))  # before it is a task
        task_id = await wire.begin("work")
        assert (await wire.get(task_id))["statusMessage"] == "0.5"
        for step, message in [((3, 10, "Reading"), "3/10 Reading"), ((4, None, "é\ud800"), "4 é?"), ((5, 10), "5/10")]:
            told.clear()
            steps.put_nowait(step)
            await told.wait()
            assert (await wire.get(task_id))["statusMessage"] == message
        steps.put_nowait(None)
        await wire.until(task_id, "completed")


async def test_a_tools_error_completes_and_the_protocols_fails() -> None:
    def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        raise OSError("/etc/passwd")

    modules = {"fail": long(fail), "asks": long(calls("wipe")), "wipe": guarded([])}
    async with wired(modules) as wire:
        result = (await wire.until(await wire.begin("fail"), "completed"))["result"]
        assert (result["isError"], result["content"][0]["text"]) == (True, "Internal error occurred")
        del wire.capabilities["elicitation"]
        task = await wire.until(await wire.begin("asks"), "failed")
        assert task["error"]["code"] == -32021
        assert (task["statusMessage"], "result" in task) == (task["error"]["message"], False)


# ---- Questions ----


async def test_each_open_question_is_answered_by_itself() -> None:
    async def interview(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        both = await asyncio.gather(*(elicit(context, f"{n}?", SCHEMA, key="name") for n in (1, 2)))
        third = await elicit(context, "3?", SCHEMA, key="name")
        return {"names": [each and each["name"] for each in [*both, third]]}

    async with wired({"interview": long(interview)}) as wire:
        task_id = await wire.begin("interview")
        assert await wire.questions(task_id) == {"name": "1?", "name-2": "2?"}
        for ignored in ({"never": {"x": 1}}, {}):
            assert without_meta(await wire.update(task_id, ignored)) == {"resultType": "complete"}
        for wrong in ({"name": {"x": 1}}, {"name": 7}, [], None):
            params = {"taskId": task_id, "inputResponses": wrong}
            assert (await wire.refusal("tasks/update", params))[0] == -32602
        await wire.update(task_id, {"name-2": ADA})
        assert await wire.questions(task_id) == {"name": "1?"}
        await wire.update(task_id, {"name-2": {"gone": 1}, "name": {"action": "decline"}})
        assert await wire.questions(task_id) == {"name-3": "3?"}
        await wire.update(task_id, {"name": ADA, "name-3": ADA})
        task = await wire.until(task_id, "completed")
        assert task["result"]["structuredContent"] == {"names": [None, "Ada", "Ada"]}
        await wire.update(task_id, {"name": ADA})


async def test_approval_before_and_inside_a_task() -> None:
    runs: list[dict[str, Any]] = []
    annotations = ModuleAnnotations(requires_approval=True)
    yes = {"action": "accept", "content": {"approve": True}}

    async def wipe_twice(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for n in (1, 2):
            await context.executor.call_async("wipe", {"n": n}, context)
        return {}

    marked = long(wipe_twice, annotations=dataclasses.replace(annotations, extra=LONG.extra))
    modules = {"long": marked, "plain": FunctionalModule(wipe_twice, annotations=annotations), "wipe": guarded(runs)}
    async with wired(modules, task_after=0) as wire:
        for name in ("long", "plain"):
            runs.clear()
            asked = await wire.call(name)
            assert (asked["resultType"], list(asked["inputRequests"])) == ("input_required", ["approval"])
            retry = {"requestState": asked["requestState"], "inputResponses": {"approval": yes}}
            handle = await wire.call(name, **retry)
            assert (handle["resultType"], "requestState" in handle) == ("task", False)
            task_id = handle["taskId"]
            for n in (1, 2):
                ((key, question),) = (await wire.questions(task_id)).items()
                assert (key, "wipe" in question, len(runs)) == (f"approval-{n + 1}", True, n - 1)
                await wire.update(task_id, {key: yes})
            await wire.until(task_id, "completed")
            assert runs == [{"n": 1}, {"n": 2}]


# ---- Its end ----


async def test_a_client_cancels_its_task() -> None:
    ended, begun = threading.Event(), threading.Event()

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        begun.set()
        try:
            await (elicit(context, "?") if inputs else asyncio.Event().wait())
        finally:
            ended.set()
        return {}

    def watch(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        begun.set()
        with contextlib.suppress(ExecutionCancelledError):
            while True:
                context.cancel_token.check()
                time.sleep(0.002)
        ended.set()
        return {}

    async with wired({"work": long(work), "watch": long(watch), "echo": long(echo)}) as wire:
        for module, arguments in (("work", {}), ("work", {"asks": True}), ("watch", {})):
            ended.clear(), begun.clear()
            task_id = await wire.begin(module, arguments)
            assert await asyncio.to_thread(begun.wait, 10)
            assert without_meta(await wire.cancel(task_id)) == {"resultType": "complete"}
            task = await wire.until(task_id, "cancelled")
            assert not task.keys() & {"result", "error", "inputRequests"}
            assert await asyncio.to_thread(ended.wait, 10)
        task_id = await wire.begin("echo", {"n": 1})
        task = await wire.until(task_id, "completed")
        await wire.cancel(task_id)
        assert without_meta(await wire.get(task_id)) == without_meta(task)


async def test_a_long_module_has_its_own_limit_alone() -> None:
    """What it calls has apcore's. It may be a client's that knows no tasks, but not one's that waits."""
    slow, _, go_on = waiting()
    limits = {"default_timeout": 50, "global_timeout": 100}
    modules = {
        "slow": slow,
        "long": long(slow),
        "above": long(calls("own")),
        "below": long(calls("slow")),
        "own": FunctionalModule(slow, resources={"timeout": 20_000}),
        "hasty": long(slow, resources={"timeout": 150}),
    }
    executor = Executor(registry_of(modules), config=Config({"executor": limits}))
    async with wired(executor, task_after=0.2) as wire:
        tasks = {name: await wire.begin(name) for name in ("long", "above", "below", "hasty")}
        for name, milliseconds in (("below", 50), ("hasty", 150)):  # not "cancelled", though its token is set
            result = (await wire.until(tasks[name], "completed"))["result"]
            assert result["content"][0]["text"] == f"Module timed out after {milliseconds}ms"
        wire.capabilities = {}
        told = await wire.call("long")
        wire.capabilities = {"extensions": {TASKS: {}}}
        tasks["told"] = told["_meta"]["apcore-mcp/task"]["taskId"]
        go_on.set()
        for name in ("long", "above", "told"):
            assert (await wire.until(tasks[name], "completed"))["result"]["structuredContent"] == {"done": True}
    go_on.clear()
    async with wired(executor, task_after=None) as wire:
        wire.capabilities = {}
        assert (await wire.call("long"))["content"][0]["text"] == "Module timed out after 50ms"


@on_clock
async def test_an_ended_task_is_kept_for_an_hour(clock: Clock) -> None:
    """And then nothing of it, though its module has left a timer running."""
    go_on = asyncio.Event()

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(100_000, print)
        await go_on.wait()
        return {"text": "x" * 600_000}

    async with wired({"work": long(work)}) as wire:
        tasks = [await wire.begin("work") for _ in range(3)]
        await clock.put_forward(50_000)
        assert (await wire.get(tasks[0]))["ttlMs"] is None
        go_on.set()
        await wire.until(tasks[0], "completed")
        await clock.put_forward(3_500)
        task = await wire.get(tasks[0])
        kept_until = datetime.fromisoformat(task["createdAt"]) + timedelta(milliseconds=task["ttlMs"])
        ended = datetime.fromisoformat(task["lastUpdatedAt"])
        assert timedelta(seconds=3_600) <= kept_until - ended < timedelta(seconds=3_601)
        gc.collect()
        tracemalloc.start()
        for _ in range(8):
            await wire.until(await wire.begin("work"), "completed")
        assert tracemalloc.get_traced_memory()[0] > 4_500_000
        await clock.put_forward(3_700)
        for task_id in tasks:
            assert (await wire.refusal("tasks/get", {"taskId": task_id}))[0] == -32602
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert kept < 1_500_000


@pytest.mark.parametrize(("tool", "limits"), [("ask", (0, 1.9)), ("wait", (1.9, 8))])
async def test_a_server_that_ends_ends_its_tasks(tool: str, limits: tuple[float, float], caplog: Caplog) -> None:
    """It waits for those that work, and for none that waits for its user."""
    wait, ended = endless()
    async with wired({"ask": ask, "wait": wait}, task_after=0, shutdown_seconds=2.0) as wire:
        await wire.begin(tool)
        began = time.monotonic()
    assert limits[0] <= time.monotonic() - began < limits[1]
    assert ended.is_set() == (tool == "wait")
    assert "Traceback" not in caplog.text


# ---- How much is kept ----


async def test_of_a_hundred_tasks_one_more_is_none() -> None:
    """Its client waits for the result. Those that have ended do not count, nor do those of other callers."""
    wait, _, go_on = waiting()
    async with wired({"wait": long(wait), "echo": long(echo)}, user="ann", middleware=LOGIN) as ann:
        bob = Wire(ann.http, "bob")
        tasks = [await ann.begin("wait") for _ in range(100)]
        assert (await ann.call("echo"))["resultType"] == "complete"
        assert (await bob.call("echo"))["resultType"] == "task"
        go_on.set()
        await ann.until(tasks[-1], "completed")
        for _ in range(10):
            await ann.until(await ann.begin("echo"), "completed")
        assert (await ann.get(tasks[0]))["status"] == "completed"


def timers_of_results() -> int:
    """How many timers go on to ring in about an hour."""
    now = asyncio.get_running_loop().time()
    timers = [each for each in gc.get_objects() if isinstance(each, asyncio.TimerHandle) and each.when() > now + 3_000]
    return sum(not timer.cancelled() for timer in timers)


async def test_of_64_mebibytes_of_results_the_oldest_go() -> None:
    """But none of another caller's; and of those that go not even a timer is left."""

    async def large(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"text": "x" * inputs["size"]}  # and as much structured content

    async with wired({"large": long(large)}, user="ann", middleware=LOGIN, max_result=0) as ann:
        bob, before = Wire(ann.http, "bob"), timers_of_results()
        first = await bob.begin("large", {"size": 1})
        tasks = [await ann.begin("large", {"size": 4_500_000}) for _ in range(8)]
        await ann.until(tasks[-1], "completed")
        assert (await bob.get(first))["status"] == "completed"
        assert (await ann.refusal("tasks/cancel", {"taskId": tasks[0]}))[0] == -32602
        for task_id in tasks[1:]:
            await ann.cancel(task_id)  # which has ended, but is there
        assert timers_of_results() - before == 8


async def test_arguments_of_tasks_have_256_kibibytes() -> None:
    """In memory they take ninety times their JSON. One more call is no task, and those that end make room."""
    wait, begun, go_on = waiting()
    large = {"text": "x" * 75_000}
    async with wired({"wait": long(wait)}) as wire, asyncio.timeout(30):
        tasks = [await wire.begin("wait", large) for _ in range(3)]
        begun.clear()
        one_more = asyncio.create_task(wire.call("wait", large))
        await begun.wait()
        small = await wire.begin("wait")
        go_on.set()
        assert (await one_more)["resultType"] == "complete"
        for task_id in (*tasks, small):
            await wire.until(task_id, "completed")
        assert (await wire.call("wait", large))["resultType"] == "task"


# ---- For clients that do not know tasks: `task_result` ----


def id_in(result: CallToolResult) -> str:
    """The id that a call is answered with that goes on."""
    task_id = str((result.meta or {})["apcore-mcp/task"]["taskId"])
    words = rf"It goes on( \(\d+ Reading\))?\. Call task_result with this id: {task_id}"
    assert re.fullmatch(words, text_of(result))
    assert not result.is_error
    return task_id


@on_clock
async def test_a_client_without_tasks_asks_for_the_result(clock: Clock, mode: str) -> None:
    """It is told the progress on its own request, and the result as the call would have given it, after 30 s, too."""
    typed, is_over = of(n=INTEGER) | {"required": ["n"]}, asyncio.Event()

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for step in itertools.count(1):
            await report_progress(context, step, message="Reading")
            if is_over.is_set():
                return {"n": inputs["n"]}
            await asyncio.sleep(0.01)
        raise AssertionError

    async def wait(*progress: Any) -> None:
        told.append(progress[2])
        if len(told) == 1:
            await clock.put_forward(21)

    async def end(*progress: Any) -> None:
        is_over.set()

    told = list[Any]()
    modules = {"work": long(work, output_schema=typed), "echo": FunctionalModule(echo, output_schema=typed)}
    async with hosted(modules, mode, task_after=0.1) as client:
        listed = {tool.name: tool.output_schema is not None for tool in (await client.list_tools()).tools}
        assert listed == {"work": False, "echo": True, "task_result": False}
        task_id = id_in(await client.call_tool("work", {"n": 1}))
        for _ in range(2):
            told.clear()
            result = await client.call_tool("task_result", {"task_id": task_id}, progress_callback=wait)
            assert (id_in(result), told[0]) == (task_id, "Reading")
        result = await client.call_tool("task_result", {"task_id": task_id}, progress_callback=end)
        assert (result.structured_content, text_of(result), result.is_error) == ({"n": 1}, '{"n":1}', False)
        assert await client.call_tool("task_result", {"task_id": task_id}) == result


@on_clock
async def test_questions_come_before_it_goes_on(clock: Clock, mode: str) -> None:
    """However long the user thinks; from then on nobody can be asked."""
    is_answered, is_told = asyncio.Event(), asyncio.Event()

    async def work(inputs: dict[str, Any], context: Any) -> Any:
        early = await elicit(context, "early?", SCHEMA)
        await is_told.wait()
        late = await elicit(context, "late?", SCHEMA)
        assert (early, late) == ({"name": "Ada"}, None)
        return await context.executor.call_async("wipe", {}, context)

    async def think(context: Any, params: Any) -> Any:
        asked.append(params.message)
        await clock.put_forward(10)
        assert not call.done()
        is_answered.set()
        return accept(name="Ada")

    asked = list[str]()
    modules = {"work": long(work), "wipe": guarded([])}
    async with hosted(modules, mode, {"elicitation_callback": think}) as client:
        call = asyncio.create_task(client.call_tool("work"))
        await asyncio.wait_for(is_answered.wait(), 50)
        while not call.done():
            await clock.put_forward(1)
        is_told.set()
        result = await client.call_tool("task_result", {"task_id": id_in(await call)})
    assert asked == ["early?"]
    assert (result.is_error, text_of(result)) == (True, "Approval was denied: nobody can be asked")


async def test_task_result_is_its_callers_own_and_can_cancel() -> None:
    wait, ended = endless()
    async with wired({"wait": long(wait)}, user="ada", middleware=LOGIN, task_after=0, search=True) as ada:
        eve = Wire(ada.http, "eve")
        for wire in (ada, eve):
            wire.capabilities = {}
        tools = (await ada.ask("tools/list"))["tools"]
        assert [tool["name"] for tool in tools] == ["search_tools", "call_tool", "task_result"]
        told = await ada.call("call_tool", {"name": "wait"})
        task_id = told["_meta"]["apcore-mcp/task"]["taskId"]
        for wire, unknown in ((eve, task_id), (ada, "unknown")):
            result = await wire.call("task_result", {"task_id": unknown, "cancel": True})
            assert (result["isError"], result["content"][0]["text"][:14]) == (True, "Task not found")
        assert not ended.is_set()
        result = await ada.call("task_result", {"id": task_id})
        assert result["content"][0]["text"].startswith("Input validation failed")
        for _ in range(2):
            result = await ada.call("task_result", {"task_id": task_id, "cancel": True})
            assert (result["isError"], result["content"][0]["text"]) == (True, "Execution was cancelled")
        assert ended.is_set()


ALONE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "no number": ({"long": long(echo)}, {"task_after": None}, {}),
    "stateless": ({"long": long(echo)}, {"stateless": True}, {}),
    "tasks": ({"long": long(echo)}, {}, {"extensions": {TASKS: {}}}),
    "nothing long": ({"long": FunctionalModule(echo)}, {}, {}),
    "a module": ({"long": long(echo), "task_result": echo}, {}, {}),
}


@pytest.mark.parametrize(("modules", "options", "capabilities"), ALONE.values(), ids=ALONE)
async def test_where_there_is_no_task_result(modules: Any, options: Any, capabilities: Any, caplog: Caplog) -> None:
    """Nor anything else that differs. A module of that id wins."""
    async with wired(modules, **options) as wire:
        wire.capabilities = capabilities
        for _ in range(2):
            tools = (await wire.ask("tools/list"))["tools"]
            assert {tool["name"] for tool in tools} == modules.keys()
            assert "outputSchema" in tools[0]
        if "task_result" in modules:
            assert (await wire.call("task_result", {"n": 1}))["structuredContent"] == {"n": 1}
    warning = "The module task_result takes the place of the tool that tells results of long work"
    assert messages_logged(caplog).count(warning) == ("task_result" in modules)


async def test_calls_for_task_result_have_places_of_tasks(monkeypatch: Monkeypatch) -> None:
    """From their beginning to their end, also where they end in time. One more waits, and apcore's limits hold."""
    monkeypatch.setattr("apcore_mcp.conversation._PLACES_MAX", 1)
    limits = Config({"executor": {"default_timeout": 500, "global_timeout": 60_000}})
    executor = Executor(registry_of({"wait": long(waiting()[0]), "echo": long(echo)}), config=limits)
    async with wired(executor, task_after=0.2, shutdown_seconds=0.1) as wire:
        wire.capabilities = {}
        for _ in range(3):
            assert (await wire.call("echo", {"n": 1}))["structuredContent"] == {"n": 1}
        task_id = (await wire.call("wait"))["_meta"]["apcore-mcp/task"]["taskId"]
        assert (await wire.call("wait"))["content"][0]["text"] == "Module timed out after 500ms"
        await wire.call("task_result", {"task_id": task_id, "cancel": True})
        assert "apcore-mcp/task" in (await wire.call("wait"))["_meta"]
