"""Who makes a request: the client, how its user can be asked and what it can be sent, and the caller.

Read from the SDK's request context and from the ASGI scope; nothing here is kept.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from apcore.context import Identity

if TYPE_CHECKING:
    from mcp.server.context import ServerRequestContext

    RequestContext = ServerRequestContext[Any, Any]

MODERN = "2026-07-28"  # from here on a server sends no requests: it answers `input_required`
TASKS_EXTENSION = "io.modelcontextprotocol/tasks"


class Way(enum.Enum):
    """The way by which the user of a call can be asked."""

    NONE = enum.auto()  # nobody is there, or nothing can be sent
    UNDECLARED = enum.auto()  # it would be RESULT or STATE, but the client has not declared that it shows forms
    REQUEST = enum.auto()  # by a request of the server's (before 2026-07-28)
    RESULT = enum.auto()  # by a result that is the question: the call waits for its client's retry
    STATE = enum.auto()  # the same, but nothing waits: the retry begins the call anew, on whichever server


@dataclass(frozen=True)
class Client:
    """What a call has to know of the client whose request it answers. The default is one that hears nothing but the
    result: code in Python, or the Explorer."""

    way: Way = Way.NONE
    session: Any = None  # the SDK's, for what is sent before the answer
    request_id: Any = None  # to which a question belongs (Way.REQUEST)
    naming: Literal["module-id", "portable"] = "module-id"  # of tools, by the option `tool_names`
    wants_progress: bool = False
    knows_tasks: bool = False
    trace: Mapping[str, str] = field(default_factory=dict)  # its span, where it sent one (SEP-414)


NO_CLIENT = Client()


def client_of(
    ctx: RequestContext, naming: Literal["module-id", "portable"], *, is_stateless: bool, has_key: bool
) -> Client:
    """The client that makes a request. With `is_stateless`, the retry of a question may reach another server, which can
    read its state only by a key that all of them have."""
    # No more of its `_meta`, which may be as large as a request and would be kept while the call waits.
    meta: Mapping[str, Any] = ctx.meta or {}
    spans = {key: meta.get(key) for key in ("traceparent", "tracestate")}
    capabilities = ctx.session.client_capabilities
    extensions = getattr(capabilities, "extensions", None) or {}
    forms = getattr(capabilities, "elicitation", None)
    has_forms = bool(forms and (forms.form or not forms.url))  # `{}` means forms (MCP 2025-11-25)
    is_modern = ctx.protocol_version >= MODERN
    if not is_modern:
        way = Way.REQUEST if has_forms and ctx.session.can_send_request else Way.NONE
    elif is_stateless and not has_key:
        way = Way.NONE
    elif not has_forms:
        way = Way.UNDECLARED
    else:
        way = Way.STATE if is_stateless else Way.RESULT
    return Client(
        way=way,
        session=ctx.session,
        request_id=ctx.request_id if way is Way.REQUEST else None,  # it may be as large as a request
        naming=naming,
        wants_progress="progress_token" in meta,
        knows_tasks=is_modern and not is_stateless and TASKS_EXTENSION in extensions,
        trace={key: text for key, text in spans.items() if isinstance(text, str) and len(text) <= 512},
    )


def caller_of(scope: Mapping[str, Any]) -> Identity | None:
    """The user whom ASGI middleware has authenticated for a request; None for an anonymous one."""
    user = scope.get("user")
    if not getattr(user, "is_authenticated", False):
        return None
    roles = tuple(getattr(scope.get("auth"), "scopes", None) or ())
    # The SDK's bearer user is called by its client, which may act for many users: the token's subject is the user.
    name: Any = getattr(getattr(user, "access_token", None), "subject", None)
    for attribute in ("identity", "display_name"):
        with suppress(NotImplementedError):  # Starlette's own users have no `identity`
            name = name or getattr(user, attribute, None)
    return Identity(str(name or "unnamed"), roles=roles)


def caller_in(ctx: RequestContext) -> Identity | None:
    """Who makes an MCP request; None for an anonymous caller, and on stdio."""
    return caller_of(getattr(ctx.request, "scope", {}))


def protocol_error(code: int, message: str, data: Any = None) -> Exception:
    """What the SDK answers with a JSON-RPC error."""
    from mcp.shared.exceptions import MCPError

    return MCPError(code, message, data)
