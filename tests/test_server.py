"""One server in every protocol version: the same answers on every transport, resources, announcements, and how
streams end (FR-SERVER-001, -002, FR-RESOURCE-*, FR-DYNAMIC-003, NFR-REL-001). The shapes on the
wire are MCP's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from apcore import ACL, ACLRule, Context, Executor, Registry
from conftest import (
    HANDSHAKE,
    MODERN,
    ROOT,
    FunctionalModule,
    RawClient,
    client_of,
    command,
    connect,
    echo,
    program,
    registry_of,
    serving,
    stdio,
)
from mcp.server.subscriptions import ResourcesListChanged
from mcp.shared.exceptions import MCPError
from mcp_types import ResourceListChangedNotification
from support import (
    ACCEPT,
    HANDSHAKE_VERSIONS,
    META,
    answer,
    enveloped,
    handshake,
    initialize_params,
    message,
    modern,
    text_of,
)

MARATHON = {"value": 42.195, "source": "km", "target": "mi", "digits": 2}
MILES = {"value": 26.22, "unit": "mi", "kind": "length"}


class Transport(NamedTuple):
    """A way to ask a server something, and the era it is asked in."""

    mode: str
    request: Callable[[str, dict[str, Any] | None], dict[str, Any]]


@pytest.fixture(scope="module")
def transports(endpoint: str) -> Iterator[list[Transport]]:
    """The examples' server on each transport in each era."""
    with RawClient(command()) as old, RawClient(command()) as new, httpx.Client(timeout=30) as http:
        old.initialize()
        _, headers = handshake(http, endpoint)
        yield [
            Transport(HANDSHAKE, old.request),
            Transport(MODERN, lambda method, params: new.request(method, enveloped(params))),
            Transport(HANDSHAKE, lambda *asked: answer(http.post(endpoint, json=message(*asked), headers=headers))),
            Transport(MODERN, lambda method, params: answer(http.post(endpoint, **modern(method, params)))),
        ]


WRONG = {"_meta": {f"{META}clientCapabilities": {"elicitation": 5}}}  # in the handshake era, nothing that counts
CALL = {"name": "units.convert", "arguments": MARATHON}
FATES: list[tuple[str, dict[str, Any] | None, object, object]] = [  # of a request in each era
    ("no/such", None, -32601, -32601),
    ("tools/list", {"cursor": 5}, -32602, -32602),
    ("tools/list", {"no_such": 1}, "result", "result"),
    ("tools/call", {}, -32602, -32602),
    ("tools/call", {**CALL, "arguments": [1]}, -32602, -32602),
    ("tools/call", {"name": "no.such", "arguments": {}}, "result", "result"),
    ("ping", None, "result", -32601),
    ("server/discover", None, -32601, "result"),
    ("tools/list", WRONG, "result", -32602),
    ("tools/call", CALL | WRONG, "result", -32602),
    ("resources/list", WRONG, "result", -32602),
]


def test_a_request_has_the_same_fate_on_every_transport(transports: list[Transport]) -> None:
    for method, params, *told in FATES:
        responses = [transport.request(method, params) for transport in transports]
        fates = [response["error"]["code"] if "error" in response else "result" for response in responses]
        assert fates == told * 2, (method, params)


def test_every_transport_and_era_lists_what_the_export_prints_and_only_2026_has_its_novelties(
    transports: list[Transport],
) -> None:
    """A result of 2026 says its type, its server and, of a list, how long it keeps."""
    listing = subprocess.run(command("--export", "mcp"), cwd=ROOT, capture_output=True, check=True, timeout=30)
    for transport in transports:
        listed = transport.request("tools/list", None)["result"]
        assert listed["tools"] == json.loads(listing.stdout)
        called, failed = (
            transport.request("tools/call", CALL | change)["result"] for change in ({}, {"arguments": {}})
        )
        assert (called["structuredContent"], failed["isError"]) == (MILES, True)
        for result in (listed, called, failed):
            stamp = result.get("_meta", {}).pop(f"{META}serverInfo", None)
            novelties = {key: result[key] for key in ("resultType", "ttlMs", "cacheScope") if key in result}
            if transport.mode == HANDSHAKE:
                assert (stamp, novelties) == (None, {})
            else:
                assert stamp["name"] == "apcore-mcp"
                keeps = {"ttlMs": 0, "cacheScope": "private"} if result is listed else {}
                assert novelties == {"resultType": "complete", **keeps}


