"""Who is calling: what ASGI middleware found out becomes the Identity of the call."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import httpx2
import pytest
from apcore import ACL, ACLRule, Executor, ModuleAnnotations, ModuleError
from conftest import HANDSHAKE, MODERN, FunctionalModule, client_of, hosting, registry_of, serving
from mcp import MCPError
from mcp.client.sse import sse_client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.authentication import AuthCredentials, AuthenticationBackend, BaseUser, SimpleUser, UnauthenticatedUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from support import ACCEPT, Caplog, Wire, accept, asking, handshake, initialize_params, message

from apcore_mcp import async_serve, elicit


class Named(BaseUser):
    is_authenticated = True
    display_name = "named"  # and nothing else to show, as Starlette's own users had for years


class Unreadable(BaseUser):
    is_authenticated = True

    @property
    def identity(self) -> str:
        raise ConnectionError("postgres://app:hunter2@db")


USERS: dict[str, Any] = {
    "alice": SimpleUser("alice"),
    "bob": SimpleUser("bob"),
    "named": Named(),
    "7": SimpleNamespace(is_authenticated=True, identity=7),
    "subject": AuthenticatedUser(AccessToken(token="t", client_id="app", scopes=["read"], subject="subject")),
    "app": AuthenticatedUser(AccessToken(token="t", client_id="app", scopes=["read"])),
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


def identity(name: str | None) -> dict[str, Any]:
    return {"caller": [name, "user", "read", "write"] if name else None}


async def ask(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    answer = await elicit(context, "Sure?")
    return {"answer": answer, **await whoami(inputs, context)}


@dataclass
class Session:
    """A client, and who makes its requests from now on (None: nobody says)."""

    caller: str | None
    client: Any = None

    async def sign(self, request: httpx2.Request) -> None:
        if self.caller is not None:
            request.headers["x-user"] = self.caller

    async def call(self, name: str) -> Any:
        return (await self.client.call_tool(name)).structured_content


@contextlib.asynccontextmanager
async def signed(
    source: Any, mode: str = MODERN, transport: str = "streamable-http", caller: str | None = None, **options: Any
) -> AsyncIterator[Session]:
    """A session, begun by `caller`, with a server that stands behind `AuthenticationMiddleware`."""
    session = Session(caller)

    def http(**arguments: Any) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(event_hooks={"request": [session.sign]}, **{"timeout": 30, **arguments})

    async with contextlib.AsyncExitStack() as stack:
        app = await stack.enter_async_context(async_serve(source, transport=transport, **options))
        url = await stack.enter_async_context(hosting(AuthenticationMiddleware(app, backend=Backend())))
        await stack.enter_async_context(asyncio.timeout(30))
        if transport == "sse":
            server: Any = sse_client(f"{url}/sse", httpx_client_factory=http)
        else:
            server = streamable_http_client(f"{url}/mcp", http_client=await stack.enter_async_context(http()))
        client = client_of(server, mode, **asking(accept())[0])
        session.client = await stack.enter_async_context(client)
        yield session


async def test_a_call_is_made_by_its_requests_user() -> None:
    """A bearer token stands for its subject, or else for its client."""
    async with signed(registry_of({"whoami": whoami})) as session:
        for session.caller in (None, "alice", "named", "7", "", "subject", "app", "bob"):
            assert await session.call("whoami") == identity(session.caller), session.caller


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_a_sessions_call_is_made_by_its_opener(transport: str) -> None:
    for name in (None, "alice", "app"):
        async with signed(registry_of({"ask": ask}), HANDSHAKE, transport, caller=name) as session:
            assert await session.call("ask") == {"answer": {}, **identity(name)}, name


async def test_an_unreadable_caller_is_told_nothing(mode: str) -> None:
    """And offered nothing, by a list of an ACL."""
    executor = Executor(registry_of({"whoami": whoami}), acl=ACL([]))
    async with signed(executor, mode, caller="unreadable") as session:
        call, lists = session.client.call_tool, (session.client.list_tools, session.client.list_resources)
        for ask in (lambda: call("whoami"), lambda: call("nope.x"), *lists):
            with pytest.raises(MCPError, match=r"^Internal error occurred$"):
                await ask()


async def test_each_log_line_names_its_caller(mode: str, caplog: Caplog) -> None:
    """Where there is one, whatever becomes of the call."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")

    def fail(*_: Any) -> Any:
        raise ModuleError("LOCKED", "the door is locked")

    gated = FunctionalModule(whoami, annotations=ModuleAnnotations(requires_approval=True))
    modules = {"t.fail": fail, "t.gated": gated, "t.whoami": whoami, "door.open": whoami}
    acl = ACL([ACLRule(callers=["@external"], targets=["t.*"], effect="allow")], default_effect="deny")
    for caller, named in ((None, ""), ("alice", " (caller: alice)")):
        executor = Executor(registry_of(modules), acl=acl)
        async with signed(executor, mode, caller=caller, output_formatter=fail) as session:
            caplog.clear()
            for name in (*modules, "nope.x"):
                await session.client.call_tool(name)
        lines = [line for line in caplog.messages if line.startswith(("Tool call", "output_formatter"))]
        assert len(lines) == 10, "a beginning and an error each"
        error = f"Tool call error: t.fail{named} - ModuleError: the door is locked (trace "
        assert [line for line in lines if line.startswith(error)]
        assert [line for line in lines if ("(caller: alice)" in line) != bool(caller)] == []


