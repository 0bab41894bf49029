"""Several cores or machines: as many processes as there are, which share nothing, under any ASGI server.

    uvicorn --app-dir examples --workers 4 several_cores:app
    gunicorn --chdir examples --workers 4 --worker-class uvicorn_worker.UvicornWorker several_cores:app
    granian --working-dir examples --workers 4 --interface asgi several_cores:app

Clients find the tool at http://127.0.0.1:8000/mcp. Under a name of your own add `allowed_hosts=["tools.example.com"]`.
"""

import contextlib
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
    async with async_serve(registry, stateless=True) as tools:  # no sessions, so any process can answer any request
        app.mount("/", tools)
        yield


app = Starlette(lifespan=lifespan)
