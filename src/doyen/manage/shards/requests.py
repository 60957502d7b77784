"""What people ask of a set of shards: changes of its spec, and waiting until they are done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from doyen.election.core import SessionCore
from doyen.errors import (
    BadDocument,
    ConfigError,
    Conflict,
    OrderFailed,
    OutcomeUnknown,
    StoreUnavailable,
)
from doyen.manage.documents import Document, Versioned
from doyen.manage.shards.controller import read_holders, seen_members
from doyen.manage.shards.plan import ShardPlan
from doyen.manage.shards.planner import choose_owners
from doyen.manage.shards.routing import ShardMap, map_of, read_map
from doyen.manage.shards.spec import ShardSpec
from doyen.manage.shards.steps import SeenMember, eligible
from doyen.model import Claim, leader_key, shards_key
from doyen.stores.port import Watch

__all__ = [
    "PlannedMove",
    "change_spec",
    "configure",
    "drain",
    "move",
    "read_spec",
    "rebalance",
    "retry",
]


class PlannedMove(NamedTuple):
    """A move that a rebalance would make."""

    shard: int
    owner: str
    to: str


class StoredSpec(NamedTuple):
    """A spec, and its document."""

    spec: ShardSpec
    document: Versioned


def _document(core: SessionCore, name: str) -> Document:
    return Document(core.calls, shards_key(name, "spec"))


async def _read(core: SessionCore, name: str) -> StoredSpec | None:
    try:
        version = await _document(core, name).read()
        return None if version is None else StoredSpec(ShardSpec.decode(version.body), version)
    except BadDocument as error:
        raise BadDocument(
            f"the spec of the set of shards {name!r} cannot be read, and its plan stays as it is:"
            f" {error}. To replace the spec, use 'doyen shards {name} create COUNT --force', or"
            " configure(count=…, force=True) in the API"
        ) from error


async def read_spec(core: SessionCore, name: str) -> ShardSpec | None:
    """The spec; None if there is none."""
    found = await _read(core, name)
    return None if found is None else found.spec


async def _existing(core: SessionCore, name: str) -> ShardSpec:
    return _required(name, await read_spec(core, name))


def _required(name: str, spec: ShardSpec | None) -> ShardSpec:
    if spec is None:
        raise OrderFailed(
            f"there is no set of shards {name!r}: create it with its number of shards first"
        )
    return spec


async def configure(
    core: SessionCore, name: str, *, force: bool = False, **changes: Any
) -> ShardSpec:
    """Change fields of the spec, or create it: then `count` has to be among them. With `force`, a
    spec that cannot be read is created anew."""

    def change(spec: ShardSpec | None) -> ShardSpec:
        if spec is None and "count" in changes:
            spec = ShardSpec(count=changes["count"])
        return _required(name, spec).change(**changes)

    return (await change_spec(core, name, change, force=force)).spec


async def change_spec(
    core: SessionCore,
    name: str,
    change: Callable[[ShardSpec | None], ShardSpec],
    *,
    force: bool = False,
) -> StoredSpec:
    """Replace the spec by compare-and-set, again if another has changed it meanwhile. With `force`,
    one that cannot be read counts as none."""
    document = _document(core, name)
    while True:
        expect: Versioned | None = None
        try:
            found = await _read(core, name)
            expect = found and found.document
        except BadDocument:
            entry = await core.call(core.store.get(document.key)) if force else None
            if entry is None:
                raise
            found, expect = None, Versioned.unreadable(entry)
        spec = change(found and found.spec)
        if found is not None and spec == found.spec:
            return found
        try:
            return StoredSpec(spec, await document.write(spec.encode(), expect=expect))
        except Conflict:
            continue


async def move(
    core: SessionCore, name: str, shard: int, to: str | None, *, wait_s: float = 60.0
) -> ShardMap:
    """Give a shard a preferred owner, and wait until it owns the shard; with None, remove the
    preference."""

    def change(spec: ShardSpec | None) -> ShardSpec:
        spec = _required(name, spec)
        if not 0 <= shard < spec.count:
            raise ConfigError(f"{name!r} has the shards 0 to {spec.count - 1}, not {shard}")
        pins = {n: owner for n, owner in spec.pins.items() if n != shard}
        return spec.change(pins=pins if to is None else {**pins, shard: to})

    if to is not None:
        spec = await _existing(core, name)
        members = await seen_members(core, name)
        if to not in eligible(spec, members):
            why = "its weight is 0" if to in members else "it is not a live member"
            raise OrderFailed(f"{to!r} cannot own shards of {name!r}: {why}")
    asked = await change_spec(core, name, change)
    if to is None:
        return await _wait(core, name, wait_s)

    def unplanned(seen: ShardMap) -> str:
        if shard in seen.moves and seen.moves[shard].to != to:
            return f"shard {shard} is on its way to {seen.moves[shard].to!r}"
        left = owned_by(seen.owners[shard] if shard < seen.count else "")
        for why, banned in (("failed", seen.failed), ("was prepared too slowly", seen.slow)):
            if left and to in banned.get(shard, ()):
                left += f"; it {why} on {to!r}, and 'doyen shards {name} retry' tries it again"
        return left

    async def unheld() -> str:
        record = await core.call(core.store.get(leader_key(f"{name}/{shard}", "shards")))
        return owned_by("" if record is None else Claim.decode(record.value).name)

    def owned_by(owner: str) -> str:
        if owner == to:
            return ""
        return f"shard {shard} is owned by {owner!r}" if owner else f"shard {shard} has no owner"

    return await _wait(core, name, wait_s, unplanned, unheld, asked)


async def drain(
    core: SessionCore,
    name: str,
    member: str,
    *,
    undo: bool = False,
    anyway: bool = False,
    wait_s: float = 60.0,
) -> ShardMap:
    """Give a member the weight 0, and wait until it owns nothing.

    Fails, before anything is changed, if there is no such member, or if no other could take its
    shards. With `anyway` the weight is changed nevertheless, and nothing is waited for: the member
    keeps what no other can take. With `undo` the member has the weight again that it states itself;
    the plan that follows is waited for, unless no member is there to make it.
    """

    def change(spec: ShardSpec | None) -> ShardSpec:
        spec = _required(name, spec)
        weights = {who: weight for who, weight in spec.weights.items() if who != member}
        return spec.change(weights=weights if undo else {**weights, member: 0})

    if not undo and not anyway:
        spec = await _existing(core, name)
        members = await seen_members(core, name)
        if member not in members and not (await read_map(core, name)).owned_by(member):
            raise OrderFailed(
                f"{member!r} cannot be drained: it is not a live member of {name!r}, and owns"
                f" nothing. The members are {', '.join(sorted(members)) or 'none'}. To keep it from"
                " owning shards when it joins, drain it anyway"
            )
        if not set(eligible(spec, members)) - {member}:
            raise OrderFailed(
                f"{member!r} cannot be drained, because no other member could own the shards of"
                f" {name!r}: {_why_not(spec, members, member)}. Start another member, or drain it"
                " anyway"
            )
    controlled = undo and not anyway and bool(await seen_members(core, name))
    asked = await change_spec(core, name, change)
    if undo or anyway:
        return await _wait(core, name, wait_s, asked=asked if controlled else None)

    def unplanned(seen: ShardMap) -> str:
        if planned := len(seen.owned_by(member)):
            note = f"; {seen.note}" if seen.note else ""
            return f"{member!r} still owns {planned} shards{note}"
        coming = sum(move.to == member for move in seen.moves.values())
        return f"{coming} shards are on their way to {member!r}" if coming else ""

    async def unheld() -> str:
        left = sum(owner == member for owner in (await read_holders(core, name)).values())
        return f"{member!r} still owns {left} shards" if left else ""

    return await _wait(core, name, wait_s, unplanned, unheld, asked)


def _why_not(spec: ShardSpec, members: dict[str, SeenMember], member: str) -> str:
    others = [name for name in sorted(members) if name != member]
    drained = [name for name in others if spec.weights.get(name) == 0]
    unfit = [name for name in others if name not in drained]
    reasons = [] if others else ["there is no other member"]
    reasons += [f"drained: {', '.join(drained)}"] if drained else []
    reasons += [f"unhealthy or of weight 0: {', '.join(unfit)}"] if unfit else []
    return "; ".join(reasons)


async def _done() -> str:
    return ""


async def _wait(
    core: SessionCore,
    name: str,
    wait_s: float,
    unplanned: Callable[[ShardMap], str] = lambda _: "",
    unheld: Callable[[], Awaitable[str]] = _done,
    asked: StoredSpec | None = None,
) -> ShardMap:
    """Wait until nothing is missing, and return the map. `OrderFailed` after `wait_s`.

    A plan that the controller made before it knew what was `asked` says nothing about it.
    `unplanned` says what the plan does not say yet. Once that is nothing, `unheld` reads the
    records and says which of them are not as planned yet: a set may have thousands.
    """
    changed = asyncio.Event()
    left = "the store did not answer"
    plan = Document(core.calls, shards_key(name, "plan"))
    scopes = {"plan": plan.key}
    watches: dict[str, Watch] = {}
    try:
        async with asyncio.timeout(wait_s):
            while True:
                try:
                    for part in scopes.keys() - watches.keys():
                        watching = core.store.watch(scopes[part], changed.set)
                        watches[part] = await core.call(watching)
                    changed.clear()
                    seen = map_of(name, await plan.read())
                    left = _unread(seen, asked) or unplanned(seen)
                    if not left and (left := await unheld()) and "records" not in scopes:
                        scopes["records"] = shards_key(name, "at")
                        continue  # read them again once they are watched
                except (StoreUnavailable, OutcomeUnknown):
                    await asyncio.sleep(core.calls.retry_pause())
                    continue
                except BadDocument as error:
                    left = str(error)  # until a controller has replaced it
                else:
                    if not left:
                        return seen
                await changed.wait()
    except TimeoutError:
        raise OrderFailed(f"{left}, after {wait_s:g} s; it goes on without this command") from None
    finally:
        for watch in watches.values():
            watch.close()


def _unread(seen: ShardMap, asked: StoredSpec | None) -> str:
    if asked is None or seen.spec >= asked.document.version:
        return ""
    note = f": {seen.note}" if seen.note else ""
    return f"no controller has acted on version {asked.document.version} of the spec{note}"


async def planned_moves(core: SessionCore, name: str) -> list[PlannedMove]:
    """The moves that would make loads as equal as possible now."""
    spec = await _existing(core, name)
    version = await Document(core.calls, shards_key(name, "plan")).read()
    plan = ShardPlan() if version is None else ShardPlan.decode(version.body)
    reached = [
        plan.moves[shard].to if shard in plan.moves else owner
        for shard, owner in enumerate(plan.owners)
    ]
    wanted = choose_owners(
        reached,
        eligible(spec, await seen_members(core, name)),
        pins=spec.pins,
        banned=plan.failed,
        slow=plan.slow,
        kept={*plan.aside, *(n for n, owner in enumerate(reached) if owner in plan.grace)},
        standbys=plan.standbys,
        exact=True,
    )
    return [
        PlannedMove(shard, owner, to)
        for shard, (owner, to) in enumerate(zip(reached, wanted, strict=True))
        if owner != to
    ]


async def rebalance(core: SessionCore, name: str, *, dry_run: bool = False) -> list[PlannedMove]:
    """Have loads made as equal as possible. Returns the moves that this takes."""
    moves = await planned_moves(core, name)
    if moves and not dry_run:
        await change_spec(core, name, lambda spec: _raised(name, spec, "rebalance"))
    return moves


async def retry(core: SessionCore, name: str) -> ShardSpec:
    """Try shards again that were set aside."""
    return (await change_spec(core, name, lambda spec: _raised(name, spec, "retry"))).spec


def _raised(name: str, spec: ShardSpec | None, counter: str) -> ShardSpec:
    spec = _required(name, spec)
    return spec.change(**{counter: getattr(spec, counter) + 1})
