"""What a client is told when a module fails: FR-ERROR-001 to -011, FR-EXEC-007, FR-LOG-002, -003, NFR-SEC-002.

Also the report in `_meta`, the advice of a module's author, and what is wrong with each argument.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NoReturn, cast

import httpx
import pytest
from apcore import ACL, ACLRule, Executor, Middleware, ModuleError, Registry
from apcore.approval import ApprovalResult
from apcore.cancel import ExecutionCancelledError
from apcore.decorator import module
from apcore.errors import (
    ACLDeniedError,
    ApprovalDeniedError,
    ConfigError,
    InvalidInputError,
    ModuleNotFoundError,
    ModuleTimeoutError,
    SchemaValidationError,
)
from conftest import FunctionalModule, client_of, connect, echo, registry_of, serving
from pydantic import BaseModel, ConfigDict, Field
from support import (
    SECRETIVE,
    calls,
    errors_logged,
    everything_logged,
    failure,
    gives,
    lines_of,
    modern,
    noting,
    returning,
    tool_of,
)

from apcore_mcp import report_progress
from apcore_mcp.faults import schema_faults


def raising(make: Callable[[], BaseException], *, awaits: bool = False, **attributes: Any) -> FunctionalModule:
    def fail(inputs: dict[str, Any], context: Any) -> NoReturn:
        raise make()

    async def fail_later(inputs: dict[str, Any], context: Any) -> NoReturn:
        await asyncio.sleep(0)
        raise make()

    return FunctionalModule(fail_later if awaits else fail, **attributes)


# ---- The table of sentences: errors of apcore that a module raises ----

WIDTH = {"field": "width", "code": "int_type", "message": "Input should be a valid integer"}
NESTED = {"field": "parameters.width", "code": "missing", "message": "Field required"}
BY_PATH = {"path": "/size/0/width", "keyword": "required", "message": "Field required"}
TOO_WIDE = {"field": "", "code": "invalid", "message": "too wide"}

# The error, what the client is told, and the rest of the report.
TABLE: dict[str, tuple[Callable[[], BaseException], str, dict[str, Any]]] = {
    "not_found": (lambda: ModuleNotFoundError(module_id="comfy.flow.execute"), "Module not found: comfy.flow.execute",
                  {"error_type": "MODULE_NOT_FOUND", "retryable": False, "user_fixable": True}),
    "not_found_empty": (lambda: ModuleNotFoundError(module_id=""), "Module not found: ", {}),
    "validation": (
        lambda: SchemaValidationError("Input validation failed", errors=[dict(WIDTH), dict(NESTED)]),
        "Input validation failed:\n- width: Input should be a valid integer (int_type)\n"
        "- parameters.width: Field required (missing)",
        {"error_type": "SCHEMA_VALIDATION_ERROR", "user_fixable": True, "error_details": {"errors": [WIDTH, NESTED]}},
    ),
    "validation_empty": (lambda: SchemaValidationError("Input validation failed", errors=[]),
                         "Input validation failed", {"error_type": "SCHEMA_VALIDATION_ERROR"}),
    "validation_by_path": (
        lambda: SchemaValidationError("bad", errors=[BY_PATH]),
        "Input validation failed:\n- size.0.width: Field required (required)",
        {"error_details": {"errors": [{"field": "size.0.width", "code": "required", "message": "Field required"}]}},
    ),
    "validation_by_anything": (
        lambda: SchemaValidationError("bad", cast(Any, [TOO_WIDE | {"field": 7}, ValueError("too wide")])),
        "Input validation failed:\n- 7: too wide (invalid)\n- (root): too wide (invalid)",
        {"error_details": {"errors": [TOO_WIDE | {"field": "7"}, TOO_WIDE]}},
    ),
    "validation_by_texts": (lambda: SchemaValidationError("bad", cast(Any, ["too wide"] * 30)),
                            "Input validation failed:" + "\n- (root): too wide (invalid)" * 20,
                            {"error_details": {"errors": [TOO_WIDE] * 20}}),
    "acl": (lambda: ACLDeniedError(caller_id="mcp_client_123", target_id="admin.delete_all"), "Access denied",
            {"error_type": "ACL_DENIED", "retryable": False, "user_fixable": False}),
    "timeout": (lambda: ModuleTimeoutError(module_id="slow.module", timeout_ms=30000), "Module timed out after 30000ms",
                {"error_type": "MODULE_TIMEOUT", "retryable": True, "error_details": {"timeout_ms": 30000}}),
    "timeout_of_its_own": (lambda: ModuleError("MODULE_TIMEOUT", "too slow", {"timeout_ms": None}), "Module timed out",
                           {"error_type": "MODULE_TIMEOUT"}),
    "too_large_of_its_own": (lambda: ModuleError("RESULT_TOO_LARGE", "40 boxes"),
                             "Result is too large (the tool has run)", {"error_type": "RESULT_TOO_LARGE"}),
    "invalid_input": (lambda: InvalidInputError(message="a {non-empty} string"), "Invalid input: a {non-empty} string",
                      {"error_type": "GENERAL_INVALID_INPUT", "user_fixable": True}),
    "config": (lambda: ConfigError("/etc/passwd is bad"), "Module error: CONFIG_INVALID", {}),
    "custom": (lambda: ModuleError("VENDOR_{CODE}", "mcp_client_123 did it", {"at": "/etc/passwd"}),
               "Module error: VENDOR_{CODE}", {"error_type": "VENDOR_{CODE}", "retryable": None, "user_fixable": None}),
    "cancelled": (ExecutionCancelledError, "Execution was cancelled", {"error_type": "EXECUTION_CANCELLED"}),
    "approval": (lambda: ApprovalDeniedError(ApprovalResult("rejected", reason="mcp_client_123"), "admin.delete_all"),
                 "Approval was denied", {"error_type": "APPROVAL_DENIED"}),
    # Half of a surrogate pair is nothing that JSON can say.
    "surrogate": (lambda: InvalidInputError("a\ud800b"), "Invalid input: a?b", {}),
    "surrogate_code": (lambda: ModuleError("A\ud800", "m"), "Module error: A?", {"error_type": "A?"}),
    "surrogate_field": (lambda: SchemaValidationError("bad", [{"field": "a\ud800", "code": "\udfff", "message": "m"}]),
                        "Input validation failed:\n- a?: m (?)",
                        {"error_details": {"errors": [{"field": "a?", "code": "?", "message": "m"}]}}),
}  # fmt: skip
TOKEN = "S3CR3T-token"
UNSAID = ("mcp_client_123", "admin.delete_all", "slow.module", "/etc/passwd", "Traceback")

# What is not apcore's, and how the log names it (None where Python or apcore raises another in its place).
UNEXPECTED: dict[str, tuple[Callable[[], BaseException], str | None]] = {
    "runtime_error": (lambda: RuntimeError("disk /etc/passwd full"), "RuntimeError"),
    "os_error": (lambda: OSError(2, "No such file", "/etc/passwd"), "FileNotFoundError"),
    "system_exit": (lambda: SystemExit("/etc/passwd"), "RuntimeError: the module raised SystemExit"),
    "keyboard_interrupt": (lambda: KeyboardInterrupt("/etc/passwd"), "RuntimeError: the module raised Keyboard"),
    "cancelled_error": (lambda: asyncio.CancelledError("/etc/passwd"), "CancelledError"),
    "stop_iteration": (lambda: StopIteration("/etc/passwd"), None),
}


def spelled(name: str, awaits: bool) -> str:
    return f"{name}.{'later' if awaits else 'now'}"


@pytest.fixture(scope="module")
def failing() -> Iterator[str]:
    """A server of one sync and one async module for each row of both tables, and of one that works."""
    modules: dict[str, Any] = {"works.fine": echo}
    rows: dict[str, Any] = {**TABLE, **UNEXPECTED}
    for awaits in (False, True):
        for name, (make, *_) in rows.items():
            modules[spelled(f"fails.{name}", awaits)] = raising(make, awaits=awaits)
    with serving(registry_of(modules)) as url:
        yield url


@pytest.mark.requirement("FR-ERROR-003", "FR-ERROR-004", "FR-ERROR-005", "FR-ERROR-010", "FR-ERROR-011")
@pytest.mark.requirement("FR-LOG-002", "FR-LOG-003")
@pytest.mark.parametrize("name", TABLE)
async def test_an_error_of_apcore_is_one_plain_sentence(
    failing: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    make, text, expected = TABLE[name]
    tool = spelled(f"fails.{name}", awaits=len(name) % 2 == 0)
    async with client_of(failing) as client:
        result = await client.call_tool(tool, {"caller": 1})
    report = failure(result, text)
    assert {key: report.get(key) for key in expected} == expected
    assert ("error_details" in report) == ("error_details" in expected)
    assert None not in report.values()
    assert [unsaid for unsaid in UNSAID if unsaid in result.model_dump_json(by_alias=True)] == []
    error = make()
    (record,) = errors_logged(caplog)
    logged = getattr(error, "message", str(error)).replace("\ud800", "\\ud800")
    if name.startswith("timeout"):
        logged += " (--timeout and the module's own resources say how long it may take)"
    line = re.escape(f"Tool call error: {tool} - {type(error).__name__}: {logged}")
    assert re.fullmatch(rf"{line} \(trace [0-9a-f]{{32}}\)", record.getMessage())
    began = [(r.levelno, r.getMessage()) for r in caplog.records if r.getMessage().startswith("Tool call: ")]
    assert began == [(logging.DEBUG, f"Tool call: {tool}")]


@pytest.mark.requirement("FR-ERROR-009", "NFR-SEC-002")
@pytest.mark.parametrize("awaits", [False, True], ids=["sync", "async"])
async def test_an_unexpected_exception_is_told_to_the_log_alone(
    failing: str, awaits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(failing) as client, asyncio.timeout(20):
        for name, (_, logged_as) in UNEXPECTED.items():
            caplog.clear()
            tool = spelled(f"fails.{name}", awaits)
            result = await client.call_tool(tool, {})
            report = failure(result, "Internal error occurred")
            assert report["error_type"] in ("MODULE_EXECUTE_ERROR", "GENERAL_INTERNAL_ERROR")
            said = result.model_dump_json(by_alias=True)
            assert not re.search(rf"/etc|{logged_as or 'Stop'}|Exit|Traceback|\.py|raising", said)
            (record,) = errors_logged(caplog)
            assert record.getMessage().startswith(f"Tool call error: {tool} - {logged_as or ''}")
            written = logging.Formatter("%(message)s").format(record)
            assert "Traceback (most recent call last)" in written
            if name != "stop_iteration":  # the interpreter itself drops that one's frames
                assert re.search(r'File ".*test_errors\.py", line \d+, in fail', written)
        assert (await client.call_tool("works.fine", {"still": "alive"})).structured_content == {"still": "alive"}


def priced(**attributes: Any) -> FunctionalModule:
    return raising(lambda: KeyError("price"), **attributes)


UNMASKED: dict[str, tuple[Any, str]] = {
    "fails.plain": (priced(), "Internal error occurred: KeyError: 'price'"),
    "calls.plain": (calls("fails.plain"), "Internal error occurred: KeyError: 'price'"),
    "fails.apcore": (raising(lambda: ModuleError("SHOP_CLOSED", TOKEN)), "Module error: SHOP_CLOSED"),
    "marked.input": (priced(input_schema=SECRETIVE), "Internal error occurred"),
    "marked.output": (priced(output_schema=SECRETIVE), "Internal error occurred"),
    "calls.input": (calls("marked.input"), "Internal error occurred"),
    "calls.output": (calls("marked.output"), "Internal error occurred"),
}


async def test_an_unmasked_error_tells_type_and_text() -> None:
    """Unless a module that takes part in the call marks something."""
    modules = {name: module for name, (module, _) in UNMASKED.items()}
    async with connect(modules, mask_errors=False) as client:
        for name, (_, told) in UNMASKED.items():
            failure(await client.call_tool(name, {}), told)


async def test_an_unknown_tool_is_logged_like_a_failure(caplog: pytest.LogCaptureFixture, mode: str) -> None:
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    async with connect({}, mode=mode) as client:
        report = failure(await client.call_tool("nope.x", {}), "Module not found: nope.x")
    assert report["error_type"] == "MODULE_NOT_FOUND"
    said = [f"{r.levelname} {r.getMessage()}" for r in caplog.records]
    assert "DEBUG Tool call: nope.x" in said
    error = "ERROR Tool call error: nope.x - ModuleNotFoundError: Module not found: nope.x (trace "
    assert [line for line in said if line.startswith(error)]


FORGED = "no file\r\nCRITICAL root: the disk is full\u2028\x1b[2J"


async def test_no_client_writes_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Also not by what a module repeats in its error."""

    def fail(inputs: dict[str, Any], context: Any) -> NoReturn:
        raise InvalidInputError(inputs["name"])

    async with connect({"demo.fail": fail}) as client:
        await client.call_tool("demo.fail", {"name": FORGED})
        await client.call_tool(FORGED, {})
    for record in errors_logged(caplog):
        assert r"no file\r\nCRITICAL root: the disk is full\u2028\x1b[2J" in record.getMessage()
    assert [text for text in lines_logged(caplog) if text.startswith("CRITICAL")] == []


