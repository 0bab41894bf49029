"""README.md and the pages of examples/guide/: what they show runs as it is written, and what they name exists.

How a page is read. A block that begins with a comment `# path` (or has the path behind its language) is that file of
the page's project. A `text` block holds calls, `> tool {...}`, and what is to come of each: they are made through the
SDK's client, on the command line's server of that project, with the flags that stand behind `text`. A `console` block
holds a command and what it prints. Of `sh` blocks, each `python -m apcore_mcp` is run. Python outside of `extensions/`
is a program, and has its test below. The page of pages.md is shown in test_explorer_page.py.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import importlib.util
import json
import logging
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from logging.config import DictConfigurator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import httpx2
import pytest
import yaml
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
)
from mcp import MCPError
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import ElicitResult
from starlette.middleware import Middleware
from starlette.testclient import TestClient
from support import Caplog, Capture, Monkeypatch, answer, everybody_is, modern

import apcore_mcp
from apcore_mcp import discover
from apcore_mcp.__main__ import main

GUIDE = ROOT / "examples" / "guide"
PAGES = {path.name: path.read_text("utf-8") for path in [ROOT / "README.md", *sorted(GUIDE.glob("*.md"))]}
FENCED = re.compile(r"^```(\w*) ?(.*?)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PATH = re.compile(r"# ([\w./-]+\.\w+)\n")


class Block:
    """A fenced block of a page."""

    def __init__(self, language: str, about: str, text: str) -> None:
        self.language, self.text = language, text
        named = PATH.match(text)
        self.path = named[1] if named else about if "." in about else ""
        self.flags = "" if self.path else about
        self.is_program = language == "python" and "/" not in self.path


BLOCKS = {page: [Block(*found) for found in FENCED.findall(text)] for page, text in PAGES.items()}


def blocks(page: str, language: str) -> list[Block]:
    return [block for block in BLOCKS[page] if block.language == language]


def program(page: str, name: str) -> str:
    return next(block.text for block in BLOCKS[page] if block.path == name)


# What the pages use of packages that may not be installed here.
STAND_INS = {
    "pandas.py": """
import math

class DataFrame:
    def __init__(self, rows):
        self.rows = [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]
    def astype(self, kind):
        return self
    def notna(self):
        return [{name: value == value for name, value in row.items()} for row in self.rows]
    def where(self, mask, other):
        frame = DataFrame([])
        frame.rows = [{n: v if seen[n] else other for n, v in row.items()} for row, seen in zip(self.rows, mask)]
        return frame
    def sort_values(self, name, ascending=True):
        return DataFrame(sorted(self.rows, key=lambda row: row[name], reverse=not ascending))
    def to_dict(self, form):
        return [dict(row) for row in self.rows]
    def __getitem__(self, name):
        return [row[name] for row in self.rows]
    def __len__(self):
        return len(self.rows)
""",
    "matplotlib/figure.py": r"""
class Figure:
    def subplots(self):
        return self
    def plot(self, values):
        self.values = list(values)
    def savefig(self, file, *, format, dpi=None):
        file.write(b"\x89PNG\r\n\x1a\n")
