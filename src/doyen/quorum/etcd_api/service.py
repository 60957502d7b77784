"""etcd's services on one node, apart from how requests arrive.

    keys        Range, Put, DeleteRange, Txn, Compact
    leases      LeaseGrant, LeaseRevoke, LeaseKeepAlive, LeaseTimeToLive, LeaseLeases
    watches     Watch (`watches`)
    elections   Election and Lock, built on keys, leases and watches (`elections`)
    cluster     MemberList, Status, Alarm, Authenticate, AuthStatus

Each of them has a handler for each of its methods; `EtcdApi` has all of them. Everything else is
not offered. Leases are leases of the keyspace: the node that leads keeps their time.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from random import SystemRandom
from typing import Any, Final

from msgspec import MsgspecError

from doyen.errors import DoyenError
from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.elections import Elections
from doyen.quorum.etcd_api.errors import (
    LEASE_NOT_FOUND,
    LEASE_TOO_LONG,
    NO_LEADER,
    NO_USERS,
    TIMED_OUT,
    Code,
    EtcdError,
    fail,
)
from doyen.quorum.etcd_api.messages import (
    delete_request,
    put_request,
    range_request,
    response,
    txn_request,
)
from doyen.quorum.etcd_api.replica import Replica
from doyen.quorum.etcd_api.watches import WatchService
from doyen.quorum.keyspace.commands import EtcdCompact, EtcdGrant, EtcdRevoke, Put, encode
from doyen.quorum.keyspace.etcd_requests import EtcdResults, KeysRead
from doyen.quorum.keyspace.etcd_state import only_reads
from doyen.quorum.keyspace.state import Keyspace
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
RENEWALS: Final = 1000
"""How many renewals of one stream may be under way."""

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
    ) -> None:
        """`url` is where clients reach this API on this node."""
        self.replica = replica = Replica(driver, keyspace, members)
        self.keys = KeyService(replica)
        self.leases = LeaseService(replica, election_s)
        self.watches = WatchService(replica, election_s)
        elections = Elections(replica, self.watches.hub, self.leases.session)
        self.unary: dict[rpc.EtcdMethod, Unary] = {
            **self.keys.unary,
            **self.leases.unary,
            **elections.unary,
            **ClusterInfo(replica, url).unary,
        }
        self.streaming: dict[rpc.EtcdMethod, Streaming] = {
            rpc.KEEP_ALIVE: self.leases.keep_alive,
            rpc.OBSERVE: elections.observe,
            rpc.WATCH: self.watches.watch,
        }
        self.encoded: dict[rpc.EtcdMethod, Streaming] = {rpc.WATCH: self.watches.watch_encoded}
        """Streams that are also offered as the bytes of messages."""

    def close(self) -> None:
        self.replica.close()
        self.watches.close()


class KeyService:
    """The KV service."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.unary: dict[rpc.EtcdMethod, Unary] = {
            rpc.RANGE: self._range,
            rpc.PUT: self._put,
            rpc.DELETE_RANGE: self._delete_range,
            rpc.TXN: self._txn,
            rpc.COMPACT: self._compact,
        }

    async def _answer(self, result: EtcdResults) -> Any:
        header = self._replica.header(result.revision)
        if isinstance(result, KeysRead) and len(result.records) > LARGE:
            # Heartbeats must not wait for it.
            return await asyncio.to_thread(response, result, header)
        return response(result, header)

    async def _range(self, message: Any) -> Any:
        request = range_request(message)
        if not message.serializable:
            await self._replica.current()
        return await self._answer(self._replica.read(request))

    async def _put(self, message: Any) -> Any:
        return await self._answer(await self._replica.change(put_request(message)))

    async def _delete_range(self, message: Any) -> Any:
        return await self._answer(await self._replica.change(delete_request(message)))

    async def _txn(self, message: Any) -> Any:
        request = txn_request(message)
        if only_reads(request):
            await self._replica.current()
            return await self._answer(self._replica.read(request))
        return await self._answer(await self._replica.change(request))

    async def _compact(self, message: Any) -> Any:
        done = await self._replica.propose(EtcdCompact(message.revision))
        return rpc.COMPACT.response(header=self._replica.header(done.revision))


