"""Modules that return what nobody can say, block, and fail while they hold secrets."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest
from conftest import ROOT, RawClient, connect, echo, program
from support import call, gives, line, messages, text_of

ECHO = """
@tool
def echo(inputs, context):
    return inputs
"""


def told(result: dict[str, Any]) -> str:
    (part,) = result["content"]
    return str(part["text"])


# Rows of the tables in `test_errors.py` and `test_results.py` are not here again.
LIKE_A_RESULT: dict[str, Any] = {"content": [{"type": "text", "text": "no"}], "isError": True, "_meta": {"a": 1}}
UNUSUAL: dict[str, tuple[Any, Any]] = {
    "like_a_result": (LIKE_A_RESULT, LIKE_A_RESULT),
    "large_number": ({"d": 10**300, "e": -(2**63)}, {"d": 10**300, "e": -(2**63)}),
    "bytes": ({"d": [bytearray(b"a"), {b"a"}, frozenset([1])]}, {"d": ["YQ==", ["YQ=="], [1]]}),
    "huge_number": ({"d": 10**5000}, None),
    "keys_of_any_type": ({1: 1, None: 2, (1, 2): 3, b"b": 4}, {"1": 1, "None": 2, "1,2": 3, "b": 4}),
}


@pytest.mark.requirement("FR-EXEC-007")
async def test_whatever_a_module_returns_is_one_answer() -> None:
    """And the next call is served."""
    async with connect({"echo": echo, **{name: gives(output) for name, (output, _) in UNUSUAL.items()}}) as client:
        for name, (_, sent) in UNUSUAL.items():
            result = await client.call_tool(name)
            assert (result.structured_content, result.is_error) == (sent, sent is None), name
            assert sent or text_of(result) == "Failed to serialize module output (the tool has run)"
            assert (await client.call_tool("echo", {"n": 1})).structured_content == {"n": 1}


BLOCKING = """
@tool
def asleep(inputs, context):
    time.sleep(3600)

@tool
def busy(inputs, context):
    limit = time.monotonic() + 0.5
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


def test_modules_that_block_for_ever_time_out() -> None:
    """And hold up neither other calls nor the end of the process."""
    with RawClient(program(ECHO + BLOCKING)) as client:
        for name in BLOCKED:
            client.send_line(line(call(name, f"t.{name}")).strip())
        client.send_line(line(call("beside", "t.echo", n=1)).strip())
        answered = {message["id"]: message["result"] for message in (client.receive() for _ in range(6))}
        assert next(iter(answered)) == "beside"
        for name in BLOCKED:
            assert told(answered[name]) == "Module timed out after 300ms"
        details = answered["asleep"]["_meta"]["apcore-mcp/error"]
        assert (details["error_type"], details["error_details"]) == ("MODULE_TIMEOUT", {"timeout_ms": 300})
        stdout, stderr = client.process.communicate(line(call("last", "t.echo", n=2)), timeout=15)
    assert messages(stdout)[0]["result"]["structuredContent"] == {"n": 2}
    assert (client.process.returncode, b"Traceback" in stderr) == (0, False)


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
async def fail_later(inputs, context):
    raise ModuleError("BAD", f"bad {inputs}", {"pin": inputs["pin"]}, cause=KeyError(inputs["password"]))

@secretly
def log_as_apcore(inputs, context):
    try:
        raise KeyError(inputs["password"])
    except KeyError:
        logging.getLogger("apcore.middleware.manager").exception("A hook failed")
        raise

@secretly
async def exit_later(inputs, context):
    sys.exit(inputs["password"])

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
executor = Executor(registry, config=Config({"executor": {"default_timeout": 300, "global_timeout": 60_000}}))
serve(executor, log_level="DEBUG", access_log=True)
"""
TELLING_TOOLS = "keep fail_later log_as_apcore exit_later fail_when_cancelled".split()
TELLING_TOOLS += "wrong_output unsayable_output calls_below".split()


@pytest.mark.requirement("NFR-SEC-002")
def test_what_is_sensitive_is_told_nowhere() -> None:
    """Every byte that a server in a process of its own tells anybody."""
    arguments = {"password": SECRET, "pin": PIN, "what": "ok", "box": {"key": SECRET}}
    sent = [call(name, f"t.{name}", **arguments) for name in TELLING_TOOLS]
    wrong: list[dict[str, Any]] = [{"pin": SECRET}, {"password": PIN}, {"what": [SECRET]}, {"box": SECRET}]
    sent += [call(f"wrong {n}", "t.keep", **arguments | change) for n, change in enumerate(wrong)]
    for what in ("ok", "fail"):
        streamed = call(f"stream {what}", "t.stream", **arguments | {"what": what})
        streamed["params"]["_meta"]["progressToken"] = what
        sent.append(streamed)
    asked = b"".join(map(line, sent))
    completed = subprocess.run(program(ECHO + TELLING), input=asked, capture_output=True, cwd=ROOT, timeout=40)
    assert completed.returncode == 0
    answers = messages(completed.stdout)
    results = {m["id"]: m["result"] for m in answers if "id" in m}
    assert results.keys() == {message["id"] for message in sent}
    assert {name for name, result in results.items() if not result["isError"]} == {"keep", "stream ok"}
    assert json.loads(told(results["keep"]))["password"] == "***REDACTED***"
    assert len(answers) == len(sent) + 4, "four chunks are told as progress"
    lines = (completed.stdout + completed.stderr).decode(errors="replace").splitlines()
    assert [text[:300] for text in lines if SECRET in text or str(PIN) in text] == []
    assert "Tool call ended: t.keep, " in completed.stderr.decode(), "it was to log at DEBUG"
