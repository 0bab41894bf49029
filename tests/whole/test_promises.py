"""What is promised of a module's results holds of what is sent, whatever pydantic or a dict schema can say: a tool
that has run does not fail for it (design, "What a module gives"; F-013). A zoo of field types and generated models, run
by the real Executor, served, and held against the advertised schemas by `jsonschema`.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import ipaddress
import json
import pathlib
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, NotRequired

import pytest
from apcore import Executor, ModuleAnnotations
from apcore.decorator import module
from conftest import MODERN, FunctionalModule, connect, registry_of
from generated import QUICK, Value, models
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from mcp_types import ElicitResult
from pydantic import (
    AliasChoices,
    AnyUrl,
    AwareDatetime,
    Base64Bytes,
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    ImportString,
    Json,
    JsonValue,
    PlainSerializer,
    PlainValidator,
    RootModel,
    SecretBytes,
    SecretStr,
    StringConstraints,
    WrapSerializer,
    computed_field,
    create_model,
    field_serializer,
    model_serializer,
)
from pydantic import dataclasses as pydantic_dataclasses
from pydantic.alias_generators import to_camel
from typing_extensions import TypedDict

from apcore_mcp import to_openai_tools

D = decimal.Decimal
REDACTED = "***REDACTED***"
MARK: Any = {"x-sensitive": True}
NEEDS_APPROVAL = ModuleAnnotations(requires_approval=True)


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


class Rewritten(BaseModel):
    x: int

    @model_serializer
    def _write(self) -> dict[str, str]:
        return {"y": str(self.x)}


class RewrittenAnyhow(BaseModel):
    x: int

    @model_serializer
    def _write(self):  # type: ignore[no-untyped-def]
        return [self.x]


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
    secret_bytes: SecretBytes = SecretBytes(b"x")
    base64: Base64Bytes = b"aGVsbG8="


class InSeconds(BaseModel):
    model_config = ConfigDict(ser_json_timedelta="float")
    spent: datetime.timedelta


class Stripped(BaseModel):
    text: Annotated[str, StringConstraints(strip_whitespace=True, max_length=3)]


class Imported(BaseModel):
    function: ImportString[Any]


class Numbers(BaseModel):
    total: float
    bounded: Annotated[float, Field(ge=0, le=10)]
    price: Annotated[D, Field(max_digits=5, decimal_places=2, ge=0)]


class Deep(BaseModel):
    by_name: dict[str, Order]
    maybe: Order | None = None
    either: Annotated[Closed | ClosedAndComputed, Field(union_mode="left_to_right")]


class Unset(BaseModel):
    size: int = None  # type: ignore[assignment]


class Permission(enum.Flag):
    READ = 1
    WRITE = 2


class Colour(enum.Enum):
    TEXT = "a"
    NUMBER = 2
    DAY = datetime.date(2020, 1, 1)


@dataclasses.dataclass
class Plain:
    x: int
    day: datetime.date


@pydantic_dataclasses.dataclass
class PlainAliased:
    x: int = Field(alias="xx")


class Movie(TypedDict):
    title: str
    year: NotRequired[int]


class Pair(NamedTuple):
    left: int
    right: str = "r"


class ByName(RootModel[dict[str, int]]):
    pass


def order() -> Order:
    return Order(order_id=1, line_items=[Line(unit_price=D("1.5"), id=1)])


def encoded() -> Encoded:
    return Encoded(raw=b"\xff" * 32, secret=SecretStr("x" * 20))


ZOO: dict[str, tuple[Any, Any]] = {
    "camel": (Order, order()),
    "computed": (Line, Line(unit_price=D(1), id=2)),
    "excluded": (Hiding, Hiding(hidden=2)),
    "serializers": (Serialized, Serialized(field=1, typed=2, in_json=3, untyped=4, said_to_be_anything=5, wrapped=6)),
    "model-serializer": (Rewritten, Rewritten(x=1)),
    "model-serializer-untyped": (RewrittenAnyhow, RewrittenAnyhow(x=1)),
    "json": (Parsed, Parsed(numbers="[1]")),  # type: ignore[arg-type]
    "aliases": (Aliased, Aliased(taken=1, sent=2, first=3)),  # type: ignore[call-arg]
    "closed": (Closed, Closed(a=1)),
    "closed-and-computed": (ClosedAndComputed, ClosedAndComputed(a=1)),
    "encoded": (Encoded, encoded()),
    "timedelta-in-seconds": (InSeconds, InSeconds(spent=datetime.timedelta(1))),
    "stripped": (Stripped, Stripped(text=" a ")),
    "import": (Imported, Imported(function="math.cos")),
    "numbers": (Numbers, Numbers(total=1, bounded=2, price=D("1.1"))),
    "deep": (Deep, Deep(by_name={"a": order()}, maybe=order(), either=ClosedAndComputed(a=1))),
    "default-of-another-type": (Unset, Unset()),
    "root": (ByName, ByName({"a": 1})),
    "dataclass": (Plain, Plain(1, datetime.date(2020, 1, 1))),
    "pydantic-dataclass": (PlainAliased, PlainAliased(xx=1)),  # type: ignore[call-arg]
    "typed-dict": (Movie, {"title": "t"}),
    "named-tuple": (Pair, Pair(1)),
    "flags": (Permission, Permission.READ | Permission.WRITE),
    "enum-of-anything": (Colour, Colour.DAY),
    "bytes": (bytes, b"\xff"),
    "datetime": (datetime.datetime, datetime.datetime(2026, 1, 2, 3)),
    "aware": (AwareDatetime, datetime.datetime(2026, 1, 2, 3, tzinfo=datetime.UTC)),
    "time": (datetime.time, datetime.time(1)),
    "timedelta": (datetime.timedelta, datetime.timedelta(1)),
    "date": (datetime.date, datetime.date(2020, 1, 1)),
    "uuid": (uuid.UUID, uuid.UUID(int=1)),
    "path": (pathlib.Path, pathlib.Path("/a")),
    "address": (ipaddress.IPv4Address, ipaddress.IPv4Address("1.1.1.1")),
    "pattern": (re.Pattern, re.compile("a")),
    "fraction": (fractions.Fraction, fractions.Fraction(1, 2)),
    "complex": (complex, 1j),
    "deque": (collections.deque[int], collections.deque([1])),
    "set": (set[int], {1}),
    "counter": (collections.Counter[str], collections.Counter("aa")),
    "tuple": (tuple[int, str], (1, "a")),
    "tuples": (tuple[int, ...], (1, 2)),
    "literal": (Literal[1, "a", None], None),
    "any": (Any, object()),
    "url": (AnyUrl, AnyUrl("http://a.example")),
    "union": (int | str | None, None),
    "maybe-bytes": (bytes | None, b"\xfe"),
    "decimal-as-float": (float, D("1.5")),
    "decimals-as-floats": (list[float], [D("1.5"), 2]),
    "integer-as-float": (float, 1),
    "numbered": (dict[int, str], {1: "a"}),
    "size": (ByteSize, ByteSize(5)),
    "sequence": (Sequence[int], [1]),
    "iterable": (Iterable[int], [1, 2]),
    "json-value": (JsonValue, {"a": [1, None]}),
    "secret": (SecretStr, SecretStr("a")),
    "letters": (Annotated[str, Field(pattern=r"^\p{L}+$")], "é"),
    "bounded": (Annotated[int, Field(gt=0, lt=5, multiple_of=2)], 2),
    "named-bytes": (dict[str, bytes], {"a": b"\xff"}),
    "made-by-a-function": (Annotated[int, PlainValidator(int)], 1),
}
"""A return type, and a value of it."""


def returning(kind: Any, value: Any) -> Any:
    def function() -> Any:
        return value

    function.__annotations__["return"] = kind
    return module(id="any.name")(function).apcore_module


def giving(schema: Any, output: Any) -> FunctionalModule:
    return FunctionalModule(lambda inputs, context: output, output_schema=schema)


def inhabitants() -> Iterator[tuple[str, Any]]:
    """Modules that give each value in all the ways in which one can."""
    for name, (kind, value) in ZOO.items():
        yield f"{name}, returned", returning(kind, value)
        yield f"{name}, in a list", returning(list[kind], [value, value])
        holder = create_model(
            "Holder", held=(kind, ...), held_again=(list[kind] | None, Field(None, alias="heldAgain"))
        )
        yield f"{name}, held", giving(holder, {"held": value, "heldAgain": [value]})
        if isinstance(value, BaseModel):
            yield f"{name}, dumped", giving(kind, value.model_dump())
            yield f"{name}, dumped by alias", giving(kind, value.model_dump(by_alias=True))


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
                failed[name] = result.content[0].text  # type: ignore[union-attr]
                continue
            Draft202012Validator(tools[module_id].output_schema or {}).validate(result.structured_content)
            assert result.structured_content == json.loads(result.content[0].text)  # type: ignore[union-attr]
    return failed


@pytest.mark.timeout(240)
async def test_a_tool_that_has_run_does_not_fail_for_what_was_promised_of_it() -> None:
    assert await held_against_their_promises(dict(inhabitants())) == {}


DICTS: dict[str, tuple[Any, Any]] = {
    "decimal": ({"type": "number"}, D("10.5")),
    "whole-decimal": ({"type": "number", "minimum": 1, "maximum": 3}, D(2)),
    "decimals": ({"type": "array", "items": {"type": "number"}}, [D(1), 2, 2.5]),
    "chosen-decimal": ({"enum": [1.5, "a"]}, D("1.5")),
    "whole-float": ({"type": "integer", "minimum": 1}, 1.0),
    "anything": ({}, {"a": {1, 2}, "b": b"\xff"}),
    "bytes-in-a-model": ({}, [encoded()]),
    "one": ({"oneOf": [{"type": "integer"}, {"type": "number", "maximum": 3}]}, 4),
    "closed": ({"properties": {"a": {}}, "additionalProperties": False}, {"a": 1}),
    "constant": ({"const": {"a": [1]}}, {"a": [1]}),
    "nothing": ({"enum": [None, 1, True]}, None),
    "long": ({"type": "string", "minLength": 1, "maxLength": 2}, "\U0001f600\U0001f600"),
    "tuple": ({"prefixItems": [{"type": "integer"}], "items": {"type": "string"}, "maxItems": 3}, [1, "a"]),
    "short-tuple": ({"prefixItems": [{"type": "integer"}, {"type": "string"}]}, [1]),
}


async def test_what_is_promised_by_a_dict_schema_holds_as_well() -> None:
    modules = {
        name: giving({"type": "object", "properties": {"held": schema}, "required": ["held"]}, {"held": value})
        for name, (schema, value) in DICTS.items()
    }
    assert await held_against_their_promises(modules) == {}


async def test_a_number_that_apcore_takes_for_one_is_sent_as_one(mode: str) -> None:
    """What SQL makes of SUM is a Decimal."""
    schema = {"type": "object", "properties": {"total": {"type": "number"}}}
    modules = {"t.dict": giving(schema, {"total": D("10.50")}), "t.float": returning(float, D("10.50"))}
    async with connect(modules, mode=mode) as client:
        by_dict, by_type = [await client.call_tool(name, {}) for name in modules]
    assert by_dict.structured_content == {"total": 10.5}
    assert by_type.structured_content == {"result": 10.5}


class Attachment(BaseModel):
    name: str
    data: bytes


@pytest.mark.parametrize("data", [b"\xff\xfe", b"text"], ids=["no-text", "text"])
async def test_bytes_are_base64_wherever_they_stand(data: bytes, mode: str) -> None:
    attachment = Attachment(name="a", data=data)
    modules = {
        "t.one": returning(Attachment, attachment),
        "t.list": returning(list[Attachment], [attachment]),
        "t.dict": giving({}, {"result": ({"deep": [attachment]},)}),
    }
    async with connect(modules, mode=mode) as client:
        texts = [(await client.call_tool(name, {})).content[0].text for name in modules]  # type: ignore[union-attr]
    one, many, deep = map(json.loads, texts)
    for sent in (one, many["result"][0], deep["result"][0]["deep"][0]):
        assert base64.urlsafe_b64decode(sent["data"]) == data


async def test_a_tool_is_served_though_pydantic_cannot_say_what_its_results_hold(mode: str) -> None:
    class Somebody:
        def __str__(self) -> str:
            return "somebody"

    class Given(BaseModel):
        by: Annotated[Somebody, PlainValidator(lambda value: value)]

    modules = {
        "t.mapped": returning(dict[str, Somebody], {"by": Somebody()}),
        "t.given": giving(Given, {"by": Somebody()}),
    }
    async with connect(modules, mode=mode) as client:
        results = [await client.call_tool(name, {}) for name in modules]
    assert [result.structured_content for result in results] == [{"by": "somebody"}] * 2


async def test_the_advertised_schema_tells_both_names_of_a_field_and_what_is_computed(mode: str) -> None:
    async with connect({"t.line": returning(list[Line], [])}, mode=mode) as client:
        (tool,) = (await client.list_tools()).tools
    line = tool.output_schema["properties"]["result"]["items"]  # type: ignore[index]
    assert line["properties"].keys() == {"id", "unit_price", "unitPrice", "line_total", "lineTotal"}
    assert line["required"] == ["id"]


async def test_what_an_enumeration_can_be_and_that_a_default_may_be_null_is_promised(mode: str) -> None:
    class Size(enum.StrEnum):
        SMALL = "s"
        LARGE = "l"

    class Shirt(BaseModel):
        model_config = ConfigDict(use_enum_values=True)
        size: Size
        count: int = None  # type: ignore[assignment]

    async with connect({"t.shirt": giving(Shirt, {"size": "s"})}, mode=mode) as client:
        (tool,) = (await client.list_tools()).tools
    properties = tool.output_schema["properties"]  # type: ignore[index]
    assert (properties["size"]["type"], properties["size"]["enum"]) == ("string", ["s", "l"])
    assert properties["count"]["type"] == ["integer", "null"]


@pytest.mark.timeout(240)
@settings(QUICK, max_examples=25)  # each of three models, and a server for them
@given(st.data())
def test_what_is_promised_of_any_model_holds_of_its_values(data: st.DataObject) -> None:
    """Generated models, by the schemas alone: what pydantic accepts and writes, the advertised schema accepts."""
    import asyncio

    modules: dict[str, Any] = {}
    for number in range(3):
        model, values, _ = data.draw(models(maps=True))
        value: Value = data.draw(values)
        instance = model.model_validate_json(json.dumps(value.back))
        modules[f"{number}, returned"] = returning(model, instance)
        modules[f"{number}, in a list"] = returning(list[model], [instance])
        modules[f"{number}, dumped"] = giving(model, instance.model_dump(exclude_unset=True))
    assert asyncio.run(held_against_their_promises(modules)) == {}


# ---- Secrets ----


class Login(Camel):
    user_name: str
    pass_phrase: str = Field(json_schema_extra=MARK)


class Derived(BaseModel):
    user: str

    @computed_field(json_schema_extra=MARK)  # type: ignore[prop-decorator]
    @property
    def token(self) -> str:
        return "S3CR3T"


class Renamed(BaseModel):
    user: str
    key: str = Field(serialization_alias="theKey", json_schema_extra=MARK)


LOGIN = Login(user_name="ann", pass_phrase="S3CR3T")
SECRET_OUTPUTS: dict[str, Any] = {
    "by-name": returning(Login, LOGIN),
    "by-alias": returning(list[Login], [LOGIN]),
    "in-a-dict": returning(dict[str, Login], {"ann": LOGIN}),
    "in-a-dict-of-lists": returning(dict[str, list[Login]], {"ann": [LOGIN]}),
    "dumped-by-alias": giving(Login, LOGIN.model_dump(by_alias=True)),
    "computed": returning(Derived, Derived(user="ann")),
    "computed-in-a-list": returning(list[Derived], [Derived(user="ann")]),
    "serialization-alias": returning(list[Renamed], [Renamed(user="ann", key="S3CR3T")]),
    "serialization-alias-by-name": returning(Renamed, Renamed(user="ann", key="S3CR3T")),
}


@pytest.mark.parametrize("name", SECRET_OUTPUTS)
async def test_a_marked_field_is_hidden_under_every_name(name: str, mode: str) -> None:
    async with connect({"t.secret": SECRET_OUTPUTS[name]}, mode=mode) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("t.secret", {})
    text = result.content[0].text  # type: ignore[union-attr]
    assert not result.is_error
    assert "S3CR3T" not in text
    assert REDACTED in text
    assert '"ann"' in text
    assert (tool.output_schema, result.structured_content) == (None, None)


def test_a_model_is_asked_once_for_what_is_sent_of_it() -> None:
    """Each time costs as much as the rest of a tool (NFR-PERF-001); apcore asks once itself."""
    asked: list[str] = []

    class Asked(BaseModel):
        user: str

        @classmethod
        def __get_pydantic_json_schema__(cls, schema: Any, handler: Any) -> Any:
            asked.append(handler.mode)
            return handler(schema)

    to_openai_tools(registry_of({"t.asked": giving(Asked, {})}))
    assert asked == ["validation", "serialization"]


async def test_a_recursive_model_with_a_computed_secret_is_left_out() -> None:
    class Tree(BaseModel):
        children: list[Tree] = []

        @computed_field(json_schema_extra=MARK)  # type: ignore[prop-decorator]
        @property
        def key(self) -> str:
            return "S3CR3T"

    async with connect({"t.tree": giving(Tree, {}), "t.other": giving({}, {})}) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["t.other"]


class Access(Camel):
    user: str
    pass_phrase: str = Field("", json_schema_extra=MARK)
    pin: str = Field("", validation_alias=AliasChoices("pinCode", "code"), json_schema_extra=MARK)


@pytest.mark.parametrize("name", ["pass_phrase", "passPhrase", "pinCode", "code", "pin"])
async def test_the_question_for_approval_hides_a_marked_argument_under_every_name(name: str) -> None:
    """A second choice of an alias stands in no schema: then the names are all that is shown."""
    asked: list[str] = []

    async def decline(context: Any, params: Any) -> Any:
        asked.append(params.message)
        return ElicitResult(action="decline")

    module_ = FunctionalModule(lambda inputs, context: {}, input_schema=Access, annotations=NEEDS_APPROVAL)
    async with connect({"t.a": module_}, client={"elicitation_callback": decline}) as client:
        await client.call_tool("t.a", {"user": "ann", name: "S3CR3T"})
    (question,) = asked
    assert "S3CR3T" not in question
    assert name in question
    assert ("ann" in question) is (name != "code")
