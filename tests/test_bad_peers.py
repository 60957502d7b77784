"""Whoever comes to the listener with ill intent, or none: each costs little and breaks nothing.

After each, a node that belongs here is let in and heard.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import struct
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import encode

from doyen.errors import StoreUnavailable
from doyen.quorum.node.peer_connections import ANSWER, CHUNK, MESSAGE, QUESTION, STORED, STREAM
from doyen.quorum.node.snapshot_transfer import CREDIT, WINDOW
from doyen.quorum.protocol.connection import FrameConnection
from doyen.quorum.protocol.frames import (
    MAX_FRAME,
    MAX_GREETING,
    ConnectionRefused,
    FrameKind,
    frame,
)
from doyen.quorum.protocol.handshake import ClientHandshake, ConnectionIdentity
from doyen.quorum.protocol.security import Security
from neighbours import HOST, SECRET, SNAPSHOT, Node, Nodes, call, run
from servers.certificates import Certificates
from stalls import Stopwatch
from support import until
from test_connections import tls

FRIEND = ConnectionIdentity("c", "n2", 22)


async def answer_to(node: Node, *words: bytes) -> bytes:
    """What a stranger is answered until it is shown out."""
    reader, writer = await asyncio.open_connection(HOST, node.port)
    heard = b""
    try:
        for word in words:
            writer.write(word)
        heard = await reader.read()
    except ConnectionError:
        pass
    finally:
        writer.transport.abort()
    return heard


async def still_serves(node: Node, security: Security | None = None) -> None:
    given = {} if security is None else {"security": security}
    friend = await call(node.address, FRIEND, "peer", **given)
    friend.link.send(QUESTION, bytes(8), b"?")
    await until(lambda: friend.frames == [(ANSWER, bytes(8) + b"re: ?")])
    friend.link.abort()
    await until(lambda: not node.listener.pending and not node.peers.incoming)


def hello() -> bytes:
    return ClientHandshake(FRIEND, "peer").begin()


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        (b"\x80nonsense", "garbage"),
        (b"\x16\x03\x01", "tls"),
        (b"\x00\x00\x00\x00\x01", "malformed"),
        (frame(FrameKind.HELLO), "garbage"),
        (frame(FrameKind.HELLO, b"\xc1" * 50), "garbage"),
        (frame(FrameKind.HELLO, b"\x91\xa5doyen"), "garbage"),
        (frame(FrameKind.HELLO, b"\xdd\xff\xff\xff\xff"), "garbage"),
        (frame(FrameKind.HELLO, b"\x94\xa5doyen\x01\x01" + b"\x91" * 3000), "garbage"),
        (frame(FrameKind.PING), "out-of-turn"),
        (frame(FrameKind.PROOF, bytes(32)), "out-of-turn"),
        (frame(MESSAGE, b"\x90"), "out-of-turn"),
        (frame(9), "out-of-turn"),
        (hello() + hello(), "out-of-turn"),
        (hello() + frame(MESSAGE, b"\x90"), "out-of-turn"),
        (struct.pack(">IB", MAX_GREETING + 1, FrameKind.HELLO), "too-large"),
        (struct.pack(">IB", 2**24 - 1, FrameKind.HELLO), "too-large"),
    ],
    ids=lambda word: None if isinstance(word, str) else "word",
)
async def test_a_stranger_that_sends_garbage(word: bytes, fault: str) -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        await answer_to(node, word)
        assert node.counts == {fault: 1}
        await still_serves(node)


@pytest.mark.parametrize("security", [Security(), Security(peer_secret=SECRET)])
def test_strangers_that_send_random_bytes(security: Security) -> None:
    beginnings = st.sampled_from([b"", hello(), b"GET /healthz HTTP/1.1\r\n", b"\0\0\0"])

    async def body(words: list[bytes]) -> None:
        async with Nodes() as nodes:
            node = await nodes.add("n1", security=security, listener={"handshake_s": 0.01})
            for word in words:
                await answer_to(node, word)
            node.listener.handshake_s = 5
            await still_serves(node, security)
            assert not node.heard()

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        words=st.lists(
            st.builds(bytes.__add__, beginnings, st.binary(max_size=60)), min_size=1, max_size=4
        )
    )
    def trial(words: list[bytes]) -> None:
        run(body(words))

    trial()


@pytest.mark.parametrize(
    ("kind", "payload", "fault"),
    [
        (MESSAGE, b"\xc1", "malformed"),
        (MESSAGE, b"", "malformed"),
        (MESSAGE, b"\x93\xa4Bear\x01\x02", "malformed"),
        (MESSAGE, b"\x93\xa4Beat\xa1x\x02", "malformed"),
        (MESSAGE, b"\x93\xa4Word\x01\xa2\xff\xfe", "malformed"),
        (MESSAGE, b"\x95\xa4Beat\x01\x02\xc4\x00" + b"\x91" * 3000, "malformed"),
        (QUESTION, b"short", "out-of-turn"),
        (ANSWER, bytes(8), "out-of-turn"),
        (STREAM, b"\x90", "malformed"),
        (CHUNK, b"short", "malformed"),
        (CREDIT, bytes(12), "out-of-turn"),
        (200, b"", "out-of-turn"),
        (FrameKind.HELLO, b"", "out-of-turn"),
        (FrameKind.PING, b"too much", "out-of-turn"),
    ],
)
async def test_a_peer_that_sends_garbage(kind: int, payload: bytes, fault: str) -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        bad = await call(node.address, FRIEND, "peer")
        bad.link.send(kind, payload)
        await bad.link.wait()
        assert node.counts == {fault: 1}
        await still_serves(node)


@pytest.mark.parametrize("kind", [ANSWER, CREDIT, STORED, MESSAGE, 200])
async def test_a_peer_that_answers_garbage(kind: int) -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        bad = await nodes.add("n2")

        def admit(link: FrameConnection) -> None:
            link.welcome(lambda *_: None, lambda *_: None)
            link.send(kind, b"nonsense"[: 3 if kind != MESSAGE else None])

        bad.listener._peers = admit
        node.know(bad)
        await until(lambda: sum(node.counts.values()) > 2)
        assert set(node.counts) <= {"malformed", "out-of-turn"}
        assert ("disconnected", "n2") not in node.events  # it was let go of, it did not leave


async def test_answers_to_unknown_requests_are_ignored() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        odd = await nodes.add("n2")

        def admit(link: FrameConnection) -> None:
            link.welcome(lambda *_: None, lambda *_: None)
            link.send(ANSWER, bytes(7) + b"\x09", b"unasked")
            link.send(CREDIT, struct.pack(">QI", 77, 1))
            link.send(STORED, struct.pack(">QB", 77, 1))

        odd.listener._peers = admit
        node.know(odd)
        await until(node.links)
        assert await node.peers.connections["n2"].alive(10)
        assert not node.counts


async def test_a_frame_too_large_is_not_waited_for() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        bad = await call(node.address, FRIEND, "peer")
        bad.link._transport.write(struct.pack(">IB", MAX_FRAME + 1, MESSAGE))
        await bad.link.wait()
        assert node.counts == {"too-large": 1}
        await still_serves(node)


async def test_a_snapshot_sent_without_credit_is_cut_off() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        node.slowly = asyncio.Event().wait
        bad = await call(node.address, FRIEND, "peer", bound=64 << 20)
        bad.link.send(STREAM, encode((1, 5, SNAPSHOT)))
        for _ in range(40):
            bad.link.send(CHUNK, struct.pack(">QB", 1, 1), bytes(WINDOW))
        await bad.link.wait()
        assert node.counts == {"overflow": 1}
        await still_serves(node)


async def test_a_peer_that_asks_and_reads_no_answers() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1", listener={"client_bound": 1 << 20})
        node.answer = lambda question, answer: answer(bytes(100_000))
        bad = await call(node.address, FRIEND, "peer")
        bad.link.pause()
        await until(lambda: [bad.link.send(QUESTION, bytes(8)) for _ in range(50)] and node.counts)
        assert node.counts == {"overflow": 1}
        bad.link.abort()
        node.answer = lambda question, answer: answer(b"re: " + question)
        await still_serves(node)


@pytest.mark.parametrize(
    ("theirs", "complaint"),
    [
        (Security(), "none is set here"),
        (Security(peer_secret=b"guess" * 4), "not the one that is set"),
    ],
)
async def test_peers_without_the_secret_are_refused(theirs: Security, complaint: str) -> None:
    async with Nodes() as nodes:
        ours = Security(peer_secret=SECRET)
        node = await nodes.add("n1", security=ours)
        with pytest.raises(ConnectionRefused, match=complaint):
            await call(node.address, FRIEND, "peer", security=theirs)
        stray = await nodes.add("n2", security=theirs)
        stray.know(node)
        await until(lambda: "secret" in stray.peers.connection_errors["n1"])
        node.know(stray)
        await until(lambda: "secret" in node.peers.connection_errors["n2"])
        assert not node.links()
        node.peers.reach({})
        stray.peers.reach({})
        await still_serves(node, ours)


async def test_a_recorded_conversation_is_worth_nothing() -> None:
    async with Nodes() as nodes:
        security = Security(peer_secret=SECRET)
        node = await nodes.add("n1", security=security)
        recorded: list[bytes] = []

        async def record(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            inner_reader, inner = await asyncio.open_connection(HOST, node.port)
            while data := await reader.read(65536):
                recorded.append(data)
                inner.write(data)
                if len(recorded) <= 2:
                    writer.write(await inner_reader.read(65536))
            inner.transport.abort()
            writer.transport.abort()

        async with await asyncio.start_server(record, HOST, 0) as tap:
            address = f"{HOST}:{tap.sockets[0].getsockname()[1]}"
            friend = await call(address, FRIEND, "peer", security=security)
            friend.link.send(QUESTION, bytes(8), b"?")
            await until(lambda: len(recorded) == 3)
            friend.link.abort()
            await until(lambda: not node.peers.incoming)
        assert b"not the one" in await answer_to(node, *recorded[:2])
        assert node.counts == {"secret": 1}
        await still_serves(node, security)


async def slow_frame(node: Node, writer: asyncio.StreamWriter) -> None:
    for byte in hello()[:-1]:
        writer.write(bytes([byte]))
        await asyncio.sleep(0.001)


async def slow_request(node: Node, writer: asyncio.StreamWriter) -> None:
    writer.write(b"GET /healthz HTTP/1.1\r\n")


async def silence(node: Node, writer: asyncio.StreamWriter) -> None:
    pass


@pytest.mark.parametrize("secured", [False, True])
@pytest.mark.parametrize("way", [slow_frame, slow_request, silence])
async def test_a_slow_client_is_disconnected_at_the_deadline(
    way: Callable[[Node, asyncio.StreamWriter], Awaitable[None]],
    secured: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Before TLS, in the handshake, or in a request: one deadline for all of it."""
    security = Security()
    if secured:
        security = tls(Certificates(tmp_path_factory.mktemp("tls")), "server")
    async with Nodes() as nodes:
        node = await nodes.add("n1", security=security, listener={"handshake_s": 0.2})
        reader, writer = await asyncio.open_connection(HOST, node.port)
        try:
            await until(lambda: node.listener.pending == 1)
            if not secured or way is silence:
                await way(node, writer)
            else:
                writer.write(b"\x16\x03\x01\x02\x00\x01")
            try:
                await reader.read()
            except ConnectionError:
                pass
        finally:
            writer.transport.abort()
        await until(lambda: not node.listener.pending)
        assert node.counts == {"deadline": 1}


