"""Discovery, synchronisation and broadcast: how the chosen server comes to lead, and leads.

    discovery         the prospective leader learns from a majority which epochs they have accepted,
                      and opens a later one. They accept it on disk and send how far their histories
                      go.
    synchronisation   each follower's history is made the leader's: what it lacks is sent (DIFF),
                      what it has beyond is cut off (TRUNC), or everything is sent. It writes the
                      transactions, *then* the current epoch, *then* acknowledges. When a majority
                      has, the leader leads.
    broadcast         proposals, acknowledgements and commits, in order.

A leader gives up if a member of its majority is ahead of it by (current epoch, zxid): a transaction
that a majority holds is in the history of the server that is ahead.

Connections may lose and reorder messages: until it is in step, a follower repeats the last message
it sent, and the leader's answers depend on nothing else. Imports `common`, `core`, `election` and
`messages`.
"""

from __future__ import annotations

from doyen.quorum.consensus.common import WINDOW, Behind, Commit, Peer
from doyen.quorum.consensus.core import Message, Role
from doyen.quorum.consensus.zab.election import Phase, ZabElector
from doyen.quorum.consensus.zab.messages import (
    Ack,
    AckEpoch,
    AckLeader,
    FollowerInfo,
    LeaderInfo,
    NewLeader,
    Proposal,
    Sync,
    Synced,
    UpToDate,
    ZabState,
)

__all__ = ["Zab"]


