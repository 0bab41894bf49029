"""A module's schemas as its clients see them: self-contained, and none hurts another (FR-SCHEMA-*, NFR-REL-002)."""

from __future__ import annotations

import copy
import datetime
import json
import logging
import math
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest
from apcore.decorator import FunctionModule
from conftest import FunctionalModule, connect, echo, registry_of
from generated import QUICK, models, mutations
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ConfigDict, Field
from support import (
    DATA,
    INTEGER,
    MARK,
    STRING,
    Caplog,
    check,
    gives,
    listed,
    messages_logged,
    nested,
    of,
    one,
    subschemas,
    success_text,
    text_of,
    tool_of,
)

from apcore_mcp import to_openai_tools

T = TypeVar("T")
POINT = of(x=INTEGER) | {"required": ["x"]}
TO_POINT, TO_ROOT, TO_A = {"$ref": "#/$defs/Point"}, {"$ref": "#"}, {"$ref": "#/$defs/A"}
NEVER: dict[str, Any] = {"not": {}}
LATEST, DRAFT_7 = "https://json-schema.org/draft/2020-12/schema", "http://json-schema.org/draft-07/schema#"


def pointed(schema: Any) -> dict[str, Any]:
    return one(schema, **{"$defs": {"Point": POINT}})


def chain(length: int) -> dict[str, Any]:
    """A schema with `length` references inside each other."""
    definitions: dict[str, Any] = {f"D{i}": one({"$ref": f"#/$defs/D{i + 1}"}) for i in range(1, length)}
    return one({"$ref": "#/$defs/D1"}, **{"$defs": {**definitions, f"D{length}": STRING}})


def written_out(schema: Any) -> Any:
    """`schema` with a point in the place of each reference to it."""
    return json.loads(json.dumps(schema).replace(json.dumps(TO_POINT), json.dumps(POINT)))


CYCLE = {"$defs": {"A": one({"$ref": "#/$defs/B"}), "B": {"items": {"$ref": "#/$defs/A"}}}}


def again(name: str, where: str = "above") -> dict[str, Any]:
    """What stands where a schema leads back into itself."""
    return {"type": "object", "description": f"another {name}, as {where}", "properties": {}}


