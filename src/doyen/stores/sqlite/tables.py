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
themselves, which is after the commit or its failure. A transaction that only deletes or updates
entries of the writer's own leases notifies after it, so that no watcher wakes only to wait for the
commit: if the writer is killed in between, the end of its lease notifies the watchers of these
entries. It would not notify those of an entry that was created, as they do not monitor its lease
before they have been notified of it.

An operation is one method of `Transaction`. Many operations share a transaction. One that fails
leaves only effects that are correct by themselves (a skipped number, removed rows of an ended
lease), so the others proceed. One thread uses them at a time.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
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
    "TooLong",
    "Transaction",
    "WriteNeeded",
]

APPLICATION_ID = 0x446F7965
SCHEMA_VERSION = 2
BLOCK = 10_000
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
_WATCHING = [
    f"SELECT inbox, tag, scope FROM watches WHERE scope IN ({','.join('?' * number)})"
    for number in range(_AT_ONCE + 1)
]
"""The query for the watches of scopes, by their number."""
_MANY = 200
_AT = "SELECT lease FROM entries WHERE key = ? AND lease IS NOT NULL UNION "
_OF_ENTRIES = (
    f"{_AT}ALL SELECT lease FROM (SELECT lease FROM entries WHERE key > ? AND key < ?"
    f" AND lease IS NOT NULL LIMIT {_MANY})"
)
_OF_EACH = (
    f"{_AT}SELECT lease FROM (WITH RECURSIVE each(lease) AS (SELECT min(lease) FROM entries WHERE"
    " lease IS NOT NULL UNION ALL SELECT (SELECT min(lease) FROM entries WHERE lease > each.lease)"
    " FROM each WHERE lease IS NOT NULL) SELECT lease FROM each) AS owner WHERE EXISTS (SELECT 1"
    " FROM entries WHERE lease = owner.lease AND key > ? AND key < ?)"
)
"""The leases of an entry and of the entries under it: found by going through these entries, up to
`_MANY`, or by going through all leases. The index of leases contains the keys, so the latter takes
a few steps for each lease."""
_FEW = 32
"""How many rows or processes of one kind a brief transaction has to do with at most."""
_RANKS = 1 << 31

Send = Callable[[str, Iterable[int]], bool]
"""Tell an inbox that scopes with these tags change; False if no process reads it any more."""


class WriteNeeded(Exception):
    """A read came upon an ended lease, whose rows are to be removed under the write lock."""


class DurableNeeded(Exception):
    """The transaction needs a number above the ceiling."""


class TooLong(Exception):
    """The transaction was to be brief, and has more to do."""


class Handle(Protocol):
    """The handle that an operation belongs to."""

    leases: LocalLeases
    inbox: Inbox
    stale: set[int]
    """Tags of watches that were closed."""
    carrying: frozenset[int]
    """Tags of scopes whose entry is read for their watchers."""
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
        self.carried: dict[int, Entry] = {}
        """By tag, the entries that are read for their watchers, as of this transaction."""
        self.verdicts: dict[str, LeaseFileVerdict] = {}
        self.dropped: list[int] = []
        """Tags of closed watches whose rows it deletes."""


