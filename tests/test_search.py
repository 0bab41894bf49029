"""`search=True`: two tools in the place of all, one that finds tools and one that calls them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from apcore import ACL, ACLRule, Executor, ModuleAnnotations
from apcore.context import Identity
from conftest import HANDSHAKE, MODERN, FunctionalModule, client_of, connect, echo, program, registry_of, serving, stdio
from mcp.client import Client
from mcp_types import Implementation
from pydantic import BaseModel, Field
from support import (
    INTEGER,
    SECRET_TEXT,
    SECRETIVE,
    STRING,
    Caplog,
    StreamingModule,
    Wire,
    accept,
    answer,
    ask,
    asking,
    cancel_call,
    errors_logged,
    everything_logged,
    failure,
    followed,
    gives,
    guarded,
    listed,
    modern,
    noting,
    overlay,
    stage,
    start_call,
    success_text,
    text_of,
)

from apcore_mcp import from_openai_call, report_progress, run_openai_call, to_openai_tools
from apcore_mcp.__main__ import main

BOTH = ["search_tools", "call_tool"]


def about(description: str, **properties: Any) -> FunctionalModule:
    return FunctionalModule(echo, description=description, input_schema={"type": "object", "properties": properties})


OFFICE = {
    "mail.send": about("Send a message", recipient={**STRING, "description": "Whom to write to"}),
    "mail.list_folders": about("List the folders of a mailbox"),
    "calendar.create_event": about("Put an appointment into the calendar"),
    "calendar.delete_event": about("Take an appointment out of the calendar"),
    "files.copy": about("Copy a file", source=STRING, target={**STRING, "description": "The folder to copy it to"}),
    "translate": about("翻译文本"),
    "weather": about("Прогноз погоды", windSpeed=STRING),
}


async def find(client: Client, query: str) -> list[str]:
    """The names of the tools that a client finds."""
    result = await client.call_tool("search_tools", {"query": query})
    found = (result.structured_content or {"result": []})["result"]
    assert not found or json.loads(text_of(result)) == found
    return [tool["name"] for tool in found]


async def by_model(source: Any, query: str, **options: Any) -> list[str]:
    """The names of the tools that a model of OpenAI's finds; none, where it is told the groups."""
    text = await run_openai_call(source, "search_tools", {"query": query}, search=True, **options)
    return [] if text.startswith("No tool was found") else [tool["name"] for tool in json.loads(text)]


# ---- The two tools ----


@pytest.mark.parametrize(("era", "path"), [(HANDSHAKE, ""), (HANDSHAKE, "/sse"), (MODERN, "")])
async def test_two_tools_stand_for_all(era: str, path: str) -> None:
    with serving(registry_of(OFFICE), transport="sse" if path else "streamable-http", search=True) as url:
        async with client_of(url + path, era) as client:
            search, call = (await client.list_tools()).tools
            assert [search.name, call.name] == BOTH
            assert (search.input_schema["required"], call.input_schema["required"]) == (["query"], ["name"])
            assert search.output_schema is call.output_schema is None, "as Codex shows that alone, and some have none"
            assert [tool.annotations and tool.annotations.read_only_hint for tool in (search, call)] == [True, False]
            assert await find(client, "copy") == ["files.copy"]
            (tool,) = json.loads(text_of(await client.call_tool("search_tools", {"query": "copy"})))
            assert tool.keys() == {"name", "description", "inputSchema"}
            called = await client.call_tool("call_tool", {"name": "files.copy", "arguments": {"source": "a"}})
            direct = await client.call_tool("files.copy", {"source": "a"})
            assert called.structured_content == direct.structured_content == {"source": "a"}


async def test_the_two_names_may_be_those_of_modules(mode: str) -> None:
    """Without the option they are like any other, and `call_tool` calls modules alone."""
    modules, sent = {name: gives({"module": name}) for name in BOTH}, {"query": "a", "name": "a"}
    async with connect(modules, mode=mode) as plain, connect(modules, mode=mode, search=True) as client:
        assert sorted(await listed(plain)) == sorted(await find(client, "tool")) == sorted(BOTH)
        assert await listed(client) == BOTH
        for name in BOTH:
            for call in (plain.call_tool(name, {"query": 1}), client.call_tool("call_tool", {"name": name})):
                assert (await call).structured_content == {"module": name}
    async with connect({"a": echo}, mode=mode) as plain, connect({"a": echo}, mode=mode, search=True) as client:
        for name in BOTH:
            failure(await plain.call_tool(name, sent), f"Module not found: {name}")
            failure(await client.call_tool("call_tool", {"name": name, "arguments": sent}), f"Module not found: {name}")
            assert await run_openai_call(registry_of({"a": echo}), name, sent) == f"Module not found: {name}"


