"""Calls that need approval: who is asked, what is shown, who decides (FR-ANNOT-006)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import io
import json
import queue
import re
import threading
import time
from collections.abc import AsyncIterator
from datetime import date
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

import httpx
import pytest
from apcore import ACL, APCore, Config, Context, ExecutionPolicy, Executor, FunctionModule, ModuleAnnotations
from apcore import Middleware as ExecutorMiddleware
from apcore.approval import ApprovalRequest, ApprovalResult, AutoApproveHandler
from apcore.builtin_steps import BuiltinApprovalGate, build_standard_strategy
from apcore.cancel import ExecutionCancelledError
from apcore.errors import ApprovalDeniedError, SchemaValidationError
from conftest import HANDSHAKE, MODERN, FunctionalModule, client_of, connect, hosting, registry_of, serving
from mcp import MCPError
from mcp.client import Client
from mcp.server.request_state import AESGCMRequestStateCodec
from mcp_types import ElicitResult, InputRequiredResult, ListRootsResult
from pydantic import AliasChoices, AliasPath, BaseModel, ConfigDict, Field, RootModel, field_validator, model_validator
from pydantic.dataclasses import dataclass
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from support import DENIED, REDACTED, UNASKED, Wire, accept, ask, asking, guarded, messages_logged, modern, text_of

from apcore_mcp import ElicitationApprovalHandler, MCPServer, async_serve, elicit, serve

APPROVE, REFUSE, DECLINE = accept(approve=True), accept(approve=False), ElicitResult(action="decline")
EVERYONE = {"yes": APPROVE, "no": REFUSE, "decline": DECLINE, "cannot": None}
LACKS_ELICITATION = (-32021, {"requiredCapabilities": {"elicitation": {"form": {}}}})
REFUSED = "wipe is refused: its user cannot be asked for approval (see approval=, --approval)"


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


async def test_what_a_sync_module_calls_without_its_context_needs_approval_inside_a_host_too() -> None:
    """The threads of a host's event loop copy no context variables."""
    executor, ran = wiping()
    sync = FunctionalModule(lambda inputs, context: executor.call("wipe", inputs))
    executor.registry.register("sync", sync)
    async with async_serve(executor, approval="deny") as app, hosting(app) as url, client_of(url) as client:
        assert (await client.call_tool("sync", {"disk": "a"})).is_error
    assert ran == []


