"""Faults: what is wrong with a value, field by field, as clients and logs are told it.

Functions of what pydantic, jsonschema and apcore say, with nothing of MCP in them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

from apcore import errors
from jsonschema import Draft202012Validator
from jsonschema import ValidationError as InvalidValue
from jsonschema.exceptions import best_match
from jsonschema.validators import extend
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from .schemas import JSONSchema, in_place, part_schemas, text_of

FAULTS_MAX = 20  # how many a client reads of one call
_FAULT_CHARACTERS = 1_000  # of a field's path, of a code and of a message, each
_IMPERSONAL = {  # messages of pydantic's that name a class or a function of the module's, by their type
    **dict.fromkeys(["model_type", "model_attributes_type", "dataclass_type"], "Input should be an object"),
    **dict.fromkeys(["union_tag_invalid", "union_tag_not_found"], "Input is none of the forms that are expected"),
    **dict.fromkeys(["is_instance_of", "is_subclass_of", "dataclass_exact_type"], "Input is not of the right type"),
}


def fault_at(path: Iterable[Any], code: object, message: object) -> dict[str, str]:
    """What is wrong with one field, shortened: `{"field": "sizes.0", "code": "type", "message": "..."}`."""
    fault = {"field": ".".join(map(str, path)), "code": code, "message": message}
    return {key: text_of(value)[:_FAULT_CHARACTERS] for key, value in fault.items()}


def faults_in(error: errors.SchemaValidationError) -> list[dict[str, str]]:
    """What an error of apcore's or of a module's says of fields: dicts with `path` and `keyword`, or `field` and
    `code`, or texts."""
    faults = []
    for each in (error.details.get("errors") or ())[:FAULTS_MAX]:
        parts = each if isinstance(each, dict) else {"message": each}
        path = str(parts.get("field") or parts.get("path") or "").strip("/").split("/")
        code = parts.get("code") or parts.get("keyword") or "invalid"
        faults.append(fault_at(path, code, parts.get("message") or ""))
    return faults


def _readings(values: Any, loc: Sequence[Any]) -> Iterator[tuple[list[Any], Any]]:
    """What a path of pydantic's may mean in `values`, the likeliest first: the path, and what stands there.

    Some of its steps are no names, but the tag of a union or the class that it has tried: of `{"kind": "note",
    "note": "milk"}`, `("note", "pinned")` is the field `pinned`."""
    pending: list[tuple[list[Any], Any, Sequence[Any], bool]] = [([], values, loc, False)]
    while pending:
        path, value, steps, is_behind_tag = pending.pop()
        if not steps:
            yield path, value
            continue
        step, others = steps[0], steps[1:]
        readings = [(path, value, others, True)]
        is_item = isinstance(value, list | tuple) and isinstance(step, int) and step < len(value)
        if is_item or (isinstance(value, dict) and step in value):
            readings.append(([*path, step], value[step], others, False))
        if isinstance(value, dict) and not is_behind_tag and _has_text(value, step):
            readings.reverse()  # it is the tag of this very value
        pending += readings  # of which the last is the next


def _has_text(value: dict[Any, Any], text: object) -> bool:
    return any(isinstance(item, str) and item == text for item in value.values())


def _path_of(fault: ErrorDetails, values: Any) -> list[Any]:
    """Where pydantic has found a fault: by the first of 50 readings of its path at which the input stands."""
    readings = [*itertools.islice(_readings(values, fault["loc"]), 50)]
    for path, value in readings:
        with suppress(Exception):  # an array is neither equal nor not
            if value is fault["input"] or value == fault["input"]:
                return path
    return readings[0][0]


def _tags_of(schema: JSONSchema, path: Sequence[Any]) -> list[str]:
    """The tags that a union may have at `path` by `schema`."""
    parts = [*in_place(schema)]
    for step in path:
        parts = [*in_place(*part_schemas(parts, step))]
    tags = [tag for part in parts for tag in part.get("enum", [part["const"]] if "const" in part else [])]
    return [*dict.fromkeys(map(str, tags))]


def pydantic_faults(error: ValidationError, values: Any, schema: JSONSchema | None = None) -> list[dict[str, str]]:
    """What pydantic finds wrong with `values`, of which `schema` says the tags of unions."""
    faults = []
    for each in error.errors(include_url=False)[:FAULTS_MAX]:
        path = _path_of(each, values)
        message = _IMPERSONAL.get(each["type"], each["msg"])
        if each["type"] == "missing":
            path.append(each["loc"][-1])
        elif each["type"] in ("union_tag_invalid", "union_tag_not_found"):
            field = each.get("ctx", {})["discriminator"].strip("'")
            tags = _tags_of(schema or {}, [*path, field])
            if tags:
                path.append(field)
                message = f"Input should be one of: {', '.join(tags)}"
        faults.append(fault_at(path, each["type"], message))
    return faults


def _check_required(_: Any, names: list[str], value: object, _schema: JSONSchema) -> Iterator[InvalidValue]:
    """The keyword `required` with errors at the missing property, which jsonschema's own name only in a sentence."""
    for name in names:
        if isinstance(value, dict) and name not in value:
            yield InvalidValue("Field required", path=[name])


_NamingValidator: Any = cast(Any, extend)(Draft202012Validator, {"required": _check_required})


def schema_faults(schema: JSONSchema, values: Any) -> list[dict[str, str]]:
    """What a dict schema refuses; of a union, what jsonschema takes for the most telling."""
    found = itertools.islice(_NamingValidator(schema).iter_errors(values), FAULTS_MAX)
    leaves = [best_match([error]) if error.context else error for error in found]
    return [fault_at(leaf.absolute_path, leaf.validator, leaf.message) for leaf in leaves]
