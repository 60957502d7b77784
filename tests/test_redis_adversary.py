"""The Redis adapter against a scripted server, in virtual time. Whatever connections and servers
do, there is one leader at a time, tokens grow, and in the end a candidate leads."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import random
from collections.abc import Awaitable, Callable

import pytest
from redis.asyncio import connection

from adversary import Network, WireLoop, WireOracle, WireWorld, run_contest
from doyen.errors import OutcomeUnknown, StoreUnavailable
from doyen.lease.clock import VirtualClock
from doyen.model import leader_key, order_key
from doyen.stores.kit.expiry import LeaseRow, LeaseVerdict
from doyen.stores.kit.observer import LeaseObserver
from doyen.stores.port import Context, Store, open_store
from doyen.stores.redis.connection import _DIGESTS
from doyen.stores.redis.scripts import SCRIPTS
from doyen.testing.faults import Faults, Late
from model_redis import FAIR, LAG_S, RedisModel
from swarm import SafetyViolated

STEPS = 40
TTL_S = 3.0
KEY = leader_key("e")
FAILOVERS = {**WireWorld.happenings, "failover": 2}


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-py sets an option of TCP, which the sockets of a test do not have."""

    async def connect(self: connection.Connection) -> None:
        self._reader, self._writer = await asyncio.open_connection(self.host, self.port)

    monkeypatch.setattr(connection.Connection, "_connect", connect)


class Tokens(WireOracle):
    """Checks only that tokens grow: all that is guaranteed if confirmed writes can be lost."""

    def look(self) -> None:
        return


def contest(
    seed: int, *, failover: bool = False, replicas: int = 0, oracle: type[WireOracle] = WireOracle
) -> RedisModel:
    models: list[RedisModel] = []

    def build(world: WireWorld) -> RedisModel:
        model = RedisModel(world.clock, random.Random(world.rng.getrandbits(32)))
        world.oracle = oracle()
        world.wall = lambda _: model.step_clock(world.rng.choice([-600, 600]))  # type: ignore[method-assign]
        if failover:
            world.happenings = FAILOVERS  # type: ignore[misc]
            world.failover = lambda _: model.failover()  # type: ignore[attr-defined]
        calm = world.calm

        def calmed() -> None:
            model.disturbance = FAIR
            calm()

        world.calm = calmed  # type: ignore[method-assign]
        models.append(model)
        return model

    options = f"?replicas={replicas}" if replicas else ""
    run_contest(seed, build, lambda host: f"redis://{host}:1000{options}", steps=STEPS)
    return models[0]


@pytest.mark.parametrize("seed", range(3))
def test_one_leads_at_a_time(seed: int) -> None:
    assert contest(seed).redirections


@pytest.mark.parametrize("seed", range(3))
def test_one_leads_at_a_time_although_servers_are_replaced(seed: int) -> None:
    """The replica that takes over has confirmed every write."""
    assert contest(seed, failover=True, replicas=1).failovers


@pytest.mark.parametrize("seed", [0, 1, 2, 1024])
def test_tokens_grow_although_writes_are_lost(seed: int) -> None:
    """In the last one, a candidate gives its record back to one of higher priority, which leads;
    then a failover loses the deletion."""
    assert contest(seed, failover=True, oracle=Tokens).failovers


MUTANTS: dict[str, tuple[str, str, str, int, dict[str, object]]] = {
    "creates over an existing entry": ("create", "if present then", "if false then", 1, {}),
    "begins where the old server was": (
        "create",
        "ahead = ahead + GAP",
        "ahead = ahead",
        58,
        {"failover": True, "oracle": Tokens},
    ),
}
"""The script, what is replaced in it and by what, the first seed that is tried, and options."""


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_script_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, right, wrong, first, options = MUTANTS[mutant]
    for each in (script, "create and look"):
        break_script(monkeypatch, each, right, wrong)
    assert is_caught(lambda seed: contest(seed, **options), first)  # type: ignore[arg-type]


def break_script(monkeypatch: pytest.MonkeyPatch, script: str, right: str, wrong: str) -> None:
    text = SCRIPTS[script]
    assert right in text
    broken = text.replace(right, wrong)
    monkeypatch.setitem(SCRIPTS, script, broken)
    monkeypatch.setitem(_DIGESTS, script, hashlib.sha1(broken.encode()).hexdigest())


