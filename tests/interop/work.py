"""Modules that take long, ask and need approval. Run with the port to listen on, or with nothing for stdio."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

from apcore import Context, Registry
from apcore.decorator import module
from pydantic import Field

from apcore_mcp import elicit, report_progress, serve

LONG: dict[str, Any] = {"extra": {"mcp_async": True}}
FORM = {"type": "object", "properties": {"title": {"type": "string", "title": "Title"}}, "required": ["title"]}


def modules() -> Registry:
    registry = Registry()
    cancelled: list[str] = []

    @module(id="report.compile", annotations=LONG, registry=registry)
    async def compile_report(pages: int, context: Context) -> str:
        """Compile a report."""
        try:
            for page in range(1, pages + 1):
                await report_progress(context, page, total=pages, message="Compiling")
                await asyncio.sleep(1)
        except asyncio.CancelledError:
            cancelled.append("report.compile")
            raise
        return f"compiled {pages} pages"

    @module(id="report.cancelled", registry=registry)
    def list_cancelled() -> list[str]:
        """List what was cancelled."""
        return cancelled

    @module(id="report.publish", annotations=LONG, registry=registry)
    async def publish_report(context: Context) -> str:
        """Publish the report under a title that its user gives it."""
        await report_progress(context, 1, total=2, message="Preparing")
        await asyncio.sleep(1.5)
        answer = await elicit(context, "Under which title?", FORM, key="title")
        return f"published as {answer['title']}" if answer else "not published"

    @module(id="report.wait", annotations=LONG, registry=registry)
    async def wait_for_ever(context: Context) -> str:
        """Wait for something that does not come."""
        await asyncio.Event().wait()
        return ""

    @module(id="report.erase", annotations={"requires_approval": True, "destructive": True}, registry=registry)
    async def erase_report(name: Annotated[str, Field(description="Which one")]) -> str:
        """Erase a report for good."""
        return f"erased {name}"

    @module(id="report.rename", registry=registry)
    async def rename_report(context: Context) -> str:
        """Rename the report as its user wants it."""
        answer = await elicit(context, "What shall it be called?", FORM)
        return f"renamed to {answer['title']}" if answer else "not renamed"

    return registry


if __name__ == "__main__":
    options: dict[str, Any] = {"log_level": "ERROR"}
    if sys.argv[1:]:
        options |= {"transport": "streamable-http", "port": int(sys.argv[1])}
    serve(modules(), **options)