FORM = 'The form is {"name": "...", "arguments": {...}}, with an object as arguments'
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("search_tools", {}, "query: Field required (required)"),
    ("search_tools", {"query": 5}, "query: 5 is not of type 'string' (type)"),
    ("call_tool", {}, "name: Field required (required)"),
    ("call_tool", {"name": None}, f"name: {FORM} (type)"),
    ("call_tool", {"name": "bank.pay", "arguments": f"token={SECRET_TEXT}"}, f"arguments: {FORM} (type)"),
    ("call_tool", {"name": "bank.pay", "token": SECRET_TEXT}, f"(root): {FORM} (additionalProperties)"),
]


async def test_wrong_arguments_of_the_two_are_told_and_not_quoted(caplog: Caplog, mode: str) -> None:
    """The arguments may be those of a tool that marks some of them."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    registry = registry_of({"bank.pay": FunctionalModule(echo, input_schema=SECRETIVE)})
    async with connect(registry, mode=mode, search=True) as client:
        for name, arguments, fault in WRONG:
            text = f"Input validation failed:\n- {fault}"
            report = failure(await client.call_tool(name, arguments), text)
            assert report["error_type"] == "SCHEMA_VALIDATION_ERROR"
            assert SECRET_TEXT not in json.dumps(report)
            assert await run_openai_call(registry, name, arguments, search=True) == text
            with pytest.raises(ValueError, match=r"Arguments of .* are not valid") as refused:
                from_openai_call(registry, name, arguments, search=True)
            assert SECRET_TEXT not in str(refused.value)
        sent = {"name": "bank.pay", "arguments": {"token": {"value": SECRET_TEXT}}}
        assert SECRET_TEXT not in json.dumps(failure(await client.call_tool("call_tool", sent)))
    assert len(errors_logged(caplog)) == 2 * len(WRONG) + 1
    assert SECRET_TEXT not in everything_logged(caplog)


# ---- What is found ----


class Address(BaseModel):
    street: str = Field(description="Boulevard or lane")


class Order(BaseModel):
    to: list[Address]


FIRST = {
    "copy": "files.copy",
    "send an email message": "mail.send",
    "EVENT delete": "calendar.delete_event",
    "folders of mailboxes": "mail.list_folders",
    "deletes events": "calendar.delete_event",
    "appoint create": "calendar.create_event",
    "recipient": "mail.send",
    "whom": "mail.send",  # in a parameter's description
    "翻译": "translate",
    "把文本翻成英文": "translate",
    "ПРОГНОЗ": "weather",
    "speed of the wind": "weather",  # windSpeed
    "files-copy": "files.copy",
    "\uff43\uff4f\uff50\uff59": "files.copy",  # full-width letters
}
OTHERS: dict[str, Any] = {
    "a.titled": FunctionalModule(echo, name="Invoice maker"),
    "a.tagged": FunctionalModule(echo, tags=["bookkeeping"]),
    "a.aliased": FunctionalModule(echo, metadata=overlay(alias="ledger")),
    "a.nested": FunctionalModule(echo, input_schema=Order),
    "a.b": about("Rotate a picture"),  # whose id has no word
    "m.t": about("दिन की रिपोर्ट"),
    "m.u": about("שָׁלוֹם"),
}
ONLY = {
    "invoices": "a.titled", "bookkeeping": "a.tagged", "ledger": "ledger", "street": "a.nested", "lane": "a.nested",
    "rotate": "a.b", "रिपोर्ट": "m.t", "שָׁלוֹם": "m.u",
}  # fmt: skip
PLURALS = {"policy": "policies", "branch": "branches", "box": "boxes", "file": "files", "status": "statuses"}


async def test_a_search_finds_by_words_in_any_form_case_and_script() -> None:
    """Those of names, titles, texts, tags and parameters; plurals, and beginnings of words."""
    office, others = registry_of(OFFICE), registry_of(OTHERS)
    words = registry_of({f"a.{word}": echo for pair in PLURALS.items() for word in pair})
    for query, name in FIRST.items():
        assert (await by_model(office, query))[0] == name.replace(".", "-"), query
    for query, name in ONLY.items():
        assert await by_model(others, query) == [name.replace(".", "-")], query
    for pair in PLURALS.items():
        for word in pair:
            assert sorted(await by_model(words, word)) == sorted(f"a-{each}" for each in pair), word


async def test_a_rare_word_counts_more_and_a_name_most() -> None:
    modules = {f"list.m{number:02}": about("Show a thing") for number in range(20)}
    modules |= {"other.a": about("Show a unicorn"), "unicorn.b": about("Nothing"), "list.zz": about("Show a unicorn")}
    found = await by_model(registry_of(modules), "list unicorns")
    assert len(found) == 10
    assert set(found[:3]) == {"unicorn-b", "list-zz", "other-a"}
    assert found.index("unicorn-b") < found.index("other-a")


async def test_where_nothing_is_found_the_groups_are_told() -> None:
    async with connect(OFFICE, search=True) as client:
        for query in ("xylophone", "", "?!", "\U0001f600", "a x"):
            result = await client.call_tool("search_tools", {"query": query})
            assert (result.is_error, result.structured_content) == (False, None), "Codex would show nothing else"
            groups = "mail (2), calendar (2), files (1), translate (1), weather (1)"
            assert sorted(text_of(result).split(": ")[1][:-1].split(", ")) == sorted(groups.split(", "))
    many = registry_of({f"g{number:03}.run": echo for number in range(60)})
    for source, end in ((many, "g049 (1), and 10 more."), (registry_of(), "none.")):
        assert (await run_openai_call(source, "search_tools", {"query": "xylophone"}, search=True)).endswith(end)


async def test_a_long_query_costs_no_more_than_a_short_one() -> None:
    """Nothing is looked for behind its first thousand characters and its first fifty words."""
    registry = registry_of({"the.needle": echo})
    for before, found in ((" " * 980, 1), (" " * 1_000, 0), ("w%d " * 49, 1), ("w%d " * 50, 0)):
        words = before % tuple(range(before.count("%d")))
        assert len(await by_model(registry, f"{words}needle")) == found, before


async def test_a_search_sees_what_is_registered_and_unregistered(mode: str) -> None:
    async with followed(stage(), mode, search=True) as (client, changes):
        assert await find(client, "grown") == []
        await client.call_tool("grow")
        async with asyncio.timeout(20):
            await changes.get()
        assert await find(client, "grown") == ["grown"]
        await client.call_tool("call_tool", {"name": "shrink"})
        assert await find(client, "grown") == []


@pytest.mark.parametrize(("client_name", "shown"), [("claude-ai", "files-copy"), ("cursor", "files.copy")])
async def test_names_are_those_that_the_client_takes(mode: str, client_name: str, shown: str) -> None:
    info = Implementation(name=client_name, version="1")
    async with connect(OFFICE, mode=mode, client={"client_info": info}, search=True) as client:
        assert await find(client, "copy") == [shown]
        for spelling in ("files-copy", "files.copy"):
            assert success_text(await client.call_tool("call_tool", {"name": spelling})) == "{}"


# ---- Who finds and calls what ----

STAFF = [ACLRule(callers=["*"], targets=["door.*"], effect="allow", conditions={"roles": ["staff"]})]
STAFF.append(ACLRule(callers=["*"], targets=["bell"], effect="allow"))


def doors() -> Executor:
    return Executor(registry_of({"door.open": echo, "bell": echo}), acl=ACL(STAFF, default_effect="deny"))


async def test_only_what_the_caller_is_offered_is_found(mode: str) -> None:
    async with connect(doors(), mode=mode, search=True) as client:
        assert await find(client, "door open bell") == ["bell"]
        assert "door" not in text_of(await client.call_tool("search_tools", {"query": "door"}))
        failure(await client.call_tool("call_tool", {"name": "door.open"}), "Access denied")
        assert success_text(await client.call_tool("call_tool", {"name": "bell"})) == "{}"
    ann = Identity("ann", roles=("staff",))
    assert await by_model(doors(), "door bell") == ["bell"]
    assert sorted(await by_model(doors(), "door bell", identity=ann)) == ["bell", "door-open"]
    assert await run_openai_call(doors(), "call_tool", {"name": "door-open"}, search=True) == "Access denied"


async def test_on_stdio_the_caller_has_no_name() -> None:
    text = """
