"""What a handover costs: the requests from the end of the old leader's body to the beginning of the
new one's, on models of the engines, in virtual time.

There is nothing to spare: one request that frees the record and the place in the line, one that
takes the record and shows whether it was the candidate's turn. NATS has no transactions.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

import grpc.aio
import pytest
from redis.asyncio.connection import Connection as RedisSocket

from adversary import Connection, WireWorld
from doyen import Session
from doyen.election.options import SessionSettings
from doyen.lease.runtime import InlineRuntime
from doyen.testing.faults import Faults
from model_consul import ConsulModel
from model_etcd import Channel, EtcdModel
from model_mysql import MySQLModel
from model_nats import FAIR, NatsModel
from model_postgresql import PostgreSQLModel, keep_virtual_time
from model_redis import FAIR as CALM
from model_redis import RedisModel
from model_zookeeper import ZooKeeperModel
from test_zookeeper_adversary import Kazoo, tick

TTL_S = 6.0
RESIGNS_AFTER_S = 0.613
"""At another time than what happens every 50 ms."""
Requests = dict[str, Counter[str]]


class Handover:
    """A leader `a` and a candidate `b`, each with a session of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._requests: Requests = {"a": Counter(), "b": Counter()}
        self.took_s = 0.0

    def run(
        self,
        build: Callable[[WireWorld], Any],
        url: Callable[[WireWorld, str], str],
        prepare: Callable[[WireWorld], Awaitable[None]] | None = None,
    ) -> Requests:
        """The requests of each of them during the handover."""
        answer = Connection.answer

        async def counted(
            connection: Connection, operation: str, do: Callable[[], bytes], about: str = ""
        ) -> None:
            self._requests[connection.host][operation] += 1
            await answer(connection, operation, do, about)

        self._patch.setattr(Connection, "answer", counted)
        world = WireWorld(1, build, lambda host: url(world, host))
        world.watch_over(self._life(world, prepare))
        return self._requests

    async def _life(
        self, world: WireWorld, prepare: Callable[[WireWorld], Awaitable[None]] | None
    ) -> None:
        if prepare is not None:
            await prepare(world)
        for host in "ab":
            await world.network.listen(host, world.ports[0], world.model, Faults())
        resign, resigned, led = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def lead_first(session: Session) -> None:
            async with session.campaign("e", name="a", trail=False):
                led.set()
                await resign.wait()
                self.took_s = -asyncio.get_running_loop().time()
                for requests in self._requests.values():
                    requests.clear()
            resigned.set()

        async with self._session(world, "a") as a, self._session(world, "b") as b:
            leading = asyncio.create_task(lead_first(a))
            await led.wait()
            asyncio.get_running_loop().call_later(RESIGNS_AFTER_S, resign.set)
            async with b.campaign("e", name="b"):
                self.took_s += asyncio.get_running_loop().time()
                counted = {host: Counter(each) for host, each in self._requests.items()}
                await resigned.wait()
            await leading
        self._requests = counted

    def _session(self, world: WireWorld, host: str) -> Session:
        asked = SessionSettings(url=world.url(host), ttl_s=TTL_S, stop_budget_s=0.1)
        return Session(asked, InlineRuntime(world.clock, ord(host)))


@pytest.fixture
def handover(monkeypatch: pytest.MonkeyPatch) -> Handover:
    return Handover(monkeypatch)


def test_etcd(handover: Handover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc.aio, "insecure_channel", Channel)
    requests = handover.run(lambda _: EtcdModel(), lambda _, host: f"etcd://{host}:1000")
    assert requests["a"]["Txn"] == requests["b"]["Txn"] == 1
    assert not requests["b"]["Range"]


def test_consul(handover: Handover) -> None:
    requests = handover.run(lambda _: ConsulModel(), lambda _, host: f"consul://{host}:1000")
    assert requests["a"]["txn"] == requests["b"]["txn"] == 1


def test_redis(handover: Handover, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(self: RedisSocket) -> None:
        self._reader, self._writer = await asyncio.open_connection(self.host, self.port)

    monkeypatch.setattr(RedisSocket, "_connect", connect)

    def build(world: WireWorld) -> RedisModel:
        return RedisModel(world.clock, random.Random(1), CALM)

    requests = handover.run(build, lambda _, host: f"redis://{host}:1000")
    assert requests["a"]["EVALSHA"] == requests["b"]["EVALSHA"] == 1


def test_nats(handover: Handover) -> None:
    def build(world: WireWorld) -> NatsModel:
        return NatsModel(world.clock.now, 1, FAIR)

    requests = handover.run(build, lambda _, host: f"nats://{host}:1000/doyen")
    assert requests == {"a": {"write": 2}, "b": {"write": 1}}


class LockingMySQL(MySQLModel):
    """Everyone has the lock of its ticket until it deletes the ticket."""

    def __init__(self) -> None:
        super().__init__()
        self._released: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def wait_for_lock(self, connection: Connection, text: str) -> None:
        for locked in re.finditer(r"(GET|RELEASE)_LOCK\(CONCAT\(.*?'(elections/[^']*)'\)", text):
            if locked[1] == "RELEASE" and "COMMIT" in text:
                self._released[locked[2]].set()
            elif locked[1] == "GET" and "COMMIT" not in text:
                await self._released[locked[2]].wait()
                if connection.reader.at_eof():
                    raise ConnectionResetError("the client has given up")


@pytest.mark.parametrize("engine", ["postgresql", "mysql"])
def test_sql(handover: Handover, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_virtual_time(monkeypatch)

    def url(world: WireWorld, host: str) -> str:
        if engine == "mysql":
            return f"mysql://u:p@{host}:1000/d?poll_s=1"
        return f"postgresql://u@{quote(str(world.network.directory / host), safe='')}:1000/d"

    model = LockingMySQL if engine == "mysql" else PostgreSQLModel
    requests = handover.run(lambda _: model(), url)
    # On MySQL, the answer to the query for the lock of the ticket ahead is a notification.
    assert requests["b"].pop("read", 0) == (engine == "mysql")
    assert handover.took_s < 0.1, "it waited for a query for changes"
    assert requests == {"a": {"write": 1}, "b": {"write": 1}}


def test_zookeeper(handover: Handover, monkeypatch: pytest.MonkeyPatch) -> None:
    kazoo, ticking = Kazoo(monkeypatch), []

    async def prepare(world: WireWorld) -> None:
        kazoo.on(world)
        ticking.append(asyncio.create_task(tick(world.model)))  # type: ignore[arg-type]

    try:
        requests = handover.run(ZooKeeperModel, lambda _, host: f"zookeeper://{host}:1000", prepare)
    finally:
        kazoo.close()
    assert (requests["a"]["14"], requests["b"]["14"]) == (1, 1)  # transactions
    assert requests["b"] == {"14": 1, "8": 1, "4": 1}  # and two reads after it
