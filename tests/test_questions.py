"""Modules that ask their user, and calls that need approval.

FR-EXT-002, FR-EXT-003, FR-ANNOT-006 and the design's "Elicitation" and "Approval". In the handshake era the server asks
the client; from 2026-07-28 the call is answered with the question and goes on when the client calls again, which the
tests of the wire do by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import queue
import sys
import threading
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest
from apcore import ACL, APCore, Config, ExecutionPolicy, Executor, ModuleAnnotations, Registry
from apcore.approval import ApprovalRequest, ApprovalResult, AutoApproveHandler
from apcore.builtin_steps import BuiltinApprovalGate, build_standard_strategy
from apcore.errors import ApprovalDeniedError, ModuleTimeoutError
from apcore.observability import MetricsCollector
from conftest import HANDSHAKE, MODERN, ROOT, FunctionalModule, connect, free_port, registry_of, serving
from mcp import MCPError, StdioServerParameters
from mcp.client import Client
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp_types import CallToolResult, ElicitRequest, ElicitResult, InputRequiredResult, ListRootsResult
from pydantic import BaseModel
from test_eras import modern

from apcore_mcp import (
    MCP_ELICIT_KEY,
    MCP_PROGRESS_KEY,
    ElicitationApprovalHandler,
    MCPServer,
    elicit,
    report_progress,
)

SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
DENIED = "Approval was denied"
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


async def ask_by_name(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"n": inputs["n"], "answer": await elicit(context, f"Name {inputs['n']}?", SCHEMA, key="name")}


async def ask_below(inputs: dict[str, Any], context: Any) -> Any:
    return await context.executor.call_async("ask", {}, context)


def ask_from_sync(inputs: dict[str, Any], context: Any) -> Any:
    return context.executor.call("ask", {}, context)


def text_of(result: CallToolResult) -> str:
    return "".join(part.text for part in result.content if part.type == "text")


# ---- Questions, in both eras ----


@pytest.mark.parametrize(
    ("answer", "seen"),
    [
        pytest.param(accept(name="Ada"), {"name": "Ada"}, id="accepted"),
        pytest.param(accept(), None, id="accepted-with-nothing"),
        pytest.param(accept(name=7), None, id="accepted-with-something-else"),
        pytest.param(ElicitResult(action="decline"), None, id="declined"),
        pytest.param(ElicitResult(action="cancel"), None, id="cancelled"),
        pytest.param(None, None, id="client-cannot-ask"),
    ],
)
async def test_a_module_is_given_what_its_user_filled_in_or_none(
    mode: str, answer: ElicitResult | None, seen: dict[str, Any] | None
) -> None:
    arguments, asked = asking(answer)
    modules = {"ask": ask, "ask_below": ask_below, "ask_from_sync": ask_from_sync}
    async with connect(modules, mode=mode, client=arguments) as client, asyncio.timeout(20):
        for module_id in modules:
            assert (await client.call_tool(module_id)).structured_content == {"answer": seen}, module_id
    assert [(p.message, p.requested_schema) for p in asked] == ([("Who are you?", SCHEMA)] * 3 if answer else [])


@pytest.mark.parametrize(("name", "taken"), [("Ada Lovelace", True), ("a" * 28 + "!", False), ("", False)])
async def test_an_answer_is_held_against_a_pattern_in_no_time(mode: str, name: str, taken: bool) -> None:
    """Python's `re` takes a minute for 28 letters that this pattern does not match; meanwhile nobody is served."""
    schema = {"type": "object", "properties": {"name": {"type": "string", "pattern": r"^(\w+\s?)+$"}}}

    async def ask_with_pattern(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"answer": await elicit(context, "Who are you?", schema)}

    arguments, _ = asking(accept(name=name))
    async with connect({"ask": ask_with_pattern}, mode=mode, client=arguments) as client, asyncio.timeout(20):
        answered = (await client.call_tool("ask")).structured_content
    assert answered == {"answer": {"name": name} if taken else None}


@pytest.mark.parametrize("message", ["Go on?", ""], ids=["message", "empty-message"])
async def test_a_question_without_a_schema_asks_for_a_bare_confirmation(mode: str, message: str) -> None:
    async def confirm(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"answer": await elicit(context, message)}

    arguments, asked = asking(accept())
    async with connect({"confirm": confirm}, mode=mode, client=arguments) as client:
        assert (await client.call_tool("confirm")).structured_content == {"answer": {}}
    assert [(p.message, p.requested_schema) for p in asked] == [(message, {"type": "object", "properties": {}})]


