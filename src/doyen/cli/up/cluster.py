"""The candidates of `doyen up`: processes that are started, killed, frozen and thawed, and what
their audit logs say of them.

Who leads, since when and how fast it passed on is taken from the audit logs alone, the same ones
that are verified in the end; from the system comes only which process lives. Nothing here waits:
`tick` looks at everything once, and is called many times a second.

Invariant: once `stop` has returned, every process that was started here is gone, frozen or not.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import TYPE_CHECKING, Any, Literal

from doyen.cli.up.candidate import ELECTION, WORK_FILE, command
from doyen.errors import ConfigError, StoreUnavailable
from doyen.lease.clock import SystemClock
from doyen.lease.timing import Timing
from doyen.stores.port import Capabilities, Context, StoreURL, open_store

if TYPE_CHECKING:
    from doyen.cli.up.quorum import Quorum

__all__ = [
    "CandidateProcesses",
    "Chronicle",
    "Failover",
    "InjectedFault",
    "Kind",
    "Reign",
    "Seat",
    "timing_on",
]

RESTART_AFTER_S = 1.0
"""How long a dead candidate stays dead."""
STOP_WITHIN_S = 2.0
"""How long candidates have to let go at the end, before they are killed."""
OPEN_WITHIN_S = 10.0
"""How long the store may take to answer at all."""

Kind = Literal["killed", "frozen", "asked to resign"]


@dataclass(frozen=True, slots=True)
class InjectedFault:
    """What was done to a leader, and the instant before it was, on the boot-time clock."""

    kind: Kind
    name: str
    token: int
    at: float


@dataclass(frozen=True, slots=True)
class Reign:
    """A term, as its audit log tells of its beginning."""

    name: str
    token: int
    lease: str
    at: float
    wall: float


@dataclass(frozen=True, slots=True)
class Failover:
    """A new leader, and the fault that made it so; none at the very first, or if nobody did
    anything."""

    fault: InjectedFault | None
    to: Reign

    @property
    def seconds(self) -> float:
        return math.nan if self.fault is None else self.to.at - self.fault.at


class Chronicle:
    """What the audit logs say so far. Lines may come late: a frozen process has yet to write."""

    def __init__(self) -> None:
        self.latest: Reign | None = None
        """The term with the highest token."""
        self.failovers: list[Failover] = []
        self.pending: InjectedFault | None = None
        """A fault that no new leader has followed yet."""
        self._reigns: dict[str, Reign] = {}
        self._behind: dict[str, str] = {}
        self._deadlines: dict[str, float] = {}

    def take(self, line: dict[str, Any]) -> None:
        """Take in one line of an audit log."""
        match line["event"]:
            case "granted" | "renewed":
                self._deadlines[line["lease"]] = line["valid_until"]
            case "waiting" if line["election"] == ELECTION:
                self._behind[line["name"]] = line["behind"]
            case "elected" if line["election"] == ELECTION:
                self._deadlines.setdefault(line["lease"], line["valid_until"])
                self._elected(*(line[key] for key in ("name", "token", "lease", "at", "wall")))
            case "lost" | "resigned" if line["election"] == ELECTION:
                reign = self._reigns.get(line["name"])
                if reign is not None and reign.token == line["token"]:
                    del self._reigns[line["name"]]

    def _elected(self, name: str, token: int, lease: str, at: float, wall: float) -> None:
        reign = self._reigns[name] = Reign(name, token, lease, at, wall)
        self._behind.pop(name, None)
        if self.latest is not None and token < self.latest.token:
            return
        self.latest = reign
        fault, self.pending = self.pending, None
        if fault is not None and (token <= fault.token or at < fault.at):
            fault = None  # leadership had passed on by itself when the fault struck
        self.failovers.append(Failover(fault, reign))

    def forget(self, name: str) -> None:
        """The candidate's process is a new one."""
        self._reigns.pop(name, None)
        self._behind.pop(name, None)

    def reign(self, name: str) -> Reign | None:
        """The term that a candidate has begun and, for all it has written, not ended."""
        return self._reigns.get(name)

    def behind(self, name: str) -> str | None:
        """Whom a candidate waits for."""
        return self._behind.get(name)

    def valid_until(self, reign: Reign) -> float:
        """How long a term is good for without a further renewal."""
        return self._deadlines.get(reign.lease, -math.inf)


