"""Clients that break the rules, vanish, stop reading or pretend: none gets in, none takes another's place, and nothing
is left of them in the server (design "HTTP", "stdio", "Cancellation"; NFR-REL). A real server in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from conftest import (
    HANDSHAKE,
    MODERN,
    PROGRAM,
    ROOT,
    FunctionalModule,
    RawClient,
    free_port,
    registry_of,
    serving,
    until,
)
from support import (
    answer,
    call,
    handshake,
    line,
    message,
    messages,
    modern,
    request,
)

from apcore_mcp import report_progress

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
MIB = 1024 * 1024

SERVER = """
ran = []
began = waiting = 0

@tool
async def echo(inputs, context):
    ran.append(1)
    return inputs

@tool
async def big(inputs, context):
    return {"text": "x" * inputs["size"]}

@tool
async def wait(inputs, context):
    global began, waiting
    began += 1
    waiting += 1
    try:
        await asyncio.Event().wait()
    finally:
        waiting -= 1

@tool
async def census(inputs, context):
    return {"ran": len(ran), "began": began, "waiting": waiting, "tasks": len(asyncio.all_tasks())}

@tool
async def kept(inputs, context):
    if inputs["counting"] != tracemalloc.is_tracing():
        (tracemalloc.start if inputs["counting"] else tracemalloc.stop)()
    return {"bytes": tracemalloc.get_traced_memory()[0]}

options = {}
if sys.argv[1:]:
    options = {"transport": "streamable-http", "port": int(sys.argv[1]), "metrics_collector": True}
serve(registry, log_level="INFO", explorer=True, allow_execute=True, **options)
print(began, "began", file=sys.stderr)
"""


def rss_mib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) // 1024


def grown(pid: int, looks: int, seconds: float) -> int:
    """The highest `rss_mib` of a process, until it has not grown for so many looks, or for so long."""
    highest = rss_mib(pid)
    steady = 0
    limit = time.monotonic() + seconds
    while steady < looks and time.monotonic() < limit:
        time.sleep(0.02)
        now = rss_mib(pid)
        if now > highest:
            highest = now
            steady = 0
        else:
            steady += 1
    return highest


def held(pid: int) -> tuple[int, int]:
    """How many descriptors and threads a process has."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


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
        return (*held(self.pid), self.ask("t.census")["tasks"])

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


