"""The API for code without asyncio, and `while_leader` for both kinds.

A busy thread cannot be interrupted, so its code has to check for a loss: `term.valid` is cheap and
turns false at the deadline by itself. Leaving the scope raises `LeadershipLost` if the term was
lost, so that no result of a lost term goes unnoticed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import queue
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import CancelledError
from types import FunctionType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, Unpack, cast, overload

from doyen import manage
from doyen.election.callbacks import Callbacks, CandidateOptions, CandidateThread
from doyen.election.core import SessionCore
from doyen.election.options import CampaignOptions, CampaignSettings, SessionSettings
from doyen.election.orders import order_resign, order_transfer
from doyen.election.queries import (
    observe_leader,
    observe_line,
    read_history,
    read_leader,
    read_line,
)
from doyen.election.scopes import BlockingCampaign, BlockingLock, RepeatedBlockingCampaign, Rounds
from doyen.errors import ConfigError, SessionClosed, did_you_mean
from doyen.lease.lifetime import track, untrack
from doyen.lease.runtime import CLOSED, Outcome, ThreadRuntime
from doyen.manage.joining import BlockingJoining
from doyen.manage.members import MemberView
from doyen.model import (
    Candidate,
    Kind,
    Leader,
    Line,
    Member,
    MemberChange,
    Meta,
    PastTerm,
    Published,
    Reachable,
    Unreachable,
)
from doyen.session import (
    OBSERVED,
    ConnectOptions,
    Observing,
    SessionOptions,
    _SessionState,
    connect,
    settings_of,
)
from doyen.term import Term, TermState

if TYPE_CHECKING:
    from doyen.manage import (
        BlockingShardSet,
        Inventory,
        InventoryKind,
        MemberOptions,
        OwnedShards,
        OwnerOptions,
        Prepare,
        Registration,
        ShardBody,
        ShardMap,
    )
    from doyen.manage.config_session import BlockingConfig, ConfigOptions

__all__ = ["BlockingCampaign", "BlockingSession", "connect_blocking", "while_leader"]

P = ParamSpec("P")
T = TypeVar("T")


class BlockingSession(_SessionState):
    """A session on a store, for code without asyncio. Made by `connect_blocking`.

    Threads may share it.
    """

    def __init__(self, settings: SessionSettings) -> None:
        super().__init__(settings)
        self._closings: list[Outcome[None]] = []
        """By concurrent calls of `close`. The first one counts, and its caller releases."""

    def open(self) -> BlockingSession:
        """Open the session and return it. For code without a scope; pair it with `close`.

        session = doyen.connect_blocking("sqlite:///var/lib/app/doyen.db").open()
        ...
        session.close()
        """
        if self._core is not None:
            raise SessionClosed("a session is opened once; connect again")
        self._runtime = ThreadRuntime.acquire()
        try:
            self._core = self._runtime.obtain_blocking(
                SessionCore.open(self._settings, self._runtime), SessionCore.close
            )
        except BaseException:
            self._runtime.release()
            raise
        track(self._core, release_at_exit=self._settings.release_at_exit, on_loop=False)
        return self

    def close(self) -> None:
        """End every term and lease of the session. Does nothing if it is closed, or not open."""
        core = self._core
        if core is None or self._runtime.pid != os.getpid():
            return
        if self._closings:
            self._closings[0].result()
            return
        # No lock: the handler of a signal may close the session while this thread is here, and
        # would wait for its own thread. To close the core twice does no harm, and to append to a
        # list is atomic.
        closing = self._runtime.submit(core.close())
        try:
            self._closings.append(closing)
            self._closings[0].result()
        finally:
            if self._closings[:1] == [closing]:
                untrack(core)
                self._runtime.release()

    def __enter__(self) -> BlockingSession:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def campaign(self, election: str, **options: Unpack[CampaignOptions]) -> BlockingCampaign:
        """Campaign for `election`. The scope is entered when elected. Options as for
        `Session.campaign`.

            with session.campaign("billing", name="server1") as term:
                while term.valid:
                    work(term.token)
        """
        return BlockingCampaign(self._opened, CampaignSettings.of(election, options))

    def campaigns(
        self, election: str, **options: Unpack[CampaignOptions]
    ) -> Iterator[RepeatedBlockingCampaign]:
        """Campaign again after each loss, until the loop is left."""
        return self._rounds(election, options, time.sleep)

    def _rounds(
        self, election: str, options: CampaignOptions, pause: Callable[[float], object]
    ) -> Iterator[RepeatedBlockingCampaign]:
        rounds = Rounds(election)
        while True:
            settings = CampaignSettings.of(election, options)
            campaign = RepeatedBlockingCampaign(self._opened, settings)
            yield campaign
            if pause_s := rounds.pause_s(campaign):
                pause(pause_s)

    def candidate(self, election: str, **options: Unpack[CandidateOptions]) -> CandidateThread:
        """Campaign on a thread, again after each loss, and report by callbacks, which are called on
        that thread; see `Session.candidate`.

            candidate = session.candidate("billing", on_elected=start, on_lost=stop).open()
            ...
            candidate.close()
        """
        callbacks, rest = Callbacks.taken_from(election, options)
        campaigns = functools.partial(self._rounds, election, rest)
        return CandidateThread(callbacks, self._opened, campaigns)

    def lock(self, lock: str, /, **options: Unpack[CampaignOptions]) -> BlockingLock:
        """Mutual exclusion without a leader: a scope with a token, as for a campaign."""
        settings = CampaignSettings.of(lock, options, kind="locks")
        return BlockingLock(self._opened, settings)

    def semaphore(
        self, semaphore: str, n: int, /, **options: Unpack[CampaignOptions]
    ) -> BlockingCampaign:
        """At most `n` holders at a time: a scope with a slot and a token; see
        `Session.semaphore`."""
        settings = CampaignSettings.of(semaphore, options, kind="semaphores", slots=n)
        return BlockingCampaign(self._opened, settings)

    def barrier(self, barrier: str, n: int, /, *, wait_s: float | None = None) -> int:
        """Wait until `n` have arrived; see `Session.barrier`."""
        return self._run(manage.arrive, barrier, n, wait_s)

    def leader(self, election: str, *, kind: Kind = "elections") -> Leader | None:
        """The current leader, read from the store; None if there is none. With `kind="locks"`, the
        holder of the lock of that name."""
        return self._run(read_leader, election, kind)

    def line(self, election: str, *, kind: Kind = "elections") -> list[Candidate]:
        """The candidates in line, in order, the leader marked."""
        return [*self._run(read_line, election, kind).candidates]

    def history(self, election: str) -> list[PastTerm]:
        """The last terms of an election, the newest first; see `Session.history`."""
        return self._run(read_history, election)

    def resign(
        self,
        election: str,
        *,
        kind: Kind = "elections",
        wait_s: float = 10.0,
        force: bool = False,
    ) -> Leader:
        """Have the leader resign; see `Session.resign`."""
        return self._run(order_resign, election, kind=kind, wait_s=wait_s, force=force)

    def transfer(
        self, election: str, *, to: str, kind: Kind = "elections", wait_s: float = 10.0
    ) -> Leader:
        """Have the leader transfer to the candidate named `to`; see `Session.transfer`."""
        return self._run(order_transfer, election, kind=kind, to=to, wait_s=wait_s)

    @overload
    def config(self, name: str, **options: Unpack[ConfigOptions]) -> BlockingConfig[Any]: ...

    @overload
    def config(
        self, name: str, *, type: type[T], **options: Unpack[ConfigOptions]
    ) -> BlockingConfig[T]: ...

    def config(
        self,
        name: str,
        *,
        type: Any = None,  # noqa: A002 - the natural name
        **options: Unpack[ConfigOptions],
    ) -> BlockingConfig[Any]:
        """A configuration: a versioned document that is validated when it is written and read.
        Options as for `Session.config`."""
        from doyen.manage.config_session import BlockingConfig  # seldom needed

        return BlockingConfig(self._opened, name, type, **options)

    def _run(
        self,
        work: Callable[Concatenate[SessionCore, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        core = self._opened
        core.check_open()
        return self._runtime.do_blocking(core.run(functools.partial(work, core, *args, **kwargs)))

    def observe(
        self, election: str, *, kind: Kind = "elections"
    ) -> Generator[Leader | Unreachable[Leader] | None, None, None]:
        """The current leader, then every change; None while there is none."""
        return self._observe(lambda core, deliver: observe_leader(core, election, kind, deliver))

    def observe_line(
        self, election: str, *, kind: Kind = "elections"
    ) -> Generator[Line | Unreachable[Line], None, None]:
        """The current leader and line, then every change."""
        return self._observe(lambda core, deliver: observe_line(core, election, kind, deliver))

    def member(
        self, group: str, **options: Unpack[MemberOptions]
    ) -> BlockingJoining[BlockingGroupMember]:
        """Be a member of `group` for the duration of a scope; see `Session.member`. The health
        check is an ordinary function, called on a thread of its own."""
        settings = manage.MemberSettings(group=group, **options)
        if inspect.iscoroutinefunction(settings.health):
            raise ConfigError(
                "a blocking session has no loop for a health check that is a coroutine function:"
                " give it an ordinary function"
            )
        core = self._opened

        def make() -> tuple[Registration, BlockingGroupMember]:
            registration = manage.Registration(core, settings)
            return registration, BlockingGroupMember(registration)

        return BlockingJoining(core, make)

    def members(self, group: str) -> list[Member]:
        """The live members of a group, read from the store, in the order of their names."""
        return [*self._run(manage.read_members, group, times=True).members.values()]

    def observe_members(
        self, group: str, *, suspect: bool = True
    ) -> Generator[MemberChange | Unreachable[tuple[Member, ...]] | Reachable, None, None]:
        """Each live member as `joined`, then every change; see `Session.observe_members`."""
        seen = manage.RosterChanges(self._opened)

        def observing(core: SessionCore, deliver: Callable[[Any], None]) -> Any:
            return manage.observe_members(core, group, deliver, suspect=suspect)

        with contextlib.closing(self._observe(observing, 1)) as rosters:
            for roster in rosters:
                yield from seen.of(roster)

    @contextlib.contextmanager
    def publisher(self, group: str, term: Term, *, settle_s: float | None = None) -> Iterator[None]:
        """As the leader, publish the members of `group` for the duration of a scope; see
        `Session.publisher`."""
        publisher = manage.ListPublisher(self._opened, group, term, settle_s)
        publisher.core.check_open()
        self._runtime.do_blocking(publisher.start())
        try:
            yield
        finally:
            if self._runtime.pid == os.getpid():
                self._runtime.finish_blocking(publisher.stop())

    def published(self, group: str) -> Published | None:
        """The members of a group as its leader published them last; None if no leader has."""
        return self._run(manage.read_published, group)

    def observe_published(
        self, group: str
    ) -> Generator[Published | Unreachable[Published] | None, None, None]:
        """The published list, then every change."""
        return self._observe(lambda core, deliver: manage.observe_published(core, group, deliver))

    def own_shards(
        self,
        shards: str,
        body: ShardBody,
        *,
        prepare: Prepare | None = None,
        **options: Unpack[OwnerOptions],
    ) -> BlockingJoining[OwnedShards]:
        """Own shards of a set for the duration of a scope; see `Session.own_shards`.

        `body` runs on a thread of its own for each shard. It has to end when `term.valid` turns
        false; until then no other member gets the shard, unless its lease ends.
        """
        core, settings = self._opened, manage.OwnerSettings(shards=shards, **options)
        if inspect.iscoroutinefunction(body) or inspect.iscoroutinefunction(prepare):
            raise ConfigError("a blocking session runs ordinary functions, not coroutine functions")
        return BlockingJoining(
            core,
            lambda: manage.own(core, settings, manage.ThreadBodies(self._runtime, body, prepare)),
        )

    def shards(self, shards: str) -> BlockingShardSet:
        """The set of shards of this name: its map, and requests to change it."""
        return manage.BlockingShardSet(self._opened, shards)

    def shard_map(self, shards: str) -> ShardMap:
        """Who owns what in a set of shards, read from the store."""
        return self._run(manage.read_map, shards)

    def observe_shards(
        self, shards: str
    ) -> Generator[ShardMap | Unreachable[ShardMap], None, None]:
        """The map of a set of shards, then every change."""
        return self._observe(lambda core, deliver: manage.observe_map(core, shards, deliver))

    def inventory(self, *kinds: InventoryKind) -> Inventory:
        """Everything that the store has, or what it has of these kinds; see
        `Session.inventory`."""
        return self._run(manage.read_inventory, kinds or manage.INVENTORY_KINDS)

    def observe_inventory(
        self, *kinds: InventoryKind
    ) -> Generator[Inventory | Unreachable[Inventory], None, None]:
        """Everything that the store has, then again after every change; see
        `Session.observe_inventory`."""

        def observing(core: SessionCore, deliver: Callable[[Any], None]) -> Any:
            return manage.observe_inventory(core, deliver, kinds or manage.INVENTORY_KINDS)

        return self._observe(observing, 1)

    def _observe(self, observe: Observing[T], kept: int = OBSERVED) -> Generator[T, None, None]:
        core = self._opened
        core.check_open()
        seen: queue.SimpleQueue[T | BaseException] = queue.SimpleQueue()

        def deliver(change: T) -> None:
            if seen.qsize() >= kept:
                with contextlib.suppress(queue.Empty):
                    seen.get_nowait()
            seen.put(change)

        async def work() -> None:
            try:
                await core.run(lambda: observe(core, deliver))
            except BaseException as error:
                seen.put(error)
                raise

        observing = self._runtime.submit(
            work(),
            lambda: seen.put(CancelledError()),  # it may have been ended before it began
        )
        try:
            while True:
                change = seen.get()
                if isinstance(change, Exception):
                    raise change
                if isinstance(change, BaseException):
                    raise SessionClosed(CLOSED)
                yield change
        finally:
            observing.cancel()


class BlockingGroupMember(MemberView):
    """A member of a group, for the code inside its scope. Made by `BlockingSession.member`."""

    def update(self, meta: Meta) -> None:
        """Replace the meta. Returns once the store has it."""
        self._do(functools.partial(self._registration.update, meta))

    def drain(self) -> None:
        """Announce that this member is about to leave: it does not lead any more."""
        self._do(functools.partial(self._registration.drain, True))

    def resume(self) -> None:
        """Undo `drain`."""
        self._do(functools.partial(self._registration.drain, False))

    def fail(self, reason: str) -> None:
        """Leave the list because this process is broken. The scope stays open; the member does not
        join again."""
        self._do(functools.partial(self._registration.fail, reason))

    def _do(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        core = self._registration.core
        core.thread.do_blocking(core.run(work))


def connect_blocking(url: str | None = None, **options: Unpack[ConnectOptions]) -> BlockingSession:
    """A session on the store that `url` names, for code without asyncio. Everything is as for
    `connect`.

        with doyen.connect_blocking("sqlite:///var/lib/app/doyen.db") as session:
            with session.campaign("billing", name="server1") as term:
                while term.valid:
                    work(term.token)
    """
    return BlockingSession(settings_of(url, options))


class WhileLeaderOptions(SessionOptions, CampaignOptions, total=False):
    """The options of `while_leader`: those of the session and those of its campaigns."""

    connect_wait_s: float
    """How long to wait for a store that cannot be reached at first. Default 0: one try. (`wait_s`
    is how long to wait to be elected.)"""


def while_leader(
    election: str,
    *,
    store: str | Callable[[], str] | None = None,
    **options: Unpack[WhileLeaderOptions],
) -> Callable[[Callable[Concatenate[Term, P], T]], Callable[P, T]]:
    """Run a function, with or without asyncio, only as leader; again after each loss.

        @doyen.while_leader("billing", store="sqlite:///var/lib/app/doyen.db")
        def main(term):
            while term.valid:
                work(term.token)

        main()

    The function's first argument is its term, so wrap a method once it is bound. A generator is
    refused, because its body would run after the term. Calling the function waits for election. If
    the term is lost, the function is run again in the next one; once it returns with its term still
    valid, the leader resigns and the result is returned. An error of its own is raised.

    `store` is a URL, or a function that returns one when the decorated function is called; without
    it, the environment names the store, as for `connect`. Options are those of `connect` and of
    `campaign`; since `wait_s` is that of the campaign, that of `connect` is `connect_wait_s`.
    """
    of_session, of_campaign = divided_options(election, options)

    def url() -> str | None:
        return store() if callable(store) else store

    def decorate(function: Callable[Concatenate[Term, P], T]) -> Callable[P, T]:
        _refuse_unfit(function)
        if inspect.iscoroutinefunction(function):
            run_async = _async_while_leader(function, election, url, of_session, of_campaign)
            return cast("Callable[P, T]", run_async)

        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            with connect_blocking(url(), **of_session) as session:
                for campaign in session.campaigns(election, **of_campaign):
                    result: T | None = None
                    with campaign as term:
                        result = function(term, *args, **kwargs)
                        _refuse_unfinished(result)
                    if term.state is TermState.ENDED:
                        return cast("T", result)
                raise AssertionError("campaigns never end")

        return run

    return decorate


def divided_options(
    election: str, options: WhileLeaderOptions
) -> tuple[ConnectOptions, CampaignOptions]:
    """The options of the session and those of the campaign, checked."""
    known = WhileLeaderOptions.__optional_keys__
    of_session: dict[str, Any] = {}
    of_campaign: dict[str, Any] = {}
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"while_leader has no option {name!r}{did_you_mean(name, known)}")
        if name in CampaignOptions.__optional_keys__:
            of_campaign[name] = value
        else:
            of_session["wait_s" if name == "connect_wait_s" else name] = value
    CampaignSettings.of(election, cast("CampaignOptions", of_campaign))
    return cast("ConnectOptions", of_session), cast("CampaignOptions", of_campaign)


def _refuse_unfit(function: Callable[..., Any]) -> None:
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"while_leader cannot run {function.__name__!r}, a generator: its body would run"
            " after the term; use session.campaign inside it"
        )
    if isinstance(function, FunctionType) and function.__code__.co_varnames[:1] in (
        ("self",),
        ("cls",),
    ):
        raise ConfigError(
            f"while_leader passes the term as the first argument, which in {function.__name__!r}"
            f" is {function.__code__.co_varnames[0]!r}: wrap the bound method instead,"
            f" while_leader(…)(self.{function.__name__})"
        )


def _refuse_unfinished(result: object) -> None:
    if isinstance(result, Coroutine | Generator | AsyncGenerator):
        if isinstance(result, Coroutine):
            result.close()
        raise ConfigError(
            f"the function that while_leader ran returned a {type(result).__name__}, whose work"
            " would be done after the term: decorate the `async def` itself"
        )


def _async_while_leader(
    function: Callable[..., Awaitable[T]],
    election: str,
    url: Callable[[], str | None],
    of_session: ConnectOptions,
    of_campaign: CampaignOptions,
) -> Callable[..., Coroutine[Any, Any, T]]:
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> T:
        async with connect(url(), **of_session) as session:
            async for campaign in session.campaigns(election, **of_campaign):
                result: T | None = None
                async with campaign as term:
                    result = await function(term, *args, **kwargs)
                if term.state is TermState.ENDED:
                    return cast("T", result)
            raise AssertionError("campaigns never end")

    return run
