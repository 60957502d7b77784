"""The port, in ZooKeeper's terms: sessions, ephemeral znodes, and the line.

A lease is a session of its own, with its own connection: `renew` writes to a znode of the lease's,
so that it counts only once a majority has it. Whatever is not bound to a lease, every read and
every watch goes through the store's own connection.

A server answers reads by itself, from what it has got to, and ZooKeeper's `sync` does not quite
mend that: the ensemble's leader does not wait for what it has itself confirmed through a follower,
and one that was cut off does not know that it leads no more. So reads come after an empty
transaction on the same connection, one for all that are made at the same time: whatever was
acknowledged before it was sent is done before it is.

A ZooKeeper version begins at 0 again when a znode is created anew, so by itself it does not tell
one entry from its successor. Hence the rule that makes `if_version` atomic: *whoever creates an
entry writes to the znode it lies in, in the same transaction*. A change of an entry checks that
this znode has not been written since the entry was read, and so that it is still the same entry.
Tickets need no such thing: their names are never used again.

Imports the parts beside it, the port and the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from doyen.errors import (
    ConfigError,
    LeaseGone,
    StoreError,
    StoreUnusable,
    TicketGone,
)
from doyen.model import Entry, Finding, Lease, Version
from doyen.stores.port import Capabilities, Creation, Store, Watch
from doyen.stores.zookeeper.connection import ZooKeeperAddress, ZooKeeperSession
from doyen.stores.zookeeper.diagnosis import findings, states
from doyen.stores.zookeeper.paths import Layout, in_line, is_ticket, ticket_stem
from doyen.stores.zookeeper.watches import ZooKeeperWatches

__all__ = ["ZooKeeperStore"]

_EPHEMERAL, _SEQUENCE = 1, 2
"""Flags of a creation."""
_SESSION_S = 6.0
"""Of the store's own session, on which nothing stands."""
_LARGEST = 1_000_000
"""A request above ZooKeeper's usual limit breaks the connection, again and again."""
_LAST_TICKET = 2**31 - 2**20
"""ZooKeeper numbers tickets with 31 bits and then begins to repeat itself."""
_CLOSED_WITHIN_S = 3.0


class _Same(NamedTuple):
    """What makes sure that an entry is the one that was seen."""

    check: CheckVersion
    """The first step of every transaction that changes it."""
    version: int
    bound: bool
    """To a lease."""


