"""What a process under measurement does: `python -m bench.worker ROLE OPTIONS`.

It reports on standard output, obeys lines on standard input, and ends when that ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import doyen
from bench import probes
from doyen.election.options import SessionSettings
from doyen.events import Record
from doyen.lease.clock import SystemClock
from doyen.lease.runtime import ThreadRuntime
from doyen.stores.port import Context

now = SystemClock().now
ELECTION = "bench"


class Reporter:
    """Says what happens, on standard output: one `write` a line."""

    def __init__(self, who: str, events: list[str]) -> None:
        self._who = who
        self._events = frozenset(events)

    def say(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"who": self._who, "kind": kind, **fields}) + "\n"
        os.write(1, line.encode())

    def sink(self, record: Record) -> None:
        if record.event.kind in self._events:
            fields = record.fields()
            self.say(fields.pop("event"), at=record.at, **fields)


def candidate(who: str, url: str, events: list[str], **connect: Any) -> None:
    """Lead until told to resign, and stand again when told to; ordinary code."""
    reporter = Reporter(who, events)
    with doyen.connect_blocking(url, on_event=reporter.sink, **connect) as session:
        while True:
            with session.campaign(ELECTION, name=who) as term:
                at = now()
                reporter.say("entered", at=at, token=term.token)
                if not sys.stdin.readline():
                    return
                at = now()
            reporter.say("resigned", at=at)
            sys.stdin.readline()


def async_candidate(who: str, url: str, events: list[str], **connect: Any) -> None:
    """The same, with asyncio."""
    reporter = Reporter(who, events)

    async def main() -> None:
        told: asyncio.Queue[bytes] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(0, lambda: told.put_nowait(os.read(0, 1024)))
        async with doyen.connect(url, on_event=reporter.sink, **connect) as session:
            while True:
                async with session.campaign(ELECTION, name=who) as term:
                    at = now()
                    reporter.say("entered", at=at, token=term.token)
                    if not await told.get():
                        return
                    at = now()
                reporter.say("resigned", at=at)
                await told.get()

    asyncio.run(main())


class Items:
    """Work items of 10 ms, each offered to a resource that checks tokens and to one that does not.

    The resources themselves keep what they accepted, in order: that is the evidence.
    """

    def __init__(self, who: str, folder: str) -> None:
        from doyen.fencing import GuardedFile

        self._who = who
        self._fenced = GuardedFile(Path(folder) / "fenced")
        self._unfenced = os.open(
            Path(folder) / "unfenced", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )
        self.refused = 0

    def hand_in(self, term: doyen.Term) -> None:
        line = f"{self._who} {term.token} {now()}\n".encode()
        os.write(self._unfenced, line)
        try:
            self._fenced.append(term, line)
        except doyen.StaleToken:
            self.refused += 1


def working(who: str, url: str, folder: str, idiom: str, ttl_s: float) -> None:
    """Lead and do work items, in one of three idioms: a loop that asks `term.valid`, an async
    scope that asks nothing, and a loop that ignores its term."""
    logging.disable()  # a loss is what this is about
    reporter = Reporter(who, ["waiting"])
    items = Items(who, folder)
    end_with_stdin()
    if idiom == "scope":
        asyncio.run(_working_in_scope(reporter, items, url, who, ttl_s))
    with doyen.connect_blocking(url, on_event=reporter.sink, ttl_s=ttl_s) as session:
        try:
            with session.campaign(ELECTION, name=who) as term:
                reporter.say("entered", at=now(), token=term.token)
                while term.valid or idiom == "heedless":
                    time.sleep(0.01)
                    items.hand_in(term)
        except doyen.LeadershipLost:
            pass
        reporter.say("lost", at=now(), refused=items.refused)
        threading.Event().wait()


async def _working_in_scope(
    reporter: Reporter, items: Items, url: str, who: str, ttl_s: float
) -> None:
    async with doyen.connect(url, on_event=reporter.sink, ttl_s=ttl_s) as session:
        try:
            async with session.campaign(ELECTION, name=who) as term:
                reporter.say("entered", at=now(), token=term.token)
                while True:
                    await asyncio.sleep(0.01)
                    items.hand_in(term)
        except doyen.LeadershipLost:
            pass
        reporter.say("lost", at=now(), refused=items.refused)
        await asyncio.Event().wait()


def end_with_stdin() -> None:
    def wait() -> None:
        while sys.stdin.readline():
            pass
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


async def counted_session(
    stack: AsyncExitStack, url: str, counts: Counter[str], **settings: Any
) -> doyen.Session:
    runtime = ThreadRuntime.acquire()
    context = Context(runtime.clock, lambda event: None)
    store = await runtime.do(probes.open_counted(url, context, counts))
    session = doyen.Session(SessionSettings(url=url, **settings), runtime, store)
    return await stack.enter_async_context(session)


def herd(who: str, url: str, sessions: int, ttl_s: float) -> None:
    """Many candidates, each with a session of its own. `resign` makes the one that leads resign
    and stand again; `count` reports the store's calls since the last time, and how many candidates
    were told of something, not counting the one that resigned, which is told of its own doing."""
    reporter = Reporter(who, [])

    async def main() -> None:
        stores: list[Counter[str]] = []
        resign = asyncio.Event()
        one_at_a_time = asyncio.Lock()
        queued = 0

        def sink(record: Record) -> None:
            nonlocal queued
            if record.event.kind in ("waiting", "elected") and queued < sessions:
                queued += 1
                if queued == sessions:
                    reporter.say("ready")
            elif record.event.kind in ("unsure", "leaselost", "lost"):
                reporter.say("trouble", what=str(record.event))

        async def one(stack: AsyncExitStack, name: str) -> None:
            counts: Counter[str] = Counter()
            stores.append(counts)
            async with one_at_a_time:
                session = await counted_session(stack, url, counts, ttl_s=ttl_s, sinks=(sink,))
            while True:
                async with session.campaign(ELECTION, name=name) as term:
                    reporter.say("entered", at=now(), token=term.token)
                    await resign.wait()
                    resign.clear()
                    counts["resigned"] = 1
                    at = now()
                reporter.say("resigned", at=at)

        def obey() -> None:
            for word in os.read(0, 1024).decode().split() or ["end"]:
                if word == "resign":
                    resign.set()
                elif word == "count":
                    woken = sum(each["told"] > 0 and not each["resigned"] for each in stores)
                    reporter.say("counts", counts={**sum(stores, Counter()), "woken": woken})
                    for counts in stores:
                        counts.clear()
                else:
                    os._exit(0)

        asyncio.get_running_loop().add_reader(0, obey)
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            for number in range(sessions):
                group.create_task(one(stack, f"{who}-{number}"))

    asyncio.run(main())


def many(who: str, url: str, elections: int, settle_s: float, hold_s: float, traced: bool) -> None:
    """Lead many elections on one session, and hold them for a while."""
    reporter = Reporter(who, [])

    async def main() -> None:
        counts: Counter[str] = Counter()
        done = asyncio.Event()
        entered = 0
        all_entered = asyncio.Event()

        async def lead(number: int) -> None:
            nonlocal entered
            async with session.campaign(f"election-{number}", name=who) as term:
                entered += 1
                if entered == elections:
                    all_entered.set()
                await done.wait()
                if not term.valid:
                    raise term.loss()

        async with AsyncExitStack() as stack:
            session = await counted_session(stack, url, counts)
            async with session.campaign("warm-up", name=who):
                pass
            memory = Memory(traced)
            began = now()
            async with asyncio.TaskGroup() as group:
                for number in range(elections):
                    group.create_task(lead(number))
                await all_entered.wait()
                took_s = now() - began
                await asyncio.sleep(settle_s)
                counts.clear()
                cpu_before, held_from = time.process_time(), now()
                await asyncio.sleep(hold_s)
                held_s = now() - held_from
                reporter.say(
                    "held",
                    took_s=took_s,
                    bytes_each=memory.grown() / elections,
                    held_s=held_s,
                    cpu_share=(time.process_time() - cpu_before) / held_s,
                    calls=dict(counts),
                )
                done.set()
                began = now()
        reporter.say("released", took_s=now() - began)

    asyncio.run(main())


class Memory:
    """By how much memory has grown: what Python's objects take, or what the process does."""

    def __init__(self, traced: bool) -> None:
        self._traced = traced
        if traced:
            import tracemalloc

            tracemalloc.start()
        self._before = self._now()

    def _now(self) -> int:
        import gc

        gc.collect()
        if self._traced:
            import tracemalloc

            return tracemalloc.get_traced_memory()[0]
        return probes.rss(os.getpid())

    def grown(self) -> int:
        return self._now() - self._before


