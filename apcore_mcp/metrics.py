"""What the server itself counts, in Prometheus' text format, behind the numbers of the user's or apcore's collector.

It is a route, `/metrics`, the outermost ASGI middleware, and a listener that is told of each call that ends. Without
this file, nothing is counted, and all else works.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from apcore.observability import MetricsCollector, MetricsMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from . import __version__
from .core import Bridge
from .execution import busy_threads
from .options import Options

__all__ = ["Metrics", "collecting"]

_OUTCOMES_MAX, _OUTCOME_CHARACTERS = 100, 100  # a module's author may make up any number of codes, of any length


class Metrics:
    """The numbers of one server. Event loop only.

    Calls are counted by their outcome, "ok" or the code of the error, and requests that are refused by their status.
    Beyond a hundred outcomes, the calls of all others are counted together, as "other"."""

    def __init__(self, bridge: Bridge, count_sessions: Callable[[], int]) -> None:
        self.route: BaseRoute = Route("/metrics", self._export)
        self._bridge = bridge
        self._count_sessions = count_sessions
        self._ended = Counter[str](ok=0)
        self._refused = Counter[str]()
        bridge.router.listeners.append(self._count_call)

    def count_refusals(self, app: ASGIApp) -> ASGIApp:
        """ASGI middleware: count the requests that are refused, whoever does it. `/ready` only says that it is not."""

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            async def count(message: Message) -> None:
                status = message.get("status", 0)  # 0: not the message by which a response begins
                if 400 <= status < 500 or (status == 503 and not scope["path"].endswith("/ready")):
                    self._refused[str(status)] += 1
                await send(message)

            await app(scope, receive, count)

        return counted

    def _count_call(self, outcome: str) -> None:
        outcome = outcome[:_OUTCOME_CHARACTERS].replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        is_apart = outcome in self._ended or len(self._ended) < _OUTCOMES_MAX
        self._ended[outcome if is_apart else "other"] += 1

    async def _export(self, request: object) -> PlainTextResponse:
        bridge = self._bridge
        lines = [bridge.options.metrics_collector.export_prometheus().rstrip("\n")]  # an empty line means nothing
        lines += _metric("info", "gauge", "The version of apcore-mcp", {__version__: 1}, "version")
        lines += _metric("calls_running", "gauge", "Calls that have not ended", {"": len(bridge.router.running)})
        lines += _metric("sessions", "gauge", "Open sessions", {"": self._count_sessions()})
        lines += _metric("threads_busy", "gauge", "Threads that run sync modules", {"": busy_threads()})
        lines += _metric("calls_total", "counter", "Calls that have ended", self._ended, "outcome")
        lines += _metric("requests_refused_total", "counter", "Refused HTTP requests", self._refused, "status")
        return PlainTextResponse("\n".join([*lines, ""]), media_type="text/plain; version=0.0.4")


def _metric(name: str, kind: str, text: str, numbers: Mapping[str, int], label: str = "") -> list[str]:
    """The lines of one metric: a number for each value of `label`, or the only one without."""
    lines = [f"# HELP apcore_mcp_{name} {text}", f"# TYPE apcore_mcp_{name} {kind}"]
    for value, number in numbers.items():
        labels = f'{{{label}="{value}"}}' if label else ""
        lines.append(f"apcore_mcp_{name}{labels} {number}")
    return lines


@contextmanager
def collecting(options: Options) -> Iterator[Options]:
    """The options of a server while it runs, with a collector in the place of `metrics_collector=True`: it counts the
    calls of the options' Executor, which is left as it was."""
    collector = MetricsCollector()
    middleware = MetricsMiddleware(collector)
    options.executor.use(middleware)
    try:
        yield dataclasses.replace(options, metrics_collector=collector)
    finally:
        options.executor.remove(middleware)
