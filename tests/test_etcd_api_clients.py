"""Clients of etcd that others wrote, on a quorum of real processes: etcdctl, python-etcd3, aetcd,
etcd3gw; and nodes that are killed under them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import grpc
import pytest

import servers
from doyen.quorum.etcd_api import rpc
from etcd_door import POLL_S, AnyNode, Door, DoorCluster, DoorNode, EtcdClient
from servers.environments import environment
from servers.etcd import ETCDCTL
from servers.fetch import obtain

pytestmark = pytest.mark.chaos

PATIENCE_S = 90.0
KEY = b"chaos"
TTL = 15
PINGS = "--keepalive-time=2s", "--keepalive-timeout=2s"
"""etcdctl goes to another node if one does not answer for so long."""
FAULTS = (
    "leader kill",
    "leader freeze",
    "follower freeze",
    "leader cut",
    "follower cut",
    "follower kill",
    "leader kill",
)


NEEDS = {
    "etcd3": ("etcd3==0.12.0", "protobuf==3.20.3", "setuptools<81"),
    "aetcd": ("aetcd==1.0.0", "etcd3gw==2.7.0"),
}
"""What each environment needs; the two do not agree on protobuf."""


def interpreter(name: str) -> str:
    """The interpreter of an environment with clients of etcd."""
    return str(environment(name, NEEDS[name]) / "bin/python")


@pytest.fixture(scope="module")
def quorum() -> Iterator[DoorCluster]:
    with DoorCluster(3) as cluster:
        yield cluster


class Etcdctl:
    """Runs etcdctl on all nodes."""

    def __init__(self, addresses: list[str]) -> None:
        self._program = str(obtain(ETCDCTL).path)
        endpoints = {"ETCDCTL_ENDPOINTS": ",".join(addresses)}
        self._environment = {**os.environ, "ETCDCTL_API": "3", **endpoints}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self._program, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self,
        *arguments: str,
        stdin: str = "",
        fails: bool = False,
    ) -> str:
        done = subprocess.run(
            [self._program, *arguments],
            env=self._environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert (done.returncode != 0) == fails, done.stderr
        return (done.stderr if fails else done.stdout).strip()


def next_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_etcdctl(quorum: DoorCluster) -> None:
    ctl = Etcdctl([member.door for member in quorum.members])
    assert ctl("put", "foo", "bar") == "OK"
    assert ctl("get", "foo") == "foo\nbar"
    assert ctl("put", "foo", "baz", "--prev-kv") == "OK\nfoo\nbar"
    status = ctl("endpoint", "status", "-w", "fields")
    assert status.count('"Version" : "3.') == 3
    for member in quorum.members:
        assert member.door in ctl("member", "list")
    lease = ctl("lease", "grant", "100").split()[1]
    ctl("put", "bound", "1", f"--lease={lease}")
    assert "attached keys([bound])" in ctl("lease", "timetolive", lease, "--keys")
    assert "keepalived" in ctl("lease", "keep-alive", "--once", lease)
    assert lease in ctl("lease", "list")
    txn = 'mod("foo") > "0"\n\nput a 1\nget foo\n\nput a 2\n\n'
    assert ctl("txn", stdin=txn).split() == ["SUCCESS", "OK", "foo", "baz"]
    watching = ctl.start("watch", "foo", "--rev=1")
    assert [next_line(watching) for _ in range(6)] == ["PUT", "foo", "bar", "PUT", "foo", "baz"]
    end(watching)
    ctl("lease", "revoke", lease)
    assert ctl("get", "bound") == ""
    assert ctl("lock", "mutex", "echo", "held") == "held"

    first = ctl.start("elect", "e", "one")
    assert [next_line(first).startswith("e/"), next_line(first)] == [True, "one"]
    second = ctl.start("elect", "e", "two")
    listening = ctl.start("elect", "--listen", "e")
    assert [next_line(listening).startswith("e/"), next_line(listening)] == [True, "one"]
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=PATIENCE_S)
    assert [next_line(second).startswith("e/"), next_line(second)] == [True, "two"]
    assert [next_line(listening).startswith("e/"), next_line(listening)] == [True, "two"]
    for each in (second, listening):
        end(each)
    ctl("compaction", "3")
    assert "has been compacted" in ctl("watch", "foo", "--rev=1", fails=True)
    assert "Unimplemented" in ctl("user", "list", fails=True)


def test_the_benchmark_of_etcdctl(quorum: DoorCluster) -> None:
    """`check perf` writes for a minute at a fixed rate, and deletes what it wrote. Whether the
    machine is fast enough for its limits is not tested here."""
    ctl = Etcdctl([member.door for member in quorum.members])
    process = ctl.start("check", "perf", "--load=s")
    found, _ = process.communicate(timeout=3 * PATIENCE_S)
    assert "hroughput" in found
    assert found.splitlines()[-1] in ("PASS", "FAIL"), found
    assert "errors" not in found.lower(), found
    print(found)
    assert ctl("get", "--prefix", "/etcdctl-check-perf/") == ""


ETCD3 = """
import sys, threading, etcd3
client = etcd3.client(*sys.argv[1].split(":"))
assert len(list(client.members)) == 3
client.delete("new")
client.put("py", "1")
assert client.get("py")[0] == b"1"
assert client.replace("py", "1", "2") and not client.replace("py", "1", "3")
assert client.put_if_not_exists("new", "x") and not client.put_if_not_exists("new", "x")
lease = client.lease(5)
client.put("leased", "x", lease=lease)
assert lease.refresh()[0].TTL == 5 and lease.granted_ttl == 5 and lease.keys == [b"leased"]
events, cancel = client.watch_prefix("w/")
client.put("w/1", "v"); client.delete("w/1")
kinds = [type(next(events)).__name__ for _ in range(2)]
assert kinds == ["PutEvent", "DeleteEvent"], kinds
cancel()
with client.lock("py", ttl=5) as lock:
    assert lock.is_acquired()
