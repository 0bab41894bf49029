"""What an operator sees: `/health` (FR-HEALTH-001, -002), `/metrics` (F-021, F-022) and several worker processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from apcore import Executor
from apcore.observability import MetricsCollector
from conftest import HANDSHAKE, ROOT, FunctionalModule, command, connect, echo, free_port, registry_of, serving
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


def test_a_collector_that_fails_is_an_error_without_a_reason() -> None:
    class Broken:
        def export_prometheus(self) -> str:
            raise OSError("/var/lib/metrics")

    with serving(registry_of(), metrics_collector=Broken()) as url:
        response = httpx.get(f"{url}/metrics")
        assert (response.status_code, response.text) == (500, "Internal Server Error")
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_collector_that_cannot_export_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match=r"metrics_collector must have an export_prometheus\(\) method, got int"):
        serve(registry_of(), metrics_collector=5)


# ---- Workers ----


@contextlib.contextmanager
def program(arguments: list[str], port: int) -> Iterator[subprocess.Popen[str]]:
    """A server in a process of its own that answers at `port`; killed with its children if it is still there."""
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def started(process: subprocess.Popen[str]) -> int:
    """Wait for one worker to say that it has started; its process id."""
    assert process.stderr is not None
    for line in process.stderr:
        if match := re.search(r"server started: .*, process (\d+)$", line):
            return int(match[1])
    raise AssertionError("the server ended")


def slug(port: int) -> str:
    body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
    arguments = {"name": "text.slugify", "arguments": {"text": "Hello World"}}
    accept = {"Accept": "application/json, text/event-stream"}
    response = httpx.post(f"http://127.0.0.1:{port}/mcp", json={**body, "params": arguments}, headers=accept)
    (data,) = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return str(json.loads(data[6:])["result"]["structuredContent"]["slug"])


def workers(port: int, *more: str) -> list[str]:
    options = ["--transport", "streamable-http", "--stateless", "--workers", "2", "--port", str(port)]
    return command(*options, *more)


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")


@needs_fork
def test_workers_share_a_port_and_a_killed_one_is_replaced() -> None:
    port = free_port()
    with program(workers(port), port) as process:
        first, second = started(process), started(process)
        assert first != second
        assert slug(port) == "hello-world"
        os.kill(first, signal.SIGKILL)
        third = started(process)
        assert third not in (first, second)
        os.kill(second, signal.SIGKILL)
        started(process)
        assert slug(port) == "hello-world"  # by the replacements
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@needs_fork
def test_ctrl_c_reaches_every_process_of_a_terminal_and_ends_them_in_order() -> None:
    port = free_port()
    with program(workers(port), port) as process:
        ids = [started(process), started(process)]
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        for worker in ids:
            with pytest.raises(ProcessLookupError):
                os.kill(worker, 0)


@needs_fork
def test_workers_end_when_the_process_that_started_them_is_killed() -> None:
    port = free_port()
    with program(workers(port), port) as process:
        started(process), started(process)
        process.kill()
        assert process.stderr is not None
        process.stderr.read()  # at its end when nobody holds the other one: every worker has ended
        with pytest.raises(httpx.ConnectError):
            slug(port)


@needs_fork
def test_a_busy_port_is_one_line_with_workers_too() -> None:
    with serving(registry_of()) as url:
        port = int(url.rpartition(":")[2])
        ended = subprocess.run(workers(port), capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1


@needs_fork
def test_a_worker_that_cannot_start_ends_the_server(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text(
        "from apcore import Registry\nfrom apcore_mcp import serve\n"
        "def no(): raise LookupError('not today')\n"
        f"options = dict(transport='streamable-http', port={free_port()}, stateless=True, workers=2)\n"
        "serve(Registry(), on_startup=no, **options)\n"
    )
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert ended.returncode == 1
    assert "LookupError: not today" in ended.stderr
    assert ended.stderr.splitlines()[-1] == "RuntimeError: A worker process ended with status 1"


ASKER = """
from typing import Any
from apcore import Registry
from apcore_mcp import elicit, serve

class Asker:
    description = "Asks"
    input_schema = output_schema = {{"type": "object"}}
    async def execute(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {{"answer": await elicit(context, "Sure?")}}

registry = Registry()
registry.register("t.ask", Asker())
serve(registry, transport="streamable-http", port={port}, stateless=True, workers=2, log_level="INFO")
"""


@needs_fork
async def test_with_workers_nobody_is_asked_so_no_answer_can_reach_the_wrong_process(tmp_path: Path, mode: str) -> None:
    port = free_port()
    script = tmp_path / "asks.py"
    script.write_text(ASKER.format(port=port))
    asked: Counter[str] = Counter()

    async def answer(context: Any, params: Any) -> Any:
        asked["questions"] += 1
        raise AssertionError("not to be asked")

    with program([sys.executable, str(script)], port) as process:
        started(process), started(process)
        async with Client(f"http://127.0.0.1:{port}/mcp", mode=mode, elicitation_callback=answer) as client:
            results = [(await client.call_tool("t.ask", {})).structured_content for _ in range(4)]
    assert results == [{"answer": None}] * 4
    assert not asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"workers": 2}, "More than one worker needs transport='streamable-http' and stateless=True"),
        ({"workers": 2, "transport": "streamable-http"}, "More than one worker needs"),
        ({"workers": 2, "transport": "sse", "stateless": True}, "More than one worker needs"),
    ],
)
def test_workers_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        serve(registry_of(), **options)


async def test_only_serve_starts_workers() -> None:
    options: dict[str, Any] = {"transport": "streamable-http", "stateless": True, "workers": 2}
    with pytest.raises(ValueError, match="workers is for serve"):
        MCPServer(registry_of(), **options)
    with pytest.raises(ValueError, match="workers is for serve"):
        async with async_serve(registry_of(), **options):
            pass
