"""What lives as long as a server does: the announcements of changes, the streams that clients listen on, sessions, and
how all of these end (FR-DYNAMIC, NFR-REL-001; design "Dynamic", "Shutdown").
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from apcore import Registry
from conftest import (
    MODERN,
    PROGRAM,
    Clock,
    FunctionalModule,
    RawClient,
    command,
    connect,
    echo,
    free_port,
    hosting,
    registry_of,
    with_clock,
)

from apcore_mcp import MCPServer, async_serve

META = "io.modelcontextprotocol/"


def test_a_registration_from_another_thread_is_announced_though_nobody_says_anything(tmp_path: Path) -> None:
    program = """
@tool
async def later(inputs, context):
    def register():
        while not Path(inputs["gate"]).exists():
            time.sleep(0.01)
        registry.register("t.late", Module(lambda inputs, context: {}))
    threading.Thread(target=register, daemon=True).start()
    return {}

serve(registry)
"""
    gate = tmp_path / "gate"
    with RawClient([sys.executable, "-c", PROGRAM + program]) as client:
        client.initialize()
        client.request("tools/call", {"name": "t.later", "arguments": {"gate": str(gate)}})
        gate.touch()  # from here on the server's loop hears of nothing but the other thread
        assert client.receive()["method"] == "notifications/tools/list_changed"


class Late(Registry):
    """Another thread registers a module at the very moment at which a server begins to listen."""

    def on(self, event: str, callback: Any) -> None:
        if not self.has("late"):
            self.register("late", FunctionalModule(echo))
        super().on(event, callback)


async def test_what_is_registered_while_the_server_begins_to_listen_is_listed(mode: str) -> None:
    async with connect(Late(), mode=mode) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["late"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stream_that_a_client_listens_on_is_ended_in_order(number: signal.Signals) -> None:
    stamp = {"protocolVersion": MODERN, "clientInfo": {"name": "raw", "version": "1"}, "clientCapabilities": {}}
    params = {"notifications": {"toolsListChanged": True}, "_meta": {META + key: value for key, value in stamp.items()}}
    with RawClient(command()) as client:
        listening = client.send("subscriptions/listen", params)
        assert client.receive()["method"] == "notifications/subscriptions/acknowledged"
        client.process.send_signal(number)
        answer = client.receive()
        assert (answer["id"], "error" in answer) == (listening, False)
        assert client.process.wait(timeout=15) == 0


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_an_answer_that_is_being_read_when_the_server_ends_is_read_to_its_end(method: str) -> None:
    """A client that takes a second for what fits into no buffer loses nothing."""
    text = "x" * 24_000_000
    registry = Registry()
    registry.register("big", FunctionalModule(lambda inputs, context: {"text": text}, documentation=text))
    port = free_port()
    server = MCPServer(registry, transport="streamable-http", port=port, explorer=True, allow_execute=True)
    server.start()
    path = "/explorer/tools/big" if method == "GET" else "/explorer/tools/big/call"
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
    head += "Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(head.encode())
        received = len(client.recv(65_536))
        server.stop()
        ended = threading.Event()
        threading.Thread(target=lambda: (server.wait(), ended.set()), daemon=True).start()
        while data := client.recv(65_536):
            received += len(data)
            ended.wait(0.002)  # the pace of the client
    assert received > len(text)
    assert ended.wait(15)


def test_a_session_in_which_nothing_is_said_for_half_an_hour_is_ended() -> None:
    async def story(clock: Clock) -> None:
        begin = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}
        headers = {"Accept": "application/json, text/event-stream"}
        async with (
            async_serve(registry_of({"echo": echo})) as app,
            hosting(app) as url,
            httpx.AsyncClient(headers=headers, timeout=None) as client,
        ):

            async def ask(method: str, params: dict[str, Any]) -> httpx.Response:
                message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
                return await client.post(f"{url}/mcp", json=message)

            opened = await ask("initialize", begin)
            client.headers["Mcp-Session-Id"] = opened.headers["Mcp-Session-Id"]
            for minutes, status in ((25, 200), (25, 200), (31, 404)):
                await clock.put_forward(60 * minutes)
                assert (await ask("tools/list", {})).status_code == status

    with_clock(story)


def test_a_program_without_logging_of_its_own_sees_what_it_asked_for() -> None:
    program = 'serve(registry, log_level="INFO")'
    completed = subprocess.run(
        [sys.executable, "-c", PROGRAM + program], stdin=subprocess.DEVNULL, capture_output=True, timeout=30
    )
    assert b"apcore-mcp server started" in completed.stderr


def test_an_interrupt_while_modules_are_loaded_ends_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "zebra.py").write_text("print('loaded all the same')\n")
    arguments = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(tmp_path)]
    completed = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert completed.returncode != 0
    assert b"loaded all the same" not in completed.stderr
    assert b"server started" not in completed.stderr


@pytest.mark.parametrize("kind", ["file", "terminal"])
def test_the_last_answer_reaches_a_file_and_a_terminal(kind: str, tmp_path: Path) -> None:
    program = """
@tool
async def big(inputs, context):
    return {"text": "x" * 10_000_000}

serve(registry)
"""
    stamp = {"protocolVersion": MODERN, "clientInfo": {"name": "raw", "version": "1"}, "clientCapabilities": {}}
    meta = {META + key: value for key, value in stamp.items()}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "t.big", "_meta": meta}}
    asked, target = tmp_path / "asked", tmp_path / "answers"
    asked.write_text(json.dumps(message) + "\n")
    received = bytearray()
    arguments = [sys.executable, "-c", PROGRAM + program]
    with asked.open("rb") as stdin:
        if kind == "file":
            with target.open("wb") as stdout:
                assert subprocess.run(arguments, stdin=stdin, stdout=stdout, timeout=30).returncode == 0
            received += target.read_bytes()
        else:
            ours, theirs = os.openpty()
            process = subprocess.Popen(arguments, stdin=stdin, stdout=theirs)
            os.close(theirs)
            while data := _read(ours):
                received += data
            os.close(ours)
            assert process.wait(timeout=30) == 0
    assert json.loads(received)["result"]["structuredContent"] == {"text": "x" * 10_000_000}


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65_536)
    except OSError:  # the end of a terminal
        return b""
