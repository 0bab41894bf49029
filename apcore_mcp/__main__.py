"""The command line: `python -m apcore_mcp --extensions-dir DIR`, or `apcore-mcp`.

Exit status (FR-CLI-008): 0 after a normal end; 1 for a value that is not allowed, or when `--check` finds something
that is left out or nothing to serve; 2 when the server cannot start or the arguments cannot be parsed.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import logging.handlers
import os
import queue
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from . import __version__
from .core import (
    _EXPORTS,
    _STANDARD_STREAMS,
    _check,
    _export,
    _files_of,
    _folder,
    _Options,
    _options_of,
    _take_standard_streams,
    serve,
)

_AT_A_TERMINAL = """A client has to start this server, as it speaks MCP here: add --export client to set one up, or
--transport streamable-http --explorer for a page to look at the tools; Ctrl-C ends it."""


_UNWRITTEN_MAX = 1_000  # lines of the log
_END_SECONDS = 1.0  # how long the end of the process waits for who reads the log


class _LogToStderr(logging.handlers.QueueHandler):
    """The log of a server, whose calls and whose end never wait for who reads it: a client may never read its stderr.

    Lines are handed to a thread, which writes them. At most 1,000 wait for it; more are lost, and it says how many. It
    writes to the descriptor, as whatever ends the process would wait for the lock and the buffer of `sys.stderr`. What
    was logged before the end is written then, if it is read. Any thread may log."""

    queue: queue.SimpleQueue[str | threading.Event]

    def __init__(self) -> None:
        super().__init__(queue.SimpleQueue())
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s: %(message)s"))
        self._lost = 0
        self._process = os.getpid()
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def prepare(self, record: logging.LogRecord) -> str:
        return self.format(record)

    def enqueue(self, record: str) -> None:  # type: ignore[override]  # what `prepare` makes of one
        if os.getpid() != self._process:  # one that a module has forked has no thread that writes
            _write_to_stderr(record)
        elif self.queue.qsize() < _UNWRITTEN_MAX:
            self.queue.put(record)
        else:
            self._lost += 1

    def flush(self) -> None:
        """Wait until what was logged so far is written, a second at most. The process does so at its end."""
        if os.getpid() == self._process:
            written = threading.Event()
            self.queue.put(written)
            written.wait(_END_SECONDS)

    def _write(self) -> None:
        told = 0
        while True:
            waiting = [self.queue.get()]
            while not self.queue.empty():  # all at once: each write may have to wait for Python's lock
                waiting.append(self.queue.get())
            lines = [each for each in waiting if isinstance(each, str)]
            if lines:
                _write_to_stderr("\n".join(lines))
            if self._lost > told:
                told = self._lost
                _write_to_stderr(f"WARNING: {told} lines of this log are lost, as nobody has read it in time")
            for each in waiting:
                if isinstance(each, threading.Event):
                    each.set()


def _write_to_stderr(lines: str) -> None:
    left = f"{lines}\n".encode(errors="backslashreplace")
    with suppress(OSError):  # it is closed: there is nowhere to say so
        while left:
            left = left[os.write(2, left) :]


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """A parser of the flags that `--export client` does not repeat, which are those that only the command line has and
    secrets, and one of all flags, made of the options of `serve()`."""
    own = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    own.add_argument("--extensions-dir", required=True, metavar="DIR", help="directory with apcore modules")
    instead = own.add_mutually_exclusive_group()
    instead.add_argument("--export", choices=_EXPORTS, help="print the tools instead of serving them, and exit")
    instead.add_argument("--check", action="store_true", help="list what would be served; fail if anything is left out")
    for option in dataclasses.fields(_Options):
        if not option.repr:
            own.add_argument(f"--{option.name.replace('_', '-')}", **option.metadata)
    parser = argparse.ArgumentParser("apcore-mcp", parents=[own], description="Serve apcore modules as MCP tools.")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--metrics", action="store_true", dest="metrics_collector", help="Prometheus' page /metrics")
    for option in dataclasses.fields(_Options):
        if "help" in option.metadata and option.repr:
            flag = f"--{option.name.replace('_', '-')}"
            # No "(default: None)" where nothing is the default.
            default = argparse.SUPPRESS if option.default is None else option.default
            more: dict[str, Any] = {}
            if isinstance(default, bool):
                more = {"action": argparse.BooleanOptionalAction if default else "store_true"}
            parser.add_argument(flag, default=default, **option.metadata, **more)
    parser.set_defaults(log_level="INFO")
    return own, parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments; serve, export or check; return the exit status."""
    if (argv or sys.argv[1:]) == ["--version"]:
        print(f"apcore-mcp {__version__}")
        sys.exit(0)
    own, parser = _parsers()
    options = vars(parser.parse_args(argv))
    log = None
    if not logging.root.handlers:
        log = _LogToStderr()
        logging.root.addHandler(log)
        logging.captureWarnings(True)  # they are written to stderr otherwise
    directory = options.pop("extensions_dir")
    export = options.pop("export", None)
    check = options.pop("check", False)
    try:
        registry = _folder(directory)
        # In the words of FR-CLI-004 and FR-CLI-005.
        if not 1 <= options["port"] <= 65535:
            raise ValueError("port must be between 1 and 65535")
        if not options["name"]:
            raise ValueError("server name must not be empty")
        checked = _options_of("apcore-mcp", registry, **options)
        # The standard streams are taken before the first module is imported: what a module prints must reach neither a
        # client nor the exported JSON.
        if export or check:
            status = 0
            _, stdout = _take_standard_streams()
            _files_of(registry).update()
            if check:
                printed, status = _check(checked)
            else:
                arguments = own.parse_known_args(argv)[1]
                printed = _export(checked, export, ["--extensions-dir", os.path.abspath(directory), *arguments])
            # UTF-8, whatever the terminal's encoding is.
            with open(stdout, "w", encoding="utf-8", errors="backslashreplace") as file:
                print(printed, file=file)
            return status
        if checked.transport == "stdio":
            if os.isatty(0):
                print(_AT_A_TERMINAL, file=sys.stderr)
            _STANDARD_STREAMS.take()
        _files_of(registry).update()
        serve(registry, **options)
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        if log is None:
            print(f"Error: {error}", file=sys.stderr)
        else:
            log.enqueue(f"Error: {error}")  # behind what has been logged
        return 1 if isinstance(error, TypeError | ValueError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
