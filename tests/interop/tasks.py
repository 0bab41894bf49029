"""Clients that know tasks: the extension's own in TypeScript, and Claude Code in a terminal, whose keys are pressed."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from .agents import AGENTS
from .model import Call, scripted
from .programs import HERE, NODE, NODE_PATH, NODE_PROGRAM, install_node, run, serving, yes

HEADINGS = ["client of tasks", "task", "progress", "question", "result", "cancelled"]
HEADINGS += ["session goes on", "approval", "form"]
CHECKS = HEADINGS[1:6]
EXTENSION, TERMINAL = "@modelcontextprotocol/ext-tasks", "Claude Code in a terminal"
STARTED = [sys.executable, "-m", "tests.interop.work"]


def _extension() -> list[str]:
    """The line of the extension's own client: each check is made over stdio and over HTTP."""
    version = install_node(EXTENSION)

    def checks(*target: str) -> dict[str, str]:
        environment = {"PATH": NODE_PATH, "NODE_FOLDER": str(NODE)}
        program = [str(NODE_PROGRAM), str(HERE / "clients" / "tasks.mjs"), *target]
        done = run(program, seconds=60, environment=environment)
        done.check_returncode()
        found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
        return found

    with serving([*STARTED, "{port}"]) as url:
        found = {"stdio": checks(*STARTED), "HTTP": checks(url)}
    cells = []
    for check in CHECKS:
        wrong = [f"{way}: {told[check]}" for way, told in found.items() if told[check] != "yes"]
        cells.append("; ".join(wrong) or "yes")
    return [f"{EXTENSION} ({version})", *cells, "-", "-", "-"]


class _Terminal:
    """A program in a terminal of 50 lines: what it has written since the last keys, and the keys."""

    def __init__(self, process: int, terminal: int) -> None:
        self._process = process
        self._terminal = terminal
        self._written = b""

    def wait(self, pattern: str) -> None:
        """Wait until the text on the screen matches. A program that draws what has changed leaves out blanks."""
        self.until(lambda: re.search(pattern, self._text()) is not None, f"{pattern!r} on the screen")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition, and read what is written meanwhile, or the program would wait, too."""
        deadline = time.monotonic() + 30
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {what}: {self._text()[-100:]}")
            if select.select([self._terminal], [], [], 0.2)[0]:
                self._written += os.read(self._terminal, 65_536)

    def press(self, *keys: str) -> None:
        """Press keys one after the other, as fast as a person: what is typed at once is taken for pasted."""
        self._written = b""
        for key in keys:
            time.sleep(0.5)
            os.write(self._terminal, key.encode())

    def _text(self) -> str:
        text = re.sub(r"\x1b\][^\x07\x1b]*(\x07|\x1b\\)", "", self._written.decode(errors="replace"))
        return re.sub(r"\x1b[\[(=>][0-9;?<>=]*[a-zA-Z]?|\s", "", text)


@contextlib.contextmanager
def _in_terminal(command: list[str], environment: Mapping[str, str], cwd: Path) -> Iterator[_Terminal]:
    """A program with a terminal of its own, which is killed at the end."""
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(cwd)
        os.execvpe(command[0], command, environment)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 140, 0, 0))
    try:
        yield _Terminal(process, terminal)
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


SCRIPT: list[Call] = [("report_erase", {"name": "May"}), ("report_rename", {}), ("report_publish", {})]
DOWN, ENTER, ESCAPE = "\x1b[B", "\r", "\x1b"


def _terminal() -> list[str]:
    """The line of Claude Code in a terminal: its user approves, fills in two forms, goes on meanwhile, looks at a task
    and stops it."""
    (agent,) = [agent for agent in AGENTS if agent.name == "Claude Code"]
    label = f"{TERMINAL} ({install_node(agent.package)})"
    with (
        serving([*STARTED, "{port}"]) as url,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        scripted([*SCRIPT]) as model,
    ):
        home = Path(folder).resolve()
        environment, _ = agent.prepare(home, model, url)
        settings = {
            "hasCompletedOnboarding": True,
            "customApiKeyResponses": {"approved": [environment["ANTHROPIC_API_KEY"]], "rejected": []},
            "projects": {str(home): {"hasTrustDialogAccepted": True}},
        }
        (home / ".claude.json").write_text(json.dumps(settings))
        programs = f"{NODE / 'node_modules' / '.bin'}{os.pathsep}{NODE_PATH}"
        environment |= {"PATH": programs, "HOME": folder, "NO_PROXY": "127.0.0.1", "TERM": "xterm-256color"}
        command = ["claude", "Go.", "--mcp-config", "mcp.json", "--strict-mcp-config"]
        command += ["--allowedTools", "mcp__apcore-mcp"]
        with _in_terminal(command, environment, home) as terminal:
            terminal.wait("Done")  # its servers are connected to meanwhile; a model is told of them in the next turn
            terminal.press("Go on.", ENTER)
            terminal.wait("Letreport.eraserun")
            terminal.press(" ", DOWN, ENTER)
            terminal.wait("Whatshallitbecalled")
            terminal.press("News", DOWN, ENTER)
            terminal.wait("1MCPtask")
            terminal.press("And then?", ENTER)
            terminal.wait("Underwhichtitle")
            terminal.press("Good news", DOWN, ENTER)
            terminal.wait("completed")
            terminal.wait("Done")
            model.script.append(("report_compile", {"pages": 100}))
            terminal.press("Compile it.", ENTER)
            terminal.wait("1MCPtaskstillrunning")
            terminal.press(DOWN, ENTER)
            terminal.wait(r"\d/100Compiling")
            terminal.press("x")
            terminal.wait("Notaskscurrentlyrunning")
            model.script.append(("report_cancelled", {}))
            terminal.press(ESCAPE, "What was stopped?", ENTER)
            terminal.until(lambda: len(model.results()) == len(model.script), "result of the last call")
        results = [json.dumps(result) for result in model.results()]
        turns = [json.dumps(request["messages"]) for request in model.requests if "messages" in request]
    approved, renamed, task, _, cancelled, *_ = [*results, *["no result"] * 5]
    notified = [turn for turn in turns if "task-notification" in turn]
    goes_on = any("And then?" in turn and "task-notification" not in turn for turn in turns)
    published = any("published as Good news" in turn for turn in notified)
    return [
        label,
        yes("server-side task" in task, task),
        "yes",  # or it would not have come so far
        yes(published, (notified or [task])[-1][-150:]),
        yes(published, (notified or [task])[-1][-150:]),
        yes("report.compile" in cancelled, cancelled),
        yes(goes_on, "no turn before its result"),
        yes("erased May" in approved, approved),
        yes("renamed to News" in renamed, renamed),
    ]


ROWS = {EXTENSION: _extension, TERMINAL: _terminal}
