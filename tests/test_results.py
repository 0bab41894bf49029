"""What a module's answer becomes: JSON text, structured content, files (FR-EXEC-002, FR-SCHEMA-005; design "What a
module gives", "Media"). Real registry, Executor, server and client.
"""

from __future__ import annotations

import base64
import contextlib
import enum
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from apcore import Executor, Middleware
from conftest import ANYTHING, HANDSHAKE, MODERN, FunctionalModule, connect, echo, registry_of, serving
from jsonschema import Draft202012Validator
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from pydantic import BaseModel, Field
from support import REDACTED, Size, gives, parsed, success_text

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
AWKWARD = bytes(range(248, 256))  # in base64 its text differs between the alphabet of URLs and the standard one


def base64_of(media_type: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "contentEncoding": "base64", "contentMediaType": media_type, **more}


def drawing(output: Any, properties: dict[str, Any], **schema: Any) -> FunctionalModule:
    described = {"type": "object", "properties": properties, **schema}
    return FunctionalModule(lambda inputs, context: output, output_schema=described)


async def test_an_image_of_a_pydantic_model_arrives_as_image_content(mode: str) -> None:
    media = {"contentEncoding": "base64", "contentMediaType": "image/png"}

    class Chart(BaseModel):
        points: int
        chart: bytes = Field(json_schema_extra=media)
        legend: bytes | None = Field(None, json_schema_extra=media)

    module = FunctionalModule(lambda inputs, context: {"points": 3, "chart": PNG}, output_schema=Chart)
    async with connect({"draw.chart": module}, mode=mode) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("draw.chart", {})
    assert not result.is_error
    text, image = result.content
    assert json.loads(text.text) == {"points": 3}
    assert (image.type, image.mime_type, base64.b64decode(image.data)) == ("image", "image/png", PNG)
    assert (tool.output_schema, result.structured_content) == (None, None), "Codex would show its model that instead"


async def test_the_media_type_decides_on_the_kind_of_content() -> None:
    """Also of bytes, and in the alphabet of URLs: it is sent in the standard one."""

    class Raw(BaseModel):
        file: bytes = Field(json_schema_extra={"contentEncoding": "base64", "contentMediaType": "audio/wav"})

    data = base64.b64encode(AWKWARD).decode()
    modules = {
        "make.image": drawing({"file": data}, {"file": base64_of("image/svg+xml")}),
        "make.audio": FunctionalModule(lambda inputs, context: {"file": AWKWARD}, output_schema=Raw),
        "make.resource": drawing(
            {"file": base64.urlsafe_b64encode(AWKWARD).decode()}, {"file": base64_of("application/pdf")}
        ),
    }
    async with connect(modules) as client:
        for name, media_type in zip(modules, ("image/svg+xml", "audio/wav", "application/pdf"), strict=True):
            _, part = (await client.call_tool(name, {})).content
            assert f"make.{part.type}" == name
            if name == "make.resource":
                resource = part.resource
                assert resource.uri == "media://make.resource/file"
                assert (resource.mime_type, resource.blob) == (media_type, data)
            else:
                assert (part.mime_type, part.data) == (media_type, data)


OPTIONAL = {"anyOf": [base64_of("image/png"), {"type": "null"}]}
PICTURE = {"type": "object", "properties": {"file": base64_of("image/png")}, "required": ["file"]}
FILES: dict[str, tuple[Any, dict[str, Any], int | None]] = {
    "left_out": ({"properties": {"file": OPTIONAL}, "required": ["n"]}, {"n": 1}, 0),
    "null": ({"properties": {"file": OPTIONAL}}, {"n": 1, "file": None}, 0),
    "empty": ({"properties": {"file": OPTIONAL}}, {"n": 1, "file": ""}, 0),
    "there": ({"properties": {"file": OPTIONAL}}, {"n": 1, "file": "AAAA"}, 1),
    "in_one_variant": ({"anyOf": [PICTURE, {"required": ["reason"]}]}, {"n": 1, "file": "AAAA"}, 1),
    "not_base64": ({"properties": {"file": base64_of("image/png")}}, {"file": "data:image/png;base64,AAAA"}, None),
}
"""An output schema, an output, and how many files come of it."""