async def test_only_who_began_a_call_resumes_it() -> None:
    async with signed(registry_of({"ask": ask})) as session:
        wire, session.caller = Wire(session.client), "alice"
        _, _, state = await wire.question("ask")
        for session.caller in ("bob", ""):
            await wire.refused(state)
        session.caller = "alice"
        result = await wire.call("ask", request_state=state, input_responses={"input": accept()})
        assert result.structured_content == {"answer": {}, **identity("alice")}


async def test_a_question_says_nothing_of_the_caller() -> None:
    """Nor which module asks for another one; the user of a client need not be whom its requests are made for."""
    gated = FunctionalModule(whoami, annotations=ModuleAnnotations(requires_approval=True))
    calls_gated = FunctionalModule(lambda inputs, context: context.executor.call("gated", {"to": "bob"}, context))
    async with signed(registry_of({"gated": gated, "inner.work": calls_gated}), caller="alice") as session:
        wire = Wire(session.client)
        for name in ("gated", "inner.work"):
            result = await wire.call(name, {"to": "bob"})
            key, question = next(iter(result.input_requests.items()))
            assert question.params.message.endswith('\n- to: "bob"')
            assert not {word for word in ("alice", "inner", "read", "write") if word in question.model_dump_json()}
            retry = {"request_state": result.request_state, "input_responses": {key: accept(approve=True)}}
            assert (await wire.call(name, {"to": "bob"}, **retry)).structured_content == identity("alice")


@contextlib.contextmanager
def authenticated(**options: Any) -> Iterator[httpx.Client]:
    """A client of a server behind `AuthenticationMiddleware`, with a module that asks."""
    middleware = [Middleware(AuthenticationMiddleware, backend=Backend())]
    served = serving(registry_of({"ask": ask}), middleware=middleware, **options)
    with served as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


ALICE = {"X-User": "alice"}
STRANGERS: list[dict[str, str]] = [{"X-User": "bob"}, {"X-User": ""}, {}]
"""Another caller, one who is known not to be authenticated, and one who says nothing."""


def test_a_handshake_session_belongs_to_its_opener() -> None:
    """To another it does not exist: he can neither use, follow nor end it, nor answer its owner's questions."""
    with authenticated() as client:
        hello = message("initialize", initialize_params("2025-11-25") | {"capabilities": {"elicitation": {}}})
        opened = client.post("/mcp", json=hello, headers=ACCEPT | ALICE)
        owner = ACCEPT | ALICE | {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
        call = message("tools/call", {"name": "ask", "arguments": {}}, 2)
        with client.stream("POST", "/mcp", json=call, headers=owner) as stream:
            data = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: {"))
            question = next(data)
            assert question["method"] == "elicitation/create"
            yes = {"jsonrpc": "2.0", "id": question["id"], "result": {"action": "accept", "content": {}}}
            for stranger in STRANGERS:
                session = {name: value for name, value in owner.items() if name != "X-User"} | stranger
                for verb, body in (("POST", yes), ("POST", message("tools/list")), ("GET", None), ("DELETE", None)):
                    with client.stream(verb, "/mcp", json=body, headers=session) as refused:
                        assert refused.status_code == 404
            assert client.post("/mcp", json=yes, headers=owner).status_code == 202
            assert next(data)["result"]["structuredContent"] == {"answer": {}, **identity("alice")}
        assert client.delete("/mcp", headers=owner).status_code == 200
        _, nobodys = handshake(client, "/mcp")
        for caller, status in ((ALICE, 404), ({}, 200)):
            assert client.post("/mcp", json=message("ping"), headers=nobodys | caller).status_code == status


def test_over_sse_a_session_belongs_to_its_opener() -> None:
    """Its id stands in a URL, which logs and proxies keep."""
    with authenticated(transport="sse") as client, client.stream("GET", "/sse", headers=ALICE) as stream:
        data = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
        endpoint = next(data)
        for headers, status in (*((stranger, 404) for stranger in STRANGERS), (ALICE, 202)):
            assert client.post(endpoint, json=message("ping"), headers=headers).status_code == status
        assert json.loads(next(data)) == {"jsonrpc": "2.0", "id": 1, "result": {}}
