"""Running a command for as long as a term lasts, and no longer.

A `Supervisor` has a guard process (see `doyen.supervise.guard`) start the command, and sends it
each renewal. The two processes watch each other: if this one is killed or frozen, the guard ends
the command in time; if the guard is, this one does. When `run` returns or raises, no process that
the command has started is alive.

The stop budget is spent as follows: SIGTERM when the term ends, and SIGKILL after 70 % of the
budget. If the guard has not reported the end after 85 %, it is killed and its work is done here.
The rest is time for the kernel to end the processes.

Not covered: both processes killed at the same instant (the command's own process still dies, those
that it has started may not), and processes that have changed their user so that we may not signal
them. Only tokens protect then, as they do when the machine itself is paused.
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
from collections.abc import Mapping, Sequence
from functools import partial

from doyen._waiting import outlast, shared
from doyen.errors import LeadershipLost
from doyen.events.log_lines import log_line
from doyen.supervise import guard
from doyen.term import Term

__all__ = ["Supervisor"]

log = logging.getLogger("doyen")

GRACE_SHARE = 0.7
"""From SIGTERM to SIGKILL, as a share of the stop budget."""
TAKEOVER_SHARE = 0.85
"""When the guard is killed if it has not reported the end by then, as a share of the same."""


class Supervisor:
    """Runs one command, any number of times, under a guard of its own.

        async with Supervisor(["./server"]) as supervisor:
            async with session.campaign("billing") as term:
                code = await supervisor.run(term)

    Enter it before the campaign, because the guard takes about 20 ms to start. `environ` is added
    to the environment of the command, which is that of this process with `DOYEN_TOKEN`.
    """

    def __init__(self, command: Sequence[str], *, environ: Mapping[str, str] | None = None) -> None:
        self._command = list(command)
        self._environ = {**os.environ, **(environ or {})}
        self._guard: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._sending = threading.Lock()
        """Renewals are sent from doyen's thread, and must not use a descriptor that is being
        closed."""
        self._main: int | None = None
        self._ended: asyncio.Future[int] | None = None
        self._term: Term | None = None
        self._takeover: asyncio.TimerHandle | None = None
        self._killing: asyncio.Task[None] | None = None
        self._sees_trees = False
        self._unrelated: frozenset[int] = frozenset()

    async def __aenter__(self) -> Supervisor:
        self._sees_trees = guard.adopt_orphans()
        self._unrelated = (
            frozenset(guard.children(os.getpid())) if self._sees_trees else frozenset()
        )
        self._start_guard()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._dismiss_guard()
        guard.disown_orphans()

    @property
    def running(self) -> bool:
        """Whether a process of the command may be alive."""
        return self._ended is not None

    async def run(self, term: Term) -> int:
        """Run the command and return its exit code (128 + signal, if it died of one) once none of
        its processes is left.

        When the command ends by itself, the processes that it has started are ended too. When this
        is cancelled, which is how a term's body is notified of a loss, it stops the command before
        it raises. If the guard has stopped the command before that, `LeadershipLost` is raised.
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
        warded = term.run_begins()
        self._send(
            guard.START,
            term.token,
            valid_until=term.valid_until,
            grace_s=GRACE_SHARE * term.stop_budget_s,
            proof=term.proof(),
            run=warded,
        )
        try:
            return await shared(ended)
        except asyncio.CancelledError:
            self._send(guard.STOP)
            self._take_over_in(TAKEOVER_SHARE * term.stop_budget_s)
            await outlast(ended)
            ended.exception()  # retrieved; the cancellation is raised instead
            raise
        finally:
            self._ended = None
            if ended.done():  # otherwise the loop is gone, and the guard still has work
                term.run_ended(warded)
            if self._takeover is not None:
                self._takeover.cancel()

    def forward(self, signum: int) -> None:
        """Send a signal to the command's process group."""
        self._send(guard.FORWARD, signum)

    def kill(self, *, patience_s: float = 1.0) -> None:
        """Have the guard SIGKILL all processes; kill them from here if it has not within the
        time."""
        self._send(guard.KILL)
        self._take_over_in(patience_s)

    def _renewed(self, term: Term, valid_until: float) -> None:
        # On doyen's thread. A renewal of an earlier term must not extend the current one.
        if term is self._term:
            self._send(guard.EXTEND, valid_until=valid_until)

    def _start_guard(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", guard.__file__, str(theirs.fileno()), *self._command],
                env=self._environ,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a terminal's Ctrl-C is forwarded by us
            )
        ours.setblocking(False)
        self._connection = ours
        asyncio.get_running_loop().add_reader(ours, self._receive)

    def _dismiss_guard(self) -> None:
        """Close the connection to the guard. It ends all processes, and then itself."""
        process, self._guard = self._guard, None
        with self._sending:
            connection, self._connection = self._connection, None
            if connection is not None:
                asyncio.get_running_loop().remove_reader(connection)
                connection.close()
        if process is not None:
            try:
                process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _send(
        self,
        what: bytes,
        number: int = 0,
        *,
        valid_until: float = 0.0,
        grace_s: float = 0.0,
        proof: tuple[int, ...] = (),
        run: int = 0,
    ) -> None:
        message = guard.FRAME.pack(what, number, valid_until, grace_s, run)
        try:
            with self._sending:
                if self._connection is not None:
                    socket.send_fds(self._connection, [message], proof)
        except OSError as error:
            # The guard has died, which `_receive` notices, or has been frozen for long. Then its
            # deadline stays, and the command is killed from here in time.
            log.debug("%s", log_line(event="guard_unreachable", message=what, error=error))

    def _receive(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(guard.FRAME.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if len(data) != guard.FRAME.size:
            self._guard_died()
            return
        what, number, *_ = guard.FRAME.unpack(data)
        if what == guard.READY and not number:
            effect = "processes that leave the command's process group are not stopped with it"
            log.warning("%s", log_line(event="descendants_unknown", effect=effect))
        elif what == guard.STARTED:
            self._main = number
        elif what == guard.ENDED:
            self._conclude(number)
        elif what == guard.EXPIRED and self._ended is not None and not self._ended.done():
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
        pid = process.pid if process else None
        log.error("%s", log_line(event="guard_died", pid=pid, effect="the command is killed"))
        self._killing = asyncio.get_running_loop().create_task(self._kill_orphans())

    async def _kill_orphans(self) -> None:
        """Do what the guard would have done. Its orphans are children of this process now."""
        unrelated = self._unrelated | guard.wardens()
        tree = guard.Tree(self._main, sees_trees=self._sees_trees, unrelated=unrelated)
        while not tree.reap():
            tree.signal(signal.SIGKILL)
            await asyncio.sleep(0.005)
        self._conclude(signal.SIGKILL)
