"""One server, both eras of the protocol, both main transports: every handshake version, and 2026-07-28.

Demanded by the design ("every handshake version before it from one server"), FR-SERVER-001/-002, FR-EXEC-007,
design §2, §3 "Output", "Dynamic" and §4; the shapes on the wire are MCP's. The servers are the command line's, as users
start it; the clients are the SDK's own and, where the wire itself matters, a few lines that know nothing of MCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from conftest import (
    HANDSHAKE,
    MODERN,
    ROOT,
    FunctionalModule,
    RawClient,
    command,
    free_port,
    registry_of,
    serving,
    stdio_parameters,
)
from mcp.client import Client
from mcp.shared.exceptions import MCPError

ACCEPT = {"Accept": "application/json, text/event-stream"}
HANDSHAKE_VERSIONS = ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"]
META = "io.modelcontextprotocol/"
MARATHON = {"value": 42.195, "source": "km", "target": "mi", "digits": 2}
MILES = {"value": 26.22, "unit": "mi", "kind": "length"}


def message(method: str, params: dict[str, Any] | None = None, request_id: int = 1) -> dict[str, Any]:
    """A JSON-RPC request."""
    return {"jsonrpc": "2.0", "id": request_id, "method": method, **({} if params is None else {"params": params})}


def enveloped(params: dict[str, Any] | None, version: str = MODERN) -> dict[str, Any]:
    """Params with what every request carries from 2026-07-28 on."""
    stamp = {"protocolVersion": version, "clientInfo": {"name": "raw", "version": "1"}, "clientCapabilities": {}}
    return {**(params or {}), "_meta": {META + key: value for key, value in stamp.items()}}


def modern(method: str, params: dict[str, Any] | None = None, **headers: str | None) -> dict[str, Any]:
    """What httpx posts to ask `method` as a client of 2026-07-28; `headers` overrides (None leaves one out)."""
    sent = {"mcp_protocol_version": MODERN, "mcp_method": method, "mcp_name": (params or {}).get("name"), **headers}
    routing = {name.replace("_", "-"): value for name, value in sent.items() if value is not None}
    return {"json": message(method, enveloped(params)), "headers": ACCEPT | routing}


def answer(response: httpx.Response) -> dict[str, Any]:
    """The JSON-RPC message of a response, be it JSON or a stream of one event."""
    data = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    message: dict[str, Any] = json.loads(data[-1] if data else response.text)
    return message


def initialize_params(version: str) -> dict[str, Any]:
    return {"protocolVersion": version, "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}}


def handshake(client: httpx.Client, endpoint: str, version: str = HANDSHAKE_VERSIONS[-1]) -> tuple[Any, dict[str, str]]:
    """Open a session; the `initialize` result, and the headers of the session's requests."""
    response = client.post(endpoint, json=message("initialize", initialize_params(version)), headers=ACCEPT)
    result = answer(response)["result"]
    session = {"Mcp-Session-Id": response.headers["mcp-session-id"], "MCP-Protocol-Version": result["protocolVersion"]}
    initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    assert client.post(endpoint, json=initialized, headers=ACCEPT | session).status_code == 202
    return result, ACCEPT | session


