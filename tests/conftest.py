"""What the tests share: real registries, a real server behind a real socket or pipe, and the SDK's own client.

A file `test_<name>.py` proves what one file of the package, or one room of `core.py`, promises, and takes seconds by
itself: `python -m pytest tests/test_schemas.py`. What crosses rooms stands in `whole/` (who calls and who is offered
what, the examples and the README, clients and adapters, promises of outputs), what attackers and mistaken modules do
in `hostile/`. Here are the parts of every test, in `support.py` those of several files, in `generated.py` schemas that
hypothesis makes up. By hand are run `python -m tests.benchmarks` and `python -m tests.interop`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvicorn.server
from apcore import Executor, Registry
from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client

from apcore_mcp import MCPServer

signal.signal(signal.SIGINT, signal.default_int_handler)  # or what a shell's background job starts ignores Ctrl-C
os.environ.pop("PYTHONUNBUFFERED", None)  # what is printed before `serve()` is kept off the wire while in a buffer
ROOT = Path(__file__).resolve().parent.parent
# Whatever else is installed, what tests start imports this checkout's package.
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
# No test speaks TLS, but each HTTP client would read all certificates of the machine, as long as the rest of its test.
os.environ.pop("SSL_CERT_FILE", None)
os.environ["SSL_CERT_DIR"] = str(ROOT)
EXTENSIONS = ROOT / "examples" / "extensions"
HANDSHAKE, MODERN = "legacy", "2026-07-28"
"""The two protocol eras, as the SDK's client names its modes."""

ANYTHING: dict[str, Any] = {"type": "object"}


class FunctionalModule:
    """A module made of a function `(inputs, context) -> dict`, with dict schemas that accept any object by default."""

    def __init__(self, execute: Callable[..., Any], **attributes: Any) -> None:
        self.execute, self.description = execute, "A module of a test"
        self.input_schema: Any = ANYTHING
        self.output_schema: Any = ANYTHING
        vars(self).update(attributes)


PROGRAM = """
import asyncio, ctypes, json, logging, math, os, subprocess, sys, threading, time, tracemalloc, _thread
from pathlib import Path
from apcore import Config, Executor, ModuleAnnotations, ModuleError, Registry
from apcore_mcp import MCPServer, elicit, report_progress, serve

class Module:
    input_schema = output_schema = {"type": "object"}
    description = "A module of a test"
    def __init__(self, execute, **attributes):
        self.execute = execute
        vars(self).update(attributes)

registry = Registry()
def tool(function, **attributes):
    registry.register("t." + function.__name__, Module(function, **attributes))
    return function
"""
"""How the program of a server in a process of its own begins. Functions with `@tool` follow, and `serve(registry)`."""


def program(text: str, *arguments: str) -> list[str]:
    """The command line of a server in a process of its own: `text` after `PROGRAM`, with `arguments`."""
    return [sys.executable, "-c", PROGRAM + text, *arguments]


def registry_of(modules: Mapping[str, Any] | None = None) -> Registry:
    """A registry of modules by id; a plain function becomes a module that accepts and returns any object."""
    registry = Registry()
    for module_id, module in (modules or {}).items():
        registry.register(module_id, module if hasattr(module, "execute") else FunctionalModule(module))
    return registry


