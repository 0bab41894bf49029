"""The files of modules: found, loaded, loaded again, gone (FR-CLI-002, F-015)."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import json
import logging
import os
import shutil
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
from apcore import Executor, ModuleAnnotations, Registry
from apcore.utils.redaction import REDACTED_VALUE
from conftest import ANYTHING, HANDSHAKE, MODULE, FunctionalModule, RawClient, connect, echo, serving
from mcp.client import Client
from support import exported_names, followed, messages_logged, run, text_of

from apcore_mcp import core, discover, to_openai_tools
from apcore_mcp.__main__ import main

FUNCTION = "from apcore.decorator import module\n@module(id={!r}, description={!r})\ndef f() -> int: return 1\n"
ENDS = "    def {}(self): raise SystemExit('ends')\n"
SCHEMAS = {"input_schema": ANYTHING, "output_schema": ANYTHING}


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "_LOOK_SECONDS", 0.1)


def write(path: Path, words: str, more: str = "") -> None:
    """A module class that is described by `words` and has `more` in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MODULE.format(tag="x").replace("Say it", words) + more)


def bound(module_id: str, target: str, **more: Any) -> str:
    """A file that binds one function: YAML reads JSON."""
    return json.dumps({"spec_version": "1.0", "bindings": [{"module_id": module_id, "target": target, **more}]})


def test_a_file_that_cannot_be_loaded_is_left_out_by_name_and_the_others_are_served(extensions: Path) -> None:
    """NFR-REL-002, whenever and whatever it raises."""
    say = MODULE.format(tag="bad")
    broken = {
        "bad/syntax.py": "def broken(:\n",
        "bad/missing.py": "import no_such_package_anywhere\n",
        "bad/exits.py": "import sys\nsys.exit(3)\n",
        "bad/initial.py": say + ENDS.format("__init__"),
        "bad/loading.py": say + ENDS.format("on_load"),
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
        "bad/top.binding.yaml": "bindings: []\nmodules: []\n",
    }
    reasons = {
        "bad/bare.py": "from apcore.decorator import module",
        "bad/twice.py": "class Again is left out: TypeError: Say is",
        "bad/twins.py": f"function g is left out: ValueError: the module ID a.b belongs to {extensions}/bad/twins.py",
        "bad/top.binding.yaml": "Unknown top-level keys: ['modules']",
    }
    for name, text in broken.items():
        (extensions / name).parent.mkdir(exist_ok=True)
        (extensions / name).write_text(text)
    ended = run("--extensions-dir", str(extensions), "--export", "openai")
    assert ended.returncode == 0, ended.stderr
    assert sorted(exported_names(ended.stdout)) == ["a-b", "bad-twice", "hand-write", "voice-say", "voice-shout"]
    lines = [line for line in ended.stderr.splitlines() if " WARNING: " in line]
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


# ---- Bindings ----

CLINIC = """
def book(patient, day=None, kind="check-up", minutes=30, tags=(), room=None, pin=""):
    return {"patient": patient, "kind": kind, "minutes": minutes, "room": room, "pin": pin}

def count(n): return n

def lazily(n): yield n
"""
BOOK = {
    "type": "object",
    "properties": {
        "patient": {"type": "string", "minLength": 2, "description": "Who comes \u2014 \u4e88\u7d04"},
        "day": {"type": "string", "format": "date", "default": "2026-06-01"},
        "kind": {"enum": ["check-up", "vaccine"], "default": "check-up"},
        "minutes": {"type": "integer", "minimum": 5, "default": 30},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        "room": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "pin": {"type": "string", "pattern": "^[0-9]*$", "x-sensitive": True},
    },
    "required": ["patient"],
}
BOOKED = {"properties": {"pin": {"x-sensitive": True}, "minutes": {"type": "integer", "maximum": 60}}}


@pytest.mark.parametrize("place", ["entry", "file beside"])
async def test_the_schemas_of_a_binding_hold_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """They are advertised and enforced, for the function gets what JSON said; marks hide values."""
    name = f"_clinic_{place[:4]}"
    (tmp_path / f"{name}.py").write_text(CLINIC)
    (tmp_path / "schemas").mkdir()
    schemas = {"input_schema": BOOK, "output_schema": BOOKED}
    (tmp_path / "schemas" / "book.yaml").write_text(json.dumps(schemas, ensure_ascii=False), encoding="utf-8")
    described = schemas if place == "entry" else {"schema_ref": "schemas/book.yaml"}
    (tmp_path / "clinic.binding.yml").write_text(bound("clinic.book", f"{name}:book", **described))
    monkeypatch.setattr(sys, "path", [*sys.path])
    async with connect(discover(tmp_path)) as client:
        (tool,) = (await client.list_tools()).tools
        assert tool.input_schema == {**BOOK, "additionalProperties": False}
        booked = await client.call_tool("clinic.book", {"patient": "Ann", "room": 3, "pin": "77"})
        assert json.loads(text_of(booked)) == {
            "patient": "Ann", "kind": "check-up", "minutes": 30, "room": 3, "pin": REDACTED_VALUE,
        }  # fmt: skip
        wrong = {"patient": "A", "kind": "x", "minutes": 1, "tags": ["a", 2, "c"], "room": 0.5, "pin": "secret"}
        refused = text_of(await client.call_tool("clinic.book", wrong))
        faults = {line.split(":")[0] for line in refused.splitlines()[1:]}
        assert faults == {"- patient", "- kind", "- minutes", "- tags", "- tags.1", "- room", "- pin"}
        assert "secret" not in refused + caplog.text
        refused = text_of(await client.call_tool("clinic.book", {"patient": "Ann", "rom": 3}))
        assert refused == "Input validation failed:\n- rom: Value is not valid (extra_forbidden)"
        too_long = text_of(await client.call_tool("clinic.book", {"patient": "Ann", "minutes": 90}))
        assert too_long.startswith("Output validation failed")


