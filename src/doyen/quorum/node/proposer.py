"""Proposals become log entries: at the core of the node that leads, or by way of that node.

- **Batches.** All commands that are proposed in one turn of the event loop become one entry,
  encoded once. A follower sends its batches to the leader, a few at a time
  (`ProposalLimits.forwards`), and the leader makes one entry of all that have arrived in a turn.
- **Commands of the node itself** go into entries of their own, before all others. They are a
  leader's, so those of a node that no longer leads, or leads in a later generation, are dropped;
  the next leader has its own.
- **Retries.** A batch whose entry was not committed, or whose outcome is unknown, is proposed
  again under the same request ids, so it is carried out once.
"""

from __future__ import annotations

from msgspec import MsgspecError

from doyen.errors import ConfigError
from doyen.quorum.consensus.core import Propose, Role
from doyen.quorum.node.applier import Applier
from doyen.quorum.node.disk_space import DiskSpace
from doyen.quorum.node.leader_calls import (
    DONE,
    NOT_LEADING,
    PROPOSE,
    PROPOSE_AS_ADMIN,
    REFUSED,
    UNKNOWN,
    LeaderCalls,
    Respond,
)
from doyen.quorum.node.proposals import (
    Batch,
    ForwardedBatches,
    ProposalLimits,
    Proposals,
    decode_results,
)
from doyen.quorum.node.pump import Pump
from doyen.quorum.node.replicated import NO_MACHINE, ReplicatedMachines, decode_batch, encode_batch
from doyen.quorum.node.roles import frees, needs_admin


class Proposer:
    """Takes waiting proposals, and batches of peers, to the core or to the leader."""

    def __init__(
        self,
        pump: Pump,
        machine: ReplicatedMachines,
        proposals: Proposals,
        applier: Applier,
        disk_space: DiskSpace,
        leader_calls: LeaderCalls,
        limits: ProposalLimits,
    ) -> None:
        self._pump = pump
        self._machine = machine
        self._proposals = proposals
        self._applier = applier
        self._disk_space = disk_space
        self._leader_calls = leader_calls
        self._limits = limits
        self._forwarded = ForwardedBatches(limits)
        self._forwarding = 0
        """Batches that were sent to the leader and have no response."""
        self.held_back = False
        """Whether something waits until entries are applied."""
        pump.flush = self._flush
        handlers = leader_calls.handlers
        handlers[PROPOSE] = lambda _, data, respond: self._called(data, respond, False)
        handlers[PROPOSE_AS_ADMIN] = lambda _, data, respond: self._called(data, respond, True)

    def _flush(self) -> None:
        pump, proposals, forwarded = self._pump, self._proposals, self._forwarded
        pump.flushing = False
        if pump.ended:
            return
        if pump.core.role is not Role.LEADING:
            self._flush_to_leader(pump.core.leader)
            return
        applied, appended = self._applier.index, proposals.appended
        while proposals.internal:
            batch = proposals.gather(applied, internal=True)
            if batch is not None:
                event = Propose(encode_batch(batch.commands))
                if proposals.append(event, batch) is not None:
                    self._not_appended(batch)
                    return
        if not proposals.queue and not forwarded.queue:
            return
        if (reason := self._disk_space.refusal()) is not None:
            self._refuse(reason)
        while proposals.queue or forwarded.queue:
            if len(appended) >= self._limits.pipeline:
                self.held_back = True
                return
            data = b""
            if forwarded.queue:
                batch, data = forwarded.next_entry(proposals, applied)
            else:
                batch = proposals.gather(applied)
            if batch is not None:
                event = Propose(data or encode_batch(batch.commands))
                if proposals.append(event, batch) is not None:
                    self._not_appended(batch)
                    return

    def _not_appended(self, batch: Batch) -> None:
        """This node, or the peers that sent it, propose it again."""
        batch.not_carried_out()
        batch.respond(NOT_LEADING)
        self._proposals.retry(batch)
        self._pump.flush_after_pause()

    def _refuse(self, reason: str) -> None:
        """Refuse writes for lack of disk space, and transfer leadership to a node that has some."""
        spares = self._disk_space.spares
        for batch in self._forwarded.take_out(spares):
            batch.respond(REFUSED, reason)
        self._proposals.refuse_waiting(reason, spares)
        self._disk_space.transfer_soon()

    # On a node that follows.

    def _flush_to_leader(self, leader: str | None) -> None:
        """Only a few batches are under way at a time: with one per turn of the loop, a leader with
        a slow disk would have as many entries waiting."""
        proposals = self._proposals
        while self._forwarded.queue:
            self._forwarded.take().respond(NOT_LEADING)
        proposals.refuse_internal(f"node {self._pump.id} leads no longer")
        if leader is None:
            return
        while proposals.queue and self._forwarding < self._limits.forwards:
            batch = proposals.gather(self._applier.index)
            if batch is not None:
                self._forwarding += 1
                self._pump.start_task(self._forward(leader, batch))

    async def _forward(self, leader: str, batch: Batch) -> None:
        try:
            await self._call_leader(leader, batch)
        finally:
            self._forwarding -= 1
        if self._proposals.queue or self._proposals.internal:
            self._pump.flush_soon()

    async def _call_leader(self, leader: str, batch: Batch) -> None:
        tag = PROPOSE_AS_ADMIN if needs_admin(batch.commands) else PROPOSE
        response = await self._leader_calls.call(leader, tag + encode_batch(batch.commands))
        status, payload = response[0], response[1:]
        if status == DONE:
            self._proposals.settle(batch, decode_results(payload, batch.commands))
            return
        if status != UNKNOWN:
            batch.not_carried_out()
        if status == REFUSED:
            # The leader refuses a batch as a whole, for lack of disk space for instance; commands
            # that free space may be accepted by themselves.
            freeing, rest = self._proposals.parted(batch, frees)
            self._proposals.refuse(rest if rest.commands else freeing, payload.decode())
            if freeing.commands and rest.commands:
                freeing.attempted()
                await self._call_leader(leader, freeing)
            return
        self._proposals.retry(batch)
        if self._pump.core.leader == leader:
            await self._pump.pause()

    def _called(self, data: bytes, respond: Respond, as_admin: bool) -> None:
        """A peer has sent a batch to this node, which leads."""
        try:
            commands = decode_batch(data)
            if not self._machine.targets.keys() >= {command.target for command in commands}:
                raise ConfigError(NO_MACHINE)
        except (MsgspecError, ConfigError) as error:
            respond(REFUSED, f"the leader cannot propose this batch: {error}".encode())
            return
        if needs_admin(commands) and not as_admin:
            respond(REFUSED, b"an administrator's command, forwarded without that role")
        elif not self._forwarded.add(data, Batch.forwarded(commands, respond)):
            respond(REFUSED, b"the leader has more proposals than it can take")
        else:
            self._pump.flush_soon()
