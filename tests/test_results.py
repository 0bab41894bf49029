"""What a module's answer becomes, and what its tool looks like: FR-EXEC-001 to -006, FR-SCHEMA-005, FR-ANNOT-001 to
-006, FR-SERVER-011, and the design page's "Output", "Annotations" and "Tool names". Real registry, Executor, server and
client.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import enum
import inspect
import json
import logging
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from uuid import UUID

import httpx
import pytest
from apcore import ACL, ACLRule, Config, Executor, FunctionModule, Middleware, ModuleAnnotations, Registry
from apcore.policy import ExecutionPolicy, PolicyRule
from conftest import ANYTHING, HANDSHAKE, MODERN, FunctionalModule, connect, echo, registry_of, serving
from jsonschema import Draft202012Validator
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, Implementation
from pydantic import BaseModel, BeforeValidator, Field

from apcore_mcp import from_openai_call, to_openai_tools

REDACTED = "***REDACTED***"


def text_of(result: CallToolResult) -> str:
    """The text of a result that is no error and is one text."""
    (part,) = result.content
    assert part.type == "text"
    assert result.is_error is False, part.text
    return part.text


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def parsed(text: str) -> Any:
    return json.loads(text, parse_constant=refuse_constant)


def gives(output: Any, **attributes: Any) -> FunctionalModule:
    return FunctionalModule(lambda inputs, context: output, **attributes)


@contextlib.asynccontextmanager
async def client_of(url: str, mode: str = MODERN) -> AsyncIterator[Client]:
    async with Client(f"{url}/mcp", mode=mode, cache=None, read_timeout_seconds=30) as client:
        yield client


# ---- Output as JSON ----


class Color(enum.Enum):
    RED = "red"


class Size(BaseModel):
    width: int
    made: date


class Thing:
    def __str__(self) -> str:
        return "a thing"


def from_base64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text.replace("+", "-").replace("/", "_") + "=" * (-len(text) % 4))


PLUS_TWO = timezone(timedelta(hours=2))

# A value that a module may return, what its JSON is, and what reads that back.
VALUES: dict[str, tuple[Any, type, Callable[[Any], Any]]] = {
    "date": (date(2026, 2, 3), str, date.fromisoformat),
    "datetime": (datetime(2026, 2, 3, 4, 5, 6, 789), str, datetime.fromisoformat),
    "datetime_zone": (datetime(2026, 2, 3, 4, 5, tzinfo=PLUS_TWO), str, datetime.fromisoformat),
    "uuid": (UUID("12345678-1234-5678-1234-567812345678"), str, UUID),
    "path": (PurePosixPath("/tmp/a b"), str, PurePosixPath),
    "decimal": (Decimal("1.10"), str, Decimal),
    "enum": (Color.RED, str, Color),
    "bytes": (b"hello", str, from_base64),
    "bytes_not_utf8": (b"\xff\xfe\x00\xfb\xef\xbe", str, from_base64),
    "set": ({1, 2, 3}, list, set),
    "frozenset": (frozenset({"a"}), list, frozenset),
    "tuple": ((1, "a"), list, tuple),
    "model": (Size(width=1, made=date(2026, 2, 3)), dict, Size.model_validate),
    "models": ([{"size": Size(width=1, made=date(2026, 2, 3))}], list, lambda v: [{"size": Size(**v[0]["size"])}]),
    "object": (Thing(), str, lambda text: text if text != "a thing" else VALUES["object"][0]),
    "class": (Exception("as text"), str, lambda text: text if text != "as text" else VALUES["class"][0]),
    "unicode": ('é "quoted" \u2028 \U0001f600 </script>', str, str),
    "big_integer": (2**80, int, int),
    "nothing": (None, type(None), lambda value: value),
    "empty": ({}, dict, dict),
}


@pytest.fixture(scope="module")
def valued() -> Iterator[str]:
    """A server of a module for each value, once with a schema of anything and once without."""
    modules = {}
    for name, (value, _, _) in VALUES.items():
        modules[f"typed.{name}"] = gives({"value": value})
        modules[f"plain.{name}"] = gives({"value": value}, output_schema={})
    with serving(registry_of(modules)) as url:
        yield url


@pytest.mark.parametrize("name", VALUES)
async def test_a_value_arrives_as_json_that_can_be_read_back(valued: str, name: str) -> None:
    value, kind, read = VALUES[name]
    async with client_of(valued) as client:
        typed = await client.call_tool(f"typed.{name}", {})
        plain = await client.call_tool(f"plain.{name}", {})
    arrived = parsed(text_of(typed))
    assert arrived.keys() == {"value"}
    assert type(arrived["value"]) is kind
    assert read(arrived["value"]) == value
    assert typed.structured_content == arrived
    assert text_of(plain) == text_of(typed)
    assert plain.structured_content is None


@pytest.mark.parametrize(("output", "texts"), [({}, ["{}"]), (None, ["{}", "null"])], ids=["empty", "none"])
async def test_an_empty_answer_is_an_answer(output: Any, texts: list[str], mode: str) -> None:
    async with connect(
        {"demo.typed": gives(output), "demo.plain": gives(output, output_schema={})}, mode=mode
    ) as client:
        typed = await client.call_tool("demo.typed")
        plain = await client.call_tool("demo.plain")
    assert text_of(typed) in texts
    assert typed.structured_content == {}
    assert text_of(plain) in texts
    assert plain.structured_content is None


class Part(BaseModel):
    size: Size
    note: str | None = None
    source: str = Field("x", alias="from")


class Everything(BaseModel):
    day: date
    naive: datetime
    zoned: datetime
    spent: timedelta
    id: UUID
    where: Path
    price: Decimal
    color: Color
    tags: set[str]
    pair: tuple[int, str]
    parts: list[Part]
    by_name: dict[str, Part]
    ratio: float
    raw: bytes


EVERYTHING: dict[str, Any] = {
    "day": date(2026, 2, 3),
    "naive": datetime(2026, 2, 3, 4, 5, 6, 789),
    "zoned": datetime(2026, 2, 3, 4, 5, tzinfo=PLUS_TWO),
    "spent": timedelta(hours=30, milliseconds=5),
    "id": UUID(int=7),
    "where": Path("/tmp/x"),
    "price": Decimal("1.10"),
    "color": Color.RED,
    "tags": {"a", "b"},
    "pair": (1, "a"),
    "parts": [Part(size=Size(width=1, made=date(2026, 1, 1)), **{"from": "y"})],
    "by_name": {"a": {"size": {"width": 1, "made": date(2026, 1, 1)}, "from": "z"}},
    "ratio": 2,
    "raw": b"\xff\xfe",
}


async def test_structured_content_satisfies_the_advertised_schema(mode: str) -> None:
    """The SDK's client checks it too, and raises when it does not hold."""
    async with connect({"demo.all": gives(EVERYTHING, output_schema=Everything)}, mode=mode) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("demo.all", {})
    assert tool.output_schema is not None
    assert "$ref" not in json.dumps(tool.output_schema)
    assert "$defs" not in tool.output_schema
    assert tool.output_schema["properties"]["parts"]["items"]["properties"]["size"]["required"] == ["width", "made"]
    assert result.structured_content == parsed(text_of(result))
    checker = Draft202012Validator.FORMAT_CHECKER
    Draft202012Validator(tool.output_schema, format_checker=checker).validate(result.structured_content)
    assert "date-time" not in json.dumps(tool.output_schema)
    assert result.structured_content["parts"][0]["from"] == "y"


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({}, id="empty"),
        pytest.param({"type": "array", "items": {}}, id="not-an-object"),
        pytest.param({"type": ["string", "null"]}, id="a-string"),
    ],
)
async def test_without_an_object_schema_only_text_is_sent(schema: dict[str, Any]) -> None:
    async with connect({"demo.plain": gives(None if schema else {"a": 1}, output_schema=schema)}) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("demo.plain", {})
    assert tool.output_schema is None
    assert result.structured_content is None
    assert text_of(result)


