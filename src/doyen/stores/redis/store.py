"""The Store port on Redis.

A read that finds an expired lease ends it and reads again, so no method returns an entry whose
lease has ended. Each end is one script that compares the renewal counter first. The observer of
leases decides what has expired, and looks after leases that are not read.

Three connections: one for renewals, one for notifications (once something is watched), and one for
everything else.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redis.exceptions import ResponseError

from doyen.errors import (
    ConfigError,
    OutcomeUnknown,
    StoreError,
    StoreUnusable,
)
from doyen.events import LeaseEnded
from doyen.model import Entry, Finding, Lease, Version
from doyen.stores.kit.batches import Batches
from doyen.stores.kit.expiry import LeaseRow
from doyen.stores.kit.lifecycle import GuardedStore, ahead_of, lease_gone
from doyen.stores.kit.observer import LeaseObserver, Survey
from doyen.stores.port import Capabilities, Context, Creation, Looked, Watch
from doyen.stores.redis.connection import (
    RedisAddress,
    RedisConnection,
    RedisMaster,
    ScriptRunner,
    facts_in,
)
from doyen.stores.redis.diagnosis import findings
from doyen.stores.redis.scripts import LAYOUT
from doyen.stores.redis.subscriber import RedisSubscriber

_RANKS = 1 << 31
_AT_ONCE = 50
"""How many scopes are surveyed in one script, during which the server does nothing else."""
_WAIT_MS = 1000
_DELETIONS_IN_FLIGHT, _DELETED_AT_ONCE = 16, 32


class RedisStore(GuardedStore):
    """One handle on the keys under a prefix."""

    def __init__(
        self, address: RedisAddress, context: Context, *, prefix: str, replicas: int, poll_s: float
    ) -> None:
        self._emit = context.emit
        self._ends_only = context.ends_only
        master = RedisMaster(address)
        self._scripts = ScriptRunner(master, prefix)
        self._renewals = ScriptRunner(master, prefix)
        self._observer = LeaseObserver(self, context.clock.now)
        self._observer.poll_counter(poll_s, self.position)
        self._subscriber = RedisSubscriber(master, prefix, self._observer.changed)
        self._observer.unwatched = self._subscriber.unsubscribe
        self._replicas = replicas
        self._poll_s = poll_s
        self._wait = [("WAIT", replicas, _WAIT_MS)] if replicas else []
        self._own: set[str] = set()
        self._deletions = Batches(
            self._delete, most=_DELETED_AT_ONCE, in_flight=_DELETIONS_IN_FLIGHT
        )
        # A client that has just begun to observe needs a whole ttl from then on to find a lease
        # expired. A candidate that has been waiting needs little more than the ttl in all.
        self.capabilities = Capabilities(expiry_factor=2.0, durable=False)

    async def open(self, floor: int) -> None:
        """Check that the server can be used, and begin to observe leases that may have expired."""
        found, _ = await self._write("try", str(LAYOUT))
        layout = int(found)
        if layout > LAYOUT:
            raise StoreUnusable(
                f"the data at {self._scripts.where} was written by a newer doyen (layout {layout},"
                f" this one knows {LAYOUT}): upgrade doyen here, or name another prefix in the URL"
            )
        if layout < LAYOUT:
            raise StoreUnusable(
                f"the data at {self._scripts.where} was written by an older doyen (layout {layout},"
                f" this one needs {LAYOUT}): move all candidates at once, to another prefix= in the"
                " URL"
            )
        if floor:
            await self._write("raise", str(floor))
        if self._ends_only:
            return
        stale, _ = await self._write("stale")
        self._observer.follow(lease.decode() for lease in stale)

    async def grant(self, ttl_s: float) -> Lease:
        granted_s = max(ttl_s, self.capabilities.ttl_min_s)
        lease = Lease(uuid.uuid4().hex, granted_s)
        await self._write("grant", lease.id, str(round(granted_s * 1e6)))
        self._own.add(lease.id)
        return lease

    async def renew(self, lease: Lease) -> None:
        row, _ = await self._write("renew", lease.id, runner=self._renewals)
        if not row:
            raise lease_gone(lease.id)

    async def revoke(self, lease: Lease) -> None:
        await self._write("revoke", lease.id)
        self._own.discard(lease.id)

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        while True:
            (alive, won, *rows), connection = await self._write("create", key, value, lease.id)
            if not alive:
                raise lease_gone(lease.id)
            present = await self._judged(rows, connection)
            if present is not None:
                return Creation(bool(won), present[0])

    async def create_and_look(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked:
        """One script."""
        if ticket is None:
            return await super().create_and_look(key, value, lease, ticket, other)
        ((alive, won, *rows), line, found), connection = await self._write(
            "create and look", key, value, lease.id, *_until(ticket), other
        )
        if not alive:
            raise lease_gone(lease.id)
        present = await self._judged(rows, connection)
        if present is None:
            return await super().create_and_look(key, value, lease, ticket, other)
        creation = Creation(bool(won), present[0])
        try:
            tickets = await self._judged(line, connection)
            ahead = await self.ahead(ticket) if tickets is None else ahead_of(ticket, tickets)
            others = await self._judged(found, connection)
            entry = await self.get(other) if others is None else next(iter(others), None)
        except StoreError as error:
            return Looked(creation, failure=error)
        return Looked(creation, ahead, entry)

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        if if_version is not None and type(if_version) is not int:
            return None
        version = "" if if_version is None else str(if_version)
        while True:
            (done, row), connection = await self._write("put", key, value, version)
            present = await self._judged([] if row is None else [row], connection)
            if present is not None:
                return present[0] if done else None

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        if type(entry.version) is not int:
            return None
        rows, connection = await self._write("update", entry.key, value, str(entry.version))
        if not rows:
            return None
        written, ended = self._entry(rows[0], connection)
        if ended is None:
            return written
        # The lease has expired, but was not ended yet. It may have been renewed since.
        present = await self.get(entry.key)
        return present if present is not None and present.version == written.version else None

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        if if_version is not None and type(if_version) is not int:
            return False
        version = "" if if_version is None else str(if_version)
        self._require_usable()
        return await self._deletions.ask((key, version))

    def begin_deletion(self, entries: Sequence[Entry]) -> asyncio.Future[Any] | None:
        if self._unusable is not None:
            return None
        return self._deletions.begin([(entry.key, str(entry.version)) for entry in entries])

    async def _delete(self, deletions: Sequence[tuple[str, str]]) -> Sequence[bool]:
        """Deletions as one script: a leader that resigns deletes its record and its ticket."""
        done, _ = await self._write("delete", *itertools.chain.from_iterable(deletions))
        return [bool(each) for each in done]

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        if not -_RANKS < rank < _RANKS:
            raise ConfigError(f"a rank is between {-_RANKS + 1} and {_RANKS - 1}, not {rank}")
        place = f"{line}/{_RANKS - rank:08x}-"
        rows, connection = await self._write("enqueue", place, value, lease.id)
        if not rows:
            raise lease_gone(lease.id)
        return self._entry(rows[0], connection)[0]

    async def ahead(self, ticket: Entry) -> Entry | None:
        return ahead_of(ticket, await self._entries("last two", *_until(ticket)))

    async def get(self, key: str) -> Entry | None:
        return next(iter(await self._entries("get", key)), None)

    async def list(self, prefix: str) -> list[Entry]:
        return [*await self._entries("list", *_under(prefix))]

    async def head(self, line: str) -> Entry | None:
        return next(iter(await self._entries("first", *_under(line))), None)

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        await self._subscriber.subscribe(scope)
        return await self._observer.watch(scope, notify)

    async def diagnose(self) -> Sequence[Finding]:
        facts: dict[str, str] = {}
        for section in ("server", "replication", "persistence", "memory", "cluster"):
            facts |= facts_in(await self._scripts.command("INFO", section))
        try:
            _, fsync = await self._scripts.command("CONFIG", "GET", "appendfsync")
        except (ResponseError, ValueError):
            fsync = b""  # managed servers refuse CONFIG
        return [*findings(facts, fsync.decode(), self._replicas, self._poll_s)]

    async def _release(self) -> None:
        await self._deletions.close()
        self._observer.close()
        await self._subscriber.close()
        await self._scripts.close()
        await self._renewals.close()

    async def survey(self, scopes: Sequence[str]) -> dict[str, Survey]:
        """For the observer: the entries in each scope, by the leases that own them."""
        surveys = {}
        for start in range(0, len(scopes), _AT_ONCE):
            some = scopes[start : start + _AT_ONCE]
            surveyed, _ = await self._read("survey", *some)
            for scope, rows in zip(some, surveyed, strict=True):
                present = frozenset(
                    (lease.decode() or None, int(count), int(version))
                    for lease, count, version in rows
                )
                owners = frozenset(owner for owner, _, _ in present if owner is not None)
                surveys[scope] = Survey(present, owners)
        return surveys

    async def look(self, leases: Sequence[str]) -> Sequence[LeaseRow]:
        """For the observer: the present rows of leases, also of those that have ended."""
        rows, connection = await self._read("look", *leases)
        return [_lease_row(row, connection) for row in rows]

    async def expire(self, lease: str, counter: int) -> None:
        """For the observer: end a lease that has expired, unless its counter has changed. Only the
        server on which it was observed ends it: another may lack renewals, and count them again."""
        run, _, _ = self._observer.incarnation.partition(" ")
        ended, _ = await self._write("expire", lease, str(counter), run)
        if ended and lease not in self._own:
            self._emit(LeaseEnded(lease=lease, cause="expired"))

    async def position(self) -> int:
        """For the observer: the number of the last change."""
        revision, _ = await self._read("position")
        return int(revision)

    async def _read(self, script: str, *given: str) -> tuple[Any, RedisConnection]:
        self._require_usable()
        responses, connection = await self._scripts.run(script, *given, reads=True)
        return responses[0], connection

    async def _write(
        self, script: str, *given: str | bytes, runner: ScriptRunner | None = None
    ) -> tuple[Any, RedisConnection]:
        self._require_usable()
        runner = runner or self._scripts
        (answer, *acknowledged), connection = await runner.run(script, *given, wait=self._wait)
        if acknowledged and acknowledged[0] < self._replicas:
            raise OutcomeUnknown(
                f"{connection.host}: {acknowledged[0]} of {self._replicas} replicas have confirmed"
                f" a write within {_WAIT_MS} ms"
            )
        return answer, connection

    async def _entries(self, script: str, *given: str) -> Sequence[Entry]:
        while True:
            entries = await self._judged(*await self._read(script, *given))
            if entries is not None:
                return entries

    async def _judged(
        self, rows: Iterable[Any], connection: RedisConnection
    ) -> Sequence[Entry] | None:
        """The entries in rows. If some of their leases have expired, end those and return None: the
        caller has to read again."""
        over: dict[str, int] = {}
        entries = []
        for row in rows:
            try:
                entry, ended = self._entry(row, connection)
            except (TypeError, ValueError) as error:
                path = row[0].decode(errors="replace")
                raise StoreUnusable(
                    f"{connection.host}: the entry {path} is damaged ({error}): remove its fields,"
                    f" such as version:{path}, from the hash of all entries"
                ) from error
            entries.append(entry)
            if ended is not None:
                over[ended.lease] = ended.counter
        for lease, counter in over.items():
            await self.expire(lease, counter)
        return None if over else entries

    def _entry(
        self, row: Sequence[Any], connection: RedisConnection
    ) -> tuple[Entry, LeaseRow | None]:
        """An entry, and its lease if that has expired."""
        path, value, revision, version, *bound = row
        if not bound:
            return Entry(path.decode(), value, int(revision), int(version)), None
        lease = _lease_row(bound[0], connection)
        verdict = self._observer.judge(lease)
        entry = Entry(
            path.decode(), value, int(revision), int(version), lease.lease, verdict.remaining_s
        )
        return entry, lease if verdict.over else None


def _lease_row(row: Sequence[Any], connection: RedisConnection) -> LeaseRow:
    lease, *rest = row
    if not rest:
        return LeaseRow(lease.decode(), None, -1, 0, "")
    ttl_us, counter, age_us = map(int, rest)
    return LeaseRow(lease.decode(), ttl_us, counter, age_us, connection.incarnation)


def _under(prefix: str) -> tuple[str, str]:
    """The bounds of the paths that begin with `prefix` and a `/`; "0" follows "/" in ASCII."""
    return f"[{prefix}/", f"({prefix}0"


def _until(ticket: Entry) -> tuple[str, str]:
    """The bounds of the paths of a line up to this ticket."""
    return f"({ticket.key.rpartition('/')[0]}/", f"[{ticket.key}"
