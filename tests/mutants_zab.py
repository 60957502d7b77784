"""Zab with one rule left out at a time: mutants that the tests must detect.

The numbers are those of the project's list of mutants.
"""

from __future__ import annotations

from typing import Any

from doyen.quorum.consensus.common import Peer
from doyen.quorum.consensus.core import Message, Recovered
from doyen.quorum.consensus.zab import Phase, Zab
from doyen.quorum.consensus.zab.messages import Ack, AckEpoch, AckLeader, Sync, ZabState


class EpochBeforeLog(Zab):
    """20: the current epoch is written before the transactions that make it true."""

    def _hear_sync(self, peer: Peer, message: Sync) -> None:
        if self._from_leader(peer, message) and self.phase is not Phase.BROADCAST:
            self.log.write(ZabState(self.generation, self.generation))
        super()._hear_sync(peer, message)


class AcknowledgesBeforeWriting(Zab):
    """20, of the acknowledgement: it is sent before the transactions and the epoch are on disk."""

    def _send(self, peer: Peer, message: Message, after: int = 0) -> None:
        super()._send(peer, message, 0 if isinstance(message, AckLeader | Ack) else after)


class FollowsOnHearsay(Zab):
    """21: a majority's statement that a server leads is taken for the server's own."""

    def _says_it_leads(self, leader: str) -> bool:
        return True


class ForgetsEpoch(Zab):
    """3: the accepted epoch is not on disk, except for what the current one shows of it."""

    def _state(self) -> ZabState:
        return ZabState(self.current_epoch, self.current_epoch)


class PromisesBeforeWriting(Zab):
    """2: an epoch is acknowledged before its acceptance is on disk."""

    def _send(self, peer: Peer, message: Message, after: int = 0) -> None:
        super()._send(peer, message, 0 if isinstance(message, AckEpoch) else after)


class ForgetsCurrentEpoch(Zab):
    """The history's epoch is not on disk: a server with an older history seems as good."""

    def __init__(self, id: str, membership: Any, recovered: Recovered, **others: Any) -> None:  # noqa: A002
        super().__init__(id, membership, recovered, **others)
        self.current_epoch = 0


class AcceptsAnyLeader(Zab):
    """6: the elected server leads even if a follower of its majority is ahead, and the election
    goes by id."""

    def _own_vote(self) -> Any:
        return super()._own_vote()._replace(epoch=0, zxid_epoch=0, zxid=0)

    def _ahead(self) -> bool:
        return False
