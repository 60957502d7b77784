"""The tables, and what may be done with them: the Store port in SQL that both engines understand.

    meta     one row: the layout of the tables, and the counter that numbers all changes
    leases   id, ttl, renewal counter, and when that last changed by the database's clock
    entries  path (the primary key), value, revision, version, lease; tickets sort as their line
    changes  which paths have changed of late, for those who cannot be notified

A read that comes upon a lease that is over ends it and reads again, so no method returns what is
void, and each end is one transaction of its own. A write is done in two steps only where the first
can spare the second: `create` looks before it takes a number, because a candidate that is refused
should not make anybody wait.

Imports the port, the model and its own package.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from doyen.errors import ConfigError, LeaseGone, StoreUnusable, TicketGone
from doyen.events import LeaseEnded
from doyen.model import Entry, Lease, Version
from doyen.stores.kit.expiry import LeaseRow
from doyen.stores.kit.observer import LeaseObserver, Survey
from doyen.stores.port import Capabilities, Context, Creation, Store, StoreURL, Watch
from doyen.stores.sql.connection import Given, Row, SqlConnection

__all__ = [
    "KEPT",
    "LAYOUT",
    "Dialect",
    "RelationalStore",
    "check_layout",
    "number_of",
    "token_floor",
]

LAYOUT = 1
_RANKS = 1 << 31
_PATH_BYTES = 1024
_SWEPT = 64
"""How many leases that look over are followed up when a store is opened."""
_GONE = -1
"""The counter of a lease whose row is not there: what is bound to it is void."""
KEPT = 1000
"""For how many positions it is known what has changed."""
_AT_ONCE = 50
"""How many scopes are surveyed in one query."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What differs from engine to engine in the statements."""

    meta: str
    leases: str
    entries: str
    changes: str
    clock: str
    """Microseconds of the database's clock."""
    numbering: str
    """Assignments that advance the counter in `meta`."""
    incarnation: str
    """Differs if a server may have lost what an earlier one confirmed."""
    logs: bool
    """Whether changes are to be logged by the statements; else the tables do it by themselves."""


_LEASE = "l.ttl_us, l.counter, {clock} - l.renewed_us, {incarnation}"
_ENTRY = f"e.path, e.value, e.revision, e.version, e.lease, {_LEASE}"
_FROM = "FROM {entries} e LEFT JOIN {leases} l ON l.id = e.lease "
_NUMBER = "UPDATE {meta} SET {numbering}, position = position + 1; "
_IS_FREE = "NOT EXISTS (SELECT 1 FROM {entries} WHERE path = %(path)s)"
_IS_OVER = "([pairs]) AND {incarnation} = %(incarnation)s"
_REMAINING = "SELECT id FROM {leases} WHERE id IN ([leases])"
_STANDING = (
    f"SELECT {_ENTRY}, m.revision, o.id FROM {{meta}} m"
    " LEFT JOIN {entries} e ON e.path = %(path)s LEFT JOIN {leases} l ON l.id = e.lease"
    " LEFT JOIN {leases} o ON o.id = %(lease)s"
)
_INTO = "INSERT INTO {entries} (path, value, revision, version, lease) SELECT "
_TICKET = "CONCAT(%(line)s, LPAD(CONCAT(m.revision), 20, '0'))"
_UNDER = "e.path > %(first)s AND e.path < %(last)s"
_LOOK = f"SELECT l.id, {_LEASE} FROM {{leases}} l WHERE l.id IN "
_SURVEY = (
    "SELECT DISTINCT {number}, e.lease FROM {entries} e WHERE e.lease IS NOT NULL"
    " AND (e.path = %(scope{number})s"
    " OR (e.path > %(first{number})s AND e.path < %(last{number})s))"
)


