"""What lives as long as a server does: the announcements of changes, the streams that clients listen on, sessions, and
how all of these end (FR-DYNAMIC, NFR-REL-001; design "Dynamic", "Shutdown").


One client over stdin and stdout (FR-TRANSPORT-001, -002, -005, FR-SERVER-001, -005, NFR-REL-001; design §3 stdio,
Shutdown, Cancellation; §4). Real processes over real pipes, sockets, files and terminals.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import (
    MODERN,
    PROGRAM,
    ROOT,
    RawClient,
    command,
    program,
    stdio_parameters,
)
from mcp.client import Client
from support import (
    META,
    call,
    ended_well,
    initialize_params,
    line,
    messages,
    request,
    wait_for_stderr,
)


def test_the_last_answer_reaches_a_terminal(tmp_path: Path) -> None:
    """As it does a file: both are written to by a thread."""
    text = """
@tool
async def big(inputs, context):
    return {"text": "x" * 10_000_000}

serve(registry)
"""
    stamp = {"protocolVersion": MODERN, "clientInfo": {"name": "raw", "version": "1"}, "clientCapabilities": {}}
    meta = {META + key: value for key, value in stamp.items()}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "t.big", "_meta": meta}}
    asked = tmp_path / "asked"
    asked.write_text(json.dumps(message) + "\n")
    received = bytearray()
    ours, theirs = os.openpty()
    with asked.open("rb") as stdin:
        process = subprocess.Popen(program(text), stdin=stdin, stdout=theirs)
        os.close(theirs)
        while data := _read(ours):
            received += data
        os.close(ours)
        assert process.wait(timeout=30) == 0
    assert json.loads(received)["result"]["structuredContent"] == {"text": "x" * 10_000_000}


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65_536)
    except OSError:  # the end of a terminal
        return b""


MAX_LINE_BYTES = 4 * 1024 * 1024

BENCH = """
def tell(what):
    print(what, file=sys.stderr, flush=True)

@tool
def echo(inputs, context):
    return inputs

@tool
async def slow(inputs, context):
    await asyncio.sleep(0.2)
    return inputs

@tool
def noisy(inputs, context):
    print("noise-print")
    sys.stdout.flush()
    sys.__stdout__.write("noise-dunder\\n")
    os.write(1, b"noise-os\\n")
    subprocess.run(["echo", "noise-child"], check=True)
    ctypes.CDLL(None).puts(b"noise-puts")
    ctypes.CDLL(None).printf(b"noise-printf\\n")
    child = subprocess.run(["cat"], capture_output=True)
    return {"stdin": os.read(0, 100).decode(), "child_stdin": child.stdout.decode()}

@tool
def mumble(inputs, context):
    print("mumble")
    return {}

@tool
async def gate(inputs, context):
    tell("running")
    try:
        while not Path(inputs["gate"]).exists():
            await asyncio.sleep(0.01)
    except asyncio.CancelledError:
        tell("coroutine cancelled")
        raise
    return {"done": True}

@tool
def poll(inputs, context):
    tell("running")
    while not context.cancel_token.is_cancelled:
        time.sleep(0.01)
    tell("token set")
    return {}

@tool
def stuck(inputs, context):
    tell("running")
    time.sleep(60)

@tool
async def ask(inputs, context):
    return {"answers": [await elicit(context, "Sure?"), await elicit(context, "Really?")]}

@tool
async def big(inputs, context):
    tell("running")
    return {"text": "x" * 20_000_000}

@tool
async def deaf(inputs, context):
    tell("running")
    while True:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            pass

print("noise-before")
ctypes.CDLL(None).puts(b"noise-before-puts")
if "--background" in sys.argv:
    server = MCPServer(registry)
    server.start()
    server.wait()
else:
    serve(registry, transport="STDIO", host="", port=0, on_shutdown=lambda: tell("stopping"))
