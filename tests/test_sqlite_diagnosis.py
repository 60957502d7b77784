"""The diagnosis of the local store: SQLite version, file system, live leases."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from doyen.lease.clock import SystemClock
from doyen.model import Finding
from doyen.stores.port import Context, open_store
from doyen.stores.sqlite.diagnosis import findings

GOOD: dict[str, Any] = {
    "path": "/var/lib/doyen.db",
    "sqlite": (3, 53, 1),
    "journal": "wal",
    "file_system": "ext4",
    "free_bytes": 1 << 40,
    "live_leases": 3,
}


def problems(**changed: Any) -> list[Finding]:
    return [finding for finding in findings(**GOOD | changed) if finding.level != "ok"]


def test_a_healthy_store_has_no_warnings() -> None:
    assert [(finding.subject, finding.text) for finding in findings(**GOOD)] == [
        ("sqlite", "SQLite 3.53.1, journal mode WAL"),
        ("disk", "/var/lib/doyen.db is on ext4"),
        ("sessions", "3 live leases in /var/lib/doyen.db.sessions, including this session's"),
    ]
    assert not problems()


@pytest.mark.parametrize(
    ("version", "safe"),
    [
        ((3, 40, 1), False),
        ((3, 44, 5), False),
        ((3, 44, 6), True),
        ((3, 45, 0), False),
        ((3, 50, 6), False),
        ((3, 50, 7), True),
        ((3, 51, 2), False),
        ((3, 51, 3), True),
        ((3, 52, 0), True),
        ((4, 0, 0), True),
    ],
)
def test_versions_that_may_damage_the_database(version: tuple[int, ...], safe: bool) -> None:
    found = problems(sqlite=version)
    assert [finding.level for finding in found] == ([] if safe else ["warning"])
    assert all("3.51.3" in finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("kind", "level", "text"),
    [
        ("tmpfs", "warning", "tokens start again"),
        ("overlay", "note", "container"),
        (None, "warning", "unknown kind"),
    ],
)
def test_unsuitable_file_systems_are_reported(kind: str | None, level: str, text: str) -> None:
    (found,) = problems(file_system=kind)
    assert (found.level, found.subject) == (level, "disk")
    assert text in found.text
    assert found.remedy


def test_a_disk_that_is_nearly_full_is_reported() -> None:
    (found,) = problems(free_bytes=3 << 20)
    assert found.level == "warning"
    assert "3 MiB" in found.text


async def test_diagnosis_of_a_real_store(tmp_path: Path) -> None:
    path = tmp_path / "doyen.db"
    context = Context(SystemClock(), lambda event: None)
    store = await open_store(f"sqlite://{path}", context)
    other = await open_store(f"sqlite://{path}", context)
    try:
        lease = await store.grant(60)
        await other.grant(60)
        found = {finding.subject: finding.text for finding in await store.diagnose()}
        await store.revoke(lease)
        after = {finding.subject: finding.text for finding in await store.diagnose()}
    finally:
        await other.close()
        await store.close()
    assert found["sqlite"].startswith(f"SQLite {sqlite3.sqlite_version}, journal mode WAL")
    assert found["disk"].startswith(f"{path} is on ")
    assert found["sessions"].startswith(f"2 live leases in {path}.sessions")
    assert after["sessions"].startswith("1 live lease in ")
