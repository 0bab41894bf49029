"""Draw a bar chart as a picture: an output that reaches the client as an image."""

import base64
import struct
import zlib
from typing import Any

from apcore import Context, ModuleAnnotations, ModuleExample
from pydantic import BaseModel, ConfigDict, Field

PAPER, GRID, BAR, BELOW = b"\xff\xff\xff", b"\xe2\xe8\xf0", b"\x25\x63\xeb", b"\xdc\x26\x26"
LINES = 4  # of the grid


class PictureInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    values: list[float] = Field(min_length=1, max_length=64, description="One bar each, from left to right.")
    width: int = Field(default=480, ge=128, le=1920, description="Width of the image in pixels.")
    height: int = Field(default=240, ge=64, le=1080, description="Height of the image in pixels.")


class PictureOutput(BaseModel):
    chart: str = Field(
        description="The chart. Clients that can show images show it.",
        json_schema_extra={"contentEncoding": "base64", "contentMediaType": "image/png"},
    )
    bottom: float = Field(description="The value at the lower edge.")
    top: float = Field(description="The value at the upper edge.")


def png(rows: list[bytes]) -> bytes:
    """An image of rows of RGB pixels, as PNG writes it: a signature and three chunks."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", len(rows[0]) // 3, len(rows), 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


class Picture:
    name = "Bar chart as a picture"
    description = "Draw numbers as a bar chart, blue above zero and red below, and return it as a PNG image."
    tags = ["chart", "image"]
    annotations = ModuleAnnotations(readonly=True, idempotent=True, open_world=False)
    input_schema = PictureInput
    output_schema = PictureOutput
    examples = [
        ModuleExample(
            title="A week with one bad day",
            inputs={"values": [12, 18, 9, -4, 22, 30, 26], "width": 320, "height": 160},
            output={"bottom": -4, "top": 30},
        )
    ]

    def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        args = PictureInput.model_validate(inputs)
        bottom, top = min(0.0, *args.values), max(0.0, *args.values)
        scale = (args.height - 1) / ((top - bottom) or 1)
        zero = round(top * scale)  # rows are counted from the top
        step = args.width / len(args.values)
        bars = [
            (round((i + 0.15) * step), round((i + 0.85) * step), round((top - value) * scale))
            for i, value in enumerate(args.values)
        ]
        grid = {round(line * (args.height - 1) / LINES) for line in range(LINES + 1)} | {zero}
        rows = []
        for y in range(args.height):
            row = bytearray((GRID if y in grid else PAPER) * args.width)
            for left, right, end in bars:
                if min(end, zero) <= y <= max(end, zero) and end != zero:
                    row[3 * left : 3 * right] = (BAR if end < zero else BELOW) * (right - left)
            rows.append(bytes(row))
        return PictureOutput(chart=base64.b64encode(png(rows)).decode(), bottom=bottom, top=top).model_dump()
