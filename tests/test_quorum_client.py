"""The client of a quorum: on nodes that fail, fall silent, forget it, or are of different
clusters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from doyen.errors import ConfigError, LeaseGone, OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.lease.clock import SystemClock
from doyen.quorum.keyspace.commands import StoredEntry, encode
from doyen.quorum.keyspace.versions import NEWEST
from doyen.quorum.node import replicated as machines
from doyen.quorum.node.listener import Listener
from doyen.quorum.node.server import NodeOptions, NodeServer
from doyen.quorum.protocol.connection import End, FrameConnection
from doyen.quorum.protocol.handshake import ConnectionIdentity, MemberInfo
from doyen.quorum.protocol.requests import (
    ANSWER,
    LeaseRenewed,
    LeaseTimes,
    LeaseTimesRequest,
    ListChunk,
    NodeStatus,
    Scan,
    StatusRequest,
    decode_request,
)
from doyen.quorum.protocol.security import Security
from doyen.stores.port import Context, StoreURL, open_store
from doyen.stores.quorum import make_store
from doyen.stores.quorum.connection import QuorumConnection
from doyen.stores.quorum.diagnosis import NodeAnswer, all_well, findings, remarks
from doyen.stores.quorum.dialling import Dialler, ExpectedCluster
from doyen.stores.quorum.store import OTHERS, QuorumStore
from fixtures import opening, run_within
from servers import Proxy, QuorumCluster, free_port
from stalls import Stopwatch

SECRET = "correct horse battery staple"
WITHIN_S = 20.0


class Nodes:
    """A quorum inside this process, on real sockets."""

    def __init__(self, folder: Path, size: int = 1, **settings: Any) -> None:
        self.peers = {f"n{number + 1}": f"127.0.0.1:{free_port()}" for number in range(size)}
        self._folder, self._settings = folder, settings
        self.running: dict[str, NodeServer] = {}

    @property
    def hosts(self) -> str:
        return ",".join(self.peers.values())

    def url(self, *, secret: str = "", query: str = "") -> str:
        who = f"{secret}@" if secret else ""
        return f"doyen://{who}{self.hosts}{query}"

    async def start(self, *names: str) -> None:
        for name in names or self.peers:
            self.running[name] = await NodeServer.open(
                NodeOptions(
                    id=name,
                    peers=self.peers,
                    data_dir=self._folder / name,
                    election_s=0.3,
                    heartbeat_s=0.05,
                    found=True,
                    **self._settings,
                )
            )
        while not all(node.service.serving for node in self.running.values()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    async def stop(self, *names: str) -> None:
        for name in names or [*self.running]:
            await self.running.pop(name).close()

    def leader(self) -> str:
        (known,) = {node.driver.leader for node in self.running.values()}
        assert known is not None
        return known


@asynccontextmanager
async def nodes(folder: Path, size: int = 1, **settings: Any) -> AsyncIterator[Nodes]:
    started = Nodes(folder, size, **settings)
    await started.start()
    try:
        yield started
    finally:
        await started.stop()


opened = opening(QuorumStore)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_within(main(), WITHIN_S * 2)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_clients_move_on_when_nodes_stop_one_after_the_other(tmp_path: Path) -> None:
    """A rolling restart: no write is lost, carried out twice or of unknown outcome."""
    async with nodes(tmp_path, 3) as quorum, opened(quorum.url()) as store:
        lease = await store.grant(60.0)
        counted, stop = 0, False

        async def count() -> None:
            nonlocal counted
            entry = await store.put("count", b"0", if_version=None)
            while not stop:
                assert entry is not None, "somebody else has counted, or we have twice"
                assert int(entry.value) == counted
                counted += 1
                entry = await store.put("count", b"%d" % counted, if_version=entry.version)
                await store.renew(lease)

        counting = asyncio.create_task(count())
        for name in ("n1", "n2", "n3"):
            before = counted
            await until(lambda before=before: counted > before + 10 or counting.done())  # type: ignore[misc]
            await quorum.stop(name)
            await quorum.start(name)
        stop = True
        await counting
        final = await store.get("count")
        assert final is not None
        assert int(final.value) == counted > 30


async def test_a_lost_answer_is_returned_to_a_repeated_request(tmp_path: Path) -> None:
    """The request was carried out, and the connection broke before its response arrived."""
    async with nodes(tmp_path) as quorum:
        node = quorum.running["n1"]
        with Proxy(_Place(quorum.url(), node.port)) as link:
            async with opened(link.url) as store:
                lease = await store.grant(60.0)
                for number in range(5):
                    await asyncio.to_thread(link.break_after, 0, "down")
                    ticket = await store.enqueue("line", b"%d" % number, lease)
                    tickets = await store.list("line")
                    assert tickets[-1] == ticket
                    assert len(tickets) == number + 1
                await asyncio.to_thread(link.break_after, 0, "down")
                await store.renew(lease)


class _Place:
    def __init__(self, url: str, port: int) -> None:
        self.url, self.port = url, port


async def test_a_silent_node_is_left_for_another() -> None:
    """Frozen, not dead: its connection stays open, and nothing is received."""
    with QuorumCluster() as quorum:
        frozen = (await asyncio.to_thread(quorum.followers))[0]
        others = [member for member in quorum.members if member is not frozen]
        url = "doyen://" + ",".join(member.address for member in (frozen, *others))
        async with opened(url) as store:
            lease = await store.grant(60.0)
            notified = asyncio.Event()
            await store.watch("k", notified.set)
            # Make both connections use the node that is frozen, which they would avoid.
            store._renewals._dialler.avoid = lambda: None
            store._renewals._dialler.next = 0
            store._requests._dialler.next = 2
            assert store._requests._connection is not None
            store._requests._connection.abort()
            await store.get("k")
            await store.renew(lease)
            await until(lambda: store._requests.node == frozen.address)
            await until(lambda: store._renewals.node == frozen.address)
            frozen.freeze()
            try:
                left = Stopwatch()
                await store.renew(lease)
                assert await store.put("k", b"v", if_version=None) is not None
                assert left.elapsed_s() < 3.0
                await asyncio.wait_for(notified.wait(), WITHIN_S)
                assert store._requests.node != frozen.address
            finally:
                frozen.thaw()


async def test_a_watch_goes_on_at_another_node_and_misses_nothing(tmp_path: Path) -> None:
    async with (
        nodes(tmp_path, 3) as quorum,
        opened(quorum.url()) as watcher,
        opened(quorum.url()) as writer,
    ):
        notified = asyncio.Event()
        await watcher.watch("a", notified.set)
        for number, name in enumerate(("n1", "n2", "n3")):
            await quorum.stop(name)
            assert await writer.put(f"a/{number}", b"", if_version=None) is not None
            await asyncio.wait_for(notified.wait(), WITHIN_S)
            notified.clear()
            await quorum.start(name)


async def test_changes_during_a_cut_are_notified_afterwards(tmp_path: Path) -> None:
    async with nodes(tmp_path) as quorum, opened(quorum.url()) as writer:
        with Proxy(_Place(quorum.url(), quorum.running["n1"].port)) as link:
            async with opened(link.url) as watcher:
                notified, quiet = asyncio.Event(), asyncio.Event()
                # The history begins anew when the version is raised.
                await until(lambda: quorum.running["n1"].service.condition().state == NEWEST)
                await watcher.watch("a", notified.set)
                await watcher.watch("b", quiet.set)
                for number in range(3):
                    await asyncio.to_thread(link.refuse)
                    assert await writer.put(f"a/{number}", b"", if_version=None) is not None
                    await asyncio.to_thread(link.heal)
                    await asyncio.wait_for(notified.wait(), WITHIN_S)
                    notified.clear()
                assert not quiet.is_set()


async def test_while_there_is_no_majority_nothing_is_promised(tmp_path: Path) -> None:
    async with nodes(tmp_path, 3) as quorum, opened(quorum.url()) as store:
        lease = await store.grant(60.0)
        await quorum.stop("n1", "n2", "n3")
        with pytest.raises(StoreUnavailable):
            await store.put("k", b"v", if_version=None)
        with pytest.raises(StoreUnavailable):
            await store.renew(lease)
        with pytest.raises(StoreUnavailable):
            await store.watch("k", lambda: None)
        await quorum.start("n1", "n2", "n3")
        await store.renew(lease)
        assert await store.get("k") is None


async def test_a_client_of_a_quorum_without_a_leader_gets_the_remedy(tmp_path: Path) -> None:
    async with nodes(tmp_path, 3) as quorum:
        await quorum.stop("n1", "n2")
        await until(lambda: not quorum.running["n3"].service.serving)
        with pytest.raises(StoreUnavailable, match=r"no leader.*doyen cluster status shows"):
            async with opened(quorum.url(query="?connect_timeout_s=0.3")):
                pass


async def test_closing_a_store_ends_waiting_calls(tmp_path: Path) -> None:
    async with nodes(tmp_path) as quorum:
        with Proxy(_Place(quorum.url(), quorum.running["n1"].port)) as link:
            async with opened(link.url) as store:
                await asyncio.to_thread(link.cut)
                put = asyncio.create_task(store.put("k", b"v", if_version=None))
                await asyncio.sleep(0.05)
                await store.close()
                with pytest.raises(OutcomeUnknown):
                    await put
                with pytest.raises(StoreUnusable, match="closed"):
                    await store.get("k")
            await asyncio.to_thread(link.heal)


async def test_a_client_whose_session_was_dropped_takes_a_new_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "FORGOTTEN_AFTER", 10)
    async with (
        nodes(tmp_path) as quorum,
        opened(quorum.url()) as idle,
        opened(quorum.url()) as busy,
    ):
        lease = await idle.grant(60.0)
        assert (await idle.create("k", b"", lease)).won
        for number in range(40):
            await busy.put(f"b/{number}", b"", if_version=None)
        entries = await asyncio.gather(
            *(idle.put(f"i/{number}", b"", if_version=None) for number in range(20))
        )
        assert all(entry is not None for entry in entries)
        assert len(await idle.list("i")) == 20
        assert (await idle.enqueue("line", b"", lease)).key
        assert len(await idle.list("line")) == 1


async def test_a_token_floor_raises_tokens(tmp_path: Path) -> None:
    async with nodes(tmp_path) as quorum, opened(quorum.url(query="?token_floor=1000000")) as store:
        lease = await store.grant(60.0)
        assert (await store.create("k", b"", lease)).entry.revision > 1_000_000


async def test_what_cannot_be_stored_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with nodes(tmp_path) as quorum, opened(quorum.url()) as store:
        lease = await store.grant(60.0)
        with pytest.raises(StoreUnusable, match="at most 1000000 bytes"):
            await store.put("k", bytes(1_000_001), if_version=None)
        with pytest.raises(StoreUnusable, match="cannot be sent"):
            await store.put("k", bytes(20_000_000), if_version=None)
        with pytest.raises(StoreUnusable, match="characters"):
            await store.create("", b"", lease)
        with pytest.raises(StoreUnusable, match="cannot be sent"):
            await store.get("\ud800")
        with pytest.raises(ConfigError, match="64 bits"):
            await store.enqueue("l", b"", lease, rank=2**63)
        assert await store.put("k", bytes(1_000_000), if_version=None) is not None
        big = await store.get("k")
        assert big is not None
        assert len(big.value) == 1_000_000
        assert await store.put("k", b"", if_version="of another store") is None
        await store.revoke(lease)
        with pytest.raises(LeaseGone):
            await store.renew(lease)


async def test_a_list_longer_than_a_link_holds(tmp_path: Path) -> None:
    async with nodes(tmp_path) as quorum, opened(quorum.url()) as store:
        keys = [f"k/{number:02d}" for number in range(25)]
        for key in keys:
            await store.put(key, bytes(900_000), if_version=None)
        listed = await store.list("k")
        assert [entry.key for entry in listed] == keys
        assert sum(len(entry.value) for entry in listed) > 16 << 20


async def test_nodes_of_two_clusters_are_refused(tmp_path: Path) -> None:
    """Two clusters behind one URL would elect two leaders."""
    async with (
        nodes(tmp_path / "a", cluster="a") as first,
        nodes(tmp_path / "b", cluster="b") as second,
    ):
        with pytest.raises(StoreUnusable, match="cluster 'a', not to 'b'"):
            async with opened(first.url(query="?cluster=b")):
                pass
        async with opened(f"doyen://{first.hosts},{second.hosts}") as store:
            await store.put("k", b"", if_version=None)
            assert store._cluster.name in ("a", "b")
            stays = first if store._cluster.name == "a" else second
            goes = second if stays is first else first
            lease = await store.grant(60.0)
            await store.renew(lease)
            await goes.running["n1"].driver.barrier()
            assert len(goes.running["n1"].keyspace) == 0
            await stays.stop("n1")
            with pytest.raises(StoreUnavailable):
                await store.get("k")
            await stays.start("n1")
            assert await store.get("k") is not None


async def test_secrets(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    quoted = SECRET.replace(" ", "%20")
    async with nodes(tmp_path / "n", secret=SECRET, peer_secret=f"{SECRET} of nodes") as quorum:
        for url in (quorum.url(secret=quoted), quorum.url(query=f"?secret_file={file}")):
            async with opened(url) as store:
                assert await store.get("k") is None
        for url in (quorum.url(), quorum.url(secret="not%20the%20secret%20we%20mean")):
            with pytest.raises(StoreUnusable, match="secret"):
                async with opened(url):
                    pass
            store = make_store(StoreURL.parse(url))
            (state,) = await store.inspect()
            assert state.condition is None
            assert "secret" in state.silent_because
            await store.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("doyen://", "is not a host"),
        ("doyen://h1,,h2", "is not a host"),
        ("doyen://::1", "is not a host"),
        ("doyen://h1..example", "cannot be a host name"),
        ("doyen://h1/path", "has no paths"),
        ("doyen://h1?tsl=true", "no option 'tsl'"),
        ("doyen://h1?tls=yes", "tls is true or false"),
        ("doyen://h1?tls=false&ca=x", "tls=false goes with none"),
        ("doyen://h1?key=x", "cert and key go together"),
        ("doyen://h1?ca=/nowhere/ca.pem", "cannot read"),
        ("doyen://h1?secret_file=/nowhere", "cannot be read"),
        ("doyen://0123456789abcdef@h1?secret_file=/nowhere", "not both"),
        ("doyen://short@h1", "needs 16 or more"),
        ("doyen://h1?token_floor=-1", "whole number of 0 or more"),
        ("doyen://h1?connect_timeout_s=soon", "is a number"),
    ],
)
async def test_urls_that_cannot_work_are_refused(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        async with opened(url):
            pass


async def test_no_node_can_be_reached() -> None:
    with pytest.raises(StoreUnavailable, match="no node of the quorum can be reached"):
        async with opened(f"doyen://127.0.0.1:{free_port()},127.0.0.1:{free_port()}"):
            pass


def condition(node: str, **changes: Any) -> NodeStatus:
    fields: dict[str, Any] = {
        "id": 0,
        "node": node,
        "version": "1",
        "role": "following",
        "generation": 3,
        "leader": "n1",
        "commit": 9,
        "applied": 9,
        "snapshot": 0,
        "full": False,
        "voters": ("n1", "n2", "n3"),
        "learners": (),
        "addresses": {},
        "revision": 5,
        "keys": 1,
        "leases": 1,
        "clients": 1,
        "watches": 0,
        "state": NEWEST,
    }
    return NodeStatus(**{**fields, **changes})


def levels(*states: NodeAnswer) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for finding in findings(states):
        found.setdefault(finding.level, []).append(finding.text)
    return found


def test_a_healthy_quorum_has_nothing_to_complain_of() -> None:
    said = levels(*(NodeAnswer(f"h{n}", condition(f"n{n}")) for n in (1, 2, 3)))
    assert said.keys() == {"ok"}
    assert "n1 leads generation 3" in said["ok"][0]


def test_problems_of_a_quorum_are_reported() -> None:
    one_down = levels(
        NodeAnswer("h1", condition("n1")),
        NodeAnswer("h2", condition("n2")),
        NodeAnswer("h3", None, "no answer"),
    )
    assert any("no answer" in text for text in one_down["warning"])
    assert any("at risk" in text and "n3" in text for text in one_down["warning"])
    even = levels(*(NodeAnswer(f"h{n}", condition(f"n{n}", voters=("n1", "n2"))) for n in (1, 2)))
    assert any("even number" in text for text in even["warning"])
    full = levels(*(NodeAnswer(f"h{n}", condition(f"n{n}", full=n == 2)) for n in (1, 2, 3)))
    assert any("full" in text for text in full["problem"])
    beyond = levels(
        *(NodeAnswer(f"h{n}", condition(f"n{n}", alarm=True, quota=7)) for n in (1, 2, 3))
    )
    assert any("of 7 bytes" in text for text in beyond["problem"])
    headless = levels(*(NodeAnswer(f"h{n}", condition(f"n{n}", leader=None)) for n in (1, 2, 3)))
    assert any("no leader" in text for text in headless["problem"])
    cut_off = condition("n3", leader=None, generation=4)
    led = [NodeAnswer(f"h{n}", condition(f"n{n}")) for n in (1, 2)]
    led[0] = NodeAnswer("h1", condition("n1", refused={"n3": "h3: its directory is empty"}))
    lonely = levels(*led, NodeAnswer("h3", cut_off))
    assert any("its directory is empty" in text for text in lonely["warning"])
    assert "problem" not in lonely
    assert [re.split("[:,]", text)[0] for text in lonely["warning"]] == [
        "this node runs",
        "at risk",
    ]
    leads = NodeAnswer("h1", condition("n1", role="leading"))
    extra = levels(
        leads, *led[1:], NodeAnswer("h3", condition("n3")), NodeAnswer("h4", condition("n4"))
    )
    assert extra["note"] == ["this node runs, but is not a member of the quorum"]
    early = levels(*(NodeAnswer(f"h{n}", condition(f"n{n}", state=2)) for n in (1, 2, 3)))
    assert any("version 2 of its state" in text for text in early["note"])
    mixed = levels(*(NodeAnswer(f"h{n}", condition(f"n{n}", version=str(n))) for n in (1, 2, 3)))
    assert any("1, 2, 3" in text for text in mixed["note"])
    alone = levels(NodeAnswer("h1", condition("n1", voters=("n1",), learners=("n2",))))
    assert any("one voter" in text for text in alone["note"])
    assert any("n2 do not vote" in text for text in alone["note"])


def test_the_voters_are_not_counted_by_a_node_that_waits_to_be_added() -> None:
    """It has lost its data directory, and takes the other peers for the only voters."""
    unled: dict[str, Any] = {"role": "looking", "leader": None, "commit": 0}
    joining = condition("n1", voters=("n2", "n3"), learners=("n1",), **unled)
    voter = condition("n2", **unled, refused={"n1": "it has lost data"})
    states = [NodeAnswer("h1", joining), NodeAnswer("h2", voter), NodeAnswer("h3", None, "silent")]
    assert remarks(states) == ["n1 is not connected to n2: it has lost data"]
    assert not any("even number" in text for text in levels(*states)["warning"])


def test_a_quorum_that_is_full_is_not_well() -> None:
    def states(**changes: Any) -> list[NodeAnswer]:
        changed = NodeAnswer("h2", condition("n2", **changes))
        return [NodeAnswer("h1", condition("n1")), changed, NodeAnswer("h3", condition("n3"))]

    assert all_well(states())
    assert not all_well(states(alarm=True))
    assert not all_well(states(full=True))
    assert remarks(states(full=True)) == [
        "the disk of n2 is full: free space in the file system of its data directory"
    ]


async def test_nodes_report_their_status(tmp_path: Path) -> None:
    async with nodes(tmp_path, 3) as quorum, opened(quorum.url()) as store:
        running = quorum.running.values()
        # A follower applies the commands that raise the version after the leader has done so.
        await until(lambda: all(each.service.condition().state == NEWEST for each in running))
        assert {finding.level for finding in await store.diagnose()} == {"ok"}
        await quorum.stop("n2")
        said = await store.diagnose()
        assert [finding.subject for finding in said if finding.level == "warning"] == [
            quorum.peers["n2"],
            "quorum",
        ]


NESTED = encode(condition("n1")).replace(b"\xdc\x00\x14", b"\xdc\x00\x15") + b"\x91" * 100_000


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        (ANSWER, b"\xc1"),
        (ANSWER, encode(condition("n1")).replace(b"following", b"f\xff\xff\xff\xff\xff\xffng")),
        (ANSWER, NESTED),
        (ANSWER, encode(LeaseRenewed(0))),
        (ANSWER + 1, encode(condition("n1"))),
    ],
)
async def test_a_node_that_answers_garbage_counts_as_silent(kind: int, answer: bytes) -> None:
    amiss: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: amiss.append(context))

    def reply(link: FrameConnection, frames: object) -> None:
        link.send(kind, answer)

    def admit(link: FrameConnection) -> None:
        link.welcome(reply, lambda link, end: None)

    listener = Listener(
        ConnectionIdentity("c", "n1", 1), Security(), peers=admit, clients=admit, pages={}
    )
    port = await listener.listen("127.0.0.1", 0)
    try:
        store = make_store(StoreURL.parse(f"doyen://127.0.0.1:{port}"))
        (state,) = await store.inspect()
        assert (state.condition, state.silent_because) == (
            None,
            f"127.0.0.1:{port}: the other side violated the protocol",
        )
        await store.close()
    finally:
        await listener.close()
    assert not amiss


def test_a_node_that_names_many_others_has_a_bounded_number_of_them_dialled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dialled: list[str] = []

    async def inspect(store: QuorumStore, address: str, within_s: float) -> NodeAnswer:
        dialled.append(address)
        many = {f"n{number}": f"10.0.0.1:{number}" for number in range(2, 1000)}
        return NodeAnswer(address, condition("n1", addresses=many))

    monkeypatch.setattr(QuorumStore, "_inspect", inspect)

    async def main() -> None:
        store = make_store(StoreURL.parse("doyen://127.0.0.1:7400"))
        await store.inspect()
        await store.close()

    run(main)
    assert len(dialled) == len({*dialled}) == 1 + OTHERS


async def test_many_reads_of_large_values_at_once_are_all_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent as fast as the client reads: at most one value more than the socket's buffer waits in
    the node."""
    most = 0
    send = FrameConnection.send

    def measured(link: FrameConnection, kind: int, *parts: bytes) -> bool:
        nonlocal most
        sent = send(link, kind, *parts)
        most = max(most, link.queued + link._transport.get_write_buffer_size())
        return sent

    nodes = Nodes(tmp_path)
    await nodes.start()
    store = await open_store(nodes.url(), Context(SystemClock(), lambda _: None))
    try:
        await store.put("large", b"x" * 1_000_000, if_version=None)
        monkeypatch.setattr(FrameConnection, "send", measured)
        async with asyncio.timeout(WITHIN_S):
            found = await asyncio.gather(*(store.get("large") for _ in range(40)))
        assert [len(each.value) for each in found if each] == [1_000_000] * 40
        assert most < 3_000_000
    finally:
        await store.close()
        await nodes.stop()


