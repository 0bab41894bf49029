"""What the README and the recipes show works: the example modules, the scripts, the Python blocks, the commands."""

from __future__ import annotations

import ast
import base64
import builtins
import contextlib
import functools
import importlib
import json
import logging
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from apcore import Identity
from conftest import (
    EXTENSIONS,
    HANDSHAKE,
    MODERN,
    ROOT,
    RawClient,
    client_of,
    connect,
    echo,
    free_port,
    registry_of,
    serving,
    until,
)
from mcp import MCPError
from starlette.testclient import TestClient
from support import answer, modern

import apcore_mcp
from apcore_mcp import discover, run_openai_call, to_openai_tools
from apcore_mcp.__main__ import main


@pytest.fixture
def told_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
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
    assert len(registry.list()) == int(re.search(r"(\d+) tools registered", README)[1])  # type: ignore[index]


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
def test_several_processes_serve_one_port_and_one_that_is_killed_is_replaced(tmp_path: Path) -> None:
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


def test_who_has_the_role_is_offered_the_door_and_let_in_and_nobody_else(told_by: Callable[..., str]) -> None:
    """Nobody's token is no token at all: a client that has one is to know that it is not valid any more."""
    ann, bob, stranger, refused = told_by("bearer_token.py").splitlines()
    assert ann == "token-of-ann is offered door.open, door.ring; to open: {'result': 'The back door is open.'}"
    assert bob == "token-of-bob is offered door.ring; to open: Access denied"
    assert stranger == "no token is offered door.ring; to open: Access denied"
    assert refused == 'token-of-nobody is refused: 401 Bearer error="invalid_token"'


# ---- README.md, examples/operation.md ----

README = (ROOT / "README.md").read_text()
RECIPES = (ROOT / "examples" / "operation.md").read_text()


PYTHON = re.findall(r"```python\n(.+?)```", README, flags=re.DOTALL)


def block_with(text: str) -> str:
    return next(block for block in PYTHON if text in block)


def test_the_python_of_the_readme_carries_its_imports_and_names_only_what_exists() -> None:
    for block in PYTHON:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        nodes = list(ast.walk(compile(block, "README.md", "exec", flags=flags)))
        names = [node for node in nodes if isinstance(node, ast.Name)]
        known = {*dir(builtins), "__name__"} | {name.id for name in names if not isinstance(name.ctx, ast.Load)}
        for node in nodes:
            if not isinstance(node, ast.keyword):  # an import, a definition, a parameter
                known.add(getattr(node, "asname", None) or getattr(node, "name", None) or getattr(node, "arg", ""))
            if isinstance(node, ast.ImportFrom) and node.module.partition(".")[0] not in ("openai", "fastapi", "shop"):
                module = importlib.import_module(node.module)  # which is not others', nor the reader's
                assert all(hasattr(module, alias.name) for alias in node.names), block
        assert {name.id for name in names} <= known, block
    functions = {name for name in apcore_mcp.__all__ if name.islower() and not name.startswith("_")}
    assert [name for name in functions - {"from_openai_name"} if f"{name}(" not in README] == []


def test_the_class_that_the_readme_shows_stands_in_the_example() -> None:
    shown = re.search(r"^class BearerTokens\b.+?(?=^\S|\Z)", block_with("class BearerTokens"), re.DOTALL | re.MULTILINE)
    assert shown is not None
    typed = (ROOT / "examples" / "bearer_token.py").read_text()
    untyped = re.sub(r"(: \w+)(?=[,)])|( -> .+)(?=:$)", "", typed, flags=re.MULTILINE)
    assert [line for line in shown[0].splitlines() if line not in untyped.splitlines()] == []


