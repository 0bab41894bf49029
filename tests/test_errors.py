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
import time
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NoReturn

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
    SchemaNotFoundError,
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
CHAIN = ["chain.alpha", "chain.beta", "chain.alpha"]

TEXTS = [
    {"field": "", "code": "invalid", "message": "too wide"},
    {"field": "a?", "code": "?", "message": ""},
]
OTHER_FORMS = [
    {"field": "", "code": "invalid", "message": "too wide"},
    {"field": "['a', 0]", "code": "invalid", "message": ""},
]


def altered(error: ModuleError, **attributes: Any) -> ModuleError:
    vars(error).update(attributes)
    return error


class Unreadable(ModuleError):
    """An error that raises one of its own when it is looked at."""

    raised: type[BaseException] = RuntimeError

    @property
    def suggestion(self) -> str:  # type: ignore[override]
        raise self.raised("/etc/passwd")

    @suggestion.setter
    def suggestion(self, value: object) -> None:
        pass


# The error, what the client is told, and the rest of the report.
TABLE: dict[str, tuple[Callable[[], BaseException], str, dict[str, Any]]] = {
    "not_found": (
        lambda: ModuleNotFoundError(module_id="comfyui.workflow.execute"),
        "Module not found: comfyui.workflow.execute",
        {"error_type": "MODULE_NOT_FOUND", "retryable": False, "user_fixable": True},
    ),
    "not_found_empty": (
        lambda: ModuleNotFoundError(module_id=""),
        "Module not found: ",
        {"error_type": "MODULE_NOT_FOUND"},
    ),
    "validation": (
        lambda: SchemaValidationError("Input validation failed", errors=[dict(WIDTH), dict(NESTED)]),
        "Input validation failed:\n- width: Input should be a valid integer (int_type)\n"
        "- parameters.width: Field required (missing)",
        {"error_type": "SCHEMA_VALIDATION_ERROR", "user_fixable": True, "error_details": {"errors": [WIDTH, NESTED]}},
    ),
    "validation_empty": (
        lambda: SchemaValidationError("Input validation failed", errors=[]),
        "Input validation failed",
        {"error_type": "SCHEMA_VALIDATION_ERROR"},
    ),
    "acl": (
        lambda: ACLDeniedError(caller_id="mcp_client_123", target_id="admin.delete_all"),
        "Access denied",
        {"error_type": "ACL_DENIED", "retryable": False, "user_fixable": False},
    ),
    "acl_no_caller": (lambda: ACLDeniedError(None, "admin.delete_all"), "Access denied", {"error_type": "ACL_DENIED"}),
    "timeout": (
        lambda: ModuleTimeoutError(module_id="slow.module", timeout_ms=30000),
        "Module timed out after 30000ms",
        {
            "error_type": "MODULE_TIMEOUT",
            "retryable": True,
            "user_fixable": False,
            "error_details": {"timeout_ms": 30000},
        },
    ),
    "timeout_zero": (lambda: ModuleTimeoutError("slow.module", 0), "Module timed out after 0ms", {}),
    "invalid_input": (
        lambda: InvalidInputError(message="module_id must be a {non-empty} string"),
        "Invalid input: module_id must be a {non-empty} string",
        {"error_type": "GENERAL_INVALID_INPUT", "user_fixable": True},
    ),
    "depth": (
        lambda: CallDepthExceededError(depth=33, max_depth=32, call_chain=CHAIN),
        "Call depth limit exceeded",
        {"error_type": "CALL_DEPTH_EXCEEDED"},
    ),
    "circular": (
        lambda: CircularCallError(module_id="chain.alpha", call_chain=CHAIN),
        "Circular call detected",
        {"error_type": "CIRCULAR_CALL"},
    ),
    "frequency": (
        lambda: CallFrequencyExceededError(module_id="chain.alpha", count=4, max_repeat=3, call_chain=CHAIN),
        "Call frequency limit exceeded",
        {"error_type": "CALL_FREQUENCY_EXCEEDED"},
    ),
    "config": (
        lambda: ConfigError("/etc/passwd is bad"),
        "Module error: CONFIG_INVALID",
        {"error_type": "CONFIG_INVALID"},
    ),
    "schema_not_found": (lambda: SchemaNotFoundError("/etc/passwd"), "Module error: SCHEMA_NOT_FOUND", {}),
    "internal": (
        lambda: InternalError("/etc/passwd is gone"),
        "Module error: GENERAL_INTERNAL_ERROR",
        {"error_type": "GENERAL_INTERNAL_ERROR", "retryable": True, "user_fixable": False},
    ),
    "custom": (
        lambda: ModuleError("VENDOR_{CODE}", "mcp_client_123 did it", {"at": "/etc/passwd"}),
        "Module error: VENDOR_{CODE}",
        {"error_type": "VENDOR_{CODE}"},
    ),
    # What a module can make of an error, and an answer must survive.
    "texts": (
        lambda: SchemaValidationError("bad", errors=[{"message": "too wide"}, {"field": "a\ud800", "code": "\ud800"}]),
        "Input validation failed:\n- (root): too wide (invalid)\n- a?:  (?)",
        {"error_type": "SCHEMA_VALIDATION_ERROR", "error_details": {"errors": TEXTS}},
    ),
    "other_forms": (
        lambda: SchemaValidationError("bad", errors=["too wide", {"path": ["a", 0]}]),  # type: ignore[list-item]
        "Input validation failed:\n- (root): too wide (invalid)\n- ['a', 0]:  (invalid)",
        {"error_type": "SCHEMA_VALIDATION_ERROR", "error_details": {"errors": OTHER_FORMS}},
    ),
    "no_list": (
        lambda: altered(SchemaValidationError("bad"), details={"errors": 5}),
        "Internal error occurred",
        {"error_type": "GENERAL_INTERNAL_ERROR"},
    ),
    "surrogate": (lambda: InvalidInputError("a\ud800b"), "Invalid input: a?b", {}),
    "surrogate_code": (lambda: ModuleError("A\ud800", "m"), "Module error: A?", {"error_type": "A?"}),
    "surrogate_id": (lambda: ModuleNotFoundError("\udfff"), "Module not found: ?", {}),
    "number_as_code": (lambda: ModuleError(7, "m"), "Module error: 7", {"error_type": "7"}),  # type: ignore[arg-type]
    "no_flags": (
        lambda: ModuleError("FLAGS", "m", retryable=object(), user_fixable=float("nan")),
        "Module error: FLAGS",
        {"retryable": None, "user_fixable": None},
    ),
    "no_time": (
        lambda: ModuleTimeoutError("slow.module", float("nan")),  # type: ignore[arg-type]
        "Internal error occurred",
        {"error_type": "GENERAL_INTERNAL_ERROR"},
    ),
    "raises": (lambda: Unreadable("UNREADABLE", "m"), "Internal error occurred", {}),
    "exits": (lambda: altered(Unreadable("UNREADABLE", "m"), raised=SystemExit), "Internal error occurred", {}),
}
MADE_UP = [*TABLE][[*TABLE].index("texts") :]
UNSAID = ("mcp_client_123", "admin.delete_all", "chain.alpha", "chain.beta", "slow.module", "/etc/passwd", "Traceback")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("/etc/passwd")