""",
}
STAND_INS = {path: text for path, text in STAND_INS.items() if not importlib.util.find_spec(re.split(r"\W", path)[0])}


def write_project(page: str, folder: Path) -> None:
    """Write the files of a page's project, its programs included, and what they import and nobody has installed."""
    shown = [block for block in BLOCKS[page] if block.path]
    assert len({block.path for block in shown}) == len(shown), "two files of one name"
    if not any(block.path.startswith("extensions/") for block in shown):  # the reader has the first tool
        shown += [block for block in BLOCKS["README.md"] if block.path == "extensions/text.py"]
    for block in shown:
        (folder / block.path).parent.mkdir(parents=True, exist_ok=True)
        (folder / block.path).write_text(block.text, "utf-8")
    for name, text in STAND_INS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "login.py").write_bytes((ROOT / "examples" / "login.py").read_bytes())


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: Monkeypatch) -> Iterator[Path]:
    """The directory in which a page's reader works: its files are there, and packages in it can be imported."""
    page = request.param if hasattr(request, "param") else request.node.callspec.params["page"]
    write_project(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = {*sys.modules}
    yield tmp_path
    # All before any goes: a package without `__init__.py` asks the one around it where it is.
    own = [name for name in {*sys.modules} - before if str(tmp_path) in repr(sys.modules[name])]
    for name in own:
        del sys.modules[name]


def of_page(page: str) -> Any:
    """A test that runs where the reader of this page works."""
    where = pytest.mark.parametrize("project", [page], indirect=True, ids=[page])
    return lambda test: pytest.mark.usefixtures("project")(where(test))


# ---- What the pages show of tools ----

CALL = re.compile(r"^> (\S+) (\{[^\n]*\})\n(.*?)(?=^> |\Z)", re.DOTALL | re.MULTILINE)
WITH_CALLS = sorted({page for page in PAGES if blocks(page, "text")})
UNSHOWN = {"README.md": ("shop.chart", "{}", "{}\n[image/png]")}
"""What a page has a tool for, and only a picture of."""


def filled_in(form: dict[str, Any]) -> dict[str, Any]:
    """How a user fills in a form who agrees to everything."""
    return {name: field.get("enum", [True])[0] for name, field in form.get("properties", {}).items()}


@contextlib.contextmanager
def serving_as_told(*flags: str) -> Iterator[str]:
    """What the command line serves of the working directory with these flags, but over HTTP; its base URL."""
    begun: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("apcore_mcp.__main__.run", begun.append)
        port = str(free_port())
        main(["--extensions-dir", "extensions", "--transport", "streamable-http", "--port", port, *flags])
    options = {**vars(begun[0])}
    with serving(options.pop("registry_or_executor"), **options) as url:
        yield url


def talking(url: str, told: list[str]) -> Client:
    """A client which notes what its user is told and asked."""

    async def ask(_: Any, params: Any) -> ElicitResult:
        told.append("asked: " + params.message.replace("\n", "\n" + " " * 7))
        return ElicitResult(action="accept", content=filled_in(params.requested_schema))

    return client_of(url, elicitation_callback=ask)


async def transcript(client: Client, name: str, arguments: dict[str, Any], told: list[str]) -> list[str]:
    """What becomes of a call, in the lines of a page."""
    told.clear()

    async def show(progress: float, total: float | None, message: str | None) -> None:
        told.append(f"progress: {progress:g}/{total:g} {message}")

    result = await client.call_tool(name, arguments, progress_callback=show)
    for part in result.content:
        if part.type == "text":
            told += part.text.split("\n")
        elif part.type == "resource":
            text = f"[{part.resource.mime_type}] {getattr(part.resource, 'text', '')}"
            told += text.rstrip("\n").split("\n")
        else:
            told.append(f"[{part.mime_type}]")  # type: ignore[union-attr]
    return told


def plain(lines: list[str]) -> list[Any]:
    """Lines, of which JSON counts by its value, however it is broken into lines."""
    values: list[Any] = []
    left = "\n".join(lines)
    while left:
        try:
            value, end = json.JSONDecoder().raw_decode(left)
            left = left[end:].lstrip("\n")
        except ValueError:
            value, _, left = left.partition("\n")
        values.append(value)
    return values


@pytest.mark.parametrize("page", WITH_CALLS)
@pytest.mark.usefixtures("project")
async def test_the_calls_of_a_page_end_as_it_shows(page: str, caplog: Caplog) -> None:
    """And each of its modules is served, but for those that it says are left out."""
    seen = []
    for flags in {block.flags for block in blocks(page, "text")}:
        calls = [call for block in blocks(page, "text") if block.flags == flags for call in CALL.findall(block.text)]
        calls += [UNSHOWN[page]] if page in UNSHOWN else []
        told: list[str] = []
        with serving_as_told(*flags.split()) as url:
            async with talking(url, told) as client:
                for name, arguments, expected in calls:
                    lines = await transcript(client, name, json.loads(arguments), told)
                    seen.append((name, plain(lines), plain(expected.rstrip().split("\n"))))
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text for text in warnings if text not in PAGES[page]] == []
    assert [(name, lines) for name, lines, _ in seen] == [(name, expected) for name, _, expected in seen]


CONSOLES = [(page, block.text) for page in PAGES for block in blocks(page, "console")]


