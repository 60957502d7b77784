"""Running worlds: one, many, side by side, and again.

    run        one plan, drawn from a seed
    hunt       seed after seed, on every core of the machine, until something breaks
    compare    protocols side by side on the same faults
    save, replay   a run as a file, and the file as a run

Results are data. Who shows them to people, and how, is somebody else's business.

Imports the rest of the lab; processes and the monotonic clock from the standard library.
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
from doyen.lab.plan import FOLDERS, KINDS, ORDERS, PLOTS, Plan, draw
from doyen.lab.protocols import Protocol, known
from doyen.lab.shrink import shrink
from doyen.lab.story import make_world, tell
from doyen.lab.world import RunOutcome, World
from doyen.quorum.consensus.core import Making, Message

__all__ = [
    "Comparison",
    "FoundFailure",
    "Hunt",
    "HuntProgress",
    "RunFile",
    "compare",
    "hunt",
    "hunt_mutant",
    "keep",
    "kinds_of",
    "nodes_for",
    "plan_for",
    "reduce",
    "replay",
    "run",
    "save",
    "unreduced",
]

FOR_S = 20.0
_BATCH = 8


def kinds_of(faults: str | Iterable[str]) -> tuple[str, ...]:
    """The kinds of fault that a person has named: `all`, `none`, a plot, or some of them."""
    given = faults.split(",") if isinstance(faults, str) else faults
    names = [name.strip() for name in given]
    if names == ["all"]:
        return KINDS
    if names in (["none"], [""], []):
        return ()
    if len(names) == 1 and names[0] in PLOTS:
        return (names[0],)
    for name in names:
        if name in (*PLOTS, "all", "none"):
            raise ConfigError(f"{name!r} goes with nothing else: name it alone")
        if name not in (*KINDS, *FOLDERS):
            known_ones = ", ".join((*KINDS, *FOLDERS, *PLOTS))
            raise ConfigError(f"no fault {name!r}; there are all, none, {known_ones}")
    return tuple(kind for kind in (*KINDS, *FOLDERS) if kind in names)


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
    """One run: what the seed has in store, for so long in virtual time. `world` is `cores`, or
    `quorum` for whole nodes with candidates on them.

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
    """What this seed has in store for that kind of world."""
    if nodes < 1:
        raise ConfigError(f"a cluster needs at least one node, not {nodes}")
    _check_kinds(world, kinds)
    if world == "cores":
        return draw(protocol, nodes, seed, kinds=kinds, for_s=for_s, clients=clients)
    from doyen.lab import quorum  # nodes and sessions, which bare cores do without

    return quorum.draw(protocol, nodes, seed, kinds=kinds, for_s=for_s, clients=clients)


def _check_kinds(world: str, kinds: Sequence[str]) -> None:
    """Refuse faults that this kind of world does not know. All of them are those that it does."""
    there: Sequence[str] = KINDS
    if world == "quorum":
        from doyen.lab import quorum

        there = (*quorum.KINDS, *quorum.NAMED)
    elif world != "cores":
        raise ConfigError(f"no world {world!r}; there are cores and quorum")
    for kind in () if kinds == KINDS else kinds:
        if world == "quorum" and kind in PLOTS:
            raise ConfigError(f"the plot {kind!r} is for bare cores: leave --world out")
        if kind not in (*there, *PLOTS):
            known_ones = ", ".join(there)
            raise ConfigError(f"no fault {kind!r} in the world {world!r}; there are {known_ones}")


def _run(plan: Plan, protocol: Protocol, *, measure: bool = False) -> RunOutcome:
    world = make_world(plan, protocol)
    if measure and isinstance(world, World):
        encode = msgspec.msgpack.Encoder().encode
        figures = world.statistics

        def count(message: Message) -> None:
            figures.bytes += len(encode(message))

        world.measure = count
    return world.run()


# Files.


class RunFile(Struct, kw_only=True):
    """A run, as a file."""

    plan: Plan
    trace_hash: str
    violations: list[str]
    story: list[str]


def save(path: Path, outcome: RunOutcome, story: Sequence[str] = ()) -> None:
    """Write down a run, so that it can be run again."""
    path.write_bytes(_written(outcome, story))


