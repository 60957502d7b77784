"""The asynchronous API: a session, and what it has.

All code that talks to the store runs on doyen's loop (`doyen.election`). This module connects it
to the caller's loop. Campaigns and locks are in `doyen.election.scopes`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack, overload

from doyen import manage
from doyen._waiting import LoopEvent, outlast, shared
from doyen.election.callbacks import Callbacks, CandidateOptions, CandidateTask
from doyen.election.core import SessionCore
from doyen.election.options import CampaignOptions, CampaignSettings, SessionSettings, WardenForm
from doyen.election.orders import order_resign, order_transfer
from doyen.election.queries import (
    observe_leader,
    observe_line,
    read_history,
    read_leader,
    read_line,
)
from doyen.election.scopes import Campaign, Lock, RepeatedCampaign, Rounds
from doyen.errors import SessionClosed, did_you_mean
from doyen.events import Sink
from doyen.lease.lifetime import track, untrack
from doyen.lease.runtime import CLOSED, Runtime, ThreadRuntime
from doyen.manage.joining import Joining
from doyen.model import (
    Candidate,
    Kind,
    Leader,
    Line,
    Member,
    MemberChange,
    PastTerm,
    Published,
    Reachable,
    SessionHealth,
    Unreachable,
)
from doyen.stores.choice import choose_store, without_password
from doyen.stores.port import Store
from doyen.term import Term
from doyen.warden.warding import Warding

if TYPE_CHECKING:
    from doyen.manage import (
        GroupMember,
        Inventory,
        InventoryKind,
        ListPublisher,
        MemberOptions,
        OwnedShards,
        OwnerOptions,
        Prepare,
        Registration,
        ShardBody,
        ShardMap,
        ShardSet,
    )
    from doyen.manage.config_session import Config, ConfigOptions

__all__ = ["Campaign", "Publishing", "Session", "connect"]

T = TypeVar("T")
P = ParamSpec("P")
OBSERVED = 64
"""How many changes wait for an observer. A slower observer misses the oldest."""
Observing = Callable[[SessionCore, Callable[[T], None]], Coroutine[Any, Any, None]]
"""Delivers changes until cancelled."""


class _SessionState:
    """The state that `Session` and `BlockingSession` report."""

    _scope = "with"
    """How such a session is entered."""

    def __init__(self, settings: SessionSettings) -> None:
        self._settings = settings
        self._core: SessionCore | None = None

    def __repr__(self) -> str:
        state = "not open" if self._core is None else self._core.health
        return f"<{type(self).__name__} on {without_password(self._settings.url)}, {state}>"

    @property
    def _opened(self) -> SessionCore:
        if self._core is None:
            raise SessionClosed(
                f"the session is not open: enter it with `{self._scope}`, or open it"
            )
        return self._core

    @property
    def as_of(self) -> float | None:
        """When the store was last known to answer, on the wall clock, in seconds since 1970. What
        observers of this session have got was current then. While there is an observer, the store
        is asked at least three times per ttl."""
        return self._opened.calls.reachability.as_of

    @property
    def health(self) -> SessionHealth:
        """`ok`; `unsure` while renewals or other calls to the store fail; `lost` after a loss of
        the lease, until there is a new one; `closed`. Any thread, never blocks.

            if session.health != "ok":
                print("not ready")
        """
        return self._opened.health

    @property
    def lost(self) -> bool:
        """Whether the session has no valid lease any more: it was lost or the session is closed. A
        session that lost its lease gets a new one when a campaign needs it."""
        return self.health in ("lost", "closed")


class Session(_SessionState):
    """A session on a store, for asyncio. Made by `connect`.

    Tests and the lab pass a runtime and an open store.
    """

    _scope = "async with"

    def __init__(
        self,
        settings: SessionSettings,
        runtime: Runtime | None = None,
        store: Store | None = None,
        warding: Warding | None = None,
    ) -> None:
        super().__init__(settings)
        self._given_runtime = runtime
        self._given_store = store
        self._given_warding = warding
        self._closing: asyncio.Future[None] | None = None

    async def open(self) -> Session:
        """Open the session and return it. For code without a scope; pair it with `close`.

        session = await doyen.connect("sqlite:///var/lib/app/doyen.db").open()
        ...
        await session.close()
        """
        if self._core is not None:
            raise SessionClosed("a session is opened once; connect again")
        runtime = self._given_runtime or ThreadRuntime.acquire()
        try:
            self._core = await runtime.obtain(
                SessionCore.open(self._settings, runtime, self._given_store, self._given_warding),
                SessionCore.close,
            )
        except BaseException:
            runtime.release()
            raise
        track(self._core, release_at_exit=self._settings.release_at_exit, on_loop=True)
        return self

    async def close(self) -> None:
        """End every term and lease of the session. Does nothing if it is closed, or not open."""
        core = self._core
        if core is None or core.runtime.pid != os.getpid():
            return
        if self._closing is not None:
            await shared(self._closing)
            return
        self._closing = asyncio.ensure_future(core.runtime.finish(core.close()))
        try:
            await shared(self._closing)
        finally:
            # doyen's thread must not stop before the lease is revoked, which takes little time.
            await outlast(self._closing)
            untrack(core)
            core.runtime.release()

    async def __aenter__(self) -> Session:
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def campaign(self, election: str, **options: Unpack[CampaignOptions]) -> Campaign:
        """Campaign for `election`. The scope is entered when elected.

            async with session.campaign("billing", name="server1") as term:
                await work(term.token)

        On loss the body is cancelled and `LeadershipLost` raised. Options: `name`, `meta`,
        `wait_s`, `priority`, `preempt`, `cooldown_s`, `recipe`, `stall_after_s`, `on_overrun`,
        `member`; each is explained at `doyen.election.options.CampaignOptions`.
        """
        return Campaign(self._opened, CampaignSettings.of(election, options))

    async def campaigns(
        self, election: str, **options: Unpack[CampaignOptions]
    ) -> AsyncIterator[RepeatedCampaign]:
        """Campaign again after each loss, until the loop is left. Takes what `campaign` takes.

            async for campaign in session.campaigns("billing", name="server1"):
                async with campaign as term:
                    await work(term.token)

        A loss ends the body and starts the next campaign instead of raising. An error of the body
        itself is raised. `break` and `return` leave the loop even if the term was lost, so check
        `term.valid` first. A body that ends at once is followed by a pause, and a campaign that was
        not entered is an error.
        """
        rounds = Rounds(election)
        while True:
            settings = CampaignSettings.of(election, options)
            campaign = RepeatedCampaign(self._opened, settings)
            yield campaign
            if pause_s := rounds.pause_s(campaign):
                await asyncio.sleep(pause_s)

    def candidate(self, election: str, **options: Unpack[CandidateOptions]) -> CandidateTask:
        """Campaign in the background, again after each loss, and report by callbacks.

            async with session.candidate("billing", on_elected=start, on_lost=stop) as candidate:
                ...
                if candidate.leads:
                    ...

        For code that has no scope of its own: `open` and `close` instead of `async with`. Options:
        `on_elected`, `on_lost`, `on_new_leader`, explained at
        `doyen.election.callbacks.CallbackOptions`, and those of `campaign`.
        """
        callbacks, rest = Callbacks.taken_from(election, options)
        self._opened.check_open()
        return CandidateTask(
            callbacks, partial(self.campaigns, election, **rest), partial(self.observe, election)
        )

    def lock(self, lock: str, /, **options: Unpack[CampaignOptions]) -> Lock:
        """Mutual exclusion without a leader: a scope with a token, as for a campaign.

            async with session.lock("migration") as term:
                await migrate(fencing_token=term.token)

        Without a scope: `acquire`, `release` and `locked`. A lock and an election of the same name
        are independent of each other. `leader`, `line`,
        `observe`, `observe_line`, `resign` and `transfer` take `kind="locks"`.
        """
        return Lock(self._opened, CampaignSettings.of(lock, options, kind="locks"))

    def semaphore(self, semaphore: str, n: int, /, **options: Unpack[CampaignOptions]) -> Campaign:
        """At most `n` holders at a time: a scope with a slot and a token, as for a lock.

            async with session.semaphore("uploads", 3) as term:
                await upload(slot=term.slot, fencing_token=term.token)

        Tokens of different slots do not compare: fence with slot and token. `n` is kept in the
        store, and another `n` for the same name raises `ConfigError`.
        """
        settings = CampaignSettings.of(semaphore, options, kind="semaphores", slots=n)
        return Campaign(self._opened, settings)

    async def barrier(self, barrier: str, n: int, /, *, wait_s: float | None = None) -> int:
        """Wait until `n` have arrived at the barrier, this one included, and return how many times
        it has been passed, this time included.

            await session.barrier("migrated", 3)

        A party that is gone before the barrier is passed does not count. Raises `NotArrived`
        after `wait_s`; then this one does not count either. `n` is kept in the store.
        """
        return await self._run(manage.arrive, barrier, n, wait_s)

    async def resign(
        self,
        election: str,
        *,
        kind: Kind = "elections",
        wait_s: float = 10.0,
        force: bool = False,
    ) -> Leader:
        """Have the leader of `election` resign, and return it once it has.

            await session.resign("billing")
            await session.resign("migration", kind="locks")  # have its holder give the lock up

        Its body is cancelled, and its record is deleted when the body has ended; `OrderFailed` if
        that takes longer than `wait_s`. `force` deletes the record of a leader that may still be
        at work: from then on only tokens protect what it writes.
        """
        return await self._run(order_resign, election, kind=kind, wait_s=wait_s, force=force)

    async def transfer(
        self, election: str, *, to: str, kind: Kind = "elections", wait_s: float = 10.0
    ) -> Leader:
        """Have the leader transfer to the candidate named `to`, and return it once it leads.

            await session.transfer("billing", to="server2")

        The successor is ready before the leader resigns. `OrderFailed` if `to` is not exactly one
        candidate in line, or does not lead within `wait_s`.
        """
        return await self._run(order_transfer, election, kind=kind, to=to, wait_s=wait_s)

    async def line(self, election: str, *, kind: Kind = "elections") -> list[Candidate]:
        """The candidates in line, in order, the leader marked."""
        return [*(await self._run(read_line, election, kind)).candidates]

    async def history(self, election: str) -> list[PastTerm]:
        """The last terms of an election, the newest first: who led, since when, until when, and
        how the term ended, as far as its leader could record that.

            for term in await session.history("billing"):
                print(term.name, term.since, term.end or ("leads" if term.leads else "unknown"))

        Leaders record their terms in the background, the last 50 of an election.
        """
        return await self._run(read_history, election)

    async def _run(
        self,
        work: Callable[Concatenate[SessionCore, P], Coroutine[Any, Any, T]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        core = self._opened
        core.check_open()
        return await core.runtime.do(core.run(partial(work, core, *args, **kwargs)))

    async def leader(self, election: str, *, kind: Kind = "elections") -> Leader | None:
        """The current leader, read from the store; None if there is none. With `kind="locks"`, the
        holder of the lock of that name."""
        return await self._run(read_leader, election, kind)

    @overload
    def config(self, name: str, **options: Unpack[ConfigOptions]) -> Config[Any]: ...

    @overload
    def config(
        self, name: str, *, type: type[T], **options: Unpack[ConfigOptions]
    ) -> Config[T]: ...

    def config(
        self,
        name: str,
        *,
        type: Any = None,  # noqa: A002 - the natural name
        **options: Unpack[ConfigOptions],
    ) -> Config[Any]:
        """A configuration: a versioned document that is validated when it is written and read.

            config = session.config("billing", type=Settings)
            document = await config.set(Settings(workers=4))

        `type`: a type that msgspec can decode, or of pydantic; without one, any JSON.
        """
        from doyen.manage.config_session import Config  # seldom needed

        return Config(self._opened, name, type, **options)

    def observe(
        self, election: str, *, kind: Kind = "elections"
    ) -> AsyncGenerator[Leader | Unreachable[Leader] | None, None]:
        """The current leader, then every change; None while there is none. An observer that is more
        than 64 changes behind misses the oldest.

        async for leader in session.observe("billing"):
            print(leader.name if leader else "no leader is known")

        When the store has not answered for a ttl, `Unreachable` with the leader that was known last
        is yielded, and the leader again when the store answers. Every `observe_…` does the same.
        """
        return self._observe(lambda core, deliver: observe_leader(core, election, kind, deliver))

    def observe_line(
        self, election: str, *, kind: Kind = "elections"
    ) -> AsyncGenerator[Line | Unreachable[Line], None]:
        """The current leader and line, then every change.

        async for line in session.observe_line("billing"):
            print([candidate.name for candidate in line.candidates])
        """
        return self._observe(lambda core, deliver: observe_line(core, election, kind, deliver))

    def member(self, group: str, **options: Unpack[MemberOptions]) -> Joining[GroupMember]:
        """Be a member of `group` for the duration of a scope.

            async with session.member("workers", name="w1", meta={"address": "10.0.0.1"}) as member:
                async with session.campaign("billing", member=member) as term:
                    ...

        Raises `NameTaken` if a live member of the group has this name. If the session loses its
        lease, the member joins again, as a new incarnation. Options: `name`, `meta`, `health`,
        `health_every_s`, `health_limit_s`; each is explained at
        `doyen.manage.members.MemberOptions`.
        """
        core, settings = self._opened, manage.MemberSettings(group=group, **options)

        def make() -> tuple[Registration, GroupMember]:
            registration = manage.Registration(core, settings)
            return registration, manage.GroupMember(registration)

        return Joining(core, make)

    async def members(self, group: str) -> list[Member]:
        """The live members of a group, read from the store, in the order of their names."""
        return [*(await self._run(manage.read_members, group, times=True)).members.values()]

    async def observe_members(
        self, group: str, *, suspect: bool = True
    ) -> AsyncGenerator[MemberChange | Unreachable[tuple[Member, ...]] | Reachable, None]:
        """Each live member as `joined`, then every change of the group. A slow observer may miss
        changes that were undone meanwhile, but always gets the present state.

            async for change in session.observe_members("workers"):
                print(change.kind, change.member.name)

        With `suspect` the list is also read about three times per ttl, to notice renewals that are
        late.
        """
        seen = manage.RosterChanges(self._opened)

        def observing(core: SessionCore, deliver: Callable[[Any], None]) -> Any:
            return manage.observe_members(core, group, deliver, suspect=suspect)

        async with contextlib.aclosing(self._observe(observing, 1)) as rosters:
            async for roster in rosters:
                for change in seen.of(roster):
                    yield change

    def publisher(self, group: str, term: Term, *, settle_s: float | None = None) -> Publishing:
        """As the leader, publish the members of `group` for the duration of a scope.

            async with session.campaign("workers") as term:
                async with session.publisher("workers", term):
                    ...

        Changes within `settle_s` (default 0.1 s) are published together.
        """
        return Publishing(manage.ListPublisher(self._opened, group, term, settle_s))

    async def published(self, group: str) -> Published | None:
        """The members of a group as its leader published them last; None if no leader has."""
        return await self._run(manage.read_published, group)

    def observe_published(
        self, group: str
    ) -> AsyncGenerator[Published | Unreachable[Published] | None, None]:
        """The published list, then every change.

        async for published in session.observe_published("workers"):
            print(published.position, [member.name for member in published.members])
        """
        return self._observe(lambda core, deliver: manage.observe_published(core, group, deliver))

    def own_shards(
        self,
        shards: str,
        body: ShardBody,
        *,
        prepare: Prepare | None = None,
        **options: Unpack[OwnerOptions],
    ) -> Joining[OwnedShards]:
        """Own shards of a set for the duration of a scope, together with its other members.

            async def body(term):
                while True:
                    await work(term.shard, fencing_token=term.token)

            async with session.own_shards("jobs", body, name="server1"):
                await stopped.wait()

        `body` runs as a task of its own for each shard that this member owns, and is cancelled when
        the member is to give it up or has lost its lease. `prepare`, if given, is called with the
        number of a shard before the shard is moved here from a live owner. Options: `name`,
        `weight`, `zone`, `address`, `health`, `control`, `on_overrun`; each is explained at
        `doyen.manage.shards.scopes.OwnerOptions`. The set is created by
        `session.shards(shards).configure(count=…)`.
        """
        core, settings = self._opened, manage.OwnerSettings(shards=shards, **options)
        return Joining(
            core,
            lambda: manage.own(core, settings, manage.LoopBodies(core.runtime, body, prepare)),
        )

    def shards(self, shards: str) -> ShardSet:
        """The set of shards of this name: its map, and requests to change it."""
        return manage.ShardSet(self._opened, shards)

    async def shard_map(self, shards: str) -> ShardMap:
        """Who owns what in a set of shards, read from the store.

        route = (await session.shard_map("jobs")).route("customer-17")
        """
        return await self._run(manage.read_map, shards)

    def observe_shards(self, shards: str) -> AsyncGenerator[ShardMap | Unreachable[ShardMap], None]:
        """The map of a set of shards, then every change.

        async for shard_map in session.observe_shards("jobs"):
            print(shard_map.generation, shard_map.route("customer-17").address)
        """
        return self._observe(lambda core, deliver: manage.observe_map(core, shards, deliver))

    async def inventory(self, *kinds: InventoryKind) -> Inventory:
        """Everything that the store has, or what it has of these kinds: "elections", "locks",
        "semaphores", "barriers", "groups", "shards", "configs".

            for name, line in (await session.inventory()).elections.items():
                print(name, line.leader.name if line.leader else "no leader")
        """
        return await self._run(manage.read_inventory, kinds or manage.INVENTORY_KINDS)

    def observe_inventory(
        self, *kinds: InventoryKind
    ) -> AsyncGenerator[Inventory | Unreachable[Inventory], None]:
        """Everything that the store has, then again after every change. Changes that come together
        are delivered as one, and a slow observer gets the latest state only.

        async for seen in session.observe_inventory("elections", "locks"):
            print(len(seen.elections), len(seen.locks))
        """

        def observing(core: SessionCore, deliver: Callable[[Any], None]) -> Any:
            return manage.observe_inventory(core, deliver, kinds or manage.INVENTORY_KINDS)

        return self._observe(observing, 1)

    async def _observe(
        self, observe: Observing[T], kept: int = OBSERVED
    ) -> AsyncGenerator[T, None]:
        self._opened.check_open()
        seen: deque[T] = deque(maxlen=kept)
        changed = LoopEvent()

        def deliver(change: T) -> None:
            # A loop that does not run is woken once, not once for each change.
            seen.append(change)
            if len(seen) == 1:
                changed.set_soon()

        observing = asyncio.ensure_future(self._run(observe, deliver))
        observing.add_done_callback(lambda _: changed.set())
        try:
            while True:
                while seen:
                    yield seen.popleft()
                if observing.done():
                    observing.result()
                    raise SessionClosed(CLOSED)
                await changed.wait()
                changed.clear()
        finally:
            observing.cancel()


class Publishing:
    """Publishes a list of members as a scope. Made by `Session.publisher`."""

    def __init__(self, publisher: ListPublisher) -> None:
        self._publisher = publisher
        self._runtime = publisher.core.runtime

    async def __aenter__(self) -> None:
        self._publisher.core.check_open()
        await self._runtime.do(self._publisher.start())

    async def __aexit__(self, *_: object) -> None:
        if self._runtime.pid == os.getpid():
            await self._runtime.finish(self._publisher.stop())


class SessionOptions(TypedDict, total=False):
    """The options of a session, except how long to wait for its store."""

    ttl_s: float | None
    """How long the store waits for a silent leader. Default: 5 s, or more if the store needs it."""
    stop_budget_s: float | None
    """How long a body has to end after a loss, before another may be elected. Default: ttl / 6."""
    drift: float | None
    """By which fraction clocks may differ in speed. Default: 0.5 %."""
    renew_every_s: float | None
    """The time between renewals. Default: ttl / 3."""
    request_timeout_s: float | None
    """When a call to the store without a response is given up. Default and maximum: ttl / 6."""
    create: bool
    """Whether to create the store if it does not exist. False is for programs that only read."""
    release_at_exit: bool
    """Whether a session that is still open is released when the process ends, by itself or by
    SIGTERM. Default True. A handler of yours for SIGTERM is kept."""
    audit: str | os.PathLike[str] | None
    """A file for the audit log."""
    on_event: Sink | None
    """Called with every `events.Record`, in order, on a thread of its own."""
    warden: WardenForm | None
    """A process that ends the leases at once if this one dies: "process" starts one, "host" expects
    that of the host, "auto" uses that of the host or starts one, "none" uses none. Default: that of
    the host, if there is one."""
    settle_s: float | None
    """How long the warden waits before it ends the leases. Default: 0, but the stop budget for a
    warden that was found by default."""
    frozen_after_s: float | None
    """Have the warden kill this process if it holds a term and does not respond for this long."""


class ConnectOptions(SessionOptions, total=False):
    """The options of a session."""

    wait_s: float
    """How long to wait for a store that cannot be reached at first. Default 0: one try."""


def settings_of(url: str | None, options: ConnectOptions) -> SessionSettings:
    """The settings of a session on the store that `url` names; without one, on the store that the
    environment names."""
    chosen = choose_store(url, create=options.get("create", True))
    known = ConnectOptions.__optional_keys__
    for name in options:
        if name not in known:
            raise TypeError(f"connect has no option {name!r}{did_you_mean(name, known)}")
    settings: dict[str, Any] = {**options}
    sink = settings.pop("on_event", None)
    return SessionSettings(
        chosen.url, origin=chosen.origin, sinks=() if sink is None else (sink,), **settings
    )


def connect(url: str | None = None, **options: Unpack[ConnectOptions]) -> Session:
    """A session on the store that `url` names, for asyncio.

        async with doyen.connect("sqlite:///var/lib/app/doyen.db", ttl_s=5) as session:
            async with session.campaign("billing") as term:
                ...

    Without a URL, `DOYEN_STORE` names the store, or DATABASE_URL, ETCDCTL_ENDPOINTS or ZK_HOSTS if
    exactly one of them is set. Otherwise the store is a file that only this machine has, which is
    logged as a warning and refused if `DOYEN_REQUIRE_STORE=1`. Options: `ttl_s`, `stop_budget_s`,
    `drift`, `renew_every_s`, `request_timeout_s`, `wait_s`, `create`, `release_at_exit`, `audit`,
    `on_event`, `warden`, `settle_s`, `frozen_after_s`; each is explained at
    `doyen.session.ConnectOptions`.
    """
    return Session(settings_of(url, options))
