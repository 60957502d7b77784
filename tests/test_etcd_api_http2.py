"""HTTP/2 and gRPC of etcd's API, frame by frame, on a transport in memory."""

from __future__ import annotations

import asyncio
import random
import struct
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hpack import Decoder, Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen.quorum.etcd_api import http2_frames, rpc
from doyen.quorum.etcd_api.grpc_server import MAX_REQUEST
from doyen.quorum.etcd_api.http2 import Http2Connection
from doyen.quorum.etcd_api.http2_frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    GOAWAY,
    HEADERS,
    MAX_WINDOW,
    PADDED,
    PING,
    PREFACE,
    PRIORITY,
    PUSH_PROMISE,
    RST_STREAM,
    SETTINGS,
    WINDOW,
    WINDOW_UPDATE,
    HeaderBlocks,
    Http2Code,
    frame,
)
from doyen.quorum.etcd_api.http2_output import HIGH_WATER, Output
from doyen.quorum.etcd_api.http2_streams import LARGE_BYTES, Stream
from http2_peer import HOLD, NUMBER, Handlers, Peer, message, put, renew, run, values

WATCH = message(b"")


def test_calls_and_their_errors() -> None:
    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        first = peer.call(rpc.PUT, put(b"v"), grpc_timeout="20S")
        refused = peer.call(rpc.PUT, put(key=b"x"))
        unknown = peer.call("/etcdserverpb.KV/Nothing", put())
        nobody = peer.call("/a.B/C", put())
        flawed = peer.call(rpc.PUT, message(b"\xff\xff"))
        large = peer.open(rpc.PUT)
        peer.data(large, struct.pack(">BL", 0, MAX_REQUEST + 1))
        flagged = peer.call(rpc.PUT, message(b"x", 1))
        twice = peer.call(rpc.PUT, put() + put())
        empty = peer.open(rpc.PUT, end=True)
        cut = peer.call(rpc.PUT, put(b"v")[:-1])
        late = peer.call(rpc.LOCK, HOLD, grpc_timeout="1u")
        odd = peer.call(rpc.PUT, put(), grpc_timeout="soon")
        await peer.settle(200)
        answers = peer.answers
        assert (answers[first].status, values(peer, first)) == (0, [b"v"])
        assert answers[first].headers[0][":status"] == "200"
        assert (answers[refused].status, answers[refused].text) == (
            5,
            "no such thing: 100 %25 %C3%A9",
        )
        assert answers[unknown].text == "unknown method Nothing for service etcdserverpb.KV"
        assert answers[nobody].text == "unknown service a.B"
        assert (answers[large].status, answers[large].reset) == (8, Http2Code.NO_ERROR)
        assert answers[large].text.startswith("SERVER: Received message larger than max")
        codes = {
            unknown: 12,
            nobody: 12,
            flawed: 13,
            flagged: 13,
            twice: 13,
            empty: 13,
            cut: 13,
            late: 4,
            odd: 13,
        }
        assert {number: answers[number].status for number in codes} == codes
        assert not peer.connection.streams
        again = peer.call(rpc.PUT, put(b"w"))
        await peer.settle()
        assert values(peer, again) == [b"w"]

    run(trial)


def test_requests_that_are_not_grpc() -> None:
    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        get_method: Any = {":method": "GET"}
        odd: Any = {":odd": "1"}
        get = peer.open(rpc.PUT, end=True, **get_method)
        page = peer.open(rpc.PUT, end=True, content_type="text/html")
        malformed = [
            peer.open(rpc.PUT, Upper="1"),
            peer.open(rpc.PUT, connection="close"),
            peer.open(rpc.PUT, te="gzip"),
            peer.open(rpc.PUT, **odd),
            peer.open(rpc.PUT, x="a\nb"),
        ]
        await peer.settle()
        assert peer.answers[get].headers == [{":status": "405"}]
        assert peer.answers[page].headers == [{":status": "415"}]
        for number in malformed:
            assert peer.answers[number].reset is Http2Code.PROTOCOL_ERROR
        assert peer.goaway is None

    run(trial)