@pytest.mark.requirement("FR-ANNOT-006")
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"approval": "auto"}, {"yes": "asked, runs", "no": "asked", "decline": "asked", "cannot": "runs, warns"}),
        ({"approval": "require"}, {"yes": "asked, runs", "no": "asked", "decline": "asked", "cannot": "unasked"}),
        ({"approval": "deny"}, {"yes": "", "cannot": ""}),
        ({"approval": "off"}, {"no": "runs", "cannot": "runs"}),
        ({}, {"yes": "asked, runs", "no": "asked", "cannot": "unasked"}),
    ],
    ids=["auto", "require", "deny", "off", "default"],
)
async def test_a_call_that_needs_approval_runs_if_the_mode_and_the_user_say_so(
    mode: str, options: dict[str, str], expected: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    executor, ran = wiping()
    with serving(executor, **options) as url:
        for user, happens in expected.items():
            ran.clear()
            caplog.clear()
            arguments, asked = asking(EVERYONE[user])
            async with client_of(url, mode, **arguments) as client:
                outcome = await outcome_of(client, "wipe", {"disk": "a"})
            assert len(asked) == happens.startswith("asked")
            assert ran == ([{"disk": "a"}] if "runs" in happens else [])
            refusal: Any = DENIED
            if happens == "unasked":
                refusal = LACKS_ELICITATION if mode == MODERN else UNASKED
            assert outcome == ('{"ran":true}' if ran else refusal)
            told = {
                "wipe is let through without approval: its user cannot be asked": "warns" in happens,
                REFUSED: happens == "unasked",
            }
            decisions = [text for text in messages_logged(caplog) if text.startswith("wipe is")]
            assert decisions == [text for text, is_logged in told.items() if is_logged]


@pytest.mark.parametrize("door", [serve, async_serve, MCPServer])
def test_every_door_requires_an_answer_by_default(door: Any) -> None:
    assert inspect.signature(door).parameters["approval"].default == "require"


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
    async with connect(application.executor, client=arguments, approval="auto") as client:
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
    ids=["asks", "denied", "strict"],
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


@pytest.mark.parametrize("user", ["yes", "cannot"])
@pytest.mark.parametrize("approval", ["require", "auto"])
async def test_what_a_module_leaves_running_is_refused_once_its_call_has_ended(approval: str, user: str) -> None:
    """Nobody waits for it who could be asked, and that does not make it run."""
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
    arguments, asked = asking(EVERYONE[user])
    async with connect(executor, client=arguments, approval=approval) as client:
        await client.call_tool("leave")
        answered.set()
        outcome = await asyncio.to_thread(outcomes.get, timeout=10)
    assert isinstance(outcome, ApprovalDeniedError)
    assert (ran, asked) == ([], [])


@pytest.mark.parametrize("user", ["yes", "cannot"])
async def test_a_sync_module_that_outlives_its_timeout_runs_nothing_more_that_needs_approval(
    mode: str, user: str
) -> None:
    executor, ran = wiping(config=Config(data={"executor": {"default_timeout": 50}}))
    answered, outcomes = threading.Event(), queue.Queue[object]()

    def slow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        answered.wait(10)
        for further in ((context,), ()):  # with its context and without
            try:
                outcomes.put(executor.call("wipe", {}, *further))
            except (ApprovalDeniedError, ExecutionCancelledError) as error:
                outcomes.put(error)
        return {}

    executor.registry.register("slow", FunctionalModule(slow))
    arguments, asked = asking(EVERYONE[user])
    async with connect(executor, mode=mode, client=arguments, approval="auto") as client:
        assert "timed out" in await outcome_of(client, "slow")
        answered.set()
        for _ in range(2):
            assert isinstance(await asyncio.to_thread(outcomes.get, timeout=10), Exception)
    assert (ran, asked) == ([], [])


async def test_a_client_that_could_be_asked_is_not_let_through_once_it_says_that_it_cannot() -> None:
    """The capabilities of the request count that a call answers: here the retry, which brings an answer."""
    executor, ran = wiping()

    async def twice(inputs: dict[str, Any], context: Any) -> Any:
        await elicit(context, "Which one?", key="which")
        return await executor.call_async("wipe", {}, context)

    executor.registry.register("twice", FunctionalModule(twice))
    with serving(executor, approval="auto") as url:
        arguments, _ = asking(APPROVE)
        async with client_of(url, **arguments) as client:
            question = await client.session.call_tool("twice", allow_input_required=True)
            assert isinstance(question, InputRequiredResult)
        async with client_of(url) as client:
            retry: Any = {"request_state": question.request_state, "input_responses": {"which": accept()}}
            with pytest.raises(MCPError):
                await client.session.call_tool("twice", allow_input_required=True, **retry)
    assert ran == []


@pytest.mark.parametrize(("user", "runs"), [("yes", 1), ("no", 0), ("cannot", 0)])
async def test_auto_lets_through_only_what_apcore_would_and_what_comes_later_counts(user: str, runs: int) -> None:
    """A strict policy, then a handler."""
    executor, ran = wiping()
    async with connect(executor, client=asking(EVERYONE[user])[0], approval="auto") as client:
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


# ---- The question ----


async def questions_of(*calls: tuple[Any, dict[str, Any]]) -> list[str]:
    """What a user is asked when a module calls these, each as `files.write`, with these arguments."""

    async def call(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        for module, arguments in calls:
            context.executor.registry.register("files.write", module)
            with contextlib.suppress(ApprovalDeniedError):
                await context.executor.call_async("files.write", arguments, context)
            context.executor.registry.unregister("files.write")
        return {}

    arguments, asked = asking(REFUSE)
    arguments["input_required_max_rounds"] = len(calls)
    async with connect({"call": call}, client=arguments) as client, asyncio.timeout(20):
        assert not (await client.call_tool("call")).is_error
    assert len(asked) == len(calls)
    return [question.message for question in asked]


async def shown(*calls: tuple[Any, dict[str, Any]]) -> list[list[str]]:
    """The lines of each question that show arguments."""
    return [question.partition("\nArguments:\n")[2].splitlines() for question in await questions_of(*calls)]


UNNAMED = "(the module's schema does not name these:)"


def named(lines: list[str]) -> dict[str, str]:
    return dict(line.removeprefix("- ").split(": ", 1) for line in lines if line != UNNAMED)


async def test_the_question_is_for_people() -> None:
    """It says what the tool does, what is dangerous, and each argument by its value, at whatever depth."""
    about = "Write a text, e.g. a note,\nto a file. Nothing is kept of what was there.\n\nMore for agents."
    arguments: dict[str, Any] = {"path": "/etc/passwd", "mode": 0o644, "größe": 1.5, "to whom": ["Zoë", None, True]}
    arguments["request"] = {"body": {"of": {"a": {"b": {"c": {"d": [{"path": 'settings "1".ini'}]}}}}}, "no": [{}, []]}
    module = guarded([], description=about)
    plain = guarded([], description="", annotations=ModuleAnnotations(requires_approval=True))
    question, bare, harmless = await questions_of((module, arguments), (module, {}), (plain, {"n": 1}))
    assert question.splitlines() == [
        "Let files.write run?",
        "Write a text, e.g. a note, to a file.",
        "It is annotated as destructive: what it does may not be undone.",
        "Arguments:",
        '- path: "/etc/passwd"',
        "- mode: 420",
        '- "größe": 1.5',
        '- "to whom": ["Zoë", null, true]',
        '- request: {"body": {"of": {"a": {"b": {"c": {"d": [{"path": "settings \\"1\\".ini"}]}}}}}, "no": [{}, []]}',
    ]
    assert bare.splitlines()[3:] == ["Arguments: none"]
    assert harmless.splitlines() == ["Let files.write run?", "Arguments:", "- n: 1"]


async def test_a_long_text_loses_its_middle_in_words_and_a_number_nothing() -> None:
    arguments: dict[str, Any] = {"exact": "e" * 500, "content": "a" * 300 + "b" * 100_000 + "c" * 300}
    arguments |= {"lines": ["y" * 501, "z"], "cents": 10**600 + 7, "share": 1e-300, "by": {"k" * 600: 1}}
    arguments["k" * 600] = "(characters left out: 99,500)"
    key = f'"{"k" * 250}" (characters left out: 100) "{"k" * 250}"'
    (lines,) = await shown((guarded([]), arguments))
    assert lines == [
        f'- exact: "{"e" * 500}"',
        f'- content: "{"a" * 250}" (characters left out: 100,100) "{"c" * 250}"',
        f'- lines: ["{"y" * 250}" (characters left out: 1) "{"y" * 250}", "z"]',
        f"- cents: {10**600 + 7}",
        "- share: 1e-300",
        f"- by: {{{key}: 1}}",
        f'- {key}: "(characters left out: 99,500)"',
    ]


FORGED = [
    '/tmp/notes"\n- path: "/tmp/notes',
    "a\r\nb\x1b[2K\x00\x7f",
    "a\u202eb\u2066c\u200d\ufeff",
    "a\u2028- path: 1\u2029\x85\x0b\x0c",
    "\ud800 \U000e0041 \uffff",
    "\\n \\u202e",
]


async def test_no_argument_forges_a_line_or_turns_around_what_is_read() -> None:
    """Neither by a value nor by a name: each stays in a line of its own, as JSON that says what is there."""
    calls = [(guarded([]), {"path": text, text: 1, "deep": [{text: text}]}) for text in FORGED]
    for text, (path, name, deep) in zip(FORGED, await shown(*calls), strict=True):
        assert (path + name + deep).isprintable()
        assert json.loads(path.removeprefix("- path: ")) == text
        assert json.loads(f"{{{name.removeprefix('- ')}}}") == {text: 1}
        assert json.loads(deep.removeprefix("- deep: ")) == [{text: text}]


UNSEEN = (
    "\u3164\u115f\u1160\uffa0\u2800\u034f\u17b4\u17b5\u180b\u180f\ufe00\ufe0e\ufe0f\U000e0100\U000e01ef\U00016fe4\U0001d159"
    "\u0334\u0336\u0338\u0488\u0489\u20d2\u20dd\u20e3\u20e5\u00ad\u200b\u200c\u200d\u2060\u3000\U000e0041"
)
SEEN = [
    "Zoë, naïve, Đặng Thị, mañana, Ångström",
    "e\u0301 n\u0303 a\u0323\u0302 \u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",
    "東京 서울 ไทยน้ำ हिन्दी தமிழ் ខ្មែរ မြန်မာ العَرَبِيَّة ελληνικά հայերեն ქართული አማርኛ བོད་སྐད།",
    "😀 👍🏽 🇪🇺 ❤\ufe0f ⚠\ufe0f √ € № ½ ± ™",
]


async def test_what_cannot_be_seen_is_escaped_and_what_people_write_is_not() -> None:
    """Fillers, blanks, selectors and overlays, behind a letter, behind a digit and alone; and accents that no letter
    carries, or too many for one."""
    hidden = [text for char in UNSEEN for text in (f"a{char}b", f"1{char}", char, f"❤{char}{char}")]
    hidden += ["\u0301a", "(\u0301", "e" + "\u0301" * 50]
    (lines, readable) = await shown((guarded([]), {"t": hidden}), (guarded([]), {"t": SEEN}))
    written = lines[0].removeprefix("- t: ")
    assert json.loads(written) == hidden
    assert not set(written.replace("❤\ufe0f", "")) & set(UNSEEN)
    assert written.count("\u0301") == 6
    assert readable == [f"- t: {json.dumps(SEEN, ensure_ascii=False)}"]


async def test_arguments_that_the_schema_does_not_name_stand_behind_a_line_that_says_so() -> None:
    class Disk(BaseModel):
        disk: str
        model_config = ConfigDict(extra="allow")

    class Nothing(BaseModel):
        pass

    calls: list[tuple[Any, dict[str, Any]]] = [
        (guarded([], input_schema=Disk), {"dry_run": True, "disk": "sda"}),
        (guarded([], input_schema=Nothing), {"dry_run": True}),
        (guarded([]), {"dry_run": True}),
        (guarded([], input_schema=Disk), {"disk": "sda"}),
    ]
    assert await shown(*calls) == [
        ['- disk: "sda"', UNNAMED, "- dry_run: true"],
        [UNNAMED, "- dry_run: true"],
        ["- dry_run: true"],  # a schema that names nothing
        ['- disk: "sda"'],
    ]


def fields(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


class Copy(BaseModel):
    source: str
    model_config = ConfigDict(extra="allow")


class Remove(BaseModel):
    target: str
    model_config = ConfigDict(extra="allow")


PATHS: dict[str, tuple[Any, str]] = {
    "union": (RootModel[Copy | Remove], "target"),
    "reference": (RootModel[Remove], "target"),
    "allOf": ({"type": "object", "allOf": [fields(), fields(target={})]}, "target"),
    "nested": ({"type": "object", "anyOf": [{"allOf": [{"if": {}, "then": fields(target={})}]}]}, "target"),
    "definition": ({"type": "object", "allOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": fields(target={})}}, "target"),
    "recursive": (
        {"type": "object", "$ref": "#/$defs/a", "$defs": {"a": fields(target={}, below={"$ref": "#/$defs/a"})}},
        "target",
    ),
}


async def test_what_any_part_of_the_root_names_comes_before_everything_else() -> None:
    """A hundred other arguments take no place of the one that counts."""
    others = {f"a{n}": n for n in range(100)}
    calls = [(guarded([], input_schema=schema), {**others, name: "/home"}) for schema, name in PATHS.values()]
    for case, lines in zip(PATHS, await shown(*calls), strict=True):
        assert lines[:2] == ['- target: "/home"', UNNAMED], case


async def test_a_question_has_a_bound_and_says_what_it_leaves_out() -> None:
    """What the schema names comes first, wherever the caller puts it, and no argument takes another's room."""
    schema = {"type": "object", "properties": {"path": {"type": "string"}, "notes": {}}}
    module = guarded([], input_schema=schema)
    many: dict[str, Any] = {f"a{n}": "x" * 600 for n in range(5_000)}
    many |= {"notes": [*range(100_000)], "path": "/etc/passwd"}
    (lines,) = await shown((module, many))
    assert lines[0] == '- path: "/etc/passwd"'
    written = json.dumps(many["notes"])
    left_out = f" (characters left out: {len(written) - 5_000:,}) "
    assert lines[1] == f"- notes: {written[:2_500]}{left_out}{written[-2_500:]}"
    assert (len(lines), lines[2], lines[-1]) == (102, UNNAMED, "(arguments left out: 4,902)")


SECRET = {"type": "string", "x-sensitive": True}
HIDDEN = '"***REDACTED***"'


DICTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "beside": (
        fields(pin=SECRET, to={}, amount={}),
        {"to": "Ada", "amount": 7, "pin": "s3cret", "note": "rent"},
        {"to": '"Ada"', "amount": "7", "pin": HIDDEN, "note": '"rent"'},
    ),
    "inside": (
        fields(login=fields(user={}, password=SECRET), keys={"type": "array", "items": SECRET}),
        {"login": {"user": "ada", "password": "s3cret", "realm": "r"}, "keys": ["s3cret", "s3cret"]},
        {"login": f'{{"user": "ada", "password": {HIDDEN}, "realm": "r"}}', "keys": f"[{HIDDEN}, {HIDDEN}]"},
    ),
    "in-a-map": (
        fields(users={"additionalProperties": fields(pin=SECRET)}),
        {"users": {"ada": {"pin": "s3cret", "n": 1}}},
        {"users": f'{{"ada": {{"pin": {HIDDEN}, "n": 1}}}}'},
    ),
    "of-every-name": ({"type": "object", "additionalProperties": SECRET}, {"a": "s3cret"}, {"a": HIDDEN}),
    "by-pattern": ({"type": "object", "patternProperties": {"^p": SECRET}}, {"pin": "s3cret"}, {"pin": HIDDEN}),
    "in-a-branch": (
        {"type": "object", "properties": {"key": {}}, "allOf": [fields(key=SECRET)]},
        {"key": "s3cret", "n": 1},
        {"key": HIDDEN, "n": "1"},
    ),
    "whole": ({"type": "object", "x-sensitive": True}, {"a": "s3cret"}, {"a": HIDDEN}),
    "nothing": (fields(pin={"x-sensitive": True}), {"pin": None}, {"pin": "null"}),
}


async def test_the_question_hides_marked_values_and_no_others() -> None:
    calls = [(guarded([], input_schema=schema), arguments) for schema, arguments, _ in DICTS.values()]
    lines = await shown(*calls)
    expected = {case: shows for case, (_, _, shows) in DICTS.items()}
    assert dict(zip(DICTS, map(named, lines), strict=True)) == expected


class Login(BaseModel):
    user: str
    password: str = Field(alias="pass", json_schema_extra={"x-sensitive": True})
    model_config = ConfigDict(populate_by_name=True)


class Payment(BaseModel):
    """What a client may write by alias or by field name, and for some fields in yet another way."""

    to: str = Field(alias="recipient")
    amount: int
    pin: str = Field(alias="PIN", json_schema_extra={"x-sensitive": True})
    code: str = Field("", validation_alias=AliasChoices("code", "otp"), json_schema_extra={"x-sensitive": True})
    purpose: str = Field("", validation_alias=AliasChoices("purpose", "for"))
    login: Login | None = None
    model_config = ConfigDict(populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _of_one_text(cls, value: Any) -> Any:
        if "account" in value:
            value = {**value, "login": dict(zip(("user", "password"), value["account"].split(":"), strict=True))}
        return value

    @field_validator("login", mode="before")
    @classmethod
    def _login_of_one_text(cls, value: Any) -> Any:
        return dict(zip(("user", "password"), value.split(":"), strict=True)) if isinstance(value, str) else value


MODELS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "by-alias": (
        {"recipient": "Ada", "amount": 7, "PIN": "s3cret", "code": "s3cret", "login": {"user": "a", "pass": "s3cret"}},
        {
            **{"recipient": '"Ada"', "amount": "7", "PIN": HIDDEN, "code": HIDDEN},
            "login": f'{{"user": "a", "pass": {HIDDEN}}}',
        },
    ),
    "by-name": (
        {"to": "Ada", "amount": 7, "pin": "s3cret", "login": {"user": "a", "password": "s3cret"}},
        {"to": '"Ada"', "amount": "7", "pin": HIDDEN, "login": f'{{"user": "a", "password": {HIDDEN}}}'},
    ),
    "by-another-name": (
        {"to": "Ada", "amount": 7, "pin": "s3cret", "otp": "s3cret", "for": "rent"},
        {"to": '"Ada"', "amount": "7", "pin": HIDDEN, "otp": HIDDEN, "for": '"rent"'},
    ),
    "in-another-form": (
        {"to": "Ada", "amount": 7, "pin": "s3cret", "account": "ada:s3cret"},
        {"to": '"Ada"', "amount": "7", "pin": HIDDEN, "account": HIDDEN},
    ),
    "of-another-type": (
        {"to": "Ada", "amount": 7, "pin": "s3cret", "login": "ada:s3cret"},
        {"to": '"Ada"', "amount": "7", "pin": HIDDEN, "login": HIDDEN},
    ),
}


async def test_what_a_model_marks_is_hidden_in_every_form_and_what_it_names_is_shown() -> None:
    lines = await shown(*[(guarded([], input_schema=Payment), arguments) for arguments, _ in MODELS.values()])
    assert dict(zip(MODELS, map(named, lines), strict=True)) == {case: shows for case, (_, shows) in MODELS.items()}


class Card(BaseModel):
    number: str = Field(json_schema_extra={"x-sensitive": True})
    holder: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_one_text(cls, value: Any) -> Any:
        return dict(zip(("holder", "number"), value.split(":"), strict=True)) if isinstance(value, str) else value


class Person(BaseModel):
    street: str


class Bag(BaseModel):
    model_config = ConfigDict(extra="allow")


MARK: dict[str, Any] = {"json_schema_extra": {"x-sensitive": True}}


class Spelled(BaseModel):
    """Secrets under names of every kind, where any other argument is let in."""

    pin: str = Field("", validation_alias=AliasChoices("pinCode", AliasPath("auth", "pin"), "code"), **MARK)
    token: str = Field("", validation_alias=AliasPath("tokens", 1), **MARK)
    last: str = Field("", validation_alias=AliasPath("keys", -1), **MARK)
    word: str = Field("", alias="pass", **MARK)
    note: str = Field("", alias="remark")
    model_config = ConfigDict(extra="allow", populate_by_name=True)


@dataclass
class Entry:
    """A dataclass of pydantic's has aliases, too."""

    user: str
    secret: Annotated[str, Field(validation_alias=AliasChoices("secret", "s3"), **MARK)] = ""


class Tree(BaseModel):
    name: str
    key: str = Field("", **MARK)
    children: list[Tree] = []


class Pay(BaseModel):
    to: str | Card = ""
    any_of: Any | Card = None
    many: list[str | Card] | Card = []
    by: dict[str, str] | Card = {}
    loose: dict[str, Any] | Card = {}
    who: Card | Person | None = None
    bag: Card | Bag | None = None
    kind: Literal["me"] | Card = "me"
    amount: int | Card = 0
    spelled: Spelled | Bag | None = None
    entry: Entry | str | None = None


OPEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "text": ({"to": "Eve"}, {"to": "Eve"}),
    "its-other-form": ({"to": {"number": "s3cret", "holder": "Ada"}}, {"to": {"number": REDACTED, "holder": "Ada"}}),
    "unknown": ({"to": {"number": "s3cret", "nr": "s3cret"}}, {"to": {"number": REDACTED, "nr": REDACTED}}),
    "anything": ({"any_of": ["x", {"y": 1}]}, {"any_of": ["x", {"y": 1}]}),
    "anything-as-object": ({"any_of": {"number": "s3cret", "y": 1}}, {"any_of": {"number": REDACTED, "y": 1}}),
    "list": ({"many": ["x", {"number": "s3cret"}]}, {"many": ["x", {"number": REDACTED}]}),
    "map": ({"by": {"number": "s3cret", "street": "x"}}, {"by": {"number": REDACTED, "street": "x"}}),
    "open-map": ({"loose": {"a": {"b": 1}, "number": "s3cret"}}, {"loose": {"a": {"b": 1}, "number": REDACTED}}),
    "branch": ({"who": {"street": "x"}}, {"who": {"street": "x"}}),
    "open-branch": ({"bag": {"x": [1], "number": "s3cret"}}, {"bag": {"x": [1], "number": REDACTED}}),
    "constant": ({"kind": "me"}, {"kind": "me"}),
    "not-the-constant": ({"kind": "ada:s3cret"}, {"kind": REDACTED}),
    "not-the-type": ({"amount": "ada:s3cret"}, {"amount": REDACTED}),
    "number": ({"amount": 7}, {"amount": 7}),
    "dataclass": ({"entry": {"user": "a", "s3": "s3cret"}}, {"entry": {"user": "a", "s3": REDACTED}}),
    "dataclass-or-text": ({"entry": "x"}, {"entry": "x"}),
    "choices": (
        {"spelled": {"pinCode": "s3cret", "code": "s3cret", "pin": "s3cret", "auth": {"pin": "s3cret"}, "x": 1}},
        {"spelled": {"pinCode": REDACTED, "code": REDACTED, "pin": REDACTED, "auth": {"pin": REDACTED}, "x": 1}},
    ),
    "path": (
        {"spelled": {"tokens": ["a", "s3cret"], "keys": ["s3cret"], "pass": "s3cret", "word": "s3cret", "note": "n"}},
        {"spelled": {"tokens": ["a", REDACTED], "keys": [REDACTED], "pass": REDACTED, "word": REDACTED, "note": "n"}},
    ),
}


