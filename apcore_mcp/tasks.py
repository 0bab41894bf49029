"""Calls that outlive their request (the tasks extension of MCP, SEP-2663, and a tool for clients that do not know it).

It plugs into the server as an `Extension` of the MCP SDK, and gives a running call a second home under an id that
cannot be guessed. Without it, every client waits for its calls.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from apcore import ModuleAnnotations, ModuleDescriptor
from mcp.server.extension import Extension, MethodBinding
from mcp.shared.inbound import MCP_NAME_HEADER, decode_header_value
from mcp_types import InputResponses, RequestParams
from pydantic import TypeAdapter

from .client import MODERN, TASKS_EXTENSION, Client, Way, caller_in, protocol_error
from .conversation import Conversation, Places, call_later
from .core import Catalog, Tool, failure, tool_result
from .options import Options
from .schemas import JSONObject

__all__ = ["Task", "Tasks"]

logger = logging.getLogger("apcore_mcp")

_POLL_MS = 1_000  # how often a client is to ask
_STATUS_CHARACTERS = 500
_RESULT_BYTES_MAX = 64 * 2**20  # of what has ended of each caller's, as it is sent
_RESULT_SECONDS = 3_600.0  # how long it is kept
_RECORD_BYTES = 1_000  # what a task takes beside its result

_TASK_RESULT = "task_result"
_TASK_RESULT_TEXT = "Get the result of a call that goes on. This waits for up to 20 seconds: while you are told that it"
_TASK_RESULT_TEXT += " still goes on, ask again."
_TASK_ID = {"type": "string", "description": "The id that the call was answered with"}
_CANCEL = {"type": "boolean", "description": "Whether to end the call"}
_WAIT_SECONDS = 20.0  # how long `task_result` waits


class Task:
    """A call that may go on without a request. To do so, it takes a place of its caller's, and has a `key` from then.

    Approval is asked before: a task begins once the tool's module has begun, at once where that is marked as long, or
    when the client has waited for long enough. It ends with its call; from then on, only its result is kept.

    For a client that does not know tasks, a call of a module that is marked as long takes its place at once, too, but
    goes on without its request only when the client has waited, and no question is open."""

    def __init__(self, conversation: Conversation, is_long: bool, tasks: Tasks) -> None:
        self.conversation: Conversation | None = conversation  # None once the call has ended
        self.owner = conversation.owner
        self.key = ""
        self.goes_on = False
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
        knows_tasks = conversation.client.knows_tasks
        timer = None
        if self._tasks.after_seconds is not None:
            timer = call_later(self._tasks.after_seconds, self._be_due)
        try:
            while conversation.is_working and not self.goes_on:
                await conversation.news()
                self._go_on()  # a question may have been answered
        finally:
            if timer is not None:
                timer.cancel()
        if not self.goes_on:
            return None
        if knows_tasks:
            return {**self.state(), "resultType": "task", "status": "working"}
        return self.reply()

    async def ended(self, client: Client) -> None:
        """Wait until the call has ended, and meanwhile tell `client` its progress."""
        conversation = self.conversation
        if conversation is not None:
            conversation.client = replace(conversation.client, session=client.session)
            try:
                while self.conversation is not None:
                    await conversation.news()
            finally:
                conversation.detach()

    def end(self, outcome: JSONObject | Exception) -> bool:
        """Keep the outcome of the call, and nothing else of it. Returns whether it is a task's."""
        conversation = self.conversation
        self.conversation = None
        self.touch()
        if conversation is None or not self.key:
            return False
        self._tasks.release(self, conversation)
        if not self.goes_on:
            return False
        if isinstance(outcome, Exception):
            self.error = outcome.error.model_dump(exclude_none=True)  # type: ignore[attr-defined]  # the SDK's MCPError
        else:
            self.result = json.dumps(outcome).encode()
        self._tasks.retire(self)
        return True

    def cancel(self) -> None:
        """End the call as its client wishes, if it has not ended."""
        if self.conversation is not None:
            self.is_cancelled = True
            self.conversation.cancel()

    def reply(self) -> JSONObject:
        """What a client that does not know tasks is told: that the call goes on, or what it has ended with."""
        conversation = self.conversation
        if conversation is not None:
            status = f" ({conversation.status[:_STATUS_CHARACTERS]})" if conversation.status else ""
            text = f"It goes on{status}. Call {_TASK_RESULT} with this id: {self.key}"
            return tool_result(text, _meta={"apcore-mcp/task": self.state()})
        if self.error is not None:
            return failure(self.error["message"], "GENERAL_INTERNAL_ERROR")
        result: JSONObject = json.loads(self.result)
        return result

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
        if conversation is None or self.goes_on or not self._has_begun or not conversation.is_working:
            return
        client = conversation.client
        is_time = self._is_long or (self._is_due and client.knows_tasks)
        if not is_time or not (self.key or self._tasks.keep(self, conversation)):
            return
        if not client.knows_tasks:
            if not self._is_due or conversation.questions:
                return
            conversation.client = replace(client, way=Way.NONE)  # its answers would reach nobody
        self.goes_on = True
        conversation.detach()


