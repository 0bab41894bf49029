"""The OpenAI Agents SDK's servers, without a model."""

import contextlib
from typing import Any

from agents.mcp import MCPServerStdio, MCPServerStreamableHttp
from checks import Adapter, main


@contextlib.asynccontextmanager
async def connect(target: Any) -> Any:
    server: Any
    if isinstance(target, list):
        server = MCPServerStdio({"command": target[0], "args": target[1:]}, client_session_timeout_seconds=30)
    else:
        server = MCPServerStreamableHttp({"url": target}, client_session_timeout_seconds=30)
    async with server:

        async def names() -> list[str]:
            return [tool.name for tool in await server.list_tools()]

        async def call(name: str, arguments: dict[str, Any]) -> tuple[str, Any, bool]:
            result = (await server.call_tool(name, arguments)).model_dump(by_alias=True)
            return result["content"][0]["text"], result["structuredContent"], result["isError"]

        async def read(uri: str) -> str:
            return str((await server.read_resource(uri)).contents[0].text)

        yield Adapter(names, call, read)


main(connect)
