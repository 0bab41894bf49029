"""Values: any value as plain JSON, and without what is marked as sensitive.

Functions of values, with nothing of MCP in them.
"""

from __future__ import annotations

import base64
import dataclasses
import math
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any, TypeGuard

from apcore import ModuleError
from apcore.utils.redaction import REDACTED_VALUE
from pydantic import BaseModel, RootModel, TypeAdapter
from pydantic.dataclasses import is_pydantic_dataclass
from pydantic_core import from_json, to_json, to_jsonable_python

from .arrays import BYTES, unpacked
from .hints import BASE64, DECIMAL, how_written, marks_of
from .schemas import JSONObject, JSONSchema, admits, branches, in_place, part_schemas, properties_of, text_of, types_of

# ---- Secrets ----

_PARTS = ("properties", "items", "prefixItems", "additionalProperties")


def redact(value: Any, *marks: JSONSchema, hides_others: bool = True) -> Any:
    """Copy plain JSON with `***REDACTED***` in the place of each value that one of `marks`, of `marks_of()`, marks.

    Where something is marked, names that no schema has are hidden too (`hides_others`): whoever wrote them may have
    meant the marked one. A list in the place of an object, or an object in the place of a list, is searched for what
    either marks: middleware may have paged it. Not by `apcore.redact_sensitive`, which overlooks the values of maps
    (`additionalProperties`) and by default blanks innocent keys that contain a word: "author", "tokens_used"."""
    applied = [mark for mark in in_place(*marks) if mark]
    if value is None or not applied:
        return value
    if any("x-sensitive" in mark for mark in applied):
        return REDACTED_VALUE
    if not isinstance(value, (dict, list)):
        return value
    others: list[JSONSchema] = []
    if hides_others and isinstance(value, dict) and any(map(properties_of, applied)):
        others = [{"x-sensitive": True}]
    elif hides_others:
        others = applied + [part for mark in applied for part in branches(mark, _PARTS)]

    def part(step: str | int, item: Any) -> Any:
        return redact(item, *([*part_schemas(applied, step)] or others), hides_others=hides_others)

    if isinstance(value, list):
        return [part(index, item) for index, item in enumerate(value)]
    return {name: part(name, item) for name, item in value.items()}


# ---- Output ----


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


def _name_in_json(key: Any) -> str:
    """The name that a key of a dict is in JSON. TypeError for one that marks something: a name cannot be hidden."""
    if isinstance(key, str):
        return key
    if marks_in(key):
        raise TypeError(f"a {type(key).__module__}.{type(key).__qualname__} marks something, and is no name in JSON")
    name: str = next(iter(from_json(to_json({unpacked(key): None}, fallback=_unknown))))
    return name


def _name_by_itself(key: Any) -> Any:
    """The name that pydantic gives to a key that nothing describes."""
    return next(iter(from_json(to_json({key: None}, inf_nan_mode="null", fallback=lambda _: _UNKNOWN))))


_NO_FORM = object()
_UNKNOWN = f"unknown {secrets.token_hex(16)}"  # what pydantic writes for an object that it does not know
_PLAIN = (str, bool, int, float)


def dumped(dump: Callable[..., Any], dump_json: Callable[..., bytes | str]) -> tuple[Any, Any]:
    """What pydantic makes of a value in Python's types, and in JSON's: `_UNKNOWN` for what it does not know, and
    `_NO_FORM` where it cannot."""
    form: Any = _NO_FORM
    with suppress(ValueError):  # bytes that are no text
        form = from_json(dump_json(by_alias=True, warnings=False, fallback=lambda _: _UNKNOWN))
    return dump(by_alias=True, warnings=False), form


def _holds_unknown(form: Any) -> bool:
    return _UNKNOWN in to_json(form).decode()


def _is_written(value: Any, form: Any) -> bool:
    """Whether `form`, the JSON that pydantic makes of a value, is to be sent: not of what it does not know, and not of
    bytes, which are base64 here. The parts of a container are looked at one by one. But where an author writes another
    form than pydantic's own, his holds."""
    if value is None or type(value) in _PLAIN:
        return True
    if form == _UNKNOWN:
        return False
    if isinstance(value, BYTES):  # for which pydantic by itself has two texts, and its authors others
        return form not in (bytes(value).decode(errors="replace"), base64.urlsafe_b64encode(value).decode())
    if isinstance(value, Mapping) and isinstance(form, dict):
        if len(form) == len(value) and all(key in form for key in value):
            return False
        # To pydantic, a key that is a RootModel is the text "root='a'".
        is_named = all(type(key) is str for key in value)
        return is_named and form.keys() != {f"root={key!r}" for key in value}
    return not (is_array(value) and isinstance(form, list) and len(form) == len(value))


