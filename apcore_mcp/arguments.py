"""What a module takes: the schema of its arguments, what is wrong with some, and what people may be shown of them.

`Arguments` is made of any module, also of one that is no tool, as others may call it.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import Any

from apcore import ModuleDescriptor, errors
from apcore.utils.redaction import REDACTED_VALUE
from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_jsonable_python

from .faults import FAULTS_MAX, fault_at, pydantic_faults, schema_faults
from .functions import function_of
from .hints import ReadForm, core_schema_of, is_secret, nodes_of, read_form
from .schemas import (
    IN_PLACE,
    OTHER_PROPERTIES,
    JSONObject,
    JSONSchema,
    ModelType,
    SchemaConverter,
    admits,
    in_place,
    map_subschemas,
    marks_of_schema,
    marks_sensitive,
    mentions_mark,
    object_schema,
    part_schemas,
    properties_of,
    without_defaults,
)
from .values import marks_default, marks_in, redact

__all__ = ["Arguments"]


class Arguments:
    """The arguments of one module, by the model or the dict schema by which apcore validates them."""

    def __init__(self, module: Any, descriptor: ModuleDescriptor) -> None:
        self.function = function_of(module)
        self.model: Any = getattr(module, "input_schema", None)
        self.declared: JSONSchema = descriptor.input_schema  # as a JSON schema, which may have references
        if self.function is not None and self.function.model not in (None, self.model):
            self.model = self.function.model
            self.declared = self.model.model_json_schema()
        if isinstance(self.model, ModelType):
            nodes = nodes_of(core_schema_of(TypeAdapter(self.model)))
            if any(map(is_secret, nodes)):
                self.declared = read_form(self.model)
            if marks_default(nodes):
                self.declared = without_defaults(self.declared)

    @cached_property
    def _inlined(self) -> JSONSchema:
        return object_schema(self.declared, self.model if isinstance(self.model, ModelType) else None)

    @cached_property
    def _is_closed(self) -> bool:
        """Whether it is a function that takes no other names than its schema has."""
        names_all = not self._inlined.keys() & {*IN_PLACE, *OTHER_PROPERTIES}
        return self.function is not None and self.function.others is None and names_all

    @cached_property
    def schema(self) -> JSONSchema:
        """As clients are told it: self-contained. ValueError or KeyError where that cannot be."""
        # apcore would pass on what a function does not take, and Python raise a TypeError.
        return {**self._inlined, "additionalProperties": False} if self._is_closed else self._inlined

    def unknown(self, arguments: JSONObject) -> dict[str, Any]:
        """The arguments that a function does not take."""
        with suppress(ValueError, KeyError):  # of what cannot be listed
            if self._is_closed:
                names = {*properties_of(self._inlined), *properties_of(self._by_spellings)}
                return {name: value for name, value in arguments.items() if name not in names}
        return {}

    def faults(self, arguments: JSONObject) -> list[dict[str, str]]:
        """What apcore finds wrong with arguments, each field by its full path; the first twenty.

        Only arguments for a dict schema are shown to jsonschema, as apcore does itself: for a pattern, it may take
        minutes where a pydantic model takes milliseconds."""
        unknown = self.unknown(arguments)
        first = itertools.islice(unknown, FAULTS_MAX)
        faults = [fault_at([name], "extra_forbidden", "Extra inputs are not permitted") for name in first]
        if hasattr(self.model, "model_validate_json"):
            try:
                self._read(arguments)
            except ValidationError as error:
                faults += pydantic_faults(error, arguments, self._by_spellings)
        else:
            known = {name: value for name, value in arguments.items() if name not in unknown}
            faults += schema_faults(self.declared, known)
        return faults[:FAULTS_MAX]

    def check(self, arguments: JSONObject) -> None:
        """Raise apcore's SchemaValidationError for arguments that the module would refuse."""
        faults = self.faults(arguments)
        if faults:
            raise errors.SchemaValidationError(f"Input validation failed: {faults}", faults)

    def _read(self, arguments: JSONObject) -> None:
        """Read arguments as apcore does: as JSON or, where another module passes what JSON has not, as Python."""
        try:
            text = json.dumps(arguments)
        except (TypeError, ValueError):
            self.model.model_validate(arguments, strict=True)
        else:
            self.model.model_validate_json(text, strict=True)

    def shown(self, arguments: JSONObject) -> tuple[JSONObject, JSONObject]:
        """The arguments as they were sent, in plain JSON without what is marked as sensitive: those that the schema
        names, and the others."""
        plain = json.loads(json.dumps(arguments, default=_to_show))
        plain = _as_described(plain, [self._by_spellings])
        plain = redact(plain, marks_of_schema(self._by_spellings), marks_in(arguments), hides_others=False)
        if plain == REDACTED_VALUE:  # the schema as a whole is marked
            plain = dict.fromkeys(arguments, REDACTED_VALUE)
        names = {name for part in in_place(self._by_spellings) for name in properties_of(part)}
        known = {name: plain.pop(name) for name in [*plain] if name in names}
        return known, plain

    @cached_property
    def _by_spellings(self) -> JSONSchema:
        """The schema with each property under all names by which it may be sent: a model's field has an alias or more,
        beside its own name. Where that cannot be said, all is marked if anything is."""
        converter = SchemaConverter(self.model, cuts=True)
        with suppress(Exception):  # an author's own `json_schema_extra` may look for an alias
            schema = self.declared
            if isinstance(self.model, ModelType):
                schema = self.model.model_json_schema(by_alias=False, schema_generator=_WithSpellings)
            return _spelled(converter.inline(schema))
        with suppress(ValueError, KeyError):
            return _spelled(_read_by_author(converter.inline(self.declared)))
        return {"x-sensitive": True} if mentions_mark(self.declared) else self.declared


