"""What a client is told when a module fails (FR-ERROR-001 to -011, FR-EXEC-007, FR-LOG-002, -003, NFR-SEC-002)."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NoReturn, cast

import httpx
import pytest
from apcore import ACL, ACLRule, Executor, FunctionModule, ModuleError
from apcore.approval import ApprovalResult
from apcore.cancel import ExecutionCancelledError
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
    STRING,
    Caplog,
    calls,
    errors_logged,
    everything_logged,
    failure,
    gives,
    lines_of,
    modern,
    noting,
    of,
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
        fail(inputs, context)

    return FunctionalModule(fail_later if awaits else fail, **attributes)


# ---- The table of sentences: errors of apcore that a module raises ----

WIDTH = {"field": "width", "code": "int_type", "message": "Input should be a valid integer"}
NESTED = {"field": "parameters.width", "code": "missing", "message": "Field required"}
BY_PATH = {"path": "/size/0/width", "keyword": "required", "message": "Field required"}
TOO_WIDE = {"field": "", "code": "invalid", "message": "too wide"}

ADVICE: dict[str, Any] = {"ai_guidance": "Ask for a later day.\ud800", "suggestion": "tomorrow"}


def full() -> ModuleError:
    """With what a module's author wrote for an agent."""
    return ModuleError("DAY_IS_FULL", "no room on 2026-02-03", **ADVICE)


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
    "advice": (full, "Module error: DAY_IS_FULL\nAsk for a later day.?",
               {"ai_guidance": "Ask for a later day.?", "suggestion": "tomorrow"}),
    "advice_with_a_code_of_apcore": (lambda: InvalidInputError("no", **ADVICE), "Invalid input: no",
                                     dict.fromkeys(ADVICE)),
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


@pytest.fixture(scope="module")
def failing() -> Iterator[str]:
    """A server of one sync and one async module for each row of both tables, and of one that works."""
    modules: dict[str, Any] = {"works.fine": echo}
    rows: dict[str, Any] = {**TABLE, **UNEXPECTED}
    for name, (make, *_) in rows.items():
        modules |= {f"now.{name}": raising(make), f"later.{name}": raising(make, awaits=True)}
    with serving(registry_of(modules)) as url:
        yield url


@pytest.mark.requirement("FR-ERROR-003", "FR-ERROR-004", "FR-ERROR-005", "FR-ERROR-010", "FR-ERROR-011")
@pytest.mark.requirement("FR-LOG-002", "FR-LOG-003", "FR-LOG-004", "NFR-MAINT-004")
@pytest.mark.parametrize("name", TABLE)
async def test_an_error_of_apcore_is_one_plain_sentence(failing: str, name: str, caplog: Caplog) -> None:
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    make, text, expected = TABLE[name]
    tool = f"{'later' if len(name) % 2 == 0 else 'now'}.{name}"
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
    began = [each for each in caplog.record_tuples if each[2].startswith("Tool call: ")]
    assert began == [("apcore_mcp", logging.DEBUG, f"Tool call: {tool}")]
    assert record.name == "apcore_mcp"


@pytest.mark.requirement("FR-ERROR-009", "NFR-SEC-002")
@pytest.mark.parametrize("when", ["now", "later"])
async def test_an_unexpected_exception_is_told_to_the_log_alone(failing: str, when: str, caplog: Caplog) -> None:
    async with client_of(failing) as client, asyncio.timeout(20):
        for name, (_, logged_as) in UNEXPECTED.items():
            caplog.clear()
            tool = f"{when}.{name}"
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
    "fails.full": (raising(full), "Module error: DAY_IS_FULL\nAsk for a later day.?"),
    "calls.full": (calls("fails.full"), "Module error: DAY_IS_FULL"),
    "marked.full": (raising(full, input_schema=SECRETIVE), "Module error: DAY_IS_FULL"),
}


async def test_an_unmasked_error_tells_type_and_text() -> None:
    """Unless a module that takes part in the call marks something. Advice is of the tool's own module."""
    modules = {name: module for name, (module, _) in UNMASKED.items()}
    async with connect(modules, mask_errors=False) as client:
        for name, (_, told) in UNMASKED.items():
            report = failure(await client.call_tool(name, {}), told)
            assert report.keys() & ADVICE.keys() == (ADVICE.keys() if name == "fails.full" else set())


FORGED = "no file\r\nCRITICAL root: the disk is full\u2028\x1b[2J"


async def test_no_client_writes_lines_of_the_log(caplog: Caplog) -> None:
    """Also not by what a module repeats in its error."""
    async with connect({"demo.fail": raising(lambda: InvalidInputError(FORGED))}) as client:
        await client.call_tool("demo.fail", {"name": FORGED})
        await client.call_tool(FORGED, {})
    records = errors_logged(caplog)
    told = [r"no file\r\nCRITICAL root: the disk is full\u2028\x1b[2J" in record.getMessage() for record in records]
    assert told == [True, True]
    formatter = logging.Formatter("%(message)s")
    assert not [line for r in records for line in formatter.format(r).splitlines() if line.startswith("CRITICAL")]


