"""A function gets what its type hints say, and so does who called it, in the calls of a server and at every door."""

from __future__ import annotations

import asyncio
import enum
import functools
import gc
import importlib
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Self, TypeVar
from uuid import UUID

import pytest
from apcore import Executor, FunctionModule, Middleware, Registry
from apcore.context import Context
from apcore.decorator import module
from apcore.errors import ModuleError, SchemaValidationError
from apcore.utils.redaction import REDACTED_VALUE
from conftest import connect, registry_of
from pydantic import (
    AfterValidator,
    AliasChoices,
    AliasPath,
    BaseModel,
    Field,
    RootModel,
    create_model,
    field_validator,
    model_validator,
)
from support import MARK, SECRET_TEXT, Caplog, accept, asgi_client, asking, calls, listed, returning, sent
from typing_extensions import TypedDict

from apcore_mcp import discover, run_openai_call

T = TypeVar("T")

DAY = date(2026, 2, 3)
ISO = "2026-02-03"


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Tone(enum.StrEnum):
    DARK = "dark"


class Item(BaseModel):
    name: str
    day: date | None = None
    color: Color = Color.RED


class Cat(BaseModel):
    kind: Literal["cat"]
    born: date


class Dog(BaseModel):
    kind: Literal["dog"]
    weight: float


class Secret(BaseModel):
    name: str
    pin: str = Field(json_schema_extra=MARK)


class Days(RootModel[list[date]]): ...


@dataclass
class Point:
    x: float
    day: date | None = None


class Row(TypedDict, total=False):
    day: date
    share: float


class Pair(NamedTuple):
    number: int
    day: date


Pet = Annotated[Cat | Dog, Field(discriminator="kind")]


def registry_of_functions(*functions: Any, **named: Any) -> Registry:
    named |= {function.__name__: function for function in functions}
    return registry_of({f"f.{name}": FunctionModule(function, f"f.{name}") for name, function in named.items()})


async def answer(source: Any, name: str, **arguments: Any) -> Any:
    """What a model is told of a call: a result, or the text of an error."""
    text = await run_openai_call(source, f"f-{name}", arguments)
    return json.loads(text) if text.startswith("{") else text


def hinted(hint: Any) -> Callable[..., Any]:
    """A function that keeps what it gets as a `value` of the type `hint`."""

    def keep(value: Any) -> None:
        keep.got.append(value)  # type: ignore[attr-defined]

    keep.__annotations__["value"] = hint
    keep.got = []  # type: ignore[attr-defined]
    return keep


HINTS: list[tuple[Any, Any, Any]] = [
    (date, ISO, DAY),
    (datetime, "2026-02-03T10:00:00", datetime(2026, 2, 3, 10)),
    (timedelta, "PT90S", timedelta(seconds=90)),
    (UUID, str(UUID(int=7)), UUID(int=7)),
    (Decimal, 1.1, Decimal("1.1")),
    (Decimal, "1.10", Decimal("1.10")),
    (Color, "red", Color.RED),
    (Tone, "dark", Tone.DARK),
    (set[int], [1, 1, 2], {1, 2}),
    (tuple[int, date], [1, ISO], (1, DAY)),
    (Path, "/tmp", Path("/tmp")),
    (bytes, "abc", b"abc"),
    (float, 2, 2.0),
    (Item, {"name": "a", "day": ISO}, Item(name="a", day=DAY)),
    (Pet, {"kind": "dog", "weight": 3}, Dog(kind="dog", weight=3.0)),
    (Cat | Dog, {"kind": "cat", "born": ISO}, Cat(kind="cat", born=DAY)),
    (Days, [ISO], Days([DAY])),
    (Point, {"x": 1, "day": ISO}, Point(1.0, DAY)),
    (Row, {"day": ISO, "share": 1}, {"day": DAY, "share": 1.0}),
    (Pair, [1, ISO], Pair(1, DAY)),
    (NewType("UserId", int), 3, 3),
    (Annotated[str, AfterValidator(str.upper)], "abc", "ABC"),
    (date | None, ISO, DAY),
    (date | None, None, None),
    (list[Item], [{"name": "a"}], [Item(name="a")]),
    (dict[int, date], {"1": ISO}, {1: DAY}),
    (list[dict[str, set[int]]] | None, [{"a": [1, 1]}], [{"a": {1}}]),
    (Sequence[float], [1], [1.0]),
    (Annotated[date, Field(description="A day.")], ISO, DAY),
    (Any, {"a": [1, ISO]}, {"a": [1, ISO]}),
    (dict, {"a": 1}, {"a": 1}),
]
"""A hint, what a client sends, and what the function gets."""