from apcore import ACL, ACLRule
@tool
def a(inputs, context): return inputs
@tool
def b(inputs, context): return {}
staff = ACLRule(["@external"], ["t.b"], "allow", conditions={"roles": ["staff"]})
acl = ACL([ACLRule(["@external"], ["t.a"], "allow"), staff], default_effect="deny")
serve(Executor(registry, acl=acl), search=True)
"""
    async with asyncio.timeout(30), client_of(stdio(program(text))) as client:
        assert await listed(client) == BOTH
        assert await find(client, "a b test") == ["t.a"]
        assert text_of(await client.call_tool("call_tool", {"name": "t.a", "arguments": {"n": 1}})) == '{"n":1}'


async def test_what_is_hidden_or_filtered_is_neither_found_nor_called() -> None:
    hidden = FunctionalModule(echo, annotations=ModuleAnnotations(discoverable=False))
    registry = registry_of({"a.shown": echo, "a.hidden": hidden, "b.other": echo})
    assert await by_model(registry, "shown hidden other", prefix="a.") == ["a-shown"]
    async with connect(registry, search=True, prefix="a.") as client:
        assert await find(client, "shown hidden other") == ["a.shown"]
        for name in ("a.hidden", "b.other"):
            failure(await client.call_tool("call_tool", {"name": name}), f"Module not found: {name}")
            sent = {"name": name}
            text = await run_openai_call(registry, "call_tool", sent, search=True, prefix="a.")
            assert text == f"Module not found: {name}"


# ---- A call through call_tool is that call ----


def modules_of_all_kinds(ran: list[dict[str, Any]]) -> dict[str, Any]:
    def fail(inputs: dict[str, Any], context: Any) -> Any:
        raise RuntimeError("/etc/passwd")

    async def steps(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await report_progress(context, 1, total=2, message="half")
        return {"done": True}

    image = {**STRING, "contentEncoding": "base64", "contentMediaType": "image/png"}
    picture = {"type": "object", "properties": {"chart": image}}
    return {
        "k.echo": FunctionalModule(echo, input_schema={"type": "object", "properties": {"n": INTEGER}}),
        "k.fail": FunctionalModule(fail),
        "k.steps": FunctionalModule(steps),
        "k.stream": StreamingModule([{"a": 1}, {"b": 2}]),
        "k.secret": gives({"token": SECRET_TEXT}, output_schema=SECRETIVE),
        "k.file": gives({"chart": "YQ==", "n": 1}, output_schema=picture),
        "k.wipe": guarded(ran),
        "k.ask": FunctionalModule(ask),
    }


CALLS: list[tuple[str, dict[str, Any]]] = [
    ("k.echo", {"n": 1}), ("k.echo", {"n": "x"}), ("k.fail", {}), ("k.steps", {}), ("k.stream", {}), ("k.secret", {}),
    ("k.file", {}), ("k.wipe", {"disk": "a"}), ("k.ask", {}), ("k.none", {}),
]  # fmt: skip


@pytest.mark.parametrize("user", [None, accept(name="Ada", approve=True)], ids=["cannot-be-asked", "answers"])
async def test_call_tool_makes_the_call_itself(mode: str, user: Any, caplog: Caplog) -> None:
    """Result, progress, questions and log; each once directly, and once through `call_tool`."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    ran: list[dict[str, Any]] = []
    options, asked = asking(user)
    served: dict[str, Any] = {"mode": mode, "client": options, "search": True, "approval": "auto"}
    async with connect(modules_of_all_kinds(ran), **served) as client:
        for name, arguments in CALLS:
            seen: list[Any] = []
            for call in ((name, arguments), ("call_tool", {"name": name, "arguments": arguments})):
                for record in (caplog, ran, asked):
                    record.clear()
                note, progress = noting()
                result: Any = await client.call_tool(*call, progress_callback=note)
                lines = [record.getMessage() for record in caplog.records if record.name == "apcore_mcp"]
                lines = [line.split(" (trace ")[0] for line in lines if line.startswith("Tool call") or name in line]
                told = (result.content, result.structured_content)
                seen.append((told, progress, [question.message for question in asked], [*ran], lines))
            assert seen[0] == seen[1]
            assert seen[1][4], "nothing was logged"
            assert not any("call_tool" in line for line in seen[1][4])


