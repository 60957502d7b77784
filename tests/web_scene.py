"""A store with a bit of everything, for tests and pictures of the page: elections with an hour of
history, a lock, a group, a set of shards, and a configuration with subscribers.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import doyen
from doyen.lease.clock import SystemClock
from doyen.session import Session
from doyen.stores import memory
from doyen.stores.memory import MemoryServer

NAME = "scene"
URL = f"memory://{NAME}"
ELECTIONS = (
    "billing",
    "cache-warmer",
    "fraud-scores",
    "invoices/eu-1",
    "nightly-report",
    "rate-limits",
    "scheduler",
    "search-indexer",
)
SHARDS = 48
WORKERS = ("worker-1", "worker-2", "worker-3")
SERVERS = ("server1", "server2", "server3")
TOKENS = 4000
"""Past terms have tokens below this."""


@contextmanager
def scene(tmp: Path) -> Iterator[Path]:
    """The store, alive on a thread. Yields an audit log of the hour before."""
    server = memory._servers[NAME, 0] = MemoryServer(SystemClock())
    server._counter = TOKENS
    log = tmp / "past.jsonl"
    log.write_text("".join(past(time.time())))
    ready, stop = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def play() -> None:
        try:
            asyncio.run(_play(ready, stop))
        except BaseException as error:  # noqa: BLE001 - raised to the test
            failures.append(error)
        finally:
            ready.set()

    thread = threading.Thread(target=play, name="scene")
    thread.start()
    try:
        assert ready.wait(60)
        yield log
    finally:
        stop.set()
        thread.join()
        del memory._servers[NAME, 0]
    assert not failures, failures


async def _play(ready: threading.Event, stop: threading.Event) -> None:
    async with AsyncExitStack() as stack:

        async def session(ttl_s: float = 5.0) -> Session:
            return await stack.enter_async_context(doyen.connect(URL, ttl_s=ttl_s))

        sessions = [await session() for _ in SERVERS]
        tasks = []
        for number, election in enumerate(ELECTIONS):
            # The leader is the first to stand; the others follow.
            order = [(number + place) % len(SERVERS) for place in range(len(SERVERS))]
            for place in order:
                standing = _stand(sessions[place], election, SERVERS[place])
                tasks.append(asyncio.ensure_future(standing))
                await asyncio.sleep(0.01)
        await stack.enter_async_context(sessions[1].lock("migrations", name=SERVERS[1]))
        for name in ("web-1", "web-2", "web-3"):
            joined = (await session(2.0)).member("web", name=name, meta={"zone": "eu-1a"})
            await stack.enter_async_context(joined)
        await sessions[0].shards("orders").configure(count=SHARDS, min_members=len(WORKERS))
        workers = [await session(3.0) for _ in WORKERS]
        for each, name in zip(workers, WORKERS, strict=True):
            await stack.enter_async_context(each.own_shards("orders", _work, name=name))
        config = sessions[0].config("billing", author="ops")
        for version in ({"workers": 4}, {"workers": 8, "batch": 100}, {"workers": 8, "batch": 250}):
            await config.set(version)
        applying = (_apply(sessions[0], name) for name in SERVERS[:2])
        tasks.extend(asyncio.ensure_future(each) for each in applying)
        async for seen in sessions[0].observe_shards("orders"):
            if isinstance(seen, doyen.ShardMap) and seen.owners and "" not in seen.owners:
                break
        ready.set()
        await asyncio.to_thread(stop.wait)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _stand(session: Session, election: str, name: str) -> None:
    meta = {"host": f"{name}.example", "version": "3.8.1"}
    async for campaign in session.campaigns(election, name=name, meta=meta):
        async with campaign:
            await asyncio.sleep(3600)


async def _work(term: object) -> None:
    await asyncio.sleep(3600)


async def _apply(session: Session, name: str) -> None:
    async with session.config("billing").subscribe(name) as documents:
        async for _ in documents:
            pass


def past(now: float) -> Iterator[str]:
    """The lines of an audit log: terms of the last hour that ended in different ways."""
    dice = random.Random(7)
    for number, election in enumerate(ELECTIONS):
        at, token = now - 3600 * (0.4 + 0.6 * dice.random()), 100 * number + 1
        last = False
        while not last:
            until = at + 200 + 1500 * dice.random()
            last = until > now - 300
            cause = dice.choice(["resigned", "expired", "died", "expired", "lost"])
            if last:
                until, cause = now - 0.5, "resigned"
            name, lease = SERVERS[(number + token // 3) % len(SERVERS)], f"past-{election}-{token}"
            common = {"election": election, "name": name, "token": token, "lease": lease}
            stamp = {"boot": "b", "pid": 1, "session": lease}
            yield _line("elected", at, {**common, "valid_until": at + 5}, stamp)
            if cause == "resigned":
                yield _line("resigned", until, common, stamp)
            elif cause == "lost":
                why = {"reason": "no renewal was confirmed in time", "ended_at": until}
                yield _line("lost", until, {**common, **why}, stamp)
            else:
                yield _line("leaseended", until, {"lease": lease, "cause": cause}, stamp)
            at = until + {"resigned": 0.01, "died": 0.03}.get(cause, 4.0 + 30 * dice.random())
            token += 3


def _line(event: str, at: float, fields: dict[str, object], stamp: dict[str, object]) -> str:
    return json.dumps({"event": event, **fields, "at": at, "wall": at, **stamp}) + "\n"
