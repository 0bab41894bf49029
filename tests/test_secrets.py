"""What is marked `x-sensitive` leaves neither in results nor in messages nor in the log (NFR-SEC-002, -003)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import enum
import io
import json
import logging
import re
import threading
import typing
from collections import UserDict, UserList, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from datetime import date
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, NoReturn

import pytest
from apcore import ACL, Config, Context, Executor, FunctionModule, Middleware, ModuleAnnotations, ModuleError, Registry
from apcore.approval import AlwaysDenyHandler
from apcore.decorator import module as apcore_module
from apcore.errors import InvalidInputError, ModuleNotFoundError, SchemaValidationError
from apcore.module import ModuleExample
from apcore.pipeline import BaseStep, ExecutionStrategy, PipelineContext, StepResult
from apcore.schema.loader import SchemaLoader
from conftest import FunctionalModule, client_of, connect, echo, registry_of, serving
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    RootModel,
    Secret,
    SecretStr,
    SerializeAsAny,
    TypeAdapter,
    WithJsonSchema,
    computed_field,
    field_serializer,
    field_validator,
    model_serializer,
)
from support import (
    REDACTED,
    SECRET_TEXT,
    SECRETIVE,
    Array,
    StreamingModule,
    accept,
    asking,
    calls,
    errors_logged,
    everything_logged,
    failure,
    gives,
    lines_of,
    noting,
    parsed,
    success_text,
)
from typing_extensions import TypedDict

from apcore_mcp import run_openai_call
from apcore_mcp.core import Catalog, options_of
from apcore_mcp.hints import core_schema_of, is_open

SECRET_PIN = 918273645


# ---- x-sensitive arguments ----


def sensitive(**schema: Any) -> dict[str, Any]:
    return {"x-sensitive": True, **schema}


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


class Login(BaseModel):
    user: str
    password: str = Field(json_schema_extra={"x-sensitive": True})

    @field_validator("password")
    @classmethod
    def refuse(cls, value: str) -> str:
        raise ValueError(f"{value} is on a list")


class Logins(BaseModel):
    logins: list[Login]
    limit: int = 0


TOKEN = f"{SECRET_TEXT}-token"
STRING, INTEGER = {"type": "string"}, {"type": "integer"}

# The schema, arguments that break it, and the field that must still be named.
QUOTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "at_the_field": (of(token=sensitive(type="string", maxLength=3)), {"token": TOKEN}, "token"),
    "parent": (of(auth={**of(token=sensitive()), "maxProperties": 0}), {"auth": {"token": TOKEN}}, "auth"),
    "secret_object": (of(keys=sensitive(**of(pin=STRING), additionalProperties=False)),
                      {"keys": {"pin": SECRET_PIN, SECRET_TEXT: 1}}, "keys.pin"),
    "pattern_sibling": ({**of(other=INTEGER), "patternProperties": {"^key_": sensitive()}},
                        {"key_a": TOKEN, "other": TOKEN}, "other"),
    "reference": ({**of(a={"$ref": "#/$defs/Key"}), "$defs": {"Key": sensitive(type="string", pattern="^$")}},
                  {"a": TOKEN}, "a"),
    "branch": (of(auth={"anyOf": [of(token=sensitive(maxLength=3)), {"type": "null"}]}),
               {"auth": {"token": TOKEN}}, "auth.token"),
    "model": (Login, {"user": "bob", "password": TOKEN}, "password"),
    "model_sibling": (Logins, {"logins": [], "limit": TOKEN}, "limit"),
}  # fmt: skip


@pytest.fixture(scope="module")
def quoting() -> Iterator[dict[bool, str]]:
    """Servers of a module for each row, one without and one with validate_inputs."""
    schemas = {f"takes.{name}": schema for name, (schema, _, _) in QUOTED.items()}
    registry = registry_of({name: FunctionalModule(echo, input_schema=schema) for name, schema in schemas.items()})
    with serving(registry) as url, serving(registry, validate_inputs=True) as strict_url:
        yield {False: url, True: strict_url}


@pytest.mark.requirement("NFR-SEC-002", "NFR-SEC-003")
@pytest.mark.parametrize("name", QUOTED)
async def test_a_validation_error_repeats_no_secret(
    quoting: dict[bool, str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    _, arguments, field = QUOTED[name]
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    for validate_inputs, url in quoting.items():
        async with client_of(url) as client:
            result = await client.call_tool(f"takes.{name}", arguments)
        report = failure(result)
        lines_of(report)
        assert field in [error["field"] for error in report["error_details"]["errors"]], validate_inputs
        for text in (result.model_dump_json(by_alias=True), everything_logged(caplog)):
            assert SECRET_TEXT not in text
            assert str(SECRET_PIN) not in text
    assert len(errors_logged(caplog)) == len(quoting)


def login_of(fail: Callable[[dict[str, Any]], object], **attributes: Any) -> FunctionalModule:
    """A module that takes secrets and fails in its own way."""
    schema = of(user=STRING, password=sensitive(type="string"), pin=sensitive(type="integer"))
    return FunctionalModule(lambda inputs, context: fail(inputs), input_schema=schema, **attributes)


def throw(error: BaseException, cause: BaseException | None = None, note: str = "") -> NoReturn:
    error.add_note(note)
    raise error from cause


SPEAKING: dict[str, Callable[[dict[str, Any]], object]] = {
    "plain": lambda i: throw(RuntimeError(f"bad login: {i!r}")),
    "cause": lambda i: throw(RuntimeError("bad login"), cause=ValueError(i["password"])),
    "note": lambda i: throw(RuntimeError("bad login"), note=f"the password was {i['password']}"),
    "module_error": lambda i: throw(ModuleError("LOGIN_FAILED", f"bad password: {i['password']}", {"pin": i["pin"]})),
    "not_found": lambda i: throw(ModuleNotFoundError(i["password"])),
    "invalid": lambda i: throw(InvalidInputError(f"user {i['user']} has no password {i['password']}")),
    "own_validation": lambda i: throw(
        SchemaValidationError(errors=[{"field": "user", "code": "known", "message": f"not {i['password']}"}])
    ),
}


# How a module that takes no secret calls one that does, and what it makes of the error.
async def passing_on(inputs: dict[str, Any], context: Any) -> Any:
    return await context.executor.call_async(f"login.{inputs['how']}", inputs, context)


async def wrapping(inputs: dict[str, Any], context: Any) -> Any:
    try:
        return await passing_on(inputs, context)
    except ModuleError as error:
        raise RuntimeError(f"cannot log in: {error}") from error


def from_a_thread(inputs: dict[str, Any], context: Any) -> Any:
    return context.executor.call(f"login.{inputs['how']}", inputs, context)


async def through_a_third(inputs: dict[str, Any], context: Any) -> Any:
    return await context.executor.call_async("passing_on", inputs, context)


async def streaming(inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
    yield {"began": True}
    await passing_on(inputs, context)


async def failure_of(inputs: dict[str, Any], context: Any) -> ModuleError:
    try:
        await passing_on(inputs, context)
    except ModuleError as error:
        return error
    raise AssertionError("it does not fail")


async def after_a_loop(inputs: dict[str, Any], context: Any) -> NoReturn:
    errors = [await failure_of(inputs, context) for _ in range(2)]
    raise RuntimeError(f"cannot log in, twice: {errors[-1].message} {inputs}")


async def quoting_it(inputs: dict[str, Any], context: Any) -> NoReturn:
    error = await failure_of(inputs, context)
    raise InvalidInputError(f"cannot log in: {error.message} {inputs}")


async def in_a_group(inputs: dict[str, Any], context: Any) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(passing_on(inputs, context))


async def gathering(inputs: dict[str, Any], context: Any) -> NoReturn:
    results = await asyncio.gather(passing_on(inputs, context), return_exceptions=True)
    raise ModuleError("NOBODY_LOGGED_IN", f"{results} {inputs}", ai_guidance=f"try {inputs['password']} again")


async def without_context(inputs: dict[str, Any], context: Any) -> NoReturn:
    with suppress(ModuleError):
        await context.executor.call_async(f"login.{inputs['how']}", inputs)
    raise InvalidInputError(f"cannot log in: {inputs}")


def from_a_thread_without_context(inputs: dict[str, Any], context: Any) -> NoReturn:
    with suppress(ModuleError):
        context.executor.call(f"login.{inputs['how']}", inputs)
    raise InvalidInputError(f"cannot log in: {inputs}")


def from_a_thread_of_its_own(inputs: dict[str, Any], context: Any) -> NoReturn:
    def log_in() -> None:
        with suppress(ModuleError):
            from_a_thread(inputs, context)

    thread = threading.Thread(target=log_in)  # knows nothing of the call but by `context`
    thread.start()
    thread.join(timeout=20)
    raise InvalidInputError(f"cannot log in: {inputs}")


async def by_another_executor(inputs: dict[str, Any], context: Any) -> Any:
    return await Executor(context.executor.registry).call_async(f"login.{inputs['how']}", inputs)


WAYS: list[Callable[..., Any]] = [
    passing_on, wrapping, from_a_thread, through_a_third, streaming, after_a_loop, quoting_it, in_a_group, gathering,
    without_context, from_a_thread_without_context, from_a_thread_of_its_own, by_another_executor,
]  # fmt: skip


@pytest.fixture(scope="module")
def speaking() -> Iterator[str]:
    """A server of a module for each way to fail, and of some that call these."""
    modules: dict[str, Any] = {way.__name__: way for way in WAYS}
    modules["streaming"] = FunctionalModule(passing_on, stream=streaming, annotations=ModuleAnnotations(streaming=True))
    for how, fail in SPEAKING.items():
        hidden = ModuleAnnotations(discoverable=how != "plain")  # what is not listed has secrets too
        modules[f"login.{how}"] = login_of(fail, annotations=hidden)
    modules["login.refused"] = FunctionalModule(echo, input_schema=Login)  # by a validator that quotes
    with serving(registry_of(modules)) as url:
        yield url


@pytest.mark.requirement("NFR-SEC-003")
@pytest.mark.parametrize("how", [*SPEAKING, "refused"])
async def test_a_secret_in_an_exception_is_told_nowhere(
    speaking: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    arguments = {"how": how, "user": "bob", "password": f"\"'{SECRET_TEXT}\n", "pin": SECRET_PIN}
    async with client_of(speaking) as client:
        for tool in [*([] if how == "plain" else [f"login.{how}"]), *(way.__name__ for way in WAYS)]:
            caplog.clear()
            result = await client.call_tool(tool, arguments)
            failure(result)
            (record,) = errors_logged(caplog)
            assert record.getMessage().startswith(f"Tool call error: {tool} - ")
            said = result.model_dump_json(by_alias=True) + everything_logged(caplog)
            assert [word for word in (SECRET_TEXT, str(SECRET_PIN)) if word in said] == [], tool


@pytest.mark.parametrize("strategy", ["standard", "internal", "testing", "performance", "minimal"])
async def test_who_takes_part_is_known_in_every_pipeline(strategy: str, caplog: pytest.LogCaptureFixture) -> None:
    """Some have no approval gate, no validation or no middleware. Two servers may share one Executor."""
    modules: dict[str, Any] = {"quoting_it": quoting_it, "login.invalid": login_of(SPEAKING["invalid"])}
    executor = Executor(registry_of(modules), strategy=strategy)
    arguments = {"how": "invalid", "user": "bob", "password": TOKEN}
    with serving(executor, approval="off") as url, serving(executor) as another_url:
        for each in (url, another_url):
            async with client_of(each) as client:
                result = await client.call_tool("quoting_it", arguments)
            failure(result, "Invalid input")
            assert SECRET_TEXT not in result.model_dump_json() + everything_logged(caplog)
    assert len(errors_logged(caplog)) == 2


async def test_a_module_found_in_another_way_takes_part(caplog: pytest.LogCaptureFixture) -> None:
    registry = registry_of({"quoting_it": quoting_it, "login.invalid": login_of(SPEAKING["invalid"])})

    class FindsItself(BaseStep):
        async def execute(self, ctx: PipelineContext) -> StepResult:
            ctx.module = registry.get(ctx.module_id)
            return StepResult("continue")

    steps = Executor(registry).current_strategy.steps
    steps[2] = FindsItself("finds_itself", provides=("module",))
    async with connect(Executor(registry, strategy=ExecutionStrategy("own", steps))) as client:
        result = await client.call_tool("quoting_it", {"how": "invalid", "user": "bob", "password": TOKEN})
    failure(result, "Invalid input")
    assert SECRET_TEXT not in result.model_dump_json() + everything_logged(caplog)


async def test_a_module_that_middleware_refuses_takes_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refuses(Middleware):
        def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
            if module_id == "login.fine":
                raise InvalidInputError(f"nobody logs in today: {inputs}")

    registry = registry_of({"quoting_it": quoting_it, "login.fine": login_of(lambda inputs: {})})
    async with connect(Executor(registry, middlewares=[Refuses()])) as client:
        result = await client.call_tool("quoting_it", {"how": "fine", "user": "bob", "password": TOKEN})
    failure(result, "Invalid input")
    assert SECRET_TEXT not in result.model_dump_json() + everything_logged(caplog)


class Unwritable(BaseModel):
    """A model of which no JSON schema can be made."""

    model_config = ConfigDict(extra="allow")
    password: str = Field(json_schema_extra={"x-sensitive": True})
    call: Callable[[], int] = int


async def test_an_unreadable_schema_may_have_secrets(caplog: pytest.LogCaptureFixture) -> None:
    failing = FunctionalModule(lambda i, c: SPEAKING["invalid"](i), input_schema=Unwritable)
    modules = {"quoting_it": quoting_it, "login.unwritable": failing}
    async with connect(modules) as client:
        result = await client.call_tool("quoting_it", {"how": "unwritable", "user": "bob", "password": TOKEN})
    failure(result, "Invalid input")
    assert SECRET_TEXT not in result.model_dump_json() + everything_logged(caplog)


async def test_a_replaced_module_took_part_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()

    async def replacing(inputs: dict[str, Any], context: Any) -> NoReturn:
        error = await failure_of(inputs, context)
        registry.unregister("login.invalid")
        registry.register("login.invalid", FunctionalModule(echo))
        raise InvalidInputError(f"cannot log in: {error.message}")

    registry.register("replacing", FunctionalModule(replacing))
    registry.register("login.invalid", login_of(SPEAKING["invalid"]))
    async with connect(registry) as client:
        arguments = {"how": "invalid", "user": "bob", "password": TOKEN}
        result = await client.call_tool("replacing", arguments)
    failure(result, "Invalid input")
    assert SECRET_TEXT not in result.model_dump_json() + everything_logged(caplog)


async def test_calls_without_secrets_say_all(
    caplog: pytest.LogCaptureFixture,
) -> None:
    modules = {"quoting_it": quoting_it, "login.open": FunctionalModule(lambda i, c: throw(InvalidInputError("no")))}
    async with connect(modules) as client:
        result = await client.call_tool("quoting_it", {"how": "open"})
    failure(result, "Invalid input: cannot log in: no {'how': 'open'}")
    assert "cannot log in: no {'how': 'open'} (trace " in errors_logged(caplog)[0].getMessage()


async def test_with_sensitive_input_only_the_place_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    modules = {f"login.{how}": login_of(SPEAKING[how]) for how in ("plain", "invalid")}
    async with connect(modules) as client:
        for how, told in (("plain", "Internal error occurred"), ("invalid", "Invalid input")):
            failure(await client.call_tool(f"login.{how}", {"user": "bob", "password": TOKEN}), told)
    unexpected, invalid = [record.getMessage() for record in errors_logged(caplog)]
    assert "login.plain - RuntimeError: (not shown: it may quote sensitive values)" in unexpected
    assert "login.invalid - InvalidInputError: (not shown: it may quote sensitive values)" in invalid
    for message in (unexpected, invalid):
        assert re.search(r"values\) at test_secrets\.py:\d+ \(trace \w+\)$", message)


REFUSING: dict[str, dict[str, Any]] = {
    "ACLDeniedError": {"acl": ACL([], default_effect="deny")},
    "ApprovalDeniedError": {"approval_handler": AlwaysDenyHandler()},
    "SchemaValidationError": {},
    "JSONDecodeError": {},
}


@pytest.mark.parametrize("name", REFUSING)
async def test_a_withheld_error_is_one_line_with_its_place(name: str, caplog: pytest.LogCaptureFixture) -> None:
    annotations = ModuleAnnotations(requires_approval=True)
    login = login_of(lambda inputs: json.loads(inputs["password"]), annotations=annotations)
    executor = Executor(registry_of({"login.now": login}), **REFUSING[name])
    arguments = {"password": TOKEN, "user": 7 if name == "SchemaValidationError" else "bob"}
    async with connect(executor, approval="off") as client:
        failure(await client.call_tool("login.now", arguments))
    (record,) = errors_logged(caplog)
    unshown = r"\(not shown: it may quote sensitive values\)"
    expected = rf"Tool call error: login\.now - {name}: {unshown} at \w+\.py:\d+ \(trace \w{{32}}\)"
    assert re.fullmatch(expected, logging.Formatter("%(message)s").format(record))


class Key(BaseModel):
    label: str
    value: str = Field(json_schema_extra={"x-sensitive": True})


class Computes(BaseModel):
    @computed_field(json_schema_extra={"x-sensitive": True})  # type: ignore[prop-decorator]
    @property
    def token(self) -> str:
        return TOKEN


def fail(inputs: dict[str, Any], context: Any) -> NoReturn:
    throw(RuntimeError(f"cannot store {TOKEN}"))


def keys_of() -> dict[str, Key]:
    """Give all keys."""
    throw(RuntimeError(f"cannot store {TOKEN}"))


GIVES_SECRETS = ["gives.invalid", "raises.token", "raises.computed", "passes.on", "passes.computed", "passes.keys"]


@pytest.mark.parametrize("tool", GIVES_SECRETS)
async def test_a_secret_to_be_given_is_not_logged(tool: str, caplog: pytest.LogCaptureFixture) -> None:
    modules: dict[str, Any] = {
        "gives.invalid": gives({"token": [TOKEN]}, output_schema=SECRETIVE),
        "raises.token": FunctionalModule(fail, output_schema=SECRETIVE),
        "raises.computed": FunctionalModule(fail, output_schema=Computes),
        "passes.on": calls("raises.token"),
        "passes.computed": calls("raises.computed"),
        "passes.keys": calls("raises.keys"),
        "raises.keys": FunctionModule(keys_of, "raises.keys"),
    }
    for redacts in (True, False):
        caplog.clear()
        async with connect(modules, redact_output=redacts) as client:
            result = await client.call_tool(tool, {})
        failure(result)
        assert len(errors_logged(caplog)) == 1
        assert SECRET_TEXT not in result.model_dump_json() + everything_logged(caplog)


# ---- Redaction ----


class Account(BaseModel):
    author: str
    tokens_used: int
    password_hint: str
    pin: int = Field(json_schema_extra={"x-sensitive": True})
    expires: date = Field(json_schema_extra={"x-sensitive": True})
    first: Key
    keys: list[Key]
    maybe: Key | None = None
    by_name: dict[str, Key]
    secrets: list[int] = Field(json_schema_extra={"x-sensitive": True})


KEY, HIDDEN = {"label": "l", "value": "S3CR3T"}, {"label": "l", "value": REDACTED}
INNOCENT = {"author": "ann", "tokens_used": 3, "password_hint": "cat"}  # apcore's own redaction goes by such words
ACCOUNT: dict[str, Any] = {
    **{**INNOCENT, "pin": 918273645, "expires": date(2031, 12, 13), "first": KEY, "keys": [KEY, KEY]},
    **{"maybe": KEY, "by_name": {"a": KEY}, "secrets": [918273645]},
}
SHOWN: dict[str, Any] = {
    **{**INNOCENT, "pin": REDACTED, "expires": REDACTED, "first": HIDDEN, "keys": [HIDDEN, HIDDEN]},
    **{"maybe": HIDDEN, "by_name": {"a": HIDDEN}, "secrets": REDACTED},
}
SECRET, SECRET_NUMBER = sensitive(), sensitive(type="integer")
PIN = {"properties": {"pin": SECRET_NUMBER}}
OPEN_PIN, HIDDEN_PIN = {"a": 1, "pin": 918273645}, {"a": 1, "pin": REDACTED}
# What marks the pin of `OPEN_PIN` from beside its properties.
BESIDE: dict[str, dict[str, Any]] = {
    "then": {"if": {"required": ["a"]}, "then": PIN},
    "not": {"not": {**PIN, "required": ["b"]}},
    "dependent": {"dependentSchemas": {"a": PIN}},
    "unevaluated": {"unevaluatedProperties": SECRET_NUMBER},
    "additional": {"additionalProperties": SECRET_NUMBER},
    "plain_to_others": {"allOf": [{"properties": {"pin": SECRET}}], "additionalProperties": INTEGER},
    "the_other_variant": {"oneOf": [{"properties": {"pin": INTEGER}}, {**PIN, "required": ["kind"]}]},
}
# What hides the whole value behind it.
WHOLE: dict[str, tuple[dict[str, Any], Any]] = {
    "dependencies": ({"dependencies": {"a": PIN, "b": ["a"]}}, OPEN_PIN),
    "additional_items": ({"type": "array", "additionalItems": SECRET}, [918273645]),
    "contains": ({"type": "array", "contains": SECRET_NUMBER}, [1.5, 918273645]),
    "property_names": ({"type": "object", "propertyNames": SECRET}, {"918273645": 1}),
    "content": ({"contentMediaType": "application/json", "contentSchema": PIN}, '{"pin": 918273645}'),
    "all_of": ({"allOf": [{"type": "string", "pattern": "^S"}, {"enum": ["S3CR3T"], **SECRET}]}, "S3CR3T"),
}
PAIR = {"type": "array", "prefixItems": [INTEGER, SECRET_NUMBER]}
NAMES = ("secret_a", "secret_with_a_schema_of_its_own")
PATTERN = {**of(**{NAMES[1]: INTEGER}), "patternProperties": {"^secret_": SECRET_NUMBER}}

# An output schema, what the module returns, and what the client may see of it.
ACCOUNTS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    **{f"by.{name}": ({**of(a=INTEGER), **beside}, OPEN_PIN, HIDDEN_PIN) for name, beside in BESIDE.items()},
    **{f"whole.{name}": (of(p=schema), {"p": value}, {"p": REDACTED}) for name, (schema, value) in WHOLE.items()},
    "model": (Account, ACCOUNT, SHOWN),
    "one_place_of_a_tuple": (of(pair=PAIR), {"pair": [1, 918273645]}, {"pair": [1, REDACTED]}),
    "some_names": (PATTERN, dict.fromkeys(NAMES, 918273645), REDACTED),
    "beside_a_pattern": ({**of(p=SECRET), "patternProperties": {"^x": {}}}, {"p": 1, "x": 2}, {"p": REDACTED, "x": 2}),
    "nothing": (of(p=sensitive(type=["string", "null"])), {"p": None}, {"p": None}),
    "definition_elsewhere": (
        {**of(pin={"$ref": "#/components/Pin"}), "components": {"Pin": SECRET_NUMBER}},
        {"pin": 918273645},
        {"pin": REDACTED},
    ),
    "the_whole": ({"type": "object", **SECRET}, {"p": 918273645}, REDACTED),
    "the_whole_of_a_variant": ({"anyOf": [{"type": "object", **SECRET}, of(p=INTEGER)]}, {"p": 918273645}, REDACTED),
}


@pytest.fixture(scope="module")
def accounts() -> Iterator[dict[bool, str]]:
    """Servers of a module for each row, one that redacts and one that does not."""
    modules = {f"of.{name}": gives(output, output_schema=schema) for name, (schema, output, _) in ACCOUNTS.items()}
    with serving(registry_of(modules)) as url, serving(registry_of(modules), redact_output=False) as open_url:
        yield {True: url, False: open_url}


@pytest.mark.parametrize("name", ACCOUNTS)
async def test_sensitive_output_is_redacted(
    accounts: dict[bool, str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With `redact_output=False` it is what the module gave."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    _, output, shown = ACCOUNTS[name]
    async with client_of(accounts[True]) as client:
        result = await client.call_tool(f"of.{name}", {})
    assert parsed(success_text(result)) == shown
    assert result.structured_content is None, "what is hidden needs no second description"
    said = result.model_dump_json() + everything_logged(caplog)
    assert [secret for secret in ("S3CR3T", "918273645", "2031-12-13") if secret in said] == []
    async with client_of(accounts[False]) as client:
        result = await client.call_tool(f"of.{name}", {})
    assert parsed(success_text(result)) == result.structured_content == json.loads(json.dumps(output, default=str))


MARK = {"x-sensitive": True}
UNMARKED: dict[str, dict[str, Any]] = {
    "default": of(p={"default": MARK}),
    "choices": of(p={"anyOf": [{"enum": [MARK, 1]}, {"const": MARK}], "examples": [MARK]}),
    "name": of(**MARK),  # a property of this name, with any value
    "false": of(p={"x-sensitive": False}),
}


async def test_a_mark_in_data_or_a_name_is_none(caplog: pytest.LogCaptureFixture) -> None:
    modules: dict[str, Any] = {}
    for name, schema in UNMARKED.items():
        modules[f"gives.{name}"] = gives({"p": 1}, output_schema=schema)
        modules[f"fails.{name}"] = FunctionalModule(fail, input_schema=schema, output_schema=schema)
    async with connect(modules) as client:
        for name in UNMARKED:
            assert (await client.call_tool(f"gives.{name}", {})).structured_content == {"p": 1}, name
            failure(await client.call_tool(f"fails.{name}", {}))
    assert [TOKEN in record.getMessage() for record in errors_logged(caplog)] == [True] * len(UNMARKED)


ELSEWHERE = {"components": {"Node": of(again={"$ref": "#/components/Node"}, token=SECRET)}}
ODD_MARKS: dict[str, Any] = {
    "behind_a_reference": {**of(a={"$ref": "#/components/Node"}), **ELSEWHERE},
    "in_a_list_of_properties": {**of(a={"$ref": "#"}), "properties": [SECRET]},
}


@pytest.mark.parametrize("name", ODD_MARKS)
async def test_a_mark_not_followed_leaves_its_module_out(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Without an output schema it would be served with what the mark was to hide."""
    modules = {"t.odd": gives({"a": {"token": TOKEN}}, output_schema=ODD_MARKS[name]), "t.other": echo}
    async with connect(modules, redact_output=True) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["t.other"]
    assert "Module t.odd is left out" in caplog.text


