"""What a module may say to the client of its call: `report_progress()` and `elicit()`.

They find the call in the module's context, and do nothing without one: a module stays callable from its own unit test.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from apcore.cancel import CancelToken

from .conversation import Sent
from .schemas import JSONObject, JSONSchema

__all__ = ["MCP_ELICIT_KEY", "MCP_PROGRESS_KEY", "elicit", "report_progress"]

MCP_PROGRESS_KEY = "_mcp_progress"
"""The key of the function in `context.data` that sends the call's progress (FR-EXT-003)."""

MCP_ELICIT_KEY = "_mcp_elicit"
"""The key of the function in `context.data` that asks the user of the call (FR-EXT-003)."""


def report_progress(
    context: Any, progress: float, total: float | None = None, message: str | None = None
) -> Awaitable[None]:
    """Tell the client how far a running module is: `await report_progress(context, 50, total=100)`. In a plain
    function, which has no event loop, without `await`: it is sent before this returns.

    A `progress` that is not finite, or no higher than the last one, is not sent (MCP, "Progress"), and neither is a
    `total` that is not finite. Does nothing when the module was not called through MCP (`context` may be None) or the
    client asked for no progress. Source: FR-EXT-001."""
    send = _from_context(context, MCP_PROGRESS_KEY)
    reported: Awaitable[None] = Sent() if send is None else send(progress, total, message)
    return reported


async def elicit(
    context: Any, message: str, requested_schema: JSONSchema | None = None, *, key: str | None = None
) -> JSONObject | None:
    """Ask the user who made this call, and wait: `await elicit(context, "Which one?", {"type": "object", ...})`.

    Returns what the user filled in, a dict that `requested_schema` accepts (without a schema the question is a bare
    confirmation, and its answer `{}`). Returns None when the user declined, cancelled, filled in something else or said
    nothing for ten minutes, when the client cannot ask, and when the module was not called through MCP (`context` may
    be None). `key` names the question on the wire (from 2026-07-28).

    Raises ValueError, before anything is sent, for a schema that is not an object with properties of simple types
    without patterns. The module's own timeout goes on meanwhile: once it is over, or
    the call is cancelled, ExecutionCancelledError. Source: FR-EXT-002; MCP, "Elicitation"."""
    ask = _from_context(context, MCP_ELICIT_KEY)
    if ask is None:
        return None
    token = context.cancel_token or CancelToken()
    token.check()
    answer: JSONObject | None = await ask(message, requested_schema, key)
    token.check()  # or a module that has to end meanwhile, as its time is over, would act on the answer
    return answer


def _from_context(context: object, key: str) -> Any:
    """What the server of a call has put into its context under `key`; None where no server has."""
    data = getattr(context, "data", None)
    return data.get(key) if isinstance(data, Mapping) else None
