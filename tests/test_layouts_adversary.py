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
from doyen.stores.kit.layouts import LineLayout
from doyen.stores.port import Creation
from doyen.stores.zookeeper.recipes import KazooStore, contenders
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


class Stranger:
    """A candidate of another program, which acts when the server receives a request: it joins,
    leads, and leaves."""

    def __init__(self, seed: int, line: Line) -> None:
        self._rng = random.Random(seed)
        self._line = line
        self._entry: int | None = None
        """The token of its entry in the line."""
        self._led = False
        self.terms = 0

    def act(self, join: Callable[[], int | None], leave: Callable[[], None]) -> None:
        draw = self._rng.random()
        if self._entry is None:
            if draw < 0.02:
                self._entry, self._led = join(), False
        elif self._line.first() == self._entry and not self._led:
            self.terms, self._led = self.terms + 1, True
        elif draw < 0.04:
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


def etcd(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
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


def zookeeper(seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    with monkeypatch.context() as patch:
        model = zookeeper_contest(Kazoo(patch), seed, make=ZooKeeperLine, options="?layout=kazoo")
    assert isinstance(model, ZooKeeperLine)
    return model.oracle.terms, model.stranger.terms


@pytest.fixture(autouse=True)
def no_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layouts have none."""

    def prepare(process: WireProcess) -> None:
        process.rank, process.recipe = 0, process.world.rng.choice(RECIPES)

    monkeypatch.setattr(WireProcess, "prepare", prepare)


CONTESTS = {"etcd": etcd, "zookeeper": zookeeper}
STORES: dict[str, type[LineLayout]] = {"etcd": ConcurrencyStore, "zookeeper": KazooStore}


@pytest.mark.parametrize("engine", CONTESTS)
def test_contest(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = CONTESTS[engine](1, monkeypatch)
    assert ours > 3
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


@pytest.mark.parametrize(
    ("engine", "mutant"),
    [
        ("etcd", "_first"),
        ("etcd", "create"),
        pytest.param("zookeeper", "_first", marks=pytest.mark.chaos),
        pytest.param("zookeeper", "create", marks=pytest.mark.chaos),
    ],
)
def test_a_mutant_is_detected(engine: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = {"_first": only_ours, "create": anyone}[mutant]
    assert_oracle_sees(
        lambda patch: patch.setattr(STORES[engine], mutant, broken),
        monkeypatch,
        lambda seed: CONTESTS[engine](seed, monkeypatch),
        range(1, 6),
    )
