"""The examples work: their modules, and the scripts."""

from __future__ import annotations

import base64
import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import EXTENSIONS, ROOT, connect, free_port, until
from support import Monkeypatch, answer, modern

from apcore_mcp import discover


@pytest.fixture
def told_by(tmp_path: Path, monkeypatch: Monkeypatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The output of an example, run from another directory as a user might."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


async def test_every_example_module_does_what_its_own_examples_say() -> None:
    """In a call of a server: its dates are dates."""
    registry, ran = discover(EXTENSIONS), 0
    async with connect(registry, approval="off") as client:
        for module_id in registry.list():
            descriptor = registry.get_definition(module_id)
            assert descriptor is not None
            for example in descriptor.examples:
                result = await client.call_tool(module_id, dict(example.inputs))
                assert json.loads(result.content[0].text) == example.output  # type: ignore[union-attr]
                for picture in result.content[1:]:
                    assert base64.b64decode(picture.data).startswith(b"\x89PNG")  # type: ignore[union-attr]
                ran += 1
    assert ran >= 12


def test_the_quickstart_lists_the_tools_and_calls_two(told_by: Callable[..., str]) -> None:
    transcript = told_by("quickstart.py")
    assert re.search(r"^  text\.slugify +Turn a title", transcript, re.MULTILINE)
    for told in ("'words': 7", "{'workdays': 8, 'skipped': ['2025-04-18', '2025-04-21']}", "- end: Field required"):
        assert told in transcript


def test_the_openai_example_runs_the_recorded_call(told_by: Callable[..., str]) -> None:
    called = "That is text.analyze with {'text': 'The cat sat. The dog did not!'}, and the model is told"
    transcript = told_by("openai_tools.py")
    assert all(told in transcript for told in ('"name": "finance-loan_schedule"', called, '"words":7')), transcript


def test_in_the_conversation_tools_report_ask_and_need_approval(told_by: Callable[..., str]) -> None:
    _, streamed, booked, emptied, denied = told_by("conversation.py", "auto").split("\n> ")
    assert streamed.count("progress:") == 2
    assert "'words': {'a': 2, 'rose': 2, 'is': 1}" in streamed
    assert "asked:    Which room for 6 people" in booked
    assert "'status': 'booked', 'room': 'Harbour'" in booked
    for line in ("asked:    Let trash.empty run?", "It is annotated as destructive", '- deleted_before: "2025-02-01"'):
        assert line in emptied
    assert "'freed_bytes': 2048" in emptied
    assert denied.rstrip().endswith("Approval was denied")


WITH_PID = """
import os
from apcore.decorator import module
from several_cores import app, registry

@module(id="worker.pid", registry=registry)
def pid() -> int:
    return os.getpid()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="kills by signal")
@pytest.mark.timeout(120)
def test_several_processes_serve_one_port(tmp_path: Path) -> None:
    """The command is the one of the example; that each worker answers is all that is asked of its speed."""
    (tmp_path / "with_pid.py").write_text(WITH_PID)
    (line,) = re.findall(r"^    (granian(?:.+\\\n)+.+)", (ROOT / "examples" / "several_cores.py").read_text(), re.M)
    words = line.replace("\\\n", "").replace("--workers 4", "--workers 2").split()[:-1]
    port, log = free_port(), tmp_path / "log"
    command = [sys.executable, "-m", *words, "--respawn-interval", "0.1", "--port", str(port), "with_pid:app"]
    environment = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}"}
    with log.open("wb") as told:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=told, stderr=told)

    def call(name: str, **arguments: Any) -> Any:
        posted = modern("tools/call", {"name": name, "arguments": arguments})
        told = answer(httpx.post(f"http://127.0.0.1:{port}/mcp", timeout=15, **posted))
        return told["result"]["structuredContent"]["result"]

    def both() -> set[int]:
        """The processes that answer, once there are two of them: each call is a connection of its own."""
        pids: set[int] = set()
        until(lambda: pids.add(call("worker.pid")) or len(pids) == 2)
        return pids

    try:
        until(lambda: log.read_text().count("Started worker") == 2 or server.poll() is not None)
        first = min(both())
        os.kill(first, signal.SIGKILL)
        until(lambda: log.read_text().count("Started worker") == 3)
        assert call("primes.count", below=100) == 25
        assert first not in both()
    finally:
        server.terminate()  # killed, it would leave its workers behind
        ended = server.wait(timeout=30)
    assert ended == 0, log.read_text()


def test_bearer_token_lets_in_who_has_the_role(told_by: Callable[..., str]) -> None:
    """Nobody's token is no token at all: a client that has one is to know that it is not valid any more."""
    ann, bob, stranger, refused = told_by("bearer_token.py").splitlines()
    assert ann == "token-of-ann is offered door.open, door.ring; to open: {'result': 'The back door is open.'}"
    assert bob == "token-of-bob is offered door.ring; to open: Access denied"
    assert stranger == "no token is offered door.ring; to open: Access denied"
    assert refused == 'token-of-nobody is refused: 401 Bearer error="invalid_token"'


def test_extension_counts_calls_and_ends_them(told_by: Callable[..., str]) -> None:
    *_, refused, left = told_by("extension.py").splitlines()
    assert "has been called 2 times" in refused
    assert left == "left: 0"


def test_durable_goes_on_in_the_next_server() -> None:
    """Its first server dies in the fifth of eight steps."""
    pytest.importorskip("dbos")
    command = [sys.executable, str(ROOT / "examples" / "durable.py")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50)
    sent = re.findall(r"letter (\d) is sent by process (\d+)", ended.stderr)
    assert [letter for letter, _ in sent] == [*"12345678"], ended.stderr
    assert len({process for _, process in sent[:4]}) == len({process for _, process in sent[4:]}) == 1
    assert sent[0][1] != sent[4][1]
    assert "8 letters are sent" in ended.stdout
