"""Calls that need approval: who is asked, what is shown, who decides (FR-ANNOT-006; design "Approval")."""

from __future__ import annotations

import ast
import asyncio
import gc
import logging
import queue
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from apcore import ACL, APCore, Config, ExecutionPolicy, Executor, ModuleAnnotations
from apcore.approval import ApprovalRequest, ApprovalResult, AutoApproveHandler
from apcore.builtin_steps import BuiltinApprovalGate, build_standard_strategy
from apcore.errors import ApprovalDeniedError, SchemaValidationError
from conftest import MODERN, FunctionalModule, connect, registry_of, serving
from mcp import MCPError
from mcp.client import Client
from mcp_types import ElicitResult
from pydantic import BaseModel, Field
from support import DENIED, UNASKED, accept, asking, guarded, modern, text_of

from apcore_mcp import ElicitationApprovalHandler

APPROVE, REFUSE, DECLINE = accept(approve=True), accept(approve=False), ElicitResult(action="decline")
EVERYONE = {"yes": APPROVE, "no": REFUSE, "decline": DECLINE, "cannot": None}
LACKS_ELICITATION = (-32021, {"requiredCapabilities": {"elicitation": {"form": {}}}})


async def outcome_of(client: Client, name: str, arguments: dict[str, Any] | None = None) -> Any:
    """The text a call is answered with, or the code and the data of a JSON-RPC error."""
    try:
        return text_of(await client.call_tool(name, arguments))
    except MCPError as error:
        return error.error.code, error.error.data


def wiping(**options: Any) -> tuple[Executor, list[dict[str, Any]]]:
    """An Executor of one module that needs approval, and its runs."""
    ran: list[dict[str, Any]] = []
    return Executor(registry_of({"wipe": guarded(ran)}), **options), ran


