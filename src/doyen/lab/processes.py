"""Processes, clocks and TCP in virtual time, for real nodes and clients.

`LabLoop` is an event loop for many processes at once. The process that a callback belongs to is in
its context: everything that a process starts belongs to it. So a process can be killed or paused
between any two callbacks, as by a signal, however its code is written. The callbacks of a paused
process wait until it resumes; those of a dead one wait until the world ends and cleans up.

Connections made with `create_connection` end at simulated listeners. They are byte streams with
latency and without loss. What is sent over a link that is cut is buffered, as by a kernel, and
arrives after the cut. When a process dies its connections are closed; when a machine loses power
they are not.

The code on top is the same that runs on sockets: connections, peers, listeners, services, stores.
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

from doyen.lab.plan import Latencies, stream
from doyen.lease.clock import VirtualClock
from doyen.testing.virtual import VirtualLoop

WRITE_BUFFER_BYTES = 1 << 18
"""A connection that buffers more than this asks its writer to pause."""

_current: ContextVar[Process | None] = ContextVar("process", default=None)


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off doyen's logging, because simulated faults would fill the log, and the garbage
    collector, which takes a third of the time of a large run."""
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


FAILED = "event=callback_failed"
"""In the log line of a node that has caught an exception of its own code, and goes on."""


class _FailedCallbacks(logging.Handler):
    def __init__(self, failed: Callable[[str], None]) -> None:
        super().__init__()
        self._failed = failed

    def emit(self, record: logging.LogRecord) -> None:
        if FAILED in record.getMessage():
            self._failed(repr(record.exc_info[1] if record.exc_info else None))


@contextmanager
def failed_callbacks(failed: Callable[[str], None]) -> Iterator[None]:
    """Call `failed` with each exception that a node catches and logs, also while all is `quiet`. Of
    several, the last one is called."""
    logger = logging.getLogger("doyen.quorum.node")
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers = [_FailedCallbacks(failed)]
    if not logger.isEnabledFor(logging.ERROR):
        logger.setLevel(logging.ERROR)
        logger.propagate = False
    try:
        yield
    finally:
        logger.setLevel(before[1])
        logger.handlers, _, logger.propagate = before


class ProcessKilled(SystemExit):
    """Raised where a process is killed, so that nothing after it runs. It must not be caught."""


class MachineClock:
    """A machine's clock: it has an offset and a rate of its own, and its wall time can be set."""

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

    def adjust(self, rate: float) -> None:
        self._base = self.now()
        self._anchor = self._true.now()
        self._rate = rate

    def step_wall(self, seconds: float) -> None:
        self._wall += seconds


class Process:
    """One process: its callbacks, tasks and connections."""

    def __init__(self, loop: LabLoop, machine: str, number: int) -> None:
        self.machine = machine
        self.number = number
        self.dead = False
        self.paused = 0
        self.backlog: list[asyncio.Handle] = []
        self.connections: dict[SimulatedConnection, None] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self._loop = loop
        self.context = copy_context()
        self.context.run(_current.set, self)

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self.context)

    def pause(self) -> None:
        self.paused += 1

    def resume(self) -> None:
        self.paused -= 1
        self._run_backlog()

    def release(self) -> None:
        """Let a paused or dead process run again so that its tasks can end: the run is over."""
        self.dead = False
        self.paused = 0
        self._run_backlog()

    def _run_backlog(self) -> None:
        if not self.paused and not self.dead:
            backlog, self.backlog = self.backlog, []
            self._loop.run_backlog(backlog)


class _OfProcess:
    """A callback of a process. It waits while the process is paused or dead."""

    __slots__ = ()

    def __init__(self: Any, process: Process, *others: Any) -> None:
        super().__init__(*others)
        self._process = process

    def _run(self: Any) -> None:
        process: Process = self._process
        if process.dead or process.paused:
            process.backlog.append(self)
            return
        loop: LabLoop = self._loop
        loop.steps += 1
        loop.trace = hash((loop.trace, loop.clock._monotonic, process.number))
        try:
            self._context.run(self._callback, *self._args)
        except ProcessKilled:
            pass
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001  (as asyncio does it)
            loop.call_exception_handler(
                {"message": f"in {self._callback}", "exception": error, "handle": self}
            )


class _Handle(_OfProcess, asyncio.Handle):
    __slots__ = ("_process",)


class _TimerHandle(_OfProcess, asyncio.TimerHandle):
    __slots__ = ("_process",)


class LabLoop(VirtualLoop):
    """An event loop in virtual time that runs many processes."""

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
        process = _current.get() if context is None else context.get(_current)
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
        process = _current.get() if context is None else context.get(_current)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        self._check_closed()  # type: ignore[attr-defined]
        timer = _TimerHandle(process, when, callback, args, self, context)
        heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def run_backlog(self, backlog: list[asyncio.Handle]) -> None:
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
        process = _current.get()
        assert process is not None
        assert self.network is not None
        return await self.network.connect(process, protocol_factory, host)


def _make_task(loop: Any, coro: Any, *, context: Context | None = None) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, context=context)
    process = _current.get() if context is None else context.get(_current)
    if process is not None:
        process.tasks.append(task)
        if len(process.tasks) > 512:
            process.tasks = [each for each in process.tasks if not each.done() or is_unheard(each)]
    return task


