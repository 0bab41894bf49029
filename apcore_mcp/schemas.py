"""JSON Schema: a module's schema in, a self-contained one out, and which of its values are marked as sensitive.

Functions of plain data and of pydantic's models, with nothing of MCP in them; `core.py` and what checks and writes
values by these schemas (`values.py`) use them.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Any, Literal, cast

from annotated_types import Predicate
from jsonschema import Draft202012Validator
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import from_json, to_json
from referencing import Registry as SchemaResources
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012
from typing_extensions import TypedDict

JSONObject = dict[str, Any]
JSONSchema = JSONObject

# ---- What the keywords mean ----

# The keywords that hold schemas, those of older drafts included. Under any other one a `$ref` is no reference.
_SCHEMA_MAPS = frozenset("properties patternProperties dependentSchemas dependencies $defs definitions".split())
_WITH_SCHEMAS = _SCHEMA_MAPS.union(
    "anyOf oneOf allOf not if then else prefixItems items additionalItems unevaluatedItems contains"
    " additionalProperties unevaluatedProperties propertyNames contentSchema".split()
)
CONSTRAINTS = Draft202012Validator.VALIDATORS.keys()  # other keywords describe a value and constrain nothing
OTHER_PROPERTIES = frozenset("patternProperties additionalProperties unevaluatedProperties".split())
# The keywords whose schemas JSON Schema applies in place: to the very value that the schema around them applies to.
IN_PLACE = frozenset("anyOf oneOf allOf not if then else dependentSchemas".split())

ModelType = type(BaseModel)  # the metaclass of pydantic's models
_PYDANTIC_NAMES = GenerateJsonSchema()  # makes titles of names
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NARROWING = frozenset("not if then else contains unevaluatedItems unevaluatedProperties".split())
# References of other drafts mean nothing to apcore, and some clients drop a tool that has them.
FOREIGN_REFERENCES = frozenset("$recursiveRef $recursiveAnchor $dynamicRef".split())
# Keywords that say where references lead, and the dialect: without meaning once references are inlined.
_FOR_REFERENCES = FOREIGN_REFERENCES.union(
    "$schema $defs definitions $id id $anchor $dynamicAnchor discriminator".split()
)
_REF_DEPTH_MAX = 32  # references inside references (FR-SCHEMA-002)
_NODES_MAX = 50_000  # schemas in one inlined schema; definitions that use each other twice double it at every level

# What the metaschema of 2020-12 says of one schema, without the schemas inside it, as a type of pydantic's: a server of
# 1,000 modules checks 2,000 schemas when it starts, which takes jsonschema's `check_schema` sixty times as long.
_Schema = JSONObject | bool
_Type = Literal["null", "boolean", "object", "array", "number", "string", "integer"]
_Count = Annotated[int, Field(ge=0)]
_Names = Annotated[list[str], Predicate(lambda names: len({*names}) == len(names))]
_LEGAL: JSONObject = {
    **dict.fromkeys(_WITH_SCHEMAS, _Schema),
    "properties dependentSchemas $defs definitions": dict[str, _Schema],
    "patternProperties": dict[re.Pattern[str], _Schema],
    "anyOf oneOf allOf prefixItems": Annotated[list[_Schema], Field(min_length=1)],
    "type": _Type | Annotated[list[_Type], Field(min_length=1)],
    "required": _Names,
    "dependentRequired": dict[str, _Names],
    "enum": Annotated[list[Any], Field(min_length=1)],  # or it is legal, but not to AJV
    "examples": list[Any],
    "minimum maximum exclusiveMinimum exclusiveMaximum": float,
    "multipleOf": Annotated[float, Field(gt=0)],
    "minLength maxLength minItems maxItems minProperties maxProperties minContains maxContains": _Count,
    "uniqueItems deprecated readOnly writeOnly": bool,
    "pattern": re.Pattern[str],
    "$ref $comment title description format contentEncoding contentMediaType": str,
}
_KEYWORDS = {keyword: value_type for keywords, value_type in _LEGAL.items() for keyword in keywords.split()}
_METASCHEMA = TypeAdapter[Any](cast(Any, TypedDict)("JSON Schema (2020-12)", _KEYWORDS, total=False))


class UnconvertibleSchema(ValueError):
    """A legal schema whose references cannot be inlined. An output schema like that costs its tool no more than the
    `outputSchema`."""


# ---- Schemas and what is in them ----


def map_subschemas(schema: JSONSchema, change: Callable[[Any, str], object]) -> JSONSchema:
    """Copy `schema` with `change` applied to each schema directly inside it, and the name or keyword it stands under.

    `additionalProperties: false` and its like are kept as they are: everybody writes them to close an object."""

    def changed(item: Any, name: str) -> Any:
        if isinstance(item, list):
            return [changed(each, name) for each in item]
        return change(item, name) if isinstance(item, dict | bool) else item

    copied = {}
    for keyword, value in schema.items():
        if keyword in _SCHEMA_MAPS:
            value = {name: changed(each, name) for name, each in value.items()}
        elif keyword in _WITH_SCHEMAS and not (keyword in OTHER_PROPERTIES and isinstance(value, bool)):
            value = changed(value, keyword)
        copied[keyword] = value
    return copied


def without_defaults(schema: JSONSchema, _: str = "") -> JSONSchema:
    """Copy `schema` without defaults that may be models: of what is marked in them it says nothing."""
    kept = {key: value for key, value in schema.items() if key != "default" or not isinstance(value, dict | list | str)}
    return map_subschemas(kept, without_defaults)


def branches(schema: JSONSchema, keywords: Collection[str]) -> list[JSONSchema]:
    """The schemas directly inside `schema` that stand under `keywords`, but for boolean ones."""
    found: list[JSONSchema] = []
    for keyword in schema.keys() & keywords:
        value = [*schema[keyword].values()] if keyword in _SCHEMA_MAPS else schema[keyword]
        found += [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]
    return found


def subschemas(schema: JSONSchema) -> list[JSONSchema]:
    """`schema` and every schema in it, at any depth, but for boolean ones."""
    found = [schema]
    for each in found:  # which grows
        found += branches(each, _WITH_SCHEMAS)
    return found


def in_place(*schemas: JSONSchema) -> Iterator[JSONSchema]:
    """`schemas` and all the schemas in them that may apply to the same value."""
    for schema in schemas:
        yield schema
        yield from in_place(*branches(schema, IN_PLACE))


def part_schemas(schemas: Iterable[JSONSchema], step: str | int) -> Iterator[JSONSchema]:
    """The schemas that may apply to one property or item of a value to which `schemas` may apply. Patterns of names are
    not tried: each counts."""
    for schema in schemas:
        if isinstance(step, int):
            yield from schema.get("prefixItems", ())[step : step + 1] or branches(schema, ["items", "unevaluatedItems"])
        elif step in properties_of(schema):
            yield schema["properties"][step]
        else:
            yield from branches(schema, OTHER_PROPERTIES)


def properties_of(schema: JSONSchema) -> Any:
    return schema.get("properties", {})


def types_of(schema: JSONSchema) -> list[str]:
    types = schema.get("type", [])
    return [types] if isinstance(types, str) else types


def is_valid(value: Any, schema: JSONSchema) -> bool:
    return Draft202012Validator(schema).is_valid(value)


def admits(schema: JSONSchema, value: Any) -> bool:
    """Whether `schema` itself, not the schemas in it that hold beside it, is of a value of this type."""
    types = types_of(schema)
    return is_valid(value, {"type": types}) if types else not branches(schema, IN_PLACE)


def plain_json(value: Any) -> Any:
    """Copy `value` into plain JSON types; ValueError for what JSON cannot say, NaN included."""
    return from_json(to_json(value, inf_nan_mode="constants"), allow_inf_nan=False)


def is_json(value: Any) -> bool:
    with suppress(ValueError):
        plain_json(value)
        return True
    return False


def text_of(value: object) -> str:
    """A text of a module's for people to read, as JSON can carry it: half of a surrogate pair becomes `?`."""
    return str(value).encode(errors="replace").decode()