EMPTY = of()
AROUND = {"prefixItems": [TO_POINT, STRING], "items": TO_POINT, "anyOf": [STRING, TO_POINT], "oneOf": [TO_POINT]}
AROUND |= {"if": TO_POINT, "then": {"not": TO_POINT}, "else": {"contains": TO_POINT}, "allOf": [TO_POINT]}
AROUND |= {"additionalProperties": TO_POINT, "patternProperties": {"^a": TO_POINT}, "propertyNames": TO_POINT}
AS_DATA = {"enum": [TO_POINT], "const": {"$ref": "#"}, "default": {"a": TO_POINT}, "examples": [TO_POINT]}
OF_A = {"$defs": {"A": {**INTEGER, "description": "of A", "title": "A"}}}
ANCHORED = {"A": one({**INTEGER, "$anchor": "deep"}), "B": {**INTEGER, "$anchor": "B"}}
OWN_ROOT = {"$id": "https://a.example/a", **one({"$ref": "#/$defs/B"}), "$defs": {"B": INTEGER}}
INSIDE = {"A": {**one({"$ref": "#/$defs/A/$defs/B"}), "$defs": ANCHORED}}
SIMPLE, TITLED = one(STRING), one(STRING, title="T", required=["p"])
NAMES = "type properties required items anyOf enum discriminator format default not".split()
KEYWORDS = of(**dict.fromkeys(NAMES, one(INTEGER))) | {"required": NAMES}
CONVERTED = {
    "empty": ({}, EMPTY),
    "nothing-but-definitions": ({"$defs": {"A": INTEGER}}, EMPTY),
    "no-type": ({"properties": {"p": STRING}}, SIMPLE),
    "title-and-required-kept": (TITLED | {"definitions": {"A": INTEGER}}, TITLED),
    "property": (pointed(TO_POINT), one(POINT)),
    "every-keyword": (pointed(AROUND), written_out(one(AROUND))),
    "discriminator": (  # it belongs to OpenAPI, and its mapping names what is gone
        pointed({"oneOf": [TO_POINT], "discriminator": {"propertyName": "x", "mapping": {"a": "#/$defs/Point"}}}),
        one({"oneOf": [POINT]}),
    ),
    "nested-references": (
        one(TO_A, **{"$defs": {"A": one({"items": {"$ref": "#/$defs/B"}}), "B": INTEGER}}),
        one(one({"items": INTEGER})),
    ),
    "into-itself": (one(TO_A, **CYCLE), one(one({"items": again("A")}))),
    "into-its-root": (one({"anyOf": [{"$ref": "#"}, STRING]}), one({"anyOf": [again("object", "the whole"), STRING]})),
    "narrowing-where-it-is-cut": (one(TO_ROOT, **{"not": {"required": ["q"]}}), one(again("object", "the whole"))),
    "a-property-inside-itself": (one(one({"$ref": "#/properties/p"})), one(one(one(again("p"))))),
    "legacy-definitions": (one({"$ref": "#/definitions/A"}, definitions={"A": INTEGER}), one(INTEGER)),
    "root-reference": ({"$ref": "#/$defs/Root", "$defs": {"Root": SIMPLE}}, SIMPLE),
    "into-a-definition": (pointed({"$ref": "#/$defs/Point/properties/x"}), one(INTEGER)),
    "to-a-property": (of(a=INTEGER, b={"$ref": "#/properties/a"}), of(a=INTEGER, b=INTEGER)),
    "percent-escaped": (one({"$ref": "#/$defs/My%20%5BInt%5D"}, **{"$defs": {"My [Int]": INTEGER}}), one(INTEGER)),
    "tilde-escaped": (one({"$ref": "#/$defs/a~1b~0c"}, **{"$defs": {"a/b~c": INTEGER}}), one(INTEGER)),
    "anchors": (of(p=TO_A, q={"$ref": "#B"}) | {"$defs": ANCHORED}, of(p=one(INTEGER), q=INTEGER)),
    "an-id-of-its-own": (one(TO_A, **{"$id": "https://a.example/x", "$defs": {"A": INTEGER}}), one(INTEGER)),
    "to-an-id-inside": (one({"$ref": OWN_ROOT["$id"]}, **{"$defs": {"A": OWN_ROOT, "B": STRING}}), one(one(INTEGER))),
    "definitions-inside": (one(TO_A, **{"$defs": INSIDE}), one(one(INTEGER))),
    "older-keyword": (
        one({"dependencies": {"x": TO_A}}, **{"$defs": {"A": INTEGER}}),
        one({"dependencies": {"x": INTEGER}}),
    ),
    "annotations-beside-a-reference-win": (
        one({"$ref": "#/$defs/A", "description": "own", "default": 1}, **OF_A),
        one({**INTEGER, "description": "own", "title": "A", "default": 1}),
    ),
    "reference-as-data": (pointed(AS_DATA), one(AS_DATA)),
    "properties-called-like-keywords": (
        {"properties": {"$ref": TO_POINT, "$defs": TO_POINT, "definitions": one(INTEGER)}, "$defs": {"Point": POINT}},
        of(**{"$ref": POINT, "$defs": POINT, "definitions": one(INTEGER)}),
    ),
    "required-properties-called-like-keywords": (one(KEYWORDS), one(KEYWORDS)),
    "32-references-deep": (chain(32), one(nested(31))),
    "root-union": ({"anyOf": [STRING, TO_POINT], "$defs": {"Point": POINT}}, {**EMPTY, "anyOf": [STRING, POINT]}),
    "nullable-root": ({**SIMPLE, "type": ["object", "null"]}, SIMPLE),
    # MCP's own schema wants an object for each property; everybody closes an object with a plain `false`.
    "boolean-schemas": (
        one({"items": False, "allOf": [True], "additionalProperties": False}),
        one({"items": NEVER, "allOf": [{}], "additionalProperties": False}),
    ),
    "boolean-properties": (one(True), one({})),
    "a-property-that-may-not-be": (one(False), one(NEVER)),
    # apcore reads every schema as 2020-12; the conformance suite of MCP looks for what says so.
    "own-dialect": (one(STRING, **{"$schema": LATEST}), {**SIMPLE, "$schema": LATEST}),
    "older-dialect": (
        one({"$ref": "#/definitions/A", "minimum": 1}, definitions={"A": INTEGER}, **{"$schema": DRAFT_7, "id": "x"}),
        one({"minimum": 1, "allOf": [INTEGER]}),
    ),
}
"""What a module declares, and what its clients are given."""


