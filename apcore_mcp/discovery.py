"""A folder in, an apcore Registry out: its modules are loaded, and loaded again when their files change.

`Folder` is an apcore Registry with a `discover()` of its own, which also takes what apcore's passes over: functions
with `@module`, classes with dict schemas, and bindings, whose schemas hold as they are written. Without this file any
other Registry is served as before, and there is no `discover(folder)`, no `--extensions-dir` and no `dynamic`.
"""

from __future__ import annotations

import inspect
import logging
import logging.handlers
import os
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml
from apcore import ModuleAnnotations, Registry
from apcore.bindings import BindingLoader
from apcore.decorator import FunctionModule
from pydantic import BaseModel
from pydantic_core import to_jsonable_python

__all__ = ["Folder", "discover"]

logger = logging.getLogger("apcore_mcp")

# ---- Files: which there are, and what tells that one has changed ----

_State = tuple[int, int, int] | None  # a file's inode, time and size; None for one that cannot be read, or is not there
_Look = dict[str, tuple[_State, _State]]  # by path, the states of a file and of its metadata

_BINDINGS = (".binding.yaml", ".binding.yml")


def _look_at(place: str, folder: str, seen: set[str]) -> _Look:
    """Each file below `place` that may define modules, as it is now. Each folder is looked at once.

    A folder that may not be read, and a link that leads out of `folder`, are among the files: to load them is an error.
    """
    look: _Look = {}
    seen.add(os.path.realpath(place))
    for name in sorted(os.listdir(place)):
        path = os.path.join(place, name)
        is_folder = os.path.isdir(path)
        if name.startswith(("_", ".")) or name == "node_modules" or (is_folder and os.path.realpath(path) in seen):
            continue
        if is_folder and _is_inside(path, folder) and os.access(path, os.R_OK | os.X_OK):
            look |= _look_at(path, folder, seen)
        elif is_folder or name.endswith((".py", *_BINDINGS)):
            look[path] = (_state_of(path), _state_of(_metadata_of(path)))
    return look


def _is_inside(path: str, folder: str) -> bool:
    """Whether a path stays in the folder, wherever links lead."""
    return Path(path).resolve().is_relative_to(Path(folder).resolve())


def _state_of(path: str) -> _State:
    """What tells a change of a file: also of a link's target, and by an edit that leaves the time as it was."""
    with suppress(OSError):
        status = os.stat(path)
        return (status.st_ino, status.st_mtime_ns, status.st_size)
    return None


def _metadata_of(path: str) -> str:
    """Where the metadata of a file would be: text/shout_meta.yaml of text/shout.py."""
    return path.removesuffix(".py") + "_meta.yaml"


def _read_yaml(path: str) -> dict[str, Any]:
    """The mapping in a YAML file, in the types of JSON: a date is a text. In UTF-8, whatever the locale is."""
    return dict(to_jsonable_python(yaml.safe_load(Path(path).read_bytes())) or {})


# ---- Annotations: one that apcore does not know leaves its module out, as it may have meant an approval ----


def _check_annotations(module: Any, metadata: dict[str, Any], warnings: Iterable[logging.LogRecord]) -> None:
    """Raise for an annotation that apcore would drop. From those of a function it has dropped it, and only warned."""
    own = getattr(module, "annotations", None)
    for given in (own, metadata.get("annotations")):
        if given is not None and not isinstance(given, ModuleAnnotations):
            ModuleAnnotations(**given)
    if isinstance(module, FunctionModule):
        for record in warnings:
            if record.name == "apcore.decorator" and module.module_id in (record.args or ()):
                raise ValueError(record.getMessage())
        if own is not None and not logging.getLogger("apcore.decorator").isEnabledFor(logging.WARNING):
            raise RuntimeError("a misspelt annotation would go unseen: the logger apcore.decorator does not warn")


# ---- Python files: run, and searched for functions and classes ----

_PACKAGE = "apcore_ext"  # of files while they run: text/shout.py is apcore_ext.text.shout


def _run_file(path: str, name: str) -> dict[str, Any]:
    """Run a file as the Python module `name`; returns what it contains, by name.

    It runs from its source: Python's cache takes two edits of one size within one second for the same.
    """
    module = ModuleType(name)
    module.__file__ = path
    sys.modules[name] = module  # where dataclasses and pydantic look for what an annotation names
    sys.modules.setdefault(_PACKAGE, ModuleType(_PACKAGE))  # which pickle imports first
    exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(module))
    return dict(vars(module))


def _defined_in(contents: dict[str, Any]) -> list[Any]:
    """The functions and classes that a file itself defines, each once, whatever names it has."""
    values = [value for value in contents.values() if inspect.isroutine(value) or inspect.isclass(value)]
    return list(dict.fromkeys(value for value in values if value.__module__ == contents["__name__"]))


