"""The same API for ordinary code, and `while_leader` for both.

Nothing can interrupt a thread that is busy, so here loss is something to ask for: `term.valid`
costs nothing and turns false at the deadline by itself. Leaving the scope raises `LeadershipLost`
if leadership was lost on the way, so that no result of a lost term passes unnoticed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import queue
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from types import FunctionType, TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, cast

from doyen.election.handover import order_resign, order_transfer
from doyen.election.options import CampaignOptions, CampaignSettings, default_name
from doyen.election.presence import Presence, SessionSettings
from doyen.errors import AlreadyCampaigning, ConfigError, SessionClosed
from doyen.events import Sink
from doyen.lease.runtime import ThreadRuntime
from doyen.model import Candidate, Leader, Line
from doyen.session import OBSERVED, candidacy, connect, drop, hold, settings_for, settle_loss, track
from doyen.term import Term, TermState

__all__ = ["BlockingCampaign", "BlockingSession", "connect_blocking", "while_leader"]

P = ParamSpec("P")
T = TypeVar("T")


class BlockingSession:
    """A process's presence in a store, for ordinary code. Made by `connect_blocking`.

    May be shared by threads.
    """

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings
        self._presence: Presence | None = None

    def __enter__(self) -> BlockingSession:
        if self._presence is not None:
            raise SessionClosed("a session is entered once; connect again")
        self._runtime = ThreadRuntime.acquire()
        try:
            self._presence = self._runtime.obtain_blocking(
                Presence.open(self._settings, self._runtime), Presence.close
            )
        except BaseException:
            self._runtime.release()
            raise
        track(self._presence)
        return self

    def __exit__(self, *_: object) -> None:
        presence = self._opened
        if self._runtime.pid != os.getpid():
            return
        try:
            self._runtime.finish_blocking(presence.close())
        finally:
            self._runtime.release()

    @property
    def _opened(self) -> Presence:
        if self._presence is None:
            raise SessionClosed("the session is not open: enter it with `with`")
        return self._presence

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runtime.do_blocking(work)

    def campaign(self, election: str, **options: Unpack[CampaignOptions]) -> BlockingCampaign:
        """Stand for `election`; the scope is entered when elected. Options as for
        `Session.campaign`.

            with session.campaign("billing", name="server1") as term:
                while term.valid:
                    work(term.token)
        """
        return BlockingCampaign(
            self._opened, self._runtime, CampaignSettings(election=election, **options)
        )

    def campaigns(
        self, election: str, **options: Unpack[CampaignOptions]
    ) -> Iterator[RepeatedBlockingCampaign]:
        """Campaign again after each loss, until the loop is left."""
        while True:
            stand = CampaignSettings(election=election, **options)
            yield RepeatedBlockingCampaign(self._opened, self._runtime, stand)

    def lock(self, lock: str, /, **options: Unpack[CampaignOptions]) -> BlockingCampaign:
        """Mutual exclusion without a leader: a scope with a token, as for a campaign."""
        stand = CampaignSettings(election=lock, kind="locks", **options)
        return BlockingCampaign(self._opened, self._runtime, stand)

    def leader(self, election: str) -> Leader | None:
        """Who leads now, by a read of the store; None while vacant."""
        return self._errand(lambda presence: presence.leader(election))

    def line(self, election: str) -> list[Candidate]:
        """Everyone who stands in line, in order, the leader marked."""
        return [*self._errand(lambda presence: presence.line(election)).candidates]

    def resign(self, election: str, *, wait_s: float = 10.0, force: bool = False) -> Leader:
        """Have whoever leads let go; see `Session.resign`."""
        return self._errand(
            lambda presence: order_resign(
                presence, election, by=default_name(), wait_s=wait_s, force=force
            )
        )

    def transfer(self, election: str, *, to: str, wait_s: float = 10.0) -> Leader:
        """Have the leader hand over to the candidate named `to`; see `Session.transfer`."""
        return self._errand(
            lambda presence: order_transfer(
                presence, election, to=to, by=default_name(), wait_s=wait_s
            )
        )

    def _errand(self, work: Callable[[Presence], Coroutine[Any, Any, T]]) -> T:
        presence = self._opened
        presence.check_open()
        return self._do(presence.errand(lambda: work(presence)))

    def observe(self, election: str) -> Generator[Leader | None, None, None]:
        """Who leads now, then every change; None while vacant."""
        return self._follow(lambda presence, deliver: presence.observe(election, deliver))

    def observe_line(self, election: str) -> Generator[Line, None, None]:
        """Who leads and who stands in line now, then every change."""
        return self._follow(lambda presence, deliver: presence.observe_line(election, deliver))

    def _follow(
        self, observe: Callable[[Presence, Callable[[T], None]], Coroutine[Any, Any, None]]
    ) -> Generator[T, None, None]:
        presence = self._opened
        presence.check_open()
        seen: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

        def deliver(what: T) -> None:
            if seen.qsize() >= OBSERVED:
                with contextlib.suppress(queue.Empty):
                    seen.get_nowait()
            seen.put(what)

        async def watch() -> None:
            try:
                await presence.errand(lambda: observe(presence, deliver))
            except BaseException as error:
                seen.put(error)
                raise

        watching = self._runtime.submit(watch())
        try:
            while True:
                what = seen.get()
                if isinstance(what, Exception):
                    raise what
                if isinstance(what, BaseException):
                    raise SessionClosed("the session is closed; connect again")
                yield what
        finally:
            watching.cancel()


class _Scope:
    """Leadership as a scope."""

    def __init__(self, presence: Presence, runtime: ThreadRuntime, stand: CampaignSettings) -> None:
        self._presence = presence
        self._runtime = runtime
        self._stand = stand
        self._entered = False

    def __enter__(self) -> Term:
        if self._entered:
            raise AlreadyCampaigning("a campaign is entered once; make another")
        self._presence.check_open()
        self._entered = True
        self._runtime.retain()
        try:
            term = self._win()
        except BaseException:
            self._runtime.release()
            raise
        self._term = term
        hold(term, self._presence, self._stand.kind)
        return term

    def _win(self) -> Term:
        presence, runtime = self._presence, self._runtime
        while True:
            self._candidacy = standing = candidacy(presence, self._stand)
            try:
                term = runtime.do_blocking(presence.errand(standing.win))
            except BaseException:
                runtime.start(standing.leave())
                raise
            if term.valid:
                return term
            runtime.finish_blocking(standing.leave())

    def _leave(self, error: BaseException | None, *, again: bool) -> bool:
        term = self._term
        drop(term)
        if self._runtime.pid != os.getpid():
            raise SessionClosed(
                "this term belongs to the parent process; a forked child connects for itself"
            )
        kept = term.conclude()
        try:
            self._runtime.finish_blocking(self._candidacy.leave())
        finally:
            self._runtime.release()
        if kept or not isinstance(error, Exception | None):
            return False
        return settle_loss(term, error, again=again)


class BlockingCampaign(_Scope):
    """A scope entered when elected. Made by `BlockingSession.campaign`; leaving it raises
    `LeadershipLost` if the term was lost."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._leave(error, again=False)


