"""Runs of worlds: one seed, many seeds, several protocols, and runs from files.

    run            one plan, drawn from a seed
    hunt           seed after seed, on every core of the machine, until something fails
    compare        several protocols under the same faults
    save, replay   a run as a file, and a file as a run

Results are data; the command line prints them.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import msgspec
from msgspec import Struct

from doyen.errors import ConfigError
from doyen.lab import quorum_plan
from doyen.lab.narration import make_world, narrate
from doyen.lab.outcome import RunOutcome, time_or
from doyen.lab.plan import (
    DROP,
    FAULT_SEQUENCES,
    KINDS,
    NODE_KINDS,
    REQUESTS,
    WITHOUT_NODES,
    Plan,
    draw,
)
from doyen.lab.protocols import Protocol, known
from doyen.lab.shrink import shrink
from doyen.lab.world import World
from doyen.quorum.consensus.core import Making, Message

FOR_S = 20.0
_BATCH = 8


def kinds_of(faults: str | Iterable[str]) -> tuple[str, ...]:
    """The kinds of fault for a choice: `all`, `none`, a fault sequence, or a list of kinds."""
    given = faults.split(",") if isinstance(faults, str) else faults
    names = [name.strip() for name in given]
    if names == ["all"]:
        return KINDS
    if names in (["none"], [""], []):
        return ()
    if len(names) == 1 and names[0] in FAULT_SEQUENCES:
        return (names[0],)
    for name in names:
        if name in (*FAULT_SEQUENCES, "all", "none"):
            raise ConfigError(
                f"{name!r} cannot be combined with other kinds of fault: name it alone"
            )
        if name not in (*KINDS, *NODE_KINDS):
            known_ones = ", ".join((*KINDS, *NODE_KINDS, *FAULT_SEQUENCES))
            raise ConfigError(f"unknown fault {name!r}: choose all, none, or of {known_ones}")
    return tuple(kind for kind in (*KINDS, *NODE_KINDS) if kind in names)


def run(
    protocol: str = "raft",
    nodes: int = 5,
    seed: int = 0,
    faults: str | Iterable[str] = "all",
    for_s: float = FOR_S,
    *,
    clients: int = 3,
    world: str = "cores",
    measure: bool = False,
) -> RunOutcome:
    """Run one seed, with faults for this long in virtual time. `world` is `cores`, or `quorum` for
    whole nodes with candidates.

    >>> run("raft", nodes=3, seed=1, faults="none", for_s=5).ok
    True
    """
    plan = plan_for(
        world, protocol, nodes, seed, kinds=kinds_of(faults), for_s=for_s, clients=clients
    )
    return _run(plan, known(protocol), measure=measure)


def plan_for(
    world: str,
    protocol: str,
    nodes: int,
    seed: int,
    *,
    kinds: tuple[str, ...] = KINDS,
    for_s: float = FOR_S,
    clients: int = 3,
) -> Plan:
    if nodes < 1:
        raise ConfigError(f"a cluster needs at least one node, not {nodes}")
    _check_kinds(world, kinds)
    if world == "cores":
        return draw(protocol, nodes, seed, kinds=kinds, for_s=for_s, clients=clients)
    return quorum_plan.draw(protocol, nodes, seed, kinds=kinds, for_s=for_s, clients=clients)


def _check_kinds(world: str, kinds: Sequence[str]) -> None:
    """Refuse faults that this kind of world does not have. `KINDS` means all that it has."""
    available: Sequence[str] = (*KINDS, DROP)
    if world == "quorum":
        available = (*quorum_plan.KINDS, *quorum_plan.NAMED)
    elif world != "cores":
        raise ConfigError(f"unknown world {world!r}: choose cores or quorum")
    for kind in () if kinds == KINDS else kinds:
        if world == "quorum" and kind in FAULT_SEQUENCES:
            raise ConfigError(f"the fault sequence {kind!r} is for bare cores: leave --world out")
        if kind not in (*available, *FAULT_SEQUENCES):
            raise ConfigError(
                f"unknown fault {kind!r} in the world {world!r}: choose one of"
                f" {', '.join(available)}"
            )


def _run(plan: Plan, protocol: Protocol, *, measure: bool = False) -> RunOutcome:
    world = make_world(plan, protocol)
    if measure and isinstance(world, World):
        encode = msgspec.msgpack.Encoder().encode
        figures = world.measurements.statistics

        def count(message: Message) -> None:
            figures.bytes += len(encode(message))

        world.on_message = count
    return world.run()


# Files.


class RunFile(Struct, kw_only=True):
    """A run as it is saved in a file."""

    plan: Plan
    trace_hash: str
    violations: list[str]
    narration: list[str] = msgspec.field(name="story")


def save(path: Path, outcome: RunOutcome, narration: Sequence[str] = ()) -> None:
    """Save a run so that it can be replayed."""
    path.write_bytes(encoded(outcome, narration))


def keep(directory: Path, outcome: RunOutcome, narration: Sequence[str] = ()) -> Path:
    """Save a failed run in a new file. The file of another run is not overwritten."""
    name, text = f"lab-{outcome.plan.protocol}-{outcome.plan.seed}", encoded(outcome, narration)
    number = 1
    while True:
        path = directory / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        try:
            with path.open("xb") as file:
                file.write(text)
            return path
        except FileExistsError:
            if path.read_bytes() == text:
                return path
            number += 1


def encoded(outcome: RunOutcome, narration: Sequence[str]) -> bytes:
    """The contents of the file of a run."""
    record = RunFile(
        plan=outcome.plan,
        trace_hash=outcome.trace_hash,
        violations=[f"{violation.kind}: {violation.text}" for violation in outcome.violations],
        narration=list(narration),
    )
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def replay(path: Path, protocol: Protocol | None = None) -> tuple[RunOutcome, list[str], bool]:
    """Run a saved plan. Returns the outcome, the narration, and whether it is the same run."""
    record = read_file(path)
    outcome, narration = narrate(record.plan, protocol)
    return outcome, narration, outcome.trace_hash == record.trace_hash


def read_file(path: Path) -> RunFile:
    """A run that was saved."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=RunFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a run that the lab has saved: {error}") from error
    check_plan(record.plan, str(path))
    return record


