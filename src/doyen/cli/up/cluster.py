"""The candidates of `doyen up`: starts, kills, freezes and thaws them, and reads their audit logs.

Terms and failover times are taken from the audit logs only, which are also verified at the end. The
system is asked only which processes run. Only `stop` waits; `tick` checks everything once and is
called many times per second.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doyen.cli.up.candidate import ELECTION, WORK_FILE, command
from doyen.cli.up.processes import ChildProcess, Kind, ProcessGroup, Stopped, never
from doyen.errors import ConfigError, StoreUnavailable
from doyen.lease.clock import SystemClock
from doyen.lease.timing import Timing
from doyen.stores.port import Capabilities, Context, StoreURL, open_store

if TYPE_CHECKING:
    from doyen.cli.up.quorum import NodeGroup

OPEN_WITHIN_S = 10.0
"""The time limit for opening the store."""


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """A fault that was injected into a leader, and the time just before, on the boot-time clock."""

    kind: Kind
    name: str
    token: int
    at: float


@dataclass(frozen=True, slots=True)
class ObservedTerm:
    """The beginning of a term, from its audit log."""

    name: str
    token: int
    lease: str
    at: float
    wall: float


@dataclass(frozen=True, slots=True)
class Failover:
    """A new leader, and the injected fault before it, if there was one."""

    fault: InjectedFault | None
    to: ObservedTerm

    @property
    def seconds(self) -> float:
        return math.nan if self.fault is None else self.to.at - self.fault.at


class ElectionHistory:
    """Terms and failovers, from the audit logs so far. The lines of a frozen process come late."""

    def __init__(self) -> None:
        self.latest: ObservedTerm | None = None
        """The term with the highest token."""
        self.failovers: list[Failover] = []
        self.pending: InjectedFault | None = None
        """A fault after which there is no new leader yet."""
        self._terms: dict[str, ObservedTerm] = {}
        self._behind: dict[str, str] = {}
        self._deadlines: dict[str, float] = {}

    def add(self, line: dict[str, Any]) -> None:
        """Add one line of an audit log."""
        match line["event"]:
            case "granted" | "renewed":
                self._deadlines[line["lease"]] = line["valid_until"]
            case "waiting" if line["election"] == ELECTION:
                self._behind[line["name"]] = line["behind"]
            case "elected" if line["election"] == ELECTION:
                self._deadlines.setdefault(line["lease"], line["valid_until"])
                self._elected(*(line[key] for key in ("name", "token", "lease", "at", "wall")))
            case "lost" | "resigned" if line["election"] == ELECTION:
                term = self._terms.get(line["name"])
                if term is not None and term.token == line["token"]:
                    del self._terms[line["name"]]

    def _elected(self, name: str, token: int, lease: str, at: float, wall: float) -> None:
        term = self._terms[name] = ObservedTerm(name, token, lease, at, wall)
        self._behind.pop(name, None)
        if self.latest is not None and token < self.latest.token:
            return
        self.latest = term
        fault, self.pending = self.pending, None
        if fault is not None and (token <= fault.token or at < fault.at):
            fault = None  # leadership had changed before the fault
        self.failovers.append(Failover(fault, term))

    def forget(self, name: str) -> None:
        """The candidate's process is a new one."""
        self._terms.pop(name, None)
        self._behind.pop(name, None)

    def term(self, name: str) -> ObservedTerm | None:
        """The term that a candidate has begun and, by its audit log, not ended."""
        return self._terms.get(name)

    def behind(self, name: str) -> str | None:
        """The candidate or leader that a candidate waits for."""
        return self._behind.get(name)

    def valid_until(self, term: ObservedTerm) -> float:
        """The deadline of a term, on the boot-time clock."""
        return self._deadlines.get(term.lease, -math.inf)


class CandidateProcess(ChildProcess):
    """One candidate, with its audit log."""

    def __init__(self, name: str, directory: Path) -> None:
        super().__init__(name, directory)
        self.audit = directory / f"{name}.audit.jsonl"
        self._read = 0

    def lines(self) -> list[dict[str, Any]]:
        """The lines that were added to the audit log since the last call."""
        try:
            with self.audit.open("rb") as file:
                file.seek(self._read)
                healthy, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read += len(healthy) + len(end)
        lines = []
        for line in healthy.splitlines():
            with suppress(ValueError):  # torn by a kill; `verify` reports it
                lines.append(json.loads(line))
        return lines


