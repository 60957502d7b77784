"""The smaller protocols in a real node: files, sockets, a failing leader, a restart of all
nodes."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

import doyen
from nodes import Notes, three, until


@pytest.mark.parametrize("protocol", ["smallest-id", "zab", "viewstamped", "paxos"])
def test_three_nodes_on_real_sockets(protocol: str, tmp_path: Path) -> None:
    peers = three()
    first = asyncio.run(_live(protocol, tmp_path, peers, 0))
    asyncio.run(_live(protocol, tmp_path, peers, first))


async def _live(protocol: str, folder: Path, peers: dict[str, str], written: int) -> int:
    """Start all nodes, write through each, stop the leader, write on; returns the number of
    writes."""
    notes = {name: Notes() for name in peers}
    stacks = {name: AsyncExitStack() for name in peers}
    nodes: dict[str, doyen.Node] = {}
    try:
        for name in peers:
            node = doyen.Node(
                name,
                peers=peers,
                data_dir=folder / name,
                machine=notes[name],
                found=True,
                protocol=protocol,
                election_s=0.5,
                heartbeat_s=0.05,
            )
            nodes[name] = await stacks[name].enter_async_context(node)
        await until(lambda: _agreed(nodes))
        for node in list(nodes.values()):
            for _ in range(20):
                await node.propose(b"%d" % written)
                written += 1
        leader = next(iter(nodes.values())).leader or ""
        del nodes[leader]
        await stacks.pop(leader).aclose()
        await until(lambda: _agreed(nodes))
        for node in nodes.values():
            await node.propose(b"%d" % written)
            written += 1
        for name, node in nodes.items():
            await node.barrier()
            assert notes[name].kept == [b"%d" % number for number in range(written)]
    finally:
        for stack in stacks.values():
            await stack.aclose()
    return written


def _agreed(nodes: dict[str, doyen.Node]) -> bool:
    leaders = {node.leader for node in nodes.values()}
    return len(leaders) == 1 and leaders <= nodes.keys()
