"""FastMCP's client."""

import contextlib
from typing import Any

from checks import Adapter, main
from fastmcp import Client
from fastmcp.client.transports import StdioTransport


@contextlib.asynccontextmanager
async def connect(target: Any) -> Any:
    async with Client(StdioTransport(target[0], target[1:]) if isinstance(target, list) else target) as client:

        async def names() -> list[str]:
            return [tool.name for tool in await client.list_tools()]

        async def call(name: str, arguments: dict[str, Any]) -> tuple[str, Any, bool]:
            result = await client.call_tool(name, arguments, raise_on_error=False)
            return result.content[0].text, result.structured_content, result.is_error

        async def read(uri: str) -> str:
            return str((await client.read_resource(uri))[0].text)

        yield Adapter(names, call, read)


main(connect)
