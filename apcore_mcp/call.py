"""What a running call is to the rooms below `core.py`: to the steps that run its modules, to approval, to the log."""

from __future__ import annotations

import contextvars
from typing import Any, Protocol, cast

from apcore import Registry
from apcore.approval import ApprovalHandler
from apcore.context import Context

from .arguments import Arguments
from .conversation import Conversation
from .functions import Function
from .schemas import JSONObject

__all__ = ["CALL_KEY", "CURRENT_CALL", "RunningCall", "call_of"]


class RunningCall(Protocol):
    """A tool call from its beginning to its end, the modules that its module calls included."""

    @property
    def conversation(self) -> Conversation:
        """What it and its client say to each other."""
        ...

    @property
    def approver(self) -> ApprovalHandler | None:
        """Who decides about it, by the option `approval` of its server; None leaves that to apcore."""
        ...

    def owns(self, context: Context[Any]) -> bool:
        """Whether `context` is that of the tool's own module, and not of what that module calls."""
        ...

    def record(self, module_id: str, module: Any) -> None:
        """Note that a module takes part in the call."""
        ...

    def write(self, output: Any) -> JSONObject:
        """Check what the tool's own module gave, and write it as plain JSON."""
        ...

    def described(self, module_id: str, registry: Registry) -> tuple[str, Arguments]:
        """What the module of that id does, as its description begins, and what it takes, listed or not."""
        ...

    def function(self, module_id: str, module: Any) -> Function | None:
        """The function that a module was made of, if any."""
        ...

    @property
    def is_secret(self) -> bool:
        """Whether anything is marked as sensitive of what its modules take or give."""
        ...


# The call that code runs for: modules may call others without passing on their context, also from tasks and threads.
CURRENT_CALL: contextvars.ContextVar[RunningCall | None] = contextvars.ContextVar("apcore_mcp_call", default=None)
CALL_KEY = "_mcp_call"  # of the call in `context.data`


def call_of(context: Context[Any] | None) -> RunningCall | None:
    """The call that a module runs for, by its context, or without one that of the running code; None where no server
    was called."""
    data = None if context is None else context.data.get(CALL_KEY)
    return cast("RunningCall | None", data) or CURRENT_CALL.get()
