"""The log: the command line's lines on stderr, for which neither a call nor the end of the process waits; and what no
line may quote.

It plugs into Python's `logging`: a handler at the root, where a program has none of its own, and a filter of apcore's
loggers while a server runs.
"""

from __future__ import annotations

import json
import logging
import logging.config
import logging.handlers
import os
import queue
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from apcore.utils.redaction import REDACTED_VALUE

from .call import call_of

__all__ = ["Formatter", "configure", "log_to_stderr", "one_line", "tell", "values_hidden"]

_FORMAT = "%(asctime)s %(levelname)s: %(message)s"


def one_line(text: str, limit: int | None = None) -> str:
    r"""`text` in one line, of at most `limit` characters: with escapes for line breaks (`\n`), control characters and
    characters that reverse what follows them."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text[:limit])[:limit]


class Formatter(logging.Formatter):
    """Writes a record in one line, and its traceback below it, each line of that indented.

    Any record may quote what a client has sent, whoever logs it: a line break, and what follows would look like a
    record of its own; or megabytes. Of a long traceback both ends are kept.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record), 10_000)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        if len(lines) > 80:
            lines[40:-40] = [f"... {len(lines) - 80} more lines ..."]
        return "\n".join(f"  {one_line(line, 250)}" for line in lines)


class _StderrHandler(logging.handlers.QueueHandler):
    """Hands what is logged to a daemon thread, which writes it to stderr. Any thread may log, and none waits.

    1,000 records may wait for that thread, each further one is lost. At the end of the process they are written, if
    somebody reads them within a second. (Python's `QueueListener` writes with a lock that its end would wait for.) A
    process that a module forks has no such thread, and writes by itself.
    """

    def __init__(self) -> None:
        self._records = queue.Queue[logging.LogRecord](1_000)
        super().__init__(self._records)
        self.setFormatter(Formatter(_FORMAT))
        self._writer = threading.Thread(target=self._write, name="log", daemon=True)
        self._writer.start()

    def enqueue(self, record: logging.LogRecord) -> None:  # which has been formatted
        if self._writer.is_alive():
            with suppress(queue.Full):
                self._records.put_nowait(record)
        else:
            _write_to_stderr(record.getMessage())

    def flush(self) -> None:
        """Wait until what has been logged is written, a second at most. Python calls it at the end of the process."""
        with self._records.all_tasks_done:
            self._records.all_tasks_done.wait_for(lambda: not self._records.unfinished_tasks, timeout=1)

    def _write(self) -> None:
        while True:
            _write_to_stderr(self._records.get().getMessage())
            self._records.task_done()


def _write_to_stderr(text: str) -> None:
    """Write to the descriptor: at the end of the process Python waits for whoever has the lock of `sys.stderr`."""
    with suppress(OSError):  # it is closed, and there is nowhere to say so
        os.write(2, f"{text}\n".encode(errors="backslashreplace"))


def log_to_stderr(*, waits: bool = False) -> None:
    """Set up the log of a program that has none.

    Python's plain handler does it where stderr is not the process's, as in a notebook, and for a program that prints
    and ends: with `waits` no line is lost.
    """
    if logging.root.handlers:
        return
    is_plain = waits or sys.stderr is not sys.__stderr__
    logging.basicConfig(format=_FORMAT, handlers=[logging.StreamHandler() if is_plain else _StderrHandler()])


def tell(text: str) -> None:
    """Print `text` on stderr, behind what has been logged."""
    for handler in logging.root.handlers:
        handler.flush()
    print(text, file=sys.stderr)


def configure(path: str) -> None:
    """Set up the log as a JSON file says, by `logging.config.dictConfig`. ValueError, in one line, where that fails.

    Loggers that there are already stay switched on, unless the file has `disable_existing_loggers`.
    """
    try:
        config = json.loads(Path(path).read_text("utf-8"))
        logging.config.dictConfig({"disable_existing_loggers": False, **config})
    except Exception as error:  # boundary: what the file names is made, whatever that raises
        raise ValueError(one_line(f"--log-config {path}: {error.__cause__ or error}", 1_000)) from None


# apcore's loggers that quote arguments, outputs, or errors that do.
_QUOTING = "schema.hardening executor pipeline middleware.manager middleware.logging".split()
_QUOTED = {"error", "inputs", "output"}  # their attributes that do: apcore's own redaction overlooks the values of maps


@contextmanager
def values_hidden() -> Iterator[None]:
    """Let no record of apcore's log show values of a call in which something is marked: these are its arguments, or
    stand in its text."""

    def hide(record: logging.LogRecord) -> bool:
        call = call_of(None)
        if call is None or not call.is_secret:
            return True
        if isinstance(record.args, tuple) and record.args:
            record.args = tuple(each if isinstance(each, int | float) else REDACTED_VALUE for each in record.args)
        elif record.levelno >= logging.WARNING:
            record.msg = f"(not shown: it may quote sensitive values) at {record.filename}:{record.lineno}"
            record.args = ()
        record.exc_info = record.exc_text = None
        for name in _QUOTED & vars(record).keys():
            setattr(record, name, REDACTED_VALUE)
        return True

    loggers = [logging.getLogger(f"apcore.{name}") for name in _QUOTING]
    for logger in loggers:
        logger.addFilter(hide)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(hide)
