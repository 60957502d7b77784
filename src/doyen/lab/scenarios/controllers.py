"""A scenario of a controller that assigns the leaders of partitions, as in Kafka.

The brokers, the controller, its plan and the partitions' leaders are the shards that users run,
under the eyes of the oracle. The store that compares no versions is the broken variant: there the
late plan of a controller that was replaced is accepted.
"""

from __future__ import annotations

import asyncio
import json
from typing import NamedTuple

from doyen.lab.scenarios.oracle import ManagementOracle
from doyen.lab.scenarios.store_world import StoreWorld, run_store_world
from doyen.lab.scenarios.transcript import Transcript, listed
from doyen.manage.documents import Versioned
from doyen.manage.shards.controller import group_of
from doyen.manage.shards.plan import ShardPlan
from doyen.manage.shards.routing import ShardMap
from doyen.manage.shards.scopes import OwnedShards
from doyen.manage.shards.slots import ShardTerm
from doyen.model import Entry, Leader, Unreachable, shards_key
from doyen.session import Session
from doyen.term import is_valid

BROKERS = ("broker1", "broker2", "broker3")
TOPIC = "orders"
PARTITIONS = 3
PLAN = shards_key(TOPIC, "plan")


class BrokerCluster:
    """Brokers that lead the partitions of a topic. One of them is the controller."""

    def __init__(self, world: StoreWorld) -> None:
        self.world = world
        self.oracle = ManagementOracle(world)
        self.owned: dict[str, OwnedShards] = {}
        self.maps: dict[str, ShardMap] = {}
        """The plan as each broker has last read it."""
        self.controllers: list[Leader] = []
        self.epochs: list[int] = []
        """The tokens of the plans that the store has accepted, in order."""
        self.refused: list[int] = []
        """The tokens of those that it has refused."""
        self.led: list[tuple[int, str]] = []
        """Each partition that got a leader, and its name, in order."""
        world.server.on_put.append(self._written)

    def start(self, name: str) -> None:
        async def run(session: Session) -> None:
            async with session.own_shards(TOPIC, self._lead, name=name) as owned:
                self.owned[name] = owned
                async for current in session.observe_shards(TOPIC):
                    if not isinstance(current, Unreachable):
                        self.maps[name] = current

        self.world.start(name, run)

    async def _lead(self, term: ShardTerm) -> None:
        """The body of a partition: lead it until the term is over."""
        self.oracle.begins(term)
        self.led.append((term.shard, term.name))
        self.world.record(term.name, f"leads {TOPIC}-{term.shard} with token {term.token}")
        await asyncio.get_running_loop().create_future()

    def operate(self) -> None:
        """An operator creates the topic, and observes who is the controller."""

        async def run(session: Session) -> None:
            await session.shards(TOPIC).configure(count=PARTITIONS, min_members=len(BROKERS))
            async for leader in session.observe(group_of(TOPIC)):
                if leader:
                    self.controllers.append(leader)
                    self.world.record(leader.name, f"is the controller, epoch {leader.token}")

        self.world.start("operator", run)

    def ask_for_move(self, partition: int, to: str) -> None:
        async def run(session: Session) -> None:
            self.world.record("admin", f"asks for {TOPIC}-{partition} to be moved to {to}")
            await session.shards(TOPIC).move(partition, to=to, wait_s=600)
            self.world.record("admin", f"is answered: {to} leads {TOPIC}-{partition}")
            await asyncio.get_running_loop().create_future()

        self.world.start("admin", run)

    def _written(self, key: str, value: bytes, entry: Entry | None) -> None:
        if key != PLAN:
            return
        epoch = int(json.loads(value)["token"])
        if entry is None:
            self.refused.append(epoch)
            current = self.world.server.get(PLAN)
            assert current is not None
            self.world.transcript.record_event(
                self.world.now,
                f"the store refuses a plan of epoch {epoch}: the current one is of epoch"
                f" {Versioned.decode(current).token}",
            )
        else:
            self.epochs.append(epoch)

    def planned(self) -> tuple[str, ...]:
        """The leaders of the partitions in the plan that the store has."""
        entry = self.world.server.get(PLAN)
        return () if entry is None else ShardPlan.decode(Versioned.decode(entry).body).owners

    def leaders(self) -> dict[int, list[str]]:
        """Those whose term is valid, by partition."""
        terms = [term for owned in self.owned.values() for term in owned.terms.values()]
        valid = sorted((term.shard, term.name) for term in terms if is_valid(term))
        return {
            partition: [name for shard, name in valid if shard == partition]
            for partition in range(PARTITIONS)
        }

    def believers(self, partition: int) -> list[str]:
        """The brokers that would lead a partition if they went by the plan that they have read."""
        return [name for name in BROKERS if self.maps[name].owners[partition] == name]


