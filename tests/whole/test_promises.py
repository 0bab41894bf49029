"""What is promised of results holds of what is sent, for a zoo of types and for generated models."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import enum
import json
import pathlib
import uuid
from collections.abc import Iterator
from typing import Annotated, Any, NamedTuple, NotRequired

import pytest
from apcore import Executor
from conftest import MODERN, connect, registry_of
from generated import QUICK, Value, models
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import (
    AliasChoices,
    AnyUrl,
    BaseModel,
    ConfigDict,
    Field,
    Json,
    PlainSerializer,
    PlainValidator,
    SecretStr,
    WrapSerializer,
    computed_field,
    create_model,
    field_serializer,
)
from pydantic.alias_generators import to_camel
from pydantic_core import ValidationError
from support import INTEGER, STRING, gives, returning, text_of
from typing_extensions import TypedDict

from apcore_mcp.promises import validator_of

D = decimal.Decimal


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class Line(Camel):
    id: int
    unit_price: D

    @computed_field  # type: ignore[prop-decorator]
    @property
    def line_total(self) -> D:
        return self.unit_price * 2


class Order(Camel):
    order_id: int
    line_items: list[Line]


class Hiding(BaseModel):
    shown: int = 1
    hidden: int = Field(exclude=True)


def spelled(value: int) -> Any:
    return {"spelled": value}


class Serialized(BaseModel):
    field: int
    typed: Annotated[int, PlainSerializer(lambda value: f"t{value}", return_type=str)]
    in_json: Annotated[int, PlainSerializer(lambda value: f"j{value}", when_used="json")]
    untyped: Annotated[int, PlainSerializer(lambda value: {"u": value})]
    said_to_be_anything: Annotated[int, PlainSerializer(spelled)]
    wrapped: Annotated[int, WrapSerializer(lambda value, handler: [handler(value)])]

    @field_serializer("field")
    def _field(self, value: int):  # type: ignore[no-untyped-def]
        return f"n{value}"


class Parsed(BaseModel):
    numbers: Json[list[int]]


class Aliased(BaseModel):
    given: int = Field(validation_alias="taken")
    sent: int = Field(serialization_alias="sentAs")
    chosen: int = Field(validation_alias=AliasChoices("first", "second"))


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    a: int


class ClosedAndComputed(Closed):
    @computed_field  # type: ignore[prop-decorator]
    @property
    def b(self) -> int:
        return 1


class Encoded(BaseModel):
    raw: bytes = Field(max_length=33)
    secret: SecretStr = Field(min_length=12)


class InSeconds(BaseModel):
    model_config = ConfigDict(ser_json_timedelta="float")
    spent: datetime.timedelta


class Numbers(BaseModel):
    total: float
    bounded: Annotated[float, Field(ge=0, le=10)]
    price: Annotated[D, Field(max_digits=5, decimal_places=2, ge=0)]


class Unset(BaseModel):
    size: int = None  # type: ignore[assignment]


class Colour(enum.Enum):
    TEXT = "a"
    NUMBER = 2
    DAY = datetime.date(2020, 1, 1)


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Pair(NamedTuple):
    left: int
    right: str = "r"


ZOO: dict[str, tuple[Any, Any]] = {
    "camel": (Order, Order(order_id=1, line_items=[Line(unit_price=D("1.5"), id=1)])),
    "excluded": (Hiding, Hiding(hidden=2)),
    "serializers": (Serialized, Serialized(field=1, typed=2, in_json=3, untyped=4, said_to_be_anything=5, wrapped=6)),
    "aliases": (Aliased, Aliased(taken=1, sent=2, first=3)),  # type: ignore[call-arg]
    "closed": (Closed, Closed(a=1)),
    "maybe-computed": (ClosedAndComputed | None, ClosedAndComputed(a=1)),
    "encoded": (Encoded, Encoded(raw=b"a" * 32, secret=SecretStr("x" * 20))),
    "numbers": (Numbers, Numbers(total=1, bounded=2, price=D("1.1"))),
    "default-of-another-type": (Unset, Unset()),
    "typed-dict": (Movie, {"title": "t"}),
    "named-tuple": (Pair, Pair(1)),
    "enum-of-anything": (Colour, Colour.DAY),
    "bytes": (bytes, b"\xff"),
    "timedelta": (datetime.timedelta, datetime.timedelta(1)),
    "decimal-as-float": (float, D("1.5")),
    "numbered": (dict[int, str], {1: "a"}),
    "secret": (SecretStr, SecretStr("a")),
    "made-by-a-function": (Annotated[int, PlainValidator(int)], 1),
    "pydantic's-own-pattern": (Annotated[str, Field(pattern=r"^\p{L}+$")], "é"),
    "pydantic's-own-pattern-of-names": (dict[Annotated[str, Field(pattern=r"^\p{L}+$")], int], {"é": 1}),
}
"""A return type, and a value of it."""


def inhabitants() -> Iterator[tuple[str, Any]]:
    """Modules that give each value in all the ways in which one can."""
    for name, (kind, value) in ZOO.items():
        yield f"{name}, returned", returning(kind, value)
        holder = create_model("Holder", held=(kind, ...), again=(list[kind] | None, None))
        yield f"{name}, held", gives({"held": value, "again": [value]}, output_schema=holder)
        if isinstance(value, BaseModel):
            yield f"{name}, dumped", gives(value.model_dump(), output_schema=kind)
            yield f"{name}, dumped by alias", gives(value.model_dump(by_alias=True), output_schema=kind)


async def held_against_their_promises(modules: dict[str, Any]) -> dict[str, str]:
    """Run every module by the Executor and through a server; which of those that the Executor runs fail, and how."""
    ids = {f"zoo.m{number}": name for number, name in enumerate(modules)}
    executor = Executor(registry_of({module_id: modules[name] for module_id, name in ids.items()}))
    failed = {}
    async with connect(executor, mode=MODERN) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        for module_id, name in ids.items():
            try:
                await executor.call_async(module_id, {})
            except Exception:  # the Executor itself does not run it
                continue
            result = await client.call_tool(module_id, {})  # which refuses what breaks the advertised schema
            if result.is_error:
                failed[name] = text_of(result)
                continue
            promise = tools[module_id].output_schema
            if promise is None:  # what is marked is hidden, and so not promised
                assert (result.structured_content, "secret" in name or "encoded" in name) == (None, True), name
                continue
            Draft202012Validator(promise).validate(result.structured_content)
            assert result.structured_content == json.loads(text_of(result))
    return failed


@pytest.mark.timeout(240)
async def test_no_result_breaks_its_promise() -> None:
    assert await held_against_their_promises(dict(inhabitants())) == {}


HELD: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({}, ["null", '{"a": [1]}'], []),
    ({"type": "integer", "minimum": 1, "exclusiveMaximum": 3}, ["1", "2"], ["0", "3", "1.5", '"1"', "true"]),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 3}, ["1.5", "3"], ["1", "3.1", '"2"', "NaN"]),
    ({"type": ["string", "null"]}, ['"a"', "null"], ["1"]),
    ({"type": "boolean"}, ["true"], ["1"]),
    ({"type": "string", "format": "date"}, ['"2026-02-03"'], ['"soon"', "1"]),
    ({"type": "string", "format": "date-time"}, ['"2026-02-03T10:00:00Z"'], ['"soon"']),
    ({"type": "string", "format": "time"}, ['"10:00:00"'], ['"soon"']),
    ({"type": "string", "format": "duration"}, ['"PT1S"'], ['"soon"']),
    ({"type": "string", "format": "uuid"}, [f'"{uuid.UUID(int=1)}"'], ['"soon"']),
    ({"type": "string", "format": "none-of-these"}, ['"soon"'], ["1"]),
    ({"enum": ["a", 2]}, ['"a"', "2"], ['"b"', "3"]),
    ({"const": "a"}, ['"a"'], ['"b"']),
    ({"anyOf": [INTEGER, {"type": "null"}]}, ["1", "null"], ['"a"', "1.5"]),
    ({"type": "array", "items": INTEGER, "minItems": 1, "maxItems": 2}, ["[1]", "[1, 2]"],
     ["[]", "[1, 2, 3]", '["a"]', "{}"]),
    ({"type": "array", "prefixItems": [INTEGER], "items": STRING}, ["[1]", '[1, "a", "b"]'],
     ['["a"]', "[1, 2]"]),
    ({"type": "object", "properties": {"a": INTEGER, "b": {}}, "required": ["a"]},
     ['{"a": 1}', '{"a": 1, "c": "d"}'], ['{"a": "x"}', '{"b": 1}', "[]"]),
    ({"type": "object", "additionalProperties": INTEGER}, ["{}", '{"a": 1}'], ['{"a": "x"}']),
]  # fmt: skip
"""A promise, texts that keep it, and texts that do not."""


@pytest.mark.parametrize(("promise", "kept", "broken"), HELD, ids=str)
def test_a_text_is_held_against_its_promise(promise: dict[str, Any], kept: list[str], broken: list[str]) -> None:
    validator = validator_of(promise)
    for text in kept:
        validator.validate_json(text, strict=True)
    for text in broken:
        with pytest.raises(ValidationError):
            validator.validate_json(text, strict=True)


class Told(BaseModel):
    """What is ordinary, pydantic's own types and names that only look like another thing included."""

    model_config = ConfigDict(extra="forbid")
    where: pathlib.Path
    page: AnyUrl
    price: D
    alias: int = Field(default=1, description='"alias":"x"')
    serialization_exclude: list[int] = []