def as_json(value: Any, schemas: Sequence[JSONSchema] = (), place: str = "the root", form: Any = _NO_FORM) -> Any:
    """Copy `value` into plain JSON types by JSON's rules: dates become ISO text, enums their values, bytes base64.

    A Decimal is a number where `schemas` ask for one. Where pydantic has dumped `value`, `form` is its JSON: what a
    model says of its JSON holds. ValueError for what JSON cannot say, with its `place`."""
    if isinstance(value, BaseModel):
        check_values(value, place.removeprefix("the root"))
        has_own_dump = type(value).model_dump is not BaseModel.model_dump  # which leaves out what is None, say
        value, form = dumped(value.model_dump, value.model_dump_json)
        form = _NO_FORM if has_own_dump else form
    elif _is_pydantics(value):
        check_values(value, place.removeprefix("the root"))
        adapter = TypeAdapter[Any](type(value))
        value, form = dumped(partial(adapter.dump_python, value), partial(adapter.dump_json, value))
    types = {name for schema in schemas for name in types_of(schema)}
    means_decimal = type(value) in (int, float) and any(each.get("format") == DECIMAL for each in schemas)
    if means_decimal and not any(admits(each, value) for each in schemas):
        return str(value)
    is_nat = isinstance(value, date) and value != value  # pandas' missing date
    if isinstance(value, datetime | timedelta) and not is_nat:
        pandas: Any = value  # whose nanoseconds pydantic would cut
        if getattr(pandas, "nanosecond", 0) or getattr(pandas, "nanoseconds", 0):
            return pandas.isoformat()
    is_base64 = any(each.get("format") == BASE64 for each in schemas)
    if form is not _NO_FORM and not is_nat and (is_base64 or _is_written(value, form)):
        if form == _UNKNOWN or (isinstance(form, (dict, list)) and _holds_unknown(form)):
            raise TypeError(f"nothing says what the serializer gives at {place}")
        return form
    if isinstance(value, Decimal) and value.is_finite():
        if "string" in types or not types & {"number", "integer"}:
            value = str(value)
        elif "number" not in types and value == value.to_integral_value():
            value = int(value)
        else:
            value = float(value)
    value = unpacked(value.value if isinstance(value, Enum) else value)
    if is_nat or (isinstance(value, float | Decimal) and not math.isfinite(value)):
        raise ValueError(f"{value} at {place}")
    if value is None or type(value) in _PLAIN:
        return value
    if _is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    prefix = "" if place == "the root" else f"{place}."
    if isinstance(value, Mapping):
        written: JSONObject = {}
        anything: list[JSONSchema] = [{} for each in schemas if each.get("additionalProperties") is True]
        has_all = isinstance(form, dict) and len(form) == len(value)
        for (key, item), given in zip(value.items(), form if has_all else value, strict=True):
            name = _name_in_json(key)
            if has_all and not isinstance(key, str) and given != _name_by_itself(key):
                name = given  # a date in the form of its author
            if name in written:
                raise ValueError(f"two keys are {name!r} at {place}")
            part = form.get(name, _NO_FORM) if isinstance(form, dict) else _NO_FORM
            described = [*in_place(*part_schemas(schemas, name)), *anything]
            written[name] = as_json(item, described, prefix + name, part)
        return written
    if is_array(value):
        parts = [[*in_place(*part_schemas(schemas, i))] for i in range(len(value))] if schemas else [[]] * len(value)
        forms = form if isinstance(form, list) and not isinstance(value, Set) else [_NO_FORM] * len(value)
        items = [as_json(item, parts[index], f"{prefix}{index}", forms[index]) for index, item in enumerate(value)]
        if isinstance(value, Set) and isinstance(form, list):
            by_itself = to_jsonable_python(value, bytes_mode="base64", fallback=lambda _: _UNKNOWN)
            given, own, others = (sorted(map(repr, each)) for each in (form, items, by_itself))
            if given == own or (given != others and not holds_bytes(value)):
                return form  # in the order, or the form, that its author gives it
        return items
    if isinstance(value, Iterator):  # which pydantic would use up
        _unknown(value)
    if isinstance(value, BYTES):  # pydantic has the alphabet of URLs
        return base64.b64encode(value).decode()
    return to_jsonable_python(value, bytes_mode="base64", fallback=_unknown)


def _is_pydantics(value: Any) -> bool:
    """Whether pydantic knows a dataclass, and all of its fields."""
    kind = type(value)
    if kind in _PLAIN or not is_pydantic_dataclass(kind):
        return False
    return len(dataclasses.fields(kind)) == len(getattr(kind, "__pydantic_fields__", ()))


def is_array(value: Any) -> TypeGuard[Sequence[Any] | Set[Any]]:
    """Whether JSON has an array for it."""
    return isinstance(value, Set) or (isinstance(value, Sequence) and not isinstance(value, (str, *BYTES)))