def _statements(*, logs: bool) -> dict[str, str]:
    """What is sent; with `logs`, together with the log of what it changes."""

    def log(which: str) -> str:
        if not logs:
            return ""
        return (
            "INSERT INTO {changes} (position, path) SELECT m.position, e.path"
            f" FROM {{meta}} m, {{entries}} e WHERE {which};"
            f" DELETE FROM {{changes}} WHERE position < (SELECT position FROM {{meta}}) - {KEPT}; "
        )

    made = log("e.path = %(path)s AND e.version = m.revision")
    return {
        "grant": "INSERT INTO {leases} (id, ttl_us, counter, renewed_us)"
        " VALUES (%(lease)s, %(ttl_us)s, 0, {clock})",
        "renew": "UPDATE {leases} SET counter = counter + 1, renewed_us = {clock}"
        " WHERE id = %(lease)s;"
        f" SELECT l.id, {_LEASE} FROM {{leases}} l WHERE l.id = %(lease)s",
        "revoke": f"{_NUMBER}{log('e.lease = %(lease)s')}"
        "DELETE FROM {entries} WHERE lease = %(lease)s; DELETE FROM {leases} WHERE id = %(lease)s",
        # The leases go first: a renewal that comes in between then waits, and finds nothing.
        "expire": f"{_NUMBER}SELECT id FROM {{leases}} WHERE {_IS_OVER} FOR UPDATE;"
        f" DELETE FROM {{leases}} WHERE {_IS_OVER};"
        f" {log(f'e.lease IN ([leases]) AND e.lease NOT IN ({_REMAINING})')}"
        f"DELETE FROM {{entries}} WHERE lease IN ([leases]) AND lease NOT IN ({_REMAINING})",
        "standing": _STANDING,
        "create": f"{_NUMBER}{_INTO}%(path)s, %(value)s, m.revision, m.revision, o.id"
        f" FROM {{meta}} m, {{leases}} o WHERE o.id = %(lease)s AND {_IS_FREE}; {made}{_STANDING}",
        "put": f"{_NUMBER}{_INTO}%(path)s, %(value)s, m.revision, m.revision, NULL"
        f" FROM {{meta}} m WHERE {_IS_FREE}; {made}{_STANDING}",
        "replace": f"{_NUMBER}UPDATE {{entries}} SET value = %(value)s, lease = NULL,"
        " version = (SELECT revision FROM {meta}) WHERE path = %(path)s AND version = %(version)s;"
        f" {made}{_STANDING}",
        "delete": f"{_NUMBER}SELECT path FROM {{entries}} WHERE path = %(path)s;"
        f" {log('e.path = %(path)s')}"
        "DELETE FROM {entries} WHERE path = %(path)s",
        "delete version": f"{_NUMBER}"
        "SELECT path FROM {entries} WHERE path = %(path)s AND version = %(version)s;"
        f" {log('e.path = %(path)s AND e.version = %(version)s')}"
        "DELETE FROM {entries} WHERE path = %(path)s AND version = %(version)s",
        "enqueue": f"{_NUMBER}{_INTO}{_TICKET}, %(value)s, m.revision, m.revision, o.id"
        " FROM {meta} m, {leases} o WHERE o.id = %(lease)s;"
        f" {log(f'e.path = {_TICKET}')}"
        f"SELECT {_ENTRY} FROM {{meta}} m JOIN {{entries}} e ON e.path = {_TICKET}"
        " JOIN {leases} l ON l.id = e.lease",
        "get": f"SELECT {_ENTRY} {_FROM}WHERE e.path = %(path)s",
        "list": f"SELECT {_ENTRY} {_FROM}WHERE {_UNDER} ORDER BY e.path",
        "head": f"SELECT {_ENTRY} {_FROM}WHERE {_UNDER} ORDER BY e.path LIMIT 1",
        "ahead": f"SELECT {_ENTRY} {_FROM}WHERE e.path > %(first)s AND e.path <= %(path)s"
        " ORDER BY e.path DESC LIMIT 2",
        "position": "SELECT position FROM {meta}",
        "changes": "SELECT m.position, c.path FROM {meta} m"
        " LEFT JOIN {changes} c ON c.position > %(since)s",
        "raise": "UPDATE {meta} SET revision = GREATEST(revision, %(floor)s)",
        "stale": f"SELECT l.id, {_LEASE} FROM {{leases}} l"
        f" WHERE {{clock}} - l.renewed_us NOT BETWEEN 0 AND l.ttl_us LIMIT {_SWEPT}",
    }


