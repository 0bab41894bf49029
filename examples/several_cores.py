r"""Several processes serve one port, for several cores or machines. Run: granian, or gunicorn, from the repository:

    granian --working-dir examples --interface asgi --workers 4 --respawn-failed-workers --workers-kill-timeout 5 \
        several_cores:app
    gunicorn --chdir examples --worker-class uvicorn_worker.UvicornWorker --workers 4 --graceful-timeout 5 \
        several_cores:app

Clients find the tool at http://127.0.0.1:8000/mcp. Under a name of your own add `allowed_hosts=["tools.example.com"]`.
Where users have to approve calls, set APCORE_MCP_STATE_KEY to a secret of 32 bytes or more, the same for every process:
any of them takes the answer to a question then. The five seconds are for clients that listen for changes: they would
keep the server from ending. Not under `uvicorn --workers 4`: connections that its workers accept wait 40 ms for each
answer (uvicorn's issue 3149).
"""

import contextlib
import os
from collections.abc import AsyncIterator

from apcore import Registry
from apcore.decorator import module
from starlette.applications import Starlette

from apcore_mcp import async_serve

registry = Registry()


@module(id="primes.count", registry=registry)
def count(below: int) -> int:
    """Count the primes below a number, which keeps a core busy for a while."""
    return sum(all(number % divisor for divisor in range(2, int(number**0.5) + 1)) for number in range(2, below))


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    key = os.environ.get("APCORE_MCP_STATE_KEY") or None
    # No sessions, so any process can answer any request.
    async with async_serve(registry, stateless=True, state_key=key) as tools:
        app.mount("/", tools)
        yield


app = Starlette(lifespan=lifespan)
