"""Clients served under load, and nodes short of room, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import statistics

import pytest

from doyen.quorum.consensus.core import Disconnected
from doyen.quorum.keyspace.commands import (
    Create,
    Delete,
    Done,
    EntryExists,
    Put,
    Revoke,
    Written,
    decode_result,
    encode,
)
from doyen.quorum.keyspace.versions import FIRST
from doyen.quorum.node import disk_space
from doyen.quorum.node.clients import PIECE
from doyen.quorum.node.driver import Driver
from doyen.quorum.node.replicated import USER
from doyen.quorum.protocol.connection import BOUND, HIGH_WATER
from doyen.quorum.protocol.frames import MAX_FRAME
from doyen.quorum.protocol.requests import (
    MAX_VALUE,
    MAX_WRITES,
    Administer,
    Ahead,
    ErrorCode,
    Failed,
    FoundEntry,
    Get,
    Head,
    LeaseRenewed,
    RenewLease,
    Scan,
    Write,
)
from doyen.testing.virtual import run_virtual
from drivers import World, follower_of, run_world
from test_driver import SMALL
from test_quorum_service import TTL_S, Client, Quorum, granted, on_quorum


def test_answers_wait_until_the_client_takes_them() -> None:
    async def test(quorum: Quorum) -> None:
        service = quorum.services["n1"]
        client, other = Client(service), Client(service, "another-client")
        await client.do(1, Put("k", b"old", 0))
        client.congested = True
        client.put(*(Get(-n, "k") for n in range(1, 41)))
        await asyncio.sleep(0.1)
        assert not any(isinstance(each, FoundEntry) for each in client.received)
        # Nothing more is taken from this client, and others are served.
        client.put(Write(1, [2], [encode(Put("k", b"unread", 0))]))
        await asyncio.sleep(0.1)
        assert 2 not in client.results
        assert isinstance(await other.do(1, Put("l", b"", 0)), Written)
        client.congested = False
        for n in range(1, 41):
            assert (await client.answer_to(-n)).entry.value == b"old"
        await client.answer_to(2)
        assert not client.faults

    on_quorum(test)


class Slow(Client):
    """Has a queue like that of a connection, which its reader empties every millisecond."""

    queued = most = 0
    reading = False

    def send(self, kind: int, *parts: bytes) -> bool:
        if self.queued > BOUND:
            return False
        self.queued += sum(map(len, parts))
        self.most = max(self.most, self.queued)
        self.congested = self.queued > HIGH_WATER
        if not self.reading:
            self.reading = True
            asyncio.get_running_loop().call_later(0.001, self._read)
        return super().send(kind, *parts)

    def _read(self) -> None:
        self.queued, self.reading, self.congested = 0, False, False


def test_refused_creates_are_answered_however_large_the_entry_is() -> None:
    """Forty results with a value of a megabyte do not fit into the queue of a connection."""

    async def test(quorum: Quorum) -> None:
        value = b"x" * MAX_VALUE
        first = Client(quorum.services["n1"], "the-first")
        await first.do(1, Put("k", value, 0))
        for node in (await quorum.leader(), await quorum.follower()):
            client = Slow(quorum.services[node], f"client-of-{node}")
            lease = await granted(client)
            ids = [*range(2, 42)]
            refused = encode(Create("k", b"", lease))
            client.put(Write(1, ids, [refused] * len(ids)))
            for number in ids:
                answer = await client.answer_to(number)
                assert isinstance(answer, bytes), answer
                result = decode_result(answer)
                assert isinstance(result, EntryExists)
                assert result.entry.value == value
            assert not client.faults
            assert client.most <= HIGH_WATER + 2 * MAX_VALUE
            # Repeated under the same id, as after a lost connection, it has the same outcome.
            client.results.clear()
            assert isinstance(await client.do(2, Create("k", b"", lease)), EntryExists)

    on_quorum(test)


def test_refused_creates_through_a_follower_are_answered_in_a_cluster_of_version_1() -> None:
    """Its leader sends the whole entry with each result, and a batch of such results does not fit
    into a frame."""

    async def main() -> None:
        quorum = Quorum()
        quorum.world.supports |= {"n1": FIRST, "n2": FIRST, "n3": FIRST}
        await quorum.start(raised=False)
        node = await quorum.follower()
        client = Slow(quorum.services[node])
        lease = await granted(client)
        await client.do(2, Put("k", b"x" * MAX_VALUE, 0))
        ids = [*range(3, 43)]
        refused = encode(Create("k", b"", lease))
        client.put(Write(1, ids, [refused] * len(ids)))
        for number in ids:
            answer = await client.answer_to(number)
            assert isinstance(answer, bytes), answer
            result = decode_result(answer)
            assert isinstance(result, EntryExists)
            assert len(result.entry.value) == MAX_VALUE
        assert client.most <= HIGH_WATER + 2 * MAX_VALUE
        assert quorum.keyspace(node).version == FIRST

    run_virtual(main)


def test_a_refused_create_whose_rival_has_gone_meanwhile_may_be_retried() -> None:
    async def test(quorum: Quorum) -> None:
        client, other = (Client(quorum.services["n1"], name) for name in ("client-1", "client-2"))
        lease = await granted(client)
        await other.do(1, Put("k", b"x" * MAX_VALUE, 0))
        client.congested = True
        client.put(Write(1, [2], [encode(Create("k", b"", lease))]))
        await asyncio.sleep(0.1)
        assert await other.do(2, Delete("k", 0)) == Done()
        client.congested = False
        refused = await client.answer_to(2)
        assert (refused.code, "not carried out" in refused.text) == (ErrorCode.UNAVAILABLE, True)
        assert isinstance(await client.do(3, Create("k", b"", lease)), Written)

    on_quorum(test)


def test_results_wait_until_the_client_takes_them() -> None:
    async def test(quorum: Quorum) -> None:
        client = Slow(quorum.services[await quorum.leader()])
        lease = await granted(client)
        await client.do(2, Put("k", b"x" * 4000, 0))
        client.reading = True  # it does not read
        ids = [*range(3, 5003)]
        refused = encode(Create("k", b"", lease))
        for at in range(0, len(ids), 200):
            some = ids[at : at + 200]
            client.put(Write(1, some, [refused] * len(some)))
        await asyncio.sleep(1.0)
        assert not client.faults
        assert client.most <= 2 * PIECE
        client._read()
        for number in ids:
            assert isinstance(decode_result(await client.answer_to(number)), EntryExists)

    on_quorum(test)


class Closing(Client):
    """Is not closed at once: the operating system still sends what was written before."""

    ending = False
    attempts = 0

    def send(self, kind: int, *parts: bytes) -> bool:
        self.attempts += 1
        return not self.ending and super().send(kind, *parts)

    def close(self) -> None:
        self.ending, self.congested = True, False


def test_nothing_is_read_for_a_client_whose_connection_is_being_closed() -> None:
    """It may have a quarter of a million requests waiting, each for a value of a megabyte."""

    async def test(quorum: Quorum) -> None:
        client = Closing(quorum.services[await quorum.leader()])
        await client.do(1, Put("k", b"", 0))
        client.congested = True
        client.put(*(Get(-n, "k") for n in range(1, 41)))
        await asyncio.sleep(0.1)
        client.put(Write(1, [2], [encode(Put("unread", b"", 0))]))
        before = client.attempts
        client.close()
        await asyncio.sleep(0.1)
        assert client.attempts == before
        assert quorum.keyspace(await quorum.leader()).get("unread") is None

    on_quorum(test)


def test_while_every_disk_is_full_leases_are_renewed_and_ended() -> None:
    async def test(quorum: Quorum) -> None:
        world = quorum.world
        leader = await quorum.leader()
        generation = world.nodes[leader].generation
        for node in (leader, await quorum.follower()):
            client = Client(quorum.services[node], f"client-of-{node}")
            live, dead, given_up = [await granted(client, number) for number in (1, 2, 3)]
            assert isinstance(await client.do(4, Put(node, b"", 0)), Written)
            for disk in world.disks.values():
                disk.full = True
            await asyncio.sleep(0.5)
            began = world.loop.time()
            number = 10
            while quorum.keyspace(leader).lease(dead) is not None:
                assert isinstance(await client.ask(RenewLease, live), LeaseRenewed)
                number += 1
                refused = await client.do(number, Put("more", b"", 0))
                assert isinstance(refused, Failed)
                assert refused.code is ErrorCode.UNAVAILABLE
                assert (await client.ask(Get, node)).entry is not None
                assert world.loop.time() - began < 1.2 * TTL_S
                await asyncio.sleep(0.1)
            assert await client.do(5, Revoke(given_up)) == Done()
            assert await client.do(6, Delete(node, 0)) == Done()
            assert quorum.keyspace(leader).lease(live) is not None
            assert (await quorum.leader(), world.nodes[leader].generation) == (leader, generation)
            for disk in world.disks.values():
                disk.full = False
            await asyncio.sleep(0.5)

    on_quorum(test)


def test_a_request_as_long_as_a_frame_is_answered_in_a_short_one() -> None:
    """An answer that does not fit into a frame would end the node, whoever has asked for it."""

    async def test(quorum: Quorum) -> None:
        huge = "x" * (MAX_FRAME - 64)
        for node in (await quorum.leader(), await quorum.follower()):
            client = Client(quorum.services[node])
            assert (await client.ask(Get, huge)).entry is None
            assert (await client.ask(Head, huge)).entry is None
            assert (await client.ask(Scan, huge)).entries == []
            failed = await client.ask(Ahead, huge)
            assert failed.code is ErrorCode.TICKET_GONE
            for order in (("promote", huge), (huge, "n1"), ("\0" * (MAX_FRAME // 2), "n1")):
                failed = await client.ask(Administer, *order)
                assert failed.code is ErrorCode.UNUSABLE
        assert await quorum.leader()

    on_quorum(test)


def test_deletions_in_a_mixed_batch_are_carried_out_when_disks_are_full() -> None:
    """A follower sends the leader what its clients write in one turn as one batch."""

    async def test(quorum: Quorum) -> None:
        for node in (await quorum.leader(), await quorum.follower()):
            client = Client(quorum.services[node], f"client-of-{node}")
            lease = await granted(client)
            await client.do(2, Put(f"kept/{node}", b"", 0))
            for disk in quorum.world.disks.values():
                disk.full = True
            await asyncio.sleep(0.5)
            commands = Put(f"new/{node}", b"", 0), Delete(f"kept/{node}", 0), Revoke(lease)
            client.put(Write(3, [3, 4, 5], [encode(each) for each in commands]))
            refused = await client.answer_to(3)
            assert refused.code is ErrorCode.UNAVAILABLE
            assert " full" in refused.text
            for number in (4, 5):
                done = await client.answer_to(number)
                assert isinstance(done, bytes)
                assert isinstance(decode_result(done), Done)
            for disk in quorum.world.disks.values():
                disk.full = False
            await asyncio.sleep(0.5)

    on_quorum(test)


def test_many_deletions_that_wait_for_slow_full_disks_are_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What they may use of the reserve is counted once for each of them, however long they wait for
    earlier entries."""
    count = MAX_WRITES

    async def test(quorum: Quorum) -> None:
        for node in (await quorum.leader(), await quorum.follower()):
            name = f"client-of-{node}"
            client = Client(quorum.services[node], name)
            keys = [f"{node}/{number:03}" for number in range(count)]
            ids = [*range(1, count + 1)]
            client.put(Write(1, ids, [encode(Put(key, b"", 0)) for key in keys]))
            for number in ids:
                await client.answer_to(number)
            for disk in quorum.world.disks.values():
                disk.full, disk.sync_s = True, 0.05
            await asyncio.sleep(0.5)
            size = len(encode(Delete(keys[0], 0))) + len(name) + 32
            monkeypatch.setattr(disk_space, "SPARE_BYTES", 2 * count * size)
            for number, key in enumerate(keys, count + 1):
                client.put(Write(count + 1, [number], [encode(Delete(key, 0))]))
                await asyncio.sleep(0.001)
            for number in range(count + 1, 2 * count + 1):
                done = await client.answer_to(number)
                assert isinstance(done, bytes), done
                assert isinstance(decode_result(done), Done)
            for disk in quorum.world.disks.values():
                disk.full, disk.sync_s = False, 0.001
            await asyncio.sleep(0.5)

    on_quorum(test)


