"""Broken nodes for real processes: what the judge of a quorum's history must be able to catch.

`install` puts one in the place of what it breaks, in this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from doyen.quorum.consensus.raft import MESSAGES, STATE
from doyen.quorum.node import server
from doyen.quorum.node.replicated import Command, ReplicatedMachines
from mutants_raft import AcksBeforeWriting, LeaderCountsItselfAtOnce, ReadsWithoutRounds

__all__ = ["MESSAGES", "STATE", "AcknowledgesFromMemory", "AnswersFromMemory", "DoesItAgain"]


class AnswersFromMemory(ReadsWithoutRounds):
    """Reads are answered by a leader that may be one no longer, and never finds out."""

    def _hears_majority(self) -> bool:
        return True


class AcknowledgesFromMemory(AcksBeforeWriting, LeaderCountsItselfAtOnce):
    """What is on no disk is acknowledged."""


class DoesItAgain(ReplicatedMachines):
    """What is asked again, because no answer came, is done again."""

    def apply(self, index: int, commands: Sequence[Command]) -> list[Any]:
        return [self._applies[command.target](command.body) for command in commands]


def install(mutant: str) -> None:
    if issubclass(globals()[mutant], ReplicatedMachines):
        vars(server)["ReplicatedMachines"] = globals()[mutant]
    else:
        server.PROTOCOLS["raft"] = (__name__, mutant)
