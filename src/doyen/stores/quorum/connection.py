"""A client's connection to a quorum: one node at a time, and another as soon as that one fails.

A request stays under way until it is answered or its caller gives up. When a connection ends, the
next node is dialled at once and everything under way is sent again: reads and renewals because they
may be repeated, writes under the id they have, which the quorum carries out once. So a lost
connection is no lost answer.

- Nodes are dialled one after the other, the next a moment later if the one before has not answered:
  a node that is frozen costs that moment. If none can be had, whatever was never sent has failed.
- A node that is silent while something is asked of it is asked for a sign of life, and left if
  there is none.
- Every node must be of one cluster, by its name and by its random id. Two clusters behind one URL
  would elect two leaders, and one that was founded anew has forgotten everything.
- Watches are begun anew on every connection, each from its own position: the revision up to which
  it has been told everything. The node tells what was missed, then confirms the watch.

Imports the quorum's wire and words, and the error tree.
"""

from __future__ import annotations

import asyncio
import logging
import random
import uuid
from collections.abc import Callable, Coroutine, Sequence
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
from doyen.quorum.keyspace.commands import (
    KeyspaceCommand,
    Result,
    StoredEntry,
    decode_result,
    encode,
)
from doyen.quorum.keyspace.versions import FIRST
from doyen.quorum.protocol.connection import End, FrameConnection, dial
from doyen.quorum.protocol.frames import CloseReason, ConnectionRefused, FrameError
from doyen.quorum.protocol.handshake import ANY, ConnectionIdentity, MemberInfo
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
from doyen.quorum.protocol.security import Security

__all__ = ["Electing", "QuorumConnection", "QuorumWatch", "inquire"]

log = logging.getLogger("doyen")

STAGGER_S = 0.25
"""How long a node may take to answer before another is dialled as well."""
PATIENCE_S = 0.3
"""How long an answer may take before the node is asked for a sign of life, and that as well."""
REMEMBERED_S = 60.0
"""How long a quorum certainly remembers what a client has asked for that asks no more."""
WRITES_BYTES = 1 << 18
"""About how many bytes of writes go into one frame."""
PAUSES_S = (0.02, 0.5)
"""Between two rounds of dialling in which no node could be had: at first, and at most."""

_ERRORS: dict[ErrorCode, type[StoreError]] = {
    ErrorCode.UNAVAILABLE: StoreUnavailable,
    ErrorCode.UNKNOWN: OutcomeUnknown,
    ErrorCode.FORGOTTEN: OutcomeUnknown,
    ErrorCode.LEASE_GONE: LeaseGone,
    ErrorCode.TICKET_GONE: TicketGone,
    ErrorCode.UNUSABLE: StoreUnusable,
}


class Electing(StoreUnavailable):
    """No node serves, and at least one of them only because none leads at the moment."""


class _Call(Struct, eq=False):
    """Something under way."""

    number: int
    make: Callable[[int], Request] | None
    """Gives the request, with its id; None: it is a write."""
    future: asyncio.Future[Any]
    begun_at: float
    take: Callable[[BackupChunk], None] | None = None
    body: bytes = b""
    sent: int = 0
    name: str = ""
    """Under which a write was sent."""
    records: list[StoredEntry] = []


class QuorumWatch:
    """A watch: a standing request to be told of changes at a scope."""

    def __init__(
        self, wire: QuorumConnection, number: int, scope: str, notify: Callable[[], None]
    ) -> None:
        self.id = number
        self.scope = scope
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.position = -1
        """Up to this revision, everything was told; below 0 if nothing was confirmed yet."""
        self.confirmed = False
        """Whether the current connection has confirmed it."""
        self._wire = wire
        self._notify = notify
        self._due = False
        self._closed = False

    def tell(self) -> None:
        """Have `notify` called in a moment. Changes that come until then are covered by it."""
        if not self._due and not self._closed:
            self._due = True
            asyncio.get_running_loop().call_soon(self._tell)

    def _tell(self) -> None:
        self._due = False
        if not self._closed:
            try:
                self._notify()
            except Exception:
                log.exception("a listener failed on a change and was passed over")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._wire.forget(self)


