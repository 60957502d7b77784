"""A connection that speaks the wire's protocol, over asyncio.

    link = await dial("10.0.0.1:7400", me, role="client", security=security,
                      on_frames=take, on_end=ended)
    link.send(kind, payload)        # queued: False if the link has ended or its queue is full
    await link.drain()              # until what is queued has room again
    link.pause(); link.resume()     # stop reading: the other side is held up in the end
    link.close(); link.abort()      # after what is queued; at once
    link.closed, link.end           # whether it has ended, and how
    await link.wait()               # until it has
    link.them                       # Identity of the other side: cluster, node, incarnation
    link.info                       # MemberInfo of the other side, if it is a node
    link.granted                    # the role that it has, if it called us

`on_frames(link, [(kind, payload), …])` gets everything that one read brought, in order; it may be
called before `dial` returns, and may raise `FrameError` for what makes no sense. `on_end(link,
end)` is called once, and only for a link that was open. Everything sent in one turn of the loop
goes out as one write.

A listener makes a `FrameConnection` for each connection (see `doyen.quorum.node.listener`); its
`admit(link)` decides, at once or later, by `link.welcome(on_frames, on_end)` or `link.refuse(fault,
text)`.

Silence: a side that has heard nothing for `keepalive_s` says ping, and lets go after three of them
(`End.SILENT`). `End.LEFT`, an end or a reset by the other side, is the one sign that its process
may have died. Whatever is malformed closes the link, is counted in the `Tally`, and costs one line
of the log now and then; nothing is raised out of the protocol.
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
from typing import Any, cast

from doyen._waiting import shared
from doyen.errors import StoreUnavailable
from doyen.quorum.protocol.wire import (
    ANY,
    MAX_FRAME,
    MAX_GREETING,
    ClientHandshake,
    CloseReason,
    ConnectionIdentity,
    ConnectionRefused,
    FrameError,
    FrameKind,
    Frames,
    Judge,
    MemberInfo,
    Role,
    Security,
    ServerHandshake,
    frame,
    pack_head,
    parse_address,
    refusal,
)

__all__ = ["End", "FrameConnection", "Tally", "dial"]

log = logging.getLogger("doyen")

OnFrames = Callable[["FrameConnection", Sequence[tuple[int, bytes]]], None]
OnEnd = Callable[["FrameConnection", "End"], None]

KEEPALIVE_S = 2.0
PINGS = 3
HANDSHAKE_S = 5.0
BOUND = 16 << 20
"""Bytes that may wait to be sent on one link."""
HIGH_WATER = 256 << 10
LINGER_S = 1.0
LOG_EVERY_S = 10.0


class End(Enum):
    """How a link came to its end."""

    LEFT = "the other side ended or reset it"
    SILENT = "nothing was heard for too long"
    FAULT = "something malformed came"
    CLOSED = "closed here"


class Tally:
    """What went wrong on connections, counted by kind; one line of log per kind now and then."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged: dict[str, tuple[float, int]] = {}

    def note(self, fault: str, text: str) -> None:
        """Count it, and log it unless one of its kind was logged a moment ago."""
        self.counts[fault] += 1
        if fault == CloseReason.NOT_SERVING:
            return  # while a leader is elected, everybody hears it
        count, now = self.counts[fault], time.monotonic()
        last, before = self._logged.get(fault, (-LOG_EVERY_S, 0))
        if now - last >= LOG_EVERY_S:
            self._logged[fault] = (now, count)
            more = f" ({count - before - 1} more like this before)" if count - before > 1 else ""
            log.warning("connection closed: %s [%s]%s", text, fault, more)


