"""The HTTP transports: who is let in, what is refused before anything runs, how calls and servers end.

Demanded by FR-SERVER-002 and -003, FR-TRANSPORT-003 and -004, NFR-PERF-004, NFR-REL-001;
`/health` by FR-HEALTH-001 and -002, `/metrics` by F-021 and F-022.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import itertools
import logging
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from apcore import ACL, ACLRule, Executor
from apcore.observability import MetricsCollector, MetricsMiddleware
from apcore.sys_modules.control import ToggleState
from conftest import (
    HANDSHAKE,
    MODERN,
    Clock,
    FunctionalModule,
    client_of,
    connect,
    echo,
    free_port,
    hosting,
    program,
    registry_of,
    serving,
    with_clock,
)
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Mount
from support import ACCEPT, Gate, answer, clog, handshake, initialize_params, message, messages_logged, modern, text_of

from apcore_mcp import MCPServer, __version__, async_serve

MIB = 1024 * 1024
DEPRECATED = "SSE transport is deprecated; use streamable-http instead"


@contextlib.asynccontextmanager
async def asgi_client(source: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app that `async_serve()` yields, without a socket between them."""
    async with async_serve(source, **options) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            yield client


def call(name: str, arguments: dict[str, Any], mode: str = MODERN) -> dict[str, Any]:
    """What httpx posts to call a tool; in the handshake era, the session's headers are to be added."""
    params = {"name": name, "arguments": arguments}
    return modern("tools/call", params) if mode == MODERN else {"json": message("tools/call", params)}


# ---- Addresses and routes ----


@pytest.mark.requirement("FR-SERVER-002")
def test_the_endpoint_answers_itself_without_a_redirect() -> None:
    with serving(registry_of({"demo.echo": echo})) as url, httpx.Client() as client:
        for endpoint in (f"{url}/mcp", f"{url}/mcp/"):
            _, session = handshake(client, endpoint)
            called = client.post(endpoint, **call("demo.echo", {"a": 1}, HANDSHAKE), headers=session)
            assert answer(called)["result"]["structuredContent"] == {"a": 1}
            called = client.post(endpoint, **call("demo.echo", {"a": 2}))
            assert answer(called)["result"]["structuredContent"] == {"a": 2}


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_anything_but_the_transports_own_routes_is_not_found(transport: str) -> None:
    """An SSE stream opens for GET alone: a client that tries POST first, as is specified, falls back when refused."""
    foreign = ["/sse", "/messages/"] if transport == "streamable-http" else ["/mcp", "/mcp/"]
    async with asgi_client(registry_of(), transport=transport) as client:
        for path in ["/", "/nowhere", "/mcp/more", "/metrics", *foreign]:
            assert (await client.get(path)).status_code == 404, path
            assert (await client.post(path, json=message("ping"))).status_code == 404, path
        for method in ("POST", "DELETE") if transport == "sse" else ():
            response = await client.request(method, "/sse", json={})
            assert (response.status_code, "GET" in response.headers["allow"]) == (405, True)
        for method in ("GET", "DELETE", "PUT") if transport == "streamable-http" else ():
            for headers in (ACCEPT, ACCEPT | {"MCP-Protocol-Version": MODERN}):
                assert (await client.request(method, "/mcp", headers=headers)).status_code in (400, 405), method


async def test_a_websocket_is_refused() -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, str]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async with async_serve(registry_of(), transport="sse", explorer=True) as app:
        for path in ("/messages/", "/explorer/"):
            scope = {"type": "websocket", "path": path, "headers": [(b"host", b"127.0.0.1")], "subprotocols": []}
            await app(scope, receive, send)
    assert sent == ["websocket.close"] * 2


@pytest.mark.requirement("FR-TRANSPORT-003")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers on all of 127.0.0.0/8")
def test_the_host_decides_on_which_interfaces_it_listens() -> None:
    for host, refused in (("127.0.0.1", pytest.raises(ConnectionRefusedError)), ("0.0.0.0", contextlib.nullcontext())):
        with serving(registry_of(), host=host) as url, refused:
            socket.create_connection(("127.0.0.2", urlsplit(url).port), timeout=10).close()


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
def test_it_listens_on_ipv6() -> None:
    with serving(registry_of(), host="::1") as url:
        assert httpx.get(f"http://[::1]:{urlsplit(url).port}/health").status_code == 200


