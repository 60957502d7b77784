"""The conformance suite can fail: stores broken on purpose, each caught by the tests it names, and
no test of the suite that catches nothing."""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import pytest

from doyen.errors import LeaseGone, OutcomeUnknown, StoreUnavailable
from doyen.lease.clock import VirtualClock
from doyen.model import Entry, Lease, Version
from doyen.stores import memory
from doyen.stores.memory import MemoryServer, MemoryStore
from doyen.stores.port import Context, Creation, Watch
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


@caught_by("a_lease_is_at_least_what_was_asked")
class GrantsLess(MemoryServer):
    def grant(self, ttl_s: float) -> Lease:
        return super().grant(ttl_s / 2)


@caught_by("lease_ids_are_never_used_again")
class ReusesLeaseIds(MemoryServer):
    def grant(self, ttl_s: float) -> Lease:
        lease = super().grant(ttl_s)
        again = Lease(f"lease-{len(self._leases)}", ttl_s)
        self._leases[again.id] = self._leases.pop(lease.id)
        return again


@caught_by("entries_live_as_long_as_their_lease")
class ForgetsEarly(MemoryServer):
    def grant(self, ttl_s: float) -> Lease:
        return replace(super().grant(ttl_s / 2), ttl_s=ttl_s)


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
class WaitsForAReaper(MemoryServer):
    """Ends leases only when somebody sweeps, and nobody does."""

    def expire(self) -> list[str]:
        return []

    @contextmanager
    def _turn(self) -> Iterator[float]:
        yield self.clock.now()


@caught_by("revoking_removes_everything_at_once")
class RevokesLater(MemoryStore):
    async def revoke(self, lease: Lease) -> None:
        self._loop.call_later(0.1, self._server.revoke, lease.id)


@caught_by("a_revoked_lease_never_revives", "an_expired_lease_never_revives")
class Revives(MemoryServer):
    def renew(self, lease: str) -> None:
        with self._turn() as now:
            self._leases.setdefault(lease, memory._Held(5.0, now + 5.0))
        super().renew(lease)


@caught_by("a_revoked_lease_never_revives", "an_expired_lease_never_revives")
class NeverTells(MemoryStore):
    """Raises `OutcomeUnknown` for ever where the lease has ended."""

    async def renew(self, lease: Lease) -> None:
        try:
            await super().renew(lease)
        except LeaseGone as error:
            raise OutcomeUnknown("the connection was closed") from error


@caught_by("remaining_time_is_sane")
class TellsTheHour(MemoryServer):
    """Gives the time of expiry where what is left is asked."""

    def _entry(self, key: str) -> Entry:
        entry = super()._entry(key)
        left = None if entry.remaining_s is None else entry.remaining_s + self.clock.now() + 1.0
        return replace(entry, remaining_s=left)


@caught_by(
    "of_many_racers_exactly_one_wins",
    "a_lost_answer_is_found_by_reading_ones_own_attempt",
)
class LastOneWins(MemoryServer):
    def create(self, key: str, value: bytes, lease: str) -> Creation:
        self.delete(key)
        return super().create(key, value, lease)


@caught_by("of_many_racers_exactly_one_wins")
class ShowsLosersThemselves(MemoryServer):
    def create(self, key: str, value: bytes, lease: str) -> Creation:
        won, entry = super().create(key, value, lease)
        return Creation(won, replace(entry, value=value))


@caught_by("a_refused_create_leaves_what_stands_there")
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
    """Keeps the token beside the entry, so that it goes with it."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self._tokens: dict[str, int] = {}

    def _insert(self, key: str, value: bytes, lease: str | None, line: str | None = None) -> None:
        super()._insert(key, value, lease, line)
        self._tokens[key] = self._entries[key].revision = self._tokens.get(key, 0) + 1


@caught_by("revisions_grow_however_an_entry_ended", "tokens_grow_from_client_to_client")
class ReleaseForgetsTheToken(CountsByKey):
    def delete(self, key: str, if_version: Version | None = None) -> bool:
        deleted = super().delete(key, if_version)
        if deleted:
            del self._tokens[key]
        return deleted


@caught_by("revisions_grow_however_an_entry_ended")
class ExpiryForgetsTheToken(CountsByKey):
    def _end(self, lease: str) -> None:
        for key in self._leases[lease].keys:
            del self._tokens[key]
        super()._end(lease)


@caught_by("put_follows_the_version", "concurrent_puts_lose_nothing")
class PutsBlindly(MemoryServer):
    def put(self, key: str, value: bytes, if_version: Version | None) -> Entry | None:
        stored = self._entries.get(key)
        return super().put(key, value, stored and stored.version)


@caught_by("a_version_is_not_valid_for_a_later_entry")
class VersionsStartAgain(MemoryServer):
    def _insert(self, key: str, value: bytes, lease: str | None, line: str | None = None) -> None:
        super()._insert(key, value, lease, line)
        self._entries[key].version = 1


@caught_by("delete_follows_the_version")
class DeletesBlindly(MemoryServer):
    def delete(self, key: str, if_version: Version | None = None) -> bool:
        return super().delete(key)


@caught_by("concurrent_deletes_succeed_once")
class DeletesTwice(MemoryServer):
    def delete(self, key: str, if_version: Version | None = None) -> bool:
        super().delete(key, if_version)
        return True


@caught_by("a_line_is_ordered_by_rank_then_by_arrival", "a_late_higher_rank_goes_ahead")
class IgnoresRank(MemoryServer):
    def enqueue(self, line: str, value: bytes, lease: str, rank: int = 0) -> Entry:
        return super().enqueue(line, value, lease, 0)


@caught_by("each_ticket_knows_the_one_ahead")
class PointsAtTheHead(MemoryServer):
    """The herd's mistake: everybody waits for the first."""

    def ahead(self, ticket: str) -> Entry | None:
        ahead = super().ahead(ticket)
        return ahead and self.head(ahead.key.rpartition("/")[0])


