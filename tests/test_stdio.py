"""One client over stdin and stdout: real processes over real pipes, sockets, files and terminals."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import HANDSHAKE, MODERN, MODULE, PROGRAM, ROOT, RawClient, command, program, registry_of
from support import ENDLESS, call, ended_well, initialize_params, line, message, messages, request, wait_for_stderr

from apcore_mcp import serve

BENCH = """
@tool
def echo(inputs, context):
    return inputs

@tool
def count(inputs, context):
    return {"characters": len(inputs["text"])}

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
async def chatty(inputs, context):
    for number in range(inputs["times"]):
        await report_progress(context, number, message=inputs["text"])
    tell("told everything")
    return {}

print("noise-before")
ctypes.CDLL(None).puts(b"noise-before-puts")
shutdown = {"shutdown_seconds": float(text) for text in sys.argv[1:]}
serve(registry, transport="STDIO", host="", port=0, max_result=0, on_shutdown=lambda: tell("stopping"), **shutdown)
print("noise-after")
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs a script with all the modules of these tests and `serve()`."""
    path = tmp_path_factory.mktemp("bench") / "bench.py"
    path.write_text(PROGRAM + ENDLESS + BENCH)
    return [sys.executable, str(path)]


@pytest.fixture(scope="module")
def served(bench: list[str]) -> Iterator[RawClient]:
    """A client of 2026-07-28 whose server several tests share; it ends well, whatever they did to it."""
    with RawClient(bench) as client:
        yield client
        hang_up(client)
        ended_well(client)


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


# ---- Messages ----


ECHO = line(call("ID", "t.echo")).strip()
GARBAGE: list[tuple[bytes, str | int | None, int]] = [
    (b"not JSON", None, -32700),
    (b'{"text": "\xff\xfe"}', None, -32700),
    (b"[" * 100_000, None, -32700),
    (b"y" * 9_000_000, None, -32700),
    (b"[" + ECHO + b"]", None, -32600),
    (b"42", None, -32600),
    (b'{"jsonrpc": "2.0", "id": 77, "method": 5}', 77, -32600),
    (b'{"jsonrpc": "2.0", "id": 77, "result": 5}', None, -32600),  # of the server's own requests' ids
    (line(call("lone", "t.echo", text="PLACE")).replace(b"PLACE", b"\\ud800").strip(), "lone", -32600),
    (b'{"jsonrpc": "2.0", "id": "\\ud800", "method": "ping"}', "\ud800", -32600),
    *((ECHO.replace(b'"ID"', odd), None, -32600) for odd in (b"1.5", b"null", b"true", b"[1]")),
]


def test_a_line_that_is_no_message_is_an_error(served: RawClient) -> None:
    """The SDK alone would drop such lines, and their senders wait for ever. JSON-RPC 2.0, 5.1."""
    for text, request_id, code in GARBAGE:
        served.send_line(text)
        refused = served.receive()
        assert (refused["jsonrpc"], refused["id"], refused["error"]["code"]) == ("2.0", request_id, code), text[:50]
        assert refused["error"]["message"]
    for blank in (b"", b"   ", b"\r"):
        served.send_line(blank)
    served.send_line(ECHO.replace(b'"ID"', b'"crlf"') + b"\r")
    assert structured([served.receive()]) == {"crlf": {}}


def test_a_message_may_be_of_any_length(served: RawClient) -> None:
    """Who starts a stdio server is trusted; a refusal without an id would leave the official client waiting."""
    for length in (5_000_000, 10_000_000):
        served.send_line(line(call(length, "t.count", text="x" * length)).strip())
        assert structured([served.receive()]) == {length: {"characters": length}}


def test_who_does_not_read_is_made_to_wait_only_after_megabytes(served: RawClient) -> None:
    """3 MB of progress, of which nothing has been read when the module ends."""
    message = call(1, "t.chatty", times=300, text="x" * 10_000)
    message["params"]["_meta"]["progressToken"] = "p"
    served.send_line(line(message).strip())
    wait_for_stderr(served, "told everything")
    assert [served.receive()["params"]["progress"] for _ in range(300)] == [*range(300)]
    assert structured([served.receive()]) == {1: {}}
    # Past what is buffered, the module waits for its client to read, and other calls do not wait for it.
    message["params"]["arguments"] = {"times": 40, "text": "x" * 1_000_000}
    served.send_line(line(message).strip())
    served.send_line(line(call(2, "t.mumble")).strip())
    assert "told everything" not in wait_for_stderr(served, "mumble")
    answers = [served.receive() for _ in range(42)]
    assert sorted(answer["id"] for answer in answers if "id" in answer) == [1, 2]


def test_a_cancelled_call_ends_its_coroutine_and_is_not_answered(served: RawClient, tmp_path: Path) -> None:
    run(served, "t.gate", gate=str(tmp_path / "never"))
    served.send("notifications/cancelled", {"requestId": 1, "reason": "changed my mind"}, notify=True)
    wait_for_stderr(served, "coroutine cancelled")
    served.send_line(line(call("next", "t.echo", n=3)).strip())
    assert structured([served.receive()]) == {"next": {"n": 3}}


# ---- What modules print ----


@pytest.mark.requirement("FR-TRANSPORT-001")
def test_client_and_module_share_no_stream(bench: list[str]) -> None:
    """What Python, C and children print goes to stderr, line by line, also before `serve()` and after it."""
    with RawClient(bench) as client:
        client.send_line(line(call(1, "t.mumble")).strip())
        before = wait_for_stderr(client, "mumble")
        client.send_line(line(call(2, "t.noisy")).strip())
        answers = [client.receive() for _ in range(2)]
        stdout, stderr = client.process.communicate(line(call(3, "t.echo", n=3)), timeout=30)
    answers += messages(stdout)
    assert structured(answers) == {1: {}, 2: {"stdin": "", "child_stdin": ""}, 3: {"n": 3}}
    noises = "before before-puts print dunder os child puts printf after".split()
    assert [noise for noise in noises if f"noise-{noise}\n" not in before + stderr.decode()] == []


LOUD = """
import atexit, os, sys, threading, time

