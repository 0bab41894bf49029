"""The Tool Explorer in a real browser: what an author does with it, and what hostile pages and modules cannot do."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.server
import itertools
import json
import os
import re
import shutil
import struct
import subprocess
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from apcore import ModuleAnnotations
from apcore.errors import ModuleError
from apcore.module import ModuleExample
from conftest import FunctionalModule, echo, registry_of, serving
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright
from starlette.authentication import AuthCredentials, AuthenticationBackend, SimpleUser
from starlette.middleware import Middleware
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.requests import HTTPConnection

pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"), pytest.mark.once]
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage""".split()
expect.set_options(timeout=20_000)
REBOUND = "rebound.example"
PAGES = Path(__file__).parent / "pages"
PHONE = {"width": 360, "height": 740}

ORDER = {
    "type": "object",
    "properties": {
        "customer": {"type": "string", "description": "Who pays", "minLength": 2},
        "count": {"type": "integer", "default": 1, "minimum": 1, "maximum": 9},
        "colour": {"enum": ["red", "green", "blue"]},
        "gift": {"type": "boolean"},
        "on": {"type": "string", "format": "date"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string"}},
            "required": ["city"],
        },
        "lines": {
            "type": "array",
            "items": {"type": "object", "properties": {"sku": {"type": "string"}}, "required": ["sku"]},
        },
        "prices": {"type": "object", "additionalProperties": {"type": "number"}},
        "pay": {
            "oneOf": [
                {
                    "title": "Card",
                    "type": "object",
                    "properties": {"kind": {"const": "card"}, "number": {"type": "string"}},
                    "required": ["kind", "number"],
                },
                {
                    "title": "Invoice",
                    "type": "object",
                    "properties": {"kind": {"const": "invoice"}, "days": {"type": "integer"}},
                    "required": ["kind"],
                },
            ]
        },
    },
    "required": ["customer", "address"],
}
NOBODY: dict[str, Any] = {"type": "object", "properties": {}}


def png(width: int, height: int) -> str:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\x20\x60\xf0" * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    image = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(image).decode()


def media(media_type: str) -> dict[str, Any]:
    return {"type": "string", "contentEncoding": "base64", "contentMediaType": media_type}


