"""What `--export` and `--check` print: tools as JSON, the tool document's eight sections, a client's entry."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import httpx
import pytest
from apcore import Registry
from conftest import EXTENSIONS, MODULE, ROOT, RawClient, serving
from jsonschema import Draft202012Validator
from support import Caplog, Capture, Monkeypatch, answer, messages_logged, modern, run

import apcore_mcp
from apcore_mcp import discover, to_openai_tools
from apcore_mcp.__main__ import main


def test_an_export_is_alone_on_stdout_and_utf8(extensions: Path) -> None:
    """Whatever modules print, and whatever the terminal is."""
    noise = "import os, subprocess\nprint('by print')\nos.write(1, b'by os\\n')\nsubprocess.run(['echo', 'by child'])\n"
    text = MODULE.format(tag="calm").replace('"Say it"', '"1 → 2 ≠ 3"; documentation = "\\ud800"')
    (extensions / "hand" / "write.py").write_text(noise + text, encoding="utf-8")
    options: Any = {"env": {**os.environ, "PYTHONIOENCODING": "ascii"}, "encoding": "utf-8", "cwd": extensions.parent}
    directory = f"./{extensions.name}"  # which counts from where the command is run
    ended = run("--extensions-dir", directory, "--export", "markdown", **options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("# Tools of apcore-mcp\n")
    assert "1 → 2 ≠ 3" in ended.stdout
    assert {"by print", "by os", "by child"} <= {*ended.stderr.splitlines()}
    assert "by " not in ended.stdout.replace("by another", "")


@pytest.mark.parametrize("form", ["openai", "openai-strict"])
def test_for_openai_as_to_openai_tools(extensions: Path, capfd: Capture, form: str) -> None:
    registry = Registry(extensions_dir=str(extensions))
    assert registry.discover() == 3
    assert main(["--extensions-dir", str(extensions), "--export", form]) == 0
    assert json.loads(capfd.readouterr().out) == to_openai_tools(registry, strict=form == "openai-strict")


def test_for_mcp_as_tools_list(extensions: Path, capfd: Capture) -> None:
    arguments = ["--extensions-dir", str(extensions), "--tool-names", "portable", "--export", "mcp"]
    assert main(arguments) == 0
    with serving(discover(extensions), tool_names="portable") as url, httpx.Client(trust_env=False) as http:
        listed = answer(http.post(f"{url}/mcp", **modern("tools/list")))["result"]["tools"]
    assert json.loads(capfd.readouterr().out) == listed


# ---- The tool document ----

SECTIONS = [
    "1. Tool Purpose and Description",
    "2. Invocation Name",
    "3. Input Schema (Parameters)",
    "4. Output Schema (Return Value)",
    "5. Error Handling",
    "6. Idempotency",
    "7. Usage Examples (for MCP context)",
    "8. Security Considerations",
]

IMPORTS = """
from datetime import date
from decimal import Decimal
from typing import Literal
from apcore import ModuleAnnotations, ModuleExample
from pydantic import BaseModel, Field

class Day(BaseModel):
    day: date

class Takes:
    input_schema = output_schema = Day
    description = "Takes it."

    def execute(self, inputs, context):
        return {}
