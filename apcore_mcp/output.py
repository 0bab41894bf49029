"""Output: what a module gives, checked by what declares it and written once, as plain JSON.

What stands above it hands it a module and later what that module gave, and learns what is advertised and marked of it.
"""

from __future__ import annotations

import dataclasses
import json
import marshal
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any, get_origin

from apcore import ModuleDescriptor, ModuleError, errors
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic_core import SchemaValidator, from_json, to_json

from .arrays import in_pythons_types
from .faults import fault_at, faults_in, pydantic_faults
from .functions import Function
from .hints import (
    BASE64,
    DECIMAL,
    CoreSchema,
    core_schema_of,
    hints_mark,
    how_written,
    is_open,
    marks_in_form,
    marks_of,
    nodes_of,
    read_form,
    rewritten,
    subclasses_mark,
    unsent_fields,
    written_form,
)
from .promises import validator_of
from .reading import Reader
from .schemas import (
    JSONObject,
    JSONSchema,
    ModelType,
    SchemaConverter,
    UnconvertibleSchema,
    admits_object,
    in_place,
    is_json,
    marks_of_schema,
    marks_sensitive,
    mentions_mark,
    plain_json,
    promise_of,
    subschemas,
    without_defaults,
)
from .values import (
    as_json,
    check_names,
    check_values,
    dumped,
    holds_bytes,
    is_array,
    marks_default,
    marks_in,
    not_json,
    redact,
)


class RefusedOutput(errors.SchemaValidationError):
    """The output of a module does not fit what it declares: the module has run."""

    def __init__(self, faults: list[dict[str, str]], output: Any) -> None:
        kind = f"{type(output).__module__}.{type(output).__qualname__}"
        # No messages, which quote values.
        places = ", ".join(f"{fault['field'] or '(root)'}: {fault['code']}" for fault in faults)
        super().__init__(f"Output validation failed: {places} (it is a {kind})", faults)


_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


