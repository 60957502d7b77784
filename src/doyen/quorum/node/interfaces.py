"""What a node stands on: a journal, a transport, a state machine; and how it is doing.

A `Driver` (see `driver`) carries out what a consensus core says, over these three. A real node has
files and sockets; the lab has its own, with faults. All of it lives on one event loop and is called
from there only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import NamedTuple, Protocol

from doyen.quorum.consensus.core import (
    Install,
    Membership,
    Message,
    Persist,
    Recovered,
    Role,
    Snapshot,
)
from doyen.quorum.node.state_machine import StateMachine

__all__ = ["Journal", "StateMachine", "Status", "Transport"]


class Journal(Protocol):
    """A node's memory: what was persisted is there again after a crash at any instant."""

    recovered: Recovered
    """What was found at opening; `start` may drop its entries."""

    @property
    def full(self) -> bool:
        """Whether the disk has no room for more proposals. What is on it stays."""
        ...

    @property
    def queued(self) -> int:
        """About how many bytes wait to be on disk."""
        ...

    def start(
        self, persisted: Callable[[int], None], failed: Callable[[BaseException], None]
    ) -> None:
        """Have `persisted(token)` called, on the loop, when everything up to it is on disk; tokens
        may be skipped, never reordered. `failed` means that nothing is certain any more: the
        process must end."""

    def persist(self, effect: Persist) -> None:
        """Queue a write. All that is queued while the disk is busy goes down in one piece."""

    async def take_snapshot(self, snapshot: Snapshot, pieces: Iterator[bytes]) -> None:
        """Write a snapshot of our own, durably, in small steps; then forget what it stands for in
        the log, but for a tail that helps those who are a little behind."""

    async def read_snapshot(self) -> tuple[Snapshot, AsyncIterator[bytes]]:
        """The latest snapshot and its pieces, for a peer or for restoring from. It stays readable
        until the iterator is closed, whatever is taken meanwhile."""

    async def receive_snapshot(self, snapshot: Snapshot, pieces: AsyncIterator[bytes]) -> None:
        """Store a snapshot that a leader streams, durably and beside what is in force. Only
        `install` puts it in force."""

    def install(self, effect: Install) -> None:
        """Queue: the received snapshot is in force and the log is empty behind it."""

    async def close(self) -> None:
        """Write what is queued, and let go of the folder."""


class Transport(Protocol):
    """The links to the other nodes. Each is connected or not; messages go in order or not at all,
    and whoever sends is never held up: what does not fit into a link's bounds is dropped."""

    def start(
        self,
        received: Callable[[str, Message], None],
        connected: Callable[[str], None],
        disconnected: Callable[[str], None],
        asked: Callable[[str, bytes, Callable[[bytes], None]], None],
        streamed: Callable[[str, int, Snapshot, AsyncIterator[bytes]], Awaitable[None]],
    ) -> None:
        """Begin. `disconnected` is told for an end or a reset only, never for silence. `asked`
        is called with a peer's question and with how to answer it. `streamed` is run for a
        snapshot that a peer sends, with the generation and the pieces as they come: when it
        returns, the peer is told that all of it is on disk; when it raises (as the pieces do if
        the link ends), that it is not."""

    def reach(self, addresses: dict[str, str]) -> None:
        """These are the peers now, and where they are; links to others are let go."""

    def supports(self, peer: str) -> int:
        """The newest version of the replicated state that a connected peer supports (see
        `quorum.versions`); 0 if it is not connected."""
        ...

    def require(self, version: int) -> None:
        """Refuse peers that do not support this version from now on, and let go of those that are
        connected."""

    def send(self, peer: str, message: Message) -> None:
        """Queue a message. Everything queued in one turn of the loop goes out as one write."""

    async def ask(self, peer: str, question: bytes) -> bytes:
        """Put a question and wait for the answer. Raises `StoreUnavailable` if it has certainly
        not been heard, `OutcomeUnknown` if the link ended before the answer came."""
        ...

    def send_snapshot(
        self,
        peer: str,
        generation: int,
        snapshot: Snapshot,
        pieces: AsyncIterator[bytes],
        done: Callable[[bool], None],
    ) -> None:
        """Stream a snapshot, slowly enough to leave room for everything else. `done` is called
        on the loop, exactly once: with True only if the peer has said that all of it is on disk."""

    async def close(self) -> None:
        """Take leave of everybody."""


class Status(NamedTuple):
    """How a node is doing."""

    id: str
    role: Role
    generation: int
    leader: str | None
    commit: int
    applied: int
    snapshot: int
    """The index up to which a snapshot stands for the log."""
    pending: int
    """Proposals whose outcome is not known yet."""
    full: bool
    """The disk has no room for more; nothing is accepted."""
    membership: Membership
