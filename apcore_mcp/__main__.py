"""The command line: `python -m apcore_mcp --extensions-dir DIR`, or `apcore-mcp`.

Exit status (FR-CLI-008): 0 after a normal end; 1 for a value that is not allowed, or when `--check` finds something
that is left out or nothing to serve; 2 when the server cannot start or the arguments cannot be parsed.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
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
    logging.basicConfig(format="%(levelname)s: %(message)s")
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
        print(f"Error: {error}", file=sys.stderr)
        return 1 if isinstance(error, TypeError | ValueError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
