"""stdio: a client at the other ends of stdin and stdout, and who owns these streams.

It plugs into the two streams that the SDK's `Server.run` takes: `core.py` loads it for this transport, and the command
line before anything can print.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from mcp.shared.message import ServerMessageMetadata, SessionMessage
from mcp_types import JSONRPCError, JSONRPCNotification, JSONRPCRequest, JSONRPCResponse, jsonrpc_message_adapter
from pydantic_core import from_json

from .conversation import silence
from .core import Activity, Bridge
from .execution import daemon_threads

_WRITE_BUFFER_BYTES = 16 * 1024 * 1024  # of unread answers, before calls wait for the client: some send all calls first


@functools.cache
def take_standard_streams() -> tuple[int, int]:
    """Take stdin and stdout for the protocol, once and for good: two private file descriptors that nothing else reads
    or writes, for all servers that this process starts.

    From then on fd 0 is at its end and fd 1 is stderr, so that nothing that modules, C code or child processes print
    can reach the client. RuntimeError when the process was started without these streams."""
    if sys.__stdin__ is None or sys.__stdout__ is None:  # 0 and 1 may be files that were opened since
        raise RuntimeError("stdin or stdout cannot be opened: the process was started without")
    duplicates = os.dup(0), os.dup(1)
    with open(os.devnull, "r+b", 0) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(nothing.fileno() if sys.__stderr__ is None else 2, 1)
    with suppress(OSError):  # where it was a file, whose position is asked for when all is set
        sys.__stdout__.reconfigure(errors="backslashreplace")  # as stderr, which it is now
    sys.__stdout__.reconfigure(line_buffering=True)
    return duplicates


def _copy(source: Any, sink: Any) -> None:
    """Copy bytes until either end is closed, which a terminal reports as an error."""
    with suppress(OSError), source, sink:
        while data := source.read(65_536):
            sink.write(data)
            sink.flush()


@asynccontextmanager
async def _pipes() -> AsyncIterator[tuple[Any, Any]]:
    """stdin and stdout as files that the event loop can wait for: pipes and sockets are used as they are, and threads
    copy between sockets and whatever it cannot wait for, such as a terminal, a file or a pipe of Windows."""
    duplicates = [os.dup(fd) for fd in take_standard_streams()]
    source, sink = os.fdopen(duplicates[0], "rb", 0), os.fdopen(duplicates[1], "wb")
    statuses = [os.fstat(fd) for fd in duplicates]
    kinds = {stat.S_IFMT(status.st_mode) for status in statuses}
    # Where one socket serves both directions, asyncio would take arriving input for the reader's end being closed.
    if sys.platform != "win32" and kinds <= {stat.S_IFIFO, stat.S_IFSOCK} and not os.path.samestat(*statuses):
        yield source, sink
        return
    loop = asyncio.get_running_loop()
    incoming, filled = socket.socketpair()
    outgoing, drained = socket.socketpair()
    with filled, drained:  # each stays open until the file that is made of it is closed, too
        loop.run_in_executor(daemon_threads, _copy, source, filled.makefile("wb"))
        writing = loop.run_in_executor(daemon_threads, _copy, drained.makefile("rb", 0), sink)
    yield incoming, outgoing
    await asyncio.wait([writing], timeout=1)


def _error_line(request_id: str | int | None, code: int, message: str) -> bytes:
    """A JSON-RPC error as a line, in ASCII, as an id may hold half of a surrogate pair."""
    answer = {"jsonrpc": "2.0", "id": request_id, "error": {"code": code, "message": message}}
    return json.dumps(answer).encode() + b"\n"


def _answer_to_no_message(line: bytes) -> bytes:
    """The answer to a line that is no message, under the id of its request where one can be made out."""
    request_id = None
    code = -32700
    with suppress(ValueError, RecursionError):
        decoded = json.loads(line)
        code = -32600
        if isinstance(decoded, dict) and "result" not in decoded and type(decoded.get("id")) in (str, int):
            request_id = decoded["id"]
    return _error_line(request_id, code, "Not a single JSON-RPC message")


class _StdioOutput:
    """The write stream that the SDK's `Server.run` takes: each message becomes a line of `writer`, which
    `serve_stdio` closes."""

    def __init__(self, writer: asyncio.StreamWriter, activity: Activity) -> None:
        self._writer = writer
        self._activity = activity

    async def send(self, item: SessionMessage) -> None:
        # No name for the text, or it would be kept while it is written: large lists would take a third longer.
        self._writer.write(item.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n")
        try:
            with suppress(OSError):  # the client has gone
                await self._writer.drain()
        finally:
            if isinstance(item.message, JSONRPCResponse | JSONRPCError):
                self._activity.end()

    async def __aenter__(self) -> _StdioOutput:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        pass


async def _stdio_messages(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bridge: Bridge
) -> AsyncIterator[SessionMessage]:
    """The read stream that the SDK's `Server.run` takes: a message for each line, and then the end of the server.

    A line that is no message is answered with an error here: the SDK would drop it, and its sender wait for ever. A
    request counts from now on until `_StdioOutput` has written its answer, or its client has cancelled it."""

    async def settle_unanswered() -> None:
        bridge.activity.end()

    metadata = ServerMessageMetadata(on_request_unanswered=settle_unanswered)
    while not reader.at_eof():
        line = await reader.readline()
        if not line.strip():
            continue
        try:
            message = jsonrpc_message_adapter.validate_json(line, by_name=False)
        except ValueError:
            writer.write(_answer_to_no_message(line))
            continue
        if isinstance(message, JSONRPCNotification) and "id" in from_json(line):  # a request whose id is no id
            writer.write(_answer_to_no_message(line))
        elif not isinstance(message, JSONRPCRequest):
            yield SessionMessage(message)
        elif bridge.deadline:
            writer.write(_error_line(message.id, -32000, "Server is shutting down"))
        else:
            bridge.activity.begin()
            yield SessionMessage(message, metadata)
    await bridge.finish()


@asynccontextmanager
async def serve_stdio(bridge: Bridge) -> AsyncIterator[asyncio.Task[None]]:
    """Serve the client at the other ends of stdin and stdout. Yields a task that ends when the client has gone.

    A client that closes its end of stdout has gone, so its input ends, too. When the input ends, the requests that were
    read before are answered, within `shutdown_seconds`; then the client is given a second to read."""
    loop = asyncio.get_running_loop()
    async with _pipes() as (source, sink):
        # No limit to a line: a request that is too long would be refused without its id, and its client wait for ever.
        reader = asyncio.StreamReader(limit=sys.maxsize)
        incoming, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), source)
        # A StreamWriter waits by way of such a protocol, which wants a reader; nothing can be read here.
        unused = asyncio.StreamReader()
        outgoing, protocol = await loop.connect_write_pipe(lambda: asyncio.StreamReaderProtocol(unused), sink)
        outgoing.set_write_buffer_limits(_WRITE_BUFFER_BYTES)
        writer = asyncio.StreamWriter(outgoing, protocol, None, loop)
        gone = asyncio.create_task(writer.wait_closed())
        gone.add_done_callback(silence)
        gone.add_done_callback(lambda _: incoming.close())
        messages = _stdio_messages(reader, writer, bridge)
        output = _StdioOutput(writer, bridge.activity)
        options = bridge.server.create_initialization_options()
        running = asyncio.create_task(bridge.server.run(messages, output, options))
        running.add_done_callback(silence)
        try:
            yield running
        finally:
            running.cancel()
            await asyncio.wait({running})
            writer.close()
            await asyncio.wait({gone}, timeout=1)
            if not gone.done():
                outgoing.abort()
