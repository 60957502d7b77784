"""A Redis Cluster: all of doyen lies in one slot, which may move from server to server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import redis

import doyen
import servers
from doyen.errors import OutcomeUnknown, StoreUnavailable
from doyen.model import leader_key, line_key
from doyen.stores.port import Store
from doyen.stores.redis.store import RedisStore
from test_redis import KEY, Heart, opened, run, token, told, until


class Node(servers.Redis):
    """A server of a cluster."""

    def __init__(self) -> None:
        self.bus = str(servers.free_port())
        super().__init__(cluster_enabled="yes", cluster_port=self.bus)

    def ask(self, *command: str | int | bytes) -> Any:
        with redis.Redis(port=self.port) as client:
            return client.execute_command(*command)


class Slot:
    """The slot of one prefix, on its way from one server to another."""

    def __init__(self, prefix: str, source: Node, target: Node) -> None:
        self.prefix, self.source, self.target = prefix, source, target
        self.number = source.ask("CLUSTER", "KEYSLOT", f"{{{prefix}}}:")

    def begin(self) -> None:
        source, target = (node.ask("CLUSTER", "MYID") for node in self._nodes)
        self.target.ask("CLUSTER", "SETSLOT", self.number, "IMPORTING", source)
        self.source.ask("CLUSTER", "SETSLOT", self.number, "MIGRATING", target)

    def remaining(self) -> list[bytes]:
        """The keys that are still at the source."""
        return sorted(self.source.ask("CLUSTER", "GETKEYSINSLOT", self.number, 10_000))

    def move(self, keys: list[bytes]) -> None:
        if keys:
            there = ("127.0.0.1", self.target.port)
            self.source.ask("MIGRATE", *there, "", 0, 5000, "KEYS", *keys)

    def finish(self) -> None:
        """The rest is moved, and the target owns the slot."""
        self.move(self.remaining())
        owner = self.target.ask("CLUSTER", "MYID")
        for node in reversed(self._nodes):
            node.ask("CLUSTER", "SETSLOT", self.number, "NODE", owner)

    @property
    def _nodes(self) -> tuple[Node, Node]:
        return self.source, self.target


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[Node, Node]]:
    """Two servers, the first of which owns every slot."""
    with Node() as one, Node() as two:
        one.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        one.ask("CLUSTER", "MEET", "127.0.0.1", two.port, two.bus)

        async def known() -> bool:
            said = [node.ask("CLUSTER", "INFO") for node in (one, two)]
            return all(
                b"cluster_state:ok" in each and b"cluster_slots_ok:16384" in each for each in said
            )

        asyncio.run(until("both know who has which slot", known))
        yield one, two


def test_a_redirection_is_followed(nodes: tuple[Node, Node]) -> None:
    async def main() -> None:
        owner, other = nodes
        async with opened(other.url) as store, opened(owner.url) as direct:
            changed = asyncio.Event()
            await store.watch(KEY, changed.set)
            first = await token(direct)
            await told(changed)
            assert await token(store) > first
            levels = {each.subject: each.level for each in await store.diagnose()}
            assert levels["cluster"] == "warning"

    run(main)


ENTRIES = 3


@pytest.mark.parametrize("moved", range(7))
@pytest.mark.parametrize("end", ["revoke", "expire"])
def test_a_lease_ends_whole_while_its_slot_moves(
    nodes: tuple[Node, Node], moved: int, end: str
) -> None:
    """Wherever the keys are: a script is carried out whole, or not begun. A lease that has lost
    its record and can still be renewed would leave its holder believing that it leads."""
    prefix = f"whole-{end}-{moved}"
    slot = Slot(prefix, *nodes)

    async def main() -> None:
        async with opened(f"{nodes[0].url}?prefix={prefix}") as store:
            lease = await store.grant(60)
            await store.create(KEY, b"leader", lease)
            for _ in range(ENTRIES):
                await store.enqueue(line_key("e"), b"ticket", lease)
            slot.begin()
            slot.move(slot.remaining()[:moved])
            ended = True
            try:
                if end == "expire":  # on whichever node it is seen
                    store._lookout.judge(*await store.look([lease.id]))
                await (store.revoke(lease) if end == "revoke" else store.expire(lease.id, 0))
            except (StoreUnavailable, OutcomeUnknown):
                ended = False
            slot.finish()
            left = await standing(store)
            assert len(left) == (0 if ended else 1 + ENTRIES)
            if not ended:
                await store.renew(lease)
                await store.revoke(lease)
                assert await standing(store) == []

    run(main)


async def standing(store: Store) -> list[bytes]:
    record = await store.get(KEY)
    tickets = [entry.value for entry in await store.list(line_key("e"))]
    return tickets if record is None else [record.value, *tickets]


def test_a_slot_that_has_moved_but_not_changed_hands_is_asked_for(
    nodes: tuple[Node, Node],
) -> None:
    """The source says ASK: what it has no longer is at the target, which answers to those who say
    that they were sent."""
    slot = Slot("ask", *nodes)

    async def main() -> None:
        async with opened(f"{nodes[0].url}?prefix=ask") as store:
            lease = await store.grant(60)
            first = await token(store)
            slot.begin()
            slot.move(slot.remaining())
            await store.renew(lease)
            assert await token(store) > first
            assert (await store.create(KEY, b"v", lease)).won
            await is_asked_of(store, nodes[0])
            slot.finish()
            await store.renew(lease)
            found = await store.get(KEY)
            assert found is not None
            await is_asked_of(store, nodes[1])

    run(main)


async def is_asked_of(store: RedisStore, node: Node) -> None:
    """An ASK is for one command; only MOVED is for good."""
    assert (await store._work.wire()).where == f"127.0.0.1:{node.port}"


def test_a_leader_stays_while_its_slot_moves(nodes: tuple[Node, Node]) -> None:
    url = f"{nodes[0].url}?prefix=stays"
    slot = Slot("stays", *nodes)

    async def main() -> None:
        async with doyen.connect(url, ttl_s=3) as session, opened(url) as observer:
            async with session.campaign("e", name="one") as term:
                slot.begin()
                for key in slot.remaining():
                    slot.move([key])
                slot.finish()
                left_s = term.remaining_s

                async def renewed() -> bool:
                    term.check()
                    return term.remaining_s > left_s

                await until("the lease is renewed at the new place", renewed)
                found = await observer.get(leader_key("e"))
                assert found is not None
                assert found.revision == term.token
            async with session.campaign("e", name="one") as again:
                assert again.token > term.token

    run(main)


def test_a_heart_beats_through_a_migration(nodes: tuple[Node, Node]) -> None:
    """Key by key, with renewals between any two: none is lost, and none is counted twice."""
    slot = Slot("beats", *nodes)

    async def main() -> None:
        async with opened(f"{nodes[0].url}?prefix=beats") as store, Heart(store) as heart:
            await heart.live(0.5)
            slot.begin()
            refused = 0
            for key in slot.remaining():
                slot.move([key])
                try:
                    await store.renew(heart.lease)
                except StoreUnavailable:
                    refused += 1
            slot.finish()
            await store.renew(heart.lease)
            assert refused

    run(main)