@pytest.mark.parametrize(("project", "text"), CONSOLES, indirect=["project"], ids=[page for page, _ in CONSOLES])
@pytest.mark.usefixtures("project")
def test_a_command_prints_what_a_page_shows(text: str) -> None:
    command, _, expected = text.removeprefix("$ python ").partition("\n")
    run = [sys.executable, *command.split()]
    ended = subprocess.run(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=50)
    assert sorted(re.sub(r"^[\d :,-]+(?=[A-Z]+: )", "", ended.stdout, flags=re.MULTILINE).splitlines()) == sorted(
        expected.splitlines()
    )


def commands_of(page: str) -> list[str]:
    """The `python -m apcore_mcp` of a page's `sh` blocks, without what follows it in its line."""
    lines = "\n".join(block.text for block in blocks(page, "sh")).replace("\\\n", "").splitlines()
    return [found[1] for line in lines if (found := re.match(r"(?:.* )?python -m apcore_mcp (.+)", line))]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)])
def test_the_commands_of_a_page_run(project: Path, page: str, capfd: Capture) -> None:
    """Not to their end: they check what they would serve. Its flags are known, and their values allowed."""
    (project / "examples").mkdir()
    (project / "examples" / "extensions").symlink_to(EXTENSIONS, target_is_directory=True)
    for line in commands_of(page):
        assert main([*shlex.split(line, comments=True), "--log-level", "ERROR", "--check"]) in (0, 1)
        assert "would be served" in "".join(capfd.readouterr())  # once it has run, stdout is stderr


# ---- Programs ----

PROGRAMS = {(page, block.path) for page in PAGES for block in BLOCKS[page] if block.is_program}
OWN_TEST = {("data.md", "as_yaml.py")}
SERVED = sorted((page, name) for page, name in PROGRAMS - OWN_TEST if re.search("(?m)^ *serve\\(", program(page, name)))


@contextlib.contextmanager
def serving_what(monkeypatch: Monkeypatch, path: Path, *arguments: str) -> Iterator[str]:
    """What a program serves, but on a free port and over HTTP; its base URL."""
    served: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(apcore_mcp, "serve", lambda source, **options: served.append((source, options)))
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    runpy.run_path(str(path), run_name="__main__")
    ((source, options),) = served
    with serving(source, **options | {"transport": "streamable-http", "port": free_port()}) as url:
        yield url


def sends_to_a_login(response: httpx.Response) -> bool:
    challenge = response.headers.get("www-authenticate", "")
    return response.status_code == 401 and 'resource_metadata="https://tools.example.com/' in challenge


@pytest.mark.parametrize(("project", "name"), SERVED, indirect=["project"], ids=[f"{p}-{n}" for p, n in SERVED])
def test_a_program_of_a_page_serves(project: Path, name: str, monkeypatch: Monkeypatch) -> None:
    """It lists its tools, or sends those to a login who have none."""
    with serving_what(monkeypatch, project / name) as url:
        listed = httpx.post(f"{url}/mcp", **modern("tools/list"))
    if "login(" in (project / name).read_text():
        assert sends_to_a_login(listed)
    else:
        assert answer(listed)["result"]["tools"]


async def complete(*, model: str, reasoning_effort: str, messages: list[Any], tools: list[Any]) -> Any:
    """A model of OpenAI's that calls `text-shout`, and then says what it was told."""
    assert [tool["function"]["name"] for tool in tools] == ["text-shout"]
    told = messages[-1]["content"] if messages[-1].get("role") == "tool" else None
    reply = type("Message", (dict,), {"content": told, "tool_calls": None if told else [SHOUT]})
    return SimpleNamespace(choices=[SimpleNamespace(message=reply(role="assistant"))])


async def respond(*, model: str, input: list[Any], tools: list[Any]) -> Any:
    """The same, behind the Responses API."""
    assert [tool["name"] for tool in tools] == ["text-shout"]
    if isinstance(input[-1], dict) and "output" in input[-1]:
        return SimpleNamespace(output=[], output_text=input[-1]["output"])
    return SimpleNamespace(output=[SHOUT], output_text="")


class AsyncOpenAI:
    chat = SimpleNamespace(completions=SimpleNamespace(create=complete))
    responses = SimpleNamespace(create=respond)


SHOUT = SimpleNamespace(id="1", call_id="1", type="function_call", name="text-shout", arguments='{"text": "hi"}')
SHOUT.function = SHOUT


def executed(page: str, name: str) -> Any:
    """What a program of a page defines, once it has run."""
    defined: dict[str, Any] = {"__name__": name}
    exec(program(page, name), defined)
    return SimpleNamespace(**defined)


