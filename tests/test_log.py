"""What the log says of a server and its calls, in what form, and that nobody waits for who reads it (FR-LOG-*)."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from apcore import ACL, ACLRule, Executor, Identity, ModuleError
from conftest import FunctionalModule, RawClient, connect, echo, free_port, program, registry_of, serving
from support import SECRET_TEXT, SECRETIVE, cancel_call, everybody_is, run, stage, start_call

from apcore_mcp import log, run_openai_call

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


def make_small(pipe: Any) -> None:
    """Let a pipe hold no more than 4 KiB."""
    import fcntl

    fcntl.fcntl(pipe, 1031, 4096)  # F_SETPIPE_SZ


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="pipes of this size")


# ---- Nobody waits ----


@linux_only
def test_an_unread_log_holds_up_no_request_and_no_end() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    serving = program(f"serve(registry, transport='streamable-http', port={port}, log_level='INFO')")
    with RawClient(serving) as server, httpx.Client(trust_env=False) as client:
        while b"server started" not in server.process.stderr.readline():
            pass
        make_small(server.process.stderr)
        for _ in range(100):  # each is a line of the log
            assert client.post(f"{url}/mcp", headers={"Origin": "http://evil.example"}, json={}).status_code == 403
        assert client.get(f"{url}/health").status_code == 200
        server.process.terminate()
        assert server.process.wait(20) == 0


@linux_only
def test_lines_beyond_the_bound_are_dropped() -> None:
    """They would take the memory of a server that nobody reads."""
    text = "input()\nfor n in range(5000): logging.warning('line %d', n)\nprint(flush=True)"
    with RawClient(logging_program(text)) as writer:
        make_small(writer.process.stderr)
        writer.send_line(b"")
        writer.process.stdout.readline()  # all is logged, and nobody has read of it
        lines = writer.end()[1].decode().splitlines()
    assert lines[0].endswith("line 0")
    assert 1_000 <= len(lines) < 1_200


def test_what_was_logged_is_written_at_the_end_and_no_call_waits_for_it(tmp_path: Path) -> None:
    """And a process that a module forks writes its own lines."""
    (tmp_path / "t.py").write_text(FAILING)
    with RawClient([sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(tmp_path)]) as client:
        if sys.platform == "linux":
            make_small(client.process.stderr)
        client.initialize()
        for _ in range(30):
            assert client.request("tools/call", {"name": "t.fail"})["result"]["isError"]
        forks = sys.platform != "win32" and client.request("tools/call", {"name": "t.forked"})
        status, stderr = client.end()
    assert status == 0
    assert stderr.count(b"ERROR: Tool call error: t.fail - LookupError: of the module") == 30
    assert not forks or b"WARNING: by the child\n" in stderr


def test_an_error_at_the_start_is_the_last_line(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("1 / 0")
    ended = run("--extensions-dir", str(tmp_path), "--transport=streamable-http", "--host=203.0.113.7")
    first, *_, last = ended.stderr.splitlines()
    assert "WARNING: " in first
    assert last.startswith("Error: ")
    assert ended.returncode == 2


# ---- The form of a line ----


def logging_program(text: str) -> list[str]:
    """A program that sets up our log and runs `text`."""
    return [sys.executable, "-c", f"import logging\nfrom apcore_mcp import log\nlog.log_to_stderr()\n{text}"]


def test_each_record_is_a_line_whoever_logs_it() -> None:
    """One whose arguments do not fit is lost."""
    text = "logging.raiseExceptions = False; logging.warning('%d', 'x')\n"
    text += "logging.getLogger('opentelemetry.trace').warning('%s', 'a\\nERROR: b')"
    with RawClient(logging_program(text)) as writer:
        _, stderr = writer.end()
    (line,) = stderr.decode().splitlines()
    assert line.endswith(r"WARNING: a\nERROR: b")


LINES = {
    "a\nb\r\u2028\x1b[2J\ud800": r"a\nb\r\u2028\x1b[2J\ud800",
    "\u202eab": r"\u202eab",
    "é'\"\\": "é'\"\\",
    "x" * 9: "xxxxx",
    "abc\n": r"abc\n",
    "abcd\n": "abcd\\",
}


def test_one_line_escapes_and_cuts() -> None:
    for text, line in LINES.items():
        assert log.one_line(text, len(line)) == line
    assert log.one_line("é\n" * 99) == r"é\n" * 99


def formatted(error: Exception | None, message: str) -> list[str]:
    """The lines of a record."""
    exc_info = error and (type(error), error, None)
    record = logging.LogRecord("any", logging.ERROR, "any.py", 1, message, (), exc_info)
    return log.Formatter("%(levelname)s: %(message)s").format(record).split("\n")


def test_a_record_is_cut_and_its_traceback_indented_escaped_and_cut() -> None:
    (line,) = formatted(None, "x" * 3_900_000)
    assert len(line) == 10_000
    first, *traceback = formatted(LookupError("a\nERROR: b\x1b" + "x" * 500), "it failed")
    assert (first, traceback[0]) == ("ERROR: it failed", "  LookupError: a")
    assert traceback[1] == ("  ERROR: b\\x1b" + "x" * 500)[:252]
    first, *traceback = formatted(LookupError("\n".join(map(str, range(300)))), "it failed")
    assert len(traceback) == 81
    assert traceback[::40] == ["  LookupError: 0", "  ... 220 more lines ...", "  299"]


def test_a_log_of_the_programs_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    handlers = [logging.NullHandler()]
    monkeypatch.setattr(logging.root, "handlers", handlers)
    log.log_to_stderr()
    assert logging.root.handlers == handlers


def test_a_notebook_shows_the_log_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    log.log_to_stderr()
    logging.getLogger("apcore_mcp").warning("seen")
    assert capsys.readouterr().err.endswith("WARNING: seen\n")


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


async def test_access_each_call_that_ends_is_a_line(mode: str, access: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Those of `search_tools` too, and of a tool that there is not; one through `call_tool` is that tool's."""
    marked = FunctionalModule(echo, input_schema=SECRETIVE, output_schema=SECRETIVE)
    modules = {"t.echo": echo, "t.fail": fail, "t.marked": marked, "door.open": echo}
    acl = ACL([ACLRule(callers=["@external"], targets=["t.*"], effect="allow")], default_effect="deny")
    executor = Executor(registry_of(modules), acl=acl)
    through = {"name": "t.echo", "arguments": {"token": SECRET_TEXT}}
    async with connect(executor, mode=mode, search=True, access_log=True) as client:
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
            caplog.clear()
            await client.call_tool(name, arguments)
            (record,) = access()
            assert facts(record) == (tool, "", outcome)
            assert SECRET_TEXT not in repr(vars(record))
            errors = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
            assert all(record.trace_id in error for error in errors)
            assert (outcome == "ok") == (errors == [])


