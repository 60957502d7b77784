"""Serves the store port to clients, on any node of a quorum.

    lists      reads, lists, copies for backups
    watches    watches and notifications
    clients    what a node keeps for one client

Writes are proposed under the client's own request id, so a client that repeats one, at this node
or at another, gets the same result. The node that leads also keeps the leases: see `lease_keeper`.

A node that has known no leader for an election timeout, or that was removed, closes its clients'
connections, so that they go to a node that can serve them. The end of a connection says nothing
about its client.

Lives on the driver's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

from msgspec import MsgspecError

from doyen.errors import ConfigError, DoyenError, OutcomeUnknown, StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.lease.clock import Clock
from doyen.quorum.consensus.core import Role
from doyen.quorum.keyspace.state import QUOTA, Keyspace
from doyen.quorum.keyspace.versions import NEWEST
from doyen.quorum.node import roles
from doyen.quorum.node.clients import ServedClient
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.lease_keeper import KeyspaceLeases, LeaseLooks, Renewals
from doyen.quorum.node.lists import Lists
from doyen.quorum.node.membership import not_founded
from doyen.quorum.node.proposals import ProposalLimits
from doyen.quorum.node.replicated import KEYSPACE
from doyen.quorum.node.watches import Watches
from doyen.quorum.protocol import requests
from doyen.quorum.protocol.connection import FrameConnection
from doyen.quorum.protocol.frames import CloseReason
from doyen.quorum.protocol.requests import (
    REQUEST,
    Administered,
    ErrorCode,
    NodeStatus,
    Write,
    decode_request,
)

log = logging.getLogger("doyen.quorum.node")

MAX_NAME: Final = 64
NAMES: Final = 8
"""How many names one connection may take in any `NAMES_S`. The quorum remembers so many clients by
name that none is forgotten while it repeats a write, unless a hundred thousand names are taken in a
minute. A client takes another name only after it was forgotten, as one that writes rarely may be
again and again."""
NAMES_S: Final = 60.0
SLICE: Final = ProposalLimits().batch_commands
"""About how many requests of one client are handled in one turn of the event loop: as many writes
as make a full log entry."""
BACKLOG: Final = 1 << 18
"""How many frames of one client may wait to be handled: more than a client that reconnects with all
its watches sends. Beyond, nothing more is read from its connection for now."""
BACKLOG_BYTES: Final = 16 << 20
"""How many bytes of one client may wait to be handled: a few of the largest frames."""

_EARLY: Final = (
    "the cluster is at version {} of its state, which does not have this command: the version rises"
    " when all members are connected and run this release"
)


class Service:
    """The store port on one node."""

    def __init__(
        self,
        driver: Driver,
        keyspace: Keyspace,
        clock: Clock,
        *,
        election_s: float = 1.0,
        cluster: str = "",
        protocol: str = "raft",
        quota_bytes: int = QUOTA,
        refusals: Callable[[], dict[str, str]] = dict,
        missing: Callable[[], Sequence[str]] = tuple,
        disk: Callable[[], tuple[int, int, float]] = lambda: (0, 0, 0.0),
    ) -> None:
        """`refusals`, `missing` and `disk` (free, size, p99 of syncs) are reported in the node's
        status (see `NodeStatus`)."""
        self._disk = disk
        self._refusals = refusals
        self._missing = missing
        self._driver = driver
        self._keyspace = keyspace
        self._election_s = election_s
        self._loop = asyncio.get_running_loop()
        self._clients: dict[FrameConnection, ServedClient] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.serving = False
        """Whether clients are admitted: a leader is known, or was a moment ago."""
        self._closed = False
        self._giving_up: asyncio.TimerHandle | None = None
        self._watches = Watches(driver, keyspace)
        self._lists = lists = Lists(driver, keyspace, self._start, self._take)
        self._keeper = KeyspaceLeases(driver, keyspace, clock, quota_bytes)
        renewals = Renewals(driver, election_s, self._start)
        self._handlers: dict[type, Callable[[ServedClient, Any], None]] = {
            requests.IdentifyClient: self._identify,
            requests.Write: self._write,
            requests.RenewLease: renewals.renew,
            requests.LeaseTimesRequest: LeaseLooks(driver, self._start).look,
            requests.WatchRequest: self._watches.add,
            requests.CancelWatch: self._watches.remove,
            requests.StatusRequest: self._inquire,
            requests.Administer: self._administer,
            requests.BackupRequest: lambda client, request: lists.copy(
                client, request, cluster, protocol
            ),
        }
        """Those of requests other than reads."""
        driver.on_role(self._role_changed)
        driver.on_applied(self._keeper.applied)
        driver.on_question(self._keeper.asked)
        status = driver.status()
        self._role_changed(status.role, status.generation, status.leader)

    @property
    def clients(self) -> int:
        return len(self._clients)

    @property
    def watches(self) -> int:
        return len(self._watches)

    # Connections.

    def admit(self, connection: FrameConnection) -> None:
        """Admit a client if this node can serve it; an onlooker at any time."""
        if self._closed:
            connection.refuse(CloseReason.NOT_SERVING, "this node is stopping; ask another")
        elif connection.role == "onlooker":
            connection.welcome(self._take_inquiry, lambda connection, end: None)
        elif not self.serving:
            missing = self._missing()
            text = "this node knows of no leader; ask another"
            if missing:
                text = not_founded(self._driver.id, missing)
            connection.refuse(CloseReason.NOT_SERVING, text)
        else:
            self._clients[connection] = self._served(connection)
            connection.welcome(self._take, self._ended)

    def _served(self, connection: FrameConnection) -> ServedClient:
        return ServedClient(connection, self._loop, self._lists.read, self._lists.drain)

    def close(self) -> None:
        """Close all clients' connections; they go to other nodes."""
        self._closed = True
        self._keeper.stop()
        if self._giving_up is not None:
            self._giving_up.cancel()
        for task in self._tasks:
            task.cancel()
        self._close_connections()

    def _close_connections(self) -> None:
        for connection in [*self._clients]:
            connection.close()

    def _ended(self, connection: FrameConnection, end: object) -> None:
        client = self._clients.pop(connection, None)
        if client is not None:
            self._watches.remove_all(client)

    def _role_changed(self, role: Role, generation: int, leader: str | None) -> None:
        self._keeper.role_changed(generation)
        if self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None
        if leader is not None:
            self.serving = not self._closed
        elif not self.serving:
            return
        elif (status := self._driver.status()).id not in status.membership.everyone:
            self._give_up()  # a removed node hears of no leader again
        else:
            self._giving_up = self._loop.call_later(self._election_s, self._give_up)

    def _give_up(self) -> None:
        self._giving_up = None
        self.serving = False
        if self._clients:
            reason, count = "no leader is known", len(self._clients)
            log.warning("%s", log_line(event="clients_closed", clients=count, reason=reason))
        self._close_connections()

    # Requests.

    def _identify(self, client: ServedClient, request: requests.IdentifyClient) -> None:
        """Set the name under which a client numbers its writes."""
        if not 8 <= len(request.client) <= MAX_NAME:
            text = f"a client's name has 8 to {MAX_NAME} characters"
            client.connection.fail(CloseReason.MALFORMED, text)
            return
        if request.client != client.name:
            now, named = self._loop.time(), client.named
            if len(named) == NAMES and now - named.popleft() <= NAMES_S:
                text = f"a client that has taken {NAMES} names in a minute, and takes another"
                client.connection.fail(CloseReason.OUT_OF_TURN, text)
                return
            named.append(now)
            client.name = request.client

    def _write(self, client: ServedClient, request: Write) -> None:
        name, floor, ids, bodies = client.name, request.floor, request.ids, request.bodies
        if not name or len(ids) != len(bodies) or min(ids) < floor:
            client.connection.fail(CloseReason.OUT_OF_TURN, _flaw_of_write(client, request))
            return
        flaw, role, version = roles.flaw, client.role, self._keyspace.version
        flaws = [flaw(body, role) for body in bodies]
        proposals = self._driver.proposals
        fine = version == NEWEST and not any(flaws)
        if fine and proposals.submit_writes(
            name, floor, ids, bodies, client.settle, client.settle_all
        ):
            return
        for number, body, reason in zip(ids, bodies, flaws, strict=True):
            if reason is not None:
                client.fail(number, ErrorCode.UNUSABLE, reason)
                continue
            if version < NEWEST and roles.is_early(body, version):
                client.fail(number, ErrorCode.UNAVAILABLE, _EARLY.format(version))
                continue
            try:
                proposals.submit(KEYSPACE, body, client.settle, (name, number, floor))
            except DoyenError as error:
                unusable = isinstance(error, ConfigError)
                code = ErrorCode.UNUSABLE if unusable else ErrorCode.UNAVAILABLE
                client.fail(number, code, str(error))

    def _take(self, connection: FrameConnection, frames: Sequence[tuple[int, bytes]] = ()) -> None:
        """Handle a slice of the backlog. The first requests are then on their way to disks and
        peers while the rest is decoded, and a client with many requests does not delay the others.
        Nothing is handled for a client that does not take its answers."""
        client = self._clients.get(connection)
        if client is None:
            return
        backlog, waiting = client.backlog, bool(client.backlog)
        if frames:
            backlog.extend(frames)
            for _, payload in frames:
                client.backlog_bytes += len(payload)
            if len(backlog) > BACKLOG or client.backlog_bytes > BACKLOG_BYTES:
                client.paused = True
                connection.pause()
            if waiting:
                return
        if client.draining:
            return
        room = SLICE
        reads: list[Any] = []
        while backlog and room > 0 and not connection.ending:
            kind, payload = backlog.popleft()
            client.backlog_bytes -= len(payload)
            try:
                request: Any = decode_request(payload) if kind == REQUEST else None
            except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
                _malformed(connection, error)
                break
            if request is None:
                _out_of_turn(connection, kind)
                break
            handler = self._handlers.get(type(request))
            if type(request) not in client.allowed:
                self._forbid(client, request)
            elif handler is None:
                reads.append(request)
            else:
                handler(client, request)
            room -= len(request.ids) if type(request) is Write else 1
        if connection.ending:
            backlog.clear()
            return
        if backlog:
            self._loop.call_soon(self._take, connection)
        if client.paused and len(backlog) <= BACKLOG and client.backlog_bytes <= BACKLOG_BYTES:
            client.paused = False
            connection.resume()
        if reads:
            self._lists.read(client, reads)

    def _forbid(self, client: ServedClient, request: Any) -> None:
        """Report that the client's role does not allow this."""
        text = roles.refusal(client.role, roles.needed_for(request))
        for number in request.ids if type(request) is Write else (request.id,):
            client.fail(number, ErrorCode.UNUSABLE, text)

    def _take_inquiry(
        self, connection: FrameConnection, frames: Sequence[tuple[int, bytes]]
    ) -> None:
        """An onlooker may ask for the node's condition, once at a time: thousands of requests at
        once would delay the clients."""
        if len(frames) > 1:
            text = "an onlooker that does not wait for its answer"
            connection.fail(CloseReason.OUT_OF_TURN, text)
            return
        kind, payload = frames[0]
        try:
            request = decode_request(payload) if kind == REQUEST else None
        except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
            _malformed(connection, error)
            return
        if request is None:
            _out_of_turn(connection, kind)
        elif isinstance(request, requests.StatusRequest):
            self._inquire(self._served(connection), request)
        else:
            connection.fail(CloseReason.OUT_OF_TURN, "an onlooker that does more than inquire")

    def _inquire(self, client: ServedClient, request: requests.StatusRequest) -> None:
        client.send(self.condition(request.id))

    def condition(self, request: int = 0) -> NodeStatus:
        """The state of this node."""
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
            self._refusals(),
            tuple(self._missing()),
            True,
            *self._disk(),
        )

    def _administer(self, client: ServedClient, request: requests.Administer) -> None:
        self._start(self._carry_out(client, request), client)

    async def _carry_out(self, client: ServedClient, request: requests.Administer) -> None:
        try:
            await self._driver.admin.perform(request.action, request.node, request.address)
        except OutcomeUnknown as error:
            client.fail(request.id, ErrorCode.UNKNOWN, str(error))
        except StoreUnavailable as error:
            client.fail(request.id, ErrorCode.UNAVAILABLE, str(error))
        except DoyenError as error:
            client.fail(request.id, ErrorCode.UNUSABLE, str(error))
        else:
            client.send(Administered(request.id))

    def _start(self, work: Coroutine[Any, Any, None], client: ServedClient | None = None) -> None:
        """Run this, for one client if it is named: if it fails, the client's connection ends, since
        the client would wait for an answer."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(partial(self._task_done, client))

    def _task_done(self, client: ServedClient | None, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s", log_line(event="callback_failed"), exc_info=error)
            if client is not None:
                client.connection.abort()


def _flaw_of_write(client: ServedClient, request: Write) -> str:
    ids, bodies = request.ids, request.bodies
    if not client.name:
        return "malformed write: the client has sent no name before it"
    if len(ids) != len(bodies):
        return f"malformed write: {len(ids)} request ids, {len(bodies)} bodies"
    return f"malformed write: request id {min(ids)} is below the floor {request.floor}"


def _malformed(connection: FrameConnection, error: Exception) -> None:
    connection.fail(CloseReason.MALFORMED, f"not a request of this protocol: {error}")


def _out_of_turn(connection: FrameConnection, kind: int) -> None:
    connection.fail(CloseReason.OUT_OF_TURN, f"a frame of kind {kind} from a client")


@cache
def _version() -> str:
    try:
        return version("doyen")
    except PackageNotFoundError:
        return "unknown"
