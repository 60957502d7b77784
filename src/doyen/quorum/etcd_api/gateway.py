"""The API as JSON over HTTP/1.1, with the paths of etcd's gateway.

A request is a POST to `/v3/kv/range` and the like. Fields have the names of the protocol buffers,
bytes are in base64, and numbers of 64 bits are strings. A stream takes one request and answers with
a chunk per response: `{"result": …}`. Errors have etcd's text and the code of gRPC. `/health` and
`/version` are those of etcd. Imports h11.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Final

import h11
from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.errors import Code, EtcdError, unexpected
from doyen.quorum.etcd_api.service import VERSION, Streaming, Unary

MAX_BODY: Final = 4 << 20
READ: Final = 1 << 16
"""How much is read at a time, and how much a client may send while it waits for an answer."""
LARGE: Final = 1 << 18
"""JSON of more bytes is read or made on another thread, since heartbeats must not wait for it."""
EARLIER: Final = {"/v3beta/": "/v3/", "/v3/kv/lease/": "/v3/lease/"}
"""Paths of earlier versions of etcd, which some clients use."""
ADMINISTRATION: Final = "/v3/auth/", "/v3/cluster/", "/v3/maintenance/"
"""Where the paths are of what etcd offers and a quorum does not."""
IDLE_S: Final = 300.0
"""How long a connection may be without a request."""

STATUSES: Final = {
    Code.UNKNOWN: HTTPStatus.INTERNAL_SERVER_ERROR,
    Code.INVALID_ARGUMENT: HTTPStatus.BAD_REQUEST,
    Code.DEADLINE_EXCEEDED: HTTPStatus.GATEWAY_TIMEOUT,
    Code.NOT_FOUND: HTTPStatus.NOT_FOUND,
    Code.RESOURCE_EXHAUSTED: HTTPStatus.TOO_MANY_REQUESTS,
    Code.FAILED_PRECONDITION: HTTPStatus.BAD_REQUEST,
    Code.OUT_OF_RANGE: HTTPStatus.BAD_REQUEST,
    Code.UNIMPLEMENTED: HTTPStatus.NOT_IMPLEMENTED,
    Code.INTERNAL: HTTPStatus.INTERNAL_SERVER_ERROR,
    Code.UNAVAILABLE: HTTPStatus.SERVICE_UNAVAILABLE,
}
"""The HTTP status for each code of gRPC, as grpc-gateway has it."""


class Gateway:
    """Serves HTTP/1.1 connections."""

    def __init__(
        self, unary: Mapping[rpc.EtcdMethod, Unary], streaming: Mapping[rpc.EtcdMethod, Streaming]
    ) -> None:
        self._unary = {method.json_path: (method, call) for method, call in unary.items()}
        self._streaming = {method.json_path: (method, call) for method, call in streaming.items()}
        self._range = unary[rpc.RANGE]

    async def serve(
        self, first: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve one connection, of which `first` has been read."""
        connection = h11.Connection(h11.SERVER)
        connection.receive_data(first)
        exchange = _Exchange(connection, reader, writer)
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    request = await exchange.next_event()
                    if not isinstance(request, h11.Request):
                        return
                    exchange.head_only = request.method == b"HEAD"
                    body = await exchange.body()
                await self._answer(exchange, request, body)
            except (h11.RemoteProtocolError, TimeoutError):
                return
            if connection.our_state is not h11.DONE or connection.their_state is not h11.DONE:
                return
            connection.start_next_cycle()

    async def _answer(self, exchange: _Exchange, request: h11.Request, body: bytes | None) -> None:
        path = request.target.decode("latin-1").partition("?")[0]
        for earlier, present in EARLIER.items():
            path = path.replace(earlier, present, 1)
        if body is None:
            await exchange.send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": "body too large"})
        elif path == "/health":
            await exchange.send(*await self._health())
        elif path == "/version":
            await exchange.send(HTTPStatus.OK, {"etcdserver": VERSION, "etcdcluster": VERSION})
        elif path.startswith(ADMINISTRATION) and path not in self._unary:
            error = _error(Code.UNIMPLEMENTED, f"a quorum does not offer {path}")
            await exchange.send(HTTPStatus.NOT_IMPLEMENTED, error)
        elif path not in self._unary and path not in self._streaming:
            await exchange.send(HTTPStatus.NOT_FOUND, _error(Code.NOT_FOUND, "Not Found"))
        elif request.method != b"POST":
            error = _error(Code.UNIMPLEMENTED, "Method Not Allowed")
            await exchange.send(HTTPStatus.METHOD_NOT_ALLOWED, error)
        else:
            await self._call(exchange, path, body)

    async def _call(self, exchange: _Exchange, path: str, body: bytes) -> None:
        streams = path in self._streaming
        method = (self._streaming[path] if streams else self._unary[path])[0]
        try:
            message = await _elsewhere(len(body), _request, method, body)
        except (ParseError, ValueError, TypeError, RecursionError) as error:
            await exchange.send(HTTPStatus.BAD_REQUEST, _error(Code.INVALID_ARGUMENT, str(error)))
            return
        if streams:
            await self._stream(exchange, self._streaming[path][1], message)
            return
        try:
            answer = await exchange.unless_closed(self._unary[path][1](message))
        except EtcdError as error:
            await exchange.send(STATUSES[error.code], _error(error.code, error.text))
        else:
            await exchange.send_body(HTTPStatus.OK, await _json(answer))

    async def _stream(self, exchange: _Exchange, call: Streaming, message: Any) -> None:
        await exchange.begin()

        async def requests() -> AsyncIterator[Any]:
            yield message

        async def send() -> None:
            async with aclosing(call(requests())) as answers:  # type: ignore[type-var]
                async for answer in answers:
                    await exchange.chunk(b'{"result":%b}' % await _json(answer))

        try:
            await exchange.unless_closed(send())
        except EtcdError as error:
            await exchange.chunk(_encoded({"error": _error(error.code, error.text)}))
        await exchange.finish()

    async def _health(self) -> tuple[HTTPStatus, dict[str, str]]:
        try:
            await self._range(rpc.RANGE.request(key=b"health", keys_only=True))
        except EtcdError as error:
            status = HTTPStatus.SERVICE_UNAVAILABLE
            return status, {"health": "false", "reason": error.text}
        return HTTPStatus.OK, {"health": "true", "reason": ""}