@pytest.mark.requirement("FR-SCHEMA-001", "FR-SCHEMA-002", "FR-SCHEMA-003")
@pytest.mark.parametrize(("declared", "expected"), CONVERTED.values(), ids=CONVERTED)
def test_a_schema_comes_out_self_contained(declared: dict[str, Any], expected: dict[str, Any]) -> None:
    assert check(declared) == expected


@pytest.mark.parametrize(
    ("declared", "accepted", "refused"),
    [
        pytest.param({"$ref": "#/$defs/Small", "minimum": 3}, [3, 4, 5], [2, 6, "4"], id="both-bounds"),
        pytest.param({"$ref": "#/$defs/Small", "maximum": 3}, [3], [4], id="the-tighter-one-beside-it"),
        pytest.param({"$ref": "#/$defs/Small", "type": "number"}, [1], [1.5], id="two-types"),
        pytest.param({"$ref": "#/$defs/Small", "allOf": [{"minimum": 3}]}, [4], [2, 6], id="an-allOf-of-its-own"),
        pytest.param({"$ref": "#/$defs/Closed", "properties": {"b": {}}}, [{}, {"a": 1}], [{"b": 1}], id="closed"),
        pytest.param({"$ref": "#/$defs/Yes"}, [1, None], [], id="true"),
        pytest.param({"$ref": "#/$defs/No"}, [], [1, None], id="false"),
    ],
)
def test_constraints_beside_a_reference_hold_as_well(declared: Any, accepted: list[Any], refused: list[Any]) -> None:
    closed = of(a=INTEGER) | {"additionalProperties": False}
    definitions = {"Small": {"type": "integer", "maximum": 5}, "Closed": closed, "Yes": True, "No": False}
    validator = Draft202012Validator(check(one(declared, **{"$defs": definitions})))
    assert [value for value in accepted + refused if validator.is_valid({"p": value})] == accepted


@pytest.mark.requirement("FR-SCHEMA-006")
def test_every_type_and_keyword_is_kept() -> None:
    properties: dict[str, Any] = {
        name: {"type": name} for name in ("string", "integer", "number", "boolean", "array", "object", "null")
    }
    properties |= {
        "union": {"type": ["string", "null"]},
        "list": {"type": "array", "items": {**STRING, "minLength": 1}, "minItems": 1, "uniqueItems": True},
        "inner": one(POINT, additionalProperties=False, minProperties=1),
        "enum": {"enum": ["a", 1, 1.5, None, True]},
        "const": {"const": {"a": [1]}},
        "text": {**STRING, "pattern": "^a", "maxLength": 9, "description": "D", "title": "T", "examples": ["a"]},
        "big": {**INTEGER, "minimum": -(2**70), "exclusiveMaximum": 10**30, "multipleOf": 2, "deprecated": True},
        "extended": {**STRING, "x-sensitive": True, "x-unit": {"si": "m"}, "writeOnly": True},
        "bytes": {**STRING, "contentEncoding": "base64", "contentMediaType": "image/png"},
    }
    formats = ("date-time", "time", "duration", "date", "email", "uri", "uuid")
    properties |= {f"f_{name}": {**STRING, "format": name, "default": "x"} for name in formats}
    schema = {"type": "object", "title": "All", "description": "D", "properties": properties, "required": ["enum"]}
    schema |= {"dependentRequired": {"union": ["list"]}, "additionalProperties": {"type": "integer"}, "$comment": "c"}
    served = copy.deepcopy(properties)
    served["array"]["items"] = served["object"]["properties"] = {}  # said where nothing is, for some clients
    assert check(schema) == {**schema, "properties": served}


