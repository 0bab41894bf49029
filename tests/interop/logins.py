"""The login of `examples/login.py` with a provider that others wrote, `oidc-provider`, and the SDK's clients: what a
person, and a program without one, go through to call a tool.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Generator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urljoin, urlsplit

import httpx2
from mcp.client import Client
from mcp.client.auth import OAuthClientProvider
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.client.auth.oauth2 import AuthorizationCodeResult
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from pydantic import AnyUrl

from .programs import HERE, NODE, NODE_PROGRAM, ROOT, install_node, reason, run, serving

PACKAGE = "oidc-provider"
CHECKS = ["registration, login", "refresh", "client credentials", "TypeScript SDK", "scope", "another resource"]
CHECKS += ["issuer gone"]
HEADINGS = ["login", "its issuer", *CHECKS]
ROWS = {"with a path": "/team", "without a path": ""}
ROBOT = {"client_id": "robot", "client_secret": "its-secret"}
CALLBACK = "http://127.0.0.1:9/callback"
MODULES = """
from apcore import Context
from apcore.decorator import module


@module(id="whoami")
def whoami(context: Context) -> list[str]:
    return [context.identity.id, *context.identity.roles]


@module(id="destroy", annotations={"destructive": True})
def destroy() -> str:
    return "destroyed"
"""


class Memory:
    """What a client keeps."""

    tokens: OAuthToken | None = None
    client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


class Person:
    """Somebody at a browser, who fills in the provider's pages: the login and the consent."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.came_back = ""

    async def open(self, url: str) -> None:
        async with httpx2.AsyncClient(timeout=20) as browser:
            response = await browser.get(url)
            while not self.came_back:
                if response.is_redirect:
                    url = urljoin(url, response.headers["location"])
                    if url.startswith(CALLBACK):
                        self.came_back = url
                        return
                    response = await browser.get(url)
                else:
                    response.raise_for_status()
                    pattern = r'<form[^>]* action="([^"]+)".*?name="prompt" value="(\w+)"'
                    form = re.search(pattern, response.text, re.DOTALL)
                    assert form is not None, response.text
                    url = urljoin(url, form[1])
                    filled = {"prompt": form[2], "login": self.name, "password": "x"}
                    response = await browser.post(url, data=filled)

    async def answer(self) -> AuthorizationCodeResult:
        query = {name: values[0] for name, values in parse_qs(urlsplit(self.came_back).query).items()}
        return AuthorizationCodeResult(code=query["code"], state=query.get("state"), iss=query.get("iss"))


def person(url: str) -> OAuthClientProvider:
    """The SDK's client of somebody called Ann, which registers itself."""
    ann = Person("ann")
    about = OAuthClientMetadata(redirect_uris=[AnyUrl(CALLBACK)], token_endpoint_auth_method="none")
    return OAuthClientProvider(url, about, Memory(), ann.open, ann.answer)


@contextlib.asynccontextmanager
async def connected(url: str, auth: httpx2.Auth, era: str = "2026-07-28") -> AsyncIterator[Client]:
    async with (
        httpx2.AsyncClient(auth=auth, timeout=20) as http,
        Client(streamable_http_client(url, http_client=http), mode=era) as client,
    ):
        yield client


async def whoami(client: Client) -> list[str]:
    caller: list[str] = ((await client.call_tool("whoami", {})).structured_content or {})["result"]
    return caller


class Bearer(httpx2.Auth):
    """A token that the robot was given for a scope and a resource."""

    def __init__(self, issuer: str, resource: str, scope: str) -> None:
        form = {"grant_type": "client_credentials", "scope": scope, "resource": resource, **ROBOT}
        self.token = httpx2.post(f"{issuer}/token", data=form, timeout=20).json()["access_token"]

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        request.headers["Authorization"] = f"Bearer {self.token}"
        yield request


async def check(url: str, issuer: str, end_provider: Callable[[], None]) -> AsyncIterator[tuple[str, Any, Any]]:
    """Each check, what came of it, and what should have."""
    for era in ("legacy", "2026-07-28"):
        auth = person(url)
        async with connected(url, auth, era) as client:
            yield "registration, login", await whoami(client), ["ann", "tools"]
            first = auth.context.current_tokens
            auth.context.token_expiry_time = 1.0  # it is over, so the client refreshes it, and its session goes on
            yield "refresh", await whoami(client), ["ann", "tools"]
            yield "refresh", auth.context.current_tokens == first, False
            yield "scope", (await client.call_tool("destroy", {})).is_error, True
    program = ClientCredentialsOAuthProvider(url, Memory(), **ROBOT, issuer=issuer)
    async with connected(url, program) as client:
        yield "client credentials", await whoami(client), ["robot", "tools"]
        yield "scope", (await client.call_tool("destroy", {})).is_error, True
    script = [str(NODE_PROGRAM), str(HERE / "clients" / "with_credentials.mjs"), url, issuer, *ROBOT.values()]
    done = await asyncio.to_thread(run, script, seconds=60, environment={"NODE_FOLDER": str(NODE)})
    yield "TypeScript SDK", done.stdout.strip() or reason(done.stderr), '["robot","tools"]'
    async with connected(url, Bearer(issuer, url, "tools destructive")) as client:
        yield "scope", (await client.call_tool("destroy", {})).is_error, False
        other = Bearer(issuer, "https://other.example.com/mcp", "tools")
        yield "another resource", httpx2.post(url, json={}, auth=other).status_code, 401
        end_provider()
        yield "issuer gone", await whoami(client), ["robot", "tools", "destructive"]


async def checks(*arguments: Any) -> dict[str, str]:
    """Each check with "yes" or what came instead."""
    found: dict[str, str] = {}
    async with asyncio.timeout(90):
        async for name, told, expected in check(*arguments):
            if found.setdefault(name, "yes") == "yes" and told != expected:
                found[name] = str(told)[:200]
    return found


def row(name: str) -> list[str]:
    """The line of an issuer, with a path in its URL or without."""
    package = f"{PACKAGE} ({install_node(PACKAGE)})"
    path = ROWS[name]
    place = {"PORT": "{port}", "ISSUER": f"http://127.0.0.1:{{port}}{path}", "NODE_FOLDER": str(NODE)}
    provider = [str(NODE_PROGRAM), str(HERE / "clients" / "provider.mjs")]
    server = [sys.executable, str(ROOT / "examples" / "login.py"), "--port", "{port}", "--scopes", "tools"]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        (Path(folder) / "modules.py").write_text(MODULES)
        issuer = stack.enter_context(serving(provider, environment=place)).removesuffix("/mcp") + path
        started = [*server, "--extensions-dir", folder, "--issuer", issuer]
        with serving(started, environment={"PYTHONPATH": str(ROOT)}) as url:
            found = asyncio.run(checks(url, issuer, stack.close))
    return [package, name, *(found[check] for check in CHECKS)]
