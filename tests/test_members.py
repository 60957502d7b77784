"""Who is heard as a peer: ids of folders and clusters, founding, positions."""

from __future__ import annotations

import asyncio
from itertools import permutations
from typing import Any

import pytest

from doyen.errors import OrderFailed, StoreUnusable
from doyen.quorum.consensus.core import Membership, Position
from doyen.quorum.node.admin import MAX_MEMBERS, AdminRequest, changed
from doyen.quorum.node.membership import FOUNDING, JOINING, Members, NodeMember, initial_member
from doyen.quorum.protocol.frames import ConnectionRefused
from doyen.quorum.protocol.handshake import ConnectionIdentity, MemberInfo
from drivers import VOTERS, World, with_world

PEERS = {"n1": "h1:1", "n2": "h2:1", "n3": "h3:1"}
IDS = {"n1": "m1", "n2": "m2", "n3": "m3"}
HERE = Position(4, 3, 100)


class Core:
    """As much of a core as is needed."""

    def __init__(self, membership: Membership, position: Position = HERE) -> None:
        self.membership = membership
        self.position = position
        self.generation = position.generation
        self.commit = position.last_index
        self.witnessed: dict[str, Position] = {}


class Node(Members):
    """One with a disk in memory."""

    core: Any

    def __init__(self, name: str = "n1", own: NodeMember | None = None) -> None:
        self.disk = own or NodeMember(f"m{name[1:]}", "c", IDS)
        super().__init__(name, PEERS, self.disk, self._write)

    async def _write(self, member: NodeMember) -> None:
        await asyncio.sleep(0)
        self.disk = member


def founded(name: str = "n1", **changes: object) -> Node:
    node = Node(name)
    node.core = Core(Membership(tuple(PEERS), (), PEERS, IDS, "c"))
    return node


def judge(node: Members, name: str, info: MemberInfo) -> None:
    node.admit(ConnectionIdentity("doyen", name, 7), info, None)


def member_info(member: str = "m2", position: Position = HERE, cluster_id: str = "c") -> MemberInfo:
    return MemberInfo(cluster_id, member, position)


def start(found: NodeMember | None, *, blank: bool, **how: bool) -> NodeMember:
    given = {"founding": False, "joining": False} | how
    return initial_member(found, blank=blank, node="n1", peers=PEERS, folder="data", **given)


def test_an_empty_data_directory_needs_found_or_join() -> None:
    with pytest.raises(StoreUnusable, match=r"--found.*--join.*doyen cluster remove n1"):
        start(None, blank=True)
    assert start(None, blank=True, founding=True).pending == FOUNDING
    assert start(None, blank=True, joining=True).pending == JOINING
    first, second = (start(None, blank=True, joining=True) for _ in range(2))
    assert first.member != second.member


def test_a_folder_with_data_takes_no_notice_of_flags() -> None:
    known = NodeMember("m1", "c", IDS)
    for how in ({}, {"founding": True}, {"joining": True}):
        assert start(known, blank=False, **how) == known
        assert start(known, blank=True, **how) == known
        old = start(None, blank=False, **how)  # of a release that had no ids
        assert (len(old.member), old.pending, old.cluster_id) == (16, "", "")
    assert start(NodeMember("m1", pending=JOINING), blank=False) == NodeMember("m1")


def test_a_folder_that_waits_keeps_its_id() -> None:
    waits = NodeMember("m1", pending=FOUNDING)
    assert start(waits, blank=True, founding=True) == waits
    assert start(waits, blank=True, joining=True) == NodeMember("m1", pending=JOINING)
    with pytest.raises(StoreUnusable, match="--found"):
        start(waits, blank=True)


def test_a_cluster_of_one_is_founded_at_once() -> None:
    own = initial_member(
        None,
        blank=True,
        node="n1",
        peers={"n1": "h:1"},
        founding=True,
        joining=False,
        folder="data",
    )
    assert own.cluster_id
    assert own.founders == {"n1": own.member}


