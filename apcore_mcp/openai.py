"""OpenAI, both directions: tools as function definitions, and a model's calls as a module's inputs, or run.

It plugs into `core.py`: definitions are made of its catalog, and a call goes through its router. Of strict mode, the
rewriting of a schema and what undoes it in a call stand side by side.
"""

from __future__ import annotations

import asyncio
import mimetypes
import posixpath
import re
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, overload

from apcore import APCore, Executor, Registry
from apcore.approval import ApprovalHandler
from apcore.context import Identity
from apcore.schema.openai_strict import SUPPORTED_FORMATS, detect_openai_strict_incompatibilities
from jsonschema import Draft202012Validator
from pydantic_core import from_json, to_json

from .client import Client
from .core import Catalog, ExecutionRouter, Tool, installation, logger, portable_name, tool_result
from .options import Options, options_of
from .schemas import (
    CONSTRAINTS,
    OTHER_PROPERTIES,
    JSONObject,
    JSONSchema,
    branches,
    in_place,
    integral,
    is_valid,
    map_subschemas,
    nullable,
    part_schemas,
    properties_of,
    types_of,
)

__all__ = ["from_openai_call", "from_openai_name", "openai_function", "run_openai_call", "to_openai_tools"]

# ---- Strict mode, and its inverse; pure ----

# Strict mode refuses these. A model reads them in the description instead, and the module's own validation holds them.
_FOR_DESCRIPTION = frozenset(
    "minLength maxLength uniqueItems minProperties maxProperties propertyNames dependentRequired contains minContains"
    " maxContains".split()
)
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")  # in a pattern, such as pydantic's for a Decimal


