"""One session that a warden watches over, from its registration to the end of its leases.

`HolderConnection` is what the kernel offers: the link, the pidfd and the lease table. Tests replace
it. What the events mean is decided in `doyen.warden.holder`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from doyen.events.log_lines import log_line
from doyen.warden.holder import FrozenWatch, HolderWatch, Ping, Verdict
from doyen.warden.table import TableState, WardedLease, read_leases, read_state
from doyen.warden.wire import Hello, decode_number, encode_number

__all__ = ["HolderConnection", "WatchedSession"]

log = logging.getLogger("doyen.warden")


class HolderConnection(Protocol):
    """A holder, as the kernel shows it to the warden."""

    def attach(self, on_message: Callable[[], None], on_death: Callable[[], None]) -> None:
        """Have these called, on the loop, when the link has something and when the kernel reports
        the holder's death."""

    def receive(self) -> bytes | None:
        """The next message; None if there is none, empty if the link has ended."""

    def send(self, message: bytes) -> bool:
        """Send without blocking. False if that is not possible now."""

    def read(self, at: int, count: int) -> bytes:
        """Bytes of the lease table."""

    def kill(self) -> str:
        """Kill the holder. Why it was not done; empty if it was."""

    def detach(self) -> None:
        """Call nothing any more."""

    def close(self) -> None: ...


class WatchedSession:
    """Watches over one session. `on_over` is called once: with the leases to end, or with None if
    they are left alone."""

    def __init__(
        self,
        hello: Hello,
        connection: HolderConnection,
        on_over: Callable[[WatchedSession, list[WardedLease] | None], None],
    ) -> None:
        self.hello = hello
        self.connection = connection
        self._on_over = on_over
        self._loop = asyncio.get_running_loop()
        self._watch = HolderWatch(self._state)
        self._frozen: FrozenWatch | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._over = False

    def start(self) -> None:
        self.connection.attach(self._hear, self._died)
        self._watch_for_freezing()

    def _watch_for_freezing(self) -> None:
        if self.hello.frozen_after_s is not None:
            self._frozen = FrozenWatch(self.hello.frozen_after_s)
            self._tick()

    def _hear(self) -> None:
        """Take what has arrived over the link."""
        while not self._over:
            data = self.connection.receive()
            if data is None:
                return
            if not data:
                self._stop_ticks()
                self._judge(self._watch.link_ended())
                return
            number = decode_number(data)
            if number is not None:
                self._judge(self._watch.heard(number))

    def _died(self) -> None:
        """The kernel reports the holder's death."""
        self._stop_ticks()
        self._hear()  # what it said before it died
        if not self._over:
            self._judge(self._watch.died())

    def _judge(self, verdict: Verdict) -> None:
        if verdict is not Verdict.WAIT and not self._over:
            self._over = True
            self._stop_ticks()
            self.connection.detach()
            self._on_over(self, self.leases() if verdict is Verdict.END else None)

    def abandon(self) -> None:
        """Watch no longer. The holder registers with the next warden."""
        self._judge(Verdict.LEAVE)

    def _state(self) -> TableState | None:
        return read_state(self.connection.read)

    def leases(self) -> list[WardedLease]:
        """The leases that the table has now."""
        state = self._state()
        return [] if state is None else read_leases(self.connection.read, state.slots)

    def _stop_ticks(self) -> None:
        self._frozen = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        frozen = self._frozen
        if frozen is None:
            return
        self._timer = self._loop.call_later(frozen.tick_s, self._tick)
        match frozen.tick(self._loop.time(), self._state()):
            case Ping(number=number):
                if not self.connection.send(encode_number(number)):
                    frozen.not_asked()
            case "kill":
                self._kill()

    def _kill(self) -> None:
        """End a frozen holder. Its leases are ended when the kernel reports its death."""
        self._stop_ticks()
        if reason := self.connection.kill():
            line = log_line(event="frozen_holder_left", session=self.hello.session, reason=reason)
            log.warning("%s", line)
            self._watch_for_freezing()
        else:
            log.warning("%s", log_line(event="frozen_holder_killed", session=self.hello.session))
