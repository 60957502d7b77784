"""One node's consensus, put together from its parts, and the interface to it.

    pump            events to the core, effects in order, the journal before the network
    proposals       commands until their outcome is known
    proposer        commands into log entries, here or by way of the leader
    applier         committed entries into the state machine; snapshots
    reads           linearizable reads
    leader_calls    calls to the node that leads
    admin           transfers of leadership, changes of the membership
    disk_space      what happens while disks are full

A real node and the lab run the same code: files, sockets and clocks are handed in.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import NamedTuple

from doyen.errors import OrderFailed, OutcomeUnknown, StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.lease.clock import Clock
from doyen.quorum.consensus.core import (
    Core,
    Membership,
    ProposalRefused,
    Role,
    RoleChanged,
    SendSnapshot,
    Snapshot,
    SnapshotReceived,
    SnapshotSent,
    TransferFailed,
    TransferRefused,
)
from doyen.quorum.keyspace.versions import NEWEST
from doyen.quorum.node.admin import Administration
from doyen.quorum.node.applier import Applier
from doyen.quorum.node.disk_space import DiskSpace
from doyen.quorum.node.journal import FileJournal
from doyen.quorum.node.leader_calls import DONE, SERVICE, Answer, LeaderCalls, Respond
from doyen.quorum.node.peers import Peers
from doyen.quorum.node.proposals import ProposalLimits, Proposals
from doyen.quorum.node.proposer import Proposer
from doyen.quorum.node.pump import Pump, call_safely
from doyen.quorum.node.reads import LinearizableReads
from doyen.quorum.node.replicated import ReplicatedMachines

log = logging.getLogger("doyen.quorum.node")

HANDOVERS = 15
"""How often a node that stops tries to transfer leadership."""
REPORT_AFTER_S = 0.002
"""How long after a change of role it is reported. Reports wake other threads, which compete with
the node's loop and its journal for the interpreter, and an election takes about this long."""

OnRole = Callable[[Role, int, str | None], None]


class Status(NamedTuple):
    """The state of a node."""

    id: str
    role: Role
    generation: int
    leader: str | None
    commit: int
    applied: int
    snapshot: int
    """The index up to which a snapshot replaces the log."""
    pending: int
    """Proposals whose outcome is not known yet."""
    full: bool
    """The disk has no room for more proposals."""
    membership: Membership


