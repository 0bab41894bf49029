"""What an operator sees: `/health` (FR-HEALTH-001, -002) and `/metrics` (F-021, F-022)."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from apcore import Executor
from apcore.observability import MetricsCollector
from conftest import HANDSHAKE, FunctionalModule, connect, echo, registry_of, serving
from mcp.client import Client

from apcore_mcp import __version__, async_serve, serve

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
