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
from collections import deque
from collections.abc import AsyncIterator, Iterator
from datetime import date
from decimal import Decimal
from enum import Enum
from pathlib import PurePosixPath
from typing import Annotated, Any

import httpx
import pytest
from apcore import ACL, APCore, Config, ExecutionPolicy, Executor, FunctionModule, ModuleAnnotations
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
from pydantic import (
    AliasChoices,
    AliasPath,
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    SecretStr,
    field_serializer,
    model_validator,
)
from pydantic.dataclasses import dataclass
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from support import DENIED, UNASKED, Wire, accept, ask, asking, guarded, messages_logged, modern, text_of

from apcore_mcp import ElicitationApprovalHandler, MCPServer, async_serve, elicit, serve

APPROVE, REFUSE, DECLINE = accept(approve=True), accept(approve=False), ElicitResult(action="decline")
EVERYONE = {"yes": APPROVE, "no": REFUSE, "decline": DECLINE, "cannot": None}
LACKS_ELICITATION = (-32021, {"requiredCapabilities": {"elicitation": {"form": {}}}})
REFUSED = "wipe: wipe is refused, as its user cannot be asked for approval (see approval=, --approval)"
LET_THROUGH = "wipe: wipe is let through without approval, as its user cannot be asked"


async def outcome_of(client: Client, name: str, arguments: dict[str, Any] | None = None) -> Any:
    """The text a call is answered with, or the code and the data of a JSON-RPC error."""
    try:
        return text_of(await client.call_tool(name, arguments))
    except MCPError as error:
        return error.error.code, error.error.data


class Backend(AuthenticationBackend):
    """The caller is whom a header names."""

    async def authenticate(self, conn: Any) -> tuple[AuthCredentials, SimpleUser] | None:
        name = conn.headers.get("x-user")
        return (AuthCredentials([]), SimpleUser(name)) if name else None


def wiping(**options: Any) -> tuple[Executor, list[dict[str, Any]]]:
    """An Executor of one module that needs approval, and its runs."""
    ran: list[dict[str, Any]] = []
    return Executor(registry_of({"wipe": guarded(ran)}), **options), ran


async def test_sync_modules_in_a_host_need_approval() -> None:
    """Also for what they call without their context."""
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
async def test_a_call_runs_if_mode_and_user_say_so(
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
                LET_THROUGH: "warns" in happens,
                REFUSED: happens == "unasked",
            }
            decisions = [text for text in messages_logged(caplog) if text.startswith("wipe: ")]
            assert decisions == [text for text, is_logged in told.items() if is_logged]


@pytest.mark.parametrize("door", [serve, async_serve])
def test_doors_require_approval_by_default(door: Any) -> None:
    assert inspect.signature(door).parameters["approval"].default == "require"


TOGGLE = "system.control.toggle_feature"


def controlled(**options: Any) -> APCore:
    """An application whose own control modules are registered, and a module `echo`."""
    client = APCore(config=Config({"sys_modules": {"enabled": True, "events": {"enabled": True}}}), **options)
    client.registry.register("echo", FunctionalModule(lambda inputs, context: inputs))
    return client


@pytest.mark.parametrize(("user", "disabled"), [("yes", True), ("no", False), ("cannot", False)])
async def test_nobody_controls_the_application_unasked(
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
def test_a_start_warns_of_unprotected_control_modules(
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
        assert "apcore's system.* are tools" in caplog.text


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


async def test_a_handler_decides_and_its_reasons_stay_here() -> None:
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
        ("require", AutoApproveHandler(), "no", 1, 0),
        ("off", Judge("rejected"), "yes", 0, 0),
        ("off", ElicitationApprovalHandler(), "yes", 1, 1),
        ("off", ElicitationApprovalHandler(), "cannot", 0, 0),
    ],
)
async def test_an_executor_keeps_its_own_handler(approval: str, handler: Any, user: str, runs: int, asks: int) -> None:
    """Also where that is the one that asks the user, of a server or of nobody."""
    executor, ran = wiping(approval_handler=handler)
    arguments, asked = asking(EVERYONE[user])
    async with connect(executor, client=arguments, approval=approval) as client:
        await outcome_of(client, "wipe")
    assert (len(ran), len(asked)) == (runs, asks)
    if isinstance(handler, ElicitationApprovalHandler):
        with pytest.raises(ApprovalDeniedError):
            await executor.call_async("wipe", {})