async def test_a_parked_call_is_resumed_by_what_the_client_sent() -> None:
    sent = {"name": "ask", "arguments": {"n": 1}}
    async with connect({"ask": ask}, client=asking(accept())[0], search=True) as client, asyncio.timeout(40):
        wire = Wire(client)
        key, message, state = await wire.question("call_tool", sent)
        assert (key, message) == ("input", "Who are you?")
        await wire.refused(state, "ask", {"n": 1})
        await wire.refused(state, "call_tool", {**sent, "arguments": {"n": 2}})
        reply = {"request_state": state, "input_responses": {key: accept(name="Ada")}}
        result = await wire.call("call_tool", sent, **reply)
        assert result.structured_content == {"answer": {"name": "Ada"}}


async def test_a_call_through_call_tool_can_be_cancelled(mode: str) -> None:
    async with connect(stage(), mode=mode, search=True) as client, asyncio.timeout(40):
        await cancel_call(await start_call(client, "call_tool", name="wait"))
        assert (await client.call_tool("ended")).structured_content == {"told": "wait", "token_set": True}


def test_headers_are_checked_by_the_schema_of_the_two() -> None:
    """2026-07-28 lets a schema name headers that repeat an argument; a module of the same name has another schema."""
    mirrored = {**STRING, "x-mcp-header": "Region"}
    module = FunctionalModule(echo, input_schema={"type": "object", "properties": {"query": mirrored}})
    with serving(registry_of({"search_tools": module, "copy": echo}), search=True) as url:
        call = modern("tools/call", {"name": "search_tools", "arguments": {"query": "copy"}})
        response = httpx.post(f"{url}/mcp", trust_env=False, **call)
    assert answer(response)["result"]["structuredContent"]["result"][0]["name"] == "copy"


