"""One running call: when it ends, what is told of it, and what it leaves behind (FR-EXEC, FR-EXT; design "Elicitation",
"Cancellation", "Progress and streaming").
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from apcore import Config, Executor
from conftest import (
    MODERN,
    PROGRAM,
    Clock,
    FunctionalModule,
    RawClient,
    connect,
    echo,
    hosting,
    registry_of,
    with_clock,
)
from mcp import MCPError
from mcp.client import Client
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    ElicitResult,
    InputRequiredResult,
)

from apcore_mcp import async_serve, elicit, report_progress

META = {
    PROTOCOL_VERSION_META_KEY: MODERN,
    CLIENT_INFO_META_KEY: {"name": "raw", "version": "1"},
    CLIENT_CAPABILITIES_META_KEY: {"elicitation": {"form": {}}},
}


def call(tool: str, arguments: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    """Params of a `tools/call` of 2026-07-28 by a client that can be asked, and wants progress under the token 1."""
    return {"name": tool, "arguments": arguments or {}, "_meta": {**META, "progressToken": 1}, **more}


# ---- Questions ----


@pytest.mark.parametrize("action", ["decline", "cancel"])
async def test_a_bare_question_that_is_not_accepted_is_no_confirmation(mode: str, action: Any) -> None:
    async def confirm(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"answer": await elicit(context, "Go on?")}

    async def answer(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action=action, content={})

    async with connect({"confirm": confirm}, mode=mode, client={"elicitation_callback": answer}) as client:
        assert (await client.call_tool("confirm")).structured_content == {"answer": None}


def test_a_question_that_nobody_answers_for_ten_minutes_ends_its_call(caplog: pytest.LogCaptureFixture) -> None:
    gone = asyncio.Event()

    async def patient(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            return {"answer": await elicit(context, "Who?")}
        finally:
            gone.set()

    async def nobody(context: Any, params: Any) -> ElicitResult:
        raise AssertionError("the test answers by hand")

    async def story(clock: Clock) -> None:
        without_limit = Config({"executor": {"default_timeout": 0, "global_timeout": 0}})
        executor = Executor(registry_of({"patient": patient}), config=without_limit)
        async with (
            async_serve(executor) as app,
            hosting(app) as url,
            Client(f"{url}/mcp", mode=MODERN, cache=None, elicitation_callback=nobody) as client,
        ):
            question = await client.session.call_tool("patient", allow_input_required=True)
            assert isinstance(question, InputRequiredResult)
            await clock.put_forward(9 * 60)
            assert not gone.is_set()
            await clock.put_forward(2 * 60)
            assert gone.is_set()
            with pytest.raises(MCPError) as caught:
                await client.session.call_tool("patient", request_state=question.request_state, input_responses={})
            assert caught.value.error.code == -32602

    with_clock(story)
    assert "Question of patient was not answered in time" in caplog.text


def test_progress_while_a_question_is_open_goes_to_no_request_that_was_answered(tmp_path: Path) -> None:
    program = """
@tool
async def work(inputs, context):
    question = asyncio.ensure_future(elicit(context, "Go on?", key="go"))
    while not Path(inputs["gate"]).exists():
        await asyncio.sleep(0.01)
    await report_progress(context, 1)
    Path(inputs["gate"] + ".told").touch()
    answer = await question
    await report_progress(context, 1)  # again: nobody has been told so far
    return {"answer": answer}

@tool
async def wait(inputs, context):
    while not Path(inputs["gate"] + ".told").exists():
        await asyncio.sleep(0.01)
    return {}

serve(registry)
"""
    gate = {"gate": str(tmp_path / "gate")}
    with RawClient([sys.executable, "-c", PROGRAM + program]) as client:
        asked = client.request("tools/call", call("t.work", gate))["result"]
        assert asked["resultType"] == "input_required"
        (tmp_path / "gate").touch()
        waiting = client.send("tools/call", call("t.wait", gate))
        assert client.receive()["id"] == waiting  # and nothing came before it
        answers = {"go": {"action": "accept", "content": {}}}
        again = call("t.work", gate, requestState=asked["requestState"], inputResponses=answers)
        resumed = client.send("tools/call", again)
        told = [client.receive(), client.receive()]
        assert told[0]["params"]["progress"] == 1
        assert (told[1]["id"], told[1]["result"]["structuredContent"]) == (resumed, {"answer": {}})


# ---- Progress ----


async def test_a_progress_message_that_is_no_text_as_json_knows_it_is_told_all_the_same(mode: str) -> None:
    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await report_progress(context, 1, message="half of a pair: \ud83d")
        return {"done": True}

    told: list[str | None] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append(message)

    async with connect({"work": work}, mode=mode) as client:
        result = await client.call_tool("work", progress_callback=note)
    assert (result.structured_content, told) == ({"done": True}, ["half of a pair: ?"])


# ---- The end of a call ----


async def test_a_module_that_has_timed_out_is_ended_while_the_server_goes_on(mode: str) -> None:
    ended: queue.Queue[str] = queue.Queue()

    async def slow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.put("ended")
            raise
        return {}

    module = FunctionalModule(slow, resources={"timeout": 50})
    async with connect({"slow": module}, mode=mode) as client:
        result = await client.call_tool("slow")
        assert result.is_error
        assert await asyncio.to_thread(ended.get, timeout=10) == "ended"


async def test_what_a_cancelled_module_still_has_to_clean_up_is_not_cut_short(mode: str) -> None:
    running, release, outcome = threading.Event(), asyncio.Event(), queue.Queue[str]()

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            try:
                await release.wait()
                outcome.put("cleaned up")
            except asyncio.CancelledError:
                outcome.put("cut short")
        return {}

    async def let_go(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        release.set()
        return {}

    async with connect({"work": work, "echo": echo, "go": let_go}, mode=mode) as client, asyncio.timeout(20):
        cancelled = asyncio.create_task(client.call_tool("work"))
        assert await asyncio.to_thread(running.wait, 10)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        for _ in range(3):  # the server has seen the cancellation, and all that it sets off, when it answers these
            await client.call_tool("echo")
        await client.call_tool("go")
        assert await asyncio.to_thread(outcome.get, timeout=10) == "cleaned up"


async def test_a_cancellation_is_no_error_in_the_log(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    running, ended = threading.Event(), queue.Queue[str]()

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.put("ended")
        return {}

    async with connect({"work": work, "echo": echo}, mode=mode) as client, asyncio.timeout(20):
        cancelled = asyncio.create_task(client.call_tool("work"))
        assert await asyncio.to_thread(running.wait, 10)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert await asyncio.to_thread(ended.get, timeout=10) == "ended"
        await client.call_tool("echo")
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_no_call_begins_once_the_server_has_given_up_what_ran() -> None:
    """More calls than may run at once: those that wait for a place are refused when the places become free."""
    program = """
@tool
async def endless(inputs, context):
    print("running", file=sys.stderr, flush=True)
    await asyncio.Event().wait()

serve(registry)
"""
    with RawClient([sys.executable, "-c", PROGRAM + program]) as client:
        for _ in range(260):
            client.send("tools/call", call("t.endless"))
        assert client.process.stderr is not None
        for _ in range(250):
            assert client.process.stderr.readline() == b"running\n"
        client.process.send_signal(signal.SIGTERM)
        stdout, stderr = client.process.communicate(timeout=30)
    answers = [json.loads(line) for line in stdout.splitlines()]
    assert b"running" not in stderr
    assert len(answers) == 260
    assert sum("error" in answer for answer in answers) == 10