async def test_marks_in_odd_places_withhold_errors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = {**of(token={"$ref": "#/components/Token"}), "components": {"Token": SECRET}}
    async with connect({"t.odd": FunctionalModule(fail, input_schema=schema)}) as client:
        failure(await client.call_tool("t.odd", {}))
    assert len(errors_logged(caplog)) == 1
    assert SECRET_TEXT not in everything_logged(caplog)


async def test_what_is_hidden_is_not_promised(accounts: dict[bool, str]) -> None:
    for redacts, url in accounts.items():
        async with client_of(url) as client:
            schemas = [tool.output_schema for tool in (await client.list_tools()).tools]
        assert [schema is None for schema in schemas] == [redacts] * len(ACCOUNTS)
        assert REDACTED not in json.dumps(schemas)


async def test_a_mark_in_a_late_model_hides_its_alias() -> None:
    class Inner(BaseModel):
        model_config = ConfigDict(defer_build=True)
        token: str = Field(serialization_alias="tok", json_schema_extra={"x-sensitive": True})

    class Outer(BaseModel):
        model_config = ConfigDict(defer_build=True)
        inner: Inner

    given = {"inner": Inner(token="S3CR3T")}
    async with connect({"a.late": gives(given, output_schema=Outer)}) as client:
        assert "S3CR3T" not in (await client.call_tool("a.late", {})).model_dump_json()