class Sizes(BaseModel):
    sizes: Annotated[list[int], BeforeValidator(lambda given: [1] if given == "one" else given)]


class Adding(Middleware):
    def after(self, module_id: str, inputs: Any, output: Any, context: Any) -> Any:
        return {**output, "n": "one"} if module_id == "demo.added" else None


async def test_what_breaks_the_advertised_schema_is_an_error_though_apcore_lets_it_pass(mode: str) -> None:
    closed = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
    needing = {**closed, "required": ["n"]}
    modules = {
        "demo.none": gives(None, output_schema=needing),
        "demo.added": gives({"n": 1}, output_schema=closed),
        "demo.read": gives({"sizes": "one"}, output_schema=Sizes),
    }
    executor = Executor(registry_of(modules))
    executor.use(Adding())
    async with connect(executor, mode=mode) as client:
        results = [await client.call_tool(name, {}) for name in modules]
    told = [part.text.partition("\n")[0] for result in results for part in result.content if part.type == "text"]
    assert told == ["Output validation failed:"] * 3


class Unprintable:
    def __str__(self) -> str:
        raise KeyboardInterrupt("/etc/passwd")

    __repr__ = __str__


class Unwilling:
    def __str__(self) -> str:
        raise RuntimeError("/etc/passwd")


def cycle() -> dict[str, Any]:
    output: dict[str, Any] = {}
    output["deep"] = [{"again": output}]
    return output


UNSAYABLE: dict[str, Callable[[], dict[str, Any]]] = {
    "nan": lambda: {"value": float("nan")},
    "infinity": lambda: {"value": [{"deep": float("inf")}]},
    "minus_infinity": lambda: {"value": float("-inf")},
    "cycle": cycle,
    "surrogate": lambda: {"value": "a\ud800b"},
    "surrogate_key": lambda: {"a\ud800b": 1},
    "str_raises": lambda: {"value": Unwilling()},
    "str_exits": lambda: {"value": Unprintable()},
}


@pytest.fixture(scope="module")
def unsayable() -> Iterator[str]:
    """A server of two modules for each row, with and without an output schema, and of one that works."""
    modules: dict[str, Any] = {"says.fine": echo}
    for name, make in UNSAYABLE.items():
        for form, schema in (("typed", ANYTHING), ("plain", {})):
            module = FunctionalModule(lambda inputs, context, make=make: make(), output_schema=schema)
            modules[f"{form}.{name}"] = module
    with serving(registry_of(modules)) as url:
        yield url


