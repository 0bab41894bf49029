"""Calls that outlive their request (the tasks extension of MCP, SEP-2663).

It plugs into the server as an `Extension` of the MCP SDK, and gives a running call a second home under an id that
cannot be guessed. Without it, every client waits for its calls.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from mcp.server.extension import Extension, MethodBinding
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp_types import InputResponses, RequestParams
from pydantic import TypeAdapter

from .core import MODERN, TASKS_EXTENSION, Call, call_later, caller_in, json_bytes, protocol_error
from .schemas import JSONObject

__all__ = ["Task", "Tasks"]

_POLL_MS = 1_000  # how often a client is to ask
_STATUS_CHARACTERS = 500
_RUNNING_MAX = 1_000  # tasks that run or wait for an answer; half of them for each caller who has a name
_ARGUMENT_BYTES_MAX = 2 * 2**20  # of these, as JSON; in memory, it can be ninety times as much
_RESULT_BYTES_MAX = 64 * 2**20  # of what has ended, as it is sent
_RESULT_SECONDS = 3_600.0  # how long it is kept
_RECORD_BYTES = 1_000  # what a task takes beside its result


class Task:
    """A call that may go on without a request, and does so as soon as it has a `key`.

    Approval is asked before: a task begins once the tool's module has begun, at once where that is marked as long, or
    when the client has waited for long enough. It ends with its call; from then on, only its result is kept."""

    def __init__(self, call: Call, tasks: Tasks) -> None:
        self.call: Call | None = call  # None once it has ended
        self.owner = None if call.caller is None else call.caller.id
        self.key = ""
        self.size = json_bytes(call.arguments)
        self.is_cancelled = False  # by its client
        self.result: bytes = b""  # of a call that has ended, as JSON
        self.error: JSONObject | None = None  # the JSON-RPC error of one that has failed
        self.created = self.touched = time.time()
        self.timer: asyncio.TimerHandle | None = None  # that forgets it
        self._tasks = tasks
        self._is_long = call.tool.about.is_long
        self._has_begun = False
        self._is_due = False

    def touch(self) -> None:
        """Note that there is something new to tell."""
        self.touched = time.time()

    def begin(self) -> bool:
        """Note that the tool's own module begins. Returns whether it has no time limit, as a long task."""
        self._has_begun = True
        self._go_on()
        return self._is_long and bool(self.key)

    async def follow(self) -> JSONObject | None:
        """Wait until the call has ended or asks its user, and then None; or until it goes on as a task, and then what
        its request is answered with."""
        call = self.call
        if call is None or not call.knows_tasks:
            return None
        timer = None
        if self._tasks.after_seconds is not None:
            timer = call_later(self._tasks.after_seconds, self._be_due)
        try:
            while call.is_working and not self.key:
                await call.turn()
        finally:
            if timer is not None:
                timer.cancel()
        return {**self.state(), "resultType": "task", "status": "working"} if self.key else None

    def ended(self) -> None:
        """Keep the result of the call, and nothing else of it."""
        call = self.call
        self.call = None
        self.touch()
        if call is None or not self.key:
            return
        outcome: Any = call.outcome
        call.outcome = None
        if isinstance(outcome, Exception):
            self.error = outcome.error.model_dump(exclude_none=True)  # type: ignore[attr-defined]  # the SDK's MCPError
        else:
            self.result = json.dumps(outcome).encode()
        self._tasks.retire(self)

    def state(self) -> JSONObject:
        """What is said of a task whatever its status."""
        kept_ms = None if self.call else math.ceil((self.touched - self.created + _RESULT_SECONDS) * 1000)
        return {
            "taskId": self.key,
            "createdAt": _timestamp(self.created),
            "lastUpdatedAt": _timestamp(self.touched),
            "ttlMs": kept_ms,
            "pollIntervalMs": _POLL_MS,
        }

    def details(self) -> JSONObject:
        """What `tasks/get` says of it (`DetailedTask` of the extension)."""
        details: JSONObject = {"status": "working"}
        if self.call is not None and self.call.questions:
            questions = {key: question.request for key, question in self.call.questions.items()}
            details = {"status": "input_required", "inputRequests": questions}
        elif self.call is not None:
            if self.call.status:
                details["statusMessage"] = self.call.status[:_STATUS_CHARACTERS]
        elif self.is_cancelled:
            details = {"status": "cancelled"}
        elif self.error is not None:
            details = {"status": "failed", "error": self.error, "statusMessage": self.error["message"]}
        else:
            details = {"status": "completed", "result": json.loads(self.result)}
        return {**self.state(), **details}

    def _be_due(self) -> None:
        self._is_due = True
        self._go_on()

    def _go_on(self) -> None:
        """Go on without a request, if it is time and there is room for one more task."""
        call = self.call
        is_time = self._has_begun and (self._is_long or self._is_due)
        if call is None or self.key or not is_time or not call.is_working or not call.knows_tasks:
            return
        if self._tasks.keep(self):
            call.detach()


