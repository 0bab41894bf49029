"""Functions: what a module that apcore has made of a function takes, by its hints, and gives, by its return hint.

A view of apcore's `FunctionModule`, which knows more of the function than apcore passes on. Nothing of MCP is in it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from apcore import FunctionModule
from apcore.context import Context
from pydantic import AliasChoices, AliasPath, BaseModel, Field, create_model
from pydantic.fields import FieldInfo

__all__ = ["Function", "function_of"]


def is_apcores(thing: Any) -> bool:
    """Whether apcore has made `thing`, a class or a function, while it made a module of a function."""
    return getattr(thing, "__module__", None) == FunctionModule.__module__ and not hasattr(thing, "__wrapped__")


class Function:
    """The function that apcore has made a module of, called with what its hints say.

    apcore makes a model of the hints and validates by it, but hands on what was sent: the text of a date, the list of a
    set. This goes when `FunctionModule` passes on what its model has read.

    `model` reads the arguments, or is None where the module has a schema of its own: then the function is given what
    was sent. `returns` is the hint of what the function returns, and `unnamed` a parameter to which nothing can be
    given by name, as arguments are: `*others`, or one before a `/`."""

    def __init__(self, module: FunctionModule) -> None:
        # Private, as apcore has no public name for it, and its `execute` makes a dict of a model that is returned.
        self.function: Callable[..., Any] = module._func  # pyright: ignore[reportPrivateUsage]
        hints: dict[str, Any] = {}
        with suppress(NameError):  # apcore looks for the Context in the same way
            hints = get_type_hints(self.function, include_extras=True)
        self.returns: Any = hints.pop("return", Any)
        if repr(module.output_schema) == repr(self.returns):
            self.returns = module.output_schema  # of a text, apcore has made another `Page[Annotated[...]]` than this
        self.is_async = inspect.iscoroutinefunction(self.function)
        self._contexts = [name for name, hint in hints.items() if hint is Context]
        self._parameters = inspect.signature(self.function).parameters
        self.others = next((p for p in self._parameters.values() if p.kind is p.VAR_KEYWORD), None)
        self.others_hint = Any if self.others is None else hints.get(self.others.name, Any)
        self.unnamed = next((p for p in self._parameters.values() if p.kind is p.POSITIONAL_ONLY), None)
        self.model: Any = None
        self._filled: list[str] = []  # parameters whose default only the model has: `limit: int = Field(10, le=50)`
        if is_apcores(module.input_schema):
            variadic = (p for p in self._parameters.values() if p.kind is p.VAR_POSITIONAL)
            self.unnamed = self.unnamed or next(variadic, None)
            self.model = _completed(module.input_schema, hints, self._parameters)
            for name, field in self.model.model_fields.items():
                default = self._parameters[name].default
                if not field.is_required() and (default is inspect.Parameter.empty or isinstance(default, FieldInfo)):
                    self._filled.append(name)
        # A schema of a binding's or an adapter's, which says nothing of the hint.
        self.is_foreign = not is_apcores(module.output_schema) and module.output_schema is not self.returns
        self._is_listed = get_origin(self.returns) in (Iterable, Generator)
        if self._is_listed:  # by which pydantic would ask no hint how the items are written
            items = get_args(self.returns) or (Any,)
            list_of: Any = list
            self.returns = list_of[items[0]]
        # Of every other hint than a model or a dict, apcore promises `{"result": ...}`.
        self.is_wrapped = is_apcores(module.output_schema) and "result" in module.output_schema.model_fields

    def arguments(self, read: BaseModel, sent: dict[str, Any]) -> dict[str, Any]:
        """What the function is called with, by what its model has read of what was sent: that, defaults that it lacks,
        and what it does not take, for Python to refuse."""
        known: set[Any] = set()
        for name, field in self.model.model_fields.items():
            known.update(_spellings(field) or [name])
        names = {*read.model_fields_set, *self._filled}
        others = {name: value for name, value in sent.items() if name not in known}
        return {**others, **{name: value for name, value in read if name in names}}

    def bound(self, arguments: dict[str, Any], context: Context[Any]) -> Callable[[], Any]:
        """A call of the function with these arguments and the call's context."""
        call = functools.partial(self.function, **{**arguments, **dict.fromkeys(self._contexts, context)})
        if not self._is_listed:
            return call

        async def listed_later() -> Any:
            return _listed(await call())

        # What a generator does takes its time, in the function's own thread.
        return listed_later if self.is_async else lambda: _listed(call())

    def output(self, returned: Any) -> dict[str, Any]:
        """What the function returned, in the form that apcore has promised to other modules."""
        if self.is_wrapped:
            return {"result": returned}
        if returned is None:
            return {}
        if isinstance(returned, BaseModel):
            return returned.model_dump(warnings=False)  # they quote values
        return returned if isinstance(returned, dict) else {"result": returned}


def _listed(returned: Any) -> Any:
    """A list of what can be iterated over, but for what is one value in JSON."""
    is_one = isinstance(returned, str | bytes | Mapping | BaseModel) or not isinstance(returned, Iterable)
    return returned if is_one else [*returned]


def _spellings(field: FieldInfo) -> list[Any]:
    """The names by which a field that has aliases is sent: of a path, the first step."""
    alias = field.validation_alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias] if alias else []
    return [choice.path[0] if isinstance(choice, AliasPath) else choice for choice in choices]


def _completed(model: type[BaseModel], hints: dict[str, Any], parameters: Mapping[str, Any]) -> type[BaseModel]:
    """`model`, which apcore has made of `hints`, with what else stands in the hints: the default of
    `size: Annotated[int, Field(default=7)]`, which apcore says is required, and a text, which describes the argument:
    `height: Annotated[float, "metres"]`."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        hint = hints.get(name)
        given = parameters[name].default
        default = ... if given is inspect.Parameter.empty else given
        description = field.description
        for part in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
            if field.is_required() and isinstance(part, FieldInfo) and not part.is_required():
                default = part
                fields[name] = (hint, default)
            if isinstance(part, str) and description is None:
                description = part
        if description != field.description:
            fields[name] = (Annotated[hint, Field(description=description)], default)
    return create_model(model.__name__, __base__=model, **fields) if fields else model


def function_of(module: Any) -> Function | None:
    """The function that a module was made of; None for a class, and where `execute` is not apcore's."""
    if isinstance(module, FunctionModule) and is_apcores(module.execute):
        return Function(module)
    return None