def keep(folder: Path, outcome: RunOutcome, story: Sequence[str] = ()) -> Path:
    """Write down a run that failed, in a file of its own: what stands there of another is left."""
    name, text = f"lab-{outcome.plan.protocol}-{outcome.plan.seed}", _written(outcome, story)
    number = 1
    while True:
        path = folder / (f"{name}.json" if number == 1 else f"{name}-{number}.json")
        try:
            with path.open("xb") as file:
                file.write(text)
            return path
        except FileExistsError:
            if path.read_bytes() == text:
                return path
            number += 1


def _written(outcome: RunOutcome, story: Sequence[str]) -> bytes:
    told = [f"{violation.kind}: {violation.text}" for violation in outcome.violations]
    record = RunFile(
        plan=outcome.plan,
        trace_hash=outcome.trace_hash,
        violations=told,
        story=list(story),
    )
    return msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n"


def replay(path: Path, protocol: Protocol | None = None) -> tuple[RunOutcome, list[str], bool]:
    """Run what was written down. What comes of it, its story, and whether it is the same run."""
    try:
        record = msgspec.json.decode(path.read_bytes(), type=RunFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a run that the lab has written: {error}") from error
    _check(record.plan, path)
    outcome, story = tell(record.plan, protocol)
    return outcome, story, outcome.trace_hash == record.trace_hash


def _check(plan: Plan, path: Path) -> None:
    """Refuse what no seed would have given: it would seem to be a defect of the protocol's."""
    known(plan.protocol)
    _check_kinds(plan.world, [fault.kind for fault in plan.faults])
    for fault in plan.faults:
        if fault.kind in PLOTS:
            raise ConfigError(f"{path}: {fault.kind!r} is a plot, which is many faults, not one")
        if not fault.nodes and fault.kind not in ("loss", "duplicate", "reorder", "transfer"):
            raise ConfigError(f"{path}: the fault {fault.kind!r} at {fault.at:g} s befalls nobody")
        if fault.kind == "rate" and not fault.amount:
            raise ConfigError(f"{path}: the fault 'rate' at {fault.at:g} s stops a clock")


# Hunting.


class FoundFailure(Struct, kw_only=True):
    """Something that broke: the seed that led to it, and the smallest run that shows it."""

    protocol: str
    seed: int
    outcome: RunOutcome
    story: list[str]


class HuntProgress(Struct, kw_only=True):
    """How far a hunt has come."""

    seeds: int = 0
    events: int = 0
    virtual_s: float = 0.0
    elapsed_s: float = 0.0
    found: int = 0


class Hunt(Struct, kw_only=True):
    """What a hunt has come to."""

    progress: HuntProgress
    found: list[FoundFailure]


def nodes_for(seed: int) -> int:
    """Mostly the sizes people run, now and then another."""
    return (3, 5, 3, 5, 3, 4, 3, 5, 7, 2)[seed % 10]


def _hunt_some(
    name: str, seeds: Sequence[int], world: str, kinds: tuple[str, ...], for_s: float, until: float
) -> tuple[HuntProgress, list[RunOutcome]]:
    """A batch, in a process of its own: how far it came, and what failed. At least one seed is
    tried, however long it took to start the process."""
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


def reduce(plan: Plan, protocol: Protocol | None = None, tries: int = 300) -> FoundFailure:
    """The smallest run that breaks as this plan does."""
    protocol = protocol or known(plan.protocol)
    smallest, _ = shrink(lambda each: _run(each, protocol), plan, tries=tries)
    outcome, story = tell(smallest, protocol)
    return FoundFailure(protocol=protocol.name, seed=plan.seed, outcome=outcome, story=story)


def unreduced(outcome: RunOutcome) -> FoundFailure:
    """A failure as it was found, for which there was no time to make it small and tell it."""
    plan = outcome.plan
    return FoundFailure(protocol=plan.protocol, seed=plan.seed, outcome=outcome, story=[])


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
    tell: Callable[[FoundFailure], object] = lambda found: None,
    stop_at: int = 3,
) -> Hunt:
    """Try seed after seed until the time is up, the seeds are, or enough has been found; `tell` is
    told of each failure once it is reduced or, if the hunt is broken off before that, as it is."""
    kinds = kinds_of(faults)
    _check_kinds(world, kinds)
    began = time.monotonic()
    total = HuntProgress()
    found: list[FoundFailure] = []
    batches = _batches(protocols, seeds)
    running: dict[Future[tuple[HuntProgress, list[RunOutcome]]], None] = {}
    reducing: dict[Future[FoundFailure], RunOutcome] = {}
    untold: list[RunOutcome] = []
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
                        given = (*batch, world, kinds, for_s, began + limit_s)
                        running[pool.submit(_hunt_some, *given)] = None
                pending: list[Future[Any]] = [*running, *reducing]
                wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
                for smaller in [each for each in reducing if each.done()]:
                    found.append(smaller.result())
                    untold.remove(reducing.pop(smaller))
                    tell(found[-1])
                for done in [each for each in running if each.done()]:
                    del running[done]
                    some, failed = done.result()
                    total.seeds += some.seeds
                    total.events += some.events
                    total.virtual_s += some.virtual_s
                    untold += failed
                    reducing |= {pool.submit(reduce, each.plan): each for each in failed}
                total.elapsed_s = time.monotonic() - began
                total.found = len(found) + len(reducing)
                progress(total)
        finally:
            for outcome in untold:
                tell(unreduced(outcome))
    return Hunt(progress=total, found=found)


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end when we do, however that is."""
    if jobs < 1:
        raise ConfigError(f"a hunt needs at least one process, not {jobs}")
    context = multiprocessing.get_context("spawn")
    leash, held = context.Pipe(duplex=False)
    made = ProcessPoolExecutor(jobs, context, initializer=_on_a_leash, initargs=(leash,))
    with leash, held, made as pool:
        try:
            yield pool
        except BrokenProcessPool as error:
            raise ChildProcessError(
                "a process of the hunt was ended by somebody else, perhaps for want of memory:"
                " try fewer jobs"
            ) from error
        except BaseException:
            held.close()
            raise


def _on_a_leash(leash: Connection) -> None:
    """In a worker: it ends when the leash is dropped or whoever holds it is gone, whatever it is
    doing, and without a word when a terminal interrupts all of us."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    def wait_for_the_end() -> None:
        with suppress(EOFError, OSError):
            leash.recv_bytes()
        os._exit(1)

    Thread(target=wait_for_the_end, daemon=True).start()


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
    protocol: str = "raft",
    world: str = "cores",
    faults: str | Iterable[str] = "all",
    for_s: float = FOR_S,
    first: int = 0,
) -> tuple[int, RunOutcome] | None:
    """The first seed that shows what is wrong with a core (or a disk), and what came of it."""
    if not isinstance(variant, Protocol):
        variant = known(protocol).but(make=variant)
    kinds = kinds_of(faults)
    until = time.monotonic() + limit_s
    seed = first
    while time.monotonic() < until:
        plan = plan_for(world, variant.name, nodes_for(seed), seed, kinds=kinds, for_s=for_s)
        outcome = _run(plan, variant)
        if not outcome.ok:
            return seed, outcome
        seed += 1
    return None


