"""HTTP: the Starlette app of a bridge, who may come in, and a server for it.

It plugs into ASGI: `core.py` loads it for every transport but stdio. What a client is told, the bridge decides; here,
a request is let in or refused, by its headers alone and before its body is read.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from fnmatch import fnmatchcase
from typing import Any

import uvicorn
from anyio import CancelScope
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.sse import SseServerTransport
from mcp.server.streamable_http_manager import StreamableHTTPASGIApp, StreamableHTTPSessionManager
from mcp.server.transport_security import DEFAULT_MAX_REQUEST_BODY_SIZE, RequestBodyLimitMiddleware
from starlette.applications import Starlette
from starlette.datastructures import Headers, QueryParams
from starlette.middleware import Middleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from . import __version__
from .client import caller_of
from .core import Bridge, logger
from .execution import THREADS_MAX, busy_threads
from .options import Options, address_of

# A Host header, which is no more than a host and a port: the host of "a@b" would be b.
_HOST = re.compile(r"(\[[\w:.%]+\]|[\w.-]*)(:\d+)?", re.ASCII)
_SESSION_ID = re.compile(r"[!-~]{0,200}")  # the characters are MCP's; the SDK's own ids have 32 of them


def _is_allowed(host: str, options: Options, is_page: bool) -> bool:
    """Whether a request may name `host`, a Host header in lower case.

    A program may name an IP address, `localhost`, the host that the server listens on, or what a pattern of
    `allowed_hosts` matches, where `*` is any text and `:*` any port or none. Without patterns, it may name anything
    where others than this machine can reach the server. A web page may name the first three, or a name that is spelt
    out: the owner of any other can make it resolve to this server while a page of it is open, and the browser takes
    both for one site (DNS rebinding). No address can be rebound."""
    parts = _HOST.fullmatch(host)
    if parts is None:
        return False
    name = parts[1]
    if name in ("localhost", options.host.lower()) or address_of(name):
        return True
    if not options.allowed_hosts and not is_page and options.is_public:
        return True
    for pattern in options.allowed_hosts or ():
        named = name if pattern.endswith(":*") else host
        wanted = pattern.removesuffix(":*").lower()
        if named == wanted or (not is_page and fnmatchcase(named, wanted)):
            return True
    return False


def _guard(app: ASGIApp, options: Options, *, is_page: bool = False) -> ASGIApp:
    """ASGI middleware: refuse requests whose host is not allowed, by their headers alone. With `is_page`, all requests
    come from web pages, as browsers send no Origin with what a page loads from its own host."""

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":  # a WebSocket: no route is one
            await app(scope, receive, send)
            return
        answer = _refusal(scope, options, is_page) or app
        # Without an event store, the SDK gives no response at all to a client that wants to resume a stream: it gets a
        # new one, as MCP allows.
        scope = {**scope, "headers": [each for each in scope["headers"] if each[0] != b"last-event-id"]}
        await answer(scope, receive, send)

    return guarded


def _refusal(scope: Scope, options: Options, is_page: bool) -> Response | None:
    """The answer to a request that may not come in.

    A request with an Origin comes from a web page, and that must be of the very host and port that the request names. A
    POST must be JSON, which no form of a page can send."""
    headers = Headers(scope=scope)
    host = headers.get("host", "").lower()
    origins = headers.getlist("origin")
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    session_ids = [headers.get("mcp-session-id", ""), QueryParams(scope["query_string"]).get("session_id", "")]
    if not _is_allowed(host, options, is_page or bool(origins)):
        status, reason = 421, "Invalid Host header: to let it in, name it in allowed_hosts (--allowed-hosts)"
        reason += "; to let a web page in, without a wildcard, such as tools.example.com:*"
    elif not {origin.lower() for origin in origins} <= {f"http://{host}", f"https://{host}"}:
        status, reason = 403, "Invalid Origin header: a web page must come from the host that it names"
    elif scope["method"] == "POST" and media_type != "application/json":
        status, reason = 415, "Content-Type must be application/json"
    elif not all(map(_SESSION_ID.fullmatch, session_ids)):  # the SDK (2.3) logs them, line breaks included
        status, reason = 400, "Invalid session ID"
    else:
        return None
    origin = ", ".join(origins) or None
    logger.warning("HTTP request refused: %s (Host %.200r, Origin %.200r)", reason, headers.get("host"), origin)
    return PlainTextResponse(reason, status)


def _count_posts(app: ASGIApp, bridge: Bridge) -> ASGIApp:
    """ASGI middleware, where the body has been read: the end of the server waits for POSTs that it has taken, and then
    takes no more."""

    async def count(scope: Scope, receive: Receive, send: Send) -> None:
        answer = app
        if bridge.deadline and scope["type"] == "http":
            answer = PlainTextResponse("Server is shutting down", 503)
        is_awaited = scope.get("method") == "POST"  # a GET may be a stream without an end
        if is_awaited:
            bridge.activity.begin()
        try:
            await answer(scope, receive, send)
        finally:
            if is_awaited:
                bridge.activity.end()

    return count


def _own_sessions(app: ASGIApp) -> ASGIApp:
    """ASGI middleware behind the user's own: a session belongs to the caller who opened it, and to others it does not
    exist. The SDK sees to that for users of its own class, so every caller becomes one."""

    async def owned(scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(Exception):  # a caller that cannot be read owns nothing: each of its calls fails for that
            caller = caller_of(scope)
            if caller is not None:
                token = AccessToken(token="", client_id=caller.id, scopes=[])
                scope = {**scope, "user": AuthenticatedUser(token)}
        await app(scope, receive, send)

    return owned


def _answer_probes(app: ASGIApp, bridge: Bridge, open_sessions: Mapping[str, Any]) -> ASGIApp:
    """ASGI middleware before everything else, as probes need no login and no name: whether the server is alive,
    `/health` (FR-HEALTH-001), and whether it can take on more, `/ready`."""
    options = bridge.options
    started = time.monotonic()

    async def health(request: Request) -> Response:
        count = len(bridge.catalog.tools)
        about = {"status": "ok", "module_count": count, "tools_count": count}
        version = options.version or __version__
        return JSONResponse({**about, "uptime_seconds": time.monotonic() - started, "version": version})

    async def ready(request: Request) -> Response:
        reason = "the server ends" if bridge.deadline else ""
        if len(open_sessions) >= options.max_sessions:
            reason = f"{options.max_sessions} sessions are open"
        if busy_threads() >= THREADS_MAX:
            reason = f"{THREADS_MAX} threads run modules"
        return PlainTextResponse(f"Not ready: {reason}", 503) if reason else PlainTextResponse("Ready")

    probes = [Route("/health", health), Route("/ready", ready)]
    return ExceptionMiddleware(Router(probes, default=app, redirect_slashes=False))  # 405 is raised


def _mcp_routes(bridge: Bridge, sessions: Any, open_streams: set[CancelScope]) -> list[BaseRoute]:
    """`/mcp`, or `/sse` and `/messages/`, whose clients each have one of `open_streams`."""
    if bridge.options.transport != "sse":
        return [Route(path, StreamableHTTPASGIApp(sessions)) for path in ("/mcp", "/mcp/")]
    transport = SseServerTransport("/messages/")

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection: its stream is the answer to one GET."""
        async with transport.connect_sse(scope, receive, send) as streams:
            # The end of the server cancels the SDK's loop but not the stream, which still sends the last answers.
            with CancelScope() as connection:
                bridge.unending.add(connection)
                open_streams.add(connection)
                try:
                    await bridge.server.run(*streams, bridge.server.create_initialization_options())
                finally:
                    open_streams.discard(connection)

    # A Route would take these functions for ones that return a response, and a Mount alone would let WebSockets in.
    return [
        Route("/sse", Mount("", stream), methods=["GET"]),
        Route("/messages/", Mount("", transport.handle_post_message), methods=["POST"]),
    ]