class LeaseService:
    """The Lease service."""

    def __init__(self, replica: Replica, election_s: float) -> None:
        self._replica = replica
        self._keyspace = replica.keyspace
        self._min_ttl = math.ceil(1.5 * election_s)
        self._random = SystemRandom()
        self._renewals = Renewals(replica.driver, election_s, replica.start)
        self.unary: dict[rpc.EtcdMethod, Unary] = {
            rpc.GRANT: self._grant,
            rpc.REVOKE: self._revoke,
            rpc.TIME_TO_LIVE: self._time_to_live,
            rpc.LEASES: self._leases,
        }

    async def session(self, lease: int, ttl: int = 60) -> int:
        """The lease for an election or a lock: renewed once or, if it is 0, a new one."""
        if not lease:
            granted = await self._grant(rpc.GRANT.request(TTL=ttl))
            return int(granted.ID)
        if not await self.renew(lease):
            raise fail(LEASE_NOT_FOUND)
        return lease

    async def _grant(self, message: Any) -> Any:
        if message.TTL > MAX_TTL:
            raise fail(LEASE_TOO_LONG)
        ttl = max(message.TTL, self._min_ttl)
        lease = message.ID or self._random.randrange(1, 1 << 63)
        done = await self._replica.propose(EtcdGrant(lease, float(ttl)))
        return rpc.GRANT.response(header=self._replica.header(done.revision), ID=lease, TTL=ttl)

    async def _revoke(self, message: Any) -> Any:
        done = await self._replica.propose(EtcdRevoke(message.ID))
        return rpc.REVOKE.response(header=self._replica.header(done.revision))

    async def _number(self, lease: int) -> int | None:
        """The number of a lease in the keyspace; None if it has ended."""
        number = self._keyspace.etcd.leases.get(lease)
        if number is None:  # it may have been granted by way of another node
            await self._replica.current()
            number = self._keyspace.etcd.leases.get(lease)
        return number

    async def renew(self, lease: int) -> int:
        """Renew a lease and return its ttl; 0 if it has ended."""
        number = await self._number(lease)
        if number is None:
            return 0
        ttl_s = self._keyspace.lease(number) or 0.0
        asker = _Asker(self._replica.loop.create_future())
        self._renewals.renew(asker, RenewLease(0, number))
        return int(ttl_s) if await asker.outcome else 0

    async def keep_alive(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        """A client renews all its leases on one stream, so they do not wait for each other."""
        async with aclosing(_in_order(requests, self._renewed, RENEWALS)) as responses:  # type: ignore[type-var]
            async for each in responses:
                yield each

    async def _renewed(self, message: Any) -> Any:
        # Before the renewal, which may be later than this revision.
        header = self._replica.header()
        ttl = await self.renew(message.ID)
        return rpc.KEEP_ALIVE.response(header=header, ID=message.ID, TTL=ttl)

    async def _time_to_live(self, message: Any) -> Any:
        replica = self._replica
        await replica.current()
        lease = message.ID
        number = self._keyspace.etcd.leases.get(lease)
        granted = None if number is None else self._keyspace.lease(number)
        if granted is None:
            return rpc.TIME_TO_LIVE.response(header=replica.header(), ID=lease, TTL=-1)
        try:
            (left,) = decode_left(await replica.driver.ask_leader(encode({LEFT: [number]})))
        except (DoyenError, MsgspecError, ValueError) as error:
            raise EtcdError(Code.UNAVAILABLE, f"{TIMED_OUT[1]}: {error}") from error
        return rpc.TIME_TO_LIVE.response(
            header=replica.header(),
            ID=lease,
            TTL=int(granted if left is None else left),
            grantedTTL=int(granted),
            keys=self._keyspace.etcd.bound(lease) if message.keys else (),
        )

    async def _leases(self, message: Any) -> Any:
        await self._replica.current()
        leases = [rpc.LeaseStatus(ID=lease) for lease in self._keyspace.etcd.leases]
        return rpc.LEASES.response(header=self._replica.header(), leases=leases)


async def _in_order(requests: AsyncIterator[Any], work: Unary, most: int) -> AsyncIterator[Any]:
    """What `work` returns for each request, in the order of the requests, of which at most so many
    are worked on at a time."""
    started: deque[asyncio.Future[Any]] = deque()
    room, arrived = asyncio.Semaphore(most), asyncio.Event()

    async def take() -> None:
        async for message in requests:
            await room.acquire()
            started.append(asyncio.ensure_future(work(message)))
            arrived.set()

    taking = asyncio.ensure_future(take())
    taking.add_done_callback(lambda _: arrived.set())
    try:
        while started or not taking.done():
            if started:
                yield await started[0]
                started.popleft()
                room.release()
            else:
                arrived.clear()
                await arrived.wait()
        taking.result()
    finally:
        for each in (taking, *started):
            each.cancel()
        await asyncio.gather(taking, *started, return_exceptions=True)


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


class ClusterInfo:
    """The services that tell about the cluster. It makes this node's URL known to the others."""

    def __init__(self, replica: Replica, url: str) -> None:
        self._replica = replica
        self._url = url
        self.unary: dict[rpc.EtcdMethod, Unary] = {
            rpc.MEMBER_LIST: self._member_list,
            rpc.STATUS: self._status,
            rpc.ALARM: self._alarm,
            rpc.AUTHENTICATE: self._authenticate,
            rpc.AUTH_STATUS: self._auth_status,
        }
        if url:
            replica.start(self._register())

    async def _member_list(self, message: Any) -> Any:
        replica = self._replica
        membership = replica.driver.membership
        members = [
            rpc.Member(
                ID=replica.member_id(node),
                name=node,
                peerURLs=[f"http://{membership.addresses.get(node, '')}"],
                clientURLs=self._urls(node),
                isLearner=node in membership.learners,
            )
            for node in membership.everyone
        ]
        return rpc.MEMBER_LIST.response(header=replica.header(), members=members)

    def _urls(self, node: str) -> list[str]:
        if node == self._replica.driver.id:
            return [self._url] if self._url else []
        door = self._replica.keyspace.get(DOORS.format(node))
        return [door.value.decode()] if door is not None else []

    async def _register(self) -> None:
        """Record under which URL this node serves the API, for the member lists of the others."""
        driver, keyspace = self._replica.driver, self._replica.keyspace
        key, url = DOORS.format(driver.id), self._url.encode()
        while True:
            with suppress(DoyenError):
                await driver.barrier()
                known = keyspace.get(key)
                if known is not None and known.value == url:
                    return
                put = Put(key, url, 0 if known is None else known.version)
                await driver.propose(KEYSPACE, encode(put))
                continue
            await asyncio.sleep(REGISTER_RETRY_S)

    async def _status(self, message: Any) -> Any:
        replica = self._replica
        status, keyspace = replica.driver.status(), replica.keyspace
        errors = [] if status.leader else [NO_LEADER[1]]
        if keyspace.alarm:
            errors.append(f"memberID:{replica.member_id(status.id)} alarm:NOSPACE ")
        return rpc.STATUS.response(
            header=replica.header(),
            version=VERSION,
            dbSize=keyspace.bytes,
            dbSizeInUse=keyspace.bytes,
            leader=replica.member_id(status.leader) if status.leader else 0,
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
        replica, alarms = self._replica, []
        if replica.keyspace.alarm:
            node = replica.member_id(replica.driver.id)
            alarms.append(rpc.AlarmMember(memberID=node, alarm=rpc.NOSPACE))
        return rpc.ALARM.response(header=replica.header(), alarms=alarms)

    async def _authenticate(self, message: Any) -> Any:
        """Clients that have a password then go on without one, as with an etcd without users."""
        raise fail(NO_USERS)

    async def _auth_status(self, message: Any) -> Any:
        return rpc.AUTH_STATUS.response(header=self._replica.header(), enabled=False)
