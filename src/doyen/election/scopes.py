"""Leadership and locks as scopes, for asyncio and for threads.

A campaign is entered when it is elected. With asyncio, a loss cancels the body in the way of
`asyncio.timeout`: a cancellation by the user is never swallowed, and a body that swallows ours
still ends in `LeadershipLost`. A thread cannot be interrupted, so its body has to look at
`term.valid`.

A lock is the same, and may also be acquired and released by calls. Then there is no scope to
cancel, and `release` raises `LeadershipLost` if the lock was lost meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Generic, TypeVar, overload

from doyen.election.candidate import Candidacy, Claiming, entered_campaigns
from doyen.election.core import SessionCore
from doyen.election.options import CampaignSettings
from doyen.election.queries import read_leader
from doyen.errors import (
    AlreadyCampaigning,
    LeadershipLost,
    NotElected,
    SessionClosed,
    StaleToken,
)
from doyen.events.log_lines import log_line
from doyen.lease.lifetime import body_begins, body_ended
from doyen.lease.runtime import Outcome
from doyen.model import Leader
from doyen.term import Term, TermState

__all__ = [
    "BlockingCampaign",
    "BlockingLock",
    "Campaign",
    "Lock",
    "RepeatedBlockingCampaign",
    "RepeatedCampaign",
    "Rounds",
]

C = TypeVar("C", "Campaign", "BlockingCampaign")
log = logging.getLogger("doyen")

AT_ONCE_S = 0.1
"""A body that ends sooner than this ends at once."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 5.0
"""The pause after a body that ended at once. It doubles each time."""


def enter_term(candidacy: Candidacy) -> None:
    # A lock may have been released by another task, which does not have this context.
    held = (each for each in entered_campaigns.get() if each.term.valid)
    entered_campaigns.set((*held, candidacy))
    body_begins(candidacy)


def candidacy_of(core: SessionCore, settings: CampaignSettings) -> Candidacy:
    """The candidacy for an election, a lock, or a slot of a semaphore."""
    if settings.kind != "semaphores":
        return Candidacy(core, settings, Claiming)
    from doyen.manage.semaphore import SlotClaiming  # only semaphores need it

    return Candidacy(core, settings, SlotClaiming)


def exit_term(candidacy: Candidacy) -> bool:
    """End a term whose body has ended. True if it was valid at that instant."""
    _forget_body(candidacy)
    return candidacy.term._conclude()


def left_in_child(candidacy: Candidacy, error: BaseException | None) -> bool:
    """Whether the body has ended in the child of a fork, where its end has no effect on the term.
    Raises `SessionClosed`, unless the body is left by an exception such as `SystemExit`."""
    if candidacy.core.runtime.pid == os.getpid():
        return False
    _forget_body(candidacy)
    if isinstance(error, Exception | None):
        raise SessionClosed(
            "this term belongs to the parent process; connect again in the child of a fork"
        )
    return True


def _forget_body(candidacy: Candidacy) -> None:
    body_ended(candidacy)
    entered_campaigns.set(tuple(each for each in entered_campaigns.get() if each is not candidacy))


def settle_loss(term: Term, error: BaseException | None, *, repeats: bool) -> bool:
    """End a body whose term was lost: in `LeadershipLost`, with its own error as context.

    With `repeats`, the caller campaigns again after a loss, so only errors of the body are raised.
    """
    if repeats and isinstance(error, asyncio.CancelledError | LeadershipLost | StaleToken | None):
        return True
    if repeats or isinstance(error, LeadershipLost):
        return False
    raise term.loss()


class _CampaignScope:
    """What a campaign keeps, with asyncio and on threads."""

    __slots__ = ("_candidacy", "_core", "_settings", "began_at", "entered", "term")
    _candidacy: Candidacy

    def __init__(self, core: SessionCore, settings: CampaignSettings) -> None:
        self._core = core
        self._settings = settings
        self.entered = False
        """Whether the scope was entered, or tried to be."""
        self.term: Term | None = None
        """The term, once elected."""
        self.began_at = 0.0
        """When the body began, on the boot-time clock."""

    def _candidate(self) -> Candidacy:
        """The candidate that is to enter the scope."""
        if self.entered:
            raise AlreadyCampaigning("a campaign is entered once; make another")
        return candidacy_of(self._core, self._settings)

    def _begin(self, term: Term) -> Term:
        """The body begins."""
        enter_term(self._candidacy)
        self.began_at = self._core.runtime.clock.now()
        return term


