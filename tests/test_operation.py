"""What an operator sees: `/health` (FR-HEALTH-001, -002) and `/metrics` (F-021, F-022)."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import httpx
import pytest
from apcore import ACL, ACLRule, Executor, ModuleAnnotations
from apcore.observability import MetricsCollector, MetricsMiddleware
from apcore.sys_modules.control import ToggleState
from conftest import HANDSHAKE, FunctionalModule, connect, echo, free_port, registry_of, serving
from mcp import MCPError
from mcp.client import Client

from apcore_mcp import MCPServer, __version__, async_serve, serve

HTTP = pytest.mark.parametrize("transport", ["streamable-http", "sse"])


async def get(url: str) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        return await client.get(url)


def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    raise ValueError("no")


# ---- Health ----


@HTTP
def test_health_tells_how_much_is_served_and_since_when(transport: str) -> None:
    registry = registry_of({"t.one": echo, "t.two": echo})
    with serving(registry, transport=transport, version="7.1") as url:
        response = httpx.get(f"{url}/health")
        first = response.json()
        registry.register("t.three", FunctionalModule(echo))
        second = httpx.get(f"{url}/health").json()
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert first.keys() == {"status", "module_count", "tools_count", "uptime_seconds", "version"}
    assert (first["status"], first["module_count"], first["tools_count"], first["version"]) == ("ok", 2, 2, "7.1")
    assert 0 <= first["uptime_seconds"] < second["uptime_seconds"]
    assert second["tools_count"] == 3


def test_health_of_a_server_without_tools_is_ok_too() -> None:
    with serving(registry_of()) as url:
        told = httpx.get(f"{url}/health").json()
    assert (told["status"], told["module_count"], told["version"]) == ("ok", 0, __version__)


def test_health_is_for_who_may_ask_the_server_at_all() -> None:
    with serving(registry_of()) as url:
        assert httpx.get(f"{url}/health", headers={"Host": "evil.example"}).status_code == 421
        assert httpx.get(f"{url}/health", headers={"Origin": "http://evil.example"}).status_code == 403
        assert httpx.post(f"{url}/health", json={}).status_code == 405


async def test_health_and_metrics_are_part_of_an_app_of_ones_own() -> None:
    async with async_serve(registry_of({"t.one": echo}), metrics_collector=MetricsCollector()) as app:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000") as client:
            assert (await client.get("/health")).json()["tools_count"] == 1
            assert (await client.get("/metrics")).status_code == 200


# ---- Metrics ----

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="[^"]*",?)*)\})? ([0-9.e+-]+|\+Inf|NaN)')


def samples(page: str) -> dict[tuple[str, str], float]:
    """The samples of a page of Prometheus text by name and labels; fails for a line that is no sample."""
    found = {}
    for line in page.splitlines():
        if not line.startswith(("# HELP ", "# TYPE ")):
            match = SAMPLE.fullmatch(line)
            assert match, line
            found[match[1], match[2] or ""] = float(match[3])
    return found


@HTTP
async def test_metrics_count_the_calls_of_each_module(transport: str) -> None:
    from mcp.client.sse import sse_client

    registry = registry_of({"t.echo": echo, "t.fail": fail})
    with serving(registry, transport=transport, metrics_collector=MetricsCollector()) as url:
        assert samples((await get(f"{url}/metrics")).text) == {}
        server: Any = sse_client(f"{url}/sse") if transport == "sse" else f"{url}/mcp"
        async with Client(server, mode=HANDSHAKE) as client:
            for name in ("t.echo", "t.echo", "t.fail"):
                await client.call_tool(name, {})
        response = await get(f"{url}/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    counted = samples(response.text)
    assert counted["apcore_module_calls_total", 'module_id="t.echo",status="success"'] == 2
    assert counted["apcore_module_calls_total", 'module_id="t.fail",status="error"'] == 1
    assert counted["apcore_module_duration_seconds_count", 'module_id="t.echo"'] == 2
    assert counted["apcore_module_duration_seconds_sum", 'module_id="t.echo"'] > 0


@HTTP
def test_without_a_collector_there_is_no_metrics_page(transport: str) -> None:
    with serving(registry_of(), transport=transport) as url:
        assert httpx.get(f"{url}/metrics").status_code == 404


async def test_any_object_that_exports_can_be_the_collector_and_an_executor_keeps_its_middleware() -> None:
    class Exporter:
        def export_prometheus(self) -> str:
            return "up 1\n"

    executor = Executor(registry_of({"t.echo": echo}))
    with serving(executor, metrics_collector=Exporter()) as url:
        assert (await get(f"{url}/metrics")).text == "up 1\n"
    async with connect(executor, metrics_collector=MetricsCollector()) as client:
        assert not (await client.call_tool("t.echo", {})).is_error
    assert executor.middlewares == []


async def test_metrics_that_are_asked_for_count_the_calls_of_an_executor_too() -> None:
    """Whatever feeds a collector of the Executor's own; and what counts for a server goes with it."""
    own = MetricsCollector()
    for middlewares in ([], [MetricsMiddleware(own)]):
        executor = Executor(registry_of({"t.echo": echo, "t.fail": fail}), middlewares=middlewares)
        server = MCPServer(executor, transport="streamable-http", port=(port := free_port()), metrics_collector=True)
        for life in (1, 2):
            server.start()
            async with Client(f"http://127.0.0.1:{port}/mcp", mode=HANDSHAKE) as client:
                await client.call_tool("t.echo", {})
                await client.call_tool("t.fail", {})
            counted = samples((await get(f"http://127.0.0.1:{port}/metrics")).text)
            server.stop()
            server.wait()
            assert counted["apcore_module_calls_total", 'module_id="t.echo",status="success"'] == life
            assert counted["apcore_module_calls_total", 'module_id="t.fail",status="error"'] == life
            assert executor.middlewares == middlewares
    assert samples(own.export_prometheus())["apcore_module_calls_total", 'module_id="t.echo",status="success"'] == 2