async def test_a_list_that_was_answered_is_whole_though_its_connection_ends_in_the_same_turn() -> (
    None
):
    record = StoredEntry("k/1", b"v", 1, 1)
    dialler = Dialler(["127.0.0.1:1"], Security(), ExpectedCluster(""), connect_timeout_s=1.0)
    wire = QuorumConnection(dialler)
    listing = asyncio.create_task(wire.ask(lambda number: Scan(number, "k")))
    await asyncio.sleep(0)
    (number,) = wire._calls
    link: Any = SimpleNamespace(address="n1", send=lambda *_: True, close=lambda: None)
    wire._connection = link
    wire._received(link, [(ANSWER, encode(ListChunk(number, [record], False)))])
    wire._disconnected(link, End.LEFT)
    assert await listing == [record]
    await wire.close()


class FakeNode:
    """The client's connection to a node that answers at once; an older one knows no requests for
    the times of leases."""

    address, ending, closed, congested, info = "n", False, False, False, MemberInfo()

    def __init__(self, wire: QuorumConnection, *, older: bool, mute: bool = False) -> None:
        self.wire, self.older, self.mute = wire, older, mute
        self.remote = ConnectionIdentity("c", "n1", 1)
        self.asked: list[Any] = []

    def send(self, kind: int, *parts: bytes) -> bool:
        request = decode_request(b"".join(parts))
        self.asked.append(request)
        if isinstance(request, StatusRequest):
            self._answer(condition("n1", id=request.id, lease_times=not self.older))
        elif isinstance(request, LeaseTimesRequest) and not self.mute:
            self._answer(LeaseTimes(request.id, (1.5,) * len(request.leases)))
        return True

    def _answer(self, answer: Any) -> None:
        link: Any = self
        frames = [(ANSWER, encode(answer))]
        asyncio.get_running_loop().call_soon(self.wire._received, link, frames)

    def close(self) -> None: ...

    async def wait(self) -> None: ...


