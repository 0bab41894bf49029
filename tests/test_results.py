"""What a module's answer becomes: JSON text, structured content, files (FR-EXEC-002, FR-SCHEMA-005).

What is checked and written, by tables, without a server (`sent()`); what a client is given, over HTTP.
"""

from __future__ import annotations

import base64
import enum
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import InitVar, dataclass, field
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from types import SimpleNamespace
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from apcore import Executor, ModuleError
from conftest import FunctionalModule, connect, echo, registry_of
from jsonschema import Draft202012Validator
from pydantic import (
    AfterValidator,
    Base64Bytes,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    RootModel,
    computed_field,
    field_serializer,
    model_validator,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
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
    returning,
    sent,
    success_text,
    tool_of,
)
from typing_extensions import TypedDict

from apcore_mcp import run_openai_call
from apcore_mcp.output import RefusedOutput
from apcore_mcp.values import as_json

OUTPUT = "Output validation failed (the tool has run):"


def by_hint(hint: Any, value: Any) -> Any:
    """What is sent of what a function with this return hint returns."""
    return sent(returning(hint, value), value)


def refused(hint: Any, value: Any) -> ModuleError:
    with pytest.raises(ModuleError) as caught:
        by_hint(hint, value)
    return caught.value


# ---- Files ----

AWKWARD = bytes(range(248, 256))  # in base64 its text differs between the alphabet of URLs and the standard one
STANDARD, IN_URLS = base64.b64encode(AWKWARD).decode(), base64.urlsafe_b64encode(AWKWARD).decode()
LATIN = base64.b64encode("é".encode("latin-1")).decode()
MEDIA: Any = {"contentEncoding": "base64", "contentMediaType": "image/png"}
MARK: Any = {"x-sensitive": True}
Png = Annotated[bytes, Field(json_schema_extra=MEDIA)]


def base64_of(media_type: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "contentEncoding": "base64", "contentMediaType": media_type, **more}


PNG, CSV = base64_of("image/png"), base64_of("text/csv")


def drawing(file: Any, schema: dict[str, Any], **more: Any) -> FunctionalModule:
    return gives({"file": file}, output_schema={"type": "object", "properties": {"file": schema}, **more})


class Chart(BaseModel):
    points: int
    chart: bytes = Field(json_schema_extra=MEDIA)
    legend: bytes | None = Field(None, json_schema_extra=MEDIA)


class Raw(BaseModel):
    file: bytes = Field(json_schema_extra=base64_of("audio/wav"))


class Book(BaseModel):
    title: str
    pages: list[Png] | None


PAGES = [bytes([number]) * 4 for number in (1, 2, 3)]
SENT_PAGES = [("image", "image/png", base64.b64encode(page).decode()) for page in PAGES]
OPTIONAL = {"type": "object", "properties": {"file": {"anyOf": [PNG, {"type": "null"}]}}, "required": ["n"]}
ONE_VARIANT = {"anyOf": [{"properties": {"file": PNG}, "required": ["file"]}, {"required": ["reason"]}]}
A_FILE = ("image", "image/png", "AAAA")
FILES: dict[str, tuple[Any, str, list[tuple[str, ...]]]] = {
    "of_a_model": (gives({"points": 3, "chart": AWKWARD}, output_schema=Chart), '{"points":3}',
                   [("image", "image/png", STANDARD)]),
    "image": (drawing(STANDARD, base64_of("image/svg+xml")), "{}", [("image", "image/svg+xml", STANDARD)]),
    "audio": (gives({"file": AWKWARD}, output_schema=Raw), "{}", [("audio", "audio/wav", STANDARD)]),
    "other": (drawing(IN_URLS, base64_of("application/pdf")), "{}",
              [("media://a.other/file", "application/pdf", STANDARD)]),
    "utf_8": (drawing(base64.b64encode("a,é\r\n".encode()).decode(), base64_of("text/plain; charset=utf-8")), "{}",
              [("media://a.utf_8/file", "text/plain; charset=utf-8", "a,é\r\n")]),
    "latin_1": (drawing(LATIN, CSV), "{}", [("media://a.latin_1/file", "text/csv", LATIN)]),
    "left_out": (gives({"n": 1}, output_schema=OPTIONAL), '{"n":1}', []),
    "null": (gives({"n": 1, "file": None}, output_schema=OPTIONAL), '{"n":1}', []),
    "there": (gives({"n": 1, "file": "AAAA"}, output_schema=OPTIONAL), '{"n":1}', [A_FILE]),
    "in_one_variant": (gives({"file": "AAAA"}, output_schema={"type": "object", **ONE_VARIANT}), "{}", [A_FILE]),
    "no_media_type": (drawing("AAAA", {"type": "string", "contentEncoding": "base64"}), '{"file":"AAAA"}', []),
    "no_base64": (drawing("a", {"contentMediaType": "text/html"}), '{"file":"a"}', []),
    "list": (returning(list[Png], PAGES), "{}", SENT_PAGES),
    "tuple": (returning(tuple[Png, Png, Png], tuple(PAGES)), "{}", SENT_PAGES),
    "book": (returning(Book, Book(title="Bread", pages=PAGES)), '{"title":"Bread"}', SENT_PAGES),
    "no_book": (returning(Book, Book(title="Bread", pages=None)), '{"title":"Bread"}', []),
    "no_pages": (returning(list[Png], []), '{"result":[]}', []),
    "texts": (drawing(["YQ==", "Yg=="], {"type": "array", "items": CSV}), "{}",
              [("media://a.texts/file/0", "text/csv", "a"), ("media://a.texts/file/1", "text/csv", "b")]),
}  # fmt: skip
"""What a module gives, the text, and each file that is sent beside it: kind or URI, media type, data or text."""