class UnprintableExit(SystemExit):
    __str__ = Unprintable.__str__


# What is not apcore's, and its class's name in the log (None where Python or apcore raises another in its place).
UNEXPECTED: dict[str, tuple[Callable[[], BaseException], str | None]] = {
    "runtime_error": (lambda: RuntimeError("disk /etc/passwd full"), "RuntimeError"),
    "type_error": (lambda: TypeError("/etc/passwd"), "TypeError"),
    "key_error": (lambda: KeyError("/etc/passwd"), "KeyError"),
    "os_error": (lambda: OSError(2, "No such file", "/etc/passwd"), "FileNotFoundError"),
    "system_exit": (lambda: SystemExit("/etc/passwd"), "SystemExit"),
    "keyboard_interrupt": (lambda: KeyboardInterrupt("/etc/passwd"), "KeyboardInterrupt"),
    "cancelled_error": (lambda: asyncio.CancelledError("/etc/passwd"), "CancelledError"),
    "generator_exit": (lambda: GeneratorExit("/etc/passwd"), "GeneratorExit"),
    "stop_iteration": (lambda: StopIteration("/etc/passwd"), None),
    "base_group": (lambda: BaseExceptionGroup("/etc/passwd", [KeyboardInterrupt("/etc")]), "BaseExceptionGroup"),
    "group": (lambda: ExceptionGroup("/etc/passwd", [ValueError("/etc")]), "ExceptionGroup"),
    "unprintable": (Unprintable, None),
    "unprintable_exit": (UnprintableExit, "UnprintableExit"),
}