async def test_strangers_beyond_the_bound_go_in_the_order_they_came() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1", listener={"max_pending": 20})
        strangers = [socket.create_connection((HOST, node.port)) for _ in range(100)]
        try:
            await until(lambda: node.counts.get("crowded") == 80)
            assert node.listener.pending == 20
            friend = await call(node.address)
            assert friend.link.open
            friend.link.abort()
            await until(lambda: not node.listener.clients)
            assert node.counts == {"crowded": 81}
        finally:
            for stranger in strangers:
                stranger.close()
        await until(lambda: not node.listener.pending)
        await still_serves(node)


async def test_ten_thousand_connections_opened_and_dropped() -> None:
    """In waves, some with a word and some without, while a peer is served all along."""
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        friend = await nodes.add("n2")
        friend.know(node)
        await until(friend.links)
        loop = asyncio.get_running_loop()
        words = [b"", b"\0", hello()[:20], hello(), b"GET ", b"\x80"]
        longest = 0.0
        for wave in range(100):
            sockets = []
            for number in range(100):
                stranger = socket.socket()
                stranger.setblocking(False)
                sockets.append(stranger)
                await loop.sock_connect(stranger, (HOST, node.port))
                if word := words[number % len(words)]:
                    stranger.send(word)
            for number, stranger in enumerate(sockets):
                if number % 2:
                    reset = struct.pack("ii", 1, 0)
                    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                stranger.close()
            asked = Stopwatch()
            assert await friend.peers.ask("n1", b"%d" % wave) == b"re: %d" % wave
            longest = max(longest, asked.elapsed_s())
        await until(lambda: not node.listener.pending)
        assert longest < 1
        assert friend.links() == [("connected", "n1")]
        assert set(node.counts) <= {"garbage", "crowded"}
        assert node.counts["garbage"] > 500


