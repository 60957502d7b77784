"""The administrator of a simulated quorum, who changes the membership and transfers leadership.

Requests may be refused or get no answer while there are faults, so each is repeated, on one node
after another, until it succeeds.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from doyen.errors import DoyenError
from doyen.lab.files import Files
from doyen.lab.machines import NodeMachine

if TYPE_CHECKING:
    from doyen.lab.quorum import QuorumWorld

ATTEMPTS = 10
"""How often a request is made on one node."""
ATTEMPT_S = 4.0
"""How long a request may take before it is made on another node."""
PAUSE_S = 0.2


class Administrator:
    """Changes the membership, one change after the other."""

    def __init__(self, world: QuorumWorld) -> None:
        self._world = world
        self.pending: dict[str, None] = {}
        """Nodes that are being added or removed, or have to be."""
        self._tasks: dict[asyncio.Task[None], None] = {}

    def change(self, node: NodeMachine, *requests: tuple[str, str]) -> None:
        """Make requests about a node, after those made before."""
        self.pending[node.name] = None
        before = [*self._tasks]

        async def make() -> None:
            if before:
                await asyncio.wait(before)
            await self._make_all(node, requests)
            if requests[-1][0] == "promote":
                self.pending.pop(node.name, None)

        task = self._world.create_task(make())
        self._tasks[task] = None
        task.add_done_callback(lambda _: self._tasks.pop(task, None))

    def close(self) -> None:
        for task in [*self._tasks]:
            task.cancel()

    def transfer(self, name: str) -> None:
        """Ask for a transfer of leadership to a node, or with "" to any node."""
        via = self._usable_node()
        if via is not None:
            assert via.process is not None
            via.process.start(self._make(via, "transfer", name))

    async def _make_all(self, node: NodeMachine, requests: tuple[tuple[str, str], ...]) -> None:
        """Make requests until each has succeeded. `empty` starts the node again as one that
        joins."""
        for request, name in requests:
            if request == "empty":
                self._world.report(node.name, "is emptied, to join again")
                node.stop(power_loss=False)
                node.files, node.data_lost, node.joining = Files(), False, True
                node.start()
                continue
            done = False
            while not done:
                via = self._usable_node()
                if via is None or via.process is None:
                    await asyncio.sleep(PAUSE_S)
                    continue
                task = via.process.start(self._make(via, request, name))
                await asyncio.wait({task}, timeout=ATTEMPT_S)
                done = task.done() and not task.cancelled() and task.exception() is None
                done = done and task.result()
                task.cancel()

    def _usable_node(self) -> NodeMachine | None:
        """The leader, or else any node that is up and has its data."""
        participants = self._world.participants
        return next(
            (
                node
                for node in (participants.leader(), *participants.nodes())
                if node is not None and node.driver is not None and not node.data_lost
            ),
            None,
        )

    async def _make(self, via: NodeMachine, request: str, name: str) -> bool:
        """Make a request in a node's own process. False if it was refused every time."""
        driver = via.driver
        assert driver is not None
        if request == "transfer":
            text = f"transfer leadership to {name or 'another node'}"
        else:
            text = f"{request} {name}"
        self._world.report(via.name, f"is asked to {text}")
        for _ in range(ATTEMPTS):
            try:
                await driver.admin.perform(request, name, f"{name}:1")
            except DoyenError:
                await asyncio.sleep(PAUSE_S)
            else:
                return True
        return False
