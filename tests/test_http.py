"""The HTTP transports: who is let in, what is refused before anything runs, how calls and servers end.

Demanded by FR-SERVER-002 and -003, FR-TRANSPORT-003 and -004, NFR-PERF-004, NFR-REL-001, design §3 "HTTP",
"Cancellation", "Shutdown" and "Explorer" (Host and Origin on every route), and §4. Real servers on free ports.


What an operator sees: `/health` (FR-HEALTH-001, -002) and `/metrics` (F-021, F-022).

What lives as long as a server does: the announcements of changes, the streams that clients listen on, sessions, and
how all of these end (FR-DYNAMIC, NFR-REL-001; design "Dynamic", "Shutdown").
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import itertools
import logging
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from apcore import ACL, ACLRule, Executor, ModuleAnnotations, Registry
from apcore.observability import MetricsCollector, MetricsMiddleware
from apcore.sys_modules.control import ToggleState
from conftest import (
    ANYTHING,
    HANDSHAKE,
    MODERN,
    Clock,
    FunctionalModule,
    connect,
    echo,
    free_port,
    hosting,
    program,
    registry_of,
    serving,
    with_clock,
)
from mcp.client import Client
from mcp.client.sse import sse_client
from mcp.shared.exceptions import MCPError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from support import (
    ACCEPT,
    answer,
    clog,
    handshake,
    initialize_params,
    message,
    modern,
)

from apcore_mcp import MCPServer, __version__, async_serve, serve

MIB = 1024 * 1024
DEPRECATED = "SSE transport is deprecated; use streamable-http instead"


class Gate:
    """A module that tells when it was entered and how it was left, and stays until the test opens it."""

    description = "Waits"
    input_schema = output_schema = ANYTHING

    def __init__(self) -> None:
        self.entered, self.cancelled, self.finished = threading.Event(), threading.Event(), threading.Event()
        self.opened: Future[None] = Future()
        self.token: Any = None

    async def execute(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        self.token = context.cancel_token
        self.entered.set()
        try:
            await asyncio.shield(asyncio.wrap_future(self.opened))
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        self.finished.set()
        return {"opened": True}


async def happens(event: threading.Event) -> bool:
    return await asyncio.to_thread(event.wait, 20)


@contextlib.asynccontextmanager
async def asgi_client(source: Registry, *, root_path: str = "", **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app that `async_serve()` yields, without a socket between them."""
    async with async_serve(source, **options) as app:
        transport = httpx.ASGITransport(app, root_path=root_path)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            yield client


def call(name: str, arguments: dict[str, Any], mode: str = MODERN) -> dict[str, Any]:
    """What httpx posts to call a tool; in the handshake era, the session's headers are to be added."""
    params = {"name": name, "arguments": arguments}
    return modern("tools/call", params) if mode == MODERN else {"json": message("tools/call", params)}


@contextlib.contextmanager
def sse_session(client: httpx.Client, url: str) -> Iterator[tuple[str, Iterator[str]]]:
    """An initialized session of the deprecated transport: where to post, and the messages that come back."""
    with client.stream("GET", f"{url}/sse") as stream:
        data = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
        endpoint = url + next(data)
        assert client.post(endpoint, json=message("initialize", initialize_params("2025-11-25"))).status_code == 202
        next(data)
        client.post(endpoint, json={"jsonrpc": "2.0", "method": "notifications/initialized"})
        yield endpoint, data


# ---- Addresses and routes ----


@pytest.mark.requirement("FR-SERVER-002")
@pytest.mark.parametrize("path", ["/mcp", "/mcp/"])
def test_the_endpoint_answers_itself_without_a_redirect(path: str) -> None:
    with serving(registry_of({"demo.echo": echo})) as url, httpx.Client() as client:
        _, session = handshake(client, url + path)
        called = client.post(url + path, **call("demo.echo", {"a": 1}, HANDSHAKE), headers=session)
        assert answer(called)["result"]["structuredContent"] == {"a": 1}
        assert answer(client.post(url + path, **call("demo.echo", {"a": 2})))["result"]["structuredContent"] == {"a": 2}


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
def test_anything_but_the_transports_own_routes_is_not_found(transport: str) -> None:
    foreign = ["/sse", "/messages/"] if transport == "streamable-http" else ["/mcp", "/mcp/"]
    with serving(registry_of(), transport=transport) as url, httpx.Client() as client:
        for path in ["/", "/nowhere", "/mcp/more", *foreign]:
            assert client.get(url + path).status_code == 404, path
            assert client.post(url + path, json=message("ping")).status_code == 404, path
        if transport == "streamable-http":
            for method in ("GET", "DELETE", "PUT"):
                for headers in (ACCEPT, ACCEPT | {"MCP-Protocol-Version": MODERN}):
                    assert client.request(method, f"{url}/mcp", headers=headers).status_code in (400, 405), method


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
async def test_an_sse_stream_opens_for_get_alone(method: str) -> None:
    """A client that tries POST first, as the specification has it, falls back when it is refused."""
    async with asgi_client(registry_of(), transport="sse") as client:
        response = await client.request(method, "/sse", json={})
        assert (response.status_code, "GET" in response.headers["allow"]) == (405, True)


def test_who_wants_to_resume_a_stream_is_given_a_new_one() -> None:
    """MCP "Listening for Messages": a stream, or 405 where there is none; nothing is kept to send once more."""
    with serving(registry_of()) as url, httpx.Client(timeout=30) as client:
        _, session = handshake(client, f"{url}/mcp")
        with client.stream("GET", f"{url}/mcp", headers=session | {"Last-Event-ID": "7"}) as stream:
            assert (stream.status_code, stream.headers["content-type"]) == (200, "text/event-stream")
        resumed = {"Last-Event-ID": "7"}
        assert client.get(f"{url}/mcp", headers=ACCEPT | {"MCP-Protocol-Version": MODERN} | resumed).status_code == 405
        assert client.post(f"{url}/mcp", json=message("ping"), headers=session | resumed).status_code == 200


