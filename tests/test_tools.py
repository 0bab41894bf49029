"""A module as clients see it: its names, annotations and descriptions (FR-ANNOT-*, FR-SERVER-011)."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from apcore import FunctionModule, ModuleAnnotations, Registry
from conftest import FunctionalModule, client_of, connect, echo, registry_of, serving
from mcp_types import Implementation
from support import Caplog, Size, StreamingModule, gives, listed, messages_logged, one, overlay, parsed, success_text

from apcore_mcp import from_openai_call, to_openai_tools

# ---- Tool definitions ----

DEFAULTS = {"read_only_hint": False, "destructive_hint": False, "idempotent_hint": False, "open_world_hint": True}
FLAGS = ("requires_approval", "streaming", "cacheable", "paginated")
DEFAULTS |= dict.fromkeys(FLAGS, False)
# By what name a tool tells what its module declares.
TOLD = {"readonly": "read_only_hint", "destructive": "destructive_hint", "idempotent": "idempotent_hint"}
TOLD |= {"open_world": "open_world_hint", **{flag: flag for flag in FLAGS}}
# What a module declares, and what is told of it that is not the default.
ANNOTATED: list[tuple[ModuleAnnotations | None, dict[str, bool]]] = [(None, {})]
for name, told in TOLD.items():
    ANNOTATED.append((ModuleAnnotations(**{name: not DEFAULTS[told]}), {told: not DEFAULTS[told]}))


@pytest.mark.requirement("FR-ANNOT-001", "FR-ANNOT-002", "FR-ANNOT-003", "FR-ANNOT-004", "FR-ANNOT-005", "FR-ANNOT-006")
async def test_a_tool_tells_what_its_module_declares() -> None:
    facts: dict[str, Any] = {"description": "Makes it smaller. é", "version": "2.1.0", "input_schema": Size}
    facts["tags"] = ["image", "fast"]
    modules = {
        f"image.m{number:02}": StreamingModule([], name="Resize", annotations=annotations, **facts)
        for number, (annotations, _) in enumerate(ANNOTATED)
    }
    async with connect({**modules, "nameless.resize_all": echo}) as client:
        *tools, nameless = (await client.list_tools()).tools
    assert nameless.annotations is not None
    assert nameless.title == nameless.annotations.title == "Resize all"
    for tool, (_, different) in zip(tools, ANNOTATED, strict=True):
        assert (tool.title, tool.description) == ("Resize", "Makes it smaller. é")
        assert tool.input_schema["required"] == ["width", "made"]
        assert tool.annotations is not None
        assert tool.annotations.title == "Resize", "where clients up to 2025-03-26 look for it"
        told = {key.removeprefix("apcore/"): value for key, value in (tool.meta or {}).items()}
        assert (told["version"], told["tags"]) == ("2.1.0", ["image", "fast"])
        told |= tool.annotations.model_dump(include=set(DEFAULTS))
        assert {key: told[key] for key in DEFAULTS} == {**DEFAULTS, **different}


def test_an_annotation_is_true_or_false_whatever_a_module_wrote() -> None:
    """TypeScript clients lose the whole list by a hint that is neither; apcore takes anything for true or false."""
    annotations = ModuleAnnotations(readonly="yes", destructive=None, streaming=1)  # type: ignore[arg-type]
    with serving(registry_of({"demo.a": FunctionalModule(echo, annotations=annotations)}), explorer=True) as url:
        (tool,) = httpx.get(f"{url}/explorer/tools").json()
    hints = tool["annotations"]
    assert (hints["readOnlyHint"], hints["destructiveHint"]) == (True, False)
    assert tool["_meta"]["apcore/streaming"] is True


OVERLAY = {"alias": "shrink", "description": "Shrinks a picture.", "guidance": "Ask for the size first."}
ADVICE = {"x-when-to-use": "Before an upload.", "x-when-not-to-use": "For vector graphics."}
ADVICE |= {"x-common-mistakes": "Sizes in inches.", "x-workflow-hints": "Then image.store."}
PLAIN = "Makes it smaller."
SAID: list[tuple[dict[str, Any], list[str]]] = [
    ({"display": {"mcp": {"description": ""}, "cli": OVERLAY}}, [PLAIN]),
    ({"display": {"mcp": "Resizer"}}, [PLAIN]),
    ({"x-deprecation": {}}, [PLAIN]),
    (
        {"x-deprecation": {"deprecated_since": "1.2.0", "sunset_version": "2.0.0", "sunset_date": "2027-01-31",
                           "migration_guide": "Use image.scale."}},
        [PLAIN, "Deprecated since 1.2.0, until 2.0.0, until 2027-01-31. Use image.scale."],
    ),
    ({"x-deprecation": {"reason": "old"}}, [PLAIN, "Deprecated."]),
    (
        {"x-deprecation": {"deprecated_since": 1.2, "migration_guide": ["a"]}, "display": {"mcp": OVERLAY}, **ADVICE},
        ["Shrinks a picture.", "Guidance: Ask for the size first.", "When to use: Before an upload.",
         "When not to use: For vector graphics.", "Common mistakes: Sizes in inches.",
         "Workflow hints: Then image.store.", "Deprecated since 1.2. ['a']"],
    ),
]  # fmt: skip
"""A module's metadata, and the paragraphs that agents are told."""