def headings(path: Path) -> set[str]:
    """What a link to a heading of a page names: `an-upgrade` for "An upgrade"."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.+?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_of_the_readme_leads_somewhere_and_one_to_every_recipe() -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", README)
    assert len(links) > 10
    for file, heading in links:
        target = ROOT / (file or "README.md")
        assert target.is_file(), file
        assert not heading or heading in headings(target), heading
    for heading in re.findall(r"^## (.+)$", RECIPES, re.MULTILINE):
        assert f"[{heading}](examples/operation.md#" in README


async def test_the_recipe_for_logs_makes_each_call_a_line_of_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = re.findall(r"```json\n(.+?)```", RECIPES, re.DOTALL)
    config, logger = json.loads(block), logging.getLogger("apcore_mcp.access")
    form = config["formatters"][config["handlers"]["calls"]["formatter"]]
    assert config["loggers"][logger.name]["handlers"] == ["calls"]
    handler = logging.StreamHandler(sys.stdout)  # without `dictConfig`, which would change every other test's log
    handler.setFormatter(logging.Formatter(form["format"], style=form["style"]))
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    registry = registry_of({"t.echo": echo})
    for name, outcome in (("t-echo", "ok"), ("t-none", "MODULE_NOT_FOUND")):
        await run_openai_call(registry, name, "{}", identity=Identity('Zoë "7"'))
        line = json.loads(capsys.readouterr().out)
        assert (line["caller"], line["outcome"]) == ('Zoë "7"', outcome)


def accepts(port: int) -> bool:
    with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def test_the_commands_of_the_recipes_run_as_they_are_written() -> None:
    """Each server lets those who come by its name find their login, which takes its flags."""
    (unit,) = re.findall(r"^ExecStart=\S+ ((?:.+\\\n)+.+)$", RECIPES, re.MULTILINE)
    (container,) = re.findall(r"^CMD (\[.+\\\n.+\])$", RECIPES, re.MULTILINE)
    checks = re.findall(r"^(?:ExecStartPre=/\S+|RUN python) (.+ --check)$", RECIPES, re.MULTILINE)
    servers = {}
    for words in (unit.replace("\\\n", "").split(), json.loads(container.replace("\\\n", ""))[1:]):
        port = free_port()
        words[words.index("--port") + 1] = str(port)
        words[words.index("--extensions-dir") + 1] = str(EXTENSIONS)
        started = [sys.executable, str(ROOT / "examples" / Path(words[0]).name), *words[1:]]
        servers[port] = subprocess.Popen(started, stderr=subprocess.DEVNULL)
    try:
        assert len(checks) == 2
        for line in {re.sub(r"/\S+", str(EXTENSIONS), check) for check in checks}:
            subprocess.run([sys.executable, *line.split()], stdout=subprocess.DEVNULL, check=True, timeout=50)
        for port in servers:
            until(functools.partial(accepts, port))
            refused = httpx.post(f"http://127.0.0.1:{port}/mcp", json={}, headers={"Host": "tools.example.com"})
            assert refused.status_code == 401
            assert 'resource_metadata="https://tools.example.com/' in refused.headers["www-authenticate"]
    finally:
        for server in servers.values():
            server.terminate()
    assert [server.wait(timeout=30) for server in servers.values()] == [0, 0]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the first tool of the README, in which the program stands."""
    (tmp_path / "extensions").mkdir()
    (tmp_path / "extensions" / "text.py").write_text(PYTHON[0])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_program_of_the_readme_serves_the_first_tool_which_does_what_is_said_there(project: Path) -> None:
    (project / "program.py").write_text(PYTHON[1])
    with RawClient([sys.executable, "program.py"], cwd=project) as client:
        client.initialize()
        (tool,) = client.request("tools/list", {})["result"]["tools"]
        assert (tool["name"], tool["description"]) == ("text.shout", "Write a text in capitals.")
        called = client.request("tools/call", {"name": "text.shout", "arguments": {"text": "good morning"}})
    assert json.dumps(called["result"]["structuredContent"]) in README