def _is_module_class(value: object) -> bool:
    """Whether it is a class that is meant to be a module: one that only helps has a name that begins with `_`."""
    has_parts = callable(getattr(value, "execute", None)) and getattr(value, "input_schema", None) is not None
    return inspect.isclass(value) and has_parts and not value.__name__.startswith("_")


def _has_models(cls: Any) -> bool:
    """Whether apcore's own discovery would take a module class: both of its schemas are pydantic models."""
    schemas = (cls.input_schema, getattr(cls, "output_schema", None))
    return all(inspect.isclass(schema) and issubclass(schema, BaseModel) for schema in schemas)


# ---- Bindings: functions elsewhere, made modules by a YAML file ----


def _bind(entry: dict[str, Any], folder: str) -> FunctionModule:
    """The module of one entry of a binding file.

    Its schemas, or those of the file at `schema_ref`, hold as they are written, dicts like those of a class: apcore's
    own loader keeps names and types of them. Without any, apcore makes models of the function's hints.
    """
    options = dict(entry)
    options.pop("auto_schema", None)
    if "schema_ref" in options:
        schemas = _read_yaml(os.path.join(folder, options.pop("schema_ref")))
        options |= {name: schemas[name] for name in ("input_schema", "output_schema")}
    target = options.pop("target")
    function = BindingLoader().resolve_target(target)
    name = target.partition(":")[0]
    beside = Path(folder, *name.split(".")).with_suffix(".py")
    if beside.exists() and not beside.samefile(str(sys.modules[name].__file__)):  # Python imports one file of a name
        raise ImportError(f"another file has been imported as {name}: give {beside} a name of its own")
    return FunctionModule(function, **options)


# ---- Folder: a Registry of what the files define ----


