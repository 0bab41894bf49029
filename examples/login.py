"""A login before your tools, by OAuth 2.1. Run: python examples/login.py with a folder, an issuer and a resource, as in

    python examples/login.py --extensions-dir examples/extensions --port 8000 --issuer https://login.example.com \
        --resource https://tools.example.com/mcp --scopes tools

One file, to run or to copy: a resource server of the MCP SDK's parts and PyJWT. It needs nothing that this package does
not bring: PyJWT with `cryptography`, httpx2 and Starlette come with `mcp`. In a program of your own, import `login` and
pass what it returns:

    serve(Executor(registry, acl=...), transport="streamable-http", middleware=login(issuer, resource, ["tools"]))

`issuer` is who gives out tokens, exactly as its own metadata writes it, slash or no slash. `resource` is the URL of the
server as clients name it; tokens are asked for and taken for that alone. `scopes` are what every token must have.

- Without a token, the answer is 401 and says where the metadata of the resource is (RFC 9728), and there stands the
  issuer: so a client finds its login. With a token that lacks a scope it is 403, and while the issuer cannot be reached
  and its keys are not known, 503.
- The caller of a call is the token's `sub`, and its scopes are the roles that apcore's ACL asks for.
- Open to everybody are `/health`, `/ready` and `/metrics`, the metadata, and the Explorer's page without its data.
- A token is read from the `Authorization` header alone, and passed on to nobody.

The issuer signs with RSA, elliptic curves or Ed25519, and its keys are found by its OAuth or OpenID metadata. An issuer
with http:// is only taken on this machine, for development.
"""

import argparse
import asyncio
import ipaddress
import json
import logging
import logging.config
import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jwt
from apcore import ACL, ACLRule, Executor, Registry
from mcp.client.auth.utils import build_oauth_authorization_server_metadata_discovery_urls
from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from starlette.authentication import AuthCredentials
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from apcore_mcp import discover, serve

logger = logging.getLogger("apcore_mcp.login")

# Asymmetric ones alone, and what kind of key each needs: a public key is never taken for a shared secret.
KEY_TYPES = {"RS": "RSA", "PS": "RSA", "ES": "EC"}
ALGORITHMS = {f"{family}{bits}": kind for family, kind in KEY_TYPES.items() for bits in (256, 384, 512)}
ALGORITHMS["EdDSA"] = "OKP"

METADATA_PATH = "/.well-known/oauth-protected-resource"
OPEN_PATHS = ("/health", "/ready", "/metrics")
URL = re.compile(r"https?://[!#-\[\]-~]+")  # what may stand in a header between quotation marks
SCOPE = re.compile(r"[!#-\[\]-~]+")

FETCH_SECONDS = 5.0  # for all of the issuer's documents together
FETCH_MAX_BYTES = 512 * 1024  # of each
FETCH_AGAIN_SECONDS = 5.0  # after the last time, whatever came of it
KEYS_FRESH_SECONDS = 30.0  # then they are asked for again
KEYS_STALE_SECONDS = 3600.0  # for so long they are used while the issuer cannot be reached
PATIENCE_SECONDS = 0.5  # with an issuer that need not be waited for, or has just failed


def login(
    issuer: str, resource: str, scopes: Sequence[str] = (), *, explorer_prefix: str = "/explorer"
) -> list[Middleware]:
    """The middleware that lets in who has a token of the issuer, for this resource, with these scopes.

    ValueError for a URL or a scope that cannot be one."""
    for url in (issuer, resource):
        if not URL.fullmatch(url) or not urlsplit(url).hostname or "#" in url:
            raise ValueError(f"Not a URL that names a server: {url!r}")
    if "?" in issuer:
        raise ValueError(f"An issuer has no query: {issuer!r}")
    if not _is_safe(issuer):
        raise ValueError(f"An issuer needs https://, but for one on this machine: {issuer!r}")
    required = scopes.split() if isinstance(scopes, str) else [*scopes]
    if not all(map(SCOPE.fullmatch, required)):
        raise ValueError(f"Not scopes: {required}")
    prefix = explorer_prefix.rstrip("/")
    return [Middleware(Login, issuer=issuer, resource=resource, scopes=required, explorer_prefix=prefix)]