lease.revoke()
assert client.get("leased")[0] is None
client.put("py", "3"); revision = client.get("py")[1].mod_revision
client.compact(revision)
try:
    next(client.watch("py", start_revision=1)[0])
except etcd3.exceptions.RevisionCompactedError as error:
    assert error.compacted_revision == revision
"""

AETCD = """
import asyncio, sys, aetcd
async def main():
    host, port = sys.argv[1].split(":")
    async with aetcd.Client(host=host, port=int(port)) as client:
        await client.put(b"a", b"1")
        assert (await client.get(b"a")).value == b"1"
        lease = await client.lease(5)
        await client.put(b"l", b"x", lease=lease)
        assert (await lease.refresh()).TTL == 5
        watch = await client.watch(b"aw")
        await client.put(b"aw", b"1")
        async for event in watch:
            assert event.kv.value == b"1"
            break
        await watch.cancel()
        async with client.lock(b"lk", ttl=5):
            pass
        is_one = client.transactions.value(b"a") == b"1"
        put = client.transactions.put(b"a", b"2")
        assert (await client.transaction([is_one], [put], []))[0]
        await client.revoke_lease(lease.id)
        assert await client.get(b"l") is None
asyncio.run(main())
"""

ETCD3GW = """
import sys, threading, etcd3gw
host, port = sys.argv[1].split(":")
client = etcd3gw.client(host=host, port=int(port))
assert client.put("x", "y") and client.get("x") == [b"y"]
assert len(client.members()) == 3
lease = client.lease(5)
client.put("gl", "v", lease=lease)
assert lease.ttl() >= 3 and lease.keys() == [b"gl"] and lease.refresh() == 5
events, cancel = client.watch("gw")
threading.Timer(0.2, client.put, ("gw", "1")).start()
assert next(events)["kv"]["value"] == b"1"
cancel()
lock = client.lock("gll", ttl=5)
assert lock.acquire() and lock.is_acquired() and lock.release()
assert client.create("gn", "1") and not client.create("gn", "1") and client.replace("gn", "1", "2")
assert client.get_prefix("gn")[0][0] == b"2" and client.delete("gn")
lease.revoke()
assert client.get("gl") == []
"""


@pytest.mark.parametrize(
    ("kind", "program"), [("etcd3", ETCD3), ("aetcd", AETCD), ("aetcd", ETCD3GW)]
)
def test_python_clients(quorum: DoorCluster, kind: str, program: str) -> None:
    for member in quorum.members:
        done = subprocess.run(
            [interpreter(kind), "-c", program, member.door],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr


class Resuming(AnyNode):
    """Calls any node until one answers, and watches across nodes."""

    async def watch(self, at: int, revision: int, told: list[tuple[int, bytes]]) -> None:
        while True:
            stream = self.clients[at % len(self.clients)].stream(rpc.WATCH)
            try:
                create = {"key": KEY, "start_revision": revision}
                await stream.write(rpc.WATCH.request(create_request=create))
                while (response := await stream.read()) is not grpc.aio.EOF:
                    assert not response.canceled, response
                    for event in response.events:
                        told.append((event.kv.mod_revision, event.kv.value))
                        revision = event.kv.mod_revision + 1
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                pass
            finally:
                stream.cancel()
            at += 1
            await asyncio.sleep(POLL_S)


class Listening:
    """`etcdctl watch`, which goes to another node by itself."""

    def __init__(self, ctl: Etcdctl, revision: int) -> None:
        self.told: list[bytes] = []
        self.process = ctl.start("watch", KEY.decode(), f"--rev={revision}", *PINGS)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        for kind, _key, value in zip(lines, lines, lines, strict=False):
            assert kind == "PUT\n"
            self.told.append(value.strip().encode())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        end(self.process)
        self._thread.join()


@pytest.fixture
def links(quorum: DoorCluster) -> Iterator[dict[str, servers.Proxy]]:
    """The network between the clients and each node."""
    with ExitStack() as stack:
        yield {
            each.name: stack.enter_context(servers.Proxy(Door(each.ports[1])))
            for each in quorum.members
        }


def test_faults_under_watches_writes_and_leases(
    quorum: DoorCluster, links: dict[str, servers.Proxy]
) -> None:
    """Nodes are killed, frozen and cut off. While each fault lasts, watches and keepalives go on at
    another node. Nothing acknowledged is missing, and nothing is told twice."""
    addresses = [f"127.0.0.1:{link.port}" for link in links.values()]
    ctl = Etcdctl(addresses)

    async def trial() -> None:
        clients = Resuming(addresses, ping_s=2)
        leases = [(await clients.call(rpc.GRANT, TTL=TTL)).ID for _ in range(2)]
        for lease in leases:
            await clients.call(rpc.PUT, key=b"alive/%d" % lease, lease=lease)
        start = (await clients.call(rpc.PUT, key=b"start")).header.revision + 1
        written: list[tuple[int, bytes]] = []
        gaps: list[float] = []
        told: list[list[tuple[int, bytes]]] = [[], [], []]
        stop = asyncio.Event()

        async def write() -> None:
            number = 0
            while not stop.is_set():
                number += 1
                before = time.monotonic()
                value = b"%d" % number
                done = await clients.call(rpc.PUT, key=KEY, value=value)
                gaps.append(time.monotonic() - before)
                written.append((done.header.revision, value))
                await asyncio.sleep(POLL_S)

        async def renew() -> None:
            while not stop.is_set():
                for client in clients.clients:
                    stream = client.stream(rpc.KEEP_ALIVE)
                    try:
                        await stream.write(rpc.KEEP_ALIVE.request(ID=leases[0]))
                        answer = await asyncio.wait_for(stream.read(), 2)
                        assert answer is grpc.aio.EOF or answer.TTL == TTL
                    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                        continue
                    finally:
                        stream.cancel()
                await asyncio.sleep(0.2)

        listening = stack.enter_context(Listening(ctl, start))
        keeping = ctl.start("lease", "keep-alive", f"{leases[1]:x}", *PINGS)
        stack.callback(end, keeping)
        watches = [asyncio.create_task(clients.watch(at, start, told[at])) for at in range(3)]
        work = [asyncio.create_task(write()), asyncio.create_task(renew())]

        async def all_told() -> None:
            """Wait for more writes, and until every watch has been told of them."""
            seen = len(written) + 20
            async with asyncio.timeout(PATIENCE_S):
                while len(written) < seen:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                revision, value = written[-1]
                while any(not each or each[-1][0] < revision for each in told):  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)
                while value not in listening.told:  # noqa: ASYNC110
                    await asyncio.sleep(POLL_S)

        for fault in FAULTS:
            who, _, what = fault.partition(" ")
            leader = await asyncio.to_thread(quorum.leader)
            some = next(each for each in quorum.members if each is not leader)
            node = leader if who == "leader" else some
            before = len(gaps)
            if what == "cut":
                await asyncio.to_thread(links[node.name].cut)
            else:
                await asyncio.to_thread(getattr(node, what))
            await all_told()
            if what == "cut":
                await asyncio.to_thread(links[node.name].heal)
            elif what == "freeze":
                await asyncio.to_thread(node.thaw)
            else:
                await asyncio.to_thread(node.restart)
            print(f"{fault}: the slowest write took {max(gaps[before:]):.2f} s", flush=True)
        stop.set()
        await asyncio.gather(*work)
        await all_told_finally(told, written[-1][0])
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for each in told:
            revisions = [revision for revision, _ in each]
            assert revisions == sorted({*revisions}), "nothing twice, in order"
            assert {*each} >= {*written}, "nothing missed"
            assert each == told[0], "all were told the same"
        values = [value for _, value in told[0]]
        async with asyncio.timeout(PATIENCE_S):
            while len(listening.told) < len(values):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        assert listening.told == values
        assert keeping.poll() is None, "etcdctl keeps its lease alive"
        found = await clients.call(rpc.RANGE, key=b"alive/", range_end=b"alive0")
        assert found.count == 2
        await clients.close()
        print(f"{len(written)} writes")

    with ExitStack() as stack:
        asyncio.run(trial())


async def all_told_finally(told: list[list[tuple[int, bytes]]], last: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while any(each[-1][0] < last for each in told):  # noqa: ASYNC110
            await asyncio.sleep(POLL_S)


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_a_watcher_that_does_not_read_takes_no_memory() -> None:
    """It is cut off when the history, which is bounded, no longer has what it wants, and learns
    from where it has to read again."""

    async def trial(member: DoorNode) -> None:
        async with EtcdClient(member.door) as client, EtcdClient(member.door) as slow:
            await client.ready()
            stream = slow.stream(rpc.WATCH)
            await stream.write(rpc.WATCH.request(create_request={"key": KEY}))
            assert (await stream.read()).created
            sizes = []
            for number in range(900):
                await client.call(rpc.PUT, key=KEY, value=b"%d" % number + bytes(900_000))
                if number % 300 == 299:
                    sizes.append(resident_mb(member.pid))
            print([round(each) for each in sizes], "MiB, after writes of 257 MiB each")
            assert sizes[-1] < sizes[0] + 128, "the history is full after the first part"
            told: list[int] = []
            while not (response := await stream.read()).canceled:
                told += [each.kv.mod_revision for each in response.events]
            assert told == [*range(told[0], told[0] + len(told))]
            assert told[-1] < response.compact_revision

    with DoorCluster(1) as cluster:
        asyncio.run(trial(cluster.members[0]))
