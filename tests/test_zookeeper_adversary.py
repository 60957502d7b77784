"""The ZooKeeper store against a simulated ensemble, in virtual time: whatever connections and
sessions do, there is one leader at a time, tokens grow, and in the end a candidate leads.

kazoo's threads take turns with the loop (see `strands`). kazoo, its sockets and its retries run in
virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from kazoo.protocol import connection as kazoo_connection
from kazoo.retry import KazooRetry

from adversary import WireWorld, run_contest
from doyen.errors import OutcomeUnknown, StoreUnavailable
from doyen.model import Lease
from doyen.stores.zookeeper import connection
from doyen.stores.zookeeper.store import ZooKeeperStore
from model_zookeeper import TICK_S, ZooKeeperModel
from strands import Event, Strands
from swarm import SafetyViolated


class Plain(socket.socket):
    """A Unix socket that ignores TCP options."""

    def setsockopt(self, *_: Any) -> None:
        return


class Kazoo:
    """Runs kazoo on a world's loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._sockets: list[socket.socket] = []

    def close(self) -> None:
        """End kazoo's threads. It cannot stop by itself, since virtual time has ended."""
        self.strands.close()
        for each in self._sockets:
            each.close()

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        pair = socket.socketpair()
        self._sockets += pair
        return pair

    def on(self, world: WireWorld) -> None:
        """Patch kazoo. Called on the world's loop, before any store is opened."""
        loop = asyncio.get_running_loop()
        self.strands = strands = Strands(loop)

        def connect(address: tuple[str, int], timeout_s: float) -> socket.socket:
            path = strands.run(world.network.reach(*address), timeout_s)
            made = Plain(socket.AF_UNIX)
            self._sockets.append(made)
            made.connect(path)
            return made

        def thread(*, target: Callable[[], None], **_: Any) -> Any:
            return SimpleNamespace(start=lambda: strands.spawn(target))

        handler, patch = connection.KazooHandler, self._patch.setattr
        patch(connection, "select", SimpleNamespace(poll=strands.poll, POLLIN=1, POLLOUT=4))
        patch(connection, "socket", _Sockets(connect))
        patch(connection, "threading", SimpleNamespace(Thread=thread))
        patch(connection, "KazooRetry", partial(KazooRetry, sleep_func=strands.sleep))
        patch(kazoo_connection, "time", SimpleNamespace(monotonic=loop.time))
        patch(handler, "sleep_func", staticmethod(strands.sleep))
        patch(handler, "spawn", lambda _, run, *given: strands.spawn(run, *given))
        patch(handler, "event_object", lambda _: Event(strands))
        patch(handler, "create_socket_pair", lambda _: self._pair())
        patch(
            connection._Connection,
            "_expand_client_hosts",
            lambda self: [(host, host, port) for host, port in self.client.hosts],
        )


class _Sockets:
    """The module `socket` with another `create_connection`."""

    def __init__(self, connect: Callable[[tuple[str, int], float], socket.socket]) -> None:
        self.create_connection = connect

    def __getattr__(self, name: str) -> Any:
        return getattr(socket, name)


@pytest.fixture
def kazoo(monkeypatch: pytest.MonkeyPatch) -> Kazoo:
    return Kazoo(monkeypatch)


def contest(
    kazoo: Kazoo,
    seed: int,
    steps: int = 40,
    *,
    make: Callable[[WireWorld], ZooKeeperModel] = ZooKeeperModel,
    options: str = "",
) -> ZooKeeperModel:
    models: list[ZooKeeperModel] = []

    def build(world: WireWorld) -> ZooKeeperModel:
        model = make(world)
        trouble, end = world.trouble, world.end

        async def with_kazoo(candidates: int, steps: int) -> None:
            kazoo.on(world)
            world.ticking = asyncio.create_task(tick(model))  # type: ignore[attr-defined]
            await trouble(candidates, steps)

        async def ended() -> None:
            await end()
            world.ticking.cancel()  # type: ignore[attr-defined]

        world.trouble, world.end = with_kazoo, ended  # type: ignore[method-assign]
        models.append(model)
        return model

    try:
        run_contest(seed, build, lambda host: f"zookeeper://{host}:1000{options}", steps=steps)
    finally:
        kazoo.close()
    return models[0]


async def tick(model: ZooKeeperModel) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        model.expire()


@pytest.mark.parametrize("seed", range(3))
def test_one_leads_at_a_time(kazoo: Kazoo, seed: int) -> None:
    assert contest(kazoo, seed).expired


def takes_unknown_for_success(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant of `renew` that takes an unknown outcome for success."""
    renew = ZooKeeperStore.renew

    async def hopeful(self: ZooKeeperStore, lease: Lease) -> None:
        with contextlib.suppress(OutcomeUnknown, StoreUnavailable):
            await renew(self, lease)

    monkeypatch.setattr(ZooKeeperStore, "renew", hopeful)


def test_a_mutant_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    takes_unknown_for_success(monkeypatch)
    assert any(is_detected(Kazoo(monkeypatch), seed) for seed in range(6, 18))


def is_detected(kazoo: Kazoo, seed: int) -> bool:
    try:
        contest(kazoo, seed)
    except SafetyViolated:
        return True
    return False


@pytest.mark.chaos
@pytest.mark.parametrize("block", range(5))
def test_many(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    for seed in range(1000 + 20 * block, 1020 + 20 * block):
        contest(Kazoo(monkeypatch), seed)
