"""The HTTP transports: who is let in, what is refused before anything runs, how calls and servers end.

Demanded by FR-SERVER-002 and -003, FR-TRANSPORT-003 and -004, NFR-PERF-004, NFR-REL-001, design §3 "HTTP", "Hosts",
"Cancellation" and "Shutdown", and §4; `/health` by FR-HEALTH-001 and -002, `/metrics` by F-021 and F-022.
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
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from apcore import Executor, Registry
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
from support import ACCEPT, answer, clog, handshake, initialize_params, message, modern

from apcore_mcp import MCPServer, __version__, async_serve

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


async def test_an_sse_stream_opens_for_get_alone() -> None:
    """A client that tries POST first, as the specification has it, falls back when it is refused."""
    async with asgi_client(registry_of(), transport="sse") as client:
        for method in ("POST", "DELETE"):
            response = await client.request(method, "/sse", json={})
            assert (response.status_code, "GET" in response.headers["allow"]) == (405, True)


async def test_what_is_no_http_request_is_refused() -> None:
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
async def test_it_listens_on_ipv6() -> None:
    with serving(registry_of(), host="::1") as url:
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://[::1]:{urlsplit(url).port}/health")).status_code == 200


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


@pytest.mark.requirement("NFR-PERF-004")
async def test_twenty_official_clients_are_served_at_once() -> None:
    """Async modules; each returns once all twenty are running."""
    everybody = asyncio.Barrier(20)

    async def meet(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await everybody.wait()
        return {"you": inputs["me"]}

    with serving(registry_of({"demo.meet": FunctionalModule(meet)})) as url:

        async def visit(number: int) -> Any:
            era = (HANDSHAKE, MODERN)[number % 2]
            async with Client(f"{url}/mcp", mode=era, cache=None, read_timeout_seconds=30) as client:
                return (await client.call_tool("demo.meet", {"me": number})).structured_content

        assert await asyncio.gather(*map(visit, range(20))) == [{"you": number} for number in range(20)]


# ---- Who is let in ----

FORM = "application/x-www-form-urlencoded"
REFUSED_OR_NOT = {
    "own-host": ({}, 200),
    "localhost-in-capitals": ({"Host": "LOCALHOST:8000", "Origin": "http://LocalHost:8000"}, 200),
    "foreign-host": ({"Host": "evil.example"}, 421),
    "own-origin": ({"Origin": "http://127.0.0.1:8000"}, 200),
    "other-port-of-the-address": ({"Origin": "http://127.0.0.1:1"}, 403),
    "default-port": ({"Origin": "http://127.0.0.1"}, 403),
    "foreign-origin": ({"Origin": "http://evil.example"}, 403),
    "origin-that-begins-like-ours": ({"Origin": "http://127.0.0.1:8000.evil.example"}, 403),
    "opaque-origin": ({"Origin": "null"}, 403),
    "rebound-name": ({"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}, 421),
    "text-plain": ({"Content-Type": "text/plain"}, 415),
    "form": ({"Content-Type": FORM}, 415),
    "begins-like-json": ({"Content-Type": "application/jsonx"}, 415),
    "json-as-a-parameter": ({"Content-Type": "text/plain; application/json"}, 415),
    "multipart": ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
    "json-with-charset": ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
}


async def test_only_this_machine_and_the_servers_own_pages_are_let_in() -> None:
    ran: list[str] = []

    async def note(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        ran.append(inputs["by"])
        return {}

    async with asgi_client(registry_of({"demo.note": note})) as client:
        for name, (headers, status) in REFUSED_OR_NOT.items():
            posted = call("demo.note", {"by": name})
            response = await client.post("/mcp", **posted | {"headers": posted["headers"] | headers})
            assert response.status_code == status, name
            assert "access-control-allow-origin" not in response.headers
    assert ran == [name for name, (_, status) in REFUSED_OR_NOT.items() if status == 200]


def test_a_request_without_a_host_is_refused() -> None:
    with serving(registry_of()) as url, socket.create_connection(("127.0.0.1", urlsplit(url).port)) as client:
        client.settimeout(20)
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert client.recv(100).split()[1] in (b"400", b"421")


GIVEN = ["tools.example", "wild.example:*", "port.example:8443"]
LOOPBACK_ONLY = {
    ("localhost:1", "http://localhost:1"): 200,
    ("localhost:1", "http://localhost:2"): 403,
    ("LOCALHOST", None): 200,
    ("127.0.0.1", "http://127.0.0.1"): 200,
    ("[::1]:1", None): 200,
    ("192.0.2.1:1", None): 200,  # no name that is rebound, but what another machine or a container asks for
    ("evil.example", None): 421,
    ("127.0.0.1:@evil.example", None): 421,
    ("evil@127.0.0.1", None): 421,
    ("127.0.0.1.evil.example", None): 421,
    ("localhost.evil.example:8000", None): 421,
    ("", None): 421,
}
ANY_NAME = {
    ("any.example", None): 200,
    ("any.example:8000", None): 200,
    ("any.example:8000", "http://any.example:8000"): 200,
    ("any.example:8000", "http://any.example:1"): 403,
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
        pytest.param(
            {"host": "MyBox"},
            {
                ("mybox:8000", "http://mybox:8000"): 200,
                ("mybox:1", None): 200,
                ("any.example", None): 200,
                ("any.example", "http://any.example"): 200,
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
                ("any.example:1", "http://any.example:1"): 200,
                ("192.0.2.1:1", "http://192.0.2.1:1"): 200,
                ("[2001:db8::1]:1", "http://[2001:db8::1]:1"): 200,
                ("[fe80::1%25eth0]:1", None): 200,
                ("192.0.2.1:1", "http://192.0.2.1:2"): 403,
                ("192.0.2.1", "http://evil.example"): 403,
                ("192.0.2.1", "null"): 403,
            },
            id="any-name-on-all-interfaces",
        ),
        pytest.param({}, LOOPBACK_ONLY, id="default"),
        pytest.param({"host": "Localhost"}, LOOPBACK_ONLY, id="localhost"),
        pytest.param({"host": "127.0.0.2"}, LOOPBACK_ONLY, id="loopback"),
        pytest.param({"host": "::1"}, LOOPBACK_ONLY, id="ipv6-loopback"),
        pytest.param({"host": "0:0:0:0:0:0:0:1"}, LOOPBACK_ONLY, id="ipv6-loopback-in-full"),
    ],
)
async def test_host_and_allowed_hosts_decide_which_names_are_accepted(
    options: dict[str, Any], told: dict[tuple[str, str | None], int]
) -> None:
    async with asgi_client(registry_of(), **options) as client:
        headers = {key: {"Host": key[0], **({"Origin": key[1]} if key[1] else {})} for key in told}
        observed = {key: (await client.get("/health", headers=sent)).status_code for key, sent in headers.items()}
    assert observed == told


async def test_who_is_refused_is_told_which_option_lets_him_in(caplog: pytest.LogCaptureFixture) -> None:
    async with asgi_client(registry_of(), allowed_hosts=["tools.example"]) as client:
        refused = await client.get("/health", headers={"Host": "other.example"})
    for told in (refused.text, caplog.messages[-1]):
        assert "allowed_hosts" in told
        assert "--allowed-hosts" in told
    assert "other.example" in caplog.messages[-1]


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
        pytest.param("streamable-http", "/explorer/tools/x/call", {}, id="explorer"),
        pytest.param("sse", "/messages/?session_id=" + "0" * 32, {}, id="messages"),
    ],
)
def test_a_body_over_four_mebibytes_is_refused_before_it_has_ended(
    transport: str, path: str, headers: dict[str, str]
) -> None:
    with serving(registry_of(), transport=transport, explorer=True) as url:
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


def test_a_body_just_under_the_limit_is_served() -> None:
    text = "x" * (4 * MIB - 2000)
    module = FunctionalModule(lambda inputs, context: {"length": len(inputs["text"])})
    with serving(registry_of({"demo.length": module})) as url, httpx.Client(timeout=30) as client:
        response = client.post(f"{url}/mcp", **call("demo.length", {"text": text}))
        assert answer(response)["result"]["structuredContent"] == {"length": len(text)}


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
            for _ in range(5)
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


@pytest.mark.requirement("NFR-REL-001")
async def test_neither_calls_nor_clients_without_an_end_hold_the_exit_past_the_grace_period() -> None:
    """A coroutine that waits, a thread that sleeps, a coroutine that will not be cancelled; answers that are not read
    and requests that are not finished. On both transports.
    """
    kinds = ["t.endless", "t.blocking", "t.stubborn"]

    def clogged(server: Program, opener: httpx.Client, transport: str, era: str) -> socket.socket:
        if transport == "sse":
            return clog(server.url, "t.big")
        request = call("t.big", {}, era)
        if era == HANDSHAKE:
            _, request["headers"] = handshake(opener, f"{server.url}/mcp")
        return post_and_stop_reading(f"{server.url}/mcp", **request)

    async def end(transport: str) -> None:
        async with started(transport) as server, contextlib.AsyncExitStack() as stack:
            opener = stack.enter_context(httpx.Client(timeout=30))
            raw = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
            if transport == "sse":
                connected = Client(sse_client(f"{server.url}/sse"), mode=HANDSHAKE, cache=None)
                await stack.enter_async_context(connected)
                pending: list[Any] = [connected.call_tool(kind, {}) for kind in kinds]
            else:
                endpoint = f"{server.url}/mcp"
                _, session = handshake(opener, endpoint)
                pending = [raw.post(endpoint, **call(kind, {}, HANDSHAKE), headers=session) for kind in kinds[:1]]
                pending += [raw.post(endpoint, **call(kind, {})) for kind in kinds]
            calls = [asyncio.create_task(one) for one in pending]
            await server.says(*["entered"] * len(calls))
            for era in (HANDSHAKE, MODERN):
                stuck = await asyncio.to_thread(clogged, server, opener, transport, era)
                stack.enter_context(contextlib.closing(stuck))
            for method in ("GET", "POST"):  # and one that never sends the rest of its request
                slow = stack.enter_context(socket.create_connection(("127.0.0.1", urlsplit(server.url).port)))
                head = f"{method} /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                slow.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
            for _ in range(5):  # round trips behind which the server has seen all of that
                assert (await raw.get(f"{server.url}/health")).status_code == 200
            opener.close()
            server.process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):  # 5.3 on an idle machine; two periods of grace would be more
                await server.says("stopping")
                await asyncio.gather(*calls, return_exceptions=True)  # none is left waiting
                await server.ends_in_order()

    for failure in await asyncio.gather(end("streamable-http"), end("sse"), return_exceptions=True):
        if failure is not None:
            raise failure


# ---- Inside another program ----


async def test_an_app_of_ones_own_can_hold_the_server() -> None:
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
            async with Client(f"{url}/tools/mcp", mode=MODERN, cache=None, read_timeout_seconds=30) as client:
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
async def test_an_error_comes_out_of_async_serve_as_it_was_raised(where: str) -> None:
    """ "All other options are those of serve(), and so are the errors", says `async_serve()`."""

    def fail() -> None:
        raise LookupError("of the program's own")

    with pytest.raises(LookupError, match="of the program's own"):
        async with async_serve(registry_of(), on_startup=fail if where == "on_startup" else None):
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
async def test_health_of_a_server_without_tools_is_ok_too() -> None:
    async with asgi_client(registry_of()) as client:
        told = (await client.get("/health")).json()
        assert (told["status"], told["module_count"], told["version"]) == ("ok", 0, __version__)
        assert (await client.post("/health", json={})).status_code == 405


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


async def test_without_a_collector_there_is_no_metrics_page() -> None:
    async with asgi_client(registry_of()) as client:
        assert (await client.get("/metrics")).status_code == 404


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


async def test_a_disabled_module_is_listed_and_says_what_it_is() -> None:
    """apcore's registry keeps it, and tells nobody who has only the Executor when it is disabled and enabled."""
    toggled = ToggleState()
    executor = Executor(registry_of({"image.resize": echo}), toggle_state=toggled)
    async with connect(executor) as client:
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