class Output:
    """What a module gives: checked by what declares it, and written once, in the form that `schema` describes.

    A function's return hint and a class's model are pydantic's: its serializers and aliases hold. Dicts are made what
    these say, and checked; an instance is what it is, is written, and what is written is held against the promise. A
    dict schema, and what nothing declares, is written by JSON's rules. Everything but a dict and a model is put under
    `result`, as apcore promises it, and so is a model that is no object."""

    def __init__(self, module: Any, descriptor: ModuleDescriptor, function: Function | None) -> None:
        self._function = function
        self._declared = getattr(module, "output_schema", None)
        self._adapter: TypeAdapter[Any] | None = None
        schema = descriptor.output_schema
        if function is not None and get_origin(function.returns) is dict:
            self._adapter = TypeAdapter(function.returns, config=_ANY_CLASS)
            schema = written_form(function.returns, self._adapter)
        elif isinstance(self._declared, ModelType) and (function is None or function.returns is not dict):
            self._adapter = TypeAdapter(self._declared)
            if function is not None and function.is_wrapped:  # for which apcore's model believes dataclasses
                model = create_model("Result", __config__=_ANY_CLASS, result=(function.returns, ...))
                self._adapter = TypeAdapter(model)
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
        self.marks = [marks_of_schema(self.schema)] if marks_sensitive(self.schema) else []
        self.unsent: list[str] = []  # the fields of dataclasses that pydantic does not know
        # What its core schema leaves open, pydantic would guess; there, JSON's rules write what it makes of the rest.
        self._is_open = True
        self._core_schema: CoreSchema = {}
        if self._adapter is not None:
            self._core_schema = core_schema_of(self._adapter)
            nodes = nodes_of(self._core_schema)
            self.unsent = unsent_fields(nodes)
            self._is_open = is_open(self._core_schema) or not self.schema
            if self._is_open or marks_default(nodes):
                self.schema = without_defaults(self.schema)
            if self._is_open:  # what is written may have the names by which it is read
                read = marks_in_form(read_form(self._declared, self._adapter))
                self.marks += [read] if read else []

    @cached_property
    def _rewritten(self) -> list[CoreSchema]:
        """By which an author's function writes what no JSON schema describes."""
        return rewritten(self._core_schema, self._core_schema)

    @cached_property
    def _rewrites_marked(self) -> bool:
        """Whether such a function writes what the hint marks."""
        if self._adapter is None or self._function is None or not self._function.is_wrapped:
            return any(hints_mark(node, self._core_schema) for node in self._rewritten)
        nodes = nodes_of(self._core_schema)
        return bool(how_written(next(node["cls"] for node in nodes if node["type"] == "model")).marked)

    @cached_property
    def _formats(self) -> set[str]:
        parts = [] if self._adapter is None else subschemas(self.schema)
        return {part["format"] for part in parts if "format" in part}

    @cached_property
    def _forms(self) -> list[JSONSchema]:
        """By which numbers are written where Decimals are meant, and bytes."""
        return [*in_place(self.schema)] if self._formats & {DECIMAL, BASE64} else []

    @cached_property
    def _reader(self) -> Reader:
        assert self._adapter is not None
        return Reader(self._adapter)

    @cached_property
    def _promise(self) -> SchemaValidator:
        return validator_of(promise_of(self.schema, "format"))

    def write(self, output: Any, redacts: bool) -> tuple[JSONObject, bytes]:
        """What a module gave as plain JSON, and its text; RefusedOutput for what does not fit. With `redacts`, what
        models mark is hidden that `schema` does not describe."""
        function = self._function
        returned = output
        if function is not None and function.is_wrapped:
            output = {"result": output}
        given = output  # with its models, which may mark something
        if function is not None and function.is_foreign:
            output = function.output(output)
            given = returned if isinstance(returned, BaseModel) else output
        elif output is None and (self._adapter is None if function is None else function.returns is type(None)):
            output = {}
        try:
            written, text, values = self._serialize(output)
            if output is not given:
                values.append(given)
            hidden = written
            for value in values if redacts else ():  # one by one: what one names may be no name to another
                hidden = redact(hidden, self._marks_in(value))
            if self._is_root:
                is_shown = hidden is written
                written, text = {"result": written}, b'{"result":%s}' % text
                hidden = written if is_shown else {"result": hidden}
            if not isinstance(written, dict):
                raise RefusedOutput([fault_at([], "type", "A module returns a dict or a model")], returned)
            self._check(text, written, returned)
            if not isinstance(hidden, dict):  # all of it is marked
                hidden = {"result": hidden}
            if hidden is not written:
                written, text = hidden, to_json(hidden)
                if not self.marks:  # clients hold it against the promise
                    self._check(text, written, returned)
        except (errors.SchemaValidationError, ModuleError):
            raise
        except Exception as error:  # a module's own __str__ may raise anything
            raise not_json(error) from None
        return written, text

    def _serialize(self, output: Any) -> tuple[Any, bytes, list[Any]]:
        """What a module gave as plain JSON, its text, and the values in which models mark what `schema` may not."""
        if self._adapter is not None:
            is_plain = self._is_open and not (self._rewritten or self._rewrites_marked or self._forms)
            is_plain = is_plain and _read_back(output)[0]
            value = self._read(self._reader, output, is_plain)
            read = vars(value) if self._function is not None and self._function.is_wrapped else value
            if is_plain and read == output:  # much of it would take seconds, looked at part by part
                written = self._adapter.dump_python(value, mode="json", by_alias=True, warnings=False)
                return written, to_json(written), []
            if not self._is_open:
                with suppress(ValueError):
                    # Pydantic warns of what it writes by another schema than this.
                    written = self._adapter.dump_python(value, mode="json", by_alias=True, warnings="error")
                    text = to_json(written, inf_nan_mode="constants")
                    if not (b"NaN" in text or b"Infinity" in text) or is_json(written):
                        return written, text, [value] if subclasses_mark(self._reader.kinds) else []
            check_values(value)
            dump = partial(self._adapter.dump_python, value)
            python, form = dumped(dump, partial(self._adapter.dump_json, value))
            written = plain_json(as_json(python, self._forms, form=form))
            return written, to_json(written), [value] if value is output else [value, output]
        is_plain, written = _read_back(output)
        if not is_plain:
            written = plain_json(as_json(output, [*in_place(self.schema)]))
        if self._declared is not None and not isinstance(self._declared, ModelType):
            try:
                self._declared.model_validate(written, strict=True)
            except errors.SchemaValidationError as error:
                raise RefusedOutput(faults_in(error), output) from None
        return written, to_json(written), [] if is_plain else [output]

    def _read(self, reader: Reader, output: Any, is_plain: bool) -> Any:
        """What a module gave, with models in the place of the dicts that are to be some."""
        if self._is_open and not is_plain:
            check_names(output)
        is_numpys = isinstance(output, dict) and hasattr(output.get("result"), "dtype")
        if not is_numpys and not reader.walks:  # pydantic would make a number of a duration
            with suppress(ValidationError):
                return reader.read(output)
        plain = in_pythons_types(output)
        try:
            return reader.read(plain)
        except ValidationError as error:
            with suppress(ValueError):  # rows as a file or a frame gave them: the text of a date, of an enum
                is_made = any(isinstance(each, reader.kinds) for each in _instances(plain))  # and not to be made anew
                if is_made or not marks_in(plain):  # what another type marks would be sent
                    read = reader.read(plain, strict=False) if is_made else reader.read_json(to_json(plain))
                    # A text is the name of a file, unless bytes are to be texts.
                    if BASE64 in self._formats or holds_bytes(plain) or not holds_bytes(read):
                        return read
            is_wrapped = self._function is not None and self._function.is_wrapped
            raise RefusedOutput(pydantic_faults(error, output), output["result"] if is_wrapped else output) from None

    def _check(self, text: bytes, written: JSONObject, returned: Any) -> None:
        """Hold what is written against the promise."""
        if self._adapter is not None:
            try:
                self._promise.validate_json(text, strict=True)
            except ValidationError as error:
                raise RefusedOutput(pydantic_faults(error, written), returned) from None

    def _marks_in(self, value: Any) -> JSONSchema:
        marks = marks_in(value)
        if (marks and self._rewritten) or self._rewrites_marked:
            return {"additionalProperties": {"x-sensitive": True}}
        return marks


