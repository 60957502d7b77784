"""How long a transfer to a named successor takes.

It is measured from the end of the old leader's body, which is the time without a leader, and from
the order. The latter is informative. It involves three processes with a durable write in each: the
order is written, the successor writes its ready marker, the leader deletes its record.

Candidates are real processes in one line. The successor is any of them but the leader, so the
transfer passes over others. Run as a program, this module is one such candidate: it campaigns
repeatedly and reports the beginning and the end of each body.
"""

from __future__ import annotations

import asyncio
import logging
import random
import statistics
import sys

import doyen
from bench.crew import Crew, now
from bench.failover import settle
from bench.figures import Figure, spread
from bench.worker import ELECTION, Reporter, end_with_stdin

__all__ = ["transfer"]


def transfer(*, trials: int = 60, candidates: int = 4) -> list[Figure]:
    """From a transfer order, and from the end of the old body, to the successor's body."""
    ordered_ms, vacant_ms = [], []
    with Crew() as crew:
        line = [f"candidate-{number}" for number in range(1, candidates + 1)]
        for who in line:
            crew.start_command(who, ["-m", "bench.transfer", who, crew.url])
            crew.wait("waiting" if who != line[0] else "entered", who)
        leader = line[0]
        with doyen.connect_blocking(crew.url) as session:
            for _ in range(trials):
                settle()
                successor = random.choice([who for who in line if who != leader])
                given_at = now()
                session.transfer(ELECTION, to=successor)
                entered_at = crew.wait("entered", successor)["at"]
                ordered_ms.append((entered_at - given_at) * 1e3)
                vacant_ms.append((entered_at - crew.wait("left", leader)["at"]) * 1e3)
                crew.wait("waiting", leader)
                crew.take()
                leader = successor
    return [
        _figure("transfer, old body's end to the successor's body", vacant_ms, limit=5.0),
        _figure("transfer, order to the successor's body", ordered_ms, limit=None),
    ]


def _figure(name: str, gaps_ms: list[float], limit: float | None) -> Figure:
    return Figure(
        name=name,
        value=statistics.median(gaps_ms),
        unit="ms, p50",
        limit=limit,
        details={"ms": spread(gaps_ms)},
    )


async def _campaign(who: str, url: str) -> None:
    reporter = Reporter(who, ["waiting"])
    async with doyen.connect(url, on_event=reporter.sink) as session:
        async for campaign in session.campaigns(ELECTION, name=who):
            async with campaign:
                reporter.report("entered", at=now())
                try:
                    await asyncio.Event().wait()
                finally:
                    at = now()
                    reporter.report("left", at=at)


if __name__ == "__main__":
    logging.getLogger("doyen").addHandler(logging.NullHandler())  # doyen logs a transfer as a loss
    end_with_stdin()
    asyncio.run(_campaign(*sys.argv[1:]))