class RelationalStore(Store):
    """One handle on the tables. Engines say how to connect, and what to diagnose."""

    def __init__(
        self,
        dialect: Dialect,
        context: Context,
        *,
        work: SqlConnection[Any],
        pulse: SqlConnection[Any],
        poll_s: float | None,
    ) -> None:
        self._emit = context.emit
        self._names = asdict(dialect)
        texts = _statements(logs=dialect.logs)
        self._sql = {name: text.format_map(self._names) for name, text in texts.items()}
        self._work = work
        self._pulse = pulse
        self._own: set[str] = set()
        self._lookout = LeaseObserver(self, context.clock.now, poll_s, self.changes)
        self._unusable: str | None = None
        # Found dead by an observer whose sighting is a ttl old when it has just begun to look; a
        # candidate that has been waiting needs little more than the ttl.
        self.capabilities = Capabilities(expiry_factor=2.0, notice_s=poll_s or 0.0, durable=False)

    async def open(self, floor: int) -> None:
        """Raise the counter, and follow up what the dead have left behind."""
        try:
            if floor:
                await self._work.write(self._sql["raise"], {"floor": floor})
            stale = await self._work.read(self._sql["stale"], {})
            self._lookout.follow(_text(row[0]) for row in stale)
        except BaseException:
            await self.close()
            raise

    async def grant(self, ttl_s: float) -> Lease:
        self._require_usable()
        granted_s = max(ttl_s, self.capabilities.ttl_min_s)
        lease = Lease(uuid.uuid4().hex, granted_s)
        ttl_us = round(granted_s * 1e6)
        await self._work.write(self._sql["grant"], {"lease": lease.id, "ttl_us": ttl_us})
        self._own.add(lease.id)
        return lease

    async def renew(self, lease: Lease) -> None:
        self._require_usable()
        self._work.reconnect()
        rows = await self._pulse.write(self._sql["renew"], {"lease": lease.id})
        if not rows:
            raise _gone(lease.id)
        self._lookout.judge(_lease_row(rows[0]))

    async def revoke(self, lease: Lease) -> None:
        self._require_usable()
        await self._work.write(self._sql["revoke"], {"lease": lease.id}, early=True)
        self._own.discard(lease.id)

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        given: dict[str, object] = {"path": _checked(key), "value": value, "lease": lease.id}
        standing, own, _ = await self._standing("standing", given)
        if own and standing is None:
            standing, own, number = await self._standing("create", given)
            if standing is not None and standing.version == number:
                return Creation(True, standing)
        if not own:
            raise _gone(lease.id)
        if standing is None:
            return await self.create(key, value, lease)
        return Creation(False, standing)

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        given: dict[str, object] = {"path": _checked(key), "value": value, "lease": ""}
        if if_version is None:
            standing, _, _ = await self._standing("standing", given)
            if standing is not None:
                return None
            standing, _, number = await self._standing("put", given)
        else:
            if type(if_version) is not int:
                return None
            given["version"] = if_version
            standing, _, number = await self._standing("replace", given)
        return standing if standing is not None and standing.version == number else None

    async def _standing(
        self, statement: str, given: dict[str, object]
    ) -> tuple[Entry | None, bool, int]:
        """What stands at a path, whether the lease in question is there, and the counter."""
        self._require_usable()
        while True:
            call = self._work.read if statement == "standing" else self._work.write
            (row,) = await call(self._sql[statement], given)
            over, entries = self._judged([row] if row[0] is not None else [])
            if not over:
                return next(iter(entries), None), row[10] is not None, int(row[9])
            await self._end(over)

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        self._require_usable()
        if if_version is not None and type(if_version) is not int:
            return False
        statement = self._sql["delete" if if_version is None else "delete version"]
        given = {"path": _checked(key), "version": if_version}
        return bool(await self._work.write(statement, given, early=True))

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        self._require_usable()
        if not -_RANKS < rank < _RANKS:
            raise ConfigError(f"a rank is between {-_RANKS + 1} and {_RANKS - 1}, not {rank}")
        prefix = _checked(f"{line}/{_RANKS - rank:08x}-", spare=20)
        given = {"line": prefix, "value": value, "lease": lease.id}
        rows = await self._work.write(self._sql["enqueue"], given, early=True)
        if not rows:
            raise _gone(lease.id)
        return self._judged(rows)[1][0]

    async def ahead(self, ticket: Entry) -> Entry | None:
        first = ticket.key.rpartition("/")[0] + "/"
        entries = await self._entries("ahead", {"first": first, "path": ticket.key})
        if not entries or entries[0].key != ticket.key:
            raise TicketGone(f"the ticket {ticket.key} is no longer in the line")
        return entries[1] if len(entries) > 1 else None

    async def get(self, key: str) -> Entry | None:
        return next(iter(await self._entries("get", {"path": key})), None)

    async def list(self, prefix: str) -> list[Entry]:
        return [*await self._entries("list", _under(prefix))]

    async def head(self, line: str) -> Entry | None:
        return next(iter(await self._entries("head", _under(line))), None)

    async def _entries(self, statement: str, given: Given) -> Sequence[Entry]:
        self._require_usable()
        while True:
            over, entries = self._judged(await self._work.read(self._sql[statement], given))
            if not over:
                return entries
            await self._end(over)

    def _judged(self, rows: Sequence[Row]) -> tuple[dict[str, int], Sequence[Entry]]:
        """The entries in rows, and the leases among theirs that are over."""
        over: dict[str, int] = {}
        entries = []
        for path, value, revision, version, lease, *rest in rows:
            left_s, bound = None, None
            if lease is not None:
                bound = _text(lease)
                seen = _lease_row([bound, *rest])
                verdict = self._lookout.judge(seen)
                left_s = verdict.remaining_s
                if verdict.over:
                    over[bound] = seen.counter
            entries.append(
                Entry(_text(path), bytes(value), int(revision), int(version), bound, left_s)
            )
        return over, entries

    async def _end(self, over: dict[str, int]) -> None:
        """End leases that are over, with all others that have become so at the same time."""
        for row in await self.look(self._lookout.ripe()):
            if row.ttl_us is not None and self._lookout.judge(row).over:
                over[row.lease] = row.counter
        proven = {
            lease: counter
            for lease, counter in over.items()
            if counter == _GONE or self._lookout.proven(lease, counter)
        }
        if proven:
            await self.end(proven, self._lookout.incarnation)
            self._lookout.forget(proven)

    async def expire(self, lease: str, counter: int) -> None:
        """End a lease that is over, unless its counter has moved."""
        await self._end({lease: counter})

    async def end(self, leases: Mapping[str, int], incarnation: str) -> None:
        """End those of these leases whose counters are still the given ones, if the server is the
        one on which they were seen: another may lack renewals that were confirmed."""
        given: dict[str, object] = {"incarnation": incarnation}
        pairs, places = [], []
        for number, (lease, counter) in enumerate(leases.items()):
            given |= {f"lease{number}": lease, f"counter{number}": counter}
            places.append(f"%(lease{number})s")
            pairs.append(f"id = {places[-1]} AND counter = %(counter{number})s")
        script = self._sql["expire"].replace("[pairs]", " OR ".join(pairs))
        ended = await self._work.write(script.replace("[leases]", ", ".join(places)), given)
        for (lease,) in ended:
            if _text(lease) not in self._own:
                self._emit(LeaseEnded(lease=_text(lease), cause="expired"))

    async def survey(self, scopes: Sequence[str]) -> dict[str, Survey]:
        """Who owns something in each scope."""
        owners: dict[str, set[str]] = {scope: set() for scope in scopes}
        for start in range(0, len(scopes), _AT_ONCE):
            some = scopes[start : start + _AT_ONCE]
            given: dict[str, str] = {}
            parts = []
            for number, scope in enumerate(some):
                parts.append(_SURVEY.format(number=number, **self._names))
                given[f"scope{number}"] = scope
                given |= {f"{name}{number}": bound for name, bound in _under(scope).items()}
            for number, lease in await self._work.read(" UNION ALL ".join(parts), given):
                owners[some[int(number)]].add(_text(lease))
        return {scope: Survey(frozenset(), frozenset(found)) for scope, found in owners.items()}

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]:
        """These leases as they are now, the gone ones too."""
        if not leases:
            return []
        given = {f"lease{number}": lease for number, lease in enumerate(leases)}
        places = ", ".join(f"%({name})s" for name in given)
        query = f"{_LOOK.format_map(self._names)}({places})"
        rows = [_lease_row(row) for row in await self._work.read(query, given)]
        missing = {*leases} - {row.lease for row in rows}
        return [*rows, *(LeaseRow(lease, None, _GONE, 0, "") for lease in missing)]

    async def position(self) -> int:
        """The number of the last change."""
        ((position,),) = await self._work.read(self._sql["position"], {})
        return int(position)

    async def changes(self, since: int | None) -> tuple[int, Sequence[str] | None]:
        """The position, and what has changed since an earlier one if that is not too long ago."""
        if since is None:
            return await self.position(), None
        rows = await self._work.read(self._sql["changes"], {"since": since})
        position = int(rows[0][0])
        if not 0 <= position - since <= KEPT:
            return position, None
        return position, [_text(path) for _, path in rows if path is not None]

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        self._require_usable()
        return await self._lookout.watch(scope, notify)

    def forked(self) -> None:
        # The connections stay open: to close one would end the parent's as well.
        self._unusable = (
            "this store was opened before a fork and belongs to the parent process:"
            " connect again in the child"
        )

    async def close(self) -> None:
        if self._unusable is None:
            self._unusable = "this store has been closed; open another"
            self._lookout.close()
            for link in self._links():
                await link.close()

    def _links(self) -> Iterable[SqlConnection[Any]]:
        return (self._work, self._pulse)

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise StoreUnusable(self._unusable)