@pytest.mark.parametrize("name", UNSAYABLE)
async def test_what_json_cannot_say_is_an_error_and_the_server_lives_on(unsayable: str, name: str) -> None:
    async with client_of(unsayable) as client:
        results = [await client.call_tool(f"{form}.{name}", {}) for form in ("typed", "plain")]
        after = await client.call_tool("says.fine", {"a": 1})
    for result in results:
        assert [part.model_dump()["text"] for part in result.content] == ["Failed to serialize module output"]
        assert result.is_error is True
        assert result.structured_content is None
        assert "/etc" not in result.model_dump_json(by_alias=True)
    assert parsed(text_of(after)) == {"a": 1}


async def test_five_megabytes_arrive_whole(mode: str) -> None:
    """With the limit lifted that this client sets on one server-sent event, which is how handshake answers come."""
    lines = [f"line {number:07} é" for number in range(300_000)]
    with serving(registry_of({"demo.large": gives({"lines": lines}, output_schema={})})) as url:
        bounded = "max_sse_event_size" in inspect.signature(streamable_http_client).parameters  # from mcp 2.3
        if mode == HANDSHAKE and not bounded:
            pytest.skip("the limit of this client cannot be lifted")
        transport = streamable_http_client(f"{url}/mcp", **({"max_sse_event_size": None} if bounded else {}))
        async with Client(transport, mode=mode, cache=None, read_timeout_seconds=30) as client:
            text = text_of(await client.call_tool("demo.large", {}))
    assert len(text) > 5_000_000
    assert parsed(text) == {"lines": lines}


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
PATTERN = {"type": "object", "properties": {"count": NUMBER}, "patternProperties": {"^secret_": SECRET_NUMBER}}
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
ACCOUNTS: list[Any] = [
    pytest.param(beside(**{"if": {"required": ["a"]}, "then": PIN}), OPEN_PIN, HIDDEN_PIN, id="then"),
    pytest.param(beside(**{"if": {"required": ["b"]}, "else": PIN}), OPEN_PIN, HIDDEN_PIN, id="else"),
    pytest.param(beside(**{"if": PIN}), OPEN_PIN, HIDDEN_PIN, id="if"),
    pytest.param(beside(**{"not": {**PIN, "required": ["b"]}}), OPEN_PIN, HIDDEN_PIN, id="not"),
    pytest.param(beside(dependentSchemas={"a": PIN}), OPEN_PIN, HIDDEN_PIN, id="dependentSchemas"),
    pytest.param(beside(dependencies={"a": PIN, "b": ["a"]}), OPEN_PIN, HIDDEN_PIN, id="dependencies"),
    pytest.param(beside(unevaluatedProperties=SECRET_NUMBER), OPEN_PIN, HIDDEN_PIN, id="unevaluatedProperties"),
    pytest.param(
        beside(allOf=[{"properties": {"pin": SECRET}}], additionalProperties=NUMBER),
        OPEN_PIN,
        HIDDEN_PIN,
        id="what-another-schema-calls-a-plain-number",
    ),
    pytest.param(
        beside(oneOf=TAGGED),
        {"a": 1, "kind": "a", "pin": 918273645},
        {"a": 1, "kind": "a", "pin": REDACTED},
        id="in-one-variant-of-two",
    ),
    pytest.param(
        held({"oneOf": [SECRET_NUMBER, {"type": "string", **SECRET}]}),
        {"p": 918273645},
        {"p": REDACTED},
        id="in-both-variants",
    ),
    pytest.param(
        held({"prefixItems": [NUMBER], "unevaluatedItems": SECRET_NUMBER}),
        {"p": [1, 918273645]},
        {"p": [1, REDACTED]},
        id="unevaluatedItems",
    ),
    pytest.param(
        held({"type": "array", "additionalItems": SECRET}), {"p": [918273645]}, {"p": [REDACTED]}, id="additionalItems"
    ),
    pytest.param(
        held({"type": "array", "items": SECRET_NUMBER, "uniqueItems": True}),
        {"p": [918273645, 9]},
        {"p": [REDACTED, REDACTED]},
        id="uniqueItems",
    ),
    pytest.param(
        held({"type": "array", "uniqueItems": True, "items": {"properties": {"pin": SECRET}}}),
        {"p": [{"pin": 918273645}, {"pin": 9}]},
        {"p": [{"pin": REDACTED}] * 2},
        id="unique-items-with-a-mark",
    ),
    pytest.param(
        held({"type": "array", "contains": SECRET_NUMBER, "maxContains": 1}),
        {"p": [1.5, 918273645]},
        {"p": REDACTED},
        id="contains",
    ),
    pytest.param(
        held({"type": "array", "contains": PIN}), {"p": [{"pin": 918273645}]}, {"p": REDACTED}, id="deep-in-contains"
    ),
    pytest.param(
        held({"type": "object", "propertyNames": SECRET}), {"p": {"918273645": 1}}, {"p": REDACTED}, id="propertyNames"
    ),
    pytest.param(
        held({"type": "string", "contentMediaType": "application/json", "contentSchema": PIN}),
        {"p": '{"pin": 918273645}'},
        {"p": REDACTED},
        id="contentSchema",
    ),
    pytest.param(
        held({"const": {"pin": 918273645}, **PIN}),
        {"p": {"pin": 918273645}},
        {"p": {"pin": REDACTED}},
        id="const-above",
    ),
    pytest.param(
        held({"allOf": [{"type": "string", "pattern": "^S"}, {"enum": ["S3CR3T"], **SECRET}]}),
        {"p": "S3CR3T"},
        {"p": REDACTED},
        id="allOf",
    ),
    pytest.param(Account, ACCOUNT, SHOWN, id="model"),
    pytest.param(dict_schema(), NAMELESS, {key: SHOWN[key] for key in NAMELESS}, id="dict"),
    pytest.param(PAIR, {"pair": [1, 918273645]}, {"pair": [1, REDACTED]}, id="one-place-of-a-tuple"),
    pytest.param(PATTERN, {"count": 1, "secret_a": 918273645}, {"count": 1, "secret_a": REDACTED}, id="some-names"),
    pytest.param(REST, {"count": 1, "else": 918273645}, {"count": 1, "else": REDACTED}, id="all-other-names"),
]