def check_plan(plan: Plan, source: str) -> None:
    """Refuse a plan that no seed gives, because its failure would look like a defect of the
    protocol. `source` is named in errors."""
    known(plan.protocol)
    _check_kinds(plan.world, [fault.kind for fault in plan.faults])
    for fault in plan.faults:
        named = f"{source}: the fault {fault.kind!r} at {fault.at:g} s"
        if fault.kind in FAULT_SEQUENCES:
            raise ConfigError(f"{source}: {fault.kind!r} is a fault sequence, not a fault")
        if not fault.nodes and fault.kind not in WITHOUT_NODES:
            raise ConfigError(f"{named} names no nodes")
        if fault.kind == "rate" and not fault.amount:
            raise ConfigError(f"{named} stops a clock")


# Hunting.


class FoundFailure(Struct, kw_only=True):
    """The smallest run that was found to show a failure."""

    outcome: RunOutcome
    narration: list[str]


class HuntProgress(Struct, kw_only=True):
    """The progress of a hunt."""

    seeds: int = 0
    events: int = 0
    virtual_s: float = 0.0
    elapsed_s: float = 0.0
    found: int = 0


class Hunt(Struct, kw_only=True):
    """The result of a hunt."""

    progress: HuntProgress
    found: list[FoundFailure]


def nodes_for(seed: int) -> int:
    """The size of the cluster for a seed: usually one that is common in practice."""
    return (3, 5, 3, 5, 3, 4, 3, 5, 7, 2)[seed % 10]


def _hunt_some(
    name: str, seeds: Sequence[int], world: str, kinds: tuple[str, ...], for_s: float, until: float
) -> tuple[HuntProgress, list[RunOutcome]]:
    """Run a batch of seeds in a worker process. Returns the progress and the failures. At least one
    seed is run, however long the start of the process took."""
    protocol = known(name)
    progress = HuntProgress()
    failed = []
    for seed in seeds:
        if progress.seeds and time.monotonic() >= until:
            break
        plan = plan_for(world, name, nodes_for(seed), seed, kinds=kinds, for_s=for_s)
        outcome = _run(plan, protocol)
        progress.seeds += 1
        progress.events += outcome.events
        progress.virtual_s += outcome.statistics.virtual_s
        if not outcome.ok:
            failed.append(outcome)
    return progress, failed