def sessions(who: str, url: str, count: int) -> None:
    """Open sessions one after another, each a candidate, and report threads and descriptors."""
    reporter = Reporter(who, [])

    async def main() -> None:
        waiting = asyncio.Event()
        loop = asyncio.get_running_loop()

        def sink(record: Record) -> None:
            if record.event.kind == "waiting":
                loop.call_soon_threadsafe(waiting.set)

        async def stand(session: doyen.Session) -> None:
            async with session.campaign(ELECTION, name=who):
                pass

        def report(opened: int) -> None:
            pid = os.getpid()
            fields = {"threads": probes.threads(pid), "descriptors": probes.descriptors(pid)}
            reporter.say("opened", sessions=opened, rss=probes.rss(pid), **fields)

        report(0)
        async with AsyncExitStack() as stack:
            standing = []
            for number in range(1, count + 1):
                session = await stack.enter_async_context(doyen.connect(url, on_event=sink))
                waiting.clear()
                standing.append(asyncio.create_task(stand(session)))
                await waiting.wait()
                report(number)
            for task in standing:
                task.cancel()
            await asyncio.gather(*standing, return_exceptions=True)

    asyncio.run(main())


ROLES: dict[str, Callable[..., None]] = {
    "candidate": candidate,
    "async-candidate": async_candidate,
    "herd": herd,
    "many": many,
    "sessions": sessions,
    "working": working,
}


if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
