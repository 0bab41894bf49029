"""From `tools/call` to the Executor and back (FR-EXEC-007, FR-STREAM-001, FR-ERROR-001)."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from apcore import Executor, Identity, ModuleAnnotations
from apcore.errors import ACLDeniedError
from conftest import HANDSHAKE, FunctionalModule, client_of, connect, echo, registry_of, serving
from mcp import MCPError
from mcp_types import ElicitResult, ListRootsResult
from support import (
    INTEGER,
    SCHEMA,
    WITHOUT_LIMIT,
    Caplog,
    StreamingModule,
    Wire,
    accept,
    ask,
    asking,
    errors_logged,
    failure,
    keeping_little,
    listed,
    messages_logged,
    noting,
    of,
    text_of,
    wired,
)

from apcore_mcp import elicit, report_progress
from apcore_mcp.client import NO_CLIENT
from apcore_mcp.conversation import Conversation, WaitingRoom


@pytest.mark.requirement("FR-ERROR-001")
async def test_what_is_not_listed_cannot_be_called(mode: str, caplog: Caplog) -> None:
    """And is logged as any call that fails."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    ran: list[str] = []

    def module(name: str, **attributes: Any) -> FunctionalModule:
        return FunctionalModule(lambda inputs, context: ran.append(name) or {}, **{"tags": ["good"], **attributes})

    modules = {
        "demo.listed": module("listed"),
        "demo.hidden": module("hidden", annotations=ModuleAnnotations(discoverable=False)),
        "demo.untagged": module("untagged", tags=["other"]),
        "demo.broken": module("broken", input_schema=of(a={"$ref": "#/$defs/No"})),
        "demo.leaves": module("leaves"),
        "other.prefix": module("prefix"),
    }
    names = [*modules.keys() - {"demo.listed"}, "other-prefix", "demo-hidden", "demo.unknown", "Demo.Listed", "demo"]
    names += ["{module_id}", "%s", "two\nlines", "x" * 1_000]
    registry = registry_of(modules)
    async with connect(registry, mode=mode, tags=["good"], prefix="demo.") as client:
        assert await listed(client) == ["demo.leaves", "demo.listed"]
        registry.unregister("demo.leaves")
        for name in names:
            told = "Module not found: " + name[:200].replace("\n", "\\n")
            assert failure(await client.call_tool(name, {}), told)["error_type"] == "MODULE_NOT_FOUND"
        assert not (await client.call_tool("demo.listed", {})).is_error
    assert ran == ["listed"]
    logged = [record.getMessage() for record in errors_logged(caplog)]
    assert (len(logged), any("\n" in line for line in logged)) == (len(names), False)
    unknown = "Tool call error: demo.unknown - ModuleNotFoundError: Module not found: demo.unknown (trace "
    assert [line for line in logged if line.startswith(unknown)]
    assert "Tool call: demo.unknown" in messages_logged(caplog, logging.DEBUG)


# ---- Streaming ----


MERGED: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "nothing": ([], {}),
    "later_wins": ([{"a": 1}, {"b": 2}, {"a": 3}], {"a": 3, "b": 2}),
    "objects_merge": ([{"o": {"x": 1, "y": {"z": 1}}}, {"o": {"y": {"w": 2}}}], {"o": {"x": 1, "y": {"z": 1, "w": 2}}}),
    "lists_are_replaced": ([{"l": [1, 2]}, {"l": [3]}], {"l": [3]}),
    "kinds": ([{"a": {"x": 1}}, {"a": 1}, {"b": 1}, {"b": {"x": 1}}], {"a": 1, "b": {"x": 1}}),
}


@pytest.mark.requirement("FR-STREAM-001")
async def test_a_stream_is_its_chunks_and_then_one_result(mode: str) -> None:
    streams = {name: StreamingModule(chunks) for name, (chunks, _) in MERGED.items()}
    async with connect({f"s.{name}": stream for name, stream in streams.items()}, mode=mode) as client:
        for name, (chunks, merged) in MERGED.items():
            note, told = noting()
            result = await client.call_tool(f"s.{name}", progress_callback=note)
            shown = [(number, total, json.loads(message or "")) for number, total, message in told]
            assert shown == [(number, None, chunk) for number, chunk in enumerate(chunks, 1)]
            assert not result.is_error
            assert result.structured_content == json.loads(text_of(result)) == merged