# ---- pydantic's SecretStr ----


class Connection(BaseModel):
    user: str
    password: SecretStr


CONNECTION = Connection(user="bob", password=SecretStr(SECRET_TEXT))


async def test_a_secret_str_is_a_mark(caplog: pytest.LogCaptureFixture) -> None:
    """For answers, for what a call fails with, and for the log. The function is given the secret."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    given: list[str] = []

    def connect_as(login: Connection) -> str:
        given.append(login.password.get_secret_value())
        raise ValueError(f"cannot connect as {given[0]}")

    def one() -> Connection:
        return CONNECTION

    def by_name() -> dict[str, Connection]:
        return {"a": CONNECTION}

    def anything() -> Any:
        return [CONNECTION]

    registry = Registry()
    for function in (connect_as, one, by_name, anything):
        apcore_module(function, id=f"a.{function.__name__}", registry=registry)
    hidden = {"user": "bob", "password": REDACTED}
    shown = {"a.one": hidden, "a.by_name": {"a": hidden}, "a.anything": {"result": [hidden]}}
    async with connect(registry) as client:
        login = {"login": {"user": "bob", "password": SECRET_TEXT}}
        failure(await client.call_tool("a.connect_as", login), "Internal error occurred")
        for name, expected in shown.items():
            assert parsed(success_text(await client.call_tool(name, {}))) == expected
        wrong = failure(await client.call_tool("a.connect_as", {"login": {"user": [], "password": SECRET_TEXT}}))
    assert given == [SECRET_TEXT]
    assert len(errors_logged(caplog)) == 2
    assert SECRET_TEXT not in everything_logged(caplog) + str(wrong)


# ---- Models inside what a module returns, and what apcore logs of a call ----


class Patient(BaseModel):
    name: str
    ssn: str = Field(alias="socialNumber", json_schema_extra={"x-sensitive": True})


class Ward(BaseModel):
    anything: Any


@dataclasses.dataclass
class Bed:
    patient: Any


PATIENT = Patient(name="Ann", socialNumber=SECRET_TEXT)


class Round(BaseModel):
    @computed_field  # type: ignore[prop-decorator]
    @property
    def first(self) -> Patient:
        return PATIENT


class Visit(NamedTuple):
    ssn: Annotated[str, Field(json_schema_extra={"x-sensitive": True})]
    patient: Patient


HELD: dict[str, Any] = {
    "itself": PATIENT,
    "in_a_list": [PATIENT, {"ssn": "kept"}],
    "in_a_tuple": {"a": (1, PATIENT)},
    "in_a_named_tuple": Visit(SECRET_TEXT, PATIENT),
    "in_a_deque": deque([PATIENT]),
    "in_a_user_list": UserList([PATIENT]),
    "in_an_array": Array([PATIENT]),
    "in_a_model": Ward(anything=[{"a": PATIENT}]),
    "in_a_dataclass": Bed(PATIENT),
    "by_a_number": {1: PATIENT},
    "by_bytes": {b"a": PATIENT},
    "in_a_user_dict": UserDict(a=PATIENT),
    "in_a_read_only_dict": MappingProxyType({"a": PATIENT}),
    "computed": Round(),
}


@pytest.mark.parametrize("held", HELD.values(), ids=HELD)
async def test_a_model_in_a_container_is_redacted(held: Any) -> None:
    def any_(**_: Any) -> Any:
        return held

    def plain(**_: Any) -> dict:  # type: ignore[type-arg]
        return {"held": held}

    registry = registry_of({"a.class": gives({"held": held}), "a.stream": StreamingModule([{"held": held}])})
    for name, function in {"an.any": any_, "a.dict": plain}.items():
        apcore_module(function, id=name, registry=registry)
    note, told = noting()
    async with connect(registry) as client:
        names = ["a.class", "an.any", "a.dict"]
        with contextlib.suppress(TypeError):  # apcore copies chunks, and views of a dict cannot be copied
            copy.deepcopy(held)
            names.append("a.stream")
        for name in names:
            result = await client.call_tool(name, {}, progress_callback=note if name == "a.stream" else None)
            assert not result.is_error
            text = result.model_dump_json(by_alias=True)
            assert ("Ann" in text, REDACTED in text, SECRET_TEXT in text) == (True, True, False), name
    assert SECRET_TEXT not in str(told)
    assert ("Ann" in str(told)) == ("a.stream" in names)
    assert SECRET_TEXT not in await run_openai_call(registry, "an-any", {})
    async with connect(registry, redact_output=False) as client:
        assert SECRET_TEXT in (await client.call_tool("an.any", {})).model_dump_json(by_alias=True)


async def test_a_model_is_redacted_in_a_binding() -> None:
    """And where middleware copies what the module gave."""

    class Copying(Middleware):
        def after(self, module_id: str, inputs: Any, output: Any, context: Any) -> Any:
            return {**output}

    def bound(count: int, context: Context) -> Any:
        assert (count, context.call_chain[-1]) == (1, "a.binding")
        return PATIENT

    counting = {"type": "object", "properties": {"count": {"type": "integer"}}}
    registry = registry_of({"a.class": gives(PATIENT)})
    module = FunctionModule(bound, "a.binding")
    vars(module).update(input_schema=counting, output_schema={"type": "object"})  # as of a binding file
    registry.register("a.binding", module)
    for executor in (Executor(registry), Executor(registry, middlewares=[Copying()])):
        async with connect(executor) as client:
            for name in ("a.class", "a.binding"):
                result = await client.call_tool(name, {"count": 1})
                text = result.model_dump_json(by_alias=True)
                assert ("Ann" in text, REDACTED in text, SECRET_TEXT in text) == (True, True, False), name


async def test_a_model_that_middleware_puts_in_is_redacted() -> None:
    class Filling(Middleware):
        def after(self, module_id: str, inputs: Any, output: Any, context: Any) -> Any:
            return {"patients": deque([PATIENT])}

    for redacts in (True, False):
        executor = Executor(registry_of({"a.class": gives({})}), middlewares=[Filling()])
        async with connect(executor, redact_output=redacts) as client:
            text = (await client.call_tool("a.class", {})).model_dump_json(by_alias=True)
        assert ("Ann" in text, REDACTED in text, SECRET_TEXT in text) == (True, redacts, not redacts)


class Patients(RootModel[list[Patient]]): ...


async def test_a_root_model_is_redacted() -> None:
    def ward() -> Patients:
        return Patients([PATIENT])

    registry = Registry()
    apcore_module(ward, id="a.ward", registry=registry)
    async with connect(registry) as client:
        text = (await client.call_tool("a.ward", {})).model_dump_json(by_alias=True)
    assert ("Ann" in text, REDACTED in text, SECRET_TEXT in text) == (True, True, False)


# ---- What a hint leaves open ----


class Public(BaseModel):
    name: str = "Ann"


class Private(Public):
    ssn: str = Field(SECRET_TEXT, json_schema_extra={"x-sensitive": True})


class Described(BaseModel):
    """A field of type Any, with other keywords beside it."""

    held: Any = Field(None, title="Held", description="Anything", serialization_alias="kept")


class Openly(BaseModel):
    model_config = ConfigDict(extra="allow")


class Dumped(BaseModel):
    held: list[Any]

    @field_serializer("held")
    def as_text(self, held: list[Any]):  # type: ignore[no-untyped-def]
        return [each if isinstance(each, int) else {"a": each.name, "b": each.ssn} for each in reversed(held)]


class Listed(BaseModel):
    held: Any

    @model_serializer
    def as_list(self):  # type: ignore[no-untyped-def]
        return [1, self.held]


class Iterated(RootModel[list[Any]]):
    """As pydantic's documentation recommends it."""

    def __iter__(self) -> Any:
        return iter([])