def _is_safe(url: str) -> bool:
    """Whether nobody on the way can change what this URL answers."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    return parts.scheme == "https" or (parts.scheme == "http" and is_here)


class Login:
    """ASGI middleware: says to each request who makes it, or answers it with what is missing."""

    def __init__(self, app: ASGIApp, issuer: str, resource: str, scopes: list[str], explorer_prefix: str) -> None:
        self.app, self.resource, self.scopes = app, resource, scopes
        self.tokens = Tokens(issuer, resource)
        # Plain texts, as clients compare issuers so: a URL type of pydantic's would write them in its own way.
        self.metadata: dict[str, Any] = {"resource": resource, "authorization_servers": [issuer]}
        self.metadata["bearer_methods_supported"] = ["header"]
        if scopes:
            self.metadata["scopes_supported"] = scopes
        explorer = re.escape(explorer_prefix)
        self.open = re.compile(f"{'|'.join(OPEN_PATHS)}|{explorer}/?|{explorer}/tools/[^/]+/page")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await WebSocketClose()(scope, receive, send)
        else:
            path, reads = _path(scope), scope["method"] in ("GET", "HEAD")
            answer: ASGIApp
            if reads and (path == METADATA_PATH or path.startswith(f"{METADATA_PATH}/")):
                answer = JSONResponse(self.metadata)
            elif reads and self.open.fullmatch(path):
                answer = self.app
            else:
                answer = await self._refusal(scope) or self.app
            await answer(scope, receive, send)

    async def _refusal(self, scope: Scope) -> Response | None:
        """Why the request is not let in; None once its caller stands in `scope`, where the server looks for it."""
        # Several headers become a text that is no token.
        authorization = ", ".join(Headers(scope=scope).getlist("authorization"))
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return self._challenge(scope, 401, "", "A bearer token is needed")
        try:
            claims = await self.tokens.claims(token.strip())
        except Unreachable:
            about = {"error": "temporarily_unavailable", "error_description": "Tokens cannot be checked at the moment"}
            return JSONResponse(about, 503, {"Retry-After": f"{FETCH_AGAIN_SECONDS:.0f}"})
        except (jwt.PyJWTError, RecursionError) as error:  # the latter of JSON in JSON in JSON
            logger.info("Token refused: %s", type(error).__name__)  # its text may quote the token
            return self._challenge(scope, 401, "invalid_token", "The token is expired or not for this server")
        granted = scopes_of(claims)
        if not set(self.scopes) <= {*granted}:
            logger.info("Token refused: without a scope of %s", self.scopes)
            return self._challenge(scope, 403, "insufficient_scope", "The token lacks a scope")
        user = AccessToken(token="", client_id=claims["sub"], subject=claims["sub"], scopes=granted)
        scope["user"], scope["auth"] = AuthenticatedUser(user), AuthCredentials(granted)
        return None

    def _challenge(self, scope: Scope, status: int, error: str, description: str) -> Response:
        """RFC 6750: who has sent no token is told no error; RFC 9728: where the metadata is."""
        told = {"error": error, "error_description": description} if error else {}
        parameters = told | {"resource_metadata": self._metadata_url(scope)}
        if self.scopes:
            parameters["scope"] = " ".join(self.scopes)
        header = "Bearer " + ", ".join(f'{name}="{value}"' for name, value in parameters.items())
        body = {"error": error or "unauthorized", "error_description": description}
        return JSONResponse(body, status, {"WWW-Authenticate": header})

    def _metadata_url(self, scope: Scope) -> str:
        """Where the metadata can be read: between host and path of the resource, as RFC 9728 has it. An application
        that this one is mounted in gives it what is below its own path alone, so there it stands behind that path."""
        parts = urlsplit(self.resource)
        path, mount = parts.path.rstrip("/"), scope.get("root_path", "").rstrip("/")
        if not f"{path}/".startswith(f"{mount}/"):
            mount = ""
        return f"{parts.scheme}://{parts.netloc}{mount}{METADATA_PATH}{path.removeprefix(mount)}"


def _path(scope: Scope) -> str:
    """The path of a request, below that of the application that this one is mounted in."""
    path, mount = str(scope["path"]), str(scope.get("root_path", "")).rstrip("/")
    return path.removeprefix(mount) if path.startswith(f"{mount}/") else path


def scopes_of(claims: dict[str, Any]) -> list[str]:
    """What a token allows: `scope` or `scp`, names in a text or in a list."""
    scopes = claims.get("scope", claims.get("scp"))
    if isinstance(scopes, str):
        return scopes.split()
    return [each for each in scopes if isinstance(each, str)] if isinstance(scopes, list) else []


class Unreachable(Exception):
    """The issuer does not answer, and the key is not known from before."""


class Tokens:
    """Checks an issuer's tokens, by the keys that its metadata leads to.

    The keys are asked for when they are needed, by one request to the issuer at a time and at most every five seconds,
    however many tokens wait for it: once they are half a minute old, and for a key that is not known. No token waits
    longer than five seconds. While the issuer cannot be reached, known keys are used for up to an hour; other tokens
    cannot be checked. Event loop only."""

    def __init__(self, issuer: str, resource: str) -> None:
        self.issuer = issuer
        self.audience = [resource]
        if not urlsplit(resource).path.strip("/"):  # clients in JavaScript add a slash to a URL without a path
            self.audience = [resource.rstrip("/"), f"{resource.rstrip('/')}/"]
        self.keys: list[dict[str, Any]] = []
        self.is_reachable = True
        self.last_answer = self.last_fetch = -KEYS_STALE_SECONDS
        self.fetching: asyncio.Task[None] | None = None

    async def claims(self, token: str) -> dict[str, Any]:
        """The claims of a token that holds; PyJWTError for any other, and Unreachable."""
        header = jwt.get_unverified_header(token)
        algorithm = str(header.get("alg"))
        if algorithm not in ALGORITHMS:
            raise jwt.InvalidAlgorithmError
        key = await self._key_of(algorithm, header.get("kid"))
        claims: dict[str, Any] = jwt.decode(
            token,
            jwt.PyJWK(key, algorithm),
            algorithms=[algorithm],
            audience=self.audience,
            issuer=self.issuer,
            # Not `iat`: clocks that differ by a second would refuse each new token.
            options={"require": ["aud", "iss", "exp", "sub"], "verify_iat": False},
        )
        if not claims["sub"]:
            raise jwt.MissingRequiredClaimError("sub")
        return claims

    async def _key_of(self, algorithm: str, key_id: str | None) -> dict[str, Any]:
        """The key that a token says it is signed with, as the issuer has it now."""
        key = self._known(algorithm, key_id)
        if key is None or time.monotonic() - self.last_answer > KEYS_FRESH_SECONDS:
            await self._ask(is_known=key is not None)
            key = self._known(algorithm, key_id)
        if key is None and (not self.is_reachable or self._is_fetching()):
            raise Unreachable
        if key is None:
            raise jwt.InvalidKeyError
        return key

    def _known(self, algorithm: str, key_id: str | None) -> dict[str, Any] | None:
        """The key with this id, or the only one where a token names none, if it is one for the algorithm and the issuer
        was heard of lately."""
        if time.monotonic() - self.last_answer > KEYS_STALE_SECONDS:
            return None
        fitting = []
        for key in self.keys:
            fits = key.get("kty") == ALGORITHMS[algorithm] and key.get("alg", algorithm) == algorithm
            if fits and key.get("use", "sig") == "sig" and key_id in (None, key.get("kid")):
                fitting.append(key)
        return fitting[0] if fitting and (key_id is not None or len(fitting) == 1) else None

    def _is_fetching(self) -> bool:
        return self.fetching is not None and not self.fetching.done()

    async def _ask(self, is_known: bool) -> None:
        """Have the keys fetched, unless that was just done, and wait for them as long as it is worth."""
        if not self._is_fetching() and time.monotonic() - self.last_fetch > FETCH_AGAIN_SECONDS:
            self.fetching = asyncio.create_task(self._fetch())
        if self.fetching is not None and (self.is_reachable or not is_known):
            patience = PATIENCE_SECONDS if is_known or not self.is_reachable else FETCH_SECONDS
            # Not awaited itself: a request that is given up must not end it for the others.
            await asyncio.wait({self.fetching}, timeout=patience)

    async def _fetch(self) -> None:
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                self.keys = await self._fetched_keys()
            self.last_answer, self.is_reachable = time.monotonic(), True
        except Exception as error:  # whatever an issuer does: its keys are not to be had
            self.is_reachable = False
            reason = f"no answer within {FETCH_SECONDS:g} seconds" if isinstance(error, TimeoutError) else repr(error)
            logger.warning("No keys of %s: %s", self.issuer, reason)
        finally:
            self.last_fetch = time.monotonic()

    async def _fetched_keys(self) -> list[dict[str, Any]]:
        # As sent: what is packed could unpack to any size. A redirect is no answer.
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        async with httpx2.AsyncClient(headers=headers, timeout=FETCH_SECONDS, follow_redirects=False) as http:
            named: Any = None
            for url in build_oauth_authorization_server_metadata_discovery_urls(self.issuer, self.issuer):
                metadata = await _document(http, url)
                if metadata is not None and metadata.get("issuer") == self.issuer and "jwks_uri" in metadata:
                    break
                named = named or (metadata or {}).get("issuer")
            else:
                other = f"its metadata names {named!r}, which is another" if named else "no metadata is found"
                raise ValueError(f"{other}; expected {self.issuer!r}, letter by letter, and a jwks_uri")
            if not _is_safe(metadata["jwks_uri"]):
                raise ValueError(f"jwks_uri {metadata['jwks_uri']!r} needs https://")
            keys = (await _document(http, metadata["jwks_uri"]) or {}).get("keys")
            if not isinstance(keys, list):
                raise ValueError(f"no keys at {metadata['jwks_uri']}")
            return [key for key in keys if isinstance(key, dict)]


async def _document(http: httpx2.AsyncClient, url: str) -> dict[str, Any] | None:
    """The JSON object at a URL; None if there is none. ValueError for one that is too large."""
    async with http.stream("GET", url) as response:
        if response.status_code >= 500:
            raise ValueError(f"{response.status_code} from {url}")
        if response.status_code != 200:
            return None
        body = b""
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > FETCH_MAX_BYTES:
                raise ValueError(f"more than {FETCH_MAX_BYTES} bytes from {url}")
    try:
        document = json.loads(body)
    except ValueError:  # a page that a site has for whatever it does not know
        return None
    return document if isinstance(document, dict) else None


# ---- The program: a folder's tools behind the login ----

DESTRUCTIVE_SCOPE = "destructive"


def acl_by_scope(registry: Registry) -> ACL:
    """Who is logged in may run every tool, but what is annotated as destructive only with the scope `destructive`.

    The first rule that fits decides; it holds for what modules call in turn as well."""
    destructive = []
    for module_id in registry.list():
        descriptor = registry.get_definition(module_id)
        if descriptor and descriptor.annotations and descriptor.annotations.destructive:
            destructive.append(module_id)
    rules = [ACLRule(callers=["*"], targets=["*"], effect="allow", conditions={"identity_types": ["user"]})]
    if destructive:
        has_scope = {"roles": [DESTRUCTIVE_SCOPE]}
        rules.insert(0, ACLRule(callers=["*"], targets=destructive, effect="allow", conditions=has_scope))
        rules.insert(1, ACLRule(callers=["*"], targets=destructive, effect="deny"))
    return ACL(rules, default_effect="deny")


def tell_systemd() -> None:
    """To a unit of `Type=notify`: clients are served; and, for its `WatchdogSec=`, again and again that the event loop
    turns. A server whose loop a module has stopped is so started anew."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    systemd.connect(f"\0{address[1:]}" if address.startswith("@") else address)
    systemd.setblocking(False)
    systemd.send(b"READY=1")
    seconds = int(os.environ.get("WATCHDOG_USEC", "0")) / 1_000_000
    loop = asyncio.get_running_loop()

    def feed() -> None:
        with suppress(OSError):  # it has not read the last ones yet
            systemd.send(b"WATCHDOG=1")
        loop.call_later(seconds / 3, feed)

    if seconds:
        feed()


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve the tools of a folder to who is logged in.")
    parser.add_argument("--extensions-dir", required=True, metavar="DIR", help="directory with apcore modules")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on")
    parser.add_argument("--issuer", required=True, metavar="URL", help="who gives out tokens, as it writes itself")
    parser.add_argument("--resource", metavar="URL", help="the server as clients name it; http://127.0.0.1:PORT/mcp")
    parser.add_argument("--scopes", nargs="+", default=[], metavar="S", help="what every token must have")
    parser.add_argument("--stateless", action="store_true", help="keep no sessions, for several servers as one")
    parser.add_argument("--shutdown-seconds", type=float, default=5.0, help="what running calls have when it ends")
    parser.add_argument("--explorer", action="store_true", help="serve the Tool Explorer, and let it run tools")
    parser.add_argument("--access-log", action="store_true", help="log a line for each call that ends")
    parser.add_argument("--log-config", metavar="FILE", help="JSON for logging.config.dictConfig")
    arguments = parser.parse_args()
    resource = arguments.resource or f"http://127.0.0.1:{arguments.port}/mcp"
    try:
        if arguments.log_config:
            logging.config.dictConfig(json.loads(Path(arguments.log_config).read_text("utf-8")))
        registry = discover(arguments.extensions_dir)
        serve(
            Executor(registry, acl=acl_by_scope(registry)),
            transport="streamable-http",
            host=arguments.host,
            port=arguments.port,
            middleware=login(arguments.issuer, resource, arguments.scopes),
            allowed_hosts=[urlsplit(resource).netloc],
            stateless=arguments.stateless,
            # A secret is no flag, which everybody on the machine could read: `ps` shows them.
            state_key=(os.environ.get("APCORE_MCP_STATE_KEY") or None) if arguments.stateless else None,
            shutdown_seconds=arguments.shutdown_seconds,
            metrics_collector=True,
            explorer=arguments.explorer,
            allow_execute=arguments.explorer,
            on_startup=tell_systemd,
            access_log=arguments.access_log,
            log_level=None if arguments.log_config else "INFO",
        )
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
