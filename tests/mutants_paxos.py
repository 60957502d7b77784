"""Multi-Paxos with one rule left out at a time: mutants that the tests must detect.

The numbers are those of the project's list of mutants, of which these are Paxos's forms.
"""

from __future__ import annotations

from doyen.quorum.consensus.common import Peer
from doyen.quorum.consensus.core import LogEntry, Message
from doyen.quorum.consensus.paxos import AcceptOk, AcceptorState, Paxos, Promise


class ForgetsPromise(Paxos):
    """1 and 3: the promise is not on disk."""

    def _state(self) -> AcceptorState:
        return AcceptorState(max((ballot for _, ballot in self._runs), default=0), self._runs)


class PromisesBeforeWriting(Paxos):
    """2: a promise is sent before it is on disk."""

    def _send(self, peer: Peer, message: Message, after: int = 0) -> None:
        super()._send(peer, message, 0 if isinstance(message, Promise) else after)


class AcceptsBeforeWriting(Paxos):
    """An acceptance is sent before it is on disk."""

    def _send(self, peer: Peer, message: Message, after: int = 0) -> None:
        super()._send(peer, message, 0 if isinstance(message, AcceptOk) else after)


class FirstReportWins(Paxos):
    """6: of several values reported in a slot, any one is proposed again."""

    def _find(self, slot: int, ballot: int, entry: LogEntry) -> None:
        super()._find(slot, 0, entry)


class HearsNoReports(Paxos):
    """7: a new leader proposes what it has itself, and nothing in the other slots."""

    def _hear_promise(self, peer: Peer, message: Promise) -> None:
        own = Promise(message.generation, message.first, (), (), message.first - 1)
        super()._hear_promise(peer, own)


class ForgetsBallots(Paxos):
    """The ballots in which values were accepted are not on disk."""

    def _state(self) -> AcceptorState:
        return AcceptorState(self.generation, ((1, 1),))
