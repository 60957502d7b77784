"""`StateMachine`, which users of an embedded quorum implement. Imports nothing, so that it is
available without the quorum's extra.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any


class StateMachine(ABC):
    """Carries out the same commands, in the same order, on every node of a quorum.

    `apply` must depend only on the machine's state and the command: not on a clock, on random
    numbers or on anything else of this process. Its result must be a value that msgpack can
    encode.
    """

    @abstractmethod
    def apply(self, command: bytes) -> Any:
        """Carry out one committed command."""

    @abstractmethod
    def snapshot(self) -> Iterator[bytes]:
        """The whole state as of now, in pieces of moderate size.

        Called between two commands; must return at once. The pieces are taken one by one while
        further commands are applied, perhaps on another thread, and must not show those.
        """

    @abstractmethod
    def restore(self, pieces: Iterable[bytes]) -> None:
        """Replace the state by that of a snapshot."""
