"""The command line: `python -m apcore_mcp --extensions-dir DIR`, or `apcore-mcp`.

Each flag has a variable of the environment: `APCORE_MCP_PORT` is that of `--port`.

Exit status (FR-CLI-008): 0 after a normal end; 1 for a value that is not allowed, or when `--check` finds something
that is left out or nothing to serve; 2 when the server cannot start or the arguments cannot be parsed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import logging.config
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from apcore import Registry

from . import __version__
from .core import (
    _EXPORTS,
    _HTTP,
    _LOG_FORMAT,
    _STANDARD_STREAMS,
    _TRANSPORTS,
    _check,
    _export,
    _files_of,
    _folder,
    _log_to_stderr,
    _one_line,
    _Options,
    _options_of,
    _serve,
    _take_standard_streams,
)

logger = logging.getLogger("apcore_mcp")

_AT_A_TERMINAL = """A client has to start this server, as it speaks MCP here: add --export client to set one up, or
--transport streamable-http --explorer for a page to look at the tools; Ctrl-C ends it."""


_VARIABLES = "APCORE_MCP_"  # begins the names of all variables
_LOG_LEVEL = "INFO"  # by default


def _configure_log(path: str, name: str) -> None:
    """Set up the log as a JSON file says, by `logging.config.dictConfig`. ValueError, with the name of the setting, for
    one that cannot be used."""
    try:
        config = json.loads(Path(path).read_text("utf-8"))
        # By default that would switch off the loggers that there are already, which are ours.
        logging.config.dictConfig({"disable_existing_loggers": False, **config})
    except Exception as error:  # boundary: what it names is made, whatever that raises
        reason = error if error.__cause__ is None else f"{error}: {error.__cause__}"
        raise ValueError(_one_line(f"{name} {path}: {reason}")) from None


_NOT_GIVEN: Any = object()


@dataclasses.dataclass
class _CommandLine:
    """The parser of the command line, made of the options of `serve()`, and its flags.

    `own` is a parser of those that `--export client` does not repeat: that only the command line has, and secrets."""

    parser: argparse.ArgumentParser
    own: argparse.ArgumentParser
    flags: list[argparse.Action]
    own_names: set[str]  # of its flags

    def parse(self, argv: Sequence[str] | None) -> dict[str, Any]:
        """The values of the flags that are given, by the names of the options."""
        nothing = argparse.Namespace(**{flag.dest: _NOT_GIVEN for flag in self.flags})
        given = vars(self.parser.parse_args(argv, nothing))
        return {name: value for name, value in given.items() if value is not _NOT_GIVEN}


def _command_line() -> _CommandLine:
    own = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    directory = own.add_argument("--extensions-dir", metavar="DIR", help="directory with apcore modules")
    directory.required = not os.environ.get(_variable_of(directory))
    instead = own.add_mutually_exclusive_group()
    flags = [
        directory,
        instead.add_argument("--export", choices=_EXPORTS, help="print the tools instead of serving them, and exit"),
        instead.add_argument(
            "--check", action="store_true", help="list what would be served; fail if anything is left out"
        ),
        own.add_argument("--log-config", metavar="FILE", help="how to log, as JSON for Python's logging.config"),
    ]
    secrets = [option for option in dataclasses.fields(_Options) if not option.repr]
    for option in secrets:
        flags.append(own.add_argument(f"--{option.name.replace('_', '-')}", **_flag_of(option)))
    own_names = {flag.dest for flag in flags}
    parser = argparse.ArgumentParser("apcore-mcp", parents=[own], description="Serve apcore modules as MCP tools.")
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    metrics = "Prometheus' page /metrics"
    flags.append(parser.add_argument("--metrics", action="store_true", dest="metrics_collector", help=metrics))
    for option in dataclasses.fields(_Options):
        if "help" in option.metadata and option not in secrets:
            flag = f"--{option.name.replace('_', '-')}"
            # No "(default: None)" where nothing is the default.
            default = argparse.SUPPRESS if option.default is None else option.default
            more: dict[str, Any] = {}
            if isinstance(default, bool):
                more = {"action": argparse.BooleanOptionalAction if default else "store_true"}
            flags.append(parser.add_argument(flag, default=default, **_flag_of(option), **more))
    parser.set_defaults(log_level=_LOG_LEVEL)
    parser.epilog = "Each flag has a variable, APCORE_MCP_PORT for --port; flags win."
    return _CommandLine(parser, own, flags, own_names)


def _flag_of(option: dataclasses.Field[Any]) -> dict[str, Any]:
    """What argparse is told of an option's flag."""
    return {key: value for key, value in option.metadata.items() if key != "transports"}


def _variable_of(flag: argparse.Action) -> str:
    """The variable of a flag: `APCORE_MCP_LOG_LEVEL` for `--log-level`."""
    return _VARIABLES + flag.option_strings[0].removeprefix("--").replace("-", "_").upper()


def _value_of(flag: argparse.Action, text: str) -> Any:
    """The value that a flag has by its variable; ValueError for a text that says none."""
    if flag.nargs == 0:
        if text.lower() not in ("true", "false"):
            raise ValueError(f"{_variable_of(flag)} must be true or false, got {text!r}")
        return text.lower() == "true"
    if not text.strip():  # of a flag that may come without a value
        return None
    values = []
    convert: Any = flag.type or str
    for word in text.split() if flag.nargs == "+" else [text]:
        try:
            value = convert(word)
        except ValueError:
            raise ValueError(f"{_variable_of(flag)}: invalid {convert.__name__} value: {word!r}") from None
        if flag.choices is not None and value not in flag.choices:
            raise ValueError(f"{_variable_of(flag)}: invalid choice: {word!r} (choose from {', '.join(flag.choices)})")
        values.append(value)
    return values if flag.nargs == "+" else values[0]