@caught_by("the_line_closes_up", "an_expired_ticket_is_gone_for_its_holder_too")
class GoneMeansFirst(MemoryServer):
    """A ticket that is not there has nobody ahead of it."""

    def ahead(self, ticket: str) -> Entry | None:
        return super().ahead(ticket) if ticket in self._entries else None


@caught_by("ticket_keys_lie_under_the_line_and_are_never_reused")
class NumbersByLength(MemoryServer):
    def enqueue(self, line: str, value: bytes, lease: str, rank: int = 0) -> Entry:
        with self._turn():
            key = f"{line}/{len(self.list(line)):010d}"
            self._insert(key, value, lease, line)
            return self._entry(key)


@caught_by("concurrent_arrivals_each_get_a_place")
class LastComeFirst(MemoryServer):
    def enqueue(self, line: str, value: bytes, lease: str, rank: int = 0) -> Entry:
        return super().enqueue(line, value, lease, self._counter)


@caught_by("clients_see_each_others_writes")
class RemembersReads(MemoryStore):
    def __init__(self, server: MemoryServer, context: Context) -> None:
        super().__init__(server, context)
        self._seen: dict[str, Entry | None] = {}

    async def get(self, key: str) -> Entry | None:
        return self._seen.setdefault(key, await super().get(key))


@caught_by("names_do_not_reach_into_each_other")
class IgnoresCase(MemoryStore):
    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        return await super().create(key.lower(), value, lease)

    async def get(self, key: str) -> Entry | None:
        return await super().get(key.lower())


@caught_by("names_of_dots_are_names")
class TakesKeysForPaths(MemoryStore):
    async def enqueue(self, line: str, value: bytes, lease: Lease, *, rank: int = 0) -> Entry:
        return await super().enqueue(posixpath.normpath(line), value, lease, rank=rank)


@caught_by("list_ends_at_its_prefix")
class ListsNeighbours(MemoryServer):
    def _under(self, prefix: str) -> Iterator[str]:
        return iter([key for key in self._keys if key.startswith(prefix)])


@caught_by("every_kind_of_change_is_told", "waiting_for_the_one_ahead_never_hangs")
class DeletesInSilence(MemoryServer):
    def _remove(self, key: str) -> None:
        del self._entries[key]
        self._keys.remove(key)


class _Deaf(memory._Alarm):
    def _set(self) -> None:
        pass


@caught_by("expiry_is_told_though_nobody_removes_anything")
class ExpiresInSilence(MemoryServer):
    """Tells of an expiry only when somebody comes by and notices."""

    def alarm(self, loop: asyncio.AbstractEventLoop) -> memory._Alarm:
        return _Deaf(self, loop)


class _Once(memory._Alarm):
    def _ring(self) -> None:
        self._server.expire()


@caught_by("a_renewed_lease_that_then_expires_is_told")
class RingsOnce(MemoryServer):
    """Sets its alarm for the first expiry and not again after a renewal."""

    def alarm(self, loop: asyncio.AbstractEventLoop) -> memory._Alarm:
        return _Once(self, loop)


@caught_by("watch_read_wait_never_misses_the_final_state")
class WatchesOnce(MemoryServer):
    """One notification a watch, and no more."""

    def subscribe(self, scope: str, changed: Callable[[], None]) -> Callable[[], None]:
        def once() -> None:
            changed()
            unsubscribe()

        unsubscribe = super().subscribe(scope, once)
        return unsubscribe


