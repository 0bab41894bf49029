"""From `tools/call` to the Executor and back: parked calls by hand on the wire of 2026-07-28, streams, and what
cannot be called (FR-EXEC-007, FR-STREAM-001, FR-ERROR-001).
"""

from __future__ import annotations

import asyncio
import json
import math
import queue
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest
from apcore import (
    Config,
    Executor,
    ModuleAnnotations,
)
from apcore.errors import (
    ACLDeniedError,
)
from conftest import (
    HANDSHAKE,
    MODERN,
    FunctionalModule,
    connect,
    echo,
    free_port,
    registry_of,
    serving,
)
from mcp import MCPError
from mcp.client import Client
from mcp_types import ElicitResult, InputRequiredResult, ListRootsResult
from support import (
    SCHEMA,
    StreamingModule,
    Wire,
    accept,
    ask,
    asking,
    errors_logged,
    failure,
    noting,
    text_of,
    wired,
)

from apcore_mcp import (
    MCPServer,
    elicit,
    report_progress,
)

# ---- Only listed tools ----


@pytest.mark.requirement("FR-ERROR-001")
async def test_what_is_not_listed_cannot_be_called(caplog: pytest.LogCaptureFixture, mode: str) -> None:
    ran: list[str] = []

    def module(name: str, **attributes: Any) -> FunctionalModule:
        def run(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
            ran.append(name)
            return {}

        return FunctionalModule(run, **{"tags": ["good"], **attributes})

    registry = registry_of(
        {
            "demo.listed": module("listed"),
            "demo.hidden": module("hidden", annotations=ModuleAnnotations(discoverable=False)),
            "demo.untagged": module("untagged", tags=["other"]),
            "demo.broken": module(
                "broken", input_schema={"type": "object", "properties": {"a": {"$ref": "#/$defs/No"}}}
            ),
            "demo.leaves": module("leaves"),
            "other.prefix": module("prefix"),
        }
    )
    names = [
        *("demo.hidden", "demo.untagged", "demo.broken", "demo.leaves", "other.prefix", "other-prefix", "demo-hidden"),
        *("demo.unknown", "Demo.Listed", "demo", "{module_id}", "%s"),
    ]
    async with connect(registry, mode=mode, tags=["good"], prefix="demo.") as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["demo.leaves", "demo.listed"]
        registry.unregister("demo.leaves")
        results = {name: await client.call_tool(name, {}) for name in names}
        listed = await client.call_tool("demo.listed", {})
        endless = await client.call_tool("x" * 1_000, {})
    assert failure(endless, f"Module not found: {'x' * 200}")["error_type"] == "MODULE_NOT_FOUND"
    for name, result in results.items():
        assert failure(result, f"Module not found: {name}")["error_type"] == "MODULE_NOT_FOUND"
    assert listed.is_error is False
    assert ran == ["listed"]
    assert len(errors_logged(caplog)) == len(names) + 1


REDACTED = "***REDACTED***"


# ---- Streaming ----


@pytest.mark.requirement("FR-STREAM-001")
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


@pytest.mark.requirement("FR-STREAM-001")
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


async def ask_by_name(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"n": inputs["n"], "answer": await elicit(context, f"Name {inputs['n']}?", SCHEMA, key="name")}


# ---- The wire of 2026-07-28, by hand ----


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


@pytest.mark.requirement("FR-EXEC-007")
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
