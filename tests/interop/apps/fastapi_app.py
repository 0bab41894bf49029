"""The shop as a FastAPI application; under an ASGI server the adapter's embedded server starts with it."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Depends, FastAPI
from fastapi_apcore import FastAPIApcore
from shop import ITEMS, Filter, Item, Order, find, receipt


@contextlib.asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    FastAPIApcore.get_instance().init_app(app)
    yield


app = FastAPI(lifespan=lifespan)
FROM_QUERY = Depends()


@app.get("/items/{item_id}")
async def get_item(item_id: int) -> Item:
    """Look at one item."""
    return next(item for item in ITEMS if item.id == item_id)


@app.get("/items")
def find_items(wanted: Filter = FROM_QUERY) -> dict[str, Any]:
    """Find items by color and price."""
    return find(wanted)


@app.post("/orders")
def place_order(order: Order) -> dict[str, Any]:
    """Order items."""
    return receipt(order)
