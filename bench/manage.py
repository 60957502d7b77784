"""Members, configurations and shards at their intended sizes, on three stores: local, etcd, quorum.

The store and all members share this machine, so the figures are those of a machine that is busy
with twenty processes at once. Where a limit is relative, what it relates to is measured in the same
run, with the same processes.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import doyen
from bench.crew import Crew, Report, now
from bench.figures import Figure, spread
from bench.managed import CONFIG, NOTICE, SET
from bench.outages import served
from bench.peers import interpreter
from doyen.lease.clock import SystemClock
from doyen.manage.shards.controller import group_of
from doyen.stores.port import Context, open_store

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import servers

__all__ = ["config", "members", "partitioners", "shards"]

PARTITIONER = str(Path(__file__).with_name("partitioner.py"))
PATIENCE_S = 300.0
STEADY_S = 1.0
"""Nothing happens for this long before something is measured."""

SOON_S = 0.2
"""Bodies have begun, and what was changed with a move is settled."""

p50 = statistics.median


class Managed(Crew):
    """The processes of one bench on one store."""

    store = ""

    def begin(self, who: str, role: str, **options: Any) -> str:
        given = json.dumps({"who": who, "url": self.store, **options})
        return self.start_command(who, ["-m", "bench.managed", role, given])

    def begin_all(self, names: Sequence[str], role: str, **options: Any) -> None:
        """Start processes, one after the other: each takes all of a core until it is ready."""
        for who in names:
            self.begin(who, role, **options)
            self.wait("ready", who, PATIENCE_S)

    def order(self, who: str, answer: str, **order: Any) -> Report:
        self.send(who, json.dumps(order))
        return self.wait(answer, who, PATIENCE_S)


@contextmanager
def on(store: str) -> Iterator[Managed]:
    """A crew and a running store: sqlite, etcd or quorum. Each is as durable as by default."""
    with ExitStack() as stack:
        crew = stack.enter_context(Managed())
        match store:
            case "sqlite":
                crew.store = crew.url
            case "etcd":
                server = servers.Etcd(
                    unsafe_no_fsync="false", heartbeat_interval="100", election_timeout="1000"
                )
                crew.store = stack.enter_context(server).url
            case "quorum":
                crew.store = stack.enter_context(served()).url
            case _:
                raise SystemExit(f"no store {store!r}; there are {', '.join(STORES)}")
        stack.callback(crew.dismiss)  # before the store ends
        yield crew


STORES = ("sqlite", "etcd", "quorum")


def chosen(only: str) -> Sequence[str]:
    return only.split(",") if only else STORES


# Members.


def members(
    *,
    processes: int = 10,
    sessions: int = 100,
    observers: int = 10,
    changes: int = 10,
    burst: int = 50,
    only: str = "",
) -> Iterator[Figure]:
    """What a join, a leave and a burst of them cost each observer of a large group."""
    for store in chosen(only):
        with on(store) as crew:
            yield from _members(crew, store, processes, sessions, observers, changes, burst)


def _members(
    crew: Managed,
    store: str,
    processes: int,
    sessions: int,
    observers: int,
    changes: int,
    burst: int,
) -> list[Figure]:
    names = [f"p{number}" for number in range(processes)]
    total = processes * sessions
    crew.begin_all(names, "members", sessions=sessions, spare=burst, ttl_s=60.0)
    crew.begin_all(["observers"], "observers", sessions=observers, ttl_s=60.0)

    def until(known: int) -> Report:
        """Wait until every observer knows so many members, and return the counts until then."""
        sums: Report = {"notified": [0] * observers, "lists": [0] * observers}
        give_up = time.monotonic() + PATIENCE_S
        while True:
            time.sleep(0.25)
            counts = crew.order("observers", "counts")
            for name in sums:
                sums[name] = [a + b for a, b in zip(sums[name], counts[name], strict=True)]
            if set(counts["known"]) == {known}:
                time.sleep(STEADY_S)
                rest = crew.order("observers", "counts")
                return {
                    name: [a + b for a, b in zip(sums[name], rest[name], strict=True)]
                    for name in sums
                }
            if time.monotonic() > give_up:
                raise TimeoutError(f"observers know {counts['known']} members, not {known}")

    until(total)
    single: list[Report] = []
    for _ in range(changes):
        crew.order(names[0], "done", do="join", number=1)
        single.append(until(total + 1))
        crew.order(names[0], "done", do="leave", number=1)
        single.append(until(total))
    bursts = []
    for _ in range(max(1, changes // 5)):
        took = crew.order(names[0], "done", do="join", number=burst)["took_s"]
        bursts.append((took, until(total + burst)))
        took = crew.order(names[0], "done", do="leave", number=burst)["took_s"]
        bursts.append((took, until(total)))
    worst = {name: max(max(each[name]) for each in single) for name in ("notified", "lists")}
    lists = [max(each["lists"]) for _, each in bursts]
    return [
        Figure(
            name=f"{store}: {total} members, notifications of a change",
            value=worst["notified"],
            unit="per observer, worst",
            limit=1,
            details={"changes": len(single), "lists": worst["lists"], "observers": observers},
        ),
        Figure(
            name=f"{store}: {total} members, lists per burst of {burst}",
            value=max(lists),
            unit="per observer, worst",
            limit=1,
            details={
                "bursts": len(bursts),
                "notified": max(max(each["notified"]) for _, each in bursts),
                "burst_s": spread([took for took, _ in bursts], 2),
            },
        ),
    ]


# Configuration.


def config(
    *, processes: int = 4, sessions: int = 25, trials: int = 20, only: str = ""
) -> Iterator[Figure]:
    """From `set` until all members have applied it, compared with a bare write and its notices."""
    for store in chosen(only):
        with on(store) as crew:
            yield asyncio.run(_config(crew, store, processes, sessions, trials))


async def _config(crew: Managed, store: str, processes: int, sessions: int, trials: int) -> Figure:
    names = [f"p{number}" for number in range(processes)]
    crew.begin_all(names, "config", sessions=sessions)

    def times() -> Report:
        reports = [crew.order(who, "times") for who in names]
        return {
            name: [at for report in reports for at in report[name]]
            for name in ("noticed", "read", "applied")
        }

    def last(what: str, since: float) -> float:
        """When the last session reported this, once all of them have since a time."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            time.sleep(0.05)
            found: list[float] = times()[what]
            if min(found) > since:
                return max(found) - since
            if time.monotonic() > give_up:
                raise TimeoutError(f"not all sessions have {what}")

    bare = await open_store(crew.store, Context(SystemClock(), lambda event: None))
    noticed, read, applied, confirmed = [], [], [], []
    entry = await bare.put(NOTICE, b"0", if_version=None)
    async with doyen.connect(crew.store) as session:
        document: doyen.Config[int] = session.config(CONFIG)
        await document.set(0)
        for trial in range(1, trials + 1):
            await asyncio.sleep(0.2)
            assert entry is not None
            began = now()
            entry = await bare.put(NOTICE, str(trial).encode(), if_version=entry.version)
            noticed.append(last("noticed", began) * 1e3)
            read.append(last("read", began) * 1e3)
            await asyncio.sleep(0.2)
            began = now()
            await document.set(trial)
            applied.append(last("applied", began) * 1e3)
            await asyncio.sleep(0.2)
            began = now()
            await document.set(-trial, wait_applied="all", wait_s=60.0)
            confirmed.append((now() - began) * 1e3)
    await bare.close()
    return Figure(
        name=f"{store}: set to applied by {processes * sessions} members",
        value=p50(applied),
        unit="ms, p50",
        limit=round(3 * p50(noticed), 1),
        details={
            "ratio": p50(applied) / p50(noticed),
            "ratio_to_notice_and_read": p50(applied) / p50(read),
            "write_to_notice_ms": spread(noticed, 1),
            "write_to_notice_and_read_ms": spread(read, 1),
            "applied_ms": spread(applied, 1),
            "set_with_wait_applied_ms": spread(confirmed, 1),
        },
    )