class Computed(BaseModel):
    @computed_field(title="First", alias="first")  # type: ignore[prop-decorator]
    @property
    def held(self) -> Any:
        return [PATIENT]


class Subclasses(BaseModel):
    held: list[SerializeAsAny[Public]]


class Restated(BaseModel):
    held: Annotated[Patient, WithJsonSchema({"type": "object"})]


class Kind(enum.Enum):
    PATIENT = PATIENT


class Named(TypedDict):
    held: Any


class Keeper:
    def __init__(self) -> None:
        self.patient = PATIENT

    def __str__(self) -> str:
        return SECRET_TEXT


PRIVATE = Private()
OPEN: dict[str, tuple[Any, Any]] = {
    "sequence": (typing.Sequence[Patient], [PATIENT]),
    "mutable_sequence": (typing.MutableSequence[Patient], [PATIENT]),
    "any_with_a_title": (Annotated[Any, Field(title="T")], PATIENT),
    "any_field": (Described, Described(held=[PATIENT])),
    "any_field_of_a_row": (list[Described], [{"held": PATIENT}]),
    "extra": (dict[str, Openly], {"a": Openly(held=PATIENT)}),
    "untyped_serializer": (list[Dumped], [Dumped(held=[1, PRIVATE])]),
    "untyped_annotation": (Annotated[list[Any], PlainSerializer(lambda held: held[::-1])], [1, PATIENT]),
    "untyped_model_serializer": (Any, [Listed(held=PATIENT)]),
    "root_any": (RootModel[Any], RootModel[Any](PATIENT)),
    "root_list": (RootModel[list[Any]], RootModel[list[Any]]([1, PATIENT])),
    "root_dict": (list[RootModel[dict[str, Any]]], [RootModel[dict[str, Any]]({"a": PATIENT})]),
    "root_that_iterates": (Any, [Iterated([PATIENT])]),
    "computed": (Computed, Computed()),
    "serialize_as_any": (Subclasses, Subclasses(held=[PRIVATE])),
    "another_class_in_a_field": (list[Subclasses], [Subclasses.model_construct(held=[PATIENT])]),
    "another_schema": (Restated, Restated(held=PATIENT)),
    "enum": (Any, [Kind.PATIENT]),
    "typed_dict": (list[Named], [{"held": PATIENT}]),
    "object": (Any, [Keeper()]),
    "error": (Any, [ValueError(PATIENT)]),
    "secret": (dict[str, Secret[str]], {"a": Secret[str](SECRET_TEXT)}),
}
"""A hint, and what is returned by it."""