async def test_a_call_of_the_explorer_is_given_its_time_too_when_the_server_ends() -> None:
    gate = Gate()
    port = free_port()
    options: dict[str, Any] = {"port": port, "explorer": True, "allow_execute": True}
    server = MCPServer(registry_of({"gate": gate}), transport="streamable-http", **options)
    server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        called = asyncio.create_task(client.post("/explorer/tools/gate/call", json={}))
        assert await happens(gate.entered)
        server.stop()
        while (await client.get("/health")).status_code == 200:  # it refuses what is new from the moment it ends
            pass
        gate.opened.set_result(None)
        assert (await called).json() == {"result": {"opened": True}}
    await asyncio.to_thread(server.wait)


@HTTP
def test_a_server_ends_as_soon_though_a_client_keeps_its_stream_open(transport: str) -> None:
    """A stream is not what a client has asked and waits for: the 5 seconds are for that."""
    port = free_port()
    server = MCPServer(registry_of({"echo": echo}), transport=transport, port=port)
    server.start()
    url = f"http://127.0.0.1:{port}/" + ("sse" if transport == "sse" else "mcp")
    with httpx.Client(timeout=30) as client:
        session = {} if transport == "sse" else handshake(client, url)[1]
        with client.stream("GET", url, headers=session):
            server.stop()
            waiting = threading.Thread(target=server.wait, daemon=True)
            waiting.start()
            waiting.join(4)
            assert not waiting.is_alive()