def test_a_removed_node_sends_its_clients_away_at_once() -> None:
    """Not an election timeout later: it will not hear of a leader again."""

    async def test(quorum: Quorum) -> None:
        loop = asyncio.get_running_loop()
        leader = await quorum.leader()
        service, driver = quorum.services[leader], quorum.world.nodes[leader]
        client = Client(service)

        async def write() -> None:
            for number in itertools.count(1):
                if client.closed:
                    return
                client.put(Write(1, [number], [encode(Put(f"k{number}", b"", 0))]))
                await asyncio.sleep(0.002)

        writing = asyncio.create_task(write())
        other = quorum.world.nodes[await quorum.follower()]
        await other.admin.perform("remove", leader)
        await quorum.world.until(lambda: leader not in driver.membership.everyone)
        outside_at = loop.time()
        quorum.world.cut(leader)  # the others hang up
        for peer in driver.membership.everyone:
            quorum.world.links[leader].step(Disconnected(peer))
        await writing
        assert loop.time() - outside_at < 0.2
        assert not service.serving
        stopped_at = loop.time()
        await driver.stop()
        assert loop.time() - stopped_at < 0.2, "it waits for no answer that cannot come"

    on_quorum(test)


def test_a_snapshot_that_found_no_room_is_taken_when_there_is_some(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Although nothing is written meanwhile that would make the log grow."""

    async def main(world: World) -> None:
        (leader,) = world.leaders()
        node = follower_of(world)
        world.disks[node.id].full = True
        for _ in range(SMALL.snapshot_entries):
            await leader.propose(USER, b"a")
        await asyncio.sleep(30.0)
        assert node.status().snapshot == 0
        assert leader.status().snapshot > 0
        world.disks[node.id].full = False
        await world.until(lambda: node.status().snapshot > 0, within_s=5.0)
        assert caplog.text.count("event=snapshot_failed") == 1

    run_world(main, limits=SMALL)


async def median_s(world: World, node: Driver) -> float:
    """How long a write takes through this node, at 2,000 of them a second."""
    took: list[float] = []

    async def write() -> None:
        began = world.loop.time()
        await node.propose(USER, b"x")
        took.append(world.loop.time() - began)

    async with asyncio.TaskGroup() as writes:
        for _ in range(300):
            writes.create_task(write())
            await asyncio.sleep(1 / 2000)
    return statistics.median(took)


@pytest.mark.parametrize("sync_s", [0.001, 0.003, 0.01, 0.03])
def test_a_write_through_a_follower_takes_little_longer_at_any_speed_of_the_disk(
    sync_s: float,
) -> None:
    async def main() -> None:
        world = World(delay_s=0.00005)
        await world.boot()
        leader = await world.leader()
        for disk in world.disks.values():
            disk.sync_s = sync_s
        at_leader = await median_s(world, leader)
        assert await median_s(world, follower_of(world)) <= 1.25 * at_leader

    run_virtual(main)
