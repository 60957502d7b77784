"""Orders: how somebody else has a leader let go.

Nothing takes a record from a live holder. An order is laid beside the record; the leader it names,
by token, ends its own term, and its record goes when its body has ended. A transfer has two
phases, so that leadership never hangs between two:

    giver    lays the order, and mail for the heir
    heir     says that it is ready: it now watches the record, and its turn is next
    leader   seeing both, stops its body, deletes the record, and keeps its ticket, and with it
             the head of the line, until the heir has the record or has had its chance
    line     goes on in its order if the heir did not

Whoever gives an order binds it to a lease of its own, so that nothing of it outlives the giver.
`force` is the exception to all this: it deletes the record of a holder that may be at work, and
from then on only tokens protect what it writes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from doyen.errors import OrderFailed, StoreError
from doyen.heart import Heart
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
from doyen.presence import Presence

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
    for ticket in await presence.call(store.list(line_key(election))):
        if Claim.decode(ticket.value).attempt == attempt:
            await presence.call(store.delete(ticket.key, if_version=ticket.version))


async def order_transfer(
    presence: Presence, election: str, *, to: str, by: str, wait_s: float
) -> Leader:
    """Have the leader hand over to the candidate named `to`, and return it, once it leads."""
    record = await _record(presence, election)
    old = _leader(election, record)
    heir = await _heir(presence, election, to, record)
    ready = ready_key(election, heir)
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
            if await presence.call(presence.store.get(ready)) is None:
                raise OrderFailed(
                    f"{to!r} did not say within {wait_s:g} s that it is ready;"
                    f" {old.name!r} goes on leading {election!r}"
                )
            raise OrderFailed(_ignored(old, wait_s))


class _Patience:
    """Woken by changes at the record, for so long and no longer."""

    def __init__(self, wait_s: float) -> None:
        self.changed = asyncio.Event()
        self._until = asyncio.get_running_loop().time() + wait_s

    async def __call__(self) -> bool:
        """Wait for a change; False if time has run out."""
        try:
            async with asyncio.timeout_at(self._until):
                await self.changed.wait()
        except TimeoutError:
            return False
        self.changed.clear()
        return True


@asynccontextmanager
async def _given(
    presence: Presence, election: str, order: Order, wait_s: float
) -> AsyncIterator[_Patience]:
    """Lay an order, and mail for its heir; take both back in the end."""
    store = presence.store
    patience = _Patience(wait_s)
    watch = await presence.call(store.watch(leader_key(election), patience.changed.set))
    heart = await presence.heart()
    keys = [order_key(election)]
    try:
        await _lay(presence, keys[0], order, heart)
        if order.heir:
            keys.append(mail_key(election, order.heir))
            await presence.call(store.create(keys[1], order.encode(), heart.lease))
        yield patience
    finally:
        watch.close()
        for key in reversed(keys):
            with contextlib.suppress(StoreError):  # bound to our lease: gone with it at the latest
                entry = await presence.call(store.get(key))
                if entry is not None and Order.decode(entry.value) == order:
                    await presence.call(store.delete(key, if_version=entry.version))


async def _lay(presence: Presence, key: str, order: Order, heart: Heart) -> None:
    store = presence.store
    while True:
        creation = await presence.call(store.create(key, order.encode(), heart.lease))
        other = Order.decode(creation.entry.value)
        if creation.won or other == order:
            return
        if other is not None and other.token >= order.token:
            raise OrderFailed(f"an order of {other.by!r} is under way: wait for it to end")
        # Meant for a term that is over: nobody will obey it any more.
        await presence.call(store.delete(key, if_version=creation.entry.version))


async def _record(presence: Presence, election: str) -> Entry:
    presence.check_open()
    record = await presence.call(presence.store.get(leader_key(election)))
    if record is None:
        raise OrderFailed(f"nobody leads {election!r}")
    return record


def _leader(election: str, record: Entry) -> Leader:
    claim = Claim.decode(record.value)
    return Leader(election, claim.name, record.revision, claim.meta)


async def _heir(presence: Presence, election: str, to: str, record: Entry) -> str:
    """The attempt of the one candidate in line who is named `to`."""
    leading = Claim.decode(record.value)
    tickets = await presence.call(presence.store.list(line_key(election)))
    claims = [Claim.decode(ticket.value) for ticket in tickets]
    waiting = [claim for claim in claims if claim.attempt != leading.attempt]
    named = [claim for claim in waiting if claim.name == to]
    if len(named) == 1:
        return named[0].attempt
    if named:
        raise OrderFailed(
            f"{len(named)} candidates in the line of {election!r} are named {to!r}:"
            " give each its own name"
        )
    if leading.name == to:
        raise OrderFailed(f"{to!r} leads {election!r} already")
    others = ", ".join(repr(claim.name) for claim in waiting) or "nobody"
    raise OrderFailed(f"{to!r} does not stand in the line of {election!r}; there: {others}")


def _ignored(leader: Leader, wait_s: float) -> str:
    return (
        f"{leader.name!r} has been told and has not let go of {leader.election!r} within"
        f" {wait_s:g} s: its work has not ended, or it cannot reach the store. Wait, or stop that"
        " process; by force its record can be removed, and then only tokens protect"
    )
