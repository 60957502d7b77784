"""Findings of `doyen doctor` about a local store: SQLite's version, the disk, sessions. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from doyen.model import Finding

__all__ = ["findings"]

_VOLATILE = {"tmpfs", "ramfs"}
_LITTLE_BYTES = 16 << 20

_MENDED = ((3, 51, 3), (3, 50, 7), (3, 44, 6))
"""The first versions, of each branch, without SQLite's "WAL-reset" defect: two connections that
checkpoint and write at the same instant could damage a database (sqlite.org/wal.html)."""


def findings(
    path: str,
    *,
    sqlite: tuple[int, ...],
    journal: str,
    file_system: str | None,
    free_bytes: int,
    live_leases: int,
) -> Iterator[Finding]:
    """Judge the state of a store."""
    text = f"SQLite {'.'.join(map(str, sqlite))}, journal mode {journal.upper()}"
    if sqlite >= _MENDED[0] or any(sqlite[:2] == m[:2] and sqlite >= m for m in _MENDED):
        yield Finding.ok("sqlite", text)
    else:
        yield Finding.warning(
            "sqlite",
            f"{text}: until 3.51.3 a checkpoint and a write at the same instant could, very"
            " rarely, damage a database in WAL mode",
            "use a Python that comes with SQLite 3.51.3 or later, 3.50.7 or 3.44.6",
        )
    yield _place(f"{path} is on {file_system or 'a file system of unknown kind'}", file_system)
    if free_bytes < _LITTLE_BYTES:
        yield Finding.warning(
            "disk",
            f"only {free_bytes / 2**20:.0f} MiB are free on it: without space no leader"
            " can be elected; current leaders continue",
            "free some space",
        )
    count = "1 live lease" if live_leases == 1 else f"{live_leases} live leases"
    text = f"{count} in {path}.sessions, including this session's"
    yield Finding.ok("sessions", text)


def _place(where: str, file_system: str | None) -> Finding:
    if file_system is None:
        return Finding.warning(
            "disk",
            f"{where}: if several machines share it, candidates may not see all locks",
            "make sure that it is a local disk",
        )
    if file_system in _VOLATILE:
        return Finding.warning(
            "disk",
            f"{where}, which is empty after a reboot: tokens start again at 1, and fenced"
            " resources refuse them",
            "put the store on a disk, or open it with token_floor after a reboot",
        )
    if file_system == "overlay":
        return Finding.note(
            "disk",
            f"{where}, which belongs to one container: candidates in other containers do not"
            " see it, and it is deleted with the container",
            "mount a volume of the host into all containers and put the store there",
        )
    return Finding.ok("disk", where)
