"""What flask-apcore 0.4, fastapi-apcore 0.4 and django-apcore 0.5 pass; `python -m tests.interop` runs themselves."""

from __future__ import annotations

import importlib
import logging
from typing import Any

import pytest
from apcore import AlwaysDenyHandler, AutoApproveHandler, ModuleAnnotations, Registry
from apcore.observability import MetricsCollector
from conftest import FunctionalModule, connect, echo, registry_of
from support import Caplog, accept, asking

import apcore_mcp
from apcore_mcp import MCPServer, async_serve, serve

HTTP = {"transport": "streamable-http", "host": "127.0.0.1", "name": "apcore-mcp"}
EXPLORER = {"explorer": True, "explorer_prefix": "/explorer", "allow_execute": False}
BRAND = {"explorer_title": "Tools", "explorer_project_name": "shop", "explorer_project_url": "https://shop.example"}

# What each passes as it comes, and with all that it can be told to pass but authentication.
FLASK = {**HTTP, "version": None, "validate_inputs": False, "log_level": None, "metrics_collector": None}
FLASK_ALL = {**FLASK, **EXPLORER, **BRAND, "approval_handler": AlwaysDenyHandler(), "output_formatter": str}
FLASK_ALL |= {"tags": ["a"], "prefix": "demo.", "exempt_paths": {"/health"}, "metrics_collector": MetricsCollector()}
FLASK_ALL |= {"require_auth": True}
OFF = {"strategy": None, "trace": False, "observability": False, "output_format": None, "authenticator": None}
DJANGO = {**HTTP, **OFF, "on_startup": lambda: None, "on_shutdown": lambda: None, "require_auth": False}
DJANGO |= {"async_max_concurrent": 10, "async_max_tasks": 1000, "metrics_collector": True, "approval_handler": None}


@pytest.fixture
def registry() -> Registry:
    return registry_of({"demo.echo": FunctionalModule(echo, tags=["a"])})


@pytest.mark.parametrize("options", [FLASK, FLASK_ALL, DJANGO], ids=["flask", "flask-all", "django"])
async def test_the_options_of_an_adapter_serve(registry: Registry, options: dict[str, Any]) -> None:
    async with connect(registry, **options) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == ["demo.echo"]
        assert not (await client.call_tool("demo.echo", {"text": "hello"})).is_error


def test_options_without_effect_are_told_in_a_line(registry: Registry, caplog: Caplog) -> None:
    with caplog.at_level(logging.DEBUG, "apcore_mcp"):
        MCPServer(registry, **FLASK_ALL, **OFF)
    (told,) = caplog.messages
    assert told == (
        "MCPServer: without effect here: authenticator, exempt_paths, explorer_project_name, explorer_project_url,"
        " explorer_title, observability, output_format, require_auth, strategy, trace"
    )


async def test_an_approval_handler_is_the_approval_under_another_name() -> None:
    modules = {"demo.run": FunctionalModule(echo, annotations=ModuleAnnotations(requires_approval=True))}
    asks, (yes, _) = apcore_mcp.ElicitationApprovalHandler(), asking(accept(approve=True))
    for handler, runs in ((AlwaysDenyHandler(), False), (AutoApproveHandler(), True), (asks, True)):
        async with connect(modules, client=yes, approval_handler=handler) as client:
            assert (await client.call_tool("demo.run", {})).is_error is not runs


def test_what_would_change_something_is_refused(registry: Registry) -> None:
    refused: list[tuple[dict[str, Any], str]] = [
        ({"strategy": "minimal"}, "strategy: Unexpected keyword argument"),
        ({"authenticator": object()}, r".*authenticator.*middleware="),
        ({"approval": "deny", "approval_handler": "off"}, "approval_handler: Unexpected keyword argument"),
        ({"approval_handler": 3}, "approval"),
    ]
    for door, name in ((serve, r"serve\(\)"), (MCPServer, "MCPServer"), (async_serve, r"async_serve\(\)")):
        for options, told in refused:
            with pytest.raises(TypeError, match=rf"^{name} {told}"):
                door(registry, **options)


def test_who_asks_for_an_authenticator_is_stopped() -> None:
    """With an ImportError it would serve its tools to everyone: fastapi-apcore and django-apcore catch that one."""
    assert not hasattr(apcore_mcp, "JWTAuthenticator")
    with pytest.raises(RuntimeError, match=r"middleware=\[.*\] of serve\(\), MCPServer and async_serve\(\)"):
        importlib.import_module("apcore_mcp.auth")