@pytest.mark.requirement("FR-ANNOT-006")
@pytest.mark.parametrize(
    ("approval", "expected"),
    [
        ("auto", {"yes": "asked, runs", "no": "asked", "decline": "asked", "cannot": "runs, warns"}),
        ("require", {"yes": "asked, runs", "no": "asked", "decline": "asked", "cannot": ""}),
        ("deny", {"yes": "", "cannot": ""}),
        ("off", {"no": "runs", "cannot": "runs"}),
    ],
    ids=["auto", "require", "deny", "off"],
)
async def test_a_call_that_needs_approval_runs_if_the_mode_and_the_user_say_so(
    mode: str, approval: str, expected: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    executor, ran = wiping()
    with serving(executor, approval=approval) as url:
        for user, happens in expected.items():
            ran.clear()
            caplog.clear()
            arguments, asked = asking(EVERYONE[user])
            async with Client(f"{url}/mcp", mode=mode, cache=None, **arguments) as client:
                outcome = await outcome_of(client, "wipe", {"disk": "a"})
            assert len(asked) == ("asked" in happens)
            assert ran == ([{"disk": "a"}] if "runs" in happens else [])
            lacks = (mode, approval, user) == (MODERN, "require", "cannot")
            refusal = UNASKED if (approval, user) == ("require", "cannot") else DENIED
            assert outcome == ('{"ran":true}' if ran else LACKS_ELICITATION if lacks else refusal)
            warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            let_through = "wipe is let through without approval: its user cannot be asked"
            assert [text for text in warned if "let through" in text] == [let_through] * ("warns" in happens)


TOGGLE = "system.control.toggle_feature"


def controlled(**options: Any) -> APCore:
    """An application whose own control modules are registered, and a module `echo`."""
    client = APCore(config=Config({"sys_modules": {"enabled": True, "events": {"enabled": True}}}), **options)
    client.registry.register("echo", FunctionalModule(lambda inputs, context: inputs))
    return client


@pytest.mark.parametrize(("user", "disabled"), [("yes", True), ("no", False), ("cannot", False)])
async def test_who_cannot_be_asked_does_not_control_the_application(
    user: str, disabled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither by apcore's own control modules nor by a module that calls them."""
    application = controlled()
    toggle = {"module_id": "echo", "enabled": False, "reason": "a test"}

    async def turn_off(inputs: dict[str, Any], context: Any) -> Any:
        return await application.executor.call_async(TOGGLE, toggle)

    application.registry.register("turn_off", FunctionalModule(turn_off))
    arguments, _ = asking(EVERYONE[user])
    async with connect(application.executor, client=arguments) as client:
        assert TOGGLE in {tool.name for tool in (await client.list_tools()).tools}
        for name, inputs in ((TOGGLE, toggle), ("turn_off", {})):
            application.toggle_state.enable("echo")
            outcome = await outcome_of(client, name, inputs)
            assert (outcome in (DENIED, LACKS_ELICITATION)) == (not disabled)
            assert application.toggle_state.is_disabled("echo") == disabled
    assert not any("let through" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("options", "strict", "warns"),
    [({}, False, True), ({"approval": "deny"}, False, False), ({}, True, False)],
    ids=["auto", "denied", "strict"],
)
def test_a_start_says_that_anybody_may_control_the_application(
    options: dict[str, Any], strict: bool, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    executor = controlled(policy=ExecutionPolicy(strict=strict)).executor
    for acl in (None, ACL(rules=[], default_effect="deny")):
        caplog.clear()
        if acl is not None:
            executor.set_acl(acl)
        with serving(executor, **options):
            pass
        assert ("system.control" in caplog.text and "ACL" in caplog.text) == (warns and acl is None)


async def test_the_question_shows_every_argument_and_says_where_it_shortens_one() -> None:
    """However long another one is, and at whatever depth: nobody approves what is not shown."""
    given: dict[str, Any] = {"content": "x" * 100_000, "lines": ["y" * 3_000, *map(str, range(20))]}
    given |= {"request": {"body": {"of": {"a": {"b": {"c": {"d": {"path": "settings.ini"}}}}}}}}
    given |= {"exact": "e" * 500, "path": "/etc/passwd", "count": 7, "right": "a\u202eb\n"}
    given |= {f"argument {n}": n for n in range(20)}
    arguments, asked = asking(REFUSE)
    async with connect({"files.write": guarded([])}, client=arguments) as client:
        await outcome_of(client, "files.write", given)
    (question,) = asked
    shown = ast.literal_eval(question.message.partition("\nArguments: ")[2])
    for text in (shown.pop("content"), shown["lines"].pop(0)):
        assert re.fullmatch(r"x+\.\.\.x+|y+\.\.\.y+", text)
        assert 490 < len(text) < 501
    del given["content"], given["lines"][0]
    assert shown == given
    assert "\u202e" not in question.message, "it would turn around what is read after it"


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


async def test_an_approval_handler_decides_in_the_users_place_and_its_reasons_stay_here() -> None:
    (executor, ran), judge = wiping(), Judge("approved")
    arguments, asked = asking(REFUSE)
    async with connect(executor, client=arguments, approval=judge) as client:
        assert not (await client.call_tool("wipe", {"disk": "a"})).is_error
        for judge.status in ("rejected", "timeout", "pending"):
            result = await client.call_tool("wipe", {"disk": "a"})
            assert result.is_error
            assert "secret" not in result.model_dump_json()
            assert judge.status != "rejected" or text_of(result) == DENIED
    assert [(request.module_id, request.arguments) for request in judge.asked] == [("wipe", {"disk": "a"})] * 4
    assert (len(ran), asked) == (1, [])


@pytest.mark.parametrize(
    ("approval", "handler", "user", "runs", "asks"),
    [
        ("deny", AutoApproveHandler(), "no", 1, 0),
        ("off", Judge("rejected"), "yes", 0, 0),
        ("deny", ElicitationApprovalHandler(), "yes", 1, 1),
        ("deny", ElicitationApprovalHandler(), "cannot", 0, 0),
    ],
)
async def test_an_executor_keeps_the_approval_handler_it_came_with(
    approval: str, handler: Any, user: str, runs: int, asks: int
) -> None:
    """Also where that is the one that asks the user, of a server or of nobody."""
    executor, ran = wiping(approval_handler=handler)
    arguments, asked = asking(EVERYONE[user])
    async with connect(executor, client=arguments, approval=approval) as client:
        await outcome_of(client, "wipe")
    assert (len(ran), len(asked)) == (runs, asks)
    if isinstance(handler, ElicitationApprovalHandler):
        with pytest.raises(ApprovalDeniedError):
            await executor.call_async("wipe", {})


async def test_a_client_that_sends_an_approval_token_gains_nothing() -> None:
    executor, ran = wiping()
    async with connect(executor, client=asking(REFUSE)[0]) as client:
        for token in ("token", "", 7, None):
            assert await outcome_of(client, "wipe", {"_approval_token": token}) != '{"ran":true}'
    assert ran == []


def test_a_call_that_lacks_a_capability_of_its_client_is_a_bad_request() -> None:
    """MCP 2026-07-28: -32021 goes with HTTP 400; also of a module that another one calls."""
    below = FunctionalModule(lambda inputs, context: context.executor.call("wipe", inputs, context))
    with serving(registry_of({"wipe": guarded([]), "below": below}), approval="require") as url:
        for name in ("wipe", "below"):
            response = httpx.post(f"{url}/mcp", **modern("tools/call", {"name": name, "arguments": {}}))
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["data"]) == (400, *LACKS_ELICITATION)


@pytest.mark.parametrize(("first", "runs"), [("deny", 0), ("auto", 1), (AutoApproveHandler(), 1)])
async def test_each_server_of_one_executor_decides_about_its_own_calls(first: Any, runs: int) -> None:
    executor, ran = wiping()
    async with connect(executor, approval="deny") as second:
        async with connect(executor, approval=first) as client:
            assert await outcome_of(second, "wipe") == DENIED
            assert await outcome_of(client, "wipe") == ('{"ran":true}' if runs else DENIED)
        assert await outcome_of(second, "wipe") == DENIED
        await executor.call_async("wipe", {})  # which is nobody's: apcore skips a gate without a handler
    assert len(ran) == runs + 1


@pytest.mark.parametrize(("approval", "user", "runs"), [("deny", "yes", 0), ("auto", "yes", 1)])
async def test_what_a_module_calls_without_its_context_or_from_a_thread_needs_approval_too(
    approval: str, user: str, runs: int
) -> None:
    executor, ran = wiping()

    async def alone(inputs: dict[str, Any], context: Any) -> Any:
        return await executor.call_async("wipe", inputs)

    async def in_a_thread(inputs: dict[str, Any], context: Any) -> Any:
        return await asyncio.to_thread(executor.call, "wipe", inputs)

    async def in_a_thread_of_apcores(inputs: dict[str, Any], context: Any) -> Any:
        # It has no context variables; and as it holds up the loop, nobody can be asked meanwhile.
        return executor.call("wipe", inputs, context) if approval == "deny" else await in_a_thread(inputs, context)

    modules: dict[str, Any] = {"alone": alone, "thread": in_a_thread, "bare": in_a_thread_of_apcores}
    modules["sync"] = lambda inputs, context: executor.call("wipe", inputs)
    for module_id, function in modules.items():
        executor.registry.register(module_id, FunctionalModule(function))
    async with connect(executor, client=asking(EVERYONE[user])[0], approval=approval) as client:
        for module_id in modules:
            await client.call_tool(module_id)
    assert len(ran) == runs * len(modules)


@pytest.mark.parametrize(("approval", "runs"), [("require", False), ("auto", True)])
async def test_what_a_module_leaves_running_needs_approval_after_its_call_has_ended(approval: str, runs: bool) -> None:
    executor, ran = wiping()
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
    async with connect(executor, approval=approval) as client:
        await client.call_tool("leave")
        answered.set()
        outcome = await asyncio.to_thread(outcomes.get, timeout=10)
    assert (outcome == {"ran": True}, len(ran)) == (runs, runs)


@pytest.mark.parametrize(("user", "runs"), [("yes", 1), ("no", 0), ("cannot", 0)])
async def test_auto_lets_through_only_what_apcore_would_and_what_comes_later_counts(user: str, runs: int) -> None:
    """A strict policy, then a handler."""
    executor, ran = wiping()
    async with connect(executor, client=asking(EVERYONE[user])[0]) as client:
        executor.set_policy(ExecutionPolicy(strict=True))
        told = await outcome_of(client, "wipe")
        assert told == ('{"ran":true}' if runs else LACKS_ELICITATION if user == "cannot" else DENIED)
        assert not executor.governance_state().approval_handler_configured
        with pytest.raises(ApprovalDeniedError):
            await executor.call_async("wipe", {})
        executor.set_approval_handler(Judge("approved"))
        assert executor.governance_state().approval_handler_configured
        assert await outcome_of(client, "wipe") == '{"ran":true}'
    assert len(ran) == runs + 1


async def test_a_gate_of_the_users_own_stays_what_it_is_and_who_holds_it_decides() -> None:
    """Also about what does not need approval, and about who comes later."""
    passed = []

    class Gate(BuiltinApprovalGate):
        async def execute(self, ctx: Any) -> Any:
            passed.append(ctx.module_id)
            return await super().execute(ctx)

    destructive = ModuleAnnotations(destructive=True)
    registry = registry_of({"wipe": guarded([]), "purge": guarded([], annotations=destructive)})
    strategy, gate = build_standard_strategy(registry=registry), Gate()
    strategy.replace("approval_gate", gate)
    async with connect(Executor(registry, strategy=strategy), approval="deny") as client:
        assert (await outcome_of(client, "wipe"), await outcome_of(client, "purge")) == (DENIED, '{"ran":true}')
        gate.set_handler(Judge("approved"))
        assert await outcome_of(client, "wipe") == '{"ran":true}'
    assert passed == ["wipe", "purge", "wipe"]


async def test_a_gate_of_the_users_own_hears_what_its_executor_is_given_and_says_what_it_has() -> None:
    """Also a gate that keeps its handler in a way of its own, behind apcore's two public names for it."""

    class Gate(BuiltinApprovalGate):
        on_duty: Any = None

        def set_handler(self, handler: Any) -> None:
            self.on_duty = handler

        @property
        def handler(self) -> Any:
            return self.on_duty

        async def execute(self, ctx: Any) -> Any:
            super().set_handler(self.on_duty)
            return await super().execute(ctx)

    registry = registry_of({"wipe": guarded([])})
    strategy, gate, policy = build_standard_strategy(registry=registry), Gate(), ExecutionPolicy(strict=True)
    gate.timeout_ms = 60_000
    strategy.replace("approval_gate", gate)
    executor = Executor(registry, strategy=strategy)
    async with connect(executor, approval="deny") as client:
        assert await outcome_of(client, "wipe") == DENIED
        assert (gate.on_duty, executor.governance_state().approval_handler_configured) == (None, False)
        executor.set_approval_handler(AutoApproveHandler())
        executor.set_policy(policy)
        assert (type(gate.on_duty), gate.policy) == (AutoApproveHandler, policy)
        state = executor.governance_state()
        assert state.approval_handler_configured
        (step,) = [step for step in executor.current_strategy.steps if step.name == "approval_gate"]
        assert getattr(step, "timeout_ms", 0) == 60_000
        assert await outcome_of(client, "wipe") == '{"ran":true}'


class Wipe(BaseModel):
    disk: str
    passes: int = Field(1, ge=1)


WIPE = {"properties": {"disk": {"type": "string"}, "passes": {"type": "integer", "minimum": 1}}, "required": ["disk"]}
WRONG = {"disk": ["sda"], "passes": 0}


@pytest.mark.parametrize("schema", [Wipe, {"type": "object", **WIPE}], ids=["model", "dict"])
@pytest.mark.parametrize("validate_inputs", [False, True], ids=["", "validate_inputs"])
async def test_nobody_is_asked_about_arguments_that_the_module_would_refuse(schema: Any, validate_inputs: bool) -> None:
    """By whatever handler, of the server or of the Executor; and the caller is told what is wrong as ever."""
    ran: list[dict[str, Any]] = []
    plain, gated = guarded(ran, input_schema=schema, annotations=None), guarded(ran, input_schema=schema)
    judge = Judge("approved")
    arguments, asked = asking(APPROVE)
    for options, approval in ({}, "require"), ({}, judge), ({"approval_handler": judge}, "auto"):
        executor = Executor(registry_of({"plain": plain, "gated": gated}), **options)
        served = {"approval": approval, "validate_inputs": validate_inputs}
        async with connect(executor, client=arguments, **served) as client:
            refusal = await client.call_tool("gated", WRONG)
            assert text_of(refusal) == text_of(await client.call_tool("plain", WRONG))
            assert re.findall(r"\n- (\w+):", text_of(refusal)) == ["disk", "passes"]
            assert (ran, asked, judge.asked) == ([], [], [])
            assert await outcome_of(client, "gated", {"disk": "sda"}) == '{"ran":true}'
        ran.clear(), asked.clear(), judge.asked.clear()


async def test_who_may_not_call_a_module_is_told_so_and_not_what_it_would_take() -> None:
    registry = registry_of({"wipe": guarded([], input_schema=Wipe)})
    executor = Executor(registry, acl=ACL(rules=[], default_effect="deny"))
    arguments, asked = asking(APPROVE)
    async with connect(executor, client=arguments) as client:
        assert await outcome_of(client, "wipe", WRONG) == "Access denied"
    assert asked == []


async def test_what_modules_call_is_checked_too_before_anybody_is_asked() -> None:
    """With their context or without, and from threads."""
    executor = Executor(registry_of({"wipe": guarded([], input_schema=Wipe)}))
    failures: list[Exception] = []

    def calling(call: Any) -> FunctionalModule:
        async def execute(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
            try:
                await call(context)
            except SchemaValidationError as error:
                failures.append(error)
            return {}

        return FunctionalModule(execute)

    modules = {
        "with": calling(lambda context: executor.call_async("wipe", WRONG, context)),
        "without": calling(lambda context: executor.call_async("wipe", WRONG)),
        "thread": calling(lambda context: asyncio.to_thread(executor.call, "wipe", WRONG)),
    }
    for module_id, module in modules.items():
        executor.registry.register(module_id, module)
    arguments, asked = asking(APPROVE)
    async with connect(executor, client=arguments) as client:
        for number, module_id in enumerate(modules, 1):
            await client.call_tool(module_id)
            assert (len(failures), asked) == (number, [])


async def test_a_pipeline_that_lets_invalid_arguments_through_still_does() -> None:
    """Where an operator has said that validation only warns, or is for some modules only."""
    for setting, value in (("ignore_errors", True), ("match_modules", ("other.*",)), ("timeout_ms", 0)):
        executor, ran = wiping()
        executor.registry.unregister("wipe")
        executor.registry.register("wipe", guarded(ran, input_schema=Wipe))
        (step,) = [step for step in executor.current_strategy.steps if step.name == "input_validation"]
        setattr(step, setting, value)
        async with connect(executor, client=asking(APPROVE)[0]) as client:
            await outcome_of(client, "wipe", WRONG)
        assert len(ran) == (setting != "timeout_ms")


async def test_what_a_person_takes_to_approve_does_not_count_against_the_call() -> None:
    async def callback(context: Any, params: Any) -> ElicitResult:
        await asyncio.sleep(0.3)
        return APPROVE

    executor = Executor(registry_of({"wipe": guarded([])}), config=Config(data={"executor": {"global_timeout": 200}}))
    async with connect(executor, client={"elicitation_callback": callback}) as client:
        assert await outcome_of(client, "wipe") == '{"ran":true}'


async def test_the_question_names_what_is_asked_but_no_secret_in_whatever_form_it_is_given() -> None:
    secret = {"type": "string", "x-sensitive": True}
    credentials = {"type": "object", "properties": {"password": secret}}
    properties = {"keys": {"type": "array", "items": secret}, "login": credentials, "disk": {}}

    async def call(inputs: dict[str, Any], context: Any) -> Any:
        given: dict[str, Any] = {"keys": ["s3cret"], "login": {"password": "s3cret"}, "disk": "\ud800"}
        if inputs:
            given |= {"odd": b"\xff", "disk": [Path("/mnt/" + "of many folders " * 10), print]}
        return await context.executor.call_async("disk.wipe", given, context)

    arguments, asked = asking(REFUSE)
    wipe = guarded([], input_schema={"type": "object", "properties": properties})
    marked = {"properties": {"key": {}}, "allOf": [{"properties": {"key": secret}}]}
    modules = {"disk.wipe": wipe, "call": call, "door": guarded([], input_schema=marked)}
    async with connect(modules, client=arguments) as client:
        await outcome_of(client, "door", {"key": "s3cret"})
        await outcome_of(client, "call")
        await outcome_of(client, "disk.wipe", {"keys": ["s3cret"], "login": {"password": "s3cret"}, "disk": "sda1"})
        await outcome_of(client, "call", {"odd": True})
    hidden = "'keys': '***REDACTED***', 'login': '***REDACTED***'"
    disk = ["/mnt/" + "of many folders " * 10, "..."]
    assert asked.pop().message.endswith(f"{{'disk': {disk}, {hidden}, 'odd': '***REDACTED***'}}")
    assert asked.pop(0).message.endswith("Arguments: {'key': '***REDACTED***'}")
    for question, disk in zip(asked, ("\\ud800", "sda1"), strict=True):
        assert question.message.startswith("Let disk.wipe run? It is annotated as destructive.")
        assert question.message.endswith(f"\nArguments: {{'disk': '{disk}', {hidden}}}")
