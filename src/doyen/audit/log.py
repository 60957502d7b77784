"""Writing the audit log: one line of JSON and one `write` per event."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading

from doyen.errors import ConfigError
from doyen.events import Record, merge_gap
from doyen.events.log_lines import log_line
from doyen.lease.clock import boot_id

__all__ = ["AuditLog"]

log = logging.getLogger("doyen.audit")


class AuditLog:
    """A sink that appends every event to a file.

    Opening raises `ConfigError` if the file cannot be written. Later failures raise nothing: the
    first is logged, events are counted, and when writing works again, a `gap` line with the number
    of missing events and the time of the first precedes the next event.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._boot = boot_id()
        self._lock = threading.Lock()  # keeps `close` from closing the descriptor during a write
        self._gap: Record | None = None
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        try:
            # Opening a named pipe would block until it has a reader; this fails with ENXIO.
            self._fd = os.open(self.path, flags | os.O_NONBLOCK, 0o644)
            os.set_blocking(self._fd, True)
        except OSError as error:
            raise ConfigError(
                f"the audit log {self.path} cannot be written: {error.strerror};"
                " name a file in a directory that exists and is writable"
            ) from error

    def __call__(self, record: Record) -> None:
        with self._lock:
            if self._fd < 0:
                return
            records = [record] if self._gap is None else [self._gap, record]
            lines = b"".join(map(self._line, records))
            try:
                written = os.write(self._fd, lines)
                error = "no space for a whole line" if written < len(lines) else ""
            except OSError as failure:
                error = failure.strerror or str(failure)
            if error and self._gap is None:
                log.error("%s", log_line(event="audit_log_failed", path=self.path, error=error))
            if error:
                self._gap = merge_gap(self._gap, record)
            elif self._gap is not None:
                log.warning("%s", log_line(event="audit_log_restored", path=self.path))
                self._gap = None

    @property
    def complete(self) -> bool:
        """Whether every event so far has been written."""
        return self._gap is None

    def _line(self, record: Record) -> bytes:
        when = {"at": record.at, "wall": record.wall, "boot": self._boot}
        line = {**record.fields(), **when, "pid": record.pid, "session": record.session}
        text = json.dumps(line, separators=(",", ":"), default=repr)
        return text.encode() + b"\n"

    def close(self) -> None:
        """Close the file; later events are dropped. May be called again."""
        with self._lock:
            if self._fd >= 0:
                if self._gap is not None:
                    with contextlib.suppress(OSError):
                        os.write(self._fd, self._line(self._gap))
                os.close(self._fd)
                self._fd = -1
