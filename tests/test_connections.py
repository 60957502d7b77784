"""Connections over real sockets: the listener, TLS, flow control, silence, and HTTP pages."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from doyen.errors import ConfigError, StoreUnavailable, StoreUnusable
from doyen.quorum.node.listener import Listener
from doyen.quorum.protocol.connection import HIGH_WATER, End, FrameConnection
from doyen.quorum.protocol.frames import (
    MAX_FRAME,
    MAX_GREETING,
    CloseReason,
    ConnectionRefused,
    FrameKind,
    frame,
)
from doyen.quorum.protocol.handshake import ConnectionIdentity
from doyen.quorum.protocol.security import TLS, Security
from neighbours import HOST, OPEN, SECRET, Nodes, call, run
from servers import Proxy
from servers.certificates import Certificates
from support import until


async def test_frames_go_both_ways_and_many_at_a_time() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        caller = await call(node.address)
        assert caller.link.remote == node.me
        sent = [(20 + number % 3, b"%d" % number) for number in range(10_000)]
        for each in sent:
            assert caller.link.send(*each)
        await until(lambda: len(node.frames) == len(sent))
        assert node.frames == sent
        node.clients[0].send(30, b"head", b"body")
        await until(lambda: caller.frames)
        assert caller.frames == [(30, b"headbody")]
        caller.link.close()
        await until(lambda: node.ends and caller.ends)
        assert (node.ends, caller.ends) == ([End.LEFT], [End.CLOSED])
        assert not caller.link.send(20, b"")


async def test_what_is_sent_in_one_turn_is_one_write() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        caller = await call(node.address)
        writes: list[bytes] = []
        caller.link._sink = _Spy(caller.link._sink, writes)
        for _ in range(100):
            caller.link.send(20, b"x")
        await until(lambda: len(node.frames) == 100)
        assert len(writes) == 1
        caller.link.abort()


class _Spy:
    def __init__(self, transport: Any, writes: list[bytes]) -> None:
        self._transport = transport
        self._writes = writes

    def write(self, data: bytes) -> None:
        self._writes.append(data)
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


async def test_a_small_answer_does_not_wait_for_an_acknowledgement() -> None:
    """With Nagle's algorithm, the second of two small frames would wait 40 ms for one."""
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        caller = await call(node.address)
        await until(lambda: node.clients)
        for link in (caller.link, node.clients[0]):
            connection = link._transport.get_extra_info("socket")
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        caller.link.abort()


async def test_what_was_sent_goes_before_the_end() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        caller = await call(node.address)
        for _ in range(50):
            caller.link.send(20, bytes(100_000))
        caller.link.close()
        await until(lambda: node.ends)
        assert len(node.frames) == 50


async def test_the_largest_frame_passes_and_a_larger_one_is_not_sent() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        caller = await call(node.address)
        with pytest.raises(ValueError, match="are allowed"):
            caller.link.send(20, bytes(MAX_FRAME))
        caller.link.send(20, bytes(MAX_FRAME - 1))
        await until(lambda: node.frames)
        assert len(node.frames[0][1]) == MAX_FRAME - 1
        caller.link.abort()


async def test_what_follows_the_welcome_is_judged_as_any_frame() -> None:
    """It may arrive in the same read, and be larger than a frame of the handshake may."""
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        big = bytes(MAX_GREETING + 1)

        def welcome(link: FrameConnection) -> None:
            link._transport = _Held(link._transport)
            link.welcome(lambda *_: None, lambda *_: None)
            link._transport.write(frame(20, big) + frame(FrameKind.PING) + frame(21, b"x"))
            link._transport.release()

        node.listener._clients = welcome
        caller = await call(node.address)
        await until(lambda: len(caller.frames) == 2)
        assert caller.frames == [(20, big), (21, b"x")]
        caller.link.abort()


