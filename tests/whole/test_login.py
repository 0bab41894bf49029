"""`examples/login.py`: who gets in with which token, and what becomes of the rest when the issuer does not answer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from apcore import Executor, ModuleAnnotations
from conftest import EXTENSIONS, ROOT, FunctionalModule, free_port, hosting, registry_of
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from support import ACCEPT, Caplog, Monkeypatch, answer, asgi_client, initialize_params, message, modern

from apcore_mcp import async_serve
from examples import login as example
from examples.login import acl_by_scope, login, scopes_of

RESOURCE = "https://tools.example.com/mcp"
KEY, OTHER = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
RSA, EDWARDS = rsa.generate_private_key(65537, 2048), ed25519.Ed25519PrivateKey.generate()
LOGIN = "https://login.example.com"
METADATA = "/.well-known/oauth-authorization-server"
OPENID = "/.well-known/openid-configuration"
BELOW = (f"{METADATA}/a/b", f"{OPENID}/a/b", f"/a/b{OPENID}")  # where an issuer with the path /a/b may have it


def public(key: Any, **more: Any) -> dict[str, Any]:
    kinds = {ec.EllipticCurvePrivateKey: "ES256", rsa.RSAPrivateKey: "RS256", ed25519.Ed25519PrivateKey: "EdDSA"}
    algorithm = jwt.get_algorithm_by_name(next(name for kind, name in kinds.items() if isinstance(key, kind)))
    return {**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": "1", "use": "sig", **more}  # type: ignore[attr-defined]


class Issuer:
    """An ASGI app with an issuer's documents, which counts what it is asked, and its tokens."""

    def __init__(self) -> None:
        self.keys = [public(KEY)]
        self.documents: dict[str, Any] = {}
        self.asked: Counter[str] = Counter()
        self.answers = asyncio.Event()
        self.answers.set()
        self.url = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.asked[path] += 1
        await self.answers.wait()
        document = {"keys": self.keys} if path == "/keys" else self.documents.get(path)
        told = document if isinstance(document, Response) else JSONResponse(document, 200 if document else 404)
        await told(scope, receive, send)

    def metadata(self, url: str, **more: Any) -> dict[str, Any]:
        return {"issuer": url, "jwks_uri": f"{self.url}/keys", **more}

    def token(self, key: Any = KEY, algorithm: str = "ES256", kid: Any = "1", **claims: Any) -> str:
        """A token that is good but for `claims`: None leaves one out."""
        given = {"iss": self.url, "aud": RESOURCE, "sub": "ann", "exp": time.time() + 60, "scope": "tools"} | claims
        payload = {name: value for name, value in given.items() if value is not None}
        return jwt.encode(payload, key, algorithm, headers={"kid": kid} if kid else None)


async def whoami(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"caller": context.identity and [context.identity.id, *context.identity.roles]}


@contextlib.asynccontextmanager
async def issuing(path: str = "") -> AsyncIterator[Issuer]:
    issuer = Issuer()
    async with hosting(issuer) as url:
        issuer.url = url
        issuer.documents[f"{METADATA}{path}"] = issuer.metadata(f"{url}{path}")
        yield issuer


