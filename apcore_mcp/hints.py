"""Hints: what pydantic writes by a return hint or a model, told by its core schema, by which it writes itself.

Functions of core schemas and JSON schemas, with nothing of MCP in them. What a core schema does not say for certain is
taken for open, so that a new kind of pydantic's, and a pydantic that is not known, hides too much and never too little.
"""

from __future__ import annotations

import builtins
import dataclasses
import sys
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from enum import Flag
from typing import Any, TypeGuard, cast, get_type_hints

import pydantic
from pydantic import ConfigDict, Secret, SecretStr, TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError
from pydantic.json_schema import GenerateJsonSchema, JsonRef

from .schemas import (
    JSONObject,
    JSONSchema,
    SchemaConverter,
    UnconvertibleSchema,
    marks_of_schema,
    mentions_mark,
)

CoreSchema = JSONObject

_KNOWN = pydantic.VERSION.startswith(("2.12.", "2.13.", "2.14."))
# The kinds of core schemas that write what their JSON schema says, each with the keys of the schemas by which it does.
_WRITTEN_BY = {
    kind: frozenset(keys.split())
    for kinds, keys in {
        "none bool int float decimal str date time datetime timedelta uuid complex literal enum url multi-host-url": "",
        "definition-ref missing-sentinel": "",
        "list tuple set frozenset generator": "items_schema",
        "dict": "keys_schema values_schema",
        "typed-dict model-fields dataclass-args": "fields",
        "typed-dict-field model-field dataclass-field model dataclass": "schema",
        "nullable default custom-error function-before function-after function-wrap": "schema",
        "computed-field": "return_schema",
        "union tagged-union": "choices",
        "json-or-python": "json_schema",
        "lax-or-strict": "strict_schema",
        "chain": "steps",
        "definitions": "schema definitions",
    }.items()
    for kind in kinds.split()
}
NO_SCHEMAS = frozenset("metadata config default expected members".split())  # keys of a core schema that hold others


def core_schema_of(adapter: TypeAdapter[Any]) -> CoreSchema:
    """By what pydantic reads and writes, also of classes that put it off until they are used."""
    adapter.rebuild()
    return cast(CoreSchema, adapter.core_schema)


def is_schema(part: Any) -> TypeGuard[CoreSchema]:
    """Whether it is a core schema, and not several by names or by tags, of which one may be "metadata"."""
    return isinstance(part, dict) and isinstance(part.get("type"), str)


def _schemas(part: Any) -> Iterable[CoreSchema]:
    """The core schemas that stand under one key, be it one, several, several with labels, or several by names."""
    if isinstance(part, dict):
        return [part] if is_schema(part) else part.values()
    return [each[0] if isinstance(each, tuple) else each for each in part]


_HOLDERS = (dict, list, tuple)


def _parts_of(part: Any) -> Iterable[Any]:
    """What may hold core schemas: in a core schema, or in what has several by names, by tags or in a row."""
    if is_schema(part):
        return [inner for key, inner in part.items() if isinstance(inner, _HOLDERS) and key not in NO_SCHEMAS]
    if isinstance(part, dict):
        return part.values()
    return part if isinstance(part, _HOLDERS) else ()


def nodes_of(schema: CoreSchema) -> list[CoreSchema]:
    """`schema` and all core schemas in it, the outer ones first."""
    parts: list[Any] = [schema]
    for part in parts:  # which grows
        parts += _parts_of(part)
    return [part for part in parts if is_schema(part)]


# ---- JSON schemas of what pydantic reads and writes ----

DECIMAL = "decimal"  # a format of our own, which is not advertised
BASE64 = "base64"  # the format of pydantic's `Base64Bytes`, which encodes itself
_UNSAID = "as a serializer without a return type writes it"
# What pydantic has no public names for: by what `Secret[...]` is read (a function made for each type) and written, and
# by what `SecretStr` and `SecretBytes` are written.
_SECRET = core_schema_of(TypeAdapter(Secret[str]))
_SECRET_READ = _SECRET["python_schema"]["function"]["function"].__code__
_SECRET_WRITTEN = _SECRET["serialization"]["function"]
_SECRET_TEXT_WRITTEN = core_schema_of(TypeAdapter(SecretStr))["strict_schema"]["serialization"]["function"]


