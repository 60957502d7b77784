"""The conformance suite detects broken stores.

Each broken store names the tests of the suite that must fail on it, and every test of the suite
must fail on at least one broken store.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import pytest

from doyen.errors import LeaseGone, OutcomeUnknown, StoreUnavailable
from doyen.lease.clock import VirtualClock
from doyen.model import Entry, Lease, Version
from doyen.stores import memory
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, Creation, Looked, Watch
from doyen.testing import FaultyStore, LinkedStoreConformance
from linked import VirtualHarness

Broken = type[MemoryServer] | type[MemoryStore] | type[FaultyStore]
C = TypeVar("C", bound=Broken)

BROKEN: list[tuple[Broken, str]] = []


def caught_by(*tests: str) -> Callable[[C], C]:
    def register(broken: C) -> C:
        BROKEN.extend((broken, f"test_{test}") for test in tests)
        return broken

    return register


@caught_by("granted_ttl_is_at_least_the_requested_ttl")
class GrantsLess(MemoryServer):
    def grant(self, ttl_s: float) -> Lease:
        return super().grant(ttl_s / 2)


@caught_by("lease_ids_are_never_reused")
class ReusesLeaseIds(MemoryServer):
    def grant(self, ttl_s: float) -> Lease:
        lease = super().grant(ttl_s)
        again = Lease(f"lease-{len(self._leases)}", ttl_s)
        self._leases[again.id] = self._leases.pop(lease.id)
        return again


@caught_by("a_lease_does_not_end_before_its_ttl")
class ForgetsEarly(MemoryServer):
    def grant(self, ttl_s: float) -> Lease:
        return super().grant(ttl_s / 2)._replace(ttl_s=ttl_s)


@caught_by("renewal_extends_the_lease")
class IgnoresRenewals(MemoryServer):
    def renew(self, lease: str) -> None:
        with self._turn():
            self._live(lease)


@caught_by(
    "expiry_removes_everything_bound_to_the_lease",
    "create_succeeds_over_an_entry_whose_lease_expired",
    "an_expired_ticket_is_gone_for_its_holder_too",
)
class NeverExpires(MemoryServer):
    """Never ends a lease by time."""

    def expire(self) -> list[str]:
        return []

    @contextmanager
    def _turn(self) -> Iterator[float]:
        yield self.clock.now()


@caught_by("revoking_removes_everything_at_once")
class RevokesLater(MemoryStore):
    async def revoke(self, lease: Lease) -> None:
        self._loop.call_later(0.1, self._server.revoke, lease.id)


@caught_by("a_warrant_ends_the_lease_of_another_client")
class EndsOwnLeasesOnly(MemoryStore):
    """Returns from `end` for a lease that this client did not grant, without ending it."""

    async def end(self, warrant: bytes) -> None:
        if warrant.decode() in self._own:
            await super().end(warrant)


@caught_by("a_warrant_ends_no_other_lease")
class EndsTheNextLeaseToo(MemoryStore):
    async def end(self, warrant: bytes) -> None:
        for lease in list(self._server._leases):
            if lease >= warrant.decode():
                self._server.revoke(lease)


@caught_by("a_revoked_lease_never_revives", "an_expired_lease_never_revives")
class Revives(MemoryServer):
    def renew(self, lease: str) -> None:
        with self._turn() as now:
            self._leases.setdefault(lease, memory._Held(5.0, now + 5.0))
        super().renew(lease)


@caught_by("a_revoked_lease_never_revives", "an_expired_lease_never_revives")
class HidesLeaseGone(MemoryStore):
    """Raises `OutcomeUnknown` instead of `LeaseGone`, however often the call is repeated."""

    async def renew(self, lease: Lease) -> None:
        try:
            await super().renew(lease)
        except LeaseGone as error:
            raise OutcomeUnknown("the connection was closed") from error


@caught_by("remaining_time_is_within_bounds")
class ReturnsExpiryTime(MemoryServer):
    """Returns the time of expiry as the remaining time."""

    def _entry(self, key: str) -> Entry:
        entry = super()._entry(key)
        left = None if entry.remaining_s is None else entry.remaining_s + self.clock.now() + 1.0
        return entry._replace(remaining_s=left)


@caught_by("remaining_time_is_within_bounds")
class TellsOfEndedLeases(MemoryStore):
    async def remaining(self, leases: Sequence[str]) -> dict[str, float]:
        return dict.fromkeys(leases, 1.0)


@caught_by("remaining_time_is_within_bounds")
class ListsWithoutRemainingTime(MemoryServer):
    def list(self, prefix: str) -> list[Entry]:
        return [entry._replace(remaining_s=None) for entry in super().list(prefix)]


@caught_by("of_many_racers_exactly_one_wins", "a_lost_answer_is_resolved_by_reading_the_attempt_id")
class LastOneWins(MemoryServer):
    def create(self, key: str, value: bytes, lease: str) -> Creation:
        self.delete(key)
        return super().create(key, value, lease)


@caught_by("of_many_racers_exactly_one_wins")
class ReturnsTheLosersValue(MemoryServer):
    def create(self, key: str, value: bytes, lease: str) -> Creation:
        won, entry = super().create(key, value, lease)
        return Creation(won, entry._replace(value=value))


@caught_by("a_refused_create_changes_nothing")
class RebindsOnRefusal(MemoryServer):
    def create(self, key: str, value: bytes, lease: str) -> Creation:
        creation = super().create(key, value, lease)
        stored = self._entries[key]
        self._unbind(key, stored)
        stored.lease = lease
        self._leases[lease].keys[key] = None
        return creation


@caught_by("put_succeeds_over_an_entry_whose_lease_ended")
class KeepsTombstones(MemoryServer):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self._graves: dict[str, None] = {}

    def _remove(self, key: str) -> None:
        super()._remove(key)
        self._graves[key] = None

    def put(self, key: str, value: bytes, if_version: Version | None) -> Entry | None:
        return None if key in self._graves else super().put(key, value, if_version)


class CountsByKey(MemoryServer):
    """Keeps a token counter for each key, which subclasses delete together with the entry."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self._tokens: dict[str, int] = {}

    def _insert(self, key: str, value: bytes, lease: str | None, line: str | None = None) -> None:
        super()._insert(key, value, lease, line)
        self._tokens[key] = self._entries[key].revision = self._tokens.get(key, 0) + 1


