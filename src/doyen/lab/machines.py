"""Machines, processes and TCP on virtual time: the floor on which real nodes and clients stand.

`LabLoop` is an event loop for many processes at once. Which process a piece of code belongs to is
in its context: whatever a process starts, belongs to it. So a process can be killed or frozen as by
a signal, between any two callbacks, however it is written: what belongs to a frozen process waits,
and so does, until the world has ended and must be cleaned up, what belongs to a dead one.

Connections made with `create_connection` end at simulated listeners. They are byte streams with
latency and without loss: what is sent over a cut link waits, as the kernel would have it, and
arrives when the link heals. A process that dies ends its connections, a machine that dies does not.

What runs on it is the same code that runs on sockets: links, peers, doors, services, stores.

Imports `doyen.testing.virtual`, the plan and the standard library.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
from asyncio import events
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from heapq import heappush
from typing import Any

from doyen.lab.plan import Weather, stream
from doyen.lease.clock import VirtualClock
from doyen.testing.virtual import VirtualLoop

__all__ = ["Killed", "LabLoop", "OwnClock", "Process", "StreamNetwork", "undisturbed"]

STUFFED = 1 << 18
"""Bytes that a connection takes before it asks its writer to wait."""

_here: ContextVar[Process | None] = ContextVar("process", default=None)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Meanwhile nothing is logged, since trouble is the daily bread there, and nothing collected:
    a crowd is a third of its time cheaper without."""
    logger = logging.getLogger("doyen")
    level, collecting = logger.level, gc.isenabled()
    logger.setLevel(logging.CRITICAL + 1)
    gc.disable()
    try:
        yield
    finally:
        logger.setLevel(level)
        if collecting:
            gc.enable()


class Killed(SystemExit):
    """Raised where a process is killed: nothing after it is run. Nobody may stop it."""


class OwnClock:
    """A machine's clock: begins anywhere, runs a little fast or slow, and can be jumped."""

    def __init__(self, true: VirtualClock, offset: float) -> None:
        self._true = true
        self._base = offset
        self._anchor = 0.0
        self._rate = 1.0
        self._wall = 0.0

    def now(self) -> float:
        return self._base + (self._true.now() - self._anchor) * self._rate

    def wall(self) -> float:
        return self._wall + self.now()

    def adjust(self, *, rate: float | None = None, jump_s: float = 0.0) -> None:
        self._base = self.now() + jump_s
        self._anchor = self._true.now()
        if rate is not None:
            self._rate = rate

    def step_wall(self, seconds: float) -> None:
        self._wall += seconds


