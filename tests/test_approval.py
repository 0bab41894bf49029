"""Calls that need approval: who is asked, what is shown, who decides (FR-ANNOT-006; design "Approval")."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from apcore import ACL, APCore, Config, ExecutionPolicy, Executor, ModuleAnnotations
from apcore.approval import ApprovalRequest, ApprovalResult, AutoApproveHandler
from apcore.builtin_steps import BuiltinApprovalGate, build_standard_strategy
from apcore.errors import ApprovalDeniedError
from apcore.observability import MetricsCollector
from conftest import MODERN, FunctionalModule, connect, registry_of, serving
from mcp import MCPError
from mcp.client import Client
from mcp_types import ElicitResult
from pydantic import BaseModel
from support import (
    DENIED,
    SCHEMA,
    accept,
    asking,
    guarded,
    modern,
    text_of,
)

from apcore_mcp import ElicitationApprovalHandler, MCPServer, elicit

# ---- Approval ----

APPROVE, REFUSE, DECLINE = accept(approve=True), accept(approve=False), ElicitResult(action="decline")
EVERYONE = {"yes": APPROVE, "no": REFUSE, "decline": DECLINE, "cannot": None}
LACKS_ELICITATION = (-32021, {"requiredCapabilities": {"elicitation": {"form": {}}}})


async def outcome_of(client: Client, name: str, arguments: dict[str, Any] | None = None) -> Any:
    """The text a call is answered with, or the code and the data of a JSON-RPC error."""
    try:
        return text_of(await client.call_tool(name, arguments))
    except MCPError as error:
        return error.error.code, error.error.data


@pytest.mark.requirement("FR-ANNOT-006")
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