TOLD = of(n=INTEGER) | {"required": ["n"]}
REFUSED = "Output validation failed (the tool has run):\n- "
FAILING: dict[str, tuple[list[Any], list[int], str]] = {
    "unexpected": ([{"n": 1}, RuntimeError("/etc/passwd"), {"n": 3}], [1], "Internal error occurred"),
    "acl": ([{"n": 1}, ACLDeniedError("alice", "s")], [1], "Access denied"),
    "json": ([{"n": 1}, {"m": math.nan}], [1], "Failed to serialize module output: nan at m (the tool has run)"),
    "nothing": ([], [], f"{REFUSED}(root): Field required (required)"),
    "wrong": ([{"n": 1}, {"n": "x"}], [1, "x"], f"{REFUSED}n: Value is not valid (type)"),
}


async def test_a_stream_that_fails_is_any_error() -> None:
    """Of what breaks the output schema, apcore only writes a line of its log."""
    streams = {f"s.{name}": StreamingModule(chunks, output_schema=TOLD) for name, (chunks, *_) in FAILING.items()}
    async with connect(streams) as client:
        for name, (_, numbers, sentence) in FAILING.items():
            note, told = noting()
            result = await client.call_tool(f"s.{name}", progress_callback=note)
            assert [json.loads(message or "")["n"] for _, _, message in told] == numbers
            assert (result.is_error, text_of(result), result.structured_content) == (True, sentence, None)