async def test_what_is_no_http_request_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A WebSocket, which has a path and headers but no method."""
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    for transport, path in (("streamable-http", "/mcp"), ("sse", "/messages/"), ("sse", "/explorer/")):
        async with async_serve(registry_of(), transport=transport, explorer=True) as app:
            headers = [(b"host", b"127.0.0.1")]
            await app({"type": "websocket", "path": path, "headers": headers, "subprotocols": []}, receive, send)
    assert sent == ["websocket.close"] * 3


def test_a_query_cannot_write_lines_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with serving(registry_of(), transport="sse") as url:
        for character in ("%0A", "%0D", "%1B", "%C2%85", "%E2%80%A8"):
            address = f"{url}/messages/?session_id=0{character}forged"
            assert httpx.post(address, json=message("ping")).status_code == 400
        assert httpx.post(f"{url}/messages/?session_id=0 or 1", json=message("ping")).status_code == 400
    assert [text for text in caplog.messages if not text.isprintable()] == []


@pytest.mark.requirement("FR-TRANSPORT-003")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers on all of 127.0.0.0/8")
@pytest.mark.parametrize(("host", "reachable"), [("127.0.0.1", False), ("0.0.0.0", True)])
def test_the_host_decides_on_which_interfaces_it_listens(host: str, reachable: bool) -> None:
    with serving(registry_of(), host=host) as url:
        port = urlsplit(url).port
        with contextlib.nullcontext() if reachable else pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", port), timeout=10).close()


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_answers_are_sent_at_once() -> None:
    """And not held back until the client acknowledges what came before, which takes it 40 ms."""
    with serving(registry_of({"a.b": echo})) as url, httpx.Client(base_url=url) as client:
        address = client.get("/health").extensions["network_stream"].get_extra_info("client_addr")
        accepted = [each for each in gc.get_objects() if isinstance(each, socket.socket) and _peer(each) == address]
        assert [bool(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) for each in accepted] == [True]


def _peer(connection: socket.socket) -> Any:
    try:
        return connection.getpeername()
    except OSError:  # one that listens, or is closed, has none
        return None


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6 here")
async def test_it_listens_on_ipv6(mode: str) -> None:
    with serving(registry_of({"demo.echo": echo}), host="::1") as url:
        async with Client(f"http://[::1]:{urlsplit(url).port}/mcp", mode=mode, cache=None) as client:
            assert (await client.call_tool("demo.echo", {"a": 1})).structured_content == {"a": 1}


@pytest.mark.requirement("FR-SERVER-003", "FR-TRANSPORT-004")
async def test_sse_works_with_the_official_client_and_says_that_it_is_deprecated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(registry_of()):
        assert DEPRECATED not in caplog.messages
    with serving(registry_of({"demo.echo": echo}), transport="sse") as url:
        transport = sse_client(f"{url}/sse")
        async with Client(transport, mode=HANDSHAKE, cache=None, read_timeout_seconds=30) as client:
            assert client.server_capabilities.tools is not None
            assert client.server_capabilities.tools.list_changed is True
            assert [tool.name for tool in (await client.list_tools()).tools] == ["demo.echo"]
            assert (await client.call_tool("demo.echo", {"a": 1})).structured_content == {"a": 1}
    warned = [record for record in caplog.records if record.getMessage() == DEPRECATED]
    assert [record.levelno for record in warned] == [logging.WARNING]


# ---- Many clients ----


async def test_twenty_raw_clients_with_equal_request_ids_get_their_own_answers(mode: str) -> None:
    """Sync modules; each returns once all twenty are running."""
    everybody = threading.Barrier(20, timeout=30)

    def meet(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        everybody.wait()
        return {"you": inputs["me"]}

    with serving(registry_of({"demo.meet": meet})) as url:
        with httpx.Client(timeout=30) as opener:
            sessions = [handshake(opener, f"{url}/mcp")[1] if mode == HANDSHAKE else {} for _ in range(20)]
        assert mode == MODERN or len({session["Mcp-Session-Id"] for session in sessions}) == 20

        async def visit(number: int) -> tuple[int, Any]:
            request = call("demo.meet", {"me": number}, mode)
            request["headers"] = request.get("headers", {}) | sessions[number]
            async with httpx.AsyncClient(timeout=30) as client:
                reply = answer(await client.post(f"{url}/mcp", **request))
            return reply["id"], reply["result"]["structuredContent"]

        assert await asyncio.gather(*map(visit, range(20))) == [(1, {"you": number}) for number in range(20)]


@pytest.mark.requirement("NFR-PERF-004")
async def test_twenty_official_clients_are_served_at_once(mode: str) -> None:
    """Async modules; each returns once all twenty are running."""
    everybody = asyncio.Barrier(20)

    async def meet(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await everybody.wait()
        return {"you": inputs["me"]}

    with serving(registry_of({"demo.meet": FunctionalModule(meet)})) as url:

        async def visit(number: int) -> Any:
            async with Client(f"{url}/mcp", mode=mode, cache=None, read_timeout_seconds=30) as client:
                return (await client.call_tool("demo.meet", {"me": number})).structured_content

        assert await asyncio.gather(*map(visit, range(20))) == [{"you": number} for number in range(20)]


# ---- Who is let in ----


class Door(NamedTuple):
    """A way into a server: `knock` asks it, with headers of one's own, to run the module, and returns the response."""

    port: int
    posts: bool
    ran: list[object]
    knock: Callable[[dict[str, str]], httpx.Response]
    finish: Callable[[], None]
    """Have an ordinary call run to its end, so that any other would have been seen."""


@pytest.fixture(scope="module", params=["mcp-2026-07-28", "mcp-handshake", "sse", "messages"])
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    """Every way in: the endpoint in both eras, and the two of the SSE transport."""
    ran: list[object] = []

    async def note(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        ran.append(inputs["by"])  # on the event loop, so in the order of the calls
        return {}

    era = MODERN if request.param == "mcp-2026-07-28" else HANDSHAKE
    transport = "streamable-http" if request.param.startswith("mcp") else "sse"
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(registry_of({"demo.note": note}), transport=transport))
        client = stack.enter_context(httpx.Client(timeout=30))
        endpoint, replies, session = f"{url}/mcp", iter(()), ACCEPT
        if transport == "sse":
            endpoint, replies = stack.enter_context(sse_session(client, url))
        elif era == HANDSHAKE:
            _, session = handshake(client, endpoint)

        def post(by: str, headers: dict[str, str]) -> httpx.Response:
            request = call("demo.note", {"by": by}, era)
            return client.post(endpoint, **request | {"headers": session | request.get("headers", {}) | headers})

        def look(headers: dict[str, str]) -> httpx.Response:
            with client.stream("GET", f"{url}/sse", headers=headers) as stream:
                return stream

        def finish() -> None:
            assert post("finish", {}).is_success
            while "finish" not in ran:
                next(replies)

        knock = look if request.param == "sse" else lambda headers: post("knock", headers)
        yield Door(urlsplit(url).port or 0, knock is not look, ran, knock, finish)


