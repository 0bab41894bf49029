"""Packages that build on this one: a small shop behind each (`apps/`), served by its own command or embedded server."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcp import StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client

from .programs import HERE, ROOT, pip_install, python_of, reason, run, serving, version_in, yes

APPS = HERE / "apps"
CHECKS = ["list", "path parameter", "query model, enum", "nested models", "wrong input"]
ERAS = ["legacy", "2026-07-28"]
SECONDS = 60

ORDER: dict[str, Any] = {
    "customer": {"name": "Ann", "address": {"street": "Rathausgasse 1", "city": "Bern"}},
    "lines": [{"item_id": 1, "count": 2}, {"item_id": 2}],
}
KITE = {"id": 1, "name": "kite", "color": "red", "price": 30}
RECEIPT = {"total": 105, "city": "Bern", "wrapped_in": "red"}
BLUE = {"color": "blue", "below": 50}


@dataclass(frozen=True)
class Adapter:
    """A package, what it serves the shop with, and what it calls the shop's tools.

    A way to serve is a command, found beside the environment's interpreter, with `{port}` where it is not over stdio;
    `NAME=value` before it goes into its environment.
    """

    package: str
    framework: str
    ways: dict[str, str]
    get: str
    find: str
    place: str
    beside: tuple[str, ...] = ()  # what else it needs; it does not say so itself
    before: tuple[str, ...] = ()  # commands to run once
    secret: str | None = "APCORE_JWT_SECRET=0123456789abcdef0123456789abcdef {}"  # how it is told one
    nested_in: tuple[str, str] | None = None  # the parameters that hold the models, where they are not taken apart


ADAPTERS = [
    Adapter(
        "flask-apcore", "flask",
        {
            "`flask apcore serve` (stdio)": "flask --app flask_app apcore serve",
            "the same with `--http --explorer --approval elicit`":
                "flask --app flask_app apcore serve --http --explorer --approval elicit --port {port}",
        },
        "get_item.get", "items.find", "orders.place",
        before=("flask --app flask_app apcore scan --output yaml",),
        secret="{} --jwt-secret 0123456789abcdef0123456789abcdef",
    ),
    Adapter(
        "fastapi-apcore", "fastapi",
        {
            "`fastapi-apcore serve` (stdio)": "fastapi-apcore serve fastapi_app:app",
            "the same with `--transport streamable-http --explorer --approval elicit`":
                "fastapi-apcore serve fastapi_app:app --transport streamable-http --explorer --approval elicit"
                " --port {port}",
            "its embedded server under uvicorn":
                'APCORE_EMBEDDED_SERVER={"port":{port}} APCORE_SERVE_TRANSPORT=streamable-http'
                " uvicorn fastapi_app:app --port 0",
        },
        "items.get_item_items__item_id_.get", "items.find_items_items.get", "orders.place_order_orders.post",
        beside=("typer",),
    ),
    Adapter(
        "django-apcore", "django",
        {
            "`manage.py apcore_serve` (stdio)": "django-admin apcore_serve",
            "the same with `--transport streamable-http --explorer`":
                "django-admin apcore_serve --transport streamable-http --explorer --port {port}",
            "its embedded server under `runserver`":
                "EMBEDDED_PORT={port} django-admin runserver --noreload 127.0.0.1:0",
        },
        "api.items.get", "api.items.find", "api.orders.place",
        beside=("django-ninja",), before=("django-admin migrate --run-syncdb -v0",),
    ),
    Adapter(
        "pydantic-ai-apcore", "pydantic-ai-slim",
        {
            "`serve_mcp(registry)` (stdio)": "python pydantic_ai_app.py",
            'the same with `transport="streamable-http"`': "python pydantic_ai_app.py {port}",
        },
        "shop.get_item", "shop.find_items", "shop.place_order",
        secret=None, nested_in=("wanted", "order"),
    ),
]  # fmt: skip


def install(adapter: Adapter) -> tuple[Path, str]:
    """The interpreter of the adapter's environment, with this very tree in it, and what is told of the versions."""
    python = python_of(adapter.package)
    pip_install(python, "-e", str(ROOT), f"{adapter.package}[mcp]", *adapter.beside)
    versions = [f"{package} {version_in(python, package)}" for package in (adapter.package, adapter.framework)]
    return python, ", ".join(versions)


