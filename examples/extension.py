"""An extension of MCP adds a method and a rule to the server. Run: python examples/extension.py

`Quota` lets each tool be called twice, and its method `quota/left` tells a client how many calls are left. The client
here starts this very program as its server.
"""

import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from apcore import Registry
from apcore.decorator import module
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client
from mcp.server.extension import Extension, MethodBinding
from mcp_types import CallToolResult, Request, RequestParams, Result, TextContent

from apcore_mcp import serve

registry = Registry()


@module(id="dice.roll", registry=registry)
def roll(sides: int = 6) -> int:
    """Roll a die."""
    return sides  # lucky, as always


class Tool(RequestParams):
    tool: str


class Quota(Extension):
    """How often each tool may be called while the server runs."""

    identifier = "com.example/quota"

    def __init__(self, calls: int) -> None:
        self.calls = calls
        self.used = Counter[str]()

    def settings(self) -> dict[str, Any]:
        return {"calls": self.calls}  # which clients find among the server's capabilities

    def methods(self) -> Sequence[MethodBinding]:
        return [MethodBinding("quota/left", Tool, self.left)]

    async def left(self, ctx: Any, params: Tool) -> dict[str, Any]:
        return {"left": self.calls - self.used[params.tool]}

    async def intercept_tool_call(self, params: Any, ctx: Any, call_next: Any) -> Any:
        if self.used[params.name] == self.calls:
            text = f"{params.name} has been called {self.calls} times, and that is enough"
            return CallToolResult(content=[TextContent(text=text)], is_error=True)
        self.used[params.name] += 1
        return await call_next(ctx)  # the call goes on to the module as ever


class Left(Result):
    left: int


async def main() -> None:
    async with Client(stdio_client(StdioServerParameters(command=sys.executable, args=[__file__, "serve"]))) as client:
        for _ in range(3):
            result = await client.call_tool("dice.roll", {})
            print(result.structured_content or getattr(result.content[0], "text", result.content))
            question = Request(method="quota/left", params=Tool(tool="dice.roll"))
            print("left:", (await client.session.send_request(question, Left)).left)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve(registry, mcp_extensions=[Quota(calls=2)])
    else:
        asyncio.run(main())
