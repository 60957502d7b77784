"""The etcd store: its URL, its errors, failover among members, renewal, watches."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

import doyen
from doyen.errors import (
    ConfigError,
    LeaseGone,
    OutcomeUnknown,
    StoreError,
    StoreUnavailable,
    StoreUnusable,
)
from doyen.model import leader_key, line_key
from doyen.stores.etcd import connection, rpc, watches
from doyen.stores.etcd.connection import EtcdChannel, EtcdCluster
from doyen.stores.etcd.leases import EtcdKeepalive
from doyen.stores.etcd.store import EtcdStore
from doyen.stores.port import StoreURL
from fixtures import opening
from servers import Etcd, Proxy, free_port
from servers.wire import http, http_json
from stalls import Stopwatch

RPC = Path(rpc.__file__).parent
PATIENCE_S = 20.0
KEY = leader_key("e")


opened = opening(EtcdStore)


def on(url: str, body: Callable[[EtcdStore], Awaitable[None]]) -> None:
    """Run a test's body on a store, and close the store."""

    async def main() -> None:
        async with opened(url) as store, asyncio.timeout(PATIENCE_S):
            await body(store)

    asyncio.run(main())


async def bounded(call: Awaitable[Any], seconds: float = 0.3) -> Any:
    """A call as a session makes it, with a deadline."""
    async with asyncio.timeout(seconds):
        return await call


async def eventually(attempt: Callable[[], Awaitable[Any]]) -> Any:
    """Repeat a call as a session does, until it succeeds."""
    while True:
        try:
            return await bounded(attempt())
        except (TimeoutError, StoreUnavailable, OutcomeUnknown):
            await asyncio.sleep(0.02)


