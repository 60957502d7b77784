"""Broken Rafts for real processes: what test_quorum_history must be able to catch.

Named as a protocol is, with its messages beside it.
"""

from __future__ import annotations

from doyen.consensus.raft import MESSAGES, STATE
from mutants_raft import AcksBeforeWriting, LeaderCountsItselfAtOnce, ReadsWithoutRounds

__all__ = ["MESSAGES", "STATE", "AcknowledgesFromMemory", "AnswersFromMemory"]


class AnswersFromMemory(ReadsWithoutRounds):
    """Reads are answered by a leader that may be one no longer, and never finds out."""

    def _hears_majority(self) -> bool:
        return True


class AcknowledgesFromMemory(AcksBeforeWriting, LeaderCountsItselfAtOnce):
    """What is on no disk is acknowledged."""
