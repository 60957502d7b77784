"""Tests of adapters against a model server: connections in virtual time, with faults by seed.

A test of an adapter provides a *model server*: a coroutine `serve(connection)` that speaks the
engine's wire protocol on one connection and keeps the engine's state in plain Python. Everything
runs on one `WireLoop`: the adapter, its client library and the model. Connections are Unix sockets
inside the process, where written data is readable at once, so the loop knows when nothing is in
flight and can advance its clock. A minute of faults takes a fraction of a second.

    class Model:
        async def serve(self, connection: Connection) -> None:
            while line := await connection.reader.readline():
                await connection.answer("get", lambda: self.get(line))

    def test_contest() -> None:
        def build(world: WireWorld) -> Model: ...
        run_contest(seed, build, lambda host: f"engine://{host}:1000")

`Connection.answer` draws a fault for each request (see `doyen.testing.faults`):

- `Late`: carried out or answered late; later data on the connection waits, as in TCP
- `LostCall`: not carried out; the connection is silent from then on, or closed
- `Unanswered`: carried out; the connection sends nothing more, or is closed
- `RefusedCall`: not carried out, and the connection is closed
- `Stray`: the connection is closed, and the request is carried out some time later

A cut (`Faults.cut`) drops what is sent on existing connections, and new connections hang. When it
is healed, connections that lost data are closed.

Clients reach the model by `create_connection(host=…)` of the loop, which includes
`asyncio.open_connection` and everything built on it. A library that opens its own socket can use
`network.path(host, port)`; for libpq the directory is the host (`?host=DIRECTORY&port=PORT`). A
library that needs threads uses those of `strands`, which alternate with the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
import shutil
import socket
import tempfile
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, ClassVar, Protocol

from doyen import Session
from doyen.election.options import SessionSettings
from doyen.events import Elected, Record
from doyen.lease.clock import VirtualClock
from doyen.lease.runtime import InlineRuntime
from doyen.testing.faults import Faults, Late, LostCall, Odds, RefusedCall, Stray, Unanswered
from doyen.testing.virtual import VirtualDeadlock, VirtualLoop
from swarm import FAIR, Oracle, Process, World

ROUGH = Odds(late=0.04, lost=0.01, unanswered=0.02, refused=0.01, stray=0.01, delay_s=1.0)
PORT = 1000
HELD_OPEN_S = 3600.0


class WireLoop(VirtualLoop):
    """Virtual time, with connections to servers on the same loop."""

    def __init__(self, clock: VirtualClock, look: Callable[[], None] = lambda: None) -> None:
        self.clock = clock
        asyncio.SelectorEventLoop.__init__(self, _Polling(clock))
        self._clock_resolution = 1e-7  # as in VirtualLoop
        self._look = look
        self.network: Network | None = None

    def _run_once(self) -> None:
        super()._run_once()  # type: ignore[misc]
        self._look()

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        if host is None or self.network is None:
            return await super().create_connection(protocol_factory, host, port, **options)
        path = await self.network.reach(str(host), int(port))
        transport, protocol = await self.create_unix_connection(protocol_factory, path)
        found = transport.get_extra_info("socket")
        transport._extra["socket"] = _WithoutOptions(found)  # type: ignore[attr-defined]
        return transport, protocol

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> Any:
        """Return the name as the address. The default implementation would need a thread."""
        name = host.decode() if isinstance(host, bytes) else str(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (name, int(port or 0)))]


class _WithoutOptions:
    """A socket that ignores TCP options, which a Unix socket does not have."""

    def __init__(self, found: Any) -> None:
        self._found = found

    def setsockopt(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)


class _Polling(selectors.PollSelector):
    """Poll the sockets, and advance the clock only if none of them is ready."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return sorted(ready, key=lambda one: one[0].fd)
        if timeout is None:
            raise VirtualDeadlock(
                "every task waits, no timer is set, and no connection has data to read"
            )
        if timeout > 0:
            self._clock.advance(timeout)
        return []


class Model(Protocol):
    """A model of an engine in plain Python."""

    async def serve(self, connection: Connection) -> None:
        """Speak the engine's protocol until the connection ends."""
        ...