started = threading.Event()
def spam():
    while True:
        os.write(1, b"noise-spam\\n")
        started.set()
        time.sleep(0.001)

print("noise-print")
threading.Thread(target=spam, daemon=True).start()
started.wait(10)
atexit.register(print, "noise-exit", flush=True)
sys.stdout.write("noise-buffered")
"""


def test_the_command_line_keeps_modules_off_stdout(tmp_path: Path) -> None:
    """From the moment that their files are run; threads that never stop and exit handlers too."""
    (tmp_path / "loud.py").write_text(LOUD + MODULE.format(tag="loud"))
    answers, stderr = converse(command("--extensions-dir", str(tmp_path)), line(request(1, "tools/list")))
    assert [tool["name"] for tool in answers[0]["result"]["tools"]] == ["loud"]
    assert [noise for noise in ("print\n", "spam\n", "buffered", "exit\n") if f"noise-{noise}" not in stderr] == []


def test_without_stderr_modules_may_print_and_nobody_hears_it(bench: list[str]) -> None:
    answers, _ = converse(["sh", "-c", 'exec "$@" 2>&-', "sh", *bench], line(call(1, "t.noisy")))
    assert structured(answers) == {1: {"stdin": "", "child_stdin": ""}}


def test_without_standard_streams_nothing_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """FR-CLI-008: exit status 2 and one line; FR-SERVER-001: RuntimeError."""
    closing = ["sh", "-c", 'exec "$@" <&-', "sh", *command()]
    completed = subprocess.run(closing, capture_output=True, cwd=ROOT, timeout=30)
    assert (completed.returncode, completed.stdout) == (2, b"")
    assert re.fullmatch(rb"Error: stdin .+\n", completed.stderr)
    monkeypatch.setattr(sys, "__stdout__", None)
    with pytest.raises(RuntimeError, match="stdin or stdout cannot be opened"):
        serve(registry_of())


# ---- The end ----


def pipelined(era: str, calls: list[dict[str, Any]]) -> bytes:
    """What a client of `era` has written when it waits for nothing, not even for the answer to its handshake."""
    if era == MODERN:
        return b"".join(map(line, calls))
    hello = message("initialize", initialize_params("2025-11-25"), "hello")
    lines = [hello, {"jsonrpc": "2.0", "method": "notifications/initialized"}]
    lines += [message("tools/call", each["params"] | {"_meta": {}}, each["id"]) for each in calls]
    return b"".join(map(line, lines))


def test_a_thousand_calls_and_then_the_end_are_a_thousand_answers(bench: list[str]) -> None:
    """Though nobody reads while they are written, and nothing has been answered when the input ends."""
    with RawClient(bench) as client:
        sent = pipelined(HANDSHAKE, [call(n, "t.slow", n=n, text="x" * 2000) for n in range(1_000)])
        writer = threading.Thread(target=client.process.stdin.write, args=(sent,), daemon=True)
        writer.start()
        writer.join(timeout=30)
        assert not writer.is_alive(), "server and client wait for each other"
        stdout, stderr = client.process.communicate(timeout=40)
    answers = [answer for answer in messages(stdout) if answer["id"] != "hello"]
    assert structured(answers) == {n: {"n": n, "text": "x" * 2000} for n in range(1_000)}
    assert (client.process.returncode, b"Traceback" in stderr) == (0, False)


def test_the_time_of_grace_is_not_for_who_listens_or_has_cancelled(bench: list[str], mode: str, tmp_path: Path) -> None:
    """Who listens is answered at the end, in whatever order the two are seen; a call that was cancelled never is."""
    calls = [call(n, "t.echo") for n in range(100)]
    calls += [call(f"cancelled {n}", "t.gate", gate=str(tmp_path / "never")) for n in range(3)]
    sent = pipelined(mode, calls)
    for n in range(3):
        sent += line({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": f"cancelled {n}"}})
    if mode == MODERN:  # an error is an answer, too
        listen = request("listen", "subscriptions/listen", notifications={"toolsListChanged": True})
        sent += line(request("wrong", "no/such")) + line(listen)
    by_id = {answer.get("id"): answer for answer in converse([*bench, "300"], sent)[0]}
    if mode == MODERN:
        assert by_id.pop("wrong")["error"]["code"] == -32601
        assert by_id.pop(None)["method"] == "notifications/subscriptions/acknowledged"
    assert by_id.keys() == {*range(100), "listen" if mode == MODERN else "hello"}
    assert all("result" in answer for answer in by_id.values())


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


def test_what_does_not_end_holds_up_the_exit_for_the_grace_period(bench: list[str]) -> None:
    """A module that ignores its cancellation, one that sleeps for a minute, an answer of 20 MB that nobody reads."""
    with RawClient([*bench, "0.5"]) as client:
        for tool in ("t.deaf", "t.stuck", "t.big"):
            run(client, tool)
        hang_up(client)
        ended_well(client)


@pytest.mark.requirement("FR-TRANSPORT-002")
def test_a_client_that_vanishes_ends_the_server(bench: list[str], tmp_path: Path) -> None:
    """Both pipes at once while a call runs, or only the end that reads, in the middle of an answer."""
    gate = tmp_path / "gate"
    with RawClient(bench) as deaf, RawClient(bench) as busy:
        run(busy, "t.gate", gate=str(gate))
        deaf.send_line(line(call(1, "t.big")).strip())
        assert deaf.process.stdout is not None
        assert deaf.process.stdout.read(1) == b"{"
        for client in (deaf, busy):
            assert client.process.stdout is not None
            client.process.stdout.close()
            client.process.stdout = None
        hang_up(busy)
        gate.touch()
        for client in (deaf, busy):
            ended_well(client)


STARTED_AGAIN = """
@tool
def echo(inputs, context):
    return inputs