def told_of(part: Any) -> tuple[str, ...]:
    if part.type != "resource":
        return part.type, part.mime_type, part.data
    resource = part.resource.model_dump()
    return str(resource["uri"]), resource["mime_type"], resource.get("text", resource.get("blob"))


async def test_files_are_sent_beside_the_text(mode: str) -> None:
    modules = {f"a.{name}": module for name, (module, _, _) in FILES.items()}
    async with connect({**modules, "no.base64": drawing("data:,AAAA", PNG)}, mode=mode) as client:
        schemas = {tool.name: tool.output_schema for tool in (await client.list_tools()).tools}
        for name, (_, text, files) in FILES.items():
            result = await client.call_tool(f"a.{name}", {})
            first, *others = result.content
            assert (result.is_error, first.text, [told_of(part) for part in others]) == (False, text, files), name
            if files:  # Codex would show its model structured content instead
                assert (schemas[f"a.{name}"], result.structured_content) == (None, None)
        failure(await client.call_tool("no.base64", {}), "Failed to serialize module output (the tool has run)")


async def test_a_sensitive_file_is_redacted() -> None:
    modules = {
        "a.marked": drawing("AAAA", {**PNG, **MARK}),
        "a.marked_beside": drawing("AAAA", PNG, allOf=[{"properties": {"file": MARK}}]),
        "a.marked_list": drawing(["AAAA"], {"type": "array", "items": {**PNG, **MARK}}),
    }
    shown = [{"file": REDACTED}, {"file": REDACTED}, {"file": [REDACTED]}]
    for redacts, expected in ((True, shown), (False, [{}, {}, {}])):
        async with connect(modules, redact_output=redacts) as client:
            results = [await client.call_tool(name, {}) for name in modules]
        assert [json.loads(result.content[0].text) for result in results] == expected
        assert [len(result.content) for result in results] == [1 if redacts else 2] * 3


async def test_a_stream_sends_its_file_with_the_result() -> None:
    """And hides what is marked in each chunk."""
    properties = {"picture": PNG, "strokes": {"type": "integer"}, "key": MARK}
    chunks = [{"strokes": 1, "key": "S3CR3T"}, {"strokes": 2, "picture": "AAAA"}]
    module = StreamingModule(chunks, output_schema={"type": "object", "properties": properties})
    note, told = noting()
    async with connect({"t.paint": module}) as client:
        result = await client.call_tool("t.paint", {}, progress_callback=note)
    assert [part.type for part in result.content] == ["text", "image"]
    assert json.loads(result.content[0].text) == {"strokes": 2, "key": REDACTED}
    chunks_told = [json.loads(message or "") for _, _, message in told]
    assert chunks_told == [{"strokes": 1, "key": REDACTED}, {"strokes": 2}]


# ---- Output as JSON ----


class Color(enum.Enum):
    RED = "red"


class Thing:
    def __str__(self) -> str:
        return "a thing"


PLUS_TWO = timezone(timedelta(hours=2))

VALUES: list[tuple[Any, Any]] = [
    (date(2026, 2, 3), "2026-02-03"),
    (datetime(2026, 2, 3, 4, 5, tzinfo=PLUS_TWO), "2026-02-03T04:05:00+02:00"),
    (UUID("12345678-1234-5678-1234-567812345678"), "12345678-1234-5678-1234-567812345678"),
    (Decimal("1.10"), "1.10"),
    (Color.RED, "red"),
    (b"\xff\xfe\x00\xfb\xef\xbe", "//4A++++"),
    ({3}, [3]),
    ((1, "a"), [1, "a"]),
    ([{"size": Size(width=1, made=date(2026, 2, 3))}], [{"size": {"width": 1, "made": "2026-02-03"}}]),
    (Thing(), "a thing"),
    ('é "quoted" \u2028 \U0001f600 </script>', 'é "quoted" \u2028 \U0001f600 </script>'),
    (2**80, 2**80),
    ([bytearray(b"a"), frozenset([1])], ["YQ==", [1]]),
    ({1: 1, None: 2, (1, 2): 3, b"b": 4}, {"1": 1, "None": 2, "1,2": 3, "b": 4}),
    (None, None),
]
"""A value that a module may return, and what its JSON is."""
LIKE_A_RESULT: dict[str, Any] = {"content": [{"type": "text", "text": "no"}], "isError": True, "_meta": {"a": 1}}


