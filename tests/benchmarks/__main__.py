"""Measure this package beside a hand-written minimal server on the same SDK, and print the ratios.

python -m tests.benchmarks                    some minutes
python -m tests.benchmarks --quick            seconds: whether everything runs, no figures to quote
python -m tests.benchmarks --only "^call"     rows whose name matches a regular expression
python -m tests.benchmarks --against DIR      another copy of this project takes the minimal server's place, and starts
                                              and works in two processes beside this one
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import itertools
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from operator import call, methodcaller
from pathlib import Path
from typing import Any

from apcore import Context, Executor, Registry

import apcore_mcp

from .client import HANDSHAKE, MODERN, ROOT, Server, Side
from .server import GUARD, KINDS, Echo, Order, modules

READING = """\
Ratio: what ours costs by what the yardstick costs, so 1.00 is par and less is better, also where calls/s are shown.
A round measures both, one directly after the other and in turn first; the ratio is the median of the rounds' own, with
its quartiles, and the figures before it are medians too. A goal is met by a ratio that is not above it; quartiles on
both sides of it mean that this run cannot tell. The minimal server has the same SDK, Executor and modules and a
tools/call of two lines: no error mapping, structured content, redaction, cancellation, progress or approval. A limit is
a requirement's own number. Figures of different machines or runs do not compare."""

EXTENSIONS = str(ROOT / "examples" / "extensions")
STARTED = ("-m", "apcore_mcp", "--extensions-dir", EXTENSIONS)
LISTED = '"tools":['  # in the answer to `tools/list`; others print it
DISCOVERED = f"import mcp.server.lowlevel, apcore; apcore.Registry(extensions_dir={EXTENSIONS!r}).discover()"
FIRST_LIST = b"""\
{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{},\
"clientInfo":{"name":"benchmark","version":"1"}}}
{"jsonrpc":"2.0","method":"notifications/initialized"}
{"jsonrpc":"2.0","id":2,"method":"tools/list"}
"""


@dataclass
class Row:
    """One line of the table: what `ours` and the `yardstick` cost as `measure` has it, in seconds or bytes.

    A Server is started when it is first measured; a number is a cost by itself.
    """

    name: str
    measure: Callable[[Any], float]
    ours: Any
    yardstick: Any
    against: str
    goal: float | None = None
    unit: str = "ms"
    slow: bool = False  # a third of the rounds will do


@dataclass(frozen=True)
class Sizes:
    rounds: int
    calls: int
    batch: int
    load: int
    few: int
    many: int
    most: int
    lists: int  # tools listed in one measurement
    workers: int


# Beside the minimal server. A pydantic model costs it three times the writing of a JSON schema in each call.
GOALS = {"dict": 1.05, "small": 0.50, "ten": 0.28}
HTTP_GOALS = {"dict": 1.05, "small": 0.50, "ten": 0.40}

FULL = Sizes(rounds=11, calls=100, batch=500, load=200, few=100, many=1_000, most=5_000, lists=1_000, workers=2)
QUICK = Sizes(rounds=1, calls=3, batch=10, load=20, few=6, many=6, most=6, lists=6, workers=1)


@dataclass(frozen=True)
class Start:
    """A Python that is started with `arguments`, and imports `apcore_mcp` from `tree`."""

    arguments: Sequence[str]
    tree: Path = ROOT


class Pool:
    """The running servers, by what they were started with."""

    def __init__(self) -> None:
        self._sides: dict[Server, Side] = {}

    def start(self, *subjects: Any) -> None:
        for subject in subjects:
            if isinstance(subject, tuple):
                self.start(*subject)
            elif isinstance(subject, Server) and subject not in self._sides:
                self._sides[subject] = Side(subject)

    def cost(self, measure: Callable[[Any], float], subject: Any) -> float:
        return float(subject) if isinstance(subject, float) else measure(self._ready(subject))

    def _ready(self, subject: Any) -> Any:
        if isinstance(subject, tuple):
            return tuple(map(self._ready, subject))
        return self._sides[subject].ready() if isinstance(subject, Server) else subject

    def close(self) -> None:
        for side in self._sides.values():
            side.stop()
        for side in self._sides.values():
            side.close()


class ExecutorAlone:
    """apcore's Executor in this process, with the measurement of a Side."""

    def latency(self, name: str, arguments: dict[str, Any], count: int) -> float:
        executor = Executor(modules(0))

        async def work() -> float:
            await executor.call_async(name, arguments)
            begin = time.perf_counter()
            for _ in range(count):
                await executor.call_async(name, arguments)
            return (time.perf_counter() - begin) / count

        return asyncio.run(work())


