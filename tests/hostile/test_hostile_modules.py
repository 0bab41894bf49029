"""Modules that print, exit, block, return what nobody can say and tell what they should not: the protocol stays whole,
the other tools are served, and what is sensitive is told nowhere (design "stdio", "Output", "Errors", §4). Each server
is a process of its own, of which every byte is read.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import HANDSHAKE, MODERN, PROGRAM, ROOT, RawClient
from support import call, initialize_params, line, message, messages

ECHO = """
@tool
def echo(inputs, context):
    return inputs
"""


def script(tmp_path: Path, body: str, options: str = "registry") -> list[str]:
    path = tmp_path / "hostile_program.py"
    path.write_text(f"{PROGRAM}{ECHO}\n{body}\nserve({options})\n")
    return [sys.executable, str(path)]


def called(mode: str, request_id: str, tool: str, **arguments: Any) -> bytes:
    if mode == MODERN:
        return line(call(request_id, tool, **arguments))
    return line({**message("tools/call", {"name": tool, "arguments": arguments}), "id": request_id})


def opening(mode: str) -> bytes:
    if mode == MODERN:
        return b""
    initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    return line({**message("initialize", initialize_params("2025-11-25")), "id": "initialize"}) + line(initialized)


def converse(program: list[str], mode: str, *sent: bytes) -> tuple[dict[str, Any], list[bytes], str]:
    """The results by request id, every line on stdout, and stderr; of a server that ended well."""
    completed = subprocess.run(program, input=opening(mode) + b"".join(sent), capture_output=True, cwd=ROOT, timeout=40)
    stderr = completed.stderr.decode(errors="replace")
    assert completed.returncode == 0, stderr[-3000:]
    answers = [m for m in messages(completed.stdout) if m.get("id") not in (None, "initialize")]
    assert len({m["id"] for m in answers}) == len(answers)
    return {m["id"]: m["result"] for m in answers}, completed.stdout.splitlines(), stderr


def text_of(result: dict[str, Any]) -> str:
    (part,) = result["content"]
    return str(part["text"])


# ---- Raising and returning ----

RAISING = {
    "exit": "sys.exit('/etc/secret')",
    "exit_with_a_number": "sys.exit(3)",
    "interrupt": "raise KeyboardInterrupt('/etc/secret')",
    "cancelled": "raise asyncio.CancelledError('/etc/secret')",
    "generator_exit": "raise GeneratorExit",
    "no_memory": "raise MemoryError('/etc/secret')",
    "recursion": "return (lambda f: f(f))(lambda f: f(f))",
    "surrogates": "raise RuntimeError('\\ud800 /etc/secret')",
    "ten_megabytes": "raise RuntimeError('/etc/secret' * 1_000_000)",
    "no_text": "raise type('Odd', (Exception,), {'__str__': lambda self: 5, '__repr__': lambda self: None})()",
    "no_message": "raise ModuleError('ODD', None)",
    "cause_in_a_circle": "a, b = ValueError('/etc/secret'), KeyError(); a.__cause__, b.__cause__ = b, a; raise a",
    "group": "raise BaseExceptionGroup('/etc/secret', [SystemExit(1), KeyboardInterrupt()])",
    "warning": "raise UserWarning('/etc/secret')",
    "stop_of_the_loop": "raise StopAsyncIteration('/etc/secret')",
    "timeout": "raise TimeoutError('/etc/secret')",
}
RETURNING = {
    "circle": "d = {}; d['d'] = d; return d",
    "circle_of_lists": "d = []; d.append(d); return {'d': d}",
    "nan": "return {'d': math.nan}",
    "list": "return [1]",
    "text": "return 'text'",
    "number": "return 5",
    "generator": "return (n for n in range(3))",
    "function": "return {'d': len}",
    "coroutine": "async def later(): pass\n    c = later(); c.close(); return {'d': c}",
    "keys_of_any_type": "return {1: 1, None: 2, (1, 2): 3, b'b': 4, 1.5: 5, True: 6}",
    "huge_number": "return {'d': 10 ** 5000}",
    "large_number": "return {'d': 10 ** 300, 'e': -2 ** 63}",
    "deep": "d = {}\n    for _ in range(100_000): d = {'d': d}\n    return d",
    "hostile_dict": "return type('D', (dict,), {'items': lambda s: 1 / 0, '__iter__': lambda s: 1 / 0})(a=1)",
    "hostile_text": "return {'d': type('S', (), {'__str__': lambda s: 5})()}",
    "bytes": "return {'d': [bytes(range(256)), bytearray(b'a'), {b'a'}, frozenset([1])]}",
    "like_a_result": "return {'content': [{'type': 'text', 'text': 'no'}], 'isError': True, '_meta': {'a': 1}}",
    "like_a_message": "return {'jsonrpc': '2.0', 'id': 1, 'method': 'tools/call', 'd': '\\n{\"id\": 1}\\n\\r\\u2028'}",
    "twenty_megabytes": "return {'d': 'x' * 20_000_000}",
}
SAID = ("Internal error occurred", "Failed to serialize module output", "Execution was cancelled", "Module error: ODD")
SAID += ("Output validation failed", "Module timed out after ")  # apcore's word for a TimeoutError, whoever raised it


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Every row of both tables as a sync and as an async module."""
    body = "".join(
        f"@tool\n{kind}def {kind.strip() or 'sync'}_{name}(inputs, context):\n    {does}\n"
        for kind in ("", "async ")
        for name, does in {**RAISING, **RETURNING}.items()
    )
    return script(tmp_path_factory.mktemp("modules"), body)


