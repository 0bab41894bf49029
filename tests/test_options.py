"""Every option: what is allowed, what is refused before anything starts, and in which words (FR-SERVER-004, -007 to
-010, FR-TRANSPORT-005, FR-LOG-005).
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from apcore import Executor, Registry
from conftest import registry_of
from starlette.middleware import Middleware as ASGIMiddleware
from starlette.middleware.gzip import GZipMiddleware
from support import LOGGER, every_door

from apcore_mcp import MCPServer, async_serve, serve, to_openai_tools

PREFIX = "explorer_prefix must be a path of its own, like /explorer; got"
ABOVE = "max_sessions and session_idle_seconds must be above 0, and max_result not below"
REFUSED: list[tuple[type[Exception], dict[str, Any], str]] = [
    (ValueError, {"port": 0}, "Port must be between 1 and 65535, got 0"),
    (ValueError, {"port": 65536, "transport": "sse"}, "Port must be between 1 and 65535, got 65536"),
    (ValueError, {"host": ""}, "Host must not be empty"),
    (ValueError, {"name": ""}, "name must not be empty"),
    (ValueError, {"name": "n" * 256}, "name must not exceed 255 characters"),
    (ValueError, {"tags": ["public", ""]}, "Tag values must not be empty"),
    (ValueError, {"exclude": [""]}, "MCPServer exclude: String should have at least 1 character"),
    (ValueError, {"allowed_hosts": [""]}, "MCPServer allowed_hosts: String should have at least 1 character"),
    (ValueError, {"transport": "http"}, "Unknown transport: 'http'. Must be one of: stdio, streamable-http, sse"),
    (ValueError, {"log_level": "LOUD"}, "Unknown log level: 'LOUD'. Must be one of: DEBUG, INFO, WARNING, ERROR"),
    (ValueError, {"approval": "maybe"}, "Unknown approval: 'maybe'. Must be one of: auto, require, deny, off"),
    (ValueError, {"explorer_prefix": "/mcp/"}, f"{PREFIX} '/mcp/'"),
    (ValueError, {"explorer_prefix": "/a/../b"}, f"{PREFIX} '/a/../b'"),
    (ValueError, {"explorer_prefix": "explorer"}, f"{PREFIX} 'explorer'"),
    (ValueError, {"explorer_prefix": "/"}, f"{PREFIX} '/'"),
    (ValueError, {"explorer_prefix": ""}, f"{PREFIX} ''"),
    (ValueError, {"explorer_prefix": "/messages/x"}, f"{PREFIX} '/messages/x'"),
    (ValueError, {"explorer_prefix": "/{name}"}, f"{PREFIX} '/{{name}}'"),
    (ValueError, {"max_sessions": 0}, ABOVE),
    (ValueError, {"max_result": -1}, ABOVE),
    (ValueError, {"session_idle_seconds": 0}, ABOVE),
    (ValueError, {"shutdown_seconds": -1}, "MCPServer shutdown_seconds: Input should be greater than or equal to 0"),
    (ValueError, {"shutdown_seconds": math.nan}, "MCPServer shutdown_seconds: Input should be a finite number"),
    (TypeError, {"tags": "public"}, "MCPServer tags: 'str' instances are not allowed as a Sequence value"),
    (TypeError, {"port": "8000"}, "MCPServer port: Input should be a valid integer"),
    (TypeError, {"approval": 3}, "MCPServer approval: Input should be a valid string"),
    (TypeError, {"on_startup": 3}, "MCPServer on_startup: Input should be callable"),
    (TypeError, {"no_such_option": 1}, "MCPServer no_such_option: Unexpected keyword argument"),
]


@pytest.mark.requirement("FR-SERVER-004", "FR-SERVER-007", "FR-SERVER-008", "FR-SERVER-009", "FR-EXPLORER-006")
@pytest.mark.parametrize(("error", "options", "message"), REFUSED, ids=str)
def test_a_value_that_is_not_allowed_is_refused(error: type[Exception], options: dict[str, Any], message: str) -> None:
    with pytest.raises(error) as refused:
        MCPServer(registry_of(), **{"transport": "streamable-http", **options})
    assert str(refused.value) == message


@every_door
def test_every_door_checks_its_options_before_anything_starts(door: Callable[..., Any]) -> None:
    started: list[str] = []
    with pytest.raises(ValueError, match=r"^Port must be between 1 and 65535, got 0$"):
        door(registry_of(), transport="streamable-http", port=0, on_startup=lambda: started.append("up"))
    assert started == []


def test_a_timeout_is_not_for_an_executor_that_has_its_own() -> None:
    with pytest.raises(ValueError, match="an Executor brings its own"):
        MCPServer(Executor(registry_of()), timeout=60)


def test_a_type_error_names_the_door_that_was_called() -> None:
    """Also for an option without its name, and for a call without anything to serve."""
    tags = ([registry_of()], {"tags": "public"}, "tags: ")
    unnamed = ([registry_of(), "streamable-http"], {}, "1: Unexpected positional argument")
    refused = [(door, tags) for door in (serve, async_serve, to_openai_tools)]
    for door in (serve, async_serve):
        refused += [(door, unnamed), (door, ([], {}, "registry_or_executor: Field required"))]
    for door, (given, options, told) in refused:
        with pytest.raises(TypeError, match=re.escape(f"{door.__name__}() {told}")):
            door(*given, **options)


@every_door
@pytest.mark.parametrize(("source", "kind"), [("registry", "str"), (None, "NoneType"), (Registry, "type")], ids=str)
def test_only_a_registry_or_an_executor_can_be_served(door: Callable[..., Any], source: Any, kind: str) -> None:
    with pytest.raises(TypeError) as refused:
        door(source, transport="streamable-http")
    assert str(refused.value) == f"Expected Registry or Executor instance, got {kind}"


@pytest.mark.requirement("FR-TRANSPORT-005")
@pytest.mark.parametrize(
    "options",
    [
        {"transport": "STDIO", "host": "", "port": 70_000},
        {"transport": "SSE", "port": 1, "log_level": "debug"},
        {"transport": "Streamable-HTTP", "port": 65535, "host": "0.0.0.0", "explorer_prefix": "/explorer/"},
        {"name": "n" * 255, "version": "0", "tags": [], "log_level": None, "exclude": None},
        {"tags": ("a", "b"), "allowed_hosts": ("example.com",), "on_startup": print, "on_shutdown": None},
        {"output_formatter": str, "middleware": [ASGIMiddleware(GZipMiddleware, minimum_size=500)]},
    ],
    ids=str,
)
def test_values_at_the_edge_of_what_is_allowed_are_accepted(options: dict[str, Any]) -> None:
    """FR-TRANSPORT-005: stdio has no address, so whatever is given as one is ignored."""
    MCPServer(registry_of(), **options)
    MCPServer(Executor(registry_of()), **options)


@pytest.mark.requirement("FR-SERVER-010", "FR-LOG-005")
@pytest.mark.parametrize(("option", "level"), [("debug", 10), ("Info", 20), (None, 35)])
@pytest.mark.parametrize("root_handlers", [0, 1], ids=["logging-not-configured", "configured"])
async def test_log_level_sets_our_logger_and_no_other_and_adds_no_handler_to_it(
    option: str | None, level: int, root_handlers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [logging.NullHandler()] * root_handlers)
    root_level = logging.root.level
    LOGGER.setLevel(35)
    async with async_serve(registry_of(), log_level=option):
        assert LOGGER.level == level
    assert LOGGER.handlers == []
    assert logging.root.level == root_level
    assert len(logging.root.handlers) == (1 if option else root_handlers)  # who asks for a level sees something
