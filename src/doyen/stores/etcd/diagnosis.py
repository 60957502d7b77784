"""Diagnosis of an etcd cluster: versions and their defects, members, alarms.

Pure: `findings` is a function of the members' states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from doyen.model import Finding
from doyen.stores.kit.diagnosis import Defect, version_findings


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdMemberState:
    """The status of a member, or the error of the request for it."""

    member: str
    error: str = ""
    version: str = ""
    learner: bool = False
    has_leader: bool = True
    alarms: tuple[str, ...] = ()


_STALE_READS = (
    "after a pause of its process a member may answer a read with old data (etcd#20418): this"
    " cannot elect a second leader, but observers may see a change of leader late"
)

_DEFECTS = (
    Defect(
        (3, 5, 0),
        (3, 5, 3),
        "problem",
        "a member that crashes under load may come back with other data than the rest"
        " (etcd#13766): two candidates can both win an election",
    ),
    Defect(
        (0,),
        (3, 5, 5),
        "warning",
        "a cluster of one member may lose a confirmed write if it crashes (etcd#14370)",
    ),
    Defect(
        (0,),
        (3, 5, 13),
        "warning",
        "after a stall of its own leader it can revoke leases that are alive (etcd#15247): a second"
        " leader may be elected while the first still runs, and only tokens protect",
    ),
    Defect(
        (3, 5, 16),
        None,
        "note",
        "a leader of etcd whose process was suspended for longer than the ttl, as in a paused"
        " virtual machine, can revoke leases that are alive when it resumes, although another"
        " member has replaced it (etcd#18428): a second leader may be elected before the first"
        " learns of it, and only tokens protect",
        "check tokens where the leader writes, and move etcd's leader (etcdctl move-leader) before"
        " its machine is paused",
    ),
    Defect((0,), (3, 5, 28), "note", _STALE_READS),
    Defect((3, 6, 0), (3, 6, 9), "note", _STALE_READS),
)


def findings(states: Sequence[EtcdMemberState]) -> list[Finding]:
    """The findings for the states of a cluster's members."""
    return [*_versions(states), *_members(states), *_alarms(states)]


def _versions(states: Sequence[EtcdMemberState]) -> Iterator[Finding]:
    for version in sorted({state.version for state in states if state.version}):
        members = (state.member for state in states if state.version == version)
        yield from version_findings("etcd", version, members, _DEFECTS)


def _members(states: Sequence[EtcdMemberState]) -> Iterator[Finding]:
    for state in states:
        if state.error:
            yield Finding.warning(
                "members", state.error, "bring the member back, or take it out of the URL"
            )
        elif state.learner:
            yield Finding.warning(
                "members",
                f"{state.member} is a learner, which serves no requests",
                "promote it, or take it out of the URL",
            )
        elif not state.has_leader:
            yield Finding.problem(
                "members",
                f"{state.member} knows no leader of the cluster: no leader can be elected",
                "make sure that a majority of the members is up and connected",
            )
    if len(states) == 1:
        yield Finding.note(
            "members",
            f"the URL names one member, {states[0].member}: if it fails, the store is lost",
            "name all members, separated by commas",
        )


def _alarms(states: Sequence[EtcdMemberState]) -> Iterator[Finding]:
    for state in states:
        for alarm in state.alarms:
            yield Finding.problem(
                "alarms",
                f"{state.member}: {alarm}",
                "see etcd's manual on alarms: with NOSPACE raised it accepts no writes",
            )
