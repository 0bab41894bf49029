"""How modules run in the calls of a server: threads, time limits, cancellation, models and hooks (FR-EXEC-*)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import queue
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from apcore import ACL, ACLRule, Config, Executor, Middleware, SchemaValidationError
from apcore.builtin_steps import BuiltinInputValidation, BuiltinModuleLookup, BuiltinOutputValidation
from apcore.pipeline import BaseStep, PipelineContext, StepResult
from apcore.schema import SchemaLoader
from apcore.utils.redaction import REDACTED_VALUE
from conftest import Clock, FunctionalModule, client_of, connect, echo, hosting, registry_of
from pydantic import BaseModel, ConfigDict, Field, create_model
from support import (
    ERAS,
    MARK,
    MARKED,
    SCHEMA,
    SECRETIVE,
    STRING,
    WITHOUT_LIMIT,
    Caplog,
    Gate,
    Monkeypatch,
    StreamingModule,
    Wire,
    accept,
    asking,
    calls,
    cancel_call,
    everything_logged,
    hosted,
    is_set_in_time,
    noting,
    of,
    on_clock,
    parsed,
    stage,
    start_call,
    success_text,
    text_of,
    waiting,
)

from apcore_mcp import async_serve, elicit, report_progress, to_openai_tools

# ---- Running ----


@pytest.mark.requirement("FR-EXEC-003", "FR-EXEC-005", "NFR-SEC-001")
async def test_an_executor_keeps_acl_middleware_and_timeout(caplog: Caplog) -> None:
    """The log says of a timeout what sets it."""
    registry = registry_of({"open.door": echo, "shut.door": echo, "open.slow": waiting()[0]})
    acl = ACL([ACLRule(callers=["*"], targets=["open.*"], effect="allow")], default_effect="deny")
    config = Config({"executor": {"default_timeout": 70, "global_timeout": 60_000}})
    executor = Executor(registry, acl=acl, config=config)
    executor.use_before(lambda module_id, inputs, context: {**inputs, "before": module_id})
    executor.use_after(lambda module_id, inputs, output, context: {**output, "after": module_id})
    async with connect(executor) as client:
        opened = await client.call_tool("open.door", {"a": 1})
        shut = await client.call_tool("shut.door", {"a": 1})
        slow = await client.call_tool("open.slow", {})
    assert parsed(success_text(opened)) == {"a": 1, "before": "open.door", "after": "open.door"}
    assert text_of(shut) == "Access denied"
    assert text_of(slow) == "Module timed out after 70ms"
    assert "timed out after 70ms (--timeout and the module's own resources say how long it may take)" in caplog.text
    assert to_openai_tools(executor) == to_openai_tools(registry)


@pytest.mark.requirement("FR-EXEC-001", "FR-EXEC-004")
async def test_forty_blocked_sync_calls_hold_up_nobody() -> None:
    count, gate = 40, Gate()

    def blocked(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        gate.enter()
        return inputs

    async def quick(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return inputs

    try:
        modules = {"demo.blocked": blocked, "demo.quick": quick, "demo.sync": echo}
        async with connect(modules) as client, asyncio.timeout(40):
            calls = [asyncio.create_task(client.call_tool("demo.blocked", {"number": n})) for n in range(count)]
            await gate.entered(count)
            for name in ("demo.quick", "demo.sync"):
                assert (await client.call_tool(name, {"a": 1})).structured_content == {"a": 1}
            assert not any(call.done() for call in calls)
            gate.open()
            assert [(await call).structured_content for call in calls] == [{"number": n} for n in range(count)]
            threads = threading.active_count()
            for _ in range(5):
                await client.call_tool("demo.sync", {})
            assert threading.active_count() < threads + 5, "the threads that have become free are used again"
    finally:
        gate.open()


# ---- Cancellation ----


async def test_a_cancelled_call_leaves_no_task_behind(mode: str, caplog: Caplog) -> None:
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
            await cancel_call(await start_call(client, module_id))
            ended = {"told": module_id.removesuffix("_below"), "token_set": True}
            assert (await client.call_tool("ended")).structured_content == ended
            while left := await tasks() - before:
                assert left, "the timeout above is the limit"
    gc.collect()  # "Future exception was never retrieved" and the like
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    assert "hunter2" not in caplog.text


async def test_nothing_is_kept_of_a_module_that_is_gone() -> None:
    class Output(dict[str, Any]):
        """Unlike a dict, one can ask whether it is still there."""

    class Gone(FunctionalModule):
        def __init__(self) -> None:
            self.model = create_model("Gone", n=(int, ...))
            super().__init__(self.run, input_schema=self.model, output_schema=self.model)

        def run(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
            output = Output(inputs)
            kept.append(weakref.ref(output))
            return output

    registry = registry_of({"gone": Gone()})
    kept: list[weakref.ref[Any]] = [weakref.ref(registry.get("gone")), weakref.ref(registry.get("gone").model)]

    # The timer of a limit, though it is cancelled, would keep what it was set in.
    async with connect(Executor(registry, config=WITHOUT_LIMIT)) as client, asyncio.timeout(30):
        assert (await client.call_tool("gone", {"n": 1})).structured_content == {"n": 1}
        registry.unregister("gone")
        while any(reference() for reference in kept):
            await client.list_tools()  # after the first, the list is another
            gc.collect()


@on_clock
async def test_a_server_that_ends_cancels_after_the_grace_period(clock: Clock, caplog: Caplog) -> None:
    records: queue.Queue[list[Any]] = queue.Queue()
    modules = ["wait", "wait_streaming", "watch_token"]

    async def parked(inputs: dict[str, Any], context: Any) -> None:
        try:
            await elicit(context, "Who?", SCHEMA)
        finally:
            records.put(["parked", context.cancel_token])

    registry = stage(records)
    registry.register("parked", FunctionalModule(parked))
    server = async_serve(Executor(registry, config=WITHOUT_LIMIT))
    async with hosting(await server.__aenter__()) as url, contextlib.AsyncExitStack() as stack:
        calls = []
        for mode in ERAS:
            client = await stack.enter_async_context(client_of(url, mode, **asking(accept())[0]))
            calls += [await start_call(client, module_id) for module_id in modules]
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
            await cancel_call(call)
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []  # no traceback


async def test_no_coroutine_outlives_its_call() -> None:
    """Nor what it called, without its context; but what a module has to clean up is not cut short."""
    running, release, ended = asyncio.Event(), asyncio.Event(), list[str]()

    async def work(inputs: dict[str, Any], context: Any) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            await release.wait()
            ended.append("work")

    async def above(inputs: dict[str, Any], context: Any) -> Any:
        try:
            return await context.executor.call_async("work", {})
        finally:
            ended.append("above")

    limited = FunctionalModule(above, resources={"timeout": 300})
    async with hosted({"work": work, "cancelled": above, "timed.out": limited}) as client, asyncio.timeout(20):
        for module_id in ("cancelled", "timed.out"):
            running.clear(), release.clear(), ended.clear()
            call = asyncio.create_task(client.call_tool(module_id))
            await running.wait()
            if module_id == "cancelled":
                await cancel_call(call)
            else:
                assert text_of(await call) == "Module timed out after 300ms"
            for _ in range(3):  # the server has seen the end, and all that it sets off, when it answers these
                await client.list_tools()
            release.set()
            while sorted(ended) != ["above", "work"]:
                await client.list_tools()


async def test_a_pool_outlives_the_call_that_started_it() -> None:
    """A pool or a browser, started by whichever call comes first, serves the later ones."""
    running = asyncio.Event()
    pool: list[asyncio.Task[None]] = []

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        if not pool:
            pool.append(asyncio.create_task(asyncio.sleep(3600)))
        if inputs:
            running.set()
            await asyncio.shield(pool[0])
        return {"pool": "runs" if not pool[0].done() else "gone"}

    async with hosted({"work": work}) as client, asyncio.timeout(20):
        call = asyncio.create_task(client.call_tool("work", {"wait": True}))
        await running.wait()
        await cancel_call(call)
        for _ in range(3):
            assert (await client.call_tool("work")).structured_content == {"pool": "runs"}


async def test_a_silent_stream_ends_with_its_time() -> None:
    closed: list[str] = []

    class Stream(StreamingModule):
        async def stream(self, inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
            try:
                yield {"n": 1}
                if inputs["then"] == "hangs":
                    await asyncio.Event().wait()
                elif inputs["then"] == "fails":
                    raise TimeoutError("the database has not answered")
            finally:
                closed.append(inputs["then"])

    config = Config(data={"executor": {"global_timeout": 500, "default_timeout": 400}})
    told = {"ends": '{"n":1}', "hangs": "Module timed out after 500ms", "fails": "Internal error occurred"}
    async with hosted(Executor(registry_of({"stream": Stream([])}), config=config)) as client, asyncio.timeout(20):
        for then, text in told.items():
            result = await client.call_tool("stream", {"then": then}, progress_callback=noting()[0])
            assert text_of(result) == text
            while then not in closed:
                await client.list_tools()


async def test_a_modules_own_timeout_is_an_error_like_any_other(caplog: Caplog) -> None:
    """Only apcore's limit is one. The log has its text, and the traceback as far as the module."""

    def sync(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        raise TimeoutError("bus 12 did not answer")

    async def later(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return sync(inputs, context)

    def wrapped(inputs: dict[str, Any], context: Any) -> Any:
        return later(inputs, context)

    functions = {"sync": sync, "later": later, "wrapped": wrapped}
    modules = functions | {f"above.{name}": calls(name) for name in functions}
    async with connect(modules, mask_errors=False) as client:
        for name in modules:
            caplog.clear()
            told = text_of(await client.call_tool(name))
            assert told == "Internal error occurred: TimeoutError: bus 12 did not answer"
            assert "in sync" in everything_logged(caplog), name
            assert "--timeout" not in caplog.text


# ---- Models and hooks ----


class Described:
    """Counts how often pydantic writes the JSON schema of a model made by `model()`."""

    def __init__(self) -> None:
        self.times = 0

    def model(self, **fields: Any) -> type[BaseModel]:
        def count(schema: dict[str, Any]) -> None:
            self.times += 1

        return create_model("Described", __config__=ConfigDict(json_schema_extra=count), **fields)


async def test_a_model_is_described_once_for_all_calls() -> None:
    described = Described()
    model = described.model(n=(int, ...))
    schemas = {"input_schema": model, "output_schema": model}

    async def later(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return inputs

    def above(inputs: dict[str, Any], context: Any) -> Any:
        return context.executor.call("later", inputs)

    functions = {"now": echo, "later": later, "above": above, "above.later": calls("later", n=1)}
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


class Address(BaseModel):
    street: str
    code: str = MARKED


class Account(BaseModel):
    name: str = Field(min_length=2)
    pin: str = MARKED
    home: Address | None = None
    others: dict[str, Address] = {}


class Aliased(BaseModel):
    card_number: str = Field(alias="cardNumber", json_schema_extra=MARK)


HOME = {"street": "x", "code": "9"}
ACCOUNT = {"name": "Ada", "pin": "1234", "home": HOME, "others": {"a": {**HOME}}}
DATED = of(on={**STRING, "format": "date"})
PLACE = {"$ref": "#/places/0"}
ODD = {**of(a=PLACE, b={"type": "array", "prefixItems": [PLACE]}), "places": [{**STRING, **MARK}]}
CALLED: dict[str, tuple[Any, dict[str, Any]]] = {
    "a_model": (Account, ACCOUNT),
    "too_short": (Account, {**ACCOUNT, "name": "A"}),
    "an_alias": (Aliased, {"cardNumber": "4000"}),
    "a_dict": (SECRETIVE, {"token": "abc"}),
    "no_mark": (create_model("Unmarked", password=(str, ...), day=(str, "")), {"password": "x"}),
    "nothing_said": ({"type": "object"}, {"token": "abc", "n": 1}),
    "a_mark_in_an_odd_place": (ODD, {"a": "x", "b": ["y", 1]}),
    "of_a_loader": (SchemaLoader(Config()).generate_model(DATED, "Dated"), {"on": "no date"}),
}


class Spy(Middleware):
    """Keeps what apcore has redacted for its hooks."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
        self.seen.append(("before", inputs, context.redacted_inputs))

    def after(self, module_id: str, inputs: dict[str, Any], output: dict[str, Any], context: Any) -> None:
        self.seen.append(("after", inputs, context.redacted_inputs))

    def on_error(self, module_id: str, inputs: dict[str, Any], error: Exception, context: Any) -> None:
        self.seen.append(("error", inputs, str(error), context.redacted_inputs))


class Changing(Spy):
    """Changes the arguments where they stand."""

    def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
        super().before(module_id, {**inputs}, context)
        inputs["token"] = f"{inputs.get('token')}!"


@pytest.mark.skipif(version("apcore") == "0.32.0", reason="its redaction follows no references")
@pytest.mark.parametrize("kind", [Spy, Changing])
async def test_arguments_are_validated_and_redacted_as_by_apcore(kind: type[Spy], caplog: Caplog) -> None:
    spy = kind()
    echoes = {name: FunctionalModule(echo, input_schema=s, output_schema=s) for name, (s, _) in CALLED.items()}
    executor = Executor(registry_of(echoes), middlewares=[spy])

    def told() -> tuple[list[Any], set[str]]:
        """What the hooks and apcore's log have seen since the last time."""
        warnings = {record.getMessage() for record in caplog.records if record.name.startswith("apcore.")}
        seen, spy.seen = spy.seen, []
        caplog.clear()
        return seen, warnings

    async with connect(executor) as client:
        for name, (_, arguments) in CALLED.items():
            with contextlib.suppress(SchemaValidationError):
                await executor.call_async(name, {**arguments})
            alone, warnings = told()
            for _ in range(2):
                await client.call_tool(name, arguments)
                assert told() == (alone, warnings), name


async def test_hooks_get_the_output_as_it_is_written() -> None:
    """By the module's own model: with its defaults and without what it does not name; and redacted by its marks."""
    seen: list[Any] = []
    model = create_model("Model", user=(str, ...), day=(str, "today"), pin=(str, MARKED))
    executor = Executor(registry_of({"echo": FunctionalModule(echo, output_schema=model)}))
    executor.use_after(lambda module_id, inputs, output, context: seen.append((output, context.redacted_output)))
    async with connect(executor) as client:
        await client.call_tool("echo", {"user": "Ada", "pin": "1234", "more": 1})
    output = {"user": "Ada", "day": "today", "pin": "1234"}
    assert seen == [(output, {**output, "pin": REDACTED_VALUE})]


async def test_a_users_own_step_sees_the_module_itself() -> None:
    seen: list[Any] = []

    class Look(BaseStep):
        async def execute(self, ctx: PipelineContext) -> StepResult:
            seen.append((self.name, id(ctx.module), ctx.module.input_schema))
            ctx.module.looked_at = len(seen)
            return StepResult("continue")

    module = FunctionalModule(echo, input_schema=Account, output_schema=Account)
    executor = Executor(registry_of({"echo": module}))
    names = executor.current_strategy.step_names()
    own = [f"after_{name}" for name in names[names.index("module_lookup") : -1]]
    for name in own:
        executor.current_strategy.insert_after(name.removeprefix("after_"), Look(name))
    names = executor.current_strategy.step_names()
    async with connect(executor) as client:
        assert success_text(await client.call_tool("echo", ACCOUNT))
    assert seen == [(name, id(module), Account) for name in own]
    assert vars(module)["looked_at"] == len(own)
    assert executor.current_strategy.step_names() == names


async def test_a_replaced_module_is_called_by_its_new_model() -> None:
    def version(marks: dict[str, Any]) -> FunctionalModule:
        model = create_model("Spell", word=(str, Field(json_schema_extra=marks)))
        return FunctionalModule(lambda inputs, context: {"seen": context.redacted_inputs}, input_schema=model)

    registry = registry_of({"spell": version({})})
    async with connect(registry) as client:
        for word, module in (("abc", None), (REDACTED_VALUE, version(MARK)), ("abc", version({}))):
            if module is not None:
                registry.unregister("spell")
                registry.register("spell", module)
            result = await client.call_tool("spell", {"word": "abc"})
            assert result.structured_content == {"seen": {"word": word}}


async def test_an_executor_is_as_it_was_after_its_servers() -> None:
    described = Described()
    model = described.model(n=(int, ...))
    executor = Executor(registry_of({"echo": FunctionalModule(echo, input_schema=model, output_schema=model)}))
    steps = executor.current_strategy.steps[:]
    async with connect(executor) as first:
        assert (await first.call_tool("echo", {"n": 1})).structured_content == {"n": 1}
    async with connect(executor) as second:
        async with connect(executor) as third:
            assert (await third.call_tool("echo", {"n": 3})).structured_content == {"n": 3}
        times = described.times
        assert (await second.call_tool("echo", {"n": 2})).structured_content == {"n": 2}
        assert described.times == times
        assert await executor.call_async("echo", {"n": 0}) == {"n": 0}
        assert described.times == times + 3
    assert executor.current_strategy.steps == steps
    assert executor.validate("echo", {"n": 1}).valid


async def test_another_look_up_of_apcores_is_as_right(monkeypatch: Monkeypatch) -> None:
    """As if it had renamed what is not public: `_registry`."""
    execute = BuiltinModuleLookup.execute

    async def execute_by_another_name(self: Any, ctx: PipelineContext) -> StepResult:
        return await execute(SimpleNamespace(_registry=self.modules, **vars(self)), ctx)  # type: ignore[arg-type]

    executor = Executor(stage())
    lookup: Any = next(step for step in executor.current_strategy.steps if step.name == "module_lookup")
    lookup.modules = vars(lookup).pop("_registry")
    monkeypatch.setattr(BuiltinModuleLookup, "execute", execute_by_another_name)
    async with connect(executor) as client:
        await cancel_call(await start_call(client, "wait"))
        assert (await client.call_tool("ended")).structured_content == {"told": "wait", "token_set": True}


@pytest.mark.parametrize("step", [BuiltinModuleLookup, BuiltinInputValidation, BuiltinOutputValidation])
async def test_a_step_that_wants_the_model_itself_gets_it(step: Any, monkeypatch: Monkeypatch) -> None:
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
