"""Arrays: the values of NumPy's arrays and scalars in Python's types, its dates and durations included.

Functions of values. NumPy is not imported: a value of its own brings what is asked of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

BYTES = (bytes, bytearray, memoryview)  # whose last has a `tolist()` as well

_DURATIONS = {  # the forms of ISO 8601, by NumPy's words
    "years": "P{}Y",
    "months": "P{}M",
    "weeks": "P{}W",
    "days": "P{}D",
    "hours": "PT{}H",
    "minutes": "PT{}M",
}
# Each counts in thousandths of the one before.
_SECONDS: Sequence[str] = "seconds milliseconds microseconds nanoseconds picoseconds femtoseconds attoseconds".split()


class _NumpyMoment:
    """A date or a duration that Python has no type for: years and months, far years, nanoseconds. No hint fits it, and
    its text is that of ISO 8601: `np.timedelta64(3, "M")`, to NumPy "3 months", is "P3M"."""

    def __init__(self, value: Any) -> None:
        self._text = re.sub(r"\.0+$", "", str(value))
        if value.dtype.kind == "m":
            number, unit = self._text.split(" ", 1)
            amount = Decimal(number)
            if unit not in _DURATIONS:
                amount = amount.scaleb(-3 * _SECONDS.index(unit)).normalize()
            sign = "-" if amount < 0 else ""
            self._text = sign + _DURATIONS.get(unit, "PT{}S").format(f"{abs(amount):f}")

    def __str__(self) -> str:
        return self._text


def _moment(value: Any) -> Any:
    """A NumPy scalar as Python's date, time or duration, where there is one that says the same."""
    plain = value.tolist()
    dtype = value.dtype.name
    if isinstance(plain, int) and dtype.endswith("[ns]"):
        rounded = value.astype(dtype.replace("ns", "us"))
        plain = rounded.tolist() if rounded == value else plain
    is_pythons = plain is None or isinstance(plain, date | timedelta)
    return plain if is_pythons and not dtype.endswith(("[Y]", "[M]")) else _NumpyMoment(value)


def _iso_moment(value: Any) -> Any:
    """The same, a date or a time in NumPy's text: that of `np.datetime64("2026-05-01T09:30")` has no seconds."""
    plain = _moment(value)
    return str(_NumpyMoment(value)) if plain is not None and value.dtype.kind == "M" else plain


def unpacked(value: Any, moment: Callable[[Any], Any] = _iso_moment) -> Any:
    """The values of a NumPy array or scalar, dates and durations by `moment`, as `tolist()` makes numbers of some;
    anything else as it is. A frame or a Series is none of them: it has an index beside its values."""
    if not hasattr(value, "tolist") or hasattr(value, "index") or isinstance(value, BYTES):
        return value
    plain = value.tolist()
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind in ("M", "m", "V") and isinstance(plain, list):
        return [unpacked(item, moment) for item in value]
    if kind == "V" and isinstance(plain, tuple):  # a record
        return tuple(unpacked(value[name], moment) for name in value.dtype.names)
    return moment(value) if kind in ("M", "m") else plain


def in_pythons_types(value: Any) -> Any:
    """Copy containers, at every depth, with the values of NumPy's arrays and scalars, and of iterators as lists."""
    value = [*value] if isinstance(value, Iterator) else unpacked(value, _moment)
    if isinstance(value, dict):
        return {in_pythons_types(name): in_pythons_types(item) for name, item in value.items()}
    return type(value)(map(in_pythons_types, value)) if type(value) in (list, tuple, set) else value