@pytest.fixture
def in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients begin at the first member of the URL."""
    monkeypatch.setattr(connection, "random", SimpleNamespace(randrange=lambda count: 0))


def url_error(url: str) -> str:
    with pytest.raises((StoreError, ConfigError)) as caught:
        on(url, lambda store: asyncio.sleep(0))
    return f"{type(caught.value).__name__}: {caught.value}"


# The package


def test_the_messages_are_compiled_from_the_proto(tmp_path: Path) -> None:
    compiled = tmp_path / "rpc.binpb"
    arguments = [f"-I{RPC}", f"--descriptor_set_out={compiled}", "rpc.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments], check=True)
    assert compiled.read_bytes() == (RPC / "rpc.binpb").read_bytes(), "run `make rpc`"


def test_a_missing_client_library_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['grpc'] = None\n"
        "import doyen\n"
        "try: doyen.connect_blocking('etcd://localhost').__enter__()\n"
        "except doyen.ConfigError as error: print(error)"
    )
    message = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert 'pip install "doyen[etcd]"' in message.stdout


# URLs and opening


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("etcd://h?color=red", "no option 'color'"),
        ("etcd://h1,,h2", "'' is not a host"),
        ("etcd://::1", "is not a host"),
        ("etcd://h?tls=maybe", "tls is true or false"),
        ("etcd://h?ca=/nowhere", "ca=/nowhere cannot be read"),
        ("etcd://h?cert=/dev/null", "cert and key go together"),
        ("etcd://h?tls=false&ca=/dev/null", "tls=false goes with none"),
        ("etcd://h?token_floor=high", "token_floor is a whole number"),
        ("etcd://h?connect_timeout_s=-1", "is a number of 0 or more"),
    ],
)
def test_a_url_that_cannot_work_is_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        on(url, lambda store: asyncio.sleep(0))


def test_members_that_cannot_be_reached_are_named() -> None:
    port, asked = free_port(), Stopwatch()
    message = url_error(f"etcd://127.0.0.1:{port},127.0.0.1:{port + 1}")
    assert asked.elapsed_s() < 3
    assert message.startswith("StoreUnavailable")
    assert f"127.0.0.1:{port}: " in message
    assert f"127.0.0.1:{port + 1}: " in message
    assert "refused" in message


def test_a_member_that_does_not_answer_is_reported(etcd: Etcd) -> None:
    with Proxy(etcd) as proxy:
        proxy.half_open()
        message = url_error(f"{proxy.url}?connect_timeout_s=0.3")
    assert message.startswith("StoreUnavailable")
    assert "does not answer within 0.3 s" in message


@pytest.mark.usefixtures("in_order")
async def test_a_dead_member_is_skipped(etcd: Etcd) -> None:
    async with opened(f"etcd://127.0.0.1:{free_port()},{etcd.address}") as store:
        assert await store.get(KEY) is None


async def test_stores_with_different_prefixes_share_nothing(etcd: Etcd) -> None:
    async with opened(f"{etcd.url}/one") as one, opened(f"{etcd.url}/two/") as two:
        await one.put("k", b"1", if_version=None)
        assert await two.get("k") is None
        assert await two.list("k") == []
        await one.delete("k")


def test_a_cluster_below_the_token_floor_is_refused(etcd: Etcd) -> None:
    assert "below token_floor=1000000" in url_error(f"{etcd.url}?token_floor=1000000")
    on(f"{etcd.url}?token_floor=1", lambda store: asyncio.sleep(0))


async def test_ttls_are_granted_in_whole_seconds(etcd: Etcd) -> None:
    async with opened(etcd.url) as store:
        assert (await store.grant(1.2)).ttl_s == 2.0


# Answers that must not be accepted


@pytest.mark.usefixtures("in_order")
async def test_two_clusters_behind_one_url_are_refused(etcd: Etcd) -> None:
    with Etcd() as other:
        async with opened(f"{other.url},{etcd.address}") as store:
            other.kill()
            with pytest.raises(StoreUnusable, match="belongs to another cluster"):
                await eventually(lambda: store.get(KEY))


async def test_a_cluster_that_has_gone_back_is_refused() -> None:
    with Etcd() as server:
        async with opened(server.url) as store:
            lease = await store.grant(60)
            for _ in range(3):
                await store.enqueue(line_key("e"), b"t", lease)
            server.kill()
            shutil.rmtree(server.folder / "data")
            server.start()
            with pytest.raises(StoreUnusable, match="gone back from revision"):
                await eventually(lambda: store.grant(60))
            with pytest.raises(StoreUnavailable, match="gone back from revision"):
                await store.get(KEY)


def test_a_write_whose_answer_is_lost_has_an_unknown_outcome_and_is_found(etcd: Etcd) -> None:
    async def main(proxy: Proxy) -> None:
        async with opened(proxy.url) as store, opened(etcd.url) as other:
            lease = await store.grant(60)
            # HTTP/2 acknowledges a request (WINDOW_UPDATE, PING) before it is carried out, so
            # break the connection not at the first byte but when the write is visible.
            proxy.cut("down")
            creating = asyncio.create_task(store.create(KEY, b"mine", lease))
            async with asyncio.timeout(10):
                while (found := await other.get(KEY)) is None:  # noqa: ASYNC110 (no event)
                    await asyncio.sleep(0.005)
            proxy.reset()
            proxy.heal()
            with pytest.raises(OutcomeUnknown):
                await creating
            assert (found.value, found.lease) == (b"mine", lease.id)
            again = await eventually(lambda: store.create(KEY, b"mine", lease))
            assert not again.won
            assert again.entry.revision == found.revision
            await store.revoke(lease)

    with Proxy(etcd) as proxy:
        asyncio.run(main(proxy))


async def test_a_request_that_was_never_sent_was_not_carried_out() -> None:
    with Etcd() as server:
        async with opened(server.url) as store:
            lease = await store.grant(60)
            server.kill()
            with pytest.raises(StoreError):  # the first call notices the loss
                await store.create(KEY, b"v", lease)
            with pytest.raises(StoreUnavailable, match="refused"):
                await store.create(KEY, b"v", lease)


def test_an_error_does_not_keep_its_channel_alive() -> None:
    """gRPC destroys a channel only when no call refers to it. Until then a closed channel goes on
    connecting, and does connect when the member is back: an outage of four seconds left 80
    connections."""

    async def main() -> None:
        url = f"etcd://127.0.0.1:{free_port()}?connect_timeout_s={PATIENCE_S}"
        cluster = EtcdCluster(StoreURL.parse(url))
        channel = EtcdChannel(cluster, cluster.members[0])
        with pytest.raises(StoreUnavailable, match="onnect") as kept:
            await channel.ready()
        await channel.close()
        gc.collect()
        calls = [one for one in gc.get_objects() if issubclass(type(one), grpc.aio.Call)]
        assert not calls, kept

    gc.collect()
    asyncio.run(main())


# Reads in one transaction


async def test_concurrent_reads_are_each_answered(etcd: Etcd) -> None:
    async with opened(etcd.url) as store:
        lease = await store.grant(60)
        keys = [leader_key(f"r{number}") for number in range(250)]
        await asyncio.gather(*(store.create(key, key.encode(), lease) for key in keys[::2]))
        made = 'grpc_server_handled_total{.*method="(?:Range|Txn)".*}'
        before = metric(etcd, made)
        found = await asyncio.gather(*map(store.get, keys))
        assert metric(etcd, made) < before + 20
        values = [entry and entry.value for entry in found]
        assert values == [None if number % 2 else key.encode() for number, key in enumerate(keys)]
        await store.revoke(lease)


def test_a_cancelled_read_does_not_affect_its_batch(etcd: Etcd) -> None:
    async def main(proxy: Proxy) -> None:
        async with opened(proxy.url) as store:
            proxy.delay(0.1)
            reads = [asyncio.create_task(store.get(f"k{number}")) for number in range(30)]
            while store._reads._waiting or not store._reads._tasks:  # noqa: ASYNC110 (no event)
                await asyncio.sleep(0)
            for read in reads[::2]:
                read.cancel()
            outcomes = await asyncio.gather(*reads, return_exceptions=True)
            assert outcomes[1::2] == [None] * 15
            assert {type(outcome) for outcome in outcomes[::2]} == {asyncio.CancelledError}

    with Proxy(etcd) as proxy:
        asyncio.run(main(proxy))


# Renewal


class FakeStream:
    """A keepalive stream whose answers the test supplies."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.answers: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, request: Any) -> None:
        self.sent.append(request.ID)

    async def read(self) -> Any:
        return await self.answers.get()

    def end(self) -> None:
        pass