async def test_a_clients_approval_token_is_no_answer() -> None:
    executor, ran = wiping()
    async with connect(executor, client=asking(REFUSE)[0]) as client:
        for token in ("token", "", 7, None):
            assert await outcome_of(client, "wipe", {"_approval_token": token}) != '{"ran":true}'
    assert ran == []


def test_a_lacking_capability_is_a_bad_request() -> None:
    """MCP 2026-07-28: -32021 goes with HTTP 400; also of a module that another one calls."""
    below = FunctionalModule(lambda inputs, context: context.executor.call("wipe", inputs, context))
    with serving(registry_of({"wipe": guarded([]), "below": below}), approval="require") as url:
        for name in ("wipe", "below"):
            response = httpx.post(f"{url}/mcp", **modern("tools/call", {"name": name, "arguments": {}}))
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["data"]) == (400, *LACKS_ELICITATION)


@pytest.mark.parametrize(("first", "runs"), [("deny", 0), ("auto", 1), (AutoApproveHandler(), 1)])
async def test_each_server_decides_about_its_own_calls(first: Any, runs: int) -> None:
    executor, ran = wiping()
    async with connect(executor, approval="deny") as second:
        async with connect(executor, approval=first) as client:
            assert await outcome_of(second, "wipe") == DENIED
            assert await outcome_of(client, "wipe") == ('{"ran":true}' if runs else DENIED)
        assert await outcome_of(second, "wipe") == DENIED
        await executor.call_async("wipe", {})  # which is nobody's: apcore skips a gate without a handler
    assert len(ran) == runs + 1


@pytest.mark.parametrize(("approval", "user", "runs"), [("deny", "yes", 0), ("auto", "yes", 1)])
async def test_calls_without_context_or_from_threads_need_approval(approval: str, user: str, runs: int) -> None:
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
async def test_what_outlives_its_call_is_refused(approval: str, user: str) -> None:
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
async def test_a_thread_past_its_timeout_is_refused(mode: str, user: str) -> None:
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


async def test_who_could_be_asked_is_not_let_through() -> None:
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
async def test_auto_obeys_a_strict_policy_and_a_handler(user: str, runs: int) -> None:
    """Both set while the server runs. It is the handler of the Executor meanwhile, and not after its end."""
    executor, ran = wiping()
    async with connect(executor, client=asking(EVERYONE[user])[0], approval="auto") as client:
        executor.set_policy(ExecutionPolicy(strict=True))
        told = await outcome_of(client, "wipe")
        assert told == ('{"ran":true}' if runs else LACKS_ELICITATION if user == "cannot" else DENIED)
        with pytest.raises(ApprovalDeniedError):
            await executor.call_async("wipe", {})
        assert executor.governance_state().approval_handler_configured
    assert not executor.governance_state().approval_handler_configured
    async with connect(executor, approval="deny") as client:
        executor.set_approval_handler(Judge("approved"))
        assert await outcome_of(client, "wipe") == '{"ran":true}'
    assert executor.governance_state().approval_handler_configured
    assert len(ran) == runs + 1


async def test_a_users_own_gate_stays_in_place() -> None:
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


class Wipe(BaseModel):
    disk: str
    passes: int = Field(1, ge=1)


WIPE = {"properties": {"disk": {"type": "string"}, "passes": {"type": "integer", "minimum": 1}}, "required": ["disk"]}
WRONG = {"disk": ["sda"], "passes": 0}


@pytest.mark.parametrize("schema", [Wipe, {"type": "object", **WIPE}], ids=["model", "dict"])
@pytest.mark.parametrize("validate_inputs", [False, True], ids=["", "validate_inputs"])
async def test_nobody_is_asked_about_invalid_arguments(schema: Any, validate_inputs: bool) -> None:
    """Neither the user nor a handler of the server's; and the caller is told what is wrong as ever."""
    ran: list[dict[str, Any]] = []
    plain, gated = guarded(ran, input_schema=schema, annotations=None), guarded(ran, input_schema=schema)
    judge = Judge("approved")
    arguments, asked = asking(APPROVE)
    for approval in ("require", judge):
        served = {"approval": approval, "validate_inputs": validate_inputs}
        async with connect({"plain": plain, "gated": gated}, client=arguments, **served) as client:
            refusal = await client.call_tool("gated", WRONG)
            assert text_of(refusal) == text_of(await client.call_tool("plain", WRONG))
            assert re.findall(r"\n- (\w+):", text_of(refusal)) == ["disk", "passes"]
            assert (ran, asked, judge.asked) == ([], [], [])
            assert await outcome_of(client, "gated", {"disk": "sda"}) == '{"ran":true}'
        ran.clear(), asked.clear(), judge.asked.clear()


