"""The Redis adapter against a scripted server, in virtual time: whatever links and servers do,
there is one leader at a time, tokens grow, and in the end somebody leads."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import pytest
from redis.asyncio import connection

from adversary import WireOracle, WireWorld, run_contest
from doyen.lookout import LeaseRow, Lookout, Verdict
from doyen.stores.redis import link
from doyen.stores.redis.scripts import SCRIPTS
from model_redis import FAIR, RedisModel
from swarm import SafetyViolated

STEPS = 40
FAILOVERS = {**WireWorld.happenings, "failover": 2}


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """redis-py sets an option of TCP, which the sockets of a test do not have."""

    async def connect(self: connection.Connection) -> None:
        self._reader, self._writer = await asyncio.open_connection(self.host, self.port)

    monkeypatch.setattr(connection.Connection, "_connect", connect)


class Tokens(WireOracle):
    """Asks of terms only that their tokens grow: all that is promised if writes can be lost."""

    def look(self) -> None:
        return


def contest(
    seed: int, *, failover: bool = False, replicas: int = 0, oracle: type[WireOracle] = WireOracle
) -> RedisModel:
    models: list[RedisModel] = []

    def build(world: WireWorld) -> RedisModel:
        model = RedisModel(world)
        world.oracle = oracle()
        world.wall = lambda _: model.step_clock(world.rng.choice([-600, 600]))  # type: ignore[method-assign]
        if failover:
            world.happenings = FAILOVERS  # type: ignore[misc]
            world.failover = lambda _: model.failover()  # type: ignore[attr-defined]
        calm = world.calm

        def calmed() -> None:
            model.trouble = FAIR
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
def test_one_leads_at_a_time_though_servers_are_replaced(seed: int) -> None:
    """With every write confirmed by the replica that takes over."""
    assert contest(seed, failover=True, replicas=1).failovers


@pytest.mark.parametrize("seed", range(3))
def test_tokens_grow_though_writes_are_lost(seed: int) -> None:
    assert contest(seed, failover=True, oracle=Tokens).failovers


MUTANTS: dict[str, tuple[str, str, str, dict[str, object]]] = {
    "creates over what stands there": ("create", "if standing then", "if false then", {}),
    "begins where the old server was": (
        "create",
        "n = n + GAP",
        "n = n",
        {"failover": True, "oracle": Tokens},
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_script_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, right, wrong, options = MUTANTS[mutant]
    text = SCRIPTS[script]
    assert right in text
    broken = text.replace(right, wrong)
    monkeypatch.setitem(SCRIPTS, script, broken)
    monkeypatch.setitem(link._DIGESTS, script, hashlib.sha1(broken.encode()).hexdigest())
    assert is_caught(lambda seed: contest(seed, **options))  # type: ignore[arg-type]


def test_one_who_ends_leases_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = Lookout.judge

    def hasty(self: Lookout, row: LeaseRow) -> Verdict:
        return judge(self, row._replace(ttl_us=None if row.ttl_us is None else row.ttl_us // 2))

    monkeypatch.setattr(Lookout, "judge", hasty)
    assert is_caught(contest)


def is_caught(run: Callable[[int], object], seeds: int = 12) -> bool:
    for seed in range(1, seeds):
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