async def test_what_an_unmarked_form_of_a_model_admits_is_shown_and_no_secret_in_any_spelling() -> None:
    calls = [(guarded([], input_schema=Pay), arguments) for arguments, _ in OPEN.values()]
    for (case, (_, expected)), lines in zip(OPEN.items(), await shown(*calls), strict=True):
        assert {name: json.loads(text) for name, text in named(lines).items()} == expected, case


async def test_what_an_open_model_or_function_admits_is_shown_and_no_secret_in_any_spelling() -> None:
    """At the root: `extra="allow"`, and a function's `**kwargs`."""

    def pay(to: str, pin: Annotated[str, Field(**MARK)] = "", **more: Any) -> dict[str, Any]:
        return {}

    function = FunctionModule(pay, "files.write", annotations=ModuleAnnotations(requires_approval=True))
    secrets = dict.fromkeys(("pin", "pinCode", "code", "word", "pass"), "s3cret")
    calls: list[tuple[Any, dict[str, Any]]] = [
        (guarded([], input_schema=Spelled), {**secrets, "auth": {"pin": "s3cret"}, "remark": "r", "x": {"y": [1]}}),
        (function, {"to": "Eve", "pin": "s3cret", "x": {"y": [1]}}),
        (guarded([], input_schema=RootModel[Card | Bag]), {"number": "s3cret", "x": {"y": [1]}}),
    ]
    first, second, third = [
        {name: json.loads(text) for name, text in named(lines).items()} for lines in await shown(*calls)
    ]
    hidden = dict.fromkeys(secrets, REDACTED)
    assert first == {**hidden, "auth": {"pin": REDACTED}, "remark": "r", "x": {"y": [1]}}
    assert second == {"to": "Eve", "pin": REDACTED, "x": {"y": [1]}}
    assert third == {"number": REDACTED, "x": {"y": [1]}}