server = MCPServer(registry, on_startup=lambda: server.stop())
server.start()
server.wait()
server = MCPServer(registry)
server.start()
print("again")
server.wait()
"""


def test_one_server_may_follow_another_on_stdio() -> None:
    """What the SDK raises in tasks that end with a server is no error of anybody's."""
    with RawClient(program(STARTED_AGAIN)) as client:
        client.send("initialize", initialize_params("2025-11-25"))
        client.send("notifications/initialized", notify=True)
        assert wait_for_stderr(client, "again") == "again\n"
        client.send_line(line(call("echo", "t.echo", n=1)).strip())
        stdout, stderr = client.process.communicate(timeout=30)
        assert structured(messages(stdout)[-1:]) == {"echo": {"n": 1}}
        assert (client.process.returncode, stderr) == (0, b"")


# ---- Sockets, files, terminals ----


@pytest.mark.parametrize("pairs", [2, 1], ids=["a socket each, as from Node.js", "one for both, as from socat"])
def test_sockets_serve_as_well_as_pipes(bench: list[str], pairs: int) -> None:
    """With one each, no thread stands between a client and its answer."""
    with contextlib.ExitStack() as stack:
        ends = [[stack.enter_context(end) for end in socket.socketpair()] for _ in range(pairs)]
        (ours, stdin), (ours_too, stdout) = ends[0], ends[-1]
        client = stack.enter_context(RawClient(bench, stdin=stdin, stdout=stdout))
        stdin.close()
        stdout.close()
        ours.sendall(line(call(0, "t.slow", n=0)))
        ours_too.settimeout(15)
        received = stack.enter_context(ours_too.makefile("rb"))
        answers = messages(received.readline())
        threads = os.listdir(f"/proc/{client.process.pid}/task") if sys.platform == "linux" else []
        ours.sendall(line(call(1, "t.slow", n=1)))
        ours.shutdown(socket.SHUT_WR)
        answers += messages(received.read())
        ended_well(client)
    assert structured(answers) == {n: {"n": n} for n in range(2)}
    assert len(threads) <= 1 or pairs == 1


