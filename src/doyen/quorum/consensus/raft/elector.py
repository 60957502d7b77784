"""The election of a Raft server, and the state that every server has.

`Elector` keeps the state, the tokens of the disk and the clock. It looks for a leader, runs
pre-votes and campaigns, and answers requests for votes. What a leader does, and what a follower
does with its log, is in `server`, which also explains the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import msgspec
from msgspec import Struct

from doyen.quorum.consensus.core import (
    CoreEvent,
    Effect,
    Membership,
    Message,
    Persist,
    Position,
    ProtocolSettings,
    Received,
    Recovered,
    Role,
    RoleChanged,
    Send,
)
from doyen.quorum.consensus.invariants import IllegalEvent
from doyen.quorum.consensus.raft.log import RaftLog
from doyen.quorum.consensus.raft.messages import (
    HASTE_S,
    Ballot,
    PreVote,
    PreVoteReply,
    RaftSettings,
    TimeoutNow,
    Vote,
    VoteReply,
)

__all__ = ["FOLLOWING", "LEADING", "LOOKING", "Elector", "RaftCampaign"]

LOOKING, FOLLOWING, LEADING = Role.LOOKING, Role.FOLLOWING, Role.LEADING


class RaftCampaign(Struct):
    """What a looking server does to get a leader: a pre-vote, or an election."""

    pre_vote: bool
    token: int = 0
    """A candidate's own vote counts, and it asks for others, once this is on disk."""
    transfer: bool = False
    votes: set[str] = msgspec.field(default_factory=set)


