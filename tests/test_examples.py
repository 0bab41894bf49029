"""What the README shows works: the example modules, the three scripts, and the Python blocks."""

from __future__ import annotations

import ast
import base64
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from apcore import BindingLoader, Executor, Registry
from conftest import EXTENSIONS, ROOT
from pydantic_core import to_jsonable_python


def run(tmp_path: Path, *arguments: str) -> str:
    """The output of an example, run from another directory as a user might."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    completed = subprocess.run(
        [sys.executable, str(ROOT / "examples" / arguments[0]), *arguments[1:]],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert completed.returncode == 0, completed.stderr
    assert "Traceback" not in completed.stderr
    return completed.stdout


async def test_every_example_module_does_what_its_own_examples_say(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(extensions_dir=str(EXTENSIONS))
    registry.discover()
    for path in EXTENSIONS.rglob("*.binding.yaml"):
        monkeypatch.syspath_prepend(str(path.parent))
        BindingLoader().load_bindings(str(path), registry)
    executor, ran = Executor(registry), 0
    for module_id in registry.list():
        descriptor = registry.get_definition(module_id)
        assert descriptor is not None
        for example in descriptor.examples:
            output = to_jsonable_python(await executor.call_async(module_id, dict(example.inputs)))
            for picture in output.keys() - example.output.keys():  # its bytes depend on the release of zlib
                assert base64.b64decode(output.pop(picture)).startswith(b"\x89PNG")
            assert output == example.output
            ran += 1
    assert ran >= 9
    assert len(registry.list()) == int(re.search(r"(\d+) tools registered", (ROOT / "README.md").read_text())[1])  # type: ignore[index]


def test_the_quickstart_lists_the_tools_and_calls_two(tmp_path: Path) -> None:
    transcript = run(tmp_path, "quickstart.py")
    assert re.search(r"^  text\.slugify +Turn a title", transcript, re.MULTILINE)
    assert "'words': 7" in transcript
    assert "{'workdays': 8, 'skipped': ['2025-04-18', '2025-04-21']}" in transcript
    assert "- end: Field required (required)" in transcript


def test_the_openai_example_runs_the_recorded_call(tmp_path: Path) -> None:
    transcript = run(tmp_path, "openai_tools.py")
    assert '"name": "finance-loan_schedule"' in transcript
    assert "That is text.analyze with {'text': 'The cat sat. The dog did not!'}, which returns" in transcript
    assert '"words": 7' in transcript


@pytest.mark.parametrize("mode", ["legacy", "auto"])
def test_in_the_conversation_tools_report_ask_and_need_approval(tmp_path: Path, mode: str) -> None:
    transcript = run(tmp_path, "conversation.py", mode)
    streamed, booked, emptied, denied = transcript.split("\n> ")[1:]
    assert streamed.count("progress:") == 2
    assert "'words': {'a': 2, 'rose': 2, 'is': 1}" in streamed
    assert "asked:    Which room for 6 people" in booked
    assert "'status': 'booked', 'room': 'Harbour'" in booked
    assert "asked:    Let trash.empty run? It is annotated as destructive." in emptied
    assert "'freed_bytes': 2048" in emptied
    assert denied.rstrip().endswith("Approval was denied")


def test_the_python_of_the_readme_is_valid_and_names_only_what_exists() -> None:
    import apcore

    import apcore_mcp

    blocks = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) >= 5
    for block in blocks:
        compile(block, "README.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        for package, names in re.findall(r"^from (apcore|apcore_mcp) import (.+)$", block, flags=re.MULTILINE):
            module: Any = apcore if package == "apcore" else apcore_mcp
            assert all(hasattr(module, name) for name in names.split(", ")), names
    used = " ".join(re.findall(r"^from apcore_mcp import (.+)$", "\n".join(blocks), flags=re.MULTILINE))
    functions = {name for name in apcore_mcp.__all__ if name.islower() and not name.startswith("_")}
    assert functions - {"from_openai_name"} <= set(used.replace(",", "").split())