def test_resources_explorer_and_exports_show_everything(extensions: Path, capfd: pytest.CaptureFixture[str]) -> None:
    registry = registry_of({name: FunctionalModule(echo, documentation=f"About {name}") for name in ("a.b", "c.d")})
    with serving(registry, search=True, explorer=True) as url:
        response = httpx.post(f"{url}/mcp", trust_env=False, **modern("resources/list", {}))
        assert [each["uri"] for each in answer(response)["result"]["resources"]] == ["docs://a.b", "docs://c.d"]
        tools = httpx.get(f"{url}/explorer/tools", trust_env=False).json()
        assert [tool["name"] for tool in tools] == ["a.b", "c.d"]
        assert httpx.get(f"{url}/health", trust_env=False).json()["tools_count"] == 2
    for form, holds in (("openai", "voice-say"), ("client", '"--search"')):
        assert main(["--extensions-dir", str(extensions), "--search", "--export", form]) == 0
        assert holds in "".join(capfd.readouterr())  # once it has run, stdout is stderr


# ---- OpenAI ----


@pytest.mark.parametrize("strict", [False, True])
def test_openai_is_given_the_two_as_functions(strict: bool, caplog: Caplog) -> None:
    search, call = to_openai_tools(registry_of(OFFICE), search=True, strict=strict)
    assert [search["function"]["name"], call["function"]["name"]] == BOTH
    assert search["function"].get("strict", False) is strict
    assert "strict" not in call["function"], "its arguments are open"
    assert search["function"]["parameters"]["required"] == ["query"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_model_calls_by_the_names_of_functions() -> None:
    office = registry_of(OFFICE)
    sent = {"name": "files-copy", "arguments": {"source": "a", "target": None}}
    assert await run_openai_call(office, "call_tool", json.dumps(sent), search=True) == '{"source":"a"}'
    assert await run_openai_call(office, "files-copy", '{"source": "a"}', search=True) == '{"source":"a"}'
    assert from_openai_call(office, "call_tool", sent, search=True) == ("files.copy", {"source": "a"})
    assert from_openai_call(office, "call_tool", {"name": "files-copy"}, search=True) == ("files.copy", {})
    own = registry_of({"search_tools": echo})
    assert await run_openai_call(own, "call_tool", {"name": "search_tools"}, search=True) == "{}"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "search_tools"}, "Module not found: search_tools"),
        ({"name": "call_tool"}, "Module not found: call_tool"),
        ({"name": "mail-burn"}, "Module not found: mail-burn"),
        ("[]", "Invalid input: Arguments of 'call_tool' must be a JSON object, got list"),
    ],
)
async def test_a_model_is_told_what_is_wrong_with_a_call(arguments: Any, text: str) -> None:
    office = registry_of(OFFICE)
    assert await run_openai_call(office, "call_tool", arguments, search=True) == text
    with pytest.raises(ValueError, match=r"search_tools|call_tool|mail-burn"):
        from_openai_call(office, "call_tool", arguments, search=True)
