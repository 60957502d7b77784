"""From one release to the next: folders that an earlier one wrote, and nodes that lack something.

`folders/first_release.tar.xz` is the data folder of a cluster of one node that the first release
wrote: a snapshot, and entries of the log behind it.
"""

from __future__ import annotations

import asyncio
import tarfile
from pathlib import Path

import pytest

from doyen.errors import ConfigError, StoreUnusable
from doyen.lease.clock import SystemClock
from doyen.model import Lease
from doyen.quorum.consensus.core import Role
from doyen.quorum.keyspace.versions import NEWEST
from doyen.quorum.node.proposals import ProposalLimits
from doyen.quorum.node.replicated import USER
from doyen.quorum.node.server import NodeOptions, NodeServer
from doyen.stores.port import Context, open_store
from doyen.stores.quorum.store import QuorumStore
from drivers import Tally
from servers import free_port

FOLDERS = Path(__file__).with_name("folders")
WITHIN_S = 20.0
LINE = [(b"t2", 2), (b"t1", 1), (b"t4", 2), (b"t0", 2), (b"t3", 1)]
"""Values and leases of the tickets, in the order in which they stand."""


async def started(folder: Path, machine: Tally | None = None, **limits: int) -> NodeServer:
    """The only node of a cluster, leading and at the newest version."""
    options = NodeOptions(
        id="n1",
        peers={"n1": f"127.0.0.1:{free_port()}"},
        data_dir=folder,
        election_s=0.3,
        heartbeat_s=0.05,
        found=True,
        limits=ProposalLimits(**limits),
    )
    server = await NodeServer.open(options, machine)
    async with asyncio.timeout(WITHIN_S):
        while server.driver.role is not Role.LEADING or server.keyspace.version < NEWEST:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return server


async def snapshot_after(server: NodeServer, index: int) -> int:
    """The index of a snapshot that is later than this one. It is written on a thread."""
    async with asyncio.timeout(WITHIN_S):
        while (snapshot := server.driver.status().snapshot) <= index:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return snapshot


async def connected(server: NodeServer) -> QuorumStore:
    context = Context(SystemClock(), lambda event: None)
    store = await open_store(f"doyen://127.0.0.1:{server.port}", context)
    assert isinstance(store, QuorumStore)
    return store


async def test_a_folder_of_the_first_release_is_read_and_raised(tmp_path: Path) -> None:
    with tarfile.open(FOLDERS / "first_release.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / "n1"
    server = await started(folder)
    store = await connected(server)
    kept = await store.list("kept")
    assert [entry.key for entry in kept] == [f"kept/{n:02}" for n in (*range(29), 30)]
    assert [entry.version for entry in kept] == [*range(9, 38), 41]
    assert kept[-1].value == "ü".encode()
    line = await store.list("elections/a/line")
    assert [(ticket.value, int(ticket.lease or 0)) for ticket in line] == LINE
    assert await store.get("gone") is None
    for election, lease in (("a", 1), ("b", 2)):
        leader = await store.get(f"elections/{election}/leader")
        assert leader is not None
        assert leader.lease == str(lease)
        await store.renew(Lease(str(lease), 3600.0))
    await store.revoke(Lease("1", 3600.0))
    entry = await store.put("kept/31", b"", if_version=None)
    assert entry is not None
    assert entry.revision > 44
    await store.close()
    await server.close()

    # What this release writes into that folder, it reads.
    server = await started(folder, snapshot_entries=5)
    store = await connected(server)
    for number in range(20):
        await store.put(f"more/{number}", b"", if_version=None)
    line = await store.list("elections/a/line")
    assert [(ticket.value, int(ticket.lease or 0)) for ticket in line] == [
        each for each in LINE if each[1] == 2
    ]
    snapshot = await snapshot_after(server, 50)
    before = [*server.keyspace.snapshot()]
    await store.close()
    await server.close()

    server = await started(folder)
    assert server.driver.status().snapshot >= snapshot
    store = await connected(server)
    assert len(await store.list("more")) == 20
    # Apart from the era, which every leader begins.
    assert [*server.keyspace.snapshot()][1:] == before[1:]
    await store.close()
    await server.close()


@pytest.mark.parametrize("snapshot_entries", [5, 1000])
async def test_a_node_without_its_state_machine_refuses_to_start(
    tmp_path: Path, snapshot_entries: int
) -> None:
    """Whether what it needs is in the log or in a snapshot."""
    server = await started(tmp_path, Tally(), snapshot_entries=snapshot_entries)
    for number in range(20):
        await server.driver.propose(USER, b"%d" % number)
    if snapshot_entries == 5:
        await snapshot_after(server, 0)
    else:
        assert not server.driver.status().snapshot
    await server.close()
    with pytest.raises(StoreUnusable, match="the same machine= as the others"):
        await started(tmp_path)
    server = await started(tmp_path, Tally())
    assert await server.driver.propose(USER, b"again") == 21
    await server.close()


async def test_nothing_is_proposed_that_no_state_machine_carries_out(tmp_path: Path) -> None:
    server = await started(tmp_path)
    with pytest.raises(ConfigError, match="machine="):
        await server.driver.propose(USER, b"x")
    await server.close()
