"""The command line (FR-CLI-001 to -008, FR-LOG-001, FR-SERVER-006, design §1 "vendored" and §3 "Command line")."""

from __future__ import annotations

import asyncio
import contextlib
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apcore import Executor, Registry
from conftest import HANDSHAKE, ROOT, RawClient, command, free_port
from mcp.client import Client

import apcore_mcp
from apcore_mcp import to_openai_tools
from apcore_mcp.__main__ import main

NOISE = """
import os, subprocess

print("noise-print")
os.write(1, b"noise-os\\n")
subprocess.run(["echo", "noise-child"])
"""

MODULE = """
from pydantic import BaseModel, Field

class TextInput(BaseModel):
    text: str = Field(description="What to say")
    times: int | None = None

class TextOutput(BaseModel):
    text: str

class Say:
    description = "Say it"
    tags = ["public", "{tag}"]
    input_schema = TextInput
    output_schema = TextOutput

    def execute(self, inputs, context):
        return {{"text": inputs["text"]}}
"""


@pytest.fixture(autouse=True)
def _own_log_level() -> Iterator[None]:
    """`main()` sets the logger's level; leave it as it was."""
    logger = logging.getLogger("apcore_mcp")
    before = logger.level
    yield
    logger.setLevel(before)


@pytest.fixture
def extensions(tmp_path: Path) -> Path:
    """A directory with three modules; its name has a space in it."""
    directory = tmp_path / "my extensions"
    for name, tag in (("voice/say.py", "loud"), ("voice/shout.py", "calm"), ("hand/write.py", "calm")):
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(MODULE.format(tag=tag))
    return directory


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """`python -m apcore_mcp` with no input at all."""
    return subprocess.run(
        [sys.executable, "-m", "apcore_mcp", *arguments],
        **{"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "timeout": 30, "cwd": ROOT, **options},
    )


def exported_names(output: str) -> list[str]:
    return [tool["function"]["name"] for tool in json.loads(output)]


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


def test_at_a_terminal_the_server_says_what_it_is_for(extensions: Path) -> None:
    """And nowhere else, nor where it only exports."""
    terminal, stdin = os.openpty()
    arguments = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(extensions)]
    with subprocess.Popen(arguments, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as server:
        assert server.stderr is not None
        assert b"server" in server.stderr.readline()
        while b"server started" not in (line := server.stderr.readline()):
            assert line
        server.send_signal(signal.SIGINT)
        assert server.communicate(timeout=30)[0] == b""
    exported = subprocess.run(
        [*arguments, "--export", "mcp"], stdin=stdin, capture_output=True, cwd=ROOT, timeout=30, check=True
    )
    assert exported.stderr == b""
    os.close(terminal)
    os.close(stdin)
    assert b"--export" not in run("--extensions-dir", str(extensions), text=False).stderr


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


@pytest.mark.parametrize(("seconds", "told"), [("0.3", "Module timed out after"), ("0", "done"), ("20", "done")])
def test_a_call_may_take_as_long_as_the_timeout_says(extensions: Path, seconds: str, told: str) -> None:
    (extensions / "slow.py").write_text(
        "import asyncio\nfrom apcore.decorator import module\n@module(id='s.low')\n"
        "async def slow() -> str:\n    await asyncio.sleep(0.6)\n    return 'done'\n"
    )
    with RawClient(
        [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(extensions), "--timeout", seconds]
    ) as c:
        c.initialize()
        assert told in c.request("tools/call", {"name": "s.low", "arguments": {}})["result"]["content"][0]["text"]


def test_the_installed_command_is_the_same_program() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="apcore-mcp")
    assert entry.load() is main