@of_page("openai.md")
@pytest.mark.parametrize(("name", "question"), [("chat.py", [{"role": "user"}]), ("responses.py", "Shout hi")])
async def test_a_conversation_with_openai_runs(name: str, question: Any, monkeypatch: Monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "openai", SimpleNamespace(AsyncOpenAI=AsyncOpenAI))  # type: ignore[arg-type]
    assert json.loads(await executed("openai.md", name).answer(question)) == {"result": "HI"}


@of_page("README.md")
async def test_the_lines_for_openai_offer_the_tools_and_run_one(project: Path) -> None:
    (project / "extensions" / "shop.py").unlink()
    chat = executed("README.md", "chat.py")
    assert [tool["function"]["name"] for tool in chat.tools] == ["text-shout"]
    assert json.loads(await chat.answer(SHOUT)) == {"result": "HI"}


@of_page("openai.md")
async def test_the_tools_are_told_to_other_models_and_a_result_in_parts() -> None:
    told = executed("openai.md", "other_models.py")
    (deferred,) = told.deferred[1:]
    assert executed("openai.md", "remote.py").tools[0]["type"] == "mcp"
    assert deferred["defer_loading"] is deferred["strict"] is True
    forms = [told.anthropic[0]["input_schema"], told.gemini[0]["function_declarations"][0]["parameters_json_schema"]]
    for schema in (*forms, told.bedrock["tools"][0]["toolSpec"]["inputSchema"]["json"], deferred["parameters"]):
        assert schema["required"] == ["text"]
    (part,) = await executed("openai.md", "parts.py").output_of(SHOUT)
    assert (part["type"], json.loads(part["text"])) == ("input_text", {"result": "HI"})


@of_page("openai.md")
def test_a_call_of_openais_is_run_by_hand(capsys: Capture) -> None:
    executed("openai.md", "by_hand.py")
    assert capsys.readouterr().out == "{'result': 'GOOD MORNING'}\n"


@of_page("README.md")
def test_the_tools_are_mounted_in_an_application(project: Path) -> None:
    (project / "extensions" / "shop.py").unlink()
    posted = modern("tools/call", {"name": "text.shout", "arguments": {"text": "hi"}})
    with TestClient(executed("README.md", "app.py").app) as http:
        response = http.post("http://localhost:8000/agents/mcp", **posted)
        assert answer(response)["result"]["structuredContent"] == {"result": "HI"}


@of_page("callers-and-logins.md")
def test_the_tools_are_mounted_behind_a_login() -> None:
    with TestClient(executed("callers-and-logins.md", "tools.py").app, base_url="https://example.com") as http:
        refused = http.post("/tools/mcp", **modern("tools/list"))
        assert refused.status_code == 401
        (metadata,) = re.findall(r'resource_metadata="([^"]+)"', refused.headers["www-authenticate"])
        assert metadata == "https://example.com/tools/.well-known/oauth-protected-resource/mcp"
        assert metadata.removeprefix("https://example.com") in PAGES["callers-and-logins.md"]
        assert http.get(metadata).json()["resource"] == "https://example.com/tools/mcp"


@of_page("callers-and-logins.md")
async def test_a_tool_calls_an_api_as_its_caller(monkeypatch: Monkeypatch) -> None:
    """With the token for which the issuer has exchanged the caller's."""

    def post(url: str, *, data: dict[str, str], auth: Any) -> httpx.Response:
        exchanged = {"access_token": f"exchanged {data['subject_token']}"}
        return httpx.Response(200, json=exchanged, request=httpx.Request("POST", url))

    def get(url: str, *, headers: dict[str, str]) -> httpx.Response:
        return httpx.Response(200, json=[headers["Authorization"]], request=httpx.Request("GET", url))

    monkeypatch.setattr(httpx2, "post", post)
    monkeypatch.setattr(httpx2, "get", get)
    monkeypatch.setenv("TOOLS_CLIENT_SECRET", "secret")
    middleware = [Middleware(importlib.import_module("backend.caller").CallersToken)]
    with serving(discover("extensions"), middleware=middleware) as url:
        http = httpx2.AsyncClient(headers={"Authorization": "Bearer ann"})
        async with http, client_of(streamable_http_client(f"{url}/mcp", http_client=http)) as client:
            result = await client.call_tool("orders.mine", {})
    assert result.structured_content == {"result": ["Bearer exchanged ann"]}


