"""Terms that others have recorded, for the timeline of a live page: in the trail that leaders leave
in the store, and in audit logs that are still being written.

Both say when a term began and ended, and why. An observer of the store only sees that a record is
there or gone.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from doyen.model import PastTerm, finite
from doyen.web.board import Board
from doyen.web.terms import TERMS, SeenTerm, clipped, ordered_end, row_key

__all__ = ["AuditTrail", "GrowingLog", "TrailReader", "recorded_terms"]

EVERY_S = 0.5
PIECE = 512 << 10
"""How many bytes of a file are read at a time. Taking in so many is quick, and pages are served
between two pieces."""
KEPT = 5000
"""How many elections are remembered that are in the logs and not on the page."""
LATEST_S = 1e11
"""Times after this are damage."""


def recorded_terms(trail: Sequence[PastTerm]) -> list[SeenTerm]:
    """The terms of a trail, in order. One that has no end although another followed was cut off:
    its leader could not record the end.

    >>> cut_off, last = recorded_terms([PastTerm("a", 1, 10.0), PastTerm("b", 2, 20.0)])
    >>> (cut_off.until, cut_off.cause), (last.until, last.cause)
    ((20.0, 'expired'), (None, ''))
    """
    terms = []
    in_order = sorted(trail, key=lambda term: term.token)
    for past, after in zip_longest(in_order, in_order[1:]):
        name = clipped(past.name, 60)
        term = SeenTerm(past.name, past.token, past.since, True, past.until)
        if past.until is not None:
            ordered = ordered_end(past.reason)
            lost = past.end == "lost" and not ordered
            term.cause = "lost" if lost else ordered or "released"
            reason = f": {clipped(past.reason, 200)}" if past.reason else ""
            term.why = f"{name} {'lost it' if lost else 'resigned'}{reason}."
        elif after is not None:
            term.until, term.cause = after.since, "expired"
            term.why = f"{name} recorded no end: it was killed, or could not reach the store."
        terms.append(term)
    return terms


class TrailReader:
    """Makes terms of the lines of audit logs. It keeps as many terms as a row shows."""

    def __init__(self) -> None:
        self.terms: dict[str, dict[int, SeenTerm]] = {}
        """By the key of the row, those that changed last at the end, and by token."""
        self._open: dict[str, list[tuple[str, SeenTerm]]] = {}
        """Terms that have not ended, by their lease."""

    def add(self, line: dict[str, Any]) -> str | None:
        """Take in one line; returns the row that it changed, if any. Raises `ValueError`,
        `KeyError` or `TypeError` if it is not a line of an audit log."""
        event = line.get("event")
        if event == "leaseended":
            return self._lease_ended(line)
        if event not in ("elected", "lost", "resigned"):
            return None
        key = row_key(line.get("election_kind", "elections"), str(line["election"]))
        token, wall = line["token"], _time(line, "wall")
        if type(token) is not int:
            raise ValueError(f"{token!r} is not a token")
        if event == "elected":
            self._begin(key, SeenTerm(str(line["name"]), token, wall, lease=str(line["lease"])))
            return key
        known = self.terms.get(key, {}).get(token)
        if known is None:
            return None
        if event == "resigned":
            self._end(known, wall, "released", f"{clipped(known.name, 60)} resigned.")
        else:
            at, ended_at = _time(line, "at"), float(line["ended_at"])
            reason = clipped(str(line.get("reason", "")), 200)
            wall -= max(0.0, at - ended_at) if ended_at > 0 else 0.0
            self._end(known, wall, "lost", f"{clipped(known.name, 60)} lost it: {reason}.")
            known.cause = ordered_end(reason) or known.cause
        self._close(known)
        return key

    def _begin(self, key: str, term: SeenTerm) -> None:
        terms = self.terms[key] = self.terms.pop(key, {})
        if term.token not in terms:
            terms[term.token] = term
            self._open.setdefault(term.lease or "", []).append((key, term))
        if len(terms) > 2 * TERMS:
            for token in sorted(terms)[:-TERMS]:
                self._close(terms.pop(token))
        if len(self.terms) > KEPT:
            for gone in self.terms.pop(next(iter(self.terms))).values():
                self._close(gone)

    def _lease_ended(self, line: dict[str, Any]) -> str | None:
        died, changed = line["cause"] == "died", None
        wall = _time(line, "wall")
        for key, term in self._open.pop(str(line["lease"]), ()):
            name = clipped(term.name, 60)
            if died:
                why = f"The process of {name} ended; the kernel reported it at once."
            else:
                why = f"No renewal by {name} reached the store in time; its lease ran out."
            self._end(term, wall, "died" if died else "expired", why)
            changed = key
        return changed

    @staticmethod
    def _end(term: SeenTerm, until: float, cause: Any, why: str) -> None:
        if term.until is None or until < term.until:
            term.until, term.cause, term.why = max(until, term.since), cause, why

    def _close(self, term: SeenTerm) -> None:
        """The end of its lease no longer matters for this term."""
        still = [each for each in self._open.pop(term.lease or "", ()) if each[1] is not term]
        if still:
            self._open[term.lease or ""] = still


def _time(line: dict[str, Any], name: str) -> float:
    value = finite(line[name])
    if value is None or not -LATEST_S < value < LATEST_S:
        raise ValueError(f"no usable {name}")
    return value


class GrowingLog:
    """Reads a file as it grows: what was added since the last time, whole lines only. A file that
    was replaced or cut is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0
        self._inode = 0
        self._in_long_line = False
        """The line at this place is longer than any event: it is damage, and passed over."""

    def lines(self) -> Iterator[bytes]:
        """The next lines, of one piece at most. Raises `OSError` if the file cannot be read."""
        with self.path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._inode or about.st_size < self._read:
                self._inode, self._read, self._in_long_line = about.st_ino, 0, False
            file.seek(self._read)
            piece = file.read(PIECE)
        whole, end, _ = piece.rpartition(b"\n")
        if not end and len(piece) == PIECE:
            self._in_long_line = True
            self._read += PIECE
            return
        self._read += len(whole) + len(end)
        lines = whole.split(b"\n") if end else []
        yield from lines[1:] if self._in_long_line else lines
        self._in_long_line = self._in_long_line and not end

    @property
    def more(self) -> bool:
        """Whether there is more to read at once."""
        try:
            return os.stat(self.path).st_size - self._read >= PIECE
        except OSError:
            return False


