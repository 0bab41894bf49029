"""Judge a password without keeping or repeating it."""

import math
import string
from enum import StrEnum
from typing import Any

from apcore import Context, ModuleAnnotations, ModuleExample
from pydantic import BaseModel, ConfigDict, Field

COMMON = ("123456", "password", "qwerty", "letmein", "admin", "welcome", "iloveyou", "abc123")


class Strength(StrEnum):
    WEAK = "weak"
    FAIR = "fair"
    STRONG = "strong"


class PasswordInput(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    password: str = Field(
        min_length=1,
        max_length=256,
        description="The password to judge; it is neither stored nor repeated.",
        json_schema_extra={"x-sensitive": True},
    )


class PasswordOutput(BaseModel):
    strength: Strength = Field(description="weak below 40 bits, fair below 70 bits, else strong.")
    bits: int = Field(description="Upper estimate of the entropy in bits.")
    advice: list[str] = Field(description="What would make the password better; empty when nothing would.")


class PasswordStrength:
    name = "Password strength"
    description = "Estimate how hard a password is to guess and say what would improve it."
    tags = ["security"]
    annotations = ModuleAnnotations(readonly=True, idempotent=True, open_world=False)
    input_schema = PasswordInput
    output_schema = PasswordOutput
    examples = [
        ModuleExample(
            title="A common password with a number",
            inputs={"password": "Password1"},
            output={
                "strength": "weak",
                "bits": 5,
                "advice": ["Use at least 12 characters.", "Leave out well-known passwords."],
            },
        )
    ]

    def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        password = PasswordInput.model_validate(inputs).password
        unknown = password.lower()
        for word in COMMON:
            unknown = unknown.replace(word, "")
        classes = (string.ascii_lowercase, string.ascii_uppercase, string.digits, string.punctuation + " ")
        alphabet = sum(len(chars) for chars in classes if any(c in chars for c in password))
        alphabet += 100 * (not all(c in "".join(classes) for c in password))
        varied = min(len(unknown), 3 * len(set(unknown)))
        bits = int(varied * math.log2(alphabet))
        advice = {
            "Use at least 12 characters.": len(password) < 12,
            "Leave out well-known passwords.": len(unknown) < len(password),
            "Repeat fewer characters.": varied < len(unknown),
        }
        return PasswordOutput(
            strength=Strength.WEAK if bits < 40 else Strength.FAIR if bits < 70 else Strength.STRONG,
            bits=bits,
            advice=[text for text, applies in advice.items() if applies],
        ).model_dump()