def reduce(plan: Plan, protocol: Protocol | None = None) -> FoundFailure:
    """Reduce a plan that fails to the smallest that fails in the same way."""
    protocol = protocol or known(plan.protocol)
    smallest, _ = shrink(lambda each: _run(each, protocol), plan, tries=300)
    outcome, narration = narrate(smallest, protocol)
    return FoundFailure(outcome=outcome, narration=narration)


def unreduced(outcome: RunOutcome) -> FoundFailure:
    """A failure as it was found, if there is no time to reduce it."""
    return FoundFailure(outcome=outcome, narration=[])


def hunt(
    protocols: Sequence[str] = ("raft",),
    seeds: Iterable[int] | None = None,
    *,
    jobs: int = 1,
    limit_s: float = 60.0,
    faults: str | Iterable[str] = "all",
    for_s: float = FOR_S,
    world: str = "cores",
    progress: Callable[[HuntProgress], object] = lambda progress: None,
    on_failure: Callable[[FoundFailure], object] = lambda found: None,
    stop_at: int = 3,
) -> Hunt:
    """Run seed after seed until the time is up, the seeds are used up, or `stop_at` failures were
    found. `on_failure` is called with each failure when it is reduced or, if the hunt is
    interrupted before that, unreduced."""
    kinds = kinds_of(faults)
    _check_kinds(world, kinds)
    began = time.monotonic()
    total = HuntProgress()
    found: list[FoundFailure] = []
    batches = _batches(protocols, seeds)
    running: dict[Future[tuple[HuntProgress, list[RunOutcome]]], None] = {}
    reducing: dict[Future[FoundFailure], RunOutcome] = {}
    unreported: list[RunOutcome] = []
    with _workers(jobs) as pool:
        exhausted = False
        try:
            while running or reducing or not exhausted:
                late = time.monotonic() - began >= limit_s or total.found >= stop_at
                exhausted = exhausted or (late and bool(running or total.seeds))
                while not exhausted and len(running) < 2 * jobs:
                    batch = next(batches, None)
                    if batch is None:
                        exhausted = True
                    else:
                        arguments = (*batch, world, kinds, for_s, began + limit_s)
                        running[pool.submit(_hunt_some, *arguments)] = None
                pending: list[Future[Any]] = [*running, *reducing]
                wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                for smaller in [each for each in reducing if each.done()]:
                    found.append(smaller.result())
                    unreported.remove(reducing.pop(smaller))
                    on_failure(found[-1])
                for done in [each for each in running if each.done()]:
                    del running[done]
                    some, failed = done.result()
                    total.seeds += some.seeds
                    total.events += some.events
                    total.virtual_s += some.virtual_s
                    unreported += failed
                    reducing |= {pool.submit(reduce, each.plan): each for each in failed}
                total.elapsed_s = time.monotonic() - began
                total.found = len(found) + len(reducing)
                progress(total)
        finally:
            for outcome in unreported:
                on_failure(unreduced(outcome))
    return Hunt(progress=total, found=found)


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end with this process, also when it is killed."""
    if jobs < 1:
        raise ConfigError(f"a hunt needs at least one process, not {jobs}")
    context = multiprocessing.get_context("spawn")
    watched, held = context.Pipe(duplex=False)
    made = ProcessPoolExecutor(jobs, context, initializer=_end_with_parent, initargs=(watched,))
    with watched, held, made as pool:
        try:
            yield pool
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a process of the hunt was killed from outside, perhaps because memory ran out:"
                " try fewer jobs"
            ) from error
        except BaseException:
            held.close()
            raise


def _end_with_parent(watched: Connection) -> None:
    """In a worker: end, whatever it is doing, when the parent closes its end of the pipe or dies,
    and end silently when the terminal sends an interrupt to the whole process group."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def wait_for_parent() -> None:
        with suppress(EOFError, OSError):
            watched.recv_bytes()
        os._exit(1)

    Thread(target=wait_for_parent, daemon=True).start()


