"""What is marked `x-sensitive` leaves neither in results nor in messages nor in the log (NFR-SEC-002, -003).

What is hidden in which value is shown by tables, without a server; what a client and the log are told, over HTTP.
"""

from __future__ import annotations

import asyncio
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
from typing import Annotated, Any, Generic, NamedTuple, NoReturn, TypeVar

import pytest
from apcore import ACL, Config, Context, Executor, FunctionModule, ModuleAnnotations, ModuleError
from apcore.approval import AlwaysDenyHandler
from apcore.errors import InvalidInputError, ModuleNotFoundError, SchemaValidationError
from apcore.middleware.logging import LoggingMiddleware
from apcore.module import ModuleExample
from apcore.pipeline import BaseStep, ExecutionStrategy, PipelineContext, StepResult
from apcore.schema.loader import SchemaLoader
from conftest import FunctionalModule, client_of, connect, echo, registry_of, serving
from mcp_types import CallToolResult
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
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
from pydantic.alias_generators import to_camel
from support import (
    INTEGER,
    MARK,
    MARKED,
    REDACTED,
    SECRET_TEXT,
    SECRETIVE,
    STRING,
    Array,
    Caplog,
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
    of,
    returning,
    sent,
    success_text,
    tool_of,
)
from typing_extensions import TypeAliasType, TypedDict

from apcore_mcp import run_openai_call
from apcore_mcp.core import has_marks
from apcore_mcp.hints import core_schema_of, is_open
from apcore_mcp.values import as_json, marks_in, redact

SECRET_PIN = 918273645


def sensitive(**schema: Any) -> dict[str, Any]:
    return {**MARK, **schema}


def quoted(result: CallToolResult, caplog: Caplog) -> list[str]:
    """The secrets that an answer or the log repeats."""
    said = result.model_dump_json(by_alias=True) + everything_logged(caplog)
    return [secret for secret in (SECRET_TEXT, str(SECRET_PIN), "2031-12-13") if secret in said]


# ---- x-sensitive arguments ----


class Login(BaseModel):
    user: str
    password: str = MARKED

    @field_validator("password")
    @classmethod
    def refuse(cls, value: str) -> str:
        raise ValueError(f"{value} is on a list")


class Logins(BaseModel):
    logins: list[Login]
    limit: int = 0


TOKEN = f"{SECRET_TEXT}-token"

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


@pytest.mark.requirement("NFR-SEC-002", "NFR-SEC-003")
@pytest.mark.parametrize("validate_inputs", [False, True])
async def test_a_validation_error_repeats_no_secret(validate_inputs: bool, caplog: Caplog) -> None:
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    modules = {f"takes.{name}": FunctionalModule(echo, input_schema=schema) for name, (schema, _, _) in QUOTED.items()}
    async with connect(modules, validate_inputs=validate_inputs) as client:
        for name, (_, arguments, field) in QUOTED.items():
            result = await client.call_tool(f"takes.{name}", arguments)
            report = failure(result)
            lines_of(report)
            assert field in [error["field"] for error in report["error_details"]["errors"]], name
            assert quoted(result, caplog) == [], name
    assert len(errors_logged(caplog)) == len(QUOTED)


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


def from_a_thread(inputs: dict[str, Any], context: Any) -> Any:
    return context.executor.call(f"login.{inputs['how']}", inputs, context)


