"""What a client is told when a module fails: FR-ERROR-001 to -011, FR-EXEC-007, FR-LOG-002, -003, NFR-SEC-002, SRS 7.5.

The design page (section 3: "Errors", "Validation", "Only listed tools can be called") adds the report in `_meta`, the
advice of a module's author, and what of `x-sensitive` arguments may be seen. Real registry, Executor, server, client.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NoReturn, cast

import pytest
from apcore import ACL, ACLRule, Executor, Middleware, ModuleError, Registry
from apcore.approval import ApprovalResult
from apcore.cancel import ExecutionCancelledError
from apcore.decorator import module
from apcore.errors import (
    ACLDeniedError,
    ApprovalDeniedError,
    CallDepthExceededError,
    CallFrequencyExceededError,
    CircularCallError,
    ConfigError,
    InternalError,
    InvalidInputError,
    ModuleNotFoundError,
    ModuleTimeoutError,
    SchemaValidationError,
)
from conftest import FunctionalModule, connect, echo, registry_of, serving
from pydantic import BaseModel, ConfigDict, Field
from support import (
    SECRET_TEXT,
    SECRETIVE,
    calls,
    client_of,
    errors_logged,
    everything_logged,
    failure,
    lines_of,
    text_of,
)

from apcore_mcp import report_progress


def raising(make: Callable[[], BaseException], *, awaits: bool = False) -> FunctionalModule:
    def fail(inputs: dict[str, Any], context: Any) -> NoReturn:
        raise make()

    async def fail_later(inputs: dict[str, Any], context: Any) -> NoReturn:
        await asyncio.sleep(0)
        raise make()

    return FunctionalModule(fail_later if awaits else fail)


# ---- The table of SRS 7.5: errors of apcore that a module raises ----

WIDTH = {"field": "width", "code": "int_type", "message": "Input should be a valid integer"}
NESTED = {"field": "parameters.width", "code": "missing", "message": "Field required"}
BY_PATH = {"path": "/size/0/width", "keyword": "required", "message": "Field required"}
CHAIN = ["chain.alpha", "chain.beta", "chain.alpha"]

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
    "validation_of_its_own": (
        lambda: SchemaValidationError("bad", errors=[{"message": "too wide"}, BY_PATH]),
        "Input validation failed:\n- (root): too wide (invalid)\n- size.0.width: Field required (required)",
        {"error_details": {"errors": [{"field": "", "code": "invalid", "message": "too wide"},
                                      {"field": "size.0.width", "code": "required", "message": "Field required"}]}},
    ),
    "acl": (lambda: ACLDeniedError(caller_id="mcp_client_123", target_id="admin.delete_all"), "Access denied",
            {"error_type": "ACL_DENIED", "retryable": False, "user_fixable": False}),
    "acl_no_caller": (lambda: ACLDeniedError(None, "admin.delete_all"), "Access denied", {}),
    "timeout": (lambda: ModuleTimeoutError(module_id="slow.module", timeout_ms=30000), "Module timed out after 30000ms",
                {"error_type": "MODULE_TIMEOUT", "retryable": True, "error_details": {"timeout_ms": 30000}}),
    "timeout_zero": (lambda: ModuleTimeoutError("slow.module", 0), "Module timed out after 0ms",
                     {"error_details": {"timeout_ms": 0}}),
    "timeout_of_its_own": (lambda: ModuleError("MODULE_TIMEOUT", "too slow"), "Module timed out after 0ms",
                           {"error_details": {"timeout_ms": 0}}),
    "invalid_input": (lambda: InvalidInputError(message="a {non-empty} string"), "Invalid input: a {non-empty} string",
                      {"error_type": "GENERAL_INVALID_INPUT", "user_fixable": True}),
    "depth": (lambda: CallDepthExceededError(depth=33, max_depth=32, call_chain=CHAIN),
              "Call depth limit exceeded", {"error_type": "CALL_DEPTH_EXCEEDED"}),
    "circular": (lambda: CircularCallError(module_id="chain.alpha", call_chain=CHAIN),
                 "Circular call detected", {"error_type": "CIRCULAR_CALL"}),
    "frequency": (lambda: CallFrequencyExceededError(module_id="chain.alpha", count=4, max_repeat=3, call_chain=CHAIN),
                  "Call frequency limit exceeded", {"error_type": "CALL_FREQUENCY_EXCEEDED"}),
    "config": (lambda: ConfigError("/etc/passwd is bad"),
               "Module error: CONFIG_INVALID", {"error_type": "CONFIG_INVALID"}),
    "internal": (lambda: InternalError("/etc/passwd is gone"), "Module error: GENERAL_INTERNAL_ERROR",
                 {"error_type": "GENERAL_INTERNAL_ERROR", "retryable": True, "user_fixable": False}),
    "custom": (lambda: ModuleError("VENDOR_{CODE}", "mcp_client_123 did it", {"at": "/etc/passwd"}),
               "Module error: VENDOR_{CODE}",
               {"error_type": "VENDOR_{CODE}", "retryable": None, "user_fixable": None}),
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
UNSAID = ("mcp_client_123", "admin.delete_all", "chain.alpha", "chain.beta", "slow.module", "/etc/passwd", "Traceback")

# What is not apcore's, and its class's name in the log (None where Python or apcore raises another in its place).
UNEXPECTED: dict[str, tuple[Callable[[], BaseException], str | None]] = {
    "runtime_error": (lambda: RuntimeError("disk /etc/passwd full"), "RuntimeError"),
    "os_error": (lambda: OSError(2, "No such file", "/etc/passwd"), "FileNotFoundError"),
    "system_exit": (lambda: SystemExit("/etc/passwd"), "SystemExit"),
    "keyboard_interrupt": (lambda: KeyboardInterrupt("/etc/passwd"), "KeyboardInterrupt"),
    "cancelled_error": (lambda: asyncio.CancelledError("/etc/passwd"), "CancelledError"),
    "generator_exit": (lambda: GeneratorExit("/etc/passwd"), "GeneratorExit"),
    "stop_iteration": (lambda: StopIteration("/etc/passwd"), None),
    "group": (lambda: BaseExceptionGroup("/etc/passwd", [KeyboardInterrupt("/etc")]), "BaseExceptionGroup"),
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


@pytest.mark.requirement("FR-ERROR-003", "FR-ERROR-004", "FR-ERROR-005", "FR-ERROR-006")
@pytest.mark.requirement("FR-ERROR-007", "FR-ERROR-008", "FR-ERROR-010", "FR-ERROR-011")
@pytest.mark.parametrize("name", TABLE)
async def test_an_error_of_apcore_is_told_in_one_plain_sentence(
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
    assert record.getMessage() == f"Tool call error: {tool} - {type(error).__name__}: {logged}"
    assert f"Tool call: {tool}" in [r.getMessage() for r in caplog.records if r.levelno == logging.DEBUG]


@pytest.mark.requirement("FR-ERROR-009", "NFR-SEC-002")
@pytest.mark.parametrize("awaits", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", UNEXPECTED)
async def test_an_unexpected_exception_is_told_to_the_log_and_not_to_the_client(
    failing: str, name: str, awaits: bool, caplog: pytest.LogCaptureFixture
) -> None:
    _, class_name = UNEXPECTED[name]
    tool = spelled(f"fails.{name}", awaits)
    async with client_of(failing) as client, asyncio.timeout(10):
        result = await client.call_tool(tool, {})
        after = await client.call_tool("works.fine", {"still": "alive"})
    report = failure(result, "Internal error occurred")
    assert report["error_type"] in ("MODULE_EXECUTE_ERROR", "GENERAL_INTERNAL_ERROR")
    said = result.model_dump_json(by_alias=True)
    assert [word for word in ("/etc", class_name or "Stop", "Traceback", ".py", "raising") if word in said] == []
    assert after.structured_content == {"still": "alive"}
    (record,) = errors_logged(caplog)
    assert record.getMessage().startswith(f"Tool call error: {tool} - {class_name or ''}")
    written = logging.Formatter("%(message)s").format(record)
    assert "Traceback (most recent call last)" in written
    if name != "stop_iteration":  # the interpreter itself drops that one's frames
        assert re.search(r'File ".*test_errors\.py", line \d+, in fail', written)


@pytest.mark.requirement("FR-ERROR-011", "FR-LOG-002", "FR-LOG-003")
async def test_the_log_has_each_call_and_each_error_in_the_words_of_the_specification(
    caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """FR-LOG-002 and FR-LOG-003, with the examples that they give; also of a tool that nobody knows."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    refused = raising(lambda: SchemaValidationError("Input validation failed", [WIDTH]))
    async with connect({"image.resize": refused}, mode=mode) as client:
        invalid = await client.call_tool("image.resize", {})
        unknown = await client.call_tool("nope.x", {})
    assert failure(invalid, "Input validation failed:\n- width: Input should be a valid integer (int_type)")
    assert failure(unknown, "Module not found: nope.x")["error_type"] == "MODULE_NOT_FOUND"
    said = [f"{r.levelname} {r.getMessage()}" for r in caplog.records if r.name.startswith("apcore_mcp")]
    assert "ERROR Tool call error: image.resize - SchemaValidationError: Input validation failed" in said
    assert "ERROR Tool call error: nope.x - ModuleNotFoundError: Module not found: nope.x" in said
    assert [line for line in said if line.startswith("DEBUG Tool call: ")] == [
        "DEBUG Tool call: image.resize",
        "DEBUG Tool call: nope.x",
    ]


