"""One running call: what is told and asked meanwhile, by whose trace, and what it leaves behind (FR-EXT-*)."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import queue
import re
import threading
import warnings
from decimal import Decimal
from fractions import Fraction
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from apcore import Executor
from apcore.cancel import ExecutionCancelledError
from apcore.errors import ModuleTimeoutError
from conftest import HANDSHAKE, MODERN, Clock, FunctionalModule, RawClient, connect, echo, program, registry_of
from jsonschema import ValidationError
from mcp_types import ElicitResult
from support import (
    ENVIRONMENT,
    INTEGER,
    SCHEMA,
    STRING,
    UNASKED,
    WITHOUT_LIMIT,
    Caplog,
    Wire,
    accept,
    ask,
    asking,
    calls,
    failure,
    guarded,
    hosted,
    keeping_little,
    noting,
    of,
    on_clock,
    stage,
    text_of,
)

from apcore_mcp import MCP_ELICIT_KEY, MCP_PROGRESS_KEY, elicit, report_progress
from apcore_mcp.client import Client
from apcore_mcp.conversation import Conversation, WaitingRoom, _content_of
from apcore_mcp.schemas import form_of

# ---- Progress ----

STEPS = [(1.0, 3.0, "step 1"), (2.0, 3.0, "step 2"), (3.0, 3.0, "step 3")]


@pytest.mark.requirement("FR-EXT-001")
async def test_progress_arrives_in_order_before_the_result(mode: str) -> None:
    """From any depth, also of sync modules."""
    async with connect(stage(), mode=mode) as client:
        for module_id in ("steps", "nested", "from_sync", "deep"):
            note, told = noting()
            result = await client.call_tool(module_id, progress_callback=note)
            assert (result.structured_content, told) == ({"done": True}, STEPS), module_id
            result = await client.call_tool(module_id)  # no token: nothing to report to
            assert (result.structured_content, told) == ({"done": True}, STEPS)


ON_STDIO = """
import conftest, support
stage = support.stage()
stage.register("ask", conftest.FunctionalModule(support.ask))
serve(stage)
"""


def test_progress_and_questions_over_stdio() -> None:
    """No progress without a token or after the result; questions as over HTTP."""
    with RawClient(program(ON_STDIO), env=ENVIRONMENT) as client:
        client.initialize(elicitation={})
        wire = []
        for name, meta in (("steps", {}), ("beyond", {"progressToken": "t"}), ("release", {}), ("ended", {})):
            call = {"name": name, "arguments": {}, "_meta": meta}
            request_id = client.send("ping") if name == "ended" else client.send("tools/call", call)
            while (message := client.receive()).get("id") != request_id:
                wire.append(message["params"])
            wire.append(name)
        assert wire == ["steps", {"progressToken": "t", "progress": 7}, "beyond", "release", "ended"]
        client.send("tools/call", {"name": "ask", "arguments": {}})
        question = client.receive()
        assert question["method"] == "elicitation/create"
        answer = {"action": "accept", "content": {"name": "Ada"}}
        client.send_line(json.dumps({"jsonrpc": "2.0", "id": question["id"], "result": answer}).encode())
        assert client.receive()["result"]["structuredContent"] == {"answer": {"name": "Ada"}}


REPORTS: list[tuple[tuple[Any, ...], tuple[Any, ...] | None]] = [  # what a module says, and what is sent
    ((math.nan,), None),
    ((1,), (1, None, None)),
    ((1,), None),
    ((0.5, 10), None),
    ((math.inf, 10), None),
    ((Decimal("2.5"), Decimal(10)), (2.5, 10, None)),
    ((-math.inf, 10), None),
    ((Fraction(11, 4),), (2.75, None, None)),
    ((True, 10), None),
    ((3, 3), (3, 3, None)),
    ((4, math.inf), (4, None, None)),
    ((5, math.nan), (5, None, None)),
    ((6, -math.inf), (6, None, None)),
    ((7, None, "half of a pair: \ud83d"), (7, None, "half of a pair: ?")),
]


async def test_progress_only_rises() -> None:
    """MCP "Progress": MUST increase. What cannot be said as a number is no progress, and is not said as text."""
    told: list[Any] = []

    async def note(*report: Any) -> None:
        told.append(report)

    conversation = Conversation("t", {}, None, Client(session=SimpleNamespace(report_progress=note)), WaitingRoom())
    for said, _ in REPORTS:
        await conversation.report(*said)
    assert told == [sent for _, sent in REPORTS if sent]
    assert {type(number) for number, *_ in told} == {float}


async def test_a_plain_function_reports_without_await() -> None:
    """Before it goes on, also in a loop of its own; nobody is warned of what is not awaited."""

    def stack(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for number in (1, 2, 3):
            reported: Any = report_progress(context, number, 3, f"step {number}")
            if inputs["runs"]:
                asyncio.run(reported)
        with pytest.raises(ValueError, match="could not convert"):
            report_progress(context, "four")  # type: ignore[arg-type]
        return {"done": True}

    async with connect({"stack": stack}) as client:
        for runs in (False, True):
            note, told = noting()
            with warnings.catch_warnings():
                warnings.filterwarnings("error", "coroutine", RuntimeWarning)
                result = await client.call_tool("stack", {"runs": runs}, progress_callback=note)
            assert (result.structured_content, told) == ({"done": True}, STEPS)
    report_progress(None, 1)


async def test_a_module_that_blocks_the_loop_may_report() -> None:
    async def reporting(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for number in range(10):
            await report_progress(context, number)
        return {"done": True}

    async def blocking(inputs: dict[str, Any], context: Any) -> Any:
        return context.executor.call("reporting", {}, context)

    async with connect({"reporting": reporting, "blocking": blocking}) as client, asyncio.timeout(10):
        result = await client.call_tool("blocking", progress_callback=noting()[0])
    assert result.structured_content == {"done": True}


# ---- Questions ----


ANSWERS: list[tuple[ElicitResult, dict[str, Any] | None]] = [
    (accept(name="Ada"), {"name": "Ada"}),
    (accept(), None),
    (accept(name=7), None),
    (ElicitResult(action="decline"), None),
    (ElicitResult(action="cancel", content={"name": "Ada"}), None),
]


@pytest.mark.requirement("FR-EXT-002")
async def test_a_module_is_given_the_answer_or_none(mode: str) -> None:
    given = ElicitResult(action="decline")
    arguments, asked = asking(lambda params: given)
    from_sync = FunctionalModule(lambda inputs, context: context.executor.call("ask", {}, context))
    modules = {"ask": ask, "ask_below": calls("ask"), "from_sync": from_sync}
    async with connect(modules, mode=mode, client=arguments) as client, asyncio.timeout(20):
        for module_id in modules:
            for given, seen in ANSWERS:  # noqa: B007  the callback above reads it
                assert (await client.call_tool(module_id)).structured_content == {"answer": seen}, module_id
    assert [(p.message, p.requested_schema) for p in asked] == [("Who are you?", SCHEMA)] * 15


async def test_after_a_question_is_given_up(mode: str) -> None:
    """From 2026-07-28 on, the retry of the first is answered with the second."""
    asked: list[str] = []
    first_is_open, second_is_open = asyncio.Event(), asyncio.Event()

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        if params.message == "First?":
            first_is_open.set()
            await second_is_open.wait()
        return accept(name=f"to {params.message}")

    async def ask_twice(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        first = asyncio.create_task(elicit(context, "First?", SCHEMA))
        await first_is_open.wait()
        first.cancel()
        await asyncio.wait({first})
        second = asyncio.create_task(elicit(context, "Second?", SCHEMA))
        asyncio.get_running_loop().call_soon(second_is_open.set)  # after the task has begun
        return {"answer": await second}

    async with hosted({"ask": ask_twice}, mode, {"elicitation_callback": answer}) as client, asyncio.timeout(30):
        assert (await client.call_tool("ask")).structured_content == {"answer": {"name": "to Second?"}}
    assert asked == ["First?", "Second?"]


async def test_what_outlives_its_call_asks_nobody() -> None:
    """From 2026-07-28: the call ended while its question was open, and the retry is no way to ask another."""
    given_up, fetched = asyncio.Event(), asyncio.Event()
    late = list[asyncio.Task[Any]]()

    async def ask_late(context: Any) -> Any:
        await fetched.wait()
        return await elicit(context, "Late?", SCHEMA)

    async def linger(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        late.append(asyncio.create_task(ask_late(context)))
        early = asyncio.create_task(elicit(context, "Early?", SCHEMA, key="name"))
        await given_up.wait()
        early.cancel()
        await asyncio.wait({early})
        return {"done": True}

    modules = {"linger": linger, "echo": echo}
    async with hosted(modules, user=asking(accept())[0]) as client, asyncio.timeout(30):
        wire = Wire(client)
        _, _, state = await wire.question("linger")
        given_up.set()
        await wire.call("echo")  # by then it has ended
        given = {"request_state": state, "input_responses": {"name": accept(name="Ada")}}
        assert (await wire.call("linger", **given)).structured_content == {"done": True}
        fetched.set()
        assert await late[0] is None


async def test_a_module_past_its_timeout_gets_no_answer() -> None:
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


async def test_without_a_client_nothing_is_told_or_asked() -> None:
    for context in (object(), MagicMock(), SimpleNamespace(data=None), None):
        await report_progress(context, 1)
        assert await elicit(context, "") is None


NO_FORMS: dict[str, Any] = {
    "nan": of(n={"type": "number", "default": math.nan}),
    "no-json": of(n={**STRING, "default": object()}),
    "nested": of(n=of()),
    "list": of(n={"type": "array", "items": STRING}),
    "reference": of(n={"$ref": "#/$defs/n"}),
    "no-schema": of(n={**STRING, "minLength": "x"}),
    "a-union": of() | {"anyOf": [of(n=STRING)]},
    "any-name": of() | {"patternProperties": {"^(a+)+$": STRING}},
    "a-pattern": of(n={**STRING, "pattern": "^[a-z]+$"}),
    "a-pattern-inside": of(n={**STRING, "allOf": [{"pattern": "^(a+)+$"}]}),
    "no-type": of(n={"enum": ["a"]}),
    "two-types": of(n={"type": ["string", "null"]}),
    "no-object": STRING,
}


@pytest.mark.parametrize("schema", NO_FORMS.values(), ids=NO_FORMS)
def test_a_question_without_a_form_is_a_value_error(schema: Any) -> None:
    """No form has a pattern: Python's `re` can take days to hold an answer against one."""
    with pytest.raises(ValueError, match="question"):
        form_of(schema)