@pytest.mark.requirement("FR-EXEC-002")
async def test_values_arrive_as_json() -> None:
    """Also in the places of an MCP result."""
    output = LIKE_A_RESULT | {str(number): value for number, (value, _) in enumerate(VALUES)}
    async with connect({"all.typed": gives(output), "all.plain": gives(output, output_schema={})}) as client:
        typed, plain = [await client.call_tool(name, {}) for name in ("all.typed", "all.plain")]
    expected = LIKE_A_RESULT | {str(number): written for number, (_, written) in enumerate(VALUES)}
    assert parsed(success_text(typed)) == expected
    assert typed.structured_content == parsed(success_text(typed))
    assert success_text(plain) == success_text(typed)
    assert plain.structured_content is None


async def test_an_empty_answer_is_an_answer(mode: str) -> None:
    for output in ({}, None):
        modules = {"demo.typed": gives(output), "demo.plain": gives(output, output_schema={})}
        async with connect(modules, mode=mode) as client:
            typed, plain = [await client.call_tool(name) for name in modules]
        assert [success_text(typed), success_text(plain)] == ["{}", "{}"]
        assert (typed.structured_content, plain.structured_content) == ({}, None)


class Everything(BaseModel):
    naive: datetime
    parts: list[Size]
    by_name: dict[str, Size]


MADE = date(2026, 1, 1)
SIZE = {"width": 1, "made": MADE}
EVERYTHING = {"naive": datetime(2026, 2, 3, 4, 5, 6, 789), "parts": [Size(width=1, made=MADE)], "by_name": {"a": SIZE}}


@pytest.mark.requirement("FR-SCHEMA-005")
async def test_structured_content_satisfies_the_schema() -> None:
    """The SDK's client checks it too, and raises when it does not hold."""
    async with connect({"demo.all": gives(EVERYTHING, output_schema=Everything)}) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("demo.all", {})
    assert tool.output_schema is not None
    assert not {"$ref", "$defs"} & set(re.findall(r"\$\w+", json.dumps(tool.output_schema)))
    assert tool.output_schema["properties"]["parts"]["items"]["required"] == ["width", "made"]
    assert "date-time" not in json.dumps(tool.output_schema), "a time without a zone is none to JSON Schema"
    assert result.structured_content == parsed(success_text(result))
    Draft202012Validator(tool.output_schema).validate(result.structured_content)
    assert result.structured_content["by_name"] == {"a": {"width": 1, "made": "2026-01-01"}}


async def test_what_middleware_makes_of_it_is_held_against_the_promise() -> None:
    """What it adds breaks none: a client would refuse the result."""
    closed = {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}
    executor = Executor(registry_of({"demo.adds": gives({"n": 1}, output_schema=closed)}))
    executor.use_after(lambda module_id, inputs, output, context: {**output, **inputs})
    async with connect(executor) as client:
        assert (await client.call_tool("demo.adds", {"ms": 2})).structured_content == {"n": 1, "ms": 2}
        broken = failure(await client.call_tool("demo.adds", {"n": "one"}))
    assert lines_of(broken, OUTPUT) == [("n", "Value is not valid", "type")]


CYCLE: dict[str, Any] = {}
CYCLE["deep"] = [{"again": CYCLE}]
UNSAYABLE: dict[str, tuple[Any, str]] = {
    "nan": ({"value": [{"deep": float("nan")}]}, ": nan at value.0.deep"),
    "infinity": ({"value": -math.inf}, ": -inf at value"),
    "decimal": ({"value": Decimal("NaN")}, ": NaN at value"),
    "cycle": (CYCLE, ""),
    "surrogate": ({"value": "a\ud800b"}, ""),
    "huge": ({"value": 10**5000}, ""),
    "keys": ({"value": {1: "a", "1": "b"}}, ": two keys are '1' at value"),
}
"""What a module gives, and how the sentence goes on."""


@pytest.mark.requirement("FR-EXEC-002")
async def test_what_json_cannot_say_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    marked = {"type": "object", "properties": {"value": MARK}}
    modules: dict[str, Any] = {"says.fine": echo, "is.marked": gives(UNSAYABLE["keys"][0], output_schema=marked)}
    for name, (output, _) in UNSAYABLE.items():
        modules |= {f"{name}.typed": gives(output), f"{name}.plain": gives(output, output_schema={})}
    async with connect(modules) as client:
        for name, (_, place) in UNSAYABLE.items():
            for tool in (f"{name}.typed", f"{name}.plain"):
                told = f"Failed to serialize module output{place} (the tool has run)"
                failure(await client.call_tool(tool, {}), told)
                assert place.removeprefix(": ") in errors_logged(caplog)[-1].getMessage()
        failure(await client.call_tool("is.marked", {}), "Failed to serialize module output (the tool has run)")
        assert (await client.call_tool("says.fine", {"a": 1})).structured_content == {"a": 1}


class Offer(BaseModel):
    price: float
    note: float | str
    exact: Decimal


