"""`term.publish`: what the leader record shows changes, and the term stays.

First the rules one by one, then all of them under random faults with an oracle, in virtual time.
That the oracle can see is shown at the end, on variants of the code with one rule broken each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import doyen
from doyen import LeadershipLost, Session, Term
from doyen._waiting import retrieve
from doyen.election.attempt import Attempt
from doyen.errors import ConfigError, OutcomeUnknown
from doyen.events import Record, Resigned
from doyen.model import Claim, Entry, leader_key, line_key
from doyen.stores.memory import MemoryServer
from doyen.testing.faults import Faults, LostCall, RefusedCall, Stray, Unanswered
from support import TTL_S as PLACE_TTL_S
from support import Place, until, virtual
from swarm import (
    TTL_S,
    NotReached,
    Oracle,
    Process,
    SafetyViolated,
    World,
    assert_oracle_sees,
    is_record,
    reached,
)

REQUEST_S = PLACE_TTL_S / 6


def published(place: Place) -> object:
    record = place.server.get(leader_key("e"))
    return None if record is None else Claim.decode(record.value).meta


@virtual
async def test_observers_see_what_the_leader_publishes(place: Place) -> None:
    session, other = await place.open(), await place.open()
    async with session.campaign("e", name="a", meta={"n": 0}) as term:
        before = await other.leader("e")
        async with aclosing(other.observe("e")) as leaders:
            assert await anext(leaders) == before
            await term.publish({"n": 1})
            after = await anext(leaders)
        assert after
        assert before is not None
        assert (before.token, after.token, after.meta) == (term.token, term.token, {"n": 1})
        assert term.meta == {"n": 1}
        (candidate,) = await other.line("e")
        assert (candidate.leads, candidate.meta) == (True, {"n": 1})
    assert place.server.get(leader_key("e")) is None, "the record was deleted by its new version"
    assert place.server.list(line_key("e")) == []


@virtual
async def test_publishing_again_and_again_costs_one_update_each(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    async with session.campaign("e") as term:
        await asyncio.sleep(1)
        before = len(faults.trace)
        for n in range(5):
            await term.publish({"n": n})
        calls = [call.split()[0] for call in faults.trace[before:]]
        assert calls.count("update") == 5
        await term.publish({"n": 4})
        assert sum(call.startswith("update") for call in faults.trace[before:]) == 5


@virtual
async def test_what_cannot_be_published_is_refused_before_anything_is_sent(place: Place) -> None:
    session = await place.open()
    async with session.campaign("e", meta={"n": 0}) as term:
        with pytest.raises(ConfigError, match="JSON"):
            await term.publish({"n": object()})
        with pytest.raises(ConfigError, match="maps names to values"):
            await term.publish(7)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="more than"):
            await term.publish({"n": "x" * 70_000})
        assert published(place) == term.meta == {"n": 0}


@pytest.mark.parametrize(
    "fault",
    [
        LostCall(),
        LostCall(raises=True),
        Unanswered(),
        Unanswered(raises=True),
        RefusedCall(),
        Stray(after_s=REQUEST_S * 1.5),
    ],
    ids=str,
)
@virtual
async def test_an_unknown_outcome_is_resolved_by_reading(
    place: Place, fault: LostCall | Unanswered | RefusedCall | Stray
) -> None:
    faults = Faults()
    session = await place.open(faults)
    async with session.campaign("e") as term:
        faults.next("update", fault)
        await term.publish({"n": 1})
        assert published(place) == {"n": 1}
        await term.publish({"n": 2})
        await asyncio.sleep(PLACE_TTL_S)
        assert published(place) == {"n": 2}
    assert place.server.get(leader_key("e")) is None


@virtual
async def test_a_publication_that_was_given_up_never_follows_a_later_one(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    async with session.campaign("e") as term:
        faults.next("update", Stray(after_s=1.0))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await term.publish({"n": 1})
        await term.publish({"n": 2})
        await asyncio.sleep(2)
        assert published(place) == {"n": 2}


@pytest.mark.parametrize("fault", [Unanswered(), Stray(after_s=0.3)], ids=str)
@virtual
async def test_letting_go_removes_a_record_that_changes_late(
    place: Place, fault: Unanswered | Stray
) -> None:
    """The body ends while the outcome of its publication is unknown. The session and its lease
    live on, so nothing else would remove the record."""
    faults = Faults()
    session = await place.open(faults)
    async with session.campaign("e", name="a") as term:
        faults.next("update", fault)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await term.publish({"n": 1})
    await asyncio.sleep(PLACE_TTL_S)
    async with asyncio.timeout(REQUEST_S), session.campaign("e", name="b"):
        pass


@virtual
async def test_after_a_loss_nothing_is_published(place: Place) -> None:
    session, other = await place.open(), await place.open()
    with pytest.raises(LeadershipLost):
        async with session.campaign("e", meta={"n": 0}) as term:
            place.end_lease(session)
            async with other.campaign("e", name="b", meta={"n": 7}):
                with pytest.raises(LeadershipLost):
                    await term.publish({"n": 1})
                assert published(place) == {"n": 7}
                assert not term.valid, "the store had shown that the record is gone"
    with pytest.raises(LeadershipLost):
        await term.publish({"n": 2})


@virtual
async def test_while_the_store_cannot_be_reached_the_term_ends_the_wait(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    with pytest.raises(LeadershipLost):
        async with session.campaign("e") as term:
            faults.cut()
            try:
                await term.publish({"n": 1})
            finally:
                faults.heal()


@virtual
async def test_force_removes_the_record_of_a_leader_that_publishes(place: Place) -> None:
    faults = Faults()
    session, other = await place.open(), await place.open(faults)
    with pytest.raises(LeadershipLost):
        async with session.campaign("e", name="a") as term:
            removing = asyncio.create_task(other.resign("e", force=True))
            faults.next("delete", Stray(after_s=0.2))
            await asyncio.sleep(0.1)
            await term.publish({"n": 1})
            assert (await removing).name == "a"
            await asyncio.sleep(1)


def test_blocking_code_publishes_too() -> None:
    with doyen.connect_blocking("memory://publish") as session:
        with session.campaign("e", name="a") as term:
            term.publish_blocking({"n": 1})
            leader = session.leader("e")
            assert leader is not None
            assert (leader.meta, leader.token) == ({"n": 1}, term.token)
        assert session.leader("e") is None
        with pytest.raises(LeadershipLost):
            term.publish_blocking({"n": 2})


# Under random faults.


class PublishOracle(Oracle):
    """Besides: publications of a term only move forward, in the record and for every observer, and
    what `publish` has returned from is there."""

    def __init__(self) -> None:
        super().__init__()
        self._shown: dict[tuple[str, int], int] = {}
        self.resigned: set[int] = set()
        self.publications = 0
        self.observed = 0

    def hear(self, record: Record) -> None:
        super().hear(record)
        if isinstance(record.event, Resigned):
            self.resigned.add(record.event.token)

    def shown(self, to: str, token: int, n: int) -> None:
        """An observer, or the store itself, shows publication `n` of the term `token`."""
        if n < self._shown.get((to, token), 0):
            self.object(f"{to} saw publication {n} of {token} after {self._shown[to, token]}")
        self._shown[to, token] = n
        self.observed += to != "store"

    def returned(self, record: Entry | None, token: int, n: int) -> None:
        self.publications += 1
        if record is not None and record.revision == token and number(record) < n:
            self.object(f"publication {n} of {token} is said to be there; {number(record)} is")


def number(record: Entry) -> int:
    return int(Claim.decode(record.value).meta["n"])


class Publishing(Process):
    """A candidate that publishes as leader, and observes all the time."""

    world: PublishWorld

    async def act(self, session: Session) -> None:
        observing = asyncio.create_task(self._observe(session))
        try:
            await self._campaign(session)
        finally:
            observing.cancel()
            await asyncio.wait({observing})

    async def _observe(self, session: Session) -> None:
        async for leader in session.observe("swarm"):
            if leader:
                self.world.oracle.shown(self.name, leader.token, leader.meta["n"])

    async def _campaign(self, session: Session) -> None:
        world = self.world
        async for campaign in session.campaigns(
            "swarm", name=self.name, priority=self.rank, recipe=self.recipe, meta={"n": 0}
        ):
            async with campaign as term:
                with world.oracle.body(term):
                    await self._publish(term)

    async def _publish(self, term: Term) -> None:
        """Publish at random; some publications are given up, some still run when the body ends."""
        rng, oracle, server = self.world.rng, self.world.oracle, self.world.server
        left = None
        for n in range(1, rng.randrange(2, 6)):
            await asyncio.sleep(rng.expovariate(2))
            if left is not None:
                left.cancel()
            left = asyncio.create_task(term.publish({"n": n}))
            left.add_done_callback(retrieve)
            await asyncio.wait({left}, timeout=rng.choice([0.01, 0.01, TTL_S]))
            if left.done() and left.exception() is None:
                oracle.returned(server.get(leader_key("swarm")), term.token, n)


class PublishWorld(World):
    oracle: PublishOracle

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.server.oracle = self.oracle = PublishOracle()
        changed = self.server._changed

        def look(key: str) -> None:
            changed(key)
            if is_record(key) and key in self.server._entries:
                entry = self.server._entry(key)
                self.oracle.shown("store", entry.revision, number(entry))

        self.server._changed = look  # type: ignore[method-assign]

    def start(self) -> None:
        self.started += 1
        self.processes.append(Publishing(self, f"p{self.started}"))


def run_publish_world(seed: int, *, candidates: int = 3, steps: int = 40) -> PublishWorld:
    """Trouble, then fair weather in which records of terms that were resigned do not stay."""
    world = PublishWorld(seed)

    async def live() -> None:
        await world.trouble(candidates, steps)
        world.start()
        world.calm()
        over = set(world.oracle.resigned)
        await asyncio.sleep(3 * TTL_S)
        record = world.server.get(leader_key("swarm"))
        if record is not None and record.revision in over:
            raise NotReached(f"the record of {record.revision} stays after it was resigned")
        world.oracle.somebody_leads.clear()
        async with reached("somebody leads", 10 * TTL_S):
            await world.oracle.somebody_leads.wait()
        await world.end()

    world.watch_over(live())
    return world


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_publications_in_much_trouble(seed: int) -> None:
    oracle = run_publish_world(seed).oracle
    assert oracle.publications > 0
    assert oracle.observed > 0


def version_not_followed(patch: pytest.MonkeyPatch) -> None:
    """The record is deleted by the version that it was created with."""
    update = Attempt.update_record

    async def forget(self: Attempt, value: bytes) -> bool:
        record = self.record
        try:
            return await update(self, value)
        finally:
            self.record, self._updating = record, record and record.version

    def certain(self: Attempt, successor: str = "") -> asyncio.Task[None] | None:
        self._updating = None
        return leave(self, successor)

    leave = Attempt.leave
    patch.setattr(Attempt, "update_record", forget)
    patch.setattr(Attempt, "leave", certain)


def doubt_forgotten_on_leaving(patch: pytest.MonkeyPatch) -> None:
    """Letting go deletes the record as it was last known, although an update may be under way."""
    leave = Attempt.leave

    def certain(self: Attempt, successor: str = "") -> asyncio.Task[None] | None:
        self._updating = None
        return leave(self, successor)

    patch.setattr(Attempt, "leave", certain)


def unknown_is_published(patch: pytest.MonkeyPatch) -> None:
    """An update that was never answered is believed."""
    update = Attempt.update_record

    async def believe(self: Attempt, value: bytes) -> bool:
        try:
            return await update(self, value)
        except OutcomeUnknown:
            return True

    patch.setattr(Attempt, "update_record", believe)


def any_version_updated(patch: pytest.MonkeyPatch) -> None:
    """An update does not look at the version, so a late one overwrites a newer one."""
    update = MemoryServer.update

    def overwrite(self: MemoryServer, entry: Entry, value: bytes) -> Entry | None:
        stored = self._entries.get(entry.key)
        return update(self, entry._replace(version=stored.version if stored else 0), value)

    patch.setattr(MemoryServer, "update", overwrite)


def published_as_a_new_record(patch: pytest.MonkeyPatch) -> None:
    """The record is deleted and created again, which is a moment without one and a new token."""

    async def replace(self: Attempt, value: bytes) -> bool:
        store = self.core.store
        await self.core.call(store.delete(self.record_key))
        created = await self.write(store.create(self.record_key, value, self.keepalive.lease))
        self.record = created.entry
        return True

    patch.setattr(Attempt, "update_record", replace)


SEEDS = 60
"""Worlds to try until one shows what is broken."""


@pytest.mark.parametrize(
    ("broken", "first", "error"),
    [
        (version_not_followed, 0, NotReached),
        (doubt_forgotten_on_leaving, 129, NotReached),
        (unknown_is_published, 0, SafetyViolated),
        (any_version_updated, 0, SafetyViolated),
        (published_as_a_new_record, 0, SafetyViolated),
    ],
)
def test_the_oracle_sees(
    broken: Callable[[pytest.MonkeyPatch], None],
    first: int,
    error: type[SafetyViolated | NotReached],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = range(first, first + SEEDS)
    assert_oracle_sees(broken, monkeypatch, run_publish_world, seeds, error)


@virtual
async def test_a_leader_that_publishes_can_hand_over(place: Place) -> None:
    """The successor enters although the version of the record has changed."""
    session, other = await place.open(), await place.open()
    entered = asyncio.Event()

    async def follow() -> None:
        async with other.campaign("e", name="b"):
            entered.set()

    with pytest.raises(LeadershipLost):
        async with session.campaign("e", name="a") as term:
            following = asyncio.create_task(follow())
            await until(lambda: place.line() == ["a", "b"])
            await term.publish({"n": 1})
            ordering = asyncio.create_task(other.transfer("e", to="b"))
            await asyncio.sleep(10)
    await asyncio.gather(ordering, following)
    assert entered.is_set()
