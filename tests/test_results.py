"""What a module's answer becomes: JSON text, structured content, files (FR-EXEC-002, FR-SCHEMA-005). Real registry,
Executor, server and client.
"""

from __future__ import annotations

import base64
import enum
import json
import math
import typing
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import InitVar, dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from apcore import Executor, FunctionModule, Middleware, Registry
from conftest import FunctionalModule, connect, echo, registry_of
from jsonschema import Draft202012Validator
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    RootModel,
    computed_field,
    field_serializer,
    model_validator,
)
from support import (
    REDACTED,
    Array,
    Size,
    StreamingModule,
    errors_logged,
    failure,
    gives,
    lines_of,
    noting,
    parsed,
    success_text,
)
from typing_extensions import TypedDict

from apcore_mcp import run_openai_call

OUTPUT = "Output validation failed (the tool has run):"
AWKWARD = bytes(range(248, 256))  # in base64 its text differs between the alphabet of URLs and the standard one


def base64_of(media_type: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "contentEncoding": "base64", "contentMediaType": media_type, **more}


def returning(hint: Any, value: Any) -> Callable[..., Any]:
    """A function with this return hint."""

    def give() -> None:
        return value  # type: ignore[no-any-return]

    give.__annotations__["return"] = hint
    return give


def drawing(output: Any, properties: dict[str, Any], **schema: Any) -> FunctionalModule:
    return gives(output, output_schema={"type": "object", "properties": properties, **schema})


async def test_an_image_of_a_model_arrives_as_an_image(mode: str) -> None:
    media = {"contentEncoding": "base64", "contentMediaType": "image/png"}

    class Chart(BaseModel):
        points: int
        chart: bytes = Field(json_schema_extra=media)
        legend: bytes | None = Field(None, json_schema_extra=media)

    module = gives({"points": 3, "chart": AWKWARD}, output_schema=Chart)
    async with connect({"draw.chart": module}, mode=mode) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("draw.chart", {})
    assert not result.is_error
    text, image = result.content
    assert json.loads(text.text) == {"points": 3}
    assert (image.type, image.mime_type) == ("image", "image/png")
    assert base64.b64decode(image.data, validate=True) == AWKWARD
    assert (tool.output_schema, result.structured_content) == (None, None), "Codex would show its model that instead"


