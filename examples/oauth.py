"""OAuth: who has no token is told where to get one, and the claims of a token say who is calling.

    python examples/oauth.py

The tokens are JWTs. Here they are signed with a secret; with an authorization server of your own, replace the key by
`jwt.PyJWKClient("https://login.example.com/jwks.json").get_signing_key_from_jwt(token)` and name its algorithm. The MCP
SDK brings every part of it.
"""

import asyncio
import socket
from typing import Any

import httpx2
import jwt
from apcore import Context, Registry
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.middleware.bearer_auth import BearerAuthBackend, RequireAuthMiddleware
from mcp.server.auth.provider import AccessToken
from mcp.server.auth.routes import build_resource_metadata_url, create_protected_resource_routes
from pydantic import AnyHttpUrl
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.routing import Router
from starlette.types import ASGIApp, Receive, Scope, Send

from apcore_mcp import MCPServer


class Owner:
    description = "Tell whose account this is."
    input_schema = output_schema = {"type": "object"}

    async def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        return {"owner": context.identity.id if context.identity else None}


registry = Registry()
registry.register("account.owner", Owner())

ISSUER = AnyHttpUrl("https://login.example.com")
RESOURCE = AnyHttpUrl("http://127.0.0.1/mcp")  # as clients name it
SECRET = "a secret of at least thirty-two bytes"


class Tokens:
    async def verify_token(self, token: str) -> AccessToken | None:
        try:
            claims = jwt.decode(token, SECRET, algorithms=["HS256"], audience=str(RESOURCE), issuer=str(ISSUER))
        except jwt.PyJWTError:
            return None
        scopes = claims.get("scope", "").split()
        return AccessToken(token=token, client_id=claims["client_id"], subject=claims["sub"], scopes=scopes)


class Protected:
    """Tools for who has a token with the scope `tools`; probes and the way to a token for everybody."""

    def __init__(self, app: ASGIApp) -> None:
        self.open = app
        self.tools = RequireAuthMiddleware(app, ["tools"], build_resource_metadata_url(RESOURCE))
        self.metadata = Router(create_protected_resource_routes(RESOURCE, [ISSUER], ["tools"]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/.well-known/"):
            await self.metadata(scope, receive, send)
        elif scope["path"] in ("/health", "/metrics"):
            await self.open(scope, receive, send)
        else:
            await self.tools(scope, receive, send)


middleware = [Middleware(AuthenticationMiddleware, backend=BearerAuthBackend(Tokens())), Middleware(Protected)]


async def work(url: str) -> None:
    async with httpx2.AsyncClient() as http:
        refused = await http.post(f"{url}/mcp", json={})
        print(refused.status_code, refused.headers["www-authenticate"])
        print((await http.get(f"{url}/.well-known/oauth-protected-resource/mcp")).text)
        print("health:", (await http.get(f"{url}/health")).status_code)
    claims = {"sub": "ann", "client_id": "her agent", "scope": "tools", "aud": str(RESOURCE), "iss": str(ISSUER)}
    headers = {"Authorization": f"Bearer {jwt.encode(claims, SECRET, algorithm='HS256')}"}
    async with (
        httpx2.AsyncClient(headers=headers) as http,
        Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
    ):
        print((await client.call_tool("account.owner", {})).structured_content)


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = MCPServer(registry, transport="streamable-http", port=port, middleware=middleware)
    server.start()
    asyncio.run(work(f"http://127.0.0.1:{port}"))
    server.stop()
    server.wait()


if __name__ == "__main__":
    main()