class Replaced(NamedTuple):
    """What was seen when the first controller had been replaced."""

    before: tuple[str, ...]
    """The plan before."""
    after: tuple[str, ...]
    leaders: dict[int, list[str]]
    believers: list[str]
    """Who would lead the partition of the first controller by the plan alone."""
    cluster: BrokerCluster


async def _fail_over(world: StoreWorld, *, careless: bool) -> Replaced:
    """The controller is paused while a plan of it is on its way, and replaced."""
    cluster = BrokerCluster(world)
    for name in BROKERS:
        cluster.start(name)
        await asyncio.sleep(0.1)
    cluster.operate()
    await asyncio.sleep(1.7)
    before, arrives = cluster.planned(), asyncio.Event()
    first = cluster.controllers[0].name
    mine, moved = before.index(first), before.index(BROKERS[-1])

    def sent() -> asyncio.Event:
        world.record(first, f"writes a plan with {TOPIC}-{moved} on its way; the request is slow")
        world.participants[first].pause()
        return arrives

    world.intercept(first, "put", PLAN, sent)
    cluster.ask_for_move(moved, first)
    await world.until(lambda: len(cluster.controllers) == 2)
    await world.until(lambda: all(len(names) == 1 for names in cluster.leaders().values()))
    await asyncio.sleep(1.0)
    if careless:
        world.server.careless.add(PLAN)
    world.transcript.record_event(world.now, f"the plan of {first} arrives at the store")
    arrives.set()
    await asyncio.sleep(0.001)
    seen = Replaced(before, cluster.planned(), cluster.leaders(), cluster.believers(mine), cluster)
    world.participants[first].resume()
    await asyncio.sleep(3.0)
    return seen


def controller(transcript: Transcript, *, careless: bool = True) -> None:
    seen = run_store_world(transcript, lambda world: _fail_over(world, careless=False))
    transcript.note("The same with a store that compares no versions (a broken variant):")
    broken = Transcript()
    misled = run_store_world(broken, lambda world: _fail_over(world, careless=careless))
    lines = broken.end().lines
    for line in lines[next(n for n, line in enumerate(lines) if line.endswith("the store")) :]:
        transcript.note(line)
    cluster = seen.cluster
    first, second = cluster.controllers[:2]
    mine = seen.before.index(first.name)
    partition = f"{TOPIC}-{mine}"
    transcript.fact(
        f"{first.name} was the first controller; while it was paused, {second.name} was, with a"
        " later epoch",
        len(cluster.controllers) == 2 and first.token < second.token,
    )
    transcript.fact(
        f"the partition of {first.name} was assigned to another; the others kept their leaders",
        [seen.after[n] != name for n, name in enumerate(seen.before)]
        == [n == mine for n in range(PARTITIONS)],
    )
    transcript.fact(
        f"the late plan of {first.name} was refused, and epochs never went back",
        cluster.refused == [first.token] and cluster.epochs == sorted(cluster.epochs),
    )
    transcript.fact(
        f"by the plans that they had read, {listed(seen.believers)} would both have led"
        f" {partition}; by its record, {listed(seen.leaders[mine])} did",
        seen.believers == [first.name, second.name] and seen.leaders[mine] == [second.name],
    )
    cluster.oracle.report()
    transcript.fact(
        f"without the comparison the late plan was obeyed: {partition} was moved back to"
        f" {first.name}; even so it never had two leaders at once",
        [name for shard, name in misled.cluster.led if shard == mine]
        == [first.name, second.name, first.name]
        and len(misled.cluster.oracle.violations) == 1,
    )
