"""The HTTP transports: who is let in, what is refused before anything runs, how servers end; F-021, F-022."""

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
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from apcore import Executor
from apcore.observability import MetricsCollector, MetricsMiddleware
from apcore.sys_modules.control import ToggleState
from conftest import (
    HANDSHAKE,
    MODERN,
    Clock,
    FunctionalModule,
    RawClient,
    client_of,
    connect,
    echo,
    free_port,
    program,
    registry_of,
    serving,
)
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from support import (
    ACCEPT,
    ENDLESS,
    Gate,
    answer,
    asgi_client,
    clog,
    ended_well,
    handshake,
    initialize_params,
    listed,
    message,
    modern,
    on_clock,
    text_of,
    wait_for_stderr,
)

from apcore_mcp import MCPServer, __version__, async_serve
from apcore_mcp.options import options_of
from apcore_mcp.web import _refusal

MIB = 1024 * 1024


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
            old = call("demo.echo", {"a": 1}, HANDSHAKE) | {"headers": session}
            for request in (old, call("demo.echo", {"a": 1})):
                told = answer(client.post(endpoint, **request))
                assert told["result"]["structuredContent"] == {"a": 1}


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_other_paths_and_methods_are_refused(transport: str) -> None:
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
    async with async_serve(registry_of(), transport="sse", explorer=True) as app:
        client = TestClient(app, headers={"Host": "127.0.0.1"})
        for path in ("/messages/", "/explorer/"):
            with pytest.raises(WebSocketDisconnect), client.websocket_connect(path):
                pass


@pytest.mark.requirement("FR-TRANSPORT-003")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux answers on all of 127.0.0.0/8")
def test_the_host_is_where_it_listens() -> None:
    for host, refused in (("127.0.0.1", pytest.raises(ConnectionRefusedError)), ("0.0.0.0", contextlib.nullcontext())):
        with serving(registry_of(), host=host) as url, refused:
            socket.create_connection(("127.0.0.2", urlsplit(url).port), timeout=10).close()


def test_answers_are_sent_at_once() -> None:
    """And not held back until the client acknowledges what came before, which takes it 40 ms."""
    with serving(registry_of({"a.b": echo})) as url, httpx.Client(base_url=url) as client:
        address = client.get("/health").extensions["network_stream"].get_extra_info("client_addr")
        accepted = []
        for each in [each for each in gc.get_objects() if isinstance(each, socket.socket)]:
            with contextlib.suppress(OSError):  # one that listens, or is closed, has no peer
                accepted += [each] if each.getpeername() == address else []
        assert [bool(each.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) for each in accepted] == [True]


def test_it_listens_on_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with serving(registry_of(), host="::1") as url:
        assert httpx.get(f"http://[::1]:{urlsplit(url).port}/health").status_code == 200


@pytest.mark.requirement("FR-SERVER-003")
async def test_sse_works_with_the_official_client() -> None:
    with serving(registry_of({"demo.echo": echo}), transport="sse") as url:
        async with client_of(f"{url}/sse", HANDSHAKE) as client:
            assert client.server_capabilities.tools.list_changed is True
            assert await listed(client) == ["demo.echo"]
            assert (await client.call_tool("demo.echo", {"a": 1})).structured_content == {"a": 1}


# ---- Many clients ----


@pytest.mark.requirement("NFR-PERF-004")
async def test_twenty_clients_are_served_at_once() -> None:
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