def test_complaints_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with Nodes() as nodes:
            node = await nodes.add("n1")
            for _ in range(30):
                await answer_to(node, b"\x80")
            assert node.counts == {"garbage": 30}

    caplog.set_level(logging.INFO)
    run(body())
    (line,) = [record for record in caplog.records if record.name == "doyen"]
    assert "event=connection_closed reason=garbage" in line.getMessage()
    assert "sent neither HTTP nor frames" in line.getMessage()


async def test_a_closed_listener_drops_pending_connections_and_accepts_none() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        with socket.create_connection((HOST, node.port)):
            await until(lambda: node.listener.pending == 1)
            await node.close()
            assert not node.listener.pending
            with pytest.raises(StoreUnavailable):
                await call(node.address)


@pytest.mark.parametrize("turns", range(4))
def test_a_listener_closed_during_an_accept_leaves_no_socket_open(turns: int) -> None:
    """An unclosed socket is a warning, and warnings are errors here."""

    async def body() -> None:
        async with Nodes() as nodes:
            node = await nodes.add("n1")
            arriving = [socket.create_connection((HOST, node.port)) for _ in range(3)]
            for _ in range(turns):
                await asyncio.sleep(0)
            await node.listener.close()
            for each in arriving:
                each.close()

    run(body())
    gc.collect()
