"""Questions that a node puts to whichever node leads, itself included.

Whatever goes wrong is an answer too: not leading (it was certainly not heard) or unknown. A
question to a node that is no longer taken for the leader is given up as unknown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from doyen.errors import OrderFailed, OutcomeUnknown, SessionClosed, StoreUnavailable
from doyen.quorum.consensus.core import Core
from doyen.quorum.node.interfaces import Transport

__all__ = ["DONE", "NOT_LEADING", "REFUSED", "UNKNOWN", "Answer", "LeaderCallsOwner", "Questions"]

Answer = Callable[[bytes], None]

DONE, NOT_LEADING, UNKNOWN, REFUSED = 0, 1, 2, 3
"""What an answer begins with."""


class LeaderCallsOwner(Protocol):
    """What the driver does for this."""

    core: Core

    async def pause(self) -> None:
        """Until the role changes, or a moment."""

    def asked(self, peer: str, question: bytes, answer: Answer) -> None:
        """A question to this node."""
        ...

    def too_late(self) -> str:
        """What to say of something that has taken too long."""
        ...


class Questions:
    """Those of one node."""

    def __init__(self, owner: LeaderCallsOwner, transport: Transport, patience_s: float) -> None:
        self._owner = owner
        self._transport = transport
        self._patience_s = patience_s
        self._open: dict[asyncio.Task[bytes], str] = {}
        """What peers have been asked, and have not answered yet."""
        self._ended = False

    def end(self) -> None:
        self._ended = True

    def lead_by(self, leader: str | None) -> None:
        """Another leads: one that was asked before may be silent for ever."""
        for asking, peer in self._open.items():
            if peer != leader:
                asking.cancel()

    async def ask_leader(self, question: bytes) -> bytes:
        """Ask until a leader has answered. Raises `OrderFailed` if it refused, `OutcomeUnknown` if
        it was lost before it answered, `StoreUnavailable` if nobody has heard the question."""
        owner, heard = self._owner, False
        try:
            async with asyncio.timeout(self._patience_s):
                while not self._ended:
                    leader = owner.core.leader
                    if leader is not None:
                        heard = True
                        answer = await self.put(leader, question)
                        if answer[0] == DONE:
                            return answer[1:]
                        if answer[0] == REFUSED:
                            raise OrderFailed(answer[1:].decode())
                        if answer[0] == UNKNOWN:
                            raise OutcomeUnknown(f"{leader} was lost before it could answer")
                        heard = False
                    await owner.pause()
        except TimeoutError:
            raise (OutcomeUnknown if heard else StoreUnavailable)(owner.too_late()) from None
        raise SessionClosed(f"node {owner.core.id} has stopped")

    async def put(self, leader: str, question: bytes) -> bytes:
        """One question to one node, and its answer."""
        if leader != self._owner.core.id:
            asking = asyncio.get_running_loop().create_task(self._transport.ask(leader, question))
            self._open[asking] = leader
            try:
                return await asking or bytes([UNKNOWN])
            except StoreUnavailable:
                return bytes([NOT_LEADING])
            except OutcomeUnknown:
                return bytes([UNKNOWN])
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not asking.cancelled() or (task is not None and task.cancelling()):
                    raise
                return bytes([UNKNOWN])
            finally:
                del self._open[asking]
                asking.cancel()
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def answer(given: bytes) -> None:
            if not future.done():
                future.set_result(given)

        self._owner.asked(leader, question, answer)
        return await future