async def test_the_modules_of_the_readme_are_served_from_the_files_that_it_names(
    project: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their ids are those of its table; that a function gets dates, it shows by comparing them."""
    (project / "extensions" / "shop").mkdir()
    (project / "extensions" / "shop" / "orders.py").write_text(block_with("ORDERS = "))
    (project / "extensions" / "overwrite.py").write_text(block_with("class Overwrite"))
    registry = discover("extensions")
    assert registry.list() == ["overwrite", "shop.orders.count", "text.shout"]
    definition = registry.get_definition("shop.orders.count")
    assert definition is not None
    (example,) = definition.examples
    assert json.loads(await run_openai_call(registry, "shop-orders-count", example.inputs)) == example.output
    (tool,) = to_openai_tools(registry, prefix="shop", embed_annotations=True)
    function = tool["function"]
    assert function["description"].startswith("Count the orders since a day. Use it before you list them, as a list")
    assert function["description"].endswith("[Annotations: readonly=true, idempotent=true]")
    assert [*function["parameters"]["properties"]] == ["since"]
    assert caplog.text == ""


def test_the_tools_are_mounted_in_an_application_as_the_readme_shows(project: Path) -> None:
    program: dict[str, Any] = {}
    exec(block_with("async_serve"), program)
    posted = modern("tools/call", {"name": "text.shout", "arguments": {"text": "hi"}})
    with TestClient(program["app"]) as http:
        for host in ("tools.example.com", "localhost:8000", "127.0.0.1:8000"):
            response = http.post(f"http://{host}/agents/mcp", **posted)
            assert answer(response)["result"]["structuredContent"] == {"result": "HI"}


@pytest.mark.parametrize(("mode", "stateless"), [(HANDSHAKE, False), (HANDSHAKE, True), (MODERN, False)])
async def test_after_an_upgrade_only_clients_with_a_session_begin_anew(mode: str, stateless: bool) -> None:
    registry, options = registry_of({"t.echo": echo}), {"port": free_port(), "stateless": stateless}
    lost = pytest.raises(MCPError, match="Session not found")
    with contextlib.ExitStack() as old, contextlib.ExitStack() as new:
        url = old.enter_context(serving(registry, **options))
        async with client_of(url, mode) as client:
            await client.call_tool("t.echo", {})
            old.close()
            new.enter_context(serving(registry, **options))
            with lost if mode == HANDSHAKE and not stateless else contextlib.nullcontext():
                assert not (await client.call_tool("t.echo", {})).is_error


@pytest.mark.usefixtures("project")
async def test_a_conversation_with_openai_runs_as_the_readme_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client is the one part that is not real: it calls the tool, and then says what it was told."""
    call = SimpleNamespace(id="1", function=SimpleNamespace(name="text-shout", arguments='{"text": "hi"}'))

    class AsyncOpenAI:
        def __init__(self) -> None:
            self.chat = SimpleNamespace(completions=self)

        async def create(self, *, model: str, messages: list[Any], tools: list[Any]) -> Any:
            assert [tool["function"]["name"] for tool in tools] == ["text-shout"]
            told = messages[-1]["content"] if messages[-1].get("role") == "tool" else None
            reply = type("Message", (dict,), {"content": told, "tool_calls": None if told else [call]})
            return SimpleNamespace(choices=[SimpleNamespace(message=reply(role="assistant"))])

    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(AsyncOpenAI=AsyncOpenAI))  # type: ignore[arg-type]
    program: dict[str, Any] = {}
    exec(block_with("AsyncOpenAI"), program)
    assert json.loads(await program["answer"]([{"role": "user", "content": "Shout hi"}])) == {"result": "HI"}


def test_the_flags_of_the_readme_are_those_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    usage, _, details = told.partition("\noptions:")
    defaults = dict(re.findall(r"\n  (--[a-z-]+)(?:(?!\n  --)[^\0])*?\(default: (.+)\)", details))
    rows = [[cell.strip() for cell in row.split("|")] for row in README.splitlines() if row.startswith("| `--")]
    shown = [flag for _, cell, *_ in rows for flag in re.findall(r"`(--[a-z-]+)", cell)]
    assert sorted(shown) == sorted(set(re.findall(r"--[a-z-]+", usage)))
    for _, cell, default, *_ in rows:
        assert all(choices in usage for choices in re.findall(r"{.+?}", cell))
        for flag, value in zip(re.findall(r"`(--[a-z-]+)", cell), re.findall(r"`(.+?)`", default), strict=False):
            assert defaults[flag] == value
