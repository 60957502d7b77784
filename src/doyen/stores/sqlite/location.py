"""From a URL to a path on a suitable file system, and the meaning of operating system errors.

Locks, FIFOs and SQLite's shared memory work within one kernel only, so the store is refused on file
systems that several machines may share. Imports the port's URL and the errors.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from urllib.parse import unquote

from doyen.errors import ConfigError, StoreError, StoreUnavailable, StoreUnusable
from doyen.stores.port import StoreURL

__all__ = [
    "SessionsDirectory",
    "file_system",
    "kind_of",
    "make_parents",
    "path_of",
    "refuse_missing",
    "refuse_shared",
    "translate_os",
]

LOCAL = {"apfs", "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "hfs", "jfs", "nilfs2"}
LOCAL |= {"overlay", "ramfs", "reiserfs", "tmpfs", "xfs", "zfs"}
"""File systems that belong to one machine. All others are refused."""

_BEYOND_US = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ELOOP, errno.EISDIR}


def path_of(url: StoreURL) -> str:
    """The file that `url` names: absolute and with links resolved, so that all names agree."""
    parts = url.parts
    if parts.netloc not in ("", ".", ".."):
        raise ConfigError(
            f"{url.text!r} names a host, {parts.netloc!r}: write sqlite:///absolute/path.db,"
            " or sqlite:relative.db for a path in the current directory"
        )
    if parts.fragment:
        raise ConfigError(f"{url.text!r}: write the # of a file name as %23")
    path = unquote(parts.netloc + parts.path)
    if not path or path.endswith("/") or path == ":memory:" or "\0" in path:
        raise ConfigError(
            f"{url.text!r} does not name a file: write sqlite:///absolute/path.db"
            " (for a store within one process, memory://)"
        )
    return os.path.realpath(path)


class SessionsDirectory:
    """The directory of the lease and inbox files, `<path>.sessions`.

    It and its files have the permissions of the database.
    """

    def __init__(self, database: str) -> None:
        self._database = database
        self.path = database + ".sessions"
        self.mode = 0o600

    def make(self) -> None:
        """Create the directory. The database must exist."""
        self.mode = stat.S_IMODE(os.stat(self._database).st_mode) & 0o666
        try:
            os.mkdir(self.path)
        except FileExistsError:
            if not os.path.isdir(self.path):
                raise NotADirectoryError(errno.ENOTDIR, "not a directory", self.path) from None
            return
        os.chmod(self.path, self.mode | (self.mode & 0o444) >> 2)

    def file(self, name: str, part: str) -> str:
        return f"{self.path}/{name}.{part}"

    def files(self) -> dict[str, set[str]]:
        """The suffixes of the existing files, by name."""
        found: dict[str, set[str]] = {}
        for file in os.listdir(self.path):
            name, _, part = file.rpartition(".")
            found.setdefault(name, set()).add(part)
        return found


def refuse_missing(path: str) -> None:
    """Raise if there is no store at `path`. An empty file, or a directory, is none."""
    try:
        found = os.stat(path)
        exists = stat.S_ISREG(found.st_mode) and found.st_size > 0
    except (FileNotFoundError, NotADirectoryError):
        exists = False
    except OSError as error:  # a directory that may not be searched, for example
        raise translate_os(error, path) from error
    if not exists:
        raise StoreUnusable(
            f"there is no store at {path}, and a query creates none: no candidate has used this"
            " path yet; check it, or start a candidate"
        )


def make_parents(path: str) -> None:
    """Create the parent directories of `path`."""
    if os.path.isdir(path):
        raise StoreUnusable(f"{path} is a directory: choose a file for the store")
    parent = os.path.dirname(path)
    try:
        os.makedirs(parent, exist_ok=True)
    except OSError as error:
        raise StoreUnusable(
            f"the directory {parent} for the store cannot be created"
            f" ({error.strerror}): create it, or choose another path"
        ) from error


MOUNTS = "/proc/self/mountinfo"


def kind_of(path: str, mountinfo: str = MOUNTS) -> str | None:
    """The kind of file system at `path`; None if it cannot be determined."""
    try:
        with open(mountinfo, encoding="utf-8", errors="surrogateescape") as table:
            return file_system(path, table)
    except OSError:
        return None


def refuse_shared(path: str, mountinfo: str = MOUNTS) -> None:
    """Raise if `path` lies on a file system that several machines may share."""
    kind = kind_of(path, mountinfo)
    if kind is not None and kind not in LOCAL:
        raise StoreUnusable(
            f"{path} is on {kind}, where locks may not be visible to all candidates: put it on"
            f" a local disk ({', '.join(sorted(LOCAL))}), or use a server store,"
            " such as etcd:// or postgresql://"
        )


def file_system(path: str, mountinfo: Iterator[str]) -> str | None:
    """The kind of file system at `path`, according to the lines of /proc/self/mountinfo."""
    longest, kind = -1, None
    for line in mountinfo:
        before, _, after = line.partition(" - ")
        point = _unescaped(before.split(" ")[4])
        inside = point == "/" or path == point or path.startswith(point + "/")
        if inside and len(point) >= longest:  # of two at one point the later covers the earlier
            longest, kind = len(point), after.split(" ", 1)[0]
    return kind


def _unescaped(point: str) -> str:
    for escape, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(escape, character)
    return point


def translate_os(error: OSError, path: str) -> StoreError:
    """Map an error of the operating system to an exception that names cause and remedy."""
    where = error.filename or path
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreUnavailable(
            f"no space left for {where}: free space on the file system of {path};"
            " nothing was written"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StoreUnavailable(
            f"too many open files ({error.strerror}) at {where}: raise the limit (ulimit -n);"
            " a session needs about six descriptors, and one for each lease it watches"
        )
    if error.errno in _BEYOND_US:
        return StoreUnusable(
            f"{where} cannot be used ({error.strerror}): every candidate must be able to read and"
            f" write {path}, its directory and {os.path.basename(path)}.sessions in it"
        )
    return StoreUnavailable(f"{where}: {error.strerror or error}")
