"""The port on NATS: entries in a bucket that everybody mirrors, renewals in one that nobody does.

    KV_<bucket>         entries and leases: see `mirror`
    KV_<bucket>_beats   one subject per lease: the last renewal. Its sequence is the counter

- One write decides: the record is written over nothing, or over a delete marker or a void record
  that was seen, by its sequence. It is bound to a lease by a header; if that lease had ended before
  the write, the entry is void from the start, for everybody, and its writer finds that out before
  it returns.
- Renewals are writes by the holder alone. A lease is ended in two steps: its beat is deleted, if it
  is still the one that was seen unchanged for a whole ttl (from here on no renewal succeeds), then
  the lease itself (from here on everything bound to it is void). What `unchanged for a ttl` means
  is the knowledge of the marks and the lookout; the lookout also knows who looks when.
- A lease is written before its first beat. Whatever a process leaves behind when it dies, the lease
  is in everybody's copy; leases that nobody waits for are looked at by the sweep, a few at a time.
- Void entries are deleted in the background; nothing depends on it.

Imports the port, the model, the lookout and its own package.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import re
import uuid
from builtins import list as list_
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from doyen.errors import LeaseGone, StoreError, StoreUnavailable, StoreUnusable, TicketGone
from doyen.events import LeaseEnded
from doyen.model import Entry, Finding, Lease, Version
from doyen.stores.kit.expiry import LeaseRow
from doyen.stores.kit.observer import LeaseObserver, Survey
from doyen.stores.nats.connection import (
    AT_ONCE,
    NatsAddress,
    NatsConnection,
    StoredMessage,
    StreamMissing,
    WrongSequence,
)
from doyen.stores.nats.marks import Marks
from doyen.stores.nats.mirror import CREATED, LEASE, Mirror, subject_of
from doyen.stores.port import Capabilities, Context, Creation, Store, Watch

__all__ = ["NatsStore"]

log = logging.getLogger("doyen.nats")

LOOKED_AT = 16
"""How many of the first entries of a list have their leases looked at."""
MARK_S = 0.1
"""A mark that is older is renewed when leases are looked at."""
SWEEP_S = 2.0
SWEPT = 4
"""How often, and at how many leases, the sweep looks while it finds none that is over."""
_DAMAGED_TTL_S = 60.0
"""The ttl that is assumed where neither the lease nor its beat shows one."""
_TICKET = re.compile(r"(-?\d+)-[0-9a-f]{32}")


class NatsStore(Store):
    """One handle on a bucket."""

    def __init__(self, address: NatsAddress, context: Context, *, bucket: str) -> None:
        self._emit = context.emit
        self._bucket = bucket
        self._now = context.clock.now
        self._work = NatsConnection(address, on_connect=self._reconnected)
        self._pulse = NatsConnection(address)
        self._marks = Marks()
        self._lookout = LeaseObserver(self, context.clock.now, None)
        self._mirror = Mirror(self._work, bucket, self._lookout.changed)
        self._beats: dict[str, int] = {}
        """The sequence of the last renewal of each lease that is ours."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._replicas = 1
        # Found dead by an observer whose sighting is a ttl old when it has just begun to look; a
        # candidate that has been waiting needs little more than the ttl.
        self.capabilities = Capabilities(expiry_factor=2.0, notice_s=0.1, durable=False)

    def _reconnected(self) -> None:
        self._mirror.restart()

    async def open(self, *, replicas: int, floor: int) -> None:
        """Connect, have the buckets, and a copy of the one that counts."""
        await self._work.open()
        await self._pulse.open()
        await self._have(self._bucket, replicas, floor)
        await self._have(f"{self._bucket}_beats", replicas, 0)
        state = await self._mirror.state()
        if int(state["last_seq"]) < floor:
            raise StoreUnusable(
                f"the bucket {self._bucket} is at sequence {state['last_seq']}, below"
                f" token_floor={floor}: it seems to have been restored or made anew, and would"
                " give out tokens a second time. Delete it; it is made again, above token_floor"
            )
        self._mirror.start(self._lookout.all_changed)
        await self._mirror.catch_up()
        await self._mark()
        self._spawn(self._sweep())

    async def _have(self, bucket: str, replicas: int, floor: int) -> None:
        """Make a bucket, unless there is one. Its sequences begin above `floor`."""
        stream = f"KV_{bucket}"
        try:
            config = (await self._work.ask(f"STREAM.INFO.{stream}"))["config"]
        except StreamMissing:
            answer = await self._work.ask(
                f"STREAM.CREATE.{stream}",
                name=stream,
                subjects=[f"$KV.{bucket}.>"],
                max_msgs_per_subject=1,
                discard="new",
                deny_delete=True,
                allow_rollup_hdrs=True,
                allow_msg_ttl=True,
                storage="file",
                num_replicas=max(1, replicas),
                first_seq=floor + 1,
            )
            config = answer["config"]
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{error} (bucket {bucket})") from error
        unfit = {
            "storage": (config["storage"], "file"),
            "max_age": (config.get("max_age", 0), 0),
            "allow_msg_ttl": (config.get("allow_msg_ttl", False), True),
        }
        for name, (found, needed) in unfit.items():
            if found != needed:
                raise StoreUnusable(
                    f"the bucket {bucket} has {name} {found!r}, and doyen needs {needed!r}:"
                    " name another bucket, which will be made as it should be"
                )
        self._replicas = int(config["num_replicas"])
        if self._replicas > 1:
            self.capabilities = Capabilities(
                expiry_factor=2.0, notice_s=0.1, linearizable_reads=False
            )

    async def grant(self, ttl_s: float) -> Lease:
        lease = Lease(uuid.uuid4().hex, max(ttl_s, self.capabilities.ttl_min_s))
        value = str(lease.ttl_s).encode()
        try:
            granted = await self._write(subject_of(self._bucket, "leases", lease.id), value, 0)
            beat = await self._work.write(self._beat(lease.id), value, 0)
        except WrongSequence as error:
            raise _gone(lease.id) from error
        await self._mirror.reach(granted)
        self._beats[lease.id] = beat
        return lease

    async def renew(self, lease: Lease) -> None:
        subject, value = self._beat(lease.id), str(lease.ttl_s).encode()
        while (last := self._beats.get(lease.id)) is not None:
            try:
                sequence = await self._pulse.write(subject, value, last)
            except WrongSequence:
                # Only this client renews the lease: either the lease has ended, or a renewal
                # whose answer did not come was carried out.
                found = await self._pulse.last(f"KV_{self._bucket}_beats", subject)
                if found is None or found.deleted:
                    self._beats.pop(lease.id, None)
                    break
                sequence = found.sequence
                done = False
            else:
                done = True
            if lease.id in self._beats:  # not revoked meanwhile
                self._beats[lease.id] = max(sequence, self._beats[lease.id])
            if done:
                return
        raise _gone(lease.id)

    async def revoke(self, lease: Lease) -> None:
        await self._work.bury(self._beat(lease.id), None)
        self._beats.pop(lease.id, None)
        await self._end(lease.id)

    async def _end(self, lease: str) -> None:
        """After its beat: bury the lease, and at leisure what was bound to it."""
        bound = set(self._mirror.view.bound.get(lease, ()))
        sequence = await self._work.bury(subject_of(self._bucket, "leases", lease), None)
        await self._mirror.reach(sequence)
        if bound:
            self._spawn(self._tidy(bound))

    async def _tidy(self, keys: Iterable[str]) -> None:
        for key in keys:
            last = self._mirror.view.graves.get(key)
            if last is not None:
                try:
                    await self._work.bury(self._subject(key), last)
                except (WrongSequence, StoreError):
                    continue

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        while True:
            sequence = await self._found(key, value, {LEASE: lease.id}, lease.id)
            if sequence is not None:
                await self._mirror.reach(sequence)
                self._require(lease.id)
                return Creation(True, Entry(key, value, sequence, sequence, lease.id))
            standing = await self.get(key)
            if standing is not None:
                return Creation(False, standing)

    async def _found(
        self, key: str, value: bytes, headers: dict[str, str], lease: str | None
    ) -> int | None:
        """Write an entry where nothing stands; None if something does."""
        while True:
            if lease is not None:
                self._require(lease)
            if key in self._mirror.view.entries:
                await self._mirror.catch_up()
                if key in self._mirror.view.entries:
                    return None
            tried = self._mirror.view.graves.get(key, 0)
            try:
                return await self._write(self._subject(key), value, tried, headers)
            except WrongSequence:
                found = await self._work.last(f"KV_{self._bucket}", self._subject(key))
                if found is not None:
                    await self._mirror.reach(found.sequence)
                self._mirror.learn(key, tried, found)

    async def _write(
        self, subject: str, value: bytes, last: int, headers: dict[str, str] | None = None
    ) -> int:
        """Write to the bucket, whose sequences are tokens: none may be lower than one before."""
        before = self._mirror.highest
        sequence = await self._work.write(subject, value, last, headers)
        if sequence > before:
            return sequence
        try:
            await self._work.bury(subject, sequence)
        except WrongSequence:
            pass
        raise StoreUnusable(
            f"the bucket {self._bucket} is at sequence {sequence} and was at {before} before: it"
            " was deleted or restored, or its server has lost writes, and its tokens would be lower"
            " than those already given out. Stop all candidates, delete the bucket, and connect"
            f" with token_floor={before} or higher"
        )

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        if if_version is None:
            sequence = await self._found(key, value, {}, None)
            return None if sequence is None else Entry(key, value, sequence, sequence)
        await self._mirror.catch_up()
        standing = self._mirror.view.entries.get(key)
        if standing is None or standing.version != if_version:
            return None
        headers = {CREATED: str(standing.revision)}
        try:
            sequence = await self._write(self._subject(key), value, int(str(if_version)), headers)
        except WrongSequence:
            return None
        return Entry(key, value, standing.revision, sequence)

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        while True:
            await self._mirror.catch_up()
            standing = self._mirror.view.entries.get(key)
            if standing is None or if_version not in (None, standing.version):
                return False
            try:
                await self._work.bury(self._subject(key), int(str(standing.version)))
                return True
            except WrongSequence:
                found = await self._work.last(f"KV_{self._bucket}", self._subject(key))
            if found is not None:
                await self._mirror.reach(found.sequence)
                continue
            # An operator has purged it, of which no copy was told. A delete marker tells them all.
            try:
                await self._work.bury(self._subject(key), 0)
                return True
            except WrongSequence:
                continue

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        self._require(lease.id)
        key = f"{line}/{rank}-{uuid.uuid4().hex}"
        sequence = await self._write(self._subject(key), value, 0, {LEASE: lease.id})
        await self._mirror.reach(sequence)
        self._require(lease.id)
        return Entry(key, value, sequence, sequence, lease.id)

    async def ahead(self, ticket: Entry) -> Entry | None:
        looked_at = 1
        while True:
            await self._mirror.catch_up()
            line = self._under(ticket.key.rpartition("/")[0])
            place = next((n for n, each in enumerate(line) if each.key == ticket.key), None)
            if place is None:
                raise TicketGone(f"the ticket {ticket.key} is no longer in its line")
            if not await self._end_what_is_over(line[max(0, place - looked_at) : place]):
                return line[place - 1] if place else None
            looked_at = min(2 * looked_at, AT_ONCE)  # one that is over is seldom alone

    async def get(self, key: str) -> Entry | None:
        while True:
            await self._mirror.catch_up()
            entry = self._mirror.view.entries.get(key)
            if entry is None or not await self._end_what_is_over([entry]):
                return entry

    async def list(self, prefix: str) -> list_[Entry]:
        while True:
            await self._mirror.catch_up()
            entries = self._under(prefix)
            if not await self._end_what_is_over(entries[:LOOKED_AT]):
                return entries

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        watch = await self._lookout.watch(scope, notify)
        try:
            await self._mirror.catch_up()
        except BaseException:
            watch.close()
            raise
        return watch

    async def survey(self, scopes: Sequence[str]) -> dict[str, Survey]:
        """For the lookout: whose leases it should keep an eye on."""
        found = {}
        for scope in scopes:
            here = self._mirror.view.entries.get(scope)
            entries = [*self._under(scope), *([here] if here else [])][:LOOKED_AT]
            owners = frozenset(each.lease for each in entries if each.lease is not None)
            found[scope] = Survey(frozenset(), owners)
        return found

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]:
        """For the lookout: the last renewals. Of a server's clock nothing is asked."""
        incarnation, stream = self._work.incarnation, f"KV_{self._bucket}_beats"
        if self._marks.age_s(incarnation, self._now()) >= MARK_S:
            await self._mark()
        beats = await self._work.last_of_all(stream, map(self._beat, leases))
        if self._work.incarnation != incarnation:
            raise StoreUnavailable("another server answers now: what was seen is of no use")
        found = zip(leases, beats, strict=True)
        rows = [self._row(lease, beat, incarnation) for lease, beat in found]
        for row in rows:
            if row.ttl_us is None and row.lease in self._mirror.view.leases:
                await self._end(row.lease)  # somebody began to, and did not come to the end
        return rows

    def _row(self, lease: str, beat: StoredMessage | None, incarnation: str) -> LeaseRow:
        known = self._mirror.view.leases
        if lease not in known or (beat is not None and beat.deleted):
            return LeaseRow(lease, None, 0, 0, incarnation)
        ttl_s = known[lease] or _ttl(beat)
        # Without a beat the lease is being granted, or its holder died before the first one.
        counter = 0 if beat is None else beat.sequence
        standing_s = self._marks.standing_s(incarnation, counter, self._now()) if beat else 0.0
        return LeaseRow(lease, round(ttl_s * 1e6), counter, -1, incarnation, standing_s)

    async def _mark(self) -> None:
        incarnation = self._work.incarnation
        state = (await self._work.ask(f"STREAM.INFO.KV_{self._bucket}_beats"))["state"]
        if self._work.incarnation == incarnation:
            self._marks.note(incarnation, int(state["last_seq"]), self._now())

    async def _sweep(self) -> None:
        """End leases that are over though nobody waits for them.

        Every client looks at a few leases at a time, beginning anywhere, so that many clients
        find them sooner. While most of them are over it looks at more, and works for a third of
        the time; renewals go on meanwhile, on a connection of their own.
        """
        loop = asyncio.get_running_loop()
        due: deque[str] = deque()
        number, pause_s = SWEPT, SWEEP_S
        while True:
            await asyncio.sleep(pause_s)
            number, pause_s, began = max(SWEPT, number // 2), SWEEP_S, loop.time()
            if not due:
                due.extend(lease for lease, ttl_s in self._mirror.view.leases.items() if ttl_s)
                due.rotate(random.randrange(len(due) + 1))
            leases = [due.popleft() for _ in range(min(number, len(due)))]
            leases = [each for each in leases if each not in self._beats]
            try:
                if 2 * await self._end_if_over(leases) > len(leases):
                    number, pause_s = min(4 * number, 4 * AT_ONCE), 2 * (loop.time() - began)
            except (StoreError, WrongSequence) as error:
                log.debug("leases could not be swept: %s", error)

    async def seal(self, lease: str, counter: int) -> None:
        """For the lookout: end a lease, if it has not been renewed after all."""
        try:
            await self._work.bury(self._beat(lease), counter)
        except WrongSequence:
            return
        self._emit(LeaseEnded(lease=lease, cause="expired"))
        await self._end(lease)

    async def position(self) -> int:
        return 0

    async def diagnose(self) -> Sequence[Finding]:
        version = self._work.version
        findings = [Finding(level="ok", subject="version", text=f"NATS {version}")]
        if self._replicas == 1:
            findings.append(
                Finding(
                    level="warning",
                    subject="durability",
                    text="the bucket has one replica, and by default a server confirms what it has"
                    " not yet written to disk: if it dies, confirmed writes may be lost, and a"
                    " second leader named; only tokens of other terms protect then",
                    remedy="set jetstream.sync_interval to always, or use three replicas",
                )
            )
        return findings

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self._lookout.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._mirror.close()
        await self._pulse.close()
        await self._work.close()

    async def _end_what_is_over(self, entries: Iterable[Entry]) -> bool:
        """Look at the leases of entries; whether any was over, and has been ended."""
        leases = {each.lease for each in entries if each.lease is not None}
        return await self._end_if_over(sorted(leases)) > 0

    async def _end_if_over(self, leases: Sequence[str]) -> int:
        """End those of the leases that are over, together; how many that were."""
        over = [row for row in await self.look(leases) if self._lookout.judge(row).over]
        to_seal = [row for row in over if row.ttl_us is not None]
        for start in range(0, len(to_seal), AT_ONCE):
            some = to_seal[start : start + AT_ONCE]
            seals = (self.seal(row.lease, row.counter) for row in some)
            for outcome in await asyncio.gather(*seals, return_exceptions=True):
                if isinstance(outcome, BaseException):
                    raise outcome
        return len(over)

    def _under(self, prefix: str) -> list_[Entry]:
        entries = [
            entry
            for key, entry in self._mirror.view.entries.items()
            if key.startswith(f"{prefix}/")
        ]
        return sorted(entries, key=lambda entry: (-_rank(entry.key), entry.revision))

    def _require(self, lease: str) -> None:
        if lease not in self._mirror.view.leases:
            raise _gone(lease)

    def _subject(self, key: str) -> str:
        return subject_of(self._bucket, "entries", key)

    def _beat(self, lease: str) -> str:
        return f"$KV.{self._bucket}_beats.{lease}"


def _ttl(beat: StoredMessage | None) -> float:
    """The ttl by a beat, for a lease whose own value is damaged."""
    try:
        ttl_s = float(beat.value) if beat else _DAMAGED_TTL_S
    except ValueError:
        return _DAMAGED_TTL_S
    return ttl_s if 0 < ttl_s < math.inf else _DAMAGED_TTL_S


def _gone(lease: str) -> LeaseGone:
    return LeaseGone(f"the lease {lease} has ended")


def _rank(key: str) -> int:
    ticket = _TICKET.fullmatch(key.rpartition("/")[2])
    return int(ticket[1]) if ticket else 0
