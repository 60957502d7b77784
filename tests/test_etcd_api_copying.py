"""Keyspaces are copied between clusters of etcd's API: `doyen cluster import` and `export`."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import servers
from doyen.cli import main
from doyen.errors import ConfigError, OrderFailed, StoreUnavailable, StoreUnusable
from doyen.quorum.etcd_api import rpc
from doyen.quorum.etcd_api.copying import KeyspaceSide, copy
from doyen.stores.port import StoreURL
from etcd_door import DoorCluster, EtcdClient, doors

KEYS = 20_000


async def records(client: EtcdClient) -> dict[bytes, tuple[bytes, int]]:
    found = await client.call(rpc.RANGE, key=b"\0", range_end=b"\0")
    return {each.key: (each.value, each.lease) for each in found.kvs}


async def fill(client: EtcdClient, first: int, count: int, size: int = 10) -> None:
    puts = [
        {"request_put": {"key": b"k%06d" % each, "value": b"%d" % each * size}}
        for each in range(first, first + count)
    ]
    await client.call(rpc.TXN, success=puts)


class Sides:
    """Two clusters, their clients, and how to copy from the first to the second."""

    def __init__(self, addresses: list[str], clients: list[EtcdClient]) -> None:
        self._addresses = addresses
        self.source, self.target = clients

    async def copy(self, prefix: bytes = b"", **settings: Any) -> Any:
        urls = [StoreURL.parse(f"etcd://{address}") for address in self._addresses]
        sides = [KeyspaceSide(url, prefix) for url in urls]
        try:
            return await copy(*sides, **settings)
        finally:
            for side in sides:
                await side.close()


def run(folder: Path, trial: Callable[[Sides], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with doors(folder / "a") as a, doors(folder / "b") as b:
            (one,), (two,) = a.addresses, b.addresses
            async with EtcdClient(one) as source, EtcdClient(two) as target:
                await trial(Sides([one, two], [source, target]))

    asyncio.run(whole())


def test_keys_and_leases_are_copied_and_a_copy_is_resumed(tmp_path: Path) -> None:
    async def trial(sides: Sides) -> None:
        source, target = sides.source, sides.target
        for number in range(0, 300, 100):
            await fill(source, number, 100)
        await source.call(rpc.PUT, key=b"large", value=b"x" * 900_000)
        lease = (await source.call(rpc.GRANT, TTL=500)).ID
        empty = (await source.call(rpc.GRANT, TTL=300)).ID
        await source.call(rpc.PUT, key=b"leased", value=b"v", lease=lease)

        # The first copy ends in the middle.
        def interrupt(what: str, done: int, total: int) -> None:
            if done == 250:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            await sides.copy(progress=interrupt)
        before = await records(target)
        assert 0 < len(before) < 300
        done = await sides.copy()
        assert (done.keys, done.leases, done.ended) == (302, 2, 0)
        assert done.written == 302 - len(before), "only what was missing"
        assert await records(target) == await records(source)
        assert (done.changed, done.deleted) == (False, 0)
        left = (await target.call(rpc.TIME_TO_LIVE, ID=lease, keys=True)).TTL
        assert 490 <= left <= 500
        assert 0 < (await target.call(rpc.TIME_TO_LIVE, ID=empty)).TTL <= 300
        again = await sides.copy()
        assert (again.written, again.checksum) == (0, done.checksum)

        # The source has changed since: the copy is repeated with what differs.
        await source.call(rpc.PUT, key=b"k000000", value=b"new")
        await source.call(rpc.DELETE_RANGE, key=b"k000001")
        with pytest.raises(OrderFailed, match="has 2 keys that the source does not have"):
            await sides.copy()
        changed = await sides.copy(replace=True)
        assert (changed.keys, changed.written, changed.deleted) == (301, 1, 1)
        assert await records(target) == await records(source)
        # A lease that was renewed has more time left than its copy.
        await target.call(rpc.REVOKE, ID=lease)
        await target.call(rpc.GRANT, ID=lease, TTL=100)
        assert (await sides.copy()).written == 1
        assert (await target.call(rpc.TIME_TO_LIVE, ID=lease)).TTL > 400

    run(tmp_path, trial)


def test_what_is_left_alone_and_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def trial(sides: Sides) -> None:
        source, target = sides.source, sides.target
        # Only a prefix is copied.
        for key in (b"a/1", b"a/2", b"b"):
            await source.call(rpc.PUT, key=key, value=b"v")
        await source.call(rpc.GRANT, TTL=300)
        await target.call(rpc.PUT, key=b"other", value=b"o")
        done = await sides.copy(prefix=b"a/", replace=True)
        assert (done.keys, done.leases) == (2, 0)
        assert sorted(await records(target)) == [b"a/1", b"a/2", b"other"]

        # Another program writes to the target.
        for number in range(0, 200, 100):
            await fill(source, number, 100)
        writing: list[Any] = []

        def disturb(what: str, done: int, total: int) -> None:
            if what == "copying keys" and done == 1:
                writing.append(asyncio.ensure_future(target.call(rpc.PUT, key=b"z", value=b"w")))

        with pytest.raises(OrderFailed, match=r"204 keys with the checksum .* instead of 203"):
            await sides.copy(replace=True, progress=disturb)
        await asyncio.gather(*writing)

        # A revision that is compacted meanwhile is not read to its end; the copy begins again.
        ask = KeyspaceSide.ask
        compacted: list[int] = []

        async def compact(self: KeyspaceSide, method: Any, **fields: Any) -> Any:
            if fields.get("limit") and self.name.endswith(sides._addresses[0]) and not compacted:
                put = await source.call(rpc.PUT, key=b"k000000", value=b"new")
                compacted.append(put.header.revision)
                await source.call(rpc.COMPACT, revision=put.header.revision)
            return await ask(self, method, **fields)

        monkeypatch.setattr(KeyspaceSide, "ask", compact)
        done = await sides.copy(replace=True)
        assert (done.keys, [done.revision]) == (203, compacted)
        assert await records(target) == await records(source)

        # Nor does it then overwrite what it has not been allowed to.
        compacted.clear()
        await target.call(rpc.PUT, key=b"theirs", value=b"o")
        with pytest.raises(OrderFailed, match=r"has 1 key that .* such as 'theirs'"):
            await sides.copy()
        assert compacted
        assert b"theirs" in await records(target)
        assert (await sides.copy(replace=True)).deleted == 1

        # What the target does not accept is named.
        await source.call(rpc.PUT, key=b"huge", value=b"x" * 10)

        async def refuse(self: KeyspaceSide, method: Any, **fields: Any) -> Any:
            if method is rpc.TXN:
                raise StoreUnusable("etcd at h refuses this: etcdserver: request is too large")
            return await ask(self, method, **fields)

        monkeypatch.setattr(KeyspaceSide, "ask", refuse)
        with pytest.raises(StoreUnusable, match="does not accept the key 'huge'"):
            await sides.copy()
        with pytest.raises(StoreUnavailable, match="onnect"):  # at once, if it never answered
            await Sides(
                [f"127.0.0.1:{servers.free_port()}", sides._addresses[1]], [source] * 2
            ).copy()
        with pytest.raises(ConfigError, match="leave the path out"):
            KeyspaceSide(StoreURL.parse("etcd://h/app"))
        with pytest.raises(ConfigError, match="are the same cluster"):
            await Sides([sides._addresses[0]] * 2, [source, source]).copy()

    run(tmp_path, trial)


@pytest.mark.chaos
def test_a_real_etcd_is_copied_in_and_out() -> None:
    """Through the command, which is killed in the middle and repeated, in both directions."""
    with servers.Etcd() as etcd, DoorCluster(3) as quorum, servers.Etcd() as other:
        member = quorum.leader()

        async def prepare() -> int:
            async with EtcdClient(etcd.address) as client:
                for number in range(0, KEYS, 100):
                    await fill(client, number, 100, size=400)
                lease = (await client.call(rpc.GRANT, TTL=1000)).ID
                await client.call(rpc.PUT, key=b"/leased", value=b"v", lease=lease)
                return int(lease)

        async def compare(*addresses: str) -> None:
            states = []
            for address in addresses:
                async with EtcdClient(address) as client:
                    states.append(await records(client))
                    assert 900 < (await client.call(rpc.TIME_TO_LIVE, ID=lease)).TTL <= 1000
            assert states[0] == states[1]
            assert len(states[0]) == KEYS + 1

        lease = asyncio.run(prepare())
        nodes = ",".join(each.address for each in quorum.members)
        for action, url, address, end in (
            ("import", etcd.url, member.door, signal.SIGINT),
            ("export", other.url, other.address, signal.SIGKILL),
        ):
            command = [sys.executable, "-m", "doyen", "cluster", action, url]
            command += ["--store", f"doyen://{nodes}", "--json"]
            first = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
            )
            asyncio.run(some_keys(address))
            first.send_signal(end)
            _, said = first.communicate()
            assert ("run the same command again" in said) == (end is signal.SIGINT), said
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            copied = json.loads(done.stdout)
            assert (copied["keys"], copied["leases"]) == (KEYS + 1, 1)
            assert 0 < copied["written"] < KEYS, "it went on where it was"
            asyncio.run(compare(etcd.address, address))


async def some_keys(address: str) -> None:
    """Wait until a copy has begun to write."""
    async with asyncio.timeout(60), EtcdClient(address) as client:
        while True:
            found = await client.outcome(rpc.RANGE, key=b"\0", range_end=b"\0", count_only=True)
            if not isinstance(found, tuple) and found.count:
                return


def test_urls_that_are_not_of_etcd_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for url in ("redis://h", "h:2379"):
        assert main(["cluster", "import", url, "--store", "etcd://h"]) == 2
        assert f"{url} is not the URL of an etcd cluster" in capsys.readouterr().err
    assert main(["cluster", "export", "etcd://h", "--store", "sqlite:x.db"]) == 2
    assert "is not the URL of a quorum" in capsys.readouterr().err