def is_unheard(task: asyncio.Task[Any]) -> bool:
    """Whether a task has failed and its outcome was not retrieved yet. asyncio logs such tasks when
    they are collected, and has no public way to find them before."""
    return task.done() and bool(task._log_traceback)


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

    # Called by protocols.

    def write(self, data: Any) -> None:
        if self._closing or self.process.dead:
            return
        self._network.messages += 1
        self._network.deliver(self, self.other.receive, bytes(data))

    def count_held(self, data: Any) -> None:
        """Data is buffered because the link is cut."""
        before = self._held_bytes
        self._held_bytes += len(data)
        if before <= WRITE_BUFFER_BYTES < self._held_bytes:
            self._call(self.protocol.pause_writing)

    def flush(self) -> None:
        """Send what was buffered: the link may be back."""
        if self._held_bytes > WRITE_BUFFER_BYTES:
            self._call(self.protocol.resume_writing)
        self._held_bytes = 0
        held, self.held = self.held, []
        for call, arguments in held:
            self._network.deliver(self, call, *arguments)

    def close(self, error: Exception | None = None) -> None:
        if not self._closing:
            self._closing = True
            self._network.deliver(self, self.other.end, error)
            self._call(self.lose, None)

    def abort(self) -> None:
        self.close(ConnectionResetError("reset"))

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

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        unread, self._unread = self._unread, []
        if unread:
            self._call(self.receive, b"".join(unread))

    # Called by the network.

    def _call(self, call: Callable[..., object], *arguments: Any) -> None:
        self._network.loop.call_soon(call, *arguments, context=self.process.context)

    def receive(self, data: bytes) -> None:
        if self._lost or self._closing:
            return
        if not self._reading:
            self._unread.append(data)
            return
        self.protocol.data_received(data)

    def end(self, error: Exception | None) -> None:
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
    """The links between machines, and the processes that listen on them."""

    def __init__(self, loop: LabLoop, latencies: Latencies, seed: int) -> None:
        self.loop = loop
        loop.network = self
        rng = stream(seed, "network")
        self._chance = rng.random
        self._bits = rng.getrandbits
        self._latencies = [
            latencies.latency_s * math.exp(rng.gauss(0.0, latencies.spread)) for _ in range(1024)
        ]
        self.cuts: dict[tuple[str, str], int] = {}
        self.extra_s: dict[tuple[str, str], float] = {}
        self.loss = 0.0
        self.messages = 0
        """The number of writes to connections. One write may hold several frames."""
        self._listening: dict[str, tuple[Process, Callable[[], asyncio.Protocol]]] = {}
        self._powered_off: dict[str, None] = {}
        self._waiting: list[SimulatedConnection] = []
        self.closed = False
        self.on_cut: Callable[[str, str, bool], None] = lambda *_: None
        """Called when a link in one direction may have been cut or mended."""

    def latency(self) -> float:
        return self._latencies[self._bits(10)]

    def listen(self, process: Process, factory: Callable[[], asyncio.Protocol]) -> None:
        """Let a process accept the connections to its machine."""
        self._listening[process.machine] = (process, factory)
        self._powered_off.pop(process.machine, None)

    def deliver(
        self, source: SimulatedConnection, call: Callable[..., None], *arguments: Any
    ) -> None:
        """Deliver something from one end of a connection to the other, in order."""
        loop = self.loop
        here, there = source.process.machine, source.other.process.machine
        if self.cuts.get((here, there)) or there in self._powered_off:
            source.held.append((call, arguments))
            if len(source.held) == 1:
                self._waiting.append(source)
            if isinstance(arguments[0], bytes):
                source.count_held(arguments[0])
            return
        at = loop.time() + self.latency() + self.extra_s.get((here, there), 0.0)
        if self.loss and self._chance() < self.loss:
            at += 0.2  # the kernel retransmits a lost packet
        # Later than what was sent before: the loop may swap timers of the same time.
        source.last = at = max(at, math.nextafter(source.last, math.inf))
        loop.call_at(at, call, *arguments, context=source.other.process.context)

    async def connect(
        self, process: Process, factory: Callable[[], asyncio.Protocol], host: str
    ) -> tuple[SimulatedConnection, Any]:
        await asyncio.sleep(2 * self.latency())
        here = process.machine
        if self.closed:
            raise ConnectionRefusedError(111, "Connection refused")
        if self.cuts.get((here, host)) or self.cuts.get((host, here)) or host in self._powered_off:
            await asyncio.get_running_loop().create_future()  # there is no answer
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

    def cut(self, here: str, there: str, by: int) -> None:
        """Add to the number of faults that cut the link from one machine to another."""
        self.cuts[here, there] = self.cuts.get((here, there), 0) + by
        self.on_cut(here, there, bool(self.cuts[here, there]))
        if by < 0:
            self.flush()

    def flush(self) -> None:
        """Send what was buffered, where the link is back."""
        waiting, self._waiting = self._waiting, []
        for connection in waiting:
            connection.flush()

    def close(self, processes: list[Process]) -> None:
        """Refuse new connections and reset all existing ones: the run is over."""
        self.closed = True
        self.cuts.clear()
        self._powered_off.clear()
        for process in processes:
            for each in list(process.connections):
                reset = ConnectionResetError("reset")
                self.loop.call_soon(each.end, reset, context=process.context)

    def reset(self, one: str, other: str) -> None:
        """Reset every connection between two machines."""
        for each in self._between(one, other):
            self.loop.call_soon(
                each.end, ConnectionResetError("reset"), context=each.process.context
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

    def kill(self, process: Process, *, power_loss: bool) -> None:
        """Kill a process. Its kernel closes its connections, unless the machine loses power."""
        process.dead = True
        process.paused = 0
        if power_loss:
            self._powered_off[process.machine] = None
            return
        for connection in list(process.connections):
            self.deliver(connection, connection.other.end, None)

    def restarted(self, process: Process, dead: Process) -> None:
        """A machine is up again. It resets the connections of its dead process."""
        self._powered_off.pop(process.machine, None)
        for connection in list(dead.connections):
            reset = ConnectionResetError("reset by a restarted machine")
            self.deliver(connection, connection.other.end, reset)
        dead.connections.clear()
        self.flush()
