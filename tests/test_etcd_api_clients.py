"""Clients of etcd that others wrote, on a quorum of real processes: etcdctl, python-etcd3, aetcd,
etcd3gw; and nodes that are killed under them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from doyen.quorum.etcd_api import rpc
from etcd_door import POLL_S, DoorCluster, EtcdClient
from servers.environments import environment
from servers.etcd import ETCDCTL
from servers.fetch import obtain

pytestmark = pytest.mark.chaos

PATIENCE_S = 60.0
KILLS = 6


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

    def __init__(self, quorum: DoorCluster) -> None:
        self._program = str(obtain(ETCDCTL).path)
        endpoints = ",".join(member.door for member in quorum.members)
        self._environment = {**os.environ, "ETCDCTL_API": "3", "ETCDCTL_ENDPOINTS": endpoints}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self._program, *arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *arguments: str, stdin: str = "", fails: bool = False) -> str:
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
    ctl = Etcdctl(quorum)
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


class Resuming:
    """Calls any node until one answers, and watches across nodes."""

    def __init__(self, quorum: DoorCluster) -> None:
        self._clients = [EtcdClient(member.door) for member in quorum.members]
        self._at = 0

    async def close(self) -> None:
        for client in self._clients:
            await client.__aexit__()

    async def call(self, method: rpc.EtcdMethod, **fields: Any) -> Any:
        while True:
            try:
                return await self._clients[self._at].call(method, **fields)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self._at = (self._at + 1) % len(self._clients)
                await asyncio.sleep(POLL_S)

    async def watch(self, key: bytes, revision: int, told: list[tuple[int, bytes]]) -> None:
        at = 0
        while True:
            stream = self._clients[at].stream(rpc.WATCH)
            try:
                create = {"key": key, "start_revision": revision}
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
            at = (at + 1) % len(self._clients)
            await asyncio.sleep(POLL_S)


def test_nodes_are_killed_under_watches_writes_and_leases(quorum: DoorCluster) -> None:
    """Nothing acknowledged is missing, watches miss nothing and tell nothing twice, and a lease
    that is renewed lives on."""

    async def trial() -> None:
        clients = Resuming(quorum)
        lease = (await clients.call(rpc.GRANT, TTL=5)).ID
        start = (await clients.call(rpc.PUT, key=b"alive", lease=lease)).header.revision
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
                done = await clients.call(rpc.PUT, key=b"chaos", value=value)
                gaps.append(time.monotonic() - before)
                written.append((done.header.revision, value))

        async def renew() -> None:
            while not stop.is_set():
                for client in clients._clients:
                    stream = client.stream(rpc.KEEP_ALIVE)
                    try:
                        await stream.write(rpc.KEEP_ALIVE.request(ID=lease))
                        answer = await asyncio.wait_for(stream.read(), 2)
                        assert answer is grpc.aio.EOF or answer.TTL == 5
                    except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
                        continue
                    finally:
                        stream.cancel()
                await asyncio.sleep(0.2)

        watches = [asyncio.create_task(clients.watch(b"chaos", start, each)) for each in told]
        work = [asyncio.create_task(write()), asyncio.create_task(renew())]
        for _ in range(KILLS):
            leader = await asyncio.to_thread(quorum.leader)
            seen = len(written)
            await asyncio.to_thread(leader.kill)
            while len(written) < seen + 20:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            await asyncio.to_thread(leader.restart)
        stop.set()
        await asyncio.gather(*work)
        last = written[-1][0]
        async with asyncio.timeout(PATIENCE_S):
            while any(not each or each[-1][0] < last for each in told):  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        for each in told:
            revisions = [revision for revision, _ in each]
            assert revisions == sorted({*revisions}), "nothing twice, in order"
            assert {*each} >= {*written}, "nothing missed"
            assert each == told[0], "all were told the same"
        assert (await clients.call(rpc.RANGE, key=b"alive")).count == 1
        await clients.close()
        print(f"{len(written)} writes, the {KILLS} slowest took {sorted(gaps)[-KILLS:]}")

    asyncio.run(trial())
