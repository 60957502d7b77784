"""ZooKeeper's protocol: fast leader election, and Zab.

    election          votes (current epoch, zxid, id) are exchanged until a majority holds the same;
                      the greatest wins. A logical clock numbers the rounds: an older round's votes
                      are ignored, a newer one's replace one's own.
    discovery         the elected learns from a majority which epochs they have accepted, and opens
                      a later one; they accept it on disk and tell how far their histories go.
    synchronisation   each follower's history is made the leader's: what it lacks is sent (DIFF),
                      what it has beyond is cut off (TRUNC), or all of it is sent. It writes the
                      transactions, *then* the current epoch, *then* acknowledges. A majority makes
                      the leader one.
    broadcast         proposals, acknowledgements and commits, in order.

Safety rests on discovery and synchronisation alone; the election only picks somebody likely to get
through them, and whoever does not looks again, with more patience each time. A leader gives up if
one of its majority is ahead of it by (current epoch, zxid): a transaction that a majority holds is
in the history of whoever is ahead.

A zxid is (epoch, index): the index counts on through all epochs, so it never has to roll over. The
core's `generation` is the epoch it has accepted; it *follows* or *leads* only in the broadcast
phase. Connections may lose and reorder messages: until it is in step, a follower repeats the last
thing it said, and the leader's answers depend on nothing else.

Joining an established ensemble takes a majority that names the leader, and the leader's own word
that it leads; zxid and round of those votes are from another time and are not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from msgspec import Struct

from doyen.quorum.consensus.common import WINDOW, Peer, ReplicatedServer, order
from doyen.quorum.consensus.core import (
    LogEntry,
    Membership,
    Message,
    ProtocolSettings,
    Recovered,
    Role,
)

__all__ = [
    "MESSAGES",
    "STATE",
    "Ack",
    "AckEpoch",
    "AckLeader",
    "Behind",
    "Commit",
    "FollowerInfo",
    "LeaderInfo",
    "NewLeader",
    "Notification",
    "Phase",
    "Proposal",
    "Sync",
    "Synced",
    "UpToDate",
    "Zab",
    "ZabState",
]


class ZabState(Struct, frozen=True, array_like=True):
    """What a server must not forget beside its history."""

    accepted_epoch: int = 0
    """The latest epoch that somebody was allowed to open."""
    current_epoch: int = 0
    """The epoch whose leader's history this server's is."""


class Phase(IntEnum):
    """Where a server is on its way to serving."""

    ELECTION = 0
    DISCOVERY = 1
    SYNCHRONISATION = 2
    BROADCAST = 3


class Vote(NamedTuple):
    """Whom a server would have lead. Greater is better."""

    epoch: int
    zxid_epoch: int
    zxid: int
    rank: int


class Notification(Message, frozen=True, gc=False):
    """A vote, in a round, of a server in this role. `generation` is the epoch it has accepted."""

    role: Role
    round: int
    leader: str
    epoch: int
    zxid_epoch: int
    zxid: int


class FollowerInfo(Message, frozen=True, gc=False):
    """I would follow you; I have accepted this epoch."""


class LeaderInfo(Message, frozen=True, gc=False):
    """I open this epoch."""


class AckEpoch(Message, frozen=True, gc=False):
    """I have accepted it, and my history goes this far."""

    counts: bool
    """False if the epoch was accepted before, perhaps of another leader."""
    current_epoch: int
    zxid_epoch: int
    zxid: int


class Sync(Message, frozen=True, gc=False):
    """A piece of the leader's history, which follows `previous`."""

    how: str
    previous: int
    previous_epoch: int
    entries: tuple[LogEntry, ...]


class Synced(Message, frozen=True, gc=False):
    """Up to here our histories may agree; go on."""

    last: int


class NewLeader(Message, frozen=True, gc=False):
    """That was all: this is the leader's history."""

    last: int
    last_epoch: int


