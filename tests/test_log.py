"""What the log says of a server and its calls, in what form, and that nobody waits for who reads it (FR-LOG-*)."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from apcore import ACL, ACLRule, Executor, Identity, ModuleError
from conftest import FunctionalModule, RawClient, client_of, connect, echo, free_port, program, registry_of, serving
from support import SECRET_TEXT, Gate, run

from apcore_mcp import __version__, run_openai_call

FAILING = """
import os
from apcore.decorator import module

@module
async def fail() -> int:
    raise LookupError("of the module " + "x" * 500)

@module
async def forked() -> int:
    import logging
    child = os.fork()
    if not child:
        logging.warning("by the child")
        os._exit(0)
    return os.waitpid(child, 0)[1]
"""


@pytest.fixture
def failing(tmp_path: Path) -> list[str]:
    """The command line of a server whose tool `t.fail` fails."""
    (tmp_path / "t.py").write_text(FAILING)
    return [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(tmp_path)]


def make_small(pipe: Any) -> None:
    """Let a pipe hold no more than 4 KiB."""
    fcntl.fcntl(pipe, 1031, 4096)  # F_SETPIPE_SZ


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="pipes of this size")


@linux_only
def test_a_client_that_never_reads_the_log_is_served_and_the_server_ends_with_it(failing: list[str]) -> None:
    with RawClient(failing) as client:
        make_small(client.process.stderr)
        client.initialize()
        for _ in range(50):
            assert client.request("tools/call", {"name": "t.fail"})["result"]["isError"]
        client.process.stdin.close()
        client.process.stdin = None
        assert client.process.wait(20) == 0


@linux_only
@pytest.mark.parametrize("is_program", [False, True], ids=["command line", "serve"])
def test_a_server_whose_log_nobody_reads_answers_and_ends_at_a_signal(failing: list[str], is_program: bool) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [*failing, "--transport=streamable-http", f"--port={port}"]
    if is_program:
        command = program(f"serve(registry, transport='streamable-http', port={port}, log_level='INFO')")
    with (
        RawClient(command) as server,
        httpx.Client(trust_env=False) as client,
    ):
        while b"server started" not in server.process.stderr.readline():
            pass
        make_small(server.process.stderr)
        for _ in range(400):  # each is a line of the log
            assert client.post(f"{url}/mcp", headers={"Origin": "http://evil.example"}, json={}).status_code == 403
        assert client.get(f"{url}/health").status_code == 200
        server.process.terminate()
        assert server.process.wait(20) == 0


def test_what_was_logged_before_the_end_is_written_though_it_is_read_late(failing: list[str]) -> None:
    with RawClient(failing) as client:
        client.initialize()
        for _ in range(30):
            client.request("tools/call", {"name": "t.fail"})
        status, stderr = client.end()
    assert status == 0
    assert stderr.count(b"ERROR: Tool call error: t.fail - LookupError: of the module") == 30


@linux_only
def test_lines_that_are_lost_are_counted_in_the_log(failing: list[str]) -> None:
    with RawClient(failing) as client:
        make_small(client.process.stderr)
        client.initialize()
        for _ in range(1100):
            client.send("tools/call", {"name": "t.fail"})
        for _ in range(1100):
            client.receive()
        status, stderr = client.end()
    assert status == 0
    assert b" lines of this log are lost, as nobody has read it in time" in stderr


def test_a_process_that_a_module_forks_writes_its_own_lines(failing: list[str]) -> None:
    with RawClient(failing) as client:
        client.initialize()
        assert not client.request("tools/call", {"name": "t.forked"})["result"]["isError"]
        assert b"WARNING: by the child\n" in client.end()[1]


def test_an_error_at_the_start_is_the_last_line_behind_what_was_logged(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    ended = run("--extensions-dir", str(tmp_path), "--transport=streamable-http", "--host=203.0.113.7")
    first, *_, last = ended.stderr.splitlines()
    assert "WARNING: " in first
    assert last.startswith("Error: ")
    assert ended.returncode == 2


# ---- A line for each call that ends ----


@pytest.fixture
def access(caplog: pytest.LogCaptureFixture) -> Any:
    """The records of calls that have ended so far."""
    caplog.set_level(logging.INFO, logger="apcore_mcp")
    return lambda: [record for record in caplog.records if record.name == "apcore_mcp.access"]


def facts(record: Any) -> tuple[str, str, str]:
    assert record.levelno == logging.INFO
    assert len(record.trace_id) == 32
    assert record.duration_ms >= 0
    assert all(str(fact) in record.getMessage() for fact in (record.tool, record.outcome, record.trace_id))
    return record.tool, record.caller, record.outcome


def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    raise ModuleError("OUT_OF_STOCK", "no more")


async def test_each_call_that_ends_is_a_line_however_it_was_called_and_ended(mode: str, access: Any) -> None:
    """Those of `search_tools` too, and of a tool that there is not; one through `call_tool` is that tool's."""
    token = {"type": "object", "properties": {"token": {"type": "string", "x-sensitive": True}}}
    marked = FunctionalModule(echo, input_schema=token, output_schema=token)
    modules = {"t.echo": echo, "t.fail": fail, "t.marked": marked, "door.open": echo}
    acl = ACL([ACLRule(callers=["@external"], targets=["t.*"], effect="allow")], default_effect="deny")
    executor = Executor(registry_of(modules), acl=acl)
    through = {"name": "t.echo", "arguments": {"token": SECRET_TEXT}}
    async with connect(executor, mode=mode, search=True) as client:
        for name, arguments, tool, outcome in (
            ("t.echo", {}, "t.echo", "ok"),
            ("t-echo", {}, "t.echo", "ok"),
            ("t.marked", {"token": SECRET_TEXT}, "t.marked", "ok"),
            ("t.fail", {}, "t.fail", "OUT_OF_STOCK"),
            ("door.open", {}, "door.open", "ACL_DENIED"),
            ("no.such\nCRITICAL", {}, r"no.such\nCRITICAL", "MODULE_NOT_FOUND"),
            ("search_tools", {"query": "echo"}, "search_tools", "ok"),
            ("search_tools", {}, "search_tools", "SCHEMA_VALIDATION_ERROR"),
            ("call_tool", {}, "call_tool", "SCHEMA_VALIDATION_ERROR"),
            ("call_tool", through, "t.echo", "ok"),
        ):
            before = len(access())
            await client.call_tool(name, arguments)
            (record,) = access()[before:]
            assert facts(record) == (tool, "", outcome)
            assert SECRET_TEXT not in repr(vars(record))


