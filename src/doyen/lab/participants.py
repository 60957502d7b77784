"""The machines of a world of whole nodes, by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from doyen.lab.clients import ClientMachine
from doyen.lab.machines import CandidateMachine, NodeMachine, SimulatedMachine
from doyen.lab.processes import Process
from doyen.lab.quorum_plan import CLIENTS
from doyen.quorum.consensus.core import Membership, Role

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld


class Participants:
    """Nodes, candidates and clients of the keyspace."""

    def __init__(self, world: QuorumWorld) -> None:
        self._world = world
        self.machines: dict[str, SimulatedMachine] = {}
        self.dead: list[Process] = []
        """Processes that were killed and replaced."""

    def create(self) -> None:
        world, plan = self._world, self._world.plan
        for number, name in enumerate(plan.names, 1):
            self.machines[name] = NodeMachine(world, name, number, joining=False)
        for number in range(1, plan.clients + 1):
            self.machines[f"c{number}"] = CandidateMachine(world, f"c{number}", 100 + number)
        for number, name in enumerate(CLIENTS, 1):
            self.machines[name] = ClientMachine(world, name, 200 + number)

    def __iter__(self) -> Iterator[SimulatedMachine]:
        return iter(self.machines.values())

    def processes(self) -> list[Process]:
        """All processes that there ever were."""
        return [*self.dead, *(machine.process for machine in self if machine.process)]

    def nodes(self) -> list[NodeMachine]:
        return [machine for machine in self if isinstance(machine, NodeMachine)]

    def leader(self) -> NodeMachine | None:
        """The node that leads in the latest generation."""
        leading = [
            (node.driver.generation, node.number, node)
            for node in self.nodes()
            if node.driver and node.driver.role is Role.LEADING
        ]
        return max(leading, key=lambda each: each[:2])[2] if leading else None

    def add_node(self) -> NodeMachine:
        """Start a new node that waits to be added to the membership."""
        number = 1 + len(self.nodes())
        node = NodeMachine(self._world, f"n{number}", number, joining=True)
        self.machines[node.name] = node
        node.start()
        return node

    def addresses_for(self, node: NodeMachine) -> dict[str, str]:
        """The addresses with which a node is started: the founders' or, if it joins, all nodes'."""
        plan = self._world.plan
        known = [each.name for each in self.nodes()] if node.joining else plan.names
        return {name: f"{name}:1" for name in dict.fromkeys((*known, node.name))}

    def membership_for(self, node: NodeMachine) -> Membership:
        """The membership with which a node is started."""
        addresses = self.addresses_for(node)
        if not node.joining:
            return Membership(self._world.plan.names, (), addresses)
        others = tuple(name for name in addresses if name != node.name)
        return Membership(others, (node.name,), addresses)
