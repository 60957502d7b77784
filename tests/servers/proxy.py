"""A TCP proxy between one client and a server that injects network faults.

    with servers.Proxy(etcd) as link:
        ... open link.url ...
        link.cut()
        link.heal()

The faults as client and server see them:

- `cut`: no data passes in that direction, as when packets are lost. Neither side gets an error.
  Data is held, as TCP would retransmit it, and passes after `heal`. New connections are accepted
  and carry no data.
- `delay`: all data arrives later by this time, in order.
- `half_open`: the server has lost its side of every connection, and the client has not noticed. New
  connections are accepted and never answered. `heal` resets the connections of the client.
- `reset`: every connection is reset, once. New connections pass.
- `refuse`: like `reset`, and new connections are refused until `heal`.
- `break_after`: the connection is reset, once, after the given number of bytes was delivered.
  `break_after(0, "down")` is a lost answer: the server has carried out the request, unless its
  protocol sends other data than answers (HTTP/2 acknowledges a request before it is carried out).

The proxy has its own thread and event loop. Every method returns when it has taken effect.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeVar

from .process import HOST, free_port
from .tally import fault

Direction = Literal["up", "down"]
"""`up` is from the client to the server."""
BOTH: tuple[Direction, ...] = ("up", "down")
CHUNK = 65536
T = TypeVar("T")


class Addressed(Protocol):
    """What the proxy needs of a server."""

    @property
    def url(self) -> str: ...

    @property
    def port(self) -> int: ...


class _Broken(Exception):
    """The connection must be reset."""


@dataclass
class _Break:
    """A pending fault: reset the connection after this many bytes in one direction."""

    size: int
    direction: Direction
    happened: threading.Event


class Proxy:
    """Listens on its own port and forwards connections to a server, subject to faults."""

    def __init__(self, server: Addressed) -> None:
        self.port = free_port()
        self.url = server.url.replace(f":{server.port}", f":{self.port}")
        self._upstream = server.port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"proxy-{self.port}")
        self._delay_s = dict.fromkeys(BOTH, 0.0)
        self._open: dict[Direction, asyncio.Event] = {way: asyncio.Event() for way in BOTH}
        self._healed = asyncio.Event()
        self._break: _Break | None = None
        self._listener: asyncio.Server | None = None
        self._forwarding: set[asyncio.Task[None]] = set()
        self._serving: set[asyncio.Task[None]] = set()

    @property
    def connections(self) -> int:
        """The number of connections that are being forwarded."""
        return self._do(lambda: len(self._forwarding))

    @fault
    def cut(self, *directions: Direction) -> None:
        """Hold all data, in both directions or the given one. Neither side gets an error."""

        def act() -> None:
            for way in directions or BOTH:
                self._open[way].clear()

        self._do(act)

    @fault
    def delay(self, seconds: float, *directions: Direction) -> None:
        """Delay all data, in both directions or the given one."""
        self._do(lambda: self._delay_s.update(dict.fromkeys(directions or BOTH, seconds)))

    @fault
    def half_open(self) -> None:
        """Close the server side of every connection until healed. The client gets no error."""

        async def act() -> None:
            self._healed.clear()
            await self._end_forwarding()

        self._run(act())

    @fault
    def reset(self) -> None:
        """Reset every connection. New connections pass."""
        self._run(self._end_forwarding())

    @fault
    def refuse(self) -> None:
        """Reset every connection, and refuse new ones until healed."""

        async def act() -> None:
            await self._stop_listening()
            await self._end_forwarding()

        self._run(act())

    @fault
    def refuse_new(self) -> None:
        """Refuse new connections until healed. Existing connections continue."""
        self._run(self._stop_listening())

    @fault
    def break_after(self, size: int, direction: Direction) -> threading.Event:
        """Reset the connection once it has carried `size` bytes from now on and has more to carry.

        The event is set when it was reset.
        """
        plan = _Break(size, direction, threading.Event())
        self._do(lambda: setattr(self, "_break", plan))
        return plan.happened

    def heal(self) -> None:
        """End every fault."""
        self._run(self._heal())

    async def _heal(self) -> None:
        self._break = None
        self._delay_s = dict.fromkeys(BOTH, 0.0)
        self._healed.set()
        for gate in self._open.values():
            gate.set()
        if self._listener is None:
            self._listener = await asyncio.start_server(self._accept, HOST, self.port)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _end_forwarding(self) -> None:
        tasks = set(self._forwarding)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            await asyncio.sleep(0)  # `_serve` then resets the connections of the clients

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._loop.create_task(self._serve(reader, writer))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        # A task that is cancelled before its first step does not reach its `finally`.
        task.add_done_callback(lambda _: _reset(writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection of a client until it ends."""
        try:
            if self._healed.is_set():
                forwarding = self._loop.create_task(self._forward(reader, writer))
                self._forwarding.add(forwarding)
                forwarding.add_done_callback(self._forwarding.discard)
                await asyncio.wait({forwarding})
                if not forwarding.cancelled() and forwarding.exception() is None:
                    return writer.close()
            await self._healed.wait()
        finally:
            _reset(writer)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward in both directions until both sides have closed. Raises if one of them failed."""
        there_reader, there_writer = await asyncio.open_connection(HOST, self._upstream)
        try:
            ways = [
                asyncio.create_task(self._carry("up", reader, there_writer)),
                asyncio.create_task(self._carry("down", there_reader, writer)),
            ]
            try:
                await asyncio.gather(*ways)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.wait(ways)
        finally:
            there_writer.close()

    async def _carry(
        self, way: Direction, source: asyncio.StreamReader, sink: asyncio.StreamWriter
    ) -> None:
        """Forward one direction. Reading does not wait for held data, so delays do not add up."""
        queue: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()

        async def read() -> None:
            data: bytes | None = b"..."
            while data:
                try:
                    data = await source.read(CHUNK)
                except OSError:
                    data = None
                queue.put_nowait((self._loop.time() + self._delay_s[way], data))

        reading = asyncio.create_task(read())
        try:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(due - self._loop.time())
                await self._open[way].wait()
                if data is None:
                    raise _Broken
                if not data:
                    return sink.write_eof()
                await self._deliver(way, data, sink)
        finally:
            reading.cancel()

    async def _deliver(self, way: Direction, data: bytes, sink: asyncio.StreamWriter) -> None:
        plan = self._break
        if plan is None or plan.direction != way or len(data) <= plan.size:
            if plan is not None and plan.direction == way:
                plan.size -= len(data)
            sink.write(data)
            return await sink.drain()
        self._break = None
        sink.write(data[: plan.size])
        await sink.drain()
        plan.happened.set()
        raise _Broken

    def _do(self, act: Callable[[], T]) -> T:
        async def call() -> T:
            return act()

        return self._run(call())

    def _run(self, act: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(act, self._loop).result(10)

    def __enter__(self) -> Self:
        self._thread.start()
        self.heal()
        return self

    def close(self) -> None:
        """End every connection and the thread. Idempotent."""

        async def end() -> None:
            await self._stop_listening()
            # A connection that was accepted just before is given to `_accept` by a task of asyncio.
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in self._serving | self._forwarding:
                    task.cancel()
                await asyncio.wait(others, timeout=0.01)
            await asyncio.sleep(0.01)  # let transports call connection_lost

        if not self._loop.is_closed():
            self._run(end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with a TCP reset. Does nothing if already closed."""
    if not writer.is_closing():
        connection: socket.socket = writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
