"""The warden of a host: one process for all sessions of one user, found by its socket."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

from doyen.errors import ConfigError
from doyen.events.log_lines import log_line
from doyen.events.service import ServiceManager
from doyen.warden.child import name_this_process
from doyen.warden.location import check_directory, places
from doyen.warden.server import FINISH_S, Warden
from doyen.warden.wire import Refused

__all__ = ["serve", "unit"]

log = logging.getLogger("doyen.warden")


async def serve() -> None:
    """Serve the sessions of this user until SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stopped = asyncio.Event()
    manager = ServiceManager.of_environment()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stopped.set)
    name_this_process()
    with _listening() as (path, listener):
        warden = Warden()
        warden.listen(listener)
        log.info("%s", log_line(event="warden_listens", path=path, pid=os.getpid()))
        manager.tell(READY=1)
        await stopped.wait()
        manager.tell(STOPPING=1)
        await warden.stop(FINISH_S)


@contextlib.contextmanager
def _listening() -> Iterator[tuple[Path, socket.socket]]:
    """A socket at the place where sessions look for it. Only one process can have it."""
    path = _place()
    try:
        check_directory(path.parent)
    except Refused as error:
        raise ConfigError(str(error)) from error
    if path.exists() and not path.is_socket():
        raise ConfigError(f"{path} is not a socket: name another place in DOYEN_WARDEN")
    # The lock, not the socket, decides who serves: a socket is left behind by a process that was
    # killed. It is released by the kernel.
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another warden serves {path}") from None
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            mask = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(mask)
            try:
                yield path, listener
            finally:
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
    finally:
        os.close(lock)


def _place() -> Path:
    """Where to listen: the first place whose directory exists or can be made."""
    wanted = places()
    if not wanted:
        raise ConfigError("DOYEN_WARDEN=off turns wardens off: unset it")
    for path in wanted:
        parents = [path.parent] if path.parent.parent.exists() else []
        if path.parent.parent == Path("/run/doyen"):
            parents = [path.parent.parent, path.parent]
        try:
            for parent in parents:
                parent.mkdir(mode=0o700 if parent == path.parent else 0o755, exist_ok=True)
        except OSError:
            continue
        if os.access(path.parent, os.W_OK):
            return path
    where = " and ".join(str(path.parent) for path in wanted)
    raise ConfigError(
        f"this user cannot write to {where}: have the service manager start the warden, with the"
        " unit that `doyen warden --unit` prints, or name a place in DOYEN_WARDEN, for this process"
        " and for those with sessions"
    )


_SYSTEM_UNIT = """\
# /etc/systemd/system/doyen-warden@.service
# The instance is the number of a user: systemctl enable --now doyen-warden@1000
[Unit]
Description=doyen warden of user %i, ends the leases of processes that have died
Documentation=https://pypi.org/project/doyen/
StartLimitIntervalSec=0

[Service]
Type=notify
User=%i
RuntimeDirectory=doyen/%i
RuntimeDirectoryMode=0700
ExecStart={program} warden
Restart=always
RestartSec=1
# It must outlive the processes that it watches over.
OOMScoreAdjust=-900
NoNewPrivileges=yes

[Install]
WantedBy=multi-user.target
"""

_USER_UNIT = """\
# ~/.config/systemd/user/doyen-warden.service
# systemctl --user enable --now doyen-warden; loginctl enable-linger
[Unit]
Description=doyen warden, ends the leases of processes that have died
StartLimitIntervalSec=0

[Service]
Type=notify
RuntimeDirectory=doyen
RuntimeDirectoryMode=0700
ExecStart={program} warden
Restart=always
RestartSec=1
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""


def unit(kind: str, program: str) -> str:
    """The text of a systemd unit: `system`, for any user, or `user`, for one's own manager."""
    return (_SYSTEM_UNIT if kind == "system" else _USER_UNIT).format(program=program)
