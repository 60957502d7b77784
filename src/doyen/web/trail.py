"""Terms that others have recorded, for the timeline of a live page: in the trail that leaders leave
in the store, and in audit logs that are still being written.

Both say when a term began and ended, and why. An observer of the store only sees that a record is
there or gone.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from doyen.model import PastTerm
from doyen.web.board import Board
from doyen.web.terms import EndCause, SeenTerm, clipped

__all__ = ["AuditTrail", "TrailReader", "recorded_terms"]

EVERY_S = 0.5
PIECE = 4 << 20
"""How many bytes of a file are read at a time."""


def _ordered(reason: str) -> EndCause | None:
    """How a term ended by order, from its reason; None if there was no order.

    >>> _ordered("'ops' ordered it to let go"), _ordered("no renewal was confirmed in time")
    ('resigned', None)
    >>> _ordered("'ops' ordered it to let go in favour of another")
    'transferred'
    """
    if "ordered it to let go" not in reason:
        return None
    return "transferred" if "in favour of another" in reason else "resigned"


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
            ordered = _ordered(past.reason)
            lost = past.end == "lost" and not ordered
            term.cause = "lost" if lost else ordered or "let go"
            reason = f": {clipped(past.reason, 200)}" if past.reason else ""
            term.why = f"{name} {'lost it' if lost else 'let go'}{reason}."
        elif after is not None:
            term.until, term.cause = after.since, "expired"
            term.why = f"{name} recorded no end: it was killed, or could not reach the store."
        terms.append(term)
    return terms


class TrailReader:
    """Makes terms of the lines of audit logs."""

    def __init__(self) -> None:
        self.terms: dict[str, dict[int, SeenTerm]] = {}
        """By the key of the row, and by token."""
        self._by_lease: dict[str, list[tuple[str, SeenTerm]]] = {}
        self._deadlines: dict[str, float] = {}

    def add(self, line: dict[str, Any]) -> str | None:
        """Take in one line; returns the row that it changed, if any."""
        event = line.get("event")
        if event == "leaseended":
            return self._lease_ended(line)
        if event not in ("elected", "lost", "resigned"):
            return None
        key = f"{line.get('election_kind', 'elections')}/{line['election']}"
        terms = self.terms.setdefault(key, {})
        token, wall = int(line["token"]), float(line["wall"])
        if event == "elected":
            term = SeenTerm(str(line["name"]), token, wall, lease=str(line["lease"]))
            terms.setdefault(token, term)
            self._by_lease.setdefault(str(line["lease"]), []).append((key, terms[token]))
            return key
        known = terms.get(token)
        if known is None:
            return None
        if event == "resigned":
            self._end(known, wall, "let go", f"{clipped(known.name, 60)} resigned.")
        else:
            at, ended_at = float(line["at"]), float(line["ended_at"])
            reason = clipped(str(line.get("reason", "")), 200)
            wall -= max(0.0, at - ended_at) if ended_at > 0 else 0.0
            self._end(known, wall, "lost", f"{clipped(known.name, 60)} lost it: {reason}.")
            known.cause = _ordered(reason) or known.cause
        return key

    def _lease_ended(self, line: dict[str, Any]) -> str | None:
        died, changed = line["cause"] == "died", None
        for key, term in self._by_lease.get(str(line["lease"]), ()):
            if term.until is None:
                name = clipped(term.name, 60)
                if died:
                    why = f"The process of {name} ended; the kernel reported it at once."
                else:
                    why = f"No renewal by {name} reached the store in time; its lease ran out."
                self._end(term, float(line["wall"]), "died" if died else "expired", why)
                changed = key
        return changed

    @staticmethod
    def _end(term: SeenTerm, until: float, cause: Any, why: str) -> None:
        if term.until is None or until < term.until:
            term.until, term.cause, term.why = max(until, term.since), cause, why


class AuditTrail:
    """Reads audit logs as they grow, and adds their terms to the rows of the board."""

    def __init__(self, paths: Sequence[Path], board: Board) -> None:
        self._paths = paths
        self._board = board
        self._reader = TrailReader()
        self._read: dict[Path, int] = {}
        self._pending: set[str] = set()

    async def run(self) -> None:
        while True:
            self.read()
            await asyncio.sleep(EVERY_S)

    def read(self) -> None:
        """Take in what was added to the files."""
        for path in self._paths:
            for line in self._lines(path):
                try:
                    changed = self._reader.add(line)
                except (KeyError, TypeError, ValueError):
                    continue  # `doyen verify` reports lines that cannot be read
                if changed is not None:
                    self._pending.add(changed)
        for key in list(self._pending):
            row = self._board.rows.get(key)
            if row is None:
                continue
            self._pending.discard(key)
            terms = self._reader.terms[key]
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

    def _lines(self, path: Path) -> list[dict[str, Any]]:
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, end, _ = file.read(PIECE).rpartition(b"\n")
        except OSError:
            return []
        self._read[path] = self._read.get(path, 0) + len(whole) + len(end)
        found = []
        for text in whole.splitlines():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                found.append(line)
        return found
