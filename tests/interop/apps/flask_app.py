"""The shop as a Flask application: a route that `flask apcore scan` finds, and functions that take models."""

from __future__ import annotations

import os
from typing import Any

from apcore import module
from flask import Flask, current_app
from flask_apcore import Apcore
from shop import ITEMS, Filter, Order, find, receipt

app = Flask(__name__)
app.config["ITEMS"] = {item.id: item.model_dump() for item in ITEMS}
app.config["APCORE_MODULE_DIR"] = os.environ["FOLDER"]
app.config["APCORE_MODULE_PACKAGES"] = ["flask_app"]


@app.get("/items/<int:item_id>")
def get_item(item_id: int) -> dict[str, Any]:
    """Look at one item."""
    item: dict[str, Any] = current_app.config["ITEMS"][item_id]  # so the application's context must be there
    return item


@module(id="items.find")
def find_items(wanted: Filter) -> dict[str, Any]:
    """Find items by color and price."""
    return find(wanted)


@module(id="orders.place")
def place_order(order: Order) -> dict[str, Any]:
    """Order items."""
    return receipt(order)


Apcore(app)
