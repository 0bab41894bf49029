"""Calls that need approval: who is asked, what is shown, who decides (FR-ANNOT-006)."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import io
import json
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
from apcore import ACL, APCore, Config, ExecutionPolicy, Executor, FunctionModule, Middleware, ModuleAnnotations
from apcore.approval import ApprovalRequest, ApprovalResult, AutoApproveHandler
from apcore.builtin_steps import BuiltinApprovalGate, build_standard_strategy
from apcore.cancel import ExecutionCancelledError
from apcore.errors import ApprovalDeniedError
from conftest import HANDSHAKE, MODERN, FunctionalModule, client_of, connect, echo, registry_of, serving
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
    PlainValidator,
    RootModel,
    SecretStr,
    field_serializer,
    model_validator,
)
from pydantic.dataclasses import dataclass
from support import (
    DENIED,
    LOGIN,
    MARK,
    REDACTED,
    STRING,
    UNASKED,
    Caplog,
    Monkeypatch,
    Wire,
    accept,
    ask,
    asking,
    calls,
    guarded,
    hosted,
    messages_logged,
    modern,
    of,
    text_of,
)

from apcore_mcp import ElicitationApprovalHandler, MCPServer, async_serve, elicit, serve
from apcore_mcp.approval import _question
from apcore_mcp.arguments import Arguments

APPROVE, REFUSE, DECLINE = accept(approve=True), accept(approve=False), ElicitResult(action="decline")
EVERYONE = {"yes": APPROVE, "no": REFUSE, "decline": DECLINE, "cannot": None}
RAN = '{"ran":true}'
LACKS_ELICITATION = (-32021, {"requiredCapabilities": {"elicitation": {"form": {}}}})
CAN_BE_ASKED = {"io.modelcontextprotocol/clientCapabilities": {"elicitation": {}}}
DECISIONS = {
    "unasked": "wipe: wipe is refused, as its user cannot be asked for approval (see approval=, --approval)",
    "runs, warns": "wipe: wipe is let through without approval, as its user cannot be asked",
}


async def outcome_of(client: Client, name: str, arguments: dict[str, Any] | None = None) -> Any:
    """The text a call is answered with, or the code and the data of a JSON-RPC error."""
    try:
        return text_of(await client.call_tool(name, arguments))
    except MCPError as error:
        return error.error.code, error.error.data


Runs = list[dict[str, Any]]


@pytest.fixture
def ran() -> Runs:
    """The arguments of each run of the modules that are `guarded(ran)`."""
    return []


def wiping(ran: Runs, **options: Any) -> Executor:
    return Executor(registry_of({"wipe": guarded(ran)}), **options)


# ---- Who decides ----


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
async def test_mode_and_user_decide(mode: str, options: Any, expected: Any, caplog: Caplog, ran: Runs) -> None:
    executor = wiping(ran)
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
            assert outcome == (RAN if ran else refusal)
            decisions = [text for text in messages_logged(caplog) if text.startswith("wipe: ")]
            assert decisions == [text for about, text in DECISIONS.items() if about == happens]


TOGGLE = "system.control.toggle_feature"


def controlled(**options: Any) -> APCore:
    """An application whose own control modules are registered, and a module `echo`."""
    client = APCore(config=Config({"sys_modules": {"enabled": True, "events": {"enabled": True}}}), **options)
    client.registry.register("echo", FunctionalModule(echo))
    return client


@pytest.mark.parametrize(("user", "disabled"), [("yes", True), ("no", False), ("cannot", False)])
async def test_nobody_controls_the_application_unasked(user: str, disabled: bool, caplog: Caplog) -> None:
    """Neither by apcore's own control modules nor by a module that calls them."""
    application = controlled()
    toggle = {"module_id": "echo", "enabled": False, "reason": "a test"}

    async def turn_off(inputs: dict[str, Any], context: Any) -> Any:
        return await application.executor.call_async(TOGGLE, toggle)

    application.registry.register("turn_off", FunctionalModule(turn_off))
    async with connect(application.executor, client=asking(EVERYONE[user])[0], approval="auto") as client:
        for name, inputs in ((TOGGLE, toggle), ("turn_off", {})):
            application.toggle_state.enable("echo")
            outcome = await outcome_of(client, name, inputs)
            assert (outcome in (DENIED, LACKS_ELICITATION)) == (not disabled)
            assert application.toggle_state.is_disabled("echo") == disabled
    assert "let through" not in caplog.text