@caught_by("revisions_grow_across_deletion_expiry_and_restart", "tokens_grow_across_clients")
class ReleaseForgetsTheToken(CountsByKey):
    def delete(self, key: str, if_version: Version | None = None) -> bool:
        deleted = super().delete(key, if_version)
        if deleted:
            del self._tokens[key]
        return deleted


@caught_by("revisions_grow_across_deletion_expiry_and_restart")
class ExpiryForgetsTheToken(CountsByKey):
    def _end(self, lease: str) -> None:
        for key in self._leases[lease].keys:
            del self._tokens[key]
        super()._end(lease)


@caught_by("put_checks_the_version", "concurrent_puts_lose_nothing")
class PutsBlindly(MemoryServer):
    def put(self, key: str, value: bytes, if_version: Version | None) -> Entry | None:
        stored = self._entries.get(key)
        return super().put(key, value, stored and stored.version)


@caught_by("put_over_an_entry_with_a_lease_unbinds_it")
class KeepsTheLease(MemoryServer):
    """`put` replaces the value of an entry, which stays bound to its lease."""

    def put(self, key: str, value: bytes, if_version: Version | None) -> Entry | None:
        stored = self._entries.get(key)
        if stored is None or stored.lease is None or stored.version != if_version:
            return super().put(key, value, if_version)
        return self.update(self._entry(key), value)


@caught_by("a_version_is_not_valid_for_a_later_entry", "update_of_an_entry_that_is_gone")
class RestartsVersions(MemoryServer):
    """Counts the writes of each entry, from 1 on, as the version of a znode does."""

    def _insert(self, key: str, value: bytes, lease: str | None, line: str | None = None) -> None:
        super()._insert(key, value, lease, line)
        self._entries[key].version = 1

    def update(self, entry: Entry, value: bytes) -> Entry | None:
        updated = super().update(entry, value)
        if updated is None:
            return None
        assert isinstance(entry.version, int)
        self._entries[entry.key].version = entry.version + 1
        return self._entry(entry.key)


