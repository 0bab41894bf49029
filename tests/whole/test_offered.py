"""Who is offered what: where the Executor has an ACL, a caller reads only of what the caller may call (design, "Who is
offered what"). By the identity of the request that asks, in both eras; a call is decided as ever, by the Executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from apcore import ACL, ACLRule, Executor
from apcore.context import Identity
from apcore.decorator import module
from conftest import HANDSHAKE, FunctionalModule, echo, hosting, program, registry_of, stdio
from mcp import MCPError
from mcp.client import Client
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from support import listed, text_of
from test_callers import Backend, signed

from apcore_mcp import async_serve, run_openai_call, to_openai_tools

EVERYTHING = ["door.open", "lobby.look", "vault.open"]
STAFF = ["door.open", "lobby.look"]
GUEST = ["lobby.look"]


def rule(*targets: str, effect: str = "allow", **more: Any) -> ACLRule:
    return ACLRule(callers=["@external"], targets=[*targets], effect=effect, **more)


def staff_and_guests(**options: Any) -> ACL:
    """Everybody may look around in the lobby, and who has the role `write` open doors."""
    return ACL([rule("door.*", conditions={"roles": ["write"]}), rule("lobby.*")], default_effect="deny", **options)


def house(acl: Any) -> Executor:
    modules = {name: FunctionalModule(echo, documentation=f"All about {name}") for name in EVERYTHING}
    return Executor(registry_of(modules), acl=acl)


async def documented(client: Client) -> list[str]:
    return [resource.name for resource in (await client.list_resources()).resources]


async def refusal(client: Client, module_id: str) -> tuple[int, str, Any]:
    with pytest.raises(MCPError) as caught:
        await client.read_resource(f"docs://{module_id}")
    error = caught.value.error
    return error.code, error.message.replace(module_id, "ID"), str(error.data).replace(module_id, "ID")


@pytest.mark.parametrize(("caller", "offered"), [("alice", STAFF), (None, GUEST)])
@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
async def test_a_caller_is_offered_what_the_caller_may_call(
    mode: str, transport: str, caller: str | None, offered: list[str]
) -> None:
    if transport == "sse" and mode != HANDSHAKE:
        pytest.skip("SSE is of the handshake's era")
    async with signed(house(staff_and_guests()), mode, transport, caller=caller) as session:
        client = session.client
        assert await listed(client) == offered
        assert await documented(client) == offered
        for module_id in EVERYTHING:
            if module_id in offered:
                assert (await client.read_resource(f"docs://{module_id}")).contents
            else:
                assert await refusal(client, module_id) == await refusal(client, "no.such")
                assert text_of(await client.call_tool(module_id)) == "Access denied"


async def test_each_request_is_answered_for_who_makes_it() -> None:
    """From 2026-07-28 a connection has no caller, each of its requests has."""
    async with signed(house(staff_and_guests())) as session:
        for session.caller, offered in ((None, GUEST), ("alice", STAFF), ("", GUEST), ("bob", STAFF)):
            assert await listed(session.client) == offered


async def test_on_stdio_the_caller_has_no_name(mode: str) -> None:
    acl = 'ACL([ACLRule(callers=["@external"], targets=["t.a"], effect="allow"), guests], default_effect="deny")'
    guests = 'ACLRule(callers=["@external"], targets=["t.b"], effect="allow", conditions={"roles": ["staff"]})'
    text = f"""