async def test_a_file_is_sent_where_there_is_one_and_what_is_none_is_an_error() -> None:
    modules = {
        f"t.{name}": FunctionalModule(lambda *_, output=output: output, output_schema={"type": "object", **schema})
        for name, (schema, output, _) in FILES.items()
    }
    async with connect(modules) as client:
        for name, (_, _, parts) in FILES.items():
            result = await client.call_tool(f"t.{name}", {})
            if parts is None:
                assert result.is_error
                assert [part.text for part in result.content] == ["Failed to serialize module output"]
            else:
                assert [part.type for part in result.content] == ["text", *["image"] * parts], name
                assert json.loads(result.content[0].text) == {"n": 1}


@pytest.mark.parametrize("redact_output", [True, False])
@pytest.mark.parametrize("beside", [False, True], ids=["marked-itself", "marked-beside"])
async def test_a_sensitive_file_is_redacted_like_any_field(redact_output: bool, beside: bool) -> None:
    mark = {"x-sensitive": True}
    if beside:
        module = drawing({"face": "AAAA"}, {"face": base64_of("image/png")}, allOf=[{"properties": {"face": mark}}])
    else:
        module = drawing({"face": "AAAA"}, {"face": base64_of("image/png", **mark)})
    async with connect({"t.secret": module}, redact_output=redact_output) as client:
        result = await client.call_tool("t.secret", {})
    assert [part.type for part in result.content] == (["text"] if redact_output else ["text", "image"])
    assert json.loads(result.content[0].text) == ({"face": "***REDACTED***"} if redact_output else {})


async def test_an_encoded_string_without_a_media_type_stays_text() -> None:
    module = drawing({"key": "AAAA"}, {"key": {"type": "string", "contentEncoding": "base64"}})
    async with connect({"t.key": module}) as client:
        result = await client.call_tool("t.key", {})
    assert result.structured_content == {"key": "AAAA"}


async def test_a_streaming_module_sends_its_file_with_the_result_and_not_with_progress() -> None:
    class Painter(FunctionalModule):
        async def stream(self, inputs: dict[str, Any], context: Any) -> Any:
            yield {"strokes": 1}
            yield {"strokes": 2, "picture": "AAAA"}

    properties = {"picture": base64_of("image/png"), "strokes": {"type": "integer"}}
    module = Painter(lambda inputs, context: {}, output_schema={"type": "object", "properties": properties})
    module.annotations = {"streaming": True}
    told: list[str | None] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        told.append(message)

    async with connect({"t.paint": module}) as client:
        result = await client.call_tool("t.paint", {}, progress_callback=progress)
    assert [part.type for part in result.content] == ["text", "image"]
    assert json.loads(result.content[0].text) == {"strokes": 2}
    assert told == ['{"strokes":1}', '{"strokes":2}']


@contextlib.asynccontextmanager
async def client_of(url: str, mode: str = MODERN) -> AsyncIterator[Client]:
    async with Client(f"{url}/mcp", mode=mode, cache=None, read_timeout_seconds=30) as client:
        yield client


# ---- Output as JSON ----


class Color(enum.Enum):
    RED = "red"


class Thing:
    def __str__(self) -> str:
        return "a thing"


def from_base64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text.replace("+", "-").replace("/", "_") + "=" * (-len(text) % 4))


PLUS_TWO = timezone(timedelta(hours=2))

