"""One process of a group, of a configuration or of a set of shards:
`python -m bench.managed ROLE OPTIONS`.

    members     sessions, each of them a member of one group
    observers   sessions that observe the group, and count what that costs
    detector    reports when an entry of the store is gone
    config      sessions that subscribe to a configuration, and watch a bare key
    shards      a member of a set of shards, which notes when its bodies begin and end

It uses the protocol of `bench.worker`, with commands in JSON; they are described with each role. A
report is at most as long as what several processes can write to one pipe at once.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import doyen
from bench.worker import Memory, Reporter, counted_session, now
from doyen.election.core import SessionCore
from doyen.lease.clock import SystemClock
from doyen.manage.shards.slots import ShardTerm
from doyen.model import member_key
from doyen.stores.port import Context, open_store

GROUP = SET = CONFIG = "bench"
NOTICE = "bench/notice"
"""The bare key that is written to measure the store itself."""
EVENTS = 40
"""How many of them are in one report."""
REPORT_S = 0.02


async def commands() -> AsyncIterator[dict[str, Any]]:
    """The commands from standard input. The process ends with it."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Queue[bytes] = asyncio.Queue()
    loop.add_reader(0, lambda: waiting.put_nowait(os.read(0, 65536)))
    rest = b""
    while data := await waiting.get():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
    os._exit(0)


def members(who: str, url: str, sessions: int, spare: int, ttl_s: float) -> None:
    """`join` and `leave` with `number`: so many more sessions, which are connected already, join
    the group or leave it, all at once."""
    reporter = Reporter(who, [])

    async def main() -> None:
        async with AsyncExitStack() as stack:
            free: list[tuple[str, doyen.Session]] = []
            for number in range(sessions + spare):
                connected = doyen.connect(url, ttl_s=ttl_s)
                free.append((f"{who}-{number}", await stack.enter_async_context(connected)))
            joined: list[Any] = []

            async def join() -> None:
                name, session = free.pop()
                scope = session.member(GROUP, name=name)
                await scope.__aenter__()
                joined.append((scope, name, session))

            async def leave() -> None:
                scope, name, session = joined.pop()
                await scope.__aexit__(None, None, None)
                free.append((name, session))

            for _ in range(sessions):
                await join()
            reporter.report("ready")
            async for command in commands():
                act = {"join": join, "leave": leave}[command["do"]]
                began = now()
                await asyncio.gather(*(act() for _ in range(command["number"])))
                reporter.report("done", took_s=now() - began)

    asyncio.run(main())


def observers(who: str, url: str, sessions: int, ttl_s: float) -> None:
    """`count` reports the calls and the notifications of each observer since the last time, and how
    many members each of them knows."""
    reporter = Reporter(who, [])

    async def main() -> None:
        stores: list[Counter[str]] = []
        known: list[set[str]] = []

        async def observe(session: doyen.Session, seen: set[str]) -> None:
            # Not `suspect`: it reads the list by time, and here it is counted by change.
            async for change in session.observe_members(GROUP, suspect=False):
                if not isinstance(change, doyen.MemberChange):
                    continue
                if change.kind == "gone":
                    seen.discard(change.member.name)
                else:
                    seen.add(change.member.name)

        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for _ in range(sessions):
                stores.append(Counter())
                known.append(set())
                session = await counted_session(stack, url, stores[-1], ttl_s=ttl_s)
                tasks.create_task(observe(session, known[-1]))
            reporter.report("ready")
            async for _ in commands():
                reporter.report(
                    "counts",
                    notified=[counts["notified"] for counts in stores],
                    lists=[counts["list"] for counts in stores],
                    known=[len(each) for each in known],
                )
                for counts in stores:
                    counts.clear()

    asyncio.run(main())


def detector(who: str, url: str) -> None:
    """Any command with `group` and `name` names a member; reports when it is gone."""
    reporter = Reporter(who, [])

    async def gone(store: Any, key: str) -> None:
        changed = asyncio.Event()
        watch = await store.watch(key, changed.set)
        reporter.report("watching")
        while await store.get(key) is not None:
            await changed.wait()
            changed.clear()
        reporter.report("gone", at=now())
        watch.close()

    async def main() -> None:
        store = await open_store(url, Context(SystemClock(), lambda event: None))
        reporter.report("ready")
        async for command in commands():
            await gone(store, member_key(command["group"], command["name"]))

    asyncio.run(main())


def config(who: str, url: str, sessions: int) -> None:
    """Each session subscribes to the configuration, and watches a bare key. `times` reports, for
    each session, when it was notified of the bare key last, when it had read it after that, and
    when it applied the last version."""
    reporter = Reporter(who, [])

    async def main() -> None:
        noticed, read, applied = ([0.0] * sessions for _ in range(3))

        async def subscribe(session: doyen.Session, number: int, ready: asyncio.Event) -> None:
            async with session.config(CONFIG).subscribe(f"{who}-{number}") as documents:
                ready.set()
                async for _ in documents:
                    applied[number] = now()
                    documents.applied()

        async def follow(core: SessionCore, number: int) -> None:
            """On doyen's loop: read the bare key after each notification."""
            changed = asyncio.Event()

            def notified() -> None:
                noticed[number] = now()
                changed.set()

            await core.call(core.store.watch(NOTICE, notified))

            async def reading() -> None:
                while True:
                    await changed.wait()
                    changed.clear()
                    await core.call(core.store.get(NOTICE))
                    read[number] = now()

            core.tasks.start(reading())

        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            for number in range(sessions):
                session = await stack.enter_async_context(doyen.connect(url))
                core = session._opened
                await core.runtime.do(follow(core, number))
                ready = asyncio.Event()
                tasks.create_task(subscribe(session, number, ready))
                await ready.wait()
            reporter.report("ready")
            async for _ in commands():
                reporter.report("times", noticed=noticed, read=read, applied=applied)

    asyncio.run(main())


def shards(who: str, url: str, ttl_s: float, traced: bool = False) -> None:
    """Reports how many bodies run, and when the last of them began. `events` reports when bodies
    began and ended since the last time: [shard, when, 1 or -1]. `memory` reports the growth since
    nothing was owned, in bytes for each shard."""
    reporter = Reporter(who, [])
    logging.disable()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        running, last, due = 0, 0.0, False
        events: list[tuple[int, float, int]] = []

        def changed(shard: int, by: int) -> None:
            nonlocal running, last, due
            at = now()
            events.append((shard, at, by))
            running += by
            if by > 0:
                last = at
            if not due:
                due = True
                loop.call_later(REPORT_S, tell)

        def tell() -> None:
            nonlocal due
            due = False
            reporter.report("owned", count=running, last=last)

        async def body(term: ShardTerm) -> None:
            changed(term.shard, 1)
            try:
                await loop.create_future()
            finally:
                changed(term.shard, -1)

        async with (
            doyen.connect(url, ttl_s=ttl_s) as session,
            session.own_shards(SET, body, name=who),
        ):
            memory = Memory(traced)
            reporter.report("ready")
            async for command in commands():
                if command["do"] == "memory":
                    reporter.report("memory", bytes_each=memory.grown() / max(1, running))
                    continue
                for start in range(0, len(events), EVENTS):
                    reporter.report("events", events=events[start : start + EVENTS])
                events.clear()
                reporter.report("events-end")

    asyncio.run(main())


ROLES: dict[str, Callable[..., None]] = {
    "members": members,
    "observers": observers,
    "detector": detector,
    "config": config,
    "shards": shards,
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