class FakeClient:
    """A client of one member, whose raft term does not change."""

    member = "m"

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []

    async def channel(self) -> FakeClient:
        return self

    def stream(self, method: rpc.Method) -> FakeStream:
        self.streams.append(FakeStream())
        return self.streams[-1]

    async def call(self, *_: Any, **__: Any) -> Any:
        return rpc.RANGE.answer()

    def call_cancelled(self, began: float) -> None:
        pass


async def test_a_late_answer_is_not_taken_for_that_of_the_next_renewal() -> None:
    """Otherwise the lease's time would be counted from a later instant than etcd's."""

    async def turns() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    client = FakeClient()
    leases = EtcdKeepalive(EtcdCluster(StoreURL.parse("etcd://m")), b"witness")
    leases._client = client  # type: ignore[assignment]
    first = asyncio.create_task(leases.renew(7))
    await turns()
    first.cancel()
    await turns()
    second = asyncio.create_task(leases.renew(7))
    await turns()
    answer = rpc.KEEP_ALIVE.answer(ID=7, TTL=60)
    client.streams[0].answers.put_nowait(answer)
    await turns()
    assert not second.done()
    assert [stream.sent for stream in client.streams] == [[7], [7]]
    client.streams[1].answers.put_nowait(answer)
    await second
    assert leases._stream is not None
    leases._stream.end()


