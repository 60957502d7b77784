"""What the kernel offers a warden: links, pidfds and shared memory of holders."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Callable

from doyen.warden.wire import Hello, holder_pidfd, pid_of, receive_hello

__all__ = ["KernelConnection", "must_not_be_killed", "receive_despite_reset"]


class KernelConnection:
    """A holder's link, pidfd and lease table. See `HolderConnection`."""

    def __init__(self, link: socket.socket, pidfd: int, table: int) -> None:
        self._link = link
        self._pidfd = pidfd
        self._table = table
        self._loop = asyncio.get_running_loop()
        self._read: set[int] = set()
        """Descriptors that the loop reads from. To remove one from it again takes 25 µs."""

    @classmethod
    def accept(cls, link: socket.socket) -> tuple[Hello, KernelConnection]:
        """The session that introduces itself over this link. Raises `Refused`, and
        `BlockingIOError` if it has not yet."""
        hello, passed, table = receive_hello(link)
        try:
            pidfd = holder_pidfd(link, passed)
        except BaseException:
            os.close(table)
            raise
        return hello, cls(link, pidfd, table)

    def attach(self, on_message: Callable[[], None], on_death: Callable[[], None]) -> None:
        def died() -> None:
            self._stop_reading(self._pidfd)
            on_death()

        for descriptor, call in ((self._link.fileno(), on_message), (self._pidfd, died)):
            self._loop.add_reader(descriptor, call)
            self._read.add(descriptor)

    def _stop_reading(self, descriptor: int) -> None:
        if descriptor in self._read:
            self._read.remove(descriptor)
            self._loop.remove_reader(descriptor)

    def receive(self) -> bytes | None:
        try:
            data = receive_despite_reset(self._link)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._stop_reading(self._link.fileno())
        return data

    def send(self, message: bytes) -> bool:
        try:
            self._link.send(message, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            return False
        return True

    def read(self, at: int, count: int) -> bytes:
        try:
            return os.pread(self._table, count, at)
        except OSError:
            return b""

    def kill(self) -> str:
        pid = pid_of(self._pidfd)
        if pid is None or pid <= 0:
            return "it has no process id here"
        if reason := must_not_be_killed(pid):
            return reason
        with contextlib.suppress(OSError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return ""

    def detach(self) -> None:
        for descriptor in list(self._read):
            self._stop_reading(descriptor)

    def close(self) -> None:
        self._link.close()
        os.close(self._pidfd)
        os.close(self._table)


def receive_despite_reset(link: socket.socket) -> bytes:
    """The next message. If the other end was closed with an unread ping, which a frozen holder
    leaves behind, the kernel reports that once, before the messages that were sent earlier."""
    try:
        return link.recv(64)
    except ConnectionResetError:
        return link.recv(64)


def must_not_be_killed(pid: int) -> str:
    """Why a process must not be killed; empty if it may be."""
    try:
        with open(f"/proc/{pid}/status") as file:
            facts = dict(line.split(":", 1) for line in file if ":" in line)
        if int(facts["TracerPid"]):
            return "it is being traced"
        if set(map(int, facts["Uid"].split())) != {os.geteuid()}:
            return "it has changed its user"
    except (OSError, KeyError, ValueError) as error:
        return f"its state cannot be read: {error}"
    return ""
