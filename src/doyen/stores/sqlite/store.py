"""The port on a local database: entries in tables, leases as files.

The handles of one process share a thread and a connection, which has three descriptors. Each has
one more, two for each lease that it holds, and one and a timer for each lease that owns something
it watches. Without watches it never wakes up.
"""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Literal, TypeVar

from doyen._waiting import shared
from doyen.errors import LeaseGone, StoreError
from doyen.events import LeaseEnded
from doyen.lease.clock import boot_id
from doyen.model import Entry, Finding, Lease, Version, belongs_to_order
from doyen.stores.kit.lifecycle import GuardedStore
from doyen.stores.port import Capabilities, Context, Creation, Looked, Watch
from doyen.stores.sqlite.database import Database
from doyen.stores.sqlite.diagnosis import findings
from doyen.stores.sqlite.inbox import Inbox
from doyen.stores.sqlite.leases import LocalLeases
from doyen.stores.sqlite.location import SessionsDirectory, kind_of, translate_os
from doyen.stores.sqlite.tables import Transaction
from doyen.stores.sqlite.watches import EntryWatch, LocalWatches

__all__ = ["SQLiteStore"]

T = TypeVar("T")

_SWEPT = 64
"""How many leases and inboxes are checked for leftovers when a handle gets its first lease. It is a
sample: otherwise a thousand candidates that start together would each check a thousand others."""


