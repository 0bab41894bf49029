"""A client starts the server, lists its tools and calls two. Run: python examples/quickstart.py"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client

EXTENSIONS = Path(__file__).parent / "extensions"
SERVER = StdioServerParameters(
    command=sys.executable,
    args=["-m", "apcore_mcp", "--extensions-dir", str(EXTENSIONS), "--log-level", "WARNING"],
)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("text.analyze", {"text": "The cat sat. The dog did not!", "top": 1}),
    ("calendar.workdays", {"start": "2025-04-14", "end": "2025-04-25", "region": "germany"}),
    ("calendar.workdays", {"start": "2025-04-14", "region": "atlantis"}),  # a mistake, and how a model is told
]


async def main() -> None:
    async with Client(stdio_client(SERVER)) as client:
        print(f"Connected, MCP {client.protocol_version}\n")
        for tool in (await client.list_tools()).tools:
            print(f"  {tool.name:28} {tool.description}")
        for name, arguments in CALLS:
            result = await client.call_tool(name, arguments)
            print(f"\n> {name} {arguments}")
            print(result.structured_content or getattr(result.content[0], "text", result.content))


if __name__ == "__main__":
    asyncio.run(main())
