"""Leases in a storm: real drivers, cores and services in virtual time, while nodes crash and are
cut off. No lease may end while its holder, who counts from when it asked, still believes in it, and
tokens increase."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from doyen.quorum.consensus.core import Membership
from doyen.quorum.keyspace.commands import Create, Grant, LeaseGranted, Written
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.node import StateMachine
from doyen.quorum.node.replicated import KEYSPACE, ReplicatedMachines
from doyen.quorum.node.service import Service
from doyen.quorum.protocol.requests import ErrorCode, Failed, LeaseRenewed, RenewLease
from doyen.testing.virtual import run_virtual
from drivers import World, misfortune, revive
from mutants_nodes import era_ignored
from test_quorum_service import Client

TTL_S = 1.5
PATIENCE_S = 0.6
HOLDERS = 4


class Watched(Keyspace):
    """Tells when leases end."""

    storm: Storm

    def _end(self, leases: tuple[int, ...]) -> None:
        alive = [lease for lease in leases if self.lease(lease) is not None]
        super()._end(leases)
        for lease in alive:
            self.storm.ended(lease)


class WithKeyspace(ReplicatedMachines):
    keyspaces: type[Watched] = Watched

    def __init__(self, targets: Mapping[int, StateMachine]) -> None:
        self.keyspace = self.keyspaces()
        super().__init__({**targets, KEYSPACE: self.keyspace})


class Storm(World):
    """Nodes that serve holders of leases. `wrong` says what must not be."""

    def __init__(self, seed: int, machine: type[WithKeyspace] = WithKeyspace) -> None:
        super().__init__(seed, machine=machine)
        self.serving: dict[str, Service] = {}
        self.believed: dict[int, float] = {}
        self.token = 0
        self.wrong: list[str] = []
        self.renewed = self.won = 0
        self._names = 0

    async def boot_one(self, name: str, membership: Membership | None = None) -> None:
        await super().boot_one(name, membership)
        driver = self.nodes.get(name)
        if driver is not None:
            machine = driver.machine
            assert isinstance(machine, WithKeyspace)
            machine.keyspace.storm = self
            self.serving[name] = Service(driver, machine.keyspace, self.clock)

    def crash(self, node: str, written: int | None = None) -> None:
        super().crash(node, written)
        self.serving.pop(node).close()

    def ended(self, lease: int) -> None:
        """On some node; on the first of them, it is news."""
        if self.clock.now() < self.believed.get(lease, 0.0):
            self.wrong.append(
                f"{lease} ended at {self.clock.now():.3f}, believed in until"
                f" {self.believed[lease]:.3f}"
            )

    async def ask(self, request: Any, *commands: Any) -> Any:
        """Ask any node that serves; None if it does not answer in time."""
        serving = [each for each in self.serving.values() if each.serving]
        if not serving:
            await asyncio.sleep(0.05)
            return None
        self._names += 1
        client = Client(self.random.choice(serving), f"client-{self._names}")
        try:
            async with asyncio.timeout(PATIENCE_S):
                if commands:
                    return await client.do(1, *commands)
                return await client.answer(request)
        except TimeoutError:
            return None
        finally:
            client.close()

    async def hold(self, until: float) -> None:
        """Have a lease, try for the record, renew; now and then fall silent for good."""
        now = self.clock.now
        while now() < until:
            sent_at = now()
            granted = await self.ask(None, Grant(TTL_S))
            if not isinstance(granted, LeaseGranted):
                continue
            lease = granted.lease
            self.believed[lease] = sent_at + TTL_S
            await self._campaign(lease)
            lives_until = now() + self.random.uniform(0.0, 8.0)
            while now() < min(until, lives_until):
                await asyncio.sleep(self.random.uniform(0.1, TTL_S * 0.5))
                sent_at = now()
                answer = await self.ask(RenewLease(-1, lease))
                if isinstance(answer, LeaseRenewed):
                    self.renewed += 1
                    self.believed[lease] = max(self.believed[lease], sent_at + TTL_S)
                elif isinstance(answer, Failed) and answer.code is ErrorCode.LEASE_GONE:
                    break
                if self.random.random() < 0.3:
                    await self._campaign(lease)

    async def _campaign(self, lease: int) -> None:
        if self.clock.now() >= self.believed[lease]:
            return
        result = await self.ask(None, Create("leader", b"%d" % lease, lease))
        if isinstance(result, Written):
            self.won += 1
            if result.revision <= self.token:
                self.wrong.append(f"token {result.revision} after {self.token}")
            self.token = result.revision

    async def run(self, seconds: float = 25.0) -> Storm:
        await self.boot()
        until = self.loop.time() + seconds
        async with asyncio.TaskGroup() as tasks:
            for _ in range(HOLDERS):
                tasks.create_task(self.hold(until))
            tasks.create_task(misfortune(self, until))
        self.heal()
        self.loss = 0.0
        await revive(self)
        await self.leader()
        await self.until(lambda: all(each.serving for each in self.serving.values()))
        await asyncio.sleep(4 * TTL_S)
        machines = [node.machine for node in self.nodes.values()]
        left = {len(each.keyspace) for each in machines if isinstance(each, WithKeyspace)}
        if left != {0}:
            self.wrong.append(f"{left} entries outlived their leases")
        self.wrong += [f"{name}: {error!r}" for name, error in self.aborted]
        return self


def storm(seed: int, machine: type[WithKeyspace] = WithKeyspace) -> Storm:
    async def main() -> Storm:
        return await Storm(seed, machine).run()

    return run_virtual(main)


@pytest.mark.parametrize("seed", range(8))
def test_no_client_relies_on_a_lease_that_has_ended(seed: int) -> None:
    weather = storm(seed)
    assert not weather.wrong, weather.wrong[:3]
    assert weather.renewed > 20
    assert weather.won


def test_ends_without_an_era_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    era_ignored(monkeypatch)
    assert any("believed" in each for seed in range(15, 115) for each in storm(seed).wrong)