async def test_a_failed_call_logs_one_short_message(caplog: Caplog) -> None:
    """Of its traceback, too, the handler keeps the two ends."""

    def recurse(left: int, right: int) -> int:
        return recurse(right, left) if left else recurse(right + 1, left)

    modules = {"demo.deep": lambda i, c: recurse(0, 1), "demo.long": raising(lambda: RuntimeError("x\n" * 500_000))}
    async with connect(modules) as client:
        for tool in modules:
            failure(await client.call_tool(tool, {}), "Internal error occurred")
            record = errors_logged(caplog)[-1]
            assert re.fullmatch(rf"Tool call error: {tool} - \w+Error: .{{2,20000}}", record.getMessage())
            assert record.exc_info is not None


async def test_arguments_that_cannot_be_read_are_an_error(caplog: Caplog) -> None:
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
            for number in ("NaN", "-Infinity", "1e999"):  # within no bound of a schema's, and beyond none
                answer = (await client.post(f"{url}/mcp", content=right.replace("1}", f"[{number}]}}"), **call)).json()
                (content,) = answer["result"]["content"]
                assert content["text"] == "Invalid input: JSON has no NaN, and no infinity"
                record = errors_logged(caplog)[-1]
                assert record.getMessage().startswith("Tool call error: demo.echo - InvalidInputError")
                caplog.clear()
            answer = (await client.post(f"{url}/mcp", content=right, **call)).json()
    assert answer["result"]["structuredContent"] == {"a": 1}


async def test_what_a_module_reports_is_not_logged(mode: str, caplog: Caplog) -> None:
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


async def test_an_unreadable_error_is_quoted_nowhere(mode: str, caplog: Caplog) -> None:
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


def break_down(module_id: str, inputs: dict[str, Any], context: Any) -> None:
    if module_id == "broken.middleware":
        raise RuntimeError("/etc/passwd")


# Who is called, what that one does, what is told, and the type of the error.
GUARDS: dict[str, tuple[Any, str, str]] = {
    "shut.door": (echo, "Access denied", "ACL_DENIED"),
    "outer.shut": (calls("shut.door"), "Access denied", "ACL_DENIED"),
    "deep.m0": (calls("deep.m1"), "Call depth limit exceeded", "CALL_DEPTH_EXCEEDED"),
    "round.one": (calls("round.two"), "Circular call detected", "CIRCULAR_CALL"),
    "often.self": (calls("often.self"), "Call frequency limit exceeded", "CALL_FREQUENCY_EXCEEDED"),
    "broken.middleware": (echo, "Internal error occurred", ""),
    "outer.crash": (calls("inner.crash"), "Internal error occurred", ""),
    "outer.lost": (calls("no.such"), "Module not found: no.such", "MODULE_NOT_FOUND"),
}


@pytest.mark.requirement("FR-ERROR-006", "FR-ERROR-007", "FR-ERROR-008")
async def test_a_guard_is_told_without_its_details(caplog: Caplog) -> None:
    """Those of an ACL, of middleware, and of modules that call each other too often."""
    modules = {name: module for name, (module, *_) in GUARDS.items()}
    modules |= {f"deep.m{number}": calls(f"deep.m{number + 1}") for number in range(1, 40)}
    modules |= {"round.two": calls("round.one"), "inner.crash": raising(lambda: RuntimeError("/etc/passwd"))}
    acl = ACL([ACLRule(callers=["*"], targets=["shut.*"], effect="deny")], default_effect="allow")
    async with connect(Executor(registry_of(modules), acl=acl).use_before(break_down)) as client:
        for tool, (_, text, code) in GUARDS.items():
            caplog.clear()
            result = await client.call_tool(tool, {})
            assert failure(result, text)["error_type"].startswith(code)
            (record,) = errors_logged(caplog)
            assert re.search(r"Error: .*(door|33|round|often|/etc/passwd|no.such)|: \(not shown", record.getMessage())
            said = result.model_dump_json(by_alias=True)
            assert not re.search(r"call_chain|caller|@|door|deep\.|round\.|often\.|/etc", said), tool


# ---- Validation ----


class Size(BaseModel):
    width: int
    height: int


class Note(BaseModel):
    kind: Literal["note"]
    note: str
    more: dict[str, int] = {}


class Photo(BaseModel):
    kind: Literal["photo", "picture"]
    url: str


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
    inside: Note | Photo | None = None


