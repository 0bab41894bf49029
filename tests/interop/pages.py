"""Pages of MCP Apps in Chromium, with the official parts at the other end: the example's page in a host made of
`AppBridge`, and a page made with `App` in the Tool Explorer.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mcp.client import Client

from .programs import HERE, HTTP, NODE, NODE_PATH, SERVER, install_node, run, serving, yes

PACKAGE = "@modelcontextprotocol/ext-apps"
HEADINGS = ["MCP Apps", "handshake", "arguments, result", "size", "refusal", "end"]
INPUTS = {"values": [9, -3, 14], "labels": ["Mo", "Tu", "We"]}
# What the specification wants of a host where a page declares no domains.
POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-inline'; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
    "; media-src 'self' data:; connect-src 'none'"
)
APP = """<!doctype html>
<meta charset="utf-8">
<p id="seen"></p>
<script>{}</script>
"""
MODULE = """
from pathlib import Path

from apcore.decorator import module


@module(id="t.page", display={"mcp": {"page": Path(__file__).with_name("page.html").read_text("utf-8")}})
def page(size: float) -> dict[str, float]:
    return {"twice": 2 * size}
"""
NOTE_THE_END = "addEventListener('message', ({ data }) => { if (data.id === 'teardown') window.end = data; })"


def bundled(script: str) -> str:
    """A script of `clients/` in one piece with what it imports, ready to stand in HTML."""
    command = [str(NODE / "node_modules" / ".bin" / "esbuild"), str(HERE / "clients" / script)]
    options = ["--bundle", "--format=iife", "--minify", "--log-level=error"]
    done = run([*command, *options], environment={"PATH": NODE_PATH, "NODE_PATH": str(NODE / "node_modules")})
    done.check_returncode()
    return done.stdout.replace("</script", r"<\/script")


async def called(url: str) -> tuple[dict[str, Any], str, dict[str, Any]]:
    """The tool, its page and a result, as the official client has them."""
    async with Client(url) as client:
        (tool,) = [tool for tool in (await client.list_tools()).tools if tool.name == "chart.bars"]
        assert tool.meta is not None
        (page,) = (await client.read_resource(tool.meta["ui"]["resourceUri"])).contents
        assert (page.uri, page.mime_type) == ("ui://chart.bars", "text/html;profile=mcp-app")
        result = await client.call_tool("chart.bars", INPUTS)
    dumped = [each.model_dump(mode="json", by_alias=True, exclude_none=True) for each in (tool, result)]
    return dumped[0], page.text, dumped[1]  # type: ignore[union-attr]


def in_a_host(browser: Any) -> list[str]:
    """The page of `chart.bars` in a host made of `AppBridge`."""
    with serving([*SERVER, *HTTP]) as url, ThreadPoolExecutor(1) as thread:  # Playwright has a loop in this one
        tool, html, result = thread.submit(asyncio.run, called(url)).result()
    page = browser.new_page()
    host = f'<!doctype html><iframe sandbox="allow-scripts"></iframe><script>{bundled("app_host.mjs")}</script>'
    page.route("http://host.example/", lambda route: route.fulfill(body=host, content_type="text/html"))
    policy = {"Content-Security-Policy": POLICY, "Content-Type": "text/html; charset=utf-8"}
    page.route("http://view.example/", lambda route: route.fulfill(body=html, headers=policy))
    page.goto("http://host.example/")
    assert page.evaluate("tool => pageOf(tool)", tool) == "ui://chart.bars"
    shown = page.evaluate("call => show(call)", {"tool": tool, "inputs": INPUTS, "result": result})
    view = page.frame_locator("iframe")
    view.locator(".bar").nth(2).wait_for()
    name = view.get_by_role("img").get_attribute("aria-label")
    scheme = view.locator("html").evaluate("root => getComputedStyle(root).colorScheme")
    ended = page.evaluate("leave()")
    return [
        yes(shown["name"] == "bars" and scheme == "dark", shown, scheme),
        yes(name == "Bar chart: Mo 9, Tu -3, We 14", name),
        yes(100 < shown["height"] < 1000, shown),
        "-",
        yes(ended == {}, ended),
    ]


def in_the_explorer(browser: Any) -> list[str]:
    """A page made with `App` in the Tool Explorer."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "page.html").write_text(APP.format(bundled("app_page.mjs")), "utf-8")
        Path(folder, "tool.py").write_text(MODULE)
        server = [sys.executable, "-m", "apcore_mcp", "--extensions-dir", folder, "--log-level", "ERROR"]
        with serving([*server, *HTTP, "--explorer", "--allow-execute"]) as url:
            page = browser.new_page()
            page.goto(url.replace("/mcp", "/explorer/#t.page"))
            page.get_by_label("size number").fill("2.5")
            page.evaluate(NOTE_THE_END)
            page.get_by_role("button", name="Run", exact=True).click()
            text = page.frame_locator("iframe").get_by_text('"call":')
            text.wait_for()
            seen = json.loads(text.inner_text())
            height = page.locator("iframe").evaluate("frame => frame.style.height")
            page.get_by_role("button", name="Run", exact=True).click()
            page.wait_for_function("() => 'end' in window && 'result' in window.end")
    return [
        yes((seen["host"], seen["tool"], seen["mode"]) == ("Tool Explorer", "t.page", "inline"), seen),
        yes((seen["arguments"], seen["result"]) == ({"size": 2.5}, {"twice": 5}), seen),
        yes(bool(height), height),
        yes("was let through" not in seen["call"], seen),
        "yes",
    ]


ROWS: dict[str, Callable[[Any], list[str]]] = {
    "`AppBridge` shows `chart.bars`": in_a_host,
    "`App` in the Tool Explorer": in_the_explorer,
}


def row(name: str) -> list[str]:
    """One of the two, by its name."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        return [name, "there is no Chromium here"]
    from playwright.sync_api import sync_playwright

    version = install_node(PACKAGE)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        try:
            return [f"{name} ({version}, Chromium {browser.version.split('.')[0]})", *ROWS[name](browser)]
        finally:
            browser.close()
