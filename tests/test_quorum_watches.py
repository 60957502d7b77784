"""Watches that are resumed: a real client and a real service, on connections that break between any
two frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest

from doyen.lease.clock import SystemClock
from doyen.quorum.consensus.core import Membership, Role
from doyen.quorum.keyspace.commands import Put, decode_result, encode
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.node.driver import Status
from doyen.quorum.node.service import Service
from doyen.quorum.node.watches import CARRIED
from doyen.quorum.protocol.connection import End
from doyen.quorum.protocol.frames import CloseReason
from doyen.quorum.protocol.handshake import ConnectionIdentity, MemberInfo
from doyen.quorum.protocol.requests import (
    REQUEST,
    Request,
    Response,
    WatchConfirmed,
    WatchNotification,
    WatchRequest,
    decode_answer,
    decode_request,
)
from doyen.quorum.protocol.security import Security
from doyen.stores.quorum.connection import QuorumConnection, QuorumWatch
from doyen.stores.quorum.dialling import Dialler, ExpectedCluster
from doyen.testing.virtual import run_virtual
from mutants_nodes import one_position

Frame = tuple[int, bytes]


class Follower:
    """What a service needs of a driver, for watches alone."""

    role = Role.FOLLOWING

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.current: list[Callable[[], None]] = []
        self._on_applied: list[Callable[[int], None]] = []

    def status(self) -> Status:
        members = Membership(("n1",), cluster=self.cluster)
        return Status("n1", Role.FOLLOWING, 1, "n2", 0, 0, 0, 0, False, members)

    def on_role(self, callback: Any) -> None: ...

    def on_applied(self, callback: Callable[[int], None]) -> None:
        self._on_applied.append(callback)

    def applied(self, index: int) -> None:
        for callback in self._on_applied:
            callback(index)

    def on_question(self, handler: Any) -> None: ...

    def when_current(self, call: Callable[[], None]) -> None:
        self.current.append(call)


class ServerSide:
    """The node's end of a connection; what it sends waits in `out`."""

    role, granted, ending, closed = "client", "client", False, False
    congested = False

    def __init__(self) -> None:
        self.out: list[Frame] = []

    def welcome(self, on_frames: Any, on_end: Any) -> None:
        self.take = on_frames

    def send(self, kind: int, *parts: bytes) -> bool:
        self.out.append((kind, b"".join(parts)))
        return True

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def fail(self, reason: CloseReason, text: str) -> None:
        raise AssertionError(text)


class ClientSide:
    """The client's end; what it sends is processed at once."""

    address, ending, closed, congested = "n", False, False, False

    remote, info = ConnectionIdentity("c", "n1", 1), MemberInfo("the cluster")

    def __init__(self, server: ServerSide, supports: tuple[int, int] = (1, 2)) -> None:
        self.server, self.supports = server, supports

    def send(self, kind: int, *parts: bytes) -> bool:
        self.server.take(self.server, [(kind, b"".join(parts))])
        return True


class Node:
    """A node that serves watches of a keyspace."""

    def __init__(self, keyspace: Keyspace, cluster_id: str = "the cluster") -> None:
        self.driver = Follower(cluster_id)
        self.service = Service(
            self.driver,  # type: ignore[arg-type]
            keyspace,
            SystemClock(),
        )
        self.server = ServerSide()
        self.service.admit(self.server)  # type: ignore[arg-type]

    def caught_up(self) -> None:
        calls, self.driver.current = self.driver.current, []
        for call in calls:
            call()

    @property
    def received(self) -> list[Any]:
        return [decode_answer(payload) for _, payload in self.server.out]


