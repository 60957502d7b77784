"""The etcd store against a simulated cluster, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc.aio
import pytest

from adversary import Network, WireLoop, WireWorld, run_contest
from doyen.errors import LeaseGone, StoreUnavailable
from doyen.lease.clock import VirtualClock
from doyen.model import Lease, line_key
from doyen.stores.etcd.connection import EtcdCluster
from doyen.stores.etcd.leases import EtcdKeepalive
from doyen.stores.etcd.store import EtcdStore
from doyen.stores.port import Context, Creation, Store, open_store
from doyen.testing.faults import Faults
from model_etcd import Channel, EtcdModel
from swarm import SafetyViolated

LEADER_WITHIN_S = 20.0
DETECTED_WITHIN = 10
"""Contests in which a mutant must be detected. One in three detects the least obvious one."""


@pytest.fixture(autouse=True)
def channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc.aio, "insecure_channel", Channel)


def contest(seed: int) -> WireWorld:
    def build(world: WireWorld) -> EtcdModel:
        return EtcdModel(seed, lambda: not world.is_calm)

    world = run_contest(
        seed,
        build,
        lambda host: f"etcd://{host}:1000,{host}:1001,{host}:1002",
        ports=(1000, 1001, 1002),
        leader_within_s=LEADER_WITHIN_S,
    )
    assert isinstance(world.model, EtcdModel)
    assert world.model.broken is None
    return world


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_contest(seed: int) -> None:
    assert contest(seed).oracle.terms > 3


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(1000, 1200))
def test_contest_long(seed: int) -> None:
    contest(seed)


async def credulous(
    self: EtcdStore, key: str, value: bytes, lease: Lease, *reads: Any
) -> tuple[Creation, Sequence[Any]]:
    """A mutant of each creation that takes an existing entry for its own."""
    creation, found = await CREATE(self, key, value, lease, *reads)
    return Creation(True, creation.entry._replace(lease=lease.id)), found


CREATE = EtcdStore._create


def test_a_mutant_of_create_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EtcdStore, "_create", credulous)
    with pytest.raises(SafetyViolated):
        contest(7)


class Agreeing:
    """A mutant of the read after a renewal: its header equals that of the renewal."""

    def __getattr__(self, name: str) -> Agreeing:
        return self

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class Unwitnessed(EtcdKeepalive):
    def __init__(self, cluster: EtcdCluster, witness: bytes) -> None:
        super().__init__(cluster, witness)

        async def agree(*_: object, **__: object) -> Agreeing:
            return Agreeing()

        self._client.call = agree  # type: ignore[method-assign]


def test_a_mutant_without_confirmed_renewals_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doyen.stores.etcd.store.EtcdKeepalive", Unwitnessed)
    with pytest.raises(SafetyViolated):
        for seed in range(DETECTED_WITHIN):
            contest(seed)


def run(
    main: Callable[[EtcdModel, Store], Awaitable[None]],
    network: Network | None = None,
    faults: Faults | None = None,
) -> None:
    """Run a test on a store of a cluster with one member."""
    loop = WireLoop(VirtualClock())
    loop.network = network = network or Network()

    async def all_of_it() -> None:
        model = EtcdModel()
        await network.listen("one", 1000, model, faults or Faults())
        store = await open_store("etcd://one:1000", Context(loop.clock, lambda event: None))
        async with asyncio.timeout(100):
            await main(model, store)
        await store.close()

    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(all_of_it())
    finally:
        network.close()


def test_a_renewal_by_a_deposed_leader_does_not_count() -> None:
    """Its member still answers renewals while the lease expires at the new leader."""

    async def main(model: EtcdModel, store: Store) -> None:
        lease = await store.grant(3)
        await store.renew(lease)
        model.depose("one:1000", 10.0)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match="no leader"):
                await store.renew(lease)
            await asyncio.sleep(2.0)
        assert not model.leases
        await asyncio.sleep(10.0)
        with pytest.raises(LeaseGone):
            await store.renew(lease)

    run(main)


def test_a_half_open_watch_stream_is_noticed_within_a_share_of_the_ttl() -> None:
    """Nothing is read on such a stream, and no error is reported. A candidate that waits on it
    would learn of its turn only when the stream is given up."""
    network = Network()

    async def main(model: EtcdModel, store: Store) -> None:
        notified = asyncio.Event()
        lease = await store.grant(3)
        await store.watch("e", notified.set)
        await store.create("e/x", b"", lease)
        await notified.wait()
        notified.clear()
        network.lose_connections()
        model.end(int(lease.id, 16))
        async with asyncio.timeout(2.5):
            await notified.wait()

    run(main, network)


def test_a_member_that_accepts_no_stream_is_left_within_a_share_of_the_ttl() -> None:
    """A connection attempt that began during an interruption may hang after its end. Callers of
    `watch` have given up by then, and those that come later must not wait for that attempt."""
    faults = Faults()

    async def main(model: EtcdModel, store: Store) -> None:
        await store.grant(3)
        faults.cut()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await store.watch("e", lambda: None)
        faults.heal()
        async with asyncio.timeout(1.0):
            while True:
                try:
                    await store.watch("e", lambda: None)
                except StoreUnavailable:
                    await asyncio.sleep(0.1)
                else:
                    break

    run(main, faults=faults)


@pytest.mark.parametrize("name", ["", "0", "0-x", "zz/y"])
def test_keys_of_other_programs_in_a_line_are_not_tickets(name: str) -> None:
    async def main(model: EtcdModel, store: Store) -> None:
        lease = await store.grant(10)
        await store.put(f"{line_key('e')}/{name}", b"", if_version=None)
        ticket = await store.enqueue(line_key("e"), b"t", lease)
        assert await store.ahead(ticket) is None
        higher = await store.enqueue(line_key("e"), b"u", lease, rank=1)
        assert await store.ahead(ticket) == higher

    run(main)