def echo(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    return dict(inputs)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    """Wait for `condition`; fails when it does not come true in time."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it did not come to that in time"
        time.sleep(0.01)


@contextlib.contextmanager
def serving(source: Registry | Executor, **options: Any) -> Iterator[str]:
    """A server in a thread, on a free port; yields its base URL, and has ended when the context has."""
    options = {"transport": "streamable-http", "port": free_port(), **options}
    server = MCPServer(source, **options)
    server.start()
    try:
        yield f"http://127.0.0.1:{options['port']}"
    finally:
        server.stop()
        server.wait()


@contextlib.asynccontextmanager
async def hosting(app: Any) -> AsyncIterator[str]:
    """An ASGI app, served by this very event loop; yields its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listener:  # clients may connect from here on, and wait
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or each answer waits 40 ms for a delayed ACK
        running = asyncio.create_task(server.serve([listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await running


def client_of(server: Any, mode: str = MODERN, **options: Any) -> Client:
    """The SDK's client, which caches nothing and waits for no answer longer than 30 s.

    `server` is the base URL of one over streamable HTTP, an endpoint (`.../mcp`, `.../sse`), or a transport of the SDK.
    """
    if isinstance(server, str) and server.endswith("/sse"):
        server = sse_client(server)
    elif isinstance(server, str) and not server.endswith("/mcp"):
        server = f"{server}/mcp"
    return Client(server, mode=mode, cache=None, read_timeout_seconds=30, **options)


@contextlib.asynccontextmanager
async def connect(
    modules: Any, *, mode: str = MODERN, client: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[Client]:
    """The SDK's client, made with the arguments `client`, over streamable HTTP to a server of `modules`."""
    source = modules if isinstance(modules, Registry | Executor) else registry_of(modules)
    with serving(source, **options) as url:
        async with client_of(url, mode, **(client or {})) as connected:
            yield connected


def command(*arguments: str) -> list[str]:
    """The command line that serves the examples, with `arguments` behind it."""
    return [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(EXTENSIONS), *arguments]


def stdio(arguments: list[str], **environment: str) -> Any:
    """A transport of the SDK's client that starts `arguments` as a subprocess."""
    options: Any = {"cwd": str(ROOT), "env": {**os.environ, **environment}}
    return stdio_client(StdioServerParameters(command=arguments[0], args=arguments[1:], **options))


class Clock(asyncio.SelectorEventLoop):
    """An event loop whose clock can be put forward."""

    ahead = 0.0

    def time(self) -> float:
        return super().time() + self.ahead

    async def put_forward(self, seconds: float) -> None:
        """Let `seconds` go by at once: what was under way goes on before, what was waiting for its time after."""
        for pause in (seconds, 0):
            for _ in range(50):
                await asyncio.sleep(0)
            self.ahead += pause


class RawClient:
    """A JSON-RPC client that writes lines to a subprocess and reads lines from it, and knows nothing of MCP."""

    def __init__(self, arguments: list[str], **popen: Any) -> None:
        own: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.process: Any = subprocess.Popen(arguments, **{**own, "cwd": ROOT, **popen})
        self._next_id = 0

    def send_line(self, line: bytes) -> None:
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def send(self, method: str, params: dict[str, Any] | None = None, *, notify: bool = False) -> int:
        """Send a request (its id is returned) or a notification."""
        message = {"jsonrpc": "2.0", "method": method, **({} if params is None else {"params": params})}
        if not notify:
            self._next_id += 1
            message["id"] = self._next_id
        self.send_line(json.dumps(message).encode())
        return self._next_id

    def receive(self) -> dict[str, Any]:
        """The next line as JSON; the test's own timeout is the limit. Fails at the end of the stream."""
        line = self.process.stdout.readline()
        assert line, "the server closed stdout"
        return dict(json.loads(line))

    def request(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request and return the response with its id; notifications in between are dropped."""
        request_id = self.send(method, params)
        while (message := self.receive()).get("id") != request_id or "method" in message:
            pass
        return message

    def initialize(self, name: str = "raw", version: str = "2025-11-25", **capabilities: Any) -> dict[str, Any]:
        """Do the handshake; returns the `initialize` response."""
        about = {"name": name, "version": "1"}
        hello = {"protocolVersion": version, "capabilities": capabilities, "clientInfo": about}
        response = self.request("initialize", hello)
        self.send("notifications/initialized", notify=True)
        return response

    def end(self) -> tuple[int, bytes]:
        """Close stdin and wait; the exit status and what went to stderr."""
        _, stderr = self.process.communicate(timeout=30)
        return self.process.returncode, stderr

    def __enter__(self) -> RawClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(params=[HANDSHAKE, MODERN], ids=["handshake", "2026-07-28"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


MODULE = """
from pydantic import BaseModel, Field

class TextInput(BaseModel):
    text: str = Field(description="What to say")
    times: int | None = None

class Say:
    description = "Say it"
    tags = ["public", "{tag}"]
    input_schema = TextInput
    output_schema = TextInput

    def execute(self, inputs, context):
        return {{"text": inputs["text"]}}
"""


@pytest.fixture(autouse=True)
def _own_log_level() -> Iterator[None]:
    """`main()` sets the logger's level; leave it as it was."""
    logger = logging.getLogger("apcore_mcp")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def extensions(tmp_path: Path) -> Path:
    """A directory with three modules; its name has a space in it."""
    directory = tmp_path / "my extensions"
    for name, tag in (("voice/say.py", "loud"), ("voice/shout.py", "calm"), ("hand/write.py", "calm")):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(MODULE.format(tag=tag))
    return directory


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The examples, served over streamable HTTP by the command line."""
    port = free_port()
    with RawClient(command("--transport", "streamable-http", "--port", str(port))) as server:
        assert any(b"server started" in line for line in server.process.stderr), "the server did not start"
        yield f"http://127.0.0.1:{port}/mcp"
        server.process.terminate()
        server.process.wait(30)
