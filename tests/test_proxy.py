"""The proxy's faults, as both ends of a connection see them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from servers.process import HOST, free_port
from servers.proxy import Proxy


class Echo:
    """A server in this process that echoes and records every byte."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"echo://{HOST}:{self.port}"
        self.received = bytearray()
        self.arrived = threading.Condition()
        self._listener = socket.create_server((HOST, self.port))
        self._listener.settimeout(0.05)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._listen)
        self._thread.start()

    def _listen(self) -> None:
        threads = []
        while not self._ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            threads.append(threading.Thread(target=self._answer, args=(connection,)))
            threads[-1].start()
        for thread in threads:
            thread.join()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            connection.settimeout(10)
            try:
                while data := connection.recv(65536):
                    with self.arrived:
                        self.received += data
                        self.arrived.notify_all()
                    connection.sendall(data)
            except OSError:
                return

    def await_received(self, data: bytes) -> None:
        with self.arrived:
            assert self.arrived.wait_for(lambda: bytes(self.received) == data, 5), bytes(
                self.received
            )

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self._listener.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.end()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    with connect(proxy) as client:
        assert ask(client, b"hello ") == b"hello "
        yield client


def connect(proxy: Proxy) -> socket.socket:
    return socket.create_connection((HOST, proxy.port), 5)


def ask(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return listen(client, len(data))


def listen(client: socket.socket, size: int) -> bytes:
    answer = b""
    while len(answer) < size and (data := client.recv(size - len(answer))):
        answer += data
    return answer


def assert_silent(client: socket.socket) -> None:
    client.settimeout(0.1)
    with pytest.raises(TimeoutError):
        client.recv(1)
    client.settimeout(5)


def assert_reset(client: socket.socket) -> None:
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_it_forwards_data_and_end_of_stream_in_both_directions(
    proxy: Proxy, client: socket.socket
) -> None:
    assert proxy.url == f"echo://{HOST}:{proxy.port}"
    large = bytes(range(256)) * 4096
    threading.Thread(target=client.sendall, args=(large,)).start()
    assert listen(client, len(large)) == large
    assert proxy.connections == 1
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""


def test_a_cut_holds_data_until_healed(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    proxy.cut()
    client.sendall(b"held")
    assert_silent(client)
    with connect(proxy) as late:
        late.sendall(b"")
        assert_silent(late)
    assert bytes(echo.received) == b"hello "
    proxy.heal()
    assert listen(client, 4) == b"held"


def test_a_cut_of_one_direction_leaves_the_other(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    proxy.cut("down")
    client.sendall(b"heard")
    echo.await_received(b"hello heard")
    assert_silent(client)
    proxy.heal()
    assert listen(client, 5) == b"heard"
    proxy.cut("up")
    client.sendall(b"lost")
    assert_silent(client)
    assert b"lost" not in echo.received


def test_delays_do_not_add_up(proxy: Proxy, client: socket.socket) -> None:
    proxy.delay(0.5, "down")
    sent = time.monotonic()
    for _ in range(20):
        client.sendall(b".")
    assert listen(client, 20) == b"." * 20
    assert 0.5 <= time.monotonic() - sent < 9
    proxy.heal()


def test_a_half_open_connection_gets_no_answer_and_is_reset_when_healed(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    proxy.half_open()
    client.sendall(b"lost")
    assert_silent(client)
    with connect(proxy) as late:
        late.sendall(b"lost")
        assert_silent(late)
        proxy.heal()
        assert_reset(late)
    assert_reset(client)
    assert bytes(echo.received) == b"hello "
    with connect(proxy) as fresh:
        assert ask(fresh, b"again") == b"again"


def test_a_reset_closes_connections_and_new_ones_pass(proxy: Proxy, client: socket.socket) -> None:
    proxy.reset()
    assert_reset(client)
    with connect(proxy) as fresh:
        assert ask(fresh, b"again") == b"again"


def test_refuse_resets_and_refuses_connections(proxy: Proxy, client: socket.socket) -> None:
    proxy.refuse()
    assert_reset(client)
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    proxy.heal()
    with connect(proxy) as fresh:
        assert ask(fresh, b"again") == b"again"


def test_a_write_is_cut_in_the_middle(proxy: Proxy, client: socket.socket, echo: Echo) -> None:
    broken = proxy.break_after(3, "up")
    client.sendall(b"whole")
    assert broken.wait(5)
    assert_reset_after(client)
    echo.await_received(b"hello who")


def test_a_break_loses_the_answer_after_the_server_has_acted(
    proxy: Proxy, client: socket.socket, echo: Echo
) -> None:
    broken = proxy.break_after(0, "down")
    client.sendall(b"done")
    assert broken.wait(5)
    assert_reset(client)
    echo.await_received(b"hello done")
    with connect(proxy) as fresh:
        assert ask(fresh, b"!") == b"!"


def assert_reset_after(client: socket.socket) -> None:
    """The echo of delivered bytes may or may not arrive before the reset."""
    with pytest.raises(ConnectionResetError):
        while client.recv(65536):
            pass


def test_a_server_that_is_down_resets(echo: Echo, proxy: Proxy) -> None:
    echo.end()
    with pytest.raises(ConnectionResetError), connect(proxy) as client:  # raised by either
        client.recv(1)
