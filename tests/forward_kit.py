"""Requests to applications in this process, in virtual time: a pool that calls them in place of
sockets, and a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpcore2

from doyen import LeadershipLost
from doyen.model import Leader

SECRET = "a secret of the processes"
A, B = "http://a:80", "http://b:80"
TRUST = {A, B}
ELSEWHERE = [b"@evil.example/x", b".evil.example/x", b"0/x", b"http://evil.example/x", b"*"]
"""Targets that do not begin with a slash: after an address they would lead to another."""


def leader(token: int, address: object = A) -> Leader:
    return Leader("e", "a", token, {} if address is None else {"address": address})


class Pool(httpcore2.AsyncConnectionPool):
    """Requests go to applications in this process, by address. One that is missing refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.apps: dict[str, Any] = {}
        self.sent: list[httpcore2.Request] = []
        self.fails: list[Exception] = []

    async def handle_async_request(self, request: httpcore2.Request) -> httpcore2.Response:
        host, port = request.url.host.decode(), request.url.port
        app = self.apps.get(f"{request.url.scheme.decode()}://{host}:{port}")
        if app is None:
            raise httpcore2.ConnectError("refused")
        self.sent.append(request)
        if self.fails:
            raise self.fails.pop(0)
        path, _, query = request.url.target.partition(b"?")
        scope = http_scope(path, request.method.decode(), request.headers, query)
        return await Exchange(app, scope, request.stream).response()

    async def aclose(self) -> None:
        pass


def http_scope(
    path: bytes = b"/",
    method: str = "GET",
    headers: Any = (),
    query: bytes = b"",
    kind: str = "http",
) -> dict[str, Any]:
    lower = [(name.lower(), value) for name, value in headers]
    return {
        "type": kind,
        "http_version": "1.1",
        "method": method,
        "path": path.decode(),
        "raw_path": path,
        "query_string": query,
        "headers": lower,
    }


class Exchange:
    """One request to an application; its response is read chunk by chunk."""

    def __init__(self, app: Any, scope: dict[str, Any], body: Any = None) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue(maxsize=1)
        self._body = body
        self._ended = asyncio.Event()
        self.task = asyncio.create_task(self._run(app, scope))

    async def _run(self, app: Any, scope: dict[str, Any]) -> None:
        chunks = self._chunks()

        async def receive() -> dict[str, Any]:
            try:
                return {"type": "http.request", "body": await anext(chunks), "more_body": True}
            except StopAsyncIteration:
                if not self._ended.is_set():
                    self._ended.set()
                    return {"type": "http.request", "body": b"", "more_body": False}
            await asyncio.Event().wait()
            raise AssertionError

        try:
            await app(scope, receive, self.messages.put)
        except (LeadershipLost, httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            await self.messages.put(error)

    async def _chunks(self) -> AsyncIterator[bytes]:
        if self._body is not None:
            async for chunk in self._body:
                yield chunk

    async def response(self) -> httpcore2.Response:
        start = await self.messages.get()
        if isinstance(start, Exception):
            raise httpcore2.RemoteProtocolError(str(start))
        return httpcore2.Response(start["status"], headers=start["headers"], content=self._stream())

    async def _stream(self) -> AsyncIterator[bytes]:
        while True:
            message = await self.messages.get()
            if isinstance(message, Exception):
                raise httpcore2.RemoteProtocolError(str(message))
            yield message.get("body", b"")
            if not message.get("more_body", False):
                return


async def call(
    app: Any, path: bytes = b"/", method: str = "GET", headers: Any = (), body: Any = None
) -> tuple[int, bytes, dict[bytes, bytes]]:
    """Make a request, and return status, body and headers."""
    path, _, query = path.partition(b"?")
    response = await Exchange(app, http_scope(path, method, headers, query), body).response()
    content = b"".join([chunk async for chunk in response.aiter_stream()])
    return response.status, content, dict(response.headers)
