"""What `doyen dash` observes, in virtual time: terms and their causes, watches, staleness."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from doyen import Session
from doyen.errors import StoreUnavailable
from doyen.events import Record
from doyen.manage.roster import SUSPECT_AFTER
from doyen.model import Entry, Order, PastTerm
from doyen.stores.port import Store, Watch
from doyen.testing.faults import Faults
from doyen.web.board import Board
from doyen.web.hub import SHARE, SHORT, Hub
from doyen.web.panels import PagePanel, config_detail, panels_of
from doyen.web.terms import ElectionRow, LeaseSight, SeenTerm
from doyen.web.trail import AuditTrail, recorded_terms
from support import TTL_S, Place, core_of, until, virtual


class Counted:
    """A store that counts its watches and reads."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.watching: list[str] = []
        self.reads = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        self.watching.append(scope)
        return await self._store.watch(scope, notify)

    async def list(self, prefix: str) -> list[Entry]:
        self.reads += 1
        return await self._store.list(prefix)


@asynccontextmanager
async def observed(
    place: Place, faults: Faults | None = None, **settings: Any
) -> AsyncIterator[Hub]:
    """A hub on a session of its own, which has seen the store once."""
    hubs: list[Hub] = []

    def sink(record: Record) -> None:
        for each in hubs:
            each.on_event(record)

    session = await place.open(faults, sinks=(sink,), **settings)
    hub = Hub(core_of(session), Board(place.clock.wall))
    hubs.append(hub)
    work = [hub.run(), *(panel.run() for panel in panels_of(hub))]
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        await until(lambda: "health" in hub.board.topics and "members" in hub.board.topics)
        yield hub
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        hub.close()
        failed = [each for each in ended if not isinstance(each, asyncio.CancelledError)]
        assert not failed, failed


@asynccontextmanager
async def leading(session: Session, election: str, name: str, **options: Any) -> AsyncIterator[Any]:
    async with session.campaign(election, name=name, **options) as term:
        yield term


def terms(hub: Hub, key: str = "elections/e") -> list[tuple[str, str]]:
    return [(term.name, term.cause) for term in hub.board.rows[key].terms]


@virtual
async def test_a_new_leader_and_its_resignation_are_seen_at_once(place: Place) -> None:
    session = await place.open()
    async with observed(place) as hub:
        row = None
        async with leading(session, "e", "a"):
            await until(lambda: "elections/e" in hub.board.rows)
            row = hub.board.rows["elections/e"]
            await until(lambda: hub.watches == 1)
            assert row.current is not None
            began = place.clock.wall()
        await until(lambda: row.record is None, 0.1)
        assert terms(hub) == [("a", "released")]
        assert row.terms[0].until == pytest.approx(began, abs=0.1)


@virtual
async def test_reads_that_are_cancelled_before_they_begin_leave_no_request(place: Place) -> None:
    session = await place.open()
    async with observed(place) as hub, leading(session, "e", "a"):
        await until(lambda: "elections/e" in hub.board.rows)
        hub.board.open_page().show(["elections/e"])
        for reading in (hub._look_at_leases, hub._read_trails):
            hub._trails.clear()
            hub._entries_tell = True
            task = asyncio.ensure_future(reading())
            await asyncio.sleep(0)  # its reads are tasks that have not begun
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        gc.collect()  # a request that is never awaited is a warning, and so an error


@virtual
async def test_a_frozen_leader_is_an_expired_lease(place: Place) -> None:
    faults = Faults()
    session, other = await place.open(faults), await place.open()
    async with observed(place) as hub:
        page = hub.board.open_page()
        waiting: asyncio.Task[None] | None = None

        async def second() -> None:
            async with leading(other, "e", "b"):
                await asyncio.sleep(1000)

        with contextlib.suppress(Exception):
            async with leading(session, "e", "a"):
                waiting = asyncio.ensure_future(second())
                await until(lambda: hub.board.rows.get("elections/e") is not None)
                page.show(["elections/e"])
                await until(lambda: hub.board.topics.get("leases"))
                faults.cut()
                await asyncio.sleep(1000)
        await until(lambda: len(hub.board.rows["elections/e"].terms) == 2)
        assert terms(hub) == [("a", "expired"), ("b", "")]
        assert waiting is not None
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        faults.heal()


