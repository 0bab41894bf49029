"""Count the days between two dates on which people work."""

from datetime import date, timedelta
from enum import StrEnum
from typing import Any

from apcore import Context, ModuleAnnotations, ModuleExample
from pydantic import BaseModel, ConfigDict, Field, model_validator


class Region(StrEnum):
    NONE = "none"
    AUSTRIA = "austria"
    FRANCE = "france"
    GERMANY = "germany"


# Month and day of the fixed holidays, then the days counted from Easter Sunday.
HOLIDAYS: dict[Region, tuple[list[tuple[int, int]], list[int]]] = {
    Region.NONE: ([], []),
    Region.AUSTRIA: (
        [(1, 1), (1, 6), (5, 1), (8, 15), (10, 26), (11, 1), (12, 8), (12, 25), (12, 26)],
        [1, 39, 50, 60],
    ),
    Region.FRANCE: ([(1, 1), (5, 1), (5, 8), (7, 14), (8, 15), (11, 1), (11, 11), (12, 25)], [1, 39, 50]),
    Region.GERMANY: ([(1, 1), (5, 1), (10, 3), (12, 25), (12, 26)], [-2, 1, 39, 50]),
}


class WorkdaysInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    start: date = Field(ge=date(1900, 1, 1), description="First day, counted, as YYYY-MM-DD.")
    end: date = Field(le=date(2199, 12, 31), description="Last day, counted too; at most ten years after the first.")
    region: Region = Field(default=Region.NONE, description="Whose nationwide public holidays to leave out.")
    days_off: list[date] = Field(default=[], max_length=400, description="Further days to leave out, e.g. a vacation.")

    @model_validator(mode="after")
    def check_order(self) -> "WorkdaysInput":
        if not timedelta(0) <= self.end - self.start <= timedelta(days=3660):
            raise ValueError("end must not be before start, nor more than ten years after it")
        return self


class WorkdaysOutput(BaseModel):
    workdays: int = Field(description="Days from Monday to Friday that are neither a holiday nor a day off.")
    skipped: list[date] = Field(description="The holidays and days off between Monday and Friday that were left out.")


def easter(year: int) -> date:
    """Return Easter Sunday in the Gregorian calendar (Gauss's method)."""
    century = year // 100
    moon = (15 + century - (13 + 8 * century) // 25 - century // 4) % 30
    shift = (19 * (year % 19) + moon) % 30
    shift -= (shift + year % 19 // 11) // 29
    weekday = (2 * (year % 4) + 4 * (year % 7) + 6 * shift + 4 + century - century // 4) % 7
    return date(year, 3, 22) + timedelta(days=shift + weekday)


def holidays(region: Region, year: int) -> set[date]:
    fixed, from_easter = HOLIDAYS[region]
    return {date(year, *day) for day in fixed} | {easter(year) + timedelta(days=n) for n in from_easter}


class Workdays:
    name = "Count workdays"
    description = "Count the workdays between two dates, without weekends, public holidays and given days off."
    tags = ["calendar", "dates"]
    annotations = ModuleAnnotations(readonly=True, idempotent=True, open_world=False)
    input_schema = WorkdaysInput
    output_schema = WorkdaysOutput
    examples = [
        ModuleExample(
            title="Easter week in Germany",
            inputs={"start": "2025-04-14", "end": "2025-04-25", "region": "germany", "days_off": ["2025-04-22"]},
            output={"workdays": 7, "skipped": ["2025-04-18", "2025-04-21", "2025-04-22"]},
        )
    ]

    def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        args = WorkdaysInput.model_validate(inputs)
        free = set(args.days_off)
        for year in range(args.start.year, args.end.year + 1):
            free |= holidays(args.region, year)
        days = [args.start + timedelta(days=n) for n in range((args.end - args.start).days + 1)]
        weekdays = [day for day in days if day.weekday() < 5]
        skipped = [day for day in weekdays if day in free]
        return WorkdaysOutput(workdays=len(weekdays) - len(skipped), skipped=skipped).model_dump()
