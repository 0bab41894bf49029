"""The files of modules: found, loaded, loaded again, gone (FR-CLI-002, F-015; design "Discovery", "Dynamic")."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from apcore import Executor, Registry
from conftest import ANYTHING, HANDSHAKE, MODULE, FunctionalModule, RawClient, connect, echo, serving
from mcp.client import Client
from support import exported_names, followed, run, text_of

from apcore_mcp import discover
from apcore_mcp.__main__ import main

FUNCTION = "from apcore.decorator import module\n@module(id={!r}, description={!r})\ndef f() -> int: return 1\n"
ENDS = "    def {}(self): raise SystemExit('ends')\n"
SCHEMAS = {"input_schema": ANYTHING, "output_schema": ANYTHING}


def write(path: Path, words: str, more: str = "") -> None:
    """A module class that is described by `words` and has `more` in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MODULE.format(tag="x").replace("Say it", words) + more)


def bound(module_id: str, target: str, **more: Any) -> str:
    """A file that binds one function: YAML reads JSON."""
    return json.dumps({"spec_version": "1.0", "bindings": [{"module_id": module_id, "target": target, **more}]})


def test_a_file_that_cannot_be_loaded_is_left_out_by_name_and_the_others_are_served(extensions: Path) -> None:
    """NFR-REL-002, whenever and whatever it raises."""
    say, secret = MODULE.format(tag="bad"), {"properties": {"pin": {"type": "string", "x-sensitive": True}}}
    broken = {
        "bad/syntax.py": "def broken(:\n",
        "bad/missing.py": "import no_such_package_anywhere\n",
        "bad/exits.py": "import sys\nsys.exit(3)\n",
        "bad/initial.py": say + ENDS.format("__init__"),
        "bad/loading.py": say + ENDS.format("on_load"),
        "bad/helper.py": "def help(): pass\n",
        "bad/twice.py": say + "\nclass Again(Say): pass\n",
        "bad/described.py": say,
        "bad/described_meta.yaml": "[not, a, mapping]\n",
        "bad/function.py": "from apcore.decorator import module\n@module\ndef untyped(a): pass\n",
        "bad/bare.py": "from apcore import module\n@module\ndef f(a: int) -> int: return a\n",
        "bad/nameless.py": FUNCTION.format("", "None"),
        "bad/twins.py": FUNCTION.format("a.b", "first") + FUNCTION.format("a.b", "second").replace("f()", "g()"),
        "Bad-Place/Its-Name.py": say,
        "system/health.py": say,
        "bad/text.binding.yaml": "bindings: [unclosed\n",
        "bad/target.binding.yaml": bound("bad.target", "no_such_module_here:run", **SCHEMAS),
        "bad/secret.binding.yaml": bound("bad.read", "os.path:join", **SCHEMAS | {"output_schema": secret}),
    }
    reasons = {
        "bad/bare.py": "from apcore.decorator import module",
        "bad/twins.py": "'a.b' is already registered",
        "bad/secret.binding.yaml": "mark it in a model",  # apcore would lose the mark
    }
    for name, text in broken.items():
        (extensions / name).parent.mkdir(exist_ok=True)
        (extensions / name).write_text(text)
    ended = run("--extensions-dir", str(extensions), "--export", "openai")
    assert ended.returncode == 0, ended.stderr
    assert sorted(exported_names(ended.stdout)) == ["a-b", "hand-write", "voice-say", "voice-shout"]
    lines = [line for line in ended.stderr.splitlines() if line.startswith("WARNING")]
    files = [name for name in broken if not name.endswith("_meta.yaml")]
    left_out = [name for name in files for line in lines if name in line and reasons.get(name, "left out") in line]
    assert left_out == files, ended.stderr
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
    return {"x": x * 2, "known": context.trace_id is not None}

@apcore.module(description="Halve")
def halve(a: float) -> float:
    return a / 2

