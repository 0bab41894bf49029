"""Modules that print, exit, block, return what nobody can say and fail while they hold secrets: the protocol stays
whole, the other tools are served, and what is sensitive is told nowhere (design "stdio", "Output", "Errors", §4). Each
server is a process of its own, of which every byte is read.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, RawClient, program
from support import call, line, messages

ECHO = """
@tool
def echo(inputs, context):
    return inputs
"""


def converse(body: str, options: str, *sent: bytes) -> tuple[dict[str, Any], list[bytes], str]:
    """The results by request id, every line on stdout, and stderr; of a server that ended well."""
    server = program(f"{ECHO}{body}\nserve({options})")
    completed = subprocess.run(server, input=b"".join(sent), capture_output=True, cwd=ROOT, timeout=40)
    stderr = completed.stderr.decode(errors="replace")
    assert completed.returncode == 0, stderr[-3000:]
    answers = [m for m in messages(completed.stdout) if m.get("id") is not None]
    assert len({m["id"] for m in answers}) == len(answers)
    return {m["id"]: m["result"] for m in answers}, completed.stdout.splitlines(), stderr


def text_of(result: dict[str, Any]) -> str:
    (part,) = result["content"]
    return str(part["text"])


# ---- Raising and returning ----

RAISING = {
    "exit": "sys.exit('/etc/secret')",
    "interrupt": "raise KeyboardInterrupt('/etc/secret')",
    "cancelled": "raise asyncio.CancelledError('/etc/secret')",
    "recursion": "return (lambda f: f(f))(lambda f: f(f))",
    "surrogates": "raise RuntimeError('\\ud800 /etc/secret')",
    "a_megabyte": "raise RuntimeError('/etc/secret' * 100_000)",
    "nothing_left": "return {'d': next(n for n in ())}",
    "group": "raise ExceptionGroup('/etc/secret', [ValueError(1)])",
    "timeout": "raise TimeoutError('/etc/secret')",
}
RETURNING = {
    "circle": "d = {}; d['d'] = d; return d",
    "nan": "return {'d': math.nan}",
    "list": "return [1]",
    "generator": "return (n for n in range(3))",
    "function": "return {'d': len}",
    "keys_of_any_type": "return {1: 1, None: 2, (1, 2): 3, b'b': 4, 1.5: 5, True: 6}",
    "huge_number": "return {'d': 10 ** 5000}",
    "large_number": "return {'d': 10 ** 300, 'e': -2 ** 63}",
    "bytes": "return {'d': [bytes(range(256)), bytearray(b'a'), {b'a'}, frozenset([1])]}",
    "like_a_result": "return {'content': [{'type': 'text', 'text': 'no'}], 'isError': True, '_meta': {'a': 1}}",
    "two_megabytes": "return {'d': 'x' * 2_000_000}",
}
SAID = ("Internal error occurred", "Failed to serialize module output", "Execution was cancelled")
SAID += ("Output validation failed", "Module timed out after ")  # apcore's word for a TimeoutError, whoever raised it


@pytest.mark.requirement("FR-EXEC-007")
def test_whatever_a_module_raises_or_returns_is_one_answer_and_the_next_call_is_served() -> None:
    functions = {
        f"{kind or 'sync'}_{name}": f"@tool\n{kind} def {kind or 'sync'}_{name}(inputs, context):\n    {does}\n"
        for kind in ("", "async")
        for name, does in {**RAISING, **RETURNING}.items()
    }
    body = "".join(functions.values()).replace("\n def", "\ndef")
    sent = [line(call(name, f"t.{name}")) + line(call(f"after {name}", "t.echo", n=1)) for name in functions]
    results, lines, stderr = converse(body, "registry", *sent)
    assert results.keys() == {*functions, *(f"after {name}" for name in functions)}
    for name in functions:
        assert results[f"after {name}"]["structuredContent"] == {"n": 1}
        result, short = results[name], name.partition("_")[2]
        if result["isError"]:
            assert text_of(result).startswith(SAID), name
            assert "structuredContent" not in result
        else:
            assert short in RETURNING, name
            assert json.loads(text_of(result)) == result["structuredContent"]
    for kind in ("sync", "async"):
        assert len(results[f"{kind}_two_megabytes"]["structuredContent"]["d"]) == 2_000_000
        assert results[f"{kind}_like_a_result"]["structuredContent"]["isError"] is True
        assert results[f"{kind}_large_number"]["structuredContent"] == {"d": 10**300, "e": -(2**63)}
        assert results[f"{kind}_bytes"]["structuredContent"]["d"][1:] == ["YQ==", ["YQ=="], [1]]
        assert text_of(results[f"{kind}_nothing_left"]) == "Internal error occurred"
    said = b"\n".join(text for text in lines if len(text) < 1_000_000)
    assert [word for word in (b"/etc", b"Traceback", b".py", b"object at 0x") if word in said] == []
    assert "never retrieved" not in stderr


# ---- Printing ----

PRINTING = """
def everywhere(word):
    print(f"noise-print-{word}")
    sys.__stdout__.write(f"noise-dunder-{word}\\n")
    logging.getLogger("loud").error(f"noise-log-{word}")
    ctypes.CDLL(None).puts(f"noise-puts-{word}".encode())
    os.write(1, f"noise-write-{word}\\n".encode())
    os.system(f"echo noise-shell-{word}")

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
"""
PLACES = "print dunder log puts write shell".split()


def test_what_is_printed_by_logs_threads_and_children_goes_to_stderr() -> None:
    sent = [line(call(tool, f"t.{tool}")) for tool in ("loud", "later")]
    results, lines, stderr = converse(PRINTING, "registry", *sent)
    assert (results.keys(), len(lines)) == ({"loud", "later"}, 2)
    expected = [f"noise-{place}-{word}" for word in ("sync", "thread", "async") for place in PLACES]
    assert [noise for noise in expected if noise not in stderr] == []


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
sys.stdout.write("noise-buffered")

class Empty(BaseModel):
    pass

class Loud:
    input_schema = output_schema = Empty
    description = "Loud"
    def execute(self, inputs, context):
        return {}
"""


