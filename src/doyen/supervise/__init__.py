"""Running a command for as long as a term lasts, and not a moment longer.

A `Supervisor` has a guard process (see `doyen.supervise.guard`) start the command and tells it of
each renewal. Two processes watch over each other: if this one is killed or frozen, the guard ends
the command in time; if the guard is, this one does. When `run` returns or raises, nothing of what
the command has started is alive.

The stop budget is spent as follows: SIGTERM when the term ends, SIGKILL after 70 % of the budget,
and if nothing has been heard of the guard after 85 %, it is killed and its work done from here.
What remains is for the kernel to take the processes down.

Not covered: both processes killed in the same instant (the command's own process still dies, what
it has started may not), and what has changed its user so that we may not signal it. Only tokens
protect then, as they do when the machine itself is paused.

May import the session's layers and below, but needs only a `Tenure`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from doyen._waiting import outlast, shared
from doyen.errors import LeadershipLost
from doyen.supervise import guard as wire

__all__ = ["Supervisor", "Tenure"]

log = logging.getLogger("doyen")

GRACE_SHARE = 0.7
"""From SIGTERM to SIGKILL, as a share of the stop budget."""
TAKEOVER_SHARE = 0.85
"""When a guard that has not reported by then is replaced by ourselves."""


class Tenure(Protocol):
    """What of a `Term` matters here."""

    @property
    def token(self) -> int: ...

    @property
    def valid_until(self) -> float: ...

    @property
    def stop_budget_s(self) -> float: ...

    def proof(self) -> tuple[int, ...]: ...

    def on_renewal(self, listener: Callable[[float], None], /) -> None: ...


class Supervisor:
    """Runs one command, any number of times, under a guard of its own.

        async with Supervisor(["./server"]) as supervisor:
            async with session.campaign("billing") as term:
                code = await supervisor.run(term)

    Enter it before the campaign: the guard takes some 20 ms to start, which then cost nothing.
    `environ` is what the command sees besides this process's own environment and `DOYEN_TOKEN`.
    """

    def __init__(self, command: Sequence[str], *, environ: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._environ = {**os.environ, **(environ or {})}
        self._guard: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._speaking = threading.Lock()
        """Renewals are told from doyen's thread, and must not meet a descriptor being closed."""
        self._main: int | None = None
        self._ended: asyncio.Future[int] | None = None
        self._term: Tenure | None = None
        self._takeover: asyncio.TimerHandle | None = None
        self._clearing: asyncio.Task[None] | None = None
        self._whole = False
        self._spare: frozenset[int] = frozenset()

    async def __aenter__(self) -> Supervisor:
        self._whole = wire.adopt_orphans()
        self._spare = frozenset(wire.children(os.getpid())) if self._whole else frozenset()
        self._start_guard()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._dismiss_guard()
        wire.disown_orphans()

    @property
    def running(self) -> bool:
        """Whether anything of the command may be alive."""
        return self._ended is not None

    async def run(self, term: Tenure) -> int:
        """Run the command and return its exit code (128 + signal, if it died of one) once nothing
        of it is left.

        A command that ends by itself takes what it has left behind with it. Cancelled, which is
        how a term's body learns of its loss, this stops the command before it raises. Should the
        guard have stopped it before that news came, `LeadershipLost` is raised.
        """
        if self._ended is not None:
            raise RuntimeError("the command is running already")
        if self._guard is None:
            self._start_guard()
        if term is not self._term:
            self._term = term
            term.on_renewal(partial(self._renewed, term))
        self._main = None
        ended = self._ended = asyncio.get_running_loop().create_future()
        self._tell(
            wire.START,
            term.token,
            valid_until=term.valid_until,
            grace_s=GRACE_SHARE * term.stop_budget_s,
            proof=term.proof(),
        )
        try:
            return await shared(ended)
        except asyncio.CancelledError:
            self._tell(wire.STOP)
            self._take_over_in(TAKEOVER_SHARE * term.stop_budget_s)
            await outlast(ended)
            ended.exception()  # the cancellation says it already
            raise
        finally:
            self._ended = None
            if self._takeover is not None:
                self._takeover.cancel()

    def forward(self, signum: int) -> None:
        """Send a signal to the command's process group."""
        self._tell(wire.FORWARD, signum)

    def kill(self, *, patience_s: float = 1.0) -> None:
        """SIGKILL everything that runs; take over from a guard that does not within the time."""
        self._tell(wire.KILL)
        self._take_over_in(patience_s)

    def _renewed(self, term: Tenure, valid_until: float) -> None:
        # On doyen's thread. A term that is over must not speak for the next one.
        if term is self._term:
            self._tell(wire.EXTEND, valid_until=valid_until)

    def _start_guard(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", wire.__file__, str(theirs.fileno()), *self._command],
                env=self._environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is for us to pass on
            )
        ours.setblocking(False)
        self._link = ours
        asyncio.get_running_loop().add_reader(ours, self._hear)

    def _dismiss_guard(self) -> None:
        """Let the guard go; it ends what still runs and then itself."""
        process, self._guard = self._guard, None
        with self._speaking:
            link, self._link = self._link, None
            if link is not None:
                asyncio.get_running_loop().remove_reader(link)
                link.close()
        if process is not None:
            try:
                process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _tell(
        self,
        what: bytes,
        number: int = 0,
        *,
        valid_until: float = 0.0,
        grace_s: float = 0.0,
        proof: tuple[int, ...] = (),
    ) -> None:
        message = wire.FRAME.pack(what, number, valid_until, grace_s)
        try:
            with self._speaking:
                if self._link is not None:
                    socket.send_fds(self._link, [message], proof)
        except OSError as error:
            # It has died, which `_hear` is told of, or has been frozen for long: then the deadline
            # it knows of stands, and whatever must happen in spite of it is ours to do in time.
            log.debug("the guard could not be told %r: %s", what, error)

    def _hear(self) -> None:
        assert self._link is not None
        try:
            data = self._link.recv(wire.FRAME.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if len(data) != wire.FRAME.size:
            self._guard_died()
            return
        what, number, *_ = wire.FRAME.unpack(data)
        if what == wire.READY and not number:
            log.warning(
                "this system cannot tell which processes descend from the command: what leaves its"
                " process group is not stopped with it"
            )
        elif what == wire.STARTED:
            self._main = number
        elif what == wire.ENDED:
            self._conclude(number)
        elif what == wire.EXPIRED and self._ended is not None and not self._ended.done():
            self._ended.set_exception(
                LeadershipLost("the deadline passed, and the guard has stopped the command")
            )

    def _conclude(self, status: int) -> None:
        if self._ended is not None and not self._ended.done():
            code = os.waitstatus_to_exitcode(status)
            self._ended.set_result(code if code >= 0 else 128 - code)

    def _take_over_in(self, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._takeover is not None:
            self._takeover.cancel()
        if self._guard is not None:
            self._takeover = loop.call_later(patience_s, self._guard.kill)

    def _guard_died(self) -> None:
        process = self._guard
        self._dismiss_guard()
        if self._ended is None:
            return  # the next run starts another
        log.error(
            "the guard process %s was killed; the command is being killed with it",
            process.pid if process else "",
        )
        self._clearing = asyncio.get_running_loop().create_task(self._clear_up())

    async def _clear_up(self) -> None:
        """Do what the guard would have done. Its orphans are ours now."""
        tree = wire.Tree(self._main, whole=self._whole, spare=self._spare)
        while not tree.reap():
            tree.signal(signal.SIGKILL)
            await asyncio.sleep(0.005)
        self._conclude(signal.SIGKILL)
