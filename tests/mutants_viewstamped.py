"""Viewstamped replication with one rule left out at a time: mutants that the tests must detect.

The numbers are those of the project's list of mutants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doyen.quorum.consensus.common import Peer, ReplicatedLog
from doyen.quorum.consensus.core import LogEntry, Message, Recovered
from doyen.quorum.consensus.viewstamped import DoViewChange, PrepareOk, Viewstamped, ViewState


class LongestLogWins(Viewstamped):
    """23: the log is chosen by its op number alone."""

    def _best(self) -> str:
        return max(self._reports, key=lambda name: (self._reports[name][1], name == self.id))


class ForgetsView(Viewstamped):
    """3: the view entered is not on disk, except for the last one that was normal."""

    def _state(self) -> ViewState:
        return ViewState(self.normal, self.normal)


class ReportsBeforeWriting(Viewstamped):
    """2: a server reports its log to a view's primary before it has entered the view on disk."""

    def _send(self, peer: Peer, message: Message, after: int = 0) -> None:
        super()._send(peer, message, 0 if isinstance(message, DoViewChange) else after)


class AcknowledgesBeforeWriting(Viewstamped):
    """An operation is acknowledged before it is on disk."""

    def _send(self, peer: Peer, message: Message, after: int = 0) -> None:
        super()._send(peer, message, 0 if isinstance(message, PrepareOk) else after)


class LeadsOnAfterRestart(Viewstamped):
    """A primary that restarts leads its old view again, without what its disk lacks."""

    def __init__(self, id: str, membership: Any, recovered: Recovered, **others: Any) -> None:  # noqa: A002
        super().__init__(id, membership, recovered, **others)
        self._barred = 0

    def _due(self) -> None:
        begun = self.log.token or not self.generation
        if begun or self.normal < self.generation or self.leader_of(self.generation) != self.id:
            super()._due()
        else:
            self._lead()
            self._start_others()


class _KeptLog(ReplicatedLog):
    __slots__ = ()

    def shorten(self, length: int) -> None:
        pass

    def take(self, previous: int, generation: int, entries: Sequence[LogEntry]) -> int:
        rest = self[previous + len(entries) :]
        agreed = super().take(previous, generation, entries)
        if rest and len(self) == previous + len(entries):
            self.add(rest)
        return agreed


class KeepsTheRest(Viewstamped):
    """What a replica has beyond the view's log is not cut off."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self.log.__class__ = _KeptLog