FORM = "application/x-www-form-urlencoded"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 200, id="own-host"),
        pytest.param({"Host": "localhost:{port}"}, 200, id="localhost"),
        pytest.param(
            {"Host": "LOCALHOST:{port}", "Origin": "http://LocalHost:{port}"}, 200, id="localhost-in-capitals"
        ),
        pytest.param({"Host": "[::1]:{port}"}, 200, id="ipv6-loopback"),
        pytest.param({"Host": "127.0.0.1:1"}, 200, id="forwarded-port"),
        pytest.param({"Host": "evil.example"}, 421, id="foreign-host"),
        pytest.param({"Host": "evil.example:{port}"}, 421, id="foreign-host-own-port"),
        pytest.param({"Host": "localhost.evil.example:{port}"}, 421, id="host-that-begins-like-ours"),
        pytest.param({"Host": "127.0.0.1.evil.example"}, 421, id="host-that-begins-like-our-address"),
        pytest.param({"Host": ""}, 421, id="empty-host"),
        pytest.param({"Origin": "http://127.0.0.1:{port}"}, 200, id="own-origin"),
        pytest.param({"Host": "localhost:{port}", "Origin": "http://localhost:{port}"}, 200, id="own-origin-by-name"),
        pytest.param({"Host": "localhost:{port}", "Origin": "http://localhost:1"}, 403, id="other-port"),
        pytest.param({"Origin": "http://127.0.0.1:1"}, 403, id="other-port-of-the-address"),
        pytest.param({"Origin": "http://127.0.0.1"}, 403, id="default-port"),
        pytest.param({"Origin": "http://evil.example"}, 403, id="foreign-origin"),
        pytest.param({"Origin": "http://127.0.0.1:{port}.evil.example"}, 403, id="origin-that-begins-like-ours"),
        pytest.param({"Origin": "null"}, 403, id="opaque-origin"),
        pytest.param({"Host": "evil.example:{port}", "Origin": "http://evil.example:{port}"}, 421, id="rebound-name"),
        pytest.param({"Content-Type": "text/plain"}, 400, id="text-plain"),
        pytest.param({"Content-Type": FORM}, 400, id="form"),
        pytest.param({"Content-Type": "application/jsonx"}, 400, id="begins-like-json"),
        pytest.param({"Content-Type": "text/plain; application/json"}, 400, id="json-as-a-parameter"),
        pytest.param({"Content-Type": "multipart/form-data; boundary=x"}, 400, id="multipart"),
        pytest.param({"Content-Type": "application/json; charset=utf-8"}, 200, id="json-with-charset"),
    ],
)
def test_only_this_machine_and_the_servers_own_pages_are_let_in(
    door: Door, headers: dict[str, str], status: int
) -> None:
    if "Content-Type" in headers and not door.posts:
        pytest.skip("a GET has no content")
    door.ran.clear()
    response = door.knock({name: value.format(port=door.port) for name, value in headers.items()})
    if status == 200:
        assert response.is_success
    else:
        assert response.status_code in ((400, 415) if status == 400 else (status,))
    assert "access-control-allow-origin" not in response.headers
    door.finish()
    assert sorted(map(str, door.ran)) == ["finish", *["knock"] * (status == 200 and door.posts)]


@pytest.mark.parametrize(("transport", "path"), [("streamable-http", "/mcp"), ("sse", "/sse"), ("sse", "/messages/")])
def test_a_request_without_a_host_is_refused(transport: str, path: str) -> None:
    ran: list[object] = []
    note = FunctionalModule(lambda inputs, context: ran.append(inputs) or {})
    with serving(registry_of({"demo.note": note}), transport=transport) as url:
        connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port or 0, timeout=20)
        with contextlib.closing(connection):
            request = httpx.Request("GET" if path == "/sse" else "POST", url + path, **call("demo.note", {}))
            connection.putrequest(request.method, path, skip_host=True)
            for name, value in request.headers.items():
                if name != "host":
                    connection.putheader(name, value)
            connection.endheaders(request.content)
            assert connection.getresponse().status in (400, 421)
    assert ran == []


GIVEN = ["tools.example", "wild.example:*", "port.example:8443"]


LOOPBACK_ONLY = {
    ("localhost:1", None): 200,
    ("LOCALHOST", None): 200,
    ("127.0.0.1", "http://127.0.0.1"): 200,
    ("[::1]:1", None): 200,
    ("192.0.2.1:1", None): 200,  # no name that is rebound, but what another machine or a container asks for
    ("evil.example", None): 421,
    ("127.0.0.1:@evil.example", None): 421,
    ("evil@127.0.0.1", None): 421,
    ("127.0.0.1.evil.example", None): 421,
    ("", None): 421,
}
ANY_NAME = {
    ("any.example", None): 200,
    ("any.example:8000", None): 200,
    ("any.example:8000", "http://any.example:8000"): 421,  # a page whose name may have been rebound to us
    ("192.0.2.1:8000", "http://192.0.2.1:8000"): 200,
    ("localhost:8000", "http://localhost:8000"): 200,
}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        pytest.param(
            {"allowed_hosts": GIVEN},
            {
                ("tools.example", None): 200,
                ("Tools.Example", "https://TOOLS.example"): 200,  # TLS may end before us
                ("tools.example", "http://evil.example"): 403,
                ("wild.example:1234", None): 200,
                ("wild.example.evil.example:1234", None): 421,
                ("port.example:8443", None): 200,
                ("port.example:8444", None): 421,
                ("evil.example", None): 421,
                ("127.0.0.1:8000", None): 200,  # a probe, or the developer's own machine
                ("192.0.2.1:8000", None): 200,
                ("localhost", "http://localhost"): 200,
                ("localhost", "http://evil.example"): 403,
            },
            id="given-names",
        ),
        pytest.param(
            {"host": "0.0.0.0", "allowed_hosts": ["Tools.example"]},
            {("tools.example", None): 200, ("evil.example", None): 421},
            id="given-names-on-all-interfaces",
        ),
        pytest.param(
            {"allowed_hosts": ["*", "*.tools.example"]},
            {
                **ANY_NAME,
                ("my.tools.example", "https://my.tools.example"): 200,
                ("my.tools.example", "https://other.tools.example"): 403,
            },
            id="any-name-given",
        ),
        pytest.param({"allowed_hosts": ["*:8000"]}, ANY_NAME | {("any.example", None): 421}, id="any-name-at-a-port"),
        pytest.param(
            {"allowed_hosts": ["*:*", "*.*"]}, ANY_NAME | {("any.example:1", None): 200}, id="any-name-at-any-port"
        ),
        pytest.param(
            {"host": "MyBox"},
            {
                ("mybox:8000", "http://mybox:8000"): 200,
                ("mybox:1", None): 200,
                ("any.example", None): 200,
                ("any.example", "http://any.example"): 421,
                ("mybox:8000", "http://mybox:1"): 403,
            },
            id="its-own-name",
        ),
        pytest.param(
            {"host": "MyBox", "allowed_hosts": ["tools.example"]},
            {("mybox:8000", "http://mybox:8000"): 200, ("any.example", None): 421},
            id="its-own-name-beside-another",
        ),
        pytest.param(
            {"host": "0.0.0.0"},
            {
                ("any.example", None): 200,
                ("any.example:1", "http://any.example:1"): 421,  # a page whose name may have been rebound to us
                ("192.0.2.1:1", "http://192.0.2.1:1"): 200,
                ("[2001:db8::1]:1", "http://[2001:db8::1]:1"): 200,
                ("[fe80::1%25eth0]:1", None): 200,
                ("192.0.2.1:1", "http://192.0.2.1:2"): 403,
                ("192.0.2.1", "http://evil.example"): 403,
                ("192.0.2.1", "null"): 403,
            },
            id="any-name-on-all-interfaces",
        ),
        pytest.param({"host": "Localhost"}, LOOPBACK_ONLY, id="localhost"),
        pytest.param({"host": "127.0.0.2"}, LOOPBACK_ONLY | {("127.0.0.2", None): 200}, id="loopback"),
        pytest.param({"host": "::1"}, LOOPBACK_ONLY, id="ipv6-loopback"),
        pytest.param(
            {"host": "0:0:0:0:0:0:0:1"},
            LOOPBACK_ONLY | {("[0:0:0:0:0:0:0:1]:1", None): 200},
            id="ipv6-loopback-in-full",
        ),
    ],
)
async def test_host_and_allowed_hosts_decide_which_names_are_accepted(
    options: dict[str, Any], told: dict[tuple[str, str | None], int]
) -> None:
    async with asgi_client(registry_of(), **options) as client:
        headers = {key: {"Host": key[0], **({"Origin": key[1]} if key[1] else {})} for key in told}
        observed = {key: (await client.get("/health", headers=sent)).status_code for key, sent in headers.items()}
    assert observed == told


