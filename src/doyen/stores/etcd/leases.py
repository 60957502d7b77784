"""Renewal: one LeaseKeepAlive stream, on a wire of its own.

- Answers on the stream come in the order of the requests, so the first that waits is the one that
  is meant. A renewal that is given up ends the stream: its late answer must not be taken for that
  of the next, which would be counted from a later instant than the server's.
- etcd does not replicate renewals: its leader counts leases in memory, and a new leader gives each
  its full time again. A leader that has been deposed and does not know it goes on answering, while
  the lease runs out elsewhere. So a renewal counts only once a linearizable read at the same
  member, in the same raft term, has followed it: then a majority still followed, after the renewal
  was sent, the leader that did the counting.
- An answer with TTL 0 says that the lease has ended.

Imports the cluster and its messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from doyen.errors import LeaseGone, StoreError, StoreUnavailable
from doyen.stores.etcd import rpc
from doyen.stores.etcd.connection import EtcdChannel, EtcdCluster, EtcdConnection

__all__ = ["EtcdKeepalive"]


class EtcdKeepalive:
    """Renews the leases of one store."""

    def __init__(self, cluster: EtcdCluster, witness: bytes) -> None:
        """`witness` is the key that is read after a renewal; nothing need stand there."""
        self._wire = EtcdConnection(cluster)
        self._witness = rpc.RangeRequest(key=witness, count_only=True)
        self._stream: _Stream | None = None

    async def renew(self, lease: int) -> None:
        """Return once the lease's time has begun anew, beyond doubt."""
        connection, began = await self._wire.connection(), asyncio.get_running_loop().time()
        stream = self._stream
        if stream is None or stream.ended or stream.connection is not connection:
            if stream is not None:
                stream.end()
            stream = self._stream = _Stream(connection)
        try:
            renewed = await stream.renew(lease)
        except asyncio.CancelledError:
            stream.end()
            self._wire.given_up(began)
            raise
        except StoreUnavailable:
            self._wire.move_on(connection)
            raise
        if renewed.TTL <= 0:
            raise LeaseGone("etcd has ended the lease")
        read = await self._wire.call(rpc.RANGE, self._witness, reads=True)
        before, after = renewed.header, read.header
        if (before.member_id, before.raft_term) != (after.member_id, after.raft_term):
            raise StoreUnavailable("etcd changed its leader during the renewal, which may be void")

    async def close(self) -> None:
        if self._stream is not None:
            self._stream.end()
        await self._wire.close()


class _Stream:
    """One LeaseKeepAlive stream, from its opening to its end."""

    def __init__(self, connection: EtcdChannel) -> None:
        self.connection = connection
        self.ended = False
        self._stream = connection.stream(rpc.KEEP_ALIVE)
        self._waiting: deque[tuple[int, asyncio.Future[Any]]] = deque()
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def renew(self, lease: int) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((lease, answer))
        self._stream.send(rpc.LeaseKeepAliveRequest(ID=lease))
        return await answer

    def end(self, why: str = "the stream of renewals was ended") -> None:
        """End the stream; renewals that wait for an answer have failed. Idempotent."""
        if not self.ended:
            self.ended = True
            self._stream.end()
            self._reading.cancel()
            for _, waiter in self._waiting:
                if not waiter.done():
                    waiter.set_exception(StoreUnavailable(why))

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
