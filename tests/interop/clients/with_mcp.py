"""The official Python SDK, releases 1 and 2."""

import contextlib
from importlib.metadata import version
from typing import Any

from checks import Adapter, main

if version("mcp").startswith("1."):
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamablehttp_client
    from pydantic import AnyUrl

    @contextlib.asynccontextmanager
    async def connected(target: Any) -> Any:
        started = isinstance(target, list)
        parameters = StdioServerParameters(command=target[0], args=target[1:]) if started else None
        transport = stdio_client(parameters) if parameters else streamablehttp_client(target)
        async with transport as streams, ClientSession(*streams[:2]) as session:
            await session.initialize()
            yield session, AnyUrl

else:
    from mcp import StdioServerParameters
    from mcp.client import Client
    from mcp.client.stdio import stdio_client

    @contextlib.asynccontextmanager
    async def connected(target: Any) -> Any:
        if isinstance(target, list):
            target = stdio_client(StdioServerParameters(command=target[0], args=target[1:]))
        async with Client(target) as client:
            yield client, str


@contextlib.asynccontextmanager
async def connect(target: Any) -> Any:
    async with connected(target) as (client, url):

        async def names() -> list[str]:
            return [tool.name for tool in (await client.list_tools()).tools]

        async def call(name: str, arguments: dict[str, Any]) -> tuple[str, Any, bool]:
            result = (await client.call_tool(name, arguments)).model_dump(by_alias=True)
            return result["content"][0]["text"], result["structuredContent"], result["isError"]

        async def read(uri: str) -> str:
            return str((await client.read_resource(url(uri))).contents[0].text)

        yield Adapter(names, call, read)


main(connect)
