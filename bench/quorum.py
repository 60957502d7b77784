"""A quorum of doyen on this machine, compared with etcd and PySyncObj.

Each has three nodes and receives writes of 100 bytes, alternately. doyen and etcd acknowledge
writes that a majority has on disk, PySyncObj those that a majority has in memory.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import probes
from bench.crew import Crew, Report
from bench.figures import Figure, spread
from bench.outages import etcd_cluster, served
from bench.peers import interpreter

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from nodes import addresses, three

__all__ = ["upkeep", "writes"]

LEVELS = (1, 64, 1024)
SLICE_S = 2.0
SYNCOBJS = ("s1", "s2", "s3")
SYNCOBJ = str(Path(__file__).with_name("syncobj.py"))

p50 = statistics.median


class Members(Crew):
    """Three nodes and their clients."""

    def order(self, who: str, answer: str, **order: Any) -> Report:
        self.send(who, json.dumps(order))
        return self.wait(answer, who)

    def load(self, who: str, in_flight: int, seconds: float, pids: Iterable[int]) -> Report:
        """Write for a warm-up, then measure the writes and the processor time per write."""
        self.order(who, "loaded", do="load", in_flight=in_flight, seconds=seconds / 4)
        before = sum(map(probes.cpu_s, pids))
        report = self.order(who, "loaded", do="load", in_flight=in_flight, seconds=seconds)
        used_s = sum(map(probes.cpu_s, pids)) - before
        return {**report, "cpu_us": used_s / (report["per_s"] * seconds) * 1e6}

    def replica(self, who: str, role: str, **options: Any) -> str:
        given = json.dumps({"who": who, **options})
        return self.start_command(who, ["-m", "bench.replica", role, given])

    def nodes(self, **options: Any) -> dict[str, str]:
        """Start three doyen nodes and wait until they are ready."""
        peers = three()
        for who in peers:
            self.replica(who, "node", peers=peers, folder=str(self.folder / who), **options)
        for who in peers:
            self.wait("ready", who)
        return peers

    def status(self, who: str) -> Report:
        return self.order(who, "status", do="status")

    def leader(self, who: str) -> str:
        """Wait until this node knows a leader, and return it."""
        while (leader := self.status(who)["leader"]) is None:
            time.sleep(0.05)
        return str(leader)

    def syncobj(self) -> str:
        """Start three nodes of PySyncObj. Returns the one that leads."""
        places = dict(zip(SYNCOBJS, addresses(3), strict=True))
        for who, where in places.items():
            others = [each for each in places.values() if each != where]
            self.start_command(who, [SYNCOBJ, who, where, *others], interpreter("pysyncobj"))
        for who in places:
            self.wait("ready", who)
        leader = self.leader(SYNCOBJS[0])
        return next(who for who, where in places.items() if where == leader)


class Turns:
    """The reports of each system for each number of writes in flight."""

    def __init__(self) -> None:
        self._reports: dict[tuple[str, int], list[Report]] = {}

    def add(self, system: str, in_flight: int, report: Report) -> None:
        self._reports.setdefault((system, in_flight), []).append(report)

    def of(self, system: str, in_flight: int, what: str) -> list[float]:
        return [report[what] for report in self._reports.get((system, in_flight), [])]

    def median(self, system: str, in_flight: int, what: str = "per_s") -> float:
        return p50(self.of(system, in_flight, what))

    def compare(self, system: str, peer: str, in_flight: int, what: str) -> float:
        """The median of the quotients of each round: the speed of a machine may differ between
        rounds by more than the systems do."""
        pairs = zip(self.of(system, in_flight, what), self.of(peer, in_flight, what), strict=True)
        return p50(ours / theirs for ours, theirs in pairs)


def writes(
    *, rounds: int = 5, seconds: float = 2.0, levels: tuple[int, ...] = LEVELS, peers: bool = True
) -> list[Figure]:
    """Replicated writes per second, one and many in flight, compared with etcd and PySyncObj."""
    turns = Turns()
    with ExitStack() as stack:
        crew = stack.enter_context(Members())
        nodes = crew.nodes()
        leader = crew.leader("n1")
        follower = next(who for who in nodes if who != leader)
        who_of = {"propose": leader, "keyspace": "at-leader", "forwarded": "at-follower"}
        pids = {system: [crew.pid(node) for node in nodes] for system in who_of}
        crew.replica("at-leader", "doyen-client", url=f"doyen://{nodes[leader]}")
        crew.replica("at-follower", "doyen-client", url=f"doyen://{nodes[follower]}")
        if peers:
            cluster = stack.enter_context(etcd_cluster())
            address = cluster.leader().address
            crew.replica("at-etcd", "etcd-client", address=address)
            who_of["etcd"] = "at-etcd"
            pids["etcd"] = [member.pid for member in cluster.members]
        for system, who in who_of.items():
            if who != leader:
                crew.wait("ready", who)
                pids[system].append(crew.pid(who))
        began = crew.status(leader)
        for _ in range(rounds):
            for in_flight in levels:
                for system, who in who_of.items():
                    report = crew.load(who, in_flight, seconds, pids[system])
                    turns.add(system, in_flight, report)
            if peers:
                _syncobj_turn(turns, levels, seconds)
        ended = crew.status(leader)
    changes = ended["generation"] - began["generation"] + (began["leader"] != ended["leader"])
    return _figures_of_writes(turns, changes, levels, peers)


def _syncobj_turn(turns: Turns, levels: tuple[int, ...], seconds: float) -> None:
    """Measure PySyncObj with nodes that run only meanwhile: their ticks would slow the others."""
    with Members() as crew:
        leader = crew.syncobj()
        before = crew.status(leader)["generation"]
        for in_flight in levels:
            pids = [crew.pid(who) for who in SYNCOBJS]
            turns.add("pysyncobj", in_flight, crew.load(leader, in_flight, seconds, pids))
        changes = crew.status(leader)["generation"] - before
        taken_back = sum(crew.status(who)["truncations"] for who in SYNCOBJS)
        turns.add("pysyncobj", 0, {"changes": changes, "taken_back": taken_back})


def _figures_of_writes(
    turns: Turns, changes: int, levels: tuple[int, ...], peers: bool
) -> list[Figure]:
    one, many = levels[0], levels[-1]
    names = ["propose", "keyspace", "forwarded"] + (["etcd", "pysyncobj"] if peers else [])
    rates: dict[str, Any] = {
        name: {str(level): round(turns.median(name, level)) for level in levels} for name in names
    }
    processor = {name: round(turns.median(name, many, "cpu_us"), 1) for name in names}
    if not peers:
        return [
            Figure(
                name=f"propose, {many} in flight",
                value=turns.median("propose", many),
                unit="writes/s",
                details={**rates, "cpu_us": processor},
            ),
            _no_changes(changes, {}),
        ]
    lost = {
        "pysyncobj_changes": sum(turns.of("pysyncobj", 0, "changes")),
        "pysyncobj_truncated_what_it_had_applied": sum(turns.of("pysyncobj", 0, "taken_back")),
        "pysyncobj_failed": sum(
            sum(turns.of("pysyncobj", level, "failed") + turns.of("pysyncobj", level, "unanswered"))
            for level in levels
        ),
    }

    def times(system: str, peer: str, limit: float, **details: Any) -> Figure:
        return Figure(
            name=f"{system}, {many} in flight",
            value=turns.compare(system, peer, many, "per_s"),
            unit=f"times {peer}",
            limit=limit,
            at_least=True,
            details={**details, "spread": spread(turns.of(system, many, "per_s"), 0)},
        )

    return [
        times("propose", "etcd", 20.0, per_s=rates, cpu_us_each=processor),
        times("propose", "pysyncobj", 1.0, **lost),
        times("keyspace", "etcd", 12.0),
        Figure(
            name=f"forwarded, {many} in flight, processor time each",
            value=turns.compare("forwarded", "keyspace", many, "cpu_us"),
            unit="times keyspace",
            limit=1.5,
        ),
        *(
            Figure(
                name=f"{system}, {one} in flight, p50",
                value=turns.median(system, one, "p50_ms") / turns.median("etcd", one, "p50_ms"),
                unit="times etcd",
                limit=1.0,
                details={
                    name: round(turns.median(name, one, "p50_ms"), 2) for name in (*names[:-1],)
                },
            )
            for system in ("propose", "keyspace")
        ),
        _no_changes(changes, lost),
    ]


def _no_changes(changes: int, details: dict[str, Any]) -> Figure:
    return Figure(name="leader under load", value=changes, unit="changes", limit=0, details=details)


def upkeep(
    *, seconds: float = 20.0, keys: int = 1_000_000, entries: int = 6000, peers: bool = True
) -> list[Figure]:
    """The cost of an idle quorum, and the effect of a snapshot of a million keys on concurrent
    writes."""
    return [_idle(seconds, peers), *_snapshot(keys, entries)]


def _idle(seconds: float, peers: bool) -> Figure:
    with ExitStack() as stack:
        quorum = stack.enter_context(served())
        pids = {f"doyen {name}": node.process.pid for name, node in quorum.nodes.items()}
        if peers:
            cluster = stack.enter_context(etcd_cluster())
            cluster.leader()
            pids |= {f"etcd {each.name}": each.pid for each in cluster.members}
        time.sleep(1.0)
        before = {name: probes.cpu_s(pid) for name, pid in pids.items()}
        began = time.monotonic()
        time.sleep(seconds)
        took_s = time.monotonic() - began
        used = {
            name: (probes.cpu_s(pid) - before[name]) / took_s * 100 for name, pid in pids.items()
        }
    ours = [value for name, value in used.items() if name.startswith("doyen")]
    return Figure(
        name="idle node, processor",
        value=max(ours),
        unit="% of a core, the busiest",
        limit=1.0,
        details={name: round(value, 2) for name, value in used.items()},
    )


def _snapshot(keys: int, entries: int) -> list[Figure]:
    """Nodes with many keys that take a snapshot every `entries` entries, and one writer."""
    with Members() as crew:
        limits = {"snapshot_entries": entries, "snapshot_bytes": 1 << 40}
        nodes = crew.nodes(pauses=True, limits=limits)
        leader = crew.leader("n1")
        crew.replica("writer", "doyen-client", url=f"doyen://{nodes[leader]}")
        crew.wait("ready", "writer")
        crew.send("writer", json.dumps({"do": "fill", "keys": keys}))
        crew.wait("filled", "writer", within_s=600)
        filling = [crew.order(who, "pauses", do="pauses") for who in nodes]
        quiet = _write_on(crew, nodes)
        taken = crew.status(leader)["snapshot"]
        slices = [_write_on(crew, nodes)]
        while crew.status(leader)["snapshot"] == taken:
            slices.append(_write_on(crew, nodes))
        busy = max(slices, key=lambda each: each["max_ms"])
        changes = crew.status(leader)["generation"] - 1
    return [
        Figure(
            name=f"snapshot of {keys} keys, longest pause of a loop",
            value=max(each["loop_ms"] for each in slices),
            unit="ms",
            limit=50.0,
            details={
                "without_ms": quiet["loop_ms"],
                "own_processor_ms": max(each["loop_cpu_ms"] for each in slices),
                "filling_ms": max(each["ms"] for each in filling),
                "filling_own_processor_ms": max(each["cpu_ms"] for each in filling),
                "changes_of_leader": changes,
            },
        ),
        Figure(
            name=f"snapshot of {keys} keys, longest write",
            value=busy["max_ms"],
            unit="ms, 1 in flight",
            limit=50.0,
            details={
                "p50_ms": busy["p50_ms"],
                "p99_ms": busy["p99_ms"],
                "without": {name: quiet[name] for name in ("p50_ms", "p99_ms", "max_ms")},
            },
        ),
    ]


def _write_on(crew: Members, nodes: Iterable[str]) -> Report:
    """Run one writer for a short time. Returns its report with the longest pause of any loop."""
    for who in nodes:
        crew.order(who, "pauses", do="pauses")
    report = crew.order("writer", "loaded", do="load", in_flight=1, seconds=SLICE_S)
    loops = [crew.order(who, "pauses", do="pauses") for who in nodes]
    return {
        **report,
        "loop_ms": max(each["ms"] for each in loops),
        "loop_cpu_ms": max(each["cpu_ms"] for each in loops),
    }
