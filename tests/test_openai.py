"""Modules as OpenAI tool definitions, and a model's call back as a module's inputs.

Demanded by FR-OPENAI-001 to -007, FR-ANNOT-007, FR-EXEC-006 and FR-FILTER-003.
"""

from __future__ import annotations

import base64
import copy
import dataclasses
import datetime
import hashlib
import json
import logging
import re
import subprocess
import sys
from typing import Annotated, Any, Literal

import pytest
from apcore import ACL, ACLRule, Executor, ModuleAnnotations, Registry
from apcore.approval import AlwaysDenyHandler, AutoApproveHandler
from apcore.context import Identity
from conftest import ANYTHING, ROOT, FunctionalModule, connect, echo, registry_of
from generated import QUICK, models
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field
from support import UNASKED, messages_logged, subschemas

from apcore_mcp import from_openai_call, from_openai_name, run_openai_call, to_openai_tools

INTEGER, STRING, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}


def accepting(input_schema: Any) -> FunctionalModule:
    return FunctionalModule(echo, input_schema=input_schema)


def names_of(tools: list[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


# ---- The list ----


@pytest.mark.requirement("FR-OPENAI-001", "FR-EXEC-006")
@pytest.mark.parametrize("count", [0, 1, 100])
def test_every_module_becomes_one_function(count: int) -> None:
    registry = registry_of({f"m{i:03}.run": accepting({"properties": {"x": INTEGER}}) for i in range(count)})
    parameters = {"type": "object", "properties": {"x": INTEGER}}
    function = {"description": "A module of a test", "parameters": parameters}
    expected = [{"type": "function", "function": {"name": f"m{i:03}-run", **function}} for i in range(count)]
    assert to_openai_tools(registry) == expected
    assert to_openai_tools(Executor(registry)) == to_openai_tools(registry)


@pytest.mark.requirement("FR-OPENAI-001")
def test_the_definitions_are_made_of_plain_built_in_types() -> None:
    """A module may well have put subclasses and tuples into its schema."""

    class Text(str):
        pass

    schema = {"properties": {Text("p"): {"enum": [Text("a"), 1, 1.5, True, None], "default": (1, Text("b"))}}}
    for strict in (False, True):
        (tool,) = to_openai_tools(registry_of({"m.a": accepting(schema)}), strict=strict, embed_annotations=True)
        assert tool == json.loads(json.dumps(tool))
        values = tool["function"]["parameters"]["properties"]["p"]["enum"]
        assert [type(value) for value in values] == [str, int, float, bool, type(None)]


@pytest.mark.parametrize("source", ["./extensions", None, {}, Registry], ids=["str", "NoneType", "dict", "type"])
def test_neither_registry_nor_executor_is_a_type_error(source: Any) -> None:
    words = re.escape(f"Expected Registry or Executor instance, got {type(source).__name__}")
    with pytest.raises(TypeError, match=words):
        to_openai_tools(source)
    with pytest.raises(TypeError, match=words):
        from_openai_call(source, "m-a", "{}")


TAGGED = {"api.users.get": ["public", "read"], "api.users.set": ["public"], "apis.other": ["public", "read"], "z.a": []}


@pytest.mark.requirement("FR-OPENAI-006", "FR-OPENAI-007")
@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        pytest.param({"tags": [], "prefix": None}, [i.replace(".", "-") for i in TAGGED], id="none"),
        pytest.param({"tags": ["read", "public"]}, ["api-users-get", "apis-other"], id="all-of-two-tags"),
        pytest.param({"prefix": "api."}, ["api-users-get", "api-users-set"], id="prefix"),
        pytest.param({"tags": ["read"], "prefix": "nonexistent."}, [], id="unknown"),
        pytest.param({"tags": ["read"], "prefix": "api."}, ["api-users-get"], id="both"),
    ],
)
def test_tags_and_prefix_choose_modules(filters: dict[str, Any], expected: list[str]) -> None:
    registry = registry_of({name: FunctionalModule(echo, tags=tags) for name, tags in TAGGED.items()})
    assert names_of(to_openai_tools(registry, **filters)) == expected