def _is_pydantics(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").startswith("pydantic.")


def _is_authors(serializer: JSONObject | None) -> bool:
    """Whether nothing says what `serializer` writes: an author's without a return type or with an open one such as Any,
    or `SerializeAsAny`."""
    if not serializer or _is_pydantics(serializer.get("function")):
        return False
    return "return_schema" not in serializer or is_open(serializer["return_schema"])


def _is_of_class(schema: CoreSchema) -> bool:
    """Whether a model or a dataclass is written by its author's own function. What that says of its type does not tell
    under which names it writes what is marked."""
    function = (schema.get("serialization") or {}).get("function")
    return schema.get("type") in ("model", "dataclass") and function is not None and not _is_pydantics(function)


def _is_plain(enum: CoreSchema) -> bool:
    """Whether the values of an enum are those of its members: texts and numbers, no models, and no flags, of which
    several may be one value."""
    has_all = not issubclass(enum["cls"], Flag)
    return has_all and all(isinstance(each.value, str | int | float) for each in enum["members"])


def is_secret(schema: CoreSchema) -> bool:
    """Whether a core schema is that of pydantic's `SecretStr`, `SecretBytes` or `Secret[...]`, whatever its author says
    of its JSON schema and by whatever function it is written."""
    if schema["type"] == "lax-or-strict":
        return (schema["strict_schema"].get("serialization") or {}).get("function") is _SECRET_TEXT_WRITTEN
    read = schema["python_schema"].get("function") if schema["type"] == "json-or-python" else None
    return isinstance(read, dict) and getattr(read["function"], "__code__", None) is _SECRET_READ


class ReadForm(GenerateJsonSchema):
    """The JSON schema of what pydantic reads, with a mark for its secrets, which theirs may not have, and `{}` for what
    JSON Schema cannot say."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JSONSchema:
        return {}

    def generate_inner(self, schema: Any) -> JSONSchema:
        form = super().generate_inner(schema)
        return self.marked(schema, form) if is_secret(schema) else form

    def marked(self, schema: CoreSchema, form: JSONSchema) -> JSONSchema:
        """`form`, the JSON schema of `schema`, with a mark: where that is a definition, at the other end of `form`."""
        target = self.get_schema_from_definitions(JsonRef(form["$ref"])) if "ref" in schema and "$ref" in form else None
        if target is None:
            return {**form, "x-sensitive": True}
        target["x-sensitive"] = True
        return form


class _WrittenForm(ReadForm):
    """The JSON schema of what pydantic writes, not of what it reads."""

    def generate(self, schema: Any, mode: Any = "serialization") -> JSONSchema:
        self._whole: CoreSchema = schema
        return super().generate(schema, mode)

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def enum_schema(self, schema: Any) -> JSONSchema:
        return super().enum_schema(schema) if _is_plain(schema) else {}

    def encode_default(self, dft: Any) -> Any:
        # Pydantic makes a TypeAdapter for each default, which takes a fifth of all this.
        return dft if dft is None or type(dft) in (str, bool, int) else super().encode_default(dft)

    def decimal_schema(self, schema: Any) -> JSONSchema:
        return {**super().decimal_schema(schema), "format": DECIMAL}

    def generate_inner(self, schema: Any) -> JSONSchema:
        form = super().generate_inner(schema)
        # An author's function is described by its return type alone, which marks nothing.
        is_rewritten = bool(schema.get("serialization")) and not _is_pydantics(schema["serialization"].get("function"))
        return self.marked(schema, form) if is_rewritten and hints_mark(schema, self._whole) else form

    def ser_schema(self, schema: Any) -> JSONSchema | None:
        if schema["type"].startswith("function") and _is_authors(schema):
            return {"$comment": _UNSAID}
        if schema.get("function") is _SECRET_WRITTEN:
            return {"x-sensitive": True}
        return super().ser_schema(schema)


# To write the schema of a model takes longer than all else at a start; nothing is kept of a class that is gone.
_WRITTEN_FORMS: weakref.WeakKeyDictionary[type, JSONSchema] = weakref.WeakKeyDictionary()


def read_form(hint: Any, adapter: TypeAdapter[Any] | None = None) -> JSONSchema:
    """The JSON schema of what pydantic reads by a model or another hint."""
    return (adapter or TypeAdapter(hint)).json_schema(schema_generator=ReadForm)


def written_form(hint: Any, adapter: TypeAdapter[Any]) -> JSONSchema:
    """The JSON schema of what pydantic writes by a model or another hint, of which it is the `adapter`."""
    if isinstance(hint, type) and hint in _WRITTEN_FORMS:
        return _WRITTEN_FORMS[hint]
    schema = adapter.json_schema(mode="serialization", schema_generator=_WrittenForm)
    if isinstance(hint, type):
        _WRITTEN_FORMS[hint] = schema
    return schema


# ---- What is marked ----


def marks_in_form(schema: JSONSchema) -> JSONSchema:
    """The marks of a schema with references; where these cannot be followed, any mark stands for the whole."""
    try:
        return marks_of_schema(SchemaConverter().inline(schema))
    except UnconvertibleSchema:
        return {"x-sensitive": True} if mentions_mark(schema) else {}


def marks_of_hint(hint: Any) -> JSONSchema:
    """The marks of what pydantic reads and writes by a return hint."""
    try:
        adapter = TypeAdapter[Any](hint)
    except PydanticSchemaGenerationError:  # of a class that pydantic does not know, such as an array of NumPy's
        adapter = TypeAdapter[Any](hint, config=ConfigDict(arbitrary_types_allowed=True))
    marked = [*filter(None, map(marks_in_form, (read_form(hint, adapter), written_form(hint, adapter))))]
    return {"anyOf": marked} if marked else {}


class _Names(dict[str, Any]):
    """The names that the hints of a class may use; one that is only there for type checkers is Any."""

    def __init__(self, kind: type) -> None:
        super().__init__({**vars(builtins), **vars(sys.modules[kind.__module__])})

    def __missing__(self, name: str) -> Any:
        return Any


def _marks_by_field(kind: Any) -> JSONSchema:
    """The marks of a dataclass, field by field: pydantic knows none of them where it has no schema for one (an array of
    NumPy's), and not those that `__init__` does not take and that have no default."""
    hints = get_type_hints(kind, localns=_Names(kind), include_extras=True)
    marks = {field.name: marks_of_hint(hints[field.name]) for field in dataclasses.fields(kind)}
    return {"properties": marks} if any(marks.values()) else {}


# What is marked in the models and dict schemas of modules; nothing is kept of a class that is gone.
_MARKS_OF: weakref.WeakKeyDictionary[Any, JSONSchema] = weakref.WeakKeyDictionary()


def marks_of(schema: Any) -> JSONSchema:
    """The marks of a model, a dataclass or what apcore makes of a dict schema, both as values are read and as they are
    written by it. All is marked where a model cannot be read: it may be a user's own class."""
    if schema is None or isinstance(schema, dict):
        return marks_of_schema(schema or {})
    if schema not in _MARKS_OF:
        marks: JSONSchema = {"x-sensitive": True} if hasattr(schema, "model_json_schema") else {}
        with suppress(Exception):
            marks = marks_of_hint(schema) if isinstance(schema, type) else marks_in_form(schema.model_json_schema())
        if dataclasses.is_dataclass(schema):
            with suppress(Exception):
                marks = {"anyOf": [*filter(None, [marks, _marks_by_field(schema)])]}
        _MARKS_OF[schema] = marks if any(marks.values()) else {}
    return _MARKS_OF[schema]


def subclasses_mark(kinds: Iterable[type]) -> bool:
    """Whether a subclass of one of these classes marks something: pydantic writes an instance of it by the base."""
    for base in kinds:
        derived: list[type] = type.__subclasses__(base)
        for kind in derived:
            if marks_of(kind) or subclasses_mark([kind]):
                return True
    return False


# ---- What is open ----


_JSON_SCHEMA_MAKERS = frozenset(["pydantic_js_functions", "pydantic_js_annotation_functions", "pydantic_js_extra"])


def _is_restated(schema: CoreSchema) -> bool:
    """Whether the JSON schema of a core schema is an author's: `WithJsonSchema`, `SkipJsonSchema`, a function."""
    metadata = schema.get("metadata") or {}
    if "cls" not in schema and _JSON_SCHEMA_MAKERS.isdisjoint(metadata):  # as most: a start looks at all that there are
        return False
    functions = [*metadata.get("pydantic_js_functions", ()), *metadata.get("pydantic_js_annotation_functions", ())]
    functions += filter(callable, [metadata.get("pydantic_js_extra")])
    functions += filter(callable, [getattr(schema.get("cls"), "model_config", {}).get("json_schema_extra")])
    return any(not _is_pydantics(each) or each.__module__ == "pydantic.json_schema" for each in functions)


def is_open(schema: CoreSchema) -> bool:
    """Whether pydantic may write something by `schema` that its JSON schema does not say."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        config = node.get("config") or {}
        others = (node.get("extra_behavior"), config.get("extra_fields_behavior"))
        if not _KNOWN or "allow" in others or config.get("polymorphic_serialization") or _is_restated(node):
            return True
        serializer = node.get("serialization")
        if serializer:  # what an author's own function reads says nothing of its type
            if _is_authors(serializer) or _is_of_class(node) or node["type"] == "function-plain":
                return True
            if "return_schema" in serializer:
                waiting.append(serializer["return_schema"])
                continue
            if node.get("schema", {}).get("type") == "bytes":  # `Base64Bytes`, whose text pydantic writes
                continue
        kind = node["type"]
        keys = _WRITTEN_BY.get(kind)
        if keys is None or not keys <= node.keys() or (kind == "enum" and not _is_plain(node)):
            return True
        if kind == "dict" and node["keys_schema"]["type"] != "str":  # of which two may have one name
            return True
        waiting += [part for key in keys for part in _schemas(node[key])]
        waiting += node.get("computed_fields", ())
    return False


def _is_own(serializer: Any, kind: type) -> bool:
    """Whether a class itself has `serializer`, and not a hint that names the class."""
    function = serializer.get("function")
    return function is not None and getattr(kind, getattr(function, "__name__", ""), None) is function


def _outside_classes(schema: CoreSchema, whole: CoreSchema) -> Iterator[CoreSchema]:
    """`schema`, a part of the `whole` that has its definitions, and the core schemas in it, but for what models and
    dataclasses in it say themselves."""
    parts: list[Any] = [schema]
    definitions: dict[str, CoreSchema] = {}
    while parts:
        part = parts.pop()
        if is_schema(part):
            yield part
            if part["type"] == "definition-ref":
                definitions = definitions or {node["ref"]: node for node in nodes_of(whole) if "ref" in node}
                parts.append(definitions.get(part["schema_ref"]))
                definitions[part["schema_ref"]] = {}  # once
        if not is_schema(part) or part["type"] not in ("model", "dataclass"):
            parts += _parts_of(part)


def rewritten(schema: CoreSchema, whole: CoreSchema) -> list[CoreSchema]:
    """The core schemas in `schema`, a part of `whole`, by which an author's function may write something in another
    form, but for what a model or dataclass in it says itself. `SerializeAsAny` is none: what it writes stands where it
    stood."""
    found = []
    for node in _outside_classes(schema, whole):
        serializer = node.get("serialization") or {}
        is_of_class = node["type"] in ("model", "dataclass") and _is_own(serializer, node["cls"])
        if _is_authors(serializer) and serializer.get("type") != "any" and not is_of_class:
            found.append(node)
    return found


def hints_mark(schema: CoreSchema, whole: CoreSchema) -> bool:
    """Whether hints mark something in `schema`, a part of `whole`, as in `list[SecretStr]`. What models and dataclasses
    mark, their instances tell."""
    for node in _outside_classes(schema, whole):
        metadata = node.get("metadata") or {}
        marked = mentions_mark([metadata.get("pydantic_js_extra"), metadata.get("pydantic_js_updates")])
        if marked or is_secret(node):
            return True
    return False


@dataclasses.dataclass
class Written:
    """How a model or a dataclass is written."""

    names: dict[str, str]  # of its attributes
    computed: list[str]  # properties that are written as well
    rewritten: set[str]  # the names whose values its author writes in a form of his own
    marked: set[str]  # and those of them in which a hint marks something
    is_rewritten: bool  # or all of it


_WRITTEN: weakref.WeakKeyDictionary[type, Written] = weakref.WeakKeyDictionary()


def how_written(kind: type) -> Written:
    """Of a model or a dataclass. Where pydantic cannot say, its author may write all of it."""
    if kind not in _WRITTEN:
        written = Written({}, [], set(), set(), is_rewritten=True)
        with suppress(Exception):  # a user's own class
            written = _how_written(kind)
        _WRITTEN[kind] = written
    return _WRITTEN[kind]


def _how_written(kind: type) -> Written:
    whole = core_schema_of(TypeAdapter(kind))
    own = next(node for node in nodes_of(whole) if node.get("cls") is kind)
    inner = next((node for node in nodes_of(own["schema"]) if "fields" in node and not own.get("root_model")), {})
    fields = inner.get("fields", {})
    fields = dict(fields) if isinstance(fields, dict) else {field["name"]: field for field in fields}
    computed = {field["property_name"]: field for field in inner.get("computed_fields", ())}
    fields.update(computed)
    names = {name: field.get("serialization_alias") or field.get("alias") or name for name, field in fields.items()}
    is_rewritten = bool(_is_of_class(own) or (own.get("root_model") and rewritten(own["schema"], whole)))
    by_name = {names[name]: [field] if is_rewritten else rewritten(field, whole) for name, field in fields.items()}
    rewritten_names = {name for name, nodes in by_name.items() if nodes}
    marked = {name for name, nodes in by_name.items() if any(hints_mark(node, whole) for node in nodes)}
    return Written(names, [*computed], rewritten_names, marked, is_rewritten)


def unsent_fields(nodes: Iterable[CoreSchema]) -> list[str]:
    """The fields of dataclasses that pydantic does not know, as `Loaf.tag`: those that `__init__` does not take and
    that have no default."""
    unsent = []
    for node in nodes:
        inner = node if node.get("type") == "dataclass" else {}
        while inner.get("type") != "dataclass-args" and isinstance(inner.get("schema"), dict):
            inner = inner["schema"]
        if inner.get("type") == "dataclass-args":
            kind = node["cls"]
            known = {field["name"] for field in inner["fields"]}
            unsent += [f"{kind.__name__}.{each.name}" for each in dataclasses.fields(kind) if each.name not in known]
    return unsent
