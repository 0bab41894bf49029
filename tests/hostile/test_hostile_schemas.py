"""Generated schemas and values, against `jsonschema` and OpenAI's rules (FR-SCHEMA-*, FR-OPENAI-003)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from apcore import Executor, FunctionModule, Registry
from conftest import FunctionalModule, connect, echo, registry_of
from generated import QUICK, models
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from support import INTEGER, STRING, check, nested, of, text_of

from apcore_mcp import from_openai_call, run_openai_call, to_openai_tools

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
@settings(QUICK, max_examples=20)
@given(st.data())
def test_references_written_out_mean_the_same(data: st.DataObject) -> None:
    schema = data.draw(documents())
    before, after = Draft202012Validator(schema), Draft202012Validator(check(schema))
    for _ in range(8):
        value = {"p": data.draw(values()), "q": data.draw(values()), **data.draw(objects())}
        assert before.is_valid(value) == after.is_valid(value), (schema, value)


@pytest.mark.timeout(30)
async def test_wide_and_deep_schemas_are_served() -> None:
    wide = of(**{f"p{n}": {"$ref": "#/$defs/A"} for n in range(5_000)}) | {"$defs": {"A": {"enum": [1, 2]}}}
    modules = {name: FunctionalModule(echo, input_schema=s) for name, s in {"w.ide": wide, "d.eep": nested(64)}.items()}
    arguments: Any = "at the bottom"
    for _ in range(64):
        arguments = {"p": arguments}
    async with connect(modules, validate_inputs=True) as client:
        listed = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
        assert listed["d.eep"] == nested(64)
        assert listed["w.ide"]["properties"]["p4999"] == {"enum": [1, 2]}
        assert (await client.call_tool("d.eep", arguments)).structured_content == arguments
        assert "p4999" in text_of(await client.call_tool("w.ide", {"p1": 1, "p4999": 3}))


# ---- OpenAI's rules for structured outputs, as its guide "Structured Outputs" publishes them ----

SUPPORTED = {"type", "description", "enum", "const", "anyOf", "properties", "required", "additionalProperties", "items"}
SUPPORTED |= {"pattern", "format", "multipleOf", "maximum", "exclusiveMaximum", "minimum", "exclusiveMinimum"}
SUPPORTED |= {"minItems", "maxItems"}
FORMATS = set("date-time time date duration email hostname ipv4 ipv6 uuid".split())


def refusals(node: Any) -> Iterator[str]:
    """Why OpenAI would not take `node` in the parameters of a strict function."""
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
            yield from refusals(inner)
    for inner in [*node.get("anyOf", ()), *([node["items"]] if "items" in node else [])]:
        yield from refusals(inner)


def strict(schema: Any) -> tuple[Registry, dict[str, Any]]:
    registry = registry_of({"a.module": FunctionalModule(echo, input_schema=schema)})
    return registry, to_openai_tools(registry, strict=True)[0]["function"]["parameters"]


@pytest.mark.timeout(240)
@settings(QUICK, max_examples=20)
@given(st.data())
def test_openai_takes_the_strict_schema_of_a_model(data: st.DataObject) -> None:
    model, values, _ = data.draw(models())
    registry, parameters = strict(model)
    assert (parameters.get("type"), "anyOf" in parameters) == ("object", False)
    assert list(refusals(parameters)) == []
    executor = Executor(registry)
    for _ in range(3):
        value = data.draw(values)
        assert Draft202012Validator(parameters).is_valid(value.sent), "strict mode refuses what it asked for"
        module_id, inputs = from_openai_call(executor, "a-module", json.dumps(value.sent))
        assert inputs == value.back
        assert executor.call(module_id, inputs) == value.back
        assert model.model_validate(inputs) == model.model_validate(value.plain)


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
@settings(QUICK, max_examples=30)
@given(st.data())
def test_what_strict_mode_lets_a_model_write_is_accepted(data: st.DataObject) -> None:
    schema = data.draw(simple_objects())
    registry, parameters = strict(schema)
    for _ in range(3):
        sent = data.draw(written(parameters))
        assert Draft202012Validator(parameters).is_valid(sent)
        _, inputs = from_openai_call(registry, "a-module", json.dumps(sent))
        errors = [error.message for error in Draft202012Validator(schema).iter_errors(inputs)]
        assert errors == [], (schema, sent, inputs)


async def test_unknown_arguments_cost_what_they_are() -> None:
    """By the square of their number, these would take minutes. The schema is a dict, as of a binding."""
    schema: Any = of(a=INTEGER)
    registry = registry_of({"m.a": FunctionModule(lambda a: a, "m.a", input_schema=schema, output_schema=schema)})
    told = await run_openai_call(registry, "m-a", {f"k{number}": 1 for number in range(100_000)})
    assert len(told.splitlines()) == 21
    assert told.startswith("Input validation failed:\n- k0: Extra inputs are not permitted (extra_forbidden)\n- k1: ")
