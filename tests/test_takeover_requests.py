"""What a crash costs with a warden: the requests from the death of the holder to the body of the
successor, on models of the engines, in virtual time.

As many as in a handover (see `test_handover_requests`): one request that ends the dead holder's
lease, and one that takes the record and shows whether it was the candidate's turn. On NATS a lease
has two messages, which are deleted at the same time.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from urllib.parse import quote

import grpc.aio
import pytest
from redis.asyncio.connection import Connection as RedisSocket

from adversary import WireWorld
from doyen.model import Claim
from doyen.stores.port import Context, open_store
from doyen.testing.faults import Faults
from model_etcd import Channel, EtcdModel
from model_nats import FAIR, NatsModel
from model_postgresql import PostgreSQLModel, keep_virtual_time
from model_redis import FAIR as CALM
from model_redis import RedisModel
from test_handover_requests import TTL_S, Handover

DIES_AFTER_S = 0.613
CLAIM = Claim("a", "a-1", {}).encode()


class Takeover(Handover):
    """A holder `a` whose lease a warden `w` ends, and a candidate `b`."""

    async def _life(
        self, world: WireWorld, prepare: Callable[[WireWorld], Awaitable[None]] | None
    ) -> None:
        if prepare is not None:
            await prepare(world)
        self._requests["w"] = Counter()
        for host in "abw":
            await world.network.listen(host, world.ports[0], world.model, Faults())
        context = Context(world.clock, lambda _: None)
        holder = await open_store(world.url("a"), context)
        lease = await holder.grant(TTL_S)
        await holder.enqueue("elections/e/line", CLAIM, lease)
        await holder.create("elections/e/leader", CLAIM, lease)
        warrant = holder.warrant(lease)
        warden = await open_store(
            world.url("w"), Context(world.clock, lambda _: None, create=False, ends_only=True)
        )
        await warden.rehearse()

        async def die() -> None:
            await asyncio.sleep(DIES_AFTER_S)
            for requests in self._requests.values():
                requests.clear()
            await warden.end(warrant)

        async with self._session(world, "b") as b:
            dying = asyncio.create_task(die())
            async with b.campaign("e", name="b"):
                counted = {host: Counter(each) for host, each in self._requests.items()}
            await dying
        await holder.close()
        await warden.close()
        self._requests = {host: counted[host] for host in "wb"}


@pytest.fixture
def takeover(monkeypatch: pytest.MonkeyPatch) -> Takeover:
    return Takeover(monkeypatch)


def test_etcd(takeover: Takeover, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc.aio, "insecure_channel", Channel)
    requests = takeover.run(lambda _: EtcdModel(), lambda _, host: f"etcd://{host}:1000")
    assert requests["w"] == {"LeaseRevoke": 1}
    assert requests["b"]["Txn"] == 1
    assert not requests["b"]["Range"]


def test_redis(takeover: Takeover, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(self: RedisSocket) -> None:
        self._reader, self._writer = await asyncio.open_connection(self.host, self.port)

    monkeypatch.setattr(RedisSocket, "_connect", connect)

    def build(world: WireWorld) -> RedisModel:
        return RedisModel(world.clock, random.Random(1), CALM)

    requests = takeover.run(build, lambda _, host: f"redis://{host}:1000")
    assert requests["w"] == {"EVALSHA": 1}
    assert requests["b"]["EVALSHA"] == 1


def test_nats(takeover: Takeover) -> None:
    """The entries are deleted later: a candidate that finds its record deleted looks again."""

    def build(world: WireWorld) -> NatsModel:
        return NatsModel(world.clock.now, 1, FAIR)

    requests = takeover.run(build, lambda _, host: f"nats://{host}:1000/doyen")
    assert requests == {"w": {"write": 2}, "b": {"write": 1}}


def test_postgresql(takeover: Takeover, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_virtual_time(monkeypatch)

    def url(world: WireWorld, host: str) -> str:
        return f"postgresql://u@{quote(str(world.network.directory / host), safe='')}:1000/d"

    requests = takeover.run(lambda _: PostgreSQLModel(), url)
    assert requests == {"w": {"write": 1}, "b": {"write": 1}}