def started(command: str, python: Path, folder: str) -> tuple[list[str], dict[str, str]]:
    """The command with the program's path, and what it needs in the environment."""
    given, words = {}, command.split()
    while "=" in words[0]:
        name, _, given[name] = words.pop(0).partition("=")
    given |= {"FOLDER": folder, "PYTHONPATH": str(APPS), "DJANGO_SETTINGS_MODULE": "django_shop.settings"}
    return [str(python.parent / words[0]), *words[1:]], {**given, "PYTHONDONTWRITEBYTECODE": "1"}


async def check(adapter: Adapter, target: Any, era: str) -> dict[str, str]:
    """What the SDK's client finds: each check with "yes" or what came instead."""
    wanted, order = adapter.nested_in or ("", "")
    calls: dict[str, tuple[str, dict[str, Any], Any]] = {
        "path parameter": (adapter.get, {"item_id": 1}, KITE),
        "query model, enum": (adapter.find, {wanted: BLUE} if wanted else BLUE, {"names": ["kettle"]}),
        "nested models": (adapter.place, {order: ORDER} if order else ORDER, RECEIPT),
    }
    async with asyncio.timeout(SECONDS), Client(target, mode=era) as client:
        names = {tool.name for tool in (await client.list_tools()).tools}
        found = {"list": yes(names == {adapter.get, adapter.find, adapter.place}, sorted(names))}
        for name, (tool, arguments, expected) in calls.items():
            result = await client.call_tool(tool, arguments)
            found[name] = yes(result.structured_content == expected, result.content)
        text = str((await client.call_tool(adapter.get, {"item_id": "first"})).content)
        found["wrong input"] = yes("- item_id: " in text, text)
    return found


def checks(adapter: Adapter, command: str, python: Path, folder: str) -> dict[str, str]:
    """The worst that was found of one way to serve, in both protocol eras."""

    def look(target: Any, era: str) -> dict[str, str]:
        try:
            return asyncio.run(check(adapter, target, era))
        except (Exception, BaseExceptionGroup) as error:  # whatever keeps the client from its work is told in the table
            return dict.fromkeys(CHECKS, f"no answer: {reason(error)}")

    program, environment = started(command, python, folder)
    if "{port}" in command:
        with serving(program, cwd=APPS, environment=environment) as url:
            told = [look(url, era) for era in ERAS]
    else:
        options: Any = {"cwd": APPS, "env": {**os.environ, **environment}}
        parameters = StdioServerParameters(command=program[0], args=program[1:], **options)
        with open(os.devnull, "w") as nowhere:
            told = [look(stdio_client(parameters, errlog=nowhere), era) for era in ERAS]
    return {name: next((found[name] for found in told if found[name] != "yes"), "yes") for name in CHECKS}


def secret(adapter: Adapter, python: Path, folder: str) -> str:
    """Whether it serves nothing when it is given a secret for tokens: here nobody would look at them."""
    if adapter.secret is None:
        return "-"
    for way, command in adapter.ways.items():
        if "{port}" in command:
            program, environment = started(adapter.secret.replace("{}", command), python, folder)
            try:
                with serving(program, seconds=15, cwd=APPS, environment=environment):
                    return f"{way}: serves without authentication"
            except subprocess.CalledProcessError as error:
                if not re.search("RuntimeError: apcore-mcp does not authenticate|required for JWT", error.stderr):
                    return f"{way}: {reason(error)}"
    return "refused"


def row(adapter: Adapter) -> list[str]:
    """The adapter's line."""
    python, name = install(adapter)
    with tempfile.TemporaryDirectory() as folder:
        for command in adapter.before:
            program, environment = started(command, python, folder)
            run(program, cwd=APPS, environment=environment).check_returncode()
        found = {way: checks(adapter, command, python, folder) for way, command in adapter.ways.items()}
        refused = secret(adapter, python, folder)
    wrong = {name: [f"{way}: {told[name]}" for way, told in found.items() if told[name] != "yes"] for name in CHECKS}
    return [name, ", ".join(adapter.ways), *("; ".join(cell) or "yes" for cell in wrong.values()), refused]


HEADINGS = ["package", "served by", *CHECKS, "with a secret for JWTs"]
