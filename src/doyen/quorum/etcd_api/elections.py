"""etcd's Election and Lock services, as its concurrency package builds them.

A candidate has the key `name/lease` (the lease in hexadecimal). The key that was created first is
the leader's; every other candidate waits for the key before its own to be deleted. A lock is the
same without a value.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.errors import LEASE_NOT_FOUND, Code, EtcdError, fail
from doyen.quorum.etcd_api.messages import key_value
from doyen.quorum.etcd_api.service import EtcdApi
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


class Elections:
    """The two services on one node."""

    def __init__(self, api: EtcdApi) -> None:
        self._api = api
        api.unary |= {
            rpc.CAMPAIGN: self._campaign,
            rpc.PROCLAIM: self._proclaim,
            rpc.LEADER: self._leader,
            rpc.RESIGN: self._resign,
            rpc.LOCK: self._lock,
            rpc.UNLOCK: self._unlock,
        }
        api.streaming |= {rpc.OBSERVE: self._observe}

    async def _campaign(self, message: Any) -> Any:
        lease = await self._api.session(message.lease)
        mine = await self._stand(message.name, lease, message.value)
        leader = rpc.LeaderKey(name=message.name, key=mine.key, rev=mine.create, lease=lease)
        return rpc.CAMPAIGN.response(header=self._api.header(), leader=leader)

    async def _lock(self, message: Any) -> Any:
        lease = await self._api.session(message.lease)
        mine = await self._stand(message.name, lease, b"")
        return rpc.LOCK.response(header=self._api.header(), key=mine.key)

    async def _unlock(self, message: Any) -> Any:
        done = await self._api.change(DeleteKeys(message.key))
        return rpc.UNLOCK.response(header=self._api.header(done.revision))

    async def _stand(self, name: bytes, lease: int, value: bytes) -> EtcdRecord:
        """Wait until the key of this lease is the first. Returns its record."""
        prefix = name + b"/"
        # Go prints negative numbers with a sign.
        key = prefix + f"{lease:x}".encode()
        create = EtcdTransaction(
            (Compare(key, target=CompareTarget.CREATE, number=0),),
            (PutKey(key, value, lease), RangeKeys(key)),
            (RangeKeys(key),),
        )
        done = await self._api.change(create)
        mine = _only(done)
        if mine.value != value:
            await self._put_if_leader(key, mine.create, value, lease)
        try:
            await self._wait_for_turn(prefix, key, mine.create)
        except asyncio.CancelledError:
            # The client has left: its key must not stand in the line until the lease ends.
            self._api.start(self._withdraw(key, mine.create))
            raise
        return mine

    async def _wait_for_turn(self, prefix: bytes, key: bytes, created: int) -> None:
        await self._api.current()
        ahead = RangeKeys(
            prefix,
            _end_of(prefix),
            limit=1,
            order=SortOrder.DESCEND,
            target=SortTarget.CREATE,
            max_create=created - 1,
        )
        while True:
            before = self._read(ahead)
            if not before:
                break
            while self._read(RangeKeys(before[0].key, min_create=before[0].create)):
                await self._api.hub.changed()
        if not [each for each in self._read(RangeKeys(key)) if each.create == created]:
            raise fail(LEASE_NOT_FOUND)  # it has ended while this candidate waited

    async def _withdraw(self, key: bytes, created: int) -> None:
        await self._api.change(_if_created(key, created, DeleteKeys(key)))

    def _read(self, request: RangeKeys) -> list[EtcdRecord]:
        found = self._api.read(request)
        assert isinstance(found, KeysRead)
        return found.records

    async def _put_if_leader(self, key: bytes, created: int, value: bytes, lease: int) -> int:
        done = await self._api.change(_if_created(key, created, PutKey(key, value, lease)))
        assert isinstance(done, TransactionDone)
        if not done.succeeded:
            raise EtcdError(*NOT_LEADER)
        return done.revision

    async def _proclaim(self, message: Any) -> Any:
        leader = message.leader
        revision = await self._put_if_leader(leader.key, leader.rev, message.value, leader.lease)
        return rpc.PROCLAIM.response(header=self._api.header(revision))

    async def _resign(self, message: Any) -> Any:
        leader = message.leader
        done = await self._api.change(_if_created(leader.key, leader.rev, DeleteKeys(leader.key)))
        return rpc.RESIGN.response(header=self._api.header(done.revision))

    def _first(self, name: bytes) -> EtcdRecord | None:
        prefix = name + b"/"
        found = self._read(
            RangeKeys(
                prefix,
                _end_of(prefix),
                limit=1,
                order=SortOrder.ASCEND,
                target=SortTarget.CREATE,
            )
        )
        return found[0] if found else None

    async def _leader(self, message: Any) -> Any:
        await self._api.current()
        leader = self._first(message.name)
        if leader is None:
            raise EtcdError(*NO_LEADER)
        return rpc.LEADER.response(header=self._api.header(), kv=key_value(leader))

    async def _observe(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        message = await anext(aiter(requests))
        await self._api.current()
        told: EtcdRecord | None = None
        while True:
            leader = self._first(message.name)
            if leader is not None and leader != told:
                told = leader
                yield rpc.LEADER.response(header=self._api.header(), kv=key_value(leader))
            else:
                await self._api.hub.changed()


def _only(done: Any) -> EtcdRecord:
    """The record that a transaction has read last."""
    assert isinstance(done, TransactionDone)
    read = done.results[-1]
    assert isinstance(read, KeysRead)
    return read.records[0]


def _if_created(key: bytes, created: int, request: EtcdRequests) -> EtcdTransaction:
    same = Compare(key, target=CompareTarget.CREATE, number=created)
    return EtcdTransaction((same,), (request,))


def _end_of(prefix: bytes) -> bytes:
    """The end of the range of all keys with a prefix, which ends with a slash."""
    return prefix[:-1] + b"0"
