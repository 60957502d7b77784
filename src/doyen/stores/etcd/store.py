"""The port on etcd: keys, transactions, and the line.

All keys begin with a prefix. A ticket's key is `<line>/<rank>-<unique>`, with the rank inverted so
that key order is rank order. Within a rank, tickets are ordered by their creation revision, which
is the order of arrival. `ahead` is then one ranged read, or two where a rank begins.

A version is the revision of the last write, which no two writes share. All reads are linearizable.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from doyen.errors import ConfigError, LeaseGone, StoreError, StoreUnusable, TicketGone
from doyen.model import Entry, Finding, Lease, Version
from doyen.stores.etcd import rpc
from doyen.stores.etcd.connection import EtcdClient, EtcdCluster
from doyen.stores.etcd.diagnosis import findings
from doyen.stores.etcd.leases import EtcdKeepalive
from doyen.stores.etcd.watches import EtcdWatches
from doyen.stores.kit.batches import Batches, one_by_one
from doyen.stores.kit.lifecycle import GuardedStore
from doyen.stores.port import Capabilities, Creation, Looked, Watch

SETTLE_S = 0.02
"""Pause after closing, in which gRPC reports the end of cancelled calls to the loop. If the loop
were closed by then, the next loop that uses gRPC would log an error."""

READS_IN_FLIGHT = 4
READS_AT_ONCE = 100
"""The most reads in a transaction. etcd allows 128 operations by default."""

DELETIONS_IN_FLIGHT = 16
DELETED_AT_ONCE = 32

_RANKS = 2**63
_TICKET = re.compile(r"(.*/\d{20})-[0-9a-f]{32}-\d+")


class EtcdStore(GuardedStore):
    """One client of an etcd cluster."""

    capabilities = Capabilities(
        ttl_min_s=1.0,
        ttl_step_s=1.0,
        # etcd checks for expired leases twice a second.
        notice_s=0.5,
        value_limit="within etcd's --max-request-bytes",
    )

    def __init__(self, cluster: EtcdCluster, *, prefix: str) -> None:
        self._cluster = cluster
        self._prefix = f"{prefix}/"
        witness = self._prefix.encode()
        self._witness = rpc.RangeRequest(key=witness, count_only=True)
        self._client = EtcdClient(cluster)
        self._reads = Batches(self._read, most=READS_AT_ONCE, in_flight=READS_IN_FLIGHT)
        self._deletions = Batches(self._delete, most=DELETED_AT_ONCE, in_flight=DELETIONS_IN_FLIGHT)
        self._leases = EtcdKeepalive(cluster, witness)
        self._watches = EtcdWatches(cluster)
        self._tickets = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count(1))

    async def open(self, token_floor: int) -> None:
        """Check that the cluster answers, that reading is permitted, and that its revision is not
        below `token_floor`."""
        answer = await self._client.call(rpc.RANGE, self._witness, reads=True)
        if answer.header.revision < token_floor:
            raise StoreUnusable(
                f"this etcd is at revision {answer.header.revision}, below"
                f" token_floor={token_floor}: its tokens would be lower than those already given"
                " out. Restore the cluster with etcdutl's --bump-revision"
            )

    async def grant(self, ttl_s: float) -> Lease:
        granted = await self._call(rpc.GRANT, rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s)))
        self._watches.granted(granted.TTL)
        return Lease(f"{granted.ID:016x}", float(granted.TTL))

    async def renew(self, lease: Lease) -> None:
        await self._leases.renew(_number(lease))

    async def revoke(self, lease: Lease) -> None:
        try:
            await self._call(rpc.REVOKE, rpc.LeaseRevokeRequest(ID=_number(lease)))
        except LeaseGone:
            pass

    async def remaining(self, leases: Sequence[str]) -> dict[str, float]:
        turns = asyncio.Semaphore(READS_IN_FLIGHT)

        async def ask(lease: str) -> Any:
            async with turns:
                request = rpc.LeaseTimeToLiveRequest(ID=int(lease, 16))
                return await self._client.call(rpc.TIME_TO_LIVE, request, reads=True)

        answers = await asyncio.gather(*map(ask, leases))
        # etcd rounds down to whole seconds. With a new leader, the time of all leases begins anew.
        return {
            lease: min(float(answer.grantedTTL), answer.TTL + 0.5) if answer.TTL >= 0 else 0.0
            for lease, answer in zip(leases, answers, strict=True)
        }

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        return (await self._create(key, value, lease))[0]

    async def create_and_look(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked:
        """One transaction, which reads whether or not it creates the entry."""
        if ticket is None:
            return await super().create_and_look(key, value, lease, ticket, other)
        own = self._at(ticket.key)
        creation, (mine, same_rank, higher, found) = await self._create(
            key,
            value,
            lease,
            rpc.RangeRequest(key=own),
            *_before(own, ticket.revision),
            rpc.RangeRequest(key=self._at(other)),
        )
        ahead = None
        try:
            if not mine or same_rank or higher:
                ahead = await self.ahead(ticket)
        except StoreError as error:
            return Looked(creation, failure=error)
        return Looked(creation, ahead, self._entry(found[0]) if found else None)

    async def _create(
        self, key: str, value: bytes, lease: Lease, *reads: Any
    ) -> tuple[Creation, Sequence[Any]]:
        """Create an entry, and read in the same transaction."""
        at = self._at(key)
        put = {"key": at, "value": value, "lease": _number(lease)}
        ranges = [{"request_range": each} for each in reads]
        answer = await self._call(
            rpc.TXN,
            rpc.TxnRequest(
                compare=[absent(at)],
                success=[{"request_put": put}, *ranges],
                failure=[{"request_range": {"key": at}}, *ranges],
            ),
        )
        first, *rest = answer.responses
        found = [each.response_range.kvs for each in rest]
        if not answer.succeeded:
            return Creation(False, self._entry(first.response_range.kvs[0])), found
        revision = answer.header.revision
        return Creation(True, Entry(key, value, revision, revision, lease.id)), found

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        at = self._at(key)
        answer = await self._call(
            rpc.TXN,
            rpc.TxnRequest(
                compare=[absent(at) if if_version is None else unchanged(at, if_version)],
                success=[{"request_put": {"key": at, "value": value, "prev_kv": True}}],
            ),
        )
        if not answer.succeeded:
            return None
        revision = answer.header.revision
        before = answer.responses[0].response_put.prev_kv
        return Entry(key, value, before.create_revision or revision, revision)

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        if entry.lease is None:
            return None
        at = self._at(entry.key)
        bound = {"key": at, "value": value, "lease": int(entry.lease, 16)}
        answer = await self._call(
            rpc.TXN,
            rpc.TxnRequest(
                # This version is bound to this lease, and is deleted when the lease ends.
                compare=[unchanged(at, entry.version)],
                success=[{"request_put": bound}],
            ),
        )
        if not answer.succeeded:
            return None
        return entry._replace(value=value, version=answer.header.revision)

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        return await self._deletions.ask((self._at(key), if_version))

    def begin_deletion(self, entries: Sequence[Entry]) -> asyncio.Future[Any] | None:
        if self._unusable is not None:
            return None
        return self._deletions.begin([(self._at(entry.key), entry.version) for entry in entries])

    async def _delete(
        self, deletions: Sequence[tuple[bytes, Version | None]]
    ) -> Sequence[bool | BaseException]:
        """Deletions as one transaction: a leader that resigns deletes its record and its ticket. If
        one of them is refused, so is the transaction, and each is then tried by itself."""
        keys = {key for key, _ in deletions}
        if len(keys) == len(deletions) and None not in (version for _, version in deletions):
            answer = await self._call(
                rpc.TXN,
                rpc.TxnRequest(
                    compare=[unchanged(key, version) for key, version in deletions],
                    success=[{"request_delete_range": {"key": key}} for key, _ in deletions],
                ),
            )
            if answer.succeeded or len(deletions) == 1:
                return [bool(answer.succeeded)] * len(deletions)
        elif len(deletions) == 1:
            answer = await self._call(rpc.DELETE, rpc.DeleteRangeRequest(key=deletions[0][0]))
            return [bool(answer.deleted)]
        return await one_by_one(self._delete, deletions)

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        if not -_RANKS < rank < _RANKS:
            raise ConfigError(f"a rank is a number of 64 bits, not {rank}")
        key = f"{line}/{_RANKS - rank:020d}-{next(self._tickets)}"
        answer = await self._call(
            rpc.PUT, rpc.PutRequest(key=self._at(key), value=value, lease=_number(lease))
        )
        revision = answer.header.revision
        return Entry(key, value, revision, revision, lease.id)

    async def ahead(self, ticket: Entry) -> Entry | None:
        own = self._at(ticket.key)
        line = own.rpartition(b"/")[0]
        while True:
            self._require_usable()
            answer = await self._client.call(
                rpc.TXN,
                rpc.TxnRequest(
                    compare=[created(own, ticket.revision)],
                    success=[{"request_range": each} for each in _before(own, ticket.revision)],
                ),
                reads=True,
            )
            if not answer.succeeded:
                raise TicketGone(f"{ticket.key} is no longer in the line")
            same_rank, higher = (each.response_range.kvs for each in answer.responses)
            if not same_rank and not higher:
                return None
            found = same_rank
            if not found:
                # The last ticket of the nearest higher rank.
                rank_above = higher[0].key.rpartition(b"/")[2].partition(b"-")[0]
                found = (await self._range(_last(line, rank_above))).kvs
            if not all(_is_ticket(self._entry(each)) for each in found or higher):
                return await self._ahead_of_all(ticket)
            if found:
                return self._entry(found[0])

    async def _ahead_of_all(self, ticket: Entry) -> Entry | None:
        """The ticket before this one in a line that has keys of other programs."""
        line = [each for each in await self.list(ticket.key.rpartition("/")[0]) if _is_ticket(each)]
        place = next((n for n, each in enumerate(line) if each.key == ticket.key), None)
        if place is None:
            raise TicketGone(f"{ticket.key} is no longer in the line")
        return line[place - 1] if place else None

    async def get(self, key: str) -> Entry | None:
        answer = await self._range(rpc.RangeRequest(key=self._at(key)))
        return self._entry(answer.kvs[0]) if answer.kvs else None

    async def list(self, prefix: str) -> list[Entry]:
        under = self._at(prefix)
        request = rpc.RangeRequest(key=under + b"/", range_end=under + b"0")
        answer = await self._range(request)
        return sorted(map(self._entry, answer.kvs), key=_place)

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        return await self._watches.watch(self._prefix + scope, notify)

    async def diagnose(self) -> Sequence[Finding]:
        states = await asyncio.gather(*map(self._cluster.inspect, self._cluster.members))
        return findings(states)

    async def _release(self) -> None:
        await self._deletions.close()
        await self._watches.close()
        await self._leases.close()
        await self._client.close()
        await asyncio.sleep(SETTLE_S)

    async def _call(self, method: rpc.Method, request: Any) -> Any:
        self._require_usable()
        return await self._client.call(method, request)

    async def _range(self, request: Any) -> Any:
        self._require_usable()
        return await self._reads.ask(request)

    async def _read(self, requests: Sequence[Any]) -> Sequence[Any]:
        if len(requests) == 1:
            return [await self._client.call(rpc.RANGE, requests[0], reads=True)]
        together = rpc.TxnRequest(success=[{"request_range": each} for each in requests])
        answer = await self._client.call(rpc.TXN, together, reads=True)
        return [each.response_range for each in answer.responses]

    def _at(self, key: str) -> bytes:
        return (self._prefix + key).encode()

    def _entry(self, found: Any) -> Entry:
        return Entry(
            found.key.decode()[len(self._prefix) :],
            found.value,
            found.create_revision,
            found.mod_revision,
            f"{found.lease:016x}" if found.lease else None,
        )


def _number(lease: Lease) -> int:
    return int(lease.id, 16)


def _place(entry: Entry) -> tuple[str, int]:
    """Sort key of an entry in a list: its key, but tickets of one rank by arrival."""
    ticket = _TICKET.fullmatch(entry.key)
    return (ticket[1], entry.revision) if ticket else (entry.key, 0)


def _is_ticket(entry: Entry) -> bool:
    return entry.lease is not None and _TICKET.fullmatch(entry.key) is not None


def absent(key: bytes) -> dict[str, Any]:
    return created(key, 0)


def created(key: bytes, revision: int) -> dict[str, Any]:
    return {"target": "CREATE", "key": key, "create_revision": revision}


def unchanged(key: bytes, version: Version) -> dict[str, Any]:
    return {"target": "MOD", "key": key, "mod_revision": version}


def _before(ticket: bytes, revision: int) -> tuple[Any, Any]:
    """Reads for what is ahead of a ticket: in its own rank, and in a higher one."""
    line, _, name = ticket.rpartition(b"/")
    rank = name.partition(b"-")[0]
    return _last(line, rank, before=revision), _nearest(line, rank)


def _last(line: bytes, rank: bytes, *, before: int = 0) -> Any:
    """The last ticket of a rank to arrive, before a revision if one is given."""
    return rpc.RangeRequest(
        key=line + b"/" + rank + b"-",
        range_end=line + b"/" + rank + b".",
        limit=1,
        sort_target="CREATE",
        sort_order="DESCEND",
        max_create_revision=before - 1 if before else 0,
    )


def _nearest(line: bytes, rank: bytes) -> Any:
    """A ticket of the nearest higher rank."""
    return rpc.RangeRequest(
        key=line + b"/",
        range_end=line + b"/" + rank,
        limit=1,
        sort_target="KEY",
        sort_order="DESCEND",
    )
