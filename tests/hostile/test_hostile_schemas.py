"""Schemas nobody would write by hand, and every one that pydantic might: inlined they mean the same, and what strict
mode makes of them OpenAI takes, or a warning says that it will not (FR-SCHEMA-*, FR-OPENAI-003; design "Schemas",
"Strict mode"). Generated, against the `jsonschema` package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import decimal
import enum
import functools
import json
import logging
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import pytest
from conftest import FunctionalModule, connect, echo, registry_of
from generated import QUICK, models, mutations
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Discriminator, Field, JsonValue, RootModel, SecretStr, Tag
from support import check, nested, one, subschemas
from typing_extensions import TypedDict

from apcore_mcp import core, from_openai_call, run_openai_call, to_openai_tools
from apcore_mcp.__main__ import main

INTEGER, STRING = {"type": "integer"}, {"type": "string"}


def warned(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING)


# ---- References of every legal form ----

NAMES = ["A", "a/b", "c~d", "~1", "50%", "%25", "My [Int]", "é", "", "$ref", "0", "items"]
DATA = {"$ref": "#/no/where"}
LEAVES = [True, False, {}, INTEGER, {"type": "string", "maxLength": 1}, {"minimum": 2}, {"required": ["x"]},
          {"enum": [1, "a", DATA]}, {"const": DATA},
          {"type": "object", "default": DATA, "examples": [DATA]}]  # fmt: skip
BESIDE = [{}, {"description": "d"}, {"default": DATA, "$comment": "c"}, {"x-any": DATA}, {"type": ["object", "string"]},
          {"minimum": 3}, {"required": ["y"]}, {"properties": {"x": INTEGER}}, {"additionalProperties": False},
          {"unevaluatedProperties": False}, {"not": INTEGER}, {"enum": [DATA, 3]}]  # fmt: skip


def pointer(*steps: str, raw: bool = False) -> str:
    """`("$defs", "a/b")` becomes `#/$defs/a~1b`; without `raw`, also percent-encoded where that is allowed."""
    escaped = (step.replace("~", "~0").replace("/", "~1") for step in steps)
    return "#/" + "/".join(step.replace("%", "%25") if raw else quote(step, safe="$") for step in escaped)


def schemas(refs: list[str], depth: int = 1) -> st.SearchStrategy[Any]:
    """Schemas that may refer to `refs`."""
    simple = st.sampled_from(LEAVES)
    if refs:
        to = st.sampled_from(refs).map(lambda ref: {"$ref": ref})
        simple = simple | st.builds(lambda ref, beside: {**beside, **ref}, to, st.sampled_from(BESIDE))
        simple = simple | st.builds(lambda ref, other: {**ref, "allOf": [other]}, to, to)
    if not depth:
        return simple
    inner = schemas(refs, depth - 1)
    pair, properties = st.tuples(inner, inner).map(list), st.fixed_dictionaries({"x": inner, "y": inner})
    single = st.sampled_from("items contains not additionalProperties propertyNames unevaluatedItems".split())
    return st.one_of(
        simple,
        st.builds(lambda keyword, schema: {keyword: schema}, single, inner),
        st.builds(lambda keyword, branches: {keyword: branches}, st.sampled_from(["anyOf", "oneOf", "allOf"]), pair),
        st.builds(lambda named, rest: {"properties": named, "unevaluatedProperties": rest}, properties, inner),
        st.builds(lambda named: {"patternProperties": {"^x": named["x"]}, "dependentSchemas": named}, properties),
        st.builds(lambda first, rest: {"type": "array", "prefixItems": first, "items": rest}, pair, inner),
        st.builds(lambda test, ways: {"if": test, "then": ways[0], "else": ways[1]}, inner, pair),
    )


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """An object schema with up to five definitions, each referring to those before it, in every way one can."""
    root: dict[str, Any] = {"type": "object", "properties": {}}
    refs: list[str] = []
    for number, name in enumerate(draw(st.lists(st.sampled_from(NAMES), min_size=1, max_size=5, unique=True))):
        schema, home = draw(schemas(refs)), draw(st.sampled_from(["$defs", "definitions", "properties"]))
        if isinstance(schema, dict) and draw(st.booleans()):
            schema = {**schema, "$anchor": f"anchor{number}"}
            refs.append(f"#anchor{number}")
        path: list[str] = draw(st.sampled_from([[], ["properties", "in/side"], ["prefixItems", "0"], ["not"]]))
        for step in reversed(path):
            schema = [schema] if step == "0" else {step: schema}
        root.setdefault(home, {})[name] = schema
        refs.append(pointer(home, name, *path, raw=draw(st.booleans())))
    root["properties"] |= {"p": {"$ref": draw(st.sampled_from(refs))}, "q": draw(schemas(refs))}
    return {**root, **draw(st.sampled_from([{}, {"additionalProperties": {"$ref": refs[-1]}}]))}


def values(depth: int = 2) -> st.SearchStrategy[Any]:
    plain = st.sampled_from([None, True, 1, 3, "a", "bb", DATA, [], {}])
    return plain | st.lists(values(depth - 1), max_size=2) | objects(depth - 1) if depth else plain


def objects(depth: int = 1) -> st.SearchStrategy[dict[str, Any]]:
    keys = st.sampled_from(["p", "q", "x", "y", "in/side", "a/b", "$ref", ""])
    return st.dictionaries(keys, values(depth), max_size=4)


@pytest.mark.requirement("FR-SCHEMA-002")
@pytest.mark.timeout(240)
@QUICK
@given(st.data())
def test_a_schema_full_of_references_means_the_same_when_they_are_written_out(data: st.DataObject) -> None:
    schema = data.draw(documents())
    before, after = Draft202012Validator(schema), Draft202012Validator(check(schema))
    for _ in range(8):
        value = {"p": data.draw(values()), "q": data.draw(values()), **data.draw(objects())}
        assert before.is_valid(value) == after.is_valid(value), (schema, value)


TO_A = {"$ref": "#/$defs/A"}
ANCHORED = {"A": one({**INTEGER, "$anchor": "deep"}), "B": {"$anchor": "B", "type": "integer"}}


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"properties": {"p": TO_A, "q": TO_A}, "$defs": ANCHORED}, id="anchors-in-what-is-copied"),
        pytest.param({"properties": {"p": {"$ref": "#B"}, "q": {"$ref": "#B"}}, "$defs": ANCHORED}, id="by-anchor"),
        pytest.param({"properties": {"p": {**INTEGER, "$anchor": "P"}, "q": {"$ref": "#P"}}}, id="to-a-neighbour"),
        pytest.param({"$id": "https://a.example/x", "properties": {"p": TO_A}, "$defs": {"A": INTEGER}}, id="with-id"),
        pytest.param({"properties": {"p": {"$ref": "https://a.example/a"}},
                      "$defs": {"A": {"$id": "https://a.example/a", **INTEGER}}}, id="to-an-id-inside"),
        pytest.param({"properties": {"p": TO_A, "q": {"$ref": "#/$defs/B"}}, "$defs": {
            "B": STRING, "A": {"$id": "https://a.example/a", **one({"$ref": "#/$defs/B"}, **{"$defs": {"B": INTEGER}})},
        }}, id="a-resource-inside-has-its-own-root"),
        pytest.param({"properties": {"p": TO_A}, "$defs": {
            "A": {**one({"$ref": "#/$defs/A/$defs/B"}), "$defs": {"B": INTEGER}},
        }}, id="definitions-inside"),
        pytest.param({"properties": {"p": {"$id": "https://a.example/a", **one(TO_A), "$defs": {"A": INTEGER}}},
                      "$defs": {"A": STRING}}, id="a-resource-in-place"),
        pytest.param({"properties": {"p": {"$dynamicRef": "#/$defs/A"}}, "$defs": {"A": INTEGER}}, id="dynamic"),
        pytest.param({"properties": {"p": {"dependencies": {"x": TO_A}}}, "$defs": {"A": INTEGER}}, id="draft-7"),
    ],
)  # fmt: skip
def test_a_rare_reference_is_written_out_or_the_module_is_left_out(
    schema: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is served leads nowhere else, and no name in it is left that clients could find twice."""
    tools = to_openai_tools(registry_of({"odd.one": FunctionalModule(echo, input_schema=schema)}))
    if not tools:
        assert "odd.one" in warned(caplog)
        return
    after = tools[0]["function"]["parameters"]
    assert [keyword for keyword in ('"$ref"', '"$dynamicRef"') if keyword in json.dumps(after)] == []
    assert [node for node in subschemas(after) if node.keys() & {"$anchor", "$id", "$defs", "definitions"}] == []
    inside = [{}, {"p": 1}, {"p": "1"}, {"p": {}}, {"p": {"p": 1}}, {"p": {"p": "1"}}, {"p": {"x": 1}}]
    for value in (v | q for v in inside for q in ({}, {"q": 1}, {"q": "1"}, {"q": {"p": "1"}})):
        assert Draft202012Validator(schema).is_valid(value) == Draft202012Validator(after).is_valid(value), value