def integral(value: Any) -> Any:
    """Copy plain JSON with whole numbers as such, as JSON Schema has them: `30.0` is an integer, and 30. ValueError for
    NaN and infinity, which some parsers read, and which are within no bound and beyond none."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError("JSON has no NaN, and no infinity")
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    if isinstance(value, dict):
        return {name: integral(item) for name, item in value.items()}
    return [*map(integral, value)] if isinstance(value, list) else value


def _is_mark(schema: JSONSchema) -> bool:
    """Whether `schema` itself marks its values as sensitive, as pydantic's SecretStr does."""
    is_secret = schema.get("format") == "password" and schema.get("writeOnly") is True
    return is_secret or schema.get("x-sensitive") is True


def marks_sensitive(schema: JSONSchema) -> bool:
    """Whether anything in `schema` is marked as sensitive."""
    return any(map(_is_mark, subschemas(schema)))


def mentions_mark(part: Any) -> bool:
    """Whether anything in it looks like a mark, wherever it stands: of what no reference can be followed in."""
    if isinstance(part, dict):
        return _is_mark(part) or any(map(mentions_mark, part.values()))
    return isinstance(part, list) and any(map(mentions_mark, part))


# ---- References ----


class SchemaConverter:
    """Put what each `$ref` points at in its place: `{"$ref": "#/$defs/Size"}` becomes the schema of a size.

    The result accepts exactly what apcore accepts by the schema, which it reads as 2020-12 whatever `$schema` says.
    ValueError for a schema that the metaschema refuses, for one that refers to itself or has references inside
    references more than 32 deep, and for a result of more than 50,000 schemas; KeyError for a reference to nothing.
    `model` is the pydantic model that the schema is of, if any: the titles that pydantic makes of the names of fields
    and classes say nothing and are left out, while an author's own are kept. With `cuts`, the result may accept more:
    an object that leads back into itself is any object there. Not where anything is marked, as nobody would see it."""

    def __init__(self, model: Any = None, cuts: bool = False) -> None:
        self._model = model
        self._cuts = cuts

    def inline(self, schema: JSONSchema) -> JSONSchema:
        """Return `schema` without references and without definitions. Source: FR-SCHEMA-002."""
        self._root = schema
        self._resolver: Any = None  # of references in the root, where there are any
        self._circular: set[str] = set()  # references that lead back into themselves
        self._nodes = 0
        name = _PYDANTIC_NAMES.normalize_name(getattr(self._model, "__name__", "-"))
        return self._without_class_name(self._visit(schema, None, ["#"]), name)

    def _visit(self, node: Any, resolver: Any, opened: list[str], place: str = "") -> JSONSchema:
        """Copy `node`, with `{}` for `true` and `{"not": {}}` for `false`, as MCP wants objects. `opened` are the
        references that led to it, outermost first, `place` the names; `resolver` follows others, from the root where
        it is None."""
        if isinstance(node, bool):
            return {} if node else {"not": {}}
        self._nodes += 1
        if self._nodes > _NODES_MAX:
            raise UnconvertibleSchema(f"Maximum recursion depth exceeded: more than {_NODES_MAX} nodes")
        result = {key: value for key, value in node.items() if key not in _FOR_REFERENCES or value == _DIALECT}
        try:
            if self._model is None:  # pydantic writes no illegal ones, and patterns that Python cannot read
                _METASCHEMA.validate_python(result, strict=True)
        except ValidationError as error:
            fault = error.errors()[0]
            raise ValueError(f"illegal schema at {place or 'its root'}: {fault['loc'][0]}: {fault['msg']}") from None
        prefix = f"{place}." if place else ""
        result = map_subschemas(result, lambda inner, name: self._visit(inner, resolver, opened, prefix + name))
        if "$ref" in result:
            target = self._target(result.pop("$ref"), resolver, opened, place)
            if result.keys() & CONSTRAINTS:
                # Both hold. If the two were merged, a constraint of one could replace the other's.
                result["allOf"] = [target, *result.get("allOf", ())]
            else:
                result = {**target, **result}
        if self._circular:  # these accept less when what is in them accepts more
            result = {"anyOf" if key == "oneOf" else key: result[key] for key in result if key not in _NARROWING}
        return self._complete(result)

    def _target(self, ref: str, resolver: Any, opened: list[str], place: str) -> JSONSchema:
        if self._resolver is None:
            self._resolver = SchemaResources().resolver_with_root(DRAFT202012.create_resource(self._root))
        resolver = resolver or self._resolver
        circle = opened[opened.index(ref) :] if ref in opened else []
        self._circular.update(circle)
        if circle or (ref in self._circular and not self._circular.isdisjoint(opened)):  # each once: they multiply
            again = resolver.lookup(ref).contents
            if not self._cuts or types_of(again) != ["object"] or mentions_mark(self._root):
                raise UnconvertibleSchema(f"Circular reference: {' -> '.join(map(posixpath.basename, [*circle, ref]))}")
            text = "object, as the whole" if ref == "#" else f"{again.get('title', posixpath.basename(ref))}, as above"
            return {"type": "object", "description": f"another {text}"}
        if len(opened) > _REF_DEPTH_MAX:
            raise UnconvertibleSchema(f"Maximum recursion depth exceeded: more than {_REF_DEPTH_MAX} references")
        try:
            target = resolver.lookup(ref)
        except Unresolvable:
            raise KeyError(f"definition {posixpath.basename(ref)} is missing") from None
        schema = self._visit(target.contents, target.resolver, [*opened, ref], place)
        return self._without_class_name(schema, posixpath.basename(ref))

    def _without_class_name(self, schema: JSONSchema, name: str) -> JSONSchema:
        """`schema` without a title that is all of `name`, or part of it as of `shop__models__Order__1`."""
        title = _PYDANTIC_NAMES.normalize_name(schema.get("title", ""))
        if self._model is not None and title and f"__{title}__" in f"__{name}__":
            del schema["title"]
        return schema

    def _complete(self, schema: JSONSchema) -> JSONSchema:
        """`schema` with what clients want to be said, and without what nobody has written."""
        if self._model is not None:
            for name, field in properties_of(schema).items():
                if field.get("title") == _PYDANTIC_NAMES.get_title_from_name(name):
                    del field["title"]
        for keyword in ("default", "example", "examples"):
            # A marked value's would be a secret, and one that JSON cannot say would cost the tool its module.
            if keyword in schema and (not is_json(schema[keyword]) or marks_sensitive(schema)):
                del schema[keyword]
        # VS Code refuses its whole request for one array or object without these.
        if "array" in types_of(schema):
            schema.setdefault("items", {})
        if "object" in types_of(schema):
            schema.setdefault("properties", {})
        return schema


