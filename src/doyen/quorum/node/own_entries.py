"""Log entries that this node has appended as leader, until they are applied.

When an entry is applied, its proposers receive the results. When it turns out not to be committed,
or a snapshot has replaced it, its proposals are proposed again under the same request ids.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from doyen.quorum.consensus.core import Accepted, CoreEvent
from doyen.quorum.node.leader_calls import DONE, UNKNOWN
from doyen.quorum.node.proposals import Batch, Proposals, encode_results
from doyen.quorum.node.pump import Pump
from doyen.quorum.node.validation import raises_version

__all__ = ["OwnEntries"]


class OwnEntries:
    """The entries that this node has appended as leader and not yet applied."""

    def __init__(self, pump: Pump, proposals: Proposals) -> None:
        self.waiting: dict[int, Batch] = {}
        """By index."""
        self._pump = pump
        self._proposals = proposals
        self._appending: Batch | None = None
        self._refusal = ""
        pump.carry_out[Accepted] = self._accepted

    def append(self, event: CoreEvent, batch: Batch) -> str | None:
        """Have the core append an entry. Returns why it refused, or None; then `batch` is settled
        when the entry is applied."""
        self._appending, self._refusal = batch, ""
        self._pump.step(event)
        if self._appending is None:
            return None
        self._appending = None
        return self._refusal or f"node {self._pump.id} is not leading"

    def _accepted(self, effect: Accepted) -> None:
        batch = self._appending
        if batch is not None:
            batch.generation = effect.generation
            before, self.waiting[effect.index] = self.waiting.get(effect.index), batch
            self._appending = None
            if before is not None:  # of an earlier leadership: another leader has removed it
                self._retry(before)

    def raises_version(self) -> bool:
        """Whether a command that raises the cluster's version waits to be appended or applied."""
        proposals = self._proposals
        waiting = (command for batch in self.waiting.values() for command in batch.commands)
        return any(raises_version(each.target, each.body) for each in proposals.internal) or any(
            raises_version(each.target, each.body) for each in waiting
        )

    def refused(self, reason: str) -> bool:
        """The core refused something. False if that was not an entry."""
        self._refusal = reason
        return self._appending is not None

    def take(self, index: int, generation: int) -> Batch | None:
        """The batch of the entry that is applied at `index`, if this node appended it."""
        batch = self.waiting.pop(index, None)
        if batch is not None and batch.generation != generation:
            self._retry(batch)
            return None
        return batch

    def settle(self, batch: Batch, results: list[Any]) -> None:
        """An entry has been applied with these results."""
        if batch.responses:
            start = 0
            for respond, count in batch.responses:
                respond(DONE, encode_results(results[start : start + count]))
                start += count
            results = results[start:]
        if batch.proposals:
            self._proposals.settle(batch, results)

    def entered(self, generation: int, index: int) -> None:
        """An entry of this later generation is applied at `index`: entries of earlier generations
        do not follow."""
        self._retry_if(lambda at, batch: at >= index and batch.generation < generation)

    def replaced(self, index: int) -> None:
        """A snapshot has replaced everything up to `index`: the results there are not known."""
        self._retry_if(lambda at, _: at <= index)

    def _retry_if(self, lost: Callable[[int, Batch], bool]) -> None:
        for at in [at for at, batch in self.waiting.items() if lost(at, batch)]:
            self._retry(self.waiting.pop(at))

    def _retry(self, batch: Batch) -> None:
        batch.respond(UNKNOWN)
        self._proposals.retry(batch)
        self._pump.flush_soon()