# What no validator can work with, apcore's included: it comes from other dialects, other worlds and slips.
ILLEGAL: list[dict[str, Any]] = [
    {"minLength": "x"}, {"minLength": -1}, {"minLength": 1.5}, {"minimum": None},
    {"exclusiveMaximum": "5"}, {"multipleOf": 0}, {"enum": "x"},
    {"required": [1]}, {"required": ["a", "a"]}, {"required": True}, {"exclusiveMinimum": True}, {"type": []},
    {"items": [INTEGER, STRING]}, {"prefixItems": INTEGER}, {"prefixItems": []}, {"anyOf": []}, {"allOf": [None]},
    {"anyOf": {"type": "string"}}, {"not": "x"}, {"additionalProperties": "no"}, {"dependentRequired": {"a": "b"}},
    {"properties": {"a": 1}}, {"patternProperties": {"(": {}}}, {"pattern": "(a"}, {"pattern": 5}, {"uniqueItems": 1},
    {"description": 5}, {"enum": []}, {"examples": {"a": 1}}, {"deprecated": "yes"}, {"$ref": ["#"]},
    {"type": "strng"}, {"pattern": r"^\p{L}+$"},  # apcore's own validation would raise in every call
]  # fmt: skip
LOOP: dict[str, Any] = {"type": "object"}
LOOP["properties"] = {"p": LOOP}
CHAIN = chain(32)
AGAIN = {"properties": {**CHAIN["properties"], "again": {"$ref": "#/$defs/In"}}}
DEEPER = {**CHAIN, **AGAIN, "$defs": {**CHAIN["$defs"], "In": one({"$ref": "#/$defs/D1"})}}
BOMB = {f"L{i}": {"properties": {key: {"$ref": f"#/$defs/L{i + 1}"} for key in "ab"}} for i in range(30)}
CIRCULAR = {**of(p=TO_A, key=MARK), **CYCLE}
LIST = {"$defs": {"A": {"type": "array", "items": TO_A}}}
REFUSED = {
    "circular-and-marked": (CIRCULAR, "A -> B -> A"),
    "marked-elsewhere": (one(TO_ROOT, **{"$defs": {"Unused": one(MARK)}}), "# -> #"),
    "list-of-nothing-but-itself": (one(TO_A, **LIST), "A -> A"),
    "circular-or-null": (one(TO_ROOT, type=["object", "null"]), "# -> #"),
    "missing-definition": (one({"$ref": "#/$defs/Missing"}), "definition Missing is missing"),
    "elsewhere": (one({"$ref": "https://example.com/schemas/Far"}), "Far"),
    "33-references-deep": (chain(33), "32"),
    "33-references-deep-where-it-is-used-again": (DEEPER, "32"),
    "50001-schemas": (of(*(f"p{n}" for n in range(50_000))), "50000 nodes"),
    # Written out these are a thousand million schemas: whoever tries will not come back.
    "bomb": (one({"$ref": "#/$defs/L0"}, **{"$defs": {**BOMB, "L30": STRING}}), "50000 nodes"),
    "5000-levels-of-properties": (nested(5_000), ""),
    "5000-levels-of-data": (one({"enum": [DATA]}), ""),
    "python-object-in-itself": (LOOP, ""),
    "root-array": ({"type": "array", "items": STRING}, "array"),
    "root-null-or-string": ({"type": ["null", "string"]}, ""),
    "root-union-without-an-object": ({"anyOf": [STRING, {"type": "array"}]}, ""),
    "infinity": (one({"enum": [-math.inf]}), ""),
    "lone-surrogate": (one({"description": "\ud800"}), ""),
    "required-is-a-string": (one(STRING, required="p"), ""),
    "property-without-a-schema": (one(None), ""),
}
"""Schemas that no client could use, and a word that the reason has to say."""


