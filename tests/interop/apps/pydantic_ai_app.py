"""The shop as tools of Pydantic AI, served by the adapter: over stdio, or on the port given."""

import sys
from typing import Any

from apcore import Registry
from pydantic_ai import FunctionToolset
from pydantic_ai_apcore import register_toolset, serve_mcp
from shop import ITEMS, Filter, Item, Order, find, receipt

tools: FunctionToolset[None] = FunctionToolset()


@tools.tool_plain
async def get_item(item_id: int) -> Item:
    """Look at one item."""
    return next(item for item in ITEMS if item.id == item_id)


@tools.tool_plain
def find_items(wanted: Filter) -> dict[str, Any]:
    """Find items by color and price."""
    return find(Filter.model_validate(wanted))  # apcore gives a function the model's fields, not the model


@tools.tool_plain
def place_order(order: Order) -> dict[str, Any]:
    """Order items."""
    return receipt(Order.model_validate(order))


registry = Registry()
register_toolset(tools, registry, prefix="shop.")
port = {"transport": "streamable-http", "port": int(sys.argv[1])} if sys.argv[1:] else {}
serve_mcp(registry, **port)
