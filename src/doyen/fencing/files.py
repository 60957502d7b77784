"""A file whose content only the holder of the highest token can replace. May import errors only."""

from __future__ import annotations

import fcntl
import os
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from doyen.fencing.tokens import HasToken, stale, token_of

__all__ = ["GuardedFile"]


class _Seen(NamedTuple):
    """The contents of a fence directory: claimed tokens, and drafts with their tokens."""

    claims: list[int]
    drafts: list[tuple[int, str]]


class GuardedFile:
    """A file that only the holder of the highest token seen can write.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     file = GuardedFile(Path(folder) / "state.json")
    ...     file.write(7, b"one")
    ...     file.append(8, b", two")
    ...     file.read(), file.token
    (b'one, two', 8)

    Guarantees, on a local file system:

    - A reader sees either the old or the new content, complete, also after a crash.
    - Once a call with a token has begun to write or has returned, calls with lower tokens raise
      `StaleToken` and do not change the file. This holds for a process that was paused at any
      point, even between its last check and its write, and after a power failure.
    - Writers with different tokens do not wait for each other, so a paused process blocks no other.
      Writers with the *same* token (processes and threads of one leader) take turns.

    A new leader that reads before it writes must first call `append(term, b"")`: after that call,
    no write of an earlier term can follow the read.

    Implementation: beside the file there is a directory `<name>.fence`, which must be moved, backed
    up and deleted together with the file. An empty file in it, the *claim*, names the highest token
    seen. A writer creates its claim, deletes the *drafts* of all lower tokens, writes its own
    draft, checks for a higher claim, and renames its draft over the file. If a lower writer created
    its draft before the higher claim, the draft is deleted and its rename fails; if after, it finds
    the claim. So no lock is needed between different tokens. Appending copies the content, so this
    is suitable for state and not for large logs.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._fence = self.path.with_name(self.path.name + ".fence")

    def read(self) -> bytes:
        """The content. Raises `FileNotFoundError` if nothing has been written."""
        return self.path.read_bytes()

    @property
    def token(self) -> int | None:
        """The highest token seen, or None."""
        try:
            return max(self._look().claims, default=None)
        except FileNotFoundError:
            return None

    def write(self, token: int | HasToken, data: bytes) -> None:
        """Replace the content, atomically and durably."""
        with self._claimed(token_of(token)) as number:
            self._replace(number, data)

    def append(self, token: int | HasToken, data: bytes) -> None:
        """Append to the content, atomically and durably."""
        with self._claimed(token_of(token)) as number:
            try:
                before = self.read()
            except FileNotFoundError:
                before = b""
            self._replace(number, before + data)

    @contextmanager
    def _claimed(self, token: int) -> Iterator[int]:
        """Within this context no lower token can change the file, and no other holder of the same
        token is writing."""
        if not self._fence.is_dir():
            self._fence.mkdir(exist_ok=True)
            _fsync_directory(self._fence.parent)
        self._refuse_if_stale(token)
        claim = self._fence / f"{token}.claim"
        fd = os.open(claim, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            seen = self._refuse_if_stale(token)
            for other, name in seen.drafts:
                if other < token:
                    (self._fence / name).unlink(missing_ok=True)
            yield token
            # Only after the own claim is durable and the drafts with lower tokens are deleted.
            for other in seen.claims:
                if other < token:
                    (self._fence / f"{other}.claim").unlink(missing_ok=True)
        finally:
            os.close(fd)

    def _replace(self, token: int, data: bytes) -> None:
        draft = self._fence / f"{token}.{uuid.uuid4().hex}.draft"
        try:
            self._write_draft(draft, data)
            _fsync_directory(self._fence)  # the claim is durable before the new content is visible
            self._refuse_if_stale(token)
            os.rename(draft, self.path)
        except FileNotFoundError:
            self._refuse_if_stale(token)
            raise
        finally:
            draft.unlink(missing_ok=True)
        _fsync_directory(self.path.parent)

    def _write_draft(self, draft: Path, data: bytes) -> None:
        try:
            mode = stat.S_IMODE(self.path.stat().st_mode)
        except FileNotFoundError:
            mode = None
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with open(os.open(draft, flags, 0o666 if mode is None else mode), "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _refuse_if_stale(self, token: int) -> _Seen:
        seen = self._look()
        highest = max(seen.claims, default=token)
        if highest > token:
            raise stale(str(self.path), token, highest)
        return seen

    def _look(self) -> _Seen:
        seen = _Seen([], [])
        for name in os.listdir(self._fence):
            match name.split("."):
                case [token, "claim"] if token.isdecimal():
                    seen.claims.append(int(token))
                case [token, _, "draft"] if token.isdecimal():
                    seen.drafts.append((int(token), name))
        return seen


def _fsync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