@pytest.mark.requirement("FR-SCHEMA-003")
@pytest.mark.parametrize(("schema", "word"), REFUSED.values(), ids=REFUSED)
def test_a_refused_module_is_left_out_with_one_warning(schema: dict[str, Any], word: str, caplog: Caplog) -> None:
    bad = FunctionalModule(echo, input_schema=schema)
    tools = to_openai_tools(registry_of({"good.one": echo, "bad.module": bad, "good.two": echo}))
    assert [tool["function"]["name"] for tool in tools] == ["good-one", "good-two"]
    ((name, level, text),) = caplog.record_tuples
    assert (name, level) == ("apcore_mcp", logging.WARNING)
    assert "bad.module" in text
    assert word in text


class Greeting(BaseModel):
    name: str = Field(pattern=r"^\p{L}+$")


def test_a_module_with_an_illegal_schema_is_left_out_by_name(caplog: Caplog) -> None:
    """One client in three loses its whole list by one of them. What pydantic writes of a model, it can read."""
    modules: dict[str, Any] = {"good.one": FunctionalModule(echo, input_schema=Greeting)}
    words: dict[str, str] = {}
    for number, schema in enumerate(ILLEGAL):
        for side in ("input_schema", "output_schema"):
            name = f"bad.m{number}_{side}"
            words[name] = next(iter(schema))
            modules[name] = FunctionalModule(echo, **{side: one(schema)})
    assert [tool["function"]["name"] for tool in to_openai_tools(registry_of(modules))] == ["good-one"]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == len(words)
    for name, word in words.items():
        (text,) = [text for text in told if f"{name} " in text]
        assert word in text


@pytest.mark.parametrize(
    ("default", "kept"),
    [(math.inf, None), ([math.nan], None), (object(), None), (datetime.date(2026, 1, 2), "2026-01-02"), ((1,), [1])]
    + [(text, text) for text in ("x,NaN", "see [Infinity", ':-Infinity "x-sensitive":true')],
)
def test_a_default_that_json_cannot_say_is_dropped(default: Any, kept: Any) -> None:
    field = {"title": "D", "description": f"Such as {kept}"}
    schema = one({**field, "default": default, "examples": [default]})
    said = field if kept is None else {**field, "default": kept, "examples": [kept]}
    assert tool_of(FunctionalModule(echo, input_schema=schema)).input_schema == one(said)


# ---- What is served ----


@pytest.mark.requirement("FR-SCHEMA-001", "FR-SCHEMA-004")
async def test_the_served_list_has_the_schemas_of_openais() -> None:
    """FR-SCHEMA-004: `parameters` is identical to MCP's `inputSchema`."""
    declared = [copy.deepcopy(schema) for schema, _ in CONVERTED.values()]
    modules = {f"case.c{n}": FunctionalModule(echo, input_schema=schema) for n, schema in enumerate(declared)}
    registry = registry_of(modules)
    expected = {tool["function"]["name"]: tool["function"]["parameters"] for tool in to_openai_tools(registry)}
    async with connect(registry) as client:
        tools = (await client.list_tools()).tools
    assert {tool.name.replace(".", "-"): tool.input_schema for tool in tools} == expected
    assert len(tools) == len(CONVERTED)


async def test_no_depth_of_nesting_costs_the_list(mode: str) -> None:
    """Whatever limit there is, a schema at the edge of it must not take the list down at the client's end."""
    modules: dict[str, Any] = {
        f"{side}.m{levels}": FunctionalModule(echo, **{f"{side}_schema": nested(levels)})
        for levels in (30, *range(85, 105), 300)
        for side in ("input", "output")
    }
    async with connect(modules, mode=mode) as client:
        names = {*await listed(client)}
    assert {"input.m30", "output.m30"} <= names
    assert names.isdisjoint(["input.m300", "output.m300"])