@pytest.mark.parametrize(
    ("filters", "words"),
    [({"tags": ["a", ""]}, "Tag values must not be empty"), ({"prefix": ""}, "prefix must not be empty")],
)
def test_a_wrong_filter_is_refused(filters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        to_openai_tools(registry_of({"m.a": echo}), **filters)


NO_SERVER = """
import sys
from importlib.abc import MetaPathFinder
class Block(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("mcp", "mcp_types", "uvicorn", "starlette", "openai"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Block())
from apcore import Registry
from apcore_mcp import from_openai_call, to_openai_tools
class Module:
    input_schema = {"type": "object", "properties": {"w": {"type": "integer"}}}
    output_schema = {"type": "object"}
    description = "D"
    def execute(self, inputs, context):
        return {}
registry = Registry()
registry.register("image.resize", Module())
for strict in (False, True):
    (tool,) = to_openai_tools(registry, strict=strict, embed_annotations=True)
assert from_openai_call(registry, tool["function"]["name"], '{"w": null}') == ("image.resize", {})
"""


@pytest.mark.requirement("FR-OPENAI-005")
def test_definitions_are_made_without_openai_and_without_a_server_stack() -> None:
    done = subprocess.run([sys.executable, "-c", NO_SERVER], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


# ---- Names ----


@pytest.mark.requirement("FR-OPENAI-002")
@pytest.mark.parametrize(
    ("module_id", "name"),
    [
        pytest.param("simple", "simple", id="no-dot"),
        pytest.param("comfyui.work_flow.execute", "comfyui-work_flow-execute", id="two-dots"),
        pytest.param("a" * 31 + "." + "b" * 32, "a" * 31 + "-" + "b" * 32, id="64-characters"),
        pytest.param("a" * 55 + ".b0123456", "a" * 55 + "-b0123456", id="64-characters-that-look-shortened"),
    ],
)
def test_dots_become_hyphens_and_come_back(module_id: str, name: str) -> None:
    assert names_of(to_openai_tools(registry_of({module_id: echo}))) == [name]
    assert from_openai_name(name) == module_id
    assert from_openai_name(name, registry_of({})) == module_id


class Hyphened(Registry):
    """A registry that takes an id which apcore's own refuses."""

    def list(self, *_: Any, **__: Any) -> list[str]:
        return ["my-module.a"]

    def get(self, module_id: str, version_hint: str | None = None) -> Any:
        return super().get(module_id.replace("-", "_"), version_hint)

    def get_definition(self, module_id: str, version_hint: str | None = None) -> Any:
        definition: Any = super().get_definition(module_id.replace("-", "_"), version_hint)
        return dataclasses.replace(definition, module_id=module_id)


@pytest.mark.requirement("FR-OPENAI-002")
def test_an_id_with_a_hyphen_is_refused_by_name() -> None:
    """Nobody could tell what it stands for when it comes back."""
    registry = Hyphened()
    registry.register("my_module.a", FunctionalModule(echo))
    with pytest.raises(ValueError, match=r"hyphens.*my-module\.a"):
        to_openai_tools(registry)


SHORT = hashlib.sha256(b"z" * 80).hexdigest()[:8]


async def test_an_id_past_64_characters_gets_a_short_name_that_is_its_own() -> None:
    start = "very.long_" + "x" * 70
    ids = sorted([start + "a", start + "b", start + ".c", "y" * 65, "y" * 192])
    registry = registry_of(dict.fromkeys(ids, echo))
    names = names_of(to_openai_tools(registry))
    assert len(set(names)) == len(ids)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    assert [from_openai_name(name, registry) for name in names] == ids
    assert [from_openai_call(registry, name, "{}") for name in names] == [(module_id, {}) for module_id in ids]
    assert names_of(to_openai_tools(registry_of({"z" * 80: echo}))) == ["z" * 54 + "-0" + SHORT], "in any process"
    for missing in (None, registry_of({"m.a": echo, ids[1]: echo})):
        with pytest.raises(ValueError, match=re.escape(names[0])):
            from_openai_name(names[0], missing)
    async with connect(registry, tool_names="portable") as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == names


# ---- Annotations ----


@pytest.mark.requirement("FR-ANNOT-007", "FR-OPENAI-004")
@pytest.mark.parametrize(
    ("annotations", "suffix"),
    [
        pytest.param(ModuleAnnotations(), "", id="defaults"),
        pytest.param(ModuleAnnotations(readonly=True, idempotent=True), "readonly=true, idempotent=true", id="two"),
        pytest.param(
            ModuleAnnotations(True, True, True, True, False),
            "readonly=true, destructive=true, idempotent=true, requires_approval=true, open_world=false",
            id="all-five",
        ),
        pytest.param(ModuleAnnotations(streaming=False, cacheable=True, paginated=True), "", id="others-are-not-told"),
    ],
)
def test_the_description_tells_the_annotations_that_are_not_the_default(
    annotations: ModuleAnnotations, suffix: str
) -> None:
    registry = registry_of({"m.a": FunctionalModule(echo, annotations=annotations, description="Text.")})

    def description(**options: Any) -> str:
        (tool,) = to_openai_tools(registry, **options)
        return str(tool["function"]["description"])

    assert description() == description(embed_annotations=False) == "Text."
    assert description(embed_annotations=True) == "Text." + (f"\n\n[Annotations: {suffix}]" if suffix else "")


# ---- Strict mode ----


def strict_parameters(schema: Any) -> dict[str, Any]:
    """The parameters in strict mode, after proof of what holds for all of them at every depth."""
    before = copy.deepcopy(schema)
    (tool,) = to_openai_tools(registry_of({"some.module": accepting(schema)}), strict=True)
    function = tool["function"]
    parameters: dict[str, Any] = function["parameters"]
    assert schema == before, "the module's own schema was changed"
    assert function["strict"] is True
    Draft202012Validator.check_schema(parameters)
    for node in subschemas(parameters):
        assert not node.keys() & {"default", "title"}
        assert not [keyword for keyword in node if keyword.startswith("x-")]
        if "properties" in node or "object" in str(node.get("type", "")):
            assert node["additionalProperties"] is False
            assert node["required"] == sorted(node["properties"])
    return parameters


@pytest.mark.requirement("FR-OPENAI-003")
def test_strict_mode_follows_the_worked_example() -> None:
    """The worked example of the specification, but that the default, which null stands for, is told."""
    resize = {
        "type": "object",
        "title": "ImageResizeInput",
        "properties": {
            "width": {"type": "integer", "description": "Target width in pixels"},
            "height": {"type": "integer", "description": "Target height in pixels"},
            "format": {"type": "string", "default": "png", "enum": ["png", "jpg", "webp"]},
        },
        "required": ["width", "height"],
    }
    assert to_openai_tools(registry_of({"m.a": accepting(resize)}))[0]["function"] == {
        "name": "m-a",
        "description": "A module of a test",
        "parameters": resize,
    }
    assert strict_parameters(resize) == {
        "type": "object",
        "properties": {
            "width": {"type": "integer", "description": "Target width in pixels"},
            "height": {"type": "integer", "description": "Target height in pixels"},
            "format": {
                "type": ["string", "null"],
                "enum": ["png", "jpg", "webp", None],
                "description": '(default: "png")',
            },
        },
        "required": ["format", "height", "width"],
        "additionalProperties": False,
    }


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object", "properties": properties, "required": sorted(properties), "additionalProperties": False
    }  # fmt: skip


PART = {"type": "object", "properties": {"b": {**INTEGER, "default": 1}, "a": STRING}, "required": ["a"], "title": "T"}
PART_CLOSED = closed({"a": STRING, "b": {"type": ["integer", "null"], "description": "(default: 1)"}})


@pytest.mark.requirement("FR-OPENAI-003")
@pytest.mark.parametrize(
    ("properties", "required", "expected"),
    [
        pytest.param({"p": {"type": ["integer", "string"]}}, [], {"p": {"type": ["integer", "string", "null"]}},
                     id="optional-of-two-types"),
        pytest.param({"p": {"anyOf": [STRING, NULL], "default": None, "title": "P"}}, [],
                     {"p": {"anyOf": [STRING, NULL]}}, id="pydantic-optional"),
        pytest.param({"p": {"anyOf": [STRING, INTEGER]}}, [], {"p": {"anyOf": [{"anyOf": [STRING, INTEGER]}, NULL]}},
                     id="optional-union"),
        pytest.param({"p": {}}, [], {"p": {}}, id="anything"),
        pytest.param({"p": {"type": "array", "items": PART}}, ["p"], {"p": {"type": "array", "items": PART_CLOSED}},
                     id="array-of-objects"),
        pytest.param({"p": {"oneOf": [PART, NULL]}}, ["p"], {"p": {"anyOf": [PART_CLOSED, NULL]}}, id="oneOf"),
        pytest.param({"p": {"oneOf": [INTEGER, STRING], "description": "D"}}, [],
                     {"p": {"anyOf": [{"anyOf": [INTEGER, STRING], "description": "D"}, NULL]}}, id="optional-oneOf"),
        pytest.param({"p": {**STRING, "minLength": 1, "format": "uri"}}, [],
                     {"p": {"type": ["string", "null"], "description": "(minLength: 1, format: uri)"}},
                     id="told-alone"),
        pytest.param({"p": {**STRING, "pattern": "^(?!-)", "maxLength": 40, "description": "Where."}}, ["p"],
                     {"p": {**STRING, "description": "Where. (pattern: ^(?!-), maxLength: 40)"}}, id="told-in-words"),
        pytest.param({"p": {**STRING, "format": "date", "pattern": "^2"}}, ["p"],
                     {"p": {**STRING, "format": "date", "pattern": "^2"}}, id="what-openai-takes"),
        pytest.param({"p": {"type": "array", "contains": {"const": "a"}, "minItems": 1}}, ["p"],
                     {"p": {"type": "array", "items": {}, "minItems": 1, "description": '(contains: {"const":"a"})'}},
                     id="told-as-json"),
        pytest.param({"p": {"anyOf": [INTEGER, NULL], "default": 1}}, [], {"p": {"anyOf": [INTEGER, NULL]}},
                     id="default-that-null-is-not"),
        pytest.param({"p": {"allOf": [PART]}}, ["p"], {"p": {"allOf": [PART_CLOSED]}}, id="allOf"),
        pytest.param({"p": {"type": "object", "additionalProperties": False}}, ["p"], {"p": closed({})},
                     id="closed-already"),
        pytest.param({}, [], {}, id="nothing"),
        pytest.param({"default": STRING, "title": PART, "x-y": STRING, "properties": STRING, "required": STRING},
                     ["default", "title", "x-y", "properties", "required"],
                     {"default": STRING, "title": PART_CLOSED, "x-y": STRING, "properties": STRING, "required": STRING},
                     id="properties-called-like-keywords"),
        pytest.param({"p": {**STRING, "x-sensitive": True, "x-unit": {"default": 1}, "description": "D"}}, ["p"],
                     {"p": {**STRING, "description": "D"}}, id="extensions"),
        pytest.param({"p": {"enum": [{"default": 1, "title": "T", "x-y": 2}]}}, ["p"],
                     {"p": {"enum": [{"default": 1, "title": "T", "x-y": 2}]}}, id="data-is-not-stripped"),
    ],
)  # fmt: skip
def test_strict_mode_requires_every_property_and_closes_every_object(
    properties: dict[str, Any], required: list[str], expected: dict[str, Any]
) -> None:
    assert strict_parameters({"type": "object", "properties": properties, "required": required}) == closed(expected)


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        pytest.param({"const": "a"}, ["a", None], ["b", 1], id="const"),
        pytest.param({"enum": ["a", 1]}, ["a", 1, None], ["b"], id="enum"),
        pytest.param({"type": ["string", "null"], "enum": ["a"]}, ["a", None], ["b"], id="enum-that-forgot-null"),
        pytest.param({"anyOf": [{**STRING, "enum": ["a"]}, INTEGER]}, ["a", 1, None], ["b"], id="union-with-enum"),
        pytest.param({"type": "string", "anyOf": [{"pattern": "^a"}]}, ["ab", None], ["b", 1], id="type-and-union"),
        pytest.param({"allOf": [INTEGER, {"minimum": 1}]}, [1, None], [0, "a"], id="allOf"),
        pytest.param({"not": NULL}, [1, None], [], id="not"),
        pytest.param(PART, [{"a": "", "b": None}, {"a": "", "b": 1}, None], [{"a": ""}, {"a": None, "b": 1}],
                     id="object"),
    ],
)  # fmt: skip
def test_an_optional_property_accepts_what_it_did_and_null(
    schema: dict[str, Any], accepted: list[Any], refused: list[Any]
) -> None:
    validator = Draft202012Validator(strict_parameters({"type": "object", "properties": {"p": schema}}))
    assert [value for value in accepted + refused if validator.is_valid({"p": value})] == accepted
    assert not validator.is_valid({})


