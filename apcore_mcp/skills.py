"""Folders that tell agents how to use the tools beside them (Agent Skills over MCP, SEP-2640).

It plugs into the server as an `Extension` of the MCP SDK: each file is a resource, and each skill is listed with the
digests of its files. Without it, tools are served alone.
"""

from __future__ import annotations

import hashlib
import mimetypes
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml
from mcp.server.extension import Extension, MethodBinding, ResourceBinding
from mcp.server.mcpserver.resources import Resource
from mcp_types import RequestParams
from pydantic import BaseModel, Field

from .client import MODERN, protocol_error
from .core import FRESH, SKILLS_EXTENSION, warn
from .schemas import JSONObject, plain_json

_HIDDEN = re.compile(r"(^|/)(\.|__pycache__)")  # names of files that no skill is about


class FrontMatter(BaseModel, strict=True):
    """What Agent Skills say of the YAML at the beginning of a `SKILL.md`; other fields are free."""

    name: str = Field(max_length=64, pattern="^[a-z0-9]+(-[a-z0-9]+)*$")
    description: str = Field(max_length=1024, pattern=r"\S")
    license: str = ""
    compatibility: str = Field("", min_length=1, max_length=500)
    metadata: dict[str, Any] = {}
    allowed_tools: str | list[str] = Field("", alias="allowed-tools")


class _File(Resource):
    """A file of a skill, sent as text where that keeps every byte."""

    content: bytes

    async def read(self) -> str | bytes:
        text = self.content.decode(errors="replace")
        return text if text.encode() == self.content else self.content


class Skills(Extension):
    """The skills in a folder, each a folder of its own name: their files, as they were when they were read.

    One that breaks the specification is left out with a WARNING, and the others are served. With `dynamic`, the files
    are read again whenever somebody asks. Event loop only."""

    identifier = SKILLS_EXTENSION

    def __init__(self, folder: str | Path, dynamic: bool) -> None:
        self._folder = Path(folder).resolve()
        self._dynamic = dynamic
        self.left_out: list[str] = []  # as the WARNINGs say it
        self._read()

    def methods(self) -> list[MethodBinding]:
        handlers = {"skills/list": self._list, "skills/get": self._get}
        return [MethodBinding(name, RequestParams, handler, frozenset({MODERN})) for name, handler in handlers.items()]

    def resources(self) -> list[ResourceBinding]:
        self.skills()
        return [*map(ResourceBinding, self._files)]

    def skills(self) -> dict[str, JSONObject]:
        """What is listed of each skill, by the URI of its `SKILL.md`."""
        if self._dynamic:
            self._read()
        return self._skills

    async def _list(self, ctx: Any, params: object) -> JSONObject:
        return {"skills": [*self.skills().values()], **FRESH}

    async def _get(self, ctx: Any, params: object) -> JSONObject:
        skill = self.skills().get(str((ctx.params or {}).get("uri")))
        if skill is None:
            raise protocol_error(-32602, "No skill is served at this URI")
        return {"skill": skill, **FRESH}

    def _read(self) -> None:
        self._skills: dict[str, JSONObject] = {}
        self._files: list[_File] = []
        for folder in sorted(self._folder.glob("[!._]*/")):
            try:
                self._add(folder)
            except Exception as error:  # one bad skill never takes the others down
                text = f"skill {folder} is left out: {' '.join(str(error).split())}"
                if text not in self.left_out:
                    warn(text, self.left_out)

    def _add(self, folder: Path) -> None:
        """Add the skill of a folder, or raise what is wrong with it."""
        about = _front_matter(folder / "SKILL.md")
        files = [_file(path, folder, about) for path in _paths(folder, self._folder)]
        uri = f"skill://{about['name']}/SKILL.md"
        self._skills[uri] = {"uri": uri, "frontmatter": about, "resources": [*map(_listed, files)]}
        self._files += files


def _front_matter(path: Path) -> JSONObject:
    """The YAML at the beginning of a `SKILL.md`, as JSON. ValueError where it breaks the rules."""
    found = re.match(r"---\r?\n(.*?)\r?\n---(\r?\n|\Z)", path.read_bytes().decode("utf-8-sig"), re.DOTALL)
    front_matter: JSONObject = plain_json(yaml.safe_load(found[1] if found else ""))
    if FrontMatter.model_validate(front_matter).name != path.parent.name:
        raise ValueError(f"its name is {front_matter['name']!r}, and not that of its folder")
    return front_matter


def _paths(folder: Path, top: Path) -> list[Path]:
    """The files of a skill. ValueError for too much, for a link out of `top`, and for one to a folder, below which
    nobody looks."""
    paths = [path for path in sorted(folder.rglob("*")) if not _HIDDEN.search(path.relative_to(folder).as_posix())]
    for path in paths:
        if not path.resolve().is_relative_to(top) or (path.is_symlink() and path.is_dir()):
            raise ValueError(f"{path} is a link out of {top}, or to a folder")
    files = [*filter(Path.is_file, paths)]
    # So much every client takes, by the specification.
    if len(files) > 512 or sum(path.stat().st_size for path in files) > 16 * 2**20:
        raise ValueError("it has more than 512 files or 16 MiB")
    return files


def _file(path: Path, folder: Path, about: JSONObject) -> _File:
    name = path.relative_to(folder).as_posix()
    # The file that is read first bears the name and the description of its skill.
    is_first = name == "SKILL.md"
    described: JSONObject = {key: about[key] for key in ("name", "description")} if is_first else {"name": name}
    uri = f"skill://{folder.name}/{quote(name)}"
    media_type = mimetypes.guess_type(name)[0] or "application/octet-stream"
    return _File(uri=uri, mime_type=media_type, content=path.read_bytes(), **described)


def _listed(file: _File) -> JSONObject:
    return {"uri": file.uri, "digest": f"sha256:{hashlib.sha256(file.content).hexdigest()}", "size": len(file.content)}
