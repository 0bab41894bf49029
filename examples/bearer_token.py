"""Who is calling decides which tools there are. Run: python examples/bearer_token.py

Starlette's middleware checks a bearer token, and apcore's ACL decides what its owner may run. One rule asks for a role
that Ann has and Bob has not, another lets everybody ring. A client with each one's token lists the tools that it is
offered and opens the door all the same, and so does one without a token. A token that nobody has is answered with 401.
"""

import asyncio
import socket

import httpx2
from apcore import ACL, ACLRule, Executor, Registry
from apcore.decorator import module
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse

from apcore_mcp import MCPServer

registry = Registry()


@module(id="door.open", registry=registry)
def open_door(name: str) -> str:
    """Open a door."""
    return f"The {name} door is open."


@module(id="door.ring", registry=registry)
def ring(name: str) -> str:
    """Ring at a door."""
    return f"Somebody is at the {name} door."


USERS = {"token-of-ann": ("ann", ["staff"]), "token-of-bob": ("bob", ["guest"])}


class BearerTokens(AuthenticationBackend):
    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser] | None:
        scheme, _, token = conn.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            return None  # anonymous: may call what a rule allows everybody
        if token not in USERS:
            raise AuthenticationError("Unknown token")
        name, roles = USERS[token]
        return AuthCredentials(roles), SimpleUser(name)


def unauthorized(conn: HTTPConnection, error: Exception) -> PlainTextResponse:
    return PlainTextResponse(str(error), 401, {"WWW-Authenticate": 'Bearer error="invalid_token"'})


staff_only = ACLRule(callers=["@external"], targets=["door.*"], effect="allow", conditions={"roles": ["staff"]})
everybody = ACLRule(callers=["@external"], targets=["door.ring"], effect="allow")
executor = Executor(registry, acl=ACL([staff_only, everybody], default_effect="deny"))
authentication = Middleware(AuthenticationMiddleware, backend=BearerTokens(), on_error=unauthorized)


async def call_with(token: str | None, url: str) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        offered = [tool.name for tool in (await client.list_tools()).tools]
        result = await client.call_tool("door.open", {"name": "back"})
        answer = result.structured_content or getattr(result.content[0], "text", result.content)
        print(f"{token or 'no token'} is offered {', '.join(offered)}; to open:", answer)


def be_refused(token: str, url: str) -> None:
    refusal = httpx2.post(url, json={}, headers={"Authorization": f"Bearer {token}"})
    print(f"{token} is refused:", refusal.status_code, refusal.headers["www-authenticate"])


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = MCPServer(executor, transport="streamable-http", port=port, middleware=[authentication])
    server.start()
    url = f"http://127.0.0.1:{port}/mcp"
    for token in (*USERS, None):
        asyncio.run(call_with(token, url))
    be_refused("token-of-nobody", url)
    server.stop()
    server.wait()


if __name__ == "__main__":
    main()