from apcore import ACL, ACLRule
@tool
def a(inputs, context): return {{}}
@tool
def b(inputs, context): return {{}}
guests = {guests}
serve(Executor(registry, acl={acl}))
"""
    async with asyncio.timeout(30), Client(stdio(program(text)), mode=mode, cache=None) as client:
        assert await listed(client) == ["t.a"]


async def test_without_an_acl_or_with_one_of_another_class_everything_is_offered() -> None:
    class OnTuesdays:
        def check(self, caller_id: object, target_id: object, context: object) -> bool:
            return False

    for acl in (None, OnTuesdays()):
        async with signed(house(acl)) as session:
            assert await listed(session.client) == EVERYTHING


async def test_what_is_allowed_after_approval_is_offered() -> None:
    acl = ACL([rule("vault.*", approval="required")], default_effect="deny")
    async with signed(house(acl)) as session:
        assert await listed(session.client) == ["vault.open"]


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
        acl.remove_rule(["@external"], ["vault.*"])
        assert await listed(session.client) == ["door.open"]
        file.write_text("default_effect: allow\nrules: []\n")
        acl.reload()
        assert await listed(session.client) == EVERYTHING
        executor.set_acl(ACL([], default_effect="deny"))
        assert await listed(session.client) == []


class Raises:
    def evaluate(self, value: Any, context: Any) -> bool:
        raise RuntimeError(f"no answer of {value}")


class Later:
    async def evaluate(self, value: Any, context: Any) -> bool:
        await asyncio.sleep(0)
        return bool(value)


async def test_a_condition_that_raises_hides_at_most_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACL._condition_handlers, "raises", Raises())
    acl = ACL([rule("door.*", conditions={"raises": 1}), rule("lobby.*")], default_effect="deny")
    async with signed(house(acl)) as session:
        assert await listed(session.client) == GUEST
        assert (await session.client.call_tool("door.open")).is_error


async def test_a_condition_may_take_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ACL._async_condition_handlers, "later", Later())
    acl = ACL([rule("door.*", conditions={"later": True}), rule("vault.*", conditions={"later": False})])
    executor = house(acl)
    async with signed(executor) as session:
        assert await listed(session.client) == ["door.open"]
    assert offered_to_openai(executor, Identity("ann")) == ["door-open"]


async def test_a_caller_who_cannot_be_read_is_offered_nothing_and_told_nothing(mode: str) -> None:
    async with signed(house(staff_and_guests()), mode, caller="unreadable") as session:
        for ask in (session.client.list_tools, session.client.list_resources):
            with pytest.raises(MCPError) as caught:
                await ask()
            assert (caught.value.error.code, caught.value.error.message) == (-32603, "Internal error occurred")


@asynccontextmanager
async def explorer(source: Executor) -> AsyncIterator[httpx.AsyncClient]:
    middleware = [Middleware(AuthenticationMiddleware, backend=Backend())]
    options = {"explorer": True, "allow_execute": True, "middleware": middleware}
    async with (
        async_serve(source, **options) as app,
        hosting(app) as url,
        httpx.AsyncClient(base_url=f"{url}/explorer") as client,
    ):
        yield client


async def test_the_explorer_shows_a_caller_what_the_caller_may_call() -> None:
    async with explorer(house(staff_and_guests())) as client:
        for headers, offered in (({"X-User": "alice"}, STAFF), ({}, GUEST)):
            assert [tool["name"] for tool in (await client.get("/tools", headers=headers)).json()] == offered
            for module_id in EVERYTHING:
                shown = await client.get(f"/tools/{module_id}", headers=headers)
                called = await client.post(f"/tools/{module_id}/call", headers=headers, json={})
                assert (shown.status_code, called.status_code) == ((200, 200) if module_id in offered else (404, 500))
                if module_id not in offered:
                    assert called.json()["error"] == "Access denied"


def offered_to_openai(executor: Executor, identity: Identity | None = None, **options: Any) -> list[str]:
    return [tool["function"]["name"] for tool in to_openai_tools(executor, identity=identity, **options)]


def test_openai_is_offered_what_an_identity_may_call_and_without_one_everything() -> None:
    entries: list[Any] = []
    executor = house(staff_and_guests(audit_logger=entries.append))
    assert offered_to_openai(executor) == ["door-open", "lobby-look", "vault-open"]
    ann = Identity("ann", roles=("write",))
    for strict in (True, False):
        assert offered_to_openai(executor, ann, strict=strict) == ["door-open", "lobby-look"]
        assert offered_to_openai(executor, Identity("bob"), strict=strict) == ["lobby-look"]
    assert offered_to_openai(executor, ann, prefix="door") == ["door-open"]
    assert entries == []


async def test_what_openai_is_offered_can_be_called_by_whom_it_was_offered() -> None:
    executor = house(staff_and_guests())
    ann, bob = Identity("ann", roles=("write",)), Identity("bob")
    assert "door-open" in offered_to_openai(executor, ann)
    assert await run_openai_call(executor, "door-open", "{}", identity=ann) == "{}"
    assert await run_openai_call(executor, "door-open", "{}", identity=bob) == "Access denied"


@pytest.mark.parametrize("validate_inputs", [False, True])
async def test_who_may_not_call_a_tool_is_not_told_what_it_takes(validate_inputs: bool) -> None:
    executor = house(staff_and_guests())

    def unlock(secret_field: str) -> str:
        return secret_field

    module(id="vault.unlock", description="Unlock", registry=executor.registry)(unlock)
    async with signed(executor, validate_inputs=validate_inputs) as session:
        for arguments in ({"unknown": 1}, {"secret_field": 1}):
            assert text_of(await session.client.call_tool("vault.unlock", arguments)) == "Access denied"
