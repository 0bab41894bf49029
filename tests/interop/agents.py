"""Coding agents, without an account: each runs with a scripted model, and what that was told is looked at."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model import Call, Model, scripted
from .programs import HTTP, NODE, NODE_PATH, ROOT, SERVER, install_node, reason, run, serving, yes

HEADINGS = ["agent", "offered as", "call", "error text", "picture", "question", "approval", "documentation", "search"]
NAME = "apcore-mcp"  # of the server, as `--export client` has it: agents put it before the names of tools
DOCUMENT = "docs://finance.loan_schedule"
# Agents start the server somewhere else.
STARTED: dict[str, Any] = {"command": SERVER[0], "args": SERVER[1:], "env": {"PYTHONPATH": str(ROOT)}}
CALLS: list[Call] = [
    ("workdays", {"start": "2026-01-01", "end": "2026-01-12"}),
    ("convert", {"value": 1, "source": "m", "target": "kg"}),
    ("picture", {"values": [1, 2]}),
    ("book_room", {"day": "2026-12-01", "people": 6}),
    ("empty", {"dry_run": False}),
]

Prepare = Callable[[Path, Model, "str | None"], "tuple[dict[str, str], list[str]]"]
"""Writes an agent's configuration below its home, for a server at a URL or one to start; returns environment, command.

Its server is waited for, nothing goes to anyone but the model, and tools run without a question of the agent's own.
"""


@dataclass(frozen=True)
class Agent:
    name: str
    package: str
    prepare: Prepare
    read_resource: str  # its own tool for that


def _claude_code(home: Path, model: Model, url: str | None) -> tuple[dict[str, str], list[str]]:
    server = {"type": "http", "url": url} if url else STARTED
    (home / "mcp.json").write_text(json.dumps({"mcpServers": {NAME: server}}))
    quiet = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_TELEMETRY", "DISABLE_AUTOUPDATER"), "1")
    eager = {"ENABLE_TOOL_SEARCH": "false", "MCP_CONNECTION_NONBLOCKING": "false"}
    allowed = ["--allowedTools", f"mcp__{NAME}", "ReadMcpResourceTool"]
    command = ["claude", "-p", "Go.", "--mcp-config", "mcp.json", "--strict-mcp-config", *allowed]
    return {"ANTHROPIC_BASE_URL": model.url, "ANTHROPIC_API_KEY": "none", **quiet, **eager}, command


def _codex(home: Path, model: Model, url: str | None) -> tuple[dict[str, str], list[str]]:
    given = {"url": url} if url else {**STARTED, "env.PYTHONPATH": str(ROOT)}
    server = "\n".join(f"{key} = {json.dumps(value)}" for key, value in given.items() if key != "env")
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(f"""
        model = "scripted"
        model_provider = "scripted"
        check_for_update_on_startup = false
        [analytics]
        enabled = false
        [model_providers.scripted]
        name = "scripted"
        base_url = "{model.url}"
        wire_api = "responses"
        [mcp_servers.{NAME}]
        required = true
        {server}
    """)
    return {}, ["codex", "exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "Go."]


def _gemini_cli(home: Path, model: Model, url: str | None) -> tuple[dict[str, str], list[str]]:
    # Version 0.61.0 passes no PYTHONPATH on to a server.
    started = {"command": "env", "args": [f"PYTHONPATH={ROOT}", *SERVER]}
    server = {"httpUrl": url} if url else started
    settings = {
        "mcpServers": {NAME: {**server, "trust": True}},
        "general": {"enableAutoUpdate": False},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "security": {"auth": {"selectedType": "gemini-api-key"}},
    }
    (home / ".gemini").mkdir()
    (home / ".gemini" / "settings.json").write_text(json.dumps(settings))
    environment = {"GOOGLE_GEMINI_BASE_URL": model.url, "GEMINI_API_KEY": "none"}
    return environment, ["gemini", "-p", "Go.", "-m", "gemini-2.5-flash", "--skip-trust", "--yolo"]


AGENTS = [
    Agent("Claude Code", "@anthropic-ai/claude-code", _claude_code, "ReadMcpResourceTool"),
    Agent("Codex", "@openai/codex", _codex, "read_mcp_resource"),
    Agent("Gemini CLI", "@google/gemini-cli", _gemini_cli, "read_mcp_resource"),
]


@dataclass(frozen=True)
class Conversation:
    """What an agent's model was offered and answered."""

    tools: list[str]
    results: list[str]
    everything: str
    failure: str  # why it has no more results


