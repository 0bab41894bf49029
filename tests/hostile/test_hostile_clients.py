"""Clients that break the rules, vanish or pretend: none gets in, none takes another's place, and nothing is left of
them in the server (design "HTTP", "stdio", "Cancellation"; NFR-REL). A real server in a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from conftest import HANDSHAKE, MODERN, PROGRAM, ROOT, RawClient, free_port, until
from support import answer, handshake, line, message, messages, modern, request

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

options = {}
if sys.argv[1:]:
    options = {"transport": "streamable-http", "port": int(sys.argv[1]), "metrics_collector": True}
serve(registry, log_level="INFO", explorer=True, allow_execute=True, **options)
"""


class Server(NamedTuple):
    pid: int
    port: int
    log: Path

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

    def connect(self, sent: bytes = b"") -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=15)
        connection.sendall(sent)
        return connection


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("hostile") / "server.py"
    path.write_text(PROGRAM + SERVER)
    return [sys.executable, str(path)]


@pytest.fixture(scope="module")
def server(program: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """It has ended well, whatever the tests did to it."""
    port, log = free_port(), tmp_path_factory.mktemp("log") / "stderr"
    with log.open("wb") as stderr, subprocess.Popen([*program, str(port)], cwd=ROOT, stderr=stderr) as process:
        try:
            until(lambda: b"server started" in log.read_bytes() or process.poll() is not None, seconds=40)
            assert process.poll() is None, log.read_text()
            served = Server(process.pid, port, log)
            with httpx.Client(timeout=30, verify=False) as client:  # what is made on first use is no leak
                endpoint = f"http://127.0.0.1:{port}/mcp"
                client.delete(endpoint, headers=handshake(client, endpoint)[1])
            yield served
            process.terminate()
            assert process.wait(timeout=15) == 0
        finally:
            process.kill()


# ---- HTTP: who vanishes ----


def head(method: str, path: str, headers: dict[str, str]) -> bytes:
    lines = {"Host": "127.0.0.1", "Content-Type": "application/json", **headers}
    return "\r\n".join([f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in lines.items()), "", ""]).encode()


def posting(path: str, posted: dict[str, Any]) -> bytes:
    body = json.dumps(posted["json"]).encode()
    return head("POST", path, {"Content-Length": str(len(body)), **posted.get("headers", {})}) + body


def asking(tool: str, era: str, session: dict[str, str], **arguments: Any) -> bytes:
    """A whole request to run `tool`, by a client of either era or the Explorer's page."""
    if era == "explorer":
        return posting(f"/explorer/tools/{tool}/call", {"json": arguments})
    params = {"name": tool, "arguments": arguments}
    old = {"json": message("tools/call", params), "headers": session}
    return posting("/mcp", modern("tools/call", params) if era == MODERN else old)


