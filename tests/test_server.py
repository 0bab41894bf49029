"""One server in every protocol version: the same answers on every transport, resources, announcements, and how
streams end (FR-SERVER-001, -002, FR-RESOURCE-*, FR-DYNAMIC-003, NFR-REL-001; design section 4). The shapes on the
wire are MCP's.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import httpx
import pytest
from apcore import Registry
from conftest import (
    HANDSHAKE,
    MODERN,
    ROOT,
    FunctionalModule,
    RawClient,
    command,
    connect,
    echo,
    hosting,
    program,
    registry_of,
    serving,
    stdio_parameters,
)
from mcp.client import Client
from mcp.client.sse import sse_client
from mcp.server.subscriptions import ResourcesListChanged, ResourceUpdated
from mcp.shared.exceptions import MCPError
from mcp_types import ResourceListChangedNotification
from support import (
    ACCEPT,
    HANDSHAKE_VERSIONS,
    META,
    answer,
    enveloped,
    followed,
    handshake,
    initialize_params,
    message,
    modern,
)

import apcore_mcp.core
from apcore_mcp import async_serve

MARATHON = {"value": 42.195, "source": "km", "target": "mi", "digits": 2}
MILES = {"value": 26.22, "unit": "mi", "kind": "length"}


class Wire(NamedTuple):
    """A way to ask a server something, and the era it is asked in."""

    mode: str
    request: Callable[[str, dict[str, Any] | None], dict[str, Any]]


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


async def _schemas(client: Client) -> object:
    [tool] = [tool for tool in (await client.list_tools()).tools if tool.name == "units.convert"]
    return sorted(tool.input_schema["required"]), sorted((tool.output_schema or {})["properties"])


SITUATIONS: dict[str, tuple[Callable[[Client], Awaitable[object]], object]] = {
    "list": (_schemas, (["source", "target", "value"], ["kind", "unit", "value"])),
    "call": (_convert, (False, MILES, [MILES])),
    "invalid arguments": (_convert_wrongly, (True, None, True)),
    "unknown tool": (_call_nothing, (True, None, ["Module not found: no.such"])),
}


@pytest.mark.requirement("FR-SERVER-002", "NFR-COMPAT-004")
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


@pytest.mark.requirement("FR-SERVER-001")
@pytest.mark.parametrize(("offered", "agreed"), [("2024-11-05", "2024-11-05"), ("1999-12-31", "2025-11-25")])
def test_the_oldest_handshake_is_spoken_over_stdio_and_nothing_but_ping_before_it(offered: str, agreed: str) -> None:
    with RawClient(command()) as client:
        assert client.request("ping")["result"] == {}
        assert client.request("tools/list")["error"]["code"] == -32602
        result = client.initialize(version=offered)["result"]
        assert result["protocolVersion"] == agreed
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


@pytest.mark.parametrize("method", ["tools/list", "tools/call", "resources/list"])
def test_every_method_refuses_capabilities_that_are_none(wire: Wire, method: str) -> None:
    if wire.mode == HANDSHAKE:
        pytest.skip("there they stand in the handshake alone")
    params = {"name": "units.convert", "arguments": MARATHON} if method == "tools/call" else {}
    wrong = {"_meta": {f"{META}clientCapabilities": {"elicitation": 5}}}
    assert wire.request(method, params | wrong)["error"]["code"] == -32602


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


MARKDOWN = "# Resize\n\nKeeps the *ratio*."
MODULES = {
    "image.resize": {"documentation": MARKDOWN, "name": "Resize", "tags": ["public"]},
    "image.crop": {"documentation": "Cuts the edges off.", "tags": ["public"]},
    "image.flip": {"documentation": ""},
    "image.turn": {"documentation": None},
    "image.bare": {},
    "image.secret": {"documentation": "For the house only."},
}


def documented(**attributes: Any) -> FunctionalModule:
    return FunctionalModule(echo, **attributes)


@pytest.mark.requirement("FR-RESOURCE-001", "FR-RESOURCE-002")
async def test_every_listed_module_with_documentation_is_a_resource(mode: str) -> None:
    modules = {module_id: documented(**attributes) for module_id, attributes in MODULES.items()}
    async with connect(modules, mode=mode, tags=["public"]) as client:
        listed = (await client.list_resources()).resources
        read = [(await client.read_resource(resource.uri)).contents for resource in listed]
        templates = (await client.list_resource_templates()).resource_templates
    assert [(r.uri, r.name, r.title, r.mime_type) for r in listed] == [
        ("docs://image.crop", "image.crop", None, "text/plain"),
        ("docs://image.resize", "image.resize", "Resize", "text/plain"),
    ]
    assert [[(c.uri, c.mime_type, c.text) for c in contents] for contents in read] == [
        [("docs://image.crop", "text/plain", "Cuts the edges off.")],
        [("docs://image.resize", "text/plain", MARKDOWN)],
    ]
    assert templates == []


@pytest.mark.parametrize(
    "uri",
    ["docs://image.flip", "docs://image.secret", "docs://nothing", "image.resize", "docs://", "file:///etc/passwd"],
)
async def test_any_other_resource_is_not_found_in_the_words_of_each_era(mode: str, uri: str) -> None:
    modules = {module_id: documented(**attributes) for module_id, attributes in MODULES.items()}
    async with connect(modules, mode=mode, tags=["public"]) as client:
        with pytest.raises(MCPError, match="Resource not found") as raised:
            await client.read_resource(uri)
    assert raised.value.error.code == (-32602 if mode == MODERN else -32002)
    assert raised.value.error.data == {"uri": uri}


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
        server = sse_client(f"{url}/sse") if mode == HANDSHAKE else f"{url}/mcp"
        client = Client(server, mode=mode, cache=None, read_timeout_seconds=30, message_handler=note)
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


async def test_who_listens_for_a_resource_is_told_when_it_changes() -> None:
    registry = registry_of({f"doc.{name}": documented(documentation="one") for name in "abc"})

    def replace(name: str, text: str) -> None:
        registry.unregister(f"doc.{name}")
        registry.register(f"doc.{name}", documented(documentation=text))

    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(30):
        client = await stack.enter_async_context(connect(registry))
        events = await stack.enter_async_context(client.listen(resource_subscriptions=["docs://doc.a"]))
        updated = (event.uri async for event in events if isinstance(event, ResourceUpdated))
        replace("b", "two")  # nobody listens for it
        replace("c", "two")
        await client.list_tools()
        for text in ("two", "three"):  # once or twice, as the module may be seen to be gone meanwhile
            replace("a", text)
            assert await anext(updated) == "docs://doc.a"


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


def test_who_listens_is_promised_only_what_there_is() -> None:
    wanted = {"toolsListChanged": True, "promptsListChanged": True, "resourcesListChanged": True}
    with serving(registry_of()) as url, httpx.Client(timeout=30) as client:
        request = modern("subscriptions/listen", {"notifications": wanted})
        with client.stream("POST", f"{url}/mcp", **request) as stream:
            first = next(line for line in stream.iter_lines() if line.startswith("data: "))
        promised = json.loads(first[6:])["params"]["notifications"]
    assert promised == {"toolsListChanged": True, "resourcesListChanged": True}


@pytest.mark.requirement("FR-DYNAMIC-003")
def test_a_registration_from_another_thread_is_announced_though_nobody_says_anything(tmp_path: Path) -> None:
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
    with RawClient(program(text)) as client:
        client.initialize()
        client.request("tools/call", {"name": "t.later", "arguments": {"gate": str(gate)}})
        gate.touch()  # from here on the server's loop hears of nothing but the other thread
        assert client.receive()["method"] == "notifications/tools/list_changed"


async def steps_of_a_change(sessions: int) -> int:
    """How many steps the interpreter takes in the package from a registration until so many clients are told of it."""
    registry = registry_of({f"doc.n{number}": documented(documentation="one") for number in range(100)})
    steps = 0

    def count(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal steps
        if frame.f_code.co_filename != apcore_mcp.core.__file__:
            return None
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return count

    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(40):
        app = await stack.enter_async_context(async_serve(registry))
        url = await stack.enter_async_context(hosting(app))
        told = [await stack.enter_async_context(followed(None, HANDSHAKE, url=url)) for _ in range(sessions)]
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 looks at that when tracing begins
        sys.settrace(count)
        try:
            registry.register("doc.new", documented(documentation="one"))
            for _, changes in told:
                await changes.get()
        finally:
            sys.settrace(before)
    return steps


async def test_a_change_is_looked_at_once_for_all_who_are_told_of_it() -> None:
    one, twenty = await steps_of_a_change(1), await steps_of_a_change(20)
    assert twenty < 2 * one


class Late(Registry):
    """Another thread registers a module at the very moment at which a server begins to listen."""

    def on(self, event: str, callback: Any) -> None:
        if not self.has("late"):
            self.register("late", FunctionalModule(echo))
        super().on(event, callback)


async def test_what_is_registered_while_the_server_begins_to_listen_is_listed(mode: str) -> None:
    async with connect(Late(), mode=mode) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["late"]


def test_a_stream_that_a_client_listens_on_is_ended_in_order() -> None:
    stamp = {"protocolVersion": MODERN, "clientInfo": {"name": "raw", "version": "1"}, "clientCapabilities": {}}
    params = {"notifications": {"toolsListChanged": True}, "_meta": {META + key: value for key, value in stamp.items()}}
    with RawClient(command()) as client:
        listening = client.send("subscriptions/listen", params)
        assert client.receive()["method"] == "notifications/subscriptions/acknowledged"
        client.process.send_signal(signal.SIGTERM)
        answer = client.receive()
        assert (answer["id"], "error" in answer) == (listening, False)
        assert client.process.wait(timeout=15) == 0
