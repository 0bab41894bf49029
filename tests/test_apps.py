"""A page of a tool's own (MCP Apps, the extension `io.modelcontextprotocol/ui`): where an author writes it, and what
clients are told of it. How the Explorer shows it is in test_explorer_page.py, and other hosts are in interop/.
"""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from conftest import HANDSHAKE, connect, echo, registry_of, serving
from mcp.server.apps import APP_MIME_TYPE, EXTENSION_ID
from mcp.shared.exceptions import MCPError
from support import HANDSHAKE_VERSIONS, answer, gives, handshake, modern, overlay, text_of

PAGE = "<!doctype html>\r\n<title>Ü \u2028 \U0001f600</title>\n<p title='\"&amp;\\'>\t\0</p>"
PAGE += "<script>'</script>'</script>\n\n"


def meta_of(tool: Any) -> Any:
    return (tool.meta or {}).get("ui")


@pytest.mark.parametrize("mode", [HANDSHAKE, "auto"])  # "auto" asks what the server can do, of 2026-07-28
async def test_a_page_is_a_resource_that_its_tool_names(mode: str) -> None:
    """Half of a surrogate pair in it harms nobody."""
    module = gives({"n": 1}, metadata=overlay(page=PAGE + "\ud800"), name="Draw", documentation="How to draw.")
    async with connect({"image.draw": module, "plain": echo}, mode=mode) as client:
        tool, plain = (await client.list_tools()).tools
        assert (meta_of(tool), meta_of(plain)) == ({"resourceUri": "ui://image.draw"}, None)
        listed = {resource.uri: resource for resource in (await client.list_resources()).resources}
        assert [*listed] == ["docs://image.draw", "ui://image.draw"]
        about = listed["ui://image.draw"]
        assert (about.name, about.title, about.mime_type) == ("image.draw", "Draw", APP_MIME_TYPE)
        (read,) = (await client.read_resource(about.uri)).contents
        assert (read.uri, read.mime_type, read.text) == (about.uri, APP_MIME_TYPE, PAGE + "?"), "byte for byte"
        assert (read.meta or {})["ui"] == {"prefersBorder": True}
        result = await client.call_tool("image.draw", {})
        assert (text_of(result), result.structured_content) == ('{"n":1}', {"n": 1}), "as without a page"
        with pytest.raises(MCPError, match="Resource not found"):
            await client.read_resource("ui://plain")


async def test_what_is_no_text_or_empty_is_no_page_and_the_tool_is_served() -> None:
    pages: list[Any] = ["", None, 5, b"<p>", ["<p>"], {"html": "<p>"}]
    modules = {f"m{number}": gives({"n": 1}, metadata=overlay(page=page)) for number, page in enumerate(pages)}
    async with connect(modules, mode="auto") as client:
        assert EXTENSION_ID not in (client.server_capabilities.extensions or {})
        tools = (await client.list_tools()).tools
        assert [meta_of(tool) for tool in tools] == [None] * len(pages)
        assert (await client.list_resources()).resources == []
        for tool in tools:
            assert (await client.call_tool(tool.name, {})).structured_content == {"n": 1}


def test_the_extension_is_advertised_in_every_protocol_version() -> None:
    with serving(registry_of({"image.draw": gives({}, metadata=overlay(page=PAGE))})) as url, httpx.Client() as client:
        told = [handshake(client, f"{url}/mcp", version)[0] for version in HANDSHAKE_VERSIONS]
        told.append(answer(client.post(f"{url}/mcp", **modern("server/discover")))["result"])
    assert [result["capabilities"]["extensions"][EXTENSION_ID] for result in told] == [{}] * 5
