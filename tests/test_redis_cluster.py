"""A Redis Cluster: doyen's keys are in one slot, which may move from server to server."""

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
from test_redis import KEY, Keepalive, notified, opened, token, until


class Node(servers.Redis):
    """A server of a cluster."""

    def __init__(self) -> None:
        self.bus = str(servers.free_port())
        super().__init__(cluster_enabled="yes", cluster_port=self.bus)

    def ask(self, *command: str | int | bytes) -> Any:
        with redis.Redis(port=self.port) as client:
            return client.execute_command(*command)


class Slot:
    """The slot of one prefix, being moved from one server to another."""

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
        """Move the remaining keys and make the target the owner of the slot."""
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


async def test_a_redirection_is_followed(nodes: tuple[Node, Node]) -> None:
    owner, other = nodes
    async with opened(other.url) as store, opened(owner.url) as direct:
        changed = asyncio.Event()
        await store.watch(KEY, changed.set)
        first = await token(direct)
        await notified(changed)
        assert await token(store) > first
        levels = {each.subject: each.level for each in await store.diagnose()}
        assert levels["cluster"] == "warning"


ENTRIES = 3


@pytest.mark.parametrize("moved", range(7))
@pytest.mark.parametrize("end", ["revoke", "expire"])
async def test_a_lease_ends_atomically_while_its_slot_moves(
    nodes: tuple[Node, Node], moved: int, end: str
) -> None:
    """Wherever the keys are, a script runs as a whole or not at all. If a lease lost its record
    and could still be renewed, its holder would believe that it leads."""
    prefix = f"whole-{end}-{moved}"
    slot = Slot(prefix, *nodes)
    async with opened(f"{nodes[0].url}?prefix={prefix}") as store:
        lease = await store.grant(60)
        await store.create(KEY, b"leader", lease)
        for _ in range(ENTRIES):
            await store.enqueue(line_key("e"), b"ticket", lease)
        slot.begin()
        slot.move(slot.remaining()[:moved])
        ended = True
        try:
            if end == "expire":  # on the node on which it is observed
                store._observer.judge(*await store.look([lease.id]))
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


async def standing(store: Store) -> list[bytes]:
    record = await store.get(KEY)
    tickets = [entry.value for entry in await store.list(line_key("e"))]
    return tickets if record is None else [record.value, *tickets]


async def test_an_ask_redirection_is_followed_for_one_command(nodes: tuple[Node, Node]) -> None:
    """The source responds ASK for keys that it no longer has. The target serves them after
    ASKING."""
    slot = Slot("ask", *nodes)
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


async def is_asked_of(store: RedisStore, node: Node) -> None:
    """ASK redirects one command; only MOVED is permanent."""
    assert str((await store._scripts.connected()).host) == f"127.0.0.1:{node.port}"


async def test_a_leader_stays_while_its_slot_moves(nodes: tuple[Node, Node]) -> None:
    url = f"{nodes[0].url}?prefix=stays"
    slot = Slot("stays", *nodes)
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


async def test_renewals_go_on_during_a_migration(nodes: tuple[Node, Node]) -> None:
    """Keys move one by one with renewals in between: none is lost or counted twice."""
    slot = Slot("beats", *nodes)
    async with opened(f"{nodes[0].url}?prefix=beats") as store, Keepalive(store) as keepalive:
        await keepalive.live(0.5)
        slot.begin()
        refused = 0
        for key in slot.remaining():
            slot.move([key])
            try:
                await store.renew(keepalive.lease)
            except StoreUnavailable:
                refused += 1
        slot.finish()
        await store.renew(keepalive.lease)
        assert refused
