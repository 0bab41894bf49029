"""Plain functions as tools: apcore's `@module` reads name, schemas and texts off the signature and the docstring."""

from typing import Annotated, Literal

from apcore import ModuleExample
from apcore.decorator import module
from pydantic import Field

Colour = Annotated[str, Field(pattern="^#[0-9a-fA-F]{6}$")]
PURE = {"readonly": True, "idempotent": True, "open_world": False}


def luminance(colour: str) -> float:
    """Relative luminance by WCAG 2.2, from 0 for black to 1 for white."""
    channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@module(
    tags=["colour"],
    annotations=PURE,
    examples=[
        ModuleExample(title="Grey on white", inputs={"text": "#767676"}, output={"result": 4.54}),
        ModuleExample(title="The most there is", inputs={"text": "#000000"}, output={"result": 21.0}),
    ],
)
def ratio(text: Colour, background: Colour = "#ffffff") -> float:
    """Measure how well text can be read on its background, as WCAG's contrast ratio: 4.5 is enough for most text.

    Args:
        text: Colour of the text, such as "#1a2b3c".
        background: Colour behind it.
    """
    lighter, darker = sorted((luminance(text), luminance(background)), reverse=True)
    return round((lighter + 0.05) / (darker + 0.05), 2)


@module(
    id="colour.text_on",
    tags=["colour"],
    annotations=PURE,
    examples=[ModuleExample(title="On orange", inputs={"background": "#ff8800"}, output={"result": "black"})],
)
async def text_on(background: Colour) -> Literal["black", "white"]:
    """Choose black or white for text on a background, whichever can be read better.

    Args:
        background: Colour of the background, such as "#ff8800".
    """
    return "black" if ratio("#000000", background) >= ratio("#ffffff", background) else "white"
