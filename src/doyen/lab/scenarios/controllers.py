"""A scenario of a controller that assigns the leaders of partitions, as in Kafka.

The brokers' registrations and the controller's election are sessions and campaigns that users run.
The partitions and the brokers are models: `Broker` keeps the highest controller epoch that it has
seen and refuses orders of an earlier one; `CredulousBroker`, the broken variant, obeys all orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from doyen.errors import LeadershipLost
from doyen.lab.scenarios.store_world import StoreWorld, run_store_world
from doyen.lab.scenarios.transcript import Transcript
from doyen.session import Session
from doyen.term import Term

BROKERS = ("broker1", "broker2", "broker3")
PARTITIONS = ("orders-0", "orders-1", "orders-2")
REACH_S = 0.002


class LeaderAndIsr(NamedTuple):
    """An order of a controller: the leader of a partition, and the controller's epoch."""

    controller: str
    controller_epoch: int
    partition: str
    leader: str


class Broker:
    """Obeys the controller of the highest epoch that it has seen."""

    def __init__(self, name: str, world: StoreWorld) -> None:
        self.name = name
        self._world = world
        self.controller_epoch = 0
        self.leaders: dict[str, str] = {}
        self.refused: list[LeaderAndIsr] = []

    def obey(self, order: LeaderAndIsr) -> None:
        if self._is_stale(order):
            self.refused.append(order)
            epochs = f"{order.controller_epoch} is earlier than {self.controller_epoch}"
            self._world.record(self.name, f"refuses an order of {order.controller}: epoch {epochs}")
            return
        self.controller_epoch = order.controller_epoch
        self.leaders[order.partition] = order.leader

    def _is_stale(self, order: LeaderAndIsr) -> bool:
        return order.controller_epoch < self.controller_epoch


class CredulousBroker(Broker):
    """The broken variant: obeys every order."""

    def _is_stale(self, order: LeaderAndIsr) -> bool:
        return False


Making = Callable[[str, StoreWorld], Broker]


class BrokerCluster:
    """Brokers, one of which is the controller."""

    def __init__(self, world: StoreWorld, make: Making) -> None:
        self.world = world
        self.brokers = {name: make(name, world) for name in BROKERS}
        self.terms: list[Term] = []
        self.partitions: tuple[str, ...] = ()
        self.seen_at = 0.0
        """When the result was recorded."""

    def start(self, name: str) -> None:
        async def run(session: Session) -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._register(session, name))
                tasks.create_task(self._campaign(session, name))

        self.world.start(name, run)

    async def _register(self, session: Session, name: str) -> None:
        """A registration that ends with the broker, as in /brokers/ids."""
        async for campaign in session.campaigns(f"/brokers/ids/{name}", name=name):
            async with campaign:
                await asyncio.get_running_loop().create_future()

    async def _campaign(self, session: Session, name: str) -> None:
        async for campaign in session.campaigns("/controller", name=name):
            try:
                async with campaign as term:
                    self.terms.append(term)
                    self.world.record(name, f"is the controller, epoch {term.token}")
                    await self._control(session, name, term)
            except LeadershipLost:
                pass

    async def _control(self, session: Session, name: str, term: Term) -> None:
        """Assign a live leader to each partition."""
        while True:
            alive = [each for each in BROKERS if await session.leader(f"/brokers/ids/{each}")]
            leaders = self.brokers[name].leaders
            for number, partition in enumerate(self.partitions):
                if leaders.get(partition) not in alive:
                    leader = alive[number % len(alive)]
                    self.world.record(name, f"assigns {partition} to {leader}")
                    self.send(LeaderAndIsr(name, term.token, partition, leader), *BROKERS)
            await asyncio.sleep(0.5)

    def send(self, order: LeaderAndIsr, *to: str) -> None:
        """Send an order. It leaves only while the sender runs, and is read only while the receiver
        runs."""
        self.world.loop.call_later(REACH_S, self._arrive, order, to)

    def _arrive(self, order: LeaderAndIsr, to: tuple[str, ...]) -> None:
        for name in to:
            inside = self.world.participants[name].context
            self.world.loop.call_soon(self.brokers[name].obey, order, context=inside)

    def claims(self, partition: str) -> list[str]:
        """The brokers that consider themselves the leader of a partition."""
        return [
            name for name, broker in self.brokers.items() if broker.leaders.get(partition) == name
        ]


async def _fail_over(world: StoreWorld, make: Making) -> BrokerCluster:
    """The controller is paused while an order is under way, and resumes when there is another
    one."""
    cluster = BrokerCluster(world, make)
    for name in BROKERS:
        cluster.start(name)
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.7)
    world.transcript.record_event(world.now, "the topic orders is created, with three partitions")
    cluster.partitions = PARTITIONS
    await asyncio.sleep(1.5)
    broker1 = world.participants["broker1"]
    world.record("broker1", "sends broker1 and broker3 again that broker1 leads orders-0")
    order = LeaderAndIsr("broker1", cluster.terms[0].token, "orders-0", "broker1")
    broker1.context.copy().run(cluster.send, order, "broker1", "broker3")
    broker1.pause()
    await world.until(lambda: cluster.brokers["broker2"].leaders["orders-0"] == "broker2")
    await asyncio.sleep(2.0)
    broker1.resume()
    await asyncio.sleep(0.1)
    cluster.seen_at = world.now
    for name, broker in cluster.brokers.items():
        world.record(name, f"considers {broker.leaders['orders-0']} the leader of orders-0")
    return cluster


def controller(transcript: Transcript, credulous: Making = CredulousBroker) -> None:
    cluster = run_store_world(transcript, lambda world: _fail_over(world, Broker))
    transcript.note("The same with brokers that ignore the epoch (a broken variant); at the end:")
    misled = run_store_world(Transcript(), lambda world: _fail_over(world, credulous))
    for name, broker in misled.brokers.items():
        transcript.record(
            misled.seen_at, name, f"considers {broker.leaders['orders-0']} the leader of orders-0"
        )
    epochs = [term.token for term in cluster.terms]
    transcript.fact(
        "broker1 was the first controller; while it was paused, broker2 was, with a later epoch",
        [term.name for term in cluster.terms[:2]] == ["broker1", "broker2"]
        and epochs == sorted(set(epochs)),
    )
    transcript.fact(
        "the partition of broker1 was assigned to another; the others kept their leaders",
        cluster.brokers["broker2"].leaders
        == {"orders-0": "broker2", "orders-1": "broker2", "orders-2": "broker3"},
    )
    transcript.fact(
        "the late order of broker1 was refused, also by broker1 itself",
        [len(broker.refused) for broker in cluster.brokers.values()] == [1, 0, 1],
    )
    transcript.fact("orders-0 has one leader", cluster.claims("orders-0") == ["broker2"])
    transcript.fact(
        "without epochs the late order was obeyed, and orders-0 had two leaders",
        misled.claims("orders-0") == ["broker1", "broker2"],
    )
