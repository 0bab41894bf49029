"""The command line: `python -m apcore_mcp --extensions-dir DIR`, or `apcore-mcp`.

Exit status (SRS FR-CLI-008): 0 after a normal end, 1 for a value that is not allowed, 2 when the server cannot start or
the arguments cannot be parsed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .core import _EXPORTS, _discover, _export, _Options, _standard_streams, serve


def _parser() -> argparse.ArgumentParser:
    """One flag for each option of `serve()`, from the option itself."""
    parser = argparse.ArgumentParser(
        prog="apcore-mcp",
        description="Serve every apcore module below a directory as an MCP tool.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--extensions-dir", required=True, metavar="DIR", help="directory with apcore modules")
    parser.add_argument("--export", choices=_EXPORTS, help="print the tools instead of serving them, and exit")
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
    return parser


def _refusal(arguments: argparse.Namespace) -> str | None:
    """Why the arguments cannot be served, in the words of SRS FR-CLI-002, -004 and -005."""
    path = Path(arguments.extensions_dir)
    if not path.exists():
        return f"extensions directory does not exist: {path}"
    if not path.is_dir():
        return f"extensions path is not a directory: {path}"
    if not 1 <= arguments.port <= 65535:
        return "port must be between 1 and 65535"
    if not arguments.name:
        return "server name must not be empty"
    if len(arguments.name) > 255:
        return "server name must not exceed 255 characters"
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, discover, serve; the exit status."""
    arguments = _parser().parse_args(argv)
    options = vars(arguments)
    if refusal := _refusal(arguments):
        return _fail(refusal, 1)
    directory, export = options.pop("extensions_dir"), options.pop("export")
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("apcore_mcp").setLevel(options["log_level"])
    # Before the first module is imported, so that nothing a module prints reaches a client (or the exported JSON).
    owned = export or options["transport"] == "stdio"
    owns_stdout = _standard_streams(for_good=not export) if owned else contextlib.nullcontext()
    try:
        with owns_stdout:
            registry = _discover(directory)
            if not export:
                serve(registry, **options)
                return 0
            exported = _export(_Options(registry, **options), export)
        print(exported, flush=True)
    except (TypeError, ValueError, ImportError) as error:
        return _fail(str(error), 1)
    except (OSError, RuntimeError) as error:
        return _fail(str(error), 2)
    return 0


def _fail(message: str, status: int) -> int:
    print(f"Error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