@caught_by(
    "update_replaces_only_the_version_it_names",
    "update_of_an_entry_that_is_gone",
    "concurrent_updates_lose_nothing",
    "an_update_without_an_answer_is_whole",
)
class UpdatesBlindly(MemoryServer):
    def update(self, entry: Entry, value: bytes) -> Entry | None:
        stored = self._entries.get(entry.key)
        return super().update(entry._replace(version=stored and stored.version), value)


@caught_by(
    "update_replaces_only_the_version_it_names",
    "update_of_an_entry_read_from_the_store",
    "an_updated_entry_ends_with_its_lease",
    "an_updated_entry_is_gone_when_its_lease_is_revoked",
    "update_of_an_entry_without_a_lease",
)
class UpdatesByPut(MemoryServer):
    """The updated entry is no longer bound to its lease."""

    def update(self, entry: Entry, value: bytes) -> Entry | None:
        updated = self.put(entry.key, value, entry.version)
        return None if updated is None else updated._replace(lease=entry.lease)


@caught_by("update_replaces_only_the_version_it_names", "an_updated_ticket_keeps_its_place")
class UpdatesByCreatingAgain(MemoryServer):
    """The updated entry has another revision, and an updated ticket another place."""

    def update(self, entry: Entry, value: bytes) -> Entry | None:
        stored = self._entries.get(entry.key)
        if stored is None or stored.lease is None or stored.version != entry.version:
            return None
        self.delete(entry.key)
        if stored.line is not None:
            return self.enqueue(stored.line, value, stored.lease)
        return self.create(entry.key, value, stored.lease).entry


@caught_by("update_of_an_entry_whose_lease_was_revoked", "update_of_an_entry_that_is_gone")
class UpdatesWhatIsGone(MemoryServer):
    """Writes the entry again if it has disappeared since it was read."""

    def update(self, entry: Entry, value: bytes) -> Entry | None:
        return super().update(entry, value) or self.put(entry.key, value, None)


@caught_by("an_updated_entry_ends_with_its_lease")
class UpdatesRenew(MemoryServer):
    """An update prolongs the lease."""

    def update(self, entry: Entry, value: bytes) -> Entry | None:
        updated = super().update(entry, value)
        if updated is not None and updated.lease is not None:
            self.renew(updated.lease)
        return updated


@caught_by("every_kind_of_change_notifies")
class UpdatesWithoutNotifying(MemoryServer):
    def update(self, entry: Entry, value: bytes) -> Entry | None:
        watchers, self._watchers = self._watchers, {}
        try:
            return super().update(entry, value)
        finally:
            self._watchers = watchers


@caught_by(
    "updates_and_the_end_of_the_lease_at_the_same_time",
    "concurrent_updates_lose_nothing",
)
class UpdatesByReadThenWrite(MemoryStore):
    """Checks the version in one request, and writes in another."""

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        found = self._server.get(entry.key)
        if found is None or found.lease is None or found.version != entry.version:
            return None
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        now = self._server.get(entry.key)
        return self._server.update(now, value) if now else self._server.put(entry.key, value, None)


@caught_by("cancelled_calls_are_atomic")
class UpdatesInTwoSteps(MemoryStore):
    """Writes the value, then the version."""

    async def update(self, entry: Entry, value: bytes) -> Entry | None:
        stored = self._server._entries.get(entry.key)
        if stored is not None and stored.lease is not None and stored.version == entry.version:
            stored.value = value
        await asyncio.sleep(0)
        return await super().update(entry, value)


@caught_by("delete_checks_the_version")
class DeletesBlindly(MemoryServer):
    def delete(self, key: str, if_version: Version | None = None) -> bool:
        return super().delete(key)


@caught_by("concurrent_deletes_succeed_once", "entries_deleted_together")
class DeletesTwice(MemoryServer):
    def delete(self, key: str, if_version: Version | None = None) -> bool:
        super().delete(key, if_version)
        return True


class Begins(MemoryStore):
    """Begins deletions, and says that they are done when all of them are."""

    checks_versions = True

    def begin_deletion(self, entries: Sequence[Entry]) -> asyncio.Future[None]:
        async def delete() -> None:
            for entry in entries:
                version = entry.version if self.checks_versions else None
                await self.delete(entry.key, if_version=version)

        return asyncio.ensure_future(delete())


