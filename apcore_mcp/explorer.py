"""The Tool Explorer: a page on which people look at the tools of a server and run them, and as JSON what it shows.

It is ASGI routes for below `explorer_prefix`, which have to stand behind web.py's guard of Host and Origin; the page
is `explorer.html` beside this file. Without the two, there is no such page, and all else works.
"""

from __future__ import annotations

import base64
import hashlib
import posixpath
import re
from pathlib import Path
from urllib.parse import urlsplit

from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import BaseRoute, Route

from . import __version__
from .client import caller_of
from .core import Bridge, Tool

__all__ = ["routes"]

# A tool's page (MCP Apps) must not run as the Explorer, nor carry its Authorization header. So the Explorer frames this
# document, which any caller may load, and posts the page to it (`sandbox-resource-ready` of the specification).
_FRAME = """<!doctype html><script>
addEventListener("message", ({ source, data }) => {
  if (source !== parent || data?.method !== "ui/notifications/sandbox-resource-ready") return;
  document.open(); // which also removes this listener
  document.write(data.params.html);
  document.close();
});
parent.postMessage({ jsonrpc: "2.0", method: "ui/notifications/sandbox-proxy-ready", params: {} }, "*");
</script>"""
# The page keeps the headers of the document that it is written into. The policy is that of the specification for a page
# that declares no domains, without `'self'`. It repeats the sandbox of the Explorer's frame, because in a tab of its
# own the document would have the Explorer's origin.
_FRAME_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
_FRAME_POLICY += "; media-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'self'; sandbox allow-scripts"


def _headers(page: str) -> dict[str, str]:
    """The headers of all that the Explorer answers: its page may load, send and be framed nowhere else, and no page of
    another site may read anything here. `page` is its HTML, whose own script and style alone are let run."""
    policy = "default-src 'none'; img-src data:; media-src data:; connect-src 'self'; frame-src 'self'"
    policy += "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    for tag, inside in re.findall(r"<(script|style)>(.*?)</\1>", page, re.DOTALL):
        digest = hashlib.sha256(inside.encode()).digest()
        policy += f"; {tag}-src 'sha256-{base64.b64encode(digest).decode()}'"
    return {
        "Content-Security-Policy": policy,
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


def routes(bridge: Bridge) -> list[BaseRoute]:
    """The routes below the prefix of a server's Explorer (FR-EXPLORER-001 to -006)."""
    options = bridge.options
    catalog = bridge.catalog
    page = Path(__file__).with_name("explorer.html").read_text("utf-8")
    headers = _headers(page)
    # The allowlist is for what no policy stops: WebRTC, and where a page sends its own frame. Chromium 156 knows it;
    # others ignore it: https://wicg.github.io/connection-allowlists
    frame_headers = {**headers, "Content-Security-Policy": _FRAME_POLICY, "Connection-Allowlist": "()"}

    def answer(body: object, status: int = 200) -> Response:
        return JSONResponse(body, status, headers)

    def not_found(request: Request) -> Response:
        return answer({"error": f"Tool {request.path_params['name']!r} not found"}, 404)

    async def server(request: Request) -> Response:
        """What the server is, and what may be done here."""
        about = {
            "name": options.name,
            "version": options.version or __version__,
            "instructions": options.instructions,
            "transport": options.transport,
            # Relative to the page, as its absolute path may have a prefix that a proxy removes.
            "endpoint": posixpath.relpath(urlsplit(options.url).path, options.explorer_prefix),
            "allowExecute": options.allow_execute,
            "hasACL": bool(catalog.acls),
        }
        return answer(about)

    def definition_of(tool: Tool) -> dict[str, object]:
        """The tool as clients list it; one without a name of its own is shown by its id."""
        definition = tool.definition(options.tool_names)
        if not tool.descriptor.name:
            del definition["title"]
        return definition

    async def tools(request: Request) -> Response:
        """What the caller is offered, without schemas."""
        summaries = []
        for offered in await catalog.offered(catalog.tools.values(), caller_of(request.scope)):
            definition = definition_of(offered)
            summaries.append({key: definition[key] for key in definition if key not in ("inputSchema", "outputSchema")})
        return answer(summaries)

    async def tool(request: Request) -> Response:
        """All that there is to show of one tool."""
        shown = catalog.find(request.path_params["name"])
        if shown is None or not await catalog.offered([shown], caller_of(request.scope)):
            return not_found(request)
        about = {"documentation": shown.documentation, "examples": shown.examples, "page": shown.about.page}
        return answer({**definition_of(shown), **about})

    async def call(request: Request) -> Response:
        """Run a tool, as for a client that cannot be asked (FR-EXPLORER-004).

        The answer is `{"result": {...}}` with the output as JSON, and `"content"` with its files, or `{"error": "..."}`
        with the report that clients find in `_meta`."""
        if not options.allow_execute:
            return answer({"error": "Tool execution is disabled"}, 403)
        name, caller = request.path_params["name"], caller_of(request.scope)
        if catalog.find(name) is None:
            bridge.router.not_found(name, caller)  # which logs it
            return not_found(request)
        try:
            arguments = {**from_json(await request.body(), allow_inf_nan=False)}
        except (TypeError, ValueError):  # JSON of something else than an object, and no JSON
            return answer({"error": "Request body must be a JSON object: the tool's arguments"}, 400)
        result = await bridge.router.call(name, arguments, caller, structured=True)
        text, *files = result["content"]
        if not result["isError"]:
            content = {"content": files} if files else {}
            return answer({"result": result["structuredContent"], **content})
        report = result["_meta"]["apcore-mcp/error"]
        status = {"ACL_DENIED": 403, "SCHEMA_VALIDATION_ERROR": 400}.get(report["error_type"], 500)
        if status == 400 and not report.get("user_fixable"):  # it is the output that is wrong
            status = 500
        return answer({"error": text["text"], **report}, status)

    return [
        Route("/", HTMLResponse(page, headers=headers)),
        Route("/server", server),
        Route("/tools", tools),
        Route("/tools/{name}", tool),
        Route("/tools/{name}/call", call, methods=["POST"]),
        Route("/tools/{name}/page", HTMLResponse(_FRAME, headers=frame_headers)),
    ]
