"""What `--export` and `--check` print: tools in, text out.

It plugs into the command line, which loads it for these two flags. Without this file they say that it is missing, and
everything else works.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from jsonschema import Draft202012Validator

from .core import SENTENCES, UNEXPECTED, Catalog, Tool, logger, portable_name
from .discovery import Folder
from .openai import openai_function
from .options import Options
from .schemas import JSONObject, JSONSchema, in_place, marks_sensitive

__all__ = ["print_tools"]

_NOTES = {  # on a tool's safety, by its annotations
    "readonly": "It only reads.",
    "destructive": "It may destroy data that cannot be brought back.",
    "requires_approval": "A person has to approve each call.",
    "open_world": "It reaches systems outside of this one.",
}
_SENSITIVE = "It handles sensitive values: no message or log shows them, and results show `***REDACTED***`."
_ELSEWHERE = "A client starts the server in a folder of its own and without the variables of this shell."


def _sample(schema: JSONSchema) -> Any:
    """A valid value: one of the schema's own, or the plainest of its type; None where neither is valid.

    `{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}` has `{"n": 1}`."""
    own: list[Any] = []
    plain: list[Any] = ["text", 1, 0.5, True, []]
    for part in in_place(schema):
        own += [*part.get("examples", []), *part.get("enum", []), part.get("const"), part.get("default")]
        properties = part.get("properties", {})
        plain.append({name: _sample(properties.get(name, {})) for name in part.get("required", [])})
        if "format" in part:
            plain[0] = None  # a text would have to be a date, or an address
    validator = Draft202012Validator(schema)
    with suppress(Exception):  # such as for a pattern that is none of Python's
        return next((value for value in own + plain if value is not None and validator.is_valid(value)), None)
    return None


def _fenced(value: Any) -> str:
    return f"```json\n{json.dumps(value, indent=2)}\n```"


def _type_of(schema: JSONSchema) -> str:
    """`{"anyOf": [{"type": "string"}, {"type": "null"}]}` is "string or null"."""
    types = [str(part["type"]) for part in in_place(schema) if "type" in part]
    return " or ".join(dict.fromkeys(types)) or "any"


def _fields(schema: JSONSchema) -> str:
    """A schema as a table of its properties, and as JSON."""
    rows = ["| Name | Type | Required | Description | Example |", "| --- | --- | --- | --- | --- |"]
    for name, field in schema.get("properties", {}).items():
        is_required = "Yes" if name in schema.get("required", []) else "No"
        sample = _sample(field)
        example = "" if sample is None else f"`{json.dumps(sample, ensure_ascii=False)}`"
        cells = [f"`{name}`", _type_of(field), is_required, field.get("description", ""), example]
        rows.append("| " + " | ".join(" ".join(cell.replace("|", r"\|").split()) for cell in cells) + " |")
    return "\n".join([*rows, "", _fenced(schema)])


def _returns(tool: Tool) -> str:
    parts = [_fields(tool.output_schema) if tool.output_schema else "Not declared."]
    parts += [f"`{name}` comes as content of type `{media_type}`." for name, media_type in tool.media.items()]
    return "\n\n".join(parts)


def _calls(tool: Tool) -> str:
    """Whole MCP calls: with the author's arguments, or with arguments made up from the schema."""
    inputs = [example["inputs"] for example in tool.examples] or [_sample(tool.input_schema)]
    if inputs == [None]:
        return "None can be made up from the schema."
    calls = []
    for arguments in inputs:
        params = {"name": tool.module_id, "arguments": arguments}
        calls.append(_fenced({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}))
    return "\n\n".join(calls)


def _document(tool: Tool) -> str:
    """One tool in the eight sections of the tool document specification."""
    about = tool.about
    documentation = re.sub(r"(?m)^(?=#{1,3} )", "###", tool.documentation)  # its headings go below ours
    names = f"`{tool.name}`, in portable form `{portable_name(tool.name)}`; module `{tool.module_id}`"
    errors = {"SCHEMA_VALIDATION_ERROR": "Input validation failed", **SENTENCES, "MODULE_EXECUTE_ERROR": UNEXPECTED}
    is_repeatable = about.annotations.readonly or about.annotations.idempotent
    notes = [note for flag, note in _NOTES.items() if getattr(about.annotations, flag)]
    if tool.marks or marks_sensitive(tool.input_schema):
        notes.append(_SENSITIVE)
    sections = {
        "Tool Purpose and Description": f"{about.description}\n\n{documentation}".strip(),
        "Invocation Name": f"{names}, version {tool.descriptor.version}",
        "Input Schema (Parameters)": _fields(tool.input_schema),
        "Output Schema (Return Value)": _returns(tool),
        "Error Handling": "\n".join(f"- `{code}`: {text}" for code, text in errors.items()),
        "Idempotency": "Idempotent: to repeat it changes nothing." if is_repeatable else "Not idempotent: each counts.",
        "Usage Examples (for MCP context)": _calls(tool),
        "Security Considerations": " ".join(notes) or "None known.",
    }
    document = f"## {about.title or tool.module_id}\n"
    for number, (title, text) in enumerate(sections.items(), 1):
        document += f"\n### {number}. {title}\n\n{text}\n"
    return document