class Elector:
    """A Raft server, as far as elections go."""

    def __init__(
        self,
        id: str,  # noqa: A002  (the core's own word)
        membership: Membership,
        recovered: Recovered,
        *,
        settings: ProtocolSettings,
        jitter: Callable[[], float],
        now: float,
    ) -> None:
        ballot = (
            Ballot(0, None, membership)
            if recovered.state is None
            else msgspec.convert(recovered.state, Ballot)
        )
        self.id = id
        self.settings = _settings(settings)
        self.log = RaftLog(recovered, ballot.founders)
        self.membership = self.log.membership
        self.role = LOOKING
        self.leader: str | None = None
        # A log without its ballot was restored from elsewhere.
        self.generation = max(ballot.generation, self.log.last_generation)
        self.vote = ballot.vote if self.generation == ballot.generation else None
        self.commit = self.log.base
        self.founders = ballot.founders
        self.witnessed: dict[str, Position] = {}
        """What each peer has confirmed to be on its disk, by votes and acknowledgements."""
        self._jitter = jitter
        self._now = now
        self._out: list[Effect] = []
        self._announced: tuple[Role, int, str | None] = (LOOKING, self.generation, None)
        self._token = self._written = 0
        self._heard = -inf
        self._haste = 0.0
        self._campaign: RaftCampaign | None = None
        self._on: dict[type[CoreEvent], Callable[[Any], None]] = {}
        self._hear: dict[type[Message], Callable[[str, Any], None]] = {
            PreVote: self._pre_vote,
            PreVoteReply: self._pre_vote_reply,
            Vote: self._vote_asked,
            VoteReply: self._vote_reply,
            TimeoutNow: self._timeout_now,
        }
        self._wait()
        self._set_up()

    @property
    def position(self) -> Position:
        """How far this server has come; never less than it has confirmed to any peer."""
        return Position(self.generation, self.log.last_generation, self.log.last)

    def handle(self, event: CoreEvent, now: float) -> list[Effect]:
        """Process one event and return what has to be done, in order."""
        if now < self._now:
            raise IllegalEvent(f"{self.id}: the clock went back from {self._now!r} to {now!r}")
        self._now = now
        out = self._out = []
        if type(event) is Received:
            hear = self._hear.get(type(event.message))
            if hear is None:
                raise IllegalEvent(f"{self.id}: not a message of Raft: {event.message!r}")
            if event.peer == self.id:
                raise IllegalEvent(f"{self.id}: a message from a server of the same name")
            hear(event.peer, event.message)
        else:
            on = self._on.get(type(event))
            if on is None:
                raise IllegalEvent(f"{self.id}: no such event: {event!r}")
            on(event)
        if (
            self.role is not self._announced[0]
            or self.generation != self._announced[1]
            or self.leader != self._announced[2]
        ):
            # First, so that a leader learns that it is deposed before it hears what others did.
            self._announced = (self.role, self.generation, self.leader)
            out.insert(0, RoleChanged(*self._announced))
        return out

    def _set_up(self) -> None:
        """Initialise the rest of the server."""
        raise NotImplementedError

    def _lead(self) -> None:
        """This server is elected."""
        raise NotImplementedError

    def _resign(self) -> None:
        """This server no longer leads, for whatever reason."""
        raise NotImplementedError

    def _save(self) -> None:
        """Write the generation and the vote to disk."""
        self._token += 1
        ballot = Ballot(self.generation, self.vote, self.founders)
        self._out.append(Persist(self._token, ballot, keep=True))

    # Looking and campaigning.

    def _may_campaign(self) -> bool:
        """Whether this server may campaign. Voters may. A server that was removed by a change that
        is not committed may as well: until it is, it may be the only one with a log that the others
        can follow."""
        return self.id in self.membership.voters or (
            self.log.membership_index > self.commit and self.id in self.log.membership_before.voters
        )

    def _draw(self) -> float:
        """The time until the next campaign."""
        timeout = self.settings.election_timeout_s
        if self._haste:
            wait, self._haste = self._haste * (1 + self._jitter()) / 2, self._haste * 2
            if self._haste > timeout:
                self._haste = 0.0
            return wait
        return timeout * (1 + self._jitter() / 2)

    def _look(self) -> None:
        """Have no leader in this generation."""
        if self.role is LEADING:
            self._resign()
        self.role = LOOKING
        self.leader = None
        self._campaign = None
        self._wait()

    def _wait(self) -> None:
        self.next_deadline = self._now + self._draw() if self._may_campaign() else inf

    def _hurry(self) -> None:
        """Have no leader, and run a pre-vote soon; the more of them have failed, the later."""
        self._look()
        self._haste = 2 * self.settings.haste_s
        if self._may_campaign():
            self.next_deadline = self._now + self.settings.haste_s * self._jitter()

    def _adopt(self, generation: int, vote: str | None = None) -> None:
        """A peer is in a later generation: enter it, without a leader."""
        self.generation = generation
        self.vote = vote
        self._save()
        self._look()

    def _begin_pre_vote(self) -> None:
        """Run a pre-vote: ask whether a campaign would succeed before beginning a generation."""
        self._look()
        self._begin(RaftCampaign(pre_vote=True))
        self._count(self.id)

    def _become_candidate(self, *, transfer: bool) -> None:
        """Begin a new generation, and ask for votes once this server's own vote is on disk."""
        self._look()
        self.generation += 1
        self.vote = self.id
        self._save()
        self._begin(RaftCampaign(pre_vote=False, token=self._token, transfer=transfer))

    def _begin(self, campaign: RaftCampaign) -> None:
        self._campaign = campaign
        for peer in self.membership.voters:
            if peer != self.id:
                self._solicit(peer, campaign)

    def _solicit(self, peer: str, campaign: RaftCampaign) -> None:
        last, generation = self.log.last, self.log.last_generation
        if campaign.pre_vote:
            self._out.append(Send(peer, PreVote(self.generation + 1, last, generation)))
        else:
            vote = Vote(self.generation, last, generation, campaign.transfer)
            self._out.append(Send(peer, vote, campaign.token))

    def _count(self, voter: str) -> None:
        """Process a vote for this server, which campaigns."""
        campaign = self._campaign
        assert campaign is not None
        campaign.votes.add(voter)
        if self._elected(campaign.votes):
            if campaign.pre_vote:
                self._become_candidate(transfer=False)
            else:
                self._lead()

    def _elected(self, votes: set[str]) -> bool:
        """Whether these votes are a majority."""
        return sum(voter in votes for voter in self.membership.voters) >= self.membership.majority

    # Answering requests for votes.

    def _campaigns(self, *, pre_vote: bool) -> bool:
        return self._campaign is not None and self._campaign.pre_vote is pre_vote

    def _hears_leader(self) -> bool:
        """Whether this server hears a leader, so that no other is needed."""
        return self.role is LEADING or (
            self.leader is not None and self._now - self._heard < self.settings.election_timeout_s
        )

    def _up_to_date(self, candidate: PreVote | Vote) -> bool:
        log = self.log
        return (candidate.last_generation, candidate.last_index) >= (log.last_generation, log.last)

    def _free_for(self, peer: str) -> bool:
        """Whether the peer can have this server's vote of this generation."""
        return self.vote == peer or (self.vote is None and self.leader is None)

    def _pre_vote(self, peer: str, message: PreVote) -> None:
        future = message.generation > self.generation
        if future and self._hears_leader():
            return
        # A request of an earlier generation is answered too: its sender has to learn that it is
        # behind.
        granted = (
            message.generation >= self.generation
            and (future or self._free_for(peer))
            and self._up_to_date(message)
        )
        campaign = self._campaign
        if granted and campaign is not None and self._goes_first(peer, message, campaign):
            self._solicit(peer, campaign)
            return
        generation = message.generation if granted else self.generation
        self._out.append(Send(peer, PreVoteReply(generation, granted)))

    def _goes_first(self, peer: str, message: PreVote, campaign: RaftCampaign) -> bool:
        """Two servers with equal logs that run a pre-vote at once would campaign at once and split
        the votes. The one whose name comes first asks again, if the other, which is now known to
        want a leader, is all that it lacks."""
        return (
            campaign.pre_vote
            and self.id < peer
            and message.generation == self.generation + 1
            and message.last_index == self.log.last
            and message.last_generation == self.log.last_generation
            and self._elected(campaign.votes | {peer})
        )

    def _vote_asked(self, peer: str, message: Vote) -> None:
        if message.generation > self.generation:
            if self._hears_leader() and not message.transfer:
                return
            self._adopt(message.generation, peer if self._up_to_date(message) else None)
        if (
            message.generation == self.generation
            and self._free_for(peer)
            and self._up_to_date(message)
        ):
            self._grant(peer)
        else:
            self._out.append(Send(peer, VoteReply(self.generation, False)))

    def _grant(self, peer: str) -> None:
        if self.vote is None:
            self.vote = peer
            self._save()
        self._haste = 0.0
        self._wait()
        self._out.append(Send(peer, VoteReply(self.generation, True), self._token))

    def _pre_vote_reply(self, peer: str, message: PreVoteReply) -> None:
        if not message.granted:
            if message.generation > self.generation:
                self._adopt(message.generation)
        elif self._campaigns(pre_vote=True) and message.generation == self.generation + 1:
            self._count(peer)

    def _vote_reply(self, peer: str, message: VoteReply) -> None:
        if message.generation > self.generation:
            self._adopt(message.generation)
        elif (
            message.granted
            and message.generation == self.generation
            and self._campaigns(pre_vote=False)
        ):
            mark = self.witnessed.get(peer, Position())
            last = mark.last_generation, mark.last_index
            self.witnessed[peer] = Position(message.generation, *last)
            self._count(peer)

    def _timeout_now(self, peer: str, message: TimeoutNow) -> None:
        if message.generation > self.generation:
            self._adopt(message.generation)
        if (
            message.generation == self.generation
            and self.role is not LEADING
            and self._may_campaign()
        ):
            self._become_candidate(transfer=True)


def _settings(settings: ProtocolSettings) -> RaftSettings:
    if isinstance(settings, RaftSettings):
        return settings
    haste_s = min(HASTE_S, settings.election_timeout_s)
    return RaftSettings(**msgspec.structs.asdict(settings), haste_s=haste_s)
