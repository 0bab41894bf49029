"""Claude Desktop, which cannot run here: the lines that it writes, as its own log shows them, to the real program."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from conftest import EXTENSIONS, RawClient, command
from pydantic_core import to_jsonable_python

from apcore_mcp import discover

# The opening follows its start, all at once; it asks for the tools twice, and for prompts whatever the server declares.
*OPENING, CALL = Path(__file__).with_name("claude_desktop.jsonl").read_text().splitlines()
NEWER = '{"extensions":{"io.modelcontextprotocol/ui":{"mimeTypes":["text/html;profile=mcp-app"]}}}'  # in 2026
LEGAL = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")  # it refuses the whole list for one other name


def opened(client: RawClient) -> dict[int, dict[str, Any]]:
    """Say what Claude Desktop says first. The answers by id."""
    client.send_line(OPENING[0].replace('"capabilities":{}', f'"capabilities":{NEWER}').encode())
    answers = [client.receive()]
    for line in OPENING[1:]:
        client.send_line(line.encode())
    answers += [client.receive() for _ in range(4)]
    return {answer["id"]: answer for answer in answers}


def call(client: RawClient, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    message = json.loads(CALL) | {"params": {"name": name, "arguments": arguments}, "id": name}
    client.send_line(json.dumps(message, separators=(",", ":")).encode())
    answer = client.receive()
    assert answer["id"] == name
    result: dict[str, Any] = answer["result"]
    return result


@pytest.mark.requirement("NFR-COMPAT-004")
def test_it_is_answered_as_it_expects() -> None:
    """And every tool can be called under either spelling."""
    registry = discover(str(EXTENSIONS))
    with RawClient(command()) as client:
        answers = opened(client)
        assert answers[0]["result"]["protocolVersion"] == "2025-06-18", "it closes the connection for any other"
        tools = answers[1]["result"]["tools"]
        assert answers[2]["result"]["tools"] == tools
        names = [tool["name"] for tool in tools]
        assert names == [module_id.replace(".", "-") for module_id in sorted(registry.list())]
        assert all(LEGAL.match(name) for name in names)
        assert answers[3]["result"]["resources"]
        assert answers[4]["error"]["code"] == -32601, "a server without prompts says so"
        client.send_line(CALL.encode())
        assert client.receive()["result"]["structuredContent"]["workdays"] == 8
        for module_id in registry.list():
            about = registry.get_definition(module_id)
            assert about is not None
            inputs = to_jsonable_python(about.examples[0].inputs) if about.examples else {"no such": "word"}
            result = call(client, module_id, inputs)
            runs = bool(about.examples) and not about.annotations.requires_approval
            assert result["isError"] is not runs, (module_id, result)
            assert call(client, module_id.replace(".", "-"), inputs)["content"] == result["content"]
        assert client.end()[0] == 0