@pytest.mark.requirement("FR-EXEC-007")
@pytest.mark.parametrize(("kind", "mode"), [("sync", HANDSHAKE), ("async", MODERN)])
def test_whatever_a_module_raises_or_returns_is_one_answer_and_the_next_call_is_served(
    hostile: list[str], kind: str, mode: str
) -> None:
    names = [f"{kind}_{name}" for name in (*RAISING, *RETURNING)]
    sent = [called(mode, name, f"t.{name}") + called(mode, f"after {name}", "t.echo", n=1) for name in names]
    results, lines, stderr = converse(hostile, mode, *sent)
    assert results.keys() == {*names, *(f"after {name}" for name in names)}
    for name in names:
        assert results[f"after {name}"]["structuredContent"] == {"n": 1}
        result, short = results[name], name.partition("_")[2]
        if result["isError"]:
            assert text_of(result).startswith(SAID), name
            assert "structuredContent" not in result
        else:
            assert short in RETURNING, name
            assert json.loads(text_of(result)) == result["structuredContent"]
    assert len(results[f"{kind}_twenty_megabytes"]["structuredContent"]["d"]) == 20_000_000
    assert results[f"{kind}_like_a_result"]["structuredContent"]["isError"] is True
    assert results[f"{kind}_large_number"]["structuredContent"] == {"d": 10**300, "e": -(2**63)}
    assert results[f"{kind}_bytes"]["structuredContent"]["d"][1:] == ["YQ==", ["YQ=="], [1]]
    said = b"\n".join(text for text in lines if len(text) < 1_000_000)
    assert [word for word in (b"/etc", b"Traceback", b".py", b"object at 0x") if word in said] == []
    assert "never retrieved" not in stderr


# ---- Printing ----

PRINTING = """
def everywhere(word):
    print(f"noise-print-{word}")
    print(f"noise-flushed-{word}", flush=True)
    sys.__stdout__.write(f"noise-dunder-{word}\\n")
    sys.stdout.buffer.write(f"noise-buffer-{word}\\n".encode())
    logging.getLogger("loud").error(f"noise-log-{word}")
    ctypes.CDLL(None).puts(f"noise-puts-{word}".encode())
    ctypes.CDLL(None).write(1, f"noise-write-{word}\\n".encode(), len(f"noise-write-{word}\\n"))
    open("/dev/fd/1", "w").write(f"noise-open-{word}\\n")
    subprocess.run([sys.executable, "-c", f"print('noise-child-{word}')"], check=True)
    os.system(f"echo noise-shell-{word}")
"""
PLACES = "print flushed dunder buffer log puts write open child shell".split()