class AuditTrail:
    """Reads audit logs as they grow, and adds their terms to the rows of the board."""

    def __init__(
        self,
        paths: Sequence[Path],
        board: Board,
        *,
        readable: Callable[[str], None] = lambda part: None,
        failed: Callable[[str, Exception], None] = lambda part, error: None,
    ) -> None:
        """`readable` and `failed` are told whether each log can be read."""
        self._logs = [GrowingLog(path) for path in paths]
        self._board = board
        self._reader = TrailReader()
        self._pending: set[str] = set()
        self._readable = readable
        self._failed = failed

    async def run(self) -> None:
        while True:
            self.read()
            more = any(log.more for log in self._logs)
            await asyncio.sleep(0.01 if more else EVERY_S)

    def read(self) -> None:
        """Take in what was added to the files."""
        for log in self._logs:
            part = f"the audit log {clipped(str(log.path))}"
            try:
                for text in log.lines():
                    self._take(text)
            except OSError as error:
                self._failed(part, error)
            else:
                self._readable(part)
        for key in list(self._pending):
            self._show(key)

    def _take(self, text: bytes) -> None:
        try:
            line = json.loads(text)
            changed = self._reader.add(line) if isinstance(line, dict) else None
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
            return  # `doyen verify` reports lines that cannot be read
        if changed is not None:
            self._pending.add(changed)

    def _show(self, key: str) -> None:
        terms, row = self._reader.terms.get(key), self._board.rows.get(key)
        if row is None:
            if not terms:
                self._pending.discard(key)
            return
        self._pending.discard(key)
        if not terms:
            return
        if row.learn(terms.values()):
            self._board.row_changed(key)
        last = row.terms[-1] if row.terms else None
        newest = max(terms)
        if (
            last is None
            or last.token < newest
            or (last.until is None) != (terms[newest].until is None)
        ):
            self._pending.add(key)  # until the store shows what the log says
