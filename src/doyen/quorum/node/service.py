"""Serves the Store port to clients, on any node of a quorum.

Writes are proposed under the client's own request id, so that one who asks again, here or at
another node, is answered as at first. Reads wait until this node is up to date; all that arrive in
one piece share one question to the leader. Watches are served from what this node has applied.
Renewals go to whoever leads, those of one turn of the loop together.

The node that leads also keeps the leases: see `keeper`.

A node that has known no leader for an election timeout, or was removed, serves nobody: it sends
clients away, so that they go where they are served. A connection that ends proves nothing about its
client.

Lives on the driver's loop; knows links only as something that frames go to.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, Protocol

from msgspec import MsgspecError, Struct

from doyen.errors import (
    CommandFailed,
    ConfigError,
    DoyenError,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
)
from doyen.lease.clock import Clock
from doyen.quorum.consensus.core import Role, Snapshot
from doyen.quorum.keyspace.commands import QuotaExceeded, StoredEntry, decode_result, encode
from doyen.quorum.keyspace.state import QUOTA, Keyspace
from doyen.quorum.node import lease_keeper as keeper
from doyen.quorum.node import roles
from doyen.quorum.node import validation as checks
from doyen.quorum.node.driver import Answer, Status
from doyen.quorum.node.lease_keeper import AGAIN, AGAIN_S, CONFIRMED, GONE, Keeper, decode_leases
from doyen.quorum.node.proposals import Forgotten
from doyen.quorum.node.replicated import KEYSPACE
from doyen.quorum.protocol import requests
from doyen.quorum.protocol.frames import CloseReason
from doyen.quorum.protocol.requests import (
    ANSWER,
    MAX_KEY,
    REQUEST,
    Administered,
    BackupChunk,
    ErrorCode,
    Failed,
    FoundEntry,
    LeaseRenewed,
    ListChunk,
    NodeStatus,
    WatchConfirmed,
    WatchNotification,
    WriteResults,
    decode_request,
)
from doyen.quorum.protocol.security import Role as Power

__all__ = ["ClientLimits", "Service"]

log = logging.getLogger("doyen.quorum.node")

SLICE: Final = 256
"""About how many requests of one client are taken in one turn of the loop."""
BACKLOG: Final = 1 << 18
"""How many frames of one client may wait to be looked at: more than one that comes back with all
its watches has. Beyond, no more is read from it for now."""
BACKLOG_BYTES: Final = 64 << 20
"""How many bytes of one client may wait to be looked at."""
LISTS: Final = 8
"""How many long lists may be under way to one client."""
PIECE: Final = 1 << 20
"""About how many bytes of a list go into one frame."""
TEXT: Final = 4 * MAX_KEY
"""How many characters of an explanation a client is told."""


class ClientLimits(Struct, frozen=True, kw_only=True):
    """Bounds on what one client may have."""

    watches: int = 100_000
    name: int = 64


class ServiceDriver(keeper.LeaseProposer, Protocol):
    """What is needed of a node's driver."""

    def status(self) -> Status: ...

    async def ask_leader(self, question: bytes) -> bytes: ...

    async def arrange(self, what: str, node: str, address: str) -> None: ...

    def copy(self) -> tuple[Snapshot, Iterator[bytes]]: ...

    def on_role(self, callback: Callable[[Role, int, str | None], None]) -> None: ...

    def on_applied(self, callback: Callable[[int], None]) -> None: ...

    def on_question(self, handler: Callable[[bytes, Answer], None]) -> None: ...


class ClientLink(Protocol):
    """What is needed of a client's connection."""

    @property
    def closed(self) -> bool: ...

    @property
    def congested(self) -> bool: ...

    @property
    def role(self) -> str: ...

    @property
    def granted(self) -> Power: ...

    def welcome(self, on_frames: Any, on_end: Any) -> None: ...

    def refuse(self, reason: CloseReason, text: str) -> None: ...

    def send(self, kind: int, *parts: bytes) -> bool: ...

    async def drain(self) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def fail(self, reason: CloseReason, text: str) -> None: ...


