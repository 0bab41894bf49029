"""What is marked `x-sensitive` leaves neither in results nor in messages nor in the log (NFR-SEC-002, -003; design
"What a module gives", "Errors").
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date
from typing import Any, NoReturn

import pytest
from apcore import ModuleAnnotations, ModuleError
from apcore.errors import InvalidInputError, ModuleNotFoundError, SchemaValidationError
from conftest import FunctionalModule, connect, echo, registry_of, serving
from pydantic import BaseModel, ConfigDict, Field, computed_field, field_validator
from support import (
    REDACTED,
    SECRET_TEXT,
    SECRETIVE,
    client_of,
    errors_logged,
    everything_logged,
    failure,
    gives,
    lines_of,
    parsed,
    success_text,
)

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
    logins: list[PlainLogin]
    limit: int = 0


class PlainLogin(BaseModel):
    password: str = Field(json_schema_extra={"x-sensitive": True})


def array(**schema: Any) -> dict[str, Any]:
    return {"type": "array", **schema}


def map_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": schema}


TOKEN = f"{SECRET_TEXT}-token"
STRING, INTEGER = {"type": "string"}, {"type": "integer"}

# The schema, arguments that break it, and the field that must still be named ("" is the root).
QUOTED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "at_the_field": (of(token=sensitive(type="string", maxLength=3)), {"token": TOKEN}, "token"),
    "number": (of(pin=sensitive(type="string")), {"pin": SECRET_PIN}, "pin"),
    "parent": (of(auth={**of(token=sensitive()), "maxProperties": 0}), {"auth": {"token": TOKEN}}, "auth"),
    "root": ({**of(token=sensitive()), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}, {"token": TOKEN}, "a"),
    "sibling": (of(token=sensitive(), other=INTEGER), {"token": TOKEN, "other": TOKEN}, "other"),
    "secret_object": (
        of(keys=sensitive(**of(pin=STRING), additionalProperties=False)),
        {"keys": {"pin": SECRET_PIN, SECRET_TEXT: 1}},
        "keys.pin",
    ),
    "items": (of(keys=array(items=sensitive(type="string", maxLength=3))), {"keys": ["ok", TOKEN]}, "keys.1"),
    "tuple": (of(keys=array(prefixItems=[STRING, sensitive(maxLength=3)])), {"keys": ["", TOKEN]}, "keys.1"),
    "map": (of(keys=map_of(sensitive(maxLength=3))), {"keys": {"a": TOKEN}}, "keys.a"),
    "pattern_sibling": (
        {**of(other=INTEGER), "patternProperties": {"^key_": sensitive()}},
        {"key_a": TOKEN, "other": TOKEN},
        "other",
    ),
    "reference": (
        {**of(a={"$ref": "#/$defs/Key"}), "$defs": {"Key": sensitive(type="string", pattern="^$")}},
        {"a": TOKEN},
        "a",
    ),
    "branch": (
        of(auth={"anyOf": [of(token=sensitive(maxLength=3)), {"type": "null"}]}),
        {"auth": {"token": TOKEN}},
        "auth.token",
    ),
    "model": (Login, {"user": "bob", "password": TOKEN}, "password"),
    "model_sibling": (Logins, {"logins": [{"password": TOKEN}], "limit": TOKEN}, "limit"),
}


@pytest.fixture(scope="module")
def quoting() -> Iterator[dict[bool, str]]:
    """Servers of a module for each row, one without and one with validate_inputs."""
    modules = {
        f"takes.{name}": FunctionalModule(echo, input_schema=schema, output_schema={})
        for name, (schema, _, _) in QUOTED.items()
    }
    registry = registry_of(modules)
    with serving(registry) as url, serving(registry, validate_inputs=True) as strict_url:
        yield {False: url, True: strict_url}


@pytest.mark.requirement("NFR-SEC-002", "NFR-SEC-003")
@pytest.mark.parametrize("name", QUOTED)
async def test_a_validation_error_never_repeats_a_sensitive_value(
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
    """A module that takes secrets of every kind and fails in its own way."""

    def run(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        fail(inputs)
        return {}

    schema = of(
        user=STRING,
        password=sensitive(type="string"),
        pin=sensitive(type="integer"),
        auth=of(keys={"type": "array", "items": sensitive()}),
        box=sensitive(type="object"),
        tokens={"type": "object", "additionalProperties": sensitive(type="string")},
        either={"anyOf": [of(key=sensitive(type="string")), {"type": "null"}]},
    )
    return FunctionalModule(run, input_schema=schema, **attributes)


def throw(error: BaseException, cause: BaseException | None = None) -> NoReturn:
    raise error from cause


def throw_with_note(inputs: dict[str, Any]) -> NoReturn:
    error = RuntimeError("login failed")
    error.add_note(f"the password was {inputs['password']}")
    raise error


def throw_after_forgetting(inputs: dict[str, Any]) -> NoReturn:
    password = inputs.pop("password")
    inputs["auth"]["keys"].clear()
    raise RuntimeError(f"bad password: {password}")


SPEAKING: dict[str, Callable[[dict[str, Any]], object]] = {
    "plain": lambda i: throw(RuntimeError(f"bad password: {i['password']}")),
    "repr": lambda i: throw(RuntimeError(f"bad login: {i!r}")),
    "json": lambda i: throw(RuntimeError(json.dumps(i))),
    "key_error": lambda i: throw(KeyError(i["password"])),
    "number": lambda i: throw(RuntimeError(f"bad pin {i['pin']}")),
    "in_a_list": lambda i: throw(RuntimeError(f"bad key {i['auth']['keys'][0]}")),
    "in_an_object": lambda i: throw(RuntimeError(f"bad box {i['box']['deep']['in']}")),
    "in_a_map": lambda i: throw(RuntimeError(f"bad token {i['tokens']['a']}")),
    "in_a_branch": lambda i: throw(RuntimeError(f"bad key {i['either']['key']}")),
    "cause": lambda i: throw(RuntimeError("bad login"), ValueError(i["password"])),
    "group": lambda i: throw(ExceptionGroup("bad", [ValueError(i["password"])])),
    "note": throw_with_note,
    "after_forgetting": throw_after_forgetting,
    "module_error": lambda i: throw(ModuleError("LOGIN_FAILED", f"bad password: {i['password']}", {"pin": i["pin"]})),
    "not_found": lambda i: throw(ModuleNotFoundError(i["password"])),
    "own_validation": lambda i: throw(
        SchemaValidationError(errors=[{"field": "user", "code": "known", "message": f"not {i['password']}"}])
    ),
}
PASSWORDS = {
    "plain": SECRET_TEXT,
    "quotes": f"\"'{SECRET_TEXT}\\'\"é",
    "lines": f"-----BEGIN-----\n{SECRET_TEXT}\n-----END-----",
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


WAYS: list[Callable[..., Any]] = [passing_on, wrapping, from_a_thread, through_a_third, streaming]


@pytest.fixture(scope="module")
def speaking() -> Iterator[str]:
    """A server of a module for each way to fail, and of some that call these."""
    modules: dict[str, Any] = {way.__name__: way for way in WAYS}
    modules["streaming"] = FunctionalModule(passing_on, stream=streaming, annotations=ModuleAnnotations(streaming=True))
    for how, fail in SPEAKING.items():
        hidden = ModuleAnnotations(discoverable=how != "plain")  # what is not listed has secrets too
        modules[f"login.{how}"] = login_of(fail, annotations=hidden)
    with serving(registry_of(modules)) as url:
        yield url


@pytest.mark.requirement("NFR-SEC-003")
@pytest.mark.parametrize("how", SPEAKING)
async def test_an_exception_that_quotes_a_secret_is_told_nowhere(
    speaking: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    leaks = []
    async with client_of(speaking) as client:
        calls = [(f"login.{how}", password) for password in PASSWORDS.values() if how != "plain"]
        calls += [(way.__name__, PASSWORDS["plain"]) for way in WAYS]
        for tool, password in calls:
            arguments = {
                "how": how,
                "user": "bob",
                "password": password,
                "pin": SECRET_PIN,
                "auth": {"keys": [SECRET_TEXT]},
                "box": {"deep": {"in": SECRET_TEXT}},
                "tokens": {"a": SECRET_TEXT},
                "either": {"key": SECRET_TEXT},
            }
            caplog.clear()
            result = await client.call_tool(tool, arguments)
            failure(result)
            (record,) = errors_logged(caplog)
            assert record.getMessage().startswith(f"Tool call error: {tool} - ")
            said = result.model_dump_json(by_alias=True) + everything_logged(caplog)
            leaks += [(tool, word) for word in (SECRET_TEXT, str(SECRET_PIN)) if word in said]
    assert leaks == []


async def test_of_a_tool_with_sensitive_input_the_log_says_what_failed_and_where(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module = login_of(lambda i: throw(RuntimeError(f"user {i['user']} has no password {i['password']}")))
    async with connect({"demo.login": module}) as client:
        failure(await client.call_tool("demo.login", {"user": "bob", "password": TOKEN}), "Internal error occurred")
    (record,) = errors_logged(caplog)
    assert "demo.login - RuntimeError: (not shown: it may quote sensitive values)" in record.getMessage()
    assert re.search(r"test_\w+\.py, line \d+ in throw", record.getMessage())


async def test_invalid_input_of_a_tool_with_sensitive_input_is_told_without_its_reason() -> None:
    module = login_of(lambda i: throw(InvalidInputError(f"user {i['user']} has no password {i['password']}")))
    async with connect({"demo.login": module}) as client:
        result = await client.call_tool("demo.login", {"user": "bob", "password": TOKEN})
    failure(result, "Invalid input")


@pytest.mark.parametrize("fail", ["invalid", "raises"])
async def test_a_secret_that_a_module_was_to_give_is_not_logged(fail: str, caplog: pytest.LogCaptureFixture) -> None:
    def give(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        if fail == "raises":
            raise RuntimeError(f"cannot store {TOKEN}")
        return {"token": [TOKEN]}

    async with connect({"gives.token": FunctionalModule(give, output_schema=SECRETIVE)}) as client:
        result = await client.call_tool("gives.token", {})
    failure(result)
    assert SECRET_TEXT not in result.model_dump_json() + everything_logged(caplog)


async def test_a_secret_that_a_model_computes_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Login(BaseModel):
        user: str

        @computed_field(json_schema_extra={"x-sensitive": True})  # type: ignore[prop-decorator]
        @property
        def token(self) -> str:
            return TOKEN

    module = FunctionalModule(lambda inputs, context: throw(RuntimeError(f"cannot store {TOKEN}")), output_schema=Login)
    async with connect({"gives.login": module}) as client:
        failure(await client.call_tool("gives.login", {}), "Internal error occurred")
    assert SECRET_TEXT not in everything_logged(caplog)


# ---- Redaction ----


class Key(BaseModel):
    label: str
    value: str = Field(json_schema_extra={"x-sensitive": True})


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


KEY = {"label": "l", "value": "S3CR3T"}
ACCOUNT: dict[str, Any] = {
    "author": "ann",
    "tokens_used": 3,
    "password_hint": "cat",
    "pin": 918273645,
    "expires": date(2031, 12, 13),
    "first": KEY,
    "keys": [KEY, KEY],
    "maybe": KEY,
    "by_name": {"a": KEY},
    "secrets": [918273645],
}
HIDDEN = {"label": "l", "value": REDACTED}
SHOWN: dict[str, Any] = {
    **{"author": "ann", "tokens_used": 3, "password_hint": "cat", "pin": REDACTED, "expires": REDACTED},
    **{"first": HIDDEN, "keys": [HIDDEN, HIDDEN], "maybe": HIDDEN, "by_name": {"a": HIDDEN}, "secrets": REDACTED},
}


def dict_schema() -> dict[str, Any]:
    """The same account, with no model behind it, and with its map spelled in other words."""
    key = {
        "type": "object",
        "properties": {"label": {"type": "string"}, "value": {"type": "string", "x-sensitive": True}},
        "required": ["label", "value"],
    }
    number = {"type": "integer", "x-sensitive": True, "minimum": 0}
    return {
        "type": "object",
        "properties": {
            "pin": number,
            "first": {"$ref": "#/$defs/Key"},
            "keys": {"type": "array", "items": {"$ref": "#/$defs/Key"}},
            "maybe": {"oneOf": [key, {"type": "null"}]},
            "by_name": {"type": "object", "patternProperties": {"^.$": {"$ref": "#/$defs/Key"}}},
            "secrets": {"type": "array", "x-sensitive": True, "items": {"type": "integer"}, "maxItems": 3},
        },
        "required": ["pin", "keys"],
        "$defs": {"Key": key},
    }


NAMELESS = {key: ACCOUNT[key] for key in ("author", "pin", "first", "keys", "maybe", "by_name", "secrets")}
NUMBER, SECRET_NUMBER = {"type": "integer"}, {"type": "integer", "x-sensitive": True}
PAIR = {"type": "object", "properties": {"pair": {"type": "array", "prefixItems": [NUMBER, SECRET_NUMBER]}}}
SECRETS = ("secret_a", "secret_with_a_schema_of_its_own")
PATTERN = {"type": "object", "properties": {SECRETS[1]: NUMBER}, "patternProperties": {"^secret_": SECRET_NUMBER}}
REST = {"type": "object", "properties": {"count": {}}, "additionalProperties": SECRET_NUMBER}

SECRET = {"x-sensitive": True}
PIN = {"properties": {"pin": SECRET_NUMBER}}
OPEN_PIN, HIDDEN_PIN = {"a": 1, "pin": 918273645}, {"a": 1, "pin": REDACTED}
TAGGED = [{"properties": {"kind": {"const": kind}, "pin": pin}} for kind, pin in (("a", NUMBER), ("b", SECRET_NUMBER))]


def beside(**keywords: Any) -> dict[str, Any]:
    """An output schema whose mark stands in a schema beside its properties."""
    return {"type": "object", "properties": {"a": NUMBER}, **keywords}


def held(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": schema}, "required": ["p"]}


# An output schema, what the module returns, and what the client may see of it.
ACCOUNTS: dict[str, tuple[Any, dict[str, Any], Any]] = {
    "then": (beside(**{"if": {"required": ["a"]}, "then": PIN}), OPEN_PIN, HIDDEN_PIN),
    "not": (beside(**{"not": {**PIN, "required": ["b"]}}), OPEN_PIN, HIDDEN_PIN),
    "dependentschemas": (beside(dependentSchemas={"a": PIN}), OPEN_PIN, HIDDEN_PIN),
    "dependencies": (held({"dependencies": {"a": PIN, "b": ["a"]}}), {"p": OPEN_PIN}, {"p": REDACTED}),
    "unevaluatedproperties": (beside(unevaluatedProperties=SECRET_NUMBER), OPEN_PIN, HIDDEN_PIN),
    "what_another_schema_calls_a_plain_number": (
        beside(allOf=[{"properties": {"pin": SECRET}}], additionalProperties=NUMBER),
        OPEN_PIN,
        HIDDEN_PIN,
    ),
    "in_one_variant_of_two": (
        beside(oneOf=TAGGED),
        {"a": 1, "kind": "a", "pin": 918273645},
        {"a": 1, "kind": "a", "pin": REDACTED},
    ),
    "additionalitems": (held({"type": "array", "additionalItems": SECRET}), {"p": [918273645]}, {"p": REDACTED}),
    "contains": (
        held({"type": "array", "contains": SECRET_NUMBER, "maxContains": 1}),
        {"p": [1.5, 918273645]},
        {"p": REDACTED},
    ),
    "propertynames": (held({"type": "object", "propertyNames": SECRET}), {"p": {"918273645": 1}}, {"p": REDACTED}),
    "contentschema": (
        held({"type": "string", "contentMediaType": "application/json", "contentSchema": PIN}),
        {"p": '{"pin": 918273645}'},
        {"p": REDACTED},
    ),
    "allof": (
        held({"allOf": [{"type": "string", "pattern": "^S"}, {"enum": ["S3CR3T"], **SECRET}]}),
        {"p": "S3CR3T"},
        {"p": REDACTED},
    ),
    "model": (Account, ACCOUNT, SHOWN),
    "dict": (dict_schema(), NAMELESS, {key: SHOWN[key] for key in NAMELESS}),
    "one_place_of_a_tuple": (PAIR, {"pair": [1, 918273645]}, {"pair": [REDACTED, REDACTED]}),
    "some_names": (PATTERN, dict.fromkeys(SECRETS, 918273645), dict.fromkeys(SECRETS, REDACTED)),
    "all_other_names": (REST, {"count": 1, "else": 918273645}, {"count": 1, "else": REDACTED}),
    "nothing": (held({"type": ["string", "null"], **SECRET}), {"p": None}, {"p": None}),
    "the_whole": ({"type": "object", **SECRET}, {"p": 918273645}, REDACTED),
    "the_whole_of_a_variant": ({"anyOf": [{"type": "object", **SECRET}, held(NUMBER)]}, {"p": 918273645}, REDACTED),
}


@pytest.fixture(scope="module")
def accounts() -> Iterator[dict[bool, str]]:
    """Servers of a module for each row, one that redacts and one that does not."""
    modules = {f"of.{name}": gives(output, output_schema=schema) for name, (schema, output, _) in ACCOUNTS.items()}
    with serving(registry_of(modules)) as url, serving(registry_of(modules), redact_output=False) as open_url:
        yield {True: url, False: open_url}


@pytest.mark.parametrize("name", ACCOUNTS)
async def test_sensitive_output_is_redacted_wherever_it_stands(
    accounts: dict[bool, str], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With `redact_output=False` it is what the module gave."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    _, output, shown = ACCOUNTS[name]
    async with client_of(accounts[True]) as client:
        result = await client.call_tool(f"of.{name}", {})
    assert parsed(success_text(result)) == shown
    assert result.structured_content is None, "what is hidden needs no second description"
    said = result.model_dump_json() + "".join(r.getMessage() for r in caplog.records if r.name.startswith("apcore_mcp"))
    assert [secret for secret in ("S3CR3T", "918273645", "2031-12-13") if secret in said] == []
    async with client_of(accounts[False]) as client:
        result = await client.call_tool(f"of.{name}", {})
    assert parsed(success_text(result)) == json.loads(json.dumps(output, default=str))


async def test_what_is_hidden_is_not_promised(accounts: dict[bool, str]) -> None:
    for redacts, url in accounts.items():
        async with client_of(url) as client:
            tools = (await client.list_tools()).tools
            result = await client.call_tool("of.model", {})
        assert len(tools) == len(ACCOUNTS)
        assert {tool.output_schema is None for tool in tools} == {redacts}
        assert (result.structured_content is None) is redacts
        assert REDACTED not in json.dumps([tool.output_schema for tool in tools])


async def test_a_mark_in_a_model_that_is_built_late_hides_under_both_names() -> None:
    class Inner(BaseModel):
        model_config = ConfigDict(defer_build=True)
        token: str = Field(serialization_alias="tok", json_schema_extra={"x-sensitive": True})

    class Outer(BaseModel):
        model_config = ConfigDict(defer_build=True)
        inner: Inner

    given = {"inner": Inner(token="S3CR3T")}
    async with connect({"a.late": gives(given, output_schema=Outer)}) as client:
        assert "S3CR3T" not in (await client.call_tool("a.late", {})).model_dump_json()