@pytest.mark.parametrize(("mode", "user"), [(MODERN, "yes"), (HANDSHAKE, "cannot")])
async def test_nothing_is_sent_of_a_question_without_a_form(mode: str, user: str) -> None:
    async def wonder(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        with pytest.raises(ValueError, match="pattern"):
            await elicit(context, "Which?", NO_FORMS["a-pattern"], key="name")
        return {"answer": await elicit(context, "Then?\ud800", SCHEMA)}

    arguments, asked = asking(accept(name="Ada") if user == "yes" else None)
    async with connect({"wonder": wonder}, mode=mode, client=arguments) as client, asyncio.timeout(20):
        result = await client.call_tool("wonder")
    assert result.structured_content == {"answer": {"name": "Ada"} if user == "yes" else None}
    assert [p.message for p in asked] == (["Then??"] if user == "yes" else [])


TITLED = [{"const": "s", "title": "Small"}, {"const": "l", "title": "Large"}]
FIELDS: dict[str, tuple[dict[str, Any], Any, Any]] = {  # with an answer that fits and one that does not
    "text": ({**STRING, "minLength": 2, "default": "ab", "title": "T", "description": "D"}, "abc", "a"),
    "date": ({**STRING, "format": "date"}, "2026-01-02", 7),
    "address": ({**STRING, "format": "uri", "maxLength": 3}, "a:b", "a:bc"),
    "one": ({**STRING, "enum": ["s", "l"], "format": "size", "default": "s"}, "l", "m"),
    "one-by-name": ({**STRING, "enum": ["s", "l"], "enumNames": ["Small", "Large"]}, "s", "Small"),
    "one-by-title": ({**STRING, "oneOf": TITLED, "format": "size"}, "l", "Large"),
    "some": ({"type": "array", "items": {**STRING, "enum": ["s", "l"]}, "maxItems": 1}, ["s"], ["s", "l"]),
    "some-by-title": ({"type": "array", "items": {"anyOf": TITLED}, "default": ["s"]}, ["l", "s"], ["m"]),
    "more-than-there-is": ({"type": "array", "items": {"anyOf": TITLED}}, ["l"], ["l"] * 3),
    "integer": ({**INTEGER, "minimum": 1, "default": 1}, 2, 0),
    "number": ({"type": "number", "maximum": 1.5, "default": None}, 1.25, 2),
    "yes-or-no": ({"type": "boolean", "default": True}, False, "no"),
}


def test_a_form_is_flat_and_closes_references() -> None:
    """As the schema of a pydantic model with an enum does; a form knows no references, and none is a confirmation."""
    size = {**STRING, "enum": ["small", "large"]}
    assert form_of(of(size={"$ref": "#/$defs/Size"}) | {"$defs": {"Size": size}}) == of(size=size)
    assert (form_of(None), _content_of(ElicitResult(action="accept"), of())) == (of(), {})


@pytest.mark.parametrize("field", FIELDS)
def test_each_kind_of_field_can_be_asked_for(field: str) -> None:
    schema, right, wrong = FIELDS[field]
    assert form_of(of(n=schema)) == of(n=schema)
    assert _content_of(accept(n=right, unasked=1), of(n=schema)) == {"n": right}
    with pytest.raises((ValueError, ValidationError)):
        _content_of(accept(n=wrong), of(n=schema))


async def test_an_endless_answer_holds_up_nobody() -> None:
    """Each of its items would be looked for among all options, while no other client is answered."""
    titled = [{"const": str(number), "title": f"Number {number}"} for number in range(20)]

    async def wonder(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"answer": await elicit(context, "Which?", of(n={"type": "array", "items": {"anyOf": titled}}))}

    user, _ = asking(accept(n=["19"] * 100_000))
    async with connect({"wonder": wonder}, client=user) as client, asyncio.timeout(5):
        assert (await client.call_tool("wonder")).structured_content == {"answer": None}


@pytest.mark.requirement("FR-EXT-003")
async def test_what_stands_under_the_context_keys() -> None:
    """Nothing outside of MCP; in a call, what takes arguments by name as the two functions do."""
    assert (MCP_PROGRESS_KEY, MCP_ELICIT_KEY) == ("_mcp_progress", "_mcp_elicit")

    async def by_key(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        if not context.data.keys() & {MCP_PROGRESS_KEY, MCP_ELICIT_KEY}:
            return {}
        await context.data[MCP_PROGRESS_KEY](progress=1, total=2, message="half")
        return {"answer": await context.data[MCP_ELICIT_KEY](message="Who?", requested_schema=SCHEMA, key="name")}

    registry = registry_of({"ask": ask, "ask_below": calls("ask"), "by_key": by_key})
    for module_id, output in (("ask", {"answer": None}), ("ask_below", {"answer": None}), ("by_key", {})):
        assert await Executor(registry).call_async(module_id, {}) == output
    async with connect(registry, client=asking(accept(name="Ada"))[0]) as client, asyncio.timeout(20):
        note, told = noting()
        result = await client.call_tool("by_key", progress_callback=note)
    assert (result.structured_content, told) == ({"answer": {"name": "Ada"}}, [(1, 2, "half")])


@pytest.mark.parametrize(("approval", "told"), [("require", UNASKED), ("auto", '{"ran":true}')])
async def test_without_sessions_nobody_is_asked(mode: str, approval: str, told: str) -> None:
    """A server without sessions may stand behind a load balancer: the retry could reach another one."""
    arguments, asked = asking(accept(name="Ada"))
    options: dict[str, Any] = {"mode": mode, "client": arguments, "stateless": True, "approval": approval}
    async with connect({"ask": ask, "wipe": guarded([])}, **options) as client, asyncio.timeout(20):
        assert (await client.call_tool("ask")).structured_content == {"answer": None}
        assert text_of(await client.call_tool("wipe")) == told
    assert asked == []


@on_clock
async def test_an_unanswered_question_is_none_in_ten_minutes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes no place any more."""
    monkeypatch.setattr("apcore_mcp.conversation._PLACES_MAX", 1)
    told: list[Any] = []

    async def patient(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        told.append(await elicit(context, "Who?"))
        return {}

    executor = Executor(registry_of({"patient": patient}), config=WITHOUT_LIMIT)
    async with hosted(executor, user=asking(accept())[0]) as client:
        _, _, state = await Wire(client).question("patient")
        await clock.put_forward(9 * 60)
        assert told == []
        await clock.put_forward(2 * 60)
        assert told == [None]
        await Wire(client).refused(state, "patient")
        await Wire(client).question("patient")


async def test_progress_while_a_question_is_open() -> None:
    """It goes to no request, and the one that brings the answer is told the same."""
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

    async with hosted({"work": work}, user=asking(accept())[0]) as client, asyncio.timeout(30):
        wire = Wire(client)
        _, _, state = await wire.question("work", progress_callback=first)
        proceed.set()
        await reported.wait()
        answer = {"name": accept()}
        await wire.call("work", request_state=state, input_responses=answer, progress_callback=second)
    assert (told, told_later) == ([(1, None, None)], [(2, None, None)])


# ---- Trace context ----

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


async def test_a_calls_trace_is_its_clients_and_is_logged(caplog: Caplog) -> None:
    caplog.set_level(logging.INFO, logger="apcore_mcp")
    not_followed = ["garbage", f"00-{TRACE}-0000000000000000-01", None, 7]
    module = FunctionalModule(lambda inputs, context: {"id": context.trace_id})
    async with connect({"trace": module}, access_log=True) as client:
        for traceparent in (f"00-{TRACE}-00f067aa0ba902b7-01", *not_followed):
            meta: Any = {"traceparent": traceparent}
            result = await client.call_tool("trace", meta=meta)
            trace_id = (result.structured_content or {})["id"]
            assert (trace_id == TRACE) == (traceparent not in not_followed)
            assert len(trace_id) == 32
            assert re.search(rf"Tool call ended: trace, [\d.]+ ms, trace {trace_id}", caplog.text)
            failure(await client.call_tool("unknown", meta=meta))
            assert (TRACE in caplog.messages[-1]) == (trace_id == TRACE)


# ---- What is left ----


async def test_ended_calls_are_freed() -> None:
    """A timer keeps its copy of a call's context variables until it rings, even one that was cancelled."""

    async def give(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(3600, print)
        return {"text": "x" * 400_000}

    async with connect({"give": give}) as client, asyncio.timeout(30):
        await client.call_tool("give")
        async with keeping_little(client):
            for _ in range(20):
                await client.call_tool("give", {"text": "y" * 400_000})
