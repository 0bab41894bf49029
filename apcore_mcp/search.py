"""Two tools in the place of many: `search_tools` finds tools by what they do, and `call_tool` calls one of them.

They stand before the handlers of `tools/list` and `tools/call`, and are the two functions that OpenAI's API is given.
Without this file, clients list every tool, and all else works.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from apcore import Identity, ModuleAnnotations, ModuleDescriptor
from apcore.errors import SchemaValidationError
from pydantic_core import to_json

from .core import Catalog, Tool, tool_result
from .options import Options
from .schemas import JSONObject, subschemas

__all__ = ["CALL_TOOL", "SEARCH_TOOLS", "SearchTools", "rank"]

SEARCH_TOOLS = "search_tools"  # the names that the search transforms of FastMCP use
CALL_TOOL = "call_tool"
_SEARCH_TEXT = "Find tools of this server by what they do, as it lists none of them: up to ten, best first."
_SEARCH_TEXT += " Call them with call_tool."
_CALL_TEXT = "Call a tool that search_tools has found, with arguments that fit its inputSchema."
_QUERY = {"query": {"type": "string", "description": "What a tool has to do, in a few words"}}
_TARGET = {
    "name": {"type": "string", "description": "The name of the tool"},
    "arguments": {"type": "object", "description": "Its arguments"},
}
_FORM = 'The form is {"name": "...", "arguments": {...}}, with an object as arguments'

_FOUND_MAX = 10  # tools in one answer
_QUERY_CHARACTERS_MAX = 1_000  # nothing of a query behind these is read
_QUERY_WORDS_MAX = 50  # and no more words of it are looked for
_GROUPS_MAX = 50  # groups of tools that are named where nothing is found
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")  # where a word begins in camel case
# Chinese and Japanese put no spaces between words, so there each character is one.
_IDEOGRAPHS = r"\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
# Vowels and points that Python counts to no word: combining ones, Hebrew, Arabic, of India and of Thailand.
_VOWEL_SIGNS = r"\u0300-\u036f\u0591-\u05c7\u064b-\u065f\u0900-\u0963\u0971-\u0dff\u0e31-\u0e4e"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|(?:[^\W_{_IDEOGRAPHS}]|[{_VOWEL_SIGNS}]){{2,}}")
# What plurals end in, and singulars whose plurals end otherwise: policies, boxes, branches, files; policy.
_ENDING = re.compile(r"(?<=\w\w)(ies|(?<=[sxz])es|(?<=[cs]h)es|s)$|(?<=\w{3}[^aeiou])y$")


def _words(text: str) -> list[str]:
    """The words of a text or a name, without case: `getUser_ids` has "get", "user" and "ids"."""
    apart = _HUMP.sub(" ", unicodedata.normalize("NFKC", text))
    return _WORD.findall(apart.casefold())


@dataclass(frozen=True)
class _Keywords:
    """The words by which a tool is found, each behind a space: `" repo" in everything` is true where one begins so.

    `names` are the words of its names alone. The more these are, the smaller is `weight`, by which each one counts."""

    names: str
    everything: str
    weight: float


_KEYWORDS: WeakKeyDictionary[Tool, _Keywords] = WeakKeyDictionary()  # each tool is read once


def _keywords_of(tool: Tool) -> _Keywords:
    """The words of a tool's names, title, description, tags and parameters."""
    if tool not in _KEYWORDS:
        names = _words(" ".join({tool.module_id, tool.name}))
        texts: list[Any] = [tool.about.title, tool.about.description, *tool.about.tags]
        for schema in subschemas(tool.input_schema):
            texts += [*schema.get("properties", ()), schema.get("description")]
        # Under a keyword that nobody knows, a description may be anything.
        everything = names + _words("\n".join(text for text in texts if isinstance(text, str)))
        weight = max(1, len(names)) ** -0.25
        _KEYWORDS[tool] = _Keywords(" " + " ".join(names), " " + " ".join(everything), weight)
    return _KEYWORDS[tool]


