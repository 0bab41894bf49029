"""What of a call's arguments is read by JSON's rules and by defaults that stand in a function's hints."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from apcore import FunctionModule
from conftest import FunctionalModule, connect, echo
from pydantic import BaseModel, Field
from support import failure, lines_of


class Order(BaseModel):
    times: int
    sizes: list[int] = []


def repeat(times: int, sizes: list[int]) -> list[int]:
    return sizes * times


def whole(order: Order, by: dict[str, int], share: float = 0.5) -> str:
    return repr((order.times, by, share))


ORDER = {"type": "object", "properties": {"times": {"type": "integer"}, "sizes": {"items": {"type": "integer"}}}}
ARGUMENTS: dict[str, tuple[Any, dict[str, Any], Any, str]] = {
    "a.function": (repeat, {"times": 2.0, "sizes": [1.0]}, {"result": [1, 1]}, "times"),
    "a.hint": (whole, {"order": {"times": 2.0}, "by": {"a": 3.0}, "share": 1}, {"result": "(2, {'a': 3}, 1.0)"},
               "order.times"),
    "a.model": (Order, {"times": 2.0, "sizes": [1.0]}, {"times": 2, "sizes": [1]}, "times"),
    "a.schema": (ORDER, {"times": 2.0, "sizes": [1.0]}, {"times": 2, "sizes": [1]}, "times"),
    "a.deep_schema": ({"type": "object", "properties": {"order": ORDER}}, {"order": {"times": 2.0}},
                      {"order": {"times": 2}}, "order.times"),
}  # fmt: skip
"""What takes arguments, some with whole numbers as JSON's clients may write them, the answer, and one of the names."""


def with_a_part(arguments: dict[str, Any], path: str) -> dict[str, Any]:
    """`arguments` with 2.5 at `path`."""
    name, _, rest = path.partition(".")
    return {**arguments, name: with_a_part(arguments[name], rest) if rest else 2.5}


@pytest.mark.parametrize("validate_inputs", [False, True])
async def test_a_whole_number_is_an_integer(validate_inputs: bool) -> None:
    """As JSON Schema has it, however it is written; and another one is none."""
    modules: dict[str, Any] = {}
    for name, (takes, *_) in ARGUMENTS.items():
        is_function = callable(takes) and not isinstance(takes, type)
        modules[name] = FunctionModule(takes, name) if is_function else FunctionalModule(echo, input_schema=takes)
    async with connect(modules, validate_inputs=validate_inputs) as client:
        for name, (_, arguments, answer, path) in ARGUMENTS.items():
            result = await client.call_tool(name, arguments)
            assert result.structured_content == answer, name
            assert "2.0" not in result.content[0].text
            wrong = lines_of(failure(await client.call_tool(name, with_a_part(arguments, path))))
            assert [field for field, _, _ in wrong] == [path]


def labels(names: Annotated[list[str], Field(default_factory=list)], size: Annotated[int, Field(default=7)]) -> str:
    return f"{names} {size}"


def most(limit: Annotated[int, Field(default=3, le=5, description="At most.")], until: int = 2) -> str:
    return f"{limit} {until}"


async def test_a_default_in_a_hint_is_one() -> None:
    """It is advertised as such, and the function is given it; each list is a new one."""
    modules = {f"a.{function.__name__}": FunctionModule(function, "a.function") for function in (labels, most)}
    async with connect(modules) as client:
        schemas = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
        for name, arguments, told in [
            ("a.labels", {}, "[] 7"),
            ("a.labels", {"names": ["a"], "size": 1}, "['a'] 1"),
            ("a.labels", {}, "[] 7"),
            ("a.most", {}, "3 2"),
        ]:
            assert (await client.call_tool(name, arguments)).structured_content == {"result": told}
        assert [field for field, _, _ in lines_of(failure(await client.call_tool("a.most", {"limit": 6})))] == ["limit"]
    assert [schema.get("required", []) for schema in schemas.values()] == [[], []]
    assert schemas["a.labels"]["properties"]["size"]["default"] == 7
    assert schemas["a.most"]["properties"]["limit"] == {
        "type": "integer", "default": 3, "maximum": 5, "description": "At most."
    }  # fmt: skip


def climb(
    height: Annotated[float, "metres"],
    size: Annotated[int, "how many", Field(default=7)],
    town: Annotated[str, Field(max_length=9), "its town", "no more"] = "Bern",
    count: Annotated[int, "how often"] = Field(3, ge=1),
    day: Annotated[str, "not told", Field(description="The day")] = "",
) -> str:
    return f"{height} {size} {town} {count} {day}"


async def test_a_text_in_a_hint_describes_its_argument() -> None:
    async with connect({"a.climb": FunctionModule(climb, "a.climb")}) as client:
        (tool,) = (await client.list_tools()).tools
        assert (await client.call_tool("a.climb", {"height": 1})).structured_content == {"result": "1.0 7 Bern 3 "}
    properties = tool.input_schema["properties"]
    told = {"height": "metres", "town": "its town", "size": "how many", "count": "how often", "day": "The day"}
    assert {name: field["description"] for name, field in properties.items()} == told
    assert properties["town"] == {"type": "string", "description": "its town", "default": "Bern", "maxLength": 9}
    assert properties["count"] == {"type": "integer", "description": "how often", "default": 3, "minimum": 1}
