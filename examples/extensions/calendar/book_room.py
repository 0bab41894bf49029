"""A tool that asks: what the agent did not say, the person behind it is asked for."""

from datetime import date
from typing import Any, Literal

from apcore import Context, ModuleAnnotations, ModuleExample
from pydantic import BaseModel, ConfigDict, Field

from apcore_mcp import elicit, report_progress

ROOMS = {"Garden": 4, "Harbour": 8, "Summit": 20}


def choice_of(rooms: list[str]) -> dict[str, Any]:
    """What the user is asked to fill in."""
    properties = {
        "room": {"type": "string", "enum": rooms, "title": "Room"},
        "projector": {"type": "boolean", "title": "With projector", "default": False},
    }
    return {"type": "object", "properties": properties, "required": ["room"]}


class BookingInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    day: date = Field(description="Day of the meeting, as YYYY-MM-DD.")
    people: int = Field(ge=1, le=20, description="How many people will come.")


class BookingOutput(BaseModel):
    status: Literal["booked", "not booked"] = Field(description="Whether there is a room now.")
    room: str | None = Field(description="The room, if one is booked.")
    projector: bool = Field(description="Whether a projector is in it.")


class BookRoom:
    """Asks which room to take. Without an answer nothing is booked."""

    input_schema = BookingInput
    output_schema = BookingOutput
    name = "Book a room"
    description = "Book a meeting room for a day. Asks the user which room to take."
    tags = ["calendar"]
    annotations = ModuleAnnotations(open_world=False)
    examples = [
        ModuleExample(
            title="Nobody there to ask",
            inputs={"day": "2025-04-14", "people": 3},
            output={"status": "not booked", "room": None, "projector": False},
        )
    ]

    async def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        await report_progress(context, 1, total=2, message="Looking for free rooms")
        fitting = [name for name, seats in ROOMS.items() if seats >= inputs["people"]]
        question = f"Which room for {inputs['people']} people on {inputs['day']}? Large enough: {', '.join(fitting)}."
        answer = await elicit(context, question, choice_of(fitting), key="room")
        if answer is None or answer.get("room") not in fitting:
            return {"status": "not booked", "room": None, "projector": False}
        await report_progress(context, 2, total=2, message=f"Booking {answer['room']}")
        return {"status": "booked", "room": answer["room"], "projector": bool(answer.get("projector"))}