async def test_no_older_node_is_asked_for_the_times_of_leases() -> None:
    """It would take the request for a fault, and end the connection."""
    store = make_store(StoreURL.parse("doyen://127.0.0.1:1"))
    wire = store._requests
    links = [FakeNode(wire, older=False), FakeNode(wire, older=True), FakeNode(wire, older=False)]

    def connect(link: Any) -> None:
        if wire._connection is not None:
            wire._disconnected(wire._connection, End.LEFT)
        if wire._connecting is not None:
            wire._connecting.cancel()
        wire._connected(link)

    connect(links[0])
    assert await store.remaining(["7"]) == {"7": 1.5}
    assert await store.remaining(["7", "8"]) == {"7": 1.5, "8": 1.5}
    assert sum(isinstance(each, StatusRequest) for each in links[0].asked) == 1
    connect(links[1])
    assert await store.remaining(["7"]) == {}
    connect(links[2])
    assert await store.remaining(["7"]) == {"7": 1.5}
    # A request in flight does not move to an older node with the others.
    links[2].mute = True
    asking = asyncio.create_task(store.remaining(["7"]))
    await until(lambda: sum(isinstance(each, LeaseTimesRequest) for each in links[2].asked) == 2)
    connect(links[1])
    assert await asking == {}
    assert not any(isinstance(each, LeaseTimesRequest) for each in links[1].asked)
    await store.close()
