"""Giving orders: have the leader of an election, or the holder of a lock, resign, or transfer to a
named candidate.

How candidates and leaders act on an order is in `doyen.election.handover`. The giver binds its
order, and the notice for the successor, to a lease that serves nothing else and ends with the
order. So nothing of it remains if the giver dies, or if one of its requests is carried out late.

`force` is an exception: it deletes the record of a leader that may still be at work, and from then
on only tokens protect what that leader writes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from doyen.election.core import SessionCore
from doyen.election.options import default_name
from doyen.election.queries import leader_of
from doyen.errors import OrderFailed
from doyen.lease.keepalive import Keepalive
from doyen.model import (
    HAS,
    LEADER,
    Claim,
    Entry,
    Kind,
    Leader,
    Order,
    described,
    leader_key,
    line_key,
    notice_key,
    order_key,
    ready_key,
)
from doyen.stores.port import Watch

__all__ = ["order_resign", "order_transfer"]


async def order_resign(
    core: SessionCore, election: str, *, kind: Kind, wait_s: float, force: bool
) -> Leader:
    """Have the leader resign, and return it once it has."""
    record = await _record(core, election, kind)
    leader = leader_of(election, record, kind)
    if force:
        await _remove(core, election, kind, record)
        return leader
    async with _given(core, leader, Order(leader.token, default_name()), wait_s) as given:
        while True:
            current = await core.call(core.store.get(record.key))
            if current is None or current.revision != leader.token:
                return leader
            if not await given.change():
                raise OrderFailed(_not_obeyed(leader, wait_s))


async def _remove(core: SessionCore, election: str, kind: Kind, record: Entry) -> None:
    """Delete what a leader has in the store, in its order: the record, then the ticket, behind
    which the next candidate waits. A leader that publishes changes the version of its record."""
    current: Entry | None = record
    while current is not None and current.revision == record.revision:
        if await core.call(core.store.delete(record.key, if_version=current.version)):
            break
        current = await core.call(core.store.get(record.key))
    attempt = Claim.decode(record.value).attempt
    for ticket in await _tickets(core, election, kind):
        if Claim.decode(ticket.value).attempt == attempt:
            await core.call(core.store.delete(ticket.key, if_version=ticket.version))


async def order_transfer(
    core: SessionCore, election: str, *, kind: Kind, to: str, wait_s: float
) -> Leader:
    """Have the leader transfer to the candidate named `to`, and return that one once it leads."""
    if kind == "semaphores":
        raise OrderFailed("a slot of a semaphore cannot be transferred: have its holder resign")
    record, tickets = await asyncio.gather(
        _record(core, election, kind), _tickets(core, election, kind)
    )
    old, what = leader_of(election, record, kind), described(election, kind)
    successor = _successor(old, to, record, tickets)
    async with _given(core, old, Order(old.token, default_name(), successor), wait_s) as given:
        while True:
            current = await core.call(core.store.get(record.key))
            if current is not None and current.revision != old.token:
                new = leader_of(election, current, kind)
                if Claim.decode(current.value).attempt == successor:
                    return new
                raise OrderFailed(
                    f"{old.name!r} gave up {what}, {to!r} did not take over in time,"
                    f" and the line went on: {new.name!r} {HAS[kind]} it"
                )
            if await given.change():
                continue
            if current is None:
                raise OrderFailed(
                    f"{old.name!r} gave up {what} and no candidate has taken over yet"
                )
            ready = await core.call(core.store.get(ready_key(election, successor, kind)))
            if ready is None or ready.value != given.lease.encode():
                raise OrderFailed(
                    f"{to!r} did not confirm within {wait_s:g} s that it is ready;"
                    f" {old.name!r} keeps {what}"
                )
            raise OrderFailed(_not_obeyed(old, wait_s))


class _GivenOrder:
    """An order that has been given: waits for changes at the record, for a limited time."""

    def __init__(self, keepalive: Keepalive, wait_s: float) -> None:
        self.changed = asyncio.Event()
        self.lease = keepalive.lease.id
        self._keepalive = keepalive
        self._until = asyncio.get_running_loop().time() + wait_s
        keepalive.on_loss(self, self.changed.set)

    async def change(self) -> bool:
        """Wait for a change; False if the time has passed."""
        try:
            async with asyncio.timeout_at(self._until):
                await self.changed.wait()
        except TimeoutError:
            return False
        if self._keepalive.lost_because is not None:
            raise OrderFailed(
                f"the order ended with the lease that it was bound to:"
                f" {self._keepalive.lost_because}; see who leads, and give it again"
            )
        self.changed.clear()
        return True


@asynccontextmanager
async def _given(
    core: SessionCore, leader: Leader, order: Order, wait_s: float
) -> AsyncIterator[_GivenOrder]:
    """Write an order, and the notice for its successor. Both end with the lease they are bound to.

    The requests are sent at once: the watch has to be there only before the first read, and a
    notice has no effect without its order.
    """
    election, kind = leader.election, leader.kind
    store, keepalive = core.store, await core.leases.own()
    given = _GivenOrder(keepalive, wait_s)
    watch: Watch | None = None

    async def watch_record() -> None:
        nonlocal watch
        watch = await core.call(store.watch(leader_key(election, kind), given.changed.set))

    async def notify_successor() -> bool:
        if not order.successor:
            return True
        notice = notice_key(election, order.successor, kind)
        return (await core.call(store.create(notice, order.encode(), keepalive.lease))).won

    try:
        # All are waited for, even if one fails: a watch that opens later would never be closed.
        written, notified, watching = await asyncio.gather(
            _write(core, order_key(election, kind), order, keepalive),
            notify_successor(),
            watch_record(),
            return_exceptions=True,
        )
        for outcome in (written, notified, watching):
            if isinstance(outcome, BaseException):
                raise outcome
        if not notified:
            # The notice that is there belongs to an earlier order, which ours has replaced.
            await _write(
                core, notice_key(election, order.successor, kind), order, keepalive, replace=True
            )
        yield given
    finally:
        if watch is not None:
            watch.close()
        ending = core.leases.release(keepalive)
        if ending is not None:
            await asyncio.wait({ending})


async def _write(
    core: SessionCore, key: str, order: Order, keepalive: Keepalive, *, replace: bool = False
) -> None:
    """Create an entry with the order. One that is void, or any with `replace`, is deleted first."""
    store = core.store
    while True:
        creation = await core.call(store.create(key, order.encode(), keepalive.lease))
        if creation.won or creation.entry.lease == keepalive.lease.id:
            return
        other = Order.decode(creation.entry.value)
        if not replace and other is not None and other.token >= order.token:
            raise OrderFailed(f"an order of {other.by!r} is under way: wait for it to end")
        await core.call(store.delete(key, if_version=creation.entry.version))


async def _record(core: SessionCore, election: str, kind: Kind) -> Entry:
    record = await core.call(core.store.get(leader_key(election, kind)))
    if record is None:
        raise OrderFailed(f"{described(election, kind)} has no {LEADER[kind]}")
    return record


async def _tickets(core: SessionCore, election: str, kind: Kind) -> list[Entry]:
    return await core.call(core.store.list(line_key(election, kind)))


def _successor(leader: Leader, to: str, record: Entry, tickets: list[Entry]) -> str:
    """The attempt of the one candidate in line whose name is `to`."""
    leading, what = Claim.decode(record.value), described(leader.election, leader.kind)
    claims = [Claim.decode(ticket.value) for ticket in tickets]
    # By attempt: a request that was carried out late may have left a candidate with two tickets.
    waiting = {claim.attempt: claim for claim in claims if claim.attempt != leading.attempt}
    named = [attempt for attempt, claim in waiting.items() if claim.name == to]
    if len(named) == 1:
        return named[0]
    if named:
        raise OrderFailed(
            f"{len(named)} candidates in the line of {what} are named {to!r}:"
            " give each its own name"
        )
    if leading.name == to:
        raise OrderFailed(f"{to!r} {HAS[leader.kind]} {what} already")
    others = ", ".join(repr(claim.name) for claim in waiting.values()) or "none"
    raise OrderFailed(f"{to!r} is not in the line of {what}; candidates there: {others}")


def _not_obeyed(leader: Leader, wait_s: float) -> str:
    return (
        f"{leader.name!r} was ordered to give up {described(leader.election, leader.kind)}"
        f" and has not done so within {wait_s:g} s: its work has not ended, or it cannot reach"
        " the store. Wait, or stop that process; force removes its record, and then only tokens"
        " protect"
    )