class CandidateGroup(ProcessGroup[CandidateProcess]):
    """The candidates of one store, with their files in one directory."""

    def __init__(
        self,
        directory: Path,
        *,
        candidates: int,
        store: str,
        timing: Timing,
        worst_s: float,
        quorum: NodeGroup | None = None,
    ) -> None:
        self.candidates = [
            CandidateProcess(f"server{number}", directory) for number in range(1, candidates + 1)
        ]
        super().__init__(self.candidates, thaw_after_s=worst_s + timing.ttl_s / 4)
        self.directory = directory
        self.quorum = quorum
        """The nodes of the store, if they were started by `doyen up`."""
        self.store = store
        self.timing = timing
        self.worst_s = worst_s
        """The longest time from a leader's last sign of life to the next leader."""
        self.history = ElectionHistory()
        self.failures: list[str] = []
        """Errors of candidates that ended by themselves."""
        self.after_tick: Callable[[], None] = lambda: None

    def tick(self) -> None:
        """Read audit logs, and reap, thaw and start candidates where due."""
        if self.quorum is not None:
            self.quorum.tick()
        self._reap()
        self.read()
        self._restart()
        self.after_tick()

    def read(self) -> None:
        """Take in what the audit logs have got."""
        lines = [line for candidate in self.candidates for line in candidate.lines()]
        for line in sorted(lines, key=lambda line: float(line["at"])):
            self.history.add(line)

    def _start(self, candidate: CandidateProcess) -> None:
        self.history.forget(candidate.name)
        started = command(
            name=candidate.name,
            store=self.store,
            ttl_s=self.timing.ttl_s,
            audit=str(candidate.audit),
            work=str(self.directory / WORK_FILE),
        )
        candidate.start(started, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def _note_end(self, candidate: CandidateProcess, code: int) -> None:
        super()._note_end(candidate, code)
        if code and not candidate.killed:
            self.failures.append(
                f"{candidate.name} ended with exit code {code}: {candidate.last_error_line()}"
            )

    @property
    def leader(self) -> CandidateProcess | None:
        """The candidate whose term is the latest and has not ended; it may be frozen."""
        latest = self.history.latest
        if latest is None:
            return None
        candidate = next(
            candidate for candidate in self.candidates if candidate.name == latest.name
        )
        over = self.history.term(candidate.name) != latest
        expired = self.now() >= self.history.valid_until(latest)
        return None if over or expired or not candidate.alive else candidate

    @property
    def ready(self) -> bool:
        """Whether there is a running leader and a candidate that can take over."""
        leader = self.leader
        return (
            leader is not None
            and leader.frozen_at is None
            and any(
                candidate.alive
                and candidate.frozen_at is None
                and self.history.behind(candidate.name)
                for candidate in self.candidates
                if candidate is not leader
            )
        )

    def thaw(self, candidate: CandidateProcess) -> None:
        frozen, pending = candidate.frozen_at is not None, self.history.pending
        super().thaw(candidate)
        if frozen and pending and pending.name == candidate.name and self.leader is candidate:
            self.history.pending = None  # thawed in time: it still leads

    def resign(self, candidate: CandidateProcess) -> None:
        """Make the candidate resign, if it leads."""
        if (
            candidate is self.leader
            and candidate.process is not None
            and candidate.process.stdin is not None
        ):
            self._note_fault("asked to resign", candidate)
            try:
                candidate.process.stdin.write(b"r")
                candidate.process.stdin.flush()
            except BrokenPipeError:
                pass  # it has just died

    def _note_fault(self, kind: Kind, candidate: CandidateProcess) -> None:
        latest = self.history.latest
        if latest is not None and candidate is self.leader:
            self.history.pending = InjectedFault(kind, candidate.name, latest.token, self.now())

    @property
    def work_done(self) -> int:
        """The number in the fenced file: how many items of work the leaders have done."""
        try:
            return int((self.directory / WORK_FILE).read_bytes() or b"0")
        except FileNotFoundError:
            return 0

    def _ask_to_end(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None:
            process.stdin.close()

    def stop(self) -> None:
        super().stop()
        self.read()


async def _unless(
    stopping: Callable[[], bool], work: Coroutine[Any, Any, Capabilities]
) -> Capabilities:
    doing = asyncio.ensure_future(work)
    while not doing.done():
        if stopping():
            doing.cancel()
            await asyncio.wait({doing})
            raise Stopped
        await asyncio.wait({doing}, timeout=0.05)
    return doing.result()


async def _capabilities(url: str) -> Capabilities:
    try:
        async with asyncio.timeout(OPEN_WITHIN_S):
            store = await open_store(url, Context(SystemClock(), lambda _: None))
            await store.close()
    except TimeoutError as error:
        raise StoreUnavailable(
            f"{url} did not answer within {OPEN_WITHIN_S:g} s; check its address"
        ) from error
    return store.capabilities


def timing_on(url: str, ttl_s: float, stopping: Callable[[], bool] = never) -> tuple[Timing, float]:
    """The timing of a lease of `ttl_s` on that store, and the worst failover time.

    Opens the store, so that its errors are reported before anything is started. Raises `Stopped`
    when `stopping` before the store answers.
    """
    if StoreURL.parse(url).parts.scheme == "memory":
        raise ConfigError(
            "a memory: store exists within one process only, and each candidate is a process;"
            " use another store, or leave --store out"
        )
    limits = asyncio.run(_unless(stopping, _capabilities(url)))
    if ttl_s < limits.ttl_min_s:
        raise ConfigError(
            f"a ttl of {ttl_s:g} s is too short: the least for this store is {limits.ttl_min_s:g} s"
        )
    if limits.ttl_step_s is not None:
        ttl_s = math.ceil(ttl_s / limits.ttl_step_s) * limits.ttl_step_s
    timing = Timing(ttl_s=ttl_s)
    worst_s = timing.worst_failover_s(expiry_factor=limits.expiry_factor, notice_s=limits.notice_s)
    return timing, worst_s
