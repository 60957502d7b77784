"""A warden on a quorum with a silent node, which does not delay the successor of a killed leader.

Whole nodes, sessions and the ends of leases run in the lab, in virtual time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from doyen.election.options import SessionSettings
from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable
from doyen.events import Elected, Record
from doyen.lab.machines import CLIENT_SECRET, NodeMachine, SimulatedMachine
from doyen.lab.plan import Latencies, Plan
from doyen.lab.quorum import Participants, QuorumWorld
from doyen.lab.quorum_checkers import TermChecker
from doyen.lease.runtime import InlineRuntime
from doyen.model import Lease
from doyen.quorum.keyspace.commands import Revoke
from doyen.session import Session
from doyen.stores.port import Context, Store, StoreURL, open_store
from doyen.stores.quorum import make_store
from doyen.stores.quorum.connection import PATIENCE_S
from doyen.stores.quorum.store import QuorumStore
from doyen.warden.ending import KeptStores, LeaseEnder, Witness
from doyen.warden.table import WardedLease
from doyen.warden.wire import Hello

TTL_S = 2.0
FAILOVER_S = 0.05
NOTICED_S = TTL_S / 3 + 2 * PATIENCE_S
"""After this time, sessions have left a node that is silent."""
PLAN = Plan(
    protocol="raft",
    nodes=3,
    seed=1,
    for_s=60.0,
    world="quorum",
    clients=0,
    pause_s=3.0,
    latencies=Latencies(latency_s=0.0003, fsync_s=0.002),
    election_timeout_s=0.5,
)
URL = f"doyen://{CLIENT_SECRET}@n1:1,n2:1,n3:1"


class Candidate(SimulatedMachine):
    """A candidate that leads until it is killed."""

    lease = ""

    async def run(self) -> None:
        terms = self.world.terms
        settings = SessionSettings(
            url=URL, ttl_s=TTL_S, stop_budget_s=0.01, sinks=(terms.on_record, self._record)
        )
        store = await open_store(URL, Context(self.clock, lambda _: None))
        runtime = InlineRuntime(self.clock, self.rng.getrandbits(32))
        async with (
            Session(settings, runtime, store) as session,
            session.campaign("e", name=self.name) as term,
        ):
            terms.entered(self.name, term)
            await asyncio.get_running_loop().create_future()

    def _record(self, record: Record) -> None:
        if isinstance(record.event, Elected):
            self.lease = record.event.lease


class WardenProcess(SimulatedMachine):
    """The part of a warden that talks to the store."""

    store: QuorumStore

    async def run(self) -> None:
        self._stores = KeptStores(self._open)
        self._stores.acquire(URL)
        witness = Witness(self.clock, "warden")
        self._ender = LeaseEnder(self._stores, witness, self.clock, give_up_s=60.0)

    async def _open(self, url: str) -> Store:
        context = Context(self.clock, lambda _: None, create=False, ends_only=True)
        store = await open_store(url, context)
        assert isinstance(store, QuorumStore)
        self.store = store
        await store.rehearse()
        return store

    @property
    def nodes(self) -> list[str]:
        """The nodes that it is connected to."""
        connections = self.store._requests, self.store._renewals
        return [each.node.split(":")[0] for each in connections if each.node]

    def holder_died(self, lease: str) -> None:
        assert self.process is not None
        warded = WardedLease(lease, TTL_S, self.store.warrant(Lease(lease, TTL_S)))
        hello = Hello(session="s", url=URL, request_timeout_s=TTL_S / 6)
        self.process.start(self._ender.end(hello, [warded]))


class Terms(TermChecker):
    def died(self, name: str) -> None:
        """The kernel has ended whatever this process did in its term."""
        self._valid = [(each, term) for each, term in self._valid if each != name]


class Nodes(Participants):
    def create(self) -> None:
        for number, name in enumerate(self._world.plan.names, 1):
            self.machines[name] = NodeMachine(self._world, name, number, joining=False)


class WardenWorld(QuorumWorld):
    """Three nodes, two candidates, and their warden; `story` tells what happens to them."""

    def __init__(self, seed: int, story: Callable[[WardenWorld], Awaitable[None]]) -> None:
        super().__init__(PLAN.replace(seed=seed))
        self.participants = Nodes(self)
        self.terms = self.checker = Terms(self)
        self.story = story
        self.failover_s = 0.0
        self.warden: WardenProcess

    async def _run_faults(self) -> None:
        await self.until(self.participants.leader)
        await asyncio.sleep(0.3)  # every node knows the leader
        self.warden = WardenProcess(self, "w", 300)
        for machine in (self.warden, Candidate(self, "c1", 101), Candidate(self, "c2", 102)):
            self.participants.machines[machine.name] = machine
            machine.start()
        await self.until(lambda: self.terms.holder)
        await asyncio.sleep(TTL_S)
        await self.story(self)

    async def _heal(self) -> None:
        """The story tells all that matters."""

    async def until(self, reached: Callable[[], object]) -> None:
        async with asyncio.timeout(20.0):
            while not reached():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def kill_node(self, name: str) -> None:
        """Kill a node and start it again. Returns when it follows or leads."""
        machine = self.participants.machines[name]
        assert isinstance(machine, NodeMachine)
        machine.stop(power_loss=False)
        await asyncio.sleep(1.0)
        machine.start()
        await self.until(lambda: machine.driver is not None and machine.driver.leader)

    async def freeze_node(self, name: str) -> None:
        """Freeze a node. Returns when sessions have noticed, and the quorum has a leader."""
        process = self.participants.machines[name].process
        assert process is not None
        process.pause()
        await asyncio.sleep(NOTICED_S)

        def another_leads() -> bool:
            leader = self.participants.leader()
            return leader is not None and leader.name != name

        await self.until(another_leads)

    async def kill_holder(self) -> None:
        """Kill the leader, and measure how long it takes until the other candidate leads."""
        holder, terms, began = self.terms.holder, self.terms.count, self.loop.time()
        assert holder is not None
        machine = self.participants.machines[holder]
        assert isinstance(machine, Candidate)
        machine.stop(power_loss=False)
        self.checker.died(holder)
        self.warden.holder_died(machine.lease)
        await self.until(lambda: self.terms.count > terms)
        self.failover_s = self.loop.time() - began


async def silent(world: WardenWorld) -> None:
    """The node that the warden's requests go to is frozen."""
    await world.freeze_node(world.warden.nodes[0])
    await world.kill_holder()


