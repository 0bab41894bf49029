"""The command line, `serve()`, `MCPServer` and `async_serve()`, from their start to their end (FR-CLI-*, FR-
SERVER-002 to -006, FR-LOG-*, NFR-REL-001).
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
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from apcore import ACL, ACLRule, APCore, Config, Executor, InvalidInputError, Middleware, Registry
from apcore.observability import MetricsCollector, MetricsMiddleware
from conftest import (
    HANDSHAKE,
    MODULE,
    ROOT,
    Clock,
    FunctionalModule,
    RawClient,
    client_of,
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
from starlette.applications import Starlette
from starlette.middleware import Middleware as ASGIMiddleware
from starlette.routing import Mount
from support import (
    ACCEPT,
    ERAS,
    LOGGER,
    META,
    CountingRegistry,
    Gate,
    answer,
    ended_well,
    entered,
    enveloped,
    every_door,
    exported_names,
    followed,
    initialize_params,
    listed,
    logged,
    message,
    messages_logged,
    modern,
    run,
    text_of,
    wait_for_stderr,
)

import apcore_mcp
from apcore_mcp import MCPServer, async_serve, from_openai_call, serve, to_openai_tools
from apcore_mcp.__main__ import main

# ---- Servers ----


class Source(Registry):
    """Can be seen to be forgotten."""


def held() -> tuple[int, int]:
    """How many descriptors and threads this process has."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


async def visit(url: str, server: MCPServer, mode: str) -> None:
    """Stop the server while its client listens and calls."""
    told: list[Any] = []
    with contextlib.suppress(Exception):  # what the client makes of a stream that ends is its own affair
        async with asyncio.timeout(15), followed(None, mode, url=url) as (client, _):
            told.append(await listed(client))
            running = asyncio.create_task(client.session.call_tool("waits", {}))
            await asyncio.to_thread(entered.acquire, timeout=10)
            server.stop()
            told.append((await running).structured_content)
    assert told == [["waits"], {"waited": True}]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_servers_that_end_in_the_middle_of_things_leave_nothing(recwarn: pytest.WarningsRecorder) -> None:
    """Each serves a registry of its own, of which nothing is left either."""
    registries: list[weakref.ref[Source]] = []

    async def waits(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        entered.release()
        await asyncio.sleep(0.4)  # longer than idle connections are given when a server ends
        return {"waited": True}

    def live(mode: str) -> None:
        registry = Source()
        registries.append(weakref.ref(registry))
        registry.register("waits", FunctionalModule(waits))
        port = free_port()
        server = MCPServer(registry, transport="streamable-http", port=port, explorer=True)
        server.start()
        asyncio.run(visit(f"http://127.0.0.1:{port}", server, mode))
        server.wait()

    for mode in ERAS:  # whatever is imported and cached on first use is no leak
        live(mode)
    before = held()
    recwarn.clear()
    warnings.simplefilter("always")
    for mode in ERAS:
        live(mode)
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))
    until(lambda: gc.collect() is not None and not [1 for registry in registries if registry() is not None])
    assert [warned for warned in recwarn if "unclosed" in str(warned.message)] == []


@pytest.mark.requirement("FR-CLI-002", "FR-CLI-004", "FR-CLI-008")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--extensions-dir", "{tmp}/no"], "extensions directory does not exist: {tmp}/no"),
        (["--extensions-dir", "{tmp}/f"], "extensions path is not a directory: {tmp}/f"),
        (["--port", "0"], "port must be between 1 and 65535"),
        (["--name", "n" * 256], "name must not exceed 255 characters"),
        (["--export", "client", "--prefix", ""], "prefix must not be empty"),
        (["--timeout", "nan"], "timeout must be a number of seconds, 0 for no limit; got nan"),
    ],
    ids=str,
)
def test_a_value_that_is_not_allowed_ends_with_status_1_and_says_what_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "ran.py").write_text("open(__file__[:-3], 'w')")
    arguments = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    status = main(["--extensions-dir", str(tmp_path), "--transport", "streamable-http", *arguments])
    printed = capsys.readouterr()
    assert (status, printed.out) == (1, "")
    assert printed.err == f"Error: {message.replace('{tmp}', str(tmp_path))}\n"
    assert not (tmp_path / "ran").exists()


@pytest.mark.requirement("FR-CLI-003", "FR-CLI-008")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: --extensions-dir"),
        (["--extensions-dir", ".", "--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--extensions-dir", ".", "--transport", "websocket"], "invalid choice: 'websocket'"),
        (["--extensions-dir", ".", "--port", "abc"], "invalid int value: 'abc'"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be_parsed_end_with_status_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    assert (ended.value.code, printed.out, printed.err[:7]) == (2, "", "usage: ")
    assert message in printed.err


@pytest.mark.requirement("FR-CLI-007")
def test_help_lists_every_option_of_serve_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"apcore-mcp {apcore_mcp.__version__}\n")
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    of_python = "registry_or_executor on_startup on_shutdown metrics_collector middleware output_formatter"
    options = inspect.signature(serve).parameters.keys() - of_python.split()
    flags = {f"--{name.replace('_', '-')}" for name in options}
    flags |= {"--extensions-dir", "--export", "--check", "--metrics", "--help"}
    described = {line.split()[0].strip(",") for line in text.splitlines() if line.lstrip().startswith("-")}
    described |= {"--help"} if "-h, --help" in text else set()
    assert flags - described == set()
    for default in ("stdio", "127.0.0.1", "8000", "apcore-mcp", "INFO"):
        assert f"(default: {default})" in " ".join(text.split())
    assert "None" not in text


