"""Nodes with a lost or foreign data directory are refused, and the error names the remedy."""

from __future__ import annotations

import asyncio
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

import doyen
from doyen.quorum.node.data_directory import read_member
from doyen.quorum.node.framed_files import FileSystem
from doyen.stores.port import StoreURL
from doyen.stores.quorum import make_store
from doyen.stores.quorum.diagnosis import remarks
from nodes import addresses, three, until
from test_node import Trio, with_three


def recorded(node: doyen.Node) -> dict[str, str]:
    return dict(node.status().membership.members)


async def remarked(nodes: Trio, *words: str, nowhere: str = "") -> list[str]:
    """Wait until `doyen cluster status` states this in one line, and `nowhere` in none; returns all
    lines. The nodes are asked one after the other."""
    store = make_store(StoreURL.parse(f"doyen://{','.join(nodes.peers.values())}"))
    async with asyncio.timeout(30):
        lines: list[str] = []
        while not any(all(word in line for word in words) for line in lines) or (
            nowhere and any(nowhere in line for line in lines)
        ):
            lines = remarks(await store.inspect())
            await asyncio.sleep(0.01)
    await store.close()
    return lines


async def all_recorded(nodes: Trio) -> None:
    await until(
        lambda: all(recorded(node).keys() == nodes.peers.keys() for node in nodes.nodes.values())
    )


def test_an_emptied_folder_takes_no_acknowledged_write_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """n1 and n3 have acknowledged what n2 has not; n1 comes back empty while n3 is down."""

    async def work(nodes: Trio) -> None:
        leader = await nodes.leader()
        await all_recorded(nodes)
        await leader.propose(b"first")
        if leader.id == "n2":
            await leader.transfer("n1")
            leader = await nodes.leader()
        await nodes.stop("n2")
        await leader.propose(b"second")
        await nodes.stop("n1")
        await nodes.stop("n3")
        shutil.rmtree(tmp_path / "n1")
        with pytest.raises(doyen.StoreUnusable, match=r"is empty.*--found.*cluster remove n1"):
            await nodes.start("n1", found=False)
        assert not (tmp_path / "n1").exists()
        for how in ("found", "join"):
            await nodes.start("n1", **{"found": False, how: True})
            await nodes.start("n2")
            await until(lambda: "has lost data that it has acknowledged" in caplog.text)
            assert "doyen cluster remove n1" in caplog.text
            caplog.clear()
            assert nodes.nodes["n1"].leader is None
            assert nodes.nodes["n2"].leader is None
            refused = "n1 is not connected to n2", "has lost data", "cluster remove n1"
            await remarked(nodes, *refused, nowhere="waits for")  # or directories would be emptied
            await nodes.stop("n1")
            await nodes.stop("n2")
        await nodes.start("n2")
        third = await nodes.start("n3")
        assert (await nodes.leader()).id == "n3"
        await third.propose(b"third")
        assert nodes.notes["n3"].kept == [b"first", b"second", b"third"]
        # The remedy.
        await third.remove("n1")
        shutil.rmtree(tmp_path / "n1")
        await nodes.start("n1", found=False, join=True)
        await third.add("n1", nodes.peers["n1"])
        await until(lambda: nodes.notes["n1"].kept == nodes.notes["n3"].kept)
        while "n1" not in third.status().membership.voters:
            try:
                await third.promote("n1")
            except doyen.OrderFailed:
                await asyncio.sleep(0.01)
        await all_recorded(nodes)
        own = read_member(FileSystem(), tmp_path / "n1")
        assert own is not None
        assert own.member == recorded(third)["n1"]

    with_three(tmp_path, work)