async def test_nested_calls_are_checked_before_anybody_is_asked() -> None:
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


async def test_the_time_to_approve_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = 0.0
    now = time.time

    def answer(params: Any) -> ElicitResult:
        nonlocal waited
        waited = 100
        return APPROVE

    monkeypatch.setattr(time, "time", lambda: now() + waited)
    limited = Config(data={"executor": {"global_timeout": 60_000}})
    executor = Executor(registry_of({"wipe": guarded([])}), config=limited)
    async with connect(executor, client=asking(answer)[0]) as client:
        assert await outcome_of(client, "wipe") == '{"ran":true}'
    assert waited


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


def fields(*names: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {**{name: {} for name in names}, **properties}}


UNNAMED = "(the module's schema does not name these:)"


async def test_the_question_is_for_people() -> None:
    """It says what the tool does, what is dangerous, and each argument by its value, as one JSON text."""
    about = "Write a text, e.g. a note,\nto a file. Nothing is kept of what was there.\n\nMore for agents."
    arguments: dict[str, Any] = {"path": "/etc/passwd", "mode": 0o644, "größe": 1.5, "to whom": ["Zoë", None, True]}
    arguments["request"] = {"body": {"of": {"a": {"b": {"c": {"d": [{"path": 'settings "1".ini'}]}}}}}, "no": [{}, []]}
    module = guarded([], description=about, input_schema=fields(*arguments))
    annotations = ModuleAnnotations(requires_approval=True)
    plain = guarded([], description="", annotations=annotations, input_schema=fields("n"))
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


async def test_a_long_value_loses_its_middle() -> None:
    """Its ends stand in brackets, outside of which no caller can write."""
    said = '"> (characters left out: 99,500) <"'
    arguments: dict[str, Any] = {"exact": "e" * 998, "text": "a" * 999, "cents": 10**3000 + 7, "list": ["y"] * 1000}
    arguments["forged"] = said
    (lines,) = await shown((guarded([], input_schema=fields(*arguments)), arguments))
    cents, written = str(arguments["cents"]), json.dumps(arguments["list"])
    assert lines == [
        f'- exact: "{"e" * 998}"',
        f'- text: <"{"a" * 499}> (characters left out: 1) <{"a" * 499}">',
        f"- cents: <{cents[:500]}> (characters left out: 2,001) <{cents[-500:]}>",
        f"- list: <{written[:500]}> (characters left out: 4,000) <{written[-500:]}>",
        f"- forged: {json.dumps(said)}",
    ]


FORGED = [
    '/tmp/notes"\n- path: "/tmp/notes',
    "a\r\nb\x1b[2K\x00\x7f",
    "a\u202eb\u2066c\u200d\ufeff",
    "a\u2028- path: 1\u2029\x85\x0b\x0c",
    "\ud800 \U000e0041 \uffff",
    "\\n \\u202e",
]


async def test_no_argument_forges_a_line() -> None:
    """Neither by a value nor by a name: each stays in a line of its own, as JSON that says what is there."""
    module = guarded([], input_schema=fields("path", "deep"))
    calls = [(module, {"path": text, text: 1, "deep": [{text: text}]}) for text in FORGED]
    for text, (path, deep, _, name) in zip(FORGED, await shown(*calls), strict=True):
        assert (path + name + deep).isprintable()
        assert json.loads(path.removeprefix("- path: ")) == text
        assert json.loads(f"{{{name.removeprefix('- ')}}}") == {text: 1}
        assert json.loads(deep.removeprefix("- deep: ")) == [{text: text}]


# Letters and their accents, numbers, punctuation and currency.
SEEN = [
    "Zoë, naïve, Đặng Thị, mañana, Ångström",
    "e\u0301 n\u0303 a\u0323\u0302 \u05e9\u05c1\u05b8\u05dc\u05d5\u05b9\u05dd",
    "東京 서울 ไทยน้ำ हिन्दी தமிழ் ខ្មែរ မြန်မာ العَرَبِيَّة ελληνικά հայերեն ქართული አማርኛ བོད་སྐད།",
    "€ £ ¥ ½ ² ٣ Ⅷ „Ja“ \u2013 «non» ¿qué? 「はい」 …",
    "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
]
UNSEEN = "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180e\u180f\u3164\ufe00\ufe0f\uffa0\U000e0100\u0336\u0338\u20d2"
UNSEEN += "\u00a0\u3000\u2800\u00ad\u200b\u200c\u200d\u2060\u0488\u20dd\ue000\U000e0041\U0001d159😀🇪√±№™\x1f\x7f"


