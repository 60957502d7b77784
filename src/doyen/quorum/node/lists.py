"""Clients' reads of the keyspace: single entries, lists, and whole copies for backups.

A read waits until this node is current (`LinearizableReads`). Answers are sent no faster than the
client takes them: while its connection is congested, the requests wait, and each value is read
when it can be sent. This includes the entry because of which a create was refused. Long lists and
copies are sent in pieces of one consistent state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any, Final

from doyen.errors import DoyenError
from doyen.quorum.keyspace.commands import EntryExists, StoredEntry, encode
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.node.clients import PIECE, RefusedCreate, ServedClient
from doyen.quorum.node.driver import Driver
from doyen.quorum.protocol import requests
from doyen.quorum.protocol.connection import FrameConnection
from doyen.quorum.protocol.requests import (
    BackupChunk,
    BackupOrigin,
    ErrorCode,
    FoundEntry,
    ListChunk,
    WriteResults,
)

LISTS: Final = 8
"""How many long lists may be under way to one client."""


class Lists:
    """The reads of all clients of a node."""

    def __init__(
        self,
        driver: Driver,
        keyspace: Keyspace,
        start: Callable[[Coroutine[Any, Any, None]], None],
        resume: Callable[[FrameConnection], None],
    ) -> None:
        """`start` runs a task; `resume` goes on serving a client that was congested."""
        self._driver = driver
        self._keyspace = keyspace
        self._start = start
        self._resume = resume
        self._answers: dict[type, Callable[[ServedClient, Any], None]] = {
            requests.Get: self._get,
            requests.Head: self._head,
            requests.Ahead: self._ahead,
            requests.Scan: self._scan,
            RefusedCreate: self._refused_create,
        }

    def read(self, client: ServedClient, reads: list[Any]) -> None:
        """Answer these as soon as this node is current. They share one round of the quorum, which
        begins after the last of them has arrived."""
        try:
            self._driver.when_current(partial(self._current, client, reads))
        except DoyenError as error:
            for request in reads:
                client.fail(request.id, ErrorCode.UNAVAILABLE, str(error))

    def _current(self, client: ServedClient, reads: list[Any]) -> None:
        client.reads.extend(reads)
        if not client.draining:
            self._answer(client)

    def _answer(self, client: ServedClient) -> None:
        connection, held, reads = client.connection, client.held, client.reads
        while (held or reads) and not connection.ending:
            if connection.congested:
                self.drain(client)
                return
            if held:
                client.send_held()
                continue
            request = reads.popleft()
            self._answers[type(request)](client, request)

    def drain(self, client: ServedClient) -> None:
        """Go on with this client when it has taken earlier answers."""
        if not client.draining:
            client.draining = True
            self._start(self._answer_later(client))

    async def _answer_later(self, client: ServedClient) -> None:
        await client.connection.drain()
        client.draining = False
        self._answer(client)
        self._resume(client.connection)

    def _get(self, client: ServedClient, request: requests.Get) -> None:
        client.send(FoundEntry(request.id, self._keyspace.get(request.key)))

    def _head(self, client: ServedClient, request: requests.Head) -> None:
        client.send(FoundEntry(request.id, self._keyspace.head(request.line)))

    def _ahead(self, client: ServedClient, request: requests.Ahead) -> None:
        ticket = self._keyspace.get(request.ticket)
        if ticket is None:
            text = f"{request.ticket} is no longer in the line"
            client.fail(request.id, ErrorCode.TICKET_GONE, text)
        else:
            client.send(FoundEntry(request.id, self._keyspace.ahead(ticket)))

    def _refused_create(self, client: ServedClient, request: RefusedCreate) -> None:
        """The entry may have changed since. If it is there, the create would be refused now too."""
        entry = self._keyspace.get(request.key)
        if entry is None:
            text = f"not carried out: the key {request.key} was taken, and has been freed since"
            client.fail(request.id, ErrorCode.UNAVAILABLE, text)
        else:
            client.send(WriteResults([request.id], [encode(EntryExists(entry))]))

    def _scan(self, client: ServedClient, request: requests.Scan) -> None:
        pieces = _pieces(self._keyspace.list(request.prefix))
        first, second = next(pieces), next(pieces, None)
        if second is None:
            client.send(ListChunk(request.id, first, False))
        elif client.lists >= LISTS:
            text = f"{LISTS} long lists are under way to this client"
            client.fail(request.id, ErrorCode.UNAVAILABLE, text)
        else:
            client.lists += 1
            client.send(ListChunk(request.id, first, True))
            self._start(self._send_list(client, request.id, second, pieces))

    async def _send_list(
        self,
        client: ServedClient,
        request: int,
        piece: list[StoredEntry] | None,
        pieces: Iterator[list[StoredEntry]],
    ) -> None:
        try:
            while piece is not None:
                await client.connection.drain()
                if client.connection.ending:
                    return
                following = next(pieces, None)
                client.send(ListChunk(request, piece, following is not None))
                piece = following
                await asyncio.sleep(0)
        finally:
            client.lists -= 1

    def copy(
        self, client: ServedClient, request: requests.BackupRequest, cluster: str, protocol: str
    ) -> None:
        """Send a copy of the whole state."""
        send = partial(self._send_copy, client, request.id, cluster, protocol)
        try:
            self._driver.when_current(lambda: self._start(send()))
        except DoyenError as error:
            client.fail(request.id, ErrorCode.UNAVAILABLE, str(error))

    async def _send_copy(
        self, client: ServedClient, request: int, cluster: str, protocol: str
    ) -> None:
        """Commands go on being applied meanwhile; the copy does not show them."""
        snapshot, pieces = self._driver.applier.copy()
        origin = BackupOrigin(cluster, self._driver.id, protocol, snapshot)
        client.send(BackupChunk(request, origin, b"", True))
        for piece in pieces:
            await client.connection.drain()
            if client.connection.ending:
                return
            client.send(BackupChunk(request, None, piece, True))
            await asyncio.sleep(0)
        client.send(BackupChunk(request, None, b"", False))


def _pieces(records: Iterable[StoredEntry]) -> Iterator[list[StoredEntry]]:
    """A list, cut where a frame would become large; one piece at least."""
    piece: list[StoredEntry] = []
    size = 0
    for record in records:
        if size > PIECE:
            yield piece
            piece, size = [], 0
        piece.append(record)
        size += len(record.key) + len(record.value) + 32
    yield piece