def _is_dataclass(value: Any) -> TypeGuard[Any]:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _parts_of(value: Any) -> Iterable[tuple[Any, Any]]:
    """What stands in a value, by the names under which it is written. Of a model, its attributes: what it iterates over
    may be something else."""
    if isinstance(value, BaseModel) or _is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)] if _is_dataclass(value) else []
        parts = {name: getattr(value, name, None) for name in names} | getattr(value, "__dict__", {})
        parts |= getattr(value, "model_extra", None) or {}
        written = how_written(type(value))
        parts |= {name: getattr(value, name) for name in written.computed}
        return [(written.names.get(name, name), item) for name, item in parts.items()]
    if isinstance(value, Mapping):
        return [(_name_in_json(key), item) for key, item in value.items()]
    return enumerate(value) if is_array(value) else ()


def holds_bytes(value: Any) -> bool:
    """Whether there are bytes in a value of models, dataclasses and containers."""
    return isinstance(value, bytes) or any(holds_bytes(part) for _, part in _parts_of(value))


def check_names(value: Any, place: str = "") -> None:
    """Raise ValueError for two keys that are one name in JSON, of which pydantic would drop one."""
    if type(value) in _PLAIN:
        return
    if isinstance(value, Mapping):
        names = set[str]()
        for key, item in value.items():
            name = _name_in_json(key)
            if name in names:
                raise ValueError(f"two keys are {name!r} at {place.strip('.') or 'the root'}")
            names.add(name)
            check_names(item, f"{place}.{name}")
    elif is_array(value):
        for index, item in enumerate(value):
            check_names(item, f"{place}.{index}")


def check_values(value: Any, place: str = "", allows_nan: bool = False) -> None:
    """Raise ValueError for the first number in `value` that JSON cannot say ("nan at items.0.qty"), unless a model says
    how its own are written, by `ser_json_inf_nan`; TypeError for an iterator, which pydantic would use up."""
    if value is None or type(value) in (str, bool, int):
        return
    if isinstance(value, Iterator):
        _unknown(value)
    if isinstance(value, float | Decimal) and not math.isfinite(value) and not allows_nan:
        raise ValueError(f"{value} at {place.strip('.') or 'the root'}")
    if isinstance(value, BaseModel):
        allows_nan = type(value).model_config.get("ser_json_inf_nan") in ("null", "strings")
    if isinstance(value, RootModel):
        check_values(value.root, place, allows_nan)
    else:
        for name, item in _parts_of(value):
            check_values(item, f"{place}.{name}", allows_nan)


def marks_default(nodes: Iterable[JSONObject]) -> bool:
    """Whether a default in core schemas holds something marked: pydantic's JSON schema quotes what it can write."""
    for default in [node["default"] for node in nodes if "default" in node]:
        with suppress(Exception):  # it may be any object
            to_json(default)
            if marks_in(default):
                return True
    return False


_DEPTH_MAX = 3  # of objects in objects that nothing describes


def _held_by(value: Any) -> list[Any]:
    """What an object that nothing describes holds, and an exception was made with."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    held = [getattr(value, name, None) for name in slots]
    return [*held, *getattr(value, "__dict__", {}).values(), *getattr(value, "args", ())]


def marks_in(value: Any, depth: int = 0) -> JSONSchema:
    """The marks of the models in a value, each where it stands: of `[1, Model()]` `{"prefixItems": [{}, {...}], ...}`
    beside its own; `{}` where no model in it marks anything. In a place where nothing is known to stand, all of them
    hold. What an author writes in a form of his own is marked as a whole, and so is an object that holds one."""
    if value is None or type(value) in _PLAIN:
        return {}
    value = unpacked(value)
    own = marks_of(type(value))
    if isinstance(value, RootModel | Enum):
        inner = marks_in(value.root if isinstance(value, RootModel) else value.value, depth)
        is_whole = isinstance(value, RootModel) and how_written(type(value)).is_rewritten
        return {"anyOf": [own, {"x-sensitive": True} if inner and is_whole else inner]} if inner else own
    is_object = not (isinstance(value, BaseModel | Mapping) or _is_dataclass(value) or is_array(value))
    if is_object:
        if depth > _DEPTH_MAX or callable(value):
            return own
        return {"x-sensitive": True} if any(marks_in(item, depth + 1) for item in _held_by(value)) else own
    parts = {name: marks_in(item, depth) for name, item in _parts_of(value)}
    others: JSONSchema = {}
    if isinstance(value, BaseModel) or _is_dataclass(value):
        written = how_written(type(value))
        for name, part in parts.items():
            if (part and (written.is_rewritten or name in written.rewritten)) or name in written.marked:
                parts[name] = {"x-sensitive": True}
        if written.is_rewritten and (own or any(parts.values())):
            others = {"x-sensitive": True}  # of a list, which its author may make of it
    marked = [part for part in parts.values() if part]
    if isinstance(value, Set):  # which is in no order
        inner = {"items": {"anyOf": marked}}
    elif is_array(value):
        inner = {"prefixItems": [*parts.values()], "items": {"anyOf": marked}}
    else:
        is_named = isinstance(value, BaseModel) or _is_dataclass(value)  # and others are hidden
        inner = {"properties": parts} | ({} if is_named else {"additionalProperties": {"anyOf": marked}})
    if not marked and not others:
        return own
    return {"anyOf": [own, {"items": others}, inner if marked else {}]}
