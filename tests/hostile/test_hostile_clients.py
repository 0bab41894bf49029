"""Clients that break the rules, vanish or pretend: none gets in, and nothing is left of them in the server."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from apcore import FunctionModule
from conftest import HANDSHAKE, MODERN, ROOT, FunctionalModule, connect, echo, free_port, program, until
from pydantic import BaseModel
from support import answer, handshake, message, modern

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
MIB = 1024 * 1024

SERVER = """
ran = []
waiting = 0

@tool
async def echo(inputs, context):
    ran.append(1)
    return inputs

@tool
async def big(inputs, context):
    return {"text": "x" * inputs["size"]}

@tool
async def wait(inputs, context):
    global waiting
    waiting += 1
    try:
        await asyncio.Event().wait()
    finally:
        waiting -= 1

@tool
async def census(inputs, context):
    return {"ran": len(ran), "waiting": waiting, "tasks": len(asyncio.all_tasks())}

options = {"transport": "streamable-http", "port": int(sys.argv[1]), "metrics_collector": True}
serve(registry, log_level="INFO", explorer=True, allow_execute=True, **options)
"""


class Server(NamedTuple):
    pid: int
    port: int

    def ask(self, tool: str, **arguments: Any) -> Any:
        """A well-behaved call, on a connection of its own."""
        posted = modern("tools/call", {"name": tool, "arguments": arguments})
        with httpx.Client(timeout=30, verify=False) as client:
            return answer(client.post(f"http://127.0.0.1:{self.port}/mcp", **posted))["result"]["structuredContent"]

    def counted(self) -> tuple[int, int, int]:
        """Its descriptors, threads and tasks."""
        held = [len(os.listdir(f"/proc/{self.pid}/{kind}")) for kind in ("fd", "task")]
        return held[0], held[1], self.ask("t.census")["tasks"]

    @contextlib.contextmanager
    def losing_nothing(self) -> Iterator[None]:
        """Descriptors, threads and tasks are afterwards no more than they were before."""
        before = self.counted()
        yield
        assert self.ask("t.echo", a=1) == {"a": 1}
        until(lambda: all(now <= then for now, then in zip(self.counted(), before, strict=True)))
        assert self.ask("t.census")["waiting"] == 0

    def connect(self, sent: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=15)
        connection.sendall(sent.replace(b"PORT", str(self.port).encode()))
        return connection


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It has ended well, whatever the tests did to it."""
    port, log = free_port(), tmp_path_factory.mktemp("log") / "stderr"
    with log.open("wb") as stderr, subprocess.Popen(program(SERVER, str(port)), cwd=ROOT, stderr=stderr) as process:
        try:
            until(lambda: b"server started" in log.read_bytes() or process.poll() is not None, seconds=40)
            assert process.poll() is None, log.read_text()
            served = Server(process.pid, port)
            with httpx.Client(timeout=30, verify=False) as client:  # what is made on first use is no leak
                endpoint = f"http://127.0.0.1:{port}/mcp"
                client.delete(endpoint, headers=handshake(client, endpoint)[1])
            yield served
            process.terminate()
            assert process.wait(timeout=15) == 0
        finally:
            process.kill()


Headers = dict[str, Any]