async def silent_next(world: WardenWorld) -> None:
    """The node that the warden's requests go to dies, and then the next one is frozen."""
    node = world.warden.nodes[0]
    await world.kill_node(node)
    names = world.plan.names
    await world.freeze_node(names[(names.index(node) + 1) % len(names)])
    await world.kill_holder()


@pytest.mark.parametrize("story", [silent, silent_next])
@pytest.mark.parametrize("seed", range(2))
def test_a_silent_node_does_not_delay_the_end_of_a_dead_leader(
    seed: int, story: Callable[[WardenWorld], Awaitable[None]]
) -> None:
    world = WardenWorld(seed, story)
    outcome = world.run()
    assert outcome.ok, outcome.violations
    assert 0 < world.failover_s < FAILOVER_S


UNAVAILABLE, UNKNOWN, UNUSABLE = StoreUnavailable("a"), OutcomeUnknown("b"), StoreUnusable("c")


@pytest.mark.parametrize(
    ("outcomes", "raised"),
    [
        ((None, UNUSABLE), None),
        ((UNAVAILABLE, None), None),
        ((UNKNOWN, UNAVAILABLE), UNKNOWN),
        ((UNAVAILABLE, UNKNOWN), UNKNOWN),
        ((UNUSABLE, UNAVAILABLE), UNAVAILABLE),
        ((UNUSABLE, UNKNOWN), UNKNOWN),
        ((UNUSABLE, UNUSABLE), UNUSABLE),
    ],
)
async def test_a_lease_ends_over_either_connection(
    monkeypatch: pytest.MonkeyPatch,
    outcomes: tuple[StoreError | None, StoreError | None],
    raised: StoreError | None,
) -> None:
    """If both fail, the error is one after which the warden tries again, where there is one."""
    store = make_store(StoreURL.parse("doyen://n1:1,n2:1"))

    def write(outcome: StoreError | None) -> Callable[[Any], Awaitable[None]]:
        async def carry_out(command: Any) -> None:
            assert command == Revoke(7)
            if outcome is not None:
                raise outcome

        return carry_out

    for connection, outcome in zip((store._requests, store._renewals), outcomes, strict=True):
        monkeypatch.setattr(connection, "write", write(outcome))
    ending = store.end(store.warrant(Lease("7", TTL_S)))
    if raised is None:
        await ending
    else:
        with pytest.raises(type(raised)):
            await ending
    await store.close()
