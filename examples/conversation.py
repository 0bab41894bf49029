"""A client that listens and answers: chunks of a streaming module, a module's question, and calls to approve.

    python examples/conversation.py             # in the newest protocol version both sides speak
    python examples/conversation.py legacy      # as clients did before 2026-07-28
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from mcp import StdioServerParameters
from mcp.client import Client, ClientRequestContext
from mcp.client.stdio import stdio_client
from mcp_types import ElicitRequestFormParams, ElicitRequestParams, ElicitResult, TextContent

EXTENSIONS = Path(__file__).parent / "extensions"
SERVER = StdioServerParameters(
    command=sys.executable,
    args=["-m", "apcore_mcp", "--extensions-dir", str(EXTENSIONS), "--log-level", "WARNING"],
)
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("files.count_lines", {"pattern": "*.py", "folder": "text"}),
    ("travel.packing_list", {"destination": "Oslo", "nights": 2}),
    ("trash.empty", {"deleted_before": "2025-02-01", "dry_run": False}),
    ("trash.empty", {"dry_run": False}),
]
# What the user answers, by the name of the field: first the first, then the second.
ANSWERS: dict[str, list[Any]] = {"weather": ["cold"], "swimming": [False], "approve": [True, False]}


async def answer(context: ClientRequestContext, params: ElicitRequestParams) -> ElicitResult:
    """Fill in the form as the user would; a real client shows it to somebody."""
    print("  ? " + params.message.replace("\n", "\n    "))
    if not isinstance(params, ElicitRequestFormParams):  # a page to visit, which this server does not ask for
        return ElicitResult(action="decline")
    content: dict[str, Any] = {}
    for name, field in params.requested_schema["properties"].items():
        content[name] = ANSWERS[name].pop(0)
        print(f"      {field['title']} {field.get('enum', '')}".rstrip(), "->", content[name])
    return ElicitResult(action="accept", content=content)


async def show(progress: float, total: float | None, message: str | None) -> None:
    print(f"  . {progress:g}{f' of {total:g}' if total else ''}: {message}")


async def main(mode: str) -> None:
    async with Client(stdio_client(SERVER), mode=mode, elicitation_callback=answer) as client:
        print(f"Connected, MCP {client.protocol_version}")
        for name, arguments in CALLS:
            print(f"\n> {name} {arguments}")
            result = await client.call_tool(name, arguments, progress_callback=show)
            text = "".join(part.text for part in result.content if isinstance(part, TextContent))
            print(f"  {'!' if result.is_error else '='} {result.structured_content or text}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "auto"))
