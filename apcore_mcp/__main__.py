"""The command line: `python -m apcore_mcp --extensions-dir DIR`, or `apcore-mcp`.

Exit status (SRS FR-CLI-008): 0 after a normal end, 1 for a value that is not allowed, 2 when the server cannot start or
the arguments cannot be parsed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from apcore import Registry

from .core import _EXPORTS, _discover, _export, _Options, _options_of, _standard_streams, serve

_SWITCHES: dict[bool, Any] = {False: "store_true", True: argparse.BooleanOptionalAction}


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The flags of the command line alone, and these with one flag for each option of `serve()`, from the option."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--extensions-dir", required=True, metavar="DIR", help="directory with apcore modules")
    own.add_argument("--export", choices=_EXPORTS, help="print the tools instead of serving them, and exit")
    parser = argparse.ArgumentParser("apcore-mcp", parents=[own], description="Serve apcore modules as MCP tools.")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--metrics", action="store_true", dest="metrics_collector", help="Prometheus' page /metrics")
    for option in (option for option in dataclasses.fields(_Options) if "help" in option.metadata):
        switch = {"action": _SWITCHES[option.default]} if isinstance(option.default, bool) else {}
        parser.add_argument(f"--{option.name.replace('_', '-')}", default=option.default, **option.metadata, **switch)
    parser.set_defaults(log_level="INFO")
    return own, parser


def _check(options: dict[str, Any]) -> None:
    """ValueError for what cannot be served, in the words of SRS FR-CLI-002, -004 and -005."""
    path = options["extensions_dir"]
    refusals = {
        f"extensions directory does not exist: {path}": not os.path.exists(path),
        f"extensions path is not a directory: {path}": not os.path.isdir(path),
        "port must be between 1 and 65535": not 1 <= options["port"] <= 65535,
        "server name must not be empty": not options["name"],
    }
    for refusal in (refusal for refusal, holds in refusals.items() if holds):
        raise ValueError(refusal)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, discover, serve; the exit status."""
    own, parser = _parsers()
    options = vars(parser.parse_args(argv))
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        _check(options)
        directory, export = os.path.abspath(options.pop("extensions_dir")), options.pop("export")
        checked = _options_of("apcore-mcp", Registry(extensions_dir=directory), **options)
        # Before the first module is imported, so that nothing a module prints reaches a client (or the exported JSON).
        owns_stdout = export or checked.transport == "stdio"
        with _standard_streams(for_good=not export) if owns_stdout else contextlib.nullcontext():
            if export != "client":
                _discover(directory, checked.registry)
            if not export:
                serve(checked.registry, **options)
                return 0
            exported = _export(checked, export, ["--extensions-dir", directory, *own.parse_known_args(argv)[1]])
        # In UTF-8 whatever the terminal's encoding is, and though a module has closed or replaced `sys.stdout`.
        with open(1, "w", encoding="utf-8", errors="backslashreplace", closefd=False) as stdout:
            print(exported, file=stdout)
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1 if isinstance(error, TypeError | ValueError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
