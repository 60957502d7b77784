"""Clients' reads of the keyspace: single entries, lists, and whole copies for backups.

A read waits until this node is current (`LinearizableReads`). Answers are sent no faster than the
client takes them: while its connection is congested, the requests wait, and each value is read
when it can be sent. This includes the entry because of which a create was refused. Long lists and
copies are sent in pieces of one consistent state.

Entries of ended leases that are not removed yet are passed over, and there may be many of them. All
reads together look at a bounded part of the keyspace in one turn of the event loop (`BLOCKS`). What
is left then waits for the next turn, in the order of arrival: clients with reads, searches for one
ticket, which go on in the state in which they began, and lists with their next piece.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from msgspec import Struct

from doyen.errors import DoyenError
from doyen.quorum.keyspace.commands import EntryExists, StoredEntry, encode
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.node.clients import PIECE, RefusedCreate, ServedClient
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.pump import call_safely
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

T = TypeVar("T")

LISTS: Final = 8
"""How many long lists may be under way to one client."""
BLOCKS: Final = 512
"""How much of the keyspace is looked at for all reads of one turn of the loop, in blocks of the
sorted map. A piece of a list ends there and may be empty: entries of an ended lease that are not
removed yet are not in the list."""


class _Search(Struct, eq=False):
    """A read of one ticket of a line that goes on."""

    ids: list[int]
    """Of the requests that it answers."""
    blocks: Iterator[Sequence[StoredEntry]]
    at: int
    """Which entry of the first block that is not empty is wanted."""
    line: str = ""
    """The line whose head is searched for, in the turn in which it begins."""


_LOOKING = frozenset({requests.Head, requests.Ahead, requests.Scan, _Search})
"""The reads that may look at much of the keyspace."""


class Lists:
    """The reads of all clients of a node."""

    def __init__(
        self,
        driver: Driver,
        keyspace: Keyspace,
        start: Callable[[Coroutine[Any, Any, None], ServedClient], None],
        resume: Callable[[FrameConnection], None],
    ) -> None:
        """`start` runs a task for a client; `resume` goes on serving one that was congested."""
        self._driver = driver
        self._keyspace = keyspace
        self._start = start
        self._resume = resume
        self._looked = 0
        """How many blocks were looked at, in this turn of the loop at least."""
        self._waiting: deque[tuple[ServedClient, Callable[[], None]]] = deque()
        """What goes on in the next turns, and for which client."""
        self._serving = False
        """Whether a task serves what waits."""
        self._answers: dict[type, Callable[[ServedClient, Any], None]] = {
            requests.Get: self._get,
            requests.Head: self._head,
            requests.Ahead: self._ahead,
            requests.Scan: self._scan,
            RefusedCreate: self._refused_create,
            _Search: self._search,
            FoundEntry: lambda client, answer: client.send(answer),
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
            if self._looked >= BLOCKS and type(reads[0]) in _LOOKING:
                client.draining = True
                self._wait(client, partial(self._go_on, client))
                return
            request = reads.popleft()
            self._answers[type(request)](client, request)

    def drain(self, client: ServedClient) -> None:
        """Go on with this client when it has taken earlier answers."""
        if not client.draining:
            client.draining = True
            self._start(self._answer_later(client), client)

    async def _answer_later(self, client: ServedClient) -> None:
        await client.connection.drain()
        self._go_on(client)

    def _wait(self, client: ServedClient, go_on: Callable[[], None]) -> None:
        """Have this called in another turn of the loop, after what waits already."""
        self._waiting.append((client, go_on))
        if not self._serving:
            self._serving = True
            self._start(self._serve(), client)

    async def _serve(self) -> None:
        """In each turn of the loop, go on with as much as `BLOCKS` allows. The connection of a
        client whose read fails ends, since the client would wait for an answer."""
        try:
            while self._waiting:
                await asyncio.sleep(0)
                self._looked = 0
                while self._waiting and self._looked < BLOCKS:
                    client, go_on = self._waiting.popleft()
                    if not call_safely(go_on):
                        client.connection.abort()
        finally:
            self._serving = False

    def _go_on(self, client: ServedClient) -> None:
        client.draining = False
        self._answer(client)
        self._resume(client.connection)

    def _counted(self, blocks: Iterable[Sequence[StoredEntry]]) -> Iterator[Sequence[StoredEntry]]:
        for block in blocks:
            self._looked += 1
            yield block

    def _get(self, client: ServedClient, request: requests.Get) -> None:
        client.send(FoundEntry(request.id, self._keyspace.get(request.key)))

    def _head(self, client: ServedClient, request: requests.Head) -> None:
        blocks = self._counted(self._keyspace.scan(request.line))
        self._search(client, _Search([request.id], blocks, 0, request.line))

    def _ahead(self, client: ServedClient, request: requests.Ahead) -> None:
        ticket = self._keyspace.get(request.ticket)
        if ticket is None:
            text = f"{request.ticket} is no longer in the line"
            client.fail(request.id, ErrorCode.TICKET_GONE, text)
        else:
            blocks = self._counted(self._keyspace.scan_back(ticket))
            self._search(client, _Search([request.id], blocks, -1))

    def _search(self, client: ServedClient, search: _Search) -> None:
        found: StoredEntry | None = None
        for block in search.blocks:
            if block:
                found = block[search.at]
                break
            if self._looked >= BLOCKS:
                self._join(client, search)
                client.reads.appendleft(search)
                return
        client.reads.extendleft(FoundEntry(each, found) for each in reversed(search.ids))

    def _join(self, client: ServedClient, search: _Search) -> None:
        """A search that has begun in this turn answers all reads of the same head that wait now."""
        if search.line:
            waiting = [*client.reads]
            client.reads.clear()
            for each in waiting:
                if type(each) is requests.Head and each.line == search.line:
                    search.ids.append(each.id)
                else:
                    client.reads.append(each)
            search.line = ""

    def _refused_create(self, client: ServedClient, request: RefusedCreate) -> None:
        """The entry may have changed since. If it is there, the create would be refused now too."""
        entry = self._keyspace.get(request.key)
        if entry is None:
            text = f"not carried out: the key {request.key} was taken, and has been freed since"
            client.fail(request.id, ErrorCode.UNAVAILABLE, text)
        else:
            client.send(WriteResults([request.id], [encode(EntryExists(entry))]))

    def _scan(self, client: ServedClient, request: requests.Scan) -> None:
        pieces = self._pieces(request.prefix)
        piece, more = next(pieces)
        if more and client.lists >= LISTS:
            text = f"{LISTS} long lists are under way to this client"
            client.fail(request.id, ErrorCode.UNAVAILABLE, text)
            return
        client.send(ListChunk(request.id, piece, more))
        if more:
            client.lists += 1
            self._start(self._send_list(client, request.id, pieces), client)

    async def _send_list(
        self, client: ServedClient, request: int, pieces: Iterator[tuple[list[StoredEntry], bool]]
    ) -> None:
        more = True
        try:
            while more:
                await client.connection.drain()
                waits = self._looked >= BLOCKS or self._waiting
                piece, more = await self._in_turn(client, pieces) if waits else next(pieces)
                if client.connection.ending:
                    return
                client.send(ListChunk(request, piece, more))
                await asyncio.sleep(0)
        finally:
            client.lists -= 1

    async def _in_turn(self, client: ServedClient, pieces: Iterator[T]) -> T:
        """The next piece, which is looked for after what waits already."""
        found: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def look() -> None:
            if found.done():  # the task of the list has been cancelled
                return
            try:
                found.set_result(next(pieces))
            except Exception as error:  # noqa: BLE001 - it ends the task of the list
                found.set_exception(error)

        self._wait(client, look)
        return await found

    def _pieces(self, prefix: str) -> Iterator[tuple[list[StoredEntry], bool]]:
        """A list, cut where a frame would become large or no more can be looked at in this turn;
        with each piece, whether another one follows."""
        piece: list[StoredEntry] = []
        size = 0
        for records in self._counted(self._keyspace.scan(prefix)):
            for record in records:
                if size > PIECE:
                    yield piece, True
                    piece, size = [], 0
                piece.append(record)
                size += len(record.key) + len(record.value) + 32
            if self._looked >= BLOCKS:
                yield piece, True
                piece, size = [], 0
        yield piece, False

    def copy(
        self, client: ServedClient, request: requests.BackupRequest, cluster: str, protocol: str
    ) -> None:
        """Send a copy of the whole state."""
        send = partial(self._send_copy, client, request.id, cluster, protocol)
        try:
            self._driver.when_current(lambda: self._start(send(), client))
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
