"""The warden of one process: started by it, and outliving it by as long as its leases need.

The warden does not remain a child of the process: an intermediate process starts it and exits, so
that a program which waits for all of its children does not wait for the warden, and cannot reap it.
It has a session of its own, so that a terminal's signals do not reach it, no descriptors but those
passed to it, and is not ended by the signals that service managers send to every process of a
service: it goes on until its holder has died and its leases have been ended. After SIGTERM it gives
up sooner if the store does not answer, because the restart of a service waits for all processes.
Credentials arrive over the inherited socket, never on the command line.

Imports only the standard library at first, so that the holder starts it in milliseconds.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import ClassVar

from doyen.events.log_lines import log_line
from doyen.warden.wire import Refused, own_pidfd

__all__ = ["ChildWarden", "interpreter", "main"]

log = logging.getLogger("doyen")

_IGNORED = (
    signal.SIGTERM,  # until the warden runs
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
    signal.SIGPIPE,
)
_BOOTSTRAP = """\
import os, sys
if os.fork():
    os._exit(0)
import json, socket
control = socket.socket(fileno=int(sys.argv[1]))
sys.path[:] = json.loads(control.recv(1 << 18))
from doyen.warden.child import main
main(control, int(sys.argv[2]))
"""
_PATH_BYTES = 1 << 17
_FRUGAL = {"MALLOC_ARENA_MAX": "1"}
"""Client libraries have threads, each of which would keep memory of its own."""
GIVE_UP_S = 120.0
"""How long a store that does not answer is tried after the holder has died: no process supervises
this child any more."""


def interpreter() -> str:
    """A Python interpreter. `sys.executable` is not one in a program that embeds Python, as uWSGI
    does."""
    for candidate in _candidates():
        name = os.path.basename(candidate)
        if name.startswith(("python", "pypy")) and os.access(candidate, os.X_OK):
            return candidate
    raise Refused(f"no Python interpreter was found: sys.executable is {sys.executable!r}")


def _candidates() -> Iterator[str]:
    yield sys.executable or ""
    yield getattr(sys, "_base_executable", "") or ""
    major, minor = sys.version_info[:2]
    for prefix in dict.fromkeys((sys.exec_prefix, sys.base_exec_prefix)):
        yield f"{prefix}/bin/python{major}.{minor}"
        yield f"{prefix}/bin/python{major}"


class ChildWarden:
    """The warden of this process, started with the first session that wants one."""

    _shared: ClassVar[ChildWarden | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._users = 0
        owner = own_pidfd()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        # The holder does not wait for the start: what it sends is read when the child runs.
        starter = threading.Thread(
            target=_start, args=(theirs, owner), name="doyen-warden-start", daemon=True
        )
        try:
            entries: list[object] = [*sys.path]  # Python ignores what is not a string
            path = json.dumps([each for each in entries if isinstance(each, str)]).encode()
            if len(path) > _PATH_BYTES:
                raise Refused("sys.path is too long")
            self._control.send(path)
            starter.start()
        except (OSError, RuntimeError, Refused) as error:
            self._control.close()
            theirs.close()
            os.close(owner)
            raise Refused(f"it could not be started: {error}") from error

    @classmethod
    def acquire(cls) -> ChildWarden:
        """The warden of this process. Pair with `release`."""
        with cls._lock:
            if cls._shared is None:
                interpreter()
                cls._shared = cls()
            cls._shared._users += 1
            return cls._shared

    def link(self) -> socket.socket:
        """A new link to it, for one session."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        try:
            with theirs:
                socket.send_fds(self._control, [b"L"], [theirs.fileno()], socket.MSG_DONTWAIT)
        except OSError as error:
            ours.close()
            with self._lock:
                if ChildWarden._shared is self:
                    ChildWarden._shared = None  # the next session starts another
            raise Refused(f"it has ended: {error.strerror}") from error
        return ours

    def release(self) -> None:
        """With the last session it ends, once it has nothing more to do."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if ChildWarden._shared is self:
                ChildWarden._shared = None
        self._control.close()

    @classmethod
    def forked(cls) -> None:
        """In the child of a fork: the warden is that of the parent."""
        cls._lock = threading.Lock()
        if cls._shared is not None:
            cls._shared._control.close()
            cls._shared = None


def _start(control: socket.socket, owner: int) -> None:
    import subprocess

    try:
        with control:
            process = subprocess.Popen(
                [interpreter(), "-I", "-c", _BOOTSTRAP, str(control.fileno()), str(owner)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[control.fileno(), owner],
                start_new_session=True,
                env={**os.environ, **_FRUGAL},
            )
        process.wait()
    except (OSError, Refused) as error:
        log.warning("%s", log_line(event="warden_not_started", error=error))
    finally:
        os.close(owner)


def main(control: socket.socket, owner: int) -> None:
    """Run the warden, in the process that was started for it."""
    import asyncio

    from doyen.warden.server import Warden

    for signum in _IGNORED:
        signal.signal(signum, signal.SIG_IGN)
    for descriptor in (control.fileno(), owner):
        os.set_inheritable(descriptor, False)
    name_this_process()

    async def serve() -> None:
        warden = Warden(give_up_s=GIVE_UP_S)
        warden.attend(control, owner)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, warden.hurry)
        await warden.run()

    asyncio.run(serve())
    # Threads of client libraries must not delay the end.
    os._exit(0)


def name_this_process() -> None:
    """Have `ps` show it as doyen-warden."""
    import ctypes

    try:
        ctypes.CDLL(None).prctl(15, b"doyen-warden", 0, 0, 0)
    except (OSError, AttributeError):
        pass