class Size(enum.StrEnum):
    SMALL = "s"
    LARGE = "l"


class Shirt(BaseModel):
    model_config = ConfigDict(use_enum_values=True)
    size: Size
    count: int = None  # type: ignore[assignment]


async def test_a_model_promises_its_written_form() -> None:
    """By its names and types in JSON, computed fields too; a serializer without a return type promises any value."""
    kinds = [Told, Aliased, ClosedAndComputed, Hiding, Serialized, Parsed, InSeconds, Shirt, dict[str, Aliased]]
    async with connect({f"t.m{n}": returning(kind, None) for n, kind in enumerate(kinds)}) as client:
        promises: list[Any] = [tool.output_schema for tool in (await client.list_tools()).tools]
    told, aliased, computed, hiding, serialized, parsed, seconds, shirt, by_name = promises
    assert [*told["properties"]] == ["where", "page", "price", "alias", "serialization_exclude"]
    assert told["required"] == ["where", "page", "price"]
    assert aliased["properties"] == {"given": INTEGER, "sentAs": INTEGER, "chosen": INTEGER}
    assert (computed["properties"], computed["required"]) == ({"a": INTEGER, "b": INTEGER}, ["a", "b"])
    assert [*hiding["properties"]] == ["shown"]
    untyped = dict.fromkeys(["field", "in_json", "untyped", "said_to_be_anything", "wrapped"])
    written = {name: schema or None for name, schema in serialized["properties"].items()}
    assert written == {**untyped, "typed": STRING}
    assert parsed["properties"] == {"numbers": {"items": INTEGER, "type": "array"}}
    assert seconds["properties"] == {"spent": {"type": "number"}}
    assert (shirt["properties"]["size"]["type"], shirt["properties"]["size"]["enum"]) == ("string", ["s", "l"])
    assert shirt["properties"]["count"]["type"] == ["integer", "null"]
    assert by_name["additionalProperties"] == aliased


@pytest.mark.timeout(240)
@settings(QUICK, max_examples=2)  # each of five models, and a server for them
@given(st.data())
def test_no_value_of_any_model_breaks_its_promise(data: st.DataObject) -> None:
    """Generated models, by the schemas alone: what pydantic accepts and writes, the advertised schema accepts."""
    modules: dict[str, Any] = {}
    for number in range(5):
        model, values, _ = data.draw(models(maps=True))
        value: Value = data.draw(values)
        instance = model.model_validate_json(json.dumps(value.back))
        modules[f"{number}, returned"] = returning(model, instance)
        modules[f"{number}, in a list"] = returning(list[model], [instance])
        modules[f"{number}, dumped"] = gives(instance.model_dump(exclude_unset=True), output_schema=model)
    assert asyncio.run(held_against_their_promises(modules)) == {}