# ---- Real models ----

T = TypeVar("T")


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Movie(TypedDict, total=False):
    title: str
    year: int


class Pair(NamedTuple):
    left: int
    right: str = "r"


@dataclasses.dataclass
class Money:
    amount: decimal.Decimal
    currency: Literal["EUR", "USD"] = "EUR"


class Box(BaseModel, Generic[T]):
    model_config = ConfigDict(extra="forbid")
    content: T
    label: str | None = None


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: Annotated[int, Field(ge=0, le=9)] = 9


class Puppy(BaseModel):
    kind: Literal["dog"]
    age: Literal["young"]
    toy: str | None = None


class Hound(BaseModel):
    kind: Literal["dog"]
    age: Literal["old"]


Dog = Annotated[Puppy | Hound, Field(discriminator="age")]


class Everything(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    box: Box[Box[int]]
    movie: Movie = {}
    pair: Pair | None = None
    price: Money | None = None
    level: Level = Level.LOW
    tags: set[str] = set()
    when: datetime.datetime | datetime.date | None = None
    ident: uuid.UUID | None = None
    secret: SecretStr | None = None
    ids: RootModel[list[Annotated[int, Field(gt=0)]]] | None = None
    free: JsonValue = None
    named: Annotated[str, Field(alias="class", pattern="^[a-z]+$", deprecated=True)] = "a"
    told: Annotated[
        Annotated[int, Tag("int")] | Annotated[list[int], Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list) else "int"),
    ] = 1


