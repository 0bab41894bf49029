"""Where the Executor has an ACL, a caller is offered only what the caller may call."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest
from apcore import ACL, ACLRule, Executor
from apcore.context import Identity
from conftest import HANDSHAKE, MODERN, FunctionalModule, echo, registry_of
from mcp import MCPError
from mcp.client import Client
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from support import Monkeypatch, asgi_client, listed, overlay, text_of
from test_callers import Backend, signed

from apcore_mcp import run_openai_call, to_openai_tools

EVERYTHING = ["door.open", "lobby.look", "vault.open"]
STAFF = ["door.open", "lobby.look"]
GUEST = ["lobby.look"]


def rule(*targets: str, effect: str = "allow", **more: Any) -> ACLRule:
    return ACLRule(callers=["@external"], targets=[*targets], effect=effect, **more)


def staff_and_guests(**options: Any) -> ACL:
    """Everybody may look around in the lobby, and who has the role `write` open doors."""
    return ACL([rule("door.*", conditions={"roles": ["write"]}), rule("lobby.*")], default_effect="deny", **options)


def house(acl: Any) -> Executor:
    about: dict[str, Any] = {"documentation": "All about it", "metadata": overlay(page="<p>It")}
    return Executor(registry_of({name: FunctionalModule(echo, **about) for name in EVERYTHING}), acl=acl)


async def documented(client: Client) -> list[str]:
    """The modules whose documentation and whose page are listed, which are the same ones."""
    uris = [resource.uri.partition("://") for resource in (await client.list_resources()).resources]
    documents, pages = ([name for kind, _, name in uris if kind == wanted] for wanted in ("docs", "ui"))
    assert documents == pages
    return documents


async def refusal(client: Client, uri: str, module_id: str) -> tuple[int, str]:
    with pytest.raises(MCPError) as caught:
        await client.read_resource(uri + module_id)
    error = caught.value.error
    return error.code, f"{error.message}, {error.data}".replace(module_id, "ID")


@pytest.mark.requirement("NFR-SEC-001")
@pytest.mark.parametrize("era", [(HANDSHAKE, "sse"), (HANDSHAKE, "streamable-http"), (MODERN, "streamable-http")])
async def test_a_caller_is_offered_what_the_caller_may_call(era: tuple[str, str]) -> None:
    """From 2026-07-28 a connection has no caller, each of its requests has."""
    callers = {"alice": STAFF, None: GUEST, "": GUEST, "bob": STAFF}
    sessions = [[*callers]] if era[0] == MODERN else [["alice"], [None]]
    for first, *others in sessions:
        async with signed(house(staff_and_guests()), *era, caller=first) as session:
            for session.caller in (first, *others):
                client, offered = session.client, callers[session.caller]
                assert await listed(client) == await documented(client) == offered
                for module_id in offered:
                    assert not (await client.call_tool(module_id)).is_error
                for module_id in set(EVERYTHING) - {*offered}:
                    assert text_of(await client.call_tool(module_id)) == "Access denied"
                for uri, module_id in itertools.product(("docs://", "ui://"), EVERYTHING):
                    if module_id in offered:
                        assert (await client.read_resource(uri + module_id)).contents
                    else:
                        assert await refusal(client, uri, module_id) == await refusal(client, uri, "no.such")


async def test_only_apcores_acl_decides_what_is_offered() -> None:
    class OnTuesdays:
        def check(self, caller_id: object, target_id: object, context: object) -> bool:
            return False

    approved = ACL([rule("vault.*", approval="required")], default_effect="deny")
    for acl, offered in ((None, EVERYTHING), (OnTuesdays(), EVERYTHING), (approved, ["vault.open"])):
        async with signed(house(acl)) as session:
            assert await listed(session.client) == offered


async def test_a_list_leaves_nothing_in_the_audit_and_a_call_its_entry() -> None:
    entries: list[Any] = []
    async with signed(house(staff_and_guests(audit_logger=entries.append))) as session:
        assert await listed(session.client) == await documented(session.client) == GUEST
        assert entries == []
        await session.client.call_tool("vault.open")
        assert [(entry.target_id, entry.decision) for entry in entries] == [("vault.open", "deny")]


async def test_what_changes_in_the_acl_holds_from_the_next_list_on(tmp_path: Path) -> None:
    file = tmp_path / "acl.yaml"
    file.write_text("default_effect: deny\nrules:\n  - {callers: ['@external'], targets: ['door.*'], effect: allow}\n")
    acl = ACL.load(str(file))
    executor = house(acl)
    async with signed(executor) as session:
        assert await listed(session.client) == ["door.open"]
        acl.add_rule(rule("vault.*"))
        assert await listed(session.client) == ["door.open", "vault.open"]
        file.write_text("default_effect: allow\nrules: []\n")
        acl.reload()
        assert await listed(session.client) == EVERYTHING
        executor.set_acl(ACL([], default_effect="deny"))
        assert await listed(session.client) == []


class Raises:
    def evaluate(self, value: Any, context: Any) -> bool:
        raise RuntimeError(f"no answer of {value}")


class Later:
    def __init__(self) -> None:
        self.asked = 0

    async def evaluate(self, value: Any, context: Any) -> bool:
        self.asked += 1
        await asyncio.sleep(0)
        return bool(value)


async def test_a_condition_that_raises_hides_its_module_alone(monkeypatch: Monkeypatch) -> None:
    later = Later()
    monkeypatch.setitem(ACL._condition_handlers, "raises", Raises())
    monkeypatch.setitem(ACL._async_condition_handlers, "later", later)
    conditions = {"door.*": {"raises": 1}, "lobby.*": {"later": True}, "vault.*": {"later": False}}
    acl = ACL([rule(target, conditions=condition) for target, condition in conditions.items()], default_effect="deny")
    executor = house(acl)
    async with signed(executor) as session:
        assert await listed(session.client) == GUEST
        assert (await session.client.call_tool("door.open")).is_error
        asked = later.asked
        assert (await session.client.read_resource("docs://lobby.look")).contents
        assert later.asked == asked + 1  # about the module of that document alone
    assert offered_to_openai(executor, Identity("ann")) == ["lobby-look"]


async def test_the_explorer_shows_a_caller_what_the_caller_may_call() -> None:
    middleware = [Middleware(AuthenticationMiddleware, backend=Backend())]
    options: Any = {"explorer": True, "allow_execute": True, "middleware": middleware}
    async with asgi_client(house(staff_and_guests()), **options) as client:
        for headers, offered in (({"X-User": "alice"}, STAFF), ({}, GUEST)):
            tools = (await client.get("/explorer/tools", headers=headers)).json()
            assert [tool["name"] for tool in tools] == offered
            for module_id in EVERYTHING:
                shown = await client.get(f"/explorer/tools/{module_id}", headers=headers)
                called = await client.post(f"/explorer/tools/{module_id}/call", headers=headers, json={})
                expected = (200, None) if module_id in offered else (404, "Access denied")
                assert (shown.status_code, called.json().get("error")) == expected


def offered_to_openai(executor: Executor, identity: Identity | None = None, **options: Any) -> list[str]:
    return [tool["function"]["name"] for tool in to_openai_tools(executor, identity=identity, **options)]


async def test_openai_is_offered_what_an_identity_may_call() -> None:
    entries: list[Any] = []
    executor = house(staff_and_guests(audit_logger=entries.append))
    ann, bob = Identity("ann", roles=("write",)), Identity("bob")
    assert offered_to_openai(executor) == ["door-open", "lobby-look", "vault-open"]
    for strict in (True, False):
        assert offered_to_openai(executor, ann, strict=strict) == ["door-open", "lobby-look"]
        assert offered_to_openai(executor, bob, strict=strict) == ["lobby-look"]
    assert offered_to_openai(executor, ann, prefix="door") == ["door-open"]
    assert entries == []
    for identity, told in ((ann, '{"a":1}'), (bob, "Access denied"), (None, "Access denied")):
        assert await run_openai_call(executor, "door-open", {"a": 1}, identity=identity) == told


@pytest.mark.parametrize("validate_inputs", [False, True])
async def test_who_may_not_call_a_tool_is_not_told_what_it_takes(validate_inputs: bool) -> None:
    executor = house(staff_and_guests())
    schema = {"type": "object", "properties": {"secret_field": {"type": "string"}}, "required": ["secret_field"]}
    executor.registry.register("vault.unlock", FunctionalModule(echo, input_schema=schema))
    async with signed(executor, validate_inputs=validate_inputs) as session:
        for arguments in ({"unknown": 1}, {"secret_field": 1}):
            assert text_of(await session.client.call_tool("vault.unlock", arguments)) == "Access denied"