def test_at_a_terminal_the_server_says_what_it_is_for_and_an_export_does_not(
    extensions: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    terminal, stdin = os.openpty()
    with RawClient(command(), stdin=stdin) as server:
        assert "A client has to start this server" in wait_for_stderr(server, "server started")
        server.process.send_signal(signal.SIGINT)
        ended_well(server)
        assert server.process.stdout is not None
        assert server.process.stdout.read() == b""
    os.close(terminal)
    os.close(stdin)
    monkeypatch.setattr(os, "isatty", lambda descriptor: True)
    assert main(["--extensions-dir", str(extensions), "--export", "mcp"]) == 0
    assert capfd.readouterr().err == ""


@pytest.mark.requirement("FR-FILTER-001", "FR-FILTER-002", "FR-FILTER-003")
@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("--prefix voice.", ["voice-say", "voice-shout"]),
        ("--tags public calm", ["hand-write", "voice-say"]),
        ("--tags calm --prefix voice.", ["voice-say"]),
        ("--read-only", ["voice-say"]),
        ("--exclude hand voice.sh", ["voice-say"]),
    ],
)
def test_what_is_wanted_is_listed_and_nothing_else(
    extensions: Path, capfd: pytest.CaptureFixture[str], arguments: str, names: list[str]
) -> None:
    read_only = "\n    annotations = ModuleAnnotations(readonly=True)\n"
    text = "from apcore import ModuleAnnotations\n" + MODULE.format(tag="calm") + read_only
    (extensions / "voice" / "say.py").write_text(text)
    (extensions / "voice" / "shout.py").write_text(MODULE.format(tag="loud"))
    assert main(["--extensions-dir", str(extensions), "--export", "openai", *arguments.split()]) == 0
    assert sorted(exported_names(capfd.readouterr().out)) == names


async def test_a_call_may_take_as_long_as_the_timeout_says() -> None:
    """Whatever its module declares."""

    async def slow(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await asyncio.sleep(inputs["seconds"])
        return {"done": True}

    modules = {"slow": slow, "declared": FunctionalModule(slow, resources={"timeout": 60_000})}
    for timeout, seconds, told in ((0.1, 60, "timed out"), (0, 0.1, "done")):
        async with connect(modules, timeout=timeout) as client:
            for name in modules:
                assert told in text_of(await client.call_tool(name, {"seconds": seconds}))


def test_the_installed_command_is_the_same_program() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="apcore-mcp")
    assert entry.load() is main


