"""One server in every protocol version: the same answers on every transport, resources, announcements, and how
streams end (FR-SERVER-001, -002, FR-RESOURCE-*, FR-DYNAMIC-003, NFR-REL-001). The shapes on the
wire are MCP's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from apcore import ACL, ACLRule, Context, Executor, Registry
from conftest import (
    EXTENSIONS,
    HANDSHAKE,
    MODERN,
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
    listed,
    message,
    modern,
    text_of,
)

from apcore_mcp.__main__ import main

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
        assert old.initialize(version="2024-11-05")["result"]["protocolVersion"] == "2024-11-05"
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
    ("resources/subscribe", {"uri": "docs://units.convert"}, -32601, -32601),  # nobody is told of a single resource
]


@pytest.mark.requirement("FR-SERVER-001")
def test_a_request_has_the_same_fate_on_every_transport(transports: list[Transport]) -> None:
    for method, params, *told in FATES:
        responses = [transport.request(method, params) for transport in transports]
        fates = [response["error"]["code"] if "error" in response else "result" for response in responses]
        assert fates == told * 2, (method, params)


def test_every_era_lists_what_the_export_prints(transports: list[Transport], capfd: pytest.CaptureFixture[str]) -> None:
    """A result of 2026 says its type, its server and, of a list, how long it keeps."""
    assert main(["--extensions-dir", str(EXTENSIONS), "--export", "mcp"]) == 0
    exported = json.loads(capfd.readouterr().out)
    for transport in transports:
        listed = transport.request("tools/list", None)["result"]
        assert listed["tools"] == exported
        called, failed = (transport.request("tools/call", each)["result"] for each in (CALL, CALL | {"arguments": {}}))
        assert (called["structuredContent"], failed["isError"]) == (MILES, True)
        for result in (listed, called, failed):
            stamp = result.get("_meta", {}).get(f"{META}serverInfo", {})
            novelties = {key: result[key] for key in ("resultType", "ttlMs", "cacheScope") if key in result}
            if transport.mode == HANDSHAKE:
                assert (stamp, novelties) == ({}, {})
            else:
                keeps = {"ttlMs": 0, "cacheScope": "private"} if result is listed else {}
                assert (stamp["name"], novelties) == ("apcore-mcp", {"resultType": "complete", **keeps})


@pytest.mark.requirement("FR-SERVER-002", "NFR-COMPAT-004")
@pytest.mark.parametrize(
    ("transport", "client_mode", "version"),
    [("http", HANDSHAKE, "2025-11-25"), ("http", "auto", MODERN), ("stdio", "auto", MODERN)],
)
async def test_the_official_client_gets_the_same_answers_everywhere(
    transport: str, client_mode: str, version: str, endpoint: str
) -> None:
    """FR-EXEC-007, seen through the SDK's client, which validates what it is sent."""
    async with client_of(stdio(command()) if transport == "stdio" else endpoint, client_mode) as client:
        assert client.protocol_version == version
        assert "units.convert" in await listed(client)
        result = await client.call_tool("units.convert", MARATHON)
        assert (result.is_error, result.structured_content, json.loads(text_of(result))) == (False, MILES, MILES)
        wrong = await client.call_tool("units.convert", MARATHON | {"digits": 99})
        assert (wrong.is_error, wrong.structured_content) == (True, None)
        assert text_of(wrong).startswith("Input validation failed:\n- digits: ")


def test_every_handshake_version_is_spoken_over_http(endpoint: str) -> None:
    """What is unknown, or has no handshake, becomes the last of them."""
    versions = {version: version for version in HANDSHAKE_VERSIONS}
    versions |= dict.fromkeys(("1999-01-01", MODERN), HANDSHAKE_VERSIONS[-1])
    for offered, agreed in versions.items():
        with httpx.Client(timeout=30) as client:
            result, headers = handshake(client, endpoint, offered)
            assert (result["protocolVersion"], result["serverInfo"]["name"]) == (agreed, "apcore-mcp")
            assert result["capabilities"]["tools"] == {"listChanged": True}
            assert result["capabilities"]["resources"] == {"listChanged": True, "subscribe": False}
            called = answer(client.post(endpoint, json=message("tools/call", CALL), headers=headers))["result"]
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


class Offered:
    """A condition of the ACL, which is asked about every tool that is listed."""

    asked = 0

    def evaluate(self, value: object, context: Context[Any]) -> bool:
        self.asked += 1
        return True


