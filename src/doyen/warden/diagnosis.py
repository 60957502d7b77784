"""Whether a warden can help the processes here, for `doyen doctor`.

`look` collects the facts about this process, `findings` judges them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from doyen.model import Finding
from doyen.warden.client import connected
from doyen.warden.location import socket_path
from doyen.warden.wire import Refused, own_pidfd

__all__ = ["Surroundings", "findings", "look"]

_INITIAL_PID_NAMESPACE = 0xEFFFFFFC


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What decides whether a warden can help."""

    has_pidfd: bool = True
    host: str = ""
    """The socket of the host's warden; empty if none listens."""
    refused: str = ""
    """Why the host's warden cannot be used."""
    in_container: bool = False
    oom_group: str = ""
    """The control group that the kernel kills as a whole when memory runs out."""
    mixed_unit: str = ""
    """The service whose other processes are killed as soon as its main process has ended."""


def findings(here: Surroundings) -> Iterator[Finding]:
    """What a warden can do for a process in these surroundings."""
    if not here.has_pidfd:
        yield Finding.note(
            "warden",
            "the kernel does not report deaths here (no pidfd), so a warden cannot help: leases of"
            " processes that die expire",
        )
        return
    if here.refused:
        yield Finding.warning(
            "warden",
            f"the warden of this host cannot be used: {here.refused}",
            "correct this, or use warden='process'",
        )
    if here.host:
        text = "a crashed leader of this user is replaced at once"
        yield Finding.ok("warden", f"{here.host} serves this user: {text}")
        return
    reasons = []
    if here.in_container:
        reasons.append("if the leader is process 1 of this container, its children die with it")
    if here.oom_group:
        reasons.append(f"the kernel kills all of {here.oom_group} together (memory.oom.group)")
    if here.mixed_unit:
        reasons.append(
            f"{here.mixed_unit} has KillMode=mixed: its other processes are killed as soon as the"
            " main process has ended"
        )
    if reasons:
        yield Finding.warning(
            "warden",
            f"warden='process' may not help here: {'; '.join(reasons)}",
            "run the warden of the host, outside of it: doyen warden",
        )
    else:
        yield Finding.note(
            "warden",
            "no warden serves this user on this host. With warden='process', or `doyen warden`,"
            " a crashed leader is replaced at once instead of when its lease has expired",
        )


def look() -> Surroundings:
    """The surroundings of this process."""
    try:
        os.close(own_pidfd())
    except Refused:
        return Surroundings(has_pidfd=False)
    host = refused = ""
    path = socket_path()
    if path is not None:
        try:
            connected(path).close()
            host = str(path)
        except Refused as error:
            refused = str(error)
    group = _control_group()
    return Surroundings(
        host=host,
        refused=refused,
        in_container=_in_container(),
        oom_group=_oom_group(group),
        mixed_unit=_mixed_unit(group),
    )


def _in_container() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino != _INITIAL_PID_NAMESPACE
    except OSError:
        return False


def _control_group() -> str:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    return next((line[3:] for line in lines if line.startswith("0::")), "")


def _oom_group(group: str, root: str = "/sys/fs/cgroup") -> str:
    """The control group of this process, or one above it, that is killed as a whole."""
    while group.strip("/"):
        try:
            if Path(f"{root}{group}/memory.oom.group").read_text().strip() == "1":
                return group
        except OSError:
            pass
        group = group.rpartition("/")[0]
    return ""


def _mixed_unit(group: str) -> str:
    """The service of this process, if it has KillMode=mixed."""
    import subprocess

    units = re.findall(r"[^/]+\.service", group)
    if not units:
        return ""
    scope = ["--user"] if len(units) > 1 else []
    try:
        shown = subprocess.run(
            ["systemctl", *scope, "show", "--property=KillMode", units[-1]],
            capture_output=True,
            text=True,
            timeout=2.0,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return units[-1] if shown.stdout.strip() == "KillMode=mixed" else ""
