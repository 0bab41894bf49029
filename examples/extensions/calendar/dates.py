"""A function that works with real dates: it gets what its signature says, and not the texts that JSON has for them.

apcore alone holds arguments against the signature and then hands them over as they arrived. What was not sent is
the function's own default.
"""

from datetime import date
from enum import StrEnum
from typing import Annotated

from apcore import ModuleExample
from apcore.decorator import module
from pydantic import Field


class Unit(StrEnum):
    DAYS = "days"
    WEEKS = "weeks"


DAYS_OF = {Unit.DAYS: 1, Unit.WEEKS: 7}


@module(
    tags=["calendar"],
    annotations={"readonly": True, "idempotent": True, "open_world": False},
    examples=[
        ModuleExample(
            title="From one Monday to the next but one",
            inputs={"first": "2025-04-14", "last": "2025-04-28", "unit": "weeks"},
            output={"result": 2.0},
        )
    ],
)
def between(
    first: Annotated[date, Field(description="The earlier day, as YYYY-MM-DD.")],
    last: Annotated[date, Field(description="The later day; the result is negative when it is not.")],
    unit: Annotated[Unit, Field(description="What to count in.")] = Unit.DAYS,
) -> float:
    """Count the days or weeks from one day to another."""
    return round((last - first).days / DAYS_OF[unit], 2)