@pytest.mark.parametrize("name", OPEN)
async def test_nothing_marked_is_sent_where_a_hint_is_open(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Neither by a function nor by a class, in a stream, or put in by middleware."""
    hint, value = OPEN[name]

    class Filling(Middleware):
        def after(self, module_id: str, inputs: Any, output: Any, context: Any) -> Any:
            return {"held": value} if module_id == "a.filled" else output

    def give() -> None:
        return value  # type: ignore[no-any-return]

    give.__annotations__["return"] = hint
    modules = {"a.class": gives({"held": value}), "a.filled": gives({}), "a.stream": StreamingModule([{"held": value}])}
    registry = registry_of(modules)
    registry.register("a.function", FunctionModule(give, "a.function"))
    note, told = noting()
    async with connect(Executor(registry, middlewares=[Filling()])) as client:
        for tool in [*modules, "a.function"]:
            result = await client.call_tool(tool, {}, progress_callback=note)
            assert not result.is_error or name == "another_class_in_a_field", tool
            assert SECRET_TEXT not in result.model_dump_json(), tool
        assert SECRET_TEXT not in (await client.list_tools()).model_dump_json() + str(told) + everything_logged(caplog)
    assert SECRET_TEXT not in await run_openai_call(registry, "a-function", {})


DESCRIBED: list[Any] = [
    Patient, list[Patient], dict[str, Patient | None], tuple[Patient, int], typing.Sequence[Patient], Patients,
    dict[str, Secret[int]], Annotated[Any, PlainSerializer(str, return_type=str)],
]  # fmt: skip
LEFT_OPEN: list[Any] = [
    Any, object, list, dict[str, Any], dict[int, str], bytes, Bed, Visit, SerializeAsAny[Patient], Openly, Dumped,
    Listed, Iterated, Computed, Restated, Named, Kind, Annotated[int, PlainSerializer(lambda number: number)],
]  # fmt: skip


def test_what_is_described_is_told_by_the_core_schema() -> None:
    """What is of no known kind is open."""
    assert [hint for hint in DESCRIBED if is_open(core_schema_of(TypeAdapter(hint)))] == []
    assert [hint for hint in LEFT_OPEN if not is_open(core_schema_of(TypeAdapter(hint)))] == []
    assert is_open({"type": "of-tomorrow"})
    assert is_open({"type": "list"})


async def test_a_secret_of_any_type_is_a_mark(caplog: pytest.LogCaptureFixture) -> None:
    """In the question and in what a call fails with."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")

    def unlock(locker: int, pin: Secret[int]) -> str:
        raise InvalidInputError(f"{pin.get_secret_value()} does not open {locker}")

    registry = Registry()
    apcore_module(unlock, id="a.lock", registry=registry, annotations={"requires_approval": True})
    options, asked = asking(accept(approve=True))
    async with connect(registry, client=options) as client:
        result = await client.call_tool("a.lock", {"locker": 3, "pin": SECRET_PIN})
    failure(result, "Invalid input")
    (question,) = asked
    assert "- locker: 3" in question.message
    said = result.model_dump_json() + question.model_dump_json() + everything_logged(caplog)
    assert str(SECRET_PIN) not in said


