"""The Consul store against a simulated datacentre, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from adversary import Network, WireLoop, WireWorld, run_contest
from doyen.errors import OutcomeUnknown, StoreUnusable
from doyen.lease.clock import VirtualClock
from doyen.model import Entry, Lease, leader_key, line_key
from doyen.stores.consul.store import ConsulStore
from doyen.stores.port import Context, Creation, Store, open_store
from doyen.testing.faults import Faults
from model_consul import ConsulModel
from swarm import SafetyViolated

AGENTS = ("one:1000", "two:1000")
FOREVER_S = 1e9
PATIENCE_S = 0.3
LEADER_WITHIN_S = 30.0


@asynccontextmanager
async def opened(url: str = f"consul://{','.join(AGENTS)}") -> AsyncIterator[Store]:
    store = await open_store(url, Context(VirtualClock(), lambda event: None))
    try:
        yield store
    finally:
        await store.close()


def run(main: Callable[[ConsulModel], Awaitable[None]]) -> float:
    """Run a test against a datacentre of two agents; the virtual time that it took."""
    network, clock = Network(), VirtualClock()
    loop = WireLoop(clock)
    loop.network = network

    async def all_of_it() -> None:
        model = ConsulModel()
        for agent in AGENTS:
            host, _, port = agent.partition(":")
            await network.listen(host, int(port), model, Faults())
        async with asyncio.timeout(600):
            await main(model)

    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(all_of_it())
    finally:
        network.close()
    return clock.now()


async def answered(call: Awaitable[object]) -> bool:
    """Make a call as a session does, with a deadline; whether it was answered."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            await call
    except (TimeoutError, OutcomeUnknown):
        return False
    return True


def agents_asked(model: ConsulModel, path: str = "") -> list[str]:
    """The agents that requests were sent to, in order."""
    return [agent for agent, what in model.seen if path in what]


def test_a_replaced_datacentre_is_refused() -> None:
    """Its tokens would be lower than earlier ones. What was created is deleted again."""

    async def main(model: ConsulModel) -> None:
        model.index = 1000
        async with opened() as store, opened() as other:
            before = await store.create(leader_key("e"), b"v", await store.grant(3600))
            model.kv.clear()
            model.sessions.clear()
            model.index = 10
            lease = await store.grant(3600)
            with pytest.raises(StoreUnusable, match="token_floor"):
                await store.create(leader_key("e"), b"v", lease)
            with pytest.raises(StoreUnusable, match="token_floor"):
                await store.enqueue(line_key("e"), b"v", lease)
            assert await other.get(leader_key("e")) is None
            assert not await other.list(line_key("e"))
            model.index = before.entry.revision
            assert (await store.create(leader_key("e"), b"v", lease)).won

    run(main)


def test_deletions_leave_a_silent_agent() -> None:
    """A leader resigns while its agent is silent: a cancelled deletion holds no connection, and the
    next one is sent to the other agent."""

    async def main(model: ConsulModel) -> None:
        async with opened() as store:
            lease = await store.grant(3600)
            await store.create(leader_key("e"), b"v", lease)
            model.silent[AGENTS[0]] = FOREVER_S
            model.seen.clear()
            answers = [await answered(store.delete(leader_key("e"))) for _ in range(20)]
            assert answers == [False] + 19 * [True]
            assert agents_asked(model, "txn") == [AGENTS[0]] + 19 * [AGENTS[1]]
            assert await store.get(leader_key("e")) is None

    assert run(main) < 1.0


def test_a_silent_agent_does_not_exhaust_connections() -> None:
    """Many calls that hang at one agent take no connection from the other. After their deadline,
    each has failed or was answered by the other agent."""

    async def main(model: ConsulModel) -> None:
        async with opened() as store:
            model.silent[AGENTS[0]] = FOREVER_S
            keys = [leader_key(f"e{number}") for number in range(40)]
            hung: list[asyncio.Future[object]] = []
            hung += [asyncio.ensure_future(store.delete(key)) for key in keys[:20]]
            hung += [asyncio.ensure_future(store.get(key)) for key in keys[20:]]
            assert not await answered(store.get("any"))
            for key in keys:
                assert await answered(store.get(key))
            ended = await asyncio.gather(*hung, return_exceptions=True)
            assert {type(each) for each in ended} <= {OutcomeUnknown, type(None), bool}

    assert run(main) < 12.0


