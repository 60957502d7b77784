"""A scenario of a controller that hands out leaderships of its own, as Kafka's does.

The brokers' registrations and the controller's election are sessions and campaigns that users run.
The partitions are the scenario's own, and so are the brokers that obey: `Broker` keeps the highest
controller epoch that it has seen and refuses what comes under an earlier one; `CredulousBroker`,
the model of what is broken, obeys everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from doyen.errors import LeadershipLost
from doyen.lab.scenarios.place import Place, meet
from doyen.lab.scenarios.play import Script
from doyen.session import Session
from doyen.term import Term

__all__ = ["Broker", "CredulousBroker", "controller"]

BROKERS = ("broker1", "broker2", "broker3")
PARTITIONS = ("orders-0", "orders-1", "orders-2")
REACH_S = 0.002


class LeaderAndIsr(NamedTuple):
    """What a controller tells brokers: who leads a partition, and in which epoch of its own."""

    controller: str
    controller_epoch: int
    partition: str
    leader: str


class Broker:
    """Obeys the controller of the highest epoch it has heard of."""

    def __init__(self, name: str, place: Place) -> None:
        self.name = name
        self._place = place
        self.controller_epoch = 0
        self.leaders: dict[str, str] = {}
        self.refused: list[LeaderAndIsr] = []

    def obey(self, order: LeaderAndIsr) -> None:
        if self._is_stale(order):
            self.refused.append(order)
            epochs = f"{order.controller_epoch} is before {self.controller_epoch}"
            self._place.say(self.name, f"refuses an order of {order.controller}'s: epoch {epochs}")
            return
        self.controller_epoch = order.controller_epoch
        self.leaders[order.partition] = order.leader

    def _is_stale(self, order: LeaderAndIsr) -> bool:
        return order.controller_epoch < self.controller_epoch


class CredulousBroker(Broker):
    """The model: obeys whatever arrives."""

    def _is_stale(self, order: LeaderAndIsr) -> bool:
        return False


Making = Callable[[str, Place], Broker]


class BrokerCluster:
    """Brokers, one of which is the controller."""

    def __init__(self, place: Place, make: Making) -> None:
        self.place = place
        self.brokers = {name: make(name, place) for name in BROKERS}
        self.terms: list[Term] = []
        self.partitions: tuple[str, ...] = ()
        self.seen_at = 0.0
        """When it was last looked at."""

    def start(self, name: str) -> None:
        async def live(session: Session) -> None:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._register(session, name))
                tasks.create_task(self._stand(session, name))

        self.place.member(name, live)

    async def _register(self, session: Session, name: str) -> None:
        """As /brokers/ids does: a registration that lives as the broker does."""
        async for campaign in session.campaigns(f"/brokers/ids/{name}", name=name):
            async with campaign:
                await asyncio.get_running_loop().create_future()

    async def _stand(self, session: Session, name: str) -> None:
        async for campaign in session.campaigns("/controller", name=name):
            try:
                async with campaign as term:
                    self.terms.append(term)
                    self.place.say(name, f"is the controller, epoch {term.token}")
                    await self._control(session, name, term)
            except LeadershipLost:
                pass

    async def _control(self, session: Session, name: str, term: Term) -> None:
        """See that each partition has a leader that is alive."""
        while True:
            alive = [each for each in BROKERS if await session.leader(f"/brokers/ids/{each}")]
            leaders = self.brokers[name].leaders
            for number, partition in enumerate(self.partitions):
                if leaders.get(partition) not in alive:
                    leader = alive[number % len(alive)]
                    self.place.say(name, f"has {leader} lead {partition}")
                    self.send(LeaderAndIsr(name, term.token, partition, leader), *BROKERS)
            await asyncio.sleep(0.5)

    def send(self, order: LeaderAndIsr, *to: str) -> None:
        """It leaves while its sender runs, and is read while its receiver does."""
        self.place.loop.call_later(REACH_S, self._arrive, order, to)

    def _arrive(self, order: LeaderAndIsr, to: tuple[str, ...]) -> None:
        for name in to:
            inside = self.place.members[name].process.context
            self.place.loop.call_soon(self.brokers[name].obey, order, context=inside)

    def claims(self, partition: str) -> list[str]:
        """Who, of all, take themselves for the partition's leader."""
        return [
            name for name, broker in self.brokers.items() if broker.leaders.get(partition) == name
        ]


async def _fail_over(place: Place, make: Making) -> BrokerCluster:
    """The controller is frozen with an order under way, and wakes when another controls."""
    cluster = BrokerCluster(place, make)
    for name in BROKERS:
        cluster.start(name)
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.7)
    place.script.happens(place.now, "the topic orders is made, with three partitions")
    cluster.partitions = PARTITIONS
    await asyncio.sleep(1.5)
    broker1 = place.members["broker1"]
    place.say("broker1", "sends broker1 and broker3 once more that broker1 leads orders-0")
    order = LeaderAndIsr("broker1", cluster.terms[0].token, "orders-0", "broker1")
    broker1.process.context.copy().run(cluster.send, order, "broker1", "broker3")
    broker1.freeze()
    await place.until(lambda: cluster.brokers["broker2"].leaders["orders-0"] == "broker2")
    await asyncio.sleep(2.0)
    broker1.thaw()
    await asyncio.sleep(0.1)
    cluster.seen_at = place.now
    for name, broker in cluster.brokers.items():
        place.say(name, f"takes {broker.leaders['orders-0']} for the leader of orders-0")
    return cluster


def controller(script: Script, credulous: Making = CredulousBroker) -> None:
    """Leaders of partitions, made by a leader."""
    cluster = meet(script, lambda place: _fail_over(place, Broker))
    script.note("The same with brokers that do not look at the epoch (the model); in the end:")
    misled = meet(Script(), lambda place: _fail_over(place, credulous))
    for name, broker in misled.brokers.items():
        script.say(
            misled.seen_at, name, f"takes {broker.leaders['orders-0']} for the leader of orders-0"
        )
    epochs = [term.token for term in cluster.terms]
    script.fact(
        "broker1 was the first controller; when it froze, broker2 was, under a later epoch",
        [term.name for term in cluster.terms[:2]] == ["broker1", "broker2"]
        and epochs == sorted(set(epochs)),
    )
    script.fact(
        "the partition that broker1 led was given to another; the others kept their leaders",
        cluster.brokers["broker2"].leaders
        == {"orders-0": "broker2", "orders-1": "broker2", "orders-2": "broker3"},
    )
    script.fact(
        "the order that broker1 had under way came too late, and was refused, by broker1 as well",
        [len(broker.refused) for broker in cluster.brokers.values()] == [1, 0, 1],
    )
    script.fact("orders-0 has one leader", cluster.claims("orders-0") == ["broker2"])
    script.fact(
        "without epochs the late order was obeyed, and orders-0 had two leaders",
        misled.claims("orders-0") == ["broker1", "broker2"],
    )