class Campaign(_CampaignScope):
    """Leadership as a cancel scope, entered when elected. Made by `Session.campaign`; a loss ends
    in `LeadershipLost`."""

    __slots__ = ("_armed", "_cancelled", "_cancelling_before", "_loop", "_task")

    def __init__(self, core: SessionCore, settings: CampaignSettings) -> None:
        super().__init__(core, settings)
        self._task: asyncio.Task[object] | None = None
        self._armed = False
        self._cancelled = False

    async def __aenter__(self) -> Term:
        return await self.enter(cancels=True)

    async def enter(self, *, cancels: bool) -> Term:
        """Wait until elected. `cancels`: whether a loss cancels the calling task."""
        core, runtime, candidacy = self._core, self._core.runtime, self._candidate()

        async def leave(term: Term) -> None:
            await self._candidacy.leave()

        if asyncio.current_task() is None:
            raise RuntimeError(
                "a campaign is entered from a task, which is what a loss cancels; nothing was"
                " sent to the store. Use asyncio.create_task, or asyncio.run"
            )
        self.entered = True
        runtime.retain()
        try:
            while True:
                self._candidacy = candidacy
                try:
                    term = await runtime.do(core.run(candidacy.win), leave)
                except BaseException:
                    runtime.start(candidacy.leave())
                    raise
                if term.valid:
                    break
                # The term was won, and lost before this loop could enter it: campaign again.
                await runtime.finish(candidacy.leave())
                candidacy = candidacy_of(core, self._settings)
        except BaseException:
            runtime.release()
            raise
        self.term = term
        if cancels:
            self._arm(term)
        return self._begin(term)

    def _arm(self, term: Term) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._cancelling_before = task.cancelling()
        self._armed = True
        term.on_end(self._over)

    def _over(self) -> None:
        """The term is over. Any thread. Never cancels from inside the task itself: that would
        leave a CancelledError pending after the scope."""
        if self._armed:
            with contextlib.suppress(RuntimeError):  # the body's loop has been closed
                self._loop.call_soon_threadsafe(self._cancel_body)

    def _cancel_body(self) -> None:
        if self._armed and not self._cancelled and self._task is not None:
            self._cancelled = True
            self._task.cancel()

    async def leave(self, error: BaseException | None = None, *, repeats: bool = False) -> bool:
        """The body has ended, with this error if there is one."""
        assert self.term is not None
        self._armed = False
        if left_in_child(self._candidacy, error):
            return False
        kept = exit_term(self._candidacy)
        passes = not isinstance(error, Exception | None)
        if self._task is not None:
            pending = self._task.uncancel() if self._cancelled else self._task.cancelling()
            if isinstance(error, asyncio.CancelledError):
                passes = pending > self._cancelling_before
        try:
            await self._core.runtime.finish(self._candidacy.leave())
        finally:
            self._core.runtime.release()
        if kept or passes:
            return False
        return settle_loss(self.term, error, repeats=repeats)

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.leave(error)


class RepeatedCampaign(Campaign):
    """One round of `Session.campaigns`; a loss ends the body and nothing else."""

    async def __aexit__(  # type: ignore[override]  # only this one may suppress an exception
        self, kind: object, error: BaseException | None, trace: object
    ) -> bool:
        return await self.leave(error, repeats=True)


