"""Pydantic AI's toolset, without a model."""

import contextlib
import json
from typing import Any

from checks import Adapter, main
from fastmcp.client.transports import StdioTransport
from pydantic_ai import ModelRetry
from pydantic_ai.mcp import MCPToolset


@contextlib.asynccontextmanager
async def connect(target: Any) -> Any:
    async with MCPToolset(StdioTransport(target[0], target[1:]) if isinstance(target, list) else target) as toolset:

        async def names() -> list[str]:
            return [tool.name for tool in await toolset.list_tools()]

        async def call(name: str, arguments: dict[str, Any]) -> tuple[str, Any, bool]:
            try:
                value = await toolset.direct_call_tool(name, arguments)
            except ModelRetry as error:  # what a model would be told
                return str(error), None, True
            return json.dumps(value), value, False

        async def read(uri: str) -> str:
            return str(await toolset.read_resource(uri))

        yield Adapter(names, call, read)


main(connect)