class SQLiteStore(GuardedStore):
    """One handle on the store. Handles in any number of processes share one file."""

    capabilities = Capabilities(proof_of_death=True)

    def __init__(self, path: str, context: Context) -> None:
        self._emit = context.emit
        self._loop = asyncio.get_running_loop()
        self._directory = SessionsDirectory(path)
        self._leases = LocalLeases(
            self._directory, now=context.clock.now, boot=boot_id(), ended=self._on_ended
        )
        self._inbox = Inbox(self._directory)
        self._database = Database(path, self._loop, self._directory, self._leases, self._inbox)
        self._watches = LocalWatches(self._loop, self._database, self._leases, self._inbox)

    async def open(self, token_floor: int) -> None:
        """Start the database, and begin to listen."""
        await self._database.open()
        if token_floor:
            await self._database.submit(
                lambda tables: tables.raise_revision(token_floor), durable=True
            )
        self._database.deliver = self._watches.apply
        self._watches.open()

    async def grant(self, ttl_s: float) -> Lease:
        self._require_usable()
        granted_s = max(ttl_s, self.capabilities.ttl_min_s)
        # Below the request timeout, so that the error names the process that holds the lock.
        self._database.patience_s = min(self._database.patience_s, granted_s / 10)
        try:
            return Lease(self._leases.grant(granted_s), granted_s)
        except OSError as error:
            raise translate_os(error, self._database.connection.path) from error

    async def renew(self, lease: Lease) -> None:
        self._require_usable()
        try:
            in_place = self._database.in_place()
            self._leases.renew(lease.id)
        except OSError as error:
            raise translate_os(error, self._database.connection.path) from error
        if not in_place:
            raise LeaseGone(
                f"{self._database.connection.path} or its directory was removed or replaced while"
                f" in use: what is bound to lease {lease.id} is not visible to others;"
                " connect again"
            )

    async def revoke(self, lease: Lease) -> None:
        self._require_usable()
        try:
            self._leases.end(lease.id)
            await self._database.submit(lambda tables: tables.remove(lease.id))
        except OSError as error:
            raise translate_os(error, self._database.connection.path) from error
        except StoreError:
            pass  # the lease has ended, so its rows are void and removed when they are next read
        finally:
            self._leases.release(lease.id)

    def _submit(
        self,
        run: Callable[[Transaction], T],
        *,
        writes: bool = True,
        durable: bool = False,
        brief: bool = False,
    ) -> asyncio.Future[T]:
        self._require_usable()
        return self._database.submit(run, writes=writes, durable=durable, brief=brief)

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        if not belongs_to_order(key):
            await self._take_part()
        return await self._submit(lambda tables: tables.create(key, value, lease.id))

    async def create_and_look(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked:
        await self._take_part()
        at = None if ticket is None else ticket.key
        return await self._submit(
            lambda tables: tables.create_and_look(key, value, lease.id, at, other), brief=True
        )

    def create_and_look_now(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked | None:
        self._require_usable()
        if self._leases.looks_only:
            return None
        at = None if ticket is None else ticket.key
        return self._database.execute_now(
            lambda tables: tables.create_and_look(key, value, lease.id, at, other), last=True
        )

    def delete_now(self, entries: Sequence[Entry]) -> bool:
        try:
            self._require_usable()
            return self._database.execute_now(lambda tables: tables.delete_own(entries)) or False
        except StoreError:
            return False

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        return await self._submit(lambda tables: tables.put(key, value, if_version), durable=True)

    async def put_relaxed(
        self, key: str, value: bytes, *, if_version: Version | None
    ) -> Entry | None:
        return await self._submit(lambda tables: tables.put(key, value, if_version))

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        return await self._submit(lambda tables: tables.update(entry, value))

    async def delete(self, key: str, *, if_version: Version | None = None) -> bool:
        return await self._submit(lambda tables: tables.delete(key, if_version), brief=True)

    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        await self._take_part()
        return await self._submit(lambda tables: tables.enqueue(line, value, lease.id, rank))

    async def ahead(self, ticket: Entry) -> Entry | None:
        return await self._submit(lambda tables: tables.ahead(ticket.key), writes=False)

    async def get(self, key: str) -> Entry | None:
        return await self._submit(lambda tables: tables.get(key), writes=False)

    async def list(self, prefix: str) -> list[Entry]:
        return await self._submit(lambda tables: tables.list(prefix), writes=False)

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        self._require_usable()
        return await self._watches.watch(scope, notify)

    async def watch_entry(self, key: str, notify: Callable[[], None]) -> Watch:
        self._require_usable()
        return await self._watches.watch_entry(key, notify)

    def carried(self, watch: Watch) -> Entry | None:
        assert isinstance(watch, EntryWatch)
        entry, watch.carried = watch.carried, None
        return entry

    async def diagnose(self) -> Sequence[Finding]:
        return await self._submit(self._diagnose, writes=False)

    def _diagnose(self, tables: Transaction) -> Sequence[Finding]:
        path = self._database.connection.path
        names = [name for name, parts in self._directory.files().items() if "lease" in parts]
        disk = os.statvfs(os.path.dirname(path))
        return [
            *findings(
                path,
                sqlite=sqlite3.sqlite_version_info,
                journal=tables.journal(),
                file_system=kind_of(path),
                free_bytes=disk.f_bavail * disk.f_frsize,
                live_leases=sum(not self._leases.judge(name).ended for name in names),
            )
        ]

    def proof(self, lease: Lease) -> tuple[int, ...]:
        return self._leases.proof(lease.id)

    def _abandon(self) -> None:
        self._watches.forked()
        self._inbox.close()
        self._leases.release_all()
        self._database.connection.forked()

    async def _release(self) -> None:
        self._watches.close()
        self._inbox.close()
        self._leases.release_all()
        try:
            if self._database.serves:
                await self._database.submit(self._leave, writes=self._watches.ever_watched)
            self._inbox.remove()
        except StoreError:
            pass  # the next open removes an inbox without a reader
        finally:
            await self._database.close()

    def _leave(self, tables: Transaction) -> None:
        if self._watches.ever_watched:
            tables.unwatch_all()
        tables.give_back(self._database.alone)

    def _on_ended(self, lease: str, cause: Literal["died", "expired"]) -> None:
        self._emit(LeaseEnded(lease=lease, cause=cause))

    async def _take_part(self) -> None:
        """Remove leftovers of dead processes. From now on this handle ends their leases.

        One that only gives orders does not take part. It is often a command without an audit log.
        """
        self._require_usable()
        if not self._leases.looks_only:
            return
        self._leases.looks_only = False
        thread, undecided = self._database.thread, set[str]()
        if thread.sweeping is None or thread.sweeping.done():
            thread.sweeping = self._database.submit(
                lambda tables: self._sweep(tables, undecided), writes=False
            )
        with suppress(StoreError):  # what is left is removed when it is next read
            await shared(thread.sweeping)
            self._watches.follow(undecided)

    def _sweep(self, tables: Transaction, undecided: set[str]) -> None:
        """Remove leftovers of ended leases and inboxes without a reader."""
        undecided.clear()
        files = self._directory.files()
        known = {name for name, parts in files.items() if "lease" in parts}
        for name, parts in files.items():
            if name not in known and parts & {"alive", "seal"}:
                self._leases.clear_remains(name)
        leases = sorted(known | tables.leases())
        for lease in random.sample(leases, min(len(leases), _SWEPT)):
            verdict = self._leases.judge(lease)
            if verdict.ended:
                tables.remove(lease)
            elif verdict.remaining_s is None:
                undecided.add(lease)
        inboxes = [name for name, parts in files.items() if "inbox" in parts]
        for name in random.sample(inboxes, min(len(inboxes), _SWEPT)):
            if not self._inbox.has_reader(name):
                tables.drop_inbox(name, self._inbox.send)