async def test_only_what_can_be_read_is_shown() -> None:
    module = guarded([], input_schema=fields("t"))
    hidden = [f"a{char}b" for char in UNSEEN]
    (lines, readable) = await shown((module, {"t": hidden}), (module, {"t": SEEN}))
    written = lines[0].removeprefix("- t: ")
    assert (written.isascii(), json.loads(written)) == (True, hidden)
    assert readable == [f"- t: {json.dumps(SEEN, ensure_ascii=False)}"]


async def test_arguments_that_no_schema_names_come_last() -> None:
    """Behind a line that says so, however many a caller sends: they take no place of one that counts."""

    class Disk(BaseModel):
        disk: str
        model_config = ConfigDict(extra="allow")

    class Nothing(BaseModel):
        pass

    referring = {"$ref": "#/$defs/disk", "$defs": {"disk": fields("disk")}}
    many = {f"a{n}": n for n in range(5_000)}
    calls: list[tuple[Any, dict[str, Any]]] = [
        (guarded([], input_schema=Disk), {"dry_run": True, "disk": "sda"}),
        (guarded([], input_schema=Nothing), {"dry_run": True}),
        (guarded([]), {"dry_run": True}),
        (guarded([], input_schema=Disk), {"disk": "sda"}),
        (guarded([], input_schema=referring), {**many, "disk": "sda"}),
    ]
    *few, lines = await shown(*calls)
    assert few == [
        ['- disk: "sda"', UNNAMED, "- dry_run: true"],
        [UNNAMED, "- dry_run: true"],
        [UNNAMED, "- dry_run: true"],
        ['- disk: "sda"'],
    ]
    assert (lines[:3], lines[-1]) == (['- disk: "sda"', UNNAMED, "- a0: 0"], "(arguments left out: 4,901)")
    assert len(lines) == 102


MARK: dict[str, Any] = {"json_schema_extra": {"x-sensitive": True}}
SECRET = {"type": "string", "x-sensitive": True}
HIDDEN = '"***REDACTED***"'

DICTS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "beside": (
        fields("to", "amount", pin=SECRET),
        {"pin": "s3cret", "amount": 7, "to": "Ada", "note": "rent"},
        ['- to: "Ada"', "- amount: 7", f"- pin: {HIDDEN}", UNNAMED, '- note: "rent"'],
    ),
    "inside": (
        fields(login=fields("user", password=SECRET), keys={"type": "array", "items": SECRET}),
        {"login": {"user": "ada", "password": "s3cret", "realm": "r"}, "keys": ["s3cret", "s3cret"]},
        [f'- login: {{"user": "ada", "password": {HIDDEN}, "realm": "r"}}', f"- keys: [{HIDDEN}, {HIDDEN}]"],
    ),
    "in-a-map": (
        fields(users={"additionalProperties": fields("n", pin=SECRET)}),
        {"users": {"ada": {"pin": "s3cret", "n": 1}}},
        [f'- users: {{"ada": {{"n": 1, "pin": {HIDDEN}}}}}'],
    ),
    "of-every-name": (
        {"type": "object", "additionalProperties": SECRET},
        {"a": "s3cret"},
        [UNNAMED, f"- a: {HIDDEN}"],
    ),
    "by-pattern": (
        {"type": "object", "patternProperties": {"^p": SECRET}},
        {"pin": "s3cret"},
        [UNNAMED, f"- pin: {HIDDEN}"],
    ),
    "in-a-branch": (
        {"type": "object", "properties": {"key": {}, "n": {}}, "allOf": [fields(key=SECRET)]},
        {"key": "s3cret", "n": 1},
        [f"- key: {HIDDEN}", "- n: 1"],
    ),
    "whole": ({"type": "object", "x-sensitive": True}, {"a": "s3cret"}, [UNNAMED, f"- a: {HIDDEN}"]),
    "nothing": (fields(pin={"x-sensitive": True}), {"pin": None}, ["- pin: null"]),
}


