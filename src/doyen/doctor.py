"""What a configuration promises on the store in its current state, and its problems.

`examine` measures on scratch keys under a lease of its own, which it revokes. The judgements
(`judge_times`, `judge_capabilities`, `judge_line`) are pure functions of the measurements. Findings
about the engine itself come from `Store.diagnose`.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TypeVar, get_args

from doyen.election.options import SessionSettings
from doyen.election.queries import line_of
from doyen.errors import ConfigError, LeaseGone, StoreError, StoreUnavailable
from doyen.lease.clock import Clock, SystemClock
from doyen.lease.timing import Timing
from doyen.model import Finding, Lease, Line, Order, leader_key, line_key, order_key
from doyen.stores.port import Capabilities, Creation, Store
from doyen.warden.diagnosis import Surroundings
from doyen.warden.diagnosis import findings as judge_warden
from doyen.warden.diagnosis import look as look_around

T = TypeVar("T")

Operation = Literal["read", "write", "renewal"]

ELECTION = "doyen-doctor"
"""The election whose keys are used."""
ROUNDS = 40
MEASURE_FOR_S = 5.0
"""No round of measurements begins after this, so a slow store is measured less often."""
ANSWER_WITHIN_S = 10.0
"""A store that takes longer to answer cannot be measured."""

LEAST_TTL_S = 2.0
"""Below this, pauses that are common on a busy machine cost leadership."""
LEAST_STOP_S = 0.1
SPARE = 2
"""How many times the slowest call should fit into the time that is allowed for one."""


@dataclass(frozen=True, slots=True)
class Latency:
    """How long calls of one kind took. They are few, so the slowest is the best estimate of the
    99th percentile."""

    samples_s: tuple[float, ...]

    @property
    def p50_s(self) -> float:
        return statistics.median(self.samples_s)

    @property
    def max_s(self) -> float:
        return max(self.samples_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The results of an examination."""

    timing: Timing
    capabilities: Capabilities
    latencies: Mapping[Operation, Latency]
    line: Line | None
    """Of the election that was given, if any."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)

    @property
    def worst_failover_s(self) -> float:
        """From the last action of a leader that is frozen or disconnected to its successor."""
        limits = self.capabilities
        return self.timing.worst_failover_s(
            expiry_factor=limits.expiry_factor, notice_s=limits.notice_s
        )

    @property
    def worst_crash_failover_s(self) -> float:
        """From the death of a leader's process to its successor. With proof of death no lease has
        to expire, so what remains is a request that is lost once."""
        if not self.capabilities.proof_of_death:
            return self.worst_failover_s
        return self.timing.worst_failover_s(expiry_factor=0, notice_s=self.capabilities.notice_s)


async def examine(
    store: Store,
    settings: SessionSettings,
    clock: Clock,
    *,
    election: str | None = None,
    surroundings: Callable[[], Surroundings] = look_around,
) -> Examination:
    """Examine an open store, with the timing of `settings`.

    Raises `ConfigError` for a timing that sessions refuse too.
    """
    limits = store.capabilities
    requested_s = limits.ttl_default_s if settings.ttl_s is None else settings.ttl_s
    if requested_s < limits.ttl_min_s:
        raise ConfigError(
            f"a ttl of {requested_s:g} s is below the minimum of this store: {limits.ttl_min_s:g} s"
        )
    settings.timing(requested_s, renewals_lag=limits.renewals_lag)
    lease = await _answered(store.grant(requested_s))
    try:
        timing = settings.timing(lease.ttl_s, renewals_lag=limits.renewals_lag)
        latencies, failed = await _measure(store, lease, clock)
        diagnosed = await _answered(store.diagnose())
        line, order = await _line(store, election) if election else (None, None)
    finally:
        with suppress(StoreError):  # it expires by itself
            await _answered(store.revoke(lease))
    findings = [
        *failed,
        *judge_times(timing, latencies, requested_ttl_s=requested_s),
        *_judge_clock(clock),
        *judge_capabilities(limits),
        *(() if limits.proof_of_death or limits.one_process else judge_warden(surroundings())),
        *diagnosed,
        *(judge_line(line, order, limits) if line is not None else ()),
    ]
    return Examination(
        timing=timing, capabilities=limits, latencies=latencies, line=line, findings=tuple(findings)
    )


async def _answered(request: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            return await request
    except TimeoutError as error:
        raise StoreUnavailable(f"the store did not answer within {ANSWER_WITHIN_S:g} s") from error


async def _measure(
    store: Store, lease: Lease, clock: Clock
) -> tuple[dict[Operation, Latency], list[Finding]]:
    """Make the calls of a leader and its successor, on the keys of an election of its own. It is
    the same one each time, because some stores keep what is above an entry."""
    key = leader_key(ELECTION)
    calls: dict[Operation, Callable[[], Awaitable[object]]] = {
        "renewal": lambda: store.renew(lease),
        "read": lambda: store.get(key),
        "write": lambda: store.create(key, b"doctor", lease),
    }
    samples: dict[Operation, list[float]] = {name: [] for name in get_args(Operation)}
    began = clock.now()
    failed = []
    try:
        for _ in range(ROUNDS):
            for name, call in calls.items():
                sent_at = clock.now()
                answer = await _answered(call())
                samples[name].append(clock.now() - sent_at)
                if isinstance(answer, Creation) and answer.won:
                    await _answered(store.delete(key, if_version=answer.entry.version))
            if clock.now() - began > MEASURE_FOR_S:
                break
    except LeaseGone as error:
        failed.append(
            Finding.problem(
                "lease",
                f"a lease of {lease.ttl_s:g} s ended while it was being renewed: {error}",
                "raise the ttl, and find out what delays this machine or the store",
            )
        )
    return {name: Latency(tuple(taken)) for name, taken in samples.items() if taken}, failed


async def _line(store: Store, election: str) -> tuple[Line, Order | None]:
    record = await _answered(store.get(leader_key(election)))
    tickets = await _answered(store.list(line_key(election)))
    order = await _answered(store.get(order_key(election)))
    return line_of(election, record, tickets), Order.decode(order.value) if order else None


def judge_times(
    timing: Timing, latencies: Mapping[Operation, Latency], *, requested_ttl_s: float
) -> Iterator[Finding]:
    """Whether the timing of a lease fits the store's latency."""
    if timing.ttl_s != requested_ttl_s:
        yield Finding.note(
            "ttl", f"requested {requested_ttl_s:g} s, the store grants {timing.ttl_s:g} s"
        )
    if timing.ttl_s < LEAST_TTL_S:
        pause_s = timing.validity_s - timing.renew_every_s
        yield Finding.warning(
            "ttl",
            f"with {timing.ttl_s:g} s, a pause of {duration(pause_s)} between two renewals"
            " (swapping, a busy host, garbage collection) costs leadership",
            f"a ttl of {LEAST_TTL_S:g} s or more, unless you have measured your pauses",
        )
    if timing.stop_budget_s < LEAST_STOP_S:
        yield Finding.warning(
            "stop budget",
            f"after a loss the work has {duration(timing.stop_budget_s)} to end before"
            " another candidate may lead",
            "raise the stop budget to what your work needs to stop, and the ttl with it",
        )
    if latencies:
        yield _judge_timeout(timing, latencies)
    if "renewal" in latencies:
        yield _judge_margin(timing, latencies["renewal"])