class RepeatedBlockingCampaign(_Scope):
    """One round of `BlockingSession.campaigns`; a loss ends the body and nothing else."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        return self._leave(error, again=True)


def connect_blocking(
    url: str,
    *,
    ttl_s: float | None = None,
    stop_budget_s: float | None = None,
    drift: float | None = None,
    audit: str | os.PathLike[str] | None = None,
    on_event: Sink | None = None,
) -> BlockingSession:
    """A session on the store that `url` names, for ordinary code. Options as for `connect`.

    with doyen.connect_blocking("sqlite:///var/lib/app/doyen.db") as session:
        with session.campaign("billing", name="server1") as term:
            while term.valid:
                work(term.token)
    """
    return BlockingSession(
        settings_for(
            url,
            ttl_s=ttl_s,
            stop_budget_s=stop_budget_s,
            drift=drift,
            audit=audit,
            on_event=on_event,
        )
    )


def while_leader(
    election: str, *, store: str, ttl_s: float | None = None, **options: Unpack[CampaignOptions]
) -> Callable[[Callable[Concatenate[Term, P], T]], Callable[P, T]]:
    """Run a function, ordinary or async, only as leader; again after each loss.

        @doyen.while_leader("billing", store="sqlite:///var/lib/app/doyen.db")
        def main(term):
            while term.valid:
                work(term.token)

        main()

    The function's first argument is its term, so a method is wrapped once it is bound; a generator,
    whose body would run when the term is over, is refused. Calling it waits for election. If the
    term is lost
    the function is run again in the next one; once it returns with its term still valid, the
    leader resigns and the result is returned. An error of its own is raised. Further options are
    those of `campaign`.
    """

    def decorate(function: Callable[Concatenate[Term, P], T]) -> Callable[P, T]:
        _refuse_unfit(function)
        if inspect.iscoroutinefunction(function):
            run_async = _async_while_leader(function, election, store, ttl_s, options)
            return cast("Callable[P, T]", run_async)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with connect_blocking(store, ttl_s=ttl_s) as session:
                for campaign in session.campaigns(election, **options):
                    result: T | None = None
                    with campaign as term:
                        result = function(term, *args, **kwargs)
                        _refuse_unfinished(result)
                    if term.state is TermState.ENDED:
                        return cast("T", result)
                raise AssertionError("campaigns never end")

        return run

    return decorate


def _refuse_unfit(function: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"while_leader cannot run {function.__name__!r}, a generator: its body would run when"
            " the term is over; use session.campaign inside it"
        )
    if isinstance(function, FunctionType) and function.__code__.co_varnames[:1] in (
        ("self",),
        ("cls",),
    ):
        raise ConfigError(
            f"while_leader hands the term to the first argument, which of {function.__name__!r} is"
            f" {function.__code__.co_varnames[0]!r}: wrap the bound method instead,"
            f" while_leader(…)(self.{function.__name__})"
        )


def _refuse_unfinished(result: object) -> None:
    if isinstance(result, Coroutine | Generator | AsyncGenerator):
        if isinstance(result, Coroutine):
            result.close()
        raise ConfigError(
            f"what while_leader ran returned a {type(result).__name__} whose work would be done"
            " when the term is over: decorate the `async def` itself"
        )


def _async_while_leader(
    function: Callable[..., Awaitable[T]],
    election: str,
    store: str,
    ttl_s: float | None,
    options: CampaignOptions,
) -> Callable[..., Coroutine[Any, Any, T]]:
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> T:
        async with connect(store, ttl_s=ttl_s) as session:
            async for campaign in session.campaigns(election, **options):
                result: T | None = None
                async with campaign as term:
                    result = await function(term, *args, **kwargs)
                if term.state is TermState.ENDED:
                    return cast("T", result)
            raise AssertionError("campaigns never end")

    return run
