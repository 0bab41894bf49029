"""A module as clients see it: names in either spelling, annotations, what agents are told (FR-ANNOT-*, FR-
SERVER-011; design "Annotations", "Tool names").
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from apcore import Executor, FunctionModule, ModuleAnnotations, Registry
from apcore.policy import ExecutionPolicy, PolicyRule
from conftest import HANDSHAKE, MODERN, FunctionalModule, connect, echo, registry_of, serving
from mcp.client import Client
from mcp_types import Implementation
from support import Size, gives, parsed, success_text

from apcore_mcp import from_openai_call, to_openai_tools

# ---- Tool definitions ----

DEFAULTS = {"read_only_hint": False, "destructive_hint": False, "idempotent_hint": False, "open_world_hint": True}


@pytest.mark.requirement("FR-ANNOT-001", "FR-ANNOT-002", "FR-ANNOT-003", "FR-ANNOT-004", "FR-ANNOT-005", "FR-ANNOT-006")
@pytest.mark.parametrize(
    ("annotations", "hints", "meta"),
    [
        pytest.param(None, {}, {}, id="none"),
        pytest.param(ModuleAnnotations(), {}, {}, id="defaults"),
        pytest.param(ModuleAnnotations(destructive=True), {"destructive_hint": True}, {}, id="destructive"),
        pytest.param(ModuleAnnotations(readonly=True), {"read_only_hint": True}, {}, id="readonly"),
        pytest.param(ModuleAnnotations(idempotent=True), {"idempotent_hint": True}, {}, id="idempotent"),
        pytest.param(ModuleAnnotations(open_world=False), {"open_world_hint": False}, {}, id="closed-world"),
        pytest.param(ModuleAnnotations(requires_approval=True), {}, {"requires_approval": True}, id="approval"),
        pytest.param(ModuleAnnotations(cacheable=True), {}, {"cacheable": True}, id="cacheable"),
        pytest.param(ModuleAnnotations(paginated=True), {}, {"paginated": True}, id="paginated"),
    ],
)
async def test_a_tool_tells_what_its_module_declares(
    annotations: ModuleAnnotations | None, hints: dict[str, bool], meta: dict[str, bool]
) -> None:
    module = FunctionalModule(
        echo,
        name="Resize",
        description="Makes it smaller. é",
        version="2.1.0",
        tags=["image", "fast"],
        annotations=annotations,
        input_schema=Size,
    )
    async with connect({"image.resize": module}) as client:
        (tool,) = (await client.list_tools()).tools
    assert (tool.name, tool.title, tool.description) == ("image.resize", "Resize", "Makes it smaller. é")
    assert tool.input_schema["required"] == ["width", "made"]
    assert tool.annotations is not None
    assert tool.annotations.model_dump(include=set(DEFAULTS)) == {**DEFAULTS, **hints}
    assert tool.annotations.title == "Resize", "where clients up to 2025-03-26 look for it"
    flags = {"requires_approval": False, "streaming": False, "cacheable": False, "paginated": False, **meta}
    expected = {**flags, "version": "2.1.0", "tags": ["image", "fast"]}
    told = {key: value for key, value in (tool.meta or {}).items() if key.startswith("apcore/")}
    assert told == {f"apcore/{key}": value for key, value in expected.items()}


@pytest.mark.parametrize(
    ("notice", "told"),
    [
        pytest.param({}, "", id="not"),
        pytest.param(
            {"deprecated_since": "1.2.0", "sunset_version": "2.0.0", "sunset_date": "2027-01-31",
             "migration_guide": "Use image.scale."},
            "\n\nDeprecated since 1.2.0, until 2.0.0, until 2027-01-31. Use image.scale.", id="everything",
        ),
        pytest.param({"sunset_date": "2027-01-31"}, "\n\nDeprecated until 2027-01-31.", id="date"),
        pytest.param({"reason": "old"}, "\n\nDeprecated.", id="nothing-known"),
        pytest.param({"deprecated_since": 1.2, "migration_guide": ["a"]}, "\n\nDeprecated since 1.2. ['a']", id="odd"),
    ],
)  # fmt: skip
async def test_a_deprecated_module_says_so_to_every_agent(notice: dict[str, Any], told: str) -> None:
    module = FunctionalModule(echo, description="Makes it smaller.", metadata={"x-deprecation": notice})
    registry = registry_of({"image.resize": module})
    async with connect(registry) as client:
        (tool,) = (await client.list_tools()).tools
    (function,) = to_openai_tools(registry)
    assert tool.description == function["function"]["description"] == f"Makes it smaller.{told}"


OVERLAY = {"alias": "shrink", "description": "Shrinks a picture.", "guidance": "Ask for the size first."}
ADVICE = {"x-when-to-use": "Before an upload.", "x-when-not-to-use": "For vector graphics."}
ADVICE |= {"x-common-mistakes": "Sizes in inches.", "x-workflow-hints": "Then image.store."}


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        pytest.param({}, ["Makes it smaller."], id="nothing"),
        pytest.param(
            {"display": {"mcp": OVERLAY}}, ["Shrinks a picture.", "Guidance: Ask for the size first."], id="overlay"
        ),
        pytest.param({"display": {"mcp": {"description": ""}, "cli": OVERLAY}}, ["Makes it smaller."], id="another's"),
        pytest.param({"display": None}, ["Makes it smaller."], id="none"),
        pytest.param({"display": {"mcp": None}}, ["Makes it smaller."], id="none-for-mcp"),
        pytest.param({"display": "Resizer"}, ["Makes it smaller."], id="in-another-sense"),
        pytest.param({"display": {"mcp": "Resizer"}}, ["Makes it smaller."], id="in-another-sense-for-mcp"),
        pytest.param(
            {"x-deprecation": {"deprecated_since": "1.2"}, "display": {"mcp": OVERLAY}, **ADVICE},
            [
                "Shrinks a picture.", "Guidance: Ask for the size first.", "When to use: Before an upload.",
                "When not to use: For vector graphics.", "Common mistakes: Sizes in inches.",
                "Workflow hints: Then image.store.", "Deprecated since 1.2.",
            ],
            id="everything",
        ),
    ],
)  # fmt: skip
async def test_what_authors_and_operators_wrote_for_agents_reaches_them(
    metadata: dict[str, Any], said: list[str], mode: str
) -> None:
    """Design, "Annotations": in MCP's and OpenAI's descriptions alike, a paragraph each."""
    registry = registry_of({"image.resize": FunctionalModule(echo, description="Makes it smaller.", metadata=metadata)})
    async with connect(registry, mode=mode) as client:
        (tool,) = (await client.list_tools()).tools
    (function,) = to_openai_tools(registry)
    assert tool.description == function["function"]["description"] == "\n\n".join(said)
    assert function["function"]["name"] == "image-resize"


@pytest.mark.requirement("FR-ANNOT-006")
@pytest.mark.parametrize(
    ("declared", "policy", "needed"),
    [
        pytest.param({}, ExecutionPolicy([PolicyRule("demo.*", requires_approval=True)]), True, id="rule"),
        pytest.param({}, ExecutionPolicy([PolicyRule("other.*", requires_approval=True)]), False, id="other-rule"),
        pytest.param({"destructive": True}, ExecutionPolicy(gate_destructive=True), True, id="destructive"),
        pytest.param({"requires_approval": True}, ExecutionPolicy(), True, id="declared"),
        pytest.param({"requires_approval": True}, ExecutionPolicy([PolicyRule("*", requires_approval=False)]), False,
                     id="waived"),
        pytest.param({"requires_approval": True}, None, True, id="no-policy"),
    ],
)  # fmt: skip
async def test_approval_that_an_operator_demands_is_told_like_a_modules_own(
    declared: dict[str, bool], policy: ExecutionPolicy | None, needed: bool
) -> None:
    executor = Executor(
        registry_of({"demo.a": FunctionalModule(echo, annotations=ModuleAnnotations(**declared))}), policy=policy
    )
    async with connect(executor) as client:
        (tool,) = (await client.list_tools()).tools
    assert (tool.meta or {})["apcore/requires_approval"] is needed
    (function,) = to_openai_tools(executor, embed_annotations=True)
    assert ("requires_approval=true" in function["function"]["description"]) is needed


def test_an_annotation_is_true_or_false_whatever_a_module_wrote() -> None:
    """TypeScript clients lose the whole list by a hint that is neither; apcore takes anything for true or false."""
    annotations = ModuleAnnotations(readonly="yes", destructive=None, streaming=1)  # type: ignore[arg-type]
    with serving(registry_of({"demo.a": FunctionalModule(echo, annotations=annotations)}), explorer=True) as url:
        (tool,) = httpx.get(f"{url}/explorer/tools").json()
    assert (tool["annotations"]["readOnlyHint"], tool["annotations"]["destructiveHint"]) == (True, False)
    assert tool["_meta"]["apcore/streaming"] is True


async def test_a_streaming_module_is_marked() -> None:
    async def stream(inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
        yield {"a": 1}

    module = FunctionalModule(echo, stream=stream, annotations=ModuleAnnotations(streaming=True))
    async with connect({"demo.stream": module, "demo.nameless": echo}) as client:
        nameless, streaming = (await client.list_tools()).tools
    assert (streaming.meta or {})["apcore/streaming"] is True
    assert (nameless.meta or {})["apcore/streaming"] is False
    assert nameless.title is None


@pytest.mark.requirement("FR-SERVER-011")
@pytest.mark.parametrize("count", [1, 100])
async def test_there_is_one_tool_for_each_module(count: int) -> None:
    names = [f"demo.m{number:03}" for number in range(count)]
    async with connect(dict.fromkeys(names, echo)) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == names


class Shaky(Registry):
    """A registry whose modules vanish, or whose files go bad, between the listing and the look at them."""

    def get_definition(self, module_id: str, version_hint: str | None = None) -> Any:
        if module_id == "demo.gone":
            return None
        if module_id == "demo.bad":
            raise RuntimeError("cannot be read")
        return super().get_definition(module_id, version_hint)


async def test_a_module_that_cannot_be_read_is_left_out_by_name(caplog: pytest.LogCaptureFixture) -> None:
    registry = Shaky()
    for name in ("demo.a", "demo.bad", "demo.gone", "demo.z"):
        registry.register(name, FunctionalModule(echo))
    registry.register(
        "demo.loop",
        FunctionalModule(echo, input_schema={"type": "object", "properties": {"a": {"$ref": "#"}}}),
    )
    async with connect(registry) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["demo.a", "demo.z"]
        assert parsed(success_text(await client.call_tool("demo.z", {"a": 1}))) == {"a": 1}
    warned = [r.getMessage() for r in caplog.records if r.name == "apcore_mcp" and r.levelno == logging.WARNING]
    for name in ("demo.bad", "demo.loop"):
        assert len([message for message in warned if name in message]) == 1


# ---- Tool names ----

LONG = "demo." + "a" * 70
IDS = ["demo.a_b.c1", LONG + ".one", LONG + ".two", "plain"]
PORTABLE = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
CLAUDE = {"client_info": Implementation(name="claude-ai", version="1")}
OTHER = {"client_info": Implementation(name="someone-else", version="1")}


@pytest.mark.parametrize(
    ("name", "portable"),
    [
        ("claude-ai", True),
        ("claude-ai (via mcp-remote 0.1.38)", True),
        ("github-copilot-developer", True),
        ("JetBrains-IU-copilot-intellij", True),
        ("JetBrains-JBC-copilot-intellij", True),
        ("claude-code", False),
        ("codex-mcp-client", False),
        ("opencode", False),
        ("Visual Studio Code", False),
        ("gemini-cli-mcp-client", False),
        ("not-claude-ai", False),
        ("mcp", False),
    ],
)
async def test_clients_that_lose_all_tools_by_a_dot_are_sent_none(name: str, portable: bool) -> None:
    """In the handshake era as well: see `test_names_are_spelled_as_the_client_can_take_them`."""
    client = {"client_info": Implementation(name=name, version="1")}
    async with connect({"image.resize": echo}, client=client) as connected:
        (tool,) = (await connected.list_tools()).tools
    assert tool.name == ("image-resize" if portable else "image.resize")


def called(**aliases: Any) -> dict[str, Any]:
    """Modules by id that answer with it, `__` for the dots of the id, with aliases (None: without)."""
    modules = {}
    for name, alias in aliases.items():
        module_id = name.replace("__", ".")
        display = {"display": {"mcp": {"alias": alias}}}
        modules[module_id] = FunctionalModule(lambda inputs, context, own=module_id: {"i_am": own}, metadata=display)
    return modules


async def test_what_a_binding_says_of_its_display_counts_where_the_metadata_says_nothing() -> None:
    """`display:` of a `*.binding.yaml`, which apcore's loader keeps beside the metadata, and of `@module`."""
    display = {"mcp": {"alias": "shrink", "guidance": "Ask first."}}
    other = {"display": {"mcp": {"alias": "other"}}}

    def work() -> dict[str, Any]:
        return {}

    modules = {
        "image.resize": FunctionModule(work, "image.resize", "Makes it smaller.", display=display),
        "image.store": FunctionModule(work, "image.store", "Keeps it.", display=display, metadata=other),
    }
    async with connect(modules) as client:
        told = {tool.name: tool.description for tool in (await client.list_tools()).tools}
    assert told == {"shrink": "Makes it smaller.\n\nGuidance: Ask first.", "other": "Keeps it."}