def _judge_timeout(timing: Timing, latencies: Mapping[Operation, Latency]) -> Finding:
    name, slowest = max(latencies.items(), key=lambda each: each[1].max_s)
    timeout_s = timing.request_timeout_s
    text = f"{duration(timeout_s)}; the slowest call, a {name}, took {duration(slowest.max_s)}"
    if SPARE * slowest.max_s <= timeout_s:
        return Finding.ok("request timeout", text)
    enough_s = math.ceil(6 * SPARE * slowest.max_s)
    given_up = slowest.max_s >= timeout_s
    return Finding(
        level="problem" if given_up else "warning",
        subject="request timeout",
        text=f"{text}: calls time out, and leadership is lost, although nothing fails"
        if given_up
        else f"{text}, which is close",
        remedy=f"a ttl of {enough_s} s or more, or a store with less latency",
    )


def _judge_margin(timing: Timing, renewal: Latency) -> Finding:
    text = (
        f"{duration(timing.margin_s)} are left when a renewal is sent late and lost once;"
        f" the slowest renewal took {duration(renewal.max_s)}"
    )
    if SPARE * renewal.max_s <= timing.margin_s:
        return Finding.ok("safety margin", text)
    return Finding.warning(
        "safety margin",
        f"{text}: one more delay, and leadership is lost",
        "raise the ttl, or lower the stop budget",
    )