class _Held(_Spy):
    """Holds back all writes, and then makes them at once."""

    def __init__(self, transport: Any) -> None:
        super().__init__(transport, [])

    def write(self, data: bytes) -> None:
        self._writes.append(data)

    def release(self) -> None:
        self._transport.write(b"".join(self._writes))
        self.write = self._transport.write  # type: ignore[method-assign]


async def test_a_link_whose_other_side_does_not_read_is_full_in_the_end() -> None:
    """Its owner can wait for room, and sending resumes when the other side reads again, without
    loss."""
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        caller = await call(node.address, bound=1 << 20)
        await until(lambda: node.clients)
        node.clients[0].pause()
        sent = 0
        while caller.link.send(20, bytes(10_000)):
            sent += 1
            await asyncio.sleep(0)
        assert caller.link.queued < (1 << 20) + 20_000
        waiting = asyncio.create_task(caller.link.drain())
        await asyncio.sleep(0)
        assert not waiting.done()
        node.clients[0].resume()
        await waiting
        assert caller.link.queued <= HIGH_WATER
        await until(lambda: len(node.frames) == sent)
        caller.link.abort()


async def test_a_sender_waiting_for_room_learns_of_the_end() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        caller = await call(node.address, bound=1 << 20)
        await until(lambda: node.clients)
        node.clients[0].pause()
        await until(lambda: not caller.link.send(20, bytes(500_000)))
        waiting = asyncio.create_task(caller.link.drain())
        await asyncio.sleep(0)
        node.clients[0].abort()
        await waiting
        await caller.link.wait()
        assert caller.ends == [End.LEFT]


async def test_silence_is_not_an_end_and_is_noticed() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1", listener={"keepalive_s": 0.02})
        with Proxy(node) as proxy:
            caller = await call(f"{HOST}:{proxy.port}", keepalive_s=0.02)
            pings: list[bytes] = []
            caller.link._transport = _Spy(caller.link._transport, pings)
            await until(lambda: len(pings) > 10)
            assert caller.link.open
            assert node.clients[0].open
            proxy.cut()
            await until(lambda: caller.ends and node.ends)
            assert (caller.ends, node.ends) == ([End.SILENT], [End.SILENT])
            assert node.counts == {"silent": 1}


async def test_a_reset_is_an_end() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        with Proxy(node) as proxy:
            caller = await call(f"{HOST}:{proxy.port}")
            proxy.reset()
            await until(lambda: caller.ends and node.ends)
            assert (caller.ends, node.ends) == ([End.LEFT], [End.LEFT])


async def test_a_connection_answers_probes() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        with Proxy(node) as proxy:
            caller = await call(f"{HOST}:{proxy.port}")
            assert await caller.link.alive(10)
            proxy.cut()
            assert not await caller.link.alive(0.05)
            caller.link.abort()
            assert not await caller.link.alive(10)


async def test_no_server_listens_or_answers() -> None:
    with socket.create_server((HOST, 0)) as mute:
        address = f"{HOST}:{mute.getsockname()[1]}"
        with pytest.raises(StoreUnavailable, match=r"has not answered within 0\.05 s"):
            await call(address, handshake_s=0.05)
    with pytest.raises(StoreUnavailable, match=f"cannot reach {address}: Connection refused"):
        await call(address)
    with pytest.raises(StoreUnavailable, match="cannot reach"):
        await call("no.such.host.invalid:1")


async def test_a_dialler_that_is_cancelled_leaves_nothing_behind() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1", security=Security(secret=SECRET))
        with Proxy(node) as proxy:
            proxy.cut("down")
            dialling = asyncio.create_task(call(f"{HOST}:{proxy.port}"))
            await until(lambda: node.listener.pending)
            dialling.cancel()
            await asyncio.wait([dialling])
            assert dialling.cancelled()
            await until(lambda: not node.listener.pending)


