"""How modules run in the calls of a server: steps that stand in the place of apcore's own.

They plug into apcore's `ExecutionStrategy`, for as long as `steps_in_place()` lasts, and leave calls that came to no
server alone. Without them, functions would be given JSON's values instead of what their hints say, a call that is
cancelled or times out would run on, and calls of modules with pydantic models would take three times as long.

Each step is a piece that apcore 0.32 lacks, and says what would make it needless.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import functools
import inspect
import math
import os
import queue
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

from apcore import Config, ModuleError, Registry
from apcore.builtin_steps import BuiltinExecute, BuiltinInputValidation, BuiltinModuleLookup, BuiltinOutputValidation
from apcore.context import Context
from apcore.pipeline import BaseStep, ExecutionStrategy, PipelineContext, StepResult
from apcore.streaming import StreamingModule
from apcore.utils import propagate_error
from pydantic import BaseModel

from .call import RunningCall, call_of
from .conversation import silence
from .functions import Function
from .hints import marks_of
from .schemas import ModelType

__all__ = ["THREADS_MAX", "busy_threads", "daemon_threads", "steps_in_place"]

# ---- Threads of sync modules ----

THREADS_MAX = 256  # so that slow modules leave room for others


class _DaemonThreads(ThreadPoolExecutor):
    """Threads that do not keep the process alive: those of a ThreadPoolExecutor are joined at its end. Each call has
    the context variables of its task.

    At most 256 are started, and more calls wait for one. All servers of a process share them: a host's own pool may
    have six. Any thread may submit."""

    def __init__(self) -> None:
        super().__init__()
        self._start_anew()
        if hasattr(os, "register_at_fork"):  # a forked process has none of its parent's threads
            os.register_at_fork(after_in_child=self._start_anew)

    def _start_anew(self) -> None:
        self._calls = queue.SimpleQueue[Any]()
        self._idle = threading.Semaphore(0)  # counts the threads that wait for a call
        self._started = 0
        self.busy = set[int]()  # the threads that run one

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = Future[Any]()
        call = [functools.partial(contextvars.copy_context().run, fn, *args, **kwargs)]
        future.add_done_callback(lambda _: call.clear())  # one that is cancelled waits on, but without its arguments
        self._calls.put((future, call))
        if not self._idle.acquire(blocking=False) and self._started < THREADS_MAX:
            self._started += 1
            threading.Thread(target=self._work, name="apcore-mcp-module", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave them to the others, when one event loop ends."""

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            self.busy.add(threading.get_ident())
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call.pop()())
                except StopIteration as error:  # an asyncio future refuses it
                    future.set_exception(RuntimeError(repr(error)))
                except BaseException as error:  # a SystemExit ends the call, not this thread
                    future.set_exception(error)
            self.busy.discard(threading.get_ident())
            del future, call  # or what the module has returned would be kept until the next call
            self._idle.release()


_module_threads = _DaemonThreads()
# For what else may never return, such as hooks: modules that are stuck in all of theirs leave these free.
daemon_threads: ThreadPoolExecutor = _DaemonThreads()


def busy_threads() -> int:
    """How many threads of this process run modules."""
    return len(_module_threads.busy)


# ---- Views: a module as one of apcore's steps sees it ----


class _View:
    """Something of apcore's or of a user's as a step sees it: everything is its own but what a subclass says."""

    def __init__(self, viewed: Any) -> None:
        self.viewed = viewed

    def __getattr__(self, name: str) -> Any:
        return getattr(self.viewed, name)


class _SchemaView(_View):
    """A module's schema, which has what it marks at hand.

    apcore asks for its JSON schema three times in every call, to redact what hooks may log, and pydantic writes it anew
    each time. That is most of what a call with ten fields costs. This goes when apcore keeps it."""

    def model_json_schema(self) -> dict[str, Any]:
        return marks_of(self.viewed)


class _ModelView(_SchemaView):
    """A pydantic model, which keeps what it has read last."""

    read: Any = None

    def model_validate_json(self, text: str, **options: Any) -> Any:
        self.read = self.viewed.model_validate_json(text, **options)
        return self.read

    def model_validate(self, values: Any, **options: Any) -> Any:
        self.read = self.viewed.model_validate(values, **options)
        return self.read