@pytest.mark.parametrize(
    ("schema", "results"),
    [
        ({"type": "integer", "minimum": 2}, {"3": {"result": 3}, "1": None, '"a"': None}),
        ({"type": ["integer", "null"]}, {"3": {"result": 3}, "null": {}, '"a"': None}),
        ({"$defs": {"N": {"type": "integer"}}, "anyOf": [{"$ref": "#/$defs/N"}]}, {"3": {"result": 3}, '"a"': None}),
        ({"anyOf": [{"type": "object", "required": ["a"]}, {"type": "null"}]}, {'{"a": 1}': {"a": 1}, "null": {}}),
        ({"type": "array", "items": {"type": "integer"}}, {"[1]": {"result": [1]}, '["a"]': None}),
        ({"type": "object", "required": ["a"]}, {'{"a": 1}': {"a": 1}, "{}": None, "3": None}),
        ({}, {"3": {"result": 3}, '{"a": 1}': {"a": 1}, "null": {}}),
    ],
    ids=str,
)
async def test_an_output_schema_of_a_binding_is_of_what_the_function_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: dict[str, Any], results: dict[str, Any]
) -> None:
    """apcore puts what is no dict under `result`, and makes `{}` of None. What does not fit is refused."""
    (tmp_path / "_counts.py").write_text(CLINIC)
    schemas = {"input_schema": {"properties": {"n": {}}}, "output_schema": schema}
    (tmp_path / "counts.binding.yaml").write_text(bound("m.count", "_counts:count", **schemas))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "_counts", raising=False)
    async with connect(discover(tmp_path)) as client:
        for value, result in results.items():
            told = await client.call_tool("m.count", {"n": json.loads(value)})
            assert told.is_error == (result is None)
            assert told.is_error or json.loads(text_of(told)) == result


ENTRIES = {
    "m.lazy": ({"target": "_several:lazily", **SCHEMAS}, "lazily() is a generator, which has no result"),
    "m.other": (
        {"target": "_several:count", **SCHEMAS, "input_schema": {"properties": {"n": {}, "m": {}}}},
        "its input_schema names what count() does not take: got an unexpected keyword argument 'm'",
    ),
    "m.bare": ({"target": "_several:count"}, "target function lacks complete type hints"),
    "m.half": ({"target": "_several:count", "input_schema": {}}, "requires both 'input_schema' and 'output_schema'"),
    "m.both": ({"target": "_several:count", "auto_schema": True, **SCHEMAS}, "specifies multiple schema modes"),
    "m.odd": ({"target": "_several:count", "auto_schema": "maybe"}, "auto_schema must be a boolean or one of"),
    "m.text": ({"target": "_several:count", **SCHEMAS, "input_schema": "x"}, "its input_schema is no mapping"),
    "m.nowhere": ({"target": "_several:count", "schema_ref": "no.yaml"}, "Schema reference file not found"),
    "m.none": ({"target": "_several:nothing", **SCHEMAS}, "Cannot find callable 'nothing'"),
    "m.display": ({"target": "_several:count", "display": {}}, "Unknown binding entry keys: ['display']"),
    "m.aimless": (SCHEMAS, "Binding entry missing 'target'"),
    "number 12": (["m.list"], "Each binding entry must be a mapping"),
}


def test_a_bad_entry_of_a_binding_leaves_out_itself_by_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In apcore's words; and the others are served."""
    (tmp_path / "_several.py").write_text(CLINIC)
    entries: list[Any] = []
    for module_id, (entry, _) in ENTRIES.items():
        entries.append({"module_id": module_id, **entry} if isinstance(entry, dict) else entry)
    good = {"module_id": "m.good", "target": "_several:count", **SCHEMAS}
    document = {"spec_version": "1.0", "bindings": [*entries, good]}
    (tmp_path / "several.binding.yaml").write_text(json.dumps(document))
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert discover(tmp_path).list() == ["m.good"]
    for line, (name, (_, words)) in zip(left_out(caplog, tmp_path), ENTRIES.items(), strict=True):
        assert line.startswith(f"several.binding.yaml: binding {name} is left out: ")
        assert words in line