async def test_no_client_writes_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Also not by what a module repeats in its error."""

    def fail(inputs: dict[str, Any], context: Any) -> NoReturn:
        raise InvalidInputError(inputs["name"])

    async with connect({"demo.fail": fail}) as client:
        await client.call_tool("demo.fail", {"name": "no file\r\nCRITICAL root: the disk is full\u2028\x1b[2J"})
    (record,) = errors_logged(caplog)
    assert record.getMessage().endswith(r"no file\r\nCRITICAL root: the disk is full\u2028\x1b[2J")


async def speaking_badly(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    await report_progress(context, 1, 3, "half \ud800")
    return {"still": "alive"}


async def test_what_a_module_says_beside_its_answer_cannot_break_it(mode: str) -> None:
    module = FunctionalModule(speaking_badly, documentation="# Half\n\n\udfff")
    heard: list[str | None] = []

    async def hear(progress: float, total: float | None, message: str | None) -> None:
        heard.append(message)

    async with connect({"demo.speaks": module}, mode=mode) as client:
        result = await client.call_tool("demo.speaks", {}, progress_callback=hear)
        (resource,) = (await client.list_resources()).resources
        read = await client.read_resource(resource.uri)
    assert result.structured_content == {"still": "alive"}
    assert heard == ["half ?"]
    assert read.contents[0].model_dump()["text"] == "# Half\n\n?"


# ---- Errors that apcore itself produces ----


class Broken(Middleware):
    def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
        if module_id == "broken.middleware":
            raise RuntimeError("/etc/passwd")


async def never(inputs: dict[str, Any], context: Any) -> NoReturn:
    await asyncio.Event().wait()
    raise AssertionError


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """A server with an ACL, a failing middleware, module timeouts and modules that call each other too often."""
    release = threading.Event()
    registry = registry_of(
        {
            "shut.door": echo,
            "outer.shut": calls("shut.door"),
            "slow.later": FunctionalModule(never, resources={"timeout": 40}),
            "slow.now": FunctionalModule(lambda *_: {"ended": release.wait(30)}, resources={"timeout": 40}),
            **{f"deep.m{number}": calls(f"deep.m{number + 1}") for number in range(40)},
            "round.one": calls("round.two"),
            "round.two": calls("round.one"),
            "often.self": calls("often.self"),
            "broken.middleware": echo,
            "outer.crash": calls("inner.crash"),
            "inner.crash": raising(lambda: RuntimeError("/etc/passwd")),
        }
    )
    acl = ACL([ACLRule(callers=["*"], targets=["shut.*"], effect="deny")], default_effect="allow")
    try:
        with serving(Executor(registry, acl=acl, middlewares=[Broken()])) as url:
            yield url
            release.set()
    finally:
        release.set()


@pytest.mark.requirement("FR-ERROR-006", "FR-ERROR-007", "FR-ERROR-008")
@pytest.mark.parametrize(
    ("tool", "text"),
    [
        pytest.param("shut.door", "Access denied", id="acl"),
        pytest.param("outer.shut", "Access denied", id="acl-of-a-module-called-by-a-module"),
        pytest.param("slow.later", "Module timed out after 40ms", id="timeout-async"),
        pytest.param("slow.now", "Module timed out after 40ms", id="timeout-sync"),
        pytest.param("deep.m0", "Call depth limit exceeded", id="depth"),
        pytest.param("round.one", "Circular call detected", id="circular"),
        pytest.param("often.self", "Call frequency limit exceeded", id="frequency"),
        pytest.param("broken.middleware", "Internal error occurred", id="middleware-raises"),
        pytest.param("outer.crash", "Internal error occurred", id="inner-module-raises"),
    ],
)
async def test_a_guard_of_the_executor_is_told_without_its_details(
    guarded: str, tool: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with client_of(guarded) as client:
        result = await client.call_tool(tool, {})
    failure(result, text)
    (record,) = errors_logged(caplog)
    assert re.search(r"Error: .*(door|slow|33|round|often|/etc/passwd)", record.getMessage())
    said = result.model_dump_json(by_alias=True)
    assert not re.search(r"call_chain|caller|@|door|deep\.|round\.|often\.|/etc", said)


class Odd(BaseModel):
    call: Callable[[], int] = int


async def wraps(inputs: dict[str, Any], context: Any) -> Any:
    try:
        return await context.executor.call_async("inner.login", {"token": SECRET_TEXT}, context)
    except ModuleError as error:
        raise RuntimeError("cannot log in") from error


async def test_what_a_called_module_may_say_of_its_secrets_is_not_logged_for_its_caller(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor is a module without a secret known to have none whose schema cannot be made."""
    login = raising(lambda: RuntimeError(f"no user has the token {SECRET_TEXT}"))
    login.input_schema = SECRETIVE
    modules: dict[str, Any] = {"inner.login": login, "inner.odd": FunctionalModule(echo, input_schema=Odd)}
    modules |= {"outer.wraps": wraps, "outer.login": calls("inner.login", token=SECRET_TEXT)}
    async with connect({**modules, "outer.odd": calls("inner.odd")}, mode=mode) as client:
        for tool in ("outer.wraps", "outer.login", "outer.odd"):
            failure(await client.call_tool(tool, {}), "Internal error occurred")
    assert len(errors_logged(caplog)) == 3
    assert SECRET_TEXT not in everything_logged(caplog)


