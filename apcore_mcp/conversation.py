"""What a running call and its client say to each other: progress, questions and their answers, and the outcome.

A call has one `Conversation`, which answers the request that began it, or the one that resumed it. A `WaitingRoom` has
the calls of a server that wait for their users. Nothing here knows of tools or of apcore's Executor.
"""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol

from apcore.cancel import CancelToken
from apcore.context import Identity
from jsonschema import Draft202012Validator

from .client import NO_CLIENT, Client, Way, protocol_error
from .schemas import JSONObject, JSONSchema, form_of, text_of

logger = logging.getLogger("apcore_mcp")

PARKED_SECONDS = 600.0  # how long a user may think, and how long the result of a parked call is kept for its retry

# Of one caller's calls that wait for their user (and of those that go on as tasks).
_PLACES_MAX = 100
_PLACES_BYTES_MAX = 256 * 2**10  # of their arguments, as JSON

# ---- What is sent ----


def json_bytes(value: Any) -> int:
    """How many bytes plain JSON takes."""
    return len(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def call_later(seconds: float, callback: Callable[..., object], *arguments: Any) -> asyncio.TimerHandle:
    """A timer in an empty context: a cancelled timer goes on to hold its context, and with it the call it was made in,
    until it would have rung."""
    return asyncio.get_running_loop().call_later(seconds, callback, *arguments, context=contextvars.Context())


def silence(future: asyncio.Future[Any]) -> None:
    """Take note of what `future` raised, when nobody else will: or asyncio logs it, and it may quote secrets."""
    if not future.cancelled():
        future.exception()


def _content_of(answer: Any, form: JSONSchema) -> JSONObject | None:
    """What a user has filled in; None for one who declined or cancelled.

    Raises any exception for what is no answer to a question, or one that the form does not accept."""
    if answer.action != "accept":
        return None
    content: JSONObject = answer.content or {}  # of a form whose fields may all be left empty
    for name, part in form["properties"].items():
        choices = part.get("items", {}).get("enum") or part.get("items", {}).get("anyOf") or ()
        # jsonschema would compare each of a million items with each choice, and hold up every other client.
        if isinstance(content.get(name), list) and len(content[name]) > len(choices):
            raise ValueError("More was chosen than there is")
    Draft202012Validator(form).validate(content)
    return {name: content[name] for name in form["properties"] if name in content}  # and nothing that nobody was asked


@dataclass
class _Question:
    """What a call asks its user, until it is answered or given up."""

    request: JSONObject  # as a client of 2026-07-28 is sent it
    answer: asyncio.Future[Any]


class Sent(Coroutine[Any, Any, None]):
    """What `report_progress()` returns when the report is already sent: to await it, or to run it by `asyncio.run()`,
    returns at once, and nothing warns when nobody does."""

    def send(self, value: Any) -> Any:
        raise StopIteration

    def throw(self, *error: Any) -> Any:
        raise StopIteration

    def close(self) -> None: ...

    def __await__(self) -> Generator[Any, Any, None]:
        yield from ()


# ---- Conversations; event loop only, but for `report()` and `elicit()` ----


class CallTask(Protocol):
    """The task that a call may become (tasks.py), which answers its client in the place of the result."""

    def touch(self) -> None:
        """Note that there is something new to tell."""
        ...

    async def follow(self) -> JSONObject | None:
        """Wait until the call has ended or asks its user, and then None; or until it goes on without its request, and
        then what that is answered with."""
        ...

    def begin(self) -> bool:
        """Note that the tool's own module begins. Returns whether it has no time limit."""
        ...

    def end(self, outcome: JSONObject | Exception) -> bool:
        """Note that the call has ended. Returns whether the outcome is kept here."""
        ...


class Conversation:
    """One call's side of what it and its client say to each other.

    It may ask several questions at once, each of them under a key that it uses for no other. Its `outcome` is a tool
    result, or the JSON-RPC error that it is answered with. `report()` and `elicit()`, which modules find in their
    context, may be called from any thread and loop: a sync module may run an async one in a loop of its own. Everything
    else belongs to the server's event loop."""

    def __init__(
        self, label: str, arguments: JSONObject, caller: Identity | None, client: Client, room: WaitingRoom
    ) -> None:
        self.label = label  # as lines of the log name the call
        self.arguments = arguments
        self.size: int | None = None  # of its arguments in bytes, once they have been measured
        self.caller = caller
        self.token = CancelToken()
        self.running: asyncio.Task[None] | None = None  # which runs the call, and ends with `end()`
        self.outcome: JSONObject | Exception | None = None
        self.questions: dict[str, _Question] = {}  # that are open, by their keys on the wire
        self.confirmation: Any = None  # the answer that came with a retry, until it is used (Way.STATE)
        self.is_confirmed = False  # whether it has been used
        self.first_question: JSONObject | None = None  # to which that answer is awaited: nothing has run yet
        self.must_ask = False  # whether nothing may be let through any more because nobody can be asked
        self.is_refused = False  # whether it was ended because too many calls wait
        self.is_parked = False  # whether it waits for its client's retry
        self.task: CallTask | None = None
        self.status = ""  # what was last reported, as a task tells it
        self._loop = asyncio.get_running_loop()
        self._room = room
        self._keys: list[str] = []  # of all questions that it has asked, as they were given
        self._progress = -math.inf  # the last number that was sent
        self._unsent: Future[None] | None = None  # the last report from another loop
        self._news = asyncio.Event()  # set when it may have something to answer the request with
        self.attach(client)

    @property
    def owner(self) -> str | None:
        """The id of its caller. All who have no name are one."""
        return None if self.caller is None else self.caller.id

    # For the request that it answers.

    def attach(self, client: Client) -> None:
        """Let the request of `client` be the one that is answered next: the one that began the call, or a retry."""
        self.client = client
        self.must_ask = self.must_ask or client.way in (Way.REQUEST, Way.RESULT, Way.STATE)

    def detach(self) -> None:
        """Go on without a request: what is sent to one after its answer is an error."""
        self.client = replace(self.client, session=None)
        self._news.set()

    @property
    def is_working(self) -> bool:
        """Whether it has nothing to answer a request with: no outcome and, from 2026-07-28 on, no question."""
        return self.outcome is None and (not self.questions or self.client.way is Way.REQUEST)

    async def news(self) -> None:
        """Wait until it may have stopped working."""
        self._news.clear()
        await self._news.wait()

    async def reply(self) -> JSONObject:
        """Wait for what its request is answered with: the result, the questions that are asked first, or the handle of
        a task. To stop waiting is to cancel the call. Raises the JSON-RPC error that it may end with."""
        try:
            handle = None if self.task is None else await self.task.follow()
            if handle is not None:
                return handle
            while self.is_working:
                await self.news()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if self.outcome is None:
            return self._room.park(self)
        outcome = self.outcome
        self.outcome = None  # a call that has ended is not kept, but whatever its module has left running keeps this
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def answer(self, responses: Mapping[str, Any]) -> None:
        """Pass on what the client has answered, by the keys of the questions. Answers to other keys are ignored."""
        for key in self.questions.keys() & responses.keys():
            answer = self.questions.pop(key).answer
            if not answer.done():  # it is when its time is over
                answer.set_result(responses[key])

    def cancel(self) -> None:
        """End the call: its CancelToken tells code that looks at it, and its coroutines are cancelled."""
        self.token.cancel()
        if self.running is not None:
            self.running.cancel()

    def end(self, outcome: JSONObject | Exception) -> None:
        """Let the request be answered; nothing more is reported or asked. Tasks that the module has left running hold
        on to the call, so it lets go of what is large: its arguments, and what its user is asked and has answered."""
        self.outcome = outcome
        self.running = None
        self.arguments = {}
        self.size = 0  # its place may be kept for the retry, its arguments are not
        self.client = NO_CLIENT
        self.must_ask = True  # whatever the module has left running
        for question in self.questions.values():
            question.answer.cancel()
        self.questions.clear()
        self._room.leave(self)
        if self.task is not None and self.task.end(outcome):
            self.outcome = None
        self.task = None
        self._news.set()

    # For modules.

    def report(self, progress: float, total: float | None = None, message: str | None = None) -> Awaitable[None]:
        """Send the client a progress notification, as `report_progress()` says."""
        number = float(progress)
        limit = None if total is None or not math.isfinite(float(total)) else float(total)  # JSON has no infinity
        try:
            asyncio.get_running_loop()
        except RuntimeError:  # there is none: a plain function in its thread
            unsent = self._hand_over(number, limit, message)
            wait([] if unsent is None else [unsent], timeout=1)
            return Sent()
        return self._report(number, limit, message)

    async def _report(self, number: float, limit: float | None, message: str | None) -> None:
        if asyncio.get_running_loop() is self._loop:
            if self.task is not None and math.isfinite(number):
                share = f"{number:.15g}" if limit is None else f"{number:.15g}/{limit:.15g}"
                self.status = f"{share} {text_of(message or '')}".strip()
                self.task.touch()
            session = self.client.session
            if session is not None and self._progress < number < math.inf:
                self._progress = number
                await session.report_progress(number, limit, message and text_of(message))
        else:
            unsent = self._hand_over(number, limit, message)
            if unsent is not None:
                await asyncio.wait({asyncio.wrap_future(unsent)}, timeout=1)

    def _hand_over(self, number: float, limit: float | None, message: str | None) -> Future[None] | None:
        """Let the server's loop send a report. Returns what to wait for, so that reports arrive in order, and before
        the result; while one is still to be sent, others are dropped.

        After a second the module goes on: the server's loop may be standing still, in an async module that waits for a
        synchronous `executor.call()`."""
        if self.running is None or (self._unsent is not None and not self._unsent.done()):
            return None
        self._unsent = asyncio.run_coroutine_threadsafe(self._report(number, limit, message), self._loop)
        return self._unsent

    async def report_chunk(self, text: str) -> None:
        """Send a chunk of a stream, as the next number of progress (FR-STREAM-001)."""
        await self.report(max(self._progress, 0) + 1, None, text)

    async def elicit(
        self, message: str, requested_schema: JSONSchema | None = None, key: str | None = None
    ) -> JSONObject | None:
        """Ask the user who made the call, as `elicit()` says."""
        if asyncio.get_running_loop() is not self._loop:
            work = self.elicit(message, requested_schema, key)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        form = form_of(requested_schema)
        message = text_of(message)
        if self.client.way not in (Way.REQUEST, Way.RESULT):
            return None
        if not self._room.admit(self):
            self.is_refused = True
            self.cancel()
            return None
        answer: asyncio.Future[Any]
        if self.client.way is Way.RESULT:
            answer = self._loop.create_future()
        else:
            request = self.client.session.elicit_form(message, form, self.client.request_id)
            answer = self._loop.create_task(request)
        answer.add_done_callback(silence)
        key = key or "input"
        self._keys.append(key)
        number = self._keys.count(key)
        if number > 1:  # a client may take a key for the question that it has answered
            key = f"{key}-{number}"
        params = {"mode": "form", "message": message, "requestedSchema": form}
        self.questions[key] = _Question({"method": "elicitation/create", "params": params}, answer)
        if self.task is not None:
            self.task.touch()
        self._news.set()
        timer = call_later(PARKED_SECONDS, answer.cancel)
        try:
            await asyncio.wait({answer})
        finally:
            timer.cancel()
            answer.cancel()
            self.questions.pop(key, None)
            self._news.set()
            if not self.questions:
                self._room.leave(self)
        if answer.cancelled() or answer.exception() is not None:
            logger.warning("Question of %s was not answered", self.label)
            return None
        return self.read(answer.result(), form)

    def read(self, answer: Any, form: JSONSchema) -> JSONObject | None:
        """What a client's answer says by the form of its question; None where it says nothing."""
        try:
            return _content_of(answer, form)
        except Exception as error:  # the client's fault or its connection's: the call goes on without an answer
            logger.warning("Question of %s was not answered: %s", self.label, type(error).__name__)
            return None


class Places:
    """Room for calls that wait, the same for each caller: a hundred places, for 256 KiB of arguments together as JSON
    (in memory, that can be ninety times as much). So nobody takes it from others. Event loop only."""

    def __init__(self) -> None:
        self._taken: dict[str | None, set[Conversation]] = {}

    def take(self, conversation: Conversation) -> bool:
        """Take a place, or keep the one that the call has; returns whether there is one."""
        if conversation.size is None:
            conversation.size = json_bytes(conversation.arguments)
        taken = self._taken.get(conversation.owner, set()) - {conversation}
        size = sum(other.size or 0 for other in taken) + conversation.size
        if len(taken) >= _PLACES_MAX or size > _PLACES_BYTES_MAX:
            return False
        self._taken[conversation.owner] = taken | {conversation}
        return True

    def leave(self, conversation: Conversation) -> None:
        """Give the place back, if the call has one."""
        taken = self._taken.get(conversation.owner, set())
        taken.discard(conversation)
        if not taken:
            self._taken.pop(conversation.owner, None)


class WaitingRoom:
    """The calls of a server that wait for their users. Event loop only.

    A call waits as long as a question is open, or until its client's retry. From 2026-07-28 on it is parked from the
    answer that asks until that retry, for ten minutes at most, under a state that cannot be guessed and is good for one
    retry of its caller; the SDK's `RequestStateBoundary` seals it, and binds it to the tool and the arguments. So the
    module never runs twice."""

    def __init__(self) -> None:
        self._places = Places()
        self._parked: dict[str, tuple[Conversation, asyncio.TimerHandle]] = {}

    def admit(self, conversation: Conversation) -> bool:
        """Whether there is a place for a call to wait in."""
        return self._places.take(conversation)

    def leave(self, conversation: Conversation) -> None:
        """Let a call go that has no open question, unless its client has yet to retry."""
        if not conversation.is_parked:
            self._places.leave(conversation)

    def park(self, conversation: Conversation) -> JSONObject:
        """Keep a call for its client's retry. Returns the result that asks its questions."""
        state = secrets.token_urlsafe(32)
        self._parked[state] = (conversation, call_later(PARKED_SECONDS, self._forget, state))
        conversation.is_parked = True
        conversation.detach()
        questions = {key: question.request for key, question in conversation.questions.items()}
        return {"resultType": "input_required", "requestState": state, "inputRequests": questions}

    def resume(self, state: str, caller: Identity | None, client: Client, responses: Mapping[str, Any]) -> Conversation:
        """Go on with the parked call of `state`, whose client has retried. Raises the JSON-RPC error for no such."""
        conversation, timer = self._parked.get(state, (None, None))
        if conversation is None or timer is None or conversation.owner != (caller and caller.id):
            raise protocol_error(-32602, "Invalid or expired requestState", {"reason": "invalid_request_state"})
        del self._parked[state]
        timer.cancel()
        conversation.is_parked = False
        if conversation.outcome is None:
            conversation.attach(client)
            conversation.answer(responses)
        return conversation

    def _forget(self, state: str) -> None:
        """Keep a parked call no longer, nor what it has ended with."""
        conversation = self._parked.pop(state)[0]
        conversation.outcome = None
        conversation.is_parked = False
        self.leave(conversation)
