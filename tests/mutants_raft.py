"""Raft with one rule left out at a time: mutants that the tests and the lab must detect.

The numbers are those of the project's list of mutants. Each is a subclass that overrides the one
small method that implements the rule.
"""

from __future__ import annotations

from typing import Any, cast

import msgspec

from doyen.quorum.consensus.core import LogEntry, Membership, Recovered, Send, Snapshot
from doyen.quorum.consensus.raft import Raft
from doyen.quorum.consensus.raft.log import RaftLog
from doyen.quorum.consensus.raft.messages import PreVote, Vote


class VotesTwice(Raft):
    """1: a restart forgets the vote."""

    def __init__(self, id: str, membership: Any, recovered: Recovered, **others: Any) -> None:  # noqa: A002
        if recovered.state is not None:
            state = msgspec.structs.replace(recovered.state, vote=None)
            recovered = msgspec.structs.replace(recovered, state=state)
        super().__init__(id, membership, recovered, **others)


class VotesBeforeWriting(Raft):
    """2: a vote is sent before it is on disk."""

    def _grant(self, peer: str) -> None:
        super()._grant(peer)
        self._out[-1] = msgspec.structs.replace(cast(Send, self._out[-1]), after=0)


class CountsItselfBeforeWriting(Raft):
    """2, of a candidate's own vote."""

    def _become_candidate(self, *, transfer: bool) -> None:
        super()._become_candidate(transfer=transfer)
        assert self._campaign is not None
        self._campaign.token = 0
        self._out[:] = [
            msgspec.structs.replace(effect, after=0) if isinstance(effect, Send) else effect
            for effect in self._out
        ]


class ForgetsGeneration(Raft):
    """3: the generation is not on disk, except for what the log shows of it."""

    def __init__(self, id: str, membership: Any, recovered: Recovered, **others: Any) -> None:  # noqa: A002
        if recovered.state is not None:
            shown = max((entry.generation for entry in recovered.entries), default=0)
            state = msgspec.structs.replace(recovered.state, generation=shown, vote=None)
            recovered = msgspec.structs.replace(recovered, state=state)
        super().__init__(id, membership, recovered, **others)


class CountsRepliesNotVoters(Raft):
    """4: a vote that arrives twice counts twice."""

    _tally = 0

    def _look(self) -> None:
        super()._look()
        self._tally = 0

    def _count(self, voter: str) -> None:
        self._tally += 1
        super()._count(voter)

    def _elected(self, votes: set[str]) -> bool:
        assert self._campaign is not None
        return self._tally + len(votes - self._campaign.votes) >= self.membership.majority


class CommitsOldGenerations(Raft):
    """5: an entry of an earlier generation is committed by counting."""

    def _commit_point(self) -> int:
        marks = sorted(
            self.log.durable if voter == self.id else self._peers[voter].match
            for voter in self.membership.voters
        )
        return max(self.commit, marks[-self.membership.majority])


class ComparesIndexOnly(Raft):
    """6: the longer log wins, whatever is in it."""

    def _up_to_date(self, candidate: PreVote | Vote) -> bool:
        return candidate.last_index >= self.log.last


class ComparesNothing(Raft):
    """7: a higher generation is enough for a vote."""

    def _up_to_date(self, candidate: PreVote | Vote) -> bool:
        return True


class CutsOnStaleAppend(Raft):
    """8: everything that an append does not contain is cut off."""

    def _merge(self, previous: int, entries: tuple[LogEntry, ...]) -> int:
        matched = super()._merge(previous, entries)
        if entries and self.log.base < matched < self.log.last and matched >= self.commit:
            kept = self.log.entries[matched - self.log.base - 1]
            self.log.cut(matched - 1)
            self.membership = self.log.membership
            self._write((kept,))
        return matched


class CommitsBeyondMatch(Raft):
    """9: what the leader has committed counts as committed here, though this log may differ
    there."""

    def _learn_commit(self, commit: int, matched: int) -> None:
        super()._learn_commit(commit, self.log.last)


class ReadsBeforeCommitting(Raft):
    """10: reads are answered before an entry of this generation is committed."""

    def _lead(self) -> None:
        super()._lead()
        self._first_index = 0


class ReadsWithoutRounds(Raft):
    """10: reads are answered though another server may lead by now."""

    def _confirmed(self) -> int:
        return self._round


class ListensToEveryCampaign(Raft):
    """11: a server that hears a leader does not ignore a campaign."""

    def _hears_leader(self) -> bool:
        return False


class ChangesTooSoon(Raft):
    """12: the single-server membership bug: no entry of this generation need be committed."""

    def _may_change(self) -> bool:
        return self.log.membership_index <= self.commit

    def _stranded(self, wanted: Membership) -> str | None:
        return None  # a leader that has heard from the voters has committed an entry, too


class DropsStalePreVotes(Raft):
    """13: a server that is behind never learns of it."""

    def _pre_vote(self, peer: str, message: PreVote) -> None:
        if message.generation > self.generation:
            super()._pre_vote(peer, message)


class KeepsItsLeader(Raft):
    """14: a pre-candidate still holds on to the leader it wants to replace."""

    def _hears_leader(self) -> bool:
        return self._now - self._heard < self.settings.election_timeout_s or super()._hears_leader()


class _TrustingLog(RaftLog):
    __slots__ = ()

    def _disown(self, last: int) -> None:
        pass


class TrustsOldWrites(Raft):
    """15: a late confirmation of the disk counts for entries that have been replaced since."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.log.__class__ = _TrustingLog


class InstallsEverySnapshot(Raft):
    """19: a snapshot replaces a longer log."""

    def _wants(self, snapshot: Snapshot) -> bool:
        return True


class LeaderCountsItselfAtOnce(Raft):
    """A leader, and so a single voter, commits what its own disk does not have."""

    def _commit_point(self) -> int:
        self.log.durable = self.log.last
        return super()._commit_point()


class AcksBeforeWriting(Raft):
    """An append is acknowledged before it is on disk."""

    def _append(self, peer: str, message: Any) -> None:
        super()._append(peer, message)
        last = self._out[-1]
        if isinstance(last, Send):
            self._out[-1] = msgspec.structs.replace(last, after=0)


class GrantsInItsOwnGeneration(Raft):
    """A server that has voted votes again when another server asks."""

    def _free_for(self, peer: str) -> bool:
        return True

    def _grant(self, peer: str) -> None:
        self.vote = None
        super()._grant(peer)


UNSAFE: tuple[type[Raft], ...] = (
    VotesTwice,
    VotesBeforeWriting,
    CountsItselfBeforeWriting,
    ForgetsGeneration,
    CountsRepliesNotVoters,
    CommitsOldGenerations,
    ComparesIndexOnly,
    ComparesNothing,
    CutsOnStaleAppend,
    CommitsBeyondMatch,
    ReadsBeforeCommitting,
    ReadsWithoutRounds,
    ChangesTooSoon,
    TrustsOldWrites,
    InstallsEverySnapshot,
    LeaderCountsItselfAtOnce,
    AcksBeforeWriting,
    GrantsInItsOwnGeneration,
)
"""Mutants that break safety."""

STUCK: tuple[type[Raft], ...] = (ListensToEveryCampaign, DropsStalePreVotes, KeepsItsLeader)
"""Mutants under which the cluster makes no progress, or is disturbed."""
