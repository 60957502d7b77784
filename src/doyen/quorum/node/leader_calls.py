"""Calls that a node makes to the node that leads, which may be itself.

A call is a tag byte and a body; the response is a status byte and a body. The class that serves a
kind of call registers its handler by tag (`handlers`). Only a node that leads runs handlers; any
other responds `NOT_LEADING`, which means that nothing was done.

A connection that breaks before the response arrives gives `UNKNOWN`. A call to a node that is no
longer known as the leader is given up in the same way, since a deposed leader may stay silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from doyen.errors import OrderFailed, OutcomeUnknown, SessionClosed, StoreUnavailable
from doyen.quorum.consensus.core import Role
from doyen.quorum.node.peers import Peers
from doyen.quorum.node.pump import Pump

Answer = Callable[[bytes], None]
"""Sends the encoded response."""
Respond = Callable[..., None]
"""`respond(status, payload=b"")`."""
Handler = Callable[[str, bytes, Respond], None]
"""`handler(peer, body, respond)`."""

DONE, NOT_LEADING, UNKNOWN, REFUSED = 0, 1, 2, 3
"""The status of a response."""

PROPOSE, READ, SERVICE, ADMIN, PROPOSE_AS_ADMIN, DISK_SPACE = b"P", b"R", b"Q", b"O", b"A", b"F"
"""The tags of calls."""


class LeaderCalls:
    """The calls of one node to the leader, and those of its peers to it while it leads."""

    def __init__(self, pump: Pump, transport: Peers, patience_s: float) -> None:
        self.handlers: dict[bytes, Handler] = {}
        self._pump = pump
        self._transport = transport
        self._patience_s = patience_s
        self._open: dict[asyncio.Task[bytes], str] = {}
        """Calls without a response, and the peer that each went to."""

    def leader_changed(self, leader: str | None) -> None:
        """Give up the calls to any other node."""
        for call, peer in self._open.items():
            if peer != leader:
                call.cancel()

    def timed_out(self) -> str:
        """The text for an operation that took longer than `patience_s`."""
        core = self._pump.core
        leader = f"leader: {core.leader}" if core.leader else "no leader is known"
        return f"not confirmed after {self._patience_s:g} s on node {core.id} ({leader})"

    async def call_leader(self, call: bytes) -> bytes:
        """Call whichever node leads, until one has handled the call. Raises `StoreUnavailable` if
        none has within `patience_s`, `OutcomeUnknown` if one may have, and `OrderFailed` if the
        leader refused."""
        pump, sent = self._pump, False
        try:
            async with asyncio.timeout(self._patience_s):
                while not pump.ended:
                    leader = pump.core.leader
                    if leader is not None:
                        sent = True
                        response = await self.call(leader, call)
                        if response[0] == DONE:
                            return response[1:]
                        if response[0] == REFUSED:
                            raise OrderFailed(response[1:].decode())
                        if response[0] == UNKNOWN:
                            raise OutcomeUnknown(f"{leader} was lost before it could answer")
                        sent = False
                    await pump.pause()
        except TimeoutError:
            raise (OutcomeUnknown if sent else StoreUnavailable)(self.timed_out()) from None
        raise SessionClosed(f"node {pump.id} has stopped")

    async def call(self, node: str, call: bytes) -> bytes:
        """Call one node and return the response; every failure is a status."""
        if node == self._pump.id:
            future: asyncio.Future[bytes] = self._pump.loop.create_future()

            def answer(response: bytes) -> None:
                if not future.done():
                    future.set_result(response)

            self.called(node, call, answer)
            return await future
        asking = self._pump.loop.create_task(self._transport.ask(node, call))
        self._open[asking] = node
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

    def called(self, peer: str, call: bytes, answer: Answer) -> None:
        """A call of a peer, or of this node, has arrived."""
        if self._pump.ended:
            return

        def respond(status: int, payload: bytes = b"") -> None:
            answer(bytes([status]) + payload)

        handler = self.handlers.get(call[:1])
        if self._pump.core.role is not Role.LEADING:
            respond(NOT_LEADING)
        elif handler is None:
            respond(REFUSED, b"the leader does not know this kind of call")
        else:
            handler(peer, call[1:], respond)