class Wire(NamedTuple):
    """A way to ask a server something, and the era it is asked in."""

    mode: str
    request: Callable[[str, dict[str, Any] | None], dict[str, Any]]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The examples, served over streamable HTTP by the command line."""
    port = free_port()
    arguments = command("--transport", "streamable-http", "--port", str(port))
    process = subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert any("server started" in line for line in process.stderr), "the server did not start"
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        process.communicate(timeout=30)


@pytest.fixture(scope="module")
def exported() -> Any:
    """The examples as `--export mcp` prints them."""
    listing = subprocess.run(command("--export", "mcp"), cwd=ROOT, capture_output=True, check=True, timeout=30)
    return json.loads(listing.stdout)


@pytest.fixture(scope="module", params=["stdio-handshake", "stdio-2026-07-28", "http-handshake", "http-2026-07-28"])
def wire(request: pytest.FixtureRequest) -> Iterator[Wire]:
    """The examples' server on each transport in each era."""
    if request.param == "stdio-handshake":
        with RawClient(command()) as client:
            client.initialize()
            yield Wire(HANDSHAKE, client.request)
    elif request.param == "stdio-2026-07-28":
        with RawClient(command()) as client:
            yield Wire(MODERN, lambda method, params: client.request(method, enveloped(params)))
    else:
        url = request.getfixturevalue("endpoint")
        with httpx.Client(timeout=30) as http:
            if request.param == "http-2026-07-28":
                yield Wire(MODERN, lambda method, params: answer(http.post(url, **modern(method, params))))
            else:
                _, headers = handshake(http, url)
                yield Wire(
                    HANDSHAKE,
                    lambda method, params: answer(http.post(url, json=message(method, params), headers=headers)),
                )


@pytest.mark.parametrize(
    ("method", "params", "told", "told_from_2026_on"),
    [
        pytest.param("no/such", None, -32601, -32601, id="unknown-method"),
        pytest.param("tools/list", {"cursor": "bogus"}, -32602, -32602, id="bogus-cursor"),
        pytest.param("tools/list", {"cursor": ""}, -32602, -32602, id="empty-cursor"),
        pytest.param("tools/list", {"cursor": 5}, -32602, -32602, id="cursor-of-another-type"),
        pytest.param("tools/list", {"no_such": 1}, "result", "result", id="unknown-params-are-ignored"),
        pytest.param("tools/call", {}, -32602, -32602, id="call-of-nothing"),
        pytest.param("tools/call", {"name": "units.convert", "arguments": [1]}, -32602, -32602, id="list-of-arguments"),
        pytest.param("tools/call", {"name": "no.such", "arguments": {}}, "result", "result", id="unknown-tool"),
        pytest.param("ping", None, "result", -32601, id="ping-is-of-the-handshake-era"),
        pytest.param("server/discover", None, -32601, "result", id="discover-is-of-2026"),
    ],
)
def test_a_request_has_the_same_fate_on_every_transport(
    wire: Wire, method: str, params: dict[str, Any] | None, told: object, told_from_2026_on: object
) -> None:
    response = wire.request(method, params)
    fate = response["error"]["code"] if "error" in response else "result"
    assert fate == (told if wire.mode == HANDSHAKE else told_from_2026_on)


def test_every_transport_and_era_lists_what_the_export_prints(wire: Wire, exported: Any) -> None:
    listed = wire.request("tools/list", None)["result"]["tools"]
    assert listed == exported
    assert "units.convert" in [tool["name"] for tool in listed]


@pytest.mark.parametrize(
    ("method", "params", "cacheable"),
    [
        pytest.param("tools/list", None, True, id="list"),
        pytest.param("tools/call", {"name": "units.convert", "arguments": MARATHON}, False, id="call"),
        pytest.param("tools/call", {"name": "units.convert", "arguments": {}}, False, id="failing-call"),
    ],
)
def test_only_results_of_2026_say_their_type_their_server_and_how_long_they_keep(
    wire: Wire, method: str, params: dict[str, Any] | None, cacheable: bool
) -> None:
    result = wire.request(method, params)["result"]
    stamp = result.get("_meta", {}).pop(f"{META}serverInfo", None)
    novelties = {key: result[key] for key in ("resultType", "ttlMs", "cacheScope") if key in result}
    if wire.mode == HANDSHAKE:
        assert (stamp, novelties) == (None, {})
        return
    assert stamp["name"] == "apcore-mcp"
    assert novelties.pop("resultType") == "complete"
    assert novelties.keys() == ({"ttlMs", "cacheScope"} if cacheable else set())
    if cacheable:
        assert novelties["ttlMs"] >= 0
        assert novelties["cacheScope"] in ("public", "private")


