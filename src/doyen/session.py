"""The asynchronous API: a session, its campaigns, and leadership as a cancel scope.

Thin: everything that talks to the store runs on doyen's loop (`presence`, `election`); here it is
bridged to the caller's loop, and loss is turned into cancellation of the body, the way
`asyncio.timeout` does it: the user's own cancellation is never eaten, and a body that swallows
ours still ends in `LeadershipLost`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextvars import ContextVar
from types import TracebackType
from typing import Any, TypeVar, Unpack

from doyen.election.candidate import Candidacy
from doyen.election.handover import order_resign, order_transfer
from doyen.election.options import CampaignOptions, CampaignSettings, default_name
from doyen.election.presence import Presence, SessionSettings
from doyen.errors import AlreadyCampaigning, LeadershipLost, SessionClosed, StaleToken
from doyen.events import Sink
from doyen.lease.runtime import Runtime, ThreadRuntime
from doyen.model import Candidate, Kind, Leader, Line
from doyen.stores.port import Store
from doyen.term import Term, TermState
from doyen.term import forked as term_forked

__all__ = ["Campaign", "Session", "connect"]

T = TypeVar("T")
OBSERVED = 64
"""How many changes wait for an observer. One that is slower misses the oldest."""


def candidacy(presence: Presence, stand: CampaignSettings) -> Candidacy:
    """A candidacy, unless the calling scope would then wait for itself."""
    presence.check_open()
    for term, where, kind in _held.get():
        if (
            where is presence
            and (term.election, kind) == (stand.election, stand.kind)
            and term.state in (TermState.LEADER, TermState.UNSURE)
        ):
            raise AlreadyCampaigning(
                f"{term.name!r} already leads {stand.election!r} in this scope, on this very"
                " session: a second campaign would wait for the first for ever"
            )
    return Candidacy(presence, stand)


_held: ContextVar[tuple[tuple[Term, Presence, Kind], ...]] = ContextVar("doyen_held", default=())
"""Terms entered by the calling scope: what a nested campaign would wait for."""


def hold(term: Term, presence: Presence, kind: Kind) -> None:
    _held.set((*_held.get(), (term, presence, kind)))


def drop(term: Term) -> None:
    _held.set(tuple(held for held in _held.get() if held[0] is not term))


_sessions: weakref.WeakSet[Presence] = weakref.WeakSet()
_fork_hook_installed = False
_kept_after_fork: list[object] = []


def track(presence: Presence) -> None:
    """Have a presence told of forks. The hook is installed with the first session, not on
    import."""
    global _fork_hook_installed
    if not _fork_hook_installed:
        _fork_hook_installed = True
        os.register_at_fork(after_in_child=_after_fork_in_child)
    _sessions.add(presence)


def _after_fork_in_child() -> None:
    ThreadRuntime.forked()
    term_forked()
    presences = list(_sessions)
    _kept_after_fork.extend(presences)
    for presence in presences:
        presence.forked()
    _sessions.clear()


def settings_for(
    url: str,
    *,
    ttl_s: float | None,
    stop_budget_s: float | None,
    drift: float | None,
    audit: str | os.PathLike[str] | None,
    on_event: Sink | None,
) -> SessionSettings:
    return SessionSettings(
        url=url,
        ttl_s=ttl_s,
        stop_budget_s=stop_budget_s,
        drift=drift,
        audit=audit,
        sinks=() if on_event is None else (on_event,),
    )


class Session:
    """A process's presence in a store, for asyncio. Made by `connect`.

    Tests and the lab hand in a runtime and an open store.
    """

    def __init__(
        self, settings: SessionSettings, runtime: Runtime | None = None, store: Store | None = None
    ) -> None:
        self._settings = settings
        self._given_runtime = runtime
        self._given_store = store
        self._presence: Presence | None = None

    async def __aenter__(self) -> Session:
        if self._presence is not None:
            raise SessionClosed("a session is entered once; connect again")
        runtime = self._given_runtime or ThreadRuntime.acquire()
        try:
            self._presence = await runtime.obtain(
                Presence.open(self._settings, runtime, store=self._given_store), Presence.close
            )
        except BaseException:
            runtime.release()
            raise
        track(self._presence)
        return self

    async def __aexit__(self, *_: object) -> None:
        presence = self._opened
        if presence.runtime.pid != os.getpid():
            return
        closing = asyncio.ensure_future(presence.runtime.finish(presence.close()))
        cancelled = None
        while not closing.done():
            try:
                await asyncio.wait({closing})
            except asyncio.CancelledError as error:
                # doyen's thread may stop only when the lease has been given back, which is soon.
                cancelled = error
        presence.runtime.release()
        closing.result()
        if cancelled is not None:
            raise cancelled

    @property
    def _opened(self) -> Presence:
        if self._presence is None:
            raise SessionClosed("the session is not open: enter it with `async with`")
        return self._presence

    def campaign(self, election: str, **options: Unpack[CampaignOptions]) -> Campaign:
        """Stand for `election`; the scope is entered when elected.

            async with session.campaign("billing", name="server1") as term:
                await work(term.token)

        On loss the body is cancelled and `LeadershipLost` raised. Options: `name`, `meta`,
        `wait_s`, `priority`, `preempt`, `cooldown_s`, `recipe`, `stall_after_s`, `on_overrun`;
        each is explained at `doyen.election.options.Options`.
        """
        return Campaign(self._opened, CampaignSettings(election=election, **options))

    async def campaigns(
        self, election: str, **options: Unpack[CampaignOptions]
    ) -> AsyncIterator[RepeatedCampaign]:
        """Campaign again after each loss, until the loop is left. Takes what `campaign` takes.

            async for campaign in session.campaigns("billing", name="server1"):
                async with campaign as term:
                    await work(term.token)

        A loss ends the body and goes round again instead of raising; an error of the body's own
        is raised. `break` and `return` leave the loop, lost or not: look at `term.valid` first.
        """
        while True:
            yield RepeatedCampaign(self._opened, CampaignSettings(election=election, **options))

    def lock(self, lock: str, /, **options: Unpack[CampaignOptions]) -> Campaign:
        """Mutual exclusion without a leader: a scope with a token, as for a campaign.

            async with session.lock("migration") as term:
                await migrate(fencing_token=term.token)

        Locks and elections of one name have nothing to do with each other.
        """
        return Campaign(self._opened, CampaignSettings(election=lock, kind="locks", **options))

    async def resign(self, election: str, *, wait_s: float = 10.0, force: bool = False) -> Leader:
        """Have whoever leads `election` let go, and return who it was, once it has.

        Its body is cancelled and the record goes when the body has ended; `OrderFailed` if that
        took longer than `wait_s`. `force` removes the record of a holder that may still be at
        work: from then on only tokens protect what it writes.
        """
        return await self._errand(
            lambda presence: order_resign(
                presence, election, by=default_name(), wait_s=wait_s, force=force
            )
        )

    async def transfer(self, election: str, *, to: str, wait_s: float = 10.0) -> Leader:
        """Have the leader hand over to the candidate named `to`, and return it once it leads.

            await session.transfer("billing", to="server2")

        The heir is ready before the leader lets go. `OrderFailed` if `to` is not exactly one
        candidate in line, or leadership did not pass to it within `wait_s`.
        """
        return await self._errand(
            lambda presence: order_transfer(
                presence, election, to=to, by=default_name(), wait_s=wait_s
            )
        )

    async def line(self, election: str) -> list[Candidate]:
        """Everyone who stands in line, in order, the leader marked."""
        return [*(await self._errand(lambda presence: presence.line(election))).candidates]

    async def _errand(self, work: Callable[[Presence], Coroutine[Any, Any, T]]) -> T:
        presence = self._opened
        presence.check_open()
        return await presence.runtime.do(presence.errand(lambda: work(presence)))

    async def leader(self, election: str) -> Leader | None:
        """Who leads now, by a read of the store; None while vacant."""
        return await self._errand(lambda presence: presence.leader(election))

    def observe(self, election: str) -> AsyncGenerator[Leader | None, None]:
        """Who leads now, then every change; None while vacant. An observer that is more than 64
        changes behind misses the oldest.

        async for leader in session.observe("billing"):
            print(leader.name if leader else "nobody")
        """
        return self._follow(lambda presence, deliver: presence.observe(election, deliver))

    def observe_line(self, election: str) -> AsyncGenerator[Line, None]:
        """Who leads and who stands in line now, then every change.

        async for line in session.observe_line("billing"):
            print([candidate.name for candidate in line.candidates])
        """
        return self._follow(lambda presence, deliver: presence.observe_line(election, deliver))

    async def _follow(
        self, observe: Callable[[Presence, Callable[[T], None]], Coroutine[Any, Any, None]]
    ) -> AsyncGenerator[T, None]:
        presence = self._opened
        presence.check_open()
        loop = asyncio.get_running_loop()
        seen: deque[T] = deque(maxlen=OBSERVED)
        changed = asyncio.Event()

        def deliver(what: T) -> None:
            # A loop that is stuck is woken once, not once for each change that it misses.
            seen.append(what)
            if len(seen) == 1:
                with contextlib.suppress(RuntimeError):  # the observer's loop has been closed
                    loop.call_soon_threadsafe(changed.set)

        watching = asyncio.ensure_future(
            presence.runtime.do(presence.errand(lambda: observe(presence, deliver))),
        )
        try:
            while True:
                while seen:
                    yield seen.popleft()
                waking = asyncio.ensure_future(changed.wait())
                try:
                    await asyncio.wait({waking, watching}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    waking.cancel()
                changed.clear()
                if not seen and watching.done():
                    watching.result()
                    raise SessionClosed("the session is closed; connect again")
        finally:
            watching.cancel()


class _Scope:
    """Leadership as a cancel scope."""

    __slots__ = (
        "_armed",
        "_cancelled",
        "_cancelling_before",
        "_candidacy",
        "_entered",
        "_loop",
        "_presence",
        "_stand",
        "_task",
        "_term",
    )

    def __init__(self, presence: Presence, stand: CampaignSettings) -> None:
        self._presence = presence
        self._stand = stand
        self._entered = False
        self._armed = False
        self._cancelled = False

    async def __aenter__(self) -> Term:
        if self._entered:
            raise AlreadyCampaigning("a campaign is entered once; make another")
        self._presence.check_open()
        if asyncio.current_task() is None:
            raise RuntimeError(
                "a campaign is entered from a task, which is what a loss cancels; nothing has been"
                " asked of the store. Use asyncio.create_task, or asyncio.run"
            )
        self._entered = True
        runtime = self._presence.runtime
        runtime.retain()
        try:
            term = await self._win()
        except BaseException:
            runtime.release()
            raise
        self._term = term
        self._arm(term)
        hold(term, self._presence, self._stand.kind)
        return term

    async def _win(self) -> Term:
        presence, runtime = self._presence, self._presence.runtime
        while True:
            self._candidacy = standing = candidacy(presence, self._stand)
            try:
                term = await runtime.do(presence.errand(standing.win))
            except BaseException:
                runtime.start(standing.leave())
                raise
            if term.valid:
                return term
            # Won, and lost again before this loop got round to it: stand anew.
            await runtime.finish(standing.leave())

    def _arm(self, term: Term) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._loop = asyncio.get_running_loop()
        self._cancelling_before = task.cancelling()
        self._armed = True
        term.on_end(self._over)

    def _over(self) -> None:
        """Any thread. Never cancels from inside the task itself, which would leave a stray
        CancelledError behind the scope."""
        if self._armed:
            with contextlib.suppress(RuntimeError):  # the body's loop has been closed
                self._loop.call_soon_threadsafe(self._cancel_body)

    def _cancel_body(self) -> None:
        if self._armed and not self._cancelled:
            self._cancelled = True
            self._task.cancel()

    async def _leave(self, error: BaseException | None, *, again: bool) -> bool:
        self._armed = False
        term = self._term
        drop(term)
        if self._presence.runtime.pid != os.getpid():
            raise SessionClosed(
                "this term belongs to the parent process; a forked child connects for itself"
            )
        kept = term.conclude()
        pending = self._task.uncancel() if self._cancelled else self._task.cancelling()
        try:
            await self._presence.runtime.finish(self._candidacy.leave())
        finally:
            self._presence.runtime.release()
        if isinstance(error, asyncio.CancelledError):
            passes = pending > self._cancelling_before
        else:
            passes = not isinstance(error, Exception | None)
        if kept or passes:
            return False
        return settle_loss(term, error, again=again)


class Campaign(_Scope):
    """A scope entered when elected. Made by `Session.campaign`; a loss ends in `LeadershipLost`."""

    __slots__ = ()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave(error, again=False)


class RepeatedCampaign(_Scope):
    """One round of `Session.campaigns`; a loss ends the body and nothing else."""

    __slots__ = ()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return await self._leave(error, again=True)


def settle_loss(term: Term, error: BaseException | None, *, again: bool) -> bool:
    """How a body whose term was lost ends: in `LeadershipLost`, with its own error as context.

    With `again`, a loss is what the caller's loop is for; an error of the body's own is not.
    """
    if again and isinstance(error, asyncio.CancelledError | LeadershipLost | StaleToken | None):
        return True
    if again or isinstance(error, LeadershipLost):
        return False
    raise term.loss()


def connect(
    url: str,
    *,
    ttl_s: float | None = None,
    stop_budget_s: float | None = None,
    drift: float | None = None,
    audit: str | os.PathLike[str] | None = None,
    on_event: Sink | None = None,
) -> Session:
    """A session on the store that `url` names, for asyncio.

        async with doyen.connect("sqlite:///var/lib/app/doyen.db", ttl_s=5) as session:
            async with session.campaign("billing") as term:
                ...

    `ttl_s`: how long the store waits for a silent leader. `stop_budget_s`: how long a body has to
    end after a loss (default ttl / 6). `drift`: by how much clocks may differ in speed (default
    0.5 %). `audit`: a file for the audit log. `on_event`: called with every `events.Record`,
    in order, on a thread of its own.
    """
    return Session(
        settings_for(
            url,
            ttl_s=ttl_s,
            stop_budget_s=stop_budget_s,
            drift=drift,
            audit=audit,
            on_event=on_event,
        )
    )
