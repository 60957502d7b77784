"""The lease table: what a warden must know of one session, in memory that both processes share.

The holder writes it with plain stores to memory: no system call, no message, no queue that could be
full. The warden reads it when the holder has died, so it always finds the last state, however late
it is. Nothing wakes the warden while leases come and go.

    0     mark, number of the last ping that was answered, number of bodies, closed, number of slots
    64    supervised runs whose processes may be alive: 16 numbers, 0 if free
    256   slots of 256 bytes, one for each lease: checksum, lengths, ttl, id, warrant

A process can be killed in the middle of a store, so every lease has a checksum. One that does not
match is left to expire.

Only the holder writes, and only through its mapping: code that closes all descriptors of a process
(`os.closerange`) cannot cause a write to another file.

Imports the standard library only.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Callable
from typing import NamedTuple

__all__ = [
    "TABLE_BYTES",
    "LeaseTable",
    "TableFull",
    "TableState",
    "WardedLease",
    "read_leases",
    "read_state",
]

TABLE_BYTES = 1 << 20
"""Of which only the pages that were ever written take up memory."""
MARK = b"doyenwd\1"
HEAD_BYTES = 256

_HEAD = struct.Struct("<8sQIBxxxI")
_ANSWERED = struct.Struct("<Q")
_BODIES = struct.Struct("<I")
_USED = struct.Struct("<I")
_RUNS = struct.Struct("<16Q")
_RUNS_AT = 64
_RUN = struct.Struct("<Q")
_SLOT = struct.Struct("<IBBd")
_SLOT_BYTES = 256
_SLOTS = (TABLE_BYTES - HEAD_BYTES) // _SLOT_BYTES


class TableFull(Exception):
    """There is no room for another lease."""


class WardedLease(NamedTuple):
    """A lease that a warden ends when its holder has died."""

    id: str
    ttl_s: float
    warrant: bytes


class TableState(NamedTuple):
    """The head of a table."""

    answered: int
    """The number of the last ping that the holder has answered."""
    bodies: int
    """How many bodies of terms run in the session."""
    closed: bool
    """The session was closed. Its leases are revoked, or left to expire."""
    runs: frozenset[int]
    """Supervised runs whose processes may be alive."""
    slots: int
    """How many places for leases were ever used."""


class LeaseTable:
    """The table as its holder writes it."""

    def __init__(self, buffer: memoryview) -> None:
        """`buffer` has `TABLE_BYTES` zeros."""
        self._buffer = buffer
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._used = 0
        self._run = 0
        self._running = threading.Lock()  # each supervisor may have a thread of its own
        buffer[: len(MARK)] = MARK

    def register(self, lease: WardedLease) -> None:
        """Add a lease."""
        name = lease.id.encode()
        body = name + lease.warrant
        if _SLOT.size + len(body) > _SLOT_BYTES:
            raise TableFull(f"a warrant of {len(body)} bytes is too long")
        if self._free:
            at = self._free.pop()
        elif self._used < _SLOTS:
            at, self._used = HEAD_BYTES + self._used * _SLOT_BYTES, self._used + 1
        else:
            raise TableFull(f"a session has {_SLOTS} leases with a warden at most")
        head = _SLOT.pack(0, len(name), len(lease.warrant), lease.ttl_s)[4:]
        record = zlib.crc32(head + body).to_bytes(4, "little") + head + body
        self._buffer[at : at + len(record)] = record
        _USED.pack_into(self._buffer, 24, self._used)
        self._slots[lease.id] = at

    def withdraw(self, lease: str) -> None:
        """Remove a lease. It is no error if it is not there."""
        at = self._slots.pop(lease, None)
        if at is not None:
            self._buffer[at : at + _SLOT.size] = bytes(_SLOT.size)
            self._free.append(at)

    def bodies(self, number: int) -> None:
        """How many bodies of terms run."""
        _BODIES.pack_into(self._buffer, 16, number)

    def answer(self, ping: int) -> None:
        """The holder's loop runs: it has received this ping."""
        _ANSWERED.pack_into(self._buffer, 8, ping)

    def close(self) -> None:
        """The session is closed."""
        self._buffer[20] = 1

    def run_begins(self) -> int:
        """The number of a new supervised run. Until `run_ended`, or a report of the guard, the
        leases are not ended."""
        with self._running:
            runs = list(_RUNS.unpack_from(self._buffer, _RUNS_AT))
            self._run += 1
            # With more runs at a time than there is room for, one place stays taken for good.
            place = runs.index(0) if 0 in runs else len(runs) - 1
            number = self._run if 0 in runs else 2**64 - 2
            _RUN.pack_into(self._buffer, _RUNS_AT + place * _RUN.size, number)
            return self._run

    def run_ended(self, run: int) -> None:
        """No process of this run is alive."""
        with self._running:
            runs = _RUNS.unpack_from(self._buffer, _RUNS_AT)
            if run in runs:
                _RUN.pack_into(self._buffer, _RUNS_AT + runs.index(run) * _RUN.size, 0)


Read = Callable[[int, int], bytes]
"""Reads a number of bytes of a table, from an offset on."""


def read_state(read: Read) -> TableState | None:
    """The head of a table; None if it is not one."""
    head = read(0, HEAD_BYTES)
    if len(head) < HEAD_BYTES or not head.startswith(MARK):
        return None
    _, answered, bodies, closed, slots = _HEAD.unpack_from(head)
    runs = frozenset(_RUNS.unpack_from(head, _RUNS_AT)) - {0}
    return TableState(answered, bodies, bool(closed), runs, min(slots, _SLOTS))


def read_leases(read: Read, slots: int) -> list[WardedLease]:
    """The leases of a table. One that is damaged is left out."""
    found = []
    pages = read(HEAD_BYTES, slots * _SLOT_BYTES)
    for at in range(0, len(pages) - _SLOT_BYTES + 1, _SLOT_BYTES):
        check, id_bytes, warrant_bytes, ttl_s = _SLOT.unpack_from(pages, at)
        if not id_bytes:
            continue
        end = at + _SLOT.size + id_bytes + warrant_bytes
        record = pages[at + 4 : end]
        if end > at + _SLOT_BYTES or zlib.crc32(record) != check:
            continue
        body = pages[at + _SLOT.size : end]
        found.append(WardedLease(body[:id_bytes].decode(), ttl_s, body[id_bytes:]))
    return found