class _Client:
    """One connection."""

    __slots__ = (
        *("_loop", "_size", "_wrote", "allowed", "backlog", "backlog_bytes"),
        *("draining", "link", "lists", "name", "reads", "watches"),
    )

    def __init__(self, link: ClientLink, loop: asyncio.AbstractEventLoop) -> None:
        self.link = link
        self.allowed = roles.allowed(link.granted)
        self.name = ""
        self.backlog: deque[tuple[int, bytes]] = deque()
        """Frames that have arrived and are not looked at yet."""
        self.backlog_bytes = 0
        self.reads: deque[Any] = deque()
        """Reads that can be answered as soon as the client has taken earlier answers."""
        self.draining = False
        self.lists = 0
        self.watches: dict[int, str] = {}
        self._loop = loop
        self._wrote: tuple[list[int], list[bytes]] = [], []
        self._size = 0

    def tell(self, answer: requests.Response) -> None:
        self._tell_results()
        self._send(answer)

    def settle(self, request: int, result: Any, error: BaseException | None) -> None:
        """Tell what became of a write, with others of this turn of the loop."""
        if error is not None:
            self.fail(request, _trouble(error), str(error))
            return
        if result.startswith(_FULL):
            self.fail(request, ErrorCode.UNAVAILABLE, _beyond_quota(result))
            return
        ids, results = self._wrote
        if not ids:
            self._loop.call_soon(self._tell_results)
        ids.append(request)
        results.append(result)
        self._size += len(result)
        if self._size > PIECE:
            self._tell_results()

    def _tell_results(self) -> None:
        if self._wrote[0]:
            answer = WriteResults(*self._wrote)
            self._wrote, self._size = ([], []), 0
            self._send(answer)

    def _send(self, answer: requests.Response) -> None:
        link = self.link
        if not link.send(ANSWER, encode(answer)) and not link.closed:
            link.fail(CloseReason.OVERFLOW, "reads no answers")

    def fail(self, request: int, trouble: ErrorCode, text: str) -> None:
        """The text may quote what the client sent, which may be as long as a frame."""
        self.tell(Failed(request, trouble, text[:TEXT]))


