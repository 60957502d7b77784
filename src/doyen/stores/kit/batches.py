"""Requests that arrive together, sent as one call, which costs less than one call for each.

Requests of one turn of the loop share a call, and so do those that arrive while as many calls as
permitted are in flight. A single request does not wait. A request whose caller is cancelled leaves
its batch, and a batch without callers is cancelled.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from doyen._waiting import retrieve
from doyen.errors import OutcomeUnknown, StoreError

Q = TypeVar("Q")
R = TypeVar("R")


class Batches(Generic[Q, R]):
    """Passes requests to `send`, at most `most` in a batch and `in_flight` batches at a time.

    `send` returns a result or an exception for each request. After it was cancelled, it may have to
    mark a server that does not answer, so no other call begins before it has ended.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Q]], Awaitable[Sequence[R | BaseException]]],
        *,
        most: int,
        in_flight: int,
    ) -> None:
        self._send = send
        self._most = most
        self._in_flight = in_flight
        self._waiting: deque[tuple[Q, asyncio.Future[R]]] = deque()
        self._starting = False
        """The latest task has not begun to run. It takes whatever is waiting by then."""
        self._tasks: dict[asyncio.Task[None], list[asyncio.Future[R]]] = {}

    async def ask(self, request: Q) -> R:
        (answer,) = self._enqueue([request])
        try:
            return await answer
        except asyncio.CancelledError:
            retrieve(answer)
            self._leave(answer)
            raise

    def begin(self, requests: Sequence[Q]) -> asyncio.Future[list[R]]:
        """`ask` each of these; they are sent in the next turn of the loop, in one batch."""
        answers = self._enqueue(requests)
        for answer in answers:
            answer.add_done_callback(self._leave)
        return asyncio.gather(*answers)

    def _enqueue(self, requests: Sequence[Q]) -> list[asyncio.Future[R]]:
        loop = asyncio.get_running_loop()
        answers: list[asyncio.Future[R]] = [loop.create_future() for _ in requests]
        self._waiting.extend(zip(requests, answers, strict=True))
        self._start()
        return answers

    def _leave(self, answer: asyncio.Future[R]) -> None:
        """If nobody waits for this any more, nor for the others of its batch, cancel the batch."""
        if answer.cancelled():
            for task, answers in self._tasks.items():
                if answer in answers and all(each.done() for each in answers):
                    task.cancel()

    def _start(self) -> None:
        if not self._waiting or self._starting or len(self._tasks) >= self._in_flight:
            return
        if not any(task.cancelling() for task in self._tasks):
            self._starting = True
            answers: list[asyncio.Future[R]] = []
            task = asyncio.get_running_loop().create_task(self._run(answers))
            self._tasks[task] = answers
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        self._start()

    async def _run(self, answers: list[asyncio.Future[R]]) -> None:
        self._starting = False
        requests: list[Q] = []
        while self._waiting and len(requests) < self._most:
            request, answer = self._waiting.popleft()
            if not answer.done():
                requests.append(request)
                answers.append(answer)
        if not requests:
            return
        self._start()
        try:
            results = await self._send(requests)
            if len(results) != len(requests):
                raise OutcomeUnknown(f"{len(results)} results for {len(requests)} requests")
        except asyncio.CancelledError:
            results = [OutcomeUnknown("the store was closed")] * len(requests)
        except Exception as error:  # noqa: BLE001 - raised in the callers
            results = [error] * len(requests)
        for answer, result in zip(answers, results, strict=True):
            if answer.done():
                continue
            if isinstance(result, StoreError):
                # One exception per caller, since each adds its own traceback.
                failure = type(result)(*result.args)
                failure.__cause__ = result
                answer.set_exception(failure)
            elif isinstance(result, BaseException):
                answer.set_exception(result)
            else:
                answer.set_result(result)

    async def close(self) -> None:
        """Cancel the calls in flight; their outcome is unknown."""
        await asyncio.sleep(0)  # a task that is cancelled before it begins would take no requests
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def one_by_one(
    send: Callable[[Sequence[Q]], Awaitable[Sequence[R | BaseException]]], requests: Sequence[Q]
) -> list[R | BaseException]:
    """The results of requests that cannot be sent together."""
    results: list[R | BaseException] = []
    for request in requests:
        try:
            results += await send([request])
        except StoreError as error:
            results.append(error)
    return results
