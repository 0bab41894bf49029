"""Modules as OpenAI tools, and calls of a model (FR-OPENAI-001 to -007, FR-ANNOT-007, FR-EXEC-006, FR-FILTER-003)."""

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
from typing import Any

import pytest
from apcore import Executor, ModuleAnnotations, Registry
from apcore.approval import AlwaysDenyHandler, AutoApproveHandler
from conftest import ANYTHING, ROOT, FunctionalModule, connect, echo, registry_of
from jsonschema import Draft202012Validator
from support import DENIED, INTEGER, MARK, REDACTED, STRING, UNASKED, Caplog, gives, messages_logged, of, subschemas

from apcore_mcp import from_openai_call, from_openai_name, run_openai_call, to_openai_tools

NULL = {"type": "null"}


def accepting(input_schema: Any) -> FunctionalModule:
    return FunctionalModule(echo, input_schema=input_schema)


def names_of(tools: list[dict[str, Any]]) -> list[str]:
    return [tool["function"]["name"] for tool in tools]


# ---- The list ----


@pytest.mark.requirement("FR-OPENAI-001", "FR-EXEC-006")
def test_every_module_becomes_one_function() -> None:
    registry = registry_of({f"m{i}.run": accepting({"properties": {"x": INTEGER}}) for i in range(3)})
    function = {"description": "A module of a test", "parameters": of(x=INTEGER)}
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


async def test_neither_registry_nor_executor_is_a_type_error() -> None:
    source: Any
    for source, kind in (("./extensions", "str"), (None, "NoneType"), ({}, "dict"), (Registry, "type")):
        words = f"Expected Registry or Executor instance, got {kind}"
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
async def test_tags_and_prefix_choose_what_is_offered_and_run(filters: dict[str, Any], offered: list[str]) -> None:
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


WRONG_OPTIONS: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"tags": ["a", ""]}, "Tag values must not be empty"),
    (ValueError, {"prefix": ""}, "prefix must not be empty"),
    (ValueError, {"approval": "ask"}, "Unknown approval"),
    (TypeError, {"approval": 5}, r"run_openai_call\(\) approval"),
    (ValueError, {"content": "images"}, "content must be text or parts"),
]


@pytest.mark.parametrize(("error", "options", "words"), WRONG_OPTIONS)
async def test_wrong_options_are_the_programs_fault(error: Any, options: dict[str, Any], words: str) -> None:
    registry = registry_of({"m.a": echo})
    with pytest.raises(error, match=words):
        await run_openai_call(registry, "m-a", "{}", **options)
    if options.keys() & {"tags", "prefix"}:
        with pytest.raises(error, match=words):
            to_openai_tools(registry, **options)


NO_SERVER = """
import sys
sys.modules.update(dict.fromkeys(["mcp", "mcp_types", "uvicorn", "starlette", "openai"]))  # no import finds them
from apcore import Registry
from apcore.decorator import module
from apcore_mcp import from_openai_call, to_openai_tools
registry = Registry()
@module(id="image.resize", registry=registry)
def resize(w: int = 1) -> dict: return {}
for strict in (False, True):
    (tool,) = to_openai_tools(registry, strict=strict, embed_annotations=True)
assert from_openai_call(registry, tool["function"]["name"], '{"w": null}') == ("image.resize", {})
"""


