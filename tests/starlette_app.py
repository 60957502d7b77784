"""What uvicorn loads for `test_starlette.py`: an application whose leader records its terms."""

from __future__ import annotations

import asyncio
import contextlib
import os

from fastapi import Depends, FastAPI

import doyen
from doyen import Term
from doyen.integrations.starlette import Leadership
from framework_crew import TTL_S, recording


def served() -> FastAPI:
    """The application of one process."""
    url = os.environ["STORE"]
    leader = Leadership("e", lambda: doyen.connect(url, ttl_s=TTL_S, wait_s=10), on_failure="exit")
    app = FastAPI(lifespan=leader.lifespan)
    depends = Depends(leader)
    fails, hangs = asyncio.Event(), asyncio.Event()

    @leader.task
    async def work(term: Term) -> None:
        with recording(term) as book:
            while not fails.is_set():
                book.write("work")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(fails.wait(), 0.002)
        raise RuntimeError("the work failed")

    @app.get("/token")
    async def token(term: Term = depends) -> int:
        return term.token

    @app.get("/hang")
    async def hang(term: Term = depends) -> None:
        hangs.set()
        await term.lost()

    @app.get("/hangs")
    async def hanging() -> None:
        await hangs.wait()

    @app.get("/fail")
    async def fail() -> None:
        fails.set()

    return app