FORMATS = {name: {**STRING, "format": name} for name in ("date-time", "time", "duration", "date", "email")}
ODD = {"type": "object", "properties": {"format": {"const": "time"}}, "default": {"format": "time"}}
OUTPUTS = {
    "empty": ({}, None),
    "array": ({"type": "array", "items": STRING}, None),
    "string": (STRING, None),
    "union_without_object": ({"anyOf": [STRING, {"type": "null"}]}, None),
    "object": (TITLED, TITLED),
    "no_type": ({"properties": {"p": STRING}}, SIMPLE),
    "closed": (one(STRING, additionalProperties=False), SIMPLE),
    "booleans": (one({"anyOf": [True, False]}), one({"anyOf": [{}, {}]})),
    "one_of": (one({"oneOf": [STRING, INTEGER], "not": NEVER}), one({"anyOf": [STRING, INTEGER]})),
    # What TypeScript clients would look for, or refuse without its format.
    "dialect": (one(STRING, **{"$schema": LATEST}), SIMPLE),
    "limits": (one({**STRING, "format": "date", "formatMinimum": "2020-01-01"}), SIMPLE),
    "references": (pointed({"items": TO_POINT}), one({"items": POINT})),
    "formats": (of(**FORMATS), of(**dict.fromkeys(FORMATS, STRING))),
    "tuple": (one({"prefixItems": [INTEGER], "items": STRING}), one({"prefixItems": [INTEGER], "items": {}})),
    "property_called_format": (one(ODD), one(ODD)),
}
KEYED = {**STRING, **MARK}
SECRETS = {
    "itself": one({**KEYED, "default": "S3CR3T", "example": "S3CR3T", "examples": ["S3CR3T"]}),
    "in-a-variant": one({"anyOf": [KEYED, {"type": "null"}], "default": "S3CR3T"}),
    "inside": one({**one(KEYED), "default": {"p": "S3CR3T"}}),
    "at-the-root": one(KEYED, examples=[{"p": "S3CR3T"}]),
    "behind-a-reference": one({"$ref": "#/$defs/Key", "default": "S3CR3T"}, **{"$defs": {"Key": KEYED}}),
}


@pytest.mark.parametrize("schema", SECRETS.values(), ids=SECRETS)
async def test_what_else_a_marked_value_may_be_is_never_listed(schema: dict[str, Any]) -> None:
    """A default may come from the environment of the server."""
    plain = of(**schema["properties"], q={**STRING, "default": "shown"})
    registry = registry_of({"t.key": FunctionalModule(echo, input_schema={**schema, **plain}, output_schema=schema)})
    async with connect(registry) as client:
        shown = (await client.list_tools()).model_dump_json(by_alias=True) + json.dumps(to_openai_tools(registry))
    assert "S3CR3T" not in shown
    assert "shown" in shown


@pytest.mark.requirement("FR-SCHEMA-005")
async def test_an_output_schema_that_promises_an_object_is_listed() -> None:
    declared = {name: copy.deepcopy(schema) for name, (schema, _) in OUTPUTS.items()}
    timed = one(FORMATS["time"])
    modules = {n: FunctionalModule(echo, input_schema=timed, output_schema=schema) for n, schema in declared.items()}
    async with connect(modules) as client:
        tools = (await client.list_tools()).tools
    assert {tool.name: tool.output_schema for tool in tools} == {n: expected for n, (_, expected) in OUTPUTS.items()}
    assert all(tool.input_schema == timed for tool in tools), "inputs keep their formats"


PATTERNS = {
    "date": {**STRING, "pattern": r"^\d{4}\-\d{2}$"},  # JavaScript's `u` flag takes no needless backslash
    "any_case": {**STRING, "pattern": "(?i)^a+$"},
    "mapped": {"type": "object", "patternProperties": {r"^\@": INTEGER}, "additionalProperties": STRING},
    "named": {"type": "object", "propertyNames": {"pattern": r"^\w\-"}},
    "refused": {"not": {"pattern": "^b"}},
    "either": {"oneOf": [{"pattern": "^a"}, {"pattern": "^b"}]},
    "held": {"if": {"pattern": "^b"}, "then": False},
    "counted": {"contains": {"pattern": "^b"}, "minContains": 0, "maxContains": 1},
    "unseen": {"patternProperties": {"^a": {}}, "unevaluatedProperties": False},
    "tuple": {"prefixItems": [INTEGER], "items": {"pattern": "^a"}},
}
MATCHING = {"date": "2026-01", "any_case": "AA", "mapped": {"@a": 1, "b": "c"}, "named": {"a-": 1}, "refused": "ab",
            "either": "a", "held": "a", "counted": ["a", "b"], "unseen": {"ab": 1}, "tuple": [1, "a"]}  # fmt: skip