FULL = {
    "pet": {"kind": "dog", "age": "young", "toy": "ball"}, "box": {"content": {"content": 1}, "label": "l"},
    "movie": {"title": "t"}, "pair": [1, "r"], "price": {"amount": "1.5"}, "level": 2, "tags": ["a"],
    "when": "2026-01-02", "ident": str(uuid.UUID(int=1)), "secret": "s", "ids": [1], "free": {"$ref": "#"},
    "class": "abc", "told": [1],
}  # fmt: skip


@functools.cache
def everything() -> tuple[Draft202012Validator, Draft202012Validator]:
    """What pydantic says of the model, as it says it and written out."""
    (tool,) = to_openai_tools(registry_of({"a.model": FunctionalModule(echo, input_schema=Everything)}))
    return Draft202012Validator(Everything.model_json_schema()), Draft202012Validator(tool["function"]["parameters"])


@pytest.mark.timeout(240)
@settings(QUICK, max_examples=100)
@given(st.data())
def test_everything_pydantic_can_say_means_the_same_when_it_is_written_out(data: st.DataObject) -> None:
    before, after = everything()
    assert before.is_valid(FULL)
    assert after.is_valid(FULL)
    changed = data.draw(mutations(FULL))
    assume(isinstance(changed, dict))
    assert before.is_valid(changed) == after.is_valid(changed), changed


class Tree(BaseModel):
    value: int
    children: list[Tree] = []


class Husband(BaseModel):
    wife: Wife | None = None


class Wife(BaseModel):
    husband: Husband | None = None


class Forest(BaseModel):
    trees: dict[str, Tree]


def bomb(use: Any) -> dict[str, Any]:
    """Thirty definitions, each of which uses the next one twice, as `use` says."""
    return {f"L{n}": use({"$ref": f"#/$defs/L{n + 1}"}) for n in range(30)} | {"L30": STRING}