async def _elsewhere(size: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Call this, on another thread if it has much to do."""
    if size > LARGE:
        return await asyncio.to_thread(work, *arguments)
    return work(*arguments)


def _request(method: rpc.EtcdMethod, body: bytes) -> Any:
    plain = json.loads(body or b"{}")
    if not isinstance(plain, dict):
        raise ParseError("a request is a JSON object")
    return ParseDict(plain, method.request())


async def _json(message: Any) -> Any:
    return await _elsewhere(message.ByteSize(), _encoded_message, message)


def _encoded_message(message: Any) -> bytes:
    return _encoded(MessageToDict(message, preserving_proto_field_name=True))


def _encoded(plain: dict[str, Any]) -> bytes:
    return json.dumps(plain, separators=(",", ":")).encode()


def _error(code: Code, text: str) -> dict[str, Any]:
    return {"error": text, "code": int(code), "message": text}


class _Exchange:
    """One connection, as h11 sees it."""

    def __init__(
        self,
        connection: h11.Connection,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._connection = connection
        self._reader = reader
        self._writer = writer
        self.head_only = False
        """The client has asked for the headers of a response."""

    async def next_event(self) -> Any:
        while True:
            event = self._connection.next_event()
            if event is not h11.NEED_DATA:
                return event
            if self._connection.they_are_waiting_for_100_continue:
                await self._send(h11.InformationalResponse(status_code=100, headers=[]))
            self._connection.receive_data(await self._reader.read(READ))

    async def body(self) -> bytes | None:
        """The body of the request; None if it is too large."""
        body = bytearray()
        while not isinstance(event := await self.next_event(), h11.EndOfMessage):
            if not isinstance(event, h11.Data):
                raise h11.RemoteProtocolError("the connection was closed")
            body += event.data
            if len(body) > MAX_BODY:
                return None
        return bytes(body)

    async def unless_closed(self, work: Any) -> Any:
        """Await this, and cancel it if the client closes the connection meanwhile."""
        working = asyncio.ensure_future(work)
        watching = asyncio.ensure_future(self._closed())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise h11.RemoteProtocolError("the connection was closed")
        except (EtcdError, OSError, h11.ProtocolError):
            raise
        except Exception as error:
            raise unexpected(error) from error
        finally:
            for each in (watching, working):
                each.cancel()
            await asyncio.wait((watching, working))

    async def _closed(self) -> None:
        """The client may send its next request meanwhile, which is kept."""
        ahead = len(self._connection.trailing_data[0])
        while ahead <= READ and (data := await self._reader.read(READ)):
            self._connection.receive_data(data)
            ahead += len(data)

    async def send(self, status: HTTPStatus, answer: dict[str, Any]) -> None:
        await self.send_body(status, _encoded(answer))

    async def send_body(self, status: HTTPStatus, body: bytes) -> None:
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        response = h11.Response(status_code=status, headers=headers)
        data = [] if self.head_only else [h11.Data(data=body)]
        await self._send(response, *data, h11.EndOfMessage())

    async def begin(self) -> None:
        headers = [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")]
        await self._send(h11.Response(status_code=HTTPStatus.OK, headers=headers))

    async def chunk(self, line: bytes) -> None:
        await self._send(h11.Data(data=line + b"\n"))

    async def finish(self) -> None:
        await self._send(h11.EndOfMessage())

    async def _send(self, *events: Any) -> None:
        for event in events:
            if (data := self._connection.send(event)) is not None:
                self._writer.write(data)
        await self._writer.drain()