@pytest.mark.parametrize(("schema", "output", "shown"), ACCOUNTS)
async def test_sensitive_output_is_redacted_wherever_it_stands(
    schema: Any, output: dict[str, Any], shown: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    async with connect({"demo.account": gives(output, output_schema=schema)}) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("demo.account", {})
    assert parsed(text_of(result)) == shown
    assert (tool.output_schema, result.structured_content) == (None, None), "what is hidden needs no second description"
    said = result.model_dump_json() + "".join(r.getMessage() for r in caplog.records if r.name.startswith("apcore_mcp"))
    assert [secret for secret in ("S3CR3T", "918273645", "2031-12-13") if secret in said] == []


@pytest.mark.parametrize(
    "schema",
    [{"type": "object", **SECRET}, {"anyOf": [{"type": "object", **SECRET}, held(NUMBER)]}],
    ids=["plain", "any"],
)
async def test_an_output_that_is_sensitive_as_a_whole_is_hidden_as_a_whole(schema: dict[str, Any], mode: str) -> None:
    async with connect({"demo.all": gives({"p": 918273645}, output_schema=schema)}, mode=mode) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("demo.all", {})
    assert tool.output_schema is None
    assert parsed(text_of(result)) == REDACTED
    assert result.structured_content is None


@pytest.mark.parametrize(("schema", "output", "shown"), ACCOUNTS)
async def test_redact_output_false_shows_what_the_module_gave(
    schema: Any, output: dict[str, Any], shown: dict[str, Any]
) -> None:
    async with connect({"demo.account": gives(output, output_schema=schema)}, redact_output=False) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("demo.account", {})
    expected = json.loads(json.dumps(output, default=str))
    assert parsed(text_of(result)) == expected
    assert result.structured_content == expected
    assert tool.output_schema is not None
    assert REDACTED not in json.dumps(tool.output_schema)


# ---- output_formatter ----


def emptied(value: Any) -> str:
    value.clear()
    return "nothing left\ud800"


@pytest.mark.parametrize(
    ("formatter", "text"),
    [
        pytest.param(lambda value: "\n".join(f"{k} = {v}" for k, v in value.items()), None, id="text"),
        pytest.param(emptied, "nothing left?", id="takes-it-apart"),
        pytest.param(lambda value: value["no such"], "JSON", id="raises"),
        pytest.param(lambda value: None, "JSON", id="no-text"),
    ],
)
async def test_an_output_formatter_writes_the_text_and_nothing_else(
    formatter: Callable[[Any], str], text: str | None, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    schema = {"type": "object", "properties": {"key": {"type": "string", "x-sensitive": True}}}
    made = {"day": date(2026, 2, 3), "key": "S3CR3T"}
    shown = {"day": "2026-02-03", "key": REDACTED}
    modules = {"demo.typed": gives(shown), "demo.plain": gives(made, output_schema=schema)}
    async with connect(modules, mode=mode, output_formatter=formatter) as client:
        typed, plain = await client.call_tool("demo.typed", {}), await client.call_tool("demo.plain", {})
    for result in (typed, plain):
        if text == "JSON":
            assert parsed(text_of(result)) == shown
        else:
            assert text_of(result) == (text or f"day = 2026-02-03\nkey = {REDACTED}")
    assert (typed.structured_content, plain.structured_content) == (shown, None)
    failed = [r for r in caplog.records if "output_formatter failed" in r.getMessage() and r.exc_info]
    assert len(failed) == (2 if text == "JSON" else 0)


# ---- Execution ----


async def test_sync_and_async_modules_get_the_arguments_and_answer(mode: str) -> None:
    async def later(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"got": inputs, "thread": threading.current_thread().name}

    def now(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"got": inputs, "thread": threading.current_thread().name}

    arguments = {"a": {"b": [1, None, "é", 1.5, True]}}
    async with connect({"demo.sync": now, "demo.async": later}, mode=mode) as client:
        for tool in ("demo.sync", "demo.async"):
            assert parsed(text_of(await client.call_tool(tool, arguments)))["got"] == arguments
            assert parsed(text_of(await client.call_tool(tool, {})))["got"] == {}
            assert parsed(text_of(await client.call_tool(tool)))["got"] == {}
        threads = {parsed(text_of(await client.call_tool(tool)))["thread"] for tool in ("demo.sync", "demo.async")}
    assert len(threads) == 2, "a sync module must not run on the event loop"


class Stamp(Middleware):
    def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {**inputs, "before": module_id}

    def after(self, module_id: str, inputs: dict[str, Any], output: dict[str, Any], context: Any) -> dict[str, Any]:
        return {**output, "after": module_id}


async def test_the_executor_that_was_given_keeps_its_acl_middleware_and_timeout(mode: str) -> None:
    async def never(inputs: dict[str, Any], context: Any) -> None:
        await asyncio.Event().wait()

    registry = registry_of({"open.door": echo, "shut.door": echo, "open.slow": never})
    acl = ACL([ACLRule(callers=["*"], targets=["open.*"], effect="allow")], default_effect="deny")
    config = Config({"executor": {"default_timeout": 70, "global_timeout": 60_000}})
    executor = Executor(registry, acl=acl, middlewares=[Stamp()], config=config)
    async with connect(executor, mode=mode) as client:
        names = [tool.name for tool in (await client.list_tools()).tools]
        opened = await client.call_tool("open.door", {"a": 1})
        shut = await client.call_tool("shut.door", {"a": 1})
        slow = await client.call_tool("open.slow", {})
    assert names == ["open.door", "open.slow", "shut.door"]
    assert parsed(text_of(opened)) == {"a": 1, "before": "open.door", "after": "open.door"}
    assert (shut.is_error, shut.content[0].model_dump()["text"]) == (True, "Access denied")
    assert (slow.is_error, slow.content[0].model_dump()["text"]) == (True, "Module timed out after 70ms")
    assert to_openai_tools(executor) == to_openai_tools(registry)


async def test_forty_blocked_sync_calls_hold_up_nobody_and_keep_their_answers_apart(mode: str) -> None:
    count, release, all_running = 40, threading.Event(), threading.Event()
    running: list[int] = []

    def blocked(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.append(inputs["number"])
        if len(running) == count:
            all_running.set()
        assert release.wait(40)
        return {"number": inputs["number"]}

    async def quick(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"released": release.is_set()}

    modules = {"demo.blocked": blocked, "demo.quick": quick, "demo.sync": echo}
    try:
        async with connect(modules, mode=mode) as client, asyncio.timeout(40):
            calls = [asyncio.create_task(client.call_tool("demo.blocked", {"number": n})) for n in range(count)]
            assert await asyncio.to_thread(all_running.wait, 20), f"{len(running)} of {count} run"
            assert parsed(text_of(await client.call_tool("demo.quick", {}))) == {"released": False}
            assert parsed(text_of(await client.call_tool("demo.sync", {"a": 1}))) == {"a": 1}
            assert len((await client.list_tools()).tools) == 3
            assert not any(call.done() for call in calls)
            release.set()
            results = await asyncio.gather(*calls)
    finally:
        release.set()
    assert [parsed(text_of(result)) for result in results] == [{"number": n} for n in range(count)]


# ---- Tool definitions ----

DEFAULTS = {"read_only_hint": False, "destructive_hint": False, "idempotent_hint": False, "open_world_hint": True}


@pytest.mark.parametrize(
    ("annotations", "hints", "meta"),
    [
        pytest.param(None, {}, {}, id="none"),
        pytest.param(ModuleAnnotations(), {}, {}, id="defaults"),
        pytest.param(ModuleAnnotations(destructive=True), {"destructive_hint": True}, {}, id="destructive"),
        pytest.param(ModuleAnnotations(readonly=True), {"read_only_hint": True}, {}, id="readonly"),
        pytest.param(ModuleAnnotations(idempotent=True), {"idempotent_hint": True}, {}, id="idempotent"),
        pytest.param(ModuleAnnotations(open_world=False), {"open_world_hint": False}, {}, id="closed-world"),
        pytest.param(ModuleAnnotations(requires_approval=True), {}, {"requires_approval": True}, id="approval"),
        pytest.param(ModuleAnnotations(cacheable=True), {}, {"cacheable": True}, id="cacheable"),
        pytest.param(ModuleAnnotations(paginated=True), {}, {"paginated": True}, id="paginated"),
    ],
)
async def test_a_tool_tells_what_its_module_declares(
    annotations: ModuleAnnotations | None, hints: dict[str, bool], meta: dict[str, bool]
) -> None:
    module = FunctionalModule(
        echo,
        name="Resize",
        description="Makes it smaller. é",
        version="2.1.0",
        tags=["image", "fast"],
        annotations=annotations,
        input_schema=Size,
    )
    async with connect({"image.resize": module}) as client:
        (tool,) = (await client.list_tools()).tools
    assert (tool.name, tool.title, tool.description) == ("image.resize", "Resize", "Makes it smaller. é")
    assert tool.input_schema["required"] == ["width", "made"]
    assert tool.annotations is not None
    assert tool.annotations.model_dump(include=set(DEFAULTS)) == {**DEFAULTS, **hints}
    assert tool.annotations.title == "Resize", "where clients up to 2025-03-26 look for it"
    flags = {"requires_approval": False, "streaming": False, "cacheable": False, "paginated": False, **meta}
    expected = {**flags, "version": "2.1.0", "tags": ["image", "fast"]}
    told = {key: value for key, value in (tool.meta or {}).items() if key.startswith("apcore/")}
    assert told == {f"apcore/{key}": value for key, value in expected.items()}


@pytest.mark.parametrize(
    ("notice", "told"),
    [
        pytest.param({}, "", id="not"),
        pytest.param(
            {"deprecated_since": "1.2.0", "sunset_version": "2.0.0", "sunset_date": "2027-01-31",
             "migration_guide": "Use image.scale."},
            "\n\nDeprecated since 1.2.0, until 2.0.0, until 2027-01-31. Use image.scale.", id="everything",
        ),
        pytest.param({"sunset_date": "2027-01-31"}, "\n\nDeprecated until 2027-01-31.", id="date"),
        pytest.param({"reason": "old"}, "\n\nDeprecated.", id="nothing-known"),
        pytest.param({"deprecated_since": 1.2, "migration_guide": ["a"]}, "\n\nDeprecated since 1.2. ['a']", id="odd"),
    ],
)  # fmt: skip
async def test_a_deprecated_module_says_so_to_every_agent(notice: dict[str, Any], told: str) -> None:
    module = FunctionalModule(echo, description="Makes it smaller.", metadata={"x-deprecation": notice})
    registry = registry_of({"image.resize": module})
    async with connect(registry) as client:
        (tool,) = (await client.list_tools()).tools
    (function,) = to_openai_tools(registry)
    assert tool.description == function["function"]["description"] == f"Makes it smaller.{told}"


OVERLAY = {"alias": "shrink", "description": "Shrinks a picture.", "guidance": "Ask for the size first."}
ADVICE = {"x-when-to-use": "Before an upload.", "x-when-not-to-use": "For vector graphics."}
ADVICE |= {"x-common-mistakes": "Sizes in inches.", "x-workflow-hints": "Then image.store."}


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        pytest.param({}, ["Makes it smaller."], id="nothing"),
        pytest.param(
            {"display": {"mcp": OVERLAY}}, ["Shrinks a picture.", "Guidance: Ask for the size first."], id="overlay"
        ),
        pytest.param({"display": {"mcp": {"description": ""}, "cli": OVERLAY}}, ["Makes it smaller."], id="another's"),
        pytest.param({"display": None}, ["Makes it smaller."], id="none"),
        pytest.param({"display": {"mcp": None}}, ["Makes it smaller."], id="none-for-mcp"),
        pytest.param({"display": "Resizer"}, ["Makes it smaller."], id="in-another-sense"),
        pytest.param({"display": {"mcp": "Resizer"}}, ["Makes it smaller."], id="in-another-sense-for-mcp"),
        pytest.param(
            {"x-deprecation": {"deprecated_since": "1.2"}, "display": {"mcp": OVERLAY}, **ADVICE},
            [
                "Shrinks a picture.", "Guidance: Ask for the size first.", "When to use: Before an upload.",
                "When not to use: For vector graphics.", "Common mistakes: Sizes in inches.",
                "Workflow hints: Then image.store.", "Deprecated since 1.2.",
            ],
            id="everything",
        ),
    ],
)  # fmt: skip
async def test_what_authors_and_operators_wrote_for_agents_reaches_them(
    metadata: dict[str, Any], said: list[str], mode: str
) -> None:
    """Design, "Annotations": in MCP's and OpenAI's descriptions alike, a paragraph each."""
    registry = registry_of({"image.resize": FunctionalModule(echo, description="Makes it smaller.", metadata=metadata)})
    async with connect(registry, mode=mode) as client:
        (tool,) = (await client.list_tools()).tools
    (function,) = to_openai_tools(registry)
    assert tool.description == function["function"]["description"] == "\n\n".join(said)
    assert function["function"]["name"] == "image-resize"


@pytest.mark.parametrize(
    ("declared", "policy", "needed"),
    [
        pytest.param({}, ExecutionPolicy([PolicyRule("demo.*", requires_approval=True)]), True, id="rule"),
        pytest.param({}, ExecutionPolicy([PolicyRule("other.*", requires_approval=True)]), False, id="other-rule"),
        pytest.param({"destructive": True}, ExecutionPolicy(gate_destructive=True), True, id="destructive"),
        pytest.param({"requires_approval": True}, ExecutionPolicy(), True, id="declared"),
        pytest.param({"requires_approval": True}, ExecutionPolicy([PolicyRule("*", requires_approval=False)]), False,
                     id="waived"),
        pytest.param({"requires_approval": True}, None, True, id="no-policy"),
    ],
)  # fmt: skip
async def test_approval_that_an_operator_demands_is_told_like_a_modules_own(
    declared: dict[str, bool], policy: ExecutionPolicy | None, needed: bool
) -> None:
    executor = Executor(
        registry_of({"demo.a": FunctionalModule(echo, annotations=ModuleAnnotations(**declared))}), policy=policy
    )
    async with connect(executor) as client:
        (tool,) = (await client.list_tools()).tools
    assert (tool.meta or {})["apcore/requires_approval"] is needed
    (function,) = to_openai_tools(executor, embed_annotations=True)
    assert ("requires_approval=true" in function["function"]["description"]) is needed


def test_an_annotation_is_true_or_false_whatever_a_module_wrote() -> None:
    """TypeScript clients lose the whole list by a hint that is neither; apcore takes anything for true or false."""
    annotations = ModuleAnnotations(readonly="yes", destructive=None, streaming=1)  # type: ignore[arg-type]
    with serving(registry_of({"demo.a": FunctionalModule(echo, annotations=annotations)}), explorer=True) as url:
        (tool,) = httpx.get(f"{url}/explorer/tools").json()
    assert (tool["annotations"]["readOnlyHint"], tool["annotations"]["destructiveHint"]) == (True, False)
    assert tool["_meta"]["apcore/streaming"] is True


async def test_a_streaming_module_is_marked() -> None:
    async def stream(inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"a": 1}

    module = FunctionalModule(echo, stream=stream, annotations=ModuleAnnotations(streaming=True))
    async with connect({"demo.stream": module, "demo.nameless": echo}) as client:
        nameless, streaming = (await client.list_tools()).tools
    assert (streaming.meta or {})["apcore/streaming"] is True
    assert (nameless.meta or {})["apcore/streaming"] is False
    assert nameless.title is None


@pytest.mark.parametrize("count", [1, 100])
async def test_there_is_one_tool_for_each_module(count: int) -> None:
    names = [f"demo.m{number:03}" for number in range(count)]
    async with connect(dict.fromkeys(names, echo)) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == names


class Shaky(Registry):
    """A registry whose modules vanish, or whose files go bad, between the listing and the look at them."""

    def get_definition(self, module_id: str, version_hint: str | None = None) -> Any:
        if module_id == "demo.gone":
            return None
        if module_id == "demo.bad":
            raise RuntimeError("cannot be read")
        return super().get_definition(module_id, version_hint)


async def test_a_module_without_a_definition_is_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    registry = Shaky()
    for name in ("demo.a", "demo.bad", "demo.gone", "demo.z"):
        registry.register(name, FunctionalModule(echo))
    registry.register(
        "demo.loop",
        FunctionalModule(echo, input_schema={"type": "object", "properties": {"a": {"$ref": "#"}}}),
    )
    async with connect(registry) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["demo.a", "demo.z"]
        assert parsed(text_of(await client.call_tool("demo.z", {"a": 1}))) == {"a": 1}
    warned = [r.getMessage() for r in caplog.records if r.name == "apcore_mcp" and r.levelno == logging.WARNING]
    for name in ("demo.bad", "demo.gone", "demo.loop"):
        assert len([message for message in warned if name in message]) == 1


# ---- Tool names ----

LONG = "demo." + "a" * 70
IDS = ["demo.a_b.c1", LONG + ".one", LONG + ".two", "plain"]
PORTABLE = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
CLAUDE = {"client_info": Implementation(name="claude-ai", version="1")}
OTHER = {"client_info": Implementation(name="someone-else", version="1")}


@pytest.mark.parametrize(
    ("name", "portable"),
    [
        ("claude-ai", True),
        ("claude-ai (via mcp-remote 0.1.38)", True),
        ("github-copilot-developer", True),
        ("JetBrains-IU-copilot-intellij", True),
        ("JetBrains-JBC-copilot-intellij", True),
        ("claude-code", False),
        ("codex-mcp-client", False),
        ("opencode", False),
        ("Visual Studio Code", False),
        ("gemini-cli-mcp-client", False),
        ("not-claude-ai", False),
        ("mcp", False),
    ],
)
async def test_clients_that_lose_all_tools_by_a_dot_are_sent_none(name: str, portable: bool, mode: str) -> None:
    client = {"client_info": Implementation(name=name, version="1")}
    async with connect({"image.resize": echo}, mode=mode, client=client) as connected:
        (tool,) = (await connected.list_tools()).tools
    assert tool.name == ("image-resize" if portable else "image.resize")


def called(**aliases: Any) -> dict[str, Any]:
    """Modules by id that answer with it, `__` for the dots of the id, with aliases (None: without)."""
    modules = {}
    for name, alias in aliases.items():
        module_id = name.replace("__", ".")
        display = {"display": {"mcp": {"alias": alias}}}
        modules[module_id] = FunctionalModule(lambda inputs, context, own=module_id: {"i_am": own}, metadata=display)
    return modules


async def test_what_a_binding_says_of_its_display_counts_where_the_metadata_says_nothing() -> None:
    """`display:` of a `*.binding.yaml`, which apcore's loader keeps beside the metadata, and of `@module`."""
    display = {"mcp": {"alias": "shrink", "guidance": "Ask first."}}
    other = {"display": {"mcp": {"alias": "other"}}}

    def work() -> dict[str, Any]:
        return {}

    modules = {
        "image.resize": FunctionModule(work, "image.resize", "Makes it smaller.", display=display),
        "image.store": FunctionModule(work, "image.store", "Keeps it.", display=display, metadata=other),
    }
    async with connect(modules) as client:
        told = {tool.name: tool.description for tool in (await client.list_tools()).tools}
    assert told == {"shrink": "Makes it smaller.\n\nGuidance: Ask first.", "other": "Keeps it."}


async def test_an_alias_is_the_name_of_its_tool_and_the_id_is_understood(mode: str) -> None:
    modules = called(image__resize="shrink.image", image__store=None)
    async with connect(modules, mode=mode) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["shrink.image", "image.store"]
        for name in ("shrink.image", "shrink-image", "image.resize", "image-resize"):
            assert parsed(text_of(await client.call_tool(name, {}))) == {"i_am": "image.resize"}
    async with connect(modules, mode=mode, client=CLAUDE) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["shrink-image", "image-store"]
    assert from_openai_call(registry_of(modules), "image-resize", "{}") == ("image.resize", {})


@pytest.mark.parametrize(
    ("aliases", "named"),
    [
        pytest.param({"a__b": "x" * 64, "c": None}, ["x" * 64, "c"], id="long"),
        pytest.param({"a__b": "a.b"}, ["a.b"], id="its-own-id"),
        pytest.param({"a__b": "a-b"}, ["a-b"], id="its-own-portable-name"),
        pytest.param({"a__b": "x" * 65}, ["a.b!"], id="too-long"),
        pytest.param({"a__b": "x y"}, ["a.b!"], id="space"),
        pytest.param({"a__b": "größe"}, ["a.b!"], id="not-ascii"),
        pytest.param({"a__b": "x\n"}, ["a.b!"], id="newline"),
        pytest.param({"a__b": 7}, ["7"], id="number"),
        pytest.param({"a__b": "c", "c": None}, ["a.b!", "c"], id="anothers-id"),
        pytest.param({"a__b": "c-d", "c__d": None}, ["a.b!", "c.d"], id="anothers-portable-name"),
        pytest.param({"a__b": "x", "c__d": "x", "e": "y"}, ["a.b!", "c.d!", "y"], id="claimed-twice"),
        pytest.param({"a__b": "x.y", "c__d": "x-y"}, ["a.b!", "c.d!"], id="claimed-in-either-spelling"),
    ],
)
async def test_an_alias_that_is_not_its_own_is_not_used(
    aliases: dict[str, Any], named: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The mark behind a name: with a WARNING, one."""
    modules = called(**aliases)
    async with connect(modules) as client:
        for _ in range(2):
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert names == [name.rstrip("!") for name in named]
        for module_id, name in zip(modules, names, strict=True):
            for spelling in (name, module_id, module_id.replace(".", "-")):
                assert parsed(text_of(await client.call_tool(spelling, {}))) == {"i_am": module_id}
    warned = [r.getMessage() for r in caplog.records if r.name == "apcore_mcp" and r.levelno == logging.WARNING]
    refused = [name.rstrip("!") for name in named if name.endswith("!")]
    assert [module_id for module_id in modules for text in warned if f"module {module_id} " in text] == refused


async def test_an_alias_is_given_up_and_taken_back_as_other_modules_come_and_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = registry_of(called(a__b="x"))

    async def names(client: Client) -> list[str]:
        return [tool.name for tool in (await client.list_tools()).tools]

    async with connect(registry) as client:
        assert await names(client) == ["x"]
        registry.register("x", echo_module := FunctionalModule(echo))
        assert await names(client) == ["a.b", "x"]
        assert "i_am" not in parsed(text_of(await client.call_tool("x", {})))
        registry.register("other", echo_module)
        assert await names(client) == ["a.b", "other", "x"]
        assert len([r for r in caplog.records if "a.b" in r.getMessage() and r.levelno == logging.WARNING]) == 1
        registry.unregister("x")
        assert await names(client) == ["x", "other"]


async def test_a_name_that_clients_may_refuse_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """MCP, "Tools": names should have at most 128 characters; apcore's ids may have 192."""
    modules = {"a" * 128: echo, "b" * 129: echo}
    async with connect(modules, tool_names="portable") as client:
        assert len((await client.list_tools()).tools) == 2
    assert [
        record for record in caplog.records if record.name == "apcore_mcp" and "b" * 129 in record.getMessage()
    ] == []
    async with connect(modules) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == [*modules]
    (told,) = (r for r in caplog.records if r.name == "apcore_mcp" and r.levelno == logging.WARNING)
    assert "b" * 129 in told.getMessage()
    assert "128" in told.getMessage()


def answering() -> dict[str, Any]:
    return {module_id: gives({"i_am": module_id}) for module_id in IDS}


@pytest.mark.parametrize(
    ("tool_names", "client", "portable"),
    [
        pytest.param("auto", CLAUDE, True, id="auto-for-claude"),
        pytest.param("auto", OTHER, False, id="auto-for-others"),
        pytest.param("portable", OTHER, True, id="portable"),
        pytest.param("module-id", CLAUDE, False, id="module-id"),
        pytest.param(None, CLAUDE, True, id="default-for-claude"),
    ],
)
async def test_names_are_spelled_as_the_client_can_take_them(
    tool_names: str | None, client: dict[str, Any], portable: bool, mode: str
) -> None:
    options = {} if tool_names is None else {"tool_names": tool_names}
    async with connect(answering(), mode=mode, client=client, **options) as connected:
        names = [tool.name for tool in (await connected.list_tools()).tools]
        told = [parsed(text_of(await connected.call_tool(name, {})))["i_am"] for name in [*names, *IDS]]
        either = [
            parsed(text_of(await connected.call_tool(name, {})))["i_am"] for name in ("demo-a_b-c1", "demo.a_b.c1")
        ]
    assert sorted(told[: len(IDS)]) == sorted(IDS)
    assert told[len(IDS) :] == IDS
    assert either == ["demo.a_b.c1", "demo.a_b.c1"]
    if portable:
        assert [name for name in names if not PORTABLE.fullmatch(name)] == []
        assert {"demo-a_b-c1", "plain"} < set(names)
        assert len(set(names)) == len(IDS)
    else:
        assert names == sorted(IDS)


async def test_one_server_speaks_to_each_client_in_its_own_spelling_and_shortens_alike() -> None:
    listings = []
    for _ in range(2):
        with serving(registry_of(answering())) as url:
            async with (
                Client(f"{url}/mcp", mode=HANDSHAKE, cache=None, **CLAUDE) as claude,
                Client(f"{url}/mcp", mode=MODERN, cache=None, **OTHER) as other,
            ):
                dotted = [tool.name for tool in (await other.list_tools()).tools]
                hyphened = [tool.name for tool in (await claude.list_tools()).tools]
                answers = [await other.call_tool(name, {}) for name in hyphened]
        assert dotted == sorted(IDS)
        assert sorted(parsed(text_of(answer))["i_am"] for answer in answers) == dotted
        listings.append(hyphened)
    assert listings[0] == listings[1]