@pytest.mark.parametrize(
    ("name", "info", "complaint"),
    [
        ("n2", member_info(), None),
        ("n2", member_info(position=Position(9, 9, 900)), None),
        ("n2", member_info("m9"), "has id m9, not m2.*doyen cluster remove n2.*add n2 h2:1"),
        ("n2", member_info("m9", Position()), "has lost data that it has acknowledged"),
        ("n2", MemberInfo(), "runs an earlier release"),
        ("n2", MemberInfo("", "m9", founding="x"), "its data directory is empty"),
        ("n2", MemberInfo("", "m2", founding="x"), None),
        ("n4", member_info("m4"), "not a member of this cluster: add it"),
        ("n4", member_info("m4", Position(4, 3, 101)), None),
        ("n4", member_info("m4", Position(4, 3, 101), ""), "not a member"),
        ("n4", MemberInfo("", "", Position(9, 9, 900)), "not a member"),
        # Added anew by entries that are not here yet; never a folder that has less than this one.
        ("n2", member_info("m9", Position(5, 5, 500)), None),
        ("n2", member_info("m9", Position(5, 5, 500), ""), "has id m9"),
    ],
)
def test_which_members_are_accepted(name: str, info: MemberInfo, complaint: str | None) -> None:
    node = founded()
    if complaint is None:
        judge(node, name, info)
        return
    with pytest.raises(ConnectionRefused, match=complaint) as caught:
        judge(node, name, info)
    assert caught.value.reason == "member"


@pytest.mark.parametrize(
    ("position", "heard"),
    [
        (Position(4, 3, 90), True),
        (Position(4, 4, 10), True),  # what it had of generation 3 was replaced
        (Position(5, 3, 91), True),
        (Position(4, 3, 89), False),
        (Position(4, 2, 200), False),
        (Position(3, 3, 90), False),  # it has voted in generation 4
        (Position(), False),
    ],
)
def test_a_member_with_less_than_it_acknowledged_is_refused(
    position: Position, heard: bool
) -> None:
    node = founded()
    assert isinstance(node.core, Core)
    node.core.witnessed["n2"] = Position(4, 3, 90)
    judging = node.checker("n2")
    # What is acknowledged while the node is being dialled is not held against it.
    node.core.witnessed["n2"] = Position(4, 3, 95)
    if heard:
        judging(ConnectionIdentity("doyen", "n2", 7), member_info(position=position))
        return
    with pytest.raises(ConnectionRefused, match=r"older copy\. Stop it, remove it from"):
        judging(ConnectionIdentity("doyen", "n2", 7), member_info(position=position))


def test_reports_about_one_data_directory_do_not_apply_to_the_next() -> None:
    node = founded()
    core = node.core
    assert isinstance(core, Core)
    node.membership_changed()
    core.witnessed["n2"] = Position(4, 3, 90)
    core.witnessed["n3"] = Position(4, 3, 80)
    core.membership = Membership(("n1", "n3"), (), PEERS, {"n1": "m1", "n3": "m3"}, "c")
    node.membership_changed()
    core.membership = Membership(("n1", "n3"), ("n2",), PEERS, {"n1": "m1", "n3": "m3"}, "c")
    node.membership_changed()
    judge(node, "n2", member_info("m22", Position()))
    node.lost = "it was reported lost"
    with pytest.raises(ConnectionRefused, match="it was reported lost"):
        judge(node, "n2", member_info("m22", Position()))
    assert core.witnessed == {"n3": Position(4, 3, 80)}


def test_a_certificate_lets_in_the_node_that_it_names() -> None:
    node = founded()

    def shows(*names: str) -> None:
        subject = ((("commonName", names[0]),),)
        hosts = tuple(("DNS", name) for name in names[1:])
        certificate = {"subject": subject, "subjectAltName": hosts}
        node.admit(ConnectionIdentity("doyen", "n2", 7), member_info(), certificate)

    shows("n2")
    shows("somebody", "h2")
    with pytest.raises(
        ConnectionRefused, match="is for h3, n3, not for node 'n2' or its host 'h2'"
    ):
        shows("n3", "h3")


# Founding.


def waiting() -> dict[str, Node]:
    nodes = {name: Node(name, NodeMember(IDS[name], pending=FOUNDING)) for name in PEERS}
    for node in nodes.values():
        node.core = Core(Membership(tuple(PEERS), (), PEERS), Position())
    return nodes


def dial(node: Node, other: Node) -> bool:
    """A handshake, and what follows it. Whether the other one has been founded by it."""
    try:
        node.checker(other.node)(ConnectionIdentity("doyen", other.node, 7), other.info())
        other.admit(ConnectionIdentity("doyen", node.node, 7), node.info(), None)
    except ConnectionRefused:
        node.founder_disconnected(other.node)
        return False
    if node.waiting or other.waiting:
        node.founder_connected(other.node, other.info())
    if other.waiting and (record := node.record()):
        return asyncio.run(other.take_record(record))
    return False


