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
def test_every_module_becomes_one_function() -> None:
    registry = registry_of({f"m{i}.run": accepting({"properties": {"x": INTEGER}}) for i in range(3)})
    parameters = {"type": "object", "properties": {"x": INTEGER}}
    function = {"description": "A module of a test", "parameters": parameters}
    expected = [{"type": "function", "function": {"name": f"m{i}-run", **function}} for i in range(3)]
    assert to_openai_tools(registry) == to_openai_tools(Executor(registry)) == expected
    assert to_openai_tools(Registry()) == []


@pytest.mark.requirement("FR-OPENAI-001")
@pytest.mark.parametrize("strict", [False, True])
def test_the_definitions_are_made_of_plain_built_in_types(strict: bool) -> None:
    """A module may well have put subclasses and tuples into its schema."""

    class Text(str):
        pass

    schema = {"properties": {Text("p"): {"enum": [Text("a"), 1, 1.5, True, None], "default": (1, Text("b"))}}}
    (tool,) = to_openai_tools(registry_of({"m.a": accepting(schema)}), strict=strict, embed_annotations=True)
    assert tool == json.loads(json.dumps(tool))
    values = tool["function"]["parameters"]["properties"]["p"]["enum"]
    assert [type(value) for value in values] == [str, int, float, bool, type(None)]


@pytest.mark.parametrize("source", ["./extensions", None, {}, Registry], ids=["str", "NoneType", "dict", "type"])
async def test_neither_registry_nor_executor_is_a_type_error(source: Any) -> None:
    words = re.escape(f"Expected Registry or Executor instance, got {type(source).__name__}")
    with pytest.raises(TypeError, match=words):
        to_openai_tools(source)
    with pytest.raises(TypeError, match=words):
        from_openai_call(source, "m-a", "{}")
    with pytest.raises(TypeError, match=words):
        await run_openai_call(source, "m-a", "{}")


TAGGED = {"api.users.get": ["public", "read"], "api.users.set": ["public"], "apis.other": ["public", "read"], "z.a": []}
FILTERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "none": ({"tags": [], "prefix": None}, [*TAGGED]),
    "all of two tags": ({"tags": ["read", "public"]}, ["api.users.get", "apis.other"]),
    "prefix": ({"prefix": "api."}, ["api.users.get", "api.users.set"]),
    "whole ID": ({"prefix": "api.users.set"}, ["api.users.set"]),
    "unknown": ({"tags": ["read"], "prefix": "nonexistent."}, []),
    "both": ({"tags": ["read"], "prefix": "api."}, ["api.users.get"]),
}


@pytest.mark.requirement("FR-OPENAI-006", "FR-OPENAI-007")
@pytest.mark.parametrize(("filters", "offered"), FILTERS.values(), ids=FILTERS)
async def test_tags_and_prefix_choose_what_is_offered_and_what_is_run(
    filters: dict[str, Any], offered: list[str]
) -> None:
    registry = registry_of({name: FunctionalModule(echo, tags=tags) for name, tags in TAGGED.items()})
    assert names_of(to_openai_tools(registry, **filters)) == [module_id.replace(".", "-") for module_id in offered]
    for module_id in TAGGED:
        name = module_id.replace(".", "-")
        text = await run_openai_call(registry, name, "{}", **filters)
        if module_id in offered:
            assert from_openai_call(registry, name, "{}", **filters) == (module_id, {})
            assert text == "{}"
        else:
            assert text == f"Module not found: {name}"
            with pytest.raises(ValueError, match=name):
                from_openai_call(registry, name, "{}", **filters)