@pytest.mark.parametrize(
    ("root_path", "path"),
    [
        ("", "/explorer/tools"),
        ("/ex", "/explorer/tools"),
        ("/ex", "/ex/explorer/tools"),
        ("/explorer", "/explorer/explorer/tools"),
    ],
)
async def test_no_mount_point_hides_the_explorer_from_the_check_of_its_host(root_path: str, path: str) -> None:
    """Where any name will do, the Explorer must be asked for by address: a page's own GET carries no Origin."""
    async with asgi_client(registry_of(), root_path=root_path, host="0.0.0.0", explorer=True) as client:
        for host, status in {"evil.example": 421, "192.0.2.1": 200}.items():
            assert (await client.get(path, headers={"Host": host})).status_code == status


async def test_the_explorer_answers_at_the_address_that_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    for options in ({"host": "mybox"}, {"host": "mybox", "allowed_hosts": ["tools.example"]}, {"host": "127.0.0.1"}):
        options |= {"explorer": True, "allow_execute": True}
        async with asgi_client(registry_of({"a.b": echo}), **options) as client:
            told = {"Host": f"{options['host']}:8000", "Origin": f"http://{options['host']}:8000"}
            assert (await client.get("/explorer/", headers={"Host": told["Host"]})).status_code == 200
            assert (await client.post("/explorer/tools/a.b/call", json={}, headers=told)).status_code == 200


@pytest.mark.parametrize("pattern", ["*", "*:8000", "*:*", "*.*:8000"])
async def test_no_wildcard_lets_a_page_of_a_rebound_name_list_or_run_tools(pattern: str) -> None:
    ran: list[object] = []
    note = FunctionalModule(lambda inputs, context: ran.append(inputs) or {})
    options: dict[str, Any] = {"allowed_hosts": [pattern], "explorer": True, "allow_execute": True}
    host, origin = {"Host": "evil.example:8000"}, {"Origin": "http://evil.example:8000"}
    async with asgi_client(registry_of({"a.b": note}), **options) as client:
        assert (await client.get("/explorer/tools", headers=host)).status_code == 421
        assert (await client.post("/explorer/tools/a.b/call", json={}, headers=host | origin)).status_code == 421
        page = call("a.b", {})
        assert (await client.post("/mcp", **page | {"headers": page["headers"] | host | origin})).status_code == 421
        assert ran == []
        assert (await client.post("/mcp", **page | {"headers": page["headers"] | host})).status_code == 200  # a program
        assert ran == [{}]


async def test_who_is_refused_is_told_which_option_lets_him_in(caplog: pytest.LogCaptureFixture) -> None:
    async with asgi_client(registry_of(), allowed_hosts=["tools.example"]) as client:
        refused = await client.get("/health", headers={"Host": "other.example"})
    for told in (refused.text, caplog.messages[-1]):
        assert "allowed_hosts" in told
        assert "--allowed-hosts" in told
    assert "other.example" in caplog.messages[-1]


async def test_only_what_is_under_its_prefix_is_the_explorers() -> None:
    async with asgi_client(registry_of(), host="0.0.0.0", explorer=True, explorer_prefix="/h") as client:
        told = {
            path: (await client.get(path, headers={"Host": "any.example"})).status_code for path in ("/health", "/h/")
        }
    assert told == {"/health": 200, "/h/": 421}


# ---- Middleware of the user's ----


class Doorman:
    """Starlette middleware that lets in who knows the secret, and notes every path that was asked for."""

    def __init__(self, app: Any, secret: str, asked: list[str]) -> None:
        self.app, self.secret, self.asked = app, secret, asked

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope["path"])
        known = (b"x-secret", self.secret.encode()) in scope["headers"]
        await (self.app if known else PlainTextResponse("Who are you?", 401))(scope, receive, send)


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_middleware_stands_at_every_door_and_behind_the_guard(transport: str) -> None:
    asked: list[str] = []
    middleware = [Middleware(Doorman, secret="xyzzy", asked=asked)]
    options: dict[str, Any] = {"explorer": True, "metrics_collector": MetricsCollector(), "middleware": middleware}
    doors = [("GET", path) for path in ("/health", "/metrics", "/explorer/", "/explorer/tools", "/nowhere")]
    doors += [("POST", "/mcp")] if transport == "streamable-http" else [("GET", "/sse"), ("POST", "/messages/")]
    async with asgi_client(registry_of(), transport=transport, **options) as client:
        for method, path in doors:
            sent = {"json": {}} if method == "POST" else {}
            foreign = await client.request(method, path, headers={"Host": "evil.example", "X-Secret": "xyzzy"}, **sent)
            assert foreign.status_code == 421
            assert asked == []
            assert (await client.request(method, path, **sent)).status_code == 401
            assert asked.pop() == path
        assert (await client.get("/health", headers={"X-Secret": "xyzzy"})).status_code == 200
        too_long = {"content": b" " * (4 * MIB + 1), "headers": {"Content-Type": "application/json"}}
        assert (await client.post(doors[-1][1], **too_long)).status_code == 413


async def test_middleware_that_cannot_be_made_keeps_the_server_from_starting() -> None:
    middleware = [Middleware(Doorman, asked=[])]
    with pytest.raises(TypeError, match="secret"), serving(registry_of(), middleware=middleware):
        pass
    with pytest.raises(TypeError, match="secret"):
        async with async_serve(registry_of(), middleware=middleware):
            pass


# ---- What is too much, and what is nothing ----


@pytest.mark.parametrize(
    ("transport", "path", "headers"),
    [
        pytest.param("streamable-http", "/mcp", ACCEPT, id="mcp-handshake"),
        pytest.param("streamable-http", "/mcp", modern("tools/list")["headers"], id="mcp-2026-07-28"),
        pytest.param("sse", "/messages/?session_id=" + "0" * 32, {}, id="messages"),
    ],
)
def test_a_body_over_four_mebibytes_is_refused_before_it_has_ended(
    transport: str, path: str, headers: dict[str, str]
) -> None:
    with serving(registry_of(), transport=transport) as url:
        for size in ({"Content-Length": str(4 * MIB + 1)}, {"Transfer-Encoding": "chunked"}):
            connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port or 0, timeout=20)
            with contextlib.closing(connection):
                connection.putrequest("POST", path)
                for name, value in ({"Content-Type": "application/json"} | headers | size).items():
                    connection.putheader(name, value)
                connection.endheaders()
                if "Content-Length" not in size:  # one chunk, and no last one
                    connection.send(b"%x\r\n" % (4 * MIB + 1) + b" " * (4 * MIB + 1) + b"\r\n")
                assert connection.getresponse().status == 413, size