class Client:
    """A client whose connections are made and broken by the test."""

    def __init__(self) -> None:
        self.received: list[str] = []
        self.connection = QuorumConnection(
            Dialler(["n:1"], Security(), ExpectedCluster("c"), connect_timeout_s=1)
        )
        self.connection._connect = lambda: None  # type: ignore[method-assign]

    def dial(self, node: Node, supports: tuple[int, int] = (1, 2)) -> None:
        self.link = ClientSide(node.server, supports)
        self.connection._connected(self.link)  # type: ignore[arg-type]

    def hear(self, frames: Sequence[Frame]) -> None:
        self.connection._received(self.link, frames)  # type: ignore[arg-type]

    def cut(self) -> None:
        self.connection._disconnected(self.link, End.LEFT)  # type: ignore[arg-type]

    async def watch(self, node: Node, *scopes: str) -> None:
        self.dial(node)
        asked = [
            asyncio.ensure_future(
                self.connection.watch(scope, partial(self.received.append, scope))
            )
            for scope in scopes
        ]
        await asyncio.sleep(0)
        self.hear(node.server.out)
        await asyncio.gather(*asked)


def put(keyspace: Keyspace, key: str, value: bytes = b"") -> None:
    standing = keyspace.get(key)
    version = standing.version if standing else 0
    decode_result(keyspace.apply(encode(Put(key, value, version))))


@pytest.mark.parametrize("heard", range(5))
def test_a_link_that_breaks_between_two_frames_costs_no_watch_its_change(heard: int) -> None:
    """Both scopes change while there is no connection. The next node answers, and its connection
    breaks after `heard` of its frames; whatever they were, the node after it notifies of the
    rest."""

    async def main() -> None:
        keyspace, client = Keyspace(), Client()
        await client.watch(Node(keyspace), "a", "b")
        client.cut()
        put(keyspace, "a")
        put(keyspace, "b")
        second, third = Node(keyspace), Node(keyspace)
        client.dial(second)
        client.hear(second.server.out[:heard])
        client.cut()
        client.dial(third)
        client.hear(third.server.out)
        await asyncio.sleep(0.01)
        assert {*client.received} == {"a", "b"}
        resumed = [each for each in third.received if isinstance(each, WatchNotification)]
        assert len(resumed) == 2 - heard // 2, "a notification is not repeated"

    run_virtual(main)


def test_one_position_for_all_watches_would_cost_one_of_them_its_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one_position(monkeypatch)
    with pytest.raises(AssertionError):
        test_a_link_that_breaks_between_two_frames_costs_no_watch_its_change(2)


def test_a_quiet_watch_keeps_up_with_its_connection() -> None:
    """A watch in whose scope nothing changed resumes from the last revision that its connection was
    notified of, not from where it began: that may be older than what nodes remember."""

    async def main() -> None:
        keyspace, client = Keyspace(), Client()
        node = Node(keyspace)
        await client.watch(node, "busy", "quiet")
        node.server.out.clear()
        put(keyspace, "busy")
        node.driver.applied(1)
        client.hear(node.server.out)
        client.cut()
        after = Node(keyspace)
        requests: list[Any] = []
        after.server.take = lambda link, frames: requests.extend(frames)
        client.dial(after)
        watches = [
            request
            for _, payload in requests
            if isinstance(request := decode_request(payload), WatchRequest)
        ]
        assert {watch.scope: watch.since for watch in watches} == {
            "busy": keyspace.revision,
            "quiet": keyspace.revision,
        }
        assert {watch.cluster for watch in watches} == {"the cluster"}

    run_virtual(main)


def test_a_node_of_an_earlier_release_is_not_relied_on() -> None:
    """It confirms a resumed watch before it notifies of what the watch missed."""

    async def main() -> None:
        keyspace, client = Keyspace(), Client()
        await client.watch(Node(keyspace), "a")
        client.cut()
        put(keyspace, "a")
        second = Node(keyspace)
        client.dial(second, supports=(1, 1))
        confirmed = next(
            frame
            for frame in second.server.out
            if isinstance(decode_answer(frame[1]), WatchConfirmed)
        )
        client.hear([confirmed])
        client.cut()
        await asyncio.sleep(0.01)
        assert client.received == ["a"]

    run_virtual(main)


def test_a_node_that_is_behind_catches_up_before_it_confirms() -> None:
    async def main() -> None:
        keyspace = Keyspace()
        put(keyspace, "a")
        node = Node(keyspace)
        node.server.take(node.server, [(REQUEST, encode(WatchRequest(-1, "b", 2)))])
        assert node.received == []
        put(keyspace, "c")
        node.caught_up()
        assert node.received == [WatchConfirmed(-1, 2)]

    run_virtual(main)


