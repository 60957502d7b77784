"""What a process has open, and what becomes of it at a fork, at exit and on SIGTERM.

A process that ends without closing its sessions leaves leases that others have to wait for. So the
sessions that are still open are released at exit, and on SIGTERM if the process would otherwise
just be ended by it:

- A handler of the user's is kept, and so is a SIGTERM that is ignored. Only the default is
  replaced, when a session is opened on the main thread, and restored when the last is closed there.
- After the release the process ends by SIGTERM, as without doyen: no exception is raised anywhere,
  and `finally` clauses do not run. A second SIGTERM ends it at once.
- The handler runs on the main thread, so bodies on that thread are suspended for good, and count
  as ended. Bodies on other threads are lost, and have their stop budget to end.
- Nothing is released in the child of a fork. There, the default for SIGTERM is restored.

The handler takes no lock, because the code that it interrupts may hold it. It posts the release to
doyen's loop and waits for a limited time.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import threading
import weakref
from dataclasses import dataclass

from doyen.election.candidate import Candidacy
from doyen.election.core import SessionCore
from doyen.lease.runtime import ThreadRuntime
from doyen.term import Term
from doyen.term import forked as term_forked

__all__ = ["body_begins", "body_ended", "track", "untrack"]

FLUSH_S = 1.5
"""How long the end of a process waits for what follows the release: the closing of stores and the
delivery of events."""


@dataclass(frozen=True, slots=True)
class _Body:
    """A campaign that has been entered."""

    core: SessionCore
    candidacy: Candidacy
    on_main_thread: bool


_sessions: weakref.WeakSet[SessionCore] = weakref.WeakSet()
"""All open sessions: they are told of forks."""
_released: dict[SessionCore, bool] = {}
"""Those that are released at the end of the process, and whether an event loop of the main thread
uses them: then the code of their bodies runs there."""
_bodies: dict[Term, _Body] = {}
_hooks_installed = False
_kept_after_fork: list[object] = []


def track(core: SessionCore, *, release_at_exit: bool, on_loop: bool) -> None:
    """A session is open. The hooks are installed with the first session, not on import."""
    global _hooks_installed
    if not _hooks_installed:
        _hooks_installed = True
        os.register_at_fork(after_in_child=_after_fork_in_child)
        atexit.register(_at_exit)
    _sessions.add(core)
    if release_at_exit and isinstance(core.runtime, ThreadRuntime):
        on_main_thread = threading.current_thread() is threading.main_thread()
        _released[core] = on_loop and on_main_thread
        if on_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)


def untrack(core: SessionCore) -> None:
    """A session has been closed."""
    _sessions.discard(core)
    _released.pop(core, None)
    if not _released and threading.current_thread() is threading.main_thread():
        _restore_default()


def body_begins(term: Term, core: SessionCore, candidacy: Candidacy) -> None:
    """The calling thread has entered a campaign."""
    if isinstance(core.runtime, ThreadRuntime):
        on_main_thread = threading.current_thread() is threading.main_thread()
        _bodies[term] = _Body(core, candidacy, on_main_thread)


def body_ended(term: Term) -> None:
    """The scope of the campaign is being left."""
    _bodies.pop(term, None)


def _terminate(signum: int, frame: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    release()
    os.kill(os.getpid(), signal.SIGTERM)


def _at_exit() -> None:
    """The main thread and all threads that are not daemons have ended."""
    release()


def release() -> None:
    """Release every session of this process, on its main thread, which runs no other code of the
    user's from here on. Returns when that is done, or has taken too long."""
    here = os.getpid()
    # A copy, because other threads open and close sessions meanwhile.
    sessions = {core: main for core, main in [*_released.items()] if core.runtime.pid == here}
    if not sessions:
        return
    done = threading.Event()
    timings = [core.calls.timing for core in sessions]
    limit_s = max(each.stop_budget_s + 2 * each.request_timeout_s for each in timings) + FLUSH_S
    runtime = next(iter(sessions)).runtime
    runtime.post(lambda: _begin(sessions, done))
    done.wait(limit_s)


_releasing: set[asyncio.Task[None]] = set()


def _begin(sessions: dict[SessionCore, bool], done: threading.Event) -> None:
    """On doyen's loop."""
    task = asyncio.get_running_loop().create_task(_release(sessions))
    _releasing.add(task)  # the loop keeps only a weak reference
    task.add_done_callback(lambda _: done.set())


async def _release(sessions: dict[SessionCore, bool]) -> None:
    bodies = [each for each in [*_bodies.values()] if each.core in sessions]
    resigning = [each.candidacy.leave() for each in bodies if each.on_main_thread]
    working = asyncio.gather(*resigning, return_exceptions=True)
    await asyncio.sleep(0)  # the bodies of the main thread have ended from now on
    for core, on_main_thread in sessions.items():
        if on_main_thread and all(each.on_main_thread for each in bodies if each.core is core):
            core.leases.bodies_suspended()
    closing = asyncio.gather(*(core.close() for core in sessions), return_exceptions=True)
    await asyncio.wait({closing, asyncio.ensure_future(working)})


def _restore_default() -> None:
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _after_fork_in_child() -> None:
    ThreadRuntime.forked()
    term_forked()
    _restore_default()
    cores = list(_sessions)
    _kept_after_fork.extend(cores)
    for core in cores:
        core.forked()
    _sessions.clear()
    _released.clear()
    _bodies.clear()