def test_streams_in_both_directions() -> None:
    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        stream = peer.open(rpc.KEEP_ALIVE)
        for number in range(3):
            peer.data(stream, renew(number))
            await peer.settle()
            assert len(peer.answers[stream].messages) == number + 1
        peer.data(stream, b"", end=True)
        observed = peer.call(rpc.OBSERVE, message(b""))
        await peer.settle()
        assert peer.answers[stream].status == 0
        assert len(peer.answers[observed].messages) == 3
        # What a client resets is cancelled, and so is what it had open when it left.
        held = peer.call(rpc.LOCK, HOLD)
        other = peer.call(rpc.LOCK, HOLD)
        await peer.settle()
        peer.reset(held)
        await peer.settle()
        assert (handlers.running, handlers.cancelled) == (1, 1)
        assert not peer.answers[held].headers
        peer.feed(frame(GOAWAY, 0, 0, bytes(8)))
        handlers.waiting[1].set_result(None)
        await peer.settle()
        assert peer.answers[other].status == 0
        peer.call(rpc.LOCK, HOLD)
        await peer.settle()
        peer.connection.connection_lost(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (handlers.running, peer.lost) == (0, [True])
        peer.transport.gone = True

    run(trial)


def test_a_defect_of_a_handler_is_reported_and_answered() -> None:
    reported: list[Any] = []

    async def trial(handlers: Handlers) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, each: reported.append(each))
        peer = Peer(handlers.server)
        call = peer.call(rpc.TXN, message(b""))
        await peer.settle()
        assert (peer.answers[call].status, peer.answers[call].text) == (
            2,
            "unexpected ZeroDivisionError: a defect",
        )

    run(trial)
    assert [type(each["exception"]) for each in reported] == [ZeroDivisionError]