async def test_a_function_with_dict_schemas_is_a_tool() -> None:
    def count(**words: int) -> dict[str, int]:
        """Count."""
        return words

    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    function = FunctionModule(count, "text.count", input_schema=schema, output_schema=dict(schema))
    async with connect({"text.count": function}) as client:
        (tool,) = (await client.list_tools()).tools
        result = await client.call_tool("text.count", {"a": 1, "b": 2})
    assert (tool.input_schema, tool.output_schema) == (schema, schema)
    assert parsed(success_text(result)) == {"a": 1, "b": 2}


async def test_an_alias_is_the_name_of_its_tool_and_the_id_is_understood(mode: str) -> None:
    modules = called(image__resize="shrink.image", image__store=None)
    async with connect(modules, mode=mode) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["shrink.image", "image.store"]
        for name in ("shrink.image", "shrink-image", "image.resize", "image-resize"):
            assert parsed(success_text(await client.call_tool(name, {}))) == {"i_am": "image.resize"}
    async with connect(modules, mode=mode, client=CLAUDE) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["shrink-image", "image-store"]
    assert from_openai_call(registry_of(modules), "image-resize", "{}") == ("image.resize", {})


@pytest.mark.parametrize(
    ("aliases", "named"),
    [
        pytest.param({"a__b": "x" * 64, "c": None}, ["x" * 64, "c"], id="long"),
        pytest.param({"a__b": "a.b"}, ["a.b"], id="its-own-id"),
        pytest.param({"a__b": "a-b"}, ["a-b"], id="its-own-portable-name"),
        pytest.param({"a__b": "x" * 65}, ["a.b!"], id="too-long"),
        pytest.param({"a__b": "x y"}, ["a.b!"], id="space"),
        pytest.param({"a__b": "größe"}, ["a.b!"], id="not-ascii"),
        pytest.param({"a__b": "x\n"}, ["a.b!"], id="newline"),
        pytest.param({"a__b": 7}, ["7"], id="number"),
        pytest.param({"a__b": "c", "c": None}, ["a.b!", "c"], id="anothers-id"),
        pytest.param({"a__b": "c-d", "c__d": None}, ["a.b!", "c.d"], id="anothers-portable-name"),
        pytest.param({"a__b": "x", "c__d": "x", "e": "y"}, ["a.b!", "c.d!", "y"], id="claimed-twice"),
        pytest.param({"a__b": "x.y", "c__d": "x-y"}, ["a.b!", "c.d!"], id="claimed-in-either-spelling"),
    ],
)
async def test_an_alias_that_is_not_its_own_is_not_used(
    aliases: dict[str, Any], named: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The mark behind a name: with a WARNING, one."""
    modules = called(**aliases)
    async with connect(modules) as client:
        for _ in range(2):
            names = [tool.name for tool in (await client.list_tools()).tools]
            assert names == [name.rstrip("!") for name in named]
        for module_id, name in zip(modules, names, strict=True):
            for spelling in (name, module_id, module_id.replace(".", "-")):
                assert parsed(success_text(await client.call_tool(spelling, {}))) == {"i_am": module_id}
    warned = [r.getMessage() for r in caplog.records if r.name == "apcore_mcp" and r.levelno == logging.WARNING]
    refused = [name.rstrip("!") for name in named if name.endswith("!")]
    assert [module_id for module_id in modules for text in warned if f"module {module_id} " in text] == refused


async def test_an_alias_is_given_up_and_taken_back_as_other_modules_come_and_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = registry_of(called(a__b="x"))

    async def names(client: Client) -> list[str]:
        return [tool.name for tool in (await client.list_tools()).tools]

    async with connect(registry) as client:
        assert await names(client) == ["x"]
        registry.register("x", echo_module := FunctionalModule(echo))
        assert await names(client) == ["a.b", "x"]
        assert "i_am" not in parsed(success_text(await client.call_tool("x", {})))
        registry.register("other", echo_module)
        assert await names(client) == ["a.b", "other", "x"]
        assert len([r for r in caplog.records if "a.b" in r.getMessage() and r.levelno == logging.WARNING]) == 1
        registry.unregister("x")
        assert await names(client) == ["x", "other"]


def answering() -> dict[str, Any]:
    return {module_id: gives({"i_am": module_id}) for module_id in IDS}


@pytest.mark.parametrize(
    ("tool_names", "client", "portable"),
    [
        pytest.param("auto", CLAUDE, True, id="auto-for-claude"),
        pytest.param("auto", OTHER, False, id="auto-for-others"),
        pytest.param("portable", OTHER, True, id="portable"),
        pytest.param("module-id", CLAUDE, False, id="module-id"),
        pytest.param(None, CLAUDE, True, id="default-for-claude"),
    ],
)
async def test_names_are_spelled_as_the_client_can_take_them(
    tool_names: str | None, client: dict[str, Any], portable: bool, mode: str
) -> None:
    options = {} if tool_names is None else {"tool_names": tool_names}
    async with connect(answering(), mode=mode, client=client, **options) as connected:
        names = [tool.name for tool in (await connected.list_tools()).tools]
        told = [parsed(success_text(await connected.call_tool(name, {})))["i_am"] for name in [*names, *IDS]]
        either = [
            parsed(success_text(await connected.call_tool(name, {})))["i_am"] for name in ("demo-a_b-c1", "demo.a_b.c1")
        ]
    assert sorted(told[: len(IDS)]) == sorted(IDS)
    assert told[len(IDS) :] == IDS
    assert either == ["demo.a_b.c1", "demo.a_b.c1"]
    if portable:
        assert [name for name in names if not PORTABLE.fullmatch(name)] == []
        assert {"demo-a_b-c1", "plain"} < set(names)
        assert len(set(names)) == len(IDS)
    else:
        assert names == sorted(IDS)


async def test_one_server_speaks_to_each_client_in_its_own_spelling_and_shortens_alike() -> None:
    listings = []
    for _ in range(2):
        with serving(registry_of(answering())) as url:
            async with (
                Client(f"{url}/mcp", mode=HANDSHAKE, cache=None, **CLAUDE) as claude,
                Client(f"{url}/mcp", mode=MODERN, cache=None, **OTHER) as other,
            ):
                dotted = [tool.name for tool in (await other.list_tools()).tools]
                hyphened = [tool.name for tool in (await claude.list_tools()).tools]
                answers = [await other.call_tool(name, {}) for name in hyphened]
        assert dotted == sorted(IDS)
        assert sorted(parsed(success_text(answer))["i_am"] for answer in answers) == dotted
        listings.append(hyphened)
    assert listings[0] == listings[1]
