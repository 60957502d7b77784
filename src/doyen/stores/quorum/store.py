"""The Store port on a quorum of doyen's own nodes.

There are two connections, to different nodes where there are several: one for renewals, and one
for everything else. A warden ends a lease over both, because it has no other requests by which it
would have noticed that a node is silent. This module translates the port's calls into commands of
the keyspace (see `doyen.quorum.keyspace.commands`) and the results back.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from doyen.errors import ConfigError, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.model import Entry, Finding, Lease, Version
from doyen.quorum.keyspace.commands import (
    RANKS,
    AdvanceRevision,
    ConditionFailed,
    Create,
    Delete,
    Done,
    Enqueue,
    EntryExists,
    Grant,
    KeyspaceCommand,
    LeaseGranted,
    LeaseNotFound,
    Put,
    Result,
    Revoke,
    StoredEntry,
    TicketIssued,
    Update,
    Written,
)
from doyen.quorum.protocol.frames import NOT_FOUNDED
from doyen.quorum.protocol.requests import (
    MAX_LEASES,
    MAX_VALUE,
    MIN_TTL_S,
    Administer,
    Ahead,
    BackupChunk,
    BackupRequest,
    Get,
    Head,
    LeaseTimes,
    LeaseTimesRequest,
    NodeStatus,
    RenewLease,
    Scan,
    StatusRequest,
)
from doyen.quorum.protocol.security import Security
from doyen.stores.kit.lifecycle import GuardedStore, lease_gone
from doyen.stores.port import Capabilities, Creation, Watch
from doyen.stores.quorum.connection import QuorumConnection, QuorumWatch
from doyen.stores.quorum.diagnosis import NodeAnswer, findings
from doyen.stores.quorum.dialling import Dialler, Electing, ExpectedCluster, fetch_status

__all__ = ["QuorumStore"]

OTHERS = 64
"""How many nodes that are known only from other nodes are asked for their status: as many as a
cluster may have."""
ELECTING_S = 0.05
"""The interval at which nodes that are electing a leader are asked again."""
ELECTIONS = 3.0
"""The longest interruption by a silent leader of the quorum, in election timeouts: its silence is
noticed after one and a half, and the first vote may be split."""


class QuorumStore(GuardedStore):
    """One client of a quorum."""

    capabilities = Capabilities(
        ttl_min_s=MIN_TTL_S,
        # If the quorum's own leader fails just before a lease would have expired, the next leader
        # restarts the lease's ttl.
        expiry_factor=2.0,
        notice_s=ELECTIONS,
        value_bytes=MAX_VALUE,
        value_limit="the limit of a quorum",
    )

    def __init__(
        self, nodes: Sequence[str], security: Security, *, cluster: str, connect_timeout_s: float
    ) -> None:
        self._nodes = nodes
        self._security = security
        self._connect_timeout_s = connect_timeout_s
        self._cluster = ExpectedCluster(cluster)
        first = random.randrange(len(nodes))  # so that clients are spread over the nodes
        diallers = [
            Dialler(nodes, security, self._cluster, connect_timeout_s, at % len(nodes))
            for at in (first, first + 1)
        ]
        self._requests, self._renewals = map(QuorumConnection, diallers)
        diallers[0].avoid = lambda: self._renewals.node
        diallers[1].avoid = lambda: self._requests.node

    async def open(self, token_floor: int) -> None:
        """Check that a node answers, and raise tokens above `token_floor`. Waits, up to the
        connect timeout, for nodes that are electing a leader."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._connect_timeout_s
        status: NodeStatus | None = None
        while status is None:
            try:
                status = await self._requests.ask(StatusRequest)
            except Electing as error:
                if loop.time() >= until:
                    if NOT_FOUNDED in str(error):  # which names the remedy
                        raise
                    remedy = (
                        "start nodes until a majority runs; doyen cluster status shows which do"
                    )
                    raise Electing(f"{error}: {remedy}") from error
                await asyncio.sleep(ELECTING_S)
        notice_s = ELECTIONS * status.election_s
        self.capabilities = replace(self.capabilities, notice_s=notice_s)
        if token_floor:
            await self._write(AdvanceRevision(token_floor))

    async def grant(self, ttl_s: float) -> Lease:
        ttl_s = max(ttl_s, MIN_TTL_S)
        match await self._write(Grant(ttl_s)):
            case LeaseGranted(lease=lease):
                return Lease(str(lease), ttl_s)
            case other:
                raise _unexpected(other)

    async def renew(self, lease: Lease) -> None:
        number = _number(lease)
        # An idle connection that died goes unnoticed, and its watches with it.
        self._requests.probe()
        await self._renewals.ask(lambda id: RenewLease(id, number))  # noqa: A006

    async def revoke(self, lease: Lease) -> None:
        await self._write(Revoke(_number(lease)))

    def warrant(self, lease: Lease) -> bytes:
        """With the id of the cluster: every cluster counts its leases from 1."""
        return f"{self._cluster.id} {lease.id}".encode()

    async def end(self, warrant: bytes) -> None:
        cluster, _, lease = warrant.decode().partition(" ")
        if cluster != self._cluster.id:
            raise StoreUnusable(
                f"the lease {lease} belongs to the cluster {cluster}, and these nodes are of the"
                f" cluster {self._cluster.id}"
            )
        self._require_usable()
        # No two leases have the same number, so the second of two revocations has no effect.
        command = Revoke(int(lease))
        connections = (self._requests, self._renewals)[: len(self._nodes)]
        writes = [asyncio.ensure_future(each.write(command)) for each in connections]
        try:
            waiting = set(writes)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if any(write.exception() is None for write in done):
                    return
        finally:
            for write in writes:
                write.cancel()
            await asyncio.gather(*writes, return_exceptions=True)
        # If the outcome of one is unknown, that of the whole is; and if one may be repeated, both.
        failures = [error for write in writes if (error := write.exception())]
        raise max(failures, key=_precedence)

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        match await self._write(Create(key, value, _number(lease))):
            case Written(revision=revision, version=version):
                return Creation(True, Entry(key, value, revision, version, lease.id))
            case EntryExists(entry=entry):
                return Creation(False, _entry(entry))
            case LeaseNotFound():
                raise lease_gone(lease.id)
            case other:
                raise _unexpected(other)

    def put(
        self, key: str, value: bytes, *, if_version: Version | None
    ) -> Coroutine[Any, Any, Entry | None]:
        return self._replace(Put(key, value, _version(if_version)), None)

    def update(self, entry: Entry, value: bytes) -> Coroutine[Any, Any, Entry | None]:
        command = Update(entry.key, value, _version(entry.version))
        return self._replace(command, entry.lease)

    async def _replace(self, command: Put | Update, lease: str | None) -> Entry | None:
        """One coroutine for each write, since clients make many of them."""
        self._require_usable()
        call = self._requests.begin_write(command)
        try:
            result = await call.future
        finally:
            self._requests.end(call)
        if isinstance(result, Written):
            return Entry(command.key, command.value, result.revision, result.version, lease)
        if isinstance(result, ConditionFailed):
            return None
        raise _unexpected(result)

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        result = await self._write(Delete(key, _version(if_version)))
        return isinstance(result, Done)

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        if not -RANKS < rank < RANKS:
            raise ConfigError(f"a rank is a number of 64 bits, not {rank}")
        match await self._write(Enqueue(line, value, _number(lease), rank)):
            case TicketIssued(key=key, revision=revision):
                return Entry(key, value, revision, revision, lease.id)
            case LeaseNotFound():
                raise lease_gone(lease.id)
            case other:
                raise _unexpected(other)

    async def ahead(self, ticket: Entry) -> Entry | None:
        return await self._find(lambda id: Ahead(id, ticket.key))  # noqa: A006

    async def get(self, key: str) -> Entry | None:
        return await self._find(lambda id: Get(id, key))  # noqa: A006

    async def head(self, line: str) -> Entry | None:
        return await self._find(lambda id: Head(id, line))  # noqa: A006

    async def list(self, prefix: str) -> list[Entry]:
        records: list[StoredEntry] = await self._requests.ask(lambda id: Scan(id, prefix))  # noqa: A006
        return [_entry(record) for record in records]

    async def remaining(self, leases: Sequence[str]) -> dict[str, float]:
        known: dict[str, float] = {}
        for begin in range(0, len(leases), MAX_LEASES):
            some = leases[begin : begin + MAX_LEASES]
            numbers = tuple(int(lease) for lease in some)
            response: LeaseTimes | None = await self._requests.ask_if(
                lambda status: status.lease_times,
                lambda id, numbers=numbers: LeaseTimesRequest(id, numbers),  # type: ignore[misc]  # noqa: A006
            )
            if response is None:
                return {}
            answered = zip(some, response.remaining_s, strict=False)
            known |= {lease: left_s or 0.0 for lease, left_s in answered}
        return known

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        return await self._requests.watch(scope, notify)

    async def watch_entry(self, key: str, notify: Callable[[], None]) -> Watch:
        return await self._requests.watch(key, notify, entry=True)

    def carried(self, watch: Watch) -> Entry | None:
        assert isinstance(watch, QuorumWatch)
        record, watch.carried = watch.carried, None
        return None if record is None else _entry(record)

    async def diagnose(self) -> Sequence[Finding]:
        return findings(await self.inspect())

    async def inspect(self, within_s: float | None = None) -> Sequence[NodeAnswer]:
        """The status of each node: those of the URL, and others that they name. `within_s` is how
        long each may take to answer, by default twice the time to connect."""
        self._require_usable()
        timeout_s = 2 * self._connect_timeout_s if within_s is None else within_s

        async def ask(addresses: Sequence[str]) -> list[NodeAnswer]:
            asked = (self._inspect(address, timeout_s) for address in addresses)
            return await asyncio.gather(*asked)

        states = await ask(self._nodes)
        known = {state.condition.node for state in states if state.condition}
        others: dict[str, str] = {}
        for state in states:
            if state.condition is not None:
                listed = state.condition.addresses
                others |= {_place(listed[node]): node for node in listed if node not in known}
        named = {_place(address) for address in self._nodes}
        # Bounded, because each name that a node sends is an address that is dialled.
        unseen = [place for place in others if place not in named][:OTHERS]
        states += await ask(unseen)
        return [
            state if state.condition else state._replace(node=others.get(_place(state.address), ""))
            for state in states
        ]

    async def administer(self, action: str, node: str, address: str = "") -> None:
        """`add`, `promote`, `remove` a node, or `transfer` leadership to it."""
        self._require_usable()
        await self._requests.ask(lambda id: Administer(id, action, node, address))  # noqa: A006

    async def check_administrator(self) -> None:
        """Raise `StoreUnusable` unless this client may change members. A node checks the role of
        its client before it looks at the request, and the removal of no node has no effect."""
        await self.administer("remove", "")

    async def backup(self, take: Callable[[BackupChunk], None]) -> None:
        """Read the whole state as of one instant. If the connection fails, it begins again with a
        chunk that has an origin."""
        self._require_usable()
        await self._requests.ask(BackupRequest, take)

    async def _release(self) -> None:
        await asyncio.gather(self._requests.close(), self._renewals.close())

    async def _inspect(self, address: str, within_s: float) -> NodeAnswer:
        try:
            async with asyncio.timeout(within_s):
                return NodeAnswer(
                    address, await fetch_status(address, self._security, self._cluster.name)
                )
        except TimeoutError:
            return NodeAnswer(address, None, f"{address} does not answer")
        except Exception as error:  # noqa: BLE001 - reported as the reason
            return NodeAnswer(address, None, str(error))

    def _write(self, command: KeyspaceCommand) -> Coroutine[Any, Any, Any]:
        self._require_usable()
        return self._requests.write(command)

    async def _find(self, make: Callable[[int], Any]) -> Entry | None:
        self._require_usable()
        record = (await self._requests.ask(make)).entry
        return None if record is None else _entry(record)


def _place(address: str) -> str:
    """The address with `localhost` as the loopback address, as nodes on one machine name it."""
    host, _, port = address.rpartition(":")
    return f"127.0.0.1:{port}" if host == "localhost" else address


def _entry(record: StoredEntry) -> Entry:
    lease = str(record.lease) if record.lease else None
    return Entry(record.key, record.value, record.revision, record.version, lease)


def _number(lease: Lease) -> int:
    return int(lease.id)


def _version(version: Version | None) -> int:
    if version is None:
        return 0
    # The version of another kind of store matches no entry.
    return version if isinstance(version, int) else -1


def _precedence(error: BaseException) -> int:
    return 2 * isinstance(error, OutcomeUnknown) + isinstance(error, StoreUnavailable)


def _unexpected(result: Result) -> StoreUnusable:
    return StoreUnusable(
        f"the quorum answered {result!r}, which this version of doyen does not expect: use the"
        " same version on all nodes and clients"
    )
