"""How long after its deadline a body learns that its term is over.

The store stops answering, so no renewal succeeds and the deadline is not extended. The body waits
in its scope. When it sees the cancellation, or the end of its wait, it reads the clock by which the
deadline was set.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import statistics
import tempfile
from collections.abc import Awaitable, Callable

import doyen
from bench.crew import now
from bench.figures import Figure, spread
from doyen.election.options import SessionSettings
from doyen.lease.runtime import ThreadRuntime
from doyen.stores.port import Context, Store, open_store
from doyen.testing.faults import Faults, FaultyStore

__all__ = ["loss"]

NoticeOfLoss = Callable[[doyen.Term], Awaitable[float]]


def loss(*, trials: int = 40, ttl_s: float = 0.6) -> list[Figure]:
    """The store stops answering: from the deadline until the body knows."""
    ways: dict[str, NoticeOfLoss] = {
        "loss to cancellation of the body": _by_cancellation,
        "loss to the end of term.wait_lost()": _by_waiting,
    }
    logging.getLogger("doyen").addHandler(logging.NullHandler())
    lags_ms: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(trials):
        for name, wait in ways.items():
            lags_ms[name].append(asyncio.run(_silenced(ttl_s, wait)) * 1e3)
    return [
        Figure(
            name=name,
            value=statistics.median(lags),
            unit="ms past it, p50",
            limit=2.0,
            details={"ms": spread(lags), "ttl_s": ttl_s},
        )
        for name, lags in lags_ms.items()
    ]


async def _by_cancellation(term: doyen.Term) -> float:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return now()


async def _by_waiting(term: doyen.Term) -> float:
    def wait() -> float:
        term.wait_lost()
        return now()

    waiting = asyncio.ensure_future(asyncio.to_thread(wait))
    while not waiting.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({waiting})
    return waiting.result()


async def _silenced(ttl_s: float, wait: NoticeOfLoss) -> float:
    """The time from the deadline until the body of a leader without renewals knows."""
    faults = Faults()
    runtime = ThreadRuntime.acquire()

    async def open_faulty(url: str) -> Store:
        store = await open_store(url, Context(runtime.clock, lambda event: None))
        return FaultyStore(store, faults)

    lag_s = math.nan
    with tempfile.TemporaryDirectory(prefix="doyen-bench-") as folder:
        url = f"sqlite://{folder}/doyen.db"
        store = await runtime.do(open_faulty(url))
        async with doyen.Session(SessionSettings(url=url, ttl_s=ttl_s), runtime, store) as session:
            with contextlib.suppress(doyen.LeadershipLost):
                async with session.campaign("bench") as term:
                    await asyncio.sleep(random.uniform(0.0, 0.1))
                    faults.cut()
                    deadline = term.valid_until
                    lag_s = await wait(term) - deadline
            faults.heal()
    return lag_s
