"""A streaming tool: counts the words of a text paragraph by paragraph, and says so after each."""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from apcore import Context, ModuleAnnotations, ModuleExample
from pydantic import BaseModel, ConfigDict, Field


class FrequencyInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str = Field(max_length=100_000, description="Text whose paragraphs are separated by empty lines.")


class FrequencyOutput(BaseModel):
    paragraphs: int = Field(description="How many paragraphs have been read.")
    words: dict[str, int] = Field(description="How often each word occurs, in lower case.")


class WordFrequency:
    """Counts every word; a client that asks for progress gets each paragraph's counts as they come."""

    input_schema = FrequencyInput
    output_schema = FrequencyOutput
    name = "Word frequency"
    description = "Count how often every word of a text occurs, reporting after each paragraph."
    tags = ["text"]
    annotations = ModuleAnnotations(readonly=True, idempotent=True, streaming=True, open_world=False)
    examples = [
        ModuleExample(
            title="Two paragraphs",
            inputs={"text": "a rose is\n\na rose"},
            output={"paragraphs": 2, "words": {"a": 2, "rose": 2, "is": 1}},
        )
    ]

    async def stream(self, inputs: dict[str, Any], context: Context[Any]) -> AsyncIterator[dict[str, Any]]:
        counts: Counter[str] = Counter()
        if not inputs["text"].strip():
            yield {"paragraphs": 0, "words": {}}
        for number, paragraph in enumerate(filter(str.strip, inputs["text"].split("\n\n")), 1):
            words = paragraph.lower().split()
            counts.update(words)
            # Chunks are merged: what a chunk names replaces what an earlier one said.
            yield {"paragraphs": number, "words": {word: counts[word] for word in words}}

    async def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        result: dict[str, Any] = {"paragraphs": 0, "words": {}}
        async for chunk in self.stream(inputs, context):
            result = {"paragraphs": chunk["paragraphs"], "words": {**result["words"], **chunk["words"]}}
        return result