@pytest.mark.parametrize("fault", [CloseReason.CROWDED, CloseReason.NOT_SERVING])
async def test_a_client_without_permission_gets_the_reason(fault: CloseReason) -> None:
    async with Nodes() as nodes:
        limit = {"max_clients": 1 if fault is CloseReason.CROWDED else 10}
        node = await nodes.add("n1", listener=limit)
        first = await call(node.address)
        if fault is CloseReason.NOT_SERVING:
            node.listener._clients = lambda link: link.refuse(fault, "no leader is known")
        with pytest.raises(
            ConnectionRefused, match=r"1 clients are connected|no leader is known"
        ) as caught:
            await call(node.address)
        assert caught.value.reason is fault
        first.link.close()
        await until(lambda: not node.listener.clients)


async def test_listening_beyond_loopback_is_refused_without_a_secret() -> None:
    options: dict[str, Any] = {"peers": lambda _: None, "clients": lambda _: None, "pages": {}}
    listener = Listener(ConnectionIdentity("c", "n1", 1), OPEN, **options)
    with pytest.raises(ConfigError, match="neither a shared secret nor mutual TLS"):
        await listener.listen("0.0.0.0", 0)
    listener = Listener(ConnectionIdentity("c", "n1", 1), Security(secret=SECRET), **options)
    port = await listener.listen("0.0.0.0", 0)
    with pytest.raises(StoreUnusable, match=f"port {port}: Address already in use. Stop"):
        await listener.listen("0.0.0.0", port)
    with pytest.raises(StoreUnusable, match="cannot listen on 'no"):
        await listener.listen("no.such.host.invalid", 0)
    await listener.close()


async def test_every_address_of_a_name() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        port = await node.listener.listen("localhost", 0)
        (await call(f"localhost:{port}")).link.abort()
        (await call(f"{HOST}:{port}")).link.abort()