# A value that a module may return, what its JSON is, and what reads that back.
VALUES: dict[str, tuple[Any, type, Callable[[Any], Any]]] = {
    "date": (date(2026, 2, 3), str, date.fromisoformat),
    "datetime_zone": (datetime(2026, 2, 3, 4, 5, tzinfo=PLUS_TWO), str, datetime.fromisoformat),
    "uuid": (UUID("12345678-1234-5678-1234-567812345678"), str, UUID),
    "decimal": (Decimal("1.10"), str, Decimal),
    "enum": (Color.RED, str, Color),
    "bytes": (b"hello", str, from_base64),
    "bytes_not_utf8": (b"\xff\xfe\x00\xfb\xef\xbe", str, from_base64),
    "set": ({1, 2, 3}, list, set),
    "tuple": ((1, "a"), list, tuple),
    "models": ([{"size": Size(width=1, made=date(2026, 2, 3))}], list, lambda v: [{"size": Size(**v[0]["size"])}]),
    "object": (Thing(), str, lambda text: text if text != "a thing" else VALUES["object"][0]),
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


@pytest.mark.requirement("FR-EXEC-002")
@pytest.mark.parametrize("name", VALUES)
async def test_a_value_arrives_as_json_that_can_be_read_back(valued: str, name: str) -> None:
    value, kind, read = VALUES[name]
    async with client_of(valued) as client:
        typed = await client.call_tool(f"typed.{name}", {})
        plain = await client.call_tool(f"plain.{name}", {})
    arrived = parsed(success_text(typed))
    assert arrived.keys() == {"value"}
    assert type(arrived["value"]) is kind
    assert read(arrived["value"]) == value
    assert typed.structured_content == arrived
    assert success_text(plain) == success_text(typed)
    assert plain.structured_content is None


@pytest.mark.parametrize(("output", "texts"), [({}, ["{}"]), (None, ["{}", "null"])], ids=["empty", "none"])
async def test_an_empty_answer_is_an_answer(output: Any, texts: list[str], mode: str) -> None:
    async with connect(
        {"demo.typed": gives(output), "demo.plain": gives(output, output_schema={})}, mode=mode
    ) as client:
        typed = await client.call_tool("demo.typed")
        plain = await client.call_tool("demo.plain")
    assert success_text(typed) in texts
    assert typed.structured_content == {}
    assert success_text(plain) in texts
    assert plain.structured_content is None


class Part(BaseModel):
    size: Size
    note: str | None = None
    source: str = "x"


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
    "parts": [Part(size=Size(width=1, made=date(2026, 1, 1)), source="y")],
    "by_name": {"a": {"size": {"width": 1, "made": date(2026, 1, 1)}, "source": "z"}},
    "ratio": 2,
    "raw": b"\xff\xfe",
}


@pytest.mark.requirement("FR-SCHEMA-005")
async def test_structured_content_satisfies_the_advertised_schema() -> None:
    """The SDK's client checks it too, and raises when it does not hold."""
    async with connect({"demo.all": gives(EVERYTHING, output_schema=Everything)}) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("demo.all", {})
    assert tool.output_schema is not None
    assert "$ref" not in json.dumps(tool.output_schema)
    assert "$defs" not in tool.output_schema
    assert tool.output_schema["properties"]["parts"]["items"]["properties"]["size"]["required"] == ["width", "made"]
    assert result.structured_content == parsed(success_text(result))
    checker = Draft202012Validator.FORMAT_CHECKER
    Draft202012Validator(tool.output_schema, format_checker=checker).validate(result.structured_content)
    assert "date-time" not in json.dumps(tool.output_schema)
    assert result.structured_content["parts"][0]["source"] == "y"


async def test_without_an_object_schema_only_text_is_sent() -> None:
    modules = {"demo.empty": gives({"a": 1}, output_schema={}),
               "demo.list": gives(None, output_schema={"type": "array", "items": {}}),
               "demo.text": gives(None, output_schema={"type": ["string", "null"]})}  # fmt: skip
    async with connect(modules) as client:
        for tool in (await client.list_tools()).tools:
            result = await client.call_tool(tool.name, {})
            assert (tool.output_schema, result.structured_content) == (None, None)
            assert success_text(result)


class Timing(Middleware):
    def after(self, module_id: str, inputs: Any, output: Any, context: Any) -> Any:
        return {**output, "took_ms": 1}