class Folder(Registry):
    """A Registry of the modules in the files of one directory; none is loaded before `discover()`.

    One bad file or module never takes the others down: it is left out with a WARNING until its file changes. Of two
    modules with one ID the first has it. Any thread; one `discover()` at a time.
    """

    def __init__(self, extensions_dir: str | os.PathLike[str]) -> None:
        if not os.path.exists(extensions_dir):
            raise ValueError(f"extensions directory does not exist: {extensions_dir}")
        if not os.path.isdir(extensions_dir):
            raise ValueError(f"extensions path is not a directory: {extensions_dir}")
        self._folder = os.path.abspath(extensions_dir)
        super().__init__(extensions_dir=self._folder)
        self._discovery = threading.Lock()
        self._last_look: _Look | None = None
        self._base: _Look = {}  # the files as they were when they were loaded, or left out
        self._by_file: dict[str, list[str]] = {}  # by path, the IDs of a file's modules
        self.left_out: list[str] = []  # by the last discover(), as the WARNINGs say it
        self._apcore_log = logging.handlers.BufferingHandler(capacity=10_000)  # of the last discover()
        self._apcore_log.setLevel(logging.WARNING)
        self.warned: list[str] = []  # of what the last discover() has loaded, by us and by apcore

    def discover(self, path_filter: str | list[str] | None = None) -> int:
        """Load what is new or has changed and unregister what has gone; returns how many modules were registered.

        The first call takes every file as it is. A later one takes a change only when it finds the file as the call
        before did: half of a save may lack the line that says that a module needs approval. A change costs its file
        alone. ValueError for a `path_filter`.
        """
        if path_filter is not None:
            raise ValueError("path_filter is not supported: discover() loads the files that have changed")
        with self._discovery:
            self.left_out = []
            self.warned = []
            look = _look_at(self._folder, self._folder, set())
            before = look if self._last_look is None else self._last_look
            self._last_look = look
            settled = [path for path in look.keys() | self._base.keys() if look.get(path) == before.get(path)]
            changed = [path for path in sorted(settled) if look.get(path) != self._base.get(path)]
            for path in changed:  # all that goes before any that comes: an ID may have moved to another file
                self._unload(path)
            logging.getLogger("apcore").addHandler(self._apcore_log)
            try:
                for path in filter(look.get, changed):
                    self._base[path] = look[path]
                    with self._fence(path):
                        self._load(path)
            finally:
                logging.getLogger("apcore").removeHandler(self._apcore_log)
            self.warned += [record.getMessage() for record in self._apcore_log.buffer]
            self._apcore_log.flush()
            return sum(len(self._by_file.get(path, [])) for path in changed)

    def follow(self, ended: threading.Event) -> None:
        """Call `discover()` twice a second, on a daemon thread, until `ended` is set."""

        def look() -> None:
            while not ended.wait(0.5):
                with suppress(OSError):  # a folder goes while it is looked at
                    self.discover()

        threading.Thread(target=look, name="apcore-mcp-files", daemon=True).start()

    @contextmanager
    def _fence(self, what: str) -> Iterator[None]:
        """Leave out `what` with a WARNING if it raises, whatever it raises but KeyboardInterrupt.

        Of a file, it names the line that failed. The traceback is for DEBUG: most of it is apcore's and pydantic's.
        """
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # such as that of `pytest.skip`
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == what]
            place = f"line {lines[-1]}: " if lines else ""
            told = " - ".join(" ".join(str(each).split()) for each in (error, error.__cause__) if each)
            text = f"{what} is left out: {place}{type(error).__name__}: {told}"
            self.left_out.append(text)
            logger.warning("%s", text)
            logger.debug("%s", text, exc_info=error)

    def _warn(self, text: str) -> None:
        self.warned.append(text)
        logger.warning("%s", text)

    def _unload(self, path: str) -> None:
        self._base.pop(path, None)
        for module_id in self._by_file.pop(path, []):
            with self._fence(f"{path}: on_unload of {module_id}"):
                self.unregister(module_id)

    def _load(self, path: str) -> None:
        if not _is_inside(path, self._folder):
            raise OSError("it is a link out of the extensions directory")
        load = self._load_bindings if path.endswith(_BINDINGS) else self._load_python
        load(path)

    def _load_bindings(self, path: str) -> None:
        """Register what a `*.binding.yaml` file binds, also of files beside it."""
        folder = os.path.dirname(path)
        if folder not in sys.path:
            sys.path.append(folder)
        document = _read_yaml(path)
        if not document.keys() <= {"spec_version", "bindings"}:
            raise ValueError("it has other keys than spec_version and bindings")
        for entry in document["bindings"]:
            name = entry.get("module_id") if isinstance(entry, dict) else entry
            with self._fence(f"{path}: binding {name}"):
                module = _bind(entry, folder)
                self._register(path, module.module_id, module, {})

    def _load_python(self, path: str) -> None:
        """Register the functions with `@module` and the module class that a file defines."""
        metadata = _read_yaml(_metadata_of(path)) if os.path.lexists(_metadata_of(path)) else {}
        module_id = ".".join(Path(path).relative_to(self._folder).with_suffix("").parts)
        contents = _run_file(path, f"{_PACKAGE}.{module_id}")
        defined = _defined_in(contents)
        functions = [value for value in defined if hasattr(value, "apcore_module")]
        entry_point = str(metadata.get("entry_point", "")).rpartition(":")[2]
        classes = [contents[entry_point]] if entry_point else list(filter(_is_module_class, defined))
        if len(classes) > 1:
            with_models = list(filter(_has_models, classes))
            classes = with_models if len(with_models) == 1 else classes
        if metadata and not classes:
            raise ValueError("its metadata describes a module class, and it defines none")
        for function in functions:
            with self._fence(f"{path}: function {function.__name__}"):
                inner = getattr(function, "__wrapped__", None)
                if getattr(inner, "apcore_module", None) is function.apcore_module:
                    raise TypeError("the decorator above @module would not run: put @module above all others")
                name = function.apcore_module.module_id.removeprefix(f"{_PACKAGE}.")
                self._register(path, name, function.apcore_module, {})
        for cls in classes:
            with self._fence(f"{path}: class {cls.__name__}"):
                if len(classes) > 1:
                    raise TypeError("it is one of several: put _ before the others, or name it as entry_point")
                self._register(path, module_id, cls(), metadata)
        for cls in filter(inspect.isclass, defined):
            for name, value in vars(cls).items():
                if inspect.isroutine(value) and hasattr(getattr(value, "__func__", value), "apcore_module"):
                    self._warn(f"{path}: @module on the method {cls.__name__}.{name} is served nowhere: bind it")
        if not functions and not classes:
            self._warn(f"{path} defines no module: neither a function with apcore.decorator.module nor a class")

    def _register(self, path: str, module_id: str, module: Any, metadata: dict[str, Any]) -> None:
        _check_annotations(module, metadata, self._apcore_log.buffer)
        if self.has(module_id):  # or `register` would take this one for another version of that
            raise ValueError(f"another module has the ID {module_id}")
        version = metadata.get("version") or getattr(module, "version", None) or "1.0.0"
        self.register(module_id, module, str(version), metadata)
        self._by_file.setdefault(path, []).append(module_id)


def discover(extensions_dir: str | os.PathLike[str]) -> Registry:
    """Load the modules of a directory, as the command line does: a Registry of them, to serve or to give an Executor.

    Takes module classes and functions with apcore's `@module` from `*.py` files, and what `*.binding.yaml` files bind.
    What cannot be loaded is left out with a WARNING that names it, and so is a link out of the directory. Names that
    begin with `_` or `.` and `node_modules` are not looked at. Source: FR-CLI-002. ValueError for no such directory.
    """
    folder = Folder(extensions_dir)
    folder.discover()
    return folder