def test_a_decimal_is_what_its_schema_says() -> None:
    """Whatever other fields there are: a client refuses a call whose result breaks what was promised."""
    offered = {"price": Decimal("1.5"), "note": Decimal("2.5"), "exact": Decimal("3.50")}
    assert sent(gives(None, output_schema=Offer), offered) == {"price": 1.5, "note": 2.5, "exact": "3.50"}
    properties = {"price": {"type": "number"}, "prices": {"type": "array", "items": {"type": "number"}}}
    properties["note"] = {"type": ["number", "string"]}
    properties["sum"] = {"type": ["integer", "null"]}
    properties["whole"] = {"type": "number", "oneOf": [{"type": "integer"}, {"maximum": 0}], "minimum": 1, "maximum": 3}
    properties["pair"] = {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "maxItems": 3}
    module = gives(None, output_schema={"type": "object", "properties": properties})
    given = {"price": Decimal("1.5"), "prices": [Decimal(2), 3], "note": Decimal("4.0"), "sum": Decimal(2**63 + 1)}
    given |= {"whole": Decimal(2), "pair": [1, "a"]}
    written = {"price": 1.5, "prices": [2.0, 3], "note": "4.0", "sum": 2**63 + 1, "whole": 2, "pair": [1, "a"]}
    assert sent(module, given) == written
    assert sent(module, {"whole": 1.0}) == {"whole": 1}


def test_a_default_costs_nothing_of_the_promise() -> None:
    class Options(BaseModel):
        opts: dict[str, str] = {"alias": "x", "type": "json"}
        count: int

    assert {*tool_of(gives(None, output_schema=Options)).output_schema["properties"]} == {"opts", "count"}


# ---- output_formatter ----


def emptied(value: Any) -> str:
    value.clear()
    return "nothing left\ud800"


SHOWN = {"day": "2026-02-03", "key": REDACTED}
FORMATTERS: dict[str, tuple[Callable[[Any], str], str]] = {
    "text": (lambda value: "\n".join(f"{k} = {v}" for k, v in value.items()), f"day = 2026-02-03\nkey = {REDACTED}"),
    "takes_it_apart": (emptied, "nothing left?"),
    "raises": (lambda value: value["no such"], json.dumps(SHOWN, separators=(",", ":"))),
}