def test_yaml_is_read_as_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    """And its dates are texts, as JSON has no others."""
    (tmp_path / "_local.py").write_text(CLINIC)
    (tmp_path / "local.binding.yaml").write_text(
        "spec_version: '1.0'\nbindings:\n- {module_id: m.count, target: '_local:count', description: \u4e88\u7d04,"
        " input_schema: {properties: {n: {enum: [2026-01-31], default: 2026-01-31}}}, output_schema: {}}\n",
        encoding="utf-8",
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    ended = run("--extensions-dir", str(tmp_path), "--export", "mcp", env=ascii_only, encoding="utf-8")
    (tool,) = json.loads(ended.stdout)
    assert tool["description"] == "\u4e88\u7d04"
    assert tool["inputSchema"]["properties"]["n"] == {"enum": ["2026-01-31"], "default": "2026-01-31"}


def test_what_apcore_passes_over_is_no_place_for_bindings_either(
    extensions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`--dynamic` looks in the same places."""
    for number, place in enumerate(("_old", ".trash", "node_modules", ".venv/lib", "kept")):
        write(extensions / place / "say.py", "Say it")
        (extensions / place / "os.binding.yaml").write_text(bound(f"m.n{number}", "os.path:join", **SCHEMAS))
    write(extensions / "_draft.py", "Say it")
    assert discover(extensions).list() == ["hand.write", "kept.say", "m.n4", "voice.say", "voice.shout"]
    assert caplog.text == ""


# ---- Classes ----

WITH_DICTS = """
from apcore_mcp import elicit, report_progress

class Overwrite:
    description = "Overwrite the file, if its owner wants it"
    input_schema = output_schema = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}

    async def execute(self, inputs, context):
        return {"name": inputs["name"].upper()}
"""


async def test_a_class_with_dict_schemas_is_a_module_as_it_is_for_register(extensions: Path) -> None:
    """Schemas of the two kinds may be mixed; a dict schema holds as it does for a module that was registered."""
    (extensions / "overwrite.py").write_text(WITH_DICTS)
    write(extensions / "mixed.py", "Say it", "    output_schema = {'type': 'object'}\n")
    async with connect(discover(extensions)) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert [*tools] == ["hand.write", "mixed", "overwrite", "voice.say", "voice.shout"]
        assert tools["overwrite"].input_schema["required"] == ["name"]
        assert (await client.call_tool("overwrite", {"name": "a"})).structured_content == {"name": "A"}
        assert "- name: " in text_of(await client.call_tool("overwrite", {}))
        assert (await client.call_tool("mixed", {"text": "a"})).structured_content == {"text": "a"}


def left_out(caplog: pytest.LogCaptureFixture, folder: Path) -> list[str]:
    """The WARNINGs of ours, with the folder's path cut off."""
    return [text.replace(f"{folder}{os.sep}", "") for text in messages_logged(caplog)]


CLASS = """
class {name}:
    description = {description!r}
    input_schema = {schema}
    output_schema = {{"type": "object"}}
    def execute(self, inputs, context): return {{}}
"""


def a_class(name: str, description: object = "Do it", schema: str = '{"type": "object"}') -> str:
    return CLASS.format(name=name, description=description, schema=schema)


OF_ANOTHER_KIND = "its input_schema is neither a pydantic model nor a dict"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (a_class("Say", ""), "class Say is left out: TypeError: it has no description"),
        (a_class("Say", None), "class Say is left out: TypeError: it has no description"),
        (a_class("Say", schema="'text'"), f"class Say is left out: TypeError: {OF_ANOTHER_KIND}"),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass Text: a: str\n" + a_class("Say", 0, "Text"),
            f"class Say is left out: TypeError: {OF_ANOTHER_KIND}; it has no description",
        ),
        (a_class("Say").replace("output", "out"), "class Say is left out: TypeError: its output_schema is neither a"),
        (
            a_class("First") + a_class("Second"),
            "class Second is left out: TypeError: First is the module of this file: give it a file of its own",
        ),
        (
            a_class("Say") + "    def __init__(self): raise LookupError('no such shop')\n",
            "class Say is left out: LookupError: no such shop (some.py:",
        ),
        (
            "import abc\nclass Base(abc.ABC):\n    @abc.abstractmethod\n    def ask(self): pass\n"
            + a_class("Say").replace("Say:", "Say(Base):"),
            "class Say is left out: TypeError: it is abstract",
        ),
        (
            FUNCTION.format("Not-An-Id", "wrong").replace(" f(", " wrong("),
            "function wrong is left out: InvalidInputError: ",
        ),
        (
            "from apcore import module\n@module\ndef bare() -> int: return 1\n",
            "function bare is left out: `from apcore import module` needs @module():"
            " take `from apcore.decorator import module`",
        ),
    ],
    ids=lambda value: value[:40] if "left out" in value else "-",
)  # fmt: skip
def test_what_looks_like_a_module_and_is_none_is_named_with_the_reason_and_the_rest_of_its_file_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, reason: str
) -> None:
    """It has `execute` and an `input_schema`; beside functions as alone."""
    (tmp_path / "some.py").write_text(FUNCTION.format("is.served", "yes") + text)
    registry = discover(tmp_path)
    assert registry.list() == (["is.served", "some"] if "First" in text else ["is.served"])
    (line,) = left_out(caplog, tmp_path)
    assert line.startswith(f"some.py: {reason}")
    caplog.clear()
    (tmp_path / "some.py").write_text(text)
    assert discover(tmp_path).list() == registry.list()[1:]
    (line,) = left_out(caplog, tmp_path)
    assert line.startswith(f"some.py: {reason}")