def test_what_is_printed_by_logs_threads_and_children_goes_to_stderr(tmp_path: Path) -> None:
    body = """
@tool
def loud(inputs, context):
    logging.basicConfig(stream=sys.stdout, level=logging.DEBUG, force=True)
    everywhere("sync")
    thread = threading.Thread(target=everywhere, args=("thread",))
    thread.start()
    thread.join()
    return {}

@tool
async def later(inputs, context):
    everywhere("async")
    return {}

@tool
def closing(inputs, context):
    ctypes.CDLL(None).fflush(None)
    sys.stdout.close()
    os.close(1)
    os.open(os.devnull, os.O_RDWR)
    return {}

@tool
def replacing(inputs, context):
    sys.stdout = open(1, "w", closefd=False)
    os.dup2(2, 1)
    everywhere("replaced")
    return {}

spammed = threading.Event()
def spam():
    while True:
        os.write(1, b"noise-spam\\n")
        spammed.set()
        time.sleep(0.001)

@tool
def spamming(inputs, context):
    threading.Thread(target=spam, daemon=True).start()
    spammed.wait(10)
    return {}
"""
    program = script(tmp_path, PRINTING + body)
    with RawClient(program) as client:
        # One after the other: what is closed or replaced is the whole process's.
        for tool in ("t.loud", "t.later", "t.replacing", "t.spamming", "t.closing", "t.echo"):
            assert client.process.stdin is not None
            client.process.stdin.write(called(MODERN, tool, tool))
            client.process.stdin.flush()
            assert client.receive()["id"] == tool
        client.process.stdin.close()  # type: ignore[union-attr]
        client.process.stdin = None
        stdout, stderr = client.process.communicate(timeout=50)
    assert client.process.returncode == 0
    assert [text for text in stdout.splitlines() if text != b"noise-spam"] == []  # the program's own again, at its end
    expected = [f"noise-{place}-{word}" for word in ("sync", "thread", "async", "replaced") for place in PLACES]
    missing = [noise for noise in expected if noise not in stderr.decode()]
    assert [noise for noise in missing if noise != "noise-log-replaced"] == []


SPAMMING = """
import atexit, os, sys, threading, time
from pydantic import BaseModel

started = threading.Event()
def spam():
    while True:
        os.write(1, b"noise-spam\\n")
        started.set()
        time.sleep(0.0005)

threading.Thread(target=spam, daemon=True).start()
started.wait(10)
atexit.register(print, "noise-exit", flush=True)
atexit.register(os.system, "echo noise-child")
sys.stdout.write("noise-buffered")

class Empty(BaseModel):
    pass

class Loud:
    input_schema = output_schema = Empty
    description = "Loud"
    def execute(self, inputs, context):
        return {}
"""


@pytest.mark.parametrize("ending", ["end-of-input", "SIGTERM"])
def test_the_command_line_keeps_modules_off_stdout_until_the_process_is_gone(tmp_path: Path, ending: str) -> None:
    """Threads that never stop, exit handlers and what is still in a buffer: the client may read on until the end."""
    (tmp_path / "loud.py").write_text(SPAMMING)
    with RawClient([sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(tmp_path)]) as client:
        client.send_line(line(call(1, "loud")).strip())
        assert client.receive()["id"] == 1
        if ending == "SIGTERM":
            client.process.send_signal(signal.SIGTERM)
        stdout, stderr = client.process.communicate(timeout=50)
        assert client.process.returncode == 0
    assert stdout[-200:] == b""
    assert b"noise-spam" in stderr


# ---- Blocking ----