def test_a_marked_example_is_hidden() -> None:
    """In the Explorer and in the tool document."""
    examples = [ModuleExample("one", {"token": SECRET_TEXT, "n": 1}, {"token": SECRET_TEXT})]
    registry = registry_of({"a.login": gives({}, input_schema=SECRETIVE, output_schema=SECRETIVE, examples=examples)})
    tool = Catalog(options_of("test", registry)).tools["a.login"]
    (example,) = tool.examples
    assert (example["inputs"], example["output"]) == ({"token": REDACTED, "n": 1}, {"token": REDACTED})


class Person(BaseModel):
    """As `Patient`, without marks."""

    name: str
    socialNumber: str = ""


@pytest.mark.parametrize(
    "hint", [dict[str, str], list[dict[str, str]], Person, list[Person], dict[str, Person]], ids=str
)
async def test_a_marked_model_fits_no_other_hint(hint: Any) -> None:
    """By which nothing would be hidden."""
    kind = typing.get_origin(hint)
    held: Any = PATIENT
    if kind is list:
        held = [PATIENT]
    elif hint == dict[str, Person]:
        held = {"a": PATIENT}

    def give() -> None:
        return held  # type: ignore[no-any-return]

    give.__annotations__["return"] = hint
    registry = Registry()
    registry.register("a.patient", FunctionModule(give, "a.patient"))
    async with connect(registry) as client:
        result = await client.call_tool("a.patient", {})
    assert SECRET_TEXT not in result.model_dump_json(by_alias=True)


