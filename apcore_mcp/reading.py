"""Reading: what is made of what a function returns, by its hint.

Pydantic's own reading, but that an instance of a class that the hint names stays what it is, wherever it stands.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter
from pydantic_core import SchemaValidator, core_schema

from .hints import NO_SCHEMAS, CoreSchema, core_schema_of, is_pydantics, is_schema, nodes_of, outside_classes


class Returned(BaseModel):
    """What a function returned, under the name by which apcore promises it: `result`."""

    model_config = ConfigDict(arbitrary_types_allowed=True)


class _Held:
    """What pydantic makes for a moment in the place of a model. For that, it would use the validator that the class
    brings, which runs the validators of the instances in it."""

    __slots__ = ("__dict__", "__pydantic_extra__", "__pydantic_fields_set__", "__pydantic_private__")


def _made(kind: Any) -> Callable[[Any], Any]:
    def make(held: Any) -> Any:
        values = {**vars(held), **(getattr(held, "__pydantic_extra__", None) or {})}
        return kind.model_construct(_fields_set=held.__pydantic_fields_set__, **values)

    return make


def _passing(kind: type) -> Callable[[Any, Any], Any]:
    def read(value: Any, make: Any) -> Any:
        return value if isinstance(value, kind) else make(value)

    return read


def _kind_of(schema: CoreSchema) -> type | None:
    """The model or dataclass that `schema` makes, whatever validators stand around it."""
    while schema["type"].startswith("function-") and "schema" in schema:
        schema = schema["schema"]
    return schema["cls"] if schema["type"] in ("model", "dataclass") else None


def _is_applied_again(schema: CoreSchema) -> bool:
    """Whether a function of an author's stands in a hint, as `AfterValidator` puts it there: on what is returned it has
    been applied already. A class or a method, which makes a value of its own type, is none."""
    held = schema.get("function")  # of a serializer it is the function itself
    function = held["function"] if isinstance(held, dict) and "schema" in schema else None
    return inspect.isfunction(function) and not is_pydantics(function) and _kind_of(schema) is None


def _is_read_otherwise(schema: CoreSchema) -> bool:
    """Whether pydantic would validate an instance anew by `schema`, or hand out a generator."""
    kind = schema["type"]
    config = schema.get("config") or {}
    is_around = kind.startswith("function-") and "schema" in schema
    return kind == "generator" or "revalidate_instances" in config or (is_around and _kind_of(schema) is not None)


def _reading(schema: Any, is_of_class: bool = False) -> Any:
    """Copy a core schema so that it lets each instance pass as it is and, unless it says what a class is made of, what
    fits without its author's functions."""
    if isinstance(schema, list | tuple):
        return type(schema)(_reading(part, is_of_class) for part in schema)
    if not isinstance(schema, dict):
        return schema
    kind = _kind_of(schema) if is_schema(schema) else None
    is_of_class = is_of_class or (kind is not None and not issubclass(kind, Returned))
    kept = {*NO_SCHEMAS, "serialization", "function"} if is_schema(schema) else ()
    copied: Any = {key: part if key in kept else _reading(part, is_of_class) for key, part in schema.items()}
    is_generator = schema.get("type") == "generator"
    is_applied_again = is_schema(schema) and not is_of_class and _is_applied_again(schema)
    if kind is None and not is_generator and not is_applied_again:
        return copied
    reference = {"ref": copied.pop("ref")} if "ref" in copied else {}
    if is_applied_again:
        choices = [copied["schema"]] if copied["type"] == "function-after" else [copied["schema"], copied]
        return {**core_schema.union_schema(choices, mode="left_to_right"), **reference}
    if kind is None:  # of a generator, which could be walked once, and not be asked for marks
        return {**core_schema.no_info_after_validator_function(list, copied), **reference}
    if copied["type"] == "model" and not copied.get("custom_init"):
        copied.pop("post_init", None)  # which `model_construct()` calls
        copied["cls"] = _Held
        copied = core_schema.no_info_after_validator_function(_made(kind), copied)
    return {**core_schema.no_info_wrap_validator_function(_passing(kind), copied), **reference}


class Reader:
    """Reads what a function returned by its hint: dicts become models and are checked, instances stay what they are."""

    def __init__(self, adapter: TypeAdapter[Any]) -> None:
        schema = core_schema_of(adapter)
        self._kind = _kind_of(schema)
        self.kinds = tuple({node["cls"] for node in nodes_of(schema) if node["type"] in ("model", "dataclass")})
        self._own: Any = adapter.validator
        self._validator = self._own
        hints = outside_classes(schema, schema, Returned)
        # By itself, pydantic leaves others as they are.
        if any(map(_is_read_otherwise, nodes_of(schema))) or any(map(_is_applied_again, hints)):
            self._validator = SchemaValidator(_reading(schema))

    def read(self, value: Any, strict: bool = True) -> Any:
        if self._kind is not None and isinstance(value, self._kind):
            return value
        return self._validator.validate_python(value, strict=strict)

    def read_json(self, text: bytes) -> Any:
        return self._own.validate_json(text, strict=True)  # in a text there are no instances