class ZooKeeperStore(Store):
    """One client of a ZooKeeper ensemble."""

    capabilities = Capabilities(
        renewals_lag=True,
        # Four ticks of the usual two seconds; see the documents for why four.
        ttl_default_s=8.0,
        # A session ends at a full tick, and a follower reports its sessions every half a tick. No
        # session is shorter than two.
        ttl_min_s=0.4,
        expiry_factor=1.75,
    )

    def __init__(
        self, address: ZooKeeperAddress, *, chroot: str, private: bool = False, token_floor: int = 0
    ) -> None:
        self._address = address
        self._layout = Layout(chroot)
        self._acl = CREATOR_ALL_ACL if private else OPEN_ACL_UNSAFE
        self._floor = token_floor
        self._leases: dict[str, ZooKeeperSession] = {}
        self._made: dict[str, tuple[Version, _Same]] = {}
        """What we have created under a lease: it need not be read again to be deleted."""
        self._lookout = ZooKeeperWatches(self._layout)
        self._own = self._lookout.wire = ZooKeeperSession(
            address,
            timeout_s=_SESSION_S,
            lease=False,
            on_up=self._lookout.went_up,
            on_down=self._lookout.went_down,
        )
        self._loop = asyncio.get_running_loop()
        self._reads: list[tuple[tuple[Any, ...], asyncio.Future[Any]]] = []
        self._highest = 0
        """The last transaction that we know of. They are never counted downwards."""
        self._unusable: str | None = None

    async def open(self) -> None:
        """Have a session, and see that the chroot is there and may be used."""
        await self._own.open()
        if self._layout.root:
            await self._make_room(self._own, self._layout.root)
        await self._own.send(GetChildren(self._layout.root or "/", None))

    async def grant(self, ttl_s: float) -> Lease:
        self._require_usable()
        ask_s = max(ttl_s, self.capabilities.ttl_min_s)
        wire = ZooKeeperSession(self._address, timeout_s=ask_s, lease=True)
        began = self._address.clock.now()
        try:
            await wire.open()
            wire.until = began + wire.granted_s
            if wire.granted_s < ask_s - 1e-6:
                raise ConfigError(
                    f"ttl_s={ttl_s:g} is above what this ZooKeeper grants, {wire.granted_s:g} s:"
                    " ask for less, or raise its maxSessionTimeout"
                )
            await self._plant(wire, self._layout.lease(wire.session))
        except BaseException:
            wire.end("it was given up before it began")
            raise
        self._leases[wire.session] = wire
        self._own.patience_s = min(self._own.patience_s, wire.patience_s)
        return Lease(wire.session, wire.granted_s)

    async def renew(self, lease: Lease) -> None:
        wire = await self._wire_of(lease)
        answer = wire.send(SetData(self._layout.lease(lease.id), b"", -1))
        wire.until = self._address.clock.now() + wire.granted_s
        # While nobody is told anything, nobody would notice that nobody can be.
        self._own.probe(wire.granted_s / 3)
        try:
            await answer
        except NoNodeError as error:
            wire.lost_because = "its znode was removed"  # and it is not renewed any more
            raise LeaseGone(f"the znode of lease {lease.id} was removed by somebody") from error

    async def revoke(self, lease: Lease) -> None:
        self._require_usable()
        wire = self._leases.get(lease.id)
        if wire is None:
            return
        await shared(wire.end("it was revoked", patiently=True))
        self._leases.pop(lease.id, None)

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        path = self._layout.leaf(key)
        _refuse_large(value)
        wire = await self._wire_of(lease)
        async with wire.slots:
            while True:
                revision = await self._create(wire, path, value, ephemeral=True)
                if revision is not None:
                    return Creation(True, self._entry(key, value, revision, 0, lease.id))
                try:
                    standing = await wire.send(GetData(path, None))
                except NoNodeError:
                    continue
                return Creation(False, self._found(key, standing))

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        self._require_usable()
        path = self._layout.leaf(key)
        _refuse_large(value)
        if if_version is None:
            revision = await self._create(self._own, path, value, ephemeral=False)
            return None if revision is None else self._entry(key, value, revision, 0, None)
        while (same := await self._same(path, if_version)) is not None:
            try:
                if same.bound:
                    # What is bound to a session stays so: another znode must take its place.
                    *_, written = await self._own.transact(
                        same.check,
                        Delete(path, same.version),
                        Create(path, value, self._acl, 0),
                        SetData(_split(path)[0], b"", -1),
                    )
                    return self._entry(key, value, written.mzxid, 0, None)
                _, written = await self._own.transact(
                    same.check, SetData(path, value, same.version)
                )
                return self._entry(key, value, written.czxid, written.version, None)
            except (BadVersionError, NoNodeError):
                continue
        return None

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        self._require_usable()
        path = self._layout.leaf(key)
        if if_version is None or is_ticket(_split(path)[1]):
            try:
                await self._own.send(Delete(path, -1))
            except NoNodeError:
                return False
            return True
        while (same := await self._same(path, if_version)) is not None:
            try:
                await self._own.transact(same.check, Delete(path, same.version))
            except (BadVersionError, NoNodeError):
                continue
            return True
        return False

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        room = self._layout.line(line)
        _refuse_large(value)
        wire = await self._wire_of(lease)
        stem = f"{room}/{ticket_stem(rank)}"
        async with wire.slots:
            path, stat = await self._plant(wire, stem, value, sequence=True)
        name = _split(path)[1]
        if not is_ticket(name) or int(name[-10:]) >= _LAST_TICKET:
            await wire.send(Delete(path, -1))
            raise StoreUnusable(
                f"ZooKeeper has numbered all the tickets it can in {room}: with nobody in line,"
                " delete that znode, and the numbers begin anew"
            )
        return self._found(f"{line}/{name}", (value, stat))

    async def ahead(self, ticket: Entry) -> Entry | None:
        self._require_usable()
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
        self._require_usable()
        try:
            (found,) = await self._fresh(GetData(self._layout.leaf(key), None))
        except NoNodeError:
            return None
        return self._found(key, found)

    async def list(self, prefix: str) -> list[Entry]:
        self._require_usable()
        await self._fresh()
        leaves = await self._layout.walk(prefix, self._children)
        entries = await asyncio.gather(*(self._get(leaf.key, leaf.path) for leaf in leaves))
        return [entry for entry in entries if entry is not None]

    async def head(self, line: str) -> Entry | None:
        self._require_usable()
        while tickets := await self._line(line):
            if (first := await self._get(f"{line}/{tickets[0]}")) is not None:
                return first
        return None

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        self._require_usable()
        return await self._lookout.watch(scope, notify)

    async def diagnose(self) -> Sequence[Finding]:
        return findings(await states(self._address))

    def forked(self) -> None:
        if self._unusable is None:
            self._unusable = (
                "this store was opened before a fork and belongs to the parent process:"
                " connect again in the child"
            )
            for wire in (self._own, *self._leases.values()):
                wire.forked()

    async def close(self) -> None:
        if self._unusable is not None:
            return
        self._unusable = "this store has been closed; open another"
        self._lookout.close()
        wires = [self._own, *self._leases.values()]
        await asyncio.wait(
            [wire.end("the store was closed") for wire in wires], timeout=_CLOSED_WITHIN_S
        )

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise StoreUnusable(self._unusable)

    async def _wire_of(self, lease: Lease) -> ZooKeeperSession:
        self._require_usable()
        wire = self._leases.get(lease.id)
        if wire is None:
            raise LeaseGone(f"the lease {lease.id} has ended")
        if reason := wire.over():
            if wire.ended is not None:
                await shared(wire.ended)
            raise LeaseGone(f"the lease {lease.id} has ended: {reason}")
        return wire

    async def _create(
        self, wire: ZooKeeperSession, path: str, value: bytes, *, ephemeral: bool
    ) -> int | None:
        """Create an entry's znode; the number of the transaction, or None if one is there."""
        room, _ = _split(path)
        while True:
            before = self._highest
            try:
                _, written = await wire.transact(
                    Create(path, value, self._acl, _EPHEMERAL if ephemeral else 0),
                    SetData(room, b"", -1),
                )
            except NodeExistsError:
                return None
            except NoNodeError:
                await self._make_room(wire, room)
            else:
                if written.mzxid <= before:
                    await wire.send(Delete(path, -1))
                    raise StoreUnusable(
                        f"this ZooKeeper is at transaction {written.mzxid} and was at"
                        f" {before} before: it was emptied or restored, and its tokens"
                        " would be lower than those already given out. Set token_floor to the"
                        " highest of those, for all candidates, and connect again"
                    )
                self._highest = max(self._highest, written.mzxid)
                if ephemeral:
                    same = _Same(CheckVersion(room, written.version), 0, True)
                    self._made[path] = ((written.mzxid, 0), same)
                return int(written.mzxid)

    async def _plant(
        self, wire: ZooKeeperSession, path: str, value: bytes = b"", *, sequence: bool = False
    ) -> Any:
        """Create an ephemeral znode that needs no guarding; its path and its stat."""
        flags = _EPHEMERAL | _SEQUENCE if sequence else _EPHEMERAL
        while True:
            try:
                return await wire.send(Create2(path, value, self._acl, flags))
            except NoNodeError:
                await self._make_room(wire, _split(path)[0])

    async def _make_room(self, wire: ZooKeeperSession, path: str) -> None:
        """Create a persistent znode, and what it lies in, unless they are there."""
        try:
            await wire.send(Create(path, b"", self._acl, 0))
        except NodeExistsError:
            pass
        except NoNodeError:
            await self._make_room(wire, _split(path)[0])
            await self._make_room(wire, path)

    async def _same(self, path: str, version: Version) -> _Same | None:
        """What has to hold for a change to meet the entry of that version, if it stands there."""
        made = self._made.pop(path, None)
        if made is not None and made[0] == version:
            return made[1]  # as we made it; if it has changed since, we are asked again
        room, _ = _split(path)
        # The room first: what is created after this read is created after the entry was seen.
        around, stat = await self._fresh(Exists(room, None), Exists(path, None))
        if around is None or stat is None or (stat.czxid, stat.version) != version:
            return None
        return _Same(CheckVersion(room, around.version), stat.version, bool(stat.ephemeralOwner))

    async def _fresh(self, *requests: Any) -> Sequence[Any]:
        """The answers to these reads, made after a barrier."""
        asked: asyncio.Future[Sequence[asyncio.Future[Any]]] = self._loop.create_future()
        self._reads.append((requests, asked))
        if len(self._reads) == 1:
            self._loop.call_soon(self._send_reads)
        return [await answer for answer in await asked][1:]

    def _send_reads(self) -> None:
        reads, self._reads = self._reads, []
        try:
            barrier = self._own.barrier(self._layout.root or "/")
            for requests, asked in reads:
                if not asked.done():
                    asked.set_result([barrier, *map(self._own.send, requests)])
        except StoreError as error:
            for _, asked in reads:
                if not asked.done():
                    asked.set_exception(error)

    async def _line(self, line: str) -> Sequence[str]:
        """The names of the tickets, in order."""
        try:
            (names,) = await self._fresh(GetChildren(self._layout.line(line), None))
        except NoNodeError:
            return []
        return in_line(names)

    async def _children(self, path: str) -> Sequence[str]:
        try:
            names: Sequence[str] = await self._own.send(GetChildren(path, None))
        except NoNodeError:
            return []
        return names

    async def _get(self, key: str, path: str | None = None) -> Entry | None:
        """As `get`, after another read. With the path, if it was found by that."""
        try:
            where = path or self._layout.leaf(key)
            return self._found(key, await self._own.send(GetData(where, None)))
        except NoNodeError:
            return None

    def _found(self, key: str, found: tuple[bytes | None, Any]) -> Entry:
        value, stat = found
        self._highest = max(self._highest, stat.mzxid)
        owner = stat.ephemeralOwner
        lease = f"0x{owner % 2**64:x}" if owner else None
        return self._entry(key, value or b"", stat.czxid, stat.version, lease)

    def _entry(self, key: str, value: bytes, zxid: int, version: int, lease: str | None) -> Entry:
        return Entry(key, value, self._floor + zxid, (zxid, version), lease)


def _split(path: str) -> tuple[str, str]:
    room, _, name = path.rpartition("/")
    return room, name


def _refuse_large(value: bytes) -> None:
    if len(value) > _LARGEST:
        raise ConfigError(
            f"a value of {len(value)} bytes is more than ZooKeeper takes: {_LARGEST} at most"
        )
