"""Layouts of other programs in virtual time: candidates of doyen and of another program in one
line, under faults of the network and of the servers.

While a term of doyen is valid, its entry is the first of its line in the server, whatever the
candidates of the other program do. This is checked after every turn of the loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, Protocol

import grpc.aio
import pytest

from adversary import Connection, WireOracle, WireProcess, WireWorld, run_contest
from doyen.election.queries import is_foreign
from doyen.model import Entry, Lease
from doyen.stores.consul.client import ConsulResponse
from doyen.stores.consul.lock import FLAGS, ConsulLockStore
from doyen.stores.consul.store import Operation
from doyen.stores.etcd import rpc
from doyen.stores.etcd.concurrency import ConcurrencyStore
from doyen.stores.kit.layouts import LineLayout
from doyen.stores.port import Creation, Store
from doyen.stores.zookeeper.recipes import KazooStore, contenders
from model_consul import ConsulModel
from model_etcd import Channel, EtcdModel
from model_zookeeper import SEQUENCE, Reader, SessionRow, ZooKeeperModel
from swarm import RECIPES, assert_oracle_sees
from test_zookeeper_adversary import Kazoo
from test_zookeeper_adversary import contest as zookeeper_contest

FOREIGN = b"theirs"


class Line(Protocol):
    """The line of a server in which candidates of both kinds stand."""

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


PAUSE_S = 0.01
"""How long a stranger pauses at least."""


class Stranger:
    """A candidate of another program, which acts when the server receives a request: it joins,
    leads, and leaves."""

    def __init__(self, seed: int, line: Line) -> None:
        self._rng = random.Random(seed)
        self._line = line
        self._entry: int | None = None
        """The token of its entry in the line."""
        self._led = False
        self._next = 0.0
        """When it may join or leave again. Each change of the line wakes all that watch it: if the
        stranger acted on each of their requests, time would stand still."""
        self.terms = 0

    def act(self, join: Callable[[], int | None], leave: Callable[[], None]) -> None:
        draw, now = self._rng.random(), asyncio.get_running_loop().time()
        if self._entry is not None and self._line.first() == self._entry and not self._led:
            self.terms, self._led = self.terms + 1, True
        elif now >= self._next and draw < (0.06 if self._entry is None else 0.08):
            self._next = now + PAUSE_S
            if self._entry is None:
                self._entry, self._led = join(), False
            else:
                leave()
                self._entry = None


class EtcdLine(EtcdModel):
    """An etcd with a candidate as the Go package makes them."""

    KEY = b"swarm/694d"

    def __init__(self, seed: int, rough: Callable[[], bool]) -> None:
        super().__init__(seed, rough)
        self.stranger = Stranger(seed, self)

    def first(self) -> int | None:
        line = [at.created for key, at in self.kv.items() if key.startswith(b"swarm/")]
        return min(line, default=None)

    def _answer(
        self, connection: Connection, member: str, number: int, path: str, data: bytes
    ) -> bytes:
        self.stranger.act(self._join, self._leave)
        return super()._answer(connection, member, number, path, data)

    def _join(self) -> int:
        self._do(rpc.PUT.path, rpc.PutRequest(key=self.KEY, value=FOREIGN))
        return self.revision

    def _leave(self) -> None:
        self._do(rpc.DELETE.path, rpc.DeleteRangeRequest(key=self.KEY))


def etcd(seed: int, monkeypatch: pytest.MonkeyPatch, steps: int = 40) -> tuple[int, int]:
    monkeypatch.setattr(grpc.aio, "insecure_channel", Channel)

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
        steps=steps,
    )
    assert isinstance(world.model, EtcdLine)
    assert world.model.broken is None
    return world.oracle.terms, world.model.stranger.terms


class ZooKeeperLine(ZooKeeperModel):
    """A ZooKeeper with a contender of kazoo."""

    def __init__(self, world: WireWorld) -> None:
        super().__init__(world)
        self.stranger = Stranger(world.rng.getrandbits(32), self)
        self._path = ""
        world.oracle = self.oracle = LineOracle(self)

    def first(self) -> int | None:
        parent = self._nodes.get("/swarm")
        names = contenders(sorted(parent.children)) if parent else []
        return self._nodes[f"/swarm/{names[0]}"].czxid if names else None

    def _carry_out(
        self, connection: Connection, session: SessionRow, message: Reader, xid: int, kind: int
    ) -> bytes:
        self.stranger.act(self._join, self._leave)
        return super()._carry_out(connection, session, message, xid, kind)

    def _join(self) -> int | None:
        if "/swarm" not in self._nodes:
            return None
        self._zxid += 1
        kazoo = SessionRow(0, 0.0, 0.0)
        stem = "/swarm/7f0c__lock__"
        self._create(kazoo, stem, FOREIGN, SEQUENCE, False)()
        self._path = max(path for path in self._nodes if path.startswith(stem))
        return self._zxid

    def _leave(self) -> None:
        self._zxid += 1
        self._delete(self._path, -1)()


def zookeeper(seed: int, monkeypatch: pytest.MonkeyPatch, steps: int = 40) -> tuple[int, int]:
    with monkeypatch.context() as patch:
        model = zookeeper_contest(
            Kazoo(patch), seed, steps, make=ZooKeeperLine, options="?layout=kazoo"
        )
    assert isinstance(model, ZooKeeperLine)
    return model.oracle.terms, model.stranger.terms


class ConsulLine(ConsulModel):
    """A Consul with a process of `consul lock`, which unlocks the key, deletes it, or loses its
    session."""

    KEY = "swarm/.lock"
    LOCK_DELAY_S = 5.0

    def __init__(self, seed: int, rough: Callable[[], bool]) -> None:
        super().__init__(seed, rough)
        self.stranger = Stranger(seed, self)

    def first(self) -> int | None:
        lock = self.kv.get(self.KEY)
        return lock["ModifyIndex"] if lock is not None and lock.get("Session") else None

    def _do(
        self, method: str, path: str, query: dict[str, str], body: Any
    ) -> tuple[int, object, int]:
        self.stranger.act(self._join, self._leave)
        if path.startswith("session/info/"):
            return 200, [{"ID": path.rpartition("/")[2], "Name": FOREIGN.decode()}], 0
        return super()._do(method, path, query, body)

    def _join(self) -> int | None:
        delayed = asyncio.get_running_loop().time() < self._delayed.get(self.KEY, 0.0)
        if delayed or self.first() is not None:
            return None
        self._put("theirs")
        return self.index

    def _leave(self) -> None:
        how = self.rng.choice(["unlock", "delete", "lose"])
        if how == "delete":
            self._remove(self.kv, self.KEY, self._next())
            return
        if how == "lose":
            now = asyncio.get_running_loop().time()
            self._delayed[self.KEY] = now + self.LOCK_DELAY_S
        self._put(None)

    def _put(self, session: str | None) -> None:
        operation = {"Key": self.KEY, "Value": None, "Flags": FLAGS}
        index = self._next()
        self._write(self.kv, operation, index, self.kv.get(self.KEY), session)


def consul(seed: int, monkeypatch: pytest.MonkeyPatch, steps: int = 40) -> tuple[int, int]:
    def build(world: WireWorld) -> ConsulLine:
        model = ConsulLine(seed, lambda: not world.is_calm)
        world.oracle = LineOracle(model)
        return model

    world = run_contest(
        seed,
        build,
        lambda host: f"consul://{host}:1000,{host}:1001?layout=lock",
        ports=(1000, 1001),
        leader_within_s=60.0,
        steps=steps,
    )
    assert isinstance(world.model, ConsulLine)
    return world.oracle.terms, world.model.stranger.terms


@pytest.fixture(autouse=True)
def no_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts have none."""

    def prepare(process: WireProcess) -> None:
        process.rank, process.recipe = 0, process.world.rng.choice(RECIPES)

    monkeypatch.setattr(WireProcess, "prepare", prepare)


