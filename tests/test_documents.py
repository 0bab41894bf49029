"""`--export markdown` (design "Command line"; tool document specification, section 3): eight sections for each tool."""

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

MODULE = """
from pydantic import BaseModel, Field
from typing import Literal
from datetime import date
from uuid import UUID

class Inner(BaseModel):
    size: int = Field(ge=1)
    ratio: float = Field(gt=0, le=0.5)
    more: int = 0

class Input(BaseModel):
    text: str = Field(description="A | B\\nC")
    kind: Literal["small", "large"]
    day: date
    id: UUID
    inner: Inner
    several: list[Inner]
    either: int | str
    maybe: str | None
    flag: bool
    code: str = Field(pattern="^[A-Z]{3}$", examples=["no", "EUR"])
    secret: str = Field(json_schema_extra={"x-sensitive": True})

class Everything:
    input_schema = Input
    output_schema = Inner
    description = "Takes one of everything."

    def execute(self, inputs, context):
        return {"size": 1, "ratio": 0.5}
"""


def exported(directory: object, capfd: Capture) -> dict[str, dict[str, str]]:
    """The document as section texts by module id."""
    assert main(["--extensions-dir", str(directory), "--export", "markdown", "--name", "house"]) == 0
    title, *tools = re.split(r"^## ", capfd.readouterr().out, flags=re.M)
    assert title.strip() == "# Tools of house"
    documents = {}
    for tool in tools:
        _, *parts = re.split(r"^### (.+)$", tool, flags=re.M)
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


def test_every_example_module_has_a_document_whose_examples_are_valid_calls(capfd: Capture) -> None:
    documents = exported(EXTENSIONS, capfd)
    assert {"trash.empty", "text.slugify", "finance.loan_schedule"} <= documents.keys()
    for module_id, sections in documents.items():
        check_examples(sections, module_id)
    trash = documents["trash.empty"]
    assert "`APPROVAL_DENIED`" in trash[SECTIONS[4]]
    assert "A person has to approve each call." in trash[SECTIONS[7]]
    assert "may destroy data" in trash[SECTIONS[7]]
    assert "Not idempotent" in trash[SECTIONS[5]]
    assert "sensitive values" in documents["security.password_strength"][SECTIONS[7]]
    assert "Idempotent: to repeat it changes nothing." in documents["text.analyze"][SECTIONS[5]]


def test_an_example_is_made_of_plain_values_when_the_module_has_none(capfd: Capture, tmp_path: Any) -> None:
    (tmp_path / "takes.py").write_text(MODULE)
    (sections,) = exported(tmp_path, capfd).values()
    check_examples(sections, "takes")
    (call,) = blocks(sections[SECTIONS[6]])
    assert call["params"]["arguments"] == {
        "text": "text", "kind": "small", "day": "2025-01-31", "id": "123e4567-e89b-12d3-a456-426614174000",
        "inner": {"size": 1, "ratio": 0.5}, "several": [], "either": 1, "maybe": "text", "flag": True,
        "code": "EUR", "secret": "text",
    }  # fmt: skip
    for row in (
        '| `text` | string | Yes | A \\| B C | `"text"` |',
        "| `either` | integer or string | Yes |",
        "| `maybe` | string or null | Yes |",
        '| `code` | string | Yes |  | `"EUR"` |',
        "| `several` | array | Yes |  | `[]` |",
    ):
        assert row in sections[SECTIONS[2]]
    assert "| `more` | integer | No |  | `0` |" in sections[SECTIONS[3]]
    registry = discover(tmp_path)
    assert blocks(sections[SECTIONS[2]]) == [tool["function"]["parameters"] for tool in to_openai_tools(registry)]


def documented(tmp_path: Any, capfd: pytest.CaptureFixture[str], source: str) -> dict[str, str]:
    """The document of the one module that `source` defines."""
    (tmp_path / "takes.py").write_text(f"{IMPORTS}\n{textwrap.dedent(source)}")
    (sections,) = exported(tmp_path, capfd).values()
    return sections


