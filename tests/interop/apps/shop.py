"""A small shop, the same behind every framework: what it takes, and what it answers."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import BaseModel, Field


class Color(StrEnum):
    RED = "red"
    BLUE = "blue"


class Item(BaseModel):
    id: int
    name: str
    color: Color
    price: float


class Filter(BaseModel):
    color: Color | None = None
    below: float = Field(1_000, gt=0, description="Highest price")


class Address(BaseModel):
    street: str
    city: str


class Customer(BaseModel):
    name: str = Field(min_length=1)
    address: Address


class Line(BaseModel):
    item_id: int
    count: int = Field(1, ge=1)


class Order(BaseModel):
    customer: Customer
    lines: list[Line]
    wrapped_in: Color = Color.RED


ITEMS = [Item(id=1, name="kite", color=Color.RED, price=30), Item(id=2, name="kettle", color=Color.BLUE, price=45)]


def find(wanted: Filter) -> dict[str, Any]:
    found = [item.name for item in ITEMS if wanted.color in (None, item.color) and item.price < wanted.below]
    return {"names": found}


def receipt(order: Order) -> dict[str, Any]:
    prices = {item.id: item.price for item in ITEMS}
    total = sum(prices[line.item_id] * line.count for line in order.lines)
    return {"total": total, "city": order.customer.address.city, "wrapped_in": order.wrapped_in}
