"""A folder in, an apcore Registry out, and following its files (FR-CLI-002, F-015)."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from apcore import Executor, ModuleAnnotations, Registry
from apcore.errors import SchemaValidationError
from conftest import ANYTHING, EXTENSIONS, MODULE, FunctionalModule, RawClient, connect, echo, until
from support import REDACTED, Caplog, Monkeypatch, logged, messages_logged, text_of

from apcore_mcp.discovery import Folder, discover

SCHEMAS = {"input_schema": ANYTHING, "output_schema": ANYTHING}
FUNCTION = "from apcore.decorator import module\n@module(id={!r}, description={!r})\ndef f() -> int: return 1\n"
FINE = FUNCTION.format("is.served", "yes")
ENDS = "    def {}(self): raise SystemExit('ends')\n"
SAY = MODULE.format(tag="x")
CLASS = """
class {name}:
    description = {description!r}
    input_schema = {schema}
    output_schema = {{"type": "object"}}
    def execute(self, inputs, context): return {{}}
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: Monkeypatch) -> Iterator[None]:
    """A folder of bindings goes on `sys.path`, and Python keeps what they import; here neither outlives its test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.startswith("_"):
            del sys.modules[name]


def said(words: str, more: str = "") -> str:
    """A file of a module class that is described by `words` and has `more` in it."""
    return SAY.replace("Say it", words) + more


def a_class(name: str = "Say", description: object = "Do it", schema: str = '{"type": "object"}') -> str:
    return CLASS.format(name=name, description=description, schema=schema)


def annotated(annotations: str, more: str = "") -> str:
    return f"from apcore.decorator import module\n@module(annotations={annotations})\ndef f() -> int: return 1\n{more}"


def bound(module_id: str, target: str, **more: Any) -> str:
    """A file that binds one function: YAML reads JSON."""
    entry = {"module_id": module_id, "target": target, **more}
    return json.dumps({"spec_version": "1.0", "bindings": [entry]}, ensure_ascii=False)


def write(path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text, encoding="utf-8")


def load(path: Path, files: dict[str, str] | None = None) -> Folder:
    write(path, files or {})
    folder = Folder(path)
    folder.discover()
    return folder


def left_out(folder: Folder, path: Path) -> list[str]:
    """What the last discover() has left out or warned of, with the path of the folder cut off."""
    return [text.replace(f"{path}{os.sep}", "") for text in folder.left_out + folder.warned]


def shown(registry: Registry) -> dict[str, str]:
    """The description of each module."""
    return {module_id: registry.get_definition(module_id).description for module_id in registry.list()}


def settled(folder: Folder) -> dict[str, str]:
    """What is shown when files have changed: a change counts when two looks agree on it."""
    folder.discover()
    folder.discover()
    return shown(folder)


# ---- The folder ----


@pytest.mark.requirement("FR-CLI-002")
@pytest.mark.parametrize(("name", "fault"), [("no", "directory does not exist"), ("f", "path is not a directory")])
def test_no_folder(tmp_path: Path, name: str, fault: str) -> None:
    (tmp_path / "f").touch()
    for make in (Folder, discover):
        with pytest.raises(ValueError, match=f"^extensions {fault}: {tmp_path / name}$"):
            make(tmp_path / name)


def test_all_examples_are_loaded() -> None:
    folder = load(EXTENSIONS)
    assert len(folder.list()) == 18
    assert folder.left_out == folder.warned == []


def test_a_folder_loads_nothing_before_discover(extensions: Path, monkeypatch: Monkeypatch) -> None:
    """Relative paths hold when the working directory has changed."""
    monkeypatch.chdir(extensions.parent)
    folder = Folder(extensions.name)
    monkeypatch.chdir("/")
    assert folder.list() == []
    assert (folder.discover(), folder.discover()) == (3, 0)
    assert folder.list() == ["hand.write", "voice.say", "voice.shout"]
    with pytest.raises(ValueError, match="path_filter"):
        folder.discover("voice/*")


def test_definitions_as_apcores_own_discovery_gives_them(extensions: Path) -> None:
    metadata = (
        "version: '1.5'\nname: Speak\ndescription: Told beside\ntags: [a]\nx-note: any\n"
        "annotations: {readonly: true}\nexamples: [{title: one, inputs: {text: a}}]\nmetadata: {deep: {er: 1}}\n"
        "dependencies: [{module_id: hand.write}]\n"
    )
    extra = "    annotations = {'cacheable': True, 'extra': {'requires_aproval': 1}}\n"
    shout = said("Say it", "    version = '2.0'\n" + extra)
    folder = load(extensions, {"voice/say_meta.yaml": metadata, "voice/shout.py": shout})
    own = Registry(extensions_dir=str(extensions))
    own.discover()
    assert folder.list() == own.list()
    for module_id in own.list():
        assert folder.get_definition(module_id) == own.get_definition(module_id)
        version = own.get_definition(module_id).version
        assert folder.get(module_id, version_hint=version) is folder.get(module_id)


BAD = {
    "bad/syntax.py": ("def broken(:\n", "SyntaxError: invalid syntax (syntax.py, line 1)"),
    "bad/missing.py": ("import no_such_package_anywhere\n", "ModuleNotFoundError: No module named"),
    "bad/divides.py": ("def f():\n    return 1 / 0\n\nf()\n", "line 2: ZeroDivisionError: division by zero"),
    "bad/exits.py": ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
    "bad/skips.py": ("import pytest\npytest.skip('not here', allow_module_level=True)\n", "Skipped: not here"),
    "bad/initial.py": (SAY + ENDS.format("__init__"), "SystemExit: ends"),
    "bad/loading.py": (SAY + ENDS.format("on_load"), "SystemExit: ends"),
    "bad/described.py": (SAY, "ValueError: dictionary update sequence"),
    "bad/function.py": ("from apcore.decorator import module\n@module\ndef f(a): pass\n", "line 2: FuncMissingType"),
    "bad/nameless.py": (FUNCTION.format("", "None"), "InvalidInputError: "),
    "bad/twins.py": (
        FUNCTION.format("a.b", "first") + FUNCTION.format("a.b", "second").replace("f()", "g()"),
        "ValueError: another module has the ID a.b",
    ),
    "Bad-Place/Its-Name.py": (SAY, "InvalidInputError: "),
    "system/health.py": (SAY, "InvalidInputError: "),
    "bad/text.binding.yaml": ("bindings: [unclosed\n", "ParserError: "),
    "bad/empty.binding.yaml": ("", "KeyError: 'bindings'"),
    "bad/top.binding.yaml": ("bindings: []\nannotations: {}\n", "ValueError: it has other keys than "),
    "bad/target.binding.yml": (bound("m.a", "no_such_module:run", **SCHEMAS), "BindingModuleNotFoundError: "),
}


def test_one_bad_file_is_left_out_by_name(extensions: Path, caplog: Caplog) -> None:
    """NFR-REL-002, whenever and whatever it raises, in one line with the author's; the others are served."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    write(extensions, {"bad/described_meta.yaml": "[not, a, mapping]\n"})
    folder = load(extensions, {name: text for name, (text, _) in BAD.items()})
    assert folder.list() == ["a.b", "hand.write", "voice.say", "voice.shout"]
    assert len(folder.left_out) == len(BAD)
    for name, (_, reason) in BAD.items():
        (line,) = [line for line in folder.left_out if line.startswith(str(extensions / name))]
        assert " is left out: " in line
        assert reason in line
        assert "\n" not in line
    assert messages_logged(caplog) == folder.left_out
    in_full = [logging.Formatter().format(record) for record in logged(caplog, logging.DEBUG)]
    assert any(f'"{extensions / "bad" / "divides.py"}", line 2, in f' in text for text in in_full)
    folder.discover()
    assert folder.left_out == []


