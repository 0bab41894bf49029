"""A model for agents to talk to that needs no account: it calls the tools of a script, one after the other, then stops.

It speaks Anthropic's Messages API, OpenAI's Responses API and Gemini's `streamGenerateContent`, and keeps what it is
told. How many results of tools stand in a conversation says which call comes next, so it has no state of its own.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Call = tuple[str, dict[str, Any]]
Event = tuple[str, dict[str, Any]]


@dataclass
class Model:
    script: list[Call]  # how the name of an offered tool ends, and its arguments
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)

    def tools(self) -> list[dict[str, Any]]:
        """The tools that were offered, as the model was told of them, each with its whole name as `name`."""
        return max(map(_offered, self.requests), key=len, default=[])

    def results(self) -> list[Any]:
        """What the model was told of its calls, in the agent's own form."""
        return max(map(_results, self.requests), key=len, default=[])

    def next_call(self, request: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The tool and the arguments that come next in a conversation; none at its end, or where there are no tools."""
        done = len(_results(request))
        if done == len(self.script):
            return None
        suffix, arguments = self.script[done]
        return next(((tool, arguments) for tool in _offered(request) if tool["name"].endswith(suffix)), None)


def _offered(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The tools of a request in any of the three forms; also those in a namespace or a list."""
    found = []
    for tool in request.get("tools", []):
        if "functionDeclarations" in tool:
            found += tool["functionDeclarations"]
        elif tool.get("type") == "namespace":
            found += [{**inner, "namespace": tool["name"]} for inner in tool["tools"]]
        elif "name" in tool:
            found.append(tool)
    return found


def _results(request: dict[str, Any]) -> list[Any]:
    """The results of tools in a request in any of the three forms."""
    found = []
    for message in request.get("messages", []):
        if isinstance(message["content"], list):
            found += [part for part in message["content"] if part["type"] == "tool_result"]
    found += [item for item in request.get("input", []) if item.get("type") == "function_call_output"]
    for content in request.get("contents", []):
        found += [part["functionResponse"] for part in content["parts"] if "functionResponse" in part]
    return found


def _anthropic(call: tuple[dict[str, Any], dict[str, Any]] | None, number: int) -> Iterator[Event]:
    message = {"id": f"msg_{number}", "type": "message", "role": "assistant", "model": "scripted", "content": []}
    usage = {"input_tokens": 1, "output_tokens": 1}
    start: dict[str, Any] = {"type": "text", "text": ""}
    delta = {"type": "text_delta", "text": "Done."}
    if call:
        start = {"type": "tool_use", "id": f"toolu_{number}", "name": call[0]["name"], "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(call[1])}
    ending = {"stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None}
    yield "message_start", {"message": {**message, "stop_reason": None, "stop_sequence": None, "usage": usage}}
    yield "content_block_start", {"index": 0, "content_block": start}
    yield "content_block_delta", {"index": 0, "delta": delta}
    yield "content_block_stop", {"index": 0}
    yield "message_delta", {"delta": ending, "usage": usage}
    yield "message_stop", {}


def _openai(call: tuple[dict[str, Any], dict[str, Any]] | None, number: int) -> Iterator[Event]:
    content = [{"type": "output_text", "text": "Done.", "annotations": []}]
    item: dict[str, Any] = {"type": "message", "id": f"m{number}", "role": "assistant", "content": content}
    if call:
        tool, arguments = call
        item = {"type": "function_call", "id": f"f{number}", "call_id": f"c{number}", "name": tool["name"]}
        item["arguments"] = json.dumps(arguments)
        if "namespace" in tool:
            item["namespace"] = tool["namespace"]
    item["status"] = "completed"
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    response = {"id": f"r{number}", "object": "response", "status": "completed", "output": [item], "usage": usage}
    yield "response.created", {"response": {**response, "status": "in_progress", "output": []}}
    yield "response.output_item.done", {"output_index": 0, "item": item}
    yield "response.completed", {"response": response}


def _gemini(call: tuple[dict[str, Any], dict[str, Any]] | None, number: int) -> Iterator[Event]:
    part: dict[str, Any] = {"text": "Done."}
    if call:
        part = {"functionCall": {"name": call[0]["name"], "args": call[1], "id": f"c{number}"}}
    candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    yield "", {"candidates": [candidate], "usageMetadata": usage}


@contextlib.contextmanager
def scripted(script: list[Call]) -> Iterator[Model]:
    """A model at `url` on this machine that makes the calls of `script`."""
    model = Model(script)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request: dict[str, Any] = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            speak = _anthropic if "/messages" in self.path else _gemini if "enerateContent" in self.path else _openai
            model.requests.append(request)
            if "count" in self.path.rpartition("/")[2]:
                return self._answer("application/json", '{"input_tokens": 1, "totalTokens": 1}')
            events = list(speak(model.next_call(request), len(model.requests)))
            if ":generateContent" in self.path:
                return self._answer("application/json", json.dumps(events[0][1]))
            named = ((f"event: {name}\n", {"type": name, **data}) if name else ("", data) for name, data in events)
            return self._answer("text/event-stream", "".join(f"{n}data: {json.dumps(data)}\n\n" for n, data in named))

        def do_GET(self) -> None:
            self._answer("application/json", '{"data": [], "models": []}')

        def do_HEAD(self) -> None:
            self._answer("application/json", "")

        def _answer(self, kind: str, text: str) -> None:
            body = text.encode()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    model.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield model
    finally:
        server.shutdown()
        server.server_close()
