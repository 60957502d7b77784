"""The port on ZooKeeper: sessions, ephemeral znodes, and the line.

A lease is a session of its own, with its own connection: `renew` writes to a znode of the lease, so
that it counts only once a majority has the write. Whatever is not bound to a lease, every read and
every watch goes through the store's own session.

A server answers reads from its own state, which may be old. ZooKeeper's `sync` does not quite
prevent that: the ensemble's leader does not wait for writes that it has confirmed through a
follower, and a leader that was partitioned does not know that it was deposed. So reads follow an
empty transaction on the same session, one for all reads that are made at the same time: whatever
was acknowledged before it was sent is carried out before it.

The version of a znode begins at 0 again when the znode is created anew, so by itself it does not
distinguish an entry from its successor. Hence the rule that makes `if_version` atomic: *a
transaction that creates an entry also writes to the parent znode*. A change of an entry checks
that the parent has not been written since the entry was read, and so that the entry is still the
same. Tickets do not need this, because their names are never used again.

Imports the modules beside it, the kit, the port and the model.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError
from kazoo.protocol.serialization import (
    CheckVersion,
    Create,
    Create2,
    Delete,
    Exists,
    GetChildren,
    GetData,
    SetData,
)
from kazoo.security import CREATOR_ALL_ACL, OPEN_ACL_UNSAFE

from doyen._waiting import shared
from doyen.errors import ConfigError, LeaseGone, StoreError, StoreUnusable, TicketGone
from doyen.model import Entry, Finding, Lease, Version
from doyen.stores.kit.batches import Batches, one_by_one
from doyen.stores.kit.lifecycle import GuardedStore
from doyen.stores.port import Capabilities, Creation, Looked, Watch
from doyen.stores.zookeeper.connection import ZooKeeperAddress
from doyen.stores.zookeeper.diagnosis import findings, states
from doyen.stores.zookeeper.paths import Layout, in_line, is_ticket, ticket_stem
from doyen.stores.zookeeper.session import ForeignSession, LeaseSession, ZooKeeperSession
from doyen.stores.zookeeper.watches import ZooKeeperWatches, or_none

__all__ = ["ZooKeeperStore"]

_EPHEMERAL, _SEQUENCE = 1, 2
"""Flags of a create request."""
_SESSION_S = 6.0
"""The length of the store's own session, to which no entry is bound."""
_LARGEST = 1_000_000
"""ZooKeeper closes the connection on a request above its default limit."""
_LAST_TICKET = 2**31 - 2**20
"""ZooKeeper numbers tickets with 31 bits, after which numbers repeat."""
_CLOSED_WITHIN_S = 3.0
_DELETIONS_IN_FLIGHT, _DELETED_AT_ONCE = 16, 32


class _Unchanged(NamedTuple):
    """The condition that an entry is still the one that was read."""

    check: CheckVersion
    """The first request of every transaction that changes the entry."""
    version: int
    ephemeral: bool


