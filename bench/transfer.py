"""How long a transfer to a named heir takes: from the old body's end, which is how long nobody
leads, and from the order.

The latter passes through three processes, with a durable write in each: the giver lays the order,
the heir says that it is ready, the leader lets go. It is there to be read.

Candidates are real processes in one line; the heir is any of them but the leader, so others are
passed over. Run as a program, this module is one of them: it campaigns for ever, and stamps the
beginning and the end of each body.
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
    """A leader hands over to a named heir; until that one is in its body."""
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
                heir = random.choice([who for who in line if who != leader])
                given_at = now()
                session.transfer(ELECTION, to=heir)
                entered_at = crew.wait("entered", heir)["at"]
                ordered_ms.append((entered_at - given_at) * 1e3)
                vacant_ms.append((entered_at - crew.wait("left", leader)["at"]) * 1e3)
                crew.wait("waiting", leader)
                crew.take()
                leader = heir
    return [
        _figure("transfer, old body's end to the heir's body", vacant_ms, limit=5.0),
        _figure("transfer, order to the heir's body", ordered_ms, limit=None),
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
                reporter.say("entered", at=now())
                try:
                    await asyncio.Event().wait()
                finally:
                    at = now()
                    reporter.say("left", at=at)


if __name__ == "__main__":
    logging.getLogger("doyen").addHandler(logging.NullHandler())  # a transfer is a loss to it
    end_with_stdin()
    asyncio.run(_campaign(*sys.argv[1:]))
