"""Folders that tell agents how to use the tools beside them (Agent Skills over MCP, SEP-2640).

It plugs into the server as an `Extension` of the MCP SDK: each file is a resource, and each skill is listed with the
digests of its files. Without it, tools are served alone.
"""

from __future__ import annotations

import hashlib
import mimetypes
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from mcp.server.extension import Extension, MethodBinding, ResourceBinding
from mcp.server.mcpserver.resources import BinaryResource, Resource, TextResource
from mcp_types import PaginatedRequestParams, RequestParams
from pydantic import BaseModel, Field, ValidationError

from .core import MODERN, SKILLS_EXTENSION, logger, one_line, protocol_error
from .schemas import JSONObject, plain_json

__all__ = ["Skills"]

_FILES_MAX = 512  # of a skill: what every client takes, by the specification
_BYTES_MAX = 16 * 2**20
_LOOK_SECONDS = 0.5  # between two looks at the files
_FRESH = {"resultType": "complete", "ttlMs": 0, "cacheScope": "private"}
_FRONT_MATTER = re.compile(r"---\r?\n(.*?)\r?\n---(\r?\n|\Z)", re.DOTALL)


class _FrontMatter(BaseModel, strict=True):
    """What the Agent Skills specification says of the YAML in front of a `SKILL.md`; other fields are free."""

    name: str = Field(max_length=64, pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")
    description: str = Field(max_length=1024, pattern=r"\S")
    license: str = ""
    compatibility: str = Field("", min_length=1, max_length=500)
    metadata: dict[str, Any] = {}
    allowed_tools: str | list[str] = Field("", alias="allowed-tools")


class _GetParams(RequestParams):
    uri: str


class Skills(Extension):
    """The skills in a folder: each folder in it with a `SKILL.md` is one, from its files as they were when last read.

    One that breaks the specification is left out with a WARNING, and the others are served. With `dynamic`, the files
    are read again when somebody asks, twice a second at most. Event loop only."""

    identifier = SKILLS_EXTENSION

    def __init__(self, folder: str | Path, dynamic: bool) -> None:
        self._folder = Path(folder).resolve()
        self._dynamic = dynamic
        self.left_out: list[str] = []  # as the WARNINGs say it
        self._read_files()

    def methods(self) -> Sequence[MethodBinding]:
        versions = frozenset({MODERN})
        return [
            MethodBinding("skills/list", PaginatedRequestParams, self._list, versions),
            MethodBinding("skills/get", _GetParams, self._get, versions),
        ]

    def resources(self) -> Sequence[ResourceBinding]:
        self._follow()
        return [*map(ResourceBinding, self._resources.values())]

    async def _list(self, ctx: Any, params: object) -> JSONObject:
        self._follow()
        return {"skills": [*self.entries.values()], **_FRESH}

    async def _get(self, ctx: Any, params: _GetParams) -> JSONObject:
        self._follow()
        if params.uri not in self.entries:
            raise protocol_error(-32602, f"No skill is served at {params.uri}", {"uri": params.uri})
        return {"skill": self.entries[params.uri], **_FRESH}

    def _follow(self) -> None:
        if self._dynamic and time.monotonic() - self._read_at >= _LOOK_SECONDS:
            self._read_files()

    def _read_files(self) -> None:
        before = self.left_out
        self.left_out = []
        self.entries: dict[str, JSONObject] = {}  # by the URIs of their `SKILL.md`
        self._resources: dict[str, Resource] = {}  # by URI
        for folder in sorted(self._folder.glob("*/")):
            if folder.name.startswith((".", "_")):
                continue
            try:
                self._add(folder)
            except Exception as error:  # one bad skill never takes the others down
                text = one_line(f"skill {folder} is left out: {' '.join(str(error).split())}")
                self.left_out.append(text)
                if text not in before:
                    logger.warning("%s", text)
        self._read_at = time.monotonic()

    def _add(self, folder: Path) -> None:
        """Add the skill in a folder, whole or not at all."""
        files = {path.relative_to(folder).as_posix(): path for path in self._files_of(folder)}
        if "SKILL.md" not in files:
            raise ValueError("it has no SKILL.md")
        if len(files) > _FILES_MAX or sum(path.stat().st_size for path in files.values()) > _BYTES_MAX:
            raise ValueError(f"it has more than {_FILES_MAX} files or {_BYTES_MAX // 2**20} MiB")
        contents = {name: path.read_bytes() for name, path in files.items()}
        front_matter = _front_matter(contents["SKILL.md"], folder.name)
        manifest = []
        resources = {}
        for name, content in contents.items():
            uri = f"skill://{folder.name}/{quote(name)}"
            digest = hashlib.sha256(content).hexdigest()
            manifest.append({"uri": uri, "digest": f"sha256:{digest}", "size": len(content)})
            resources[uri] = _resource(uri, name, content)
        uri = f"skill://{folder.name}/SKILL.md"
        about = {name: front_matter[name] for name in ("name", "description")}
        resources[uri] = resources[uri].model_copy(update={**about, "mime_type": "text/markdown"})
        self.entries[uri] = {"uri": uri, "frontmatter": front_matter, "resources": manifest}
        self._resources |= resources

    def _files_of(self, folder: Path) -> Iterator[Path]:
        """The files of a skill but for hidden ones and Python's cache. ValueError for a link to elsewhere."""
        for path in sorted(folder.rglob("*")):
            parts = path.relative_to(folder).parts
            if "__pycache__" in parts or any(part.startswith(".") for part in parts):
                continue
            # What is below a linked folder, nobody looks at.
            if not path.resolve().is_relative_to(self._folder) or (path.is_symlink() and path.is_dir()):
                raise ValueError(f"{path} is a link out of {self._folder}, or to a folder")
            if path.is_file():
                yield path


def _front_matter(content: bytes, folder_name: str) -> JSONObject:
    """The YAML in front of a `SKILL.md`, as JSON. ValueError where it breaks the rules."""
    found = _FRONT_MATTER.match(content.decode("utf-8-sig"))
    if found is None:
        raise ValueError("its SKILL.md does not begin with YAML between two lines ---")
    front_matter: JSONObject = plain_json(yaml.safe_load(found[1]))
    try:
        name = _FrontMatter.model_validate(front_matter).name
    except ValidationError as error:
        fault = error.errors()[0]
        raise ValueError(f"its {'.'.join(map(str, fault['loc'])) or 'front matter'}: {fault['msg']}") from None
    if name != folder_name:
        raise ValueError(f"its name is {name!r}, and not that of its folder")
    return front_matter


def _resource(uri: str, name: str, content: bytes) -> Resource:
    """A file as a resource: text where that keeps every byte, or else base64."""
    media_type, compression = mimetypes.guess_type(name)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        if media_type is None or compression:
            media_type = "application/octet-stream"
        return BinaryResource(uri=uri, name=name, mime_type=media_type, data=content)
    return TextResource(uri=uri, name=name, mime_type=media_type or "text/plain", text=text)
