"""The command line's settings by variables of the environment, and what it says of those that change nothing."""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT, RawClient
from support import exported_names, messages_logged, run

from apcore_mcp.__main__ import main

SECRET = "a key that is long enough, S3CR3T"


@pytest.fixture
def export(extensions: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> object:
    """Export the modules of `extensions` under some variables, by a name each, with more flags."""

    def exported(*flags: str, **variables: str) -> list[str]:
        for name, value in variables.items():
            monkeypatch.setenv(f"APCORE_MCP_{name}", value)
        assert main(["--extensions-dir", str(extensions), "--export", "openai", *flags]) == 0
        return sorted(exported_names(capfd.readouterr().out))

    return exported


@pytest.mark.parametrize(
    ("variables", "flags", "names"),
    [
        ({"TAGS": "public calm"}, "", ["hand-write", "voice-shout"]),
        ({"PREFIX": "voice."}, "", ["voice-say", "voice-shout"]),
        ({"PREFIX": "voice."}, "--prefix hand", ["hand-write"]),
        ({"READ_ONLY": "true"}, "", []),
        ({"READ_ONLY": "false", "SEARCH": "TRUE"}, "", ["hand-write", "voice-say", "voice-shout"]),
        ({"PREFIX": "", "TAGS": " ", "PORT": ""}, "", ["hand-write", "voice-say", "voice-shout"]),
    ],
    ids=str,
)
def test_a_variable_stands_for_a_flag_unless_that_is_given(
    export: object, variables: dict[str, str], flags: str, names: list[str]
) -> None:
    assert callable(export)
    assert export(*flags.split(), **variables) == names


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PORT", "abc", "APCORE_MCP_PORT: invalid int value: 'abc'"),
        ("PORT", "0", "APCORE_MCP_PORT: port must be between 1 and 65535"),
        ("EXPLORER", "yes", "APCORE_MCP_EXPLORER must be true or false, got 'yes'"),
        ("TRANSPORT", "pigeon", "APCORE_MCP_TRANSPORT: invalid choice: 'pigeon' (choose from"),
        ("TIMEOUT", "-1", "APCORE_MCP_TIMEOUT: timeout must be a number of seconds"),
        ("STATE_KEY", "S3CR3T", "APCORE_MCP_STATE_KEY: state_key must be a secret of 32 bytes"),
        ("LOG_CONFIG", "/no/such.json", "APCORE_MCP_LOG_CONFIG /no/such.json: "),
    ],
)
def test_a_wrong_value_names_its_variable_and_a_flag_is_not_blamed(
    extensions: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    message: str,
) -> None:
    monkeypatch.setenv(f"APCORE_MCP_{variable}", value)
    monkeypatch.setenv("APCORE_MCP_PREFIX", "voice")
    assert main(["--extensions-dir", str(extensions), "--check"]) == 1
    printed = capfd.readouterr().err
    assert printed.startswith(f"Error: {message}")
    assert printed.count("\n") == 1
    assert "S3CR3T" not in printed
    assert "PREFIX" not in printed


def test_all_can_come_from_the_environment_which_no_flag_and_no_help_repeats(extensions: Path) -> None:
    variables = {"EXTENSIONS_DIR": str(extensions), "PREFIX": "voice", "EXPORT": "mcp", "STATE_KEY": SECRET}
    variables |= {"TRANSPORT": "streamable-http", "STATELESS": "true"}
    environment = {f"APCORE_MCP_{name}": value for name, value in variables.items()}
    ended = run(env=environment)
    assert ended.returncode == 0, ended.stderr
    assert len(json.loads(ended.stdout)) == 2
    for arguments in (["--help"], ["--export=client"], ["--port=0"]):
        ended = run(*arguments, env=environment)
        assert SECRET not in ended.stdout + ended.stderr