def test_a_client_that_ends_leases_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = LeaseObserver.judge

    def hasty(self: LeaseObserver, row: LeaseRow) -> LeaseVerdict:
        return judge(self, row._replace(ttl_us=None if row.ttl_us is None else row.ttl_us // 2))

    monkeypatch.setattr(LeaseObserver, "judge", hasty)
    assert is_caught(contest)


async def renewed_while_an_answer_was_late(room: Room) -> bool:
    """The other client's second read leaves the server before a renewal and arrives after it. By
    then the client has observed the lease unchanged for a ttl, and the server's clock, by which the
    lease is younger, has been stepped forward. Returns whether the lease survives."""
    lease = await room.holder.grant(TTL_S)
    await room.holder.create(KEY, b"", lease)
    assert await room.other.get(KEY) is not None
    room.model.step_clock(600)
    await asyncio.sleep(TTL_S - 0.7)
    room.faults["other"].next("EVALSHA", Late(after_s=1.0))
    looking = asyncio.ensure_future(room.other.get(KEY))
    await asyncio.sleep(0.1)
    await room.holder.renew(lease)
    return await looking is not None


async def clock_was_set_forward(room: Room) -> bool:
    lease = await room.holder.grant(TTL_S)
    await room.holder.create(KEY, b"", lease)
    await asyncio.sleep(TTL_S / 3)
    room.model.step_clock(600)
    entry = await room.other.get(KEY)
    await asyncio.sleep(TTL_S / 3)
    return entry is not None and await room.other.get(KEY) is not None


class Room:
    """Two stores on one server, each with its own faults."""

    def __init__(self, scenario: Callable[[Room], Awaitable[bool]]) -> None:
        self.faults = {name: Faults() for name in ("holder", "other")}
        self._names = itertools.count()
        loop = WireLoop(VirtualClock())
        loop.network = self._network = Network()
        self._clock = loop.clock
        try:
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                self.survived = runner.run(self._run(scenario))
        finally:
            self._network.close()

    async def _run(self, scenario: Callable[[Room], Awaitable[bool]]) -> bool:
        self.model = RedisModel(self._clock, random.Random(0), FAIR)
        self.holder, self.other = await self._open("holder"), await self._open("other")
        try:
            return await scenario(self)
        finally:
            await self.holder.close()
            await self.other.close()

    async def token(self) -> int:
        """A token from the server that is the master now."""
        async with asyncio.timeout(LAG_S):
            while True:
                with contextlib.suppress(StoreUnavailable, OutcomeUnknown):
                    name = f"{order_key('e')}/{next(self._names)}"
                    entry = await self.holder.put(name, b"", if_version=None)
                    assert entry is not None
                    return entry.revision
                await asyncio.sleep(0.02)

    async def _open(self, name: str) -> Store:
        await self._network.listen(name, 1000, self.model, self.faults[name])
        return await open_store(f"redis://{name}:1000", Context(self._clock, lambda event: None))


@pytest.mark.parametrize("broken", [False, True])
def test_a_renewal_prevails_over_a_delayed_read(
    broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Contests rarely reach this: renewals have to fail for most of a ttl, one has to succeed just
    then, and the age of the lease by the server's clock has to be wrong."""
    if broken:
        check = "if redis.call('HGET', LEASES, 'counter:' .. ARGV[3]) ~= ARGV[4] then return 0 end"
        break_script(monkeypatch, "expire", check, "")
    assert Room(renewed_while_an_answer_was_late).survived is not broken


async def two_failovers(room: Room) -> bool:
    """Two failovers. The second promotes a server that has none of the first one's writes. Returns
    whether tokens grow."""
    tokens = [await room.token()]
    await asyncio.sleep(LAG_S + 0.1)
    tokens.append(await room.token())
    for _ in range(2):
        room.model.failover()
        tokens.append(await room.token())
    return tokens == sorted(set(tokens))


def test_tokens_grow_across_servers_without_common_writes() -> None:
    assert Room(two_failovers).survived


@pytest.mark.parametrize("broken", [False, True])
def test_no_clock_of_a_server_ends_a_lease(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if broken:
        judge = LeaseObserver.judge

        def trusting(self: LeaseObserver, row: LeaseRow) -> LeaseVerdict:
            verdict = judge(self, row)
            return verdict._replace(over=row.ttl_us is None or row.age_us >= row.ttl_us)

        monkeypatch.setattr(LeaseObserver, "judge", trusting)
    assert Room(clock_was_set_forward).survived is not broken


def is_caught(run: Callable[[int], object], first: int = 1, seeds: int = 12) -> bool:
    for seed in range(first, first + seeds):
        try:
            run(seed)
        except SafetyViolated:
            return True
    return False


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(5))
@pytest.mark.parametrize("kind", ["steady", "replaced", "lossy"])
def test_many(kind: str, block: int) -> None:
    for seed in range(1000 + block * 20, 1020 + block * 20):
        match kind:
            case "steady":
                contest(seed)
            case "replaced":
                contest(seed, failover=True, replicas=1)
            case _:
                contest(seed, failover=True, oracle=Tokens)


async def request_was_not_sent(room: Room) -> bool:
    """A key that UTF-8 cannot carry. Returns whether later requests get their own responses."""
    lease = await room.holder.grant(TTL_S)
    created = await room.holder.create(KEY, b"v", lease)
    with pytest.raises(UnicodeEncodeError):
        await room.holder.get("\udc80")
    async with asyncio.timeout(1.0):
        return (await room.holder.get(KEY), await room.holder.get("none")) == (
            created.entry,
            None,
        )


def test_a_request_that_cannot_be_encoded_shifts_no_responses() -> None:
    assert Room(request_was_not_sent).survived