async def test_a_module_that_asks_in_turn_runs_once_with_all_its_side_effects(mode: str) -> None:
    effects: list[str] = []

    async def interview(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        answers = []
        for number in (1, 2, 3):
            effects.append(f"before {number}")
            answers.append(await elicit(context, f"Question {number}", SCHEMA))
        effects.append("end")
        return {"answers": answers}

    arguments, asked = asking(lambda params: accept(name=f"to {params.message}"))
    async with connect({"interview": interview}, mode=mode, client=arguments) as client:
        result = await client.call_tool("interview")
    assert [p.message for p in asked] == ["Question 1", "Question 2", "Question 3"]
    assert result.structured_content == {"answers": [{"name": f"to Question {n}"} for n in (1, 2, 3)]}
    assert effects == ["before 1", "before 2", "before 3", "end"]


async def test_questions_asked_at_once_each_get_their_own_answer(mode: str) -> None:
    async def both(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        one, two = await asyncio.gather(
            elicit(context, "one", SCHEMA, key="a"), elicit(context, "two", SCHEMA, key="b")
        )
        return {"one": one, "two": two}

    arguments, asked = asking(lambda params: accept(name=params.message.upper()))
    async with connect({"both": both}, mode=mode, client=arguments) as client, asyncio.timeout(20):
        result = await client.call_tool("both")
    assert result.structured_content == {"one": {"name": "ONE"}, "two": {"name": "TWO"}}
    assert sorted(p.message for p in asked) == ["one", "two"]


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
    assert result.structured_content == {"answer": {"name": "to Second?"}}
    assert asked == ["First?", "Second?"]


@pytest.mark.parametrize("asks_again", [False, True], ids=["works-on", "asks-again"])
async def test_the_answer_to_a_question_that_was_given_up_is_no_answer_to_another(asks_again: bool) -> None:
    runs, given_up, proceed = [], threading.Event(), asyncio.Event()

    async def impatient(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        runs.append(1)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(elicit(context, "First?", SCHEMA, key="name"), 0.2)
        given_up.set()
        if asks_again:
            return {"answer": await elicit(context, "Second?", SCHEMA, key="name")}
        await proceed.wait()
        return {"answer": "none"}

    async def finish(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        proceed.set()
        return {}

    async with wired({"ask": impatient, "finish": finish}) as wire:
        _, _, state = await wire.question("ask")
        assert await asyncio.to_thread(given_up.wait, 10)
        answer = {"request_state": state, "input_responses": {"name": accept(name="Ada")}}
        if asks_again:
            _, message, again = await wire.question("ask", **answer)
            assert message == "Second?"
            answer = {"request_state": again, "input_responses": {"name": accept(name="Eve")}}
            assert (await wire.call("ask", **answer)).structured_content == {"answer": {"name": "Eve"}}
        else:
            late = asyncio.create_task(wire.call("ask", **answer))
            await wire.call("finish")
            assert (await late).structured_content == {"answer": "none"}
        await wire.refused(state)
    assert runs == [1]


async def test_a_module_that_has_timed_out_is_not_given_the_answer_to_its_question(mode: str) -> None:
    """Nor may it ask another: it would act on it after its caller was told that it failed."""
    told: queue.Queue[Any] = queue.Queue()
    timed_out = threading.Event()

    def sync(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            told.put(asyncio.run(elicit(context, "Delete?", SCHEMA)))
        except BaseException as error:
            told.put(type(error).__name__)
        try:
            told.put(asyncio.run(elicit(context, "Delete now?", SCHEMA)))
        except BaseException as error:
            told.put(type(error).__name__)
        return {}

    async def above(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            await context.executor.call_async("sync", {}, context)
        except ModuleTimeoutError:
            timed_out.set()
        told_later = [await asyncio.to_thread(told.get, timeout=10) for _ in range(2)]
        return {"told": told_later}

    asked: list[str] = []

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.append(params.message)
        assert await asyncio.to_thread(timed_out.wait, 10)
        return accept(name="Ada")

    modules = {"sync": FunctionalModule(sync, resources={"timeout": 300}), "above": above}
    async with connect(modules, mode=mode, client={"elicitation_callback": answer}) as client, asyncio.timeout(30):
        result = await client.call_tool("above")
    assert result.structured_content == {"told": ["ExecutionCancelledError"] * 2}
    assert asked == ["Delete?"]


@pytest.mark.parametrize("context", [object(), 7, MagicMock(), SimpleNamespace(data=None), None], ids=type)
async def test_whatever_has_no_client_behind_it_is_told_and_asked_nothing(context: Any) -> None:
    await report_progress(context, 1)
    assert await elicit(context, "") is None


def form(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


QUESTIONS: dict[str, tuple[Any, Any]] = {
    "nan": ("Which?", form(n={"type": "number", "default": math.nan})),
    "no-json": ("Which?", form(n={"type": "string", "default": object()})),
    "surrogate": ("Which \ud800?", None),
    "no-text": (7, None),
    "nested": ("Which?", form(n=form())),
    "list": ("Which?", form(n={"type": "array", "items": {"type": "string"}})),
    "reference": ("Which?", form(n={"$ref": "#/$defs/n"})),
    "anything": ("Which?", form(n=True)),
    "no-schema": ("Which?", form(n={"type": "string", "minLength": "x"})),
    "no-pattern": ("Which?", form(n={"type": "string", "pattern": "("})),
    "a-union": ("Which?", form() | {"anyOf": [form(n={"type": "string"})]}),
    "no-properties": ("Which?", {"type": "object", "properties": []}),
    "no-object": ("Which?", {"type": "string"}),
    "a-list": ("Which?", [1]),
}


@pytest.mark.parametrize("user", ["yes", "cannot"])
async def test_a_question_that_no_form_can_ask_is_a_value_error_to_the_module(mode: str, user: str) -> None:
    async def wonder(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            return {"answer": await elicit(context, *QUESTIONS[inputs["which"]], key="name")}
        except ValueError as error:
            return {"told": bool(str(error)), "then": await elicit(context, inputs["which"], SCHEMA)}

    arguments, asked = asking(accept(name="Ada") if user == "yes" else None)
    async with connect({"wonder": wonder}, mode=mode, client=arguments) as client, asyncio.timeout(20):
        results = {
            which: (await client.call_tool("wonder", {"which": which})).structured_content for which in QUESTIONS
        }
    expected = {"told": True, "then": {"name": "Ada"} if user == "yes" else None}
    assert results == dict.fromkeys(QUESTIONS, expected)
    assert [p.message for p in asked] == (list(QUESTIONS) if user == "yes" else [])


async def test_outside_mcp_nobody_is_asked_and_the_context_has_no_keys() -> None:
    assert (MCP_PROGRESS_KEY, MCP_ELICIT_KEY) == ("_mcp_progress", "_mcp_elicit")

    async def keys(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"keys": sorted(context.data.keys() & {MCP_PROGRESS_KEY, MCP_ELICIT_KEY})}

    registry = registry_of({"ask": ask, "ask_below": ask_below, "keys": keys})
    for module_id, output in (("ask", {"answer": None}), ("ask_below", {"answer": None}), ("keys", {"keys": []})):
        assert await Executor(registry).call_async(module_id, {}) == output
    async with connect(registry) as client:
        inside = (await client.call_tool("keys")).structured_content
    assert inside == {"keys": [MCP_ELICIT_KEY, MCP_PROGRESS_KEY]}
    await report_progress(None, 1)  # a module called from its own unit test
    assert await elicit(None, "Who are you?") is None


async def test_what_stands_under_the_keys_takes_names_as_the_functions_do(mode: str) -> None:
    async def ask_by_key(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await context.data[MCP_PROGRESS_KEY](progress=1, total=2, message="half")
        return {"answer": await context.data[MCP_ELICIT_KEY](message="Who?", requested_schema=SCHEMA, key="name")}

    arguments, _ = asking(accept(name="Ada"))
    async with connect({"ask": ask_by_key}, mode=mode, client=arguments) as client, asyncio.timeout(20):
        assert (await client.call_tool("ask")).structured_content == {"answer": {"name": "Ada"}}


async def test_where_an_answer_could_not_come_back_nobody_is_asked(mode: str) -> None:
    """A server without sessions may stand behind a load balancer: the retry could reach another one."""
    ran: list[dict[str, Any]] = []
    arguments, asked = asking(accept(name="Ada"))
    options: dict[str, Any] = {"mode": mode, "client": arguments, "stateless": True, "approval": "require"}
    async with connect({"ask": ask, "wipe": guarded(ran)}, **options) as client, asyncio.timeout(20):
        assert (await client.call_tool("ask")).structured_content == {"answer": None}
        assert text_of(await client.call_tool("wipe")) == DENIED
    assert (asked, ran) == ([], [])


ASK_ON_STDIO = """
from apcore_mcp import serve
from conftest import registry_of
from test_questions import ask
serve(registry_of({"ask": ask}))
"""


async def test_questions_are_asked_over_stdio_too(mode: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    server = stdio_client(StdioServerParameters(command=sys.executable, args=["-c", ASK_ON_STDIO], env=environment))
    arguments, _ = asking(accept(name="Ada"))
    async with Client(server, mode=mode, cache=None, read_timeout_seconds=30, **arguments) as client:
        assert (await client.call_tool("ask")).structured_content == {"answer": {"name": "Ada"}}


async def test_questions_are_asked_over_sse_too() -> None:
    arguments, _ = asking(accept(name="Ada"))
    with serving(registry_of({"ask": ask}), transport="sse") as url:
        async with Client(sse_client(f"{url}/sse"), mode=HANDSHAKE, cache=None, **arguments) as client:
            assert (await client.call_tool("ask")).structured_content == {"answer": {"name": "Ada"}}


# ---- The wire of 2026-07-28, by hand ----


class Wire:
    """A client that can ask, and calls whose questions it leaves to the test."""

    def __init__(self, client: Client) -> None:
        self.client = client

    async def call(self, name: str, arguments: dict[str, Any] | None = None, **options: Any) -> Any:
        return await self.client.session.call_tool(name, arguments, allow_input_required=True, **options)

    async def question(
        self, name: str, arguments: dict[str, Any] | None = None, **options: Any
    ) -> tuple[str, str, str]:
        """The key, the message and the state of the one question a call is answered with."""
        result = await self.call(name, arguments, **options)
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


async def test_key_names_the_question_and_every_round_has_a_state_of_its_own() -> None:
    async def rounds(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        first = await elicit(context, "first", SCHEMA, key="name")
        return {"first": first, "second": await elicit(context, "second", SCHEMA, key="again")}

    async with wired({"rounds": rounds}) as wire:
        key, message, state = await wire.question("rounds")
        assert (key, message) == ("name", "first")
        answer = {"request_state": state, "input_responses": {"name": accept(name="A")}}
        key, message, again = await wire.question("rounds", **answer)
        assert (key, message) == ("again", "second")
        assert again != state
        await wire.refused(state, "rounds")
        result = await wire.call("rounds", request_state=again, input_responses={"again": accept(name="B")})
        assert result.structured_content == {"first": {"name": "A"}, "second": {"name": "B"}}


async def test_a_state_resumes_the_call_it_was_made_for_once_and_nothing_else() -> None:
    runs: list[str] = []

    async def counted(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        runs.append(f"{context.call_chain[-1]} starts")
        answer = await elicit(context, "Who?", SCHEMA, key="name")
        runs.append(f"goes on with {answer}")
        return {"answer": answer}

    async with wired({"ask": counted, "other": counted}) as wire, wired({"ask": counted}) as stranger:
        _, _, state = await wire.question("ask", {"n": 1})
        _, _, strange = await stranger.question("ask", {"n": 1})
        started = ["ask starts", "ask starts"]
        assert runs == started
        for wrong in ("", "nonsense", "v1.AAAA", state[:-2], state[::-1], state.swapcase(), f"{state}A", strange):
            await wire.refused(wrong, "ask", {"n": 1})
        await wire.refused(state, "other", {"n": 1})
        await wire.refused(state, "ask", {"n": 2})
        await wire.refused(state, "ask")
        assert runs == started
        answer = {"request_state": state, "input_responses": {"name": accept(name="Ada")}}
        result = await wire.call("ask", {"n": 1}, **answer)
        assert result.structured_content == {"answer": {"name": "Ada"}}
        await wire.refused(state, "ask", {"n": 1})
        assert runs == [*started, "goes on with {'name': 'Ada'}"]


@pytest.mark.parametrize(
    "responses",
    [
        pytest.param(None, id="none"),
        pytest.param({}, id="empty"),
        pytest.param({"other": accept(name="Eve")}, id="another-question"),
    ],
)
async def test_a_retry_without_the_answer_is_asked_again(responses: Any) -> None:
    async with wired({"ask": ask_by_name}) as wire:
        first = await wire.question("ask", {"n": 1})
        again = await wire.question("ask", {"n": 1}, request_state=first[2], input_responses=responses)
        assert again[:2] == first[:2] == ("name", "Name 1?")
        answer = {"request_state": again[2], "input_responses": {"name": accept(name="Ada")}}
        assert (await wire.call("ask", {"n": 1}, **answer)).structured_content == {"n": 1, "answer": {"name": "Ada"}}


async def test_an_answer_of_another_kind_is_no_answer_and_no_failure_of_the_module() -> None:
    async with wired({"ask": ask_by_name}) as wire:
        _, _, state = await wire.question("ask", {"n": 1})
        roots = {"name": ListRootsResult(roots=[])}
        outcome: Any
        try:
            result = await wire.call("ask", {"n": 1}, request_state=state, input_responses=roots)
            asked_again = isinstance(result, InputRequiredResult)
            outcome = "asked again" if asked_again else result.structured_content or text_of(result)
        except MCPError as error:
            outcome = error.error.code
        assert outcome in ("asked again", {"n": 1, "answer": None}, -32602)


async def test_twenty_parked_calls_are_answered_out_of_order() -> None:
    async with wired({"ask": ask_by_name}) as wire:
        states = {n: (await wire.question("ask", {"n": n}))[2] for n in range(20)}
        assert len(set(states.values())) == 20

        async def answer(n: int) -> Any:
            named = {"name": accept(name=f"user {n}")}
            return (await wire.call("ask", {"n": n}, request_state=states[n], input_responses=named)).structured_content

        order = [(7 * n + 3) % 20 for n in range(20)]
        assert await asyncio.gather(*map(answer, order)) == [{"n": n, "answer": {"name": f"user {n}"}} for n in order]


@pytest.mark.once
@pytest.mark.timeout(180)
async def test_of_more_than_a_thousand_parked_calls_the_last_is_given_up() -> None:
    ended: queue.Queue[int] = queue.Queue()

    async def patient(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            return {"answer": await elicit(context, "Who?", SCHEMA, key="name")}
        finally:
            ended.put(inputs["n"])

    # apcore's own limits would run out while so many are asked.
    config = Config(data={"executor": {"global_timeout": 0, "default_timeout": 0}})
    async with wired(Executor(registry_of({"ask": patient}), config=config), seconds=150) as wire:
        states = [(await wire.question("ask", {"n": n}))[2] for n in range(1000)]
        with pytest.raises(MCPError, match="Too many calls"):
            await wire.call("ask", {"n": 1000})
        assert await asyncio.to_thread(ended.get, timeout=10) == 1000
        for n in (0, 999):
            answer = {"request_state": states[n], "input_responses": {"name": accept(name="Ada")}}
            result = await wire.call("ask", {"n": n}, **answer)
            assert result.structured_content == {"answer": {"name": "Ada"}}
        await wire.question("ask", {"n": 1001})


async def test_parked_calls_end_when_the_server_stops() -> None:
    ended: queue.Queue[str] = queue.Queue()

    async def patient(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            await elicit(context, "Who?", SCHEMA)
        except asyncio.CancelledError:
            ended.put("cancelled")
            raise
        finally:
            ended.put("finally")
        return {}

    port = free_port()
    server = MCPServer(registry_of({"patient": patient}), transport="streamable-http", port=port)
    server.start()
    url = f"http://127.0.0.1:{port}/mcp"
    async with Client(url, mode=MODERN, cache=None, read_timeout_seconds=30, **asking(accept())[0]) as client:
        for _ in range(2):
            await Wire(client).question("patient")
        server.stop()
        async with asyncio.timeout(20):
            await asyncio.to_thread(server.wait)
    assert sorted(ended.get_nowait() for _ in range(4)) == ["cancelled", "cancelled", "finally", "finally"]


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        pytest.param({}, '{"answer":null}', id="it-stopped-waiting"),
        pytest.param({"resources": {"timeout": 50}}, "Module timed out after 50ms", id="it-timed-out"),
    ],
)
async def test_a_call_that_ends_while_its_question_is_open_keeps_its_result(limits: dict[str, Any], told: str) -> None:
    runs, enough, ended = [], asyncio.Event(), threading.Event()

    async def impatient(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        runs.append(inputs)
        try:
            question = asyncio.ensure_future(elicit(context, "Who?", SCHEMA, key="name"))
            await asyncio.wait({question, asyncio.ensure_future(enough.wait())}, return_when="FIRST_COMPLETED")
        finally:
            ended.set()
        return {"answer": question.cancel() and None}

    async def hurry(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        enough.set()
        return {}

    async with wired({"ask": FunctionalModule(impatient, **limits), "hurry": hurry}) as wire:
        _, _, state = await wire.question("ask", {"n": 1})
        if not limits:
            await wire.call("hurry")
        assert await asyncio.to_thread(ended.wait, 10)
        late = {"request_state": state, "input_responses": {"name": accept(name="Ada")}}
        assert text_of(await wire.call("ask", {"n": 1}, **late)) == told
        await wire.refused(state, "ask", {"n": 1})
    assert runs == [{"n": 1}]


async def test_a_call_is_resumed_though_its_tool_has_gone() -> None:
    """What runs is not ended by `unregister()`, so what waits for its user is not lost by it either."""
    registry = registry_of({"ask": ask})
    async with wired(registry) as wire:
        key, _, state = await wire.question("ask")
        registry.unregister("ask")
        assert text_of(await wire.call("ask")) == "Module not found: ask"
        result = await wire.call("ask", request_state=state, input_responses={key: accept(name="Ada")})
        assert result.structured_content == {"answer": {"name": "Ada"}}


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "unanswered"])
async def test_a_client_that_can_no_longer_ask_is_asked_no_more(answered: bool) -> None:
    async def rounds(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        first = await elicit(context, "first", SCHEMA, key="name")
        return {"first": first, "second": await elicit(context, "second", SCHEMA)}

    with serving(registry_of({"rounds": rounds})) as url:
        options: dict[str, Any] = {"mode": MODERN, "cache": None, "read_timeout_seconds": 30}
        async with (
            Client(f"{url}/mcp", **options, **asking(accept())[0]) as able,
            Client(f"{url}/mcp", **options) as unable,
            asyncio.timeout(20),
        ):
            _, _, state = await Wire(able).question("rounds")
            responses = {"name": accept(name="Ada")} if answered else None
            result = await Wire(unable).call("rounds", request_state=state, input_responses=responses)
    assert result.structured_content == {"first": {"name": "Ada"} if answered else None, "second": None}


async def test_progress_after_an_answer_goes_to_the_request_that_brought_it() -> None:
    told: list[tuple[str, float]] = []

    def note(request: str) -> Any:
        async def callback(progress: float, total: float | None, message: str | None) -> None:
            told.append((request, progress))

        return callback

    async def working(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for number in (1, 2, 3):
            await report_progress(context, number)
            if number < 3:
                await elicit(context, "Go on?", key="name")
        return {}

    async with wired({"work": working}) as wire:
        _, _, state = await wire.question("work", progress_callback=note("first"))
        answer = {"name": accept()}
        again = {"request_state": state, "input_responses": answer, "progress_callback": note("second")}
        _, _, state = await wire.question("work", **again)
        await wire.call("work", request_state=state, input_responses=answer, progress_callback=note("third"))
    assert told == [("first", 1), ("second", 2), ("third", 3)]


async def test_a_cancelled_question_of_the_handshake_era_cancels_its_module() -> None:
    asked, ended = threading.Event(), queue.Queue[str]()

    async def patient(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            await elicit(context, "Who?", SCHEMA)
        finally:
            ended.put("ended")
        return {}

    async def never(context: Any, params: Any) -> ElicitResult:
        asked.set()
        return await asyncio.get_running_loop().create_future()

    client_arguments = {"elicitation_callback": never}
    async with connect({"patient": patient}, mode=HANDSHAKE, client=client_arguments) as client, asyncio.timeout(20):
        call = asyncio.create_task(client.call_tool("patient"))
        assert await asyncio.to_thread(asked.wait, 10)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert await asyncio.to_thread(ended.get, timeout=10) == "ended"


# ---- Approval ----

APPROVE, REFUSE, DECLINE = accept(approve=True), accept(approve=False), ElicitResult(action="decline")
EVERYONE = {"yes": APPROVE, "no": REFUSE, "decline": DECLINE, "cannot": None}


def guarded(runs: list[dict[str, Any]], **attributes: Any) -> FunctionalModule:
    """A destructive module that needs approval and keeps a list of its runs."""

    def execute(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        runs.append(inputs)
        return {"ran": True}

    annotations = ModuleAnnotations(requires_approval=True, destructive=True)
    return FunctionalModule(execute, **{"annotations": annotations, **attributes})


LACKS_ELICITATION = (-32021, {"requiredCapabilities": {"elicitation": {"form": {}}}})


async def outcome_of(client: Client, name: str, arguments: dict[str, Any] | None = None) -> Any:
    """The text a call is answered with, or the code and the data of a JSON-RPC error."""
    try:
        return text_of(await client.call_tool(name, arguments))
    except MCPError as error:
        return error.error.code, error.error.data


@pytest.mark.parametrize(
    ("approval", "user", "questions", "runs"),
    [
        ("auto", "yes", 1, True),
        ("auto", "no", 1, False),
        ("auto", "decline", 1, False),
        ("auto", "cannot", 0, True),
        ("require", "yes", 1, True),
        ("require", "no", 1, False),
        ("require", "decline", 1, False),
        ("require", "cannot", 0, False),
        ("deny", "yes", 0, False),
        ("deny", "cannot", 0, False),
        ("off", "no", 0, True),
        ("off", "cannot", 0, True),
    ],
)
async def test_a_call_that_needs_approval_runs_if_the_mode_and_the_user_say_so(
    mode: str, approval: str, user: str, questions: int, runs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[dict[str, Any]] = []
    arguments, asked = asking(EVERYONE[user])
    async with connect({"wipe": guarded(ran)}, mode=mode, client=arguments, approval=approval) as client:
        outcome = await outcome_of(client, "wipe", {"disk": "a"})
    assert len(asked) == questions
    assert ran == ([{"disk": "a"}] if runs else [])
    lacks = (mode, approval, user) == (MODERN, "require", "cannot")
    assert outcome == ('{"ran":true}' if runs else LACKS_ELICITATION if lacks else DENIED)
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert any("wipe" in record.getMessage() for record in warned) == (runs and not asked)


async def test_each_call_that_auto_lets_through_is_a_warning(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also of a module that another one calls; and whoever looks for warnings of ours finds nothing else."""
    below = FunctionalModule(lambda inputs, context: context.executor.call("disk.wipe", inputs, context))
    async with connect({"disk.wipe": guarded([]), "below": below}, mode=mode) as client:
        for name in ("disk.wipe", "disk.wipe", "below"):
            assert not (await client.call_tool(name)).is_error
    warned = [r.getMessage() for r in caplog.records if r.name == "apcore_mcp" and r.levelno == logging.WARNING]
    assert warned == ["disk.wipe is let through without approval: its user cannot be asked"] * 3


TOGGLE = "system.control.toggle_feature"
ALL_APPROVALS = ["auto", "require", "deny", "off"]


def controlled(**options: Any) -> APCore:
    """An application whose own control modules are registered, and a module `echo`."""
    client = APCore(config=Config({"sys_modules": {"enabled": True, "events": {"enabled": True}}}), **options)
    client.registry.register("echo", FunctionalModule(lambda inputs, context: inputs))
    return client


@pytest.mark.parametrize(
    ("approval", "user", "disabled"),
    [("auto", "yes", True), ("auto", "no", False), ("auto", "cannot", False), ("require", "cannot", False)],
)
async def test_who_cannot_be_asked_does_not_control_the_application(
    mode: str, approval: str, user: str, disabled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by apcore's own control modules nor by a module that calls them."""
    application = controlled()
    toggle = {"module_id": "echo", "enabled": False, "reason": "a test"}

    async def turn_off(inputs: dict[str, Any], context: Any) -> Any:
        return await application.executor.call_async(TOGGLE, toggle)

    application.registry.register("turn_off", FunctionalModule(turn_off))
    arguments, _ = asking(EVERYONE[user])
    async with connect(application.executor, mode=mode, client=arguments, approval=approval) as client:
        assert TOGGLE in {tool.name for tool in (await client.list_tools()).tools}
        for name, inputs in ((TOGGLE, toggle), ("turn_off", {})):
            application.toggle_state.enable("echo")
            outcome = await outcome_of(client, name, inputs)
            assert (outcome in (DENIED, LACKS_ELICITATION)) == (not disabled)
            assert application.toggle_state.is_disabled("echo") == disabled
    assert not any("let through" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("application", "options", "warns"),
    [
        pytest.param(dict, {}, True, id="auto"),
        pytest.param(dict, {"approval": "require"}, True, id="require"),
        pytest.param(dict, {"approval": "off"}, True, id="off"),
        pytest.param(dict, {"approval": "deny"}, False, id="denied"),
        pytest.param(dict, {"prefix": "echo"}, False, id="not-listed"),
        pytest.param(lambda: {"policy": ExecutionPolicy(strict=True)}, {}, False, id="strict"),
    ],
)
def test_a_start_says_that_anybody_may_control_the_application(
    application: Callable[[], dict[str, Any]], options: dict[str, Any], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    executor = controlled(**application()).executor
    for _ in range(2):
        caplog.clear()
        with serving(executor, **options):
            warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert any("system.control" in text and "ACL" in text for text in warned) == warns
    executor.set_acl(ACL(rules=[], default_effect="deny"))
    caplog.clear()
    with serving(executor, **options):
        assert not any("system.control" in record.getMessage() for record in caplog.records)


async def test_the_question_shows_every_argument_and_says_where_it_shortens_one(mode: str) -> None:
    """However long another one is, and at whatever depth: nobody approves what is not shown."""
    given: dict[str, Any] = {"content": "x" * 100_000, "lines": ["y" * 3_000, "short"], "request": {"body": "z" * 501}}
    given["request"] |= {"path": "settings.ini"}
    given |= {"exact": "e" * 500, "path": "/etc/passwd", "count": 7, "right": "a\u202eb"}
    arguments, asked = asking(REFUSE)
    async with connect({"files.write": guarded([])}, mode=mode, client=arguments) as client:
        await outcome_of(client, "files.write", given)
    (question,) = asked
    shown = json.loads(question.message.partition("\nArguments: ")[2].replace("\\u202e", "\\\\u202e"))
    assert shown.keys() == given.keys()
    assert shown["content"] == "x" * 500 + "… (500 of 100,000 characters)"
    assert shown["lines"] == ["y" * 500 + "… (500 of 3,000 characters)", "short"]
    assert shown["request"] == {"body": "z" * 500 + "… (500 of 501 characters)", "path": "settings.ini"}
    assert (shown["exact"], shown["path"], shown["count"]) == (given["exact"], "/etc/passwd", 7)
    assert "\u202e" not in question.message, "it would turn around what is read after it"


async def test_the_question_names_the_tool_its_arguments_and_its_danger_but_no_secret(mode: str) -> None:
    properties = {"disk": {"type": "string"}, "pin": {"type": "string", "x-sensitive": True}}
    module = guarded([], input_schema={"type": "object", "properties": properties})
    below = FunctionalModule(lambda inputs, context: context.executor.call("disk.wipe", inputs, context))
    arguments, asked = asking(APPROVE)
    async with connect({"disk.wipe": module, "below": below}, mode=mode, client=arguments) as client:
        for name in ("disk.wipe", "below"):
            assert not (await client.call_tool(name, {"disk": "sda1", "pin": "hunter2"})).is_error
    assert len(asked) == 2
    for question in asked:
        assert all(part in question.message for part in ("disk.wipe", "disk", "sda1", "pin", "***REDACTED***"))
        assert "destructive" in question.message.lower()
        assert "hunter2" not in question.message


async def test_an_approved_module_may_ask_and_stream_and_still_runs_once(mode: str) -> None:
    runs: list[str] = []

    class Streaming(FunctionalModule):
        async def stream(self, inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
            runs.append("run")
            yield {"a": 1}
            yield {"name": (await elicit(context, "Who?", SCHEMA) or {}).get("name")}

    annotations = ModuleAnnotations(requires_approval=True, streaming=True)
    chunks: list[str | None] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        chunks.append(message)

    arguments, asked = asking(lambda params: accept(name="Ada") if params.message == "Who?" else APPROVE)
    module = Streaming(lambda inputs, context: {}, annotations=annotations)
    async with connect({"s": module}, mode=mode, client=arguments) as client:
        result = await client.call_tool("s", progress_callback=note)
    assert result.structured_content == {"a": 1, "name": "Ada"}
    assert (len(asked), runs, chunks) == (2, ["run"], ['{"a":1}', '{"name":"Ada"}'])


class Judge:
    """An approval handler that says always the same and keeps what it was asked."""

    def __init__(self, status: Any) -> None:
        self.status = status
        self.asked: list[ApprovalRequest] = []

    async def request_approval(self, request: ApprovalRequest) -> ApprovalResult:
        self.asked.append(request)
        return ApprovalResult(status=self.status, reason="secret reasons of /etc/judge")

    async def check_approval(self, approval_id: str) -> ApprovalResult:
        return ApprovalResult(status="approved")


@pytest.mark.parametrize(
    ("status", "is_error"),
    [("approved", False), ("rejected", True), ("timeout", True), ("pending", True)],
)
async def test_an_approval_handler_decides_in_the_users_place_and_its_reasons_stay_here(
    mode: str, status: str, is_error: bool
) -> None:
    ran: list[dict[str, Any]] = []
    judge = Judge(status)
    arguments, asked = asking(REFUSE)
    async with connect({"wipe": guarded(ran)}, mode=mode, client=arguments, approval=judge) as client:
        result = await client.call_tool("wipe", {"disk": "a"})
    assert (result.is_error, len(ran), asked) == (is_error, int(not is_error), [])
    assert [(request.module_id, request.arguments) for request in judge.asked] == [("wipe", {"disk": "a"})]
    assert "secret" not in result.model_dump_json()
    if status == "rejected":
        assert text_of(result) == DENIED


@pytest.mark.parametrize("approval", ALL_APPROVALS)
@pytest.mark.parametrize(
    ("handler", "runs"),
    [pytest.param(AutoApproveHandler(), 1, id="approves"), pytest.param(Judge("rejected"), 0, id="rejects")],
)
async def test_an_executor_keeps_the_approval_handler_it_came_with(approval: str, handler: Any, runs: int) -> None:
    ran: list[dict[str, Any]] = []
    executor = Executor(registry_of({"wipe": guarded(ran)}), approval_handler=handler)
    arguments, asked = asking(REFUSE if runs else APPROVE)
    async with connect(executor, client=arguments, approval=approval) as client:
        await client.call_tool("wipe")
    assert (len(ran), asked) == (runs, [])


@pytest.mark.parametrize(("approval", "user"), [("auto", "no"), ("require", "cannot"), ("deny", "yes")])
async def test_a_client_that_sends_an_approval_token_gains_nothing(mode: str, approval: str, user: str) -> None:
    ran: list[dict[str, Any]] = []
    arguments, _ = asking(EVERYONE[user])
    async with connect({"wipe": guarded(ran)}, mode=mode, client=arguments, approval=approval) as client:
        for token in ("token", "", 7, None):
            assert await outcome_of(client, "wipe", {"_approval_token": token}) != '{"ran":true}'
    assert ran == []


async def test_a_module_that_needs_no_approval_is_not_asked_about(mode: str) -> None:
    arguments, asked = asking(REFUSE)
    module = guarded([], annotations=ModuleAnnotations(destructive=True))
    async with connect({"wipe": module}, mode=mode, client=arguments, approval="require") as client:
        assert not (await client.call_tool("wipe")).is_error
    assert asked == []


@pytest.mark.parametrize("handler", [AutoApproveHandler, ElicitationApprovalHandler])
def test_a_class_is_no_approval_handler(handler: Any) -> None:
    with pytest.raises(TypeError, match="approval must be an object"):
        MCPServer(registry_of(), approval=handler)
    with pytest.raises(TypeError, match="metrics_collector must be an object"):
        MCPServer(registry_of(), metrics_collector=MetricsCollector)


def test_an_unknown_approval_mode_is_refused_before_anything_starts() -> None:
    with pytest.raises(ValueError, match="auto, require, deny, off"), serving(registry_of(), approval="maybe"):
        pytest.fail("it started")


def test_a_question_about_arguments_that_no_text_can_hold_is_asked_all_the_same() -> None:
    request = modern("tools/call", {"name": "wipe", "arguments": {"disk": "\ud800"}})
    request["json"]["params"]["_meta"]["io.modelcontextprotocol/clientCapabilities"] = {"elicitation": {}}
    with serving(registry_of({"wipe": guarded([])})) as url:
        headers = {**request["headers"], "Content-Type": "application/json"}
        response = httpx.post(f"{url}/mcp", content=json.dumps(request["json"]), headers=headers)
    assert "Let wipe run?" in response.json()["result"]["inputRequests"]["approval"]["params"]["message"]


def test_a_call_that_lacks_a_capability_of_its_client_is_a_bad_request() -> None:
    """MCP 2026-07-28: -32021 goes with HTTP 400; also of a module that another one calls."""
    below = FunctionalModule(lambda inputs, context: context.executor.call("wipe", inputs, context))
    with serving(registry_of({"wipe": guarded([]), "below": below}), approval="require") as url:
        for name in ("wipe", "below"):
            response = httpx.post(f"{url}/mcp", **modern("tools/call", {"name": name, "arguments": {}}))
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["data"]) == (400, *LACKS_ELICITATION)


@pytest.mark.parametrize(("first", "runs"), [("deny", 0), ("auto", 1), ("off", 1), (AutoApproveHandler(), 1)])
async def test_each_server_of_one_executor_decides_about_its_own_calls(mode: str, first: Any, runs: int) -> None:
    ran: list[dict[str, Any]] = []
    executor = Executor(registry_of({"wipe": guarded(ran)}))
    async with connect(executor, mode=mode, approval="deny") as second:
        async with connect(executor, mode=mode, approval=first) as client:
            assert await outcome_of(second, "wipe") == DENIED
            assert await outcome_of(client, "wipe") == ('{"ran":true}' if runs else DENIED)
        assert await outcome_of(second, "wipe") == DENIED
        assert len(ran) == runs
        await executor.call_async("wipe", {})  # which is nobody's: apcore skips a gate without a handler
    await executor.call_async("wipe", {})
    assert len(ran) == runs + 2


@pytest.mark.parametrize(("approval", "user", "runs"), [("deny", "yes", 0), ("auto", "no", 0), ("auto", "yes", 1)])
async def test_what_a_module_calls_without_its_context_needs_approval_too(
    mode: str, approval: str, user: str, runs: int
) -> None:
    ran: list[dict[str, Any]] = []
    executor = Executor(registry_of({"wipe": guarded(ran)}))

    async def wipe(inputs: dict[str, Any], context: Any) -> Any:
        return await executor.call_async("wipe", inputs)

    executor.registry.register("outer", FunctionalModule(wipe))
    arguments, _ = asking(EVERYONE[user])
    async with connect(executor, mode=mode, client=arguments, approval=approval) as client:
        await client.call_tool("outer")
    assert len(ran) == runs


@pytest.mark.parametrize(("approval", "runs"), [("deny", 0), ("require", 0), ("auto", 1)])
async def test_what_a_module_leaves_running_needs_approval_after_its_call_has_ended(
    mode: str, approval: str, runs: int, caplog: pytest.LogCaptureFixture
) -> None:
    ran: list[dict[str, Any]] = []
    executor = Executor(registry_of({"wipe": guarded(ran)}))
    answered, outcomes = threading.Event(), queue.Queue[object]()
    left: list[asyncio.Task[None]] = []

    async def later() -> None:
        await asyncio.to_thread(answered.wait, 10)
        gc.collect()
        try:
            outcomes.put(await executor.call_async("wipe", {}))
        except ApprovalDeniedError as error:
            outcomes.put(error)

    async def leave(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        left.append(asyncio.create_task(later()))
        return {}

    executor.registry.register("leave", FunctionalModule(leave))
    async with connect(executor, mode=mode, approval=approval) as client:
        await client.call_tool("leave")
        answered.set()
        outcome = await asyncio.to_thread(outcomes.get, timeout=10)
    assert isinstance(outcome, ApprovalDeniedError) != bool(runs)
    assert len(ran) == runs
    assert ("wipe is let through without approval" in caplog.text) == bool(runs)


@pytest.mark.parametrize(("user", "runs"), [("yes", 1), ("no", 0), ("cannot", 0)])
async def test_auto_lets_through_only_what_apcore_would(mode: str, user: str, runs: int) -> None:
    ran: list[dict[str, Any]] = []
    executor = Executor(registry_of({"wipe": guarded(ran)}), policy=ExecutionPolicy(strict=True))
    before = executor.governance_state()
    async with connect(executor, mode=mode, client=asking(EVERYONE[user])[0]) as client:
        told = await outcome_of(client, "wipe")
        assert executor.governance_state() == before
        with pytest.raises(ApprovalDeniedError):
            await executor.call_async("wipe", {})
    assert executor.governance_state() == before
    assert told == ('{"ran":true}' if runs else LACKS_ELICITATION if (mode, user) == (MODERN, "cannot") else DENIED)
    assert len(ran) == runs


async def test_a_handler_and_a_policy_that_come_later_count_from_then_on(mode: str) -> None:
    ran: list[dict[str, Any]] = []
    executor = Executor(registry_of({"wipe": guarded(ran)}))
    judge = Judge("approved")
    async with connect(executor, mode=mode) as client:
        executor.set_policy(ExecutionPolicy(strict=True))
        assert await outcome_of(client, "wipe") in (DENIED, LACKS_ELICITATION)
        executor.set_approval_handler(judge)
        assert executor.governance_state().approval_handler_configured
        assert await outcome_of(client, "wipe") == '{"ran":true}'
    assert (len(judge.asked), len(ran)) == (1, 1)


@pytest.mark.parametrize(("user", "runs"), [("yes", 1), ("no", 0), ("cannot", 0)])
async def test_the_handler_that_asks_serves_an_executor_of_ones_own(mode: str, user: str, runs: int) -> None:
    ran: list[dict[str, Any]] = []
    executor = Executor(registry_of({"wipe": guarded(ran)}), approval_handler=ElicitationApprovalHandler())
    arguments, asked = asking(EVERYONE[user])
    async with connect(executor, mode=mode, client=arguments, approval="deny") as client:
        await outcome_of(client, "wipe")
    assert (len(ran), len(asked)) == (runs, user != "cannot")
    with pytest.raises(ApprovalDeniedError):
        await executor.call_async("wipe", {})


async def test_a_gate_of_the_users_own_stays_what_it_is() -> None:
    passed = []

    class Gate(BuiltinApprovalGate):
        async def execute(self, ctx: Any) -> Any:
            passed.append(ctx.module_id)
            return await super().execute(ctx)

    registry = registry_of({"wipe": guarded([]), "echo": lambda inputs, context: inputs})
    strategy = build_standard_strategy(registry=registry)
    strategy.replace("approval_gate", Gate())
    async with connect(Executor(registry, strategy=strategy), approval="deny") as client:
        assert (await outcome_of(client, "wipe"), await outcome_of(client, "echo")) == (DENIED, "{}")
    assert passed == ["wipe", "echo"]


async def test_what_a_person_takes_to_approve_does_not_count_against_the_call(mode: str) -> None:
    """Nor what a handler of one's own takes."""
    limit = Config(data={"executor": {"global_timeout": 300}})

    class Slow(Judge):
        async def request_approval(self, request: ApprovalRequest) -> ApprovalResult:
            await asyncio.sleep(0.5)
            return await super().request_approval(request)

    async def callback(context: Any, params: Any) -> ElicitResult:
        await asyncio.sleep(0.5)
        return APPROVE

    for approval in ("auto", Slow("approved")):
        executor = Executor(registry_of({"wipe": guarded([])}), config=limit)
        client_arguments = {"elicitation_callback": callback}
        async with connect(executor, mode=mode, client=client_arguments, approval=approval) as client:
            assert await outcome_of(client, "wipe") == '{"ran":true}'


async def test_the_question_about_a_called_module_tells_no_secret_in_whatever_form_it_is_given(mode: str) -> None:
    class Credentials(BaseModel):
        password: str

    secret = {"type": "string", "x-sensitive": True}
    credentials = {"type": "object", "properties": {"password": secret}}
    properties = {"keys": {"type": "array", "items": secret}, "login": credentials, "disk": {}}

    async def call(inputs: dict[str, Any], context: Any) -> Any:
        given = {"keys": ("s3cret",), "login": Credentials(password="s3cret"), "disk": "\ud800"}
        return await context.executor.call_async("wipe", given, context)

    arguments, asked = asking(REFUSE)
    wipe = guarded([], input_schema={"type": "object", "properties": properties})
    async with connect({"wipe": wipe, "call": call}, mode=mode, client=arguments) as client:
        await outcome_of(client, "call")
    (question,) = asked
    assert '"keys": ["***REDACTED***"], "login": {"password": "***REDACTED***"}' in question.message
    assert "s3cret" not in question.message


async def test_who_holds_the_gate_of_an_executor_still_decides(mode: str) -> None:
    ran: list[dict[str, Any]] = []
    registry, gate = registry_of({"wipe": guarded(ran)}), BuiltinApprovalGate()
    strategy = build_standard_strategy(registry=registry)
    strategy.replace("approval_gate", gate)
    async with connect(Executor(registry, strategy=strategy), mode=mode, approval="off") as client:
        assert await outcome_of(client, "wipe") == '{"ran":true}'
        gate.set_handler(Judge("rejected"))
        assert await outcome_of(client, "wipe") == DENIED
    assert len(ran) == 1