async def streaming(inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
    yield {"began": True}
    await passing_on(inputs, context)


async def quoting_it(inputs: dict[str, Any], context: Any) -> NoReturn:
    with pytest.raises(ModuleError) as caught:
        await passing_on(inputs, context)
    raise InvalidInputError(f"cannot log in: {caught.value.message} {inputs}")


async def gathering(inputs: dict[str, Any], context: Any) -> NoReturn:
    results = await asyncio.gather(passing_on(inputs, context), return_exceptions=True)
    raise ModuleError("NOBODY_LOGGED_IN", f"{results} {inputs}", ai_guidance=f"try {inputs['password']} again")


async def without_context(inputs: dict[str, Any], context: Any) -> NoReturn:
    with suppress(ModuleError):
        await context.executor.call_async(f"login.{inputs['how']}", inputs)
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


def wrapping(way: Callable[..., Any]) -> Callable[..., Any]:
    async def wrapped(inputs: dict[str, Any], context: Any) -> Any:
        try:
            return await way(inputs, context)
        except ModuleError as error:
            raise RuntimeError(f"cannot log in: {error}") from error

    return wrapped


WAYS: dict[str, Any] = {
    way.__name__: way
    for way in (passing_on, from_a_thread, quoting_it, gathering, without_context, from_a_thread_of_its_own)
}
WAYS |= {"by_another_executor": by_another_executor, "wrapping_another": wrapping(by_another_executor)}
WAYS |= {"wrapping": wrapping(passing_on)}
WAYS["streaming"] = FunctionalModule(passing_on, stream=streaming, annotations=ModuleAnnotations(streaming=True))


@pytest.fixture(scope="module")
def speaking() -> Iterator[str]:
    """A server of a module for each way to fail, and of some that call these."""
    modules = {**WAYS}
    for how, fail in SPEAKING.items():
        hidden = ModuleAnnotations(discoverable=how != "plain")  # what is not listed has secrets too
        modules[f"login.{how}"] = login_of(fail, annotations=hidden)
    modules["login.refused"] = FunctionalModule(echo, input_schema=Login)  # by a validator that quotes
    with serving(registry_of(modules)) as url:
        yield url


@pytest.mark.requirement("NFR-SEC-003")
@pytest.mark.parametrize("how", [*SPEAKING, "refused"])
async def test_a_secret_in_an_error_is_told_nowhere(speaking: str, how: str, caplog: Caplog) -> None:
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    arguments = {"how": how, "user": "bob", "password": f"\"'{SECRET_TEXT}\n", "pin": SECRET_PIN}
    async with client_of(speaking) as client:
        for tool in [*([] if how == "plain" else [f"login.{how}"]), *WAYS]:
            caplog.clear()
            result = await client.call_tool(tool, arguments)
            failure(result)
            (record,) = errors_logged(caplog)
            assert record.getMessage().startswith(f"Tool call error: {tool} - ")
            assert quoted(result, caplog) == [], tool


# Who else may take part in a call of `quoting_it`, so that what it quotes is withheld.
def piped(login: Any = None, strategy: str = "standard") -> Executor:
    modules = {"quoting_it": quoting_it, "login.it": login or login_of(SPEAKING["invalid"])}
    return Executor(registry_of(modules), strategy=strategy)


def found_in_another_way() -> Executor:
    class FindsItself(BaseStep):
        async def execute(self, ctx: PipelineContext) -> StepResult:
            ctx.module = executor.registry.get(ctx.module_id)
            return StepResult("continue")

    executor = piped()
    steps = executor.current_strategy.steps
    steps[2] = FindsItself("finds_itself", provides=("module",))
    return Executor(executor.registry, strategy=ExecutionStrategy("own", steps))


def refused_by_middleware() -> Executor:
    def refuse(module_id: str, inputs: dict[str, Any], context: Any) -> None:
        if module_id == "login.it":
            raise InvalidInputError(f"nobody logs in today: {inputs}")

    return piped(login_of(lambda inputs: {})).use_before(refuse)


def replaced() -> Executor:
    """While it runs: what took part is the one that was."""

    def fail(inputs: dict[str, Any]) -> NoReturn:
        executor.registry.unregister("login.it")
        executor.registry.register("login.it", FunctionalModule(echo))
        raise InvalidInputError(f"no {inputs['password']}")

    executor = piped(login_of(fail))
    return executor


PIPELINES = "standard internal testing performance minimal".split()
TAKING_PART: dict[str, Callable[[], Executor]] = {
    **{name: lambda name=name: piped(strategy=name) for name in PIPELINES},
    "found": found_in_another_way,
    "middleware": refused_by_middleware,
    "replaced": replaced,
}  # type: ignore[misc]


@pytest.mark.parametrize("name", TAKING_PART)
async def test_who_takes_part_is_known(name: str, caplog: Caplog) -> None:
    """In every pipeline: some have no approval gate, no validation or no middleware. Two servers may share one."""
    executor = TAKING_PART[name]()
    arguments = {"how": "it", "user": "bob", "password": TOKEN}
    async with connect(executor, approval="off") as client, connect(executor) as another:
        for each in [client] if name == "replaced" else [client, another]:
            result = await each.call_tool("quoting_it", arguments)
            failure(result, "Invalid input")
            assert quoted(result, caplog) == []
    assert errors_logged(caplog)


async def test_calls_without_secrets_say_all(caplog: Caplog) -> None:
    """Also where a hint is a class that pydantic does not know, such as an array of NumPy's."""

    def pixels() -> dict[str, io.BytesIO]:
        raise InvalidInputError("no")

    login = FunctionalModule(lambda inputs, context: throw(InvalidInputError("no")))
    modules = {"quoting_it": quoting_it, "login.open": login, "login.pixels": FunctionModule(pixels, "a.pixels")}
    async with connect(modules) as client:
        failure(await client.call_tool("login.pixels", {}), "Invalid input: no")
        quoted = await client.call_tool("quoting_it", {"how": "open"})
    failure(quoted, "Invalid input: cannot log in: no {'how': 'open'}")
    assert "cannot log in: no {'how': 'open'} (trace " in errors_logged(caplog)[1].getMessage()


REFUSING: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "ACLDeniedError": ({"acl": ACL([], default_effect="deny")}, {}),
    "ApprovalDeniedError": ({"approval_handler": AlwaysDenyHandler()}, {}),
    "SchemaValidationError": ({}, {"user": 7}),
    "JSONDecodeError": ({}, {}),
    "RuntimeError": ({}, {"password": "7"}),
}


@pytest.mark.parametrize("name", REFUSING)
async def test_a_withheld_error_is_one_line_with_its_place(name: str, caplog: Caplog) -> None:
    options, arguments = REFUSING[name]
    annotations = ModuleAnnotations(requires_approval=True)
    login = login_of(lambda i: throw(RuntimeError(json.loads(i["password"]))), annotations=annotations)
    async with connect(Executor(registry_of({"login.now": login}), **options), approval="off") as client:
        failure(await client.call_tool("login.now", {"password": TOKEN, "user": "bob", **arguments}))
    (record,) = errors_logged(caplog)
    place = "test_secrets" if name == "RuntimeError" else r"\w+"
    unshown = r"\(not shown: it may quote sensitive values\)"
    expected = rf"Tool call error: login\.now - {name}: {unshown} at {place}\.py:\d+ \(trace \w{{32}}\)"
    assert re.fullmatch(expected, logging.Formatter("%(message)s").format(record))


class Key(BaseModel):
    label: str
    value: str = MARKED


class Computes(BaseModel):
    @computed_field(json_schema_extra=MARK)  # type: ignore[prop-decorator]
    @property
    def token(self) -> str:
        return TOKEN


def fail(*_: Any) -> NoReturn:
    throw(RuntimeError(f"cannot store {TOKEN}"))