"""


def exported(directory: Path, capfd: Capture) -> dict[str, dict[int, str]]:
    """The document by module id and number of the section."""
    assert main(["--extensions-dir", str(directory), "--export", "markdown", "--name", "house"]) == 0
    title, *tools = re.split(r"^## ", capfd.readouterr().out, flags=re.M)
    assert title.strip() == "# Tools of house"
    documents = {}
    for tool in tools:
        _, *parts = re.split(r"^### (.+)$", tool, flags=re.M)
        assert parts[::2] == SECTIONS
        documents[re.search(r"`([^`]+)`", parts[3])[1]] = dict(enumerate(parts[1::2], 1))  # type: ignore[index]
    return documents


def documented(tmp_path: Path, capfd: Capture, source: str) -> dict[int, str]:
    """The document of the one module that `source` makes of `Takes`."""
    (tmp_path / "takes.py").write_text(f"{IMPORTS}\n{textwrap.dedent(source)}")
    (sections,) = exported(tmp_path, capfd).values()
    return sections


def blocks(section: str) -> list[Any]:
    return [json.loads(block) for block in re.findall(r"```json\n(.+?)\n```", section, flags=re.DOTALL)]


def check_examples(sections: dict[int, str], module_id: str) -> list[Any]:
    """Every example is a whole MCP call whose arguments the printed schema accepts."""
    (schema,) = blocks(sections[3])
    calls = blocks(sections[7])
    for call in calls:
        assert (call["jsonrpc"], call["method"], call["params"]["name"]) == ("2.0", "tools/call", module_id)
        Draft202012Validator(schema).validate(call["params"]["arguments"])
    return [call["params"]["arguments"] for call in calls]


def test_document_of_every_example_module(capfd: Capture) -> None:
    documents = exported(EXTENSIONS, capfd)
    assert {"trash.empty", "text.slugify", "finance.loan_schedule"} <= documents.keys()
    for module_id, sections in documents.items():
        assert check_examples(sections, module_id)
    trash = documents["trash.empty"]
    assert "`APPROVAL_DENIED`" in trash[5]
    assert "Not idempotent" in trash[6]
    assert "may destroy data that cannot be brought back. A person has to approve each call." in trash[8]
    assert "sensitive values" in documents["security.password_strength"][8]
    assert "Idempotent: to repeat it changes nothing." in documents["text.analyze"][6]


EVERYTHING = """
class Inner(BaseModel):
    size: int = Field(ge=1)
    ratio: float = Field(gt=0, le=0.5)
    more: int = 0

class Input(BaseModel):
    text: str = Field(description="A | B\\nC")
    kind: Literal["small", "large"]
    day: date = Field(examples=["2025-01-31"])
    inner: Inner
    several: list[Inner]
    maybe: bool | None
    perhaps: Literal["x"] | None
    code: str = Field(pattern="^[A-Z]{3}$", examples=["no", "EUR"])
    secret: str = Field(json_schema_extra={"x-sensitive": True})

Takes.input_schema, Takes.output_schema = Input, Inner
"""


def test_document_examples_are_made_of_plain_values(capfd: Capture, tmp_path: Path) -> None:
    sections = documented(tmp_path, capfd, EVERYTHING)
    (arguments,) = check_examples(sections, "takes")
    assert arguments == {
        "text": "text", "kind": "small", "day": "2025-01-31", "inner": {"size": 1, "ratio": 0.5}, "several": [],
        "maybe": True, "perhaps": "x", "code": "EUR", "secret": "text",
    }  # fmt: skip
    assert '| `text` | string | Yes | A \\| B C | `"text"` |' in sections[3]
    assert "| `maybe` | boolean or null | Yes |  | `true` |" in sections[3]
    assert "| `more` | integer | No |  | `0` |" in sections[4]
    (function,) = to_openai_tools(discover(tmp_path))
    assert blocks(sections[3]) == [function["function"]["parameters"]]


def model(field: str) -> str:
    return f"class In(BaseModel):\n    field: str = {field}\nTakes.input_schema = In"


FILES = """
class Output(BaseModel):
    chart: str = Field(json_schema_extra={"contentEncoding": "base64", "contentMediaType": "image/png"})
    key: str = Field(json_schema_extra={"x-sensitive": True})