LOOPBACK = (
    "localhost:1 LOCALHOST 127.0.0.1:8000 [::1]:1 192.0.2.1:1",  # an address is no name that is rebound
    "",
    "evil.example 127.0.0.1.evil.example localhost.evil.example:8000 a@localhost localhost:x 2130706433:1",
)
HOSTS: dict[str, tuple[dict[str, Any], str, str, str]] = {  # whom pages and programs, programs alone, nobody may name
    "names": (
        {"host": "MyBox", "allowed_hosts": ["tools.example", "wild.example:*", "port.example:8443"]},
        "mybox:8000 Tools.Example wild.example:1234 wild.example port.example:8443 127.0.0.1:8000",
        "",
        "any.example tools.example:8000 wild.example.evil.example:1234 port.example:8444",
    ),
    "names-on-all-interfaces": (
        {"host": "0.0.0.0", "allowed_hosts": ["Tools.example"]},
        "tools.example 0.0.0.0:8000",
        "",
        "evil.example",
    ),
    "any-name": ({"allowed_hosts": ["*", "tools.example"]}, "tools.example localhost:8000", "any.example:8000", ""),
    "wildcards": (
        {"allowed_hosts": ["*:*", "*.tools.example:*", "*e*", "????.example", "[a-z]*"]},
        "",
        "any.example:8000 a.tools.example evil.example",
        "",
    ),
    "one-domain": ({"allowed_hosts": ["*.tools.example"]}, "", "a.tools.example", "any.example"),
    "the-name-listened-on": ({"host": "MyBox"}, "mybox:8000", "any.example", ""),
    "all-interfaces": (
        {"host": "0.0.0.0"},
        "192.0.2.1:1 [fe80::1%25eth0]:1",
        "any.example:1 192.0.2.1.example localhost.",
        "a@localhost any.example/x",
    ),
    **{host: ({"host": host}, *LOOPBACK) for host in "127.0.0.1 Localhost 127.0.0.2 ::1 0:0:0:0:0:0:0:1".split()},
}


@pytest.mark.parametrize("name", HOSTS)
def test_host_and_allowed_hosts_say_which_names_are_accepted(name: str) -> None:
    """A page may only use a name that is spelt out: any other could be its own, made to resolve to this server."""
    options, open_to_pages, open_to_programs, closed = HOSTS[name]
    for hosts, programs, pages in ((open_to_pages, None, None), (open_to_programs, None, 421), (closed, 421, 421)):
        for host in hosts.split():
            assert refused({"host": host}, **options) == programs, host
            assert refused({"host": host, "origin": f"https://{host}"}, **options) == pages, host
            assert refused({"host": host}, is_page=True, **options) == pages, host


def refused(headers: dict[str, Any], is_page: bool = False, **options: Any) -> int | None:
    """The status that a POST with these headers is refused with; a list is sent as so many headers."""
    sent = {"host": "127.0.0.1:8000", "content-type": "application/json", **headers}
    scope: dict[str, Any] = {"type": "http", "method": "POST", "query_string": b"", "headers": []}
    for name, values in sent.items():
        for value in [values] if isinstance(values, str) else values:
            scope["headers"].append((name.encode(), value.encode("latin-1")))
    response = _refusal(scope, options_of("serve()", registry_of(), transport="sse", **options), is_page)
    return None if response is None else response.status_code


OWN, EVIL = "http://127.0.0.1:8000", "http://evil.example"
HEADERS: dict[str, tuple[dict[str, Any], int | None]] = {
    "no-host": ({"host": ""}, 421),
    "own-origin": ({"origin": OWN}, None),
    "own-behind-tls": ({"origin": "https://127.0.0.1:8000"}, None),
    "own-in-capitals": ({"host": "LOCALHOST:8000", "origin": "HTTP://LocalHost:8000"}, None),
    "both-its-own": ({"origin": [OWN, "https://127.0.0.1:8000"]}, None),
    "one-of-them-foreign": ({"origin": [OWN, EVIL]}, 403),
    "other-port-of-the-address": ({"origin": "http://127.0.0.1:1"}, 403),
    "without-the-port": ({"origin": "http://127.0.0.1"}, 403),
    "foreign-origin": ({"origin": EVIL}, 403),
    "begins-like-ours": ({"origin": f"{OWN}.evil.example"}, 403),
    "opaque-origin": ({"origin": "null"}, 403),
    "text-plain": ({"content-type": "text/plain"}, 415),
    "form": ({"content-type": "application/x-www-form-urlencoded"}, 415),
    "begins-like-json": ({"content-type": "application/jsonx"}, 415),
    "json-with-charset": ({"content-type": "Application/JSON; charset=utf-8"}, None),
    "cursor-moved": ({"mcp-session-id": "x\x1b[2Jy"}, 400),
    "another-line": ({"mcp-session-id": "x\x85CRITICAL root: full"}, 400),
    "deleted": ({"mcp-session-id": "x\x7f"}, 400),
    "session": ({"mcp-session-id": "0" * 200}, None),
    "too-long-a-session": ({"mcp-session-id": "0" * 201}, 400),
}


@pytest.mark.parametrize(("headers", "status"), HEADERS.values(), ids=HEADERS)
def test_headers_decide_who_is_let_in(headers: dict[str, Any], status: int | None) -> None:
    assert refused(headers) == status