class _HeldLock(Generic[C]):
    """What both kinds of locks keep: the campaigns that were entered through this object, each with
    the task or thread that entered it."""

    def __init__(
        self, core: SessionCore, settings: CampaignSettings, holder: Callable[[], object]
    ) -> None:
        """`holder` returns the task or thread that runs now."""
        self._core = core
        self._settings = settings
        self._holder = holder
        self._scopes: list[tuple[object, C]] = []
        self._acquired: list[tuple[object, C]] = []

    @property
    def term(self) -> Term | None:
        """The term of the holder, if the lock was acquired through this object."""
        held = [*self._acquired, *self._scopes]
        return held[-1][1].term if held else None

    def _waiting(self, wait_s: float | None) -> CampaignSettings:
        return self._settings if wait_s is None else self._settings.__replace__(wait_s=wait_s)

    def _keep(self, entered: list[tuple[object, C]], campaign: C) -> None:
        entered.append((self._holder(), campaign))

    def _take(self, entered: list[tuple[object, C]], *, newest: bool = False) -> C:
        """Remove and return the campaign that this holder entered; if it entered none, that of
        another holder, the first or the newest. A holder that lost the lock may still be at work
        when the next one has it, and the release by each has to report its own loss. A scope may be
        left by another task or thread than the one that entered it, as scopes of test fixtures
        are."""
        holder = self._holder()
        while held := entered[::-1] if newest else entered[:]:
            mine = next((each for each in held if each[0] is holder), held[0])
            try:
                entered.remove(mine)
            except ValueError:
                continue  # another thread has taken it
            return mine[1]
        raise RuntimeError("the lock is not held: acquire comes before release")

    def _reading(self) -> Coroutine[Any, Any, Leader | None]:
        core, settings = self._core, self._settings
        core.check_open()
        return core.run(lambda: read_leader(core, settings.election, settings.kind))


class Lock(_HeldLock[Campaign]):
    """A lock, as a scope or by calls. Made by `Session.lock`. Tasks may share it.

    lock = session.lock("migration")
    if await lock.acquire(wait_s=5):
        try:
            await migrate()
        finally:
            await lock.release()
    """

    def __init__(self, core: SessionCore, settings: CampaignSettings) -> None:
        super().__init__(core, settings, asyncio.current_task)

    async def __aenter__(self) -> Term:
        campaign = Campaign(self._core, self._settings)
        term = await campaign.__aenter__()
        self._keep(self._scopes, campaign)
        return term

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        scope = self._take(self._scopes, newest=True)
        await scope.__aexit__(kind, error, trace)

    @overload
    async def acquire(self) -> Term: ...

    @overload
    async def acquire(self, *, wait_s: float | None) -> Term | None: ...

    async def acquire(self, *, wait_s: float | None = None) -> Term | None:
        """Wait for the lock, and return its term; None if `wait_s` has passed first. Pair it with
        `release`.

        A loss cancels nothing, because there is no scope: look at `term.valid`, or wait for
        `term.lost()`.
        """
        campaign = Campaign(self._core, self._waiting(wait_s))
        try:
            term = await campaign.enter(cancels=False)
        except AlreadyCampaigning:
            raise
        except NotElected:
            if wait_s is None:
                raise
            return None
        self._keep(self._acquired, campaign)
        return term

    async def release(self) -> None:
        """Release the lock. Raises `LeadershipLost` if it was lost since it was acquired."""
        await self._take(self._acquired).leave()

    async def locked(self) -> bool:
        """Whether the lock is held, read from the store."""
        return await self._core.runtime.do(self._reading()) is not None


class BlockingCampaign(_CampaignScope):
    """A scope entered when elected. Made by `BlockingSession.campaign`; leaving it raises
    `LeadershipLost` if the term was lost."""

    def __init__(self, core: SessionCore, settings: CampaignSettings) -> None:
        super().__init__(core, settings)
        self._given_up = False
        self._waiting: Outcome[Term] | None = None

    def __enter__(self) -> Term:
        runtime, candidacy = self._core.thread, self._candidate()
        self.entered = True
        runtime.retain()
        try:
            while True:
                self._candidacy = candidacy
                try:
                    term = self._win(candidacy)
                except BaseException:
                    runtime.start(candidacy.leave())
                    raise
                if term.valid:
                    break
                runtime.finish_blocking(candidacy.leave())
                candidacy = candidacy_of(self._core, self._settings)
        except BaseException:
            runtime.release()
            raise
        self.term = term
        return self._begin(term)

    def _win(self, candidacy: Candidacy) -> Term:
        waiting = self._waiting = self._core.thread.submit(self._core.run(candidacy.win))
        if self._given_up:
            waiting.cancel()
        try:
            return waiting.result()
        except BaseException as error:
            waiting.cancel()
            if self._given_up and isinstance(error, CancelledError):
                raise NotElected(f"the campaign for {self._settings.election!r} ended") from None
            raise

    def give_up(self) -> None:
        """End the wait for election, which raises `NotElected`. Any thread."""
        self._given_up = True
        if self._waiting is not None:
            self._waiting.cancel()

    def leave(self, error: BaseException | None = None, *, repeats: bool = False) -> bool:
        """The body has ended, with this error if there is one."""
        assert self.term is not None
        if left_in_child(self._candidacy, error):
            return False
        kept = exit_term(self._candidacy)
        try:
            self._core.thread.finish_blocking(self._candidacy.leave())
        finally:
            self._core.thread.release()
        if kept or not isinstance(error, Exception | None):
            return False
        return settle_loss(self.term, error, repeats=repeats)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.leave(error)