if "--and-print" in sys.argv:
    print("returned")
    subprocess.run(["echo", "from a child"])
    print("x" * 300_000)
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs a script with all the modules of these tests and `serve()`."""
    path = tmp_path_factory.mktemp("bench") / "bench.py"
    path.write_text(PROGRAM + BENCH)
    return [sys.executable, str(path)]


def converse(arguments: list[str], sent: bytes) -> tuple[list[dict[str, Any]], str]:
    """Send everything, close stdin, and return the messages and stderr of a server that ended well."""
    completed = subprocess.run(arguments, input=sent, capture_output=True, cwd=ROOT, timeout=40)
    stderr = completed.stderr.decode()
    assert completed.returncode == 0, stderr
    assert "Traceback" not in stderr
    return messages(completed.stdout), stderr


def structured(answers: list[dict[str, Any]]) -> dict[Any, Any]:
    """The structured results by request id."""
    return {answer["id"]: answer["result"]["structuredContent"] for answer in answers}


def run(client: RawClient, tool: str, **arguments: Any) -> None:
    """Make a call (of id 1) and wait until it is being executed."""
    client.send_line(line(call(1, tool, **arguments)).strip())
    wait_for_stderr(client, "running")


def hang_up(client: RawClient) -> None:
    assert client.process.stdin is not None
    client.process.stdin.close()
    client.process.stdin = None


def test_a_client_of_2026_needs_no_handshake_and_may_ask_what_the_server_can(bench: list[str]) -> None:
    sent = [request("what", "server/discover"), request(2, "tools/list"), call("three", "t.echo", n=3)]
    answers = {answer["id"]: answer["result"] for answer in converse(bench, b"".join(map(line, sent)))[0]}
    assert MODERN in answers["what"]["supportedVersions"]
    assert answers["what"]["capabilities"]["tools"] == {"listChanged": True}
    assert {tool["name"] for tool in answers[2]["tools"]} >= {"t.echo", "t.noisy"}
    assert answers["three"]["structuredContent"] == {"n": 3}


@pytest.mark.requirement("FR-TRANSPORT-001", "FR-CLI-001")
async def test_the_sdk_client_lists_and_calls_the_tools_of_the_command_line() -> None:
    async with Client(stdio_parameters(), mode=MODERN, cache=None, read_timeout_seconds=30) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        result = await client.call_tool("units.convert", {"value": 1, "source": "km", "target": "m"})
    assert {"units.convert", "text.slugify"} <= names
    assert result.structured_content == {"value": 1000.0, "unit": "m", "kind": "length"}


@pytest.mark.requirement("FR-TRANSPORT-001")
def test_nothing_a_module_prints_reaches_the_client_nor_what_the_client_sends_a_module(bench: list[str]) -> None:
    """Python's and C's buffers, the descriptor itself and child processes; also before `serve()`.

    It is told to stderr, line by line and not when a buffer is full.
    """
    with RawClient(bench) as client:
        client.send_line(line(call(1, "t.mumble")).strip())
        before = wait_for_stderr(client, "mumble")
        stdout, stderr = client.process.communicate(line(call(2, "t.noisy")) + line(call(3, "t.echo", n=3)), timeout=30)
    assert structured(messages(stdout)) == {1: {}, 2: {"stdin": "", "child_stdin": ""}, 3: {"n": 3}}
    noises = "before before-puts print dunder os child puts printf".split()
    assert [noise for noise in noises if f"noise-{noise}\n" not in before + stderr.decode()] == []


def test_nothing_a_module_prints_while_it_is_discovered_reaches_the_client(tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import ctypes, os, subprocess\nfrom pydantic import BaseModel\n"
        "print('noise-print')\nos.write(1, b'noise-os\\n')\nsubprocess.run(['echo', 'noise-child'])\n"
        "ctypes.CDLL(None).puts(b'noise-puts')\n"
        "class Empty(BaseModel):\n    pass\n"
        "class Loud:\n    input_schema = output_schema = Empty\n    description = 'Loud'\n"
        "    def execute(self, inputs, context):\n        return {}\n"
    )
    arguments = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(tmp_path)]
    answers, stderr = converse(arguments, line(request(1, "tools/list")))
    assert [tool["name"] for tool in answers[0]["result"]["tools"]] == ["loud"]
    assert [noise for noise in "print os child puts".split() if f"noise-{noise}\n" not in stderr] == []


def test_a_line_that_is_no_message_is_answered_with_an_error_and_the_connection_goes_on(bench: list[str]) -> None:
    """Design §4: the SDK alone would drop such lines, and their senders wait for ever."""
    lone_surrogate = line(call("lone", "t.echo", text="PLACE")).replace(b"PLACE", b"\\ud800").strip()
    either = {-32700, -32600}
    garbage: list[tuple[bytes, str | int | None, set[int]]] = [
        (b"not JSON", None, {-32700}),
        (b'{"jsonrpc": "2.0", "id": 1, ', None, {-32700}),
        (b'{"text": "\xff\xfe"}', None, {-32700}),
        (b"[" * 100_000, None, {-32700}),
        (b"[" + line(call("b", "t.echo")).strip() + b"]", None, {-32600}),
        (b"[]", None, {-32600}),
        (b"42", None, {-32600}),
        (b"null", None, {-32600}),
        (b'{"id": "no-method"}', "no-method", {-32600}),
        (b'{"jsonrpc": "2.0", "id": 77, "method": 5}', 77, {-32600}),
        (lone_surrogate, "lone", either),
        (b'{"jsonrpc": "2.0", "id": "\\ud800", "method": "ping"}', None, either),
        (b'{"jsonrpc": "2.0", "padding": "' + b"x" * (MAX_LINE_BYTES + 1000) + b'"}', None, either),
    ]
    blank = [b"", b"   ", b"\r"]
    sent = b"".join(text + b"\n" + line(call(n, "t.echo", n=n)) for n, (text, _, _) in enumerate(garbage))
    sent += b"".join(text + b"\n" for text in blank)
    sent += line(call("crlf", "t.echo")).replace(b"\n", b"\r\n")
    sent += line(call("long", "t.echo", text="z" * (MAX_LINE_BYTES - 1000)))
    sent += line(call("no newline at the end", "t.echo")).strip()
    answers, _ = converse(bench, sent)
    errors = [answer for answer in answers if "error" in answer]
    assert [answer["id"] for answer in errors] == [request_id for _, request_id, _ in garbage]
    for answer, (_, _, codes) in zip(errors, garbage, strict=True):
        assert answer["error"]["code"] in codes
        assert answer["error"]["message"]
    good = {answer["id"] for answer in answers if "result" in answer}
    assert good == {*range(len(garbage)), "crlf", "long", "no newline at the end"}


def test_a_request_that_is_too_long_is_refused_once_and_under_its_id_if_it_can_be_read(bench: list[str]) -> None:
    """Over 4 MiB it is not run, over 16 MiB not even looked at; a long answer to the server is no request."""
    mebibyte = "x" * 1024 * 1024
    sizes = {"4": 4, "5": 5, "15": 15, "17": 17, "40": 40}
    sent = [call(request_id, "t.echo", text=mebibyte * size) for request_id, size in sizes.items()]
    sent.append({"jsonrpc": "2.0", "id": "an answer", "result": {"text": mebibyte * 5}})
    answers, _ = converse(
        bench, b"".join(line(message) + line(call(n, "t.echo", n=n)) for n, message in enumerate(sent))
    )
    refusals = [(answer["id"], answer["error"]["code"]) for answer in answers if "error" in answer]
    assert refusals == [("4", -32600), ("5", -32600), ("15", -32600), (None, -32700), (None, -32700), (None, -32600)]
    assert {answer["id"] for answer in answers if "result" in answer} == set(range(len(sent)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_line_without_an_end_does_not_fill_the_memory(bench: list[str]) -> None:
    with RawClient(bench) as client:
        assert client.request("ping")["result"] == {}
        for _ in range(300):
            client.process.stdin.write(b"x" * 1024 * 1024)  # type: ignore[union-attr]
        client.send_line(b"")
        assert client.receive()["id"] is None
        status = Path(f"/proc/{client.process.pid}/status").read_text()
        peak_kib = next(int(text.split()[1]) for text in status.splitlines() if text.startswith("VmHWM"))
        assert peak_kib < 250 * 1024
        assert client.request("ping")["result"] == {}


def test_the_end_of_input_right_behind_a_request_to_listen_ends_the_server_at_once(bench: list[str]) -> None:
    """It is answered as one that had listened for a while: acknowledged, and ended."""
    listen = request("listen", "subscriptions/listen", notifications={"toolsListChanged": True})
    with RawClient(bench) as client:
        client.send_line(line(call(1, "t.echo")).strip())
        assert client.receive()["id"] == 1
        began = time.monotonic()
        stdout, stderr = client.process.communicate(line(listen), timeout=30)
        assert time.monotonic() - began < 5, "it waited for the end of the stream"
        acknowledged, ended = messages(stdout)
        assert acknowledged["method"] == "notifications/subscriptions/acknowledged"
        assert (ended["id"], "result" in ended) == ("listen", True)
        assert (client.process.returncode, b"Traceback" in stderr) == (0, False)


def test_a_thousand_calls_and_the_end_of_input_are_a_thousand_answers(bench: list[str]) -> None:
    """They are still running when the input ends (design §3, Cancellation)."""
    with RawClient(bench) as client:
        client.initialize()
        calls = [call(n, "t.slow", n=n) for n in range(100, 1100)]
        for message in calls:
            del message["params"]["_meta"]
        stdout, stderr = client.process.communicate(b"".join(map(line, calls)), timeout=40)
        assert structured(messages(stdout)) == {n: {"n": n} for n in range(100, 1100)}
        assert (client.process.returncode, b"Traceback" in stderr) == (0, False)


def test_two_thousand_calls_can_be_written_before_the_first_answer_is_read(bench: list[str]) -> None:
    """Nobody reads while they are written, so a server that waited for its answers to be read would block both."""
    with RawClient(bench) as client:
        assert client.process.stdin is not None
        sent = b"".join(line(call(n, "t.echo", n=n, text="x" * 100)) for n in range(2000))
        writer = threading.Thread(target=client.process.stdin.write, args=(sent,), daemon=True)
        writer.start()
        writer.join(timeout=30)
        assert not writer.is_alive(), "server and client wait for each other"
        stdout, _ = client.process.communicate(timeout=30)
        assert {answer["id"] for answer in messages(stdout)} == set(range(2000))
        assert client.process.returncode == 0


@pytest.mark.requirement("FR-TRANSPORT-005", "NFR-REL-001")
def test_a_signal_ends_the_server_once_what_runs_is_answered(bench: list[str], tmp_path: Path) -> None:
    """The client keeps its end of stdin open; what it asks from then on is refused."""
    gate = tmp_path / "gate"
    with RawClient(bench) as client:
        run(client, "t.gate", gate=str(gate))
        client.process.send_signal(signal.SIGTERM)
        wait_for_stderr(client, "stopping")
        client.send_line(line(call(2, "t.echo")).strip())
        refused = client.receive()
        gate.touch()
        answered = client.receive()
        assert (refused["id"], "error" in refused) == (2, True)
        assert structured([answered]) == {1: {"done": True}}
        ended_well(client)


def test_a_module_that_does_not_end_holds_up_the_exit_for_the_grace_period_at_most(bench: list[str]) -> None:
    """An async one that ignores its cancellation, a sync one that sleeps for a minute; 5 seconds of grace."""
    with RawClient(bench) as deaf, RawClient(bench) as stuck:
        run(deaf, "t.deaf")
        run(stuck, "t.stuck")
        deaf.process.send_signal(signal.SIGTERM)
        hang_up(stuck)
        ended_well(deaf)
        ended_well(stuck)


def test_a_cancelled_call_ends_its_coroutine_or_sets_its_token(bench: list[str], tmp_path: Path) -> None:
    never = str(tmp_path / "never")
    with RawClient(bench) as client:
        for tool, outcome in (("t.gate", "coroutine cancelled"), ("t.poll", "token set")):
            message = call(f"run {tool}", tool, gate=never)
            client.send_line(line(message).strip())
            wait_for_stderr(client, "running")
            client.send(
                "notifications/cancelled", {"requestId": message["id"], "reason": "changed my mind"}, notify=True
            )
            wait_for_stderr(client, outcome)
        stdout, stderr = client.process.communicate(line(call("last", "t.echo", n=3)), timeout=30)
        answers = {answer["id"]: answer for answer in messages(stdout)}
        assert answers["last"]["result"]["structuredContent"] == {"n": 3}
        assert all("result" not in answers.get(f"run {tool}", {}) for tool in ("t.gate", "t.poll"))
        assert (client.process.returncode, b"Traceback" in stderr) == (0, False)


def test_a_client_that_reads_nothing_holds_up_the_exit_for_the_grace_period_at_most(bench: list[str]) -> None:
    """An answer of 20 MB, of which not a byte has been read when the server is to end; what is left is dropped.

    By a signal, at the end of a pipe, and at the end of a socket that is for both directions.
    """
    with contextlib.ExitStack() as stack:
        ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
        piped, signalled, joined = clients = [
            stack.enter_context(RawClient(bench, **ends)) for ends in ({}, {}, {"stdin": theirs, "stdout": theirs})
        ]
        joined.process.stdin = ours.makefile("wb")
        for client in clients:
            run(client, "t.big")
        signalled.process.send_signal(signal.SIGTERM)
        ours.shutdown(socket.SHUT_WR)
        hang_up(piped)
        for client in clients:
            ended_well(client)


def test_a_question_that_nobody_is_left_to_answer_has_no_answer_at_once(bench: list[str]) -> None:
    """The first is open when the input ends, the second is asked after that."""
    with RawClient(bench) as client:
        client.initialize(elicitation={})
        client.send("tools/call", {"name": "t.ask", "arguments": {}})
        assert client.receive()["method"] == "elicitation/create"
        began = time.monotonic()
        stdout, stderr = client.process.communicate(timeout=20)
        assert time.monotonic() - began < 4, "it waited for an answer"
        assert structured(messages(stdout)) == {2: {"answers": [None, None]}}
        assert (client.process.returncode, b"Traceback" in stderr) == (0, False)


@pytest.mark.requirement("FR-TRANSPORT-002")
def test_a_client_that_vanishes_ends_the_server(bench: list[str], tmp_path: Path) -> None:
    """Both pipes at once while a call runs, or only the end that reads; what cannot be written has been answered."""
    gate = tmp_path / "gate"
    with contextlib.ExitStack() as stack:
        silent, deaf, busy = clients = [stack.enter_context(RawClient(bench)) for _ in range(3)]
        run(busy, "t.gate", gate=str(gate))
        for client in (silent, deaf):
            client.send_line(line(call(1, "t.echo")).strip())
            assert client.receive()["id"] == 1
        for client in clients:
            assert client.process.stdout is not None
            client.process.stdout.close()
            client.process.stdout = None
        with contextlib.suppress(BrokenPipeError):  # it may have seen that it is not read any more
            deaf.send_line(line(call(2, "t.echo")).strip())
        hang_up(busy)
        gate.touch()
        ended_well(silent)  # of which nothing was asked: the others take no longer than this one
        ended = time.monotonic()
        ended_well(deaf)
        ended_well(busy)
        assert time.monotonic() - ended < 4, "it waited for what nobody reads"


PARENT = """
import subprocess, sys, time
process = subprocess.Popen(sys.argv[2:], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
process.stdin.write(sys.argv[1].encode())
process.stdin.flush()
process.stdout.read(1)  # it is writing an answer, which does not fit into the pipe
print(process.pid, flush=True)
time.sleep(60)
"""


def test_a_server_ends_with_its_client_though_that_is_killed_while_it_writes(bench: list[str]) -> None:
    arguments = [sys.executable, "-c", PARENT, line(call(1, "t.big")).decode(), *bench]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as parent:
        assert parent.stdout is not None
        assert parent.stderr is not None
        assert int(parent.stdout.readline())
        parent.kill()
        stderr = parent.stderr.read()  # at its end when the server, which has it too, has ended
        assert b"Traceback" not in stderr


@pytest.mark.parametrize(
    "pairs", [2, 1], ids=["a socket each, as from Node.js", "one for both, as from socat and inetd"]
)
def test_sockets_serve_as_well_as_pipes(bench: list[str], pairs: int) -> None:
    with contextlib.ExitStack() as stack:
        ends = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(pairs)]
        (ours, _), (ours_too, _) = ends[0], ends[-1]
        with subprocess.Popen(bench, stdin=ends[0][1], stdout=ends[-1][1], stderr=subprocess.PIPE, cwd=ROOT) as process:
            stack.callback(process.kill)
            for _, theirs in ends:
                theirs.close()
            ours.sendall(line(call(0, "t.echo", n=0)))
            ours_too.settimeout(15)
            received = stack.enter_context(ours_too.makefile("rb"))
            answers = messages(received.readline())
            ours.sendall(line(call(1, "t.slow", n=1)))
            ours.shutdown(socket.SHUT_WR)
            answers += messages(received.read())
            _, stderr = process.communicate(timeout=15)
    assert structured(answers) == {n: {"n": n} for n in range(2)}
    assert (process.returncode, b"Traceback" in stderr) == (0, False)


@pytest.mark.requirement("NFR-PORT-001")
def test_files_serve_as_well_as_pipes(bench: list[str], tmp_path: Path) -> None:
    """`python -m apcore_mcp … <requests >answers`, with a line in between that is so long that it is more than one."""
    source, target = tmp_path / "requests", tmp_path / "answers"
    too_long = b"y" * (2 * MAX_LINE_BYTES + 10) + b"\n"
    source.write_bytes(line(call(0, "t.slow", n=0)) + too_long + b"\n" + line(call(1, "t.noisy")))
    with source.open("rb") as stdin, target.open("wb") as stdout:
        completed = subprocess.run(bench, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, cwd=ROOT, timeout=30)
    answers = messages(target.read_bytes())
    assert (completed.returncode, b"Traceback" in completed.stderr) == (0, False)
    assert {answer["id"] for answer in answers if "error" in answer} == {None}
    assert {answer["id"] for answer in answers if "result" in answer} == {0, 1}


@pytest.mark.requirement("FR-TRANSPORT-002")
def test_no_input_at_all_ends_the_server_at_once() -> None:
    completed = subprocess.run(command(), stdin=subprocess.DEVNULL, capture_output=True, cwd=ROOT, timeout=15)
    assert (completed.returncode, completed.stdout) == (0, b"")
    assert b"Traceback" not in completed.stderr


@pytest.mark.requirement("FR-TRANSPORT-005", "NFR-PORT-001")
def test_a_terminal_is_served_and_an_interrupt_ends_it() -> None:
    """The thread that waits for the terminal must not hold up the exit (design §3, stdio)."""
    tty = pytest.importorskip("tty")
    ours, theirs = os.openpty()
    try:
        tty.setraw(theirs)
        with subprocess.Popen(command(), stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, cwd=ROOT) as process:
            os.write(ours, line(call(1, "text.slugify", text="An  Example")))
            received = b""
            while b"\n" not in received:
                received += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=15)
    finally:
        os.close(ours)
        os.close(theirs)
    assert structured(messages(received)) == {1: {"slug": "an-example"}}
    assert (process.returncode, b"Traceback" in stderr) == (0, False)


def test_a_terminal_that_goes_away_ends_the_server() -> None:
    tty = pytest.importorskip("tty")
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "start_new_session": True}  # so nobody is told
    with RawClient(command(), **streams) as client:
        os.close(theirs)
        os.write(ours, line(call(1, "text.slugify", text="An  Example")))
        assert os.read(ours, 1)
        os.close(ours)
        ended_well(client)


@pytest.mark.parametrize("closed", ["<&-", ">&-"], ids=["stdin", "stdout"])
def test_without_standard_streams_the_command_line_fails_with_one_line(closed: str) -> None:
    """FR-SERVER-001: RuntimeError; FR-CLI-008: exit status 2."""
    completed = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command()], stderr=subprocess.PIPE, cwd=ROOT, timeout=10
    )
    lines = completed.stderr.decode().splitlines()
    assert completed.returncode == 2
    assert [text for text in lines if not text.startswith("INFO")] == lines[-1:]
    assert lines[-1].startswith("Error: ")
    assert "stdin" in lines[-1]


def test_without_stderr_modules_may_print_and_nobody_hears_it(bench: list[str]) -> None:
    answers, _ = converse(["sh", "-c", 'exec "$@" 2>&-', "sh", *bench], line(call(1, "t.noisy")))
    assert structured(answers) == {1: {"stdin": "", "child_stdin": ""}}


def test_without_standard_streams_serve_raises_a_runtime_error(bench: list[str]) -> None:
    completed = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&-', "sh", *bench], stderr=subprocess.PIPE, cwd=ROOT, timeout=10
    )
    assert "RuntimeError: stdin" in completed.stderr.decode().splitlines()[-1]


@pytest.mark.parametrize("background", [[], ["--background"]], ids=["serve", "MCPServer"])
def test_when_the_server_has_ended_stdout_is_the_programs_own_again(bench: list[str], background: list[str]) -> None:
    """More than a pipe holds, so that descriptors left in non-blocking mode would show."""
    arguments = [*bench, "--and-print", *background]
    completed = subprocess.run(arguments, input=line(call(1, "t.echo")), capture_output=True, cwd=ROOT, timeout=30)
    assert completed.returncode == 0, completed.stderr.decode()
    answer, *printed = completed.stdout.decode().splitlines()
    assert json.loads(answer)["id"] == 1
    assert sorted(printed) == sorted(["returned", "from a child", "x" * 300_000])


TWO_SERVERS = """
first, second = MCPServer(registry), MCPServer(registry)
first.start()
try:
    second.start()
except RuntimeError as error:
    print("refused:", error)
first.stop()
first.wait()
second.start()  # now it can
second.stop()
second.wait()
"""


STOPPED_AT_ONCE = """
@tool
def echo(inputs, context):
    return inputs

server = MCPServer(registry, on_startup=lambda: server.stop())
server.start()
server.wait()
"""


def test_a_server_that_ends_while_it_is_asked_says_no_word_of_it() -> None:
    """What the SDK raises in tasks that end with it is no error of anybody's."""
    greeted = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    asked = line(request("i", "initialize", **initialize_params("2025-11-25"))) + line(greeted)
    ended = subprocess.run(program(STOPPED_AT_ONCE), input=asked, capture_output=True, cwd=ROOT, timeout=30)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_second_server_on_the_same_standard_streams_is_refused() -> None:
    with subprocess.Popen(program(TWO_SERVERS), stdin=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.wait(timeout=30) == 0  # with its input still open
        assert process.stderr is not None
        assert "refused: stdin and stdout are taken" in process.stderr.read().decode()
