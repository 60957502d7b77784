"""Concurrent reads, sent as one transaction.

A call costs gRPC and etcd more than what it reads. At most `IN_FLIGHT` calls are in flight; reads
that arrive meanwhile go as one read-only transaction when the next call may be sent. A single
reader does not wait, and thousands (every leader of a session reads its record after a reconnect)
cost a fraction of as many calls.

A read whose caller is cancelled leaves its batch. A batch without callers is cancelled.

Imports the connection and the messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from doyen.errors import StoreError
from doyen.stores.etcd import rpc
from doyen.stores.etcd.connection import EtcdClient

__all__ = ["EtcdReads"]

IN_FLIGHT = 4
BATCH_SIZE = 100
"""The most reads in a batch. etcd allows 128 operations in a transaction by default."""


@dataclass(slots=True, eq=False)
class _Read:
    request: Any
    answer: asyncio.Future[Any]
    batch: _Batch | None = None


class _Batch:
    """Reads that are in flight as one call."""

    def __init__(self, client: EtcdClient, reads: Sequence[_Read]) -> None:
        self._client = client
        self._reads = reads
        for read in reads:
            read.batch = self
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self.task = loop.create_task(self._run())

    def read_cancelled(self) -> None:
        """One of the reads has been cancelled."""
        if all(read.answer.done() for read in self._reads):
            # Before the task ends: the next read may be sent earlier than that.
            self._client.call_cancelled(self._began)
            self.task.cancel()

    async def _run(self) -> None:
        try:
            answers = await self._ask()
        except StoreError as error:
            for read in self._reads:
                if not read.answer.done():
                    # One exception per caller, since each adds its own traceback.
                    failure = type(error)(str(error))
                    failure.__cause__ = error
                    read.answer.set_exception(failure)
        else:
            for read, answer in zip(self._reads, answers, strict=True):
                if not read.answer.done():
                    read.answer.set_result(answer)

    async def _ask(self) -> Sequence[Any]:
        if len(self._reads) == 1:
            return [await self._client.call(rpc.RANGE, self._reads[0].request, reads=True)]
        together = [{"request_range": read.request} for read in self._reads]
        answer = await self._client.call(rpc.TXN, rpc.TxnRequest(success=together), reads=True)
        return [each.response_range for each in answer.responses]


class EtcdReads:
    """The reads of one store."""

    def __init__(self, client: EtcdClient) -> None:
        self._client = client
        self._waiting: deque[_Read] = deque()
        self._in_flight = 0

    async def range(self, request: Any) -> Any:
        """The entries in a range, as a linearizable read."""
        read = _Read(request, asyncio.get_running_loop().create_future())
        self._waiting.append(read)
        self._send()
        try:
            return await read.answer
        except asyncio.CancelledError:
            if read.batch is not None:
                read.batch.read_cancelled()
            raise

    def _send(self) -> None:
        while self._waiting and self._in_flight < IN_FLIGHT:
            some = [self._waiting.popleft() for _ in range(min(BATCH_SIZE, len(self._waiting)))]
            wanted = [read for read in some if not read.answer.done()]
            if wanted:
                self._in_flight += 1
                _Batch(self._client, wanted).task.add_done_callback(self._batch_done)

    def _batch_done(self, _: asyncio.Task[None]) -> None:
        self._in_flight -= 1
        self._send()