FAULTS: dict[str, tuple[bytes, Http2Code]] = {
    "data on an idle stream": (frame(DATA, 0, 9, b"x"), Http2Code.PROTOCOL_ERROR),
    "data on the connection": (frame(DATA, 0, 0, b"x"), Http2Code.PROTOCOL_ERROR),
    "reset of an idle stream": (frame(RST_STREAM, 0, 9, bytes(4)), Http2Code.PROTOCOL_ERROR),
    "reset of the wrong size": (frame(RST_STREAM, 0, 1, bytes(3)), Http2Code.FRAME_SIZE_ERROR),
    "window of an idle stream": (
        frame(WINDOW_UPDATE, 0, 9, NUMBER(1)),
        Http2Code.PROTOCOL_ERROR,
    ),
    "window by nothing": (frame(WINDOW_UPDATE, 0, 0, bytes(4)), Http2Code.PROTOCOL_ERROR),
    "window beyond the most": (
        frame(WINDOW_UPDATE, 0, 0, NUMBER(MAX_WINDOW)),
        Http2Code.FLOW_CONTROL_ERROR,
    ),
    "window of the wrong size": (frame(WINDOW_UPDATE, 0, 0, b"x"), Http2Code.FRAME_SIZE_ERROR),
    "initial window beyond the most": (
        frame(SETTINGS, 0, 0, http2_frames.settings({http2_frames.INITIAL_WINDOW: 1 << 31})),
        Http2Code.FLOW_CONTROL_ERROR,
    ),
    "frame size out of range": (
        frame(SETTINGS, 0, 0, http2_frames.settings({http2_frames.FRAME_SIZE: 1})),
        Http2Code.PROTOCOL_ERROR,
    ),
    "push neither on nor off": (
        frame(SETTINGS, 0, 0, http2_frames.settings({http2_frames.ENABLE_PUSH: 2})),
        Http2Code.PROTOCOL_ERROR,
    ),
    "settings of the wrong size": (frame(SETTINGS, 0, 0, b"x"), Http2Code.FRAME_SIZE_ERROR),
    "settings on a stream": (frame(SETTINGS, 0, 1), Http2Code.PROTOCOL_ERROR),
    "ack with settings": (frame(SETTINGS, 1, 0, bytes(6)), Http2Code.FRAME_SIZE_ERROR),
    "ping of the wrong size": (frame(PING, 0, 0, bytes(7)), Http2Code.FRAME_SIZE_ERROR),
    "ping on a stream": (frame(PING, 0, 1, bytes(8)), Http2Code.PROTOCOL_ERROR),
    "goaway of the wrong size": (frame(GOAWAY, 0, 0, bytes(7)), Http2Code.FRAME_SIZE_ERROR),
    "push by a client": (frame(PUSH_PROMISE, 4, 1, bytes(8)), Http2Code.PROTOCOL_ERROR),
    "priority of the wrong size": (frame(PRIORITY, 0, 3, bytes(4)), Http2Code.FRAME_SIZE_ERROR),
    "priority without a stream": (frame(PRIORITY, 0, 0, bytes(5)), Http2Code.PROTOCOL_ERROR),
    "a frame too large": (b"\0\x40\1" + bytes(6), Http2Code.FRAME_SIZE_ERROR),
    "headers on an even stream": (frame(HEADERS, 4, 2, b"\x82"), Http2Code.PROTOCOL_ERROR),
    "padding beyond the frame": (frame(HEADERS, 12, 3, b"\x09\x82"), Http2Code.PROTOCOL_ERROR),
    "continuation of nothing": (frame(CONTINUATION, 4, 1, b"\x82"), Http2Code.PROTOCOL_ERROR),
    "another frame within a header block": (
        frame(HEADERS, 0, 3, b"\x82") + frame(PING, 0, 0, bytes(8)),
        Http2Code.PROTOCOL_ERROR,
    ),
    "an index outside the table": (
        frame(HEADERS, 4, 3, b"\xff\xff\x01"),
        Http2Code.COMPRESSION_ERROR,
    ),
    "headers that expand": (
        # One long header enters the table, and is named a thousand times.
        frame(HEADERS, 4, 3, b"\x40\x01x\x7f\xe1\x16" + bytes(3040) + b"\xbe" * 1000),
        Http2Code.COMPRESSION_ERROR,
    ),
    "a header block without end": (
        frame(HEADERS, 0, 3, b"") + frame(CONTINUATION, 0, 3, b"\0" * 9000) * 2,
        Http2Code.ENHANCE_YOUR_CALM,
    ),
    "empty continuations": (
        frame(HEADERS, 0, 3, b"") + frame(CONTINUATION, 0, 3) * 10_001,
        Http2Code.ENHANCE_YOUR_CALM,
    ),
    "many pings": (frame(PING, 0, 0, bytes(8)) * 11_000, Http2Code.ENHANCE_YOUR_CALM),
    "many settings": (frame(SETTINGS, 0, 0) * 11_000, Http2Code.ENHANCE_YOUR_CALM),
    "many priorities": (frame(PRIORITY, 0, 3, bytes(5)) * 11_000, Http2Code.ENHANCE_YOUR_CALM),
    "many frames of unknown kinds": (frame(99, 0, 0) * 11_000, Http2Code.ENHANCE_YOUR_CALM),
    "more data than the window": (frame(DATA, 0, 1, bytes(200)), Http2Code.FLOW_CONTROL_ERROR),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_end_the_connection(name: str) -> None:
    data, code = FAULTS[name]

    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        peer.connection._patience._restored_at += 3600  # patience is not restored meanwhile
        peer.call(rpc.LOCK, HOLD)
        await peer.settle()
        if name == "more data than the window":
            peer.connection.windows._left = 100
        peer.feed(data)
        await peer.settle()
        assert peer.goaway is code
        assert peer.lost == [True]
        assert (handlers.running, handlers.cancelled) == (0, 1)

    run(trial)


def test_the_first_frames() -> None:
    async def trial(handlers: Handlers) -> None:
        for data in (b"PRI * HTTP/1.1\r\n", PREFACE + frame(PING, 0, 0, bytes(8))):
            peer = Peer(handlers.server, greet=False)
            peer.feed(data)
            await peer.settle()
            assert peer.goaway is Http2Code.PROTOCOL_ERROR
        silent = Peer(handlers.server, greet=False)
        timer = silent.connection._life._timer
        timer._callback(*timer._args)  # type: ignore[attr-defined]  # after FIRST_S
        await silent.settle()
        assert silent.lost

    run(trial)


def test_faults_that_end_one_stream() -> None:
    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)

        async def after(data: bytes, number: int) -> Http2Code | None:
            peer.answers[number].reset = None
            peer.feed(data)
            await peer.settle()
            return peer.answers[number].reset

        closed = peer.call(rpc.PUT, put())
        await peer.settle()
        assert await after(frame(DATA, 0, closed, b"x"), closed) is Http2Code.STREAM_CLOSED
        assert await after(frame(DATA, 0, closed, b"x"), closed) is None, "once is enough"
        closed = peer.call(rpc.PUT, put())
        await peer.settle()
        again = frame(HEADERS, END_HEADERS, closed, peer.head(rpc.PUT.path))
        assert await after(again, closed) is Http2Code.STREAM_CLOSED
        assert await after(frame(WINDOW_UPDATE, 0, closed, NUMBER(1)), closed) is None
        assert await after(frame(RST_STREAM, 0, closed, NUMBER(8)), closed) is None
        half = peer.call(rpc.LOCK, HOLD)
        assert await after(frame(DATA, 0, half, b"x"), half) is Http2Code.STREAM_CLOSED
        zero = peer.call(rpc.LOCK, HOLD)
        assert (
            await after(frame(WINDOW_UPDATE, 0, zero, bytes(4)), zero) is Http2Code.PROTOCOL_ERROR
        )
        wide = peer.call(rpc.LOCK, HOLD)
        more = frame(WINDOW_UPDATE, 0, wide, NUMBER(MAX_WINDOW))
        assert await after(more, wide) is Http2Code.FLOW_CONTROL_ERROR
        full = peer.open(rpc.WATCH)
        much = frame(DATA, 0, full, message(bytes(10_000))) * 7
        assert await after(much, full) is Http2Code.FLOW_CONTROL_ERROR
        # Trailers end a request; headers that do not are a fault.
        kept = peer.open(rpc.KEEP_ALIVE)
        block = peer.encoder.encode([("x", "1")])
        trailing = frame(HEADERS, END_HEADERS | END_STREAM, kept, block)
        assert await after(trailing, kept) is None
        assert peer.answers[kept].status == 0
        kept = peer.open(rpc.KEEP_ALIVE)
        block = peer.encoder.encode([("x", "1")])
        assert await after(frame(HEADERS, END_HEADERS, kept, block), kept) is (
            Http2Code.PROTOCOL_ERROR
        )
        assert peer.goaway is None

    run(trial)