def test_x_mcp_header_is_enforced_for_2026_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a gateway could route on a value that the call never had. No call looks through all tools for that."""
    ran: list[dict[str, Any]] = []
    search = FunctionalModule(lambda inputs, context: ran.append(dict(inputs)) or {}, input_schema=REGIONAL)
    cases: list[tuple[dict[str, str], str | None, bool]] = [
        ({"region": "eu"}, "eu", True),
        ({"region": "eu"}, None, False),
        ({"region": "eu"}, "us", False),
        ({"query": "x"}, "eu", False),
        ({"query": "x"}, None, True),
    ]
    offered = Offered()
    monkeypatch.setitem(ACL._condition_handlers, "offered", offered)
    other = ACLRule(["*"], ["demo.other"], "allow", conditions={"offered": True})
    acl = ACL([other, ACLRule(["*"], ["demo.search"], "allow")], default_effect="deny")
    executor = Executor(registry_of({"demo.search": search, "demo.other": echo}), acl=acl)

    async def official(url: str) -> None:
        async with client_of(url) as client:
            await client.list_tools()
            assert not (await client.call_tool("demo.search", {"region": "Zürich ", "query": "x"})).is_error

    with serving(executor) as url, httpx.Client(timeout=30) as client:
        offered.asked = 0  # a start looks whether there is anything to serve
        for arguments, header, runs in cases:
            ran.clear()
            params = {"name": "demo.search", "arguments": arguments}
            response = client.post(f"{url}/mcp", **modern("tools/call", params, mcp_param_region=header))
            code = answer(response).get("error", {}).get("code")
            assert (response.status_code, code) == ((200, None) if runs else (400, -32020)), (arguments, header)
            assert ran == [arguments] * runs
        assert offered.asked == 0 or version("mcp") < "2.3"
        _, session = handshake(client, f"{url}/mcp")  # where the header means nothing
        assert "result" in answer(client.post(f"{url}/mcp", json=message("tools/call", params), headers=session))
        asyncio.run(official(f"{url}/mcp"))
    assert offered.asked > 0
    assert ran[-1] == {"region": "Zürich ", "query": "x"}


MARKDOWN = "# Resize\n\nKeeps the *ratio*."
MODULES = {
    "image.resize": {"documentation": MARKDOWN, "name": "Resize", "tags": ["public"]},
    "image.crop": {"documentation": "Cuts the edges off.", "tags": ["public"]},
    "image.flip": {"documentation": "", "tags": ["public"]},
    "image.bare": {"tags": ["public"]},
    "image.secret": {"documentation": "For the house only."},
}


@pytest.mark.requirement("FR-RESOURCE-001", "FR-RESOURCE-002")
async def test_a_listed_modules_documentation_is_a_resource(mode: str) -> None:
    modules = {module_id: FunctionalModule(echo, **attributes) for module_id, attributes in MODULES.items()}
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
        registry.register("late.module", FunctionalModule(echo, documentation="Came later."))
        async with asyncio.timeout(20):
            await told.wait()
        assert [r.uri for r in (await client.list_resources()).resources] == ["docs://late.module"]
        told.clear()
        registry.unregister("late.module")
        async with asyncio.timeout(20):  # also because the SDK's SSE client fails when it is told while it closes
            await told.wait()
        assert (await client.list_resources()).resources == []


def test_without_sessions_no_handshake_client_is_told_of_changes() -> None:
    registry = registry_of({"doc.a": FunctionalModule(echo, documentation="one")})
    with serving(registry, stateless=True) as url, httpx.Client(timeout=30) as client:

        def ask(method: str, params: dict[str, Any]) -> dict[str, Any]:
            return answer(client.post(f"{url}/mcp", json=message(method, params), headers=ACCEPT))

        capabilities = ask("initialize", initialize_params("2025-11-25"))["result"]["capabilities"]
    capabilities.pop("experimental", None)  # an empty one, of the SDK's 2.1
    assert capabilities == {"tools": {"listChanged": False}, "resources": {"listChanged": False, "subscribe": False}}


@pytest.mark.requirement("FR-DYNAMIC-003")
def test_who_listens_is_told_of_a_change_in_silence_and_of_the_end(tmp_path: Path) -> None:
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


async def test_what_is_registered_while_the_server_begins_to_listen_is_listed() -> None:
    class Late(Registry):
        """Another thread registers a module at the very moment at which a server begins to listen."""

        def on(self, event: str, callback: Any) -> None:
            if not self.has("late"):
                self.register("late", FunctionalModule(echo))
            super().on(event, callback)

    async with connect(Late()) as client:
        assert await listed(client) == ["late"]
