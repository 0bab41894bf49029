"""Documentation as MCP resources (FR-RESOURCE-001, -002), in both protocol eras, following the registry and filters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from conftest import HANDSHAKE, MODERN, FunctionalModule, connect, echo, registry_of, serving
from mcp import MCPError
from mcp.client import Client
from mcp.client.sse import sse_client
from mcp.server.subscriptions import ResourcesListChanged, ResourceUpdated
from mcp_types import ResourceListChangedNotification
from test_eras import ACCEPT, answer, initialize_params, message, modern

from apcore_mcp import async_serve

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


async def test_who_listens_for_a_resource_is_told_when_it_changes() -> None:
    registry = registry_of({f"doc.{name}": documented(documentation="one") for name in "abc"})

    def replace(name: str, text: str) -> None:
        registry.unregister(f"doc.{name}")
        registry.register(f"doc.{name}", documented(documentation=text))

    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(30):
        client = await stack.enter_async_context(connect(registry))
        events = await stack.enter_async_context(client.listen(resource_subscriptions=["docs://doc.a"]))
        updated = (event.uri async for event in events if isinstance(event, ResourceUpdated))
        replace("b", "two")  # nobody listens for it
        replace("c", "two")
        await client.list_tools()
        for text in ("two", "three"):  # once or twice, as the module may be seen to be gone meanwhile
            replace("a", text)
            assert await anext(updated) == "docs://doc.a"


@pytest.mark.filterwarnings("ignore:resources/(un)?subscribe is removed")
async def test_no_handshake_client_is_promised_to_be_told_of_a_single_resource() -> None:
    async with connect({"doc.a": documented(documentation="one")}, mode=HANDSHAKE) as client:
        assert client.server_capabilities.resources is not None
        assert client.server_capabilities.resources.subscribe is False
        for ask in (client.subscribe_resource, client.unsubscribe_resource):
            with pytest.raises(MCPError) as refused:
                await ask("docs://doc.a")
            assert refused.value.code == -32601


async def test_the_modules_are_compared_once_for_all_sessions() -> None:
    """By the loop's own processor time for a few changes among many modules, with and without many sessions."""
    modules = {f"doc.n{number}": documented(documentation="one") for number in range(2_000)}

    async def cost(sessions: int) -> float:
        registry = registry_of(modules)
        async with async_serve(registry) as app:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                for _ in range(sessions):
                    opening = message("initialize", initialize_params("2025-11-25"))
                    opened = await client.post("/mcp", json=opening, headers=ACCEPT)
                    session = ACCEPT | {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
                    initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
                    assert (await client.post("/mcp", json=initialized, headers=session)).status_code == 202
                await client.get("/health")
                began = time.thread_time()
                for number in range(5):
                    registry.register(f"late.n{number}", documented())
                    await client.get("/health")
                    await asyncio.sleep(0.1)  # or they would be one change
                return time.thread_time() - began

    alone = await cost(0)
    among_many = await cost(100)
    assert among_many < 3 * alone, (alone, among_many)


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
