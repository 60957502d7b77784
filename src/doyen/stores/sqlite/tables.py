"""The tables, and the operations of a transaction on them.

Every write increments one counter in the same transaction, so revisions, and with them the tokens
of leader records, only grow, across releases and restarts. The keys of tickets sort in the order of
their line.

After a crash of the machine no candidate is left, and the leases of all of them have ended. So of
an election only the numbers must outlive it, and no commit of an election waits for the disk:

- The counter has a *ceiling*, which is on disk. No number above it is ever confirmed. A transaction
  that would cross it is repeated as one that is on disk before it is confirmed, and raises the
  ceiling by `BLOCK`.
- Commits that are not on disk yet can be lost only from the end of the log, and only in a crash of
  the machine, or of its disk. No handle outlives that. So a handle counts on from the counter if
  another handle is alive when it opens, and otherwise from the ceiling.

The last handle that is closed lowers the ceiling to the counter, so that no numbers are skipped.

A writer notifies the watchers of a key *before* the commit: a writer that is killed at any instant
has then either notified them or changed nothing. The watchers read after acquiring the write lock
themselves, which is after the commit or its failure.

An operation is one method of `Transaction`. Many operations share a transaction. One that fails
leaves only effects that are correct by themselves (a skipped number, removed rows of an ended
lease), so the others proceed. Used on the database thread only.
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from doyen.errors import ConfigError, TicketGone
from doyen.model import Entry, Version
from doyen.stores.kit.lifecycle import lease_gone
from doyen.stores.port import Creation, Looked
from doyen.stores.sqlite.inbox import Inbox
from doyen.stores.sqlite.leases import LeaseFileVerdict, LocalLeases
from doyen.stores.sqlite.location import translate_os

__all__ = [
    "APPLICATION_ID",
    "MIGRATION",
    "SCHEMA",
    "SCHEMA_VERSION",
    "DurableNeeded",
    "Handle",
    "HandleChanges",
    "Transaction",
    "WriteNeeded",
]

APPLICATION_ID = 0x446F7965
SCHEMA_VERSION = 2
BLOCK = 1000
"""How many numbers are reserved on disk at a time."""
_COUNTER = (
    "CREATE TABLE counter (only INTEGER PRIMARY KEY CHECK (only = 1), revision INTEGER NOT NULL,"
    " ceiling INTEGER NOT NULL)"
)
_VERSION = f"PRAGMA user_version = {SCHEMA_VERSION}"
SCHEMA = (
    _COUNTER,
    "INSERT INTO counter VALUES (1, 0, 0)",
    "CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL,"
    " version INTEGER NOT NULL, lease TEXT) WITHOUT ROWID",
    "CREATE INDEX entries_by_lease ON entries (lease) WHERE lease IS NOT NULL",
    "CREATE TABLE watches (scope TEXT, inbox TEXT, tag INTEGER NOT NULL,"
    " PRIMARY KEY (scope, inbox)) WITHOUT ROWID",
    "CREATE INDEX watches_by_inbox ON watches (inbox, tag)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    _VERSION,
)
MIGRATION = (
    _COUNTER,
    "INSERT INTO counter SELECT 1, revision, revision FROM meta",
    # An earlier version of doyen that still runs would count on without a ceiling. Now it fails.
    "DROP TABLE meta",
    _VERSION,
)
"""From version 1, which had no ceiling."""

_ENTRY = "SELECT key, value, revision, version, lease FROM entries "
_AT_ONCE = 48
_WATCHING = f"SELECT inbox, tag, scope FROM watches WHERE scope IN ({','.join('?' * _AT_ONCE)})"
_MANY = 200
_SOME = (
    "SELECT count(*) FROM"
    f" (SELECT 1 FROM entries WHERE key > ? AND key < ? AND lease IS NOT NULL LIMIT {_MANY})"
)
_OF_ENTRIES = "SELECT lease FROM entries WHERE key > ? AND key < ? AND lease IS NOT NULL"
_OF_EACH = (
    "SELECT lease FROM (WITH RECURSIVE each(lease) AS (SELECT min(lease) FROM entries WHERE lease"
    " IS NOT NULL UNION ALL SELECT (SELECT min(lease) FROM entries WHERE lease > each.lease)"
    " FROM each WHERE lease IS NOT NULL) SELECT lease FROM each) AS owner WHERE EXISTS (SELECT 1"
    " FROM entries WHERE lease = owner.lease AND key > ? AND key < ?)"
)
"""The leases of entries under a prefix: of each entry, or each lease that has one. The index of
leases contains the keys, so the latter takes a few steps for each lease."""
_RANKS = 1 << 31

Send = Callable[[str, Iterable[int]], bool]
"""Tell an inbox that scopes with these tags change; False if no process reads it any more."""


class WriteNeeded(Exception):
    """A read came upon an ended lease, whose rows are to be removed under the write lock."""


class DurableNeeded(Exception):
    """The transaction needs a number above the ceiling."""


class Handle(Protocol):
    """The handle that an operation belongs to."""

    leases: LocalLeases
    inbox: Inbox
    stale: deque[int]
    """Tags of watches that were closed."""
    deliver: Callable[[HandleChanges], None]


class HandleChanges:
    """What a transaction changes for one handle."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.touched: dict[int, str] = {}
        """The scopes of the handle in which something changed, by tag."""
        self.owners: dict[int, frozenset[str]] = {}
        """By tag, the leases that something in the scope is bound to, as of this transaction."""
        self.reread: dict[int, str] = {}
        """Scopes of the handle whose watchers were notified already."""
        self.verdicts: dict[str, LeaseFileVerdict] = {}