def keys_of() -> dict[str, Key]:
    fail()


@pytest.mark.parametrize("redacts", [True, False])
async def test_a_secret_to_be_given_is_not_logged(redacts: bool, caplog: Caplog) -> None:
    modules: dict[str, Any] = {
        "gives.invalid": gives({"token": [TOKEN]}, output_schema=SECRETIVE),
        "gives.model": gives({"held": PATIENT}, output_schema=of(held=INTEGER)),
        "raises.token": FunctionalModule(fail, output_schema=SECRETIVE),
        "raises.exit": FunctionalModule(lambda *_: throw(SystemExit(TOKEN)), output_schema=SECRETIVE),
        "raises.computed": FunctionalModule(fail, output_schema=Computes),
        "raises.keys": FunctionModule(keys_of, "raises.keys"),
        "passes.on": calls("raises.token"),
    }
    async with connect(modules, redact_output=redacts) as client:
        for tool in modules:
            result = await client.call_tool(tool, {})
            failure(result)
            assert quoted(result, caplog) == [], tool
    assert len(errors_logged(caplog)) == len(modules)
    assert SECRET_TEXT not in caplog.text


# ---- Redaction ----


class Account(BaseModel):
    author: str
    tokens_used: int
    password_hint: str
    pin: int = MARKED
    expires: date = MARKED
    first: Key
    keys: list[Key]
    maybe: Key | None = None
    by_name: dict[str, Key]
    secrets: list[int] = MARKED


class Spelt(BaseModel):
    """Written by other names than its fields have."""

    model_config = ConfigDict(alias_generator=str.title, populate_by_name=True)
    user: str
    pin: str = MARKED
    key: str = Field("", serialization_alias="theKey", json_schema_extra=MARK)

    @computed_field(json_schema_extra=MARK)  # type: ignore[prop-decorator]
    @property
    def token(self) -> str:
        return TOKEN


SPELT = Spelt(user="ann", pin="S3CR3T", key="S3CR3T")
SPELT_OUT = {"User": "ann", **dict.fromkeys(("Pin", "theKey", "Token"), REDACTED)}
KEY, HIDDEN = {"label": "l", "value": "S3CR3T"}, {"label": "l", "value": REDACTED}
INNOCENT = {"author": "Ann", "tokens_used": 3, "password_hint": "cat"}  # apcore's own redaction goes by such words
ACCOUNT: dict[str, Any] = {
    **{**INNOCENT, "pin": 918273645, "expires": date(2031, 12, 13), "first": KEY, "keys": [KEY, KEY]},
    **{"maybe": KEY, "by_name": {"a": KEY}, "secrets": [918273645]},
}
SHOWN: dict[str, Any] = {
    **{**INNOCENT, "pin": REDACTED, "expires": REDACTED, "first": HIDDEN, "keys": [HIDDEN, HIDDEN]},
    **{"maybe": HIDDEN, "by_name": {"a": HIDDEN}, "secrets": REDACTED},
}
SECRET, SECRET_NUMBER = MARK, sensitive(type="integer")
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
    "by_other_names": (Spelt, SPELT, SPELT_OUT),
    "by_name": (Spelt, {"user": "ann", "pin": "S3CR3T", "key": "S3CR3T"}, SPELT_OUT),
    "by_alias": (Spelt, {"User": "ann", "Pin": "S3CR3T", "Key": "S3CR3T"}, SPELT_OUT),
    "one_place_of_a_tuple": (of(pair=PAIR), {"pair": [1, 918273645]}, {"pair": [1, REDACTED]}),
    "some_names": (PATTERN, dict.fromkeys(NAMES, 918273645), REDACTED),
    "beside_a_pattern": ({**of(p=SECRET), "patternProperties": {"^x": {}}}, {"p": 1, "x": 2}, {"p": REDACTED, "x": 2}),
    "a_text_beside_an_object": (of(p={"anyOf": [of(pin=SECRET), STRING]}), {"p": "a"}, {"p": "a"}),
    "nothing": (of(p=sensitive(type=["string", "null"])), {"p": None}, {"p": None}),
    "definition_elsewhere": (
        {**of(pin={"$ref": "#/components/Pin"}), "components": {"Pin": SECRET_NUMBER}},
        {"pin": 918273645},
        {"pin": REDACTED},
    ),
    "the_whole": ({"type": "object", **SECRET}, {"p": 918273645}, REDACTED),
    "the_whole_of_a_variant": ({"anyOf": [{"type": "object", **SECRET}, of(p=INTEGER)]}, {"p": 918273645}, REDACTED),
}


def shown(module: Any, value: Any) -> Any:
    """What is sent of `value`, which `module` gives, by a server that redacts."""
    return redact(sent(module, value), *tool_of(module).marks)


@pytest.mark.parametrize("name", ACCOUNTS)
def test_a_mark_hides_what_it_is_for(name: str) -> None:
    schema, output, expected = ACCOUNTS[name]
    module = gives(output, output_schema=schema)
    assert shown(module, output) == expected
    assert tool_of(module).output_schema == {}, "what is hidden is not promised"
    assert REDACTED not in json.dumps(tool_of(module, redact_output=False).output_schema)


class Unsent(BaseModel):
    user: str
    key: str = Field("", exclude=True, json_schema_extra=MARK)


def test_what_is_never_sent_needs_no_hiding() -> None:
    """The rest of its model is promised."""
    module = gives(None, output_schema=Unsent)
    assert shown(module, {"user": "ann", "key": "S3CR3T"}) == {"user": "ann"}
    assert [*tool_of(module).output_schema["properties"]] == ["user"]