@pytest.mark.requirement("FR-SERVER-003", "FR-TRANSPORT-004")
async def test_sse_works_with_the_official_client_and_says_that_it_is_deprecated(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving(registry_of()):
        assert DEPRECATED not in caplog.messages
    with serving(registry_of({"demo.echo": echo}), transport="sse") as url:
        async with client_of(f"{url}/sse", HANDSHAKE) as client:
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
            async with client_of(url, era) as client:
                return (await client.call_tool("demo.meet", {"me": number})).structured_content

        assert await asyncio.gather(*map(visit, range(20))) == [{"you": number} for number in range(20)]


# ---- Who is let in ----

REFUSED_OR_NOT = {
    "own-host": ({}, 200),
    "localhost-in-capitals": ({"Host": "LOCALHOST:8000", "Origin": "http://LocalHost:8000"}, 200),
    "foreign-host": ({"Host": "evil.example"}, 421),
    "own-origin": ({"Origin": "http://127.0.0.1:8000"}, 200),
    "other-port-of-the-address": ({"Origin": "http://127.0.0.1:1"}, 403),
    "foreign-origin": ({"Origin": "http://evil.example"}, 403),
    "origin-that-begins-like-ours": ({"Origin": "http://127.0.0.1:8000.evil.example"}, 403),
    "opaque-origin": ({"Origin": "null"}, 403),
    "text-plain": ({"Content-Type": "text/plain"}, 415),
    "form": ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
    "begins-like-json": ({"Content-Type": "application/jsonx"}, 415),
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


@pytest.mark.parametrize(
    ("origins", "status"),
    [
        (("http://127.0.0.1:8000", "https://127.0.0.1:8000"), 200),
        (("https://127.0.0.1:8000", "http://evil.example"), 403),
    ],
    ids=["both-its-own", "one-of-them-foreign"],
)
async def test_of_several_origins_each_has_to_be_the_servers_own(origins: tuple[str, ...], status: int) -> None:
    async with asgi_client(registry_of({"demo.note": echo})) as client:
        posted = call("demo.note", {})
        headers = [*posted["headers"].items(), *(("Origin", origin) for origin in origins)]
        assert (await client.post("/mcp", **posted | {"headers": headers})).status_code == status


LOOPBACK_ONLY = {
    ("localhost:1", "http://localhost:1"): 200,
    ("localhost:1", "http://localhost:2"): 403,
    ("[::1]:1", None): 200,
    ("192.0.2.1:1", None): 200,  # no name that is rebound, but what another machine or a container asks for
    ("evil.example", None): 421,
    ("127.0.0.1.evil.example", None): 421,
    ("localhost.evil.example:8000", None): 421,
    ("", None): 421,
}


HOSTS: dict[str, tuple[dict[str, Any], dict[tuple[str, str | None], int]]] = {
    "names": (
        {"host": "MyBox", "allowed_hosts": ["tools.example", "wild.example:*", "port.example:8443"]},
        {
            ("mybox:8000", "http://mybox:8000"): 200,
            ("any.example", None): 421,
            ("Tools.Example", "https://TOOLS.example"): 200,  # TLS may end before us
            ("tools.example", "http://evil.example"): 403,
            ("tools.example:8000", None): 421,
            ("wild.example:1234", None): 200,
            ("wild.example:1234", "http://wild.example:1234"): 200,
            ("wild.example", "http://wild.example"): 200,  # the port that needs not be named is one, too
            ("wild.example.evil.example:1234", None): 421,
            ("port.example:8443", "https://port.example:8443"): 200,
            ("port.example:8444", None): 421,
            ("127.0.0.1:8000", None): 200,  # a probe, or the developer's own machine
        },
    ),
    "names-on-all-interfaces": (
        {"host": "0.0.0.0", "allowed_hosts": ["Tools.example"]},
        {
            ("tools.example", None): 200,
            ("tools.example", "http://tools.example"): 200,
            ("evil.example", None): 421,
            ("0.0.0.0:8000", "http://0.0.0.0:8000"): 200,
        },
    ),
    "any-name": (
        {"allowed_hosts": ["*", "tools.example"]},
        {
            ("any.example:8000", None): 200,
            ("any.example:8000", "http://any.example:8000"): 421,
            ("any.example:8000", "http://any.example:1"): 421,
            ("tools.example", "http://tools.example"): 200,
            ("localhost:8000", "http://localhost:8000"): 200,
        },
    ),
    "wildcards": (
        {"allowed_hosts": ["*:*", "*.tools.example:*", "*e*", "????.example", "[a-z]*"]},
        {
            ("any.example:8000", None): 200,
            ("any.example:8000", "http://any.example:8000"): 421,
            ("a.tools.example", None): 200,
            ("a.tools.example", "http://a.tools.example"): 421,
            ("evil.example", "http://evil.example"): 421,
        },
    ),
    "one-domain": (
        {"allowed_hosts": ["*.tools.example"]},
        {
            ("a.tools.example", None): 200,
            ("a.tools.example", "http://a.tools.example"): 421,
            ("any.example", None): 421,
        },
    ),
    "the-name-listened-on": (
        {"host": "MyBox"},
        {
            ("mybox:8000", "http://mybox:8000"): 200,
            ("mybox:8000", "http://mybox:1"): 403,
            ("any.example", None): 200,
            ("any.example", "http://any.example"): 421,
        },
    ),
    "all-interfaces": (
        {"host": "0.0.0.0"},
        {
            ("any.example:1", None): 200,
            ("any.example:1", "http://any.example:1"): 421,
            ("[fe80::1%25eth0]:1", "http://[fe80::1%25eth0]:1"): 200,
            ("192.0.2.1:1", "http://192.0.2.1:1"): 200,
            ("192.0.2.1:1", "http://192.0.2.1:2"): 403,
            ("192.0.2.1", "null"): 403,
            ("192.0.2.1.example", "http://192.0.2.1.example"): 421,
            ("localhost.", "http://localhost."): 421,
        },
    ),
    **{host: ({"host": host}, LOOPBACK_ONLY) for host in "127.0.0.1 Localhost 127.0.0.2 ::1 0:0:0:0:0:0:0:1".split()},
}


@pytest.mark.parametrize(("options", "expected"), HOSTS.values(), ids=HOSTS)
async def test_host_and_allowed_hosts_decide_which_names_are_accepted(
    options: dict[str, Any], expected: dict[tuple[str, str | None], int]
) -> None:
    """A page may only use a name that is spelt out: any other could be its own, made to resolve to this server."""
    async with asgi_client(registry_of(), explorer=True, **options) as client:
        for (host, origin), status in expected.items():
            headers = {"Host": host} | ({"Origin": origin} if origin else {})
            for path in ("/nowhere", "/mcp"):
                response = await client.get(path, headers=headers)
                refused = response.status_code if response.status_code in (403, 421) else 200
                assert refused == status, (host, origin, path)
            for path in ("/health", "/ready"):  # whoever probes may know no name
                assert (await client.get(path, headers=headers)).status_code == 200, (host, origin, path)
            # A browser sends no Origin with what it loads from the page's own host.
            of_page = status if origin else expected.get((host, f"http://{host}"), status)
            assert (await client.get("/explorer/", headers=headers)).status_code == of_page, (host, origin)


@pytest.mark.parametrize("mounted", ["", "/agents", "/explorer"])
async def test_the_explorer_is_a_page_to_every_client_wherever_it_is_mounted(mounted: str) -> None:
    """The server may be open to programs under any name; what its page loads carries no Origin."""
    options = {"explorer": True, "allow_execute": True, "allowed_hosts": ["*", "tools.example"]}
    async with async_serve(registry_of({"t.echo": echo}), **options) as app:
        transport = httpx.ASGITransport(Starlette(routes=[Mount(mounted, app)]))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            for host, status in (("evil.example", 421), ("tools.example", 200), ("127.0.0.1", 200)):
                assert (await client.get(f"{mounted}/health", headers={"Host": host})).status_code == 200
                for path in ("", "server", "tools", "tools/t.echo", "%74ools"):
                    response = await client.get(f"{mounted}/explorer/{path}", headers={"Host": host})
                    assert response.status_code == status, (host, path)
                called = await client.post(f"{mounted}/explorer/tools/t.echo/call", json={}, headers={"Host": host})
                assert called.status_code == status


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_a_page_under_a_rebound_name_is_refused_at_every_door(transport: str) -> None:
    page = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000"}
    async with asgi_client(registry_of(), transport=transport, host="0.0.0.0", explorer=True) as client:
        for path in ("/mcp", "/sse", "/messages/", "/nowhere", "/explorer/", "/explorer/tools/x/call"):
            for method in ("GET", "POST", "DELETE", "OPTIONS"):
                refused = await client.request(method, path, headers=page, json={})
                assert refused.status_code == 421, (method, path)


@pytest.mark.parametrize(
    ("allowed", "path", "origin"),
    [
        ("tools.example", "/mcp", None),
        ("tools.example", "/mcp", "http://other.example"),
        ("*", "/nowhere", "http://other.example"),
        ("*", "/explorer/", None),
    ],
)
async def test_whoever_is_refused_reads_which_option_lets_them_in(
    allowed: str, path: str, origin: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with asgi_client(registry_of(), allowed_hosts=[allowed], explorer=True) as client:
        headers = {"Host": "other.example"} | ({"Origin": origin} if origin else {})
        refused = await client.get(path, headers=headers)
    for text in (refused.text, caplog.messages[-1]):
        assert "allowed_hosts" in text
        assert "--allowed-hosts" in text
        assert "web page" in text
    assert f"(Host 'other.example', Origin {origin!r})" in caplog.messages[-1]


def test_a_server_that_others_reach_without_a_login_and_an_acl_says_so(caplog: pytest.LogCaptureFixture) -> None:
    registry = registry_of({"t.echo": echo})
    acl = ACL([ACLRule(callers=["@external"], targets=["*"], effect="allow")], default_effect="deny")
    middleware = [Middleware(lambda app: app)]
    for source, options, warnings in (
        (registry, {"host": "0.0.0.0"}, 1),
        (registry, {}, 0),
        (registry, {"host": "0.0.0.0", "middleware": middleware}, 0),
        (Executor(registry, acl=acl), {"host": "0.0.0.0"}, 0),
    ):
        caplog.clear()
        with serving(source, **options):
            told = [warning for warning in messages_logged(caplog) if "0.0.0.0" in warning]
        assert len(told) == warnings, told


@pytest.mark.parametrize("session", ["x%0ACRITICAL%20root:%20full", "x%E2%80%A8y", "x" * 5_000, "-" * 32, ""])
async def test_what_is_no_sse_session_is_refused_before_it_is_logged(
    session: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK would log it as it is: with a line break in it, a caller writes a line of the log."""
    async with asgi_client(registry_of(), transport="sse") as client:
        for query in (f"session_id={session}", f"session_id={'0' * 32}&session_id={session}", ""):
            assert (await client.post(f"/messages/?{query}", json={})).status_code == 400
        assert (await client.post(f"/messages/?session_id={'0' * 32}", json={})).status_code == 404
        assert (await client.get(f"/messages/?session_id={session}")).status_code in (400, 405)
    assert [text for text in caplog.messages if len(text) > 300 or not text.isprintable()] == []


@pytest.mark.parametrize("session", [b"x\x1b[2Jy", b"x\x85CRITICAL root: full", b"x\x7f"])
async def test_a_session_header_that_moves_the_cursor_is_refused_before_it_is_logged(
    session: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with asgi_client(registry_of()) as client:
        for method in ("POST", "GET", "DELETE"):
            refused = await client.request(method, "/mcp", json={}, headers=[(b"mcp-session-id", session)])
            assert refused.status_code == 400
        unknown = await client.post("/mcp", json={}, headers=ACCEPT | {"mcp-session-id": "0" * 32})
        assert unknown.status_code == 404
    assert [text for text in caplog.messages if not text.isprintable()] == []


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
    doors = [("GET", path) for path in ("/metrics", "/explorer/", "/explorer/tools", "/nowhere")]
    doors += [("POST", "/mcp")] if transport == "streamable-http" else [("GET", "/sse"), ("POST", "/messages/")]
    async with asgi_client(registry_of(), transport=transport, **options) as client:
        for method, path in doors:
            sent = {"json": {}} if method == "POST" else {}
            foreign = await client.request(method, path, headers={"Host": "evil.example", "X-Secret": "xyzzy"}, **sent)
            assert foreign.status_code == 421
            assert asked == []
            assert (await client.request(method, path, **sent)).status_code == 401
            assert asked.pop() == path
        for path in ("/health", "/ready"):
            assert (await client.get(path, headers={"Host": "probe.example"})).status_code == 200
        assert asked == []
        too_long = {"content": b" " * (4 * MIB + 1), "headers": {"Content-Type": "application/json"}}
        assert (await client.post(doors[-1][1], **too_long)).status_code == 401  # before its body is read
        too_long["headers"] |= {"X-Secret": "xyzzy"}
        assert (await client.post(doors[-1][1], **too_long)).status_code == 413


async def test_middleware_that_cannot_be_made_keeps_the_server_from_starting() -> None:
    middleware = [Middleware(Doorman, asked=[])]
    with pytest.raises(TypeError, match="secret"):
        async with async_serve(registry_of(), middleware=middleware):
            pass


# ---- What is too much, and what is nothing ----


def test_a_body_over_four_mebibytes_is_refused_before_it_has_ended() -> None:
    with serving(registry_of(), explorer=True) as url:
        sizes = ({"Content-Length": str(4 * MIB + 1)}, {"Transfer-Encoding": "chunked"})
        for path, size in itertools.product(("/mcp", "/explorer/tools/x/call"), sizes):
            connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port or 0, timeout=20)
            with contextlib.closing(connection):
                connection.putrequest("POST", path)
                for name, value in ({"Content-Type": "application/json"} | ACCEPT | size).items():
                    connection.putheader(name, value)
                connection.endheaders()
                if "Content-Length" not in size:  # one chunk, and no last one
                    connection.send(b"%x\r\n" % (4 * MIB + 1) + b" " * (4 * MIB + 1) + b"\r\n")
                assert connection.getresponse().status == 413, (path, size)


def test_a_body_that_is_no_request_is_told_so_and_the_server_goes_on() -> None:
    bodies = {
        b"": (-32700,),
        b"\xff": (-32700,),
        b"[" * 100_000: (-32700,),
        b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]': (-32600, -32602),
        b'{"jsonrpc":"2.0","id":1}': (-32600, -32602),
    }
    with serving(registry_of({"demo.echo": echo})) as url, httpx.Client(timeout=30) as client:
        old = call("demo.echo", {"a": 1}, HANDSHAKE) | {"headers": handshake(client, f"{url}/mcp")[1]}
        for request in (old, call("demo.echo", {"a": 1})):
            headers = request["headers"] | {"Content-Type": "application/json"}
            for body, codes in bodies.items():
                response = client.post(f"{url}/mcp", content=body, headers=headers)
                assert (response.status_code, answer(response)["error"]["code"] in codes) == (400, True), body[:50]
                assert answer(response)["id"] is None or body.startswith(b"{")
            assert answer(client.post(f"{url}/mcp", **request))["result"]["structuredContent"] == {"a": 1}


def test_a_stream_that_a_client_asks_to_resume_begins_anew() -> None:
    """Nothing is kept of a stream; a server that resumes none may leave Last-Event-ID alone (MCP, "Resumability")."""
    with serving(registry_of()) as url, httpx.Client(timeout=30) as client:
        _, session = handshake(client, f"{url}/mcp")
        resume = {"Last-Event-ID": "7"}
        with client.stream("GET", f"{url}/mcp", headers=session | resume) as stream:
            assert (stream.status_code, stream.headers["content-type"]) == (200, "text/event-stream")
            assert client.get(f"{url}/mcp", headers=session | resume).status_code == 409, "there is one already"
        assert client.get(f"{url}/mcp", headers=ACCEPT | resume).status_code == 400, "there is no session"
        assert client.get(f"{url}/mcp", headers=modern("ping")["headers"] | resume).status_code == 405


# ---- Without sessions ----


def test_stateless_servers_may_stand_behind_a_load_balancer() -> None:
    registry = registry_of({"demo.echo": echo})
    headers = ACCEPT | {"MCP-Protocol-Version": "2025-06-18"}
    with contextlib.ExitStack() as stack, httpx.Client(timeout=30) as client:
        servers = [stack.enter_context(serving(registry, stateless=True)) for _ in range(2)]
        balanced = itertools.cycle(f"{url}/mcp" for url in servers)
        begin = message("initialize", initialize_params("2025-06-18"))
        first = client.post(next(balanced), json=begin, headers=ACCEPT)
        assert answer(first)["result"]["protocolVersion"] == "2025-06-18"
        assert "mcp-session-id" not in first.headers
        for request in ({"json": message("tools/list"), "headers": headers}, modern("tools/list")):
            for _ in servers:
                [tool] = answer(client.post(next(balanced), **request))["result"]["tools"]
                assert tool["name"] == "demo.echo"
        for request in (call("demo.echo", {"a": 1}, HANDSHAKE) | {"headers": headers}, call("demo.echo", {"a": 1})):
            for _ in servers:
                result = answer(client.post(next(balanced), **request))["result"]
                assert result["structuredContent"] == {"a": 1}


# ---- How calls end ----


async def test_a_deleted_session_is_gone_and_another_is_not() -> None:
    entered, proceed = threading.Event(), asyncio.Event()

    async def wait(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        entered.set()
        await proceed.wait()
        return {"ended": True}

    async def go_on(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        proceed.set()
        return {}

    with serving(registry_of({"wait": wait, "go_on": go_on})) as url:
        endpoint = f"{url}/mcp"
        with httpx.Client(timeout=30) as opener:
            (_, mine), (_, theirs) = handshake(opener, endpoint), handshake(opener, endpoint)
        async with httpx.AsyncClient(timeout=30) as client:
            called = asyncio.create_task(client.post(endpoint, **call("wait", {}, HANDSHAKE), headers=theirs))
            assert await asyncio.to_thread(entered.wait, 20)
            assert (await client.delete(endpoint, headers=mine)).is_success
            for request in (message("ping"), message("tools/list")):
                assert (await client.post(endpoint, json=request, headers=mine)).status_code == 404
            assert (await client.delete(endpoint, headers=mine)).status_code == 404
            await client.post(endpoint, **call("go_on", {}))
            assert answer(await called)["result"]["structuredContent"] == {"ended": True}


# ---- How servers end ----

SERVER = """
def say(line):
    os.write(1, line.encode() + b"\\n")

async def file(path):
    while not Path(path).exists():
        await asyncio.sleep(0.01)

waiting = {}

@tool
async def patient(inputs, context):
    say("entered")
    if inputs["until"] not in waiting:
        waiting[inputs["until"]] = asyncio.create_task(file(inputs["until"]))
    await asyncio.shield(waiting[inputs["until"]])  # so that all calls are done at the same moment
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
    registry, max_result=0, transport=sys.argv[1], port=int(sys.argv[2]), shutdown_seconds=float(sys.argv[3]),
    explorer=True, allow_execute=True, on_startup=lambda: say("started"), on_shutdown=lambda: say("stopping"),
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
        async with asyncio.timeout(20):
            stdout, stderr = await self.process.communicate()
        assert stdout.decode().split() == ["returned"]
        assert (self.process.returncode, "Traceback" in stderr.decode()) == (0, False), stderr.decode()


@contextlib.asynccontextmanager
async def started(transport: str, grace: int) -> AsyncIterator[Program]:
    port = free_port()
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*program(SERVER, transport, str(port), str(grace)), **pipes)
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
    """And at once then, though clients keep their streams open: the time of grace is for what somebody waits for.

    Connections are refused meanwhile, so that a load balancer goes elsewhere; on those that are open, requests are.
    """
    released, later = tmp_path / "released", tmp_path / "later"
    async with started(transport, grace=60) as server, contextlib.AsyncExitStack() as stack:
        raw = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
        endpoint = f"{server.url}/mcp"
        if transport == "streamable-http":
            clients = [client_of(server.url, era) for era in (HANDSHAKE, MODERN)]
            with httpx.Client() as opener:
                _, session = handshake(opener, endpoint)
            stream = await stack.enter_async_context(raw.stream("GET", endpoint, headers=session))
        else:
            clients = [client_of(f"{server.url}/sse", HANDSHAKE)]
            stream = await stack.enter_async_context(raw.stream("GET", f"{server.url}/sse"))
        assert stream.status_code == 200
        connected = [await stack.enter_async_context(client) for client in clients]
        if transport == "streamable-http":
            await stack.enter_async_context(connected[-1].listen(tools_list_changed=True))
        for client in connected:
            await client.list_tools()  # or it would ask for the tool's output schema when the result comes
        until, last = {"until": str(released)}, {"until": str(later)}
        calls = [asyncio.create_task(client.call_tool("t.patient", until)) for client in connected * 5]
        shown = asyncio.create_task(raw.post(f"{server.url}/explorer/tools/t.patient/call", json=last))
        await server.says(*["entered"] * (len(calls) + 1))
        late_client = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
        assert (await late_client.get(f"{server.url}/health")).status_code == 200  # it keeps its connection

        server.process.send_signal(number)
        await server.says("stopping")
        if transport == "sse":
            assert (await late_client.get(f"{server.url}/sse")).status_code == 503
        else:
            for late in ({"json": message("tools/list"), "headers": session}, modern("tools/list")):
                response = await late_client.post(endpoint, **late)
                assert response.status_code == 503 or "error" in answer(response)
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", urlsplit(server.url).port))
        assert not any(call.done() for call in calls)

        released.touch()
        for answered in await asyncio.gather(*calls):
            assert answered.structured_content == until
        health = await late_client.get(f"{server.url}/health")
        assert health.status_code == 200, "a call of the Explorer is waited for too"
        ready = await late_client.get(f"{server.url}/ready")
        assert (ready.status_code, ready.text) == (503, "Not ready: the server ends")
        later.touch()
        assert (await shown).json() == {"result": last}
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

    async def end(transport: str) -> None:
        async with started(transport, grace=1) as server, contextlib.AsyncExitStack() as stack:
            raw = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
            endpoint = f"{server.url}/mcp"
            if transport == "sse":
                connected = client_of(f"{server.url}/sse", HANDSHAKE)
                await stack.enter_async_context(connected)
                pending: list[Any] = [connected.call_tool(kind, {}) for kind in kinds]
                stuck = await asyncio.to_thread(clog, server.url, "t.big")
            else:
                pending = [raw.post(endpoint, **call(kind, {})) for kind in kinds]
                stuck = await asyncio.to_thread(post_and_stop_reading, endpoint, **call("t.big", {}))
            stack.enter_context(contextlib.closing(stuck))
            calls = [asyncio.create_task(one) for one in pending]
            await server.says(*["entered"] * len(calls))
            for method in ("GET", "POST"):  # and one that never sends the rest of its request
                slow = stack.enter_context(socket.create_connection(("127.0.0.1", urlsplit(server.url).port)))
                head = f"{method} /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
                slow.sendall(f"{head}Content-Length: 9\r\n\r\n{{".encode())
            for _ in range(5):  # round trips behind which the server has seen all of that
                assert (await raw.get(f"{server.url}/health")).status_code == 200
            server.process.send_signal(signal.SIGTERM)
            await server.says("stopping")
            async with asyncio.timeout(20):
                await asyncio.gather(*calls, return_exceptions=True)  # none is left waiting
            await server.ends_in_order()

    for failure in await asyncio.gather(end("streamable-http"), end("sse"), return_exceptions=True):
        if failure is not None:
            raise failure


@pytest.mark.skipif(version("mcp").startswith("2.1."), reason="this SDK has no limit")
async def test_a_client_that_would_open_one_session_too_many_is_told_so_until_another_has_ended() -> None:
    hello = message("initialize", initialize_params("2025-11-25"))
    async with asgi_client(registry_of(), max_sessions=1) as client:
        opened = await client.post("/mcp", json=hello, headers=ACCEPT)
        refused = await client.post("/mcp", json=hello, headers=ACCEPT)
        assert (opened.status_code, refused.status_code) == (200, 503)
        assert answer(refused)["error"]["message"] == "Too many open sessions"
        assert (await client.post("/mcp", **modern("tools/list"))).status_code == 200
        await client.delete("/mcp", headers={"Mcp-Session-Id": opened.headers["mcp-session-id"]})
        assert (await client.post("/mcp", json=hello, headers=ACCEPT)).status_code == 200


def test_a_session_in_which_nothing_is_said_ends_after_the_seconds_that_it_may_be_idle() -> None:
    async def story(clock: Clock) -> None:
        async with asgi_client(registry_of(), session_idle_seconds=60) as client:
            hello = message("initialize", initialize_params("2025-11-25"))
            opened = await client.post("/mcp", json=hello, headers=ACCEPT)
            headers = {**ACCEPT, "Mcp-Session-Id": opened.headers["mcp-session-id"]}
            for seconds, status in ((50, 200), (70, 404)):
                await clock.put_forward(seconds)
                assert (await client.post("/mcp", json=message("ping"), headers=headers)).status_code == status

    with_clock(story)


async def test_idle_sessions_have_ended_before_the_sdk_cancels_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """It cancels them all at once, which takes the square of their number: with 5,000 sessions, 13 seconds."""
    caplog.set_level(logging.INFO, logger="mcp.server")
    hello = message("initialize", initialize_params("2025-11-25"))
    async with asgi_client(registry_of()) as client:
        opened = [await client.post("/mcp", json=hello, headers=ACCEPT) for _ in range(3)]
        caplog.clear()
    expected = {f"Terminating session: {response.headers['mcp-session-id']}" for response in opened}
    *ended, cancelled = caplog.messages
    assert (set(ended), cancelled) == (expected, "StreamableHTTP session manager shutting down")


# ---- Health ----


@pytest.mark.skipif(version("mcp").startswith("2.1."), reason="this SDK has no limit")
async def test_a_server_is_ready_while_a_session_is_free() -> None:
    hello = message("initialize", initialize_params("2025-11-25"))
    async with asgi_client(registry_of(), max_sessions=1) as client:
        before = await client.get("/ready")
        opened = await client.post("/mcp", json=hello, headers=ACCEPT)
        full = await client.get("/ready")
        assert (await client.get("/health")).status_code == 200
        await client.delete("/mcp", headers={"Mcp-Session-Id": opened.headers["mcp-session-id"]})
        after = await client.get("/ready")
    said = [(response.status_code, response.text) for response in (before, full, after)]
    assert said == [(200, "Ready"), (503, "Not ready: 1 sessions are open"), (200, "Ready")]


async def test_a_server_is_ready_while_a_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("apcore_mcp.web.THREADS_MAX", 1)
    gate = Gate()

    def block(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        gate.enter()
        return {}

    async with asgi_client(registry_of({"block": block})) as client:
        assert (await client.get("/ready")).status_code == 200
        calling = asyncio.create_task(client.post("/mcp", **call("block", {})))
        await gate.entered()
        full = await client.get("/ready")
        gate.open()
        assert (await calling).status_code == 200
    assert (full.status_code, full.text) == (503, "Not ready: 1 threads run modules")


@pytest.mark.requirement("FR-HEALTH-001", "FR-HEALTH-002", "FR-SERVER-006")
@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_health_tells_how_much_is_served_and_since_when(transport: str) -> None:
    registry = registry_of()
    async with asgi_client(registry, transport=transport, version="7.1" if transport == "sse" else None) as client:
        response = await client.get("/health")
        registry.register("t.one", FunctionalModule(echo))
        first, second = response.json(), (await client.get("/health")).json()
        assert (await client.post("/health", json={})).status_code == 405
    assert (response.status_code, response.headers["content-type"]) == (200, "application/json")
    version = "7.1" if transport == "sse" else __version__
    assert 0 <= first.pop("uptime_seconds") < second.pop("uptime_seconds")
    assert first == {"status": "ok", "module_count": 0, "tools_count": 0, "version": version}
    assert second == {"status": "ok", "module_count": 1, "tools_count": 1, "version": version}


# ---- Metrics ----

SUCCESS = 'apcore_module_calls_total{module_id="t.echo",status="success"} '
FAILURE = 'apcore_module_calls_total{module_id="t.fail",status="error"} '


async def test_metrics_count_the_calls_of_each_module() -> None:
    registry = registry_of({"t.echo": echo, "t.fail": lambda inputs, context: 1 / 0})
    async with asgi_client(registry, metrics_collector=MetricsCollector()) as client:
        assert "apcore_module" not in (await client.get("/metrics")).text
        for name in ("t.echo", "t.echo", "t.fail"):
            await client.post("/mcp", **call(name, {}))
        response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert {SUCCESS + "2", FAILURE + "1"} <= set(response.text.splitlines())
    assert 'apcore_module_duration_seconds_count{module_id="t.echo"} 2\n' in response.text


def test_any_object_that_exports_can_be_the_collector_and_when_it_fails_nobody_is_told_why() -> None:
    class Exporter:
        page = "up 1\n"

        def export_prometheus(self) -> str:
            if not self.page:
                raise OSError("/var/lib/metrics")
            return self.page

    exporter = Exporter()
    with serving(registry_of(), metrics_collector=exporter) as url:
        assert httpx.get(f"{url}/metrics").text.startswith("up 1\n")
        exporter.page = ""
        response = httpx.get(f"{url}/metrics")
        assert (response.status_code, response.text) == (500, "Internal Server Error")
        assert httpx.get(f"{url}/health").status_code == 200


async def test_metrics_that_are_asked_for_count_the_calls_of_an_executor_too() -> None:
    """Whatever feeds a collector of the Executor's own."""
    own = MetricsCollector()
    for middlewares in ([], [MetricsMiddleware(own)]):
        executor = Executor(registry_of({"t.echo": echo}), middlewares=middlewares)
        for _ in range(2):
            async with asgi_client(executor, metrics_collector=True) as client:
                await client.post("/mcp", **call("t.echo", {}))
                assert SUCCESS + "1" in (await client.get("/metrics")).text.splitlines()
    async with asgi_client(executor, metrics_collector=own) as client:  # which it is fed once by the Executor
        await client.post("/mcp", **call("t.echo", {}))
        assert SUCCESS + "3" in (await client.get("/metrics")).text.splitlines()


async def test_an_executor_counts_calls_only_while_a_server_that_was_asked_to_runs() -> None:
    """Two servers that never start leave nothing on the user's Executor, nor does one that has ended."""
    executor = Executor(registry_of({"t.echo": echo}))
    for _ in range(2):
        MCPServer(executor, metrics_collector=True)
    assert executor.middlewares == []
    async with asgi_client(executor, metrics_collector=True):
        assert len(executor.middlewares) == 1
    assert executor.middlewares == []


async def test_a_disabled_module_is_listed_and_says_what_it_is() -> None:
    """apcore's registry keeps it, and tells nobody who has only the Executor when it is disabled and enabled."""
    toggled = ToggleState()
    executor = Executor(registry_of({"image.resize": echo}), toggle_state=toggled)
    async with connect(executor) as client:
        for disabled in (False, True, False):
            (toggled.disable if disabled else toggled.enable)("image.resize")
            assert [tool.name for tool in (await client.list_tools()).tools] == ["image.resize"]
            result = await client.call_tool("image.resize", {"a": 1})
            assert text_of(result) == ("Module is disabled: image.resize" if disabled else '{"a":1}')


def test_an_answer_that_is_being_read_when_the_server_ends_is_read_to_its_end() -> None:
    """A client that takes a second for what fits into no buffer loses nothing."""
    text = "x" * 24_000_000
    registry = registry_of({"big": FunctionalModule(lambda inputs, context: {"text": text}, documentation=text)})
    port, ended = free_port(), threading.Event()
    options: Any = {"transport": "streamable-http", "port": port, "explorer": True, "allow_execute": True}
    server = MCPServer(registry, **options, max_result=0)
    server.start()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20)) for _ in range(2)]
        for client, line in zip(clients, ("GET /explorer/tools/big", "POST /explorer/tools/big/call"), strict=True):
            head = f"{line} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
            client.sendall(f"{head}Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        received = [len(client.recv(65_536)) for client in clients]
        server.stop()
        threading.Thread(target=lambda: (server.wait(), ended.set()), daemon=True).start()
        for number, client in enumerate(clients):
            while data := client.recv(65_536):
                received[number] += len(data)
                ended.wait(0.002)  # the pace of the client
    assert min(received) > len(text)
    assert ended.wait(15)


def test_middleware_that_hangs_does_not_keep_the_server_for_ever() -> None:
    entered = threading.Event()

    def hanging(app: Any) -> Any:
        async def hang(scope: Any, receive: Any, send: Any) -> None:
            entered.set()
            await asyncio.Event().wait()

        return hang

    options: dict[str, Any] = {"middleware": [Middleware(hanging)], "shutdown_seconds": 0.1}
    with contextlib.ExitStack() as stack, serving(registry_of(), **options) as url:
        client = stack.enter_context(socket.create_connection(("127.0.0.1", urlsplit(url).port)))
        client.sendall(b"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert entered.wait(20)


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
