"""The Tool Explorer in a real browser: what an author does with it, and what hostile pages and modules cannot do.

One browser, one page and one server stand for the whole file: a test shows the page anew, and its own tool as `t.one`.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import socketserver
import subprocess
import threading
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from apcore import ACL, ACLRule, Executor, ModuleAnnotations, Registry
from apcore.errors import ModuleError
from apcore.module import ModuleExample
from conftest import EXTENSIONS, ROOT, FunctionalModule, echo, registry_of, serving, until
from playwright.sync_api import FrameLocator, Locator, Page, Request, expect, sync_playwright
from starlette.middleware import Middleware
from support import INTEGER, LOGIN, STRING, gives, overlay

from apcore_mcp import discover

pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here"), pytest.mark.once]
REBOUND = "rebound.example"
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync --disable-dev-shm-usage""".split()
expect.set_options(timeout=20_000)
PAGES = Path(__file__).parent / "pages"
WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 360, "height": 740}


def objects(required: str = "", title: str = "", **properties: Any) -> dict[str, Any]:
    """The schema of an object."""
    named = {"title": title} if title else {}
    return {**named, "type": "object", "properties": properties, "required": required.split()}


NUMBER = {"type": "number"}
NOTHING = objects()
CARD = objects("kind number", "Card", kind={"const": "card"}, number=STRING)
INVOICE = objects("kind", "Invoice", kind={"const": "invoice"}, days=INTEGER)
ORDER = objects(
    "customer address",
    customer={"type": "string", "description": "Who pays", "minLength": 2},
    count={"type": "integer", "default": 1, "minimum": 1, "maximum": 9},
    colour={"enum": ["red", "green", "blue"]},
    gift={"type": "boolean"},
    on={"type": "string", "format": "date"},
    note={"anyOf": [STRING, {"type": "null"}], "default": None},
    address=objects("city", city=STRING, zip=STRING),
    lines={"type": "array", "items": objects("sku", sku=STRING)},
    pay={"oneOf": [CARD, INVOICE]},
)


def media(media_type: str) -> dict[str, Any]:
    return {"type": "string", "contentEncoding": "base64", "contentMediaType": media_type}


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
FILES = {"picture": PNG, "sound": "UklGRg==", "page": "PGI+", "n": 2**60 + 1}
FILES |= {"rows": list(range(10_000)), "text": "one\ntwo\n\tthree", "short": 'say "x"'}
SHOWN = objects(picture=media("image/png"), sound=media("audio/wav"), page=media("text/html"), n=INTEGER)
MODULES = {
    "shop.order": FunctionalModule(lambda inputs, context: {"given": inputs}, input_schema=ORDER),
    "shop.remove": FunctionalModule(echo, annotations=ModuleAnnotations(destructive=True, requires_approval=True)),
    "shop.look": FunctionalModule(echo, description="Looks only", annotations=ModuleAnnotations(readonly=True)),
    "shop.files": gives(FILES, output_schema=SHOWN),
}

problems: list[str] = []
asked: list[Request] = []


def posted() -> list[str]:
    return [request.url for request in asked if request.method == "POST"]


@pytest.fixture(scope="module")
def the_page() -> Iterator[Page]:
    with sync_playwright() as playwright:
        arguments = [*FLAGS, f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        context = browser.new_context(permissions=["clipboard-read", "clipboard-write"])
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request))  # playwright marks what it calls
        page.add_init_script("addEventListener('securitypolicyviolation', (e) => { window.violated = e.blockedURI; })")
        yield page
        browser.close()


@pytest.fixture
def page(the_page: Page) -> Iterator[Page]:
    """The page, empty; at the end of the test it may have had no error of its own."""
    the_page.set_viewport_size(WIDE)
    asked.clear()
    problems.clear()
    yield the_page
    the_page.unroute_all()
    the_page.goto("about:blank")
    assert not problems


REGISTRY = registry_of(MODULES)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(REGISTRY, explorer=True, allow_execute=True, approval="off") as base:
        yield base


Show = Callable[..., Page]


@pytest.fixture
def show(page: Page, url: str) -> Iterator[Show]:
    """Shows the tool `t.one`, which takes the given schema and answers with its arguments."""

    def shown(schema: dict[str, Any], execute: Any = echo, **attributes: Any) -> Page:
        REGISTRY.register("t.one", FunctionalModule(execute, input_schema=schema, **attributes))
        opened(page, url, "t.one")
        return page

    yield shown
    REGISTRY.unregister("t.one")


def opened(page: Page, url: str, name: str) -> None:
    page.goto(f"{url}/explorer/#{name}")
    expect(page.get_by_role("heading", level=2, name=name)).to_be_visible()


def run(page: Page) -> Locator:
    """Presses Run; the section with what came of it."""
    page.get_by_role("button", name="Run", exact=True).click()
    return page.get_by_role("region", name="Result")


def arguments(page: Page) -> Any:
    """What the JSON view holds."""
    return json.loads(page.get_by_label("Arguments as JSON").input_value())


def write_json(page: Page, value: Any) -> None:
    """Types `value`, if it is no text its JSON, into the JSON view and asks for the form again."""
    text = value if isinstance(value, str) else json.dumps(value)
    page.get_by_role("button", name="JSON", exact=True).click()
    page.get_by_label("Arguments as JSON").fill(text)
    page.get_by_role("button", name="Form", exact=True).click()


def sent(page: Page) -> Any:
    """Presses Run; the arguments of the call, with every digit, once it is answered."""
    with page.expect_response(lambda response: response.request.method == "POST") as response:
        run(page)
    return json.loads(response.value.request.post_data or "", parse_float=Decimal)


def edit(page: Page, name: str, value: str) -> None:
    """Fills in what stands in the form under a name that begins so: a text, a choice, a box to check or a button."""
    form = page.get_by_role("form", name="Arguments")
    if name.startswith(("Add", "Remove")):
        form.get_by_role("button", name=name, exact=True).click()
        return
    control = form.get_by_label(re.compile(f"^{re.escape(name)}")).first
    kind = control.evaluate("each => each.type")
    if kind == "checkbox":
        control.check()
    elif kind == "select-one":
        control.select_option(value)
    else:
        control.fill(value)


def refused(page: Page) -> Locator:
    """Presses Run, which must send nothing; the sentence beside it."""
    before = posted()
    run(page)
    sentence = page.get_by_role("main").get_by_role("status")
    expect(sentence).to_contain_text("Not run")
    assert posted() == before
    return sentence


def counted() -> tuple[list[Any], Callable[..., Any]]:
    """The runs of a module, and what it does: nothing."""
    runs: list[Any] = []
    return runs, lambda inputs, context: runs.append(inputs)


def refresh(page: Page) -> None:
    """Presses Refresh, and waits until what is shown has been asked for again."""
    with page.expect_response(re.compile("/tools/t.one$")):
        page.get_by_role("button", name="Refresh").click()