def _batches(
    protocols: Sequence[str], seeds: Iterable[int] | None
) -> Iterator[tuple[str, list[int]]]:
    numbers = iter(range(1 << 62) if seeds is None else seeds)
    while batch := [*islice(numbers, _BATCH)]:
        for protocol in protocols:
            yield protocol, batch


def hunt_mutant(
    variant: Protocol | Making,
    limit_s: float = 60.0,
    *,
    faults: str | Iterable[str] = "all",
    for_s: float = FOR_S,
    first: int = 0,
) -> tuple[int, RunOutcome] | None:
    """The first seed on which a variant of a core or a disk fails, and the outcome."""
    if not isinstance(variant, Protocol):
        variant = known("raft").replace(make=variant)
    kinds = kinds_of(faults)
    until = time.monotonic() + limit_s
    seed = first
    while time.monotonic() < until:
        plan = plan_for("cores", variant.name, nodes_for(seed), seed, kinds=kinds, for_s=for_s)
        outcome = _run(plan, variant)
        if not outcome.ok:
            return seed, outcome
        seed += 1
    return None


# Comparisons.


class Comparison(Struct, kw_only=True):
    """The figures of one protocol over all seeds: medians, unless stated otherwise."""

    protocol: str
    nodes: int
    runs: int
    first_leader_s: float
    healed_s: float
    leaders: float
    messages_per_s: float
    bytes_per_s: float
    messages_per_write: float
    available_share: float
    writes: int
    """Sum."""
    violations: int
    """Sum. A lost write is a violation."""


def compare(
    protocols: Sequence[str],
    *,
    nodes: int = 5,
    seeds: Iterable[int] = range(10),
    faults: str | Iterable[str] = "all",
    for_s: float = FOR_S,
) -> list[Comparison]:
    """Run each protocol under the same faults at the same times. Requests that only some protocols
    support are left out."""
    runs = run_protocols(protocols, nodes=nodes, seeds=seeds, faults=faults, for_s=for_s)
    return [summarize(protocol, outcomes) for protocol, outcomes in runs.items()]


def run_protocols(
    protocols: Sequence[str],
    *,
    nodes: int = 5,
    seeds: Iterable[int] = range(10),
    faults: str | Iterable[str] = "all",
    for_s: float = FOR_S,
) -> dict[str, list[RunOutcome]]:
    """The runs of `compare`, by protocol."""
    kinds = kinds_of(faults)
    for kind in kinds if kinds != KINDS else ():
        if kind in REQUESTS:
            raise ConfigError(
                f"{kind!r} is a request that not every protocol supports: leave it out"
            )
    chosen = [kind for kind in kinds if kind not in REQUESTS]
    numbers = list(seeds)
    if not numbers:
        raise ConfigError("a comparison needs at least one seed")
    return {
        protocol: [
            run(protocol, nodes, seed, chosen or "none", for_s, measure=True) for seed in numbers
        ]
        for protocol in protocols
    }


def summarize(protocol: str, outcomes: Sequence[RunOutcome]) -> Comparison:
    """The figures of all runs of a protocol."""
    figures = [outcome.statistics for outcome in outcomes]
    for_s = outcomes[0].plan.for_s
    return Comparison(
        protocol=protocol,
        nodes=outcomes[0].plan.nodes,
        runs=len(outcomes),
        first_leader_s=median(time_or(each.first_leader_s, for_s) for each in figures),
        healed_s=median(time_or(each.healed_s, for_s) for each in figures),
        leaders=median(each.leaders for each in figures),
        messages_per_s=median(each.messages / each.virtual_s for each in figures),
        bytes_per_s=median(each.bytes / each.virtual_s for each in figures),
        messages_per_write=median(each.messages / max(1, each.writes) for each in figures),
        available_share=median(each.available_share for each in figures),
        writes=sum(each.writes for each in figures),
        violations=sum(len(outcome.violations) for outcome in outcomes),
    )
