"""Orders: how somebody else has a leader let go.

Nothing takes a record from a live holder. An order is laid beside the record; the leader it names,
by token, ends its own term, and its record goes when its body has ended. A transfer has two
phases, so that leadership never hangs between two:

    giver    lays the order, and mail for the heir
    heir     says that it is ready for this very order: it watches the record, its turn is next
    leader   seeing both, stops its body and deletes the record
    line     leaves the record to the heir as long as a request may take, and then goes on in its
             order

Whoever gives an order binds it to a lease that serves nothing else and ends with the order, so that
nothing of it stays behind: not if the giver dies, and not if a request of its arrives late.
`force` is the exception to all this: it deletes the record of a holder that may be at work, and
from then on only tokens protect what it writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from doyen.election.presence import Presence
from doyen.errors import OrderFailed
from doyen.lease.keepalive import Heart
from doyen.model import (
    Claim,
    Entry,
    Leader,
    Order,
    leader_key,
    line_key,
    mail_key,
    order_key,
    ready_key,
)
from doyen.stores.port import Watch

__all__ = ["order_resign", "order_transfer"]


async def order_resign(
    presence: Presence, election: str, *, by: str, wait_s: float, force: bool
) -> Leader:
    """Have the leader let go, and return who it was, once it has."""
    record = await _record(presence, election)
    leader = _leader(election, record)
    if force:
        await _remove(presence, election, record)
        return leader
    order = Order(leader.token, by)
    async with _given(presence, election, order, wait_s) as look_again:
        while True:
            standing = await presence.call(presence.store.get(record.key))
            if standing is None or standing.revision != leader.token:
                return leader
            if not await look_again():
                raise OrderFailed(_ignored(leader, wait_s))


async def _remove(presence: Presence, election: str, record: Entry) -> None:
    """Remove what a holder has, as it would itself: the record, then its place in the line, which
    the next one waits behind."""
    store = presence.store
    await presence.call(store.delete(record.key, if_version=record.version))
    attempt = Claim.decode(record.value).attempt
    for ticket in await _tickets(presence, election):
        if Claim.decode(ticket.value).attempt == attempt:
            await presence.call(store.delete(ticket.key, if_version=ticket.version))


async def order_transfer(
    presence: Presence, election: str, *, to: str, by: str, wait_s: float
) -> Leader:
    """Have the leader hand over to the candidate named `to`, and return it, once it leads."""
    record, tickets = await asyncio.gather(
        _record(presence, election), _tickets(presence, election)
    )
    old = _leader(election, record)
    heir = _heir(election, to, record, tickets)
    async with _given(presence, election, Order(old.token, by, heir), wait_s) as look_again:
        while True:
            standing = await presence.call(presence.store.get(record.key))
            if standing is not None and standing.revision != old.token:
                new = _leader(election, standing)
                if Claim.decode(standing.value).attempt == heir:
                    return new
                raise OrderFailed(
                    f"{old.name!r} let go of {election!r}, {to!r} did not take over in time,"
                    f" and the line went on: {new.name!r} leads"
                )
            if await look_again():
                continue
            if standing is None:
                raise OrderFailed(
                    f"{old.name!r} let go of {election!r} and nobody has taken over yet"
                )
            ready = await presence.call(presence.store.get(ready_key(election, heir)))
            if ready is None or ready.value != look_again.lease.encode():
                raise OrderFailed(
                    f"{to!r} did not say within {wait_s:g} s that it is ready;"
                    f" {old.name!r} goes on leading {election!r}"
                )
            raise OrderFailed(_ignored(old, wait_s))


class _Patience:
    """Woken by changes at the record, for so long and no longer."""

    def __init__(self, presence: Presence, heart: Heart, wait_s: float) -> None:
        self.changed = asyncio.Event()
        self.lease = heart.lease.id
        self._heart = heart
        self._until = asyncio.get_running_loop().time() + wait_s
        heart.on_loss(self, lambda *_: presence.runtime.post(self.changed.set))

    async def __call__(self) -> bool:
        """Wait for a change; False if time has run out."""
        try:
            async with asyncio.timeout_at(self._until):
                await self.changed.wait()
        except TimeoutError:
            return False
        if self._heart.lost_because is not None:
            raise OrderFailed(
                f"the order ended with the lease of whoever gave it: {self._heart.lost_because};"
                " see who leads, and give it again"
            )
        self.changed.clear()
        return True


@asynccontextmanager
async def _given(
    presence: Presence, election: str, order: Order, wait_s: float
) -> AsyncIterator[_Patience]:
    """Lay an order, and mail for its heir; both go in the end, with the lease they are bound to.

    The watch need only be there before the first look, and mail means nothing without its order:
    all is asked for at once.
    """
    store, heart = presence.store, await presence.own_heart()
    patience = _Patience(presence, heart, wait_s)
    watch: Watch | None = None

    async def watch_record() -> None:
        nonlocal watch
        watch = await presence.call(store.watch(leader_key(election), patience.changed.set))

    async def call_heir() -> bool:
        if not order.heir:
            return True
        mail = mail_key(election, order.heir)
        return (await presence.call(store.create(mail, order.encode(), heart.lease))).won

    try:
        # All are waited for, even if one fails: a watch that opens later would never be closed.
        laid, called, watching = await asyncio.gather(
            _lay(presence, order_key(election), order, heart),
            call_heir(),
            watch_record(),
            return_exceptions=True,
        )
        for outcome in (laid, called, watching):
            if isinstance(outcome, BaseException):
                raise outcome
        if not called:
            # Mail that stands there is of a giver whose order no longer does: ours is there.
            await _lay(presence, mail_key(election, order.heir), order, heart, over_any=True)
        yield patience
    finally:
        if watch is not None:
            watch.close()
        ending = presence.retire(heart)
        if ending is not None:
            await asyncio.wait({ending})


async def _lay(
    presence: Presence, key: str, order: Order, heart: Heart, *, over_any: bool = False
) -> None:
    store = presence.store
    while True:
        creation = await presence.call(store.create(key, order.encode(), heart.lease))
        if creation.won or creation.entry.lease == heart.lease.id:
            return
        other = Order.decode(creation.entry.value)
        if not over_any and other is not None and other.token >= order.token:
            raise OrderFailed(f"an order of {other.by!r} is under way: wait for it to end")
        # Meant for a term that is over: nobody will obey it any more.
        await presence.call(store.delete(key, if_version=creation.entry.version))


async def _record(presence: Presence, election: str) -> Entry:
    presence.check_open()
    record = await presence.call(presence.store.get(leader_key(election)))
    if record is None:
        raise OrderFailed(f"nobody leads {election!r}")
    return record


async def _tickets(presence: Presence, election: str) -> list[Entry]:
    return await presence.call(presence.store.list(line_key(election)))


def _leader(election: str, record: Entry) -> Leader:
    claim = Claim.decode(record.value)
    return Leader(election, claim.name, record.revision, claim.meta)


def _heir(election: str, to: str, record: Entry, tickets: list[Entry]) -> str:
    """The attempt of the one candidate in line who is named `to`."""
    leading = Claim.decode(record.value)
    claims = [Claim.decode(ticket.value) for ticket in tickets]
    # By attempt: a request that arrived late may have left a candidate with two tickets.
    waiting = {claim.attempt: claim for claim in claims if claim.attempt != leading.attempt}
    named = [attempt for attempt, claim in waiting.items() if claim.name == to]
    if len(named) == 1:
        return named[0]
    if named:
        raise OrderFailed(
            f"{len(named)} candidates in the line of {election!r} are named {to!r}:"
            " give each its own name"
        )
    if leading.name == to:
        raise OrderFailed(f"{to!r} leads {election!r} already")
    others = ", ".join(repr(claim.name) for claim in waiting.values()) or "nobody"
    raise OrderFailed(f"{to!r} does not stand in the line of {election!r}; there: {others}")


def _ignored(leader: Leader, wait_s: float) -> str:
    return (
        f"{leader.name!r} has been told and has not let go of {leader.election!r} within"
        f" {wait_s:g} s: its work has not ended, or it cannot reach the store. Wait, or stop that"
        " process; by force its record can be removed, and then only tokens protect"
    )
