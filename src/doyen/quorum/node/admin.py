"""Administrative requests: transfer leadership; add, promote and remove members.

A request may be made on any node and is carried out by the one that leads. A request whose result
is in force already has no effect, so repeating one is harmless.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from itertools import count
from typing import Annotated

from msgspec import Meta, MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from doyen.errors import ConfigError, OrderFailed, OutcomeUnknown
from doyen.quorum.consensus.core import (
    ChangeAsked,
    Membership,
    Role,
    TransferAsked,
    TransferRefused,
)
from doyen.quorum.node.applier import Applier
from doyen.quorum.node.disk_space import DiskSpace
from doyen.quorum.node.leader_calls import (
    ADMIN,
    DONE,
    NOT_LEADING,
    REFUSED,
    LeaderCalls,
    Respond,
)
from doyen.quorum.node.peers import too_old
from doyen.quorum.node.proposals import Batch, Proposals
from doyen.quorum.node.pump import Pump
from doyen.quorum.protocol.frames import ConnectionRefused
from doyen.quorum.protocol.handshake import MAX_NAME
from doyen.quorum.protocol.security import parse_address

PAUSES = 100
"""How long to wait until a new leader is known, in pauses of the pump."""

RETRIES = 10
"""How often a refused change is tried: a newly elected leader refuses changes until it has heard
from the voters."""

SETTLING = 250
"""How long to wait, in pauses of the pump, until the last change and the first entry of a newly
elected leader are committed: it refuses changes until then, and disks may be slow."""

UNKNOWN_RETRIES = 10
"""How often a request whose outcome is unknown is repeated."""

MAX_MEMBERS = 64
"""How many nodes a cluster may have, learners included."""

_encode = Encoder().encode

Name = Annotated[str, Meta(max_length=300)]
"""Bounded, since refusals quote it and have to fit into a frame."""


class AdminRequest(Struct, frozen=True, array_like=True):
    """`transfer`, `add`, `promote` or `remove`, and the node that it is about."""

    what: Name
    node: Name
    address: Name = ""


_decode = Decoder(AdminRequest).decode


class NotConnected(OrderFailed):
    """A node that was just added may connect in a moment."""


def changed(members: Membership, request: AdminRequest) -> Membership:
    """The membership that a request leads to; the same, if there is nothing to do."""
    node = request.node
    voters, learners = list(members.voters), list(members.learners)
    addresses, ids = dict(members.addresses), dict(members.members)
    match request.what:
        case "add":
            if not 0 < len(node) <= MAX_NAME:  # no node of another name could connect
                raise OrderFailed(f"a node's name has 1 to {MAX_NAME} characters, not {len(node)}")
            if node not in members.everyone:
                learners.append(node)
            addresses[node] = _reachable(request.address)
            _check_free(addresses, node)
            if len(voters) + len(learners) > MAX_MEMBERS:
                raise OrderFailed(f"a cluster has at most {MAX_MEMBERS} nodes: remove one first")
        case "promote" if node in learners:
            if members.cluster and node not in ids:
                raise NotConnected(
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
    if request.what not in ("add", "promote", "remove"):
        raise OrderFailed(
            f"unknown request {request.what!r}: known are transfer, add, promote and remove"
        )
    if not voters:
        raise OrderFailed(f"{node} is the last voter: without it there is no quorum")
    return Membership(tuple(voters), tuple(learners), addresses, ids, members.cluster)


def _check_free(addresses: Mapping[str, str], node: str) -> None:
    """Raise if another member has the address of this one. The member at that address would be
    dialled under both names, and refuse one of them."""
    wanted = place(addresses[node])
    for other, address in addresses.items():
        if other != node and place(address) == wanted:
            raise OrderFailed(
                f"{address} is the address of {other}: give {node} another one. If {node} is to"
                f" replace {other}, remove that first (doyen cluster remove {other}); if"
                f" {other} has moved, record its new address first (doyen cluster add {other}"
                " HOST:PORT)"
            )


def place(address: str) -> tuple[str, int] | str:
    """An address in a form in which two that are written differently can be compared."""
    try:
        host, port = parse_address(address)
    except ConfigError:  # of an earlier release
        return address
    host = host.lower().rstrip(".")
    return "127.0.0.1" if host in ("", "localhost") else host, port


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


class Administration:
    """The requests made on one node, and those that it carries out while it leads."""

    def __init__(
        self,
        pump: Pump,
        proposals: Proposals,
        applier: Applier,
        disk_space: DiskSpace,
        leader_calls: LeaderCalls,
        newest: Callable[[str, str], Awaitable[int | None]],
    ) -> None:
        """`newest` is `Peers.newest`."""
        self._pump = pump
        self._newest = newest
        self._proposals = proposals
        self._applier = applier
        self._disk_space = disk_space
        self._leader_calls = leader_calls
        self._transfers: dict[int, asyncio.Future[None]] = {}
        """Those that wait until a leader is elected or the transfer fails, by their tokens."""
        self._tokens = count(1)
        leader_calls.handlers[ADMIN] = self._called

    async def transfer(self, to: str = "") -> None:
        """Transfer leadership to `to`, or to the voter with the longest log; return when another
        node leads. Raises `OrderFailed` if leadership stays, or if another node than `to` leads
        then."""
        core = self._pump.core
        before = core.leader
        try:
            await self._call_leader(AdminRequest("transfer", to))
        except OutcomeUnknown:
            # The node that was called no longer leads: that may be the effect of the request.
            for _ in range(PAUSES):
                if core.leader is not None:
                    break
                await self._pump.pause()
            if core.leader in (None, before) or core.leader != (to or core.leader):
                raise

    async def perform(self, what: str, node: str, address: str = "") -> None:
        """Make a request by its name. It is repeated if the leader is lost before it answers; a
        leader that is to be removed is."""
        if what == "transfer":
            await self.transfer(node)
            return
        request = AdminRequest(what, node, address)
        for _ in range(UNKNOWN_RETRIES):
            try:
                await self._call_leader(request)
            except OutcomeUnknown:
                await self._pump.pause()
            else:
                return
        await self._call_leader(request)

    async def _call_leader(self, request: AdminRequest) -> None:
        await self._leader_calls.call_leader(ADMIN + _encode(request))

    # On the node that leads.

    def _called(self, peer: str, body: bytes, respond: Respond) -> None:
        self._pump.start_task(self._carry_out(body, respond))

    async def _carry_out(self, body: bytes, respond: Respond) -> None:
        try:
            request = _decode(body)
            if request.what == "transfer":
                await self._transfer(request.node)
            elif not await self._change(request, respond):
                return
        except (MsgspecError, OrderFailed) as error:
            respond(REFUSED, str(error).encode())
        else:
            respond(DONE)

    async def _change(self, request: AdminRequest, respond: Respond) -> bool:
        """Propose another membership. True if there is nothing to do; otherwise the response
        follows when the change is applied."""
        core = self._pump.core
        if request.what == "remove" and request.node == core.id and len(core.membership.voters) > 1:
            # This node would stop leading when the change is committed, and there would be no
            # leader until the others had noticed. So another node leads first, and carries this
            # out; not if it would be refused.
            with suppress(OrderFailed):
                await self._transfer("", changed(core.membership, request))
        newest = await self._newest_of_added(request)
        await self._settle()
        reason: str | None = ""
        for _ in range(RETRIES):
            if core.role is not Role.LEADING:
                respond(NOT_LEADING)
                return False
            try:
                wanted = changed(core.membership, request)
            except NotConnected as error:
                reason = str(error)
                await self._pump.pause()
                continue
            if wanted == core.membership == self._applier.membership:
                return True
            version = self._applier.machine.version
            if newest is not None and newest < version:
                raise OrderFailed(too_old(request.node, newest, version))
            if wanted == core.membership:  # the same request was made before; it may be undone yet
                reason = "the change is not committed yet; ask again in a moment"
            elif len(wanted.everyone) > len(core.membership.everyone) and self._version_in_flux():
                reason = "the version of the cluster is being raised; ask again in a moment"
            else:
                reason = self._proposals.append(ChangeAsked(wanted), Batch.forwarded([], respond))
            if reason is None:
                return False
            await self._pump.pause()
        raise OrderFailed(reason or "")

    async def _settle(self) -> None:
        core, applier = self._pump.core, self._applier
        for _ in range(SETTLING):
            settled = applier.generation == core.generation
            if core.role is not Role.LEADING or (settled and applier.membership == core.membership):
                return
            await self._pump.pause()

    async def _newest_of_added(self, request: AdminRequest) -> int | None:
        """The newest version of the state that a node which is to be added supports, if it answers.
        A member that is too old would never be admitted, and would count as one that is down.
        Raises if another node, or no node at all, answers at the address, however it is written."""
        members = self._pump.core.membership
        if request.what != "add" or members.addresses.get(request.node) == request.address:
            return None
        address = _reachable(request.address)
        _check_free({**members.addresses, request.node: address}, request.node)
        try:
            newest = await self._newest(request.node, address)
        except ConnectionRefused as error:
            raise OrderFailed(f"{request.node} was not added: {error}") from error
        return None if request.node in members.everyone else newest

    def _version_in_flux(self) -> bool:
        """Whether the log may hold a command, not applied yet, that raises the cluster's version.
        It was proposed because all members supported that version, so no member may be added before
        it is applied. Once an entry of this generation is applied, only this node can have appended
        such a command."""
        entered = self._applier.generation == self._pump.core.generation
        return not entered or self._proposals.raises_version()

    async def _transfer(self, to: str, change: Membership | None = None) -> None:
        core = self._pump.core
        if to == core.id:
            return
        if not to:
            await self._settle()  # a leader that was just elected has heard no voter yet
        full = self._disk_space.without_space()
        if to in full:
            raise OrderFailed(f"the disk of {to} is full: make room there, or name another node")
        token = next(self._tokens)
        settled = self._transfers[token] = self._pump.loop.create_future()
        self._pump.step(TransferAsked(to, full, change, token))
        try:
            await settled
        except OrderFailed as error:
            if not full:
                raise
            raise OrderFailed(
                f"{error}; these have no room on their disks: {', '.join(full)}"
            ) from None
        if to and core.leader != to:
            raise OrderFailed(f"{core.leader} leads now, not {to}")

    def transfer_refused(self, effect: TransferRefused) -> bool:
        """A transfer was not begun. Those under way go on, so only the request with this token
        fails. False if none has it."""
        settled = self._transfers.pop(effect.token, None)
        if settled is None:
            return False
        if not settled.done():
            settled.set_exception(OrderFailed(effect.reason))
        return True

    def transferred(self, failure: str | None = None) -> None:
        """Another node leads, or, with the reason, the transfer under way failed."""
        transfers, self._transfers = self._transfers, {}
        for settled in transfers.values():
            if settled.done():
                continue
            if failure is None:
                settled.set_result(None)
            else:
                settled.set_exception(OrderFailed(failure))