@virtual
async def test_orders_are_the_cause_of_what_they_cause(place: Place) -> None:
    one, two, operator = [await place.open() for _ in range(3)]

    async def stand(session: Session, name: str) -> None:
        async for campaign in session.campaigns("e", name=name):
            async with campaign:
                await asyncio.sleep(1000)

    async with observed(place) as hub:
        standing = [asyncio.ensure_future(stand(one, "a"))]
        await until(lambda: place.holder() == "a")
        standing.append(asyncio.ensure_future(stand(two, "b")))
        await until(lambda: len(place.line()) == 2 and hub.watches == 1)
        await operator.transfer("e", to="b")
        await until(lambda: len(terms(hub)) == 2)
        await until(lambda: len(place.line()) == 2)
        await operator.resign("e")
        await until(lambda: len(terms(hub)) == 3)
        assert terms(hub) == [("a", "transferred"), ("b", "resigned"), ("a", "")]
        for task in standing:
            task.cancel()
        await asyncio.gather(*standing, return_exceptions=True)


@virtual
async def test_one_watch_for_each_election_however_many_pages(place: Place) -> None:
    counted: list[Counted] = []

    def wrap(store: Store) -> Any:
        counted.append(Counted(store))
        return counted[-1]

    session = await place.open()
    async with contextlib.AsyncExitStack() as stack:
        for number in range(20):
            await stack.enter_async_context(leading(session, f"e{number}", "a"))
        async with observed(place, wrap=wrap) as hub:
            for _ in range(5):
                hub.board.open_page().show(hub.board.rows)
            await asyncio.sleep(30)
            watching = [scope for scope in counted[0].watching if scope.startswith("elections")]
            assert sorted(watching) == sorted(f"elections/e{number}" for number in range(20))
            assert hub.watches == 20


@virtual
async def test_leases_that_are_shown_are_looked_at_once_each(place: Place) -> None:
    """Elections of one session share its lease."""
    session = await place.open()
    async with leading(session, "e", "a"), leading(session, "f", "a"), observed(place) as hub:
        page = hub.board.open_page()
        page.show(["elections/e", "elections/f"])
        hub.shown_changed()
        await until(lambda: hub.board.topics.get("leases"))
        ((_, (remaining_s, at, ttl_s)),) = hub.board.topics["leases"].items()
        assert 0 < remaining_s <= ttl_s <= TTL_S
        assert at == pytest.approx(place.clock.wall(), abs=1)
        await asyncio.sleep(TTL_S)
        ((_, (remaining_s, _, ttl_s)),) = hub.board.topics["leases"].items()
        assert remaining_s > TTL_S / 3, "it is renewed"


class Apart(Counted):
    """A store whose entries say nothing of their leases, as those of a quorum."""

    async def get(self, key: str) -> Entry | None:
        found = await self._store.get(key)
        return None if found is None else found._replace(remaining_s=None)

    async def list(self, prefix: str) -> list[Entry]:
        return [each._replace(remaining_s=None) for each in await self._store.list(prefix)]

    async def remaining(self, leases: Sequence[str]) -> dict[str, float]:
        return dict.fromkeys(leases, 4.0)


@virtual
async def test_leases_are_looked_at_apart_where_entries_do_not_tell(place: Place) -> None:
    session = await place.open()
    wrapped: Any = Apart
    async with (
        session.member("workers", name="w1"),
        leading(session, "e", "a"),
        observed(place, wrap=wrapped) as hub,
    ):
        hub.board.open_page().show(["elections/e"])
        hub.shown_changed()
        await until(lambda: hub.board.topics.get("leases"))
        ((_, (remaining_s, _, ttl_s)),) = hub.board.topics["leases"].items()
        assert (remaining_s, ttl_s) == (4.0, TTL_S)
        await until(lambda: hub.board.topics["members"][0]["heard"])


@virtual
async def test_a_store_that_does_not_answer_is_noticed_within_a_ttl(place: Place) -> None:
    faults = Faults()
    async with observed(place, faults) as hub:
        await asyncio.sleep(5)
        assert hub.board.topics["health"]["reachable"]
        cut = place.clock.wall()
        faults.cut()
        await until(lambda: not hub.board.topics["health"]["reachable"], TTL_S)
        health = hub.board.topics["health"]
        assert health["as_of"] == health["since"] <= cut + 0.001
        assert health["error"]
        await asyncio.sleep(60)
        assert hub.board.topics["health"]["since"] == health["since"]
        faults.heal()
        await until(lambda: hub.board.topics["health"]["reachable"], TTL_S)
        assert hub.board.topics["health"]["as_of"] > cut


