"""The command line: `python -m apcore_mcp --extensions-dir DIR`, or `apcore-mcp`.

It makes a flag of every option of `serve()` that has a help text, and of every flag a variable of the environment:
`APCORE_MCP_PORT` is that of `--port`. Without this file everything else works from Python.

Exit status (FR-CLI-008): 0 after a normal end; 1 for a value that is not allowed, or when `--check` finds that anything
is missing; 2 when the server cannot start, or the arguments cannot be parsed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from typing import Any

from . import __version__, log
from .core import run
from .discovery import Folder
from .options import Options, options_of

_CHECK = "list what would be served; fail if anything is left out or warned of"
_AT_A_TERMINAL = "A client has to start this server (--export client); a page: --transport streamable-http --explorer"


def _add_option(parser: argparse.ArgumentParser, option: dataclasses.Field[Any]) -> argparse.Action:
    """Make the flag of an option: `log_level` has `--log-level`."""
    # Where nothing is the default, the help does not say "(default: None)".
    settings = {**option.metadata, "default": argparse.SUPPRESS if option.default is None else option.default}
    if isinstance(option.default, bool):
        settings["action"] = argparse.BooleanOptionalAction if option.default else "store_true"
    return parser.add_argument(f"--{option.name.replace('_', '-')}", **settings)


def _command_line() -> tuple[argparse.ArgumentParser, argparse.ArgumentParser, list[argparse.Action]]:
    """The parser, another one of what `--export client` does not repeat, and all flags.

    Not repeated is what only the command line has, and every secret."""
    own = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    flags = [
        own.add_argument("--extensions-dir", metavar="DIR", required=True, help="directory with apcore modules"),
        own.add_argument("--export", choices="mcp openai openai-strict markdown client".split(), help="print tools"),
        own.add_argument("--check", action="store_const", const="check", dest="export", help=_CHECK),
        own.add_argument("--skills", metavar="DIR", help="serve the skills in it, a folder each"),
        own.add_argument("--log-config", metavar="FILE", help="how to log instead: JSON for logging.config.dictConfig"),
        own.add_argument("--metrics", action="store_true", dest="metrics_collector", help="Prometheus' page /metrics"),
    ]
    options = [option for option in dataclasses.fields(Options) if "help" in option.metadata]
    flags += [_add_option(own, option) for option in options if not option.repr]
    parser = argparse.ArgumentParser("apcore-mcp", description="Serve apcore modules as MCP tools.", parents=[own])
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.epilog = "Each flag has a variable, APCORE_MCP_PORT for --port; flags win."
    flags += [_add_option(parser, option) for option in options if option.repr]
    parser.set_defaults(log_level="INFO")
    return parser, own, flags


def _variables(flags: list[argparse.Action]) -> list[str]:
    """What the environment says, as arguments: `APCORE_MCP_TAGS="a b"` gives `["--tags", "a", "b"]`."""
    arguments = []
    for flag in flags:
        name, *opposite = flag.option_strings
        text = os.environ.get("APCORE_MCP_" + name.removeprefix("--").replace("-", "_").upper(), "")
        if not text.strip():
            continue
        if flag.nargs == "+":
            arguments += [name, *text.split()]
        elif flag.nargs == 0 and text.lower() in ("true", "false"):
            arguments += [name] if text.lower() == "true" else opposite
        else:  # of a switch, argparse refuses it
            arguments.append(f"{name}={text}")
    return arguments


def _run(values: dict[str, Any], repeated: list[str]) -> int:
    """Do what the flags say, whose `values` have their names. `repeated` are the arguments that an export repeats."""
    directory = values.pop("extensions_dir")
    form = values.pop("export", None)
    log_config = values.pop("log_config", None)
    paths = {"--extensions-dir": directory, "--skills": values.get("skills"), "--log-config": log_config}
    arguments = [part for flag, path in paths.items() if path for part in (flag, os.path.abspath(path))]
    if log_config is not None:
        log.configure(log_config)
        values["log_level"] = None  # the file says it
    else:
        log.log_to_stderr(waits=form is not None)
    folder = Folder(directory)
    if not 1 <= values["port"] <= 65535:
        raise ValueError("port must be between 1 and 65535")
    if not values["name"]:
        raise ValueError("server name must not be empty")
    options = options_of("apcore-mcp", folder, **values)
    if form is not None:
        from .export import print_tools

        return print_tools(options, folder, form, [*arguments, *repeated])
    if options.transport == "stdio":
        from .stdio import take_standard_streams

        if os.isatty(0):
            print(_AT_A_TERMINAL, file=sys.stderr)
        take_standard_streams()  # before the first module runs: what it prints must not reach the client
    folder.discover()
    run(options)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Parse the arguments; serve, export or check; return the exit status."""
    given = sys.argv[1:] if argv is None else argv
    if given == ["--version"]:
        print(f"apcore-mcp {__version__}")
        return 0
    parser, own, flags = _command_line()
    arguments = _variables(flags) + given  # of one flag, the last value wins
    try:
        return _run(vars(parser.parse_args(arguments)), own.parse_known_args(arguments)[1])
    except (TypeError, ValueError, OSError, RuntimeError, ModuleNotFoundError) as error:
        log.tell(f"Error: {error}")
        return 1 if isinstance(error, TypeError | ValueError) else 2


if __name__ == "__main__":
    sys.exit(main())
