"""Files out of modules: image, audio and other content (design: Media). Real server and client."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from conftest import FunctionalModule, connect
from pydantic import BaseModel, Field

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
AWKWARD = bytes(range(248, 256))  # in base64 its text differs between the alphabet of URLs and the standard one


def base64_of(media_type: str, **more: Any) -> dict[str, Any]:
    return {"type": "string", "contentEncoding": "base64", "contentMediaType": media_type, **more}


def drawing(output: Any, properties: dict[str, Any], **schema: Any) -> FunctionalModule:
    described = {"type": "object", "properties": properties, **schema}
    return FunctionalModule(lambda inputs, context: output, output_schema=described)


async def test_an_image_of_a_pydantic_model_arrives_as_image_content(mode: str) -> None:
    media = {"contentEncoding": "base64", "contentMediaType": "image/png"}

    class Chart(BaseModel):
        points: int
        chart: bytes = Field(json_schema_extra=media)
        legend: bytes | None = Field(None, json_schema_extra=media)

    module = FunctionalModule(lambda inputs, context: {"points": 3, "chart": PNG}, output_schema=Chart)
    async with connect({"draw.chart": module}, mode=mode) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("draw.chart", {})
    assert not result.is_error
    text, image = result.content
    assert json.loads(text.text) == {"points": 3}
    assert (image.type, image.mime_type, base64.b64decode(image.data)) == ("image", "image/png", PNG)
    assert (tool.output_schema, result.structured_content) == (None, None), "Codex would show its model that instead"


@pytest.mark.parametrize(
    ("media_type", "kind"),
    [("image/svg+xml", "image"), ("audio/wav", "audio"), ("application/pdf", "resource"), ("text/csv", "resource")],
)
async def test_the_media_type_decides_on_the_kind_of_content(media_type: str, kind: str) -> None:
    data = base64.b64encode(AWKWARD).decode()
    module = drawing({"file": data, "n": 1}, {"file": base64_of(media_type), "n": {"type": "integer"}})
    async with connect({"make.file": module}) as client:
        content = (await client.call_tool("make.file", {})).content
    assert [part.type for part in content] == ["text", kind]
    if kind == "resource":
        resource = content[1].resource
        assert (resource.uri, resource.mime_type, resource.blob) == ("media://make.file/file", media_type, data)
    else:
        assert (content[1].mime_type, content[1].data) == (media_type, data)


async def test_urlsafe_base64_and_bytes_are_sent_in_the_standard_alphabet() -> None:
    class Both(BaseModel):
        raw: bytes = Field(json_schema_extra={"contentEncoding": "base64", "contentMediaType": "image/png"})
        encoded: str = Field(json_schema_extra={"contentEncoding": "base64", "contentMediaType": "image/png"})

    output = {"raw": AWKWARD, "encoded": base64.urlsafe_b64encode(AWKWARD).decode()}
    module = FunctionalModule(lambda inputs, context: output, output_schema=Both)
    async with connect({"t.both": module}) as client:
        result = await client.call_tool("t.both", {})
    assert [part.data for part in result.content[1:]] == [base64.b64encode(AWKWARD).decode()] * 2


@pytest.mark.parametrize(
    ("output", "parts"),
    [
        pytest.param({"n": 1}, 0, id="left-out"),
        pytest.param({"n": 1, "file": None}, 0, id="null"),
        pytest.param({"n": 1, "file": ""}, 0, id="empty"),
        pytest.param({"n": 1, "file": "AAAA"}, 1, id="there"),
    ],
)
async def test_a_file_may_be_missing(output: dict[str, Any], parts: int) -> None:
    optional = {"anyOf": [base64_of("image/png"), {"type": "null"}]}
    module = drawing(output, {"file": optional, "n": {"type": "integer"}}, required=["n"])
    async with connect({"t.maybe": module}) as client:
        result = await client.call_tool("t.maybe", {})
    assert len(result.content) == 1 + parts
    assert json.loads(result.content[0].text) == {"n": 1}


async def test_a_tool_with_a_file_promises_nothing_so_that_no_client_shows_the_rest_instead_of_it(mode: str) -> None:
    """Codex shows its model the structured content of a result instead of its content, pictures included."""
    properties = {"file": base64_of("image/png"), "n": {"type": "integer"}}
    module = drawing({"file": "AAAA", "n": 1}, properties, required=["file", "n"], additionalProperties=False)
    async with connect({"t.closed": module}, mode=mode) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("t.closed", {})
    assert (tool.output_schema, result.structured_content) == (None, None)
    assert [part.type for part in result.content] == ["text", "image"]
    assert json.loads(result.content[0].text) == {"n": 1}


async def test_a_file_of_one_variant_is_a_file() -> None:
    picture = {"type": "object", "properties": {"file": base64_of("image/png")}, "required": ["file"]}
    nothing = {"type": "object", "properties": {"reason": {"type": "string"}}, "required": ["reason"]}
    module = FunctionalModule(lambda inputs, context: {"file": "AAAA"}, output_schema={"anyOf": [picture, nothing]})
    async with connect({"t.either": module}) as client:
        result = await client.call_tool("t.either", {})
    assert [part.type for part in result.content] == ["text", "image"]
    assert result.content[0].text == "{}"


async def test_what_is_no_base64_is_an_error_not_a_broken_image() -> None:
    module = drawing({"file": "data:image/png;base64,AAAA"}, {"file": base64_of("image/png")})
    async with connect({"t.broken": module}) as client:
        result = await client.call_tool("t.broken", {})
    assert result.is_error
    assert [part.text for part in result.content] == ["Failed to serialize module output"]


@pytest.mark.parametrize("redact_output", [True, False])
@pytest.mark.parametrize("beside", [False, True], ids=["marked-itself", "marked-beside"])
async def test_a_sensitive_file_is_redacted_like_any_field(redact_output: bool, beside: bool) -> None:
    mark = {"x-sensitive": True}
    if beside:
        module = drawing({"face": "AAAA"}, {"face": base64_of("image/png")}, allOf=[{"properties": {"face": mark}}])
    else:
        module = drawing({"face": "AAAA"}, {"face": base64_of("image/png", **mark)})
    async with connect({"t.secret": module}, redact_output=redact_output) as client:
        result = await client.call_tool("t.secret", {})
    assert [part.type for part in result.content] == (["text"] if redact_output else ["text", "image"])
    assert json.loads(result.content[0].text) == ({"face": "***REDACTED***"} if redact_output else {})


async def test_an_encoded_string_without_a_media_type_stays_text() -> None:
    module = drawing({"key": "AAAA"}, {"key": {"type": "string", "contentEncoding": "base64"}})
    async with connect({"t.key": module}) as client:
        result = await client.call_tool("t.key", {})
    assert result.structured_content == {"key": "AAAA"}


async def test_a_streaming_module_sends_its_file_with_the_result_and_not_with_progress(mode: str) -> None:
    class Painter(FunctionalModule):
        async def stream(self, inputs: dict[str, Any], context: Any) -> Any:
            yield {"strokes": 1}
            yield {"strokes": 2, "picture": "AAAA"}

    properties = {"picture": base64_of("image/png"), "strokes": {"type": "integer"}}
    module = Painter(lambda inputs, context: {}, output_schema={"type": "object", "properties": properties})
    module.annotations = {"streaming": True}
    told: list[str | None] = []

    async def progress(done: float, total: float | None, message: str | None) -> None:
        told.append(message)

    async with connect({"t.paint": module}, mode=mode) as client:
        result = await client.call_tool("t.paint", {}, progress_callback=progress)
    assert [part.type for part in result.content] == ["text", "image"]
    assert json.loads(result.content[0].text) == {"strokes": 2}
    assert told == ['{"strokes":1}', '{"strokes":2}']