class Refusing(Counted):
    """A store that answers, but does not manage to list everything below some keys."""

    refused: set[str]

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.refused = set()

    async def list(self, prefix: str) -> list[Entry]:
        if prefix in self.refused:
            raise StoreUnavailable(f"too much below {prefix}")
        return await super().list(prefix)

    async def get(self, key: str) -> Entry | None:
        if key in self.refused:
            raise StoreUnavailable(f"{key} is not told")
        return await self._store.get(key)

    async def watch(self, scope: str, notify: Callable[[], None]) -> Watch:
        if scope in self.refused:
            raise StoreUnavailable(f"too many watches for {scope}")
        return await super().watch(scope, notify)


@virtual
async def test_a_part_that_cannot_be_read_is_named_while_the_rest_is_live(place: Place) -> None:
    stores: list[Refusing] = []

    def wrap(store: Store) -> Any:
        stores.append(Refusing(store))
        return stores[-1]

    session = await place.open()
    async with observed(place, wrap=wrap) as hub, leading(session, "e", "a"):
        await until(lambda: hub.watches == 1)
        assert hub.board.topics["health"]["stale"] == []
        failed_at = place.clock.wall()
        stores[0].refused |= {"elections", "members"}
        await until(lambda: len(hub.board.topics["health"]["stale"]) == 2, TTL_S)
        health = hub.board.topics["health"]
        assert health["reachable"]
        for part, read_at, error in health["stale"]:
            assert error == f"too much below {part}"
            assert failed_at - 1.1 <= read_at <= failed_at
        stores[0].refused.clear()
        await until(lambda: hub.board.topics["health"]["stale"] == [], TTL_S)
        hub.board.open_page().show(["elections/e"])
        stores[0].refused.add("elections/e/leader")
        await until(lambda: hub.board.topics["health"]["stale"], TTL_S)
        ((part, _, error),) = hub.board.topics["health"]["stale"]
        assert (part, error) == ("leases", "elections/e/leader is not told")
        stores[0].refused.clear()
        await until(lambda: hub.board.topics["health"]["stale"] == [], TTL_S)
        stores[0].refused.add("elections/f")
        async with leading(session, "f", "a"):
            await until(lambda: hub.board.topics["health"]["stale"], 2 * TTL_S)
            ((part, _, error),) = hub.board.topics["health"]["stale"]
            assert (part, error) == ("changes", "too many watches for elections/f")
            stores[0].refused.clear()
            await until(lambda: hub.watches == 2)
            await until(lambda: hub.board.topics["health"]["stale"] == [], TTL_S)


class Slow(PagePanel):
    """A panel whose readings take 3 s, and of which the second fails."""

    topic = "slow"

    def __init__(self, hub: Hub, listed: int) -> None:
        super().__init__(hub)
        self._listed = listed
        self.began: list[float] = []

    async def read(self) -> int:
        self.began.append(self.hub.core.runtime.clock.now())
        await asyncio.sleep(3.0)
        if len(self.began) == 2:
            raise StoreUnavailable("no answer")
        return len(self.began)


@virtual
async def test_a_reading_that_waits_or_fails_is_soon_repeated(place: Place) -> None:
    """A node that does not answer delays the reading of all nodes, and costs nothing."""
    async with observed(place) as hub:
        panels = Slow(hub, 3), Slow(hub, SHORT + 1)
        reading = [asyncio.ensure_future(panel.run()) for panel in panels]
        await asyncio.sleep(70)
        for each in reading:
            each.cancel()
        pauses = [[b - a - 3 for a, b in pairwise(panel.began)] for panel in panels]
        assert max(pauses[0]) < 1.1
        assert pauses[1][0] == pytest.approx(SHARE * 3, abs=0.1), "a long list is read less often"
        assert pauses[1][1] < 1.1