Takes.output_schema = Output
"""
NO_SAMPLE = {3: "| `field` | string | Yes |  |  |", 7: "\n\nNone can be made up from the schema.\n"}
# What a module says, and what stands in a section of its document.
TOLD: dict[str, tuple[str, dict[int, str]]] = {
    "documentation, its headings below ours": (
        "Takes.documentation = '# A\\n\\n## C'", {1: "\n\nTakes it.\n\n#### A\n\n##### C\n"},
    ),
    "files": (FILES, {4: "`chart` comes as content of type `image/png`.", 8: "sensitive values"}),
    "no valid text": (model("Field(pattern='^[A-Z]{3}$')"), NO_SAMPLE),
    "a pattern that is none of Python's": (model(r"Field(pattern=r'^\p{L}+$')"), NO_SAMPLE),
    "nothing is valid": (model("Field(json_schema_extra={'not': {}})"), NO_SAMPLE),
    "a text of a format": (model("Field(json_schema_extra={'format': 'ipv4'})"), NO_SAMPLE),
    "a read-only module": ("Takes.annotations = ModuleAnnotations(readonly=True)", {6: "Idempotent: ", 8: "It only r"}),
    "an idempotent module": ("Takes.annotations = ModuleAnnotations(idempotent=True)", {6: "Idempotent: to repeat it"}),
}  # fmt: skip


@pytest.mark.parametrize(("source", "told"), TOLD.values(), ids=TOLD)
def test_document_says_what_the_module_does(capfd: Capture, tmp_path: Path, source: str, told: dict[int, str]) -> None:
    sections = documented(tmp_path, capfd, source)
    for number, text in told.items():
        assert text in sections[number]


def test_document_examples_are_the_modules_own(capfd: Capture, tmp_path: Path) -> None:
    source = """
        Takes.examples = [
            ModuleExample("now", {"day": date(2026, 2, 3)}, {"price": Decimal("1.5")}),
            ModuleExample("never", {"day": 7}),
            {"inputs": {"day": "2026-02-04"}},
        ]
        """
    sections = documented(tmp_path, capfd, source)
    assert check_examples(sections, "takes") == [{"day": "2026-02-03"}, {"day": "2026-02-04"}]


# ---- --export client ----


@pytest.mark.parametrize(
    ("package", "path"),
    [("apcore_mcp", ["src/", ".", str(ROOT)]), ("anyproject._vendor.apcore_mcp", [])],
    ids=["installed", "vendored"],
)
def test_client_entry_starts_from_anywhere(extensions: Path, tmp_path: Path, package: str, path: list[str]) -> None:
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
    vscode, claude, hint = ended.stderr.splitlines()[-3:]
    assert vscode == "code --add-mcp " + shlex.quote(json.dumps({"name": name, **entry}))
    assert claude == f"claude mcp add-json {shlex.quote(name)} " + shlex.quote(json.dumps(entry))
    assert "in a folder of its own and without the variables of this shell" in hint
    assert ("write.py is left out" in ended.stderr) is not bool(path)


def test_client_entry_has_flags_of_variables(extensions: Path, capfd: Capture, monkeypatch: Monkeypatch) -> None:
    """Before those that are given, which win there as here."""
    (extensions.parent / "log.json").write_text('{"version": 1}')
    monkeypatch.chdir(extensions.parent)
    variables = {"TAGS": "public calm", "PREFIX": "hand", "NAME": "", "EXTENSIONS_DIR": extensions.name}
    for name, value in variables.items():
        monkeypatch.setenv(f"APCORE_MCP_{name}", value)
    assert main(["--export", "client", "--prefix", "voice", "--log-config", "log.json"]) == 0
    (entry,) = json.loads(capfd.readouterr().out)["mcpServers"].values()
    assert entry["env"].keys() == {"PYTHONPATH"}
    for name in variables:
        monkeypatch.delenv(f"APCORE_MCP_{name}")
    monkeypatch.chdir("/")
    assert main([*entry["args"][2:], "--check"]) == 0
    assert capfd.readouterr().err == "voice.shout\n1 tool would be served, 0 left out\n"  # where stdout leads by now


def entry_for(extensions: Path, capfd: Capture, flags: str) -> tuple[Any, str]:
    """The entry of a client for a server with these flags, and all that was printed."""
    assert main(["--extensions-dir", str(extensions), "--export", "client", *flags.split()]) == 0
    out, err = capfd.readouterr()
    return json.loads(out)["mcpServers"]["apcore-mcp"], out + err


ADDRESSES = {
    "streamable-http --port 9000": {"type": "http", "url": "http://127.0.0.1:9000/mcp"},
    "sse --host ::1": {"type": "sse", "url": "http://[::1]:8000/sse"},
    "streamable-http --host 0.0.0.0 --allowed-hosts x.org": {"type": "http", "url": "http://127.0.0.1:8000/mcp"},
}


@pytest.mark.parametrize("flags", ADDRESSES)
def test_client_entry_of_an_http_server_is_its_address(extensions: Path, capfd: Capture, flags: str) -> None:
    entry, printed = entry_for(extensions, capfd, f"--transport {flags}")
    assert entry == ADDRESSES[flags]
    assert "A client starts the server" not in printed


@pytest.mark.parametrize("flag", ["--state-key ", "--state-key=", "--state-k "])
def test_client_entry_has_no_secret(extensions: Path, capfd: Capture, flag: str) -> None:
    """It is pasted into files, and what it starts stands in the list of processes."""
    entry, printed = entry_for(extensions, capfd, f"--stateless {flag}{'hush' * 8}")
    assert "hush" not in printed
    assert entry["args"][-1] == "--stateless"


@pytest.mark.parametrize("flags", ["", "--prefix none", "--tags no --read-only"])
def test_client_entry_comes_with_warnings(extensions: Path, capfd: Capture, caplog: Caplog, flags: str) -> None:
    (extensions / "broken.py").write_text("def broken(:")
    entry_for(extensions, capfd, flags)
    broken, *others = messages_logged(caplog)
    assert broken.startswith(f"{extensions / 'broken.py'} is left out: SyntaxError: ")
    assert others == (["All 3 modules are left out: by an option, or as said above"] if flags else [])


# ---- --check ----

NO_OBJECT = MODULE.format(tag="x") + "    input_schema = {'type': 'string'}\n"
ODD_NAME = MODULE.format(tag="x") + "    input_schema = {'type': 'object', 'properties': {'a b': {}}}\n"
TALKS = "import logging\nlogging.getLogger('apcore.x').warning('of apcore')\n" + MODULE.format(tag="x")
ALL = ["hand.write", "voice.say", "voice.shout"]
PORTABLE = "--tool-names portable --prefix v --exclude voice.shout"


# A file beside the three, flags, what is served, how the last line ends, and the warnings.
CHECKED: dict[str, tuple[tuple[str, str], str, list[str], str, list[str]]] = {
    "fine": (("_help.py", "def help(): pass\n"), "", ALL, "0 left out", []),
    "tags": (("_help.py", ""), "--tags calm", ["hand.write", "voice.shout"], "0 left out", []),
    "flags": (("_help.py", ""), PORTABLE, ["voice-say"], "0 left out", []),
    "file": (("no.py", "def broken(:"), "--prefix v", ALL[1:], "1 left out", ["no.py is left out: SyntaxError"]),
    "quiet": (("no.py", "def broken(:"), "--prefix v --log-level ERROR", ALL[1:], "1 left out", []),
    "module": (("hand/write.py", NO_OBJECT), "", ALL[1:], "1 left out", ["Module hand.write is left out: "]),
    "no module": (("help.py", ""), "", ALL, "0 left out, 1 warned of", ["help.py defines no module"]),
    "refused name": (("voice/say.py", ODD_NAME), "", ALL, "0 left out, 1 warned of", ["a b"]),
    "apcore's own": (("voice/say.py", TALKS), "", ALL, "0 left out, 1 warned of", []),
    "filters": (("_help.py", ""), "--prefix none", [], "0 left out", ["All 3 modules are left out: by an option"]),
}


@pytest.mark.parametrize("name", CHECKED)
def test_check_lists_what_would_be_served(extensions: Path, capfd: Capture, caplog: Caplog, name: str) -> None:
    (file, text), flags, served, counts, warnings = CHECKED[name]
    (extensions / file).write_text(text)
    is_fine = served and counts == "0 left out"
    assert main(["--extensions-dir", str(extensions), "--check", *flags.split()]) == (0 if is_fine else 1)
    tools = "1 tool" if len(served) == 1 else f"{len(served)} tools"
    assert capfd.readouterr().out.splitlines() == [*served, f"{tools} would be served, {counts}"]
    for warning, told in zip(warnings, messages_logged(caplog), strict=True):
        assert warning in told


def test_check_of_an_empty_folder_fails(tmp_path: Path, capfd: Capture, caplog: Caplog) -> None:
    assert main(["--extensions-dir", str(tmp_path), "--check"]) == 1
    assert capfd.readouterr().out == "0 tools would be served, 0 left out\n"
    assert messages_logged(caplog) == ["No modules registered"]


@pytest.mark.parametrize(
    ("flags", "printed"), [("--check --export mcp", "]\n"), ("--export mcp --check", "served, 0 left out\n")]
)
def test_of_check_and_export_the_last_one_wins(extensions: Path, capfd: Capture, flags: str, printed: str) -> None:
    assert main(["--extensions-dir", str(extensions), *flags.split()]) == 0
    assert capfd.readouterr().out.endswith(printed)