@pytest.mark.parametrize("name", FORMATTERS)
async def test_an_output_formatter_writes_all_of_the_answer(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is for people; agents that read structured content would not see it."""
    formatter, text = FORMATTERS[name]
    schema = {"type": "object", "properties": {"day": {}, "key": MARK}}
    marked = gives({"day": date(2026, 2, 3), "key": "S3CR3T"}, output_schema=schema)
    async with connect({"demo.typed": gives(SHOWN), "demo.plain": marked}, output_formatter=formatter) as client:
        assert [tool.output_schema for tool in (await client.list_tools()).tools] == [None, None]
        results = [await client.call_tool(tool, {}) for tool in ("demo.typed", "demo.plain")]
    assert [success_text(result) for result in results] == [text, text]
    assert [result.structured_content for result in results] == [None, None]
    failed = [r for r in caplog.records if "output_formatter failed" in r.getMessage() and r.exc_info]
    assert len(failed) == (2 if name == "raises" else 0)


# ---- What JSON has no type for ----


class Holder(BaseModel):
    anything: Any


async def test_an_array_is_its_values() -> None:
    numbers = [*range(2000)]
    given = {"array": Array(numbers), "scalar": Array(1.5), "deep": [{"in": (Array([[1], [2]]),)}], 1: Array([1])}
    expected = {"array": numbers, "scalar": 1.5, "deep": [{"in": [[[1], [2]]]}], "1": [1]}
    assert as_json({**given, "model": Holder(anything=Array([3]))}) == {**expected, "model": {"anything": [3]}}
    modules = {"an.array": gives(given), "an.array_in_chunks": StreamingModule([{"array": Array([1])}])}
    note, told = noting()
    async with connect(modules) as client:
        assert (await client.call_tool("an.array", {})).structured_content == expected
        streamed = await client.call_tool("an.array_in_chunks", {}, progress_callback=note)
    assert parsed(success_text(streamed)) == {"array": [1]}
    assert [message for _, _, message in told] == ['{"array":[1]}']
    assert json.loads(await run_openai_call(registry_of(modules), "an-array", {})) == expected


# ---- What says less in a text than it is ----


def made(kind: str, **attributes: Any) -> Any:
    """An object of a class of this name, with these methods."""
    return type(kind, (), attributes)()


# As of pandas and polars: a Series, with an index beside its values, a frame, whose text shows ten rows, a query that
# has not run, and NA. A `__repr__` is for programmers, and may quote what a model in it marks.
OBJECTS = [
    made("Series", index=(), __len__=lambda _: 2, __iter__=lambda _: iter([8, 1]), tolist=lambda _: [8, 1]),
    made("Frame", __len__=lambda _: 1000, __str__=lambda _: "north  8\n..."),
    made("Lazy", collect=lambda _: [], __str__=lambda _: "select *"),
    made("Missing", __str__=lambda _: "<NA>"),
    made("Shown", __repr__=lambda _: "Shown(pin=1234)"),
    made("Callable", __call__=lambda _: 1, __str__=lambda _: "a call"),
    echo,
    Holder,
]


@pytest.mark.parametrize("hint", [dict[str, int], dict, list[float], Any], ids=str)
def test_an_object_is_an_error_that_names_it(hint: Any) -> None:
    """Never its values without their index, nor a text that is cut."""
    for value in OBJECTS:
        for held in [value, *([{"deep": [value]}] if hint in (Any, dict) else [])]:
            assert type(value).__qualname__ in refused(hint, held).message


class Moment(Array):
    """As a datetime64 or timedelta64 of NumPy's: its text, and what `tolist` makes of it, also in microseconds."""

    def __init__(self, dtype: str, text: str, values: Any, exact: Any = None) -> None:
        super().__init__(values)
        self.dtype: Any = SimpleNamespace(kind={"d": "M", "t": "m"}[dtype[0]], name=dtype)
        self.text = text
        self.exact = exact

    def astype(self, dtype: str) -> Moment:
        return Moment(dtype, self.text, self.exact or datetime(2026, 2, 3))

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
def test_a_moment_of_numpys_is_its_iso_text(hint: Any) -> None:
    """Never a number, and nothing of it is cut."""
    given = [moment for moment, _ in MOMENTS]
    texts = [text for _, text in MOMENTS]
    for value, written in ((Moments(given), texts), (given, texts), ([Record()], [["P3M"]])):
        assert sent(returning(hint, None), value) == {"result": written}


class MissingDate(datetime):
    """As pandas' NaT."""

    nanosecond = math.nan

    def isoformat(self, *_: Any) -> str:
        return "NaT"

    def __ne__(self, other: object) -> bool:
        return True

    def __str__(self) -> str:
        return "NaT"


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


def test_a_model_is_sent_as_pydantic_writes_it() -> None:
    """By its aliases, with what it computes and without what it excludes. What is no such model is refused."""
    module = gives(None, output_schema=Bill)
    for given in (BILL, {"billNumber": 1, "lines": [{"lineDay": date(2026, 1, 2)}]}):
        assert sent(module, given) == {"No": 1, "lines": [{"dayOfLine": "02.01.2026"}], "double": 2}
    for wrong in ({"billNumber": "1"}, {"billNumber": 1, "other": 1}, {"lines": []}):
        with pytest.raises(RefusedOutput):
            sent(module, wrong)


async def test_another_module_is_given_a_dict() -> None:
    async def passing_on(inputs: Any, context: Any) -> Any:
        output = await context.executor.call_async("a.size", {}, context)
        return {"type": type(output).__name__, **output}

    modules = {"a.size": gives(Size(width=1, made=MADE), output_schema=Size), "a.caller": passing_on}
    async with connect(modules) as client:
        called = (await client.call_tool("a.caller", {})).structured_content
    assert called == {"type": "dict", "width": 1, "made": "2026-01-01"}


Money = Annotated[Decimal, PlainSerializer(lambda amount: f"{amount:.2f} EUR", return_type=str)]
Price = Annotated[Decimal, PlainSerializer(float, return_type=float, when_used="json")]
Digest = Annotated[bytes, PlainSerializer(bytes.hex, return_type=str, when_used="json")]
Day = Annotated[date, PlainSerializer(lambda day: f"{day:%d.%m.}", return_type=str, when_used="json")]


@dataclass
class Item:
    price: Money


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


class Student(BaseModel):
    courses: set[str]
    iban: str = "DE02"
    home: dict[str, str] = {"town": "Rome", "street": "Via Appia 1"}
    more: Any = None

    @field_serializer("courses", when_used="json")
    def in_order(self, courses: set[str]) -> list[str]:
        return sorted(courses)

    @field_serializer("iban", when_used="json")
    def hidden(self, iban: str) -> Any:
        return None

    @field_serializer("home", when_used="json")
    def in_short(self, home: dict[str, str]) -> Any:
        return {"in": home["town"], "at": "home"}


class Hexed(BaseModel):
    model_config = ConfigDict(ser_json_bytes="hex", ser_json_timedelta="float")
    digest: bytes
    breaks: set[timedelta] = {timedelta(hours=1)}
    by_break: dict[timedelta, int] = {timedelta(hours=1): 2}


class Setting(BaseModel):
    name: str
    price: Any


class Paid(BaseModel):
    price: Decimal


class Brief(BaseModel):
    name: str = "tea"
    price: int | None = None

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return super().model_dump(**{**options, "exclude_none": True})


@pydantic_dataclass
class Wine:
    name: str
    cost: int = Field(2, exclude=True)
    year: int = Field(2000, serialization_alias="vintage")


class Coded(BaseModel):
    code: Base64Bytes
    more: Any = None


class CodedAt(BaseModel):
    code: Base64Bytes
    at: date


class Sid(RootModel[str], frozen=True): ...


class Right(enum.IntFlag):
    READ = 1
    WRITE = 2


class Days(RootModel[list[date]]): ...


class DaysByName(RootModel[dict[str, date]]): ...


class Averaged(BaseModel):
    numbers: list[float]

    @computed_field
    def mean(self) -> float:
        return NAN


COURSES = {f"c{number}" for number in range(9)}
STUDENT = {"courses": sorted(COURSES), "iban": None, "home": {"in": "Rome", "at": "home"}, "more": None}
ONE = Decimal("1.1")
PRICES = {"result": [{"price": "1.1"}, {"name": "a", "price": 3}]}
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
    (Coded, {"code": b"Pz5+"}, {"code": "Pz5+", "more": None}),
    (list[CodedAt], [{"code": "Pz5+", "at": "2026-02-03"}], {"result": [{"code": "Pz5+", "at": "2026-02-03"}]}),
    (Any, memoryview(b"?>~"), {"result": "Pz5+"}),
    (Days, Days([date(2026, 2, 3)]), {"result": ["2026-02-03"]}),
    (DaysByName, DaysByName({"a": date(2026, 2, 3)}), {"a": "2026-02-03"}),
    (Right, Right.READ | Right.WRITE, {"result": 3}),
    (Iterable[Any], [ONE, {"a": 1}], {"result": ["1.1", {"a": 1}]}),
    (dict[Sid, int], {Sid("a"): 1}, {"a": 1}),
    (Shortened, Shortened(top=[3, 2, 1]), {"top": [3, 2], "more": None}),
    (list[dict[str, Any]], [{"n": 1, "at": date(2026, 2, 3)}], {"result": [{"n": 1, "at": "2026-02-03"}]}),
    (Student, Student(courses=COURSES), STUDENT),
    (Any, [Student(courses=COURSES)], {"result": [STUDENT]}),
    (Student, Student(courses={"a"}, more={b"?>~"}), {**STUDENT, "courses": ["a"], "more": ["Pz5+"]}),
    (dict, {"a": Wine("Nero")}, {"a": {"name": "Nero", "vintage": 2000}}),
    (Any, [{b"?>~"}, {date(2026, 2, 3)}], {"result": [["Pz5+"], ["2026-02-03"]]}),
    (dict, {"a": Brief()}, {"a": {"name": "tea"}}),
    (tuple[Digest, Any], (b"ab", None), {"result": ["6162", None]}),
    (Hexed, Hexed(digest=b"ab"), {"digest": "6162", "breaks": [3600.0], "by_break": {"3600": 2}}),
    (dict[Day, Any], {date(2026, 2, 3): {date(2026, 2, 3)}}, {"03.02.": ["2026-02-03"]}),
    (dict[str, set[Day] | bytes], {"a": {date(2026, 2, 3)}}, {"a": ["03.02."]}),
    (list[Paid | Setting], [Paid(price=ONE), Setting(name="a", price=3)], PRICES),
    (list[Paid | dict[str, Any]], [Paid(price=ONE), {"name": "a", "price": 3}], PRICES),
    (dict[date, int | Decimal], {date(2026, 2, 3): 3}, {"2026-02-03": 3}),
    (dict[Any, int], {("a", Thing()): 2, NAN: 3}, {"a,a thing": 2, "nan": 3}),
    (Iterable[Money], [ONE], {"result": ["1.10 EUR"]}),
]
"""A hint, what a function returns by it, and what is sent."""

