"""A process that campaigns in the background, for servers and schedulers that have threads.

    leader = BackgroundLeadership("billing", URL)

    @leader.task
    def pay(term: Term) -> None:
        while term.valid: ...

    leader.open()  # in the process that does the work
    if leader.leads: ...
    leader.close()

`doyen.integrations.starlette` is the same for asyncio. The rules:

- The object may be made before a fork, as with servers that load the application first and fork
  their workers then. Nothing is connected and no thread is started before `open`, and what a parent
  has opened is closed for its children, which open for themselves.
- The tasks run while this process leads, each on a thread of its own. A thread cannot be
  interrupted, so a task has to look at `term.valid`. No other candidate is elected before all have
  returned, unless that takes longer than the stop budget.
- A task may return; leadership goes on. `LeadershipLost` and `StaleToken` end the term, and the
  process campaigns again. Any other exception is a failure: the process resigns, so that another
  takes over, and campaigns no more; `failure` has that exception. With `on_failure="exit"` the
  process ends as on SIGTERM.
- SIGTERM releases the term at once, before a handler of the server is called, which may wait for
  requests first. Without a handler, `doyen.lease.lifetime` does it while the main thread runs on,
  and the process ends then.

Imports the session, terms and `doyen.integrations.forwarding`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import queue
import signal
import threading
import weakref
from collections.abc import Callable
from typing import Literal, Protocol, Self, TypeVar, Unpack

from doyen.blocking import BlockingSession, connect_blocking
from doyen.election.options import CampaignOptions, CampaignSettings
from doyen.errors import ConfigError, DoyenError, LeadershipLost, SessionClosed, StaleToken
from doyen.events.log_lines import log_line
from doyen.integrations.forwarding import LeaderView
from doyen.integrations.signals import release_on_sigterm
from doyen.lease.lifetime import release_aside
from doyen.term import Term

__all__ = ["BackgroundLeadership", "Work", "all_made", "close_all", "open_all"]

log = logging.getLogger("doyen")
OnFailure = Literal["unhealthy", "exit"]
BlockingTask = Callable[[Term], object]
T = TypeVar("T", bound=BlockingTask)
Fail = Callable[[BaseException], None]


class Work(Protocol):
    """Something that is done while a process leads. Both are called on one thread."""

    def begin(self, term: Term, fail: Fail) -> None:
        """Begin, without waiting for the end. `fail` reports an error, later too."""
        ...

    def end(self, term: Term) -> None:
        """The term is over. Returns when nothing is done any more."""
        ...


class BackgroundLeadership:
    """Leadership of an election, for a process with threads.

        leader = BackgroundLeadership("billing", "postgresql://db/app")

    `store` is a URL as for `connect`, or a function that returns a blocking session, for further
    options: `lambda: doyen.connect_blocking(URL, ttl_s=5)`. Options are those of
    `Session.campaign`.
    """

    def __init__(
        self,
        election: str,
        store: str | Callable[[], BlockingSession] | None = None,
        *,
        on_failure: OnFailure = "unhealthy",
        **options: Unpack[CampaignOptions],
    ) -> None:
        CampaignSettings.of(election, options)  # mistakes are reported here
        if on_failure not in ("unhealthy", "exit"):
            raise ConfigError(f'on_failure is "unhealthy" or "exit", not {on_failure!r}')
        self.election = election
        self._store = store
        self._on_failure = on_failure
        self._options = options
        self._works: list[Work] = []
        self._view: LeaderView | None = None
        self._life: _Life | None = None
        self._opening = threading.Lock()
        _made.add(self)

    def task(self, function: T) -> T:
        """Have a function run with the term, on a thread, whenever this process leads.

        @leader.task
        def pay(term: doyen.Term) -> None:
            while term.valid:
                pay_next_invoice(fencing_token=term.token)
        """
        if inspect.iscoroutinefunction(function):
            raise ConfigError(
                f"a task of this leader is an ordinary function, not {function!r}: there is no"
                " event loop; call asyncio.run in a function, and have it look at term.valid"
            )
        self._works.append(_Task(function))
        return function

    @property
    def leads(self) -> bool:
        """Whether this process may rely on being the leader. Any thread, never blocks."""
        term = self.term
        return term is not None and term.valid

    @property
    def term(self) -> Term | None:
        """The term of this process, while it leads. Any thread, never blocks."""
        life = self._life
        return None if life is None else life.term

    @property
    def failure(self) -> BaseException | None:
        """What ended the candidacy of this process: the exception of a task, or of the store."""
        life = self._life
        return None if life is None else life.failure

    @property
    def view(self) -> LeaderView:
        """Who leads, as this process knows it; for `doyen.integrations.wsgi.LeaderMiddleware`. The
        leader is observed only if this was asked for before `open`."""
        if self._view is None:
            if self._mine is not None:
                raise ConfigError("the leader is not observed: ask for `view` before `open`")
            self._view = LeaderView(self.election)
        return self._view

    @property
    def session(self) -> BlockingSession:
        """The session, between `open` and `close`, for locks, queries and other elections."""
        life = self._mine
        if life is None:
            raise SessionClosed("this process does not campaign: call `open` first")
        return life.session

    @property
    def _mine(self) -> _Life | None:
        """The life that this process has opened, and not its parent."""
        life = self._life
        return life if life is not None and life.pid == os.getpid() else None

    def open(self) -> Self:
        """Connect, and campaign from now on. Does nothing if this process has opened it before."""
        if self._mine is None:
            with self._opening:
                if self._mine is None:
                    self._life = _Life(self)
        return self

    def close(self) -> None:
        """End the tasks, leave the election and close the session. Returns when that is done."""
        life = self._mine
        if life is not None:
            life.close()
            self._life = None

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block until this process leads; False if `timeout_s` has passed first."""
        life = self._mine
        if life is None:
            raise SessionClosed("this process does not campaign: call `open` first")
        return life.leading.wait(timeout_s)

    def open_for_request(self, server: str) -> None:
        """Open with the first request, on a server that has no hook for its workers."""
        if self._mine is None:
            if "gunicorn" in server:
                line = log_line(
                    event="campaign_begins_late",
                    election=self.election,
                    reason="this worker had no request before",
                    remedy="from doyen.integrations.gunicorn import post_worker_init, worker_exit,"
                    " in gunicorn.conf.py",
                )
                log.warning("%s", line)
            self.open()


