"""A client's connection to a quorum: one node at a time, and another as soon as that one fails.

A request is in flight until it is answered or its caller gives up. When a connection ends, the next
node is dialled at once and everything in flight is sent again: reads and renewals because they may
be repeated, writes under their id, which the quorum carries out once. A lost connection therefore
loses no response.

- If no node can be reached, requests that were never sent fail.
- A node that does not answer within `PATIENCE_S` is pinged, and left if it does not answer that
  either.

Watches outlive connections. Each is requested again on every connection, from its own position: the
revision up to which it has been notified of all changes. The node notifies it of what was missed,
then confirms it. A confirmed watch shares in the position that the node sends with every
notification.

Imports `dialling`, the stores' kit, the quorum's protocol and the error tree.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from typing import Any

from msgspec import MsgspecError, Struct

from doyen.errors import (
    LeaseGone,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    StoreUnusable,
    TicketGone,
)
from doyen.events.log_lines import log_line
from doyen.quorum.keyspace.commands import (
    KeyspaceCommand,
    StoredEntry,
    decode_result,
    encode,
)
from doyen.quorum.keyspace.versions import FIRST
from doyen.quorum.protocol.connection import End, FrameConnection
from doyen.quorum.protocol.frames import CloseReason
from doyen.quorum.protocol.requests import (
    ANSWER,
    MAX_WRITES,
    REQUEST,
    Administered,
    BackupChunk,
    CancelWatch,
    ErrorCode,
    Failed,
    FoundEntry,
    IdentifyClient,
    LeaseRenewed,
    ListChunk,
    NodeStatus,
    Request,
    StatusRequest,
    WatchConfirmed,
    WatchNotification,
    WatchRequest,
    Write,
    WriteResults,
    decode_answer,
)
from doyen.stores.kit.lifecycle import WatchHandle
from doyen.stores.quorum.dialling import Dialler

__all__ = ["QuorumConnection", "QuorumWatch"]

log = logging.getLogger("doyen")

PATIENCE_S = 0.3
"""How long a response may take before the node is pinged, and how long the answer to that may."""
REMEMBERED_S = 60.0
"""How long a quorum is certain to remember the writes of an idle client."""
WRITES_BYTES = 1 << 18
"""About how many bytes of writes go into one frame."""
PAUSES_S = (0.02, 0.5)
"""The pause after a round of dialling in which no node was reached: the first, and the longest."""

_ERRORS: dict[ErrorCode, type[StoreError]] = {
    ErrorCode.UNAVAILABLE: StoreUnavailable,
    ErrorCode.UNKNOWN: OutcomeUnknown,
    ErrorCode.FORGOTTEN: OutcomeUnknown,
    ErrorCode.LEASE_GONE: LeaseGone,
    ErrorCode.TICKET_GONE: TicketGone,
    ErrorCode.UNUSABLE: StoreUnusable,
}


class _Call(Struct, eq=False):
    """A request in flight."""

    number: int
    make: Callable[[int], Request] | None
    """Makes the request with its id; None for a write."""
    future: asyncio.Future[Any]
    begun_at: float
    take: Callable[[BackupChunk], None] | None = None
    body: bytes = b""
    sent: int = 0
    """How often it was sent."""
    name: str = ""
    """The name under which a write was sent."""
    here: bool = False
    """Whether it may be sent on the current connection only."""
    entries: list[StoredEntry] | None = None
    """The part of a list that has arrived."""


class _NodeLeft(Exception):
    """The connection ended before the response to a request that may be sent on it only."""


class _WriteIds:
    """The name and the numbers under which the quorum knows this client's writes."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.known = False
        """Whether the quorum has answered a write under this name."""
        self.last = 0
        self._floor = 1
        """No write in flight has a lower number."""

    def floor(self, in_flight: Container[int]) -> int:
        """The number below which this client has the results of all its writes, as far as the
        quorum may rely on it. At least one write must be in flight."""
        if not self.known:
            return 1
        while self._floor not in in_flight:
            self._floor += 1
        return self._floor

    def rename(self) -> None:
        """Go on under another name."""
        self.name = uuid.uuid4().hex
        self.known = False