also = add
'''


async def test_functions_with_the_decorator_are_served_beside_classes_and_bindings(
    extensions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the id they give, or the one of their place; what another file defined is not this one's."""
    maths = extensions / "maths"
    maths.mkdir()
    monkeypatch.syspath_prepend(maths)
    other = "from _bound import Say as Other\n"
    (maths / "forms.py").write_text(FUNCTIONS)
    (maths / "both.py").write_text(FUNCTIONS.replace("maths", "m") + other + MODULE.format(tag="x"))
    write(maths / "_bound.py", "Not here", "\ndef negate(a: int) -> int:\n    return -a\n")
    (maths / "bound.binding.yaml").write_text(bound("maths.negate", "_bound:negate"))
    async with connect(discover(extensions), prefix="m") as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert [*tools] == [
            "m.add", "maths.add", "maths.both", "maths.both.double", "maths.both.halve",
            "maths.forms.double", "maths.forms.halve", "maths.negate",
        ]  # fmt: skip
        assert (tools["maths.add"].description, tools["maths.add"].meta["apcore/tags"]) == ("Add", ["sum"])
        assert tools["maths.forms.double"].description == "Double a point."
        for name, given, result in (
            ("maths.add", {"a": 2}, {"result": 3}),
            ("maths.forms.double", {"x": 4}, {"x": 8, "known": True}),
            ("maths.negate", {"a": 2}, {"result": -2}),
        ):
            assert (await client.call_tool(name, given)).structured_content == result
    assert (maths / "imported").read_text() == "once " * 2


def test_what_apcore_passes_over_is_no_place_for_bindings_either_and_links_are_not_followed(
    extensions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever they lead to, or nowhere; `--dynamic` looks in the same places."""
    for number, place in enumerate(("_old", ".trash", "node_modules", ".venv/lib", "kept")):
        write(extensions / place / "say.py", "Say it")
        (extensions / place / "os.binding.yaml").write_text(bound(f"m.n{number}", "os.path:join", **SCHEMAS))
    write(extensions / "_draft.py", "Say it")
    for link, target in (("linked.py", "voice/say.py"), ("linked.binding.yaml", "kept/os.binding.yaml"),
                         ("linked_folder", "kept"), ("loop.py", "loop.py")):  # fmt: skip
        (extensions / link).symlink_to(target)
    assert discover(extensions).list() == ["hand.write", "kept.say", "m.n4", "voice.say", "voice.shout"]
    assert caplog.text == ""


def test_metadata_beside_a_file_and_versions_that_are_numbers_hold(
    extensions: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (extensions / "voice" / "say_meta.yaml").write_text(
        "version: 1.5\ndescription: Told beside\nentry_point: say:Other"
    )
    more = "    version = 2\n\nclass Other(Say):\n    def on_load(self): assert self.version == 2\n"
    write(extensions / "voice" / "say.py", "Say it", more)
    write(extensions / "voice" / "shout.py", "Say it", "    version = 2\n")
    (extensions / "zz.py").write_text(FUNCTION.format("voice.say", "Takes the place of no other"))
    assert main(["--extensions-dir", str(extensions), "--export", "mcp", "--prefix", "voice"]) == 0
    tools = json.loads(capfd.readouterr().out)
    told = {tool["name"]: (tool["description"], tool["_meta"]["apcore/version"]) for tool in tools}
    assert told == {"voice.say": ("Told beside", "1.5"), "voice.shout": ("Say it", "2")}


def test_a_binding_never_gets_the_function_of_another_folders_file(
    extensions: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Python imports one file of a name, whatever leads to it."""
    for name in ("first", "second"):
        (extensions / name / "_pack").mkdir(parents=True)
        (extensions / name / "say.binding.yaml").write_text(bound(f"m.{name}", "_pack.one_name:say"))
        (extensions / name / "_pack" / "one_name.py").write_text(f"def say() -> str: return '{name}'\n")
    (extensions / "link").symlink_to("first")
    monkeypatch.syspath_prepend(extensions / "link")
    registry = discover(extensions)
    assert Executor(registry).call("m.first", {}) == {"result": "first"}
    assert not registry.has("m.second")
    assert f"give {extensions / 'second' / '_pack' / 'one_name.py'} a name of its own" in caplog.text


def test_dynamic_follows_classes_functions_and_bindings(extensions: Path) -> None:
    """They are taken in, again when they change, and out when they go; an id may move to another file."""
    forms, bindings, hand = extensions / "forms.py", extensions / "hand.binding.yaml", extensions / "hand" / "write.py"
    forms.write_text(FUNCTIONS)
    (extensions / "_bound.py").write_text("def negate(a: int) -> int:\n    return -a\n")
    bindings.write_text(bound("m.negate", "_bound:negate", tags=["old"]))
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
        forms.write_text(FUNCTIONS.replace('tags=["sum"]', 'tags=["plus"]').replace("halve", "half"))
        bindings.write_text(bound("m.negate", "_bound:negate", tags=["new"]))
        hand.write_text(MODULE.format(tag="new"))
        functions = {"forms.double": [], "forms.half": [], "maths.add": ["plus"]}
        wait_for({**functions, "hand.write": ["public", "new"], "m.negate": ["new"]})
        bindings.write_text("bindings: [unclosed")
        forms.unlink()
        hand.write_text("tags = []\n")
        (extensions / "about.py").write_text(FUNCTION.format("maths.add", "Add"))
        wait_for({"maths.add": []})
        bindings.write_text(bound("m.negate", "_bound:negate", tags=["mended"]))
        wait_for({"maths.add": [], "m.negate": ["mended"]})
        bindings.unlink()
        wait_for({"maths.add": []})
        status, stderr = client.end()
    assert status == 0
    assert b"hand.binding.yaml is left out" in stderr
    assert b"hand/write.py is left out: ImportError: it has to define one module class" in stderr


# ---- The files below a registry's own directory, while it is served ----


def registry_of_files(directory: Path, **options: Any) -> Registry:
    """What apcore's own `discover()` has loaded."""
    registry = Registry(extensions_dir=str(directory), **options)
    registry.discover()
    return registry


async def wait_until_shown(following: tuple[Client, asyncio.Queue[object]], expected: dict[str, str]) -> None:
    """Wait for tools with these descriptions, and for no others."""
    client, changes = following
    async with asyncio.timeout(15):
        while {tool.name: tool.description for tool in (await client.list_tools()).tools} != expected:
            await changes.get()


async def test_files_become_change_and_cease_to_be_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by two edits of one size within one second, which Python's cache of bytecode cannot tell apart, and by one
    of another size that leaves the time as it was."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    written, path = tmp_path / "hot" / "ping.new", tmp_path / "hot" / "ping.py"
    async with followed(registry_of_files(tmp_path), HANDSHAKE, dynamic=True) as following:
        for number, words in ((0, "one"), (1, "two"), (1, "three")):
            write(written, words, f"    def execute(self, inputs, context): return {{'text': '{words}'}}\n")
            os.utime(written, ns=(0, 1_700_000_000_000_000_000 + number))
            written.replace(path)
            await wait_until_shown(following, {"hot.ping": words})
            assert text_of(await following[0].call_tool("hot.ping", {"text": ""})) == f'{{"text":"{words}"}}'
        path.with_name("ping_meta.yaml").write_text("description: from the metadata")
        await wait_until_shown(following, {"hot.ping": "from the metadata"})
        path.unlink()
        await wait_until_shown(following, {})


async def test_only_what_a_file_made_goes_with_it_and_nothing_ends_the_following(tmp_path: Path) -> None:
    """What a broken file made goes until it is mended; and an id may be another's meanwhile."""
    for name in ("moved/away", "stays/kept", "stays/stuck"):
        write(tmp_path / f"{name}.py", "old", ENDS.format("on_unload") if "stuck" in name else "")
    registry = registry_of_files(tmp_path)
    registry.register("by.hand", FunctionalModule(echo))
    kept, hand = tmp_path / "stays" / "kept.py", "A module of a test"
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        (tmp_path / "moved").rename(tmp_path / "_moved")
        write(tmp_path / "by" / "hand.py", "not this one")
        write(tmp_path / "stays" / "stuck.py", "new")
        kept.write_text("def broken(:")
        write(tmp_path / "zz.py", "the last one")
        await wait_until_shown(following, {"by.hand": hand, "stays.stuck": "new", "zz": "the last one"})
        registry.register("moved.away", FunctionalModule(echo))
        (tmp_path / "_moved").rename(tmp_path / "moved")
        write(kept, "new", ENDS.format("on_load"))
        (tmp_path / "by" / "hand.py").unlink()
        write(tmp_path / "zz.py", "once more")
        shown = {"by.hand": hand, "moved.away": hand, "stays.stuck": "new", "zz": "once more"}
        await wait_until_shown(following, shown)
        write(kept, "mended")
        await wait_until_shown(following, {**shown, "stays.kept": "mended"})


async def test_whom_a_registry_asks_before_a_file_runs_is_asked_and_may_forbid_it(tmp_path: Path) -> None:
    asked = []

    def ask(path: Path) -> None:
        asked.append(path.name)
        if path.name == "forbidden.py":
            raise PermissionError("not signed")

    write(tmp_path / "kept.py", "old")
    registry = registry_of_files(tmp_path, pre_approval_hook=ask)
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        (tmp_path / "forbidden.py").write_text(FUNCTION.format("is.forbidden", "no"))
        (tmp_path / "function.py").write_text(FUNCTION.format("a.function", "yes"))
        await wait_until_shown(following, {"kept": "old", "a.function": "yes"})
    assert sorted(asked) == ["forbidden.py", "function.py", "kept.py"]


async def test_a_folder_behind_a_link_is_followed_through_it(tmp_path: Path) -> None:
    """Also back, and though the files of both versions are of one size and one time."""
    current = tmp_path / "current"
    for version in ("v1", "v2"):
        write(tmp_path / version / f"{version}.py", version)
        write(tmp_path / version / "both.py", version)
        os.utime(tmp_path / version / "both.py", ns=(0, 1_700_000_000_000_000_000))
    current.symlink_to("v1")
    async with followed(discover(current), HANDSHAKE, dynamic=True) as following:
        for version in ("v1", "v2", "v1"):
            (tmp_path / "new").symlink_to(version)
            (tmp_path / "new").replace(current)
            await wait_until_shown(following, {version: version, "both": version})


async def test_a_server_that_starts_again_takes_in_what_changed_meanwhile(tmp_path: Path) -> None:
    """Functions and classes alike, also where apcore's own `discover()` has loaded the first of them."""
    write(tmp_path / "hot.py", "old")
    registry, function = registry_of_files(tmp_path), tmp_path / "function.py"
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        function.write_text(FUNCTION.format("a.function", "old"))
        await wait_until_shown(following, {"hot": "old", "a.function": "old"})
    write(tmp_path / "hot.py", "meanwhile")
    function.write_text(FUNCTION.format("a.function", "meanwhile"))
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        await wait_until_shown(following, {"hot": "meanwhile", "a.function": "meanwhile"})
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
            (tmp_path / "function.py").write_text(FUNCTION.format("a.function", "yes") + runs)
            for words in ("new", "last"):
                write(tmp_path / "hot.py", words)
                await wait_until_shown(following, {"hot": words, "a.function": "yes"})
    assert (tmp_path / "runs").read_text() == "once "
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


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
