"""A connection that carries frames, over asyncio.

    connection = await dial("10.0.0.1:7400", local, role="client", security=security,
                            on_frames=on_frames, on_end=on_end)

`on_frames(connection, [(kind, payload), …])` receives everything that one read returned, in order.
It may be called before `dial` returns, and may raise `FrameError`. `on_end(connection, end)` is
called once, and only for a connection whose handshake completed. Everything sent in one iteration
of the loop goes out as one write.

A server makes a `FrameConnection` for each connection (see `doyen.quorum.node.listener`). Its
`admit(connection)` decides, at once or later, by `connection.welcome(on_frames, on_end)` or
`connection.refuse(reason, text)`.

A side that has received nothing for `keepalive_s` sends a ping, and closes the connection after
three of them (`End.SILENT`). `End.LEFT`, a close or a reset by the other side, is the only end that
suggests that the other process has died. Malformed input closes the connection, is counted in
`ConnectionErrors` and logged at a limited rate; nothing is raised out of the protocol.

The parts: `FrameConnection` (handshake, received frames, end), `_FrameSender` (what waits to be
written), `_Keepalive` (pings, and probes for life).
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from time import perf_counter
from typing import Any

from doyen._waiting import shared
from doyen.errors import StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.quorum.protocol.frames import (
    MAX_FRAME,
    MAX_GREETING,
    CloseReason,
    ConnectionRefused,
    FrameDecoder,
    FrameError,
    FrameKind,
    frame,
    pack_header,
)
from doyen.quorum.protocol.handshake import (
    ANY,
    CheckRemote,
    ClientHandshake,
    ConnectionIdentity,
    MemberInfo,
    ServerHandshake,
    refusal,
)
from doyen.quorum.protocol.security import Role, Security, parse_address

log = logging.getLogger("doyen")

OnFrames = Callable[["FrameConnection", Sequence[tuple[int, bytes]]], None]
OnEnd = Callable[["FrameConnection", "End"], None]
Admit = Callable[["FrameConnection"], None]

KEEPALIVE_S = 2.0
PINGS = 3
HANDSHAKE_S = 5.0
BOUND = 16 << 20
"""Bytes that may wait to be sent on one connection."""
HIGH_WATER = 256 << 10
LINGER_S = 1.0
LOG_EVERY_S = 10.0


class End(Enum):
    """How a connection ended."""

    LEFT = "the other side closed or reset the connection"
    SILENT = "nothing was received for too long"
    FAULT = "the other side violated the protocol"
    CLOSED = "closed by this side"


class ConnectionErrors:
    """Counts errors of connections by reason, and logs each reason at most once per
    `LOG_EVERY_S`."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged: dict[str, tuple[float, int]] = {}

    def record(self, reason: str, text: str) -> None:
        """Count an error, and log it unless one with the same reason was logged recently."""
        self.counts[reason] += 1
        if reason == CloseReason.NOT_SERVING:
            return  # during an election, every client is refused with it
        count, now = self.counts[reason], time.monotonic()
        last, before = self._logged.get(reason, (-LOG_EVERY_S, 0))
        if now - last >= LOG_EVERY_S:
            self._logged[reason] = (now, count)
            more = count - before - 1 or None
            line = log_line(event="connection_closed", reason=reason, detail=text, more=more)
            log.warning("%s", line)


