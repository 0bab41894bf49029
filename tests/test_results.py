"""What a module's answer becomes: JSON text, structured content, files (FR-EXEC-002, FR-SCHEMA-005). Real registry,
Executor, server and client.
"""

from __future__ import annotations

import base64
import enum
import json
from collections.abc import Callable
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from apcore import Executor, Middleware
from conftest import FunctionalModule, connect, echo, registry_of
from jsonschema import Draft202012Validator
from pydantic import AliasPath, BaseModel, ConfigDict, Field, RootModel, computed_field, field_serializer
from support import (
    REDACTED,
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

from apcore_mcp import run_openai_call

AWKWARD = bytes(range(248, 256))  # in base64 its text differs between the alphabet of URLs and the standard one


def base64_of(media_type: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "contentEncoding": "base64", "contentMediaType": media_type, **more}


def drawing(output: Any, properties: dict[str, Any], **schema: Any) -> FunctionalModule:
    return gives(output, output_schema={"type": "object", "properties": properties, **schema})


async def test_an_image_of_a_pydantic_model_arrives_as_image_content(mode: str) -> None:
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


async def test_the_media_type_decides_on_the_kind_of_content() -> None:
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
async def test_a_file_of_text_is_sent_as_text_where_it_is_utf_8(data: bytes, text: str | None) -> None:
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
    "not_base64": (OPTIONAL, {"n": 1, "file": "data:image/png;base64,AAAA"}, "Failed to serialize module output", 0),
}  # fmt: skip
"""An output schema, an output, the text, and how many files come of it."""


async def test_a_file_is_sent_where_there_is_one_and_what_is_none_is_an_error() -> None:
    modules = {
        f"t.{name}": gives(output, output_schema={"type": "object", **schema})
        for name, (schema, output, _, _) in FILES.items()
    }
    async with connect(modules) as client:
        for name, (_, _, text, images) in FILES.items():
            result = await client.call_tool(f"t.{name}", {})
            assert [part.type for part in result.content] == ["text", *["image"] * images], name
            assert (result.content[0].text, result.is_error) == (text, name == "not_base64")


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


async def test_a_streaming_module_sends_its_file_with_the_result_and_not_with_progress() -> None:
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
async def test_values_arrive_as_json_that_can_be_read_back() -> None:
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
    assert [success_text(typed), success_text(plain)] == ["{}", "{}"]
    assert (typed.structured_content, plain.structured_content) == ({}, None)


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
    Draft202012Validator(tool.output_schema).validate(result.structured_content)
    assert "date-time" not in json.dumps(tool.output_schema), "a time without a zone is none to JSON Schema"
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
    assert result.is_error
    assert [part.text for part in result.content] == ["Output validation failed (the tool has run)"]


CYCLE: dict[str, Any] = {}
CYCLE["deep"] = [{"again": CYCLE}]
UNSAYABLE = {"nan": {"value": [{"deep": float("nan")}]}, "cycle": CYCLE, "surrogate": {"value": "a\ud800b"}}


@pytest.mark.requirement("FR-EXEC-002")
async def test_what_json_cannot_say_is_an_error_and_the_server_lives_on() -> None:
    modules: dict[str, Any] = {"says.fine": echo}
    for name, output in UNSAYABLE.items():
        modules |= {f"typed.{name}": gives(output), f"plain.{name}": gives(output, output_schema={})}
    async with connect(modules) as client:
        for name in list(modules)[1:]:
            result = await client.call_tool(name, {})
            assert [part.model_dump()["text"] for part in result.content] == ["Failed to serialize module output"], name
            assert (result.is_error, result.structured_content) == (True, None)
        assert parsed(success_text(await client.call_tool("says.fine", {"a": 1}))) == {"a": 1}


# ---- output_formatter ----


async def test_a_decimal_is_a_number_exactly_where_the_schema_wants_a_number() -> None:
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
        assert json.loads(success_text(result)) == {"price": 1.5, "note": "2.5", "exact": "3.50"}
        assert result.structured_content == {"price": 1.5, "note": "2.5", "exact": "3.50"}
        result = await client.call_tool("an.offer_of_dicts", {})
        assert result.structured_content == {"price": 1.5, "prices": [2.0, 3], "note": "4.0"}