def lines_logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that a handler writes, and a terminal or a reader of logs takes apart."""
    formatter = logging.Formatter("%(message)s")
    return [line for record in caplog.records for line in formatter.format(record).splitlines()]


@pytest.mark.parametrize("kind", ["long-message", "deep-recursion"])
async def test_a_failed_call_logs_one_short_message(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Of its traceback, too, the handler keeps the two ends."""

    def recurse(left: int, right: int) -> int:
        return recurse(right, left) if left else recurse(right + 1, left)

    def fail(inputs: dict[str, Any], context: Any) -> Any:
        if kind == "deep-recursion":
            return recurse(0, 1)
        raise RuntimeError("x\n" * 500_000)

    with serving(registry_of({"demo.fail": fail})) as url:
        call = modern("tools/call", {"name": "demo.fail", "arguments": {"a": 1}})
        async with httpx.AsyncClient(timeout=20) as client:
            response = await client.post(f"{url}/mcp", **call)
    assert response.json()["result"]["content"][0]["text"] == "Internal error occurred"
    (record,) = errors_logged(caplog)
    assert re.fullmatch(r"Tool call error: demo\.fail - \w+Error: .{2,20000}", record.getMessage())
    assert record.exc_info is not None


async def test_arguments_too_deep_to_be_read_are_an_error() -> None:
    """Of that call alone."""
    with serving(registry_of({"demo.echo": lambda inputs, context: inputs})) as url:
        call = modern("tools/call", {"name": "demo.echo", "arguments": {"a": 1}})
        right = json.dumps(call.pop("json"))
        call["headers"] |= {"Content-Type": "application/json"}
        async with httpx.AsyncClient(timeout=20) as client:
            deep = right.replace('{"a": 1}', '{"a":' * 700 + "{}" + "}" * 700)
            answer = (await client.post(f"{url}/mcp", content=deep, **call)).json()
            # Which of the two depends on how deep this Python goes: whether we or apcore stop at it.
            assert "error" in answer or answer["result"]["isError"]
            assert "Internal error occurred" in json.dumps(answer)
            answer = (await client.post(f"{url}/mcp", content=right, **call)).json()
    assert answer["result"]["structuredContent"] == {"a": 1}


