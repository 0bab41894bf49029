"""Who is asked before a call runs, and what the question shows.

It plugs into apcore's approval gate, as an `ApprovalHandler`: `ElicitationApprovalHandler` asks the user of a call, and
`handler_in_place()` gives the gates that have no handler one that leaves the decision to the server of each call.
Without it, apcore would let every call run that needs approval.
"""

from __future__ import annotations

import json
import logging
import re
import time
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from apcore import Executor
from apcore.approval import AlwaysDenyHandler, ApprovalHandler, ApprovalRequest, ApprovalResult
from apcore.builtin_steps import BuiltinApprovalGate
from apcore.pipeline import ExecutionStrategy

from .arguments import Arguments
from .call import RunningCall, call_of
from .client import Way

__all__ = ["CONTROL", "NOBODY", "QUESTION_KEY", "ElicitationApprovalHandler"]
__all__ += ["approver_of", "handler_in_place", "has_handler"]

logger = logging.getLogger("apcore_mcp")

CONTROL = "system.control."  # begins the ids of apcore's modules that configure and reload the application
QUESTION_KEY = "approval"  # of the question on the wire
NOBODY = "nobody can be asked"  # why our own handlers reject a call whose user cannot be asked


_FIELD = {"type": "boolean", "title": "Let it run", "default": False}
_FORM = {"type": "object", "properties": {"approve": _FIELD}, "required": ["approve"]}


class ElicitationApprovalHandler:
    """Asks the user who made a call whether it may run, by elicitation: for the `approval_handler` of an Executor.

    A call is rejected when its user refuses, declines or says nothing for ten minutes, and when its user cannot be
    asked, as when it did not come through MCP. Source: FR-ANNOT-006."""

    async def request_approval(self, request: ApprovalRequest) -> ApprovalResult:
        call = call_of(request.context)
        if call is None:
            return ApprovalResult("rejected", reason=NOBODY)
        description, arguments = _described(call, request)
        arguments.check(request.arguments)
        with _decision_time(request):
            return await self._decide(request, call, _question(request, description, arguments))

    async def check_approval(self, approval_id: str) -> ApprovalResult:
        """Rejects: a user answers the question, and what a client sends as a token is no answer."""
        return ApprovalResult("rejected")

    async def _decide(self, request: ApprovalRequest, call: RunningCall, question: str) -> ApprovalResult:
        conversation = call.conversation
        way = conversation.client.way
        by_state = way is Way.STATE and call.owns(request.context)
        if way in (Way.REQUEST, Way.RESULT):
            answer = await conversation.elicit(question, _FORM, QUESTION_KEY)
        elif not by_state or conversation.is_confirmed:  # an answer is about the first module alone
            return self._without_answer(request, call)
        elif conversation.confirmation is None:
            # The router sends the question, and the answer begins the call anew.
            conversation.first_question = {"message": question, "requestedSchema": _FORM}
            return ApprovalResult("pending")
        else:
            answer = conversation.read(conversation.confirmation, _FORM)
            conversation.is_confirmed = True
        result = ApprovalResult("approved" if answer and answer["approve"] else "rejected")
        logger.info("%s: approval of %s: %s", conversation.label, request.module_id, result.status)
        return result

    def _without_answer(self, request: ApprovalRequest, call: RunningCall) -> ApprovalResult:
        """The decision about a call whose user cannot be asked."""
        text = "%s: %s is refused, as its user cannot be asked for approval (see approval=, --approval)"
        logger.warning(text, call.conversation.label, request.module_id)
        return ApprovalResult("rejected", reason=NOBODY)


class _AskOrLetThrough(ElicitationApprovalHandler):
    """Asks the user who made a call, and lets it through with a WARNING when its user cannot be asked.

    It lets through what apcore would without us: nothing under a strict policy, and none of apcore's control modules,
    as the caller may be anybody. A call that has ended, or whose user could be asked at any time, is rejected."""

    def _without_answer(self, request: ApprovalRequest, call: RunningCall) -> ApprovalResult:
        is_strict = request.context.executor.governance_state().policy_strict
        if call.conversation.must_ask or is_strict or request.module_id.startswith(CONTROL):
            return super()._without_answer(request, call)
        text = "%s: %s is let through without approval, as its user cannot be asked"
        logger.warning(text, call.conversation.label, request.module_id)
        return ApprovalResult("approved")


class _ValidFirst:
    """A user's own handler, which is asked once the arguments are valid: nobody should approve a call that then
    fails."""

    def __init__(self, handler: ApprovalHandler) -> None:
        self._handler = handler

    async def request_approval(self, request: ApprovalRequest) -> ApprovalResult:
        call = call_of(request.context)
        if call is None:
            return await self._handler.request_approval(request)
        _, arguments = _described(call, request)
        arguments.check(request.arguments)
        with _decision_time(request):
            return await self._handler.request_approval(request)

    async def check_approval(self, approval_id: str) -> ApprovalResult:
        return await self._handler.check_approval(approval_id)


def _described(call: RunningCall, request: ApprovalRequest) -> tuple[str, Arguments]:
    """What the module does that is to run, and what it takes: that of the Executor which asks, whatever module of the
    same id the server of the call has."""
    return call.described(request.module_id, request.context.executor.registry)