def _judge_clock(clock: Clock) -> Iterator[Finding]:
    if isinstance(clock, SystemClock) and not clock.covers_suspend:
        yield Finding.warning(
            "clock",
            "this system has no boot-time clock: a leader does not count the time for which"
            " its machine was suspended, and may regard an expired lease as valid",
            "run candidates on machines that are never suspended, and use fencing tokens",
        )


def judge_capabilities(limits: Capabilities) -> Iterator[Finding]:
    """What the engine cannot do, and the consequences."""
    if not limits.proof_of_death:
        yield Finding.note(
            "failover",
            "this store has no proof of death: without a warden, a crashed leader is replaced when"
            " its lease has expired, like one that is frozen",
        )
    if limits.expiry_factor > 1:
        yield Finding.note(
            "failover",
            f"this store may keep a lease for up to {limits.expiry_factor:g} times its ttl",
        )
    if not limits.linearizable_reads:
        yield Finding.note(
            "reads",
            "reads of this store may be stale: leader, line and observers may show an earlier"
            " state",
        )


def judge_line(
    line: Line, order: Order | None, limits: Capabilities | None = None
) -> Iterator[Finding]:
    """Whether an election is in order, on a store with these limits."""
    waiting = [each for each in line.candidates if not each.leads]
    if line.leader is None and not waiting:
        yield Finding.note("line", "no leader and no candidates")
    elif line.leader is None:
        yield Finding.warning(
            "line",
            f"no leader, though {len(waiting)} wait: the last one has just resigned, or the first"
            " in line is frozen and its lease has not expired yet",
            "if it lasts, check whether the first in line is frozen: doyen line --watch",
        )
    elif limits is not None and not limits.has_line:
        text = f"{line.leader.name!r} leads; this store does not show who waits"
        yield Finding.ok("line", text)
    elif not waiting:
        yield Finding.warning(
            "line",
            f"{line.leader.name!r} leads and no candidate waits: if it ends, none follows",
            "start another candidate (those with the recipe 'race' are not shown here)",
        )
    else:
        text = f"{line.leader.name!r} leads, {len(waiting)} waiting"
        yield Finding.ok("line", text)
    foreign = [each for each in line.candidates if each.foreign]
    if line.leader is not None and line.leader.foreign:
        yield Finding.warning(
            "term",
            f"the term of {line.leader.name!r} (token {line.leader.token}) is foreign: its"
            " program does not stop by itself in time when its lease is lost",
            "let resources check tokens, and move its program to doyen",
        )
    if foreign:
        names_shown = ", ".join(repr(each.name) for each in foreign)
        yield Finding.note(
            "line", f"{len(foreign)} of {len(line.candidates)} foreign: {names_shown}"
        )
    names = Counter(each.name for each in line.candidates)
    for name, count in names.items():
        if count > 1:
            yield Finding.warning(
                "line",
                f"{count} candidates are named {name!r}: transfer cannot choose between them",
                "give each its own name",
            )
    if order is not None and line.leader is not None and order.token == line.leader.token:
        yield Finding.note("order", f"{order.by!r} has ordered {line.leader.name!r} to resign")


def duration(seconds: float) -> str:
    """
    >>> duration(0.000087), duration(0.8333), duration(7.0042)
    ('0.087 ms', '833 ms', '7 s')
    """
    return f"{seconds * 1000:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
