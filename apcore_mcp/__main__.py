"""The command line: `python -m apcore_mcp --extensions-dir DIR`, or `apcore-mcp`.

Exit status (SRS FR-CLI-008): 0 after a normal end, 1 for a value that is not allowed, 2 when the server cannot start or
the arguments cannot be parsed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

from apcore import Registry

from .core import _EXPORTS, _discover, _export, _Options, _standard_streams, serve


def _parsers() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """The flags of the command line alone, and these with one flag for each option of `serve()`, from the option."""
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--extensions-dir", required=True, metavar="DIR", help="directory with apcore modules")
    own.add_argument("--export", choices=_EXPORTS, help="print the tools instead of serving them, and exit")
    parser = argparse.ArgumentParser(
        prog="apcore-mcp",
        description="Serve every apcore module below a directory as an MCP tool.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        parents=[own],
    )
    metrics = "serve Prometheus metrics at /metrics (HTTP transports)"
    parser.add_argument("--metrics", action="store_true", dest="metrics_collector", help=metrics)
    for option in dataclasses.fields(_Options):
        if "help" not in option.metadata:
            continue
        flag: dict[str, Any] = dict(option.metadata)
        if isinstance(option.default, bool):
            flag["action"] = "store_true" if not option.default else argparse.BooleanOptionalAction
        elif isinstance(option.default, int):
            flag["type"] = int
        parser.add_argument(f"--{option.name.replace('_', '-')}", default=option.default, **flag)
    parser.set_defaults(log_level="INFO")
    return own, parser


def _refusal(arguments: argparse.Namespace) -> str | None:
    """Why the arguments cannot be served, in the words of SRS FR-CLI-002, -004 and -005."""
    path, name = arguments.extensions_dir, arguments.name
    refusals = {
        "extensions directory must not be empty": not path,  # it would be the working directory, whatever is in it
        f"extensions directory does not exist: {path}": not os.path.exists(path),
        f"extensions path is not a directory: {path}": not os.path.isdir(path),
        "port must be between 1 and 65535": not 1 <= arguments.port <= 65535,
        "server name must not be empty": not name,
        "server name must not exceed 255 characters": len(name) > 255,
    }
    return next((refusal for refusal, holds in refusals.items() if holds), None)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, discover, serve; the exit status."""
    own, parser = _parsers()
    arguments = parser.parse_args(argv)
    if refusal := _refusal(arguments):
        return _fail(refusal, 1)
    options = vars(arguments)
    directory, export = os.path.abspath(options.pop("extensions_dir")), options.pop("export")
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("apcore_mcp").setLevel(options["log_level"])
    # Before the first module is imported, so that nothing a module prints reaches a client (or the exported JSON).
    owns_stdout = export or options["transport"] == "stdio"
    try:
        checked = _Options(Registry(extensions_dir=directory), **options)
        with _standard_streams(for_good=not export) if owns_stdout else contextlib.nullcontext():
            if export != "client":
                _discover(directory, checked.registry)
            if not export:
                serve(checked.registry, **options)
                return 0
            again = ["--extensions-dir", directory, *own.parse_known_args(argv)[1]]
            exported = _export(checked, export, again)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")  # whatever the terminal's is
        print(exported, flush=True)
    except (TypeError, ValueError) as error:
        return _fail(str(error), 1)
    except (OSError, RuntimeError) as error:
        return _fail(str(error), 2)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"Error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