@pytest.mark.requirement("FR-SERVER-002", "NFR-COMPAT-004")
@pytest.mark.filterwarnings("ignore:ping is removed")
@pytest.mark.parametrize(
    ("transport", "client_mode", "version"),
    [("http", HANDSHAKE, "2025-11-25"), ("http", "auto", MODERN), ("stdio", "auto", MODERN)],
)
async def test_the_official_client_gets_the_same_answers_everywhere(
    transport: str, client_mode: str, version: str, endpoint: str
) -> None:
    """FR-EXEC-007 and the error texts, seen through the SDK's client, which validates what it is sent."""
    target = stdio(command()) if transport == "stdio" else endpoint
    async with client_of(target, client_mode) as client:
        assert client.protocol_version == version
        [tool] = [tool for tool in (await client.list_tools()).tools if tool.name == "units.convert"]
        assert sorted(tool.input_schema["required"]) == ["source", "target", "value"]
        assert sorted((tool.output_schema or {})["properties"]) == ["kind", "unit", "value"]
        result = await client.call_tool("units.convert", MARATHON)
        assert (result.is_error, result.structured_content, json.loads(text_of(result))) == (False, MILES, MILES)
        wrong = await client.call_tool("units.convert", MARATHON | {"digits": 99})
        assert (wrong.is_error, wrong.structured_content) == (True, None)
        assert text_of(wrong).startswith("Input validation failed:\n- digits: ")
        unknown = await client.call_tool("no.such", {})
        assert (unknown.is_error, text_of(unknown)) == (True, "Module not found: no.such")
        assert client.server_info is not None
        assert client.server_info.name == "apcore-mcp"
        if client_mode == HANDSHAKE:
            await client.send_ping()


def test_every_handshake_version_is_spoken_over_http(endpoint: str) -> None:
    """What is unknown, or has no handshake, becomes the last of them."""
    versions = {version: version for version in HANDSHAKE_VERSIONS}
    versions |= dict.fromkeys(("1999-01-01", MODERN), HANDSHAKE_VERSIONS[-1])
    for offered, agreed in versions.items():
        with httpx.Client(timeout=30) as client:
            result, headers = handshake(client, endpoint, offered)
            assert result["protocolVersion"] == agreed
            assert result["serverInfo"]["name"] == "apcore-mcp"
            assert result["capabilities"]["tools"] == {"listChanged": True}
            listed = answer(client.post(endpoint, json=message("tools/list"), headers=headers))["result"]
            assert "units.convert" in [tool["name"] for tool in listed["tools"]]
            called = answer(client.post(endpoint, json=message("tools/call", CALL), headers=headers))["result"]
            assert json.loads(called["content"][0]["text"]) == MILES


@pytest.mark.requirement("FR-SERVER-001")
def test_the_oldest_handshake_is_spoken_over_stdio_and_nothing_but_ping_before_it() -> None:
    with RawClient(command()) as client:
        assert client.request("ping")["result"] == {}
        assert client.request("tools/list")["error"]["code"] == -32602
        result = client.initialize(version="2024-11-05")["result"]
        assert result["protocolVersion"] == "2024-11-05"
        assert result["capabilities"]["tools"] == {"listChanged": True}
        called = client.request("tools/call", CALL)["result"]
        assert json.loads(called["content"][0]["text"]) == MILES


def test_discover_tells_version_capabilities_and_server(endpoint: str) -> None:
    response = httpx.post(endpoint, **modern("server/discover"), timeout=30)
    result = answer(response)["result"]
    assert MODERN in result["supportedVersions"]
    resources = {"listChanged": True, "subscribe": False}  # nobody is notified of a single resource
    extensions = {"io.modelcontextprotocol/tasks": {}, "io.modelcontextprotocol/ui": {}}  # the bar chart has a page
    assert result["capabilities"] == {"tools": {"listChanged": True}, "resources": resources, "extensions": extensions}
    assert result["_meta"][f"{META}serverInfo"]["name"] == "apcore-mcp"
    assert "mcp-session-id" not in response.headers


REGIONAL = {
    "type": "object",
    "properties": {"region": {"type": "string", "x-mcp-header": "Region"}, "query": {"type": "string"}},
}


