"""Connections to the leader, for httpcore2.

`Network`, on asyncio: with uvloop, asking httpcore's stream about a socket that the other side has
reset raises `AttributeError`. Such a stream is reported as what it is: a connection that failed, or
that can no longer be used.

`BlockingNetwork`, on threads: nothing can interrupt a thread that waits for an answer, or for the
leader to accept a body. So it waits in slices, and asks in between whether the leader has been
replaced.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import httpcore2

__all__ = ["UNSENT", "UNWRITTEN", "BlockingNetwork", "Network"]

SLICE_S = 0.5
T = TypeVar("T")
UNSENT = (
    httpcore2.ConnectError,
    httpcore2.ConnectTimeout,
    httpcore2.PoolTimeout,
    httpcore2.UnsupportedProtocol,
)
"""Errors after which no byte of the request was sent."""
UNWRITTEN = "send_request_headers.failed"
"""How the name of httpcore's event ends. A `LocalProtocolError` after it is one of the request, of
which no byte was sent; over HTTP/2 it may also come later."""


class Network(httpcore2.AnyIOBackend):
    """Connects, and notices that the other side has closed the connection again."""

    async def connect_tcp(self, *args: Any, **options: Any) -> httpcore2.AsyncNetworkStream:
        stream = _Stream(await super().connect_tcp(*args, **options))
        if stream.closed:
            await stream.aclose()
            raise httpcore2.ConnectError("the connection was closed at once")
        return stream


class _Stream(httpcore2.AsyncNetworkStream):
    def __init__(self, stream: httpcore2.AsyncNetworkStream) -> None:
        self._stream = stream

    @property
    def closed(self) -> bool:
        try:
            self._stream.get_extra_info("socket")
        except AttributeError:
            return True
        return False

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._stream.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        return _Stream(await self._stream.start_tls(ssl_context, server_hostname, timeout))

    def get_extra_info(self, info: str) -> Any:
        if self.closed:
            return True if info == "is_readable" else None
        return self._stream.get_extra_info(info)


class BlockingNetwork(httpcore2.SyncBackend):
    """Connects, and gives up waiting for a leader that has been replaced."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def give_up_when(self, over: Callable[[], bool]) -> None:
        """While this thread waits for the leader, ask this from time to time."""
        self._of_thread.over = over

    @property
    def over(self) -> bool:
        over: Callable[[], bool] | None = getattr(self._of_thread, "over", None)
        return over is not None and over()

    def connect_tcp(self, *args: Any, **options: Any) -> httpcore2.NetworkStream:
        return _BlockingStream(super().connect_tcp(*args, **options), self)


class _BlockingStream(httpcore2.NetworkStream):
    def __init__(self, stream: httpcore2.NetworkStream, network: BlockingNetwork) -> None:
        self._stream, self._network = stream, network

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._in_slices(partial(self._stream.read, max_bytes), timeout)

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        # By the socket, because a write of the stream does not tell how much it has sent when its
        # time is over.
        rest = memoryview(buffer)
        while rest:
            rest = rest[self._in_slices(partial(self._send, rest), timeout) :]

    def _send(self, data: memoryview, timeout: float) -> int:
        sock: socket.socket = self._stream.get_extra_info("socket")
        try:
            sock.settimeout(timeout)
            return sock.send(data)
        except TimeoutError as error:
            raise httpcore2.WriteTimeout(str(error)) from error
        except OSError as error:
            raise httpcore2.WriteError(str(error)) from error

    def _in_slices(self, wait: Callable[[float], T], timeout: float | None) -> T:
        """Wait for this long in total, unless the leader has been replaced."""
        until = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            left_s = until - time.monotonic()
            try:
                return wait(max(0.001, min(SLICE_S, left_s)))
            except httpcore2.TimeoutException:
                if left_s <= SLICE_S:
                    raise
                if self._network.over:
                    # Not a WriteError, after which httpcore would wait for an answer.
                    raise httpcore2.ReadError("the leader was replaced") from None

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.NetworkStream:
        secure = self._stream.start_tls(ssl_context, server_hostname, timeout)
        return _BlockingStream(secure, self._network)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)
