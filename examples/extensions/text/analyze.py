"""Count the words of a text and estimate how long it takes to read."""

import re
from collections import Counter
from typing import Any

from apcore import Context, ModuleAnnotations, ModuleExample
from pydantic import BaseModel, ConfigDict, Field


class AnalyzeInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    text: str = Field(max_length=200_000, description="The text to measure, in any language that separates words.")
    words_per_minute: int = Field(default=230, ge=50, le=1000, description="Reading speed for the time estimate.")
    top: int = Field(default=3, ge=0, le=50, description="How many of the most frequent words to list.")


class WordCount(BaseModel):
    word: str = Field(description="The word in lower case.")
    count: int = Field(description="How often it occurs.")


class AnalyzeOutput(BaseModel):
    characters: int = Field(description="Length of the text, spaces included.")
    words: int = Field(description="Number of words.")
    sentences: int = Field(description="Number of sentences, told by their closing punctuation.")
    reading_seconds: int = Field(description="Estimated reading time in seconds.")
    most_frequent: list[WordCount] = Field(description="The most frequent words, most frequent first.")


class AnalyzeText:
    name = "Analyze text"
    description = "Count characters, words and sentences of a text, estimate its reading time, list its frequent words."
    tags = ["text", "statistics"]
    annotations = ModuleAnnotations(readonly=True, idempotent=True, open_world=False)
    input_schema = AnalyzeInput
    output_schema = AnalyzeOutput
    examples = [
        ModuleExample(
            title="Two sentences",
            inputs={"text": "The cat sat. The dog did not!", "top": 1},
            output={
                "characters": 29,
                "words": 7,
                "sentences": 2,
                "reading_seconds": 2,
                "most_frequent": [{"word": "the", "count": 2}],
            },
        )
    ]

    def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        args = AnalyzeInput.model_validate(inputs)
        words = re.findall(r"\w+(?:['\u2019-]\w+)*", args.text.lower())
        sentences = [part for part in re.split(r"[.!?…]+(?:\s|$)", args.text) if part.strip()]
        return AnalyzeOutput(
            characters=len(args.text),
            words=len(words),
            sentences=len(sentences),
            reading_seconds=round(len(words) * 60 / args.words_per_minute),
            most_frequent=[WordCount(word=word, count=n) for word, n in Counter(words).most_common(args.top)],
        ).model_dump()
