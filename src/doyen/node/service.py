"""Serves the Store port to clients, on any node of a quorum.

Writes are proposed under the client's own request id, so that one who asks again, here or at
another node, is answered as at first. Reads wait until this node is up to date; all that arrive in
one piece share one question to the leader. Watches are served from what this node has applied.
Renewals go to whoever leads, those of one turn of the loop together.

The node that leads also keeps the clock of leases (`leases`). It begins an era of the keyspace
first; it confirms no renewal before that, and each one only after a majority has shown, since its
arrival, that this node still led. Its `Expire` is void in any other era.

A node that has known no leader for an election timeout serves nobody: it sends clients away, so
that they go where they are served. A connection that ends proves nothing about its client.

Lives on the driver's loop; knows links only as something that frames go to.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from math import isfinite
from typing import Any, Final, Protocol

import msgspec
from msgspec import MsgspecError, Struct

from doyen.clock import Clock
from doyen.consensus.core import Role, Snapshot
from doyen.errors import (
    CommandFailed,
    ConfigError,
    DoyenError,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
)
from doyen.node.driver import Answer, Status
from doyen.node.leases import LeaseClock
from doyen.node.machine import KEYSPACE
from doyen.node.proposals import Forgotten, Request, Settle
from doyen.quorum import requests as words
from doyen.quorum.keyspace import (
    Advance,
    Begin,
    Create,
    Delete,
    Enqueue,
    Expire,
    Grant,
    Keyspace,
    Put,
    Record,
    Refused,
    Revoke,
    decode_command,
    decode_result,
    encode,
)
from doyen.quorum.requests import (
    ANSWER,
    MAX_KEY,
    MAX_TTL_S,
    MAX_VALUE,
    MIN_TTL_S,
    REQUEST,
    Arranged,
    Changed,
    Condition,
    Copied,
    Failed,
    Found,
    Listed,
    Renewed,
    Trouble,
    Watching,
    Wrote,
    decode_request,
)
from doyen.quorum.wire import Fault

__all__ = ["Limits", "Service"]

log = logging.getLogger("doyen.node")

PIECE: Final = 1 << 20
"""About how many bytes of a list go into one frame."""
GRAIN_S: Final = 1e-3
AGAIN_S: Final = 0.01
"""Pause before something is put to the quorum again."""

_CONFIRMED, _GONE, _AGAIN = 0, 1, 2


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds on what one client may have."""

    watches: int = 100_000
    name: int = 64


class Driver(Protocol):
    """What is needed of a node's driver."""

    @property
    def role(self) -> Role: ...

    def status(self) -> Status: ...

    def submit(
        self, target: int, body: bytes, settle: Settle, *, request: Request | None = None
    ) -> None: ...

    def when_current(self, call: Callable[[], None]) -> None: ...

    async def ask_leader(self, question: bytes) -> bytes: ...

    async def arrange(self, what: str, node: str, address: str) -> None: ...

    def copy(self) -> tuple[Snapshot, Iterator[bytes]]: ...

    def on_role(self, callback: Callable[[Role, int, str | None], None]) -> None: ...

    def on_applied(self, callback: Callable[[int], None]) -> None: ...

    def on_question(self, handler: Callable[[bytes, Answer], None]) -> None: ...


class Link(Protocol):
    """What is needed of a client's connection."""

    @property
    def closed(self) -> bool: ...

    def welcome(self, on_frames: Any, on_end: Any) -> None: ...

    def refuse(self, fault: Fault, text: str) -> None: ...

    def send(self, kind: int, *parts: bytes) -> bool: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...

    def fault(self, fault: Fault, text: str) -> None: ...


class _Client:
    """One connection."""

    __slots__ = ("link", "name", "watches")

    def __init__(self, link: Link) -> None:
        self.link = link
        self.name = ""
        self.watches: dict[int, str] = {}

    def tell(self, answer: words.Answer) -> None:
        link = self.link
        if not link.send(ANSWER, encode(answer)) and not link.closed:
            link.abort()  # it does not read what it asks for

    def fail(self, request: int, trouble: Trouble, text: str) -> None:
        self.tell(Failed(request, trouble, text))