async def test_what_a_module_reports_is_not_logged(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """And half a surrogate breaks no answer."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")

    async def speak(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await report_progress(context, 1, 3, f"{TOKEN} \ud800")
        await asyncio.to_thread(asyncio.run, report_progress(context, 2, 3, TOKEN))
        return {"still": "alive"}

    note, heard = noting()
    async with connect({"demo.speaks": FunctionalModule(speak, documentation="# Half\n\n\udfff")}, mode=mode) as client:
        result = await client.call_tool("demo.speaks", {}, progress_callback=note)
        (resource,) = (await client.list_resources()).resources
        read = await client.read_resource(resource.uri)
    assert result.structured_content == {"still": "alive"}
    assert heard == [(1, 3, f"{TOKEN} ?"), (2, 3, TOKEN)]
    assert read.contents[0].model_dump()["text"] == "# Half\n\n?"
    assert "Tool call: demo.speaks" in everything_logged(caplog)
    assert TOKEN not in everything_logged(caplog)


def with_odd(error: ModuleError, **attributes: Any) -> ModuleError:
    """`error`, with attributes that apcore would not give it."""
    vars(error).update(attributes)
    return error


# Errors that a module's author put together by hand, with something else than apcore's in them.
UNREADABLE: dict[str, Callable[[], ModuleError]] = {
    "details_text": lambda: with_odd(InvalidInputError(TOKEN), details=TOKEN),
    "details_list": lambda: with_odd(ModuleError("SHOP_CLOSED", TOKEN), details=[TOKEN]),
    "errors_number": lambda: SchemaValidationError(TOKEN, errors=cast(Any, 7)),
    "code_list": lambda: with_odd(ModuleError("SHOP_CLOSED", TOKEN), code=[TOKEN]),
    "flag_object": lambda: with_odd(ModuleError("SHOP_CLOSED", TOKEN), retryable=object()),
}


async def test_an_unreadable_error_is_quoted_nowhere(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """What the mapper stumbles over would else be a protocol error, and its traceback in the log."""
    modules = {f"fails.{name}": raising(make, input_schema=SECRETIVE) for name, make in UNREADABLE.items()}
    async with connect(modules, mode=mode) as client:
        for tool in modules:
            caplog.clear()
            result = await client.call_tool(tool, {"token": TOKEN})
            report = failure(result, "Internal error occurred")
            assert report["error_type"] in ("GENERAL_INTERNAL_ERROR", "MODULE_EXECUTE_ERROR")
            (record,) = errors_logged(caplog)
            assert record.getMessage().startswith(f"Tool call error: {tool} - ")
            assert TOKEN not in result.model_dump_json(by_alias=True) + everything_logged(caplog) + caplog.text


# ---- Errors that apcore itself produces ----


class Broken(Middleware):
    def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
        if module_id == "broken.middleware":
            raise RuntimeError("/etc/passwd")


GUARDS = [
    ("shut.door", "Access denied", "ACL_DENIED"),
    ("outer.shut", "Access denied", "ACL_DENIED"),
    ("deep.m0", "Call depth limit exceeded", "CALL_DEPTH_EXCEEDED"),
    ("round.one", "Circular call detected", "CIRCULAR_CALL"),
    ("often.self", "Call frequency limit exceeded", "CALL_FREQUENCY_EXCEEDED"),
    ("broken.middleware", "Internal error occurred", ""),
    ("outer.crash", "Internal error occurred", ""),
]


@pytest.mark.requirement("FR-ERROR-006", "FR-ERROR-007", "FR-ERROR-008")
async def test_a_guard_is_told_without_its_details(caplog: pytest.LogCaptureFixture) -> None:
    """Those of an ACL, of middleware, and of modules that call each other too often."""
    modules = {
        "shut.door": echo,
        "outer.shut": calls("shut.door"),
        **{f"deep.m{number}": calls(f"deep.m{number + 1}") for number in range(40)},
        "round.one": calls("round.two"),
        "round.two": calls("round.one"),
        "often.self": calls("often.self"),
        "broken.middleware": echo,
        "outer.crash": calls("inner.crash"),
        "inner.crash": raising(lambda: RuntimeError("/etc/passwd")),
    }
    acl = ACL([ACLRule(callers=["*"], targets=["shut.*"], effect="deny")], default_effect="allow")
    async with connect(Executor(registry_of(modules), acl=acl, middlewares=[Broken()])) as client:
        for tool, text, code in GUARDS:
            caplog.clear()
            result = await client.call_tool(tool, {})
            assert failure(result, text)["error_type"].startswith(code)
            (record,) = errors_logged(caplog)
            assert re.search(r"Error: .*(door|33|round|often|/etc/passwd)|: \(not shown", record.getMessage())
            said = result.model_dump_json(by_alias=True)
            assert not re.search(r"call_chain|caller|@|door|deep\.|round\.|often\.|/etc", said), tool


# ---- What a module's author wrote for an agent ----

ADVICE: dict[str, Any] = {"ai_guidance": "Ask for a later day.\ud800", "suggestion": "tomorrow"}


def own() -> ModuleError:
    return ModuleError("DAY_IS_FULL", "no room on 2026-02-03", **ADVICE)


# Who fails and how, and whether the agent hears the advice.
ADVISED: dict[str, tuple[Any, bool]] = {
    "own.error": (raising(own), True),
    "code.of_apcore": (raising(lambda: InvalidInputError("no", **ADVICE)), False),
    "calls.another": (calls("own.error"), False),
    "marked.input": (raising(own, input_schema=SECRETIVE), False),
}


async def test_a_modules_own_advice_reaches_the_agent() -> None:
    async with connect({tool: module for tool, (module, _) in ADVISED.items()}) as client:
        for tool, (_, told) in ADVISED.items():
            report = failure(await client.call_tool(tool, {}))
            advice = [report[key] for key in ADVICE if key in report]
            assert advice == (["Ask for a later day.?", "tomorrow"] if told else []), tool
            assert (report["error_message"] == "Module error: DAY_IS_FULL\nAsk for a later day.?") == told
            assert ("later day" in report["error_message"]) == told


# ---- Validation ----


class Size(BaseModel):
    width: int
    height: int


class Box(BaseModel):
    kind: Literal["box"]
    width: int


class Ball(BaseModel):
    kind: Literal["ball", "globe"]
    radius: int


class Picture(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=2)
    size: Size
    tags: list[str] = []
    sizes: list[Size] = []
    kind: Literal["png", "jpeg"] = "png"
    title: str = Field("", pattern=r"^(\w+\s?)+$")
    by_name: dict[str, int] = {}
    back: Size | None = None
    inside: Box | Ball | None = None


PICTURE = {"name": "cat", "size": {"width": 1, "height": 2}}
TAKES: dict[str, Any] = {"takes.model": Picture, "takes.dict": Picture.model_json_schema()}
TYPE, REQUIRED = {"type", "int_type", "string_type"}, {"required", "missing"}

# The arguments, and each wrong field with the codes that a model or a dict schema may give for it.
WRONG: list[tuple[dict[str, Any], dict[str, set[str]]]] = [
    ({**PICTURE, "size": {"width": "1"}}, {"size.width": TYPE, "size.height": REQUIRED}),
    (
        {"name": 5, "tags": [None], "size": {"width": []}, "sizes": [{"width": 1, "height": 2}, {"width": 1}]},
        {"name": TYPE, "tags.0": TYPE, "size.width": TYPE, "size.height": REQUIRED, "sizes.1.height": REQUIRED},
    ),
    ({**PICTURE, "kind": "gif"}, {"kind": {"enum", "literal_error"}}),
]
Validating = tuple[str, list[str], bool]


@pytest.fixture(scope="module", params=[False, True], ids=["apcore-validates", "validate_inputs"])
def validating(request: pytest.FixtureRequest) -> Iterator[Validating]:
    """A server of `Picture` takers and what saw their calls; with and without validate_inputs."""
    seen: list[str] = []

    class Sees(Middleware):
        def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
            seen.append("executor")

    def run(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        seen.append("module")
        return {"given": inputs}

    modules = {name: FunctionalModule(run, input_schema=schema) for name, schema in TAKES.items()}
    with serving(Executor(registry_of(modules), middlewares=[Sees()]), validate_inputs=request.param) as url:
        yield url, seen, request.param


@pytest.mark.requirement("FR-ERROR-002")
async def test_each_wrong_argument_is_named_with_its_path(validating: Validating) -> None:
    url, seen, before_executor = validating
    async with client_of(url) as client:
        for (arguments, expected), tool in itertools.product(WRONG, TAKES):
            seen.clear()
            report = failure(await client.call_tool(tool, arguments))
            lines = lines_of(report)
            assert sorted(field for field, _, _ in lines) == sorted(expected)
            assert [line for line in lines if line[2] not in expected[line[0]]] == []
            assert [message for _, message, code in lines if code in REQUIRED and message != "Field required"] == []
            assert (report["error_type"], report["user_fixable"]) == ("SCHEMA_VALIDATION_ERROR", True)
            assert seen == ([] if before_executor else ["executor"])


async def test_of_a_union_the_telling_faults_are_told(validating: Validating) -> None:
    """By a model, those of each branch; by a dict schema, the one that jsonschema holds for the best."""
    told = []
    async with client_of(validating[0]) as client:
        for wrong in ({"inside": {"kind": "box"}}, {"back": {"width": "1"}}):
            results = [await client.call_tool(tool, {**PICTURE, **wrong}) for tool in TAKES]
            told += [{field for field, _, _ in lines_of(failure(result))} for result in results]
    of_model, of_dict, optional_of_model, optional_of_dict = told
    assert of_model == {"inside.width", "inside.kind", "inside.radius"}
    assert len(of_dict) == 1
    assert of_dict < of_model
    assert optional_of_model == {"back.width", "back.height"}
    assert len(optional_of_dict) == 1
    assert optional_of_dict < optional_of_model


class Note(BaseModel):
    kind: Literal["note"]
    note: str
    more: dict[str, int] = {}


class Photo(BaseModel):
    kind: Literal["photo"]
    url: str


class Cards(BaseModel):
    cards: list[Annotated[Note | Photo, Field(discriminator="kind")]]


WRONG_CARDS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"kind": "note", "note": "milk", "more": 7}, ("more", "Input should be an object")),
    ({"kind": "note", "note": "note", "more": {"note": "x"}}, ("more.note", "Input should be a valid integer")),
    ({"kind": "note", "note": {"more": 7}}, ("note", "Input should be a valid string")),
    ({"kind": "note"}, ("note", "Field required")),
    ({"kind": "song"}, ("kind", "Input should be one of: note, photo")),
    ({"url": "x"}, ("kind", "Input should be one of: note, photo")),
]


def test_of_a_tagged_union_the_field_is_named() -> None:
    """Also where a field is called as a tag is, which pydantic's paths name like a field."""
    arguments = tool_of(FunctionalModule(echo, input_schema=Cards)).arguments
    for card, (field, message) in WRONG_CARDS:
        faults = arguments.faults({"cards": [card]})
        assert [(fault["field"], fault["message"]) for fault in faults] == [(f"cards.0.{field}", message)]


@pytest.mark.parametrize("changed", [False, True], ids=["own", "middleware"])
async def test_what_a_module_refuses_is_in_its_words(changed: bool) -> None:
    """Though what it was given is no longer what the client sent: it has taken a part out, or middleware put one in."""

    class Fills(Middleware):
        def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
            return {"name": "ann"}

    def refuse(inputs: dict[str, Any], context: Any) -> Any:
        inputs.pop("name")
        raise SchemaValidationError("bad", errors=[{"field": "name", "message": "it is taken"}])

    schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    registry = registry_of({"takes.name": FunctionalModule(refuse, input_schema=schema)})
    executor = Executor(registry, middlewares=[Fills()] if changed else [])
    async with connect(executor) as client:
        result = await client.call_tool("takes.name", {} if changed else {"name": "ann"})
    assert lines_of(failure(result)) == [("name", "it is taken", "invalid")]


async def test_an_argument_too_many_is_named(validating: Validating) -> None:
    async with client_of(validating[0]) as client:
        of_model, of_dict = [failure(await client.call_tool(tool, {**PICTURE, "color": "red"})) for tool in TAKES]
        fine = await client.call_tool("takes.model", PICTURE)
    assert lines_of(of_model) == [("color", "Extra inputs are not permitted", "extra_forbidden")]
    ((_, message, code),) = lines_of(of_dict)
    assert (code, "'color'" in message) == ("additionalProperties", True)
    assert "red" not in message
    assert fine.structured_content == {"given": PICTURE}


class Answer(BaseModel):
    count: int
    nested: Size


@pytest.mark.parametrize("schema", [Answer, Answer.model_json_schema()], ids=["model", "dict"])
async def test_a_refused_output_tells_fields_without_values(schema: Any) -> None:
    module = gives({"count": "inner-value", "nested": {"width": "other-value"}}, output_schema=schema)
    async with connect({"gives.wrong": module}) as client:
        result = await client.call_tool("gives.wrong", {})
    report = failure(result)
    told = {field: message for field, message, _ in lines_of(report, "Output validation failed (the tool has run):")}
    wrong = "Value is not valid"
    missing = "nested" if isinstance(schema, dict) else "nested.height"
    assert told == {"count": wrong, "nested.width": wrong, missing: "Field required"}
    assert report["user_fixable"] is False
    assert [v for v in ("inner-value", "other-value") if v in result.model_dump_json(by_alias=True)] == []


class Frame:
    """Of a data library: nothing that is JSON."""


# What gives it, and the type that came.
REFUSED: dict[str, tuple[Any, str]] = {
    "gives.list": (gives([1]), "builtins.list"),
    "gives.frame": (gives(Frame(), output_schema=Answer), "test_errors.Frame"),
    "a.table": (returning(dict, Frame()), "test_errors.Frame"),
    "a.text": (returning(dict[str, int], "a"), "builtins.str"),
    "a.total": (returning(int, 2.5), "builtins.float"),
    "a.whole": (returning(Any, Frame()), "test_errors.Frame"),
}


async def test_the_log_names_a_refused_outputs_type(caplog: pytest.LogCaptureFixture) -> None:
    async with connect({name: module for name, (module, _) in REFUSED.items()}) as client:
        for name, (_, kind) in REFUSED.items():
            caplog.clear()
            result = await client.call_tool(name, {})
            told = failure(result)["error_message"]
            assert told.startswith(("Output validation failed", "Failed to serialize module output")), name
            assert kind not in result.model_dump_json(), name
            assert kind in errors_logged(caplog)[0].getMessage(), name


async def test_a_wrong_inner_call_is_no_clients_fault(caplog: pytest.LogCaptureFixture) -> None:
    wrong = {"width": "inner-value", "height": 1}
    modules: dict[str, Any] = {}
    for kind, schema in {"model": Size, "dict": Size.model_json_schema()}.items():
        modules[f"takes.{kind}"] = gives({}, input_schema=schema)
        modules[f"gives.{kind}"] = gives(wrong, output_schema=schema)
    outer = {f"outer.{name}": FunctionalModule(calls(name, **wrong), input_schema=Size) for name in modules}
    async with connect({**modules, **outer}) as client:
        for tool in outer:
            result = await client.call_tool(tool, {"width": 1, "height": 2})
            report = failure(result, "Module error: SCHEMA_VALIDATION_ERROR")
            assert not re.search(
                "inner-value|takes|gives|width|Input validation", result.model_dump_json(by_alias=True)
            )
            assert "error_details" not in report
            assert report["user_fixable"] is False
            assert "width" in errors_logged(caplog)[-1].getMessage()


async def test_arguments_that_middleware_spoils_are_named() -> None:
    class Spoils(Middleware):
        def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
            return {**inputs, "width": "wide"}

    registry = registry_of({"takes.size": FunctionalModule(echo, input_schema=Size)})
    async with connect(Executor(registry, middlewares=[Spoils()])) as client:
        wrong = failure(await client.call_tool("takes.size", {"width": 1, "height": 2}))
    assert lines_of(wrong) == [("width", "Input should be a valid integer", "type")]


def test_a_missing_argument_is_named_as_it_is_spelt() -> None:
    names = ["it's", 'say "when"', 'it\'s "x"', "a.b"]
    inner = {"type": "object", "properties": {name: {} for name in names}, "required": names}
    schema = {"type": "object", "properties": {"order": inner}, "required": ["order"]}
    missing = {"code": "required", "message": "Field required"}
    assert schema_faults(schema, {"order": {"it's": 1}}) == [
        {"field": f"order.{name}", **missing} for name in names[1:]
    ]
    assert schema_faults(schema, {}) == [{"field": "order", **missing}]


# ---- Functions ----


@pytest.mark.parametrize("validate_inputs", [False, True])
async def test_a_functions_unknown_argument_is_named(validate_inputs: bool) -> None:
    """Passed on, it would be a TypeError inside apcore: "Internal error occurred"."""
    ran: list[str] = []

    def shout(text: str, loud: bool = False) -> dict[str, Any]:
        """Shout."""
        ran.append(text)
        return {"text": text.upper()}

    def keep(text: str, **more: Any) -> dict[str, Any]:
        """Keep."""
        return {"text": text, **more}

    registry = Registry()
    module(shout, id="text.shout", registry=registry)
    module(keep, id="text.keep", registry=registry)
    async with connect(registry, validate_inputs=validate_inputs) as client:
        schemas = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
        refused = failure(await client.call_tool("text.shout", {"loud": 1, "volume": 3}))
        fine = await client.call_tool("text.shout", {"text": "a", "loud": True})
        open_to_more = await client.call_tool("text.keep", {"text": "a", "volume": 3})
    assert schemas["text.shout"]["additionalProperties"] is False
    assert schemas["text.keep"].get("additionalProperties") is True
    assert sorted((field, code) for field, _, code in lines_of(refused)) == [
        ("loud", "bool_type"), ("text", "missing"), ("volume", "extra_forbidden")
    ]  # fmt: skip
    assert fine.structured_content == {"text": "A"}
    assert open_to_more.structured_content == {"text": "a", "volume": 3}
    assert ran == ["a"]


# ---- What a client can make an answer cost ----


@pytest.mark.timeout(30)
async def test_a_slow_pattern_costs_no_minute(validating: Validating) -> None:
    """To Python's `re` 28 letters take a minute; the model takes milliseconds."""
    async with client_of(validating[0]) as client:
        lines = lines_of(failure(await client.call_tool("takes.model", {"title": "a" * 28 + "!"})))
    assert ("size", "Field required", "missing") in lines


async def test_twenty_faults_are_told_each_shortened(validating: Validating, caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(validating[0]) as client:
        for tool in TAKES:
            many = lines_of(failure(await client.call_tool(tool, {**PICTURE, "tags": [*range(10_000)]})))
            assert [field for field, _, _ in many] == [f"tags.{i}" for i in range(20)]
        long = await client.call_tool("takes.dict", {**PICTURE, "kind": "y" * 200_000})
        named = await client.call_tool("takes.model", {**PICTURE, "by_name": {"y" * 200_000: "z"}})
    for result in (long, named):
        ((field, message, _),) = lines_of(failure(result))
        assert 1000 <= len(field) + len(message) <= 2000
    assert max(len(record.getMessage()) for record in errors_logged(caplog)) < 20_000