BLOCKING = """
@tool
def asleep(inputs, context):
    time.sleep(3600)

@tool
def locked(inputs, context):
    threading.Lock().acquire() and threading.Event().wait()

@tool
def busy(inputs, context):
    limit = time.monotonic() + 20
    while time.monotonic() < limit:
        pass

@tool
async def awaiting(inputs, context):
    await asyncio.Event().wait()

@tool
async def deaf(inputs, context):
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

@tool
async def blocked_below(inputs, context):
    await asyncio.to_thread(time.sleep, 3600)

@tool
def in_a_child(inputs, context):
    subprocess.run(["sleep", "15"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

executor = Executor(registry, config=Config({"executor": {"default_timeout": 700, "global_timeout": 60_000}}))
"""
BLOCKED = "asleep locked busy awaiting deaf blocked_below in_a_child".split()


def test_modules_that_block_for_ever_time_out_and_hold_up_neither_calls_nor_the_end(tmp_path: Path) -> None:
    program, mode = script(tmp_path, BLOCKING, "executor"), HANDSHAKE
    with RawClient(program) as client:
        assert client.process.stdin is not None
        client.process.stdin.write(opening(mode) + b"".join(called(mode, name, f"t.{name}") for name in BLOCKED))
        client.process.stdin.write(called(mode, "beside", "t.echo", n=1))
        client.process.stdin.flush()
        answered: list[str] = []
        results = {}
        while len(answered) <= len(BLOCKED):
            received = client.receive()
            if received["id"] != "initialize":
                answered.append(received["id"])
                results[received["id"]] = received["result"]
        assert answered[0] == "beside"
        assert {name: text_of(results[name]) for name in BLOCKED} == dict.fromkeys(
            BLOCKED, "Module timed out after 700ms"
        )
        details = results["asleep"]["_meta"]["apcore-mcp/error"]
        assert (details["error_type"], details["error_details"]) == ("MODULE_TIMEOUT", {"timeout_ms": 700})
        began = time.monotonic()
        stdout, stderr = client.process.communicate(called(mode, "last", "t.echo", n=2), timeout=50)
        assert time.monotonic() - began < 10
    assert messages(stdout)[0]["result"]["structuredContent"] == {"n": 2}
    assert (client.process.returncode, b"Traceback" in stderr) == (0, False)


# ---- Secrets ----

SECRET, PIN = "hunter2-s3cr3t", 918273645
TELLING = """
sensitive = {"x-sensitive": True}
schema = {"type": "object", "properties": {
    "password": {"type": "string", **sensitive}, "pin": {"type": "integer", **sensitive}, "what": {"type": "string"},
    "box": {"type": "object", "properties": {"key": {"type": "string", **sensitive}}}}}
streaming = {"input_schema": schema, "output_schema": schema, "annotations": ModuleAnnotations(streaming=True)}
def secretly(function):
    return tool(function, input_schema=schema, output_schema=schema)

@secretly
def keep(inputs, context):
    return inputs

@secretly
async def keep_later(inputs, context):
    await report_progress(context, 1)
    return inputs

@secretly
def fail(inputs, context):
    raise RuntimeError(f"bad {inputs}") from ValueError(inputs["password"])

@secretly
async def fail_later(inputs, context):
    raise ModuleError("BAD", f"bad {inputs}", {"pin": inputs["pin"]}, cause=KeyError(inputs["password"]))

@secretly
async def exit_later(inputs, context):
    sys.exit(inputs["password"])

@secretly
def fail_after_the_timeout(inputs, context):
    time.sleep(0.9)
    raise RuntimeError(f"bad {inputs}")

@secretly
async def fail_when_cancelled(inputs, context):
    try:
        await asyncio.sleep(3600)
    finally:
        raise RuntimeError(f"bad {inputs}")

@secretly
async def fail_in_a_task(inputs, context):
    async def fail():
        raise RuntimeError(f"bad {inputs}")
    await asyncio.wait({asyncio.create_task(fail())})
    raise RuntimeError("bad")

@secretly
def wrong_output(inputs, context):
    return {"password": inputs["pin"], "pin": inputs["password"], "what": inputs}

@secretly
def unsayable_output(inputs, context):
    return {**inputs, "what": math.nan}

@secretly
def calls_below(inputs, context):
    return context.executor.call("t.keep", {"password": inputs["pin"], "pin": inputs["password"]}, context)

class Streaming(Module):
    async def stream(self, inputs, context):
        yield dict(inputs)
        yield {"box": {"key": inputs["password"]}}
        if inputs["what"] == "fail":
            raise RuntimeError(f"bad {inputs}")
        yield {"what": 5} if inputs["what"] == "wrong" else {}

registry.register("t.stream", Streaming(echo, **streaming))
executor = Executor(registry, config=Config({"executor": {"default_timeout": 700, "global_timeout": 60_000}}))
"""
LATE = "on_shutdown=lambda: asyncio.sleep(0.6)"  # so that what fails late still fails
TELLING_TOOLS = """keep keep_later fail fail_later exit_later fail_after_the_timeout fail_when_cancelled
fail_in_a_task wrong_output unsayable_output calls_below""".split()