def check_layout(layout: int, where: str) -> None:
    """Refuse tables that a newer doyen has made."""
    if layout > LAYOUT:
        raise StoreUnusable(
            f"{where} was made by a newer doyen (layout {layout}, this one knows {LAYOUT}):"
            " upgrade doyen here, or name another in the URL"
        )


def number_of(url: StoreURL, name: str, default: float, low: float, high: float) -> float:
    """An option that is a number."""
    text = url.options.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not low <= value <= high:
        raise ConfigError(f"{name} is a number from {low:g} to {high:g}, not {text!r}")
    return value


def token_floor(url: StoreURL) -> int:
    """The option that raises the counter after a move or a restore."""
    floor = url.options.get("token_floor", "0")
    if not (floor.isascii() and floor.isdigit() and int(floor) < 1 << 62):
        raise ConfigError(f"token_floor is a whole number below 2**62, not {floor!r}")
    return int(floor)


def _lease_row(row: Row) -> LeaseRow:
    lease, ttl_us, counter, age_us, incarnation, *_ = row
    if ttl_us is None:
        return LeaseRow(_text(lease), None, _GONE, 0, "")
    return LeaseRow(_text(lease), int(ttl_us), int(counter), int(age_us), _text(incarnation))


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes | bytearray) else str(value)


def _checked(path: str, spare: int = 0) -> str:
    if len(path.encode()) + spare > _PATH_BYTES:
        raise ConfigError(f"a key has at most {_PATH_BYTES} bytes here, not as many as {path!r}")
    return path


def _under(prefix: str) -> dict[str, str]:
    """The bounds of the paths that begin with `prefix` and a `/`; "0" is what follows "/"."""
    return {"first": prefix + "/", "last": prefix + "0"}


def _gone(lease: str) -> LeaseGone:
    return LeaseGone(f"lease {lease} has ended: what was bound to it is void")