def test_what_apcore_passes_over_is_not_looked_at(extensions: Path, caplog: Caplog) -> None:
    files = {"_draft.py": SAY}
    for number, place in enumerate(("_old", ".trash", "node_modules", ".venv/lib", "kept")):
        files[f"{place}/say.py"] = SAY
        files[f"{place}/os.binding.yaml"] = bound(f"m.n{number}", "os.path:join", **SCHEMAS)
    assert load(extensions, files).list() == ["hand.write", "kept.say", "m.n4", "voice.say", "voice.shout"]
    assert caplog.text == ""


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"closed/say.py": SAY})
    (tmp_path / "closed").chmod(0)
    try:
        (line,) = left_out(load(tmp_path), tmp_path)
    finally:
        (tmp_path / "closed").chmod(0o700)
    assert line.startswith("closed is left out: PermissionError: ")


def test_a_registry_that_nobody_holds_is_freed(tmp_path: Path) -> None:
    registry = load(tmp_path, {"say.py": SAY})
    freed = [weakref.ref(registry), weakref.ref(registry.get("say"))]
    del registry
    gc.collect()
    assert [reference() for reference in freed] == [None, None]


# ---- Functions and classes ----

FUNCTIONS = '''
from __future__ import annotations
from pathlib import Path
import apcore
from apcore import Context
from apcore.decorator import module

with open(Path(__file__).with_name("imported"), "a") as file:
    file.write("once ")

@module(id="maths.add", description="Add", tags=["sum"], version="2.0.0")
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


def test_functions_beside_classes_and_bindings(tmp_path: Path) -> None:
    """Under the ID they give, or the one of their place; what another file defines is not this one's."""
    sys.path.append(str(tmp_path))
    other = "from _bound import Say as Other\n"
    files = {
        "forms.py": FUNCTIONS,
        "both.py": FUNCTIONS.replace("maths", "m") + other + SAY,
        "_bound.py": said("Not here", "\ndef negate(a: int) -> int:\n    return -a\n"),
        "bound.binding.yaml": bound("maths.negate", "_bound:negate", auto_schema=True),
    }
    folder = load(tmp_path, files)
    assert folder.left_out == folder.warned == []
    assert folder.list() == [
        "both", "both.double", "both.halve", "forms.double", "forms.halve", "m.add", "maths.add", "maths.negate",
    ]  # fmt: skip
    add, negate = folder.get_definition("maths.add"), folder.get_definition("maths.negate")
    assert (add.description, add.tags, add.version) == ("Add", ["sum"], "2.0.0")
    assert shown(folder)["forms.double"] == "Double a point."
    assert negate.input_schema["properties"] == {"a": {"title": "A", "type": "integer"}}
    assert negate.output_schema["properties"] == {"result": {"title": "Result", "type": "integer"}}
    executor = Executor(folder)
    assert executor.call("maths.add", {"a": 2}) == {"result": 3}
    assert executor.call("forms.double", {"x": 4}) == {"x": 8, "known": True}
    assert executor.call("maths.negate", {"a": 2}) == {"result": -2}
    assert (tmp_path / "imported").read_text() == "once " * 2


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


def test_types_defined_later_and_pickled(tmp_path: Path) -> None:
    """Standard dataclasses and pydantic models alike; a module may give work to other processes."""
    folder = load(tmp_path, {"deep/er/shapes.py": SHAPES})
    assert Executor(folder).call("s.hape", {"x": 1}) == {"x": 1, "y": None}
    assert folder.left_out == []


METHODS = """
from apcore.decorator import module
class Jobs:
    @module
    def start(self, n: int) -> int: return n
    @staticmethod
    @module
    def run(n: int) -> int: return n
    @classmethod
    @module
    def stop(cls, n: int) -> int: return n
    @staticmethod
    def help(n: int) -> int: return n
"""
DECORATED = """
import functools
from apcore.decorator import module
def guarded(function): return functools.wraps(function)(lambda **given: 1 / 0)
@guarded
@module
def drop() -> str: return 'dropped'
@module
@functools.cache
def keep() -> str:
    'Keep all.'
    return 'kept'
"""
SEVERAL = (
    "m.py: class {} is left out: TypeError: it is one of several: put _ before the others, or name it as entry_point"
)
NOT_CLASS = "m.py is left out: ValueError: its metadata describes a module class, and it defines none"
NOT_SERVED = "m.py: @module on the method Jobs.{} is served nowhere: bind it"
NO_MODULE = "m.py defines no module: neither a function with apcore.decorator.module nor a class"
OF_CLASS, OF_FUNCTION = "m.py: class Say is left out: ", "m.py: function f is left out: "
NO_FIELD = OF_CLASS + "TypeError: ModuleAnnotations.__init__() got an unexpected keyword argument "
NO_MAPPING = "TypeError: apcore.module.ModuleAnnotations() argument after ** must be a mapping, not list"
BAD_INIT = a_class() + "    def __init__(self): raise LookupError('no such shop')\n"
BAD_ID = FUNCTION.format("Not-An-Id", "wrong")
TWO = a_class("First") + a_class("Second", "two")
CHOSEN = {"_chosen.py": a_class("Imported", "from elsewhere"), "m.py": "from _chosen import Imported\n" + TWO}
MISSPELT = annotated("{'requires_aproval': True}")
LIST = "['requires_approval']"
SERVED = {"is.served": "yes"}


def dropped(start: str, name: str, annotation: str) -> list[str]:
    """What is said of an annotation that apcore drops: by us, and by apcore."""
    warning = f"Unknown annotation keys ignored for '{name}': ['{annotation}']"
    return [f"{start}ValueError: {warning}", warning]


# Of a file m.py, or a folder: what is served of it, and how each line begins that says what is not.
READ: dict[str, tuple[str | dict[str, str], dict[str, str], list[str]]] = {
    "a class that raises": (FINE + BAD_INIT, SERVED, [OF_CLASS + "LookupError: no such shop"]),
    "a class that raises, alone": (BAD_INIT, {}, [OF_CLASS + "LookupError: no such shop"]),
    "a function of a wrong ID": (FINE.replace(" f(", " g(") + BAD_ID, SERVED, [OF_FUNCTION + "InvalidInputError: "]),
    "decorated methods": (FINE + METHODS, SERVED, [*map(NOT_SERVED.format, "start run stop".split())]),
    # A guard, say: apcore's module is the function below it.
    "a decorator above": (DECORATED, {"m.keep": "Keep all."}, ["m.py: function drop is left out: TypeError: the "]),
    "private classes": (
        a_class("_Base") + a_class("_Other") + a_class().replace("Say:", "Say(_Base):"), {"m": "Do it"}, [],
    ),
    "schemas of two kinds": (said("mixed", "    output_schema = {'type': 'object'}\n"), {"m": "mixed"}, []),
    "nothing but private": (a_class("_Lone"), {}, [NO_MODULE]),
    "nothing but helpers": ("def help(): pass\nclass Command:\n    def execute(self): pass\n", {}, [NO_MODULE]),
    "nothing": ("", {}, [NO_MODULE]),
    "apcore.module, bare": ("from apcore import module\n@module\ndef f(a: int) -> int: return a\n", {}, [NO_MODULE]),
    # As by apcore's own discovery. Functions beside them are served.
    "several classes": (FINE + TWO, SERVED, [SEVERAL.format("First"), SEVERAL.format("Second")]),
    "a derived class": (a_class() + "class Sub(Say): pass\n", {}, [SEVERAL.format("Say"), SEVERAL.format("Sub")]),
    "the one with models": (
        said("models", a_class("Helper") + a_class("Half", schema="TextInput")), {"m": "models"}, [],
    ),
    "two with models": (SAY + SAY.replace("Say:", "Sub:"), {}, [SEVERAL.format("Say"), SEVERAL.format("Sub")]),
    "entry point": ({**CHOSEN, "m_meta.yaml": "entry_point: m:Second"}, {"m": "two"}, []),
    "imported entry point": ({**CHOSEN, "m_meta.yaml": "entry_point: m:Imported"}, {"m": "from elsewhere"}, []),
    "no entry point": ({**CHOSEN, "m_meta.yaml": "entry_point: m:Third"}, {}, ["m.py is left out: KeyError: 'Third'"]),
    # A function would run without the approval that the metadata asks for.
    "metadata of none": ({"m.py": FINE, "m_meta.yaml": "annotations: {requires_approval: true}"}, {}, [NOT_CLASS]),
    "apcore's warning": (
        "import logging\nlogging.getLogger('apcore.x').warning('of apcore')\n" + FINE, SERVED, ["of apcore"],
    ),
    # apcore drops an unknown annotation: a module whose approval is misspelt would run without one.
    "a function's": (
        MISSPELT + FINE.replace(" f(", " g("), SERVED, dropped(OF_FUNCTION, "apcore_ext.m.f", "requires_aproval"),
    ),
    "known ones": (
        "from apcore import ModuleAnnotations\n" + a_class() + "    annotations = ModuleAnnotations(destructive=True)\n"
        + annotated("{'requires_approval': True}"), {"m": "Do it", "m.f": "Module f"}, [],
    ),
    "a function's list": (annotated(LIST), {}, [OF_FUNCTION + NO_MAPPING]),
    "a class's": (
        a_class() + "    annotations = {'approval_required': True}\n", {}, [NO_FIELD + "'approval_required'"],
    ),
    "a binding's": (
        {"m.binding.yaml": bound("m.a", "os.path:join", **SCHEMAS, annotations={"needs-approval": True})}, {},
        dropped("m.binding.yaml: binding m.a is left out: ", "m.a", "needs-approval"),
    ),
    "metadata's": ({"m.py": a_class(), "m_meta.yaml": "annotations: {aproval: true}"}, {}, [NO_FIELD + "'aproval'"]),
    "metadata's list": (
        {"m.py": a_class(), "m_meta.yaml": "annotations: [requires_approval]"}, {}, [OF_CLASS + NO_MAPPING],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "served", "told"), READ.values(), ids=READ)
def test_what_a_file_makes(tmp_path: Path, files: Any, served: dict[str, str], told: list[str]) -> None:
    sys.path.append(str(tmp_path))
    folder = load(tmp_path, {"m.py": files} if isinstance(files, str) else files)
    assert shown(folder) == served
    lines = left_out(folder, tmp_path)
    assert len(lines) == len(told), lines
    assert all(map(str.startswith, lines, told)), lines
    logging.getLogger("apcore.x").warning("after it was loaded")
    folder.discover()
    assert folder.left_out == folder.warned == []


@pytest.mark.parametrize("disabled", [False, True])
def test_functions_need_apcores_log(tmp_path: Path, caplog: Caplog, monkeypatch: Monkeypatch, disabled: bool) -> None:
    """Nothing else tells of an unknown annotation. `logging.config` disables the loggers that there are by default."""
    above, log = logging.getLogger("apcore"), logging.getLogger("apcore.decorator")
    monkeypatch.setattr(log, "disabled", disabled)
    with caplog.at_level(logging.NOTSET if disabled else logging.CRITICAL, "apcore"):
        before = (above.level, above.handlers[:], log.level, log.filters[:])
        folder = load(tmp_path, {"m.py": MISSPELT + FINE.replace("f()", "g()")})
        assert (above.level, above.handlers, log.level, log.filters, log.disabled) == (*before, disabled)
    assert folder.list() == ["is.served"]
    assert left_out(folder, tmp_path) == [
        "m.py: function f is left out: RuntimeError: a misspelt annotation would go unseen:"
        " the logger apcore.decorator does not warn"
    ]


# ---- Bindings ----

CLINIC = """
def book(patient, day=None, kind="check-up", minutes=30, tags=(), room=None, pin=""):
    return {"patient": patient, "kind": kind, "minutes": minutes, "room": room, "pin": pin}

def count(n): return n
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
async def test_a_bindings_schemas_hold(tmp_path: Path, caplog: Caplog, place: str) -> None:
    """apcore's own loader would keep names and types. They are enforced; the function gets what JSON said."""
    schemas: dict[str, Any] = {"input_schema": BOOK, "output_schema": BOOKED}
    described = schemas if place == "entry" else {"schema_ref": "schemas/book.yaml"}
    files = {
        "_clinic.py": CLINIC,
        "schemas/book.yaml": json.dumps(schemas, ensure_ascii=False),
        "clinic.binding.yml": bound("clinic.book", "_clinic:book", **described),
    }
    registry = load(tmp_path, files)
    booking = registry.get_definition("clinic.book")
    assert (booking.input_schema, booking.output_schema) == (BOOK, BOOKED)
    right: dict[str, Any] = {"patient": "Ann", "room": 3, "pin": "77"}
    wrong = {"patient": "A", "kind": "x", "minutes": 1, "tags": ["a", 2, "c"], "room": 0.5, "pin": "secret"}
    executor = Executor(registry)
    assert await executor.call_async("clinic.book", right) == {**right, "kind": "check-up", "minutes": 30}
    for inputs in ({**right, "pin": "no digits"}, {**right, "minutes": 90}):
        with pytest.raises(SchemaValidationError):
            await executor.call_async("clinic.book", inputs)
    async with connect(registry) as client:
        (tool,) = (await client.list_tools()).tools
        assert BOOK.items() <= tool.input_schema.items()
        booked = await client.call_tool("clinic.book", right)
        assert json.loads(text_of(booked))["pin"] == REDACTED
        refused = text_of(await client.call_tool("clinic.book", wrong))
        faults = {line.split(":")[0] for line in refused.splitlines()[1:]}
        assert faults == {"- patient", "- kind", "- minutes", "- tags", "- tags.1", "- room", "- pin"}
        assert "secret" not in refused + caplog.text
        too_long = text_of(await client.call_tool("clinic.book", {"patient": "Ann", "minutes": 90}))
        assert too_long.startswith("Output validation failed")


ENTRIES = {
    "m.bare": ({"target": "_clinic:count"}, "FuncMissingTypeHintError: "),
    "m.nowhere": ({"target": "_clinic:count", "schema_ref": "no.yaml"}, "FileNotFoundError: "),
    "m.half": ({"target": "_clinic:count", "input_schema": {}}, "FuncMissingReturnTypeError: "),
    "m.other": ({"target": "_clinic:count", "schema_ref": "other.yaml"}, "KeyError: 'input_schema'"),
    "m.none": ({"target": "_clinic:nothing", **SCHEMAS}, "Cannot find callable 'nothing'"),
    "m.flat": ({"target": "_clinic:count", "requires_approval": True}, "keyword argument 'requires_approval'"),
    "m.aimless": (SCHEMAS, "KeyError: 'target'"),
    "['m.list']": (["m.list"], "ValueError: "),
    "None": ({"target": "_clinic:count", **SCHEMAS}, "argument: 'module_id'"),
}


def test_a_bad_entry_leaves_out_itself_by_its_id(tmp_path: Path) -> None:
    entries: list[Any] = [{"module_id": "m.good", "target": "_clinic:count", **SCHEMAS}]
    for name, (entry, _) in ENTRIES.items():
        entries.append({"module_id": name, **entry} if name.startswith("m.") else entry)
    files = {
        "_clinic.py": CLINIC,
        "other.yaml": "input_shema: {}\noutput_schema: {}\n",
        "clinic.binding.yaml": json.dumps({"spec_version": "1.0", "bindings": entries}),
    }
    folder = load(tmp_path, files)
    assert folder.list() == ["m.good"]
    for line, (name, (_, words)) in zip(left_out(folder, tmp_path), ENTRIES.items(), strict=True):
        assert line.startswith(f"clinic.binding.yaml: binding {name} is left out: ")
        assert words in line


def test_dates_in_yaml_are_texts(tmp_path: Path) -> None:
    """As JSON has no others."""
    entry = "{module_id: m.count, target: '_clinic:count', output_schema: {}, "
    entry += "input_schema: {properties: {n: {enum: [2026-01-31], default: 2026-01-31}}}}"
    files = {
        "_clinic.py": CLINIC,
        "say.py": a_class(),
        "say_meta.yaml": "x-since: 2026-01-31\n",
        "local.binding.yaml": f"bindings:\n- {entry}\n",
    }
    folder = load(tmp_path, files)
    dated = {"enum": ["2026-01-31"], "default": "2026-01-31"}
    assert folder.get_definition("m.count").input_schema == {"properties": {"n": dated}}
    assert folder.get_definition("say").metadata == {"x-since": "2026-01-31"}


def test_a_binding_never_gets_the_function_of_another_folder(tmp_path: Path) -> None:
    """Python imports one file of a name, whatever leads to it."""
    files: dict[str, str] = {}
    for name in ("first", "second"):
        files[f"{name}/say.binding.yaml"] = bound(f"m.{name}", "_pack.one_name:say")
        files[f"{name}/_pack/one_name.py"] = f"def say() -> str: return '{name}'\n"
    write(tmp_path, files)
    (tmp_path / "link").symlink_to("first")
    sys.path.append(str(tmp_path / "link"))
    folder = load(tmp_path)
    assert Executor(folder).call("m.first", {}) == {"result": "first"}
    assert not folder.has("m.second")
    assert f"give {tmp_path / 'second' / '_pack' / 'one_name.py'} a name of its own" in folder.left_out[-1]


# ---- Links ----


def test_a_link_inside_the_folder_is_followed(tmp_path: Path, caplog: Caplog) -> None:
    """A Kubernetes ConfigMap is mounted as links through `..data`."""
    files = {
        "shop.py": SAY,
        "tools/text.py": SAY,
        "shop_meta.yaml": "description: beside the link",
        "_mounted.py": "def negate(a: int) -> int: return -a\n",
        "maths.binding.yaml": bound("m.negate", "_mounted:negate"),
    }
    write(tmp_path / "..2026", files)
    (tmp_path / "..data").symlink_to("..2026")
    for name in {name.partition("/")[0] for name in files}:
        (tmp_path / name).symlink_to(f"..data/{name}")
    registry = load(tmp_path)
    assert registry.list() == ["m.negate", "shop", "tools.text"]
    assert shown(registry)["shop"] == "beside the link"
    assert Executor(registry).call("m.negate", {"a": 1}) == {"result": -1}
    assert caplog.text == ""


def test_a_link_that_leads_out_or_nowhere_is_named(tmp_path: Path) -> None:
    """One that leads back, or to a folder that is loaded already, ends there."""
    folder = tmp_path / "folder"
    write(tmp_path, {"folder/kept/say.py": SAY, "outside/say.py": SAY})
    links = {
        "data.csv": "../outside/data.csv",
        "file.py": "../outside/say.py",
        "folder": "../outside",
        "kept/back": "..",
        "nowhere.py": "no_such_file.py",
        "one": "two/deep",
        "two": "kept",
    }
    for link, target in links.items():
        (folder / link).symlink_to(target)
    loaded = load(folder)
    assert loaded.list() == ["kept.say"]
    assert left_out(loaded, folder) == [
        "file.py is left out: OSError: it is a link out of the extensions directory",
        "folder is left out: OSError: it is a link out of the extensions directory",
        "nowhere.py is left out: FileNotFoundError: [Errno 2] No such file or directory: 'nowhere.py'",
    ]


def test_metadata_behind_a_link_holds_or_leaves_out(tmp_path: Path) -> None:
    """It may say that a module requires approval."""
    folder = tmp_path / "folder"
    write(folder, {"say.py": SAY})
    (folder / "say_meta.yaml").symlink_to("../meta.yaml")
    assert load(folder).list() == []
    write(tmp_path, {"meta.yaml": "annotations: {requires_approval: true}"})
    assert load(folder).get_definition("say").annotations == ModuleAnnotations(requires_approval=True)


# ---- Again ----

ONE_TIME = 1_700_000_000_000_000_000


def test_files_become_modules_change_and_go(tmp_path: Path, monkeypatch: Monkeypatch) -> None:
    """Also by two edits of one size in one second, and by one that leaves the time as it was."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    folder = load(tmp_path)
    path = tmp_path / "hot" / "ping.py"
    for number, words in ((0, "one"), (1, "two"), (1, "three")):
        answer = f"    def execute(self, inputs, context): return {{'text': '{words}'}}\n"
        write(tmp_path, {"hot/ping.new": said(words, answer)})
        os.utime(tmp_path / "hot" / "ping.new", ns=(0, ONE_TIME + number))
        (tmp_path / "hot" / "ping.new").replace(path)
        assert (folder.discover(), folder.discover()) == (0, 1)
        assert shown(folder) == {"hot.ping": words}
        assert Executor(folder).call("hot.ping", {"text": ""}) == {"text": words}
    write(tmp_path, {"hot/ping_meta.yaml": "description: from the metadata"})
    assert settled(folder) == {"hot.ping": "from the metadata"}
    path.with_name("ping_meta.yaml").unlink()
    assert settled(folder) == {"hot.ping": "three"}
    path.unlink()
    assert (folder.discover(), folder.discover()) == (0, 0)
    assert shown(folder) == {}


def test_a_file_keeps_its_modules_while_it_is_saved(tmp_path: Path) -> None:
    """Metadata that is empty for a moment would say that no approval is required. Two looks have to agree."""
    metadata = tmp_path / "say_meta.yaml"
    guarded = "annotations: {requires_approval: true}\n"
    folder = load(tmp_path, {"say.py": said("one"), "say_meta.yaml": guarded})

    def state() -> tuple[str, bool] | None:
        folder.discover()
        about = folder.get_definition("say")
        return about and (about.description, about.annotations.requires_approval)

    half_saved = [partial(metadata.write_text, half) for half in ("", "annotations:")]
    for spoil in (*half_saved, metadata.unlink):
        spoil()
        assert state() == ("one", True)
        metadata.write_text(guarded)
        assert state() == ("one", True)
        folder.discover()
    write(tmp_path, {"say.py": said("two")})
    assert [state(), state()] == [("one", True), ("two", True)]
    (tmp_path / "say.py").unlink()
    assert [state(), state()] == [("two", True), None]


def test_a_change_costs_its_file_alone(tmp_path: Path) -> None:
    """Those that stay are neither run again nor other objects."""
    runs = "\nwith open({!r}, 'a') as file: file.write('once ')\n".format(str(tmp_path / "runs"))
    folder = load(tmp_path, {"kept.py": FINE + runs, "hot.py": said("old")})
    kept = folder.get("is.served")
    events: list[str] = []
    for event in ("register", "unregister"):
        folder.on(event, lambda module_id, _module, event=event: events.append(f"{event} {module_id}"))
    write(tmp_path, {"hot.py": said("new")})
    with ThreadPoolExecutor() as threads:
        threads.map(settled, [folder] * 4)
    assert shown(folder) == {"hot": "new", "is.served": "yes"}
    assert folder.get("is.served") is kept
    assert (tmp_path / "runs").read_text() == "once "
    assert events == ["unregister hot", "register hot"]


def test_only_what_a_file_made_goes_with_it(tmp_path: Path) -> None:
    """What a broken file made goes until it is mended; and an ID may be another's meanwhile."""
    folder = load(tmp_path, {"moved/away.py": said("old"), "stays/kept.py": said("old")})
    folder.register("by.hand", FunctionalModule(echo))
    hand = "A module of a test"
    (tmp_path / "moved").rename(tmp_path / "_moved")
    write(tmp_path, {"by/hand.py": SAY, "stays/kept.py": "def broken(:"})
    assert settled(folder) == {"by.hand": hand}
    assert left_out(folder, tmp_path) == [
        "by/hand.py: class Say is left out: ValueError: another module has the ID by.hand",
        "stays/kept.py is left out: SyntaxError: invalid syntax (kept.py, line 1)",
    ]
    folder.register("moved.away", FunctionalModule(echo))
    (tmp_path / "_moved").rename(tmp_path / "moved")
    write(tmp_path, {"stays/kept.py": said("new", ENDS.format("on_load"))})
    (tmp_path / "by" / "hand.py").unlink()
    assert settled(folder) == {"by.hand": hand, "moved.away": hand}
    write(tmp_path, {"stays/kept.py": said("mended")})
    assert settled(folder) == {"by.hand": hand, "moved.away": hand, "stays.kept": "mended"}


def test_of_two_files_with_one_id_the_first_has_it(tmp_path: Path) -> None:
    """A change of the first changes nothing in that; an ID may move from one file to another."""
    find, sell = "shop.find", "shop.sell"
    folder = load(tmp_path, {"a.py": FUNCTION.format(find, "first"), "b.py": FUNCTION.format(find, "second")})
    assert shown(folder) == {find: "first"}
    assert left_out(folder, tmp_path) == [
        "b.py: function f is left out: ValueError: another module has the ID shop.find"
    ]
    write(tmp_path, {"a.py": FUNCTION.format(find, "again")})
    assert settled(folder) == {find: "again"}
    write(tmp_path, {"a.py": FUNCTION.format(sell, "sell"), "b.py": FUNCTION.format(find, "second again")})
    assert settled(folder) == {find: "second again", sell: "sell"}
    assert folder.left_out == []


@pytest.mark.parametrize("root", ["current", "."], ids=["the folder", "a ConfigMap's data"])
def test_a_replaced_link_is_followed(tmp_path: Path, root: str) -> None:
    """Also back, and though the files of both versions are of one size and one time."""
    link = tmp_path / ("..data" if root == "." else root)
    for version in ("..v1", "..v2"):
        write(tmp_path / version, {"shop.py": said(version)})
        os.utime(tmp_path / version / "shop.py", ns=(0, ONE_TIME))
    link.symlink_to("..v1")
    if root == ".":  # Kubernetes replaces `..data`, and no link of a module changes
        (tmp_path / "shop.py").symlink_to("..data/shop.py")
    folder = load(tmp_path / root)
    for version in ("..v2", "..v1"):
        (tmp_path / "..new").symlink_to(version)
        (tmp_path / "..new").replace(link)
        assert settled(folder) == {"shop": version}


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """Of one look. What it held stays: it may be mounted again."""
    path, away = tmp_path / "folder", tmp_path / "away"
    folder = load(path, {"say.py": SAY})
    path.rename(away)
    with pytest.raises(FileNotFoundError):
        folder.discover()
    assert folder.list() == ["say"]
    write(away, {"shout.py": SAY})
    away.rename(path)
    assert settled(folder).keys() == {"say", "shout"}


def test_follow_looks_until_it_is_ended(tmp_path: Path, monkeypatch: Monkeypatch) -> None:
    """Whatever files raise, and while there is no folder."""
    folder = load(tmp_path, {"hot.py": said("old"), "unloads.py": said("once", ENDS.format("on_unload"))})
    ended, looks = threading.Event(), threading.Semaphore(0)
    folder.follow(ended)
    (look,) = [thread for thread in threading.enumerate() if thread.name == "apcore-mcp-files"]
    assert look.daemon
    write(tmp_path, {"hot.py": said("new"), "exits.py": "import sys\nsys.exit(3)\n"})
    (tmp_path / "unloads.py").unlink()
    until(lambda: getattr(folder.get_definition("hot"), "description", "") == "new")  # between its looks there is none
    until(lambda: folder.list() == ["hot"])

    def gone() -> None:
        looks.release()
        raise FileNotFoundError

    monkeypatch.setattr(folder, "discover", gone)
    assert looks.acquire(timeout=10)
    assert looks.acquire(timeout=10), "the first error has ended it"
    ended.set()
    look.join(10)
    assert not look.is_alive()


@pytest.mark.requirement("FR-DYNAMIC-001", "FR-DYNAMIC-002", "FR-DYNAMIC-003")
def test_dynamic_follows_classes_functions_and_bindings(extensions: Path) -> None:
    """Taken in, again when they change, and out; an ID may move to another file. YAML is UTF-8, whatever the locale."""
    write(extensions, {"forms.py": FUNCTIONS, "_bound.py": "def negate(a: int) -> int:\n    return -a\n"})
    arguments = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(extensions), "--dynamic"]
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    expected = {"hand.write": ("\u4e88\u7d04", ["public", "new"]), "m.negate": ("\u4e88\u7d04", ["new"])}
    expected["maths.add"] = ("Add", [])
    with RawClient(arguments, env=ascii_only) as client:
        client.initialize()
        shutil.rmtree(extensions / "voice")
        (extensions / "forms.py").unlink()
        files = {
            "about.py": FUNCTION.format("maths.add", "Add"),
            "broken.binding.yaml": "bindings: [unclosed",
            "hand.binding.yaml": bound("m.negate", "_bound:negate", tags=["new"], description="\u4e88\u7d04"),
            "hand/write.py": MODULE.format(tag="new"),
            "hand/write_meta.yaml": "description: \u4e88\u7d04",
        }
        write(extensions, files)
        told: dict[str, tuple[str, list[str]]] = {}
        while told != expected:
            assert client.receive()["method"].endswith("list_changed")
            tools = client.request("tools/list")["result"]["tools"]
            told = {tool["name"]: (tool["description"], tool["_meta"]["apcore/tags"]) for tool in tools}
        status, stderr = client.end()
    assert status == 0
    assert b"broken.binding.yaml is left out" in stderr
