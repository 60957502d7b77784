"""Writing the audit log: one JSON object a line, one `write` an event.

May import clock, errors and events.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from typing import Any

from doyen.clock import boot_id
from doyen.errors import ConfigError
from doyen.events import Record

__all__ = ["AuditLog"]

log = logging.getLogger("doyen.audit")


class AuditLog:
    """A sink that appends every event to a file.

    Opening raises `ConfigError` if the file cannot be written. After that nothing is raised: when
    the disk fills, that is logged once, events are counted, and the first line that fits again is
    preceded by a `gap` that says how many are missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._boot = boot_id()
        self._lock = threading.Lock()  # so that no write can reach a descriptor being closed
        self._missed = 0
        try:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"the audit log {self.path} cannot be written: {error.strerror};"
                " name a file in a directory that exists and is writable"
            ) from error

    def __call__(self, record: Record) -> None:
        line = self._line(record, record.fields())
        with self._lock:
            if self._fd < 0:
                return
            if self._missed:
                line = self._line(record, {"event": "gap", "missed": self._missed}) + line
            try:
                written = os.write(self._fd, line)
                error = "no space for a whole line" if written < len(line) else ""
            except OSError as failure:
                error = failure.strerror or str(failure)
            if error:
                self._missed += 1
                if self._missed == 1:
                    log.error(
                        "the audit log %s cannot be written (%s); events are missing from it until"
                        " it can, and this is said once",
                        self.path,
                        error,
                    )
            elif self._missed:
                log.warning(
                    "the audit log %s is written again; %d events are missing",
                    self.path,
                    self._missed,
                )
                self._missed = 0

    def _line(self, record: Record, fields: dict[str, Any]) -> bytes:
        stamp = {
            "at": record.at,
            "wall": record.wall,
            "boot": self._boot,
            "pid": record.pid,
            "session": record.session,
        }
        text = json.dumps({**fields, **stamp}, separators=(",", ":"), default=repr)
        return text.encode() + b"\n"

    def close(self) -> None:
        """Later events are dropped. Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
