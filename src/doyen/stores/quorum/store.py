"""The Store port on a quorum of doyen's own nodes.

Two connections: one for everything, one for renewals alone, to different nodes where there are
several. The keyspace does the work (see `doyen.quorum.keyspace.state`); what is here turns the
port's calls into its commands, and its results into the port's words.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from doyen.errors import ConfigError, LeaseGone, StoreUnusable
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
    Written,
)
from doyen.quorum.protocol.requests import (
    MIN_TTL_S,
    Administer,
    Ahead,
    BackupChunk,
    BackupRequest,
    Get,
    Head,
    NodeStatus,
    RenewLease,
    Scan,
    StatusRequest,
)
from doyen.quorum.protocol.security import Security
from doyen.stores.port import Capabilities, Creation, Store, Watch
from doyen.stores.quorum.connection import Electing, QuorumConnection, inquire
from doyen.stores.quorum.diagnosis import NodeAnswer, findings

__all__ = ["QuorumStore"]

OTHERS = 64
"""How many nodes that only other nodes have named are asked about themselves: as many as a cluster
may have."""
ELECTING_S = 0.05
"""How often to look whether nodes that are electing a leader have one."""
ELECTIONS = 3.0
"""What a silent leader of the quorum costs, at worst, in election timeouts: its silence is noticed
after one and a half, and the first vote may be split."""


class QuorumStore(Store):
    """One client of a quorum."""

    capabilities = Capabilities(
        ttl_min_s=MIN_TTL_S,
        # If the quorum's own leader goes just before a lease would have ended, the next one gives
        # the lease its whole time anew.
        expiry_factor=2.0,
        notice_s=ELECTIONS,
    )

    def __init__(
        self,
        nodes: Sequence[str],
        security: Security,
        *,
        cluster: str,
        connect_timeout_s: float,
    ) -> None:
        self._nodes = nodes
        self._security = security
        self._connect_timeout_s = connect_timeout_s
        # Not all clients at the node that the URL names first.
        first = random.randrange(len(nodes))
        self._wire = self._connection(cluster, first)
        self._renewals = self._connection(cluster, (first + 1) % len(nodes))
        self._unusable: str | None = None

    def _connection(self, cluster: str, first: int) -> QuorumConnection:
        return QuorumConnection(
            self._nodes,
            self._security,
            cluster=cluster,
            connect_timeout_s=self._connect_timeout_s,
            first=first,
        )

    async def open(self, token_floor: int) -> None:
        """See that a node answers, and that tokens are above `token_floor`. Nodes that are
        electing a leader are given time."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._connect_timeout_s
        condition: NodeStatus | None = None
        while condition is None:
            try:
                condition = await self._wire.ask(StatusRequest)
            except Electing as error:
                if loop.time() >= until:
                    remedy = (
                        "start nodes until a majority runs; doyen cluster status shows which do"
                    )
                    raise Electing(f"{error}: {remedy}") from error
                await asyncio.sleep(ELECTING_S)
        notice_s = ELECTIONS * condition.election_s
        self.capabilities = replace(self.capabilities, notice_s=notice_s)
        self._renewals.cluster = self._wire.cluster
        self._renewals.cluster_id = self._wire.cluster_id
        if token_floor:
            await self._do(AdvanceRevision(token_floor))

    async def grant(self, ttl_s: float) -> Lease:
        ttl_s = max(ttl_s, MIN_TTL_S)
        match await self._do(Grant(ttl_s)):
            case LeaseGranted(lease=lease):
                return Lease(str(lease), ttl_s)
            case other:
                raise _surprised(other)

    async def renew(self, lease: Lease) -> None:
        self._require_usable()
        number = _number(lease)
        # While nothing else is asked, nobody would notice that the other connection is dead.
        self._wire.suspect()
        await self._renewals.ask(lambda id: RenewLease(id, number))  # noqa: A006

    async def revoke(self, lease: Lease) -> None:
        await self._do(Revoke(_number(lease)))

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        match await self._do(Create(key, value, _number(lease))):
            case Written(revision=revision, version=version):
                return Creation(True, Entry(key, value, revision, version, lease.id))
            case EntryExists(entry=entry):
                return Creation(False, _entry(entry))
            case LeaseNotFound():
                raise _gone(lease)
            case other:
                raise _surprised(other)

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        result = await self._do(Put(key, value, _version(if_version)))
        if isinstance(result, Written):
            return Entry(key, value, result.revision, result.version)
        if isinstance(result, ConditionFailed):
            return None
        raise _surprised(result)

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        result = await self._do(Delete(key, _version(if_version)))
        return isinstance(result, Done)

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        if not -RANKS < rank < RANKS:
            raise ConfigError(f"a rank is a number of 64 bits, not {rank}")
        match await self._do(Enqueue(line, value, _number(lease), rank)):
            case TicketIssued(key=key, revision=revision):
                return Entry(key, value, revision, revision, lease.id)
            case LeaseNotFound():
                raise _gone(lease)
            case other:
                raise _surprised(other)

    async def ahead(self, ticket: Entry) -> Entry | None:
        return await self._find(lambda id: Ahead(id, ticket.key))  # noqa: A006

    async def get(self, key: str) -> Entry | None:
        return await self._find(lambda id: Get(id, key))  # noqa: A006

    async def head(self, line: str) -> Entry | None:
        return await self._find(lambda id: Head(id, line))  # noqa: A006

    async def list(self, prefix: str) -> list[Entry]:
        self._require_usable()
        records: list[StoredEntry] = await self._wire.ask(lambda id: Scan(id, prefix))  # noqa: A006
        return [_entry(record) for record in records]

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        self._require_usable()
        return await self._wire.watch(scope, notify)

    async def diagnose(self) -> Sequence[Finding]:
        return findings(await self.inspect())

    async def inspect(self) -> Sequence[NodeAnswer]:
        """What each node says of itself: those of the URL, and others that they know of."""
        self._require_usable()
        states = await asyncio.gather(*map(self._inspect, self._nodes))
        known = {state.condition.node for state in states if state.condition}
        others: dict[str, str] = {}
        for state in states:
            if state.condition is not None:
                told = state.condition.addresses
                others |= {_place(told[node]): node for node in told if node not in known}
        named = {_place(address) for address in self._nodes}
        # A node may name whatever it likes, and each name is an address that this dials.
        unseen = [place for place in others if place not in named][:OTHERS]
        states += await asyncio.gather(*map(self._inspect, unseen))
        return [
            state if state.condition else state._replace(node=others.get(_place(state.address), ""))
            for state in states
        ]

    async def arrange(self, what: str, node: str, address: str = "") -> None:
        """`add`, `promote`, `remove` a node, or `transfer` leadership to it."""
        self._require_usable()
        await self._wire.ask(lambda id: Administer(id, what, node, address))  # noqa: A006

    async def copy(self, take: Callable[[BackupChunk], None]) -> None:
        """Have everything as it is at one instant. If a connection fails in between it begins
        anew, with a piece that has an origin."""
        self._require_usable()
        await self._wire.ask(BackupRequest, take)

    def forked(self) -> None:
        self._unusable = self._unusable or (
            "this store was opened before a fork and belongs to the parent process:"
            " connect again in the child"
        )

    async def close(self) -> None:
        if self._unusable is None:
            self._unusable = "this store has been closed; open another"
            await asyncio.gather(self._wire.close(), self._renewals.close())

    async def _inspect(self, address: str) -> NodeAnswer:
        """What one node says of itself."""
        try:
            async with asyncio.timeout(2 * self._connect_timeout_s):
                return NodeAnswer(
                    address, await inquire(address, self._security, self._wire.cluster)
                )
        except TimeoutError:
            return NodeAnswer(address, None, f"{address} does not answer")
        except Exception as error:  # noqa: BLE001 - whatever it is, it is what there is to tell
            return NodeAnswer(address, None, str(error))

    def _do(self, command: KeyspaceCommand) -> Coroutine[Any, Any, Result]:
        self._require_usable()
        return self._wire.write(command)

    async def _find(self, make: Callable[[int], Any]) -> Entry | None:
        self._require_usable()
        record = (await self._wire.ask(make)).entry
        return None if record is None else _entry(record)

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise StoreUnusable(self._unusable)


def _place(address: str) -> str:
    """An address as a quorum on one machine writes it, whatever the URL says."""
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
    # A version of another store's making is none that could match.
    return version if isinstance(version, int) else -1


def _gone(lease: Lease) -> LeaseGone:
    return LeaseGone(f"the lease {lease.id} has ended")


def _surprised(result: Result) -> StoreUnusable:
    return StoreUnusable(
        f"the quorum answered {result!r}, which this version of doyen does not expect: use the"
        " same version everywhere"
    )