class Waiting:
    """A module that runs until it is cancelled."""

    description = "Waits"

    def __init__(self) -> None:
        self.input_schema = self.output_schema = NOBODY
        self.cancelled = threading.Event()

    async def execute(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()
        return {}


async def pieces(inputs: dict[str, Any], context: Any) -> AsyncIterator[dict[str, Any]]:
    yield dict(inputs)


WAVE = b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x40\x1f\0\0\x40\x1f\0\0\1\0\x08\0data\0\0\0\0"
SOUND = base64.b64encode(WAVE).decode()


def modules() -> dict[str, Any]:
    files = {"picture": media("image/png"), "sound": media("audio/wav"), "page": media("text/html")}
    return {
        "shop.order": FunctionalModule(
            lambda inputs, context: {"given": inputs},
            input_schema=ORDER,
            description="Orders something.\nIn one go.",
            documentation="# How\n\nWith **care** and `sku`.",
            examples=[ModuleExample(title="A small one", inputs={"customer": "Ann", "address": {"city": "Ulm"}})],
        ),
        "shop.remove": FunctionalModule(
            echo,
            input_schema=NOBODY,
            description="Removes the shop",
            annotations=ModuleAnnotations(destructive=True, requires_approval=True),
        ),
        "shop.look": FunctionalModule(
            echo,
            stream=pieces,
            description="Looks only",
            annotations=ModuleAnnotations(readonly=True, streaming=True),
        ),
        "shop.wait": Waiting(),
        "shop.files": FunctionalModule(
            lambda inputs, context: {"picture": png(40, 30), "sound": SOUND, "page": "PGI+", "n": 3},
            input_schema=NOBODY,
            output_schema={"type": "object", "properties": {**files, "n": {"type": "integer"}}},
        ),
        "shop.big": FunctionalModule(
            lambda inputs, context: {"rows": list(range(10_000)), "id": 2**60 + 1}, input_schema=NOBODY
        ),
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        rules = [f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"]
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS + rules)
        yield started
        started.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens pages; at the end of the test none of them may have had an error of its own."""
    problems: list[str] = []
    with contextlib.ExitStack() as contexts:

        def new(**options: Any) -> Page:
            context = browser.new_context(**options)
            contexts.callback(context.close)
            context.set_default_timeout(20_000)
            page = context.new_page()
            page.on("pageerror", lambda error: problems.append(str(error)))
            return page

        yield new
        assert not problems


@pytest.fixture(scope="module")
def parts() -> dict[str, Any]:
    return modules()


@pytest.fixture(scope="module")
def url(parts: dict[str, Any]) -> Iterator[str]:
    with serving(registry_of(parts), explorer=True, allow_execute=True) as base:
        yield base


def opened(page: Page, url: str, name: str) -> Page:
    page.goto(f"{url}/explorer/#{name}")
    expect(page.get_by_role("heading", level=2, name=name)).to_be_visible()
    return page


def run(page: Page) -> Locator:
    """Presses Run; the section with what came of it."""
    page.get_by_role("button", name="Run", exact=True).click()
    return page.get_by_role("region", name="Result")


def arguments(page: Page) -> Any:
    """What the JSON view holds."""
    return json.loads(page.get_by_label("Arguments as JSON").input_value())


@contextlib.contextmanager
def one_tool(new_page: Callable[..., Page], schema: dict[str, Any], **attributes: Any) -> Iterator[Page]:
    """A page that shows the tool `t.one`, which takes `schema` and answers with its arguments."""
    module = FunctionalModule(echo, **{"input_schema": schema, **attributes})
    with serving(registry_of({"t.one": module}), explorer=True, allow_execute=True) as url:
        yield opened(new_page(), url, "t.one")


def write_json(page: Page, text: str) -> None:
    """Types `text` into the JSON view and goes back to the form."""
    page.get_by_role("button", name="JSON", exact=True).click()
    page.get_by_label("Arguments as JSON").fill(text)
    page.get_by_role("button", name="Form", exact=True).click()


def sent(page: Page) -> str:
    """Presses Run; the body of the call."""
    with page.expect_request(lambda request: request.method == "POST") as request:
        run(page)
    body = request.value.post_data
    assert body is not None
    return body


def refused(page: Page) -> Locator:
    """Presses Run, which must send nothing; the sentence beside it."""
    calls: list[str] = []
    page.on("request", lambda request: calls.append(request.url) if request.method == "POST" else None)
    run(page)
    sentence = page.get_by_role("main").get_by_role("status")
    expect(sentence).to_contain_text("Not run")
    assert calls == []
    return sentence


# ---- The list ----


def test_lists_searches_and_links_to_every_tool(new_page: Callable[..., Page], url: str) -> None:
    page = new_page()
    page.goto(f"{url}/explorer/")
    tools = page.get_by_role("navigation", name="Tools")
    expect(tools.get_by_role("link")).to_have_count(6)
    expect(tools.get_by_role("status")).to_have_text("6 tools")
    expect(tools.get_by_role("link", name="shop.remove")).to_contain_text("destructive")
    expect(tools.get_by_role("link", name="shop.remove")).to_contain_text("needs approval")
    expect(tools.get_by_role("link", name="shop.look")).to_contain_text("read-only")
    expect(tools.get_by_role("link", name="shop.look")).to_contain_text("streaming")
    page.get_by_label("Search tools").fill("looks ONLY")
    expect(tools.get_by_role("link")).to_have_count(1)
    expect(tools.get_by_role("status")).to_have_text("1 of 6 tools")
    tools.get_by_role("link").click()
    expect(page).to_have_url(re.compile(r"#shop\.look$"))
    expect(page).to_have_title(re.compile("^shop.look .+ Tool Explorer$"))
    page.reload()
    expect(page.get_by_role("heading", name="shop.look")).to_be_visible()
    page.get_by_role("link", name="shop.order").click()
    page.go_back()
    expect(page.get_by_role("heading", name="shop.look")).to_be_visible()


@pytest.mark.parametrize("screen", [{"width": 1280, "height": 800}, PHONE], ids=["wide", "phone"])
def test_greets_with_what_the_server_is_and_how_to_connect(
    new_page: Callable[..., Page], screen: dict[str, Any]
) -> None:
    options = {"name": "House", "version": "2.1", "instructions": f"Knock.{EVIL}", "explorer_prefix": "/a/b"}
    with serving(registry_of({"a.b": echo}), explorer=True, **options) as url:
        page = new_page(viewport=screen)
        page.goto(f"{url}/a/b/")
        greeting = page.get_by_role("main")
        expect(greeting.get_by_role("heading", level=2)).to_have_text("House")
        expect(greeting).to_contain_text("version 2.1 · 1 tool · streamable HTTP")
        expect(greeting).to_contain_text(
            "Choose its tool to see what it takes and gives. Running tools is switched off"
        )
        expect(greeting.get_by_text(f"{url}/mcp", exact=True)).to_be_visible()
        expect(page.get_by_role("alert")).to_have_count(0)
        greeting.get_by_text("As JSON").click()
        entry = {"mcpServers": {"House": {"type": "http", "url": f"{url}/mcp"}}}
        assert json.loads(greeting.locator("pre").first.inner_text()) == entry
        greeting.get_by_text("What an agent is told").click()
        expect(greeting).to_contain_text("Knock." + EVIL)
        assert page.evaluate("document.documentElement.scrollWidth") <= screen["width"]
        page.get_by_role("link", name="a.b").click()
        expect(greeting.get_by_role("heading", level=2)).to_have_text("a.b")


def test_without_a_tool_it_says_what_to_do(new_page: Callable[..., Page]) -> None:
    with serving(registry_of(), explorer=True, transport="sse") as url:
        page = new_page()
        page.goto(f"{url}/explorer/")
        expect(page.get_by_role("main")).to_contain_text("0 tools · SSE (deprecated)")
        expect(page.get_by_role("main")).to_contain_text("It lists no tools. Register modules")
        expect(page.get_by_text(f"{url}/sse", exact=True)).to_be_visible()


def test_500_tools_are_no_burden(new_page: Callable[..., Page]) -> None:
    many = {f"many.tool_{number}": echo for number in range(500)}
    with serving(registry_of(many), explorer=True) as url:
        page = new_page()
        page.goto(f"{url}/explorer/#many.tool_499")
        expect(page.get_by_role("heading", name="many.tool_499")).to_be_visible()
        expect(page.get_by_role("navigation").get_by_role("status")).to_have_text("500 tools")
        page.get_by_label("Search tools").fill("tool_49")
        expect(page.get_by_role("navigation").get_by_role("link")).to_have_count(11)


def test_says_when_a_tool_is_not_there_and_when_the_server_is_gone(new_page: Callable[..., Page]) -> None:
    page = new_page()
    registry = registry_of({"a.b": echo})
    with serving(registry, explorer=True) as url:
        page.goto(f"{url}/explorer/#not.there")
        expect(page.get_by_role("alert")).to_have_text("Tool 'not.there' not found")
        registry.register("not.there", FunctionalModule(echo))
        page.get_by_role("button", name="Refresh").click()
        expect(page.get_by_role("heading", name="not.there")).to_be_visible()
        page.goto(f"{url}/explorer/#")
        expect(page.get_by_text("Choose one of its 2 tools")).to_be_visible()
    page.get_by_role("link", name="a.b").click()
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")
    page.get_by_role("button", name="Refresh").click()
    expect(page.get_by_text("The tools cannot be loaded. The server cannot be reached")).to_be_visible()


def many_modules() -> dict[str, Any]:
    """Eighty modules in eight groups; their titles are in another order than their ids."""
    groups = "billing crm files mail orders reports search users".split()
    return {
        f"{group}.act_{number}": FunctionalModule(
            echo,
            description=f"Does number {number} of {group}",
            tags=["write" if number % 2 else "read"],
            metadata={"display": {"mcp": {}}},
            name=f"Work {(7 * number) % 10}",
        )
        for group in groups
        for number in range(10)
    }


def test_eighty_tools_stand_in_groups_that_can_be_closed(new_page: Callable[..., Page]) -> None:
    with serving(registry_of(many_modules()), explorer=True) as url:
        page = new_page(viewport={"width": 1280, "height": 800})
        page.goto(f"{url}/explorer/")
        tools = page.get_by_role("navigation", name="Tools")
        groups = tools.locator("details:has(a) > summary")
        expect(groups).to_have_count(8)
        labels = [label.split()[0] for label in groups.all_inner_texts()]
        assert labels == sorted(labels)
        assert page.locator("#list").evaluate("list => list.scrollHeight") < 1000, "the groups can be seen at a glance"
        groups.filter(has_text="crm").click()
        expect(tools.get_by_role("link").first).to_be_visible()
        assert tools.get_by_role("link").locator("strong").all_inner_texts() == [f"Work {n}" for n in range(10)]
        page.get_by_role("button", name="Refresh").click()
        expect(tools.get_by_role("link")).to_have_count(10)
        groups.filter(has_text="crm").click()
        expect(tools.get_by_role("link")).to_have_count(0)
        page.get_by_label("Search tools").fill("act_3")
        expect(tools.get_by_role("link")).to_have_count(8)
        page.get_by_label("Search tools").fill("")
        expect(tools.get_by_role("link")).to_have_count(0)
        page.goto(f"{url}/explorer/#mail.act_4")
        expect(tools.get_by_role("link")).to_have_count(10)


def test_tags_filter_the_list(new_page: Callable[..., Page]) -> None:
    with serving(registry_of(many_modules()), explorer=True) as url:
        page = new_page()
        page.goto(f"{url}/explorer/")
        tools = page.get_by_role("navigation", name="Tools")
        page.get_by_label("Tag").select_option("read")
        expect(tools.get_by_role("status")).to_have_text("40 of 80 tools")
        page.get_by_label("Search tools").fill("mail")
        expect(tools.get_by_role("link")).to_have_count(5)
        page.get_by_role("button", name="Refresh").click()
        expect(tools.get_by_role("status")).to_have_text("5 of 80 tools")
        expect(page.get_by_label("Tag")).to_have_value("read")


def test_a_name_of_two_dots_is_no_tool(new_page: Callable[..., Page], url: str) -> None:
    for name in ("..", "."):
        page = new_page()
        page.goto(f"{url}/explorer/#{name}")
        expect(page.get_by_role("alert")).to_have_text(f"Tool '{name}' not found")


def test_behind_a_proxy_that_strips_a_prefix_the_address_has_it(new_page: Callable[..., Page]) -> None:
    for options, name in (({}, "mcp"), ({"transport": "sse"}, "sse"), ({"explorer_prefix": "/a/b"}, "mcp")):
        with serving(registry_of({"a.b": echo}), explorer=True, **options) as url:

            def forward(route: Route, *, url: str = url) -> None:
                route.fulfill(response=route.fetch(url=route.request.url.replace(f"{url}/tools/", f"{url}/", 1)))

            page = new_page()
            page.route(f"{url}/tools/**", forward)
            page.goto(f"{url}/tools{options.get('explorer_prefix', '/explorer')}/")
            expect(page.get_by_text(f"{url}/tools/{name}", exact=True)).to_be_visible()


# ---- The form ----


def test_form_and_json_are_two_views_of_the_same_arguments(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(), url, "shop.order")
    assert arguments(page) == {"count": 1, "address": {}}, "defaults, and what must be there"
    page.get_by_label("customer").fill("Ann")
    page.get_by_label("count").fill("3")
    page.get_by_label("colour").select_option("green")
    page.get_by_label("gift").select_option("false")
    page.get_by_label(re.compile("^on string, date")).fill("2026-02-28")
    page.get_by_label("city").fill("Ulm")
    page.get_by_role("button", name="Add to lines").click()
    page.get_by_label("sku").fill("A1")
    page.get_by_label("Include prices").check()
    page.get_by_role("button", name="Add an entry").click()
    page.get_by_label("Name").fill("EUR")
    page.get_by_label("value").fill("1.5")
    page.get_by_label("Include pay").check()
    page.get_by_label("Kind of pay").select_option("Invoice")
    page.get_by_label("days").fill("30")
    expected = {
        "customer": "Ann",
        "count": 3,
        "colour": "green",
        "gift": False,
        "on": "2026-02-28",
        "address": {"city": "Ulm"},
        "lines": [{"sku": "A1"}],
        "prices": {"EUR": 1.5},
        "pay": {"kind": "invoice", "days": 30},
    }
    assert arguments(page) == expected
    page.get_by_role("button", name="JSON", exact=True).click()
    changed = {
        "customer": "Bo",
        "note": None,
        "address": {"city": "Bonn", "floor": 3},
        "lines": [{"sku": "B"}, {"sku": "C"}],
        "pay": {"kind": "card", "number": "4"},
        "extra": 2**60 + 1,
    }
    page.get_by_label("Arguments as JSON").fill(json.dumps(changed))
    page.get_by_role("button", name="Form", exact=True).click()
    expect(page.get_by_label("customer")).to_have_value("Bo")
    expect(page.get_by_label("count")).to_have_value("")
    expect(page.get_by_label("sku")).to_have_count(2)
    expect(page.get_by_label("number string")).to_have_value("4")
    page.get_by_label("zip").fill("53111")
    page.get_by_role("button", name="Remove lines 1").click()
    expected = {**changed, "address": {"city": "Bonn", "zip": "53111", "floor": 3}, "lines": [{"sku": "C"}]}
    assert arguments(page) == expected, "what the form does not know is kept, and so is every digit"
    result = run(page)
    result.get_by_text("address: {3}").click()
    expect(result).to_contain_text('city: "Bonn"')
    expect(result).to_contain_text("extra: 1152921504606846977")


def test_json_that_is_none_is_told_and_not_sent(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(), url, "shop.order")
    page.get_by_role("button", name="JSON", exact=True).click()
    box = page.get_by_label("Arguments as JSON")
    calls: list[str] = []
    page.on("request", lambda request: calls.append(request.url) if request.method == "POST" else None)
    for text in ("{", "[1]"):
        box.fill(text)
        expect(box).to_have_attribute("aria-invalid", "true")
        page.get_by_role("button", name="Run", exact=True).click()
        expect(box).to_be_focused()
    box.fill('{"customer": "Ann", "address": {"city": "Ulm"}}')
    expect(box).not_to_have_attribute("aria-invalid", "true")
    assert not calls
    expect(run(page)).to_contain_text('customer: "Ann"')


def test_errors_stand_at_their_fields(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(), url, "shop.order")
    page.get_by_label("count").fill("ten")
    page.get_by_label("city").fill("Ulm")
    result = run(page)
    expect(result).to_contain_text("Input validation failed:")
    customer, count = page.get_by_label("customer"), page.get_by_label("count")
    expect(count).to_have_attribute("aria-invalid", "true")
    expect(count).to_have_accessible_description(re.compile("integer"))
    expect(page.get_by_label("city")).not_to_have_attribute("aria-invalid", "true")
    expect(customer).to_be_focused()
    count.fill("2")
    expect(count).not_to_have_attribute("aria-invalid", "true")
    customer.fill("Ann")
    expect(run(page)).to_contain_text("count: 2")
    expect(page.locator("[aria-invalid=true]")).to_have_count(0)


def test_examples_fill_the_form_and_documentation_is_shown(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(), url, "shop.order")
    expect(page.get_by_role("heading", name="How")).to_be_visible()
    expect(page.get_by_text("care", exact=True)).to_be_visible()
    page.get_by_label("Fill in an example").select_option("A small one")
    assert arguments(page) == {"customer": "Ann", "address": {"city": "Ulm"}}
    page.get_by_text("Input schema").click()
    expect(page.get_by_text('"description": "Who pays"')).to_be_visible()


LINES = "SELECT 1 -- one\nFROM t\n"
TEXTS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string"},
        "key": {"type": "string", "x-sensitive": True},
        "note": {"anyOf": [{"type": "string", "format": "uri"}, {"type": "null"}]},
        "steps": {"type": "array", "items": {"type": "string"}},
        "names": {"type": "object", "additionalProperties": {"type": "string"}},
        "limit": {"type": "integer"},
    },
    "required": ["query"],
}


def test_every_text_keeps_its_lines(new_page: Callable[..., Page]) -> None:
    given = {"query": LINES, "key": LINES, "note": "a\r\nb", "steps": [LINES, "b"], "names": {"a": LINES, "": "c"}}
    with one_tool(new_page, TEXTS, examples=[ModuleExample(title="Lines", inputs=given)]) as page:
        page.get_by_label("Fill in an example").select_option("Lines")
        assert json.loads(sent(page)) == given
        page.get_by_label("limit").fill("3")
        assert json.loads(sent(page)) == {**given, "limit": 3}
        for label in ("query", "key", "note"):
            page.get_by_label(re.compile(f"^{label} ")).fill("x\ny")
        page.get_by_role("textbox", name="steps 2").fill("s\nt")
        changed = {"query": "x\ny", "key": "x\ny", "note": "x\ny", "steps": [LINES, "s\nt"], "limit": 3}
        assert json.loads(sent(page)) == {**given, **changed}
        page.get_by_label("query").press("Enter")
        assert json.loads(sent(page))["query"] == "x\ny\n"


def test_what_is_secret_is_not_shown_while_it_is_typed(new_page: Callable[..., Page]) -> None:
    with one_tool(new_page, TEXTS) as page:
        page.get_by_label("key").fill("hunter2\nhunter3")
        assert page.get_by_label("key").evaluate("box => getComputedStyle(box).webkitTextSecurity") == "disc"


NULLS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "list": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}], "default": [1]},
        "must": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
        "object": {
            "anyOf": [{"type": "object", "properties": {"a": {"type": "integer", "default": 7}}}, {"type": "null"}]
        },
        "either": {"oneOf": [{"const": "x"}, {"type": "integer"}, {"type": "null"}]},
        "both": {"anyOf": [{"const": "x"}, {"type": "null"}]},
        "map": {"anyOf": [{"type": "object", "additionalProperties": {"type": "integer"}}, {"type": "null"}]},
        "number": {"anyOf": [{"type": "number"}, {"type": "null"}], "default": 1},
        "other": {"type": "string"},
    },
    "required": ["must", "object", "either", "both"],
}


def test_a_null_stays_null_until_somebody_edits_it(new_page: Callable[..., Page]) -> None:
    given = dict.fromkeys(("list", "must", "object", "either", "both", "map", "number"))
    with one_tool(new_page, NULLS) as page:
        assert arguments(page) == {"list": [1], "must": [], "object": {"a": 7}, "either": "x", "both": "x", "number": 1}
        write_json(page, json.dumps(given))
        assert json.loads(sent(page)) == given
        page.get_by_label("other").fill("text")
        assert json.loads(sent(page)) == {**given, "other": "text"}
        expect(page.get_by_label("number")).to_have_accessible_description(re.compile("null"))
        expect(
            page.get_by_role("form", name="Arguments").get_by_text(re.compile("null")).locator("visible=true")
        ).to_have_count(7)
        page.get_by_role("button", name="Add to must").click()
        page.get_by_role("textbox", name="must 1").fill("5")
        page.get_by_label("number").fill("2")
        assert json.loads(sent(page)) == {**given, "other": "text", "must": [5], "number": 2}


def test_what_a_field_cannot_show_is_sent_as_it_is_and_said(new_page: Callable[..., Page]) -> None:
    schema = {
        "type": "object",
        "properties": {
            "day": {"type": "string", "format": "date"},
            "colour": {"enum": ["red", "green"]},
            "flag": {"type": "boolean"},
            "sizes": {"type": "array", "items": {"type": "integer"}},
            "kind": {"oneOf": [{"type": "integer"}, {"type": "boolean"}]},
        },
    }
    given = {"day": "31.01.2025", "colour": "mauve", "flag": "yes", "sizes": "all", "kind": ["k"]}
    examples = [ModuleExample(title="German", inputs={"day": "31.01.2025"})]
    with one_tool(new_page, schema, examples=examples) as page:
        page.get_by_label("Fill in an example").select_option("German")
        expect(page.get_by_label(re.compile("^day"))).to_have_accessible_description(re.compile("31.01.2025"))
        assert json.loads(sent(page)) == {"day": "31.01.2025"}
        write_json(page, json.dumps(given))
        for value in given.values():
            expect(page.get_by_role("form", name="Arguments")).to_contain_text(json.dumps(value, separators=(",", ":")))
        assert json.loads(sent(page)) == given
        page.get_by_label(re.compile("^day")).fill("2025-01-31")
        expect(page.get_by_role("form", name="Arguments")).not_to_contain_text("31.01.2025")
        assert json.loads(sent(page)) == {**given, "day": "2025-01-31"}


def test_half_written_json_is_never_run_as_something_else(new_page: Callable[..., Page]) -> None:
    schema = {"type": "object", "properties": {"any": {"description": "Any value"}, "n": {"type": "integer"}}}
    with one_tool(new_page, schema) as page:
        page.get_by_label("n integer").fill("4")
        write_json(page, '{"n": 5')
        refused(page)
        expect(page.get_by_label("Arguments as JSON")).to_be_focused()
        page.get_by_label("Arguments as JSON").fill('{"n": 5}')
        assert json.loads(sent(page)) == {"n": 5}
        page.get_by_role("button", name="Form", exact=True).click()
        page.get_by_label("any").fill('{"a": ')
        refused(page)
        expect(page.get_by_label("any")).to_be_focused()
        expect(page.get_by_label("any")).to_have_accessible_description(re.compile("JSON"))
        page.get_by_label("n integer").fill("6")
        page.get_by_text("curl", exact=True).click()
        expect(page.get_by_text("curl -sS")).to_have_count(0)
        page.get_by_label("any").fill('{"a": 1}')
        assert json.loads(sent(page)) == {"any": {"a": 1}, "n": 6}
        expect(page.get_by_text("curl -sS")).to_be_visible()


def test_every_entry_of_a_map_is_data(new_page: Callable[..., Page]) -> None:
    schema = {"type": "object", "properties": {"map": {"type": "object", "additionalProperties": {"type": "integer"}}}}
    with one_tool(new_page, schema) as page:
        text = '{"map":{"":1,"__proto__":2,"constructor":3,"toString":4}}'
        write_json(page, text)
        page.get_by_role("textbox", name="constructor").fill("5")
        assert sent(page).replace("\n", "").replace(" ", "") == text.replace("3", "5")
        page.get_by_role("button", name="Add an entry").click()
        expect(refused(page)).to_contain_text("empty")
        page.get_by_label("Name").last.fill("constructor")
        page.get_by_label("value", exact=False).last.fill("6")
        expect(refused(page)).to_contain_text("constructor")


def test_a_number_is_sent_with_all_its_digits(new_page: Callable[..., Page]) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "number"}, "m": {"type": "number"}}}
    with one_tool(new_page, schema) as page:
        page.get_by_label("n number").fill("1e400")
        page.get_by_label("m number").fill("0.12345678901234567890")
        assert sent(page).split() == '{ "n": 1e400, "m": 0.12345678901234567890 }'.split()


def test_properties_are_data_whatever_they_are_called(new_page: Callable[..., Page]) -> None:
    branches = [
        {"title": "First", "type": "object", "properties": {"constructor": {"type": "integer"}}},
        {
            "title": "Second",
            "type": "object",
            "properties": {"a": {"type": "string"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"title": "Third", "type": "object", "properties": {"b": {"type": "integer"}}, "required": ["constructor"]},
    ]
    hidden = {"allOf": [{"properties": json.loads('{"__proto__": {"type": "integer"}, "x": {"type": "integer"}}')}]}
    schema = {"type": "object", "properties": {"pick": {"anyOf": branches[::-1]}, "all": {"type": "object", **hidden}}}
    with one_tool(new_page, schema) as page:
        write_json(page, '{"pick": {"a": "z"}, "all": {"__proto__": 1}}')
        expect(page.get_by_label("Kind of pick").locator("option:checked")).to_have_text("Second")
        expect(page.get_by_label("__proto__")).to_have_value("1")
        page.get_by_label("__proto__").fill("2")
        page.get_by_label("x integer").fill("3")
        assert arguments(page) == {"pick": {"a": "z"}, "all": {"__proto__": 2, "x": 3}}
        write_json(page, '{"pick": {"b": 1}}')
        expect(page.get_by_label("Kind of pick").locator("option:checked")).to_have_text("First")


CARD = {"title": "Card", "type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]}
CASH = {"title": "Cash", "type": "object", "properties": {"amount": {"type": "integer"}}, "required": ["amount"]}


@pytest.mark.parametrize(
    ("schema", "labels"),
    [
        pytest.param({"type": "object", "oneOf": [CASH, CARD]}, ["Kind of arguments", "amount"], id="one-of"),
        pytest.param({"type": "object"}, ["Add an entry"], id="open"),
        pytest.param(
            {"type": "object", "patternProperties": {"^x": {"type": "integer"}}}, ["Add an entry"], id="pattern"
        ),
    ],
)
def test_a_tool_that_takes_arguments_has_a_form(
    new_page: Callable[..., Page], schema: dict[str, Any], labels: list[str]
) -> None:
    with one_tool(new_page, schema) as page:
        expect(page.get_by_text("takes no arguments")).to_have_count(0)
        for label in labels:
            control = page.get_by_label(label).or_(page.get_by_role("button", name=label))
            expect(control).to_be_visible()
        given = {"number": "4"} if "oneOf" in schema else {"xa": 1}
        write_json(page, json.dumps(given))
        page.get_by_label("number string" if "oneOf" in schema else re.compile("^xa")).fill("55")
        assert json.loads(sent(page)) == ({"number": "55"} if "oneOf" in schema else {"xa": 55})


def test_a_tool_without_arguments_says_so(new_page: Callable[..., Page]) -> None:
    with one_tool(new_page, {"type": "object", "properties": {}, "additionalProperties": False}) as page:
        expect(page.get_by_text("This tool takes no arguments.")).to_be_visible()
        assert sent(page) == "{}"


def test_limits_and_defaults_of_many_digits_are_shown(new_page: Callable[..., Page]) -> None:
    big = 2**60 + 1
    properties = {
        "either": {"type": ["string", "integer"], "default": big},
        "limited": {"type": "integer", "maximum": big},
        "only": {"anyOf": [{"const": big}, {"type": "string"}]},
    }
    with one_tool(new_page, {"type": "object", "properties": properties}) as page:
        expect(page.get_by_text(f"≤ {big}")).to_be_visible()
        assert json.loads(sent(page)) == {"either": big}


def test_a_refresh_loses_nothing_that_was_typed(new_page: Callable[..., Page]) -> None:
    def asks_for(*names: str) -> FunctionalModule:
        properties = {name: {"type": "string", "default": name.upper()} for name in names}
        return FunctionalModule(echo, input_schema={"type": "object", "properties": properties})

    def refresh() -> None:
        with page.expect_response(re.compile("/tools/t.one$")):
            page.get_by_role("button", name="Refresh").click()

    registry = registry_of({"t.one": asks_for("a", "b"), "t.two": asks_for("c")})
    with serving(registry, explorer=True, allow_execute=True) as url:
        page = opened(new_page(), url, "t.one")
        page.get_by_label("a string").fill("typed")
        expect(run(page)).to_contain_text("typed")
        refresh()
        expect(page.get_by_label("a string")).to_have_value("typed")
        expect(page.get_by_role("region", name="Result")).to_contain_text("typed")
        registry.unregister("t.one")
        registry.register("t.one", asks_for("a", "new"))
        refresh()
        expect(page.get_by_label("new string")).to_be_visible()
        assert arguments(page) == {"a": "typed", "b": "B"}, "what was sent before"
        write_json(page, '{"a": "half')
        registry.unregister("t.one")
        registry.register("t.one", asks_for("a", "newer"))
        refresh()
        expect(page.get_by_label("newer string")).to_be_attached()
        expect(page.get_by_label("Arguments as JSON")).to_have_value('{"a": "half')
        refused(page)
        page.get_by_role("link", name="t.two").click()
        expect(page.get_by_label("c string")).to_have_value("C")
        registry.unregister("t.two")
        registry.register("t.two", asks_for("d"))
        page.get_by_role("button", name="Refresh").click()
        expect(page.get_by_label("d string")).to_have_value("D")
        assert arguments(page) == {"d": "D"}, "nothing was typed, so the new defaults hold"


# ---- Running ----


def test_pictures_sound_and_files_are_shown_as_themselves(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(), url, "shop.files")
    result = run(page)
    picture = result.get_by_role("img")
    expect(picture).to_be_visible()
    assert picture.evaluate("image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])") == [40, 30]
    expect(result.locator("audio")).to_be_visible()
    assert result.locator("audio").evaluate("audio => audio.src").startswith("data:audio/wav")
    with page.expect_download() as download:
        result.get_by_role("link", name=re.compile("^Download")).click()
    assert download.value.path().read_bytes() == b"<b>"
    expect(result).to_contain_text("n: 3")


def test_a_large_result_opens_piece_by_piece(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(), url, "shop.big")
    result = run(page)
    expect(result).to_contain_text("id: 1152921504606846977")
    expect(result.get_by_text("9999: 9999")).to_have_count(0)
    result.get_by_text("9900 … 9999").click()
    expect(result.get_by_text("9999: 9999")).to_be_visible()


def test_a_running_call_shows_and_can_be_cancelled(
    new_page: Callable[..., Page], url: str, parts: dict[str, Any]
) -> None:
    page = opened(new_page(), url, "shop.wait")
    parts["shop.wait"].cancelled.clear()
    result = run(page)
    expect(result).to_contain_text("Running…")
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_disabled()
    page.get_by_role("link", name="shop.look").click()
    expect(run(page)).to_contain_text("{0}")
    page.get_by_role("link", name="shop.wait").click()
    expect(result).to_contain_text("Running…")
    page.keyboard.press("Escape")
    expect(result).to_contain_text("The call was cancelled.")
    assert parts["shop.wait"].cancelled.wait(10)
    expect(page.get_by_role("button", name="Run", exact=True)).to_be_enabled()


def test_what_may_destroy_is_asked_about_first(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(), url, "shop.remove")
    calls: list[str] = []
    page.on("request", lambda request: calls.append(request.url) if request.method == "POST" else None)
    page.get_by_role("button", name="Run", exact=True).click()
    question = page.get_by_role("dialog")
    expect(question).to_contain_text("may destroy data")
    expect(question.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(question).to_be_hidden()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(question).to_be_visible()
    assert not calls
    question.get_by_role("button", name="Run it").click()
    expect(page.get_by_role("region", name="Result")).to_be_visible()
    expect(page.get_by_text("Done")).to_be_visible()
    assert len(calls) == 1


DIRECT_CALL = """() => {
    const headers = { "Content-Type": "application/json" };
    return fetch("tools/shop.look/call", { method: "POST", headers, body: "{}" }).then((response) => response.status);
}"""


def test_without_execution_all_but_running_is_there(new_page: Callable[..., Page]) -> None:
    with serving(registry_of(modules()), explorer=True) as url:
        page = opened(new_page(), url, "shop.order")
        expect(page.get_by_text("Running tools is switched off here.")).to_contain_text("--allow-execute")
        expect(page.get_by_role("button", name="Run", exact=True)).to_have_count(0)
        page.get_by_label("customer").fill("Ann")
        page.keyboard.press("Control+Enter")
        assert arguments(page)["customer"] == "Ann"
        assert page.evaluate(DIRECT_CALL) == 403


AWKWARD = """D'Arcy "$HOME" `id` \\ é"""


@pytest.mark.parametrize("transport", ["streamable-http", "sse"])
def test_the_curl_that_is_copied_runs_in_a_shell(new_page: Callable[..., Page], transport: str) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    with serving(registry_of(modules()), explorer=True, allow_execute=True, transport=transport) as url:
        page = new_page(permissions=["clipboard-read", "clipboard-write"])
        opened(page, url, "shop.order")
        page.get_by_label("customer").fill(AWKWARD)
        page.get_by_label("city").fill("Ulm")
        page.get_by_text("curl", exact=True).click()
        page.get_by_role("button", name="Copy curl").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        copied = page.evaluate("navigator.clipboard.readText()")
        ran = subprocess.run(["sh", "-c", copied], capture_output=True, text=True, timeout=30, check=True)
    answer = json.loads(ran.stdout)
    result = answer["result"]["structuredContent"] if transport == "streamable-http" else answer["result"]
    assert result["given"]["customer"] == AWKWARD


def test_the_curl_carries_the_headers_that_the_schema_asks_for(new_page: Callable[..., Page]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")

    def carried(type_name: str, header: str) -> dict[str, Any]:
        return {"type": type_name, "x-mcp-header": header}

    place = {"type": "object", "properties": {"city": carried("string", "City"), "plain": {"type": "string"}}}
    names = ("Count", "Note", "Empty", "Odd")
    properties = {name.lower(): carried("string", name) for name in names} | {"place": place}
    properties |= {"count": carried("integer", "Count"), "on": carried("boolean", "On")}
    given = {
        "count": 2**60 + 1,
        "on": True,
        "note": "a\nb",
        "empty": "",
        "odd": "=?base64?x?=",
        "place": {"city": "Köln"},
    }
    with one_tool(new_page, {"type": "object", "properties": properties}) as page:
        write_json(page, json.dumps(given))
        page.get_by_text("curl", exact=True).click()
        curl = page.get_by_text("curl -sS").inner_text()
        assert "Mcp-Param-On: true" in curl
        ran = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(ran.stdout)["result"]["structuredContent"] == given


class Bearer(AuthenticationBackend):
    """Knows one caller by a token that no name or description has in it."""

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, SimpleUser] | None:
        return (
            (AuthCredentials(), SimpleUser("ann")) if conn.headers.get("authorization") == f"Bearer {TOKEN}" else None
        )


TOKEN = "s3cret-tok3n"


def test_a_token_goes_with_every_request_and_is_kept_nowhere(new_page: Callable[..., Page]) -> None:
    def who(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"caller": context.identity and context.identity.id}

    middleware = [Middleware(AuthenticationMiddleware, backend=Bearer())]
    options: dict[str, Any] = {"explorer": True, "allow_execute": True, "middleware": middleware}
    with serving(registry_of({"t.who": who}), **options) as url:
        page = opened(new_page(), url, "t.who")
        expect(run(page)).to_contain_text("caller: null")
        field = page.get_by_label("Authorization header")
        field.fill(f"Bearer {TOKEN}")
        carried: list[str | None] = []
        page.on("request", lambda request: carried.append(request.headers.get("authorization")))
        with page.expect_response(f"{url}/explorer/tools"):
            field.press("Enter")
        expect(run(page)).to_contain_text('caller: "ann"')
        page.get_by_role("button", name="Refresh").click()
        expect(page.get_by_role("status").first).to_have_text("1 tool")
        assert len(carried) >= 4
        assert set(carried) == {f"Bearer {TOKEN}"}
        page.get_by_text("curl", exact=True).click()
        curl = page.get_by_text("curl -sS").inner_text()
        assert TOKEN not in page.locator("body").inner_text()
        if shutil.which("curl"):
            environment = {**os.environ, "AUTHORIZATION": f"Bearer {TOKEN}"}
            ran = subprocess.run(["sh", "-c", curl], capture_output=True, timeout=30, check=True, env=environment)
            assert json.loads(ran.stdout)["result"]["structuredContent"] == {"caller": "ann"}
        kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        assert TOKEN not in kept
        page.reload()
        expect(run(page)).to_contain_text("caller: null")
        field.fill("täken\u2603")
        field.press("Enter")
        expect(page.get_by_role("status").first).to_contain_text("Authorization")


def test_a_result_of_several_lines_is_shown_in_lines(new_page: Callable[..., Page]) -> None:
    def answer(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"text": "one\ntwo\n\tthree", "short": 'say "x"'}

    with serving(registry_of({"t.lines": answer}), explorer=True, allow_execute=True) as url:
        page = opened(new_page(), url, "t.lines")
        result = run(page)
        expect(result).to_contain_text('short: "say \\"x\\""')
        assert "one\ntwo\n\tthree" in result.inner_text()
        assert "\\n" not in result.inner_text()


def test_what_the_form_does_not_know_is_shown_as_well(new_page: Callable[..., Page]) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False}
    with one_tool(new_page, {"type": "object", "properties": {"n": {"type": "integer"}, "in": inner}}) as page:
        form = page.get_by_role("form", name="Arguments")
        expect(form.get_by_label("Name")).to_have_count(0)
        write_json(page, '{"n": 1, "other": [2], "in": {"a": "x", "b": 3}}')
        expect(form.get_by_role("textbox", name="other")).to_have_value("[\n  2\n]")
        expect(form.get_by_label("b any")).to_have_value("3")
        form.get_by_label("b any").fill("4")
        form.get_by_role("button", name="Remove other").click()
        assert json.loads(sent(page)) == {"n": 1, "in": {"a": "x", "b": 4}}


def test_choices_that_read_alike_are_told_apart(new_page: Callable[..., Page]) -> None:
    choices = [1, "1", True, "true", "", {"a": 1}]
    properties = {
        "mixed": {"enum": choices},
        "size": {"type": ["string", "integer"], "title": "Size", "description": "How large", "default": 3},
        "none": {"anyOf": [{"type": "null"}]},
    }
    with one_tool(new_page, {"type": "object", "properties": properties}) as page:
        options = page.get_by_label(re.compile("^mixed")).locator("option").all_inner_texts()
        assert options[1:] == ["1", '"1"', "true", '"true"', '""', '{"a":1}']
        assert page.get_by_label("Kind of size").locator("option").all_inner_texts() == ["string", "integer"]
        expect(page.get_by_text("How large", exact=True)).to_have_count(1)
        page.get_by_label("Kind of size").select_option("string")
        assert arguments(page) == {}, "a default belongs to the whole, not to each kind"
        write_json(page, '{"size": 4, "none": null}')
        expect(page.get_by_label("none")).to_be_visible()
        for choice in choices:
            page.get_by_label(re.compile("^mixed")).select_option(json.dumps(choice, separators=(",", ":")))
            assert json.loads(sent(page)) == {"mixed": choice, "size": 4, "none": None}


@pytest.mark.parametrize(
    "schema",
    [
        pytest.param({"properties": {"x": {"type": "integer"}}, "oneOf": [CASH, CARD]}, id="beside"),
        pytest.param({"allOf": [{"properties": {"x": {"type": "integer"}}}, {"anyOf": [CASH, CARD]}]}, id="all-of"),
    ],
)
def test_what_all_kinds_have_stands_in_each(new_page: Callable[..., Page], schema: dict[str, Any]) -> None:
    with one_tool(new_page, {"type": "object", **schema}) as page:
        page.get_by_label("Kind of arguments").select_option("Card")
        page.get_by_label("x integer").fill("1")
        page.get_by_label("number string").fill("4")
        assert json.loads(sent(page)) == {"x": 1, "number": "4"}
        write_json(page, '{"x": 2, "amount": 3}')
        expect(page.get_by_label("Kind of arguments").locator("option:checked")).to_have_text("Cash")
        expect(page.get_by_label("x integer")).to_have_value("2")
        expect(page.get_by_label("amount")).to_have_value("3")


def test_a_tool_that_only_says_which_arguments_must_be_there_begins_with_an_object(
    new_page: Callable[..., Page],
) -> None:
    with one_tool(new_page, {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}) as page:
        assert json.loads(sent(page)) == {}
        page.get_by_role("button", name="Add an entry").click()
        page.get_by_label("Name").fill("a")
        page.get_by_role("textbox", name="value").fill("1")
        assert json.loads(sent(page)) == {"a": 1}


def test_what_is_left_out_is_shown_as_left_out(new_page: Callable[..., Page]) -> None:
    branch = {"type": "object", "properties": {"n": {"type": "integer", "default": 7}}}
    union = {"oneOf": [{"title": "A", **branch}, {"title": "B", **branch}]}
    schema = {"type": "object", "properties": {"pick": union, "list": {"type": "array", "items": {}}}}
    with one_tool(new_page, {**schema, "required": ["pick", "list"]}) as page:
        assert arguments(page) == {"pick": {"n": 7}, "list": []}
        write_json(page, "{}")
        expect(page.get_by_label("n integer")).to_have_value("")
        expect(page.get_by_text("Until this is edited it is left out").locator("visible=true")).to_have_count(2)
        assert json.loads(sent(page)) == {}
        page.get_by_label("n integer").fill("1")
        assert json.loads(sent(page)) == {"pick": {"n": 1}}


def test_an_error_stands_at_its_field_however_that_is_called(new_page: Callable[..., Page]) -> None:
    group = {"type": "object", "description": "Where to", "properties": {"c.d": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"a.b": {**group, "required": ["c.d"]}}, "required": ["a.b"]}
    with one_tool(new_page, schema) as page:
        expect(page.get_by_role("group", name=re.compile("^a.b"))).to_have_accessible_description("Where to")
        expect(run(page)).to_contain_text("Input validation failed:")
        expect(page.get_by_label("c.d")).to_have_attribute("aria-invalid", "true")
        expect(page.get_by_label("c.d")).to_be_focused()


def test_a_secret_of_any_type_is_not_shown(new_page: Callable[..., Page]) -> None:
    pin = {"type": "integer", "x-sensitive": True}
    properties = {"pin": pin, "any": {"x-sensitive": True}, "pins": {"type": "array", "items": pin}}
    with one_tool(new_page, {"type": "object", "properties": properties}) as page:
        page.get_by_role("button", name="Add to pins").click()
        for label in ("pin integer", "any any", "pins 1 integer"):
            control = page.get_by_label(label, exact=False).first
            assert control.evaluate("box => getComputedStyle(box).webkitTextSecurity") == "disc", label


def test_a_question_goes_with_the_tool_that_it_is_about(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(), url, "shop.look")
    page.get_by_role("link", name="shop.remove").click()
    expect(page.get_by_role("heading", level=2, name="shop.remove")).to_be_visible()
    page.get_by_role("button", name="Run", exact=True).click()
    question = page.get_by_role("dialog")
    expect(question).to_be_visible()
    page.go_back()
    expect(page.get_by_role("heading", level=2, name="shop.look")).to_be_visible()
    expect(question).to_be_hidden()
    page.go_forward()
    expect(page.get_by_role("heading", level=2, name="shop.remove")).to_be_visible()
    page.get_by_role("button", name="Run", exact=True).click()
    expect(question).to_be_visible()


def test_closed_groups_are_reached_by_arrows(new_page: Callable[..., Page]) -> None:
    with serving(registry_of(many_modules()), explorer=True) as url:
        page = new_page()
        page.goto(f"{url}/explorer/")
        groups = page.locator("#list summary")
        expect(groups).to_have_count(8)
        page.get_by_label("Search tools").press("ArrowDown")
        expect(groups.nth(0)).to_be_focused()
        page.keyboard.press("ArrowDown")
        page.keyboard.press("Enter")
        expect(groups.nth(1)).to_be_focused()
        page.keyboard.press("ArrowDown")
        expect(page.get_by_role("link", name="crm.act_0")).to_be_focused()
        page.keyboard.press("ArrowUp")
        expect(groups.nth(0)).to_be_focused()
        page.keyboard.press("ArrowUp")
        expect(page.get_by_label("Search tools")).to_be_focused()


def test_what_another_server_in_between_answers_is_told(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(), url, "shop.look")
    page.route(f"{url}/explorer/**", lambda route: route.fulfill(status=401, json={"detail": "a token, please"}))
    expect(run(page)).to_contain_text("a token, please")
    page.get_by_role("button", name="Refresh").click()
    expect(page.get_by_role("navigation").get_by_role("status")).to_contain_text("a token, please")
    page.evaluate("location.hash = 'shop.order'")
    expect(page.get_by_role("alert")).to_contain_text("a token, please")


def test_a_phone_keeps_the_name_of_the_page(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(viewport=PHONE), url, "shop.order")
    expect(page.get_by_role("heading", level=1, name="Tool Explorer")).to_be_visible()
    expect(page.get_by_role("navigation")).to_be_hidden()


def test_every_example_can_be_chosen_by_keyboard(new_page: Callable[..., Page]) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    examples = [ModuleExample(title=f"Number {n}", inputs={"n": n}) for n in (1, 2)]
    with one_tool(new_page, schema, examples=examples) as page:
        chosen = page.get_by_label("Fill in an example")
        chosen.press("ArrowDown")
        chosen.press("ArrowDown")
        assert arguments(page) == {"n": 2}
        expect(chosen.locator("option:checked")).to_have_text("Number 2")
        page.get_by_label("n integer").fill("3")
        expect(chosen.locator("option:checked")).to_have_text("Fill in an example…")


# ---- Every screen and hand ----


def test_from_a_chosen_tool_to_its_form_takes_few_tabs(new_page: Callable[..., Page]) -> None:
    many = {f"many.tool_{number}": FunctionalModule(echo, input_schema=ORDER) for number in range(300)}
    with serving(registry_of(many), explorer=True) as url:
        page = new_page()
        page.goto(f"{url}/explorer/")
        page.get_by_label("Search tools").fill("tool_")
        customer = page.get_by_label("customer")
        for link in ("many.tool_1", "many.tool_1", "many.tool_2"):
            page.get_by_role("link", name=re.compile(rf"^{link}\b")).press("Enter")
            expect(page.get_by_role("heading", level=2, name=link)).to_be_focused()
            for _ in range(6):
                page.keyboard.press("Tab")
                if customer.evaluate("field => field === document.activeElement"):
                    break
            expect(customer).to_be_focused()
        page.reload()
        expect(customer).to_be_visible()
        expect(page.get_by_role("heading", level=2, name="many.tool_2")).to_be_focused()


def test_a_map_of_maps_fits_a_phone(new_page: Callable[..., Page]) -> None:
    inner = {"type": "object", "additionalProperties": {"type": "object", "additionalProperties": {"type": "number"}}}
    schema = {
        "type": "object",
        "properties": {"prices_of_everything": {"type": "object", "additionalProperties": inner}},
    }
    with one_tool(new_page, schema) as page:
        page.set_viewport_size({"width": 390, "height": 844})
        write_json(page, '{"prices_of_everything": {"a": {"b": {"c": 1, "d": 2}}}}')
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        narrowest = "boxes => Math.min(...boxes.filter((box) => box.checkVisibility()).map((box) => box.offsetWidth))"
        assert page.locator("form input:not([type=checkbox])").evaluate_all(narrowest) >= 90


def test_headings_leave_no_level_out(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(), url, "shop.order")
    expect(page.get_by_role("heading", name="How")).to_be_visible()
    levels = (
        page.locator("h1, h2, h3, h4, h5, h6")
        .locator("visible=true")
        .evaluate_all("headings => headings.map((heading) => Number(heading.tagName[1]))")
    )
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels


def test_works_by_keyboard_alone(new_page: Callable[..., Page], url: str) -> None:
    page = new_page()
    page.goto(f"{url}/explorer/")
    expect(page.get_by_role("link", name="shop.order")).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("Search tools")).to_be_focused()
    page.keyboard.type("order")
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("link", name="shop.order")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="shop.order")).to_be_visible()
    customer = page.get_by_label("customer")
    for _ in range(20):
        page.keyboard.press("Tab")
        if customer.evaluate("field => field === document.activeElement"):
            break
    expect(customer).to_be_focused()
    page.keyboard.type("Ann")
    page.get_by_label("city").focus()
    page.keyboard.type("Ulm")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("region", name="Result")).to_contain_text('customer: "Ann"')