def sent_until(when: str, era: str, session: dict[str, str]) -> bytes:
    """What a client has sent by the time it vanishes."""
    if when == "listening":
        listen = modern("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        return posting("/mcp", listen) if era == MODERN else head("GET", "/mcp", session)
    if when == "in-body":
        return asking("t.echo", era, session, text="x" * 1000)[:-100]
    return asking("t.wait", era, session) if when == "in-call" else asking("t.big", era, session, size=8 * MIB)


def come_and_vanish(server: Server, when: str, era: str, *, reset: bool) -> None:
    """Five clients at once, each on its own connection and, in the handshake era, in its own session."""
    endpoint = f"http://127.0.0.1:{server.port}/mcp"
    with httpx.Client(timeout=30, verify=False) as opener:
        sessions = [handshake(opener, endpoint)[1] if era == HANDSHAKE else {} for _ in range(5)]
        connections = [server.connect(sent_until(when, era, session)) for session in sessions]
        if when == "in-call":
            until(lambda: server.ask("t.census")["waiting"] == 5)
        for connection in connections:
            if when in ("in-answer", "listening"):
                assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert server.ask("t.echo", a=2) == {"a": 2}, "they hold up somebody else"
        for connection in connections:
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
        for session in sessions:
            if session:  # or it would wait for its client to come back
                assert opener.delete(endpoint, headers=session).is_success


@pytest.mark.parametrize(
    ("when", "era"),
    [
        *(("in-body", era) for era in (MODERN, "explorer")),
        *(("in-call", era) for era in (HANDSHAKE, MODERN)),
        *(("in-answer", era) for era in (HANDSHAKE, MODERN, "explorer")),
        *(("listening", era) for era in (HANDSHAKE, MODERN)),
    ],
)
def test_a_client_that_vanishes_leaves_nothing_behind(server: Server, when: str, era: str) -> None:
    """Nor a word about an application that failed, though a body or an answer is cut off."""
    before = server.log.stat().st_size
    with server.losing_nothing():
        come_and_vanish(server, when, era, reset=when in ("in-call", "in-answer"))
    assert "Exception in ASGI application" not in server.log.read_text()[before:]


# ---- HTTP: who pretends ----

OWN, EVIL = "http://127.0.0.1:{port}", "http://evil.example"
TRICKS: dict[str, dict[str, list[str]]] = {
    "two-hosts": {"Host": ["127.0.0.1", "evil.example"]},
    "forwarded": {"Host": ["evil.example"], "X-Forwarded-Host": ["127.0.0.1"]},
    "user-in-the-host": {"Host": ["evil.example@127.0.0.1:{port}"]},
    "host-as-user": {"Host": ["127.0.0.1:{port}@evil.example"]},
    "host-not-ascii": {"Host": ["127.0.0.1\xff"]},
    "host-as-a-number": {"Host": ["2130706433:{port}"]},
    "two-origins": {"Origin": [EVIL, OWN]},
    "two-origins-ours-first": {"Origin": [OWN, EVIL]},
    "list-of-origins": {"Origin": [f"{OWN} {EVIL}"]},
    "origin-as-user": {"Origin": [OWN + "@evil.example"]},
    "origin-with-a-path": {"Origin": [OWN + "/"]},
    "origin-of-a-file": {"Origin": ["file://"]},
    "space-before-the-colon": {"Origin ": [EVIL]},
    "two-types": {"Content-Type": ["text/plain", "application/json"]},
    "list-of-types": {"Content-Type": ["text/plain, application/json"]},
    "no-type": {"Content-Type": []},
}
POSTS = ["POST /mcp", "POST /explorer/tools/t.echo/call", "POST /%65xplorer/tools/t%2Eecho/call"]
GETS = ["GET /health", "GET /metrics", "GET /explorer/", "GET /explorer/tools", "GET /explorer/tools/t.echo"]


def knock(server: Server, route: str, tricks: dict[str, list[str]]) -> int:
    """The status of a request that is good but for its `tricks`; 0 when the server hangs up."""
    body = json.dumps(modern("tools/call", {"name": "t.echo", "arguments": {}})["json"]).encode()
    body = body if route.startswith("POST") else b""
    headers = {"Host": ["127.0.0.1:{port}"], "Content-Type": ["application/json"], "Content-Length": ["{length}"]}
    headers |= {k: [v] for k, v in modern("tools/call", {"name": "t.echo"})["headers"].items()}
    sent = f"{route} HTTP/1.1\r\n"
    for name, values in (headers | tricks).items():
        for value in values:
            sent += f"{name}: {value.replace('{port}', str(server.port)).replace('{length}', str(len(body)))}\r\n"
    with server.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent.encode("latin-1") + b"\r\n" + body)
        return int([*connection.recv(100).split(b" "), b"0"][1])
    return 0


def test_no_trick_with_headers_opens_a_route(server: Server) -> None:
    """Which a good request does, or the refusals would prove nothing."""
    before = server.ask("t.census")["ran"]
    for headers in ({}, {"Origin": [OWN]}):
        assert {knock(server, route, headers) for route in POSTS + GETS} == {200}
    ran = server.ask("t.census")["ran"]
    assert ran - before == 2 * len(POSTS)
    with server.losing_nothing():
        for name, tricks in TRICKS.items():
            told = {route: knock(server, route, tricks) for route in (POSTS if "type" in name else POSTS + GETS)}
            assert all(status == 0 or 400 <= status < 500 for status in told.values()), (name, told)
    assert server.ask("t.census")["ran"] == ran + 1  # by who has lost nothing