def spelled(name: str, awaits: bool) -> str:
    return f"{name}.{'later' if awaits else 'now'}"


@pytest.fixture(scope="module")
def failing() -> Iterator[str]:
    """A server of one sync and one async module for each row of both tables, and of one that works."""
    modules: dict[str, Any] = {"works.fine": echo}
    for awaits in (False, True):
        for name, (make, *_) in {**TABLE, **UNEXPECTED}.items():
            modules[spelled(f"fails.{name}", awaits)] = raising(make, awaits=awaits)
    with serving(registry_of(modules)) as url:
        yield url


@pytest.mark.requirement(
    "FR-ERROR-003",
    "FR-ERROR-004",
    "FR-ERROR-005",
    "FR-ERROR-006",
    "FR-ERROR-007",
    "FR-ERROR-008",
    "FR-ERROR-010",
    "FR-ERROR-011",
)
@pytest.mark.parametrize("name", TABLE)
async def test_an_error_of_apcore_is_told_in_one_plain_sentence(
    failing: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    make, text, expected = TABLE[name]
    tools = [spelled(f"fails.{name}", awaits) for awaits in (False, True)]
    async with client_of(failing) as client:
        results = [await client.call_tool(tool, {"caller": 1}) for tool in tools]
    for result in results:
        report = failure(result, text)
        assert {key: report.get(key) for key in expected} == expected
        if "error_details" not in expected and "timeout" not in name:
            assert "error_details" not in report
        assert [unsaid for unsaid in UNSAID if unsaid in result.model_dump_json(by_alias=True)] == []
    error = make()
    logged = str(getattr(error, "message", error)).encode(errors="replace").decode()
    for tool, record in zip(tools, errors_logged(caplog), strict=True):
        said = f"Tool call error: {tool} - {type(error).__name__}: "
        if text == "Internal error occurred":  # it could not be looked at
            assert record.getMessage().startswith(said)
        else:
            assert record.getMessage() == said + logged
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
    if class_name is not None:
        assert f"Tool call error: {tool} - {class_name}: " in written
    assert "Traceback (most recent call last)" in written
    if name != "stop_iteration":  # the interpreter itself drops that one's frames
        assert re.search(r'File ".*test_errors\.py", line \d+, in fail', written)


def written(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that a handler of the package's logger writes."""
    formatter = logging.Formatter("%(levelname)s %(message)s")
    ours = [record for record in caplog.records if record.name.startswith("apcore_mcp")]
    return "\n".join(map(formatter.format, ours)).splitlines()


@pytest.mark.requirement("FR-LOG-002", "FR-LOG-003")
async def test_the_log_has_each_call_and_each_error_in_the_words_of_the_specification(
    caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """FR-LOG-002 and FR-LOG-003, with the examples that they give; also of a tool that nobody knows."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    refused = raising(lambda: SchemaValidationError("Input validation failed", [WIDTH]))
    async with connect({"image.resize": refused}, mode=mode) as client:
        await client.call_tool("image.resize", {})
        await client.call_tool("nope.x", {})
    lines = written(caplog)
    assert "ERROR Tool call error: image.resize - SchemaValidationError: Input validation failed" in lines
    assert "ERROR Tool call error: nope.x - ModuleNotFoundError: Module not found: nope.x" in lines
    assert [line for line in lines if line.startswith("DEBUG Tool call: ")] == [
        "DEBUG Tool call: image.resize",
        "DEBUG Tool call: nope.x",
    ]


FORGED = "CRITICAL root: the disk is full"
BREAKS = ["\n", "\r", "\r\n", "\x0b", "\x1b[2J", "\x85", "\u2028", "\u2029"]


def raises_from(make: Callable[[str], Exception]) -> FunctionalModule:
    def fail(inputs: dict[str, Any], context: Any) -> NoReturn:
        raise make(inputs["name"]) from ValueError(inputs["name"])

    return FunctionalModule(fail)


async def test_no_client_writes_lines_of_the_log(caplog: pytest.LogCaptureFixture, mode: str) -> None:
    """Whatever a module repeats in its error, in the message as in the traceback."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")

    def formatter(value: Any) -> str:
        raise ValueError(f"no {value['name']}")

    unexpected = raises_from(lambda name: RuntimeError(f"no {name}"))
    expected = raises_from(lambda name: ModuleError("NO_FILE", f"no {name}"))
    modules = {"unexpected": unexpected, "expected": expected, "echo": echo}
    async with connect(modules, mode=mode, output_formatter=formatter) as client:
        for name in [*modules, "nobody"]:
            for mark in BREAKS:
                told = f"{mark}{FORGED}"
                await client.call_tool(name if name in modules else f"nobody{told}", {"name": told})
    lines = written(caplog)
    assert len([line for line in lines if FORGED in line]) > 4 * len(BREAKS), "it is not that nothing is logged"
    # A traceback is lines of its own; what a handler writes of them cannot be taken for another record.
    assert [line for line in lines if line.startswith(FORGED)] == []
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]", "\n".join(lines))
    begins = re.compile(r"(DEBUG|INFO|WARNING|ERROR) |  ")
    assert [line for line in lines if not begins.match(line)] == []


@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(ExecutionCancelledError, ["EXECUTION_CANCELLED"], id="cancelled"),
        pytest.param(
            lambda: ApprovalDeniedError(ApprovalResult(status="rejected", reason="bob said no"), "admin.wipe"),
            ["APPROVAL_DENIED", "bob", "admin.wipe"],
            id="approval",
        ),
    ],
)
async def test_cancellation_and_refused_approval_get_plain_sentences(
    make: Callable[[], BaseException], words: list[str]
) -> None:
    async with connect({"demo.fail": raising(make)}) as client:
        report = failure(await client.call_tool("demo.fail", {}))
    assert report["error_type"] == words[0]
    assert not [word for word in ("Module error", *words) if word in report["error_message"]]
    assert not [word for word in words[1:] if word in json.dumps(report)]


