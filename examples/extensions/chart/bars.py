"""Show a bar chart: a tool with a page of its own, in which clients that can (MCP Apps) show its result."""

from pathlib import Path
from typing import Any

from apcore import Context, ModuleAnnotations, ModuleExample
from pydantic import BaseModel, ConfigDict, Field


class BarsInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    values: list[float] = Field(min_length=1, max_length=64, description="One bar each, from left to right.")
    labels: list[str] = Field(
        default_factory=list, max_length=64, description="What the bars stand for, in the same order."
    )


class Bar(BaseModel):
    label: str
    value: float


class BarsOutput(BaseModel):
    bars: list[Bar]
    bottom: float = Field(description="The value at the lower edge.")
    top: float = Field(description="The value at the upper edge.")


class Bars:
    name = "Bar chart"
    description = "Show numbers to the user as a bar chart, blue above zero and red below."
    tags = ["chart"]
    annotations = ModuleAnnotations(readonly=True, idempotent=True, open_world=False)
    input_schema = BarsInput
    output_schema = BarsOutput
    metadata = {"display": {"mcp": {"page": Path(__file__).with_name("bars.html").read_text("utf-8")}}}
    examples = [
        ModuleExample(
            title="A week with one bad day",
            inputs={"values": [12, 18, 9, -4, 22, 30, 26], "labels": ["Mo", "Tu", "We", "Th", "Fr", "Sa", "Su"]},
            output={
                "bars": [
                    {"label": "Mo", "value": 12},
                    {"label": "Tu", "value": 18},
                    {"label": "We", "value": 9},
                    {"label": "Th", "value": -4},
                    {"label": "Fr", "value": 22},
                    {"label": "Sa", "value": 30},
                    {"label": "Su", "value": 26},
                ],
                "bottom": -4,
                "top": 30,
            },
        )
    ]

    def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        args = BarsInput.model_validate(inputs)
        labels = args.labels + [""] * len(args.values)
        bars = [Bar(label=label, value=value) for value, label in zip(args.values, labels, strict=False)]
        bottom, top = min(0.0, *args.values), max(0.0, *args.values)
        return BarsOutput(bars=bars, bottom=bottom, top=top).model_dump()