class _Written:
    """The schema of an output that the call has checked and written already."""

    def __init__(self, redaction: dict[str, Any]) -> None:
        self._redaction = redaction

    def model_validate(self, data: Any, **_: Any) -> Any:
        return data

    def model_json_schema(self) -> dict[str, Any]:
        return self._redaction


class _ModuleView(_View):
    """A module whose schemas are views."""

    def __init__(self, module: Any, function: Function | None = None) -> None:
        super().__init__(module)
        model = None if function is None else function.model
        self.input_schema = _view_of(model or getattr(module, "input_schema", None))
        self.output_schema = _view_of(getattr(module, "output_schema", None))


def _view_of(schema: Any) -> Any:
    view = _ModelView if isinstance(schema, ModelType) else _SchemaView
    return None if schema is None else view(schema)


class _RegistryView(_View):
    """A registry whose modules are views."""

    def get(self, *arguments: Any, **options: Any) -> _ModuleView | None:
        module = self.viewed.get(*arguments, **options)
        return None if module is None else _ModuleView(module)


def _not_of_apcore(error: TimeoutError, context: Context[Any]) -> ModuleError:
    """What apcore makes of any other exception of a module's: this one it would take for the end of its own limit."""
    return propagate_error(error, context.call_chain[-1], context)


class _RunningModule(_View):
    """A module while it runs: what runs for the call can be ended.

    apcore runs a coroutine in a task of its own, which goes on when the call is cancelled or times out. This goes when
    apcore ends it."""

    def __init__(self, module: Any, function: Function | None, is_streamed: bool) -> None:
        super().__init__(module)
        self._function = function
        self._task: asyncio.Task[Any] | None = None
        if is_streamed and isinstance(module, StreamingModule):
            self.stream = module.stream  # from Python 3.12 on, a protocol looks past `__getattr__`

    async def execute(self, inputs: dict[str, Any], context: Context[Any]) -> Any:
        """Run the module as apcore does: a coroutine in this task, any other function in a thread."""
        self._task = asyncio.current_task()
        function, execute = self._function, self.viewed.execute
        run = functools.partial(execute, inputs, context) if function is None else function.bound(inputs, context)
        is_async = inspect.iscoroutinefunction(execute) if function is None else function.is_async

        def run_in_thread() -> Any:
            try:
                return run()
            except TimeoutError as error:  # asyncio would make another one of it, without its traceback
                raise _not_of_apcore(error, context) from error

        try:
            if is_async:
                return await run()
            returned = await asyncio.get_running_loop().run_in_executor(_module_threads, run_in_thread)
            # A plain function around an async one, such as a decorator's, returns the other's coroutine.
            return await returned if inspect.isawaitable(returned) else returned
        except TimeoutError as error:
            raise _not_of_apcore(error, context) from error
        except (SystemExit, KeyboardInterrupt) as error:  # asyncio would let it out of this task, and end the loop
            raise RuntimeError(f"the module raised {type(error).__name__}: {error}") from error
        finally:
            self._task = None

    def end(self) -> None:
        """Cancel what still runs. A thread goes on, and what it returns or raises is dropped."""
        if self._task is not None:
            self._task.add_done_callback(silence)
            self._task.cancel()


# ---- Steps ----


class _Step(BaseStep):
    """One of apcore's steps, which does more in the calls of a server; in other calls it does what apcore's does."""

    def __init__(self, step: BaseStep) -> None:
        vars(self).update(vars(step))  # its name, its time limit and the like
        self.step = step

    async def execute(self, ctx: PipelineContext) -> StepResult:
        call = call_of(ctx.context)
        if call is None:
            return await self.step.execute(ctx)
        module = ctx.module
        try:
            return await self._execute_for(call, ctx, module)
        finally:
            if module is not None:
                ctx.module = module

    async def _execute_for(self, call: RunningCall, ctx: PipelineContext, module: Any) -> StepResult:
        raise NotImplementedError


class _Lookup(_Step):
    """Looks a module up and redacts its arguments for hooks. From here on, errors may quote these."""

    def __init__(self, step: BaseStep) -> None:
        super().__init__(step)
        # The registry that the step asks is private. It is set on a copy: if apcore changes here, a call takes longer
        # and is as right as before.
        self._lookup = cast(Any, copy.copy(step))
        if isinstance(getattr(self._lookup, "_registry", None), Registry):
            self._lookup._registry = _RegistryView(self._lookup._registry)

    async def _execute_for(self, call: RunningCall, ctx: PipelineContext, module: Any) -> StepResult:
        result: StepResult = await self._lookup.execute(ctx)
        if isinstance(ctx.module, _ModuleView):
            ctx.module = ctx.module.viewed
        call.record(ctx.module_id, ctx.module)
        return result