@pytest.mark.parametrize(
    ("options", "exception", "words"),
    [
        ({"tags": ["a", ""]}, ValueError, "Tag values must not be empty"),
        ({"prefix": ""}, ValueError, "prefix must not be empty"),
        ({"approval": "ask"}, ValueError, "Unknown approval"),
        ({"approval": 5}, TypeError, r"run_openai_call\(\) approval"),
        ({"content": "images"}, ValueError, "content must be text or parts"),
    ],
)
async def test_wrong_options_are_the_programs_fault(
    options: dict[str, Any], exception: type[Exception], words: str
) -> None:
    registry = registry_of({"m.a": echo})
    with pytest.raises(exception, match=words):
        await run_openai_call(registry, "m-a", "{}", **options)
    if options.keys() & {"tags", "prefix"}:
        with pytest.raises(exception, match=words):
            to_openai_tools(registry, **options)


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
        ("simple", "simple"),
        ("comfyui.work_flow.execute", "comfyui-work_flow-execute"),
        ("a" * 31 + "." + "b" * 32, "a" * 31 + "-" + "b" * 32),
        ("a" * 55 + ".b0123456", "a" * 55 + "-b0123456"),
        # Longer than a name may be, and nothing that was shortened.
        ("a" * 54 + ".0123456789", None),
    ],
    ids=["no dot", "two dots", "64 characters", "64 that look shortened", "65 that look shortened"],
)
def test_dots_become_hyphens_and_come_back(module_id: str, name: str | None) -> None:
    if name is None:
        assert from_openai_name(module_id.replace(".", "-")) == module_id
        return
    assert names_of(to_openai_tools(registry_of({module_id: echo}))) == [name]
    assert from_openai_name(name) == from_openai_name(name, registry_of()) == module_id


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


ALL_FIVE = "readonly=true, destructive=true, idempotent=true, requires_approval=true, open_world=false"


@pytest.mark.requirement("FR-ANNOT-007", "FR-OPENAI-004")
@pytest.mark.parametrize(
    ("annotations", "suffix"),
    [
        (ModuleAnnotations(streaming=False, cacheable=True, paginated=True), ""),
        (ModuleAnnotations(readonly=True, idempotent=True), "\n\n[Annotations: readonly=true, idempotent=true]"),
        (ModuleAnnotations(True, True, True, True, False), f"\n\n[Annotations: {ALL_FIVE}]"),
    ],
    ids=["others", "two", "five"],
)
def test_the_description_tells_annotations(annotations: ModuleAnnotations, suffix: str) -> None:
    """Those that are not the default."""
    registry = registry_of({"m.a": FunctionalModule(echo, annotations=annotations, description="Text.")})
    for embed, text in ((False, "Text."), (True, f"Text.{suffix}")):
        (tool,) = to_openai_tools(registry, embed_annotations=embed)
        assert tool["function"]["description"] == text


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


def optional(schema: Any) -> dict[str, Any]:
    return {"anyOf": [schema, NULL]}