@pytest.mark.parametrize("options", [{}, {"access_log": True}], ids=["by default", "for a log of warnings"])
async def test_access_is_off(options: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING if options else logging.INFO, logger="apcore_mcp")
    async with connect({"t.echo": echo}, **options) as client:
        await client.call_tool("t.echo")
    assert [record for record in caplog.records if record.name == "apcore_mcp.access"] == []


async def test_access_names_the_caller_as_json_has_it(access: Any) -> None:
    """In one line, whatever his name is."""
    form = '{{"tool": "{tool}", "caller": "{caller}", "outcome": "{outcome}", "ms": {duration_ms:.1f}}}'
    for caller in ("ann", 'Zo\u00eb "7"\\', "ann\nCRITICAL\u2028\x1b[2J"):
        async with connect({"t.echo": echo}, access_log=True, middleware=everybody_is(caller)) as client:
            await client.call_tool("t.echo")
        line = logging.Formatter(form, style="{").format(access()[-1])
        assert line.isprintable()
        assert json.loads(line)["caller"] == caller
        assert len(access()[-1].getMessage().splitlines()) == 1


def test_access_of_calls_from_the_explorer(access: Any) -> None:
    with serving(registry_of({"t.echo": echo}), explorer=True, allow_execute=True, access_log=True) as url:
        for name in ("t.echo", "nope"):
            httpx.post(f"{url}/explorer/tools/{name}/call", json={}, trust_env=False)
    assert [*map(facts, access())] == [("t.echo", "", "ok"), ("nope", "", "MODULE_NOT_FOUND")]


async def test_access_of_a_call_that_is_cancelled(access: Any) -> None:
    async with connect(stage(), access_log=True) as client:
        await cancel_call(await start_call(client, "wait"))
    assert [*map(facts, access())] == [("wait", "", "EXECUTION_CANCELLED")]


async def test_the_trace_is_that_of_the_open_span(caplog: pytest.LogCaptureFixture) -> None:
    """OpenTelemetry's: the SDK opens one for each request, and a program may have one of its own."""
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

    context = SpanContext(int("4bf92f3577b34da6a3ce929d0e0e4736", 16), 7, False, TraceFlags(1))
    with use_span(NonRecordingSpan(context)):
        await run_openai_call(registry_of({"t.fail": fail}), "t-fail", "{}", identity=Identity("ann"))
    assert "4bf92f3577b34da6a3ce929d0e0e4736" in caplog.text


# ---- OpenTelemetry ----

TRACED = """
import functools
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)
MARKED = {"type": "object", "properties": {"pin": {"type": "string", "x-sensitive": True}}}

def fail(name, pin):
    with trace.get_tracer("shop").start_as_current_span(name):
        raise LookupError(pin)

@functools.partial(tool, input_schema=MARKED)
def sync(inputs, context):
    fail("sync", inputs["pin"])

@functools.partial(tool, input_schema=MARKED)
async def later(inputs, context):
    fail("later", inputs["pin"])

@tool
def spans(inputs, context):
    return {"spans": [json.loads(span.to_json()) for span in exporter.get_finished_spans()]}

serve(registry)
"""


def test_a_modules_span_is_inside_the_clients() -> None:
    """Without this package doing anything: the context variables of a call reach its module, in threads too."""
    pytest.importorskip("opentelemetry.sdk")
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    meta = {"traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    with RawClient(program(TRACED)) as client:
        client.initialize()
        for name in ("t.sync", "t.later"):
            answer = client.request("tools/call", {"name": name, "arguments": {"pin": SECRET_TEXT}, "_meta": meta})
            assert answer["result"]["isError"]
        told = client.request("tools/call", {"name": "t.spans"})["result"]["structuredContent"]
    spans = {span["name"]: span for span in told["spans"]}
    by_id = {span["context"]["span_id"]: span for span in spans.values()}
    for name in ("sync", "later"):
        assert spans[name]["context"]["trace_id"] == f"0x{trace}"
        assert by_id[spans[name]["parent_id"]]["name"] == f"tools/call t.{name}"
        # What a module's own span says of its own exception is the module's affair.
        assert SECRET_TEXT in json.dumps(spans.pop(name))
    assert SECRET_TEXT not in json.dumps([*spans.values()])