# Shards.


class Event(NamedTuple):
    """A body began (1) or ended (-1)."""

    shard: int
    at: float
    by: int


class Owners:
    """The members of a set, and what is known of their bodies."""

    def __init__(self, crew: Managed, names: Sequence[str], count: int) -> None:
        self.crew = crew
        self.names = list(names)
        self.count = count
        self._owned = dict.fromkeys(names, 0)
        self.last = 0.0

    def died(self, who: str) -> None:
        self.names.remove(who)
        del self._owned[who]

    def all_owned(self) -> float:
        """Wait until every shard is owned. Returns when the last body began."""
        while sum(self._owned.values()) != self.count:
            report = self.crew.wait("owned", within_s=PATIENCE_S)
            if report["who"] in self._owned:
                self._owned[report["who"]] = report["count"]
                self.last = max(self.last, report["last"])
        return self.last

    def events(self) -> list[Event]:
        """What bodies did since the last time, in order."""
        found: list[Event] = []
        for who in self.names:
            self.crew.send(who, json.dumps({"do": "events"}))
            while (report := self._events(who))["kind"] == "events":
                found += [Event(*each) for each in report["events"]]
        return sorted(found, key=lambda each: each.at)

    def _events(self, who: str) -> Report:
        def wanted(report: Report) -> bool:
            return report["who"] == who and report["kind"] in ("events", "events-end")

        return self.crew.wait_for(wanted, PATIENCE_S, f"events of {who}")

    def memory(self) -> list[float]:
        orders = [self.crew.order(who, "memory", do="memory") for who in self.names]
        return [each["bytes_each"] / 1024 for each in orders]