async def test_a_renewal_by_a_deposed_leader_does_not_count(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(etcd.url) as store:
        lease = await store.grant(60)
        await store.renew(lease)
        keepalive: Any = store._leases
        read = keepalive._client.call

        async def read_later(*given: Any, **more: Any) -> Any:
            answer = await read(*given, **more)
            answer.header.raft_term += 1
            return answer

        monkeypatch.setattr(keepalive._client, "call", read_later)
        with pytest.raises(StoreUnavailable, match="changed its leader"):
            await store.renew(lease)


async def test_the_renewal_of_an_ended_lease_fails(etcd: Etcd) -> None:
    async with opened(etcd.url) as store, opened(etcd.url) as operator:
        lease, kept = await store.grant(60), await store.grant(60)
        await operator.revoke(lease)
        with pytest.raises(LeaseGone):
            await store.renew(lease)
        await store.renew(kept)


async def test_many_leases_are_renewed_on_one_stream(etcd: Etcd) -> None:
    async with opened(etcd.url) as store, opened(etcd.url) as operator:
        leases = [await store.grant(60) for _ in range(10)]
        for lease in leases[::2]:
            await operator.revoke(lease)
        renewals = (store.renew(lease) for lease in leases)
        outcomes = await asyncio.gather(*renewals, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [LeaseGone, type(None)] * 5


# Watches


async def test_a_watch_outlives_a_restart_and_a_compaction() -> None:
    with Etcd() as server:
        async with opened(server.url) as store, opened(server.url) as writer:
            notified = asyncio.Event()
            await store.watch(KEY, notified.set)
            server.kill()
            server.start()
            written = await eventually(lambda: writer.put(KEY, b"1", if_version=None))
            assert written is not None
            compaction = {"revision": str(written.revision), "physical": True}
            http_json(server.port, "POST", "/v3/kv/compaction", compaction)
            async with asyncio.timeout(PATIENCE_S):
                await notified.wait()
            assert await eventually(lambda: store.get(KEY)) is not None
            notified.clear()
            await writer.delete(KEY)
            async with asyncio.timeout(PATIENCE_S):
                await notified.wait()


async def test_a_watch_that_etcd_cancels_begins_anew_and_is_notified(etcd: Etcd) -> None:
    """As etcd does after a compaction that a watch has fallen behind."""
    async with opened(etcd.url) as store:
        notified = asyncio.Event()
        await store.watch(KEY, notified.set)
        stream: Any = store._watches._stream
        (number,) = stream._watches
        stream._stream.send(rpc.WatchRequest(cancel_request={"watch_id": number}))
        await notified.wait()
        notified.clear()
        await store.put(KEY, b"v", if_version=None)
        await notified.wait()
        await store.delete(KEY)


@pytest.mark.usefixtures("in_order")
@pytest.mark.parametrize("fault", ["cut", "half_open"])
def test_a_silent_watch_stream_is_replaced(
    etcd: Etcd, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watches, "PROBE_S", 0.1)

    async def main(proxy: Proxy) -> None:
        async with opened(f"{proxy.url},{etcd.address}") as store, opened(etcd.url) as writer:
            notified = asyncio.Event()
            await store.watch(KEY, notified.set)
            getattr(proxy, fault)()
            await writer.put(KEY, b"v", if_version=None)
            async with asyncio.timeout(PATIENCE_S):
                await notified.wait()
            await writer.delete(KEY)

    with Proxy(etcd) as proxy:
        asyncio.run(main(proxy))


async def test_watches_share_one_stream_and_are_removed_from_the_server(etcd: Etcd) -> None:
    async with opened(etcd.url) as store:
        before = watchers(etcd)
        each = [await store.watch(f"k{number}", lambda: None) for number in range(50)]
        assert watchers(etcd) == (before[0] + 1, before[1] + 50)
        for watch in each:
            watch.close()
        await eventually(lambda: _require(lambda: watchers(etcd)[1] == before[1]))


async def _require(condition: Callable[[], bool]) -> None:
    if not condition():
        raise StoreUnavailable("not yet")


def watchers(server: Etcd) -> tuple[float, float]:
    """The number of watch streams at etcd, and of watches on them."""
    streams, watches = (
        metric(server, f"etcd_debugging_mvcc_{name}_total") for name in ("watch_stream", "watcher")
    )
    return streams, watches


def metric(server: Etcd, name: str) -> float:
    _, text = http(server.port, "GET", "/metrics")
    return sum(
        float(value) for value in re.findall(rf"(?m)^{name}(?:{{.*}})? (\S+)$", text.decode())
    )


# Failover from a silent member


@pytest.mark.usefixtures("in_order")
def test_a_silent_member_is_left_for_another(etcd: Etcd) -> None:
    async def main(proxy: Proxy) -> None:
        async with opened(f"{proxy.url},{etcd.address}") as store:
            lease = await store.grant(60)
            await store.renew(lease)
            proxy.cut()
            calls: list[Callable[[], Awaitable[Any]]] = [
                lambda: store.get(KEY),
                lambda: store.renew(lease),
            ]
            for call in calls:
                with pytest.raises(TimeoutError):
                    await bounded(call(), 0.2)
                await bounded(call(), 2)

    with Proxy(etcd) as proxy:
        asyncio.run(main(proxy))


# Forks


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on(etcd: Etcd) -> None:
    with doyen.connect_blocking(etcd.url, ttl_s=2) as session, session.campaign("fork") as term:
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)
            try:
                assert not term.valid
                with pytest.raises(ConfigError, match="forked from one"):
                    doyen.connect_blocking(etcd.url).__enter__()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(pid, 0)[1] == 0
        assert term.valid