# ---- What is advertised ----


def admits_object(schema: JSONSchema) -> bool:
    """Whether `schema` lets objects through, as far as types and unions tell."""
    unions = branches(schema, ["anyOf", "oneOf"])
    return "object" in (types_of(schema) or ["object"]) and (not unions or any(map(admits_object, unions)))


def object_schema(schema: JSONSchema, model: Any = None) -> JSONSchema:
    """A module's arguments as a self-contained object schema (FR-SCHEMA-001, -003, -004, -006): `{}` becomes
    `{"type": "object", "properties": {}}`. ValueError or KeyError where that cannot be, or the root is no object."""
    inlined = SchemaConverter(model, cuts=True).inline(schema)
    if not admits_object(inlined):
        raise ValueError(f"Input schema must describe an object, got type {inlined.get('type')!r}")
    return {**inlined, "type": "object", "properties": properties_of(inlined)}


def form_of(requested_schema: JSONSchema | None) -> JSONSchema:
    """The schema that a client is sent with a question: self-contained, an object of fields of a simple type each.

    ValueError for any other, and for a pattern: Python's `re` can take days to hold an answer against one."""
    try:
        form = object_schema(plain_json(requested_schema or {}))
    except (ValueError, KeyError) as error:
        raise ValueError(f"A question's schema cannot be sent: {error}") from None
    if branches(form, [*IN_PLACE, "patternProperties"]):
        raise ValueError("A question's schema says no more than which properties there are")
    for name, field in form["properties"].items():
        is_choice = types_of(field) == ["array"] and {"enum", "anyOf"} & field["items"].keys()
        is_simple = len(types_of(field)) == 1 and types_of(field)[0] in ("string", "number", "integer", "boolean")
        if any("pattern" in part for part in subschemas(field)) or not (is_choice or is_simple):
            raise ValueError(f"A question's field is a simple type without a pattern, or a list of choices: {name}")
    return form


