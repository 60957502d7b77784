"""What a process has open, and what becomes of it at a fork, at exit and on SIGTERM.

A process that ends without closing its sessions leaves leases that others have to wait for. So the
sessions that are still open are released at exit, and on SIGTERM if the process would otherwise
just be ended by it:

- A handler of the user's is kept, and so is a SIGTERM that is ignored. Only the default is
  replaced, when a session is opened on the main thread, and restored when the last is closed there.
- After the release the process ends by SIGTERM, as without doyen: no exception is raised anywhere,
  and `finally` clauses do not run. A second SIGTERM ends it at once.
- The handler runs on the main thread, so bodies on that thread are suspended for good, and count
  as ended, with two exceptions. While a pool of threads is at work, perhaps for such a body
  (`asyncio.to_thread`), they are lost, and the pool has their stop budget to finish. While a
  supervised command runs, its lease is left alone: the guard stops the command when this process
  has ended, and the lease ends after that, by proof of death, by a warden or by its ttl.
- Bodies on other threads are lost, and have their stop budget to end.
- The records of suspended bodies are deleted last, when every sink has its events, because threads
  that the program has started by itself run on until the process ends.
- A process whose work is on other threads may ask for the main thread to run on meanwhile
  (`release_aside`), because that work may wait for what the main thread has, such as a lock of a
  scheduler. This is not done while a body is on the main thread.
- Nothing is released in the child of a fork. There, the default for SIGTERM is restored.

The handler takes no lock, because the code that it interrupts may hold it. It posts the release to
doyen's loop and waits for a limited time.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import queue
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from doyen.election.candidate import Candidacy
from doyen.election.core import SessionCore
from doyen.lease.runtime import ThreadRuntime

__all__ = ["body_begins", "body_ended", "ends_process", "release_aside", "track", "untrack"]

ENDING = "the process is ending"
WORKERS_PAUSE_S = 0.002
"""How often pools of threads are looked at."""
END_PAUSE_S = 0.05
"""How often the main thread is asked to end the process."""
DELIVERY_S = 0.5
"""How long records are kept for sinks to receive the last events."""
FLUSH_S = 1.5
"""How long the end of a process waits for what follows the release: the closing of stores and the
delivery of events."""


_sessions: weakref.WeakSet[SessionCore] = weakref.WeakSet()
"""All open sessions, which learn of forks."""
_released: dict[SessionCore, bool] = {}
"""Those that are released at the end of the process, and whether an event loop of the main thread
uses them: then the code of their bodies runs there."""
_bodies: dict[Candidacy, bool] = {}
"""The campaigns that have been entered, and whether that was on the main thread."""
_hooks_installed = False
_terminated = False
"""SIGTERM has come."""
_aside: queue.SimpleQueue[None] | None = None
"""Asks a thread to release all sessions and to end the process."""
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


def ends_process(handler: object) -> bool:
    """Whether this handler of SIGTERM is the default, or the one of this module in its place."""
    return handler is signal.SIG_DFL or handler is _terminate


def untrack(core: SessionCore) -> None:
    """A session has been closed."""
    _sessions.discard(core)
    _released.pop(core, None)
    if not _released and threading.current_thread() is threading.main_thread():
        _restore_default()


def body_begins(candidacy: Candidacy) -> None:
    """The calling thread has entered a campaign."""
    if isinstance(candidacy.core.runtime, ThreadRuntime):
        _bodies[candidacy] = threading.current_thread() is threading.main_thread()


def body_ended(candidacy: Candidacy) -> None:
    """The scope of the campaign is being left."""
    _bodies.pop(candidacy, None)


def release_aside() -> None:
    """From now on SIGTERM leaves the main thread running while sessions are released, unless a
    body is on it. The thread that releases them stays until the process ends: it belongs to no
    session, and a handler of signals cannot start one safely."""
    global _aside
    if _aside is None:
        _aside = queue.SimpleQueue()
        threading.Thread(
            target=_release_when_asked, args=[_aside], name="release-of-doyen", daemon=True
        ).start()


def _release_when_asked(asked: queue.SimpleQueue[None]) -> None:
    asked.get()
    release(promptly=True)
    while True:  # a signal that comes just before a blocking call has no effect until its end
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
        time.sleep(END_PAUSE_S)


def _terminate(signum: int, frame: object) -> None:
    global _terminated
    second, _terminated = _terminated, True
    if _aside is not None and not second and not _bodies_on_main_thread():
        _aside.put(None)
        return
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if not second:
        release(promptly=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _bodies_on_main_thread() -> bool:
    return any([*_bodies.values()]) or any(
        on_main_thread and core.leases.bodies for core, on_main_thread in [*_released.items()]
    )


def _at_exit() -> None:
    """The main thread and all threads that are not daemons have ended."""
    release(promptly=False)


def release(*, promptly: bool) -> None:
    """Release every session of this process, on its main thread, which runs no other code of the
    user's from here on. Returns when that is done, or has taken too long. `promptly`: the process
    ends at once after that, and sessions need not be closed in order."""
    here = os.getpid()
    # A copy, because other threads open and close sessions meanwhile.
    sessions = {core: main for core, main in [*_released.items()] if core.runtime.pid == here}
    if not sessions:
        return
    done = threading.Event()
    timings = [core.calls.timing for core in sessions]
    limit_s = max(2 * each.stop_budget_s + 2 * each.request_timeout_s for each in timings)
    limit_s += DELIVERY_S + FLUSH_S
    runtime = next(iter(sessions)).runtime
    runtime.post(lambda: _begin(sessions, done, promptly=promptly))
    done.wait(limit_s)


_releasing: set[asyncio.Task[None]] = set()


def _begin(sessions: dict[SessionCore, bool], done: threading.Event, *, promptly: bool) -> None:
    """On doyen's loop."""
    task = asyncio.get_running_loop().create_task(_release(sessions, promptly=promptly))
    _releasing.add(task)  # the loop keeps only a weak reference
    task.add_done_callback(lambda _: done.set())


