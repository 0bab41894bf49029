"""One running call: how it is made, what is told and asked meanwhile, how it ends, and what it leaves behind (FR-
EXEC-*, FR-EXT-*).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import queue
import re
import threading
import time
import tracemalloc
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import MagicMock

import httpx
import mcp_types as types
import pytest
from apcore import ACL, ACLRule, Config, Executor, Middleware, ModuleAnnotations, SchemaValidationError
from apcore.builtin_steps import BuiltinInputValidation, BuiltinModuleLookup, BuiltinOutputValidation
from apcore.cancel import ExecutionCancelledError
from apcore.errors import ModuleTimeoutError
from apcore.pipeline import BaseStep, PipelineContext, StepResult
from apcore.schema import SchemaLoader
from apcore.utils.redaction import REDACTED_VALUE
from conftest import (
    HANDSHAKE,
    MODERN,
    Clock,
    FunctionalModule,
    RawClient,
    client_of,
    connect,
    echo,
    hosting,
    program,
    registry_of,
    serving,
    stdio,
    until,
    with_clock,
)
from mcp.client import Client
from mcp_types import ElicitResult
from pydantic import BaseModel, ConfigDict, Field, create_model
from support import (
    ENVIRONMENT,
    SCHEMA,
    SECRETIVE,
    STAGE_ON_STDIO,
    UNASKED,
    Gate,
    StreamingModule,
    Wire,
    accept,
    ask,
    asking,
    guarded,
    is_set_in_time,
    modern,
    noting,
    parsed,
    stage,
    success_text,
    text_of,
    wired,
)

from apcore_mcp import MCP_ELICIT_KEY, MCP_PROGRESS_KEY, async_serve, elicit, report_progress, to_openai_tools

WITHOUT_LIMIT = Config({"executor": {"default_timeout": 0, "global_timeout": 0}})

# ---- Questions ----


def test_a_question_that_nobody_answers_for_ten_minutes_is_none() -> None:
    told: list[Any] = []

    async def patient(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        told.append(await elicit(context, "Who?"))
        return {}

    async def story(clock: Clock) -> None:
        executor = Executor(registry_of({"patient": patient}), config=WITHOUT_LIMIT)
        user, _ = asking(accept())
        async with async_serve(executor) as app, hosting(app) as url, client_of(url, **user) as client:
            _, _, state = await Wire(client).question("patient")
            await clock.put_forward(9 * 60)
            assert told == []
            await clock.put_forward(2 * 60)
            assert told == [None]
            await Wire(client).refused(state, "patient")

    with_clock(story)


async def test_progress_while_a_question_is_open_goes_to_no_request_that_was_answered() -> None:
    """It counts as untold: the request that brings the answer is told the same."""
    proceed, reported = asyncio.Event(), asyncio.Event()
    (first, told), (second, told_later) = noting(), noting()

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await report_progress(context, 1)
        question = asyncio.ensure_future(elicit(context, "Go on?", key="name"))
        await proceed.wait()
        await report_progress(context, 2)
        reported.set()
        await question
        await report_progress(context, 2)
        return {}

    async def report(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        proceed.set()
        await reported.wait()
        return {}

    async with wired({"work": work, "report": report}) as wire:
        _, _, state = await wire.question("work", progress_callback=first)
        await wire.call("report")
        answer = {"name": accept()}
        await wire.call("work", request_state=state, input_responses=answer, progress_callback=second)
    assert (told, told_later) == ([(1, None, None)], [(2, None, None)])


# ---- Progress ----


def setting(event: Any) -> Any:
    """A module that sets an event of its server's loop or of a thread."""

    async def set_it(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        event.set()
        return {}

    return set_it


STEPS = [(1.0, 3.0, "step 1"), (2.0, 3.0, "step 2"), (3.0, 3.0, "step 3")]


@pytest.mark.requirement("FR-EXT-001")
async def test_progress_arrives_in_order_and_before_the_result_from_any_depth(mode: str) -> None:
    async with connect(stage(), mode=mode) as client:
        for module_id in ("steps", "nested", "from_sync", "deep"):
            note, told = noting()
            result = await client.call_tool(module_id, progress_callback=note)
            assert (result.structured_content, told) == ({"done": True}, STEPS), module_id
            result = await client.call_tool(module_id)  # no token: nothing to report to
            assert (result.structured_content, told) == ({"done": True}, STEPS)


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


def test_progress_only_rises_and_is_made_of_numbers_and_text() -> None:
    """MCP "Progress": MUST increase. What cannot be said as a number is no progress, and is not said as text."""
    steps = [math.nan, 1, 1, 0.5, math.inf, Decimal("2.5"), -math.inf, Fraction(11, 4), True, 3, 4, 5, 6]
    totals = [None, None, 10, 10, 10, Decimal(10), 10, None, 10, 3, math.inf, math.nan, -math.inf]

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for step, total in zip(steps, totals, strict=True):
            await report_progress(context, step, total)  # type: ignore[arg-type]
        await report_progress(context, 7, message="half of a pair: \ud83d")
        return {}

    request = modern("tools/call", {"name": "work"})
    request["json"]["params"]["_meta"]["progressToken"] = "t"
    with serving(registry_of({"work": work})) as url:
        *told, _ = [line[6:] for line in httpx.post(f"{url}/mcp", **request).text.splitlines() if "{" in line]
    params = [json.loads(event)["params"] for event in told]
    assert all(each.pop("progressToken") == "t" for each in params)
    assert params.pop() == {"progress": 7, "message": "half of a pair: ?"}
    without_total = [{"progress": number} for number in (4, 5, 6)]
    assert params == [
        {"progress": 1},
        {"progress": 2.5, "total": 10},
        {"progress": 2.75},
        {"progress": 3, "total": 3},
        *without_total,
    ]


# ---- Cancellation ----


async def start(client: Client, module_id: str) -> asyncio.Task[types.CallToolResult]:
    """A call of a module that reports progress once it runs."""
    running = asyncio.Event()

    async def note(progress: float, total: float | None, message: str | None) -> None:
        running.set()

    call = asyncio.create_task(client.call_tool(module_id, progress_callback=note))
    await running.wait()
    return call


async def cancel(call: asyncio.Task[Any]) -> None:
    call.cancel()
    await asyncio.wait({call})


async def test_a_cancelled_call_ends_its_module_and_leaves_no_task_behind(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is what a module raises by then told to anybody."""
    records: queue.Queue[Any] = queue.Queue()

    def slow(inputs: dict[str, Any], context: Any) -> None:
        context.executor.call("steps", {}, context)
        assert is_set_in_time(context.cancel_token)
        records.put(["slow", context.cancel_token])
        raise RuntimeError("password hunter2")

    async def stubborn(inputs: dict[str, Any], context: Any) -> None:
        await report_progress(context, 1)
        try:
            await asyncio.Event().wait()
        finally:
            records.put(["stubborn", context.cancel_token])
            raise RuntimeError("password hunter2")

    registry = stage(records)
    registry.register("slow", FunctionalModule(slow))
    registry.register("stubborn", FunctionalModule(stubborn))
    async with connect(registry, mode=mode) as client, asyncio.timeout(40):

        async def tasks() -> Counter[str]:
            return Counter((await client.call_tool("tasks")).structured_content["tasks"])  # type: ignore[index]

        before = await tasks()
        for module_id in ("wait", "wait_below", "wait_streaming", "watch_token", "slow", "stubborn"):
            await cancel(await start(client, module_id))
            ended = {"told": module_id.removesuffix("_below"), "token_set": True}
            assert (await client.call_tool("ended")).structured_content == ended
            while left := await tasks() - before:
                assert left, "the timeout above is the limit"
    gc.collect()  # "Future exception was never retrieved" and the like
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert "hunter2" not in caplog.text


async def test_a_call_that_has_ended_keeps_nothing_of_its_module() -> None:
    class Gone(FunctionalModule):
        def __init__(self) -> None:
            super().__init__(self.run)

        def run(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
            return {}

    registry = registry_of({"gone": Gone()})
    gone = weakref.ref(registry.get("gone"))
    # The timer of a limit, though it is cancelled, would keep what it was set in.
    async with connect(Executor(registry, config=WITHOUT_LIMIT)) as client, asyncio.timeout(30):
        await client.call_tool("gone")
        registry.unregister("gone")
        await client.list_tools()  # from here on the list is another
        await asyncio.to_thread(until, lambda: gc.collect() is not None and gone() is None, 10)


def test_a_stopping_server_cancels_what_still_runs_after_the_grace_period(caplog: pytest.LogCaptureFixture) -> None:
    records: queue.Queue[list[Any]] = queue.Queue()
    modules = ["wait", "wait_streaming", "watch_token"]

    async def parked(inputs: dict[str, Any], context: Any) -> None:
        try:
            await elicit(context, "Who?", SCHEMA)
        finally:
            records.put(["parked", context.cancel_token])

    async def story(clock: Clock) -> None:
        registry = stage(records)
        registry.register("parked", FunctionalModule(parked))
        server = async_serve(Executor(registry, config=WITHOUT_LIMIT))
        async with hosting(await server.__aenter__()) as url, contextlib.AsyncExitStack() as stack:
            calls = []
            for mode in (HANDSHAKE, MODERN):
                client = client_of(url, mode, **asking(accept())[0])
                await stack.enter_async_context(client)
                calls += [await start(client, module_id) for module_id in modules]
            await Wire(client).question("parked")
            ending = asyncio.create_task(server.__aexit__(None, None, None))
            await clock.put_forward(4)
            assert records.empty()
            await clock.put_forward(2)
            told = [await asyncio.to_thread(records.get, timeout=10) for _ in [*calls, "parked"]]
            assert sorted(name for name, _ in told) == sorted([*modules * 2, "parked"])
            assert all(is_set_in_time(token) for _, token in told)
            await ending
            for call in calls:
                await cancel(call)

    with_clock(story)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []  # no traceback


@pytest.mark.parametrize("where", ["work", "above", "alone"])
async def test_no_coroutine_of_a_cancelled_or_timed_out_call_goes_on(where: str) -> None:
    """Also when another called it, without its context; but what a module has to clean up is not cut short."""
    running, release, ended = threading.Event(), asyncio.Event(), queue.Queue[str]()

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.set()
        release.clear()
        try:
            await asyncio.Event().wait()
        finally:
            await release.wait()
            ended.put("work")
        return {}

    async def above(inputs: dict[str, Any], context: Any) -> Any:
        try:
            return await context.executor.call_async("work", {}, *([context] if where == "above" else []))
        finally:
            ended.put("above")

    async def tasks(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        names = [getattr(task.get_coro(), "__qualname__", "?").rpartition(".")[2] for task in asyncio.all_tasks()]
        return {"left": [name for name in names if name in ("work", "above")]}

    function = work if where == "work" else above
    limited = FunctionalModule(function, resources={"timeout": 300})
    modules = {"work": work, "tasks": tasks, "cancelled": function, "timed.out": limited, "go": setting(release)}
    expected = ["work"] if where == "work" else ["above", "work"]
    async with connect(modules) as client, asyncio.timeout(20):
        for module_id in ("cancelled", "timed.out"):
            running.clear()
            call = asyncio.create_task(client.call_tool(module_id))
            assert await asyncio.to_thread(running.wait, 10)
            if module_id == "cancelled":
                await cancel(call)
            else:
                assert text_of(await call) == "Module timed out after 300ms"
            for _ in range(3):  # the server has seen the end, and all that it sets off, when it answers these
                await client.call_tool("tasks")
            await client.call_tool("go")
            assert sorted([await asyncio.to_thread(ended.get, timeout=10) for _ in expected]) == expected
            while (await client.call_tool("tasks")).structured_content != {"left": []}:
                assert asyncio.current_task(), "the timeout above is the limit"


async def test_what_a_module_started_for_all_calls_outlives_the_call_that_was_cancelled() -> None:
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

    async with connect({"work": work}) as client, asyncio.timeout(20):
        call = asyncio.create_task(client.call_tool("work", {"wait": True}))
        assert await asyncio.to_thread(running.wait, 10)
        await cancel(call)
        for _ in range(20):
            assert (await client.call_tool("work")).structured_content == {"pool": "runs"}


async def test_a_stream_that_gives_nothing_more_ends_with_its_calls_time() -> None:
    closed = queue.Queue[str]()

    class Stream(StreamingModule):
        async def stream(self, inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
            try:
                yield {"n": 1}
                if inputs["then"] == "hangs":
                    await asyncio.Event().wait()
                elif inputs["then"] == "fails":
                    raise TimeoutError("the database has not answered")
            finally:
                closed.put(inputs["then"])

    config = Config(data={"executor": {"global_timeout": 500, "default_timeout": 400}})
    told = {"ends": r'{"n":1}', "hangs": r"Module timed out after 500ms", "fails": "Internal error occurred"}
    async with connect(Executor(registry_of({"stream": Stream([])}), config=config)) as client, asyncio.timeout(20):
        for then, text in told.items():
            result = await client.call_tool("stream", {"then": then}, progress_callback=noting()[0])
            assert re.fullmatch(text, text_of(result))
            assert await asyncio.to_thread(closed.get, timeout=10) == then


async def test_a_module_that_blocks_its_loop_for_another_that_reports_is_answered() -> None:
    async def reporting(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for number in range(10):
            await report_progress(context, number)
        return {"done": True}

    async def blocking(inputs: dict[str, Any], context: Any) -> Any:
        return context.executor.call("reporting", {}, context)

    async with connect({"reporting": reporting, "blocking": blocking}) as client, asyncio.timeout(10):
        result = await client.call_tool("blocking", progress_callback=noting()[0])
    assert result.structured_content == {"done": True}


async def test_what_ended_calls_were_given_and_returned_is_freed() -> None:
    """A timer keeps its copy of a call's context variables until it rings, even one that was cancelled."""

    async def give(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(3600, print)
        return {"text": "x" * 400_000}

    async with connect({"give": give}) as client, asyncio.timeout(30):
        await client.call_tool("give")
        tracemalloc.start()
        try:
            for _ in range(20):
                await client.call_tool("give", {"text": "y" * 400_000})
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 5_000_000  # not of every call
        finally:
            tracemalloc.stop()


# ---- Models ----


class Described:
    """Counts how often pydantic writes the JSON schema of a model made by `model()`."""

    def __init__(self) -> None:
        self.times = 0

    def model(self, **fields: Any) -> type[BaseModel]:
        def count(schema: dict[str, Any]) -> None:
            self.times += 1

        return create_model("Described", __config__=ConfigDict(json_schema_extra=count), **fields)


Marked = Field(json_schema_extra={"x-sensitive": True})


async def test_a_model_writes_its_json_schema_once_and_not_in_every_call() -> None:
    described = Described()
    model = described.model(n=(int, ...))
    schemas = {"input_schema": model, "output_schema": model}

    async def later(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return inputs

    def above(inputs: dict[str, Any], context: Any) -> Any:
        return context.executor.call("later", inputs, context)

    async def above_later(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("later", inputs)

    functions = {"now": echo, "later": later, "above": above, "above.later": above_later}
    modules: dict[str, Any] = {name: FunctionalModule(function, **schemas) for name, function in functions.items()}
    modules["stream"] = StreamingModule([{"n": 1}], **schemas)
    executor = Executor(registry_of(modules))
    async with connect(executor) as client:
        await client.call_tool("now", {"n": 1})
        times = described.times
        for module_id in modules:
            result = await client.call_tool(module_id, {"n": 1}, progress_callback=noting()[0])
            assert result.structured_content == {"n": 1}, module_id
            assert described.times == times, module_id
    await executor.call_async("now", {"n": 1})  # by itself the Executor does what it does without a server
    assert described.times == times + 3


class Address(BaseModel):
    street: str
    code: str = Marked


class Account(BaseModel):
    name: str = Field(min_length=2)
    pin: str = Marked
    home: Address | None = None
    others: dict[str, Address] = {}


class Aliased(BaseModel):
    card_number: str = Field(alias="cardNumber", json_schema_extra={"x-sensitive": True})


class Writing(BaseModel):
    """Says something else each time."""

    text: str
    times: ClassVar[int] = 0

    @classmethod
    def model_json_schema(cls, *arguments: Any, **options: Any) -> dict[str, Any]:
        cls.times += 1
        return {**super().model_json_schema(*arguments, **options), "x-times": cls.times}


HOME = {"street": "x", "code": "9"}
ACCOUNT = {"name": "Ada", "pin": "1234", "home": HOME, "others": {"a": {**HOME}}}
DATED = {"type": "object", "properties": {"on": {"type": "string", "format": "date"}}}
ODD = {
    "type": "object",
    "properties": {"a": {"$ref": "#/places/0"}, "b": {"type": "array", "prefixItems": [{"$ref": "#/places/0"}]}},
    "places": [{"type": "string", "x-sensitive": True}],
}
CALLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "a-model": (Account, ACCOUNT),
    "too-short": (Account, {**ACCOUNT, "name": "A"}),
    "missing": (Account, {"name": "Ada"}),
    "no-coercion": (Account, {**ACCOUNT, "pin": 1234}),
    "an-alias": (Aliased, {"cardNumber": "4000"}),
    "its-own-schema": (Writing, {"text": "x"}),
    "a-dict": (SECRETIVE, {"token": "abc"}),
    "no-mark": (create_model("Unmarked", password=(str, ...), day=(str, "")), {"password": "x"}),
    "no-mark-in-a-dict": ({"type": "object", "properties": {"api_key": {}}}, {"api_key": "x", "b": [1]}),
    "nothing-said": ({"type": "object"}, {"token": "abc", "n": 1}),
    "a-mark-in-an-odd-place": (ODD, {"a": "x", "b": ["y", 1]}),
    "of-a-loader": (SchemaLoader(Config()).generate_model(DATED, "Dated"), {"on": "no date"}),
}


class Spy(Middleware):
    """Keeps what apcore has redacted for its hooks."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
        self.seen.append(("before", inputs, context.redacted_inputs, context.redacted_output))

    def after(self, module_id: str, inputs: dict[str, Any], output: dict[str, Any], context: Any) -> None:
        self.seen.append(("after", inputs, output, context.redacted_inputs, context.redacted_output))

    def on_error(self, module_id: str, inputs: dict[str, Any], error: Exception, context: Any) -> None:
        self.seen.append(("error", inputs, str(error), context.redacted_inputs))


class Changing(Spy):
    """Changes the arguments where they stand."""

    def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
        super().before(module_id, {**inputs}, context)
        inputs["token"] = f"{inputs.get('token')}!"


@pytest.mark.parametrize("spy_class", [Spy, Changing])
@pytest.mark.parametrize(("schema", "arguments"), CALLED.values(), ids=CALLED.keys())
async def test_a_call_is_validated_and_redacted_as_by_the_executor_alone(
    schema: Any, arguments: dict[str, Any], spy_class: type[Spy], caplog: pytest.LogCaptureFixture
) -> None:
    spy = spy_class()
    registry = registry_of({"echo": FunctionalModule(echo, input_schema=schema, output_schema=schema)})
    executor = Executor(registry, middlewares=[spy])
    with contextlib.suppress(SchemaValidationError):
        await executor.call_async("echo", {**arguments})
    alone = spy.seen[:]
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("apcore.")]
    spy.seen.clear()
    caplog.clear()
    async with connect(executor) as client:
        await client.call_tool("echo", arguments)
        await client.call_tool("echo", arguments)
    assert spy.seen == alone * 2
    assert [record.getMessage() for record in caplog.records if record.name.startswith("apcore.")] == warnings * 2


async def test_a_step_of_the_users_own_sees_the_module_itself_and_its_model() -> None:
    seen: list[Any] = []

    class Look(BaseStep):
        async def execute(self, ctx: PipelineContext) -> StepResult:
            seen.append((self.name, ctx.module, ctx.module.input_schema))
            ctx.module.looked_at = len(seen)
            return StepResult("continue")

    schemas = {"input_schema": Account, "output_schema": Account}
    executor = Executor(registry_of({"echo": FunctionalModule(echo, **schemas)}))
    names = executor.current_strategy.step_names()
    for name in names[names.index("module_lookup") : -1]:
        executor.current_strategy.insert_after(name, Look(f"after_{name}"))
    module = executor.registry.get("echo")
    names = executor.current_strategy.step_names()
    async with connect(executor) as client:
        result = await client.call_tool("echo", ACCOUNT)
        assert not result.is_error
    own = [name for name in names if name.startswith("after_")]
    assert seen == [(name, module, Account) for name in own]
    assert all(each[1] is module for each in seen)
    assert module.looked_at == len(own)
    assert executor.current_strategy.step_names() == names


async def test_a_stream_is_found_wherever_its_module_has_it() -> None:
    """A protocol that is checked at run time looks for the attribute itself from Python 3.12 on."""

    async def chunks(inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"n": 1}
        yield {"m": 2}

    streamed: dict[str, Any] = {"annotations": ModuleAnnotations(streaming=True), "stream": chunks}
    modules: dict[str, Any] = {
        "on.the.class": StreamingModule([{"n": 1}, {"m": 2}]),
        "on.the.module": FunctionalModule(echo, **streamed),
        "of.models": StreamingModule([{"n": 1}, {"m": 2}], input_schema=create_model("Nothing")),
    }
    async with connect(modules) as client:
        for module_id in modules:
            note, told = noting()
            result = await client.call_tool(module_id, progress_callback=note)
            assert result.structured_content == {"n": 1, "m": 2}
            assert [message for _, _, message in told] == ['{"n":1}', '{"m":2}'], module_id


async def test_a_module_that_is_replaced_is_called_by_its_new_model() -> None:
    def version(marks: dict[str, Any]) -> FunctionalModule:
        model = create_model("Spell", word=(str, Field(json_schema_extra=marks)))
        return FunctionalModule(lambda inputs, context: {"seen": context.redacted_inputs}, input_schema=model)

    registry = registry_of({"spell": version({})})
    async with connect(registry) as client:
        for word, module in (("abc", None), (REDACTED_VALUE, version({"x-sensitive": True})), ("abc", version({}))):
            if module is not None:
                registry.unregister("spell")
                registry.register("spell", module)
            result = await client.call_tool("spell", {"word": "abc"})
            assert result.structured_content == {"seen": {"word": word}}


async def test_nothing_is_kept_of_a_model_whose_module_is_gone() -> None:
    model = create_model("Gone", n=(int, ...))
    registry = registry_of({"gone": FunctionalModule(echo, input_schema=model, output_schema=model)})
    gone = weakref.ref(model)
    del model
    async with connect(Executor(registry, config=WITHOUT_LIMIT)) as client, asyncio.timeout(30):
        await client.call_tool("gone", {"n": 1})
        registry.unregister("gone")
        await client.list_tools()
        await asyncio.to_thread(until, lambda: gc.collect() is not None and gone() is None, 10)


async def test_an_executor_that_several_servers_share_one_after_another_or_at_once_is_as_it_was() -> None:
    described = Described()
    model = described.model(n=(int, ...))
    executor = Executor(registry_of({"echo": FunctionalModule(echo, input_schema=model, output_schema=model)}))
    async with connect(executor) as first:
        assert (await first.call_tool("echo", {"n": 1})).structured_content == {"n": 1}
    steps = executor.current_strategy.steps[:]
    async with connect(executor) as second:
        async with connect(executor) as third:
            assert (await third.call_tool("echo", {"n": 3})).structured_content == {"n": 3}
        times = described.times
        assert (await second.call_tool("echo", {"n": 2})).structured_content == {"n": 2}
        assert described.times == times
        assert await executor.call_async("echo", {"n": 0}) == {"n": 0}
        assert described.times == times + 3
    assert executor.current_strategy.steps == steps, "no server puts its steps upon another's"
    assert executor.current_strategy.step_names() == Executor(executor.registry).current_strategy.step_names()
    assert executor.validate("echo", {"n": 1}).valid


async def test_where_apcore_looks_modules_up_in_another_way_a_call_is_slower_and_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if it had renamed what is not public: `_registry`."""
    released = threading.Event()
    execute = BuiltinModuleLookup.execute

    async def execute_by_another_name(self: Any, ctx: PipelineContext) -> StepResult:
        return await execute(SimpleNamespace(_registry=self.modules, **vars(self)), ctx)  # type: ignore[arg-type]

    async def wait(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await report_progress(context, 1)
        try:
            await asyncio.Event().wait()
        finally:
            released.set()
        return {}

    described = Described()
    model = described.model(n=(int, ...))
    modules = {"wait": wait, "echo": FunctionalModule(echo, input_schema=model, output_schema=model)}
    executor = Executor(registry_of(modules))
    lookup: Any = next(step for step in executor.current_strategy.steps if step.name == "module_lookup")
    lookup.modules = vars(lookup).pop("_registry")
    monkeypatch.setattr(BuiltinModuleLookup, "execute", execute_by_another_name)
    async with connect(executor) as client:
        times = described.times
        for number in range(3):
            assert (await client.call_tool("echo", {"n": number})).structured_content == {"n": number}
        assert described.times <= times + 4
        await cancel(await start(client, "wait"))
        assert await asyncio.to_thread(released.wait, 10)


@pytest.mark.parametrize("step", [BuiltinModuleLookup, BuiltinInputValidation, BuiltinOutputValidation])
async def test_where_apcore_wants_the_model_itself_a_call_is_slower_and_right(
    step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = step.execute

    async def execute_on_the_class(self: Any, ctx: PipelineContext) -> StepResult:
        result = await execute(self, ctx)
        assert ctx.module is not None
        assert issubclass(ctx.module.input_schema, BaseModel)
        return result

    monkeypatch.setattr(step, "execute", execute_on_the_class)
    async with connect({"echo": FunctionalModule(echo, input_schema=Account, output_schema=Account)}) as client:
        assert success_text(await client.call_tool("echo", ACCOUNT))
        refused = await client.call_tool("echo", {**ACCOUNT, "name": "A"})
        assert text_of(refused).startswith("Input validation failed:\n- name: ")


# ---- Trace context ----

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_a_calls_trace_is_the_clients_when_it_names_one_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    not_followed = ["garbage", f"00-{TRACE}-0000000000000000-01", None, 7]
    async with connect({"trace": lambda inputs, context: {"id": context.trace_id}}) as client:
        for traceparent in (f"00-{TRACE}-00f067aa0ba902b7-01", *not_followed):
            meta: Any = {"traceparent": traceparent}
            result = await client.call_tool("trace", meta=meta)
            trace_id = (result.structured_content or {})["id"]
            assert (trace_id == TRACE) == (traceparent not in not_followed)
            assert len(trace_id) == 32
            assert re.search(rf"Tool call ended: trace, [\d.]+ ms, trace {trace_id}", caplog.text)


async def ask_below(inputs: dict[str, Any], context: Any) -> Any:
    return await context.executor.call_async("ask", {}, context)


def ask_from_sync(inputs: dict[str, Any], context: Any) -> Any:
    return context.executor.call("ask", {}, context)


# ---- Questions, in both eras ----


ANSWERS: list[tuple[ElicitResult, dict[str, Any] | None]] = [
    (accept(name="Ada"), {"name": "Ada"}),
    (accept(), None),
    (accept(name=7), None),
    (ElicitResult(action="decline"), None),
    (ElicitResult(action="cancel", content={"name": "Ada"}), None),
]


@pytest.mark.requirement("FR-EXT-002")
async def test_a_module_is_given_what_its_user_filled_in_or_none(mode: str) -> None:
    given = ElicitResult(action="decline")
    arguments, asked = asking(lambda params: given)
    modules = {"ask": ask, "ask_below": ask_below, "ask_from_sync": ask_from_sync}
    async with connect(modules, mode=mode, client=arguments) as client, asyncio.timeout(20):
        for module_id in modules:
            for given, seen in ANSWERS:  # noqa: B007  the callback above reads it
                assert (await client.call_tool(module_id)).structured_content == {"answer": seen}, module_id
    assert [(p.message, p.requested_schema) for p in asked] == [("Who are you?", SCHEMA)] * 15


async def test_a_question_is_a_bare_confirmation_or_says_in_place_what_its_schema_refers_to(mode: str) -> None:
    """As the schema of a pydantic model with an enum does; a form knows no references."""
    size = {"type": "string", "enum": ["small", "large"]}
    closed = {"type": "object", "additionalProperties": False}
    referring = {**closed, "properties": {"size": {"$ref": "#/$defs/Size"}}, "$defs": {"Size": size}}

    async def choose(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        question = inputs["question"]
        return {"answer": await elicit(context, question, referring if "size" in question else None)}

    answers = {"Go on?": accept(), "": ElicitResult(action="decline"), "Which size?": accept(size="large")}
    arguments, asked = asking(lambda params: answers[params.message])
    async with connect({"choose": choose}, mode=mode, client=arguments) as client, asyncio.timeout(20):
        for question, given in answers.items():
            result = await client.call_tool("choose", {"question": question})
            assert result.structured_content == {"answer": given.content if given.action == "accept" else None}
    assert [p.requested_schema["properties"] for p in asked] == [{}, {}, {"size": size}]  # all that a client reads


async def test_a_module_that_asks_in_turn_or_at_once_runs_once_and_gets_each_answer(mode: str) -> None:
    effects: list[str] = []

    async def interview(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        answers = []
        for name in ("one", "two"):
            effects.append(f"before {name}")
            answers.append(await elicit(context, name, SCHEMA))
        both = (elicit(context, name, SCHEMA, key=name) for name in ("three", "four"))
        answers += await asyncio.gather(*both)
        effects.append("end")
        return {"answers": answers}

    arguments, asked = asking(lambda params: accept(name=params.message.upper()))
    async with connect({"interview": interview}, mode=mode, client=arguments) as client, asyncio.timeout(20):
        result = await client.call_tool("interview")
    messages = [p.message for p in asked]
    assert (messages[:2], sorted(messages[2:])) == (["one", "two"], ["four", "three"])
    assert result.structured_content == {"answers": [{"name": name} for name in ("ONE", "TWO", "THREE", "FOUR")]}
    assert effects == ["before one", "before two", "end"]


async def test_a_question_that_is_given_up_can_be_asked_again(mode: str) -> None:
    """In both eras; from 2026-07-28 on, the retry of the first is answered with the second."""
    asked: list[str] = []

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        if params.message == "First?":
            await asyncio.wait_for(asyncio.to_thread(given_up.wait, 10), 20)
        return accept(name=f"to {params.message}")

    given_up = threading.Event()

    async def ask_twice(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(elicit(context, "First?", SCHEMA), 0.2)
        asyncio.get_running_loop().call_later(0.2, given_up.set)  # once it has asked again
        return {"answer": await elicit(context, "Second?", SCHEMA)}

    arguments = {"elicitation_callback": answer}
    async with connect({"ask": ask_twice}, mode=mode, client=arguments) as client, asyncio.timeout(30):
        result = await client.call_tool("ask")
        given_up.set()  # or what a server that has ended no longer sets would be waited for
    assert result.structured_content == {"answer": {"name": "to Second?"}}
    assert asked == ["First?", "Second?"]


async def test_what_a_module_left_running_can_ask_nobody_once_its_result_was_fetched() -> None:
    """From 2026-07-28: it ended while its question was open, and the retry is no way to ask another."""
    given_up, late = threading.Event(), list[asyncio.Task[Any]]()

    async def ask_late(context: Any, fetched: asyncio.Event) -> Any:
        await fetched.wait()
        return await elicit(context, "Late?", SCHEMA)

    async def linger(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        late.append(asyncio.create_task(ask_late(context, fetched)))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(elicit(context, "Early?", SCHEMA, key="name"), 0.2)
        given_up.set()
        return {"done": True}

    async def go_on(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        fetched.set()
        return {"answer": await asyncio.wait_for(late[0], 10)}

    fetched = asyncio.Event()
    async with wired({"linger": linger, "go.on": go_on, "echo": echo}) as wire:
        _, _, state = await wire.question("linger")
        assert await asyncio.to_thread(given_up.wait, 10)
        await wire.call("echo")  # by then it has ended
        given = {"request_state": state, "input_responses": {"name": accept(name="Ada")}}
        assert (await wire.call("linger", **given)).structured_content == {"done": True}
        assert (await wire.call("go.on")).structured_content == {"answer": None}


async def test_a_module_that_has_timed_out_is_not_given_the_answer_to_its_question() -> None:
    """Nor may it ask another: it would act on it after its caller was told that it failed."""
    told: queue.Queue[Any] = queue.Queue()
    timed_out = threading.Event()

    def sync(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for question in ("Delete?", "Delete now?"):
            try:
                told.put(asyncio.run(elicit(context, question, SCHEMA)))
            except ExecutionCancelledError:
                told.put("cancelled")
        return {}

    async def above(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            await context.executor.call_async("sync", {}, context)
        except ModuleTimeoutError:
            timed_out.set()
        return {"told": [await asyncio.to_thread(told.get, timeout=10) for _ in range(2)]}

    asked: list[str] = []

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        assert await asyncio.to_thread(timed_out.wait, 10)
        return accept(name="Ada")

    modules = {"sync": FunctionalModule(sync, resources={"timeout": 300}), "above": above}
    async with connect(modules, client={"elicitation_callback": answer}) as client, asyncio.timeout(30):
        assert (await client.call_tool("above")).structured_content == {"told": ["cancelled"] * 2}
    assert asked == ["Delete?"]


async def test_whatever_has_no_client_behind_it_is_told_and_asked_nothing() -> None:
    for context in (object(), MagicMock(), SimpleNamespace(data=None), None):
        await report_progress(context, 1)
        assert await elicit(context, "") is None


def form(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


QUESTIONS: dict[str, Any] = {
    "nan": form(n={"type": "number", "default": math.nan}),
    "no-json": form(n={"type": "string", "default": object()}),
    "nested": form(n=form()),
    "list": form(n={"type": "array", "items": {"type": "string"}}),
    "reference": form(n={"$ref": "#/$defs/n"}),
    "no-schema": form(n={"type": "string", "minLength": "x"}),
    "a-union": form() | {"anyOf": [form(n={"type": "string"})]},
    "any-name": form() | {"patternProperties": {"^(a+)+$": {"type": "string"}}},
    "a-pattern-that-looks-ahead": form(n={"type": "string", "pattern": "(?=a)"}),
    "such-a-pattern-inside": form(n={"type": "string", "allOf": [{"pattern": "^(a)\\1$"}]}),
    "an-unknown-format": form(n={"type": "string", "format": "uuid"}),
    "a-default-of-another-type": form(n={"type": "string", "default": 7}),
    "options-without-titles": form(n={"type": "array", "items": {"anyOf": [{"const": "a"}]}}),
    "numbers-to-choose": form(n={"type": "array", "items": {"type": "string", "enum": [1, 2]}}),
    "no-type": form(n={"enum": ["a"]}),
    "two-types": form(n={"type": ["string", "null"]}),
    "no-object": {"type": "string"},
    "a-list": [1],
}


TITLED = [{"const": "s", "title": "Small"}, {"const": "l", "title": "Large"}]
FIELDS: dict[str, tuple[dict[str, Any], Any, Any]] = {  # with an answer that fits and one that does not
    "text": ({"type": "string", "minLength": 2, "default": "ab", "title": "T", "description": "D"}, "abc", "a"),
    "date": ({"type": "string", "format": "date"}, "2026-01-02", 7),
    "address": ({"type": "string", "format": "uri", "maxLength": 3}, "a:b", "a:bc"),
    "pattern": ({"type": "string", "pattern": "^[a-z]+$"}, "abc", "a1"),
    "pattern in part": ({"type": "string", "allOf": [{"pattern": "[0-9]"}]}, "a1", "abc"),
    "one": ({"type": "string", "enum": ["s", "l"], "format": "size", "default": "s"}, "l", "m"),
    "one by name": ({"type": "string", "enum": ["s", "l"], "enumNames": ["Small", "Large"]}, "s", "Small"),
    "one by title": ({"type": "string", "oneOf": TITLED, "format": "size"}, "l", "Large"),
    "some": ({"type": "array", "items": {"type": "string", "enum": ["s", "l"]}, "maxItems": 1}, ["s"], ["s", "l"]),
    "some by title": ({"type": "array", "items": {"anyOf": TITLED}, "default": ["s"]}, ["l", "s"], ["m"]),
    "integer": ({"type": "integer", "minimum": 1, "default": 1}, 2, 0),
    "number": ({"type": "number", "maximum": 1.5, "default": None}, 1.25, 2),
    "yes or no": ({"type": "boolean", "default": True}, False, "no"),
}


async def test_each_kind_of_field_that_forms_have_can_be_asked_for_and_holds(mode: str) -> None:
    async def wonder(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"answer": await elicit(context, inputs["field"], form(n=FIELDS[inputs["field"]][0]))}

    answer = 1
    arguments, asked = asking(lambda params: accept(n=FIELDS[params.message][answer]))
    async with connect({"wonder": wonder}, mode=mode, client=arguments) as client, asyncio.timeout(20):
        for field, (schema, right, _) in FIELDS.items():
            for answer in (1, 2):
                result = await client.call_tool("wonder", {"field": field})
                assert result.structured_content == {"answer": {"n": right} if answer == 1 else None}, (field, answer)
            assert asked[-1].requested_schema == form(n=schema)


async def test_an_answer_does_not_keep_the_server_busy_by_a_pattern() -> None:
    """Python's `re` takes six seconds for these 27 characters, and twice as long for each that follows."""

    async def wonder(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"answer": await elicit(context, "Which?", form(n={"type": "string", "pattern": "^(a+)+$"}))}

    answers = iter(["a" * 26 + "!", "a" * 26])
    async with connect({"wonder": wonder}, client=asking(lambda params: accept(n=next(answers)))[0]) as client:
        async with asyncio.timeout(5):
            assert (await client.call_tool("wonder")).structured_content == {"answer": None}
        assert (await client.call_tool("wonder")).structured_content == {"answer": {"n": "a" * 26}}


async def test_an_answer_that_chooses_more_than_there_is_keeps_nobody_waiting() -> None:
    """Each of its items would be looked for among all options, while no other client is answered."""
    titled = [{"const": str(number), "title": f"Number {number}"} for number in range(20)]
    schema = {"type": "array", "items": {"anyOf": titled}}

    async def wonder(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"answer": await elicit(context, "Which?", form(n=schema))}

    answers = iter([["19"] * 100_000, ["19", "3"]])
    async with connect({"wonder": wonder}, client=asking(lambda params: accept(n=next(answers)))[0]) as client:
        async with asyncio.timeout(5):
            assert (await client.call_tool("wonder")).structured_content == {"answer": None}
        assert (await client.call_tool("wonder")).structured_content == {"answer": {"n": ["19", "3"]}}


@pytest.mark.parametrize(("mode", "user"), [(MODERN, "yes"), (HANDSHAKE, "cannot")])
async def test_a_question_that_no_form_can_ask_is_a_value_error_to_the_module(mode: str, user: str) -> None:
    async def wonder(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            return {"answer": await elicit(context, "Which?", QUESTIONS[inputs["which"]], key="name")}
        except ValueError as error:
            return {"told": bool(str(error)), "then": await elicit(context, f"{inputs['which']}\ud800", SCHEMA)}

    arguments, asked = asking(accept(name="Ada") if user == "yes" else None)
    async with connect({"wonder": wonder}, mode=mode, client=arguments) as client, asyncio.timeout(20):
        results = {
            which: (await client.call_tool("wonder", {"which": which})).structured_content for which in QUESTIONS
        }
    expected = {"told": True, "then": {"name": "Ada"} if user == "yes" else None}
    assert results == dict.fromkeys(QUESTIONS, expected)
    assert [p.message for p in asked] == ([f"{which}?" for which in QUESTIONS] if user == "yes" else [])


@pytest.mark.requirement("FR-EXT-003")
async def test_outside_mcp_nobody_is_asked_and_what_stands_under_the_keys_takes_names_as_the_functions_do() -> None:
    assert (MCP_PROGRESS_KEY, MCP_ELICIT_KEY) == ("_mcp_progress", "_mcp_elicit")

    async def by_key(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        if not context.data.keys() & {MCP_PROGRESS_KEY, MCP_ELICIT_KEY}:
            return {}
        await context.data[MCP_PROGRESS_KEY](progress=1, total=2, message="half")
        return {"answer": await context.data[MCP_ELICIT_KEY](message="Who?", requested_schema=SCHEMA, key="name")}

    registry = registry_of({"ask": ask, "ask_below": ask_below, "by_key": by_key})
    for module_id, output in (("ask", {"answer": None}), ("ask_below", {"answer": None}), ("by_key", {})):
        assert await Executor(registry).call_async(module_id, {}) == output
    async with connect(registry, client=asking(accept(name="Ada"))[0]) as client, asyncio.timeout(20):
        note, told = noting()
        result = await client.call_tool("by_key", progress_callback=note)
    assert (result.structured_content, told) == ({"answer": {"name": "Ada"}}, [(1, 2, "half")])


@pytest.mark.parametrize(("approval", "told"), [("require", UNASKED), ("auto", '{"ran":true}')])
async def test_where_an_answer_could_not_come_back_nobody_is_asked(mode: str, approval: str, told: str) -> None:
    """A server without sessions may stand behind a load balancer: the retry could reach another one."""
    arguments, asked = asking(accept(name="Ada"))
    options: dict[str, Any] = {"mode": mode, "client": arguments, "stateless": True, "approval": approval}
    async with connect({"ask": ask, "wipe": guarded([])}, **options) as client, asyncio.timeout(20):
        assert (await client.call_tool("ask")).structured_content == {"answer": None}
        assert text_of(await client.call_tool("wipe")) == told
    assert asked == []


async def test_questions_are_asked_over_stdio_and_sse_too() -> None:
    on_stdio = program("import conftest, support; serve(conftest.registry_of({'ask': support.ask}))")
    arguments, _ = asking(accept(name="Ada"))
    with serving(registry_of({"ask": ask}), transport="sse") as url:
        servers: list[Any] = [stdio(on_stdio, **ENVIRONMENT), f"{url}/sse"]
        for server in servers:
            async with client_of(server, HANDSHAKE, **arguments) as client:
                assert (await client.call_tool("ask")).structured_content == {"answer": {"name": "Ada"}}


# ---- Execution ----


@pytest.mark.requirement("FR-EXEC-001", "FR-EXEC-004")
async def test_sync_and_async_modules_get_the_arguments_and_answer() -> None:
    def now(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"got": inputs, "thread": threading.current_thread().name}

    async def later(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return now(inputs, context)

    threads = set()
    async with connect({"demo.sync": now, "demo.async": later}) as client:
        for tool in ("demo.sync", "demo.async"):
            for arguments in ({"a": {"b": [1, None, "é", 1.5, True]}}, {}, None):
                answer = parsed(success_text(await client.call_tool(tool, arguments)))
                assert answer["got"] == (arguments or {})
            threads.add(answer["thread"])
    assert len(threads) == 2, "a sync module must not run on the event loop"


class Stamp(Middleware):
    def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {**inputs, "before": module_id}

    def after(self, module_id: str, inputs: dict[str, Any], output: dict[str, Any], context: Any) -> dict[str, Any]:
        return {**output, "after": module_id}


@pytest.mark.requirement("FR-EXEC-003", "FR-EXEC-005", "NFR-SEC-001")
async def test_the_executor_that_was_given_keeps_its_acl_middleware_and_timeout() -> None:
    async def never(inputs: dict[str, Any], context: Any) -> None:
        await asyncio.Event().wait()

    registry = registry_of({"open.door": echo, "shut.door": echo, "open.slow": never})
    acl = ACL([ACLRule(callers=["*"], targets=["open.*"], effect="allow")], default_effect="deny")
    config = Config({"executor": {"default_timeout": 70, "global_timeout": 60_000}})
    executor = Executor(registry, acl=acl, middlewares=[Stamp()], config=config)
    async with connect(executor) as client:
        opened = await client.call_tool("open.door", {"a": 1})
        shut = await client.call_tool("shut.door", {"a": 1})
        slow = await client.call_tool("open.slow", {})
    assert parsed(success_text(opened)) == {"a": 1, "before": "open.door", "after": "open.door"}
    assert (shut.is_error, shut.content[0].model_dump()["text"]) == (True, "Access denied")
    assert (slow.is_error, slow.content[0].model_dump()["text"]) == (True, "Module timed out after 70ms")
    assert to_openai_tools(executor) == to_openai_tools(registry)


@pytest.mark.parametrize("ending", [SystemExit(3), KeyboardInterrupt()], ids=["exit", "interrupt"])
async def test_a_module_that_ends_the_process_ends_neither_its_server_nor_the_loop_that_hosts_it(ending: Any) -> None:
    """asyncio lets both out of any task that raises them, and so out of the loop."""

    def now(inputs: dict[str, Any], context: Any) -> None:
        raise ending

    async def later(inputs: dict[str, Any], context: Any) -> None:
        raise ending

    async def above(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("later", {}, context)

    modules = {"now": now, "later": later, "above": above, "echo": echo}
    async with async_serve(registry_of(modules)) as app, hosting(app) as url, client_of(url) as client:
        for module_id in ("now", "later", "above"):
            assert text_of(await client.call_tool(module_id)) == "Internal error occurred"
        assert (await client.call_tool("echo", {"a": 1})).structured_content == {"a": 1}


@pytest.mark.requirement("FR-EXEC-004")
async def test_forty_blocked_sync_calls_hold_up_nobody_and_keep_their_answers_apart() -> None:
    count, gate = 40, Gate()

    def blocked(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        gate.enter()
        return {"number": inputs["number"]}

    async def quick(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"released": gate.is_open.is_set()}

    try:
        modules = {"demo.blocked": blocked, "demo.quick": quick, "demo.sync": echo}
        async with connect(modules) as client, asyncio.timeout(40):
            calls = [asyncio.create_task(client.call_tool("demo.blocked", {"number": n})) for n in range(count)]
            await gate.entered(count)
            assert parsed(success_text(await client.call_tool("demo.quick", {}))) == {"released": False}
            assert parsed(success_text(await client.call_tool("demo.sync", {"a": 1}))) == {"a": 1}
            assert not any(call.done() for call in calls)
            gate.open()
            results = await asyncio.gather(*calls)
            threads = threading.active_count()
            for _ in range(5):
                await client.call_tool("demo.sync", {})
            assert threading.active_count() < threads + 5, "the threads that have become free are used again"
    finally:
        gate.open()
    assert [parsed(success_text(result)) for result in results] == [{"number": n} for n in range(count)]


async def test_a_module_that_blocks_the_event_loop_is_named_and_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As soon as it lets go. One that waits, one in a thread and one that calls it are not to blame."""
    monkeypatch.setattr("apcore_mcp.core._BLOCKED_SECONDS", 0.3)

    async def blocks(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        threading.Event().wait(0.4)
        return {}

    class Streaming(FunctionalModule):
        async def stream(self, inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
            yield {"n": 1}
            yield await blocks(inputs, context)

    async def waits(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await asyncio.sleep(0.8)
        return {}

    def in_a_thread(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        time.sleep(0.8)
        return {}

    async def calls(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("blocks", {}, context)

    stream = Streaming(echo, annotations=ModuleAnnotations(streaming=True))
    functions = {"blocks": blocks, "waits": waits, "thread": in_a_thread, "calls": calls, "stream": stream}
    no_limit = Config({"executor": {"default_timeout": 0}})  # what a module calls runs in its own task then
    async with connect(Executor(registry_of(functions), config=no_limit)) as client:
        await asyncio.gather(*(client.call_tool(name, {}) for name in ("waits", "thread", "calls")))
        await client.call_tool("stream", {}, progress_callback=noting()[0])
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    said = "Module {} blocked the event loop: for 0.4 s nobody was served. What blocks needs a thread"
    assert [re.sub(r"for \d\.\d s", "for 0.4 s", text) for text in warnings] == [
        said.format("blocks"),
        said.format("stream"),
    ]