@contextmanager
def _decision_time(request: ApprovalRequest) -> Iterator[None]:
    """While a person decides, the time of the call does not go on."""
    started = time.time()
    try:
        yield
    finally:
        if request.context.global_deadline is not None:
            request.context.global_deadline += time.time() - started


def approver_of(approval: str | ApprovalHandler) -> ApprovalHandler | None:
    """Who decides about calls, by the option `approval`; None leaves it to apcore."""
    if approval == "auto":
        return _AskOrLetThrough()
    if approval == "require":
        return ElicitationApprovalHandler()
    if approval == "deny":
        return AlwaysDenyHandler()
    if isinstance(approval, str):
        return None
    return approval if isinstance(approval, ElicitationApprovalHandler) else _ValidFirst(approval)


class _ByServer:
    """The handler of an Executor that has none: the server of each call decides, and several may share the Executor. A
    call that came to no server runs as it would without us."""

    async def request_approval(self, request: ApprovalRequest) -> ApprovalResult:
        call = call_of(request.context)
        if call is None or call.approver is None:
            is_strict = request.context.executor.governance_state().policy_strict
            return ApprovalResult("rejected" if is_strict else "approved")
        return await call.approver.request_approval(request)

    async def check_approval(self, approval_id: str) -> ApprovalResult:
        call = call_of(None)
        if call is None or call.approver is None:
            return ApprovalResult("rejected")
        return await call.approver.check_approval(approval_id)


def _gates_of(strategy: ExecutionStrategy) -> list[BuiltinApprovalGate]:
    """The steps that ask a handler whether a call may run."""
    return [step for step in strategy.steps if isinstance(step, BuiltinApprovalGate)]


def has_handler(executor: Executor) -> bool:
    """Whether an Executor has a handler of its own, which decides in the place of any of ours."""
    handlers = [gate.handler for gate in _gates_of(executor.current_strategy)]
    return any(handler is not None and not isinstance(handler, _ByServer) for handler in handlers)


@contextmanager
def handler_in_place(strategy: ExecutionStrategy) -> Iterator[None]:
    """Meanwhile, let the server of each call decide in the approval gates that have no handler of their own."""
    handler = _ByServer()
    gates = _gates_of(strategy)
    for gate in gates:
        if gate.handler is None:
            gate.set_handler(handler)
    try:
        yield
    finally:
        for gate in gates:
            if gate.handler is handler:
                gate.set_handler(None)


# ---- The question ----

# What a question shows at most. It says how much it leaves out.
_ARGUMENTS_MAX = 100
_CHARACTERS_MAX = 1_000  # of an argument, as JSON


def _question(request: ApprovalRequest, description: str, arguments: Arguments) -> str:
    """What a person is asked about a call: what the module does, what is dangerous about it, and what it is called
    with, a line for each argument. Those that the schema names come first, however many others the caller sends."""
    lines = [f"Let {request.module_id} run?"]
    if description:
        lines.append(_first_sentence(description))
    if request.annotations.destructive:
        lines.append("It is annotated as destructive: what it does may not be undone.")
    known, others = arguments.shown(request.arguments)
    shown = [_line(name, value) for name, value in [*known.items(), *others.items()][:_ARGUMENTS_MAX]]
    lines.append("Arguments:" if shown else "Arguments: none")
    lines += shown[: len(known)]
    if len(shown) > len(known):
        lines += ["(the module's schema does not name these:)", *shown[len(known) :]]
    left_out = len(known) + len(others) - len(shown)
    if left_out:
        lines.append(f"(arguments left out: {left_out:,})")
    return "\n".join(lines)


def _line(name: str, value: Any) -> str:
    is_plain = name.isascii() and name.isidentifier() and len(name) <= 100
    return f"- {name if is_plain else _written(name)}: {_written(value)}"


def _written(value: Any) -> str:
    """Plain JSON as text for a person. One that is too long loses its middle, and says how much that is."""
    text = json.dumps(value, ensure_ascii=False)
    half = _CHARACTERS_MAX // 2
    left_out = len(text) - 2 * half
    if left_out <= 0:
        return _visible(text)
    # Each half in brackets of its own, so that no text can say this of itself.
    return f"<{_visible(text[:half])}> (characters left out: {left_out:,}) <{_visible(text[-half:])}>"


def _visible(text: str) -> str:
    """`text` with JSON's escapes for all but ASCII, letters and their accents, numbers, punctuation and currency: no
    other character is sure to be seen, or to be what it looks like."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(char if _is_visible(char) else json.dumps(char)[1:-1] for char in text)


# Letters and accents that show nothing: fillers, joiners, vowels that are not written, variation selectors.
_BLANK = re.compile(r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0\U000e0100-\U000e01ef]")


def _is_visible(char: str) -> bool:
    if char.isascii():
        return char.isprintable()
    if _BLANK.match(char) or unicodedata.combining(char) == 1:  # drawn over a letter, it strikes that out
        return False
    kind = unicodedata.category(char)
    return kind[0] in "LNP" or kind in ("Mn", "Mc", "Sc")


def _first_sentence(text: str) -> str:
    """The first sentence of `text`, in one line. An abbreviation before a small letter, as "e.g.", does not end it."""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[^a-z])", paragraph, maxsplit=1)[0]
