"""`doyen.Node`, three in this process: each on a thread and in a folder of its own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import doyen
from doyen.quorum.node import NodeRole, _ProposalBridge
from nodes import LONG_ELECTION_S, PATIENCE_S, Notes, addresses, three, until


class Trio:
    """Three nodes in this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.peers = three()
        self.notes: dict[str, Notes] = {}
        self.nodes: dict[str, doyen.Node] = {}
        self._stack: dict[str, AsyncExitStack] = {}

    async def start(self, name: str, **options: Any) -> doyen.Node:
        self.notes[name] = Notes()
        node = doyen.Node(
            name,
            peers=options.pop("peers", self.peers),
            data_dir=self.folder / name,
            machine=self.notes[name],
            **{"found": not options.get("join")} | options,
        )
        stack = self._stack[name] = AsyncExitStack()
        self.nodes[name] = await stack.enter_async_context(node)
        return node

    async def stop(self, name: str) -> None:
        del self.nodes[name]
        await self._stack.pop(name).aclose()

    async def leader(self) -> doyen.Node:
        """The leader, when all running nodes agree on one of them. The followers of a node that
        was stopped name it until they notice its end."""

        found: list[doyen.Node] = []

        def agreed() -> bool:
            first, *others = {node.leader for node in self.nodes.values()}
            if not others and first in self.nodes:
                found.append(self.nodes[first])
            return bool(found)

        await until(agreed)
        return found[0]

    async def follower(self) -> doyen.Node:
        leader = await self.leader()
        return next(node for node in self.nodes.values() if node is not leader)


@asynccontextmanager
async def trio(folder: Path, **options: Any) -> AsyncIterator[Trio]:
    nodes = Trio(folder)
    try:
        for name in nodes.peers:
            await nodes.start(name, **options)
        yield nodes
    finally:
        for name in [*nodes.nodes]:
            await nodes.stop(name)


def with_three(
    folder: Path, work: Callable[[Trio], Coroutine[Any, Any, None]], **options: Any
) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), trio(folder, **options) as nodes:
            await work(nodes)

    asyncio.run(main())


def test_what_one_proposes_all_have(tmp_path: Path) -> None:
    async def work(nodes: Trio) -> None:
        leader = await nodes.leader()
        assert leader.role == "leading"
        assert leader.generation >= 1
        for number, node in enumerate(nodes.nodes.values()):
            results = await asyncio.gather(*(node.propose(b"%d" % n) for n in range(200)))
            assert sorted(results) == list(range(number * 200 + 1, number * 200 + 201))
            with pytest.raises(doyen.CommandFailed, match="ValueError: as asked"):
                await node.propose(b"fail")
        refused = [leader.propose("text"), leader.propose(b"x" * (2 << 20))]  # type: ignore[arg-type]
        first, *errors, last = await asyncio.gather(
            leader.propose(b"fail"), *refused, leader.barrier(), return_exceptions=True
        )
        assert (type(first), last) == (doyen.CommandFailed, None)
        assert [type(error) for error in errors] == [doyen.ConfigError] * 2  # of one turn
        for name, node in nodes.nodes.items():
            await node.barrier()
            assert nodes.notes[name].kept == nodes.notes[leader.id].kept
            assert len(nodes.notes[name].kept) == 600
        status = leader.status()
        assert (status.id, status.role, status.pending, status.full) == (
            leader.id,
            "leading",
            0,
            False,
        )
        assert status.applied == status.commit

    with_three(tmp_path, work)


async def watch_to_the_end(node: doyen.Node) -> None:
    async for _ in node.observe():
        pass


def test_leadership_goes_where_it_is_sent(tmp_path: Path) -> None:
    async def work(nodes: Trio) -> None:
        follower = await nodes.follower()
        seen = []

        async def watch() -> None:
            async for standing in follower.observe():
                seen.append(standing)
                if standing.role == "leading":
                    return

        watching = asyncio.create_task(watch())
        await until(lambda: seen)
        await follower.transfer(follower.id)
        assert follower.role == "leading"
        await watching
        assert seen[0].role == "following"
        assert seen[-1].leader == follower.id
        with pytest.raises(doyen.OrderFailed, match="is not a voter"):
            await follower.transfer("n9")
        last = [asyncio.ensure_future(anext(follower.observe())) for _ in range(2)]
        assert [(await each).role for each in last] == ["leading", "leading"]
        watching = asyncio.create_task(watch_to_the_end(follower))
        await asyncio.sleep(0)
        await nodes.stop(follower.id)
        await watching

    with_three(tmp_path, work)