# ---- stdio ----

SILENT = [
    b'{"jsonrpc":"2.0","method":"notifications/nonsense","params":{"a":1}}',
    b'{"jsonrpc":"2.0","method":"tools/list"}',
    b'{"jsonrpc":"2.0","id":9,"result":{}}',
    b'{"jsonrpc":"2.0","id":9,"error":{"code":1,"message":"m"}}',
    b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"none"}}',
    b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"x":1}}',
    b'{"jsonrpc":"2.0","method":"notifications/initialized"}',
]
REFUSED: dict[str, tuple[str, Any]] = {
    "unknown": ("no/such", {}),
    "nameless": ("", {}),
    "no-name": ("tools/call", {}),
    "list-for-arguments": ("tools/call", {"name": "t.echo", "arguments": []}),
    "text-for-arguments": ("tools/call", {"name": "t.echo", "arguments": "{}"}),
    "progress-token-of-no-type": ("tools/call", {"name": 5, "_meta": {"progressToken": {}}}),
}
GOOD_IDS: list[int | str] = ["", -5, 10**30, "x" * 100_000, "null", "é\n\u2028"]


def spoken(mode: str, request_id: Any, method: str, params: dict[str, Any]) -> dict[str, Any]:
    return request(request_id, method, **params) if mode == MODERN else message(method, params, request_id)


def test_whatever_a_client_says_is_answered_by_its_id_or_not_at_all(program: list[str], mode: str) -> None:
    """Unknown methods and notifications, wrong parameters, answers that nobody asked for, strange but legal ids."""
    good = {str(n): spoken(mode, n, "tools/call", {"name": "t.echo", "arguments": {"n": n}}) for n in range(3)}
    sent = [line(spoken(mode, name, method, dict(params))) for name, (method, params) in REFUSED.items()]
    sent += [text + b"\n" for text in SILENT * 50]
    echo = {"name": "t.echo", "arguments": None}
    sent += [line(spoken(mode, request_id, "tools/call", echo)) for request_id in GOOD_IDS]
    sent += [line(good["0"]), line(good["1"]), line(good["1"]), line(good["2"])]  # an id used twice at once
    with RawClient(program) as client:
        if mode == HANDSHAKE:
            client.initialize()
        stdout, stderr = client.process.communicate(b"".join(sent), timeout=30)
    answers = messages(stdout)
    refused = {m["id"]: m["error"]["code"] for m in answers if "error" in m and m["id"] in REFUSED}
    assert refused.keys() == REFUSED.keys()
    assert set(refused.values()) <= {-32600, -32601, -32602, -32002}
    assert (refused["unknown"], refused["no-name"]) == (-32601, -32602)
    served = [m["id"] for m in answers if "result" in m]
    assert {*GOOD_IDS, 0, 2} <= set(served)
    twice = [m for m in answers if m["id"] == 1]
    assert len(twice) == 2
    assert len(answers) == len(REFUSED) + len(GOOD_IDS) + 4, "something was answered that is no request"
    assert (client.process.returncode, b"Traceback" in stderr) == (0, False)


@pytest.mark.timeout(30)
def test_calls_that_are_cancelled_before_they_begin_leave_nothing_behind(program: list[str]) -> None:
    """Each in one write with its cancellation."""
    sent = []
    for n in range(300):
        sent += [message("tools/call", {"name": "t.wait", "arguments": {}}, n)]
        sent += [{"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": n}}]
    sent += [spoken(HANDSHAKE, "last", "tools/call", {"name": "t.echo", "arguments": {}})]
    with RawClient(program) as client:
        client.initialize()
        client.send_line(b"".join(map(line, sent)).strip())
        assert client.receive()["id"] == "last"
        client.process.communicate(timeout=4)  # or it would wait for what has been cancelled
        assert client.process.returncode == 0