class Transaction:
    """One transaction, under way. Its operations may belong to several handles."""

    def __init__(
        self,
        execute: Callable[..., sqlite3.Cursor],
        *,
        writable: bool,
        durable: bool = False,
        seen: int = 0,
    ) -> None:
        """`durable`: the commit is on disk before it is confirmed. `seen` is the latest number that
        this process has seen."""
        self._execute = execute
        self._durable = durable
        self._seen = seen
        self._writable = writable
        self._current: HandleChanges
        self.changes: dict[str, HandleChanges] = {}
        """What it changes for each handle of this process that it concerns, by inbox."""
        self._owners_of: dict[str, frozenset[str]] = {}
        self._alive: dict[str, LeaseFileVerdict] = {}
        """Verdicts that are the same for all handles."""
        self._revision: int | None = None
        self._ceiling = 0
        self._counted = False
        self._changed: set[str] = set()

    def act_for(self, handle: Handle) -> None:
        """The operations that follow belong to this handle."""
        self._current = self._changes_of(handle)

    def _changes_of(self, handle: Handle) -> HandleChanges:
        changes = self.changes.get(handle.inbox.name)
        if changes is None:
            changes = self.changes[handle.inbox.name] = HandleChanges(handle)
        return changes

    @property
    def _leases(self) -> LocalLeases:
        return self._current.handle.leases

    @property
    def _inbox(self) -> str:
        return self._current.handle.inbox.name

    def get(self, key: str) -> Entry | None:
        row = self._execute(_ENTRY + "WHERE key = ?", (key,)).fetchone()
        return None if row is None else self._live(row)

    def list(self, prefix: str) -> list[Entry]:
        rows = self._execute(_ENTRY + "WHERE key > ? AND key < ? ORDER BY key", _under(prefix))
        return [entry for row in rows.fetchall() if (entry := self._live(row)) is not None]

    def ahead(self, key: str) -> Entry | None:
        if self.get(key) is None:
            raise TicketGone(f"the ticket {key} is no longer in the line")
        query = _ENTRY + "WHERE key > ? AND key < ? ORDER BY key DESC LIMIT 1"
        first = key.rpartition("/")[0] + "/"
        while (row := self._execute(query, (first, key)).fetchone()) is not None:
            entry = self._live(row)
            if entry is not None:
                return entry
            key = row[0]
        return None

    def create(self, key: str, value: bytes, lease: str) -> Creation:
        remaining_s = self._require(lease)
        present = self.get(key)
        if present is not None:
            return Creation(False, present)
        revision = self._next()
        return Creation(True, self._insert(key, value, revision, revision, lease, remaining_s))

    def create_and_look(
        self, key: str, value: bytes, lease: str, ticket: str | None, other: str
    ) -> Looked:
        creation = self.create(key, value, lease)
        try:
            ahead = None if ticket is None else self.ahead(ticket)
            return Looked(creation, ahead, self.get(other))
        except TicketGone as error:
            return Looked(creation, failure=error)
        except OSError as error:  # a lease could not be judged; the record stands all the same
            return Looked(creation, failure=translate_os(error, key))

    def enqueue(self, line: str, value: bytes, lease: str, rank: int) -> Entry:
        if not -_RANKS < rank < _RANKS:
            raise ConfigError(f"a rank is between {-_RANKS + 1} and {_RANKS - 1}, not {rank}")
        remaining_s = self._require(lease)
        revision = self._next()
        # The lease's id keeps the key unique even if a power cut takes back the number.
        key = f"{line}/{_RANKS - rank:08x}-{revision:016x}-{lease}"
        return self._insert(key, value, revision, revision, lease, remaining_s)

    def put(self, key: str, value: bytes, if_version: Version | None) -> Entry | None:
        present = self.get(key)
        if (None if present is None else present.version) != if_version:
            return None
        version = self._next()
        revision = version if present is None else present.revision
        return self._insert(key, value, revision, version, None, None)

    def update(self, entry: Entry, value: bytes) -> Entry | None:
        present = self.get(entry.key)
        if present is None or present.lease is None or present.version != entry.version:
            return None
        _, _, revision, _, lease, remaining_s = present
        return self._insert(entry.key, value, revision, self._next(), lease, remaining_s)

    def delete(self, key: str, if_version: Version | None) -> bool:
        present = self.get(key)
        if present is None or if_version not in (None, present.version):
            return False
        self._execute("DELETE FROM entries WHERE key = ?", (key,))
        self._changed.add(key)
        return True

    def remove(self, lease: str) -> None:
        """Remove every row of a lease that has ended."""
        bound = self._execute("SELECT key FROM entries WHERE lease = ?", (lease,)).fetchall()
        if bound and not self._writable:
            raise WriteNeeded
        if bound:
            self._execute("DELETE FROM entries WHERE lease = ?", (lease,))
            self._changed.update(key for (key,) in bound)

    def watch(self, scope: str, tag: int) -> None:
        self._execute("INSERT OR REPLACE INTO watches VALUES (?, ?, ?)", (scope, self._inbox, tag))
        self._current.owners[tag] = self._owners(scope)

    def refresh(self, scopes: Mapping[int, str], *, notify: bool) -> None:
        """Something may have changed in these scopes of this handle."""
        (self._current.touched if notify else self._current.reread).update(scopes)

    def finish(self, handles: Mapping[str, Handle]) -> None:
        """Settle everything that goes with the changes; the commit is to follow at once. `handles`
        are those that get what concerns them after the commit, by inbox: others are notified
        now."""
        if self._durable:
            self.reserve()
        if self._revision is not None:
            counter = (self._revision, self._ceiling)
            self._execute("UPDATE counter SET revision = ?, ceiling = ?", counter)
        for inbox, changes in self.changes.items():
            while changes.handle.stale:
                own = (inbox, changes.handle.stale.popleft())
                self._execute("DELETE FROM watches WHERE inbox = ? AND tag = ?", own)
        others: dict[str, set[int]] = {}
        for inbox, tag, scope in self._watching():
            if (handle := handles.get(inbox)) is not None:
                self._changes_of(handle).touched[tag] = scope
            else:
                others.setdefault(inbox, set()).add(tag)
        for inbox, tags in others.items():
            if not self._current.handle.inbox.send(inbox, tags):
                self._execute("DELETE FROM watches WHERE inbox = ?", (inbox,))
        self._owners_of.clear()  # as of before the last operation
        for changes in self.changes.values():
            for tag, scope in (changes.reread | changes.touched).items():
                changes.owners[tag] = self._owners(scope)

    def leases(self) -> set[str]:
        """Every lease that a row is bound to."""
        rows = self._execute("SELECT DISTINCT lease FROM entries WHERE lease IS NOT NULL")
        return {lease for (lease,) in rows}

    def journal(self) -> str:
        """SQLite's journal mode."""
        return str(self._execute("PRAGMA journal_mode").fetchone()[0])

    def drop_inbox(self, inbox: str, send: Send) -> None:
        """Remove an inbox, and its watches, if it has no reader."""
        if not self._writable:
            raise WriteNeeded
        if not send(inbox, ()):
            self._execute("DELETE FROM watches WHERE inbox = ?", (inbox,))

    def unwatch_all(self) -> None:
        """Remove all watches of this handle."""
        self._execute("DELETE FROM watches WHERE inbox = ?", (self._inbox,))

    def raise_revision(self, floor: int) -> None:
        self._revision = max(self._latest(), floor)
        self._ceiling = max(self._ceiling, self._revision)

    def reserve(self) -> None:
        """In a durable transaction: raise the ceiling if half of the last block is used."""
        latest = self._latest()
        if self._ceiling - latest < BLOCK // 2:
            self._revision, self._ceiling = latest, latest + BLOCK

    def begin_at_ceiling(self) -> None:
        """No other handle is alive, so the last numbers may have been lost: skip them."""
        latest = self._latest()
        if latest < self._ceiling:
            self._revision = self._ceiling

    def give_back(self, alone: Callable[[], bool]) -> None:
        """Numbers that nobody has need not be skipped if no other handle is alive."""
        latest = self._latest()
        if latest < self._ceiling and alone():
            if not self._writable:
                raise WriteNeeded
            self._revision = self._ceiling = latest

    @property
    def latest(self) -> int | None:
        """The last number that this transaction used or saw, if it looked."""
        return self._revision

    @property
    def is_low(self) -> bool:
        """Whether half of the reserved numbers are used, and this transaction used some."""
        return self._counted and self._ceiling - (self._revision or 0) < BLOCK // 2

    def _live(self, row: tuple[Any, ...]) -> Entry | None:
        """The entry in a row; None if its lease has ended. Then a handle that takes part removes
        all rows of the lease."""
        key, value, revision, version, lease = row
        if lease is None:
            return Entry(key, value, revision, version)
        verdict = self._judge(lease)
        if verdict.ended:
            if not self._leases.looks_only:
                self.remove(lease)
            return None
        return Entry(key, value, revision, version, lease, verdict.remaining_s)

    def _judge(self, lease: str) -> LeaseFileVerdict:
        verdicts = self._current.verdicts
        verdict = self._alive.get(lease) or verdicts.get(lease)
        if verdict is None:
            verdict = verdicts[lease] = self._leases.judge(lease)
            if not verdict.ended and verdict.remaining_s is not None:
                self._alive[lease] = verdict
        return verdict

    def _require(self, lease: str) -> float | None:
        verdict = self._judge(lease)
        if verdict.ended:
            raise lease_gone(lease)
        return verdict.remaining_s

    def _insert(
        self,
        key: str,
        value: bytes,
        revision: int,
        version: int,
        lease: str | None,
        remaining_s: float | None,
    ) -> Entry:
        self._execute(
            "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)",
            (key, value, revision, version, lease),
        )
        self._changed.add(key)
        return Entry(key, value, revision, version, lease, remaining_s)

    def _latest(self) -> int:
        if self._revision is None:
            latest, self._ceiling = self._execute(
                "SELECT revision, ceiling FROM counter"
            ).fetchone()
            # A disk that has lost writes without a crash of the machine.
            return int(latest) if latest >= self._seen else max(self._ceiling, self._seen)
        return self._revision

    def _next(self) -> int:
        following = self._latest() + 1
        if following > self._ceiling:
            if not self._durable:
                raise DurableNeeded
            self._ceiling = following + BLOCK - 1
        self._revision = following
        self._counted = True
        return following

    def _owners(self, scope: str) -> frozenset[str]:
        found = self._owners_of.get(scope)
        if found is None:
            found = self._owners_of[scope] = self._read_owners(scope)
        return found

    def _read_owners(self, scope: str) -> frozenset[str]:
        query = "SELECT lease FROM entries WHERE key = ? AND lease IS NOT NULL UNION "
        query += _OF_EACH if self._are_many(scope) else _OF_ENTRIES
        return frozenset(lease for (lease,) in self._execute(query, (scope, *_under(scope))))

    def _are_many(self, scope: str) -> bool:
        """Whether a scope has so many entries that it is better to go through all leases."""
        (number,) = self._execute(_SOME, _under(scope)).fetchone()
        return int(number) == _MANY

    def _watching(self) -> Iterable[tuple[str, int, str]]:
        """The watches of changed keys and of the scopes that contain them."""
        scopes: dict[str, None] = {}
        for key in self._changed:
            path = key
            while path:
                scopes[path] = None
                path = path.rpartition("/")[0]
        asked = [*scopes]
        for start in range(0, len(asked), _AT_ONCE):
            some: list[str | None] = [*asked[start : start + _AT_ONCE]]
            some += [None] * (_AT_ONCE - len(some))
            yield from self._execute(_WATCHING, some).fetchall()


def _under(prefix: str) -> tuple[str, str]:
    """The bounds of the keys that begin with `prefix` and a `/`; "0" follows "/" in ASCII."""
    return prefix + "/", prefix + "0"