MAYBE_INTEGER, MAYBE_STRING = {"type": ["integer", "null"]}, {"type": ["string", "null"]}
FEW = {"type": "array", "contains": {"const": "a"}, "minItems": 1}
FEW_TOLD = {"type": "array", "items": {}, "minItems": 1, "description": '(contains: {"const":"a"})'}
TOLD = {"pattern": "^(?!-)", "maxLength": 40}
TOLD_TEXT = "Where. (pattern: ^(?!-), maxLength: 40)"
LIKE_KEYWORDS = dict.fromkeys(("default", "x-y", "properties", "required"), STRING)
DATA = [{"default": 1, "title": "T", "x-y": 2}]
EITHER = {"anyOf": [PART_CLOSED, INTEGER]}
# A property, and what it becomes: if it is required, and if it is not. `...` is what it was.
STRICT: dict[str, tuple[Any, Any, Any]] = {
    "two types": ({"type": ["integer", "string"]}, ..., {"type": ["integer", "string", "null"]}),
    "pydantic's Optional": (optional(STRING) | {"default": None, "title": "P"}, optional(STRING), optional(STRING)),
    "union": ({"anyOf": [STRING, INTEGER]}, ..., optional({"anyOf": [STRING, INTEGER]})),
    "type and union": ({**STRING, "anyOf": [{"pattern": "a"}]}, ..., {**MAYBE_STRING, "anyOf": [{"pattern": "a"}]}),
    "anything": ({}, ..., ...),
    "array of objects": ({"type": "array", "items": PART}, {"type": "array", "items": PART_CLOSED}, None),
    "object": (PART, PART_CLOSED, {**PART_CLOSED, "type": ["object", "null"]}),
    "oneOf": ({"oneOf": [PART, INTEGER]}, EITHER, optional(EITHER)),
    "allOf": ({"allOf": [PART]}, {"allOf": [PART_CLOSED]}, optional({"allOf": [PART_CLOSED]})),
    "not": ({"not": NULL}, ..., optional({"not": NULL})),
    "closed": ({"type": "object", "additionalProperties": False}, closed({}), None),
    "enum": ({"enum": ["a", 1]}, ..., {"enum": ["a", 1, None]}),
    "enum without null": (MAYBE_STRING | {"enum": ["a"]}, ..., MAYBE_STRING | {"enum": ["a", None]}),
    "const": ({"const": "a"}, ..., optional({"const": "a"})),
    "const with a default": ({"const": True, "default": False}, {"const": True}, optional({"const": True})),
    "told": (
        {**STRING, "minLength": 1, "format": "uri"}, {**STRING, "description": "(minLength: 1, format: uri)"},
        {**MAYBE_STRING, "description": "(minLength: 1, format: uri)"},
    ),
    "told in words": ({**STRING, **TOLD, "description": "Where."}, {**STRING, "description": TOLD_TEXT}, None),
    "told as JSON": (FEW, FEW_TOLD, None),
    "default that null is not": (optional(INTEGER) | {"default": 1}, optional(INTEGER), optional(INTEGER)),
    "what OpenAI takes": ({**STRING, "format": "date", "pattern": "^2"}, ..., None),
    "extensions": ({**STRING, "x-sensitive": True, "x-unit": {"default": 1}}, STRING, MAYBE_STRING),
    "like keywords": (
        {"type": "object", "properties": LIKE_KEYWORDS, "required": [*LIKE_KEYWORDS]}, closed(LIKE_KEYWORDS), None,
    ),
    "data": ({"enum": DATA}, ..., {"enum": [*DATA, None]}),
}  # fmt: skip


@pytest.mark.requirement("FR-OPENAI-003")
@pytest.mark.parametrize(("schema", "required", "left_out"), STRICT.values(), ids=STRICT)
def test_strict_mode_requires_every_property_and_closes_every_object(schema: Any, required: Any, left_out: Any) -> None:
    both = {"type": "object", "properties": {"p": schema, "q": schema}, "required": ["p"]}
    parameters = strict_parameters(both)
    assert parameters["properties"]["p"] == (schema if required is ... else required)
    assert left_out is None or parameters["properties"]["q"] == (schema if left_out is ... else left_out)
    assert parameters == closed(parameters["properties"])


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


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


