"""etcd's services on one node, apart from how requests arrive.

    keys        Range, Put, DeleteRange, Txn, Compact
    leases      LeaseGrant, LeaseRevoke, LeaseKeepAlive, LeaseTimeToLive, LeaseLeases
    watches     Watch (`watches`)
    elections   Election and Lock, built on keys, leases and watches (`elections`)
    cluster     MemberList, Status, Alarm, Authenticate, AuthStatus

Writes are proposed on this node and go to the leader as those of doyen's own clients do. A read
waits until this node shows every write that was acknowledged before it, unless it is serializable.
Leases are leases of the keyspace: the node that leads keeps their time.

`methods` has a handler for each method. Everything else is not offered. Lives on the driver's event
loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import lru_cache
from hashlib import sha256
from random import SystemRandom
from typing import Any, Final

from msgspec import MsgspecError

from doyen.errors import DoyenError
from doyen.quorum.consensus.core import Role
from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.errors import (
    LEADERLESS,
    LEASE_NOT_FOUND,
    LEASE_TOO_LONG,
    NO_LEADER,
    NO_SPACE,
    NO_USERS,
    REFUSALS,
    STOPPED,
    TIMED_OUT,
    Code,
    EtcdError,
    fail,
    translated,
)
from doyen.quorum.etcd_api.messages import (
    delete_request,
    put_request,
    range_request,
    response,
    txn_request,
)
from doyen.quorum.etcd_api.watches import PROGRESS_S, WatchHub, WatchStream
from doyen.quorum.keyspace.commands import (
    EtcdApply,
    EtcdCompact,
    EtcdDone,
    EtcdGrant,
    EtcdRefused,
    EtcdRevoke,
    KeyspaceCommand,
    Put,
    QuotaExceeded,
    decode_result,
    encode,
)
from doyen.quorum.keyspace.etcd_requests import EtcdRequests, EtcdResults, KeysRead
from doyen.quorum.keyspace.etcd_state import RequestRefused, only_reads
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.keyspace.versions import ETCD
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.lease_keeper import LEFT, Renewals, decode_left
from doyen.quorum.node.membership import Members
from doyen.quorum.node.replicated import KEYSPACE
from doyen.quorum.protocol.requests import ErrorCode, RenewLease, Response

VERSION: Final = "3.5.28"
"""The version of etcd whose API this is, which clients compare."""
MAX_TTL: Final = 9_000_000_000
"""etcd's longest lease, in seconds."""
LARGE: Final = 2000
"""The response of more keys than this is put together on another thread."""
DOORS: Final = "nodes/{}/etcd"
"""The key, in doyen's own keyspace, of the URL under which a node serves this API."""
REGISTER_RETRY_S: Final = 0.2

Unary = Callable[[Any], Awaitable[Any]]
Streaming = Callable[[AsyncIterator[Any]], AsyncIterator[Any]]