UNSAYABLE: list[Any] = [
    ({"type": "object", "additionalProperties": True}, "additionalProperties"),
    ({"type": "array", "items": {"additionalProperties": {}}}, "additionalProperties"),
    ({"allOf": [INTEGER]}, "allOf"),
    ({"not": STRING}, "not"),
    ({"type": "array", "prefixItems": [INTEGER]}, "prefixItems"),
    (None, "anyOf"),
    ({}, "p: "),
    ({"description": "Whatever it is", "title": "P", "default": 1}, "p: "),
    ({"type": "array"}, "p: "),
    ({"type": "array", "items": {}}, "p"),
    ({"type": ["array", "null"]}, "p: "),
    ({"anyOf": [{"type": "array", "items": {"type": "array", "items": True}}, NULL]}, "any type"),
    ({"type": "object", "properties": {"q": True}}, "any type"),
    ({"type": "object"}, "additionalProperties"),
    ({"type": "object", "patternProperties": {"^a": INTEGER}}, "patternProperties"),
]


def test_what_strict_mode_cannot_say_is_warned_of_per_tool(caplog: pytest.LogCaptureFixture) -> None:
    modules: dict[str, Any] = {}
    for number, (schema, _) in enumerate(UNSAYABLE):
        whole = {"type": "object", "properties": {"p": schema}} if schema is not None else {"anyOf": [PART, PART]}
        modules[f"odd.m{number}"] = accepting(whole)
    told = {**STRING, "minLength": 1, "format": "uri", "oneOf": [STRING, {**STRING, "maxLength": 3}]}
    # Properties with the names of keywords, and data that looks like a schema.
    fine = {
        "not": PART, "additionalProperties": STRING, "x": {"enum": [{"additionalProperties": True}]}, "y": told,
        "z": {"type": "object", "additionalProperties": False}, "items": {"const": []},
    }  # fmt: skip
    modules |= {"some.fine": accepting({"type": "object", "properties": fine}), "without.any": accepting(ANYTHING)}
    registry = registry_of(modules)
    with caplog.at_level(logging.WARNING):
        to_openai_tools(registry)
        assert messages_logged(caplog, None) == [], "only strict mode warns"
        tools = to_openai_tools(registry, strict=True)
    assert [tool["function"]["strict"] for tool in tools] == [True] * len(modules)
    warnings = {line.split("'")[1]: line for line in messages_logged(caplog, None)}
    assert [*warnings] == sorted([*modules][: len(UNSAYABLE)])
    for number, (_, words) in enumerate(UNSAYABLE):
        assert words in warnings[f"odd.m{number}"]


