"""Both adapters of the relational store against scripted servers in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import pytest

from adversary import Network, WireLoop, WireWorld, run_contest
from doyen.errors import StoreError
from doyen.events import Event
from doyen.lease.clock import VirtualClock
from doyen.model import leader_key
from doyen.stores.kit import expiry
from doyen.stores.port import Context, open_store
from doyen.stores.sql.connection import SqlConnection
from doyen.testing.faults import Faults, Odds
from model_mysql import MySQLModel
from model_postgresql import PostgreSQLModel, keep_virtual_time
from model_sql import Cluster
from swarm import SafetyViolated

ENGINES: dict[str, type[PostgreSQLModel | MySQLModel]] = {
    "postgresql": PostgreSQLModel,
    "mysql": MySQLModel,
}
TTL_S = 3.0
KEY = leader_key("e")


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    keep_virtual_time(monkeypatch)
    return str(request.param)


def address(engine: str, network: Network, host: str) -> str:
    if engine == "mysql":
        return f"mysql://u:p@{host}:1000/d"
    return f"postgresql://u@{quote(str(network.directory / host), safe='')}:1000/d"


def contest(
    engine: str, seed: int, *, failovers: int = 2, body_s: float = 4 * TTL_S, **options: Any
) -> None:
    worlds: list[WireWorld] = []
    models: list[Cluster] = []

    def build(world: WireWorld) -> Any:
        worlds.append(world)
        world.body_s = body_s
        models.append(ENGINES[engine](seed=world.rng.getrandbits(32), failovers=failovers))
        return models[0]

    run_contest(
        seed, build, lambda host: address(engine, worlds[0].network, host), ttl_s=TTL_S, **options
    )
    assert not models[0].failed


@pytest.mark.parametrize("seed", [3, 4])
def test_a_contest_among_failovers_and_faults(engine: str, seed: int) -> None:
    contest(engine, seed, steps=25)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(100, 120))
def test_many_contests(engine: str, seed: int) -> None:
    contest(engine, seed, steps=60, failovers=4)


async def two_primaries(world: WireWorld, model: Cluster) -> None:
    """Another server takes over; the old one goes on, and the leader still reaches it to renew."""
    await asyncio.sleep(2 * TTL_S)
    model.synchronous = False
    model.fail_over()
    (leader,) = world.oracle._valid
    model.close_all_but_renewals(leader.name)
    await asyncio.sleep(5 * TTL_S)


def quiet(
    engine: str, also: Callable[[WireWorld, Cluster], Awaitable[None]], candidates: int = 3
) -> None:
    """A contest without faults except those of `also`."""

    async def act(world: WireWorld) -> None:
        assert isinstance(world.model, Cluster)
        await also(world, world.model)

    contest(
        engine,
        1,
        failovers=0,
        body_s=1000 * TTL_S,
        candidates=candidates,
        steps=0,
        odds=Odds(),
        also=act,
    )


async def cut_each_off(world: WireWorld, model: Cluster) -> None:
    """Cut off one candidate after another, the leader included, and step the server's clock."""
    for process in list(world.processes):
        await asyncio.sleep(2 * TTL_S)
        process.faults.cut()
        model.primary.skew_s += 3600
        await asyncio.sleep(2 * TTL_S)
        world.heal(process)


def test_a_leader_that_is_cut_off_keeps_its_ttl(engine: str) -> None:
    quiet(engine, cut_each_off)


def test_a_lease_that_is_ended_early_makes_two_leaders(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oracle detects it: an observer that counts from before its first observation is caught
    where the server's clock does not stop it."""
    true = expiry.Observation

    def early(counter: int, since: float, ttl_s: float, last: float) -> expiry.Observation:
        return true(counter, since - 0.8 * ttl_s, ttl_s, last)

    monkeypatch.setattr(expiry, "Observation", early)
    with pytest.raises(SafetyViolated):
        for candidates in (2, 4):
            quiet(engine, cut_each_off, candidates)


def test_renewals_follow_to_the_new_primary(engine: str) -> None:
    quiet(engine, two_primaries)


def test_without_the_check_a_deposed_primary_makes_two_leaders(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqlConnection, "leave_others", lambda *_: None)
    monkeypatch.setattr(SqlConnection, "_require_primary", lambda *_: None)
    with pytest.raises(SafetyViolated):
        quiet(engine, two_primaries)


@pytest.mark.parametrize("candidates", [3, 8])
def test_after_an_outage_there_is_a_leader_within_a_ttl(engine: str, candidates: int) -> None:
    """Every lease has expired in it: they are ended together, not one after the other."""

    async def outage(world: WireWorld, _: Cluster) -> None:
        world.network.stop()
        await asyncio.sleep(3 * TTL_S)
        world.network.start()
        world.oracle.somebody_leads.clear()
        began = world.clock.now()
        async with asyncio.timeout(100 * TTL_S):
            await world.oracle.somebody_leads.wait()
        assert world.clock.now() - began < 1.4 * TTL_S

    quiet(engine, outage, candidates=candidates)


@pytest.mark.parametrize("fault", ["ends_listeners", "garbles"])
def test_listening_begins_again_after_an_error(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server ends a connection as it begins to listen, as in a shutdown, or sends malformed
    messages. Nothing fails unnoticed, and later changes are notified."""
    keep_virtual_time(monkeypatch)
    network, clock = Network(), VirtualClock()
    loop = WireLoop(clock)
    loop.network = network
    unheard: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    events: list[Event] = []

    async def main() -> None:
        model = PostgreSQLModel()
        await network.listen("p", 1000, model, Faults())
        store = await open_store(address("postgresql", network, "p"), Context(clock, events.append))
        notified = asyncio.Event()
        await store.watch(KEY, notified.set)
        lease = await store.grant(TTL_S)
        for _ in range(20):
            setattr(model, fault, True)
            for connection in list(model.renewing):
                connection.close()
            await asyncio.sleep(0.3)
            with pytest.raises(StoreError):
                await store.renew(lease)
            setattr(model, fault, False)
        await asyncio.sleep(TTL_S)
        notified.clear()
        await store.put(KEY, b"v", if_version=None)
        async with asyncio.timeout(1):
            await notified.wait()
        await store.close()
        network.stop()
        await asyncio.sleep(1)

    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())
    finally:
        network.close()
    assert not unheard