@pytest.mark.requirement("FR-OPENAI-005")
def test_definitions_need_neither_openai_nor_a_server() -> None:
    done = subprocess.run([sys.executable, "-c", NO_SERVER], cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


# ---- Names ----


@pytest.mark.requirement("FR-OPENAI-002")
def test_dots_become_hyphens_and_come_back() -> None:
    """Of 64 characters at most; some look as if they were shortened."""
    for module_id in ("simple", "comfyui.work_flow.execute", f"{'a' * 31}.{'b' * 32}", f"{'a' * 55}.b0123456"):
        name = module_id.replace(".", "-")
        assert names_of(to_openai_tools(registry_of({module_id: echo}))) == [name]
        assert from_openai_name(name) == from_openai_name(name, registry_of()) == module_id
    assert from_openai_name(f"{'a' * 54}-0123456789") == f"{'a' * 54}.0123456789"


@pytest.mark.requirement("FR-OPENAI-002")
def test_an_id_with_a_hyphen_is_refused_by_name() -> None:
    """Nobody could tell what it stands for when it comes back. apcore's own registry takes none."""
    registry: Any = registry_of({"my_module.a": echo})
    module, definition = registry.get("my_module.a"), registry.get_definition("my_module.a")
    registry.list = lambda *_, **__: ["my-module.a"]
    registry.get = lambda *_, **__: module
    registry.get_definition = lambda *_, **__: dataclasses.replace(definition, module_id="my-module.a")
    with pytest.raises(ValueError, match=r"hyphens.*my-module\.a"):
        to_openai_tools(registry)


SHORT = hashlib.sha256(b"z" * 80).hexdigest()[:8]


async def test_an_id_past_64_characters_gets_a_short_name() -> None:
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
def test_the_description_tells_annotations() -> None:
    """Those that are not the default."""
    suffixes = {
        "": ModuleAnnotations(streaming=False, cacheable=True, paginated=True),
        "\n\n[Annotations: readonly=true, idempotent=true]": ModuleAnnotations(readonly=True, idempotent=True),
        f"\n\n[Annotations: {ALL_FIVE}]": ModuleAnnotations(True, True, True, True, False),
    }
    for suffix, told in suffixes.items():
        registry = registry_of({"m.a": FunctionalModule(echo, annotations=told, description="Text.")})
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
    sides = {
        "width": {"type": "integer", "description": "Target width in pixels"},
        "height": {"type": "integer", "description": "Target height in pixels"},
    }
    formats = {"type": "string", "default": "png", "enum": ["png", "jpg", "webp"]}
    resize = of(**sides, format=formats) | {"title": "ImageResizeInput", "required": ["width", "height"]}
    (tool,) = to_openai_tools(registry_of({"m.a": accepting(resize)}))
    assert tool["function"] == {"name": "m-a", "description": "A module of a test", "parameters": resize}
    strict_format = {"type": ["string", "null"], "enum": ["png", "jpg", "webp", None]}
    strict_format["description"] = '(default: "png")'
    assert strict_parameters(resize) == {
        "type": "object",
        "properties": {**sides, "format": strict_format},
        "required": ["format", "height", "width"],
        "additionalProperties": False,
    }


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {**of(**properties), "required": sorted(properties), "additionalProperties": False}


PART = of(b={**INTEGER, "default": 1}, a=STRING) | {"required": ["a"], "title": "T"}
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
    "tag of a union": (of(k={"const": "a", "default": "a"}), closed({"k": {"const": "a"}}), None),
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
    "like keywords": (of(**LIKE_KEYWORDS) | {"required": [*LIKE_KEYWORDS]}, closed(LIKE_KEYWORDS), None),
    "data": ({"enum": DATA}, ..., {"enum": [*DATA, None]}),
}  # fmt: skip


@pytest.mark.requirement("FR-OPENAI-003")
@pytest.mark.parametrize(("schema", "required", "left_out"), STRICT.values(), ids=STRICT)
def test_strict_mode_requires_and_closes_all(schema: Any, required: Any, left_out: Any) -> None:
    both = of(p=schema, q=schema) | {"required": ["p"]}
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


def test_what_strict_mode_cannot_say_is_warned_of_per_tool(caplog: Caplog) -> None:
    modules: dict[str, Any] = {}
    for number, (schema, _) in enumerate(UNSAYABLE):
        whole = of(p=schema) if schema is not None else {"anyOf": [PART, PART]}
        modules[f"odd.m{number}"] = accepting(whole)
    told = {**STRING, "minLength": 1, "format": "uri", "oneOf": [STRING, {**STRING, "maxLength": 3}]}
    # Properties with the names of keywords, and data that looks like a schema.
    fine = {"not": PART, "additionalProperties": STRING, "x": {"enum": [{"additionalProperties": True}]}, "y": told}
    fine |= {"z": {"type": "object", "additionalProperties": False}, "items": {"const": []}}
    modules |= {"some.fine": accepting(of(**fine)), "without.any": accepting(ANYTHING)}
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