class Tasks(Extension):
    """The tasks of one server, and the methods by which clients come by them. Each belongs to the caller who began it.

    Each caller has a hundred `Places` for tasks that run or wait; one more call is no task, and its client waits.
    Results are kept for an hour, and 64 MiB of each caller's: the oldest go first. Event loop only.

    `tool` is `task_result`, by which clients that do not declare tasks come by what modules give that are marked as
    long. It is listed where there is such a module, and none of its name."""

    identifier = TASKS_EXTENSION

    def __init__(self, options: Options, catalog: Catalog) -> None:
        self.after_seconds = options.task_after  # how long a client waits before a call becomes a task; None: for ever
        self._running: dict[str, Task] = {}
        self._places = Places()
        self._ended: dict[str | None, dict[str, Task]] = {}  # of each caller, oldest first
        self._ended_bytes = Counter[str | None]()
        self._catalog = catalog
        self._has_warned = False
        properties = {"task_id": _TASK_ID, "cancel": _CANCEL}
        taken = {"type": "object", "properties": properties, "required": ["task_id"]}
        about = (_TASK_RESULT, "Result of a call", _TASK_RESULT_TEXT, None, taken)
        annotations = ModuleAnnotations(open_world=False)
        self.tool = Tool(ModuleDescriptor(*about, output_schema={}, annotations=annotations), None, options)

    def methods(self) -> Sequence[MethodBinding]:
        handlers = {"tasks/get": self._get, "tasks/update": self._update, "tasks/cancel": self._cancel}
        versions = frozenset({MODERN})
        return [MethodBinding(method, RequestParams, handler, versions) for method, handler in handlers.items()]

    def task(self, conversation: Conversation, tool: Tool) -> Task | None:
        """What lets a call that begins go on as a task, if it may come to that."""
        is_long = tool.about.is_long
        if conversation.client.knows_tasks or (is_long and self.stands_in(conversation.client)):
            return Task(conversation, is_long, self)
        return None

    def keep(self, task: Task, conversation: Conversation) -> bool:
        """Keep a call as a task from now on; returns whether its caller has room for it."""
        if not self._places.take(conversation):
            return False
        task.key = secrets.token_urlsafe(32)
        self._running[task.key] = task
        return True

    def release(self, task: Task, conversation: Conversation) -> None:
        """Give back the place of a call that has ended."""
        del self._running[task.key]
        self._places.leave(conversation)

    def retire(self, task: Task) -> None:
        """Keep what a task has ended with, for an hour or until its caller has no room for it."""
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
        self._named(ctx).cancel()
        return {}

    def _named(self, ctx: Any) -> Task:
        """The task that a request names. Raises the JSON-RPC error of what is wrong with it first."""
        self.require(ctx)
        task_id = (ctx.params or {}).get("taskId")
        if ctx.request is not None and decode_header_value(ctx.request.headers.get(MCP_NAME_HEADER)) != task_id:
            raise protocol_error(-32020, "The Mcp-Name header must be the id of the task")
        caller = caller_in(ctx)
        task = self._kept(str(task_id), None if caller is None else caller.id)
        if task is None:
            raise protocol_error(-32602, "Task not found")
        return task

    def _kept(self, task_id: str, owner: str | None) -> Task | None:
        task = self._running.get(task_id) or self._ended.get(owner, {}).get(task_id)
        return None if task is None or task.owner != owner else task

    # For clients that do not declare tasks.

    def stands_in(self, client: Client) -> bool:
        """Whether `task_result` takes the place of the extension's methods, for calls of modules marked as long."""
        is_told = client.session is not None and not client.knows_tasks
        return is_told and self.after_seconds is not None and self._catalog.find(_TASK_RESULT) is None

    def amend(self, definitions: list[JSONObject], offered: Sequence[Tool], client: Client) -> None:
        """Amend the list of tools that a client is sent, where one of those `offered` is marked as long."""
        long = {tool.name_as(client.naming) for tool in offered if tool.about.is_long}
        if long and self.stands_in(client):
            for definition in definitions:
                if definition["name"] in long:
                    definition.pop("outputSchema", None)  # clients refuse an answer without what it promises
            definitions.append(self.tool.definition(client.naming))
        elif long and self._catalog.find(_TASK_RESULT) is not None and not self._has_warned:
            self._has_warned = True
            logger.warning("The module %s takes the place of the tool that tells results of long work", _TASK_RESULT)

    def find(self, name: str) -> Tool | None:
        """`task_result`, if it is meant."""
        return self.tool if name == _TASK_RESULT and self.after_seconds is not None else None

    async def answer(self, arguments: JSONObject, asking: Conversation) -> JSONObject:
        """The result of a call of `task_result`, which is told the progress of the call that it waits for."""
        self.tool.arguments.check(arguments)
        task = self._kept(arguments["task_id"], asking.owner)
        if task is None:
            return failure("Task not found: it has never been, or its result is no longer kept", "TASK_NOT_FOUND")
        if arguments.get("cancel"):
            task.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(_WAIT_SECONDS):
                await task.ended(asking.client)
        return task.reply()


def _timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
