"""The way back of a model's calls: what OpenAI's API returned, as a module's inputs, or run.

It plugs into `core.py`: a function's name becomes the tool that `to_openai_tools()` made it of, and a call goes through
the router. Without it, definitions can be made, and nothing reads what a model does with them.
"""

from __future__ import annotations

import mimetypes
import posixpath
import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast, overload

from apcore import APCore, Executor, Registry
from apcore.approval import ApprovalHandler
from apcore.context import Identity
from jsonschema import Draft202012Validator
from pydantic_core import from_json

from .core import Call, Catalog, ExecutionRouter, Options, Tool, installation, options_of, portable_name
from .schemas import (
    OTHER_PROPERTIES,
    JSONObject,
    JSONSchema,
    in_place,
    integral,
    is_valid,
    part_schemas,
    properties_of,
    types_of,
)

__all__ = ["from_openai_call", "from_openai_name", "run_openai_call"]

_SHORTENED = re.compile(r".{54}-0[0-9a-f]{8}")  # no segment of a module id starts with a digit


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
    registry_or_executor: Registry | Executor | APCore, name: str, arguments: str | JSONObject,
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
        from .search import CALL_TOOL, SEARCH_TOOLS, SearchTools, target_of

        if name == SEARCH_TOOLS:
            raise ValueError(f"{name!r} calls no module: run_openai_call() answers it")
        if name == CALL_TOOL:
            for fault in SearchTools(catalog, options).faults(name, inputs):
                where = f"{fault['field'] or '(root)'}: {fault['message']}"
                raise ValueError(f"Arguments of {name!r} are not valid: {where}")
            name, inputs = target_of(inputs)
    tool = _called_tool(catalog, options, name)
    return tool.module_id, _drop_nulls(inputs, tool.input_schema)[0]


def _read_arguments(name: str, arguments: str | JSONObject) -> JSONObject:
    inputs = from_json(arguments or "{}", allow_inf_nan=False) if isinstance(arguments, str) else arguments
    if not isinstance(inputs, dict):
        raise ValueError(f"Arguments of {name!r} must be a JSON object, got {type(inputs).__name__}")
    return cast(JSONObject, integral(inputs))


def _called_tool(catalog: Catalog, options: Options, name: str) -> Tool:
    """The tool that a model called by the name of its function; `_NotOffered` when `options` leave it out."""
    module_id = from_openai_name(name, options.registry)
    is_registered = module_id in options.registry.list(prefix=module_id)  # without what is hidden
    tool = catalog.build(module_id) if is_registered else None
    if tool is None:
        raise _NotOffered(f"to_openai_tools() offers no function {name!r}")
    return tool


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
    registry_or_executor: Registry | Executor | APCore, name: str, arguments: str | JSONObject,
    *, tags: Sequence[str] | None = None, prefix: str | None = None, identity: Identity | None = None,
    search: bool = False, approval: str | ApprovalHandler = "require", max_result: int = 6 * 2**20,
    content: Literal["text"] = "text",
) -> str: ...  # fmt: skip


@overload
async def run_openai_call(
    registry_or_executor: Registry | Executor | APCore, name: str, arguments: str | JSONObject,
    *, tags: Sequence[str] | None = None, prefix: str | None = None, identity: Identity | None = None,
    search: bool = False, approval: str | ApprovalHandler = "require", max_result: int = 6 * 2**20,
    content: Literal["parts"],
) -> list[JSONObject]: ...  # fmt: skip


async def run_openai_call(
    registry_or_executor: Registry | Executor | APCore, name: str, arguments: str | JSONObject,
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

    def told(text: str) -> str | list[JSONObject]:
        return text if content == "text" else [{"type": "input_text", "text": text}]

    given: JSONObject = {"tags": tags, "prefix": prefix, "search": search, "approval": approval}
    options = options_of("run_openai_call()", registry_or_executor, **given, max_result=max_result)
    catalog = Catalog(options)
    router = ExecutionRouter(catalog, options)
    try:
        inputs = _read_arguments(name, arguments)
    except ValueError as error:
        return told(f"Invalid input: {error}")
    if router.search is not None and name in router.search.tools:
        from .search import target_of

        answer = await router.find(name, inputs, identity, "portable")
        if answer is not None:
            return told(answer["content"][0]["text"])
        name, inputs = target_of(inputs)
    try:
        tool = _called_tool(catalog, options, name)
    except _NotOffered:
        return told(router.not_found(name, identity)["content"][0]["text"])
    with installation(options.executor):
        inputs = _drop_nulls(inputs, tool.input_schema)[0]
        result = await router.run(Call(tool, inputs, identity, router, structured=False))
    text, *files = result["content"]
    if content == "parts":
        return [{"type": "input_text", "text": text["text"]}, *map(_part, files)]
    lines = [text["text"]]
    for file in files:
        resource = file.get("resource", file)
        lines.append(resource.get("text") or f"[a file of type {resource['mimeType']}]")
    return "\n".join(lines)