class Process:
    """Everything that one process does."""

    def __init__(self, loop: LabLoop, machine: str, number: int) -> None:
        self.machine = machine
        self.number = number
        self.dead = False
        self.frozen = 0
        self.backlog: list[asyncio.Handle] = []
        self.connections: dict[SimulatedConnection, None] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self._loop = loop
        self.context = copy_context()
        self.context.run(_here.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run this as part of the process."""
        return self._loop.create_task(work, context=self.context)

    def freeze(self) -> None:
        self.frozen += 1

    def thaw(self) -> None:
        self.frozen -= 1
        self._go_on()

    def bury(self) -> None:
        """The world has ended: let whatever was stopped come to its end."""
        self.dead = False
        self.frozen = 0
        self._go_on()

    def _go_on(self) -> None:
        if not self.frozen and not self.dead:
            backlog, self.backlog = self.backlog, []
            self._loop.go_on(backlog)


class _Handle(asyncio.Handle):
    """A callback that knows whose it is."""

    __slots__ = ("_process",)

    def __init__(self, process: Process, *others: Any) -> None:
        super().__init__(*others)
        self._process = process

    def _run(self) -> None:
        _run(self, self._process)


class _TimerHandle(asyncio.TimerHandle):
    __slots__ = ("_process",)

    def __init__(self, process: Process, *others: Any) -> None:
        super().__init__(*others)
        self._process = process

    def _run(self) -> None:
        _run(self, self._process)


def _run(handle: Any, process: Process) -> None:
    if process.dead or process.frozen:
        process.backlog.append(handle)
        return
    loop: LabLoop = handle._loop
    loop.steps += 1
    loop.trace = hash((loop.trace, loop.clock._monotonic, process.number))
    try:
        handle._context.run(handle._callback, *handle._args)
    except Killed:
        pass
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # noqa: BLE001  (as asyncio does it)
        told = {"message": f"in {handle._callback}", "exception": error, "handle": handle}
        loop.call_exception_handler(told)


class LabLoop(VirtualLoop):
    """A virtual loop on which many processes live."""

    def __init__(self, clock: VirtualClock | None = None) -> None:
        super().__init__(clock)
        self.steps = 0
        self.trace = 0
        self.network: StreamNetwork | None = None
        self.after_turn: Callable[[], None] = lambda: None
        self.set_task_factory(_make_task)

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self.after_turn()

    def _call_soon(self, callback: Any, args: Any, context: Context | None) -> asyncio.Handle:
        process = _here.get() if context is None else context.get(_here)
        handle: asyncio.Handle
        if process is None:
            handle = events.Handle(callback, args, self, context)
        else:
            handle = _Handle(process, callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = _here.get() if context is None else context.get(_here)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        self._check_closed()  # type: ignore[attr-defined]
        timer = _TimerHandle(process, when, callback, args, self, context)
        heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def go_on(self, backlog: list[asyncio.Handle]) -> None:
        self._ready.extend(  # type: ignore[attr-defined]
            handle for handle in backlog if not handle.cancelled()
        )

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], asyncio.Protocol],
        host: str,
        port: int,
        **_: Any,
    ) -> tuple[Any, Any]:
        process = _here.get()
        assert process is not None
        assert self.network is not None
        return await self.network.connect(process, protocol_factory, host)


def _make_task(loop: Any, coro: Any, *, context: Context | None = None) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context)
    process = _here.get() if context is None else context.get(_here)
    if process is not None:
        process.tasks.append(task)
        if len(process.tasks) > 512:
            process.tasks = [each for each in process.tasks if not each.done()]
    return task


class SimulatedConnection(asyncio.Transport):
    """One end of a byte stream."""

    def __init__(self, network: StreamNetwork, process: Process, there: str) -> None:
        super().__init__()
        self._network = network
        self.process = process
        self._there = there
        self.other: SimulatedConnection
        self.protocol: Any = None
        self.last = 0.0
        self._closing = False
        self._lost = False
        self.held: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._held_bytes = 0
        self._reading = True
        self._unread: list[bytes] = []
        process.connections[self] = None

    # What protocols do with it.

    def write(self, data: Any) -> None:
        if self._closing or self.process.dead:
            return
        self._network.messages += 1
        self._network.carry(self, self.other.arrive, bytes(data))

    def held_back(self, data: Any) -> None:
        """The link is cut; what was sent waits in the kernel."""
        before = self._held_bytes
        self._held_bytes += len(data)
        if before <= STUFFED < self._held_bytes:
            self._call(self.protocol.pause_writing)

    def let_go(self) -> None:
        """The link is whole again."""
        if self._held_bytes > STUFFED:
            self._call(self.protocol.resume_writing)
        self._held_bytes = 0
        held, self.held = self.held, []
        for do, arguments in held:
            self._network.carry(self, do, *arguments)

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._network.carry(self, self.other.ended, None)
            self._call(self.lose, None)

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            self._network.carry(self, self.other.ended, ConnectionResetError("reset"))
            self._call(self.lose, None)

    def is_closing(self) -> bool:
        return self._closing

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return (self._there, 1) if name == "peername" else default

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return self._held_bytes

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        protocol: asyncio.BaseProtocol = self.protocol
        return protocol

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        unread, self._unread = self._unread, []
        if unread:
            self._call(self.arrive, b"".join(unread))

    def is_reading(self) -> bool:
        return self._reading

    # What the network does with it.

    def _call(self, do: Callable[..., object], *arguments: Any) -> None:
        self._network.loop.call_soon(do, *arguments, context=self.process.context)

    def arrive(self, data: bytes) -> None:
        if self._lost or self._closing:
            return
        if not self._reading:
            self._unread.append(data)
            return
        self.protocol.data_received(data)

    def ended(self, error: Exception | None) -> None:
        if self._lost:
            return
        if error is None and not self._closing:
            self.protocol.eof_received()
        self._closing = True
        self.lose(error)

    def lose(self, error: Exception | None) -> None:
        if not self._lost:
            self._lost = True
            self.process.connections.pop(self, None)
            self.protocol.connection_lost(error)


class StreamNetwork:
    """Machines by name, the links between them, and who listens."""

    def __init__(self, loop: LabLoop, weather: Weather, seed: int) -> None:
        self.loop = loop
        loop.network = self
        rng = stream(seed, "network")
        self._chance = rng.random
        self._bits = rng.getrandbits
        self._latencies = [
            weather.latency_s * math.exp(rng.gauss(0.0, weather.spread)) for _ in range(1024)
        ]
        self.cuts: dict[tuple[str, str], int] = {}
        self.extra_s: dict[tuple[str, str], float] = {}
        self.loss = 0.0
        self.messages = 0
        """Writes to connections; one may hold several frames."""
        self._listening: dict[str, tuple[Process, Callable[[], asyncio.Protocol]]] = {}
        self._off: dict[str, None] = {}
        self._waiting: list[SimulatedConnection] = []
        self.closed = False

    def latency(self) -> float:
        return self._latencies[self._bits(10)]

    def listen(self, process: Process, factory: Callable[[], asyncio.Protocol]) -> None:
        """A process accepts whoever calls its machine."""
        self._listening[process.machine] = (process, factory)
        self._off.pop(process.machine, None)

    def carry(self, source: SimulatedConnection, do: Callable[..., None], *arguments: Any) -> None:
        """Let something go from one end to the other, in order."""
        loop = self.loop
        here, there = source.process.machine, source.other.process.machine
        if self.cuts.get((here, there)) or there in self._off:
            source.held.append((do, arguments))
            if len(source.held) == 1:
                self._waiting.append(source)
            if isinstance(arguments[0], bytes):
                source.held_back(arguments[0])
            return
        at = loop.time() + self.latency() + self.extra_s.get((here, there), 0.0)
        if self.loss and self._chance() < self.loss:
            at += 0.2  # lost, and sent again by the kernel
        source.last = at = max(at, source.last)
        loop.call_at(at, do, *arguments, context=source.other.process.context)

    async def connect(
        self, process: Process, factory: Callable[[], asyncio.Protocol], host: str
    ) -> tuple[SimulatedConnection, Any]:
        await asyncio.sleep(2 * self.latency())
        here = process.machine
        if self.closed:
            raise ConnectionRefusedError(111, "Connection refused")
        if self.cuts.get((here, host)) or self.cuts.get((host, here)) or host in self._off:
            await asyncio.get_running_loop().create_future()  # nobody answers
        listening = self._listening.get(host)
        if listening is None or listening[0].dead:
            raise ConnectionRefusedError(111, "Connection refused")
        server, make = listening
        mine = SimulatedConnection(self, process, host)
        theirs = SimulatedConnection(self, server, here)
        mine.other, theirs.other = theirs, mine

        def accept() -> None:
            theirs.protocol = make()
            theirs.protocol.connection_made(theirs)

        self.loop.call_soon(accept, context=server.context)
        mine.protocol = factory()
        mine.protocol.connection_made(mine)
        return mine, mine.protocol

    def cut(self, here: str, there: str, by: int = 1) -> None:
        """Let nothing through from one machine to another, or let it through again."""
        self.cuts[here, there] = self.cuts.get((here, there), 0) + by
        if by < 0:
            self.release()

    def release(self) -> None:
        """What was held back may go, where it can."""
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.let_go()

    def close(self, processes: list[Process]) -> None:
        """Nobody can reach anybody any more, and everybody is told."""
        self.closed = True
        self.cuts.clear()
        self._off.clear()
        for process in processes:
            for each in list(process.connections):
                reset = ConnectionResetError("reset")
                self.loop.call_soon(each.ended, reset, context=process.context)

    def reset(self, one: str, other: str) -> None:
        """Every connection between two machines is reset."""
        for each in self._between(one, other):
            self.loop.call_soon(
                each.ended, ConnectionResetError("reset"), context=each.process.context
            )

    def _between(self, one: str, other: str) -> list[SimulatedConnection]:
        found: dict[SimulatedConnection, None] = {}
        for machine in (one, other):
            process, _ = self._listening.get(machine, (None, None))
            for each in process.connections if process is not None else ():
                if {each.process.machine, each.other.process.machine} == {one, other}:
                    found[each] = None
                    found[each.other] = None
        return list(found)

    def kill(self, process: Process, *, told: bool) -> None:
        """End a process; its kernel ends its connections, unless the machine goes with it."""
        process.dead = True
        process.frozen = 0
        if not told:
            self._off[process.machine] = None
            return
        for connection in list(process.connections):
            self.carry(connection, connection.other.ended, None)

    def back(self, process: Process, dead: Process) -> None:
        """A machine is up again: what it knew of connections is gone, and it says so."""
        self._off.pop(process.machine, None)
        for connection in list(dead.connections):
            reset = ConnectionResetError("reset by a machine that came back")
            self.carry(connection, connection.other.ended, reset)
        dead.connections.clear()
        self.release()