def replace(page: Page, execute: Any = echo, **attributes: Any) -> None:
    """Puts another module in the place of the tool `t.one`, and presses Refresh."""
    REGISTRY.unregister("t.one")
    REGISTRY.register("t.one", FunctionalModule(execute, **attributes))
    refresh(page)


# ---- The list ----


def test_lists_searches_and_links_to_every_tool(page: Page, url: str) -> None:
    page.goto(f"{url}/explorer/")
    tools = page.get_by_role("navigation", name="Tools")
    expect(tools.get_by_role("link")).to_have_count(4)
    expect(tools.get_by_role("status")).to_have_text("4 tools")
    for name, badge in (("remove", "destructive"), ("remove", "needs approval"), ("look", "read-only")):
        expect(tools.get_by_role("link", name=f"shop.{name}")).to_contain_text(badge)
    page.get_by_label("Search tools").fill("looks ONLY")
    expect(tools.get_by_role("status")).to_have_text("1 of 4 tools")
    tools.get_by_role("link").click()
    expect(page).to_have_url(re.compile(r"#shop\.look$"))
    expect(page).to_have_title(re.compile("^shop.look .+ Tool Explorer$"))


def test_greets_with_what_the_server_is_and_runs_nothing_unless_allowed(page: Page) -> None:
    options = {"name": "House", "version": "2.1", "instructions": f"Knock.{EVIL}", "explorer_prefix": "/a/b"}
    modules = {**MODULES, "shop.page": FunctionalModule(echo, metadata=overlay(page=APP))}
    with serving(registry_of(modules), explorer=True, **options) as url:
        page.set_viewport_size(PHONE)
        page.goto(f"{url}/a/b/")
        greeting = page.get_by_role("main")
        expect(greeting.get_by_role("heading", level=2)).to_have_text("House")
        expect(greeting).to_contain_text("version 2.1 · 5 tools · streamable HTTP")
        expect(greeting.get_by_text(f"{url}/mcp", exact=True)).to_be_visible()
        greeting.get_by_text("As JSON").click()
        entry = {"mcpServers": {"House": {"type": "http", "url": f"{url}/mcp"}}}
        assert json.loads(greeting.locator("pre").first.inner_text()) == entry
        greeting.get_by_text("What an agent is told").click()
        expect(greeting).to_contain_text("Knock." + EVIL)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.set_viewport_size(WIDE)
        for name in ("shop.page", "shop.order"):
            page.get_by_role("link", name=name).click()
            expect(page.get_by_role("heading", level=2, name=name)).to_be_visible()
            expect(page.get_by_text("Running tools is switched off here.")).to_contain_text("--allow-execute")
            expect(page.get_by_role("button", name="Run", exact=True)).to_have_count(0)
            expect(page.locator("iframe")).to_have_count(0)
        page.get_by_label("customer").fill("Ann")
        page.keyboard.press("Control+Enter")
        assert arguments(page)["customer"] == "Ann"
        assert posted() == []


def test_says_what_is_not_there(page: Page) -> None:
    """Tools, for this caller or at all, and the server itself."""
    nobody = Executor(registry_of({"door.open": echo}), acl=ACL([], default_effect="deny"))
    with serving(nobody, explorer=True) as url:
        page.goto(f"{url}/explorer/")
        expect(page.get_by_role("main")).to_contain_text("It offers you no tools: what its ACL lets you call depends")
    registry = registry_of()
    with serving(registry, explorer=True, transport="sse") as url:
        page.goto(f"{url}/explorer/")
        expect(page.get_by_role("main")).to_contain_text("0 tools · SSE (deprecated)")
        expect(page.get_by_role("main")).to_contain_text("It lists no tools. Register modules")
        expect(page.get_by_text(f"{url}/sse", exact=True)).to_be_visible()
        for name in ("not.there", ".."):
            page.evaluate("name => { location.hash = name; }", name)
            expect(page.get_by_role("alert")).to_have_text(f"Tool '{name}' not found")
        page.go_back()
        registry.register("not.there", FunctionalModule(echo))
        page.get_by_role("button", name="Refresh").click()
        expect(page.get_by_role("heading", name="not.there")).to_be_visible()
    page.get_by_role("link", name="not.there").click()
    expect(page.get_by_role("alert")).to_contain_text("The server cannot be reached")
    page.get_by_role("button", name="Refresh").click()
    expect(page.get_by_text("The tools cannot be loaded. The server cannot be reached")).to_be_visible()


@pytest.fixture(scope="module")
def many() -> Iterator[str]:
    """The page of eighty tools in eight groups; their titles are in another order than their ids."""
    modules = {}
    for number in range(80):
        group, act = "billing crm files mail orders reports search users".split()[number % 8], number // 8
        described = {"tags": ["write" if act % 2 else "read"], "name": f"Work {(7 * act) % 10}"}
        modules[f"{group}.act_{act}"] = FunctionalModule(echo, **described)
    with serving(registry_of(modules), explorer=True) as url:
        yield f"{url}/explorer/"


def test_many_tools_stand_in_groups_that_can_be_closed_and_filtered(page: Page, many: str) -> None:
    page.goto(many)
    tools, search = page.get_by_role("navigation", name="Tools"), page.get_by_label("Search tools")
    links, groups = tools.get_by_role("link"), tools.locator("details:has(a) > summary")
    expect(groups).to_have_count(8)
    labels = [label.split()[0] for label in groups.all_inner_texts()]
    assert labels == sorted(labels)
    search.press("ArrowDown")
    expect(groups.nth(0)).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    assert links.locator("strong").all_inner_texts() == [f"Work {n}" for n in range(10)]
    page.keyboard.press("ArrowDown")
    expect(page.get_by_role("link", name="crm.act_0")).to_be_focused()
    groups.filter(has_text="crm").click()
    for query, found in (("", 0), ("act_3", 8), ("", 0)):
        search.fill(query)
        expect(links).to_have_count(found)
    page.get_by_label("Tag").select_option("read")
    expect(tools.get_by_role("status")).to_have_text("40 of 80 tools")
    search.fill("mail")
    expect(links).to_have_count(5)
    page.get_by_role("button", name="Refresh").click()
    expect(tools.get_by_role("status")).to_have_text("5 of 80 tools")


# ---- The form ----


def test_json_that_is_none_stays_in_sight_until_it_is(page: Page, url: str) -> None:
    opened(page, url, "shop.order")
    box = page.get_by_label("Arguments as JSON")
    for text, told in (('{"customer": "Bo"', "no JSON.+position 17"), ("[1]", "an object"), ("", "an object")):
        write_json(page, text)
        expect(box).to_have_value(text)
        expect(box).to_have_accessible_description(re.compile(told))
    refused(page)
    expect(box).to_be_focused()
    write_json(page, {"customer": "Bo", "address": {"city": "Ulm"}})
    expect(box).to_be_hidden()