@pytest.mark.parametrize(
    ("cluster_id", "since", "missed"),
    [("the cluster", 1, False), ("", 1, False), ("other", 1, True), ("the cluster", 99, True)],
)
def test_a_watch_position_of_another_history_requires_a_new_read(
    cluster_id: str, since: int, missed: bool
) -> None:
    """Of another cluster, or one that this cluster has not reached although it is up to date."""

    async def main() -> None:
        keyspace = Keyspace()
        put(keyspace, "a")
        node = Node(keyspace)
        node.server.take(node.server, [(REQUEST, encode(WatchRequest(-1, "b", since, cluster_id)))])
        node.caught_up()
        expected: list[Any] = [WatchNotification([-1], 1)] if missed else []
        assert node.received == [*expected, WatchConfirmed(-1, 1)]

    run_virtual(main)


async def watched_entry(client: Client, node: Node, key: str) -> QuorumWatch:
    client.dial(node)
    asked = asyncio.ensure_future(client.connection.watch(key, lambda: None, entry=True))
    await asyncio.sleep(0)
    client.hear(node.server.out)
    node.server.out.clear()
    return await asked


def test_a_notification_carries_the_entry_unless_it_is_large_or_the_client_slow() -> None:
    async def main() -> None:
        keyspace, client = Keyspace(), Client()
        node = Node(keyspace)
        watch = await watched_entry(client, node, "k")

        def notified(value: bytes, key: str = "k") -> bytes | None:
            put(keyspace, key, value)
            node.driver.applied(1)
            client.hear(node.server.out)
            node.server.out.clear()
            return None if watch.carried is None else watch.carried.value

        assert notified(b"one") == b"one"
        assert notified(b"two") == b"two"
        assert notified(b"below", key="k/below") == b"two"
        assert notified(b"x" * CARRIED) == b"x" * CARRIED
        assert notified(b"x" * (CARRIED + 1)) is None, "not the one before either"
        assert notified(b"three") == b"three"
        node.server.congested = True
        assert notified(b"four") is None

    run_virtual(main)


def test_a_node_that_is_behind_carries_nothing_that_is_older_than_the_watch_has_seen() -> None:
    async def main() -> None:
        ahead, behind, client = Keyspace(), Keyspace(), Client()
        put(ahead, "k", b"first")
        put(behind, "k", b"first")
        first = Node(ahead)
        watch = await watched_entry(client, first, "k")
        for value in (b"second", b"third"):
            put(ahead, "k", value)
        first.driver.applied(1)
        client.hear(first.server.out)
        assert watch.carried is not None
        assert watch.carried.value == b"third"
        client.cut()
        second = Node(behind)
        client.dial(second)
        put(behind, "k", b"second")
        second.driver.applied(1)
        client.hear(second.server.out)
        assert watch.carried is None
        put(behind, "k", b"third")
        second.driver.applied(2)
        client.hear(second.server.out)
        assert watch.carried.value == b"third"

    run_virtual(main)


def test_earlier_releases_ignore_that_an_entry_is_wanted_and_that_one_is_carried() -> None:
    class WatchThen(Request, frozen=True, tag=6):
        id: int
        scope: str
        since: int
        cluster: str = ""

    class NotificationThen(Response, frozen=True, tag=5):
        ids: list[int]
        revision: int

    asked = encode(WatchRequest(-1, "k", 3, "c", True))
    assert msgspec.msgpack.decode(asked, type=WatchThen) == WatchThen(-1, "k", 3, "c")
    keyspace = Keyspace()
    put(keyspace, "k", b"v")
    entry = keyspace.get("k")
    assert entry is not None
    told = encode(WatchNotification([-1], 7, {-1: entry}))
    assert msgspec.msgpack.decode(told, type=NotificationThen) == NotificationThen([-1], 7)
    then = encode(WatchThen(-1, "k", 3, "c"))
    assert decode_request(then) == WatchRequest(-1, "k", 3, "c", False)
    assert decode_answer(encode(NotificationThen([-1], 7))) == WatchNotification([-1], 7)