@of_page("operation.md")
def test_a_server_runs_beside_a_program(project: Path, capsys: Capture) -> None:
    port = f'"streamable-http", port={free_port()}'
    exec(program("operation.md", "beside.py").replace('"streamable-http"', port), {})
    assert "the program goes on" in capsys.readouterr().out


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(("page", "name"), [("modules.md", "test_orders.py"), ("first-steps.md", "test_files.py")])
def test_the_tests_of_a_tool_pass(page: str, name: str) -> None:
    tests = vars(executed(page, name))
    names = [name for name in tests if name.startswith("test_")]
    assert len(names) == 2
    for name in names:
        tests[name]()


@of_page("first-steps.md")
async def test_a_notebook_calls_a_tool_and_serves_it() -> None:
    port = f'"streamable-http", port={free_port()}'
    text = program("first-steps.md", "notebook.py").replace('"streamable-http"', port)
    defined: dict[str, Any] = {"__name__": "__main__"}
    await eval(compile(text, "notebook.py", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), defined)
    defined["server"].stop()
    await asyncio.to_thread(defined["server"].wait)
    assert f"# '{defined['told']}'" in text


@of_page("data.md")
def test_an_output_formatter_writes_yaml(project: Path) -> None:
    with RawClient([sys.executable, "as_yaml.py"], cwd=project) as client:
        client.initialize()
        (part,) = client.request("tools/call", {"name": "kinds.box"})["result"]["content"]
        (tool, *_) = client.request("tools/list")["result"]["tools"]
    assert yaml.safe_load(part["text"]) == {"size": "s", "items": [{"name": "tea", "price": "4.50 EUR"}]}
    assert "outputSchema" not in tool


@of_page("secrets-and-approval.md")
async def test_a_handler_of_ones_own_decides() -> None:
    result = await executed("secrets-and-approval.md", "office_hours.py").decide(None)
    assert result.status in ("approved", "rejected")


def test_each_program_of_a_page_has_its_test() -> None:
    here = (ROOT / "tests" / "test_guide.py").read_text("utf-8")
    for page, name in PROGRAMS:
        assert name, f"a Python block of {page} without a name"
        assert (page, name) in SERVED or f'"{name}"' in here, (page, name)


# ---- Recipes ----


async def test_the_recipe_for_logs_makes_each_record_a_line(monkeypatch: Monkeypatch, capsys: Capture) -> None:
    (block,) = blocks("operation.md", "json")
    config, logger = json.loads(block.text), logging.getLogger("apcore_mcp.access")
    # Without `dictConfig`, which would change every other test's log.
    make = DictConfigurator(config).configure_formatter
    formatters = {name: make(form) for name, form in config["formatters"].items()}
    forged = logging.makeLogRecord({"msg": "a\nERROR: b", "exc_info": (ValueError, ValueError("a\nERROR: b"), None)})
    record, *below = formatters[config["handlers"]["stderr"]["formatter"]].format(forged).split("\n")
    assert record.endswith(r": a\nERROR: b")
    assert below[-1] == "  ERROR: b"
    assert config["loggers"][logger.name] == {"level": "INFO", "handlers": ["calls"], "propagate": False}
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(formatters[config["handlers"]["calls"]["formatter"]])
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logging.INFO)
    async with connect({"t.echo": echo}, access_log=True, middleware=everybody_is('Zoë "7"')) as client:
        for name, outcome in (("t.echo", "ok"), ("t.none", "MODULE_NOT_FOUND")):
            await client.call_tool(name, {})
            line = json.loads(capsys.readouterr().out)
            assert (line["caller"], line["outcome"]) == ('Zoë "7"', outcome)