PICTURE = {"name": "cat", "size": {"width": 1, "height": 2}}
TAKES: dict[str, Any] = {"takes.model": Picture, "takes.dict": Picture.model_json_schema()}
# The arguments, and each wrong field with the code that a model and a dict schema give for it.
WRONG: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, str]]] = {
    "nested": ({**PICTURE, "size": {"width": "1"}}, {"size.width": "int_type", "size.height": "missing"},
               {"size.width": "type", "size.height": "required"}),
    "several": ({"name": 5, "tags": [None], "size": PICTURE["size"], "sizes": [{"width": 1}]},
                {"name": "string_type", "tags.0": "string_type", "sizes.0.height": "missing"},
                {"name": "type", "tags.0": "type", "sizes.0.height": "required"}),
    "enum": ({**PICTURE, "kind": "gif"}, {"kind": "literal_error"}, {"kind": "enum"}),
    "no_object": ({**PICTURE, "size": 3}, {"size": "model_type"}, {"size": "type"}),
    "surplus": ({**PICTURE, "color": "red"}, {"color": "extra_forbidden"}, {"": "additionalProperties"}),
    # To Python's `re` 28 letters take a minute; the model takes milliseconds.
    "slow_pattern": ({"name": "cat", "title": "a" * 28 + "!"}, {"size": "missing", "title": "string_pattern_mismatch"},
                     {}),
}  # fmt: skip


def faults(schema: Any, arguments: dict[str, Any]) -> list[dict[str, str]]:
    return tool_of(FunctionalModule(echo, input_schema=schema)).arguments.faults(arguments)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_argument_is_named_with_its_path(name: str) -> None:
    arguments, *expected = WRONG[name]
    for schema, codes in zip(TAKES.values(), expected, strict=True):
        if codes:
            found = faults(schema, arguments)
            assert {fault["field"]: fault["code"] for fault in found} == codes
            told = {fault["message"] for fault in found if fault["code"] in ("missing", "required")}
            assert told <= {"Field required"}
            assert not re.search("red|a{28}|Size", str(found).replace("required", ""))


def test_of_a_union_the_telling_faults_are_told() -> None:
    """By a model, those of each branch; by a dict schema, the one that jsonschema holds for the best."""
    note = {"inside": {"kind": "note"}}, {"inside.note", "inside.kind", "inside.url"}
    for wrong, fields in (note, ({"back": {"width": "1"}}, {"back.width", "back.height"})):
        found = [faults(each, {**PICTURE, **wrong}) for each in TAKES.values()]
        of_model, of_dict = ({fault["field"] for fault in each} for each in found)
        assert of_model == fields
        assert len(of_dict) == 1
        assert of_dict < fields


def test_twenty_faults_are_told_each_shortened() -> None:
    for schema in TAKES.values():
        many = faults(schema, {**PICTURE, "tags": [*range(10_000)]})
        assert [fault["field"] for fault in many] == [f"tags.{i}" for i in range(20)]
    long = faults(TAKES["takes.dict"], {**PICTURE, "kind": "y" * 200_000})
    named = faults(TAKES["takes.model"], {**PICTURE, "by_name": {"y" * 200_000: "z"}})
    for fault in (*long, *named):
        assert 1000 <= len(fault["field"]) + len(fault["message"]) <= 2000


@pytest.mark.requirement("FR-ERROR-002")
@pytest.mark.parametrize("validate_inputs", [False, True])
async def test_a_client_is_told_each_wrong_argument(validate_inputs: bool) -> None:
    """With `validate_inputs`, before the Executor sees the call."""
    seen: list[str] = []
    modules = {name: FunctionalModule(echo, input_schema=schema) for name, schema in TAKES.items()}
    executor = Executor(registry_of(modules))
    executor.use_before(lambda module_id, inputs, context: seen.append("executor"))
    async with connect(executor, validate_inputs=validate_inputs) as client:
        for tool, told in zip(TAKES, ("int_type", "type"), strict=True):
            report = failure(await client.call_tool(tool, {**PICTURE, "sizes": [{"width": "1", "height": 2}]}))
            assert [(field, code) for field, _, code in lines_of(report)] == [("sizes.0.width", told)]
            assert (report["error_type"], report["user_fixable"]) == ("SCHEMA_VALIDATION_ERROR", True)
        assert seen == ([] if validate_inputs else ["executor"] * 2)
        assert (await client.call_tool("takes.model", PICTURE)).structured_content == PICTURE


class Cards(BaseModel):
    cards: list[Annotated[Note | Photo, Field(discriminator="kind")]]