async def _convert(client: Client) -> object:
    result = await client.call_tool("units.convert", MARATHON)
    return result.is_error, result.structured_content, [json.loads(part.text) for part in result.content]


async def _convert_wrongly(client: Client) -> object:
    result = await client.call_tool("units.convert", MARATHON | {"digits": 99})
    [part] = result.content
    return result.is_error, result.structured_content, part.text.startswith("Input validation failed:\n- digits: ")


async def _call_nothing(client: Client) -> object:
    result = await client.call_tool("no.such", {})
    return result.is_error, result.structured_content, [part.text for part in result.content]


async def _list_beyond_the_end(client: Client) -> object:
    with pytest.raises(MCPError) as refusal:
        await client.list_tools(cursor="bogus")
    return refusal.value.code


async def _schemas(client: Client) -> object:
    [tool] = [tool for tool in (await client.list_tools()).tools if tool.name == "units.convert"]
    return sorted(tool.input_schema["required"]), sorted((tool.output_schema or {})["properties"])


SITUATIONS: dict[str, tuple[Callable[[Client], Awaitable[object]], object]] = {
    "list": (_schemas, (["source", "target", "value"], ["kind", "unit", "value"])),
    "call": (_convert, (False, MILES, [MILES])),
    "invalid arguments": (_convert_wrongly, (True, None, True)),
    "unknown tool": (_call_nothing, (True, None, ["Module not found: no.such"])),
    "bogus cursor": (_list_beyond_the_end, -32602),
}


@pytest.mark.filterwarnings("ignore:ping is removed")
@pytest.mark.parametrize("transport", ["stdio", "http"])
@pytest.mark.parametrize(
    ("client_mode", "version"), [(HANDSHAKE, "2025-11-25"), ("auto", MODERN)], ids=lambda value: value
)
async def test_the_official_client_gets_the_same_answers_everywhere(
    transport: str, client_mode: str, version: str, endpoint: str
) -> None:
    """FR-EXEC-007 and the SRS's error texts, seen through the SDK's client, which validates what it is sent."""
    target = stdio_parameters() if transport == "stdio" else endpoint
    async with Client(target, mode=client_mode, cache=None, read_timeout_seconds=30) as client:
        assert client.protocol_version == version
        observed = {name: await ask(client) for name, (ask, _) in SITUATIONS.items()}
        assert observed == {name: expected for name, (_, expected) in SITUATIONS.items()}
        assert client.server_info is not None
        assert client.server_info.name == "apcore-mcp"
        assert client.server_capabilities.tools is not None
        assert client.server_capabilities.tools.list_changed is True
        if client_mode == HANDSHAKE:
            await client.send_ping()


@pytest.mark.parametrize(
    ("offered", "agreed"),
    [
        *(pytest.param(version, version, id=version) for version in HANDSHAKE_VERSIONS),
        pytest.param("1999-01-01", HANDSHAKE_VERSIONS[-1], id="unknown"),
        pytest.param(MODERN, HANDSHAKE_VERSIONS[-1], id="2026-has-no-handshake"),
    ],
)
def test_every_handshake_version_is_spoken_over_http(endpoint: str, offered: str, agreed: str) -> None:
    with httpx.Client(timeout=30) as client:
        result, headers = handshake(client, endpoint, offered)
        assert result["protocolVersion"] == agreed
        assert result["serverInfo"]["name"] == "apcore-mcp"
        assert result["capabilities"]["tools"] == {"listChanged": True}
        listed = answer(client.post(endpoint, json=message("tools/list"), headers=headers))["result"]
        assert "units.convert" in [tool["name"] for tool in listed["tools"]]
        call = message("tools/call", {"name": "units.convert", "arguments": MARATHON})
        called = answer(client.post(endpoint, json=call, headers=headers))["result"]
        assert json.loads(called["content"][0]["text"]) == MILES


