"""Every option: what is allowed, what is refused before anything starts, and in which words (FR-SERVER-004, -007 to
-010, FR-TRANSPORT-005, FR-LOG-005).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import pytest
from apcore import Executor, Registry
from conftest import registry_of, serving
from starlette.middleware import Middleware as ASGIMiddleware
from starlette.middleware.gzip import GZipMiddleware
from support import LOGGER, _run_async_serve, every_door

from apcore_mcp import MCPServer, async_serve, serve


@pytest.mark.requirement("FR-SERVER-004", "FR-SERVER-007", "FR-SERVER-008", "FR-SERVER-009")
@every_door
@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"port": 0}, "Port must be between 1 and 65535, got 0", id="port-0"),
        pytest.param({"port": 65536}, "Port must be between 1 and 65535, got 65536", id="port-65536"),
        pytest.param({"port": -1}, "Port must be between 1 and 65535, got -1", id="port-negative"),
        pytest.param({"port": 0, "transport": "sse"}, "Port must be between 1 and 65535, got 0", id="port-of-sse"),
        pytest.param({"host": ""}, "Host must not be empty", id="host"),
        pytest.param({"name": ""}, "name must not be empty", id="name-empty"),
        pytest.param({"name": "n" * 256}, "name must not exceed 255 characters", id="name-long"),
        pytest.param({"version": ""}, "version must not be empty", id="version"),
        pytest.param({"instructions": ""}, "instructions must not be empty", id="instructions"),
        pytest.param({"tags": [""]}, "Tag values must not be empty", id="tag"),
        pytest.param({"tags": ["public", ""]}, "Tag values must not be empty", id="second-tag"),
        pytest.param({"prefix": ""}, "prefix must not be empty", id="prefix"),
        *(
            pytest.param(
                {"transport": transport},
                f"Unknown transport: '{transport}'. Must be one of: stdio, streamable-http, sse",
                id=f"transport-{transport}",
            )
            for transport in ("websocket", "http", "")
        ),
        *(
            pytest.param(
                {"log_level": level},
                f"Unknown log level: '{level}'. Must be one of: DEBUG, INFO, WARNING, ERROR",
                id=f"log-level-{level}",
            )
            for level in ("verbose", "CRITICAL", "")
        ),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_before_anything_starts(
    door: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    started: list[str] = []
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the whole message is compared
        door(registry_of(), **{"transport": "streamable-http", "on_startup": lambda: started.append("up"), **options})
    assert str(refused.value) == message
    assert started == []


@pytest.mark.parametrize("options", [{"host": ""}, {"port": 0}], ids=str)
async def test_an_app_is_held_to_what_it_listens_on_without_a_transport_too(options: dict[str, Any]) -> None:
    """An empty host would be guarded by nothing."""
    with pytest.raises(ValueError, match=r"Host must not be empty|Port must be between"):
        async with async_serve(registry_of(), **options):
            pass


@every_door
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tags": "public"}, "tags must be Sequence[str] | None, got 'public'"),
        ({"tags": [1]}, "tags must be Sequence[str] | None, got [1]"),
        ({"allowed_hosts": "example.com"}, "allowed_hosts must be Sequence[str] | None, got 'example.com'"),
        ({"prefix": 3}, "prefix must be str | None, got 3"),
        ({"name": None}, "name must be str, got None"),
        ({"name": "\ud800"}, r"name must be str, got '\ud800'"),
        ({"version": 2}, "version must be str | None, got 2"),
        ({"instructions": 7}, "instructions must be str | None, got 7"),
        ({"host": 5}, "host must be str, got 5"),
        ({"port": "8000"}, "port must be int, got '8000'"),
        ({"port": True}, "port must be int, got True"),
        ({"explorer": 1}, "explorer must be bool, got 1"),
        ({"transport": None}, "transport must be str, got None"),
        ({"approval": 3}, "approval must be str | ApprovalHandler, got 3"),
        ({"on_startup": 3}, "on_startup must be Callable[[], Any] | None, got 3"),
        ({"on_shutdown": "later"}, "on_shutdown must be Callable[[], Any] | None, got 'later'"),
        ({"output_formatter": "json"}, "output_formatter must be Callable[[Any], str] | None, got 'json'"),
        ({"middleware": "gzip"}, "middleware must be a list of Starlette's Middleware(...), got 'gzip'"),
        ({"middleware": [1]}, "middleware must be a list of Starlette's Middleware(...), got [1]"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_value_of_a_wrong_type_is_a_type_error(
    door: Callable[..., Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError) as refused:
        door(registry_of(), **{"transport": "streamable-http", **options})
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("door", "name"),
    [(serve, "serve()"), (MCPServer, "MCPServer"), (_run_async_serve, "async_serve()")],
    ids=["serve", "MCPServer", "async_serve"],
)
def test_what_is_no_option_is_a_type_error_that_names_the_door(door: Callable[..., Any], name: str) -> None:
    with pytest.raises(TypeError) as refused:
        door(registry_of(), no_such_option=1)
    assert str(refused.value) == f"{name} got an unexpected keyword argument 'no_such_option'"


def test_an_option_without_its_name_is_a_type_error_that_names_the_door() -> None:
    """And so is a call without anything to serve."""
    for door, name in ((serve, "serve()"), (async_serve, "async_serve()")):
        with pytest.raises(TypeError, match=re.escape(f"{name} too many positional arguments")):
            door(registry_of(), "streamable-http")  # type: ignore[call-arg]
        with pytest.raises(TypeError, match=re.escape(f"{name} missing a required argument: 'registry_or_executor'")):
            door()  # type: ignore[call-arg]


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
        {"transport": "stdio", "port": 0},
        {"transport": "STDIO", "host": "", "port": 70_000},
        {"transport": "SSE", "port": 1},
        {"transport": "Streamable-HTTP", "port": 65535, "host": "0.0.0.0"},
        {"name": "n" * 255, "version": "0"},
        {"tags": [], "prefix": "x", "log_level": None},
        {"tags": ("a", "b"), "allowed_hosts": ("example.com",)},
        {"on_startup": print, "on_shutdown": None},
        {"output_formatter": str, "middleware": [], "instructions": "Ask before you write."},
        {"middleware": [ASGIMiddleware(GZipMiddleware, minimum_size=500)]},
    ],
    ids=str,
)
def test_values_at_the_edge_of_what_is_allowed_are_accepted(options: dict[str, Any]) -> None:
    """FR-TRANSPORT-005: stdio has no address, so whatever is given as one is ignored."""
    MCPServer(registry_of(), **options)
    MCPServer(Executor(registry_of()), **options)


@pytest.mark.requirement("FR-SERVER-010", "FR-LOG-005")
@pytest.mark.parametrize(
    ("option", "level"),
    [("DEBUG", 10), ("debug", 10), ("Info", 20), ("WARNING", 30), ("error", 40), (None, 35)],
    ids=str,
)
@pytest.mark.parametrize("root_handlers", [0, 1], ids=["logging-not-configured", "configured"])
def test_log_level_sets_our_logger_and_no_other_and_adds_no_handler_to_it(
    option: str | None, level: int, root_handlers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the option, nothing at all is changed (FR-LOG-005)."""
    handlers: list[logging.Handler] = [logging.NullHandler()] * root_handlers
    monkeypatch.setattr(logging.root, "handlers", list(handlers))
    root_level = logging.root.level
    LOGGER.setLevel(35)
    with serving(registry_of(), log_level=option):
        assert LOGGER.level == level
    assert LOGGER.handlers == []
    assert logging.root.level == root_level
    if root_handlers or option is None:
        assert logging.root.handlers == handlers