async def test_a_line_names_the_caller_in_one_line_that_fits_into_json(access: Any) -> None:
    async def run_as(caller: str) -> None:
        await run_openai_call(registry_of({"t.echo": echo}), "t-echo", "{}", identity=Identity(caller))

    form = '{{"tool": "{tool}", "caller": "{caller}", "outcome": "{outcome}", "ms": {duration_ms:.1f}}}'
    for caller in ("ann", 'Zo\u00eb "7"\\', "ann\nCRITICAL\u2028\x1b[2J"):
        await run_as(caller)
        line = logging.Formatter(form, style="{").format(access()[-1])
        assert line.isprintable()
        assert json.loads(line)["caller"] == caller
        assert len(access()[-1].getMessage().splitlines()) == 1


async def test_calls_of_the_explorer_and_for_openai_are_lines_too(access: Any) -> None:
    registry = registry_of({"t.echo": echo})
    with serving(registry, explorer=True, allow_execute=True) as url:
        async with httpx.AsyncClient(trust_env=False) as client:
            for name in ("t.echo", "nope"):
                await client.post(f"{url}/explorer/tools/{name}/call", json={})
    await run_openai_call(registry, "nope", "{}")
    expected = [("t.echo", "", "ok"), ("nope", "", "MODULE_NOT_FOUND"), ("nope", "", "MODULE_NOT_FOUND")]
    assert [*map(facts, access())] == expected