@pytest.mark.parametrize("order", list(permutations(permutations(PEERS, 2), 3)))
def test_no_node_founds_alone_and_all_found_the_same(
    order: tuple[tuple[str, str], ...],
) -> None:
    nodes = waiting()
    for one, other in order:
        dial(nodes[one], nodes[other])
        for node in nodes.values():
            asyncio.run(node.found())
        if not nodes["n1"].waiting:
            assert {("n1", "n2"), ("n1", "n3")} <= {*order}
    for _ in range(2):
        for one, other in permutations(PEERS, 2):
            dial(nodes[one], nodes[other])
            asyncio.run(nodes[one].found())
    assert {node.disk.cluster_id for node in nodes.values()} == {nodes["n1"].cluster_id} != {""}
    assert all(node.disk.founders == IDS and not node.waiting for node in nodes.values())


@pytest.mark.parametrize("wiped", [("n1",), ("n2",), ("n1", "n2"), ("n2", "n3"), ("n1", "n3")])
@pytest.mark.parametrize("known", ["all", "first", "two"])
def test_wiped_nodes_found_nothing_while_one_has_data(wiped: tuple[str, ...], known: str) -> None:
    """Whether or not all had heard of the founding when the folders were lost."""
    nodes = waiting()
    for other in ("n2", "n3"):
        dial(nodes["n1"], nodes[other])
    assert asyncio.run(nodes["n1"].found())
    if known != "first":
        dial(nodes["n1"], nodes["n2"])
    if known == "all":
        dial(nodes["n1"], nodes["n3"])
    cluster_id = nodes["n1"].cluster_id
    holders = {name for name, node in nodes.items() if not node.waiting} - {*wiped}
    for name in wiped:
        nodes[name] = Node(name, NodeMember(f"{IDS[name]} anew", pending=FOUNDING))
        nodes[name].core = Core(Membership(tuple(PEERS), (), PEERS), Position())
    for _ in range(3):
        for one, other in permutations(PEERS, 2):
            dial(nodes[one], nodes[other])
            asyncio.run(nodes[one].found())
    ids = {node.cluster_id for node in nodes.values()} - {""}
    if holders:
        assert ids == {cluster_id}
        assert all(nodes[name].waiting for name in wiped)
    else:  # nobody knows of the first founding, and nobody has promised anything in it
        assert len(ids) == 1


def test_nodes_that_know_of_other_founders_do_not_found() -> None:
    one, other = waiting()["n1"], waiting()["n2"]
    other._peers = {**PEERS, "n3": "elsewhere:1"}
    with pytest.raises(ConnectionRefused, match="have different lists of peers"):
        judge(one, "n2", other.info())
    with pytest.raises(ConnectionRefused, match="not in the list of peers"):
        judge(one, "n4", MemberInfo("", "m4", founding="x"))
    with pytest.raises(ConnectionRefused, match="every node to have an empty data directory"):
        judge(one, "n2", member_info(cluster_id=""))
    assert not asyncio.run(one.found())


@pytest.mark.parametrize(
    "founders", [{**IDS, "n2": "m9"}, {"n2": "m2"}, {**IDS, "n4": "m4"}, {"n1": "m1"}]
)
def test_a_record_of_another_founding_is_refused(founders: dict[str, str]) -> None:
    teller, node = Node("n1", NodeMember("m1", "c", founders)), waiting()["n2"]
    with pytest.raises(ConnectionRefused, match="founded with another data directory"):
        asyncio.run(node.take_record(teller.record()))
    assert node.waiting
    assert node.disk.cluster_id == ""


def test_a_founding_under_way_is_not_begun_again() -> None:
    node = waiting()["n1"]
    for other in ("n2", "n3"):
        node.founder_connected(other, MemberInfo("", IDS[other], founding="x"))

    async def twice() -> list[bool]:
        return [*await asyncio.gather(node.found(), node.found())]

    assert asyncio.run(twice()) == [True, False]
    assert node.own == node.disk


# What the leader records.


def test_the_leader_records_what_was_founded_and_who_joins() -> None:
    node = Node()
    node.core = Core(Membership(tuple(PEERS), (), PEERS))
    recorded = node.to_record()
    assert recorded is not None
    assert (recorded.members, recorded.cluster) == (IDS, "c")
    node.core.membership = recorded
    assert node.to_record() is None
    node.core.membership = Membership(tuple(PEERS), ("n4",), PEERS, IDS, "c")
    assert node.to_record() is None
    node.connected("n4", member_info("m4", Position(), ""))
    recorded = node.to_record()
    assert recorded is not None
    assert recorded.members == {**IDS, "n4": "m4"}


