"""The OpenAI Agents SDK's servers, without a model."""

import contextlib
from typing import Any

from agents.mcp import MCPServerStdio, MCPServerStreamableHttp
from checks import adapter_of, main


@contextlib.asynccontextmanager
async def connect(target: Any) -> Any:
    server: Any
    if isinstance(target, list):
        server = MCPServerStdio({"command": target[0], "args": target[1:]}, client_session_timeout_seconds=30)
    else:
        server = MCPServerStreamableHttp({"url": target}, client_session_timeout_seconds=30)
    async with server:
        yield adapter_of(server)


main(connect)