@pytest.mark.parametrize(
    ("transport", "host"),
    [("streamable-http", "127.0.0.1"), ("sse", "127.0.0.1"), ("streamable-http", "203.0.113.7")],
    ids=["port-in-use", "port-in-use-sse", "not-our-address"],
)
def test_an_address_that_cannot_be_had_ends_with_status_2_and_one_line(transport: str, host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = command("--transport", transport, "--host", host, "--port", port)
        ended = subprocess.run(arguments, capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("Error: ")


@pytest.mark.parametrize("form", ["mcp", "openai", "openai-strict"])
def test_an_export_is_nothing_but_json_although_the_modules_print(extensions: Path, form: str) -> None:
    """What the server lists, or what `to_openai_tools()` gives."""
    (extensions / "hand" / "write.py").write_text(NOISE + MODULE.format(tag="calm"))
    ended = run("--extensions-dir", str(extensions), "--export", form)
    assert ended.returncode == 0, ended.stderr
    exported = json.loads(ended.stdout)
    assert "noise-print\n" in ended.stderr
    assert "noise-os\n" in ended.stderr
    assert "noise-child\n" in ended.stderr
    if form == "mcp":
        with RawClient([sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(extensions)]) as client:
            client.initialize()
            expected = client.request("tools/list")["result"]["tools"]
    else:
        registry = Registry(extensions_dir=str(extensions))
        registry.discover()
        expected = to_openai_tools(registry, strict=form == "openai-strict")
    assert len(expected) == 3
    assert sorted(exported, key=str) == sorted(expected, key=str)


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


def test_without_options_the_server_has_the_packages_name_and_version_and_logs_no_calls() -> None:
    with RawClient(command()) as client:
        info = client.initialize()["result"]["serverInfo"]
        assert (info["name"], info["version"]) == ("apcore-mcp", apcore_mcp.__version__)
        client.request("tools/call", {"name": "units.convert", "arguments": {"value": 1, "source": "m", "target": "m"}})
        status, stderr = client.end()
    assert status == 0
    assert b"apcore-mcp server started: 16 tools registered, transport=stdio" in stderr
    assert b"Tool call" not in stderr


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


def test_a_file_that_cannot_be_loaded_is_left_out_by_name_and_the_others_are_served(extensions: Path) -> None:
    """NFR-REL-002, whenever and whatever it raises."""
    ends = "\n    def {}(self): raise SystemExit('ends')\n"
    broken = {
        "bad/syntax.py": "def broken(:\n",
        "bad/raises.py": "raise ValueError('on import')\n",
        "bad/missing.py": "import no_such_package_anywhere\n",
        "bad/exits.py": "import sys\nsys.exit(3)\n",
        "bad/skips.py": "import pytest\npytest.skip('a BaseException', allow_module_level=True)\n",
        "bad/initial.py": MODULE.format(tag="bad") + ends.format("__init__"),
        "bad/loading.py": MODULE.format(tag="bad") + ends.format("on_load"),
        "bad/helper.py": "def help(): pass\n",
        "bad/twice.py": MODULE.format(tag="bad") + "\nclass Again(Say): pass\n",
        "bad/described.py": MODULE.format(tag="bad"),
        "bad/described_meta.yaml": "[not, a, mapping]\n",
        "bad/function.py": "from apcore.decorator import module\n@module\ndef untyped(a): pass\n",
        "Bad-Place/Its-Name.py": MODULE.format(tag="bad"),
        "system/health.py": MODULE.format(tag="bad"),
        "bad/text.binding.yaml": "bindings: [unclosed\n",
        "bad/target.binding.yaml": (
            "spec_version: '1.0'\nbindings:\n  - module_id: bad.target\n    target: 'no_such_module_here:run'\n"
            "    input_schema: {type: object}\n    output_schema: {type: object}\n"
        ),
    }
    for name, text in broken.items():
        (extensions / name).parent.mkdir(exist_ok=True)
        (extensions / name).write_text(text)
    ended = run("--extensions-dir", str(extensions), "--export", "openai")
    assert ended.returncode == 0, ended.stderr
    assert sorted(exported_names(ended.stdout)) == ["hand-write", "voice-say", "voice-shout"]
    lines = [line for line in ended.stderr.splitlines() if line.startswith("WARNING")]
    files = [name for name in broken if not name.endswith("_meta.yaml")]
    assert [name for name in files if not any(name in line for line in lines)] == [], ended.stderr
    assert len(lines) == len(files)
    assert "Traceback" not in ended.stderr


FUNCTIONS = '''
from __future__ import annotations
from pathlib import Path
import apcore
from apcore import Context
from apcore.decorator import module

with open(Path(__file__).with_name("imported"), "a") as file:
    file.write("once ")

@module(id="maths.add", description="Add", tags=["sum"])
def add(a: int, b: int = 1) -> int:
    return a + b

@module
async def double(x: int, context: Context) -> dict:
    """Double a point."""
    return {{"x": x * 2, "known": context.trace_id is not None}}

@apcore.module(description="Halve")
def halve(a: float) -> float:
    return a / 2

also = add
{more}
'''


def test_functions_with_the_decorator_are_served_beside_classes_and_bindings(extensions: Path) -> None:
    """Under the id they give, or the one of their place; what another file defined is not this one's."""
    (extensions / "maths").mkdir()
    (extensions / "maths" / "forms.py").write_text(FUNCTIONS.format(more=""))
    (extensions / "maths" / "both.py").write_text(FUNCTIONS.format(more=MODULE.format(tag="x")).replace("maths", "m"))
    (extensions / "maths" / "_bound.py").write_text("def negate(a: int) -> int:\n    return -a\n")
    (extensions / "maths" / "bound.binding.yaml").write_text(
        "spec_version: '1.0'\nbindings:\n  - {module_id: maths.negate, target: '_bound:negate', description: Negate}\n"
    )
    arguments = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(extensions), "--prefix", "m"]
    with RawClient(arguments) as client:
        client.initialize()
        tools = {tool["name"]: tool for tool in client.request("tools/list")["result"]["tools"]}
        assert [*tools] == [
            "m.add", "maths.add", "maths.both", "maths.both.double", "maths.both.halve",
            "maths.forms.double", "maths.forms.halve", "maths.negate",
        ]  # fmt: skip
        assert (tools["maths.add"]["description"], tools["maths.add"]["_meta"]["apcore/tags"]) == ("Add", ["sum"])
        assert tools["maths.forms.double"]["description"] == "Double a point."
        results = [
            client.request("tools/call", {"name": name, "arguments": given})["result"]["structuredContent"]
            for name, given in (("maths.add", {"a": 2}), ("maths.forms.double", {"x": 4}))
        ]
    assert results == [{"result": 3}, {"x": 8, "known": True}]
    assert (extensions / "maths" / "imported").read_text() == "once " * 2


def test_what_apcore_passes_over_is_no_place_for_bindings_either_and_a_link_is_told(extensions: Path) -> None:
    binding = "spec_version: '1.0'\nbindings:\n- {{module_id: m.{}, target: 'os.path:join', auto_schema: true,"
    binding += " input_schema: {{type: object}}, output_schema: {{type: object}}}}\n"
    binding = binding.replace(" auto_schema: true,", "")
    for number, place in enumerate(("_old", ".trash", "node_modules", ".venv/lib", "kept")):
        (extensions / place).mkdir(parents=True)
        (extensions / place / "os.binding.yaml").write_text(binding.format(f"n{number}"))
        (extensions / place / "say.py").write_text(MODULE.format(tag="x"))
    (extensions / "linked.py").symlink_to(extensions / "voice" / "say.py")
    (extensions / "linked.binding.yaml").symlink_to(extensions / "kept" / "os.binding.yaml")
    (extensions / "linked_folder").symlink_to(extensions / "kept")
    (extensions / "_linked").symlink_to(extensions / "kept")
    ended = run("--extensions-dir", str(extensions), "--export", "openai")
    assert sorted(exported_names(ended.stdout)) == ["hand-write", "kept-say", "m-n4", "voice-say", "voice-shout"]
    warnings = [line.split(": ")[1] for line in ended.stderr.splitlines()]
    assert warnings == [
        f"{extensions}/{name} is left out" for name in ("linked.binding.yaml", "linked.py", "linked_folder")
    ]


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


def test_a_binding_never_gets_the_function_of_another_folders_file(
    extensions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Python imports one file of a name."""
    bound = "spec_version: '1.0'\nbindings:\n- {{module_id: m.{0}, target: '_one_name:say'}}\n"
    for name in ("first", "second"):
        (extensions / name).mkdir()
        (extensions / name / "say.binding.yaml").write_text(bound.format(name))
        (extensions / name / "_one_name.py").write_text(f"def say() -> str: return '{name}'\n")
    registry = apcore_mcp.discover(extensions)
    assert Executor(registry).call("m.first", {}) == {"result": "first"}
    assert not registry.has("m.second")
    [warning] = [record.getMessage() for record in caplog.records if "say.binding.yaml is left out" in record.message]
    assert f"{extensions / 'second' / '_one_name.py'}" in warning


def test_folders_are_looked_into_as_deeply_as_apcore_does(extensions: Path) -> None:
    for depth in (7, 8):
        place = extensions.joinpath(*[f"d{depth}"] * depth)
        place.mkdir(parents=True)
        (place / "say.py").write_text(MODULE.format(tag="x"))
    registry = Registry(extensions_dir=str(extensions))
    registry.discover()
    assert apcore_mcp.discover(extensions).list() == registry.list()
    assert len(registry.list()) == 4


def test_the_second_of_two_functions_with_one_id_is_not_served_in_silence(extensions: Path) -> None:
    function = "@module(id='a.b', description='{0}')\ndef {0}() -> int: return 1\n"
    text = "from apcore.decorator import module\n" + function.format("first") + function.format("second")
    (extensions / "twins.py").write_text(text)
    ended = run("--extensions-dir", str(extensions), "--export", "mcp", "--prefix", "a.")
    assert [tool["description"] for tool in json.loads(ended.stdout)] == ["first"]
    assert "twins.py is left out" in ended.stderr
    assert "'a.b' is already registered" in ended.stderr


@pytest.mark.parametrize("what", ["stdout = None", "stdout.close()", "stdout = open(__file__)"])
def test_an_export_reaches_its_reader_whatever_a_file_does_with_stdout(extensions: Path, what: str) -> None:
    (extensions / "loud.py").write_text(f"import sys\nsys.{what}\n" + MODULE.format(tag="loud"))
    ended = run("--extensions-dir", str(extensions), "--export", "openai", "--tags", "loud")
    assert ended.returncode == 0, ended.stderr
    assert sorted(exported_names(ended.stdout)) == ["loud", "voice-say"]


def test_metadata_beside_a_file_and_versions_that_are_numbers_hold(
    extensions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (extensions / "voice" / "say_meta.yaml").write_text(
        "version: 1.5\ndescription: Told beside\nentry_point: say:Other"
    )
    more = "\n    version = 2\n\nclass Other(Say):\n    def on_load(self): assert self.version == 2\n"
    (extensions / "voice" / "say.py").write_text(MODULE.format(tag="loud") + more)
    (extensions / "voice" / "shout.py").write_text(MODULE.format(tag="calm") + "\n    version = 2\n")
    (extensions / "zz.py").write_text(
        "from apcore.decorator import module\n@module(id='voice.say')\ndef f() -> int: return 1\n"
    )
    assert main(["--extensions-dir", str(extensions), "--export", "mcp", "--prefix", "voice"]) == 0
    tools = json.loads(capfd.readouterr().out)
    told = {tool["name"]: (tool["description"], tool["_meta"]["apcore/version"]) for tool in tools}
    assert told == {"voice.say": ("Told beside", "1.5"), "voice.shout": ("Say it", "2")}


def test_dynamic_follows_classes_functions_and_bindings(extensions: Path) -> None:
    """They are taken in, again when they change, and out when they go; an id may move to another file."""
    forms, bindings = extensions / "forms.py", extensions / "hand.binding.yaml"
    forms.write_text(FUNCTIONS.format(more=""))
    (extensions / "_bound.py").write_text("def negate(a: int) -> int:\n    return -a\n")
    bound = "spec_version: '1.0'\nbindings:\n- {{module_id: m.negate, target: '_bound:negate', tags: [{}]}}\n"
    bindings.write_text(bound.format("old"))
    arguments = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(extensions), "--dynamic"]
    with RawClient(arguments) as client:
        client.initialize()

        def wait_for(expected: dict[str, list[str]]) -> None:
            told: dict[str, list[str]] = {}
            while told != expected:
                assert client.receive()["method"].endswith("list_changed")
                tools = client.request("tools/list")["result"]["tools"]
                told = {tool["name"]: tool["_meta"]["apcore/tags"] for tool in tools}

        shutil.rmtree(extensions / "voice")
        forms.write_text(FUNCTIONS.format(more="").replace('tags=["sum"]', 'tags=["plus"]').replace("halve", "half"))
        bindings.write_text(bound.format("new"))
        (extensions / "hand" / "write.py").write_text(MODULE.format(tag="new"))
        functions = {"forms.double": [], "forms.half": [], "maths.add": ["plus"]}
        wait_for({**functions, "hand.write": ["public", "new"], "m.negate": ["new"]})
        bindings.write_text("bindings: [unclosed")
        forms.unlink()
        (extensions / "hand" / "write.py").write_text("tags = []\n")
        (extensions / "about.py").write_text(
            "from apcore.decorator import module\n@module(id='maths.add')\ndef add(a: int) -> int: return a\n"
        )
        wait_for({"maths.add": [], "m.negate": ["new"]})
        bindings.unlink()
        wait_for({"maths.add": []})
        status, stderr = client.end()
    assert status == 0
    assert b"hand.binding.yaml is left out" in stderr
    assert b"hand/write.py is left out: it has to define one module class" in stderr


def test_a_relative_directory_counts_from_where_the_command_is_run(extensions: Path) -> None:
    ended = run("--extensions-dir", f"./{extensions.name}", "--export", "openai", cwd=extensions.parent)
    assert sorted(exported_names(ended.stdout)) == ["hand-write", "voice-say", "voice-shout"]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_a_document_is_printed_whatever_the_terminal_can_say(extensions: Path, encoding: str) -> None:
    text = MODULE.format(tag="calm").replace('"Say it"', '"1 → 2 ≠ 3"; documentation = "\\ud800"')
    (extensions / "hand" / "write.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
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


@pytest.mark.parametrize("package", ["apcore_mcp", "anyproject._vendor.apcore_mcp"], ids=["installed", "vendored"])
@pytest.mark.parametrize("path", [None, "src", ".", "src/"])
def test_the_exported_client_entry_starts_this_server_from_anywhere(
    extensions: Path, tmp_path: Path, package: str, path: str | None
) -> None:
    """With what it finds of the project's own modules here; and nothing of what it will serve is run for that."""
    (extensions / "hand" / "write.py").write_text("open('ran', 'w')\nimport shop, stock\n" + MODULE.format(tag="calm"))
    for name in ("shop.py", "src/stock.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    vendored_copy(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    environment = {"PATH": os.environ["PATH"], **({"PYTHONPATH": path} if path else {})}
    flags = ["--name", "my tools", "--tags", "public", "calm", "--explorer", "--instructions", "-- go on"]
    ended = subprocess.run(
        [sys.executable, "-m", package, "--extensions-dir", extensions.name, *flags, "--export", "client"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (name, entry), *others = json.loads(ended.stdout)["mcpServers"].items()
    assert (name, others, entry["command"]) == ("my tools", [], sys.executable)
    assert entry["args"] == ["-m", package, "--extensions-dir", str(extensions), *flags]
    source = str(tmp_path / "src")
    assert entry["env"] == {"PYTHONPATH": f"{tmp_path}:{source}" if path and "src" in path else str(tmp_path)}
    assert not (tmp_path / "ran").exists()
    environment = {"PATH": os.environ["PATH"], **entry["env"]}
    with RawClient([entry["command"], *entry["args"]], cwd=elsewhere, env=environment) as client:
        assert client.initialize()["result"]["serverInfo"]["name"] == "my tools"
        listed = [tool["name"] for tool in client.request("tools/list")["result"]["tools"]]
    assert listed == (["hand.write"] if source in entry["env"]["PYTHONPATH"] else []) + ["voice.shout"]
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
    by_code, by_name = (
        subprocess.Popen(
            [sys.executable, *start, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment,
        )
        for start in (["-c", code], ["-m", "anyproject._vendor.apcore_mcp", "--export", "mcp"])
    )  # fmt: skip
    _, stderr = by_code.communicate(timeout=30)
    assert by_code.returncode == 0, stderr
    assert str(vendored / "__main__.py") in stderr
    assert "apcore-mcp server started: 3 tools registered, transport=stdio" in stderr
    stdout, stderr = by_name.communicate(timeout=30)
    assert by_name.returncode == 0, stderr
    assert sorted(tool["name"] for tool in json.loads(stdout)) == ["hand.write", "voice.say", "voice.shout"]


@pytest.mark.parametrize(
    ("transport", "path", "number"),
    [("streamable-http", "/mcp", signal.SIGTERM), ("sse", "/sse", signal.SIGINT)],
    ids=["streamable-http", "sse"],
)
async def test_a_signal_ends_an_http_server_with_status_0_while_a_client_is_connected(
    transport: str, path: str, number: signal.Signals
) -> None:
    port = free_port()
    server = await asyncio.create_subprocess_exec(
        *command("--transport", transport, "--port", str(port)), stderr=asyncio.subprocess.PIPE, cwd=ROOT
    )
    assert server.stderr is not None
    try:
        async with asyncio.timeout(45):
            lines = []
            while "server started" not in "".join(lines):
                lines.append((await server.stderr.readline()).decode())
                assert lines[-1], lines
            url = f"http://127.0.0.1:{port}{path}"
            client: Any = url
            if transport == "sse":
                from mcp.client.sse import sse_client

                client = sse_client(url)
            with contextlib.suppress(Exception):  # what the client makes of a server that ends is its own affair
                async with Client(client, mode=HANDSHAKE, cache=None, read_timeout_seconds=30) as connected:
                    tools = (await connected.list_tools()).tools
                    server.send_signal(number)
                    lines.append((await server.stderr.read()).decode())
                    status = await server.wait()
            log = "".join(lines)
            assert (len(tools), status) == (16, 0), log
            assert "Traceback" not in log
            assert f"apcore-mcp server started: 16 tools registered, transport={transport}" in log
            deprecated = "SSE transport is deprecated; use streamable-http instead" in log
            assert deprecated == (transport == "sse")
    finally:
        if server.returncode is None:
            server.kill()
            await server.wait()
