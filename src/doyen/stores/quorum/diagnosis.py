"""The findings of `doyen doctor` about a quorum, from the statuses of its nodes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from doyen.model import Finding
from doyen.quorum.keyspace.versions import NEWEST
from doyen.quorum.protocol.requests import NodeStatus

__all__ = [
    "NodeAnswer",
    "all_well",
    "findings",
    "leading",
    "outsiders",
    "remarks",
    "risks_of_removal",
]

MAKE_ROOM = "free space in the file system of its data directory"
FOUND = "start every node of its --peers with --found and an empty data directory"
BEHIND = 1000
"""Entries that a node may be behind and still count as up to date."""


class NodeAnswer(NamedTuple):
    """The status of one node, or why it could not be fetched."""

    address: str
    condition: NodeStatus | None
    silent_because: str = ""
    node: str = ""
    """The name of the node at this address, if other nodes have named it."""


def leading(states: Sequence[NodeAnswer]) -> NodeStatus | None:
    """The node that leads, if it answers. An earlier leader may not know yet that it does not."""
    up = (state.condition for state in states if state.condition is not None)
    leaders = [each for each in up if each.role == "leading"]
    return max(leaders, key=lambda each: each.generation, default=None)


def outsiders(states: Sequence[NodeAnswer]) -> set[str]:
    """The nodes that run and are not members, according to the leader: a removed node may not
    know that it was removed."""
    leads = leading(states)
    if leads is None:
        return set()
    up = {state.condition.node for state in states if state.condition is not None}
    return up.difference(leads.voters, leads.learners)


def all_well(states: Sequence[NodeAnswer]) -> bool:
    """Whether every node answers, every member knows the leader and is refused by none, and nothing
    is full. A node of another cluster at the address of a member has a leader of its own."""
    outside = outsiders(states)  # empty while there is no leader
    up = [state.condition for state in states if state.condition is not None]
    known = all(each.leader is not None or each.node in outside for each in up)
    full = any(each.full or each.alarm for each in up)
    return len(up) == len(states) and known and not full and not _refusals(up)


def remarks(states: Sequence[NodeAnswer]) -> list[str]:
    """What keeps nodes that run from taking part, and the remedy, one line each."""
    up = [state.condition for state in states if state.condition is not None]
    waiting = [f"{_waits(each)}: {FOUND}" for each in up if each.missing]
    return (
        waiting
        + _no_majority(up)
        + [f"the disk of {each.node} is full: {MAKE_ROOM}" for each in up if each.full]
        + [
            f"{node} is not connected to {', '.join(others)}: {reason}"
            for (node, reason), others in _refusals(up).items()
        ]
    )


def _no_majority(up: Sequence[NodeStatus]) -> list[str]:
    """That there is no leader because too few of the voters answer."""
    if _led(up) or not up or any(each.missing for each in up):
        return []
    latest = _latest(up)
    here = [voter for voter in latest.voters if voter in {each.node for each in up}]
    needed = len(latest.voters) // 2 + 1
    if len(here) >= needed:
        return []
    return [
        f"there is no leader, and nothing can be read or written: {len(here)} of"
        f" {len(latest.voters)} voters answer, and {needed} are needed"
    ]


def _latest(up: Sequence[NodeStatus]) -> NodeStatus:
    """The status that tells most about the cluster. A node with an empty data directory takes the
    peers that it was started with for the members, and itself, if it joins, for none of them."""
    return max(up, key=lambda each: (each.commit, each.node in each.voters))


def _refusals(up: Sequence[NodeStatus]) -> dict[tuple[str, str], list[str]]:
    """Refused nodes with the reason, and the nodes that report it. Those that know a leader are
    believed first, because a refused node has reasons of its own."""
    refused: dict[tuple[str, str], list[str]] = {}
    for each in _led(up) or up:
        for node, reason in each.refused.items():
            refused.setdefault((node, reason), []).append(each.node)
    return refused


def _waits(status: NodeStatus) -> str:
    return f"{status.node} waits for {', '.join(status.missing)}"


def risks_of_removal(states: Sequence[NodeAnswer], node: str) -> list[str]:
    """The risks of removing this node now. The leader decides whether the change can be committed
    at all."""
    up = {state.condition.node: state.condition for state in states if state.condition}
    leads = leading(states)
    if leads is None or node not in leads.voters or len(leads.voters) == 1:
        return []
    answer = [voter for voter in leads.voters if voter in up and up[voter].leader == leads.node]
    stay = [voter for voter in leads.voters if voter != node]
    left = [voter for voter in answer if voter != node]
    spare_before = len(answer) - (len(leads.voters) // 2 + 1)
    spare_after = len(left) - (len(stay) // 2 + 1)
    risks = []
    if len(stay) == 1:
        risks.append(f"{stay[0]} would be the only voter, with the only copy of the data")
    elif spare_after == 0 and spare_before > 0:
        risks.append(
            f"{len(stay)} voters would be left, {', '.join(stay)}: if one of them fails, nothing"
            " can be written"
        )
    if not any(up[voter].applied + BEHIND >= leads.commit for voter in left):
        risks.append(f"{node} may have the only up-to-date copy of the data")
    return risks


def findings(states: Sequence[NodeAnswer]) -> list[Finding]:
    """All findings about a quorum."""
    up = [state.condition for state in states if state.condition is not None]
    return [*_nodes(states), *_leadership(up), *_members(up), *_versions(up), *_disks(up)]


def _nodes(states: Sequence[NodeAnswer]) -> Iterator[Finding]:
    for state in states:
        if state.condition is None:
            yield Finding.warning(
                state.address,
                f"this node does not serve: {state.silent_because}",
                "start it, or correct the URL",
            )
    outside = outsiders(states)
    up = [state.condition for state in states if state.condition is not None]
    for each in up if _led(up) else ():
        if each.leader is None and each.node not in outside:
            reasons = [reason for node, reason in _refusals(up) if node == each.node]
            yield Finding.warning(
                each.node,
                ": ".join(
                    ["this node runs, but knows no leader although there is one", *reasons[:1]]
                ),
                "" if reasons else "see its log: it cannot reach the others",
            )
    for node in sorted(outside):
        yield Finding.note(
            node,
            "this node runs, but is not a member of the quorum",
            "stop it and remove it from the URL, or add it to the quorum",
        )


def _led(up: Sequence[NodeStatus]) -> list[NodeStatus]:
    """The nodes that know a leader. The others run without taking part."""
    return [each for each in up if each.leader is not None]


def _leadership(up: Sequence[NodeStatus]) -> Iterator[Finding]:
    latest = max(_led(up) or up, key=lambda each: each.generation, default=None)
    if latest is None:
        return
    if waiting := [_waits(each) for each in up if each.missing and latest.leader is None]:
        yield Finding.problem(
            "quorum", f"the cluster has not been founded: {'; '.join(waiting)}", FOUND
        )
    elif latest.leader is None:
        yield Finding.problem(
            "quorum",
            "no leader is known: nothing can be written",
            "start nodes until a majority runs",
        )
    else:
        yield Finding.ok(
            "quorum",
            f"{latest.leader} leads generation {latest.generation};"
            f" {latest.keys} keys, {latest.leases} leases",
        )


def _members(up: Sequence[NodeStatus]) -> Iterator[Finding]:
    if not up:
        return
    latest = _latest(up)
    voters = set(latest.voters)
    majority = len(voters) // 2 + 1
    running = voters & {each.node for each in _led(up) or up}
    missing = voters - running
    known = len({*latest.voters, *latest.learners})
    if missing and len(running) == majority and len(voters) > 1:
        names = ", ".join(sorted(missing))
        yield Finding.warning(
            "quorum",
            f"at risk: of {len(voters)} voters, {names} cannot be reached from here, or"
            " has no leader; if one more fails, nothing can be written",
            "start the missing nodes, and name every node in the URL",
        )
    if len(voters) == 1:
        yield Finding.note(
            "quorum",
            "there is only one voter: if it fails, the quorum is unavailable",
            "add nodes: three tolerate the failure of one",
        )
    elif len(voters) % 2 == 0:
        yield Finding.warning(
            "quorum",
            f"an even number of voters ({len(voters)}): it tolerates no more failures than"
            f" {len(voters) - 1} would",
            "add a node, or remove one",
        )
    if latest.learners:
        yield Finding.note(
            "quorum",
            f"of {known} nodes, {', '.join(sorted(latest.learners))} do not vote (learners)",
            "promote them when they have caught up",
        )


def _versions(up: Sequence[NodeStatus]) -> Iterator[Finding]:
    versions = sorted({each.version for each in up})
    if len(versions) > 1:
        yield Finding.note(
            "versions",
            f"nodes run different versions of doyen: {', '.join(versions)}",
            "finish the upgrade, one node after the other",
        )
    elif (state := min((each.state for each in up), default=NEWEST)) < NEWEST:
        yield Finding.note(
            "versions",
            f"the cluster is at version {state} of its state, and this release has {NEWEST}: what"
            " needs a later version waits",
            "the version rises when all members run this release and are connected",
        )
    elif versions:
        yield Finding.ok("versions", f"doyen {versions[0]} on all nodes")


def _disks(up: Sequence[NodeStatus]) -> Iterator[Finding]:
    for each in up:
        if each.full:
            yield Finding.problem(
                each.node,
                "its disk is full: while it leads, nothing can be written",
                MAKE_ROOM,
            )
    latest = _latest(up) if up else None
    if latest is not None and latest.alarm:
        yield Finding.problem(
            "quota",
            f"the keyspace is full, and writes were refused: {latest.bytes} of"
            f" {latest.quota} bytes are in use",
            "delete entries or end leases, or restart every node with a larger --quota-bytes",
        )
