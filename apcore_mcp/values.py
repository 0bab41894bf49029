"""Values: what a module gives, checked and written once as plain JSON.

Functions of values and of what declares them, with nothing of MCP in them. What is marked as sensitive is hidden here.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, TypeGuard, get_origin

from apcore import ModuleDescriptor, ModuleError, errors
from apcore.utils.redaction import REDACTED_VALUE
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic_core import from_json, to_json, to_jsonable_python

from .faults import fault_at, faults_in, pydantic_faults
from .functions import Function
from .schemas import (
    JSONObject,
    JSONSchema,
    ModelType,
    SchemaConverter,
    UnconvertibleSchema,
    admits_object,
    in_place,
    is_json,
    marks_of,
    mentions_mark,
    part_schemas,
    plain_json,
    properties_of,
    subschemas,
    text_of,
    types_of,
    written_form,
)

# ---- Secrets ----


def redact(value: Any, *marks: JSONSchema, hides_others: bool = True) -> Any:
    """Copy plain JSON with `***REDACTED***` in the place of each value that one of `marks`, of `marks_of()`, marks.

    Where something is marked, names that no schema has are hidden too (`hides_others`): whoever wrote them may have
    meant the marked one. Not by `apcore.redact_sensitive`, which overlooks the values of maps (`additionalProperties`)
    and by default blanks innocent keys that contain a word: "author", "tokens_used"."""
    applied = [mark for mark in in_place(*marks) if mark]
    if value is None or not applied:
        return value
    if any("x-sensitive" in mark for mark in applied):
        return REDACTED_VALUE
    if isinstance(value, list):
        return [redact(item, *part_schemas(applied, i), hides_others=hides_others) for i, item in enumerate(value)]
    if not isinstance(value, dict):
        return value
    others: list[JSONSchema] = [{"x-sensitive": True}] if hides_others and any(map(properties_of, applied)) else []
    redacted = {}
    for name, item in value.items():
        parts = [*part_schemas(applied, name)] or others
        redacted[name] = redact(item, *parts, hides_others=hides_others)
    return redacted


# ---- Output ----


class RefusedOutput(errors.SchemaValidationError):
    """The output of a module does not fit what it declares: the module has run."""

    def __init__(self, faults: list[dict[str, str]], output: Any) -> None:
        kind = f"{type(output).__module__}.{type(output).__qualname__}"
        # No messages, which quote values.
        places = ", ".join(f"{fault['field'] or '(root)'}: {fault['code']}" for fault in faults)
        super().__init__(f"Output validation failed: {places} (it is a {kind})", faults)


def not_json(error: Exception) -> ModuleError:
    reason = text_of(error).replace(" at result.", " at ")  # which the module has not written
    return ModuleError("OUTPUT_SERIALIZATION_ERROR", f"output is not JSON: {reason}")


def _unknown(value: Any) -> Any:
    """What is written for an object that nothing describes: its text (FR-EXEC-002), where its class has a `__str__`.

    TypeError, which names the type, for one that has only a `__repr__`, which is for programmers and may quote what a
    model in it marks; and where the text would say less than the object is: a callable, what can be counted, iterated
    over or collected (a frame, a generator), and what has no text but `<NA>`."""
    *classes, _ = type(value).__mro__  # without `object`, whose text is the `__repr__`
    has_text = any("__str__" in vars(each) for each in classes)
    says_less = callable(value) or any(hasattr(value, name) for name in ("__len__", "__iter__", "collect"))
    text = str(value) if has_text and not says_less else "<>"
    if re.fullmatch(r"<.*>", text, re.DOTALL):
        raise TypeError(f"nothing says what a {type(value).__module__}.{type(value).__qualname__} is in JSON")
    return text


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


def _unpacked(value: Any, moment: Callable[[Any], Any] = _iso_moment) -> Any:
    """The values of a NumPy array or scalar, dates and durations by `moment`, as `tolist()` makes numbers of some;
    anything else as it is. A frame or a Series is none of them: it has an index beside its values."""
    if not hasattr(value, "tolist") or hasattr(value, "index"):
        return value
    plain = value.tolist()
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind in ("M", "m", "V") and isinstance(plain, list):
        return [_unpacked(item, moment) for item in value]
    if kind == "V" and isinstance(plain, tuple):  # a record
        return tuple(_unpacked(value[name], moment) for name in value.dtype.names)
    return moment(value) if kind in ("M", "m") else plain


def _without_numpy(value: Any) -> Any:
    """Copy containers, at every depth, with the values of NumPy's arrays and scalars, in Python's types."""
    value = _unpacked(value, _moment)
    if isinstance(value, dict):
        return {_without_numpy(name): _without_numpy(item) for name, item in value.items()}
    return type(value)(map(_without_numpy, value)) if type(value) in (list, tuple, set) else value


def _name_in_json(key: Any) -> str:
    key = _unpacked(key)
    return key if isinstance(key, str) else next(iter(from_json(to_json({key: None}, fallback=_unknown))))


_NO_FORM = object()


def _dumped(dump: Callable[..., Any], dump_json: Callable[..., bytes | str]) -> tuple[Any, Any]:
    """What pydantic makes of a value in Python's types, and in JSON's: null for what it does not know, and `_NO_FORM`
    where it cannot."""
    form: Any = _NO_FORM
    with suppress(ValueError):  # bytes that are no text
        form = from_json(dump_json(by_alias=True, warnings=False, fallback=lambda _: None))
    return dump(by_alias=True, warnings=False), form


def _is_written(value: Any, form: Any) -> bool:
    """Whether `form`, the JSON that pydantic makes of a value, is to be sent: not of bytes, which are base64 here, and
    not the null of what it does not know. The parts of a container are looked at one by one."""
    if isinstance(value, bytes | bytearray | Set) or (isinstance(value, Mapping) and isinstance(form, dict)):
        return False
    if isinstance(value, Sequence) and isinstance(form, list):
        return len(form) != len(value)
    return form is not None or isinstance(value, float)


def as_json(value: Any, schemas: Sequence[JSONSchema] = (), place: str = "the root", form: Any = _NO_FORM) -> Any:
    """Copy `value` into plain JSON types by JSON's rules: dates become ISO text, enums their values, bytes base64.

    A Decimal is a number where `schemas` ask for one. Where pydantic has dumped `value`, `form` is its JSON: what a
    model says of its JSON holds. ValueError for what JSON cannot say, with its `place`."""
    if isinstance(value, BaseModel):
        _check_values(value, place.removeprefix("the root"))
        value, form = _dumped(value.model_dump, value.model_dump_json)
    is_nat = isinstance(value, date) and value != value  # pandas' missing date
    if isinstance(value, datetime | timedelta) and not is_nat:
        pandas: Any = value  # whose nanoseconds pydantic would cut
        if getattr(pandas, "nanosecond", 0) or getattr(pandas, "nanoseconds", 0):
            return pandas.isoformat()
    if form is not _NO_FORM and not is_nat and _is_written(value, form):
        return form
    if isinstance(value, Decimal) and value.is_finite():
        types = {name for schema in schemas for name in types_of(schema)}
        value = float(value) if types & {"number", "integer"} and "string" not in types else str(value)
    value = _unpacked(value.value if isinstance(value, Enum) else value)
    if is_nat or (isinstance(value, float | Decimal) and not math.isfinite(value)):
        raise ValueError(f"{value} at {place}")
    if value is None or type(value) in (str, bool, int, float):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    prefix = "" if place == "the root" else f"{place}."
    if isinstance(value, Mapping):
        written: JSONObject = {}
        for key, item in value.items():
            name = _name_in_json(key)
            if name in written:
                raise ValueError(f"two keys are {name!r} at {place}")
            part = form.get(name, _NO_FORM) if isinstance(form, dict) else _NO_FORM
            written[name] = as_json(item, [*in_place(*part_schemas(schemas, name))], prefix + name, part)
        return written
    if _is_array(value):
        parts = [[*in_place(*part_schemas(schemas, i))] for i in range(len(value))] if schemas else [[]] * len(value)
        forms = form if isinstance(form, list) and not isinstance(value, Set) else [_NO_FORM] * len(value)
        return [as_json(item, parts[index], f"{prefix}{index}", forms[index]) for index, item in enumerate(value)]
    if isinstance(value, Iterator):  # which pydantic would use up
        _unknown(value)
    if isinstance(value, bytes | bytearray):  # pydantic has the alphabet of URLs
        return base64.b64encode(value).decode()
    return to_jsonable_python(value, bytes_mode="base64", fallback=_unknown)


def _is_array(value: Any) -> TypeGuard[Sequence[Any] | Set[Any]]:
    """Whether JSON has an array for it."""
    return isinstance(value, Set) or (isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray))


def _parts_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """What stands in a value, by the names under which it is written."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        parts = [((name in fields and fields[name].serialization_alias) or name, item) for name, item in value]
        computed = type(value).model_computed_fields
        return parts + [(field.alias or name, getattr(value, name)) for name, field in computed.items()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(each.name, getattr(value, each.name, None)) for each in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return [(_name_in_json(key), item) for key, item in value.items()]
    return enumerate(value) if _is_array(value) else ()


def _check_values(value: Any, place: str = "", allows_nan: bool = False) -> None:
    """Raise ValueError for the first number in `value` that JSON cannot say ("nan at items.0.qty"), unless a model says
    how its own are written, by `ser_json_inf_nan`; TypeError for an iterator, which pydantic would use up."""
    if isinstance(value, Iterator):
        _unknown(value)
    if isinstance(value, float | Decimal) and not math.isfinite(value) and not allows_nan:
        raise ValueError(f"{value} at {place.strip('.') or 'the root'}")
    if isinstance(value, BaseModel):
        allows_nan = type(value).model_config.get("ser_json_inf_nan") in ("null", "strings")
    for name, item in _parts_of(value):
        _check_values(item, f"{place}.{name}", allows_nan)


def marks_in(value: Any) -> JSONSchema:
    """The marks of the models in a value, each where it stands: of `[1, Model()]` `{"prefixItems": [{}, {...}]}` beside
    its own; `{}` where no model in it marks anything."""
    value = _unpacked(value)
    parts = {name: marks_in(item) for name, item in _parts_of(value)}
    own = marks_of(type(value))
    if not any(parts.values()):
        return own
    is_array = _is_array(value)
    inner = {"prefixItems": [*parts.values()]} if is_array else {"properties": parts, "additionalProperties": {}}
    return {"anyOf": [own, inner]}


def _is_open(schema: JSONSchema) -> bool:
    """Whether `schema` leaves open how a value is written: it takes any value, or bytes."""
    is_any = not schema.keys() - {"title", "description", "default", "examples", "deprecated"}
    is_bytes = schema.get("format") == "binary" or "contentEncoding" in schema
    return is_any or is_bytes or schema.get("additionalProperties") is True


_CHECKS = ConfigDict(revalidate_instances="always", arbitrary_types_allowed=True)


class Output:
    """What a module gives: checked by what declares it, and written once, in the form that `schema` describes.

    A function's return hint and a class's model are pydantic's, which checks and writes by them: its serializers and
    aliases hold. A dict schema, and what nothing declares, is written by JSON's rules. Everything but a dict and a
    model is put under `result`, as apcore promises it, and so is a model that is no object."""

    def __init__(self, module: Any, descriptor: ModuleDescriptor, function: Function | None) -> None:
        self._function = function
        self._declared = getattr(module, "output_schema", None)
        self._adapter: TypeAdapter[Any] | None = None
        schema = descriptor.output_schema
        if function is not None and get_origin(function.returns) is dict:
            self._adapter = TypeAdapter(function.returns, config=_CHECKS)
            schema = written_form(function.returns, self._adapter)
        elif isinstance(self._declared, ModelType) and (function is None or function.returns is not dict):
            self._adapter = TypeAdapter(self._declared)
            if function is not None and function.is_wrapped:  # for which apcore's model believes dataclasses
                self._adapter = TypeAdapter(create_model("Result", __config__=_CHECKS, result=(function.returns, ...)))
            schema = written_form(self._declared, self._adapter)
        self.schema: JSONSchema = {}  # as written out; {} where nothing is declared, or it cannot be
        self.fault = ""  # why it cannot be
        try:
            self.schema = SchemaConverter(self._declared if self._adapter else None).inline(schema)
        except UnconvertibleSchema as error:
            if mentions_mark(schema):
                raise
            self.fault = str(error)
        self._is_root = function is not None and self._adapter is not None and not admits_object(self.schema)
        if self._is_root:  # a RootModel of a list
            self.schema = {"type": "object", "properties": {"result": self.schema}, "required": ["result"]}
        # What JSON Schema leaves open, pydantic would guess; there, JSON's rules write what it makes of the rest.
        self._is_open = not self.schema or any(map(_is_open, subschemas(self.schema)))

    def write(self, output: Any, redacts: bool) -> JSONObject:
        """What a module gave as plain JSON; RefusedOutput for what does not fit. With `redacts`, what models mark is
        hidden that `schema` does not describe."""
        function = self._function
        if function is not None and function.is_wrapped:
            output = {"result": output}
        given = output  # with its models, which may mark something
        if function is not None and function.is_foreign:
            output = function.output(output)
        elif output is None and (self._adapter is None if function is None else function.returns is type(None)):
            output = {}
        try:
            written, is_described = self._serialize(output)
            if redacts and not (is_described and output is given):
                written = redact(written, marks_in(given))
            if self._is_root:
                written = {"result": written}
        except (errors.SchemaValidationError, ModuleError):
            raise
        except Exception as error:  # a module's own __str__ may raise anything
            raise not_json(error) from None
        if not isinstance(written, dict):
            raise RefusedOutput([fault_at([], "type", "A module returns a dict or a model")], output)
        return written

    def _serialize(self, output: Any) -> tuple[Any, bool]:
        """What a module gave as plain JSON, and whether there is no model in it that `schema` does not describe."""
        if self._adapter is not None:
            checked = self._validate(self._adapter, output)
            dump = functools.partial(self._adapter.dump_python, checked)
            written = None if self._is_open else dump(mode="json", by_alias=True, warnings=False)
            if written is not None and is_json(written):
                return written, True
            _check_values(checked)
            python, form = _dumped(dump, functools.partial(self._adapter.dump_json, checked))
            return plain_json(as_json(python, form=form)), not self._is_open
        written = None
        is_plain = False
        with suppress(ValueError, TypeError):
            written = plain_json(output)
            is_plain = bool(written == output)  # not the key 1, a date or a set
        if not is_plain:
            written = plain_json(as_json(output, [*in_place(self.schema)]))
        if self._declared is not None and not isinstance(self._declared, ModelType):
            try:
                self._declared.model_validate(written, strict=True)
            except errors.SchemaValidationError as error:
                raise RefusedOutput(faults_in(error), output) from None
        return written, is_plain

    def _validate(self, adapter: TypeAdapter[Any], output: Any) -> Any:
        with suppress(ValidationError):
            return adapter.validate_python(output, strict=True)
        plain = _without_numpy(output)
        try:
            return adapter.validate_python(plain, strict=True)
        except ValidationError as error:
            with suppress(ValueError):  # rows as a file or a frame gave them: the text of a date, of an enum
                if not marks_in(output):  # what another type marks would be sent
                    return adapter.validate_json(to_json(plain, bytes_mode="utf8"), strict=True)
            is_wrapped = self._function is not None and self._function.is_wrapped
            raise RefusedOutput(pydantic_faults(error, output), output["result"] if is_wrapped else output) from None
