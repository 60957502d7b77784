"""`layout=kazoo`: the lines of kazoo's recipes `Election` and `Lock`.

    /chroot/NAME/7f0c…__lock__0000000004             a contender of kazoo
    /chroot/NAME/doyen-ATTEMPT__lock__0000000005     a candidate of doyen
    /chroot/doyen/leases/0x1000…                     as in doyen's own layout

The data of a contender is its identifier, the name of a candidate. Contenders are in the order of
their sequence numbers. The token is the number of the transaction that created the znode, and not
its sequence number: that begins anew when the parent is deleted. As long as a contender has its
znode the parent cannot be deleted, so both orders agree.

A contender is a znode whose name ends as kazoo's `Lock` has it. Those of `ReadLock` and
`Semaphore` are none, as for `Lock` itself.
"""

from __future__ import annotations

import re
from builtins import list as list_
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from urllib.parse import quote, unquote

from kazoo.exceptions import NoNodeError
from kazoo.protocol.serialization import Delete, GetChildren, GetData

from doyen.errors import ConfigError, TicketGone
from doyen.model import Claim, Entry, Finding, Lease, Version
from doyen.stores.kit.layouts import LineLayout, Place, foreign_claim, place_of, plain_claim, refuse
from doyen.stores.port import Watch
from doyen.stores.zookeeper.paths import Layout, Leaf
from doyen.stores.zookeeper.store import ZooKeeperStore

__all__ = ["KazooStore"]

LAYOUT = "kazoo"
_CONTENDER = re.compile(r"__lock__(-?\d{10})$")
_OURS = re.compile(r"doyen-(.+)__lock__\d{10}")


def contenders(names: Sequence[str]) -> list[str]:
    """The contenders among the names, in kazoo's order.

    >>> contenders(["b__lock__0000000009", "a__rlock__0000000001", "c__lock__0000000002"])
    ['c__lock__0000000002', 'b__lock__0000000009']
    """
    found = [(match[1], name) for name in names if (match := _CONTENDER.search(name))]
    return [name for _, name in sorted(found)]


class KazooLayout(Layout):
    """The znodes of the port's keys in kazoo's layout."""

    def leaf(self, key: str) -> str:
        place = place_of(key, LAYOUT)
        path = f"{self.root}/{place.name.strip('/')}"
        return f"{path}/{unquote(place.ticket)}" if place.ticket else path

    def line(self, line: str) -> str:
        return self.leaf(line)

    async def walk(
        self, prefix: str, children: Callable[[str], Awaitable[Sequence[str]]]
    ) -> list[Leaf]:
        place = place_of(prefix, LAYOUT)
        if place.ticket:
            return []
        path = self.leaf(prefix)
        return [
            Leaf(f"{place.line}/{quote(name, safe='')}", f"{path}/{name}")
            for name in contenders(await children(path))
        ]

    def is_ticket(self, name: str) -> bool:
        return _CONTENDER.search(name) is not None


class KazooStore(LineLayout, ZooKeeperStore):
    """One client of a ZooKeeper ensemble, in the layout of kazoo's recipes."""

    layout = LAYOUT
    foreign = "contenders of kazoo's recipes"
    lacks = (
        "Election.run and a Lock go on when their session is lost, unless the program listens for"
        " that; they have no token"
    )
    capabilities = replace(ZooKeeperStore.capabilities, layout=LAYOUT)
    make_layout = KazooLayout

    async def _join(self, line: str, value: bytes, lease: Lease) -> Entry:
        claim = plain_claim(value, self.layout)
        if {*claim.meta} - {"proposal"}:
            raise ConfigError(
                "layout=kazoo has no meta: a contender has an identifier only, which is the name,"
                " or `proposal` of meta; leave out meta="
            )
        session, before = await self._session_of(lease), self._highest
        stem = f"{self._layout.line(line)}/doyen-{claim.attempt or 0}__lock__"
        async with session.slots:
            path, stat = await self._create_ephemeral(
                session, stem, _identifier(claim), sequence=True
            )
        await self._refuse_used_up(session, path)
        await self._refuse_restored(session, path, stat.czxid, before)
        return self._contender(line, path.rpartition("/")[2], value, stat)

    async def _first(self, line: str) -> Entry | None:
        while names := await self._names(line):
            if (first := await self._read(line, names[0])) is not None:
                return first
        return None

    async def _before(self, ticket: Entry) -> Entry | None:
        line, _, coded = ticket.key.rpartition("/")
        name = unquote(coded)
        while True:
            names = await self._names(line)
            if name not in names:
                raise TicketGone(f"{ticket.key} is no longer in the line")
            place = names.index(name)
            if place == 0:
                return None
            if (ahead := await self._read(line, names[place - 1])) is not None:
                return ahead

    async def _all(self, line: str) -> list_[Entry]:
        read = [await self._read(line, name) for name in await self._names(line)]
        return [each for each in read if each is not None]

    async def _ticket(self, key: str) -> Entry | None:
        place = self._place(key)
        await self._fresh()
        return await self._read(place.line, unquote(place.ticket))

    async def _replace(self, ticket: Entry, value: bytes) -> Entry | None:
        refuse(self.layout, "changes of what a leader shows")

    async def _remove(self, key: str, version: Version | None) -> bool:
        try:
            # Names are not used again, so the version does not matter.
            await self._session.send(Delete(self._layout.leaf(key), -1))
        except NoNodeError:
            return False
        return True

    async def _watch(self, place: Place, notify: Callable[[], None]) -> Watch:
        scope = f"{place.line}/{place.ticket}" if place.ticket else place.line
        return await self._watches.watch(scope, notify)

    async def diagnose(self) -> Sequence[Finding]:
        return [*await super().diagnose(), self._findings()]

    async def _names(self, line: str) -> list_[str]:
        """The names of the contenders, in order, after a barrier."""
        self._require_usable()
        try:
            (names,) = await self._fresh(GetChildren(self._layout.line(line), None))
        except NoNodeError:
            return []
        return contenders(names)

    async def _read(self, line: str, name: str) -> Entry | None:
        try:
            path = f"{self._layout.line(line)}/{name}"
            data, stat = await self._session.send(GetData(path, None))
        except NoNodeError:
            return None
        ours = _OURS.fullmatch(name)
        shown = foreign_claim(data or name)
        if ours is not None:
            shown = Claim.decode(shown)._replace(attempt=ours[1]).encode()
        return self._contender(line, name, shown, stat)

    def _contender(self, line: str, name: str, value: bytes, stat: object) -> Entry:
        return self._entry_of(f"{line}/{quote(name, safe='')}", (value, stat))


def _identifier(claim: Claim) -> bytes:
    return str(claim.meta.get("proposal", claim.name)).encode()
