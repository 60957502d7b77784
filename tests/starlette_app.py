"""What uvicorn loads for `test_starlette.py`: an application whose leader records its terms."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from fastapi import Depends, FastAPI

import doyen
from doyen import Term
from doyen.integrations.starlette import Leadership


def served() -> FastAPI:
    """The application of one process."""
    url, ledger = os.environ["STORE"], Path(os.environ["LEDGER"])
    leader = Leadership("e", lambda: doyen.connect(url, ttl_s=10), on_failure="exit")
    app = FastAPI(lifespan=leader.lifespan)
    depends = Depends(leader)
    fails, hangs = asyncio.Event(), asyncio.Event()

    def record(term: Term) -> None:
        with ledger.open("a") as file:
            print(term.token, os.getpid(), time.monotonic(), file=file)

    @leader.task
    async def work(term: Term) -> None:
        record(term)
        await fails.wait()
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