def test_a_cluster_of_an_earlier_release_is_recorded_when_everybody_is_there() -> None:
    node = Node(own=NodeMember("m1"))
    node.core = Core(Membership(tuple(PEERS), (), PEERS))
    judge(node, "n2", MemberInfo())
    node.connected("n2", MemberInfo())
    node.connected("n3", member_info("m3", cluster_id=""))
    assert node.to_record() is None
    with pytest.raises(ConnectionRefused, match="is empty, and it is a voter"):
        judge(node, "n2", member_info("m2", Position(), ""))
    node.connected("n2", member_info("m2", cluster_id=""))
    recorded = node.to_record()
    assert recorded is not None
    assert recorded.members == IDS
    again = node.to_record()
    assert again is not None
    assert again.cluster == recorded.cluster != ""
    node.core.membership = recorded
    with pytest.raises(ConnectionRefused, match="runs an earlier release"):
        judge(node, "n2", MemberInfo())


def test_a_cluster_has_a_bounded_number_of_nodes() -> None:
    names = [f"n{number:02}" for number in range(1, MAX_MEMBERS + 1)]
    full = Membership(("n01",), tuple(names[1:]))
    with pytest.raises(OrderFailed, match=f"at most {MAX_MEMBERS} nodes"):
        changed(full, AdminRequest("add", "one more", "h:1"))
    assert changed(full, AdminRequest("add", names[-1], "h:1")).everyone == full.everyone
    fewer = changed(full, AdminRequest("remove", names[-1]))
    assert len(changed(fewer, AdminRequest("add", "another", "h:1")).everyone) == MAX_MEMBERS


@pytest.mark.parametrize(
    ("node", "address", "reason"),
    [
        ("", "h:1", "1 to 200 characters"),
        ("x" * 201, "h:1", "1 to 200 characters"),
        ("n4", "a..b:1", "cannot be a host name"),
        ("n4", ":1", "name a host too"),
    ],
)
def test_a_node_that_could_never_connect_is_not_added(node: str, address: str, reason: str) -> None:
    with pytest.raises(OrderFailed, match=reason):
        changed(Membership(("n1",)), AdminRequest("add", node, address))


@pytest.mark.parametrize(
    ("node", "address"),
    [("n4", "h2:1"), ("n4", "H2.:1"), ("n1", "h2:1"), ("n4", "localhost:2")],
)
def test_no_two_nodes_have_one_address(node: str, address: str) -> None:
    members = Membership(("n1", "n2"), ("n3",), {"n1": "h1:1", "n2": "h2:1", "n3": "127.0.0.1:2"})
    other = "n3" if "localhost" in address else "n2"
    with pytest.raises(OrderFailed, match=f"is the address of {other}: .*cluster remove {other}"):
        changed(members, AdminRequest("add", node, address))
    assert changed(members, AdminRequest("add", other, address)).addresses[other] == address
    without = changed(members, AdminRequest("remove", other))
    assert changed(without, AdminRequest("add", node, address)).addresses[node] == address
    assert changed(members, AdminRequest("add", node, "h2:2")).addresses[node] == "h2:2"


@with_world
async def test_of_two_nodes_that_are_added_with_one_address_one_is(world: World) -> None:
    """However the requests meet: they are made at the same time, on different nodes, and the first
    is not committed when the second arrives."""
    for disk in world.disks.values():
        disk.sync_s = 0.05
    adding = [
        world.nodes[at].admin.perform("add", name, "somewhere:1")
        for at, name in zip(VOTERS, ("n4", "n5", "n6"), strict=True)
    ]
    outcomes = await asyncio.gather(*adding, return_exceptions=True)
    refused = [str(each) for each in outcomes if isinstance(each, OrderFailed)]
    (leader,) = world.leaders()
    (added,) = {*leader.membership.everyone} - {*VOTERS}
    assert len(refused) == 2
    assert all(f"somewhere:1 is the address of {added}" in reason for reason in refused)
    await world.nodes["n1"].admin.perform("remove", added)
    other = "n5" if added == "n4" else "n4"
    await world.nodes["n1"].admin.perform("add", other, "somewhere:1")
    assert other in leader.applier.membership.everyone