def test_a_body_just_under_the_limit_is_served(mode: str) -> None:
    text = "x" * (4 * MIB - 2000)
    module = FunctionalModule(lambda inputs, context: {"length": len(inputs["text"])})
    with serving(registry_of({"demo.length": module})) as url, httpx.Client(timeout=30) as client:
        request = call("demo.length", {"text": text}, mode)
        if mode == HANDSHAKE:
            request["headers"] = handshake(client, f"{url}/mcp")[1]
        assert answer(client.post(f"{url}/mcp", **request))["result"]["structuredContent"] == {"length": len(text)}


def test_a_body_that_is_no_request_is_told_so_and_the_server_goes_on(mode: str) -> None:
    bodies = {
        b"": (-32700,),
        b"{": (-32700,),
        b"\xff": (-32700,),
        b"[" * 100_000: (-32700,),
        b"[]": (-32600, -32602),
        b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]': (-32600, -32602),
        b'"tools/list"': (-32600, -32602),
        b'{"jsonrpc":"2.0","id":1}': (-32600, -32602),
    }
    with serving(registry_of({"demo.echo": echo})) as url, httpx.Client(timeout=30) as client:
        request = call("demo.echo", {"a": 1}, mode)
        if mode == HANDSHAKE:
            request["headers"] = handshake(client, f"{url}/mcp")[1]
        for body, codes in bodies.items():
            headers = request["headers"] | {"Content-Type": "application/json"}
            response = client.post(f"{url}/mcp", content=body, headers=headers)
            assert response.status_code == 400, body[:50]
            assert answer(response)["error"]["code"] in codes, body[:50]
            assert answer(response)["id"] is None or body.startswith(b"{")
        assert answer(client.post(f"{url}/mcp", **request))["result"]["structuredContent"] == {"a": 1}


def test_sse_refuses_what_is_no_request_and_goes_on() -> None:
    with (
        serving(registry_of({"demo.echo": echo}), transport="sse") as url,
        httpx.Client(timeout=30) as client,
        sse_session(client, url) as (endpoint, replies),
    ):
        json = {"Content-Type": "application/json"}
        for body in (b"{", b"\xff", b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]'):
            assert client.post(endpoint, content=body, headers=json).status_code == 400
        for stranger in ("/messages/", f"/messages/?session_id={'0' * 32}", "/messages/?session_id=no-id"):
            assert client.post(url + stranger, json=message("ping")).status_code in (400, 404)
        assert client.post(endpoint, **call("demo.echo", {"a": 1}, HANDSHAKE)).status_code == 202
        assert '"structuredContent":{"a":1}' in next(replies)


# ---- Without sessions ----


def test_stateless_servers_may_stand_behind_a_load_balancer(mode: str) -> None:
    registry = registry_of({"demo.echo": echo})
    requests = {"tools/list": None, "tools/call": {"name": "demo.echo", "arguments": {"a": 1}}}
    with (
        serving(registry, stateless=True) as one,
        serving(registry, stateless=True) as another,
        httpx.Client(timeout=30) as client,
    ):
        balanced = itertools.cycle([f"{one}/mcp", f"{another}/mcp"])
        if mode == HANDSHAKE:
            first = client.post(
                next(balanced), json=message("initialize", initialize_params("2025-06-18")), headers=ACCEPT
            )
            assert answer(first)["result"]["protocolVersion"] == "2025-06-18"
            assert "mcp-session-id" not in first.headers
        for method, params in [*requests.items()] * 2 + [*requests.items()][::-1]:  # each method on each server
            old = {"json": message(method, params), "headers": ACCEPT | {"MCP-Protocol-Version": "2025-06-18"}}
            result = answer(client.post(next(balanced), **(modern(method, params) if mode == MODERN else old)))[
                "result"
            ]
            shown = result["structuredContent"] if params else [tool["name"] for tool in result["tools"]]
            assert shown == ({"a": 1} if params else ["demo.echo"])


async def test_the_official_client_works_with_a_stateless_server(mode: str) -> None:
    async with connect({"demo.echo": echo}, mode=mode, stateless=True) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["demo.echo"]
        assert (await client.call_tool("demo.echo", {"a": 1})).structured_content == {"a": 1}


# ---- How calls end ----


async def test_a_deleted_session_is_gone_and_so_are_its_calls() -> None:
    gate, bystander = Gate(), Gate()
    with serving(registry_of({"demo.gate": gate, "demo.bystander": bystander})) as url:
        endpoint = f"{url}/mcp"
        with httpx.Client(timeout=30) as opener:
            (_, session), (_, other) = handshake(opener, endpoint), handshake(opener, endpoint)
        async with httpx.AsyncClient(timeout=30) as client:
            mine = asyncio.create_task(client.post(endpoint, **call("demo.gate", {}, HANDSHAKE), headers=session))
            theirs = asyncio.create_task(client.post(endpoint, **call("demo.bystander", {}, HANDSHAKE), headers=other))
            assert await happens(gate.entered)
            assert await happens(bystander.entered)
            assert (await client.delete(endpoint, headers=session)).is_success
            assert await happens(gate.cancelled)
            assert gate.token.is_cancelled
            for request in (message("ping"), message("tools/list")):
                assert (await client.post(endpoint, json=request, headers=session)).status_code == 404
            assert (await client.delete(endpoint, headers=session)).status_code == 404
            await asyncio.wait({mine})
            mine.exception()  # whatever it is told, it is not left waiting
            bystander.opened.set_result(None)
            assert answer(await theirs)["result"]["structuredContent"] == {"opened": True}
    assert not gate.finished.is_set()
    assert not bystander.cancelled.is_set()


async def test_a_dropped_post_cancels_its_call_only_from_2026_on(mode: str) -> None:
    """In the handshake era the specification has it that a disconnection is no cancellation."""
    gate = Gate()
    with serving(registry_of({"demo.gate": gate, "demo.echo": echo})) as url:
        session = {}
        if mode == HANDSHAKE:
            with httpx.Client(timeout=30) as opener:
                session = {"headers": handshake(opener, f"{url}/mcp")[1]}
        async with httpx.AsyncClient(timeout=30) as client:
            dropped = asyncio.create_task(client.post(f"{url}/mcp", **call("demo.gate", {}, mode), **session))
            assert await happens(gate.entered)
            dropped.cancel()
            await asyncio.wait({dropped})
            if mode == MODERN:
                assert await happens(gate.cancelled)
                assert gate.token.is_cancelled
                assert not gate.finished.is_set()
            for _ in range(10):  # round trips behind which the server has seen the connection close
                reply = await client.post(f"{url}/mcp", **call("demo.echo", {"a": 1}, mode), **session)
                assert answer(reply)["result"]["structuredContent"] == {"a": 1}
            if mode == HANDSHAKE:
                gate.opened.set_result(None)
                assert await happens(gate.finished)
                assert not gate.cancelled.is_set()
                assert not gate.token.is_cancelled


