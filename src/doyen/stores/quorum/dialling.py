"""How a client reaches a node of its quorum.

Nodes are dialled one after the other, the next one `STAGGER_S` after the one before if that has not
answered, so that a frozen node costs only this delay. All nodes must be of one cluster, by name and
by random id: two clusters behind one URL would elect two leaders, and a cluster that was founded
anew has lost its state. Imports the quorum's protocol and the error tree.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import MsgspecError

from doyen.errors import StoreError, StoreUnavailable, StoreUnusable
from doyen.quorum.keyspace.commands import encode
from doyen.quorum.protocol.connection import End, FrameConnection, dial
from doyen.quorum.protocol.frames import CloseReason, ConnectionRefused, FrameError
from doyen.quorum.protocol.handshake import ANY, ConnectionIdentity, MemberInfo
from doyen.quorum.protocol.requests import ANSWER, REQUEST, NodeStatus, StatusRequest, decode_answer
from doyen.quorum.protocol.security import Security

__all__ = ["Dialler", "Electing", "ExpectedCluster", "fetch_status"]

STAGGER_S = 0.25
"""How long a node may take to answer before another is dialled as well."""


class Electing(StoreUnavailable):
    """No node serves, and at least one of them only because there is no leader at the moment."""


class ExpectedCluster:
    """The cluster that every node must belong to, as the first connected node has named it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.id = ""

    def learn(self, connection: FrameConnection) -> None:
        self.name = self.name or connection.remote.cluster
        self.id = self.id or connection.info.cluster_id


class Dialler:
    """Connects to one of the nodes."""

    def __init__(
        self,
        nodes: Sequence[str],
        security: Security,
        cluster: ExpectedCluster,
        connect_timeout_s: float,
        first: int = 0,
    ) -> None:
        """`first` is the index of the node to begin with."""
        self.cluster = cluster
        self.next = first
        self.avoid: Callable[[], str | None] = lambda: None
        """The node to dial last, because the client has a connection to it already."""
        self._nodes = nodes
        self._security = security
        self._connect_timeout_s = connect_timeout_s
        self._incarnation = random.getrandbits(62)

    def skip(self) -> None:
        """Begin with the next node next time."""
        self.next = (self.next + 1) % len(self._nodes)

    async def connect(
        self, on_frames: Callable[..., None], on_end: Callable[..., None]
    ) -> FrameConnection:
        """Dial all nodes, staggered, until one accepts. Raises `StoreUnusable` if all refuse for
        good, otherwise `StoreUnavailable`."""
        count = len(self._nodes)
        order = [self._nodes[(self.next + step) % count] for step in range(count)]
        avoided = self.avoid()
        order.sort(key=lambda address: address == avoided)
        loop = asyncio.get_running_loop()
        dialling: dict[asyncio.Task[FrameConnection], str] = {}
        failures: list[StoreError] = []
        try:
            while order or dialling:
                if order:
                    address = order.pop(0)
                    dialling[loop.create_task(self._dial(address, on_frames, on_end))] = address
                done, _ = await asyncio.wait(
                    dialling,
                    timeout=STAGGER_S if order else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    address = dialling.pop(task)
                    error = task.exception()
                    if error is None:
                        self.next = self._nodes.index(address)
                        return task.result()
                    if not isinstance(error, StoreError):
                        raise error
                    failures.append(error)
        finally:
            for task in dialling:
                task.cancel()
                task.add_done_callback(_close_result)
        raise _failure(failures)

    async def _dial(
        self, address: str, on_frames: Callable[..., None], on_end: Callable[..., None]
    ) -> FrameConnection:
        return await dial(
            address,
            ConnectionIdentity(self.cluster.name, ANY, self._incarnation),
            info=MemberInfo(self.cluster.id),
            role="client",
            security=self._security,
            on_frames=on_frames,
            on_end=on_end,
            handshake_s=self._connect_timeout_s,
        )


def _failure(failures: Sequence[StoreError]) -> StoreError:
    refusals = [each for each in failures if isinstance(each, ConnectionRefused)]
    text = "; ".join(dict.fromkeys(map(str, failures)))
    error: StoreError
    if len([each for each in refusals if each.lasting]) == len(failures):
        error = StoreUnusable(f"every node refuses the connection: {text}")
    elif any(each.reason is CloseReason.NOT_SERVING for each in refusals):
        error = Electing(f"no node of the quorum serves: {text}")
    else:
        error = StoreUnavailable(f"no node of the quorum can be reached: {text}")
    error.__cause__ = failures[-1]
    return error


def _close_result(task: asyncio.Task[FrameConnection]) -> None:
    """Close the connection to a node that accepted after another had."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def fetch_status(address: str, security: Security, cluster: str) -> NodeStatus:
    """The status of one node, over a connection of its own. Works without a leader."""
    answer: asyncio.Future[NodeStatus] = asyncio.get_running_loop().create_future()

    def received(_: FrameConnection, frames: Sequence[tuple[int, bytes]]) -> None:
        for kind, payload in frames:
            try:
                response = decode_answer(payload)
            except (MsgspecError, UnicodeDecodeError, RecursionError) as error:
                text = f"not a response of this protocol: {error}"
                raise FrameError(CloseReason.MALFORMED, text) from None
            if kind != ANSWER or answer.done() or not isinstance(response, NodeStatus):
                raise FrameError(CloseReason.OUT_OF_TURN, "a response to no request")
            answer.set_result(response)

    def ended(_: Any, end: End) -> None:
        if not answer.done():
            answer.set_exception(StoreUnavailable(f"{address}: {end.value}"))

    connection = await dial(
        address,
        ConnectionIdentity(cluster, ANY, 0),
        role="onlooker",
        security=security,
        on_frames=received,
        on_end=ended,
    )
    try:
        connection.send(REQUEST, encode(StatusRequest(0)))
        return await answer
    finally:
        connection.abort()
