"""Work that survives a restart. Run: python examples/durable.py, after `pip install dbos`

`letters.begin` begins work and tells its id, and `letters.result` tells what came of it: any client can use the two.
DBOS, a library, writes down in a database what each step has returned. Here a client has eight letters sent, and its
server dies at the fifth. Another server, started anew, goes on with the fifth, and no letter is sent twice.

SQLite is for one server. For several, give all of them one Postgres (`DATABASE=postgresql://...`), and each a name that
it keeps (`DBOS__VMID=server-1`): when a server has died and is started again under its name, its work goes on in one of
them. Under another `application_version` nothing goes on that was begun before: leave it as it is until steps change.
"""

import asyncio
import os
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from apcore import InvalidInputError, Registry
from apcore.decorator import module
from dbos import DBOS, DBOSConfig
from mcp import MCPError, StdioServerParameters
from mcp.client import Client
from mcp.client.stdio import stdio_client

from apcore_mcp import serve

registry = Registry()


@DBOS.step()
def send(letter: int) -> None:
    """A step runs once when it ends well. One in which the server dies is run again: it should bear that."""
    if os.environ.get("DIES_AT") == str(letter):
        os._exit(1)  # as if the power had gone
    time.sleep(0.1)
    print(f"letter {letter} is sent by process {os.getpid()}")


@DBOS.workflow()
def send_all(letters: int) -> str:
    for letter in range(1, letters + 1):
        send(letter)
    return f"{letters} letters are sent"


@module(id="letters.begin", registry=registry)
def begin(letters: int) -> str:
    """Begin to send letters. You are given an id: ask letters.result for what came of it."""
    return str(DBOS.start_workflow(send_all, letters).workflow_id)


@module(id="letters.result", registry=registry)
async def result(work: str) -> str:
    """Wait for the result of work by its id, 20 seconds at most. While you are told "working", ask again."""
    if await DBOS.get_workflow_status_async(work) is None:
        raise InvalidInputError("There is no work with this id")
    handle = await DBOS.retrieve_workflow_async(work)
    try:
        return str(await asyncio.wait_for(handle.get_result(), timeout=20))
    except TimeoutError:
        return "working"


def main() -> None:
    database = os.environ.get("DATABASE", "sqlite:///letters.sqlite")
    config = DBOSConfig(name="letters", system_database_url=database, application_version="1", log_level="WARNING")
    DBOS(config=config)
    DBOS.launch()  # from here on it goes on with what was begun
    serve(registry)


def server(folder: str, **more: str) -> StdioServerParameters:
    variables = {**os.environ, "DATABASE": f"sqlite:///{Path(folder, 'letters.sqlite').as_posix()}", **more}
    return StdioServerParameters(command=sys.executable, args=[__file__, "serve"], env=variables)


async def show(folder: str) -> None:
    async with Client(stdio_client(server(folder, DIES_AT="5"))) as client:
        begun = await client.call_tool("letters.begin", {"letters": 8})
        work = begun.structured_content["result"]
        with suppress(MCPError):
            await client.call_tool("letters.result", {"work": work})
        print("the server is gone")
    async with Client(stdio_client(server(folder))) as client:
        print((await client.call_tool("letters.result", {"work": work})).structured_content)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        main()
    else:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(show(folder))