def test_helpers_are_no_modules_and_nobody_is_warned_of_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bases, abstract and private classes, imported ones, what has no schema. A file of nothing else is an INFO."""
    caplog.set_level("INFO", logger="apcore_mcp")
    base = a_class("Base", None)
    abstract = a_class("Abstract").replace("Abstract:", "Abstract(abc.ABC):")
    abstract = abstract.replace("def ", "@abc.abstractmethod\n    def ")
    middle = "class Middle(Abstract): pass\n"
    imported = "import sys\nsys.path.append(__file__[:-12])\nfrom _imported import Say as Other\n"
    files = {
        "base.py": base + "\nclass Say(Base): description = 'Say it'\n",
        "abstract.py": "import abc\n" + abstract + a_class("Say").replace("Say:", "Say(Abstract):"),
        "private.py": a_class("_Base") + a_class("_Other", None) + a_class("Say").replace("Say:", "Say(_Base):"),
        "lone.py": a_class("_Lone"),
        "importing.py": imported + a_class("Say"),
        "_imported.py": a_class("Say", None),
        "middle.py": f"import abc\n{abstract}{middle}" + a_class("Say").replace("Say:", "Say(Middle):"),
        "helper.py": "import abc\ndef help(): pass\nclass Command:\n    def execute(self): pass\n" + abstract,
        "empty.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert discover(tmp_path).list() == ["abstract", "base", "importing", "middle", "private"]
    assert left_out(caplog, tmp_path) == []
    told = messages_logged(caplog, logging.INFO)
    assert [line.partition(" defines no module")[0] for line in told] == [
        str(tmp_path / "empty.py"), str(tmp_path / "helper.py"), str(tmp_path / "lone.py"),
    ]  # fmt: skip
    assert "from apcore.decorator import module" in told[0]


def test_of_several_complete_classes_the_one_with_models_is_the_module(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """apcore's own discovery takes that one, and knows no dict schemas."""
    write(tmp_path / "toggle.py", "Toggle it")
    models, _, module = (tmp_path / "toggle.py").read_text().partition("class Say")
    (tmp_path / "toggle.py").write_text(f"{models}{a_class('Extra')}\n\nclass Say{module}{a_class('Last')}")
    registry = discover(tmp_path)
    assert registry.get_definition("toggle").description == "Toggle it"  # type: ignore[union-attr]
    assert [line.partition(": give it")[0] for line in left_out(caplog, tmp_path)] == [
        f"toggle.py: class {name} is left out: TypeError: Say is the module of this file" for name in ("Extra", "Last")
    ]


def annotated(annotations: str) -> str:
    return f"from apcore.decorator import module\n@module(annotations={annotations})\ndef f() -> int: return 1\n"


