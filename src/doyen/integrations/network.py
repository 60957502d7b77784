"""Connections to the leader, for httpcore2 on asyncio.

With uvloop, asking httpcore's stream about a socket that the other side has reset raises
`AttributeError`. Such a stream is reported here as what it is: a connection that failed, or that
can no longer be used.
"""

from __future__ import annotations

import ssl
from typing import Any

import httpcore2

__all__ = ["Network"]


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