class Zab(ZabElector):
    """One server of a ZooKeeper-like ensemble."""

    carrier = Proposal
    answer = Ack

    def _restore(self, state: ZabState | None) -> None:
        super()._restore(state)
        self._accepted_from: str | None = None
        """The server from which `generation` was accepted, if since the last election."""
        self._seen = self.generation
        """The latest epoch that this server has heard of."""
        # As the prospective leader.
        self._infos: set[str] = set()
        self._epoch_acks: dict[str, tuple[int, tuple[int, int]]] = {}
        self._asked: dict[str, tuple[int, int]] = {}
        """The servers that wait to be synchronised, and how far their histories go."""
        self._leader_acks: dict[str, int] = {}
        self._own_token = 0
        """This server's own acknowledgement counts once this is on disk."""
        # As a follower.
        self._counts = False
        self._agreed_with_leader = 0
        self._hear |= {
            FollowerInfo: self._hear_follower_info,
            LeaderInfo: self._hear_leader_info,
            AckEpoch: self._hear_ack_epoch,
            Sync: self._hear_sync,
            Synced: self._hear_synced,
            NewLeader: self._hear_new_leader,
            AckLeader: self._hear_ack_leader,
            UpToDate: self._hear_up_to_date,
            Proposal: self._hear_entries,
            Ack: self._hear_answer,
            Commit: self._hear_commit,
            Behind: self._hear_behind,
        }

    def _state(self) -> ZabState:
        return ZabState(self.generation, self.current_epoch)

    def check(self) -> None:
        """Check the invariants of this server alone."""
        if self.current_epoch > self.generation:
            raise RuntimeError(f"{self.id}'s current epoch is later than its accepted one")
        if self.role is not Role.LOOKING and self.current_epoch != self.generation:
            raise RuntimeError(f"{self.id} serves in an epoch that is not its current one")

    def _choose(self, leader: str) -> None:
        self.chosen = leader
        self.phase = Phase.DISCOVERY
        self._timer.attempts += 1
        self._finalize = None
        self._infos = set()
        self._epoch_acks = {}
        self._asked = {}
        self._leader_acks = {}
        self._own_token = 0
        self._accepted_from = None
        self._progress()
        if leader == self.id:
            for peer in self._peers.values():
                peer.synced = False
            self._count_infos()
        else:
            self._repeat()

    def _progress(self) -> None:
        self._timer.patience = self._now + self._timer.lengthened(self._settings.election_timeout_s)
        self.next_deadline = self._now + self._settings.heartbeat_s

    def _due(self) -> None:
        if self.phase is Phase.ELECTION:
            self._election_due()
        elif self.role is Role.FOLLOWING or self._now >= self._timer.patience:
            self._look()
        else:
            self.next_deadline = self._now + self._settings.heartbeat_s
            if self.chosen != self.id:
                self._repeat()

    def _heard_of(self, epoch: int) -> None:
        """Another server has accepted this epoch. The leader of an earlier one cannot have a
        majority that includes it."""
        if epoch > self._seen:
            self._seen = epoch
        if epoch > self.generation and self._opened():
            self._look()

    # Discovery, on the prospective leader.

    def _opened(self) -> bool:
        """Whether this server has opened its epoch."""
        return self.chosen == self._accepted_from == self.id

    def _hear_follower_info(self, peer: Peer, message: FollowerInfo) -> None:
        self._heard_of(message.generation)
        if self.chosen != self.id:
            return
        peer.synced = False
        peer.resend_at = self._now
        if self._opened():
            self._send(peer, LeaderInfo(self.generation), after=self.log.token)
        elif peer.name not in self._infos:
            self._infos.add(peer.name)
            self._progress()
            self._count_infos()

    def _count_infos(self) -> None:
        if 1 + len(self._infos) < self._majority:
            return
        self._accept(self._seen + 1, self.id)
        self._own_token = self.log.token
        for name in self._peers:
            if name in self._infos:
                self._send(self._peers[name], LeaderInfo(self.generation), after=self.log.token)

    def _accept(self, epoch: int, leader: str) -> None:
        self.generation = self._seen = epoch
        self._accepted_from = leader
        self._set_role(Role.LOOKING, None)
        self.log.write(self._state())

    def _hear_ack_epoch(self, peer: Peer, message: AckEpoch) -> None:
        if message.generation != self.generation or not self._opened() or peer.synced:
            return
        peer.heard = self._now
        last = (message.zxid_epoch, message.zxid)
        self._asked[peer.name] = last
        if self.phase is not Phase.DISCOVERY:
            if self._now >= peer.resend_at:
                self._synchronise(peer, self._guess(last))
        elif message.counts and peer.name not in self._epoch_acks:
            self._epoch_acks[peer.name] = (message.current_epoch, last)
            self._progress()
            self._count_epoch_acks()

    def _written(self) -> None:
        if self._own_token and self.log.durable >= self._own_token:
            if self.phase is Phase.DISCOVERY:
                self._count_epoch_acks()
            else:
                self._count_leader_acks()

    def _count_epoch_acks(self) -> None:
        if self.log.durable < self._own_token or 1 + len(self._epoch_acks) < self._majority:
            return
        if self._ahead():
            self._look()
            return
        self.phase = Phase.SYNCHRONISATION
        self._settle()
        self._own_token = self.log.token
        for name in list(self._asked):
            self._synchronise(self._peers[name], self._guess(self._asked[name]))

    def _ahead(self) -> bool:
        """Whether a member of the majority has a longer history than this server."""
        own = (self.current_epoch, self.log.position())
        return any(theirs > own for theirs in self._epoch_acks.values())

    # Synchronisation.

    def _settle(self) -> None:
        """This server has the history of the epoch's leader. The history is written before."""
        self.current_epoch = self.generation
        self.log.write(self._state())

    def _guess(self, last: tuple[int, int]) -> int:
        """Up to where a history that ends at `last` may agree with this one: this server's last
        entry not beyond it."""
        index = min(last[1], len(self.log))
        while index and (self.log[index - 1].generation, index) > last:
            index -= 1
        return index

    def _synchronise(self, peer: Peer, agreed: int) -> None:
        """Send what follows `agreed` and, after all of it, `NewLeader`."""
        peer.origin = agreed
        peer.next = agreed + 1
        self._pump(peer)

    def _pump(self, peer: Peer) -> None:
        """Send as much of the history as the window allows."""
        peer.resend_at = self._now + 2 * self._settings.heartbeat_s
        end = min(len(self.log), peer.origin + WINDOW)
        while peer.next <= end:
            previous = peer.next - 1
            entries = self._piece(peer.next, end)
            peer.next += len(entries)
            theirs = self._asked.get(peer.name, (0, 0))[1]
            how = "DIFF" if previous >= theirs else "TRUNC" if previous else "WHOLE"
            before = self.log.generation_at(previous)
            self._send(peer, Sync(self.generation, how, previous, before, entries))
        last = len(self.log)
        if peer.next > last:
            self._send(peer, NewLeader(self.generation, last, self.log.generation_at(last)))

    def _hear_synced(self, peer: Peer, message: Synced) -> None:
        if message.generation != self.generation or not self._opened() or peer.synced:
            return
        peer.heard = self._now
        if self.phase is Phase.DISCOVERY or message.last > len(self.log):
            return
        if message.last > peer.origin:
            peer.origin = message.last
            peer.next = max(peer.next, message.last + 1)
            if self.role is not Role.LEADING:
                self._progress()
            if peer.next <= len(self.log):
                self._pump(peer)
        elif self._now >= peer.resend_at or (
            message.last < peer.origin and self._may_go_back(peer, message.last)
        ):
            self._synchronise(peer, message.last)

    def _hear_ack_leader(self, peer: Peer, message: AckLeader) -> None:
        if message.generation != self.generation or not self._opened():
            return
        if self.role is Role.LEADING:
            # The follower has this history: it takes part in the broadcast.
            if not peer.synced:
                peer.synced = True
                peer.match = 0
                peer.next = message.last + 1
            self._send(peer, UpToDate(self.generation, self.commit))
            self._answered(peer, message.last, 0)
        elif self.phase is Phase.SYNCHRONISATION:
            self._leader_acks[peer.name] = message.last
            self._progress()
            self._count_leader_acks()

    def _count_leader_acks(self) -> None:
        if self.phase is not Phase.SYNCHRONISATION or self.log.durable < self._own_token:
            return
        if 1 + len(self._leader_acks) < self._majority:
            return
        self.phase = Phase.BROADCAST
        self._own_token = 0
        self._lead()
        for name in self._peers:
            if name in self._leader_acks:
                self._send(self._peers[name], UpToDate(self.generation, self.commit))

    def _prepare(self, peer: Peer) -> None:
        peer.synced = peer.name in self._leader_acks
        peer.match = self._leader_acks.get(peer.name, 0)
        peer.next = peer.match + 1

    # Discovery and synchronisation, on a follower.

    def _repeat(self) -> None:
        """Repeat the last message: it, or its answer, may have been lost."""
        assert self.chosen is not None
        peer = self._peers[self.chosen]
        if self._accepted_from != self.chosen:
            self._send(peer, FollowerInfo(self.generation), after=self.log.token)
        elif self.phase is Phase.DISCOVERY:
            self._ack_epoch(peer)
        elif self.phase is Phase.SYNCHRONISATION:
            self._send(peer, Synced(self.generation, self._agreed_with_leader))
        else:
            self._send(peer, AckLeader(self.generation, len(self.log)), after=self.log.token)

    def _ack_epoch(self, peer: Peer) -> None:
        message = AckEpoch(self.generation, self._counts, self.current_epoch, *self.log.position())
        self._send(peer, message, after=self.log.token)

    def _hear_leader_info(self, peer: Peer, message: LeaderInfo) -> None:
        if self.chosen != peer.name:
            return
        if message.generation < self.generation:
            self._send(peer, FollowerInfo(self.generation), after=self.log.token)
        elif self.phase is Phase.DISCOVERY:
            if self._accepted_from != peer.name:
                self._counts = message.generation > self.generation
                if self._counts:
                    self._accept(message.generation, peer.name)
                self._accepted_from = peer.name
                self._progress()
            self._ack_epoch(peer)
        elif message.generation == self.generation:
            self._repeat()

    def _from_leader(self, peer: Peer, message: Message) -> bool:
        """Whether the message is of the leader whose epoch this server has accepted."""
        if message.generation == self.generation and self._accepted_from == peer.name:
            return self.chosen == peer.name
        if message.generation < self.generation:
            self._send(peer, self._notification(), after=self.log.token)
        return False

    def _hear_sync(self, peer: Peer, message: Sync) -> None:
        if not self._from_leader(peer, message):
            return
        if self.phase is Phase.BROADCAST:
            self._repeat()
            return
        self.phase = Phase.SYNCHRONISATION
        self._progress()
        agreed = self.log.take(message.previous, message.previous_epoch, message.entries)
        self._agreed_with_leader = agreed
        self._send(peer, Synced(self.generation, agreed))

    def _hear_new_leader(self, peer: Peer, message: NewLeader) -> None:
        if not self._from_leader(peer, message):
            return
        if self.phase is Phase.BROADCAST:
            self._repeat()
            return
        agreed = self.log.agreed(message.last, message.last_epoch)
        self._progress()
        if agreed < message.last:
            self.phase = Phase.SYNCHRONISATION
            self._agreed_with_leader = agreed
            self._send(peer, Synced(self.generation, agreed))
            return
        # If this server has settled in the epoch before, what it has beyond is the leader's too: it
        # was proposed after the message was sent.
        if self.current_epoch < self.generation:
            self.log.shorten(message.last)
            self._settle()
        self.phase = Phase.BROADCAST
        self._repeat()

    # Broadcast, on a follower.

    def _in_step(self, peer: Peer, message: Message) -> bool:
        if not self._from_leader(peer, message) or self.phase is not Phase.BROADCAST:
            return False
        self._follow(peer)
        return True

    def _hear_up_to_date(self, peer: Peer, message: UpToDate) -> None:
        if self._in_step(peer, message):
            self._commit_to(min(message.commit, len(self.log)))
