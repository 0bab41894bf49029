"""The command line, `serve()`, `MCPServer` and `async_serve()`, from their start to their end (FR-CLI-*, FR-
SERVER-002 to -006, FR-LOG-*, NFR-REL-001; design "Doors", "Shutdown", "Command line").
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import importlib.metadata
import inspect
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import anyio
import httpx
import pytest
from apcore import APCore, Config, Executor, Middleware, Registry
from conftest import (
    HANDSHAKE,
    MODERN,
    MODULE,
    ROOT,
    Clock,
    FunctionalModule,
    RawClient,
    command,
    connect,
    echo,
    free_port,
    hosting,
    program,
    registry_of,
    serving,
    until,
    with_clock,
)
from mcp.client import Client
from mcp.client.sse import sse_client
from starlette.applications import Starlette
from starlette.routing import Mount
from support import (
    ERAS,
    LOGGER,
    CountingRegistry,
    _run_async_serve,
    answer,
    ended_well,
    entered,
    every_door,
    exported_names,
    followed,
    listed,
    modern,
    run,
    text_of,
    wait_for_stderr,
)

import apcore_mcp
from apcore_mcp import MCP_PROGRESS_KEY, MCPServer, async_serve, discover, from_openai_call, serve, to_openai_tools
from apcore_mcp.__main__ import main

# ---- Servers ----


class Source(Registry):
    """Can be seen to be forgotten."""


def held() -> tuple[int, int]:
    """How many descriptors and threads this process has."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


async def visit(url: str, server: MCPServer, mode: str) -> list[Any]:
    """Stop the server while its client listens and calls; what the client was told until then."""
    told: list[Any] = []
    with contextlib.suppress(Exception):  # what the client makes of a stream that ends is its own affair
        async with asyncio.timeout(15), followed(None, mode, url=url) as (client, _):
            told.append(await listed(client))
            told.append((await client.call_tool("stays", {"a": 1})).structured_content)
            running = asyncio.create_task(client.session.call_tool("waits", {}))
            await asyncio.to_thread(entered.acquire, timeout=10)
            server.stop()
            told.append((await running).structured_content)
    return told


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_servers_that_end_in_the_middle_of_things_leave_nothing() -> None:
    """Each serves a registry of its own, of which nothing is left either."""
    registries: list[weakref.ref[Source]] = []

    async def waits(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        entered.release()
        await asyncio.sleep(0.05)
        return {"waited": True}

    def live(turn: int) -> None:
        registry = Source()
        registries.append(weakref.ref(registry))
        registry.register("stays", FunctionalModule(echo))
        registry.register("waits", FunctionalModule(waits))
        port = free_port()
        server = MCPServer(registry, transport="streamable-http", port=port, explorer=True)
        server.start()
        told = asyncio.run(visit(f"http://127.0.0.1:{port}", server, ERAS[turn % 2]))
        assert told == [["stays", "waits"], {"a": 1}, {"waited": True}]
        server.wait()

    for turn in range(2):  # whatever is imported and cached on first use is no leak
        live(turn)
    before = held()
    for turn in range(4):
        live(turn)
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    until(lambda: gc.collect() is not None and not [1 for registry in registries if registry() is not None])


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_server_that_many_threads_start_and_stop_ends_as_it_was_told_last() -> None:
    server = MCPServer(registry_of({"stays": echo}), transport="streamable-http", port=free_port())
    server.start()
    server.stop()
    server.wait()
    before = held()
    errors: list[BaseException] = []

    def toggle() -> None:
        try:
            for _ in range(10):
                server.start()
                server.stop()
                server.wait()
        except BaseException as error:  # for the test to see
            errors.append(error)

    threads = [threading.Thread(target=toggle, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive(), "start, stop and wait hold each other up"
    server.stop()
    server.wait()
    assert errors == []
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))


async def test_a_call_that_has_ended_leaves_nothing_to_the_garbage_collector(mode: str) -> None:
    """Or each would bring the next collection nearer, which goes through all that the process holds."""
    held: list[weakref.ref[Any]] = []

    async def note(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        held.append(weakref.ref(context.data[MCP_PROGRESS_KEY]))
        return {}

    async with connect({"note": note}, mode=mode) as client:
        gc.collect()
        gc.disable()
        try:
            for _ in range(5):
                await client.call_tool("note")
            assert [reference() for reference in held[:4]] == [None] * 4
        finally:
            gc.enable()


NOISE = """
import os, subprocess

print("noise-print")
os.write(1, b"noise-os\\n")
subprocess.run(["echo", "noise-child"])
"""


@pytest.mark.requirement("FR-CLI-002", "FR-CLI-004", "FR-CLI-008")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(
            ["--extensions-dir", "{tmp}/no"], "extensions directory does not exist: {tmp}/no", id="no-directory"
        ),
        pytest.param(["--extensions-dir", ""], "extensions directory does not exist: ", id="directory-without-a-name"),
        pytest.param(["--extensions-dir", "{tmp}/f"], "extensions path is not a directory: {tmp}/f", id="a-file"),
        pytest.param(["--port", "0"], "port must be between 1 and 65535", id="port-0"),
        pytest.param(["--port", "70000"], "port must be between 1 and 65535", id="port-70000"),
        pytest.param(["--port", "-1"], "port must be between 1 and 65535", id="port-negative"),
        pytest.param(["--name", ""], "server name must not be empty", id="no-name"),
        pytest.param(["--name", "n" * 256], "name must not exceed 255 characters", id="long-name"),
        pytest.param(["--version", ""], "version must not be empty", id="no-version"),
        pytest.param(["--instructions", ""], "instructions must not be empty", id="no-instructions"),
        pytest.param(["--host", ""], "Host must not be empty", id="no-host"),
        pytest.param(
            ["--explorer-prefix", "/mcp"],
            "explorer_prefix must be a path such as '/explorer', and none of "
            "/mcp, /sse, /messages, /health, /metrics; got '/mcp'",
            id="prefix-of-ours",
        ),
        pytest.param(["--prefix", ""], "prefix must not be empty", id="no-prefix"),
        pytest.param(["--tags", "public", ""], "Tag values must not be empty", id="no-tag"),
        pytest.param(
            ["--exclude", ""],
            "exclude must not hold an empty prefix, which would leave out everything",
            id="excludes-all",
        ),
        pytest.param(
            ["--timeout", "-1"], "timeout must be a number of seconds, 0 for no limit; got -1.0", id="timeout"
        ),
        pytest.param(["--timeout", "nan"], "timeout must be a number of seconds, 0 for no limit; got nan", id="nan"),
    ],
)
def test_a_value_that_is_not_allowed_ends_with_status_1_and_says_what_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "ran.py").write_text("open(__file__[:-3], 'w')")
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    status = main(["--extensions-dir", str(tmp_path / "empty"), "--transport", "streamable-http", *arguments])
    printed = capsys.readouterr()
    assert (status, printed.out) == (1, "")
    assert printed.err == f"Error: {message.replace('{tmp}', str(tmp_path))}\n"
    assert not (tmp_path / "empty" / "ran").exists()


