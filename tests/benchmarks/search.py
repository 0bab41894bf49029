"""How well `search_tools` finds, on a catalog that nobody here wrote: the operations of GitHub's REST API.

python -m tests.benchmarks.search              how often, beside FastMCP's BM25SearchTransform
python -m tests.benchmarks.search --misses     and what is found instead of the right tool

The catalog comes from the package `@octokit/openapi` of npm, and FastMCP into an environment of its own, both in the
cache of `tests.interop`. Both search the same names, descriptions and parameters, over MCP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import tarfile
from typing import Any

from apcore import Registry
from mcp.client import Client

from apcore_mcp import MCPServer
from tests.interop.programs import CACHE, python_of, run, version_in

PACKAGE, VERSION = "@octokit/openapi", "23.0.2"
METHODS = ("get", "put", "post", "delete", "patch")
QUESTIONS = {
    "open a new issue in a repository": "issues/create",
    "close an issue": "issues/update",
    "comment on an issue": "issues/create-comment",
    "who is assigned to issues: give this issue to alice": "issues/add-assignees",
    "put the label bug on an issue": "issues/add-labels issues/set-labels",
    "lock the conversation of an issue": "issues/lock",
    "list the milestones of a repo": "issues/list-milestones",
    "edit my comment on an issue": "issues/update-comment",
    "show all open pull requests": "pulls/list",
    "merge a pull request": "pulls/merge",
    "which files does this pull request change": "pulls/list-files",
    "request a review from two people on a PR": "pulls/request-reviewers",
    "approve a pull request": "pulls/create-review pulls/submit-review",
    "create a pull request from a branch": "pulls/create",
    "bring a pull request branch up to date with its base": "pulls/update-branch",
    "reply to a review comment": "pulls/create-reply-for-review-comment",
    "list branches": "repos/list-branches",
    "rename a branch": "repos/rename-branch",
    "protect the main branch": "repos/update-branch-protection",
    "read a file from a repository": "repos/get-content",
    "commit a file: write its contents to the repo": "repos/create-or-update-file-contents",
    "delete a file in a repository": "repos/delete-file",
    "get the README of a project": "repos/get-readme repos/get-readme-in-directory",
    "fork a repository": "repos/create-fork",
    "make a new private repository for me": "repos/create-for-authenticated-user",
    "delete a repository": "repos/delete",
    "compare two commits": "repos/compare-commits-with-basehead",
    "latest release of a project": "repos/get-latest-release",
    "publish a release": "repos/create-release repos/update-release",
    "upload a binary to a release": "repos/upload-release-asset",
    "invite somebody as a collaborator": "repos/add-collaborator",
    "what languages is this repo written in": "repos/list-languages",
    "how many people visited the repository": "repos/get-views",
    "add a webhook to a repository": "repos/create-webhook",
    "redeliver a failed webhook delivery of a repository": "repos/redeliver-webhook-delivery",
    "add a deploy key": "repos/create-deploy-key",
    "transfer a repository to another owner": "repos/transfer",
    "replace all topics of a repository": "repos/replace-all-topics",
    "who contributed to this project": "repos/list-contributors",
    "trigger a workflow by hand": "actions/create-workflow-dispatch",
    "cancel a workflow run": "actions/cancel-workflow-run",
    "re-run only the failed jobs of a workflow run": "actions/re-run-workflow-failed-jobs",
    "download the logs of a job": "actions/download-job-logs-for-workflow-run",
    "list build artifacts of a run": "actions/list-workflow-run-artifacts",
    "store a secret for GitHub Actions in a repository": "actions/create-or-update-repo-secret",
    "remove a self-hosted runner from the organization": "actions/delete-self-hosted-runner-from-org",
    "free up space: delete caches of actions": "actions/delete-actions-cache-by-key actions/delete-actions-cache-by-id",
    "search code for a function name": "search/code",
    "find users by their location": "search/users",
    "find issues about memory leaks across all of GitHub": "search/issues-and-pull-requests",
    "star a repository": "activity/star-repo-for-authenticated-user",
    "mark all notifications as read": "activity/mark-notifications-as-read",
    "watch a repository": "activity/set-repo-subscription",
    "create a gist": "gists/create",
    "follow a user": "users/follow",
    "block a user from our organization": "orgs/block-user",
    "list members of an organization": "orgs/list-members",
    "add a person to a team": "teams/add-or-update-membership-for-user-in-org",
    "dismiss a code scanning alert": "code-scanning/update-alert",
    "how many API requests do I have left": "rate-limit/get",
}
"""What an agent may ask for, and the operations that do it. They were written before anything was measured."""


def operations() -> list[dict[str, Any]]:
    """The operations as tools: a name, a description and an input schema each."""
    folder = CACHE / f"octokit-openapi-{VERSION}"
    document = folder / "package" / "generated" / "api.github.com.deref.json"
    if not document.exists():
        folder.mkdir(parents=True, exist_ok=True)
        run(["npm", "pack", f"{PACKAGE}@{VERSION}"], cwd=folder).check_returncode()
        (archive,) = folder.glob("*.tgz")
        with tarfile.open(archive) as packed:
            packed.extract(str(document.relative_to(folder)), folder, filter="data")
        archive.unlink()
    tools = []
    for methods in json.loads(document.read_text())["paths"].values():
        for method in METHODS:
            if method in methods:
                tools.append(_tool(methods[method]))
    return tools


def _tool(operation: dict[str, Any]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for parameter in operation.get("parameters", ()):
        properties[parameter["name"]] = {"description": parameter.get("description", "")}
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    for name, schema in body.get("properties", {}).items():
        properties[name] = {"description": schema.get("description", "")}
    return {
        "name": name_of(operation["operationId"]),
        "description": f"{operation['summary']}\n\n{operation.get('description', '')}",
        "inputSchema": {"type": "object", "properties": properties},
    }


def name_of(operation_id: str) -> str:
    """`issues/add-labels` as a module's id: `issues.add_labels`."""
    return operation_id.replace("/", ".").replace("-", "_")


