"""Find files below one folder, by name and date."""

import asyncio
import os
from collections.abc import Iterator
from datetime import UTC, date, datetime
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import Any

from apcore import Context, InvalidInputError, ModuleAnnotations, ModuleExample
from pydantic import BaseModel, ConfigDict, Field

ROOT = Path(os.environ.get("FILES_FIND_ROOT") or Path(__file__).parents[1]).resolve()


class FindInput(BaseModel):
    model_config = ConfigDict(extra="forbid")

    pattern: str = Field(min_length=1, max_length=200, description="File name with wildcards * and ?, such as *.py.")
    folder: str = Field(
        default=".",
        max_length=1000,
        description="Folder to search, relative to the shared folder; . is all of it.",
    )
    changed_since: date | None = Field(default=None, description="Only files changed on this day (UTC) or later.")
    limit: int = Field(default=50, ge=1, le=500, description="How many paths to return at most.")


class FindOutput(BaseModel):
    paths: list[str] = Field(description="The files found, relative to the shared folder, folder by folder.")
    truncated: bool = Field(description="Whether there are more files than the limit.")


def matches(folder: Path, args: FindInput) -> Iterator[str]:
    for directory, subdirectories, names in os.walk(folder):
        subdirectories[:] = sorted(name for name in subdirectories if not name.startswith((".", "__pycache__")))
        for name in sorted(names):
            path = Path(directory, name)
            if fnmatchcase(name, args.pattern) and (
                args.changed_since is None
                or datetime.fromtimestamp(path.lstat().st_mtime, UTC).date() >= args.changed_since
            ):
                yield path.relative_to(ROOT).as_posix()


def find(args: FindInput) -> FindOutput:
    folder = (ROOT / args.folder).resolve()
    if not folder.is_relative_to(ROOT) or not folder.is_dir():
        raise InvalidInputError(f"no such folder: {args.folder}")
    paths = list(islice(matches(folder, args), args.limit + 1))
    return FindOutput(paths=paths[: args.limit], truncated=len(paths) > args.limit)


class FindFiles:
    name = "Find files"
    description = "List the files below the shared folder whose name fits a pattern and which changed lately."
    documentation = """\
Searches the folder these extensions are in, or the one in the environment variable `FILES_FIND_ROOT`.
Nothing outside of it can be seen: a `folder` that leads elsewhere, also by a symbolic link, is refused.
Hidden folders are not searched.
"""
    tags = ["files", "search"]
    annotations = ModuleAnnotations(readonly=True, idempotent=True)
    input_schema = FindInput
    output_schema = FindOutput
    examples = [
        ModuleExample(
            title="The bindings among the examples",
            inputs={"pattern": "*.binding.yaml"},
            output={"paths": ["notes/notes.binding.yaml", "text/slugify.binding.yaml"], "truncated": False},
        )
    ]

    async def execute(self, inputs: dict[str, Any], context: Context[Any]) -> dict[str, Any]:
        result = await asyncio.to_thread(find, FindInput.model_validate(inputs))
        return result.model_dump()
