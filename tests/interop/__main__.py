"""Run this package's server under clients that nobody here wrote, and packages that build on it, and print what came.

    python -m tests.interop               install what is missing, run everything, print the tables
    python -m tests.interop --only ai     clients, agents and packages by a regular expression (or "conformance")

Everything is installed below ~/.cache/apcore-mcp-interop (or $XDG_CACHE_HOME): Python clients in an environment each,
from the package index; those in JavaScript, with a Node.js, from npm. It takes some minutes the first time.
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import apcore_mcp

from . import adapters, agents, hostile, logins, pages, tasks
from .programs import (
    CACHE,
    HERE,
    HTTP,
    NODE,
    NODE_PATH,
    NODE_PROGRAM,
    SERVER,
    examples,
    install_node,
    pip_install,
    python_of,
    reason,
    run,
    serving,
    show_rows,
    version_in,
)

CHECKS = ["list", "structured output", "validation error", "unknown tool", "resource"]
HOSTILE = "hostile schemas"


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
    Client("LangChain", "with_langchain.py", "langchain", "langchain-mcp", "langchain[mcp]", agent=True),
    Client("OpenAI Agents SDK", "with_openai_agents.py", "openai-agents", "openai-agents", agent=True),
    Client("Pydantic AI", "with_pydantic_ai.py", "pydantic-ai-slim", "pydantic", "pydantic-ai-slim[mcp]", agent=True),
]

# Checks of the conformance suite for what this server has nothing of, by design; the others must pass.
NOT_OFFERED = {
    "prompts, completion, logging": r"prompts|completion|logging|non-tool",
    "sampling and roots": r"sampling|list-roots|multiple-inputs|client-capabilities|(undeclared|missing)-capability",
    "resources other than `docs://` and `ui://`": r"resources-(read|templates|subscribe|unsubscribe)",
    "resuming a stream": r"incoming-sse-event",
    "`$defs` (references are written out)": r"2020-12-\$defs|anchor-keyword",
}


# What belongs to an extension, the suite runs only by name.
TASKS = "lifecycle capability-negotiation wire-fields request-state-removal mrtr-input request-headers"
TASKS += " dispatch-and-envelope mrtr-composition"
SCENARIOS = {
    "2026-07-28, tasks": [f"tasks-{name}" for name in TASKS.split()],
    "2026-07-28, skills": ["sep-2640-skills-enumeration", "sep-2640-skills-manifest"],
}


def install(client: Client) -> str:
    """Install the client where it is missing; its version."""
    if client.environment is None:
        return install_node(client.package)
    python = python_of(client.environment)
    if version_in(python, client.package) is None:
        pip_install(python, client.requirement or client.package)
    return version_in(python, client.package) or "no version"


def checks(client: Client, *target: str, names: list[str] = CHECKS, **environment: str) -> dict[str, str]:
    """What the client's script found at a URL, or with a server that it starts."""
    program = sys.executable if client.environment is None else str(CACHE / client.environment / "bin" / "python")
    program = str(NODE_PROGRAM) if client.script.endswith(".mjs") else program
    try:
        environment |= {"PATH": NODE_PATH, "NODE_FOLDER": str(NODE), "ERA": client.era}
        done = run([program, str(HERE / "clients" / client.script), *target], seconds=240, environment=environment)
        if done.returncode == 0:
            found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
            return found
        wrong = reason(done.stderr)
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        wrong = reason(error)
    return dict.fromkeys(names, f"no answer: {wrong}")