ANY_K, K_ALONE = of(k={}, x=INTEGER), ({"k": 2, "x": None}, {"k": 2})
FULL, MEANT = {"a": "", "b": None}, {"a": ""}  # a PART as strict mode has it, and what it means
# A property's schema, and pairs of what a model sends and what comes back; ABSENT where nothing does.
ABSENT, ARRAY = object(), {"type": "array"}
DROPPED: dict[str, tuple[Any, ...]] = {
    "opt": (INTEGER, (None, ABSENT), (0, 0), (30.0, 30), (0.5, 0.5)),
    "free": (optional(INTEGER), (None, None)),
    "any": ({}, (None, None), ([None], [None])),
    "enum": ({"enum": ["a", 1]}, (None, ABSENT)),
    "const": ({"const": "a"}, (None, ABSENT)),
    "not": ({"not": NULL}, (None, ABSENT)),
    "part": (of(deep=PART), ({"deep": FULL}, {"deep": MEANT}), ({"deep": None}, {})),
    "wrong beside": (of(n=INTEGER, x=STRING), ({"n": "a", "x": None}, {"n": "a"})),
    "maybe": (of(deep=MAYBE_STRING), ({"deep": None}, {"deep": None})),
    "union": ({"anyOf": [NULL, {**ARRAY, "items": PART}, PART]}, ([FULL], [MEANT]), (FULL, MEANT), (None, None)),
    "both": ({"allOf": [PART, {"properties": {"c": STRING}}]}, ({**FULL, "c": None}, MEANT)),
    "tuple": (
        {**ARRAY, "prefixItems": [STRING, PART], "items": MAYBE_INTEGER}, (["a", FULL, None], ["a", MEANT, None]),
    ),
    "places": ({**ARRAY, "prefixItems": [PART, of(b={"enum": [None]})]}, ([FULL, {"b": None}], [MEANT, {"b": None}])),
    "keys": (
        {"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": MAYBE_INTEGER},
        ({"a": None, "b": 1}, {"a": None, "b": 1}),
    ),
    "map": (
        {"type": "object", "patternProperties": {"^x_": STRING}, "additionalProperties": PART},
        ({"k": FULL, "x_k": None}, {"k": MEANT}),
    ),
    # Nothing tells which pattern counts.
    "patterns": ({"patternProperties": {"^x_": MAYBE_STRING, "^y_": STRING}}, ({"x_k": None}, {"x_k": None})),
    "first": ({"anyOf": [of(x=MAYBE_INTEGER), of(x=INTEGER)]}, ({"x": None}, {"x": None})),
    "either": (
        {"anyOf": [of(x=INTEGER), of(y=INTEGER, z=STRING)]}, ({"x": None}, {}), ({"y": None, "z": "q"}, {"z": "q"}),
    ),
    # Branches that a constant, a list of them, or what is required tell apart, and a name that the union itself has.
    "const tells": ({"anyOf": [of(k={"const": 1}, x=MAYBE_INTEGER), ANY_K]}, K_ALONE),
    "part tells": ({"anyOf": [{"allOf": [of(k={"const": 1}), of(k={}, x=MAYBE_INTEGER)]}, ANY_K]}, K_ALONE),
    "enum tells": ({"anyOf": [of(k={"enum": [1]}, x=MAYBE_INTEGER), ANY_K]}, K_ALONE),
    "required tells": (
        {"anyOf": [of(k=STRING, x=MAYBE_INTEGER) | {"required": ["k"]}, of(k=STRING, x=INTEGER)]},
        ({"k": None, "x": None}, {}),
    ),
    "name of the union": (
        of(k=STRING) | {"anyOf": [of(x=INTEGER), {"properties": {"k": {}, "x": MAYBE_INTEGER}}]},
        ({"k": "a", "x": None}, {"k": "a"}),
    ),
    # Both inner objects fit the same value.
    "nested": (optional({**of(q=INTEGER), "anyOf": [of(x=INTEGER), of(x=STRING)]}), ({"x": None, "q": None}, {})),
    # Maps beside objects: what fits is told by the values as well.
    "mapped": (
        {"anyOf": [{"type": "object", "additionalProperties": MAYBE_INTEGER}, of(a=STRING, b=STRING)]},
        (FULL, MEANT), ({"a": 1, "b": None}, {"a": 1, "b": None}),
    ),
    "open": (
        {"anyOf": [{**of(a=STRING), "additionalProperties": True}, {"additionalProperties": INTEGER}]},
        ({"a": "", "x": None}, {"a": "", "x": None}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DROPPED)
def test_the_nulls_that_stand_for_absence_are_dropped(name: str) -> None:
    schema, *pairs = DROPPED[name]
    registry = registry_of({"m.a": accepting(of(p=schema))})
    for sent, back in pairs:
        arguments = {"p": copy.deepcopy(sent)}
        module_id, inputs = from_openai_call(registry, "m-a", arguments)
        assert (module_id, json.dumps(inputs)) == ("m.a", json.dumps({} if back is ABSENT else {"p": back}))
        assert arguments == {"p": sent}


def test_other_nulls_stay_for_the_module_to_judge() -> None:
    registry = registry_of({"m.a": accepting(of(need=INTEGER) | {"required": ["need"]})})
    assert from_openai_call(registry, "m-a", '{"other": null}') == ("m.a", {"other": None})
    for arguments in ('{"need": null}', "", None):  # and no arguments are none
        assert from_openai_call(registry, "m-a", arguments) == ("m.a", {})


@pytest.mark.parametrize(
    "arguments", ["{", "[]", '{"x": NaN}', "[" * 100_000, 7], ids=["open", "list", "nan", "deep", "number"]
)
def test_arguments_that_are_no_json_object_are_a_value_error(arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"m-a|line 1 column"):
        from_openai_call(registry_of({"m.a": echo}), "m-a", arguments)


Case = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""A schema, a call as strict mode has it, and the inputs that it means."""


def chained(depth: int) -> Case:
    """A union inside a union, `depth` times."""
    schema, sent, inputs = PART, FULL, MEANT
    for _ in range(depth):
        union = {"anyOf": [of(**{"in": of(z=STRING)}), schema]}
        schema = of(**{"in": union}, b=STRING) | {"required": ["in"]}
        sent, inputs = {"in": sent, "b": None}, {"in": inputs}
    return schema, sent, inputs


def ambiguous(depth: int) -> Case:
    """Unions whose branches differ in their innermost value alone; the last branch of each is the one that fits."""
    fitting, wrong = of(x=INTEGER, y=STRING), of(x=STRING, y=STRING)
    sent, inputs = {"x": 1, "y": None}, {"x": 1}
    for _ in range(depth):
        fitting, wrong = of(**{"in": {"oneOf": [wrong, fitting]}}), of(**{"in": {"anyOf": [wrong, wrong]}})
        sent, inputs = {"in": sent}, {"in": inputs}
    return fitting, sent, inputs


def listed(schema: dict[str, Any], length: int) -> Case:
    """A list of parts that differ, under an optional property with `schema`."""
    parts = [{"a": str(number)} for number in range(length)]
    sent = {"list": [{**part, "b": None} for part in parts]}
    return of(list=optional({"type": "array", "items": PART, **schema})), sent, {"list": parts}


def fitting_none() -> Case:
    """Unions three wide and seven deep, of which a slightly wrong call fits none."""
    schema = of(leaf=STRING, opt=INTEGER) | {"required": ["leaf"]}
    sent: dict[str, Any] = {"leaf": 5, "opt": None}
    for _ in range(6):
        schema = of(a={"anyOf": [of(**{"in": schema, f"b{i}": STRING}) for i in range(3)]})
        sent = {"a": {"in": sent, "b2": None}}
    return schema, sent, sent


def hanging() -> Case:
    """Patterns that take Python days, and a list long enough for a wide union."""
    text = {**STRING, "pattern": r"^(\w+\s?)+$"}
    named = {"anyOf": [{"properties": {"n": text}, "patternProperties": {text["pattern"]: INTEGER}}, {"items": text}]}
    rows = {"items": optional(of(**{f"p{i}": STRING for i in range(200)}))}
    word = "a" * 40 + "!"
    given = {"named": {"n": word, word: 1}, "rows": [{}] * 10_000}
    return of(named=named, rows=rows), given, given


def of_number(number: float) -> Case:
    """An integer that no float holds, in an optional multiple of `number`."""
    return of(n=optional({"type": "number", "multipleOf": number})), {"n": 10**400}, {"n": 10**400}


WIDE = [of(**{f"f{i}": STRING for i in range(8)}, kind={"const": number}) for number in range(30)]
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
@pytest.mark.parametrize("case", LARGE.values(), ids=LARGE)
def test_a_hostile_call_is_read_once_by_each_branch(case: Case) -> None:
    """Each level of unions may add to the time, but none may multiply it; and no number ends in an OverflowError."""
    schema, sent, inputs = case
    assert from_openai_call(registry_of({"m.a": accepting(schema)}), "m-a", sent) == ("m.a", inputs)


@pytest.mark.parametrize("name", ["m-unknown", "m-hidden", "m-input", "m-output", "m", ""])
def test_a_call_of_what_was_never_offered_is_a_value_error(name: str) -> None:
    dangling = of(a={"$ref": "#/$defs/None"})
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


RUN, GIVEN = of(x=INTEGER, fails={"type": "boolean"}), of(token={**STRING, **MARK})


async def test_a_model_is_told_the_result_as_an_mcp_client_is() -> None:
    registry = registry_of({"m.run": FunctionalModule(running, input_schema=RUN, output_schema=GIVEN)})
    for source in (registry, Executor(registry)):
        told = await run_openai_call(source, "m-run", '{"x": 1, "fails": null}')
        assert json.loads(told) == dict.fromkeys(("at", "raw", "token", "given"), REDACTED)
    async with connect(registry) as client:
        (part,) = (await client.call_tool("m.run", {"x": 1})).content
    assert part.type == "text"
    assert told == part.text


async def test_a_model_reads_text_files_alone() -> None:
    """Or sees them, in the content parts of the Responses API, but for those that it would refuse."""

    kinds = {"chart": "image/png", "page": "application/pdf", "table": "text/csv"}
    kinds |= {"drawing": "image/svg+xml", "voice": "audio/wav"}
    encoded = {**STRING, "contentEncoding": "base64"}
    schema = of(**{name: {**encoded, "contentMediaType": kind} for name, kind in kinds.items()})
    files = {**dict.fromkeys(kinds, "YQ=="), "table": base64.b64encode(b"a,b\n1,2").decode(), "n": 1}
    registry = registry_of({"m.draw": gives(files, output_schema=schema)})
    told = ['{"n":1}', "[a file of type image/png]", "[a file of type application/pdf]", "a,b", "1,2"]
    told += ["[a file of type image/svg+xml]", "[a file of type audio/wav]"]
    assert (await run_openai_call(registry, "m-draw", "{}")).splitlines() == told
    assert await run_openai_call(registry, "m-draw", "{}", content="parts") == [
        {"type": "input_text", "text": '{"n":1}'},
        {"type": "input_image", "image_url": "data:image/png;base64,YQ=="},
        {"type": "input_file", "filename": "page.pdf", "file_data": "data:application/pdf;base64,YQ=="},
        {"type": "input_text", "text": "a,b\n1,2"},
        {"type": "input_text", "text": "[a file of type image/svg+xml]"},
        {"type": "input_text", "text": "[a file of type audio/wav]"},
    ]


SENTENCES: dict[str, tuple[str, Any, str]] = {
    "raises": ("m-run", {"fails": True}, "Internal error occurred"),
    "wrong": ("m-run", {"x": "1"}, "Input validation failed:\n- x: '1' is not of type 'integer' (type)"),
    "hidden": ("m-hidden", "{}", "Module not found: m-hidden"),
    "shortened": ("m" * 54 + "-012345678", "{}", f"Module not found: {'m' * 54}-012345678"),
    "list": ("m-run", "[]", "Invalid input: Arguments of 'm-run' must be a JSON object, got list"),
}


@pytest.mark.parametrize(("name", "arguments", "told"), SENTENCES.values(), ids=SENTENCES)
async def test_a_model_is_told_what_went_wrong_in_a_sentence(name: str, arguments: Any, told: str) -> None:
    hidden = FunctionalModule(running, annotations=ModuleAnnotations(discoverable=False))
    registry = registry_of({"m.run": FunctionalModule(running, input_schema=RUN), "m.hidden": hidden})
    assert await run_openai_call(registry, name, arguments) == told
    parts = await run_openai_call(registry, name, arguments, content="parts")
    assert parts == [{"type": "input_text", "text": told}]


RUNS = '{"a":1}'
DECIDED: dict[str, tuple[dict[str, Any], str]] = {
    "default": ({}, UNASKED),
    "require": ({"approval": "require"}, UNASKED),
    "deny": ({"approval": "deny"}, DENIED),
    "auto": ({"approval": "auto"}, RUNS),
    "off": ({"approval": "off"}, RUNS),
    "handler-approves": ({"approval": AutoApproveHandler()}, RUNS),
    "handler-denies": ({"approval": AlwaysDenyHandler()}, DENIED),
}


@pytest.mark.parametrize("name", DECIDED)
async def test_what_needs_approval_runs_if_the_program_says_so(name: str, caplog: Caplog) -> None:
    """A program that runs a model's calls has no user to ask; a handler of the Executor's own decides before all."""
    options, text = DECIDED[name]
    registry = registry_of({"m.run": FunctionalModule(echo, annotations=ModuleAnnotations(requires_approval=True))})
    assert await run_openai_call(registry, "m-run", {"a": 1}, **options) == text
    assert sum("without approval" in message for message in messages_logged(caplog)) == (name == "auto")
    refusing = Executor(registry, approval_handler=AlwaysDenyHandler())
    if name != "deny":  # which would decide nothing
        assert await run_openai_call(refusing, "m-run", {"a": 1}, **options) == DENIED
