"""`--export markdown`: eight sections for each tool."""

from __future__ import annotations

import json
import os
import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import EXTENSIONS
from conftest import MODULE as SAYS
from jsonschema import Draft202012Validator
from support import run

from apcore_mcp import discover, to_openai_tools
from apcore_mcp.__main__ import main

Capture = pytest.CaptureFixture[str]
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
from apcore import ModuleExample
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


def test_every_example_module_has_a_document_whose_examples_are_valid_calls(capfd: Capture) -> None:
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
    code: str = Field(pattern="^[A-Z]{3}$", examples=["no", "EUR"])
    secret: str = Field(json_schema_extra={"x-sensitive": True})

Takes.input_schema, Takes.output_schema = Input, Inner
"""


def test_an_example_is_made_of_plain_values_when_the_module_has_none(capfd: Capture, tmp_path: Path) -> None:
    sections = documented(tmp_path, capfd, EVERYTHING)
    (arguments,) = check_examples(sections, "takes")
    assert arguments == {
        "text": "text", "kind": "small", "day": "2025-01-31", "inner": {"size": 1, "ratio": 0.5}, "several": [],
        "maybe": True, "code": "EUR", "secret": "text",
    }  # fmt: skip
    assert '| `text` | string | Yes | A \\| B C | `"text"` |' in sections[3]
    assert "| `maybe` | boolean or null | Yes |  | `true` |" in sections[3]
    assert "| `more` | integer | No |  | `0` |" in sections[4]
    (function,) = to_openai_tools(discover(tmp_path))
    assert blocks(sections[3]) == [function["function"]["parameters"]]


def test_the_purpose_is_the_description_and_the_documentation_with_its_headings_below_ours(
    capfd: Capture, tmp_path: Path
) -> None:
    sections = documented(tmp_path, capfd, "Takes.documentation = '# A\\n\\n## C'")
    assert sections[1].strip() == "Takes it.\n\n#### A\n\n##### C"


@pytest.mark.parametrize("field", ["Field(pattern='^[A-Z]{3}$')", "Field(json_schema_extra={'not': {}})"])
def test_an_example_is_valid_or_there_is_none(field: str, capfd: Capture, tmp_path: Path) -> None:
    sections = documented(tmp_path, capfd, f"class In(BaseModel):\n    field: str = {field}\nTakes.input_schema = In")
    assert sections[7].strip() == "None can be made up from the schema."
    assert "| `field` | string | Yes |  |  |" in sections[3]


def test_a_modules_own_examples_are_shown_as_json_where_they_are_valid(capfd: Capture, tmp_path: Path) -> None:
    source = """
        Takes.examples = [
            ModuleExample("now", {"day": date(2026, 2, 3)}, {"price": Decimal("1.5")}),
            ModuleExample("never", {"day": 7}),
            {"inputs": {"day": "2026-02-04"}},
        ]
        """
    sections = documented(tmp_path, capfd, source)
    assert check_examples(sections, "takes") == [{"day": "2026-02-03"}, {"day": "2026-02-04"}]


def test_files_that_a_tool_returns_are_told(capfd: Capture, tmp_path: Path) -> None:
    source = """
        class Output(BaseModel):
            chart: str = Field(json_schema_extra={"contentEncoding": "base64", "contentMediaType": "image/png"})
            key: str = Field(json_schema_extra={"x-sensitive": True})
        Takes.output_schema = Output
        """
    sections = documented(tmp_path, capfd, source)
    assert "`chart` comes as content of type `image/png`." in sections[4]
    assert "sensitive values" in sections[8]


def test_a_document_is_printed_whatever_the_terminal_can_say(extensions: Path) -> None:
    text = SAYS.format(tag="calm").replace('"Say it"', '"1 → 2 ≠ 3"; documentation = "\\ud800"')
    (extensions / "hand" / "write.py").write_text(text, encoding="utf-8")
    options: Any = {"env": {**os.environ, "PYTHONIOENCODING": "ascii"}, "encoding": "utf-8", "cwd": extensions.parent}
    directory = f"./{extensions.name}"  # which counts from where the command is run
    ended = run("--extensions-dir", directory, "--export", "markdown", **options)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("# Tools of apcore-mcp\n")
    assert "1 → 2 ≠ 3" in ended.stdout