def test_two_emptied_folders_of_three_found_no_second_cluster(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(nodes: Trio) -> None:
        leader = await nodes.leader()
        await leader.propose(b"first")
        for name in ("n1", "n2", "n3"):
            await nodes.stop(name)
        for name in ("n1", "n2"):
            shutil.rmtree(tmp_path / name)
            await nodes.start(name)
        await nodes.start("n3")
        await until(lambda: caplog.text.count("has lost data that it has acknowledged") >= 2)
        assert {node.leader for node in nodes.nodes.values()} == {None}
        assert nodes.notes["n3"].kept == []

    with_three(tmp_path, work)


def test_an_older_copy_of_a_folder_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(nodes: Trio) -> None:
        follower = (await nodes.follower()).id
        leader = await nodes.leader()
        await all_recorded(nodes)
        await leader.propose(b"first")
        await nodes.stop(follower)
        shutil.copytree(tmp_path / follower, tmp_path / "copy")
        await nodes.start(follower)
        await leader.propose(b"second")
        await until(lambda: nodes.notes[follower].kept == [b"first", b"second"])
        await nodes.stop(follower)
        caplog.clear()
        await nodes.start(follower)  # as it was: nothing is said against it
        await until(lambda: nodes.notes[follower].kept == [b"first", b"second"])
        assert "older copy" not in caplog.text
        await nodes.stop(follower)
        shutil.rmtree(tmp_path / follower)
        shutil.move(tmp_path / "copy", tmp_path / follower)
        again = await nodes.start(follower)
        await until(lambda: "its data directory is an older copy" in caplog.text)
        assert f"doyen cluster remove {follower}" in caplog.text
        await until(lambda: f"event=node_takes_no_part node={follower}" in caplog.text)
        assert again.leader is None
        await remarked(nodes, f"{follower} is not", "older copy", f"cluster remove {follower}")
        assert await leader.propose(b"third") == 3
        # Nor does it help another into office that does not know what it has forgotten.
        (other,) = {*nodes.peers} - {follower, leader.id}
        await nodes.stop(leader.id)
        await until(lambda: nodes.nodes[other].leader is None)

    with_three(tmp_path, work)


async def test_a_node_of_another_cluster_of_the_same_name_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two clusters, founded apart; then a node of one is given the addresses of the other."""
    async with asyncio.timeout(60):
        ours, theirs = Trio(tmp_path / "ours"), Trio(tmp_path / "theirs")
        ours.peers, theirs.peers = {"n1": addresses(1)[0]}, {"n2": addresses(1)[0]}
        await ours.start("n1")
        await theirs.start("n2")
        await (await ours.leader()).propose(b"ours")
        await (await theirs.leader()).propose(b"theirs")
        with pytest.raises(doyen.OrderFailed, match="founded separately"):
            await (await ours.leader()).add("n2", theirs.peers["n2"])
        await theirs.stop("n2")
        await (await ours.leader()).add("n2", theirs.peers["n2"])  # nothing answers there now
        await theirs.start("n2")
        await until(lambda: "was founded separately" in caplog.text)
        told = "n2 is not connected to n1", "founded separately"
        await remarked(ours, *told, "doyen cluster remove", "--join", "doyen cluster add")
        await until(lambda: theirs.notes["n2"].kept == [b"theirs"])
        await ours.stop("n1")
        await theirs.stop("n2")


async def test_a_client_keeps_to_the_cluster_that_it_saw_first(tmp_path: Path) -> None:
    nodes = Trio(tmp_path)
    nodes.peers = {"n1": addresses(1)[0]}
    async with asyncio.timeout(60):
        await nodes.start("n1")
        await nodes.leader()
        store = make_store(StoreURL.parse(f"doyen://{nodes.peers['n1']}"))
        await store.open(0)
        await store.put("key", b"value", if_version=None)
        await nodes.stop("n1")
        await nodes.start("n1")
        await nodes.leader()
        assert (await store.get("key")) is not None
        await nodes.stop("n1")
        shutil.rmtree(tmp_path / "n1")
        await nodes.start("n1")
        await nodes.leader()
        with pytest.raises(doyen.StoreUnusable, match=r"was founded separately.*connect anew"):
            await store.get("key")
        await store.close()
        await nodes.stop("n1")


async def test_a_founder_states_whom_it_waits_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("doyen.quorum.node.server.FOUNDING_GRACE_S", 0.0)
    nodes = Trio(tmp_path)
    waits = "the cluster has not been founded: node n1 waits for "
    url = f"doyen://{nodes.peers['n1']}?connect_timeout_s=0.2"

    def lines() -> list[str]:
        return [text.partition(waits)[2].split(":")[0] for text in caplog.messages]

    async with asyncio.timeout(60):
        await nodes.start("n1")
        await until(lambda: "n2, n3" in lines())
        await remarked(nodes, "n1 waits for n2, n3", "--found")
        store = make_store(StoreURL.parse(url))
        with pytest.raises(doyen.StoreUnavailable, match=f"{waits}n2, n3") as refused:
            await store.open(0)
        assert "majority" not in str(refused.value)
        texts = [finding.text for finding in await store.diagnose()]
        assert any("n1 waits for n2, n3" in text for text in texts)
        assert not any("majority" in finding.remedy for finding in await store.diagnose())
        await store.close()
        await nodes.start("n2")
        await until(lambda: "n3" in lines())
        await remarked(nodes, "n1 waits for n3")
        await nodes.stop("n2")
        await until(lambda: lines().count("n2, n3") == 2)
        await nodes.start("n2")
        await nodes.start("n3")
        await nodes.leader()
        assert [line for line in lines() if line][:3] == ["n2, n3", "n3", "n2, n3"]
        for name in [*nodes.nodes]:
            await nodes.stop(name)


async def test_founders_that_reconnect_are_not_reported_as_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the cluster is founded, the connections of the founding are closed."""
    monkeypatch.setattr("doyen.quorum.node.server.FOUNDING_GRACE_S", 0.0)
    nodes = Trio(tmp_path)
    async with asyncio.timeout(60):
        for name in ("n1", "n2", "n3"):
            await nodes.start(name)
        await nodes.leader()
        for name in [*nodes.nodes]:
            await nodes.stop(name)
    for name in ("n1", "n2", "n3"):
        waits = f"node {name} waits for "
        lines = [text.partition(waits)[2].split(":")[0] for text in caplog.messages]
        missing = [set(line.split(", ")) for line in lines if line]
        assert all(after < before for before, after in pairwise(missing)), missing


async def test_a_founding_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    nodes = Trio(tmp_path)
    async with asyncio.timeout(60):
        await nodes.start("n1")
        await nodes.start("n2")
        await nodes.stop("n1")
        before = read_member(FileSystem(), tmp_path / "n1")
        await nodes.start("n3")
        assert before is not None
        assert before.pending
        assert not before.cluster_id
        await nodes.start("n1")
        await (await nodes.leader()).propose(b"first")
        await all_recorded(nodes)
        after = read_member(FileSystem(), tmp_path / "n1")
        assert after is not None
        assert after.member == before.member
        assert after.cluster_id == nodes.nodes["n2"].status().membership.cluster
        for name in [*nodes.nodes]:
            await nodes.stop(name)


async def test_a_folder_of_an_earlier_release_gets_its_ids_when_all_are_there(
    tmp_path: Path,
) -> None:
    """Without the file `member` a folder is as such a release left it; its log names no ids."""
    nodes = Trio(tmp_path)
    async with asyncio.timeout(60):
        from doyen.quorum.node import server

        recording = server.record_members
        server.record_members = lambda driver, members: asyncio.sleep(3600)
        try:
            for name in nodes.peers:
                await nodes.start(name)
            await (await nodes.leader()).propose(b"first")
        finally:
            server.record_members = recording
        for name in nodes.peers:
            await nodes.stop(name)
            (tmp_path / name / "member").unlink()
        for name in ("n1", "n2"):
            await nodes.start(name, found=False)
        leader = await nodes.leader()
        await leader.propose(b"second")
        assert recorded(leader) == {}
        await nodes.start("n3", found=False)
        await all_recorded(nodes)
        clusters = {node.status().membership.cluster for node in nodes.nodes.values()}
        assert len(clusters) == 1
        assert clusters != {""}
        for name in [*nodes.nodes]:
            await nodes.stop(name)


def test_a_shared_secret_does_not_make_a_peer() -> None:
    with pytest.raises(doyen.ConfigError, match="any client could act as a node"):
        doyen.Node("n1", peers=three(), data_dir="data", secret="a secret of clients")
    with pytest.raises(doyen.ConfigError, match="either founds a cluster"):
        doyen.Node("n1", peers=three(), data_dir="data", found=True, join=True)