def session(peer: Peer) -> tuple[bytes, list[int]]:
    """The bytes of several calls, in which everything occurs that a client may send."""
    streams: list[int] = []
    parts = [PREFACE, frame(SETTINGS, 0, 0, http2_frames.settings({3: 100, 1: 0}))]

    def opened(method: Any) -> int:
        number, head = peer.opened(method)
        streams.append(number)
        parts.append(head)
        return number

    first, second = opened(rpc.PUT), opened(rpc.KEEP_ALIVE)
    parts.append(frame(DATA, 0, first, put(b"one")[:3]))
    parts.append(frame(DATA, PADDED, second, b"\x04" + renew(1) + bytes(4)))
    parts.append(frame(PING, 0, 0, b"12345678") + frame(PRIORITY, 0, 77, bytes(5)))
    parts.append(frame(DATA, END_STREAM, first, put(b"one")[3:]))
    number, head = peer.opened(rpc.PUT)
    streams.append(number)
    block = head[9:]
    parts.append(frame(HEADERS, 0, number, block[:1]))
    parts.append(frame(CONTINUATION, 0, number, block[1:20]) + frame(CONTINUATION, 0, number))
    parts.append(frame(CONTINUATION, END_HEADERS, number, block[20:]))
    large = put(bytes(20_000))
    parts.append(frame(DATA, 0, number, large[:16_000]) + frame(DATA, 1, number, large[16_000:]))
    parts.append(frame(DATA, 0, second, renew(2) + renew(3)[:4]) + frame(99, 3, 5, b"odd"))
    refused = opened(rpc.PUT)
    parts.append(frame(DATA, END_STREAM, refused, put(key=b"x")))
    parts.append(frame(WINDOW_UPDATE, 0, 0, NUMBER(100_000)))
    parts.append(frame(DATA, END_STREAM, second, renew(3)[4:]))
    for _ in range(3):  # header blocks that are remembered
        again = opened(rpc.PUT)
        parts.append(frame(DATA, END_STREAM, again, put(b"again")))
    return b"".join(parts), streams


