"""What the log says of a server and its calls, in what form, and that nobody waits for who reads it (FR-LOG-*)."""

from __future__ import annotations

import fcntl
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import RawClient, free_port
from support import run

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
def test_a_server_whose_log_nobody_reads_answers_and_ends_at_a_signal(failing: list[str]) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with (
        RawClient([*failing, "--transport=streamable-http", f"--port={port}"]) as server,
        httpx.Client(trust_env=False) as client,
    ):
        assert b"server started" in server.process.stderr.readline()
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
