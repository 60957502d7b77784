"""The version of a cluster: when it rises, and which nodes take part in it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest

from doyen.errors import OrderFailed
from doyen.quorum.consensus.core import EntryKind, Membership, Role
from doyen.quorum.keyspace.commands import (
    BeginEra,
    Create,
    Grant,
    MalformedCommand,
    Put,
    RaiseVersion,
    Update,
    Written,
    decode_command,
    encode,
)
from doyen.quorum.keyspace.versions import FIRST, NEWEST, UPDATES
from doyen.quorum.node import roles
from doyen.quorum.node.admin import Administration
from doyen.quorum.node.proposals import ProposalLimits
from doyen.quorum.node.replicated import KEYSPACE, decode_batch
from doyen.quorum.protocol.requests import ErrorCode, Failed
from doyen.testing.virtual import run_virtual
from drivers import World
from test_quorum_service import Client, Quorum, WithKeyspace, on_quorum


def versions(quorum: Quorum) -> list[int]:
    return [quorum.keyspace(node).version for node in quorum.world.nodes]


def test_the_version_rises_when_every_member_supports_it() -> None:
    """One that is down, or of an older release, keeps it where it is."""

    async def main() -> None:
        quorum = Quorum()
        quorum.world.supports |= {"n1": 1, "n2": 1}
        await quorum.start(raised=False)
        client = Client(quorum.services["n1"])
        for number in range(1, 4):
            await client.do(number, Put(f"k{number}", b"", 0))
            await asyncio.sleep(2.0)
        assert versions(quorum) == [1, 1, 1]
        down = await quorum.follower()
        quorum.crash(down)
        quorum.world.supports.clear()
        await asyncio.sleep(5.0)
        assert versions(quorum) == [1, 1]
        await quorum.restart(down)
        await quorum.world.until(lambda: versions(quorum) == [NEWEST] * 3)
        for node in quorum.world.nodes:
            assert quorum.world.links[node].required == NEWEST

    run_virtual(main)


def test_the_first_leader_raises_the_version_before_any_write_of_a_client() -> None:
    """Writes of the first version are not all remembered, so one that is repeated could be carried
    out twice. Here a client writes at the moment at which there is a leader."""

    async def main() -> None:
        quorum = Quorum()
        await quorum.world.boot()
        for node in quorum.world.nodes.values():
            quorum.serve(node)
        await quorum.world.until(quorum.world.leaders)
        (leader,) = quorum.world.leaders()
        await Client(quorum.services[leader.id]).do(1, Put("k", b"", 0))
        batches = [
            decode_batch(entry.data)
            for entry in quorum.world.cluster.committed
            if entry.kind is EntryKind.COMMANDS
        ]
        commands = [decode_command(command.body) for batch in batches for command in batch]
        assert [type(each) for each in commands[:3]] == [BeginEra, RaiseVersion, Put]

    run_virtual(main)


async def versions_around_an_addition(delay_s: float) -> tuple[int | None, int]:
    """A node of an older release is added this long after the command that raises the version is
    queued. The version when the node became a member in the leader's log, None if it was refused,
    and the version at the end."""
    quorum = Quorum()
    quorum.world.supports |= {"n1": 1, "n2": 1, "n3": 1}
    await quorum.start(raised=False)
    leader = await quorum.world.leader()
    await quorum.world.until(lambda: quorum.keyspace(leader.id).era)
    await quorum.world.boot_one("n4", Membership(quorum.world.voters, ("n4",)))
    quorum.world.supports = {"n4": 1}
    quorum.services[leader.id]._keeper._start_upkeep()
    if delay_s:
        await asyncio.sleep(delay_s)
    adding = asyncio.ensure_future(leader.admin.perform("add", "n4", "h4:1"))
    await quorum.world.until(lambda: "n4" in leader.membership.everyone or adding.done())
    added_at: int | None = quorum.keyspace(leader.id).version
    if "n4" in leader.membership.everyone:
        await adding
    else:
        added_at = None
        with pytest.raises(OrderFailed, match="install the release"):
            await adding
    await asyncio.sleep(5.0)
    return added_at, quorum.keyspace(leader.id).version


DELAYS_S = [0.0, *(0.0002 * step for step in range(1, 20))]
"""From the proposal of a command until it is applied everywhere."""


def test_an_older_node_is_not_added_to_a_cluster_whose_version_rises() -> None:
    """The node would receive a command that it does not know."""
    outcomes = {
        delay_s: run_virtual(partial(versions_around_an_addition, delay_s)) for delay_s in DELAYS_S
    }
    assert set(outcomes.values()) <= {(FIRST, FIRST), (None, NEWEST)}, outcomes
    assert (None, NEWEST) in outcomes.values()


def test_a_node_of_an_unknown_release_may_be_added() -> None:
    """One that does not run yet: its connections are refused later if it is older."""

    async def test(quorum: Quorum) -> None:
        leader, other = await quorum.world.leader(), await quorum.follower()
        await leader.admin.perform("add", "n4", "h4:1")
        assert "n4" in leader.membership.everyone
        quorum.world.supports["n5"] = NEWEST - 1
        await quorum.world.boot_one("n5", Membership(quorum.world.voters, ("n5",)))
        with pytest.raises(OrderFailed, match=f"version {NEWEST} .* install the release"):
            await quorum.world.nodes[other].admin.perform("add", "n5", "h5:1")
        quorum.world.supports["n5"] = NEWEST
        await leader.admin.perform("add", "n5", "h5:1")

    on_quorum(test)


def test_an_addition_that_ignores_the_raising_of_the_version_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Administration, "_version_in_flux", lambda self: False)
    outcomes = [run_virtual(partial(versions_around_an_addition, each)) for each in DELAYS_S]
    assert (FIRST, NEWEST) in outcomes


def test_a_new_leader_adds_no_node_before_it_knows_the_version() -> None:
    """The command that raises it may be in its log, and not applied yet."""

    async def main() -> None:
        quorum = Quorum()
        quorum.world.supports |= {"n1": 1, "n2": 1, "n3": 1}
        await quorum.start(raised=False)
        leader = await quorum.world.leader()
        await quorum.world.until(lambda: quorum.keyspace(leader.id).era)
        heir = quorum.world.nodes[await quorum.follower()]
        heir.applier._paused = True  # as while it restores a snapshot
        quorum.world.supports.clear()
        quorum.services[leader.id]._keeper._start_upkeep()
        await quorum.world.until(lambda: quorum.keyspace(leader.id).version == NEWEST)
        await leader.admin.transfer(heir.id)
        assert quorum.keyspace(heir.id).version == FIRST
        with pytest.raises(OrderFailed, match="ask again"):
            await heir.admin.perform("add", "n4", "h4:1")
        heir.applier._paused = False
        heir.applier._apply_slice()
        await heir.admin.perform("add", "n4", "h4:1")
        assert quorum.keyspace(heir.id).version == NEWEST

    run_virtual(main)


def test_a_leader_elected_again_does_not_raise_the_version_that_it_proposed_before() -> None:
    """A node that does not support it was added meanwhile, by another leader. The command of the
    first was lost; it learns that when it has restored a snapshot, and leads again by then."""
    older = NEWEST - 1

    async def main() -> None:
        quorum = Quorum()
        world = quorum.world = World(
            machine=WithKeyspace, limits=ProposalLimits(snapshot_entries=20)
        )
        world.supports |= dict.fromkeys(world.voters, older)
        world.identified |= {*world.voters}
        await quorum.start(raised=False)
        await world.until(lambda: versions(quorum) == [older] * 3)
        first = await world.leader()
        world.supports.clear()
        quorum.services[first.id]._keeper._start_upkeep()
        world.cut(first.id)
        await world.until(lambda: [each for each in world.leaders() if each is not first])
        second = next(each for each in world.leaders() if each is not first)
        assert first.proposals.raises_version()
        world.supports["n4"] = older
        await world.boot_one("n4", Membership(world.voters, ("n4",)))
        world.cuts |= {(first.id, "n4"), ("n4", first.id)}
        await second.admin.perform("add", "n4", "h4:1")
        client = Client(quorum.services[second.id])
        for number in range(1, 81):
            await client.do(number, Put(f"k{number}", b"", 0))
        await world.until(lambda: second.applier.snapshot > max(first.proposals.appended))
        disk = world.disks[first.id]
        read, restored = disk.read_snapshot, asyncio.Event()

        async def slowly() -> Any:
            await restored.wait()
            return await read()

        disk.read_snapshot = slowly  # type: ignore[method-assign]
        world.heal()
        await world.until(lambda: first.applier._paused)
        await world.until(lambda: first.core.commit == second.core.commit)
        await second.admin.transfer(first.id)
        assert first.role is Role.LEADING
        assert first.proposals.raises_version()
        restored.set()
        await world.until(lambda: not first.applier._paused)
        await client.do(81, Put("k81", b"", 0))
        await asyncio.sleep(5.0)
        assert versions(quorum) == [older] * 4
        assert first.role is Role.LEADING
        assert quorum.keyspace(first.id).era > 1

    run_virtual(main)


async def update_in_a_cluster_of(version: int) -> object:
    """The answer to an update while a follower supports no later version than this."""
    quorum = Quorum()
    quorum.world.supports |= {"n1": version, "n2": version}
    await quorum.start(raised=False)
    await quorum.world.until(lambda: versions(quorum) == [version] * 3)
    client = Client(quorum.services["n3"])
    lease = (await client.do(1, Grant(60.0))).lease
    created = await client.do(2, Create("k", b"old", lease))
    answer = await client.do(3, Update("k", b"new", created.version))
    if version < UPDATES:
        quorum.world.supports.clear()
        await quorum.world.until(lambda: versions(quorum) == [NEWEST] * 3)
        assert await client.do(4, Update("k", b"new", created.version)) == Written(
            created.revision, created.version + 1
        )
    return answer


@pytest.mark.parametrize("version", range(FIRST, UPDATES))
def test_no_update_enters_the_log_before_all_members_know_it(version: int) -> None:
    async def main() -> None:
        answer = await update_in_a_cluster_of(version)
        assert isinstance(answer, Failed)
        assert answer.code is ErrorCode.UNAVAILABLE
        assert f"version {version} of its state" in answer.text

    run_virtual(main)


def test_an_update_that_enters_the_log_too_early_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(roles, "is_early", lambda body, version: False)

    async def main() -> None:
        answer = await update_in_a_cluster_of(UPDATES - 1)
        assert isinstance(answer, MalformedCommand)

    run_virtual(main)


def test_an_unknown_command_stops_the_node_that_does_not_know_it() -> None:
    async def test(quorum: Quorum) -> None:
        leader = await quorum.world.leader()
        leader.submit(KEYSPACE, encode([99, "of a later release"]), lambda *_: None)
        # Two of them commit it; a third that is left alone does not get so far.
        await quorum.world.until(lambda: len(quorum.world.aborted) >= 2)
        for _, error in quorum.world.aborted:
            assert "install the release" in str(error)

    on_quorum(test)
