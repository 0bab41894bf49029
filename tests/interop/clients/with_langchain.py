"""LangChain, with `langchain[mcp]`: tools as an agent gets them."""

import contextlib
from typing import Any

from checks import Adapter, main
from fastmcp.client.transports import StdioTransport
from langchain.mcp import MCPAdapter


@contextlib.asynccontextmanager
async def connect(target: Any) -> Any:
    server = StdioTransport(target[0], target[1:]) if isinstance(target, list) else target
    async with MCPAdapter(server) as adapter:
        tools = {tool.name: tool for tool in await adapter.list_tools()}

        async def names() -> list[str]:
            return [*tools]

        async def call(name: str, arguments: dict[str, Any]) -> tuple[str, Any, bool]:
            message = await tools[name].ainvoke({"type": "tool_call", "id": "1", "name": name, "args": arguments})
            text = message.content if isinstance(message.content, str) else message.content[0]["text"]
            value = (message.artifact or {}).get("structured_content") if message.status == "success" else None
            return text, value, message.status == "error"

        async def read(uri: str) -> str:
            (resource,) = await adapter.client.read_resource(uri)
            return str(resource.text)

        yield Adapter(names, call, read, calls_any_name=False)


main(connect)