@pytest.mark.parametrize(
    ("options", "strict", "warns"),
    [({}, False, True), ({"approval": "deny"}, False, False), ({}, True, False)],
    ids=["asks", "denied", "strict"],
)
def test_a_start_warns_of_open_control_modules(options: Any, strict: bool, warns: bool, caplog: Caplog) -> None:
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
        own = {"message": "Really?", "requestedSchema": {"type": "object"}}  # which is no question of the server's
        return ApprovalResult(status=self.status, reason="secret reasons of /etc/judge", metadata=own)

    async def check_approval(self, approval_id: str) -> ApprovalResult:
        return ApprovalResult(status="approved")


async def test_a_handler_decides_and_its_reasons_stay_here(ran: Runs) -> None:
    executor, judge = wiping(ran), Judge("approved")
    arguments, asked = asking(REFUSE)
    async with connect(executor, client=arguments, approval=judge) as client:
        assert await outcome_of(client, "wipe", {"disk": "a"}) == RAN
        for judge.status in ("rejected", "timeout", "pending"):
            result = await client.call_tool("wipe", {"disk": "a"})
            assert result.is_error
            assert "secret" not in result.model_dump_json()
            assert judge.status != "rejected" or text_of(result) == DENIED
    assert [(request.module_id, request.arguments) for request in judge.asked] == [("wipe", {"disk": "a"})] * 4
    assert (len(ran), asked) == (1, [])


@pytest.mark.parametrize(
    ("approval", "handler", "user", "happens"),
    [
        ("require", AutoApproveHandler(), "no", "runs"),
        ("off", Judge("rejected"), "yes", ""),
        ("off", ElicitationApprovalHandler(), "yes", "asked, runs"),
        ("off", ElicitationApprovalHandler(), "cannot", ""),
    ],
)
async def test_an_executor_keeps_its_handler(approval: str, handler: Any, user: str, happens: str, ran: Runs) -> None:
    """Also where that is the one that asks the user, of a server or of nobody."""
    executor = wiping(ran, approval_handler=handler)
    arguments, asked = asking(EVERYONE[user])
    async with connect(executor, client=arguments, approval=approval) as client:
        await outcome_of(client, "wipe")
    assert (len(ran), len(asked)) == ("runs" in happens, "asked" in happens)
    if isinstance(handler, ElicitationApprovalHandler):
        with pytest.raises(ApprovalDeniedError):
            await executor.call_async("wipe", {})


def test_deny_beside_an_own_handler_is_refused() -> None:
    executor = wiping([], approval_handler=AutoApproveHandler())
    with pytest.raises(ValueError, match="approval='deny' would deny nothing"):
        MCPServer(executor, approval="deny")


async def test_a_clients_approval_token_is_no_answer(ran: Runs) -> None:
    executor = wiping(ran)
    async with connect(executor, client=asking(REFUSE)[0]) as client:
        for token in ("token", "", 7, None):
            assert await outcome_of(client, "wipe", {"_approval_token": token}) != RAN
    assert ran == []


def test_a_lacking_capability_is_a_bad_request() -> None:
    """MCP 2026-07-28: -32021 goes with HTTP 400; also of a module that another one calls."""
    with serving(registry_of({"wipe": guarded([]), "below": calls("wipe")})) as url:
        for name in ("wipe", "below"):
            response = httpx.post(f"{url}/mcp", **modern("tools/call", {"name": name, "arguments": {}}))
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["data"]) == (400, *LACKS_ELICITATION)


@pytest.mark.parametrize(("first", "runs"), [("deny", 0), ("auto", 1), (AutoApproveHandler(), 1)])
async def test_each_server_decides_about_its_own_calls(first: Any, runs: int, ran: Runs) -> None:
    executor = wiping(ran)
    async with connect(executor, approval="deny") as second:
        async with connect(executor, approval=first) as client:
            assert await outcome_of(second, "wipe") == DENIED
            assert await outcome_of(client, "wipe") == (RAN if runs else DENIED)
        assert await outcome_of(second, "wipe") == DENIED
        await executor.call_async("wipe", {})  # which is nobody's: apcore skips a gate without a handler
    assert len(ran) == runs + 1


class Wipe(BaseModel):
    disk: str
    passes: int = Field(1, ge=1)


WRONG = {"disk": ["sda"], "passes": 0}


def nested(ran: Runs) -> Executor:
    """An Executor of `wipe`, and of modules that pass it on: with their context, without, from a thread."""
    executor = Executor(registry_of({"wipe": guarded(ran, input_schema=Wipe), "below": calls("wipe")}))

    async def alone(inputs: dict[str, Any], context: Any) -> Any:
        return await executor.call_async("wipe", inputs)

    async def bare(inputs: dict[str, Any], context: Any) -> Any:
        return executor.call("wipe", inputs, context)  # in a thread of apcore's, which has no context variables

    def sync(inputs: dict[str, Any], context: Any) -> Any:
        return executor.call("wipe", inputs)

    for function in (alone, bare, sync):
        executor.registry.register(function.__name__, FunctionalModule(function))
    return executor