def test_the_commands_of_the_recipes_run_as_they_are_written(monkeypatch: Monkeypatch) -> None:
    """Each server lets those who come by its name find their login, which takes its flags."""
    page = PAGES["operation.md"]
    (unit,) = re.findall(r"^ExecStart=\S+ ((?:.+\\\n)+.+)$", page, re.MULTILINE)
    (container,) = re.findall(r"^CMD (\[.+\\\n.+\])$", page, re.MULTILINE)
    checks = re.findall(r"^(?:ExecStartPre=/\S+|RUN python) (.+ --check)$", page, re.MULTILINE)
    (check,) = {re.sub(r"/\S+", str(EXTENSIONS), each) for each in checks}
    subprocess.run([sys.executable, *check.split()], stdout=subprocess.DEVNULL, check=True, timeout=50)
    (told,) = [block.text for block in blocks("callers-and-logins.md", "sh")]
    unit, container, told = (command.replace("\\\n", "") for command in (unit, container, told))
    for words in (unit.split(), json.loads(container)[1:], told.split()[1:]):
        words[words.index("--port") + 1] = "8000"
        words[words.index("--extensions-dir") + 1] = str(EXTENSIONS)
        with serving_what(monkeypatch, ROOT / "examples" / Path(words[0]).name, *words[1:]) as url:
            assert sends_to_a_login(httpx.post(f"{url}/mcp", json={}, headers={"Host": "tools.example.com"}))


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


# ---- What the pages name ----


@pytest.mark.parametrize("page", PAGES)
def test_json_toml_and_yaml_of_a_page_can_be_read(page: str) -> None:
    readers = {"json": json.loads, "toml": tomllib.loads, "yaml": yaml.safe_load}
    for block in BLOCKS[page]:
        if block.language in readers:
            assert readers[block.language](block.text)


def headings(text: str) -> set[str]:
    """What a link to a heading of a page names: `an-upgrade` for "An upgrade"."""
    titles = re.findall(r"^#+ (.+)$", FENCED.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    folder = ROOT if page == "README.md" else GUIDE
    for file, heading in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", FENCED.sub("", PAGES[page])):
        target = (folder / file).resolve() if file else folder / page
        assert target.is_file(), file
        assert not heading or heading in headings(target.read_text("utf-8")), f"{file}#{heading}"


def test_a_page_has_each_public_name() -> None:
    text = "".join(PAGES.values())
    assert [name for name in apcore_mcp.__all__ if name[0] != "_" and not name.isupper() and name not in text] == []


# Of other people's programs.
FOREIGN_FLAGS = set(
    "--add-mcp --against --cli --debug --from --from-openapi --graceful-timeout --issuer --jwt- --method --now --output"
    " --resource --scopes --timeout-graceful-shutdown --unit --with --workers".split()
)


@pytest.fixture
def help_text(monkeypatch: Monkeypatch, capsys: Capture) -> str:
    monkeypatch.setenv("COLUMNS", "300")
    with pytest.raises(SystemExit):
        main(["--help"])
    return capsys.readouterr().out


def test_the_pages_name_only_flags_that_exist(help_text: str) -> None:
    flags = {*re.findall(r"--[a-z][a-z-]+", help_text)} | FOREIGN_FLAGS
    for page, text in PAGES.items():
        for code in re.findall(r"`([^`\n]+)`", FENCED.sub("", text)):
            assert {*re.findall(r"(?<![\w-])--[a-z][a-z-]+", code)} <= flags, (page, code)


def test_the_table_of_flags_is_that_of_the_parser(help_text: str) -> None:
    known = {}
    options = help_text.partition("\noptions:")[2].partition("\n\nEach flag has")[0]
    for flag in re.findall(r"\n  (--(?:(?!\n  --)[^\0])+)", options):
        default = re.search(r"\(default: (.+)\)", flag)
        known[re.split(r"\s\s+", flag)[0]] = default[1] if default else None
    table = PAGES["command-line.md"].partition("| Flag |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = {}
    for row in table:
        _, flag, default, *_ = (cell.strip() for cell in row.split("|"))
        shown[flag.replace("`", "")] = default
    assert [*shown] == [*known]
    for flag, default in known.items():
        assert shown[flag].strip("`") == default if default else "`" not in shown[flag], flag


def test_what_a_change_touches_is_there() -> None:
    page = PAGES["how-it-is-built.md"]
    code = "".join(path.read_text("utf-8") for path in (ROOT / "apcore_mcp").glob("*.py"))
    table = page.partition("| a change |")[2].partition("\n\n")[0]
    for name in re.findall(r"`(\w+)(?:\(\))?`", table):
        assert re.search(rf"\b{name}\b", code), name
    for file in re.findall(r"`([\w/.]+\.py)`", page):
        assert any(ROOT.joinpath(folder, file).is_file() for folder in (".", "apcore_mcp", "tests")), file