class Tasks(Extension):
    """The tasks of one server, and the methods by which clients come by them. Each belongs to the caller who began it.

    At most 1,000 run or wait, half of them for each caller with a name, with 2 MiB of arguments; one more call is no
    task, and its client waits. Results are kept for an hour, and 64 MiB of them: the oldest go
    first. Event loop only."""

    identifier = TASKS_EXTENSION

    def __init__(self, after_seconds: float | None) -> None:
        self.after_seconds = after_seconds  # how long a client waits before a call becomes a task; None: for ever
        self._running: dict[str, Task] = {}
        self._running_bytes = 0
        self._running_of = Counter[str]()  # by the callers who have names
        self._ended: dict[str, Task] = {}  # oldest first
        self._ended_bytes = 0

    def methods(self) -> Sequence[MethodBinding]:
        handlers = {"tasks/get": self._get, "tasks/update": self._update, "tasks/cancel": self._cancel}
        versions = frozenset({MODERN})
        return [MethodBinding(method, RequestParams, handler, versions) for method, handler in handlers.items()]

    def prepare(self, call: Call) -> None:
        """Let a call that begins go on as a task, if it comes to that."""
        call.task = Task(call, self)

    def keep(self, task: Task) -> bool:
        """Keep a call as a task from now on; returns whether there is room for it."""
        is_full = len(self._running) >= _RUNNING_MAX or self._running_bytes + task.size > _ARGUMENT_BYTES_MAX
        if is_full or (task.owner is not None and self._running_of[task.owner] >= _RUNNING_MAX // 2):
            return False
        task.key = secrets.token_urlsafe(32)
        self._running[task.key] = task
        self._running_bytes += task.size
        if task.owner is not None:
            self._running_of[task.owner] += 1
        return True

    def retire(self, task: Task) -> None:
        """Keep what a task has ended with, for an hour or until there is no room for it."""
        del self._running[task.key]
        self._running_bytes -= task.size
        if task.owner is not None:
            self._running_of[task.owner] -= 1
            self._running_of += Counter()  # drops who has none
        task.size = len(task.result) + _RECORD_BYTES
        self._ended[task.key] = task
        self._ended_bytes += task.size
        task.timer = call_later(_RESULT_SECONDS, self._forget, task.key)
        while self._ended_bytes > _RESULT_BYTES_MAX and len(self._ended) > 1:
            self._forget(next(iter(self._ended)))

    def _forget(self, key: str) -> None:
        task = self._ended.pop(key)
        self._ended_bytes -= task.size
        if task.timer is not None:
            task.timer.cancel()

    async def finish(self) -> None:
        """Wait until no task works: one that waits for an answer may wait for long."""
        for task in [*self._running.values()]:
            while task.call is not None and task.call.is_working:
                await task.call.turn()

    def require(self, ctx: Any) -> None:
        """Raise the JSON-RPC error of a client that does not declare tasks with this very request."""
        if TASKS_EXTENSION not in (getattr(ctx.session.client_capabilities, "extensions", None) or {}):
            data: JSONObject = {"requiredCapabilities": {"extensions": {TASKS_EXTENSION: {}}}}
            raise protocol_error(-32021, f"Client did not declare the extension {TASKS_EXTENSION}", data)

    async def _get(self, ctx: Any, params: object) -> JSONObject:
        return self._named(ctx).details()

    async def _update(self, ctx: Any, params: object) -> JSONObject:
        call = self._named(ctx).call
        responses = (ctx.params or {}).get("inputResponses")
        if not isinstance(responses, Mapping):
            raise protocol_error(-32602, "inputResponses must be an object")
        if call is not None:
            # Of what is no longer open, nothing has to be right.
            answers = {key: responses[key] for key in call.questions.keys() & responses.keys()}
            call.answer(TypeAdapter(InputResponses).validate_python(answers, by_name=False))
        return {}

    async def _cancel(self, ctx: Any, params: object) -> JSONObject:
        task = self._named(ctx)
        if task.call is not None:
            task.is_cancelled = True
            task.call.cancel()
        return {}

    def _named(self, ctx: Any) -> Task:
        """The task that a request names. Raises the JSON-RPC error of what is wrong with it first."""
        self.require(ctx)
        task_id = (ctx.params or {}).get("taskId")
        if ctx.request is not None and decode_header_value(ctx.request.headers.get(MCP_NAME_HEADER)) != task_id:
            raise protocol_error(-32020, "The Mcp-Name header must be the id of the task")
        task = self._running.get(str(task_id)) or self._ended.get(str(task_id))
        caller = caller_in(ctx)
        if task is None or task.owner != (None if caller is None else caller.id):
            raise protocol_error(-32602, "Task not found")
        return task


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