class Connection:
    """The server side of one connection, with the faults of the client's network."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, faults: Faults, host: str
    ) -> None:
        self.reader = reader
        self.host = host
        """The name by which the client reached the server: one for each candidate."""
        self._writer = writer
        self._faults = faults
        self._loop = asyncio.get_running_loop()
        self._outgoing: deque[tuple[float, bytes]] = deque()
        self._silent_in = False
        self._silent_out = False
        self._lost_data = False
        self.closed = False

    @property
    def ignores_requests(self) -> bool:
        """Whether requests that arrive are not carried out."""
        return self.closed or self._silent_in or self._check_cut(self._faults.requests_cut)

    async def answer(self, operation: str, do: Callable[[], bytes], about: str = "") -> None:
        """Carry out one request and send what `do` returns, unless a fault prevents it."""
        if self.ignores_requests:
            return
        fault = self._faults.choose(operation, about, leased=False)
        match fault:
            case None:
                self.send(do())
            case Late(before_s=before_s, after_s=after_s):
                if before_s:
                    await asyncio.sleep(before_s)
                if not self.ignores_requests:
                    self.send(do(), after_s)
            case LostCall(raises=raises):
                self._silent_in = self._silent_out = True
                if raises:
                    self.close()
            case Unanswered(raises=raises):
                do()
                self._silent_out = True
                if raises:
                    self.close()
            case Stray(after_s=after_s):
                self._loop.call_later(after_s, do)
                self.close()
            case RefusedCall():
                self.close()
            case _:
                raise NotImplementedError(fault)

    def send(self, data: bytes, delay_s: float = 0.0) -> None:
        """Send an answer or a notification. Data sent earlier arrives first."""
        if not data or self.closed or self._silent_out or self._check_cut(self._faults.answers_cut):
            return
        due = self._loop.time() + delay_s
        if self._outgoing:
            due = max(due, self._outgoing[-1][0])
        elif delay_s <= 0:
            self._write(data)
            return
        self._outgoing.append((due, data))
        self._loop.call_at(due, self._pump)

    def _pump(self) -> None:
        while self._outgoing and self._outgoing[0][0] <= self._loop.time() + 1e-6:
            _, data = self._outgoing.popleft()
            if not self._silent_out and not self._check_cut(self._faults.answers_cut):
                self._write(data)

    def _write(self, data: bytes) -> None:
        if not self.closed and not self._writer.is_closing():
            self._writer.write(data)

    def _check_cut(self, cut: bool) -> bool:
        self._lost_data |= cut
        return cut

    def healed(self) -> None:
        """Called at the end of a cut: a connection that lost data is closed."""
        if self._lost_data:
            self.close()

    def lose(self) -> None:
        """Carry nothing more in either direction, without being closed: half-open."""
        self._silent_in = self._silent_out = True

    def close(self) -> None:
        self.closed = True
        self._outgoing.clear()
        if not self._loop.is_closed():
            self._writer.close()


class Network:
    """The simulated network of a test: the servers by host and port."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="doyen-wire-"))
        self.is_down = False
        """Connections are refused."""
        self._connections: dict[Connection, None] = {}
        self._servers: dict[str, tuple[asyncio.Server, Faults]] = {}

    def path(self, host: str, port: int) -> str:
        """The Unix socket of this server, named as libpq expects it in its directory."""
        (self.directory / host).mkdir(exist_ok=True)
        return str(self.directory / host / f".s.PGSQL.{port}")

    async def listen(self, host: str, port: int, model: Model, faults: Faults) -> None:
        """Serve `model` under this name. `faults` apply to connections by this name."""

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = Connection(reader, writer, faults, host)
            if self.is_down:
                connection.close()
                return
            self._connections[connection] = None
            try:
                await model.serve(connection)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            except asyncio.CancelledError:
                pass  # at the end of a test; asyncio before Python 3.12 logs it as an error
            finally:
                del self._connections[connection]
                connection.close()

        path = self.path(host, port)
        self._servers[path] = await asyncio.start_unix_server(accept, path), faults

    async def reach(self, host: str, port: int) -> str:
        """The socket to connect to. During a cut this hangs, as a connection attempt does."""
        path = self.path(host, port)
        if self.is_down or path not in self._servers:
            raise ConnectionRefusedError(f"nothing listens at {host}:{port}")
        faults = self._servers[path][1]
        if faults.requests_cut or faults.answers_cut:
            await asyncio.sleep(HELD_OPEN_S)
            raise TimeoutError(f"{host}:{port} does not answer")
        return path

    def healed(self, faults: Faults) -> None:
        for connection in list(self._connections):
            if connection._faults is faults:
                connection.healed()

    def lose_connections(self) -> None:
        """Leave every connection half-open, as a firewall does that has lost its state."""
        for connection in self._connections:
            connection.lose()

    def stop(self) -> None:
        """Close every connection and refuse new ones until `start`."""
        self.is_down = True
        for connection in list(self._connections):
            connection.close()

    def start(self) -> None:
        self.is_down = False

    def close(self) -> None:
        self.stop()
        for server, _ in self._servers.values():
            server.close()
        shutil.rmtree(self.directory, ignore_errors=True)


