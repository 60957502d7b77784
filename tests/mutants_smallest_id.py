"""The smallest-id vote with one rule left out at a time: mutants that the tests must detect.

The numbers are those of the project's list of mutants.
"""

from __future__ import annotations

from typing import Any

from doyen.quorum.consensus.common import Peer, ReplicatedLog
from doyen.quorum.consensus.core import Message, Recovered
from doyen.quorum.consensus.smallest_id import SmallestId, Stand, Vote, VoterState


class VotesTwice(SmallestId):
    """1: a restart forgets the vote."""

    def __init__(self, id: str, membership: Any, recovered: Recovered, **others: Any) -> None:  # noqa: A002
        super().__init__(id, membership, recovered, **others)
        self.vote = None


class VotesBeforeWriting(SmallestId):
    """2: a vote is sent before it is on disk."""

    def _send(self, peer: Peer, message: Message, after: int = 0) -> None:
        super()._send(peer, message, 0 if isinstance(message, Vote | Stand) else after)


class ForgetsGeneration(SmallestId):
    """3: the generation is not on disk, except for what the log shows of it."""

    def _state(self) -> VoterState:
        return VoterState(self.log[-1].generation if self.log else 0, None)


class CountsRepliesNotVoters(SmallestId):
    """4: a vote that arrives twice counts twice."""

    def _count(self, voter: str) -> None:
        super()._count(f"{voter} {len(self._votes)}")


class _LongLog(ReplicatedLog):
    __slots__ = ()

    def position(self) -> tuple[int, int]:
        return (0, len(self))


class LooksAtIndexOnly(SmallestId):
    """6: the longer log wins, whatever is in it."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.log.__class__ = _LongLog


class LooksAtNoLog(SmallestId):
    """7: a later generation is granted a vote regardless of the log, as in the document's Java
    code."""

    def _far_enough(self, candidate: Stand) -> bool:
        return True


class IdAloneDecides(SmallestId):
    """The textbook's rule: of the servers that are up, the one with the smallest id campaigns,
    however short its log, and all vote for it."""

    def _first_to_stand(self) -> str:
        return min(self._present, key=self._rank.__getitem__)

    def _far_enough(self, candidate: Stand) -> bool:
        return True