def answered(cuts: list[int] | None) -> Any:
    """What a server answers to this session, in these pieces; without cuts, byte by byte."""
    found: list[Any] = []

    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server, greet=False)
        data, streams = session(peer)
        peer.window += 100_000
        places = [*range(len(data) + 1)] if cuts is None else sorted({0, len(data), *cuts})
        for start, stop in pairwise(places):
            peer.feed(data[start:stop])
            if cuts is not None or start % 16 == 0:
                await asyncio.sleep(0)
        await peer.settle()
        answers = [peer.answers[each] for each in streams]
        found.extend((each.status, each.messages, each.headers, each.reset) for each in answers)
        found.append((peer.pongs, peer.acks, peer.goaway))

    run(trial)
    return found


WHOLE: list[Any] = []


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 22_000), max_size=40))
def test_the_division_into_reads_does_not_matter(cuts: list[int]) -> None:
    if not WHOLE:
        WHOLE.extend(answered([]))
        assert [each[0] for each in WHOLE[:-1]] == [0, 0, 0, 5, 0, 0, 0]
        assert len(WHOLE[1][1]) == 3
        assert answered(None) == WHOLE, "byte by byte"
    assert answered(cuts) == WHOLE


def test_windows_of_the_peer() -> None:
    """Nothing is sent while a window is empty, and each byte that it is widened by is used."""

    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        peer.set_initial_window(0)
        one, other = peer.call(rpc.PUT, put(b"v" * 40)), peer.call(rpc.PUT, put(key=b"x"))
        await peer.settle()
        assert peer.answers[one].headers
        assert not peer.answers[one].data
        assert peer.answers[other].status == 5, "a status needs no window"
        for count in range(1, 20):
            peer.allow(one, 1)
            await peer.settle(3)
            assert len(peer.answers[one].data) == count
        peer.set_initial_window(7)
        await peer.settle()
        assert len(peer.answers[one].data) == 26
        peer.set_initial_window(0)  # now it is negative
        peer.allow(one, 7)
        await peer.settle()
        assert len(peer.answers[one].data) == 26
        peer.allow(one, 1000)
        await peer.settle()
        assert (peer.answers[one].status, values(peer, one)) == (0, [b"v" * 40])
        # The window of the connection is shared by all streams.
        peer.set_initial_window(1 << 20)
        calls = [peer.call(rpc.PUT, put(bytes(10_000))) for _ in range(20)]
        await peer.settle()
        assert peer.window == 0
        peer.allow(0, 1 << 20)
        await peer.settle(40)
        assert all(values(peer, each) == [bytes(10_000)] for each in calls)

    run(trial)


def test_a_peer_that_does_not_read_takes_no_memory() -> None:
    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        peer.transport.stuck = True
        peer.set_initial_window(MAX_WINDOW)
        peer.allow(0, MAX_WINDOW - WINDOW)
        watches = [peer.open(rpc.WATCH) for _ in range(5)]
        calls = [peer.call(rpc.PUT, put(bytes(16_000))) for _ in range(200)]
        refused = [peer.call("/no/method", put()) for _ in range(200)]
        await peer.settle(300)
        assert peer.transport.most_waiting < 2.2 * HIGH_WATER
        assert handlers.sent < 3 * HIGH_WATER
        assert peer.connection._output._queued < HIGH_WATER
        before = handlers.sent
        await peer.settle(100)
        assert handlers.sent == before, "nobody makes responses for it"
        # When it reads again, it misses nothing.
        peer.transport.release()
        for each in watches:
            peer.reset(each)
        await peer.settle(300)
        assert all(values(peer, each) == [bytes(16_000)] for each in calls)
        assert {peer.answers[each].status for each in refused} == {12}
        # One that wants answers and does not read them is disconnected.
        peer.transport.stuck = True
        peer.open(rpc.WATCH)
        await peer.settle(100)
        for _ in range(100):
            peer.feed(frame(PING, 0, 0, bytes(8)) * 1000)
            peer.connection._patience.left = 1e6
            await asyncio.sleep(0)
        assert peer.transport.most_waiting < 3 * HIGH_WATER
        assert peer.lost

    run(trial)