class AckLeader(Message, frozen=True, gc=False):
    """It is mine now, on disk, and so is the epoch."""

    last: int


class UpToDate(Message, frozen=True, gc=False):
    """A majority has it: serve."""

    commit: int


class Proposal(Message, frozen=True, gc=False):
    """New transactions, the first of them at `first`."""

    first: int
    entries: tuple[LogEntry, ...]
    commit: int
    round: int


class Ack(Message, frozen=True, gc=False):
    """I have everything up to here on disk."""

    last: int
    round: int


class Commit(Message, frozen=True, gc=False):
    """Everything up to `commit` stands. Said again and again, it is the heartbeat."""

    commit: int
    last: int
    """What has been proposed so far."""
    round: int


class Behind(Message, frozen=True, gc=False):
    """I lack what comes after `last`."""

    last: int
    round: int


MESSAGES = (
    Notification
    | FollowerInfo
    | LeaderInfo
    | AckEpoch
    | Sync
    | Synced
    | NewLeader
    | AckLeader
    | UpToDate
    | Proposal
    | Ack
    | Commit
    | Behind
)
STATE = ZabState


class Zab(ReplicatedServer):
    """One server of a ZooKeeper-like ensemble."""

    def __init__(
        self,
        id: str,  # noqa: A002
        membership: Membership,
        recovered: Recovered,
        *,
        settings: ProtocolSettings,
        jitter: Callable[[], float],
        now: float,
    ) -> None:
        super().__init__(id, membership, recovered, settings=settings, jitter=jitter, now=now)
        state = recovered.state or ZabState()
        self.generation: int = state.accepted_epoch
        self.current_epoch: int = state.current_epoch
        self.phase = Phase.ELECTION
        self._names = sorted(membership.voters, key=order)
        self._rank = {name: rank for rank, name in enumerate(self._names)}
        self._timeout = self._draw()
        self._patience = now
        """Until when whoever is not in step yet is waited for."""
        # Election.
        self.clock = 0
        self.proposal = Vote(0, 0, 0, 0)
        self._votes: dict[str, Vote] = {}
        """Votes of this round."""
        self._settled: dict[str, tuple[str, Role]] = {}
        """Whom those follow who are not looking, and whether they say so of themselves."""
        self._finalize: float | None = None
        """When the round is decided, unless something better arrives."""
        # Prospective leader or follower.
        self.chosen: str | None = None
        """Whom the election has shown us; perhaps ourselves."""
        self._accepted_from: str | None = None
        """Of whom we have accepted `generation`, if in this life."""
        self._seen = self.generation
        """The latest epoch we have heard of."""
        self._infos: set[str] = set()
        self._epoch_acks: dict[str, tuple[int, tuple[int, int]]] = {}
        self._asked: dict[str, tuple[int, int]] = {}
        """Who waits to be synchronised, and how far its history goes."""
        self._leader_acks: dict[str, int] = {}
        self._own_token = 0
        """Our own acknowledgement counts once this is on disk."""
        self._hear = {
            Notification: self._hear_notification,
            FollowerInfo: self._hear_follower_info,
            LeaderInfo: self._hear_leader_info,
            AckEpoch: self._hear_ack_epoch,
            Sync: self._hear_sync,
            Synced: self._hear_synced,
            NewLeader: self._hear_new_leader,
            AckLeader: self._hear_ack_leader,
            UpToDate: self._hear_up_to_date,
            Proposal: self._hear_proposal,
            Ack: self._hear_ack,
            Commit: self._hear_commit,
            Behind: self._hear_behind,
        }

    def _state(self) -> ZabState:
        return ZabState(self.generation, self.current_epoch)

    # Election.

    def _look(self) -> None:
        self._turn(Role.LOOKING, None)
        self.phase = Phase.ELECTION
        self.chosen = None
        self.clock += 1
        self.proposal = self._own_vote()
        self._votes = {}
        self._settled = {}
        self._finalize = None
        self._notify()
        self._tally()

    def _own_vote(self) -> Vote:
        return Vote(self.current_epoch, *self._last(), self._rank[self.id])

    def _notification(self) -> Notification:
        role = self.role
        if self.phase is not Phase.ELECTION:
            role = Role.LEADING if self.chosen == self.id else Role.FOLLOWING
        vote = self.proposal
        leader = self._names[vote.rank] if self.chosen is None else self.chosen
        return Notification(self.generation, role, self.clock, leader, *vote[:3])

    def _notify(self) -> None:
        self._tell_all(self._notification())
        self.next_deadline = self._now + self._settings.heartbeat_s

    def _hear_notification(self, peer: Peer, message: Notification) -> None:
        self._heard_of(message.generation)
        if self.phase is not Phase.ELECTION:
            if message.role is Role.LOOKING:
                if self.chosen == peer.name and message.round > self.clock:
                    self._look()  # Our leader itself has none any more.
                self._send(peer, self._notification())
        elif message.leader in self._rank:
            if message.role is Role.LOOKING:
                self._weigh(peer, message)
            else:
                self._consider_joining(peer, message)

    def _weigh(self, peer: Peer, message: Notification) -> None:
        """Somebody who is looking votes."""
        self._settled.pop(peer.name, None)
        if message.round < self.clock:
            self._send(peer, self._notification())
            return
        vote = Vote(message.epoch, message.zxid_epoch, message.zxid, self._rank[message.leader])
        if message.round > self.clock:
            self.clock = message.round
            self._votes = {}
            self._propose(max(vote, self._own_vote()))
        elif vote > self.proposal:
            self._propose(vote)
        self._votes[peer.name] = vote
        self._tally()

    def _propose(self, vote: Vote) -> None:
        self.proposal = vote
        self._finalize = None
        self._notify()

    def _tally(self) -> None:
        """See whether a majority holds our vote; then wait a little for better ones, unless
        everybody who can be reached has spoken."""
        same = 1 + sum(vote == self.proposal for vote in self._votes.values())
        if same < self._majority:
            self._finalize = None
        elif same + len(self._gone - self._votes.keys()) >= len(self._names):
            self._choose(self._names[self.proposal.rank])
        elif self._finalize is None:
            self._finalize = self._now + 2 * self._settings.heartbeat_s
            self.next_deadline = min(self.next_deadline, self._finalize)

    def _consider_joining(self, peer: Peer, message: Notification) -> None:
        """Somebody has a leader already."""
        if message.round == self.clock:
            # It decided in this very round: perhaps for us, who have yet to hear that we have won.
            rank = self._rank[message.leader]
            self._votes[peer.name] = Vote(message.epoch, message.zxid_epoch, message.zxid, rank)
            if message.leader == self.id:
                self._tally()
                return
        self._settled[peer.name] = (message.leader, message.role)
        following = sum(leader == message.leader for leader, _ in self._settled.values())
        # We ourselves complete the majority of an ensemble that has lost one of its own.
        if following + 1 >= self._majority and self._says_it_leads(message.leader):
            self.clock = max(self.clock, message.round)
            self._choose(message.leader)

    def _says_it_leads(self, leader: str) -> bool:
        """Others' word is not enough: they may be the last to know."""
        return self._settled.get(leader) == (leader, Role.LEADING)

    def _choose(self, leader: str) -> None:
        """The election is over, for us."""
        self.chosen = leader
        self.phase = Phase.DISCOVERY
        self._attempts += 1
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
            self._insist()

    def check(self) -> None:
        """What must hold of this server by itself."""
        if self.current_epoch > self.generation:
            raise RuntimeError(f"{self.id} is in an epoch that it has not accepted")
        if self.role is not Role.LOOKING and self.current_epoch != self.generation:
            raise RuntimeError(f"{self.id} serves in an epoch that it has not settled in")

    # Time.

    def _progress(self) -> None:
        self._patience = self._now + self._grown(self._settings.election_timeout_s)
        self.next_deadline = self._now + self._settings.heartbeat_s

    def _due(self) -> None:
        if self.phase is Phase.ELECTION:
            if self.clock == 0:
                self._look()
            elif self._finalize is not None and self._now >= self._finalize:
                self._choose(self._names[self.proposal.rank])
            else:
                self._notify()
                if self._finalize is not None:
                    self.next_deadline = min(self.next_deadline, self._finalize)
        elif self.role is Role.FOLLOWING or self._now >= self._patience:
            self._look()
        else:
            self.next_deadline = self._now + self._settings.heartbeat_s
            if self.chosen != self.id:
                self._insist()

    def _lost_sight(self, peer: Peer) -> None:
        if peer.name == self.chosen:
            self._look()
        elif self.phase is Phase.ELECTION and self.clock:
            self._votes.pop(peer.name, None)
            self._settled.pop(peer.name, None)
            self._tally()

    def _heard_of(self, epoch: int) -> None:
        """Somebody has accepted this epoch. A leader of an earlier one can have no majority that
        includes them."""
        if epoch > self._seen:
            self._seen = epoch
        if epoch > self.generation and self._opened():
            self._look()

    # Discovery, as the prospective leader sees it.

    def _opened(self) -> bool:
        """Whether this server has opened its epoch."""
        return self.chosen == self._accepted_from == self.id

    def _hear_follower_info(self, peer: Peer, message: FollowerInfo) -> None:
        self._heard_of(message.generation)
        if self.chosen != self.id:
            return
        peer.synced = False
        peer.again = self._now
        if self._opened():
            self._send(peer, LeaderInfo(self.generation), after=self._token)
        elif peer.name not in self._infos:
            self._infos.add(peer.name)
            self._progress()
            self._count_infos()

    def _count_infos(self) -> None:
        if 1 + len(self._infos) < self._majority:
            return
        self._accept(self._seen + 1, self.id)
        self._own_token = self._token
        for name in self._peers:
            if name in self._infos:
                self._send(self._peers[name], LeaderInfo(self.generation), after=self._token)

    def _accept(self, epoch: int, leader: str) -> None:
        self.generation = self._seen = epoch
        self._accepted_from = leader
        self._turn(Role.LOOKING, None)
        self._persist(self._state())

    def _hear_ack_epoch(self, peer: Peer, message: AckEpoch) -> None:
        if message.generation != self.generation or not self._opened() or peer.synced:
            return
        peer.heard = self._now
        last = (message.zxid_epoch, message.zxid)
        self._asked[peer.name] = last
        if self.phase is not Phase.DISCOVERY:
            if self._now >= peer.again:
                self._synchronise(peer, self._guess(last))
        elif message.counts and peer.name not in self._epoch_acks:
            self._epoch_acks[peer.name] = (message.current_epoch, last)
            self._progress()
            self._count_epoch_acks()

    def _written(self) -> None:
        if self._own_token and self._durable >= self._own_token:
            if self.phase is Phase.DISCOVERY:
                self._count_epoch_acks()
            else:
                self._count_leader_acks()

    def _count_epoch_acks(self) -> None:
        if self._durable < self._own_token or 1 + len(self._epoch_acks) < self._majority:
            return
        if self._ahead():
            self._look()
            return
        self.phase = Phase.SYNCHRONISATION
        self._settle()
        self._own_token = self._token
        for name in list(self._asked):
            self._synchronise(self._peers[name], self._guess(self._asked[name]))

    def _ahead(self) -> bool:
        """Whether one of the majority has a history that goes further than ours."""
        own = (self.current_epoch, self._last())
        return any(theirs > own for theirs in self._epoch_acks.values())

    # Synchronisation.

    def _settle(self) -> None:
        """The history is the leader's of this epoch. It has been written before this is."""
        self.current_epoch = self.generation
        self._persist(self._state())

    def _guess(self, last: tuple[int, int]) -> int:
        """Where a history that ends at `last` may leave ours: at our last entry not beyond it."""
        index = min(last[1], len(self.log))
        while index and (self.log[index - 1].generation, index) > last:
            index -= 1
        return index

    def _synchronise(self, peer: Peer, agreed: int) -> None:
        """Send what comes after `agreed`, and, when that is all, say so."""
        peer.origin = agreed
        peer.next = agreed + 1
        self._pump(peer)

    def _pump(self, peer: Peer) -> None:
        """Send as much of the history as may be on its way at once."""
        peer.again = self._now + 2 * self._settings.heartbeat_s
        end = min(len(self.log), peer.origin + WINDOW)
        while peer.next <= end:
            previous = peer.next - 1
            entries = self._piece(peer.next, end)
            peer.next += len(entries)
            theirs = self._asked.get(peer.name, (0, 0))[1]
            how = "DIFF" if previous >= theirs else "TRUNC" if previous else "WHOLE"
            before = self._generation_at(previous)
            self._send(peer, Sync(self.generation, how, previous, before, entries))
        last = len(self.log)
        if peer.next > last:
            self._send(peer, NewLeader(self.generation, last, self._generation_at(last)))

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
        elif self._now >= peer.again or (
            message.last < peer.origin and self._may_go_back(peer, message.last)
        ):
            self._synchronise(peer, message.last)

    def _hear_ack_leader(self, peer: Peer, message: AckLeader) -> None:
        if message.generation != self.generation or not self._opened():
            return
        if self.role is Role.LEADING:
            self._admit(peer, message.last)
        elif self.phase is Phase.SYNCHRONISATION:
            self._leader_acks[peer.name] = message.last
            self._progress()
            self._count_leader_acks()

    def _count_leader_acks(self) -> None:
        if self.phase is not Phase.SYNCHRONISATION or self._durable < self._own_token:
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

    def _admit(self, peer: Peer, last: int) -> None:
        """The follower's history is ours up to `last`: it takes part from now on."""
        if not peer.synced:
            peer.synced = True
            peer.match = 0
            peer.next = last + 1
        self._send(peer, UpToDate(self.generation, self.commit))
        self._answered(peer, last, 0)

    # Discovery and synchronisation, as the follower sees them.

    def _insist(self) -> None:
        """Say again where we are: what we said, or its answer, may be lost."""
        assert self.chosen is not None
        peer = self._peers[self.chosen]
        if self._accepted_from != self.chosen:
            self._send(peer, FollowerInfo(self.generation), after=self._token)
        elif self.phase is Phase.DISCOVERY:
            self._ack_epoch(peer)
        elif self.phase is Phase.SYNCHRONISATION:
            self._send(peer, Synced(self.generation, self._agreed_with_leader))
        else:
            self._send(peer, AckLeader(self.generation, len(self.log)), after=self._token)

    _counts = False
    _agreed_with_leader = 0

    def _ack_epoch(self, peer: Peer) -> None:
        message = AckEpoch(self.generation, self._counts, self.current_epoch, *self._last())
        self._send(peer, message, after=self._token)

    def _hear_leader_info(self, peer: Peer, message: LeaderInfo) -> None:
        if self.chosen != peer.name:
            return
        if message.generation < self.generation:
            self._send(peer, FollowerInfo(self.generation), after=self._token)
        elif self.phase is Phase.DISCOVERY:
            if self._accepted_from != peer.name:
                self._counts = message.generation > self.generation
                if self._counts:
                    self._accept(message.generation, peer.name)
                self._accepted_from = peer.name
                self._progress()
            self._ack_epoch(peer)
        elif message.generation == self.generation:
            self._insist()

    def _from_leader(self, peer: Peer, message: Message) -> bool:
        """Whether this is said by the leader whose epoch we have accepted."""
        if message.generation == self.generation and self._accepted_from == peer.name:
            return self.chosen == peer.name
        if message.generation < self.generation:
            self._send(peer, self._notification(), after=self._token)
        return False

    def _hear_sync(self, peer: Peer, message: Sync) -> None:
        if not self._from_leader(peer, message):
            return
        if self.phase is Phase.BROADCAST:
            self._insist()
            return
        self.phase = Phase.SYNCHRONISATION
        self._progress()
        agreed = self._agreed(message.previous, message.previous_epoch)
        if agreed == message.previous:
            self._take(agreed, message.entries)
            agreed += len(message.entries)
        self._agreed_with_leader = agreed
        self._send(peer, Synced(self.generation, agreed))

    def _hear_new_leader(self, peer: Peer, message: NewLeader) -> None:
        if not self._from_leader(peer, message):
            return
        if self.phase is Phase.BROADCAST:
            self._insist()
            return
        agreed = self._agreed(message.last, message.last_epoch)
        self._progress()
        if agreed < message.last:
            self.phase = Phase.SYNCHRONISATION
            self._agreed_with_leader = agreed
            self._send(peer, Synced(self.generation, agreed))
            return
        # Settled in this epoch before, what we have beyond is the leader's too: it was proposed
        # after the message was sent.
        if self.current_epoch < self.generation:
            if len(self.log) > message.last:
                self._cut(message.last)
                self._persist(first=message.last + 1)
            self._settle()
        self.phase = Phase.BROADCAST
        self._insist()

    # Broadcast, as the follower sees it.

    def _in_step(self, peer: Peer, message: Message) -> bool:
        """Whether this is the leader speaking to one who has acknowledged it. If so, it serves."""
        if not self._from_leader(peer, message) or self.phase is not Phase.BROADCAST:
            return False
        if self.role is not Role.FOLLOWING:
            self._timeout = self._draw()
            self._turn(Role.FOLLOWING, peer.name)
        self.next_deadline = self._now + self._timeout
        return True

    def _hear_up_to_date(self, peer: Peer, message: UpToDate) -> None:
        if self._in_step(peer, message):
            self._commit_to(min(message.commit, len(self.log)))

    def _hear_proposal(self, peer: Peer, message: Proposal) -> None:
        if not self._in_step(peer, message):
            return
        known = len(self.log)
        if message.first > known + 1:
            self._send(peer, Behind(self.generation, known, message.round))
            return
        new = message.entries[known + 1 - message.first :]
        if new:
            self.log.extend(new)
            self._persist(first=known + 1, entries=new)
        self._commit_to(min(message.commit, len(self.log)))
        self._send(peer, Ack(self.generation, len(self.log), message.round), after=self._token)

    def _hear_commit(self, peer: Peer, message: Commit) -> None:
        if not self._in_step(peer, message):
            return
        self._commit_to(min(message.commit, len(self.log)))
        if message.last > len(self.log):
            self._send(peer, Behind(self.generation, len(self.log), message.round))
        else:
            self._send(peer, Ack(self.generation, self._stable, message.round))

    # Broadcast, as the leader sees it.

    def _carry(self, peer: Peer, first: int, entries: tuple[LogEntry, ...]) -> Message:
        if entries:
            return Proposal(self.generation, first, entries, self.commit, self._round)
        return Commit(self.generation, self.commit, first - 1, self._round)

    def _leads_in(self, peer: Peer, message: Message) -> bool:
        return self.role is Role.LEADING and message.generation == self.generation and peer.synced

    def _hear_ack(self, peer: Peer, message: Ack) -> None:
        if self._leads_in(peer, message):
            self._answered(peer, message.last, message.round)

    def _hear_behind(self, peer: Peer, message: Behind) -> None:
        if self._leads_in(peer, message):
            self._missing(peer, message.last, message.round)