async def http_app(bridge: Bridge) -> Starlette:
    """The ASGI app of one bridge. By a request's headers, who may not come in is refused before its body is read."""
    options = bridge.options
    limits: dict[str, Any] = {}
    if not options.stateless:
        limits = {"session_idle_timeout": options.session_idle_seconds, "max_sessions": options.max_sessions}
    sessions = StreamableHTTPSessionManager(bridge.server, stateless=options.stateless, **limits)
    # Private, as nothing public tells of sessions. Without it, many sessions make the end take longer, and that is all.
    open_sessions: Mapping[str, Any] = getattr(sessions, "_server_instances", {})  # the SDK's transports, by id
    open_streams = set[CancelScope]()
    routes = _mcp_routes(bridge, sessions, open_streams)
    middleware = [
        Middleware(_answer_probes, bridge=bridge, open_sessions=open_sessions),
        Middleware(_guard, options=options),
        *(options.middleware or ()),
        Middleware(RequestBodyLimitMiddleware, max_body_size=DEFAULT_MAX_REQUEST_BODY_SIZE),
        Middleware(_count_posts, bridge=bridge),
        Middleware(_own_sessions),
    ]
    if options.metrics_collector:
        from .metrics import Metrics

        metrics = Metrics(bridge, lambda: len(open_sessions) + len(open_streams))
        routes.append(metrics.route)
        middleware.insert(0, Middleware(metrics.count_refusals))
    if options.explorer:
        from .explorer import routes as explorer_routes

        explorer = _guard(Router(explorer_routes(bridge)), options, is_page=True)
        routes.append(Mount(options.explorer_prefix, explorer))
    await bridge.sessions.enter_async_context(sessions.run())
    bridge.sessions.push_async_callback(_end_sessions, open_sessions)
    app = Starlette(routes=routes, middleware=middleware)
    # Starlette does it at the first request; here, middleware that cannot be made keeps the server from starting.
    app.middleware_stack = app.build_middleware_stack()
    return app


