"""The house: which files there are, what each may import and how large it may be, and what holds for all of them."""

from __future__ import annotations

import ast
import importlib
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import EXTENSIONS, ROOT, RawClient
from support import Capture, Monkeypatch

import apcore_mcp

PACKAGE = Path(apcore_mcp.__file__).parent
FILES = {path.stem: path.read_text("utf-8") for path in sorted(PACKAGE.glob("*.py"))}
TREES = {name: ast.parse(text) for name, text in FILES.items()}

# ---- Imports ----

# Each file may import those before it.
BELOW = (
    "schemas client functions faults promises hints reading arrays values output arguments conversation context call"
    " log discovery execution approval options core"
).split()
# And what stands above core.py all of these, and beside them:
ABOVE: dict[str, set[str]] = {
    **{name: set() for name in "__main__ explorer metrics openai search skills stdio tasks web".split()},
    "__init__": {"openai"},
    "export": {"openai"},
}
# What is only imported where it is used, as it may be missing.
LATER = {
    "__main__": {"export", "stdio"},
    "core": {"explorer", "metrics", "search", "skills", "stdio", "tasks", "web"},
    "export": {"skills"},
    "openai": {"search"},
    "web": {"explorer", "metrics"},
}


def imports(node: ast.AST, later: bool = False) -> Iterator[tuple[str, bool]]:
    """The files of the package that are imported below `node`, and whether only in a function or for type checkers."""
    if isinstance(node, ast.ImportFrom) and node.level:
        names = [node.module] if node.module else [alias.name for alias in node.names]
        yield from ((name, later) for name in names if name != "__version__")
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        later = True
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        later = True
    for child in ast.iter_child_nodes(node):
        yield from imports(child, later)


@pytest.mark.parametrize("name", sorted(FILES.keys() - {"auth"}))
def test_imports_go_one_way(name: str) -> None:
    """From the top to core.py, and from there to what knows nothing of it, not even for types."""
    allowed = {*BELOW} | ABOVE[name] if name in ABOVE else {*BELOW[: BELOW.index(name)]}
    found = set(imports(TREES[name]))
    assert {file for file, later in found if not later} <= allowed
    assert {file for file, later in found if later} <= allowed | LATER.get(name, set())


def private_names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """The private names that a file defines, and those that it uses."""
    defined, used = set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            (used if isinstance(node.ctx, ast.Load) else defined).add(name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            used |= {alias.name for alias in node.names}
    is_private = re.compile(r"_(?!_)\w").match
    return {*filter(is_private, defined)}, {*filter(is_private, used)}


def test_no_file_uses_a_private_name_of_another() -> None:
    names = {name: private_names(tree) for name, tree in TREES.items()}
    for name, (own, used) in names.items():
        for other, (defined, _) in names.items():
            assert (used - own) & defined == set(), f"{name}.py uses a private name of {other}.py"


def test_a_room_of_core_uses_only_what_stands_above_it() -> None:
    room, rooms = 0, [0]
    for line in FILES["core"].split("\n"):
        room += line.startswith("# ---- ")
        rooms.append(room)
    tree = TREES["core"]
    at: dict[str, int] = {}
    for node in tree.body:
        for target in getattr(node, "targets", [getattr(node, "target", node)]):
            at.setdefault(getattr(target, "name", getattr(target, "id", "")), rooms[node.lineno])
    # Annotations are not run, so a room may name a type that comes later.
    parts = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    annotations = {inner for part in parts if part is not None for inner in ast.walk(part)}
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node not in annotations]
    assert at["Tool"] > 0
    assert [f"line {node.lineno} uses {node.id}" for node in used if at.get(node.id, 0) > rooms[node.lineno]] == []


def test_an_import_changes_no_logger() -> None:
    """Neither ours nor one of apcore, the SDK or anybody else."""
    program = f"""
import logging
import apcore, apcore.decorator, apcore.bindings, mcp.server, uvicorn, starlette.routing, pydantic, jsonschema

def state():
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    loggers = [log for log in loggers if isinstance(log, logging.Logger)]
    return {{log.name: [log.level, log.handlers[:], log.filters[:], log.disabled] for log in loggers}}

before = state()
from apcore_mcp import {", ".join(sorted(FILES.keys() - {"__init__", "__main__", "auth"}))}
print([name for name, now in state().items() if now != before.get(name, [0, [], [], False])])
"""
    assert subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, text=True, timeout=50) == "[]\n"


# ---- A copy without its optional files ----