def test_every_handshake_version_is_spoken_over_stdio_and_nothing_but_ping_before_it() -> None:
    with contextlib.ExitStack() as stack:
        older = HANDSHAKE_VERSIONS[:-1]  # the newest is spoken by all the others here
        clients = {version: stack.enter_context(RawClient(command())) for version in older}  # they start side by side
        for version, client in clients.items():
            assert client.request("ping")["result"] == {}
            assert client.request("tools/list")["error"]["code"] == -32602
            result = client.initialize(version=version)["result"]
            assert result["protocolVersion"] == version
            assert result["capabilities"]["tools"] == {"listChanged": True}
            called = client.request("tools/call", {"name": "units.convert", "arguments": MARATHON})["result"]
            assert json.loads(called["content"][0]["text"]) == MILES


def test_without_a_session_http_refuses_what_is_no_initialize(endpoint: str) -> None:
    with httpx.Client(timeout=30) as client:
        for headers in (ACCEPT, ACCEPT | {"MCP-Protocol-Version": "2025-11-25"}):
            response = client.post(endpoint, json=message("tools/list"), headers=headers)
            assert response.status_code == 400
            assert answer(response)["error"]["code"] == -32600
        stale = ACCEPT | {"Mcp-Session-Id": "0" * 32}
        assert client.post(endpoint, json=message("tools/list"), headers=stale).status_code == 404


def test_discover_tells_version_capabilities_and_server(endpoint: str) -> None:
    with httpx.Client(timeout=30) as client:
        response = client.post(endpoint, **modern("server/discover"))
    result = answer(response)["result"]
    assert MODERN in result["supportedVersions"]
    assert result["capabilities"] == {
        "tools": {"listChanged": True},
        "resources": {"listChanged": True, "subscribe": True},
    }
    assert result["_meta"][f"{META}serverInfo"]["name"] == "apcore-mcp"
    assert "mcp-session-id" not in response.headers


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        pytest.param({}, None, id="all-right"),
        pytest.param({"mcp_method": None}, -32020, id="no-method"),
        pytest.param({"mcp_method": "tools/list"}, -32020, id="another-method"),
        pytest.param({"mcp_name": None}, -32020, id="no-name"),
        pytest.param({"mcp_name": "units.other"}, -32020, id="another-name"),
        pytest.param({"mcp_protocol_version": "2099-01-01"}, -32020, id="another-version-than-the-body"),
    ],
)
def test_headers_of_2026_must_agree_with_the_body(
    endpoint: str, headers: dict[str, str | None], code: int | None
) -> None:
    with httpx.Client(timeout=30) as client:
        call = modern("tools/call", {"name": "units.convert", "arguments": MARATHON}, **headers)
        response = client.post(endpoint, **call)
    assert response.status_code == (400 if code else 200)
    assert answer(response).get("error", {}).get("code") == code


@pytest.mark.parametrize("stateless", [False, True], ids=["session", "stateless"])
@pytest.mark.parametrize("header", ["2025-11-25", None], ids=["another-version", "no-version"])
def test_a_request_whose_body_names_another_version_than_its_header_runs_nothing(
    stateless: bool, header: str | None
) -> None:
    """Or a gateway that goes by the header would have looked at something else than what is run."""
    ran: list[object] = []
    note = FunctionalModule(lambda inputs, context: ran.append(inputs) or {})
    with serving(registry_of({"demo.note": note}), stateless=stateless) as url, httpx.Client(timeout=30) as client:
        headers = {} if stateless else handshake(client, f"{url}/mcp")[1]
        headers = {**ACCEPT, **headers, "MCP-Protocol-Version": header}
        for method, params in {"tools/call": {"name": "demo.note", "arguments": {}}, "tools/list": {}}.items():
            request = message(method, enveloped(params))
            sent = {name: value for name, value in headers.items() if value is not None}
            assert answer(client.post(f"{url}/mcp", json=request, headers=sent))["error"]["code"] == -32020
    assert ran == []