def rank(query: str, tools: Collection[Tool]) -> list[Tool]:
    """Those of `tools` that have any word of `query`, best first.

    A word also finds its plural and longer words. A rare word counts more, and one in a name three times as much. How
    well this works is measured by `python -m tests.benchmarks.search`."""
    keywords = {tool: _keywords_of(tool) for tool in tools}
    scores = dict.fromkeys(tools, 0.0)
    words = dict.fromkeys(_ENDING.sub("", word) for word in _words(query[:_QUERY_CHARACTERS_MAX]))
    for word in list(words)[:_QUERY_WORDS_MAX]:
        beginning = f" {word}"
        matching = [tool for tool in tools if beginning in keywords[tool].everything]
        for tool in matching:
            rarity = math.log((len(tools) + 1) / len(matching))
            scores[tool] += rarity * (3 if beginning in keywords[tool].names else 1)
    found = [tool for tool in tools if scores[tool]]
    return sorted(found, key=lambda tool: scores[tool] * keywords[tool].weight, reverse=True)


class SearchTools:
    """`search_tools` and `call_tool`, by which clients reach the tools of a catalog. Event loop only.

    `tools` are these two, by name. Neither can be called through the other: `call_tool` calls modules."""

    def __init__(self, catalog: Catalog, options: Options) -> None:
        for_search = ModuleAnnotations(readonly=True, idempotent=True, open_world=False)
        search = _descriptor(SEARCH_TOOLS, "Search tools", _SEARCH_TEXT, _QUERY, for_search)
        call = _descriptor(CALL_TOOL, "Call a tool", _CALL_TEXT, _TARGET, ModuleAnnotations(destructive=True))
        self.tools = {each.module_id: Tool(each, None, options) for each in (search, call)}
        self._catalog = catalog
        self._is_structured = options.structured

    def faults(self, name: str, arguments: JSONObject) -> list[dict[str, str]]:
        """What is wrong with the arguments of one of the two."""
        faults = self.tools[name].arguments.faults(arguments)
        for fault in faults:
            # Not in jsonschema's words, which quote what may be marked in the schema of the tool that was meant.
            if name == CALL_TOOL and fault["code"] != "required":
                fault["message"] = _FORM
        return faults

    def resolve(self, name: str, arguments: JSONObject) -> tuple[Tool | None, str, JSONObject]:
        """Which of the two a client calls, if any, and by what name and arguments: a valid call of `call_tool` is that
        of the tool that it names."""
        if name == CALL_TOOL and not self.faults(name, arguments):
            return None, arguments["name"], arguments.get("arguments", {})
        return self.tools.get(name), name, arguments

    async def answer(self, tool: Tool, arguments: JSONObject, caller: Identity | None, naming: str) -> JSONObject:
        """The result of a call of one of the two: what `search_tools` finds of what `caller` is offered, by names as
        the option `tool_names` has them. Raises apcore's SchemaValidationError for wrong arguments."""
        faults = self.faults(tool.module_id, arguments)
        if faults:
            raise SchemaValidationError("Input validation failed", faults)
        tools = await self._catalog.offered(self._catalog.tools.values(), caller)
        listing: list[JSONObject] = []
        for found in rank(arguments["query"], tools)[:_FOUND_MAX]:
            about = {"name": found.name_as(naming), "description": found.about.description}
            listing.append({**about, "inputSchema": found.input_schema})
        if not listing:
            return tool_result(_groups(tools))  # Codex shows its model nothing but structured content, if there is any
        # Without structured content, Gemini CLI would take the text for it, and refuse an array.
        more: JSONObject = {"structuredContent": {"result": listing}} if self._is_structured else {}
        return tool_result(to_json(listing).decode(), **more)


def _descriptor(
    name: str, title: str, text: str, properties: JSONObject, annotations: ModuleAnnotations
) -> ModuleDescriptor:
    """One of the two as apcore would describe it, were it a module. The first of its properties is required."""
    required = list(properties)[:1]
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return ModuleDescriptor(name, title, text, None, schema, output_schema={}, annotations=annotations)


def _groups(tools: Iterable[Tool]) -> str:
    """What there is, for a model whose search has found nothing: how many tools begin with which word."""
    counts = Counter(tool.module_id.partition(".")[0] for tool in tools)
    groups = [f"{name} ({count})" for name, count in counts.most_common(_GROUPS_MAX)]
    if len(counts) > _GROUPS_MAX:
        groups.append(f"and {len(counts) - _GROUPS_MAX} more")
    return f"No tool was found; the groups of tools are: {', '.join(groups) or 'none'}."