async def test_marked_values_are_hidden() -> None:
    """And no others: who writes the arguments cannot hide one that counts."""
    lines = await shown(*[(guarded([], input_schema=schema), arguments) for schema, arguments, _ in DICTS.values()])
    assert dict(zip(DICTS, lines, strict=True)) == {case: expected for case, (_, _, expected) in DICTS.items()}


class Login(BaseModel):
    user: str
    password: str = Field(alias="pass", **MARK)
    model_config = ConfigDict(populate_by_name=True)


class Card(BaseModel):
    number: SecretStr
    holder: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_one_text(cls, value: Any) -> Any:
        return dict(zip(("holder", "number"), value.split(":"), strict=True)) if isinstance(value, str) else value


@dataclass
class Entry:
    """A dataclass of pydantic's has aliases, too."""

    user: str
    secret: Annotated[str, Field(validation_alias=AliasChoices("secret", "s3"), **MARK)] = ""


class Payment(BaseModel):
    """What a client may write by alias or by field name, and for some fields in yet another way."""

    to: str = Field(alias="recipient")
    pin: str = Field(alias="PIN", **MARK)
    code: str = Field("", validation_alias=AliasChoices("code", "otp", AliasPath("codes", 0)), **MARK)
    purpose: str = Field("", validation_alias=AliasChoices("purpose", "for"))
    login: Login | None = None
    card: int | Card = 0
    entry: Entry | str = ""
    model_config = ConfigDict(populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _login_of_one_text(cls, value: Any) -> Any:
        if "account" in value:
            value = {**value, "login": dict(zip(("user", "password"), value["account"].split(":"), strict=True))}
        return value


SENT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "by-alias": (
        {"recipient": "Ada", "PIN": "s3cret", "login": {"user": "a", "pass": "s3cret"}},
        ['- recipient: "Ada"', f"- PIN: {HIDDEN}", f'- login: {{"user": "a", "pass": {HIDDEN}}}'],
    ),
    "by-name": (
        {"to": "Ada", "pin": "s3cret", "login": {"user": "a", "password": "s3cret", "x": 1}},
        ['- to: "Ada"', f"- pin: {HIDDEN}", f'- login: {{"user": "a", "password": {HIDDEN}, "x": 1}}'],
    ),
    "by-a-second-name": (
        {"to": "Ada", "pin": "s3cret", "otp": "s3cret", "for": "rent"},
        ['- to: "Ada"', f"- pin: {HIDDEN}", f"- otp: {HIDDEN}", '- for: "rent"'],
    ),
    "by-a-path": (
        {"to": "Ada", "pin": "s3cret", "codes": ["s3cret"]},
        ['- to: "Ada"', f"- pin: {HIDDEN}", f"- codes: {HIDDEN}"],
    ),
    "of-another-type": (
        {"to": "Ada", "pin": "s3cret", "card": "Ada:s3cret", "entry": {"user": "a", "s3": "s3cret"}},
        ['- to: "Ada"', f"- pin: {HIDDEN}", f"- card: {HIDDEN}", f'- entry: {{"user": "a", "s3": {HIDDEN}}}'],
    ),
    "without-a-secret": (
        {"to": "Ada", "pin": "s3cret", "card": 7, "entry": "x"},
        ['- to: "Ada"', f"- pin: {HIDDEN}", "- card: 7", '- entry: "x"'],
    ),
    "by-both-names": (
        {"recipient": "Ada", "to": "Eve", "PIN": "s3cret", "pin": "s3cret"},
        ['- to: "Eve"', '- recipient: "Ada"', f"- pin: {HIDDEN}", f"- PIN: {HIDDEN}"],
    ),
}


async def test_a_question_shows_what_was_sent() -> None:
    """By whatever name, with what any spelling of a marked one holds hidden: it is what a class is given."""
    calls = [(guarded([], input_schema=Payment), arguments) for arguments, _ in SENT.values()]
    for (case, (_, expected)), lines in zip(SENT.items(), await shown(*calls), strict=True):
        assert sorted(lines) == sorted(expected), case


async def test_a_question_shows_no_reading_of_a_model() -> None:
    """No serializer, nothing left out: 1,499 cents would be 10 euros, and a path that is excluded would be missing."""

    class Price(BaseModel):
        amount: int = Field(alias="amountCents")
        path: str = Field("", exclude=True)
        pin: str = Field("", **MARK)

        @field_serializer("amount")
        def _rounded(self, amount: int) -> int:
            return amount // 1000

    arguments = {"amountCents": 1499, "amount": 1_000_000, "path": "/etc", "pin": "s3cret"}
    (lines,) = await shown((guarded([], input_schema=Price), arguments))
    expected = ["- amountCents: 1499", "- amount: 1000000", '- path: "/etc"', f"- pin: {HIDDEN}"]
    assert sorted(lines) == sorted(expected)


