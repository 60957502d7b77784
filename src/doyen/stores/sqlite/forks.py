"""Closes SQLite's connections before the process forks; their threads open them again afterwards.

SQLite remembers in the memory of a process which locks that process holds, for each file. A forked
child inherits this memory, but the kernel's locks stay with the parent. If the child opened a file
that is open in the parent, it would count on locks that it does not have. The parent could then
remove the write-ahead log while the child goes on writing to it: the child would see a database of
its own, and could lead besides another leader. A lock that the parent held during the fork would
never be free in the child.

So a fork waits until no thread is inside SQLite, and closes every connection. If a thread does not
leave SQLite within `FORK_WAIT_S`, because the disk hangs, the process forks nevertheless, and the
child refuses to open that file.

Only connections of doyen are known here. Imports nothing of the package.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

__all__ = ["connections", "inherited"]

FORK_WAIT_S = 5.0
"""How long a fork waits for threads to leave SQLite."""

FileId = tuple[int, int]
"""The device and the inode of a file."""


class OpenDatabase(Protocol):
    """A database with a connection and a thread."""

    def disconnect(self) -> bool:
        """Close the connection, if there is one; False if that fails. Called from any thread while
        the database's own is not inside SQLite."""

    def file(self) -> FileId | None:
        """The file of the connection; None if it does not exist."""

    def retire(self) -> bool:
        """If another file, or none, is at the path of the connection, do not open it again."""


class Connections:
    """The databases of this process that may have a connection, and those inside SQLite now."""

    def __init__(self, inherited: frozenset[FileId] = frozenset()) -> None:
        self.inherited = inherited
        """Files that an ancestor had open when it forked."""
        self._changed = threading.Condition()
        self._forking: set[int] = set()
        """The identifiers of the threads that fork. Not a counter: Python ignores the exception of
        a signal handler in a hook of a fork, after which a counter would stay wrong."""
        self._open: set[OpenDatabase] = set()
        self._inside: set[OpenDatabase] = set()

    @property
    def forking(self) -> bool:
        """Whether a fork waits, or is under way."""
        return bool(self._forking)

    @contextmanager
    def inside(self, database: OpenDatabase) -> Iterator[None]:
        """Around a use of SQLite by the calling thread. Waits while the process forks; the
        connection may have been closed since the last use."""
        self.enter(database)
        try:
            yield
        finally:
            self.leave(database)

    def enter(self, database: OpenDatabase) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._forking)
            self._open.add(database)
            self._inside.add(database)

    def enter_now(self, database: OpenDatabase) -> bool:
        """`inside`, without a wait; False if the process forks, or may be about to."""
        if not self._changed.acquire(blocking=False):
            return False
        try:
            if not self._forking:
                self._open.add(database)
                self._inside.add(database)
            return not self._forking
        finally:
            self._changed.release()

    def leave(self, database: OpenDatabase) -> None:
        with self._changed:
            self._inside.discard(database)
            if self._forking:
                self._changed.notify_all()

    def forget(self, database: OpenDatabase) -> None:
        """The database has closed its connection for good."""
        with self._changed:
            self._open.discard(database)

    def before_fork(self) -> None:
        with self._changed:
            self._forking.add(threading.get_ident())
            self._changed.wait_for(lambda: not self._inside, FORK_WAIT_S)
            for database in self._open - self._inside:
                if database.disconnect():
                    self._open.discard(database)

    def after_fork(self) -> None:
        with self._changed:
            self._forking.discard(threading.get_ident())
            self._changed.notify_all()

    def close_replaced(self) -> None:
        """Close the connections to files that were removed or replaced, before one is opened to
        what is at the path now. The -shm file may still be the same: then SQLite would empty it
        while it is mapped, and closing the earlier connection would drop the locks of the new one.
        """
        with self._changed:
            replaced = [database for database in self._open if database.retire()]
        if replaced:
            self.before_fork()
            self.after_fork()

    def in_child(self) -> Connections:
        """Those of a child: none. It has no thread but the one that forked, and another may have
        held the lock."""
        files = {database.file() for database in self._open}
        return Connections(self.inherited | {file for file in files if file is not None})


_connections = Connections()


def connections() -> Connections:
    """The connections of this process."""
    return _connections


def inherited(file: FileId) -> bool:
    """Whether an ancestor of this process had the file open when it forked."""
    return file in _connections.inherited


def _before_fork() -> None:
    _connections.before_fork()


def _after_fork_in_parent() -> None:
    _connections.after_fork()


def _after_fork_in_child() -> None:
    global _connections
    _connections = _connections.in_child()


os.register_at_fork(
    before=_before_fork,
    after_in_parent=_after_fork_in_parent,
    after_in_child=_after_fork_in_child,
)
# Twice: the exception of a signal handler may have ended the first call before it had an effect.
os.register_at_fork(after_in_parent=_after_fork_in_parent)