class _FrameSender:
    """Frames that wait to be written, joined into one write per iteration of the loop."""

    def __init__(self, bound: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts: list[bytes] = []
        self._scheduled = False
        self._waiters: list[asyncio.Future[None]] = []
        self._sink: Any = None
        """An asyncio.Transport while frames may be sent."""
        self._blocked = False
        """The transport's buffer is full."""
        self._bound = bound
        self.queued = 0
        """Bytes that wait to be handed to the transport."""
        self.accepted = self.written = 0
        """Frames queued so far, and how many of them have been handed to the transport."""

    def send(self, kind: int, *parts: bytes) -> bool:
        """Queue a frame. Returns False, and queues nothing, if the connection has ended or its
        queue is full."""
        if self._sink is None or self.queued > self._bound:
            return False
        size = 1
        for part in parts:
            size += len(part)
        if size > MAX_FRAME:
            raise ValueError(f"the frame has {size} bytes; {MAX_FRAME} are allowed")
        self._parts.append(pack_header(size, kind))
        self._parts.extend(parts)
        self.queued += size + 4
        self.accepted += 1
        if not self._scheduled and not self._blocked:
            self._scheduled = True
            self._loop.call_soon(self._flush)
        return True

    @property
    def congested(self) -> bool:
        """Whether `drain` would wait."""
        return self._blocked or self.queued > HIGH_WATER

    async def drain(self) -> None:
        """Wait until the queue has room, or the connection has ended."""
        while self.congested:
            future = self._loop.create_future()
            self._waiters.append(future)
            await future

    def pause_writing(self) -> None:
        self._blocked = True

    def resume_writing(self) -> None:
        self._blocked = False
        self._flush()

    def _flush(self) -> None:
        self._scheduled = False
        if self._blocked:
            return
        if self._parts and self._sink is not None:
            data = b"".join(self._parts)
            self._parts.clear()
            self.queued = 0
            self.written = self.accepted
            self._sink.write(data)
        if self._waiters:
            self._wake()

    def _finish_sending(self) -> None:
        """Write what is queued, and accept no more."""
        self._blocked = False
        self._flush()
        self._sink = None

    def _discard_queued(self) -> None:
        """Drop what is queued, and accept no more."""
        self._sink, self._blocked, self.queued = None, False, 0
        self._parts.clear()
        self._wake()

    def _wake(self) -> None:
        for future in self._waiters:
            if not future.done():
                future.set_result(None)
        self._waiters.clear()


class _Keepalive:
    """Notices that the other side is silent: by pings after each quiet interval, and by probes on
    request."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        interval_s: float,
        ping: Callable[[], None],
        silent: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._ping = ping
        self._silent = silent
        self._timer: asyncio.TimerHandle | None = None
        self._unanswered = 0
        self.heard = False
        """Something was received since the last interval began."""
        self.paused = False
        """Nothing is read, so silence means nothing."""
        self.measuring = False
        """Pings are sent in busy intervals too, to measure how long they take."""
        self.probes: list[asyncio.Future[None]] = []

    def start(self) -> None:
        self._timer = self._loop.call_later(self._interval_s, self._check)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.answer_probes()

    def _check(self) -> None:
        if self.heard or self.paused:
            self.heard, self._unanswered = False, 0
            if self.measuring:
                self._ping()
        elif self._unanswered == PINGS:
            self._silent()
            return
        else:
            self._unanswered += 1
            self._ping()
        self.start()

    async def probe(self, within_s: float) -> bool:
        """Whether anything is received within this time."""
        probe: asyncio.Future[None] = self._loop.create_future()
        self.probes.append(probe)
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await probe
        return probe.done() and not probe.cancelled()

    def answer_probes(self) -> None:
        for probe in self.probes:
            if not probe.done():
                probe.set_result(None)
        self.probes.clear()


class FrameConnection(_FrameSender, asyncio.Protocol):
    """One connection, from its first byte to its end."""

    def __init__(
        self,
        handshake: ClientHandshake | ServerHandshake,
        errors: ConnectionErrors,
        *,
        admit: Admit | None = None,
        on_frames: OnFrames | None = None,
        on_end: OnEnd | None = None,
        keepalive_s: float = KEEPALIVE_S,
        bound: int = BOUND,
    ) -> None:
        super().__init__(bound)
        self._handshake = handshake
        self._errors = errors
        self._admit = admit
        self._on_frames = on_frames
        self._on_end = on_end
        self._decoder = FrameDecoder(MAX_GREETING)
        self._keepalive = _Keepalive(self._loop, keepalive_s, self._ping, self._silent)
        self._pinged_at: float | None = None
        """When the ping was sent that has not been answered yet."""
        self._on_round_trip: Callable[[float], None] | None = None
        self._transport: Any = None  # an asyncio.Transport once the connection is made
        self._linger: asyncio.TimerHandle | None = None
        self._ending: End | None = None
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self.established: asyncio.Future[None] = self._loop.create_future()
        """Done when the handshake has completed or failed."""
        self.open = False
        self.closed = False
        self.address = "?"
        """The other side's address, for messages."""

    @property
    def remote(self) -> ConnectionIdentity:
        return self._handshake.remote

    @property
    def role(self) -> Role:
        """The role in which the other side connects, if it dialled."""
        return self._handshake.role

    @property
    def granted(self) -> Role:
        """The role that the other side's secret and certificate grant."""
        return self._handshake.granted

    @property
    def info(self) -> MemberInfo:
        """What the other side has sent about itself, if it is a node."""
        return self._handshake.info

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The other side's certificate, if it has sent one."""
        return self._handshake.certificate

    @property
    def supports(self) -> tuple[int, int]:
        """The versions of the replicated state that the other side supports; see `versions`."""
        return self._handshake.supports

    @property
    def ending(self) -> bool:
        """Whether it has ended, or is about to."""
        return self.closed or self._ending is not None

    # For the owner.

    def pause(self) -> None:
        """Stop reading. Silence of the other side goes unnoticed until `resume`."""
        if not self._keepalive.paused and not self.closed:
            self._keepalive.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._keepalive.paused and not self.closed:
            self._keepalive.paused, self._keepalive.heard = False, True
            self._transport.resume_reading()

    def close(self, end: End = End.CLOSED) -> None:
        """Send what is queued, then close; abort if that takes longer than a second."""
        if self.ending:
            return
        self._ending = end
        self._finish_sending()
        self._transport.close()
        self._linger = self._loop.call_later(LINGER_S, self._transport.abort)

    def abort(self, end: End = End.CLOSED) -> None:
        if not self.closed:
            self._ending = self._ending or end
            self._sink = None
            if self._transport is not None:
                self._transport.abort()

    async def wait(self) -> None:
        """Wait until it has ended."""
        await shared(self._gone)

    def when_gone(self, then: Callable[[FrameConnection], None]) -> None:
        """Call `then` when it has ended, whether or not the handshake completed."""
        self._gone.add_done_callback(lambda _: then(self))

    async def alive(self, within_s: float) -> bool:
        """Whether the other side sends anything within this time after a ping."""
        if self.ending:
            return False
        self._transport.write(frame(FrameKind.PING))
        return await self._keepalive.probe(within_s) and not self.ending

    def fail(self, reason: CloseReason, text: str) -> None:
        """Close it because the other side violated the protocol or a limit."""
        if not self.ending:
            self._errors.record(reason, f"{self}: {text}")
            self._not_established(ConnectionRefused(reason, f"{self}: {text}"))
            self.abort(End.FAULT)

    # The end of a server's handshake.

    def welcome(self, on_frames: OnFrames, on_end: OnEnd) -> None:
        """Accept the client."""
        if self.ending or not isinstance(self._handshake, ServerHandshake):
            return
        self._on_frames, self._on_end = on_frames, on_end
        self._transport.write(self._handshake.welcome())
        self._establish()
        self.data_received(b"")

    def refuse(self, reason: CloseReason, text: str) -> None:
        """Send the client the reason, and close."""
        if not self.ending:
            self._errors.record(reason, f"{self}: {text}")
            self._transport.write(refusal(ConnectionRefused(reason, text)))
            self.close(End.FAULT)

    # asyncio.Protocol.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.set_write_buffer_limits(HIGH_WATER)
        self.address = _format(self._transport.get_extra_info("peername"))
        self._handshake.certificate = self._transport.get_extra_info("peercert") or None
        if self._ending is not None:
            self._transport.abort()
            return
        self._sink = transport
        if isinstance(self._handshake, ClientHandshake):
            self._transport.write(self._handshake.begin())

    def data_received(self, data: bytes) -> None:
        self._keepalive.heard = True
        if self._ending is not None:
            return
        try:
            if not self.open:
                self._shake_hands(data)
                data = b""
            if self.open:
                frames = self._decoder.feed(data)
                if self._decoder.control or self._keepalive.probes:
                    self._control()
                if frames:
                    self._on_frames(self, frames)  # type: ignore[misc]
        except FrameError as error:
            self.fail(error.reason, str(error))

    def eof_received(self) -> None:
        """Returning None makes the transport close itself."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed, self.open, was_open = True, False, self.open
        if self._ending is None:
            left = exc is None or isinstance(exc, ConnectionError | ssl.SSLError)
            self._ending = End.LEFT if left else End.SILENT
        if self._linger is not None:
            self._linger.cancel()
        self._discard_queued()
        self._keepalive.stop()
        self._gone.set_result(None)
        if not self.established.done():
            why = f": {exc}" if exc is not None else ""
            if not why and self._transport.get_extra_info("sslcontext") is not None:
                why = "; it may not accept the certificate of this side, or need one"
            elif not why and not self._keepalive.heard:
                why = " and sent nothing; it may require TLS, which is not set here"
            self._not_established(
                StoreUnavailable(f"{self} closed the connection before the handshake ended{why}")
            )
        if was_open:
            self._on_end(self, self._ending)  # type: ignore[misc]

    # Received frames.

    def _control(self) -> None:
        """Process frames of the protocol's own kinds after the handshake."""
        self._keepalive.answer_probes()
        control, self._decoder.control = self._decoder.control, []
        for kind, payload in control:
            if kind == FrameKind.PING and not payload:
                if not self._blocked:
                    self._transport.write(frame(FrameKind.PONG))
            elif kind == FrameKind.PONG and not payload:
                self._ponged()
            elif kind != FrameKind.PONG or payload:
                raise FrameError(
                    CloseReason.OUT_OF_TURN, f"a frame of kind {kind} after the handshake"
                )

    def _shake_hands(self, data: bytes) -> None:
        """Process one frame at a time: those after the handshake have another limit."""
        while True:
            try:
                others = self._decoder.feed(data, most=1)
            except FrameError as error:
                if isinstance(self._handshake, ServerHandshake) or self._handshake.version:
                    raise
                text = "what answers there is not a node of doyen: check host and port"
                raise FrameError(CloseReason.GARBAGE, text) from error
            data = b""
            if others:
                raise FrameError(CloseReason.OUT_OF_TURN, "sent a frame before the handshake ended")
            if not self._decoder.control or not self._step(*self._decoder.control.pop()):
                return

    def _step(self, kind: int, payload: bytes) -> bool:
        """Process one frame of the handshake. Returns whether it goes on."""
        handshake = self._handshake
        try:
            answer = handshake.receive(kind, payload)
        except ConnectionRefused as error:
            if isinstance(handshake, ServerHandshake):
                self.refuse(error.reason, str(error))
            else:
                self._not_established(ConnectionRefused(error.reason, f"{self}: {error}"))
                self.abort(End.FAULT)
            return False
        if answer:
            self._transport.write(answer)
        if isinstance(handshake, ClientHandshake):
            if handshake.done:
                self._establish()
            return not handshake.done
        if handshake.authenticated:
            self._admit(self)  # type: ignore[misc]
        return not handshake.authenticated

    def _establish(self) -> None:
        self.open = True
        self._decoder.limit = MAX_FRAME
        if not self.established.done():
            self.established.set_result(None)
        self._keepalive.start()

    def _not_established(self, error: Exception) -> None:
        if not self.established.done():
            self.established.set_exception(error)
            self.established.exception()  # mark it as retrieved, in case it is not awaited

    # Keepalive.

    def measure(self, on_round_trip: Callable[[float], None]) -> None:
        """Measure round trips, about once per keepalive interval."""
        self._on_round_trip = on_round_trip
        self._keepalive.measuring = True

    def _ping(self) -> None:
        if not self._blocked:
            self._transport.write(frame(FrameKind.PING))
            if self._pinged_at is None:
                self._pinged_at = perf_counter()  # uvloop's own clock counts milliseconds

    def _ponged(self) -> None:
        pinged_at, self._pinged_at = self._pinged_at, None
        if pinged_at is not None and self._on_round_trip is not None:
            self._on_round_trip(perf_counter() - pinged_at)

    def _silent(self) -> None:
        self._errors.counts[CloseReason.SILENT] += 1
        self.abort(End.SILENT)

    def __str__(self) -> str:
        node = self.remote.node
        return f"{self.address} (as {node!r})" if node else self.address


def _format(peername: Any) -> str:
    match peername:
        case (str(host), int(port), *_):
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "?"


async def dial(
    address: str,
    local: ConnectionIdentity,
    *,
    role: Role,
    security: Security,
    on_frames: OnFrames,
    on_end: OnEnd,
    wanted: str = ANY,
    info: MemberInfo = MemberInfo(),  # noqa: B008  (frozen)
    check: CheckRemote | None = None,
    errors: ConnectionErrors | None = None,
    handshake_s: float = HANDSHAKE_S,
    keepalive_s: float = KEEPALIVE_S,
    bound: int = BOUND,
) -> FrameConnection:
    """Connect and complete the handshake. Raises `StoreUnavailable` if the server cannot be reached
    or does not answer in time, and `ConnectionRefused` if it is not the wanted one or refuses."""
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()
    connection = FrameConnection(
        ClientHandshake(local, role, wanted, security.key(role), info=info, check=check),
        errors or ConnectionErrors(),
        on_frames=on_frames,
        on_end=on_end,
        keepalive_s=keepalive_s,
        bound=bound,
    )
    context = security.dialling
    try:
        async with asyncio.timeout(handshake_s):
            await loop.create_connection(
                lambda: connection,
                host,
                port,
                ssl=context,
                server_hostname=host if context else None,
            )
            connection.address = address
            await connection.established
    except TimeoutError:
        connection.abort()
        raise StoreUnavailable(f"{address} has not answered within {handshake_s:g} s") from None
    except ssl.SSLError as error:
        raise ConnectionRefused(CloseReason.TLS, f"{address}: TLS failed: {error}") from error
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror or str(error)
        if not reason and context:
            reason = "it closed the connection during the TLS handshake; does it support TLS?"
        raise StoreUnavailable(f"cannot reach {address}: {reason}") from error
    except BaseException:
        connection.abort()
        raise
    return connection
