"""Who is calling: what ASGI middleware before the server found out becomes the Identity of the call (design, "Who is
calling"). Real middleware, Starlette's and the SDK's; from 2026-07-28 per request, and in a handshake session whoever
opened it, over both transports."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import httpx2
import pytest
from apcore import ACL, ACLRule, Executor, ModuleAnnotations, ModuleError, Registry
from conftest import HANDSHAKE, MODERN, FunctionalModule, connect, hosting, registry_of, serving
from mcp import MCPError
from mcp.client import Client
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp_types import ElicitResult, InputRequiredResult
from starlette.authentication import AuthCredentials, AuthenticationBackend, BaseUser, SimpleUser, UnauthenticatedUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from support import ACCEPT, initialize_params, message

from apcore_mcp import async_serve, elicit


class Named(BaseUser):
    """A user who has only a name to show, as Starlette's own had for years."""

    is_authenticated = True
    display_name = "named"


class Numbered(BaseUser):
    is_authenticated = True
    display_name = "Number Seven"
    identity = 7  # type: ignore[assignment]


class Foreign:
    """A user of another framework's making."""

    is_authenticated = True

    def __str__(self) -> str:
        return "foreign"


class Unreadable(BaseUser):
    is_authenticated = True
    display_name = "admin"

    @property
    def identity(self) -> str:
        raise ConnectionError("postgres://app:hunter2@db")


def bearer(subject: str | None) -> AuthenticatedUser:
    return AuthenticatedUser(AccessToken(token="t", client_id="app", scopes=["read"], subject=subject))


USERS: dict[str, Any] = {
    "alice": SimpleUser("alice"),
    "bob": SimpleUser("bob"),
    "named": Named(),
    "7": Numbered(),
    "foreign": Foreign(),
    "subject": bearer("subject"),
    "app": bearer(None),
    "": UnauthenticatedUser(),
    "unreadable": Unreadable(),
}


class Backend(AuthenticationBackend):
    """Believes who says in a header who he is."""

    async def authenticate(self, conn: Any) -> tuple[AuthCredentials, Any] | None:
        name = conn.headers.get("x-user")
        return None if name is None else (AuthCredentials(["read", "write"]), USERS[name])


