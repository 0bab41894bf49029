"""What each Python client is asked to do, in terms that all of them have. Runs in the client's own environment.

A client's script calls `main()` with a function that connects to a target (a URL, or a command to start) and yields
an Adapter.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

LIMIT_SECONDS = 200


@dataclass
class Adapter:
    """A connected client: coroutine functions, or None where the client has no such thing."""

    names: Callable[[], Any]  # -> names of tools
    call: Callable[[str, dict[str, Any]], Any]  # name, arguments -> (text, value or None, whether it is an error)
    read: Callable[[str], Any] | None  # uri -> text
    calls_any_name: bool = True  # or only tools that it has been told of


def adapter_of(session: Any, uri: Callable[[str], Any] = str) -> Adapter:
    """A client that answers in the types of the official SDK."""

    async def names() -> list[str]:
        listed = await session.list_tools()
        return [tool.name for tool in getattr(listed, "tools", listed)]

    async def call(name: str, arguments: dict[str, Any]) -> tuple[str, Any, bool]:
        result = (await session.call_tool(name, arguments)).model_dump(by_alias=True)
        return result["content"][0]["text"], result["structuredContent"], result["isError"]

    async def read(address: str) -> str:
        return str((await session.read_resource(uri(address))).contents[0].text)

    return Adapter(names, call, read)


async def check(client: Adapter) -> dict[str, str]:
    """Each check with "yes", "-" where the client cannot, or what came instead."""
    results, names = {}, list(await client.names())
    workdays = next(name for name in names if name in ("calendar.workdays", "calendar-workdays"))
    results["list"] = "yes" if len(names) == int(os.environ["TOOLS"]) else f"{len(names)} tools"
    text, value, is_error = await client.call(workdays, {"start": "2026-01-01", "end": "2026-01-12"})
    value = json.loads(text) if value is None else value
    results["structured output"] = "yes" if value.get("workdays") == 8 and not is_error else f"{text} {value}"[:200]
    text, _, is_error = await client.call(workdays, {"start": "soon", "end": "2026-01-12"})
    results["validation error"] = "yes" if is_error and "- start: " in text else text[:200]
    if client.calls_any_name:
        text, _, is_error = await client.call("no.such_tool", {})
        results["unknown tool"] = "yes" if is_error and "no.such_tool" in text else text[:200]
    else:
        results["unknown tool"] = "-"
    results["resource"] = "-"
    if client.read is not None:
        text = await client.read("docs://finance.loan_schedule")
        results["resource"] = "yes" if "annuity" in text else text[:200]
    return results


async def check_every(client: Adapter, tools: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Whether just these tools are listed, and each answers a call with its arguments."""
    names, wrong = {*await client.names()}, []
    if names != {*tools}:
        wrong.append(f"lists {sorted(names - {*tools})} more and {sorted({*tools} - names)} less")
    for name in names & {*tools}:
        try:
            text, _, is_error = await client.call(name, tools[name])
        except Exception as error:  # what the client makes of a result it does not like
            text, is_error = repr(error), True
        if is_error:
            wrong.append(f"{name}: {' '.join(text.split())[:150]}")
    return {"hostile schemas": "; ".join(wrong) or "yes"}


def main(connect: Callable[[Any], AbstractAsyncContextManager[Adapter]]) -> None:
    """Connect to the URL or start the command in the arguments; print the checks as one line of JSON."""
    target: Any = sys.argv[1] if sys.argv[1].startswith("http") else sys.argv[1:]

    async def run() -> dict[str, str]:
        async with asyncio.timeout(LIMIT_SECONDS), connect(target) as client:
            every = os.environ.get("EVERY_TOOL")
            return await (check_every(client, json.loads(every)) if every else check(client))

    print(json.dumps(asyncio.run(run())))