WRONG_CARDS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"kind": "note", "note": "milk", "more": 7}, ("more", "Input should be an object")),
    ({"kind": "note", "note": "note", "more": {"note": "x"}}, ("more.note", "Input should be a valid integer")),
    ({"kind": "note", "note": {"more": 7}}, ("note", "Input should be a valid string")),
    ({"kind": "note"}, ("note", "Field required")),
    ({"kind": "song"}, ("kind", "Input should be one of: note, photo, picture")),
    ({"url": "x"}, ("kind", "Input should be one of: note, photo, picture")),
]


def test_of_a_tagged_union_the_field_is_named() -> None:
    """Also where a field is called as a tag is, which pydantic's paths name like a field."""
    for card, (field, message) in WRONG_CARDS:
        found = faults(Cards, {"cards": [card]})
        assert [(fault["field"], fault["message"]) for fault in found] == [(f"cards.0.{field}", message)]


async def test_what_a_module_or_middleware_spoils_is_told_as_it_is() -> None:
    """Though what was validated is no longer what the client sent: a part is taken out, put in, or another."""

    changed = {"fills.name": {"name": "ann"}, "takes.size": {"width": "wide", "height": 1}}

    def refuse(inputs: dict[str, Any], context: Any) -> Any:
        inputs.pop("name")
        raise SchemaValidationError("bad", errors=[{"field": "name", "message": "it is taken"}])

    refusing = FunctionalModule(refuse, input_schema=of(name=STRING) | {"required": ["name"]})
    taking = FunctionalModule(echo, input_schema=Size)
    registry = registry_of({"takes.name": refusing, "fills.name": refusing, "takes.size": taking})
    taken = ("name", "it is taken", "invalid")
    executor = Executor(registry).use_before(lambda module_id, inputs, context: changed.get(module_id))
    async with connect(executor) as client:
        assert lines_of(failure(await client.call_tool("takes.name", {"name": "ann"}))) == [taken]
        assert lines_of(failure(await client.call_tool("fills.name", {}))) == [taken]
        spoilt = failure(await client.call_tool("takes.size", {"width": 1, "height": 2}))
        assert lines_of(spoilt) == [("width", "Input should be a valid integer", "type")]


class Answer(BaseModel):
    count: int
    nested: Size


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


async def test_the_log_names_a_refused_outputs_type(caplog: Caplog) -> None:
    async with connect({name: module for name, (module, _) in REFUSED.items()}) as client:
        for name, (_, kind) in REFUSED.items():
            caplog.clear()
            result = await client.call_tool(name, {})
            report = failure(result)
            assert report["error_message"].startswith(("Output validation failed", "Failed to serialize module output"))
            assert report.get("user_fixable") is not True, name
            assert kind not in result.model_dump_json(), name
            assert kind in errors_logged(caplog)[0].getMessage(), name


async def test_a_wrong_inner_call_is_no_clients_fault(caplog: Caplog) -> None:
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
            said = result.model_dump_json(by_alias=True)
            assert not re.search("inner-value|takes|gives|width|Input validation", said)
            assert "error_details" not in report
            assert report["user_fixable"] is False
            assert "width" in errors_logged(caplog)[-1].getMessage()


def test_a_missing_argument_is_named_as_it_is_spelt() -> None:
    names = ["it's", 'say "when"', 'it\'s "x"', "a.b"]
    schema = of(order=of(*names) | {"required": names}) | {"required": ["order"]}
    for values, fields in (({"order": {"it's": 1}}, [f"order.{name}" for name in names[1:]]), ({}, ["order"])):
        missing = [{"field": field, "code": "required", "message": "Field required"} for field in fields]
        assert schema_faults(schema, values) == missing


def shout(text: str, loud: bool = False) -> dict[str, Any]:
    return {"text": text.upper()}


def keep(text: str, **more: Any) -> dict[str, Any]:
    return {"text": text, **more}


@pytest.mark.parametrize("validate_inputs", [False, True])
async def test_a_functions_unknown_argument_is_named(validate_inputs: bool) -> None:
    """Passed on, it would be a TypeError inside apcore: "Internal error occurred"."""
    modules = {f"text.{function.__name__}": FunctionModule(function, "a.text") for function in (shout, keep)}
    async with connect(modules, validate_inputs=validate_inputs) as client:
        schemas = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
        refused = failure(await client.call_tool("text.shout", {"loud": 1, "volume": 3}))
        fine = await client.call_tool("text.shout", {"text": "a", "loud": True})
        open_to_more = await client.call_tool("text.keep", {"text": "a", "volume": 3})
    is_open = {name: schema["additionalProperties"] for name, schema in schemas.items()}
    assert is_open == {"text.shout": False, "text.keep": True}
    told = {field: code for field, _, code in lines_of(refused)}
    assert told == {"loud": "bool_type", "text": "missing", "volume": "extra_forbidden"}
    assert fine.structured_content == {"text": "A"}
    assert open_to_more.structured_content == {"text": "a", "volume": 3}
