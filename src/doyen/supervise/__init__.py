"""Running a command for as long as a term lasts, and no longer.

A `Supervisor` has a guard process (see `doyen.supervise.guard`) start the command, and sends it
each renewal. The two processes watch each other: if this one is killed or frozen, the guard ends
the command in time; if the guard is killed or frozen, this process does. When `run` returns or
raises, no process that the command has started is alive. The one exception is an interrupt that
ends the event loop, such as a second Ctrl-C. Even then the term keeps its record and its lease
until the guard has reported that all processes are gone; if this process ends before, the lease is
left to expire.

The stop budget is spent as follows: SIGTERM when the term ends, and SIGKILL after 70 % of the
budget. If the guard has not reported the end after 85 %, it is killed and its work is done here.
The rest is time for the kernel to end the processes.

Not covered: both processes killed at the same instant (the command's own process still dies, those
that it has started may not), and processes that have changed their user so that we may not signal
them. Only tokens protect then, as they do when the machine itself is paused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from doyen._waiting import outlast, retrieve, shared
from doyen.errors import GuardFailed, LeadershipLost
from doyen.events.log_lines import log_line
from doyen.supervise import guard
from doyen.term import Term, TermState

__all__ = ["Supervisor"]

log = logging.getLogger("doyen")

GRACE_SHARE = 0.7
"""From SIGTERM to SIGKILL, as a share of the stop budget."""
TAKEOVER_SHARE = 0.85
"""When the guard is killed if it has not reported the end by then, as a share of the same."""
START_WITHIN_S = 10.0
"""How long the guard may take to start the command. It needs milliseconds, unless it is frozen."""


@dataclass(eq=False, slots=True)
class _Run:
    """One run of the command, until none of its processes is alive."""

    term: Term
    number: int
    ended: asyncio.Future[int]
    awaited: bool = True
    """`Supervisor.run` waits for its end."""
    unstarted: str = ""
    """Why the guard, which was killed for that, has not started the command."""


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
        self._run: _Run | None = None
        self._term: Term | None = None
        self._takeover: asyncio.TimerHandle | None = None
        self._starting: asyncio.TimerHandle | None = None
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
        try:
            if self._run is not None:  # an interrupt has ended its body
                ended = self._run.ended
                self._stop(self._run)
                try:
                    await asyncio.wait({ended})
                finally:
                    await outlast(ended)
        finally:
            self._dismiss_guard()
            guard.disown_orphans()

    @property
    def running(self) -> bool:
        """Whether a process of the command may be alive."""
        return self._run is not None

    async def run(self, term: Term) -> int:
        """Run the command and return its exit code (128 + signal, if it died of one) once none of
        its processes is left.

        When the command ends by itself, the processes that it has started are ended too. When this
        is cancelled, which is how a term's body is notified of a loss, it stops the command before
        it raises. If the guard has stopped the command before that, `LeadershipLost` is raised.
        `GuardFailed` is raised if the guard does not start the command within 10 s.
        """
        if self.running:
            raise RuntimeError("the command is running already")
        if self._guard is None:
            self._start_guard()
        if term is not self._term:
            self._term = term
            term._on_renewal(partial(self._renewed, term))
            term.on_end(partial(self._body_ended, term))
        self._main = None
        ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        run = self._run = _Run(term, term._run_begins(), ended)
        proof = term._proof()
        sent = self._send(
            guard.START,
            term.token,
            valid_until=term.valid_until,
            grace_s=GRACE_SHARE * term.stop_budget_s,
            proof=proof,
            run=run.number,
        )
        for descriptor in proof:  # the guard has copies of its own
            os.close(descriptor)
        self._expect_start(run, START_WITHIN_S if sent else 0.0)
        try:
            return await shared(ended)
        except BaseException as error:
            self._stop(run)
            if isinstance(error, asyncio.CancelledError):
                await outlast(ended)
            # An interrupt is raised at once; the guard goes on.
            ended.add_done_callback(retrieve)
            raise
        finally:
            if ended.done():
                self._run = None
            else:
                run.awaited = False

    def _expect_start(self, run: _Run, within_s: float) -> None:
        """Give up the guard unless it starts the command in time."""

        def give_up() -> None:
            if self._guard is not None and not run.ended.done():
                run.unstarted = (
                    f"the guard process {self._guard.pid} did not start the command"
                    + (f" within {within_s:g} s" if within_s else ": it reads no messages")
                    + ". It is frozen, or the machine is overloaded; it was killed, and the next"
                    " run begins with another one"
                )
                self._guard.kill()

        self._starting = asyncio.get_running_loop().call_later(within_s, give_up)

    def _stop(self, run: _Run) -> None:
        if not run.ended.done():
            self._send(guard.STOP)
            with contextlib.suppress(RuntimeError):  # the loop is gone
                self._take_over_in(TAKEOVER_SHARE * run.term.stop_budget_s)

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

    def _body_ended(self, term: Term) -> None:
        # On any thread. A loss cancels `run`; here the body was left without waiting for it.
        if self._run is not None and self._run.term is term and term.state is TermState.ENDED:
            self._send(guard.STOP)

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
    ) -> bool:
        """Send a message to the guard; whether it has room for it."""
        message = guard.FRAME.pack(what, number, valid_until, grace_s, run)
        try:
            with self._sending:
                if self._connection is not None:
                    socket.send_fds(self._connection, [message], proof)
            return True
        except OSError as error:
            # The guard has died, which `_receive` notices, or has been frozen for long. Then its
            # deadline stays, and the command is killed from here in time.
            log.debug("%s", log_line(event="guard_unreachable", message=what, error=error))
            return False

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
            self._started()
        elif what == guard.ENDED:
            self._conclude(number)
        elif what == guard.EXPIRED:
            self._conclude(number, expired=True)

    def _started(self) -> None:
        if self._starting is not None:
            self._starting.cancel()

    def _conclude(self, status: int, *, expired: bool = False) -> None:
        """No process of the run is alive."""
        run = self._run
        if run is None or run.ended.done():
            return
        self._started()
        if self._takeover is not None:
            self._takeover.cancel()
        run.term._run_ended(run.number)
        if run.unstarted:
            run.ended.set_exception(GuardFailed(run.unstarted))
        elif expired:
            reason = "the deadline passed, and the guard has stopped the command"
            run.ended.set_exception(LeadershipLost(reason))
        else:
            code = os.waitstatus_to_exitcode(status)
            run.ended.set_result(code if code >= 0 else 128 - code)
        if not run.awaited:
            self._run = None

    def _take_over_in(self, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        if self._takeover is not None:
            self._takeover.cancel()
        if self._guard is not None:
            self._takeover = loop.call_later(patience_s, self._guard.kill)

    def _guard_died(self) -> None:
        process = self._guard
        self._dismiss_guard()
        if self._run is None or self._run.ended.done():
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
