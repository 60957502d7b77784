"""The Store port on Redis.

A read that comes upon a lease that is over ends it and reads again, so no method returns what is
void, and each end is one script that compares the renewal counter first. What `over` means, and
who looks after leases that nobody reads, is the lookout's knowledge.

Three connections: one for renewals, one on which changes are heard (once something is watched),
and one for everything else.

Imports the port, the model, the lookout and its own package.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from doyen.errors import ConfigError, LeaseGone, OutcomeUnknown, StoreUnusable, TicketGone
from doyen.events import LeaseEnded
from doyen.model import Entry, Finding, Lease, Version
from doyen.stores.kit.expiry import LeaseRow
from doyen.stores.kit.observer import LeaseObserver, Survey
from doyen.stores.port import Capabilities, Context, Creation, Store, Watch
from doyen.stores.redis.connection import MasterConnection, RedisAddress, RedisConnection, facts_in
from doyen.stores.redis.diagnosis import RedisServerFacts, findings
from doyen.stores.redis.scripts import LAYOUT
from doyen.stores.redis.subscriber import RedisSubscriber

__all__ = ["RedisStore"]

_RANKS = 1 << 31
_AT_ONCE = 50
"""How many scopes are surveyed in one script: others wait meanwhile."""
_WAIT_MS = 1000


class RedisStore(Store):
    """One handle on what lies under a prefix."""

    def __init__(
        self, address: RedisAddress, context: Context, *, prefix: str, replicas: int, poll_s: float
    ) -> None:
        self._emit = context.emit
        self._work = MasterConnection(address, prefix)
        self._pulse = MasterConnection(address, prefix)
        self._lookout = LeaseObserver(self, context.clock.now, poll_s)
        self._listener = RedisSubscriber(address, prefix, self._lookout.changed)
        self._replicas = replicas
        self._poll_s = poll_s
        self._wait = ("WAIT", replicas, _WAIT_MS) if replicas else None
        self._own: set[str] = set()
        self._unusable: str | None = None
        # Found dead by an observer whose sighting is a ttl old when it has just begun to look; a
        # candidate that has been waiting needs little more than the ttl.
        self.capabilities = Capabilities(expiry_factor=2.0, durable=False)

    async def open(self, floor: int) -> None:
        """See that the server can be used, and follow up what the dead have left behind."""
        found, _ = await self._write("try", str(LAYOUT))
        layout = int(found)
        if layout > LAYOUT:
            raise StoreUnusable(
                f"what lies at {self._work.where} was made by a newer doyen (layout {layout}, this"
                f" one knows {LAYOUT}): upgrade doyen here, or name another prefix in the URL"
            )
        if layout < LAYOUT:
            raise StoreUnusable(
                f"what lies at {self._work.where} was made by an older doyen (layout {layout}, this"
                f" one needs {LAYOUT}): move all candidates at once, to another prefix= in the URL"
            )
        if floor:
            await self._write("raise", str(floor))
        stale, _ = await self._write("stale")
        self._lookout.follow(lease.decode() for lease in stale)

    async def grant(self, ttl_s: float) -> Lease:
        granted_s = max(ttl_s, self.capabilities.ttl_min_s)
        lease = Lease(uuid.uuid4().hex, granted_s)
        await self._write("grant", lease.id, str(round(granted_s * 1e6)))
        self._own.add(lease.id)
        return lease

    async def renew(self, lease: Lease) -> None:
        row, _ = await self._write("renew", lease.id, link=self._pulse)
        if not row:
            raise _gone(lease.id)

    async def revoke(self, lease: Lease) -> None:
        await self._write("revoke", lease.id)
        self._own.discard(lease.id)

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        while True:
            (lives, won, *rows), wire = await self._write("create", key, value, lease.id)
            if not lives:
                raise _gone(lease.id)
            standing = await self._judged(rows, wire)
            if standing is not None:
                return Creation(bool(won), standing[0])

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        if if_version is not None and type(if_version) is not int:
            return None
        version = "" if if_version is None else str(if_version)
        while True:
            (done, row), wire = await self._write("put", key, value, version)
            standing = await self._judged([] if row is None else [row], wire)
            if standing is not None:
                return standing[0] if done else None

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        if if_version is not None and type(if_version) is not int:
            return False
        version = "" if if_version is None else str(if_version)
        done, _ = await self._write("delete", key, version)
        return bool(done)

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        if not -_RANKS < rank < _RANKS:
            raise ConfigError(f"a rank is between {-_RANKS + 1} and {_RANKS - 1}, not {rank}")
        place = f"{line}/{_RANKS - rank:08x}-"
        rows, wire = await self._write("enqueue", place, value, lease.id)
        if not rows:
            raise _gone(lease.id)
        return self._entry(rows[0], wire)[0]

    async def ahead(self, ticket: Entry) -> Entry | None:
        line = ticket.key.rpartition("/")[0]
        entries = await self._entries("last two", f"({line}/", f"[{ticket.key}")
        if not entries or entries[0].key != ticket.key:
            raise TicketGone(f"the ticket {ticket.key} is no longer in the line")
        return entries[1] if len(entries) > 1 else None

    async def get(self, key: str) -> Entry | None:
        return next(iter(await self._entries("get", key)), None)

    async def list(self, prefix: str) -> list[Entry]:
        return [*await self._entries("list", *_under(prefix))]

    async def head(self, line: str) -> Entry | None:
        return next(iter(await self._entries("first", *_under(line))), None)

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        self._require_usable()
        await self._listener.want(scope)
        try:
            return _Watch(self._listener, scope, await self._lookout.watch(scope, notify))
        except BaseException:
            self._listener.leave(scope)
            raise

    async def diagnose(self) -> Sequence[Finding]:
        self._require_usable()
        facts: dict[str, str] = {}
        for section in ("server", "replication", "persistence", "memory", "cluster"):
            facts |= facts_in(await self._work.ask("INFO", section))
        try:
            _, fsync = await self._work.ask("CONFIG", "GET", "appendfsync")
        except (ResponseError, ValueError):
            fsync = b""  # managed servers do not tell
        return [*findings(RedisServerFacts.of(facts, fsync.decode(), self._replicas, self._poll_s))]

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
            await self._listener.close()
            await self._work.close()
            await self._pulse.close()

    async def survey(self, scopes: Sequence[str]) -> dict[str, Survey]:
        """What stands in each scope, and who owns it."""
        surveys = {}
        for start in range(0, len(scopes), _AT_ONCE):
            some = scopes[start : start + _AT_ONCE]
            surveyed, _ = await self._read("survey", *some)
            for scope, rows in zip(some, surveyed, strict=True):
                standing = frozenset(
                    (lease.decode() or None, int(count), int(version))
                    for lease, count, version in rows
                )
                owners = frozenset(owner for owner, _, _ in standing if owner is not None)
                surveys[scope] = Survey(standing, owners)
        return surveys

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]:
        """These leases as they are now, the gone ones too."""
        rows, wire = await self._read("look", *leases)
        return [_lease_row(row, wire) for row in rows]

    async def expire(self, lease: str, counter: int) -> None:
        """End a lease that is over, unless its counter has moved, and only on the server on which
        it was seen: another may lack renewals, and count them again."""
        run, _, _ = self._lookout.incarnation.partition(" ")
        ended, _ = await self._write("expire", lease, str(counter), run)
        if ended and lease not in self._own:
            self._emit(LeaseEnded(lease=lease, cause="expired"))

    async def position(self) -> int:
        """The number of the last change."""
        revision, _ = await self._read("position")
        return int(revision)

    async def _read(self, script: str, *given: str) -> tuple[Any, RedisConnection]:
        self._require_usable()
        return await self._work.read(script, *given)

    async def _write(
        self, script: str, *given: str | bytes, link: MasterConnection | None = None
    ) -> tuple[Any, RedisConnection]:
        self._require_usable()
        link = link or self._work
        (answer, *acknowledged), wire = await link.write(script, *given, wait=self._wait)
        if acknowledged and acknowledged[0] < self._replicas:
            raise OutcomeUnknown(
                f"{wire.where}: of {self._replicas} replicas, {acknowledged[0]} had confirmed a"
                f" write after {_WAIT_MS} ms"
            )
        return answer, wire

    async def _entries(self, script: str, *given: str) -> Sequence[Entry]:
        while True:
            entries = await self._judged(*await self._read(script, *given))
            if entries is not None:
                return entries

    async def _judged(self, rows: Iterable[Any], wire: RedisConnection) -> Sequence[Entry] | None:
        """The entries in rows; None if some are void: they are gone then, and it is to be asked
        again."""
        over: dict[str, int] = {}
        entries = []
        for row in rows:
            try:
                entry, ended = self._entry(row, wire)
            except (TypeError, ValueError) as error:
                path = row[0].decode(errors="replace")
                raise StoreUnusable(
                    f"{wire.where}: the entry {path} is damaged ({error}): remove its fields, such"
                    f" as version:{path}, from the hash of all entries"
                ) from error
            entries.append(entry)
            if ended is not None:
                over[ended.lease] = ended.counter
        for lease, counter in over.items():
            await self.expire(lease, counter)
        return None if over else entries

    def _entry(self, row: Sequence[Any], wire: RedisConnection) -> tuple[Entry, LeaseRow | None]:
        """An entry, and its lease if that is over."""
        path, value, revision, version, *bound = row
        if not bound:
            return Entry(path.decode(), value, int(revision), int(version)), None
        lease = _lease_row(bound[0], wire)
        verdict = self._lookout.judge(lease)
        entry = Entry(
            path.decode(), value, int(revision), int(version), lease.lease, verdict.remaining_s
        )
        return entry, lease if verdict.over else None

    def _require_usable(self) -> None:
        if self._unusable is not None:
            raise StoreUnusable(self._unusable)


class _Watch:
    """One watch, and its share in the subscription."""

    def __init__(self, listener: RedisSubscriber, scope: str, watch: Watch) -> None:
        self._listener = listener
        self._scope = scope
        self._watch = watch
        self._open = True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._watch.close()
            self._listener.leave(self._scope)


def _lease_row(row: Sequence[Any], wire: RedisConnection) -> LeaseRow:
    lease, *rest = row
    if not rest:
        return LeaseRow(lease.decode(), None, -1, 0, "")
    ttl_us, counter, age_us = map(int, rest)
    return LeaseRow(lease.decode(), ttl_us, counter, age_us, wire.incarnation)


def _under(prefix: str) -> tuple[str, str]:
    """The bounds of the paths that begin with `prefix` and a `/`; "0" is what follows "/"."""
    return f"[{prefix}/", f"({prefix}0"


def _gone(lease: str) -> LeaseGone:
    return LeaseGone(f"lease {lease} has ended: what was bound to it is void")