def gaps_ms(events: Sequence[Event]) -> dict[int, float]:
    """For each shard, the longest time from the end of a body to the beginning of the next."""
    ended: dict[int, float] = {}
    gaps: dict[int, float] = {}
    for event in events:
        if event.by < 0:
            ended[event.shard] = event.at
        elif event.shard in ended:
            gap = (event.at - ended.pop(event.shard)) * 1e3
            gaps[event.shard] = max(gap, gaps.get(event.shard, 0.0))
    return gaps


def shards(
    *,
    count: int = 10_000,
    members: int = 20,
    handovers: int = 20,
    traced: int = 2_000,
    ttl_s: float = 5.0,
    only: str = "",
) -> Iterator[Figure]:
    """Many shards over some members: first assignment, deaths, a drain, and memory."""
    for store in chosen(only):
        with on(store) as crew:
            *figures, memory = _shards(crew, store, count, members, handovers, ttl_s)
        yield from figures
        with on(store) as crew:
            crew.begin_all(["m0"], "shards", ttl_s=ttl_s, traced=True)
            owners = Owners(crew, ["m0"], traced)
            with doyen.connect_blocking(crew.store) as session:
                session.shards(SET).configure(count=traced)
                owners.all_owned()
                time.sleep(STEADY_S)
                objects = owners.memory()[0]
        yield replace(memory, details={**memory.details, "objects_kib": objects})


def _shards(
    crew: Managed, store: str, count: int, members: int, handovers: int, ttl_s: float
) -> list[Figure]:
    names = [f"m{number}" for number in range(members)]
    crew.begin_all(["detector"], "detector")
    crew.begin_all(names, "shards", ttl_s=ttl_s)
    owners = Owners(crew, names, count)
    title = f"{store}: {count} shards, {members} members"
    with doyen.connect_blocking(crew.store) as session:
        asked = session.shards(SET)
        began = now()
        asked.configure(count=count)
        figures = [
            Figure(
                name=f"{title}, first assignment",
                value=owners.all_owned() - began,
                unit="s",
                limit=15.0,
                details={"per_s": round(count / (owners.last - began))},
            )
        ]
        time.sleep(2 * STEADY_S)
        resident = owners.memory()

        def controller() -> str:
            leader = session.leader(group_of(SET))
            assert leader is not None
            return leader.name

        for what in ("a member", "the controller"):
            leads = controller()
            victim = (
                leads if what == "the controller" else next(n for n in owners.names if n != leads)
            )
            figures.append(_death(crew, owners, session, title, what, victim))
        handed = []
        for shard in range(handovers):
            owner = asked.map().owner(shard)
            to = next(name for name in owners.names if name != owner)
            owners.events()
            asked.move(shard, to=to)
            time.sleep(SOON_S)
            handed.append(gaps_ms(owners.events())[shard])
        asked.configure(pins={})
        time.sleep(STEADY_S)
        figures.append(_drain(owners, session, title, p50(handed), spread(handed, 1)))
    figures.append(
        Figure(
            name=f"{title}, memory of each",
            value=max(resident),
            unit="KiB, resident",
            limit=12.0,
            details={"resident_kib": spread(resident, 1)},
        )
    )
    return figures