# ---- A model's call back ----

CALLED = {
    "type": "object",
    "properties": {
        "need": INTEGER,
        "opt": INTEGER,
        "free": {"anyOf": [INTEGER, NULL]},
        "any": {},
        "part": {"type": "object", "properties": {"deep": PART, "maybe": {"type": ["string", "null"]}}},
        "union": {"anyOf": [NULL, {"type": "array", "items": PART}, PART]},
        "tuple": {"type": "array", "prefixItems": [STRING, PART], "items": {"type": ["integer", "null"]}},
        "places": {"type": "array", "prefixItems": [PART, {"type": "object", "properties": {"b": {"enum": [None]}}}]},
        "keys": {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": ["integer", "null"]}},
        "map": {"type": "object", "patternProperties": {"^x_": STRING}, "additionalProperties": PART},
        "first": {"anyOf": [{"properties": {"x": {"type": ["integer", "null"]}}}, {"properties": {"x": INTEGER}}]},
        "both": {"allOf": [PART, {"properties": {"c": STRING}}]},
        "either": {"anyOf": [
            {"type": "object", "properties": {"x": INTEGER}},
            {"type": "object", "properties": {"y": INTEGER, "z": STRING}},
        ]},
        # Both inner objects fit the same value.
        "nested": {"anyOf": [NULL, {"type": "object", "properties": {
            "in": {"oneOf": [{"properties": {"x": INTEGER}}, {"properties": {"x": STRING}}]}, "of": INTEGER,
        }}]},
        # Maps beside objects: what fits is told by the values as well.
        "mapped": {"anyOf": [
            {"type": "object", "additionalProperties": {"type": ["integer", "null"]}},
            {"type": "object", "properties": {"a": STRING, "b": STRING}},
        ]},
        "open": {"anyOf": [
            {"type": "object", "properties": {"a": STRING}, "additionalProperties": True},
            {"type": "object", "additionalProperties": INTEGER},
        ]},
    },
    "required": ["need"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "inputs"),
    [
        pytest.param('{"need": 1, "opt": null}', {"need": 1}, id="forbidden"),
        pytest.param('{"need": 1, "free": null, "any": null}', {"need": 1, "free": None, "any": None}, id="allowed"),
        pytest.param('{"need": null}', {}, id="required"),
        pytest.param('{"other": null}', {"other": None}, id="unknown-stays-for-the-module-to-judge"),
        pytest.param({"need": 1, "opt": 0, "any": [None]}, {"need": 1, "opt": 0, "any": [None]}, id="dict-no-nulls"),
        pytest.param({"part": {"deep": {"a": "", "b": None}, "maybe": None}},
                     {"part": {"deep": {"a": ""}, "maybe": None}}, id="nested"),
        pytest.param({"part": {"deep": None}}, {"part": {}}, id="nested-object-itself"),
        pytest.param({"union": [{"a": "", "b": None}]}, {"union": [{"a": ""}]}, id="in-an-array-in-a-branch"),
        pytest.param({"union": None}, {"union": None}, id="the-null-branch"),
        pytest.param({"both": {"a": "", "b": None, "c": None}}, {"both": {"a": ""}}, id="in-allOf"),
        pytest.param({"tuple": ["a", {"a": "", "b": None}, None]}, {"tuple": ["a", {"a": ""}, None]}, id="in-a-tuple"),
        pytest.param({"places": [{"a": "", "b": None}, {"b": None}]}, {"places": [{"a": ""}, {"b": None}]},
                     id="in-each-place-its-own"),
        pytest.param({"keys": {"a": None, "b": 1}}, {"keys": {"a": None, "b": 1}}, id="in-a-map-of-few-names"),
        pytest.param({"map": {"k": {"a": "", "b": None}, "x_k": None}}, {"map": {"k": {"a": ""}}}, id="in-a-map"),
        pytest.param({"first": {"x": None}}, {"first": {"x": None}}, id="in-the-first-that-fits"),
        pytest.param({"either": {"x": None}}, {"either": {}}, id="first-of-two-open-objects"),
        pytest.param({"either": {"y": None, "z": "q"}}, {"either": {"z": "q"}}, id="second-of-two-open-objects"),
        pytest.param({"nested": {"in": {"x": None}, "of": None}}, {"nested": {"in": {}}}, id="in-one-of-two-that-fit"),
        pytest.param({"mapped": {"a": "", "b": None}}, {"mapped": {"a": ""}}, id="in-an-object-beside-a-map"),
        pytest.param({"mapped": {"a": 1, "b": None}}, {"mapped": {"a": 1, "b": None}}, id="in-a-map-of-nulls"),
        pytest.param({"open": {"a": "", "x": None}}, {"open": {"a": "", "x": None}}, id="in-an-open-object"),
        pytest.param("", {}, id="empty-text"),
    ],
)  # fmt: skip
def test_the_nulls_that_stand_for_absence_are_dropped(arguments: str | dict[str, Any], inputs: dict[str, Any]) -> None:
    registry = registry_of({"m.a": accepting(CALLED)})
    before = copy.deepcopy(arguments)
    assert from_openai_call(registry, "m-a", arguments) == ("m.a", inputs)
    assert arguments == before


@pytest.mark.parametrize(
    "arguments", ["{", "[]", '{"x": NaN}', "[" * 100_000, None], ids=["open", "list", "nan", "deep", "None"]
)
def test_arguments_that_are_no_json_object_are_a_value_error(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"m-a|line 1 column"):
        from_openai_call(registry_of({"m.a": echo}), "m-a", arguments)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("leaf", ["a", 5], ids=["right", "wrong"])
def test_a_call_is_read_in_no_more_time_than_its_schema_is_big(leaf: Any) -> None:
    """Unions three wide and seven deep, of which a slightly wrong call fits none, a pattern that hangs, a long list."""
    schema: dict[str, Any] = {"type": "object", "properties": {"leaf": STRING, "opt": INTEGER}, "required": ["leaf"]}
    sent: dict[str, Any] = {"leaf": leaf, "opt": None}
    for _ in range(6):
        tagged = [{"type": "object", "properties": {"in": schema, f"b{i}": STRING}} for i in range(3)]
        schema = {"type": "object", "properties": {"a": {"anyOf": tagged}}}
        sent = {"a": {"in": sent, "b2": None}}
    text = {**STRING, "pattern": r"^(\w+\s?)+$"}
    named = {"anyOf": [{"properties": {"n": text}, "patternProperties": {text["pattern"]: INTEGER}}, {"items": text}]}
    rows = {"items": {"anyOf": [{"type": "object", "properties": {f"p{i}": STRING for i in range(200)}}, NULL]}}
    whole = {"type": "object", "properties": {"deep": schema, "named": named, "rows": rows}}
    hanging = "a" * 40 + "!"
    given = {"deep": sent, "named": {"n": hanging, hanging: 1}, "rows": [{}] * 10_000}
    _, inputs = from_openai_call(registry_of({"m.a": accepting(whole)}), "m-a", given)
    assert leaf == 5 or "null" not in json.dumps(inputs)


def chained(depth: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A union inside a union, `depth` times: its schema, a call as strict mode has it, and the inputs that it means."""
    schema, sent, inputs = PART, {"a": "", "b": None}, {"a": ""}
    for _ in range(depth):
        other = {"type": "object", "properties": {"in": {"type": "object", "properties": {"z": STRING}}}}
        schema = {"type": "object", "properties": {"in": {"anyOf": [other, schema]}, "b": STRING}, "required": ["in"]}
        sent = {"in": sent, "b": None}
        inputs = {"in": inputs}
    return schema, sent, inputs


def ambiguous(depth: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Unions whose branches differ in their innermost value alone; the last branch of each is the one that fits."""
    fitting: dict[str, Any] = {"type": "object", "properties": {"x": INTEGER, "y": STRING}}
    wrong: dict[str, Any] = {"type": "object", "properties": {"x": STRING, "y": STRING}}
    sent, inputs = {"x": 1, "y": None}, {"x": 1}
    for _ in range(depth):
        fitting = {"type": "object", "properties": {"in": {"oneOf": [wrong, fitting]}}}
        wrong = {"type": "object", "properties": {"in": {"anyOf": [wrong, wrong]}}}
        sent, inputs = {"in": sent}, {"in": inputs}
    return fitting, sent, inputs


def listed(schema: dict[str, Any], length: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """A list of parts that differ, under an optional property with `schema`."""
    parts = [{"a": str(number)} for number in range(length)]
    schema = {"anyOf": [{"type": "array", "items": PART, **schema}, NULL]}
    sent = {"list": [{**part, "b": None} for part in parts]}
    return {"type": "object", "properties": {"list": schema}}, sent, {"list": parts}


def numbered(number: float) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """An integer that no float holds, in an optional multiple of `number`."""
    schema = {"anyOf": [{"type": "number", "multipleOf": number}, NULL]}
    return {"type": "object", "properties": {"n": schema}}, {"n": 10**400}, {"n": 10**400}


FIELDS = {f"f{number}": {"type": "string"} for number in range(8)}
WIDE = [{"type": "object", "properties": {**FIELDS, "kind": {"const": number}}} for number in range(30)]


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("schema", "sent", "inputs"),
    [
        pytest.param(*chained(8), id="8-unions-deep"),
        pytest.param(*chained(30), id="30-unions-deep"),
        pytest.param(*ambiguous(9), id="9-deep-and-wrong-in-the-depth"),
        pytest.param(*listed({"uniqueItems": True}, 2_000), id="a-set-of-models"),
        pytest.param(*listed({"items": {"anyOf": [*WIDE, PART]}}, 2_000), id="31-branches"),
        pytest.param(*numbered(0.1), id="a-multiple-of-a-fraction"),
        pytest.param(*numbered(7), id="a-multiple"),
    ],
)
def test_every_branch_of_a_union_is_read_once(
    schema: dict[str, Any], sent: dict[str, Any], inputs: dict[str, Any]
) -> None:
    """Each level of unions may add to the time, but none may multiply it; and no number ends in an OverflowError."""
    assert from_openai_call(registry_of({"m.a": accepting(schema)}), "m-a", sent) == ("m.a", inputs)


@pytest.mark.parametrize("name", ["m-unknown", "m-hidden", "m-input", "m-output", "m", ""])
def test_a_call_of_what_was_never_offered_is_a_value_error(name: str) -> None:
    dangling = {"type": "object", "properties": {"a": {"$ref": "#/$defs/None"}}}
    modules = {
        "m.a": echo,
        "m.hidden": FunctionalModule(echo, annotations=ModuleAnnotations(discoverable=False)),
        "m.input": FunctionalModule(echo, input_schema=dangling),
        "m.output": FunctionalModule(echo, output_schema=dangling),
    }
    registry = registry_of(modules)
    assert names_of(to_openai_tools(registry)) == ["m-a"]
    assert from_openai_call(registry, "m-a", "{}") == ("m.a", {})
    with pytest.raises(ValueError, match=re.escape(repr(name))):
        from_openai_call(registry, name, "{}")


@settings(QUICK, max_examples=25)
@given(st.data())
def test_what_a_model_sends_in_strict_mode_comes_back_as_the_inputs_it_meant(data: st.DataObject) -> None:
    model, values, _ = data.draw(models())
    executor = Executor(registry_of({"a.model": accepting(model)}))
    parameters = strict_parameters(model.model_json_schema())
    for _ in range(3):
        value = data.draw(values)
        assert Draft202012Validator(parameters).is_valid(value.sent), "strict mode refuses what it asked for"
        module_id, inputs = from_openai_call(executor, "a-model", json.dumps(value.sent))
        assert inputs == value.back
        assert executor.call(module_id, inputs) == value.back
        assert model.model_validate(inputs) == model.model_validate(value.plain)


# ---- A model's call, run ----


def running(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    if inputs.get("fails"):
        raise RuntimeError("/etc/passwd")
    moment = datetime.datetime(2025, 1, 31, 12, 0)
    return {"at": moment, "raw": b"\x00\xff", "token": "S3CR3T", "given": dict(inputs)}


RUN = {"type": "object", "properties": {"x": INTEGER, "fails": {"type": "boolean"}}}
GIVEN = {"type": "object", "properties": {"token": {**STRING, "x-sensitive": True}}}


async def test_a_model_is_told_the_result_as_an_mcp_client_is() -> None:
    module = FunctionalModule(running, input_schema=RUN, output_schema=GIVEN)
    registry = registry_of({"m.run": module})
    for source in (registry, Executor(registry)):
        told = await run_openai_call(source, "m-run", '{"x": 1, "fails": null}')
        assert json.loads(told) == dict.fromkeys(("at", "raw", "token", "given"), "***REDACTED***")
    async with connect(registry) as client:
        (part,) = (await client.call_tool("m.run", {"x": 1})).content
    assert part.type == "text"
    assert told == part.text


async def test_a_model_reads_text_files_and_is_told_of_others_in_a_line() -> None:
    """Or sees them, in the content parts of the Responses API, but for those that it would refuse."""

    def file(kind: str) -> dict[str, Any]:
        return {**STRING, "contentEncoding": "base64", "contentMediaType": kind}

    kinds = {"chart": "image/png", "page": "application/pdf", "table": "text/csv"}
    kinds |= {"drawing": "image/svg+xml", "voice": "audio/wav"}
    properties = {name: file(kind) for name, kind in kinds.items()}
    files = {**dict.fromkeys(kinds, "YQ=="), "table": base64.b64encode(b"a,b\n1,2").decode()}
    drawn = FunctionalModule(
        lambda inputs, context: {**files, "n": 1}, output_schema={"type": "object", "properties": properties}
    )
    text = await run_openai_call(registry_of({"m.draw": drawn}), "m-draw", "{}")
    assert text.splitlines() == [
        '{"n":1}', "[a file of type image/png]", "[a file of type application/pdf]", "a,b", "1,2",
        "[a file of type image/svg+xml]", "[a file of type audio/wav]",
    ]  # fmt: skip
    parts = await run_openai_call(registry_of({"m.draw": drawn}), "m-draw", "{}", content="parts")
    assert parts == [
        {"type": "input_text", "text": '{"n":1}'},
        {"type": "input_image", "image_url": "data:image/png;base64,YQ=="},
        {"type": "input_file", "filename": "page.pdf", "file_data": "data:application/pdf;base64,YQ=="},
        {"type": "input_text", "text": "a,b\n1,2"},
        {"type": "input_text", "text": "[a file of type image/svg+xml]"},
        {"type": "input_text", "text": "[a file of type audio/wav]"},
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("m-run", {"fails": True}, "Internal error occurred"),
        ("m-run", {"x": "1"}, "Input validation failed:\n- x: '1' is not of type 'integer' (type)"),
        ("m-hidden", "{}", "Module not found: m-hidden"),
        ("m" * 54 + "-012345678", "{}", f"Module not found: {'m' * 54}-012345678"),
        ("m-run", "[]", "Invalid input: Arguments of 'm-run' must be a JSON object, got list"),
    ],
    ids=["raises", "wrong", "hidden", "shortened", "list"],
)
async def test_a_model_is_told_what_went_wrong_in_a_sentence(name: str, arguments: Any, told: str) -> None:
    hidden = FunctionalModule(running, annotations=ModuleAnnotations(discoverable=False))
    registry = registry_of({"m.run": FunctionalModule(running, input_schema=RUN), "m.hidden": hidden})
    assert await run_openai_call(registry, name, arguments) == told
    parts = await run_openai_call(registry, name, arguments, content="parts")
    assert parts == [{"type": "input_text", "text": told}]


async def test_a_call_of_a_model_is_made_for_its_caller() -> None:
    rules = [ACLRule(callers=["@external"], targets=["*"], effect="allow", conditions={"roles": ["staff"]})]
    registry = registry_of({"m.run": echo})
    guarded = Executor(registry, acl=ACL(rules, default_effect="deny"))
    ann = Identity("ann", roles=("staff",))
    assert await run_openai_call(guarded, "m-run", "{}") == "Access denied"
    assert await run_openai_call(guarded, "m-run", {"a": 1}, identity=ann) == '{"a":1}'
    with pytest.raises(TypeError, match="Expected Registry or Executor"):
        await run_openai_call(5, "m-run", "{}")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "text", "warnings"),
    [
        pytest.param({}, UNASKED, 0, id="default"),
        pytest.param({"approval": "require"}, UNASKED, 0, id="require"),
        pytest.param({"approval": "deny"}, "Approval was denied", 0, id="deny"),
        pytest.param({"approval": "auto"}, '{"a":1}', 1, id="auto"),
        pytest.param({"approval": "off"}, '{"a":1}', 0, id="off"),
        pytest.param({"approval": AutoApproveHandler()}, '{"a":1}', 0, id="handler-approves"),
        pytest.param({"approval": AlwaysDenyHandler()}, "Approval was denied", 0, id="handler-denies"),
    ],
)
async def test_what_needs_approval_is_refused_unless_the_program_decides(
    options: dict[str, Any], text: str, warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A program that runs a model's calls has no user to ask; a handler of the Executor's own decides before all."""
    registry = registry_of({"m.run": FunctionalModule(echo, annotations=ModuleAnnotations(requires_approval=True))})
    assert await run_openai_call(registry, "m-run", {"a": 1}, **options) == text
    warnings_logged = messages_logged(caplog)
    assert len([message for message in warnings_logged if "without approval" in message]) == warnings
    refusing = Executor(registry, approval_handler=AlwaysDenyHandler())
    if options.get("approval") != "deny":  # which would decide nothing
        assert await run_openai_call(refusing, "m-run", {"a": 1}, **options) == "Approval was denied"


@pytest.mark.parametrize(
    ("options", "exception", "words"),
    [
        ({"approval": "ask"}, ValueError, "Unknown approval"),
        ({"approval": 5}, TypeError, r"run_openai_call\(\) approval"),
        ({"tags": [""]}, ValueError, "Tag values must not be empty"),
        ({"prefix": ""}, ValueError, "prefix must not be empty"),
        ({"content": "images"}, ValueError, "content must be text or parts"),
    ],
)
async def test_wrong_options_of_a_call_are_the_programs_fault(
    options: dict[str, Any], exception: type[Exception], words: str
) -> None:
    with pytest.raises(exception, match=words):
        await run_openai_call(registry_of({"m.a": echo}), "m-a", "{}", **options)


@pytest.mark.requirement("FR-OPENAI-006", "FR-OPENAI-007")
@pytest.mark.parametrize(
    "filters",
    [{}, {"tags": ["public"]}, {"prefix": "api."}, {"tags": ["read"], "prefix": "api."}, {"prefix": "api.users.set"}],
)
async def test_a_call_of_what_the_filters_leave_out_is_refused(filters: dict[str, Any]) -> None:
    registry = registry_of({name: FunctionalModule(echo, tags=tags) for name, tags in TAGGED.items()})
    offered = names_of(to_openai_tools(registry, **filters))
    assert offered
    for module_id in TAGGED:
        name = module_id.replace(".", "-")
        text = await run_openai_call(registry, name, "{}", **filters)
        if name in offered:
            assert from_openai_call(registry, name, "{}", **filters) == (module_id, {})
            assert text == "{}"
        else:
            assert text == f"Module not found: {name}"
            with pytest.raises(ValueError, match=name):
                from_openai_call(registry, name, "{}", **filters)


def test_the_tag_of_a_union_is_never_null_in_strict_mode() -> None:
    """Without it pydantic does not know the branch, though it has a default; other consts stay optional."""

    class Cat(BaseModel):
        kind: Literal["cat"] = "cat"
        lives: int = 9

    class Dog(BaseModel):
        kind: Literal["dog"] = "dog"

    class Owner(BaseModel):
        pet: Annotated[Cat | Dog, Field(discriminator="kind")]
        sure: Literal[True] | None = None

    parameters = strict_parameters(Owner.model_json_schema())
    validator = Draft202012Validator(parameters)
    assert not validator.is_valid({"pet": {"kind": None, "lives": None}, "sure": None})
    sent = {"pet": {"kind": "cat", "lives": None}, "sure": None}
    assert validator.is_valid(sent)
    executor = Executor(registry_of({"a.model": accepting(Owner)}))
    module_id, inputs = from_openai_call(executor, "a-model", json.dumps(sent))
    assert executor.call(module_id, inputs) == {"pet": {"kind": "cat"}, "sure": None}