UNMARKED: dict[str, dict[str, Any]] = {
    "default": of(p={"default": MARK}),
    "choices": of(p={"anyOf": [{"enum": [MARK, 1]}, {"const": MARK}], "examples": [MARK]}),
    "name": of(**MARK),  # a property of this name, with any value
    "false": of(p={"x-sensitive": False}),
}


@pytest.mark.parametrize("name", UNMARKED)
def test_a_mark_in_data_or_a_name_is_none(name: str) -> None:
    module = gives(None, input_schema=UNMARKED[name], output_schema=UNMARKED[name])
    tool = tool_of(module)
    assert shown(module, {"p": 1}) == {"p": 1}
    assert [tool.has_secret_inputs, has_marks(module, "input"), has_marks(module, "output")] == [False] * 3
    assert tool.output_schema


class Unwritable(BaseModel):
    """A model of which no JSON schema can be made."""

    model_config = ConfigDict(extra="allow")
    password: str = MARKED

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> NoReturn:
        raise ValueError("no schema")


ODD_PLACE = {**of(password={"$ref": "#/components/Token"}), "components": {"Token": MARK}}


@pytest.mark.parametrize("schema", [Unwritable, ODD_PLACE], ids=["unwritable", "odd place"])
def test_a_mark_that_cannot_be_read_counts(schema: Any) -> None:
    module = gives({}, input_schema=schema, output_schema=schema)
    registry_of({"a.tool": module})  # which makes something else of a dict
    assert has_marks(module, "input")
    assert has_marks(module, "output")


ELSEWHERE = {"components": {"Node": of(again={"$ref": "#/components/Node"}, token=MARK)}}
ODD_MARKS: dict[str, Any] = {
    "t.behind_a_reference": {**of(a={"$ref": "#/components/Node"}), **ELSEWHERE},
    "t.in_a_list_of_properties": {**of(a={"$ref": "#"}), "properties": [MARK]},
}


async def test_a_mark_not_followed_leaves_its_module_out(caplog: Caplog) -> None:
    """Without an output schema it would be served with what the mark was to hide."""
    modules = {name: gives({"a": {"token": TOKEN}}, output_schema=schema) for name, schema in ODD_MARKS.items()}
    async with connect({**modules, "t.other": echo}, redact_output=True) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["t.other"]
    assert [f"Module {name} is left out" in caplog.text for name in modules] == [True, True]


# ---- pydantic's SecretStr ----


class Connection(BaseModel):
    user: str
    password: SecretStr


CONNECTION = Connection(user="bob", password=SecretStr(SECRET_TEXT))


def test_a_secret_str_is_a_mark_of_answers() -> None:
    hidden = {"user": "bob", "password": REDACTED}
    assert shown(returning(Connection, CONNECTION), CONNECTION) == hidden
    assert shown(returning(dict[str, Connection], {"a": CONNECTION}), {"a": CONNECTION}) == {"a": hidden}
    assert shown(returning(Any, [CONNECTION]), [CONNECTION]) == {"result": [hidden]}


class Revealed(BaseModel):
    password: SecretStr
    pins: list[Secret[int]]

    @field_serializer("password", when_used="json")
    def reveal(self, password: SecretStr) -> str:
        return password.get_secret_value()

    @field_serializer("pins")
    def reveal_all(self, pins: list[Secret[int]]) -> list[int]:
        return [pin.get_secret_value() for pin in pins]


def test_a_serializer_reveals_no_secret() -> None:
    revealed = Revealed(password=SecretStr(SECRET_TEXT), pins=[Secret[int](SECRET_PIN)])
    hidden = {"password": REDACTED, "pins": REDACTED}
    assert shown(returning(Revealed, revealed), revealed) == hidden
    assert shown(returning(Any, [revealed]), [revealed]) == {"result": [hidden]}


def log_in(login: Connection) -> str:
    raise InvalidInputError(f"cannot connect as {login.password.get_secret_value()}")


def unlock(locker: int, pin: Secret[int]) -> str:
    raise InvalidInputError(f"{pin.get_secret_value()} does not open {locker}")


def open_as(key: Annotated[SecretStr, Field(json_schema_extra={"format": "api-key"})]) -> str:
    raise InvalidInputError(f"{key.get_secret_value()} opens nothing")


Pin = TypeAliasType("Pin", Secret[int])  # which a model of two is given by reference


def change(old: Pin, new: Pin) -> str:
    raise InvalidInputError(f"{old.get_secret_value()} is not the old one")


LOGINS = [{"login": {"user": user, "password": SECRET_TEXT}} for user in ("bob", [])]
REPEATED = [(log_in, LOGINS[0], 1), (log_in, LOGINS[1], 0), (unlock, {"locker": 3, "pin": SECRET_PIN}, 1)]
REPEATED += [(open_as, {"key": SECRET_TEXT}, 1), (change, {"old": SECRET_PIN, "new": SECRET_PIN}, 1)]


class Level(enum.Enum):
    HIGH = "high"


def test_a_secret_marks_no_other_of_its_type() -> None:
    def let_in(level: Secret[Level], shown: Level) -> None: ...

    taken = tool_of(FunctionModule(let_in, "a.function")).arguments
    assert taken.shown({"level": "high", "shown": "high"})[0] == {"level": REDACTED, "shown": "high"}