async def test_the_media_type_decides_on_the_content() -> None:
    """Also of bytes, and in the alphabet of URLs: it is sent in the standard one."""

    class Raw(BaseModel):
        file: bytes = Field(json_schema_extra={"contentEncoding": "base64", "contentMediaType": "audio/wav"})

    data = base64.b64encode(AWKWARD).decode()
    in_urls = base64.urlsafe_b64encode(AWKWARD).decode()
    modules = {
        "make.image": drawing({"file": data}, {"file": base64_of("image/svg+xml")}),
        "make.audio": gives({"file": AWKWARD}, output_schema=Raw),
        "make.resource": drawing({"file": in_urls}, {"file": base64_of("application/pdf")}),
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


@pytest.mark.parametrize(
    ("data", "text"),
    [("a,é\r\n1,2".encode(), "a,é\r\n1,2"), (b"\xff\xfe", None), ("é".encode("latin-1"), None)],
)
async def test_a_file_in_utf_8_is_sent_as_text(data: bytes, text: str | None) -> None:
    """No agent reads base64."""
    encoded = base64.b64encode(data).decode()
    for media_type in ("text/csv", "text/plain; charset=utf-8"):
        module = drawing({"file": encoded}, {"file": base64_of(media_type)})
        async with connect({"t.export": module}) as client:
            _, part = (await client.call_tool("t.export", {})).content
        assert (part.resource.uri, part.resource.mime_type) == ("media://t.export/file", media_type)
        if text is None:
            assert part.resource.blob == encoded
        else:
            assert part.resource.text == text


OPTIONAL = {"properties": {"file": {"anyOf": [base64_of("image/png"), {"type": "null"}]}}, "required": ["n"]}
ONE_VARIANT = {"properties": {"file": base64_of("image/png")}, "required": ["file"]}
FILES: dict[str, tuple[dict[str, Any], dict[str, Any], str, int]] = {
    "left_out": (OPTIONAL, {"n": 1}, '{"n":1}', 0),
    "null": (OPTIONAL, {"n": 1, "file": None}, '{"n":1}', 0),
    "there": (OPTIONAL, {"n": 1, "file": "AAAA"}, '{"n":1}', 1),
    "in_one_variant": ({"anyOf": [ONE_VARIANT, {"required": ["reason"]}]}, {"n": 1, "file": "AAAA"}, '{"n":1}', 1),
    "no_media_type": ({"properties": {"file": {"type": "string", "contentEncoding": "base64"}}}, {"file": "AAAA"},
                      '{"file":"AAAA"}', 0),
    "no_base64_at_all": ({"properties": {"file": {"contentMediaType": "text/html"}}}, {"file": "a"}, '{"file":"a"}', 0),
    "not_base64": (OPTIONAL, {"n": 1, "file": "data:image/png;base64,AAAA"},
                   "Failed to serialize module output (the tool has run)", 0),
}  # fmt: skip
"""An output schema, an output, the text, and how many files come of it."""


async def test_files_that_are_there_are_sent() -> None:
    modules = {
        f"t.{name}": gives(output, output_schema={"type": "object", **schema})
        for name, (schema, output, _, _) in FILES.items()
    }
    async with connect(modules) as client:
        for name, (_, _, text, images) in FILES.items():
            result = await client.call_tool(f"t.{name}", {})
            assert [part.type for part in result.content] == ["text", *["image"] * images], name
            assert (result.content[0].text, result.is_error) == (text, name == "not_base64")


PNG = base64_of("image/png")
Png = Annotated[bytes, Field(json_schema_extra={"contentEncoding": "base64", "contentMediaType": "image/png"})]


class Book(BaseModel):
    title: str
    pages: list[Png] | None


async def test_each_of_several_files_is_sent_by_itself() -> None:
    """In order; none of them stands in the text, and where there are none that does."""
    pages = [bytes([number]) * 4 for number in (1, 2, 3)]
    csv = {"file": {"type": "array", "items": base64_of("text/csv")}}
    marked = {"file": {"type": "array", "items": {**PNG, "x-sensitive": True}}}
    modules = {"a.csv": drawing({"file": ["YQ==", "Yg=="]}, csv), "a.face": drawing({"file": ["YQ=="]}, marked)}
    registry = registry_of(modules)
    for name, hint, value in [
        ("a.list", list[Png], pages),
        ("a.tuple", tuple[Png, Png, Png], tuple(pages)),
        ("a.book", Book, Book(title="Bread", pages=pages)),
        ("no.book", Book, Book(title="Bread", pages=None)),
        ("no.pages", list[Png], []),
    ]:
        registry.register(name, FunctionModule(returning(hint, value), name))
    async with connect(registry) as client:
        sent = {name: (await client.call_tool(name, {})).content for name in registry.list()}
    told = {name: parts.pop(0).model_dump()["text"] for name, parts in sent.items()}
    assert told == {
        "a.book": '{"title":"Bread"}', "a.csv": "{}", "a.face": f'{{"file":["{REDACTED}"]}}', "a.list": "{}",
        "a.tuple": "{}",
        "no.book": '{"title":"Bread"}', "no.pages": '{"result":[]}',
    }  # fmt: skip
    for name in ("a.list", "a.tuple", "a.book"):
        assert [base64.b64decode(part.data) for part in sent.pop(name)] == pages
    resources = [(str(part.resource.uri), part.resource.text) for part in sent.pop("a.csv")]
    assert resources == [("media://a.csv/file/0", "a"), ("media://a.csv/file/1", "b")]
    assert not any(sent.values())


@pytest.mark.parametrize("redact_output", [True, False])
@pytest.mark.parametrize("beside", [False, True], ids=["marked-itself", "marked-beside"])
async def test_a_sensitive_file_is_redacted(redact_output: bool, beside: bool) -> None:
    mark = {"x-sensitive": True}
    if beside:
        module = drawing({"face": "AAAA"}, {"face": base64_of("image/png")}, allOf=[{"properties": {"face": mark}}])
    else:
        module = drawing({"face": "AAAA"}, {"face": base64_of("image/png", **mark)})
    async with connect({"t.secret": module}, redact_output=redact_output) as client:
        result = await client.call_tool("t.secret", {})
    assert [part.type for part in result.content] == (["text"] if redact_output else ["text", "image"])
    assert json.loads(result.content[0].text) == ({"face": "***REDACTED***"} if redact_output else {})


async def test_a_stream_sends_its_file_with_the_result() -> None:
    properties = {"picture": base64_of("image/png"), "strokes": {"type": "integer"}}
    chunks = [{"strokes": 1}, {"strokes": 2, "picture": "AAAA"}]
    module = StreamingModule(chunks, output_schema={"type": "object", "properties": properties})
    note, told = noting()
    async with connect({"t.paint": module}) as client:
        result = await client.call_tool("t.paint", {}, progress_callback=note)
    assert [part.type for part in result.content] == ["text", "image"]
    assert json.loads(result.content[0].text) == {"strokes": 2}
    assert [message for _, _, message in told] == ['{"strokes":1}', '{"strokes":2}']


# ---- Output as JSON ----


class Color(enum.Enum):
    RED = "red"


class Thing:
    def __str__(self) -> str:
        return "a thing"


A_THING = Thing()
PLUS_TWO = timezone(timedelta(hours=2))

# A value that a module may return, what its JSON is, and what reads that back.
VALUES: dict[str, tuple[Any, type, Callable[[Any], Any]]] = {
    "date": (date(2026, 2, 3), str, date.fromisoformat),
    "datetime_zone": (datetime(2026, 2, 3, 4, 5, tzinfo=PLUS_TWO), str, datetime.fromisoformat),
    "uuid": (UUID("12345678-1234-5678-1234-567812345678"), str, UUID),
    "decimal": (Decimal("1.10"), str, Decimal),
    "enum": (Color.RED, str, Color),
    "bytes": (b"\xff\xfe\x00\xfb\xef\xbe", str, base64.urlsafe_b64decode),
    "set": ({1, 2, 3}, list, set),
    "tuple": ((1, "a"), list, tuple),
    "models": ([{"size": Size(width=1, made=date(2026, 2, 3))}], list, lambda v: [{"size": Size(**v[0]["size"])}]),
    "object": (A_THING, str, {"a thing": A_THING}.get),
    "unicode": ('é "quoted" \u2028 \U0001f600 </script>', str, str),
    "big_integer": (2**80, int, int),
    "nothing": (None, type(None), lambda value: value),
}


@pytest.mark.requirement("FR-EXEC-002")
async def test_values_arrive_as_json_to_read_back() -> None:
    output = {name: value for name, (value, _, _) in VALUES.items()}
    async with connect({"all.typed": gives(output), "all.plain": gives(output, output_schema={})}) as client:
        typed, plain = [await client.call_tool(name, {}) for name in ("all.typed", "all.plain")]
    arrived = parsed(success_text(typed))
    for name, (value, kind, read) in VALUES.items():
        assert (type(arrived[name]), read(arrived[name])) == (kind, value), name
    assert len(arrived) == len(VALUES)
    assert typed.structured_content == arrived
    assert success_text(plain) == success_text(typed)
    assert plain.structured_content is None


@pytest.mark.parametrize("output", [{}, None], ids=["empty", "none"])
async def test_an_empty_answer_is_an_answer(output: Any, mode: str) -> None:
    modules = {"demo.typed": gives(output), "demo.plain": gives(output, output_schema={})}
    async with connect(modules, mode=mode) as client:
        typed, plain = [await client.call_tool(name) for name in modules]
        tools = (await client.list_tools()).tools
    assert [success_text(typed), success_text(plain)] == ["{}", "{}"]
    assert (typed.structured_content, plain.structured_content) == ({}, None)
    assert {tool.name: tool.output_schema is None for tool in tools} == {"demo.plain": True, "demo.typed": False}


class Part(BaseModel):
    size: Size
    source: str = "x"


class Everything(BaseModel):
    naive: datetime
    parts: list[Part]
    by_name: dict[str, Part]


MADE = date(2026, 1, 1)
EVERYTHING: dict[str, Any] = {
    "naive": datetime(2026, 2, 3, 4, 5, 6, 789),
    "parts": [Part(size=Size(width=1, made=MADE), source="y")],
    "by_name": {"a": {"size": {"width": 1, "made": MADE}, "source": "z"}},
}


@pytest.mark.requirement("FR-SCHEMA-005")
async def test_structured_content_satisfies_the_schema() -> None:
    """The SDK's client checks it too, and raises when it does not hold."""
    async with connect({"demo.all": gives(EVERYTHING, output_schema=Everything)}) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("demo.all", {})
    assert tool.output_schema is not None
    assert "$ref" not in json.dumps(tool.output_schema)
    assert "$defs" not in tool.output_schema
    assert tool.output_schema["properties"]["parts"]["items"]["properties"]["size"]["required"] == ["width", "made"]
    assert result.structured_content == parsed(success_text(result))
    Draft202012Validator(tool.output_schema).validate(result.structured_content)
    assert "date-time" not in json.dumps(tool.output_schema), "a time without a zone is none to JSON Schema"
    assert result.structured_content["parts"][0]["source"] == "y"


class Timing(Middleware):
    def after(self, module_id: str, inputs: Any, output: Any, context: Any) -> Any:
        return {**output, "took_ms": 1}


async def test_what_middleware_adds_breaks_no_promise() -> None:
    """apcore has held the output against its schema before; the SDK's client holds the result against the promise."""
    closed = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
    executor = Executor(registry_of({"demo.added": gives({"n": 1}, output_schema=closed)}))
    executor.use(Timing())
    async with connect(executor) as client:
        assert (await client.call_tool("demo.added", {})).structured_content == {"n": 1, "took_ms": 1}


async def test_a_none_that_breaks_the_schema_is_refused() -> None:
    needing = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    async with connect({"demo.none": gives(None, output_schema=needing)}) as client:
        result = await client.call_tool("demo.none", {})
    assert lines_of(failure(result), OUTPUT) == [("(root)", "Field required", "required")]


CYCLE: dict[str, Any] = {}
CYCLE["deep"] = [{"again": CYCLE}]
UNSAYABLE: dict[str, tuple[Any, str]] = {
    "nan": ({"value": [{"deep": float("nan")}]}, ": nan at value.0.deep"),
    "infinity": ({"value": -math.inf}, ": -inf at value"),
    "decimal": ({"value": Decimal("NaN")}, ": NaN at value"),
    "cycle": (CYCLE, ""),
    "surrogate": ({"value": "a\ud800b"}, ""),
    "keys": ({"value": {1: "a", "1": "b"}}, ": two keys are '1' at value"),
}
"""What a module gives, and how the sentence goes on."""


@pytest.mark.requirement("FR-EXEC-002")
@pytest.mark.parametrize("name", UNSAYABLE)
async def test_what_json_cannot_say_is_an_error(name: str, caplog: pytest.LogCaptureFixture) -> None:
    output, place = UNSAYABLE[name]
    modules = {"a.typed": gives(output), "a.plain": gives(output, output_schema={}), "says.fine": echo}
    async with connect(modules) as client:
        for tool in ("a.typed", "a.plain"):
            failure(await client.call_tool(tool, {}), f"Failed to serialize module output{place} (the tool has run)")
            assert place.removeprefix(": ") in errors_logged(caplog)[-1].getMessage()
        assert (await client.call_tool("says.fine", {"a": 1})).structured_content == {"a": 1}


async def test_a_decimal_is_what_its_schema_says() -> None:
    """Whatever other fields there are: a client refuses a call whose result breaks what was promised."""

    class Offer(BaseModel):
        price: float
        note: float | str
        exact: Decimal

    module = gives({"price": Decimal("1.5"), "note": Decimal("2.5"), "exact": Decimal("3.50")}, output_schema=Offer)
    properties = {"price": {"type": "number"}, "prices": {"type": "array", "items": {"type": "number"}}, "note": {}}
    output = {"price": Decimal("1.5"), "prices": [Decimal(2), 3], "note": Decimal("4.0")}
    plain = gives(output, output_schema={"type": "object", "properties": properties})
    async with connect({"an.offer": module, "an.offer_of_dicts": plain}) as client:
        result = await client.call_tool("an.offer", {})
        assert json.loads(success_text(result)) == {"price": 1.5, "note": 2.5, "exact": "3.50"}
        assert result.structured_content == {"price": 1.5, "note": 2.5, "exact": "3.50"}
        result = await client.call_tool("an.offer_of_dicts", {})
        assert result.structured_content == {"price": 1.5, "prices": [2.0, 3], "note": "4.0"}


async def test_a_default_costs_nothing_of_the_promise() -> None:
    class Options(BaseModel):
        opts: dict[str, str] = {"alias": "x", "type": "json"}
        count: int

    async with connect({"t.options": gives({"count": 1}, output_schema=Options)}) as client:
        (tool,) = (await client.list_tools()).tools
        assert tool.output_schema is not None
        assert {*tool.output_schema["properties"]} == {"opts", "count"}


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
    ],
)
async def test_an_output_formatter_writes_all_of_the_answer(
    formatter: Callable[[Any], str], text: str | None, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    """It is for people; agents that read structured content would not see it."""
    schema = {"type": "object", "properties": {"day": {}, "key": {"type": "string", "x-sensitive": True}}}
    made = {"day": date(2026, 2, 3), "key": "S3CR3T"}
    shown = {"day": "2026-02-03", "key": REDACTED}
    modules = {"demo.typed": gives(shown), "demo.plain": gives(made, output_schema=schema)}
    async with connect(modules, mode=mode, output_formatter=formatter) as client:
        assert [tool.output_schema for tool in (await client.list_tools()).tools] == [None, None]
        typed, plain = await client.call_tool("demo.typed", {}), await client.call_tool("demo.plain", {})
    for result in (typed, plain):
        if text == "JSON":
            assert parsed(success_text(result)) == shown
        else:
            assert success_text(result) == (text or f"day = 2026-02-03\nkey = {REDACTED}")
    assert (typed.structured_content, plain.structured_content) == (None, None)
    failed = [r for r in caplog.records if "output_formatter failed" in r.getMessage() and r.exc_info]
    assert len(failed) == (2 if text == "JSON" else 0)


# ---- What JSON has no type for ----


class Holder(BaseModel):
    anything: Any


async def test_an_array_is_its_values() -> None:
    numbers = [*range(2000)]
    output = {
        "array": Array(numbers),
        "scalar": Array(1.5),
        "deep": [{"in": (Array([[1], [2]]),)}],
        "model": Holder(anything=Array([3])),
    }
    expected = {"array": numbers, "scalar": 1.5, "deep": [{"in": [[[1], [2]]]}], "model": {"anything": [3]}}
    schema = {"type": "object", "properties": {"array": {"type": "array", "items": {"type": "integer"}}}}
    modules = {
        "an.array": gives(output, output_schema=schema),
        "an.array_by_key": gives({1: Array([1])}),
        "an.array_in_chunks": StreamingModule([{"array": Array([1])}]),
    }
    note, told = noting()
    async with connect(modules) as client:
        result = await client.call_tool("an.array", {})
        assert parsed(success_text(result)) == result.structured_content == expected
        assert parsed(success_text(await client.call_tool("an.array_by_key", {}))) == {"1": [1]}
        result = await client.call_tool("an.array_in_chunks", {}, progress_callback=note)
        assert parsed(success_text(result)) == {"array": [1]}
    assert [message for _, _, message in told] == ['{"array":[1]}']
    assert await run_openai_call(registry_of(modules), "an-array_by_key", {}) == '{"1":[1]}'


# ---- What says less in a text than it is ----


class Series:
    """As pandas has it: values, and an index beside them."""

    index = ("north", "south")

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Any:
        return iter([8, 1])

    def tolist(self) -> list[int]:
        return [8, 1]


class Frame:
    """As pandas and polars have it: its text shows ten rows."""

    def __len__(self) -> int:
        return 1000

    def __str__(self) -> str:
        return "north  8\n..."

    def describe(self) -> str:
        return str(self)


class Lazy:
    """As a query of polars that has not run."""

    def collect(self) -> Frame:
        return Frame()


class Shown:
    """As scikit-learn's and attrs' have it: a text for programmers, which may quote what a model in it marks."""

    def __repr__(self) -> str:
        return "Shown(pin=1234)"


class Missing:
    """As pandas' NA."""

    def __str__(self) -> str:
        return "<NA>"


OBJECTS: dict[str, Callable[[], Any]] = {
    "Series": Series,
    "Frame": Frame,
    "Lazy": Lazy,
    "method": lambda: Frame().describe,
    "function": lambda: echo,
    "Shown": Shown,
    "SimpleNamespace": lambda: SimpleNamespace(a=1),
    "Missing": Missing,
    "ModelMetaclass": lambda: Holder,
}
"""The name of a type, and what makes one of it."""


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("hint", [dict[str, int], dict, list[float], Any], ids=str)
async def test_an_object_is_an_error_that_names_it(hint: Any, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Never its values without their index, nor a text that is cut."""
    make = OBJECTS[kind]
    registry = Registry()
    values = [make()] if hint is Any or hint is dict else []
    for number, value in enumerate([make(), *({"deep": [each]} for each in values)]):
        registry.register(f"a.n{number}", FunctionModule(returning(hint, value), f"a.n{number}"))
    async with connect(registry) as client:
        for tool in (await client.list_tools()).tools:
            told = failure(await client.call_tool(tool.name, {}))["error_message"]
            assert told.startswith(("Failed to serialize module output", OUTPUT)), told
            assert kind in errors_logged(caplog)[-1].getMessage()
            assert kind not in told


class Moment(Array):
    """As a datetime64 or timedelta64 of NumPy's: its text, and what `tolist` makes of it, also in microseconds."""

    def __init__(self, dtype: str, text: str, values: Any, exact: Any = None) -> None:
        super().__init__(values)
        self.dtype: Any = SimpleNamespace(kind={"d": "M", "t": "m"}[dtype[0]], name=dtype)
        self.text = text
        self.exact = exact

    def astype(self, dtype: str) -> Moment:
        return Moment(dtype, self.text, self.exact or 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moment) and self.values == other.exact

    def __float__(self) -> float:
        return 3.0

    def __str__(self) -> str:
        return self.text


class Moments(Array):
    def __init__(self, moments: list[Any]) -> None:
        super().__init__([0 for _ in moments])
        self.dtype: Any = SimpleNamespace(kind="M")
        self.moments = moments

    def __iter__(self) -> Iterator[Any]:
        return iter(self.moments)


class Record(Array):
    def __init__(self) -> None:
        super().__init__((3,))
        self.dtype: Any = SimpleNamespace(kind="V", names=["for"])

    def __getitem__(self, name: str) -> Moment:
        return MONTHS


class Stamp(datetime):
    """As pandas' Timestamp."""

    nanosecond = 789

    def isoformat(self, *arguments: Any) -> str:
        return "2026-02-03T00:00:00.000000789"


FEBRUARY = date(2026, 2, 3)
MONTHS = Moment("timedelta64[M]", "3 months", 3)
MOMENTS: list[tuple[Any, str | None]] = [
    (MONTHS, "P3M"),
    (Moment("datetime64[D]", "2026-02-03", FEBRUARY), "2026-02-03"),
    (Moment("datetime64[D]", "NaT", None), None),
    (Moment("datetime64[D]", "-4000-01-01", -2180498), "-4000-01-01"),
    (Moment("datetime64[M]", "2026-02", date(2026, 2, 1)), "2026-02"),
    (Moment("datetime64[ns]", "2026-02-03T00:00:00.000000000", 1, datetime(2026, 2, 3)), "2026-02-03T00:00:00"),
    (Moment("datetime64[ns]", "2026-02-03T00:00:00.123456789", 1), "2026-02-03T00:00:00.123456789"),
    (Moment("timedelta64[m]", "90 minutes", timedelta(minutes=90)), "PT1H30M"),
    (Moment("timedelta64[ns]", "90000000000 nanoseconds", 9, timedelta(seconds=90)), "PT1M30S"),
    (Moment("timedelta64[ns]", "-1500 nanoseconds", -1500), "-PT0.0000015S"),
    (Moment("timedelta64[D]", "1000000000000 days", 10**12), "P1000000000000D"),
    (Stamp(2026, 2, 3), "2026-02-03T00:00:00.000000789"),
]
"""What NumPy has, and what is sent of it."""


@pytest.mark.parametrize("hint", [list, Any], ids=str)
async def test_a_moment_of_numpys_is_its_iso_text(hint: Any) -> None:
    """Never a number, and nothing of it is cut."""
    given = [moment for moment, _ in MOMENTS]
    registry = Registry()
    values = {"an.array": Moments(given), "a.list": given, "a.record": [Record()]}
    for name, value in values.items():
        registry.register(name, FunctionModule(returning(hint, value), name))
    async with connect(registry) as client:
        sent = [(await client.call_tool(name, {})).structured_content for name in values]
    assert sent == [{"result": [text for _, text in MOMENTS]}] * 2 + [{"result": [["P3M"]]}]


# ---- By what declares it ----


class Line(BaseModel):
    day: date = Field(validation_alias="lineDay", serialization_alias="dayOfLine")
    reason: str = Field("", exclude=True)

    @field_serializer("day")
    def shown(self, day: date) -> str:
        return f"{day:%d.%m.%Y}"


class Bill(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int = Field(alias="billNumber", serialization_alias="No")
    lines: list[Line] = []

    @computed_field
    def double(self) -> int:
        return 2 * self.number


BILL = Bill(billNumber=1, lines=[Line(lineDay=date(2026, 1, 2))])


async def test_a_model_is_sent_as_pydantic_writes_it() -> None:
    """By its aliases, with what it computes and without what it excludes. What is no such model is refused."""
    written = {"No": 1, "lines": [{"dayOfLine": "02.01.2026"}], "double": 2}

    async def passing_on(inputs: Any, context: Any) -> Any:
        output = await context.executor.call_async("a.size", {}, context)
        return {"type": type(output).__name__, **output}

    right = {"a.model": BILL, "a.dict": {"billNumber": 1, "lines": [{"lineDay": date(2026, 1, 2)}]}}
    wrong = {"a.text": {"billNumber": "1"}, "a.surplus": {"billNumber": 1, "other": 1}, "an.absence": {"lines": []}}
    modules: dict[str, Any] = {name: gives(given, output_schema=Bill) for name, given in {**right, **wrong}.items()}
    modules |= {"a.size": gives(Size(width=1, made=MADE), output_schema=Size), "a.caller": passing_on}
    async with connect(modules) as client:
        for name in right:
            result = await client.call_tool(name, {})
            assert parsed(success_text(result)) == result.structured_content == written, name
        called = (await client.call_tool("a.caller", {})).structured_content
        assert called == {"type": "dict", "width": 1, "made": "2026-01-01"}
        for name in wrong:
            lines_of(failure(await client.call_tool(name, {})), OUTPUT)


Money = Annotated[Decimal, PlainSerializer(lambda amount: f"{amount:.2f} EUR", return_type=str)]
Price = Annotated[Decimal, PlainSerializer(float, return_type=float, when_used="json")]


@dataclass
class Item:
    price: Money


@dataclass
class Cart:
    items: list[Item]
    count: int


class Priced(BaseModel):
    price: Price


class PricedAndMore(Priced):
    more: Any = None


class Mean(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="null")
    mean: float | None


class MeanAndMore(Mean):
    more: Any = None


class Shortened(BaseModel):
    top: Annotated[list[int], PlainSerializer(lambda numbers: numbers[:2], when_used="json")]
    more: Any = None


class Days(RootModel[list[date]]): ...


class DaysByName(RootModel[dict[str, date]]): ...


class Averaged(BaseModel):
    numbers: list[float]

    @computed_field
    def mean(self) -> float:
        return NAN


class AveragedAndMore(Averaged):
    more: Any = None


ONE = Decimal("1.1")
NAN = float("nan")
ARRAY = Array([1, 2])
WRITTEN: list[tuple[Any, Any, Any]] = [
    (Money, ONE, {"result": "1.10 EUR"}),
    (list[Money], [ONE], {"result": ["1.10 EUR"]}),
    (dict[str, Money], {"a": ONE}, {"a": "1.10 EUR"}),
    (Item, Item(ONE), {"result": {"price": "1.10 EUR"}}),
    (list[Item], [Item(ONE)], {"result": [{"price": "1.10 EUR"}]}),
    (Priced, Priced(price=ONE), {"price": 1.1}),
    (Mean, Mean(mean=NAN), {"mean": None}),
    (list[Mean], [Mean(mean=NAN)], {"result": [{"mean": None}]}),
    (dict[str, Mean], {"a": Mean(mean=NAN)}, {"a": {"mean": None}}),
    (PricedAndMore, PricedAndMore(price=ONE, more=ARRAY), {"price": 1.1, "more": [1, 2]}),
    (Any, [Priced(price=ONE)], {"result": [{"price": 1.1}]}),
    (dict, {"a": Priced(price=ONE)}, {"a": {"price": 1.1}}),
    (list, [Mean(mean=NAN)], {"result": [{"mean": None}]}),
    (MeanAndMore, MeanAndMore(mean=NAN, more=b"?>~"), {"mean": None, "more": "Pz5+"}),
    (Days, Days([date(2026, 2, 3)]), {"result": ["2026-02-03"]}),
    (DaysByName, DaysByName({"a": date(2026, 2, 3)}), {"a": "2026-02-03"}),
    (Shortened, Shortened(top=[3, 2, 1]), {"top": [3, 2], "more": None}),
    (list[dict[str, Any]], [{"n": 1, "at": date(2026, 2, 3)}], {"result": [{"n": 1, "at": "2026-02-03"}]}),
]
"""A hint, what a function returns by it, and what is sent."""


@pytest.mark.parametrize(("hint", "value", "sent"), WRITTEN, ids=[str(hint)[-40:] for hint, _, _ in WRITTEN])
async def test_serializers_of_pydantics_hold(hint: Any, value: Any, sent: Any) -> None:
    """The SDK's client holds what comes against the advertised schema, and raises."""
    registry = Registry()
    registry.register("a.one", FunctionModule(returning(hint, value), "a.one"))
    async with connect(registry) as client:
        result = await client.call_tool("a.one", {})
    assert parsed(success_text(result)) == result.structured_content == sent


@pytest.mark.parametrize(
    ("hint", "value", "place"),
    [
        (Averaged, Averaged(numbers=[]), ": nan at mean"),
        (AveragedAndMore, AveragedAndMore(numbers=[]), ": nan at mean"),
        (Any, [Averaged(numbers=[])], ": nan at result.0.mean"),
        (dict, {"a": Averaged(numbers=[])}, ": nan at a.mean"),
        (PricedAndMore, PricedAndMore(price=ONE, more=deque([NAN])), ": nan at more.0"),
        (MeanAndMore, MeanAndMore(mean=1, more={"a": Array([1, NAN])}), ": nan at more.a.1"),
        (PricedAndMore, PricedAndMore(price=ONE, more={1: "a", "1": "b"}), ": two keys are '1' at more"),
    ],
    ids="computed beside-any in-a-list in-a-dict deque array keys".split(),
)
async def test_what_json_cannot_say_is_found_in_models(hint: Any, value: Any, place: str) -> None:
    """Pydantic would write null for NaN, and one of two keys."""
    registry = Registry()
    registry.register("a.one", FunctionModule(returning(hint, value), "a.one"))
    async with connect(registry) as client:
        told = f"Failed to serialize module output{place.replace('result.', '')} (the tool has run)"
        failure(await client.call_tool("a.one", {}), told)


async def test_a_generator_is_not_used_up() -> None:
    """It may have no end, and all other calls would wait for it."""
    numbers = (number for number in range(3))
    registry = Registry()
    registry.register(
        "a.part", FunctionModule(returning(PricedAndMore, PricedAndMore(price=ONE, more=numbers)), "a.part")
    )
    registry.register("a.whole", FunctionModule(returning(Any, numbers), "a.whole"))
    async with connect(registry) as client:
        for name in ("a.part", "a.whole"):
            failure(await client.call_tool(name, {}), "Failed to serialize module output (the tool has run)")
    assert [*numbers] == [0, 1, 2]


UNFIT: list[tuple[Any, Any, str]] = [
    (dict, "text", "(root)"),
    (dict, [1], "(root)"),
    (dict[str, int], {"a": "x"}, "a"),
    (dict[str, int], {"a": 1.5}, "a"),
    (dict[str, Annotated[float, Field(le=1)]], {"a": 1.7}, "a"),
    (list[Annotated[int, Field(ge=1)]], [1, 0], "result.1"),
    (Cart, Cart([Item(ONE)], "one"), "result.count"),  # type: ignore[arg-type]
    (Cart, Cart([Item(ONE)], None), "result.count"),  # type: ignore[arg-type]
    (list[Cart], [Cart([Item("dear")], 1)], ""),  # type: ignore[arg-type]
    (int, MONTHS, "result"),
    (float, MONTHS, "result"),
    (list[float], Moments([MONTHS]), "result"),
    (timedelta, MONTHS, "result"),
]
"""A hint, what does not fit it, and the field that is named."""


@pytest.mark.parametrize(("hint", "value", "field"), UNFIT, ids=str)
async def test_what_does_not_fit_its_hint_is_refused(
    hint: Any, value: Any, field: str, caplog: pytest.LogCaptureFixture
) -> None:
    registry = Registry()
    registry.register("a.one", FunctionModule(returning(hint, value), "a.one"))
    async with connect(registry) as client:
        report = failure(await client.call_tool("a.one", {}))
    assert report["error_message"].startswith(OUTPUT if field else ("Output validation failed", "Failed to serialize"))
    if field:
        assert [name for name, _, _ in lines_of(report, OUTPUT)] == [field]
        assert f"(it is a {type(value).__module__}.{type(value).__qualname__})" in errors_logged(caplog)[0].getMessage()


# ---- A value is sent as it was returned ----


@dataclass
class Flour:
    grams: float
    scale: InitVar[float] = 1000.0

    def __post_init__(self, scale: float) -> None:
        self.grams /= scale


class Oven(BaseModel):
    degrees: float
    tag: str = Field(default_factory=lambda: pytest.fail("made anew"))

    @model_validator(mode="after")
    def kelvin(self) -> Any:
        self.degrees += 273
        return self


class Kitchen(BaseModel):
    oven: Oven
    when: date = date(2026, 2, 3)


class Stay(TypedDict):
    nights: Annotated[int, Field(ge=1)]


@dataclass
class Trip:
    day: date
    price: Decimal = Decimal(0)
    stops: list[str] = field(default_factory=list)
    kind: Literal["bus", "train"] = "bus"
    stay: Stay | None = None
    seats: Annotated[int, Field(ge=1)] = 1


def trip(**changed: Any) -> Trip:
    """One whose fields were changed after it was made."""
    made = Trip(date(2026, 2, 3))
    vars(made).update(changed)
    return made


FLOUR, OVEN = Flour(2500), Oven(degrees=200, tag="a")
HOT = {"degrees": 473.0, "tag": "a"}
DAY = "2026-02-03"
TRIP = {"day": DAY, "price": "0", "stops": [], "kind": "bus", "stay": None, "seats": 1}
RETURNED: dict[str, tuple[Any, Any, Any]] = {
    "dataclass": (Flour, FLOUR, {"grams": 2.5}),
    "in_a_list": (list[Flour], [FLOUR], [{"grams": 2.5}]),
    "in_another_container": (list[Flour], (FLOUR,), [{"grams": 2.5}]),
    "in_a_union": (Flour | None, FLOUR, {"grams": 2.5}),
    "of_a_validator": (list[Oven], [OVEN], [HOT]),
    "in_a_hint": (Annotated[Oven, AfterValidator(lambda oven: pytest.fail("checked again"))], OVEN, HOT),
    "in_a_row": (dict[str, list[Kitchen]], {"a": [{"oven": OVEN}]}, {"a": [{"oven": HOT, "when": DAY}]}),
    "beside_a_text": (list[Kitchen], [{"oven": OVEN, "when": DAY}], [{"oven": HOT, "when": DAY}]),
    "a_row": (list[Flour], [{"grams": 2500.0}], [{"grams": 2.5}]),
    "an_iso_date": (Trip, trip(day=DAY), TRIP),
    "an_int": (Trip, trip(price=3), {**TRIP, "price": "3"}),
    "a_tuple": (Trip, trip(stops=("Rome",)), {**TRIP, "stops": ["Rome"]}),
}
"""A hint, what is returned by it, and what is sent, however often."""


@pytest.mark.parametrize("name", RETURNED)
async def test_an_instance_is_sent_as_it_is(name: str) -> None:
    hint, value, sent = RETURNED[name]
    registry = Registry()
    registry.register("a.one", FunctionModule(returning(hint, value), "a.one"))
    async with connect(registry) as client:
        for _ in range(2):
            result = parsed(success_text(await client.call_tool("a.one", {})))
            assert result == (sent if typing.get_origin(hint) is dict else {"result": sent}), name


async def test_an_instance_of_a_class_is_sent_as_it_is() -> None:
    modules = {"a.model": gives(OVEN, output_schema=Oven), "a.dict": gives({"oven": OVEN}, output_schema=Kitchen)}
    async with connect(modules) as client:
        for _ in range(2):
            assert (await client.call_tool("a.model", {})).structured_content == HOT
            assert (await client.call_tool("a.dict", {})).structured_content == {"oven": HOT, "when": DAY}


CHANGED: dict[str, tuple[Any, Any, str]] = {
    "type": (Trip, trip(seats="two"), "result.seats"),
    "bound": (list[Trip], [trip(), trip(seats=0)], "result.1.seats"),
    "literal": (Trip, trip(kind="boat"), "result.kind"),
    "format": (Trip, trip(day="tomorrow"), "result.day"),
    "none": (Trip, trip(stops=None), "result.stops"),
    "missing": (Trip, trip(stay={}), "result.stay.nights"),
    "inside": (Trip, trip(stay={"nights": 0}), "result.stay.nights"),
    "constructed": (Kitchen, Kitchen.model_construct(), "oven"),
}


@pytest.mark.parametrize("name", CHANGED)
async def test_an_instance_that_does_not_fit_is_refused(name: str) -> None:
    """By its whole path. The client would refuse all of the answer."""
    hint, value, field = CHANGED[name]
    registry = Registry()
    registry.register("a.one", FunctionModule(returning(hint, value), "a.one"))
    async with connect(registry) as client:
        report = failure(await client.call_tool("a.one", {}))
    assert field in {name for name, _, _ in lines_of(report, OUTPUT)}


async def test_a_field_that_pydantic_does_not_know_is_told(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass
    class Loaf:
        kind: str
        slices: int = field(init=False)

        def __post_init__(self) -> None:
            self.slices = 12

    registry = Registry()
    registry.register("a.loaf", FunctionModule(returning(list[Loaf], [Loaf("rye")]), "a.loaf"))
    async with connect(registry) as client:
        assert parsed(success_text(await client.call_tool("a.loaf", {}))) == {"result": [{"kind": "rye"}]}
    assert "Loaf.slices" in caplog.text


PAIR = {7: "the cat", "7": "the dog"}


class Tick(datetime):
    """As pandas': it has more than one for a text."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return self is other


TICKS = {datetime(2026, 2, 3): 1.0, Tick(2026, 2, 3): 2.0}


@pytest.mark.parametrize(
    ("hint", "value", "name"),
    [
        (dict[int | str, str], PAIR, "7"),
        (dict[str, dict[Any, str]], {"first": PAIR}, "7"),
        (list[dict[Any, Any]], [PAIR], "7"),
        (dict[str | None, int], {None: 3, "None": 1}, "None"),
        (dict[datetime, float], TICKS, "2026-02-03T00:00:00"),
        (PricedAndMore, PricedAndMore(price=ONE, more=PAIR), "7"),
        (Any, PAIR, "7"),
    ],
    ids=str,
)
async def test_two_keys_of_one_name_are_an_error(hint: Any, value: Any, name: str) -> None:
    """Before pydantic drops one."""
    registry = Registry()
    registry.register("a.one", FunctionModule(returning(hint, value), "a.one"))
    async with connect(registry) as client:
        told = failure(await client.call_tool("a.one", {}))["error_message"]
    assert told.startswith(f"Failed to serialize module output: two keys are '{name}' at ")


async def test_by_a_dict_schema_json_decides() -> None:
    """Dates, Decimals and tuples are their JSON, which hooks get as well."""
    given = {
        "at": datetime(2026, 2, 3, 4, 5), "day": date(2026, 2, 3), "id": UUID(int=1), "price": Decimal("1.5"),
        "pair": (1, 2), "color": Color.RED,
    }  # fmt: skip
    written = {"at": "2026-02-03T04:05:00", "day": "2026-02-03", "id": str(UUID(int=1)), "price": 1.5, "pair": [1, 2],
               "color": "red"}  # fmt: skip
    text = {"type": "string"}
    pair = {"type": "array", "items": {"type": "integer"}}
    properties = {"at": text, "day": text, "id": text, "price": {"type": "number"}, "pair": pair,
                  "color": {"enum": ["red"]}}  # fmt: skip
    schema = {"type": "object", "properties": properties, "required": [*given], "additionalProperties": False}
    seen: list[Any] = []

    class Watching(Middleware):
        def after(self, module_id: str, inputs: Any, output: Any, context: Any) -> Any:
            seen.append(output)

    wrong = {**given, "pair": ("a",)}
    modules = {"a.form": gives(given, output_schema=schema), "a.wrong_form": gives(wrong, output_schema=schema)}
    executor = Executor(registry_of(modules), middlewares=[Watching()])
    async with connect(executor) as client:
        assert (await client.call_tool("a.form", {})).structured_content == written
        report = failure(await client.call_tool("a.wrong_form", {}))
    assert seen == [written]
    assert lines_of(report, OUTPUT) == [("pair.0", "Value is not valid", "type")]


@pytest.mark.parametrize("schema", [{}, {"type": "array"}, Bill], ids=["any", "array", "model"])
async def test_a_bare_list_of_a_class_is_refused(schema: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A class gives a dict or a model."""
    for output in ([1], Array([1]), RootModel[list[int]]([1])):
        async with connect({"a.list": gives(output, output_schema=schema)}) as client:
            report = failure(await client.call_tool("a.list", {}))
        assert [field for field, _, _ in lines_of(report, OUTPUT)] == ["(root)"]
        assert type(output).__qualname__ in errors_logged(caplog)[-1].getMessage()


# ---- The size of a result ----


async def test_a_result_too_large_is_an_error(mode: str) -> None:
    """Text, structured content and files count together."""
    large = {"text": "x" * 600}
    modules = {
        "a.text": gives(large, output_schema={}),
        "a.structured": gives(large),
        "a.file": drawing({"file": "AAAA" * 150}, {"file": base64_of("image/png")}),
        "a.stream": StreamingModule([{"a": "x" * 300}, {"b": "x" * 300}], output_schema={}),
        "a.chunk": StreamingModule([{"a": "x" * 600}], output_schema={}),
    }
    sizes = {"a.chunk": 608, "a.text": 611, "a.structured": 1222, "a.file": 656, "a.stream": 615}
    for limit in (500, 1300, 0):
        async with connect(modules, mode=mode, max_result=limit) as client:
            for name, size in sizes.items():
                note, told = noting()
                streams = name in ("a.stream", "a.chunk")
                result = await client.call_tool(name, {}, progress_callback=note if streams else None)
                if limit != 500:
                    assert not result.is_error, name
                    continue
                text = f"Result is too large: {size} bytes, and at most 500 are sent (the tool has run)"
                assert failure(result, text)["error_type"] == "RESULT_TOO_LARGE"
                assert max((len(message or "") for _, _, message in told), default=0) <= limit
    assert "611 bytes" in await run_openai_call(registry_of(modules), "a-text", {}, max_result=500)
    assert len(await run_openai_call(registry_of(modules), "a-text", {})) == 611