# ---- What a module's author wrote for an agent ----

ADVICE: dict[str, Any] = {"ai_guidance": "Ask for a later day.\ud800", "suggestion": "tomorrow"}


def own() -> ModuleError:
    return ModuleError("DAY_IS_FULL", "no room on 2026-02-03", **ADVICE)


# Who fails and how, and whether the agent hears the advice.
ADVISED: list[Any] = [
    pytest.param({"demo.book": raising(own)}, True, id="own-error"),
    pytest.param({"demo.book": raising(lambda: InvalidInputError("no", **ADVICE))}, False, id="code-of-apcore"),
    pytest.param({"demo.book": calls("inner.book"), "inner.book": raising(own)}, False, id="of-a-module-it-called"),
    pytest.param({"demo.book": FunctionalModule(raising(own).execute, input_schema=SECRETIVE)}, False, id="sensitive"),
]


@pytest.mark.parametrize(("modules", "told"), ADVISED)
async def test_the_advice_of_a_modules_author_reaches_the_agent(
    modules: dict[str, Any], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect(modules) as client:
        report = failure(await client.call_tool("demo.book", {}))
    advice = {key: report[key] for key in ADVICE if key in report}
    if told:
        assert report["error_message"] == "Module error: DAY_IS_FULL\nAsk for a later day.?"
        assert advice == {"ai_guidance": "Ask for a later day.?", "suggestion": "tomorrow"}
        assert "ModuleError: no room on 2026-02-03" in errors_logged(caplog)[0].getMessage()
    else:
        assert "later day" not in report["error_message"]
        assert advice == {}


# ---- Validation ----


class Size(BaseModel):
    width: int
    height: int


class Picture(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(min_length=2)
    size: Size
    tags: list[str] = []
    sizes: list[Size] = []
    kind: Literal["png", "jpeg"] = "png"
    back: Size | None = None


class Box(BaseModel):
    kind: Literal["box"]
    width: int


class Ball(BaseModel):
    kind: Literal["ball"]
    radius: int


class Parcel(BaseModel):
    inside: Box | Ball | None = None
    marked: Annotated[Box | Ball, Field(discriminator="kind")] | None = None
    note: str | int | None = None


PICTURE = {"name": "cat", "size": {"width": 1, "height": 2}}
TYPE, REQUIRED = {"type", "int_type", "string_type"}, {"required", "missing"}

# The arguments, and each wrong field with the codes that a model or a dict schema may give for it.
WRONG: list[Any] = [
    pytest.param({**PICTURE, "name": "x"}, {"name": {"minLength", "string_too_short"}}, id="length"),
    pytest.param({**PICTURE, "kind": "gif"}, {"kind": {"enum", "literal_error"}}, id="enum"),
    pytest.param({**PICTURE, "size": {"width": "1", "height": 2}}, {"size.width": TYPE}, id="nested"),
    pytest.param({**PICTURE, "back": {"width": 1, "height": "2"}}, {"back.height": TYPE}, id="optional"),
    pytest.param({**PICTURE, "back": {}}, {"back.width": REQUIRED, "back.height": REQUIRED}, id="missing-in-optional"),
    pytest.param({**PICTURE, "sizes": [{"width": 1}]}, {"sizes.0.height": REQUIRED}, id="missing-in-a-list"),
    pytest.param(
        {"name": 5, "tags": [None], "size": {"width": []}},
        {"name": TYPE, "tags.0": TYPE, "size.width": TYPE, "size.height": REQUIRED},
        id="several",
    ),
]
# Of a union, what each branch of a model's says, and what is among that of a dict schema's.
UNIONS: list[Any] = [
    pytest.param(
        {"inside": {"kind": "box"}},
        {"inside.Box.width", "inside.Ball.kind", "inside.Ball.radius"},
        {"inside.width"},
        id="objects",
    ),
    pytest.param({"marked": {"kind": "ball"}}, {"marked.ball.radius"}, {"marked.radius"},
                 id="tagged"),
    pytest.param({"note": []}, {"note.str", "note.int"}, {"note"}, id="simple-types"),
]  # fmt: skip


class Counter(Middleware):
    """Counts the calls that reach the Executor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
        self.calls.append(module_id)


Validating = tuple[str, list[str], Counter, bool]


@pytest.fixture(scope="module", params=[False, True], ids=["apcore-validates", "validate_inputs"])
def validating(request: pytest.FixtureRequest) -> Iterator[Validating]:
    """A server of `Picture` takers, what ran on it, and what its Executor saw; with and without validate_inputs."""
    ran: list[str] = []

    def run(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        ran.append("ran")
        return {"given": inputs}

    registry = registry_of(
        {
            "takes.model": FunctionalModule(run, input_schema=Picture),
            "takes.dict": FunctionalModule(run, input_schema=Picture.model_json_schema()),
            "parcel.model": FunctionalModule(run, input_schema=Parcel),
            "parcel.dict": FunctionalModule(run, input_schema=Parcel.model_json_schema()),
        }
    )
    counter = Counter()
    with serving(Executor(registry, middlewares=[counter]), validate_inputs=request.param) as url:
        yield url, ran, counter, request.param


@pytest.mark.requirement("FR-ERROR-002")
@pytest.mark.parametrize(("arguments", "expected"), WRONG)
async def test_each_wrong_argument_is_named_with_its_path(
    validating: Validating, arguments: dict[str, Any], expected: dict[str, set[str]]
) -> None:
    url, ran, counter, before_executor = validating
    ran.clear()
    counter.calls.clear()
    async with client_of(url) as client:
        results = [await client.call_tool(tool, arguments) for tool in ("takes.model", "takes.dict")]
    for result in results:
        report = failure(result)
        lines = [line for line in lines_of(report) if not line[1].endswith("is not of type 'null'")]  # a branch, too
        assert sorted(field for field, _, _ in lines) == sorted(expected)
        assert [line for line in lines if line[2] not in expected[line[0]]] == []
        assert [message for _, message, code in lines if code in REQUIRED and message != "Field required"] == []
        assert report["error_type"] == "SCHEMA_VALIDATION_ERROR"
        assert report["user_fixable"] is True
    assert ran == []
    assert bool(counter.calls) != before_executor


@pytest.mark.parametrize(("arguments", "of_model", "of_dict"), UNIONS)
async def test_of_a_union_all_branches_for_such_a_value_are_told(
    validating: Validating, arguments: dict[str, Any], of_model: set[str], of_dict: set[str]
) -> None:
    """The design's "Errors": what an agent needs to repair its call; of no branch is known that it was meant."""
    async with client_of(validating[0]) as client:
        by_model = lines_of(failure(await client.call_tool("parcel.model", arguments)))
        by_dict = lines_of(failure(await client.call_tool("parcel.dict", arguments)))
    assert {field for field, _, _ in by_model} == of_model
    assert of_dict <= {field for field, _, _ in by_dict}
    assert "under any of" not in json.dumps(by_dict)


async def test_an_argument_too_many_is_told_and_the_right_ones_reach_the_module(validating: Validating) -> None:
    async with client_of(validating[0]) as client:
        of_model = failure(await client.call_tool("takes.model", {**PICTURE, "color": "red"}))
        of_dict = failure(await client.call_tool("takes.dict", {**PICTURE, "color": "red"}))
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
async def test_a_wrong_output_is_the_modules_fault_and_its_values_stay_inside(schema: Any) -> None:
    def answer(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"count": "inner-value", "nested": {"width": "other-value"}}

    async with connect({"gives.wrong": FunctionalModule(answer, output_schema=schema)}) as client:
        result = await client.call_tool("gives.wrong", {})
    report = failure(result)
    told = {field: message for field, message, _ in lines_of(report, "Output validation failed:")}
    wrong = "Value is not valid"
    assert told == {"count": wrong, "nested.width": wrong, "nested": "Field required"}
    assert report["user_fixable"] is False
    assert [v for v in ("inner-value", "other-value") if v in result.model_dump_json(by_alias=True)] == []


@pytest.mark.parametrize("schema", [Size, Size.model_json_schema()], ids=["model", "dict"])
@pytest.mark.parametrize("inner", ["inputs", "output"])
async def test_the_mistake_of_a_module_that_calls_another_is_not_the_clients(
    schema: Any, inner: str, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {"width": "inner-value", "height": 1}
    if inner == "inputs":
        module = FunctionalModule(echo, input_schema=schema)
    else:
        module = FunctionalModule(lambda inputs, context: dict(wrong), output_schema=schema)
    modules = {
        "outer.caller": FunctionalModule(calls("inner.called", **wrong), input_schema=Size),
        "inner.called": module,
    }
    async with connect(modules) as client:
        result = await client.call_tool("outer.caller", {"width": 1, "height": 2})
    report = failure(result, "Module error: SCHEMA_VALIDATION_ERROR")
    said = result.model_dump_json(by_alias=True)
    assert [word for word in ("inner-value", "inner.called", "width", "Input validation") if word in said] == []
    assert "error_details" not in report
    assert report["user_fixable"] is False
    assert "width" in errors_logged(caplog)[0].getMessage()


async def test_arguments_that_middleware_spoils_are_told_as_apcore_found_them() -> None:
    class Spoils(Middleware):
        def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
            return {**inputs, "width": "wide"}

    registry = registry_of({"takes.size": FunctionalModule(echo, input_schema=Size)})
    async with connect(Executor(registry, middlewares=[Spoils()])) as client:
        wrong = failure(await client.call_tool("takes.size", {"width": 1, "height": 2}))
    assert lines_of(wrong) == [("width", "Input should be a valid integer", "type")]


# ---- Functions ----


@pytest.mark.parametrize("validate_inputs", [False, True])
async def test_an_argument_that_a_function_does_not_take_is_named_before_it_runs(validate_inputs: bool) -> None:
    """Passed on, it would be a TypeError inside apcore: "Internal error occurred"."""
    ran: list[str] = []

    def shout(text: str, loud: bool = False) -> dict[str, Any]:
        """Shout."""
        ran.append(text)
        return {"text": text.upper()}

    def keep(text: str, **more: int) -> dict[str, Any]:
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
    assert refused["error_type"] == "SCHEMA_VALIDATION_ERROR"
    assert refused["user_fixable"] is True
    assert fine.structured_content == {"text": "A"}
    assert open_to_more.structured_content == {"text": "a", "volume": 3}
    assert ran == ["a"]


# ---- What a client can make an answer cost ----

SLOW = Field(pattern=r"^(\w+\s?)+$")


class Costly(BaseModel):
    title: Annotated[str, SLOW] = ""
    titles: dict[Annotated[str, SLOW], int] = {}
    tags: set[int | str] = set()
    names: list[str] = []
    name: Literal["x"] = "x"
    by_name: dict[str, int] = {}
    need: int


KINDS = [{"properties": {"kind": {"const": f"k{i}"}}, "required": [f"v{i}"]} for i in range(2_000)]


@pytest.fixture(scope="module", params=[False, True], ids=["apcore-validates", "validate_inputs"])
def costly(request: pytest.FixtureRequest) -> Iterator[str]:
    schema = {"type": "object", "properties": {"pet": {"anyOf": KINDS}}}
    listed = {"type": "object", "properties": {"names": {"items": {"type": "string"}}, "name": {"type": "null"}}}
    schemas: dict[str, Any] = {"takes.model": Costly, "takes.dict": listed, "takes.pets": schema}
    modules = {name: FunctionalModule(echo, input_schema=schema) for name, schema in schemas.items()}
    with serving(registry_of(modules), validate_inputs=request.param) as url:
        yield url


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"title": "a" * 28 + "!"}, id="pattern"),
        pytest.param({"titles": {"a" * 28 + "!": 1}}, id="pattern-of-names"),
        pytest.param({"tags": [i if i % 2 else f"t{i}" for i in range(12_000)]}, id="unique-items"),
    ],
)
async def test_values_are_not_looked_at_for_longer_than_by_the_model(costly: str, arguments: dict[str, Any]) -> None:
    """To Python's `re` 28 letters take a minute, and to jsonschema a set of 12,000; the model takes milliseconds."""
    async with client_of(costly) as client:
        lines = lines_of(failure(await client.call_tool("takes.model", arguments)))
    assert ("need", "Field required", "missing") in lines


async def test_an_answer_lists_twenty_errors_and_shortens_each(costly: str, caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(costly) as client:
        for tool in ("takes.model", "takes.dict"):
            many = lines_of(failure(await client.call_tool(tool, {"names": [*range(10_000)], "need": 1})))
            assert [field for field, _, _ in many] == [f"names.{i}" for i in range(20)]
        kinds = lines_of(failure(await client.call_tool("takes.pets", {"pet": {"kind": "k"}})))
        assert len(kinds) == 20
        long = await client.call_tool("takes.dict", {"name": "y" * 200_000})
        named = await client.call_tool("takes.model", {"by_name": {"y" * 200_000: "z"}, "need": 1})
    for result in (long, named):
        ((field, message, _),) = lines_of(failure(result))
        assert 1000 <= len(field) + len(message) <= 2000
    assert max(len(record.getMessage()) for record in errors_logged(caplog)) < 20_000


async def test_errors_that_are_texts_are_told(mode: str) -> None:
    def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        raise SchemaValidationError("no", cast(Any, ["the first is wrong"]))

    async with connect({"demo.fail": fail}, mode=mode) as client:
        result = await client.call_tool("demo.fail", {})
    assert text_of(result) == "Input validation failed:\n- (root): the first is wrong (invalid)"