@pytest.mark.requirement("FR-CLI-003", "FR-CLI-008")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param([], "required: --extensions-dir", id="no-directory"),
        pytest.param(["--extensions-dir", "."], "", id="fine-but-for-the-rest"),
        pytest.param(
            ["--extensions-dir", ".", "--transport", "websocket"], "invalid choice: 'websocket'", id="transport"
        ),
        pytest.param(["--extensions-dir", ".", "--log-level", "LOUD"], "invalid choice: 'LOUD'", id="log-level"),
        pytest.param(["--extensions-dir", ".", "--port", "abc"], "invalid int value: 'abc'", id="port"),
        pytest.param(["--extensions-dir", ".", "--export", "xml"], "invalid choice: 'xml'", id="export"),
        pytest.param(["--extensions-dir", ".", "--tool-names", "short"], "invalid choice: 'short'", id="tool-names"),
        pytest.param(["--extensions-dir", ".", "--approval", "maybe"], "invalid choice: 'maybe'", id="approval"),
    ],
)
def test_arguments_that_cannot_be_parsed_end_with_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *([] if message else ["--no-such-option"])])
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out) == (2, "")
    assert printed.err.startswith("usage: ")
    assert message in printed.err


@pytest.mark.requirement("FR-CLI-007")
def test_help_lists_every_option_of_serve_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    options = set(inspect.signature(apcore_mcp.serve).parameters) - {
        "registry_or_executor",
        "on_startup",
        "on_shutdown",
        "metrics_collector",
        "middleware",
        "output_formatter",
    }
    flags = {f"--{name.replace('_', '-')}" for name in options}
    flags |= {"--extensions-dir", "--export", "--metrics", "--help"}
    described = {line.split()[0].strip(",") for line in text.splitlines() if line.lstrip().startswith("-")}
    described |= {"--help"} if "-h, --help" in text else set()
    assert flags - described == set()
    for default in ("stdio", "127.0.0.1", "8000", "apcore-mcp", "INFO"):
        assert f"(default: {default})" in " ".join(text.split())
    assert "None" not in text


@pytest.mark.parametrize("arguments", [["--version"], ["--version", "--extensions-dir", "."]])
def test_version_without_one_prints_the_packages(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert (ended.value.code, capsys.readouterr().out) == (0, f"apcore-mcp {apcore_mcp.__version__}\n")


def test_at_a_terminal_the_server_says_what_it_is_for_and_an_export_does_not(
    extensions: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    terminal, stdin = os.openpty()
    arguments = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(extensions)]
    with subprocess.Popen(arguments, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stderr is not None
        assert b"server" in server.stderr.readline()
        while b"server started" not in (line := server.stderr.readline()):
            assert line
        server.send_signal(signal.SIGINT)
        assert server.communicate(timeout=30)[0] == b""
    os.close(terminal)
    os.close(stdin)
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    assert main(["--extensions-dir", str(extensions), "--export", "mcp"]) == 0
    assert capfd.readouterr().err == ""


def test_a_bare_decorator_of_the_wrong_import_is_told_the_right_one(extensions: Path) -> None:
    (extensions / "bare.py").write_text("from apcore import module\n@module\ndef f(a: int) -> int: return a\n")
    ended = run("--extensions-dir", str(extensions), "--export", "mcp", "--prefix", "none")
    assert "bare.py is left out: " in ended.stderr
    assert "from apcore.decorator import module" in ended.stderr


READ_ONLY = "\n    annotations = ModuleAnnotations(readonly=True)\n"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        pytest.param(["--read-only"], ["voice-say"], id="read-only"),
        pytest.param(["--exclude", "voice.s", "nothing"], ["hand-write"], id="exclude"),
        pytest.param(["--exclude", "hand", "voice.sh"], ["voice-say"], id="two"),
        pytest.param(["--exclude", "voice.say", "--read-only"], [], id="both"),
    ],
)
def test_what_is_not_wanted_is_not_listed(
    extensions: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], names: list[str]
) -> None:
    text = "from apcore import ModuleAnnotations\n" + MODULE.format(tag="calm") + READ_ONLY
    (extensions / "voice" / "say.py").write_text(text)
    assert main(["--extensions-dir", str(extensions), "--export", "openai", *arguments]) == 0
    assert sorted(exported_names(capfd.readouterr().out)) == names


@pytest.mark.parametrize(("seconds", "told"), [(0.1, "Module timed out after"), (0, "done")])
async def test_a_call_may_take_as_long_as_the_timeout_says(seconds: float, told: str) -> None:
    async def slow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await asyncio.sleep(60 if seconds else 0.1)
        return {"done": True}

    async with connect({"s.low": slow}, timeout=seconds) as client:
        assert told in text_of(await client.call_tool("s.low"))


def test_the_installed_command_is_the_same_program() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="apcore-mcp")
    assert entry.load() is main


@pytest.mark.requirement("FR-CLI-008")
@pytest.mark.parametrize(
    ("transport", "host"),
    [("streamable-http", "127.0.0.1"), ("sse", "127.0.0.1"), ("streamable-http", "203.0.113.7")],
    ids=["port-in-use", "port-in-use-sse", "not-our-address"],
)
def test_an_address_that_cannot_be_had_ends_with_status_2_and_one_line(
    transport: str, host: str, extensions: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["--extensions-dir", str(extensions), "--transport", transport, "--host", host]
        assert main([*arguments, "--port", str(taken.getsockname()[1])]) == 2
    printed = capfd.readouterr()
    (line,) = printed.err.splitlines()
    assert (line[:7], printed.out, caplog.text) == ("Error: ", "", "")


def test_an_export_is_nothing_but_json_although_the_modules_print(extensions: Path) -> None:
    (extensions / "hand" / "write.py").write_text(NOISE + MODULE.format(tag="calm"))
    ended = run("--extensions-dir", str(extensions), "--export", "mcp")
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(ended.stdout)) == 3
    assert [noise for noise in ("print", "os", "child") if f"noise-{noise}\n" not in ended.stderr] == []


