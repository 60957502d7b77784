"""Candidates that report by callbacks, for code that has no scope: a task, or a thread.

    candidate = session.candidate("billing", on_elected=start, on_lost=stop).open()
    ...
    candidate.close()

The body of a term lasts from the call of `on_elected` to the return of `on_lost`, so no other
candidate is elected while the work is being stopped, unless that takes longer than the stop budget.
`on_lost` is called once for each `on_elected`, whatever ended the term. Then the candidate
campaigns again, until it is closed. A callback that raises is logged; if it is `on_elected`, the
term ends.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypedDict, cast

from doyen._values import Value
from doyen._waiting import outlast, retrieve, shared
from doyen.election.core import SessionCore
from doyen.election.options import CampaignOptions, CampaignSettings
from doyen.election.queries import observe_leader
from doyen.election.scopes import RepeatedBlockingCampaign
from doyen.errors import ConfigError, NotElected, SessionClosed
from doyen.events.log_lines import log_line
from doyen.model import Leader, Unreachable
from doyen.term import Term

__all__ = ["CallbackOptions", "CandidateOptions", "CandidateTask", "CandidateThread"]

log = logging.getLogger("doyen")

UNREPORTED = 64
"""How many leaders wait for `on_new_leader` on a thread. A slower callback misses the oldest."""

OnTerm = Callable[[Term], Awaitable[None] | None]
OnNewLeader = Callable[[Leader], Awaitable[None] | None]


class CallbackOptions(TypedDict, total=False):
    """The callbacks of a candidate. With asyncio they may be coroutine functions."""

    on_elected: OnTerm
    """Called with the term when this candidate is elected. Leadership goes on when it returns; a
    coroutine function that still runs is cancelled when the term ends."""
    on_lost: OnTerm
    """Called with the term when it is over: lost, or given up by `close`. `term.reason` states why.
    The work has to have ended when it returns."""
    on_new_leader: OnNewLeader
    """Called with the leader at first, and whenever another term begins, this candidate's or not.
    Terms in quick succession may be reported as one."""


class CandidateOptions(CallbackOptions, CampaignOptions, total=False):
    """The callbacks of a candidate, and the options of its campaigns."""


class Callbacks(Value):
    """The callbacks of one candidate."""

    election: str
    on_elected: OnTerm | None = None
    on_lost: OnTerm | None = None
    on_new_leader: OnNewLeader | None = None

    @classmethod
    def taken_from(
        cls, election: str, options: CandidateOptions
    ) -> tuple[Callbacks, CampaignOptions]:
        """The callbacks, and the options of the campaigns, checked."""
        rest: dict[str, Any] = {**options}
        names = [name for name in CallbackOptions.__optional_keys__ if name in rest]
        callbacks = cls(election, **{name: rest.pop(name) for name in names})
        CampaignSettings.of(election, cast("CampaignOptions", rest))
        return callbacks, cast("CampaignOptions", rest)

    def __post_init__(self) -> None:
        for name in ("on_elected", "on_lost", "on_new_leader"):
            callback = getattr(self, name)
            if callback is not None and not callable(callback):
                raise ConfigError(f"{name} is a function, not {callback!r}")

    def refuse_coroutines(self) -> None:
        """A thread has no loop for coroutine functions."""
        for name in ("on_elected", "on_lost", "on_new_leader"):
            if inspect.iscoroutinefunction(getattr(self, name)):
                raise ConfigError(
                    f"{name} is a coroutine function, for which a blocking session has no loop:"
                    " give it an ordinary function"
                )

    def failed(self, name: str) -> None:
        """Report that a callback raised an exception, which is being handled."""
        log.exception("%s", log_line(event="callback_failed", on=name, election=self.election))

    def candidate_failed(self, error: BaseException) -> None:
        """Report what has ended the candidate."""
        line = log_line(event="candidate_failed", election=self.election, error=repr(error))
        log.error("%s", line)


class NewLeaders:
    """Picks the beginnings of terms from what an observer of the leader sees."""

    def __init__(self) -> None:
        self._token: int | None = None

    def pick(self, seen: Leader | Unreachable[Leader] | None) -> Leader | None:
        """The leader, if its term has not been seen before."""
        if not isinstance(seen, Leader) or seen.token == self._token:
            return None
        self._token = seen.token
        return seen


class _Candidate:
    """What a candidate with callbacks shows of itself."""

    _term: Term | None = None

    @property
    def term(self) -> Term | None:
        """The term while this candidate leads, until `on_lost` has returned."""
        return self._term

    @property
    def leads(self) -> bool:
        """Whether this candidate may rely on being the leader. Any thread, never blocks."""
        term = self._term
        return term is not None and term.valid


class CandidateTask(_Candidate):
    """A candidate that runs as a task and reports by callbacks. Made by `Session.candidate`."""

    def __init__(
        self,
        callbacks: Callbacks,
        campaigns: Callable[[], AsyncIterator[AbstractAsyncContextManager[Term, bool]]],
        observe: Callable[[], AsyncIterator[Any]],
    ) -> None:
        self._callbacks = callbacks
        self._campaigns = campaigns
        self._observe = observe
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping: asyncio.Task[bool] | None = None

    async def open(self) -> CandidateTask:
        """Begin to campaign, in the background. Pair it with `close`."""
        if self._tasks or self._closing:
            raise SessionClosed("a candidate is opened once; make another")
        work = [self._run()]
        if self._callbacks.on_new_leader is not None:
            work.append(self._follow())
        for each in work:
            task = asyncio.get_running_loop().create_task(each)
            task.add_done_callback(self._done)
            self._tasks.append(task)
        return self

    async def close(self) -> None:
        """Leave the election; a leader calls `on_lost` and resigns. Returns when that is done.

        Raises what ended the candidate before, if something did, such as an unusable store.
        """
        self._closing = True
        mine = asyncio.current_task()
        if mine is not None and mine is self._stopping:
            mine = self._tasks[0]  # it waits for this task, and then sees `_closing`
        others = [task for task in self._tasks if task is not mine]
        for task in others:
            task.cancel()
        for task in others:
            await _finished(task)
        for task in others:
            if not task.cancelled() and not isinstance(task.exception(), SessionClosed | None):
                task.result()

    async def __aenter__(self) -> CandidateTask:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _done(self, task: asyncio.Task[None]) -> None:
        retrieve(task)
        error = None if task.cancelled() else task.exception()
        if not isinstance(error, SessionClosed | None):
            self._callbacks.candidate_failed(error)

    async def _run(self) -> None:
        async for campaign in self._campaigns():
            async with campaign as term:
                await self._lead(term)
            if self._closing:
                return

    async def _lead(self, term: Term) -> None:
        self._term = term
        try:
            if await self._call("on_elected", term) and not self._closing:
                await asyncio.Event().wait()  # until the loss, or `close`, cancels it
        finally:
            # A task of its own: `close` must not interrupt the stopping of the work.
            self._stopping = asyncio.ensure_future(self._call("on_lost", term))
            try:
                await _finished(self._stopping)
            finally:
                self._term = self._stopping = None

    async def _follow(self) -> None:
        leaders = NewLeaders()
        async for seen in self._observe():
            if (leader := leaders.pick(seen)) is not None:
                await self._call("on_new_leader", leader)

    async def _call(self, name: str, about: Term | Leader) -> bool:
        """Call a callback, if there is one. False if it failed."""
        callback = getattr(self._callbacks, name)
        if callback is None:
            return True
        try:
            result = callback(about)
            if inspect.isawaitable(result):
                await result
        except Exception:  # noqa: BLE001 - logged
            self._callbacks.failed(name)
            return False
        return True


async def _finished(task: asyncio.Task[Any]) -> None:
    """Wait until the task is done. A cancellation of the caller arrives after that."""
    ended = asyncio.ensure_future(asyncio.wait({task}))
    try:
        await shared(ended)
    finally:
        await outlast(ended)


class CandidateThread(_Candidate):
    """A candidate that runs on a thread and reports by callbacks, which are called on that thread.
    Made by `BlockingSession.candidate`."""

    def __init__(
        self,
        callbacks: Callbacks,
        core: SessionCore,
        campaigns: Callable[[Callable[[float], object]], Iterator[RepeatedBlockingCampaign]],
    ) -> None:
        callbacks.refuse_coroutines()
        self._callbacks = callbacks
        self._core = core
        self._runtime = core.thread
        self._campaigns = campaigns
        self._closing = threading.Event()
        self._campaign: RepeatedBlockingCampaign | None = None
        self._over = threading.Event()
        self._leaders: deque[Leader] = deque(maxlen=UNREPORTED)
        self._seen = threading.Event()
        self._threads: list[threading.Thread] = []
        self._error: Exception | None = None
        self._raised = False

    @property
    def failure(self) -> Exception | None:
        """What has ended this candidate, such as an unusable store. `close` raises it."""
        return self._error

    def open(self) -> CandidateThread:
        """Begin to campaign, in the background. Pair it with `close`."""
        if self._threads or self._closing.is_set():
            raise SessionClosed("a candidate is opened once; make another")
        self._core.check_open()
        work: list[Callable[[], None]] = [self._run]
        if self._callbacks.on_new_leader is not None:
            work.append(self._follow)
        for each in work:
            target = partial(self._guarded, each)
            name = f"candidate-{self._callbacks.election}"
            self._threads.append(threading.Thread(target=target, name=name, daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Leave the election; a leader calls `on_lost` and resigns. Returns when that is done.

        Raises what ended the candidate before, if something did, such as an unusable store.
        """
        if self._runtime.pid != os.getpid():
            return
        self._closing.set()
        self._over.set()
        self._seen.set()
        if self._campaign is not None:
            self._campaign.give_up()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        if self._error is not None and not self._raised:
            self._raised = True
            raise self._error

    def __enter__(self) -> CandidateThread:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except SessionClosed:
            pass
        except Exception as error:  # noqa: BLE001 - raised by `close`
            self._error = error
            self._callbacks.candidate_failed(error)

    def _run(self) -> None:
        for campaign in self._campaigns(self._closing.wait):
            self._campaign = campaign
            if self._closing.is_set():
                campaign.give_up()
            try:
                with campaign as term:
                    self._lead(term)
            except NotElected:
                if not self._closing.is_set():
                    raise
            if self._closing.is_set():
                return

    def _lead(self, term: Term) -> None:
        self._term = term
        self._over.clear()
        term.on_end(self._over.set)
        try:
            if self._call("on_elected", term) and not self._closing.is_set():
                self._over.wait()
        finally:
            self._call("on_lost", term)
            self._term = None

    def _follow(self) -> None:
        core, picked = self._core, NewLeaders()
        election = self._callbacks.election

        def seen(change: Leader | Unreachable[Leader] | None) -> None:
            if (leader := picked.pick(change)) is not None:
                self._leaders.append(leader)
                self._seen.set()

        following = self._runtime.submit(
            core.run(lambda: observe_leader(core, election, "elections", seen)),
            on_done=self._seen.set,
        )
        try:
            while not (self._closing.is_set() or following.done):
                self._seen.wait()
                self._seen.clear()
                while self._leaders and not self._closing.is_set():
                    self._call("on_new_leader", self._leaders.popleft())
            if not self._closing.is_set():
                following.result()  # raises what ended it
        finally:
            following.cancel()

    def _call(self, name: str, about: Term | Leader) -> bool:
        """Call a callback, if there is one. False if it failed."""
        callback = getattr(self._callbacks, name)
        try:
            if callback is not None:
                callback(about)
        except Exception:  # noqa: BLE001 - logged
            self._callbacks.failed(name)
            return False
        return True