class FrameConnection(asyncio.Protocol):
    """One connection, from its first byte to its end."""

    def __init__(
        self,
        handshake: ClientHandshake | ServerHandshake,
        tally: Tally,
        *,
        admit: Callable[[FrameConnection], None] | None = None,
        on_frames: OnFrames | None = None,
        on_end: OnEnd | None = None,
        keepalive_s: float = KEEPALIVE_S,
        bound: int = BOUND,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handshake = handshake
        self._tally = tally
        self._admit = admit
        self._on_frames = on_frames
        self._on_end = on_end
        self._keepalive_s = keepalive_s
        self._keepalive: asyncio.TimerHandle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._frames = Frames(MAX_GREETING)
        self._transport: Any = None  # an asyncio.Transport, once there is one
        self._out: list[bytes] = []
        self._flushing = False
        self._stuffed = False
        self._reading = True
        self._heard = False
        self._silences = 0
        self._waiting: list[asyncio.Future[None]] = []
        self._probes: list[asyncio.Future[None]] = []
        self._why: End | None = None
        self.bound = bound
        self.queued = 0
        """Bytes that wait to be handed to the transport."""
        self.accepted = 0
        self.written = 0
        """Frames that were queued, and how many of them have been handed to the transport."""
        self.open = False
        self.closed = False
        self.end: End | None = None
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        self._gone: asyncio.Future[None] = self._loop.create_future()
        self.where = "?"
        """The other side's address, for messages."""

    @property
    def them(self) -> ConnectionIdentity:
        return self._handshake.them

    @property
    def role(self) -> Role:
        """As what the other side has come, if it called us."""
        return self._handshake.role if isinstance(self._handshake, ServerHandshake) else "peer"

    @property
    def granted(self) -> Role:
        """What the other side may do, by its secret and its certificate."""
        return self._handshake.granted if isinstance(self._handshake, ServerHandshake) else "peer"

    @property
    def info(self) -> MemberInfo:
        """What the other side says of itself, if it is a node."""
        return self._handshake.info

    @property
    def certificate(self) -> Mapping[str, Any] | None:
        """The other side's, if it has shown one."""
        return self._handshake.certificate

    @property
    def version(self) -> int:
        return self._handshake.version

    @property
    def supports(self) -> tuple[int, int]:
        """The versions of the replicated state that the other side supports; see `versions`."""
        return self._handshake.supports

    @property
    def ending(self) -> bool:
        """Whether it has ended, or is about to."""
        return self.closed or self._why is not None

    @property
    def full(self) -> bool:
        """Whether `send` would refuse."""
        return self.queued > self.bound

    @property
    def congested(self) -> bool:
        """Whether `drain` would wait."""
        return not self.closed and (self._stuffed or self.queued > HIGH_WATER)

    # What owners do with it.

    def send(self, kind: int, *parts: bytes) -> bool:
        """Queue a frame. False, and nothing is queued, if the link has ended or is full."""
        if self.closed or self._why is not None or self.queued > self.bound:
            return False
        size = 1
        for part in parts:
            size += len(part)
        if size > MAX_FRAME:
            raise ValueError(f"a frame of {size} bytes; {MAX_FRAME} are allowed")
        self._out.append(pack_head(size, kind))
        self._out.extend(parts)
        self.queued += size + 4
        self.accepted += 1
        if not self._flushing and not self._stuffed:
            self._flushing = True
            self._loop.call_soon(self._flush)
        return True

    async def drain(self) -> None:
        """Wait until what was sent has been handed over, or the link has ended."""
        while self.congested:
            future = self._loop.create_future()
            self._waiting.append(future)
            await future

    def pause(self) -> None:
        """Read nothing more for now. Silence of the other side is then not noticed."""
        if self._reading and not self.closed:
            self._reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._reading and not self.closed:
            self._reading = self._heard = True
            self._transport.resume_reading()

    def close(self, end: End = End.CLOSED) -> None:
        """Send what is queued, then end it; at the latest after a second."""
        if self.ending:
            return
        self._why = end
        if self._out:
            self._transport.write(b"".join(self._out))
            self._out.clear()
            self.written = self.accepted
        self._transport.close()
        self._linger = self._loop.call_later(LINGER_S, self._transport.abort)

    def abort(self, end: End = End.CLOSED) -> None:
        if not self.closed:
            self._why = self._why or end
            if self._transport is not None:
                self._transport.abort()

    async def wait(self) -> None:
        """Until it has ended."""
        await shared(self._gone)

    def when_gone(self, then: Callable[[FrameConnection], None]) -> None:
        """Have this called when it has ended, open or not."""
        self._gone.add_done_callback(lambda _: then(self))

    async def alive(self, within_s: float) -> bool:
        """Whether anything is heard from the other side in answer to a ping."""
        if self.ending:
            return False
        probe: asyncio.Future[None] = self._loop.create_future()
        self._probes.append(probe)
        self._transport.write(frame(FrameKind.PING))
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await probe
        return probe.done() and not probe.cancelled() and not self.ending

    def fault(self, fault: CloseReason, text: str) -> None:
        """Close it because of what the other side has sent."""
        if not self.ending:
            self._tally.note(fault, f"{self}: {text}")
            self._fail(ConnectionRefused(fault, f"{self}: {text}"))
            self.abort(End.FAULT)

    # The handshake of a listener.

    def welcome(self, on_frames: OnFrames, on_end: OnEnd) -> None:
        """Let it in."""
        if self.ending or not isinstance(self._handshake, ServerHandshake):
            return
        self._on_frames, self._on_end = on_frames, on_end
        self._transport.write(self._handshake.welcome())
        self._opened()
        self._take(b"")

    def refuse(self, fault: CloseReason, text: str) -> None:
        """Tell it why not, and end it."""
        if not self.ending:
            self._tally.note(fault, f"{self}: {text}")
            self._transport.write(refusal(ConnectionRefused(fault, text)))
            self.close(End.FAULT)

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.set_write_buffer_limits(HIGH_WATER)
        self.where = _where(self._transport.get_extra_info("peername"))
        self._handshake.certificate = self._transport.get_extra_info("peercert") or None
        if self._why is not None:
            self._transport.abort()
        elif isinstance(self._handshake, ClientHandshake):
            self._transport.write(self._handshake.begin())

    def data_received(self, data: bytes) -> None:
        self._heard = True
        if self._why is None:
            self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            if not self.open:
                self._greet(data)
                data = b""
            if self.open:
                frames = self._frames.feed(data)
                if self._frames.control or self._probes:
                    self._attend()
                if frames:
                    cast(OnFrames, self._on_frames)(self, frames)
        except FrameError as error:
            self.fault(error.fault, str(error))

    def pause_writing(self) -> None:
        self._stuffed = True

    def resume_writing(self) -> None:
        self._stuffed = False
        self._flush()

    def eof_received(self) -> None:
        """The transport closes by itself then."""

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed, self.open, opened = True, False, self.open
        if self._why is None:
            left = exc is None or isinstance(exc, ConnectionError | ssl.SSLError)
            self._why = End.LEFT if left else End.SILENT
        self.end = self._why
        for timer in (self._keepalive, self._linger):
            if timer is not None:
                timer.cancel()
        self._out.clear()
        self.queued = 0
        self._wake()
        self._answer_probes()
        self._gone.set_result(None)
        if not self.greeted.done():
            why = f": {exc}" if exc is not None else ""
            self._fail(StoreUnavailable(f"{self} closed the connection before it was made{why}"))
        if opened:
            cast(OnEnd, self._on_end)(self, self.end)

    # Inner parts.

    def _flush(self) -> None:
        self._flushing = False
        if self._out and self._why is None and not self._stuffed:
            data = b"".join(self._out)
            self._out.clear()
            self.queued = 0
            self.written = self.accepted
            self._transport.write(data)
        if self._waiting and not self._stuffed:
            self._wake()

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    def _attend(self) -> None:
        """The wire's own frames on an open link."""
        self._answer_probes()
        control, self._frames.control = self._frames.control, []
        for kind, payload in control:
            if kind == FrameKind.PING and not payload:
                if not self._stuffed:
                    self._transport.write(frame(FrameKind.PONG))
            elif kind != FrameKind.PONG or payload:
                raise FrameError(
                    CloseReason.OUT_OF_TURN, f"a frame of kind {kind} after the handshake"
                )

    def _answer_probes(self) -> None:
        for probe in self._probes:
            if not probe.done():
                probe.set_result(None)
        self._probes.clear()

    def _greet(self, data: bytes) -> None:
        """The handshake, one frame at a time: what follows it is judged by another limit."""
        while True:
            others = self._frames.feed(data, most=1)
            data = b""
            if others:
                raise FrameError(CloseReason.OUT_OF_TURN, "spoke before the handshake was over")
            if not self._frames.control or not self._step(*self._frames.control.pop()):
                return

    def _step(self, kind: int, payload: bytes) -> bool:
        """Whether the handshake goes on."""
        handshake = self._handshake
        try:
            answer = handshake.take(kind, payload)
        except ConnectionRefused as error:
            self._misfit(error)
            return False
        if answer:
            self._transport.write(answer)
        if isinstance(handshake, ClientHandshake):
            if handshake.done:
                self._opened()
            return not handshake.done
        if handshake.proved:
            cast(Callable[[FrameConnection], None], self._admit)(self)
        return not handshake.proved

    def _misfit(self, error: ConnectionRefused) -> None:
        if isinstance(self._handshake, ServerHandshake):
            self.refuse(error.fault, str(error))
        else:
            self._fail(ConnectionRefused(error.fault, f"{self}: {error}"))
            self.abort(End.FAULT)

    def _fail(self, error: Exception) -> None:
        if not self.greeted.done():
            self.greeted.set_exception(error)
            self.greeted.exception()  # whether or not anyone awaits it

    def _opened(self) -> None:
        self.open = True
        self._frames.limit = MAX_FRAME
        if not self.greeted.done():
            self.greeted.set_result(None)
        self._keepalive = self._loop.call_later(self._keepalive_s, self._listen_for_life)

    def _listen_for_life(self) -> None:
        if self._heard or not self._reading:
            self._heard, self._silences = False, 0
        else:
            self._silences += 1
            if self._silences > PINGS:
                self._tally.counts[CloseReason.SILENT] += 1
                self.abort(End.SILENT)
                return
            if not self._stuffed:
                self._transport.write(frame(FrameKind.PING))
        self._keepalive = self._loop.call_later(self._keepalive_s, self._listen_for_life)

    def __str__(self) -> str:
        node = self.them.node
        return f"{self.where} (as {node!r})" if node else self.where


def _where(peername: Any) -> str:
    match peername:
        case (str(host), int(port), *_):
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return "?"


async def dial(
    address: str,
    me: ConnectionIdentity,
    *,
    role: Role,
    security: Security,
    on_frames: OnFrames,
    on_end: OnEnd,
    wanted: str = ANY,
    info: MemberInfo = MemberInfo(),  # noqa: B008  (frozen)
    judge: Judge | None = None,
    tally: Tally | None = None,
    handshake_s: float = HANDSHAKE_S,
    keepalive_s: float = KEEPALIVE_S,
    bound: int = BOUND,
) -> FrameConnection:
    """Connect and shake hands. Raises `StoreUnavailable` if nobody is there or nobody answers in
    time, `ConnectionRefused` if the other side is not who was wanted or does not want us."""
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()
    link = FrameConnection(
        ClientHandshake(me, role, wanted, security.key(role), info=info, judge=judge),
        tally or Tally(),
        on_frames=on_frames,
        on_end=on_end,
        keepalive_s=keepalive_s,
        bound=bound,
    )
    context = security.dialling
    try:
        async with asyncio.timeout(handshake_s):
            await loop.create_connection(
                lambda: link, host, port, ssl=context, server_hostname=host if context else None
            )
            link.where = address
            await link.greeted
    except TimeoutError:
        link.abort()
        raise StoreUnavailable(f"{address} has not answered within {handshake_s:g} s") from None
    except ssl.SSLError as error:
        raise ConnectionRefused(CloseReason.TLS, f"{address}: TLS failed: {error}") from error
    except OSError as error:
        number = error.errno or 0
        reason = os.strerror(number) if number > 0 else error.strerror or str(error)
        if not reason and context:
            reason = "it ended the connection before TLS was agreed on; does it speak TLS?"
        raise StoreUnavailable(f"cannot reach {address}: {reason}") from error
    except BaseException:
        link.abort()
        raise
    return link