def documented(text: str | None) -> Any:
    def move(day: int) -> None: ...

    move.__doc__ = text
    return move


ONE_LINE, SUMMARY = "Move an order.", "Move an order\n    to another day.\n    "
DESCRIBED: list[tuple[str | None, dict[str, Any], str]] = [
    (f"{SUMMARY}\n    Not told.", {}, "Move an order to another day."),
    (f"{SUMMARY}Args:\n        day: The new day.\n    ", {}, "Move an order to another day."),
    (f"{SUMMARY}:param day: The new day.\n    ", {}, "Move an order to another day."),
    (ONE_LINE, {}, ONE_LINE),
    (None, {}, "Module move"),
    (SUMMARY, {"description": "Own."}, "Own."),
    (SUMMARY, {"display": {"mcp": {"description": "Of the operator."}}}, "Of the operator."),
    (ONE_LINE, {"display": {"mcp": {"guidance": "Ask first."}}}, f"{ONE_LINE}\n\nGuidance: Ask first."),
]
"""A docstring, what `@module` was given, and how the tool is described. apcore takes the docstring's first line."""


async def test_what_agents_are_told_of_a_module() -> None:
    """By MCP and OpenAI alike."""
    modules: list[tuple[Any, str]] = [
        (FunctionalModule(echo, description=PLAIN, metadata=metadata), "\n\n".join(said)) for metadata, said in SAID
    ]
    modules += [(FunctionModule(documented(text), "t.m", **options), told) for text, options, told in DESCRIBED]
    registry = registry_of({f"t.m{number:02}": module for number, (module, _) in enumerate(modules)})
    expected = [told for _, told in modules]
    async with connect(registry) as client:
        assert [tool.description for tool in (await client.list_tools()).tools] == expected
    assert [function["function"]["description"] for function in to_openai_tools(registry)] == expected


@pytest.mark.parametrize("tags", [["a", "b"], ("b", "a", "b"), {"b"}, None], ids=str)
async def test_the_tags_that_are_listed_are_those_that_choose_modules(tags: Any) -> None:
    """apcore's definition has the tags of `_meta.yaml`, or of a list; its registry looks at the module's as well."""
    registry = Registry()
    registry.register("t.m", FunctionalModule(echo, tags=tags), metadata={"tags": ["c"]})
    expected = {"c", *(tags or ())}
    async with connect(registry, tags=[*expected]) as client:
        (tool,) = (await client.list_tools()).tools
    assert sorted((tool.meta or {})["apcore/tags"]) == sorted(expected)


class Shaky(Registry):
    """A registry whose modules vanish, or whose files go bad, between the listing and the look at them."""

    def get_definition(self, module_id: str, version_hint: str | None = None) -> Any:
        if module_id == "demo.gone":
            return None
        if module_id == "demo.bad":
            raise RuntimeError("cannot be read")
        return super().get_definition(module_id, version_hint)


LEFT_OUT = {
    "demo.bad": "cannot be read",
    "demo.gone": "ValueError: the registry has no definition of it",
    "demo.loop": "Missing",
    "demo.nested_tags": "ValueError: its tags are no list of texts",
    "demo.other_tags": "ValueError: its tags are no list of texts",
    "demo.text_tags": "ValueError: its tags are no list of texts",
}


