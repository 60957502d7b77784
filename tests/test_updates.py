"""Updates on simulated servers of every engine: the suite's promises, and histories with faults."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import pytest
from kazoo.protocol.serialization import CheckVersion

from adversary import ROUGH
from doyen.errors import LeaseGone, StoreError
from doyen.model import Entry, Lease, Version, leader_key
from doyen.stores.nats.leases import NatsLeases
from doyen.stores.nats.mirror import Mirror
from doyen.stores.nats.store import NatsStore
from doyen.stores.port import Store
from doyen.stores.zookeeper.store import ZooKeeperStore, _Unchanged
from doyen.testing.conformance.interruptions import InterruptionConformance
from doyen.testing.conformance.updates import UpdateConformance
from doyen.testing.conformance.watches import WatchConformance
from doyen.testing.faults import Odds
from wired import ENGINES, WiredHarness

T = TypeVar("T")

KEY = leader_key("e")
TTL_S = 12.0
LASTS_S = 30.0
TIMEOUT_S = 2.0


@pytest.mark.parametrize("engine", ENGINES)
class TestUpdates(UpdateConformance, InterruptionConformance, WatchConformance):
    """The promises of the port that concern updates, on each engine's adapter."""

    @pytest.fixture
    def store_harness(self, engine: str, monkeypatch: pytest.MonkeyPatch) -> WiredHarness:
        return WiredHarness(engine, monkeypatch)


@dataclass(slots=True)
class Written:
    """A value that a client has tried to write, which nobody else has written."""

    replaces: bytes | None
    """The value that was replaced; None for a creation."""
    lease: str
    refused: bool = False
    """The store has said that it was not written."""
    took_effect: bool = False


class History:
    """What clients have written and read, and the rules for it.

    - A value is replaced by one update at most.
    - An update that returned None has not changed anything, then or later.
    - An entry keeps revision and lease from its creation on.
    - When a lease was revoked, no later read returns an entry that was bound to it.
    """

    def __init__(self) -> None:
        self.values: dict[bytes, Written] = {}
        self.ended: set[str] = set()
        self.confirmed = 0
        self._numbers = itertools.count()
        self._revisions: dict[str, int] = {}

    def value(self, replaces: bytes | None, lease: str) -> bytes:
        value = str(next(self._numbers)).encode()
        self.values[value] = Written(replaces, lease)
        return value

    def took_effect(self, entry: Entry) -> None:
        """The store returned this entry."""
        written = self.values[entry.value]
        assert not written.refused, f"{entry.value!r} was written though its update returned None"
        written.took_effect = True
        assert entry.lease == written.lease, f"{entry} was bound to {written.lease}"
        revision = self._revisions.setdefault(written.lease, entry.revision)
        assert entry.revision == revision, f"{entry} was created at revision {revision}"

    def check(self) -> None:
        replaced = [each.replaces for each in self.values.values() if each.took_effect]
        twice = {value for value in replaced if value is not None and replaced.count(value) > 1}
        assert not twice, f"replaced more than once: {twice}"


async def ask(call: Awaitable[T]) -> T | None:
    """Make a call with a deadline, as a session does; None if it fails."""
    with suppress(StoreError, TimeoutError):
        async with asyncio.timeout(TIMEOUT_S):
            return await call
    return None


async def hold(store: Store, history: History, chance: random.Random) -> None:
    """Create the entry under one lease after the other. Each is revoked, or left to expire."""
    while True:
        lease = await ask(store.grant(TTL_S))
        if lease is None:
            await asyncio.sleep(0.1)
            continue
        value = history.value(None, lease.id)
        until = asyncio.get_running_loop().time() + chance.uniform(0.5, 2 * TTL_S)
        with suppress(LeaseGone):
            while asyncio.get_running_loop().time() < until:
                made = await ask(store.create(KEY, value, lease))
                if made is not None and made.won:
                    history.took_effect(made.entry)
                await ask(store.renew(lease))
                await asyncio.sleep(chance.uniform(0.0, 0.5))
        if chance.random() < 0.7:
            await end(store, history, lease)


async def end(store: Store, history: History, lease: Lease) -> None:
    while True:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await store.revoke(lease)
        except (StoreError, TimeoutError):
            await asyncio.sleep(0.1)
            continue
        history.ended.add(lease.id)
        return


async def change(store: Store, history: History, chance: random.Random) -> None:
    """Read the entry and update it, again and again."""
    while True:
        await asyncio.sleep(chance.uniform(0.0, 0.2))
        ended = set(history.ended)
        found = await ask(store.get(KEY))
        if found is None:
            continue
        history.took_effect(found)
        if store.capabilities.linearizable_reads:
            assert found.lease not in ended, f"{found} was read after its lease was revoked"
        await asyncio.sleep(chance.choice([0.0, 0.0, chance.uniform(0.0, 1.0)]))
        assert found.lease is not None
        value = history.value(found.value, found.lease)
        try:
            async with asyncio.timeout(TIMEOUT_S):
                updated = await store.update(found, value)
        except (StoreError, TimeoutError):
            continue
        if updated is None:
            assert not history.values[value].took_effect
            history.values[value].refused = True
        else:
            history.took_effect(updated)
            history.confirmed += 1