@pytest.mark.parametrize(("function", "arguments", "questions"), REPEATED)
async def test_pydantics_secrets_are_marks(function: Any, arguments: Any, questions: int, caplog: Caplog) -> None:
    """In the question, in what a call fails with, and in the log."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    module = FunctionModule(function, "a.lock", annotations={"requires_approval": True})
    options, asked = asking(accept(approve=True))
    async with connect({"a.lock": module}, client=options) as client:
        result = await client.call_tool("a.lock", arguments)
    failure(result, "Invalid input" if questions else None)
    assert quoted(result, caplog) == []
    assert [secret for secret in (SECRET_TEXT, str(SECRET_PIN)) if secret in str(asked)] == []
    assert len(asked) == questions
    assert function is not unlock or "- locker: 3" in asked[0].message


# ---- Models inside what a module returns ----


class Patient(BaseModel):
    name: str = "Ann"
    ssn: str = Field(SECRET_TEXT, alias="socialNumber", json_schema_extra=MARK)


class Public(BaseModel):
    name: str = "Ann"
    ssn: str = ""


class Private(Public):
    ssn: Annotated[str, MARKED] = SECRET_TEXT


class Ward(BaseModel):
    anything: Any = Patient()


@dataclasses.dataclass
class Bed:
    patient: Any


class Visit(NamedTuple):
    ssn: Annotated[str, MARKED]
    patient: Any


class Computed(BaseModel):
    @computed_field(title="First", alias="first")  # type: ignore[prop-decorator]
    @property
    def held(self) -> Any:
        return [PATIENT]


class Frozen(Private):
    model_config = ConfigDict(frozen=True)


PATIENT, PRIVATE, FROZEN = Patient(), Private(), Frozen()
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
    "computed": Computed(),
}
"""Of which all else is shown."""


class Openly(BaseModel):
    model_config = ConfigDict(extra="allow")


class Dumped(BaseModel):
    held: Annotated[list[Any], PlainSerializer(lambda held: [{"a": each.name, "b": each.ssn} for each in held[::-1]])]


Pins = Annotated[list[Annotated[str, MARKED]], PlainSerializer(lambda pins: " ".join(pins))]


class Counted(BaseModel):
    pins: Pins = [SECRET_TEXT]


class Listed(BaseModel):
    held: Any

    @model_serializer
    def as_list(self):  # type: ignore[no-untyped-def]
        return [1, self.held]


class WithoutNone(Private):
    @model_serializer(mode="wrap")
    def without_none(self, handler: Any) -> dict[str, str]:
        return {name: item for name, item in handler(self).items() if item is not None}


class Iterated(RootModel[list[Any]]):
    """As pydantic's documentation recommends it."""

    def __iter__(self) -> Any:
        return iter([])


Patients = RootModel[list[Patient]]


class Renamed(BaseModel):
    held: Any

    @model_serializer
    def as_lists(self):  # type: ignore[no-untyped-def]
        return {"held": [self.held.ssn]}


class Rooted(RootModel[list[Any]]):
    @field_serializer("root")
    def as_lists(self, root: list[Any]):  # type: ignore[no-untyped-def]
        return [[each.ssn] for each in root]


class Tree(BaseModel):
    model_config = ConfigDict(defer_build=True)
    pin: Annotated[str, MARKED] = SECRET_TEXT
    branches: list[Tree] = []


class Reread(BaseModel):
    """Of its secret, pydantic knows nothing any more."""

    held: Annotated[
        SecretStr,
        PlainValidator(lambda secret: secret),
        PlainSerializer(SecretStr.get_secret_value, return_type=str),
    ] = SecretStr(SECRET_TEXT)


class Login(TypedDict):
    pin: Annotated[str, MARKED]


class Logins(BaseModel):
    """A type that stands in it twice is a reference."""

    first: Login = {"pin": SECRET_TEXT}
    untyped: list[Login] = [{"pin": SECRET_TEXT}]
    typed: list[Login] = [{"pin": SECRET_TEXT}]

    @field_serializer("untyped")
    def in_short(self, logins: list[Login]):  # type: ignore[no-untyped-def]
        return [login["pin"] for login in logins]

    @field_serializer("typed")
    def in_a_line(self, logins: list[Login]) -> str:
        return " ".join(login["pin"] for login in logins)


class Subclasses(BaseModel):
    held: list[SerializeAsAny[Public]]


T = TypeVar("T")


class Page(BaseModel, Generic[T]):
    items: list[T]


class Kind(enum.Enum):
    PATIENT = PATIENT


class Named(TypedDict):
    held: Any


class Label:
    def __str__(self) -> str:
        return SECRET_TEXT


@dataclasses.dataclass
class Scan:
    """With a field that pydantic has no schema for, and one that it does not know."""

    pin: Annotated[str, MARKED]
    label: Annotated[Label, MARKED] = dataclasses.field(default_factory=Label)
    pixels: io.BytesIO | None = None
    token: Annotated[str, MARKED] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.token = SECRET_TEXT


class Holding:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __str__(self) -> str:
        return f"it holds {self.held}"


class Token(str):
    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        return handler(str)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
        return {**handler(schema), **MARK}


class Renaming(BaseModel):
    own_pin: Annotated[str, MARKED] = SECRET_TEXT
    patient: Patient = PATIENT

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return {to_camel(name): value for name, value in super().model_dump(**options).items()}


class Keeper:
    def __init__(self) -> None:
        self.patient = PATIENT

    def __str__(self) -> str:
        return SECRET_TEXT