async def _end_sessions(open_sessions: Mapping[str, Any]) -> None:
    """End each session by itself. The SDK would cancel all at once, and anyio then look at all that are left again and
    again."""
    for session in [*open_sessions.values()]:
        await session.terminate()
    for _ in range(100):  # a second at most; what has not ended by then is cancelled
        if not open_sessions:
            break
        await asyncio.sleep(0.01)


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone: uvicorn would take them over, and raise them again at its end."""
        yield


@asynccontextmanager
async def serve_http(bridge: Bridge) -> AsyncIterator[asyncio.Task[None]]:
    """Serve HTTP on the options' host and port. Yields a task that only ends if the HTTP server does."""
    host, port = bridge.options.host, bridge.options.port
    listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or answers wait 40 ms for a delayed ACK
    config = uvicorn.Config(await http_app(bridge), lifespan="off", log_config=None, access_log=False)
    http = _Server(config)
    serving = asyncio.create_task(http.serve([listener]))

    @bridge.listening.callback
    def stop_listening() -> None:
        """Refuse connections, so that a load balancer goes elsewhere. Those that are open are still answered."""
        if http.started:
            for server in http.servers:
                server.close()

    try:
        yield serving
    finally:
        http.should_exit = True
        for connection in [*http.server_state.connections]:
            if getattr(getattr(connection, "cycle", None), "more_body", False):  # the rest of its body may never come
                connection.transport.abort()
        # Clients may read until the deadline. Then their connections are dropped, which ends what still writes to them.
        seconds_left = bridge.deadline - serving.get_loop().time()
        await asyncio.wait({serving}, timeout=max(0.2, seconds_left))
        for connection in [*http.server_state.connections]:
            connection.transport.abort()
        await asyncio.wait({serving}, timeout=2)