async def test_an_output_schema_holds_no_pattern() -> None:
    """TypeScript clients compile each of them with the `u` flag when they list, and lose every tool by one failure."""
    declared = of(**PATTERNS) | {"required": [*PATTERNS]}
    assert Draft202012Validator(declared).is_valid(MATCHING)
    async with connect({"m.a": gives(MATCHING, input_schema=declared, output_schema=declared)}) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("m.a", MATCHING)
    assert tool.input_schema == check(declared), "inputs keep their patterns"
    assert result.structured_content == MATCHING
    assert tool.output_schema is not None
    assert tool.output_schema["required"] == [*PATTERNS]
    unwanted = {"pattern", "patternProperties", "not", "if", "then", "oneOf", "unevaluatedProperties"}
    assert [node for node in subschemas(tool.output_schema) if node.keys() & unwanted] == []


@pytest.mark.requirement("FR-SCHEMA-002", "NFR-REL-002")
@pytest.mark.parametrize(("sensitive", "redacts"), [(False, True), (True, False), (True, True)])
async def test_a_recursive_output_schema_costs_itself_only(sensitive: bool, redacts: bool, caplog: Caplog) -> None:
    """But its module where it marks something. Others are served, and it is told once."""
    tree = one(TO_ROOT, **(MARK if sensitive else {}))
    modules = {"m.tree": gives({"p": {"p": {}}}, output_schema=tree), "m.a": echo}
    async with connect(modules, redact_output=redacts) as client:
        assert (await client.call_tool("m.a", {"x": 1})).structured_content == {"x": 1}
        await client.list_tools()
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        result = await client.call_tool("m.tree", {})
    (warning,) = messages_logged(caplog)
    assert "m.tree" in warning
    assert "# -> #" in warning
    assert tools.keys() == ({"m.a"} if sensitive else {"m.a", "m.tree"})
    assert result.is_error is sensitive
    if not sensitive:
        assert tools["m.tree"].output_schema is None
        assert json.loads(text_of(result)) == {"p": {"p": {}}}


# ---- Models that contain themselves ----


class Tree(BaseModel):
    name: str
    branches: list[Tree] = []


class Where(BaseModel):
    kind: Literal["where"]
    field: str


class Both(BaseModel):
    kind: Literal["both"]
    of: list[Filter]


class Either(BaseModel):
    kind: Literal["either"]
    of: list[Filter]


Filter = Annotated[Where | Both | Either, Field(discriminator="kind")]


class Search(BaseModel):
    filter: Filter
    limit: int = 10


def plant(tree: Tree, times: int = 1) -> str:
    return tree.branches[0].branches[0].name * times


def leaf(name: Any) -> dict[str, Any]:
    return {"name": "a", "branches": [{"name": "b", "branches": [{"name": name}]}]}


TREE: dict[str, Any] = {"name": STRING, "branches": {"type": "array", "items": {"$ref": "#"}}}


@pytest.mark.parametrize("validate_inputs", [False, True])
async def test_every_depth_is_checked_of_a_model_that_contains_itself(validate_inputs: bool) -> None:
    both = FunctionalModule(echo, input_schema=Tree, output_schema=Tree)
    modules = {"t.model": both, "t.dict": FunctionalModule(echo, input_schema=of(**TREE))}
    modules["t.function"] = FunctionModule(plant, "t.function")
    async with connect(modules, validate_inputs=validate_inputs) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        for name in modules:
            arguments = {"tree": leaf("c")} if name == "t.function" else leaf("c")
            given = success_text(await client.call_tool(name, arguments))
            assert json.loads(given)["result"] == "c" if name == "t.function" else '"c"' in given
            wrong = {"tree": leaf(3)} if name == "t.function" else leaf(3)
            refused = await client.call_tool(name, wrong)
            assert refused.is_error
            assert "branches.0.branches.0.name: " in text_of(refused)
    assert tools["t.model"].output_schema is None, "a client could not check it"
    branches = tools["t.model"].input_schema["properties"]["branches"]
    assert branches == {"type": "array", "items": again("Tree"), "default": []}
    assert tools["t.function"].input_schema["properties"]["tree"]["properties"]["branches"] == branches