class Driver:
    """One node's consensus. Lives on one event loop and is called only from there."""

    def __init__(
        self,
        core: Core,
        journal: FileJournal,
        transport: Peers,
        machine: ReplicatedMachines,
        clock: Clock,
        *,
        incarnation: str,
        limits: ProposalLimits = ProposalLimits(),  # noqa: B008  (frozen)
        abort: Callable[[BaseException], None],
    ) -> None:
        """`incarnation` tells this run of this node from every other. `abort` ends the process."""
        self.core = core
        self.id = core.id
        self.machine = machine
        self._journal = journal
        self._transport = transport
        self.pump = pump = Pump(core, journal, transport, clock, abort)
        self.leader_calls = calls = LeaderCalls(pump, transport, limits.patience_s)
        self.proposals = Proposals(pump, machine, calls, incarnation, limits)
        self.applier = Applier(pump, machine, journal, self.proposals, limits)
        self.reads = LinearizableReads(pump, self.applier, calls, limits.patience_s)
        self.disk_space = DiskSpace(pump, journal, calls, limits)
        self.admin = Administration(
            pump, self.proposals, self.applier, self.disk_space, calls, transport.newest
        )
        self._proposer = Proposer(
            pump,
            machine,
            self.proposals,
            self.applier,
            self.disk_space,
            calls,
            limits,
        )
        self.propose, self.submit = self.proposals.propose, self.proposals.submit
        self.barrier, self.when_current = self.reads.barrier, self.reads.when_current
        self._on_role: list[OnRole] = []
        self._role_observers: list[OnRole] = []
        self._unreported: deque[RoleChanged] = deque()
        self._reached = self.applier.membership
        """The committed membership whose members were last connected to."""
        self._required = 0
        """The version of the state that peers were last required to support."""
        pump.on_membership = self._reach
        pump.on_end.append(self.report_roles)
        self.on_applied(self._applied)
        pump.carry_out |= {
            RoleChanged: self._role_changed,
            ProposalRefused: self.proposals.refused,
            TransferRefused: self._transfer_refused,
            TransferFailed: self._transfer_failed,
            SendSnapshot: self._send_snapshot,
        }

    # Start and stop.

    async def start(self) -> None:
        """Restore the snapshot on disk, and take part."""
        await self.applier.start()
        self._require()
        self._journal.start(self.pump.persisted, self.pump.fail)
        self._transport.start(self.pump.step, self.leader_calls.called, self._snapshot_received)
        self._reach()
        self.pump.set_timer()

    async def stop(self, handover_s: float = 5.0) -> None:
        """Transfer leadership, let what is under way end, and close."""
        if not self.pump.ended:
            self.pump.stopping = True
            with suppress(TimeoutError):
                async with asyncio.timeout(handover_s):
                    await self._hand_over()
                    # Once this node is removed, its calls to the leader get no response.
                    while len(self.proposals) and self.id in self.membership.everyone:
                        await self.pump.pause()
        self.crash()
        await self._transport.close()
        await self._journal.close()

    async def _hand_over(self) -> None:
        """Transfer leadership; at times no other node can take it yet, so try several times."""
        for _ in range(HANDOVERS):
            if self.role is not Role.LEADING or len(self.core.membership.voters) == 1:
                return
            with suppress(OrderFailed, OutcomeUnknown, StoreUnavailable):
                await self.admin.transfer()
            await self.pump.pause()
        log.warning("%s", log_line(event="handover_failed", node=self.id))

    def crash(self) -> None:
        """Stop at once, as if the process were killed."""
        self.pump.end()

    # State.

    @property
    def role(self) -> Role:
        return self.core.role

    @property
    def generation(self) -> int:
        return self.core.generation

    @property
    def leader(self) -> str | None:
        return self.core.leader

    @property
    def applied(self) -> int:
        """The index that the state machine has reached."""
        return self.applier.index

    @property
    def membership(self) -> Membership:
        return self.core.membership

    def supported(self) -> int:
        """The newest version of the replicated state that every member is known to support."""
        supports = self._transport.supports
        return min(
            NEWEST if peer == self.id else supports(peer) for peer in self.membership.everyone
        )

    def status(self) -> Status:
        """The state of this node."""
        core = self.core
        return Status(
            self.id,
            core.role,
            core.generation,
            core.leader,
            core.commit,
            self.applier.index,
            self.applier.snapshot,
            len(self.proposals),
            self._journal.full,
            core.membership,
        )

    # Callbacks.

    def on_role(self, callback: OnRole) -> None:
        """Call this with role, generation and leader whenever one of them changes, before the
        messages that follow from the change are sent."""
        self._on_role.append(callback)

    def off_role(self, callback: OnRole) -> None:
        """No longer call this."""
        self._on_role = [each for each in self._on_role if each is not callback]

    def observe_role(self, callback: OnRole) -> None:
        """Report every change of role, generation or leader to this, in order and a moment later,
        so that reports do not delay the election."""
        self.report_roles()  # earlier changes are not reported to this one
        self._role_observers.append(callback)

    def unobserve_role(self, callback: OnRole) -> None:
        """No longer call this."""
        self._role_observers = [each for each in self._role_observers if each is not callback]

    def on_applied(self, callback: Callable[[int], None]) -> None:
        """Call this with the index after entries were applied."""
        self.applier.on_applied.append(callback)

    def off_applied(self, callback: Callable[[int], None]) -> None:
        """No longer call this."""
        kept = [each for each in self.applier.on_applied if each != callback]
        self.applier.on_applied = kept

    def on_question(self, handler: Callable[[bytes, Answer], None]) -> None:
        """Handle the calls of `ask_leader` with this while this node leads."""

        def called(peer: str, question: bytes, respond: Respond) -> None:
            handler(question, lambda answer: respond(DONE, answer))

        self.leader_calls.handlers[SERVICE] = called

    async def ask_leader(self, question: bytes) -> bytes:
        """Call the handler (`on_question`) of the node that leads, which may be this one. Raises
        `StoreUnavailable` if it was certainly not called, `OutcomeUnknown` if the connection broke
        before the answer came."""
        return await self.leader_calls.call_leader(SERVICE + question)

    # Peers.

    def _reach(self) -> None:
        """Connect to all members. Until a change of the membership is committed, the members before
        and after it take part: one that is removed has to acknowledge and to learn of it."""
        latest, committed = self.core.membership, self.applier.membership
        self._reached = committed
        self._transport.reach(
            {
                peer: members.addresses.get(peer, "")
                for members in (committed, latest)
                for peer in members.everyone
                if peer != self.id
            }
        )

    def _require(self) -> None:
        """Refuse peers that do not support the cluster's version."""
        self._required = self.machine.version
        self._transport.require(self._required)

    def _applied(self, index: int) -> None:
        keyspace, proposer = self.machine.versioned, self._proposer
        if keyspace is not None and keyspace.version != self._required:
            self._require()
        if self.applier.membership is not self._reached:
            self._reach()
        if proposer.held_back:
            proposer.held_back = False
            self.pump.flush_soon()

    # Effects of the core.

    def _role_changed(self, effect: RoleChanged) -> None:
        self.disk_space.role_changed()
        self.pump.role_changed()
        if effect.leader is not None:
            again = f"{self.id} was elected again" if effect.leader == self.id else None
            self.admin.transferred(again)
        self.leader_calls.leader_changed(effect.leader)
        self.pump.flush_soon()
        self.pump.loop.call_soon(self.reads.flush)
        for callback in self._on_role:
            call_safely(callback, effect.role, effect.generation, effect.leader)
        if not self._unreported:
            self.pump.loop.call_later(REPORT_AFTER_S, self.report_roles)
        self._unreported.append(effect)

    def report_roles(self) -> None:
        """Report the changes that are not reported yet."""
        while self._unreported:
            change = self._unreported.popleft()
            for callback in self._role_observers:
                call_safely(callback, change.role, change.generation, change.leader)

    def _transfer_refused(self, effect: TransferRefused) -> None:
        if not self.admin.transfer_refused(effect):
            self.disk_space.transfer_failed()

    def _transfer_failed(self, effect: TransferFailed) -> None:
        self.disk_space.transfer_failed()
        self.admin.transferred(effect.reason)
        self.pump.flush_soon()

    def _send_snapshot(self, effect: SendSnapshot) -> None:
        self.pump.start_task(self._stream(effect.peer, effect.generation))

    async def _stream(self, peer: str, generation: int) -> None:
        snapshot, pieces = await self._journal.read_snapshot()

        def done(ok: bool) -> None:
            self.pump.step(SnapshotSent(peer, snapshot, ok))

        self._transport.send_snapshot(peer, generation, snapshot, pieces, done)

    async def _snapshot_received(
        self, peer: str, generation: int, snapshot: Snapshot, pieces: AsyncIterator[bytes]
    ) -> None:
        await self._journal.receive_snapshot(snapshot, pieces)
        self.pump.step(SnapshotReceived(peer, generation, snapshot))
