"""One connection to a NATS server. It ends once, for good.

nats-py's own reconnection is not used: it stops for good when the server sends an error, and it
buffers requests and sends them late. `jetstream` replaces a connection that has ended by a new one.

Imports nats-py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import nats.errors
from nats.aio.client import Client

from doyen.events.log_lines import log_line

__all__ = ["CLOSE_S", "ConnectionEnded", "NatsAddress", "NatsConnection", "run_in_task"]

T = TypeVar("T")

log = logging.getLogger("doyen.nats")

CLOSE_S = 2.0
_CANCEL_AGAIN_S = 0.05


class ConnectionEnded(Exception):
    """The connection ended before the response arrived."""


@dataclass(frozen=True, slots=True)
class NatsAddress:
    """The servers, and nats-py's options for the login and for TLS."""

    hosts: tuple[str, ...]
    options: Mapping[str, Any] = field(repr=False)
    connect_timeout_s: float


class NatsConnection(Client):
    """A client of nats-py that connects once. `ended` is done when the connection has ended.

    Two faults of nats-py are worked around:

    - It stops reading at the first message whose subject or headers it cannot decode. Such a
      message in the bucket would end every connection on which the bucket is followed.
    - If the connection breaks while it is being closed, its subscriptions and its socket are
      left open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls,
        address: NatsAddress,
        urls: Iterable[str],
        on_error: Callable[[Exception], Awaitable[None]],
    ) -> NatsConnection:
        """Connect to one of the servers."""
        connection = cls()
        try:
            connecting = connection.connect(
                list(urls),
                error_cb=on_error,
                connect_timeout=address.connect_timeout_s,  # type: ignore[arg-type]
                allow_reconnect=False,
                max_reconnect_attempts=1,
                reconnect_time_wait=0.2,  # type: ignore[arg-type]
                ping_interval=2,
                max_outstanding_pings=2,
                **address.options,
            )
            await run_in_task(connecting, address.connect_timeout_s)
            if not connection.is_connected:
                raise ConnectionAbortedError("the server closed the connection at once")
        except BaseException:
            await connection.close_within(CLOSE_S)
            raise
        return connection

    @property
    def incarnation(self) -> str:
        """Differs after a restart of the server, which may have lost writes that it confirmed."""
        return str(self._server_info.get("server_id", ""))

    @property
    def version(self) -> str:
        return str(self.connected_server_version)

    def end(self) -> None:
        """Abandon the requests in flight: none of them will be answered."""
        if not self.ended.done():
            self.ended.set_result(None)

    async def close_within(self, timeout_s: float) -> None:
        self.end()
        try:
            await run_in_task(self.close(), timeout_s)
        except (OSError, nats.errors.Error, AssertionError) as error:
            log.debug("%s", log_line(event="nats_closing_failed", reason=error))

    async def _process_headers(self, headers: bytes) -> dict[str, str] | None:
        try:
            return await super()._process_headers(headers)
        except (ValueError, IndexError):
            return {}

    def _build_message(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: dict[str, str] | None
    ) -> Any:
        readable = bytes(subject).decode(errors="backslashreplace").encode()
        return super()._build_message(sid, readable, reply, data, headers)

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        self.end()
        try:
            await super()._close(status, do_cbs)
        except OSError as error:
            log.debug("%s", log_line(event="nats_closing_failed", reason=error))
        finally:
            for subscription in self._subs.values():
                if subscription._wait_for_msgs_task is not None:
                    subscription._wait_for_msgs_task.cancel()
            if self._transport is not None:
                self._transport.close()  # type: ignore[no-untyped-call]


async def run_in_task(
    work: Coroutine[Any, Any, T], timeout_s: float, ended: asyncio.Future[None] | None = None
) -> T:
    """Run a coroutine of nats-py in a task of its own, until `ended` is done at the longest.

    nats-py swallows a cancellation that arrives while it flushes, and `asyncio.wait_for` before
    Python 3.12 one that arrives together with an exception. The caller's cancellation must not get
    lost.
    """
    task = asyncio.get_running_loop().create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # mark as retrieved
    try:
        until: set[asyncio.Future[Any]] = {task} if ended is None else {task, ended}
        await asyncio.wait(until, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gave_up = not task.done()
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_AGAIN_S)
    if ended is not None and ended.done() and (gave_up or task.cancelled()):
        raise ConnectionEnded
    if gave_up or task.cancelled():
        raise TimeoutError
    return task.result()