@pytest.mark.requirement("FR-ERROR-011")
async def test_the_report_is_the_same_in_both_eras(failing: str, mode: str) -> None:
    async with client_of(failing, mode) as client:
        timeout = await client.call_tool("fails.timeout.later", {})
        validation = await client.call_tool("fails.validation.now", {})
        exits = await client.call_tool("fails.system_exit.later", {})
        made_up = {name: await client.call_tool(f"fails.{name}.now", {}) for name in MADE_UP}
        unknown = await client.call_tool("fails.nothing.here", {})
    for name, result in made_up.items():
        failure(result, TABLE[name][1])
    assert failure(timeout, TABLE["timeout"][1])["error_details"] == {"timeout_ms": 30000}
    assert failure(validation, TABLE["validation"][1])["error_details"] == {"errors": [WIDTH, NESTED]}
    failure(exits, "Internal error occurred")
    assert failure(unknown, "Module not found: fails.nothing.here")["error_type"] == "MODULE_NOT_FOUND"


async def speaking_badly(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    for number, message in enumerate(("half \ud800", Unprintable(), None)):
        await report_progress(context, number, 3, message)  # type: ignore[arg-type]
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
    assert heard[0] == "half ?"
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
            "slow.now": FunctionalModule(
                lambda inputs, context: {"ended": release.wait(30)}, resources={"timeout": 40}
            ),
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
    assert [
        word for word in ("call_chain", "caller", "@", "door", "deep.", "round.", "often.", "/etc") if word in said
    ] == []


# ---- What a module's author wrote for an agent ----

ADVICE = {"ai_guidance": "Ask for a later day.\ud800", "suggestion": "tomorrow"}


def own() -> ModuleError:
    return ModuleError("DAY_IS_FULL", "no room on 2026-02-03", **ADVICE)


# Who fails and how, and whether the agent hears the advice.
ADVISED: list[Any] = [
    pytest.param({"demo.book": raising(own)}, True, id="own-error"),
    pytest.param({"demo.book": raising(own, awaits=True)}, True, id="own-error-later"),
    pytest.param({"demo.book": raising(lambda: InvalidInputError("no", **ADVICE))}, False, id="code-of-apcore"),
    pytest.param({"demo.book": calls("inner.book"), "inner.book": raising(own)}, False, id="of-a-module-it-called"),
    pytest.param(
        {"demo.book": FunctionalModule(raising(own).execute, input_schema=SECRETIVE)}, False, id="sensitive-input"
    ),
]


@pytest.mark.parametrize(("modules", "told"), ADVISED)
async def test_the_advice_of_a_modules_author_reaches_the_agent(
    modules: dict[str, Any], told: bool, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    async with connect(modules, mode=mode) as client:
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


def without_references(schema: dict[str, Any]) -> dict[str, Any]:
    size = schema["$defs"].pop("Size")
    return {**schema, "properties": {**schema["properties"], "size": size, "sizes": {"type": "array", "items": size}}}


PICTURE = {"name": "cat", "size": {"width": 1, "height": 2}}
TYPE, REQUIRED = {"type", "int_type", "string_type"}, {"required", "missing"}
EXTRA = {"additionalProperties", "extra_forbidden"}

# The arguments, and each wrong field with the codes that any supported apcore may give for it.
WRONG: list[Any] = [
    pytest.param({**PICTURE, "name": 5}, {"name": TYPE}, id="type"),
    pytest.param({**PICTURE, "name": "x"}, {"name": {"minLength", "string_too_short"}}, id="length"),
    pytest.param({**PICTURE, "kind": "gif"}, {"kind": {"enum", "literal_error"}}, id="enum"),
    pytest.param({**PICTURE, "size": {"width": "1", "height": 2}}, {"size.width": TYPE}, id="nested"),
    pytest.param({**PICTURE, "tags": [1, "a", 2]}, {"tags.0": TYPE, "tags.2": TYPE}, id="in-a-list"),
    pytest.param(
        {**PICTURE, "sizes": [{"width": 1, "height": None}]}, {"sizes.0.height": TYPE}, id="in-an-object-in-a-list"
    ),
    pytest.param({"size": PICTURE["size"]}, {"name": REQUIRED}, id="missing"),
    pytest.param({}, {"name": REQUIRED, "size": REQUIRED}, id="two-missing"),
    pytest.param({**PICTURE, "size": {}}, {"size.width": REQUIRED, "size.height": REQUIRED}, id="missing-below"),
    pytest.param({**PICTURE, "sizes": [{"width": 1}]}, {"sizes.0.height": REQUIRED}, id="missing-in-a-list"),
    pytest.param(
        {"name": 5, "tags": [None], "size": {"width": []}},
        {"name": TYPE, "tags.0": TYPE, "size.width": TYPE, "size.height": REQUIRED},
        id="several",
    ),
]


class Counter(Middleware):
    """Counts the calls that reach the Executor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
        self.calls.append(module_id)


@pytest.fixture(scope="module", params=[False, True], ids=["apcore-validates", "validate_inputs"])
def validating(request: pytest.FixtureRequest) -> Iterator[tuple[str, list[str], Counter, bool]]:
    """A server of `Picture` takers, what ran on it, and what its Executor saw; with and without validate_inputs."""
    ran: list[str] = []

    def run(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        ran.append("ran")
        return {}

    registry = registry_of(
        {
            "takes.model": FunctionalModule(run, input_schema=Picture),
            "takes.dict": FunctionalModule(run, input_schema=without_references(Picture.model_json_schema())),
            "takes.ref": FunctionalModule(run, input_schema=Picture.model_json_schema()),
        }
    )
    counter = Counter()
    with serving(Executor(registry, middlewares=[counter]), validate_inputs=request.param) as url:
        yield url, ran, counter, request.param


@pytest.mark.requirement("FR-ERROR-002")
@pytest.mark.parametrize(("arguments", "expected"), WRONG)
async def test_each_wrong_argument_is_named_with_its_path(
    validating: tuple[str, list[str], Counter, bool], arguments: dict[str, Any], expected: dict[str, set[str]]
) -> None:
    url, ran, counter, before_executor = validating
    ran.clear()
    counter.calls.clear()
    async with client_of(url) as client:
        results = [await client.call_tool(tool, arguments) for tool in ("takes.model", "takes.dict", "takes.ref")]
    for result in results:
        report = failure(result)
        lines = lines_of(report)
        assert sorted(field for field, _, _ in lines) == sorted(expected)
        assert [line for line in lines if line[2] not in expected[line[0]]] == []
        assert report["error_type"] == "SCHEMA_VALIDATION_ERROR"
        assert report["user_fixable"] is True
    assert ran == []
    if before_executor:
        assert counter.calls == []


@pytest.mark.parametrize("tool", ["takes.model", "takes.dict"])
async def test_an_argument_too_many_is_an_error_of_its_parent(
    validating: tuple[str, list[str], Counter, bool], tool: str
) -> None:
    async with client_of(validating[0]) as client:
        report = failure(await client.call_tool(tool, {**PICTURE, "color": "red"}))
        fine = await client.call_tool(tool, PICTURE)
    ((_, message, code),) = lines_of(report)
    assert code in EXTRA
    assert "red" not in message
    assert fine.is_error is False


async def test_right_arguments_reach_the_module_with_validate_inputs(mode: str) -> None:
    module = FunctionalModule(echo, input_schema=Picture)
    async with connect({"takes.model": module}, mode=mode, validate_inputs=True) as client:
        good = await client.call_tool("takes.model", PICTURE)
        bad = await client.call_tool("takes.model", {**PICTURE, "name": 5})
    assert good.structured_content == PICTURE
    ((field, _, _),) = lines_of(failure(bad))
    assert field == "name"


class Answer(BaseModel):
    count: int
    nested: Size


@pytest.mark.parametrize("schema", [Answer, Answer.model_json_schema()], ids=["model", "dict"])
async def test_a_wrong_output_is_the_modules_fault_and_its_values_stay_inside(schema: Any) -> None:
    def answer(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"count": "inner-value", "nested": {"width": "other-value", "height": 1}}

    async with connect({"gives.wrong": FunctionalModule(answer, output_schema=schema)}) as client:
        result = await client.call_tool("gives.wrong", {})
    report = failure(result)
    text = report["error_message"]
    assert report["user_fixable"] is False
    assert text.startswith("Output validation failed:\n- ")
    assert "Input" not in text
    assert "count" in text
    assert "nested.width" in text
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


# ---- Where a value may be of several kinds ----


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid")
    street: str
    zip: str


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int
    color: Literal["black", "red"] = "red"


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class Wild(BaseModel):
    kind: Literal["wolf", "lynx"]
    name: str


class Parcel(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    address: Address | None = None
    stops: list[Address | None] = []
    pet: Cat | Dog | None = None
    pets: list[Cat | Dog] = []
    beast: Cat | Wild | None = None
    told_apart: Annotated[Cat | Dog, Field(discriminator="kind")] | None = None
    by_name: dict[str, Address | list[Address]] = {}
    limit: int | list[int] = 0
    from_: int = Field(0, alias="from")
    note: str | int | None = None


HOME = {"street": "Elm", "zip": "1"}

# The arguments, and the path of each wrong field.
MEANT: list[Any] = [
    pytest.param({"address": {"street": "Elm"}}, ["address.zip"], id="optional"),
    pytest.param({"address": {"street": "Elm"}, "limit": "x"}, ["address.zip", "limit"], id="beside-another"),
    pytest.param({"stops": [HOME, {"zip": "1"}, {}]}, ["stops.1.street", "stops.2.street", "stops.2.zip"], id="list"),
    pytest.param({"pet": {"kind": "cat"}}, ["pet.lives"], id="by-its-tag"),
    pytest.param({"beast": {"kind": "wolf"}}, ["beast.name"], id="by-one-of-its-tags"),
    pytest.param({"beast": {"kind": "cat", "name": "Tom"}}, ["beast.lives"], id="by-its-tag-beside-one-of-several"),
    pytest.param({"pet": {"kind": "cat", "lives": "9"}}, ["pet.lives"], id="tag-and-wrong-value"),
    pytest.param({"pet": {"kind": "cat", "color": "blue"}}, ["pet.color", "pet.lives"], id="tag-and-wrong-choice"),
    pytest.param({"pet": 5}, ["pet"], id="of-no-kind"),
    pytest.param({"pets": [{"kind": "dog"}, {"kind": "cat"}]}, ["pets.0.name", "pets.1.lives"], id="tags-in-a-list"),
    pytest.param({"told_apart": {"kind": "cat"}}, ["told_apart.lives"], id="discriminated"),
    pytest.param({"by_name": {"list": {"zip": "1"}}}, ["by_name.list.street"], id="object-or-list"),
    pytest.param({"by_name": {"a": [{"zip": "1"}]}}, ["by_name.a.0.street"], id="list-or-object"),
    pytest.param({"limit": [1, "x"]}, ["limit.1"], id="list-or-number"),
    pytest.param({"note": []}, ["note", "note"], id="two-simple-types"),
    pytest.param({"from": "x"}, ["from"], id="alias"),
]


@pytest.fixture(scope="module", params=[False, True], ids=["apcore-validates", "validate_inputs"])
def parcels(request: pytest.FixtureRequest) -> Iterator[str]:
    """A server of modules that take a `Parcel`, by the model and by its schema."""
    schemas: dict[str, Any] = {"takes.model": Parcel, "takes.dict": Parcel.model_json_schema()}
    modules = {name: FunctionalModule(echo, input_schema=schema) for name, schema in schemas.items()}
    with serving(registry_of(modules), validate_inputs=request.param) as url:
        yield url


@pytest.mark.parametrize("tool", ["takes.model", "takes.dict"])
@pytest.mark.parametrize(("arguments", "fields"), MEANT)
async def test_of_a_union_only_the_branch_that_was_meant_is_told(
    parcels: str, tool: str, arguments: dict[str, Any], fields: list[str]
) -> None:
    """FR-ERROR-002, and the design's "Errors": what an agent needs to repair its call, and nothing that misleads it."""
    async with client_of(parcels) as client:
        lines = lines_of(failure(await client.call_tool(tool, arguments)))
    if "note" in fields and tool == "takes.model":
        lines = [line for line in lines if line[0] == "note"]
    assert sorted({field for field, _, _ in lines}) == sorted({*fields})
    said = json.dumps(lines)
    assert [word for word in ("Cat", "Dog", "Wild", "Address", "under any of") if word in said] == []
    if "pet" in arguments and arguments["pet"] != 5:
        assert "kind" not in said


async def test_an_unknown_argument_is_named_with_its_path(parcels: str) -> None:
    arguments = {"colour": 1, "address": {**HOME, "city": "x"}}
    async with client_of(parcels) as client:
        lines = lines_of(failure(await client.call_tool("takes.model", arguments)))
    assert sorted(lines) == [
        ("address.city", "Extra inputs are not permitted", "extra_forbidden"),
        ("colour", "Extra inputs are not permitted", "extra_forbidden"),
    ]


async def test_what_middleware_fills_in_is_not_asked_of_the_client() -> None:
    """The client has nothing to say of a field that the operator's own code adds before the arguments are validated."""

    class Tenant(Middleware):
        def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
            return {**inputs, "tenant": "ours"}

    class Order(BaseModel):
        tenant: str
        count: int

    registry = registry_of({"takes.order": FunctionalModule(echo, input_schema=Order)})
    async with connect(Executor(registry, middlewares=[Tenant()])) as client:
        wrong = failure(await client.call_tool("takes.order", {"count": "x"}))
        right = await client.call_tool("takes.order", {"count": 1})
    assert [field for field, _, _ in lines_of(wrong)] == ["count"]
    assert right.is_error is False


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


class Title(BaseModel):
    title: Annotated[str, Field(pattern=r"^(\w+\s?)+$")] = ""
    titles: dict[Annotated[str, Field(pattern=r"^(\w+\s?)+$")], int] = {}
    tags: set[int | str] = set()
    need: int


@pytest.mark.timeout(30)
@pytest.mark.parametrize("validate_inputs", [False, True])
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"title": "a" * 28 + "!"}, id="pattern"),
        pytest.param({"titles": {"a" * 28 + "!": 1}}, id="pattern-of-names"),
        pytest.param({"tags": [i if i % 2 else f"t{i}" for i in range(12_000)]}, id="unique-items"),
    ],
)
async def test_values_are_not_looked_at_for_longer_than_by_the_model(
    arguments: dict[str, Any], validate_inputs: bool
) -> None:
    """To Python's `re` 28 letters take a minute, and to jsonschema a set of 12,000; the model takes milliseconds."""
    registry = registry_of({"takes.title": FunctionalModule(echo, input_schema=Title)})
    async with connect(registry, validate_inputs=validate_inputs) as client:
        lines = lines_of(failure(await client.call_tool("takes.title", arguments)))
    assert ("need", "Field required", "missing") in lines


