"""Limits of etcd's API: streams, frames of no use, compressed messages."""

from __future__ import annotations

import asyncio
import zlib

import pytest

from doyen.quorum.etcd_api import http2, http2_frames, rpc
from doyen.quorum.etcd_api.grpc_server import MAX_REQUEST
from doyen.quorum.etcd_api.http2_frames import (
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    RST_STREAM,
    Http2Code,
    frame,
)
from http2_peer import HOLD, NUMBER, Handlers, Peer, message, put, renew, run, values


def test_too_many_streams_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http2, "MAX_STREAMS", 3)

    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        calls = [peer.call(rpc.LOCK, HOLD) for _ in range(4)]
        await peer.settle()
        resets = [peer.answers[each].reset for each in calls]
        assert resets == [None, None, None, Http2Code.REFUSED_STREAM]

    run(trial)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection has little patience with frames of no use."""
    monkeypatch.setattr(http2_frames, "PATIENCE", 1000)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("provoked", [False, True])
def test_rapid_resets_end_the_connection(provoked: bool) -> None:
    """A client that makes the server reset streams makes as much work as one that resets them."""

    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        peer.connection._patience._restored_at += 3600
        for count in range(1100):
            number, head = peer.opened(rpc.WATCH)
            again = frame(HEADERS, END_HEADERS, number, peer.head(rpc.WATCH.path))
            peer.feed(head + (again if provoked else frame(RST_STREAM, 0, number, NUMBER(8))))
            if count % 100 == 0:
                await asyncio.sleep(0)
            if peer.transport.gone:
                break
        await peer.settle()
        assert peer.goaway is Http2Code.ENHANCE_YOUR_CALM

    run(trial)


@pytest.mark.usefixtures("impatient")
def test_data_byte_by_byte_ends_the_connection() -> None:
    """Requests that arrive so, and responses that are taken so."""

    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        peer.connection._patience._restored_at += 3600
        stream = peer.open(rpc.KEEP_ALIVE)
        one = frame(DATA, 0, stream, b"\0")
        for _ in range(11):
            peer.feed(one * 100)
        await peer.settle()
        assert peer.goaway is Http2Code.ENHANCE_YOUR_CALM
        peer = Peer(handlers.server)
        peer.connection._patience._restored_at += 3600
        peer.set_initial_window(0)
        slow = peer.call(rpc.PUT, put(bytes(16_000)))
        await peer.settle()
        for _ in range(1100):
            peer.allow(slow, 1)
            if peer.transport.gone:
                break
        await peer.settle()
        assert peer.goaway is Http2Code.ENHANCE_YOUR_CALM
        # A client that pings and widens windows for each response does nothing unusual.
        peer = Peer(handlers.server)
        peer.connection._patience._restored_at += 3600
        for count in range(400):
            peer.call(rpc.PUT, put())
            peer.feed(frame(PING, 0, 0, bytes(8)) * 2)
            peer.allow(0, 100)
            if count % 50 == 0:
                await peer.settle()
        await peer.settle()
        assert peer.goaway is None

    run(trial)


def test_compressed_messages() -> None:
    def squeezed(data: bytes, wbits: int) -> bytes:
        squeezer = zlib.compressobj(wbits=wbits)
        return squeezer.compress(data) + squeezer.flush()

    plain = put(bytes(50_000))[5:]
    gzip, deflate = squeezed(plain, 31), squeezed(plain, 15)
    bomb = squeezed(bytes(MAX_REQUEST + 1), 31)

    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        peer.allow(0, 1 << 20)
        for encoding, data in ("gzip", gzip), ("deflate", deflate):
            call = peer.call(rpc.PUT, message(data, 1), grpc_encoding=encoding)
            await peer.settle()
            assert values(peer, call) == [bytes(50_000)]
        stream = peer.open(rpc.KEEP_ALIVE, grpc_encoding="gzip")
        peer.data(stream, message(squeezed(renew(7)[5:], 31), 1) + renew(8))
        await peer.settle()
        told = peer.answers[stream].messages
        assert [rpc.KEEP_ALIVE.response.FromString(each).ID for each in told] == [7, 8]
        flawed = {
            peer.call(rpc.PUT, message(data, flag), grpc_encoding=encoding): code
            for data, flag, encoding, code in (
                (bomb, 1, "gzip", 8),
                (gzip[:-1], 1, "gzip", 13),
                (gzip + b"x", 1, "gzip", 13),
                (b"nonsense", 1, "gzip", 13),
                (b"", 1, "gzip", 13),
                (gzip, 2, "gzip", 13),
                (gzip, 1, "identity", 13),
                (gzip, 1, "snappy", 12),
            )
        }
        await peer.settle()
        assert {number: peer.answers[number].status for number in flawed} == flawed
        unknown = peer.answers[[*flawed][-1]].headers[-1]
        assert unknown["grpc-accept-encoding"] == "identity,deflate,gzip"

    run(trial)
