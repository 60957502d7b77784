"""`StateMachine`: what users of an embedded quorum write. Imports nothing, so that it can be had
without the quorum's extra."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["StateMachine"]


class StateMachine(ABC):
    """What a quorum replicates: the same commands, in the same order, on every node.

    `apply` must be a function of the machine's state and the command alone: no clock, no chance,
    nothing of this process. Its result must be something msgpack can carry.
    """

    @abstractmethod
    def apply(self, command: bytes) -> Any:
        """Carry out one command that has been agreed on."""

    @abstractmethod
    def snapshot(self) -> Iterator[bytes]:
        """The whole state as it is now, in pieces of moderate size.

        Called between two commands and must return at once; the pieces are taken one by one
        while further commands are applied, perhaps on another thread, and must not show those.
        """

    @abstractmethod
    def restore(self, pieces: Iterable[bytes]) -> None:
        """Put the state of a snapshot in the place of this one."""