@pytest.mark.parametrize("form", ["mcp", "openai", "openai-strict"])
def test_an_export_is_what_the_server_lists_or_what_to_openai_tools_gives(
    extensions: Path, capfd: pytest.CaptureFixture[str], form: str
) -> None:
    assert main(["--extensions-dir", str(extensions), "--export", form]) == 0
    exported = json.loads(capfd.readouterr().out)
    registry = Registry(extensions_dir=str(extensions))
    registry.discover()
    if form == "mcp":
        with serving(registry) as url:
            listed = httpx.post(f"{url}/mcp", timeout=15, **modern("tools/list"))
        expected = answer(listed)["result"]["tools"]
    else:
        expected = to_openai_tools(registry, strict=form == "openai-strict")
    assert len(expected) == 3
    assert sorted(exported, key=str) == sorted(expected, key=str)


@pytest.mark.requirement("FR-FILTER-001", "FR-FILTER-002", "FR-FILTER-003")
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        pytest.param([], ["hand-write", "voice-say", "voice-shout"], id="all"),
        pytest.param(["--prefix", "voice."], ["voice-say", "voice-shout"], id="prefix"),
        pytest.param(["--tags", "public", "calm"], ["hand-write", "voice-shout"], id="tags"),
        pytest.param(["--tags", "calm", "--prefix", "voice."], ["voice-shout"], id="both"),
        pytest.param(["--tags", "secret"], [], id="none"),
    ],
)
def test_tags_and_prefix_choose_what_is_exported(
    extensions: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], names: list[str]
) -> None:
    assert main(["--extensions-dir", str(extensions), "--export", "openai", *arguments]) == 0
    assert sorted(exported_names(capfd.readouterr().out)) == names


@pytest.mark.requirement("FR-CLI-001", "FR-CLI-003", "FR-CLI-004", "FR-CLI-005")
def test_options_reach_the_server_and_its_start_is_logged() -> None:
    arguments = ["--name", "my tools", "--version", "7.8", "--prefix", "units.", "--tool-names", "portable"]
    with RawClient(command(*arguments, "--log-level", "DEBUG", "--host", "", "--port", "9")) as client:
        assert client.initialize()["result"]["serverInfo"] == {"name": "my tools", "version": "7.8"}
        assert [tool["name"] for tool in client.request("tools/list")["result"]["tools"]] == ["units-convert"]
        client.request("tools/call", {"name": "units-convert", "arguments": {}})
        status, stderr = client.end()
    assert status == 0
    lines = stderr.decode().splitlines()
    assert any(line.endswith("apcore-mcp server started: 1 tool registered, transport=stdio") for line in lines)
    assert any("Tool call: units" in line for line in lines)


@pytest.mark.requirement("FR-CLI-005")
def test_without_options_the_server_has_the_packages_name_and_version_and_logs_no_calls() -> None:
    with RawClient(command()) as client:
        info = client.initialize()["result"]["serverInfo"]
        assert (info["name"], info["version"]) == ("apcore-mcp", apcore_mcp.__version__)
        client.request("tools/call", {"name": "units.convert", "arguments": {"value": 1, "source": "m", "target": "m"}})
        status, stderr = client.end()
    assert status == 0
    assert b"apcore-mcp server started: 16 tools registered, transport=stdio" in stderr
    assert b"Tool call" not in stderr
    assert b"--export" not in stderr, "a hint for who is at a terminal"


@pytest.mark.requirement("FR-CLI-006")
def test_a_log_level_of_warning_hides_the_start_but_not_the_warning_about_an_empty_directory(tmp_path: Path) -> None:
    """FR-SERVER-006; the server works all the same."""
    arguments = [sys.executable, "-m", "apcore_mcp", "--log-level", "WARNING", "--extensions-dir", str(tmp_path)]
    with RawClient(arguments) as client:
        client.initialize()
        assert client.request("tools/list")["result"]["tools"] == []
        status, stderr = client.end()
    assert status == 0
    assert b"No modules registered; server starting with zero tools" in stderr
    assert b"server started" not in stderr


SHAPES = """
from __future__ import annotations
from dataclasses import dataclass
from apcore.decorator import module
from pydantic import BaseModel

@dataclass
class Point:
    x: int
    y: Point | None = None

class Line(BaseModel):
    end: End

class End(BaseModel):
    x: int

@module(id="s.hape")
def shape(x: int) -> dict:
    return vars(Point(Line(end={"x": x}).end.x))
"""


def test_what_is_annotated_may_be_defined_later_in_the_file(extensions: Path) -> None:
    """For standard dataclasses and pydantic models alike, as in any module of Python's."""
    (extensions / "shapes.py").write_text(SHAPES)
    with RawClient([sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(extensions)]) as client:
        client.initialize()
        result = client.request("tools/call", {"name": "s.hape", "arguments": {"x": 1}})["result"]
    assert result["structuredContent"] == {"x": 1, "y": None}


def test_what_a_file_defines_can_be_pickled(extensions: Path) -> None:
    """So a module can give work to other processes."""
    text = "from apcore.decorator import module\nclass Job: pass\n@module(id='a.job')\ndef job() -> str:\n"
    text += "    import pickle\n    return type(pickle.loads(pickle.dumps(Job()))).__name__\n"
    (extensions / "job.py").write_text(text)
    assert Executor(apcore_mcp.discover(extensions)).call("a.job", {}) == {"result": "Job"}


@pytest.mark.parametrize("what", ["stdout = None", "stdout.close()"])
def test_an_export_reaches_its_reader_whatever_a_file_does_with_stdout(extensions: Path, what: str) -> None:
    (extensions / "loud.py").write_text(f"import sys\nsys.{what}\n" + MODULE.format(tag="loud"))
    ended = run("--extensions-dir", str(extensions), "--export", "openai", "--tags", "loud")
    assert ended.returncode == 0, ended.stderr
    assert sorted(exported_names(ended.stdout)) == ["loud", "voice-say"]


def test_a_relative_directory_counts_from_where_the_command_is_run(extensions: Path) -> None:
    ended = run("--extensions-dir", f"./{extensions.name}", "--export", "openai", cwd=extensions.parent)
    assert sorted(exported_names(ended.stdout)) == ["hand-write", "voice-say", "voice-shout"]