async def test_a_refused_marked_model_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schema = {"type": "object", "properties": {"held": {"type": "integer"}}}
    async with connect({"a.wrong": gives({"held": PATIENT}, output_schema=schema)}) as client:
        assert (await client.call_tool("a.wrong", {})).is_error
    assert SECRET_TEXT not in caplog.text


async def test_apcores_log_shows_no_marked_value(caplog: pytest.LogCaptureFixture) -> None:
    model = SchemaLoader(Config()).generate_model(
        {"type": "object", "properties": {"pin": {"type": "string", "format": "uuid", "x-sensitive": True}}}, "Pin"
    )
    open_model = SchemaLoader(Config()).generate_model(
        {"type": "object", "properties": {"pin": {"type": "string", "format": "uuid"}}}, "Open"
    )
    modules = {"a.pin": gives({}, input_schema=model), "an.open": gives({}, input_schema=open_model)}
    async with connect(modules) as client:
        await client.call_tool("a.pin", {"pin": SECRET_TEXT})
        await client.call_tool("an.open", {"pin": "no uuid"})
    lines = [record.getMessage() for record in caplog.records if record.name == "apcore.schema.hardening"]
    assert len(lines) == 2
    assert SECRET_TEXT not in caplog.text
    assert "no uuid" in lines[1]