PAIR = {7: "the cat", "7": "the dog"}


UNSAID: list[tuple[Any, Any, str]] = [
    (Averaged, Averaged(numbers=[]), "nan at mean"),
    (Any, [Averaged(numbers=[])], "nan at 0.mean"),
    (dict, {"a": Averaged(numbers=[])}, "nan at a.mean"),
    (PricedAndMore, PricedAndMore(price=ONE, more=deque([NAN])), "nan at more.0"),
    (MeanAndMore, MeanAndMore(mean=1, more={"a": Array([1, NAN])}), "nan at more.a.1"),
    (PricedAndMore, PricedAndMore(price=ONE, more=PAIR), "two keys are '7' at more"),
    (dict[int | str, str], PAIR, "two keys are '7' at the root"),
    (dict[str, dict[Any, str]], {"first": PAIR}, "two keys are '7' at first"),
    (list[dict[Any, Any]], [PAIR], "two keys are '7' at 0"),
    (dict[str | None, int], {None: 3, "None": 1}, "two keys are 'None' at the root"),
    (Any, PAIR, "two keys are '7' at result"),
    (dict[date, int], {date(2026, 2, 3): 1, "2026-02-03": 2}, "two keys are '2026-02-03' at the root"),
    (Any, [MissingDate(2026, 2, 3)], "NaT at 0"),
]
"""Pydantic would write null for NaN, and one of two keys."""


@pytest.mark.parametrize(("hint", "value", "told"), UNSAID, ids=[told for _, _, told in UNSAID])
def test_what_json_cannot_say_is_found_in_models(hint: Any, value: Any, told: str) -> None:
    error = refused(hint, value)
    assert (error.code, error.message) == ("OUTPUT_SERIALIZATION_ERROR", f"output is not JSON: {told}")


def test_a_generator_is_not_used_up() -> None:
    """It may have no end, and all other calls would wait for it."""
    numbers = (number for number in range(3))
    for hint, value in ((PricedAndMore, PricedAndMore(price=ONE, more=numbers)), (Any, numbers)):
        assert "what a builtins.generator is in JSON" in refused(hint, value).message
    for module in (gives(None), gives(None, output_schema={"type": "object"})):
        with pytest.raises(ModuleError):
            sent(module, {"n": numbers})
    assert [*numbers] == [0, 1, 2]


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
        self.degrees += 270
        return self

    def model_post_init(self, context: Any) -> None:
        self.degrees += 3


class Kitchen(BaseModel):
    oven: Oven
    when: date = date(2026, 2, 3)


class Shelf(BaseModel):
    metadata: Oven  # a name that core schemas have for something else


class Sheet(BaseModel):
    at: date
    picture: bytes


class Stay(TypedDict):
    nights: Annotated[int, Field(ge=1)]


class Names(RootModel[list[str]]):
    @model_validator(mode="after")
    def in_capitals(self) -> Any:
        self.root = [name.upper() for name in self.root]
        return self


