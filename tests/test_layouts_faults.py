"""One line of candidates of doyen, `etcdctl elect` and python-etcd3 through the etcd door of a
quorum whose nodes are killed, frozen and cut off. See `mixed_line` for what is checked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import servers
from doyen.model import Entry
from doyen.stores.etcd.concurrency import ConcurrencyStore
from etcd_door import Door, DoorNode
from fixtures import run_within
from mixed_line import TTL_S, Elect, Etcd3, MixedLine, Ours
from servers.cluster import Cluster
from test_layouts_adversary import only_ours

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("etcd3_program")]

WITHIN_S = 600.0


class DeafenedNode(DoorNode):
    """A node whose peers reach it through a link. Without it, it hears nothing from them: it knows
    no leader, and clients still reach it."""

    links: dict[str, servers.Proxy]
    """Of all nodes."""

    @property
    def addresses(self) -> dict[str, str]:
        return {name: f"127.0.0.1:{link.port}" for name, link in self.links.items()}

    def command(self) -> list[str]:
        return [*super().command(), f"--listen={self.address}"]


class DeafenedCluster(Cluster[DeafenedNode]):
    member = DeafenedNode


class Faults:
    """A quorum and its networks."""

    def __init__(self, stack: ExitStack) -> None:
        self.cluster = DeafenedCluster(3)

        def link(port: int) -> servers.Proxy:
            return stack.enter_context(servers.Proxy(Door(port)))

        members = self.cluster.members
        self._peers = {each.name: link(each.port) for each in members}
        self.doors = {each.name: link(each.ports[1]) for each in members}
        for each in members:
            each.links = self._peers
        stack.enter_context(self.cluster)

    @property
    def addresses(self) -> list[str]:
        return [f"127.0.0.1:{link.port}" for link in self.doors.values()]

    def begin(self, fault: str, node: DoorNode) -> Callable[[], Any]:
        """Returns what ends the fault."""
        if fault == "cut":
            self.doors[node.name].cut()
            return self.doors[node.name].heal
        if fault == "deafen":
            self._peers[node.name].cut()
            return self._peers[node.name].heal
        if fault == "freeze":
            node.freeze()
            return node.thaw
        node.kill()
        return node.start


@pytest.fixture(scope="module")
def faults() -> Iterator[Faults]:
    with ExitStack() as stack:
        yield Faults(stack)


def mixed(faults: Faults, name: str) -> MixedLine:
    return MixedLine(name, [each.door for each in faults.cluster.members], faults.addresses)


def run(trial: Any) -> None:
    run_within(trial, WITHIN_S)


@pytest.mark.parametrize("fault", ["kill", "freeze", "cut", "deafen"])
def test_a_node_fails_under_a_mixed_line(faults: Faults, fault: str) -> None:
    """Each node in turn, its leader among them. While it lasts, the leader of the line is replaced
    twice, and every observer is told, so watches that were at this node go on at another one."""

    async def trial() -> None:
        async with mixed(faults, fault).running(Ours, Ours, Elect, Etcd3) as line:
            await line.crowd(4)
            await line.holder()
            for node in faults.cluster.members:
                assert faults.doors[node.name].connections, "clients are at this node"
                end = await asyncio.to_thread(faults.begin, fault, node)
                try:
                    for _ in range(2):
                        await line.turn()
                        await line.crowd(3)
                finally:
                    await asyncio.to_thread(end)
                await asyncio.to_thread(faults.cluster.leader)
                await line.crowd(4)
            while not {"ours", "etcdctl", "etcd3"} <= {kind for kind, _ in line.terms}:
                await line.turn()
            terms = await line.judge()
            waits = {each: round(seconds, 1) for each, seconds in line.waits.items()}
            print(f"{fault}: {line.samples} samples, terms {terms}, waits in s {waits}")

    run(trial())


def test_a_quorum_without_a_majority(faults: Faults) -> None:
    """A candidate of doyen stops in time, though nothing tells it that its lease has ended. When
    the nodes are back, the line goes on."""

    async def trial() -> None:
        async with mixed(faults, "majority").running(Ours, Ours, Etcd3) as line:
            await line.crowd(3)
            candidate, place = await line.holder()
            while not isinstance(candidate, Ours):
                await candidate.leave()
                candidate, place = await line.holder(place.revision)
            term = candidate.term
            assert term is not None
            frozen = faults.cluster.members[:2]
            for node in frozen:
                await asyncio.to_thread(node.freeze)
            began = asyncio.get_running_loop().time()
            try:
                await line.until(lambda: not term.valid, "the term has ended")
                assert asyncio.get_running_loop().time() - began < 2 * TTL_S
            finally:
                for node in frozen:
                    await asyncio.to_thread(node.thaw)
            await line.holder(place.revision)
            await line.judge()

    run(trial())


def test_the_oracle_sees_a_term_without_a_key(faults: Faults) -> None:
    """The lease is revoked while its holder is cut off and cannot know it."""

    async def trial() -> None:
        async with mixed(faults, "revoked").running(Ours) as line:
            candidate, place = await line.holder()
            assert isinstance(candidate, Ours)
            for link in candidate.links:
                link.cut()
            await line.revoke(place.key)
            await line.until(lambda: bool(line.objections), "the oracle objects")
            assert "is valid, and" in line.objections[0]
            for link in candidate.links:
                link.heal()

    run(trial())


async def nobody(self: ConcurrencyStore, ticket: Entry) -> Entry | None:
    """A mutant that sees nobody ahead."""


def test_the_oracle_sees_two_leaders(faults: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates of doyen that do not count those of other programs."""

    async def trial() -> None:
        async with mixed(faults, "two").running(Etcd3) as line:
            await line.until(lambda: line.candidates[0].claim is not None, "etcd3 leads")
            line.add(Ours)
            await line.until(lambda: bool(line.objections), "the oracle objects")

    monkeypatch.setattr(ConcurrencyStore, "_first", only_ours)
    monkeypatch.setattr(ConcurrencyStore, "_before", nobody)
    run(trial())
