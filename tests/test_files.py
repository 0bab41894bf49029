"""The files of modules: found, loaded, loaded again, gone (FR-CLI-002, F-015; design "Discovery", "Dynamic")."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest
from apcore import Executor, Registry
from conftest import HANDSHAKE, MODULE, FunctionalModule, RawClient, echo, serving
from mcp.client import Client
from support import exported_names, followed, run, text_of

import apcore_mcp
from apcore_mcp import discover
from apcore_mcp.__main__ import main


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


def test_what_apcore_passes_over_is_no_place_for_bindings_either_and_links_are_not_followed(extensions: Path) -> None:
    binding = "spec_version: '1.0'\nbindings:\n- {{module_id: m.{}, target: 'os.path:join',"
    binding += " input_schema: {{type: object}}, output_schema: {{type: object}}}}\n"
    for number, place in enumerate(("_old", ".trash", "node_modules", ".venv/lib", "kept")):
        (extensions / place).mkdir(parents=True)
        (extensions / place / "os.binding.yaml").write_text(binding.format(f"n{number}"))
        (extensions / place / "say.py").write_text(MODULE.format(tag="x"))
    (extensions / "_draft.py").write_text(MODULE.format(tag="x"))
    (extensions / "linked.py").symlink_to(extensions / "voice" / "say.py")
    (extensions / "linked.binding.yaml").symlink_to(extensions / "kept" / "os.binding.yaml")
    (extensions / "linked_folder").symlink_to(extensions / "kept")
    ended = run("--extensions-dir", str(extensions), "--export", "openai")
    assert sorted(exported_names(ended.stdout)) == ["hand-write", "kept-say", "m-n4", "voice-say", "voice-shout"]
    assert ended.stderr == ""


def test_a_binding_that_marks_a_secret_is_left_out_as_apcore_would_lose_the_mark(
    extensions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bound = "spec_version: '1.0'\nbindings:\n- module_id: m.read\n  target: 'os.path:join'\n"
    bound += "  input_schema: {type: object}\n"
    bound += "  output_schema: {type: object, properties: {pin: {type: string, x-sensitive: true}}}\n"
    (extensions / "read.binding.yaml").write_text(bound)
    registry = discover(extensions)
    assert "m.read" not in registry.list()
    [warning] = [record.getMessage() for record in caplog.records if "read.binding.yaml is left out" in record.message]
    assert "mark it in a model" in warning


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


def test_the_second_of_two_functions_with_one_id_is_not_served_in_silence(extensions: Path) -> None:
    function = "@module(id='a.b', description='{0}')\ndef {0}() -> int: return 1\n"
    text = "from apcore.decorator import module\n" + function.format("first") + function.format("second")
    (extensions / "twins.py").write_text(text)
    ended = run("--extensions-dir", str(extensions), "--export", "mcp", "--prefix", "a.")
    assert [tool["description"] for tool in json.loads(ended.stdout)] == ["first"]
    assert "twins.py is left out" in ended.stderr
    assert "'a.b' is already registered" in ended.stderr


def test_a_function_whose_id_is_none_takes_no_other_down(extensions: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "from apcore.decorator import module\n@module(id='', description='None')\ndef f() -> int: return 1\n"
    (extensions / "nameless.py").write_text(text)
    assert apcore_mcp.discover(extensions).list() == ["hand.write", "voice.say", "voice.shout"]
    assert "nameless.py is left out: " in caplog.text


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
        wait_for({"maths.add": []})
        bindings.write_text(bound.format("mended"))
        wait_for({"maths.add": [], "m.negate": ["mended"]})
        bindings.unlink()
        wait_for({"maths.add": []})
        status, stderr = client.end()
    assert status == 0
    assert b"hand.binding.yaml is left out" in stderr
    assert b"hand/write.py is left out: it has to define one module class" in stderr


# ---- The files of modules ----

MODULE_FILE = '''
from typing import Any
from pydantic import BaseModel

class Nothing(BaseModel):
    pass

class Said(BaseModel):
    said: str

class Hot:
    """A module that is edited while it is served."""
    description = "{words}"
    input_schema = Nothing
    output_schema = Said

    def execute(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {{"said": "{words}"}}

    {more}
'''
ENDS = "def {hook}(self): raise SystemExit('{hook}')"


def write(path: Path, words: str, more: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MODULE_FILE.format(words=words, more=more))


def registry_of_files(directory: Path) -> Registry:
    registry = Registry(extensions_dir=str(directory))
    registry.discover()
    return registry


Shown = tuple[Client, asyncio.Queue[object]]


async def wait_until_shown(following: Shown, expected: dict[str, str]) -> None:
    """Wait for tools with these descriptions, and for no others."""
    client, changes = following
    async with asyncio.timeout(15):
        while {tool.name: tool.description for tool in (await client.list_tools()).tools} != expected:
            await changes.get()


async def test_files_become_change_and_cease_to_be_tools(tmp_path: Path) -> None:
    path = tmp_path / "hot" / "ping.py"
    async with followed(registry_of_files(tmp_path), HANDSHAKE, dynamic=True) as following:
        client, _ = following
        write(path, "once")
        await wait_until_shown(following, {"hot.ping": "once"})
        assert (await client.call_tool("hot.ping")).structured_content == {"said": "once"}
        write(path, "and again")
        await wait_until_shown(following, {"hot.ping": "and again"})
        assert (await client.call_tool("hot.ping")).structured_content == {"said": "and again"}
        path.with_name("ping_meta.yaml").write_text("description: from the metadata")
        await wait_until_shown(following, {"hot.ping": "from the metadata"})
        path.unlink()
        await wait_until_shown(following, {})
        assert text_of(await client.call_tool("hot.ping")) == "Module not found: hot.ping"


async def test_two_edits_of_one_size_within_one_second_are_both_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which Python's cache of bytecode cannot tell apart."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    written, path = tmp_path / "hot" / "ping.new", tmp_path / "hot" / "ping.py"
    async with followed(registry_of_files(tmp_path), HANDSHAKE, dynamic=True) as following:
        for number, said in enumerate(("one", "two")):
            write(written, said)
            os.utime(written, ns=(0, 1_700_000_000_000_000_000 + number))
            written.replace(path)
            await wait_until_shown(following, {"hot.ping": said})


async def test_only_what_a_file_made_goes_with_it_and_nothing_ends_the_following(tmp_path: Path) -> None:
    """What a broken file made goes until it is mended; and an id may be another's meanwhile."""
    for name in ("moved/away", "stays/kept", "stays/stuck"):
        write(tmp_path / f"{name}.py", "old", ENDS.format(hook="on_unload") if "stuck" in name else "")
    (tmp_path / ".#kept.py").symlink_to("user@host.123:456")  # as Emacs locks a file
    registry = registry_of_files(tmp_path)
    registry.register("by.hand", FunctionalModule(echo))
    by_hand = {"by.hand": "A module of a test"}
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        (tmp_path / "moved").rename(tmp_path / "_moved")
        write(tmp_path / "by" / "hand.py", "not this one")
        write(tmp_path / "stays" / "stuck.py", "new")
        (tmp_path / "stays" / "kept.py").write_text("def broken(:")
        write(tmp_path / "zz.py", "the last one")
        await wait_until_shown(following, {**by_hand, "stays.stuck": "new", "zz": "the last one"})
        write(tmp_path / "stays" / "kept.py", "new", ENDS.format(hook="on_load"))
        (tmp_path / "by" / "hand.py").unlink()
        write(tmp_path / "zz.py", "once more")
        await wait_until_shown(following, {**by_hand, "stays.stuck": "new", "zz": "once more"})
        write(tmp_path / "stays" / "kept.py", "mended")
        await wait_until_shown(following, {**by_hand, "stays.stuck": "new", "stays.kept": "mended", "zz": "once more"})


