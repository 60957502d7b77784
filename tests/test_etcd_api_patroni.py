"""Patroni on a quorum's etcd API, with two PostgreSQL servers: the primary is killed, frozen and
cut off, and hands over on request, while writes are counted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise

import psycopg
import pytest

import servers
from etcd_door import Door, DoorCluster
from servers.patroni import TTL_S, Patroni

pytestmark = pytest.mark.chaos

POLL_S = 0.1
PATIENCE_S = 120.0
WRITERS = 3
ANSWER_S = 3.0


@dataclass
class Scene:
    """The quorum, the two members, and the links between the first of them and the quorum."""

    quorum: DoorCluster
    members: list[Patroni]
    links: list[servers.Proxy]

    def primary(self) -> Patroni | None:
        for member in self.members:
            if member.alive and not member.frozen:
                try:
                    if member.leads():
                        return member
                except (OSError, ValueError):
                    continue
        return None

    def other(self, member: Patroni) -> Patroni:
        return next(each for each in self.members if each is not member)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for a condition. A member that does not answer means that it does not hold."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    if await asyncio.to_thread(holds):
                        return
                except (OSError, ValueError, KeyError):
                    pass
                await asyncio.sleep(POLL_S)

    async def leads(self, member: Patroni) -> None:
        await self.until(lambda: self.primary() is member)

    async def synchronous(self) -> Patroni:
        """Wait until the standby is a synchronous one. Returns the primary."""

        def holds() -> bool:
            primary = self.primary()
            if primary is None:
                return False
            roles = primary.roles()
            return roles == {primary.name: "leader", self.other(primary).name: "sync_standby"}

        await self.until(holds)
        primary = self.primary()
        assert primary is not None
        return primary


@dataclass
class Writes:
    """What writers were told that it is committed."""

    databases: list[str]
    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    _last: int = 0

    @property
    def _address(self) -> str:
        hosts, ports = zip(*(each.split(":") for each in self.databases), strict=True)
        return (
            f"host={','.join(hosts)} port={','.join(ports)} user=postgres dbname=postgres"
            " target_session_attrs=read-write connect_timeout=2"
        )

    async def connect(self) -> psycopg.AsyncConnection[tuple[object, ...]]:
        return await psycopg.AsyncConnection.connect(self._address, autocommit=True)

    async def write(self, writer: int) -> None:
        """Write numbers, each once. What is interrupted may be written or not."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    connection = await self.connect()
            except (psycopg.Error, TimeoutError):
                await asyncio.sleep(POLL_S)
                continue
            warnings: list[object] = []
            connection.add_notice_handler(warnings.append)
            try:
                while True:
                    self._last += 1
                    number = self._last
                    async with asyncio.timeout(ANSWER_S):
                        await connection.execute(
                            "INSERT INTO written VALUES (%s, %s)", (writer, number)
                        )
                    if not warnings:  # it warns of a commit that the standby may not have
                        self.acknowledged.append((writer, number))
                        self.times.append(time.monotonic())
                    warnings.clear()
            except (psycopg.Error, TimeoutError):
                pass
            finally:
                connection.pgconn.finish()  # a frozen server would not answer a farewell

    async def more(self) -> None:
        """Wait until writes succeed."""
        seen = len(self.acknowledged)
        async with asyncio.timeout(PATIENCE_S):
            while len(self.acknowledged) < seen + 20:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    async def check(self) -> int:
        """Compare what is there with what was acknowledged. Returns the number of rows."""
        expected = {*self.acknowledged}
        connection = await self.connect()
        try:
            rows = await (await connection.execute("SELECT * FROM written")).fetchall()
        finally:
            await connection.close()
        assert len(rows) == len({*rows})
        assert {*rows} >= expected, "acknowledged and lost"
        return len(rows)

    def pause(self, since: float) -> float:
        """The longest time without an acknowledged write."""
        times = [since, *(each for each in self.times if each > since), time.monotonic()]
        return max(after - before for before, after in pairwise(times))


@pytest.fixture
def scene() -> Iterator[Scene]:
    with ExitStack() as stack:
        quorum = stack.enter_context(DoorCluster(3))
        links = [stack.enter_context(servers.Proxy(Door(each.ports[1]))) for each in quorum.members]
        addresses = [each.door for each in quorum.members]
        # One uses only the links, which can be cut; the other finds the nodes by itself.
        first = Patroni("p1", [f"127.0.0.1:{link.port}" for link in links], proxied=True)
        stack.enter_context(first)
        second = stack.enter_context(Patroni("p2", addresses[:1]))
        yield Scene(quorum, [first, second], links)


async def campaign(scene: Scene) -> None:
    first, second = scene.members
    await scene.leads(first)
    assert await scene.synchronous() is first
    writes = Writes([each.database for each in scene.members])
    connection = await writes.connect()
    await connection.execute("CREATE TABLE written (writer int, number int)")
    await connection.close()
    tasks = [asyncio.create_task(writes.write(each)) for each in range(WRITERS)]

    async def stage(name: str, since: float) -> None:
        await writes.more()
        pause = writes.pause(since)
        rows = await writes.check()
        print(f"{name}: {pause:.1f} s without writes, {rows} rows", flush=True)

    await writes.more()
    # A node of the quorum dies: nothing happens to PostgreSQL.
    began = time.monotonic()
    leader = await asyncio.to_thread(scene.quorum.leader)
    await asyncio.to_thread(leader.kill)
    await writes.more()
    await asyncio.sleep(TTL_S / 2)
    assert writes.pause(began) < ANSWER_S
    assert scene.primary() is first
    await asyncio.to_thread(leader.restart)
    await stage("a node of the quorum killed", began)

    began = time.monotonic()
    await asyncio.to_thread(first.switch, second.name)
    await scene.leads(second)
    await stage("switchover", began)

    assert await scene.synchronous() is second
    began = time.monotonic()
    await asyncio.to_thread(second.kill)
    await scene.leads(first)
    await stage("primary killed", began)
    await asyncio.to_thread(second.start)

    assert await scene.synchronous() is first
    began = time.monotonic()
    for link in scene.links:
        await asyncio.to_thread(link.cut)
    await scene.leads(second)
    await stage("primary cut off", began)
    for link in scene.links:
        await asyncio.to_thread(link.heal)

    assert await scene.synchronous() is second
    began = time.monotonic()
    await asyncio.to_thread(second.freeze)
    await scene.leads(first)
    await writes.more()
    await asyncio.to_thread(second.thaw)
    await stage("primary frozen", began)

    assert await scene.synchronous() is first
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await writes.check()
    print(f"{len(writes.acknowledged)} writes were acknowledged", flush=True)


def test_patroni(scene: Scene) -> None:
    """No acknowledged write is lost, and the cluster is whole again after each fault."""
    asyncio.run(campaign(scene))
