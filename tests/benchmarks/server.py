"""The servers that are measured, one a process: `python server.py ours --count 100`.

It is run as a script, so that `apcore_mcp` is whatever PYTHONPATH says: this tree's, or another copy's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, Literal

import mcp.server.lowlevel  # before `started`: how long the SDK takes to import is no part of a server's growth
from apcore import ACL, ACLRule, Executor, Registry
from pydantic import BaseModel, Field


class Point(BaseModel):
    x: int
    y: int
    label: str = ""


class Order(BaseModel):
    customer: str = Field(description="Who ordered, as the name on the invoice", min_length=1, max_length=200)
    email: str = Field(description="Where the confirmation goes", pattern="@")
    quantity: int = Field(description="How many pieces", ge=1, le=10_000)
    price: float = Field(description="Price of one piece, without tax", ge=0)
    currency: Literal["EUR", "USD", "JPY"] = Field("EUR", description="Currency of the price")
    express: bool = Field(False, description="Whether it is to arrive tomorrow")
    tags: list[str] = Field(default_factory=list, description="Free words to find the order by", max_length=20)
    discount: float | None = Field(None, description="Part of the price that is not charged, 0.1 for 10 %")
    address: str = Field("", description="Where it goes, when not to the customer")
    note: str = Field("", description="What the packers should know")


ORDER = Order.model_json_schema()
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "dict": (TEXT, {"text": "hello"}),
    "small": (Point, {"x": 1, "y": 2, "label": "here"}),
    "ten": (Order, {"customer": "Ann", "email": "ann@example.com", "quantity": 2, "price": 9.5, "tags": ["a", "b"]}),
}
"""The kinds of module whose calls are measured: the schema, and arguments that satisfy it."""


ROLES = [ACLRule(["@external"], [f"area{n}.*"], "allow", conditions={"roles": [f"role{n}"]}) for n in range(9)]
GUARD = ACL([*ROLES, ACLRule(["@external"], ["*"], "allow")], "deny")


class Echo:
    """A module that returns what it is given."""

    def __init__(self, schema: Any) -> None:
        self.input_schema = self.output_schema = schema
        self.description = "Take an order, or whatever else it is given, and say what was understood"

    async def execute(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return dict(inputs)


class Grow:
    """A module that registers others, and tells when the server started and what memory was taken since `trace`."""

    started = 0.0

    def __init__(self, registry: Registry) -> None:
        self.input_schema = self.output_schema = {"type": "object"}
        self.description = "Register more modules"
        self._registry = registry

    async def execute(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        if inputs.get("trace"):
            tracemalloc.start()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        add_modules(self._registry, inputs.get("count", 0))
        taken = {"taken": before, "taken_by_registry": tracemalloc.get_traced_memory()[0] - before}
        if inputs.get("trace") is False:
            tracemalloc.stop()
        return {"started": self.started, **taken}


def add_modules(registry: Registry, count: int, schema: Any = ORDER) -> None:
    present = len(registry.list())
    for number in range(present, present + count):
        registry.register(f"shop.order_{number:05}", Echo(schema))


def modules(count: int, schema: Any = ORDER) -> Registry:
    """A registry of `count` modules: one of each kind, those above, and for the rest ones of `schema`.

    That has ten properties. By default it is JSON Schema: what pydantic takes to write one is no part of most figures.
    """
    registry = Registry()
    for kind, (its_schema, _) in KINDS.items():
        registry.register(f"call.{kind}", Echo(its_schema))
    registry.register("bench.grow", Grow(registry))
    add_modules(registry, count - len(registry.list()), schema)
    return registry


def minimal(registry: Registry) -> Any:
    """What somebody would write by hand on the SDK: a list that never changes, and calls that are passed on."""
    from mcp_types import CallToolResult, ListToolsResult, TextContent, Tool, ToolAnnotations

    executor, tools = Executor(registry), {}
    flags = {f"apcore/{flag}": False for flag in ("requires_approval", "streaming", "cacheable", "paginated")}
    hints = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=True)
    for module_id in sorted(registry.list()):
        descriptor = registry.get_definition(module_id)
        assert descriptor is not None
        tools[module_id] = Tool(
            name=module_id,
            title=descriptor.name,
            description=descriptor.description,
            input_schema=descriptor.input_schema,
            output_schema=descriptor.output_schema,
            annotations=hints,
            _meta={**flags, "apcore/version": descriptor.version, "apcore/tags": descriptor.tags},
        )

    async def list_tools(ctx: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=[*tools.values()])

    async def call_tool(ctx: Any, params: Any) -> CallToolResult:
        output = await executor.call_async(params.name, params.arguments or {})
        return CallToolResult(content=[TextContent(type="text", text=json.dumps(output))])

    server: Any = mcp.server.lowlevel.Server("minimal", on_list_tools=list_tools, on_call_tool=call_tool)
    # Or the SDK would list all tools for each call over HTTP, which nobody would put up with.
    server.get_tool_input_schema = lambda name: tools[name].input_schema
    return server


class PipeIn:
    """Lines of stdin for the SDK's `stdio_server()`, whose own costs a thread hop each."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    def __aiter__(self) -> PipeIn:
        return self

    async def __anext__(self) -> str:
        if line := await self._reader.readline():
            return line.decode()
        raise StopAsyncIteration