async def test_names_of_the_branches_of_a_union_come_first() -> None:
    class One(BaseModel):
        path: str

    class Many(BaseModel):
        paths: list[str]

    arguments = {**{f"a{number}": number for number in range(200)}, "path": "/home"}
    (lines,) = await shown((guarded([], input_schema=RootModel[One | Many]), arguments))
    assert lines[:2] == ['- path: "/home"', UNNAMED]


async def test_open_names_beside_a_mark_are_shown() -> None:
    """Those of `extra="allow"`, and of a function's `**kwargs`: the module is given them."""

    class Open(BaseModel):
        to: str = ""
        pin: str = Field("", **MARK)
        model_config = ConfigDict(extra="allow")

    def pay(to: str, pin: Annotated[str, Field(**MARK)] = "", **more: Any) -> dict[str, Any]:
        return {}

    function = FunctionModule(pay, "files.write", annotations=ModuleAnnotations(requires_approval=True))
    arguments = {"to": "Eve", "pin": "s3cret", "force": {"all": True}}
    for lines in await shown((guarded([], input_schema=Open), arguments), (function, arguments)):
        expected = ['- to: "Eve"', f"- pin: {HIDDEN}", '- force: {"all": true}']
        assert [line for line in lines if line != UNNAMED] == expected


async def test_without_marks_everything_is_shown_as_sent() -> None:
    """An alias called by its field's name, an argument that the model does not know."""

    class Shell(BaseModel):
        command: str = Field(alias="cmd")
        model_config = ConfigDict(populate_by_name=True)

    module = guarded([], input_schema=Shell)
    by_alias, by_name = await shown((module, {"as": "root", "cmd": "rm"}), (module, {"command": "rm", "as": "root"}))
    assert by_alias == ['- cmd: "rm"', UNNAMED, '- as: "root"']
    assert by_name == ['- command: "rm"', UNNAMED, '- as: "root"']


class Size(Enum):
    LARGE = "large"


class Address(BaseModel):
    street: str
    code: str = Field("", **MARK)