class Door:
    """A client of a server behind the login."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def call(self, token: str | None = None, name: str = "whoami", **headers: Any) -> Any:
        posted = modern("tools/call", {"name": name, "arguments": {}})
        sent = posted["headers"] | ({} if token is None else {"Authorization": f"Bearer {token}"}) | headers
        return await self.http.post("/mcp", json=posted["json"], headers=sent)

    async def caller(self, token: str) -> Any:
        response = await self.call(token)
        assert response.status_code == 200, response.text
        return answer(response)["result"]["structuredContent"]["caller"]


@contextlib.asynccontextmanager
async def locked(
    issuer: str, scopes: Any = "tools", *, resource: str = RESOURCE, source: Any = None, **options: Any
) -> AsyncIterator[Door]:
    source = source or registry_of({"whoami": whoami})
    async with asgi_client(source, middleware=login(issuer, resource, scopes), **options) as http:
        yield Door(http)


def challenge(response: Any) -> dict[str, str]:
    scheme, _, parameters = response.headers["www-authenticate"].partition(" ")
    assert scheme == "Bearer"
    told = dict(re.findall(r'(\w+)="([^"]*)"', parameters))
    assert ", ".join(f'{name}="{value}"' for name, value in told.items()) == parameters
    return told


@pytest.mark.parametrize(
    ("issuer", "mount", "path"),
    [
        (LOGIN, "", "/mcp"),
        (f"{LOGIN}/", "/tools", "/tools/mcp"),
        ("https://LOGIN.example:443/a", "/a/b", "/a/b"),
        (LOGIN, "", ""),
    ],
)
async def test_who_has_no_token_is_told_where_to_get_one(issuer: str, mount: str, path: str) -> None:
    """The issuer to the letter, as clients compare issuers as texts; in what is mounted, at a place it can answer."""
    resource = f"https://tools.example.com{path}"
    async with locked(issuer, resource=resource, mounted=mount) as door:
        refused = await door.call()
        assert refused.status_code == 401
        told = challenge(refused)
        assert told.keys() == {"resource_metadata", "scope"}, "no error where there was no token (RFC 6750, 3.1)"
        place = told["resource_metadata"].removeprefix(f"https://tools.example.com{mount}")
        assert place == f"/.well-known/oauth-protected-resource{path.removeprefix(mount)}"
        for way in (place, "/.well-known/oauth-protected-resource", f"/.well-known/oauth-protected-resource{path}"):
            assert (await door.http.get(way)).json() == {
                "resource": resource,
                "authorization_servers": [issuer],
                "bearer_methods_supported": ["header"],
                "scopes_supported": ["tools"],
            }
            assert (await door.http.post(way, json={})).status_code == 401


SCOPES: list[tuple[dict[str, Any], list[str]]] = [
    ({"scope": "tools read"}, ["tools", "read"]),
    ({"scope": ["tools", "read", 7]}, ["tools", "read"]),
    ({"scp": "tools"}, ["tools"]),
    ({"scp": ["tools"]}, ["tools"]),
    ({"scope": "", "scp": "tools"}, []),
    *(({"scope": odd}, []) for odd in (7, None, {"tools": "write"})),
    ({}, []),
]


@pytest.mark.parametrize(("claims", "scopes"), SCOPES, ids=str)
def test_scopes_of_a_token(claims: dict[str, Any], scopes: list[str]) -> None:
    assert scopes_of(claims) == scopes


async def test_the_scopes_of_a_token_are_roles_and_each_is_needed() -> None:
    async with issuing() as issuer, locked(issuer.url, "tools write") as door:
        token = issuer.token(scope=["write", "tools", "read"], aud=["x", RESOURCE])
        assert await door.caller(token) == ["ann", "write", "tools", "read"]
        for scope in ("tools", None, "toolswrite"):
            refused = await door.call(issuer.token(scope=scope))
            told = challenge(refused)
            assert (refused.status_code, told["error"], told["scope"]) == (403, "insufficient_scope", "tools write")
            assert "resource_metadata" in told


def forged(header: dict[str, Any], payload: Any) -> str:
    return ".".join(
        base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in (header, payload)
    )


async def test_a_token_that_does_not_hold_lets_nobody_in(caplog: Caplog) -> None:
    """And is repeated nowhere: neither in the answer nor in the log."""
    caplog.set_level(logging.DEBUG)
    async with issuing() as issuer, locked(issuer.url) as door:
        issuer.keys += [public(RSA, kid="2"), public(KEY, kid="3", use="enc"), public(RSA, kid="4", alg="RSA-OAEP")]
        issuer.keys.append(public(OTHER, kid="5"))
        good, now = issuer.token(), time.time()
        assert await door.caller(good) == ["ann", "tools"]
        claims = jwt.decode(good, options={"verify_signature": False})
        pem = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        unsigned = forged({"alg": "HS256", "typ": "JWT", "kid": "2"}, claims)
        signature = jwt.get_algorithm_by_name("HS256").sign(unsigned.encode(), pem)
        deep = base64.urlsafe_b64encode(b"[" * 9_000).decode()
        bad = {
            **{f"no {name}": issuer.token(**{name: None}) for name in ("iss", "aud", "exp", "sub")},
            "another issuer": issuer.token(iss=f"{issuer.url}/"),
            "another resource": issuer.token(aud="https://tools.example.com"),
            "an odd resource": issuer.token(aud={RESOURCE: 1}),
            "an empty subject": issuer.token(sub=""),
            "a number for a subject": issuer.token(sub=7),
            "over": issuer.token(exp=now - 1),
            "not yet": issuer.token(nbf=now + 60),
            "not signed": jwt.encode(claims, None, "none"),
            "the public key as a secret": f"{unsigned}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}",
            "another's key": issuer.token(OTHER),
            "another kind of key": issuer.token(RSA, "RS256"),
            "a key for encryption": issuer.token(kid="3"),
            "a key for another algorithm": issuer.token(RSA, "RS256", kid="4"),
            "no key id, with two keys": issuer.token(kid=None),
            "algorithms": f"{forged({'alg': ['ES256'], 'kid': '1'}, {})}.x",
            "a key id that is none": f"{forged({'alg': 'ES256', 'kid': ['1']}, {})}.x",
            "a signature cut off": good.rpartition(".")[0] + ".",
            "changed": good.replace(".", ".e30", 1),
            "deep": f"{deep}.{deep}.{deep}",
            "no token": "S3CR3T",
            "two": f"{good}, Bearer {good}",
        }
        for name, token in bad.items():
            refused = await door.call(token)
            assert (name, refused.status_code, challenge(refused)["error"]) == (name, 401, "invalid_token")
            assert len(token) < 9 or token not in caplog.text + refused.text + str(refused.headers)
        places = {"Cookie": f"access_token={good}", "Authorization": f"Basic {good}", "X-Access-Token": good}
        for name, value in places.items():
            assert (await door.call(**{name: value})).status_code == 401
        posted = modern("tools/call", {"name": "whoami", "arguments": {}})
        assert (await door.http.post(f"/mcp?access_token={good}", **posted)).status_code == 401
        assert await door.caller(good) == ["ann", "tools"]
        ours = [each.getMessage() for each in caplog.records if each.name.startswith(("apcore_mcp", "mcp"))]
        assert len(ours) > len(bad)
        assert not [line for line in ours if good.rpartition(".")[2] in line]


async def test_the_issuer_may_sign_with_any_public_key() -> None:
    """A token may leave out which, where only one key fits."""
    keys = {"1": EDWARDS, "2": KEY, "3": RSA}
    async with issuing() as issuer, locked(issuer.url) as door:
        issuer.keys = [public(key, kid=kid) for kid, key in keys.items()]
        for key in issuer.keys:
            key.pop("alg", None)
        for algorithm, kid in (("EdDSA", "1"), ("ES256", "2"), ("RS256", "3"), ("RS512", "3"), ("PS256", "3")):
            for named in (kid, None):
                assert await door.caller(issuer.token(keys[kid], algorithm, named)) == ["ann", "tools"]


@pytest.mark.parametrize(("path", "place"), [("/", METADATA), ("", OPENID), *(("/a/b", place) for place in BELOW)])
async def test_the_keys_are_found_wherever_issuers_have_their_metadata(path: str, place: str) -> None:
    async with issuing() as issuer, locked(f"{issuer.url}{path}") as door:
        page = Response("<html>")  # of a site that has one for whatever it does not know
        issuer.documents = {f"{METADATA}{path}": page, place: issuer.metadata(f"{issuer.url}{path}")}
        assert await door.caller(issuer.token(iss=f"{issuer.url}{path}")) == ["ann", "tools"]


WRONG: dict[str, tuple[Any, str]] = {  # metadata, and what the log says of it
    "another issuer's": (lambda issuer: issuer.metadata("https://evil.example.com"), "which is another"),
    "with a slash": (lambda issuer: issuer.metadata(f"{issuer.url}/"), "which is another"),
    "from elsewhere": (lambda issuer: RedirectResponse(f"{issuer.url}/moved"), "no metadata"),
    "too large": (lambda issuer: issuer.metadata(issuer.url, more="x" * 600_000), "more than"),
    "keys over http": (lambda issuer: issuer.metadata(issuer.url, jwks_uri="http://example.com"), "needs https://"),
    "no keys": (lambda issuer: issuer.metadata(issuer.url, jwks_uri=f"{issuer.url}/none"), "no keys"),
    "keys of no kind": (lambda issuer: issuer.metadata(issuer.url, jwks_uri=7), ""),
    "a list": (lambda issuer: ["x"], "no metadata"),
    "no JSON": (lambda issuer: Response("<html>"), "no metadata"),
}


async def test_what_is_no_metadata_of_the_issuer_is_not_believed(caplog: Caplog) -> None:
    async with issuing() as issuer:
        for name, (document, reason) in WRONG.items():
            issuer.documents = {METADATA: document(issuer), "/moved": issuer.metadata(issuer.url)}
            caplog.clear()
            async with locked(issuer.url) as door:
                assert (name, (await door.call(issuer.token())).status_code) == (name, 503)
            (line,) = [each for each in caplog.messages if each.startswith(f"No keys of {issuer.url}: ")]
            assert reason in line


async def test_an_issuer_that_is_gone_is_asked_seldom_and_found_again(monkeypatch: Monkeypatch) -> None:
    async with issuing() as issuer, locked(issuer.url) as door:
        documents, issuer.documents = issuer.documents, {METADATA: Response(status_code=500)}
        answers = await asyncio.gather(*(door.call(issuer.token()) for _ in range(20)))
        answers += [await door.call(issuer.token()) for _ in range(5)]
        assert {(each.status_code, each.headers["retry-after"]) for each in answers} == {(503, "5")}
        assert issuer.asked.total() == 1
        issuer.documents = documents
        assert (await door.call()).status_code == 401, "who has no token needs no issuer"
        monkeypatch.setattr(example, "FETCH_AGAIN_SECONDS", 0.0)  # five seconds later
        assert await door.caller(issuer.token()) == ["ann", "tools"]


async def test_an_issuer_that_hangs_holds_up_nobody(monkeypatch: Monkeypatch) -> None:
    """Known keys hold while it does, what needs it is given up in time, and it is sent one request for all."""
    monkeypatch.setattr(example, "FETCH_SECONDS", 1.0)
    async with issuing() as issuer, locked(issuer.url) as door:
        issuer.answers.clear()
        async with asyncio.timeout(20):
            waiting = asyncio.gather(*(door.call(issuer.token()) for _ in range(10)))
            assert (await door.http.get("/health")).status_code == 200
            assert [each.status_code for each in await waiting] == [503] * 10
            assert issuer.asked.total() == 1
            issuer.answers.set()
            for limit in ("FETCH_SECONDS", "PATIENCE_SECONDS"):  # as it now answers, however slow the machine is
                monkeypatch.setattr(example, limit, 5.0)
            monkeypatch.setattr(example, "FETCH_AGAIN_SECONDS", 0.0)
            while (await door.call(issuer.token())).status_code == 503:
                pass  # by the request that was given up, which had not ended
            issuer.answers.clear()
            monkeypatch.setattr(example, "KEYS_FRESH_SECONDS", 0.0)
            monkeypatch.setattr(example, "PATIENCE_SECONDS", 0.01)
            monkeypatch.setattr(example, "FETCH_SECONDS", 60.0)
            for _ in range(10):
                assert await door.caller(issuer.token()) == ["ann", "tools"]
            issuer.answers.set()


async def test_new_keys_are_found_and_old_ones_forgotten(monkeypatch: Monkeypatch) -> None:
    async with issuing() as issuer, locked(issuer.url) as door:
        old = issuer.token()
        assert await door.caller(old) == ["ann", "tools"]
        for number in range(20):
            assert (await door.call(issuer.token(OTHER, kid=f"made up {number}"))).status_code == 401
        assert issuer.asked["/keys"] == 1
        issuer.keys = [public(KEY), public(OTHER, kid="2")]
        monkeypatch.setattr(example, "FETCH_AGAIN_SECONDS", 0.0)
        assert await door.caller(issuer.token(OTHER, kid="2")) == ["ann", "tools"]
        issuer.keys.pop(0)
        monkeypatch.setattr(example, "KEYS_FRESH_SECONDS", 0.0)
        assert (await door.call(old)).status_code == 401


async def test_only_probes_and_the_explorers_page_are_open() -> None:
    open_paths = ["/health", "/ready", "/metrics", "/explorer", "/explorer/", "/explorer/tools/whoami/page"]
    closed = "/mcp /mcp/ / /nope /health/ /health/../mcp /health%2f..%2fmcp //mcp /metrics;/../mcp"
    closed += " /explorer/server /explorer/tools /explorer/tools/whoami /explorer/tools/whoami/call /explorer//tools"
    closed += " /explorer/tools/x/y/page /explorer/page /.well-known/openid-configuration"
    options = {"explorer": True, "allow_execute": True, "metrics_collector": True}
    async with issuing() as issuer, locked(issuer.url, **options) as door:
        for path in open_paths:
            assert (path, (await door.http.get(path)).status_code != 401) == (path, True)
        for path in closed.split():
            assert (path, (await door.http.get(path)).status_code) == (path, 401)
        for path in (*open_paths, *closed.split()):
            expected = 405 if path in ("/health", "/ready") else 401
            assert (path, (await door.http.post(path, json={})).status_code) == (path, expected)
        signed = {"Authorization": f"bearer {issuer.token()}"}
        called = await door.http.post("/explorer/tools/whoami/call", json={}, headers=signed)
        assert called.json()["result"] == {"caller": ["ann", "tools"]}
    async with locked(LOGIN, transport="sse") as door:
        assert (await door.http.get("/sse")).status_code == 401
        assert (await door.http.post("/messages/?session_id=1", json={})).status_code == 401


async def test_websockets_are_refused_as_ever() -> None:
    async with async_serve(registry_of(), middleware=login(LOGIN, RESOURCE)) as app:
        client = TestClient(app)
        for path in ("/mcp", "/health"):
            with pytest.raises(WebSocketDisconnect), client.websocket_connect(path, headers={"Host": "127.0.0.1"}):
                pass


async def test_a_session_stays_its_users_after_a_refresh_of_the_token() -> None:
    async with issuing() as issuer, locked(issuer.url) as door:

        async def post(body: Any, token: str, **headers: str) -> Any:
            sent = ACCEPT | headers | {"Authorization": f"Bearer {token}"}
            return await door.http.post("/mcp", json=body, headers=sent)

        hello = message("initialize", initialize_params("2025-11-25"))
        opened = await post(hello, issuer.token(jti="1", client_id="a"))
        session = {"Mcp-Session-Id": opened.headers["mcp-session-id"]}
        call = message("tools/call", {"name": "whoami", "arguments": {}}, 2)
        refreshed = await post(call, issuer.token(jti="2", client_id="b"), **session)
        assert answer(refreshed)["result"]["structuredContent"] == {"caller": ["ann", "tools"]}
        assert (await post(call, issuer.token(sub="bob"), **session)).status_code == 404


NO_ISSUERS = f"http://login.example.com http://10.0.0.1 login.example.com https:// {LOGIN}?tenant=1 {LOGIN}#".split()
UNUSABLE: list[Any] = [(issuer, RESOURCE) for issuer in NO_ISSUERS]
UNUSABLE += [(LOGIN, resource) for resource in ("tools.example.com/mcp", 'https://tools.example.com/"')]
UNUSABLE += [(LOGIN, RESOURCE, [scope]) for scope in ("a b", '"')]


@pytest.mark.parametrize("given", UNUSABLE)
def test_no_issuer_resource_or_scope_is_refused_at_the_start(given: Any) -> None:
    with pytest.raises(ValueError, match=r"^(Not|An issuer)"):
        login(*given)


async def test_only_who_has_the_scope_is_offered_what_destroys() -> None:
    def run(inputs: Any, context: Any) -> dict[str, Any]:
        return {}

    destroy = FunctionalModule(run, annotations=ModuleAnnotations(destructive=True))
    call_it = FunctionalModule(lambda inputs, context: context.executor.call("t.destroy", {}, context))
    registry = registry_of({"t.destroy": destroy, "t.harmless": run, "t.calls": call_it})
    executor = Executor(registry, acl=acl_by_scope(registry))
    async with issuing() as issuer, locked(issuer.url, source=executor) as door:
        everything = ["t.destroy", "t.harmless", "t.calls"]
        for scope, allowed in (("tools", ["t.harmless"]), ("tools destructive", everything)):
            for name in everything:
                result = answer(await door.call(issuer.token(scope=scope), name))["result"]
                assert (name, result["isError"]) == (name, name not in allowed)


@pytest.mark.skipif(sys.platform == "win32", reason="ends by signal")
def test_the_program_is_a_service(tmp_path: Path, monkeypatch: Monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It tells systemd that it is there, and then that its event loop turns."""
    port = free_port()
    program = [sys.executable, str(ROOT / "examples" / "login.py"), "--extensions-dir", str(EXTENSIONS)]
    program += ["--scopes", "tools", "--resource", "https://tools.example.com/mcp", "--port", str(port), "--issuer"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.settimeout(30)
        systemd.bind(str(tmp_path / "notify"))
        told = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000"}
        server = subprocess.Popen([*program, "http://127.0.0.1:9"], stderr=subprocess.PIPE, text=True, env=told)
        try:
            assert [systemd.recv(99) for _ in range(3)] == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]
            refused = httpx.post(f"http://127.0.0.1:{port}/mcp", json={}, headers={"Host": "tools.example.com"})
            assert challenge(refused)["scope"] == "tools"
        finally:
            server.send_signal(signal.SIGTERM)
            said = server.communicate(timeout=30)[1]
    assert (server.returncode, "Traceback" in said) == (0, False), said
    monkeypatch.setattr(sys, "argv", [*program[1:], "http://login.example.com"])
    with pytest.raises(SystemExit, match="2"):
        example.main()
    assert "An issuer needs https://" in capsys.readouterr().err
