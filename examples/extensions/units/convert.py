"""Convert a quantity between everyday units of one kind."""

from enum import StrEnum
from typing import Any

from apcore import Context, ModuleAnnotations, ModuleExample
from pydantic import BaseModel, ConfigDict, Field, model_validator


class Unit(StrEnum):
    METRE = "m"
    KILOMETRE = "km"
    FOOT = "ft"
    MILE = "mi"
    GRAM = "g"
    KILOGRAM = "kg"
    OUNCE = "oz"
    POUND = "lb"
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"
    KELVIN = "kelvin"


# Kind, factor and offset: quantity in the kind's base unit = value * factor + offset.
UNITS: dict[Unit, tuple[str, float, float]] = {
    Unit.METRE: ("length", 1.0, 0.0),
    Unit.KILOMETRE: ("length", 1000.0, 0.0),
    Unit.FOOT: ("length", 0.3048, 0.0),
    Unit.MILE: ("length", 1609.344, 0.0),
    Unit.GRAM: ("mass", 0.001, 0.0),
    Unit.KILOGRAM: ("mass", 1.0, 0.0),
    Unit.OUNCE: ("mass", 0.028349523125, 0.0),
    Unit.POUND: ("mass", 0.45359237, 0.0),
    Unit.CELSIUS: ("temperature", 1.0, 273.15),
    Unit.FAHRENHEIT: ("temperature", 5 / 9, 273.15 - 32 * 5 / 9),
    Unit.KELVIN: ("temperature", 1.0, 0.0),
}


class ConvertInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    value: float = Field(allow_inf_nan=False, description="The number to convert.")
    source: Unit = Field(description="The unit the number is given in.")
    target: Unit = Field(description="The unit wanted; must measure the same kind of quantity as source.")
    digits: int = Field(default=4, ge=0, le=12, description="Decimal places of the result.")

    @model_validator(mode="after")
    def check_kind(self) -> "ConvertInput":
        if UNITS[self.source][0] != UNITS[self.target][0]:
            raise ValueError(f"cannot convert {UNITS[self.source][0]} to {UNITS[self.target][0]}")
        return self


class ConvertOutput(BaseModel):
    value: float = Field(description="The converted number, rounded.")
    unit: Unit = Field(description="The unit it is given in.")
    kind: str = Field(description="What the unit measures: length, mass or temperature.")


class ConvertUnits:
    name = "Convert units"
    description = "Convert a length, mass or temperature from one unit to another."
    tags = ["units", "math"]
    annotations = ModuleAnnotations(readonly=True, idempotent=True, open_world=False, cacheable=True, cache_ttl=3600)
    input_schema = ConvertInput
    output_schema = ConvertOutput
    examples = [
        ModuleExample(
            title="A marathon in miles",
            inputs={"value": 42.195, "source": "km", "target": "mi", "digits": 2},
            output={"value": 26.22, "unit": "mi", "kind": "length"},
        ),
        ModuleExample(
            title="Body temperature",
            inputs={"value": 98.6, "source": "fahrenheit", "target": "celsius"},
            output={"value": 37.0, "unit": "celsius", "kind": "temperature"},
        ),
    ]

    def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        args = ConvertInput.model_validate(inputs)
        kind, factor, offset = UNITS[args.source]
        _, target_factor, target_offset = UNITS[args.target]
        value = (args.value * factor + offset - target_offset) / target_factor
        return ConvertOutput(value=round(value, args.digits), unit=args.target, kind=kind).model_dump()