ANY_K, K_ALONE = record(k={}, x=INTEGER), ({"k": 2, "x": None}, {"k": 2})
# By property of one schema: what it is, and pairs of what a model sends and what comes back; ABSENT where nothing does.
ABSENT = object()
DROPPED: dict[str, tuple[Any, list[tuple[Any, Any]]]] = {
    "opt": (INTEGER, [(None, ABSENT), (0, 0), (30.0, 30), (0.5, 0.5)]),
    "free": (optional(INTEGER), [(None, None)]),
    "any": ({}, [(None, None), ([None], [None])]),
    "enum": ({"enum": ["a", 1]}, [(None, ABSENT)]),
    "const": ({"const": "a"}, [(None, ABSENT)]),
    "not": ({"not": NULL}, [(None, ABSENT)]),
    "part": (
        record(deep=PART, maybe=MAYBE_STRING),
        [({"deep": {"a": "", "b": None}, "maybe": None}, {"deep": {"a": ""}, "maybe": None}), ({"deep": None}, {})],
    ),
    "union": (
        {"anyOf": [NULL, {"type": "array", "items": PART}, PART]},
        [([{"a": "", "b": None}], [{"a": ""}]), ({"a": "", "b": None}, {"a": ""}), (None, None)],
    ),
    "both": ({"allOf": [PART, {"properties": {"c": STRING}}]}, [({"a": "", "b": None, "c": None}, {"a": ""})]),
    "tuple": (
        {"type": "array", "prefixItems": [STRING, PART], "items": MAYBE_INTEGER},
        [(["a", {"a": "", "b": None}, None], ["a", {"a": ""}, None])],
    ),
    "places": (
        {"type": "array", "prefixItems": [PART, record(b={"enum": [None]})]},
        [([{"a": "", "b": None}, {"b": None}], [{"a": ""}, {"b": None}])],
    ),
    "keys": (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": MAYBE_INTEGER},
        [({"a": None, "b": 1}, {"a": None, "b": 1})],
    ),
    "map": (
        {"type": "object", "patternProperties": {"^x_": STRING}, "additionalProperties": PART},
        [({"k": {"a": "", "b": None}, "x_k": None}, {"k": {"a": ""}})],
    ),
    "patterns": (  # nothing tells which one counts
        {"type": "object", "patternProperties": {"^x_": MAYBE_STRING, "^y_": STRING}}, [({"x_k": None}, {"x_k": None})],
    ),
    "first": (
        {"anyOf": [{"properties": {"x": MAYBE_INTEGER}}, {"properties": {"x": INTEGER}}]}, [({"x": None}, {"x": None})],
    ),
    "either": (
        {"anyOf": [record(x=INTEGER), record(y=INTEGER, z=STRING)]},
        [({"x": None}, {}), ({"y": None, "z": "q"}, {"z": "q"})],
    ),
    # Branches that a constant, a list of them, or what is required tell apart, and a name that the union itself has.
    "const tells": ({"anyOf": [record(k={"const": 1}, x=MAYBE_INTEGER), ANY_K]}, [K_ALONE]),
    "enum tells": ({"anyOf": [record(k={"enum": [1]}, x=MAYBE_INTEGER), ANY_K]}, [K_ALONE]),
    "required tells": (
        {"anyOf": [record(k=STRING, x=MAYBE_INTEGER) | {"required": ["k"]}, record(k=STRING, x=INTEGER)]},
        [({"k": None, "x": None}, {})],
    ),
    "name of the union": (
        record(k=STRING) | {"anyOf": [record(x=INTEGER), {"properties": {"k": {}, "x": MAYBE_INTEGER}}]},
        [({"k": "a", "x": None}, {"k": "a"})],
    ),
    # Both inner objects fit the same value.
    "nested": (
        optional({**record(q=INTEGER), "anyOf": [record(x=INTEGER), record(x=STRING)]}), [({"x": None, "q": None}, {})],
    ),
    # Maps beside objects: what fits is told by the values as well.
    "mapped": (
        {"anyOf": [{"type": "object", "additionalProperties": MAYBE_INTEGER}, record(a=STRING, b=STRING)]},
        [({"a": "", "b": None}, {"a": ""}), ({"a": 1, "b": None}, {"a": 1, "b": None})],
    ),
    "open": (
        {"anyOf": [{**record(a=STRING), "additionalProperties": True}, {"additionalProperties": INTEGER}]},
        [({"a": "", "x": None}, {"a": "", "x": None})],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("schema", "pairs"), DROPPED.values(), ids=DROPPED)
def test_the_nulls_that_stand_for_absence_are_dropped(schema: Any, pairs: list[tuple[Any, Any]]) -> None:
    registry = registry_of({"m.a": accepting({"type": "object", "properties": {"p": schema}})})
    for sent, back in pairs:
        arguments = {"p": copy.deepcopy(sent)}
        module_id, inputs = from_openai_call(registry, "m-a", arguments)
        assert (module_id, json.dumps(inputs)) == ("m.a", json.dumps({} if back is ABSENT else {"p": back}))
        assert arguments == {"p": sent}


def test_other_nulls_stay_for_the_module_to_judge() -> None:
    registry = registry_of(
        {"m.a": accepting({"type": "object", "properties": {"need": INTEGER}, "required": ["need"]})}
    )
    assert from_openai_call(registry, "m-a", '{"other": null}') == ("m.a", {"other": None})
    assert from_openai_call(registry, "m-a", '{"need": null}') == from_openai_call(registry, "m-a", "") == ("m.a", {})


@pytest.mark.parametrize(
    "arguments", ["{", "[]", '{"x": NaN}', "[" * 100_000, 7], ids=["open", "list", "nan", "deep", "number"]
)
def test_arguments_that_are_no_json_object_are_a_value_error(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"m-a|line 1 column"):
        from_openai_call(registry_of({"m.a": echo}), "m-a", arguments)


@pytest.mark.parametrize("arguments", ["", None])
def test_no_arguments_are_none(arguments: str | None) -> None:
    assert from_openai_call(registry_of({"m.a": echo}), "m-a", arguments) == ("m.a", {})


Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""A schema, a call as strict mode has it, and the inputs that it means."""


def chained(depth: int) -> Case:
    """A union inside a union, `depth` times."""
    schema, sent, inputs = PART, {"a": "", "b": None}, {"a": ""}
    for _ in range(depth):
        schema = record(**{"in": {"anyOf": [record(**{"in": record(z=STRING)}), schema]}}, b=STRING) | {
            "required": ["in"]
        }
        sent, inputs = {"in": sent, "b": None}, {"in": inputs}
    return schema, sent, inputs


def ambiguous(depth: int) -> Case:
    """Unions whose branches differ in their innermost value alone; the last branch of each is the one that fits."""
    fitting, wrong = record(x=INTEGER, y=STRING), record(x=STRING, y=STRING)
    sent, inputs = {"x": 1, "y": None}, {"x": 1}
    for _ in range(depth):
        fitting, wrong = record(**{"in": {"oneOf": [wrong, fitting]}}), record(**{"in": {"anyOf": [wrong, wrong]}})
        sent, inputs = {"in": sent}, {"in": inputs}
    return fitting, sent, inputs


def listed(schema: dict[str, Any], length: int) -> Case:
    """A list of parts that differ, under an optional property with `schema`."""
    parts = [{"a": str(number)} for number in range(length)]
    sent = {"list": [{**part, "b": None} for part in parts]}
    return record(list=optional({"type": "array", "items": PART, **schema})), sent, {"list": parts}


def fitting_none() -> Case:
    """Unions three wide and seven deep, of which a slightly wrong call fits none."""
    schema = record(leaf=STRING, opt=INTEGER) | {"required": ["leaf"]}
    sent: dict[str, Any] = {"leaf": 5, "opt": None}
    for _ in range(6):
        schema = record(a={"anyOf": [record(**{"in": schema, f"b{i}": STRING}) for i in range(3)]})
        sent = {"a": {"in": sent, "b2": None}}
    return schema, sent, sent


def hanging() -> Case:
    """Patterns that take Python days, and a list long enough for a wide union."""
    text = {**STRING, "pattern": r"^(\w+\s?)+$"}
    named = {"anyOf": [{"properties": {"n": text}, "patternProperties": {text["pattern"]: INTEGER}}, {"items": text}]}
    rows = {"items": optional(record(**{f"p{i}": STRING for i in range(200)}))}
    word = "a" * 40 + "!"
    given = {"named": {"n": word, word: 1}, "rows": [{}] * 10_000}
    return record(named=named, rows=rows), given, given


def of_number(number: float) -> Case:
    """An integer that no float holds, in an optional multiple of `number`."""
    return record(n=optional({"type": "number", "multipleOf": number})), {"n": 10**400}, {"n": 10**400}


WIDE = [record(**{f"f{i}": STRING for i in range(8)}, kind={"const": number}) for number in range(30)]
LARGE = {
    "30 unions deep": chained(30),
    "9 deep and wrong in the depth": ambiguous(9),
    "3 wide and 7 deep": fitting_none(),
    "a set of models": listed({"uniqueItems": True}, 2_000),
    "31 branches": listed({"items": {"anyOf": [*WIDE, PART]}}, 2_000),
    "patterns": hanging(),
    "a multiple of a fraction": of_number(0.1),
    "a multiple": of_number(7),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("schema", "sent", "inputs"), LARGE.values(), ids=LARGE)
def test_a_hostile_call_is_read_once_by_each_branch(
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