def test_half_written_json_is_never_run_nor_a_secret_of_any_type_shown(show: Show) -> None:
    pin, key, secret = ({**kind, "x-sensitive": True} for kind in (INTEGER, STRING, {"description": "Any value"}))
    page = show(objects(pin=pin, key=key, any=secret, pins={"type": "array", "items": pin}))
    page.get_by_role("button", name="Add to pins").click()
    for label in ("pin integer", "key string", "any any", "pins 1 integer"):
        control = page.get_by_label(label, exact=False).first
        assert control.evaluate("box => getComputedStyle(box).webkitTextSecurity") == "disc", label
    page.get_by_role("button", name="Remove pins 1").click()
    page.get_by_label("any any").fill("hunter2")
    page.get_by_role("button", name="JSON", exact=True).click()
    refused(page)
    expect(page.get_by_label("any any")).to_be_focused()
    expect(page.get_by_label("any any")).to_have_accessible_description(re.compile("Any value .+no JSON"))
    assert "hunter2" not in page.locator("body").inner_text()
    page.get_by_text("curl", exact=True).click()
    expect(page.get_by_text("curl -sS")).to_have_count(0)
    page.get_by_label("any any").fill('{"a": 1}')
    assert sent(page)["any"] == {"a": 1}
    expect(page.get_by_text("curl -sS")).to_be_visible()


def test_errors_stand_at_their_fields_however_these_are_called(show: Show) -> None:
    group = {**objects("c.d", **{"c.d": INTEGER}), "description": "Where to"}
    page = show(objects("customer a.b", customer=STRING, count=INTEGER, city=STRING, **{"a.b": group}))
    customer, count, dotted = (page.get_by_label(label) for label in ("customer", "count", "c.d"))
    expect(page.get_by_role("group", name=re.compile("^a.b"))).to_have_accessible_description("Where to")
    count.fill("ten")
    expect(run(page)).to_contain_text("Input validation failed:")
    expect(count).to_have_accessible_description(re.compile("integer"))
    for field in (customer, count, dotted):
        expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("city")).not_to_have_attribute("aria-invalid", "true")
    expect(customer).to_be_focused()
    count.fill("2")
    expect(count).not_to_have_attribute("aria-invalid", "true")
    customer.fill("Ann")
    dotted.fill("4")
    expect(run(page)).to_contain_text("count: 2")
    expect(page.locator("[aria-invalid=true]")).to_have_count(0)


def test_examples_fill_the_form_as_they_are_and_every_text_keeps_its_lines(show: Show) -> None:
    lines = "SELECT 1 -- one\nFROM t\n"
    given = {"query": lines, "key": lines, "note": "a\r\nb", "steps": [lines, "b"], "names": {"a": lines, "": "c"}}
    schema = objects(
        "query",
        query={**STRING, "title": "SQL"},
        key={**STRING, "x-sensitive": True},
        note={"anyOf": [{**STRING, "format": "uri"}, {"type": "null"}]},
        steps={"type": "array", "items": STRING},
        names={"type": "object", "additionalProperties": STRING},
        limit=INTEGER,
    )
    examples = [ModuleExample(title=title, inputs=given) for title in ("Few", "Lines")]
    page = show(schema, examples=examples, documentation="# How\n\nWith **care** and `sku`.")
    expect(page.get_by_role("heading", name="How")).to_be_visible()
    expect(page.get_by_text("care", exact=True)).to_be_visible()
    page.get_by_text("Input schema").click()
    expect(page.get_by_text('"title": "SQL"')).to_be_visible()
    chosen = page.get_by_label("Fill in an example")
    chosen.press("ArrowDown")
    chosen.press("ArrowDown")
    expect(chosen.locator("option:checked")).to_have_text("Lines")
    assert sent(page) == {**given, "key": "***REDACTED***"}  # of which no example is told
    page.get_by_label("limit").fill("3")
    expect(chosen.locator("option:checked")).to_have_text("Fill in an example…")
    for label in ("query", "key", "note"):
        page.get_by_label(re.compile(f"^{label} ")).fill("x\ny")
    page.get_by_role("textbox", name="steps 2").fill("s\nt")
    page.get_by_label("query").press("Enter")
    changed = {"query": "x\ny\n", "key": "x\ny", "note": "x\ny", "steps": [lines, "s\nt"], "limit": 3}
    assert sent(page) == {**given, **changed}


NULL = {"type": "null"}
SEVEN = {"type": "object", "properties": {"n": {"type": "integer", "default": 7}}}
PAYMENTS = [objects(kind={"const": "card"}, number=STRING), objects(iban=STRING, bic=STRING), STRING, {"const": 5}]
PAYMENTS += [objects(**dict.fromkeys("abcd", STRING)), {"type": "object"}]
CASH, CHEQUE = objects("amount", "Cash", amount=INTEGER), objects("number", "Cheque", number=STRING)


def form(schema: Any, *, begins: Any = None, given: Any = None, shows: Any = (), edits: Any = None, sends: Any) -> Any:
    """What the form begins with; what it is given as JSON, and shows of it; what is edited, and what is sent then."""
    return schema, begins or {}, given or {}, shows, edits or {}, sends