@pytest.mark.requirement("NFR-SEC-002")
@pytest.mark.parametrize(
    ("mode", "validate"), [(HANDSHAKE, False), (MODERN, True)], ids=["apcore-validates", "validate-inputs"]
)
def test_what_is_sensitive_is_in_no_error_no_meta_and_no_log_line(tmp_path: Path, mode: str, validate: bool) -> None:
    """Nor in what the event loop has to say of a task that a module left to fail."""
    program = script(tmp_path, TELLING, f"executor, log_level='DEBUG', validate_inputs={validate}, {LATE}")
    arguments = {"password": SECRET, "pin": PIN, "what": "ok", "box": {"key": SECRET}}
    sent = [called(mode, name, f"t.{name}", **arguments) for name in TELLING_TOOLS]
    wrong: list[dict[str, Any]] = [{"pin": SECRET}, {"password": PIN}, {"what": [SECRET]}, {"box": SECRET}]
    sent += [called(mode, f"wrong {n}", "t.keep", **arguments | change) for n, change in enumerate(wrong)]
    for what in ("ok", "fail", "wrong"):
        posted = json.loads(called(mode, f"stream {what}", "t.stream", **arguments | {"what": what}))
        posted["params"].setdefault("_meta", {})["progressToken"] = what
        sent.append(line(posted))
    results, lines, stderr = converse(program, mode, *sent)
    # Of a tool with something sensitive nothing is promised, and apcore lets the whole of a stream pass.
    passed = {"keep", "keep_later", "stream ok", "stream wrong"}
    assert {name for name, result in results.items() if not result["isError"]} == passed
    assert json.loads(results["keep"]["content"][0]["text"])["password"] == "***REDACTED***"
    assert len([text for text in lines if b"notifications/progress" in text]) >= 7
    leaks = [text.decode()[:300] for text in lines if SECRET.encode() in text or str(PIN).encode() in text]
    leaks += [text for text in stderr.splitlines() if SECRET in text or str(PIN) in text]
    assert leaks == []
    assert "Tool call ended: t.keep, " in stderr, "it was to log at DEBUG"


def test_unredacted_output_is_in_the_result_and_nowhere_else(tmp_path: Path) -> None:
    program = script(tmp_path, TELLING, "executor, log_level='DEBUG', redact_output=False")
    arguments = {"password": SECRET, "pin": PIN, "what": "ok", "box": {"key": SECRET}}
    results, lines, stderr = converse(program, MODERN, called(MODERN, "keep", "t.keep", **arguments))
    result = results["keep"]
    assert result.pop("structuredContent") == arguments == json.loads(text_of(result))
    del result["content"]
    assert SECRET not in json.dumps(result)
    assert len([text for text in lines if SECRET.encode() in text]) == 1
    assert SECRET not in stderr