_this_thread = threading.local()


class _Task:
    """A function that runs on a thread."""

    def __init__(self, function: BlockingTask) -> None:
        self._function = function
        self._thread: threading.Thread | None = None

    def begin(self, term: Term, fail: Fail) -> None:
        def run() -> None:
            _this_thread.works = True
            try:
                self._function(term)
            except (LeadershipLost, StaleToken):
                term._conclude()
            except BaseException as error:  # noqa: BLE001 - reported
                fail(error)

        name = f"{term.election}-{getattr(self._function, '__name__', 'task')}"
        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def end(self, term: Term) -> None:
        if self._thread is not None:
            self._thread.join()


class _Life:
    """What one process has from `open` to `close`."""

    def __init__(self, owner: BackgroundLeadership) -> None:
        self.pid = os.getpid()
        self.term: Term | None = None
        self.leading = threading.Event()
        self._owner = owner
        self._failure: BaseException | None = None
        self._begun: list[Work] = []
        self._following, self._served = contextlib.ExitStack(), contextlib.ExitStack()
        """What the view of the owner has from `open` to `close`, and during a term."""
        self._asked: queue.SimpleQueue[None] = queue.SimpleQueue()
        server_handler = signal.getsignal(signal.SIGTERM)
        store = owner._store
        self.session = (store() if callable(store) else connect_blocking(store)).open()
        self._candidate = self.session.candidate(
            owner.election, on_elected=self._begin, on_lost=self._end, **owner._options
        )
        self._restore = release_on_sigterm(server_handler, lambda: self._asked.put(None))
        release_aside()
        name = f"closes-{owner.election}"
        self._closer = threading.Thread(target=self._close_when_asked, name=name, daemon=True)
        self._closer.start()
        if owner._view is not None:
            self._following.enter_context(owner._view.following_blocking(self.session))
        self._candidate.open()

    @property
    def failure(self) -> BaseException | None:
        return self._failure or self._candidate.failure

    def close(self) -> None:
        self._asked.put(None)
        if not getattr(_this_thread, "works", False):  # a task cannot wait for its own end
            self._closer.join()
        self._restore()

    def _close_when_asked(self) -> None:
        """Close when that is requested by a signal handler or a task, which cannot wait for the
        end."""
        self._asked.get()
        with contextlib.suppress(Exception):  # logged, and known as `failure`
            self._candidate.close()
        with contextlib.suppress(DoyenError):  # the session is closed anyway
            self._following.close()
        self.session.close()

    def _begin(self, term: Term) -> None:
        self.term = term
        if self._owner._view is not None:
            self._served.enter_context(self._owner._view.leading(term))
        for work in self._owner._works:
            try:
                work.begin(term, self._fail)
            except Exception as error:  # noqa: BLE001 - reported
                self._fail(error)
                break
            self._begun.append(work)
        self.leading.set()

    def _end(self, term: Term) -> None:
        """No other candidate is elected before this returns."""
        self.leading.clear()
        term._conclude()  # if it is not lost, but given up
        begun, self._begun = self._begun, []
        try:
            for work in reversed(begun):
                work.end(term)
        finally:
            self._served.close()
            self.term = None

    def _fail(self, error: BaseException) -> None:
        self._failure = error
        line = log_line(
            event="candidacy_failed",
            election=self._owner.election,
            effect="this process does not campaign any more",
            remedy="restart it",
        )
        log.error("%s", line, exc_info=error)
        self._asked.put(None)
        if self._owner._on_failure == "exit":
            os.kill(os.getpid(), signal.SIGTERM)


_made: weakref.WeakSet[BackgroundLeadership] = weakref.WeakSet()
"""All of this process. Servers open and close them with their workers."""


def all_made() -> list[BackgroundLeadership]:
    """All that have been made in this process, or before it was forked."""
    return [*_made]


def open_all() -> None:
    """Open all that have been made."""
    for each in all_made():
        each.open()


def close_all() -> None:
    """Close all that this process has opened."""
    for each in all_made():
        each.close()


def _after_fork_in_child() -> None:
    for each in _made:
        each._opening = threading.Lock()  # a thread of the parent may have held it
        if each._view is not None:
            each._view.forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