FORMS = {
    "a form begins with defaults and what must be there": form(
        ORDER,
        begins={"count": 1, "address": {}},
        edits={"customer": "Ann", "count": "3", "colour": "green", "gift": "false", "on string": "2026-02-28",
               "city": "Ulm", "Add to lines": "", "sku": "A", "Include pay": "", "Kind of pay": "Invoice", "days": "3"},
        sends={"customer": "Ann", "count": 3, "colour": "green", "gift": False, "on": "2026-02-28",
               "address": {"city": "Ulm"}, "lines": [{"sku": "A"}], "pay": {"kind": "invoice", "days": 3}},
    ),
    "what the form does not know is kept": form(
        ORDER,
        begins={"count": 1, "address": {}},
        given={"customer": "Bo", "note": None, "address": {"city": "Bonn", "floor": 3}, "extra": 2**60 + 1,
               "lines": [{"sku": "B"}, {"sku": "C"}], "pay": {"kind": "card", "number": "4"}},
        edits={"zip": "53111", "Remove lines 1": ""},
        sends={"customer": "Bo", "note": None, "address": {"city": "Bonn", "zip": "53111", "floor": 3},
               "extra": 2**60 + 1, "lines": [{"sku": "C"}], "pay": {"kind": "card", "number": "4"}},
    ),
    "a null stays null until somebody edits it": form(
        objects(
            "must object either",
            must={"anyOf": [{"type": "array", "items": INTEGER}, NULL]},
            object={"anyOf": [SEVEN, NULL]},
            either={"oneOf": [{"const": "x"}, INTEGER, NULL]},
            number={"anyOf": [NUMBER, NULL], "default": 1},
        ),
        begins={"must": [], "object": {"n": 7}, "either": "x", "number": 1},
        given=dict.fromkeys(("must", "object", "either", "number")),
        shows=["null"] * 4,
        edits={"Add to must": "", "must 1": "5", "number": "2"},
        sends={"must": [5], "object": None, "either": None, "number": 2},
    ),
    "what a field cannot show is told": form(
        objects(day={"type": "string", "format": "date"}, colour={"enum": ["red", "green"]}, flag={"type": "boolean"},
                sizes={"type": "array", "items": INTEGER}, kind={"oneOf": [INTEGER, {"type": "boolean"}]}),
        given={"day": "31.01.2025", "colour": "mauve", "flag": "yes", "sizes": "all", "kind": ["k"]},
        shows=['"31.01.2025"', '"mauve"', '"yes"', '"all"', '["k"]'],
        edits={"day": "2025-01-31"},
        sends={"day": "2025-01-31", "colour": "mauve", "flag": "yes", "sizes": "all", "kind": ["k"]},
    ),
    "what has no title is called by what tells it from the others": form(
        objects(pay={"oneOf": PAYMENTS}),
        shows=["card or object of iban, bic or string or 5 or object of a, b, c, … or object"],
        edits={"Include pay": "", "Kind of pay": "object of iban, bic", "iban string": "DE02"},
        sends={"pay": {"iban": "DE02"}},
    ),
    "what is left out is told and what the form does not know can be edited": form(
        objects("pick list", pick={"oneOf": [{"title": "A", **SEVEN}, {"title": "B", **SEVEN}]},
                list={"type": "array", "items": {}}, inner={**objects(a=STRING), "additionalProperties": False}),
        begins={"pick": {"n": 7}, "list": []},
        given={"other": [2], "inner": {"a": "x", "b": 3}},
        shows=["Until this is edited it is left out"] * 2,
        edits={"b any": "4", "Remove other": "", "n integer": "1"},
        sends={"inner": {"a": "x", "b": 4}, "pick": {"n": 1}},
    ),
    "every entry of a map is data and every digit is kept": form(
        objects(map={"type": "object", "additionalProperties": INTEGER}, n={**NUMBER, "maximum": 2**60 + 1}, m=NUMBER),
        given={"map": {"": 1, "__proto__": 2, "constructor": 3, "toString": 4}},
        shows=[f"≤ {2**60 + 1}"],
        edits={"constructor": "5", "n number": "1e400", "m number": "0.12345678901234567890"},
        sends={"map": {"": 1, "__proto__": 2, "constructor": 5, "toString": 4}, "n": Decimal("1e400"),
               "m": Decimal("0.12345678901234567890")},
    ),
    "what all kinds have stands in each": form(
        {"type": "object", "allOf": [{"properties": {"x": INTEGER}}, {"anyOf": [CASH, CHEQUE]}]},
        given={"x": 2, "amount": 3},
        edits={"Kind of arguments": "Cheque", "x integer": "1", "number string": "4"},
        sends={"x": 1, "number": "4"},
    ),
    "any": form({"type": "object"}, given={"a": 55}, shows=["It can be given some as JSON."], sends={"a": 55}),
    "none": form({**NOTHING, "additionalProperties": False}, shows=["This tool takes no arguments."], sends={}),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_arguments_are_shown_and_sent_as_they_are_until_edited(show: Show, name: str) -> None:
    schema, begins, given, shows, edits, sends = FORMS[name]
    page = show(schema)
    assert arguments(page) == begins
    write_json(page, given)
    for text in shows:
        shown = page.get_by_role("form", name="Arguments").get_by_text(re.compile(re.escape(text)))
        expect(shown.locator("visible=true")).to_have_count(shows.count(text))
    assert sent(page) == given
    for field, value in edits.items():
        edit(page, field, value)
    assert sent(page) == sends


def test_a_name_in_a_map_is_there_and_there_once(show: Show) -> None:
    page = show(objects(map={"type": "object", "additionalProperties": INTEGER}))
    write_json(page, {"map": {"constructor": 5}})
    page.get_by_role("button", name="Add an entry").click()
    expect(refused(page)).to_contain_text("empty")
    page.get_by_label("Name").last.fill("constructor")
    page.get_by_label("value", exact=False).last.fill("6")
    expect(refused(page)).to_contain_text("constructor")


def test_a_refresh_loses_nothing_that_was_typed(show: Show) -> None:
    def asks_for(*names: str) -> dict[str, Any]:
        return objects(**{name: {"type": "string", "default": name.upper()} for name in names})

    def asks_now_for(*names: str) -> None:
        replace(page, input_schema=asks_for(*names))
        expect(page.get_by_label(f"{names[-1]} string")).to_be_attached()

    page = show(asks_for("c"))
    asks_now_for("a", "b")
    assert arguments(page) == {"a": "A", "b": "B"}, "nothing was typed, so the new defaults hold"
    page.get_by_label("a string").fill("typed")
    expect(run(page)).to_contain_text("typed")
    refresh(page)
    expect(page.get_by_label("a string")).to_have_value("typed")
    expect(page.get_by_role("region", name="Result")).to_contain_text("typed")
    asks_now_for("a", "new")
    assert arguments(page) == {"a": "typed", "b": "B"}, "what was sent before"
    write_json(page, '{"a": "half')
    asks_now_for("a", "newer")
    expect(page.get_by_label("Arguments as JSON")).to_have_value('{"a": "half')
    refused(page)


# ---- Running ----


def test_results_are_shown_as_what_they_are_and_large_ones_piece_by_piece(page: Page, url: str) -> None:
    opened(page, url, "shop.files")
    result = run(page)
    picture = result.get_by_role("img")
    assert picture.evaluate("image => image.decode().then(() => image.naturalWidth)") == 1
    assert result.locator("audio").evaluate("audio => audio.src").startswith("data:audio/wav")
    link = result.get_by_role("link", name=re.compile("^Download"))
    with page.expect_download() as download:
        link.click()
    assert download.value.path().read_bytes() == b"<b>"
    with page.expect_download():  # opened, too: a page among the files would run as this one
        link.evaluate("link => { location.href = link.href; }")
    expect(result).to_contain_text("n: 1152921504606846977")
    expect(result).to_contain_text('short: "say \\"x\\""')
    assert "one\ntwo\n\tthree" in result.inner_text()
    expect(result.get_by_text("9999: 9999")).to_have_count(0)
    result.get_by_text("9900 … 9999").click()
    expect(result.get_by_text("9999: 9999")).to_be_visible()


def test_a_running_call_shows_and_can_be_given_up(show: Show) -> None:
    end = threading.Event()

    def wait(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"ended": end.wait(30)}

    page = show(NOTHING, wait)
    result, button = run(page), page.get_by_role("button", name="Run", exact=True)
    expect(result).to_contain_text("Running…")
    expect(button).to_be_disabled()
    page.keyboard.press("Escape")
    expect(result).to_contain_text("The call was cancelled. What the tool has begun may go on to its end.")
    expect(run(page)).to_contain_text("Running…")
    replace(page, wait, description="Another")
    expect(result).to_contain_text("Running…")
    page.get_by_role("button", name="Cancel").click()
    expect(result).to_contain_text("The call was cancelled.")
    end.set()
    expect(run(page)).to_contain_text("ended: true")


def test_what_may_destroy_is_asked_about_first(page: Page, url: str) -> None:
    opened(page, url, "shop.look")
    opened(page, url, "shop.remove")
    button, question = page.get_by_role("button", name="Run", exact=True), page.get_by_role("dialog")
    button.click()
    expect(question).to_contain_text("may destroy data")
    expect(question.get_by_role("button", name="Cancel")).to_be_focused()
    page.keyboard.press("Escape")
    expect(question).to_be_hidden()
    button.click()
    page.go_back()
    expect(page.get_by_role("heading", level=2, name="shop.look")).to_be_visible()
    expect(question).to_be_hidden()
    page.go_forward()
    expect(page.get_by_role("heading", level=2, name="shop.remove")).to_be_visible()
    button.click()
    assert posted() == []
    question.get_by_role("button", name="Run it").click()
    expect(page.get_by_text("Done")).to_be_visible()
    assert len(posted()) == 1


AWKWARD = """D'Arcy "$HOME" `id` \\ é"""


def in_a_shell(command: str, **environment: str) -> Any:
    """What a shell's curl is answered."""
    if shutil.which("curl") is None:
        pytest.skip("there is no curl here")
    said = subprocess.check_output(["sh", "-c", command], timeout=30, env={**os.environ, **environment})
    answer = json.loads(said)["result"]
    return answer.get("structuredContent", answer)


def test_the_curl_that_is_copied_runs_in_a_shell(page: Page) -> None:
    with serving(registry_of(MODULES), explorer=True, allow_execute=True, transport="sse") as url:
        opened(page, url, "shop.order")
        page.get_by_label("customer").fill(AWKWARD)
        page.get_by_label("city").fill("Ulm")
        page.get_by_text("curl", exact=True).click()
        page.context.grant_permissions(["clipboard-read", "clipboard-write"], origin=url)
        page.get_by_role("button", name="Copy curl").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert in_a_shell(page.evaluate("navigator.clipboard.readText()"))["given"]["customer"] == AWKWARD


def test_the_curl_carries_the_headers_that_the_schema_asks_for(show: Show) -> None:
    kinds = {**dict.fromkeys(("city", "note", "empty", "odd"), "string"), "count": "integer", "on": "boolean"}
    carried = {name: {"type": kind, "x-mcp-header": name.title()} for name, kind in kinds.items()}
    page = show(objects(place=objects(city=carried.pop("city"), plain=STRING), **carried))
    given = {"count": 2**60 + 1, "on": True, "place": {"city": "Köln", "plain": AWKWARD}}
    given |= {"note": "a\nb", "empty": "", "odd": "=?base64?x?="}
    write_json(page, given)
    page.get_by_text("curl", exact=True).click()
    curl = page.get_by_text("curl -sS").inner_text()
    assert "Mcp-Param-On: true" in curl
    assert in_a_shell(curl) == given


TOKEN = "s3cret-tok3n"


def test_a_token_goes_with_every_request_and_is_kept_nowhere(page: Page) -> None:
    def know(inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {"known": context.identity is not None}

    with serving(registry_of({"t.know": know}), explorer=True, allow_execute=True, middleware=LOGIN) as url:
        opened(page, url, "t.know")
        expect(run(page)).to_contain_text("known: false")
        field = page.get_by_label("Authorization header")
        field.fill(f"Bearer {TOKEN}")
        asked.clear()
        with page.expect_response(f"{url}/explorer/tools"):
            field.press("Enter")
        expect(run(page)).to_contain_text("known: true")
        with page.expect_response(f"{url}/explorer/tools"):
            page.get_by_role("button", name="Refresh").click()
        assert len(asked) >= 4
        assert {request.headers.get("authorization") for request in asked} == {f"Bearer {TOKEN}"}
        page.get_by_text("curl", exact=True).click()
        curl = page.get_by_text("curl -sS").inner_text()
        assert TOKEN not in page.locator("body").inner_text()
        assert in_a_shell(curl, AUTHORIZATION=f"Bearer {TOKEN}") == {"known": True}
        kept = page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        assert TOKEN not in kept
        page.reload()
        expect(run(page)).to_contain_text("known: false")
        page.route("**/call", lambda route: route.fulfill(status=401, json={"detail": "a token, please"}))
        expect(run(page)).to_contain_text("a token, please")
        field.fill("täken\u2603")
        field.press("Enter")
        expect(page.get_by_role("status").first).to_contain_text("Authorization")


# ---- Every screen and hand ----


def test_works_by_keyboard_alone_in_few_steps(page: Page, url: str) -> None:
    page.goto(f"{url}/explorer/")
    link, title = page.get_by_role("link", name="shop.order"), page.get_by_role("heading", name="shop.order")
    expect(link).to_be_visible()
    page.keyboard.press("/")
    expect(page.get_by_label("Search tools")).to_be_focused()
    page.keyboard.type("order")
    page.keyboard.press("ArrowDown")
    expect(link).to_be_focused()
    for _ in range(2):  # also when its tool is shown already
        link.press("Enter")
        expect(title).to_be_focused()
    for _ in range(6):
        if not page.get_by_label("customer").evaluate("field => field === document.activeElement"):
            page.keyboard.press("Tab")
    page.keyboard.type("Ann")
    page.get_by_label("city").focus()
    page.keyboard.type("Ulm")
    page.keyboard.press("Control+Enter")
    expect(page.get_by_role("region", name="Result")).to_contain_text('customer: "Ann"')
    page.reload()
    expect(title).to_be_focused()


def test_a_phone_shows_one_thing_at_a_time(page: Page, url: str) -> None:
    page.set_viewport_size(PHONE)
    page.goto(f"{url}/explorer/")
    page.get_by_role("link", name="shop.order").click()
    expect(page.get_by_role("heading", level=1, name="Tool Explorer")).to_be_visible()
    expect(page.get_by_role("navigation")).to_be_hidden()
    expect(page.get_by_role("heading", name="shop.order")).to_be_focused()
    page.get_by_label("Include pay").check()
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], "nothing hangs over the edge"
    page.get_by_role("link", name="All tools").click()
    expect(page.get_by_role("navigation")).to_be_visible()
    expect(page.get_by_role("heading", name="shop.order")).to_be_hidden()


def test_follows_light_and_dark_with_enough_contrast(page: Page, url: str) -> None:
    contrast = (PAGES / "contrast.js").read_text()
    opened(page, url, "shop.order")
    expect(run(page)).to_contain_text("Input validation failed:")
    for heading in ("Try it", "Connect a client"):
        expect(page.get_by_role("heading", name=heading)).to_be_visible()
        page.emulate_media(color_scheme="dark")
        assert page.evaluate(contrast) == ["rgb(20, 24, 31)", []], "WCAG AA asks for 4.5 : 1"
        page.emulate_media(color_scheme="light")
        assert page.evaluate(contrast) == ["rgb(255, 255, 255)", []]
        page.goto(f"{url}/explorer/#")


# ---- Hostile modules: nothing that they say is ever interpreted ----

EVIL = """"'><img src=x onerror="window.pwned=1"><script>window.pwned=1</script><svg onload=window.pwned=1>"""
LINK = "[press](javascript:window.pwned=1) <a href='javascript:window.pwned=1'>press</a> `<b>` **<i>**\n\n# " + EVIL


def fail(*_: Any) -> Any:
    raise ModuleError(code="EVIL_ERROR", message=EVIL, ai_guidance=EVIL)


HOSTILE = objects(
    "",
    EVIL,
    choice={"enum": [EVIL, "b"], "default": EVIL},
    either={"oneOf": [objects("", EVIL, a={"const": EVIL}), INTEGER]},
    on={"type": "string", "format": "date", "default": EVIL},  # which its field cannot show, and what is said of it can
    __proto__=STRING,
    **{EVIL: {"type": "string", "description": EVIL, "default": EVIL, "title": EVIL, "pattern": EVIL}},
)
DRAWN = f"<svg xmlns='http://www.w3.org/2000/svg' onload='window.pwned=1'>{EVIL}</svg>"
TALK = gives(
    {EVIL: EVIL, "__proto__": {"pwned": 1}, "picture": base64.b64encode(DRAWN.encode()).decode()},
    input_schema=HOSTILE,
    output_schema=objects(picture=media("image/svg+xml")),
    description=LINK,
    documentation=LINK,
    tags=[EVIL],
    metadata=overlay(alias="evil_talk"),
    examples=[ModuleExample(title=EVIL, inputs={"choice": "b"})],
)


def test_nothing_of_a_module_is_interpreted(page: Page) -> None:
    hostile = {"evil.talk": TALK, "evil.fail": FunctionalModule(fail, input_schema=NOTHING)}
    with serving(registry_of(hostile), explorer=True, allow_execute=True) as url:
        page.goto(f"{url}/explorer/")
        for name, told in (("evil.fail", "Failed (500)"), ("evil_talk", "Done")):
            page.get_by_role("link", name=name).click()
            expect(page.get_by_role("main").get_by_text(f"{name} · version")).to_be_visible()
            for box in page.get_by_role("checkbox").all():
                box.check()
            page.locator("main details").evaluate_all("all => all.forEach((each) => { each.open = true; })")
            run(page)
            expect(page.get_by_text(told, exact=True)).to_be_visible()
            for link in page.get_by_text("press").all():
                link.click()
        assert page.evaluate("[window.pwned, ({}).pwned, window.violated]") == [None, None, None]
        assert page.locator("main script, main iframe, main svg, main a[href^=javascript], img[src=x]").count() == 0
        requested = {urlsplit(each.url).netloc for each in asked if not each.url.startswith("data:")}
        assert requested == {urlsplit(url).netloc}


def test_the_policy_stops_what_the_page_would_let_through(page: Page, url: str) -> None:
    opened(page, url, "shop.look")
    page.evaluate("evil => { document.body.insertAdjacentHTML('beforeend', evil); }", EVIL)
    script = "Object.assign(document.createElement('script'), { textContent: 'window.pwned = 1' })"
    page.evaluate(f"document.body.append({script})")
    for sends in ("fetch('http://127.0.0.1:9/0').catch(() => 0)", "new Image().src = 'http://127.0.0.1:9/1'"):
        page.evaluate(sends)
        page.wait_for_function("end => window.violated?.endsWith(end)", arg=f":9/{int('Image' in sends)}")
    assert page.evaluate("window.pwned") is None


# ---- Hostile pages: another origin, and a name that was made to point here ----


def attack(page: Page, url: str) -> str:
    """What a page is told that tries to read and run everything at `url`."""
    seen: str = page.evaluate((PAGES / "attack.js").read_text(), url)
    assert not [word for word in ("SECRET", "t.one", "Tool Explorer") if word in seen]
    return seen


def test_a_page_of_another_origin_can_run_and_read_nothing(show: Show, url: str, many: str) -> None:
    runs, touch = counted()
    page = show(NOTHING, touch, description="SECRET")
    page.goto(urljoin(many, "/health"))  # a page without a policy of its own, on another port
    assert attack(page, url).replace("null", "") == ""
    opened(page, url, "t.one")  # and its own call comes after all of that: nothing is still on its way
    expect(run(page)).to_contain_text("{0}")
    assert runs == [{}]


OPEN: list[dict[str, Any]] = [{}, {"host": "0.0.0.0"}, {"allowed_hosts": ["*"]}, {"allowed_hosts": ["*:*"]}]


@pytest.mark.parametrize("options", OPEN, ids=str)
def test_a_rebound_name_can_run_nothing(page: Page, options: dict[str, Any]) -> None:
    """Also where programs may use any name."""
    runs, touch = counted()
    registry = registry_of({"t.one": FunctionalModule(touch, input_schema=NOTHING, description="SECRET")})
    with serving(registry, explorer=True, allow_execute=True, **options) as url:
        rebound = f"http://{REBOUND}:{urlsplit(url).port}"
        page.goto(f"{rebound}/health")  # under its own name, so that the browser takes all of the server for its site
        assert page.evaluate("location.origin") == rebound
        attack(page, rebound)
        opened(page, url, "t.one")
        expect(run(page)).to_contain_text("{0}")
        assert runs == [{}]


# ---- A tool's own page (MCP Apps): the Explorer is its host ----

APP = (PAGES / "app.html").read_text()
NUMBERED = objects(n=NUMBER, big=INTEGER)
METHOD, RESULT = "ui/notifications/tool-input", "ui/notifications/tool-result"


def own_page(page: Page) -> FrameLocator:
    return page.frame_locator("iframe")


def messages(page: Page, words: str) -> Any:
    """What the tool's page, which is app.html, has been sent, once these words are in it."""
    text = own_page(page).locator("#got")
    expect(text).to_contain_text(words)
    return json.loads(text.inner_text())


def run_app(page: Page) -> Any:
    """Presses Run; what the tool's page, which is app.html, has been sent."""
    sent(page)
    return messages(page, RESULT)


def says(page: Page, **message: Any) -> None:
    """Lets the tool's page, which is app.html, send a message to its host."""
    own_page(page).locator("body").evaluate("(_, message) => send(message)", message)


def test_a_tools_own_page_is_shown_with_what_was_sent_and_what_came(show: Show) -> None:
    given = '{"n": 10.0, "big": 1152921504606846977, "text": "<b>"}'
    page = show(NUMBERED, metadata=overlay(page=APP), output_schema=NUMBERED, documentation="# How")
    write_json(page, given)
    hello, sent_in, came = run_app(page)
    expect(page.get_by_title("Page of t.one")).to_be_visible()
    told = hello["result"]
    assert (told["protocolVersion"], told["hostInfo"]["name"]) == ("2026-01-26", "Tool Explorer")
    context = told["hostContext"]
    assert (context["theme"], context["displayMode"]) == ("light", "inline")
    assert context["containerDimensions"]["maxHeight"] == 800
    assert context["containerDimensions"]["width"] > 300
    tool = context["toolInfo"]["tool"]
    assert (tool["name"], tool["inputSchema"]) == ("t.one", NUMBERED)
    assert tool.keys() & {"page", "documentation", "examples"} == set()
    plain = {"n": 10, "big": 1152921504606847000, "text": "<b>"}  # JavaScript has no other number there
    assert (sent_in["method"], sent_in["params"]) == (METHOD, {"arguments": plain})
    text = given.replace(" ", "").replace("10.0", "10")
    result = {"content": [{"type": "text", "text": text}], "structuredContent": plain}
    assert (came["method"], came["params"]) == (RESULT, result)


def test_a_page_is_answered_what_a_host_has_to_and_refused_the_rest(show: Show) -> None:
    page = show(NOTHING, metadata=overlay(page=APP))
    run_app(page)
    refusals = ["ui/open-link", "ui/message", "tools/call", "resources/read", "ui/update-model-context", "toString"]
    for number, method in enumerate(refusals):
        says(page, id=number, method=method, params={"name": "t.one", "url": "http://127.0.0.1:9/"})
    for silent in ({"method": "notifications/message"}, {"id": None, "method": "ping"}, {"id": "x", "result": {}}, {}):
        says(page, **silent)
    says(page, method="ui/notifications/initialized")
    says(page, id="mode", method="ui/request-display-mode", params={"mode": "fullscreen"})
    says(page, id="ping", method="ping")
    answers = messages(page, '"ping"')[3:]
    assert [(each["id"], each["error"]["code"]) for each in answers[:-2]] == [(n, -32601) for n in range(6)]
    assert [(each["id"], each["result"]) for each in answers[-2:]] == [("mode", {"mode": "inline"}), ("ping", {})]
    assert len(posted()) == 1, "the one call that was run"
    frame = page.locator("iframe")
    for height, shown in ((200, 200), ("700px", 200), (None, 200), (1e9, 800), (-5, 32), (99.5, 99.5)):
        says(page, method="ui/notifications/size-changed", params={"width": 1e6, "height": height})
        says(page, id=f"after {height}", method="ping")
        messages(page, f"after {height}")
        assert frame.evaluate("frame => frame.getBoundingClientRect().height") == shown
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDE["width"]


SLOW_TO_GO = """() => addEventListener("message", ({ data: { id, method } }) => {
  if (method === "ui/resource-teardown") setTimeout(() => send({ id, result: {} }), 50);
})"""


def test_a_page_is_told_before_it_goes_and_comes_back_with_its_tool(show: Show) -> None:
    page = show(NOTHING, metadata=overlay(page=APP))
    page.evaluate("addEventListener('message', ({ data }) => { window.heard = data.id; })")
    run_app(page)
    own_page(page).locator("body").evaluate(SLOW_TO_GO)
    page.get_by_role("link", name="shop.look").click()
    page.wait_for_function("() => window.heard === 'teardown'")
    expect(page.get_by_role("heading", level=2, name="shop.look")).to_be_visible()
    expect(page.locator("iframe")).to_have_count(0)
    page.go_back()
    assert [each.get("method") for each in messages(page, RESULT)] == [None, METHOD, RESULT], "from the beginning"
    # Which tells a page that never answers, and waits no longer than a moment.
    assert [each.get("method") for each in run_app(page)] == [None, METHOD, RESULT]


def test_a_page_that_never_speaks_is_shown_and_sent_nothing(show: Show) -> None:
    record = "<script>addEventListener('message', ({ data }) => { document.body.append(data.method); })</script>"
    page = show(NOTHING, metadata=overlay(page=f"<p>Still</p>{record}"))
    for _ in range(2):
        sent(page)
        expect(own_page(page).locator("body")).to_have_text("Still")
    page.get_by_role("link", name="shop.look").click()
    expect(page.get_by_role("heading", level=2, name="shop.look")).to_be_visible()


def test_a_call_that_failed_shows_no_page_and_another_page_replaces_one(show: Show) -> None:
    page = show(objects("n", n=INTEGER), metadata=overlay(page="<p>First</p>"))
    expect(run(page)).to_contain_text("Input validation failed:")
    expect(page.locator("iframe")).to_have_count(0)
    page.get_by_label("n integer").fill("1")
    run(page)
    expect(own_page(page).get_by_text("First")).to_be_visible()
    replace(page, metadata=overlay(page="<p>Second</p>"))
    expect(page.locator("iframe")).to_have_count(0)
    run(page)
    expect(own_page(page).get_by_text("Second")).to_be_visible()


@pytest.mark.parametrize("begin", ["</script></html>", "<!--", "<plaintext>", "\0"], ids=repr)
def test_no_html_gets_out_of_the_frame(show: Show, begin: str) -> None:
    page = show(NOTHING, metadata=overlay(page=begin + EVIL))
    expect(run(page)).to_contain_text("{0}")
    frame = page.locator("iframe").element_handle().content_frame()
    assert frame is not None
    frame.wait_for_function("() => !document.querySelector('script')?.textContent.includes('sandbox-proxy-ready')")
    frame.wait_for_load_state("load")
    assert page.evaluate("[window.pwned, window.violated]") == [None, None]


@pytest.fixture
def evil(page: Page, request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of somebody else, who gets no request; and no connection, where the browser can be told so."""
    came: list[bytes] = []

    class Stranger(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            came.append(b"a connection")
            came.append(self.request.recv(200))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Stranger) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
    assert not [each for each in came if b"HTTP" in each]
    browser = page.context.browser
    knows_allowlists = browser is not None and int(browser.version.split(".")[0]) >= 156
    if knows_allowlists and "older" not in request.node.name:
        assert came == []


def older(app: Any) -> Any:
    """ASGI middleware that keeps from a browser what older ones, and those of others, do not know."""

    def without(scope: Any, receive: Any, send: Any) -> Any:
        def send_rest(message: Any) -> Any:
            headers = [each for each in message.get("headers", ()) if each[0] != b"connection-allowlist"]
            return send({**message, "headers": headers})

        return app(scope, receive, send_rest)

    return without


Ready = tuple[str, Registry]


@pytest.fixture(scope="module", params=[[], [Middleware(older)]], ids=["this browser", "older browsers"])
def ready(request: pytest.FixtureRequest) -> Iterator[Ready]:
    """A server for a browser that knows, or does not know, the header `Connection-Allowlist`, and its registry."""
    registry = registry_of()
    with serving(registry, explorer=True, allow_execute=True, middleware=request.param) as url:
        yield url, registry


def test_a_page_reaches_nothing_and_nobody(page: Page, ready: Ready, evil: str) -> None:
    (url, registry), (runs, touch) = ready, counted()
    html = (PAGES / "prisoner.html").read_text().replace("TARGET", url).replace("EVIL", evil)
    registry.register("t.one", FunctionalModule(touch, metadata=overlay(page=html)))
    opened(page, url, "t.one")
    page.get_by_label("Authorization header").fill("Bearer s3cret")
    expect(run(page)).to_contain_text("{0}")
    told = own_page(page).locator("#told")
    expect(told).to_contain_text("{")
    reached = {name: came for name, came in json.loads(told.inner_text()).items() if came != "refused"}
    assert reached == {"origin": "null", "element": "null", "window": "null"}
    assert page.url == f"{url}/explorer/#t.one"
    assert len(page.context.pages) == 1
    assert runs == [{}]
    (framed,) = [each for each in asked if each.url.endswith("/page")]
    assert "authorization" not in framed.headers


def test_a_page_can_send_its_frame_nowhere(page: Page, ready: Ready, evil: str) -> None:
    url, registry = ready
    places = [f"{evil}/", f"{url}/explorer/", f"{url}/explorer/tools/t.two", "javascript:top.x=1"]
    html = "".join(f"<p onclick='location = {json.dumps(place)}'>Go {n}</p>" for n, place in enumerate(places))
    registry.register("t.two", FunctionalModule(echo, metadata=overlay(page=html)))
    opened(page, url, "t.two")
    for number, place in enumerate(places):
        run(page)
        go = own_page(page).get_by_text(f"Go {number}")
        go.click()
        if "javascript" not in place:
            with contextlib.suppress(AssertionError):
                expect(go).to_have_count(0, timeout=5_000)
            if go.count():  # the Explorer has moved the frame meanwhile, which then loads again
                go.click()
            expect(own_page(page).get_by_text("Go")).to_have_count(0)
            expect(own_page(page).get_by_text("Tool Explorer")).to_have_count(0)
    run(page)
    expect(own_page(page).get_by_text("Go 0")).to_be_visible()
    assert page.evaluate("window.x") is None


def test_in_a_tab_of_its_own_the_frame_is_nobody_and_takes_nothing_from_others(show: Show, url: str) -> None:
    page = show(NOTHING, metadata=overlay(page=APP))
    run_app(page)
    ready = {"jsonrpc": "2.0", "method": "ui/notifications/sandbox-resource-ready", "params": {"html": "<b>Evil</b>"}}
    asks = {"jsonrpc": "2.0", "id": "evil", "method": "ui/initialize", "params": {}}
    place = f"{url}/explorer/tools/t.one/page"
    with page.context.expect_page() as opening:
        page.evaluate("url => { window.other = open(url); }", place)
    other = opening.value
    other.wait_for_url(place)  # until then it is an empty document of the Explorer's origin
    assert other.evaluate("[self.origin, !!opener]") == ["null", True]
    storage = "() => { try { return localStorage.length } catch (error) { return error.name } }"
    assert other.evaluate(storage) == "SecurityError"
    # The three windows are in processes of their own: what one sends another has come when it was heard there.
    frame = own_page(page).locator(":root")
    for window in (page, frame, other):
        window.evaluate("() => { self.heard = []; addEventListener('message', ({ data }) => heard.push(data)); }")

    def heard(window: Page | Locator) -> Any:
        return window.evaluate("() => heard")

    page.evaluate("ready => { other.postMessage(ready, '*'); }", ready)
    until(lambda: heard(other) or "Evil" in other.content())
    assert heard(other) == [ready]
    # Who holds a window of the Explorer may send it messages, and those in it: neither is answered.
    other.evaluate(
        "([ready, asks]) => { opener.postMessage(asks, '*'); opener[0].postMessage(ready, '*'); }", [ready, asks]
    )
    until(lambda: asks in heard(page) and ready in heard(frame))
    page.evaluate("() => { other.postMessage('end', '*'); }")  # behind the answer, if there were one
    until(lambda: "end" in heard(other))
    assert heard(other) == [ready, "end"]
    assert other.evaluate("document.body?.textContent ?? ''") == ""
    says(page, id="end", method="ping")
    assert "evil" not in json.dumps(messages(page, '"end"'))
    other.close()


def test_the_page_of_a_tool_that_only_some_are_offered_is_fetched_with_their_token(page: Page) -> None:
    """The frame itself, which is loaded without it, is the same for everybody."""
    rule = ACLRule(callers=["@external"], targets=["*"], effect="allow", conditions={"identity_types": ["user"]})
    registry = registry_of({"t.one": FunctionalModule(echo, metadata=overlay(page=APP))})
    executor = Executor(registry, acl=ACL([rule], default_effect="deny"))
    with serving(executor, explorer=True, allow_execute=True, middleware=LOGIN) as url:
        page.goto(f"{url}/explorer/#t.one")
        expect(page.get_by_role("alert")).to_have_text("Tool 't.one' not found")
        page.get_by_label("Authorization header").fill(f"Bearer {TOKEN}")
        page.get_by_label("Authorization header").press("Enter")
        expect(page.get_by_role("heading", level=2, name="t.one")).to_be_visible()
        run(page)
        assert TOKEN not in json.dumps(messages(page, RESULT))
        (framed,) = [request for request in asked if request.url.endswith("/page")]
        assert "authorization" not in framed.headers


def test_the_page_of_the_guide_shows_its_result(show: Show) -> None:
    text = (ROOT / "examples" / "guide" / "pages.md").read_text("utf-8")
    (html,) = re.findall(r"^```html .+?\n(.+?)^```", text, re.DOTALL | re.MULTILINE)
    page = show(NOTHING, lambda inputs, context: {"score": 7}, metadata=overlay(page=html))
    sent(page)
    expect(own_page(page).locator("body")).to_have_text("7")


def test_the_page_of_the_example_draws_its_structured_content(page: Page) -> None:
    contrast = (PAGES / "contrast.js").read_text()
    with serving(discover(EXTENSIONS), explorer=True, allow_execute=True) as url:
        page.goto(f"{url}/explorer/#chart.bars")
        page.get_by_label("Fill in an example").select_option("A week with one bad day")
        chart = own_page(page).get_by_role("img")
        for scheme in ("dark", "light"):
            page.emulate_media(color_scheme=scheme)
            sent(page)
            expect(chart).to_have_accessible_name("Bar chart: Mo 12, Tu 18, We 9, Th -4, Fr 22, Sa 30, Su 26")
            assert chart.evaluate(f"_ => ({contrast})()")[1] == []
        boxes = [bar.bounding_box() or {} for bar in own_page(page).locator(".bar").all()]
        assert [round(box["height"] / boxes[5]["height"] * 30) for box in boxes] == [12, 18, 9, 4, 22, 30, 26]
        assert boxes[3]["y"] == pytest.approx(boxes[0]["y"] + boxes[0]["height"], abs=1), "one line is zero"
        frame = page.locator("iframe").bounding_box() or {}
        assert frame["y"] < boxes[5]["y"] < boxes[3]["y"] + boxes[3]["height"] < frame["y"] + frame["height"]
        write_json(page, {"values": [0], "labels": [EVIL, "b"]})
        sent(page)
        expect(own_page(page).get_by_text(EVIL)).to_be_visible()
        page.set_viewport_size(PHONE)
        assert own_page(page).locator("html").evaluate("root => root.scrollWidth <= root.clientWidth")
        expect(chart).to_have_accessible_name(f"Bar chart: {EVIL} 0")