@pytest.mark.requirement("NFR-PORT-001")
def test_files_serve_as_well_as_pipes(bench: list[str], tmp_path: Path) -> None:
    """To the end of the last answer, which is written by a thread, past a long line that is no message."""
    source, target = tmp_path / "requests", tmp_path / "answers"
    garbage = b"y" * 9_000_000 + b"\n"
    source.write_bytes(line(call(0, "t.slow", n=0)) + garbage + b"\n" + line(call(1, "t.big")).strip())
    with source.open("rb") as stdin, target.open("wb") as stdout:
        completed = subprocess.run(bench, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, cwd=ROOT, timeout=30)
    answers = messages(target.read_bytes())
    assert (completed.returncode, b"Traceback" in completed.stderr) == (0, False)
    assert {answer["id"] for answer in answers if "error" in answer} == {None}
    results = structured([answer for answer in answers if "result" in answer])
    assert (results.keys(), len(results[1]["text"])) == ({0, 1}, 20_000_000)


@pytest.mark.requirement("FR-TRANSPORT-002")
def test_no_input_at_all_ends_the_server_at_once() -> None:
    """The end of `/dev/null`, which asyncio would wait for in vain."""
    completed = subprocess.run(command(), stdin=subprocess.DEVNULL, capture_output=True, cwd=ROOT, timeout=15)
    assert (completed.returncode, completed.stdout) == (0, b"")
    assert b"Traceback" not in completed.stderr


@pytest.mark.requirement("NFR-PORT-001")
def test_a_terminal_is_served_until_it_goes_away() -> None:
    """The thread that waits for the terminal must not hold up the exit."""
    tty = pytest.importorskip("tty")
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    streams: dict[str, Any] = {"stdin": theirs, "stdout": theirs, "start_new_session": True}  # or it would be told
    with RawClient(command(), **streams) as client, os.fdopen(ours, "r+b", 0) as terminal:
        os.close(theirs)
        terminal.write(line(call(1, "text.slugify", text="An  Example")))
        received = b""
        while b"\n" not in received:
            received += terminal.read(65_536)
        assert structured(messages(received)) == {1: {"slug": "an-example"}}
        terminal.close()
        ended_well(client)
