"""The check of what clients of the keyspace see, against the log.

- **Writes.** An acknowledged write is in the log as it was requested, at an index after everything
  that was acknowledged before the request. A refused write is not in the log. No write is in it
  twice.
- **Reads.** Each shows the state after some entry that was committed when the answer came, and that
  is no earlier than what any client had seen when the read began.
- **Leases.** None expires before its ttl has passed, in true time, since the last confirmed renewal
  was sent. No client is told that a lease has ended that has not. While one node leads and commits,
  each lease ends within twice its ttl and `LATE_S` of the last renewal that arrived at a leader.
  After all faults have ended, the leases of dead processes end.
- **Watches.** A client that reads over a connection is notified, at the latest with the answer, of
  every change that its watches on this connection cover. An entry that a notification carries is
  the one after the change of which it notifies, or a later one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from doyen.lab.processes import Process
from doyen.lab.reference import Reference
from doyen.model import Entry, Lease
from doyen.quorum.keyspace.commands import StoredEntry
from doyen.quorum.keyspace.state import Keyspace

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld

CLIENT_TTL_S = 1.0
"""The ttl of clients' leases."""
NOTIFY_S = 0.5
"""A read proves something about notifications of changes that were committed this long before."""
LATE_S = 2.0
"""How much later than twice its ttl a lease may end. A leader that has just start to lead, or was
paused, needs that much."""
ABANDONED_S = 2 * CLIENT_TTL_S + 6.0
"""How long a lease may outlive its process after the end of all faults: twice its ttl and two
elections."""


class RequestStart(NamedTuple):
    """When a request was sent, and what was known then."""

    at: float
    low: int
    """The last log index that the answer to any client had shown."""


@dataclass(slots=True)
class ObservedWatch:
    """A watch as its client sees it."""

    scope: str
    established_at: float = inf
    notified_at: float = -inf


@dataclass(slots=True)
class HeldLease:
    """A lease as its owner sees it."""

    process: Process
    renewed_at: float
    """When the last confirmed renewal, or the grant, was sent."""
    abandoned: bool = False
    """The owner revokes it, and may not learn whether that succeeded."""


