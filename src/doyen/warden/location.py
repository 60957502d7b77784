"""Where the warden of a host listens, and whether that place can be trusted.

    /run/doyen/<uid>/warden        made by the system's service manager
    /run/user/<uid>/doyen/warden   made by the user's own

The environment variable DOYEN_WARDEN names another place, or is `off`. The directory must belong
to this user or to root, and no other user may write to it: a user who can replace the socket
receives the credentials of the sessions.

Imports the standard library only.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from doyen.warden.wire import Refused

__all__ = ["OFF", "check_directory", "places", "socket_path"]

OFF = "off"
VARIABLE = "DOYEN_WARDEN"


def places() -> list[Path]:
    """Where the socket may be, in order. Empty if wardens are turned off."""
    named = os.environ.get(VARIABLE, "")
    if named == OFF:
        return []
    if named:
        return [Path(named)]
    uid = os.geteuid()
    return [Path(f"/run/doyen/{uid}/warden"), Path(f"/run/user/{uid}/doyen/warden")]


def socket_path() -> Path | None:
    """The socket of the host's warden, if there is one."""
    return next((path for path in places() if path.exists()), None)


def check_directory(path: Path) -> None:
    """Raise `Refused` if others could have put the socket there."""
    try:
        found = os.lstat(path)
    except OSError as error:
        raise Refused(f"{path} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise Refused(f"{path} is not a directory")
    if found.st_uid not in (0, os.geteuid()):
        raise Refused(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise Refused(f"others may write to {path}: make it writable by its owner only")
