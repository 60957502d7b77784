"""What a driver needs of its node: a journal and a transport; and the status that it reports.

A real node uses files and sockets; the lab has implementations with faults. Everything lives on one
event loop and is called only from there.
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
    """The log and the snapshots on a node's disk. What was reported as persisted survives a crash
    at any instant."""

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
        """Begin. `persisted(token)` is called on the loop when everything up to the token is on
        disk; tokens may be skipped and are never reordered. `failed` means that the state of the
        disk is unknown, so the process must end."""

    def persist(self, effect: Persist) -> None:
        """Queue a write. Everything that is queued while the disk is busy is written together."""

    async def take_snapshot(self, snapshot: Snapshot, pieces: Iterator[bytes]) -> None:
        """Write a snapshot of this node durably, in small steps; then drop the log entries that it
        replaces, except for a tail that serves followers which are a little behind."""

    async def read_snapshot(self) -> tuple[Snapshot, AsyncIterator[bytes]]:
        """The latest snapshot and its pieces, to send or to restore. It stays readable until the
        iterator is closed, even if another snapshot is taken meanwhile."""

    async def receive_snapshot(self, snapshot: Snapshot, pieces: AsyncIterator[bytes]) -> None:
        """Store a snapshot of the leader durably, without using it. `install` puts it in force."""

    def install(self, effect: Install) -> None:
        """Queue a write: the received snapshot is in force, and the log after it is empty."""

    async def close(self) -> None:
        """Write what is queued, and release the data directory."""


class Transport(Protocol):
    """The connections to the other nodes. Messages arrive in order or not at all. Sending never
    waits: a message that does not fit into a connection's queue is dropped."""

    def start(
        self,
        received: Callable[[str, Message], None],
        connected: Callable[[str], None],
        disconnected: Callable[[str], None],
        asked: Callable[[str, bytes, Callable[[bytes], None]], None],
        streamed: Callable[[str, int, Snapshot, AsyncIterator[bytes]], Awaitable[None]],
    ) -> None:
        """Begin. `disconnected` is called when a connection was closed or reset, never for silence.
        `asked` is called with a peer's question and a function that answers it. `streamed` runs
        for a snapshot that a peer sends, with the generation and the pieces as they arrive. When it
        returns, the peer learns that all of it is on disk; when it raises (as the pieces do if the
        connection ends), that it is not."""

    def reach(self, addresses: dict[str, str]) -> None:
        """Connect to these peers, at these addresses, and close the connections to others."""

    def supports(self, peer: str) -> int:
        """The newest version of the replicated state that a connected peer supports (see
        `keyspace.versions`); 0 if it is not connected."""
        ...

    def require(self, version: int) -> None:
        """Refuse peers that do not support this version from now on, and close the connections to
        such peers."""

    def send(self, peer: str, message: Message) -> None:
        """Queue a message. Everything that is queued in one turn of the loop is one write."""

    async def ask(self, peer: str, question: bytes) -> bytes:
        """Send a question and wait for the answer. Raises `StoreUnavailable` if it has certainly
        not arrived, `OutcomeUnknown` if the connection ended before the answer came."""
        ...

    def send_snapshot(
        self,
        peer: str,
        generation: int,
        snapshot: Snapshot,
        pieces: AsyncIterator[bytes],
        done: Callable[[bool], None],
    ) -> None:
        """Send a snapshot, slowly enough not to delay other messages. `done` is called on the loop,
        exactly once: with True only if the peer has confirmed that all of it is on disk."""

    async def close(self) -> None:
        """Close all connections."""


class Status(NamedTuple):
    """The state of a node."""

    id: str
    role: Role
    generation: int
    leader: str | None
    commit: int
    applied: int
    snapshot: int
    """The index up to which a snapshot replaces the log."""
    pending: int
    """Proposals whose outcome is not known yet."""
    full: bool
    """The disk has no room for more proposals."""
    membership: Membership