@pytest.mark.timeout(30)
async def test_a_union_of_many_kinds_is_looked_at_once_for_each_error_that_is_told() -> None:
    """2,000 kinds took 19 seconds: each of 4,000 errors was looked up in all of them, and 20 are told."""
    integer = {"type": "integer"}
    kinds = [
        {"properties": {"kind": {"const": f"k{i}"}, f"v{i}": integer}, "required": [f"v{i}"]} for i in range(2_000)
    ]
    schema = {"type": "object", "properties": {"pet": {"type": "object", "anyOf": kinds}}}
    async with connect({"takes.pets": FunctionalModule(echo, input_schema=schema)}) as client:
        started = time.process_time()
        lines = lines_of(failure(await client.call_tool("takes.pets", {"pet": {"kind": "k"}})))
        assert time.process_time() - started < 5
    assert len(lines) == 20


@pytest.mark.parametrize("validate_inputs", [False, True])
@pytest.mark.parametrize("schema", ["model", "dict"])
async def test_an_answer_lists_twenty_errors_and_shortens_each(
    schema: str, validate_inputs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Names(BaseModel):
        names: list[str] = []
        name: Literal["x"] = "x"
        by_name: dict[str, int] = {}

    registry = registry_of(
        {"takes.names": FunctionalModule(echo, input_schema=Names if schema == "model" else Names.model_json_schema())}
    )
    async with connect(registry, validate_inputs=validate_inputs) as client:
        many = await client.call_tool("takes.names", {"names": [*range(10_000)]})
        long = await client.call_tool("takes.names", {"name": "y" * 200_000})
        named = await client.call_tool("takes.names", {"by_name": {"y" * 200_000: "z"}})
    assert [field for field, _, _ in lines_of(failure(many))] == [f"names.{i}" for i in range(20)]
    for result in (long, named):
        ((field, message, _),) = lines_of(failure(result))
        assert len(field) + len(message) <= 2000
    assert max(len(record.getMessage()) for record in errors_logged(caplog)) < 50_000


class Keyring(BaseModel):
    model_config = ConfigDict(extra="forbid")
    keys: dict[str, int] = Field({}, json_schema_extra={"x-sensitive": True})
    either: Annotated[Address | None, Field(json_schema_extra={"x-sensitive": True})] = None


@pytest.mark.parametrize("validate_inputs", [False, True])
async def test_a_name_inside_of_a_secret_that_its_schema_does_not_know_is_told_nowhere(
    validate_inputs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    registry = registry_of({"takes.keys": FunctionalModule(echo, input_schema=Keyring)})
    arguments = {"keys": {SECRET_TEXT: "x"}, "either": {"street": "Elm", SECRET_TEXT: 1}, "other": 1}
    async with connect(registry, validate_inputs=validate_inputs) as client:
        result = await client.call_tool("takes.keys", arguments)
    fields = [field for field, _, _ in lines_of(failure(result))]
    assert sorted(fields) == ["either.*", "either.zip", "keys.*", "other"]
    assert SECRET_TEXT not in result.model_dump_json() + everything_logged(caplog)