def decisions(count: int) -> float:
    """What the ACL alone takes to decide on so many tools."""
    names, context = modules(count).list(), Context.create()

    async def work() -> float:
        begin = time.perf_counter()
        for name in names:
            await GUARD.async_check_access(None, name, context)
        return time.perf_counter() - begin

    return asyncio.run(work())


def rows(sizes: Sizes, tree: Path | None) -> Iterator[Row]:
    ours, other, against = Server("ours", sizes.few), Server("minimal", sizes.few), "minimal server"
    if tree:
        other, against = replace(ours, tree=tree), "other copy"
    for kind, (_, arguments) in KINDS.items():
        goal = 1.05 if tree else GOALS[kind]
        latency = methodcaller("latency", f"call.{kind}", arguments, sizes.calls)
        throughput = methodcaller("throughput", f"call.{kind}", arguments, sizes.batch)

        def overhead(sides: Any, latency: Callable[[Any], float] = latency) -> float:
            return latency(sides[0]) - latency(sides[1])

        yield Row(f"call, {kind}", latency, ours, other, against, goal)
        yield Row(f"batch of {sizes.batch} calls, {kind}", throughput, ours, other, against, goal, "calls/s", True)
        yield Row(f"call, {kind}", latency, ours, ExecutorAlone(), "Executor alone")
        yield Row(f"routing overhead of a call, {kind}", overhead, (ours, other), 5e-3, "limit", 1.0)
        if kind == "dict":
            yield Row(f"batch of {sizes.batch} calls, {kind}", throughput, ours, 1e-3, "limit", 1.0, "calls/s", True)
            modern = replace(ours, era=MODERN)
            declaring = replace(modern, tasks=True)
            yield Row(f"call of a client that declares tasks, {kind}", latency, declaring, modern, "without", 1.05)

    def listing(side: Any) -> float:
        return float(side.listing(max(1, sizes.lists // side.server.count)))

    ways = (HANDSHAKE, "module-id"), (MODERN, "portable")
    for count, (era, names) in itertools.product(dict.fromkeys((sizes.few, sizes.many)), ways):
        named, theirs = replace(ours, count=count, era=era, names=names), replace(other, count=count, era=era)
        yield Row(f"tools/list, {count} tools, {era}, {names}", listing, named, theirs, against, 1.0)

    def guarding(subject: Any) -> float:
        """What an ACL adds to a `tools/list` of ours, or takes by itself."""
        return decisions(subject) if isinstance(subject, int) else listing(subject[0]) - listing(subject[1])

    pair = Server("guarded", 3 * sizes.few), Server("ours", 3 * sizes.few)
    yield Row(f"an ACL's part in tools/list, {3 * sizes.few} tools", guarding, pair, 3 * sizes.few, "ACL alone", 1.5)

    def start(server: Server) -> float:
        """From the registry to the first answer, by module."""
        with contextlib.closing(Side(server)) as side:
            side.listing(1)
            answered = time.monotonic()  # one clock for all processes
            return (answered - float(side.call("bench.grow", {})["started"])) / server.count

    def starting(server: Server, count: int) -> Callable[[], float]:
        return partial(start, replace(server, count=count))

    for count in dict.fromkeys((sizes.many, sizes.most)):
        sides = [starting(replace(side, models=True), count) for side in (ours, other)]
        yield Row(f"start with {count} models, by module", call, *sides, against, 1.25, slow=True)

    def listing_by_module(side: Any) -> float:
        return listing(side) / int(side.server.count)

    # By module, and from there on: what is sent of fewer fits into a processor's cache, which is cheaper for anybody.
    base = f"{sizes.many} modules"
    sides = [starting(ours, count) for count in (sizes.most, sizes.many)]
    yield Row(f"start with {sizes.most} modules, by module", call, *sides, base, 1.2, slow=True)
    most, many = (replace(ours, count=count) for count in (sizes.most, sizes.many))
    yield Row(f"tools/list, {sizes.most} modules, by module", listing_by_module, most, many, base, 1.2)

    yield from _searches(sizes)
    yield from _model_calls()
    yield from _starts(tree)
    yield from _http(sizes, ours, other, against)
    yield from _limits(sizes.few)


def _searches(sizes: Sizes) -> Iterator[Row]:
    """What `search=True` costs, beside the same server's direct calls and the list of a server without it."""

    def call(subject: tuple[Side, str, bool]) -> float:
        side, name, is_direct = subject
        arguments = KINDS[name.removeprefix("call.")][1]
        if is_direct:
            return side.latency(name, arguments, sizes.calls)
        return side.latency("call_tool", {"name": name, "arguments": arguments}, sizes.calls)

    def find(subject: tuple[Side, str]) -> float:
        side, query = subject
        count = max(1, sizes.lists // side.server.count)
        return side.latency("search_tools", {"query": query}, 10 * count) if query else side.listing(10 * count)

    searching = Server("searching", sizes.few)
    for kind in KINDS:
        through, direct = ((searching, f"call.{kind}", is_direct) for is_direct in (False, True))
        yield Row(f"call through call_tool, {kind}", call, through, direct, "direct call", 1.15)
    many, query = replace(searching, count=sizes.many), "take the order of a customer with a discount"
    listing = Server("ours", sizes.many), ""
    yield Row(f"search_tools, {sizes.many} tools", find, (many, query), listing, "tools/list", 3.0)


def _model_calls() -> Iterator[Row]:
    """Reading the call that a model sent back, beside apcore's whole call of the same module."""

    def time_of(call: Callable[[], Any]) -> float:
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

    text, optional = {"type": "string"}, {"anyOf": [{"type": "integer"}, {"type": "null"}]}
    item = {"type": "object", "properties": {"id": text, "size": optional}, "required": ["id"]}
    items = [{"id": str(number), "size": None} for number in range(2_000)]
    cases: dict[str, tuple[Any, Any]] = {
        "a set of 2,000 models": ({"anyOf": [{"type": "array", "items": item}, {"type": "null"}]}, items),
    }
    for depth in (8, 30):
        schema: Any = item
        sent: Any = items[0]
        for _ in range(depth):
            other = {"type": "object", "properties": {"in": text, "note": text}, "required": ["in"]}
            schema = {"anyOf": [other, {"type": "object", "properties": {"in": schema, "note": text}}]}
            sent = {"in": sent, "note": None}
        cases[f"unions {depth} deep"] = (schema, sent)
    for name, (schema, sent) in cases.items():
        registry = Registry()
        registry.register("model.call", Echo({"type": "object", "properties": {"value": schema}}))
        executor = Executor(registry)
        read = partial(apcore_mcp.from_openai_call, executor, "model-call", {"value": sent})
        run = partial(executor.call, *read())
        yield Row(f"from_openai_call(), {name}", time_of, read, run, "apcore's call", 10.0, slow=True)


def _starts(tree: Path | None) -> Iterator[Row]:
    def start(started: Start) -> float:
        """From the start of a Python until it says `LISTED`."""
        begin = time.perf_counter()
        options: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        options |= {"cwd": started.tree, "env": {**os.environ, "PYTHONPATH": str(started.tree)}}
        process: Any
        with subprocess.Popen([sys.executable, *started.arguments], **options) as process:
            process.stdin.write(FIRST_LIST)
            process.stdin.flush()
            while line := process.stdout.readline():
                if LISTED.encode() in line:
                    return time.perf_counter() - begin
        raise RuntimeError(f"{' '.join(started.arguments)} has not answered")

    serving, importing = Start(STARTED), Start(("-c", f"import apcore_mcp; print({LISTED!r})"))
    sdk_and_modules = Start(("-c", f"{DISCOVERED}; print({LISTED!r})"))
    yield Row("start to tools/list, examples", start, serving, sdk_and_modules, "SDK and discover()", slow=True)
    import_apcore = Start(("-c", f"import apcore; print({LISTED!r})"))
    yield Row("import apcore_mcp", start, importing, import_apcore, "import apcore", slow=True)
    if tree:
        for name, ours in (("start to tools/list, examples", serving), ("import apcore_mcp", importing)):
            yield Row(name, start, ours, replace(ours, tree=tree), "other copy", slow=True)


def _http(sizes: Sizes, ours: Server, other: Server, against: str) -> Iterator[Row]:
    ours, other = replace(ours, http=True), replace(other, http=True)
    for kind, clients in itertools.product(KINDS, (1, 10)):
        load = methodcaller("load", f"call.{kind}", KINDS[kind][1], sizes.load, clients)
        goal = 1.05 if ours.tree != other.tree else HTTP_GOALS[kind]
        yield Row(f"HTTP calls, {clients} at a time, {kind}", load, ours, other, against, goal, "calls/s")
    yield Row(f"HTTP calls, 10 at a time, {kind}", load, ours, 1e-2, "limit", 1.0, "calls/s")
    load = methodcaller("load", "primes.count", {"below": 3_000}, sizes.load, 20)
    two, one = Server("workers", sizes.workers, http=True), Server("workers", 1, http=True)
    yield Row("calls of some work over HTTP, two workers", load, two, one, "one worker", 1.0, "calls/s", True)


def _limits(few: int) -> Iterator[Row]:
    growing = Server("ours", few, names="auto")  # a server of their own: it grows

    def time_of(work: Any) -> float:
        begin = time.perf_counter()
        assert len(work()) == few
        return (time.perf_counter() - begin) / few

    def register(side: Any) -> float:
        """What so many new modules add to a call and a `tools/list`, by module."""
        times = []
        for count in (few, 0):
            begin = time.perf_counter()
            side.call("bench.grow", {"count": count})
            side.listing(1)
            times.append(time.perf_counter() - begin)
        return (times[0] - times[1]) / few

    def memory(side: Any) -> float:
        side.call("bench.grow", {"trace": True})
        before = side.call("bench.grow", {"count": few})
        side.listing(1)
        after = side.call("bench.grow", {"trace": False})
        return float(after["taken"] - before["taken"] - before["taken_by_registry"]) / few

    convert, models = apcore_mcp.to_openai_tools, modules(few, Order)
    yield Row("to_openai_tools(), by module", time_of, partial(convert, modules(few)), 1e-3, "limit", 1.0)

    def define() -> list[Any]:
        return [models.get_definition(module_id) for module_id in models.list()]

    yield Row("to_openai_tools(), pydantic models", time_of, partial(convert, models), define, "get_definition()")
    yield Row("register() to the next tools/list, by module", register, growing, 1e-3, "limit", 1.0, slow=True)
    yield Row("memory of a tool", memory, growing, 50e3, "limit", 1.0, "KB", slow=True)


@dataclass
class Result:
    row: Row
    ours: float
    yardstick: float
    ratios: list[float]

    def cells(self) -> list[str]:
        ratio = statistics.median(self.ratios)
        low, _, high = statistics.quantiles(self.ratios, n=4) if len(self.ratios) > 1 else self.ratios * 3
        goal = "" if self.row.goal is None else f"{self.row.goal:.2f}{'' if ratio <= self.row.goal else ' missed'}"
        told = (self._told(cost) for cost in (self.ours, self.yardstick))
        return [self.row.name, self.row.against, *told, f"{ratio:.2f} ({low:.2f} to {high:.2f})", goal]

    def _told(self, cost: float) -> str:
        scaled = {"ms": cost * 1e3, "KB": cost / 1e3, "calls/s": 1 / cost}[self.row.unit]
        return f"{scaled:,.{3 if scaled < 1 else 2 if scaled < 10 else 0}f} {self.row.unit}"


def compare(row: Row, rounds: int, pool: Pool) -> Result:
    """Measure both, `rounds` times, in turn first; where that is more than once, a round to warm up comes before."""
    pool.start(row.ours, row.yardstick)
    costs: dict[bool, list[float]] = {True: [], False: []}
    warm_up = 0 if rounds == 1 else 1
    for number in range(warm_up + (-(-rounds // 3) if row.slow else rounds)):
        for is_ours in (True, False) if number % 2 else (False, True):
            cost = pool.cost(row.measure, row.ours if is_ours else row.yardstick)
            if number >= warm_up:
                costs[is_ours].append(cost)
    ratios = [ours / yardstick for ours, yardstick in zip(costs[True], costs[False], strict=True)]
    return Result(row, statistics.median(costs[True]), statistics.median(costs[False]), ratios)


HEADINGS = ["", "beside", "ours", "theirs", "ratio (quartiles)", "goal"]


def as_line(cells: list[str], *, markdown: bool) -> str:
    if markdown:
        return f"| {' | '.join(cells)} |"
    widths = (52, 18, 15, 15, 22, 0)
    return " ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def machine() -> str:
    versions = f"mcp {version('mcp')}, apcore {version('apcore')}, apcore-mcp {apcore_mcp.__version__}"
    place = f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    return f"{datetime.date.today()}, Python {platform.python_version()}, {versions}, {place}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.benchmarks", description="What apcore-mcp costs, as ratios.")
    parser.add_argument("--quick", action="store_true", help="tiny counts: whether it runs")
    parser.add_argument("--rounds", type=int, help="how often each pair is measured")
    parser.add_argument("--only", default="", metavar="REGEX", help="rows whose name matches")
    parser.add_argument("--markdown", action="store_true", help="a table in Markdown")
    parser.add_argument("--against", type=Path, metavar="DIR", help="measure beside another copy of this project")
    arguments = parser.parse_args()
    sizes = QUICK if arguments.quick else FULL
    with contextlib.closing(Pool()) as pool:
        print(machine(), end="\n\n")
        print(as_line(HEADINGS, markdown=arguments.markdown))
        if arguments.markdown:
            print("| --- | --- | ---: | ---: | ---: | ---: |")
        wanted = [row for row in rows(sizes, arguments.against) if re.search(arguments.only, row.name)]
        if arguments.quick:  # they may disturb each other's figures
            for row in wanted:
                pool.start(row.ours, row.yardstick)
        for row in wanted:
            result = compare(row, arguments.rounds or sizes.rounds, pool)
            print(as_line(result.cells(), markdown=arguments.markdown), flush=True)
    print(f"\n{READING}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