def test_large_messages_are_admitted_in_turn() -> None:
    """All of them arrive, although together they have more than is kept of a connection."""

    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        peer.allow(0, 1 << 24)
        value = bytes(1_900_000)
        data = put(value, key=b"x")
        calls = {peer.open(rpc.PUT): 0 for _ in range(20)}
        most = 0
        while any(at < len(data) for at in calls.values()):
            moved = False
            for number, at in calls.items():
                peer.parse()
                allowed = min(peer.allowed[number], peer.allowed[0])
                room = min(allowed, http2_frames.MAX_FRAME, len(data) - at)
                if room <= 0:
                    continue
                moved = True
                end = at + room == len(data)
                peer.data(number, data[at : at + room], end=end)
                peer.allowed[number] -= room
                peer.allowed[0] -= room
                calls[number] = at + room
            open_: Any = peer.connection.streams.values()
            kept = sum(len(each._buffer) for each in open_)
            most = max(most, kept)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert moved or any(peer.allowed[each] for each in calls)
        await peer.settle()
        assert [peer.answers[each].status for each in calls] == [5] * 20
        assert most <= LARGE_BYTES + 20 * WINDOW
        assert peer.connection.windows._granted == 0
        # The requests of a stream are taken as its handler asks for them.
        stream = peer.open(rpc.KEEP_ALIVE)
        sent = 0
        for number in range(40):
            data = renew(number) + message(b"\x1a" + b"\x90\x4e" + bytes(10_000))
            for part in (data[:8000], data[8000:]):
                peer.parse()
                assert peer.allowed[stream] >= len(part)
                peer.data(stream, part)
                peer.allowed[stream] -= len(part)
                sent += len(part)
                await asyncio.sleep(0)
            await peer.settle()
        assert len(peer.answers[stream].messages) == 80

    run(trial)


class Adversary:
    """Sends frames drawn from a seed: calls, windows, resets, and now and then a senseless one."""

    def __init__(self, seed: int, handlers: Handlers) -> None:
        self.rng = random.Random(seed)
        self.peer = Peer(handlers.server)
        self.handlers = handlers
        self.unsent: dict[int, bytes] = {}
        self.expected: dict[int, bytes] = {}

    def step(self) -> None:
        rng, peer = self.rng, self.peer
        kind = rng.randrange(12)
        open_ = [each for each, answer in peer.answers.items() if not answer.ended]
        if kind < 3:
            value = rng.randbytes(rng.choice([0, 10, 3000, 20_000]))
            more: Any = {"x": rng.randrange(3)} if rng.random() < 0.3 else {}
            number = peer.open(rpc.PUT, **more)
            self.unsent[number], self.expected[number] = put(value), value
        elif kind < 6 and self.unsent:
            self._send_some(rng.choice([*self.unsent]))
        elif kind == 6:
            peer.allow(0, rng.choice([1, 100, 5000, 50_000]))
        elif kind == 7 and open_:
            peer.allow(rng.choice(open_), rng.choice([1, 100, 5000, 50_000]))
        elif kind == 8:
            peer.set_initial_window(rng.choice([0, 1, 1000, WINDOW, 100_000]))
        elif kind == 9 and open_ and rng.random() < 0.3:
            number = rng.choice(open_)
            self.unsent.pop(number, None)
            self.expected.pop(number, None)
            peer.reset(number)
            peer.answers[number].ended = True
        elif kind == 10:
            self._odd(rng.choice([PING, PRIORITY, 77]))
        elif kind == 11 and rng.random() < 0.1:
            peer.transport.stuck = True

    def _send_some(self, number: int) -> None:
        data = self.unsent.pop(number)
        some = self.rng.randrange(1, min(len(data), http2_frames.MAX_FRAME) + 1)
        rest = data[some:]
        if rest:
            self.unsent[number] = rest
        self.peer.data(number, data[:some], end=not rest)

    def _odd(self, kind: int) -> None:
        size = {PING: 8, PRIORITY: 5}.get(kind, 3)
        self.peer.feed(frame(kind, 0, 0 if kind == PING else 1, bytes(size)))

    async def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
            if self.rng.random() < 0.5:
                await self.peer.settle(self.rng.choice([1, 3]))
            if self.rng.random() < 0.05:
                self.peer.transport.release()
        await self.finish()

    async def finish(self) -> None:
        """All that was asked is answered, once the peer takes it."""
        peer = self.peer
        peer.transport.release()
        while self.unsent:
            self._send_some(next(iter(self.unsent)))
        await peer.settle()
        peer.set_initial_window(1 << 24)
        peer.allow(0, 1 << 24)
        await peer.settle(100)
        assert peer.goaway is None
        for number, value in self.expected.items():
            assert peer.answers[number].status == 0, number
            assert values(peer, number) == [value]
        assert not peer.connection.streams
        assert not peer.connection._output._ready