class Taxed(BaseModel):
    due: date
    amount: float

    @computed_field
    def tax(self) -> float:
        return self.amount / 5


class Bills(RootModel[list[Taxed]]): ...


@dataclass
class Trip:
    day: date
    price: Decimal = Decimal(0)
    stops: list[str] = field(default_factory=list)
    kind: Literal["bus", "train"] = "bus"
    stay: Stay | None = None
    seats: Annotated[int, Field(ge=1)] = 1
    share: Annotated[float, Field(le=1)] = 0.5
    legs: tuple[int, str] = (1, "a")


def trip(**changed: Any) -> Trip:
    """One whose fields were changed after it was made."""
    made = Trip(date(2026, 2, 3))
    vars(made).update(changed)
    return made


FLOUR, OVEN = Flour(2500), Oven(degrees=200, tag="a")
HOT = {"degrees": 473.0, "tag": "a"}
DAY = "2026-02-03"
TRIP = {"day": DAY, "price": "0", "stops": [], "kind": "bus", "stay": None, "seats": 1, "share": 0.5}
TRIP["legs"] = [1, "a"]
RETURNED: list[tuple[Any, Any, Any]] = [
    *WRITTEN,
    (Flour, FLOUR, {"result": {"grams": 2.5}}),
    (list[Flour], [FLOUR], {"result": [{"grams": 2.5}]}),
    (list[Flour], (FLOUR,), {"result": [{"grams": 2.5}]}),
    (list[Flour], [{"grams": 2500.0}], {"result": [{"grams": 2.5}]}),
    (Flour | None, FLOUR, {"result": {"grams": 2.5}}),
    (list[Oven], [OVEN], {"result": [HOT]}),
    (list[Oven], [{"degrees": 200.0, "tag": "a"}], {"result": [HOT]}),
    (Annotated[Oven, AfterValidator(lambda oven: pytest.fail("checked again"))], OVEN, {"result": HOT}),
    (dict[str, list[Kitchen]], {"a": [{"oven": OVEN}]}, {"a": [{"oven": HOT, "when": DAY}]}),
    (list[Kitchen], [{"oven": OVEN, "when": DAY}], {"result": [{"oven": HOT, "when": DAY}]}),
    (tuple[Oven, Annotated[Thing, PlainValidator(lambda value: value)]], (OVEN, Thing()), {"result": [HOT, "a thing"]}),
    (list[Shelf], [{"metadata": OVEN}], {"result": [{"metadata": HOT}]}),
    (Trip, trip(day=DAY), {"result": TRIP}),
    (Trip, trip(price=3), {"result": {**TRIP, "price": "3"}}),
    (Trip, trip(stops=("Rome",)), {"result": {**TRIP, "stops": ["Rome"]}}),
    (Names, ["ann"], {"result": ["ANN"]}),
    (Bills, [{"due": DAY, "amount": 10}], {"result": [{"due": DAY, "amount": 10.0, "tax": 2.0}]}),
    (dict[str, list[Sheet]], {"a": [Sheet(at=date(2026, 2, 3), picture=b"\xff\xfe")]},
     {"a": [{"at": DAY, "picture": "//4="}]}),
    (dict[str, Thing], {"by": Thing()}, {"by": "a thing"}),  # which pydantic cannot describe
]  # fmt: skip
"""A hint, what is returned by it, and what is sent, however often."""


class Made(BaseModel):
    by: Annotated[Thing, PlainValidator(lambda value: value)]


@pytest.mark.parametrize(("hint", "value", "written"), RETURNED)
def test_an_instance_is_sent_as_it_is(hint: Any, value: Any, written: Any) -> None:
    """By the serializers of its hint; and it is not made anew."""
    for _ in range(2):
        assert by_hint(hint, value) == written


def test_a_serializer_that_gives_an_object_is_an_error() -> None:
    for given in ([object(), 1], object()):
        hint = Annotated[Any, PlainSerializer(lambda _, given=given: given, when_used="json")]
        assert "nothing says what" in refused(dict[str, hint], {"a": 1}).message  # type: ignore[valid-type]


def test_what_an_iterator_gives_is_sent_as_it_is() -> None:
    assert by_hint(list[Oven], iter([OVEN])) == {"result": [HOT]}
    for hint in (Iterable[date], Iterable[date] | None):
        assert by_hint(hint, iter([date(2026, 2, 3), DAY])) == {"result": [DAY, DAY]}


def test_an_instance_of_a_class_is_sent_as_it_is() -> None:
    for _ in range(2):
        assert sent(gives(None, output_schema=Oven), OVEN) == HOT
        assert sent(gives(None, output_schema=Kitchen), {"oven": OVEN}) == {"oven": HOT, "when": DAY}
        assert sent(gives(None, output_schema=Made), {"by": Thing()}) == {"by": "a thing"}


