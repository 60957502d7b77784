"""Fast leader election: how a server chooses the one to follow, perhaps itself.

Servers exchange votes (current epoch, zxid, id) until a majority holds the same vote; the greatest
wins. A logical clock numbers the rounds: votes of an older round are ignored, and those of a newer
one replace a server's own.

To join an established ensemble, a server needs a majority that names the leader, and the leader's
own notification that it leads. The zxids and rounds of those votes are from another time and are
not compared.

The outcome is not safe by itself: `broadcast` decides whether the chosen server may lead. Imports
`common`, `core` and `messages`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from doyen.quorum.consensus.common import Peer, ReplicatedServer
from doyen.quorum.consensus.core import Role
from doyen.quorum.consensus.zab.messages import Notification, ZabState

__all__ = ["Phase", "ZabElector", "ZabVote"]


class Phase(IntEnum):
    """How far a server has come on its way to serving."""

    ELECTION = 0
    DISCOVERY = 1
    SYNCHRONISATION = 2
    BROADCAST = 3


class ZabVote(NamedTuple):
    """The server that another would have lead. The greater vote is the better one."""

    epoch: int
    zxid_epoch: int
    zxid: int
    rank: int


class ZabElector(ReplicatedServer):
    """A server, as far as elections go. Ends with `_choose`."""

    def _restore(self, state: ZabState | None) -> None:
        super()._restore(state)
        state = state or ZabState()
        self.generation = state.accepted_epoch
        self.current_epoch = state.current_epoch
        self.phase = Phase.ELECTION
        self.chosen: str | None = None
        """The server that the election has chosen, perhaps this one; None during an election."""
        self.clock = 0
        self.proposal = ZabVote(0, 0, 0, 0)
        self._votes: dict[str, ZabVote] = {}
        """Votes of this round."""
        self._settled: dict[str, tuple[str, Role]] = {}
        """For each server that is not looking: the leader it names, and its own role."""
        self._finalize: float | None = None
        """When the round is decided, unless a better vote arrives."""
        self._hear[Notification] = self._hear_notification

    def _choose(self, leader: str) -> None:
        """The election is over for this server."""
        raise NotImplementedError

    def _heard_of(self, epoch: int) -> None:
        """Another server has accepted this epoch."""
        raise NotImplementedError

    def _look(self) -> None:
        self._set_role(Role.LOOKING, None)
        self.phase = Phase.ELECTION
        self.chosen = None
        self.clock += 1
        self.proposal = self._own_vote()
        self._votes = {}
        self._settled = {}
        self._finalize = None
        self._notify()
        self._tally()

    def _own_vote(self) -> ZabVote:
        return ZabVote(self.current_epoch, *self.log.position(), self._rank[self.id])

    def _notification(self) -> Notification:
        role = self.role
        if self.phase is not Phase.ELECTION:
            role = Role.LEADING if self.chosen == self.id else Role.FOLLOWING
        vote = self.proposal
        leader = self._names[vote.rank] if self.chosen is None else self.chosen
        return Notification(self.generation, role, self.clock, leader, *vote[:3])

    def _notify(self) -> None:
        self._send_all(self._notification())
        self.next_deadline = self._now + self._settings.heartbeat_s

    def _hear_notification(self, peer: Peer, message: Notification) -> None:
        self._heard_of(message.generation)
        if self.phase is not Phase.ELECTION:
            if message.role is Role.LOOKING:
                if self.chosen == peer.name and message.round > self.clock:
                    self._look()  # the chosen leader has begun a new election itself
                self._send(peer, self._notification())
        elif message.leader in self._rank:
            if message.role is Role.LOOKING:
                self._weigh(peer, message)
            else:
                self._consider_joining(peer, message)

    def _weigh(self, peer: Peer, message: Notification) -> None:
        """Process the vote of a server that is looking."""
        self._settled.pop(peer.name, None)
        if message.round < self.clock:
            self._send(peer, self._notification())
            return
        vote = ZabVote(message.epoch, message.zxid_epoch, message.zxid, self._rank[message.leader])
        if message.round > self.clock:
            self.clock = message.round
            self._votes = {}
            self._propose(max(vote, self._own_vote()))
        elif vote > self.proposal:
            self._propose(vote)
        self._votes[peer.name] = vote
        self._tally()

    def _propose(self, vote: ZabVote) -> None:
        self.proposal = vote
        self._finalize = None
        self._notify()

    def _tally(self) -> None:
        """Check whether a majority holds this server's vote. If so, wait a little for a better one,
        unless all servers that can be reached have voted."""
        same = 1 + sum(vote == self.proposal for vote in self._votes.values())
        if same < self._majority:
            self._finalize = None
        elif same + len(self._unreachable - self._votes.keys()) >= len(self._names):
            self._choose(self._names[self.proposal.rank])
        elif self._finalize is None:
            self._finalize = self._now + 2 * self._settings.heartbeat_s
            self.next_deadline = min(self.next_deadline, self._finalize)

    def _consider_joining(self, peer: Peer, message: Notification) -> None:
        """Process the notification of a server that has a leader."""
        if message.round == self.clock:
            # It decided in this round, perhaps for this server, which does not know yet.
            rank = self._rank[message.leader]
            self._votes[peer.name] = ZabVote(message.epoch, message.zxid_epoch, message.zxid, rank)
            if message.leader == self.id:
                self._tally()
                return
        self._settled[peer.name] = (message.leader, message.role)
        following = sum(leader == message.leader for leader, _ in self._settled.values())
        # This server may complete the majority of an ensemble that has lost a member.
        if following + 1 >= self._majority and self._says_it_leads(message.leader):
            self.clock = max(self.clock, message.round)
            self._choose(message.leader)

    def _says_it_leads(self, leader: str) -> bool:
        """Whether the leader itself has sent that it leads. The others may have old information."""
        return self._settled.get(leader) == (leader, Role.LEADING)

    def _election_due(self) -> None:
        if self.clock == 0:
            self._look()
        elif self._finalize is not None and self._now >= self._finalize:
            self._choose(self._names[self.proposal.rank])
        else:
            self._notify()
            if self._finalize is not None:
                self.next_deadline = min(self.next_deadline, self._finalize)

    def _peer_lost(self, peer: Peer) -> None:
        if peer.name == self.chosen:
            self._look()
        elif self.phase is Phase.ELECTION and self.clock:
            self._votes.pop(peer.name, None)
            self._settled.pop(peer.name, None)
            self._tally()
