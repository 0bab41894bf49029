"""Tools report progress, ask and need approval, and a client answers. Run: python examples/conversation.py

With `legacy` behind it, client and server speak as they did before MCP 2026-07-28.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client
from mcp_types import ElicitResult

SERVER = StdioServerParameters(
    command=sys.executable,
    args=["-m", "apcore_mcp", "--extensions-dir", str(Path(__file__).parent / "extensions"), "--log-level", "WARNING"],
)
ANSWERS: list[dict[str, Any]] = [{"room": "Harbour", "projector": True}, {"approve": True}, {"approve": False}]
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("text.word_frequency", {"text": "a rose is\n\na rose"}),
    ("calendar.book_room", {"day": "2025-04-14", "people": 6}),
    ("trash.empty", {"dry_run": False, "deleted_before": "2025-02-01"}),
    ("trash.empty", {"dry_run": False}),
]


async def ask(context: Any, params: Any) -> ElicitResult:
    """What a client with a window would show, and what its user would type."""
    answer = ANSWERS.pop(0)
    print("  asked:   ", params.message.replace("\n", "\n            "))
    print("  answered:", answer)
    return ElicitResult(action="accept", content=answer)


async def show(progress: float, total: float | None, message: str | None) -> None:
    print(f"  progress: {progress:g}{f' of {total:g}' if total else ''}  {message}")


async def main(mode: str) -> None:
    async with Client(stdio_client(SERVER), mode=mode, elicitation_callback=ask) as client:
        print(f"Connected, MCP {client.protocol_version}")
        for name, arguments in CALLS:
            print(f"\n> {name} {arguments}")
            result = await client.call_tool(name, arguments, progress_callback=show)
            print("  result:  ", result.structured_content or getattr(result.content[0], "text", result.content))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "auto"))