def test_a_phone_shows_one_thing_at_a_time(new_page: Callable[..., Page], url: str) -> None:
    page = new_page(viewport=PHONE)
    page.goto(f"{url}/explorer/")
    page.get_by_role("link", name="shop.order").click()
    expect(page.get_by_role("navigation")).to_be_hidden()
    expect(page.get_by_role("heading", name="shop.order")).to_be_focused()
    page.get_by_label("Include pay").check()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], "nothing hangs over the edge"
    page.get_by_role("link", name="All tools").click()
    expect(page.get_by_role("navigation")).to_be_visible()
    expect(page.get_by_role("heading", name="shop.order")).to_be_hidden()


CONTRAST = (PAGES / "contrast.js").read_text()


@pytest.mark.parametrize(("scheme", "paper"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 24, 31)")])
def test_follows_light_and_dark_with_enough_contrast(
    new_page: Callable[..., Page], url: str, scheme: str, paper: str
) -> None:
    page = opened(new_page(color_scheme=scheme), url, "shop.order")
    expect(run(page)).to_contain_text("Input validation failed:")
    background, poor = page.evaluate(CONTRAST)
    assert background == paper
    assert poor == [], "WCAG AA asks for 4.5 : 1"
    page.goto(f"{url}/explorer/#")
    expect(page.get_by_role("heading", name="Connect a client")).to_be_visible()
    assert page.evaluate(CONTRAST)[1] == []


# ---- Hostile modules: nothing that they say is ever interpreted ----

EVIL = """"'><img src=x onerror="window.pwned=1"><script>window.pwned=1</script><svg onload=window.pwned=1>"""
LINK = "[press](javascript:window.pwned=1) <a href='javascript:window.pwned=1'>press</a> `<b>` **<i>**\n\n# " + EVIL


def fail(inputs: dict[str, Any], context: Any) -> Any:
    raise ModuleError(code="EVIL_ERROR", message=EVIL, ai_guidance=EVIL)


def hostile() -> dict[str, Any]:
    either = [{"title": EVIL, "type": "object", "properties": {"a": {"const": EVIL}}}, {"type": "integer"}]
    properties: dict[str, Any] = {
        "choice": {"enum": [EVIL, "b"], "default": EVIL},
        "__proto__": {"type": "string"},
        "either": {"oneOf": either},
    }
    named = {EVIL: {"type": "string", "description": EVIL, "default": EVIL, "title": EVIL, "pattern": EVIL}}
    drawn = f"<svg xmlns='http://www.w3.org/2000/svg' onload='window.pwned=1'>{EVIL}</svg>"
    answer = {EVIL: EVIL, "__proto__": {"pwned": 1}, "picture": base64.b64encode(drawn.encode()).decode()}
    return {
        "evil.talk": FunctionalModule(
            lambda inputs, context: answer,
            input_schema={"type": "object", "properties": properties},
            output_schema={"type": "object", "properties": {"picture": media("image/svg+xml")}},
            description=EVIL,
            documentation=LINK,
            tags=[EVIL],
            version="1.0.0",
            metadata={"display": {"mcp": {"alias": "evil_talk"}}},
            examples=[ModuleExample(title=EVIL, inputs={"choice": "b"})],
        ),
        "evil.schema": FunctionalModule(
            echo,
            input_schema={"type": "object", "title": EVIL, "properties": properties | named},
            description=LINK,
        ),
        "evil.fail": FunctionalModule(fail, input_schema=NOBODY),
    }


def test_nothing_of_a_module_is_interpreted(new_page: Callable[..., Page]) -> None:
    with serving(registry_of(hostile()), explorer=True, allow_execute=True) as url:
        page = new_page()
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.add_init_script("addEventListener('securitypolicyviolation', (e) => { window.violated = e.blockedURI; })")
        page.goto(f"{url}/explorer/")
        links = page.get_by_role("navigation").get_by_role("link")
        expect(links).to_have_count(3)
        for index in range(3):
            links.nth(index).click()
            expect(page.get_by_text("Try it")).to_be_visible()
            for box in page.get_by_role("checkbox").all():
                box.check()
            page.locator("main details").evaluate_all("all => all.forEach((each) => { each.open = true; })")
            run(page)
            expect(page.get_by_text(re.compile(r"^(Done|Failed \(\d+\))$"))).to_be_visible()
            for link in page.get_by_text("press").all():
                link.click()
        assert page.evaluate("[window.pwned, ({}).pwned, window.violated]") == [None, None, None]
        assert page.locator("main script, main iframe, main svg, main a[href^=javascript], img[src=x]").count() == 0
        assert {urlsplit(each).netloc for each in requests if not each.startswith("data:")} == {urlsplit(url).netloc}


def test_the_policy_stops_what_the_page_would_let_through(new_page: Callable[..., Page], url: str) -> None:
    page = opened(new_page(), url, "shop.look")
    page.evaluate(
        """async (evil) => {
            const [box, script] = ["div", "script"].map((tag) => document.createElement(tag));
            script.textContent = "window.pwned = 1";
            document.body.append(box, script);
            box.innerHTML = evil;
            await fetch("http://127.0.0.1:9/").catch(() => 0);
        }""",
        EVIL,
    )
    violations = page.evaluate(
        """() => new Promise((resolve) => {
            addEventListener("securitypolicyviolation", (event) => resolve(event.violatedDirective));
            document.body.append(Object.assign(new Image(), { src: "http://127.0.0.1:9/x.png" }));
        })"""
    )
    assert violations == "img-src"
    assert page.evaluate("window.pwned") is None


# ---- Hostile pages: another origin, and a name that was made to point here ----

ATTACK = (PAGES / "attack.js").read_text()


@contextlib.contextmanager
def hostile_site() -> Iterator[str]:
    """Another origin on the same machine, with one empty page."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<!doctype html><title>hostile</title><body>")

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as site:
        thread = threading.Thread(target=site.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{site.server_port}"
        finally:
            site.shutdown()
            thread.join()


@contextlib.contextmanager
def target() -> Iterator[tuple[str, list[Any]]]:
    """A server whose only module says when it ran."""
    ran: list[Any] = []

    def touch(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        ran.append(inputs)
        return {}

    registry = registry_of({"t.touch": FunctionalModule(touch, description="SECRET")})
    with serving(registry, explorer=True, allow_execute=True) as url:
        yield url, ran


def test_a_page_of_another_origin_can_neither_run_nor_read(new_page: Callable[..., Page]) -> None:
    with target() as (url, ran), hostile_site() as site:
        page = new_page()
        page.goto(site)
        assert page.evaluate(ATTACK, url).replace("null", "") == ""
        own = opened(new_page(), url, "t.touch")  # what came after all of it: nothing of the attack is still on its way
        expect(run(own)).to_contain_text("{0}")
        assert ran == [{}], "only the Explorer's own call"


def test_a_rebound_name_can_neither_run_nor_read(new_page: Callable[..., Page]) -> None:
    with target() as (url, ran):
        rebound = f"http://{REBOUND}:{urlsplit(url).port}"
        page = new_page()
        assert (answer := page.goto(f"{rebound}/explorer/")) is not None
        assert answer.status in (403, 421)
        seen = page.evaluate(ATTACK, rebound)
        assert "SECRET" not in seen
        assert "t.touch" not in seen
        assert "Tool Explorer" not in seen
        own = opened(new_page(), url, "t.touch")
        expect(run(own)).to_contain_text("{0}")
        assert ran == [{}], "only the Explorer's own call"
