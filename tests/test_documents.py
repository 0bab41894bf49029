"""`--export markdown` (design "Command line"; tool document specification, section 3): eight sections for each tool."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from conftest import EXTENSIONS
from jsonschema import Draft202012Validator

from apcore_mcp import to_openai_tools
from apcore_mcp.__main__ import main

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

MODULE = """
from pydantic import BaseModel, Field
from typing import Literal
from datetime import date
from uuid import UUID

class Inner(BaseModel):
    size: int = Field(ge=3, multiple_of=4)
    ratio: float = Field(gt=0, le=0.5)

class Input(BaseModel):
    text: str = Field(min_length=9, max_length=12, description="A | B\\nC")
    kind: Literal["small", "large"]
    day: date
    id: UUID
    inner: Inner
    several: list[Inner] = Field(min_length=2)
    either: int | str
    maybe: str | None
    flag: bool
    secret: str = Field(json_schema_extra={"x-sensitive": True})

class Output(BaseModel):
    done: bool

class Everything:
    input_schema = Input
    output_schema = Output
    description = "Takes one of everything."

    def execute(self, inputs, context):
        return {"done": True}
"""


def exported(directory: object, capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """The document as section texts by module id."""
    assert main(["--extensions-dir", str(directory), "--export", "markdown", "--name", "house"]) == 0
    title, *tools = re.split(r"^## ", capsys.readouterr().out, flags=re.MULTILINE)
    assert title.strip() == "# Tools of house"
    documents = {}
    for tool in tools:
        _, *parts = re.split(r"^### (.+)$", tool, flags=re.MULTILINE)
        assert parts[::2] == SECTIONS
        sections = dict(zip(SECTIONS, parts[1::2], strict=True))
        documents[re.search(r"`([^`]+)`", sections[SECTIONS[1]])[1]] = sections  # type: ignore[index]
    return documents


def blocks(section: str) -> list[Any]:
    return [json.loads(block) for block in re.findall(r"```json\n(.+?)\n```", section, flags=re.DOTALL)]


def check_examples(sections: dict[str, str], module_id: str) -> None:
    """Every example is a whole MCP call whose arguments the printed schema accepts."""
    (schema,) = blocks(sections[SECTIONS[2]])
    examples = blocks(sections[SECTIONS[6]])
    assert examples
    for call in examples:
        assert (call["jsonrpc"], call["method"], call["params"]["name"]) == ("2.0", "tools/call", module_id)
        Draft202012Validator(schema).validate(call["params"]["arguments"])


def test_every_example_module_has_a_document_whose_examples_are_valid_calls(
    capsys: pytest.CaptureFixture[str],
) -> None:
    documents = exported(EXTENSIONS, capsys)
    assert {"trash.empty", "text.slugify", "finance.loan_schedule"} <= documents.keys()
    for module_id, sections in documents.items():
        check_examples(sections, module_id)
    trash = documents["trash.empty"]
    assert "`APPROVAL_DENIED`" in trash[SECTIONS[4]]
    assert "A person has to approve each call." in trash[SECTIONS[7]]
    assert "may destroy data" in trash[SECTIONS[7]]
    assert "Not idempotent" in trash[SECTIONS[5]]
    assert "sensitive values" in documents["security.password_strength"][SECTIONS[7]]
    assert "Idempotent: it only reads." in documents["text.analyze"][SECTIONS[5]]


def test_an_example_is_made_up_from_the_schema_when_the_module_has_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    (tmp_path / "takes.py").write_text(MODULE)
    (sections,) = exported(tmp_path, capsys).values()
    check_examples(sections, "takes")
    assert '| `text` | string | Yes | A \\| B C | `"textxxxxx"` |' in sections[SECTIONS[2]]
    assert "| `either` | integer or string | Yes |" in sections[SECTIONS[2]]
    assert "| `maybe` | string or null | Yes |" in sections[SECTIONS[2]]


def test_the_printed_schema_is_the_advertised_one(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    from apcore import Registry

    (tmp_path / "takes.py").write_text(MODULE)
    (sections,) = exported(tmp_path, capsys).values()
    registry = Registry(extensions_dir=str(tmp_path))
    registry.discover()
    assert blocks(sections[SECTIONS[2]]) == [tool["function"]["parameters"] for tool in to_openai_tools(registry)]