@pytest.mark.requirement("FR-SCHEMA-002")
@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("schema", "words"),
    [
        pytest.param(Tree, "Circular reference: Tree -> Tree", id="tree"),
        pytest.param(Husband, "Circular reference: ", id="two-models-of-each-other"),
        pytest.param(Forest, "Circular reference: Tree -> Tree", id="forest"),
        pytest.param({"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [one(TO_A), {"type": "object"}]}}},
                     "Circular reference: A -> A", id="at-the-root"),
        *(pytest.param(one({"$ref": "#/$defs/L0"}, **{"$defs": bomb(use)}), "50000 nodes", id=f"bomb-{name}")
          for name, use in {
              "allOf": lambda ref: {"allOf": [ref, ref]},
              "beside": lambda ref: {**ref, "not": ref},
              "patterns": lambda ref: {"patternProperties": {"a": ref}, "additionalProperties": ref},
              "if": lambda ref: {"if": ref, "then": ref},
          }.items()),
    ],
)  # fmt: skip
def test_a_recursion_and_a_bomb_are_refused_in_words_and_the_others_served(
    schema: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    modules = {"bad.one": FunctionalModule(echo, input_schema=schema), "good.one": echo}
    assert [tool["function"]["name"] for tool in to_openai_tools(registry_of(modules))] == ["good-one"]
    assert "bad.one" in warned(caplog)
    assert words in warned(caplog)


@pytest.mark.timeout(30)
async def test_five_thousand_properties_and_sixty_four_levels_are_served(mode: str) -> None:
    wide = {"type": "object", "properties": {f"p{n}": TO_A for n in range(5_000)}, "$defs": {"A": {"enum": [1, 2]}}}
    modules = {name: FunctionalModule(echo, input_schema=s) for name, s in {"w.ide": wide, "d.eep": nested(64)}.items()}
    arguments: Any = "at the bottom"
    for _ in range(64):
        arguments = {"p": arguments}
    async with connect(modules, mode=mode, validate_inputs=True) as client:
        listed = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
        assert listed["d.eep"] == nested(64)
        assert listed["w.ide"]["properties"]["p4999"] == {"enum": [1, 2]}
        assert (await client.call_tool("d.eep", arguments)).structured_content == arguments
        refused = await client.call_tool("w.ide", {"p1": 1, "p4999": 3})
        assert "p4999" in refused.content[0].text  # type: ignore[union-attr]


# ---- OpenAI's rules for structured outputs, as its guide "Structured Outputs" publishes them ----

SUPPORTED = {"type", "description", "enum", "const", "anyOf", "properties", "required", "additionalProperties", "items"}
SUPPORTED |= {"pattern", "format", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"}
SUPPORTED |= {"minItems", "maxItems"}
FORMATS = set("date-time time date duration email hostname ipv4 ipv6 uuid".split())


def refusals(root: dict[str, Any]) -> Iterator[str]:
    """Why OpenAI would not take `root` as the parameters of a strict function."""
    if root.get("type") != "object" or "anyOf" in root:
        yield "the root is not an object"
    yield from _refusals(root)


def _refusals(node: Any) -> Iterator[str]:
    if not isinstance(node, dict):
        yield f"{node} instead of a schema"
        return
    yield from sorted(node.keys() - SUPPORTED)
    if node.get("format", "date") not in FORMATS:
        yield f"format {node['format']}"
    if "object" in str(node.get("type")) or "properties" in node:
        if node.get("additionalProperties") is not False or set(node.get("required", ())) != set(node["properties"]):
            yield "an open object"
        for inner in node["properties"].values():
            yield from _refusals(inner)
    for inner in [*node.get("anyOf", ()), *([node["items"]] if "items" in node else [])]:
        yield from _refusals(inner)


def strict(schema: Any) -> dict[str, Any]:
    registry = registry_of({"some.module": FunctionalModule(echo, input_schema=schema)})
    parameters: dict[str, Any] = to_openai_tools(registry, strict=True)[0]["function"]["parameters"]
    return parameters


@pytest.mark.timeout(240)
@QUICK
@given(st.data())
def test_openai_takes_the_strict_schema_of_a_model_that_strict_mode_can_say(data: st.DataObject) -> None:
    model, _, _ = data.draw(models())
    parameters = strict(model)
    assert list(refusals(parameters)) == []


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param(Everything, id="everything"),
        pytest.param(one({"oneOf": [INTEGER, STRING]}), id="oneOf"),
        pytest.param(one(STRING, anyOf=[one(INTEGER)]), id="root-union"),
        pytest.param(one({**STRING, "minLength": 1}), id="minLength"),
        pytest.param(one({**STRING, "format": "uri"}), id="format"),
        pytest.param(one({"type": "array", "prefixItems": [INTEGER]}), id="tuple"),
        pytest.param(one({**INTEGER, "deprecated": True}), id="deprecated"),
        pytest.param(one({**STRING, "readOnly": True}), id="readOnly"),
        pytest.param(one({**STRING, "writeOnly": True}), id="writeOnly"),
        pytest.param(one({**STRING, "contentEncoding": "base64", "contentMediaType": "image/png"}), id="content"),
        pytest.param(one({**INTEGER, "$anchor": "a"}), id="anchor"),
        pytest.param(one(INTEGER, **{"unit": "m"}), id="a-word-of-ones-own"),
        pytest.param(one({"type": "array", "items": {"not": INTEGER}}), id="not-in-items"),
        pytest.param(one(True), id="anything"),
        pytest.param(nested(10), id="ten-levels"),
    ],
)
def test_openai_takes_a_strict_schema_or_a_warning_says_that_it_will_not(
    schema: Any, caplog: pytest.LogCaptureFixture
) -> None:
    if told := list(refusals(strict(schema))):
        assert "some.module" in warned(caplog), told


