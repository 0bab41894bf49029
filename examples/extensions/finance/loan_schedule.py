"""Work out how a loan with equal monthly instalments is repaid."""

from calendar import monthrange
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from apcore import Context, ModuleAnnotations, ModuleExample
from pydantic import BaseModel, ConfigDict, Field

CENT = Decimal("0.01")


class ExtraPayment(BaseModel):
    number: int = Field(ge=1, description="The instalment it is paid together with, counted from 1.")
    amount: float = Field(ge=0.01, le=1e9, description="What is paid on top of that instalment.")


class LoanInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    amount: float = Field(ge=0.01, le=1e9, description="The sum borrowed.")
    annual_rate_percent: float = Field(ge=0, le=100, description="Nominal interest a year, e.g. 4.5 for 4.5 %.")
    months: int = Field(ge=1, le=480, description="Number of monthly instalments agreed on.")
    first_due: date = Field(
        ge=date(1900, 1, 1), le=date(2199, 12, 31), description="When the first instalment is due, as YYYY-MM-DD."
    )
    extra_payments: list[ExtraPayment] = Field(
        default=[], max_length=480, description="Payments beyond the instalments; they shorten the loan."
    )


class Instalment(BaseModel):
    number: int = Field(description="Position in the schedule, counted from 1.")
    due: date = Field(description="The day it is due.")
    paid: float = Field(description="What is paid, extra payments included.")
    interest: float = Field(description="The part of it that is interest.")
    balance: float = Field(description="What is still owed afterwards.")


class LoanOutput(BaseModel):
    monthly_payment: float = Field(description="The regular instalment; the last one may differ.")
    total_interest: float = Field(description="All the interest paid.")
    instalments: list[Instalment] = Field(description="The instalments until nothing is owed.")


def cents(value: Decimal) -> Decimal:
    return value.quantize(CENT, ROUND_HALF_UP)


def months_later(day: date, months: int) -> date:
    years, month = divmod(day.month - 1 + months, 12)
    year, month = day.year + years, month + 1
    return date(year, month, min(day.day, monthrange(year, month)[1]))


class LoanSchedule:
    name = "Loan schedule"
    description = "Work out the monthly payment, the interest and every instalment of a loan."
    documentation = """\
## How it is calculated

An annuity loan: every instalment is the same, `amount * r / (1 - (1 + r) ** -months)` with the monthly
rate `r = annual_rate_percent / 1200`, or `amount / months` at a rate of zero.

- Interest and payments are rounded to cents, half a cent upwards.
- The **last instalment** pays off what rounding has left.
- An extra payment is cut to what is still owed; one for an instalment never reached is ignored.
- A loan due on the 31st is due on the last day of shorter months.
"""
    tags = ["finance", "dates"]
    annotations = ModuleAnnotations(readonly=True, idempotent=True, open_world=False)
    input_schema = LoanInput
    output_schema = LoanOutput
    examples = [
        ModuleExample(
            title="Two months, at the end of the month",
            inputs={"amount": 1000, "annual_rate_percent": 6, "months": 2, "first_due": "2025-01-31"},
            output={
                "monthly_payment": 503.75,
                "total_interest": 7.51,
                "instalments": [
                    {"number": 1, "due": "2025-01-31", "paid": 503.75, "interest": 5.0, "balance": 501.25},
                    {"number": 2, "due": "2025-02-28", "paid": 503.76, "interest": 2.51, "balance": 0.0},
                ],
            },
        )
    ]

    def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        args = LoanInput.model_validate(inputs)
        balance = cents(Decimal(str(args.amount)))
        rate = Decimal(str(args.annual_rate_percent)) / 1200
        discount = 1 - (1 + rate) ** -args.months
        payment = cents(balance * rate / discount if discount else balance / args.months)
        total_interest = Decimal(0)
        instalments: list[Instalment] = []
        while balance > 0:
            number = len(instalments) + 1
            extra = sum((Decimal(str(p.amount)) for p in args.extra_payments if p.number == number), Decimal(0))
            interest = cents(balance * rate)
            owed = balance + interest
            paid = owed if number == args.months else min(owed, payment + cents(extra))
            balance = owed - paid
            total_interest += interest
            instalments.append(
                Instalment(
                    number=number,
                    due=months_later(args.first_due, number - 1),
                    paid=float(paid),
                    interest=float(interest),
                    balance=float(balance),
                )
            )
        return LoanOutput(
            monthly_payment=float(payment), total_interest=float(total_interest), instalments=instalments
        ).model_dump()