A_MODULE = a_class("Say")
KNOWN = sorted(field.name for field in dataclasses.fields(ModuleAnnotations))
PASSED_OVER = f"apcore passes over {{}}: the annotations of a module are {', '.join(KNOWN)}"
FINDINGS = {
    "function's approval": (
        {"m.py": annotated("{'requires_aproval': True}")}, [],
        f"m.py: function f is left out: ValueError: {PASSED_OVER.format('requires_aproval')}",
    ),
    "class's approval": (
        {"m.py": A_MODULE + "    annotations = {'approval_required': True}\n"}, [],
        f"m.py: class Say is left out: ValueError: {PASSED_OVER.format('approval_required')}",
    ),
    "binding's approval": (
        {"m.binding.yaml": bound("m.a", "os.path:join", **SCHEMAS, annotations={"needs-approval": True})}, [],
        f"m.binding.yaml: binding m.a is left out: ValueError: {PASSED_OVER.format('needs-approval')}",
    ),
    "metadata's approval": (
        {"m.py": A_MODULE, "m_meta.yaml": "annotations: {requiresApproval: true}"}, [],
        f"m.py: class Say is left out: ValueError: {PASSED_OVER.format('requiresApproval')}",
    ),
    "letters in another order": (
        {"m.py": annotated("{'requires_apporval': True}")}, [],
        f"m.py: function f is left out: ValueError: {PASSED_OVER.format('requires_apporval')}",
    ),
    "outside of annotations": (
        {"m.py": A_MODULE, "m_meta.yaml": "requires_approval: true"}, [],
        f"m.py: class Say is left out: ValueError: {PASSED_OVER.format('requires_approval')}",
    ),
    "misspelt annotations": (
        {"m.py": A_MODULE, "m_meta.yaml": "annotation: {requires_approval: true}"}, [],
        f"m.py: class Say is left out: ValueError: {PASSED_OVER.format('annotation')}",
    ),
    "list of annotations": (
        {"m.py": A_MODULE + "    annotations = ['requires_approval']\n"}, [],
        "m.py: class Say is left out: TypeError: its annotations are neither ModuleAnnotations nor a dict:"
        " ['requires_approval']",
    ),
    "function's hint": (
        {"m.py": annotated("{'read_only': True}")}, ["m.f"],
        f"m.py: module m.f: {PASSED_OVER.format('read_only')}",
    ),
    "approved all the same": (
        {"m.py": annotated("{'requires_approval': True, 'approval_group': 'ops'}")}, ["m.f"],
        f"m.py: module m.f: {PASSED_OVER.format('approval_group')}",
    ),
    "class approved all the same": (
        {"m.py": A_MODULE, "m_meta.yaml": "annotations: {requires_approval: true, destructve: true}"}, ["m"],
        f"m.py: module m: {PASSED_OVER.format('destructve')}",
    ),
    "class's hint": (
        {"m.py": A_MODULE + "    annotations = {'colour': 1}\n"}, ["m"],
        f"m.py: module m: {PASSED_OVER.format('colour')}",
    ),
    "no context": (
        {"m.py": A_MODULE.replace("inputs, context", "inputs")}, [],
        "m.py: class Say is left out: TypeError: its execute() does not take (inputs, context): too many positional"
        " arguments",
    ),
    "one argument more": (
        {"m.py": A_MODULE.replace("context", "context, user")}, [],
        "m.py: class Say is left out: TypeError: its execute() does not take (inputs, context): missing a required"
        " argument: 'user'",
    ),
    "generator": (
        {"m.py": A_MODULE.replace("    def", "    async def").replace("return", "yield")}, [],
        "m.py: class Say is left out: TypeError: execute() is a generator, which has no result:"
        " it returns a dict, and stream() yields",
    ),
    "input_shema": (
        {"m.py": A_MODULE.replace("input_schema", "input_shema")}, [],
        "m.py: class Say is left out: TypeError: its input_schema is neither a pydantic model nor a dict",
    ),
    "excute": (
        {"m.py": A_MODULE.replace("execute", "excute")}, [],
        "m.py: class Say is left out: TypeError: it has no execute()",
    ),
    "warned by apcore": (
        {"m.py": annotated("{'cache_ttl': -1}")}, ["m.f"], "m.py: cache_ttl -1 is negative, clamping to 0",
    ),
    "no version": (
        {"m.binding.yaml": bound("m.a", "os.path:join", **SCHEMAS).replace('"spec_version": "1.0", ', "")}, ["m.a"],
        "m.binding.yaml: spec_version is None, and apcore knows '1.0'",
    ),
    "generator function": (
        {"m.py": FUNCTION.format("m.a", "lazy").replace("return", "yield")}, [],
        "m.py: function f is left out: TypeError: f() is a generator, which has no result:"
        " it returns a dict, and stream() yields",
    ),
    "line": (
        {"m.py": "def f():\n    return 1 / 0\n\nf()\n"}, [],
        "m.py is left out: ZeroDivisionError: division by zero (m.py:2)",
    ),
    "line of no Python": ({"m.py": "\ndef broken(:\n"}, [], "m.py is left out: SyntaxError: invalid syntax (m.py:2)"),
    "line of a cause": (
        {"m.py": "try:\n    {}['a']\nexcept KeyError as error:\n    raise ImportError('no a') from error\n"}, [],
        "m.py is left out: ImportError: no a (KeyError: 'a') (m.py:4)",
    ),
    "Context of something": (
        {
            "m.py": "from typing import Any\nfrom apcore import Context\nfrom apcore.decorator import module\n"
            "@module\ndef f(context: Context[Any]) -> int: return 1\n"
        }, [],
        "m.py is left out: apcore knows its Context in one form: write `context: Context`, without brackets and without"
        " None (m.py:4)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "served", "warning"), FINDINGS.values(), ids=FINDINGS)
def test_a_check_finds_what_would_only_show_in_a_call(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, files: dict[str, str],
    served: list[str], warning: str,
) -> None:  # fmt: skip
    """And a start warns of it. An approval that is misspelt leaves its module out: nobody would be asked."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert main(["--extensions-dir", str(tmp_path), "--check"]) == 1
    assert capfd.readouterr().out.splitlines()[:-1] == served
    told = left_out(caplog, tmp_path)
    assert told[0] == warning
    assert told[1:] == ([] if served else ["No modules registered"])
    assert [record for record in caplog.records if record.name.startswith("apcore.")] == [], "ours says it, once"


def test_what_apcore_warns_of_is_told_whatever_its_loggers_let_through(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`logging.config` disables the loggers that are there already by default. Afterwards all is as it was."""
    (tmp_path / "m.py").write_text(annotated("{'cache_ttl': -1, 'read_only': True}"))
    (tmp_path / "n.py").write_text(annotated("{'requires_aproval': True}"))
    above, one = logging.getLogger("apcore"), logging.getLogger("apcore.decorator")
    level = above.level
    above.setLevel(logging.CRITICAL)
    one.disabled = True
    try:
        assert discover(tmp_path).list() == ["m.f"]
        assert (above.level, above.filters, one.disabled, one.filters) == (logging.CRITICAL, [], True, [])
    finally:
        above.setLevel(level)
        one.disabled = False
    assert [line.partition(" ")[0] for line in left_out(caplog, tmp_path)] == ["m.py:", "m.py:", "n.py:"]


@pytest.mark.parametrize("execute", [
    "def execute(self, inputs, context, *, key=None): return {}", "def execute(self, *args): return {}",
    "@staticmethod\n    def execute(inputs, context=None): return {}",
    "@classmethod\n    def execute(cls, inputs, context): return {}",
    "def run(self, a, inputs, context): return {}\n    import functools\n    execute = functools.partialmethod(run, 1)",
    "annotations = {'readonly': True, 'extra': {'requires_aproval': 1}}\n    async def execute(self, i, c): return {}",
    "from apcore import ModuleAnnotations\n    annotations = ModuleAnnotations()\n    execute = lambda self, i, c: {}",
])  # fmt: skip
def test_a_check_is_content_with_every_form_that_works(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], execute: str
) -> None:
    head, _, _ = A_MODULE.partition("def execute")
    (tmp_path / "m.py").write_text(head + execute)
    (tmp_path / "m_meta.yaml").write_text("annotations: {idempotent: true}\nx-note: any\nstreams: 1\n")
    assert main(["--extensions-dir", str(tmp_path), "--check"]) == 0, capfd.readouterr().err
    assert Executor(discover(tmp_path)).call("m", {}) == {}


async def test_a_module_registered_by_hand_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    registry.register("m.hint", FunctionalModule(echo, annotations={"read_only": True}))
    registry.register("m.guard", FunctionalModule(echo, annotations={"requires_aproval": True}))
    registry.register("m.call", FunctionalModule(lambda inputs: inputs))
    registry.register("m.fine", FunctionalModule(echo, annotations={"readonly": True}))
    for times in (1, 0):
        names = [tool["function"]["name"] for tool in to_openai_tools(registry)]
        assert names == ["m-call", "m-fine", "m-hint"]
        told = [line for line in messages_logged(caplog) if "left out" not in line]
        assert sorted(told) == times * [
            "Module m.call: its execute() does not take (inputs, context): too many positional arguments",
            f"Module m.hint: {PASSED_OVER.format('read_only')}",
        ]
        assert any(line.startswith("Module m.guard is left out: ValueError: ") for line in messages_logged(caplog))
        caplog.clear()


NOT_THERE = "entry_point in the file's metadata names it, and no such class has execute() and input_schema"


def test_the_class_that_a_files_metadata_chooses_is_its_module_or_nothing_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "some.py").write_text(a_class("First") + a_class("Second", "two") + a_class("Third", None))
    for chosen, description, reason in (
        ("Second", "two", None),
        ("Third", None, "some.py: class Third is left out: TypeError: it has no description"),
        ("Fourth", None, f"some.py: class Fourth is left out: {NOT_THERE}"),
    ):
        (tmp_path / "some_meta.yaml").write_text(f"entry_point: some:{chosen}")
        definition = discover(tmp_path).get_definition("some")
        assert (definition and definition.description) == description
        assert left_out(caplog, tmp_path) == ([reason] if reason else [])
        caplog.clear()