def _read_environment(flags: Sequence[argparse.Action], options: dict[str, Any]) -> dict[str, str]:
    """Add to `options` what variables say and no flag. Returns their names, by those of the options."""
    variables = {}
    for flag in flags:
        text = os.environ.get(_variable_of(flag), "")
        is_set = text.strip() or (flag.nargs == "?" and _variable_of(flag) in os.environ)
        if is_set and flag.dest not in options:
            options[flag.dest] = _value_of(flag, text)
            variables[flag.dest] = _variable_of(flag)
    return variables


def _check_options(registry: Registry, options: dict[str, Any]) -> _Options:
    """The checked options; ValueError in the words of FR-CLI-004 and FR-CLI-005, which are others than Python's."""
    if not 1 <= options.get("port", 1) <= 65535:
        raise ValueError("port must be between 1 and 65535")
    if options.get("name") == "":
        raise ValueError("server name must not be empty")
    return _options_of("apcore-mcp", registry, **options)


def _blamed(error: Exception, registry: Registry, options: dict[str, Any], variables: dict[str, str]) -> str:
    """What `error` says, behind the variables without which it is not so."""
    names = []
    for name, variable in variables.items():
        try:
            _check_options(registry, {each: value for each, value in options.items() if each != name})
        except (TypeError, ValueError) as other:
            if str(other) == str(error):
                continue
        names.append(variable)
    return ": ".join([*names, str(error)])


def _warn_of_unknown(flags: Sequence[argparse.Action]) -> None:
    """Warn of variables that look like settings and are none."""
    known = {_variable_of(flag) for flag in flags}
    unknown = sorted(name for name in os.environ if name.startswith(_VARIABLES) and name not in known)
    if unknown:
        logger.warning("No settings, so without effect: %s", ", ".join(unknown))


def _warn_of_useless(transport: str, given: dict[str, str]) -> None:
    """Warn of those settings, by the names of their options, that `transport` has no use for."""
    useful_to: dict[str, Sequence[str]] = {"metrics_collector": _HTTP}
    for option in dataclasses.fields(_Options):
        if "transports" in option.metadata:
            useful_to[option.name] = option.metadata["transports"]
    useless = [setting for name, setting in given.items() if transport not in useful_to.get(name, _TRANSPORTS)]
    if useless:
        logger.warning("Without effect on %s: %s", transport, ", ".join(useless))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments; serve, export or check; return the exit status."""
    if (argv or sys.argv[1:]) == ["--version"]:
        print(f"apcore-mcp {__version__}")
        sys.exit(0)
    line = _command_line()
    options = line.parse(argv)
    given = {flag.dest: flag.option_strings[0] for flag in line.flags if flag.dest in options}
    log = None
    try:
        variables = _read_environment(line.flags, options)
        log_config = options.pop("log_config", None)
        export = options.pop("export", None)
        check = options.pop("check", False)
        if log_config is not None:
            _configure_log(log_config, (given | variables)["log_config"])
        else:
            options.setdefault("log_level", _LOG_LEVEL)
            if export or check:
                logging.basicConfig(format=_LOG_FORMAT)
            else:
                log = _log_to_stderr()
                logging.captureWarnings(True)  # they are written to stderr otherwise
        directory = options.pop("extensions_dir")
        try:
            registry = _folder(directory)
        except ValueError as error:
            if "extensions_dir" not in variables:
                raise
            raise ValueError(f"{variables['extensions_dir']}: {error}") from None
        try:
            checked = _check_options(registry, options)
        except (TypeError, ValueError) as error:
            raise ValueError(_blamed(error, registry, options, variables)) from None
        _warn_of_unknown(line.flags)
        if not export:  # what is exported is often for another transport
            _warn_of_useless(checked.transport, given | variables)
        # The standard streams are taken before the first module is imported: what a module prints must reach neither a
        # client nor the exported JSON.
        if export or check:
            status = 0
            _, stdout = _take_standard_streams()
            _files_of(registry).update()
            if check:
                printed, status = _check(checked)
            else:
                arguments = ["--extensions-dir", os.path.abspath(directory)]
                if log_config is not None:
                    arguments += ["--log-config", os.path.abspath(log_config)]
                arguments += line.own.parse_known_args(argv)[1]
                repeated = {name: variable for name, variable in variables.items() if name not in line.own_names}
                environment = {variable: os.environ[variable] for variable in repeated.values()}
                printed = _export(checked, export, arguments, environment)
            # UTF-8, whatever the terminal's encoding is.
            with open(stdout, "w", encoding="utf-8", errors="backslashreplace") as file:
                print(printed, file=file)
            return status
        if checked.transport == "stdio":
            if os.isatty(0):
                print(_AT_A_TERMINAL, file=sys.stderr)
            _STANDARD_STREAMS.take()
        _files_of(registry).update()
        _serve(checked)
    except (TypeError, ValueError, OSError, RuntimeError) as error:
        if log is None:
            print(f"Error: {error}", file=sys.stderr)
        else:
            log.enqueue(f"Error: {error}")  # behind what has been logged
        return 1 if isinstance(error, TypeError | ValueError) else 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