class Seat:
    """One candidate: a name, and the process that stands under it at present."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.audit = folder / f"{name}.audit.jsonl"
        self.errors = folder / f"{name}.errors"
        self.process: subprocess.Popen[bytes] | None = None
        self.frozen_at: float | None = None
        self.died_at = -math.inf
        self.killed = False
        self._read = 0

    @property
    def alive(self) -> bool:
        """Frozen or not. One that was killed is not, though the system may not know it yet."""
        return self.process is not None and not self.killed

    def lines(self) -> list[dict[str, Any]]:
        """What its audit log has got since the last time."""
        try:
            with self.audit.open("rb") as file:
                file.seek(self._read)
                whole, end, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._read += len(whole) + len(end)
        return [json.loads(line) for line in whole.splitlines()]

    def last_words(self) -> str:
        said = self.errors.read_text(errors="replace").strip()
        return said.splitlines()[-1] if said else "it said nothing"


class CandidateProcesses:
    """A few candidates on one store, in one folder."""

    def __init__(
        self,
        folder: Path,
        *,
        candidates: int,
        store: str,
        timing: Timing,
        worst_s: float,
        quorum: Quorum | None = None,
    ) -> None:
        self.folder = folder
        self.quorum = quorum
        """The nodes that the store consists of, if they are ours."""
        self.store = store
        self.timing = timing
        self.worst_s = worst_s
        """From a leader's silence to its successor, at worst."""
        self.thaw_after_s = worst_s + timing.ttl_s / 4
        self.now: Callable[[], float] = SystemClock().now
        self.chronicle = Chronicle()
        self.seats = [Seat(f"server{number}", folder) for number in range(1, candidates + 1)]
        self.troubles: list[str] = []
        """Candidates that ended though nobody had asked them to."""

    def tick(self) -> None:
        """Reap, read, thaw and start what is due."""
        if self.quorum is not None:
            self.quorum.tick()
        self._reap()
        self.read()
        now = self.now()
        for seat in self.seats:
            if seat.frozen_at is not None and now >= seat.frozen_at + self.thaw_after_s:
                self.thaw(seat)
            if seat.process is None and now >= seat.died_at + RESTART_AFTER_S:
                self._start(seat)

    def read(self) -> None:
        """Take in what the audit logs have got."""
        lines = [line for seat in self.seats for line in seat.lines()]
        for line in sorted(lines, key=lambda line: float(line["at"])):
            self.chronicle.take(line)

    def _start(self, seat: Seat) -> None:
        self.chronicle.forget(seat.name)
        seat.killed = False
        started = command(
            name=seat.name,
            store=self.store,
            ttl_s=self.timing.ttl_s,
            audit=str(seat.audit),
            work=str(self.folder / WORK_FILE),
        )
        with seat.errors.open("wb") as errors:
            # A group of its own: what a terminal sends to `doyen up` is not for the candidates.
            seat.process = subprocess.Popen(
                started,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                process_group=0,
            )

    def _reap(self) -> None:
        for seat in self.seats:
            if seat.process is None or (code := seat.process.poll()) is None:
                continue
            self._bury(seat)
            if code and not seat.killed:
                self.troubles.append(
                    f"{seat.name} ended by itself with code {code}: {seat.last_words()}"
                )

    def _bury(self, seat: Seat) -> None:
        if seat.process is not None and seat.process.stdin is not None:
            seat.process.stdin.close()
        seat.process = None
        seat.frozen_at = None
        seat.died_at = self.now()

    @property
    def leader(self) -> Seat | None:
        """Whose term is the latest and is not over: it may be frozen, but it is not dead."""
        latest = self.chronicle.latest
        if latest is None:
            return None
        seat = next(seat for seat in self.seats if seat.name == latest.name)
        over = self.chronicle.reign(seat.name) != latest
        expired = self.now() >= self.chronicle.valid_until(latest)
        return None if over or expired or not seat.alive else seat

    @property
    def ready(self) -> bool:
        """Somebody leads, and somebody else is ready to take over."""
        leader = self.leader
        return (
            leader is not None
            and leader.frozen_at is None
            and any(
                seat.alive and seat.frozen_at is None and self.chronicle.behind(seat.name)
                for seat in self.seats
                if seat is not leader
            )
        )

    def kill(self, seat: Seat) -> None:
        """SIGKILL; it is started again after a moment."""
        if seat.process is not None and seat.alive:
            seat.died_at = self._strike("killed", seat)
            seat.killed = True
            seat.process.send_signal(SIGKILL)

    def freeze(self, seat: Seat) -> None:
        """SIGSTOP; it is thawed once its lease must have passed on."""
        if seat.process is not None and seat.alive and seat.frozen_at is None:
            seat.frozen_at = self._strike("frozen", seat)
            seat.process.send_signal(SIGSTOP)

    def thaw(self, seat: Seat) -> None:
        """SIGCONT."""
        if seat.process is not None and seat.frozen_at is not None:
            seat.frozen_at = None
            pending = self.chronicle.pending
            if pending is not None and pending.name == seat.name and self.leader is seat:
                self.chronicle.pending = None  # in time: it still leads
            seat.process.send_signal(SIGCONT)

    def resign(self, seat: Seat) -> None:
        """Ask it to let go, if it leads."""
        if seat is self.leader and seat.process is not None and seat.process.stdin is not None:
            self._strike("asked to resign", seat)
            try:
                seat.process.stdin.write(b"r")
                seat.process.stdin.flush()
            except BrokenPipeError:
                pass  # it has just died

    def _strike(self, kind: Kind, seat: Seat) -> float:
        """Note the instant before something is done to a leader."""
        latest, now = self.chronicle.latest, self.now()
        if latest is not None and seat is self.leader:
            self.chronicle.pending = InjectedFault(kind, seat.name, latest.token, now)
        return now

    @property
    def work_done(self) -> int:
        """Items of work that the leaders have done, as the fenced file has it."""
        try:
            return int((self.folder / WORK_FILE).read_bytes() or b"0")
        except FileNotFoundError:
            return 0

    def stop(self) -> None:
        """Ask everyone to let go, and see to it that all are gone."""
        self._reap()
        running = [seat for seat in self.seats if seat.process is not None]
        for seat in running:
            self.thaw(seat)
        for seat in running:
            if seat.process is not None and seat.process.stdin is not None:
                seat.process.stdin.close()
        deadline = self.now() + STOP_WITHIN_S
        for seat in running:
            if seat.process is None:
                continue
            try:
                seat.process.wait(max(0.0, deadline - self.now()))
            except subprocess.TimeoutExpired:
                seat.killed = True
                seat.process.kill()
                seat.process.wait()
        self._reap()
        self.read()