async def test_of_a_model_that_marks_something_and_refers_to_itself_everything_is_hidden() -> None:
    """Nobody can say how deep its secrets lie."""
    arguments = {"name": "root", "key": "s3cret", "children": [{"name": "leaf", "key": "s3cret"}]}
    (lines,) = await shown((guarded([], input_schema=Tree), arguments))
    assert named(lines) == dict.fromkeys(("name", "key", "children"), HIDDEN)


async def test_a_model_that_marks_nothing_shows_whatever_it_is_called_with() -> None:
    """An alias called by its field's name, an argument that it does not know."""

    class Shell(BaseModel):
        command: str = Field(alias="cmd")
        model_config = ConfigDict(populate_by_name=True)

    (lines,) = await shown((guarded([], input_schema=Shell), {"command": "rm -r /", "as": "root"}))
    assert lines == ['- command: "rm -r /"', UNNAMED, '- as: "root"']


class Size(Enum):
    LARGE = "large"


class Address(BaseModel):
    street: str
    code: str = Field("", json_schema_extra={"x-sensitive": True})


class Order(BaseModel):
    items: Any
    address: Address


async def test_what_a_module_calls_another_with_is_shown_and_not_used_up() -> None:
    """Iterators, files and objects that JSON does not know."""
    got: list[Any] = []

    def execute(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        got.extend([*inputs["numbers"], inputs["file"].read(), inputs["odd"]])
        return {}

    class Odd:
        def __str__(self) -> str:
            return "what it says of itself"

    odd, file = Odd(), io.StringIO("text")

    async def call(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"numbers": iter([1, 2, 3]), "file": file, "odd": odd, "at": date(2026, 1, 2)}
        given |= {"path": PurePosixPath("/mnt"), "price": Decimal("1.50"), "raw": b"\xff", "some": {"a"}}
        given |= {"by": {"1": ()}, "size": Size.LARGE, "address": Address(street="x", code="s3cret")}
        return dict(await context.executor.call_async("files.write", given, context))

    arguments, asked = asking(APPROVE)
    annotations = ModuleAnnotations(requires_approval=True)
    modules = {"files.write": FunctionalModule(execute, annotations=annotations), "call": call}
    async with connect(modules, client=arguments) as client, asyncio.timeout(20):
        assert not (await client.call_tool("call")).is_error
    assert got == [1, 2, 3, "text", odd]
    assert asked[0].message.partition("\nArguments:\n")[2].splitlines() == [
        '- numbers: "(cannot be shown)"',
        '- file: "(cannot be shown)"',
        '- odd: "what it says of itself"',
        '- at: "2026-01-02"',
        '- path: "/mnt"',
        '- price: "1.50"',
        '- raw: "_w=="',
        '- some: ["a"]',
        '- by: {"1": []}',
        '- size: "large"',
        f'- address: {{"street": "x", "code": {HIDDEN}}}',
    ]
    order = {"items": [1], "address": Address(street="x", code="s3cret")}
    (lines,) = await shown((guarded([], input_schema=Order), order))
    assert lines == ["- items: [1]", f'- address: {{"street": "x", "code": {HIDDEN}}}']


# ---- Without state: one server asks, any other begins the call ----

KEY = "a secret that all servers know, " * 2
YES: dict[str, Any] = {"approval": APPROVE}


def replica(ran: list[dict[str, Any]], **options: Any) -> contextlib.AbstractContextManager[str]:
    """One of several servers that share nothing but a key. `below` calls `wipe`, which needs approval."""

    async def below(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("wipe", inputs, context)

    async def beside(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("wipe", inputs, Context.create(data=context.data))

    async def alone(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("wipe", inputs)

    wipe = guarded(ran, input_schema=Wipe)
    modules = {"wipe": wipe, "burn": guarded(ran), "ask": ask, "below": below, "beside": beside, "alone": alone}
    return serving(registry_of(modules), **{"stateless": True, "state_key": KEY, **options})


@contextlib.asynccontextmanager
async def wire_of(url: str, user: Any = APPROVE, mode: str = MODERN) -> AsyncIterator[Wire]:
    arguments, _ = asking(user)
    async with client_of(url, mode, **arguments) as client, asyncio.timeout(30):
        yield Wire(client)


async def test_any_server_with_the_key_begins_the_call_that_another_has_asked_about() -> None:
    """Also one that is started after the question, as in a rolling restart; and each question is for one call."""
    ran: list[dict[str, Any]] = []
    there: list[dict[str, Any]] = []
    for call in (("wipe", {"disk": "a"}), ("call_tool", {"name": "wipe", "arguments": {"disk": "a"}})):
        there.clear()
        with replica(ran, search=True) as url:
            async with wire_of(url) as wire:
                key, question, state = await wire.question(*call)
        assert (key, question.splitlines()[0]) == ("approval", "Let wipe run?")
        with replica(there, search=True, state_key=KEY.encode()) as url:
            async with wire_of(url) as wire:
                result = await wire.call(*call, request_state=state, input_responses=YES)
                assert (text_of(result), ran, there) == ('{"ran":true}', [], [{"disk": "a"}])
                _, _, another = await wire.question(*call)
                assert another != state
                _, question_again, _ = await wire.question(*call, request_state=state)
                assert question_again == question, "a retry without an answer is asked again"


@pytest.mark.parametrize(
    "user",
    [REFUSE, DECLINE, ElicitResult(action="cancel"), accept(approve="yes"), accept()],
    ids=repr,
)
async def test_whatever_is_no_yes_is_a_no_for_any_server(user: ElicitResult) -> None:
    ran: list[dict[str, Any]] = []
    with replica(ran) as url:
        arguments, asked = asking(user)
        async with client_of(url, **arguments) as client:
            assert await outcome_of(client, "wipe", {"disk": "a"}) == DENIED
    assert (len(asked), ran) == (1, [])


async def test_an_answer_of_another_kind_is_a_no() -> None:
    ran: list[dict[str, Any]] = []
    with replica(ran) as url:
        async with wire_of(url) as wire:
            _, _, state = await wire.question("burn", {})
            for odd in (ListRootsResult(roots=[]), accept(approve=1), accept(approve=["true"])):
                result = await wire.call("burn", {}, request_state=state, input_responses={"approval": odd})
                assert text_of(result) == DENIED
    assert ran == []


def aged(state: str, **claims: Any) -> str:
    """A state as the same server would have sealed it with other claims."""
    codec = AESGCMRequestStateCodec([KEY])
    return codec.seal(json.dumps({**json.loads(codec.unseal(state)), **claims}).encode())


async def test_no_state_but_that_of_this_very_question_begins_a_call() -> None:
    ran: list[dict[str, Any]] = []
    kept = serving(registry_of({"burn": ask}))
    with replica(ran) as url, replica(ran, state_key="x" * 32) as of_others, kept as with_sessions:
        async with wire_of(url) as wire, wire_of(of_others) as foreign, wire_of(with_sessions) as keeping:
            _, _, state = await wire.question("burn", {"n": 1})
            _, _, parked = await keeping.question("burn", {"n": 1})
            made_up = AESGCMRequestStateCodec(["y" * 32]).seal(AESGCMRequestStateCodec([KEY]).unseal(state))
            attempts: list[tuple[Wire, str, str, Any]] = [
                (wire, state, "burn", {"n": 2}),
                (wire, state, "wipe", {"n": 1}),
                (foreign, state, "burn", {"n": 1}),
                (keeping, state, "burn", {"n": 1}),
                (wire, aged(state, exp=time.time() - 1), "burn", {"n": 1}),
                (wire, aged(state, s="something else"), "burn", {"n": 1}),
                *(
                    (wire, text, "burn", {"n": 1})
                    for text in ("approval", "", parked, made_up, state[:-4], f"{state}x")
                ),
            ]
            for where, sent, name, arguments in attempts:
                with pytest.raises(MCPError) as caught:
                    await where.call(name, arguments, request_state=sent, input_responses=YES)
                assert caught.value.error.code == -32602
            unasked = await wire.call("burn", {"n": 1}, input_responses=YES)
            assert isinstance(unasked, InputRequiredResult), "an answer to no question is none"
            seconds = json.loads(AESGCMRequestStateCodec([KEY]).unseal(state))["exp"] - time.time()
            assert 290 < seconds <= 300
    assert ran == []


def test_only_whom_a_server_has_asked_may_bring_the_answer_to_another() -> None:
    """Callers as any middleware finds them out, not only the SDK's for tokens."""

    class Backend(AuthenticationBackend):
        async def authenticate(self, conn: Any) -> tuple[AuthCredentials, SimpleUser] | None:
            name = conn.headers.get("x-user")
            return (AuthCredentials([]), SimpleUser(name)) if name else None

    ran: list[dict[str, Any]] = []
    middleware = [Middleware(AuthenticationMiddleware, backend=Backend())]
    with replica(ran, middleware=middleware) as asks, replica(ran, middleware=middleware) as runs:
        states: dict[str, str] = {}
        params: dict[str, Any] = {"name": "burn", "arguments": {}}
        params["_meta"] = {"io.modelcontextprotocol/clientCapabilities": {"elicitation": {}}}
        for user in ("alice", ""):
            response = httpx.post(f"{asks}/mcp", **modern("tools/call", params, x_user=user or None))
            states[user] = response.json()["result"]["requestState"]
        answered = {**params, "inputResponses": {"approval": {"action": "accept", "content": {"approve": True}}}}
        for asked, user in (("alice", "bob"), ("alice", ""), ("", "alice"), ("alice", "alice"), ("", "")):
            retry = {**answered, "requestState": states[asked]}
            response = httpx.post(f"{runs}/mcp", **modern("tools/call", retry, x_user=user or None)).json()
            assert ("result" in response) == (asked == user)
    assert len(ran) == 2


@pytest.mark.parametrize(("approval", "runs"), [("require", 0), ("auto", 3)])
async def test_what_the_module_calls_is_as_for_a_client_that_cannot_ask(approval: str, runs: int) -> None:
    ran: list[dict[str, Any]] = []
    with replica(ran, approval=approval) as url:
        arguments, asked = asking(APPROVE)
        async with client_of(url, **arguments) as client:
            for name in ("below", "beside", "alone"):
                assert await outcome_of(client, name, {"disk": "a"}) == ('{"ran":true}' if runs else UNASKED)
            assert (await client.call_tool("ask")).structured_content == {"answer": None}
    assert (len(ran), asked) == (runs, [])


async def test_who_cannot_be_asked_is_told_so_with_a_key_too() -> None:
    """A client without elicitation, and one of the handshake versions, to which no answer could come back."""
    ran: list[dict[str, Any]] = []
    with replica(ran) as url:
        async with wire_of(url, None) as wire:
            assert await outcome_of(wire.client, "burn") == LACKS_ELICITATION
            assert await outcome_of(wire.client, "below", {"disk": "a"}) == UNASKED
        async with wire_of(url, mode=HANDSHAKE) as wire:
            assert await outcome_of(wire.client, "burn") == UNASKED
    with replica(ran, approval="auto") as url:
        for user, mode in ((None, MODERN), (APPROVE, HANDSHAKE)):
            async with wire_of(url, user, mode) as wire:
                assert await outcome_of(wire.client, "burn") == '{"ran":true}'
    assert len(ran) == 2


async def test_who_was_asked_is_not_let_through_for_a_retry_that_declares_less() -> None:
    """Under `auto`, too: the state says that the client could be asked, whatever it says of itself now."""
    ran: list[dict[str, Any]] = []
    with replica(ran, approval="auto") as url:
        async with wire_of(url) as wire, wire_of(url, None) as unable:
            for answers in ({}, {"input_responses": {"approval": DECLINE}}, {"input_responses": YES}):
                _, _, state = await wire.question("burn", {})
                with pytest.raises(MCPError, match="Client did not declare form elicitation"):
                    await unable.call("burn", {}, request_state=state, **answers)
    assert ran == []


async def test_any_server_checks_arguments_and_the_acl_before_it_asks_and_again_before_it_runs() -> None:
    """And no middleware takes the question for a failure that it might recover from."""
    seen: list[str] = []

    class Recover(ExecutorMiddleware):
        def on_error(self, module_id: str, inputs: dict[str, Any], error: Exception, context: Any) -> dict[str, Any]:
            seen.append(type(error).__name__)
            return {"recovered": True}

    ran: list[dict[str, Any]] = []
    acl = ACL(rules=[], default_effect="allow")
    executor = Executor(registry_of({"wipe": guarded(ran, input_schema=Wipe)}), acl=acl, middlewares=[Recover()])
    with serving(executor, stateless=True, state_key=KEY) as url:
        async with wire_of(url) as wire:
            assert "disk" in text_of(await wire.call("wipe", WRONG))
            _, _, state = await wire.question("wipe", {"disk": "a"})
            executor.set_acl(ACL(rules=[], default_effect="deny"))
            retry: Any = {"request_state": state, "input_responses": YES}
            assert text_of(await wire.call("wipe", {"disk": "a"}, **retry)) == "Access denied"
    assert (ran, seen) == ([], [])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"stateless": True, "state_key": "k" * 31}, "32 bytes"),
        ({"stateless": True, "state_key": ""}, "32 bytes"),
        ({"state_key": "k" * 32}, "stateless"),
    ],
)
def test_a_key_is_long_and_for_servers_without_sessions(options: dict[str, Any], says: str) -> None:
    for door in (serve, MCPServer, async_serve):
        with pytest.raises(ValueError, match=says) as caught:
            door(registry_of(), transport="streamable-http", **options)
        assert "kkk" not in str(caught.value)


