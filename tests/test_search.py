"""`search=True`: two tools in the place of all, one that finds tools and one that calls them.

What is found, and that a call through `call_tool` is the call itself: same result, questions, progress, errors and log,
in both protocol eras and over every transport. How well the search finds is measured by
`python -m tests.benchmarks.search`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from apcore import ACL, ACLRule, Executor, ModuleAnnotations, Registry
from apcore.context import Identity
from conftest import HANDSHAKE, MODERN, FunctionalModule, client_of, connect, echo, program, registry_of, serving, stdio
from mcp.client import Client
from mcp_types import CallToolResult
from pydantic import BaseModel, Field
from support import (
    DENIED,
    SECRET_TEXT,
    SECRETIVE,
    UNASKED,
    StreamingModule,
    Wire,
    accept,
    answer,
    ask,
    asking,
    errors_logged,
    everything_logged,
    failure,
    followed,
    gives,
    guarded,
    lines_of,
    listed,
    modern,
    noting,
    run,
    stage,
    success_text,
    text_of,
)

from apcore_mcp import from_openai_call, report_progress, run_openai_call, to_openai_tools

BOTH = ["search_tools", "call_tool"]
STRING, INTEGER = {"type": "string"}, {"type": "integer"}


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
    """The names of the tools that a search finds, after proof of what holds for every answer."""
    result = await client.call_tool("search_tools", {"query": query})
    assert not result.is_error
    text = text_of(result)
    if result.structured_content is None:
        assert text.startswith("No tool was found")
        return []
    tools = json.loads(text)
    assert result.structured_content == {"result": tools}
    assert 1 <= len(tools) <= 10
    assert all(tool.keys() == {"name", "description", "inputSchema"} for tool in tools)
    return [tool["name"] for tool in tools]


# ---- The two tools ----


@pytest.mark.parametrize("transport", ["streamable-http", "sse", "stdio"])
async def test_two_tools_stand_for_all(mode: str, transport: str) -> None:
    if transport == "stdio":
        source = program("@tool\ndef echo(inputs, context): return inputs\nserve(registry, search=True)")
        async with client_of(stdio(source), mode) as client:
            assert await listed(client) == BOTH
            assert await find(client, "echo") == ["t.echo"]
            assert text_of(await client.call_tool("call_tool", {"name": "t.echo", "arguments": {"a": 1}})) == '{"a":1}'
        return
    with serving(registry_of(OFFICE), transport=transport, search=True) as url:
        if transport == "sse" and mode == MODERN:
            pytest.skip("SSE is of the handshake versions")
        async with client_of(f"{url}/sse" if transport == "sse" else url, mode) as client:
            search, call = (await client.list_tools()).tools
            assert [search.name, call.name] == BOTH
            assert (search.input_schema["required"], call.input_schema["required"]) == (["query"], ["name"])
            assert search.output_schema is call.output_schema is None, "as Codex shows that alone, and some have none"
            assert [tool.annotations and tool.annotations.read_only_hint for tool in (search, call)] == [True, False]
            assert await find(client, "copy") == ["files.copy"]
            arguments = {"source": "a", "target": "b"}
            called = await client.call_tool("call_tool", {"name": "files.copy", "arguments": arguments})
            assert called == await client.call_tool("files.copy", arguments), "by its own name it still works"
            assert called.structured_content == arguments


async def test_without_the_option_the_two_names_are_like_any_other(mode: str) -> None:
    modules = {name: gives({"module": name}) for name in BOTH}
    async with connect(modules, mode=mode) as client:
        assert sorted(await listed(client)) == sorted(BOTH)
        for name in BOTH:
            assert json.loads(success_text(await client.call_tool(name, {"query": 1}))) == {"module": name}
    async with connect({"a": echo}, mode=mode) as client:
        for name in BOTH:
            failure(await client.call_tool(name, {"query": "a", "name": "a"}), f"Module not found: {name}")


async def test_a_module_with_the_name_of_one_of_the_two_is_called_through_call_tool(mode: str) -> None:
    modules = {name: gives({"module": name}) for name in BOTH}
    async with connect(modules, mode=mode, search=True) as client:
        assert await listed(client) == BOTH
        assert sorted(await find(client, "tool")) == sorted(BOTH)
        for name in BOTH:
            result = await client.call_tool("call_tool", {"name": name})
            assert result.structured_content == {"module": name}


@pytest.mark.parametrize("name", BOTH)
async def test_neither_can_be_called_through_the_other(name: str) -> None:
    async with connect({"a": echo}, search=True) as client:
        arguments = {"name": name, "arguments": {"query": "a", "name": "a"}}
        failure(await client.call_tool("call_tool", arguments), f"Module not found: {name}")


FORM = 'The form is {"name": "...", "arguments": {...}}, with an object as arguments'


@pytest.mark.parametrize(
    ("name", "arguments", "lines"),
    [
        pytest.param("search_tools", {}, [("query", "Field required", "required")], id="no-query"),
        pytest.param("search_tools", {"query": 5}, [("query", "5 is not of type 'string'", "type")], id="number"),
        pytest.param("call_tool", {}, [("name", "Field required", "required")], id="no-name"),
        pytest.param("call_tool", {"name": None}, [("name", FORM, "type")], id="name-null"),
        pytest.param("call_tool", {"name": "a", "arguments": "{}"}, [("arguments", FORM, "type")],
                     id="arguments-as-text"),
        pytest.param("call_tool", {"name": "a", "x": 1}, [("(root)", FORM, "additionalProperties")],
                     id="arguments-beside-the-name"),
    ],
)  # fmt: skip
async def test_wrong_arguments_of_the_two_are_told_as_any_tools_are(
    name: str, arguments: dict[str, Any], lines: list[Any], caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    async with connect({"a": echo}, mode=mode, search=True) as client:
        report = failure(await client.call_tool(name, arguments))
    assert lines_of(report) == lines
    assert report["error_type"] == "SCHEMA_VALIDATION_ERROR"
    assert len(errors_logged(caplog)) == 1


async def test_what_a_wrong_call_holds_is_not_quoted(caplog: pytest.LogCaptureFixture) -> None:
    """The arguments may be those of a tool that marks some of them."""
    caplog.set_level(logging.DEBUG, logger="apcore_mcp")
    pay = FunctionalModule(echo, input_schema=SECRETIVE)
    async with connect({"bank.pay": pay}, search=True) as client:
        for arguments in (f"token={SECRET_TEXT}", {"token": {"value": SECRET_TEXT}}):
            report = failure(await client.call_tool("call_tool", {"name": "bank.pay", "arguments": arguments}))
            assert SECRET_TEXT not in json.dumps(report)
    assert SECRET_TEXT not in everything_logged(caplog)


# ---- What is found ----


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
PLURALS = {"policy": "policies", "branch": "branches", "box": "boxes", "file": "files", "status": "statuses"}


async def test_a_search_finds_by_the_words_of_names_texts_and_parameters() -> None:
    """Plurals, beginnings of words, case and script do not matter."""
    async with connect(OFFICE, search=True) as client:
        for query, name in FIRST.items():
            assert (await find(client, query))[0] == name, query
    async with connect({f"a.{word}": echo for pair in PLURALS.items() for word in pair}, search=True) as client:
        for pair in PLURALS.items():
            for word in pair:
                assert sorted(await find(client, word)) == sorted(f"a.{each}" for each in pair), word


async def test_titles_tags_aliases_and_nested_parameters_are_looked_at() -> None:
    class Address(BaseModel):
        street: str = Field(description="Boulevard or lane")

    class Order(BaseModel):
        to: list[Address]

    modules = {
        "a.titled": FunctionalModule(echo, name="Invoice maker"),
        "a.tagged": FunctionalModule(echo, tags=["bookkeeping"]),
        "a.aliased": FunctionalModule(echo, metadata={"display": {"mcp": {"alias": "ledger"}}}),
        "a.nested": FunctionalModule(echo, input_schema=Order),
    }
    wanted = {"invoices": "a.titled", "bookkeeping": "a.tagged", "ledger": "ledger", "street": "a.nested"}
    async with connect(modules, search=True) as client:
        for query, name in (wanted | {"lane": "a.nested"}).items():
            assert await find(client, query) == [name]


async def test_a_rare_word_counts_more_and_a_name_most() -> None:
    modules = {f"list.m{number:02}": about("Show a thing") for number in range(20)}
    modules |= {"other.a": about("Show a unicorn"), "unicorn.b": about("Nothing"), "list.zz": about("Show a unicorn")}
    async with connect(modules, search=True) as client:
        found = await find(client, "list unicorns")
        assert len(found) == 10
        assert set(found[:3]) == {"unicorn.b", "list.zz", "other.a"}
        assert found.index("unicorn.b") < found.index("other.a")


async def test_where_nothing_is_found_the_groups_are_told() -> None:
    async with connect(OFFICE, search=True) as client:
        for query in ("xylophone", "", "?!", "\U0001f600", "a x"):
            result = await client.call_tool("search_tools", {"query": query})
            assert (result.is_error, result.structured_content) == (False, None), "Codex would show nothing else"
            groups = "mail (2), calendar (2), files (1), translate (1), weather (1)"
            assert sorted(text_of(result).split(": ")[1][:-1].split(", ")) == sorted(groups.split(", "))
            assert text_of(result).count("\n") == 0
    many = {f"g{number:03}.run": echo for number in range(60)}
    async with connect(many, search=True) as client:
        text = text_of(await client.call_tool("search_tools", {"query": "xylophone"}))
        assert text.endswith("g049 (1), and 10 more.")
    async with connect({}, search=True) as client:
        assert "none" in text_of(await client.call_tool("search_tools", {"query": "xylophone"}))


@pytest.mark.timeout(20)
async def test_a_long_query_costs_no_more_than_a_short_one() -> None:
    """3 MB of different words, among which what is looked for comes first."""
    module = about("Something to do", **{f"p{number}": STRING for number in range(20)})
    modules = {f"m{number:04}.run": module for number in range(500)}
    words = " ".join(f"w{number}" for number in range(400_000))
    async with connect({**modules, "the.needle": echo}, search=True) as client:
        assert (await find(client, f"needle {words}"))[0] == "the.needle"


async def test_a_call_of_the_wrong_form_is_told_the_right_one_and_quotes_nothing() -> None:
    """The arguments as text, and beside the name: what a model gets wrong most often."""
    card = {"type": "object", "properties": {"card": {"type": "string", "x-sensitive": True}}}
    registry = registry_of({"pay.charge": FunctionalModule(echo, input_schema=card)})
    as_text = {"name": "pay-charge", "arguments": '{"card": "4111"}'}
    for wrong in (as_text, {"name": "pay-charge", "card": "4111"}):
        told = await run_openai_call(registry, "call_tool", wrong, search=True)
        with pytest.raises(ValueError, match="not valid") as refused:
            from_openai_call(registry, "call_tool", wrong, search=True)
        for text in (told, str(refused.value)):
            assert '{"name": "...", "arguments": {...}}' in text
            assert "4111" not in text


async def test_words_have_their_vowels_in_every_script() -> None:
    async with connect({"m.t": about("दिन की रिपोर्ट"), "m.u": about("שָׁלוֹם")}, search=True) as client:
        assert await find(client, "रिपोर्ट") == ["m.t"]
        assert await find(client, "שָׁלוֹם") == ["m.u"]


async def test_a_module_whose_id_has_no_word_is_found_by_its_description_and_harms_no_search() -> None:
    async with connect({"a.b": about("Rotate a picture"), "image.crop": echo}, search=True) as client:
        assert await find(client, "rotate") == ["a.b"]


async def test_a_search_sees_what_is_registered_and_unregistered(mode: str) -> None:
    async with followed(stage(), mode, search=True) as (client, changes):
        assert await find(client, "grown") == []
        await client.call_tool("grow")
        async with asyncio.timeout(20):
            await changes.get()
        assert await find(client, "grown") == ["grown"]
        await client.call_tool("call_tool", {"name": "shrink"})
        assert await find(client, "grown") == []


@pytest.mark.parametrize("client_name", ["claude-ai", "cursor"])
async def test_names_are_those_that_the_client_takes(mode: str, client_name: str) -> None:
    from mcp_types import Implementation

    info = Implementation(name=client_name, version="1")
    async with connect(OFFICE, mode=mode, client={"client_info": info}, search=True) as client:
        (name,) = await find(client, "copy")
        assert name == ("files-copy" if client_name == "claude-ai" else "files.copy")
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
        text = text_of(await client.call_tool("search_tools", {"query": "door"}))
        assert "door" not in text
        failure(await client.call_tool("call_tool", {"name": "door.open"}), "Access denied")
        assert success_text(await client.call_tool("call_tool", {"name": "bell"})) == "{}"


async def test_what_is_hidden_or_filtered_is_neither_found_nor_called() -> None:
    hidden = FunctionalModule(echo, annotations=ModuleAnnotations(discoverable=False))
    registry = registry_of({"a.shown": echo, "a.hidden": hidden, "b.other": echo})
    async with connect(registry, search=True, prefix="a.") as client:
        assert await find(client, "shown hidden other") == ["a.shown"]
        for name in ("a.hidden", "b.other"):
            failure(await client.call_tool("call_tool", {"name": name}), f"Module not found: {name}")


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
async def test_a_call_through_call_tool_is_the_call_itself(
    mode: str, user: Any, caplog: pytest.LogCaptureFixture
) -> None:
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
                result: CallToolResult = await client.call_tool(*call, progress_callback=note)
                lines = [record.getMessage() for record in caplog.records if record.name == "apcore_mcp"]
                lines = [line.split(" (trace ")[0] for line in lines if line.startswith("Tool call") or name in line]
                seen.append((result, progress, [question.message for question in asked], [*ran], lines))
            assert seen[0] == seen[1]
            assert seen[1][4], "nothing was logged"
            assert not any("call_tool" in line for line in seen[1][4])


async def test_a_parked_call_is_resumed_by_the_arguments_that_the_client_sent() -> None:
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


async def test_a_call_through_call_tool_stops_when_it_is_cancelled(mode: str) -> None:
    begun, ended = asyncio.Event(), threading.Event()

    async def wait(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        await report_progress(context, 1)
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return {}

    async def note(*_: object) -> None:
        begun.set()

    async with connect({"wait": wait}, mode=mode, search=True) as client, asyncio.timeout(40):
        call = asyncio.create_task(client.call_tool("call_tool", {"name": "wait"}, progress_callback=note))
        await begun.wait()
        call.cancel()
        assert await asyncio.to_thread(ended.wait, 20)
        await asyncio.gather(call, return_exceptions=True)


async def test_require_and_deny_hold_for_what_call_tool_calls(mode: str) -> None:
    ran: list[dict[str, Any]] = []
    for approval in ("require", "deny"):
        async with connect({"wipe": guarded(ran)}, mode=HANDSHAKE, search=True, approval=approval) as client:
            text = UNASKED if approval == "require" else DENIED
            failure(await client.call_tool("call_tool", {"name": "wipe"}), text)
    assert ran == []


def test_the_sdk_checks_headers_by_the_schema_of_the_two_and_not_of_a_module() -> None:
    """2026-07-28 lets a schema name headers that repeat an argument; a module of the same name has another schema."""
    mirrored = {**STRING, "x-mcp-header": "Region"}
    module = FunctionalModule(echo, input_schema={"type": "object", "properties": {"query": mirrored}})
    with serving(registry_of({"search_tools": module, "copy": echo}), search=True) as url:
        call = modern("tools/call", {"name": "search_tools", "arguments": {"query": "copy"}})
        response = httpx.post(f"{url}/mcp", trust_env=False, **call)
    assert answer(response)["result"]["structuredContent"]["result"][0]["name"] == "copy"


# ---- Everywhere else everything is shown ----


def test_resources_explorer_and_exports_show_everything(extensions: Path) -> None:
    registry = registry_of({name: FunctionalModule(echo, documentation=f"About {name}") for name in ("a.b", "c.d")})
    with serving(registry, search=True, explorer=True) as url:
        response = httpx.post(f"{url}/mcp", trust_env=False, **modern("resources/list", {}))
        assert [each["uri"] for each in answer(response)["result"]["resources"]] == ["docs://a.b", "docs://c.d"]
        tools = httpx.get(f"{url}/explorer/tools", trust_env=False).json()
        assert [tool["name"] for tool in tools] == ["a.b", "c.d"]
        assert httpx.get(f"{url}/health", trust_env=False).json()["tools_count"] == 2
    for form in ("mcp", "openai"):
        exported = json.loads(run("--extensions-dir", str(extensions), "--search", "--export", form).stdout)
        assert len(exported) == 3
    entry = json.loads(run("--extensions-dir", str(extensions), "--search", "--export", "client").stdout)
    assert "--search" in entry["mcpServers"]["apcore-mcp"]["args"]


# ---- OpenAI ----


def office() -> Registry:
    return registry_of(OFFICE)


@pytest.mark.parametrize("strict", [False, True])
def test_openai_is_given_the_two_as_functions(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    search, call = to_openai_tools(office(), search=True, strict=strict)
    assert [search["function"]["name"], call["function"]["name"]] == BOTH
    assert search["function"].get("strict", False) is strict
    assert "strict" not in call["function"], "its arguments are open"
    assert search["function"]["parameters"]["required"] == ["query"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_model_finds_and_calls_by_the_names_of_functions() -> None:
    found = json.loads(await run_openai_call(office(), "search_tools", '{"query": "copy a file"}', search=True))
    assert [tool["name"] for tool in found] == ["files-copy"]
    assert found[0].keys() == {"name", "description", "inputSchema"}
    sent = {"name": "files-copy", "arguments": {"source": "a", "target": None}}
    assert await run_openai_call(office(), "call_tool", json.dumps(sent), search=True) == '{"source":"a"}'
    assert await run_openai_call(office(), "files-copy", '{"source": "a"}', search=True) == '{"source":"a"}'
    assert from_openai_call(office(), "call_tool", sent, search=True) == ("files.copy", {"source": "a"})
    assert from_openai_call(office(), "call_tool", {"name": "files-copy"}, search=True) == ("files.copy", {})


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("search_tools", {}, "Input validation failed:\n- query: Field required (required)"),
        ("call_tool", {"arguments": {}}, "Input validation failed:\n- name: Field required (required)"),
        ("call_tool", {"name": "search_tools"}, "Module not found: search_tools"),
        ("call_tool", {"name": "call_tool"}, "Module not found: call_tool"),
        ("call_tool", {"name": "mail-burn"}, "Module not found: mail-burn"),
        ("call_tool", "[]", "Invalid input: Arguments of 'call_tool' must be a JSON object, got list"),
    ],
)
async def test_a_model_is_told_what_is_wrong_with_a_search_or_a_call(name: str, arguments: Any, text: str) -> None:
    assert await run_openai_call(office(), name, arguments, search=True) == text
    with pytest.raises(ValueError, match=r"search_tools|call_tool|mail-burn"):
        from_openai_call(office(), name, arguments, search=True)


async def test_a_model_finds_within_its_filters_and_what_it_may_call() -> None:
    assert "mail (2)" in await run_openai_call(office(), "search_tools", {"query": "xylophone"}, search=True)
    query = {"query": "copy message"}
    found = json.loads(await run_openai_call(office(), "search_tools", query, search=True, prefix="mail."))
    assert [tool["name"] for tool in found] == ["mail-send"]
    text = await run_openai_call(office(), "call_tool", {"name": "files-copy"}, search=True, prefix="mail.")
    assert text == "Module not found: files-copy"
    ann = Identity("ann", roles=("staff",))
    for identity, names in ((None, ["bell"]), (ann, ["door-open", "bell"])):
        text = await run_openai_call(doors(), "search_tools", {"query": "door bell"}, search=True, identity=identity)
        assert sorted(tool["name"] for tool in json.loads(text)) == sorted(names)
    assert await run_openai_call(doors(), "call_tool", {"name": "door-open"}, search=True) == "Access denied"


async def test_without_the_option_a_model_has_no_such_functions() -> None:
    for name in BOTH:
        assert await run_openai_call(office(), name, {"query": "copy", "name": "copy"}) == f"Module not found: {name}"
        with pytest.raises(ValueError, match=name):
            from_openai_call(office(), name, {"query": "copy", "name": "copy"})
    own = registry_of({"search_tools": echo})
    assert await run_openai_call(own, "search_tools", {"query": 1}) == '{"query":1}'
    assert await run_openai_call(own, "call_tool", {"name": "search_tools"}, search=True) == "{}"
