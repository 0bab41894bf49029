"""Promises: JSON texts held against what a tool promises of its results, by pydantic's own core.

Functions of JSON schemas, with nothing of MCP in them.
"""

from __future__ import annotations

from typing import Any

from pydantic_core import SchemaValidator, core_schema

from .schemas import JSONSchema, branches, properties_of, types_of

_FORMATS: dict[str, Any] = {
    "date": core_schema.date_schema(),
    "date-time": core_schema.datetime_schema(),
    "time": core_schema.time_schema(),
    "duration": core_schema.timedelta_schema(),
    "uuid": core_schema.uuid_schema(),
}
_BOUNDS = {"ge": "minimum", "le": "maximum", "gt": "exclusiveMinimum", "lt": "exclusiveMaximum"}
_SIZES = {"min_length": "minItems", "max_length": "maxItems"}


def _object_form(schema: JSONSchema) -> Any:
    others = schema.get("additionalProperties", True)
    other = _form(others) if isinstance(others, dict) else core_schema.any_schema()
    required = schema.get("required", ())
    fields = {
        name: core_schema.typed_dict_field(_form(field), required=name in required)
        for name, field in properties_of(schema).items()
    }
    return core_schema.typed_dict_schema(fields, extras_schema=other, extra_behavior="allow")


def _form_of_type(schema: JSONSchema, name: str) -> Any:
    """The core schema of the values of one JSON type that fit `schema`."""
    bounds: Any = {key: schema[keyword] for key, keyword in _BOUNDS.items() if keyword in schema}
    sizes: Any = {key: schema[keyword] for key, keyword in _SIZES.items() if keyword in schema}
    if name == "object":
        return _object_form(schema)
    if name == "array":
        items = _form(schema.get("items", {}))
        first = [_form(item) for item in schema.get("prefixItems", ())]
        if first:
            return core_schema.tuple_schema([*first, items], variadic_item_index=len(first), **sizes)
        return core_schema.list_schema(items, **sizes)
    if name == "integer":
        return core_schema.int_schema(**bounds)
    if name == "number":
        return core_schema.float_schema(allow_inf_nan=False, **bounds)
    if name == "boolean":
        return core_schema.bool_schema()
    if name == "null":
        return core_schema.none_schema()
    return _FORMATS.get(schema.get("format", ""), core_schema.str_schema())


def _form(schema: JSONSchema) -> Any:
    """The core schema of what a promise says: never stricter. Of keywords that hold beside others, one is enough."""
    if "enum" in schema or "const" in schema:
        return core_schema.literal_schema(schema.get("enum") or [schema["const"]])
    choices = branches(schema, ["anyOf"])
    forms = [_form(choice) for choice in choices] or [_form_of_type(schema, name) for name in types_of(schema)]
    if not forms:
        return core_schema.any_schema()
    return forms[0] if len(forms) == 1 else core_schema.union_schema(forms, mode="left_to_right")


def validator_of(promise: JSONSchema) -> SchemaValidator:
    """What holds JSON texts against a promise (`promise_of()`), in a microsecond or two where jsonschema takes 50."""
    return SchemaValidator(_form(promise))