@caught_by("watch_read_wait_never_misses_the_final_state")
class WatchesLate(MemoryStore):
    """Answers `watch` before the watch stands."""

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        watch = await super().watch(scope, lambda: None)
        self._loop.call_later(1e-3, lambda: self._server.subscribe(scope, notify))
        return watch


@caught_by("what_came_and_went_is_told_to_who_saw_it")
class ComparesNowAndThen(MemoryStore):
    """Looks at intervals whether anything differs from the last time."""

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


@caught_by("a_closed_watch_is_silent")
class TalksOn(MemoryStore):
    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        def changed() -> None:
            self._loop.call_soon(notify)

        self._server.subscribe(scope, changed)
        return await super().watch(scope, lambda: None)


@caught_by("one_client_may_watch_much")
class OneWatchAScope(MemoryServer):
    def subscribe(self, scope: str, changed: Callable[[], None]) -> Callable[[], None]:
        self._watchers.pop(scope, None)
        return super().subscribe(scope, changed)


@caught_by("cancelled_calls_leave_no_half")
class CreatesInTwoSteps(MemoryStore):
    """Writes the record, then binds it to the lease."""

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        if self._server.put(key, value, None) is not None:
            await asyncio.sleep(0)
            self._server.delete(key)
        return await super().create(key, value, lease)


@caught_by("a_cancelled_revoke_is_whole")
class RevokesInTwoSteps(MemoryStore):
    async def revoke(self, lease: Lease) -> None:
        held = self._server._leases.pop(lease.id, None)
        if held is not None:
            # Nothing is found under the lease from here on, yet its entries still stand.
            for key in held.keys:
                self._server._entries[key].lease = None
            await asyncio.sleep(0)
            for key in held.keys:
                self._server.delete(key)


@caught_by("a_request_that_lands_late_revives_nothing", "a_revoked_lease_never_revives")
class TakesAnyLease(MemoryServer):
    def _live(self, lease: str) -> memory._Held:
        return self._leases.setdefault(lease, memory._Held(1e6, self.clock.now() + 1e6))


@caught_by("what_is_not_bound_to_a_lease_stays", "revisions_grow_however_an_entry_ended")
class ForgetsAtRestart(MemoryServer):
    """Stands for a store without durability: the harness gives it no memory across a restart."""


@caught_by("racers_for_a_forgotten_key")
class LooksBeforeItWrites(MemoryStore):
    """Overwrites what has come since it looked."""

    async def create(self, key: str, value: bytes, lease: Lease) -> Creation:
        if self._server.get(key) is None:
            await asyncio.sleep(0.02)
            self._server.delete(key)
        return await super().create(key, value, lease)


@caught_by("foreign_values_spoil_only_what_they_stand_on")
class ReadsEverything(MemoryServer):
    """Stumbles over what is not its own, wherever it stands."""

    def renew(self, lease: str) -> None:
        if any(b"stray" in stored.value for stored in self._entries.values()):
            raise StoreUnavailable("the store holds something unreadable")
        super().renew(lease)


@caught_by("a_link_that_falls_silent_during_each_call")
class NeverGivesUp(FaultyStore):
    """Waits for an answer though its caller has given up."""

    async def get(self, key: str) -> Entry | None:
        call = asyncio.ensure_future(super().get(key))
        while not call.done():
            try:
                await asyncio.wait({call})
            except asyncio.CancelledError:
                continue
        return call.result()


@caught_by("a_client_that_the_server_has_cut_off")
class StaysAway(FaultyStore):
    """Does not come back after its connection was broken."""

    was_reset = False

    async def renew(self, lease: Lease) -> None:
        if self.was_reset:
            raise StoreUnavailable("the connection is closed")
        await super().renew(lease)


caught_by("leases_of_the_dead")(WaitsForAReaper)


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
        if isinstance(store, StaysAway):
            store.was_reset = True

    async def restart(self) -> None:
        if self.server_type is ForgetsAtRestart:
            self.server = self.server_type(self.virtual)


@pytest.mark.parametrize(
    ("broken", "test"), BROKEN, ids=[f"{broken.__name__}-{test}" for broken, test in BROKEN]
)
def test_a_broken_store_is_caught(broken: Broken, test: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(LinkedStoreConformance(), test)(BrokenHarness(broken))


class HangsUp(MemoryStore):
    """Meets a closed connection first, as a client of ZooKeeper does when the server expires its
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
def test_a_store_whose_server_hangs_up_as_a_lease_ends_is_not_broken(test: str) -> None:
    """The port lets any call end in doubt; what it forbids is that the lease be accepted."""
    getattr(LinkedStoreConformance(), test)(BrokenHarness(HangsUp))


def test_every_test_of_the_suite_catches_something() -> None:
    suite = {name for name in dir(LinkedStoreConformance) if name.startswith("test_")}
    assert suite == {test for _, test in BROKEN}