def test_x_mcp_header_is_enforced_for_2026_over_http_and_the_official_client_is_let_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`get_tool_input_schema=`; else a gateway could route on a value that the call never had."""
    ran: list[dict[str, Any]] = []
    search = FunctionalModule(lambda inputs, context: ran.append(dict(inputs)) or {}, input_schema=REGIONAL)
    cases: list[tuple[dict[str, str], str | None, bool]] = [
        ({"region": "eu"}, "eu", True),
        ({"region": "eu"}, None, False),
        ({"region": "eu"}, "us", False),
        ({"query": "x"}, "eu", False),
        ({"query": "x"}, None, True),
    ]

    class Offered:
        """A condition of the ACL, which is asked about every tool that is listed."""

        listed = 0

        def evaluate(self, value: object, context: Context[Any]) -> bool:
            self.listed += 1
            return True

    offered = Offered()
    monkeypatch.setitem(ACL._condition_handlers, "offered", offered)
    listed = ACLRule(["*"], ["demo.other"], "allow", conditions={"offered": True})
    called = ACLRule(["*"], ["demo.search"], "allow")
    modules = {"demo.search": search, "demo.other": echo}
    executor = Executor(registry_of(modules), acl=ACL([listed, called], default_effect="deny"))

    async def official(url: str) -> None:
        async with client_of(url) as client:
            await client.list_tools()
            assert not (await client.call_tool("demo.search", {"region": "Zürich ", "query": "x"})).is_error

    with serving(executor) as url, httpx.Client(timeout=30) as client:
        offered.listed = 0  # a start looks whether there is anything to serve
        for arguments, header, runs in cases:
            ran.clear()
            params = {"name": "demo.search", "arguments": arguments}
            response = client.post(f"{url}/mcp", **modern("tools/call", params, mcp_param_region=header))
            code = answer(response).get("error", {}).get("code")
            assert (response.status_code, code) == ((200, None) if runs else (400, -32020)), (arguments, header)
            assert ran == [arguments] * runs
        assert offered.listed == 0 or version("mcp") < "2.3", "no call looks through all tools"
        _, session = handshake(client, f"{url}/mcp")  # where the header means nothing
        assert "result" in answer(client.post(f"{url}/mcp", json=message("tools/call", params), headers=session))
        asyncio.run(official(f"{url}/mcp"))
    assert offered.listed > 0
    assert ran[-1] == {"region": "Zürich ", "query": "x"}


MARKDOWN = "# Resize\n\nKeeps the *ratio*."
MODULES = {
    "image.resize": {"documentation": MARKDOWN, "name": "Resize", "tags": ["public"]},
    "image.crop": {"documentation": "Cuts the edges off.", "tags": ["public"]},
    "image.flip": {"documentation": "", "tags": ["public"]},
    "image.bare": {"tags": ["public"]},
    "image.secret": {"documentation": "For the house only."},
}


def documented(**attributes: Any) -> FunctionalModule:
    return FunctionalModule(echo, **attributes)


@pytest.mark.requirement("FR-RESOURCE-001", "FR-RESOURCE-002")
async def test_every_listed_module_with_documentation_is_a_resource_and_nothing_else_is(mode: str) -> None:
    modules = {module_id: documented(**attributes) for module_id, attributes in MODULES.items()}
    async with connect(modules, mode=mode, tags=["public"]) as client:
        listed = (await client.list_resources()).resources
        read = [(await client.read_resource(resource.uri)).contents for resource in listed]
        assert (await client.list_resource_templates()).resource_templates == []
        for uri in ("docs://image.flip", "docs://image.secret", "image.resize", "docs://", "file:///etc/passwd"):
            with pytest.raises(MCPError, match="Resource not found") as raised:
                await client.read_resource(uri)
            assert raised.value.error.code == (-32602 if mode == MODERN else -32002)
            assert raised.value.error.data == {"uri": uri}
    assert [(r.uri, r.name, r.title, r.mime_type) for r in listed] == [
        ("docs://image.crop", "image.crop", "image.crop", "text/plain"),
        ("docs://image.resize", "image.resize", "Resize", "text/plain"),
    ]
    assert [[(c.uri, c.mime_type, c.text) for c in contents] for contents in read] == [
        [("docs://image.crop", "text/plain", "Cuts the edges off.")],
        [("docs://image.resize", "text/plain", MARKDOWN)],
    ]


async def test_resources_follow_the_registry_and_clients_are_told(mode: str) -> None:
    """Handshake clients on their one stream (that of SSE is always open), others on the stream they listen on."""
    registry, told = registry_of(), asyncio.Event()

    async def note(message: object) -> None:
        if isinstance(message, ResourceListChangedNotification):
            told.set()

    async def follow(events: AsyncIterator[object]) -> None:
        async for event in events:
            if isinstance(event, ResourcesListChanged):
                told.set()

    async with contextlib.AsyncExitStack() as stack:
        url = stack.enter_context(serving(registry, transport="sse" if mode == HANDSHAKE else "streamable-http"))
        server = f"{url}/sse" if mode == HANDSHAKE else url
        client = client_of(server, mode, message_handler=note)
        await stack.enter_async_context(client)
        if mode == HANDSHAKE:
            assert client.server_capabilities.resources.list_changed is True
        else:
            events = await stack.enter_async_context(client.listen(resources_list_changed=True))
            stack.callback(asyncio.create_task(follow(events)).cancel)
        assert (await client.list_resources()).resources == []
        registry.register("late.module", documented(documentation="Came later."))
        async with asyncio.timeout(20):
            await told.wait()
        assert [r.uri for r in (await client.list_resources()).resources] == ["docs://late.module"]
        told.clear()
        registry.unregister("late.module")
        async with asyncio.timeout(20):  # also because the SDK's SSE client fails when it is told while it closes
            await told.wait()
        assert (await client.list_resources()).resources == []


@pytest.mark.filterwarnings("ignore:resources/(un)?subscribe is removed")
async def test_no_handshake_client_is_promised_to_be_told_of_a_single_resource() -> None:
    async with connect({"doc.a": documented(documentation="one")}, mode=HANDSHAKE) as client:
        assert client.server_capabilities.resources is not None
        assert client.server_capabilities.resources.subscribe is False
        for ask in (client.subscribe_resource, client.unsubscribe_resource):
            with pytest.raises(MCPError) as refused:
                await ask("docs://doc.a")
            assert refused.value.code == -32601


def test_a_server_without_sessions_promises_no_handshake_client_to_tell_of_changes() -> None:
    registry = registry_of({"doc.a": documented(documentation="one")})
    with serving(registry, stateless=True) as url, httpx.Client(timeout=30) as client:

        def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
            return answer(client.post(f"{url}/mcp", json=message(method, params), headers=ACCEPT))

        capabilities = ask("initialize", initialize_params("2025-11-25"))["result"]["capabilities"]
    capabilities.pop("experimental", None)  # an empty one, of the SDK's 2.1
    assert capabilities == {"tools": {"listChanged": False}, "resources": {"listChanged": False, "subscribe": False}}


@pytest.mark.requirement("FR-DYNAMIC-003")
def test_who_listens_is_promised_what_there_is_told_of_a_change_in_silence_and_bid_farewell(tmp_path: Path) -> None:
    text = """