OPEN: dict[str, tuple[Any, Any]] = {
    "sequence": (typing.Sequence[Patient], [PATIENT]),
    "mutable_sequence": (typing.MutableSequence[Patient], [PATIENT]),
    "root_model": (Patients, Patients([PATIENT])),
    "any_with_a_title": (Annotated[Any, Field(title="T")], PATIENT),
    "default": (Ward, Ward()),
    "any_field": (Ward, Ward(anything=[PATIENT])),
    "any_field_of_a_row": (list[Ward], [{"anything": PATIENT}]),
    "extra": (dict[str, Openly], {"a": Openly(held=PATIENT)}),
    "untyped_serializer": (list[Dumped], [Dumped(held=[PRIVATE])]),
    "serializer_of_any": (Annotated[Any, PlainSerializer(lambda held: [held.ssn], return_type=Any)], PRIVATE),
    "untyped_serializer_of_marked_items": (Counted, Counted()),
    "untyped_annotation": (Annotated[list[Any], PlainSerializer(lambda held: held[::-1])], [1, PATIENT]),
    "untyped_model_serializer": (Any, [Listed(held=PATIENT)]),
    "serializer_in_a_dict": (dict[str, Annotated[Any, PlainSerializer(lambda held: [held.ssn])]], {"a": PRIVATE}),
    "renaming_model_serializer": (Any, [Renamed(held=PATIENT)]),
    "typed_model_serializer": (WithoutNone, WithoutNone()),
    "another_parameter": (Page[Any], Page[Annotated[str, MARKED]](items=[SECRET_TEXT])),
    "root_any": (RootModel[Any], RootModel[Any](PATIENT)),
    "root_list": (RootModel[list[Any]], RootModel[list[Any]]([1, PATIENT])),
    "root_dict": (list[RootModel[dict[str, Any]]], [RootModel[dict[str, Any]]({"a": PATIENT})]),
    "root_serializer": (Any, [Rooted([PATIENT])]),
    "root_that_iterates": (Any, [Iterated([PATIENT])]),
    "serializers_of_references": (Logins, Logins()),
    "references_by_any": (Any, [Logins()]),
    "read_by_its_author": (Reread, Reread()),
    "computed_any": (Computed, Computed()),
    "serialize_as_any": (Subclasses, Subclasses(held=[PRIVATE])),
    "another_class_in_a_field": (list[Subclasses], [Subclasses.model_construct(held=[PATIENT])]),  # type: ignore
    "subclass": (list[Public], [PRIVATE]),
    "by_other_names": (dict[str, Spelt], {"a": SPELT}),
    "subclass_of_a_generator": (typing.Iterable[Public], [PRIVATE]),
    "another_schema": (Annotated[Patient, WithJsonSchema({"type": "object"})], PATIENT),
    "circular": (Any, [Tree()]),
    "enum": (Any, [Kind.PATIENT]),
    "enum_by_hint": (list[Kind], [Kind.PATIENT]),
    "typed_dict": (list[Named], [{"held": PATIENT}]),
    "text_of_a_class": (dict, {"a": Token(SECRET_TEXT)}),
    "renaming_dump": (Any, [Renaming()]),
    "object": (Any, [Keeper()]),
    "object_of_slots": (Any, Holding(Holding(PRIVATE))),
    "error": (Any, [ValueError(PATIENT)]),
    "secret": (dict[str, Secret[str]], {"a": Secret[str](SECRET_TEXT)}),
    "dataclass_known_in_part": (Any, Scan(SECRET_TEXT)),
    "set": (Any, {("a", str(number)) for number in range(50)} | {Visit(SECRET_TEXT, None)}),
}
"""A hint that leaves open what is written, and what is returned by it."""


@pytest.mark.parametrize("name", [*HELD, *OPEN])
def test_what_a_model_marks_is_hidden_wherever_it_stands(name: str) -> None:
    hint, value = OPEN.get(name, (Any, HELD.get(name)))
    held = {"held": value}
    function = returning(hint, value)
    texts = [
        json.dumps(written)
        for written in (
            shown(function, value),
            shown(returning(dict, held), held),
            shown(gives(held), held),
            redact(as_json(held), marks_in(held)),  # in a chunk, or put in by middleware
        )
    ]
    assert SECRET_TEXT not in "".join(texts) + json.dumps(tool_of(function, redact_output=False).output_schema)
    if name in HELD:
        assert [("Ann" in text, REDACTED in text) for text in texts] == [(True, True)] * 4


def test_what_a_serializer_makes_of_marked_items_is_hidden() -> None:
    for hint, value in ((Pins, [SECRET_TEXT]), (dict[str, Pins], {"a": [SECRET_TEXT]})):
        assert SECRET_TEXT not in json.dumps(shown(returning(hint, value), value))


class Team(BaseModel):
    """What it writes of people has no marks."""

    lead: Annotated[str, MARKED] = SECRET_TEXT
    labels: dict[str, Any] = {"color": "blue", "sizes": [1, {"a": 2}]}
    people: list[Private] = []
    former: list[Private] = [PRIVATE]

    @field_serializer("people")
    def as_they_come(self, people):  # type: ignore[no-untyped-def]
        return people

    @field_serializer("former")
    def counted(self, former: list[Private]) -> dict[str, int]:
        return {"count": len(former)}


class Bill(TypedDict):
    card: Annotated[str, MARKED]
    price: Annotated[float, PlainSerializer(lambda price: f"{price:.2f}")]


TEAM = {"lead": REDACTED, "labels": Team().labels, "people": [], "former": {"count": 1}}
BILL = {"card": REDACTED, "price": "1.50"}


