"""Shards as users see them: the scope of an owner, and the requests to a set.

These classes are the bridges from the caller's loop or thread to doyen's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypedDict, TypeVar

from doyen.election.core import SessionCore
from doyen.election.options import OnOverrun
from doyen.errors import StaleMap
from doyen.lease.runtime import ThreadRuntime
from doyen.manage.health import HealthCheck
from doyen.manage.shards import requests
from doyen.manage.shards.owner import OwnerSettings, ShardOwner
from doyen.manage.shards.routing import ShardMap, read_map
from doyen.manage.shards.slots import Bodies, ShardTerm
from doyen.manage.shards.spec import ShardSpec

__all__ = [
    "BlockingShardSet",
    "OwnedShards",
    "OwnerOptions",
    "ShardSet",
    "own",
]

T = TypeVar("T")


class OwnerOptions(TypedDict, total=False):
    """The options of a member that owns shards."""

    name: str
    """Name of the member, unique in the set. Default: host name and process id."""
    weight: float
    """Its share of the shards in relation to the weights of the others. Default 1."""
    zone: str
    """Where it runs. Standbys of a shard are in other zones than its owner."""
    address: str
    """Where clients reach it; part of the map."""
    health: HealthCheck
    """As for `Session.member`. An unhealthy member gets no shards, and its own are moved."""
    control: bool
    """Whether this member may be the controller of the set. Default True."""
    on_overrun: OnOverrun
    """What to do if a body has not ended within its stop budget after a loss; as for a campaign."""


class OwnedShards:
    """The shards that this process owns. Any thread."""

    def __init__(self, owner: ShardOwner) -> None:
        self._owner = owner

    def __repr__(self) -> str:
        return f"<OwnedShards of {self.name!r} in {self._owner.settings.shards!r}>"

    @property
    def name(self) -> str:
        """The name of the member."""
        return self._owner.settings.name

    @property
    def terms(self) -> dict[int, ShardTerm]:
        """The terms of the shards whose body runs, by number."""
        return self._owner.terms

    @property
    def generation(self) -> int:
        """The generation of the plan that this process knows."""
        return self._owner.plan.current.generation

    def check_route(self, shard: int, generation: int) -> ShardTerm:
        """The term of a shard, for a request that a client routed by a map of `generation`.

        Raises `StaleMap`, which has the current generation, if the client's map is of an earlier
        one or this process does not own the shard: the client should read the map again.
        """
        term = self.terms.get(shard)
        current = self.generation
        if term is None or not term.valid or generation != current:
            because = (
                f"the map is of generation {generation}, and the current one is {current}"
                if generation != current
                else f"{self.name!r} does not own shard {shard}"
            )
            raise StaleMap(f"the request was not executed: {because}; read the map again", current)
        return term


def own(
    core: SessionCore, settings: OwnerSettings, bodies: Bodies
) -> tuple[ShardOwner, OwnedShards]:
    """A new owner of shards, and what its scope is entered with."""
    owner = ShardOwner(core, settings, bodies)
    return owner, OwnedShards(owner)


class ShardSet:
    """Requests to a set of shards. Made by `Session.shards`."""

    def __init__(self, core: SessionCore, name: str) -> None:
        self._core = core
        self.name = name

    async def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._core.check_open()
        return await self._core.runtime.do(self._core.run(work))

    async def map(self) -> ShardMap:
        """Who owns what, read from the store."""
        return await self._run(partial(read_map, self._core, self.name))

    async def spec(self) -> ShardSpec | None:
        """What is asked of the set; None if it does not exist."""
        return await self._run(partial(requests.read_spec, self._core, self.name))

    async def configure(self, *, force: bool = False, **changes: Any) -> ShardSpec:
        """Change what is asked of the set, or create it with `count`. The fields are those of
        `doyen.manage.shards.spec.ShardSpec`. Returns when the change is stored; the controller
        carries it out. With `force`, a spec that cannot be read is replaced by a new one.

            await session.shards("jobs").configure(count=64, standbys=1)
        """
        return await self._run(
            partial(requests.configure, self._core, self.name, force=force, **changes)
        )

    async def move(self, shard: int, *, to: str | None, wait_s: float = 60.0) -> ShardMap:
        """Make `to` the preferred owner of a shard, and return once it owns the shard. With None
        the shard has no preferred owner any more. `OrderFailed` after `wait_s`."""
        return await self._run(
            partial(requests.move, self._core, self.name, shard, to, wait_s=wait_s)
        )

    async def drain(
        self, member: str, *, undo: bool = False, anyway: bool = False, wait_s: float = 60.0
    ) -> ShardMap:
        """Give a member the weight 0, and return once it owns nothing.

        `OrderFailed` if no other member could own its shards, or after `wait_s`. With `anyway` the
        weight is changed without that check and without waiting. `undo` restores the weight, and
        returns once the plan has it.
        """
        return await self._run(
            partial(
                requests.drain,
                self._core,
                self.name,
                member,
                undo=undo,
                anyway=anyway,
                wait_s=wait_s,
            )
        )

    async def rebalance(self, *, dry_run: bool = False) -> list[requests.PlannedMove]:
        """Have loads made as equal as possible. Returns the moves that this takes now."""
        return await self._run(partial(requests.rebalance, self._core, self.name, dry_run=dry_run))

    async def retry(self) -> ShardSpec:
        """Try shards again that were set aside because their bodies failed."""
        return await self._run(partial(requests.retry, self._core, self.name))


class BlockingShardSet:
    """Requests to a set of shards. Made by `BlockingSession.shards`; see `ShardSet`."""

    def __init__(self, core: SessionCore, name: str) -> None:
        self._core = core
        self.name = name

    def _run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._core.check_open()
        assert isinstance(self._core.runtime, ThreadRuntime)
        return self._core.runtime.do_blocking(self._core.run(work))

    def map(self) -> ShardMap:
        """Who owns what, read from the store."""
        return self._run(partial(read_map, self._core, self.name))

    def spec(self) -> ShardSpec | None:
        """What is asked of the set; None if it does not exist."""
        return self._run(partial(requests.read_spec, self._core, self.name))

    def configure(self, *, force: bool = False, **changes: Any) -> ShardSpec:
        """Change what is asked of the set, or create it with `count`."""
        return self._run(partial(requests.configure, self._core, self.name, force=force, **changes))

    def move(self, shard: int, *, to: str | None, wait_s: float = 60.0) -> ShardMap:
        """Make `to` the preferred owner of a shard, and return once it owns the shard."""
        return self._run(partial(requests.move, self._core, self.name, shard, to, wait_s=wait_s))

    def drain(
        self, member: str, *, undo: bool = False, anyway: bool = False, wait_s: float = 60.0
    ) -> ShardMap:
        """Give a member the weight 0, and return once it owns nothing."""
        return self._run(
            partial(
                requests.drain,
                self._core,
                self.name,
                member,
                undo=undo,
                anyway=anyway,
                wait_s=wait_s,
            )
        )

    def rebalance(self, *, dry_run: bool = False) -> list[requests.PlannedMove]:
        """Have loads made as equal as possible. Returns the moves that this takes now."""
        return self._run(partial(requests.rebalance, self._core, self.name, dry_run=dry_run))

    def retry(self) -> ShardSpec:
        """Try shards again that were set aside because their bodies failed."""
        return self._run(partial(requests.retry, self._core, self.name))