async def test_whom_a_registry_asks_before_a_file_runs_is_asked_and_may_forbid_it(tmp_path: Path) -> None:
    asked = []

    def ask(path: Path) -> None:
        asked.append(path.name)
        if path.name == "forbidden.py":
            raise PermissionError("not signed")

    write(tmp_path / "kept.py", "old")
    registry = Registry(extensions_dir=str(tmp_path), pre_approval_hook=ask)
    registry.discover()
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        (tmp_path / "forbidden.py").write_text(FUNCTION_FILE.format(id="is.forbidden", words="no"))
        (tmp_path / "function.py").write_text(FUNCTION_FILE.format(id="a.function", words="yes"))
        await wait_until_shown(following, {"kept": "old", "a.function": "yes"})
    assert sorted(asked) == ["forbidden.py", "function.py", "kept.py"]


FUNCTION_FILE = """
from apcore.decorator import module

@module(id="{id}", description="{words}")
def say() -> str:
    return "{words}"
"""


async def test_a_folder_behind_a_link_is_followed_through_it(tmp_path: Path) -> None:
    """Also back, and though the files of both versions are of one size and one time."""
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / f"{version}.py").write_text(FUNCTION_FILE.format(id=f"only.{version}", words=version))
        (tmp_path / version / "both.py").write_text(FUNCTION_FILE.format(id="in.both", words=version))
        os.utime(tmp_path / version / "both.py", ns=(0, 1_700_000_000_000_000_000))
    current = tmp_path / "current"
    current.symlink_to("v1")
    async with followed(discover(current), HANDSHAKE, dynamic=True) as following:
        for version in ("v1", "v2", "v1"):
            (tmp_path / "new").symlink_to(version)
            (tmp_path / "new").replace(current)
            await wait_until_shown(following, {f"only.{version}": version, "in.both": version})