def written(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """What a model may write for a strict schema: any value of it."""
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum") or [schema["const"]])
    if "anyOf" in schema:
        return st.one_of(*map(written, schema["anyOf"]))
    types = schema.get("type", ["null", "string"])
    return st.one_of(*(_written(kind, schema) for kind in ([types] if isinstance(types, str) else types)))


def _written(kind: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    if kind == "array":
        return st.lists(written(schema["items"]), max_size=2)
    if kind == "object":
        return st.fixed_dictionaries({name: written(inner) for name, inner in schema["properties"].items()})
    return st.sampled_from({"null": [None], "string": ["", "a"], "integer": [3]}[kind])


def simple_objects(depth: int = 2) -> st.SearchStrategy[dict[str, Any]]:
    """Object schemas within what strict mode can say, open and closed, of optional, nullable and ambiguous parts."""
    leaf = st.sampled_from([INTEGER, STRING, {"type": ["string", "null"]}, {"enum": ["a", 1]}, {"enum": ["a", None]},
                            {"const": "a"}, {"anyOf": [INTEGER, {"type": "null"}]}, {}])  # fmt: skip
    inner = leaf
    if depth:
        deeper = simple_objects(depth - 1)
        either = st.lists(deeper | leaf, min_size=1, max_size=3).map(lambda branches: {"anyOf": branches})
        inner = leaf | deeper | either | (deeper | leaf).map(lambda items: {"type": "array", "items": items})
    named = st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, max_size=3)
    return st.builds(
        lambda p, needed, closed: {"type": "object", "properties": p, "required": sorted(needed & p.keys()), **closed},
        named, st.sets(st.sampled_from("abc")), st.sampled_from([{}, {"additionalProperties": False}]),
    )  # fmt: skip


@pytest.mark.timeout(240)
@QUICK
@given(st.data())
def test_whatever_a_model_writes_in_strict_mode_comes_back_as_what_the_module_accepts(data: st.DataObject) -> None:
    schema = data.draw(simple_objects())
    registry = registry_of({"a.module": FunctionalModule(echo, input_schema=schema)})
    parameters = to_openai_tools(registry, strict=True)[0]["function"]["parameters"]
    for _ in range(3):
        sent = data.draw(written(parameters))
        assert Draft202012Validator(parameters).is_valid(sent)
        _, inputs = from_openai_call(registry, "a-module", json.dumps(sent))
        errors = [error.message for error in Draft202012Validator(schema).iter_errors(inputs)]
        assert errors == [], (schema, sent, inputs)


# ---- How much work a schema can make ----


@contextlib.contextmanager
def counting() -> Iterator[list[str]]:
    """The files of the Python functions that are called in this thread."""
    calls: list[str] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_filename)

    sys.setprofile(count)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def work(function: Callable[[], Any]) -> int:
    """How many Python functions `function` calls."""
    with counting() as calls:
        function()
    return len(calls)


