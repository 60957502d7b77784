"""Orders that change who leads a quorum and who belongs to it.

They may be given on any node, and are carried out by whichever leads. An order that is in force
already needs nothing, so giving one again is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Protocol

from msgspec import Meta, MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from doyen.errors import ConfigError, OrderFailed, OutcomeUnknown
from doyen.quorum.consensus.core import (
    ChangeAsked,
    Core,
    CoreEvent,
    Membership,
    Role,
    TransferAsked,
)
from doyen.quorum.node.leader_calls import NOT_LEADING
from doyen.quorum.node.proposals import Batch
from doyen.quorum.protocol.security import parse_address

__all__ = ["AdminOrder", "Orders", "changed"]

PAUSES = 100
"""How long to wait for the news of who leads now."""

RETRIES = 10
"""How often a change that was refused is tried again: a leader that was just elected refuses
changes until its first entry is committed and it has heard from the voters."""

AGAIN = 10
"""How often an order is given again whose outcome is not known."""

MAX_MEMBERS = 64
"""How many nodes a cluster may have, learners included."""

_encode = Encoder().encode

Name = Annotated[str, Meta(max_length=300)]
"""Refusals quote it, and have to fit into a frame."""


class AdminOrder(Struct, frozen=True, array_like=True):
    """`transfer`, `add`, `promote` or `remove`, and which node it is about."""

    what: Name
    node: Name
    address: Name = ""

    def encoded(self) -> bytes:
        return _encode(self)

    @classmethod
    def decoded(cls, data: bytes) -> AdminOrder:
        return _decode(data)


_decode = Decoder(AdminOrder).decode


def changed(members: Membership, order: AdminOrder) -> Membership:
    """The membership that an order leads to; the same, if there is nothing to do."""
    node = order.node
    voters, learners = list(members.voters), list(members.learners)
    addresses, ids = dict(members.addresses), dict(members.members)
    match order.what:
        case "add":
            if node not in members.everyone:
                learners.append(node)
            addresses[node] = _reachable(order.address)
            if len(voters) + len(learners) > MAX_MEMBERS:
                raise OrderFailed(f"a cluster has at most {MAX_MEMBERS} nodes: remove one first")
        case "promote" if node in learners:
            if members.cluster and node not in ids:
                raise OrderFailed(
                    f"{node} has not connected yet, so its id is not known; ask again when it has"
                )
            learners.remove(node)
            voters.append(node)
        case "promote" if node not in voters:
            raise OrderFailed(f"{node} does not belong to the quorum: add it first")
        case "remove" if node in members.everyone:
            (voters if node in voters else learners).remove(node)
            addresses.pop(node, None)
            ids.pop(node, None)
    if order.what not in ("add", "promote", "remove"):
        raise OrderFailed(f"there is no order {order.what!r}")
    if not voters:
        raise OrderFailed(f"{node} is the last voter: without it there is no quorum")
    return Membership(tuple(voters), tuple(learners), addresses, ids, members.cluster)


def _reachable(address: str) -> str:
    """An address that the other nodes can dial."""
    try:
        host, port = parse_address(address)
    except ConfigError as error:
        raise OrderFailed(str(error)) from error
    if not host or not port:
        raise OrderFailed(
            f"{address!r} is not an address that other nodes can reach: name a host too"
        )
    return address


class AdminOwner(Protocol):
    """What the driver does for this."""

    core: Core

    def tell_core(self, event: CoreEvent) -> None: ...

    async def pause(self) -> None:
        """Until the role changes, or a moment."""

    def without_room(self) -> tuple[str, ...]:
        """The nodes whose disk is full, as far as this one knows."""
        ...

    def offer(self, event: CoreEvent, batch: Batch) -> str | None:
        """Have the core add something to the log; `batch` is told when it is applied. Returns
        why it was refused."""
        ...


class Orders:
    """Those of one node: given by it, and, while it leads, carried out."""

    def __init__(self, owner: AdminOwner, ask: Callable[[bytes], Awaitable[bytes]]) -> None:
        """`ask` puts an order to whichever node leads."""
        self._owner = owner
        self._ask = ask
        self._transfers: list[asyncio.Future[None]] = []

    async def transfer(self, to: str = "") -> None:
        """Have `to` lead, or whichever voter is furthest along; return when another leads.
        Raises `OrderFailed` if leadership stays."""
        core = self._owner.core
        before = core.leader
        try:
            await self._ask(AdminOrder("transfer", to).encoded())
        except OutcomeUnknown:
            # The one that was asked leads no longer: that may be the answer.
            for _ in range(PAUSES):
                if core.leader is not None:
                    break
                await self._owner.pause()
            if core.leader in (None, before) or core.leader != (to or core.leader):
                raise

    async def add(self, node: str, address: str) -> None:
        """Have `node` get everything and count for nothing, until it is promoted."""
        await self._insist(AdminOrder("add", node, address))

    async def promote(self, node: str) -> None:
        """Let a learner count."""
        await self._insist(AdminOrder("promote", node))

    async def remove(self, node: str) -> None:
        """Let `node` go."""
        await self._insist(AdminOrder("remove", node))

    async def arrange(self, what: str, node: str, address: str = "") -> None:
        """Give an order by its name."""
        if what == "transfer":
            await self.transfer(node)
        elif what == "add":
            await self.add(node, address)
        else:
            await self._insist(AdminOrder(what, node))

    async def _insist(self, order: AdminOrder) -> None:
        """Give it again if the leader is lost before it answers: one that is told to go, say."""
        for _ in range(AGAIN):
            try:
                await self._ask(order.encoded())
            except OutcomeUnknown:
                await self._owner.pause()
            else:
                return
        await self._ask(order.encoded())

    async def obey(
        self, body: bytes, done: Callable[[], None], refuse: Callable[[str], None], batch: Batch
    ) -> None:
        """Carry out an order that was put to this node, which leads. One that has to be agreed on
        is answered through `batch`."""
        try:
            order = AdminOrder.decoded(body)
            if order.what == "transfer":
                await self._transfer(order.node)
            elif not await self._change(order, batch):
                return
        except (MsgspecError, OrderFailed) as error:
            refuse(str(error))
        else:
            done()

    async def _change(self, order: AdminOrder, batch: Batch) -> bool:
        """Propose another membership. False if it is answered through `batch`, or by the next
        leader; True if there is nothing to do."""
        owner, core = self._owner, self._owner.core
        if order.what == "remove" and order.node == core.id and len(core.membership.voters) > 1:
            # It would stop leading when the change is committed, and nobody would lead until the
            # others had noticed; so another leads first, and carries this out.
            with suppress(OrderFailed):
                await self._transfer("")
        reason: str | None = ""
        for _ in range(RETRIES):
            if core.role is not Role.LEADING:
                for answer, _count in batch.answers:
                    answer(NOT_LEADING, b"")
                return False
            wanted = changed(core.membership, order)
            if wanted == core.membership:
                return True
            reason = owner.offer(ChangeAsked(wanted), batch)
            if reason is None:
                return False
            await owner.pause()
        raise OrderFailed(reason or "")

    async def _transfer(self, to: str) -> None:
        core = self._owner.core
        if to == core.id:
            return
        full = self._owner.without_room()
        if to in full:
            raise OrderFailed(f"the disk of {to} is full: make room there, or name another node")
        settled = asyncio.get_running_loop().create_future()
        self._transfers.append(settled)
        self._owner.tell_core(TransferAsked(to, full))
        await settled
        if to and core.leader != to:
            raise OrderFailed(f"{core.leader} leads now, not {to}")

    def transferred(self, failure: str | None = None) -> None:
        """Leadership has gone to another, or stays."""
        transfers, self._transfers = self._transfers, []
        for settled in transfers:
            if settled.done():
                continue
            if failure is None:
                settled.set_result(None)
            else:
                settled.set_exception(OrderFailed(failure))
