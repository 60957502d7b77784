"""etcd's Election and Lock services, as its concurrency package builds them.

A candidate has the key `name/lease` (the lease in hexadecimal). The key that was created first is
the leader's; every other candidate waits for the key before its own to be deleted. A lock is the
same without a value.

The key of a client that leaves is withdrawn. But a client may only have gone to another node, where
it campaigns with the same key, and its first call may end at any time later. Invariant: the key of
a candidate that was told that it leads is not withdrawn. A call withdraws a key only at the
revision at which it has changed the key itself. It takes a key over, by changing it, only while
others are ahead. Before it tells its client that it leads, it changes the key once more, unless it
has created the key when no other key was ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from doyen._waiting import shared
from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.errors import LEASE_NOT_FOUND, Code, EtcdError, fail
from doyen.quorum.etcd_api.messages import key_value
from doyen.quorum.etcd_api.replica import Replica
from doyen.quorum.etcd_api.watches import WatchHub
from doyen.quorum.keyspace.etcd_requests import (
    Compare,
    CompareTarget,
    DeleteKeys,
    EtcdRecord,
    EtcdRequests,
    EtcdTransaction,
    KeysRead,
    PutKey,
    RangeKeys,
    SortOrder,
    SortTarget,
    TransactionDone,
)

NOT_LEADER: Final = Code.UNKNOWN, "election: not leader"
NO_LEADER: Final = Code.UNKNOWN, "election: no leader"
RETRY_S: Final = 0.2


class _Joined(NamedTuple):
    """A call that waits in the line."""

    record: EtcdRecord
    created: bool
    """It has created the key."""
    owned: bool
    """It has changed the key last, and withdraws it when its client leaves."""


class Elections:
    """The two services on one node."""

    def __init__(
        self, replica: Replica, hub: WatchHub, session: Callable[[int], Awaitable[int]]
    ) -> None:
        """`session` renews a lease once, or grants one."""
        self._replica = replica
        self._hub = hub
        self._session = session
        self.unary: dict[rpc.EtcdMethod, Callable[[Any], Awaitable[Any]]] = {
            rpc.CAMPAIGN: self._campaign,
            rpc.PROCLAIM: self._proclaim,
            rpc.LEADER: self._leader,
            rpc.RESIGN: self._resign,
            rpc.LOCK: self._lock,
            rpc.UNLOCK: self._unlock,
        }

    async def _campaign(self, message: Any) -> Any:
        lease = await self._session(message.lease)
        mine = await self._join_line(message.name, lease, message.value)
        leader = rpc.LeaderKey(name=message.name, key=mine.key, rev=mine.create, lease=lease)
        return rpc.CAMPAIGN.response(header=self._replica.header(), leader=leader)

    async def _lock(self, message: Any) -> Any:
        lease = await self._session(message.lease)
        mine = await self._join_line(message.name, lease, b"")
        return rpc.LOCK.response(header=self._replica.header(), key=mine.key)

    async def _unlock(self, message: Any) -> Any:
        done = await self._replica.change(DeleteKeys(message.key))
        return rpc.UNLOCK.response(header=self._replica.header(done.revision))

    async def _join_line(self, name: bytes, lease: int, value: bytes) -> EtcdRecord:
        """Wait until the key of this lease is the first. Returns its record."""
        prefix = name + b"/"
        # Go prints negative numbers with a sign.
        put = PutKey(prefix + f"{lease:x}".encode(), value, lease)
        joining = asyncio.ensure_future(self._join(prefix, put))
        try:
            joined = await shared(joining)
            mine = joined.record
            waited = await self._turn(prefix, mine)
            if joined.created and not waited and self._same(mine):
                return mine
            put = PutKey(put.key, value, lease, ignore_value=waited)
            done = await self._if(_created(mine.key, mine.create), put)
        except asyncio.CancelledError:
            # The client has left: its key must not stay in the line until the lease ends.
            self._replica.start(self._withdraw(joining))
            raise
        if not done.succeeded:
            raise fail(LEASE_NOT_FOUND)  # it has ended while this candidate waited
        return mine

    async def _join(self, prefix: bytes, put: PutKey) -> _Joined:
        read = RangeKeys(put.key)
        done = await self._if(_created(put.key, 0), put, read, otherwise=read)
        mine, created = _last(done), done.succeeded
        await self._replica.current()
        if created or self._ahead(prefix, mine) is None:
            return _Joined(mine, created, owned=created)
        done = await self._if(_unchanged(mine), put, read)
        owned = done.succeeded
        return _Joined(_last(done) if owned else mine, created=False, owned=owned)

    async def _turn(self, prefix: bytes, mine: EtcdRecord) -> bool:
        """Wait until no other key is ahead. Returns whether one was."""
        waited = False
        while (ahead := self._ahead(prefix, mine)) is not None:
            waited = True
            while self._same(ahead):
                await self._hub.changed(ahead.key)
        return waited

    def _ahead(self, prefix: bytes, mine: EtcdRecord) -> EtcdRecord | None:
        """The candidate before this one."""
        return self._first(
            RangeKeys(
                prefix,
                _end_of(prefix),
                limit=1,
                order=SortOrder.DESCEND,
                target=SortTarget.CREATE,
                max_create=mine.create - 1,
            )
        )

    def _same(self, record: EtcdRecord) -> bool:
        """Whether a key exists and was not created anew."""
        key, create = record.key, record.create
        return self._first(RangeKeys(key, min_create=create, max_create=create)) is not None

    async def _withdraw(self, joining: asyncio.Future[_Joined]) -> None:
        """Delete a key unless another call has joined with it, or it was elected."""
        try:
            mine, _, owned = await joining
        except EtcdError:
            return
        while owned:
            with suppress(EtcdError):
                await self._if(_unchanged(mine), DeleteKeys(mine.key))
                return
            await asyncio.sleep(RETRY_S)

    async def _if(
        self, compare: Compare, *requests: EtcdRequests, otherwise: EtcdRequests | None = None
    ) -> TransactionDone:
        """Carry out requests if a condition holds."""
        failure = () if otherwise is None else (otherwise,)
        done = await self._replica.change(EtcdTransaction((compare,), requests, failure))
        assert isinstance(done, TransactionDone)
        return done

    def _first(self, request: RangeKeys) -> EtcdRecord | None:
        found = self._replica.read(request)
        assert isinstance(found, KeysRead)
        return found.records[0] if found.records else None

    async def _proclaim(self, message: Any) -> Any:
        leader = message.leader
        put = PutKey(leader.key, message.value, leader.lease)
        done = await self._if(_created(leader.key, leader.rev), put)
        if not done.succeeded:
            raise EtcdError(*NOT_LEADER)
        return rpc.PROCLAIM.response(header=self._replica.header(done.revision))

    async def _resign(self, message: Any) -> Any:
        leader = message.leader
        done = await self._if(_created(leader.key, leader.rev), DeleteKeys(leader.key))
        return rpc.RESIGN.response(header=self._replica.header(done.revision))

    def _leader_of(self, prefix: bytes) -> EtcdRecord | None:
        order, target = SortOrder.ASCEND, SortTarget.CREATE
        return self._first(RangeKeys(prefix, _end_of(prefix), limit=1, order=order, target=target))

    async def _leader(self, message: Any) -> Any:
        await self._replica.current()
        leader = self._leader_of(message.name + b"/")
        if leader is None:
            raise EtcdError(*NO_LEADER)
        return rpc.LEADER.response(header=self._replica.header(), kv=key_value(leader))

    async def observe(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        message = await anext(aiter(requests))
        prefix = message.name + b"/"
        await self._replica.current()
        told: EtcdRecord | None = None
        while True:
            leader = self._leader_of(prefix)
            if leader is not None and leader != told:
                told = leader
                yield rpc.LEADER.response(header=self._replica.header(), kv=key_value(leader))
            else:
                await self._hub.changed(prefix, _end_of(prefix))


def _last(done: TransactionDone) -> EtcdRecord:
    """The record that a transaction has read last."""
    read = done.results[-1]
    assert isinstance(read, KeysRead)
    return read.records[0]


def _created(key: bytes, revision: int) -> Compare:
    """Whether a key was created at a revision; at 0 if it does not exist."""
    return Compare(key, target=CompareTarget.CREATE, number=revision)


def _unchanged(record: EtcdRecord) -> Compare:
    return Compare(record.key, target=CompareTarget.MOD, number=record.mod)


def _end_of(prefix: bytes) -> bytes:
    """The end of the range of all keys with a prefix, which ends with a slash."""
    return prefix[:-1] + b"0"