@pytest.mark.parametrize(
    ("hint", "value", "written"),
    [
        (Team, Team(), TEAM),
        (Any, [Team()], {"result": [TEAM]}),
        (dict, {"a": Team()}, {"a": TEAM}),
        (list[Bill], [{"card": SECRET_TEXT, "price": 1.5}], {"result": [BILL]}),
    ],
)
def test_what_nothing_marks_is_shown_beside_it(hint: Any, value: Any, written: Any) -> None:
    assert shown(returning(hint, value), value) == written


async def test_beside_what_middleware_adds_all_marks_hold() -> None:
    executor = Executor(registry_of({"a.patient": returning(Patient, PATIENT)}))
    executor.use_after(lambda module_id, inputs, output, context: {"data": output, "by": PRIVATE})
    async with connect(executor) as client:
        assert SECRET_TEXT not in success_text(await client.call_tool("a.patient", {}))


def test_where_nothing_is_known_to_stand_all_marks_hold() -> None:
    """An author's function may have put it there."""
    patient, hidden = {"socialNumber": SECRET_TEXT, "name": "Ann"}, {"socialNumber": REDACTED, "name": "Ann"}
    assert redact([{}, patient], marks_in([PATIENT])) == [{}, hidden]
    assert redact({"b": patient}, marks_in({"a": PATIENT})) == {"b": hidden}


@pytest.mark.parametrize("part", [{"a": {"pin": 1}}, [{"pin": 1}], {"pins": [{"pin": 1}]}])
@pytest.mark.parametrize("expected", [PIN, {"items": PIN}, {"prefixItems": [PIN]}, {"additionalProperties": PIN}])
def test_in_the_place_of_something_else_nothing_marked_is_shown(part: Any, expected: Any) -> None:
    """A module's own example may have a list for an object, and middleware that pages an object for a list."""
    marks = {"properties": {"part": expected}}
    assert json.dumps(redact({"part": part}, marks)).count(": 1") == 0
    assert redact({"part": part}, {"properties": {"part": {}, "other": expected}}) == {"part": part}


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)
    full_name: str = "Ann"
    own_pin: Annotated[str, MARKED] = SECRET_TEXT
    password: SecretStr = SecretStr(SECRET_TEXT)


def test_by_a_bindings_schema_a_model_has_other_names() -> None:
    """Those of its attributes, as apcore writes them; its marks are told by its aliases."""
    binding = returning(Camel, Camel())
    binding.output_schema = {"type": "object"}
    assert SECRET_TEXT not in str(shown(binding, Camel()))
    assert shown(binding, Bed(PATIENT)) == {"result": {"patient": {"name": "Ann", "socialNumber": REDACTED}}}


async def test_a_marked_model_is_hidden_at_every_door(caplog: Caplog) -> None:
    """Also in a stream, of a binding, in what middleware copies or puts in, and for OpenAI."""
    held = {"held": deque([PATIENT, Ward(anything=PATIENT)])}

    def fill(module_id: str, inputs: Any, output: Any, context: Any) -> Any:
        return held if module_id == "a.filled" else {**output}

    def bound(count: int, context: Context) -> Any:
        assert (count, context.call_chain[-1]) == (1, "a.binding")
        return PATIENT

    binding = FunctionModule(bound, "a.binding")
    vars(binding).update(input_schema=of(count=INTEGER), output_schema={"type": "object"})  # as of a binding file
    modules = {
        "a.class": gives(held),
        "a.filled": gives({}),
        "a.stream": StreamingModule([held]),
        "a.function": returning(Any, PATIENT),
        "a.dict": returning(dict, held),
        "a.binding": binding,
        "an.account": gives(ACCOUNT, output_schema=Account),
    }
    for redacts in (True, False):
        executor = Executor(registry_of(modules))
        executor.use_after(fill)
        note, told = noting()
        async with connect(executor, redact_output=redacts) as client:
            for name in modules:
                arguments = {"count": 1} if name == "a.binding" else {}
                result = await client.call_tool(name, arguments, progress_callback=note)
                text = result.model_dump_json(by_alias=True)
                assert ("Ann" in text, REDACTED in text, SECRET_TEXT in text) == (True, redacts, not redacts), name
                if name == "an.account":  # what is hidden needs no second description
                    assert (result.structured_content is None) == redacts
        assert ("Ann" in str(told), SECRET_TEXT in str(told)) == (True, not redacts)
        assert (SECRET_TEXT in everything_logged(caplog)) is False
    assert SECRET_TEXT not in await run_openai_call(registry_of(modules), "a-function", {})


DESCRIBED: list[Any] = [
    Patient, list[Patient], dict[str, Patient | None], tuple[Patient, int], typing.Sequence[Patient], Patients,
    dict[str, Secret[int]], Annotated[Any, PlainSerializer(str, return_type=str)],
]  # fmt: skip
LEFT_OPEN: list[Any] = [
    Any, object, list, dict[str, Any], dict[int, str], bytes, Bed, Visit, SerializeAsAny[Patient], Openly, Dumped,
    Listed, Iterated, Computed, Annotated[int, WithJsonSchema({})], Named, Kind,
    Annotated[int, PlainSerializer(lambda number: number)],
]  # fmt: skip


def test_what_is_described_is_told_by_the_core_schema() -> None:
    """What is of no known kind is open."""
    assert [hint for hint in DESCRIBED if is_open(core_schema_of(TypeAdapter(hint)))] == []
    assert [hint for hint in LEFT_OPEN if not is_open(core_schema_of(TypeAdapter(hint)))] == []
    assert is_open({"type": "of-tomorrow"})
    assert is_open({"type": "list"})


class Person(BaseModel):
    """As `Patient`, without marks."""

    name: str
    socialNumber: str = ""


