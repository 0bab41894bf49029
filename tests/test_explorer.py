"""The Tool Explorer's routes (FR-EXPLORER-001 to -006), and who may use them. What the page does is in
test_explorer_browser.py."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from datetime import date
from typing import Any
from urllib.parse import urljoin

import httpx
import pytest
from apcore import ACL, ACLRule, Executor, ModuleAnnotations, ModuleExample
from conftest import FunctionalModule, echo, registry_of, serving

from apcore_mcp import async_serve, elicit, serve

SIZE = {"type": "object", "properties": {"width": {"type": "integer"}}, "required": ["width"]}


def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    raise OSError("/etc/passwd")


async def ask(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"answer": await elicit(context, "Sure?")}


def modules() -> dict[str, Any]:
    picture = {"type": "string", "contentEncoding": "base64", "contentMediaType": "image/png"}
    drawing = {"type": "object", "properties": {"picture": picture, "n": {"type": "integer"}}}
    return {
        "image.resize": FunctionalModule(
            echo,
            input_schema=SIZE,
            description="Resize an image",
            documentation="Resize an image\n\n# Resize",
            annotations=ModuleAnnotations(idempotent=True, requires_approval=True),
            examples=[ModuleExample("small", {"width": 9, "day": date(2026, 2, 3)}), {"inputs": {}}],
        ),
        "t.draw": FunctionalModule(lambda inputs, context: {"picture": "AAAA", "n": 1}, output_schema=drawing),
        "t.fail": fail,
        "t.ask": ask,
    }


@pytest.fixture(scope="module")
def explorer() -> Iterator[httpx.Client]:
    """A client of an Explorer that may execute."""
    options = {"explorer": True, "allow_execute": True}
    with serving(registry_of(modules()), **options) as url, httpx.Client(base_url=url, timeout=30) as client:
        yield client


# ---- What it shows ----


@pytest.mark.requirement("FR-EXPLORER-001", "FR-EXPLORER-006")
@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
@pytest.mark.parametrize("prefix", ["/explorer", "/custom/", "/a/b"])
def test_the_page_is_where_the_prefix_says(transport: str, prefix: str) -> None:
    options = {"explorer": True, "explorer_prefix": prefix, "transport": transport}
    with serving(registry_of(modules()), **options) as url, httpx.Client(base_url=url) as client:
        at = prefix.rstrip("/")
        assert client.get(f"{at}/").headers["content-type"] == "text/html; charset=utf-8"
        assert client.get(at, follow_redirects=True).url.path == f"{at}/"
        assert len(client.get(f"{at}/tools").json()) == 4
        endpoint = client.get(f"{at}/server").json()["endpoint"]
        assert urljoin(f"{at}/", endpoint) == ("/sse" if transport == "sse" else "/mcp")
        assert (client.get("/explorer/").status_code == 404) == (at != "/explorer")


@pytest.mark.requirement("FR-EXPLORER-001")
@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
def test_without_explorer_nothing_of_it_is_there(transport: str) -> None:
    with serving(registry_of(modules()), transport=transport, allow_execute=True) as url:
        assert httpx.get(f"{url}/explorer/").status_code == 404
        assert httpx.get(f"{url}/explorer/tools").status_code == 404
        assert httpx.post(f"{url}/explorer/tools/t.ask/call", json={}).status_code == 404


def test_the_server_says_what_it_is() -> None:
    options = {"name": "house", "version": "2.1", "instructions": "Knock.", "transport": "sse", "allow_execute": True}
    with serving(registry_of(modules()), explorer=True, **options) as url:
        told = httpx.get(f"{url}/explorer/server").json()
    expected = {key: value for key, value in options.items() if key != "allow_execute"}
    assert told == {**expected, "endpoint": "../sse", "allowExecute": True}


@pytest.mark.requirement("FR-EXPLORER-002")
def test_the_list_has_a_summary_of_every_tool(explorer: httpx.Client) -> None:
    tools = explorer.get("/explorer/tools").json()
    assert [tool["name"] for tool in tools] == ["image.resize", "t.ask", "t.draw", "t.fail"]
    summary = tools[0]
    assert summary["description"] == "Resize an image"
    assert summary["annotations"] == {
        "readOnlyHint": False, "destructiveHint": False, "idempotentHint": True, "openWorldHint": True,
    }  # fmt: skip
    assert summary["_meta"]["apcore/requires_approval"] is True
    assert not {"inputSchema", "outputSchema"} & summary.keys()


@pytest.mark.requirement("FR-EXPLORER-003")
@pytest.mark.parametrize("name", ["image.resize", "image-resize"])
def test_a_tool_is_found_under_either_spelling_with_all_there_is_to_know(explorer: httpx.Client, name: str) -> None:
    tool = explorer.get(f"/explorer/tools/{name}").json()
    assert tool["name"] == "image.resize"
    assert tool["inputSchema"] == SIZE
    assert tool["documentation"] == "# Resize"
    assert [(e["title"], e["inputs"]) for e in tool["examples"]] == [("small", {"width": 9, "day": "2026-02-03"})]


def test_names_are_spelled_as_clients_are_told_them() -> None:
    with serving(registry_of(modules()), explorer=True, tool_names="portable") as url:
        assert httpx.get(f"{url}/explorer/tools").json()[0]["name"] == "image-resize"
        assert httpx.get(f"{url}/explorer/tools/image.resize").json()["name"] == "image-resize"


@pytest.mark.parametrize("options", [{"prefix": "image."}, {"tags": ["public"]}])
def test_only_listed_tools_can_be_seen_or_run(options: dict[str, Any]) -> None:
    with serving(registry_of(modules()), explorer=True, allow_execute=True, **options) as url:
        assert httpx.get(f"{url}/explorer/tools/t.fail").status_code == 404
        assert httpx.post(f"{url}/explorer/tools/t.fail/call", json={}).status_code == 404


async def test_the_endpoint_is_told_relative_to_the_page_wherever_the_app_is_mounted() -> None:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    async with async_serve(registry_of(modules()), explorer=True) as app:
        outer = Starlette(routes=[Mount("/agents", app)])
        transport = httpx.ASGITransport(app=outer)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            assert (await client.get("/agents/explorer/")).status_code == 200
            assert (await client.get("/agents/explorer/server")).json()["endpoint"] == "../mcp"


# ---- What it runs ----


@pytest.mark.requirement("FR-EXPLORER-004")
@pytest.mark.parametrize(
    ("name", "body", "status", "answer"),
    [
        pytest.param("image.resize", {"width": 800}, 200, {"result": {"width": 800}}, id="result"),
        pytest.param(
            "t.draw",
            {},
            200,
            {"result": {"n": 1}, "content": [{"type": "image", "data": "AAAA", "mimeType": "image/png"}]},
            id="image",
        ),
        pytest.param("t.ask", {}, 200, {"result": {"answer": None}}, id="nobody-can-be-asked"),
        pytest.param("foo", {}, 404, {"error": "Tool 'foo' not found"}, id="unknown"),
        pytest.param(
            "t.fail",
            {},
            500,
            {
                "error": "Internal error occurred",
                "status": "failure",
                "error_type": "MODULE_EXECUTE_ERROR",
                "error_message": "Internal error occurred",
            },
            id="failure",
        ),
    ],
)
def test_a_call_is_answered_in_json(
    explorer: httpx.Client, name: str, body: dict[str, Any], status: int, answer: dict[str, Any]
) -> None:
    response = explorer.post(f"/explorer/tools/{name}/call", json=body)
    assert (response.status_code, response.json()) == (status, answer)


def test_a_result_is_json_whatever_an_output_formatter_makes_of_the_text() -> None:
    options = {"explorer": True, "allow_execute": True, "output_formatter": lambda value: "a text"}
    with serving(registry_of(modules()), **options) as url:
        response = httpx.post(f"{url}/explorer/tools/image.resize/call", json={"width": 800})
    assert response.json() == {"result": {"width": 800}}


def test_wrong_input_is_told_with_its_field(explorer: httpx.Client) -> None:
    response = explorer.post("/explorer/tools/image.resize/call", json={"width": "wide"})
    told = response.json()
    assert response.status_code == 400
    assert told["error"].startswith("Input validation failed:\n- width: ")
    assert told["error_type"] == "SCHEMA_VALIDATION_ERROR"
    assert [error["field"] for error in told["error_details"]["errors"]] == ["width"]


@pytest.mark.requirement("FR-EXPLORER-004")
def test_execution_is_off_unless_allowed() -> None:
    with serving(registry_of(modules()), explorer=True) as url:
        assert httpx.get(f"{url}/explorer/server").json()["allowExecute"] is False
        for name in ("image.resize", "foo"):
            response = httpx.post(f"{url}/explorer/tools/{name}/call", json={"width": 1})
            assert (response.status_code, response.json()) == (403, {"error": "Tool execution is disabled"})


def test_a_call_goes_through_the_whole_executor() -> None:
    acl = ACL([ACLRule(callers=["*"], targets=["*"], effect="deny")])
    with serving(Executor(registry_of(modules()), acl=acl), explorer=True, allow_execute=True) as url:
        response = httpx.post(f"{url}/explorer/tools/t.ask/call", json={})
    assert (response.status_code, response.json()["error"]) == (500, "Access denied")


def test_a_tool_that_needs_approval_is_refused_where_it_is_required() -> None:
    with serving(registry_of(modules()), explorer=True, allow_execute=True, approval="require") as url:
        response = httpx.post(f"{url}/explorer/tools/image.resize/call", json={"width": 1})
    assert (response.status_code, response.json()["error"]) == (500, "Approval was denied")


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"a": NaN}', b"\xff"])
def test_a_body_that_is_no_object_is_told_so(explorer: httpx.Client, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    response = explorer.post("/explorer/tools/t.ask/call", content=body, headers=headers)
    assert (response.status_code, response.json()) == (
        400,
        {"error": "Request body must be a JSON object: the tool's arguments"},
    )


def test_a_body_over_four_mebibytes_is_refused(explorer: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"a": "'
        for _ in range(5):
            yield b"a" * 1024 * 1024

    headers = {"Content-Type": "application/json"}
    assert explorer.post("/explorer/tools/t.ask/call", content=chunks(), headers=headers).status_code == 413


async def test_closing_the_request_cancels_the_call() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def endless(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        return {}

    with serving(registry_of({"t.endless": endless}), explorer=True, allow_execute=True) as url:
        async with httpx.AsyncClient(timeout=30) as client:
            calling = asyncio.create_task(client.post(f"{url}/explorer/tools/t.endless/call", json={}))
            assert await asyncio.to_thread(begun.wait, 20)
            calling.cancel()
            assert await asyncio.to_thread(cancelled.wait, 20)


# ---- Who may use it ----


@pytest.mark.requirement("FR-EXPLORER-005")
def test_the_page_may_load_and_send_nothing_elsewhere_and_nobody_may_frame_it(explorer: httpx.Client) -> None:
    response = explorer.get("/explorer/")
    policy = dict(part.strip().split(" ", 1) for part in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert (policy["connect-src"], policy["img-src"], policy["media-src"]) == ("'self'", "data:", "data:")
    for tag in ("script", "style"):
        assert response.text.count(f"<{tag}") == response.text.count(f"</{tag}>") == 1
        inside = response.text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


@pytest.mark.parametrize("path", ["", "server", "tools", "tools/t.ask", "tools/none"])
def test_no_answer_is_cached_sniffed_or_read_by_another_site(explorer: httpx.Client, path: str) -> None:
    headers = explorer.get(f"/explorer/{path}").headers
    assert headers["cache-control"] == "no-store"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "application/json", "Origin": "http://evil.example"}, 403),
        ({"Content-Type": "application/json", "Origin": "http://127.0.0.1:1"}, 403),
        ({"Content-Type": "application/json", "Origin": "null"}, 403),
        ({"Content-Type": "application/json", "Host": "evil.example"}, 421),
    ],
)
def test_no_other_site_can_run_a_tool(headers: dict[str, str], status: int) -> None:
    ran = threading.Event()

    def run(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        ran.set()
        return {}

    with serving(registry_of({"t.run": run}), explorer=True, allow_execute=True) as url:
        response = httpx.post(f"{url}/explorer/tools/t.run/call", content=json.dumps({}), headers=headers)
    assert response.status_code == status
    assert not ran.is_set()


@pytest.mark.parametrize(
    ("host", "allowed", "status"),
    [
        ("rebound.example", None, 421),
        ("127.0.0.1", None, 200),
        ("localhost:8000", None, 200),
        ("rebound.example", ["tools.example"], 421),
        ("tools.example", ["tools.example"], 200),
    ],
)
def test_on_all_interfaces_a_domain_must_be_allowed_to_reach_the_explorer(
    host: str, allowed: list[str] | None, status: int
) -> None:
    with serving(registry_of(modules()), host="0.0.0.0", allowed_hosts=allowed, explorer=True) as url:
        assert httpx.get(f"{url}/explorer/tools", headers={"Host": host}).status_code == status


# ---- What is refused at the start ----


@pytest.mark.requirement("FR-EXPLORER-006")
@pytest.mark.parametrize(
    ("prefix", "message"),
    [
        ("explorer", "explorer_prefix must be a path such as '/explorer'"),
        ("/", "explorer_prefix must be a path such as '/explorer'"),
        ("/{name}", "explorer_prefix must be a path such as '/explorer'"),
        ("", "explorer_prefix must not be empty"),
        ("/a/../mcp", "explorer_prefix must be a path such as '/explorer'"),
        ("/messages/x", "and none of /mcp, /sse, /messages, /health, /metrics; got '/messages/x'"),
        ("/mcp/", "and none of /mcp, /sse, /messages, /health, /metrics; got '/mcp'"),
    ],
)
def test_a_prefix_that_is_no_path_of_its_own_is_refused(prefix: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        serve(registry_of(), transport="streamable-http", explorer=True, explorer_prefix=prefix)
