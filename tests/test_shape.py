"""The one file holds to what its docstring says of it: rooms, in order, each using only what stands above."""

from __future__ import annotations

import ast
import re
from bisect import bisect
from collections.abc import Iterator
from pathlib import Path

import apcore_mcp.core

SOURCE = Path(apcore_mcp.core.__file__).read_text("utf-8")
BANNERS = [(line, m[1]) for line, text in enumerate(SOURCE.split("\n"), 1) if (m := re.match(r"# ---- (\w+): ", text))]


def room_of(line: int) -> int:
    """Which room a line stands in; 0 is the head of the file."""
    return bisect([start for start, _ in BANNERS], line)


def defined() -> Iterator[tuple[str, int]]:
    """Each name that a room defines, and where."""
    for node in ast.parse(SOURCE).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, ast.Name):
                yield target.id, node.lineno


def test_the_docstring_lists_the_rooms() -> None:
    listed = re.findall(r"^    (\w+) {2,}\w", apcore_mcp.core.__doc__ or "", re.MULTILINE)
    assert listed == [name for _, name in BANNERS]


def test_a_room_uses_only_what_stands_above_it() -> None:
    at: dict[str, int] = {}
    for name, line in defined():
        at.setdefault(name, room_of(line))
    # Annotations are not run, so a room may name a type that comes later.
    tree = ast.parse(SOURCE)
    annotations = {
        id(inner)
        for node in ast.walk(tree)
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None))
        if part is not None
        for inner in ast.walk(part)
    }
    used = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in annotations]
    assert at["_Tool"] > 0
    below = [f"line {node.lineno} uses {node.id}" for node in used if at.get(node.id, 0) > room_of(node.lineno)]
    assert below == []
