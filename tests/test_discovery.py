"""A folder in, an apcore Registry out, and following its files (FR-CLI-002, F-015)."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from apcore import Executor, ModuleAnnotations, Registry
from apcore.errors import SchemaValidationError
from apcore.utils.redaction import REDACTED_VALUE
from conftest import ANYTHING, EXTENSIONS, MODULE, ROOT, FunctionalModule, RawClient, connect, echo, until
from support import logged, messages_logged, text_of

from apcore_mcp.discovery import Folder, discover

SCHEMAS = {"input_schema": ANYTHING, "output_schema": ANYTHING}
FUNCTION = "from apcore.decorator import module\n@module(id={!r}, description={!r})\ndef f() -> int: return 1\n"
ENDS = "    def {}(self): raise SystemExit('ends')\n"
CLASS = """
class {name}:
    description = {description!r}
    input_schema = {schema}
    output_schema = {{"type": "object"}}
    def execute(self, inputs, context): return {{}}
"""


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of bindings goes on `sys.path`, and Python keeps what they import; here neither outlives its test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = {*sys.modules}
    yield
    for name in {*sys.modules} - before:
        if name.startswith("_"):
            del sys.modules[name]


def write(path: Path, words: str, more: str = "") -> None:
    """A module class that is described by `words` and has `more` in it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MODULE.format(tag="x").replace("Say it", words) + more)


def a_class(name: str, description: object = "Do it", schema: str = '{"type": "object"}') -> str:
    return CLASS.format(name=name, description=description, schema=schema)


def bound(module_id: str, target: str, **more: Any) -> str:
    """A file that binds one function: YAML reads JSON."""
    return json.dumps({"spec_version": "1.0", "bindings": [{"module_id": module_id, "target": target, **more}]})


def load(path: Path) -> Folder:
    folder = Folder(path)
    folder.discover()
    return folder


def left_out(folder: Folder, path: Path) -> list[str]:
    """What the last discover() has left out, with the path of the folder cut off."""
    return [text.replace(f"{path}{os.sep}", "") for text in folder.left_out]


def shown(registry: Registry) -> dict[str, str]:
    """The description of each module."""
    return {module_id: describe(registry, module_id) for module_id in registry.list()}


def describe(registry: Registry, module_id: str) -> str:
    definition = registry.get_definition(module_id)
    assert definition is not None
    return definition.description


def settle(folder: Folder) -> int:
    """Look twice: a change counts when two looks agree on it."""
    return folder.discover() + folder.discover()


# ---- The folder ----


@pytest.mark.requirement("FR-CLI-002")
@pytest.mark.parametrize(("name", "fault"), [("no", "directory does not exist"), ("f", "path is not a directory")])
def test_no_folder(tmp_path: Path, name: str, fault: str) -> None:
    (tmp_path / "f").touch()
    for make in (Folder, discover):
        with pytest.raises(ValueError, match=f"^extensions {fault}: {tmp_path / name}$"):
            make(tmp_path / name)


def test_the_examples() -> None:
    """All of them are served, and nothing is warned of."""
    folder = load(EXTENSIONS)
    assert len(folder.list()) == 18
    assert folder.left_out == folder.warned == []
    assert folder.discover() == 0