async def test_a_default_that_looks_like_a_setting_of_pydantic_costs_nothing_of_the_promise() -> None:
    class Options(BaseModel):
        opts: dict[str, str] = {"alias": "x", "type": "json"}
        count: int

    async with connect({"t.options": gives({"count": 1}, output_schema=Options)}) as client:
        (tool,) = (await client.list_tools()).tools
        assert tool.output_schema is not None
        assert {*tool.output_schema["properties"]} == {"opts", "count"}


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


# ---- What JSON has no type for ----


class Array:
    """As NumPy's arrays and scalars."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def tolist(self) -> Any:
        return self.values

    def __str__(self) -> str:
        return "[0 1 ... 9]"


class Holder(BaseModel):
    anything: Any


class Nameless:
    pass


async def test_an_array_is_its_values_wherever_it_stands() -> None:
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


@pytest.mark.parametrize("make", [Nameless, lambda: iter(n for n in [1]), lambda: echo], ids=["object", "made", "code"])
async def test_an_object_whose_text_is_its_address_is_an_error_that_names_its_type_in_the_log(
    make: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    for module in (gives({"value": make()}), gives({"value": make()}, output_schema={})):
        async with connect({"an.address": module}) as client:
            failure(await client.call_tool("an.address", {}), "Failed to serialize module output")
        assert type(make()).__name__ in errors_logged(caplog)[-1].getMessage()


# ---- The form of an output ----


class Line(BaseModel):
    day: date = Field(validation_alias="lineDay", serialization_alias="dayOfLine")


class Bill(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int = Field(alias="billNumber", serialization_alias="No")
    lines: list[Line] = []

    @computed_field
    def double(self) -> int:
        return 2 * self.number


BILL = Bill(billNumber=1, lines=[Line(lineDay=date(2026, 1, 1))])


async def test_a_model_may_be_returned_and_dumped_by_any_of_its_names() -> None:
    by_name, by_alias = BILL.model_dump(mode="json"), BILL.model_dump(mode="json", by_alias=True)
    modules = {
        "a.model": (gives(BILL, output_schema=Bill), by_name),
        "a.dump": (gives(BILL.model_dump(), output_schema=Bill), by_name),
        "a.dump_by_alias": (gives(BILL.model_dump(by_alias=True), output_schema=Bill), by_alias),
        "a.dump_as_json": (gives(by_name, output_schema=Bill), by_name),
        "a.dump_as_json_by_alias": (gives(by_alias, output_schema=Bill), by_alias),
    }

    async def passing_on(inputs: Any, context: Any) -> Any:
        output = await context.executor.call_async("a.model", {}, context)
        assert type(output) is dict
        return output

    modules["a.caller"] = (FunctionalModule(passing_on), by_name)
    wrong = {"a.text": {"billNumber": "1"}, "a.surplus": {"billNumber": 1, "other": 1}, "an.absence": {"lines": []}}
    refused = {name: gives(output, output_schema=Bill) for name, output in wrong.items()}
    async with connect({name: module for name, (module, _) in modules.items()} | refused) as client:
        for name, (_, expected) in modules.items():
            assert parsed(success_text(await client.call_tool(name, {}))) == expected, name
        for name in wrong:
            report = failure(await client.call_tool(name, {}))
            assert report["error_message"].startswith("Output validation failed (the tool has run):"), name


class Visit(BaseModel):
    day: date
    reason: str = Field(exclude=True)
    number: int = Field(alias="lines")  # in another model, this is the name of a field

    @field_serializer("day")
    def shown(self, day: date) -> str:
        return f"{day:%d.%m.%Y}"


class Journal(BaseModel):
    model_config = ConfigDict(extra="forbid")
    visit: Visit
    lines: dict[str, int] = {}
    place: str = Field("", validation_alias=AliasPath("at", "place"))

    @computed_field
    def double(self) -> int:
        return 2


JOURNAL = Journal(visit=Visit(day=date(2026, 1, 2), reason="pain", lines=1), lines={"double": 1}, at={"place": "here"})


async def test_excluded_computed_and_serialized_fields_are_no_reason_to_refuse_a_dump_and_anything_else_is() -> None:
    dumps = [JOURNAL, JOURNAL.model_dump(), JOURNAL.model_dump(mode="json"), JOURNAL.model_dump(by_alias=True)]
    right = {f"right.number_{number}": gives(dump, output_schema=Journal) for number, dump in enumerate(dumps)}
    dump = JOURNAL.model_dump()
    outputs = {
        "wrong.as_a_key_is_computed": {**dump, "lines": {"double": "text"}},
        "wrong.as_a_field_is_missing": {**dump, "visit": {"day": "2.1.2026"}},
        "wrong.as_another_has_that_name": {**dump, "lines": 1},
        "wrong.as_a_field_is_unknown": {**dump, "other": 1},
        "wrong.as_built": Journal.model_construct(visit=JOURNAL.visit, lines={"a": "text"}),
    }
    wrong = {name: gives(output, output_schema=Journal) for name, output in outputs.items()}
    async with connect(right | wrong) as client:
        for name in right:
            assert "02.01.2026" in success_text(await client.call_tool(name, {})), name
        for name in wrong:
            report = failure(await client.call_tool(name, {}))
            assert report["error_message"].startswith("Output validation failed (the tool has run):"), name


async def test_with_a_dict_schema_dates_decimals_and_tuples_are_their_json_and_hooks_get_what_was_given() -> None:
    given = {
        "at": datetime(2026, 2, 3, 4, 5), "day": date(2026, 2, 3), "id": UUID(int=1), "price": Decimal("1.5"),
        "pair": (1, 2), "color": Color.RED,
    }  # fmt: skip
    text = {"type": "string"}
    texts = {"at": text, "day": text, "id": text}
    pair = {"type": "array", "items": {"type": "integer"}}
    properties = {**texts, "price": {"type": "number"}, "pair": pair, "color": {"enum": ["red"]}}
    schema = {"type": "object", "properties": properties, "required": [*given], "additionalProperties": False}
    seen: list[Any] = []

    class Watching(Middleware):
        def after(self, module_id: str, inputs: Any, output: Any, context: Any) -> Any:
            seen.append(output)

    modules = {"a.form": gives(given, output_schema=schema), "a.wrong_form": gives({**given, "pair": ("a",)},
                                                                                   output_schema=schema)}  # fmt: skip
    executor = Executor(registry_of(modules))
    executor.use(Watching())
    async with connect(executor) as client:
        result = await client.call_tool("a.form", {})
        assert result.structured_content is not None
        assert {**result.structured_content, "at": ""} == {
            "at": "", "day": "2026-02-03", "id": str(UUID(int=1)), "price": 1.5, "pair": [1, 2], "color": "red"
        }  # fmt: skip
        report = failure(await client.call_tool("a.wrong_form", {}))
    assert seen == [given]
    assert lines_of(report, "Output validation failed (the tool has run):") == [
        ("pair.0", "Value is not valid", "type")
    ]


@pytest.mark.parametrize("schema", [{}, {"type": "array"}, Bill], ids=["any", "array", "model"])
async def test_a_bare_list_is_refused_and_the_log_says_what_a_module_returns(
    schema: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for output in ([1], Array([1]), RootModel[list[int]]([1])):
        async with connect({"a.list": gives(output, output_schema=schema)}) as client:
            report = failure(await client.call_tool("a.list", {}))
        title = "Output validation failed (the tool has run):"
        assert lines_of(report, title) == [("(root)", "Value is not valid", "type")]
        assert "a module returns a dict or a model, not a" in errors_logged(caplog)[-1].getMessage()


# ---- The size of a result ----


async def test_a_result_that_is_too_large_is_an_error_with_both_sizes_at_every_door(mode: str) -> None:
    """Text, structured content and files count together."""
    large = {"text": "x" * 600}
    modules = {
        "a.text": gives(large, output_schema={}),
        "a.structured": gives(large),
        "a.file": drawing({"file": "AAAA" * 150}, {"file": base64_of("image/png")}),
        "a.stream": StreamingModule([{"a": "x" * 300}, {"b": "x" * 300}], output_schema={}),
        "a.chunk": StreamingModule([{"a": "x" * 600}], output_schema={}),
    }
    sizes = {"a.chunk": 608, "a.text": 615, "a.structured": 1226, "a.file": 602, "a.stream": 623}
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
    assert "615 bytes" in await run_openai_call(registry_of(modules), "a-text", {}, max_result=500)
    assert len(await run_openai_call(registry_of(modules), "a-text", {})) == 611
