"""The API."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.shortcuts import get_object_or_404
from django.urls import path
from ninja import NinjaAPI, Query
from shop import Filter, Item, Order, receipt

from .models import Article

api = NinjaAPI()


@api.get("/items/{item_id}", response=Item)
def get_item(request: HttpRequest, item_id: int) -> dict[str, Any]:
    """Look at one item."""
    return Item.model_validate(get_object_or_404(Article, id=item_id), from_attributes=True).model_dump()


@api.get("/items")
def find_items(request: HttpRequest, wanted: Query[Filter]) -> dict[str, Any]:
    """Find items by color and price."""
    found = Article.objects.filter(price__lt=wanted.below)
    found = found if wanted.color is None else found.filter(color=wanted.color)
    return {"names": [article.name for article in found]}


@api.post("/orders")
def place_order(request: HttpRequest, order: Order) -> dict[str, Any]:
    """Order items."""
    return receipt(order)


urlpatterns = [path("api/", api.urls)]