async def whoami(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    caller = context.identity
    return {"caller": caller and [caller.id, caller.type, *caller.roles]}


async def ask(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    answer = await elicit(context, "Sure?")
    return {"answer": answer, **await whoami(inputs, context)}


class Session:
    """A client, and who makes its requests from now on (None: nobody says)."""

    def __init__(self) -> None:
        self.caller: str | None = None
        self.client: Client

    async def sign(self, request: httpx2.Request) -> None:
        if self.caller is not None:
            request.headers["x-user"] = self.caller

    async def call(self, name: str, **options: Any) -> Any:
        return (await self.client.call_tool(name, **options)).structured_content


@contextlib.asynccontextmanager
async def signed(
    source: Registry | Executor,
    mode: str = MODERN,
    transport: str = "streamable-http",
    caller: str | None = None,
    **options: Any,
) -> AsyncIterator[Session]:
    """A session, begun by `caller`, with a server that stands behind `AuthenticationMiddleware`."""
    session = Session()
    session.caller = caller

    def http(**arguments: Any) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(event_hooks={"request": [session.sign]}, **{"timeout": 30, **arguments})

    async def yes(context: Any, params: Any) -> ElicitResult:
        return ElicitResult(action="accept", content={})

    async with contextlib.AsyncExitStack() as stack:
        app = await stack.enter_async_context(async_serve(source, transport=transport, **options))
        url = await stack.enter_async_context(hosting(AuthenticationMiddleware(app, backend=Backend())))
        await stack.enter_async_context(asyncio.timeout(30))
        if transport == "sse":
            server: Any = sse_client(f"{url}/sse", httpx_client_factory=lambda **arguments: http(**arguments))
        else:
            server = streamable_http_client(f"{url}/mcp", http_client=await stack.enter_async_context(http()))
        client = Client(server, mode=mode, cache=None, read_timeout_seconds=30, elicitation_callback=yes)
        session.client = await stack.enter_async_context(client)
        yield session


def identity(name: str | None) -> dict[str, Any]:
    return {"caller": [name, "user", "read", "write"] if name else None}


async def test_a_call_is_made_by_whoever_was_authenticated_for_its_request() -> None:
    """A bearer token stands for its subject, or else for its client."""
    async with signed(registry_of({"whoami": whoami})) as session:
        for name in (None, "alice", "named", "7", "foreign", "", "subject", "app", "bob"):
            session.caller = name
            assert await session.call("whoami") == identity(name), name


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_a_call_in_a_session_is_made_by_whoever_opened_it(transport: str) -> None:
    for name in (None, "alice", "app"):
        async with signed(registry_of({"whoami": whoami}), HANDSHAKE, transport, caller=name) as session:
            assert await session.call("whoami") == identity(name), name


async def test_a_caller_who_cannot_be_read_is_nobody_else_and_told_nothing(mode: str) -> None:
    async with signed(registry_of({"whoami": whoami}), mode, caller="unreadable") as session:
        for name in ("whoami", "nope.x"):
            result = await session.client.call_tool(name)
            assert (result.is_error, result.content[0].text) == (True, "Internal error occurred")  # type: ignore[union-attr]
            assert "hunter2" not in result.model_dump_json()


async def test_without_middleware_every_caller_is_anonymous() -> None:
    async with connect({"whoami": whoami}) as client:
        assert (await client.call_tool("whoami")).structured_content == identity(None)


@pytest.mark.requirement("NFR-SEC-001")
async def test_an_acl_decides_by_role_over_http() -> None:
    rules = [ACLRule(callers=["@external"], targets=["whoami"], effect="allow", conditions={"roles": ["write"]})]
    executor = Executor(registry_of({"whoami": whoami}), acl=ACL(rules=rules, default_effect="deny"))
    async with signed(executor) as session:
        assert (await session.client.call_tool("whoami")).is_error
        session.caller = "alice"
        assert await session.call("whoami") == identity("alice")


async def test_the_explorer_calls_for_whoever_asks_it() -> None:
    options = {"explorer": True, "allow_execute": True}
    async with async_serve(registry_of({"whoami": whoami}), **options) as app:
        transport = httpx.ASGITransport(AuthenticationMiddleware(app, backend=Backend()))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for headers, expected in (({"X-User": "alice"}, "alice"), ({}, None)):
                answer = await client.post("/explorer/tools/whoami/call", json={}, headers=headers)
                assert answer.json()["result"] == identity(expected)


async def test_every_log_line_of_a_call_names_its_caller(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    """Design, "Who is calling": where there is a caller, whatever becomes of the call."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")

    def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        raise ModuleError("LOCKED", "the door is locked")

    def formatter(value: Any) -> str:
        raise ValueError("no text")

    gated = FunctionalModule(whoami, annotations=ModuleAnnotations(requires_approval=True))
    modules = {"t.fail": fail, "t.gated": gated, "t.whoami": whoami, "door.open": whoami}
    acl = ACL([ACLRule(callers=["@external"], targets=["t.*"], effect="allow")], default_effect="deny")
    begun = re.compile("Tool call|output_formatter|.* is let through")
    for caller, named in ((None, ""), ("alice", " (caller: alice)")):
        executor = Executor(registry_of(modules), acl=acl)
        async with signed(executor, mode, caller=caller, output_formatter=formatter) as session:
            caplog.clear()
            for name in (*modules, "nope.x"):
                await session.client.call_tool(name)
        lines = [record.getMessage() for record in caplog.records if begun.match(record.getMessage())]
        assert f"Tool call: t.whoami{named}" in lines
        assert f"Tool call: nope.x{named}" in lines
        assert f"Tool call error: door.open{named} - ACLDeniedError: Access denied: None -> door.open" in lines
        assert f"Tool call error: t.fail{named} - ModuleError: the door is locked" in lines
        assert len([line for line in lines if line.startswith("Tool call error")]) == 4
        assert len([line for line in lines if line.startswith("output_formatter")]) == 1
        assert [line for line in lines if ("(caller: alice)" in line) != bool(caller)] == []


async def test_only_who_began_a_call_can_go_on_with_it() -> None:
    async with signed(registry_of({"ask": ask})) as session:
        call = session.client.session.call_tool
        session.caller = "alice"
        asked = await call("ask", allow_input_required=True)
        assert isinstance(asked, InputRequiredResult)
        answer: Any = {"input": ElicitResult(action="accept", content={})}
        for session.caller in ("bob", ""):
            with pytest.raises(MCPError) as caught:
                await call("ask", request_state=asked.request_state, input_responses=answer)
            assert caught.value.error.code == -32602
        session.caller = "alice"
        result = await call("ask", request_state=asked.request_state, input_responses=answer)
        assert result.structured_content == {"answer": {}, **identity("alice")}


@pytest.fixture
def authenticated() -> Iterator[str]:
    """The base URL of a server behind `AuthenticationMiddleware`, with a module that asks."""
    middleware = [Middleware(AuthenticationMiddleware, backend=Backend())]
    with serving(registry_of({"ask": ask}), middleware=middleware) as url:
        yield url


def opening(**headers: str) -> dict[str, Any]:
    """What httpx posts to open a session as a client that can be asked."""
    params = initialize_params("2025-11-25") | {"capabilities": {"elicitation": {}}}
    return {"json": message("initialize", params), "headers": ACCEPT | headers}


STRANGERS: list[dict[str, str]] = [{"X-User": "bob"}, {"X-User": ""}, {}]
"""Another caller, one who is known not to be authenticated, and one who says nothing."""


def test_a_handshake_session_belongs_to_the_caller_who_opened_it(authenticated: str) -> None:
    """To another it does not exist: he can neither use, follow nor end it, nor answer its owner's questions."""
    alice = {"X-User": "alice"}
    with httpx.Client(base_url=authenticated, timeout=30) as client:
        opened = client.post("/mcp", **opening(**alice))
        owner = ACCEPT | alice | {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
        call = message("tools/call", {"name": "ask", "arguments": {}}, 2)
        with client.stream("POST", "/mcp", json=call, headers=owner) as stream:
            data = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
            question = next(data)
            assert question["method"] == "elicitation/create"
            yes = {"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept", "content": {}}}
            for stranger in STRANGERS:
                session = {name: value for name, value in owner.items() if name != "X-User"} | stranger
                for body in (yes, message("tools/list")):
                    assert client.post("/mcp", json=body, headers=session).status_code == 404
                with client.stream("GET", "/mcp", headers=session) as followed:
                    assert followed.status_code == 404
                assert client.delete("/mcp", headers=session).status_code == 404
            assert client.post("/mcp", json=yes, headers=owner).status_code == 202
            assert next(data)["result"]["structuredContent"] == {"answer": {}, **identity("alice")}
        assert client.delete("/mcp", headers=owner).status_code == 200


def test_a_session_that_nobody_was_authenticated_for_is_not_of_somebody(authenticated: str) -> None:
    with httpx.Client(base_url=authenticated, timeout=30) as client:
        session = ACCEPT | {"Mcp-Session-Id": client.post("/mcp", **opening()).headers["mcp-session-id"]}
        assert client.post("/mcp", json=message("ping"), headers=session | {"X-User": "alice"}).status_code == 404
        assert client.post("/mcp", json=message("ping"), headers=session).status_code == 200


def test_over_sse_too_a_session_belongs_to_the_caller_who_opened_it() -> None:
    """Its id stands in a URL, which logs and proxies keep."""
    alice = {"X-User": "alice"}
    middleware = [Middleware(AuthenticationMiddleware, backend=Backend())]
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(serving(registry_of({"ask": ask}), transport="sse", middleware=middleware))
        client = stack.enter_context(httpx.Client(base_url=url, timeout=30))
        stream = stack.enter_context(client.stream("GET", "/sse", headers=alice))
        data = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
        endpoint = next(data)
        ping = message("ping")
        for stranger in STRANGERS:
            assert client.post(endpoint, json=ping, headers=stranger).status_code == 404
        assert client.post(endpoint, json=ping, headers=alice).status_code == 202
        assert json.loads(next(data)) == {"jsonrpc": "2.0", "id": 1, "result": {}}
