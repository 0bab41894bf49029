"""The command line: its flags, their variables of the environment, its messages and exit statuses (FR-CLI-*)."""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import logging
import os
import re
import signal
import socket
from pathlib import Path

import pytest
from conftest import MODULE, RawClient, command
from support import META, Caplog, Capture, Monkeypatch, ended_well, enveloped, exported_names, wait_for_stderr

import apcore_mcp
from apcore_mcp import discover, serve, to_openai_tools
from apcore_mcp.__main__ import main

SECRET = "a key that is long enough, S3CR3T"
# ---- Exit statuses ----


def status_of(arguments: list[str]) -> object:
    """The exit status, whether argparse ends the program or `main` returns."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


# What is said of a value that is not allowed (status 1) and of what cannot be parsed (status 2). The variables of the
# environment stand before the flags.
REFUSED: list[tuple[str, int, str]] = [
    ("--extensions-dir {tmp}/no", 1, "extensions directory does not exist: {tmp}/no"),
    ("--extensions-dir {tmp}/f", 1, "extensions path is not a directory: {tmp}/f"),
    ("--port 0", 1, "port must be between 1 and 65535"),
    ("--transport stdio --port 70000", 1, "port must be between 1 and 65535"),
    ("--name=", 1, "server name must not be empty"),
    (f"--name {'n' * 256}", 1, "name must not exceed 255 characters"),
    ("--export client --prefix=", 1, "prefix must not be empty"),
    ("--check --explorer-prefix x", 1, "explorer_prefix must be a path of its own, like /explorer; got 'x'"),
    ("--check --timeout nan", 1, "apcore-mcp timeout: Input should be a finite number"),
    ("PORT=0 --check", 1, "port must be between 1 and 65535"),
    ("STATE_KEY=S3CR3T --check", 1, "state_key must be a secret of 32 bytes or more, and goes with stateless=True"),
    ("LOG_CONFIG=/no.json --check", 1, "--log-config /no.json: [Errno 2] No such file or directory: '/no.json'"),
    ("--no-such-option", 2, "unrecognized arguments: --no-such-option"),
    ("--log-level LOUD", 2, "invalid choice: 'LOUD'"),
    ("PORT=abc --check", 2, "argument --port: invalid int value: 'abc'"),
    ("EXPLORER=yes --check", 2, "argument --explorer: ignored explicit argument 'yes'"),
    ("REDACT_OUTPUT=0", 2, "argument --redact-output/--no-redact-output: ignored explicit argument '0'"),
    ("TRANSPORT=pigeon", 2, "argument --transport: invalid choice: 'pigeon'"),
    ("EXPORT=pdf", 2, "argument --export: invalid choice: 'pdf'"),
]


@pytest.mark.requirement("FR-CLI-002", "FR-CLI-003", "FR-CLI-004", "FR-CLI-006", "FR-CLI-008")
@pytest.mark.parametrize(("given", "status", "message"), REFUSED, ids=[given[:40] for given, _, _ in REFUSED])
def test_a_wrong_value_is_refused_before_any_module_is_loaded(
    tmp_path: Path, capsys: Capture, monkeypatch: Monkeypatch, given: str, status: int, message: str
) -> None:
    (tmp_path / "f").touch()
    (tmp_path / "ran.py").write_text("open(__file__[:-3], 'w')")
    words = given.replace("{tmp}", str(tmp_path)).split()
    for word in [word for word in words if not word.startswith("-") and "=" in word]:
        words.remove(word)
        name, _, value = word.partition("=")
        monkeypatch.setenv(f"APCORE_MCP_{name}", value)
    assert status_of(["--extensions-dir", str(tmp_path), *words]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "S3CR3T" not in printed.err
    if status == 1:
        assert printed.err == f"Error: {message.replace('{tmp}', str(tmp_path))}\n"
    else:
        assert printed.err.startswith("usage: ")
        assert message in printed.err
    assert not (tmp_path / "ran").exists()


def test_the_directory_is_required(capsys: Capture) -> None:
    assert status_of([]) == 2
    assert "required: --extensions-dir" in capsys.readouterr().err


@pytest.mark.requirement("FR-CLI-008")
@pytest.mark.parametrize(("transport", "host"), [("sse", "127.0.0.1"), ("streamable-http", "203.0.113.7")])
def test_status_2_for_an_address_that_cannot_be_had(
    transport: str, host: str, extensions: Path, capfd: Capture, caplog: Caplog
) -> None:
    """A port in use, and an address of another machine."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        arguments = ["--extensions-dir", str(extensions), "--transport", transport, "--host", host]
        assert main([*arguments, "--port", str(taken.getsockname()[1])]) == 2
    printed = capfd.readouterr()
    (line,) = printed.err.splitlines()
    assert (line[:7], printed.out, caplog.text) == ("Error: ", "", "")