@pytest.mark.requirement("FR-SERVER-011")
@pytest.mark.parametrize("tags", [None, ["public"]], ids=["all", "public"])
async def test_a_module_that_cannot_be_read_is_left_out_by_name(tags: Any, caplog: Caplog) -> None:
    """When it was there before the server, and when it comes later."""
    registry = Shaky()
    registry.register("demo.a", FunctionalModule(echo, tags=["public"]))
    odd = {
        **dict.fromkeys(("demo.bad", "demo.gone"), FunctionalModule(echo, tags=["public"])),
        "demo.loop": FunctionalModule(echo, tags=["public"], input_schema=one({"$ref": "#/$defs/Missing"})),
        "demo.nested_tags": FunctionalModule(echo, tags=[["a"]]),
    }
    for name, module in odd.items():
        registry.register(name, module)
    async with connect(registry, tags=tags) as client:
        assert await listed(client) == ["demo.a"]
        registry.register("demo.other_tags", FunctionalModule(echo, tags=[{"a": 1}, "public"]))
        registry.register("demo.text_tags", FunctionalModule(echo, tags="public"))
        registry.register("demo.z", FunctionalModule(echo, tags=["public"]))
        assert await listed(client) == ["demo.a", "demo.z"]
        assert parsed(success_text(await client.call_tool("demo.z", {"a": 1}))) == {"a": 1}
    warned = messages_logged(caplog)
    for name, word in LEFT_OUT.items():
        (text,) = [text for text in warned if text.startswith(f"Module {name} is left out: ")]
        assert word in text


# ---- Tool names ----

LONG = "demo." + "a" * 70
IDS = ["demo.a_b.c1", LONG + ".one", LONG + ".two", "plain"]
# A hash that never changes stands for what is too long.
PORTABLE = ["demo-a_b-c1", f"demo-{'a' * 49}-043895ba6", f"demo-{'a' * 49}-0790147fe", "plain"]
CLAUDE = {"client_info": Implementation(name="claude-ai", version="1")}
OTHER = {"client_info": Implementation(name="someone-else", version="1")}


async def test_clients_that_lose_all_tools_by_a_dot_are_sent_none() -> None:
    clients = {
        "image-resize": ["claude-ai", "claude-ai (via mcp-remote 0.1.38)", "github-copilot-developer",
                         "JetBrains-IU-copilot-intellij"],
        "image.resize": ["claude-code", "codex-mcp-client", "Visual Studio Code", "not-claude-ai"],
    }  # fmt: skip
    with serving(registry_of({"image.resize": echo})) as url:
        for spelled, names in clients.items():
            for name in names:
                who = Implementation(name=name, version="1")
                async with client_of(url, client_info=who) as client:
                    assert await listed(client) == [spelled], name


def called(**aliases: Any) -> dict[str, Any]:
    """Modules by id that answer with it, `__` for the dots of the id, with aliases (None: without)."""
    modules = {}
    for name, alias in aliases.items():
        module_id = name.replace("__", ".")
        modules[module_id] = gives({"i_am": module_id}, metadata=overlay(alias=alias))
    return modules


async def test_a_bindings_display_counts_without_metadata() -> None:
    """`display:` of a `*.binding.yaml`, which apcore's loader keeps beside the metadata, and of `@module`."""
    display = {"mcp": {"alias": "shrink"}}
    other = overlay(alias="other")

    def work() -> dict[str, Any]:
        return {}

    modules = {
        "image.resize": FunctionModule(work, "image.resize", "Makes it smaller.", display=display),
        "image.store": FunctionModule(work, "image.store", "Keeps it.", display=display, metadata=other),
    }
    async with connect(modules) as client:
        assert await listed(client) == ["shrink", "other"]


async def test_an_alias_is_a_tools_name_and_the_id_is_understood() -> None:
    modules = called(image__resize="shrink.image", image__store=None)
    async with connect(modules) as client:
        assert await listed(client) == ["shrink.image", "image.store"]
        for name in ("shrink.image", "shrink-image", "image.resize", "image-resize"):
            assert parsed(success_text(await client.call_tool(name, {}))) == {"i_am": "image.resize"}
    async with connect(modules, client=CLAUDE) as client:
        assert await listed(client) == ["shrink-image", "image-store"]
    assert from_openai_call(registry_of(modules), "image-resize", "{}") == ("image.resize", {})


@pytest.mark.parametrize(
    ("aliases", "named"),
    [
        pytest.param({"a__b": "a.b"}, ["a.b"], id="its-own-id"),
        pytest.param({"a__b": "x" * 65}, ["a.b!"], id="too-long"),
        pytest.param({"a__b": "größe"}, ["a.b!"], id="not-ascii"),
        pytest.param({"a__b": "x\n"}, ["a.b!"], id="newline"),
        pytest.param({"a__b": "c-d", "c__d": None}, ["a.b!", "c.d"], id="anothers-portable-name"),
        pytest.param({"a__b": "x", "c__d": "x", "e": "y"}, ["x", "c.d!", "y"], id="claimed-twice"),
        pytest.param({"a__b": "x.y", "c__d": "x-y"}, ["x.y", "c.d!"], id="claimed-in-either-spelling"),
    ],
)
async def test_an_alias_of_another_is_not_used(aliases: dict[str, Any], named: list[str], caplog: Caplog) -> None:
    """The mark behind a name: with a WARNING, one."""
    modules = called(**aliases)
    async with connect(modules) as client:
        for _ in range(2):
            names = await listed(client)
            assert names == [name.rstrip("!") for name in named]
        for module_id, name in zip(modules, names, strict=True):
            assert parsed(success_text(await client.call_tool(name, {}))) == {"i_am": module_id}
    warned = messages_logged(caplog)
    refused = [name.rstrip("!") for name in named if name.endswith("!")]
    assert [module_id for module_id in modules for text in warned if f"module {module_id} " in text] == refused


