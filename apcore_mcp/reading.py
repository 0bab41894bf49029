"""Reading: what is made of what a function returns, by its hint.

Pydantic's own reading, but that an instance of a class that the hint names stays what it is, wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter
from pydantic_core import SchemaValidator, core_schema

from .hints import NO_SCHEMAS, CoreSchema, core_schema_of, is_schema, nodes_of


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


def _is_read_otherwise(schema: CoreSchema) -> bool:
    """Whether pydantic would validate an instance anew by `schema`, or hand out a generator."""
    kind = schema["type"]
    config = schema.get("config") or {}
    is_around = kind.startswith("function-") and "schema" in schema
    return kind == "generator" or "revalidate_instances" in config or (is_around and _kind_of(schema) is not None)


def _reading(schema: Any) -> Any:
    """Copy a core schema so that it lets each instance pass as it is."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(_reading, schema))
    if not isinstance(schema, dict):
        return schema
    kept = {*NO_SCHEMAS, "serialization", "function"} if is_schema(schema) else ()
    copied: Any = {key: part if key in kept else _reading(part) for key, part in schema.items()}
    is_generator = schema.get("type") == "generator"
    kind = _kind_of(schema) if is_schema(schema) else None
    if kind is None and not is_generator:
        return copied
    reference = {"ref": copied.pop("ref")} if "ref" in copied else {}
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
        nodes = nodes_of(schema)
        self.kinds = tuple({node["cls"] for node in nodes if node["type"] in ("model", "dataclass")})
        # Whether it may walk through a generator, which can be done once: what did not fit at first would be lost.
        self.walks = any(node["type"] == "generator" for node in nodes)
        self._own: Any = adapter.validator
        self._validator = self._own
        if any(map(_is_read_otherwise, nodes)):  # by itself, pydantic leaves others as they are
            self._validator = SchemaValidator(_reading(schema))

    def read(self, value: Any, strict: bool = True) -> Any:
        if self._kind is not None and isinstance(value, self._kind):
            return value
        return self._validator.validate_python(value, strict=strict)

    def read_json(self, text: bytes) -> Any:
        return self._own.validate_json(text, strict=True)  # in a text there are no instances