@pytest.mark.requirement("FR-CLI-008")
@pytest.mark.parametrize(("transport", "host"), [("sse", "127.0.0.1"), ("streamable-http", "203.0.113.7")])
def test_an_address_that_cannot_be_had_ends_with_status_2_and_one_line(
    transport: str, host: str, extensions: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """A port in use, and an address of another machine."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["--extensions-dir", str(extensions), "--transport", transport, "--host", host]
        assert main([*arguments, "--port", str(taken.getsockname()[1])]) == 2
    printed = capfd.readouterr()
    (line,) = printed.err.splitlines()
    assert (line[:7], printed.out, caplog.text) == ("Error: ", "", "")


def test_an_export_and_a_check_are_nothing_else_although_the_modules_print(extensions: Path) -> None:
    noise = "import os, subprocess\nprint('by print')\nos.write(1, b'by os\\n')\nsubprocess.run(['echo', 'by child'])\n"
    (extensions / "hand" / "write.py").write_text(noise + MODULE.format(tag="calm"))
    ended = run("--extensions-dir", str(extensions), "--export", "mcp")
    assert len(json.loads(ended.stdout)) == 3, ended.stderr
    assert {"by print", "by os", "by child"} <= {*ended.stderr.splitlines()}
    ended = run("--extensions-dir", str(extensions), "--check", "--prefix", "hand")
    assert (ended.stdout, ended.returncode) == ("hand.write\n1 tool would be served, 0 left out\n", 0)


@pytest.mark.parametrize("form", ["openai", "openai-strict"])
def test_an_export_for_openai_is_what_to_openai_tools_gives(
    extensions: Path, capfd: pytest.CaptureFixture[str], form: str
) -> None:
    registry = Registry(extensions_dir=str(extensions))
    assert registry.discover() == 3
    assert main(["--extensions-dir", str(extensions), "--export", form]) == 0
    assert json.loads(capfd.readouterr().out) == to_openai_tools(registry, strict=form == "openai-strict")


@pytest.mark.requirement("FR-CLI-001", "FR-CLI-003", "FR-CLI-004", "FR-CLI-005", "FR-SERVER-004")
def test_options_reach_the_server_and_its_start_is_logged() -> None:
    arguments = ["--name", "ü" * 255, "--version", "7.8", "--prefix", "units.", "--tool-names", "portable"]
    arguments += ["--instructions", "Ask.", "--log-level", "DEBUG", "--host", "", "--port", "9"]
    with RawClient(command(*arguments)) as client:
        told = client.initialize()["result"]
        assert (told["serverInfo"], told["instructions"]) == ({"name": "ü" * 255, "version": "7.8"}, "Ask.")
        assert [tool["name"] for tool in client.request("tools/list")["result"]["tools"]] == ["units-convert"]
        client.request("tools/call", {"name": "units-convert", "arguments": {}})
        status, stderr = client.end()
    assert status == 0
    lines = stderr.decode().splitlines()
    assert any(line.endswith("apcore-mcp server started: 1 tool registered, transport=stdio") for line in lines)
    assert any("Tool call: units" in line for line in lines)
    assert b"--export" not in stderr, "a hint for who is at a terminal"


@pytest.mark.requirement("FR-CLI-005", "FR-CLI-006")
def test_a_log_level_of_warning_hides_the_start_but_not_the_warning_about_an_empty_directory(tmp_path: Path) -> None:
    """FR-SERVER-006; the server works all the same, under the package's name and version."""
    options = ["--log-level", "WARNING", "--extensions-dir", str(tmp_path), "--instructions", "Ask."]
    with RawClient(command(*options)) as client:  # of 2026-07-28
        told = client.request("server/discover", enveloped({}))["result"]
        info = told["_meta"][META + "serverInfo"]
        assert (info["name"], info["version"]) == ("apcore-mcp", apcore_mcp.__version__)
        assert told["instructions"] == "Ask."
        assert client.request("tools/list", enveloped({}))["result"]["tools"] == []
        status, stderr = client.end()
    warning = "WARNING: No modules registered; server starting with zero tools"
    assert status == 0
    assert re.fullmatch(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}} {warning}\n", stderr.decode())


@pytest.mark.parametrize(
    ("package", "path"),
    [("apcore_mcp", ["src/", ".", str(ROOT)]), ("anyproject._vendor.apcore_mcp", [])],
    ids=["installed", "vendored"],
)
def test_the_exported_client_entry_starts_this_server_from_anywhere(
    extensions: Path, tmp_path: Path, package: str, path: list[str]
) -> None:
    """With what it finds of the project's own modules here."""
    (extensions / "hand" / "write.py").write_text("import shop, stock\n" + MODULE.format(tag="calm"))
    for name in ("shop.py", "src/stock.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    if not path:  # as somebody's project has it, where by its own name there is something else
        copied = tmp_path / "anyproject" / "_vendor" / "apcore_mcp"  # these folders need no `__init__.py`
        shutil.copytree(Path(apcore_mcp.__file__).parent, copied, ignore=shutil.ignore_patterns("__pycache__"))
        (tmp_path / "apcore_mcp.py").write_text("raise AssertionError('imported by its own name')")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    flags = ["--name", "my tools", "--tags", "public", "calm", "--explorer", "--instructions", "-- go on"]
    asked = [sys.executable, "-m", package, "--extensions-dir", extensions.name, *flags, "--export", "client"]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(path)}
    ended = subprocess.run(asked, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert ended.returncode == 0, ended.stderr
    (name, entry), *others = json.loads(ended.stdout)["mcpServers"].items()
    assert (name, others, entry["command"]) == ("my tools", [], sys.executable)
    assert entry["args"] == ["-m", package, "--extensions-dir", str(extensions), *flags]
    found = [str(tmp_path), *([str(tmp_path / "src"), str(ROOT)] if path else [])]
    assert entry["env"] == {"PYTHONPATH": os.pathsep.join(found)}
    environment = {"PATH": os.environ["PATH"], **entry["env"]}
    with RawClient([entry["command"], *entry["args"]], cwd=elsewhere, env=environment) as client:
        assert client.initialize()["result"]["serverInfo"]["name"] == "my tools"
        listed = [tool["name"] for tool in client.request("tools/list")["result"]["tools"]]
    assert listed == (["hand.write"] if path else []) + ["voice.shout"]
    assert [line for line in ended.stderr.splitlines() if "write.py is left out" not in line] == [
        "code --add-mcp " + shlex.quote(json.dumps({"name": name, **entry})),
        f"claude mcp add-json {shlex.quote(name)} " + shlex.quote(json.dumps(entry)),
    ]


@pytest.mark.parametrize(
    ("flags", "kind", "url"),
    [
        ("streamable-http --port 9000", "http", "http://127.0.0.1:9000/mcp"),
        ("sse --host ::1", "sse", "http://[::1]:8000/sse"),
        ("streamable-http --host 0.0.0.0 --allowed-hosts x.org", "http", "http://127.0.0.1:8000/mcp"),
    ],
)
def test_the_exported_client_entry_of_an_http_server_is_its_address(
    extensions: Path, capfd: pytest.CaptureFixture[str], flags: str, kind: str, url: str
) -> None:
    arguments = ["--extensions-dir", str(extensions), "--export", "client", "--transport", *flags.split()]
    assert main(arguments) == 0
    assert json.loads(capfd.readouterr().out) == {"mcpServers": {"apcore-mcp": {"type": kind, "url": url}}}


@pytest.mark.parametrize("flag", ["--state-key KEY", "--state-key=KEY", "--state-k KEY"])
def test_an_exported_client_entry_has_no_secret(extensions: Path, capfd: pytest.CaptureFixture[str], flag: str) -> None:
    """It is pasted into files, and what it starts stands in the list of processes."""
    secret = "hush" * 8
    flags = ["--stateless", *flag.replace("KEY", secret).split()]
    assert main(["--extensions-dir", str(extensions), "--export", "client", *flags]) == 0
    out, err = capfd.readouterr()
    assert "hush" not in out + err
    assert json.loads(out)["mcpServers"]["apcore-mcp"]["args"][-1] == "--stateless"


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        ("", []),
        ("--prefix none", ["All registered modules (3) are left out by prefix"]),
        ("--tags no --read-only", ["All registered modules (3) are left out by tags, read_only"]),
    ],
)
def test_an_exported_client_entry_warns_of_what_its_server_would_lack(
    extensions: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    flags: str,
    reasons: list[str],
) -> None:
    (extensions / "broken.py").write_text("def broken(:")
    assert main(["--extensions-dir", str(extensions), "--export", "client", *flags.split()]) == 0
    assert "mcpServers" in json.loads(capfd.readouterr().out)
    (level, broken), *others = lines_logged(caplog)
    assert level == "WARNING"
    assert broken.startswith(f"{extensions / 'broken.py'} is left out: SyntaxError: ")
    assert others == [("WARNING", reason) for reason in reasons]


