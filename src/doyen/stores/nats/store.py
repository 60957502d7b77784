"""The port on NATS: entries in a bucket that everybody mirrors, renewals in one that nobody does.

    KV_<bucket>         entries and leases: see `mirror`
    KV_<bucket>_beats   one subject per lease: the last renewal. Its sequence is the counter

- One write decides: the record is written if its subject's last sequence is what it was when
  nothing stood there. It is bound to a lease by a header; if that lease had ended before the write,
  the entry is void from the start, for everybody, and its writer finds that out before it returns.
- Renewals are writes by the holder alone. A lease is ended in two steps: its beat is buried, if it
  is still the one that was seen unchanged for a whole ttl (from here on no renewal succeeds), then
  the lease itself (from here on everything bound to it is void). What `unchanged for a ttl` means,
  and who looks when, is the lookout's knowledge.
- What is void is buried at leisure; nothing depends on it.

Imports the port, the model, the lookout and its own package.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from builtins import list as list_
from collections.abc import Callable, Iterable, Sequence

from doyen.errors import LeaseGone, StoreError, StoreUnavailable, StoreUnusable, TicketGone
from doyen.events import LeaseEnded
from doyen.lookout import LeaseRow, Lookout, Survey
from doyen.model import Entry, Finding, Lease, Version
from doyen.store import Capabilities, Context, Creation, Store, Watch
from doyen.stores.nats.link import Address, Link, Refused
from doyen.stores.nats.mirror import CREATED, LEASE, Mirror, subject_of

__all__ = ["NatsStore"]

LOOKED_AT = 16
"""How many of the first entries of a list have their leases looked at."""
_TICKET = re.compile(r"(-?\d+)-[0-9a-f]{32}")


class NatsStore(Store):
    """One handle on a bucket."""

    def __init__(self, address: Address, context: Context, *, bucket: str) -> None:
        self._emit = context.emit
        self._bucket = bucket
        self._work = Link(address, on_reconnect=self._reconnected)
        self._pulse = Link(address)
        self._lookout = Lookout(self, context.clock.now, None)
        self._mirror = Mirror(self._work, bucket, self._lookout.changed)
        self._beats: dict[str, int] = {}
        """The sequence of the last renewal of each lease that is ours."""
        self._tidying: set[asyncio.Task[None]] = set()
        self._replicas = 1
        # Found dead by an observer whose sighting is a ttl old when it has just begun to look; a
        # candidate that has been waiting needs little more than the ttl.
        self.capabilities = Capabilities(expiry_factor=2.0, notice_s=0.1)

    def _reconnected(self) -> None:
        self._mirror.restart()

    async def open(self, *, replicas: int, floor: int) -> None:
        """Connect, have the buckets, and a copy of the one that counts."""
        await self._work.open()
        await self._pulse.open()
        for bucket in (self._bucket, f"{self._bucket}_beats"):
            await self._have(bucket, replicas)
        state = await self._mirror.state()
        if int(state["last_seq"]) < floor:
            raise StoreUnusable(
                f"the bucket {self._bucket} is at sequence {state['last_seq']}, below"
                f" token_floor={floor}: it seems to have been restored or made anew, and would"
                " give out tokens a second time"
            )
        self._mirror.start(self._lookout.all_changed)
        await self._mirror.catch_up()

    async def _have(self, bucket: str, replicas: int) -> None:
        """Make a bucket, unless there is one."""
        stream = f"KV_{bucket}"
        try:
            config = (await self._work.ask(f"STREAM.INFO.{stream}"))["config"]
        except KeyError:
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
        beat = await self._work.write(self._beat(lease.id), str(lease.ttl_s).encode(), 0)
        subject = subject_of(self._bucket, "leases", lease.id)
        await self._mirror.reach(await self._work.write(subject, str(lease.ttl_s).encode(), 0))
        self._beats[lease.id] = beat
        return lease

    async def renew(self, lease: Lease) -> None:
        subject, value = self._beat(lease.id), str(lease.ttl_s).encode()
        while (last := self._beats.get(lease.id)) is not None:
            try:
                self._beats[lease.id] = await self._pulse.write(subject, value, last)
                return
            except Refused:
                # Ours alone are the renewals: an earlier one was given up, and done all the same.
                found = await self._pulse.last(f"KV_{self._bucket}_beats", subject)
                if found is None or found.deleted:
                    self._beats.pop(lease.id, None)
                else:
                    self._beats[lease.id] = found.sequence
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
            task = asyncio.get_running_loop().create_task(self._tidy(bound))
            self._tidying.add(task)
            task.add_done_callback(self._tidying.discard)

    async def _tidy(self, keys: Iterable[str]) -> None:
        for key in keys:
            last = self._mirror.view.graves.get(key)
            if last is not None:
                try:
                    await self._work.bury(self._subject(key), last)
                except (Refused, StoreError):
                    continue

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        sequence = await self._found(key, value, {LEASE: lease.id}, lease.id)
        if sequence is None:
            standing = await self.get(key)
            return (
                await self.create(key, value, lease)
                if standing is None
                else Creation(False, standing)
            )
        await self._mirror.reach(sequence)
        self._require(lease.id)
        return Creation(True, Entry(key, value, sequence, sequence, lease.id))

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
            last = self._mirror.view.graves.get(key, 0)
            try:
                return await self._work.write(self._subject(key), value, last, headers)
            except Refused:
                await self._mirror.catch_up()
                if self._mirror.view.graves.get(key, 0) == last:
                    # Its grave is not known here any more, or has been forgotten there.
                    found = await self._work.last(f"KV_{self._bucket}", self._subject(key))
                    self._mirror.view.graves.pop(key, None)
                    if found is not None:
                        self._mirror.view.graves[key] = found.sequence

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
            sequence = await self._work.write(
                self._subject(key), value, int(str(if_version)), headers
            )
        except Refused:
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
            except Refused:
                continue

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        self._require(lease.id)
        key = f"{line}/{rank}-{uuid.uuid4().hex}"
        sequence = await self._work.write(self._subject(key), value, 0, {LEASE: lease.id})
        await self._mirror.reach(sequence)
        self._require(lease.id)
        return Entry(key, value, sequence, sequence, lease.id)

    async def ahead(self, ticket: Entry) -> Entry | None:
        while True:
            await self._mirror.catch_up()
            line = self._under(ticket.key.rpartition("/")[0])
            place = next((n for n, each in enumerate(line) if each.key == ticket.key), None)
            if place is None:
                raise TicketGone(f"the ticket {ticket.key} is no longer in its line")
            if not await self._end_what_is_over(line[max(0, place - 1) : place]):
                return line[place - 1] if place else None

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
        incarnation, rows = self._work.incarnation, []
        for lease in leases:
            found = await self._work.last(f"KV_{self._bucket}_beats", self._beat(lease))
            if found is None or found.deleted:
                if lease in self._mirror.view.leases:
                    await self._end(lease)  # somebody began to, and did not come to the end
                rows.append(LeaseRow(lease, None, 0, 0, incarnation))
            else:
                ttl_us = round(float(found.value) * 1e6)
                rows.append(LeaseRow(lease, ttl_us, found.sequence, -1, incarnation))
        return rows

    async def seal(self, lease: str, counter: int) -> None:
        """For the lookout: end a lease, if it has not been renewed after all."""
        try:
            await self._work.bury(self._beat(lease), counter)
        except Refused:
            return
        self._emit(LeaseEnded(lease=lease, cause="expired"))
        await self._end(lease)

    async def position(self) -> int:
        return 0

    async def diagnose(self) -> Sequence[Finding]:
        version = str(self._work.client.connected_server_version)
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

    async def close(self) -> None:
        self._lookout.close()
        for task in self._tidying:
            task.cancel()
        await asyncio.gather(*self._tidying, return_exceptions=True)
        await self._mirror.close()
        await self._pulse.close()
        await self._work.close()

    async def _end_what_is_over(self, entries: Iterable[Entry]) -> bool:
        """Look at the leases of entries; whether any was over, and has been ended."""
        leases = {each.lease for each in entries if each.lease is not None}
        ended = False
        for row in await self.look(sorted(leases)):
            if self._lookout.judge(row).over:
                ended = True
                if row.ttl_us is not None:
                    await self.seal(row.lease, row.counter)
        return ended

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


def _gone(lease: str) -> LeaseGone:
    return LeaseGone(f"the lease {lease} has ended")


def _rank(key: str) -> int:
    ticket = _TICKET.fullmatch(key.rpartition("/")[2])
    return int(ticket[1]) if ticket else 0