UNFIT: list[tuple[Any, Any, str]] = [
    (dict, "text", ""),
    (dict, [1], ""),
    (dict | None, [1], "result"),
    (int, "1", "result"),
    (int, None, "result"),  # a forgotten return
    (dict, None, ""),
    (dict[str, int], None, ""),
    (Brief, None, ""),  # though an empty dict would fit
    (dict[str, int], {"a": "x"}, "a"),
    (dict[str, int], {"a": 1.5}, "a"),
    (dict[str, Annotated[float, Field(le=1)]], {"a": 1.7}, "a"),
    (list[Annotated[int, Field(ge=1)]], [1, 0], "result.1"),
    (bytes, "plot.png", "result"),
    (list[Sheet], [{"at": "2026-02-03", "picture": "plot.png"}], "result.0.at"),
    (list[Item], [Item("dear")], ""),  # type: ignore[arg-type]
    (int, MONTHS, "result"),
    (float, MONTHS, "result"),
    (list[float], Moments([MONTHS]), "result"),
    (timedelta, MONTHS, "result"),
    (Trip, trip(seats="two"), "result.seats"),
    (list[Trip], [trip(), trip(seats=0)], "result.1.seats"),
    (Trip, trip(share=1.5), "result.share"),
    (Trip, trip(legs=(1, 2)), "result.legs.1"),
    (Trip, trip(kind="boat"), "result.kind"),
    (Trip, trip(day="tomorrow"), "result.day"),
    (Trip, trip(stops=None), "result.stops"),
    (Trip, trip(stay={}), "result.stay.nights"),
    (Trip, trip(stay={"nights": 0}), "result.stay.nights"),
    (Kitchen, Kitchen.model_construct(), "oven"),
]
"""A hint, what does not fit it, and the field that is named."""


@pytest.mark.parametrize(("hint", "value", "field"), UNFIT, ids=str)
def test_what_does_not_fit_is_refused(hint: Any, value: Any, field: str) -> None:
    """By its whole path. The client would refuse all of the answer."""
    error = refused(hint, value)
    if field:
        assert isinstance(error, RefusedOutput)
        assert field in [fault["field"] for fault in error.details["errors"]]
        assert error.message.endswith(f"(it is a {type(value).__module__}.{type(value).__qualname__})")


@pytest.mark.parametrize("schema", [{}, {"type": "array"}, Bill], ids=["any", "array", "model"])
def test_what_is_no_object_is_refused_of_a_class(schema: Any) -> None:
    for output in ([1], Array([1]), RootModel[list[int]]([1])):
        with pytest.raises(RefusedOutput, match=re.escape(type(output).__qualname__)) as caught:
            sent(gives(None, output_schema=schema), output)
        assert [fault["field"] for fault in caught.value.details["errors"]] == [""]


def test_a_none_that_breaks_the_schema_is_refused() -> None:
    needing = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    with pytest.raises(RefusedOutput, match=r"\(root\): required"):
        sent(gives(None, output_schema=needing), None)


def test_a_field_that_pydantic_does_not_know_is_told() -> None:
    @dataclass
    class Loaf:
        kind: str
        slices: int = field(init=False)

        def __post_init__(self) -> None:
            self.slices = 12

    module = returning(list[Loaf], None)
    assert sent(module, [Loaf("rye")]) == {"result": [{"kind": "rye"}]}
    assert [warning.partition(": ")[2] for warning in tool_of(module).warnings] == ["Loaf.slices"]


async def test_by_a_dict_schema_json_decides() -> None:
    """Dates, Decimals and tuples are their JSON, which hooks get as well."""
    given = {
        "at": datetime(2026, 2, 3, 4, 5), "id": UUID(int=1), "price": Decimal("1.5"), "color": Color.RED,
    }  # fmt: skip
    written = {"at": "2026-02-03T04:05:00", "id": str(UUID(int=1)), "price": 1.5, "pair": [1, 2], "color": "red"}
    pair = {"type": "array", "items": {"type": "integer"}}
    properties = {"at": {"type": "string"}, "price": {"type": "number"}, "pair": pair, "color": {"enum": ["red"]}}
    schema = {"type": "object", "properties": {**properties, "id": {"type": "string"}}, "additionalProperties": False}
    seen: list[Any] = []
    pairs = {"a.form": (1, 2), "a.wrong_form": ("a",)}
    modules = {name: gives({**given, "pair": each}, output_schema=schema) for name, each in pairs.items()}
    executor = Executor(registry_of(modules))
    executor.use_after(lambda module_id, inputs, output, context: seen.append(output))
    async with connect(executor) as client:
        assert (await client.call_tool("a.form", {})).structured_content == written
        report = failure(await client.call_tool("a.wrong_form", {}))
    assert seen == [written]
    assert lines_of(report, OUTPUT) == [("pair.0", "Value is not valid", "type")]


# ---- The size of a result ----


async def test_a_result_too_large_is_an_error() -> None:
    """Text, structured content and files count together."""
    large = {"text": "x" * 600}
    modules = {
        "a.text": gives(large, output_schema={}),
        "a.structured": gives(large),
        "a.file": drawing("AAAA" * 150, PNG),
        "a.stream": StreamingModule([{"a": "x" * 300}, {"b": "x" * 300}], output_schema={}),
        "a.chunk": StreamingModule([{"a": "x" * 600}], output_schema={}),
    }
    sizes = {"a.chunk": 608, "a.text": 611, "a.structured": 1222, "a.file": 656, "a.stream": 615}
    for limit in (500, 1300, 0):
        async with connect(modules, max_result=limit) as client:
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