NO_OBJECT = MODULE.format(tag="x") + "    input_schema = {'type': 'string'}\n"


@pytest.mark.parametrize(
    ("files", "flags", "status", "served", "warning"),
    [
        ({}, "", 0, ["hand.write", "voice.say", "voice.shout"], None),
        ({"help.py": "def help(): pass\n"}, "--tags calm", 0, ["hand.write", "voice.shout"], None),
        ({}, "--tool-names portable --prefix v --exclude voice.shout", 0, ["voice-say"], None),
        ({"no.py": "def broken(:"}, "--prefix v", 1, ["voice.say", "voice.shout"], "no.py is left out: SyntaxError"),
        ({"no.py": "def broken(:"}, "--prefix v --log-level ERROR", 1, ["voice.say", "voice.shout"], None),
        ({"hand/write.py": NO_OBJECT}, "", 1, ["voice.say", "voice.shout"], "Module hand.write is left out: "),
        ({}, "--prefix none", 1, [], "All registered modules (3) are left out by prefix"),
        (dict.fromkeys(("voice/say.py", "voice/shout.py", "hand/write.py"), ""), "", 1, [], "No modules registered"),
    ],
    ids=["fine", "helper", "flags", "file", "quiet", "module", "filters", "nothing"],
)
def test_a_check_lists_what_would_be_served_and_fails_when_that_lacks_something(
    extensions: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    files: dict[str, str],
    flags: str,
    status: int,
    served: list[str],
    warning: str | None,
) -> None:
    for name, text in files.items():
        (extensions / name).write_text(text)
    assert main(["--extensions-dir", str(extensions), "--check", *flags.split()]) == status
    count = 1 if status and served else 0
    tools = "1 tool" if len(served) == 1 else f"{len(served)} tools"
    assert capfd.readouterr().out.splitlines() == [*served, f"{tools} would be served, {count} left out"]
    told = messages_logged(caplog)
    assert len(told) == (0 if warning is None else 1), told
    assert warning is None or warning in told[0]