def posting(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    return f"POST {path} HTTP/1.1\r\n".encode() + "".join(f"{k}: {v}\r\n" for k, v in lines.items()).encode() + b"\r\n"


def asking(tool: str, era: str, session: dict[str, str], **arguments: Any) -> bytes:
    """A whole request to run `tool`, by a client of either era or the Explorer's page."""
    if era == "explorer":
        body = json.dumps(arguments).encode()
        return posting(f"/explorer/tools/{tool}/call", body, {}) + body
    posted = modern("tools/call", {"name": tool, "arguments": arguments})
    if era == HANDSHAKE:
        posted = {"json": message("tools/call", {"name": tool, "arguments": arguments}), "headers": session}
    body = json.dumps(posted["json"]).encode()
    return posting("/mcp", body, posted["headers"]) + body


def listening(era: str, session: dict[str, str]) -> bytes:
    if era == HANDSHAKE:
        lines = {"Host": "127.0.0.1", **session}
        return b"GET /mcp HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in lines.items()).encode() + b"\r\n"
    posted = modern("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
    body = json.dumps(posted["json"]).encode()
    return posting("/mcp", body, posted["headers"]) + body


def vanish(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def sent_until(when: str, era: str, session: dict[str, str]) -> bytes:
    """What a client has sent by the time it vanishes."""
    if when == "in-call":
        return asking("t.wait", era, session)
    if when == "in-answer":
        return asking("t.big", era, session, size=8 * MIB)
    if when == "listening":
        return listening(era, session)
    whole = asking("t.echo", era, session, text="x" * 1000)
    chunked = whole.replace(b"Content-Length", b"Transfer-Encoding: chunked\r\nX-Length").split(b"\r\n\r\n")[0]
    return {
        "in-headers": whole[:80],
        "in-body": whole[:-100],
        "in-chunks": chunked + b"\r\n\r\n" + b'4\r\n{"a"\r\n' * 100,
    }[when]


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
            vanish(connection, reset=reset)
        for session in sessions:
            if session:  # or it would wait for its client to come back
                assert opener.delete(endpoint, headers=session).is_success


@pytest.mark.parametrize("reset", [False, True], ids=["closing", "resetting"])
@pytest.mark.parametrize(
    ("when", "era"),
    [
        ("in-headers", MODERN),
        *((when, era) for when in ("in-body", "in-chunks") for era in (MODERN, "explorer")),
        *((when, era) for when in ("in-call", "in-answer") for era in (HANDSHAKE, MODERN, "explorer")),
        ("listening", HANDSHAKE),
        ("listening", MODERN),
    ],
)
def test_a_client_that_vanishes_leaves_nothing_behind(server: Server, when: str, era: str, reset: bool) -> None:
    with server.losing_nothing():
        come_and_vanish(server, when, era, reset=reset)


@pytest.mark.parametrize("era", [MODERN, "explorer"])
def test_a_body_that_is_cut_off_is_no_error_of_the_server(server: Server, era: str) -> None:
    """In the handshake era it is the SDK that logs one."""
    before = server.log.stat().st_size
    with server.losing_nothing():
        come_and_vanish(server, "in-body", era, reset=False)
    assert "Exception in ASGI application" not in server.log.read_text()[before:]


@pytest.mark.parametrize("era", [HANDSHAKE, MODERN, "explorer"])
def test_answers_that_nobody_fetched_are_forgotten(server: Server, era: str) -> None:
    """Of the answers of 8 MiB nothing is left; of the process's size nothing is said, as the allocator keeps pages."""
    before = server.ask("t.kept", counting=True)["bytes"]
    try:
        with server.losing_nothing():
            come_and_vanish(server, "in-answer", era, reset=True)
        until(lambda: server.ask("t.kept", counting=True)["bytes"] - before < MIB)
    finally:
        server.ask("t.kept", counting=False)


def test_a_body_that_trickles_in_is_served_and_holds_up_nobody(server: Server, mode: str) -> None:
    with server.losing_nothing(), httpx.Client(timeout=30, verify=False) as opener:
        endpoint = f"http://127.0.0.1:{server.port}/mcp"
        session = handshake(opener, endpoint)[1] if mode == HANDSHAKE else {}
        with server.connect() as connection:
            for byte in asking("t.echo", mode, session, slowly=True):
                connection.sendall(bytes([byte]))
                if byte == ord(","):
                    assert server.ask("t.echo", a=1) == {"a": 1}
            received = b""
            while b"slowly" not in received:
                received += connection.recv(4096)
            assert received.startswith(b"HTTP/1.1 200")
        if session:
            assert opener.delete(endpoint, headers=session).is_success


async def test_fifty_clients_of_both_eras_with_equal_ids_and_tokens_get_their_own_answers() -> None:
    """All fifty run at once; each has asked for progress under the same token as the others."""
    everybody = asyncio.Barrier(50)

    async def meet(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await everybody.wait()
        await report_progress(context, inputs["me"])
        await everybody.wait()
        return {"you": inputs["me"]}

    with serving(registry_of({"demo.meet": FunctionalModule(meet)})) as url:

        async def visit(number: int) -> None:
            params: dict[str, Any] = {"name": "demo.meet", "arguments": {"me": number}}
            async with httpx.AsyncClient(timeout=30, verify=False) as client:
                if number % 2:
                    posted = modern("tools/call", params)
                    posted["json"]["params"]["_meta"]["progressToken"] = 1
                else:
                    session = await asyncio.to_thread(lambda: handshake(httpx.Client(verify=False), f"{url}/mcp")[1])
                    posted = {"json": message("tools/call", {**params, "_meta": {"progressToken": 1}})}
                    posted["headers"] = session
                response = await client.post(f"{url}/mcp", **posted)
            told = [json.loads(text[6:]) for text in response.text.splitlines() if text.startswith("data: {")]
            assert [event["params"]["progress"] for event in told[:-1]] == [number]
            assert (told[-1]["id"], told[-1]["result"]["structuredContent"]) == (1, {"you": number})

        await asyncio.gather(*map(visit, range(50)))


# ---- HTTP: who pretends ----

OWN, EVIL = "http://127.0.0.1:{port}", "http://evil.example"
TRICKS = [
    pytest.param({"Host": ["127.0.0.1", "evil.example"]}, id="two-hosts"),
    pytest.param({"Host": ["evil.example"], "X-Forwarded-Host": ["127.0.0.1"]}, id="forwarded"),
    pytest.param({"Host": ["evil.example@127.0.0.1:{port}"]}, id="user-in-the-host"),
    pytest.param({"Host": ["127.0.0.1:{port}@evil.example"]}, id="host-as-user"),
    pytest.param({"Host": ["127.0.0.1\xff"]}, id="host-not-ascii"),
    pytest.param({"Host": ["2130706433:{port}"]}, id="host-as-a-number"),
    pytest.param({"Origin": [EVIL, OWN]}, id="two-origins"),
    pytest.param({"Origin": [OWN, EVIL]}, id="two-origins-ours-first"),
    pytest.param({"Origin": [f"{OWN} {EVIL}"]}, id="list-of-origins"),
    pytest.param({"Origin": [OWN + "@evil.example"]}, id="origin-as-user"),
    pytest.param({"Origin": [OWN + "/"]}, id="origin-with-a-path"),
    pytest.param({"Origin": ["file://"]}, id="origin-of-a-file"),
    pytest.param({"Origin ": [EVIL]}, id="space-before-the-colon"),
    pytest.param({"Content-Length": ["{length}", "5"]}, id="two-lengths"),
    pytest.param({"Content-Length": ["-1"]}, id="negative-length"),
    pytest.param({"Content-Length": ["+{length}"]}, id="signed-length"),
    pytest.param({"Content-Length": ["9" * 30]}, id="length-without-end"),
    pytest.param({"Transfer-Encoding": ["xchunked"]}, id="unknown-encoding"),
    pytest.param({"Transfer-Encoding": ["chunked", "identity"]}, id="two-encodings"),
    pytest.param({"X": ["a\0b"]}, id="nul"),
    pytest.param({"X": ["a" * 200_000]}, id="header-without-end"),
]
JSON_TRICKS = [
    pytest.param({"Content-Type": ["text/plain", "application/json"]}, id="two-types"),
    pytest.param({"Content-Type": ["text/plain, application/json"]}, id="list-of-types"),
    pytest.param({"Content-Type": ["text/plain; application/json"]}, id="type-as-a-parameter"),
    pytest.param({"Content-Type": []}, id="no-type"),
]
POSTS = ["POST /mcp", "POST /explorer/tools/t.echo/call", "POST /%65xplorer/tools/t%2Eecho/call"]
GETS = ["GET /health", "GET /metrics", "GET /explorer/", "GET /explorer/tools", "GET /explorer/tools/t.echo"]


def knock(server: Server, route: str, tricks: dict[str, list[str]]) -> int:
    """The status of a request that is good but for its `tricks`; 0 when the server hangs up."""
    body = json.dumps(modern("tools/call", {"name": "t.echo", "arguments": {}})["json"]).encode()
    body = body if route.startswith("POST") else b""
    headers = {"Host": ["127.0.0.1:{port}"], "Content-Type": ["application/json"], "Content-Length": ["{length}"]}
    headers |= {k: [v] for k, v in modern("tools/call", {"name": "t.echo"})["headers"].items()}
    if "Transfer-Encoding" in tricks:
        del headers["Content-Length"]
    sent = f"{route} HTTP/1.1\r\n"
    for name, values in (headers | tricks).items():
        for value in values:
            sent += f"{name}: {value.replace('{port}', str(server.port)).replace('{length}', str(len(body)))}\r\n"
    with server.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(sent.encode("latin-1") + b"\r\n" + body)
        return int([*connection.recv(100).split(b" "), b"0"][1])
    return 0


@pytest.mark.parametrize("route", [*POSTS, *GETS])
def test_a_good_request_to_each_route_is_served(server: Server, route: str) -> None:
    """Without this, the refusals below would prove nothing."""
    before = server.ask("t.census")["ran"]
    assert knock(server, route, {}) == 200
    assert knock(server, route, {"Origin": [OWN]}) == 200
    assert server.ask("t.census")["ran"] - before == 2 * (route in POSTS)


@pytest.mark.parametrize("tricks", [*TRICKS, *JSON_TRICKS])
def test_no_trick_with_headers_opens_a_route(server: Server, tricks: dict[str, list[str]]) -> None:
    lengths = tricks.keys() & {"Content-Length", "Transfer-Encoding"}
    routes = POSTS if "Content-Type" in tricks or lengths else POSTS + GETS
    with server.losing_nothing():
        before = server.ask("t.census")["ran"]
        told = {route: knock(server, route, tricks) for route in routes}
        assert {route: status for route, status in told.items() if not (status == 0 or 400 <= status < 500)} == {}
        assert server.ask("t.census")["ran"] == before


# ---- stdio ----

ODD_IDS = [b"1.5", b"2.0", b"null", b"true", b"[1]", b"{}"]
SILENT = [
    b'{"jsonrpc":"2.0","method":"notifications/nonsense","params":{"a":1}}',
    b'{"jsonrpc":"2.0","method":"tools/list"}',
    b'{"jsonrpc":"2.0","id":9,"result":{}}',
    b'{"jsonrpc":"2.0","id":9,"error":{"code":1,"message":"m"}}',
    b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"none"}}',
    b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":[1]}}',
    b'{"jsonrpc":"2.0","method":"notifications/cancelled"}',
    b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,"progress":2}}',
    b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"x":1}}',
    b'{"jsonrpc":"2.0","method":"notifications/initialized"}',
]
REFUSED: dict[str, tuple[str, Any]] = {
    "unknown": ("no/such", {}),
    "nameless": ("", {}),
    "nul": ("tools/list\0", {}),
    "number-for-a-name": ("tools/call", {"name": 5}),
    "no-name": ("tools/call", {}),
    "list-for-arguments": ("tools/call", {"name": "t.echo", "arguments": []}),
    "text-for-arguments": ("tools/call", {"name": "t.echo", "arguments": "{}"}),
    "number-for-a-cursor": ("tools/list", {"cursor": 5}),
    "unknown-resource": ("resources/read", {"uri": "docs://../../etc/passwd"}),
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


def test_a_request_with_an_id_that_is_none_is_answered_with_an_error(program: list[str]) -> None:
    """JSON-RPC 2.0, 5.1: an error whose id is null."""
    sent = [line(call("ID", "t.echo")).replace(b'"ID"', odd) for odd in ODD_IDS] + [line(call("last", "t.echo"))]
    completed = subprocess.run(program, input=b"".join(sent), capture_output=True, cwd=ROOT, timeout=50)
    answers = messages(completed.stdout)
    assert [(m["id"], m["error"]["code"]) for m in answers if "error" in m] == [(None, -32600)] * len(ODD_IDS)
    assert [m["id"] for m in answers if "result" in m] == ["last"]


def test_half_a_line_waits_for_its_other_half_and_breaks_nothing(program: list[str]) -> None:
    """Each byte by itself, with the end of one line and the beginning of the next in one write."""
    with RawClient(program) as client:
        assert client.process.stdin is not None
        first, second = line(call("first é", "t.echo", n=1)), line(call("second", "t.echo", n=2))
        for byte in first[:-1]:
            os.write(client.process.stdin.fileno(), bytes([byte]))
        os.write(client.process.stdin.fileno(), b"\n" + second[:20])
        assert client.receive()["id"] == "first é"
        os.write(client.process.stdin.fileno(), second[20:])
        assert client.receive()["id"] == "second"
        status, stderr = client.end()
        assert (status, b"Traceback" in stderr) == (0, False)


def test_a_client_that_stops_reading_is_made_to_wait_and_then_gets_everything(program: list[str]) -> None:
    """100 answers of 1 MiB are asked for at once; the server keeps 16 MiB of them, and what is being made."""
    with RawClient(program) as client:
        client.send_line(line(call("warm-up", "t.big", size=MIB)).strip())
        client.receive()
        before = rss_mib(client.process.pid)
        sent = b"".join(line(call(n, "t.big", size=MIB)) for n in range(100))
        writer = threading.Thread(target=client.send_line, args=(sent.strip(),), daemon=True)
        writer.start()
        highest = grown(client.process.pid, looks=25, seconds=10)
        answered = {client.receive()["id"] for _ in range(100)}
        writer.join(timeout=10)
        assert answered == set(range(100))
        status, stderr = client.end()
        assert (status, b"Traceback" in stderr) == (0, False)
        assert highest - before < 150


def test_requests_of_a_client_that_reads_no_answers_are_not_read_either(program: list[str]) -> None:
    """100,000 of them, each of which would wait in memory for its turn."""
    sent = b"".join(line(request(n, "tools/list")) for n in range(100_000))
    with RawClient(program) as client:
        client.send_line(line(request("first", "tools/list")).strip())
        client.receive()
        before = rss_mib(client.process.pid)

        def flood() -> None:
            with contextlib.suppress(OSError):  # the server is gone when the test is over
                client.send_line(sent.strip())

        threading.Thread(target=flood, daemon=True).start()
        highest = grown(client.process.pid, looks=50, seconds=8)
    assert highest - before < 80


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
        began = time.monotonic()
        assert client.end()[0] == 0
        assert time.monotonic() - began < 4, "it waited for what had been cancelled"


@pytest.mark.timeout(60)
def test_hundreds_of_calls_that_never_end_keep_nobody_from_cancelling_or_leaving(program: list[str]) -> None:
    """More than may run at once: those that wait for a place at the end are refused when the places become free."""
    with RawClient(program) as client:
        calls = [call(n, "t.wait") for n in range(400)]
        client.process.stdin.write(b"".join(map(line, calls)))  # type: ignore[union-attr]
        client.send_line(line(request("listed", "tools/list")).strip())
        assert client.receive()["id"] == "listed"
        for n in range(400):
            client.send("notifications/cancelled", {"requestId": n}, notify=True)
        client.send_line(line(call("census", "t.census")).strip())
        while (answered := client.receive())["id"] != "census":
            assert "error" in answered
        told = answered["result"]["structuredContent"]
        assert told["waiting"] == 0
        client.process.stdin.write(b"".join(map(line, calls)))  # type: ignore[union-attr]
        stdout, stderr = client.process.communicate(timeout=50)
        assert client.process.returncode == 0
        refused = ["error" in answer for answer in messages(stdout)]
        assert (len(refused), sum(refused)) == (400, 150)
        assert f"{told['began'] + 250} began" in stderr.decode(), "more ran at once, or others began after the end"