def _converse(agent: Agent, script: list[Call], url: str | None) -> Conversation:
    """Let the agent's model make the calls of `script`, with a server at `url` or one that the agent starts."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, scripted(script) as model:
        home = Path(folder)
        environment, command = agent.prepare(home, model, url)
        programs = f"{NODE / 'node_modules' / '.bin'}{os.pathsep}{NODE_PATH}"
        environment |= {"PATH": programs, "HOME": folder, "NO_PROXY": "127.0.0.1"}
        # With nothing of the user's own: no account, and no model but the scripted one.
        alone = ["env", "-i", *(f"{name}={value}" for name, value in environment.items())]
        done = run([*alone, *command], seconds=120, cwd=home)
        tools = [tool["name"] for tool in model.tools()]
        results = [json.dumps(result) for result in model.results()]
        failure = f"{len(results)} results of {len(script)}: {reason(done.stderr or done.stdout)}"
        return Conversation(tools, results, json.dumps(model.requests), failure)


def _told(agent: Agent, url: str | None) -> list[str]:
    """What the agent's model was offered and told, with a server at `url` or one that the agent starts."""
    script = [*CALLS, (agent.read_resource, {"server": NAME, "uri": DOCUMENT})]
    conversation = _converse(agent, script, url)
    offered = [name for name in conversation.tools if name.endswith(("units.convert", "units_convert"))]
    if not offered or len(conversation.results) != len(script):
        return [conversation.failure, *[""] * 6]
    call, error, picture, question, approval, document = conversation.results
    everything = conversation.everything
    return [
        f"`{offered[0]}`",
        yes("workdays" in call and "8" in call, call),
        yes("cannot convert length to mass" in error, error),
        yes("iVBOR" in everything, f"none, but {picture}"),
        "not asked" if "not booked" in question else question,
        "refused" if "Approval was denied" in approval else "let run" if "freed_bytes" in approval else approval,
        yes("annuity" in document, document),
    ]


THINGS = "invoice customer parcel ticket lease room desk badge course grant".split()
THINGS += "vehicle meter pump valve sensor garden recipe menu table guest".split()
THINGS += "song album concert museum ticket_office library shelf loan reader branch".split()
ACTIONS = "create list show rename archive restore delete export share print_out".split()
SEARCH: list[Call] = [
    ("search_tools", {"query": "put an archived parcel back"}),
    ("call_tool", {"name": "parcel.restore_parcel", "arguments": {"number": 7}}),
]


def _searched(agent: Agent) -> str:
    """Whether the agent's model finds and calls one of three hundred tools."""
    with tempfile.TemporaryDirectory() as folder:
        for thing in THINGS:
            lines = ["from apcore.decorator import module"]
            for action in ACTIONS:
                words = f"{action} a {thing}".replace("_", " ").capitalize()
                lines += ["@module()", f"def {action}_{thing}(number: int) -> str:", f'    """{words}."""']
                lines.append(f"    return f'{action} {thing} {{number}}: done'")
            Path(folder, f"{thing}.py").write_text("\n".join(lines))
        command = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", folder, "--search", "--log-level", "ERROR"]
        with serving([*command, *HTTP]) as url:
            conversation = _converse(agent, SEARCH, url)
    if len(conversation.results) != len(SEARCH):
        return conversation.failure
    found, called = conversation.results
    others = [name for name in conversation.tools if name.endswith(tuple(THINGS))]
    is_found = "parcel.restore_parcel" in found and "inputSchema" in found
    return yes(is_found and "restore parcel 7: done" in called and not others, f"{found}, {called}, {others}")


def row(agent: Agent) -> list[str]:
    """The agent's line: over stdio, and what is different over HTTP."""
    name = f"{agent.name} ({install_node(agent.package)})"
    told = _told(agent, None)
    with serving([*SERVER, *HTTP]) as url:
        over_http = _told(agent, url)
    pairs = zip(told, over_http, strict=True)
    cells = [cell if cell == other else f"stdio: {cell}; HTTP: {other}" for cell, other in pairs]
    return [name, *cells, _searched(agent)]
