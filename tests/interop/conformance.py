"""The tools that the official conformance suite asks for, as apcore modules. Run with the port to listen on."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from pathlib import Path
from typing import Any

from apcore import ModuleAnnotations, Registry
from apcore.approval import ApprovalResult
from apcore.errors import ApprovalDeniedError

from apcore_mcp import elicit, report_progress, serve
from apcore_mcp.approval import NOBODY
from apcore_mcp.call import call_of
from apcore_mcp.client import Client, Way

ANYTHING: dict[str, Any] = {"type": "object", "properties": {}}
NAME = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4z8AAAAMBAQDJ/pLvAAAAAElFTkSuQmCC")
MEDIA = {"picture": "image/png", "sound": "audio/wav", "document": "text/plain"}
WAVE = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x40\x1f\0\0\1\0\x08\0data\0\0\0\0"

DEFAULTS = {
    "name": {"type": "string", "default": "John Doe"},
    "age": {"type": "integer", "default": 30},
    "score": {"type": "number", "default": 95.5},
    "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    "verified": {"type": "boolean", "default": True},
}
TITLED = [{"const": f"value{n}", "title": f"Option {n}"} for n in (1, 2, 3)]
CHOICES = {
    "untitledSingle": {"type": "string", "enum": ["option1", "option2", "option3"]},
    "titledSingle": {"type": "string", "oneOf": TITLED},
    "legacyEnum": {"type": "string", "enum": ["opt1", "opt2"], "enumNames": ["Option 1", "Option 2"]},
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": ["option1", "option2"]}},
    "titledMulti": {"type": "array", "items": {"anyOf": TITLED}},
}
ADDRESS = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {"address": {"type": "object", "properties": {"street": {"type": "string"}, "city": {"type": "string"}}}},
    "properties": {"name": {"type": "string"}, "address": {"$ref": "#/$defs/address"}},
    "allOf": [{"anyOf": [{"required": ["name"]}, {"required": ["address"]}]}],
    "if": {"required": ["address"]},
    "then": {"required": ["name"]},
    "else": {"maxProperties": 1},
    "additionalProperties": False,
}
YES = {"type": "object", "properties": {"confirm": {"type": "boolean"}, "name": {"type": "string"}}}
TASK_AFTER = 0.5  # seconds
REGION = {"type": "object", "properties": {"region": {"type": "string", "x-mcp-header": "Region"}}}


FILES = {"picture": PIXEL, "sound": WAVE, "document": b"This is an embedded resource."}


class Module:
    """A module that asks the questions in `asks`, each with its schema and key, and returns the `files`."""

    def __init__(self, *files: str, asks: dict[str, dict[str, Any]] | None = None, **attributes: Any) -> None:
        fields = {n: {"type": "string", "contentEncoding": "base64", "contentMediaType": MEDIA[n]} for n in files}
        self.input_schema, self.output_schema = ANYTHING, {"type": "object", "properties": fields}
        self.description = "A tool of the conformance suite"
        self.documentation = "This is the content of the static text resource."
        self._files, self._asks = files, asks or {}
        vars(self).update(attributes)

    async def execute(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        answers = {key: await elicit(context, f"Your {key}?", schema, key=key) for key, schema in self._asks.items()}
        return {"answers": answers, **{name: base64.b64encode(FILES[name]).decode() for name in self._files}}


async def progress(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    for done in (0, 50, 100):
        await report_progress(context, done, total=100)
    return {}


LONG = ModuleAnnotations(extra={"mcp_async": True})


def long(execute: Any) -> Module:
    """A module that is marked as long, so that its calls are tasks where the client knows them."""
    return Module(execute=execute, annotations=LONG)


async def greet(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"text": f"Hello, {inputs['name']}!"}


def as_text(value: Any) -> str:
    """A result's text: JSON, but for what is no more than a text."""
    return str(value["text"]) if value.keys() == {"text"} else json.dumps(value)


async def compute(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    await asyncio.sleep(inputs["seconds"])
    return {"label": inputs["label"]}


async def confirm(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"answer": await elicit(context, "Delete it?", YES)}


async def ask_twice(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    return {"answers": await asyncio.gather(*(elicit(context, f"Number {n}?", YES) for n in (1, 2)))}


async def ask_and_work(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    name = await elicit(context, "Who are you?", NAME, key="user_name")
    await asyncio.sleep(2 * TASK_AFTER)
    return {"name": name}


async def fail_late(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    await asyncio.sleep(1)
    raise ValueError("This tool intentionally returns an error for testing")


async def break_protocol(inputs: dict[str, Any], context: Any) -> Any:
    """Fails as the call of what needs approval does for a client that cannot be asked; the suite's can."""
    call = call_of(context)
    assert call is not None
    call.conversation.attach(Client(way=Way.UNDECLARED))
    raise ApprovalDeniedError(ApprovalResult("rejected", reason=NOBODY))


async def fail(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
    raise ValueError("This tool intentionally returns an error for testing")


def modules() -> Registry:
    registry = Registry()

    async def change_tools(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        if not registry.unregister("test_more"):
            registry.register("test_more", Module())
        return {}

    tools: dict[str, Module] = {
        "test_simple_text": Module(),
        "test_image_content": Module("picture"),
        "test_audio_content": Module("sound"),
        "test_embedded_resource": Module("document"),
        "test_multiple_content_types": Module("picture", "document"),
        "test_tool_with_progress": Module(execute=progress),
        "test_error_handling": Module(execute=fail),
        "test_trigger_tool_change": Module(execute=change_tools),
        "test_custom_header": Module(input_schema=REGION),
        "test_elicitation": Module(asks={"user": NAME}),
        "test_streaming_elicitation": Module(asks={"user": NAME}),
        "test_elicitation_sep1034_defaults": Module(asks={"user": {"type": "object", "properties": DEFAULTS}}),
        "test_elicitation_sep1330_enums": Module(asks={"user": {"type": "object", "properties": CHOICES}}),
        "json_schema_2020_12_tool": Module(input_schema=ADDRESS),
        "test_input_required_result_elicitation": Module(asks={"user_name": NAME}),
        "test_input_required_result_request_state": Module(asks={"confirm": NAME}),
        "test_input_required_result_tampered_state": Module(asks={"confirm": NAME}),
        "test_input_required_result_multi_round": Module(asks={"first": NAME, "second": NAME}),
        "greet": Module(execute=greet),
        "slow_compute": long(compute),
        "failing_job": long(fail_late),
        "protocol_error_job": long(break_protocol),
        "confirm_delete": long(confirm),
        "multi_input": long(ask_twice),
        "test_tool_with_task": Module(execute=ask_and_work),
    }
    for name, module in tools.items():
        registry.register(name, module)
    return registry


if __name__ == "__main__":
    options: dict[str, Any] = {"port": int(sys.argv[1]), "log_level": "ERROR", "output_formatter": as_text}
    options["skills"] = Path(__file__).parents[2] / "examples" / "skills"
    serve(modules(), transport="streamable-http", task_after=TASK_AFTER, **options)