WITHOUT = {
    "tasks": ["--task-after", "3"],
    "search": ["--search"],
    "skills": ["--skills", str(ROOT / "examples" / "skills")],
    "explorer": ["--explorer", "--transport", "streamable-http"],
    "export": ["--export", "mcp"],
    "metrics": ["--metrics", "--transport", "streamable-http"],
}


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a project is that has a copy of the package without these files."""
    folder = tmp_path_factory.mktemp("without")
    left_out = shutil.ignore_patterns("__pycache__", *(f"{file}.py" for file in WITHOUT))
    shutil.copytree(PACKAGE, folder / "anyproject" / "_vendor" / "apcore_mcp", ignore=left_out)
    return folder


FLAGS = ["--extensions-dir", str(EXTENSIONS)]


def test_a_vendored_copy_works_without_its_optional_files(without: Path) -> None:
    with RawClient([sys.executable, "-m", "anyproject._vendor.apcore_mcp", *FLAGS], cwd=without) as client:
        client.initialize()
        call = {"name": "text.slugify", "arguments": {"text": "One House"}}
        assert "one-house" in client.request("tools/call", call)["result"]["content"][0]["text"]
        assert client.end()[0] == 0


@pytest.mark.parametrize("file", WITHOUT)
def test_what_an_optional_file_is_for_says_in_a_line_that_it_is_missing(
    file: str, without: Path, monkeypatch: Monkeypatch, capfd: Capture
) -> None:
    monkeypatch.syspath_prepend(without)
    command_line = importlib.import_module("anyproject._vendor.apcore_mcp.__main__")
    monkeypatch.setattr(f"{command_line.__package__}.stdio.take_standard_streams", lambda: None)  # they are pytest's
    assert command_line.main([*FLAGS, *WITHOUT[file]]) in (1, 2)
    out, err = capfd.readouterr()
    assert re.fullmatch(rf"Error: .*\b{file}\b.*\n", err)
    assert out == ""


# ---- Sizes ----


def lines_of_code(name: str) -> int:
    """Without blank lines, comments and docstrings."""
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(FILES[name]).readline):
        if token.type not in no_code:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines -= {*range(node.lineno, (node.end_lineno or 0) + 1)}
    return len(lines)


@pytest.mark.requirement("NFR-MAINT-001")
@pytest.mark.parametrize("name", FILES)
def test_a_file_has_one_job_and_the_bridge_is_read_in_one_sitting(name: str) -> None:
    assert lines_of_code(name) <= {"core": 1_200, "__main__": 100}.get(name, 300)


# ---- What is declared ----


@pytest.mark.requirement("NFR-MAINT-002", "NFR-COMPAT-001", "NFR-COMPAT-002", "NFR-COMPAT-003", "NFR-PORT-002")
def test_the_project_declares_what_is_required() -> None:
    """Python 3.11 to 3.14, apcore and the MCP SDK and nothing else on any platform, 95 % of lines and branches."""
    declared: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    project = declared["project"]
    assert project["requires-python"] == ">=3.11"
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in range(11, 15)} <= {*project["classifiers"]}
    assert [re.split("[<>=]", requirement)[0] for requirement in project["dependencies"]] == ["apcore", "mcp"]
    assert not any(";" in requirement for requirement in project["dependencies"])
    assert declared["tool"]["coverage"]["run"]["branch"]
    assert declared["tool"]["coverage"]["report"]["fail_under"] >= 95


@pytest.mark.requirement("NFR-MAINT-003")
def test_what_tests_start_is_this_checkout(tmp_path: Path) -> None:
    """Though another copy could be found."""
    (tmp_path / "apcore_mcp").mkdir()
    (tmp_path / "apcore_mcp" / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": f"{os.environ['PYTHONPATH']}{os.pathsep}{tmp_path}"}
    find = "import importlib.util; print(importlib.util.find_spec('apcore_mcp').origin)"
    found = subprocess.check_output([sys.executable, "-P", "-c", find], env=environment, text=True, timeout=30)
    assert Path(found.strip()).parent == ROOT / "apcore_mcp" == PACKAGE


PUBLIC = (
    "MCPServer MCP_ELICIT_KEY MCP_PROGRESS_KEY ElicitationApprovalHandler __version__ async_serve discover elicit"
    " from_openai_call from_openai_name report_progress run_openai_call serve to_openai_tools"
).split()


def test_what_is_public_and_that_it_has_types() -> None:
    """That each has an annotation is mypy's to say."""
    assert {*apcore_mcp.__all__} == {*PUBLIC}
    assert (PACKAGE / "py.typed").exists()


# How many requirements the specification has of each kind, numbered from 001.
REQUIREMENTS = {
    "FR-SCHEMA": 6, "FR-ANNOT": 7, "FR-EXEC": 7, "FR-ERROR": 11, "FR-SERVER": 11, "FR-TRANSPORT": 5, "FR-OPENAI": 7,
    "FR-CLI": 8, "FR-DYNAMIC": 4, "FR-LOG": 5, "FR-FILTER": 3, "FR-HEALTH": 2, "FR-RESOURCE": 2, "FR-STREAM": 1,
    "FR-EXT": 3, "FR-EXPLORER": 6, "NFR-PERF": 4, "NFR-SEC": 3, "NFR-REL": 3, "NFR-MAINT": 4, "NFR-COMPAT": 4,
    "NFR-PORT": 2,
}  # fmt: skip
MEASURED = {"NFR-PERF-001", "NFR-PERF-002", "NFR-PERF-003"}  # by `python -m tests.benchmarks`


def test_each_requirement_has_a_test_that_names_it() -> None:
    """Which test proves what: `grep -rA3 '"FR-ERROR-006"' tests`."""
    named: set[str] = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.requirement":
                named.update(argument.value for argument in node.args if isinstance(argument, ast.Constant))
    required = {f"{kind}-{number:03}" for kind, count in REQUIREMENTS.items() for number in range(1, count + 1)}
    assert named == required - MEASURED
