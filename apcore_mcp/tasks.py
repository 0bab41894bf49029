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

from .client import MODERN, TASKS_EXTENSION, caller_in, protocol_error
from .conversation import Conversation, Places, call_later
from .core import Tool
from .schemas import JSONObject

__all__ = ["Task", "Tasks"]

_POLL_MS = 1_000  # how often a client is to ask
_STATUS_CHARACTERS = 500
_RESULT_BYTES_MAX = 64 * 2**20  # of what has ended of each caller's, as it is sent
_RESULT_SECONDS = 3_600.0  # how long it is kept
_RECORD_BYTES = 1_000  # what a task takes beside its result


class Task:
    """A call that may go on without a request, and does so as soon as it has a `key`.

    Approval is asked before: a task begins once the tool's module has begun, at once where that is marked as long, or
    when the client has waited for long enough. It ends with its call; from then on, only its result is kept."""

    def __init__(self, conversation: Conversation, is_long: bool, tasks: Tasks) -> None:
        self.conversation: Conversation | None = conversation  # None once the call has ended
        self.owner = conversation.owner
        self.key = ""
        self.is_cancelled = False  # by its client
        self.result: bytes = b""  # of a call that has ended, as JSON
        self.error: JSONObject | None = None  # the JSON-RPC error of one that has failed
        self.created = self.touched = time.time()
        self.timer: asyncio.TimerHandle | None = None  # that forgets it
        self._tasks = tasks
        self._is_long = is_long
        self._has_begun = False
        self._is_due = False

    @property
    def size(self) -> int:
        """How many bytes are kept of a call that has ended."""
        return len(self.result) + _RECORD_BYTES

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
        conversation = self.conversation
        if conversation is None:
            return None
        timer = None
        if self._tasks.after_seconds is not None:
            timer = call_later(self._tasks.after_seconds, self._be_due)
        try:
            while conversation.is_working and not self.key:
                await conversation.news()
        finally:
            if timer is not None:
                timer.cancel()
        return {**self.state(), "resultType": "task", "status": "working"} if self.key else None

    def end(self, outcome: JSONObject | Exception) -> bool:
        """Keep the outcome of the call, and nothing else of it. Returns whether it is a task's."""
        conversation = self.conversation
        self.conversation = None
        self.touch()
        if conversation is None or not self.key:
            return False
        if isinstance(outcome, Exception):
            self.error = outcome.error.model_dump(exclude_none=True)  # type: ignore[attr-defined]  # the SDK's MCPError
        elif not self.is_cancelled:  # of such a one, nobody is told
            self.result = json.dumps(outcome).encode()
        self._tasks.retire(self, conversation)
        return True

    def state(self) -> JSONObject:
        """What is said of a task whatever its status."""
        kept_ms = math.ceil((self.touched - self.created + _RESULT_SECONDS) * 1000)
        return {
            "taskId": self.key,
            "createdAt": _timestamp(self.created),
            "lastUpdatedAt": _timestamp(self.touched),
            "ttlMs": None if self.conversation else kept_ms,
            "pollIntervalMs": _POLL_MS,
        }

    def details(self) -> JSONObject:
        """What `tasks/get` says of it (`DetailedTask` of the extension)."""
        conversation = self.conversation
        details: JSONObject = {"status": "working"}
        if conversation is not None and conversation.questions:
            questions = {key: question.request for key, question in conversation.questions.items()}
            details = {"status": "input_required", "inputRequests": questions}
        elif conversation is not None:
            if conversation.status:
                details["statusMessage"] = conversation.status[:_STATUS_CHARACTERS]
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
        """Go on without a request, if it is time and its caller has room for one more task."""
        conversation = self.conversation
        is_time = self._has_begun and (self._is_long or self._is_due)
        if conversation is None or self.key or not is_time:
            return
        if conversation.is_working and conversation.client.knows_tasks and self._tasks.keep(self, conversation):
            conversation.detach()