def test_the_command_line_keeps_modules_off_stdout_until_the_process_is_gone(tmp_path: Path) -> None:
    """Threads that never stop, exit handlers and what is still in a buffer: the client may read on until the end."""
    (tmp_path / "loud.py").write_text(SPAMMING)
    with RawClient([sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(tmp_path)]) as client:
        client.send_line(line(call(1, "loud")).strip())
        assert client.receive()["id"] == 1
        stdout, stderr = client.process.communicate(timeout=50)
    assert (client.process.returncode, stdout[-200:]) == (0, b"")
    assert b"noise-spam" in stderr


# ---- Blocking ----

BLOCKING = """
@tool
def asleep(inputs, context):
    time.sleep(3600)

@tool
def busy(inputs, context):
    limit = time.monotonic() + 1
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

serve(Executor(registry, config=Config({"executor": {"default_timeout": 300, "global_timeout": 60_000}})))
"""
BLOCKED = "asleep busy awaiting deaf blocked_below".split()


def test_modules_that_block_for_ever_time_out_and_hold_up_neither_calls_nor_the_end() -> None:
    with RawClient(program(ECHO + BLOCKING)) as client:
        for name in BLOCKED:
            client.send_line(line(call(name, f"t.{name}")).strip())
        client.send_line(line(call("beside", "t.echo", n=1)).strip())
        answered = {message["id"]: message["result"] for message in (client.receive() for _ in range(6))}
        assert next(iter(answered)) == "beside"
        for name in BLOCKED:
            assert text_of(answered[name]) == "Module timed out after 300ms"
        details = answered["asleep"]["_meta"]["apcore-mcp/error"]
        assert (details["error_type"], details["error_details"]) == ("MODULE_TIMEOUT", {"timeout_ms": 300})
        stdout, stderr = client.process.communicate(line(call("last", "t.echo", n=2)), timeout=15)
    assert messages(stdout)[0]["result"]["structuredContent"] == {"n": 2}
    assert (client.process.returncode, b"Traceback" in stderr) == (0, False)


# ---- Secrets ----

SECRET, PIN = "hunter2-s3cr3t", 918273645
TELLING = """
sensitive = {"x-sensitive": True}
schema = {"type": "object", "properties": {
    "password": {"type": "string", **sensitive}, "pin": {"type": "integer", **sensitive}, "what": {"type": "string"},
    "box": {"type": "object", "properties": {"key": {"type": "string", **sensitive}}}}}
def secretly(function):
    return tool(function, input_schema=schema, output_schema=schema)

@secretly
async def keep(inputs, context):
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

annotations = ModuleAnnotations(streaming=True)
registry.register("t.stream", Streaming(echo, input_schema=schema, output_schema=schema, annotations=annotations))
executor = Executor(registry, config=Config({"executor": {"default_timeout": 700, "global_timeout": 60_000}}))
"""
LATE = "on_shutdown=lambda: asyncio.sleep(0.6)"  # so that what fails late still fails
TELLING_TOOLS = """keep fail fail_later exit_later fail_after_the_timeout fail_when_cancelled
wrong_output unsayable_output calls_below""".split()


@pytest.mark.requirement("NFR-SEC-002")
def test_what_is_sensitive_is_in_no_error_no_meta_and_no_log_line() -> None:
    arguments = {"password": SECRET, "pin": PIN, "what": "ok", "box": {"key": SECRET}}
    sent = [call(name, f"t.{name}", **arguments) for name in TELLING_TOOLS]
    wrong: list[dict[str, Any]] = [{"pin": SECRET}, {"password": PIN}, {"what": [SECRET]}, {"box": SECRET}]
    sent += [call(f"wrong {n}", "t.keep", **arguments | change) for n, change in enumerate(wrong)]
    for what in ("ok", "fail"):
        streamed = call(f"stream {what}", "t.stream", **arguments | {"what": what})
        streamed["params"]["_meta"]["progressToken"] = what
        sent.append(streamed)
    results, lines, stderr = converse(TELLING, f"executor, log_level='DEBUG', {LATE}", *map(line, sent))
    assert {name for name, result in results.items() if not result["isError"]} == {"keep", "stream ok"}
    assert json.loads(text_of(results["keep"]))["password"] == "***REDACTED***"
    assert len([text for text in lines if b"notifications/progress" in text]) == 4
    leaks = [text.decode()[:300] for text in lines if SECRET.encode() in text or str(PIN).encode() in text]
    leaks += [text for text in stderr.splitlines() if SECRET in text or str(PIN) in text]
    assert leaks == []
    assert "Tool call ended: t.keep, " in stderr, "it was to log at DEBUG"