@pytest.mark.parametrize(("hint", "sent", "expected"), HINTS, ids=lambda value: str(value)[:40])
async def test_a_function_gets_what_its_hint_says(hint: Any, sent: Any, expected: Any) -> None:
    function = hinted(hint)
    assert await answer(registry_of_functions(function), "keep", value=sent) == {}
    assert repr(function.got) == repr([expected])  # type: ignore[attr-defined]


WRONG: list[tuple[Any, Any]] = [
    (int, "21"), (int, True), (bool, "yes"), (str, 7), (date, "tomorrow"), (date, 0), (Color, "green"),
    (set[int], [1, "2"]), (Item, {"day": ISO}), (Pet, {"kind": "cow"}), (Point, {"x": "1"}), (list[date], [ISO, ""]),
    (Annotated[int, Field(le=3)], 4), (timedelta, 5), (date | None, ""),
]  # fmt: skip


@pytest.mark.parametrize(("hint", "sent"), WRONG, ids=str)
async def test_what_a_hint_does_not_say_reaches_no_function(hint: Any, sent: Any) -> None:
    """Nothing is guessed."""
    function = hinted(hint)
    registry = registry_of_functions(function)
    for text in (
        await answer(registry, "keep", value=sent),
        await answer(registry, "keep"),
        await answer(registry, "keep", value=sent, more=1),
    ):
        assert text.startswith("Input validation failed:\n- "), text
    assert function.got == []  # type: ignore[attr-defined]


SHARED: list[date] = []
_A_DAY: Any = Field(DAY, description="A day.")
_A_COUNT: Any = Field(3, ge=1)
_SOME_DAYS: Any = Field(default_factory=lambda: ["a"])