# ---- Links ----


def test_a_link_inside_the_folder_is_followed_under_its_own_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A Kubernetes ConfigMap is mounted as links through `..data`, which is replaced when it changes."""
    folder = tmp_path / "mounted"
    for name in ("shop.py", "tools/text.py"):
        write(folder / "..2026" / name, name)
    (folder / "..2026" / "shop_meta.yaml").write_text("description: beside the link")
    (folder / "..2026" / "_mounted.py").write_text("def negate(a: int) -> int: return -a\n")
    (folder / "..2026" / "maths.binding.yaml").write_text(bound("m.negate", "_mounted:negate"))
    (folder / "..data").symlink_to("..2026")
    for name in ("shop.py", "shop_meta.yaml", "_mounted.py", "maths.binding.yaml", "tools"):
        (folder / name).symlink_to(f"..data/{name}")
    registry = discover(folder)
    assert registry.list() == ["m.negate", "shop", "tools.text"]
    assert registry.get_definition("shop").description == "beside the link"  # type: ignore[union-attr]
    assert Executor(registry).call("m.negate", {"a": 1}) == {"result": -1}
    assert caplog.text == ""


def test_a_link_that_leads_out_or_nowhere_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that leads back ends there; what a link describes is not served without its description."""
    folder = tmp_path / "folder"
    write(folder / "kept" / "say.py", "Say it")
    write(folder / "described.py", "Say it")
    write(tmp_path / "outside" / "say.py", "Not here")
    (tmp_path / "meta.yaml").write_text("annotations: {requires_approval: true}")
    links = {
        "data.csv": "../outside/data.csv",
        "described_meta.yaml": "../meta.yaml",
        "file.py": "../outside/say.py",
        "folder": "../outside",
        "kept/back": "..",
        "nowhere.py": "no_such_file.py",
        "one": "two/deep",
        "two": "kept",
    }
    for link, target in links.items():
        (folder / link).symlink_to(target)
    assert discover(folder).list() == ["kept.say", "two.say"]
    out = "a link out of the extensions directory, to"
    assert left_out(caplog, folder) == [
        f"described.py is left out: OSError: described_meta.yaml is {out} {tmp_path}/meta.yaml",
        f"file.py is left out: OSError: file.py is {out} {tmp_path}/outside/say.py",
        f"folder is left out: OSError: folder is {out} {tmp_path}/outside",
        "nowhere.py is left out: OSError: nowhere.py cannot be read: No such file or directory",
    ]


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
        (extensions / "spare.binding.yaml").write_text(bound("m.spare", "_bound:negate"))
        hand.write_text(MODULE.format(tag="new"))
        functions = {"forms.double": [], "forms.half": [], "maths.add": ["plus"]}
        wait_for({**functions, "hand.write": ["public", "new"], "m.negate": ["new"], "m.spare": []})
        bindings.write_text("bindings: [unclosed")
        (extensions / "spare.binding.yaml").unlink()
        forms.unlink()
        hand.write_text("tags = []\n")
        (extensions / "about.py").write_text(FUNCTION.format("maths.add", "Add"))
        wait_for({"maths.add": []})
        bindings.write_text(bound("m.negate", "_bound:negate", tags=["mended"]))
        wait_for({"maths.add": [], "m.negate": ["mended"]})
        status, stderr = client.end()
    assert status == 0
    assert b"hand.binding.yaml is left out" in stderr
    assert b"hand/write.py defines no module: " in stderr


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