def http(route: str, headers: Headers, body: Any = None) -> bytes:
    """A request; a list of values is sent as so many headers, `PORT` is the server's."""
    text = b"" if body is None else json.dumps(body).encode()
    fields = {"Host": "127.0.0.1:PORT", "Content-Type": "application/json", "Content-Length": str(len(text)), **headers}
    lines = [f"{route} HTTP/1.1"]
    for name, values in fields.items():
        lines += [f"{name}: {value}" for value in ([values] if isinstance(values, str) else values)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + text


def sent_until(when: str, era: str, session: Headers) -> bytes:
    """What a client of either era, or the Explorer's page, has sent by the time it vanishes."""
    if when == "in-body" and era == HANDSHAKE:
        return http("POST /mcp", session, message("ping"))[:-10]
    if when == "in-body":
        return http("POST /explorer/tools/t.echo/call", {}, {"text": "x" * 1000})[:-100]
    if when == "listening" and era == HANDSHAKE:
        return http("GET /mcp", session)
    params: dict[str, Any] = {"name": "t.wait", "arguments": {}}
    if when == "in-answer":
        params = {"name": "t.big", "arguments": {"size": 8 * MIB}}
    if era == HANDSHAKE:
        return http("POST /mcp", session, message("tools/call", params))
    listen = modern("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
    posted = listen if when == "listening" else modern("tools/call", params)
    return http("POST /mcp", posted["headers"], posted["json"])


VANISHING = [("in-body", "explorer"), ("in-body", HANDSHAKE), ("in-answer", MODERN)]
VANISHING += [(when, era) for when in ("in-call", "listening") for era in (HANDSHAKE, MODERN)]


def test_clients_that_vanish_leave_nothing_behind(server: Server) -> None:
    """Five at once, of each kind."""
    endpoint = f"http://127.0.0.1:{server.port}/mcp"
    for when, era in VANISHING:
        with server.losing_nothing(), httpx.Client(timeout=30, verify=False) as opener:
            sessions = [handshake(opener, endpoint)[1] if era == HANDSHAKE else {} for _ in range(5)]
            connections = [server.connect(sent_until(when, era, session)) for session in sessions]
            if when == "in-call":
                until(lambda: server.ask("t.census")["waiting"] == 5)
            for connection in connections:
                if when in ("in-answer", "listening"):
                    assert connection.recv(100).startswith(b"HTTP/1.1 200"), (when, era)
            assert server.ask("t.echo", a=2) == {"a": 2}, "they hold up somebody else"
            for connection in connections:
                if when in ("in-call", "in-answer"):
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
            for session in filter(None, sessions):  # or it would wait for its client to come back
                assert opener.delete(endpoint, headers=session).is_success


OWN = "http://127.0.0.1:PORT"
TRICKS: dict[str, Headers] = {
    "two-hosts": {"Host": ["127.0.0.1", "evil.example"]},
    "forwarded": {"Host": "evil.example", "X-Forwarded-Host": "127.0.0.1"},
    "host-not-ascii": {"Host": "127.0.0.1\xff"},
    "two-types": {"Content-Type": ["text/plain", "application/json"]},
}
POSTS = ["POST /mcp", "POST /explorer/tools/t.echo/call", "POST /%65xplorer/tools/t%2Eecho/call"]
GETS = ["GET /metrics", "GET /explorer/tools"]  # a probe needs no login and no name


def knock(server: Server, route: str, tricks: Headers) -> int:
    """The status of a request that is good but for its `tricks`; 0 when the server hangs up."""
    good = modern("tools/call", {"name": "t.echo", "arguments": {}})
    sent = http(route, good["headers"] | tricks, good["json"] if route.startswith("POST") else None)
    with contextlib.suppress(ConnectionError), server.connect(sent) as connection:
        return int([*connection.recv(100).split(b" "), b"0"][1])
    return 0


def test_no_trick_with_headers_opens_a_route(server: Server) -> None:
    """Which a good request does, or the refusals would prove nothing."""
    before = server.ask("t.census")["ran"]
    for headers in ({}, {"Origin": OWN}):
        assert {knock(server, route, headers) for route in POSTS + GETS} == {200}
    ran = server.ask("t.census")["ran"]
    assert ran - before == 2 * len(POSTS)
    with server.losing_nothing():
        for name, tricks in TRICKS.items():
            routes = POSTS if "type" in name else POSTS + GETS
            told = {route: knock(server, route, tricks) for route in routes}
            assert all(status == 0 or 400 <= status < 500 for status in told.values()), (name, told)
    assert server.ask("t.census")["ran"] == ran + 1  # by who has lost nothing


LOOKED_AT: list[str] = []


class Order(BaseModel):
    size: int = 1

    @property
    def destroy(self) -> int:
        LOOKED_AT.append("destroy")
        return 1


def place(order: Order) -> dict[str, Any]:
    return {"size": order.size}


async def test_no_argument_runs_a_property_of_a_model() -> None:
    """A name that the model does not know is looked up nowhere."""
    modules = {"place": FunctionModule(place, "place"), "by.class": FunctionalModule(echo, input_schema=Order)}
    arguments = {"size": 2, "destroy": 1, "__class__": "x", "model_fields": []}
    async with connect(modules) as client:
        assert (await client.call_tool("place", {"order": arguments})).structured_content == {"size": 2}
        assert (await client.call_tool("by.class", arguments)).structured_content == arguments
        assert (await client.call_tool("place", {"order": {}, **arguments})).is_error
    assert LOOKED_AT == []