def run_history(
    engine: str,
    seed: int,
    patch: pytest.MonkeyPatch,
    mutate: Callable[[Store], None] = lambda store: None,
) -> History:
    harness, history, chance = WiredHarness(engine, patch), History(), random.Random(seed)

    async def main() -> None:
        clients = [await harness.client() for _ in range(4)]
        mutate(clients[0])
        for faults in harness.faults:
            faults.odds = ROUGH
        tasks = [asyncio.create_task(hold(store, history, chance)) for store in clients[:2]]
        tasks += [asyncio.create_task(change(store, history, chance)) for store in clients]
        done, _ = await asyncio.wait(tasks, timeout=LASTS_S, return_when=asyncio.FIRST_EXCEPTION)
        for faults in harness.faults:
            faults.odds = Odds()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await harness.close_clients()
        for task in done:
            task.result()
        history.check()

    harness.run(main)
    return history


@pytest.mark.parametrize("seed", [1])
@pytest.mark.parametrize("engine", ENGINES)
def test_history(engine: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_history(engine, seed, monkeypatch).confirmed > 15


def test_an_update_that_was_read_is_not_reported_as_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lease ends after the write, and before the copy of the one who writes is looked at."""
    harness = WiredHarness("nats", monkeypatch)
    updated: list[Entry | None] = []

    async def main() -> None:
        store, other = [await harness.client() for _ in range(2)]
        lease = await store.grant(TTL_S)
        entry = (await store.create(KEY, b"old", lease)).entry
        write = Mirror.write

        async def write_and_lose(mirror: Mirror, *what: Any) -> int:
            sequence = await write(mirror, *what)
            updated.append(await other.get(KEY))
            await store.revoke(lease)
            await mirror.catch_up()
            return sequence

        monkeypatch.setattr(Mirror, "write", write_and_lose)
        updated.append(await store.update(entry, b"new"))
        updated.append(await store.get(KEY))
        await harness.close_clients()

    harness.run(main)
    seen, returned, later = updated
    assert seen == returned
    assert seen is not None
    assert seen.value == b"new"
    assert later is None


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(100, 130))
@pytest.mark.parametrize("engine", ENGINES)
def test_many_histories(engine: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_history(engine, seed, monkeypatch)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_of_any_version_is_detected(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(store: Store) -> None:
        update = store.update

        async def blindly(entry: Entry, value: bytes) -> Entry | None:
            return await update(await store.get(entry.key) or entry, value)

        monkeypatch.setattr(store, "update", blindly)

    def is_detected(seed: int) -> bool:
        try:
            run_history(engine, seed, monkeypatch, mutate)
        except AssertionError:
            return True
        return False

    assert any(map(is_detected, range(5)))


def meets(
    engine: str, patch: pytest.MonkeyPatch, test: Callable[[Store, Store], Awaitable[None]]
) -> None:
    """Run a test with two clients of a simulated server that makes no errors."""
    harness = WiredHarness(engine, patch)

    async def main() -> None:
        try:
            await test(await harness.client(), await harness.client())
        finally:
            await harness.close_clients()

    harness.run(main)


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("created_here", [True, False])
def test_zookeeper_a_delayed_update_does_not_hit_a_successor(
    broken: bool, created_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entry is created again between the read and the write of an update. The versions of both
    znodes are 0; a variant that checks nothing else writes to the wrong one."""
    unchanged = ZooKeeperStore._unchanged

    async def test(store: Store, other: Store) -> None:
        owner = store if created_here else other
        lease, next_lease = await owner.grant(60), await other.grant(60)
        entry = (await owner.create(KEY, b"old", lease)).entry
        delays = [None]

        async def delayed(self: ZooKeeperStore, path: str, version: Version) -> _Unchanged | None:
            same = await unchanged(self, path, version)
            if self is store and delays:
                delays.pop()
                assert await other.delete(KEY)
                assert (await other.create(KEY, b"next", next_lease)).won
                if broken and same is not None:
                    return same._replace(check=CheckVersion("/", -1))
            return same

        monkeypatch.setattr(ZooKeeperStore, "_unchanged", delayed)
        updated = await store.update(entry, b"late")
        found = await other.get(KEY)
        assert found is not None
        assert (updated is None) == (not broken)
        assert found.value == (b"late" if broken else b"next")

    meets("zookeeper", monkeypatch, test)


@pytest.mark.parametrize("broken", [False, True])
def test_nats_an_update_after_the_end_of_the_lease_is_void(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease ends between the check and the write of an update, and what it owned is not removed
    yet. A variant that does not look at the lease again reports a success."""

    async def left(self: NatsLeases, keys: object) -> None:
        return

    async def without_the_check(self: NatsStore, entry: Entry, value: bytes) -> Entry | None:
        present = await self._present(entry.key, entry.version)
        return None if present is None else await self._replace(present, value)

    monkeypatch.setattr(NatsLeases, "_delete_void", left)
    if broken:
        monkeypatch.setattr(NatsStore, "update", without_the_check)

    async def test(store: Store, other: Store) -> None:
        assert isinstance(store, NatsStore)
        lease, next_lease = await other.grant(60), await other.grant(60)
        entry = (await other.create(KEY, b"old", lease)).entry
        write = store._mirror.write

        async def delayed(*given: Any) -> int:
            await other.revoke(lease)
            return await write(*given)

        monkeypatch.setattr(store._mirror, "write", delayed)
        updated = await store.update(entry, b"late")
        assert (updated is None) == (not broken)
        monkeypatch.setattr(store._mirror, "write", write)
        assert await store.get(KEY) is None
        assert (await other.create(KEY, b"next", next_lease)).won

    meets("nats", monkeypatch, test)