@pytest.mark.parametrize("method", ["tools/list", "tools/call", "resources/list"])
def test_every_method_refuses_capabilities_that_are_none(endpoint: str, method: str) -> None:
    params = enveloped({"name": "units.convert", "arguments": MARATHON} if method == "tools/call" else {})
    params["_meta"][f"{META}clientCapabilities"] = {"elicitation": 5}
    with RawClient(command()) as stdio, httpx.Client(timeout=30) as http:
        assert stdio.request(method, params)["error"]["code"] == -32602
        request = modern(method, params)
        request["json"] = message(method, params)
        assert answer(http.post(endpoint, **request))["error"]["code"] == -32602


def test_a_version_from_the_future_is_told_what_is_spoken(endpoint: str) -> None:
    future = modern("tools/list", mcp_protocol_version="2099-01-01")
    future["json"]["params"] = enveloped({}, "2099-01-01")
    with httpx.Client(timeout=30) as client:
        response = client.post(endpoint, **future)
    assert response.status_code == 400
    assert answer(response)["error"]["code"] == -32022
    assert MODERN in answer(response)["error"]["data"]["supported"]


REGIONAL = {
    "type": "object",
    "properties": {"region": {"type": "string", "x-mcp-header": "Region"}, "query": {"type": "string"}},
}


def test_x_mcp_header_is_enforced_for_2026_over_http() -> None:
    """Design §4: `get_tool_input_schema=`; else a gateway could route on a value that the call never had."""
    ran: list[dict[str, Any]] = []
    search = FunctionalModule(lambda inputs, context: ran.append(dict(inputs)) or {}, input_schema=REGIONAL)
    cases: list[tuple[dict[str, str], str | None, bool]] = [
        ({"region": "eu"}, "eu", True),
        ({"region": "eu"}, None, False),
        ({"region": "eu"}, "us", False),
        ({"query": "x"}, "eu", False),
        ({"query": "x"}, None, True),
    ]
    with serving(registry_of({"demo.search": search})) as url, httpx.Client(timeout=30) as client:
        for arguments, header, runs in cases:
            ran.clear()
            params = {"name": "demo.search", "arguments": arguments}
            response = client.post(f"{url}/mcp", **modern("tools/call", params, mcp_param_region=header))
            code = answer(response).get("error", {}).get("code")
            assert (response.status_code, code) == ((200, None) if runs else (400, -32020)), (arguments, header)
            assert ran == [arguments] * runs
        _, session = handshake(client, f"{url}/mcp")  # where the header means nothing
        assert "result" in answer(client.post(f"{url}/mcp", json=message("tools/call", params), headers=session))


async def test_the_official_client_sends_x_mcp_headers_that_are_accepted() -> None:
    registry = registry_of({"demo.search": FunctionalModule(lambda i, c: dict(i), input_schema=REGIONAL)})
    with serving(registry) as url:
        async with Client(f"{url}/mcp", mode=MODERN, cache=None, read_timeout_seconds=30) as client:
            await client.list_tools()
            result = await client.call_tool("demo.search", {"region": "Zürich ", "query": "x"})
    assert result.structured_content == {"region": "Zürich ", "query": "x"}


async def test_one_server_serves_both_eras_at_the_same_time() -> None:
    """Each call returns only once the other era's has arrived too."""
    both = threading.Barrier(2, timeout=30)

    def meet(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        both.wait()
        return dict(inputs)

    with serving(registry_of({"demo.meet": meet})) as url:
        older_client, newer_client = (
            Client(f"{url}/mcp", mode=mode, cache=None, read_timeout_seconds=30) for mode in (HANDSHAKE, MODERN)
        )
        async with older_client as older, newer_client as newer:
            results = await asyncio.gather(
                older.call_tool("demo.meet", {"era": "handshake"}), newer.call_tool("demo.meet", {"era": "2026"})
            )
    assert [result.structured_content for result in results] == [{"era": "handshake"}, {"era": "2026"}]