class Service:
    """The Store port on one node."""

    def __init__(
        self,
        driver: ServiceDriver,
        keyspace: Keyspace,
        clock: Clock,
        *,
        election_s: float = 1.0,
        cluster: str = "",
        protocol: str = "raft",
        quota_bytes: int = QUOTA,
        limits: ClientLimits = ClientLimits(),  # noqa: B008  (frozen)
    ) -> None:
        self._driver = driver
        self._keyspace = keyspace
        self._limits = limits
        self._election_s = election_s
        self.cluster, self.protocol = cluster, protocol
        self._loop = asyncio.get_running_loop()
        self._clients: dict[ClientLink, _Client] = {}
        self._watchers: dict[str, dict[tuple[_Client, int], None]] = {}
        self._told = keyspace.revision
        self._renewals: dict[int, list[tuple[_Client, int]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = False
        self._closed = False
        self._giving_up: asyncio.TimerHandle | None = None
        self._keeper = Keeper(driver, keyspace, clock, quota_bytes)
        self._handlers: dict[type, Callable[[_Client, Any], None]] = {
            requests.IdentifyClient: self._hello,
            requests.Write: self._write,
            requests.WatchRequest: self._watch,
            requests.CancelWatch: self._unwatch,
            requests.RenewLease: self._renew,
            requests.StatusRequest: self._inquire,
            requests.Administer: self._arrange,
            requests.BackupRequest: self._copy,
        }
        self._reads: dict[type, Callable[[_Client, Any], None]] = {
            requests.Get: self._get,
            requests.Head: self._head,
            requests.Ahead: self._ahead,
            requests.Scan: self._scan,
        }
        driver.on_role(self._role_changed)
        driver.on_applied(self._applied)
        driver.on_question(self._keeper.asked)
        status = driver.status()
        self._role_changed(status.role, status.generation, status.leader)

    @property
    def serving(self) -> bool:
        """Whether clients are let in: a leader is known, or was a moment ago."""
        return self._serving

    @property
    def clients(self) -> int:
        return len(self._clients)

    @property
    def watches(self) -> int:
        return sum(len(each) for each in self._watchers.values())

    # Who comes and goes.

    def admit(self, link: ClientLink) -> None:
        """Let a client in, if this node can serve it; an onlooker at any time."""
        if self._closed:
            link.refuse(CloseReason.NOT_SERVING, "this node is stopping; ask another")
        elif link.role == "onlooker":
            link.welcome(self._show, lambda link, end: None)
        elif not self._serving:
            link.refuse(CloseReason.NOT_SERVING, "this node knows of no leader; ask another")
        else:
            self._clients[link] = _Client(link, self._loop)
            link.welcome(self._take, self._ended)

    def close(self) -> None:
        """Send everybody to another node."""
        self._closed = True
        self._keeper.stop()
        if self._giving_up is not None:
            self._giving_up.cancel()
        for task in self._tasks:
            task.cancel()
        self._send_away()

    def _send_away(self) -> None:
        for link in [*self._clients]:
            link.close()

    def _ended(self, link: ClientLink, end: object) -> None:
        client = self._clients.pop(link, None)
        if client is not None:
            for watch in [*client.watches]:
                self._forget_watch(client, watch)

    def _role_changed(self, role: Role, generation: int, leader: str | None) -> None:
        self._keeper.role_changed(generation)
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        if leader is not None:
            self._serving = not self._closed
        elif not self._serving:
            return
        elif (status := self._driver.status()).id not in status.membership.everyone:
            self._give_up()  # a removed node hears of no leader again
        else:
            self._giving_up = self._loop.call_later(self._election_s, self._give_up)

    def _give_up(self) -> None:
        self._giving_up = None
        self._serving = False
        if self._clients:
            log.warning("no leader is known: sending %d clients away", len(self._clients))
        self._send_away()

    def _show(self, link: ClientLink, frames: Sequence[tuple[int, bytes]]) -> None:
        """One question at a time: thousands that came at once would keep everybody waiting."""
        if len(frames) > 1:
            link.fail(CloseReason.OUT_OF_TURN, "an onlooker that does not wait for its answer")
            return
        match _request(link, *frames[0]):
            case requests.StatusRequest() as request:
                self._inquire(_Client(link, self._loop), request)
            case None:
                pass
            case _:
                link.fail(CloseReason.OUT_OF_TURN, "an onlooker that does more than inquire")

    # What clients ask.

    def _take(self, link: ClientLink, frames: Sequence[tuple[int, bytes]]) -> None:
        client = self._clients.get(link)
        if client is not None:
            waiting = bool(client.backlog)
            client.backlog.extend(frames)
            for _, payload in frames:
                client.backlog_bytes += len(payload)
            if len(client.backlog) > BACKLOG or client.backlog_bytes > BACKLOG_BYTES:
                link.pause()
            if not waiting:
                self._serve(client)

    def _serve(self, client: _Client) -> None:
        """In slices, so that what the first have asked for is on its way to disks and peers while
        the rest is read; and one that asks for much does not keep the others waiting. Nothing
        is taken from a client that does not take its answers."""
        if client.draining:
            return
        link, backlog, room = client.link, client.backlog, SLICE
        reads: list[Any] = []
        while backlog and room > 0 and not link.closed:
            kind, payload = backlog.popleft()
            client.backlog_bytes -= len(payload)
            request = _request(link, kind, payload)
            if request is None:
                break
            handler = self._handlers.get(type(request))
            if type(request) not in client.allowed:
                self._forbid(client, request)
            elif handler is None:
                reads.append(request)
            else:
                handler(client, request)
            room -= len(request.ids) if type(request) is requests.Write else 1
        if link.closed:
            backlog.clear()
            return
        if backlog:
            self._loop.call_soon(self._serve, client)
        if len(backlog) <= BACKLOG and client.backlog_bytes <= BACKLOG_BYTES:
            link.resume()
        if reads:
            # One round for all of them, and it begins after the last of them has arrived.
            try:
                self._driver.when_current(partial(self._read, client, reads))
            except DoyenError as error:
                for request in reads:
                    client.fail(request.id, ErrorCode.UNAVAILABLE, str(error))

    def _forbid(self, client: _Client, request: Any) -> None:
        """Say that the client's role does not allow this."""
        text = roles.refusal(client.link.granted, roles.NEEDED[type(request)])
        for number in request.ids if type(request) is requests.Write else (request.id,):
            client.fail(number, ErrorCode.UNUSABLE, text)

    def _hello(self, client: _Client, request: requests.IdentifyClient) -> None:
        if not 8 <= len(request.client) <= self._limits.name:
            client.link.fail(CloseReason.MALFORMED, "a client's name has 8 to 64 characters")
            return
        client.name = request.client

    def _write(self, client: _Client, request: requests.Write) -> None:
        name, floor, ids, bodies = client.name, request.floor, request.ids, request.bodies
        if not name or len(ids) != len(bodies) or min(ids) < floor:
            client.link.fail(CloseReason.OUT_OF_TURN, "writes that nobody could count")
            return
        submit, settle, role = self._driver.submit, client.settle, client.link.granted
        for number, body in zip(ids, bodies, strict=True):
            flaw = checks.flaw(body, role)
            if flaw is not None:
                client.fail(number, ErrorCode.UNUSABLE, flaw)
                continue
            try:
                submit(KEYSPACE, body, settle, request=(name, number, floor))
            except DoyenError as error:
                unusable = isinstance(error, ConfigError)
                trouble = ErrorCode.UNUSABLE if unusable else ErrorCode.UNAVAILABLE
                client.fail(number, trouble, str(error))

    def _read(self, client: _Client, reads: list[Any]) -> None:
        client.reads.extend(reads)
        if not client.draining:
            self._answer_reads(client)

    def _answer_reads(self, client: _Client) -> None:
        """No faster than the client takes the answers: what waits here are requests, and each
        value is read when it can be sent."""
        link, reads = client.link, client.reads
        while reads and not link.closed:
            if link.congested:
                client.draining = True
                self._start(self._answer_later(client))
                return
            request = reads.popleft()
            self._reads[type(request)](client, request)

    async def _answer_later(self, client: _Client) -> None:
        await client.link.drain()
        client.draining = False
        self._answer_reads(client)
        self._serve(client)

    def _get(self, client: _Client, request: requests.Get) -> None:
        client.tell(FoundEntry(request.id, self._keyspace.get(request.key)))

    def _head(self, client: _Client, request: requests.Head) -> None:
        client.tell(FoundEntry(request.id, self._keyspace.head(request.line)))

    def _ahead(self, client: _Client, request: requests.Ahead) -> None:
        ticket = self._keyspace.get(request.ticket)
        if ticket is None:
            text = f"{request.ticket} is no longer in the line"
            client.fail(request.id, ErrorCode.TICKET_GONE, text)
        else:
            client.tell(FoundEntry(request.id, self._keyspace.ahead(ticket)))

    def _scan(self, client: _Client, request: requests.Scan) -> None:
        pieces = _pieces(self._keyspace.list(request.prefix))
        first, second = next(pieces), next(pieces, None)
        if second is None:
            client.tell(ListChunk(request.id, first, False))
        elif client.lists >= LISTS:
            client.fail(
                request.id,
                ErrorCode.UNAVAILABLE,
                f"{LISTS} long lists are under way to this client",
            )
        else:
            client.lists += 1
            client.tell(ListChunk(request.id, first, True))
            self._start(self._have_listed(client, request.id, second, pieces))

    async def _have_listed(
        self,
        client: _Client,
        request: int,
        piece: list[StoredEntry] | None,
        pieces: Iterator[list[StoredEntry]],
    ) -> None:
        """Piece by piece, no faster than the client reads."""
        try:
            while piece is not None:
                await client.link.drain()
                if client.link.closed:
                    return
                following = next(pieces, None)
                client.tell(ListChunk(request, piece, following is not None))
                piece = following
                await asyncio.sleep(0)
        finally:
            client.lists -= 1

    def _inquire(self, client: _Client, request: requests.StatusRequest) -> None:
        client.tell(self.condition(request.id))

    def condition(self, request: int = 0) -> NodeStatus:
        """How this node is doing."""
        status, keyspace = self._driver.status(), self._keyspace
        members = status.membership
        return NodeStatus(
            request,
            status.id,
            _version(),
            status.role.value,
            status.generation,
            status.leader,
            status.commit,
            status.applied,
            status.snapshot,
            status.full,
            members.voters,
            members.learners,
            dict(members.addresses),
            keyspace.revision,
            len(keyspace),
            keyspace.lease_count,
            self.clients,
            self.watches,
            self._election_s,
            keyspace.version,
            keyspace.bytes,
            keyspace.quota,
            keyspace.alarm,
        )

    # Orders, and copies for backups.

    def _arrange(self, client: _Client, request: requests.Administer) -> None:
        self._start(self._have_arranged(client, request))

    async def _have_arranged(self, client: _Client, request: requests.Administer) -> None:
        try:
            await self._driver.arrange(request.action, request.node, request.address)
        except OutcomeUnknown as error:
            client.fail(request.id, ErrorCode.UNKNOWN, str(error))
        except StoreUnavailable as error:
            client.fail(request.id, ErrorCode.UNAVAILABLE, str(error))
        except DoyenError as error:
            client.fail(request.id, ErrorCode.UNUSABLE, str(error))
        else:
            client.tell(Administered(request.id))

    def _copy(self, client: _Client, request: requests.BackupRequest) -> None:
        try:
            self._driver.when_current(lambda: self._start(self._have_copied(client, request.id)))
        except DoyenError as error:
            client.fail(request.id, ErrorCode.UNAVAILABLE, str(error))

    async def _have_copied(self, client: _Client, request: int) -> None:
        """Piece by piece, no faster than the client reads, while commands go on being applied."""
        snapshot, pieces = self._driver.copy()
        origin = requests.BackupOrigin(
            self.cluster, self._driver.status().id, self.protocol, snapshot
        )
        client.tell(BackupChunk(request, origin, b"", True))
        for piece in pieces:
            await client.link.drain()
            if client.link.closed:
                return
            client.tell(BackupChunk(request, None, piece, True))
            await asyncio.sleep(0)
        client.tell(BackupChunk(request, None, b"", False))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Watches.

    def _watch(self, client: _Client, request: requests.WatchRequest) -> None:
        if request.id in client.watches:
            return
        if len(client.watches) >= self._limits.watches:
            text = f"one connection may have {self._limits.watches} watches; open another store"
            client.fail(request.id, ErrorCode.UNUSABLE, text)
            return
        if len(request.scope) > MAX_KEY:
            text = f"a scope has at most {MAX_KEY} characters, not {len(request.scope)}"
            client.fail(request.id, ErrorCode.UNUSABLE, text)
            return
        self._notify()
        client.watches[request.id] = request.scope
        self._watchers.setdefault(request.scope, {})[client, request.id] = None
        if request.since <= self._keyspace.revision:
            self._confirm(client, request)
            return
        try:
            self._driver.when_current(partial(self._confirm, client, request))
        except DoyenError:
            client.link.close()  # this node is stopping: another one confirms it

    def _confirm(self, client: _Client, request: requests.WatchRequest) -> None:
        """Tell a watch what it missed, if it is resumed, and only then that it has begun: were the
        link to break in between, the client would take a confirmed watch for one that was told."""
        if client.link.closed or request.id not in client.watches:
            return
        self._notify()
        if request.since >= 0 and self._missed(request):
            client.tell(WatchNotification([request.id], self._told))
        client.tell(WatchConfirmed(request.id, self._told))

    def _missed(self, request: requests.WatchRequest) -> bool:
        """Whether anything in a watch's scope changed, or may have, after its position. A position
        that this cluster never came to, or of another cluster, says nothing about this history."""
        keyspace, ours = self._keyspace, self._driver.status().membership.cluster
        return (
            (bool(ours and request.cluster) and request.cluster != ours)
            or request.since > keyspace.revision
            or keyspace.history.changed(request.scope, request.since)
        )

    def _unwatch(self, client: _Client, request: requests.CancelWatch) -> None:
        self._forget_watch(client, request.id)

    def _forget_watch(self, client: _Client, watch: int) -> None:
        scope = client.watches.pop(watch, None)
        if scope is not None:
            watchers = self._watchers[scope]
            del watchers[client, watch]
            if not watchers:
                del self._watchers[scope]

    def _applied(self, index: int) -> None:
        self._notify()
        self._keeper.applied()

    def _notify(self) -> None:
        """Tell whoever watches what has changed since this was last called."""
        since, self._told = self._told, self._keyspace.revision
        if since == self._told or not self._watchers:
            return
        keys = self._keyspace.history.latest(since)
        if keys is None or since > self._told:
            scopes = [*self._watchers]
        else:
            scopes = [*_scopes(keys, self._watchers)]
        told: dict[_Client, list[int]] = {}
        for scope in scopes:
            for client, watch in self._watchers[scope]:
                told.setdefault(client, []).append(watch)
        for client, watches in told.items():
            client.tell(WatchNotification(watches, self._told))

    # Renewals, on the node that was asked.

    def _renew(self, client: _Client, request: requests.RenewLease) -> None:
        if not self._renewals:
            self._loop.call_soon(self._send_renewals)
        self._renewals.setdefault(request.lease, []).append((client, request.id))

    def _send_renewals(self) -> None:
        waiting, self._renewals = self._renewals, {}
        self._start(self._have_renewed(waiting))

    async def _have_renewed(self, waiting: dict[int, list[tuple[_Client, int]]]) -> None:
        """Ask whoever leads; while that changes, ask again, for as long as it should take."""
        give_up_at = self._loop.time() + 2 * self._election_s
        while waiting:
            verdicts, why = await self._verdicts([*waiting])
            again: dict[int, list[tuple[_Client, int]]] = {}
            late = self._loop.time() > give_up_at
            for (lease, askers), verdict in zip(waiting.items(), verdicts, strict=True):
                if verdict == AGAIN and not late:
                    if askers := [each for each in askers if not each[0].link.closed]:
                        again[lease] = askers
                    continue
                for client, request in askers:
                    if verdict == CONFIRMED:
                        client.tell(LeaseRenewed(request))
                    elif verdict == GONE:
                        client.fail(request, ErrorCode.LEASE_GONE, f"the lease {lease} has ended")
                    else:
                        client.fail(request, ErrorCode.UNAVAILABLE, why)
            waiting = again
            if waiting:
                await asyncio.sleep(AGAIN_S)

    async def _verdicts(self, leases: list[int]) -> tuple[list[int], str]:
        try:
            verdicts = decode_leases(await self._driver.ask_leader(encode(leases)))
        except (DoyenError, MsgspecError) as error:
            return [AGAIN] * len(leases), str(error)
        if len(verdicts) != len(leases):
            verdicts = [AGAIN] * len(leases)
        return verdicts, "the leader has changed, or is about to end this lease"


def _request(link: ClientLink, kind: int, payload: bytes) -> Any:
    """What was asked; or None, and the link is at fault."""
    if kind != REQUEST:
        link.fail(CloseReason.OUT_OF_TURN, f"a frame of kind {kind} from a client")
        return None
    try:
        return decode_request(payload)
    except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
        link.fail(CloseReason.MALFORMED, f"not a request of this protocol: {error}")
        return None


def _trouble(error: BaseException) -> ErrorCode:
    """What a client is told of why its write has failed."""
    if isinstance(error, Forgotten):
        return ErrorCode.FORGOTTEN
    if isinstance(error, OutcomeUnknown):
        return ErrorCode.UNKNOWN
    if isinstance(error, StoreError):
        return ErrorCode.UNAVAILABLE
    return ErrorCode.UNUSABLE if isinstance(error, CommandFailed) else ErrorCode.UNKNOWN


_FULL = encode(QuotaExceeded(0, 0))[:2]
"""How the encoded result begins."""


def _beyond_quota(result: bytes) -> str:
    full = decode_result(result)
    assert isinstance(full, QuotaExceeded)
    return (
        f"the keyspace is full: {full.bytes} of {full.quota} bytes are in use, and this needs more"
        " than is left of that quota. Delete entries or end leases, or restart every node with a"
        " larger --quota-bytes"
    )


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


def _scopes(keys: Iterable[str], watched: dict[str, Any]) -> dict[str, None]:
    """The watched scopes that these keys are at or below."""
    seen: set[str] = set()
    found: dict[str, None] = {}
    for key in keys:
        scope = key
        while scope and scope not in seen:
            seen.add(scope)
            if scope in watched:
                found[scope] = None
            scope = scope.rpartition("/")[0]
    return found


@cache
def _version() -> str:
    try:
        return version("doyen")
    except PackageNotFoundError:
        return "unknown"