def test_a_change_just_before_the_end_is_observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes are reported a moment later, here after the node is closed."""
    monkeypatch.setattr("doyen.quorum.node.driver.REPORT_AFTER_S", 60.0)

    async def work(nodes: Trio) -> None:
        follower = await nodes.follower()
        last: NodeRole | None = None

        async def watch() -> None:
            nonlocal last
            async for standing in follower.observe():
                last = standing

        watching = asyncio.create_task(watch())
        await until(lambda: last is not None)
        await follower.transfer(follower.id)
        await nodes.stop(follower.id)
        await watching
        assert last is not None
        assert last.leader == follower.id

    with_three(tmp_path, work)


def test_a_stop_hands_over_and_a_start_remembers(tmp_path: Path) -> None:
    async def work(nodes: Trio) -> None:
        took: list[float] = []
        for number in range(3):
            leader = await nodes.leader()
            await leader.propose(b"%d" % number)
            began = time.monotonic()
            await nodes.stop(leader.id)
            other = await nodes.leader()
            assert other.id != leader.id
            took.append(time.monotonic() - began)
            with pytest.raises(doyen.SessionClosed):
                await leader.propose(b"late")
            again = await nodes.start(leader.id, election_s=LONG_ELECTION_S)
            await again.barrier()
            assert nodes.notes[leader.id].kept == [b"%d" % n for n in range(number + 1)]
        assert min(took) < LONG_ELECTION_S, "an election timeout was waited for"

    with_three(tmp_path, work, election_s=LONG_ELECTION_S)


@pytest.mark.parametrize("protocol", ["smallest-id", "zab", "paxos", "viewstamped"])
async def test_other_protocols_elect_replicate_and_restart(tmp_path: Path, protocol: str) -> None:
    nodes = Trio(tmp_path)
    async with asyncio.timeout(60):
        for name in nodes.peers:
            await nodes.start(name, protocol=protocol)
        first = await nodes.leader()
        await asyncio.gather(*(first.propose(b"%d" % n) for n in range(100)))
        follower = await nodes.follower()
        assert await follower.propose(b"more") == 101
        await nodes.stop(first.id)
        second = await nodes.leader()
        assert await second.propose(b"still more") == 102
        again = await nodes.start(first.id, protocol=protocol)
        await again.barrier()
        assert len(nodes.notes[first.id].kept) == 102
        for name in [*nodes.nodes]:
            await nodes.stop(name)


def test_nodes_come_and_go(tmp_path: Path) -> None:
    async def work(nodes: Trio) -> None:
        leader = await nodes.leader()
        await leader.propose(b"before")
        (where,) = addresses(1)
        await nodes.start("n4", peers=nodes.peers | {"n4": where}, join=True)
        await leader.add("n4", where)
        await until(lambda: nodes.notes["n4"].kept == [b"before"])
        async with asyncio.timeout(10):
            while "n4" not in leader.status().membership.voters:
                with contextlib.suppress(doyen.OrderFailed):  # it may be a little behind
                    await leader.promote("n4")
        assert leader.status().membership.voters == ("n1", "n2", "n3", "n4")
        gone = (await nodes.follower()).id
        await nodes.nodes["n4"].remove(gone)
        await nodes.stop(gone)
        assert await nodes.nodes["n4"].propose(b"after") == 2

    with_three(tmp_path, work)


@pytest.mark.parametrize("secret", [None, "a secret@with/odd?letters#in:it%"])
def test_a_session_on_ones_own_quorum(tmp_path: Path, secret: str | None) -> None:
    async def work(nodes: Trio) -> None:
        node = await nodes.follower()
        async with node.session(ttl_s=2) as session, session.campaign("billing", name="a") as term:
            assert term.valid
            async with (await nodes.leader()).session(ttl_s=2) as other:
                leader = await other.leader("billing")
                assert leader is not None
                assert (leader.name, leader.token) == ("a", term.token)

    with_three(tmp_path, work, secret=secret, peer_secret=secret and f"{secret} of peers")


def test_a_busy_caller_does_not_starve_the_node(tmp_path: Path) -> None:
    async def work(nodes: Trio) -> None:
        leader = await nodes.leader()
        generation = leader.generation
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            pass
        assert await leader.propose(b"still here") == 1
        assert leader.generation == generation

    with_three(tmp_path, work)


def test_loops_come_and_go(tmp_path: Path) -> None:
    """A node serves callers on whatever loops they run."""
    nodes = Trio(tmp_path)
    nodes.peers = {"n1": addresses(1)[0]}

    async def main() -> None:
        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            node = await nodes.start("n1")
            both = [asyncio.to_thread(asyncio.run, propose(node, name)) for name in (b"a", b"b")]
            for each in both:
                tasks.create_task(each)
        await nodes.stop("n1")

    async def propose(node: doyen.Node, name: bytes) -> None:
        await asyncio.gather(*(node.propose(b"%s%d" % (name, n)) for n in range(100)))

    asyncio.run(main())
    assert len({*nodes.notes["n1"].kept}) == 200


def test_a_forked_child_has_no_node(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, doyen

async def main():
    peers = {{"n1": {addresses(1)[0]!r}}}
    async with doyen.Node("n1", peers=peers, data_dir={str(tmp_path / "n1")!r}, found=True) as node:
        child = os.fork()
        if not child:
            try:
                print(node.role, flush=True)
            except doyen.SessionClosed:
                pass
            else:
                os._exit(3)
            try:
                await node.propose(b"x")
            except doyen.SessionClosed as error:
                os._exit(0 if "parent process" in str(error) else 2)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

asyncio.run(main())
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout == "0\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peers": {"n2": "h:1"}}, "'n1' is not among its peers"),
        ({"peers": {"n1": "h"}}, "'h' is not an address"),
        ({"peers": {"n1": "h:1", "n2": "h:1"}}, "two nodes have one address"),
        ({"peers": {"n1": "127.0.0.1:1", "n2": "localhost:1"}}, "two nodes have one address"),
        ({"peers": ["h:1"]}, "; got ['h:1']"),
        ({"peers": "n1=h:1"}, "peers must be a dict"),
        ({"peers": {"n1": 7401}}, "peers must be a dict"),
        ({"join": True}, "needs the addresses of those it joins"),
        ({"protocol": "raftt"}, "no protocol 'raftt'; there are raft, zab"),
        ({"heartbeat_s": 0.6}, "at most half of election_s=1"),
        ({"heartbeat_s": 0.0}, "must be positive"),
        ({"listen": "nowhere"}, "'nowhere' is not an address"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(doyen.ConfigError, match=re.escape(message)):
        doyen.Node("n1", **{"peers": {"n1": "127.0.0.1:1"}, "data_dir": "data"} | options)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="heartbeats"):
        doyen.Node("n1", peers={"n1": "h:1"}, data_dir="data", heartbeats=1)  # type: ignore[call-arg]


async def test_a_node_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    peers = {"n1": addresses(1)[0]}
    node = doyen.Node("n1", peers=peers, data_dir=tmp_path / "n1", found=True)
    with pytest.raises(doyen.SessionClosed, match="not running"):
        await node.propose(b"early")
    async with node:
        with pytest.raises(doyen.SessionClosed, match="entered once"):
            await node.__aenter__()
        with pytest.raises(doyen.StoreUnusable, match=f"in use by process {os.getpid()}"):
            async with doyen.Node("n1", peers=peers, data_dir=tmp_path / "n1", found=True):
                pass
        with pytest.raises(doyen.DoyenError, match=r"listen|in use"):
            async with doyen.Node("n1", peers=peers, data_dir=tmp_path / "other", found=True):
                pass


async def test_a_caller_that_is_cancelled_while_its_node_starts_leaves_nothing(
    tmp_path: Path,
) -> None:
    peers = {"n1": addresses(1)[0]}

    def node() -> doyen.Node:
        return doyen.Node("n1", peers=peers, data_dir=tmp_path / "n1", found=True)

    entering = asyncio.ensure_future(node().__aenter__())
    await asyncio.sleep(0)
    started = f"http://{peers['n1']}/healthz"
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:  # the caller's loop is busy until the node has started
        with contextlib.suppress(OSError), urllib.request.urlopen(started, timeout=1):  # noqa: ASYNC210
            break
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering
    async with node() as again:
        await again.barrier()


def test_a_missing_library_names_the_extra() -> None:
    code = """
import sys
sys.modules["msgspec"] = None
import doyen
class Machine(doyen.StateMachine): ...
try:
    doyen.Node("n1", peers={"n1": "h:1"}, data_dir="data")
except doyen.ConfigError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert "install doyen[quorum]" in result.stdout


async def test_proposals_to_a_node_that_has_stopped_have_errors_of_their_own() -> None:
    """Each is raised somewhere else."""
    stopped = asyncio.new_event_loop()
    stopped.close()
    bridge = _ProposalBridge(asyncio.get_running_loop(), stopped, Any)  # type: ignore[arg-type]
    proposed = bridge.propose(b"a"), bridge.propose(b"b")
    errors: tuple[Any, Any] = await asyncio.gather(*proposed, return_exceptions=True)
    assert [type(error) for error in errors] == [doyen.SessionClosed] * 2
    assert errors[0] is not errors[1]
