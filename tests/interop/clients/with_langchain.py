"""LangChain's adapters: tools as an agent gets them."""

import contextlib
from typing import Any

from checks import Adapter, main
from langchain_mcp_adapters.client import MultiServerMCPClient
from langchain_mcp_adapters.resources import load_mcp_resources
from langchain_mcp_adapters.tools import load_mcp_tools


@contextlib.asynccontextmanager
async def connect(target: Any) -> Any:
    connection: Any = {"transport": "streamable_http", "url": target}
    if isinstance(target, list):
        connection = {"transport": "stdio", "command": target[0], "args": target[1:]}
    async with MultiServerMCPClient({"apcore": connection}).session("apcore") as session:
        tools = {tool.name: tool for tool in await load_mcp_tools(session)}

        async def names() -> list[str]:
            return [*tools]

        async def call(name: str, arguments: dict[str, Any]) -> tuple[str, Any, bool]:
            message = await tools[name].ainvoke({"type": "tool_call", "id": "1", "name": name, "args": arguments})
            text = message.content if isinstance(message.content, str) else message.content[0]["text"]
            value = (message.artifact or {}).get("structured_content") if message.status == "success" else None
            return text, value, message.status == "error"

        async def read(uri: str) -> str:
            (blob,) = await load_mcp_resources(session, uris=uri)
            return str(blob.as_string())

        yield Adapter(names, call, read, calls_any_name=False)


main(connect)