@caught_by("deletions_that_are_begun")
class BeginsToDeleteBlindly(Begins):
    checks_versions = False


@caught_by("deletions_that_are_begun")
class BeginsAndSaysSoOnly(MemoryStore):
    def begin_deletion(self, entries: Sequence[Entry]) -> asyncio.Future[None]:
        begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        begun.set_result(None)
        return begun


@caught_by("a_line_is_ordered_by_rank_then_by_arrival", "a_late_higher_rank_goes_ahead")
class IgnoresRank(MemoryServer):
    def enqueue(self, line: str, value: bytes, lease: str, rank: int = 0) -> Entry:
        return super().enqueue(line, value, lease, 0)


@caught_by("ahead_returns_the_preceding_ticket")
class PointsAtTheHead(MemoryServer):
    """Returns the head of the line for every ticket, which causes a thundering herd."""

    def ahead(self, ticket: str) -> Entry | None:
        ahead = super().ahead(ticket)
        return ahead and self.head(ahead.key.rpartition("/")[0])


@caught_by("removed_tickets_are_no_longer_ahead", "an_expired_ticket_is_gone_for_its_holder_too")
class AheadIgnoresMissingTickets(MemoryServer):
    """Treats a ticket that no longer exists as the head of the line."""

    def ahead(self, ticket: str) -> Entry | None:
        return super().ahead(ticket) if ticket in self._entries else None