@pytest.mark.parametrize(("approval", "told"), [("deny", DENIED), ("auto", RAN)])
async def test_whatever_a_module_calls_needs_approval(approval: str, told: str, ran: Runs) -> None:
    """Once it is known that its arguments are valid."""
    arguments, asked = asking(APPROVE)
    async with hosted(nested(ran), user=arguments, approval=approval) as client:
        ways = ["below", "alone", "sync"] + (["bare"] if approval == "deny" else [])  # it blocks the loop
        for number, name in enumerate(ways, 1):
            if approval == "auto":
                assert await outcome_of(client, name, WRONG) == "Module error: SCHEMA_VALIDATION_ERROR"
            assert await outcome_of(client, name, {"disk": "a"}) == told
            assert len(ran) == len(asked) == (number if told == RAN else 0)


def refused() -> Any:
    return pytest.raises((ApprovalDeniedError, ExecutionCancelledError))


@pytest.mark.parametrize("user", ["yes", "cannot"])
async def test_what_outlives_its_call_is_refused(mode: str, user: str, ran: Runs) -> None:
    """A task that is left behind, a thread past its timeout: nobody can be asked, and that does not make it run."""
    executor = wiping(ran, config=Config(data={"executor": {"default_timeout": 400}}))
    answered, refusals = threading.Event(), threading.Semaphore(0)
    left: list[asyncio.Task[None]] = []

    async def later() -> None:
        await asyncio.to_thread(answered.wait, 10)
        gc.collect()
        with refused():
            await executor.call_async("wipe", {})
        refusals.release()

    async def leave(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        left.append(asyncio.create_task(later()))
        return {}

    def slow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        answered.wait(10)
        for further in ((context,), ()):  # with its context and without
            with refused():
                executor.call("wipe", {}, *further)
            refusals.release()
        return {}

    executor.registry.register("leave", FunctionalModule(leave))
    executor.registry.register("slow", FunctionalModule(slow))
    arguments, asked = asking(EVERYONE[user])
    async with connect(executor, mode=mode, client=arguments, approval="auto") as client:
        assert await outcome_of(client, "leave") == "{}"
        assert "timed out" in await outcome_of(client, "slow")
        answered.set()
        for _ in range(3):
            assert await asyncio.to_thread(refusals.acquire, timeout=10), "it has run"
    assert (ran, asked) == ([], [])


async def test_who_could_be_asked_is_not_let_through(ran: Runs) -> None:
    """The capabilities of the request count that a call answers: here the retry, which brings an answer."""
    executor = wiping(ran)

    async def twice(inputs: dict[str, Any], context: Any) -> Any:
        await elicit(context, "Which one?", key="which")
        return await executor.call_async("wipe", {}, context)

    executor.registry.register("twice", FunctionalModule(twice))
    with serving(executor, approval="auto") as url:
        async with wire_of(url) as wire, wire_of(url, None) as unable:
            _, _, state = await wire.question("twice")
            with pytest.raises(MCPError):
                await unable.call("twice", request_state=state, input_responses={"which": accept()})
    assert ran == []


@pytest.mark.parametrize(("user", "told"), [("yes", RAN), ("no", DENIED), ("cannot", LACKS_ELICITATION)])
async def test_auto_obeys_a_strict_policy_and_a_handler(user: str, told: Any, ran: Runs) -> None:
    """Both set while the server runs. It is the handler of the Executor meanwhile, and not after its end."""
    executor = wiping(ran)
    async with connect(executor, client=asking(EVERYONE[user])[0], approval="auto") as client:
        executor.set_policy(ExecutionPolicy(strict=True))
        assert await outcome_of(client, "wipe") == told
        with pytest.raises(ApprovalDeniedError):
            await executor.call_async("wipe", {})
        assert executor.governance_state().approval_handler_configured
    assert not executor.governance_state().approval_handler_configured
    async with connect(executor, approval="deny") as client:
        executor.set_approval_handler(Judge("approved"))
        assert await outcome_of(client, "wipe") == RAN
    assert executor.governance_state().approval_handler_configured
    assert len(ran) == (told == RAN) + 1


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
        assert (await outcome_of(client, "wipe"), await outcome_of(client, "purge")) == (DENIED, RAN)
        gate.set_handler(Judge("approved"))
        assert await outcome_of(client, "wipe") == RAN
    assert passed == ["wipe", "purge", "wipe"]


@pytest.mark.parametrize(("schema", "validate_inputs"), [(Wipe, False), (Wipe.model_json_schema(), True)])
async def test_nobody_is_asked_about_invalid_arguments(schema: Any, validate_inputs: bool, ran: Runs) -> None:
    """Neither the user nor a handler of the server's; and the caller is told what is wrong as ever."""
    plain, gated = guarded(ran, input_schema=schema, annotations=None), guarded(ran, input_schema=schema)
    judge = Judge("approved")
    arguments, asked = asking(APPROVE)
    for approval in ("require", judge):
        served = {"approval": approval, "validate_inputs": validate_inputs}
        async with connect({"plain": plain, "gated": gated}, client=arguments, **served) as client:
            refusal = await outcome_of(client, "gated", WRONG)
            assert refusal == await outcome_of(client, "plain", WRONG)
            assert re.findall(r"\n- (\w+):", refusal) == ["disk", "passes"]
            assert (ran, asked, judge.asked) == ([], [], [])
            assert await outcome_of(client, "gated", {"disk": "sda"}) == RAN
        ran.clear(), asked.clear(), judge.asked.clear()


async def test_the_time_to_approve_does_not_count(monkeypatch: Monkeypatch) -> None:
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
        assert await outcome_of(client, "wipe") == RAN
    assert waited


# ---- The question ----


def taken_by(schema: Any, arguments: dict[str, Any]) -> Arguments:
    """What a module of this schema, or a function, takes; these arguments are valid."""
    module = FunctionModule(schema, "files.write") if inspect.isfunction(schema) else guarded([], input_schema=schema)
    descriptor = registry_of({"files.write": module}).get_definition("files.write")
    taken = Arguments(module, descriptor)
    taken.check(arguments)
    return taken


def question(schema: Any, arguments: dict[str, Any]) -> list[str]:
    """The lines of what a user is asked about a call."""
    context: Any = None
    request = ApprovalRequest("files.write", arguments, context, ModuleAnnotations())
    return _question(request, "", taken_by(schema, arguments)).splitlines()


def shown(schema: Any, arguments: dict[str, Any]) -> list[str]:
    """Those of them that show arguments."""
    return question(schema, arguments)[2:]


SECRET = {**STRING, **MARK}
UNNAMED = "(the module's schema does not name these:)"


async def test_the_question_is_for_people() -> None:
    """It says what the tool does, what is dangerous, and each argument by its value, as one JSON text."""
    about = "Write a text, e.g. a note,\nto a file. Nothing is kept of what was there.\n\nMore for agents."
    sent: dict[str, Any] = {"path": "/etc/passwd", "mode": 0o644, "größe": 1.5, "to whom": ["Zoë", None, True]}
    sent["request"] = {"body": {"of": {"a": {"b": {"c": {"d": [{"path": 'settings "1".ini'}]}}}}}, "no": [{}, []]}
    module = guarded([], description=about, input_schema=of(*sent))
    arguments, asked = asking(REFUSE)
    async with connect({"files.write": module}, client=arguments) as client:
        await client.call_tool("files.write", sent)
    assert asked[0].message.splitlines() == [
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
    assert question(of("n"), {"n": 1}) == ["Let files.write run?", "Arguments:", "- n: 1"]
    assert question(of("n"), {})[1:] == ["Arguments: none"]


def test_a_long_value_loses_its_middle() -> None:
    """Its ends stand in brackets, outside of which no caller can write."""
    said = '"> (characters left out: 99,500) <"'
    arguments: dict[str, Any] = {"exact": "e" * 998, "text": "a" * 999, "cents": 10**3000 + 7, "list": ["y"] * 1000}
    arguments["forged"] = said
    cents, written = str(arguments["cents"]), json.dumps(arguments["list"])
    assert shown(of(*arguments), arguments) == [
        f'- exact: "{"e" * 998}"',
        f'- text: <"{"a" * 499}> (characters left out: 1) <{"a" * 499}">',
        f"- cents: <{cents[:500]}> (characters left out: 2,001) <{cents[-500:]}>",
        f"- list: <{written[:500]}> (characters left out: 4,000) <{written[-500:]}>",
        f"- forged: {json.dumps(said)}",
    ]


FORGERIES = ['/tmp/notes"\n- path: "/tmp/notes', "a\r\nb\x1b[2K\x00\x7f", "a\u202eb\u2066c\u200d\ufeff"]
FORGERIES += ["a\u2028- path: 1\u2029\x85\x0b\x0c", "\ud800 \U000e0041 \uffff", "\\n \\u202e"]


@pytest.mark.parametrize("text", FORGERIES, ids=ascii)
def test_no_argument_forges_a_line(text: str) -> None:
    """Neither by a value nor by a name: each stays in a line of its own, as JSON that says what is there."""
    path, deep, _, name = shown(of("path", "deep"), {"path": text, text: 1, "deep": [{text: text}]})
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


def test_only_what_can_be_read_is_shown() -> None:
    hidden = [f"a{char}b" for char in UNSEEN]
    written = shown(of("t"), {"t": hidden})[0].removeprefix("- t: ")
    assert (written.isascii(), json.loads(written)) == (True, hidden)
    assert shown(of("t"), {"t": SEEN}) == [f"- t: {json.dumps(SEEN, ensure_ascii=False)}"]


def test_of_many_arguments_the_known_are_shown() -> None:
    """However many a caller sends: they take no place of one that counts."""
    referring = {"$ref": "#/$defs/disk", "$defs": {"disk": of("disk")}}
    lines = shown(referring, {**{f"a{n}": n for n in range(5_000)}, "disk": "sda"})
    assert (lines[:3], lines[-1]) == (['- disk: "sda"', UNNAMED, "- a0: 0"], "(arguments left out: 4,901)")
    assert len(lines) == 102


class Price(BaseModel):
    """Whose question shows no reading of it: 1,499 cents would be one euro, and the path would be missing."""

    amount: int = Field(alias="amountCents")
    path: str = Field("", exclude=True)

    @field_serializer("amount")
    def _rounded(self, amount: int) -> int:
        return amount // 1000


class Open(BaseModel):
    to: str = ""
    pin: str = Field("", json_schema_extra=MARK)
    model_config = ConfigDict(extra="allow")


def pay(to: Any, pin: Annotated[str, Field(json_schema_extra=MARK)] = "", **more: Any) -> dict[str, Any]:
    return {}


@dataclass
class Login:
    """A dataclass of pydantic's has aliases, too."""

    user: str
    password: Annotated[str, Field(validation_alias=AliasChoices("password", "pass"), json_schema_extra=MARK)] = ""


class Card(BaseModel):
    number: SecretStr
    holder: str = ""

    @model_validator(mode="before")
    @classmethod
    def _of_one_text(cls, value: Any) -> Any:
        return dict(zip(("holder", "number"), value.split(":"), strict=True)) if isinstance(value, str) else value


class Payment(BaseModel):
    """What a client may write by alias or by field name, and for some fields in yet another way."""

    to: str = Field(alias="recipient")
    pin: str = Field("", alias="PIN", json_schema_extra=MARK)
    code: str = Field("", validation_alias=AliasChoices("code", "otp", AliasPath("codes", 0)), json_schema_extra=MARK)
    purpose: str = Field("", validation_alias=AliasChoices("purpose", "for"))
    login: Login | str = ""
    card: int | Card = 0
    model_config = ConfigDict(populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _read_in_a_way_of_its_own(cls, value: Any) -> Any:
        return value


class Size(Enum):
    LARGE = "large"


class Address(BaseModel):
    street: str
    code: str = Field("", json_schema_extra=MARK)


def visit(at: Annotated[Address, PlainValidator(lambda value: value)]) -> str:
    return ""


class Shelf:
    """What holds others, and quotes them in its text."""

    def __init__(self, held: list[Any]) -> None:
        self.held = held

    def __iter__(self) -> Iterator[Any]:
        return iter(self.held)

    def __str__(self) -> str:
        return str(self.held)


ADDRESS = Address(street="x", code="s3cret")
HELD = {"itself": ADDRESS, "list": [ADDRESS], "deque": deque([ADDRESS]), "shelf": Shelf([ADDRESS])}
FORCED = {"force": {"all": True}, "pin": "s3cret", "to": "Eve"}
# By a schema or a function: the arguments as sent, and the names of those that come first.
ARGUMENTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    # What no schema names comes last.
    "unnamed": (Open, {"dry_run": True, "to": "sda"}, "to"),
    "unnamed-by-a-dict": ({"type": "object"}, {"dry_run": True}, ""),
    "of-a-union": (RootModel[Address | Wipe], {"a": 1, "disk": "sda"}, "disk"),
    # No serializer, and nothing is left out: what was sent is shown.
    "as-sent": (Price, {"x": 1, "amountCents": 1499, "amount": 10**6, "path": "/etc"}, "amount path amountCents"),
    # Marked values are hidden, and no others: who writes the arguments cannot hide one that counts.
    "beside": (of("to", "n", pin=SECRET), {"pin": "s3cret", "n": 7, "to": "Ada", "x": 1}, "to n pin"),
    "inside": (of(login=of("a", pin=SECRET)), {"login": {"a": "ada", "pin": "s3cret", "x": "r"}}, "login"),
    "in-a-list": (of(keys={"type": "array", "items": SECRET}), {"keys": ["s3cret", "s3cret"]}, "keys"),
    "in-a-map": (of(a={"additionalProperties": of("n", pin=SECRET)}), {"a": {"x": {"pin": "s3cret"}}}, "a"),
    "of-every-name": ({"type": "object", "additionalProperties": SECRET}, {"a": "s3cret"}, ""),
    "by-pattern": ({"type": "object", "patternProperties": {"^p": SECRET}}, {"pin": "s3cret"}, ""),
    "in-a-branch": ({**of("key", "n"), "allOf": [of(key=SECRET)]}, {"n": 1, "key": "s3cret"}, "key n"),
    "whole": ({"type": "object", **MARK}, {"a": "s3cret"}, ""),
    "read-by-its-author": (visit, {"at": {"street": "x", "code": "s3cret"}}, "at"),
    "nothing": (of(pin=MARK), {"pin": None}, "pin"),
    "open-model": (Open, FORCED, "to pin"),
    "open-function": (pay, FORCED, "to pin"),
    # By whatever name, with what any spelling of a marked one holds hidden: it is what a class is given.
    "by-alias": (Payment, {"recipient": "A", "PIN": "s3cret"}, "recipient PIN"),
    "by-name": (Payment, {"to": "A", "pin": "s3cret"}, "to pin"),
    "by-both-names": (Payment, {"recipient": "A", "to": "E", "PIN": "s3cret", "pin": "s3cret"}, "to pin recipient PIN"),
    "by-a-second-name": (Payment, {"to": "Ada", "otp": "s3cret", "for": "rent"}, "to otp for"),
    "by-a-path": (Payment, {"to": "Ada", "codes": ("s3cret",)}, "to codes"),
    "by-no-name": (Payment, {"to": "Ada", "account": "a:s3cret"}, "to"),  # an author's validator may read it
    "inside-by-name": (Payment, {"to": "A", "login": {"user": "a", "password": "s3cret", "x": 1}}, "to login"),
    "inside-by-alias": (Payment, {"to": "A", "login": {"user": "a", "pass": "s3cret"}}, "to login"),
    "of-another-type": (Payment, {"to": "A", "card": "A:s3cret"}, "to card"),
    "without-a-secret": (Payment, {"to": "Ada", "login": "x", "card": 7}, "to login card"),
    # What another module passes, also under a hint that says nothing.
    "models": (pay, {"to": HELD, "pin": "s3cret"}, "to pin"),
}


def hidden(sent: Any) -> Any:
    """The same, where each text, tuple or shelf with "s3cret" is marked as a whole."""
    if isinstance(sent, dict):
        return {name: hidden(value) for name, value in sent.items()}
    if isinstance(sent, list | deque):
        return [hidden(value) for value in sent]
    if isinstance(sent, BaseModel):
        return hidden(sent.model_dump())
    return REDACTED if isinstance(sent, Shelf) or "s3cret" in str(sent) else sent


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_are_shown_as_they_were_sent(case: str) -> None:
    schema, sent, names = ARGUMENTS[case]
    known, others = taken_by(schema, sent).shown(sent)
    assert known | others == hidden(sent)
    assert " ".join(known) == names


def test_python_values_are_valid_arguments() -> None:
    """As without approval: what is no JSON is held against the hints as it is."""

    def send(size: Size, tags: set[str], address: Address, at: list[date]) -> str:
        return ""

    given = {"size": Size.LARGE, "tags": {"a"}, "address": ADDRESS, "at": [date(2026, 1, 2)]}
    taken = taken_by(send, given)
    assert taken.shown(given)[0]["address"] == hidden(ADDRESS)
    assert [fault["field"] for fault in taken.faults({**given, "tags": ["a"]})] == ["tags"]


PYTHON = {  # what another module passes, and what is shown of it
    "numbers": (iter([1]), "<list_iterator>"),
    "file": (io.StringIO("text"), "<StringIO>"),
    "at": (date(2026, 1, 2), "2026-01-02"),
    "path": (PurePosixPath("/mnt"), "/mnt"),
    "price": (Decimal("1.50"), "1.50"),
    "raw": (b"\xff", "_w=="),
    "some": ({"a"}, ["a"]),
    "by": ({"1": ()}, {"1": []}),
    "size": (Size.LARGE, "large"),
    "address": (ADDRESS, hidden(ADDRESS)),
}


async def test_a_question_uses_up_no_value(ran: Runs) -> None:
    given = {name: value for name, (value, _) in PYTHON.items()}

    arguments, asked = asking(APPROVE)
    modules = {"files.write": guarded(ran), "call": calls("files.write", **given)}
    async with hosted(modules, user=arguments) as client:
        assert await outcome_of(client, "call") == RAN
    lines = asked[0].message.partition(f"{UNNAMED}\n- ")[2].split("\n- ")
    told = dict(line.split(": ", 1) for line in lines)
    assert {name: json.loads(text) for name, text in told.items()} == {name: text for name, (_, text) in PYTHON.items()}
    assert (list(ran[0]["numbers"]), ran[0]["file"].read(), ran[0]["size"]) == ([1], "text", Size.LARGE)


class Box(BaseModel):
    name: str
    pin: str = Field("", json_schema_extra=MARK)
    boxes: list[Box] = []


@pytest.mark.parametrize("handler", [ElicitationApprovalHandler(), AutoApproveHandler()])
async def test_a_module_that_is_no_tool_is_asked_about(handler: Any, ran: Runs) -> None:
    """Its schema refers to itself, and what it marks could stand anywhere."""
    box = {"name": "red", "pin": "s3cret", "boxes": [{"name": "small", "pin": "s3cret"}]}
    modules = {"empty": guarded(ran, input_schema=Box), "tidy": calls("empty", **box)}
    arguments, asked = asking(APPROVE)
    async with connect(modules, client=arguments, approval=handler) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["tidy"]
        assert await outcome_of(client, "tidy") == RAN
    assert len(ran) == 1
    assert len(asked) == isinstance(handler, ElicitationApprovalHandler)
    assert "s3cret" not in str(asked)


async def test_a_question_hides_what_the_module_marks_that_runs() -> None:
    """That of a second Executor, whatever the server's module of the same id says."""
    payments = registry_of({"pay": guarded([], input_schema=Open)})
    other = Executor(payments, approval_handler=ElicitationApprovalHandler())

    async def shop(inputs: dict[str, Any], context: Any) -> Any:
        return await other.call_async("pay", {"pin": "s3cret"})

    arguments, asked = asking(APPROVE)
    async with connect({"pay": echo, "shop": shop}, client=arguments) as client:
        assert await outcome_of(client, "shop") == RAN
    assert len(asked) == 1
    assert "s3cret" not in str(asked)


def test_no_caller_takes_the_questions_of_another() -> None:
    """Those who have no name are one."""
    params = {"name": "wipe", "arguments": {"text": "x" * (2**17 - 100)}}  # half of what a caller has room for
    params["_meta"] = CAN_BE_ASKED
    with serving(wiping([]), middleware=LOGIN) as url:
        for user in ("alice", "", "bob"):
            sent = modern("tools/call", params, x_user=user or None)
            answers = [httpx.post(f"{url}/mcp", **sent).json() for _ in range(3)]
            assert [each.get("result", {}).get("resultType") for each in answers] == ["input_required"] * 2 + [None]
            assert "Too many calls" in answers[2]["error"]["message"]


# ---- Without state: one server asks, any other begins the call ----

KEY = "a secret that all servers know, " * 2
YES: dict[str, Any] = {"approval": APPROVE}


def replica(ran: Runs, **options: Any) -> contextlib.AbstractContextManager[str]:
    """One of several servers that share nothing but a key."""
    executor = nested(ran)
    executor.registry.register("burn", guarded(ran))
    executor.registry.register("ask", FunctionalModule(ask))
    return serving(executor, **{"stateless": True, "state_key": KEY, **options})


@contextlib.asynccontextmanager
async def wire_of(url: str, user: Any = APPROVE, mode: str = MODERN) -> AsyncIterator[Wire]:
    async with client_of(url, mode, **asking(user)[0]) as client, asyncio.timeout(30):
        yield Wire(client)


async def test_any_server_with_the_key_begins_the_call(ran: Runs) -> None:
    """Also one that is started after the question, as in a rolling restart; and each question is for one call."""
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
                assert (text_of(result), ran, there) == (RAN, [], [{"disk": "a"}])
                _, _, another = await wire.question(*call)
                assert another != state
                _, question_again, _ = await wire.question(*call, request_state=state)
                assert question_again == question, "a retry without an answer is asked again"


async def test_whatever_is_no_yes_is_a_no(ran: Runs) -> None:
    refusals = [REFUSE, DECLINE, ElicitResult(action="cancel", content={"approve": True}), accept(approve="yes")]
    odd = [accept(), accept(approve=1), accept(approve=["true"]), ListRootsResult(roots=[])]
    with replica(ran) as url:
        async with wire_of(url) as wire:
            _, _, state = await wire.question("burn", {})
            for answer in refusals + odd:
                result = await wire.call("burn", {}, request_state=state, input_responses={"approval": answer})
                assert text_of(result) == DENIED, answer
    assert ran == []


def aged(state: str, **claims: Any) -> str:
    """A state as the same server would have sealed it with other claims."""
    codec = AESGCMRequestStateCodec([KEY])
    return codec.seal(json.dumps({**json.loads(codec.unseal(state)), **claims}).encode())


async def test_only_its_own_state_begins_a_call(ran: Runs) -> None:
    kept = serving(registry_of({"burn": ask}))
    with replica(ran) as url, replica(ran, state_key="x" * 32) as of_others, kept as with_sessions:
        async with wire_of(url) as wire, wire_of(of_others) as foreign, wire_of(with_sessions) as keeping:
            _, _, state = await wire.question("burn", {"n": 1})
            _, _, parked = await keeping.question("burn", {"n": 1})
            made_up = AESGCMRequestStateCodec(["y" * 32]).seal(AESGCMRequestStateCodec([KEY]).unseal(state))
            forged = [aged(state, exp=time.time() - 1), aged(state, s="something else"), parked, made_up]
            attempts: list[tuple[Wire, str, str, Any]] = [
                (wire, state, "burn", {"n": 2}),
                (wire, state, "wipe", {"n": 1}),
                (foreign, state, "burn", {"n": 1}),
                (keeping, state, "burn", {"n": 1}),
                *((wire, text, "burn", {"n": 1}) for text in (*forged, "approval", "", state[:-4], f"{state}x")),
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


def test_only_who_was_asked_brings_the_answer(ran: Runs) -> None:
    """Callers as any middleware finds them out, not only the SDK's for tokens."""
    params: dict[str, Any] = {"name": "burn", "arguments": {}, "_meta": CAN_BE_ASKED}

    def post(url: str, user: str, **retry: Any) -> Any:
        return httpx.post(f"{url}/mcp", **modern("tools/call", {**params, **retry}, x_user=user or None)).json()

    with replica(ran, middleware=LOGIN) as asks, replica(ran, middleware=LOGIN) as runs:
        states = {user: post(asks, user)["result"]["requestState"] for user in ("alice", "")}
        yes = {"approval": {"action": "accept", "content": {"approve": True}}}
        for asked, user in (("alice", "bob"), ("alice", ""), ("", "alice"), ("alice", "alice"), ("", "")):
            response = post(runs, user, inputResponses=yes, requestState=states[asked])
            assert ("result" in response) == (asked == user)
    assert len(ran) == 2


@pytest.mark.parametrize("approval", ["require", "auto"])
async def test_without_state_nested_calls_are_refused(approval: str, ran: Runs) -> None:
    """And none is let through: who made the call could be asked."""
    with replica(ran, approval=approval) as url:
        arguments, asked = asking(APPROVE)
        async with client_of(url, **arguments) as client:
            for name in ("below", "alone"):
                assert await outcome_of(client, name, {"disk": "a"}) == UNASKED
            assert (await client.call_tool("ask")).structured_content == {"answer": None}
    assert (ran, asked) == ([], [])


async def test_who_cannot_be_asked_is_told_so(ran: Runs) -> None:
    """A client without elicitation, and one of the handshake versions, to which no answer could come back."""
    with replica(ran) as url, replica(ran, approval="auto") as lenient:
        for user, mode, told in ((None, MODERN, LACKS_ELICITATION), (APPROVE, HANDSHAKE, UNASKED)):
            async with wire_of(url, user, mode) as wire, wire_of(lenient, user, mode) as let_through:
                assert await outcome_of(wire.client, "burn") == told
                assert ran == []
                assert await outcome_of(let_through.client, "burn") == RAN
                ran.clear()


async def test_a_retry_that_declares_less_is_not_let_through(ran: Runs) -> None:
    """Under `auto`, too: the state says that the client could be asked, whatever it says of itself now."""
    with replica(ran, approval="auto") as url:
        async with wire_of(url) as wire, wire_of(url, None) as unable:
            for answers in ({}, {"input_responses": {"approval": DECLINE}}, {"input_responses": YES}):
                _, _, state = await wire.question("burn", {})
                with pytest.raises(MCPError, match="Client did not declare form elicitation"):
                    await unable.call("burn", {}, request_state=state, **answers)
    assert ran == []


async def test_arguments_and_acl_are_checked_before_each_round(ran: Runs) -> None:
    """And no middleware takes the question for a failure that it might recover from."""
    seen: list[str] = []

    class Recover(Middleware):
        def on_error(self, module_id: str, inputs: dict[str, Any], error: Exception, context: Any) -> dict[str, Any]:
            seen.append(type(error).__name__)
            return {"recovered": True}

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


@pytest.mark.parametrize("door", [serve, MCPServer, async_serve])
def test_a_state_key_is_long_and_for_stateless_use(door: Any) -> None:
    for stateless, key, says in ((True, "k" * 31, "32 bytes"), (True, "", "32 bytes"), (False, "k" * 32, "stateless")):
        with pytest.raises(ValueError, match=says) as caught:
            door(registry_of(), transport="streamable-http", stateless=stateless, state_key=key)
        assert "kkk" not in str(caught.value)
    shown = repr(vars(MCPServer(registry_of(), transport="streamable-http", stateless=True, state_key=KEY)))
    assert ("stateless=True" in shown, "secret" in shown) == (True, False)
