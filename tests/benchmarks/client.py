"""A server process and a client of it that does as little as possible, the same for every server.

Answers are kept while the clock runs and looked at when it has stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
HANDSHAKE, MODERN = "2025-11-25", "2026-07-28"
LIMIT_SECONDS = 600  # after which a server is killed, whatever it is doing

_CLIENT = {"name": "benchmark", "version": "1"}
_ENVELOPE = {
    "io.modelcontextprotocol/protocolVersion": MODERN,
    "io.modelcontextprotocol/clientInfo": _CLIENT,
    "io.modelcontextprotocol/clientCapabilities": {},
}
_TAKING_TASKS = {
    "io.modelcontextprotocol/clientCapabilities": {"extensions": {"io.modelcontextprotocol/tasks": {}}},
}
_HEAD = (
    "POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    "Accept: application/json, text/event-stream\r\nMCP-Protocol-Version: {version}\r\n"
    "Mcp-Method: tools/call\r\nMcp-Name: {name}\r\n\r\n"
)


@dataclass(frozen=True)
class Server:
    """What a server is started with: see `server.py` for the first five."""

    side: str
    count: int = 0  # of modules, or of workers
    names: str = "module-id"
    models: bool = False
    http: bool = False  # in the 2026-07-28 era; else stdio in this one:
    era: str = HANDSHAKE
    tasks: bool = False  # whether the client declares that it takes tasks, in the 2026-07-28 era
    tree: Path | None = None  # where `apcore_mcp` is imported from, when not from here


class Side:
    """One server, from its start to `close()`. Every measurement is in seconds and raises when an answer is wrong."""

    def __init__(self, server: Server) -> None:
        self.server, self._next_id, self._port, self._is_ready = server, 0, 0, False
        self._is_modern = server.http or server.era == MODERN
        if server.http:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._port = probe.getsockname()[1]
        script = str(Path(__file__).with_name("server.py"))
        self._arguments = [sys.executable, script, server.side, f"--count={server.count}", f"--names={server.names}"]
        self._arguments += [f"--port={self._port}", *(["--models"] if server.models else [])]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        options["env"] = {**os.environ, "PYTHONPATH": str(server.tree or ROOT)}
        self._process: Any = subprocess.Popen(self._arguments, **options)
        self._limit = threading.Timer(LIMIT_SECONDS, self._process.kill)
        self._limit.daemon = True
        self._limit.start()

    def stop(self) -> None:
        self._process.terminate()

    def close(self) -> None:
        self.stop()
        self._limit.cancel()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        self._errors.close()

    def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool once, for what it returns."""
        (answer,) = self._exchange(self._tool_calls(name, arguments, 1))
        return dict(json.loads(json.loads(answer)["result"]["content"][0]["text"]))

    def latency(self, name: str, arguments: dict[str, Any], count: int) -> float:
        """What one of `count` calls takes, each made when the one before is answered."""
        return self._timed([[call] for call in self._tool_calls(name, arguments, count)])

    def throughput(self, name: str, arguments: dict[str, Any], count: int) -> float:
        """What one of `count` calls takes that are all written at once."""
        return self._timed([self._tool_calls(name, arguments, count)])

    def listing(self, count: int) -> float:
        """What one of `count` times `tools/list` takes."""
        self.ready()
        return self._timed([[self._message("tools/list")] for _ in range(count)])

    def _timed(self, batches: list[list[bytes]]) -> float:
        """What one of these messages takes; each batch is written when the one before is answered."""
        begin = time.perf_counter()
        answers = [self._exchange(batch) for batch in batches]
        return self._checked(begin, [answer for batch in answers for answer in batch])

    def load(self, name: str, arguments: dict[str, Any], count: int, clients: int) -> float:
        """What one of `count` calls over HTTP takes that `clients` make at the same time."""
        return asyncio.run(self._load(name, self._tool_calls(name, arguments, count), clients))

    async def _load(self, name: str, bodies: list[bytes], clients: int) -> float:
        streams = [await asyncio.open_connection("127.0.0.1", self._port) for _ in range(clients)]
        answers: list[bytes] = []

        async def work(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bodies: list[bytes]) -> None:
            for body in bodies:
                head = _HEAD.format(port=self._port, length=len(body), version=MODERN, name=name)
                writer.write(head.encode() + body)
                head_back = await reader.readuntil(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: *(\d+)", head_back)
                if length is None or b" 200 " not in head_back[:20]:
                    raise RuntimeError(f"Refused: {head_back!r}")
                answers.append(await reader.readexactly(int(length[1])))

        begin = time.perf_counter()
        await asyncio.gather(*(work(*stream, bodies[i::clients]) for i, stream in enumerate(streams)))
        seconds = self._checked(begin, answers)
        for _, writer in streams:
            writer.close()
        return seconds

    def _checked(self, begin: float, answers: list[bytes]) -> float:
        seconds, count = time.perf_counter() - begin, len(answers)
        decoded = [json.loads(answer) for answer in answers]
        for answer in decoded:
            result = answer.get("result", {"isError": True})
            if result.get("isError") or not (result.get("content") or result.get("tools")):
                raise RuntimeError(f"Not answered: {answer}")
        assert {answer["id"] for answer in decoded} == {*range(self._next_id - count + 1, self._next_id + 1)}
        return seconds / count

    def ready(self) -> Side:
        """Wait until the server answers."""
        if self._is_ready:
            return self
        self._is_ready = True
        if self._port:
            self._wait_for_port()
        elif not self._is_modern:
            params = {"protocolVersion": HANDSHAKE, "capabilities": {}, "clientInfo": _CLIENT}
            self._exchange([self._message("initialize", params)])
            self._write(b'{"jsonrpc":"2.0","method":"notifications/initialized"}\n')
        else:
            self.listing(1)
        return self

    def _wait_for_port(self) -> None:
        while self._process.poll() is None:
            with contextlib.suppress(OSError):
                return socket.create_connection(("127.0.0.1", self._port), timeout=5).close()
            time.sleep(0.02)
        raise self._ended()

    def _ended(self) -> RuntimeError:
        self._errors.seek(0)
        return RuntimeError(f"{' '.join(self._arguments)} has ended: {self._errors.read()[-2000:].decode()}")

    def _message(self, method: str, params: dict[str, Any] | None = None) -> bytes:
        self._next_id += 1
        envelope = {**_ENVELOPE, **(_TAKING_TASKS if self.server.tasks else {})}
        params = {**(params or {}), **({"_meta": envelope} if self._is_modern else {})}
        message = {"jsonrpc": "2.0", "id": self._next_id, "method": method, "params": params}
        return json.dumps(message).encode() + b"\n"

    def _tool_calls(self, name: str, arguments: dict[str, Any], count: int) -> list[bytes]:
        self.ready()
        return [self._message("tools/call", {"name": name, "arguments": arguments}) for _ in range(count)]

    def _write(self, data: bytes) -> None:
        try:
            self._process.stdin.write(data)
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _exchange(self, lines: list[bytes]) -> list[bytes]:
        """Write all lines at once, and return as many answers."""
        if len(lines) == 1:
            self._write(lines[0])
        else:  # from a thread, or a server that waits for its answers to be read would wait for ever
            threading.Thread(target=self._write, args=(b"".join(lines),), daemon=True).start()
        answers: list[bytes] = []
        while len(answers) < len(lines):
            line = self._process.stdout.readline()
            if not line:
                raise self._ended()
            if b'"method"' not in line[:60]:  # a notification of a changed list, say
                answers.append(line)
        return answers
