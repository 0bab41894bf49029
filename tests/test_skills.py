"""Skills beside the tools (SEP-2640): real folders, real servers and the SDK's client in both eras."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import pytest
from conftest import HANDSHAKE, MODERN, ROOT, client_of, command, connect, echo, registry_of, stdio
from mcp import MCPError
from mcp.client import Client
from mcp.server.extension import Extension, ResourceBinding, ToolBinding
from mcp.server.mcpserver.resources import FunctionResource, TextResource
from mcp_types import PaginatedRequestParams, Request, RequestParams, Result
from support import messages_logged, run

from apcore_mcp import discover, serve
from apcore_mcp.__main__ import main

ID = "io.modelcontextprotocol/skills"


def front(name: str, more: str = "description: d") -> str:
    return f"---\nname: {name}\n{more}\n---\nDo it.\n"


def write(folder: Path, **files: str | bytes) -> Path:
    """A skill in a folder of its name: `SKILL.md` and the files below it, by their names."""
    about = front(folder.name, f"description: Use it for {folder.name}.")
    for name, content in {"SKILL.md": about, **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


class _ListSkills(Request[PaginatedRequestParams, Literal["skills/list"]]):
    method: Literal["skills/list"] = "skills/list"
    params: PaginatedRequestParams = PaginatedRequestParams()


class _GetParams(RequestParams):
    uri: str


class _GetSkill(Request[_GetParams, Literal["skills/get"]]):
    method: Literal["skills/get"] = "skills/get"
    params: _GetParams


class _Answer(Result, extra="allow"):
    pass


async def listed(client: Client) -> dict[str, dict[str, Any]]:
    """The entries of all skills, by URI."""
    answer: Any = await client.session.send_request(_ListSkills(), _Answer)
    assert (answer.ttlMs, answer.cacheScope, answer.resultType) == (0, "private", "complete")
    return {entry["uri"]: entry for entry in answer.skills}


async def got(client: Client, uri: str) -> dict[str, Any]:
    answer: Any = await client.session.send_request(_GetSkill(params=_GetParams(uri=uri)), _Answer)
    return dict(answer.skill)


async def content_of(client: Client, uri: str) -> bytes:
    (content,) = (await client.read_resource(uri)).contents
    assert content.uri == uri
    text = getattr(content, "text", None)
    return base64.b64decode(content.blob) if text is None else text.encode()  # type: ignore[union-attr]


async def test_every_file_of_a_skill_is_what_its_digest_says(tmp_path: Path, mode: str) -> None:
    """Bytes stay: line ends, a mark at the beginning, other encodings. In both eras the files are resources."""
    text = front("on-windows", "description: d\nmetadata: {version: 1.0, day: 2026-03-02}")
    windows = b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode()
    types = {"a b/n\u00e9w #1?.md": "text/markdown", "latin.txt": "text/plain", "p.png": "image/png"}
    write(tmp_path / "first", **dict.fromkeys(types, b"caf\xe9"), e="")
    write(tmp_path / "on-windows", **{"SKILL.md": windows, ".env": "S3CR3T", "__pycache__/a.pyc": b"\xff"})
    (tmp_path / "README.md").write_text("no skill")
    chosen = "auto" if mode == MODERN else mode  # which asks the server what it can do
    async with connect({"m.a": echo}, mode=chosen, skills=tmp_path) as client:
        resources = {resource.uri: resource for resource in (await client.list_resources()).resources}
        extensions = client.server_capabilities.extensions or {}
        assert (ID in extensions) == (mode == MODERN)
        if mode == HANDSHAKE:
            with pytest.raises(MCPError, match="Method not found"):
                await listed(client)
        else:
            skills = await listed(client)
            assert extensions[ID] == {}
            assert [*skills] == ["skill://first/SKILL.md", "skill://on-windows/SKILL.md"]
            assert [await got(client, uri) for uri in skills] == [*skills.values()]
            about = {"name": "on-windows", "description": "d", "metadata": {"version": 1.0, "day": "2026-03-02"}}
            assert skills["skill://on-windows/SKILL.md"]["frontmatter"] == about
            manifest = [file for skill in skills.values() for file in skill["resources"]]
            for file in manifest:
                content = await content_of(client, file["uri"])
                assert file["size"] == len(content)
                assert file["digest"] == f"sha256:{hashlib.sha256(content).hexdigest()}"
            assert {file["uri"] for file in manifest} == resources.keys()
        assert await content_of(client, "skill://on-windows/SKILL.md") == windows
        assert await content_of(client, "skill://first/a%20b/n%C3%A9w%20%231%3F.md") == b"caf\xe9"
        with pytest.raises(MCPError) as missing:
            await client.read_resource("skill://on-windows/.env")
    assert missing.value.error.code == (-32602 if mode == MODERN else -32002)
    first = resources["skill://first/SKILL.md"]
    assert (first.name, first.description, first.mime_type) == ("first", "Use it for first.", "text/markdown")
    types |= {"e": "application/octet-stream"}
    assert types.items() <= {resource.name: resource.mime_type for resource in resources.values()}.items()


BROKEN: dict[str, tuple[str | bytes, str]] = {
    "no-front-matter": ("# Do it\n", "for FrontMatter"),
    "no-yaml": (front("["), "while parsing"),
    "no-mapping": ("---\n- name\n---\n", "for FrontMatter"),
    "no-description": (front("no-description", ""), "description Field required"),
    "blank-description": (front("blank-description", "description: ' '"), "FrontMatter description"),
    "long-description": (front("long-description", f"description: {'d' * 1025}"), "FrontMatter description"),
    "other-name": (front("another-name"), "its name is 'another-name'"),
    "Large": (front("Large"), "FrontMatter name"),
    "two--hyphens": (front("two--hyphens"), "FrontMatter name"),
    "null-license": (front("null-license", "description: d\nlicense:"), "FrontMatter license"),
    "one-tool": (front("one-tool", "description: d\nallowed-tools: 1"), "allowed-tools"),
    "not-a-number": (front("not-a-number", "description: d\nmetadata: {v: .nan}"), "expected value"),
    "utf-16": (front("utf-16").encode("utf-16"), "utf-8"),
}
"""The `SKILL.md` of what breaks the rules, by the name of its folder, and a word that the reason has to say."""
ODD = {
    "too-many": "more than 512 files",
    "too-large": "16 MiB",
    "file-elsewhere": "is a link",
    "folder-elsewhere": "is a link",
    "folder-beside": "to a folder",
    "linked": "is a link",
    "without": "No such file",
}
"""Folders with a good `SKILL.md`, or none."""


def write_odd(skills: Path) -> None:
    for name in ODD.keys() - {"linked"}:
        write(skills / name)
    for number in range(512):
        (skills / "too-many" / f"f{number}").touch()
    with (skills / "too-large" / "large").open("wb") as file:
        file.truncate(16 * 2**20)
    (skills / "file-elsewhere" / "passwd").symlink_to(__file__)
    (skills / "folder-elsewhere" / "references").symlink_to(ROOT, target_is_directory=True)
    (skills / "folder-beside" / "references").symlink_to(skills / "good", target_is_directory=True)
    (skills / "linked").symlink_to(write(skills.parent / "elsewhere" / "linked"), target_is_directory=True)
    (skills / "without" / "SKILL.md").unlink()
    (skills / "without" / "other").touch()


def test_a_broken_skill_is_left_out_by_name_and_the_check_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    skills = tmp_path / "skills"
    write(skills / "good")
    for name, (text, _) in BROKEN.items():
        write(skills / name, **{"SKILL.md": text})
    write_odd(skills)
    assert main(command("--check", "--skills", str(skills))[3:]) == 1
    told = "".join(capfd.readouterr())
    words = {**{name: word for name, (_, word) in BROKEN.items()}, **ODD}
    assert f"18 tools would be served, {len(words)} left out" in told
    assert [line for line in told.splitlines() if "://" in line] == ["skill://good/SKILL.md"]
    for name, word in words.items():
        (line,) = [line for line in messages_logged(caplog) if f"skill {skills / name} is left out: " in line]
        assert word in line, name
    assert main(command("--check", "--skills", str(ROOT / "examples" / "skills"))[3:]) == 0


@pytest.mark.parametrize("dynamic", [False, True])
async def test_changed_files_are_followed_with_dynamic(
    dynamic: bool, tmp_path: Path, extensions: Path, caplog: pytest.LogCaptureFixture
) -> None:
    skills = tmp_path / "skills"
    first = write(skills / "first")
    async with connect(discover(extensions), dynamic=dynamic, skills=skills) as client:
        before = await listed(client)
        write(skills / "second")
        (skills / "bad").mkdir()
        (first / "SKILL.md").write_text(front("first", "description: anew"))
        (skill, *others) = (await listed(client)).values()
        assert len(others) == dynamic
        for file in skill["resources"]:
            assert f"sha256:{hashlib.sha256(await content_of(client, file['uri'])).hexdigest()}" == file["digest"]
        if dynamic:
            assert skill["frontmatter"]["description"] == "anew"
            (first / "SKILL.md").unlink()
            assert [*await listed(client)] == ["skill://second/SKILL.md"]
        else:
            assert await listed(client) == before
    left_out = [text for text in messages_logged(caplog) if "left out" in text]
    assert len([text for text in left_out if "bad" in text]) == dynamic, "once"


def test_a_folder_without_skills_is_an_error_at_the_start(tmp_path: Path) -> None:
    for folder in (tmp_path / "missing", write(tmp_path / "itself")):
        with pytest.raises(ValueError, match="skills must be a directory of folders"):
            serve(registry_of(), skills=str(folder))


async def test_no_skill_is_served_at_another_uri(tmp_path: Path) -> None:
    write(tmp_path / "first", other="x")
    async with connect({}, skills=tmp_path) as client:
        for uri in ("skill://second/SKILL.md", "skill://first/other", "skill://first/../first/SKILL.md"):
            with pytest.raises(MCPError, match="No skill is served at this URI") as refused:
                await got(client, uri)
            assert refused.value.error.code == -32602


async def test_an_exported_entry_has_the_folder_that_was_meant(tmp_path: Path) -> None:
    write(tmp_path / "skills" / "first")
    given = [*command()[3:], "--skills", "skills"]
    ended = run(*given, "--export", "client", cwd=tmp_path)
    entry = json.loads(ended.stdout)["mcpServers"]["apcore-mcp"]
    async with client_of(stdio([entry["command"], *entry["args"]], **entry["env"])) as client:
        assert [*await listed(client)] == ["skill://first/SKILL.md"]


# ---- Other extensions ----


class _Adding(Extension):
    identifier = "com.example/adding"

    def __init__(self, *resources: Any, tools: Any = ()) -> None:
        self._resources = resources
        self._tools = tools

    def resources(self) -> Any:
        return [*map(ResourceBinding, self._resources)]

    def tools(self) -> Any:
        return self._tools


def unreadable() -> str:
    raise OSError("S3CR3T")


async def test_the_resources_of_an_extension_are_listed_and_read(mode: str) -> None:
    text = TextResource(uri="x://text", title="A text", mime_type="text/x", text="hello", meta={"a/b": 1})
    broken = FunctionResource(uri="x://broken", fn=unreadable)
    async with connect({"m.a": echo}, mode=mode, mcp_extensions=[_Adding(text, broken)]) as client:
        first, second = (await client.list_resources()).resources
        assert (first.uri, first.title, first.mime_type, first.meta) == ("x://text", "A text", "text/x", {"a/b": 1})
        assert second.uri == "x://broken"
        assert await content_of(client, "x://text") == b"hello"
        with pytest.raises(MCPError) as failed:
            await client.read_resource("x://broken")
    assert "S3CR3T" not in str(failed.value)


async def test_an_extension_with_tools_is_refused() -> None:
    with pytest.raises(ValueError, match="adding brings tools"):
        async with connect({}, mcp_extensions=[_Adding(tools=[ToolBinding(echo)])]):
            pass