def test_a_folder_loads_nothing_before_discover(extensions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths hold when the working directory has changed."""
    monkeypatch.chdir(extensions.parent)
    folder = Folder(extensions.name)
    monkeypatch.chdir("/")
    assert folder.list() == []
    assert folder.discover() == 3
    assert folder.list() == ["hand.write", "voice.say", "voice.shout"]
    with pytest.raises(ValueError, match="path_filter"):
        folder.discover("voice/*")


def test_definitions_as_apcores_own_discovery_gives_them(extensions: Path) -> None:
    (extensions / "voice" / "say_meta.yaml").write_text(
        "version: '1.5'\nname: Speak\ndescription: Told beside\ntags: [a]\nx-note: any\n"
        "annotations: {readonly: true}\nexamples: [{title: one, inputs: {text: a}}]\nmetadata: {deep: {er: 1}}\n"
        "dependencies: [{module_id: hand.write}]\n"
    )
    write(extensions / "voice" / "shout.py", "Say it", "    version = '2.0'\n    annotations = {'cacheable': True}\n")
    own = Registry(extensions_dir=str(extensions))
    own.discover()
    folder = discover(extensions)
    assert folder.list() == own.list()
    for module_id in own.list():
        assert folder.get_definition(module_id) == own.get_definition(module_id)
        version = own.get_definition(module_id).version  # type: ignore[union-attr]
        assert folder.get(module_id, version_hint=version) is folder.get(module_id)


def test_one_bad_file_is_left_out_by_name(extensions: Path, caplog: pytest.LogCaptureFixture) -> None:
    """NFR-REL-002, whenever and whatever it raises; the others are served."""
    say = MODULE.format(tag="bad")
    reasons = {
        "bad/syntax.py": ("def broken(:\n", "SyntaxError: invalid syntax (syntax.py, line 1)"),
        "bad/missing.py": ("import no_such_package_anywhere\n", "ModuleNotFoundError: No module named"),
        "bad/exits.py": ("import sys\nsys.exit(3)\n", "SystemExit: 3"),
        "bad/skips.py": ("import pytest\npytest.skip('not here', allow_module_level=True)\n", "Skipped: not here"),
        "bad/initial.py": (say + ENDS.format("__init__"), "SystemExit: ends"),
        "bad/loading.py": (say + ENDS.format("on_load"), "SystemExit: ends"),
        "bad/described.py": (say, "ValueError: dictionary update sequence"),
        "bad/function.py": ("from apcore.decorator import module\n@module\ndef f(a): pass\n", "FuncMissingTypeHint"),
        "bad/nameless.py": (FUNCTION.format("", "None"), "InvalidInputError: "),
        "bad/twins.py": (
            FUNCTION.format("a.b", "first") + FUNCTION.format("a.b", "second").replace("f()", "g()"),
            "ValueError: another module has the ID a.b",
        ),
        "Bad-Place/Its-Name.py": (say, "InvalidInputError: "),
        "system/health.py": (say, "InvalidInputError: "),
        "bad/text.binding.yaml": ("bindings: [unclosed\n", "ParserError: "),
        "bad/empty.binding.yaml": ("", "KeyError: 'bindings'"),
        "bad/top.binding.yaml": ("bindings: []\nannotations: {}\n", "ValueError: it has other keys than "),
        "bad/target.binding.yml": (bound("m.a", "no_such_module:run", **SCHEMAS), "BindingModuleNotFoundError: "),
    }
    for name, (text, _) in reasons.items():
        (extensions / name).parent.mkdir(exist_ok=True)
        (extensions / name).write_text(text)
    (extensions / "bad" / "described_meta.yaml").write_text("[not, a, mapping]\n")
    folder = load(extensions)
    assert folder.list() == ["a.b", "hand.write", "voice.say", "voice.shout"]
    assert len(folder.left_out) == len(reasons)
    for name, (_, reason) in reasons.items():
        (line,) = [line for line in folder.left_out if line.startswith(str(extensions / name))]
        assert " is left out: " in line
        assert reason in line
    assert messages_logged(caplog) == folder.left_out
    folder.discover()
    assert folder.left_out == []


def test_the_line_of_an_authors_error_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In one line of the log. The traceback, most of which is of others, is for DEBUG."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    (tmp_path / "_bound.py").write_text("import no_such_package\n")
    (tmp_path / "a.binding.yaml").write_text(bound("m.a", "_bound:f", **SCHEMAS))
    (tmp_path / "b.py").write_text("def f():\n    return 1 / 0\n\nf()\n")
    (tmp_path / "c.py").write_text("from apcore.decorator import module\n\n@module\ndef f(a) -> int: ...\n")
    folder = load(tmp_path)
    told = messages_logged(caplog)
    assert told == folder.left_out
    assert all("\n" not in text for text in told)
    binding, failing, unread = told
    assert "No module named 'no_such_package'" in binding
    assert failing == f"{tmp_path / 'b.py'} is left out: line 2: ZeroDivisionError: division by zero"
    assert unread.startswith(f"{tmp_path / 'c.py'} is left out: line 3: ")
    in_full = [logging.Formatter().format(record) for record in logged(caplog, logging.DEBUG)]
    assert any(f'"{tmp_path / "b.py"}", line 2, in f' in text for text in in_full)


def test_what_apcore_passes_over_is_not_looked_at(extensions: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, place in enumerate(("_old", ".trash", "node_modules", ".venv/lib", "kept")):
        write(extensions / place / "say.py", "Say it")
        (extensions / place / "os.binding.yaml").write_text(bound(f"m.n{number}", "os.path:join", **SCHEMAS))
    write(extensions / "_draft.py", "Say it")
    assert discover(extensions).list() == ["hand.write", "kept.say", "m.n4", "voice.say", "voice.shout"]
    assert caplog.text == ""


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    write(tmp_path / "closed" / "say.py", "Say it")
    (tmp_path / "closed").chmod(0)
    try:
        folder = load(tmp_path)
    finally:
        (tmp_path / "closed").chmod(0o700)
    assert folder.list() == []
    (line,) = left_out(folder, tmp_path)
    assert line.startswith("closed is left out: PermissionError: ")


def test_a_registry_that_nobody_holds_is_freed(tmp_path: Path) -> None:
    """With what its files have made."""
    write(tmp_path / "say.py", "Say it")
    registry = discover(tmp_path)
    freed = [weakref.ref(registry), weakref.ref(registry.get("say"))]
    del registry
    gc.collect()
    assert [reference() for reference in freed] == [None, None]


# ---- Functions ----

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
    (tmp_path / "forms.py").write_text(FUNCTIONS)
    other = "from _bound import Say as Other\n"
    (tmp_path / "both.py").write_text(FUNCTIONS.replace("maths", "m") + other + MODULE.format(tag="x"))
    write(tmp_path / "_bound.py", "Not here", "\ndef negate(a: int) -> int:\n    return -a\n")
    (tmp_path / "bound.binding.yaml").write_text(bound("maths.negate", "_bound:negate"))
    folder = load(tmp_path)
    assert folder.left_out == folder.warned == []
    assert folder.list() == [
        "both", "both.double", "both.halve", "forms.double", "forms.halve", "m.add", "maths.add", "maths.negate",
    ]  # fmt: skip
    add = folder.get_definition("maths.add")
    assert add is not None
    assert (add.description, add.tags, add.version) == ("Add", ["sum"], "2.0.0")
    assert describe(folder, "forms.double") == "Double a point."
    executor = Executor(folder)
    assert executor.call("maths.add", {"a": 2}) == {"result": 3}
    assert executor.call("forms.double", {"x": 4}) == {"x": 8, "known": True}
    assert executor.call("maths.negate", {"a": 2}) == {"result": -2}
    assert (tmp_path / "imported").read_text() == "once " * 2


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


def test_a_method_with_the_decorator_is_warned_of(tmp_path: Path) -> None:
    """Its class has no object in a call. The rest of the file is served."""
    (tmp_path / "jobs.py").write_text(FUNCTION.format("is.served", "yes") + METHODS)
    folder = load(tmp_path)
    assert folder.list() == ["is.served"]
    assert folder.left_out == []
    assert folder.warned == [
        f"{tmp_path / 'jobs.py'}: @module on the method Jobs.{name} is served nowhere: bind it"
        for name in ("start", "run", "stop")
    ]


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


def test_types_defined_later_and_pickled(extensions: Path) -> None:
    """Standard dataclasses and pydantic models alike; a module may give work to other processes."""
    (extensions / "deep" / "er").mkdir(parents=True)
    (extensions / "deep" / "er" / "shapes.py").write_text(SHAPES)
    folder = load(extensions)
    assert Executor(folder).call("s.hape", {"x": 1}) == {"x": 1, "y": None}
    assert folder.left_out == []


# ---- Classes ----


def test_a_class_may_have_dict_schemas(extensions: Path) -> None:
    """As it may for `register`; schemas of the two kinds may be mixed."""
    dicts = a_class("Name", schema='{"type": "object", "required": ["name"]}')
    (extensions / "name.py").write_text(dicts.replace("return {}", "return {'name': inputs['name'].upper()}"))
    write(extensions / "mixed.py", "Say it", "    output_schema = {'type': 'object'}\n")
    registry = discover(extensions)
    assert registry.list() == ["hand.write", "mixed", "name", "voice.say", "voice.shout"]
    executor = Executor(registry)
    assert executor.call("name", {"name": "a"}) == {"name": "A"}
    assert executor.call("mixed", {"text": "a"}) == {"text": "a"}
    with pytest.raises(SchemaValidationError):
        executor.call("name", {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            a_class("Say") + "    def __init__(self): raise LookupError('no such shop')\n",
            "class Say is left out: LookupError: no such shop",
        ),
        (
            FUNCTION.format("Not-An-Id", "wrong").replace(" f(", " wrong("),
            "function wrong is left out: InvalidInputError: ",
        ),
    ],
    ids=["class", "function"],
)
def test_what_is_no_module_is_named(tmp_path: Path, text: str, reason: str) -> None:
    """Beside functions, which are served, as alone."""
    (tmp_path / "some.py").write_text(FUNCTION.format("is.served", "yes") + text)
    folder = load(tmp_path)
    assert folder.list() == ["is.served"]
    (line,) = left_out(folder, tmp_path)
    assert line.startswith(f"some.py: {reason}")
    (tmp_path / "some.py").write_text(text)
    alone = load(tmp_path)
    assert alone.list() == []
    assert alone.left_out == folder.left_out


def test_helpers_are_no_modules(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Private classes, imported ones, what has no schema. A file of nothing else is warned of."""
    imported = "import sys\nsys.path.append(__file__[:-12])\nfrom _imported import Say as Other\n"
    files = {
        "private.py": a_class("_Base") + a_class("_Other") + a_class("Say").replace("Say:", "Say(_Base):"),
        "importing.py": imported + a_class("Say"),
        "_imported.py": a_class("Say"),
        "lone.py": a_class("_Lone"),
        "helper.py": "def help(): pass\nclass Command:\n    def execute(self): pass\n",
        "bare.py": "from apcore import module\n@module\ndef f(a: int) -> int: return a\n",
        "empty.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    folder = load(tmp_path)
    assert folder.list() == ["importing", "private"]
    assert folder.left_out == []
    assert messages_logged(caplog) == folder.warned
    assert [line.partition(" defines no module")[0] for line in folder.warned] == [
        str(tmp_path / name) for name in ("bare.py", "empty.py", "helper.py", "lone.py")
    ]
    assert "apcore.decorator.module" in folder.warned[0]


@pytest.mark.parametrize("second", [a_class("Second"), "class Second(First): pass\n"], ids=["beside", "derived"])
def test_several_classes_are_left_out(tmp_path: Path, second: str) -> None:
    """As by apcore's own discovery. Functions beside them are served."""
    (tmp_path / "some.py").write_text(FUNCTION.format("is.served", "yes") + a_class("First") + second)
    folder = load(tmp_path)
    assert folder.list() == ["is.served"]
    assert left_out(folder, tmp_path) == [
        f"some.py: class {name} is left out: TypeError: it is one of several: put _ before the others,"
        " or name it as entry_point"
        for name in ("First", "Second")
    ]


def test_of_several_classes_the_one_with_models_is_taken(tmp_path: Path) -> None:
    """As apcore's own discovery takes it."""
    write(tmp_path / "some.py", "with models", a_class("Helper") + a_class("Half", schema="TextInput"))
    folder = load(tmp_path)
    assert (shown(folder), folder.left_out) == ({"some": "with models"}, [])
    own = Registry(extensions_dir=str(tmp_path))
    assert (own.discover(), shown(own)) == (1, {"some": "with models"})


def test_entry_point_chooses_the_class(tmp_path: Path) -> None:
    """An imported one too, as in apcore's own discovery."""
    sys.path.append(str(tmp_path))
    (tmp_path / "_chosen.py").write_text(a_class("Imported", "from elsewhere"))
    (tmp_path / "some.py").write_text("from _chosen import Imported\n" + a_class("First") + a_class("Second", "two"))
    for chosen, description in (("Second", "two"), ("Imported", "from elsewhere"), ("Third", None)):
        (tmp_path / "some_meta.yaml").write_text(f"entry_point: some:{chosen}")
        folder = load(tmp_path)
        assert shown(folder) == ({"some": description} if description else {})
        assert left_out(folder, tmp_path) == ([] if description else ["some.py is left out: KeyError: 'Third'"])


def test_metadata_without_a_class(tmp_path: Path) -> None:
    """apcore's metadata is of a class: a function beside it would run without the approval that it asks for."""
    (tmp_path / "some.py").write_text(FUNCTION.format("m.a", "one"))
    (tmp_path / "some_meta.yaml").write_text("annotations: {requires_approval: true}")
    folder = load(tmp_path)
    assert folder.list() == []
    assert left_out(folder, tmp_path) == [
        "some.py is left out: ValueError: its metadata describes a module class, and it defines none"
    ]


# ---- Annotations ----


def annotated(annotations: str) -> str:
    return f"from apcore.decorator import module\n@module(annotations={annotations})\ndef f() -> int: return 1\n"


A_MODULE = a_class("Say")
LIST = "['requires_approval']"
NO_FIELD = "TypeError: ModuleAnnotations.__init__() got an unexpected keyword argument "
NO_MAPPING = "TypeError: apcore.module.ModuleAnnotations() argument after ** must be a mapping, not list"
DROPPED = "ValueError: Unknown annotation keys ignored for "
UNKNOWN: dict[str, tuple[dict[str, str], str]] = {
    "function": (
        {"m.py": annotated("{'requires_aproval': True}")},
        f"m.py: function f is left out: {DROPPED}'apcore_ext.m.f': ['requires_aproval']",
    ),
    "function's constant": (
        {"m.py": "SAFE = dict(read_only=True)\n" + annotated("{**SAFE, 'requires_approval': True}")},
        f"m.py: function f is left out: {DROPPED}'apcore_ext.m.f': ['read_only']",
    ),
    "function's list": ({"m.py": annotated(LIST)}, f"m.py: function f is left out: {NO_MAPPING}"),
    "class": (
        {"m.py": A_MODULE + "    annotations = {'approval_required': True}\n"},
        f"m.py: class Say is left out: {NO_FIELD}'approval_required'",
    ),
    "class's list": (
        {"m.py": A_MODULE + f"    annotations = {LIST}\n"},
        f"m.py: class Say is left out: {NO_MAPPING}",
    ),
    "binding": (
        {"m.binding.yaml": bound("m.a", "os.path:join", **SCHEMAS, annotations={"needs-approval": True})},
        f"m.binding.yaml: binding m.a is left out: {DROPPED}'m.a': ['needs-approval']",
    ),
    "metadata": (
        {"m.py": A_MODULE, "m_meta.yaml": "annotations: {requiresApproval: true}"},
        f"m.py: class Say is left out: {NO_FIELD}'requiresApproval'",
    ),
    "metadata's list": (
        {"m.py": A_MODULE, "m_meta.yaml": "annotations: [requires_approval]"},
        f"m.py: class Say is left out: {NO_MAPPING}",
    ),
}


@pytest.mark.parametrize(("files", "reason"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_annotation_leaves_its_module_out(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    """apcore drops it: a module whose approval is misspelt would run without one."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    folder = load(tmp_path)
    assert folder.list() == []
    (told,) = left_out(folder, tmp_path)
    assert told.startswith(reason)  # Python 3.13 also says what may have been meant


def test_known_annotations_are_served(tmp_path: Path) -> None:
    """`extra` may hold anything, and so may metadata beside its annotations."""
    (tmp_path / "a.py").write_text(
        A_MODULE + "    annotations = {'readonly': True, 'extra': {'requires_aproval': 1}}\n"
    )
    (tmp_path / "a_meta.yaml").write_text("annotations: {idempotent: true}\nx-note: any\nstreams: 1\n")
    (tmp_path / "b.py").write_text(
        "from apcore import ModuleAnnotations\n" + A_MODULE + "    annotations = ModuleAnnotations(destructive=True)\n"
    )
    (tmp_path / "c.py").write_text(annotated("{'requires_approval': True}"))
    folder = load(tmp_path)
    assert folder.left_out == []
    annotations = [folder.get_definition(module_id).annotations for module_id in folder.list()]  # type: ignore[union-attr]
    assert annotations == [
        ModuleAnnotations(readonly=True, idempotent=True, extra={"requires_aproval": 1}),
        ModuleAnnotations(destructive=True),
        ModuleAnnotations(requires_approval=True),
    ]


def test_an_annotation_costs_its_function_alone(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        annotated("{'requires_aproval': True}") + FUNCTION.format("m.g", "good").replace("f()", "g()")
    )
    folder = load(tmp_path)
    assert folder.list() == ["m.g"]


def test_annotations_of_functions_without_apcores_log(tmp_path: Path) -> None:
    """Nothing else tells that one is unknown. `logging.config` disables the loggers that there are by default.

    The loggers of apcore stay as they are.
    """
    (tmp_path / "m.py").write_text(
        annotated("{'requires_aproval': True}") + FUNCTION.format("m.g", "good").replace("f()", "g()")
    )
    above, log = logging.getLogger("apcore"), logging.getLogger("apcore.decorator")
    for level, disabled in ((logging.CRITICAL, False), (logging.NOTSET, True)):
        above.setLevel(level)
        log.disabled = disabled
        try:
            folder = load(tmp_path)
            assert (above.level, above.handlers, log.level, log.filters, log.disabled) == (level, [], 0, [], disabled)
        finally:
            above.setLevel(logging.NOTSET)
            log.disabled = False
        assert folder.list() == ["m.g"]
        assert left_out(folder, tmp_path) == [
            "m.py: function f is left out: RuntimeError: a misspelt annotation would go unseen:"
            " the logger apcore.decorator does not warn"
        ]


def test_what_apcore_warns_of_is_counted(tmp_path: Path) -> None:
    """While the folder is loaded, and not again by the next look."""
    (tmp_path / "a.py").write_text("import logging\nlogging.getLogger('apcore.x').warning('of apcore')\n" + A_MODULE)
    folder = load(tmp_path)
    assert folder.warned == ["of apcore"]
    logging.getLogger("apcore.x").warning("later")
    folder.discover()
    assert folder.warned == []


# ---- Bindings ----

CLINIC = """
def book(patient, day=None, kind="check-up", minutes=30, tags=(), room=None, pin=""):
    return {"patient": patient, "kind": kind, "minutes": minutes, "room": room, "pin": pin}

def count(n): return n

def typed(n: int) -> int: return n
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


def bind_clinic(path: Path, place: str) -> None:
    """The schemas in the entry itself, or in a file beside it, in UTF-8."""
    (path / "_clinic.py").write_text(CLINIC)
    schemas: dict[str, Any] = {"input_schema": BOOK, "output_schema": BOOKED}
    (path / "schemas").mkdir()
    (path / "schemas" / "book.yaml").write_text(json.dumps(schemas, ensure_ascii=False), encoding="utf-8")
    described = schemas if place == "entry" else {"schema_ref": "schemas/book.yaml"}
    (path / "clinic.binding.yml").write_text(bound("clinic.book", "_clinic:book", **described))


@pytest.mark.parametrize("place", ["entry", "file beside"])
def test_schemas_of_a_binding_hold_as_written(tmp_path: Path, place: str) -> None:
    """apcore's own loader would keep names and types. They are enforced; the function gets what JSON said."""
    bind_clinic(tmp_path, place)
    registry = discover(tmp_path)
    definition = registry.get_definition("clinic.book")
    assert definition is not None
    assert (definition.input_schema, definition.output_schema) == (BOOK, BOOKED)
    executor = Executor(registry)
    assert executor.call("clinic.book", {"patient": "Ann", "room": 3, "pin": "77"}) == {
        "patient": "Ann", "kind": "check-up", "minutes": 30, "room": 3, "pin": "77",
    }  # fmt: skip
    wrong = {"patient": "A", "kind": "x", "minutes": 1, "tags": ["a", 2, "c"], "room": 0.5, "pin": "no digits"}
    for name, value in wrong.items():
        with pytest.raises(SchemaValidationError):
            executor.call("clinic.book", {"patient": "Ann", name: value})
    with pytest.raises(SchemaValidationError):
        executor.call("clinic.book", {"patient": "Ann", "minutes": 90})


def test_a_binding_without_schemas_has_those_of_hints(tmp_path: Path) -> None:
    (tmp_path / "_clinic.py").write_text(CLINIC)
    (tmp_path / "a.binding.yaml").write_text(bound("m.a", "_clinic:typed", auto_schema=True))
    definition = discover(tmp_path).get_definition("m.a")
    assert definition is not None
    assert definition.input_schema["properties"] == {"n": {"title": "N", "type": "integer"}}
    assert definition.output_schema["properties"] == {"result": {"title": "Result", "type": "integer"}}


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
    """And the others are served."""
    (tmp_path / "_clinic.py").write_text(CLINIC)
    (tmp_path / "other.yaml").write_text("input_shema: {}\noutput_schema: {}\n")
    entries: list[Any] = []
    for name, (entry, _) in ENTRIES.items():
        entries.append({"module_id": name, **entry} if name.startswith("m.") else entry)
    entries.append({"module_id": "m.good", "target": "_clinic:count", **SCHEMAS})
    (tmp_path / "clinic.binding.yaml").write_text(json.dumps({"spec_version": "1.0", "bindings": entries}))
    folder = load(tmp_path)
    assert folder.list() == ["m.good"]
    for line, (name, (_, words)) in zip(left_out(folder, tmp_path), ENTRIES.items(), strict=True):
        assert line.startswith(f"clinic.binding.yaml: binding {name} is left out: ")
        assert words in line


def test_yaml_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    """And its dates are texts, as JSON has no others."""
    (tmp_path / "_clinic.py").write_text(CLINIC)
    (tmp_path / "say.py").write_text(A_MODULE)
    (tmp_path / "say_meta.yaml").write_text("description: \u4e88\u7d04\nx-since: 2026-01-31\n", encoding="utf-8")
    (tmp_path / "local.binding.yaml").write_text(
        "bindings:\n- {module_id: m.count, target: '_clinic:count', description: \u4e88\u7d04,"
        " input_schema: {properties: {n: {enum: [2026-01-31], default: 2026-01-31}}}, output_schema: {}}\n",
        encoding="utf-8",
    )
    program = (
        "import json, sys; from apcore_mcp.discovery import discover; registry = discover(sys.argv[1])\n"
        "for name in registry.list():\n"
        "    about = registry.get_definition(name)\n"
        "    print(json.dumps([about.description, about.metadata, about.input_schema]))\n"
    )
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    ended = subprocess.run(command, env=ascii_only, cwd=ROOT, capture_output=True, text=True, timeout=30)
    of_binding, of_class = map(json.loads, ended.stdout.splitlines())
    schema = {"properties": {"n": {"enum": ["2026-01-31"], "default": "2026-01-31"}}}
    assert of_binding == ["\u4e88\u7d04", {}, schema]
    assert of_class[:2] == ["\u4e88\u7d04", {"description": "\u4e88\u7d04", "x-since": "2026-01-31"}]


def test_a_binding_never_gets_the_function_of_another_folder(tmp_path: Path) -> None:
    """Python imports one file of a name, whatever leads to it."""
    for name in ("first", "second"):
        (tmp_path / name / "_pack").mkdir(parents=True)
        (tmp_path / name / "say.binding.yaml").write_text(bound(f"m.{name}", "_pack.one_name:say"))
        (tmp_path / name / "_pack" / "one_name.py").write_text(f"def say() -> str: return '{name}'\n")
    (tmp_path / "link").symlink_to("first")
    sys.path.append(str(tmp_path / "link"))
    folder = load(tmp_path)
    assert Executor(folder).call("m.first", {}) == {"result": "first"}
    assert not folder.has("m.second")
    assert f"give {tmp_path / 'second' / '_pack' / 'one_name.py'} a name of its own" in folder.left_out[-1]


# ---- Links ----


def test_a_link_inside_the_folder_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A Kubernetes ConfigMap is mounted as links through `..data`, which is replaced when it changes."""
    mounted = tmp_path / "mounted"
    for name in ("shop.py", "tools/text.py"):
        write(mounted / "..2026" / name, name)
    (mounted / "..2026" / "shop_meta.yaml").write_text("description: beside the link")
    (mounted / "..2026" / "_mounted.py").write_text("def negate(a: int) -> int: return -a\n")
    (mounted / "..2026" / "maths.binding.yaml").write_text(bound("m.negate", "_mounted:negate"))
    (mounted / "..data").symlink_to("..2026")
    for name in ("shop.py", "shop_meta.yaml", "_mounted.py", "maths.binding.yaml", "tools"):
        (mounted / name).symlink_to(f"..data/{name}")
    registry = discover(mounted)
    assert registry.list() == ["m.negate", "shop", "tools.text"]
    assert describe(registry, "shop") == "beside the link"
    assert Executor(registry).call("m.negate", {"a": 1}) == {"result": -1}
    assert caplog.text == ""


def test_a_link_that_leads_out_or_nowhere_is_named(tmp_path: Path) -> None:
    """One that leads back, or to a folder that is loaded already, ends there."""
    folder = tmp_path / "folder"
    write(folder / "kept" / "say.py", "Say it")
    write(tmp_path / "outside" / "say.py", "Not here")
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
    write(folder / "say.py", "Say it")
    (folder / "say_meta.yaml").symlink_to("../meta.yaml")
    assert load(folder).list() == []
    (tmp_path / "meta.yaml").write_text("annotations: {requires_approval: true}")
    (annotations,) = [load(folder).get_definition("say").annotations]  # type: ignore[union-attr]
    assert annotations == ModuleAnnotations(requires_approval=True)


# ---- Again ----


def test_files_become_modules_change_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by two edits of one size within one second, which Python's cache of bytecode cannot tell apart, and by one
    of another size that leaves the time as it was."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    folder = load(tmp_path)
    written, path = tmp_path / "hot" / "ping.new", tmp_path / "hot" / "ping.py"
    for number, words in ((0, "one"), (1, "two"), (1, "three")):
        write(written, words, f"    def execute(self, inputs, context): return {{'text': '{words}'}}\n")
        os.utime(written, ns=(0, 1_700_000_000_000_000_000 + number))
        written.replace(path)
        assert settle(folder) == 1
        assert shown(folder) == {"hot.ping": words}
        assert Executor(folder).call("hot.ping", {"text": ""}) == {"text": words}
    path.with_name("ping_meta.yaml").write_text("description: from the metadata")
    settle(folder)
    assert shown(folder) == {"hot.ping": "from the metadata"}
    path.with_name("ping_meta.yaml").unlink()
    settle(folder)
    assert shown(folder) == {"hot.ping": "three"}
    path.unlink()
    assert settle(folder) == 0
    assert shown(folder) == {}


def test_a_file_keeps_its_modules_while_it_is_saved(tmp_path: Path) -> None:
    """Metadata that is empty for a moment would say that no approval is required. Two looks have to agree."""
    path, metadata = tmp_path / "say.py", tmp_path / "say_meta.yaml"
    guarded = "annotations: {requires_approval: true}\n"

    def state() -> tuple[str, bool] | None:
        definition = folder.get_definition("say")
        return definition and (definition.description, definition.annotations.requires_approval)  # type: ignore[union-attr, return-value]

    write(path, "one")
    metadata.write_text(guarded)
    folder = load(tmp_path)
    assert state() == ("one", True)
    for half in ("", "annotations:", None):  # truncated, half written, moved away
        if half is None:
            metadata.unlink()
        else:
            metadata.write_text(half)
        folder.discover()
        assert state() == ("one", True)
        metadata.write_text(guarded)
        folder.discover()
        assert state() == ("one", True)
        folder.discover()
    write(path, "two")
    folder.discover()
    assert state() == ("one", True)
    folder.discover()
    assert state() == ("two", True)
    path.unlink()
    folder.discover()
    assert state() == ("two", True)
    folder.discover()
    assert state() is None


def test_a_change_costs_its_file_alone(tmp_path: Path) -> None:
    """Those that stay are neither run again nor other objects."""
    runs = "\nwith open({!r}, 'a') as file: file.write('once ')\n".format(str(tmp_path / "runs"))
    (tmp_path / "kept.py").write_text(FUNCTION.format("is.kept", "kept") + runs)
    write(tmp_path / "hot.py", "old")
    folder = load(tmp_path)
    kept = folder.get("is.kept")
    events: list[str] = []
    for event in ("register", "unregister"):
        folder.on(event, lambda module_id, _module, event=event: events.append(f"{event} {module_id}"))
    write(tmp_path / "hot.py", "new")
    looks = [threading.Thread(target=settle, args=(folder,)) for _ in range(4)]
    for look in looks:
        look.start()
    for look in looks:
        look.join()
    assert shown(folder) == {"hot": "new", "is.kept": "kept"}
    assert folder.get("is.kept") is kept
    assert (tmp_path / "runs").read_text() == "once "
    assert events == ["unregister hot", "register hot"]


def test_only_what_a_file_made_goes_with_it(tmp_path: Path) -> None:
    """What a broken file made goes until it is mended; and an ID may be another's meanwhile."""
    for name in ("moved/away", "stays/kept"):
        write(tmp_path / f"{name}.py", "old")
    folder = load(tmp_path)
    folder.register("by.hand", FunctionalModule(echo))
    kept, hand = tmp_path / "stays" / "kept.py", "A module of a test"
    (tmp_path / "moved").rename(tmp_path / "_moved")
    write(tmp_path / "by" / "hand.py", "not this one")
    kept.write_text("def broken(:")
    settle(folder)
    assert shown(folder) == {"by.hand": hand}
    assert left_out(folder, tmp_path) == [
        "by/hand.py: class Say is left out: ValueError: another module has the ID by.hand",
        "stays/kept.py is left out: SyntaxError: invalid syntax (kept.py, line 1)",
    ]
    folder.register("moved.away", FunctionalModule(echo))
    (tmp_path / "_moved").rename(tmp_path / "moved")
    write(kept, "new", ENDS.format("on_load"))
    (tmp_path / "by" / "hand.py").unlink()
    settle(folder)
    assert shown(folder) == {"by.hand": hand, "moved.away": hand}
    write(kept, "mended")
    settle(folder)
    assert shown(folder) == {"by.hand": hand, "moved.away": hand, "stays.kept": "mended"}


def test_of_two_files_with_one_id_the_first_has_it(tmp_path: Path) -> None:
    """A change of the first changes nothing in that; an ID may move from one file to another."""
    first, second = tmp_path / "a.py", tmp_path / "b.py"
    first.write_text(FUNCTION.format("shop.find", "first"))
    second.write_text(FUNCTION.format("shop.find", "second"))
    folder = load(tmp_path)
    assert shown(folder) == {"shop.find": "first"}
    assert left_out(folder, tmp_path) == [
        "b.py: function f is left out: ValueError: another module has the ID shop.find"
    ]
    first.write_text(FUNCTION.format("shop.find", "first again"))
    settle(folder)
    assert shown(folder) == {"shop.find": "first again"}
    first.write_text(FUNCTION.format("shop.sell", "sell"))
    second.write_text(FUNCTION.format("shop.find", "second again"))
    settle(folder)
    assert shown(folder) == {"shop.find": "second again", "shop.sell": "sell"}
    assert folder.left_out == []


def test_a_folder_behind_a_link_is_followed_through_it(tmp_path: Path) -> None:
    """Also back, and though the files of both versions are of one size and one time."""
    current = tmp_path / "current"
    for version in ("v1", "v2"):
        write(tmp_path / version / f"{version}.py", version)
        write(tmp_path / version / "both.py", version)
        os.utime(tmp_path / version / "both.py", ns=(0, 1_700_000_000_000_000_000))
    current.symlink_to("v1")
    folder = load(current)
    for version in ("v1", "v2", "v1"):
        (tmp_path / "new").symlink_to(version)
        (tmp_path / "new").replace(current)
        settle(folder)
        assert shown(folder) == {version: version, "both": version}


def test_a_changed_config_map_is_taken_in(tmp_path: Path) -> None:
    """Kubernetes replaces `..data`, and no link of a module changes. Both versions are of one size and one time."""
    for version in ("v1", "v2"):
        write(tmp_path / f"..{version}" / "shop.py", version)
        os.utime(tmp_path / f"..{version}" / "shop.py", ns=(0, 1_700_000_000_000_000_000))
    (tmp_path / "..data").symlink_to("..v1")
    (tmp_path / "shop.py").symlink_to("..data/shop.py")
    folder = load(tmp_path)
    assert shown(folder) == {"shop": "v1"}
    (tmp_path / "..new").symlink_to("..v2")
    (tmp_path / "..new").replace(tmp_path / "..data")
    settle(folder)
    assert shown(folder) == {"shop": "v2"}


def test_a_folder_that_is_gone_is_an_error(tmp_path: Path) -> None:
    """Of one look. What it held stays: it may be mounted again."""
    write(tmp_path / "folder" / "say.py", "Say it")
    folder = load(tmp_path / "folder")
    (tmp_path / "folder").rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        folder.discover()
    assert folder.list() == ["say"]
    write(tmp_path / "away" / "shout.py", "Shout it")
    (tmp_path / "away").rename(tmp_path / "folder")
    settle(folder)
    assert folder.list() == ["say", "shout"]


def test_follow_looks_until_it_is_ended(tmp_path: Path) -> None:
    """Whatever files raise."""
    ended = threading.Event()
    folder = load(tmp_path)
    folder.follow(ended)
    (look,) = [thread for thread in threading.enumerate() if thread.name == "apcore-mcp-files"]
    assert look.daemon
    write(tmp_path / "hot.py", "old")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    write(tmp_path / "unloads.py", "once", ENDS.format("on_unload"))
    until(lambda: "unloads" in folder.list())
    (tmp_path / "unloads.py").unlink()
    until(lambda: shown(folder) == {"hot": "old"})
    write(tmp_path / "hot.py", "new")
    until(lambda: shown(folder) == {"hot": "new"})
    (tmp_path / "hot.py").unlink()
    until(lambda: shown(folder) == {})
    ended.set()
    look.join(10)
    assert not look.is_alive()


# needs the server


@pytest.mark.parametrize("place", ["entry", "file beside"])
async def test_schemas_of_a_binding_are_listed_and_hide_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    bind_clinic(tmp_path, place)
    async with connect(discover(tmp_path)) as client:
        (tool,) = (await client.list_tools()).tools
        assert BOOK.items() <= tool.input_schema.items()
        booked = await client.call_tool("clinic.book", {"patient": "Ann", "room": 3, "pin": "77"})
        assert json.loads(text_of(booked))["pin"] == REDACTED_VALUE
        wrong = {"patient": "A", "kind": "x", "minutes": 1, "tags": ["a", 2, "c"], "room": 0.5, "pin": "secret"}
        refused = text_of(await client.call_tool("clinic.book", wrong))
        faults = {line.split(":")[0] for line in refused.splitlines()[1:]}
        assert faults == {"- patient", "- kind", "- minutes", "- tags", "- tags.1", "- room", "- pin"}
        assert "secret" not in refused + caplog.text
        too_long = text_of(await client.call_tool("clinic.book", {"patient": "Ann", "minutes": 90}))
        assert too_long.startswith("Output validation failed")


@pytest.mark.requirement("FR-DYNAMIC-001", "FR-DYNAMIC-002", "FR-DYNAMIC-003")
def test_dynamic_follows_classes_functions_and_bindings(extensions: Path) -> None:
    """They are taken in, again when they change, and out when they go; an ID may move to another file."""
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


def test_a_changed_file_is_called_by_its_new_model(tmp_path: Path) -> None:
    """What the server keeps of a model goes with it."""
    path = tmp_path / "ping.py"
    look = "    def execute(self, inputs, context):\n"
    look += "        return {'text': '', 'times': len(context.redacted_inputs['text'])}\n"
    write(path, "one", look)
    arguments = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", str(tmp_path), "--dynamic"]
    call = {"name": "ping", "arguments": {"text": "abc"}}
    with RawClient(arguments) as client:
        client.initialize()
        assert json.loads(client.request("tools/call", call)["result"]["content"][0]["text"])["times"] == 3
        description = 'description="What to say"'
        marked = path.read_text().replace(description, f'{description}, json_schema_extra={{"x-sensitive": True}}')
        path.with_name("ping.new").write_text(marked)
        path.with_name("ping.new").replace(path)
        assert client.receive()["method"].endswith("list_changed")
        result = json.loads(client.request("tools/call", call)["result"]["content"][0]["text"])
        assert result == {"text": REDACTED_VALUE, "times": len(REDACTED_VALUE)}
        client.end()


def test_a_decorator_above_module_would_not_run(tmp_path: Path) -> None:
    """A guard, say: apcore's module is the function below it."""
    text = "import functools\nfrom apcore.decorator import module\n\n\ndef guarded(function):\n"
    text += "    return functools.wraps(function)(lambda **given: 1 / 0)\n\n\n"
    text += "@guarded\n@module\ndef drop() -> str:\n    'Drop all.'\n    return 'dropped'\n\n\n"
    text += "@module\n@functools.cache\ndef keep() -> str:\n    'Keep all.'\n    return 'kept'\n"
    (tmp_path / "shop.py").write_text(text)
    folder = load(tmp_path)
    assert folder.list() == ["shop.keep"]
    assert "put @module above all others" in folder.left_out[0]