class QuorumWatch(WatchHandle):
    """One watch of a scope."""

    def __init__(
        self,
        number: int,
        scope: str,
        notify: Callable[[], None],
        on_close: Callable[[QuorumWatch], None],
        *,
        entry: bool = False,
    ) -> None:
        """`entry`: the scope is a key, and its entry is wanted with each notification."""
        super().__init__(scope, notify, on_close)
        self.wants_entry = entry
        self.carried: StoredEntry | None = None
        """What the last notification carried."""
        self.revision = -1
        """That of the last notification."""
        self.id = number
        self.position = -1
        """It was notified of all changes up to this revision; negative before it is confirmed."""
        self.confirmed = False
        """Whether the current connection has confirmed it."""


class QuorumConnection:
    """One connection at a time, and everything in flight on it."""

    def __init__(self, dialler: Dialler) -> None:
        self._dialler = dialler
        self._loop = asyncio.get_running_loop()
        self._connection: FrameConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._sending_again: asyncio.Task[None] | None = None
        self._patience: asyncio.TimerHandle | None = None
        self._closed = False
        self._calls: dict[int, _Call] = {}
        self._requests = 0
        """The id of the last request that is not a write."""
        self._unsent: list[_Call] = []
        """Writes that go out together, at the end of this iteration of the loop."""
        self._write_ids = _WriteIds()
        self._status: NodeStatus | None = None
        """What the node of the current connection has told about itself."""
        self._watches: dict[int, QuorumWatch] = {}
        self._notified = 0
        """All watches that the current connection has confirmed were notified of all changes up to
        this revision."""
        self._handlers: dict[type, Callable[[Any], None]] = {
            WriteResults: self._write_results,
            WatchNotification: self._changed,
            WatchConfirmed: self._watch_confirmed,
            Failed: self._failed,
            ListChunk: self._list_chunk,
            BackupChunk: self._backup_chunk,
            NodeStatus: self._status_received,
        }

    @property
    def node(self) -> str | None:
        """The address of the connected node."""
        return self._connection.address if self._connection is not None else None

    # Requests.

    async def write(self, command: KeyspaceCommand) -> Any:
        """Have a command carried out once, and return its result."""
        call = self.begin_write(command)
        try:
            return await call.future
        finally:
            self.end(call)

    def begin_write(self, command: KeyspaceCommand) -> _Call:
        """Send a command. The caller awaits the future, and calls `end` afterwards."""
        # Numbered at the same time as it is registered: the floor skips unregistered numbers.
        self._write_ids.last = number = self._write_ids.last + 1
        loop = self._loop
        call = _Call(number, None, loop.create_future(), loop.time(), None, encode(command))
        self._calls[number] = call
        if self._connection is None:
            self._connect()
        else:
            if not self._unsent:
                loop.call_soon(self._send_writes)
            self._unsent.append(call)
        return call

    def end(self, call: _Call) -> None:
        """The caller no longer waits for this call."""
        del self._calls[call.number]
        if call.future.cancelled():
            self.probe()

    async def ask(
        self,
        make: Callable[[int], Request],
        take: Callable[[BackupChunk], None] | None = None,
        *,
        here: bool = False,
    ) -> Any:
        """Send a request that may be repeated. `make` makes it with its id; `take` receives the
        chunks of a backup. With `here`, it is not sent again on another connection."""
        self._requests = number = self._requests - 1
        loop = self._loop
        call = _Call(number, make, loop.create_future(), loop.time(), take, here=here)
        self._calls[number] = call
        if self._connection is not None:
            self._send(call)
        else:
            self._connect()
        try:
            return await call.future
        finally:
            self.end(call)

    async def ask_if(
        self, able: Callable[[NodeStatus], bool], make: Callable[[int], Request]
    ) -> Any:
        """Send a request that earlier releases do not know. None if the node is not `able` to
        answer it, by its status: it would take the request for a fault and end the connection."""
        while True:
            if self._status is None:
                await self.ask(StatusRequest)
            if self._status is not None:  # otherwise it was lost again
                if not able(self._status):
                    return None
                with suppress(_NodeLeft):
                    return await self.ask(make, here=True)

    def _send(self, call: _Call) -> None:
        if call.make is not None:
            self._put((call,), call.make, call.number)
            return
        if not self._unsent:
            self._loop.call_soon(self._send_writes)
        self._unsent.append(call)

    def _send_writes(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._connection is None:
            return  # the next connection sends them
        calls: list[_Call] = []
        size, name = 0, self._write_ids.name
        for call in unsent:
            if call.future.done():
                continue
            if call.sent and self._too_late(call):
                self._fail(
                    call, OutcomeUnknown("the quorum may have forgotten this client's writes")
                )
                continue
            size += len(call.body)
            if size > WRITES_BYTES or len(calls) == MAX_WRITES:
                if calls:
                    self._put_writes(calls)
                calls, size = [], len(call.body)
            call.name = name
            calls.append(call)
        if calls:
            self._put_writes(calls)

    def _too_late(self, call: _Call) -> bool:
        """Whether a write that may have been carried out must not be sent again. If the quorum has
        forgotten this client, it would carry it out twice. It notices that only by the floor: a
        floor of 1 looks like that of a new client."""
        old = self._loop.time() - call.begun_at > REMEMBERED_S
        return call.name != self._write_ids.name or (
            old and self._write_ids.floor(self._calls) == 1
        )

    def _put_writes(self, calls: list[_Call]) -> None:
        ids, bodies = [call.number for call in calls], [call.body for call in calls]
        self._put(calls, Write, self._write_ids.floor(self._calls), ids, bodies)

    def _put(self, calls: Sequence[_Call], make: Callable[..., Request], *given: Any) -> None:
        """Send these calls in one frame."""
        connection = self._connection
        if connection is None:
            return
        try:
            if connection.send(REQUEST, encode(make(*given))):
                for call in calls:
                    call.sent += 1
            elif not connection.ending:  # otherwise the next connection sends it
                for call in calls:
                    unsure = call.sent and call.make is None
                    kind = OutcomeUnknown if unsure else StoreUnavailable
                    self._fail(call, kind(_congested(connection)))
        except ValueError as error:  # larger than a frame, or text that UTF-8 cannot carry
            for call in calls:
                self._fail(call, StoreUnusable(f"the request cannot be sent: {error}"))
        if self._patience is None:
            self._patience = self._loop.call_later(PATIENCE_S, self._check_patience)

    # Watches.

    async def watch(
        self, scope: str, notify: Callable[[], None], *, entry: bool = False
    ) -> QuorumWatch:
        """Begin a watch; returns when it is confirmed."""
        self._requests = number = self._requests - 1
        watch = QuorumWatch(number, scope, notify, self._cancel, entry=entry)
        self._watches[number] = watch
        connection = self._connection
        if connection is None:
            self._connect()
        elif (
            not connection.send(REQUEST, encode(WatchRequest(number, scope, -1, entry=entry)))
            and not connection.ending
        ):
            watch.fail(StoreUnavailable(_congested(connection)))
        try:
            await watch.wait_begun()
        except BaseException:
            self.probe()
            raise
        return watch

    def _cancel(self, watch: QuorumWatch) -> None:
        if self._watches.pop(watch.id, None) is not None and self._connection is not None:
            self._connection.send(REQUEST, encode(CancelWatch(watch.id)))

    # Responses.

    def _received(self, connection: FrameConnection, frames: Sequence[tuple[int, bytes]]) -> None:
        if connection is not self._connection:
            return
        for kind, payload in frames:
            try:
                if kind != ANSWER:
                    raise ValueError(f"a frame of kind {kind}")
                response = decode_answer(payload)
                self._handlers.get(type(response), self._answered)(response)
            except (MsgspecError, ValueError, RecursionError) as error:
                connection.fail(CloseReason.MALFORMED, f"not a response of this protocol: {error}")
                return

    def _changed(self, notification: WatchNotification) -> None:
        self._notified = notification.revision
        for number in notification.ids:
            watch = self._watches.get(number)
            if watch is not None:
                watch.carried = notification.entries.get(number)
                watch.revision = notification.revision
                if notification.revision < watch.position:
                    watch.carried = None  # the node has not reached the position yet
                watch.notify_soon()

    def _watch_confirmed(self, response: WatchConfirmed) -> None:
        watch, connection = self._watches.get(response.id), self._connection
        if watch is None:
            return
        watch.position, watch.confirmed = response.revision, True
        if not watch.begun:
            watch.begin()
        elif connection is not None and connection.supports[1] == FIRST:
            # A node of the first release confirms before it notifies of what was missed, and the
            # connection may break in between.
            watch.notify_soon()

    def _watch_refused(self, response: Failed) -> None:
        watch = self._watches.get(response.id)
        if watch is not None:
            if watch.begun:
                log.warning(log_line(event="watch_refused", scope=watch.scope, error=response.text))
            watch.fail(_error(response))

    def _write_results(self, response: WriteResults) -> None:
        self._write_ids.known = True
        calls = self._calls
        for number, result in zip(response.ids, response.results, strict=True):
            call = calls.get(number)
            if call is not None and not call.future.done():
                call.future.set_result(decode_result(result))

    def _status_received(self, response: NodeStatus) -> None:
        self._status = response
        self._answered(response)

    def _answered(self, response: FoundEntry | LeaseRenewed | NodeStatus | Administered) -> None:
        call = self._calls.get(response.id)
        if call is not None:
            self._resolve(call, response)

    def _list_chunk(self, response: ListChunk) -> None:
        call = self._calls.get(response.id)
        if call is not None:
            if call.entries is None:
                call.entries = response.entries
            else:
                call.entries += response.entries
            if not response.more:
                self._resolve(call, call.entries)

    def _backup_chunk(self, response: BackupChunk) -> None:
        call = self._calls.get(response.id)
        if call is not None:
            if call.take is not None:
                call.take(response)
            call.begun_at = self._loop.time()
            if not response.more:
                self._resolve(call, response)

    def _resolve(self, call: _Call, value: object) -> None:
        if not call.future.done():
            call.future.set_result(value)

    def _failed(self, response: Failed) -> None:
        call = self._calls.get(response.id)
        if call is None:
            self._watch_refused(response)
        elif response.code is ErrorCode.FORGOTTEN:
            self._forgotten(response, call)
        elif response.code is ErrorCode.UNAVAILABLE and call.sent > 1 and response.id > 0:
            # Not carried out this time, which says nothing about the earlier attempts.
            self._fail(call, OutcomeUnknown(response.text))
        else:
            self._fail(call, _error(response))

    def _fail(self, call: _Call, error: StoreError) -> None:
        if not call.future.done():
            call.future.set_exception(error)

    def _forgotten(self, response: Failed, call: _Call) -> None:
        """This client was idle for so long that the quorum has forgotten its writes. A write that
        was sent once was certainly not carried out, and is sent again under another name."""
        if call.name == self._write_ids.name:  # otherwise it was renamed before
            self._write_ids.rename()
            connection = self._connection
            if connection is not None and not connection.send(
                REQUEST, encode(IdentifyClient(self._write_ids.name))
            ):
                connection.abort()  # otherwise what follows would be numbered under the old name
        if call.sent > 1:
            self._fail(call, _error(response))
        else:
            call.sent = 0
            self._send(call)

    # The connection.

    def _connect(self) -> None:
        if not self._closed and (self._connecting is None or self._connecting.done()):
            self._connecting = self._loop.create_task(self._dial())

    async def _dial(self) -> None:
        """Dial until a node accepts, as long as something waits for it."""
        pause_s, longest_s = PAUSES_S
        while True:
            try:
                connection = await self._dialler.connect(self._received, self._disconnected)
            except StoreError as error:
                self._fail_unsent(error)
                if not self._calls and not self._watches:
                    return
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, longest_s)
                continue
            self._connected(connection)
            return

    def _connected(self, connection: FrameConnection) -> None:
        if self._closed or connection.closed:
            connection.abort()
            if not self._closed:
                self._loop.call_soon(self._connect)
            return
        self._dialler.cluster.learn(connection)
        self._connection = connection
        connection.send(REQUEST, encode(IdentifyClient(self._write_ids.name)))
        self._notified = 0
        calls = (call for _, call in sorted(self._calls.items()))
        self._send_again(connection, iter([*self._watches.values(), *calls]))

    def _send_again(
        self, connection: FrameConnection, waiting: Iterator[QuorumWatch | _Call]
    ) -> None:
        """Send watches and requests on a new connection, no faster than it takes them: what does
        not fit into its queue would not be sent."""
        size = 0
        for each in waiting:
            if isinstance(each, _Call):
                if not each.future.done():
                    self._send(each)
                    size += len(each.body)
                    if size > WRITES_BYTES:
                        self._send_writes()
                        size = 0
            elif not each.closed:
                cluster = self._dialler.cluster.id
                request = WatchRequest(
                    each.id, each.scope, each.position, cluster, each.wants_entry
                )
                connection.send(REQUEST, encode(request))
            if connection.congested:
                rest = self._send_rest(connection, waiting)
                self._sending_again = self._loop.create_task(rest)
                return

    async def _send_rest(
        self, connection: FrameConnection, waiting: Iterator[QuorumWatch | _Call]
    ) -> None:
        await connection.drain()
        if connection is self._connection:
            self._send_again(connection, waiting)

    def _disconnected(self, connection: FrameConnection, end: End) -> None:
        if connection is self._connection:
            self._connection = self._status = None
            self._unsent.clear()
            self._dialler.skip()
            for watch in self._watches.values():
                if watch.confirmed:
                    watch.position = max(watch.position, self._notified)
                    watch.confirmed = False
            for call in self._calls.values():
                call.entries = None  # not cleared: it may be a complete result, not yet taken
                if call.here and not call.future.done():
                    call.future.set_exception(_NodeLeft)
            if self._calls or self._watches:
                self._connect()

    def _fail_unsent(self, error: StoreError) -> None:
        for call in [*self._calls.values()]:
            if not call.sent:
                self._fail(call, type(error)(str(error)))
        for watch in [*self._watches.values()]:
            watch.fail(type(error)(str(error)))

    # Probes.

    def _check_patience(self) -> None:
        self._patience = None
        if self._calls and self._connection is not None:
            oldest = min(call.begun_at for call in self._calls.values())
            if self._loop.time() - oldest >= PATIENCE_S:
                self.probe()
            self._patience = self._loop.call_later(PATIENCE_S, self._check_patience)

    def probe(self) -> None:
        """Ping the node, and leave it if it does not answer."""
        if self._connection is not None and (self._probing is None or self._probing.done()):
            self._probing = self._loop.create_task(self._probe(self._connection))

    async def _probe(self, connection: FrameConnection) -> None:
        if not await connection.alive(PATIENCE_S):
            connection.abort(End.SILENT)

    async def close(self) -> None:
        """Fail everything in flight, and close the connection."""
        self._closed = True
        for watch in [*self._watches.values()]:
            watch.close()
        running = self._connecting, self._probing, self._sending_again
        tasks = [task for task in running if task is not None]
        for task in tasks:
            task.cancel()
        if self._patience is not None:
            self._patience.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in [*self._calls.values()]:
            error = OutcomeUnknown if call.sent else StoreUnavailable
            self._fail(call, error("the store was closed before the response arrived"))
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
            await connection.wait()


def _error(response: Failed) -> StoreError:
    return _ERRORS[response.code](response.text)


def _congested(connection: FrameConnection) -> str:
    return (
        f"{connection.address} accepts requests more slowly than they are made: wait for some of"
        " them to complete"
    )