def explore(seeds: range, steps: int = 80) -> None:
    async def trial(handlers: Handlers) -> None:
        for seed in seeds:
            try:
                await Adversary(seed, handlers).run(steps)
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}") from error

    run(trial)


def test_an_adversary() -> None:
    explore(range(40))


@pytest.mark.chaos
def test_an_adversary_for_longer() -> None:
    for first in range(1000, 2000, 100):  # each part has a bound of time
        explore(range(first, first + 100), 300)


def ignores_streams(patch: pytest.MonkeyPatch) -> None:
    """A new stream has any window."""
    begin = Stream.__init__

    def wide(self: Stream, connection: Http2Connection, number: int) -> None:
        begin(self, connection, number)
        self.outbound = 1 << 30

    patch.setattr(Stream, "__init__", wide)


def ignores_the_connection(patch: pytest.MonkeyPatch) -> None:
    """The window of the connection is renewed by any stream's."""
    widen = Output.widen

    def both(self: Output, stream: Stream, more: int) -> None:
        self._window += max(more, 0)
        widen(self, stream, more)

    patch.setattr(Output, "widen", both)


def never_narrower(patch: pytest.MonkeyPatch) -> None:
    """A smaller initial window does not concern open streams."""
    widen = Output.widen
    patch.setattr(Output, "widen", lambda self, stream, more: widen(self, stream, max(more, 0)))


def forgets_who_waits(patch: pytest.MonkeyPatch) -> None:
    """A wider window of the connection wakes nobody."""
    patch.setattr(Output, "_pump", lambda self: None)


MUTANTS = [
    ignores_streams,
    ignores_the_connection,
    never_narrower,
    forgets_who_waits,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_adversary_finds_mutants(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        explore(range(40))


def decode_headers(seed: int) -> None:
    """Header blocks mean to a connection what they mean to a plain decoder."""

    async def trial(handlers: Handlers) -> None:
        rng = random.Random(seed)
        blocks = HeaderBlocks(tuple)
        encoder, plain = Encoder(), Decoder(max_header_list_size=http2_frames.MAX_HEADERS)
        for _ in range(300):
            if rng.random() < 0.05:
                encoder.header_table_size = rng.choice([0, 100, 4096])
            headers = [
                ("x", rng.choice(["1", "2", "3", "y" * 1500])) for _ in range(rng.randrange(3))
            ]
            block = encoder.encode(headers, huffman=rng.random() < 0.5)
            expected = tuple(plain.decode(block, raw=True))
            assert blocks.decoded(block) == expected
            if rng.random() < 0.3:
                assert blocks.decoded(b"\x82") == ((b":method", b"GET"),)

    run(trial)


def test_header_blocks_are_remembered_only_while_they_mean_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for seed in range(5):
        decode_headers(seed)
    decoded = HeaderBlocks.decoded
    known: dict[bytes, Any] = {}

    def stale(self: HeaderBlocks, block: bytes) -> Any:
        known[block] = known.get(block) or decoded(self, block)
        return known[block]

    monkeypatch.setattr(HeaderBlocks, "decoded", stale)
    with pytest.raises((AssertionError, http2_frames.ConnectionFault)):
        decode_headers(0)


def test_a_silent_client_is_pinged_and_then_left() -> None:
    async def trial(handlers: Handlers) -> None:
        peer = Peer(handlers.server)
        for answers in (True, False):
            await peer.settle()
            peer.connection._life.check()  # after KEEPALIVE_S without a frame
            await peer.settle()
            assert peer.pings == 1
            peer.pings = 0
            if answers:
                peer.feed(frame(PING, ACK, 0, bytes(8)))
            peer.connection._life._give_up()  # after ANSWER_S
            await peer.settle()
            assert peer.lost == ([] if answers else [True])

    run(trial)