class _InputValidation(_Step):
    """Validates the arguments, and hands a function what its hints say."""

    async def _execute_for(self, call: RunningCall, ctx: PipelineContext, module: Any) -> StepResult:
        call.record(ctx.module_id, module)
        function = call.function(ctx.module_id, module)
        view = ctx.module = _ModuleView(module, function)
        result = await self.step.execute(ctx)
        if function is not None and function.model is not None and view.input_schema.read is not None:
            ctx.validated_inputs = function.arguments(view.input_schema.read, ctx.inputs)
        return result


class _Execution(_Step):
    """Runs a module. What runs for the call ends with it, and what the tool's own module gives is written at once."""

    async def _execute_for(self, call: RunningCall, ctx: PipelineContext, module: Any) -> StepResult:
        step = self.step
        function = call.function(ctx.module_id, module)
        running = ctx.module = _RunningModule(module, function, ctx.stream)
        is_own = call.owns(ctx.context)
        task = call.conversation.task
        if is_own and task is not None and task.begin():
            step = _without_limit()
            ctx.context.global_deadline = math.inf  # not None: what the module calls would be given one
        try:
            result = await step.execute(ctx)
        except BaseException:
            running.end()
            raise
        if ctx.output_stream is not None:
            if ctx.context.global_deadline is not None:
                ctx.output_stream = _until(ctx.context.global_deadline, ctx.output_stream)
        elif is_own:
            ctx.output = call.write(ctx.output)
        elif function is not None:
            ctx.output = function.output(ctx.output)
        elif isinstance(ctx.output, BaseModel):  # apcore takes dicts alone
            ctx.output = ctx.output.model_dump(warnings=False)
        return result


@functools.cache
def _without_limit() -> BuiltinExecute:
    """apcore's step that runs a module, with no time limit but the module's own."""
    return BuiltinExecute(config=Config({"executor": {"default_timeout": 0}}))


async def _until(deadline: float, stream: Any) -> AsyncIterator[Any]:
    """The chunks of `stream`, and at `deadline` (epoch seconds) an empty one in the place of what does not come.

    apcore looks at the deadline whenever a chunk has come, and then ends the call with a ModuleTimeoutError of its own:
    the empty chunk is never sent. This goes when apcore ends a stream that falls silent."""
    while True:
        limit = asyncio.timeout(deadline - time.time() + 0.01)  # the clock that apcore reads must be past it, too
        try:
            async with limit:
                chunk = await anext(stream)
        except StopAsyncIteration:
            return
        except TimeoutError:
            if not limit.expired():  # the module has raised it
                raise
            chunk = {}
        yield chunk


class _OutputValidation(_Step):
    """Validates what other modules get. What the call has written is only redacted for hooks."""

    async def _execute_for(self, call: RunningCall, ctx: PipelineContext, module: Any) -> StepResult:
        view = ctx.module = _ModuleView(module)
        if call.owns(ctx.context) and view.output_schema is not None:
            if ctx.stream:  # the chunks, put together
                ctx.output = call.write(ctx.output)
            view.output_schema = _Written(view.output_schema.model_json_schema())
        return await self.step.execute(ctx)


_IN_THE_PLACE_OF: dict[type, type[_Step]] = {
    BuiltinModuleLookup: _Lookup,
    BuiltinInputValidation: _InputValidation,
    BuiltinExecute: _Execution,
    BuiltinOutputValidation: _OutputValidation,
}


@contextmanager
def steps_in_place(strategy: ExecutionStrategy) -> Iterator[None]:
    """Meanwhile, run modules for the calls of servers by the steps above. Steps of a user's own classes stay."""
    for index, step in enumerate(strategy.steps):
        served = _IN_THE_PLACE_OF.get(type(step))
        if served is not None and isinstance(step, BaseStep):
            # Not by `replace()`, which refuses the look-up, so that no pipeline loses it; this is that same look-up.
            strategy.steps[index] = served(step)
    try:
        yield
    finally:
        for index, step in enumerate(strategy.steps):
            if isinstance(step, _Step):
                strategy.steps[index] = step.step