async def test_a_modules_own_progress_hides_no_chunk() -> None:
    async def stream(inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        await report_progress(context, 50, 100)
        yield {"a": 1}
        yield {"b": 2}

    module = FunctionalModule(echo, stream=stream, annotations=ModuleAnnotations(streaming=True))
    note, told = noting()
    async with connect({"s": module}) as client:
        await client.call_tool("s", progress_callback=note)
    assert told == [(50, 100, None), (51, None, '{"a":1}'), (52, None, '{"b":2}')]


@pytest.mark.requirement("FR-STREAM-001")
async def test_without_token_or_annotation_nothing_streams() -> None:
    note, told = noting()
    plain = StreamingModule([{"n": 1}], annotations=ModuleAnnotations(streaming=False))
    async with connect({"stream": StreamingModule([{"n": 1}]), "plain": plain}) as client:
        results = [await client.call_tool("stream"), await client.call_tool("plain", progress_callback=note)]
    assert [result.structured_content for result in results] == [{"executed": True}] * 2
    assert told == []


def asking_module(ended: threading.Event | None = None, schema: Any = SCHEMA) -> Any:
    """A module that asks for a name, tells what it was given, and sets `ended`."""

    async def ask(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            question = f"Name {inputs.get('n')}?"
            return {"n": inputs.get("n"), "answer": await elicit(context, question, schema, key="name")}
        finally:
            if ended is not None:
                ended.set()

    return ask


# ---- The wire of 2026-07-28, by hand ----


@pytest.mark.requirement("FR-EXEC-007")
async def test_a_state_resumes_its_own_call_once() -> None:
    runs: list[str] = []

    async def counted(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        runs.append(f"{context.call_chain[-1]} starts")
        answer = await elicit(context, "Who?", SCHEMA, key="name")
        runs.append(f"goes on with {answer}")
        return {"answer": answer}

    async with wired({"ask": counted, "other": counted}) as wire, wired({"ask": counted}) as stranger:
        _, _, state = await wire.question("ask", {"n": 1})
        _, _, strange = await stranger.question("ask", {"n": 1})
        for wrong in ("", "nonsense", "v1.AAAA", state[:-2], state[::-1], state.swapcase(), f"{state}A", strange):
            await wire.refused(wrong, "ask", {"n": 1})
        await wire.refused(state, "other", {"n": 1})
        await wire.refused(state, "ask", {"n": 2})
        await wire.refused(state, "ask")
        answer = {"request_state": state, "input_responses": {"name": accept(name="Ada")}}
        result = await wire.call("ask", {"n": 1}, **answer)
        assert result.structured_content == {"answer": {"name": "Ada"}}
        await wire.refused(state, "ask", {"n": 1})
        assert runs == ["ask starts", "ask starts", "goes on with {'name': 'Ada'}"]


async def test_a_retry_without_the_answer_is_asked_again() -> None:
    async with wired({"ask": asking_module()}) as wire:
        key, message, state = await wire.question("ask", {"n": 1})
        responses: Any
        for responses in (None, {}, {"other": accept(name="Eve")}):
            again = await wire.question("ask", {"n": 1}, request_state=state, input_responses=responses)
            assert again[:2] == (key, message) == ("name", "Name 1?")
            await wire.refused(state, "ask", {"n": 1})
            state = again[2]
        answer = {"request_state": state, "input_responses": {"name": accept(name="Ada")}}
        assert (await wire.call("ask", {"n": 1}, **answer)).structured_content == {"n": 1, "answer": {"name": "Ada"}}
        _, _, state = await wire.question("ask", {"n": 2})
        roots = {"name": ListRootsResult(roots=[])}  # an answer of another kind is none, and no failure of the module
        result = await wire.call("ask", {"n": 2}, request_state=state, input_responses=roots)
        assert result.structured_content == {"n": 2, "answer": None}


async def ask_three(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    keys = inputs["keys"]
    answers = await asyncio.gather(*(elicit(context, f"{n}?", SCHEMA, key=key) for n, key in enumerate(keys)))
    return {"answers": [answer and answer["name"] for answer in answers]}


async def test_a_retry_is_asked_for_the_open_questions() -> None:
    """No key is used twice."""
    async with wired({"ask": ask_three}) as wire:
        arguments = {"keys": ["approval", "name", "approval", None, None]}
        result = await wire.call("ask", arguments)
        asked = {key: request.params.message for key, request in result.input_requests.items()}
        assert asked == {"approval": "0?", "name": "1?", "approval-2": "2?", "input": "3?", "input-2": "4?"}
        for answered in ("name", "input"):
            asked.pop(answered)
            given = {answered: accept(name=answered), "never": accept(name="Eve")}
            result = await wire.call("ask", arguments, request_state=result.request_state, input_responses=given)
            assert {key: request.params.message for key, request in result.input_requests.items()} == asked
        given = {key: accept(name=key) for key in asked}
        result = await wire.call("ask", arguments, request_state=result.request_state, input_responses=given)
    answers = ["approval", "name", "approval-2", "input", "input-2"]
    assert result.structured_content == {"answers": answers}


async def test_a_handshake_client_is_asked_several_at_once() -> None:
    all_are_asked = asyncio.Barrier(3)

    async def answer(context: Any, params: Any) -> ElicitResult:
        await all_are_asked.wait()
        return accept(name=params.message)

    client = {"elicitation_callback": answer}
    async with connect({"ask": ask_three}, mode=HANDSHAKE, client=client) as client, asyncio.timeout(20):
        result = await client.call_tool("ask", {"keys": [None] * 3})
    assert result.structured_content == {"answers": ["0?", "1?", "2?"]}


async def test_nothing_of_what_clients_answer_is_kept(mode: str) -> None:
    """Neither what they accept with nor what they decline with; also where timers keep the call they were made in."""

    async def patient(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        asyncio.get_running_loop().call_later(3600, print)
        return {"answer": bool(await elicit(context, "Who?", SCHEMA, key="name"))}

    arguments, asked = asking(lambda params: ElicitResult(action=action, content={"name": "x" * 1_000_000}))
    async with connect({"ask": patient}, mode=mode, client=arguments) as client, asyncio.timeout(40):
        action: Any = "accept"
        await client.call_tool("ask")
        async with keeping_little(client):
            for action in ["accept"] * 5 + ["decline"] * 5:
                result = await client.call_tool("ask")
                assert result.structured_content == {"answer": action == "accept"}
    assert len(asked) == 11


async def test_waiting_handshake_calls_count_against_the_bytes() -> None:
    """One more is refused, as a tool error, which every agent can show its model."""
    asked, waiting, ended = asyncio.Event(), asyncio.Event(), threading.Event()

    async def answer(context: Any, params: Any) -> ElicitResult:
        asked.set()
        await waiting.wait()
        return accept(name="Ada")

    large = {"text": "x" * (2**17 + 100)}  # more than half of what there is room for
    client = {"elicitation_callback": answer}
    modules = {"ask": asking_module(ended)}
    async with connect(modules, mode=HANDSHAKE, client=client) as client, asyncio.timeout(20):
        first = asyncio.create_task(client.call_tool("ask", large))
        await asked.wait()
        refused = await client.call_tool("ask", large)
        assert failure(refused, "Too many calls, or too large ones, wait for their users' answers")
        assert ended.is_set()
        waiting.set()
        assert (await first).structured_content == {"n": None, "answer": {"name": "Ada"}}
        assert not (await client.call_tool("ask", large)).is_error


async def test_of_a_hundred_parked_calls_one_more_is_refused() -> None:
    """One that has ended meanwhile keeps its place for its retry."""
    ended, timed_out = threading.Event(), threading.Event()
    hasty = FunctionalModule(asking_module(timed_out), resources={"timeout": 50})
    modules = {"ask": asking_module(ended, None), "hasty": hasty}
    # apcore's own limits could run out while so many are asked.
    async with wired(Executor(registry_of(modules), config=WITHOUT_LIMIT)) as wire:
        states = [(await wire.question("ask", {"n": number}))[2] for number in range(99)]
        await wire.question("hasty")
        assert await asyncio.to_thread(timed_out.wait, 10)
        with pytest.raises(MCPError, match="Too many calls"):
            await wire.call("ask", {"n": 100})
        assert await asyncio.to_thread(ended.wait, 10)
        for number in (7, 98, 0):  # in whatever order
            answer = {"request_state": states[number], "input_responses": {"name": accept()}}
            result = await wire.call("ask", {"n": number}, **answer)
            assert result.structured_content == {"n": number, "answer": {}}
        await wire.question("ask", {"n": 101})


async def test_a_state_is_its_callers_alone() -> None:
    """Also where nothing else binds it to its caller."""
    room, ann = WaitingRoom(), Identity("ann")
    for caller, others in ((ann, [None, Identity("eve")]), (None, [ann])):
        state = room.park(Conversation("ask", {}, caller, NO_CLIENT, room))["requestState"]
        for other in others:
            with pytest.raises(MCPError, match="Invalid or expired"):
                room.resume(state, other, NO_CLIENT, {})
        assert room.resume(state, caller, NO_CLIENT, {}).caller is caller


async def test_a_parked_call_keeps_no_meta() -> None:
    """Each may be as large as a request, and a hundred calls of each caller may wait."""

    async with wired({"ask": asking_module()}) as wire, keeping_little(wire.client):
        for _ in range(4):
            await wire.question("ask", {}, meta={"filler": "x" * 2_000_000})


async def test_parked_calls_of_a_caller_hold_256_kibibytes_together() -> None:
    """A call no longer counts when it is resumed, when it has ended, and when it was given up."""
    ended = threading.Event()

    patient = asking_module(ended)
    hasty = FunctionalModule(patient, resources={"timeout": 50})
    large, small = {"text": "é" * (2**16 - 100)}, {"text": "x"}  # half of that, and next to nothing
    answer = {"input_responses": {"name": accept(name="Ada")}}
    async with wired({"ask": patient, "hasty": hasty}) as wire:

        async def is_given_up(name: str, arguments: dict[str, Any]) -> None:
            ended.clear()
            with pytest.raises(MCPError, match="Too many calls") as caught:
                await wire.call(name, arguments)
            assert caught.value.error.code == -32000
            assert await asyncio.to_thread(ended.wait, 10)

        _, _, state = await wire.question("ask", large)
        await wire.question("ask", large)
        await wire.question("ask", small)
        await is_given_up("ask", large)
        _, _, state = await wire.question("ask", large, request_state=state)  # without its answer
        await is_given_up("ask", large)
        await wire.call("ask", large, request_state=state, **answer)
        ended.clear()
        _, _, state = await wire.question("hasty", large)
        assert await asyncio.to_thread(ended.wait, 10)
        await wire.question("ask", large)  # as the arguments of what has ended are not kept
        late = await wire.call("hasty", large, request_state=state, **answer)
        assert text_of(late) == "Module timed out after 50ms"  # what it ended with is kept for one retry
        await wire.refused(state, "hasty", large)
        await is_given_up("ask", {"text": "x" * 2**18})


async def test_a_call_is_resumed_though_its_tool_has_gone() -> None:
    """What runs is not ended by `unregister()`, so what waits for its user is not lost by it either."""
    registry = registry_of({"ask": ask})
    async with wired(registry) as wire:
        key, _, state = await wire.question("ask")
        registry.unregister("ask")
        assert text_of(await wire.call("ask")) == "Module not found: ask"
        result = await wire.call("ask", request_state=state, input_responses={key: accept(name="Ada")})
        assert result.structured_content == {"answer": {"name": "Ada"}}


async def test_a_client_that_cannot_ask_is_asked_nothing() -> None:
    async def rounds(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        first = await elicit(context, "first", SCHEMA, key="name")
        return {"first": first, "second": await elicit(context, "second", SCHEMA, key="again")}

    with serving(registry_of({"rounds": rounds})) as url:
        able = client_of(url, **asking(accept())[0])
        async with able, client_of(url) as unable, asyncio.timeout(20):
            _, _, state = await Wire(able).question("rounds")
            answers = {"name": accept(name="Ada")}
            result = await Wire(unable).call("rounds", request_state=state, input_responses=answers)
            assert result.structured_content == {"first": {"name": "Ada"}, "second": None}