def test_a_silent_agent_is_not_asked_while_another_answers() -> None:
    """Not after a temporary failure of the other, and not by another kind of request."""

    async def main(model: ConsulModel) -> None:
        async with opened() as store:
            lease = await store.grant(3600)
            notified = asyncio.Event()
            await store.watch(leader_key("e"), notified.set)
            model.silent[AGENTS[0]] = FOREVER_S
            assert not await answered(store.renew(lease))
            began = asyncio.get_running_loop().time()
            model.seen.clear()
            assert (await store.create(leader_key("e"), b"v", lease)).won
            await notified.wait()  # the blocking query has moved away from the silent agent
            assert asyncio.get_running_loop().time() - began < 1.0
            model.rng.seed(0)
            model.rough = lambda: True
            for _ in range(50):
                try:
                    await store.renew(lease)
                except OutcomeUnknown:
                    pass
            model.rough = lambda: False
            await store.renew(lease)
            assert agents_asked(model, "renew").count(AGENTS[0]) <= 2
            model.silent.clear()
            model.silent[AGENTS[1]] = FOREVER_S
            assert not await answered(store.renew(lease))
            assert await answered(store.renew(lease))

    run(main)


def test_watches_outlive_queries_that_stay_unanswered() -> None:
    """An agent has passed them on to a server that is frozen. It answers everything else."""

    async def main(model: ConsulModel) -> None:
        async with opened() as store:
            lease = await store.grant(3600)
            notified = [asyncio.Event(), asyncio.Event()]
            for name, event in zip("ef", notified, strict=True):
                await store.watch(leader_key(name), event.set)
            model.stuck[AGENTS[0]] = FOREVER_S
            for name, event in zip("ef", notified, strict=True):
                for number in range(3):
                    event.clear()
                    await store.put(f"{leader_key(name)}/{number}", b"v", if_version=None)
                    async with asyncio.timeout(17.0):
                        await event.wait()
            await store.renew(lease)

    run(main)


def test_keys_of_other_programs_in_a_line_are_not_tickets() -> None:
    """For example a folder made in Consul's user interface, or a key written by hand."""

    async def main(model: ConsulModel) -> None:
        async with opened() as store:
            lease = await store.grant(10)
            for name in ("", "0", "zz/y"):
                await store.put(f"{line_key('e')}/{name}", b"", if_version=None)
            ticket = await store.enqueue(line_key("e"), b"t", lease)
            assert await store.ahead(ticket) is None
            after = await store.enqueue(line_key("e"), b"u", lease)
            assert await store.ahead(after) == ticket

    run(main)


@pytest.mark.parametrize("answer", ["<html>404 page</html>", '{"kv": 1}', '[{"Key": 1}]'])
def test_an_answer_that_is_not_from_consul_is_an_error(answer: str) -> None:
    """For example a proxy's error page. Watches continue when the agent answers again."""

    async def main(model: ConsulModel) -> None:
        async with opened() as store:
            notified = asyncio.Event()
            await store.watch(leader_key("e"), notified.set)
            proper = model._do
            model._do = lambda *request: (200, answer, 1)  # type: ignore[method-assign]
            model._next()
            with pytest.raises(OutcomeUnknown, match="check that the URL names agents"):
                await store.get(leader_key("e"))
            await asyncio.sleep(30.0)
            model._do = proper  # type: ignore[method-assign]
            await notified.wait()

    run(main)


def contest(seed: int) -> WireWorld:
    def build(world: WireWorld) -> ConsulModel:
        return ConsulModel(seed, lambda: not world.is_calm)

    return run_contest(
        seed,
        build,
        lambda host: f"consul://{host}:1000,{host}:1001",
        ports=(1000, 1001),
        leader_within_s=LEADER_WITHIN_S,
    )


@pytest.mark.parametrize("seed", [1, 2, 3, 7])
def test_contest(seed: int) -> None:
    assert contest(seed).oracle.terms > 3


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(1000, 1050))
def test_contest_long(seed: int) -> None:
    contest(seed)


async def unbound(self: ConsulStore, key: str, value: bytes, lease: Lease) -> Creation:
    """A mutant of `create` that does not bind the entry to the session."""
    entry = await self.put(key, value, if_version=None)
    if entry is not None:
        return Creation(True, entry._replace(lease=lease.id))
    return Creation(False, await existing(self, key))


async def credulous(self: ConsulStore, key: str, value: bytes, lease: Lease) -> Creation:
    """A mutant of `create` that takes an existing entry for its own."""
    creation = await CREATE(self, key, value, lease)
    return Creation(True, creation.entry._replace(lease=lease.id))


CREATE = ConsulStore.create


async def existing(store: Store, key: str) -> Entry:
    found = await store.get(key)
    if found is None:
        raise OutcomeUnknown("it was deleted meanwhile")
    return found


@pytest.mark.parametrize(
    ("mutant", "seed", "caught"), [(unbound, 7, TimeoutError), (credulous, 7, SafetyViolated)]
)
def test_mutants_are_detected(
    mutant: Callable[..., object],
    seed: int,
    caught: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ConsulStore, "create", mutant)
    monkeypatch.setattr(ConsulStore, "create_and_look", Store.create_and_look)
    with pytest.raises(caught):
        contest(seed)