def test_a_check_is_of_the_options_too_and_is_no_export(extensions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--extensions-dir", str(extensions), "--check"]
    assert main([*arguments, "--explorer-prefix", "explorer"]) == 1
    assert capfd.readouterr().err.startswith("Error: explorer_prefix must be")
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--export", "mcp"])
    assert ended.value.code == 2


INITIALIZE = message("initialize", initialize_params("2025-11-25"))


def handshake(url: str) -> dict[str, Any]:
    """The result of `initialize`, asked with nothing but HTTP."""
    told = answer(httpx.post(f"{url}/mcp", json=INITIALIZE, headers=ACCEPT, timeout=15).raise_for_status())
    assert told["result"]["protocolVersion"] == "2025-11-25"
    return told


def assert_free(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        pass


@pytest.mark.requirement("FR-TRANSPORT-003")
def test_a_port_in_use_is_an_os_error_and_the_server_can_start_later() -> None:
    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
    server = MCPServer(registry_of(), **options)
    with socket.create_server(("127.0.0.1", options["port"])):
        with pytest.raises(OSError, match="in use"):
            serve(registry_of(), **options)
        with pytest.raises(OSError, match="in use"):
            server.start()
    server.start()
    server.stop()
    server.wait()


@pytest.mark.requirement("FR-SERVER-005")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_blocks_until_a_signal_and_gives_the_handlers_back(number: signal.Signals) -> None:
    """FR-SERVER-005, NFR-REL-001; a second one ends the process, also while `on_shutdown` takes its time."""
    calls: list[Any] = []
    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
    options["on_startup"] = lambda: calls.append(signal.raise_signal(number))
    options["on_shutdown"] = lambda: calls.append(signal.getsignal(number))

    def not_handled(*_: object) -> None:
        raise AssertionError("the signal came through")

    before = signal.signal(number, not_handled)
    try:
        calls.append(serve(registry_of(), **options))  # type: ignore[func-returns-value]
        assert signal.getsignal(number) is not_handled
    finally:
        signal.signal(number, before)
    assert calls == [None, signal.SIG_DFL, None]
    assert_free(options["port"])


def test_clients_are_answered_inside_both_callbacks() -> None:
    """After the server accepts, and before it stops."""
    port = free_port()
    done: list[str] = []

    async def callback() -> None:
        await asyncio.to_thread(handshake, f"http://127.0.0.1:{port}")
        done.append("answered")

    with serving(registry_of(), port=port, on_startup=callback, on_shutdown=callback):
        assert done == ["answered"]
    assert done == ["answered"] * 2
    assert_free(port)


def _fail() -> None:
    raise LookupError("of the callback")


@every_door
def test_a_start_that_fails_is_told_and_leaves_the_port_free_and_nothing_on_the_registry(
    door: Callable[..., Any],
) -> None:
    registry = CountingRegistry()
    before = list(registry.listeners)
    port = free_port()

    def live() -> None:
        server = door(registry, transport="streamable-http", port=port, on_startup=_fail)
        server.start()  # only an MCPServer gets here

    with pytest.raises(LookupError, match="of the callback"):
        live()
    assert registry.listeners == before
    assert_free(port)
    with socket.create_server(("127.0.0.1", port)), pytest.raises((OSError, LookupError)):
        live()
    assert registry.listeners == before


def test_what_a_callback_raises_comes_out_of_serve_when_the_server_has_ended() -> None:
    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port()}
    with pytest.raises(SystemExit, match="of the callback"):
        serve(registry_of(), **options, on_startup=lambda: sys.exit("of the callback"))
    with pytest.raises(LookupError, match="of the callback"):
        serve(registry_of(), **options, on_startup=lambda: signal.raise_signal(signal.SIGINT), on_shutdown=_fail)
    assert_free(options["port"])


def in_threads(*calls: Callable[[], None]) -> None:
    threads = [threading.Thread(target=call, daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()


def test_a_server_starts_once_and_restarts_and_can_be_told_from_any_thread() -> None:
    """Whether its end was waited for or not; stopping and waiting return at once when there is nothing to end."""
    started: list[str] = []
    port = free_port()
    server = MCPServer(registry_of(), transport="streamable-http", port=port, on_startup=lambda: started.append("up"))
    server.stop()
    server.wait()
    for life in (1, 2, 3):
        in_threads(server.start)
        server.start()
        assert len(started) == life
        handshake(f"http://127.0.0.1:{port}")
        in_threads(*[server.stop] * 3, *[server.wait] * 3 * (life - 1))
    server.stop()
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
        assert server_thread.daemon, "it would keep the program it serves"
        for name in ("one", "two"):
            told = (await client.call_tool("t.tell", {"tenant": name})).structured_content
            assert told == {"tenant": name, "in_a_thread": True}
        assert tenant.get() == "nobody"


async def test_a_flood_of_blocking_calls_has_a_bounded_number_of_threads_and_what_waits_too_long_never_runs() -> None:
    """Calls that wait for a thread when their time is over have been answered so, and must not run after that."""
    gate = threading.Event()
    began: list[bool] = []

    def block(inputs: dict[str, Any], context: Any) -> Any:
        began.append(gate.wait(30))

    executor = Executor(registry_of({"block": block}), config=Config({"executor": {"default_timeout": 400}}))
    threads = threading.active_count()
    with serving(executor, transport="sse") as url:  # one connection for all answers
        async with client_of(f"{url}/sse", HANDSHAKE) as client:
            results = await asyncio.gather(*(client.session.call_tool("block", {}) for _ in range(300)))
            assert {text_of(result) for result in results} == {"Module timed out after 400ms"}
            running = threading.active_count() - threads
            assert 6 < running < 256 + 20
            gate.set()
            await client.call_tool("block", {})  # when all that waited before has left the queue
            until(lambda: threading.active_count() - threads <= running)
            assert len(began) <= 256 + 1


@pytest.mark.parametrize(("mounted", "count"), [(False, 256), (True, 40)], ids=["serve", "async_serve"])
async def test_modules_that_are_stuck_in_their_threads_withhold_nobodys_error(mounted: bool, count: int) -> None:
    """apcore runs the hooks of middleware in threads of the loop; a host's may have as few as five."""
    gate = Gate()

    def stuck(inputs: dict[str, Any], context: Any) -> Any:
        gate.enter()

    async def fails(inputs: dict[str, Any], context: Any) -> Any:
        raise InvalidInputError("No item 7")

    executor = Executor(registry_of({"stuck": stuck, "fails": fails}))
    executor.use(MetricsMiddleware(MetricsCollector()))
    async with contextlib.AsyncExitStack() as closing:
        closing.callback(gate.open)
        if mounted:
            app = await closing.enter_async_context(async_serve(executor, transport="sse"))
            url = await closing.enter_async_context(hosting(app))
        else:
            url = closing.enter_context(serving(executor, transport="sse"))  # one connection for all answers
        connecting = client_of(f"{url}/sse", HANDSHAKE)
        client = await closing.enter_async_context(connecting)
        calls = [asyncio.create_task(client.session.call_tool("stuck", {})) for _ in range(count)]
        await gate.entered(count)
        async with asyncio.timeout(20):
            assert text_of(await client.call_tool("fails", {})) == "Invalid input: No item 7"
        assert not any(call.done() for call in calls)
        gate.open()
        await asyncio.gather(*calls)


async def test_sync_modules_that_have_taken_all_threads_can_call_others() -> None:
    all_run = threading.Barrier(256)

    def outer(inputs: dict[str, Any], context: Any) -> Any:
        all_run.wait(20)
        return context.executor.call("inner", {}, context)

    with serving(registry_of({"outer": outer, "inner": echo}), transport="sse") as url:  # one connection for all
        async with client_of(f"{url}/sse", HANDSHAKE) as client:
            results = await asyncio.gather(*(client.session.call_tool("outer", {}) for _ in range(256)))
    assert {text_of(result) for result in results} == {"{}"}


@pytest.mark.requirement("FR-SERVER-006", "FR-LOG-001")
def test_the_start_is_logged_and_so_is_what_is_unusual_about_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="apcore_mcp")
    with serving(registry_of({"t.a": echo, "t.b": echo}), transport="Streamable-HTTP", explorer=True) as url:
        started = "apcore-mcp server started: 2 tools registered, transport=streamable-http, at "
        assert lines_logged(caplog) == [("INFO", f"{started}{url}/mcp, explorer at {url}/explorer/")]
    caplog.clear()
    with serving(registry_of(), transport="sse") as url:
        assert lines_logged(caplog) == [
            ("WARNING", "No modules registered; server starting with zero tools"),
            ("WARNING", "SSE transport is deprecated; use streamable-http instead"),
            ("INFO", f"apcore-mcp server started: 0 tools registered, transport=sse, at {url}/sse"),
        ]


@pytest.mark.requirement("FR-SERVER-006")
def test_a_start_with_zero_tools_says_what_leaves_them_out(caplog: pytest.LogCaptureFixture) -> None:
    """Where a caller may be known, the ACL decides for each."""
    registry = registry_of({"t.a": echo, "t.b": echo})
    staff = ACLRule(callers=["@external"], targets=["*"], effect="allow", conditions={"roles": ["staff"]})
    closed = Executor(registry, acl=ACL([staff], default_effect="deny"))
    odd = registry_of({"t.odd": FunctionalModule(echo, input_schema={"type": "string"})})
    nothing = "; server starting with zero tools"
    middleware = [ASGIMiddleware(lambda app: app)]
    for source, options, expected in (
        (registry, {"prefix": "x", "exclude": ["t.a"]}, ["All registered modules (2) are left out by prefix, exclude"]),
        (odd, {}, ["Module t.odd is left out: ", "All registered modules (1) are left out by the faults above"]),
        (closed, {}, ["The ACL leaves out all modules, for callers without an identity"]),
        (closed, {"middleware": middleware}, []),
        (closed, {"prefix": "x"}, ["All registered modules (2) are left out by prefix"]),
    ):
        caplog.clear()
        with serving(source, **options):
            pass
        told = messages_logged(caplog)
        assert len(told) == len(expected), told
        assert all(text.startswith(start) for text, start in zip(told, expected, strict=True)), told
        assert not told or told[-1].endswith(nothing)


def test_more_tools_than_clients_take_are_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """At a start and by `to_openai_tools`, from 129 on."""
    caplog.set_level(logging.INFO, logger="apcore_mcp")
    registry = registry_of({f"t.m{number}": echo for number in range(128)})
    for expected in (0, 1):
        caplog.clear()
        with serving(registry):
            to_openai_tools(registry)
        lines = [text for text in messages_logged(caplog, logging.INFO) if "OpenAI" in text]
        assert len(lines) == 2 * expected
        assert all(text.startswith("129 tools: ") for text in lines)
        assert all(option in text for text in lines for option in ("tags", "prefix", "exclude", "read_only", "search"))
        caplog.clear()
        with serving(registry, search=True):
            to_openai_tools(registry, search=True)
        assert not [text for text in messages_logged(caplog, logging.INFO) if "OpenAI" in text]
        if not expected:
            registry.register("t.last", FunctionalModule(echo))


def lines_logged(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in logged(caplog)]


@pytest.mark.requirement("FR-LOG-004", "NFR-MAINT-004")
async def test_every_record_is_our_loggers_and_calls_are_logged_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    """FR-LOG-002, -004, -005."""

    def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        raise LookupError("of the module")

    caplog.set_level(logging.DEBUG)
    package = str(Path(apcore_mcp.__file__).parent)
    async with connect({"t.echo": echo, "t.fail": fail}) as client:
        for level in (logging.DEBUG, logging.INFO):
            LOGGER.setLevel(level)
            caplog.clear()
            await client.call_tool("t.echo", {})
            assert (await client.call_tool("t.fail", {})).is_error
            ours = [record for record in caplog.records if record.pathname.startswith(package)]
            assert {record.name.split(".")[0] for record in ours} == {"apcore_mcp"}
            assert any(record.levelno == logging.ERROR and "t.fail" in record.getMessage() for record in ours)
            calls = [record.getMessage() for record in ours if record.getMessage().startswith("Tool call: ")]
            assert calls == (["Tool call: t.echo", "Tool call: t.fail"] if level == logging.DEBUG else [])


async def test_serve_in_a_running_loop_points_to_async_serve() -> None:
    """Where an address counts; `serve()` may run in another thread, where nobody can handle a signal."""
    with pytest.raises(ValueError, match="Port must"):
        await async_serve(registry_of(), port=0).__aenter__()
    options: dict[str, Any] = {"transport": "streamable-http", "port": free_port(), "on_startup": _fail}
    with pytest.raises(RuntimeError, match="async_serve"):
        serve(registry_of(), **options)
    with pytest.raises(LookupError, match="of the callback"):
        await asyncio.to_thread(serve, registry_of(), **options)


def asgi_client(app: Starlette) -> httpx.AsyncClient:
    """An HTTP client that needs no socket: it calls the app."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


@pytest.mark.parametrize(
    ("prefix", "transport"), [("", "stdio"), ("/deep/tools", "streamable-http")], ids=["by-itself", "mounted"]
)
async def test_async_serve_yields_an_app_that_answers_also_under_a_prefix(prefix: str, transport: str) -> None:
    """Also with the default transport; the outer app runs no lifespan. An error of the body comes out as it is."""
    calls: list[str] = []
    options: Any = {"on_startup": lambda: calls.append("up"), "on_shutdown": lambda: calls.append("down")}

    async def host() -> None:
        async with async_serve(registry_of({"t.echo": echo}), transport=transport, **options) as app:
            assert calls == ["up"]
            async with asgi_client(Starlette(routes=[Mount(prefix, app=app)]) if prefix else app) as client:
                told = await client.post(f"{prefix}/mcp", **modern("tools/call", {"name": "t.echo"}))
                assert answer(told)["result"]["structuredContent"] == {}
                assert (await client.get(f"{prefix}/nothing-here")).status_code == 404
            _fail()

    with pytest.raises(LookupError, match="of the callback"):
        await host()
    assert calls == ["up", "down"]


LEAVING = """
import contextlib, multiprocessing

@tool
def fork(inputs, context):
    ours, theirs = multiprocessing.Pipe()
    def live():
        theirs.send("up")
        while True:
            pass
    child = multiprocessing.get_context("fork").Process(target=live, daemon=True)
    child.start()
    assert ours.recv() == "up"
    if inputs["ends"]:
        child.terminate()
        child.join(10)
    return {"exit": child.exitcode}

async def deaf():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)

async def tidy():
    try:
        await asyncio.sleep(3600)
    finally:
        print("tidied up", file=sys.stderr)
        raise LookupError("of the module")

@tool
async def leave(inputs, context):
    for each in (deaf(), tidy(), asyncio.to_thread(time.sleep, 3600)):
        asyncio.create_task(each)
    return {}

@tool
async def exit(inputs, context):
    sys.exit(3)

serve(registry)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_neither_an_exit_of_a_module_nor_what_it_leaves_ends_or_keeps_the_server() -> None:
    """Tasks, threads and processes that it forked, which end by a signal."""
    with RawClient(program(LEAVING)) as client:
        client.initialize()
        assert client.request("tools/call", {"name": "t.exit"})["result"]["isError"]
        forked = client.request("tools/call", {"name": "t.fork", "arguments": {"ends": True}})
        assert forked["result"]["structuredContent"]["exit"] == -signal.SIGTERM
        client.request("tools/call", {"name": "t.fork", "arguments": {"ends": False}})
        assert not client.request("tools/call", {"name": "t.leave"})["result"]["isError"]
        client.process.send_signal(signal.SIGTERM)  # the last child is a daemon: it is terminated and waited for
        wait_for_stderr(client, "tidied up")
        ended_well(client)


SERVED_BY_A_CHILD = """
import urllib.request

@tool
def echo(inputs, context):
    return inputs

port = int(sys.argv[1])
server = MCPServer(registry, transport="streamable-http", port=port, explorer=True, allow_execute=True)
server.start()
url = f"http://127.0.0.1:{port}/explorer/tools/t.echo/call"
urllib.request.urlopen(urllib.request.Request(url, b"{}", {"Content-Type": "application/json"}))
if os.fork():
    os._exit(os.waitstatus_to_exitcode(os.wait()[1]))
serve(registry)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_a_server_in_a_process_that_was_forked_from_anothers_has_threads_of_its_own() -> None:
    with RawClient(program(SERVED_BY_A_CHILD, str(free_port()))) as client:
        client.initialize()
        called = client.request("tools/call", {"name": "t.echo", "arguments": {"a": 1}})
        assert called["result"]["structuredContent"] == {"a": 1}
        assert client.end()[0] == 0


@pytest.mark.parametrize("ending", ["plain", "anyio-scope", "task-cancelled"])
def test_async_serve_leaves_nothing_in_its_hosts_loop_however_it_ends(ending: str) -> None:
    """Not even the call that runs through the whole grace period, which a clock put forward makes short."""
    with_clock(lambda loop: _end_while_a_call_runs(loop, ending))


async def _end_while_a_call_runs(loop: Clock, ending: str) -> None:
    running, ended, scope = asyncio.Event(), asyncio.Event(), anyio.CancelScope()
    left, downs = list[Any](), list[str]()

    async def work(inputs: dict[str, Any], context: Any) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def on_shutdown() -> None:
        await asyncio.sleep(0)
        downs.append("down")

    async def host() -> None:
        source = registry_of({"work": work})
        with scope, contextlib.suppress(asyncio.CancelledError):
            async with async_serve(source, on_shutdown=on_shutdown) as app, asgi_client(app) as client:
                left.append(asyncio.create_task(client.post("/mcp", **modern("tools/call", {"name": "work"}))))
                await running.wait()
                if ending != "plain":
                    await asyncio.sleep(60)

    before = asyncio.all_tasks()
    hosting = asyncio.create_task(host())
    await running.wait()
    if ending == "anyio-scope":
        scope.cancel()
    elif ending == "task-cancelled":
        hosting.cancel()
    while not hosting.done():
        await loop.put_forward(0.25)
    await hosting
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
    async with hosting(app) as url, client_of(url) as client:
        assert (await client.call_tool("echo", {"a": 1})).structured_content == {"a": 1}
    await asyncio.create_task(manager.__aexit__(None, None, None))


async def test_async_serve_that_is_cancelled_while_it_starts_leaves_nothing() -> None:
    begun, ready = asyncio.Event(), asyncio.Event()

    async def on_startup() -> None:
        begun.set()
        await ready.wait()

    before = asyncio.all_tasks()
    entering = asyncio.create_task(async_serve(registry_of(), on_startup=on_startup).__aenter__())
    await begun.wait()
    entering.cancel()
    ready.set()
    await asyncio.wait({entering}, timeout=10)
    assert entering.cancelled()
    assert asyncio.all_tasks() - before == set()


async def test_apcores_client_is_served_with_its_own_executor_at_every_door() -> None:
    """Or anything else whose `executor` is one."""
    application = APCore()
    seen: list[str] = []
    application.use_before(lambda module_id, inputs, context: seen.append(module_id))
    application.register("from.client", registry_of({"x": echo}).get("x"))
    with serving(application) as url:  # type: ignore[arg-type]
        async with client_of(url) as client:
            assert [tool.name for tool in (await client.list_tools()).tools] == ["from.client"]
            assert (await client.call_tool("from.client", {"a": 1})).structured_content == {"a": 1}
    assert seen == ["from.client"]
    async with async_serve(application):
        pass
    assert [tool["function"]["name"] for tool in to_openai_tools(application)] == ["from-client"]
    assert from_openai_call(application, "from-client", {"a": 1}) == ("from.client", {"a": 1})


def test_an_interrupt_while_modules_are_loaded_ends_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "zebra.py").write_text("print('loaded all the same')\n")
    arguments = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(tmp_path)]
    completed = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
    assert completed.returncode != 0
    assert b"loaded all the same" not in completed.stderr
    assert b"server started" not in completed.stderr