def nullable(schema: JSONSchema) -> JSONSchema:
    """`schema`, changed to accept null as well."""
    if schema.keys() & CONSTRAINTS == {"anyOf"} and {"type": "null"} in schema["anyOf"]:
        return schema  # pydantic's Optional; with a validator for it, a start with many tools would take longer by 7 %
    if is_valid(None, schema):
        return schema
    nullable = {**schema}
    if "type" in schema:
        nullable["type"] = [*dict.fromkeys([*types_of(schema), "null"])]
    if "enum" in schema:
        nullable["enum"] = [*schema["enum"], None]
    return nullable if is_valid(None, nullable) else {"anyOf": [schema, {"type": "null"}]}


def media_types_of(schema: JSONSchema) -> dict[str, str]:
    """The properties that are files, or arrays of files, with their media types: strings of base64 that have one."""
    media_types: dict[str, str] = {}
    for part in in_place(schema):
        for name, field in properties_of(part).items():
            for view in in_place(field):
                files = branches(view, ["prefixItems"]) or branches(view, ["items"]) or [view]
                kinds = {(file.get("contentEncoding"), file.get("contentMediaType")) for file in files}
                encoding, media_type = kinds.pop()
                if encoding == "base64" and media_type is not None and not kinds:
                    media_types.setdefault(name, media_type)
    return media_types