async def test_a_file_keeps_its_modules_while_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Metadata that is empty for a moment would say that no approval is required. Two looks have to agree; and what
    changes between the look and the reading is left out, not believed."""
    monkeypatch.setattr(core, "_LOOK_SECONDS", 0)  # here, each look is this test's own
    path, metadata = tmp_path / "say.py", tmp_path / "say_meta.yaml"
    guarded = "annotations: {requires_approval: true}\n"

    def shown() -> tuple[str, bool] | None:
        definition = registry.get_definition("say")
        return definition and (definition.description, definition.annotations.requires_approval)

    write(path, "one")
    metadata.write_text(guarded)
    registry = discover(tmp_path)
    files = core._files_of(registry)
    assert shown() == ("one", True)
    for half in ("", "annotations:", None):  # truncated, half written, moved away
        if half is None:
            metadata.unlink()
        else:
            metadata.write_text(half)
        files.update()
        assert shown() == ("one", True)
        metadata.write_text(guarded)
        files.update()
        assert shown() == ("one", True)
        files.update()
    write(path, "two")
    write(tmp_path / "zz.py", "three")
    metadata = tmp_path / "zz_meta.yaml"
    (tmp_path / "a.py").write_text(f"open({str(metadata)!r}, 'w').write({guarded!r})\n")  # a slow import leaves time
    files.update()
    assert shown() == ("one", True)
    files.update()
    assert shown() == ("two", True)
    assert not registry.has("zz")
    assert left_out(caplog, tmp_path) == ["zz.py is left out: OSError: zz_meta.yaml is being written"]
    path.unlink()
    files.update()
    assert shown() == ("two", True)
    files.update()
    assert shown() is None
    assert registry.get_definition("zz").annotations.requires_approval  # type: ignore[union-attr]


async def test_a_file_that_changes_is_called_by_its_new_model(tmp_path: Path) -> None:
    written, path = tmp_path / "hot" / "ping.new", tmp_path / "hot" / "ping.py"
    look = "    def execute(self, inputs, context):\n"
    look += "        return {'text': '', 'times': len(context.redacted_inputs['text'])}\n"
    write(path, "one", look)
    async with followed(registry_of_files(tmp_path), HANDSHAKE, dynamic=True) as following:
        assert text_of(await following[0].call_tool("hot.ping", {"text": "abc"})) == '{"text":"","times":3}'
        write(written, "two", look)
        description = 'description="What to say"'
        mark = 'json_schema_extra={"x-sensitive": True}'
        written.write_text(written.read_text().replace(description, f"{description}, {mark}"))
        written.replace(path)
        await wait_until_shown(following, {"hot.ping": "two"})
        expected = {"text": REDACTED_VALUE, "times": len(REDACTED_VALUE)}
        assert json.loads(text_of(await following[0].call_tool("hot.ping", {"text": "abc"}))) == expected


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


@pytest.mark.parametrize(
    ("roots", "mapped", "module_ids"),
    [
        (["a"], {}, ["sell", "shop.find"]),
        (["a"], {"shop/find.py": "orders.find"}, ["orders.find", "sell"]),
        (["a", "b"], {}, ["a.sell", "a.shop.find", "b.sell"]),
        (["a", {"root": "b", "namespace": "beta"}], {}, ["a.sell", "a.shop.find", "beta.sell"]),
        ([{"root": "a", "namespace": "alpha"}], {"sell.py": "alpha.buy"}, ["alpha.buy", "alpha.shop.find"]),
        (["a", "linked"], {}, ["a.sell", "a.shop.find", "linked.sell"]),
    ],
    ids=str,
)
def test_a_file_has_the_id_that_apcores_own_discovery_gives_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roots: list[Any], mapped: dict[str, str], module_ids: list[str]
) -> None:
    """With an ID map, namespaces and several folders, one of them a link; and it keeps that ID when it changes."""
    monkeypatch.setattr(core, "_LOOK_SECONDS", 0)
    monkeypatch.chdir(tmp_path)
    for name in ("a/sell.py", "a/shop/find.py", "b/sell.py"):
        write(tmp_path / name, "old")
    (tmp_path / "linked").symlink_to("b")
    mappings = [{"file": file, "id": module_id} for file, module_id in mapped.items()]
    (tmp_path / "ids.yaml").write_text(json.dumps({"mappings": mappings}))
    registries = [Registry(extensions_dirs=roots, id_map_path="ids.yaml") for _ in range(2)]
    registries[0].discover()
    for registry in registries:
        core._files_of(registry).update()
        assert registry.list() == module_ids
    for name in ("a/sell.py", "a/shop/find.py", "b/sell.py"):
        write(tmp_path / name, "new")
    for registry in registries:
        core._files_of(registry).update()
        core._files_of(registry).update()
        assert [registry.get_definition(each).description for each in registry.list()] == ["new"] * len(module_ids)
        assert registry.list() == module_ids


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


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "closed" / "say.py", "Say it")
    (tmp_path / "closed").chmod(0)
    try:
        assert discover(tmp_path).list() == []
    finally:
        (tmp_path / "closed").chmod(0o700)
    assert left_out(caplog, tmp_path) == ["closed is left out: OSError: closed cannot be read: Permission denied"]


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


async def test_a_changed_config_map_is_taken_in_although_no_link_of_a_module_changes(tmp_path: Path) -> None:
    """Kubernetes replaces `..data`; here the files of both versions are of one size and one time."""
    for version in ("v1", "v2"):
        write(tmp_path / f"..{version}" / "shop.py", version)
        os.utime(tmp_path / f"..{version}" / "shop.py", ns=(0, 1_700_000_000_000_000_000))
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "shop.py").symlink_to("..data/shop.py")
    async with followed(discover(tmp_path), HANDSHAKE, dynamic=True) as following:
        await wait_until_shown(following, {"shop": "v1"})
        (tmp_path / "..new").symlink_to("..v2")
        (tmp_path / "..new").replace(tmp_path / "..data")
        await wait_until_shown(following, {"shop": "v2"})


async def test_of_two_files_with_one_id_the_first_has_it_until_it_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A change of the first changes nothing in that; the other is loaded again then, and is warned of once."""
    first, second, other = tmp_path / "a.py", tmp_path / "b.py", tmp_path / "c.py"
    first.write_text(FUNCTION.format("shop.find", "first"))
    second.write_text(FUNCTION.format("shop.find", "second"))
    registry = discover(tmp_path)
    async with followed(registry, HANDSHAKE, dynamic=True) as following:
        await wait_until_shown(following, {"shop.find": "first"})
        first.write_text(FUNCTION.format("shop.find", "first again"))
        await wait_until_shown(following, {"shop.find": "first again"})
        other.write_text(FUNCTION.format("shop.sell", "sell"))
        await wait_until_shown(following, {"shop.find": "first again", "shop.sell": "sell"})
        assert left_out(caplog, tmp_path) == [
            "b.py: function f is left out: ValueError: the module ID shop.find belongs to a.py"
        ]
        caplog.clear()
        first.unlink()
        await wait_until_shown(following, {"shop.find": "second", "shop.sell": "sell"})
        registry.register("shop.buy", FunctionalModule(echo, description="by hand"))
        other.write_text(FUNCTION.format("shop.buy", "buy"))
        await wait_until_shown(following, {"shop.find": "second", "shop.buy": "by hand"})
        registry.unregister("shop.buy")
        await wait_until_shown(following, {"shop.find": "second", "shop.buy": "buy"})
    assert left_out(caplog, tmp_path) == [
        "c.py: function f is left out: ValueError: the module ID shop.buy belongs to a module that comes from no file"
    ]


def test_a_registry_that_nobody_holds_is_freed_with_what_its_files_have_made(tmp_path: Path) -> None:
    write(tmp_path / "say.py", "Say it")
    registry = discover(tmp_path)
    to_openai_tools(registry)
    freed = [weakref.ref(registry), weakref.ref(registry.get("say"))]
    del registry
    gc.collect()
    assert [reference() for reference in freed] == [None, None]


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
    assert messages_logged(caplog) == []


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