def test_a_filter_that_nests_accepts_what_its_model_does(caplog: Caplog) -> None:
    """Its kinds would multiply; and what fits one kind fits any object, so that no schema may ask for exactly one."""
    where = {"kind": "where", "field": "a"}
    nested_filter = {"kind": "both", "of": [where, {"kind": "either", "of": [where, {"kind": "both", "of": [where]}]}]}
    Search.model_validate({"filter": nested_filter})
    registry = registry_of({"t.search": FunctionalModule(echo, input_schema=Search)})
    (tool,) = to_openai_tools(registry)
    parameters = tool["function"]["parameters"]
    assert Draft202012Validator(parameters).is_valid({"filter": nested_filter})
    assert not Draft202012Validator(parameters).is_valid({"filter": {"kind": "both"}})
    assert json.dumps(parameters).count("another Both, as above") == 3
    assert not caplog.records
    to_openai_tools(registry, strict=True)
    (warning,) = messages_logged(caplog)
    assert "filter.anyOf.1.of.items.anyOf.1: additionalProperties, of which a model can send none" in warning


# ---- Real models ----


class Item(BaseModel):
    item_id: int


class Page(BaseModel, Generic[T]):
    items: list[T]


class Titled(BaseModel):
    model_config = ConfigDict(title="An order")
    order_id: int
    customerName: str = Field(title="Who orders")
    title: str
    first: Item
    pages: Page[Item] | None = None
    shipped_on: str = Field("", alias="shippedOn")


class Plain(Titled):
    model_config = ConfigDict(title=None)


def titles_of(schema: Any) -> list[str]:
    return [part["title"] for part in subschemas(schema) if isinstance(part.get("title"), str)]


def without_titles(schema: Any) -> Any:
    untitled = copy.deepcopy(schema)
    for part in subschemas(untitled):
        if isinstance(part.get("title"), str):
            del part["title"]
    return untitled


async def test_titles_that_pydantic_makes_are_left_out() -> None:
    modules = {
        "t.titled": FunctionalModule(echo, input_schema=Titled, output_schema=Titled),
        "t.plain": FunctionalModule(echo, input_schema=Plain, output_schema=Item),
        "t.dict": FunctionalModule(echo, input_schema=Plain.model_json_schema()),
    }
    async with connect(modules) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert sorted(titles_of(tools["t.titled"].input_schema)) == ["An order", "Who orders"]
    assert titles_of(tools["t.titled"].output_schema) in ([], ["An order", "Who orders"])
    assert titles_of(tools["t.plain"].input_schema) == ["Who orders"]
    assert titles_of(tools["t.plain"].output_schema) == []
    assert tools["t.plain"].input_schema["properties"]["title"] == {"type": "string"}
    assert len(titles_of(tools["t.dict"].input_schema)) > 5, "an author's own, as FR-SCHEMA-001 has it"


@pytest.mark.requirement("FR-SCHEMA-006")
@settings(QUICK, max_examples=20)
@given(st.data())
def test_the_schema_of_a_model_accepts_the_same_values(data: st.DataObject) -> None:
    model, values, _ = data.draw(models(maps=True))
    declared = model.model_json_schema()
    before, after = Draft202012Validator(declared), Draft202012Validator(check(declared))
    registry = registry_of({"a.model": FunctionalModule(echo, input_schema=model)})
    assert to_openai_tools(registry)[0]["function"]["parameters"] == without_titles(after.schema)
    for _ in range(4):
        value = data.draw(values).plain
        assert before.is_valid(value)
        assert after.is_valid(value)
        changed = data.draw(mutations(value))
        if isinstance(changed, dict):  # "type": "object" is added to a root that is only a union
            assert before.is_valid(changed) == after.is_valid(changed), changed