class Hanging:
    """Middleware that never answers."""

    def __init__(self, app: Any, entered: threading.Event) -> None:
        self.entered = entered

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.entered.set()
        await asyncio.Event().wait()


def test_middleware_that_hangs_does_not_keep_the_server_for_ever() -> None:
    entered = threading.Event()
    port = free_port()
    middleware = [Middleware(Hanging, entered=entered)]
    server = MCPServer(registry_of(), transport="streamable-http", port=port, middleware=middleware)
    server.start()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert entered.wait(20)
        server.stop()
        waiting = threading.Thread(target=server.wait, daemon=True)
        waiting.start()
        waiting.join(20)
        assert not waiting.is_alive()


def test_a_session_in_which_nothing_is_said_for_half_an_hour_is_ended() -> None:
    async def story(clock: Clock) -> None:
        async with (
            async_serve(registry_of({"echo": echo})) as app,
            hosting(app) as url,
            httpx.AsyncClient(headers=ACCEPT, timeout=None) as client,
        ):
            begin = message("initialize", initialize_params("2025-11-25"))
            opened = await client.post(f"{url}/mcp", json=begin)
            client.headers["Mcp-Session-Id"] = opened.headers["Mcp-Session-Id"]
            for minutes, status in ((25, 200), (25, 200), (31, 404)):
                await clock.put_forward(60 * minutes)
                assert (await client.post(f"{url}/mcp", json=message("tools/list"))).status_code == status

    with_clock(story)