class Tasks(Extension):
    """The tasks of one server, and the methods by which clients come by them. Each belongs to the caller who began it.

    Each caller has a hundred `Places` for tasks that run or wait; one more call is no task, and its client waits.
    Results are kept for an hour, and 64 MiB of each caller's: the oldest go first. Event loop only."""

    identifier = TASKS_EXTENSION

    def __init__(self, after_seconds: float | None) -> None:
        self.after_seconds = after_seconds  # how long a client waits before a call becomes a task; None: for ever
        self._running: dict[str, Task] = {}
        self._places = Places()
        self._ended: dict[str | None, dict[str, Task]] = {}  # of each caller, oldest first
        self._ended_bytes = Counter[str | None]()

    def methods(self) -> Sequence[MethodBinding]:
        handlers = {"tasks/get": self._get, "tasks/update": self._update, "tasks/cancel": self._cancel}
        versions = frozenset({MODERN})
        return [MethodBinding(method, RequestParams, handler, versions) for method, handler in handlers.items()]

    def task(self, conversation: Conversation, tool: Tool) -> Task:
        """What lets a call that begins go on as a task, if it comes to that."""
        return Task(conversation, tool.about.is_long, self)

    def keep(self, task: Task, conversation: Conversation) -> bool:
        """Keep a call as a task from now on; returns whether its caller has room for it."""
        if not self._places.take(conversation):
            return False
        task.key = secrets.token_urlsafe(32)
        self._running[task.key] = task
        return True

    def retire(self, task: Task, conversation: Conversation) -> None:
        """Keep what a task has ended with, for an hour or until its caller has no room for it."""
        del self._running[task.key]
        self._places.leave(conversation)
        own = self._ended.setdefault(task.owner, {})
        own[task.key] = task
        self._ended_bytes[task.owner] += task.size
        task.timer = call_later(_RESULT_SECONDS, self._forget, task)
        while self._ended_bytes[task.owner] > _RESULT_BYTES_MAX and len(own) > 1:
            self._forget(next(iter(own.values())))

    def _forget(self, task: Task) -> None:
        own = self._ended[task.owner]
        del own[task.key]
        self._ended_bytes[task.owner] -= task.size
        if not own:
            del self._ended[task.owner], self._ended_bytes[task.owner]
        if task.timer is not None:
            task.timer.cancel()

    async def finish(self) -> None:
        """Wait until no task works: one that waits for an answer may wait for long."""
        for task in [*self._running.values()]:
            while task.conversation is not None and task.conversation.is_working:
                await task.conversation.news()

    def require(self, ctx: Any) -> None:
        """Raise the JSON-RPC error of a client that does not declare tasks with this very request."""
        if TASKS_EXTENSION not in (getattr(ctx.session.client_capabilities, "extensions", None) or {}):
            data: JSONObject = {"requiredCapabilities": {"extensions": {TASKS_EXTENSION: {}}}}
            raise protocol_error(-32021, f"Client did not declare the extension {TASKS_EXTENSION}", data)

    async def _get(self, ctx: Any, params: object) -> JSONObject:
        return self._named(ctx).details()

    async def _update(self, ctx: Any, params: object) -> JSONObject:
        conversation = self._named(ctx).conversation
        responses = (ctx.params or {}).get("inputResponses")
        if not isinstance(responses, Mapping):
            raise protocol_error(-32602, "inputResponses must be an object")
        if conversation is not None:
            # Of what is no longer open, nothing has to be right.
            answers = {key: responses[key] for key in conversation.questions.keys() & responses.keys()}
            conversation.answer(TypeAdapter(InputResponses).validate_python(answers, by_name=False))
        return {}

    async def _cancel(self, ctx: Any, params: object) -> JSONObject:
        task = self._named(ctx)
        if task.conversation is not None:
            task.is_cancelled = True
            task.conversation.cancel()
        return {}

    def _named(self, ctx: Any) -> Task:
        """The task that a request names. Raises the JSON-RPC error of what is wrong with it first."""
        self.require(ctx)
        task_id = (ctx.params or {}).get("taskId")
        if ctx.request is not None and decode_header_value(ctx.request.headers.get(MCP_NAME_HEADER)) != task_id:
            raise protocol_error(-32020, "The Mcp-Name header must be the id of the task")
        caller = caller_in(ctx)
        owner = None if caller is None else caller.id
        task = self._running.get(str(task_id)) or self._ended.get(owner, {}).get(str(task_id))
        if task is None or task.owner != owner:
            raise protocol_error(-32602, "Task not found")
        return task


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
