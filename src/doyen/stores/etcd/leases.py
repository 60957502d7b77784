"""Renewal: one LeaseKeepAlive stream, on a channel of its own.

- Responses on the stream come in the order of the requests, so each belongs to the oldest request
  that waits. A renewal that is cancelled ends the stream: its late response must not be taken for
  that of the next renewal, whose time would then be counted from a later instant than etcd's.
- etcd does not replicate renewals: its leader keeps the time of leases in memory, and a new leader
  gives each its full time again. A leader that has been deposed without knowing it still answers
  while the lease runs out elsewhere. A renewal is therefore confirmed by a linearizable read at the
  same member in the same raft term: a majority still followed, after the renewal was sent, the
  leader that keeps the lease's time.
- A response with TTL 0 means that the lease has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from doyen.errors import LeaseGone, StoreError, StoreUnavailable
from doyen.stores.etcd import rpc
from doyen.stores.etcd.connection import EtcdChannel, EtcdClient, EtcdCluster


class EtcdKeepalive:
    """Renews the leases of one store."""

    def __init__(self, cluster: EtcdCluster, witness: bytes) -> None:
        """`witness` is the key that is read after a renewal. It need not exist."""
        self._client = EtcdClient(cluster)
        self._witness = rpc.RangeRequest(key=witness, count_only=True)
        self._stream: _RenewalStream | None = None

    async def renew(self, lease: int) -> None:
        """Return once the renewal is confirmed."""
        channel, began = await self._client.channel(), asyncio.get_running_loop().time()
        stream = self._stream
        if stream is None or stream.ended or stream.channel is not channel:
            if stream is not None:
                stream.end()
            stream = self._stream = _RenewalStream(channel)
        try:
            renewed = await stream.renew(lease)
        except asyncio.CancelledError:
            stream.end()
            self._client.call_cancelled(began)
            raise
        except StoreUnavailable:
            self._client.move_on(channel)
            raise
        if renewed.TTL <= 0:
            raise LeaseGone("etcd has ended the lease")
        read = await self._client.call(rpc.RANGE, self._witness, reads=True)
        before, after = renewed.header, read.header
        if (before.member_id, before.raft_term) != (after.member_id, after.raft_term):
            raise StoreUnavailable("etcd changed its leader during the renewal, which may be void")

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.end()
        await self._client.close()


class _RenewalStream:
    """One LeaseKeepAlive stream, from its opening to its end."""

    def __init__(self, channel: EtcdChannel) -> None:
        self.channel = channel
        self.ended = False
        self._stream = channel.stream(rpc.KEEP_ALIVE)
        self._waiting: deque[tuple[int, asyncio.Future[Any]]] = deque()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def renew(self, lease: int) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((lease, answer))
        self._stream.send(rpc.LeaseKeepAliveRequest(ID=lease))
        return await answer

    def end(self, reason: str = "the stream of renewals was ended") -> None:
        """End the stream and fail the renewals that wait for a response. Idempotent."""
        if not self.ended:
            self.ended = True
            self._stream.end()
            self._reading.cancel()
            for _, waiter in self._waiting:
                if not waiter.done():
                    waiter.set_exception(StoreUnavailable(reason))

    async def _read(self) -> None:
        try:
            while True:
                answer = await self._stream.read()
                lease, waiter = self._waiting.popleft()
                if lease != answer.ID:
                    raise StoreUnavailable("etcd answered another renewal than was sent")
                if not waiter.done():
                    waiter.set_result(answer)
        except StoreError as error:
            self.end(f"a renewal failed: {error}")