SEEDS = {"etcd": 1, "zookeeper": 4, "consul": 2}
"""Of short contests in which candidates of both kinds lead."""
CONTESTS = {"etcd": etcd, "zookeeper": zookeeper, "consul": consul}
STORES: dict[str, type[Store]] = {
    "etcd": ConcurrencyStore,
    "zookeeper": KazooStore,
    "consul": ConsulLockStore,
}


@pytest.mark.parametrize("engine", CONTESTS)
def test_contest(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = CONTESTS[engine](SEEDS[engine], monkeypatch, 20)
    assert ours > 1
    assert theirs > 0


@pytest.mark.chaos
@pytest.mark.parametrize("engine", CONTESTS)
@pytest.mark.parametrize("seed", range(100, 150))
def test_contest_long(engine: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    CONTESTS[engine](seed, monkeypatch)


async def only_ours(self: LineLayout, line: str) -> Entry | None:
    """A mutant that does not count candidates of other programs."""
    return next((each for each in await self._all(line) if not is_foreign(each)), None)


async def anyone(self: LineLayout, key: str, value: bytes, lease: Lease) -> Creation:
    """A mutant of `create` that takes the first in line for its own."""
    creation = await CREATE(self, key, value, lease)
    return Creation(True, creation.entry._replace(lease=lease.id))


CREATE = LineLayout.create


async def stealing(self: ConsulLockStore, *operations: Operation) -> ConsulResponse:
    """A mutant that locks the key although the session of another has locked it."""
    lock = operations[-1]
    if lock["Verb"] != "lock":
        return await TRANSACT(self, *operations)
    return await TRANSACT(self, {"Verb": "delete", "Key": lock["Key"]}, lock)


async def sees_no_lock(self: ConsulLockStore, key: str) -> dict[str, Any] | None:
    """Half of the same mutant: it does not see that the key is locked."""
    raw = await RAW(self, key)
    return raw if raw is None or raw.get("Value") else {**raw, "Session": ""}


TRANSACT, RAW = ConsulLockStore._transact, ConsulLockStore._raw


@pytest.mark.parametrize(
    ("engine", "mutant"),
    [
        ("etcd", "_first"),
        ("etcd", "create"),
        pytest.param("consul", "_transact _raw", marks=pytest.mark.chaos),
        pytest.param("zookeeper", "_first", marks=pytest.mark.chaos),
        pytest.param("zookeeper", "create", marks=pytest.mark.chaos),
    ],
)
def test_a_mutant_is_detected(engine: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken: dict[str, Callable[..., Any]] = {"_first": only_ours, "create": anyone}
    if engine == "consul":
        broken = {"_transact": stealing, "_raw": sees_no_lock}

    def make_broken(patch: pytest.MonkeyPatch) -> None:
        for name in mutant.split():
            patch.setattr(STORES[engine], name, broken[name])

    assert_oracle_sees(
        make_broken,
        monkeypatch,
        lambda seed: CONTESTS[engine](seed, monkeypatch),
        range(1, 21),
    )