async def test_what_middleware_adds_to_a_closed_output_breaks_no_promise() -> None:
    """apcore has held the output against its schema before; the SDK's client holds the result against the promise."""
    closed = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
    executor = Executor(registry_of({"demo.added": gives({"n": 1}, output_schema=closed)}))
    executor.use(Timing())
    async with connect(executor) as client:
        assert (await client.call_tool("demo.added", {})).structured_content == {"n": 1, "took_ms": 1}


async def test_a_none_that_breaks_the_advertised_schema_is_an_error_though_apcore_lets_it_pass() -> None:
    needing = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    async with connect({"demo.none": gives(None, output_schema=needing)}) as client:
        result = await client.call_tool("demo.none", {})
    assert (result.is_error, [part.text for part in result.content]) == (True, ["Output validation failed"])


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
    "cycle": cycle,
    "surrogate": lambda: {"value": "a\ud800b"},
    "str_raises": lambda: {"value": Unwilling()},
}


@pytest.mark.requirement("FR-EXEC-002")
async def test_what_json_cannot_say_is_an_error_and_the_server_lives_on() -> None:
    modules: dict[str, Any] = {"says.fine": echo}
    for name, make in UNSAYABLE.items():
        for form, schema in (("typed", ANYTHING), ("plain", {})):
            modules[f"{form}.{name}"] = FunctionalModule(lambda *_, make=make: make(), output_schema=schema)
    async with connect(modules) as client:
        for name in list(modules)[1:]:
            result = await client.call_tool(name, {})
            assert [part.model_dump()["text"] for part in result.content] == ["Failed to serialize module output"], name
            assert (result.is_error, result.structured_content) == (True, None)
            assert "/etc" not in result.model_dump_json(by_alias=True)
        assert parsed(success_text(await client.call_tool("says.fine", {"a": 1}))) == {"a": 1}


async def test_five_megabytes_arrive_whole(mode: str) -> None:
    """With the limit lifted that this client sets on one server-sent event, which is how handshake answers come."""
    lines = [f"line {number:07} é" for number in range(300_000)]
    with serving(registry_of({"demo.large": gives({"lines": lines}, output_schema={})})) as url:
        bounded = "max_sse_event_size" in inspect.signature(streamable_http_client).parameters  # from mcp 2.3
        if mode == HANDSHAKE and not bounded:
            pytest.skip("the limit of this client cannot be lifted")
        transport = streamable_http_client(f"{url}/mcp", **({"max_sse_event_size": None} if bounded else {}))
        async with Client(transport, mode=mode, cache=None, read_timeout_seconds=30) as client:
            text = success_text(await client.call_tool("demo.large", {}))
    assert len(text) > 5_000_000
    assert parsed(text) == {"lines": lines}


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
            assert parsed(success_text(result)) == shown
        else:
            assert success_text(result) == (text or f"day = 2026-02-03\nkey = {REDACTED}")
    assert (typed.structured_content, plain.structured_content) == (shown, None)
    failed = [r for r in caplog.records if "output_formatter failed" in r.getMessage() and r.exc_info]
    assert len(failed) == (2 if text == "JSON" else 0)


async def test_a_decimal_is_a_number_where_a_dict_schema_says_so_and_keeps_its_digits_in_a_model() -> None:
    class Priced(BaseModel):
        price: Decimal = Field(gt=0, max_digits=20, decimal_places=2)

    union = {"anyOf": [{"type": "number"}, {"type": "string"}]}
    schema = {"type": "object", "properties": {"n": {"type": "number"}, "s": union}}
    modules = {
        "a.dict": gives({"n": Decimal("1.5"), "s": "x"}, output_schema=schema),
        "a.model": gives({"price": Decimal("12345678901234567.89")}, output_schema=Priced),
    }
    async with connect(modules) as client:
        assert (await client.call_tool("a.dict", {})).structured_content == {"n": 1.5, "s": "x"}
        assert (await client.call_tool("a.model", {})).structured_content == {"price": "12345678901234567.89"}