_PATHS = "x-alias-paths"
_OWN_READING = "x-own-reading"


class _WithSpellings(ReadForm):
    """Writes the names of fields, and beside each field the paths of its aliases: `[["pin"], ["card", 0]]`. What an
    author's validator reads is described by what it stands before, and said to be read in a way of his own."""

    def model_field_schema(self, schema: Any) -> JSONSchema:
        return _with_paths(super().model_field_schema(schema), schema)

    def dataclass_field_schema(self, schema: Any) -> JSONSchema:
        return _with_paths(super().dataclass_field_schema(schema), schema)

    def typed_dict_field_schema(self, schema: Any) -> JSONSchema:
        return _with_paths(super().typed_dict_field_schema(schema), schema)

    def function_before_schema(self, schema: Any) -> JSONSchema:
        return {**self.generate_inner(schema["schema"]), _OWN_READING: True}

    function_wrap_schema = function_before_schema

    def function_plain_schema(self, schema: Any) -> JSONSchema:
        written = schema.get("serialization") or {}
        inner = written.get("schema") or written.get("return_schema")  # of the type, which pydantic keeps for writing
        form = super().function_plain_schema(schema) if inner is None else self.generate_inner(inner)
        return {**form, _OWN_READING: True}


def _with_paths(schema: JSONSchema, field: Any) -> JSONSchema:
    """`schema` of a field of pydantic-core's, whose alias is a name, a path, or a list of paths."""
    alias = field.get("validation_alias") or []
    path = [alias] if isinstance(alias, str) else alias
    paths = path if path and isinstance(path[0], list) else [path]
    return {**schema, _PATHS: [path for path in paths if path]}


def _spelled(schema: JSONSchema) -> JSONSchema:
    """Copy `schema` with each property under its aliases, too. Where one is a path, what it begins with holds the value
    somewhere: it is marked as a whole if anything of the value is. So is what an author may read as a marked value."""
    copied = map_subschemas(schema, lambda inner, _: _spelled(inner) if isinstance(inner, dict) else inner)
    properties = properties_of(copied)
    spellings: dict[str, list[JSONSchema]] = {}
    for field in properties.values():
        for first, *others in field.get(_PATHS, ()):
            whole = {"x-sensitive": True} if marks_sensitive(field) else {}
            spellings.setdefault(first, []).append(whole if others else field)
    for name, fields in spellings.items():
        own = [properties[name]] if name in properties else []
        properties[name] = {"anyOf": own + fields} if len(own + fields) > 1 else fields[0]
    if copied.get(_OWN_READING) and "properties" in copied and marks_sensitive(copied):
        copied["additionalProperties"] = {"x-sensitive": True}
    return copied


def _read_by_author(schema: JSONSchema) -> JSONSchema:
    """`schema` as if an author's validator read each object in it."""
    copied = map_subschemas(schema, lambda inner, _: _read_by_author(inner) if isinstance(inner, dict) else inner)
    return {**copied, _OWN_READING: True}


def _as_described(value: Any, schemas: Iterable[JSONSchema]) -> Any:
    """Copy plain JSON with the names that schemas have first, and with `***REDACTED***` where something of another type
    stands for what has marked parts: a model may read "Ada:1234" as a card with a number."""
    applied = [*in_place(*schemas)]
    if not any(admits(part, value) for part in applied) and any(map(marks_sensitive, applied)):
        return value if value is None else REDACTED_VALUE
    if isinstance(value, dict):
        described = [name for part in applied for name in properties_of(part) if name in value]
        names = dict.fromkeys([*described, *value])  # those that nothing describes in the order in which they were sent
        return {name: _as_described(value[name], [*part_schemas(applied, name)]) for name in names}
    if isinstance(value, list):
        return [_as_described(item, [*part_schemas(applied, step)]) for step, item in enumerate(value)]
    return value


def _kind(item: Any) -> str:
    """What a question shows of a value that nothing describes: its text, but only the type of one that holds others or
    that has no text but a `__repr__`, as these may quote what is marked."""
    has_text = any("__str__" in vars(kind) for kind in type(item).__mro__[:-1]) and not hasattr(item, "__iter__")
    return str(item) if has_text else f"<{type(item).__name__}>"


def _to_show(item: Any) -> Any:
    """What a question shows of a value that JSON has not, without using up an iterator."""
    return _kind(item) if isinstance(item, Iterator) else to_jsonable_python(item, bytes_mode="base64", fallback=_kind)
