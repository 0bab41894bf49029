"""`--export markdown` (design "Command line"; tool document specification, section 3): eight sections for each tool."""

from __future__ import annotations

import json
import re
import textwrap
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


def exported(directory: object, capfd: pytest.CaptureFixture[str]) -> dict[str, dict[str, str]]:
    """The document as section texts by module id."""
    assert main(["--extensions-dir", str(directory), "--export", "markdown", "--name", "house"]) == 0
    title, *tools = re.split(r"^## ", capfd.readouterr().out, flags=re.MULTILINE)
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
    capfd: pytest.CaptureFixture[str],
) -> None:
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


def test_an_example_is_made_up_from_the_schema_when_the_module_has_none(
    capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    (tmp_path / "takes.py").write_text(MODULE)
    (sections,) = exported(tmp_path, capfd).values()
    check_examples(sections, "takes")
    assert '| `text` | string | Yes | A \\| B C | `"textxxxxx"` |' in sections[SECTIONS[2]]
    assert "| `either` | integer or string | Yes |" in sections[SECTIONS[2]]
    assert "| `maybe` | string or null | Yes |" in sections[SECTIONS[2]]


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
def test_the_purpose_is_told_once(
    documentation: str, told: str, capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    sections = documented(tmp_path, capfd, f"Takes.documentation = {documentation!r}")
    assert sections[SECTIONS[0]].strip() == told


@pytest.mark.parametrize("schema", ["Empty", "Open"])
def test_of_a_schema_that_names_no_property_only_its_json_tells_whether_it_takes_any(
    schema: str, capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    sections = documented(tmp_path, capfd, f"Takes.input_schema = Takes.output_schema = {schema}")
    for section in SECTIONS[2:4]:
        rows = re.findall(r"^\|.*", sections[section], flags=re.MULTILINE)
        assert [row[:8] for row in rows] == ["| Name |", "| --- | "]
    assert ('"additionalProperties": true' in sections[SECTIONS[2]]) == (schema == "Open")


# A field, and whether there is an example of it.
FIELDS = {
    "Field(pattern='^[A-Z]{3}-[0-9]{4}$')": False,
    "Field(pattern='^[A-Z]{3}$', examples=['no', 'EUR'])": True,
    "Field(pattern='^[a-z]+$', min_length=6)": True,
    "Field(json_schema_extra={'type': 'number', 'exclusiveMinimum': 0, 'exclusiveMaximum': 1})": True,
    "Field(json_schema_extra={'type': 'integer', 'maximum': -5, 'multipleOf': 5})": True,
    "Field(json_schema_extra={'type': 'string', 'minLength': 10 ** 13})": False,
    "Field(json_schema_extra={'type': 'array', 'minItems': 10 ** 13})": False,
    "Field(json_schema_extra={'not': {}})": False,
}


@pytest.mark.parametrize("field", FIELDS)
def test_an_example_is_valid_or_there_is_none(field: str, capfd: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    kind = "str" if "pattern" in field else "Any"
    source = f"class Input(BaseModel):\n    field: {kind} = {field}\nTakes.input_schema = Input"
    sections = documented(tmp_path, capfd, source)
    if FIELDS[field]:
        check_examples(sections, "takes")
    else:
        assert blocks(sections[SECTIONS[6]]) == []
    assert ("`" in sections[SECTIONS[2]].splitlines()[4].split("|")[5]) == FIELDS[field]


def test_a_modules_own_examples_are_shown_as_json_where_they_are_valid(
    capfd: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    sections = documented(
        tmp_path,
        capfd,
        """
        class Input(BaseModel):
            day: date
        Takes.input_schema = Input
        Takes.examples = [
            ModuleExample("now", {"day": date(2026, 2, 3)}, {"price": Decimal("1.5"), "thing": object()}),
            ModuleExample("never", {"day": 7}),
            {"inputs": {"day": "2026-02-04"}},
        ]
        """,
    )
    days = [call["params"]["arguments"] for call in blocks(sections[SECTIONS[6]])]
    assert days == [{"day": "2026-02-03"}, {"day": "2026-02-04"}]


def test_files_that_a_tool_returns_are_told(capfd: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    """Beside them no output schema is promised, which is no reason to be silent."""
    sections = documented(
        tmp_path,
        capfd,
        """
        class Output(BaseModel):
            chart: str = Field(json_schema_extra={"contentEncoding": "base64", "contentMediaType": "image/png"})
        Takes.output_schema = Output
        """,
    )
    assert "`chart` comes as content of type `image/png`." in sections[SECTIONS[3]]


def test_the_printed_schema_is_the_advertised_one(capfd: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    from apcore import Registry

    (tmp_path / "takes.py").write_text(MODULE)
    (sections,) = exported(tmp_path, capfd).values()
    registry = Registry(extensions_dir=str(tmp_path))
    registry.discover()
    assert blocks(sections[SECTIONS[2]]) == [tool["function"]["parameters"] for tool in to_openai_tools(registry)]