def _client_entry(options: Options, arguments: Sequence[str], environment: Mapping[str, str]) -> JSONObject:
    """How a client reaches this server: where it listens, or how to start it with `arguments`."""
    if options.transport != "stdio":
        # A server that listens everywhere is at this machine's own address, too.
        url = options.url.replace("//0.0.0.0:", "//127.0.0.1:")
        return {"type": options.transport.removeprefix("streamable-"), "url": url}
    paths = [sys.path[0], *environment.get("PYTHONPATH", "").split(os.pathsep)]
    env = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(os.path.abspath(path) for path in paths if path))}
    return {"command": os.path.abspath(sys.executable), "args": ["-m", __package__, *arguments], "env": env}


def _tell_clients(name: str, entry: JSONObject) -> None:
    """Print on stderr the commands by which clients take an entry, and what it does not bring along."""
    print(f"code --add-mcp {shlex.quote(json.dumps({'name': name, **entry}))}", file=sys.stderr)
    print(f"claude mcp add-json {shlex.quote(name)} {shlex.quote(json.dumps(entry))}", file=sys.stderr)
    if "command" in entry:
        print(_ELSEWHERE, file=sys.stderr)


def _export(options: Options, form: str, arguments: Sequence[str], environment: Mapping[str, str]) -> str:
    """The tools in a form: as `tools/list` sends them, for OpenAI, as a document, or how a client starts them.

    A client starts them with `arguments`; `environment` is that of this process."""
    catalog = Catalog(options)
    tools = catalog.tools.values()
    if not tools:
        logger.warning("%s", catalog.why_empty())
    exported: Any
    if form == "markdown":
        return "\n".join([f"# Tools of {options.name}\n", *map(_document, tools)])
    if form == "client":
        entry = _client_entry(options, arguments, environment)
        _tell_clients(options.name, entry)
        exported = {"mcpServers": {options.name: entry}}
    elif form == "mcp":
        exported = [tool.definition(options.tool_names) for tool in tools]
    else:
        exported = [openai_function(tool, strict=form == "openai-strict") for tool in tools]
    return json.dumps(exported, indent=2)


def _check(options: Options, left_out: Sequence[str], warned: Sequence[str]) -> tuple[str, int]:
    """Each tool and skill that would be served and what is missing, with the exit status: 1 unless all is well.

    `left_out` and `warned` are what was said while the folder was loaded."""
    catalog = Catalog(options)
    names = [tool.name_as(options.tool_names) for tool in catalog.tools.values()]
    if not names:
        logger.warning("%s", catalog.why_empty())
    missing = len(left_out) + len(catalog.left_out)
    skill_uris: list[str] = []
    if options.skills is not None:
        from .skills import Skills

        skills = Skills(options.skills, dynamic=False)
        skill_uris = [*skills.skills()]
        missing += len(skills.left_out)
    warnings = len(warned) + len(catalog.warned)
    summary = f"{len(names)} {'tool' if len(names) == 1 else 'tools'} would be served, {missing} left out"
    if warnings:
        summary += f", {warnings} warned of"
    return "\n".join([*names, *skill_uris, summary]), 1 if missing or warnings or not names else 0


def print_tools(options: Options, folder: Folder, form: str, arguments: Sequence[str]) -> int:
    """Load the folder and print its tools in a form of `--export`, or what `--check` finds. Returns the exit status."""
    # From here on stderr gets what modules print, from Python and from C. UTF-8, whatever a terminal's encoding is.
    with open(os.dup(1), "w", encoding="utf-8", errors="backslashreplace") as stdout:
        os.dup2(2, 1)
        folder.discover()
        if form == "check":
            text, status = _check(options, folder.left_out, folder.warned)
        else:
            text, status = _export(options, form, arguments, os.environ), 0
        print(text, file=stdout)
    return status
