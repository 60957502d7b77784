"""The tables, and the statements on them: the Store port in SQL that both engines understand.

    meta     one row: the layout of the tables, and the counter that numbers all changes
    leases   id, ttl, renewal counter, and when that last changed by the database's clock
    entries  path (the primary key), value, revision, version, lease; tickets sort as their line
    changes  the paths that have changed recently, for clients without notifications

A read that finds an expired lease ends it and reads again, so no method returns an entry whose
lease has ended. Each end is a transaction of its own. `create` reads before it advances the
counter, so that a candidate that is refused does not make other transactions wait;
`create_and_look` is called by the next in line, which is rarely refused. Deletions that are
requested together are one transaction, so a handover takes two: one that frees, one that takes.

Imports the port, the model, the kit of the stores and its own package.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence

from doyen.errors import ConfigError, StoreError, StoreUnusable
from doyen.events import LeaseEnded
from doyen.model import Entry, Lease, Version
from doyen.stores.kit.batches import Batches, one_by_one
from doyen.stores.kit.expiry import LeaseRow
from doyen.stores.kit.lifecycle import GuardedStore, ahead_of, lease_gone
from doyen.stores.kit.observer import LeaseObserver, Survey
from doyen.stores.port import Capabilities, Context, Creation, Looked, Watch
from doyen.stores.sql.connection import Given, Row, SqlConnection, text_of

__all__ = ["KEPT", "LAYOUT", "RelationalStore", "check_layout", "is_ticket"]

LAYOUT = 1
_RANKS = 1 << 31
_PATH_BYTES = 1024
_SWEPT = 64
"""How many leases that may have expired are observed when a store is opened."""
_GONE = -1
"""The counter of a lease whose row does not exist. Entries that are bound to it are void."""
KEPT = 1000
"""For how many positions the changed paths are kept."""
_AT_ONCE = 50
"""How many scopes are surveyed in one query."""
_DELETED_AT_ONCE = 50


_LEASE = "l.ttl_us, l.counter, {clock} - l.renewed_us, {incarnation}"
_ENTRY = f"e.path, e.value, e.revision, e.version, e.lease, {_LEASE}"
_FROM = "FROM {entries} e LEFT JOIN {leases} l ON l.id = e.lease "
_NUMBER = "UPDATE {meta} SET {numbering}, position = position + 1; "
_IS_FREE = "NOT EXISTS (SELECT 1 FROM {entries} WHERE path = %(path)s)"
_IS_OVER = "([pairs]) AND {incarnation} = %(incarnation)s"
_REMAINING = "SELECT id FROM {leases} WHERE id IN ([leases])"
_PRESENT = (
    f"SELECT {_ENTRY}, m.revision, o.id FROM {{meta}} m"
    " LEFT JOIN {entries} e ON e.path = %(path)s LEFT JOIN {leases} l ON l.id = e.lease"
    " LEFT JOIN {leases} o ON o.id = %(lease)s"
)
_INTO = "INSERT INTO {entries} (path, value, revision, version, lease) SELECT "
_TICKET = "CONCAT(%(line)s, LPAD(CONCAT(m.revision), 20, '0'))"
_TICKET_NAME = re.compile(r"/[0-9a-f]{8}-[0-9]{20}$")
_UNDER = "e.path > %(first)s AND e.path < %(last)s"
_LOOK = f"SELECT l.id, {_LEASE} FROM {{leases}} l WHERE l.id IN "
_SURVEY = (
    "SELECT DISTINCT {number}, e.lease FROM {entries} e WHERE e.lease IS NOT NULL"
    " AND (e.path = %(scope{number})s"
    " OR (e.path > %(first{number})s AND e.path < %(last{number})s))"
)


def _statements(*, logs: bool) -> dict[str, str]:
    """The statements; with `logs`, they also log the paths that they change."""

    def log(which: str) -> str:
        if not logs:
            return ""
        return (
            "INSERT INTO {changes} (position, path) SELECT m.position, e.path"
            f" FROM {{meta}} m, {{entries}} e WHERE {which};"
            f" DELETE FROM {{changes}} WHERE position < (SELECT position FROM {{meta}}) - {KEPT}; "
        )

    made = log("e.path = %(path)s AND e.version = m.revision")
    create = (
        f"{_NUMBER}{_INTO}%(path)s, %(value)s, m.revision, m.revision, o.id"
        f" FROM {{meta}} m, {{leases}} o WHERE o.id = %(lease)s AND {_IS_FREE}; {made}{_PRESENT}"
    )
    ahead = (
        f"SELECT {_ENTRY} {_FROM}WHERE e.path > %(first)s AND e.path <= %(ticket)s"
        " ORDER BY e.path DESC LIMIT 2"
    )
    return {
        "grant": "INSERT INTO {leases} (id, ttl_us, counter, renewed_us)"
        " VALUES (%(lease)s, %(ttl_us)s, 0, {clock})",
        "renew": "UPDATE {leases} SET counter = counter + 1, renewed_us = {clock}"
        " WHERE id = %(lease)s;"
        f" SELECT l.id, {_LEASE} FROM {{leases}} l WHERE l.id = %(lease)s",
        "revoke": f"{_NUMBER}{log('e.lease = %(lease)s')}"
        "DELETE FROM {entries} WHERE lease = %(lease)s; DELETE FROM {leases} WHERE id = %(lease)s",
        # The leases are locked and deleted first: a concurrent renewal waits, and finds none.
        "expire": f"{_NUMBER}SELECT id FROM {{leases}} WHERE {_IS_OVER} FOR UPDATE;"
        f" DELETE FROM {{leases}} WHERE {_IS_OVER};"
        f" {log(f'e.lease IN ([leases]) AND e.lease NOT IN ({_REMAINING})')}"
        f"DELETE FROM {{entries}} WHERE lease IN ([leases]) AND lease NOT IN ({_REMAINING})",
        "present": _PRESENT,
        "create": create,
        "put": f"{_NUMBER}{_INTO}%(path)s, %(value)s, m.revision, m.revision, NULL"
        f" FROM {{meta}} m WHERE {_IS_FREE}; {made}{_PRESENT}",
        "replace": f"{_NUMBER}UPDATE {{entries}} SET value = %(value)s, lease = NULL,"
        " version = (SELECT revision FROM {meta}) WHERE path = %(path)s AND version = %(version)s;"
        f" {made}{_PRESENT}",
        "update": f"{_NUMBER}UPDATE {{entries}} SET value = %(value)s,"
        " version = (SELECT revision FROM {meta}) WHERE path = %(path)s AND version = %(version)s"
        " AND lease IS NOT NULL;"
        f" {made}{_PRESENT}",
        "delete": f"{_NUMBER}SELECT path FROM {{entries}} WHERE [those]; {log('[those]')}"
        "DELETE FROM {entries} WHERE [those]",
        "enqueue": f"{_NUMBER}{_INTO}{_TICKET}, %(value)s, m.revision, m.revision, o.id"
        " FROM {meta} m, {leases} o WHERE o.id = %(lease)s;"
        f" {log(f'e.path = {_TICKET}')}{{hold}}"
        f"SELECT {_ENTRY} FROM {{meta}} m JOIN {{entries}} e ON e.path = {_TICKET}"
        " JOIN {leases} l ON l.id = e.lease",
        "get": f"SELECT {_ENTRY} {_FROM}WHERE e.path = %(path)s",
        "create and look": f"{create}; {ahead}; SELECT {_ENTRY} {_FROM}WHERE e.path = %(other)s",
        "list": f"SELECT {_ENTRY} {_FROM}WHERE {_UNDER} ORDER BY e.path",
        "head": f"SELECT {_ENTRY} {_FROM}WHERE {_UNDER} ORDER BY e.path LIMIT 1",
        "ahead": ahead,
        "position": "SELECT position FROM {meta}",
        "changes": "SELECT m.position, c.path FROM {meta} m"
        " LEFT JOIN {changes} c ON c.position > %(since)s",
        "raise": "UPDATE {meta} SET revision = GREATEST(revision, %(floor)s)",
        "stale": f"SELECT l.id, {_LEASE} FROM {{leases}} l"
        f" WHERE {{clock}} - l.renewed_us NOT BETWEEN 0 AND l.ttl_us LIMIT {_SWEPT}",
    }


class RelationalStore(GuardedStore):
    """One handle on the tables. Subclasses connect, and diagnose the server.

    The `dialect` has the parts of the statements that differ between engines: the names of the four
    tables; `clock`, microseconds of the database's clock; `numbering`, assignments that advance the
    counter in `meta`; `incarnation`, which differs if a server may have lost what an earlier one
    confirmed. With `logs`, the statements log changes. Otherwise a trigger does. The dialect may
    also have `hold`, executed when a ticket was created; `ring`, when one is about to be deleted;
    `ring_all`, when all tickets of a lease were.
    """

    def __init__(
        self,
        dialect: Mapping[str, str],
        context: Context,
        *,
        logs: bool,
        connection: SqlConnection,
        renewals: SqlConnection,
        poll_s: float | None,
    ) -> None:
        self._emit = context.emit
        self._ends_only = context.ends_only
        self._names = dialect = {"hold": "", "ring": "", "ring_all": "", **dialect}
        texts = _statements(logs=logs)
        self._sql = {name: text.format_map(dialect) for name, text in texts.items()}
        self._connection = connection
        self._renewals = renewals
        self._own: set[str] = set()
        self._deletions = Batches(self._delete, most=_DELETED_AT_ONCE, in_flight=1)
        self._observer = LeaseObserver(self, context.clock.now)
        if poll_s is not None:
            self._observer.poll_paths(poll_s, self.changes)
        # A client that has just begun to observe needs a whole ttl from then on to find a lease
        # expired. A candidate that has been waiting needs little more than the ttl in all.
        self.capabilities = Capabilities(expiry_factor=2.0, notice_s=poll_s or 0.0, durable=False)

    async def open(self, floor: int) -> None:
        """Raise the counter to `floor`, and begin to observe leases that may have expired."""
        try:
            if floor:
                await self._connection.write(self._sql["raise"], {"floor": floor})
            if self._ends_only:
                return
            stale = await self._connection.read(self._sql["stale"], {})
            self._observer.follow(text_of(row[0]) for row in stale)
        except BaseException:
            await self.close()
            raise

    async def grant(self, ttl_s: float) -> Lease:
        granted_s = max(ttl_s, self.capabilities.ttl_min_s)
        lease = Lease(uuid.uuid4().hex, granted_s)
        ttl_us = round(granted_s * 1e6)
        await self._connection.write(self._sql["grant"], {"lease": lease.id, "ttl_us": ttl_us})
        self._own.add(lease.id)
        self._observer.patience_s = min(self._observer.patience_s, granted_s / 3)
        return lease

    async def renew(self, lease: Lease) -> None:
        self._connection.reconnect()
        rows = await self._renewals.write(self._sql["renew"], {"lease": lease.id})
        if not rows:
            raise lease_gone(lease.id)
        self._observer.judge(_lease_row(rows[0]))

    async def revoke(self, lease: Lease) -> None:
        await self._connection.write(
            self._sql["revoke"], {"lease": lease.id}, early=True, then=self._names["ring_all"]
        )
        self._own.discard(lease.id)

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        given: dict[str, object] = {"path": _checked(key), "value": value, "lease": lease.id}
        present, own, _ = await self._present("present", given)
        if own and present is None:
            present, own, number = await self._present("create", given)
            if present is not None and present.version == number:
                return Creation(True, present)
        if not own:
            raise lease_gone(lease.id)
        if present is None:
            return await self.create(key, value, lease)
        return Creation(False, present)

    async def create_and_look(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked:
        """One transaction. Unlike `create` it does not read first: it is probably not refused."""
        if ticket is None:
            return await super().create_and_look(key, value, lease, ticket, other)
        given: dict[str, object] = {"path": _checked(key), "value": value, "lease": lease.id}
        given |= {**_until(ticket), "other": other}
        statement = self._sql["create and look"]
        *_, (row,), line, found = await self._connection.write_all(statement, given)
        if row[10] is None:
            raise lease_gone(lease.id)
        over, present = self._judged([row] if row[0] is not None else [])
        won = bool(present) and present[0].version == int(row[9])
        if not won and (over or not present):
            await self._end(over)
            return await super().create_and_look(key, value, lease, ticket, other)
        creation = Creation(won, present[0])
        try:
            ahead = ahead_of(ticket, await self._entries("ahead", _until(ticket), line))
            entries = await self._entries("get", {"path": other}, found)
        except StoreError as error:
            return Looked(creation, failure=error)
        return Looked(creation, ahead, next(iter(entries), None))

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        given: dict[str, object] = {"path": _checked(key), "value": value, "lease": ""}
        if if_version is None:
            present, _, _ = await self._present("present", given)
            if present is not None:
                return None
            present, _, number = await self._present("put", given)
        else:
            if type(if_version) is not int:
                return None
            given["version"] = if_version
            present, _, number = await self._present("replace", given)
        return present if present is not None and present.version == number else None

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        if type(entry.version) is not int:
            return None
        given = {"path": entry.key, "value": value, "version": entry.version, "lease": ""}
        (row,) = await self._connection.write(self._sql["update"], given)
        if row[0] is None or row[3] != row[9]:
            return None
        over, (written,) = self._judged([row])
        if not over:
            return written
        # The lease has expired, but was not ended yet. It may have been renewed since.
        present = await self.get(entry.key)
        return present if present is not None and present.version == written.version else None

    async def _present(
        self, statement: str, given: dict[str, object]
    ) -> tuple[Entry | None, bool, int]:
        """The entry at a path, whether the given lease exists, and the counter."""
        self._require_usable()
        while True:
            call = self._connection.read if statement == "present" else self._connection.write
            (row,) = await call(self._sql[statement], given)
            over, entries = self._judged([row] if row[0] is not None else [])
            if not over:
                return next(iter(entries), None), row[10] is not None, int(row[9])
            await self._end(over)

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        if if_version is not None and type(if_version) is not int:
            return False
        return await self._deletions.ask((_checked(key), if_version))

    async def _delete(
        self, deletions: Sequence[tuple[str, int | None]]
    ) -> Sequence[bool | BaseException]:
        """Deletions as one transaction: a leader that resigns deletes its record and its ticket."""
        if len(dict(deletions)) < len(deletions):  # of two deletions of one key, one succeeds
            return await one_by_one(self._delete, deletions)
        given: dict[str, object] = {}
        those, rung = [], []
        for number, (path, version) in enumerate(deletions):
            given |= {f"path{number}": path, f"version{number}": version}
            same = "" if version is None else f" AND version = %(version{number})s"
            those.append(f"(path = %(path{number})s{same})")
            if self._names["ring"] and is_ticket(path):
                rung.append(self._names["ring"].replace("%(path)s", f"%(path{number})s"))
        # Before the commit: a candidate that is woken, and creates the record, waits for the
        # counter.
        script = "; ".join([self._sql["delete"].replace("[those]", " OR ".join(those)), *rung])
        rows = await self._connection.write(script, given, early=True)
        deleted = {text_of(path) for (path,) in rows}
        return [path in deleted for path, _ in deletions]

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        if not -_RANKS < rank < _RANKS:
            raise ConfigError(f"a rank is between {-_RANKS + 1} and {_RANKS - 1}, not {rank}")
        prefix = _checked(f"{line}/{_RANKS - rank:08x}-", spare=20)
        given = {"line": prefix, "value": value, "lease": lease.id}
        rows = await self._connection.write(self._sql["enqueue"], given, early=True)
        if not rows:
            raise lease_gone(lease.id)
        return self._judged(rows)[1][0]

    async def ahead(self, ticket: Entry) -> Entry | None:
        return ahead_of(ticket, await self._entries("ahead", _until(ticket)))

    async def get(self, key: str) -> Entry | None:
        return next(iter(await self._entries("get", {"path": key})), None)

    async def list(self, prefix: str) -> list[Entry]:
        return [*await self._entries("list", _under(prefix))]

    async def head(self, line: str) -> Entry | None:
        return next(iter(await self._entries("head", _under(line))), None)

    async def _entries(
        self, statement: str, given: Given, rows: Sequence[Row] | None = None
    ) -> Sequence[Entry]:
        """The entries that a query returns; `rows` if it was made before."""
        self._require_usable()
        while True:
            if rows is None:
                rows = await self._connection.read(self._sql[statement], given)
            over, entries = self._judged(rows)
            if not over:
                return entries
            await self._end(over)
            rows = None

    def _judged(self, rows: Sequence[Row]) -> tuple[dict[str, int], Sequence[Entry]]:
        """The leases in the rows that have expired, and the entries."""
        over: dict[str, int] = {}
        entries = []
        for path, value, revision, version, lease, *rest in rows:
            left_s, bound = None, None
            if lease is not None:
                bound = text_of(lease)
                seen = _lease_row([bound, *rest])
                verdict = self._observer.judge(seen)
                left_s = verdict.remaining_s
                if verdict.over:
                    over[bound] = seen.counter
            entries.append(
                Entry(text_of(path), bytes(value), int(revision), int(version), bound, left_s)
            )
        return over, entries

    async def _end(self, over: dict[str, int]) -> None:
        """End these expired leases, and all others that have expired at the same time."""
        for row in await self.look(self._observer.ripe()):
            if row.ttl_us is not None and self._observer.judge(row).over:
                over[row.lease] = row.counter
        proven = {
            lease: counter
            for lease, counter in over.items()
            if counter == _GONE or self._observer.proven(lease, counter)
        }
        if proven:
            await self.end_unrenewed(proven, self._observer.incarnation)
            self._observer.forget(proven)

    async def expire(self, lease: str, counter: int) -> None:
        """For the observer: end a lease that has expired, unless its counter has changed."""
        await self._end({lease: counter})

    async def end_unrenewed(self, leases: Mapping[str, int], incarnation: str) -> None:
        """End those of the leases whose counters have not changed, if the server is still the one
        on which they were observed: another may lack renewals that were confirmed."""
        given: dict[str, object] = {"incarnation": incarnation}
        pairs, places = [], []
        for number, (lease, counter) in enumerate(leases.items()):
            given |= {f"lease{number}": lease, f"counter{number}": counter}
            places.append(f"%(lease{number})s")
            pairs.append(f"id = {places[-1]} AND counter = %(counter{number})s")
        script = self._sql["expire"].replace("[pairs]", " OR ".join(pairs))
        ended = await self._connection.write(script.replace("[leases]", ", ".join(places)), given)
        for (lease,) in ended:
            if text_of(lease) not in self._own:
                self._emit(LeaseEnded(lease=text_of(lease), cause="expired"))

    async def survey(self, scopes: Sequence[str]) -> dict[str, Survey]:
        """For the observer: the leases that own entries in each scope."""
        owners: dict[str, set[str]] = {scope: set() for scope in scopes}
        for start in range(0, len(scopes), _AT_ONCE):
            some = scopes[start : start + _AT_ONCE]
            given: dict[str, str] = {}
            parts = []
            for number, scope in enumerate(some):
                parts.append(_SURVEY.format(number=number, **self._names))
                given[f"scope{number}"] = scope
                given |= {f"{name}{number}": bound for name, bound in _under(scope).items()}
            for number, lease in await self._connection.read(" UNION ALL ".join(parts), given):
                owners[some[int(number)]].add(text_of(lease))
        return {scope: Survey(frozenset(), frozenset(found)) for scope, found in owners.items()}

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]:
        """For the observer: the present rows of leases, also of those that have ended."""
        if not leases:
            return []
        given = {f"lease{number}": lease for number, lease in enumerate(leases)}
        places = ", ".join(f"%({name})s" for name in given)
        query = f"{_LOOK.format_map(self._names)}({places})"
        rows = [_lease_row(row) for row in await self._connection.read(query, given)]
        missing = {*leases} - {row.lease for row in rows}
        return [*rows, *(LeaseRow(lease, None, _GONE, 0, "") for lease in missing)]

    async def position(self) -> int:
        """For the observer: the number of the last change."""
        ((position,),) = await self._connection.read(self._sql["position"], {})
        return int(position)

    async def changes(self, since: int | None) -> tuple[int, Sequence[str] | None]:
        """For the observer: the position, and the paths that have changed since an earlier one, or
        None if that is too long ago."""
        if since is None:
            return await self.position(), None
        rows = await self._connection.read(self._sql["changes"], {"since": since})
        position = int(rows[0][0])
        if not 0 <= position - since <= KEPT:
            return position, None
        return position, [text_of(path) for _, path in rows if path is not None]

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        return await self._observer.watch(scope, notify)

    async def _release(self) -> None:
        await self._deletions.close()
        self._observer.close()
        for connection in self._connection.primary.connections:
            await connection.close()


def is_ticket(key: str) -> bool:
    """Whether this is the key of a ticket."""
    return _TICKET_NAME.search(key) is not None


def check_layout(layout: int, where: str) -> None:
    """Refuse tables that a newer doyen has created."""
    if layout > LAYOUT:
        raise StoreUnusable(
            f"{where} was created by a newer doyen (layout {layout}, this one knows {LAYOUT}):"
            " upgrade doyen here, or name another in the URL"
        )


def _lease_row(row: Row) -> LeaseRow:
    lease, ttl_us, counter, age_us, incarnation, *_ = row
    if ttl_us is None:
        return LeaseRow(text_of(lease), None, _GONE, 0, "")
    return LeaseRow(text_of(lease), int(ttl_us), int(counter), int(age_us), text_of(incarnation))


def _checked(path: str, spare: int = 0) -> str:
    if len(path.encode()) + spare > _PATH_BYTES:
        raise ConfigError(f"a key has at most {_PATH_BYTES} bytes in this store; {path!r} has more")
    return path


def _under(prefix: str) -> dict[str, str]:
    """The bounds of the paths that begin with `prefix` and a `/`; "0" follows "/" in ASCII."""
    return {"first": prefix + "/", "last": prefix + "0"}


def _until(ticket: Entry) -> dict[str, str]:
    """The bounds of the paths of a line up to this ticket."""
    return {"first": ticket.key.rpartition("/")[0] + "/", "ticket": ticket.key}