class Transaction:
    """One transaction, under way. Its operations may belong to several handles."""

    def __init__(
        self,
        execute: Callable[..., sqlite3.Cursor],
        *,
        writable: bool,
        durable: bool = False,
        brief: bool = False,
        seen: int = 0,
    ) -> None:
        """`durable`: the commit is on disk before it is confirmed. `brief`: raise `TooLong` if it
        has to do with many rows. `seen` is the latest number that this process has seen."""
        self._execute = execute
        self._durable = durable
        self._brief = brief
        self._seen = seen
        self._writable = writable
        self._current: HandleChanges
        self.changes: dict[str, HandleChanges] = {}
        """What it changes for each handle of this process that it concerns, by inbox."""
        self._owners_of: dict[str, frozenset[str]] = {}
        self._unbound: dict[str, Entry | None] = {}
        self._alive: dict[str, LeaseFileVerdict] = {}
        """Verdicts that are the same for all handles."""
        self._revision: int | None = None
        self._ceiling = 0
        self._counted = False
        self._changed: set[str] = set()
        self._is_own = True
        """Nothing changes but entries that are bound to leases of this process, and none is
        created."""
        self._reached: list[tuple[int, set[int]]] = []
        """The inboxes to notify after the commit, and of which scopes."""
        self.readerless: list[str] = []
        """Inboxes without a reader, which a brief transaction leaves to another."""
        self._dead: set[str] = set()
        """Ended leases whose rows it has come upon."""

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
        query = _ENTRY + "WHERE key > ? AND key <= ? ORDER BY key DESC LIMIT 2"
        first = key.rpartition("/")[0] + "/"
        own, *before = self._execute(query, (first, key)).fetchall() or [(None,)]
        if own[0] != key or self._live(own) is None:
            raise TicketGone(f"the ticket {key} is no longer in the line")
        query = _ENTRY + "WHERE key > ? AND key < ? ORDER BY key DESC LIMIT 1"
        row = before[0] if before else None
        while row is not None and (entry := self._live(row)) is None:
            row = self._execute(query, (first, row[0])).fetchone()
        return None if row is None else entry

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
        except OSError as error:  # a lease could not be judged; the record was created
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
        self._change(key, present.lease)
        return True

    def delete_own(self, entries: Iterable[Entry]) -> bool:
        """Delete these entries by their versions. They are bound to leases of this process."""
        for key, _, _, version, lease, _ in entries:
            deletion = "DELETE FROM entries WHERE key = ? AND version = ?"
            if self._execute(deletion, (key, version)).rowcount:
                self._change(key, lease)
        return True

    def remove(self, lease: str) -> None:
        """Remove every row of a lease that has ended."""
        rows = self._execute("SELECT key FROM entries WHERE lease = ?", (lease,))
        if self._brief:
            self._require_few(bound := rows.fetchmany(_FEW + 1))
        else:
            bound = rows.fetchall()
        if bound and not self._writable:
            raise WriteNeeded
        if bound:
            self._execute("DELETE FROM entries WHERE lease = ?", (lease,))
            for (key,) in bound:
                self._change(key, lease)

    def _require_few(self, rows: Sized) -> None:
        if self._brief and len(rows) > _FEW:
            raise TooLong

    def watch(self, scope: str, tag: int) -> None:
        self._execute("INSERT OR REPLACE INTO watches VALUES (?, ?, ?)", (scope, self._inbox, tag))
        self._current.owners[tag] = self._owners(scope)

    def refresh(self, scopes: Mapping[int, str], *, notify: bool) -> None:
        """Something may have changed in these scopes of this handle."""
        (self._current.touched if notify else self._current.reread).update(scopes)

    def finish(self, handles: Mapping[str, Handle]) -> None:
        """Settle everything that goes with the changes; the commit is to follow at once, and then
        `notify`. `handles` are those that get what concerns them after the commit, by inbox."""
        if self._durable:
            self.reserve()
        if self._revision is not None:
            counter = (self._revision, self._ceiling)
            self._execute("UPDATE counter SET revision = ?, ceiling = ?", counter)
        for inbox, changes in self.changes.items():
            self._require_few(changes.handle.stale)
            while changes.handle.stale:
                changes.dropped.append(tag := changes.handle.stale.pop())
                self._execute("DELETE FROM watches WHERE inbox = ? AND tag = ?", (inbox, tag))
        others: dict[str, set[int]] = {}
        for inbox, tag, scope in self._watching():
            if (handle := handles.get(inbox)) is not None:
                self._changes_of(handle).touched[tag] = scope
            else:
                others.setdefault(inbox, set()).add(tag)
        self._owners_of.clear()  # as of before the last operation
        for changes in self.changes.values():
            self._require_few(changed := changes.reread | changes.touched)
            for tag, scope in changed.items():
                changes.owners[tag] = self._owners(scope)
                if tag in changes.handle.carrying and (entry := self._unbound_entry(scope)):
                    changes.carried[tag] = entry
        self._require_few(others)
        after = self._is_own and len(others) <= _FEW
        for inbox, tags in others.items():
            if not (self._reach(inbox, tags) if after else self._send(inbox, tags)):
                if self._brief:
                    self.readerless.append(inbox)
                else:
                    self._drop_watches(inbox)

    def _send(self, inbox: str, tags: set[int]) -> bool:
        return self._current.handle.inbox.send(inbox, tags)

    def _reach(self, inbox: str, tags: set[int]) -> bool:
        """Prepare a notification. What can fail is done before the commit."""
        fd = self._current.handle.inbox.reach(inbox)
        if fd is not None:
            self._reached.append((fd, tags))
        return fd is not None

    def notify(self, *, committed: bool) -> None:
        """Notify those watchers of other processes that were not notified before the commit. If
        there was no commit, the rows of closed watches are left to the next transaction."""
        for fd, tags in self._reached:
            with suppress(OSError):  # whatever it is, the outcome of the transaction is known
                Inbox.write(fd, tags if committed else ())
        self._reached.clear()
        for changes in () if committed else self.changes.values():
            changes.handle.stale.update(changes.dropped)

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
            self._drop_watches(inbox)

    def _drop_watches(self, inbox: str) -> None:
        """Remove the watches of an inbox without a reader, and then the inbox."""
        self._execute("DELETE FROM watches WHERE inbox = ?", (inbox,))
        self._current.handle.inbox.discard(inbox)

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
        """Numbers that were not issued need not be skipped if no other handle is alive."""
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
            self._dead.add(lease)
            self._require_few(self._dead)
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
        self._change(key, lease)
        self._is_own = self._is_own and revision != version  # else it is created
        return Entry(key, value, revision, version, lease, remaining_s)

    def _change(self, key: str, lease: str | None) -> None:
        self._changed.add(key)
        self._is_own = self._is_own and lease is not None and self._leases.holds(lease)

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

    def _unbound_entry(self, key: str) -> Entry | None:
        """The entry at a key, unless it is bound to a lease, which each handle judges itself."""
        if key not in self._unbound:
            row = self._execute(_ENTRY + "WHERE key = ? AND lease IS NULL", (key,)).fetchone()
            self._unbound[key] = None if row is None else Entry(*row)
        return self._unbound[key]

    def _owners(self, scope: str) -> frozenset[str]:
        found = self._owners_of.get(scope)
        if found is None:
            found = self._owners_of[scope] = self._read_owners(scope)
        return found

    def _read_owners(self, scope: str) -> frozenset[str]:
        found = self._execute(_OF_ENTRIES, (scope, *_under(scope))).fetchall()
        if self._are_many(found):
            if self._brief:
                raise TooLong
            found = self._execute(_OF_EACH, (scope, *_under(scope))).fetchall()
        return frozenset(lease for (lease,) in found)

    def _are_many(self, found: Sized) -> bool:
        """Whether a scope has so many entries that it is better to go through all leases."""
        return len(found) >= _MANY

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
            some = asked[start : start + _AT_ONCE]
            yield from self._execute(_WATCHING[len(some)], some).fetchall()


def _under(prefix: str) -> tuple[str, str]:
    """The bounds of the keys that begin with `prefix` and a `/`; "0" follows "/" in ASCII."""
    return prefix + "/", prefix + "0"