async def test_python_values_of_a_module_are_shown() -> None:
    """Of one that calls another, which gets them as they were: iterators and files are not used up."""
    got: list[Any] = []

    def execute(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        got.extend([*inputs["numbers"], inputs["file"].read(), inputs["size"]])
        return {}

    async def call(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"numbers": iter([1, 2, 3]), "file": io.StringIO("text"), "at": date(2026, 1, 2)}
        given |= {"path": PurePosixPath("/mnt"), "price": Decimal("1.50"), "raw": b"\xff", "some": {"a"}}
        given |= {"by": {"1": ()}, "size": Size.LARGE, "address": Address(street="x", code="s3cret")}
        return dict(await context.executor.call_async("files.write", given, context))

    arguments, asked = asking(APPROVE)
    annotations = ModuleAnnotations(requires_approval=True)
    modules = {"files.write": FunctionalModule(execute, annotations=annotations), "call": call}
    async with connect(modules, client=arguments) as client, asyncio.timeout(20):
        assert not (await client.call_tool("call")).is_error
    assert got == [1, 2, 3, "text", Size.LARGE]
    assert asked[0].message.partition(UNNAMED)[2].splitlines()[3:] == [
        '- at: "2026-01-02"',
        '- path: "/mnt"',
        '- price: "1.50"',
        '- raw: "_w=="',
        '- some: ["a"]',
        '- by: {"1": []}',
        '- size: "large"',
        f'- address: {{"street": "x", "code": {HIDDEN}}}',
    ]


async def test_python_values_of_a_module_are_valid() -> None:
    """As without approval: what is no JSON is held against the hints as it is."""

    def write(size: Size, tags: set[str], address: Address, at: list[date]) -> str:
        return f"{size.name} {tags} {address.street} {at[0].year}"

    async def call(inputs: dict[str, Any], context: Any) -> Any:
        given = {"size": Size.LARGE, "tags": {"a"}, "address": Address(street="x"), "at": [date(2026, 1, 2)]}
        return await context.executor.call_async("files.write", given, context)

    function = FunctionModule(write, "files.write", annotations=ModuleAnnotations(requires_approval=True))
    modules = {"files.write": function, "call": call}
    async with connect(modules, client=asking(APPROVE)[0]) as client, asyncio.timeout(20):
        assert (await client.call_tool("call")).structured_content == {"result": "LARGE {'a'} x 2026"}


class Shelf:
    """What holds others, and quotes them in its text."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def __iter__(self) -> Iterator[Any]:
        return iter(self.held)

    def __str__(self) -> str:
        return str(self.held)


async def test_what_marked_values_of_a_module_mark_is_hidden() -> None:
    """Also under a hint that says nothing, beside one that marks something itself."""
    address = Address(street="x", code="s3cret")
    held = {"itself": address, "list": [address], "deque": deque([address]), "shelf": Shelf([address])}

    def write(anything: Any, address: Address) -> str:
        return "done"

    async def call(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("files.write", {"anything": held, "address": address}, context)

    arguments, asked = asking(APPROVE)
    function = FunctionModule(write, "files.write", annotations=ModuleAnnotations(requires_approval=True))
    async with connect({"files.write": function, "call": call}, client=arguments) as client, asyncio.timeout(20):
        assert (await client.call_tool("call")).structured_content == {"result": "done"}
    assert (asked[0].message.count(HIDDEN), asked[0].message.count("s3cret")) == (5, 0)
    assert f'"shelf": {HIDDEN}' in asked[0].message


# ---- Without state: one server asks, any other begins the call ----

KEY = "a secret that all servers know, " * 2
YES: dict[str, Any] = {"approval": APPROVE}


def replica(ran: list[dict[str, Any]], **options: Any) -> contextlib.AbstractContextManager[str]:
    """One of several servers that share nothing but a key. `below` calls `wipe`, which needs approval."""

    async def below(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("wipe", inputs, context)

    async def alone(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("wipe", inputs)

    wipe = guarded(ran, input_schema=Wipe)
    modules = {"wipe": wipe, "burn": guarded(ran), "ask": ask, "below": below, "alone": alone}
    return serving(registry_of(modules), **{"stateless": True, "state_key": KEY, **options})


@contextlib.asynccontextmanager
async def wire_of(url: str, user: Any = APPROVE, mode: str = MODERN) -> AsyncIterator[Wire]:
    arguments, _ = asking(user)
    async with client_of(url, mode, **arguments) as client, asyncio.timeout(30):
        yield Wire(client)


async def test_any_server_with_the_key_begins_the_call() -> None:
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
async def test_whatever_is_no_yes_is_a_no(user: ElicitResult) -> None:
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


async def test_only_the_state_of_the_question_begins_a_call() -> None:
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


def test_only_the_caller_who_was_asked_brings_the_answer() -> None:
    """Callers as any middleware finds them out, not only the SDK's for tokens."""

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


@pytest.mark.parametrize("approval", ["require", "auto"])
async def test_without_state_nobody_is_asked_about_nested_calls(approval: str) -> None:
    """And none is let through: who made the call could be asked."""
    ran: list[dict[str, Any]] = []
    with replica(ran, approval=approval) as url:
        arguments, asked = asking(APPROVE)
        async with client_of(url, **arguments) as client:
            for name in ("below", "alone"):
                assert await outcome_of(client, name, {"disk": "a"}) == UNASKED
            assert (await client.call_tool("ask")).structured_content == {"answer": None}
    assert (ran, asked) == ([], [])


class Box(BaseModel):
    name: str
    pin: str = Field("", **MARK)
    boxes: list[Box] = []


@pytest.mark.parametrize("handler", [ElicitationApprovalHandler(), AutoApproveHandler()])
async def test_a_module_that_is_no_tool_is_asked_about_when_another_calls_it(handler: Any) -> None:
    """Its schema refers to itself, and what it marks could stand anywhere."""
    ran: list[dict[str, Any]] = []
    registry = registry_of({"empty": guarded(ran, input_schema=Box)})

    async def tidy(inputs: dict[str, Any], context: Any) -> Any:
        box = {"name": "red", "pin": "s3cret", "boxes": [{"name": "small", "pin": "s3cret"}]}
        return await context.executor.call_async("empty", box, context)

    registry.register("tidy", FunctionalModule(tidy))
    arguments, asked = asking(APPROVE)
    async with connect(registry, client=arguments, approval=handler) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["tidy"]
        assert text_of(await client.call_tool("tidy")) == '{"ran":true}'
    assert len(ran) == 1
    assert len(asked) == isinstance(handler, ElicitationApprovalHandler)
    assert "s3cret" not in str(asked)


async def test_a_question_hides_what_the_module_marks_that_runs() -> None:
    """That of a second Executor, whatever the server's module of the same id says."""

    class Pin(BaseModel):
        pin: str = Field(**MARK)

    ran: list[dict[str, Any]] = []
    payments = registry_of({"pay": guarded(ran, input_schema=Pin)})
    other = Executor(payments, approval_handler=ElicitationApprovalHandler())
    registry = registry_of({"pay": FunctionalModule(lambda inputs, context: inputs)})

    async def shop(inputs: dict[str, Any], context: Any) -> Any:
        return await other.call_async("pay", {"pin": "s3cret"})

    registry.register("shop", FunctionalModule(shop))
    arguments, asked = asking(APPROVE)
    async with connect(registry, client=arguments) as client:
        assert text_of(await client.call_tool("shop")) == '{"ran":true}'
    assert (len(ran), len(asked)) == (1, 1)
    assert "s3cret" not in str(asked)


def test_no_caller_takes_the_questions_of_another() -> None:
    """Those who have no name are one."""
    executor, _ = wiping()
    middleware = [Middleware(AuthenticationMiddleware, backend=Backend())]
    params = {"name": "wipe", "arguments": {"text": "x" * (2**17 - 100)}}  # half of what a caller has room for
    params["_meta"] = {"io.modelcontextprotocol/clientCapabilities": {"elicitation": {}}}
    with serving(executor, middleware=middleware) as url:
        for user in ("alice", "", "bob"):
            sent = modern("tools/call", params, x_user=user or None)
            answers = [httpx.post(f"{url}/mcp", **sent).json() for _ in range(3)]
            assert [each.get("result", {}).get("resultType") for each in answers] == ["input_required"] * 2 + [None]
            assert "Too many calls" in answers[2]["error"]["message"]


def test_deny_beside_a_handler_of_the_executors_own_is_refused() -> None:
    """It would deny nothing."""
    executor, _ = wiping(approval_handler=AutoApproveHandler())
    with pytest.raises(ValueError, match="approval='deny' would deny nothing"):
        MCPServer(executor, approval="deny")


async def test_who_cannot_be_asked_is_told_so() -> None:
    """A client without elicitation, and one of the handshake versions, to which no answer could come back."""
    ran: list[dict[str, Any]] = []
    with replica(ran) as url:
        async with wire_of(url, None) as wire:
            assert await outcome_of(wire.client, "burn") == LACKS_ELICITATION
        async with wire_of(url, mode=HANDSHAKE) as wire:
            assert await outcome_of(wire.client, "burn") == UNASKED
    with replica(ran, approval="auto") as url:
        for user, mode in ((None, MODERN), (APPROVE, HANDSHAKE)):
            async with wire_of(url, user, mode) as wire:
                assert await outcome_of(wire.client, "burn") == '{"ran":true}'
    assert len(ran) == 2


async def test_a_retry_that_declares_less_is_not_let_through() -> None:
    """Under `auto`, too: the state says that the client could be asked, whatever it says of itself now."""
    ran: list[dict[str, Any]] = []
    with replica(ran, approval="auto") as url:
        async with wire_of(url) as wire, wire_of(url, None) as unable:
            for answers in ({}, {"input_responses": {"approval": DECLINE}}, {"input_responses": YES}):
                _, _, state = await wire.question("burn", {})
                with pytest.raises(MCPError, match="Client did not declare form elicitation"):
                    await unable.call("burn", {}, request_state=state, **answers)
    assert ran == []


async def test_arguments_and_acl_are_checked_before_each_round() -> None:
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
def test_a_state_key_is_long_and_for_stateless_servers(options: dict[str, Any], says: str) -> None:
    for door in (serve, MCPServer, async_serve):
        with pytest.raises(ValueError, match=says) as caught:
            door(registry_of(), transport="streamable-http", **options)
        assert "kkk" not in str(caught.value)


def test_the_state_key_is_in_no_text() -> None:
    server = MCPServer(registry_of(), transport="streamable-http", stateless=True, state_key=KEY)
    assert "stateless=True" in repr(vars(server))
    assert "secret" not in repr(vars(server))
