"""Findings of `doyen doctor` about a local store: SQLite's version, the disk, the sessions.

`LocalStoreState` is gathered from the system; `findings` judges it and is pure. Imports the model
and the store's location.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

from doyen.model import Finding
from doyen.stores.sqlite.location import Folder, kind_of

__all__ = ["LocalStoreState", "findings"]

_VOLATILE = {"tmpfs", "ramfs"}
_LITTLE_BYTES = 16 << 20

_MENDED = ((3, 51, 3), (3, 50, 7), (3, 44, 6))
"""The first versions, of each branch, without SQLite's "WAL-reset" defect: two connections that
checkpoint and write at the same instant could damage a database (sqlite.org/wal.html)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalStoreState:
    """The state of a local store."""

    path: str
    sqlite: tuple[int, ...]
    journal: str
    file_system: str | None
    free_bytes: int
    live_leases: int

    @classmethod
    def of(cls, path: str, *, journal: str, live_leases: int) -> LocalStoreState:
        """Gather the state."""
        disk = os.statvfs(os.path.dirname(path))
        return cls(
            path=path,
            sqlite=sqlite3.sqlite_version_info,
            journal=journal,
            file_system=kind_of(path),
            free_bytes=disk.f_bavail * disk.f_frsize,
            live_leases=live_leases,
        )


def findings(state: LocalStoreState) -> list[Finding]:
    """Judge the state of a store."""
    return [_version(state), _place(state), *_space(state), _sessions(state)]


def _version(state: LocalStoreState) -> Finding:
    version = ".".join(map(str, state.sqlite))
    text = f"SQLite {version}, journal mode {state.journal.upper()}"
    if _is_mended(state.sqlite):
        return Finding(level="ok", subject="sqlite", text=text)
    return Finding(
        level="warning",
        subject="sqlite",
        text=f"{text}: until 3.51.3 a checkpoint and a write at the same instant could, very"
        " rarely, damage a database in WAL mode",
        remedy="use a Python that comes with SQLite 3.51.3 or later, 3.50.7 or 3.44.6",
    )


def _is_mended(version: tuple[int, ...]) -> bool:
    return version >= _MENDED[0] or any(
        version[:2] == since[:2] and version >= since for since in _MENDED
    )


def _place(state: LocalStoreState) -> Finding:
    where = f"{state.path} is on {state.file_system or 'a file system of unknown kind'}"
    if state.file_system is None:
        return Finding(
            level="warning",
            subject="disk",
            text=f"{where}: if several machines share it, candidates may not see all locks",
            remedy="make sure that it is a local disk",
        )
    if state.file_system in _VOLATILE:
        return Finding(
            level="warning",
            subject="disk",
            text=f"{where}, which is empty after a reboot: tokens start again at 1, and fenced"
            " resources refuse them",
            remedy="put the store on a disk, or open it with token_floor after a reboot",
        )
    if state.file_system == "overlay":
        return Finding(
            level="note",
            subject="disk",
            text=f"{where}, which belongs to one container: candidates in other containers do not"
            " see it, and it is deleted with the container",
            remedy="mount a volume of the host into all containers and put the store there",
        )
    return Finding(level="ok", subject="disk", text=where)


def _space(state: LocalStoreState) -> Iterator[Finding]:
    if state.free_bytes < _LITTLE_BYTES:
        yield Finding(
            level="warning",
            subject="disk",
            text=f"only {state.free_bytes / 2**20:.0f} MiB are free on it: without space no leader"
            " can be elected; current leaders continue",
            remedy="free some space",
        )


def _sessions(state: LocalStoreState) -> Finding:
    count = "1 live lease" if state.live_leases == 1 else f"{state.live_leases} live leases"
    return Finding(
        level="ok",
        subject="sessions",
        text=f"{count} in {Folder(state.path).path}, including this session's",
    )