class Operation:
    """A module that stands for one operation, and does nothing."""

    def __init__(self, tool: dict[str, Any]) -> None:
        self.output_schema: dict[str, Any] = {}
        self.description = tool["description"]
        self.input_schema = tool["inputSchema"]

    def execute(self, inputs: dict[str, Any], context: Any) -> dict[str, Any]:
        return {}


async def ours(tools: list[dict[str, Any]]) -> dict[str, list[str]]:
    """The names that each question finds."""
    registry = Registry()
    for tool in tools:
        registry.register(tool["name"], Operation(tool))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = MCPServer(registry, transport="streamable-http", port=port, search=True, log_level="ERROR")
    server.start()
    found: dict[str, list[str]] = {}
    try:
        async with Client(f"http://127.0.0.1:{port}/mcp", mode="2026-07-28") as client:
            for question in QUESTIONS:
                result = await client.call_tool("search_tools", {"query": question})
                found[question] = [tool["name"] for tool in (result.structured_content or {"result": []})["result"]]
        return found
    finally:
        server.stop()
        server.wait()


THEIRS = """
import asyncio, json, sys
from fastmcp import Client, FastMCP
from fastmcp.server.transforms.search import BM25SearchTransform
from fastmcp.tools import Tool

class Operation(Tool):
    async def run(self, arguments):
        return {}

async def main():
    tools, questions = json.load(sys.stdin)
    server = FastMCP("theirs")
    for tool in tools:
        server.add_tool(Operation(name=tool["name"], description=tool["description"], parameters=tool["inputSchema"]))
    server.add_transform(BM25SearchTransform(max_results=10))
    found = {}
    async with Client(server) as client:
        for question in questions:
            result = await client.call_tool("search_tools", {"query": question})
            found[question] = [tool["name"] for tool in result.structured_content["result"]]
    print(json.dumps(found))

asyncio.run(main())
"""


def theirs(tools: list[dict[str, Any]]) -> tuple[str, dict[str, list[str]]]:
    """FastMCP's version, and the names that each question finds there."""
    python = python_of("fastmcp-search")
    if version_in(python, "fastmcp") is None:
        run([str(python), "-m", "pip", "install", "-q", "fastmcp"]).check_returncode()
    sent = json.dumps([tools, [*QUESTIONS]])
    done = subprocess.run([str(python), "-c", THEIRS], input=sent, capture_output=True, text=True, check=True)
    return f"FastMCP {version_in(python, 'fastmcp')}", json.loads(done.stdout)


def places(found: dict[str, list[str]]) -> dict[str, int]:
    """How many tools stand before the right one, by question; 10 where it is not found."""
    before = {}
    for question, operation_ids in QUESTIONS.items():
        right = [name_of(operation_id) for operation_id in operation_ids.split()]
        before[question] = next((place for place, name in enumerate(found[question]) if name in right), 10)
    return before


def show(name: str, found: dict[str, list[str]]) -> None:
    before = [*places(found).values()]
    shares = [sum(place < limit for place in before) / len(before) for limit in (1, 5, 10)]
    print(f"{name:22} first {shares[0]:.2f}, among five {shares[1]:.2f}, among ten {shares[2]:.2f}")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.benchmarks.search", description="How well search_tools finds.")
    parser.add_argument("--misses", action="store_true", help="show what is found instead of the right tool")
    arguments = parser.parse_args()
    tools = operations()
    print(f"{len(tools)} operations of {PACKAGE} {VERSION}, {len(QUESTIONS)} questions; share of right tools found:")
    found = asyncio.run(ours(tools))
    show("ours", found)
    try:
        show(*theirs(tools))
    except (OSError, subprocess.SubprocessError) as error:
        print(f"FastMCP does not run: {getattr(error, 'stderr', None) or error}")
    if arguments.misses:
        for question, place in places(found).items():
            if place == 10:
                print(f"{question}: {QUESTIONS[question]}, but found {', '.join(found[question][:5])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