class Service:
    """The Store port on one node."""

    def __init__(
        self,
        driver: Driver,
        keyspace: Keyspace,
        clock: Clock,
        *,
        election_s: float = 1.0,
        cluster: str = "",
        protocol: str = "raft",
        limits: Limits = Limits(),  # noqa: B008  (frozen)
    ) -> None:
        self._driver = driver
        self._keyspace = keyspace
        self._limits = limits
        self._election_s = election_s
        self.cluster, self.protocol = cluster, protocol
        self._loop = asyncio.get_running_loop()
        self._clients: dict[Link, _Client] = {}
        self._watchers: dict[str, dict[tuple[_Client, int], None]] = {}
        self._told = keyspace.revision
        self._renewals: dict[int, list[tuple[_Client, int]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._serving = False
        self._closed = False
        self._giving_up: asyncio.TimerHandle | None = None
        self._keeper = _Keeper(driver, keyspace, clock)
        self._handlers: dict[type, Callable[[_Client, Any], None]] = {
            words.Hello: self._hello,
            words.Write: self._write,
            words.Watch: self._watch,
            words.Unwatch: self._unwatch,
            words.Renew: self._renew,
            words.Inquire: self._inquire,
            words.Arrange: self._arrange,
            words.Copy: self._copy,
        }
        self._reads: dict[type, Callable[[_Client, Any], None]] = {
            words.Get: self._get,
            words.Head: self._head,
            words.Ahead: self._ahead,
            words.Scan: self._scan,
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

    def admit(self, link: Link) -> None:
        """Let a client in, if this node can serve it."""
        if self._closed:
            link.refuse(Fault.NOT_SERVING, "this node is stopping; ask another")
        elif not self._serving:
            link.refuse(Fault.NOT_SERVING, "this node knows of no leader; ask another")
        else:
            self._clients[link] = _Client(link)
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

    def _ended(self, link: Link, end: object) -> None:
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
        elif self._serving:
            self._giving_up = self._loop.call_later(self._election_s, self._give_up)

    def _give_up(self) -> None:
        self._giving_up = None
        self._serving = False
        if self._clients:
            log.warning("no leader is known: sending %d clients away", len(self._clients))
        self._send_away()

    # What clients ask.

    def _take(self, link: Link, frames: Sequence[tuple[int, bytes]]) -> None:
        client = self._clients.get(link)
        if client is None:
            return
        reads: list[Any] = []
        for kind, payload in frames:
            if kind != REQUEST:
                link.fault(Fault.OUT_OF_TURN, f"a frame of kind {kind} from a client")
                return
            try:
                request = decode_request(payload)
            except (MsgspecError, UnicodeDecodeError) as error:
                link.fault(Fault.MALFORMED, f"not a request of this protocol: {error}")
                return
            handler = self._handlers.get(type(request))
            if handler is None:
                reads.append(request)
            else:
                handler(client, request)
        if reads:
            # One round for all of them, and it begins after the last of them has arrived.
            try:
                self._driver.when_current(partial(self._read, client, reads))
            except DoyenError as error:
                for request in reads:
                    client.fail(request.id, Trouble.UNAVAILABLE, str(error))

    def _hello(self, client: _Client, request: words.Hello) -> None:
        if not 8 <= len(request.client) <= self._limits.name:
            client.link.fault(Fault.MALFORMED, "a client's name has 8 to 64 characters")
            return
        client.name = request.client

    def _write(self, client: _Client, request: words.Write) -> None:
        if not client.name or request.id < 1 or request.floor > request.id:
            client.link.fault(Fault.OUT_OF_TURN, "a write that nobody could count")
            return
        flaw = _flaw(request.body)
        if flaw is not None:
            client.fail(request.id, Trouble.UNUSABLE, flaw)
            return
        try:
            self._driver.submit(
                KEYSPACE,
                request.body,
                partial(_settle, client, request.id),
                request=(client.name, request.id, request.floor),
            )
        except (DoyenError, ConfigError) as error:
            trouble = Trouble.UNUSABLE if isinstance(error, ConfigError) else Trouble.UNAVAILABLE
            client.fail(request.id, trouble, str(error))

    def _read(self, client: _Client, reads: list[Any]) -> None:
        for request in reads:
            if client.link.closed:
                return
            self._reads[type(request)](client, request)

    def _get(self, client: _Client, request: words.Get) -> None:
        client.tell(Found(request.id, self._keyspace.get(request.key)))

    def _head(self, client: _Client, request: words.Head) -> None:
        client.tell(Found(request.id, self._keyspace.head(request.line)))

    def _ahead(self, client: _Client, request: words.Ahead) -> None:
        ticket = self._keyspace.get(request.ticket)
        if ticket is None:
            text = f"{request.ticket} is no longer in the line"
            client.fail(request.id, Trouble.TICKET_GONE, text)
        else:
            client.tell(Found(request.id, self._keyspace.ahead(ticket)))

    def _scan(self, client: _Client, request: words.Scan) -> None:
        pieces = _pieces(self._keyspace.list(request.prefix))
        if len(pieces) == 1:
            client.tell(Listed(request.id, pieces[0], False))
        else:
            self._start(self._have_listed(client, request.id, pieces))

    async def _have_listed(
        self, client: _Client, request: int, pieces: Sequence[list[Record]]
    ) -> None:
        """Piece by piece, no faster than the client reads."""
        for number, piece in enumerate(pieces, 1):
            await client.link.drain()
            if client.link.closed:
                return
            client.tell(Listed(request, piece, number < len(pieces)))
            await asyncio.sleep(0)

    def _inquire(self, client: _Client, request: words.Inquire) -> None:
        client.tell(self.condition(request.id))

    def condition(self, request: int = 0) -> Condition:
        """How this node is doing."""
        status, keyspace = self._driver.status(), self._keyspace
        members = status.membership
        return Condition(
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
        )

    # Orders, and copies for backups.

    def _arrange(self, client: _Client, request: words.Arrange) -> None:
        self._start(self._have_arranged(client, request))

    async def _have_arranged(self, client: _Client, request: words.Arrange) -> None:
        try:
            await self._driver.arrange(request.what, request.node, request.address)
        except OutcomeUnknown as error:
            client.fail(request.id, Trouble.UNKNOWN, str(error))
        except StoreUnavailable as error:
            client.fail(request.id, Trouble.UNAVAILABLE, str(error))
        except DoyenError as error:
            client.fail(request.id, Trouble.UNUSABLE, str(error))
        else:
            client.tell(Arranged(request.id))

    def _copy(self, client: _Client, request: words.Copy) -> None:
        try:
            self._driver.when_current(lambda: self._start(self._have_copied(client, request.id)))
        except DoyenError as error:
            client.fail(request.id, Trouble.UNAVAILABLE, str(error))

    async def _have_copied(self, client: _Client, request: int) -> None:
        """Piece by piece, no faster than the client reads, while commands go on being applied."""
        snapshot, pieces = self._driver.copy()
        origin = words.Origin(self.cluster, self._driver.status().id, self.protocol, snapshot)
        client.tell(Copied(request, origin, b"", True))
        for piece in pieces:
            await client.link.drain()
            if client.link.closed:
                return
            client.tell(Copied(request, None, piece, True))
            await asyncio.sleep(0)
        client.tell(Copied(request, None, b"", False))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # Watches.

    def _watch(self, client: _Client, request: words.Watch) -> None:
        if request.id in client.watches:
            return
        if len(client.watches) >= self._limits.watches:
            text = f"one connection may have {self._limits.watches} watches; open another store"
            client.fail(request.id, Trouble.UNUSABLE, text)
            return
        self._notify()
        client.watches[request.id] = request.scope
        self._watchers.setdefault(request.scope, {})[client, request.id] = None
        client.tell(Watching(request.id, self._told))
        if request.since >= 0 and self._keyspace.changed(request.scope, request.since):
            client.tell(Changed([request.id], self._told))

    def _unwatch(self, client: _Client, request: words.Unwatch) -> None:
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
        changes = self._keyspace.changes(since)
        if changes is None or since > self._told:
            scopes = [*self._watchers]
        else:
            scopes = [*_scopes(changes, self._watchers)]
        told: dict[_Client, list[int]] = {}
        for scope in scopes:
            for client, watch in self._watchers[scope]:
                told.setdefault(client, []).append(watch)
        for client, watches in told.items():
            client.tell(Changed(watches, self._told))

    # Renewals, on the node that was asked.

    def _renew(self, client: _Client, request: words.Renew) -> None:
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
                if verdict == _AGAIN and not late:
                    if askers := [each for each in askers if not each[0].link.closed]:
                        again[lease] = askers
                    continue
                for client, request in askers:
                    if verdict == _CONFIRMED:
                        client.tell(Renewed(request))
                    elif verdict == _GONE:
                        client.fail(request, Trouble.LEASE_GONE, f"the lease {lease} has ended")
                    else:
                        client.fail(request, Trouble.UNAVAILABLE, why)
            waiting = again
            if waiting:
                await asyncio.sleep(AGAIN_S)

    async def _verdicts(self, leases: list[int]) -> tuple[list[int], str]:
        try:
            verdicts = _decode_leases(await self._driver.ask_leader(encode(leases)))
        except (DoyenError, MsgspecError) as error:
            return [_AGAIN] * len(leases), str(error)
        if len(verdicts) != len(leases):
            verdicts = [_AGAIN] * len(leases)
        return verdicts, "the leader has changed, or is about to end this lease"


class _Keeper:
    """The leases' keeper, while this node leads: an era, a clock, renewals, ends."""

    def __init__(self, driver: Driver, keyspace: Keyspace, clock: Clock) -> None:
        self._driver = driver
        self._keyspace = keyspace
        self._now = clock.now
        self._loop = asyncio.get_running_loop()
        self._leading = False
        self._generation = 0
        self._beginning = 0
        """The era that we have proposed to begin."""
        self._era = 0
        self._clock: LeaseClock | None = None
        """Set while we lead and the keyspace is in our era."""
        self._early: list[tuple[list[int], float, Answer]] = []
        """Renewals that arrived before our era has begun."""
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False

    def stop(self) -> None:
        self._stopped = True
        self._leave()

    def role_changed(self, generation: int) -> None:
        leading = self._driver.role is Role.LEADING and not self._stopped
        if self._leading and not (leading and generation == self._generation):
            self._leave()
        if leading and not self._leading:
            self._leading, self._generation = True, generation
            self._begin()

    def _leave(self) -> None:
        self._leading = False
        self._clock = None
        self._beginning = 0
        self._set_timer()
        early, self._early = self._early, []
        for leases, _, answer in early:
            answer(encode([_AGAIN] * len(leases)))

    def _begin(self) -> None:
        """Begin an era of our own."""
        self._clock = None
        self._beginning = era = self._keyspace.era + 1
        self._submit(Begin(era), partial(self._begun, era))

    def _begun(self, era: int, result: Any, error: BaseException | None) -> None:
        if not self._leading or era != self._beginning:
            return
        if error is not None or isinstance(decode_result(result), Refused):
            # Somebody who led before us has begun one meanwhile, or nobody knows, or the disk is
            # full and would refuse us again at once.
            self._loop.call_later(AGAIN_S, self._begin_again, era)
            return
        self._beginning = 0
        self._era = era
        self._clock = LeaseClock(self._keyspace)
        self._take_in()
        early, self._early = self._early, []
        for leases, arrived_at, answer in early:
            self._renew(leases, arrived_at, answer)

    def _begin_again(self, era: int) -> None:
        if self._leading and era == self._beginning:
            self._begin()

    def applied(self) -> None:
        """The keyspace has moved on."""
        if self._clock is None:
            return
        if self._keyspace.era != self._era:
            self._begin()
            return
        self._clock.settle()
        self._take_in()

    def _take_in(self) -> None:
        clock = self._clock
        if clock is not None:
            if clock.take_in(self._now()):
                self._loop.call_soon(self._take_in)
            self._set_timer()

    # Renewals.

    def asked(self, question: bytes, answer: Answer) -> None:
        """A node passes renewals on to us, who lead."""
        arrived_at = self._now()
        try:
            leases = _decode_leases(question)
        except MsgspecError:
            answer(b"")
            return
        if self._clock is None:
            if self._leading:
                self._early.append((leases, arrived_at, answer))
            else:
                answer(encode([_AGAIN] * len(leases)))
            return
        self._renew(leases, arrived_at, answer)

    def _renew(self, leases: list[int], arrived_at: float, answer: Answer) -> None:
        clock = self._clock
        if clock is None:
            answer(encode([_AGAIN] * len(leases)))
            return
        in_time = [clock.renew(lease, arrived_at) for lease in leases]

        def confirm() -> None:
            if self._clock is not clock or self._keyspace.era != self._era:
                answer(encode([_AGAIN] * len(leases)))
                return
            answer(
                encode(
                    [
                        _CONFIRMED
                        if timely and clock.confirmed(lease)
                        else _GONE
                        if self._keyspace.lease(lease) is None
                        else _AGAIN
                        for lease, timely in zip(leases, in_time, strict=True)
                    ]
                )
            )

        try:
            self._driver.when_current(confirm)
        except DoyenError:
            answer(encode([_AGAIN] * len(leases)))

    # Ends.

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._clock is not None and isfinite(at := self._clock.next_deadline):
            wait_s = max(at - self._now(), GRAIN_S)
            self._timer = self._loop.call_later(wait_s, self._ring)

    def _ring(self) -> None:
        # What has arrived is read, and handed in, before anything is found to be over.
        self._timer = self._loop.call_later(0, self._ring_again)

    def _ring_again(self) -> None:
        self._timer = self._loop.call_later(0, self._end_those_due)

    def _end_those_due(self) -> None:
        clock = self._clock
        if clock is None:
            return
        while leases := clock.due(self._now()):
            self._submit(Expire(self._era, leases), partial(self._ended, clock))
        self._set_timer()

    def _ended(self, clock: LeaseClock, result: Any, error: BaseException | None) -> None:
        """The end of some leases was agreed on, or not. If not, they are neither renewed nor
        ended in this era, so we begin another, in which all get their time anew."""
        if self._clock is not clock:
            return
        if error is not None or isinstance(decode_result(result), Refused):
            self._begin()
        else:
            clock.settle()

    def _submit(self, command: Begin | Expire, settle: Settle) -> None:
        try:
            self._driver.submit(KEYSPACE, encode(command), settle)
        except DoyenError as error:
            self._loop.call_later(0.1, settle, None, error)


_decode_leases: Callable[[bytes], list[int]] = msgspec.msgpack.Decoder(list[int]).decode


def _settle(client: _Client, request: int, result: Any, error: BaseException | None) -> None:
    """Tell a client what became of its write."""
    if error is None:
        client.tell(Wrote(request, result))
        return
    if isinstance(error, Forgotten):
        trouble = Trouble.FORGOTTEN
    elif isinstance(error, OutcomeUnknown):
        trouble = Trouble.UNKNOWN
    elif isinstance(error, StoreError):
        trouble = Trouble.UNAVAILABLE
    else:
        trouble = Trouble.UNUSABLE if isinstance(error, CommandFailed) else Trouble.UNKNOWN
    client.fail(request, trouble, str(error))


def _flaw(body: bytes) -> str | None:
    """Why a client may not have this carried out."""
    try:
        command = decode_command(body)
    except (MsgspecError, UnicodeDecodeError) as error:
        return f"not a command of this version of doyen: {error}"
    match command:
        case Create(key=key, value=value) | Put(key=key, value=value):
            return _flaw_of_entry(key, value)
        case Enqueue(line=key, value=value):
            return _flaw_of_entry(key, value)
        case Grant(ttl_s=ttl_s):
            if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
                return f"a ttl is between {MIN_TTL_S:g} and {MAX_TTL_S:g} s, not {ttl_s:g}"
        case Advance(floor=floor, by=by):
            if not 0 <= floor < 2**62 or by:
                return f"a token floor is between 0 and 2^62, not {floor}"
        case Revoke() | Delete():
            pass
        case _:
            return "that is for the quorum's leader to say"
    return None


def _flaw_of_entry(key: str, value: bytes) -> str | None:
    if not 0 < len(key) <= MAX_KEY:
        return f"a key has 1 to {MAX_KEY} characters, not {len(key)}"
    if len(value) > MAX_VALUE:
        return (
            f"a value has at most {MAX_VALUE} bytes, not {len(value)}: keep large data elsewhere,"
            " and say here where it is"
        )
    return None


def _pieces(records: list[Record]) -> list[list[Record]]:
    """A list, cut where a frame would become large; one piece at least."""
    pieces: list[list[Record]] = [[]]
    size = 0
    for record in records:
        if size > PIECE:
            pieces.append([])
            size = 0
        pieces[-1].append(record)
        size += len(record.key) + len(record.value) + 32
    return pieces


def _scopes(changes: Any, watched: dict[str, Any]) -> dict[str, None]:
    """The watched scopes that these keys lie at or under."""
    seen: set[str] = set()
    found: dict[str, None] = {}
    for key in changes:
        scope = key
        while scope and scope not in seen:
            seen.add(scope)
            if scope in watched:
                found[scope] = None
            scope = scope.rpartition("/")[0]
    return found


def _version() -> str:
    try:
        return version("doyen")
    except PackageNotFoundError:
        return "unknown"