# ---- How servers end ----

SERVER = """
def say(line):
    os.write(1, line.encode() + b"\\n")

async def file(path):
    while not Path(path).exists():
        await asyncio.sleep(0.01)

waiting = []

@tool
async def patient(inputs, context):
    say("entered")
    if not waiting:
        waiting.append(asyncio.create_task(file(inputs["until"])))
    await asyncio.shield(waiting[0])  # so that all calls are done at the same moment
    return {"until": inputs["until"]}

@tool
def big(inputs, context):
    return {"text": "x" * 8_000_000}

@tool
async def endless(inputs, context):
    say("entered")
    await asyncio.Event().wait()

@tool
def blocking(inputs, context):
    say("entered")
    time.sleep(120)

@tool
async def stubborn(inputs, context):
    say("entered")
    while True:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            pass

serve(
    registry, transport=sys.argv[1], port=int(sys.argv[2]),
    on_startup=lambda: say("started"), on_shutdown=lambda: say("stopping"),
)
say("returned")
"""


class Program(NamedTuple):
    """A server in a process of its own, and the lines it prints."""

    url: str
    process: asyncio.subprocess.Process

    async def says(self, *lines: str) -> None:
        assert self.process.stdout is not None
        for line in lines:
            said = await asyncio.wait_for(self.process.stdout.readline(), 30)
            assert said.decode().strip() == line

    async def ends_in_order(self) -> None:
        async with asyncio.timeout(15):
            stdout, stderr = await self.process.communicate()
        assert stdout.decode().split() == ["returned"]
        assert (self.process.returncode, "Traceback" in stderr.decode()) == (0, False), stderr.decode()


@contextlib.asynccontextmanager
async def started(transport: str = "streamable-http") -> AsyncIterator[Program]:
    port = free_port()
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*program(SERVER, transport, str(port)), **pipes)
    server = Program(f"http://127.0.0.1:{port}", process)
    try:
        await server.says("started")
        yield server
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.requirement("NFR-REL-001")
@pytest.mark.parametrize(
    ("transport", "number"),
    [("streamable-http", signal.SIGINT), ("sse", signal.SIGTERM)],
    ids=["http-sigint", "sse-sigterm"],
)
async def test_a_signal_ends_the_server_once_running_calls_are_answered(
    transport: str, number: signal.Signals, tmp_path: Path
) -> None:
    released = tmp_path / "released"
    async with started(transport) as server, contextlib.AsyncExitStack() as stack:
        raw = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
        endpoint = f"{server.url}/mcp"
        if transport == "streamable-http":
            clients = [Client(endpoint, mode=era, cache=None, read_timeout_seconds=30) for era in (HANDSHAKE, MODERN)]
            with httpx.Client() as opener:
                _, session = handshake(opener, endpoint)
            stream = await stack.enter_async_context(raw.stream("GET", endpoint, headers=session))
        else:
            clients = [Client(sse_client(f"{server.url}/sse"), mode=HANDSHAKE, cache=None, read_timeout_seconds=30)]
            stream = await stack.enter_async_context(raw.stream("GET", f"{server.url}/sse"))
        assert stream.status_code == 200
        connected = [await stack.enter_async_context(client) for client in clients]
        if transport == "streamable-http":
            await stack.enter_async_context(connected[-1].listen(tools_list_changed=True))
        for client in connected:
            await client.list_tools()  # or it would ask for the tool's output schema when the result comes
        calls = [
            asyncio.create_task(client.call_tool("t.patient", {"until": str(released)}))
            for client in connected
            for _ in range(25)
        ]
        await server.says(*["entered"] * len(calls))

        server.process.send_signal(number)
        await server.says("stopping")
        if transport == "sse":
            assert (await raw.get(f"{server.url}/sse")).status_code == 503
        else:
            for late in ({"json": message("tools/list"), "headers": session}, modern("tools/list")):
                response = await raw.post(endpoint, **late)
                assert response.status_code == 503 or "error" in answer(response)
            for client in connected:
                with pytest.raises(MCPError):
                    await client.list_tools()
        assert not any(call.done() for call in calls)

        released.touch()
        for answered in await asyncio.gather(*calls):
            assert answered.structured_content == {"until": str(released)}
        await server.ends_in_order()


@pytest.mark.requirement("NFR-REL-001")
async def test_calls_that_never_end_do_not_hold_the_exit_past_the_grace_period() -> None:
    """A coroutine that waits, a thread that sleeps, a coroutine that will not be cancelled; on both transports."""
    kinds = ["t.endless", "t.blocking", "t.stubborn"]

    async def end(transport: str) -> None:
        async with (
            started(transport) as server,
            httpx.AsyncClient(timeout=30) as raw,
            contextlib.AsyncExitStack() as stack,
        ):
            if transport == "sse":
                client = Client(sse_client(f"{server.url}/sse"), mode=HANDSHAKE, cache=None)
                connected = await stack.enter_async_context(client)
                pending = [connected.call_tool(kind, {}) for kind in kinds]
            else:
                endpoint = f"{server.url}/mcp"
                with httpx.Client(timeout=30) as opener:
                    sessions = [handshake(opener, endpoint)[1] for _ in kinds]
                old = [
                    raw.post(endpoint, **call(kind, {}, HANDSHAKE), headers=session)
                    for kind, session in zip(kinds, sessions, strict=True)
                ]
                pending = [*old, *(raw.post(endpoint, **call(kind, {})) for kind in kinds)]
            calls = [asyncio.create_task(one) for one in pending]
            await server.says(*["entered"] * len(calls))
            server.process.send_signal(signal.SIGTERM)
            await server.says("stopping")
            async with asyncio.timeout(15):  # none is left waiting
                await asyncio.gather(*calls, return_exceptions=True)
            await server.ends_in_order()

    for failure in await asyncio.gather(end("streamable-http"), end("sse"), return_exceptions=True):
        if failure is not None:
            raise failure


def post_and_stop_reading(url: str, **request: Any) -> socket.socket:
    """A client that has read the first of the 8 MB it posted for, and reads no more."""
    posted = httpx.Request("POST", url, **request)
    stuck = socket.socket()
    stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    stuck.settimeout(20)
    stuck.connect((posted.url.host, posted.url.port))
    lines = [b"POST /mcp HTTP/1.1", *(name + b": " + value for name, value in posted.headers.raw), b"", posted.read()]
    stuck.sendall(b"\r\n".join(lines))
    while b"xxxx" not in (received := stuck.recv(1024)):
        assert received
    return stuck