async def test_an_alias_is_given_up_and_taken_back(caplog: Caplog) -> None:
    """Two want it: it is the first one's by id."""
    registry = registry_of(called(b__late="x", a__first="x"))
    async with connect(registry) as client:
        assert await listed(client) == ["x", "b.late"]
        registry.unregister("a.first")
        assert await listed(client) == ["x"]
        registry.register("x", FunctionalModule(echo))
        assert await listed(client) == ["b.late", "x"]
        assert "i_am" not in parsed(success_text(await client.call_tool("x", {})))
        registry.register("zoom", FunctionalModule(echo))  # of which nothing is said again
        assert await listed(client) == ["b.late", "x", "zoom"]
        registry.unregister("x")
        assert await listed(client) == ["x", "zoom"]
    assert caplog.text.count("The alias of module b.late is not used: x is") == 2


NAMED: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "auto-for-others": ({"tool_names": "auto"}, OTHER, False),
    "portable": ({"tool_names": "portable"}, OTHER, True),
    "module-id": ({"tool_names": "module-id"}, CLAUDE, False),
    "default-for-claude": ({}, CLAUDE, True),
}


@pytest.mark.parametrize(("options", "client", "portable"), NAMED.values(), ids=NAMED)
async def test_names_are_spelled_for_the_client(options: Any, client: Any, portable: bool, mode: str) -> None:
    async with connect({name: gives({"i_am": name}) for name in IDS}, mode=mode, client=client, **options) as connected:
        assert await listed(connected) == (PORTABLE if portable else IDS)
        for name, module_id in zip(PORTABLE + IDS, IDS + IDS, strict=True):
            assert parsed(success_text(await connected.call_tool(name, {}))) == {"i_am": module_id}


async def test_an_authors_meta_is_the_tools_but_for_names_of_others() -> None:
    own = {"anthropic/maxResultSizeChars": 200_000, "com.example.mcp/x": {"a": [1, None]}, "plain": "\u00fc"}
    meta = {**own, "apcore/version": "mine"}
    async with connect({"t.own": FunctionalModule(echo, metadata=overlay(meta=meta))}) as client:
        (tool,) = (await client.list_tools()).tools
    assert tool.meta is not None
    assert tool.meta.items() >= own.items()
    assert tool.meta["apcore/version"] != "mine"


async def test_icons_of_the_overlay_are_the_tools(caplog: Caplog) -> None:
    """Others than MCP has would cost a client the whole list."""
    icon = {"src": "https://example.com/bell.svg", "mimeType": "image/svg+xml", "sizes": ["any"], "theme": "dark"}
    shown = {"good": [icon], "text": "bell.svg", "number": [{"src": 7}]}
    modules = {f"t.{name}": FunctionalModule(echo, metadata=overlay(icons=icons)) for name, icons in shown.items()}
    async with connect(modules) as client:
        (tool,) = (await client.list_tools()).tools
    assert tool.icons is not None
    assert [each.model_dump(by_alias=True) for each in tool.icons] == [icon]
    left_out = sorted(text.partition(" is left out: ")[0] for text in messages_logged(caplog))
    assert left_out == ["Module t.number", "Module t.text"]


async def test_without_structured_content_there_is_the_text_alone(mode: str) -> None:
    """As a client that shows its model both pays twice. It is so of a search, too."""
    async with connect({"t.echo": echo}, mode=mode, structured=False, search=True) as client:
        assert [tool.output_schema for tool in (await client.list_tools()).tools] == [None, None]
        for name, arguments in (("t.echo", {"a": 1}), ("search_tools", {"query": "echo"})):
            result = await client.call_tool(name, arguments)
            assert (bool(success_text(result)), result.structured_content) == (True, None)
    async with connect({"t.echo": echo}, mode=mode, structured=False) as client:
        assert [tool.output_schema for tool in (await client.list_tools()).tools] == [None]
