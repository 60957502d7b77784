"""The API over gRPC. Imports grpc."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from grpc import StatusCode

from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.errors import Code, EtcdError
from doyen.quorum.etcd_api.service import Streaming, Unary

MAX_REQUEST: Final = 2 << 20
"""The keyspace refuses requests above 1 MiB; a larger one ends here."""
OPTIONS: Final = [
    ("grpc.max_receive_message_length", MAX_REQUEST),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
    # Clients of etcd ping every few seconds, with or without calls.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
]
_CODES: Final = {code.value[0]: code for code in StatusCode}


def make_server(
    unary: Mapping[rpc.EtcdMethod, Unary], streaming: Mapping[rpc.EtcdMethod, Streaming]
) -> grpc.aio.Server:
    """A server for these methods. Others answer that they are not implemented."""
    server = grpc.aio.server(options=OPTIONS)
    services: dict[str, dict[str, Any]] = {}
    for method, call in unary.items():
        _add(services, method, grpc.unary_unary_rpc_method_handler, _unary(method, call))
    for method, stream in streaming.items():
        if method.takes_stream:
            _add(services, method, grpc.stream_stream_rpc_method_handler, _stream(method, stream))
        else:
            one = _one_to_many(method, stream)
            _add(services, method, grpc.unary_stream_rpc_method_handler, one)
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(name, each) for name, each in services.items()]
    )
    return server


def _add(
    services: dict[str, dict[str, Any]], method: rpc.EtcdMethod, make: Any, handler: Any
) -> None:
    _, service, name = method.path.split("/")
    # Requests are decoded by the handlers: gRPC would log an error for bytes that are no message.
    services.setdefault(service, {})[name] = make(
        handler, response_serializer=method.response.SerializeToString
    )


def _decoded(method: rpc.EtcdMethod, data: bytes) -> Any:
    try:
        return method.request.FromString(data)
    except DecodeError as error:
        raise EtcdError(Code.INTERNAL, f"grpc: error unmarshalling request: {error}") from error


def _unary(method: rpc.EtcdMethod, call: Unary) -> Any:
    async def handle(data: bytes, context: Any) -> Any:
        try:
            return await call(_decoded(method, data))
        except EtcdError as error:
            await context.abort(_CODES[error.code], error.text)

    return handle


def _stream(method: rpc.EtcdMethod, call: Streaming) -> Any:
    async def handle(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        async def decoded() -> AsyncIterator[Any]:
            async for data in requests:
                yield _decoded(method, data)

        try:
            async for each in call(decoded()):
                yield each
        except EtcdError as error:
            await context.abort(_CODES[error.code], error.text)

    return handle


def _one_to_many(method: rpc.EtcdMethod, call: Streaming) -> Any:
    handle = _stream(method, call)

    async def one(data: bytes, context: Any) -> AsyncIterator[Any]:
        async def requests() -> AsyncIterator[bytes]:
            yield data

        async for each in handle(requests(), context):
            yield each

    return one