def test_a_document_is_printed_whatever_the_terminal_can_say(extensions: Path) -> None:
    text = MODULE.format(tag="calm").replace('"Say it"', '"1 → 2 ≠ 3"; documentation = "\\ud800"')
    (extensions / "hand" / "write.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    ended = run("--extensions-dir", str(extensions), "--export", "markdown", env=environment, encoding="utf-8")
    assert ended.returncode == 0, ended.stderr
    assert "1 → 2 ≠ 3" in ended.stdout


def vendored_copy(below: Path) -> Path:
    """The package as somebody's project has it: `below/anyproject/_vendor/apcore_mcp`."""
    copied = below / "anyproject" / "_vendor" / "apcore_mcp"
    shutil.copytree(Path(apcore_mcp.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
    for package in (copied.parent, copied.parent.parent):
        (package / "__init__.py").touch()
    return copied


@pytest.mark.parametrize(
    ("package", "path"),
    [("apcore_mcp", ["src/", ".", str(ROOT)]), ("anyproject._vendor.apcore_mcp", [])],
    ids=["installed", "vendored"],
)
def test_the_exported_client_entry_starts_this_server_from_anywhere(
    extensions: Path, tmp_path: Path, package: str, path: list[str]
) -> None:
    """With what it finds of the project's own modules here; and nothing of what it will serve is run for that."""
    (extensions / "hand" / "write.py").write_text("open('ran', 'w')\nimport shop, stock\n" + MODULE.format(tag="calm"))
    for name in ("shop.py", "src/stock.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    vendored_copy(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {"PATH": os.environ["PATH"], **({"PYTHONPATH": os.pathsep.join(path)} if path else {})}
    flags = ["--name", "my tools", "--tags", "public", "calm", "--explorer", "--instructions", "-- go on"]
    ended = subprocess.run(
        [sys.executable, "-m", package, "--extensions-dir", extensions.name, *flags, "--export", "client"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (name, entry), *others = json.loads(ended.stdout)["mcpServers"].items()
    assert (name, others, entry["command"]) == ("my tools", [], sys.executable)
    assert entry["args"] == ["-m", package, "--extensions-dir", str(extensions), *flags]
    found = [str(tmp_path), *([str(tmp_path / "src"), str(ROOT)] if path else [])]
    assert entry["env"] == {"PYTHONPATH": os.pathsep.join(found)}
    assert not (tmp_path / "ran").exists()
    environment = {"PATH": os.environ["PATH"], **entry["env"]}
    with RawClient([entry["command"], *entry["args"]], cwd=elsewhere, env=environment) as client:
        assert client.initialize()["result"]["serverInfo"]["name"] == "my tools"
        listed = [tool["name"] for tool in client.request("tools/list")["result"]["tools"]]
    assert listed == (["hand.write"] if path else []) + ["voice.shout"]
    assert ended.stderr.splitlines() == [
        "code --add-mcp " + shlex.quote(json.dumps({"name": name, **entry})),
        f"claude mcp add-json {shlex.quote(name)} " + shlex.quote(json.dumps(entry)),
    ]


@pytest.mark.parametrize(
    ("flags", "entry"),
    [
        (["--port", "9000"], {"type": "http", "url": "http://127.0.0.1:9000/mcp"}),
        (["--transport", "sse", "--host", "::1"], {"type": "sse", "url": "http://[::1]:8000/sse"}),
        (["--host", "0.0.0.0", "--allowed-hosts", "x.org"], {"type": "http", "url": "http://127.0.0.1:8000/mcp"}),
        (["--host", "::"], {"type": "http", "url": "http://[::1]:8000/mcp"}),
    ],
    ids=["streamable-http", "sse", "everywhere", "everywhere-v6"],
)
def test_the_exported_client_entry_of_an_http_server_is_its_address(
    extensions: Path, capfd: pytest.CaptureFixture[str], flags: list[str], entry: dict[str, str]
) -> None:
    arguments = ["--extensions-dir", str(extensions), "--export", "client", "--transport", "streamable-http", *flags]
    assert main(arguments) == 0
    assert json.loads(capfd.readouterr().out) == {"mcpServers": {"apcore-mcp": entry}}


def test_a_client_entry_is_refused_for_what_would_not_start(
    extensions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--extensions-dir", str(extensions), "--export", "client", "--explorer-prefix", "x"]) == 1
    printed = capfd.readouterr()
    assert (printed.out, printed.err[:30]) == ("", "Error: explorer_prefix must be")


def test_a_vendored_copy_runs_without_the_package_it_was_copied_from(extensions: Path, tmp_path: Path) -> None:
    vendored = vendored_copy(tmp_path)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    arguments = ["--extensions-dir", str(extensions)]
    # The installed package cannot be imported here, so an absolute import of it would show.
    code = (
        "import sys; sys.modules['apcore_mcp'] = None\n"
        "import anyproject._vendor.apcore_mcp.__main__ as program\n"
        "print(program.__file__, file=sys.stderr)\n"
        "sys.exit(program.main())"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        cwd=tmp_path, env=environment, timeout=30,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert str(vendored / "__main__.py") in ended.stderr
    assert "apcore-mcp server started: 3 tools registered, transport=stdio" in ended.stderr


@pytest.mark.requirement("FR-CLI-008")
async def test_a_signal_ends_an_http_server_with_status_0_while_a_client_is_connected() -> None:
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        *command("--transport", "streamable-http", "--port", str(port)), stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert server.stderr is not None
    try:
        async with asyncio.timeout(45):
            lines = []
            while "server started" not in "".join(lines):
                lines.append((await server.stderr.readline()).decode())
                assert lines[-1], lines
            url = f"http://127.0.0.1:{port}/mcp"
            with contextlib.suppress(Exception):  # what the client makes of a server that ends is its own affair
                async with Client(url, mode=HANDSHAKE, cache=None, read_timeout_seconds=30) as connected:
                    tools = (await connected.list_tools()).tools
                    server.send_signal(signal.SIGTERM)
                    lines.append((await server.stderr.read()).decode())
                    status = await server.wait()
            log = "".join(lines)
            assert (len(tools), status) == (16, 0), log
            assert "Traceback" not in log
            assert "apcore-mcp server started: 16 tools registered, transport=streamable-http" in log
            assert "deprecated" not in log
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()


INITIALIZE = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "raw", "version": "1"},
    },
}


def handshake(url: str) -> dict[str, Any]:
    """The result of `initialize`, asked with nothing but HTTP."""
    headers = {"Accept": "application/json, text/event-stream"}
    text = httpx.post(f"{url}/mcp", json=INITIALIZE, headers=headers, timeout=15).raise_for_status().text
    assert '"protocolVersion":"2025-11-25"' in text.replace(" ", "")
    return {"text": text}


def assert_free(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.requirement("FR-TRANSPORT-003")
@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
def test_a_port_in_use_is_an_os_error_and_the_server_can_start_later(transport: str) -> None:
    started: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = {"transport": transport, "port": taken.getsockname()[1], "on_startup": lambda: started.append("up")}
        with pytest.raises(OSError, match="in use"):
            serve(registry_of(), **options)
        server = MCPServer(registry_of(), **options)
        with pytest.raises(OSError, match="in use"):
            server.start()
        assert started == []
    server.start()
    server.stop()
    server.wait()
    assert started == ["up"]


@pytest.mark.requirement("FR-SERVER-005")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_blocks_until_a_signal_and_gives_the_handlers_back(number: signal.Signals) -> None:
    """FR-SERVER-005, NFR-REL-001."""
    calls: list[str] = []
    port = free_port()

    def not_handled(*_: object) -> None:
        raise AssertionError("the signal came through")

    before = signal.signal(number, not_handled)

    def on_startup() -> None:
        with socket.create_connection(("127.0.0.1", port), timeout=5):
            calls.append("up")
        os.kill(os.getpid(), number)

    try:
        ended: Any = serve(  # type: ignore[func-returns-value]
            registry_of(),
            transport="streamable-http",
            port=port,
            on_startup=on_startup,
            on_shutdown=lambda: calls.append("down"),
        )
        assert signal.getsignal(number) is not_handled
    finally:
        signal.signal(number, before)
    assert (ended, calls) == (None, ["up", "down"])
    assert_free(port)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_clients_are_answered_inside_both_callbacks(kind: str) -> None:
    """After the server accepts, and before it stops; a sync callback blocks the loop, so it can only connect."""
    port = free_port()
    done: list[str] = []

    def connects(when: str) -> Callable[[], None]:
        def callback() -> None:
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                done.append(when)

        return callback

    def asks(when: str) -> Callable[[], Any]:
        async def callback() -> None:
            await asyncio.to_thread(handshake, f"http://127.0.0.1:{port}")
            done.append(when)

        return callback

    make: Callable[[str], Callable[[], Any]] = connects if kind == "sync" else asks
    with serving(registry_of(), port=port, on_startup=make("up"), on_shutdown=make("down")):
        assert done == ["up"]
    assert done == ["up", "down"]
    assert_free(port)


async def _fail_later() -> None:
    raise LookupError("of the callback")


def _fail() -> None:
    raise LookupError("of the callback")


@pytest.mark.parametrize("callback", [_fail, _fail_later], ids=["sync", "async"])
@every_door
def test_a_failing_on_startup_is_raised_and_leaves_the_port_free(
    door: Callable[..., Any], callback: Callable[[], Any]
) -> None:
    port = free_port()

    def live() -> None:
        server = door(registry_of(), transport="streamable-http", port=port, on_startup=callback)
        server.start()  # only an MCPServer gets here

    with pytest.raises(LookupError, match="of the callback"):
        live()
    assert_free(port)


class Silent(Executor):
    """An Executor that does not say how it works."""

    def governance_state(self) -> Any:
        raise LookupError("of the executor")

    @property
    def current_strategy(self) -> Any:
        raise LookupError("of the executor")


@every_door
@pytest.mark.parametrize("fault", ["on_startup", "executor", "port"])
def test_a_start_that_fails_leaves_nothing_on_the_registry(door: Callable[..., Any], fault: str) -> None:
    if (door, fault) == (_run_async_serve, "port"):
        pytest.skip("it listens on none")
    registry = CountingRegistry()
    source = Silent(registry) if fault == "executor" else Executor(registry)
    before = list(registry.listeners)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
        options |= {"port": taken.getsockname()[1]} if fault == "port" else {}
        options |= {"on_startup": _fail} if fault == "on_startup" else {}

        def live() -> None:
            door(source, **options).start()  # only an MCPServer gets to be started

        with pytest.raises((LookupError, OSError)):
            live()
    assert registry.listeners == before


async def _exit() -> None:
    sys.exit("of the callback")


@pytest.mark.parametrize("callback", [lambda: sys.exit("of the callback"), _exit], ids=["sync", "async"])
def test_an_on_startup_that_exits_ends_the_program_and_no_module_is_blamed(
    callback: Callable[[], Any], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(SystemExit, match="of the callback"):
        serve(registry_of(), transport="streamable-http", port=free_port(), on_startup=callback)
    assert "A module raised" not in caplog.text


def test_a_server_can_be_stopped_from_its_own_on_startup() -> None:
    calls: list[str] = []

    def on_startup() -> None:
        calls.append("up")
        server.stop()

    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
    server = MCPServer(registry_of(), **options, on_startup=on_startup, on_shutdown=lambda: calls.append("down"))
    for _ in range(2):
        server.start()
        server.wait()
    assert calls == ["up", "down"] * 2


def test_a_server_that_is_started_from_its_own_on_startup_starts_all_the_same() -> None:
    server = MCPServer(registry_of(), transport="streamable-http", port=free_port(), on_startup=lambda: server.start())
    starter = threading.Thread(target=server.start, daemon=True)
    starter.start()
    starter.join(timeout=15)
    assert not starter.is_alive()
    server.stop()
    server.wait()


def test_a_server_that_is_stopped_while_it_starts_ends_at_once() -> None:
    """`on_startup` is cancelled, and may clean up; as it did not return, there is nothing to shut down."""
    calls: list[str] = []
    starting = threading.Event()

    async def on_startup() -> None:
        starting.set()
        try:
            await asyncio.sleep(60)
        finally:
            calls.append("cleaned up")

    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
    server = MCPServer(registry_of(), **options, on_startup=on_startup, on_shutdown=lambda: calls.append("down"))
    starter = threading.Thread(target=server.start, daemon=True)
    starter.start()
    assert starting.wait(15)
    server.stop()
    starter.join(timeout=15)
    assert not starter.is_alive()
    server.wait()
    assert calls == ["cleaned up"]


SLOW_START = """
async def on_startup():
    print("starting", file=sys.stderr, flush=True)
    await asyncio.sleep(60)

serve(registry, transport=sys.argv[1], port=int(sys.argv[2]), on_startup=on_startup)
"""


@pytest.mark.parametrize("transport", ["stdio", "streamable-http"])
def test_a_signal_does_not_wait_for_a_slow_on_startup(transport: str) -> None:
    """NFR-REL-001."""
    with RawClient(program(SLOW_START, transport, str(free_port()))) as client:
        wait_for_stderr(client, "starting\n")
        client.process.send_signal(signal.SIGTERM)
        ended_well(client)


@pytest.mark.parametrize("callback", [_fail, _fail_later], ids=["sync", "async"])
def test_a_failing_on_shutdown_is_raised_when_the_server_has_ended(callback: Callable[[], Any]) -> None:
    port = free_port()

    def interrupt() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)  # when this has returned

    with pytest.raises(LookupError, match="of the callback"):
        serve(registry_of(), transport="streamable-http", port=port, on_startup=interrupt, on_shutdown=callback)
    assert_free(port)


REFUSED_START = """
import contextlib, resource
server = MCPServer(registry, transport="streamable-http", port=int(sys.argv[1]))
server.start()
server.stop()
server.wait()
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (40, limits[1]))
files = []
with contextlib.suppress(OSError):
    while True:
        files.append(open(os.devnull))
with contextlib.suppress(OSError):
    server.start()
    print("started without a file to be had")
for file in files:
    file.close()
server.start()
server.stop()
server.wait()
print("started")
"""


def test_a_start_that_the_system_refuses_leaves_a_server_that_can_be_started() -> None:
    done = subprocess.run(
        program(REFUSED_START, str(free_port())), capture_output=True, text=True, timeout=40, check=False
    )
    assert (done.returncode, done.stdout) == (0, "started\n"), done.stderr


def test_starting_twice_changes_nothing_and_stopping_and_waiting_work_from_any_thread() -> None:
    port = free_port()
    started: list[str] = []
    server = MCPServer(registry_of(), transport="streamable-http", port=port, on_startup=lambda: started.append("up"))
    starters = [threading.Thread(target=server.start) for _ in range(4)]
    for thread in starters:
        thread.start()
    for thread in starters:
        thread.join(timeout=20)
    server.start()
    assert started == ["up"]
    handshake(f"http://127.0.0.1:{port}")
    waiters = [threading.Thread(target=server.wait) for _ in range(3)]
    stoppers = [threading.Thread(target=server.stop) for _ in range(3)]
    for thread in (*waiters, *stoppers):
        thread.start()
    for thread in (*waiters, *stoppers):
        thread.join(timeout=20)
        assert not thread.is_alive()
    assert_free(port)


def test_stopping_and_waiting_before_the_start_and_after_the_end_return_at_once() -> None:
    server = MCPServer(registry_of(), transport="streamable-http", port=free_port())
    for _ in range(2):
        server.stop()
        server.wait()
        server.start()
        server.stop()
        server.wait()
    server.stop()
    server.wait()


def test_a_server_restarts_on_its_port_and_leaves_no_thread_and_no_descriptor() -> None:
    port = free_port()

    def call(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"thread": threading.current_thread().name}

    server = MCPServer(registry_of({"t.call": call}), transport="streamable-http", port=port)

    async def use() -> None:
        for mode in (HANDSHAKE, MODERN):
            async with Client(f"http://127.0.0.1:{port}/mcp", mode=mode, cache=None, read_timeout_seconds=15) as client:
                assert (await client.call_tool("t.call", {})).structured_content is not None

    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def live_once() -> None:
        server.start()
        asyncio.run(use())
        server.stop()
        server.wait()

    live_once()  # whatever is imported and cached on first use is no leak
    threads = set(threading.enumerate())
    before = descriptors()
    for _ in range(2):
        live_once()
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=5)
        assert not thread.is_alive(), thread
    assert descriptors() <= before
    assert_free(port)


async def test_a_sync_module_runs_in_a_thread_with_the_context_variables_of_its_call() -> None:
    """As tracing and web frameworks need it: what a middleware sets is set in the module."""
    tenant = contextvars.ContextVar("tenant", default="nobody")

    class Tenant(Middleware):
        def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> None:
            tenant.set(inputs["tenant"])

    def tell(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"tenant": tenant.get(), "in_a_thread": threading.current_thread() is not server_thread}

    executor = Executor(registry_of({"t.tell": tell}))
    executor.use(Tenant())
    async with connect(executor) as client:
        server_thread = next(thread for thread in threading.enumerate() if thread.name == "apcore-mcp")
        for name in ("one", "two"):
            told = (await client.call_tool("t.tell", {"tenant": name})).structured_content
            assert told == {"tenant": name, "in_a_thread": True}
        assert tenant.get() == "nobody"


async def test_a_flood_of_blocking_calls_has_a_bounded_number_of_threads_and_what_waits_too_long_never_runs() -> None:
    """Calls that wait for a thread when their time is over have been answered so, and must not run after that."""
    gate, began = threading.Event(), []

    def block(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        began.append(1)
        gate.wait(30)
        return {}

    registry = registry_of({"t.block": block, "t.echo": echo})
    executor = Executor(registry, config=Config({"executor": {"default_timeout": 1000}}))
    threads = threading.active_count()
    with serving(executor, transport="sse") as url:  # one connection for all answers
        async with Client(sse_client(f"{url}/sse"), mode=HANDSHAKE, cache=None, read_timeout_seconds=30) as client:
            results = await asyncio.gather(*(client.session.call_tool("t.block", {}) for _ in range(300)))
            told = {result.content[0].text for result in results}  # type: ignore[union-attr]
            assert told == {"Module timed out after 1000ms"}
            assert 6 < len(began) <= 256
            assert threading.active_count() - threads < 256 + 20
            before = len(began)
            gate.set()
            await client.call_tool("t.echo", {})  # when all that waited before has left the queue
            assert len(began) == before


async def test_a_running_call_is_answered_before_a_stopped_server_ends() -> None:
    """NFR-REL-001; it ends only after the stop has been asked for."""
    running, gate = threading.Event(), threading.Event()

    async def wait(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.set()
        return {"done": await asyncio.to_thread(gate.wait, 15)}

    server = MCPServer(
        registry_of({"t.wait": wait}), transport="streamable-http", port=(port := free_port()), on_shutdown=gate.set
    )
    server.start()
    try:
        async with Client(f"http://127.0.0.1:{port}/mcp", mode=MODERN, cache=None, read_timeout_seconds=20) as client:
            await client.list_tools()  # the client wants the output schema of what it calls
            call = asyncio.create_task(client.call_tool("t.wait", {}))
            assert await asyncio.to_thread(running.wait, 15)
            server.stop()
            assert (await call).structured_content == {"done": True}
    finally:
        server.stop()
        await asyncio.to_thread(server.wait)


@pytest.mark.requirement("FR-SERVER-004")
@pytest.mark.parametrize(
    ("options", "name", "version"),
    [
        pytest.param({}, "apcore-mcp", apcore_mcp.__version__, id="default"),
        pytest.param({"name": "my tools", "version": "7.8"}, "my tools", "7.8", id="given"),
        pytest.param({"name": "ü" * 255}, "ü" * 255, apcore_mcp.__version__, id="longest-name"),
    ],
)
async def test_clients_are_told_name_and_version(mode: str, options: dict[str, Any], name: str, version: str) -> None:
    """A 2026-07-28 client asks `server/discover` for them."""
    async with connect({}, mode="auto" if mode == MODERN else mode, **options) as client:
        assert client.protocol_version == (MODERN if mode == MODERN else "2025-11-25")
        assert client.server_info is not None
        assert (client.server_info.name, client.server_info.version) == (name, version)


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_agents_are_told_the_servers_instructions(mode: str, transport: str) -> None:
    if transport == "sse" and mode == MODERN:
        pytest.skip("the deprecated transport is of the handshake era")
    for text in ("Ask units.convert.", None):
        with serving(registry_of(), transport=transport, instructions=text) as url:
            server: Any = sse_client(f"{url}/sse") if transport == "sse" else f"{url}/mcp"
            async with Client(server, mode="auto" if mode == MODERN else mode, cache=None) as client:
                assert client.instructions == text


@pytest.mark.requirement("FR-SERVER-006", "FR-LOG-001")
@pytest.mark.parametrize(
    ("modules", "transport", "messages"),
    [
        pytest.param(
            ["a", "b"],
            "Streamable-HTTP",
            [("INFO", "apcore-mcp server started: 2 tools registered, transport=streamable-http, at {url}/mcp")],
            id="two-tools",
        ),
        pytest.param(
            [],
            "sse",
            [
                ("WARNING", "No modules registered; server starting with zero tools"),
                ("WARNING", "SSE transport is deprecated; use streamable-http instead"),
                ("INFO", "apcore-mcp server started: 0 tools registered, transport=sse, at {url}/sse"),
            ],
            id="none-over-sse",
        ),
    ],
)
def test_the_start_is_logged_and_so_is_what_is_unusual_about_it(
    modules: list[str], transport: str, messages: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="apcore_mcp")
    with serving(registry_of({f"t.{name}": echo for name in modules}), transport=transport) as url:
        logged = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == "apcore_mcp"]
    assert sorted((level, text.format(url=url)) for level, text in messages) == sorted(logged)


@pytest.mark.requirement("FR-LOG-004", "NFR-MAINT-004")
@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO], ids=["debug", "info"])
async def test_every_record_is_our_loggers_and_calls_are_logged_at_debug_only(
    level: int, caplog: pytest.LogCaptureFixture
) -> None:
    """FR-LOG-002, -004, -005."""

    def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        raise LookupError("of the module")

    caplog.set_level(logging.DEBUG)
    LOGGER.setLevel(level)
    async with connect({"t.echo": echo, "t.fail": fail}) as client:
        await client.call_tool("t.echo", {})
        assert (await client.call_tool("t.fail", {})).is_error
    package = str(Path(apcore_mcp.__file__).parent)
    ours = [record for record in caplog.records if record.pathname.startswith(package)]
    assert {record.name.split(".")[0] for record in ours} == {"apcore_mcp"}
    assert any(record.levelno == logging.ERROR and "t.fail" in record.getMessage() for record in ours)
    calls = [record.getMessage() for record in ours if record.getMessage().startswith("Tool call: ")]
    assert calls == (["Tool call: t.echo", "Tool call: t.fail"] if level == logging.DEBUG else [])


async def test_serve_in_a_running_loop_points_to_async_serve() -> None:
    with pytest.raises(RuntimeError, match="async_serve"):
        serve(registry_of(), transport="streamable-http", port=free_port())


@contextlib.asynccontextmanager
async def asgi_client(app: Starlette) -> Any:
    """An HTTP client that needs no socket: it calls the app."""
    headers = {"Accept": "application/json, text/event-stream", "MCP-Protocol-Version": "2025-11-25"}
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        yield client


@pytest.mark.parametrize("prefix", ["", "/deep/tools"], ids=["by-itself", "mounted"])
@pytest.mark.parametrize("transport", ["stdio", "streamable-http"])
async def test_async_serve_yields_an_app_that_answers_also_under_a_prefix(prefix: str, transport: str) -> None:
    """Also with the default transport; the outer app runs no lifespan."""
    calls: list[str] = []
    async with asyncio.timeout(30):
        async with async_serve(
            registry_of({"t.echo": echo}),
            transport=transport,
            name="inside",
            on_startup=lambda: calls.append("up"),
            on_shutdown=lambda: calls.append("down"),
        ) as app:
            assert calls == ["up"]
            outer = Starlette(routes=[Mount(prefix, app=app)]) if prefix else app
            async with asgi_client(outer) as client:
                answer = await client.post(f"{prefix}/mcp", json=INITIALIZE)
                assert answer.status_code == 200, answer.text
                assert '"name":"inside"' in answer.text.replace(" ", "")
                session = {"Mcp-Session-Id": answer.headers["Mcp-Session-Id"]}
                initialized = {"jsonrpc": "2.0", "method": "notifications/initialized"}
                assert (await client.post(f"{prefix}/mcp", json=initialized, headers=session)).status_code == 202
                call = {"name": "t.echo", "arguments": {"n": 5}}
                request = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": call}
                answer = await client.post(f"{prefix}/mcp", json=request, headers=session)
                assert '"structuredContent":{"n":5}' in answer.text.replace(" ", "")
                assert (await client.get(f"{prefix}/nothing-here")).status_code == 404
    assert calls == ["up", "down"]


async def test_an_error_in_the_body_of_async_serve_comes_out_as_it_is_and_on_shutdown_is_called() -> None:
    calls: list[str] = []
    with pytest.raises(LookupError, match="of the body"):
        async with async_serve(registry_of(), on_shutdown=lambda: calls.append("down")):
            raise LookupError("of the body")
    assert calls == ["down"]


async def test_two_apps_of_one_registry_live_side_by_side_and_one_after_the_other() -> None:
    registry = registry_of({"t.echo": echo})
    for _ in range(2):
        async with async_serve(registry, name="one") as one, async_serve(registry, name="two") as two:
            for app, name in ((one, "one"), (two, "two")):
                async with asgi_client(app) as client:
                    answer = await client.post("/mcp", json=INITIALIZE)
                    assert f'"name":"{name}"' in answer.text.replace(" ", "")


FORKING = """
import multiprocessing, signal
children = []

@tool
def fork(inputs, context):
    ours, theirs = multiprocessing.Pipe()
    def live(pipe):
        pipe.send("up")
        threading.Event().wait(60)
    child = multiprocessing.get_context("fork").Process(target=live, args=(theirs,), daemon=True)
    child.start()
    children.append(child)
    assert ours.recv() == "up"
    return {"pid": child.pid}

@tool
def terminate(inputs, context):
    child = children.pop()
    os.kill(child.pid, inputs["number"])
    child.join(10)
    return {"exit": child.exitcode}

serve(registry)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_process_that_a_module_forked_ends_by_a_signal_and_with_the_server() -> None:
    with RawClient(program(FORKING)) as client:
        client.initialize()
        for _ in range(3):
            client.request("tools/call", {"name": "t.fork", "arguments": {}})
        for number, expected in ((signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 1)):  # Python's error of Ctrl-C
            told = client.request("tools/call", {"name": "t.terminate", "arguments": {"number": int(number)}})
            assert told["result"]["structuredContent"]["exit"] == expected
        client.process.send_signal(signal.SIGTERM)  # the last child is a daemon: it is terminated and waited for
        assert client.process.wait(20) == 0


def test_a_signal_that_the_embedding_program_handles_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """C code installed its handler, so Python knows none to give back."""
    taken: list[int] = []
    real = signal.getsignal
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGTERM else real(number))
    server_up = threading.Event()

    def on_startup() -> None:
        taken.append(real(signal.SIGTERM) is before)
        server_up.set()
        os.kill(os.getpid(), signal.SIGINT)

    before = real(signal.SIGTERM)
    serve(registry_of(), transport="streamable-http", port=free_port(), on_startup=on_startup)
    assert taken == [True]
    assert real(signal.SIGTERM) is before


@pytest.mark.parametrize("ending", ["plain", "anyio-scope", "task-cancelled", "timeout"])
def test_async_serve_leaves_nothing_in_its_hosts_loop_however_it_ends(ending: str) -> None:
    """Not even the call that runs through the whole grace period, which a clock put forward makes short."""
    with_clock(lambda loop: _end_while_a_call_runs(loop, ending))


async def _end_while_a_call_runs(loop: Clock, ending: str) -> None:
    running, ended, left = asyncio.Event(), asyncio.Event(), []

    async def work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return {}

    downs: list[str] = []

    async def on_shutdown() -> None:
        await asyncio.sleep(0)
        downs.append("down")

    async def host() -> None:
        async with (
            async_serve(registry_of({"work": work}), on_shutdown=on_shutdown) as app,
            asgi_client(app) as client,
        ):
            about: dict[str, Any] = {"io.modelcontextprotocol/protocolVersion": MODERN}
            about |= {"io.modelcontextprotocol/clientInfo": {"name": "x", "version": "1"}}
            about |= {"io.modelcontextprotocol/clientCapabilities": {}}
            params = {"name": "work", "arguments": {}, "_meta": about}
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            headers = {"Accept": "application/json, text/event-stream", "Mcp-Method": "tools/call"}
            headers |= {"Mcp-Name": "work", "MCP-Protocol-Version": MODERN}
            call = asyncio.create_task(client.post("/mcp", json=body, headers=headers))
            left.append(call)
            await running.wait()
            if ending == "plain":
                return
            if ending == "anyio-scope":
                scope.cancel()
            elif ending == "task-cancelled":
                cast(Any, asyncio.current_task()).cancel()
            await asyncio.sleep(60)

    async def end() -> None:
        with scope, contextlib.suppress(TimeoutError, asyncio.CancelledError):
            async with asyncio.timeout(1 if ending == "timeout" else None):
                await asyncio.create_task(host()) if ending == "task-cancelled" else await host()

    scope = anyio.CancelScope()
    before = asyncio.all_tasks()
    whole = asyncio.create_task(end())
    await running.wait()
    while not whole.done():
        await loop.put_forward(0.25)
    await whole
    await asyncio.wait(left)
    assert ended.is_set()
    assert downs == ["down"]
    for _ in range(50):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() - before == set()


async def test_async_serve_may_be_entered_in_one_task_and_left_in_another() -> None:
    """As every fixture of pytest-asyncio is."""
    manager = async_serve(registry_of({"echo": echo}))
    app = await asyncio.create_task(manager.__aenter__())
    async with hosting(app) as url, Client(f"{url}/mcp", cache=None) as client:
        assert (await client.call_tool("echo", {"a": 1})).structured_content == {"a": 1}
    await asyncio.create_task(manager.__aexit__(None, None, None))


async def test_async_serve_that_is_cancelled_while_it_starts_leaves_nothing() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def on_startup() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def host() -> None:
        async with async_serve(registry_of(), on_startup=on_startup):
            raise AssertionError("it has started")

    before = asyncio.all_tasks()
    task = asyncio.create_task(host())
    await begun.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=10)
    assert task.cancelled()
    assert ended.is_set()
    assert asyncio.all_tasks() - before == set()


async def test_apcores_client_is_served_with_its_own_executor_at_every_door() -> None:
    """Or anything else whose `executor` is one (design, "Doors")."""
    application = APCore()
    seen: list[str] = []
    application.use_before(lambda module_id, inputs, context: seen.append(module_id))
    application.register("from.client", registry_of({"x": echo}).get("x"))
    with serving(application) as url:  # type: ignore[arg-type]
        async with Client(f"{url}/mcp", mode=MODERN, cache=None, read_timeout_seconds=30) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["from.client"]
            assert (await client.call_tool("from.client", {"a": 1})).structured_content == {"a": 1}
    assert seen == ["from.client"]
    async with async_serve(application):
        pass
    assert [tool["function"]["name"] for tool in to_openai_tools(application)] == ["from-client"]
    assert from_openai_call(application, "from-client", {"a": 1}) == ("from.client", {"a": 1})


def test_a_timeout_is_not_for_an_executor_that_has_its_own() -> None:
    with pytest.raises(ValueError, match="an Executor brings its own"):
        MCPServer(Executor(Registry()), timeout=60)


def test_a_folder_that_is_none_is_not_discovered(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"extensions directory does not exist: {tmp_path}/none"):
        discover(tmp_path / "none")
    with pytest.raises(ValueError, match=f"extensions path is not a directory: {tmp_path}/file"):
        discover(tmp_path / "file")


@pytest.mark.requirement("FR-SERVER-010")
def test_a_program_without_logging_of_its_own_sees_what_it_asked_for() -> None:
    arguments = program('serve(registry, log_level="INFO")')
    completed = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert b"apcore-mcp server started" in completed.stderr


def test_an_interrupt_while_modules_are_loaded_ends_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "zebra.py").write_text("print('loaded all the same')\n")
    arguments = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(tmp_path)]
    completed = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert completed.returncode != 0
    assert b"loaded all the same" not in completed.stderr
    assert b"server started" not in completed.stderr