IMPORTS = """
from datetime import date
from decimal import Decimal
from typing import Any
from apcore import ModuleExample
from pydantic import BaseModel, ConfigDict, Field

class Empty(BaseModel):
    pass

class Open(BaseModel):
    model_config = ConfigDict(extra="allow")

class Takes:
    input_schema = output_schema = Empty
    description = "Takes it."

    def execute(self, inputs, context):
        return {}
"""


@pytest.mark.parametrize(
    ("documentation", "told"),
    [
        pytest.param("Takes it.", "Takes it.", id="nothing-more"),
        pytest.param("Takes\n  it.\n\nAnd more.", "Takes it.\n\nAnd more.", id="a-paragraph"),
        pytest.param("Takes it. And more.", "Takes it.\n\nAnd more.", id="a-sentence"),
        pytest.param("Takes it.all", "Takes it.\n\nTakes it.all", id="another-word"),
        pytest.param("More", "Takes it.\n\nMore", id="something-else"),
        pytest.param("# A\n\n## C", "Takes it.\n\n#### A\n\n##### C", id="headings"),
    ],
)
def test_the_purpose_is_told_once(documentation: str, told: str, capfd: Capture, tmp_path: Any) -> None:
    sections = documented(tmp_path, capfd, f"Takes.documentation = {documentation!r}")
    assert sections[SECTIONS[0]].strip() == told


@pytest.mark.parametrize("schema", ["Empty", "Open"])
def test_of_a_schema_that_names_no_property_only_its_json_tells_whether_it_takes_any(
    schema: str, capfd: Capture, tmp_path: Any
) -> None:
    sections = documented(tmp_path, capfd, f"Takes.input_schema = {schema}")
    assert [row[:8] for row in re.findall(r"^\|.*", sections[SECTIONS[2]], re.M)] == ["| Name |", "| --- | "]
    assert ('"additionalProperties": true' in sections[SECTIONS[2]]) == (schema == "Open")


@pytest.mark.parametrize(
    "field", ["Field(pattern='^[A-Z]{3}$')", "Field(min_length=10 ** 13)", "Field(json_schema_extra={'not': {}})"]
)
def test_an_example_is_valid_or_there_is_none(field: str, capfd: Capture, tmp_path: Any) -> None:
    sections = documented(tmp_path, capfd, f"class In(BaseModel):\n    field: str = {field}\nTakes.input_schema = In")
    assert blocks(sections[SECTIONS[6]]) == []
    assert "| `field` | string | Yes |  |  |" in sections[SECTIONS[2]]


def test_a_modules_own_examples_are_shown_as_json_where_they_are_valid(capfd: Capture, tmp_path: Any) -> None:
    source = """
        class Input(BaseModel):
            day: date
        Takes.input_schema = Input
        Takes.examples = [
            ModuleExample("now", {"day": date(2026, 2, 3)}, {"price": Decimal("1.5"), "thing": object()}),
            ModuleExample("never", {"day": 7}),
            {"inputs": {"day": "2026-02-04"}},
        ]
        """
    sections = documented(tmp_path, capfd, source)
    days = [call["params"]["arguments"] for call in blocks(sections[SECTIONS[6]])]
    assert days == [{"day": "2026-02-03"}, {"day": "2026-02-04"}]


def test_files_that_a_tool_returns_are_told(capfd: Capture, tmp_path: Any) -> None:
    """Beside them no output schema is promised, which is no reason to be silent."""
    source = """
        class Output(BaseModel):
            chart: str = Field(json_schema_extra={"contentEncoding": "base64", "contentMediaType": "image/png"})
        Takes.output_schema = Output
        """
    sections = documented(tmp_path, capfd, source)
    assert "`chart` comes as content of type `image/png`." in sections[SECTIONS[3]]


def test_a_document_is_printed_whatever_the_terminal_can_say(extensions: Path) -> None:
    text = SAYS.format(tag="calm").replace('"Say it"', '"1 → 2 ≠ 3"; documentation = "\\ud800"')
    (extensions / "hand" / "write.py").write_text(text, encoding="utf-8")
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    directory = f"./{extensions.name}"  # which counts from where the command is run
    arguments = ("--extensions-dir", directory, "--export", "markdown")
    ended = run(*arguments, env=environment, encoding="utf-8", cwd=extensions.parent)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("# Tools of apcore-mcp\n")
    assert "1 → 2 ≠ 3" in ended.stdout
