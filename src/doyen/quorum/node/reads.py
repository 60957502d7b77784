"""Linearizable reads on any node.

A read needs the index up to which the log has to be applied. On the leader the core establishes
it; every other node calls the leader for it. All reads of one turn of the event loop share one
index. A read is ready when the state machine of this node has reached that index.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from doyen.errors import StoreUnavailable
from doyen.quorum.consensus.core import ReadAsked, ReadReady, ReadRefused, Role
from doyen.quorum.node.applier import Applier
from doyen.quorum.node.leader_calls import DONE, READ, LeaderCalls, Respond
from doyen.quorum.node.pump import RETRY_S, Pump

Reader = Callable[[int], None]
"""Called with the index that has to be applied."""


class LinearizableReads:
    """The reads of one node, and those for which peers need an index while it leads."""

    def __init__(
        self, pump: Pump, applier: Applier, leader_calls: LeaderCalls, patience_s: float
    ) -> None:
        self._pump = pump
        self._applier = applier
        self._leader_calls = leader_calls
        self._patience_s = patience_s
        self._waiting: list[Reader] = []
        self._rounds: dict[int, list[Reader]] = {}
        self._round = 0
        self._calling = False
        pump.on_end.append(self._clear)
        pump.carry_out[ReadReady] = self._ready
        pump.carry_out[ReadRefused] = self._refused
        leader_calls.handlers[READ] = self._called

    async def barrier(self) -> None:
        """When this returns, the state machine of this node shows every write that was
        acknowledged before the call. Raises `StoreUnavailable` if no leader answered within
        `patience_s`."""
        done: asyncio.Future[None] = self._pump.loop.create_future()
        reader = self.when_current(lambda: None if done.done() else done.set_result(None))
        try:
            async with asyncio.timeout(self._patience_s):
                await done
        except (TimeoutError, asyncio.CancelledError) as error:
            # While there is no leader, nothing else would drop it.
            with suppress(ValueError):
                self._waiting.remove(reader)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise StoreUnavailable(f"the read was {self._leader_calls.timed_out()}") from None

    def when_current(self, call: Callable[[], None]) -> Reader:
        """`barrier` with a callback, which is not called if no leader answers."""
        self._pump.check_open()

        def ready(index: int) -> None:
            self._applier.when(index, call)

        self._add(ready)
        return ready

    def _called(self, peer: str, body: bytes, respond: Respond) -> None:
        self._add(lambda index: respond(DONE, index.to_bytes(8)))

    def _add(self, reader: Reader) -> None:
        if not self._waiting:
            self._pump.loop.call_soon(self.flush)
        self._waiting.append(reader)

    def _clear(self) -> None:
        self._waiting.clear()
        self._rounds.clear()

    def flush(self) -> None:
        """Obtain an index for the waiting reads, if a leader is known."""
        core = self._pump.core
        if not self._waiting or self._pump.ended:
            return
        if core.role is Role.LEADING:
            self._round += 1
            self._rounds[self._round], self._waiting = self._waiting, []
            self._pump.step(ReadAsked(self._round))
        elif core.leader is not None and not self._calling:
            self._calling = True
            readers, self._waiting = self._waiting, []
            self._pump.start_task(self._call_leader(core.leader, readers))

    def _ready(self, effect: ReadReady) -> None:
        for ready in self._rounds.pop(effect.token, ()):
            ready(effect.index)

    def _refused(self, effect: ReadRefused) -> None:
        self._retry(self._rounds.pop(effect.token, []))

    def _retry(self, readers: list[Reader]) -> None:
        self._waiting = readers + self._waiting
        self._pump.loop.call_later(RETRY_S, self.flush)

    async def _call_leader(self, leader: str, readers: list[Reader]) -> None:
        response = await self._leader_calls.call(leader, READ)
        self._calling = False
        if response[0] != DONE:
            self._retry(readers)
            return
        for ready in readers:
            ready(int.from_bytes(response[1:]))
        self.flush()
