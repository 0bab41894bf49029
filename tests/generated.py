"""Schemas and values that hypothesis generates: pydantic models, what fits them, and what nearly does."""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal, NamedTuple

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from pydantic import Field, create_model

# The same examples in every run, and no search for a smaller one: that can take minutes.
QUICK = settings(
    max_examples=60,
    derandomize=True,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Value(NamedTuple):
    """One value in three forms: as a caller writes it, as strict mode makes a model write it, and as it comes back."""

    plain: Any
    sent: Any
    back: Any


ABSENT = object()

Shape = tuple[Any, st.SearchStrategy[Value], bool]
"""A type annotation, the values that it accepts, and whether null is one."""
LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    (str, st.text("ab1", max_size=3)),
    (int, st.integers(-9, 9)),
    (bool, st.booleans()),
    (float, st.floats(-9, 9, width=16)),
    (Literal["a", "b"], st.sampled_from("ab")),
    (Colour, st.sampled_from(["red", "blue"])),
    (Annotated[int, Field(ge=0, le=5)], st.integers(0, 5)),
    (int | str, st.integers(0, 5) | st.text("ab", max_size=2)),
]


@st.composite
def shapes(draw: st.DrawFn, depth: int, maps: bool) -> Shape:
    """A type of up to `depth` levels. With `maps`, also what strict mode cannot say: dicts and tuples."""
    deep = ["list", "model", "union", "tagged", *(["dict", "tuple"] if maps else [])]
    kind = draw(st.sampled_from([*(deep if depth else []), "leaf", "null"]))
    if kind == "leaf":
        annotation, plain = draw(st.sampled_from(LEAVES))
        return annotation, plain.map(lambda x: Value(x, x, x)), False
    if kind == "model":
        return draw(models(depth - 1, maps))
    if kind in ("union", "tagged"):
        ends = ("x", "y") if kind == "union" else ("", "")
        tags = (None, None) if kind == "union" else ("x", "y")
        sides = [draw(models(depth - 1, maps, end, tag)) for end, tag in zip(ends, tags, strict=True)]
        either: Any = sides[0][0] | sides[1][0]
        if kind == "tagged":
            either = Annotated[either, Field(discriminator="kind")]
        return either, sides[0][1] | sides[1][1], False
    inner, values, _ = draw(shapes(depth - 1, maps) if depth else shapes(0, maps).filter(lambda s: not s[2]))
    if kind == "null":
        return inner | None, st.just(Value(None, None, None)) | values, True
    if kind == "dict":
        return dict[str, inner], st.dictionaries(st.sampled_from("ab$"), values, max_size=2).map(whole), False
    if kind == "tuple":
        return tuple[inner, int], st.tuples(values, st.just(Value(1, 1, 1))).map(whole), False
    return list[inner], st.lists(values, max_size=2).map(whole), False


def whole(parts: Any) -> Value:
    """A list, tuple or dict of values as one value."""
    if isinstance(parts, dict):
        forms = ({k: v[form] for k, v in parts.items() if v[form] is not ABSENT} for form in range(3))
        return Value(*forms)
    return Value(*([value[form] for value in parts] for form in range(3)))


@st.composite
def models(draw: st.DrawFn, depth: int = 2, maps: bool = False, end: str = "", tag: str | None = None) -> Shape:
    """A pydantic model of fields whose names end in `end`; `tag` is what its field `kind` always says."""
    fields: dict[str, Any] = {}
    values: dict[str, st.SearchStrategy[Value]] = {}
    if tag is not None:
        fields["kind"], values["kind"] = (Literal[tag], ...), st.just(Value(tag, tag, tag))
    for name in draw(st.lists(st.sampled_from(["a", "b", "default", "title"]), min_size=1, max_size=3, unique=True)):
        annotation, present, nullable = draw(shapes(depth, maps))
        required = draw(st.booleans())
        fields[name + end] = (annotation, Field(... if required else None, description="its own"))
        absent = st.just(Value(ABSENT, None, None if nullable else ABSENT))
        values[name + end] = present if required else present | absent
    model = create_model(f"M{draw(st.integers(0, 10**6))}", **fields)
    return model, st.fixed_dictionaries(values).map(whole), False


JUNK = st.sampled_from([None, True, -1, 2.5, "zz", "red", [], [None], {}, {"kind": "x"}, {"a": 1}])


def mutations(value: Any) -> st.SearchStrategy[Any]:
    """`value` with something in it replaced, left out or added."""
    options = [JUNK]
    if isinstance(value, dict):
        names = st.sampled_from(["a", "ax", "kind", "z"])
        options.append(st.builds(lambda name, junk: {**value, name: junk}, names, JUNK))
        for key in value:
            options.append(st.just({k: v for k, v in value.items() if k != key}))
            options.append(mutations(value[key]).map(lambda new, key=key: {**value, key: new}))
    if isinstance(value, list):
        options.append(JUNK.map(lambda junk: [*value, junk]))
        for index, item in enumerate(value):
            options.append(mutations(item).map(lambda new, i=index: [*value[:i], new, *value[i + 1 :]]))
    return st.one_of(options)