async def test_metrics_count_what_was_refused_once() -> None:
    """By the ACL, for want of approval, by us or because a module is off: apcore's middleware sees none of it."""
    needs = ModuleAnnotations(requires_approval=True)

    async def below(inputs: dict[str, Any], context: Any) -> Any:
        return await context.executor.call_async("shut.door", {}, context)

    modules: dict[str, Any] = {"shut.door": echo, "t.gated": FunctionalModule(echo, annotations=needs)}
    typed = FunctionalModule(echo, input_schema={"type": "object", "required": ["x"]})
    modules |= {"t.off": echo, "t.below": below, "t.typed": typed, "t.echo": echo}
    rules = [ACLRule(callers=["*"], targets=["t.*"], effect="allow")]
    off = ToggleState()
    off.disable("t.off")
    executor = Executor(registry_of(modules), acl=ACL(rules=rules, default_effect="deny"), toggle_state=off)
    with serving(executor, metrics_collector=True, approval="deny", validate_inputs=True) as url:
        async with Client(f"{url}/mcp", mode=HANDSHAKE) as client:
            for name in modules:
                result = await client.call_tool(name, {})
                assert result.is_error == (name != "t.echo")
        counted = samples((await get(f"{url}/metrics")).text)
    calls = {key[1]: value for key, value in counted.items() if key[0] == "apcore_module_calls_total"}
    assert calls == {
        'module_id="shut.door",status="error"': 1,
        'module_id="t.gated",status="error"': 1,
        'module_id="t.off",status="error"': 1,
        'module_id="t.below",status="error"': 1,
        'module_id="t.typed",status="error"': 1,
        'module_id="t.echo",status="success"': 1,
    }
    errors = {key[1]: value for key, value in counted.items() if key[0] == "apcore_module_errors_total"}
    assert errors == {
        'error_code="ACL_DENIED",module_id="shut.door"': 1,
        'error_code="APPROVAL_DENIED",module_id="t.gated"': 1,
        'error_code="MODULE_DISABLED",module_id="t.off"': 1,
        'error_code="ACL_DENIED",module_id="t.below"': 1,
        'error_code="SCHEMA_VALIDATION_ERROR",module_id="t.typed"': 1,
    }


async def test_a_call_that_its_client_cannot_approve_is_counted_and_logged(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    gated = FunctionalModule(echo, annotations=ModuleAnnotations(requires_approval=True))
    with serving(registry_of({"t.gated": gated}), metrics_collector=True, approval="require") as url:
        async with Client(f"{url}/mcp", mode=mode) as client:
            with contextlib.suppress(MCPError):
                assert (await client.call_tool("t.gated", {})).is_error
        counted = samples((await get(f"{url}/metrics")).text)
    assert counted["apcore_module_errors_total", 'error_code="APPROVAL_DENIED",module_id="t.gated"'] == 1
    assert [record.getMessage() for record in caplog.records if "Tool call error: t.gated" in record.getMessage()]


async def test_a_disabled_module_is_listed_and_says_what_it_is(mode: str) -> None:
    """apcore's registry keeps it, and tells nobody who has only the Executor when it is disabled and enabled."""
    toggled = ToggleState()
    executor = Executor(registry_of({"image.resize": echo}), toggle_state=toggled)
    async with connect(executor, mode=mode) as client:
        for disabled in (False, True, False):
            (toggled.disable if disabled else toggled.enable)("image.resize")
            assert [tool.name for tool in (await client.list_tools()).tools] == ["image.resize"]
            result = await client.call_tool("image.resize", {"a": 1})
            text = "".join(part.text for part in result.content if part.type == "text")
            assert text == ("Module is disabled: image.resize" if disabled else '{"a":1}')


def test_a_collector_that_fails_is_an_error_without_a_reason() -> None:
    class Broken:
        def export_prometheus(self) -> str:
            raise OSError("/var/lib/metrics")

    with serving(registry_of(), metrics_collector=Broken()) as url:
        response = httpx.get(f"{url}/metrics")
        assert (response.status_code, response.text) == (500, "Internal Server Error")
        assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.parametrize("collector", [5, 0])
def test_a_collector_that_cannot_export_is_refused_at_once(collector: int) -> None:
    with pytest.raises(TypeError, match=rf"metrics_collector must have export_prometheus\(\), got {collector}"):
        serve(registry_of(), metrics_collector=collector)