def traced(function: Any) -> Any:
    @functools.wraps(function)
    def trace(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return trace


@traced
async def awaited(day: date) -> str:
    return repr(day)


def forms() -> Iterator[tuple[Any, dict[str, Any], Any]]:
    """A function, what is sent, and what it got, as `repr` writes it."""
    yield awaited, {"day": ISO}, DAY

    async def later(day: date) -> str:
        await asyncio.sleep(0)
        return repr(day)

    yield later, {"day": ISO}, DAY

    def by_name(*, context: date, share: float = 2) -> str:
        return repr((context, share))

    yield by_name, {"context": ISO}, (DAY, 2)
    yield by_name, {"context": ISO, "share": 3}, (DAY, 3.0)

    def open_ended(day: date, **more: Any) -> str:
        return repr((day, more))

    yield open_ended, {"day": ISO, "on": ISO, "day2": 1}, (DAY, {"on": ISO, "day2": 1})

    def with_context(first: int, ctx: Context, day: date = DAY) -> str:
        return repr((first, type(ctx).__name__, ctx.redacted_inputs, day))

    yield with_context, {"first": 1, "day": ISO}, (1, "Context", {"first": 1, "day": ISO}, DAY)

    def own_defaults(day: date = "soon", days: list[date] = SHARED, share: float = 2) -> str:  # type: ignore[assignment]
        return repr((day, days is SHARED, share))

    yield own_defaults, {}, ("soon", True, 2)

    def models_defaults(day: date = _A_DAY, count: int = _A_COUNT, days: list[str] = _SOME_DAYS) -> str:
        return repr((day, count, days))

    yield models_defaults, {}, (DAY, 3, ["a"])
    yield models_defaults, {"day": ISO, "days": []}, (DAY, 3, [])

    def pydantics_names(schema: date, json: str, copy: float = 1, model_fields_set: float = 2) -> str:
        return repr((schema, json, copy, model_fields_set))

    yield pydantics_names, {"schema": ISO, "json": "a", "model_fields_set": 4}, (DAY, "a", 1, 4.0)

    def choices(
        day: Annotated[date, Field(validation_alias=AliasChoices("when", AliasPath("opts", "day")))],
        to: Annotated[str, Field(validation_alias="until")] = "there",
        **others: Any,
    ) -> str:
        return repr((day, to, others))

    yield choices, {"when": ISO, "until": "here"}, (DAY, "here", {})
    yield choices, {"opts": {"day": ISO}, "more": 1}, (DAY, "there", {"more": 1})


@pytest.mark.filterwarnings("ignore:Field name")
@pytest.mark.parametrize(("function", "sent", "expected"), [*forms()], ids=lambda value: getattr(value, "__name__", ""))
async def test_hints_hold_in_every_form_of_function(function: Any, sent: Any, expected: Any) -> None:
    registry = registry_of_functions(function)
    assert await answer(registry, function.__name__, **sent) == {"result": repr(expected)}
    assert await answer(registry, function.__name__, **sent) == {"result": repr(expected)}  # nothing is used up


CLINIC = """
from __future__ import annotations
from datetime import date
DAY = date(2026, 2, 3)
def is_day(day: date) -> bool: return day == DAY
class Clinic:
    def is_day(self, day: date) -> bool: return day == DAY
"""
DECORATED = "from apcore.decorator import module\nis_day = module(id='f.decorated')(is_day)\n"


async def test_hints_hold_at_every_door(tmp_path: Path) -> None:
    """A file's `@module`, one by hand, `module(f, id=...)`, and bindings of a function and of a class's method."""
    (tmp_path / "clinic_days.py").write_text(CLINIC)
    (tmp_path / "own.py").write_text(CLINIC + DECORATED)
    entries = [
        {"module_id": "f.bound", "target": "clinic_days:is_day"},
        {"module_id": "f.method", "target": "clinic_days:Clinic.is_day", "auto_schema": True},
    ]
    (tmp_path / "clinic.binding.yaml").write_text(json.dumps({"spec_version": "1.0", "bindings": entries}))
    registry = discover(tmp_path)
    is_day = importlib.import_module("clinic_days").Clinic().is_day
    registry.register("f.by_hand", FunctionModule(is_day, "f.by_hand"))
    registry.register("f.called", module(is_day, id="f.called"))
    registry.register("f.on_instance", module(id="f.on_instance")(is_day).apcore_module)
    names = ["bound", "by_hand", "called", "decorated", "method", "on_instance"]
    async with connect(registry) as client:
        assert await listed(client) == [f"f.{name}" for name in names]
        for name in names:
            assert (await client.call_tool(f"f.{name}", {"day": ISO})).structured_content == {"result": True}, name
            assert await answer(registry, name, day=ISO) == {"result": True}
    async with asgi_client(registry, explorer=True, allow_execute=True) as page:
        for name in names:
            response = await page.post(f"/explorer/tools/f.{name}/call", json={"day": ISO})
            assert response.json() == {"result": {"result": True}}


# ---- Other modules ----

PASSED: list[tuple[Any, Any, Any]] = [
    (set[int], (1, 1), {1}),
    (str, Tone.DARK, "dark"),
    (Item, {"name": "a", "day": DAY, "color": Color.BLUE}, Item(name="a", day=DAY, color=Color.BLUE)),
]
PASSED += HINTS
# Names that are no texts, apcore's own redaction does not read.
PASSED += [(hint, passed, passed) for hint, _, passed in HINTS if hint != dict[int, date]]
"""A hint, what another module passes, JSON's values or Python's, and what the function gets."""


async def test_a_function_that_another_module_calls_gets_the_same() -> None:
    """By `call` or `call_async`, with the caller's context or without."""
    functions = {f"n{number}": hinted(hint) for number, (hint, _, _) in enumerate(PASSED)}

    async def inner(ctx: Context) -> None:
        for number, (_, passed, _) in enumerate(PASSED):
            await ctx.executor.call_async(f"f.n{number}", {"value": passed}, ctx)
            await ctx.executor.call_async(f"f.n{number}", {"value": passed})

    def inner_sync(ctx: Context) -> None:
        for number, (_, passed, _) in enumerate(PASSED):
            ctx.executor.call(f"f.n{number}", {"value": passed}, ctx)

    registry = registry_of_functions(inner, inner_sync, **functions)
    assert [await answer(registry, name) for name in ("inner", "inner_sync")] == [{}, {}]
    for function, (hint, _, expected) in zip(functions.values(), PASSED, strict=True):
        assert repr(function.got) == repr([expected] * 3), hint  # type: ignore[attr-defined]


async def test_what_another_module_passes_wrongly_is_refused() -> None:
    """With JSON's values beside Python's too, which apcore reads as Python's; and what the function does not take."""
    function = hinted(date)
    told = []

    def reckless(ctx: Context) -> None:
        for passed in ({"value": "soon"}, {"value": [DAY, ISO]}, {"value": DAY, "more": 1}, {"value": ISO, "more": 1}):
            try:
                ctx.executor.call("f.keep", passed, ctx)
            except ModuleError as error:
                told.append(f"{type(error).__name__} {error}")

    assert await answer(Executor(registry_of_functions(function, reckless)), "reckless") == {}
    assert [text.split()[0] for text in told] == ["SchemaValidationError"] * 2 + ["ModuleExecuteError"] * 2
    assert "unexpected keyword argument 'more'" in told[-1]
    assert function.got == []  # type: ignore[attr-defined]


async def test_a_call_that_came_to_no_server_is_apcores_own() -> None:
    def look(day: date, share: float) -> str:
        return repr((day, share))

    def maybe() -> Item | None:
        return None

    executor = Executor(registry_of_functions(look, maybe))
    assert await answer(executor, "look", day=ISO, share=2) == {"result": repr((DAY, 2.0))}
    assert await executor.call_async("f.look", {"day": ISO, "share": 2}) == {"result": repr((ISO, 2))}
    with pytest.raises(SchemaValidationError, match="Output validation failed"):
        await executor.call_async("f.maybe", {})


async def test_by_other_schemas_a_function_gets_what_was_sent() -> None:
    def look(day: date) -> str:
        return repr(day)

    class Given(BaseModel):
        day: date

    class Own(FunctionModule):
        def __init__(self) -> None:
            super().__init__(look, "f.own")
            self.execute = self.run

        def run(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
            return {"result": repr(inputs["day"])}

    around = FunctionModule(look, "f.around")
    around.execute = traced(around.execute)
    given = FunctionModule(look, "f.given", input_schema=Given)
    registry = registry_of({"f.given": given, "f.own": Own(), "f.around": around})
    for name in ("given", "own", "around"):
        assert await answer(registry, name, day=ISO) == {"result": repr(ISO)}, name


# ---- What else looks at a call ----


class Hook(Middleware):
    """Keeps what it sees, and changes what `before` returns."""

    def __init__(self, **inputs: Any) -> None:
        super().__init__()
        self.inputs = inputs
        self.seen: list[Any] = []

    def before(self, module_id: str, inputs: dict[str, Any], context: Any) -> Any:
        self.seen += [inputs, context.redacted_inputs]
        return {**inputs, **self.inputs} if self.inputs else None

    def after(self, module_id: str, inputs: dict[str, Any], output: dict[str, Any], context: Any) -> Any:
        self.seen += [inputs, context.redacted_inputs, context.redacted_output]
        return {**output, "hooked": True}


async def test_hooks_and_who_approves_see_what_was_sent() -> None:
    function = hinted(date)
    hook = Hook()
    executor = Executor(registry_of_functions(function), middlewares=[hook])
    sent = {"value": ISO}
    assert await answer(executor, "keep", **sent) == {"hooked": True}
    assert hook.seen == [sent, sent, sent, sent, {}]
    for put in ("2026-02-04", date(2026, 2, 4)):
        assert await answer(Executor(executor.registry, middlewares=[Hook(value=put)]), "keep", **sent)
    assert function.got == [DAY, date(2026, 2, 4), date(2026, 2, 4)]  # type: ignore[attr-defined]
    asked = FunctionModule(function, "f.asked", annotations={"requires_approval": True})
    arguments, questions = asking(accept(approve=True))
    async with connect({"f.asked": asked}, client=arguments, validate_inputs=True) as client:
        assert not (await client.call_tool("f.asked", {"value": ISO})).is_error
        assert (await client.call_tool("f.asked", {"value": "soon"})).is_error
    (question,) = questions
    assert f'value: "{ISO}"' in question.message
    assert function.got[-1] == DAY  # type: ignore[attr-defined]


async def test_nothing_is_kept_of_a_function_that_is_gone() -> None:
    """Though the function leads to its module, which is what `@module` is for, and so do its types."""

    def made() -> tuple[Any, ...]:
        own = create_model("Own", __base__=Item)
        function = hinted(own | None)
        function.__defaults__ = (own(name="a"),)
        function.own = own  # type: ignore[attr-defined]
        return module(id="f.keep")(function), own

    function, own = made()
    own.function = function
    registry = registry_of({"f.keep": function.apcore_module})
    assert await answer(registry, "keep", value={"name": "a"}) == {}
    kept = [weakref.ref(function), weakref.ref(own), weakref.ref(function.apcore_module)]
    registry.unregister("f.keep")
    del function, own
    # What the call has left to the loop goes in its next turns.
    async with asyncio.timeout(30):
        while any(reference() is not None for reference in kept):
            await asyncio.sleep(0)
            gc.collect()


# ---- Results ----


async def test_a_generator_runs_where_its_function_does() -> None:
    """Not in the event loop, which it would hold up."""

    def give() -> Iterable[str]:
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        yield "a"

    async def give_later() -> Iterable[str]:
        return {"a": 1}.keys()

    modules = {f"f.{each.__name__}": FunctionModule(each, "f.give") for each in (give, give_later)}
    async with connect(modules) as client:
        for name in modules:
            assert (await client.call_tool(name)).structured_content == {"result": ["a"]}


class Checked(BaseModel):
    day: date

    @model_validator(mode="after")
    def _checked(self) -> Self:
        return self


class Plant(BaseModel):
    height: float

    @field_validator("height")
    @classmethod
    def grow(cls, height: float) -> float:
        return height + 1


class Bed(BaseModel, Generic[T]):
    plants: list[T]


def planted() -> Bed[Annotated[Plant, Field(title="A plant")]]:
    return Bed(plants=[Plant(height=1)])  # type: ignore[arg-type]


async def test_a_generic_in_a_text_hint_is_sent_as_it_is() -> None:
    """Of which pydantic makes another class whenever it is evaluated."""
    assert await answer(registry_of_functions(planted), "planted") == {"plants": [{"height": 2.0}]}


SENT = {"name": "a", "day": None, "color": "red"}
RESULTS: list[tuple[Any, Any, Any]] = [
    (list[Checked], [{"day": ISO}], [{"day": ISO}]),
    (Item | None, Item(name="a", day=DAY), {**SENT, "day": ISO}),
    (Item | None, None, None),
    (int | None, 3, 3),
    (Item | str, Item(name="a"), SENT),
    (Item | str, "none", "none"),
    (Pet, Cat(kind="cat", born=DAY), {"kind": "cat", "born": ISO}),
    (dict | None, {}, {}),
    (dict | None, None, None),
    (dict[str, Item] | None, {"a": Item(name="a")}, {"a": SENT}),
    (list[Item], [Item(name="a")], [SENT]),
    (Any, None, None),
    (Any, {"a": DAY}, {"a": ISO}),
    (Any, Item(name="a"), SENT),
    (Row, {"day": DAY, "share": 1.5}, {"day": ISO, "share": 1.5}),
    (Mapping[str, int], {"a": 1}, {"a": 1}),
    (Point, Point(1, DAY), {"x": 1, "day": ISO}),
    (date, DAY, ISO),
    (float, 2, 2),
    (Annotated[Item | None, Field(description="Maybe.")], None, None),
]
"""What a function's hint says that it returns, what it does, and what is sent of it as `result`."""


def test_a_result_is_what_its_hint_and_the_promise_say() -> None:
    for hint, value, written in RESULTS:
        assert sent(returning(hint, value), value) == {"result": written}, hint


@pytest.mark.parametrize(("hint", "value", "expected"), [
    (None, None, {}),
    (dict, {"a": 1}, {"a": 1}),
    (dict[str, Item], {"a": Item(name="a")}, {"a": SENT}),
    (dict[int, str], {1: "a"}, {"1": "a"}),
    (dict[Any, str], {1: "a"}, {"1": "a"}),
    (Item, Item(name="a"), SENT),
    (Item, {"name": "a"}, SENT),
    (Item | None, Item(name="a"), {"result": SENT}),
], ids=str)  # fmt: skip
async def test_a_dict_and_a_model_stay_results_of_their_own(hint: Any, value: Any, expected: Any) -> None:
    """Also where another module calls, to which apcore gives a dict that was returned as it is."""
    registry = registry_of({"f.give": returning(hint, value), "f.relay": calls("f.give")})
    for name in ("give", *(() if isinstance(value, dict) and hint is not dict else ("relay",))):
        assert await answer(registry, name) == expected


@pytest.mark.parametrize("hint", [Secret | None, list[Secret] | Secret, Secret], ids=str)
async def test_what_a_result_marks_is_hidden_from_clients_and_hooks(hint: Any) -> None:
    hook = Hook()
    secret = Secret(name="a", pin=SECRET_TEXT)
    executor = Executor(registry_of({"f.give": returning(hint, secret)}), middlewares=[hook])
    hidden = {"name": "a", "pin": REDACTED_VALUE}
    told = await answer(executor, "give")
    assert told.pop("hooked")
    assert told in ({"result": hidden}, hidden)
    if version("apcore") != "0.32.0":  # whose redaction for hooks looks into no union
        assert hook.seen[-1] == told


# ---- What nobody can send ----


def wipe(path: str, *, _dry_run: bool = False) -> str:
    return "tried" if _dry_run else "wiped"


def memo(n: int, _seen: dict[int, int] = {}, **others: Any) -> int:  # noqa: B006  # an idiom
    return n + len(_seen) + sum(others.values())


async def test_a_parameter_that_is_no_argument_keeps_its_default() -> None:
    """apcore's model leaves out names that begin with an underscore."""
    registry = registry_of_functions(wipe, memo)
    assert await answer(registry, "wipe", path="x") == {"result": "wiped"}
    assert await answer(registry, "memo", n=1, more=2) == {"result": 3}
    assert await answer(registry, "memo", n=1, _seen=2) == "Internal error occurred"


async def test_a_parameter_without_a_name_costs_its_function(caplog: Caplog) -> None:
    """Nothing would check one, and nothing could be given to the others."""

    def flags(**flags: bool) -> str:
        return repr(flags)

    def weigh(first: float, *others: float) -> float:
        return first + sum(others)

    def share(cake: float, /, guests: int = 2) -> float:
        return cake / guests

    async with connect(registry_of_functions(flags, weigh, share, awaited)) as client:
        assert await listed(client) == ["f.awaited"]
    for words in ("what `**flags` is given", "to `others` by its name", "to `cake` by its name"):
        assert words in caplog.text