async def test_who_is_refused_has_run_nothing_and_reads_why(caplog: pytest.LogCaptureFixture) -> None:
    ran: list[str] = []

    async def note(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        ran.append(inputs["by"])
        return {}

    cases = [({}, 200, ""), ({"Origin": "http://127.0.0.1:8000"}, 200, "")]
    cases += [({"Host": "evil.example"}, 421, "Invalid Host"), ({"Origin": EVIL}, 403, "Invalid Origin")]
    cases += [({"Content-Type": "text/plain"}, 415, "Content-Type must be"), ({"Mcp-Session-Id": " "}, 400, "Invalid")]
    async with asgi_client(registry_of({"demo.note": note}), explorer=True, allowed_hosts=["*.example.com"]) as client:
        for headers, status, reason in cases:
            posted = call("demo.note", {"by": str(headers)})
            response = await client.post("/mcp", **posted | {"headers": posted["headers"] | headers})
            assert response.status_code == status, headers
            assert "access-control-allow-origin" not in response.headers
            assert response.text.startswith(reason)
        for path in ("/health", "/ready"):  # whoever probes may know no name
            assert (await client.get(path, headers={"Host": "evil.example", "Origin": EVIL})).status_code == 200
        caplog.clear()
        for path, headers in (("/mcp", {}), ("/nowhere", {"Origin": EVIL}), ("/explorer/", {})):
            response = await client.get(path, headers={"Host": "evil.example", **headers})
            assert response.status_code == 421
            for text in (response.text, caplog.messages[-1]):  # the option that lets them in
                assert "allowed_hosts (--allowed-hosts)" in text
                assert "web page" in text
            assert f"(Host 'evil.example', Origin {headers.get('Origin')!r})" in caplog.messages[-1]
    assert ran == [str(headers) for headers, status, _ in cases if status == 200]


@pytest.mark.parametrize("mounted", ["", "/agents", "/explorer"])
async def test_the_explorer_is_a_page_wherever_it_is_mounted(mounted: str) -> None:
    """The server may be open to programs under any name; what its page loads carries no Origin."""
    options = {"explorer": True, "allow_execute": True, "allowed_hosts": ["*", "tools.example"]}
    async with asgi_client(registry_of({"t.echo": echo}), mounted=mounted, **options) as client:
        for host, status in (("evil.example", 421), ("tools.example", 200), ("127.0.0.1", 200)):
            named = {"Host": host}
            assert (await client.get("/health", headers=named)).status_code == 200
            for path in ("", "server", "tools", "tools/t.echo", "%74ools"):
                assert (await client.get(f"/explorer/{path}", headers=named)).status_code == status, (host, path)
            called = await client.post("/explorer/tools/t.echo/call", json={}, headers=named)
            assert called.status_code == status


async def test_what_is_no_session_never_gets_into_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """The SDK would log it as it is: with a line break in it, a caller writes a line of the log."""
    caplog.set_level(logging.INFO)
    good, *bad = "0" * 32, "x%0ACRITICAL%20root:%20full", "x%E2%80%A8y", "x" * 5_000, "-" * 32, ""
    async with asgi_client(registry_of(), transport="sse") as client:
        for session, status in ((good, 404), *((each, 400) for each in bad)):
            for query in (f"session_id={session}", f"session_id={good}&session_id={session}"):
                assert (await client.post(f"/messages/?{query}", json={})).status_code == status
            assert (await client.get(f"/messages/?session_id={session}")).status_code in (400, 405)
    async with asgi_client(registry_of()) as client:
        for method in ("POST", "GET", "DELETE"):
            moved = await client.request(method, "/mcp", json={}, headers=[(b"mcp-session-id", b"x\x1b[2Jy")])
            assert moved.status_code == 400
    assert [text for text in caplog.messages if not text.isprintable()] == []


# ---- Middleware of the user's ----


def doorman(app: Any, secret: str, asked: list[str]) -> Any:
    """Starlette middleware that lets in who knows the secret, and notes every path that was asked for."""

    async def let_in(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        known = (b"x-secret", secret.encode()) in scope["headers"]
        await (app if known else PlainTextResponse("Who are you?", 401))(scope, receive, send)

    return let_in


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_middleware_stands_at_every_door_and_behind_the_guard(transport: str) -> None:
    asked: list[str] = []
    middleware = [Middleware(doorman, secret="xyzzy", asked=asked)]
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
        too_long["headers"] |= {"Host": "evil.example"}
        assert (await client.post(doors[-1][1], **too_long)).status_code == 421
        del too_long["headers"]["Host"]
        too_long["headers"] |= {"X-Secret": "xyzzy"}
        assert (await client.post(doors[-1][1], **too_long)).status_code == 413


async def test_middleware_that_cannot_be_made_keeps_the_server_from_starting() -> None:
    middleware = [Middleware(doorman, asked=[])]
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
        for request in (call("demo.echo", {"a": 1}, HANDSHAKE) | {"headers": headers}, call("demo.echo", {"a": 1})):
            for _ in servers:
                result = answer(client.post(next(balanced), **request))["result"]
                assert result["structuredContent"] == {"a": 1}


# ---- How servers end ----

SERVER = f"""
{ENDLESS}
serve(
    registry, max_result=0, transport=sys.argv[1], port=int(sys.argv[2]), shutdown_seconds=float(sys.argv[3]),
    explorer=True, allow_execute=True, on_shutdown=lambda: tell("stopping"),
)
tell("returned")
"""


class Program(RawClient):
    """`SERVER` in a process of its own."""

    def __init__(self, transport: str, grace: int) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        super().__init__(program(SERVER, transport, str(port), str(grace)))

    async def says(self, words: str, times: int = 1) -> None:
        """Wait until it has said so many lines with these words."""
        for _ in range(times):
            await asyncio.to_thread(wait_for_stderr, self, words)

    async def ends_in_order(self) -> None:
        await self.says("returned")
        await asyncio.to_thread(ended_well, self)


@pytest.mark.requirement("NFR-REL-001")
@pytest.mark.parametrize(("transport", "number"), [("streamable-http", signal.SIGINT), ("sse", signal.SIGTERM)])
async def test_a_signal_ends_the_server_once_running_calls_are_answered(
    transport: str, number: signal.Signals, tmp_path: Path
) -> None:
    """And at once then, though clients keep their streams open. Meanwhile connections and requests are refused."""
    released, later = tmp_path / "released", tmp_path / "later"
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(Program(transport, grace=60))
        await server.says("server started")
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
        until, last = {"gate": str(released)}, {"gate": str(later)}
        calls = [asyncio.create_task(client.call_tool("t.gate", until)) for client in connected * 5]
        shown = asyncio.create_task(raw.post(f"{server.url}/explorer/tools/t.gate/call", json=last))
        await server.says("running", len(calls) + 1)
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
            assert answered.structured_content == {"done": True}
        health = await late_client.get(f"{server.url}/health")
        assert health.status_code == 200, "a call of the Explorer is waited for too"
        ready = await late_client.get(f"{server.url}/ready")
        assert (ready.status_code, ready.text) == (503, "Not ready: the server ends")
        later.touch()
        assert (await shown).json() == {"result": {"done": True}}
        await server.ends_in_order()


def post_and_stop_reading(url: str, **request: Any) -> socket.socket:
    """A client that has read the first of the 20 MB it posted for, and reads no more."""
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
@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_what_has_no_end_holds_the_exit_for_the_grace_period(transport: str, tmp_path: Path) -> None:
    """Coroutines, also one that will not be cancelled, a thread, an answer that is not read, unfinished requests."""
    kinds, never = ["t.gate", "t.stuck", "t.deaf"], {"gate": str(tmp_path / "never")}
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(Program(transport, grace=1))
        await server.says("server started")
        raw = await stack.enter_async_context(httpx.AsyncClient(timeout=30))
        endpoint = f"{server.url}/mcp"
        if transport == "sse":
            connected = client_of(f"{server.url}/sse", HANDSHAKE)
            await stack.enter_async_context(connected)
            pending: list[Any] = [connected.call_tool(kind, never) for kind in kinds]
            stuck = await asyncio.to_thread(clog, server.url, "t.big")
        else:
            pending = [raw.post(endpoint, **call(kind, never)) for kind in kinds]
            stuck = await asyncio.to_thread(post_and_stop_reading, endpoint, **call("t.big", {}))
        stack.enter_context(contextlib.closing(stuck))
        calls = [asyncio.create_task(one) for one in pending]
        await server.says("running", len(calls) + 1)
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


HELLO = {"json": message("initialize", initialize_params("2025-11-25")), "headers": ACCEPT}


@pytest.mark.skipif(version("mcp").startswith("2.1."), reason="this SDK has no limit")
async def test_one_session_too_many_is_refused_until_another_has_ended() -> None:
    """The server is not ready meanwhile. Who has no session needs no place, and the other session goes on."""

    async def ready() -> tuple[int, str]:
        response = await client.get("/ready")
        return response.status_code, response.text

    async with asgi_client(registry_of(), max_sessions=2) as client:
        opened = [await client.post("/mcp", **HELLO)]
        assert await ready() == (200, "Ready")
        opened.append(await client.post("/mcp", **HELLO))
        too_many = await client.post("/mcp", **HELLO)
        assert ([each.status_code for each in opened], too_many.status_code) == ([200, 200], 503)
        assert answer(too_many)["error"]["message"] == "Too many open sessions"
        assert await ready() == (503, "Not ready: 2 sessions are open")
        assert (await client.get("/health")).status_code == 200
        assert (await client.post("/mcp", **modern("tools/list"))).status_code == 200
        mine, theirs = (ACCEPT | {"Mcp-Session-Id": each.headers["mcp-session-id"]} for each in opened)
        assert (await client.delete("/mcp", headers=mine)).is_success
        assert (await client.delete("/mcp", headers=mine)).status_code == 404
        for session, status in ((mine, 404), (theirs, 200)):
            assert (await client.post("/mcp", json=message("ping"), headers=session)).status_code == status
        assert await ready() == (200, "Ready")
        assert (await client.post("/mcp", **HELLO)).status_code == 200


IDLE: list[tuple[dict[str, Any], int]] = [({"session_idle_seconds": 60}, 60), ({}, 30 * 60)]


@pytest.mark.parametrize(("options", "limit"), IDLE, ids=["a-minute", "half-an-hour-by-default"])
@on_clock
async def test_a_session_in_which_nothing_is_said_ends(clock: Clock, options: dict[str, Any], limit: int) -> None:
    async with asgi_client(registry_of(), **options) as client:
        opened = await client.post("/mcp", **HELLO)
        session = ACCEPT | {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
        for share, status in ((0.8, 200), (0.8, 200), (1.1, 404)):
            await clock.put_forward(share * limit)
            assert (await client.post("/mcp", json=message("ping"), headers=session)).status_code == status


async def test_sessions_end_one_by_one_before_the_sdk_cancels(caplog: pytest.LogCaptureFixture) -> None:
    """It cancels them all at once, which takes the square of their number: with 5,000 sessions, 13 seconds."""
    caplog.set_level(logging.INFO, logger="mcp.server")
    async with asgi_client(registry_of()) as client:
        opened = [await client.post("/mcp", **HELLO) for _ in range(3)]
        caplog.clear()
    expected = {f"Terminating session: {response.headers['mcp-session-id']}" for response in opened}
    *ended, cancelled = caplog.messages
    assert (set(ended), cancelled) == (expected, "StreamableHTTP session manager shutting down")


# ---- Health ----


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
@pytest.mark.parametrize(("transport", "version"), [("streamable-http", None), ("sse", "7.1")])
async def test_health_tells_how_much_is_served_and_since_when(transport: str, version: str | None) -> None:
    registry = registry_of()
    async with asgi_client(registry, transport=transport, version=version) as client:
        ages = []
        for count in (0, 1):
            response = await client.get("/health")
            assert response.headers["content-type"] == "application/json"
            told = response.json()
            ages.append(told.pop("uptime_seconds"))
            counts = {"module_count": count, "tools_count": count}
            assert told == {"status": "ok", **counts, "version": version or __version__}
            if not count:
                registry.register("t.one", FunctionalModule(echo))
        assert (await client.post("/health", json={})).status_code == 405
    assert 0 <= ages[0] < ages[1]


# ---- Metrics ----

SUCCESS = 'apcore_module_calls_total{module_id="t.echo",status="success"} '
FAILURE = 'apcore_module_calls_total{module_id="t.fail",status="error"} '


async def test_metrics_count_calls_outcomes_and_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe that is told "not ready" is not refused."""
    monkeypatch.setattr("apcore_mcp.web.THREADS_MAX", 0)
    registry = registry_of({"t.echo": echo, "t.fail": lambda inputs, context: 1 / 0})
    async with asgi_client(registry, metrics_collector=MetricsCollector(), max_sessions=1) as client:
        assert "apcore_module" not in (await client.get("/metrics")).text
        for name in ("t.echo", "t.echo", "t.fail"):
            await client.post("/mcp", **call(name, {}))
        answers = [await client.post("/mcp", **HELLO), await client.post("/mcp", **HELLO), await client.get("/ready")]
        answers += [await client.get("/nowhere"), await client.get("/mcp", headers={"Host": "evil@example.com"})]
        assert [answer.status_code for answer in answers] == [200, 503, 503, 404, 421]
        response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    duration = 'apcore_module_duration_seconds_count{module_id="t.echo"} 2'
    counted = {"sessions": 1, "calls_running": 0, 'calls_total{outcome="ok"}': 2}
    counted['calls_total{outcome="MODULE_EXECUTE_ERROR"}'] = 1
    counted |= {f'requests_refused_total{{status="{status}"}}': 1 for status in (503, 404, 421)}
    lines = {f"apcore_mcp_{name} {number}" for name, number in counted.items()}
    assert lines | {SUCCESS + "2", FAILURE + "1", duration} <= {*response.text.splitlines()}


def test_any_object_that_exports_can_be_the_collector() -> None:
    """When it fails, as this one does the second time, nobody is told why."""
    exporter = SimpleNamespace(export_prometheus=["up 1\n"].pop)
    with serving(registry_of(), metrics_collector=exporter) as url:
        assert httpx.get(f"{url}/metrics").text.startswith("up 1\n")
        response = httpx.get(f"{url}/metrics")
        assert (response.status_code, response.text) == (500, "Internal Server Error")


async def test_metrics_of_an_executor_are_counted_while_a_server_runs() -> None:
    """Whatever feeds a collector of the Executor's own; servers that never start or have ended leave nothing on it."""
    own = MetricsCollector()
    for middlewares in ([], [MetricsMiddleware(own)]):
        executor = Executor(registry_of({"t.echo": echo}), middlewares=[*middlewares])
        for _ in range(2):
            MCPServer(executor, metrics_collector=True)
            assert executor.middlewares == middlewares
            async with asgi_client(executor, metrics_collector=True) as client:
                await client.post("/mcp", **call("t.echo", {}))
                assert SUCCESS + "1" in (await client.get("/metrics")).text.splitlines()
            assert executor.middlewares == middlewares
    async with asgi_client(executor, metrics_collector=own) as client:  # which it is fed once by the Executor
        await client.post("/mcp", **call("t.echo", {}))
        assert SUCCESS + "3" in (await client.get("/metrics")).text.splitlines()


async def test_a_disabled_module_is_listed_and_says_so() -> None:
    """apcore's registry keeps it, and tells nobody who has only the Executor when it is disabled and enabled."""
    toggled = ToggleState()
    async with connect(Executor(registry_of({"image.resize": echo}), toggle_state=toggled)) as client:
        for toggle, told in ((toggled.disable, "Module is disabled: image.resize"), (toggled.enable, '{"a":1}')):
            toggle("image.resize")
            assert await listed(client) == ["image.resize"]
            assert text_of(await client.call_tool("image.resize", {"a": 1})) == told


def test_a_slow_reader_gets_its_whole_answer_from_a_server_that_ends() -> None:
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


@pytest.mark.timeout(20)
def test_a_body_that_never_ends_keeps_no_server() -> None:
    with contextlib.ExitStack() as stack, serving(registry_of(), shutdown_seconds=300) as url:
        client = stack.enter_context(socket.create_connection(("127.0.0.1", urlsplit(url).port)))
        head = b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
        client.sendall(head + b"{")
        assert httpx.get(f"{url}/health").status_code == 200  # behind which the server has seen that


def test_middleware_that_hangs_keeps_no_server() -> None:
    entered = threading.Event()

    async def hang(*_: Any) -> None:
        entered.set()
        await asyncio.Event().wait()

    options: dict[str, Any] = {"middleware": [Middleware(lambda app: hang)], "shutdown_seconds": 0.1}
    with contextlib.ExitStack() as stack, serving(registry_of(), **options) as url:
        client = stack.enter_context(socket.create_connection(("127.0.0.1", urlsplit(url).port)))
        client.sendall(b"GET /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert entered.wait(20)
