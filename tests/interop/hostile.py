"""Modules whose schemas are legal, and have taken every tool away from clients that compile them. Run with the port.

What is no schema at all must be missed by the client, and nothing else.
"""

from __future__ import annotations

import sys
from typing import Any

from apcore import Registry
from pydantic import BaseModel, Field

from apcore_mcp import serve

TEXT: dict[str, Any] = {"type": "string"}

# What a module returns in `value`, and the schema that it gives for it.
OUTPUTS: dict[str, tuple[Any, dict[str, Any] | bool]] = {
    "pattern_with_escapes": ("2026-11", {"type": "string", "pattern": r"^\d{4}\-\d{2}$"}),
    "pattern_with_a_name": ("ab", {"type": "string", "pattern": r"(?i)^(?P<first>a)b\Z"}),
    "pattern_in_a_union": (None, {"anyOf": [{"type": "string", "pattern": r"^\@"}, {"type": "null"}]}),
    "pattern_of_names": ({"x-a": "b"}, {"type": "object", "patternProperties": {r"^x\-": TEXT}}),
    "names_with_a_pattern": ({"x-a": "b"}, {"type": "object", "propertyNames": {"pattern": r"^x\-"}}),
    "anything": (1, True),
    "nothing_else": ({"a": 1}, {"type": "object", "properties": {"a": True}, "additionalProperties": False}),
    "items_of_any_kind": ([1, "a"], {"type": "array", "items": True}),
    "a_time_without_a_zone": ("2026-11-21T12:00:00", {"type": "string", "format": "date-time"}),
    "an_address_in_unicode": ("jörg@bücher.example", {"type": "string", "format": "email"}),
    "a_format_of_its_own": ("1.50", {"type": "string", "format": "decimal"}),
    "names_of_javascript": ({"__proto__": "c"}, {"type": "object", "properties": {"__proto__": TEXT}}),
    "keywords_as_names": ({"$ref": "a", "enum": "b"}, {"type": "object", "properties": {"$ref": TEXT, "enum": TEXT}}),
    "keywords_of_others": ("a", {"type": "string", "nullable": True, "discriminator": {"propertyName": "k"}}),
    "a_big_number": (2**63, {"type": "integer", "maximum": 2**64}),
    "not_more": ([1, 2], {"type": "array", "prefixItems": [{"type": "integer"}] * 2, "items": False}),
    "unevaluated": ({"a": 1}, {"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}),
}
DRAFT_7 = {"properties": {"a": {"$ref": "#/definitions/a"}}, "definitions": {"a": TEXT}, "dependencies": {"a": ["a"]}}
WHOLE_OUTPUTS: dict[str, dict[str, Any]] = {
    "draft_7": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", **DRAFT_7},
    "an_id": {"$id": "https://example.com/a", "type": "object", "properties": {"a": TEXT}},
    "any_of": {"anyOf": [{"type": "object", "required": [name]} for name in ("a", "b")]},
}
INPUTS: dict[str, tuple[Any, dict[str, Any] | bool]] = {
    "anything": (1, True),
    "pattern": ("a-", {"type": "string", "pattern": r"^\w+\-(?#c)\Z"}),
    "pair": ([1, "a"], {"type": "array", "prefixItems": [{"type": "integer"}, TEXT], "items": False}),
}
# No schemas by their metaschema, whatever is made of them.
REFUSED: dict[str, dict[str, Any]] = {
    "length": {"type": "object", "properties": {"value": {"type": "string", "minLength": "x"}}},
    "type": {"type": "object", "properties": {"value": {"type": "text"}}},
}


class Price(BaseModel):
    """Pydantic allows for what a float cannot hold exactly, and JSON Schema does not."""

    value: float = Field(multiple_of=0.01)


class Module:
    description = "A module with a schema that is hard to read"

    def __init__(self, result: dict[str, Any], input_schema: Any, output_schema: Any) -> None:
        self._result, self.input_schema, self.output_schema = result, input_schema, output_schema

    async def execute(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return self._result


def modules() -> Registry:
    registry, anything = Registry(), {"type": "object"}
    for name, (value, schema) in OUTPUTS.items():
        output = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
        registry.register(f"output.{name}", Module({"value": value}, anything, output))
    for name, output in WHOLE_OUTPUTS.items():
        registry.register(f"output.{name}", Module({"a": "b"}, anything, output))
    for name, (_, schema) in INPUTS.items():
        given = {"type": "object", "properties": {"value": schema, "other": False}, "required": ["value"]}
        registry.register(f"input.{name}", Module({}, given, anything))
    for name, schema in REFUSED.items():
        registry.register(f"refused.input_{name}", Module({}, schema, anything))
        registry.register(f"refused.output_{name}", Module({}, anything, schema))
    registry.register("output.price", Module({"value": 1.13}, anything, Price))
    return registry


def calls() -> dict[str, dict[str, Any]]:
    """The tools that a client must list, with arguments for a call of each."""
    outputs: dict[str, dict[str, Any]] = {f"output.{name}": {} for name in (*OUTPUTS, *WHOLE_OUTPUTS, "price")}
    return outputs | {f"input.{name}": {"value": value} for name, (value, _) in INPUTS.items()}


if __name__ == "__main__":
    serve(modules(), transport="streamable-http", port=int(sys.argv[1]), log_level="ERROR", tool_names="module-id")