async def test_a_listener_out_of_descriptors_recovers(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, left = socket.socket.accept, [errno.EMFILE, errno.ENFILE, errno.ECONNABORTED]

    def sometimes(listening: socket.socket) -> tuple[socket.socket, Any]:
        if left:
            raise OSError(left.pop(), "no more")
        return accept(listening)

    async with Nodes() as nodes:
        monkeypatch.setattr(socket.socket, "accept", sometimes)
        node = await nodes.add("n1")
        (await call(node.address)).link.abort()
        assert node.counts == {"crowded": 3}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def tls(certificates: Certificates, own: str | None, ca: str = "ca", **settings: Any) -> Security:
    files = (certificates.certificate(own), certificates.key(own)) if own else (None, None)
    authority = certificates.certificate(ca)
    return Security(tls=TLS(certificate=files[0], key=files[1], authority=authority, **settings))


async def test_tls_on_both_sides(certificates: Certificates) -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1", security=tls(certificates, "server"))
        caller = await call(node.address, security=tls(certificates, "client"))
        for _ in range(10):
            caller.link.send(20, bytes(1_000_000))
        await until(lambda: len(node.frames) == 10)
        node.clients[0].send(21, b"x")
        await until(lambda: caller.frames)
        caller.link.abort()
        await until(lambda: node.ends)
        assert node.ends == [End.LEFT]
        assert node.counts == {}


@pytest.mark.parametrize("own", [None, "stranger"])
async def test_tls_without_a_certificate_that_is_known(
    certificates: Certificates, own: Any
) -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1", security=tls(certificates, "server"))
        with pytest.raises((ConnectionRefused, StoreUnavailable), match="certificate"):
            await call(node.address, security=tls(certificates, own))
        await until(lambda: not node.listener.pending)
        assert node.counts == {"tls": 1}


async def test_tls_of_an_authority_that_is_not_known(certificates: Certificates) -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1", security=tls(certificates, "server"))
        with pytest.raises(
            ConnectionRefused, match=r"TLS failed: .*certificate verify failed"
        ) as caught:
            await call(node.address, security=tls(certificates, "client", ca="stranger"))
        assert caught.value.lasting


async def test_tls_one_way_with_a_secret(certificates: Certificates) -> None:
    async with Nodes() as nodes:
        there = tls(certificates, "server", mutual=False).tls
        node = await nodes.add("n1", security=Security(tls=there, secret=SECRET))
        here = tls(certificates, None).tls
        caller = await call(node.address, security=Security(tls=here, secret=SECRET))
        assert caller.link.open
        caller.link.abort()
        with pytest.raises(ConnectionRefused, match="not the one that is set here"):
            await call(node.address, security=Security(tls=here, secret=SECRET + b"?"))


def test_tls_on_one_side_only(certificates: Certificates, caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        async with Nodes() as nodes:
            plain = await nodes.add("n1")
            with pytest.raises((ConnectionRefused, StoreUnavailable)):
                await call(plain.address, security=tls(certificates, "client"))
            assert plain.counts == {"tls": 1}
            assert "sent TLS, which this port does not use" in caplog.text
            secured = await nodes.add("n2", security=tls(certificates, "server"))
            with pytest.raises(
                StoreUnavailable,
                match="before the handshake ended and sent nothing; it may require TLS",
            ):
                await call(secured.address)
            await until(lambda: secured.counts == {"tls": 1})

    caplog.set_level(logging.WARNING)
    run(body())


async def http(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(request)
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize(
    ("request_line", "status", "end"),
    [
        (b"GET /healthz HTTP/1.1", b"200 OK", b"\r\n\r\nfine\n"),
        (b"GET /healthz?verbose HTTP/1.0", b"200 OK", b"\r\n\r\nfine\n"),
        (b"HEAD /healthz HTTP/1.1", b"200 OK", b"\r\n\r\n"),
        (b"GET /nothing HTTP/1.1", b"404 Not Found", b"no such page\n"),
        (b"POST /healthz HTTP/1.1", b"405 Method Not Allowed", b"GET only\n"),
        (b"GET /healthz", b"400 Bad Request", b"not a request\n"),
        (b"GET /bug HTTP/1.1", b"500 Internal Server Error", b"see the log of the node\n"),
        (
            b"GET /" + b"x" * 9000,
            b"431 Request Header Fields Too Large",
            b"the request is too long\n",
        ),
    ],
)
async def test_pages(request_line: bytes, status: bytes, end: bytes) -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        said = await http(node.port, request_line + b"\r\nHost: n1\r\n\r\n")
        assert said.startswith(b"HTTP/1.1 " + status + b"\r\n")
        assert said.endswith(end)
        await until(lambda: not node.listener.pending)


async def test_a_request_that_comes_byte_by_byte() -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1")
        reader, writer = await asyncio.open_connection(HOST, node.port)
        for byte in b"GET /healthz HTTP/1.1\r\nHost: n1\r\n\r\n":
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)
        assert (await reader.read()).endswith(b"fine\n")
        writer.close()


async def test_pages_over_tls_and_on_a_port_of_their_own(certificates: Certificates) -> None:
    async with Nodes() as nodes:
        node = await nodes.add("n1", security=tls(certificates, "server"))
        context = tls(certificates, "client").dialling
        reader, writer = await asyncio.open_connection(HOST, node.port, ssl=context)
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: n1\r\n\r\n")
        assert (await reader.read()).endswith(b"fine\n")
        writer.close()
        pages = await node.listener.listen(HOST, 0, http_only=True)
        assert (await http(pages, b"GET /healthz HTTP/1.1\r\nHost: n1\r\n\r\n")).endswith(b"fine\n")
        with pytest.raises(StoreUnavailable):
            await call(f"{HOST}:{pages}")


def test_round_trips_are_measured_finer_than_by_the_clock_of_the_loop() -> None:
    """Nodes run on uvloop, whose clock counts milliseconds: on a local network all would be 0."""
    seen: list[float] = []
    link: Any = SimpleNamespace(
        _blocked=False, _transport=MagicMock(), _pinged_at=None, _on_round_trip=seen.append
    )
    FrameConnection._ping(link)
    FrameConnection._ponged(link)
    assert 0 < seen[0] < 1