class ZooKeeperStore(GuardedStore):
    """One client of a ZooKeeper ensemble."""

    capabilities = Capabilities(
        renewals_lag=True,
        # Four ticks of the usual two seconds; see the documents for why four.
        ttl_default_s=8.0,
        # A session ends at a full tick, and a follower reports its sessions every half tick. No
        # session is shorter than two ticks.
        ttl_min_s=0.4,
        expiry_factor=1.75,
        value_bytes=_LARGEST,
        value_limit="ZooKeeper's jute.maxbuffer",
    )

    make_layout: ClassVar[type[Layout]] = Layout

    def __init__(
        self, address: ZooKeeperAddress, *, chroot: str, private: bool = False, token_floor: int = 0
    ) -> None:
        self._address = address
        self._layout = self.make_layout(chroot)
        self._acl = CREATOR_ALL_ACL if private else OPEN_ACL_UNSAFE
        self._floor = token_floor
        self._leases: dict[str, LeaseSession] = {}
        self._foreign: dict[bytes, ForeignSession] = {}
        """Sessions of other processes that are being closed, by their warrants."""
        self._created: dict[str, tuple[Version, _Unchanged]] = {}
        """Entries that this store has created under a lease. They are deleted without a read."""
        self._watches = ZooKeeperWatches(self._layout)
        self._session = self._watches.session = ZooKeeperSession(
            address,
            timeout_s=_SESSION_S,
            on_up=self._watches.went_up,
            on_down=self._watches.went_down,
        )
        self._loop = asyncio.get_running_loop()
        self._deletions = Batches(
            self._delete, most=_DELETED_AT_ONCE, in_flight=_DELETIONS_IN_FLIGHT
        )
        self._reads: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._highest = 0
        """The highest transaction number seen. New transactions must have higher ones."""

    async def open(self, *, create: bool = True) -> None:
        """Begin the session, and check that the chroot exists and may be used."""
        await self._session.open()
        root = self._layout.root
        if root and create:
            await self._ensure(self._session, root)
        try:
            await self._session.send(GetChildren(root or "/", None))
        except NoNodeError as error:
            raise StoreUnusable(
                f"there is no znode {root}, and a query creates none: no candidate has used this"
                " store yet; check the URL"
            ) from error

    async def grant(self, ttl_s: float) -> Lease:
        ask_s = max(ttl_s, self.capabilities.ttl_min_s)
        session = LeaseSession(self._address, timeout_s=ask_s)
        began = self._address.clock.now()
        try:
            await session.open()
            session.until = began + session.granted_s
            if session.granted_s < ask_s - 1e-6:
                raise ConfigError(
                    f"ttl_s={ttl_s:g} is above what this ZooKeeper grants, {session.granted_s:g} s:"
                    " ask for less, or raise its maxSessionTimeout"
                )
            await self._create_ephemeral(session, self._layout.lease(session.id))
        except BaseException:
            session.end("it was given up before it began")
            raise
        self._leases[session.id] = session
        own = self._session.requests
        own.patience_s = min(own.patience_s, session.requests.patience_s)
        return Lease(session.id, session.granted_s)

    async def renew(self, lease: Lease) -> None:
        session = await self._session_of(lease)
        answer = session.renew(self._layout.lease(lease.id))
        # An idle watch connection that died goes unnoticed, so probe it.
        self._session.probe(session.granted_s / 3)
        try:
            await answer
        except NoNodeError as error:
            session.lost_because = "its znode was removed"
            raise LeaseGone(f"the znode of lease {lease.id} was removed") from error

    async def revoke(self, lease: Lease) -> None:
        session = self._leases.get(lease.id)
        if session is None:
            return
        await shared(session.revoke("it was revoked"))
        self._leases.pop(lease.id, None)

    def warrant(self, lease: Lease) -> bytes:
        session = self._leases.get(lease.id)
        return b"" if session is None else session.warrant()

    async def end(self, warrant: bytes) -> None:
        session = self._foreign.get(warrant)
        if session is None:
            session = self._foreign[warrant] = ForeignSession(self._address, warrant)
            session.close()
        # If this call is cancelled, the session is closed nevertheless, and the next call waits.
        await shared(session.ended)
        self._foreign.pop(warrant, None)

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        path = self._layout.leaf(key)
        _refuse_large(value)
        session = await self._session_of(lease)
        async with session.slots:
            while True:
                revision = await self._create(session, path, value, ephemeral=True)
                if revision is not None:
                    return Creation(True, self._entry(key, value, revision, 0, lease.id))
                try:
                    existing = await session.send(GetData(path, None))
                except NoNodeError:
                    continue
                return Creation(False, self._entry_of(key, existing))

    async def create_and_look(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked:
        """The reads follow the creation on the session of the lease, so they need no barrier."""
        if ticket is None:
            return await super().create_and_look(key, value, lease, ticket, other)
        path, (line, name) = self._layout.leaf(key), _split(ticket.key)
        _refuse_large(value)
        session = await self._session_of(lease)
        requests = (
            GetChildren(self._layout.line(line), None),
            GetData(self._layout.leaf(other), None),
        )
        reads: list[asyncio.Future[Any]] = []
        async with session.slots:
            revision = await self._create(
                session,
                path,
                value,
                ephemeral=True,
                then=lambda: reads.extend(map(session.send, requests)),
            )
        if revision is None:
            return await super().create_and_look(key, value, lease, ticket, other)
        creation = Creation(True, self._entry(key, value, revision, 0, lease.id))
        try:
            names, found = [await or_none(answer) for answer in reads[-2:]]
            is_next = in_line(names or ())[:1] == [name]
            ahead = None if is_next else await self.ahead(ticket)
        except StoreError as error:
            return Looked(creation, failure=error)
        return Looked(creation, ahead, None if found is None else self._entry_of(other, found))

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        path = self._layout.leaf(key)
        _refuse_large(value)
        if if_version is None:
            revision = await self._create(self._session, path, value, ephemeral=False)
            return None if revision is None else self._entry(key, value, revision, 0, None)
        while (same := await self._unchanged(path, if_version)) is not None:
            try:
                if same.ephemeral:
                    # An ephemeral znode cannot be made persistent, so it is replaced.
                    *_, written = await self._session.transact(
                        same.check,
                        Delete(path, same.version),
                        Create(path, value, self._acl, 0),
                        SetData(_split(path)[0], b"", -1),
                    )
                    return self._entry(key, value, written.mzxid, 0, None)
                _, written = await self._session.transact(
                    same.check, SetData(path, value, same.version)
                )
                return self._entry(key, value, written.czxid, written.version, None)
            except (BadVersionError, NoNodeError):
                continue
        return None

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        path = self._layout.leaf(entry.key)
        _refuse_large(value)
        while (same := await self._unchanged(path, entry.version)) is not None:
            if not same.ephemeral:
                return None
            try:
                _, written = await self._session.transact(
                    same.check, SetData(path, value, same.version)
                )
            except (BadVersionError, NoNodeError):
                continue
            updated = self._entry(entry.key, value, written.czxid, written.version, entry.lease)
            self._created[path] = (updated.version, same._replace(version=written.version))
            return updated
        return None

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        return await self._deletions.ask((self._layout.leaf(key), if_version))

    async def _delete(
        self, deletions: Sequence[tuple[str, Version | None]]
    ) -> Sequence[bool | BaseException]:
        """Deletions as one transaction: a leader that resigns deletes its record and its ticket. If
        one of them is refused, so is the transaction, and each is then tried by itself."""
        if len(deletions) == 1:
            return [await self._delete_one(*deletions[0])]
        requests = [self._deletion(path, version) for path, version in deletions]
        if len(dict(deletions)) == len(deletions) and all(requests):
            try:
                await self._session.transact(*itertools.chain.from_iterable(requests))
            except (BadVersionError, NoNodeError):
                pass
            else:
                for path, _ in deletions:
                    self._created.pop(path, None)
                return [True] * len(deletions)
        return await one_by_one(self._delete, deletions)

    def _deletion(self, path: str, version: Version | None) -> Sequence[Any]:
        """The requests for a deletion; none if the entry has to be read first."""
        if version is None or is_ticket(_split(path)[1]):
            return [Delete(path, -1)]
        created = self._created.get(path)
        if created is None or created[0] != version:
            return []
        return [created[1].check, Delete(path, created[1].version)]

    async def _delete_one(self, path: str, if_version: Version | None) -> bool:
        if if_version is None or is_ticket(_split(path)[1]):
            try:
                await self._session.send(Delete(path, -1))
            except NoNodeError:
                return False
            return True
        while (same := await self._unchanged(path, if_version)) is not None:
            try:
                await self._session.transact(same.check, Delete(path, same.version))
            except (BadVersionError, NoNodeError):
                continue
            return True
        return False

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        parent = self._layout.line(line)
        _refuse_large(value)
        session = await self._session_of(lease)
        stem = f"{parent}/{ticket_stem(rank)}"
        async with session.slots:
            path, stat = await self._create_ephemeral(session, stem, value, sequence=True)
        name = _split(path)[1]
        await self._refuse_used_up(session, path)
        return self._entry_of(f"{line}/{name}", (value, stat))

    async def ahead(self, ticket: Entry) -> Entry | None:
        line, name = _split(ticket.key)
        while True:
            tickets = await self._line(line)
            if name not in tickets:
                raise TicketGone(f"{ticket.key} is no longer in the line")
            place = tickets.index(name)
            if place == 0:
                return None
            ahead = await self._get(f"{line}/{tickets[place - 1]}")
            if ahead is not None:
                return ahead

    async def get(self, key: str) -> Entry | None:
        try:
            (found,) = await self._fresh(GetData(self._layout.leaf(key), None))
        except NoNodeError:
            return None
        return self._entry_of(key, found)

    async def list(self, prefix: str) -> list[Entry]:
        await self._fresh()
        leaves = await self._layout.walk(prefix, self._children)
        entries = await asyncio.gather(*(self._get(leaf.key, leaf.path) for leaf in leaves))
        return [entry for entry in entries if entry is not None]

    async def head(self, line: str) -> Entry | None:
        while tickets := await self._line(line):
            if (first := await self._get(f"{line}/{tickets[0]}")) is not None:
                return first
        return None

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        return await self._watches.watch(scope, notify)

    async def diagnose(self) -> Sequence[Finding]:
        return findings(await states(self._address))

    def _abandon(self) -> None:
        for session in (self._session, *self._leases.values(), *self._foreign.values()):
            session.forked()

    async def _release(self) -> None:
        await self._deletions.close()
        self._watches.close()
        sessions = [self._session, *self._leases.values(), *self._foreign.values()]
        await asyncio.wait(
            [session.end("the store was closed") for session in sessions], timeout=_CLOSED_WITHIN_S
        )

    async def _session_of(self, lease: Lease) -> LeaseSession:
        self._require_usable()
        session = self._leases.get(lease.id)
        if session is None:
            raise LeaseGone(f"the lease {lease.id} has ended")
        if reason := session.over():
            if session.ending:
                await shared(session.ended)
            raise LeaseGone(f"the lease {lease.id} has ended: {reason}")
        return session

    async def _create(
        self,
        session: ZooKeeperSession,
        path: str,
        value: bytes,
        *,
        ephemeral: bool,
        then: Callable[[], None] = lambda: None,
    ) -> int | None:
        """Create an entry's znode; the number of the transaction, or None if the znode exists.
        `then` is called when the request has been sent."""
        parent, _ = _split(path)
        while True:
            before = self._highest
            try:
                _, written = await session.transact(
                    Create(path, value, self._acl, _EPHEMERAL if ephemeral else 0),
                    SetData(parent, b"", -1),
                    then=then,
                )
            except NodeExistsError:
                return None
            except NoNodeError:
                await self._ensure(session, parent)
            else:
                await self._refuse_restored(session, path, written.mzxid, before)
                self._highest = max(self._highest, written.mzxid)
                if ephemeral:
                    same = _Unchanged(CheckVersion(parent, written.version), 0, True)
                    self._created[path] = ((written.mzxid, 0), same)
                return int(written.mzxid)

    async def _refuse_used_up(self, session: ZooKeeperSession, path: str) -> None:
        """Refuse a new ticket whose number is negative or close to the last."""
        parent, name = _split(path)
        if not self._layout.is_ticket(name) or not 0 <= int(name[-10:]) < _LAST_TICKET:
            await session.send(Delete(path, -1))
            raise StoreUnusable(
                f"ZooKeeper has used up its numbers for tickets in {parent}: when the line is"
                " empty, delete that znode, and the numbers begin anew"
            )

    async def _refuse_restored(
        self, session: ZooKeeperSession, path: str, zxid: int, before: int
    ) -> None:
        """Refuse a new entry whose transaction is not later than one that was seen before it."""
        if zxid <= before:
            await session.send(Delete(path, -1))
            raise StoreUnusable(
                f"this ZooKeeper is at transaction {zxid} and was at {before} before: it was"
                " emptied or restored, and its tokens would be lower than those already given out."
                " Set token_floor to the highest of those, for all candidates, and connect again"
            )

    async def _create_ephemeral(
        self, session: ZooKeeperSession, path: str, value: bytes = b"", *, sequence: bool = False
    ) -> Any:
        """Create an ephemeral znode whose name is not used again; its path and its stat."""
        flags = _EPHEMERAL | _SEQUENCE if sequence else _EPHEMERAL
        while True:
            try:
                return await session.send(Create2(path, value, self._acl, flags))
            except NoNodeError:
                await self._ensure(session, _split(path)[0])

    async def _ensure(self, session: ZooKeeperSession, path: str) -> None:
        """Create a persistent znode and its parents, unless they exist."""
        try:
            await session.send(Create(path, b"", self._acl, 0))
        except NodeExistsError:
            pass
        except NoNodeError:
            await self._ensure(session, _split(path)[0])
            await self._ensure(session, path)

    async def _unchanged(self, path: str, version: Version) -> _Unchanged | None:
        """The condition for a change of the entry with that version; None if it does not exist."""
        created = self._created.pop(path, None)
        if created is not None and created[0] == version:
            return created[1]  # if the entry has changed since, the caller tries again
        parent, _ = _split(path)
        # The parent first, so that a later creation of the entry changes the parent's version.
        above, stat = await self._fresh(Exists(parent, None), Exists(path, None))
        if above is None or stat is None or (stat.czxid, stat.version) != version:
            return None
        return _Unchanged(
            CheckVersion(parent, above.version), stat.version, bool(stat.ephemeralOwner)
        )

    async def _fresh(self, *requests: Any) -> Sequence[Any]:
        """The answers to these reads, sent after a barrier."""
        sent: asyncio.Future[Sequence[asyncio.Future[Any]]] = self._loop.create_future()
        self._reads.append((requests, sent))
        if len(self._reads) == 1:
            self._loop.call_soon(self._send_reads)
        return [await answer for answer in await sent][1:]

    def _send_reads(self) -> None:
        reads, self._reads = self._reads, []
        try:
            barrier = self._session.barrier(self._layout.root or "/")
            for requests, sent in reads:
                if not sent.done():
                    sent.set_result([barrier, *map(self._session.send, requests)])
        except StoreError as error:
            for _, sent in reads:
                if not sent.done():
                    sent.set_exception(error)

    async def _line(self, line: str) -> Sequence[str]:
        """The names of the tickets, in order."""
        try:
            (names,) = await self._fresh(GetChildren(self._layout.line(line), None))
        except NoNodeError:
            return []
        return in_line(names)

    async def _children(self, path: str) -> Sequence[str]:
        try:
            names: Sequence[str] = await self._session.send(GetChildren(path, None))
        except NoNodeError:
            return []
        return names

    async def _get(self, key: str, path: str | None = None) -> Entry | None:
        """Like `get`, without a barrier. `path` is the znode of the key, if it is known."""
        try:
            path = path or self._layout.leaf(key)
            return self._entry_of(key, await self._session.send(GetData(path, None)))
        except NoNodeError:
            return None

    def _entry_of(self, key: str, found: tuple[bytes | None, Any]) -> Entry:
        value, stat = found
        self._highest = max(self._highest, stat.mzxid)
        owner = stat.ephemeralOwner
        lease = f"0x{owner % 2**64:x}" if owner else None
        return self._entry(key, value or b"", stat.czxid, stat.version, lease)

    def _entry(self, key: str, value: bytes, zxid: int, version: int, lease: str | None) -> Entry:
        return Entry(key, value, self._floor + zxid, (zxid, version), lease)


def _split(path: str) -> tuple[str, str]:
    parent, _, name = path.rpartition("/")
    return parent, name


def _refuse_large(value: bytes) -> None:
    if len(value) > _LARGEST:
        raise ConfigError(
            f"a value of {len(value)} bytes is too large for ZooKeeper: {_LARGEST} at most"
        )