async def test_what_clients_leave_unread_or_unsaid_does_not_hold_the_exit_past_the_grace_period() -> None:
    async def end(transport: str, clients: int) -> None:
        async with started(transport) as server:
            with contextlib.ExitStack() as stack:
                opener = stack.enter_context(httpx.Client(timeout=30))
                for number in range(clients):
                    if transport == "sse":
                        stuck = await asyncio.to_thread(clog, server.url, "t.big")
                    else:
                        request = call("t.big", {}, era := (HANDSHAKE, MODERN)[number % 2])
                        if era == HANDSHAKE:
                            _, request["headers"] = await asyncio.to_thread(handshake, opener, f"{server.url}/mcp")
                        stuck = await asyncio.to_thread(post_and_stop_reading, f"{server.url}/mcp", **request)
                    stack.enter_context(contextlib.closing(stuck))
                for method in ("GET", "POST"):  # and one that never sends the rest of its request
                    slow = stack.enter_context(socket.create_connection(("127.0.0.1", urlsplit(server.url).port)))
                    head = f"{method} /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                    slow.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
                for _ in range(5):  # round trips behind which the server has seen all of that
                    assert (await asyncio.to_thread(opener.get, f"{server.url}/health")).status_code == 200
                opener.close()
                began = time.monotonic()
                server.process.send_signal(signal.SIGTERM)
                await server.says("stopping")
                await server.ends_in_order()
                assert time.monotonic() - began < 10  # 5.3 on an idle machine; two periods of grace would be more

    servers = [end("streamable-http", 4), end("sse", 2)]
    for failure in await asyncio.gather(*servers, return_exceptions=True):
        if failure is not None:
            raise failure


# ---- Inside another program ----


