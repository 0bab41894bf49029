"""The Tool Explorer's routes, and who may use them. What the page does is in test_explorer_page.py."""

from __future__ import annotations

import base64
import hashlib
import math
from contextlib import AbstractAsyncContextManager
from datetime import date
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from apcore import ACL, Executor, ModuleAnnotations, ModuleExample
from conftest import FunctionalModule, echo, registry_of
from support import UNASKED, asgi_client

from apcore_mcp import elicit

SIZE = {"type": "object", "properties": {"width": {"type": "integer"}}, "required": ["width"]}
PICTURE = {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"}
JSON = {"Content-Type": "application/json"}
ran: list[Any] = []


def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    raise OSError("/etc/passwd")


def fail_to_format(value: Any) -> str:
    value.clear()
    raise ValueError("nothing can be made of it")


async def ask(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    ran.append(inputs)
    return {"answer": await elicit(context, "Sure?")}


MODULES = {
    "image.resize": FunctionalModule(
        echo,
        input_schema=SIZE,
        description="Resize an image",
        documentation="# Resize",
        annotations=ModuleAnnotations(idempotent=True, requires_approval=True),
        examples=[ModuleExample("small", {"width": 9, "day": date(2026, 2, 3)}), {"inputs": {}}],
    ),
    "t.draw": FunctionalModule(
        lambda inputs, context: {"picture": "AAAA", "n": 1},
        output_schema={"type": "object", "properties": {"picture": PICTURE, "n": {"type": "integer"}}},
    ),
    "t.fail": fail,
    "t.ask": ask,
    "t.date": lambda inputs, context: {"day": date(2026, 2, 3), "none": None, "big": 10**30},
    "t.nan": lambda inputs, context: {"n": math.nan},
    "t.text": FunctionalModule(lambda inputs, context: {"width": "wide"}, output_schema=SIZE),
    "t.none": lambda inputs, context: None,
}


def explorer(source: Any = None, **options: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    """A client of an Explorer that may execute, unless `options` say otherwise."""
    return asgi_client(source or registry_of(MODULES), **{"explorer": True, "allow_execute": True, **options})


# ---- What it shows ----


@pytest.mark.requirement("FR-EXPLORER-001", "FR-EXPLORER-006")
@pytest.mark.parametrize(
    ("prefix", "transport", "mounted"),
    [("/explorer", "streamable-http", ""), ("/custom/", "sse", ""), ("/a/b", "streamable-http", "/agents")],
)
async def test_the_page_is_where_the_prefix_says(prefix: str, transport: str, mounted: str) -> None:
    async with explorer(explorer_prefix=prefix, transport=transport, mounted=mounted) as client:
        at = prefix.rstrip("/")
        assert (await client.get(f"{at}/")).headers["content-type"] == "text/html; charset=utf-8"
        assert (await client.get(at, follow_redirects=True)).url.path == f"{mounted}{at}/"
        assert len((await client.get(f"{at}/tools")).json()) == len(MODULES)
        endpoint = (await client.get(f"{at}/server")).json()["endpoint"]
        assert urljoin(f"{mounted}{at}/", endpoint) == mounted + ("/sse" if transport == "sse" else "/mcp")
        assert (await client.post(f"{at}/tools/t.ask/call", json={})).json() == {"result": {"answer": None}}
        assert ((await client.get("/explorer/")).status_code == 404) == (at != "/explorer")


@pytest.mark.requirement("FR-EXPLORER-001")
async def test_the_server_says_what_it_is_and_without_explorer_nothing() -> None:
    options = {"name": "house", "version": "2.1", "instructions": "Knock.", "transport": "sse"}
    async with explorer(**options) as client:
        told = {**options, "endpoint": "../sse", "allowExecute": True, "hasACL": False}
        assert (await client.get("/explorer/server")).json() == told
    async with explorer(explorer=False) as client:
        for method, path in (("GET", ""), ("GET", "tools"), ("POST", "tools/t.ask/call")):
            assert (await client.request(method, f"/explorer/{path}", json={})).status_code == 404


@pytest.mark.requirement("FR-EXPLORER-002", "FR-EXPLORER-003")
async def test_the_list_sums_up_every_tool_and_one_is_told_in_full() -> None:
    async with explorer() as client:
        summary, *others = (await client.get("/explorer/tools")).json()
        tool, same = [(await client.get(f"/explorer/tools/image{dot}resize")).json() for dot in ".-"]
    assert [summary["name"], *(other["name"] for other in others)] == sorted(MODULES)
    assert summary["description"] == "Resize an image"
    assert summary["annotations"]["idempotentHint"] is True
    assert summary["_meta"]["apcore/requires_approval"] is True
    assert not {"inputSchema", "outputSchema"} & summary.keys()
    assert tool == same, "under either spelling"
    assert tool.items() >= summary.items()
    assert (tool["inputSchema"], tool["documentation"]) == (SIZE, "# Resize")
    assert [(e["title"], e["inputs"]) for e in tool["examples"]] == [("small", {"width": 9, "day": "2026-02-03"})]


async def test_only_what_clients_are_told_of_can_be_seen_or_run() -> None:
    async with explorer(tool_names="portable", prefix="image.") as client:
        assert [tool["name"] for tool in (await client.get("/explorer/tools")).json()] == ["image-resize"]
        assert (await client.get("/explorer/tools/image.resize")).json()["name"] == "image-resize"
        assert (await client.get("/explorer/tools/t.fail")).status_code == 404
        assert (await client.post("/explorer/tools/t.fail/call", json={})).status_code == 404


# ---- What it runs ----

CRASHED = {"status": "failure", "error_type": "MODULE_EXECUTE_ERROR", "error_message": "Internal error occurred"}
NAN = "Failed to serialize module output: nan at n (the tool has run)"
WRONG = "Input validation failed:\n- width: 'wide' is not of type 'integer' (type)"
NO_OBJECT = {"error": "Request body must be a JSON object: the tool's arguments"}
DRAWN = [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]


@pytest.mark.requirement("FR-EXPLORER-004")
@pytest.mark.parametrize(
    ("name", "body", "status", "expected"),
    [
        pytest.param("image.resize", b'{"width": 800}', 200, {"result": {"width": 800}}, id="result"),
        pytest.param("t.draw", b"{}", 200, {"result": {"n": 1}, "content": DRAWN}, id="image"),
        pytest.param("t.ask", b"{}", 200, {"result": {"answer": None}}, id="nobody-can-be-asked"),
        pytest.param("foo", b"{}", 404, {"error": "Tool 'foo' not found"}, id="unknown"),
        pytest.param("t.fail", b"{}", 500, {"error": "Internal error occurred", **CRASHED}, id="failure"),
        pytest.param("t.date", b"{}", 200, {"result": {"day": "2026-02-03", "none": None, "big": 10**30}}, id="plain"),
        pytest.param("t.nan", b"{}", 500, {"error": NAN}, id="no-JSON"),
        pytest.param("t.text", b"{}", 500, {"user_fixable": False}, id="output-of-another-shape"),
        pytest.param("t.none", b"{}", 200, {"result": {}}, id="nothing"),
        pytest.param("image.resize", b'{"width": "wide"}', 400, {"error": WRONG, "user_fixable": True}, id="wrong"),
        *(pytest.param("t.ask", body, 400, NO_OBJECT, id=f"{body}") for body in (b"", b"[]", b'{"a": NaN}', b"\xff")),
    ],
)
@pytest.mark.parametrize("validate_inputs", [False, True])
async def test_a_call_is_answered_in_json(
    name: str, body: bytes, status: int, expected: dict[str, Any], validate_inputs: bool, caplog: Any
) -> None:
    """The result is JSON and no output formatter is asked: it is for the text that clients get."""
    options = {"validate_inputs": validate_inputs, "output_formatter": fail_to_format}
    async with explorer(approval="auto", **options) as client:
        response = await client.post(f"/explorer/tools/{name}/call", content=body, headers=JSON)
    answer = response.json()
    assert (response.status_code, {key: answer[key] for key in expected}) == (status, expected)
    assert ("content" in answer) == (name == "t.draw")
    assert "output_formatter" not in caplog.text


@pytest.mark.requirement("FR-EXPLORER-004")
async def test_what_may_not_be_run_is_refused() -> None:
    """By an ACL, 403 and no failure of the server's; where nothing may be run; and where nobody approves."""
    acl = Executor(registry_of(MODULES), acl=ACL([], default_effect="deny"))
    off, denied = {"error": "Tool execution is disabled"}, {"error": "Access denied", "error_type": "ACL_DENIED"}
    refused: list[tuple[Any, str, Any, int, dict[str, str]]] = [
        ({"source": acl}, "image.resize", 1, 403, denied),
        ({"source": acl}, "image.resize", "wide", 403, denied),
        ({"allow_execute": False}, "image.resize", 1, 403, off),
        ({"allow_execute": False}, "foo", 1, 403, off),
        ({}, "image.resize", 1, 500, {"error": UNASKED}),
    ]
    for options, name, width, status, expected in refused:
        async with explorer(**options) as client:
            response = await client.post(f"/explorer/tools/{name}/call", json={"width": width})
            assert (response.status_code, response.json().items() >= expected.items()) == (status, True), options
            may_run = (await client.get("/explorer/server")).json()["allowExecute"]
            assert may_run is options.get("allow_execute", True)


# ---- Who may use it ----


@pytest.mark.requirement("FR-EXPLORER-005")
async def test_the_page_may_load_and_send_nothing_elsewhere_and_nobody_may_frame_it() -> None:
    async with explorer() as client:
        response = await client.get("/explorer/")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert (policy["connect-src"], policy["img-src"], policy["media-src"]) == ("'self'", "data:", "data:")
    for tag in ("script", "style"):
        assert response.text.count(f"<{tag}") == response.text.count(f"</{tag}>") == 1
        inside = response.text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


async def test_the_frame_of_a_tools_own_page_may_run_scripts_and_nothing_else() -> None:
    """It is the same for every tool, known or not, as it is loaded by who need not be allowed to see the tool."""
    async with explorer() as client:
        assert "frame-src 'self'" in (await client.get("/explorer/")).headers["content-security-policy"].split("; ")
        frame, other = [await client.get(f"/explorer/tools/{name}/page") for name in ("t.draw", "none")]
    assert frame.text == other.text
    policy = dict(part.partition(" ")[::2] for part in frame.headers["content-security-policy"].split("; "))
    assert policy.pop("sandbox") == "allow-scripts"
    assert policy.pop("frame-ancestors") == "'self'"
    assert {*policy.values()} == {"'none'", "'unsafe-inline'", "data:"}
    assert {name for name, value in policy.items() if value == "'unsafe-inline'"} == {"script-src", "style-src"}
    assert policy["default-src"] == "'none'"
    assert frame.headers["connection-allowlist"] == "()", "which stops WebRTC, where it is known"


async def test_no_answer_is_cached_sniffed_or_read_by_another_site() -> None:
    wanted = {"cache-control": "no-store", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
    wanted |= {"cross-origin-resource-policy": "same-origin"}
    async with explorer() as client:
        for path in ("", "server", "tools", "tools/t.ask", "tools/t.ask/page", "tools/none"):
            assert (await client.get(f"/explorer/{path}")).headers.items() >= wanted.items(), path


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        (JSON | {"Origin": "http://evil.example"}, 403),
        (JSON | {"Host": "evil.example"}, 421),
    ],
)
async def test_no_other_site_can_run_a_tool(headers: dict[str, str], status: int) -> None:
    ran.clear()
    async with explorer() as client:
        response = await client.post("/explorer/tools/t.ask/call", content="{}", headers=headers)
        assert (response.status_code, ran) == (status, [])
        await client.post("/explorer/tools/t.ask/call", json={})
    assert ran == [{}]