class RepeatedBlockingCampaign(BlockingCampaign):
    """One round of `BlockingSession.campaigns`; a loss ends the body and nothing else."""

    def __exit__(  # type: ignore[override]  # only this one may suppress an exception
        self, kind: object, error: BaseException | None, trace: object
    ) -> bool:
        return self.leave(error, repeats=True)


class BlockingLock(_HeldLock[BlockingCampaign]):
    """A lock, as a scope or by calls. Made by `BlockingSession.lock`. Threads may share it.

    lock = session.lock("migration")
    if lock.acquire(wait_s=5):
        try:
            migrate()
        finally:
            lock.release()
    """

    def __init__(self, core: SessionCore, settings: CampaignSettings) -> None:
        super().__init__(core, settings, threading.current_thread)

    def __enter__(self) -> Term:
        campaign = BlockingCampaign(self._core, self._settings)
        term = campaign.__enter__()
        self._keep(self._scopes, campaign)
        return term

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        scope = self._take(self._scopes, newest=True)
        scope.__exit__(kind, error, trace)

    @overload
    def acquire(self) -> Term: ...

    @overload
    def acquire(self, *, wait_s: float | None) -> Term | None: ...

    def acquire(self, *, wait_s: float | None = None) -> Term | None:
        """Wait for the lock, and return its term; None if `wait_s` has passed first. Pair it with
        `release`."""
        campaign = BlockingCampaign(self._core, self._waiting(wait_s))
        try:
            term = campaign.__enter__()
        except AlreadyCampaigning:
            raise
        except NotElected:
            if wait_s is None:
                raise
            return None
        self._keep(self._acquired, campaign)
        return term

    def release(self) -> None:
        """Release the lock. Raises `LeadershipLost` if it was lost since it was acquired."""
        self._take(self._acquired).leave()

    def locked(self) -> bool:
        """Whether the lock is held, read from the store."""
        return self._core.thread.do_blocking(self._reading()) is not None


class Rounds:
    """What lies between the rounds of `campaigns`.

    A round that was never entered would make the loop spin, so it is an error. A body that ends at
    once, with its term still valid, is followed by a pause, which grows as long as that goes on:
    otherwise leadership would change hands as fast as the store can write.
    """

    def __init__(self, election: str) -> None:
        self._election = election
        self._in_a_row = 0

    def pause_s(self, campaign: Campaign | BlockingCampaign) -> float:
        """How long to wait after this round."""
        if not campaign.entered:
            raise RuntimeError(
                f"the campaign for {self._election!r} was never entered, so this loop would spin:"
                " enter it with `with campaign as term:` (asyncio: `async with`)"
            )
        term = campaign.term
        if term is None or term.state is not TermState.ENDED:
            return 0.0
        lasted_s = term.ended_at - campaign.began_at
        if lasted_s >= AT_ONCE_S:
            self._in_a_row = 0
            return 0.0
        pause_s = min(FIRST_PAUSE_S * 2.0**self._in_a_row, LONGEST_PAUSE_S)
        if not self._in_a_row:
            line = log_line(
                event="body_ended_at_once",
                election=self._election,
                after_s=round(lasted_s, 3),
                effect="the next campaigns begin after pauses",
                remedy="work while term.valid, or leave the loop",
            )
            log.warning("%s", line)
        self._in_a_row = min(self._in_a_row + 1, 30)
        return pause_s