class Numbered(BaseModel):
    number: int = 1


class MarkedNumber(Numbered):
    number: Annotated[int, MARKED] = 1


OTHER_HINTS: list[tuple[Any, Any]] = [
    (dict[str, str], PATIENT),
    (list[dict[str, str]], [PATIENT]),
    (list[dict[str, str]], iter([PATIENT])),
    (Person, PATIENT),
    (list[Person], [PATIENT]),
    (dict[str, Person], {"a": PATIENT}),
    (list[Numbered], [MarkedNumber()]),  # what is hidden is no number
]


@pytest.mark.parametrize(("hint", "value"), OTHER_HINTS, ids=[str(hint) for hint, _ in OTHER_HINTS])
def test_a_marked_model_fits_no_other_hint(hint: Any, value: Any) -> None:
    """By which nothing would be hidden."""
    with pytest.raises(ModuleError) as caught:
        sent(returning(hint, value), value)
    assert SECRET_TEXT not in f"{caught.value} {caught.value.details}"


@pytest.mark.parametrize("key", [FROZEN, ("a", FROZEN), Visit(SECRET_TEXT, None), Kind.PATIENT], ids=type)
def test_no_model_is_a_name(key: Any) -> None:
    """Its text would be its `__repr__`."""
    for hint in (Any, dict, dict[str, Any]):
        with pytest.raises(ModuleError, match="is no name in JSON"):
            sent(returning(hint, {"a": {key: 1}}), {"a": {key: 1}})


class Job(BaseModel):
    public: Public = PRIVATE
    listed: list[Any] = [PRIVATE]
    count: int = 1
    anything: Any = logging.getLogger("which pydantic cannot write")


@pytest.mark.parametrize("redacts", [True, False])
def test_a_default_that_marks_something_is_not_listed(redacts: bool) -> None:
    """Its class is another than the hint's."""
    definition = tool_of(gives({}, input_schema=Job, output_schema=Job), redact_output=redacts).definition("portable")
    assert SECRET_TEXT not in json.dumps(definition)
    assert definition["inputSchema"]["properties"]["count"]["type"] == "integer"


async def test_a_result_that_is_hidden_as_a_whole_is_an_object() -> None:
    class Sealed(BaseModel):
        model_config = ConfigDict(json_schema_extra=MARK)
        pin: str = SECRET_TEXT

    async with connect({"a.sealed": gives(Sealed())}) as client:
        assert json.loads(success_text(await client.call_tool("a.sealed", {}))) == {"result": REDACTED}


class Masking(BaseModel):
    """What it writes has no mark. An author's example and a chunk are not written by it."""

    ssn: Annotated[str, MARKED] = Field(SECRET_TEXT, exclude=True)
    n: int = 1


async def test_in_examples_and_chunks_what_is_marked_is_hidden() -> None:
    written, hidden = {"ssn": SECRET_TEXT, "n": 2}, {"ssn": REDACTED, "n": 2}
    examples = [ModuleExample("one", {"token": SECRET_TEXT}, written)]
    module = StreamingModule([written], input_schema=SECRETIVE, output_schema=Masking, examples=examples)
    (example,) = tool_of(module).examples
    (held,) = tool_of(gives({}, examples=[ModuleExample("one", {}, {"of": PATIENT})])).examples
    assert held["output"] == {"of": {"name": "Ann", "socialNumber": REDACTED}}
    assert (example["inputs"], example["output"]) == ({"token": REDACTED}, hidden)
    note, told = noting()
    async with connect({"a.parts": module}) as client:
        await client.call_tool("a.parts", {}, progress_callback=note)
    assert [json.loads(text or "") for _, _, text in told] == [hidden]


async def test_apcores_log_shows_no_marked_value(caplog: Caplog) -> None:
    uuid = {"type": "string", "format": "uuid"}
    models = [SchemaLoader(Config()).generate_model(of(pin=pin), "Pin") for pin in ({**uuid, **MARK}, uuid)]
    modules = {f"a.pin{number}": gives({}, input_schema=model) for number, model in enumerate(models)}
    async with connect(modules) as client:
        await client.call_tool("a.pin0", {"pin": SECRET_TEXT})
        await client.call_tool("a.pin1", {"pin": "no uuid"})
    lines = [record.getMessage() for record in caplog.records if record.name == "apcore.schema.hardening"]
    assert [("no uuid" in line) for line in lines] == [False, True]
    assert SECRET_TEXT not in caplog.text


async def test_apcores_log_shows_none_beside_its_text(caplog: Caplog) -> None:
    """Where a formatter of JSON would write it."""

    def refuse(inputs: dict[str, Any], context: Context) -> NoReturn:
        try:
            raise InvalidInputError(f"{inputs} is wrong")
        except InvalidInputError:
            logging.getLogger("apcore.middleware.manager").exception("A hook failed")
            raise

    by_name = {"type": "object", "additionalProperties": SECRETIVE}
    modules = {"a.refusal": FunctionalModule(refuse, input_schema=of(by_name=by_name))}
    caplog.set_level(logging.DEBUG, logger="apcore")
    async with connect(Executor(registry_of(modules), middlewares=[LoggingMiddleware()])) as client:
        failure(await client.call_tool("a.refusal", {"by_name": {"a": {"token": SECRET_TEXT}}}))
    records = [vars(record) for record in caplog.records if record.name.startswith("apcore.middleware.")]
    assert "error" in records[-1]
    assert [record for record in records if SECRET_TEXT in str(record)] == []
    assert SECRET_TEXT not in caplog.text