async def _release(sessions: dict[SessionCore, bool], *, promptly: bool) -> None:
    """`promptly`: return as soon as all leases are given up and all events are delivered."""
    bodies = {each: on_main for each, on_main in [*_bodies.items()] if each.core in sessions}
    suspended = [each for each, on_main_thread in bodies.items() if on_main_thread]
    # Sessions of an event loop may have bodies that are no campaigns, such as those of shards.
    on_loop = {core for core, on_main_thread in sessions.items() if on_main_thread}
    concerned = {each.core for each in suspended} | {core for core in on_loop if core.leases.bodies}
    ended = not concerned or await _pools_finished(concerned)
    if ended:
        for each in suspended:
            each.conclude()
        await _deliver(concerned)
    resigning = [each.leave() for each in suspended if ended and not each.supervises]
    working = asyncio.ensure_future(asyncio.gather(*resigning, return_exceptions=True))
    await asyncio.sleep(0)  # the bodies of the main thread have ended from now on
    elsewhere = {each.core for each, on_main_thread in bodies.items() if not on_main_thread}
    for core in on_loop - elsewhere:
        core.leases.bodies_suspended(ended=ended)
    closing = asyncio.gather(*(core.close() for core in sessions), return_exceptions=True)
    if promptly and ended and not elsewhere:
        released = asyncio.gather(*(core.released.wait() for core in sessions))
        either: set[asyncio.Future[Any]] = {closing, released}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        await working
    else:
        await asyncio.wait({closing, working})


async def _pools_finished(cores: set[SessionCore]) -> bool:
    """Whether no pool of threads is at work. If one is, it may work for the bodies of these
    sessions: end their terms, and give it their stop budget to finish."""
    if not pools_at_work():
        return True
    for core in cores:
        core.leases.give_up_all(ENDING)
    loop = asyncio.get_running_loop()
    until = loop.time() + max(core.calls.timing.stop_budget_s for core in cores)
    while loop.time() < until:
        await asyncio.sleep(WORKERS_PAUSE_S)
        if not pools_at_work():
            return True
    return False


async def _deliver(cores: set[SessionCore]) -> None:
    """Give the sinks of these sessions, and the trails of their elections, the time to receive
    everything."""
    flushing = [
        part
        for core in cores
        for part in (core.trail.flush(), core.runtime.aside(core.telemetry.flush, _ignore))
    ]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DELIVERY_S):
            await asyncio.gather(*flushing)


def _ignore(result: object) -> None:
    pass


def pools_at_work() -> bool:
    """Whether a thread of a pool, of `concurrent.futures` (which `asyncio.to_thread` uses) or of
    anyio, is executing a call, or has one to execute."""
    pool = sys.modules.get("concurrent.futures.thread")
    for thread, calls in list(getattr(pool, "_threads_queues", {}).items()):
        if thread.is_alive() and not calls.empty():
            return True
    return any(map(_executes, sys._current_frames().values()))


_POOL_LOOP = ("concurrent.futures.thread", "_worker")
_ANYIO_LOOP = ("anyio._backends._asyncio", "WorkerThread.run")


def _executes(frame: FrameType | None) -> bool:
    """Whether a thread with this innermost frame executes a call for a pool."""
    waits = False
    while frame is not None and frame.f_globals.get("__name__") in ("queue", "threading"):
        waits = True
        frame = frame.f_back
    calls = [(each.f_globals.get("__name__"), each.f_code.co_qualname) for each in _outwards(frame)]
    if _POOL_LOOP in calls:
        return calls[0] != _POOL_LOOP
    if _ANYIO_LOOP in calls:
        return not waits or calls[0] != _ANYIO_LOOP
    return False


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _restore_default() -> None:
    if signal.getsignal(signal.SIGTERM) is _terminate:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _after_fork_in_child() -> None:
    global _terminated, _aside
    _terminated, _aside = False, None
    ThreadRuntime.forked()
    _restore_default()
    cores = list(_sessions)
    _kept_after_fork.extend(cores)
    for core in cores:
        core.forked()
    _sessions.clear()
    _released.clear()
    _bodies.clear()