# ---- What pydantic writes otherwise than it says ----


class Keys(BaseModel):
    name: str = "Ann"
    pin: Annotated[str, Field(json_schema_extra={"x-sensitive": True})] = SECRET_TEXT


class Account(BaseModel):
    name: str = "Ann"
    note: str = ""


class MarkedAccount(Account):
    note: Annotated[str, Field(json_schema_extra={"x-sensitive": True})] = SECRET_TEXT


class AsList(BaseModel):
    keys: Keys = Keys()

    @field_serializer("keys")
    def _as_list(self, keys: Keys) -> Any:
        return [keys.name, keys.pin]


class WithoutNone(Keys):
    @model_serializer(mode="wrap")
    def _without_none(self, handler: Any) -> dict[str, str]:
        return {name: item for name, item in handler(self).items() if item is not None}


@dataclasses.dataclass
class Scan:
    """With a field that pydantic has no schema for, and one that it does not know."""

    name: str
    pin: Annotated[str, Field(json_schema_extra={"x-sensitive": True})]
    pixels: io.BytesIO | None = None
    token: Annotated[str, Field(json_schema_extra={"x-sensitive": True})] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.token = SECRET_TEXT


class Holding:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __str__(self) -> str:
        return f"it holds {self.held}"


class Marked(NamedTuple):
    name: str
    pin: Annotated[str, Field(json_schema_extra={"x-sensitive": True})]


OTHERWISE: dict[str, tuple[Any, Any]] = {
    "a subclass marks what its base does not": (list[Account], [MarkedAccount()]),
    "a serializer says Any": (AsList, AsList()),
    "a model writes itself": (WithoutNone, WithoutNone()),
    "a dataclass that pydantic knows in part": (Any, Scan("Ann", SECRET_TEXT)),
    "an object in an object, of slots": (Any, Holding(Holding(Keys()))),
    "a set, which is in no order": (Any, {("a", str(number)) for number in range(50)} | {Marked("a", SECRET_TEXT)}),
}


@pytest.mark.parametrize("shape", OTHERWISE)
async def test_what_is_written_otherwise_shows_no_mark(shape: str) -> None:
    hint, value = OTHERWISE[shape]

    def give() -> Any:
        return value

    give.__annotations__["return"] = hint
    registry = Registry()
    registry.register("t.give", FunctionModule(give, "t.give"))
    async with connect(registry) as client:
        result = await client.call_tool("t.give", {})
    assert not result.is_error, result
    assert SECRET_TEXT not in result.model_dump_json()