_ENCODER = json.JSONEncoder(allow_nan=False)  # pydantic's would use up a generator


def _read_back(value: Any) -> tuple[bool, Any]:
    """Whether a value is what its JSON says (no model, date or set is in it, and no key 1), and what that says."""
    with suppress(ValueError, TypeError, RecursionError):
        written = from_json(_ENCODER.encode(value))
        # A text of a class of its own may mark itself.
        return bool(written == value) and not any(map(marks_of, _classes_in(value))), written
    return False, None


def _classes_in(value: Any) -> set[type]:
    """The subclasses of Python's own types in what JSON has."""
    with suppress(ValueError):
        marshal.dumps(value)  # which takes no subclass, and says so in no time: most results have none
        return set()
    found = set[type]()
    parts = [value]
    while parts:
        part = parts.pop()
        found.add(type(part))
        if isinstance(part, (dict, list, tuple)):
            parts += part.values() if isinstance(part, dict) else part
    return found - {dict, list, tuple, str, int, float, bool, type(None)}


def _instances(value: Any) -> Iterator[Any]:
    """The models and dataclasses in a value, but for what is in them."""
    if isinstance(value, BaseModel) or dataclasses.is_dataclass(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _instances(item)
    elif is_array(value):
        for item in value:
            yield from _instances(item)
