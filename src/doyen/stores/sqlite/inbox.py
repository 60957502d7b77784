"""The inbox of a handle: the FIFO through which other processes report the tags of what they
change.

A message is one tag of eight bytes, so a FIFO without room for a message is full to the last byte.
A handle that empties a full inbox treats everything as changed.

Inboxes are created, and those without a reader removed, only under the database's write lock, so an
inbox that is being created is never mistaken for one whose reader has died.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import select
import struct
from collections.abc import Iterable
from contextlib import suppress

from doyen.stores.sqlite.location import SessionsDirectory

__all__ = ["Inbox"]

_TAG = struct.Struct("<Q")


class Inbox:
    """The inbox of one handle, and sending to the inboxes of others."""

    def __init__(self, directory: SessionsDirectory) -> None:
        self._directory = directory
        self.name = secrets.token_hex(8)
        self.fd = -1
        self._capacity = select.PIPE_BUF
        self._messages = bytearray()

    def make(self) -> None:
        path = self._directory.file(self.name, "inbox")
        os.mkfifo(path)
        os.chmod(path, self._directory.mode)
        # Also open for writing, because otherwise the end of each sender would look like the end.
        self.fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        if hasattr(fcntl, "F_GETPIPE_SZ"):
            self._capacity = fcntl.fcntl(self.fd, fcntl.F_GETPIPE_SZ)
        self._messages = bytearray(max(self._capacity, 1 << 16))

    def in_place(self) -> bool:
        return os.path.exists(self._directory.file(self.name, "inbox"))

    def send(self, name: str, tags: Iterable[int]) -> bool:
        """Send tags to the inbox of another handle; False if it has no reader. Under the write
        lock."""
        fd = self.reach(name)
        return fd is not None and self.write(fd, tags)

    def reach(self, name: str) -> int | None:
        """A descriptor of the inbox of another handle, for `write`; None if it has no reader. Under
        the write lock."""
        path = self._directory.file(name, "inbox")
        try:
            return os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return None

    def discard(self, name: str) -> None:
        """Remove an inbox that has no reader."""
        with suppress(OSError):  # the next process that opens the store removes it
            os.unlink(self._directory.file(name, "inbox"))

    @staticmethod
    def write(fd: int, tags: Iterable[int]) -> bool:
        """Send tags to the inbox that was reached, and close the descriptor; False if it has no
        reader any more."""
        try:
            # One by one, so that a full FIFO is full to the last byte and its reader notices.
            for tag in tags:
                os.write(fd, _TAG.pack(tag))
        except BlockingIOError:
            pass
        except BrokenPipeError:
            return False
        finally:
            os.close(fd)
        return True

    def has_reader(self, name: str) -> bool:
        try:
            os.close(os.open(self._directory.file(name, "inbox"), os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            return error.errno not in (errno.ENXIO, errno.ENOENT)
        return True

    def any_other_read(self, names: Iterable[str]) -> bool:
        """Whether one of these inboxes, other than this one, certainly has a reader."""
        for name in names:
            if name == self.name:
                continue
            with suppress(OSError):
                os.close(os.open(self._directory.file(name, "inbox"), os.O_WRONLY | os.O_NONBLOCK))
                return True
        return False

    def drain(self) -> set[int] | None:
        """The tags that have arrived, or None if some may have been dropped."""
        try:
            size = os.readv(self.fd, [self._messages])
        except BlockingIOError:
            return set()
        if size >= self._capacity:
            return None
        return {tag for (tag,) in _TAG.iter_unpack(self._messages[:size])}

    def remove(self) -> None:
        """Remove the FIFO, after the rows that name it: until then it shows that its reader is
        gone."""
        self.discard(self.name)

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
