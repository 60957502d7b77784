"""The program of a measured process: `python -m bench.worker ROLE OPTIONS`.

It reports on standard output, reads commands from standard input, and ends when that ends.
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
from doyen.stores.port import Context, open_store

now = SystemClock().now
ELECTION = "bench"


class Reporter:
    """Writes reports to standard output, one `write` per line."""

    def __init__(self, who: str, events: list[str]) -> None:
        self._who = who
        self._events = frozenset(events)

    def report(self, kind: str, **fields: Any) -> None:
        line = json.dumps({"who": self._who, "kind": kind, **fields}) + "\n"
        os.write(1, line.encode())

    def sink(self, record: Record) -> None:
        if record.event.kind in self._events:
            fields = record.fields()
            self.report(fields.pop("event"), at=record.at, **fields)


def candidate(who: str, url: str, events: list[str], **connect: Any) -> None:
    """Lead until a command arrives, and campaign again at the next one, with the blocking API."""
    reporter = Reporter(who, events)
    with doyen.connect_blocking(url, on_event=reporter.sink, **connect) as session:
        while True:
            with session.campaign(ELECTION, name=who) as term:
                at = now()
                reporter.report("entered", at=at, token=term.token)
                if not sys.stdin.readline():
                    return
                at = now()
            reporter.report("resigned", at=at)
            sys.stdin.readline()


def async_candidate(who: str, url: str, events: list[str], **connect: Any) -> None:
    """Like `candidate`, with asyncio."""
    reporter = Reporter(who, events)

    async def main() -> None:
        commands: asyncio.Queue[bytes] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(0, lambda: commands.put_nowait(os.read(0, 1024)))
        async with doyen.connect(url, on_event=reporter.sink, **connect) as session:
            while True:
                async with session.campaign(ELECTION, name=who) as term:
                    at = now()
                    reporter.report("entered", at=at, token=term.token)
                    if not await commands.get():
                        return
                    at = now()
                reporter.report("resigned", at=at)
                await commands.get()

    asyncio.run(main())


def bare(who: str, url: str) -> None:
    """Hold a record until a command arrives, delete it, and compete for it again at the next one:
    with the adapter alone, on the loop of this thread."""
    reporter = Reporter(who, [])
    key = "elections/floor/leader"

    async def main() -> None:
        commands: asyncio.Queue[bytes] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(0, lambda: commands.put_nowait(os.read(0, 1024)))
        store = await open_store(url, Context(SystemClock(), lambda event: None))
        notified = asyncio.Event()
        await store.watch(key, notified.set)
        lease = await store.grant(10.0)
        while True:
            creation = await store.create(key, b"", lease)
            while not creation.won:
                reporter.report("waiting")
                notified.clear()
                await notified.wait()
                creation = await store.create(key, b"", lease)
            at = now()
            reporter.report("entered", at=at)
            if not await commands.get():
                return
            at = now()
            await store.delete(key, if_version=creation.entry.version)
            reporter.report("resigned", at=at)
            await commands.get()
            await store.renew(lease)

    asyncio.run(main())


class Items:
    """Work items of 10 ms, submitted to a resource that checks tokens and to one that does not.

    The resources record what they accepted, in order.
    """

    def __init__(self, who: str, folder: str) -> None:
        from doyen.fencing import GuardedFile

        self._who = who
        self._fenced = GuardedFile(Path(folder) / "fenced")
        self._unfenced = os.open(
            Path(folder) / "unfenced", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
        )
        self.refused = 0

    def submit(self, term: doyen.Term) -> None:
        line = f"{self._who} {term.token} {now()}\n".encode()
        os.write(self._unfenced, line)
        try:
            self._fenced.append(term, line)
        except doyen.StaleToken:
            self.refused += 1


def working(who: str, url: str, folder: str, idiom: str, **connect: Any) -> None:
    """Lead and process work items in one of three idioms: a loop that checks `term.valid`, an async
    scope without checks, and a loop that ignores its term."""
    logging.disable()  # losses are expected
    reporter = Reporter(who, ["waiting", "warded"])
    items = Items(who, folder)
    end_with_stdin()
    if idiom == "scope":
        asyncio.run(_working_in_scope(reporter, items, url, who, connect))
    with doyen.connect_blocking(url, on_event=reporter.sink, **connect) as session:
        try:
            with session.campaign(ELECTION, name=who) as term:
                reporter.report("entered", at=now(), token=term.token)
                while term.valid or idiom == "unchecked":
                    time.sleep(0.01)
                    items.submit(term)
        except doyen.LeadershipLost:
            pass
        reporter.report("lost", at=now(), refused=items.refused)
        threading.Event().wait()


async def _working_in_scope(
    reporter: Reporter, items: Items, url: str, who: str, connect: dict[str, Any]
) -> None:
    async with doyen.connect(url, on_event=reporter.sink, **connect) as session:
        try:
            async with session.campaign(ELECTION, name=who) as term:
                reporter.report("entered", at=now(), token=term.token)
                while True:
                    await asyncio.sleep(0.01)
                    items.submit(term)
        except doyen.LeadershipLost:
            pass
        reporter.report("lost", at=now(), refused=items.refused)
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
    """Many candidates, each with its own session. `resign` makes the leader resign and campaign
    again. `count` reports the store calls since the last such command, and how many candidates were
    notified, without the one that resigned, which is notified of its own writes."""
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
                    reporter.report("ready")
            elif record.event.kind in ("unsure", "leaselost", "lost"):
                reporter.report("loss", what=str(record.event))

        async def one(stack: AsyncExitStack, name: str) -> None:
            counts: Counter[str] = Counter()
            stores.append(counts)
            async with one_at_a_time:
                session = await counted_session(stack, url, counts, ttl_s=ttl_s, sinks=(sink,))
            while True:
                async with session.campaign(ELECTION, name=name) as term:
                    reporter.report("entered", at=now(), token=term.token)
                    await resign.wait()
                    resign.clear()
                    counts["resigned"] = 1
                    at = now()
                reporter.report("resigned", at=at)

        def execute() -> None:
            for command in os.read(0, 1024).decode().split() or ["end"]:
                if command == "resign":
                    resign.set()
                elif command == "count":
                    woken = sum(each["notified"] > 0 and not each["resigned"] for each in stores)
                    reporter.report("counts", counts={**sum(stores, Counter()), "woken": woken})
                    for counts in stores:
                        counts.clear()
                else:
                    os._exit(0)

        asyncio.get_running_loop().add_reader(0, execute)
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
                reporter.report(
                    "held",
                    took_s=took_s,
                    bytes_each=memory.grown() / elections,
                    held_s=held_s,
                    cpu_share=(time.process_time() - cpu_before) / held_s,
                    calls=dict(counts),
                )
                done.set()
                began = now()
        reporter.report("released", took_s=now() - began)

    asyncio.run(main())


class Memory:
    """The growth of memory, of Python objects or of the process."""

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

        async def campaign(session: doyen.Session) -> None:
            async with session.campaign(ELECTION, name=who):
                pass

        def report(opened: int) -> None:
            pid = os.getpid()
            fields = {"threads": probes.threads(pid), "descriptors": probes.descriptors(pid)}
            reporter.report("opened", sessions=opened, rss=probes.rss(pid), **fields)

        report(0)
        async with AsyncExitStack() as stack:
            candidates = []
            for number in range(1, count + 1):
                session = await stack.enter_async_context(doyen.connect(url, on_event=sink))
                waiting.clear()
                candidates.append(asyncio.create_task(campaign(session)))
                await waiting.wait()
                report(number)
            for task in candidates:
                task.cancel()
            await asyncio.gather(*candidates, return_exceptions=True)

    asyncio.run(main())


ROLES: dict[str, Callable[..., None]] = {
    "candidate": candidate,
    "async-candidate": async_candidate,
    "bare": bare,
    "herd": herd,
    "many": many,
    "sessions": sessions,
    "working": working,
}


if __name__ == "__main__":
    ROLES[sys.argv[1]](**json.loads(sys.argv[2]))