def openai_function(tool: Tool, *, strict: bool = False, embed_annotations: bool = False) -> JSONObject:
    """A tool as an OpenAI function definition. A WARNING says where strict mode refuses its parameters all the same, or
    takes something away from them."""
    function: JSONObject = {"name": portable_name(tool.module_id), "description": tool.about.description}
    if embed_annotations:
        function["description"] += tool.about.to_suffix()
    function["parameters"] = tool.input_schema
    if strict:
        parameters = _to_strict(tool.input_schema)
        problems = [*detect_openai_strict_incompatibilities(parameters), *_too_open(tool.input_schema, "")]
        if problems:
            text = "Schema for module '%s' uses what is incompatible with strict mode: %s; export it without strict"
            logger.warning(text, tool.module_id, ", ".join(problems))
        function |= {"parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


def _too_open(schema: JSONSchema, place: str) -> Iterator[str]:
    """What strict mode cannot say, and where: `tags.items: any type`, `by.items: additionalProperties`."""
    types = types_of(schema)
    if not schema.keys() & {"type", "enum", "const", "anyOf", "oneOf", "allOf", "not"}:
        yield f"{place or 'the root'}: any type"
    if "array" in types and not schema.get("items"):  # or a tuple, which apcore finds
        if "prefixItems" not in schema:
            yield f"{place}: items of any type"
        return
    others = schema.get("additionalProperties", False if properties_of(schema) or not place else "object" in types)
    if others is not False:
        yield f"{place or 'the root'}: additionalProperties, of which a model can send none"
    for name, field in properties_of(schema).items():
        yield from _too_open(field, f"{place}.{name}".lstrip("."))
    for keyword in ("items", "anyOf", "oneOf", "allOf"):
        for number, branch in enumerate(branches(schema, [keyword])):
            yield from _too_open(branch, f"{place}.{keyword}" if keyword == "items" else f"{place}.{keyword}.{number}")


def _is_for_description(keyword: str, value: Any) -> bool:
    """Whether strict mode refuses a keyword with this value that a model can be told of in words."""
    if keyword == "pattern":
        return _LOOKS_AROUND.search(value) is not None
    if keyword == "format":
        return value not in SUPPORTED_FORMATS
    return keyword in _FOR_DESCRIPTION


def _to_strict(schema: JSONSchema) -> JSONSchema:
    """Rewrite a self-contained schema for OpenAI's strict mode (FR-OPENAI-003; OpenAI guide "Structured Outputs").

    `{"type": "string", "enum": ["png"]}` of an optional property becomes
    `{"type": ["string", "null"], "enum": ["png", None]}`; every object requires all its properties and forbids others.
    `{"maxLength": 40, "default": "a", "description": "Where to look."}` becomes
    `{"description": "Where to look. (maxLength: 40, default: \"a\")"}`."""
    keywords: JSONSchema = {}
    limits: list[str] = []
    for keyword, value in schema.items():
        if _is_for_description(keyword, value):
            limits.append(f"{keyword}: {value if isinstance(value, str) else to_json(value).decode()}")
        elif keyword == "default" and "const" not in schema and value is not None and not is_valid(None, schema):
            limits.append(f"default: {to_json(value).decode()}")  # which it has where the model sends null
        elif keyword == "oneOf":
            keywords["anyOf"] = value
        elif keyword in CONSTRAINTS or keyword == "description":
            keywords[keyword] = value
    strict = map_subschemas(keywords, lambda inner, _: _to_strict(inner))
    if limits:
        strict["description"] = f"{schema.get('description', '')} ({', '.join(limits)})".lstrip()
    if "properties" in schema or "object" in types_of(schema):
        properties = properties_of(strict)
        for name, field in properties_of(schema).items():
            # A tag of a union has a default too, but pydantic cannot choose a branch by null.
            is_tag = "const" in field and field["const"] == field.get("default")
            if name not in schema.get("required", ()) and not is_tag:
                properties[name] = nullable(properties[name])
        strict |= {"properties": properties, "required": sorted(properties), "additionalProperties": False}
    return strict


def _suits(value: Any, schema: JSONSchema) -> bool:
    """Whether `value`, without what is in it, is of the types and the constants of `schema`."""
    types = types_of(schema)
    if types and not any(Draft202012Validator.TYPE_CHECKER.is_type(value, name) for name in types):
        return False
    if "const" in schema and value != schema["const"]:
        return False
    if "enum" in schema and value not in schema["enum"]:
        return False
    return value is not None or "not" not in schema or not is_valid(None, schema["not"])


def _drop_nulls(value: Any, schema: JSONSchema, in_union: bool = False) -> tuple[Any, bool]:
    """Undo strict mode in what a model wrote: copy `value` without the nulls that stand for absent properties, at every
    depth, and say whether `schema` accepts the copy.

    A schema is told from others by types, constants and names alone: a pattern, or a list of distinct items, can take a
    validator minutes, and the module's own validation follows anyway. Inside a union, reading stops at the first
    mismatch; outside, nobody asks for the answer. Each part of `value` is read once by each schema that may describe
    it: if the branch that fits were read again, the time would double with each nested union."""
    fits = _suits(value, schema)
    if in_union and not fits:
        return value, False
    if isinstance(value, dict | list):
        parts: dict[Any, Any] = {}
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            item_schemas = [*part_schemas([schema], step)]
            accepted = not item_schemas
            for item_schema in item_schemas:  # several where names have patterns: nothing tells which ones count
                item, item_fits = _drop_nulls(item, item_schema, in_union)
                accepted = accepted or item_fits
            if item is None and isinstance(value, dict) and not accepted:
                continue
            if in_union and not accepted:
                return value, False
            parts[step] = item
        if isinstance(value, dict):
            value = parts
            fits = fits and parts.keys() >= {*schema.get("required", ())}
        else:
            value = [*parts.values()]
    for inner in schema.get("allOf", ()):
        value, inner_fits = _drop_nulls(value, inner, in_union)
        fits = fits and inner_fits
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            value, inner_fits = _drop_nulls_in_union(value, schema, schema[keyword])
            fits = fits and inner_fits
    return value, fits


def _drop_nulls_in_union(value: Any, schema: JSONSchema, unions: list[JSONSchema]) -> tuple[Any, bool]:
    """Read `value` by the first of `unions`, the branches of a union inside `schema`, that accepts it and knows every
    name in it."""
    for branch in unions:
        if not isinstance(value, dict) or _knows(value, schema, branch):
            candidate, fits = _drop_nulls(value, branch, in_union=True)
            if fits:
                return candidate, True
    return value, False


def _knows(names: Iterable[str], schema: JSONSchema, branch: JSONSchema) -> bool:
    """Whether `branch`, one of a union inside `schema`, has every one of `names`: strict mode lets a model send no
    other. One that is no object's may have any."""
    unknown = {*names} - properties_of(schema).keys()
    is_closed = False
    for view in in_place(branch):
        unknown -= properties_of(view).keys()
        if not unknown or any(view.get(keyword, False) is not False for keyword in OTHER_PROPERTIES):
            return True
        is_closed = is_closed or bool(properties_of(view)) or "object" in types_of(view)
    return not is_closed


# ---- Definitions out ----


def to_openai_tools(
    registry_or_executor: Registry | Executor | APCore, *, embed_annotations: bool = False, strict: bool = False,
    tags: Sequence[str] | None = None, prefix: str | None = None, identity: Identity | None = None,
    search: bool = False,
) -> list[JSONObject]:  # fmt: skip
    """The modules as OpenAI tool definitions, plain dicts for `client.chat.completions.create(tools=...)`.

        [{"type": "function", "function": {"name": "image-resize", "description": "...", "parameters": {...}}}, ...]

    `embed_annotations` appends what an annotation says that is not the default to the description. `strict` adds
    `"strict": True` and rewrites the parameters for OpenAI's strict mode; a WARNING for each tool says where that mode
    cannot say what the module takes. `tags` (all of them) and `prefix` choose modules; with an `identity`, so does the
    ACL: only what it lets that caller call is offered. With `search` there are two functions in the place of all,
    `search_tools` and `call_tool`, for `run_openai_call(search=True)`; `call_tool` is never strict, as its arguments
    are open. A module that cannot be converted is left out with a WARNING. Raises TypeError for neither a Registry nor
    an Executor; ValueError for an empty tag or prefix, and for a module id with a hyphen, which nobody could tell from
    a dot. Source: FR-OPENAI-001 to -007.
    """
    options = options_of("to_openai_tools()", registry_or_executor, tags=tags, prefix=prefix, search=search)
    catalog = Catalog(options)
    with_hyphen = [module_id for module_id in catalog.tools if "-" in module_id]
    if with_hyphen:
        raise ValueError(f"Module ids must not contain hyphens, which stand for dots in names: {with_hyphen}")
    tools: Collection[Tool] = catalog.tools.values()
    lenient: Set[str] = set()
    if search:
        from .search import CALL_TOOL, SearchTools

        tools = SearchTools(catalog, options).tools.values()
        lenient = {CALL_TOOL}
    elif identity is not None:
        with ThreadPoolExecutor() as threads:  # the caller's own thread may run an event loop already
            tools = threads.submit(asyncio.run, catalog.offered(tools, identity)).result()
    functions = []
    for tool in tools:
        is_strict = strict and tool.module_id not in lenient
        functions.append(openai_function(tool, strict=is_strict, embed_annotations=embed_annotations))
    return functions


# ---- A model's calls in, and run ----

_SHORTENED = re.compile(r".{54}-0[0-9a-f]{8}")  # no segment of a module id starts with a digit


class _NotOffered(ValueError):
    """A model called a function that `to_openai_tools` does not offer."""


def from_openai_name(name: str, registry: Registry | None = None) -> str:
    """Turn an OpenAI function name back into the module id it was made from: `image-resize` into `image.resize`.

    A name that was shortened, for an id of more than 64 characters, needs the `registry` that it came from: ValueError
    without it, and when none of its modules has that name. Source: FR-OPENAI-002."""
    if not _SHORTENED.fullmatch(name):
        return name.replace("-", ".")
    if registry is not None:
        for module_id in registry.list():
            if portable_name(module_id) == name:
                return module_id
    raise _NotOffered(f"Function name {name!r} was shortened, and there is no registry that has its module")


def from_openai_call(
    registry_or_executor: Registry | Executor | APCore, name: str, arguments: str | JSONObject | None,
    *, tags: Sequence[str] | None = None, prefix: str | None = None, search: bool = False,
) -> tuple[str, JSONObject]:  # fmt: skip
    """Turn the call a model sent back into a module id and inputs that module accepts.

        >>> from_openai_call(registry, "image-resize", '{"width": 800, "format": null}')
        ('image.resize', {'width': 800})

    `arguments` is the JSON text that came with `name`, or the dict of it. Strict mode makes a model write `null` for
    what it leaves out, so a null that the module's own schema forbids is dropped, at every depth; one that it allows
    stays. Nothing is executed: `await executor.call_async(module_id, inputs)` does. `tags`, `prefix` and `search` are
    those that `to_openai_tools` had; with `search`, a `call_tool` becomes what it calls, and only `run_openai_call` can
    answer a `search_tools`. Source: FR-OPENAI-003; OpenAI guide "Structured Outputs". Raises TypeError for neither a
    Registry nor an Executor; ValueError when `arguments` is no JSON object, for an empty tag or prefix, and for a
    module that `to_openai_tools` would not have offered.
    """
    options = options_of("from_openai_call()", registry_or_executor, tags=tags, prefix=prefix, search=search)
    inputs = _read_arguments(name, arguments)
    catalog = Catalog(options)
    if search:
        from .search import SearchTools

        two = SearchTools(catalog, options)
        own, name, inputs = two.resolve(name, inputs)
        if own is not None:
            for fault in two.faults(name, inputs):
                where = f"{fault['field'] or '(root)'}: {fault['message']}"
                raise ValueError(f"Arguments of {name!r} are not valid: {where}")
            raise ValueError(f"{name!r} calls no module: run_openai_call() answers it")
    tool = _called_tool(catalog, options, name)
    return tool.module_id, _drop_nulls(inputs, tool.input_schema)[0]


def _read_arguments(name: str, arguments: str | JSONObject | None) -> JSONObject:
    inputs: Any = arguments
    if arguments is None or isinstance(arguments, str):  # Gemini gives none for a function without parameters
        inputs = from_json(arguments or "{}", allow_inf_nan=False)
    if not isinstance(inputs, dict):
        raise ValueError(f"Arguments of {name!r} must be a JSON object, got {type(inputs).__name__}")
    read: JSONObject = integral(inputs)
    return read


def _called_tool(catalog: Catalog, options: Options, name: str) -> Tool:
    """The tool that a model called by the name of its function; `_NotOffered` when `options` leave it out."""
    module_id = from_openai_name(name, options.registry)
    is_registered = module_id in options.registry.list(prefix=module_id)  # without what is hidden
    tool = catalog.build(module_id) if is_registered else None
    if tool is None:
        raise _NotOffered(f"to_openai_tools() offers no function {name!r}")
    return tool


class _FunctionRouter(ExecutionRouter):
    """Takes calls by the names of functions and with the arguments that a model wrote."""

    def find(self, name: str, arguments: JSONObject) -> tuple[Tool | None, JSONObject]:
        try:
            tool = _called_tool(self.catalog, self.options, name)
        except _NotOffered:
            return None, arguments
        return tool, _drop_nulls(arguments, tool.input_schema)[0]


# What the Responses API takes as pictures: any other one would cost the whole request.
_IMAGES = ("image/png", "image/jpeg", "image/webp", "image/gif")


def _part(file: JSONObject) -> JSONObject:
    """A file of a result as a content part of the Responses API: `{"type": "input_image", "image_url": "data:..."}`."""
    resource = file.get("resource", file)
    media_type = resource["mimeType"]
    url = f"data:{media_type};base64,{resource.get('blob') or resource.get('data')}"
    if media_type in _IMAGES:
        return {"type": "input_image", "image_url": url}
    if "blob" in resource:
        name = posixpath.basename(resource["uri"]) + (mimetypes.guess_extension(media_type) or "")
        return {"type": "input_file", "filename": name, "file_data": url}
    return {"type": "input_text", "text": resource.get("text") or f"[a file of type {media_type}]"}


@overload
async def run_openai_call(
    registry_or_executor: Registry | Executor | APCore, name: str, arguments: str | JSONObject | None,
    *, tags: Sequence[str] | None = None, prefix: str | None = None, identity: Identity | None = None,
    search: bool = False, approval: str | ApprovalHandler = "require", max_result: int = 6 * 2**20,
    content: Literal["text"] = "text",
) -> str: ...  # fmt: skip


@overload
async def run_openai_call(
    registry_or_executor: Registry | Executor | APCore, name: str, arguments: str | JSONObject | None,
    *, tags: Sequence[str] | None = None, prefix: str | None = None, identity: Identity | None = None,
    search: bool = False, approval: str | ApprovalHandler = "require", max_result: int = 6 * 2**20,
    content: Literal["parts"],
) -> list[JSONObject]: ...  # fmt: skip


async def run_openai_call(
    registry_or_executor: Registry | Executor | APCore, name: str, arguments: str | JSONObject | None,
    *, tags: Sequence[str] | None = None, prefix: str | None = None, identity: Identity | None = None,
    search: bool = False, approval: str | ApprovalHandler = "require", max_result: int = 6 * 2**20,
    content: Literal["text", "parts"] = "text",
) -> str | list[JSONObject]:  # fmt: skip
    """Run the call a model sent back, and return what to tell the model, as text or as a list of content parts.

        output = await run_openai_call(executor, call.function.name, call.function.arguments)

    That is the result as an MCP client gets it (JSON, redacted, ISO dates, base64), then each text file and a line for
    any other, or the plain sentence of the error, also for a function that was not offered. Nulls are dropped as by
    `from_openai_call`. `tags`, `prefix`, `identity` (the caller, to the ACL) and `search` are those that
    `to_openai_tools` had. There is nobody to ask for an approval: "require" and "deny" refuse a call that needs one,
    "auto" lets it run with a WARNING and "off" without one; an apcore `ApprovalHandler` decides itself, and so does the
    one that an Executor already has. A text of more than `max_result` bytes is an error (0: of any length). With
    `content="parts"`, for the Responses API, pictures and files are told as such (`input_image`, `input_file`). Raises
    TypeError and ValueError for wrong options, and nothing that a module raised."""
    if content not in ("text", "parts"):
        raise ValueError(f"content must be text or parts, got {content!r}")
    given: JSONObject = {"tags": tags, "prefix": prefix, "search": search, "approval": approval}
    options = options_of("run_openai_call()", registry_or_executor, **given, max_result=max_result)
    try:
        inputs = _read_arguments(name, arguments)
    except ValueError as error:
        result = tool_result(f"Invalid input: {error}")
    else:
        router = _FunctionRouter(Catalog(options), options)
        with installation(options.executor):
            result = await router.call(name, inputs, identity, Client(naming="portable"), structured=False)
    text, *files = result["content"]
    if content == "parts":
        return [{"type": "input_text", "text": text["text"]}, *map(_part, files)]
    lines = [text["text"]]
    for file in files:
        resource = file.get("resource", file)
        lines.append(resource.get("text") or f"[a file of type {resource['mimeType']}]")
    return "\n".join(lines)