# The keywords of a module's output schema that are advertised. AJV, which TypeScript clients use, has to read them as
# Python does: it reads draft 7, stops at patterns that are everyday Python, checks formats in another sense, and finds
# 1.13 no multiple of 0.01. Limits of length hold for other texts than those that are sent (bytes, secrets).
_PROMISED = frozenset(
    "type properties required additionalProperties items prefixItems anyOf oneOf allOf enum const minimum maximum"
    " exclusiveMinimum exclusiveMaximum minItems maxItems title description default examples deprecated".split()
)


def promise_of(schema: JSONSchema, *more: str) -> JSONSchema:
    """What holds of each value that is sent by `schema`: never stricter than `schema` itself. `more` are keywords that
    it says beside those that are advertised."""
    promise = {key: value for key, value in schema.items() if key in _PROMISED or key in more}
    if "prefixItems" in schema:  # AJV, by draft 7, would hold `items` against all of them
        promise["items"] = {}
    if "patternProperties" in schema or schema.get("additionalProperties") is False:
        promise.pop("additionalProperties", None)
    if "oneOf" in promise:  # without the keywords that are left out, a value may fit several branches
        promise["anyOf"] = promise.pop("oneOf")
    promise = map_subschemas(promise, lambda inner, _: promise_of(inner, *more))
    # A default need not fit its field, as in `size: int = None`: pydantic and apcore do not check it.
    return nullable(promise) if schema.get("default", promise) is None else promise


# ---- Secrets ----

# Keywords whose schemas apply to parts of the value that nobody looks for: a mark there hides the whole value.
_WHOLE = frozenset("patternProperties contains propertyNames contentSchema additionalItems dependencies".split())


def marks_of_schema(schema: JSONSchema) -> JSONSchema:
    """The marks and the names of a self-contained schema, and nothing else; `{}` where it marks nothing.

    `{"properties": {"a": {"type": "string", "x-sensitive": True}, "b": {}}}` becomes
    `{"properties": {"a": {"x-sensitive": True}, "b": {}}}`."""

    def outline(part: JSONSchema, _: str = "") -> JSONSchema:
        if _is_mark(part) or any(map(marks_sensitive, branches(part, _WHOLE))):
            return {"x-sensitive": True}
        return map_subschemas({key: value for key, value in part.items() if key in _WITH_SCHEMAS}, outline)

    return outline(schema) if marks_sensitive(schema) else {}