def listed(schema: dict[str, Any], side: str = "output_schema") -> list[dict[str, Any]]:
    return to_openai_tools(registry_of({"a.module": FunctionalModule(echo, **{side: schema})}))


def blocks(levels: int, kinds: int, mark: bool) -> dict[str, Any]:
    """A document whose blocks are of many kinds at each level, one of them with a token that may be marked."""
    inner: dict[str, Any] = STRING
    for level in range(levels):
        variants = [one({**STRING, "maxLength": number}) for number in range(kinds - 1)]
        token = {"token": {**STRING, "x-sensitive": True}} if mark and not level else {}
        either = {"anyOf": [*variants, one({"type": "array", "items": inner})]}
        either["anyOf"][0]["properties"] |= token
        inner = either
    return one({"type": "array", "items": inner})


def test_one_mark_costs_little_more_to_list_than_none() -> None:
    plain, marked = (work(lambda mark=mark: listed(blocks(8, 25, mark))) for mark in (False, True))
    assert marked < 2 * plain


async def test_one_mark_costs_a_result_no_more_among_many_kinds_than_among_few() -> None:
    """Where nothing is marked, nobody looks: each of these results fits the first kind."""

    async def cost(kinds: int, length: int) -> int:
        output = {"p": [{"p": "x"}] * length}
        registry = registry_of({"a.module": FunctionalModule(lambda *_: output, output_schema=blocks(1, kinds, True))})
        with counting() as calls:
            assert json.loads(await run_openai_call(registry, "a-module", {})) == output
        return calls.count(core.__file__)  # apcore's own redaction looks at all

    few, many = [await cost(kinds, 400) - await cost(kinds, 200) for kinds in (10, 100)]
    assert many < 1.5 * few


def test_unions_inside_each_other_cost_what_they_are_long() -> None:
    """Each level is written out twice, so that two more levels are four times as much."""

    def union(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {**STRING, "x-sensitive": True}
        for _ in range(depth):
            schema = {"anyOf": [one(schema), one(schema)]}
        return one(schema)

    short, long = (work(lambda depth=depth: listed(union(depth))) for depth in (4, 6))
    assert long < 6 * short


def test_files_are_found_in_many_variants_as_fast_as_these_are_many() -> None:
    picture = {**STRING, "contentEncoding": "base64", "contentMediaType": "image/png"}

    def variants(count: int) -> dict[str, Any]:
        return {"anyOf": [one(picture, required=[f"a{number}"]) for number in range(count)]}

    few, many = (work(lambda count=count: listed(variants(count))) for count in (50, 500))
    assert many < 20 * few


@pytest.mark.parametrize("side", ["input_schema", "output_schema"])
def test_a_long_text_that_is_referred_to_from_everywhere_is_not_written_out_everywhere(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    """42 KB of schema made 644 MB of tool list."""
    pages = {"type": "object", "properties": {f"p{n}": {"$ref": "#/$defs/Long"} for n in range(500)}}
    book = {"type": "object", "properties": {f"q{n}": {"$ref": "#/$defs/Pages"} for n in range(40)}}
    definitions = {"Long": {**STRING, "description": "x" * 20_000}, "Pages": pages}
    tools = listed({**book, "$defs": definitions}, side)
    assert len(json.dumps(tools)) < 1_000_000
    assert "a.module" in warned(caplog)


CUBE = """
from typing import Annotated
from pydantic import BaseModel, Field

class Cube(BaseModel):
    cells: Annotated[list[Annotated[list[Annotated[list[str], Field(min_length=200)]], Field(min_length=200)]],
                     Field(min_length=200)]

class Volume(BaseModel):
    volume: int

class Measure:
    input_schema, output_schema, description = Cube, Volume, "Measure a cube."

    def execute(self, inputs, context):
        return {"volume": 1}
"""


@pytest.mark.timeout(30)
def test_an_example_is_made_up_only_as_long_as_it_helps(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "measure.py").write_text(CUBE)
    assert main(["--extensions-dir", str(tmp_path), "--export", "markdown"]) == 0
    document = capfd.readouterr().out
    assert "None can be made up from the schema." in document
    assert len(document) < 20_000
