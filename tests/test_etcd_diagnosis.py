"""Diagnosis of etcd: versions with known defects, members, alarms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from doyen.model import Finding
from doyen.stores.etcd.diagnosis import EtcdMemberState, findings
from servers import Etcd, free_port
from test_etcd import opened

GOOD = EtcdMemberState(member="h:2379")
THREE = [replace(GOOD, member=f"h{number}:2379") for number in range(3)]


def problems(*states: EtcdMemberState) -> list[Finding]:
    return [finding for finding in findings(states) if finding.level != "ok"]


def test_a_sound_cluster_has_no_findings() -> None:
    assert problems(*THREE) == []


def test_the_newest_release_is_not_told_to_update() -> None:
    (finding,) = problems(*(replace(each, version="3.6.12") for each in THREE))
    assert finding.level == "note"
    assert "move-leader" in finding.remedy
    assert "update" not in finding.remedy


@pytest.mark.parametrize(
    ("version", "issues"),
    [
        ("3.4.30", ["etcd#14370", "etcd#15247", "etcd#20418"]),
        ("3.5.1", ["etcd#13766", "etcd#14370", "etcd#15247", "etcd#20418"]),
        ("3.5.12", ["etcd#15247", "etcd#20418"]),
        ("3.5.13", ["etcd#20418"]),
        ("3.5.16", ["etcd#18428", "etcd#20418"]),
        ("3.5.28", ["etcd#18428"]),
        ("3.6.8", ["etcd#18428", "etcd#20418"]),
        ("3.6.9", ["etcd#18428"]),
        ("3.7.0-rc.0", ["etcd#18428"]),
    ],
)
def test_known_defects_are_reported_by_version(version: str, issues: list[str]) -> None:
    found = problems(*THREE[:2], replace(THREE[2], version=version))
    assert [issue for finding in found for issue in issues if issue in finding.text] == issues
    assert len(found) == len(issues)
    assert all("h2:2379" in finding.text and finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"error": "etcd at h2:2379: refused", "version": ""}, "warning", "refused"),
        ({"learner": True}, "warning", "is a learner"),
        ({"has_leader": False}, "problem", "knows no leader"),
        ({"alarms": ("NOSPACE",)}, "problem", "NOSPACE"),
    ],
)
def test_members_with_problems_are_named(change: dict[str, object], level: str, words: str) -> None:
    (finding,) = problems(*THREE[:2], replace(THREE[2], **change))  # type: ignore[arg-type]
    assert finding.level == level
    assert words in finding.text
    assert "h2:2379" in finding.text
    assert finding.remedy


def test_a_single_member_is_noted() -> None:
    (finding,) = problems(GOOD)
    assert finding.level == "note"


async def test_every_member_of_a_real_cluster_is_inspected(etcd: Etcd) -> None:
    absent = f"127.0.0.1:{free_port()}"
    async with opened(f"{etcd.url},{absent}") as store:
        found = await store.diagnose()
        assert any(
            etcd.address in finding.text for finding in found if finding.subject == "version"
        )
        (missing,) = [finding for finding in found if finding.subject == "members"]
        assert absent in missing.text