async def inquire(address: str, security: Security, cluster: str) -> NodeStatus:
    """How one node is doing, on a connection of its own. There need be no leader."""
    answer: asyncio.Future[NodeStatus] = asyncio.get_running_loop().create_future()

    def take(link: FrameConnection, frames: Sequence[tuple[int, bytes]]) -> None:
        for kind, payload in frames:
            try:
                told = decode_answer(payload)
            except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
                text = f"not an answer of this protocol: {error}"
                raise FrameError(CloseReason.MALFORMED, text) from None
            if kind != ANSWER or answer.done() or not isinstance(told, NodeStatus):
                raise FrameError(CloseReason.OUT_OF_TURN, "an answer to what was not asked")
            answer.set_result(told)

    def ended(link: FrameConnection, end: End) -> None:
        if not answer.done():
            answer.set_exception(StoreUnavailable(f"{address}: {end.value}"))

    link = await dial(
        address,
        ConnectionIdentity(cluster, ANY, 0),
        role="onlooker",
        security=security,
        on_frames=take,
        on_end=ended,
    )
    try:
        link.send(REQUEST, encode(StatusRequest(0)))
        return await answer
    finally:
        link.abort()


class QuorumConnection:
    """One connection at a time, and everything under way on it."""

    def __init__(
        self,
        nodes: Sequence[str],
        security: Security,
        *,
        cluster: str,
        connect_timeout_s: float,
        first: int = 0,
    ) -> None:
        """`first` is where in `nodes` to begin."""
        self.cluster = cluster
        self.cluster_id = ""
        """The random id of the cluster, as the first node that let us in has told it."""
        self._nodes = nodes
        self._next = first
        self._security = security
        self._connect_timeout_s = connect_timeout_s
        self._incarnation = random.getrandbits(62)
        self._loop = asyncio.get_running_loop()
        self._link: FrameConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._probing: asyncio.Task[None] | None = None
        self._calls: dict[int, _Call] = {}
        self._writes = 0
        self._others = 0
        self._unsent: list[_Call] = []
        """Writes that go out together, at the end of this turn of the loop."""
        self._floor = 1
        """No open write has a lower number."""
        self._name = uuid.uuid4().hex
        self._named = False
        """Whether the quorum knows us by this name: whether it has answered a write under it."""
        self._watches: dict[int, QuorumWatch] = {}
        self._told = 0
        """Up to this revision, all watches that the current connection has confirmed were told
        everything."""
        self._impatient: asyncio.TimerHandle | None = None
        self._closed = False
        self._hear: dict[type, Callable[[Any], None]] = {
            WriteResults: self._wrote,
            WatchNotification: self._changed,
            WatchConfirmed: self._watching,
            Failed: self._failed,
            ListChunk: self._listed,
            BackupChunk: self._copied,
        }

    @property
    def node(self) -> str | None:
        """The address we are connected to."""
        return self._link.address if self._link is not None else None

    # Asking.

    def ask(
        self,
        make: Callable[[int], Request],
        take: Callable[[BackupChunk], None] | None = None,
    ) -> Coroutine[Any, Any, Any]:
        """Put a request that may be repeated; `make` gives it, with its id, and `take` takes the
        pieces of a copy."""
        return self._call(make, take)

    def write(self, command: KeyspaceCommand) -> Coroutine[Any, Any, Result]:
        """Have a command carried out, once; its result."""
        return self._call(None, body=encode(command))

    def _settled_below(self) -> int:
        """Up to where we have the answers to all our writes, as far as the quorum may rely on
        it. One at least is open."""
        if not self._named:
            return 1
        while self._floor not in self._calls:
            self._floor += 1
        return self._floor

    async def _call(
        self,
        make: Callable[[int], Request] | None,
        take: Callable[[BackupChunk], None] | None = None,
        body: bytes = b"",
    ) -> Any:
        # Numbered when it is under way, and not before: the floor passes over other numbers.
        if make is None:
            self._writes = number = self._writes + 1
        else:
            self._others = number = self._others - 1
        loop = self._loop
        future = loop.create_future()
        call = self._calls[number] = _Call(number, make, future, loop.time(), take, body)
        if self._link is not None:
            self._send(call)
        else:
            self._connect()
        try:
            return await future
        except asyncio.CancelledError:
            self.suspect()
            raise
        finally:
            del self._calls[number]

    def _send(self, call: _Call) -> None:
        if call.make is not None:
            self._put((call,), call.make, call.number)
            return
        if not self._unsent:
            self._loop.call_soon(self._send_writes)
        self._unsent.append(call)

    def _send_writes(self) -> None:
        unsent, self._unsent = self._unsent, []
        if self._link is None:
            return  # the next link takes them
        calls: list[_Call] = []
        size = 0
        for call in unsent:
            if call.future.done():
                continue
            if call.sent and self._too_late(call):
                self._settle(call, OutcomeUnknown("the quorum may have forgotten this client"))
                continue
            if calls and (len(calls) == MAX_WRITES or size + len(call.body) > WRITES_BYTES):
                self._put_writes(calls)
                calls, size = [], 0
            call.name = self._name
            calls.append(call)
            size += len(call.body)
        if calls:
            self._put_writes(calls)

    def _too_late(self, call: _Call) -> bool:
        """Whether a write that may have been carried out must not be asked for again: it would be
        carried out once more if the quorum knows it no longer, and cannot tell, since all our
        writes under this name are open, or the first of them is, as a new client's would be."""
        old = self._loop.time() - call.begun_at > REMEMBERED_S
        return call.name != self._name or (old and self._settled_below() == 1)

    def _put_writes(self, calls: list[_Call]) -> None:
        ids, bodies = [call.number for call in calls], [call.body for call in calls]
        self._put(calls, Write, self._settled_below(), ids, bodies)

    def _put(self, calls: Sequence[_Call], make: Callable[..., Request], *given: Any) -> None:
        """Send what is asked by these, in one frame."""
        link = self._link
        if link is None:
            return
        try:
            if link.send(REQUEST, encode(make(*given))):
                for call in calls:
                    call.sent += 1
            elif not link.ending:  # if it is, the next link takes it
                for call in calls:
                    unsure = call.sent and call.make is None
                    kind = OutcomeUnknown if unsure else StoreUnavailable
                    self._settle(call, kind(_stuffed(link)))
        except ValueError as error:  # larger than a frame, or text that UTF-8 cannot carry
            for call in calls:
                self._settle(call, StoreUnusable(f"this cannot be sent: {error}"))
        if self._impatient is None:
            self._impatient = self._loop.call_later(PATIENCE_S, self._grow_impatient)

    # Watching.

    async def watch(self, scope: str, notify: Callable[[], None]) -> QuorumWatch:
        """Have `notify` called; returns when the watch has begun."""
        self._others -= 1
        watch = self._watches[self._others] = QuorumWatch(self, self._others, scope, notify)
        link = self._link
        if link is None:
            self._connect()
        elif not link.send(REQUEST, encode(WatchRequest(watch.id, scope, -1))) and not link.ending:
            watch.begun.set_exception(StoreUnavailable(_stuffed(link)))
        try:
            await watch.begun
        except BaseException:
            watch.close()
            self.suspect()
            raise
        return watch

    def forget(self, watch: QuorumWatch) -> None:
        if self._watches.pop(watch.id, None) is not None and self._link is not None:
            self._link.send(REQUEST, encode(CancelWatch(watch.id)))

    # Answers.

    def _take(self, link: FrameConnection, frames: Sequence[tuple[int, bytes]]) -> None:
        if link is not self._link:
            return
        for kind, payload in frames:
            try:
                if kind != ANSWER:
                    raise ValueError(f"a frame of kind {kind}")
                answer = decode_answer(payload)
                self._hear.get(type(answer), self._answered)(answer)
            except (MsgspecError, ValueError, RecursionError) as error:
                link.fail(CloseReason.MALFORMED, f"not an answer of this protocol: {error}")
                return

    def _changed(self, answer: WatchNotification) -> None:
        self._told = answer.revision
        for number in answer.ids:
            watch = self._watches.get(number)
            if watch is not None:
                watch.tell()

    def _watching(self, answer: WatchConfirmed) -> None:
        watch = self._watches.get(answer.id)
        if watch is None:
            return
        watch.position, watch.confirmed = answer.revision, True
        if not watch.begun.done():
            watch.begun.set_result(None)
        elif self._link is not None and self._link.supports[1] == FIRST:
            # A node of the first release tells what was missed only after this, and the link may
            # break in between.
            watch.tell()

    def _wrote(self, answer: WriteResults) -> None:
        self._named = True
        calls = self._calls
        for number, result in zip(answer.ids, answer.results, strict=True):
            call = calls.get(number)
            if call is not None and not call.future.done():
                call.future.set_result(decode_result(result))

    def _answered(self, answer: FoundEntry | LeaseRenewed | NodeStatus | Administered) -> None:
        call = self._calls.get(answer.id)
        if call is not None:
            self._resolve(call, answer)

    def _listed(self, answer: ListChunk) -> None:
        call = self._calls.get(answer.id)
        if call is not None:
            call.records += answer.entries
            if not answer.more:
                self._resolve(call, call.records)

    def _copied(self, answer: BackupChunk) -> None:
        call = self._calls.get(answer.id)
        if call is not None:
            if call.take is not None:
                call.take(answer)
            call.begun_at = self._loop.time()
            if not answer.more:
                self._resolve(call, answer)

    def _resolve(self, call: _Call, value: object) -> None:
        if not call.future.done():
            call.future.set_result(value)

    def _failed(self, answer: Failed) -> None:
        call = self._calls.get(answer.id)
        if call is None:
            watch = self._watches.get(answer.id)
            if watch is None:
                return
            if not watch.begun.done():
                watch.begun.set_exception(_error(answer))
            else:
                log.warning("the watch on %s could not be resumed: %s", watch.scope, answer.text)
        elif answer.code is ErrorCode.FORGOTTEN:
            self._rename(answer, call)
        elif answer.code is ErrorCode.UNAVAILABLE and call.sent > 1 and answer.id > 0:
            # Not done this time; nobody says that about the times before.
            self._settle(call, OutcomeUnknown(answer.text))
        else:
            self._settle(call, _error(answer))

    def _settle(self, call: _Call, error: StoreError) -> None:
        if not call.future.done():
            call.future.set_exception(error)

    def _rename(self, answer: Failed, call: _Call) -> None:
        """We were idle for so long that the quorum has forgotten how far we had counted. What it
        was asked only once was certainly not done, and goes out again under another name."""
        if call.name == self._name:  # or there is another name already
            self._named = False
            self._name = uuid.uuid4().hex
            link = self._link
            if link is not None and not link.send(REQUEST, encode(IdentifyClient(self._name))):
                link.abort()  # or what follows would be counted under the old name
        if call.sent > 1:
            self._settle(call, _error(answer))
        else:
            call.sent = 0
            self._send(call)

    # Connections.

    def _connect(self) -> None:
        if not self._closed and (self._connecting is None or self._connecting.done()):
            self._connecting = self._loop.create_task(self._have_link())

    async def _have_link(self) -> None:
        """Dial until a node lets us in."""
        pause_s, most_s = PAUSES_S
        while True:
            try:
                link = await self._dial_round()
            except StoreError as error:
                self._give_up_unsent(error)
                if not self._calls and not self._watches:
                    return
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.5))
                pause_s = min(2 * pause_s, most_s)
                continue
            self._use(link)
            return

    async def _dial_round(self) -> FrameConnection:
        """Dial every node, one a moment after the other, until one lets us in."""
        first, count = self._next, len(self._nodes)
        order = [self._nodes[(first + step) % count] for step in range(count)]
        dialling: dict[asyncio.Task[FrameConnection], str] = {}
        failures: list[StoreError] = []
        try:
            while order or dialling:
                if order:
                    address = order.pop(0)
                    dialling[self._loop.create_task(self._dial(address))] = address
                done, _ = await asyncio.wait(
                    dialling,
                    timeout=STAGGER_S if order else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    address = dialling.pop(task)
                    error = task.exception()
                    if error is None:
                        self._next = self._nodes.index(address)
                        return task.result()
                    if not isinstance(error, StoreError):
                        raise error
                    failures.append(error)
        finally:
            for task in dialling:
                task.cancel()
                task.add_done_callback(_hang_up)
        lasting = [
            each for each in failures if isinstance(each, ConnectionRefused) and each.lasting
        ]
        text = "; ".join(dict.fromkeys(map(str, failures)))
        if len(lasting) == len(failures):
            raise StoreUnusable(f"no node lets us in: {text}") from lasting[0]
        electing = any(
            isinstance(each, ConnectionRefused) and each.reason is CloseReason.NOT_SERVING
            for each in failures
        )
        kind = Electing if electing else StoreUnavailable
        raise kind(f"no node of the quorum can be had: {text}") from failures[-1]

    async def _dial(self, address: str) -> FrameConnection:
        return await dial(
            address,
            ConnectionIdentity(self.cluster, ANY, self._incarnation),
            info=MemberInfo(self.cluster_id),
            role="client",
            security=self._security,
            on_frames=self._take,
            on_end=self._ended,
            handshake_s=self._connect_timeout_s,
        )

    def _use(self, link: FrameConnection) -> None:
        if self._closed or link.closed:
            link.abort()
            if not self._closed:
                self._loop.call_soon(self._connect)
            return
        self.cluster = self.cluster or link.remote.cluster
        self.cluster_id = self.cluster_id or link.info.cluster_id
        self._link = link
        link.send(REQUEST, encode(IdentifyClient(self._name)))
        self._told = 0
        for watch in self._watches.values():
            resumed = WatchRequest(watch.id, watch.scope, watch.position, self.cluster_id)
            link.send(REQUEST, encode(resumed))
        for _, call in sorted(self._calls.items()):
            self._send(call)

    def _ended(self, link: FrameConnection, end: End) -> None:
        if link is self._link:
            self._link = None
            self._unsent.clear()
            self._next = (self._next + 1) % len(self._nodes)
            for watch in self._watches.values():
                if watch.confirmed:
                    watch.position = max(watch.position, self._told)
                    watch.confirmed = False
            for call in self._calls.values():
                call.records = []  # not cleared: it may be the answer, not yet taken
            if self._calls or self._watches:
                self._connect()

    def _give_up_unsent(self, error: StoreError) -> None:
        for call in [*self._calls.values()]:
            if not call.sent:
                self._settle(call, type(error)(str(error)))
        for watch in [*self._watches.values()]:
            if not watch.begun.done():
                watch.begun.set_exception(type(error)(str(error)))

    # Signs of life.

    def _grow_impatient(self) -> None:
        self._impatient = None
        if self._calls and self._link is not None:
            oldest = min(call.begun_at for call in self._calls.values())
            if self._loop.time() - oldest >= PATIENCE_S:
                self.suspect()
            self._impatient = self._loop.call_later(PATIENCE_S, self._grow_impatient)

    def suspect(self) -> None:
        """Ask the node for a sign of life, and leave it if there is none."""
        if self._link is not None and (self._probing is None or self._probing.done()):
            self._probing = self._loop.create_task(self._probe(self._link))

    async def _probe(self, link: FrameConnection) -> None:
        if not await link.alive(PATIENCE_S):
            link.abort(End.SILENT)

    async def close(self) -> None:
        """End everything that is under way."""
        self._closed = True
        for watch in [*self._watches.values()]:
            watch.close()
        tasks = [task for task in (self._connecting, self._probing) if task is not None]
        for task in tasks:
            task.cancel()
        if self._impatient is not None:
            self._impatient.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for call in [*self._calls.values()]:
            error = OutcomeUnknown if call.sent else StoreUnavailable
            self._settle(call, error("the store was closed meanwhile"))
        link, self._link = self._link, None
        if link is not None:
            link.close()
            await link.wait()


def _error(answer: Failed) -> StoreError:
    return _ERRORS[answer.code](answer.text)


def _stuffed(link: FrameConnection) -> str:
    return f"{link.address} takes in less than is asked of it; wait for some"


def _hang_up(task: asyncio.Task[FrameConnection]) -> None:
    """A node that lets us in after another has."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()
