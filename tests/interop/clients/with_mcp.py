"""The official Python SDK, releases 1 and 2."""

import contextlib
from importlib.metadata import version
from typing import Any

from checks import adapter_of, main

if version("mcp").startswith("1."):
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamablehttp_client
    from pydantic import AnyUrl

    @contextlib.asynccontextmanager
    async def connect(target: Any) -> Any:
        started = isinstance(target, list)
        parameters = StdioServerParameters(command=target[0], args=target[1:]) if started else None
        transport = stdio_client(parameters) if parameters else streamablehttp_client(target)
        async with transport as streams, ClientSession(*streams[:2]) as session:
            await session.initialize()
            yield adapter_of(session, AnyUrl)

else:
    from mcp import StdioServerParameters
    from mcp.client import Client
    from mcp.client.stdio import stdio_client

    @contextlib.asynccontextmanager
    async def connect(target: Any) -> Any:
        if isinstance(target, list):
            target = stdio_client(StdioServerParameters(command=target[0], args=target[1:]))
        async with Client(target) as client:
            yield adapter_of(client)


main(connect)