class WireOracle(Oracle):
    """Checks terms and tokens only, not the state of the store."""

    def hear(self, record: Record) -> None:
        event = record.event
        if isinstance(event, Elected):
            if event.token <= self._last_token[event.election]:
                self.object(f"token {event.token} after {self._last_token[event.election]}")
            self._last_token[event.election] = event.token


class WireProcess(Process):
    """A candidate that reaches the model by a host name of its own."""

    world: WireWorld

    async def _live(self) -> None:
        world = self.world
        self.faults.odds = FAIR if world.is_calm else world.odds
        for port in world.ports:
            await world.network.listen(self.name, port, world.model, self.faults)
        asked = SessionSettings(
            url=world.url(self.name),
            ttl_s=world.ttl_s,
            stop_budget_s=world.stop_budget_s,
            sinks=(world.oracle.hear,),
        )
        runtime = InlineRuntime(self.clock, world.rng.getrandbits(32))
        # A session that is cancelled while it closes may raise another error than CancelledError.
        while not self.crashed and not self.task.cancelling():
            # Opening a session fails if the store cannot be reached, so retry.
            with contextlib.suppress(Exception):
                async with Session(asked, runtime) as session:
                    await self.act(session)
            await asyncio.sleep(0.2)

    def calm(self) -> None:
        super().calm()
        self.world.network.healed(self.faults)


class WireWorld(World):
    """A model server, its candidates and their faults."""

    happenings: ClassVar = {**World.happenings, "outage": 1, "back": 2}

    def __init__(
        self,
        seed: int,
        build: Callable[[WireWorld], Model],
        url: Callable[[str], str],
        *,
        ttl_s: float = 3.0,
        odds: Odds = ROUGH,
        ports: tuple[int, ...] = (PORT,),
    ) -> None:
        super().__init__(seed)
        self.oracle = WireOracle()
        self.url = url
        self.ttl_s = ttl_s
        self.odds = odds
        self.ports = ports
        self.is_calm = False
        self._lives: list[asyncio.Task[None]] = []
        self.network = Network()
        self.model = build(self)

    def start(self) -> None:
        self.started += 1
        process = WireProcess(self, f"p{self.started}")
        self.processes.append(process)
        self._lives.append(process.task)

    async def end(self) -> None:
        """Also wait for candidates that left or crashed: they may still be closing their sessions,
        and cancelling that would leave connections open."""
        await super().end()
        await asyncio.gather(*self._lives, return_exceptions=True)

    def heal(self, process: Process) -> None:
        super().heal(process)
        self.network.healed(process.faults)

    def outage(self, _: Process) -> None:
        self.network.stop()

    def back(self, _: Process) -> None:
        self.network.start()

    def calm(self) -> None:
        self.is_calm = True
        self.network.start()
        super().calm()

    def watch_over(self, life: Coroutine[Any, Any, None]) -> None:
        loop = WireLoop(self.clock, self.oracle.look)
        loop.network = self.network
        random.seed(self.rng.getrandbits(32))  # used by client libraries
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            try:
                runner.run(self._stoppable(life))
            except asyncio.CancelledError:
                assert self.oracle.violation is not None
            finally:
                self.network.close()
        if self.oracle.violation is not None:
            raise self.oracle.violation


def run_contest(
    seed: int,
    build: Callable[[WireWorld], Model],
    url: Callable[[str], str],
    *,
    candidates: int = 3,
    steps: int = 40,
    ttl_s: float = 3.0,
    leader_within_s: float | None = None,
    odds: Odds = ROUGH,
    ports: tuple[int, ...] = (PORT,),
    also: Callable[[WireWorld], Awaitable[None]] | None = None,
) -> WireWorld:
    """Run candidates under faults, then without, when one must be elected in `leader_within_s`.

    `url` returns the URL of the store for the host name of a candidate. At most one term may be
    valid at any time, and tokens must increase. `also` runs at the end, without faults, for further
    checks of a test.
    """
    world = WireWorld(seed, build, url, ttl_s=ttl_s, odds=odds, ports=ports)

    async def live() -> None:
        await world.trouble(candidates, steps)
        world.start()
        world.calm()
        world.oracle.somebody_leads.clear()
        async with asyncio.timeout(leader_within_s or 10 * ttl_s):
            await world.oracle.somebody_leads.wait()
        if also is not None:
            await also(world)
        await world.end()

    world.watch_over(live())
    return world
