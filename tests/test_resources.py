"""Documentation as MCP resources (FR-RESOURCE-001, -002), in both protocol eras, following the registry and filters."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import httpx2
import pytest
from conftest import HANDSHAKE, MODERN, FunctionalModule, connect, echo, registry_of, serving
from mcp import MCPError
from mcp.client import Client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.subscriptions import ResourcesListChanged, ResourceUpdated
from mcp_types import ResourceListChangedNotification, ResourceUpdatedNotification
from test_eras import ACCEPT, answer, initialize_params, message, modern

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
        ("docs://image.resize", "image.resize", "Resize", "text/plain"),
    ]
    assert [[(c.uri, c.mime_type, c.text) for c in contents] for contents in read] == [
        [("docs://image.crop", "text/plain", "Cuts the edges off.")],
        [("docs://image.resize", "text/plain", MARKDOWN)],
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


@pytest.mark.filterwarnings("ignore:resources/(un)?subscribe is removed")
@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_who_follows_a_resource_is_told_when_it_changes(mode: str, transport: str) -> None:
    if transport == "sse" and mode == MODERN:
        pytest.skip("the deprecated transport is of the handshake era")
    registry = registry_of({f"doc.{name}": documented(documentation="one") for name in "abc"})
    updated: asyncio.Queue[str] = asyncio.Queue()
    listening = asyncio.Event()

    async def note(received: object) -> None:
        if isinstance(received, ResourceUpdatedNotification):
            updated.put_nowait(str(received.params.uri))

    async def note_stream(response: httpx2.Response) -> None:
        if response.request.method == "GET" and response.status_code == 200:
            listening.set()

    async def follow(events: AsyncIterator[object]) -> None:
        async for event in events:
            if isinstance(event, ResourceUpdated):
                updated.put_nowait(event.uri)

    def replace(name: str, text: str | None) -> None:
        registry.unregister(f"doc.{name}")
        registry.register(f"doc.{name}", documented(documentation=text))

    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(30):
        url = stack.enter_context(serving(registry, transport=transport))
        hooks: dict[str, Any] = {"response": [note_stream]}
        http = await stack.enter_async_context(httpx2.AsyncClient(event_hooks=hooks, timeout=30))
        server: Any = streamable_http_client(f"{url}/mcp", http_client=http)
        server = sse_client(f"{url}/sse") if transport == "sse" else server
        client = Client(server, mode=mode, cache=None, read_timeout_seconds=30, message_handler=note)
        await stack.enter_async_context(client)
        if mode == MODERN:
            events = await stack.enter_async_context(client.listen(resource_subscriptions=["docs://doc.a"]))
            stack.callback(asyncio.create_task(follow(events)).cancel)
        else:
            assert client.server_capabilities.resources.subscribe is True
            for name in "ab":
                await client.subscribe_resource(f"docs://doc.{name}")
            await client.unsubscribe_resource("docs://doc.b")
            if transport == "streamable-http":
                await listening.wait()
        replace("b", "two")  # nobody follows it
        replace("c", "two")
        replace("a", "one")  # another module, that says the same
        await client.list_tools()
        for text in ("two", "three", None):  # once or twice, as the module may be seen to be gone meanwhile
            replace("a", text)
            assert await updated.get() == "docs://doc.a"
        while not updated.empty():
            assert updated.get_nowait() == "docs://doc.a"


@pytest.mark.filterwarnings("ignore:resources/(un)?subscribe is removed")
async def test_only_a_listed_resource_can_be_followed() -> None:
    async with connect({"doc.a": documented(documentation="one")}, mode=HANDSHAKE) as client:
        for ask in (client.subscribe_resource, client.unsubscribe_resource):
            with pytest.raises(MCPError, match="Resource not found"):
                await ask("docs://doc.none")


def test_a_server_without_sessions_promises_no_handshake_client_to_tell_of_changes() -> None:
    registry = registry_of({"doc.a": documented(documentation="one")})
    with serving(registry, stateless=True) as url, httpx.Client(timeout=30) as client:

        def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
            return answer(client.post(f"{url}/mcp", json=message(method, params), headers=ACCEPT))

        capabilities = ask("initialize", initialize_params("2025-11-25"))["result"]["capabilities"]
    capabilities.pop("experimental", None)  # an empty one, of the SDK's 2.1
    assert capabilities == {"tools": {"listChanged": False}, "resources": {"listChanged": False, "subscribe": False}}


def test_who_listens_is_promised_only_what_there_is() -> None:
    wanted = {"toolsListChanged": True, "promptsListChanged": True, "resourcesListChanged": True}
    with serving(registry_of()) as url, httpx.Client(timeout=30) as client:
        request = modern("subscriptions/listen", {"notifications": wanted})
        with client.stream("POST", f"{url}/mcp", **request) as stream:
            first = next(line for line in stream.iter_lines() if line.startswith("data: "))
        promised = json.loads(first[6:])["params"]["notifications"]
    assert promised == {"toolsListChanged": True, "resourcesListChanged": True}