class ClientChecker:
    """Checks the answers and notifications of all clients."""

    def __init__(self, world: QuorumWorld, reference: Reference) -> None:
        self._world = world
        self._reference = reference
        self._low = 0
        self._held: dict[int, HeldLease] = {}
        self._refused: dict[bytes, None] = {}
        self._renewals: dict[int, float] = {}
        """By lease: when a renewal last arrived at a node that led, or had led."""
        self.watches: dict[Process, list[ObservedWatch]] = {}
        self.answers = 0
        self.entries_carried = 0
        self.next_number: Callable[[], int] = count(1).__next__
        """Numbers that make the values of all writes different."""

    def begin(self) -> RequestStart:
        return RequestStart(self._world.loop.time(), self._low)

    def _answered(self, index: int) -> None:
        self._low = max(self._low, index)
        self.answers += 1
        self._world.service.answered()

    # Reads and writes.

    def read(
        self, start: RequestStart, scopes: Sequence[str], explains: Callable[[int], bool]
    ) -> None:
        """A read was answered. `explains` says whether the state after an entry gives that
        answer."""
        for index in self._reference.keys.points(scopes, start.low, self._reference.index):
            if explains(index):
                self._answered(index)
                return
        self._world.fail(
            "read",
            f"what was read at {', '.join(scopes)} was not there after any entry from {start.low}"
            f" to {self._reference.index}",
        )

    def version_differed(self, start: RequestStart, key: str, version: int | None) -> None:
        """A conditional write failed: the entry had another version, perhaps only between two
        commands of one log entry."""
        refused = self._reference.keyspace.refused.get((key, version or 0), ())
        if (at := next((each for each in refused if each > start.low), None)) is not None:
            self._answered(at)
            return

        def explains(index: int) -> bool:
            stored = self._reference.keys.at(key, index)
            return (stored.version if stored is not None else None) != version

        self.read(start, [key], explains)

    def wrote(self, start: RequestStart, entry: Entry) -> None:
        written = self._reference.keyspace.written.get(version_number(entry))
        if written is None or not same_entry(entry, written.record):
            self._world.fail("lost write", f"{entry.key} was acknowledged, but is not in the log")
        elif written.log_index < start.low:
            self._world.fail("order", f"{entry.key} was written before it was requested")
        else:
            self._answered(written.log_index)

    def deleted(self, key: str, version: int) -> None:
        index = self._reference.keyspace.deleted.get(version)
        if index is None:
            self._world.fail(
                "lost write", f"a delete of {key} was acknowledged, but is not in the log"
            )
        else:
            self._answered(index)

    def refused(self, value: bytes) -> None:
        """The client was told that this value was not written and will not be."""
        self._refused[value] = None

    # Leases.

    def granted(self, lease: Lease, process: Process, sent: float) -> None:
        known = self._reference.keyspace.leases.get(int(lease.id))
        if known is None or known.ttl_s != lease.ttl_s:
            self._world.fail("lost write", f"lease {lease.id} was granted, but is not in the log")
            return
        self._held[int(lease.id)] = HeldLease(process, sent)
        self._answered(known.index)
        self.check_expired()

    def renewed(self, lease: Lease, sent: float) -> None:
        self._held[int(lease.id)].renewed_at = sent
        self._world.service.answered()
        self.check_expired()

    def renewals_arrived(self, leases: list[int]) -> None:
        self._renewals |= dict.fromkeys(leases, self._world.loop.time())

    def check_overdue(self, steady_since: float) -> None:
        """Check that leases have ended in time, given that one node has led and committed since
        then."""
        now = self._world.loop.time()
        for number in self._reference.keyspace.unended:
            lease = self._reference.keyspace.leases[number]
            since = max(steady_since, lease.began, self._renewals.get(number, 0.0))
            if (late_s := now - since - lease.ttl_s) > lease.ttl_s + LATE_S:
                self._world.fail(
                    "lease", f"lease {number} has not ended {late_s:.3f} s after its ttl"
                )

    def abandoned(self, lease: Lease) -> None:
        """The owner is about to revoke its lease."""
        self._held[int(lease.id)].abandoned = True

    def revoked(self, lease: Lease) -> None:
        """A revocation was acknowledged: from now on no client may see entries of this lease."""
        known = self._reference.keyspace.leases[int(lease.id)]
        if known.ended == inf:
            self._world.fail("lost write", f"lease {lease.id} was revoked, but has not ended")
        else:
            self._answered(known.end_index)

    def gone(self, lease: Lease) -> None:
        if self._reference.keyspace.leases[int(lease.id)].ended == inf:
            self._world.fail(
                "lease", f"a client was told that lease {lease.id} has ended, but it has not"
            )

    def check_expired(self) -> None:
        """Check that no lease expired early: entries were committed, or a renewal confirmed."""
        for number, held in list(self._held.items()):
            lease = self._reference.keyspace.leases[number]
            if lease.ended == inf:
                continue
            early_s = held.renewed_at + lease.ttl_s - lease.ended
            if lease.expired and early_s > 1e-6:
                self._world.fail(
                    "lease",
                    f"lease {number} expired {early_s:.3f} s before its ttl had passed since a"
                    " confirmed renewal",
                )
            if held.process.dead or self._world.loop.time() > lease.ended + 60:
                del self._held[number]

    def lease_left(self) -> str | None:
        """Describe a lease that has not ended although its process is dead, after the end of all
        faults."""
        now, since = self._world.loop.time(), self._world.measurements.healed_at
        for number in self._reference.keyspace.unended:
            lease, held = self._reference.keyspace.leases[number], self._held.get(number)
            if lease.ttl_s != CLIENT_TTL_S or (
                held and not held.process.dead and not held.abandoned
            ):
                continue
            if now - max(since, lease.began) > ABANDONED_S:
                text = f"lease {number} has not ended, though its process died long ago"
                self._world.fail("lease", text)
            return f"lease {number} of a dead process has not ended"
        return None

    # Watches.

    def carried(self, key: str, entry: Entry, revision: int) -> None:
        """A notification of the changes up to this revision carried the entry."""
        reference = self._reference
        keys, first = reference.keys, bisect_left(reference.revisions, revision)
        self.entries_carried += 1
        points = keys.points([key], first, reference.index)
        if not any(same_entry(entry, keys.at(key, index)) for index in points):
            self._world.fail(
                "watch", f"a notification carried {key} as it was before revision {revision}"
            )

    def read_answered(self, process: Process, start: RequestStart) -> None:
        """A read of this process was answered over the connection of its watches. Notifications of
        changes before the read came with the answer at the latest."""
        self._world.loop.call_soon(self._check_notified, process, start, context=process.context)

    def _check_notified(self, process: Process, start: RequestStart) -> None:
        for watch in self.watches.get(process, ()):
            changed = self._reference.keys.last_change(watch.scope, start.at - NOTIFY_S)
            if changed > watch.established_at and watch.notified_at < changed:
                self._world.fail(
                    "watch",
                    f"{process.machine} watches {watch.scope}, which changed at {changed:.3f} s,"
                    " but has not been notified since",
                )

    def watch_left(self) -> str | None:
        """Describe a watch that was not notified of a change."""
        now = self._world.loop.time()
        for process, watches in self.watches.items():
            if process.dead:
                continue
            for watch in watches:
                changed = self._reference.keys.last_change(watch.scope, now - NOTIFY_S)
                if changed > watch.established_at and watch.notified_at < changed:
                    return f"{process.machine} was not notified of a change of {watch.scope}"
        return None

    # The end.

    def check_writes(self) -> None:
        """Check that no value was written twice, or was written though it was refused."""
        for value, times in self._reference.keyspace.values.items():
            if times > 1 and value.startswith(b"op"):
                self._world.fail("twice", f"{value[:12]!r} was written {times} times")
            if value in self._refused:
                self._world.fail("refused", f"{value[:12]!r} was refused, but it was written")

    def check_state(self, name: str, keyspace: Keyspace) -> None:
        """Compare the keyspace of a node that has applied the whole log with the reference."""
        log, stored = self._reference, self._reference.keyspace
        figures = attrgetter("revision", "era", "version", "quota")
        leases = [lease for lease, _ in keyspace.leases()]
        expected = figures(stored), stored.bytes(), sorted(stored.unended)
        actual = figures(keyspace), keyspace.bytes, leases
        same = all(
            [*keyspace.list(prefix)] == log.keys.under(prefix, log.index)
            for prefix in ("k", "l", "elections")
        )
        if expected != actual or not same:
            self._world.fail("state", f"{name} has another state than the reference")


def version_number(entry: Entry) -> int:
    return entry.version if isinstance(entry.version, int) else -1


def same_entry(entry: Entry | None, record: StoredEntry | None) -> bool:
    if entry is None or record is None:
        return entry is None and record is None
    lease = str(record.lease) if record.lease else None
    shared = attrgetter("key", "value", "revision", "version")
    return (shared(entry), entry.lease) == (shared(record), lease)