async def test_an_app_of_ones_own_can_hold_the_server(mode: str) -> None:
    """`async_serve()` mounted beside other routes, which its rules do not touch."""

    async def home(request: Request) -> PlainTextResponse:
        return PlainTextResponse("home")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with async_serve(registry_of({"demo.echo": echo})) as tools:
            app.mount("/tools", tools)
            yield

    server = uvicorn.Server(
        uvicorn.Config(Starlette(routes=[Route("/home", home)], lifespan=lifespan), log_config=None)
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:  # clients may connect from here on, and wait
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with Client(f"{url}/tools/mcp", mode=mode, cache=None, read_timeout_seconds=30) as client:
                assert [tool.name for tool in (await client.list_tools()).tools] == ["demo.echo"]
                assert (await client.call_tool("demo.echo", {"a": 1})).structured_content == {"a": 1}
            async with httpx.AsyncClient(timeout=30) as stranger:
                foreign = {"Origin": "http://evil.example"}
                assert (await stranger.get(f"{url}/home", headers=foreign)).text == "home"
                request = modern("tools/list")
                refused = await stranger.post(f"{url}/tools/mcp", **request | {"headers": request["headers"] | foreign})
                assert refused.status_code == 403
                assert (await stranger.post(f"{url}/mcp", **request)).status_code == 404
        finally:
            server.should_exit = True
            await asyncio.to_thread(thread.join, 30)
    assert not thread.is_alive()


@pytest.mark.parametrize("where", ["on_startup", "body"])
@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_an_error_comes_out_of_async_serve_as_it_was_raised(transport: str, where: str) -> None:
    """ "All other options are those of serve(), and so are the errors", says `async_serve()`."""

    def fail() -> None:
        raise LookupError("of the program's own")

    with pytest.raises(LookupError, match="of the program's own"):
        async with async_serve(registry_of(), transport=transport, on_startup=fail if where == "on_startup" else None):
            fail()


HTTP = pytest.mark.parametrize("transport", ["streamable-http", "sse"])


async def get(url: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(url)


def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    raise ValueError("no")


# ---- Health ----


@pytest.mark.requirement("FR-HEALTH-001", "FR-HEALTH-002")
@HTTP
def test_health_tells_how_much_is_served_and_since_when(transport: str) -> None:
    registry = registry_of({"t.one": echo, "t.two": echo})
    with serving(registry, transport=transport, version="7.1") as url:
        response = httpx.get(f"{url}/health")
        first = response.json()
        registry.register("t.three", FunctionalModule(echo))
        second = httpx.get(f"{url}/health").json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert first.keys() == {"status", "module_count", "tools_count", "uptime_seconds", "version"}
    assert (first["status"], first["module_count"], first["tools_count"], first["version"]) == ("ok", 2, 2, "7.1")
    assert 0 <= first["uptime_seconds"] < second["uptime_seconds"]
    assert second["tools_count"] == 3


@pytest.mark.requirement("FR-SERVER-006")
def test_health_of_a_server_without_tools_is_ok_too() -> None:
    with serving(registry_of()) as url:
        told = httpx.get(f"{url}/health").json()
    assert (told["status"], told["module_count"], told["version"]) == ("ok", 0, __version__)


def test_health_is_for_who_may_ask_the_server_at_all() -> None:
    with serving(registry_of()) as url:
        assert httpx.get(f"{url}/health", headers={"Host": "evil.example"}).status_code == 421
        assert httpx.get(f"{url}/health", headers={"Origin": "http://evil.example"}).status_code == 403
        assert httpx.post(f"{url}/health", json={}).status_code == 405


async def test_health_and_metrics_are_part_of_an_app_of_ones_own() -> None:
    async with async_serve(registry_of({"t.one": echo}), metrics_collector=MetricsCollector()) as app:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            assert (await client.get("/health")).json()["tools_count"] == 1
            assert (await client.get("/metrics")).status_code == 200


# ---- Metrics ----

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="[^"]*",?)*)\})? ([0-9.e+-]+|\+Inf|NaN)')


def samples(page: str) -> dict[tuple[str, str], float]:
    """The samples of a page of Prometheus text by name and labels; fails for a line that is no sample."""
    found = {}
    for line in page.splitlines():
        if not line.startswith(("# HELP ", "# TYPE ")):
            match = SAMPLE.fullmatch(line)
            assert match, line
            found[match[1], match[2] or ""] = float(match[3])
    return found


@HTTP
async def test_metrics_count_the_calls_of_each_module(transport: str) -> None:
    from mcp.client.sse import sse_client

    registry = registry_of({"t.echo": echo, "t.fail": fail})
    with serving(registry, transport=transport, metrics_collector=MetricsCollector()) as url:
        assert samples((await get(f"{url}/metrics")).text) == {}
        server: Any = sse_client(f"{url}/sse") if transport == "sse" else f"{url}/mcp"
        async with Client(server, mode=HANDSHAKE) as client:
            for name in ("t.echo", "t.echo", "t.fail"):
                await client.call_tool(name, {})
        response = await get(f"{url}/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    counted = samples(response.text)
    assert counted["apcore_module_calls_total", 'module_id="t.echo",status="success"'] == 2
    assert counted["apcore_module_calls_total", 'module_id="t.fail",status="error"'] == 1
    assert counted["apcore_module_duration_seconds_count", 'module_id="t.echo"'] == 2
    assert counted["apcore_module_duration_seconds_sum", 'module_id="t.echo"'] > 0


@HTTP
def test_without_a_collector_there_is_no_metrics_page(transport: str) -> None:
    with serving(registry_of(), transport=transport) as url:
        assert httpx.get(f"{url}/metrics").status_code == 404


async def test_any_object_that_exports_can_be_the_collector_and_an_executor_keeps_its_middleware() -> None:
    class Exporter:
        def export_prometheus(self) -> str:
            return "up 1\n"

    executor = Executor(registry_of({"t.echo": echo}))
    with serving(executor, metrics_collector=Exporter()) as url:
        assert (await get(f"{url}/metrics")).text == "up 1\n"
    async with connect(executor, metrics_collector=MetricsCollector()) as client:
        assert not (await client.call_tool("t.echo", {})).is_error
    assert executor.middlewares == []


async def test_metrics_that_are_asked_for_count_the_calls_of_an_executor_too() -> None:
    """Whatever feeds a collector of the Executor's own; and what counts for a server goes with it."""
    own = MetricsCollector()
    for middlewares in ([], [MetricsMiddleware(own)]):
        executor = Executor(registry_of({"t.echo": echo, "t.fail": fail}), middlewares=middlewares)
        server = MCPServer(executor, transport="streamable-http", port=(port := free_port()), metrics_collector=True)
        for life in (1, 2):
            server.start()
            async with Client(f"http://127.0.0.1:{port}/mcp", mode=HANDSHAKE) as client:
                await client.call_tool("t.echo", {})
                await client.call_tool("t.fail", {})
            counted = samples((await get(f"http://127.0.0.1:{port}/metrics")).text)
            server.stop()
            server.wait()
            assert counted["apcore_module_calls_total", 'module_id="t.echo",status="success"'] == life
            assert counted["apcore_module_calls_total", 'module_id="t.fail",status="error"'] == life
            assert executor.middlewares == middlewares
    assert samples(own.export_prometheus())["apcore_module_calls_total", 'module_id="t.echo",status="success"'] == 2


async def test_metrics_count_what_was_refused_once() -> None:
    """By the ACL, for want of approval, by us or because a module is off: apcore's middleware sees none of it."""
    needs = ModuleAnnotations(requires_approval=True)

    async def below(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("shut.door", {}, context)

    modules: dict[str, Any] = {"shut.door": echo, "t.gated": FunctionalModule(echo, annotations=needs)}
    typed = FunctionalModule(echo, input_schema={"type": "object", "required": ["x"]})
    modules |= {"t.off": echo, "t.below": below, "t.typed": typed, "t.echo": echo}
    rules = [ACLRule(callers=["*"], targets=["t.*"], effect="allow")]
    off = ToggleState()
    off.disable("t.off")
    executor = Executor(registry_of(modules), acl=ACL(rules=rules, default_effect="deny"), toggle_state=off)
    with serving(executor, metrics_collector=True, approval="deny", validate_inputs=True) as url:
        async with Client(f"{url}/mcp", mode=HANDSHAKE) as client:
            for name in modules:
                result = await client.call_tool(name, {})
                assert result.is_error == (name != "t.echo")
        counted = samples((await get(f"{url}/metrics")).text)
    calls = {key[1]: value for key, value in counted.items() if key[0] == "apcore_module_calls_total"}
    assert calls == {
        'module_id="shut.door",status="error"': 1,
        'module_id="t.gated",status="error"': 1,
        'module_id="t.off",status="error"': 1,
        'module_id="t.below",status="error"': 1,
        'module_id="t.typed",status="error"': 1,
        'module_id="t.echo",status="success"': 1,
    }
    errors = {key[1]: value for key, value in counted.items() if key[0] == "apcore_module_errors_total"}
    assert errors == {
        'error_code="ACL_DENIED",module_id="shut.door"': 1,
        'error_code="APPROVAL_DENIED",module_id="t.gated"': 1,
        'error_code="MODULE_DISABLED",module_id="t.off"': 1,
        'error_code="ACL_DENIED",module_id="t.below"': 1,
        'error_code="SCHEMA_VALIDATION_ERROR",module_id="t.typed"': 1,
    }


async def test_a_call_that_its_client_cannot_approve_is_counted_and_logged(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    gated = FunctionalModule(echo, annotations=ModuleAnnotations(requires_approval=True))
    with serving(registry_of({"t.gated": gated}), metrics_collector=True, approval="require") as url:
        async with Client(f"{url}/mcp", mode=mode) as client:
            with contextlib.suppress(MCPError):
                assert (await client.call_tool("t.gated", {})).is_error
        counted = samples((await get(f"{url}/metrics")).text)
    assert counted["apcore_module_errors_total", 'error_code="APPROVAL_DENIED",module_id="t.gated"'] == 1
    assert [record.getMessage() for record in caplog.records if "Tool call error: t.gated" in record.getMessage()]


async def test_a_disabled_module_is_listed_and_says_what_it_is(mode: str) -> None:
    """apcore's registry keeps it, and tells nobody who has only the Executor when it is disabled and enabled."""
    toggled = ToggleState()
    executor = Executor(registry_of({"image.resize": echo}), toggle_state=toggled)
    async with connect(executor, mode=mode) as client:
        for disabled in (False, True, False):
            (toggled.disable if disabled else toggled.enable)("image.resize")
            assert [tool.name for tool in (await client.list_tools()).tools] == ["image.resize"]
            result = await client.call_tool("image.resize", {"a": 1})
            text = "".join(part.text for part in result.content if part.type == "text")
            assert text == ("Module is disabled: image.resize" if disabled else '{"a":1}')


def test_a_collector_that_fails_is_an_error_without_a_reason() -> None:
    class Broken:
        def export_prometheus(self) -> str:
            raise OSError("/var/lib/metrics")

    with serving(registry_of(), metrics_collector=Broken()) as url:
        response = httpx.get(f"{url}/metrics")
        assert (response.status_code, response.text) == (500, "Internal Server Error")
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("collector", [5, 0])
def test_a_collector_that_cannot_export_is_refused_at_once(collector: int) -> None:
    with pytest.raises(TypeError, match=rf"metrics_collector must have export_prometheus\(\), got {collector}"):
        serve(registry_of(), metrics_collector=collector)


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


def test_a_server_ends_as_soon_though_a_client_keeps_its_stream_open() -> None:
    """A stream is not what a client has asked and waits for: the 5 seconds are for that."""

    def ending(streams: bool) -> float:
        port = free_port()
        server = MCPServer(registry_of({"echo": echo}), transport="streamable-http", port=port)
        server.start()
        url = f"http://127.0.0.1:{port}/mcp"
        with httpx.Client(timeout=30) as client, contextlib.ExitStack() as stack:
            _, session = handshake(client, url)
            if streams:
                stack.enter_context(client.stream("GET", url, headers=session))
            began = time.monotonic()
            server.stop()
            server.wait()
            return time.monotonic() - began

    assert ending(streams=True) < ending(streams=False) + 4


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