def _death(
    crew: Managed,
    owners: Owners,
    session: doyen.BlockingSession,
    title: str,
    what: str,
    victim: str,
) -> Figure:
    """Kill a member, and wait until all its shards are owned again."""
    before = session.shard_map(SET)
    crew.order("detector", "watching", group=group_of(SET), name=victim)
    killed, process = crew.crash(victim)
    owners.died(victim)
    gone = crew.wait("gone", "detector", PATIENCE_S)["at"]
    owned = owners.all_owned()
    crew.reap(process)
    time.sleep(STEADY_S)
    after = session.shard_map(SET)
    lost = set(before.owned_by(victim))
    moved = {n for n, owner in enumerate(before.owners) if after.owners[n] != owner}
    return Figure(
        name=f"{title}, {what} killed, all owned again",
        value=owned - gone,
        unit="s after detection",
        limit=2.0,
        details={
            "detected_s": gone - killed,
            "shards_of_the_dead": len(lost),
            "others_moved": len(moved - lost),
        },
    )


def _drain(
    owners: Owners,
    session: doyen.BlockingSession,
    title: str,
    handover_ms: float,
    handovers: dict[str, float],
) -> Figure:
    """Drain a member, and look for how long each of its shards had no owner."""
    seen = session.shard_map(SET)
    victim = max(owners.names, key=lambda name: len(seen.owned_by(name)))
    owners.events()
    began = now()
    session.shards(SET).drain(victim, wait_s=PATIENCE_S)
    took_s = now() - began
    time.sleep(STEADY_S)
    gaps = gaps_ms(owners.events())
    return Figure(
        name=f"{title}, a drain of {len(seen.owned_by(victim))}, longest unowned",
        value=max(gaps.values()),
        unit="ms",
        limit=round(3 * handover_ms, 1),
        details={
            "took_s": took_s,
            "moved": len(gaps),
            "unowned_ms": spread(list(gaps.values()), 1),
            "one_handover_ms": handovers,
        },
    )


# Other libraries.


PARTITIONERS = {
    "kazoo": "kazoo's SetPartitioner",
    "tooz-zookeeper": "tooz's partitioner (no exclusion)",
}


def partitioners(
    *, count: int = 10_000, members: int = 20, ttl_s: float = 5.0, kinds: str = ""
) -> Iterator[Figure]:
    """The same numbers of partitions and members with kazoo's and with tooz's partitioner."""
    for kind in kinds.split(",") if kinds else PARTITIONERS:
        what = PARTITIONERS[kind]
        with servers.ZooKeeper() as server, Managed() as crew:
            yield from _partitioned(crew, kind, what, server.port, count, members, ttl_s)
            crew.dismiss()


def _partitioned(
    crew: Managed, kind: str, what: str, port: int, count: int, members: int, ttl_s: float
) -> list[Figure]:
    names = [f"m{number}" for number in range(members)]
    for who in names:
        options = json.dumps({"who": who, "port": port, "ttl_s": ttl_s, "count": count})
        crew.start_command(who, [PARTITIONER, kind, options], interpreter(kind))
        crew.wait("ready", who, PATIENCE_S)
    owners = Owners(crew, names, count)
    together = not kind.startswith("tooz")
    began = now()
    for who in names:
        crew.send(who, "go")
        if not together:  # a member of tooz's group misses those that join at the same time
            crew.wait("owned", who, PATIENCE_S)
            time.sleep(STEADY_S)
            crew.take()
    for who in () if together else names:
        crew.send(who, "tell")
    first_s = owners.all_owned() - began
    time.sleep(2 * STEADY_S)
    crew.take()
    had = owners._owned[names[-1]]
    killed, process = crew.crash(names[-1])
    owners.died(names[-1])
    stopped: list[Report] = []

    def note(report: Report) -> bool:
        return str(report["kind"]) == "stopped"

    stopped.append(crew.wait_for(note, PATIENCE_S, "a member that notices the death"))
    detected = stopped[0]["last"]
    owners._owned[stopped[0]["who"]] = -count  # until it reports what it has now
    owned = owners.all_owned()
    crew.reap(process)
    stopped += [report for report in crew.take(STEADY_S) if report["kind"] == "stopped"]
    title = f"{what}: {count} partitions, {members} members"
    first = Figure(name=f"{title}, first assignment", value=first_s, unit="s")
    return [
        *([first] if together else []),
        Figure(
            name=f"{title}, a member killed, all owned again",
            value=owned - detected,
            unit="s after detection",
            details={
                "detected_s": detected - killed,
                "partitions_of_the_dead": had,
                "others_stopped": sum(report["count"] for report in stopped),
            },
        ),
    ]