async def _capabilities(url: str) -> Capabilities:
    try:
        async with asyncio.timeout(OPEN_WITHIN_S):
            store = await open_store(url, Context(SystemClock(), lambda _: None))
            await store.close()
    except TimeoutError as error:
        raise StoreUnavailable(f"{url} did not answer within {OPEN_WITHIN_S:g} s") from error
    return store.capabilities


def timing_on(url: str, ttl_s: float) -> tuple[Timing, float]:
    """The times of a lease of `ttl_s` on that store, and the worst failover they allow.

    Opens the store on the way, so that what is wrong with it is said before anything starts.
    """
    if StoreURL.parse(url).parts.scheme == "memory":
        raise ConfigError(
            "memory:// is within one process, and each candidate is a process of its own:"
            " name another store, or none for a temporary sqlite file"
        )
    limits = asyncio.run(_capabilities(url))
    if ttl_s < limits.ttl_min_s:
        raise ConfigError(f"a ttl of {ttl_s:g} s is below this store's least, {limits.ttl_min_s:g}")
    if limits.ttl_step_s is not None:
        ttl_s = math.ceil(ttl_s / limits.ttl_step_s) * limits.ttl_step_s
    timing = Timing(ttl_s=ttl_s)
    worst_s = timing.worst_failover_s(expiry_factor=limits.expiry_factor, notice_s=limits.notice_s)
    return timing, worst_s