def test_an_exported_client_starts_its_server_with_the_variables_that_were_in_effect(
    extensions: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "log.json").write_text('{"version": 1}')
    monkeypatch.chdir(extensions.parent)
    for name, value in {"TAGS": "public calm", "NAME": "", "EXTENSIONS_DIR": extensions.name}.items():
        monkeypatch.setenv(f"APCORE_MCP_{name}", value)
    assert main(["--export", "client", "--prefix", "voice", "--log-config", "log.json"]) == 0
    (entry,) = json.loads(capfd.readouterr().out)["mcpServers"].values()
    assert {name: value for name, value in entry["env"].items() if "APCORE" in name} == {
        "APCORE_MCP_TAGS": "public calm"
    }
    for name in ("TAGS", "NAME", "EXTENSIONS_DIR"):
        monkeypatch.delenv(f"APCORE_MCP_{name}")
    command = [entry["command"], *entry["args"]]
    with RawClient(command, cwd="/", env=entry["env"]) as client:
        client.initialize()
        (tool,) = client.request("tools/list")["result"]["tools"]
    assert tool["name"] == "voice.shout"


def test_what_changes_nothing_is_told_in_one_warning(
    extensions: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APCORE_MCP_PROT", "9")
    monkeypatch.setenv("APCORE_MCP_HOST", "127.0.0.1")
    check = ["--extensions-dir", str(extensions), "--check"]
    for flags, told in (
        (["--port=8000", "--explorer", "--metrics"], "Without effect on stdio: APCORE_MCP_HOST, --port, --explorer"),
        (["--transport=sse", "--stateless", "--port=9"], "Without effect on sse: --stateless"),
        (["--transport=streamable-http", "--stateless", "--metrics", "--timeout=9"], None),
    ):
        caplog.clear()
        assert main([*check, *flags]) == 0
        first, *others = messages_logged(caplog)
        assert first == "No settings, so without effect: APCORE_MCP_PROT"
        named = {*others[0].replace(": ", ", ").split(", ")} if others else set()
        assert len(others) == (told is not None)
        assert named >= ({*told.replace(": ", ", ").split(", ")} if told else set())
        assert "--timeout" not in named


def test_the_library_reads_no_variable(extensions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from apcore_mcp import discover, to_openai_tools

    monkeypatch.setenv("APCORE_MCP_PREFIX", "voice")
    assert len(to_openai_tools(discover(str(extensions)))) == 3


LOG_CONFIG = {
    "version": 1,
    "formatters": {"json": {"format": '{"tool": "%(tool)s", "outcome": "%(outcome)s", "ms": %(duration_ms).1f}'}},
    "handlers": {"access": {"class": "logging.StreamHandler", "formatter": "json"}},
    "loggers": {"apcore_mcp.access": {"handlers": ["access"], "level": "INFO", "propagate": False}},
}


def test_a_file_says_how_to_log_instead_of_the_command_line(extensions: Path, tmp_path: Path) -> None:
    (tmp_path / "log.json").write_text(json.dumps(LOG_CONFIG))
    command = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(extensions), "--prefix=voice"]
    with RawClient([*command, "--log-config", str(tmp_path / "log.json")]) as client:
        client.initialize()
        client.request("tools/call", {"name": "voice.say", "arguments": {"text": "hello"}})
        status, stderr = client.end()
    (line,) = stderr.decode().splitlines()
    told = json.loads(line)
    assert (status, told["tool"], told["outcome"]) == (0, "voice.say", "ok")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"version": 1, "handlers": {"h": {"class": "no.such"}}}'])
def test_a_file_that_says_nothing_about_a_log_is_told_in_one_line(
    extensions: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str
) -> None:
    before = [*logging.root.handlers]
    path = tmp_path / "log.json"
    path.write_text(content)
    assert main(["--extensions-dir", str(extensions), "--log-config", str(path)]) == 1
    logging.root.handlers[:] = before
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"Error: --log-config {path}: ")


def test_the_table_of_the_readme_has_each_flag_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    options = capsys.readouterr().out.partition("options:")[2]
    table = (ROOT / "README.md").read_text("utf-8").partition("| Flag | Default | Meaning |")[2].partition("\n\n")[0]
    described = {
        flag for row in table.splitlines() for flag in re.findall(r"--[a-z][\w-]+", "|".join(row.split("|")[1:2]))
    }
    flags = {
        flag for line in options.splitlines() if line.startswith("  -") for flag in re.findall(r"--[a-z][\w-]+", line)
    }
    assert flags - described == {"--help"}
    assert described - flags <= {"--no-redact-output"}