async def test_what_changes_in_a_virtual_environment_is_told_by_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with followed(discover(tmp_path), HANDSHAKE, dynamic=True) as following:
        for folder in (".venv", "node_modules", "_old", "__pycache__"):
            write(tmp_path / folder / "lib" / "tool.py", "no")
        (tmp_path / "seen.py").write_text(FUNCTION_FILE.format(id="is.seen", words="yes"))
        await wait_until_shown(following, {"is.seen": "yes"})
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == ["No modules registered; server starting with zero tools"]


async def test_a_server_that_starts_again_takes_in_what_changed_meanwhile(tmp_path: Path) -> None:
    """Functions and classes alike, also where apcore's own `discover()` has loaded the first of them."""
    write(tmp_path / "hot.py", "old")
    registry = registry_of_files(tmp_path)
    function = tmp_path / "function.py"
    function.write_text(FUNCTION_FILE.format(id="a.function", words="old"))
    os.utime(function, ns=(0, 0))
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        function.write_text(FUNCTION_FILE.format(id="a.function", words="new"))
        await wait_until_shown(following, {"hot": "old", "a.function": "new"})
    write(tmp_path / "hot.py", "meanwhile")
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        await wait_until_shown(following, {"hot": "meanwhile", "a.function": "new"})
        function.write_text(FUNCTION_FILE.format(id="a.function", words="newest"))
        await wait_until_shown(following, {"hot": "meanwhile", "a.function": "newest"})
        function.unlink()
        await wait_until_shown(following, {"hot": "meanwhile"})


async def test_servers_that_share_a_registry_run_each_file_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = f"\nwith open({str(tmp_path / 'runs')!r}, 'a') as file: file.write('once ')\n"
    write(tmp_path / "hot.py", "old")
    registry = registry_of_files(tmp_path)
    with serving(registry, dynamic=True):
        async with followed(registry, HANDSHAKE, dynamic=True) as following:
            (tmp_path / "function.py").write_text(FUNCTION_FILE.format(id="a.function", words="yes") + runs)
            await wait_until_shown(following, {"hot": "old", "a.function": "yes"})
            write(tmp_path / "hot.py", "new")
            await wait_until_shown(following, {"hot": "new", "a.function": "yes"})
            write(tmp_path / "last.py", "last")
            await wait_until_shown(following, {"hot": "new", "a.function": "yes", "last": "last"})
    assert (tmp_path / "runs").read_text() == "once "
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_a_link_has_made_nothing_and_may_lead_nowhere(tmp_path: Path) -> None:
    """Neither where apcore's own `discover()` has loaded what it leads to, nor where it leads to itself."""
    write(tmp_path / "hot.py", "old")
    registry = registry_of_files(tmp_path)
    link, loop = tmp_path / "link.py", tmp_path / "loop.py"
    link.symlink_to("hot.py")
    loop.symlink_to("loop.py")
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        link.unlink()
        loop.unlink()
        loop.symlink_to("./loop.py")
        write(tmp_path / "last.py", "last")
        await wait_until_shown(following, {"hot": "old", "last": "last"})
    loop.unlink()
    loop.symlink_to("loop.py")
    assert discover(tmp_path).list() == ["hot", "last"]


def test_a_bare_decorator_of_the_wrong_import_is_told_the_right_one(
    extensions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (extensions / "bare.py").write_text("from apcore import module\n@module\ndef f(a: int) -> int: return a\n")
    discover(extensions)
    assert "bare.py is left out: " in caplog.text
    assert "from apcore.decorator import module" in caplog.text
    caplog.clear()
    assert main(["--extensions-dir", str(extensions), "--export", "mcp", "--log-level", "ERROR"]) == 0
    assert caplog.text == ""


SHAPES = """
from __future__ import annotations
import pickle
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
    return vars(pickle.loads(pickle.dumps(Point(Line(end={"x": x}).end.x))))
"""


def test_what_is_annotated_may_be_defined_later_in_the_file_and_all_of_it_can_be_pickled(extensions: Path) -> None:
    """For standard dataclasses and pydantic models alike; a module may give work to other processes."""
    (extensions / "shapes.py").write_text(SHAPES)
    assert Executor(discover(extensions)).call("s.hape", {"x": 1}) == {"x": 1, "y": None}