@caught_by("create_and_look_is_three_calls_in_one")
class LooksAndBelieves(MemoryStore):
    """Takes the entry of another for its own."""

    async def create_and_look(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked:
        looked = await super().create_and_look(key, value, lease, ticket, other)
        return looked._replace(creation=looked.creation._replace(won=True))


@caught_by("create_and_look_is_three_calls_in_one")
class LooksAway(MemoryStore):
    """Takes every ticket for the first."""

    async def create_and_look(
        self, key: str, value: bytes, lease: Lease, ticket: Entry | None, other: str
    ) -> Looked:
        return await super().create_and_look(key, value, lease, None, other)


@caught_by("ticket_keys_lie_under_the_line_and_are_never_reused")
class NumbersByLength(MemoryServer):
    def enqueue(self, line: str, value: bytes, lease: str, rank: int = 0) -> Entry:
        with self._turn():
            key = f"{line}/{len(self.list(line)):010d}"
            self._insert(key, value, lease, line)
            return self._entry(key)


@caught_by("concurrent_enqueues_each_get_a_ticket")
class OrdersByLatest(MemoryServer):
    def enqueue(self, line: str, value: bytes, lease: str, rank: int = 0) -> Entry:
        return super().enqueue(line, value, lease, self._counter)


@caught_by("clients_see_each_others_writes")
class CachesReads(MemoryStore):
    def __init__(self, server: MemoryServer, context: Context) -> None:
        super().__init__(server, context)
        self._seen: dict[str, Entry | None] = {}

    async def get(self, key: str) -> Entry | None:
        return self._seen.setdefault(key, await super().get(key))


@caught_by("names_are_isolated_from_each_other")
class IgnoresCase(MemoryStore):
    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        return await super().create(key.lower(), value, lease)

    async def get(self, key: str) -> Entry | None:
        return await super().get(key.lower())


@caught_by("names_consisting_of_dots")
class NormalizesKeysAsPaths(MemoryStore):
    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        return await super().enqueue(posixpath.normpath(line), value, lease, rank=rank)


@caught_by("list_returns_only_keys_under_its_prefix")
class ListsNeighbours(MemoryServer):
    def _under(self, prefix: str) -> Iterator[str]:
        return iter([key for key in self._keys if key.startswith(prefix)])


@caught_by("every_kind_of_change_notifies", "waiting_for_the_one_ahead_never_hangs")
class DeletesWithoutNotifying(MemoryServer):
    def _remove(self, key: str) -> None:
        del self._entries[key]
        self._keys.remove(key)


class _NoAlarm(memory._Alarm):
    def _set(self) -> None:
        pass


@caught_by("expiry_notifies_without_a_reader_or_writer")
class ExpiresWithoutNotifying(MemoryServer):
    """Notifies of an expiry only when another call finds the lease expired."""

    def alarm(self, loop: asyncio.AbstractEventLoop) -> memory._Alarm:
        return _NoAlarm(self, loop)


@caught_by("the_end_of_one_of_many_leases_notifies")
class NotifiesOfTheFirstOnly(MemoryServer):
    """Follows only the first leases under a prefix."""

    def _changed(self, key: str) -> None:
        prefix = key.rpartition("/")[0]
        if sum(each < key for each in self._under(prefix)) < 16:
            super()._changed(key)


class _SingleAlarm(memory._Alarm):
    def _ring(self) -> None:
        self._server.expire()


@caught_by("expiry_after_renewals_notifies")
class AlarmNotRescheduled(MemoryServer):
    """Schedules its alarm for the first expiry and not again after a renewal."""

    def alarm(self, loop: asyncio.AbstractEventLoop) -> memory._Alarm:
        return _SingleAlarm(self, loop)


@caught_by("watch_read_wait_never_misses_the_final_state")
class WatchesOnce(MemoryServer):
    """Notifies each watch at most once."""

    def subscribe(self, scope: str, changed: Callable[[], None]) -> Callable[[], None]:
        def once() -> None:
            changed()
            unsubscribe()

        unsubscribe = super().subscribe(scope, once)
        return unsubscribe


@caught_by("watch_read_wait_never_misses_the_final_state")
class WatchesLate(MemoryStore):
    """Returns from `watch` before the watch is established."""

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        watch = await super().watch(scope, lambda: None)
        self._loop.call_later(1e-3, lambda: self._server.subscribe(scope, notify))
        return watch


@caught_by("what_notifications_carry_reaches_the_final_value")
class CarriesWhatWasThereBefore(MemoryStore):
    """Notifications carry the entry as it was before the change."""

    async def watch_entry(self, key: str, notify: Callable[[], None]) -> Watch:
        self._before = [self._server.get(key)]

        def changed() -> None:
            self._before.append(self._server.get(key))
            notify()

        return await self.watch(key, changed)

    def carried(self, watch: Watch) -> Entry | None:
        return self._before[-2]


@caught_by("the_end_of_a_lease_notifies_watchers_of_an_entry")
class NotifiesOfWhatCanBeCarried(MemoryStore):
    """Does not notify watchers of an entry of its end."""

    async def watch_entry(self, key: str, notify: Callable[[], None]) -> Watch:
        return await self.watch(key, lambda: notify() if self._server.get(key) else None)


@caught_by("an_entry_created_and_deleted_after_the_watch_notifies")
class PollsForDifferences(MemoryStore):
    """Compares states at intervals, so that a change that was undone in between goes unnoticed."""

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        watch = await super().watch(scope, lambda: None)

        def compare(before: Entry | None) -> None:
            entry = self._server.get(scope)
            if (before is None) != (entry is None):
                notify()
            if watch in self._watches:
                self._loop.call_later(0.1, compare, entry)

        compare(self._server.get(scope))
        return watch


@caught_by("a_closed_watch_does_not_notify")
class NotifiesAfterClose(MemoryStore):
    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        def changed() -> None:
            self._loop.call_soon(notify)

        self._server.subscribe(scope, changed)
        return await super().watch(scope, lambda: None)


@caught_by("one_client_may_have_many_watches")
class OneWatchAScope(MemoryServer):
    def subscribe(self, scope: str, changed: Callable[[], None]) -> Callable[[], None]:
        self._watchers.pop(scope, None)
        return super().subscribe(scope, changed)


@caught_by("cancelled_calls_are_atomic")
class CreatesInTwoSteps(MemoryStore):
    """Writes the record, then binds it to the lease."""

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        if self._server.put(key, value, None) is not None:
            await asyncio.sleep(0)
            self._server.delete(key)
        return await super().create(key, value, lease)


@caught_by("a_cancelled_revoke_is_atomic")
class RevokesInTwoSteps(MemoryStore):
    async def revoke(self, lease: Lease) -> None:
        held = self._server._leases.pop(lease.id, None)
        if held is not None:
            # From here on the lease is gone, but its entries still exist.
            for key in held.keys:
                self._server._entries[key].lease = None
            await asyncio.sleep(0)
            for key in held.keys:
                self._server.delete(key)


@caught_by("a_late_request_of_a_revoked_lease_has_no_effect", "a_revoked_lease_never_revives")
class AcceptsAnyLease(MemoryServer):
    def _live(self, lease: str) -> memory._Held:
        return self._leases.setdefault(lease, memory._Held(1e6, self.clock.now() + 1e6))


@caught_by(
    "entries_without_a_lease_are_durable", "revisions_grow_across_deletion_expiry_and_restart"
)
class ForgetsAtRestart(MemoryServer):
    """A store without durability: the harness replaces it with an empty one on restart."""


@caught_by("a_race_for_a_key_with_forgotten_history")
class CreatesByReadThenWrite(MemoryStore):
    """Overwrites an entry that was created after its read."""

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        if self._server.get(key) is None:
            await asyncio.sleep(0.02)
            self._server.delete(key)
        return await super().create(key, value, lease)


@caught_by("foreign_values_affect_only_their_own_keys")
class FailsOnForeignValues(MemoryServer):
    """Fails renewals if any key holds a foreign value."""

    def renew(self, lease: str) -> None:
        if any(b"stray" in stored.value for stored in self._entries.values()):
            raise StoreUnavailable("the store holds something unreadable")
        super().renew(lease)


@caught_by("calls_during_a_silent_network_cut")
class IgnoresCancellation(FaultyStore):
    """Goes on waiting for an answer after its caller has cancelled the call."""

    async def get(self, key: str) -> Entry | None:
        call = asyncio.ensure_future(super().get(key))
        while not call.done():
            try:
                await asyncio.wait({call})
            except asyncio.CancelledError:
                continue
        return call.result()


@caught_by("a_client_recovers_after_its_connections_are_reset")
class NeverReconnects(FaultyStore):
    """Does not reconnect after its connection was reset."""

    was_reset = False

    async def renew(self, lease: Lease) -> None:
        if self.was_reset:
            raise StoreUnavailable("the connection is closed")
        await super().renew(lease)


caught_by("leases_of_crashed_clients")(NeverExpires)


class BrokenHarness(VirtualHarness):
    def __init__(self, broken: Broken) -> None:
        if issubclass(broken, MemoryServer):
            self.server_type = broken
        elif issubclass(broken, MemoryStore):
            self.store_type = broken
        else:
            self.faulty = broken
        super().__init__()

    def was_reset(self, store: FaultyStore) -> None:
        if isinstance(store, NeverReconnects):
            store.was_reset = True

    async def restart(self) -> None:
        if self.server_type is ForgetsAtRestart:
            self.server = self.server_type(self.virtual)


@pytest.mark.parametrize(
    ("broken", "test"), BROKEN, ids=[f"{broken.__name__}-{test}" for broken, test in BROKEN]
)
def test_a_broken_store_is_detected(broken: Broken, test: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(LinkedStoreConformance(), test)(BrokenHarness(broken))


class ClosesConnectionOnExpiry(MemoryStore):
    """Sees a closed connection first, as a client of ZooKeeper does when the server expires its
    session, and learns that its lease has ended after it has reconnected."""

    def __init__(self, server: MemoryServer, context: Context) -> None:
        super().__init__(server, context)
        self._errors = [OutcomeUnknown("closed by the server"), StoreUnavailable("no connection")]

    async def renew(self, lease: Lease) -> None:
        try:
            await super().renew(lease)
        except LeaseGone:
            if self._errors:
                raise self._errors.pop(0) from None
            raise


@pytest.mark.parametrize(
    "test", ["test_an_expired_lease_never_revives", "test_a_revoked_lease_never_revives"]
)
def test_a_store_may_close_the_connection_before_reporting_lease_gone(test: str) -> None:
    """The port allows any call to raise `OutcomeUnknown`. It forbids accepting an ended lease."""
    getattr(LinkedStoreConformance(), test)(BrokenHarness(ClosesConnectionOnExpiry))


def test_every_conformance_test_detects_a_broken_store() -> None:
    suite = {name for name in dir(LinkedStoreConformance) if name.startswith("test_")}
    assert suite == {test for _, test in BROKEN}