async def test_a_call_that_is_cancelled_is_a_line(access: Any) -> None:
    entered = threading.Event()

    async def wait(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        entered.set()
        await asyncio.Event().wait()
        return {}

    with serving(registry_of({"t.wait": wait})) as url:
        async with client_of(url) as client:
            calling = asyncio.create_task(client.call_tool("t.wait"))
            assert await asyncio.to_thread(entered.wait, 10)
            calling.cancel()
            await asyncio.wait({calling})
    assert [*map(facts, access())] == [("t.wait", "", "EXECUTION_CANCELLED")]


async def test_the_line_of_an_error_and_that_of_its_call_name_the_same_trace(
    access: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with connect({"t.fail": fail}) as client:
        for name in ("t.fail", "nope"):
            caplog.clear()
            await client.call_tool(name)
            (record,) = access()
            (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
            assert record.trace_id in error.getMessage()


async def test_calls_leave_no_line_where_the_log_is_for_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="apcore_mcp")
    async with connect({"t.echo": echo}) as client:
        await client.call_tool("t.echo")
    assert caplog.records == []


async def test_the_trace_in_the_log_is_that_of_the_span_that_is_open(access: Any) -> None:
    """OpenTelemetry's: the SDK opens one for each request, and a program may have one of its own."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

    context = SpanContext(int("4bf92f3577b34da6a3ce929d0e0e4736", 16), 7, False, TraceFlags(1))
    with use_span(NonRecordingSpan(context)):
        await run_openai_call(registry_of({"t.echo": echo}), "t-echo", "{}")
    assert access()[-1].trace_id == "4bf92f3577b34da6a3ce929d0e0e4736"


# ---- /metrics ----


def numbers(text: str) -> dict[str, float]:
    """The samples of Prometheus' text format, each of which has to stand behind its HELP and TYPE."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, number = line.rpartition(" ")
            assert f"# TYPE {name.partition('{')[0]} " in text or name.startswith("apcore_module_")
            found[name] = float(number)
    return found


async def test_metrics_tell_what_runs_what_came_of_calls_and_what_was_refused() -> None:
    gate = Gate()

    def hold(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        gate.enter()
        return {}

    def odd(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        raise ModuleError('A"B\\\n' + "x" * 5_000, "odd")

    modules = {"t.echo": echo, "t.fail": fail, "t.hold": hold, "t.odd": odd}
    async with httpx.AsyncClient(trust_env=False) as http:
        with serving(registry_of(modules), metrics_collector=True) as url:
            async with client_of(url, "legacy") as client:
                for name in ("t.echo", "t.echo", "t.fail", "nope", "t.odd"):
                    await client.call_tool(name)
                holding = asyncio.create_task(client.call_tool("t.hold"))
                await gate.entered()
                assert (await http.post(f"{url}/mcp", content="x")).status_code == 415
                assert (await http.get(f"{url}/health", headers={"Origin": "http://evil.example"})).status_code == 403
                during = await http.get(f"{url}/metrics")
                gate.open()
                await holding
            after = numbers((await http.get(f"{url}/metrics")).text)
    told = numbers(during.text)
    outcome = "apcore_mcp_calls_total{outcome=%s}"
    assert during.text.endswith("\n")
    assert "apcore_module_calls_total" in during.text, "apcore's own stand before"
    assert told[f'apcore_mcp_info{{version="{__version__}"}}'] == 1
    gauges = [f"apcore_mcp_{name}" for name in ("calls_running", "sessions", "threads_busy")]
    assert [told[gauge] for gauge in gauges[:2]] == [1, 1]
    assert told[gauges[2]] >= 1
    assert after["apcore_mcp_calls_running"] == 0
    counts = [told[outcome % json.dumps(code)] for code in ("ok", "OUT_OF_STOCK", "MODULE_NOT_FOUND")]
    assert counts == [2, 1, 1]
    assert [name for name in told if name.startswith('apcore_mcp_calls_total{outcome="A\\"B') and len(name) < 200]
    assert told['apcore_mcp_requests_refused_total{status="415"}'] == 1
    assert told['apcore_mcp_requests_refused_total{status="403"}'] == 1


async def test_codes_that_an_author_makes_up_without_end_are_counted_together() -> None:
    def invent(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        raise ModuleError(f"CODE_{inputs['n']}", "")

    async with httpx.AsyncClient(trust_env=False) as http:
        with serving(registry_of({"t.invent": invent}), metrics_collector=True) as url:
            async with client_of(url) as client:
                for number in range(120):
                    await client.call_tool("t.invent", {"n": number})
            told = numbers((await http.get(f"{url}/metrics")).text)
    outcomes = [name for name in told if name.startswith("apcore_mcp_calls_total")]
    assert len(outcomes) <= 102
    assert told['apcore_mcp_calls_total{outcome="other"}'] == 20


# ---- OpenTelemetry ----

TRACED = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
MARKED = {"type": "object", "properties": {"pin": {"type": "string", "x-sensitive": True}}}

@functools.partial(tool, input_schema=MARKED)
def sync(inputs, context):
    with trace.get_tracer("shop").start_as_current_span("sync"):
        return {"trace": context.trace_id}

@functools.partial(tool, input_schema=MARKED)
async def later(inputs, context):
    with trace.get_tracer("shop").start_as_current_span("later"):
        raise LookupError(inputs["pin"])

@tool
def spans(inputs, context):
    return {"spans": [json.loads(span.to_json()) for span in exporter.get_finished_spans()]}

serve(registry)
"""


def test_a_modules_own_span_is_inside_the_sdks_which_is_inside_the_clients() -> None:
    """Without this package doing anything: the context variables of a call reach its module, in threads too."""
    pytest.importorskip("opentelemetry.sdk")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    meta = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    with RawClient(program("import functools\n" + TRACED)) as client:
        client.initialize()
        for name in ("t.sync", "t.later"):
            answer = client.request("tools/call", {"name": name, "arguments": {"pin": SECRET_TEXT}, "_meta": meta})
        told = client.request("tools/call", {"name": "t.spans", "arguments": {}})["result"]["content"][0]["text"]
        assert answer["result"]["isError"]
    spans = {span["name"]: span for span in json.loads(told)["spans"]}
    by_id = {span["context"]["span_id"]: span for span in spans.values()}
    for name in ("sync", "later"):
        assert spans[name]["context"]["trace_id"] == f"0x{trace}"
        assert by_id[spans[name]["parent_id"]]["name"] == f"tools/call t.{name}"
    own = spans.pop("later")  # what a module's own span says of its own exception is the module's affair
    assert SECRET_TEXT in json.dumps(own)
    assert SECRET_TEXT not in json.dumps([*spans.values()])
