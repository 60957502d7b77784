"""Layouts of other programs in virtual time: candidates of doyen and of another program in one
line, under faults of the network and of the servers.

While a term of doyen is valid, its entry is the first of its line in the server, whatever the
candidates of the other program do. This is checked after every turn of the loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Protocol

import grpc.aio
import pytest

from adversary import Connection, WireOracle, WireProcess, WireWorld, run_contest
from doyen.election.queries import is_foreign
from doyen.model import Entry, Lease
from doyen.stores.etcd import rpc
from doyen.stores.etcd.concurrency import ConcurrencyStore
from doyen.stores.port import Creation
from model_etcd import Channel, EtcdModel
from swarm import RECIPES, assert_oracle_sees

ELECTION = "swarm"
FOREIGN = "theirs"


class Line(Protocol):
    """The line of a server in which candidates of both kinds stand."""

    @property
    def foreign(self) -> int:
        """How many terms candidates of the other program had."""
        ...

    def first(self) -> int | None:
        """The token of whoever is first."""
        ...


class LineOracle(WireOracle):
    """Also checks that the leader is the first in line."""

    def __init__(self, line: Line) -> None:
        super().__init__()
        self._line = line

    def look(self) -> None:
        super().look()
        for term in self._valid:
            if self._line.first() != term.token:
                self.object(f"{term} is valid, but {self._line.first()} is first in line")


class Stranger:
    """A candidate of another program, which acts when the server receives a request: it joins,
    leads, leaves, or dies."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self.entry: int | None = None
        """The token of its entry in the line."""
        self.terms = 0
        self._led = False

    def act(
        self,
        join: Callable[[], int],
        leave: Callable[[], None],
        first: Callable[[], int | None],
    ) -> None:
        draw = self._rng.random()
        if self.entry is None:
            if draw < 0.02:
                self.entry, self._led = join(), False
        elif first() == self.entry and not self._led:
            self.terms, self._led = self.terms + 1, True
        elif draw < 0.04:
            leave()
            self.entry = None


class EtcdLine(EtcdModel):
    """An etcd with a candidate as the Go package makes them."""

    def __init__(self, seed: int, rough: Callable[[], bool]) -> None:
        super().__init__(seed, rough)
        self._stranger = Stranger(seed)

    @property
    def foreign(self) -> int:
        return self._stranger.terms

    def first(self) -> int | None:
        line = [at.created for key, at in self.kv.items() if key.startswith(b"swarm/")]
        return min(line, default=None)

    def _answer(
        self, connection: Connection, member: str, number: int, path: str, data: bytes
    ) -> bytes:
        self._stranger.act(self._join, self._leave, self.first)
        return super()._answer(connection, member, number, path, data)

    def _join(self) -> int:
        self._do(rpc.PUT.path, rpc.PutRequest(key=b"swarm/694d", value=FOREIGN.encode()))
        return self.revision

    def _leave(self) -> None:
        self._do(rpc.DELETE.path, rpc.DeleteRangeRequest(key=b"swarm/694d"))


@pytest.fixture(autouse=True)
def world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts have no priorities."""

    def prepare(process: WireProcess) -> None:
        process.rank, process.recipe = 0, process.world.rng.choice(RECIPES)

    monkeypatch.setattr(WireProcess, "prepare", prepare)
    monkeypatch.setattr(grpc.aio, "insecure_channel", Channel)


def etcd(seed: int) -> WireWorld:
    def build(world: WireWorld) -> EtcdLine:
        model = EtcdLine(seed, lambda: not world.is_calm)
        world.oracle = LineOracle(model)
        return model

    world = run_contest(
        seed,
        build,
        lambda host: f"etcd://{host}:1000,{host}:1001,{host}:1002?layout=concurrency",
        ports=(1000, 1001, 1002),
        leader_within_s=60.0,
    )
    assert isinstance(world.model, EtcdLine)
    assert world.model.broken is None
    return world


CONTESTS = {"etcd": etcd}


def contest(engine: str, seed: int) -> None:
    world = CONTESTS[engine](seed)
    model = world.model
    assert world.oracle.terms > 3
    assert isinstance(model, EtcdLine)
    assert model.foreign > 0


@pytest.mark.parametrize("engine", CONTESTS)
def test_contest(engine: str) -> None:
    contest(engine, 1)


@pytest.mark.chaos
@pytest.mark.parametrize("engine", CONTESTS)
@pytest.mark.parametrize("seed", range(100, 150))
def test_contest_long(engine: str, seed: int) -> None:
    CONTESTS[engine](seed)


async def only_ours(self: ConcurrencyStore, line: str) -> Entry | None:
    """A mutant that does not count candidates of other programs."""
    return next((each for each in await self._all(line) if not is_foreign(each)), None)


async def anyone(self: ConcurrencyStore, key: str, value: bytes, lease: Lease) -> Creation:
    """A mutant of `create` that takes the first in line for its own."""
    creation = await CREATE(self, key, value, lease)
    return Creation(True, creation.entry._replace(lease=lease.id))


CREATE = ConcurrencyStore.create


@pytest.mark.parametrize("mutant", ["_first", "create"])
def test_a_mutant_is_detected(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"_first": only_ours, "create": anyone}[mutant]
    assert_oracle_sees(
        lambda patch: patch.setattr(ConcurrencyStore, mutant, broken),
        monkeypatch,
        etcd,
        range(1, 4),
    )