# Side by side.


class Comparison(Struct, kw_only=True):
    """One protocol, over all the seeds: medians, or sums where it says so."""

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
    """Sum; a write lost would be one."""


def compare(
    protocols: Sequence[str],
    *,
    nodes: int = 5,
    seeds: Iterable[int] = range(10),
    faults: str | Iterable[str] = "all",
    for_s: float = FOR_S,
) -> list[Comparison]:
    """The same faults at the same times, to each protocol in turn; orders, which only some take,
    are left out."""
    kinds = kinds_of(faults)
    for kind in kinds if kinds != KINDS else ():
        if kind in ORDERS:
            raise ConfigError(f"{kind!r} is an order that not every protocol takes: leave it out")
    chosen = [kind for kind in kinds if kind not in ORDERS]
    rows = []
    numbers = list(seeds)
    if not numbers:
        raise ConfigError("to compare takes one seed or more")
    for protocol in protocols:
        outcomes = [
            run(protocol, nodes, seed, chosen or "none", for_s, measure=True) for seed in numbers
        ]
        figures = [outcome.statistics for outcome in outcomes]
        rows.append(
            Comparison(
                protocol=protocol,
                nodes=nodes,
                runs=len(outcomes),
                first_leader_s=median(each.first_leader_s or for_s for each in figures),
                healed_s=median(each.healed_s or for_s for each in figures),
                leaders=median(each.leaders for each in figures),
                messages_per_s=median(each.messages / each.virtual_s for each in figures),
                bytes_per_s=median(each.bytes / each.virtual_s for each in figures),
                messages_per_write=median(each.messages / max(1, each.writes) for each in figures),
                available_share=median(each.available_share for each in figures),
                writes=sum(each.writes for each in figures),
                violations=sum(len(outcome.violations) for outcome in outcomes),
            )
        )
    return rows
