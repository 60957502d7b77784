"""Which member should own which shard, and who stands by. Pure: the same input gives the same plan.

In this order:

1. only eligible members own shards;
2. a shard with a preferred owner that is eligible is owned by it;
3. the load of each member is within one of its target, which is its share by weight. A member with
   more preferred shards than that gets no others, and the rest is shared by those that are left;
4. as few shards as possible leave an eligible owner. A difference of one therefore moves nothing;
5. standbys are in other zones than the owner where there are other zones.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from doyen.manage.shards.plan import NO_MEMBER

__all__ = ["Eligible", "choose_owners", "choose_standbys", "targets"]


class Eligible(NamedTuple):
    """A member that may own shards. The weight is above 0."""

    weight: float = 1.0
    zone: str = ""


class Target(NamedTuple):
    """The load that a member should have, besides the shards that it has by preference."""

    share: int
    """Its ideal load times `scale`."""
    scale: int
    low: int
    high: int


def targets(
    free: int,
    members: Mapping[str, Eligible],
    *,
    pinned: Mapping[str, int] | None = None,
    exact: bool = False,
) -> dict[str, Target]:
    """The target of each member if `free` shards are to be balanced, and each has so many `pinned`
    ones besides. With `exact`, loads are within less than one of the ideal, else within one.

    >>> targets(7, {"a": Eligible(), "b": Eligible(2.0)})["b"]
    Target(share=14, scale=3, low=4, high=5)
    >>> targets(4, {"a": Eligible(), "b": Eligible()}, pinned={"a": 2})["b"]
    Target(share=6, scale=2, low=2, high=4)
    """
    pinned = pinned or {}
    ratios = {name: float(each.weight).as_integer_ratio() for name, each in members.items()}
    common = max([1, *(denominator for _, denominator in ratios.values())])  # powers of two
    weights = {name: above * common // below for name, (above, below) in ratios.items()}
    takers = list(weights)
    while True:
        scale = sum(weights[name] for name in takers)
        total = free + sum(pinned.get(name, 0) for name in takers)
        full = {name for name in takers if weights[name] * total < pinned.get(name, 0) * scale}
        if not full:
            break
        takers = [name for name in takers if name not in full]
    found = {}
    for name, weight in weights.items():
        share = weight * total - pinned.get(name, 0) * scale if name in takers else 0
        below = share // scale
        above = -(-share // scale)
        if exact:
            found[name] = Target(share, scale, below, above)
        else:
            found[name] = Target(share, scale, max(0, above - 1), below + 1)
    return found


def choose_owners(
    current: Sequence[str],
    members: Mapping[str, Eligible],
    *,
    pins: Mapping[int, str] | None = None,
    banned: Mapping[int, Collection[str]] | None = None,
    slow: Mapping[int, Collection[str]] | None = None,
    kept: Collection[int] = (),
    standbys: Sequence[Sequence[str]] = (),
    exact: bool = False,
) -> list[str]:
    """The owner that each shard should have.

    `current` are the present owners; those that are not eligible count as none. A member in
    `banned` or `slow` gets that shard only if no other can: one that is slow rather than none, one
    that is banned if the shard has no owner, because an attempt that fails there too is reported,
    and a shard without an owner would not be. Shards in `kept` stay as they are and do not count. A
    standby is preferred where the balance allows it. If no member is eligible, nothing changes.

    >>> choose_owners(["a", "a", "a", "a"], {"a": Eligible(), "b": Eligible()})
    ['a', 'a', 'a', 'b']
    """
    if not members:
        return list(current)
    pins, banned, slow = pins or {}, banned or {}, slow or {}
    names = sorted(members)
    owners = list(current)
    load = dict.fromkeys(names, 0)
    """Of the shards that are balanced."""
    pinned: Counter[str] = Counter()
    fixed: list[int] = []
    homeless: list[int] = []
    owned: dict[str, list[int]] = {name: [] for name in names}
    for shard, owner in enumerate(current):
        pin = pins.get(shard, NO_MEMBER)
        if shard in kept:
            continue
        if pin in members and pin not in (*banned.get(shard, ()), *slow.get(shard, ())):
            owners[shard] = pin
            pinned[pin] += 1
        elif shard in banned or shard in slow:
            fixed.append(shard)
        elif owner in members:
            owned[owner].append(shard)
            load[owner] += 1
        else:
            homeless.append(shard)
    free = len(homeless) + sum(load.values())
    target = targets(free, members, pinned=pinned, exact=exact)

    def excess(name: str) -> int:
        return load[name] * target[name].scale - target[name].share

    def shed(name: str) -> None:
        homeless.append(owned[name].pop())
        load[name] -= 1

    for name in names:
        while load[name] > target[name].high:
            shed(name)
    needed = sum(max(0, target[name].low - load[name]) for name in names)
    givers = [(-excess(name), name) for name in names if load[name] > target[name].low]
    heapq.heapify(givers)
    while len(homeless) < needed:
        _, name = heapq.heappop(givers)
        shed(name)
        if load[name] > target[name].low:
            heapq.heappush(givers, (-excess(name), name))

    takers = [(excess(name), name) for name in names]
    heapq.heapify(takers)
    for left, shard in zip(range(len(homeless), 0, -1), sorted(homeless), strict=True):
        taker = None
        for column in standbys:
            standby = column[shard] if shard < len(column) else NO_MEMBER
            if standby not in members or load[standby] == target[standby].high:
                continue
            if load[standby] < target[standby].low or left > needed:
                taker = standby
                break
        if taker is None:
            while (found := heapq.heappop(takers))[0] != excess(found[1]):
                heapq.heappush(takers, (excess(found[1]), found[1]))
            taker = found[1]
            heapq.heappush(takers, (excess(taker) + target[taker].scale, taker))
        needed -= load[taker] < target[taker].low
        owners[shard] = taker
        load[taker] += 1

    for shard in fixed:
        fit = [name for name in names if name not in banned.get(shard, ())]
        if not fit and current[shard] == NO_MEMBER:
            fit = names
        allowed = [name for name in fit if name not in slow.get(shard, ())] or fit
        if current[shard] not in allowed:
            owners[shard] = min(allowed, key=excess, default=NO_MEMBER)
            if allowed:
                load[owners[shard]] += 1
    return owners


def choose_standbys(
    owners: Sequence[str],
    members: Mapping[str, Eligible],
    number: int,
    current: Sequence[Sequence[str]] = (),
) -> tuple[tuple[str, ...], ...]:
    """The standbys of each shard: `number` columns, each with one name for each shard.

    A standby that is still suitable stays. Others are taken in turns.

    >>> zones = {"a": Eligible(1, "x"), "b": Eligible(1, "x"), "c": Eligible(1, "y")}
    >>> choose_standbys(["a", "c"], zones, 1)
    (('c', 'a'),)
    """
    if not number:
        return ()
    names = sorted(members)
    several_zones = len({each.zone for each in members.values()}) > 1
    rings: dict[str | None, list[str]] = {}
    turn: Counter[str | None] = Counter()
    columns: list[list[str]] = [[] for _ in range(number)]
    for shard, owner in enumerate(owners):
        home = members[owner].zone if owner in members and several_zones else None
        chosen = [
            column[shard]
            for column in current[:number]
            if shard < len(column)
            and (kept := members.get(column[shard])) is not None
            and column[shard] != owner
            and kept.zone != home
        ]
        chosen = list(dict.fromkeys(chosen))
        if len(chosen) < number:
            ring = rings.setdefault(
                home, [each for each in names if home is None or members[each].zone != home]
            )
            start = turn[home]
            turn[home] += 1
            others = [ring[(start + step) % len(ring)] for step in range(len(ring))]
            used = {members[each].zone for each in chosen}
            # First those of zones that no other standby is in, then any.
            for other_zone_only in (True, False):
                for name in others:
                    if len(chosen) == number:
                        break
                    if name == owner or name in chosen:
                        continue
                    if other_zone_only and members[name].zone in used:
                        continue
                    chosen.append(name)
                    used.add(members[name].zone)
        for rank in range(number):
            columns[rank].append(chosen[rank] if rank < len(chosen) else NO_MEMBER)
    return tuple(map(tuple, columns))