def test_the_key_is_in_no_text_of_the_options() -> None:
    server = MCPServer(registry_of(), transport="streamable-http", stateless=True, state_key=KEY)
    assert "stateless=True" in repr(vars(server))
    assert "secret" not in repr(vars(server))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "calls of burn, wipe are refused"),
        ({"approval": ElicitationApprovalHandler()}, "calls of burn, wipe are refused"),
        ({"approval": "auto"}, "calls of burn, wipe run unasked"),
        ({"approval": "auto", "policy": ExecutionPolicy(strict=True)}, "calls of burn, wipe are refused"),
        ({"approval": "auto", "approval_handler": AutoApproveHandler()}, ""),
        ({"approval": "deny"}, ""),
        ({"approval": "off"}, ""),
        ({"state_key": KEY}, ""),
        ({"stateless": False}, ""),
    ],
    ids=["require", "handler", "auto", "strict", "executors-own", "deny", "off", "key", "sessions"],
)
def test_a_start_names_what_nobody_can_be_asked_about(
    options: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = {"stateless": True, **options}
    governed = {name: served.pop(name) for name in ("policy", "approval_handler") if name in served}
    with serving(Executor(registry_of({"wipe": guarded([]), "burn": guarded([]), "ask": ask}), **governed), **served):
        pass
    warnings = [text.partition(": ")[2] for text in messages_logged(caplog) if "Nobody can be asked" in text]
    assert warnings == ([says] if says else [])