def row(client: Client) -> list[str]:
    """The client's line: each check is made over stdio, and over HTTP by two clients at the same time."""
    name = f"{client.name} ({install(client)})"
    options, tools = ["--tool-names", "portable"] if client.agent else [], str(examples())
    found = {"stdio": checks(client, *SERVER, *options, TOOLS=tools)}
    with serving([*SERVER, *options, *HTTP]) as url, ThreadPoolExecutor(2) as two:
        both = two.map(lambda _: checks(client, url, TOOLS=tools), range(2))
        found |= zip(("HTTP", "HTTP beside it"), both, strict=True)
    cells = []
    for check in CHECKS:
        wrong = [f"{way}: {told[check]}" for way, told in found.items() if told[check] not in ("yes", "-")]
        cells.append("; ".join(wrong) or found["stdio"][check])
    with serving([sys.executable, "-m", "tests.interop.hostile", "{port}"]) as url:
        told = checks(client, url, names=[HOSTILE], EVERY_TOOL=json.dumps(hostile.calls()))
    return [name, *cells, told[HOSTILE]]


SUITE_HEADINGS = ["suite", "protocol", "checks that pass", "about what is not offered", "failed"]


def conformance(spec_version: str) -> list[str]:
    """The official suite's line: how many checks pass, what others ask for that is not offered, and the rest."""
    suite = f"conformance suite ({install_node('conformance')})"
    with (
        serving([sys.executable, "-m", "tests.interop.conformance", "{port}"]) as url,
        tempfile.TemporaryDirectory() as results,
    ):
        program = [str(NODE_PROGRAM), str(NODE / "node_modules" / "conformance" / "dist" / "index.js"), "server"]
        program += ["--url", url, "-o", results]
        for scenario in SCENARIOS.get(spec_version, []):
            done = run([*program, "--scenario", scenario], seconds=60)
        if spec_version not in SCENARIOS:
            done = run([*program, "--spec-version", spec_version, "--suite", "all"], seconds=300)
        found = [check for file in Path(results).glob("*/checks.json") for check in json.loads(file.read_text())]
    if not found:
        return [suite, spec_version, "0", "", f"did not run: {reason(done.stderr)}"]
    excused, wrong = [], []
    for check in found:
        if check["status"] == "FAILURE":
            excuse = next((why for why, ids in NOT_OFFERED.items() if re.search(ids, check["id"])), None)
            excused += [excuse] if excuse else []
            wrong += [] if excuse else [f"{check['id']}: {check.get('errorMessage')}"]
    passed = sum(check["status"] == "SUCCESS" for check in found)
    reasons = f"{len(excused)}: {', '.join(why for why in NOT_OFFERED if why in excused)}"
    return [suite, spec_version, str(passed), reasons, ", ".join(wrong) or "none"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.interop", description="This package's server under other clients.")
    parser.add_argument("--only", default="", metavar="REGEX", help="clients, packages or the suite, by name")
    arguments = parser.parse_args()
    logging.disable()  # what a client here says of what it was sent is in the table
    ours = f"apcore-mcp {apcore_mcp.__version__}, mcp {version('mcp')}, apcore {version('apcore')}"
    print(f"{datetime.date.today()}, {ours}\n")

    suites = ("2025-11-25", "2026-07-28", *SCENARIOS)
    tables: list[tuple[list[str], dict[str, Callable[[], list[str]]]]] = [
        (["client", *CHECKS, HOSTILE], {client.name: partial(row, client) for client in CLIENTS}),
        (agents.HEADINGS, {agent.name: partial(agents.row, agent) for agent in agents.AGENTS}),
        (adapters.HEADINGS, {each.package: partial(adapters.row, each) for each in adapters.ADAPTERS}),
        (logins.HEADINGS, {f"login {name}": partial(logins.row, name) for name in logins.ROWS}),
        (tasks.HEADINGS, {**tasks.ROWS}),
        (pages.HEADINGS, {name: partial(pages.row, name) for name in pages.ROWS}),
        (SUITE_HEADINGS, {f"conformance suite, {version}": partial(conformance, version) for version in suites}),
    ]
    for headings, rows in tables:
        show_rows(headings, {name: rows[name] for name in rows if re.search(arguments.only, name, re.IGNORECASE)})


if __name__ == "__main__":
    main()