@tool
async def later(inputs, context):
    def register():
        while not Path(inputs["gate"]).exists():
            time.sleep(0.01)
        registry.register("t.late", Module(lambda inputs, context: {}))
    threading.Thread(target=register, daemon=True).start()
    return {}

serve(registry)
"""
    gate = tmp_path / "gate"
    wanted: dict[str, Any] = dict.fromkeys(("toolsListChanged", "promptsListChanged", "resourcesListChanged"), True)
    wanted["resourceSubscriptions"] = ["docs://t.later"]
    with RawClient(program(text)) as client:
        listening = client.send("subscriptions/listen", enveloped({"notifications": wanted}))
        promised = client.receive()
        assert promised["method"] == "notifications/subscriptions/acknowledged"
        assert promised["params"]["notifications"] == {"toolsListChanged": True, "resourcesListChanged": True}
        client.request("tools/call", enveloped({"name": "t.later", "arguments": {"gate": str(gate)}}))
        gate.touch()  # from here on the server's loop hears of nothing but the other thread
        told = [client.receive()["method"] for _ in range(2)]
        assert told == ["notifications/tools/list_changed", "notifications/resources/list_changed"]
        client.process.send_signal(signal.SIGTERM)
        last = client.receive()
        assert (last["id"], "error" in last) == (listening, False)
        assert client.process.wait(timeout=15) == 0


class Late(Registry):
    """Another thread registers a module at the very moment at which a server begins to listen."""

    def on(self, event: str, callback: Any) -> None:
        if not self.has("late"):
            self.register("late", FunctionalModule(echo))
        super().on(event, callback)


async def test_what_is_registered_while_the_server_begins_to_listen_is_listed() -> None:
    async with connect(Late()) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["late"]