class EtcdApi:
    """The services of one node."""

    def __init__(
        self,
        driver: Driver,
        keyspace: Keyspace,
        members: Members,
        *,
        election_s: float = 1.0,
        url: str = "",
        progress_s: float = PROGRESS_S,
    ) -> None:
        """`url` is where clients reach this API on this node."""
        self._driver = driver
        self._keyspace = keyspace
        self._members = members
        self._election_s = election_s
        self._url = url
        self._progress_s = progress_s
        self._min_ttl = math.ceil(1.5 * election_s)
        self._random = SystemRandom()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._renewals = Renewals(driver, election_s, self.start)
        self._streams: dict[WatchStream, None] = {}
        self._giving_up: asyncio.TimerHandle | None = None
        self._closed = False
        self._watch_header_of: Any = None
        self._watch_header_bytes = b""
        self._seen = 0
        """The latest revision that a response has named. On a follower it may be later than what
        this node has applied."""
        self.hub = WatchHub(driver, keyspace)
        self.unary: dict[rpc.EtcdMethod, Unary] = {
            rpc.RANGE: self.range,
            rpc.PUT: self.put,
            rpc.DELETE_RANGE: self.delete_range,
            rpc.TXN: self.txn,
            rpc.COMPACT: self._compact,
            rpc.GRANT: self.grant,
            rpc.REVOKE: self._revoke,
            rpc.TIME_TO_LIVE: self._time_to_live,
            rpc.LEASES: self._leases,
            rpc.MEMBER_LIST: self._member_list,
            rpc.STATUS: self._status,
            rpc.ALARM: self._alarm,
            rpc.AUTHENTICATE: self._authenticate,
            rpc.AUTH_STATUS: self._auth_status,
        }
        self.streaming: dict[rpc.EtcdMethod, Streaming] = {
            rpc.KEEP_ALIVE: self._keep_alive,
            rpc.WATCH: self._watch,
        }
        self.encoded: dict[rpc.EtcdMethod, Streaming] = {rpc.WATCH: self._watch_encoded}
        """Streams that are also offered as the bytes of messages."""
        driver.on_role(self._role_changed)
        self._leader_is(driver.leader)
        if url:
            self.start(self._register())

    def close(self) -> None:
        self._closed = True
        self._driver.off_role(self._role_changed)
        if self._giving_up is not None:
            self._giving_up.cancel()
        for task in self._tasks:
            task.cancel()
        self._end_streams(STOPPED)

    def start(self, work: Any) -> None:
        if self._closed:
            work.close()
            return
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _role_changed(self, role: Role, generation: int, leader: str | None) -> None:
        self._leader_is(leader)

    def _leader_is(self, leader: str | None) -> None:
        """When no leader is known for an election timeout, streams are ended, so that their clients
        go to another node; and again after each further one, for clients that came meanwhile."""
        if leader is None:
            if self._giving_up is None:
                self._giving_up = self._loop.call_later(self._election_s, self._give_up)
        elif self._giving_up is not None:
            self._giving_up.cancel()
            self._giving_up = None

    def _give_up(self) -> None:
        self._giving_up = self._loop.call_later(self._election_s, self._give_up)
        self._end_streams(LEADERLESS)

    def _end_streams(self, error: tuple[Code, str]) -> None:
        for stream in self._streams:
            stream.end(fail(error))
        self.hub.fail(fail(error))

    # Proposals and reads.

    def header(self, revision: int = 0) -> Any:
        """The header of a response."""
        driver = self._driver
        self._seen = max(self._seen, revision, self._keyspace.etcd.revision)
        return rpc.ResponseHeader(
            cluster_id=_id(self._members.cluster_id),
            member_id=self._member_id(driver.id),
            revision=revision or self._seen,
            raft_term=driver.generation,
        )

    def _watch_header(self, revision: int) -> bytes:
        """The beginning of a response to a watch."""
        current = revision, self._driver.generation, self._members.cluster_id
        if self._watch_header_of != current:
            self._watch_header_of = current
            response = rpc.WATCH.response(header=self.header(revision))
            self._watch_header_bytes = response.SerializeToString()
        return self._watch_header_bytes

    def _member_id(self, node: str) -> int:
        return _id(self._members.ids.get(node) or node)

    async def propose(self, command: KeyspaceCommand) -> EtcdDone:
        """Have a command carried out. Raises `EtcdError`."""
        self._check_version()
        try:
            result = decode_result(await self._driver.propose(KEYSPACE, encode(command)))
        except DoyenError as error:
            raise translated(error) from error
        if isinstance(result, EtcdRefused):
            raise fail(REFUSALS[result.refusal])
        if isinstance(result, QuotaExceeded):
            raise fail(NO_SPACE)
        assert isinstance(result, EtcdDone)
        return result

    def _check_version(self) -> None:
        version = self._keyspace.version
        if version < ETCD:
            raise EtcdError(
                Code.UNAVAILABLE,
                f"the cluster is at version {version} of its state, which has no etcd keyspace: the"
                " version rises when all members are connected and run this release",
            )
        if not self._driver.membership.cluster:  # clients refuse a cluster whose id changes
            raise EtcdError(Code.UNAVAILABLE, "the cluster is being founded and has no id yet")

    async def current(self) -> None:
        """Wait until this node shows every write that was acknowledged before. Raises
        `EtcdError`."""
        self._check_version()
        try:
            await self._driver.barrier()
        except DoyenError as error:
            raise translated(error) from error

    async def change(self, request: EtcdRequests) -> EtcdResults:
        """Carry out a request that may change something."""
        done = await self.propose(EtcdApply(request))
        assert done.result is not None
        return done.result

    def read(self, request: EtcdRequests) -> EtcdResults:
        """Carry out a request that only reads, on what this node has applied."""
        try:
            return self._keyspace.etcd.apply(request)
        except RequestRefused as refused:
            raise fail(REFUSALS[refused.refusal]) from None

    async def _answer(self, result: EtcdResults) -> Any:
        header = self.header(result.revision)
        if isinstance(result, KeysRead) and len(result.records) > LARGE:
            # Heartbeats must not wait for it.
            return await asyncio.to_thread(response, result, header)
        return response(result, header)

    # Keys.

    async def range(self, message: Any) -> Any:
        request = range_request(message)
        if not message.serializable:
            await self.current()
        return await self._answer(self.read(request))

    async def put(self, message: Any) -> Any:
        return await self._answer(await self.change(put_request(message)))

    async def delete_range(self, message: Any) -> Any:
        return await self._answer(await self.change(delete_request(message)))

    async def txn(self, message: Any) -> Any:
        request = txn_request(message)
        if only_reads(request):
            await self.current()
            return await self._answer(self.read(request))
        return await self._answer(await self.change(request))

    async def _compact(self, message: Any) -> Any:
        done = await self.propose(EtcdCompact(message.revision))
        return rpc.COMPACT.response(header=self.header(done.revision))

    # Leases.

    async def grant(self, message: Any) -> Any:
        if message.TTL > MAX_TTL:
            raise fail(LEASE_TOO_LONG)
        ttl = max(message.TTL, self._min_ttl)
        lease = message.ID or self._random.randrange(1, 1 << 63)
        done = await self.propose(EtcdGrant(lease, float(ttl)))
        return rpc.GRANT.response(header=self.header(done.revision), ID=lease, TTL=ttl)

    async def _revoke(self, message: Any) -> Any:
        done = await self.propose(EtcdRevoke(message.ID))
        return rpc.REVOKE.response(header=self.header(done.revision))

    async def _number(self, lease: int) -> int | None:
        """The number of a lease in the keyspace; None if it has ended."""
        number = self._keyspace.etcd.leases.get(lease)
        if number is None:  # it may have been granted by way of another node
            await self.current()
            number = self._keyspace.etcd.leases.get(lease)
        return number

    async def renew(self, lease: int) -> int:
        """Renew a lease and return its ttl; 0 if it has ended."""
        number = await self._number(lease)
        if number is None:
            return 0
        ttl_s = self._keyspace.lease(number) or 0.0
        asker = _Asker(self._loop.create_future())
        self._renewals.renew(asker, RenewLease(0, number))
        return int(ttl_s) if await asker.outcome else 0

    async def _keep_alive(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for message in requests:
            header = self.header()  # before the renewal, which may be later than this revision
            ttl = await self.renew(message.ID)
            yield rpc.KEEP_ALIVE.response(header=header, ID=message.ID, TTL=ttl)

    async def _time_to_live(self, message: Any) -> Any:
        await self.current()
        lease = message.ID
        number = self._keyspace.etcd.leases.get(lease)
        granted = None if number is None else self._keyspace.lease(number)
        if granted is None:
            return rpc.TIME_TO_LIVE.response(header=self.header(), ID=lease, TTL=-1)
        try:
            (left,) = decode_left(await self._driver.ask_leader(encode({LEFT: [number]})))
        except (DoyenError, MsgspecError, ValueError) as error:
            raise EtcdError(Code.UNAVAILABLE, f"{TIMED_OUT[1]}: {error}") from error
        return rpc.TIME_TO_LIVE.response(
            header=self.header(),
            ID=lease,
            TTL=int(granted if left is None else left),
            grantedTTL=int(granted),
            keys=self._keyspace.etcd.bound(lease) if message.keys else (),
        )

    async def _leases(self, message: Any) -> Any:
        await self.current()
        leases = [rpc.LeaseStatus(ID=lease) for lease in self._keyspace.etcd.leases]
        return rpc.LEASES.response(header=self.header(), leases=leases)

    # Watches.

    async def _watch(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async with aclosing(self._watch_encoded(requests)) as responses:  # type: ignore[type-var]
            async for each in responses:
                yield rpc.WATCH.response.FromString(each)

    async def _watch_encoded(self, requests: AsyncIterator[Any]) -> AsyncIterator[bytes]:
        stream = WatchStream(self.hub, self._keyspace, self._watch_header, self._progress_s)
        self._streams[stream] = None
        reading = self._loop.create_task(self._take(requests, stream))
        try:
            async with aclosing(stream.responses()) as responses:  # type: ignore[type-var]
                async for each in responses:
                    yield each
        finally:
            reading.cancel()
            del self._streams[stream]
            stream.close()

    async def _take(self, requests: AsyncIterator[Any], stream: WatchStream) -> None:
        """The client may stop sending and still receive."""
        try:
            async for message in requests:
                # A watch that is created now must not tell of writes that were acknowledged before.
                await self.current()
                stream.take(message)
                await stream.has_room()
        except EtcdError as error:
            stream.end(error)

    # The cluster.

    async def _member_list(self, message: Any) -> Any:
        membership = self._driver.membership
        members = [
            rpc.Member(
                ID=self._member_id(node),
                name=node,
                peerURLs=[f"http://{membership.addresses.get(node, '')}"],
                clientURLs=self._urls(node),
                isLearner=node in membership.learners,
            )
            for node in membership.everyone
        ]
        return rpc.MEMBER_LIST.response(header=self.header(), members=members)

    def _urls(self, node: str) -> list[str]:
        if node == self._driver.id:
            return [self._url] if self._url else []
        door = self._keyspace.get(DOORS.format(node))
        return [door.value.decode()] if door is not None else []

    async def _register(self) -> None:
        """Record under which URL this node serves the API, for the member lists of the others."""
        key, url = DOORS.format(self._driver.id), self._url.encode()
        while True:
            with suppress(DoyenError):
                await self._driver.barrier()
                known = self._keyspace.get(key)
                if known is not None and known.value == url:
                    return
                put = Put(key, url, 0 if known is None else known.version)
                await self._driver.propose(KEYSPACE, encode(put))
                continue
            await asyncio.sleep(REGISTER_RETRY_S)

    async def _status(self, message: Any) -> Any:
        status, keyspace = self._driver.status(), self._keyspace
        errors = [] if status.leader else [NO_LEADER[1]]
        if keyspace.alarm:
            errors.append(f"memberID:{self._member_id(status.id)} alarm:NOSPACE ")
        return rpc.STATUS.response(
            header=self.header(),
            version=VERSION,
            dbSize=keyspace.bytes,
            dbSizeInUse=keyspace.bytes,
            leader=self._member_id(status.leader) if status.leader else 0,
            raftIndex=status.commit,
            raftTerm=status.generation,
            raftAppliedIndex=status.applied,
            errors=errors,
            isLearner=status.id in status.membership.learners,
        )

    async def _alarm(self, message: Any) -> Any:
        """Alarms can be read. They end by themselves when there is room again."""
        if message.action:
            raise EtcdError(Code.UNIMPLEMENTED, "alarms are not set or ended by requests")
        alarms = []
        if self._keyspace.alarm:
            node = self._member_id(self._driver.id)
            alarms.append(rpc.AlarmMember(memberID=node, alarm=rpc.NOSPACE))
        return rpc.ALARM.response(header=self.header(), alarms=alarms)

    async def _authenticate(self, message: Any) -> Any:
        """Clients that have a password then go on without one, as with an etcd without users."""
        raise fail(NO_USERS)

    async def _auth_status(self, message: Any) -> Any:
        return rpc.AUTH_STATUS.response(header=self.header(), enabled=False)

    async def session(self, lease: int, ttl: int = 60) -> int:
        """The lease for an election or a lock: renewed once or, if it is 0, a new one."""
        if not lease:
            granted = await self.grant(rpc.GRANT.request(TTL=ttl))
            return int(granted.ID)
        if not await self.renew(lease):
            raise fail(LEASE_NOT_FOUND)
        return lease


class _Open:
    closed = False


class _Asker:
    """Waits for one renewal."""

    def __init__(self, outcome: asyncio.Future[bool]) -> None:
        self.outcome = outcome
        """Whether the lease was renewed; it has ended otherwise."""
        self.connection = _Open()

    def send(self, answer: Response) -> None:
        if not self.outcome.done():
            self.outcome.set_result(True)

    def fail(self, request: int, code: ErrorCode, text: str) -> None:
        if self.outcome.done():
            return
        if code is ErrorCode.LEASE_GONE:
            self.outcome.set_result(False)
        else:
            self.outcome.set_exception(EtcdError(Code.UNAVAILABLE, f"{TIMED_OUT[1]}: {text}"))


@lru_cache(maxsize=256)
def _id(text: str) -> int:
    """etcd's ids are numbers of 64 bits."""
    return int.from_bytes(sha256(text.encode()).digest()[:8])
