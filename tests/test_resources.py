"""Documentation as MCP resources (FR-RESOURCE-001, -002), in both protocol eras, following the registry and filters."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from conftest import HANDSHAKE, MODERN, FunctionalModule, connect, echo, registry_of, serving
from mcp import MCPError
from mcp.client import Client
from mcp.client.sse import sse_client
from mcp.server.subscriptions import ResourcesListChanged
from mcp_types import ResourceListChangedNotification

MARKDOWN = "# Resize\n\nKeeps the *ratio*."
MODULES = {
    "image.resize": {"documentation": MARKDOWN, "name": "Resize", "tags": ["public"]},
    "image.crop": {"documentation": "Cuts the edges off.", "tags": ["public"]},
    "image.flip": {"documentation": ""},
    "image.turn": {"documentation": None},
    "image.bare": {},
    "image.secret": {"documentation": "For the house only."},
}


def documented(**attributes: Any) -> FunctionalModule:
    return FunctionalModule(echo, **attributes)


async def test_every_listed_module_with_documentation_is_a_resource(mode: str) -> None:
    modules = {module_id: documented(**attributes) for module_id, attributes in MODULES.items()}
    async with connect(modules, mode=mode, tags=["public"]) as client:
        listed = (await client.list_resources()).resources
        read = [(await client.read_resource(resource.uri)).contents for resource in listed]
        templates = (await client.list_resource_templates()).resource_templates
    assert [(r.uri, r.name, r.title, r.mime_type) for r in listed] == [
        ("docs://image.crop", "image.crop", None, "text/plain"),
        ("docs://image.resize", "image.resize", "Resize", "text/markdown"),
    ]
    assert [[(c.uri, c.mime_type, c.text) for c in contents] for contents in read] == [
        [("docs://image.crop", "text/plain", "Cuts the edges off.")],
        [("docs://image.resize", "text/markdown", MARKDOWN)],
    ]
    assert templates == []


@pytest.mark.parametrize(
    "uri",
    ["docs://image.flip", "docs://image.secret", "docs://nothing", "image.resize", "docs://", "file:///etc/passwd"],
)
async def test_any_other_resource_is_not_found_in_the_words_of_each_era(mode: str, uri: str) -> None:
    modules = {module_id: documented(**attributes) for module_id, attributes in MODULES.items()}
    async with connect(modules, mode=mode, tags=["public"]) as client:
        with pytest.raises(MCPError, match="Resource not found") as raised:
            await client.read_resource(uri)
    assert raised.value.error.code == (-32602 if mode == MODERN else -32002)
    assert raised.value.error.data == {"uri": uri}


async def test_the_list_of_resources_has_one_page(mode: str) -> None:
    async with connect({"a.b": documented(documentation="x")}, mode=mode) as client:
        for list_page in (client.list_resources, client.list_resource_templates):
            with pytest.raises(MCPError, match="Invalid cursor") as raised:
                await list_page(cursor="2")
            assert raised.value.error.code == -32602


async def test_resources_follow_the_registry_and_clients_are_told(mode: str) -> None:
    """Handshake clients on their one stream (that of SSE is always open), others on the stream they listen on."""
    registry, told = registry_of(), asyncio.Event()

    async def note(message: object) -> None:
        if isinstance(message, ResourceListChangedNotification):
            told.set()

    async def follow(events: AsyncIterator[object]) -> None:
        async for event in events:
            if isinstance(event, ResourcesListChanged):
                told.set()

    async with contextlib.AsyncExitStack() as stack:
        url = stack.enter_context(serving(registry, transport="sse" if mode == HANDSHAKE else "streamable-http"))
        server = sse_client(f"{url}/sse") if mode == HANDSHAKE else f"{url}/mcp"
        client = Client(server, mode=mode, cache=None, read_timeout_seconds=30, message_handler=note)
        await stack.enter_async_context(client)
        if mode == HANDSHAKE:
            assert client.server_capabilities.resources.list_changed is True
        else:
            events = await stack.enter_async_context(client.listen(resources_list_changed=True))
            stack.callback(asyncio.create_task(follow(events)).cancel)
        assert (await client.list_resources()).resources == []
        registry.register("late.module", documented(documentation="Came later."))
        async with asyncio.timeout(20):
            await told.wait()
        assert [r.uri for r in (await client.list_resources()).resources] == ["docs://late.module"]
        told.clear()
        registry.unregister("late.module")
        async with asyncio.timeout(20):  # also because the SDK's SSE client fails when it is told while it closes
            await told.wait()
        assert (await client.list_resources()).resources == []