class PipeOut:
    """stdout for the SDK's `stdio_server()`."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    async def write(self, text: str) -> None:
        self._writer.write(text.encode())

    async def flush(self) -> None:
        await self._writer.drain()


async def serve_pipes(server: Any) -> None:
    from mcp.server.stdio import stdio_server

    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    sink, _ = await loop.connect_write_pipe(lambda: protocol, sys.stdout.buffer)
    pipes: Any = PipeIn(reader), PipeOut(asyncio.StreamWriter(sink, protocol, None, loop))
    async with stdio_server(*pipes) as streams:
        await server.run(*streams, server.create_initialization_options())


def end_with_parent(end: Callable[[], None]) -> None:
    """Call `end` once the benchmark has ended, killed or not: nothing else would end a server over HTTP then."""

    def wait() -> None:
        while os.read(0, 1024):  # not `sys.stdin`, whose lock would be missed at the end of the interpreter
            pass
        end()

    threading.Thread(target=wait, daemon=True).start()


def run_workers(count: int, port: int) -> None:
    """Serve the example for several cores with so many of them."""
    examples = os.path.join(os.path.dirname(__file__), "..", "..", "examples")
    command = [sys.executable, "-m", "granian", "--working-dir", examples, "--interface", "asgi", "--no-log"]
    command += ["--workers-kill-timeout", "5", "--workers", str(count), "--port", str(port), "several_cores:app"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    end_with_parent(process.terminate)
    process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=("ours", "guarded", "searching", "minimal", "workers"))
    parser.add_argument("--count", type=int, default=0, help="how many modules, or workers")
    parser.add_argument("--names", default="module-id")
    parser.add_argument("--models", action="store_true", help="whose schemas are pydantic models, not JSON Schema")
    parser.add_argument("--port", type=int, default=0, help="serve streamable HTTP there instead of stdio")
    arguments = parser.parse_args()
    if arguments.side == "workers":
        run_workers(arguments.count, arguments.port)
        return
    registry = modules(arguments.count, Order if arguments.models else ORDER)
    if arguments.port:
        end_with_parent(lambda: os._exit(0))
    if arguments.side == "minimal":
        Grow.started = time.monotonic()
        server = minimal(registry)
        if arguments.port:
            import uvicorn

            uvicorn.run(server.streamable_http_app(), port=arguments.port, log_level="warning", access_log=False)
        else:
            asyncio.run(serve_pipes(server))
        return
    from apcore_mcp import serve

    options: dict[str, Any] = {"transport": "streamable-http", "port": arguments.port} if arguments.port else {}
    if arguments.side == "searching":
        options["search"] = True
    Grow.started = time.monotonic()
    executor = Executor(registry, acl=GUARD if arguments.side == "guarded" else None)
    serve(executor, tool_names=arguments.names, **options)


if __name__ == "__main__":
    main()