def test_an_interrupt_while_modules_are_loaded_ends_the_program(tmp_path: Path, capfd: Capture) -> None:
    (tmp_path / "slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    (tmp_path / "zebra.py").write_text("print('loaded all the same')\n")
    with pytest.raises(KeyboardInterrupt):
        main(["--extensions-dir", str(tmp_path), "--check"])
    assert capfd.readouterr() == ("", "")


# ---- Flags ----


@pytest.mark.requirement("FR-CLI-007")
def test_help_lists_every_option_of_serve_with_its_default(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    text = capsys.readouterr().out
    assert ended.value.code == 0
    of_python = "registry_or_executor on_startup on_shutdown metrics_collector middleware output_formatter"
    options = inspect.signature(serve).parameters.keys() - {*of_python.split(), "mcp_extensions"}
    flags = {f"--{name.replace('_', '-')}" for name in options}
    flags |= {"--extensions-dir", "--export", "--check", "--metrics", "--log-config"}
    described = {line.split()[0].strip(",") for line in text.splitlines() if line.lstrip().startswith("--")}
    assert flags - described == set()
    assert {"--no-redact-output", "--no-mask-errors"} <= {*re.findall(r"--no-[\w-]+", text)}
    for default in ("stdio", "127.0.0.1", "8000", "apcore-mcp", "INFO"):
        assert f"(default: {default})" in " ".join(text.split())
    assert "None" not in text


def test_version_alone_is_the_packages(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"apcore-mcp {apcore_mcp.__version__}\n"


def test_the_installed_command_is_the_same_program() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="apcore-mcp")
    assert entry.load() is main


ALL = ["hand-write", "voice-say", "voice-shout"]
CHOSEN: list[tuple[dict[str, str], str, list[str]]] = [
    ({}, "--tags calm --prefix voice.", ["voice-shout"]),
    ({}, "--read-only", ["voice-shout"]),
    ({}, "--exclude hand voice.sa", ["voice-shout"]),
    # A variable stands for its flag.
    ({"TAGS": "public calm"}, "", ["hand-write", "voice-shout"]),
    ({"PREFIX": "voice."}, "", ALL[1:]),
    ({"PREFIX": "voice."}, "--prefix hand", ["hand-write"]),
    ({"READ_ONLY": "true"}, "", ["voice-shout"]),
    ({"READ_ONLY": "false", "SEARCH": "TRUE"}, "", ALL),
    ({"REDACT_OUTPUT": "false"}, "--redact-output", ALL),
    ({"PREFIX": "", "TAGS": " ", "PORT": ""}, "", ALL),
]


@pytest.mark.requirement("FR-FILTER-001", "FR-FILTER-002", "FR-FILTER-003")
@pytest.mark.parametrize(("variables", "flags", "names"), CHOSEN, ids=str)
def test_flags_and_variables_choose_modules(
    extensions: Path, capfd: Capture, monkeypatch: Monkeypatch,
    variables: dict[str, str], flags: str, names: list[str],
) -> None:  # fmt: skip
    read_only = "\n    annotations = ModuleAnnotations(readonly=True)\n"
    text = "from apcore import ModuleAnnotations\n" + MODULE.format(tag="calm") + read_only
    (extensions / "voice" / "shout.py").write_text(text)
    for name, value in variables.items():
        monkeypatch.setenv(f"APCORE_MCP_{name}", value)
    assert main(["--extensions-dir", str(extensions), "--export", "openai", *flags.split()]) == 0
    assert sorted(exported_names(capfd.readouterr().out)) == names


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
    assert not any("Tool call ended" in line for line in lines), "the access log is off"
    assert b"--export" not in stderr, "a hint for who is at a terminal"


@pytest.mark.requirement("FR-CLI-005", "FR-CLI-006")
def test_log_level_warning_hides_the_start(tmp_path: Path) -> None:
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


def test_a_hint_at_a_terminal(extensions: Path, monkeypatch: Monkeypatch, capfd: Capture) -> None:
    """An export has none."""
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


# ---- Variables ----


def test_no_secret_of_the_environment_is_shown(extensions: Path, capfd: Capture, monkeypatch: Monkeypatch) -> None:
    variables = {"EXTENSIONS_DIR": str(extensions), "PREFIX": "voice", "EXPORT": "mcp", "STATE_KEY": SECRET}
    for name, value in (variables | {"TRANSPORT": "streamable-http", "STATELESS": "true"}).items():
        monkeypatch.setenv(f"APCORE_MCP_{name}", value)
    assert main([]) == 0
    assert len(json.loads(capfd.readouterr().out)) == 2
    for arguments in ("--help", "--export=client", "--export=client --transport=stdio", "--port=0"):
        status_of(arguments.split())
        printed = capfd.readouterr()
        assert printed.out + printed.err
        assert SECRET not in printed.out + printed.err


def test_the_library_reads_no_variable(extensions: Path, monkeypatch: Monkeypatch) -> None:
    monkeypatch.setenv("APCORE_MCP_PREFIX", "voice")
    assert len(to_openai_tools(discover(str(extensions)))) == 3


# ---- --log-config ----

LOG_CONFIG = {
    "version": 1,
    "formatters": {"json": {"format": '{"tool": "%(tool)s", "outcome": "%(outcome)s", "ms": %(duration_ms).1f}'}},
    "handlers": {"access": {"class": "logging.StreamHandler", "formatter": "json"}},
    "loggers": {"apcore_mcp.access": {"handlers": ["access"], "level": "INFO", "propagate": False}},
}


def test_log_config_says_how_to_log_and_a_variable_turns_a_switch_off(tmp_path: Path, monkeypatch: Monkeypatch) -> None:
    """The levels too: nothing but its handlers writes, and nothing below WARNING unless it says so."""
    (tmp_path / "log.json").write_text(json.dumps(LOG_CONFIG))
    fail = "from apcore.decorator import module\n@module\ndef fail(n: int) -> int: return 1 // n\n"
    (tmp_path / "t.py").write_text(fail)
    monkeypatch.setenv("APCORE_MCP_MASK_ERRORS", "false")
    arguments = ["--extensions-dir", str(tmp_path), "--access-log", "--log-config", str(tmp_path / "log.json")]
    with RawClient(command(*arguments)) as client:
        client.initialize()
        client.request("tools/call", {"name": "t.fail", "arguments": {"n": 1}})
        told = client.request("tools/call", {"name": "t.fail", "arguments": {"n": 0}})["result"]
        status, stderr = client.end()
    assert status == 0
    assert "by zero" in told["content"][0]["text"]
    lines = [json.loads(line) for line in stderr.decode().splitlines() if '"tool"' in line]
    assert [(line["tool"], line["outcome"] == "ok") for line in lines] == [("t.fail", True), ("t.fail", False)]
    assert b"server started" not in stderr
    assert b"Tool call ended" not in stderr


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"version": 1, "handlers": {"h": {"class": "no.such\\n"}}}'])
def test_log_config_that_cannot_be_used(extensions: Path, tmp_path: Path, capfd: Capture, content: str) -> None:
    before = [*logging.root.handlers]
    path = tmp_path / "log.json"
    path.write_text(content)
    assert main(["--extensions-dir", str(extensions), "--log-config", str(path)]) == 1
    logging.root.handlers[:] = before
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"Error: --log-config {path}: ")
