"""Reads that come together go together.

A call costs gRPC and etcd more than what is read by it. So a few reads are under way at a time,
and those that come meanwhile go as one read-only transaction when the next may go: a single reader
waits for nobody, and thousands (every leader of a session looks at its record after a reconnect)
cost a fraction of as many calls.

A read whose caller gives up leaves its batch, and a batch that all have left is cancelled, as a
call would have been.

Imports the cluster and its messages.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from doyen.errors import StoreError
from doyen.stores.etcd import rpc
from doyen.stores.etcd.connection import EtcdConnection

__all__ = ["EtcdReads"]

AT_A_TIME = 4
MOST = 100
"""Reads in a batch. etcd allows 128 operations in a transaction, if not told otherwise."""


@dataclass(slots=True, eq=False)
class _Read:
    request: Any
    answer: asyncio.Future[Any]
    batch: _Batch | None = None


class _Batch:
    """Reads that are under way together."""

    def __init__(self, wire: EtcdConnection, reads: Sequence[_Read]) -> None:
        self._wire = wire
        self._reads = reads
        for read in reads:
            read.batch = self
        loop = asyncio.get_running_loop()
        self._began = loop.time()
        self.task = loop.create_task(self._ask())

    def given_up(self) -> None:
        """One of the reads has been cancelled."""
        if all(read.answer.done() for read in self._reads):
            self._wire.given_up(self._began)  # at once: the next read may be on its way already
            self.task.cancel()

    async def _ask(self) -> None:
        try:
            answers = await self._answers()
        except StoreError as error:
            for read in self._reads:
                if not read.answer.done():
                    failure = type(error)(str(error))  # each its own, with a traceback of its own
                    failure.__cause__ = error
                    read.answer.set_exception(failure)
        else:
            for read, answer in zip(self._reads, answers, strict=True):
                if not read.answer.done():
                    read.answer.set_result(answer)

    async def _answers(self) -> Sequence[Any]:
        if len(self._reads) == 1:
            return [await self._wire.call(rpc.RANGE, self._reads[0].request, reads=True)]
        together = [{"request_range": read.request} for read in self._reads]
        answer = await self._wire.call(rpc.TXN, rpc.TxnRequest(success=together), reads=True)
        return [each.response_range for each in answer.responses]


class EtcdReads:
    """The reads of one store."""

    def __init__(self, wire: EtcdConnection) -> None:
        self._wire = wire
        self._waiting: deque[_Read] = deque()
        self._under_way = 0

    async def range(self, request: Any) -> Any:
        """The entries in a range, as a linearizable read."""
        read = _Read(request, asyncio.get_running_loop().create_future())
        self._waiting.append(read)
        self._go()
        try:
            return await read.answer
        except asyncio.CancelledError:
            if read.batch is not None:
                read.batch.given_up()
            raise

    def _go(self) -> None:
        while self._waiting and self._under_way < AT_A_TIME:
            some = [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
            wanted = [read for read in some if not read.answer.done()]
            if wanted:
                self._under_way += 1
                _Batch(self._wire, wanted).task.add_done_callback(self._done)

    def _done(self, _: asyncio.Task[None]) -> None:
        self._under_way -= 1
        self._go()