@virtual
async def test_a_wall_clock_that_is_set_back_does_not_hide_an_outage(place: Place) -> None:
    faults = Faults()
    async with observed(place, faults) as hub:
        await asyncio.sleep(3)
        place.clock.step_wall(-3600)
        faults.cut()
        await until(lambda: not hub.board.topics["health"]["reachable"], TTL_S)


@virtual
async def test_names_that_nobody_uses_any_more_are_forgotten(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that locks ever new names does not cost a watch and a row for each of them."""
    monkeypatch.setattr("doyen.web.hub.IDLE", 5)
    session = await place.open()
    async with observed(place) as hub:
        async with leading(session, "e", "a"):
            await until(lambda: "elections/e" in hub.board.rows)
        for number in range(8):
            async with session.lock(f"l{number}", name="a"):
                await until(lambda: f"locks/l{number}" in hub.board.rows)  # noqa: B023
        async with session.semaphore("s", 2, name="b"):
            await asyncio.sleep(3)
            shown = [key for key in hub.board.rows if key.startswith("locks/")]
            assert shown == [f"locks/l{number}" for number in range(4, 8)]
            assert {"elections/e", "semaphores/s/0"} <= set(hub.board.rows)
            assert hub.watches == len(hub.board.rows)
        watches = hub.watches
        await asyncio.sleep(10)
        assert hub.watches == watches, "what is left of a semaphore is not watched anew each time"


@virtual
async def test_an_answer_about_an_election_that_was_forgotten_is_ignored(place: Place) -> None:
    """Nothing would watch it any more: a leader that has gone would be shown for ever."""
    session = await place.open()
    async with observed(place) as hub:
        async with leading(session, "e", "a"):
            await until(lambda: hub.watches == 1)
            answer = place.server.list("elections/e")
        await until(lambda: hub.board.rows["elections/e"].idle)
        (scope,) = hub._scopes.values()
        hub._forget_scope(scope)
        hub._take(scope, answer, hub._now())
        await asyncio.sleep(3)
        assert "elections/e" not in hub.board.rows


@virtual
async def test_what_happened_while_the_store_was_away_is_seen_when_it_is_back(place: Place) -> None:
    faults = Faults()
    session, other = await place.open(), await place.open()
    async with observed(place, faults) as hub:
        async with leading(session, "e", "a"):
            await until(lambda: hub.watches == 1)
            faults.cut()
            await until(lambda: not hub.board.topics["health"]["reachable"])
        async with leading(other, "e", "b"), leading(other, "f", "b"):
            faults.heal()
            await until(lambda: "elections/f" in hub.board.rows)
            assert [name for name, _ in terms(hub)] == ["a", "b"]


@virtual
async def test_terms_before_the_page_was_opened_come_from_the_trail(place: Place) -> None:
    session, other = await place.open(), await place.open()
    async with leading(session, "e", "a"):
        await asyncio.sleep(100)
    await asyncio.sleep(5)
    async with leading(other, "e", "b"):
        await asyncio.sleep(50)
        async with observed(place) as hub:
            hub.board.open_page().show(["elections/e"])
            await until(lambda: len(hub.board.rows["elections/e"].terms) == 2)
            first, second = hub.board.rows["elections/e"].terms
            assert (first.name, first.cause) == ("a", "released")
            assert first.until is not None
            assert first.until == pytest.approx(first.since + 100, abs=0.1)
            assert second.since == pytest.approx(first.until + 5, abs=0.1)
            assert second.until is None
    for entry in place.server.list("trails"):
        place.server.delete(entry.key)


@virtual
async def test_locks_and_slots_of_semaphores_are_rows(place: Place) -> None:
    session = await place.open()
    held = session.lock("l", name="a"), session.semaphore("s", 3, name="b")
    async with held[0], held[1], observed(place) as hub:
        await until(lambda: len(hub.board.rows) == 2)
        rows = {key: row.as_dict()["leader"] for key, row in hub.board.rows.items()}
        assert rows == {"locks/l": "a", "semaphores/s/0": "b"}


@virtual
async def test_names_of_any_kind_are_rows(place: Place) -> None:
    names = ["a/b", "<script>alert(1)</script>", "تقارير", "100%", "x" * 200]
    session = await place.open()
    async with contextlib.AsyncExitStack() as stack:
        for name in names:
            await stack.enter_async_context(leading(session, name, "n" * 10_000))
        async with observed(place) as hub:
            await until(lambda: len(hub.board.rows) == len(names))
            assert {row.name for row in hub.board.rows.values()} == set(names)
            message = hub.board.message(hub.board.open_page())
            assert message is not None
            assert len(message) < 20_000, "long names are clipped"
            assert message.count(b"\n") == 2, "a name cannot end a message"


@virtual
async def test_members_and_their_renewals(place: Place) -> None:
    session = await place.open()
    async with observed(place) as hub:
        async with session.member("workers", name="w1", meta={"zone": "a"}) as member:
            await asyncio.sleep(5 * TTL_S)
            (shown,) = hub.board.topics["members"]
            assert (shown["group"], shown["name"], shown["state"]) == ("workers", "w1", "up")
            assert len(shown["beats"]) >= 10
            assert set(shown["beats"]) == {"o"}
            assert place.clock.wall() - shown["heard"] < TTL_S / 2
            await member.drain()
            await until(lambda: hub.board.topics["members"][0]["state"] == "draining", 0.5)
        await until(lambda: hub.board.topics["members"][0]["gone"], 0.5)


@virtual
async def test_a_member_that_renews_in_time_is_never_late(place: Place) -> None:
    """It renews more often than the store is looked at: the age of a look is no silence."""
    session = await place.open(ttl_s=2.0)
    async with session.member("workers", name="w1"), observed(place) as hub:
        await until(lambda: hub.board.topics["members"])
        for _ in range(100):
            await asyncio.sleep(0.13)
            (member,) = hub.board.topics["members"]
            assert member["looked"] - member["heard"] <= 2.0 * SUSPECT_AFTER
            assert "l" not in member["beats"]


@virtual
async def test_a_configuration_with_its_history_and_what_changed(place: Place) -> None:
    session = await place.open()
    config = session.config("billing", author="ops")
    await config.set({"workers": 4, "name": "x"})
    await config.set({"workers": 5, "name": "x"})
    async with observed(place) as hub:
        await until(lambda: hub.board.topics.get("configs"))
        (shown,) = hub.board.topics["configs"]
        assert (shown["name"], shown["version"], shown["author"]) == ("billing", 2, "ops")
        assert shown["versions"] == 2
        found = await config_detail(hub, "billing", None)
        assert found is not None
        assert [each["version"] for each in found["history"]] == [2, 1]
        assert found["before"] == 1
        signs = [(sign, text.strip().rstrip(",")) for sign, text in found["diff"] if sign != " "]
        assert signs == [("-", '"workers": 4'), ("+", '"workers": 5')]
        first = await config_detail(hub, "billing", 1)
        assert first is not None
        assert first["before"] is None
        assert await config_detail(hub, "other", None) is None
    for entry in place.server.list("config"):
        place.server.delete(entry.key)


def record(token: int, name: str = "a") -> Entry:
    claim = {"name": name, "attempt": f"{name}-{token}", "meta": {}, "rank": 0}
    return Entry("elections/e/leader", json.dumps(claim).encode(), token, token, f"lease-{name}")


@pytest.mark.parametrize(
    ("lease", "order", "cause"),
    [
        (LeaseSight(4.0, 100.0, 5.0), None, "released"),
        (LeaseSight(0.2, 100.0, 5.0), None, "expired"),
        (LeaseSight(2.0, 98.0, 5.0), None, "expired"),
        (LeaseSight(4.0, 90.0, 5.0), None, "ended"),  # it may have been renewed since
        (LeaseSight(4.0, 100.0, 5.0, "died"), None, "died"),
        (LeaseSight(4.0, 100.0, 5.0), Order(7, "ops"), "resigned"),
        (LeaseSight(4.0, 100.0, 5.0), Order(7, "ops", "b-1"), "transferred"),
        (LeaseSight(4.0, 100.0, 5.0), Order(6, "ops"), "released"),
        (None, None, "ended"),
    ],
)
def test_why_a_term_ended(lease: LeaseSight | None, order: Order | None, cause: str) -> None:
    row = ElectionRow("elections", "e")
    row.look(record(7), [], order, 50.0, first=True)
    assert row.current is not None
    assert not row.current.exact
    assert row.look(None, [], None, 100.0, first=False, lease=lease)
    assert row.terms[0].cause == cause
    assert row.terms[0].until == 100.0


def test_a_record_says_when_its_term_began() -> None:
    claim = {"name": "a", "attempt": "a-7", "since": 40.0, "ttl_s": 5.0}
    stated = record(7)._replace(value=json.dumps(claim).encode())
    for first, since in ((True, 40.0), (False, 50.0)):
        row = ElectionRow("elections", "e")
        row.look(stated, [], None, 50.0, first=first)
        assert row.current is not None
        assert (row.current.since, row.current.exact) == (since, True)
        assert row.as_dict()["ttl"] == 5.0


def test_an_outdated_answer_does_not_end_a_term() -> None:
    row = ElectionRow("elections", "e")
    row.look(record(7), [], None, 1.0, first=False)
    row.look(None, [], None, 2.0, first=False)
    row.look(record(7), [], None, 3.0, first=False)
    (term,) = row.terms
    assert (term.token, term.since, term.until, term.cause) == (7, 1.0, None, "")


def test_a_leader_whose_lease_was_not_looked_at_and_that_recorded_no_end() -> None:
    row = ElectionRow("elections", "e")
    row.look(record(7), [], None, 50.0, first=False)
    row.look(record(9, "b"), [], None, 90.0, first=False, lease=LeaseSight(4.0, 50.0, 5.0))
    assert [term.cause for term in row.terms] == ["ended", ""]
    cut_off = [PastTerm("a", 7, 50.0), PastTerm("b", 9, 90.0)]
    assert row.learn(recorded_terms(cut_off), settled=True)
    assert [term.cause for term in row.terms] == ["expired", ""]
    assert "killed or frozen" in row.terms[0].why


def test_a_leader_whose_lease_was_ended_for_it_was_killed() -> None:
    """A warden ends the lease of a process that was killed, which looks as if it had resigned. But
    it has not recorded its end."""
    row = ElectionRow("elections", "e")
    row.look(record(7), [], None, 50.0, first=False)
    row.look(record(9, "b"), [], None, 60.0, first=False, lease=LeaseSight(4.0, 59.9, 5.0))
    cut_off = [PastTerm("a", 7, 50.0), PastTerm("b", 9, 60.0)]
    assert not row.learn(recorded_terms(cut_off)), "it may still be writing"
    assert row.terms[0].cause == "released"
    assert row.learn(recorded_terms(cut_off), settled=True)
    assert (row.terms[0].cause, row.terms[0].until) == ("died", 60.0)
    assert "recorded no end" in row.terms[0].why
    written = [PastTerm("a", 7, 50.0, 59.99, "resigned"), PastTerm("b", 9, 60.0)]
    assert row.learn(recorded_terms(written), settled=True)
    assert (row.terms[0].cause, row.terms[0].until) == ("released", 59.99)


def test_an_audit_log_tells_when_and_why(tmp_path: Path) -> None:
    log = tmp_path / "log"
    stamp = {"boot": "b", "pid": 1, "session": "s", "lease": "l", "election": "e", "name": "a"}
    lines = [
        {"event": "elected", "token": 7, "at": 1.0, "wall": 1001.0, **stamp},
        {"event": "elected", "token": 5, "at": 0.5, "wall": 1000.5, **stamp},
        {"event": "resigned", "token": 5, "at": 0.7, "wall": 1000.7, **stamp},
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    log.write_text(text + '{"event":"elec')
    board = Board(lambda: 1010.0)
    row = board.rows["elections/e"] = ElectionRow("elections", "e")
    row.look(record(7), [], None, 1005.0, first=True)
    trail = AuditTrail([log, tmp_path / "absent"], board)
    trail.read()
    assert [(term.token, term.since, term.until) for term in row.terms] == [
        (5, 1000.5, 1000.7),
        (7, 1001.0, None),
    ]
    lost = {"event": "lost", "token": 7, "at": 9.0, "wall": 1009.0, "ended_at": 8.0, "reason": "x"}
    log.write_text(text + json.dumps({**lost, **stamp}) + "\n")
    trail.read()
    assert row.current is not None, "the store still has the record"
    row.look(None, [], None, 1010.0, first=False)
    trail.read()
    assert row.terms[-1] == SeenTerm(
        "a", 7, 1001.0, True, 1008.0, "lost", "a lost it: x.", "lease-a"
    )
