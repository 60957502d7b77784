"""Members and published lists in much trouble: names stay unique, and lists only move forward.

Processes join groups under names that others want too, fall ill, fail, crash, are cut off and lose
their leases. The leader publishes the list; observers follow it, and the members themselves, over
links that are as bad. The oracle looks after every turn of the loop. Then the links become good,
and the list must be what the members are. Variants of the code with one rule broken each show that
the oracle can fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen import MemberChange, NameTaken, Published, Session, Term
from doyen.election.core import SessionCore
from doyen.election.leader import Leading
from doyen.errors import Conflict, OutcomeUnknown
from doyen.manage.documents import Document, Versioned
from doyen.manage.members import GroupMember, MemberValue
from doyen.manage.publishing import ListPublisher
from doyen.manage.registration import Listing, Registration
from doyen.manage.roster import Roster, observe_members, read_members
from doyen.model import (
    Entry,
    Lease,
    Member,
    Reachable,
    Unreachable,
    Version,
    leader_key,
    members_key,
    published_key,
)
from doyen.term import is_valid
from doyen.testing.faults import FaultyStore
from swarm import (
    TTL_S,
    NotReached,
    Oracle,
    Process,
    SafetyViolated,
    WatchedClient,
    World,
    assert_oracle_sees,
)

GROUP, ELECTION = "workers", "controller"
NAMES = ["a", "b", "c", "d", "e"]
SETTLED_S = 20 * TTL_S

Incarnation = tuple[str, int]


def listed(entries: list[Entry]) -> set[Incarnation]:
    return {(entry.key.rpartition("/")[2], entry.revision) for entry in entries}


def published(document: Versioned | None) -> set[Incarnation]:
    if document is None:
        return set()
    return {(each["name"], each["incarnation"]) for each in document.body["members"]}


class GroupOracle(Oracle):
    """Besides: what members, published lists and observers may never do."""

    def __init__(self, world: GroupWorld) -> None:
        super().__init__()
        self._world = world
        self._published: Versioned | None = None
        self._renewals: defaultdict[str, list[float]] = defaultdict(list)
        self._leases: dict[Incarnation, str] = {}
        self.publications = 0
        self.joined = 0
        self.suspicions = 0

    def look(self) -> None:
        super().look()
        holders: dict[str, Worker] = {}
        for worker in self._world.workers:
            member = worker.member
            if member is None or member.incarnation is None:
                continue
            if member.incarnation < worker.incarnation:
                self.object(f"{member} went back from incarnation {worker.incarnation}")
            worker.incarnation = member.incarnation
            other = holders.setdefault(member.name, worker)
            if other is not worker:
                self.object(f"{other.name} and {worker.name} are both {member.name}")
            if member.ineligible_because and worker.term is not None and is_valid(worker.term):
                self.object(f"{worker.name} leads although {member.ineligible_because}")

    def created(self, entry: Entry) -> None:
        super().created(entry)
        if entry.key.startswith(f"{members_key(GROUP)}/"):
            self.joined += 1
            self._leases[next(iter(listed([entry])))] = entry.lease or ""

    def renewed(self, lease: Lease) -> None:
        self._renewals[lease.id].append(self._world.clock.now())

    def wrote(self, document: Versioned, seen_gone: set[Incarnation]) -> None:
        """A list has been written by a process that has seen these members gone."""
        self.publications += 1
        last = self._published
        if last is not None and (document.version <= last.version or document.token < last.token):
            self.object(f"version {document.version} of {document.token} follows {last}")
        if both := published(document) & seen_gone:
            self.object(f"{both} are listed, and their writer has seen that they are gone")
        self._published = document

    def followed(self, before: Published | None, now: Published | None) -> None:
        if now is None:
            if before is not None:
                self.object("the published list has vanished")
        elif now.regressed or (before is not None and now.position <= before.position):
            self.object(f"an observer saw {now.position} after {before and before.position}")

    def observed(self, change: MemberChange) -> None:
        member = (change.member.name, change.member.incarnation)
        if member not in self._leases:
            self.object(f"{change} is of a member that never was")
        elif change.kind == "gone":
            if member in listed(self._world.server.list(members_key(GROUP))):
                self.object(f"{change}, and it is on the list")
        elif change.kind == "suspected":
            self.suspicions += 1
            longest_s = self._longest_silence(self._leases[member])
            if longest_s < min(2 / 3 * TTL_S, change.silent_s or 0.0) - 0.01:
                self.object(f"{change}, and it was silent for {longest_s:.3f} s at most")

    def _longest_silence(self, lease: str) -> float:
        """The longest time without a renewal that a read in the last seconds could have shown."""
        now = self._world.clock.now()
        since = now - 1.5
        renewals = [*self._renewals[lease], now]
        return max(
            later - earlier for earlier, later in itertools.pairwise(renewals) if later >= since
        )


class Client(WatchedClient):
    """Reports renewals, and lists that were written."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.world.server, worker.clock)
        self._worker = worker

    async def grant(self, ttl_s: float) -> Lease:
        lease = await super().grant(ttl_s)
        self._worker.world.oracle.renewed(lease)
        return lease

    async def renew(self, lease: Lease) -> None:
        await super().renew(lease)
        self._worker.world.oracle.renewed(lease)

    async def put(self, key: str, value: bytes, *, if_version: Version | None) -> Entry | None:
        entry = await super().put(key, value, if_version=if_version)
        if entry is not None and key == published_key(GROUP):
            self._worker.world.oracle.wrote(Versioned.decode(entry), self._worker.seen_gone)
        return entry


class Link(FaultyStore):
    """Notes which members the process has seen to be gone: it has received the answer."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(Client(worker), worker.faults)
        self._worker = worker

    async def list(self, prefix: str) -> list[Entry]:
        entries = await super().list(prefix)
        if prefix == members_key(GROUP) and self._worker.publishes:
            now = listed(entries)
            self._worker.seen_gone |= self._worker.seen - now
            self._worker.seen |= now
        return entries


class Worker(Process):
    """A member that campaigns, and publishes the list while it leads."""

    world: GroupWorld
    publishes = True

    def prepare(self) -> None:
        rng = self.world.rng
        self.sick = False
        self.member: GroupMember | None = None
        self.term: Term | None = None
        self.incarnation = 0
        self.seen: set[Incarnation] = set()
        self.seen_gone: set[Incarnation] = set()
        self.slow_s = rng.choice([0.0, 5 * TTL_S])

    def store(self) -> FaultyStore:
        return Link(self)

    def health(self) -> bool:
        return not self.sick

    async def act(self, session: Session) -> None:
        rng, world = self.world.rng, self.world
        names = itertools.cycle(rng.sample(NAMES, len(NAMES)))
        while True:
            try:
                async with session.member(
                    GROUP,
                    name=next(names),
                    meta={"process": self.name},
                    health=self.health,
                    health_every_s=0.7,
                ) as self.member:
                    self.incarnation = 0
                    stay_s = rng.expovariate(1 / (6 * TTL_S))
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(None if world.fair else stay_s) as staying:
                            world.staying[self] = staying
                            await self._campaign(session, self.member)
            except NameTaken:
                await asyncio.sleep(rng.uniform(0, TTL_S))
            finally:
                self.member = None
                world.staying.pop(self, None)

    async def _campaign(self, session: Session, member: GroupMember) -> None:
        async for campaign in session.campaigns(ELECTION, name=self.name, member=member):
            async with campaign as term:
                self.term = term
                with self.world.oracle.body(term):
                    async with session.publisher(GROUP, term):
                        await self._lead(member)

    async def _lead(self, member: GroupMember) -> None:
        world, rng = self.world, self.world.rng
        try:
            while True:
                await asyncio.sleep(rng.uniform(0, 2 * TTL_S))
                if not world.fair:
                    async with asyncio.timeout(TTL_S):
                        await member.update({"process": self.name, "n": rng.randrange(9)})
        except TimeoutError:
            pass
        finally:
            if not self.crashed and not world.fair:
                await asyncio.sleep(rng.uniform(0, self.slow_s))


class Follower(Worker):
    """Observes the published list, and the members themselves."""

    publishes = False
    session: Session

    async def act(self, session: Session) -> None:
        self.session = session
        tasks = [
            asyncio.create_task(self._follow_list(session)),
            asyncio.create_task(self._follow_members(session)),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow_list(self, session: Session) -> None:
        before: Published | None = None
        lost = False
        async for now in session.observe_published(GROUP):
            if isinstance(now, Unreachable):
                lost = True
                continue
            if lost and now == before:  # it is told once more when the store answers again
                continue
            lost = False
            self.world.oracle.followed(before, now)
            before = now
            self.list = now

    async def _follow_members(self, session: Session) -> None:
        self.alive: dict[str, Member] = {}
        async for change in session.observe_members(GROUP):
            if isinstance(change, Unreachable | Reachable):
                continue
            self.world.oracle.observed(change)
            if change.kind == "gone":
                del self.alive[change.member.name]
            else:
                self.alive[change.member.name] = change.member


class GroupWorld(World):
    """Members, one of which leads, and followers."""

    oracle: GroupOracle
    happenings: ClassVar = {
        "join": 3,
        "leave": 1,
        "crash": 2,
        "cut": 4,
        "heal": 5,
        "cut_leader": 2,
        "fall_ill": 2,
        "recover": 3,
        "cut_follower": 2,
    }

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.fair = False
        self.server.oracle = self.oracle = GroupOracle(self)
        self.followers: list[Follower] = []
        self.staying: dict[Worker, asyncio.Timeout] = {}

    @property
    def workers(self) -> list[Worker]:
        return [process for process in self.processes if isinstance(process, Worker)]

    def start(self) -> None:
        self.started += 1
        self.processes.append(Worker(self, f"p{self.started}"))

    def start_follower(self) -> None:
        self.started += 1
        self.followers.append(Follower(self, f"f{self.started}"))

    def happen(self) -> None:
        super().happen()
        for process in [*self.processes, *self.followers]:
            if process.task.done() and not process.task.cancelled():
                self.oracle.object(f"{process.name} ended: {process.task.exception()!r}")

    def fall_ill(self, process: Process) -> None:
        assert isinstance(process, Worker)
        process.sick = True

    def recover(self, process: Process) -> None:
        assert isinstance(process, Worker)
        process.sick = False

    def cut_leader(self, _: Process) -> None:
        leading = [worker for worker in self.workers if worker.term and is_valid(worker.term)]
        if leading:
            self.cut(leading[0])
            later_s = self.rng.uniform(0, 3 * TTL_S)
            asyncio.get_running_loop().call_later(later_s, leading[0].faults.heal)

    def cut_follower(self, _: Process) -> None:
        follower = self.rng.choice(self.followers)
        if follower.faults.answers_cut:
            follower.faults.heal()
        else:
            follower.faults.cut()

    def calm(self) -> None:
        self.fair = True
        super().calm()
        for follower in self.followers:
            follower.calm()
        for worker in self.workers:
            worker.sick = False
        for staying in self.staying.values():
            with contextlib.suppress(RuntimeError):  # it is about to leave
                staying.reschedule(None)

    def unsettled(self) -> str:
        """What is not as it should be once the links are good; empty if all is well."""
        entries = self.server.list(members_key(GROUP))
        handles = {
            (worker.member.name, worker.member.incarnation)
            for worker in self.workers
            if worker.member is not None and worker.member.incarnation is not None
        }
        if handles != listed(entries):
            return f"on the list are {listed(entries)}, and members are {handles}"
        refused = [each for each in self.workers if each.member and each.member.ineligible_because]
        if len(entries) < min(len(self.workers) - len(refused), len(NAMES)):
            return f"{len(self.workers)} processes have taken {len(entries)} names"
        record = self.server.get(leader_key(ELECTION))
        entry = self.server.get(published_key(GROUP))
        if record is None or entry is None:
            return "there is no leader or no list"
        document = Versioned.decode(entry)
        if document.token != record.revision:
            return f"the list is of {document.token}, and {record.revision} leads"
        if published(document) != listed(entries):
            return f"published are {published(document)}, on the list {listed(entries)}"
        states = {value.state for each in entries if (value := MemberValue.decode(each.value))}
        if states != {"up"}:
            return f"states are {states}"
        for follower in self.followers:
            if follower.list is None or follower.list.version != document.version:
                return f"{follower.name} has {follower.list}"
            alive = {(member.name, member.incarnation) for member in follower.alive.values()}
            if alive != listed(entries) or any(each.suspected for each in follower.alive.values()):
                return f"{follower.name} has {follower.alive}"
        return ""

    async def settle(self) -> None:
        try:
            async with asyncio.timeout(SETTLED_S):
                while self.unsettled():  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.2)
        except TimeoutError:
            raise NotReached(f"once things are calm: {self.unsettled()}") from None

    async def end(self) -> None:
        await super().end()
        for follower in self.followers:
            follower.task.cancel()
        await asyncio.gather(*(each.task for each in self.followers), return_exceptions=True)
        await asyncio.sleep(2 * TTL_S)
        if left := self.server.list("members") + self.server.list("challenges"):
            raise NotReached(f"left behind in the store: {left}")


def run_group_world(seed: int, *, workers: int = 5, steps: int = 60) -> GroupWorld:
    world = GroupWorld(seed)

    async def live() -> None:
        for _ in range(2):
            world.start_follower()
        await world.trouble(workers, steps)
        for _ in range(2):
            world.start()
        world.calm()
        await asyncio.sleep(7 * TTL_S)  # bodies end, and what was lost on its way is given up
        await world.settle()
        # Calm lasts, so the list does not change by itself.
        before = world.oracle.publications
        await asyncio.sleep(5 * TTL_S)
        await world.settle()
        if world.oracle.publications > before:
            raise SafetyViolated("a list was written although nothing had changed")
        # The members stay as they are, and another leads: it writes the same list.
        await world.followers[0].session.resign(ELECTION)
        await world.settle()
        await world.end()

    world.watch_over(live())
    return world


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_members_and_lists_in_much_trouble(seed: int) -> None:
    assert run_group_world(seed).oracle.publications > 0


@pytest.mark.chaos
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_many_seeds(seed: int) -> None:
    assert run_group_world(seed, steps=100).oracle.publications > 0


def test_one_seed_gives_one_run() -> None:
    def trace(seed: int) -> list[list[str]]:
        world = run_group_world(seed, steps=30)
        return [process.faults.trace for process in [*world.processes, *world.followers]]

    assert trace(3) == trace(3)


def test_the_trouble_is_enough() -> None:
    """Members join again, lists are published and members are suspected, in a few runs."""
    oracles = [run_group_world(seed).oracle for seed in range(3)]
    assert min(oracle.joined for oracle in oracles) > 10
    assert min(oracle.publications for oracle in oracles) > 10
    assert sum(oracle.suspicions for oracle in oracles) > 5


# The oracle can fail: variants with one rule broken each.


def published_without_the_token(patch: pytest.MonkeyPatch) -> None:
    """A publisher goes on after its term, and nothing checks its token."""
    write, init = Document.write, ListPublisher.__init__

    async def unguarded(
        self: Document, body: Any, *, expect: Versioned | None, token: int = 0
    ) -> Versioned:
        if expect is not None:
            expect = expect._replace(token=min(expect.token, token))
        return await write(self, body, expect=expect, token=token)

    def endless(self: ListPublisher, core: SessionCore, group: str, term: Any, *more: Any) -> None:
        init(self, core, group, term, *more)
        patch.setattr(self, "term", SimpleNamespace(token=term.token, valid=True))

    patch.setattr(Document, "write", unguarded)
    patch.setattr(ListPublisher, "__init__", endless)


def a_new_leader_does_not_write_first(patch: pytest.MonkeyPatch) -> None:
    """A list that says the same is left as it is, with the token of an earlier leader."""
    current = ListPublisher._current

    async def good_enough(self: ListPublisher) -> Versioned | None:
        document = await current(self)
        if document is None or document.token > self.term.token:
            return document
        return document._replace(token=self.term.token)

    patch.setattr(ListPublisher, "_current", good_enough)


def members_read_again_before_the_write_is_settled(patch: pytest.MonkeyPatch) -> None:
    """After an unknown outcome the leader reads the members, although the write may follow."""
    publish = ListPublisher._publish

    async def once(
        self: Document, body: Any, *, expect: Versioned | None, token: int = 0
    ) -> Versioned:
        version = 1 if expect is None else expect.version + 1
        document = {"schema": 1, "version": version, "id": self._calls.unique_id()}
        value = self._encode({**document, "token": token, **body})
        known = None if expect is None else expect.entry.version
        entry = await self._calls.call(self._calls.store.put(self.key, value, if_version=known))
        if entry is None:
            raise Conflict("it has been changed")
        return Versioned.decode(entry)

    async def hasty(self: ListPublisher, roster: Roster) -> None:
        try:
            await publish(self, roster)
        except OutcomeUnknown:
            await hasty(self, await read_members(self.core, self.group))

    patch.setattr(Document, "write", once)
    patch.setattr(ListPublisher, "_publish", hasty)


def listed_although_the_lease_is_lost(patch: pytest.MonkeyPatch) -> None:
    """A member does not notice that its lease is lost."""

    def always(self: Registration) -> int | None:
        return None if self.listing.entry is None else self.listing.entry.revision

    patch.setattr(Registration, "incarnation", property(always))
    patch.setattr(Listing, "unlisted", lambda *_, **__: None)


def does_not_join_again(patch: pytest.MonkeyPatch) -> None:
    """A member whose lease is lost stays away."""
    step = Registration._step

    async def once(self: Registration) -> bool:
        attempt = self._attempt
        lost = attempt is not None and attempt.keepalive.lost_because is not None
        return True if lost else await step(self)

    patch.setattr(Registration, "_step", once)


def name_taken_from_its_holder(patch: pytest.MonkeyPatch) -> None:
    """A name that is taken is not waited for: the other entry is deleted."""

    async def take(self: Registration, entry: Entry, _: object) -> None:
        await self.core.deletions.delete(entry)

    patch.setattr(Registration, "_wait_for_name", take)


def suspected_for_the_observers_own_silence(patch: pytest.MonkeyPatch) -> None:
    """An observer that has read nothing for a while suspects everybody."""

    async def impatient(
        core: SessionCore,
        group: str,
        deliver: Callable[[Roster | Unreachable[Roster]], None],
        *,
        suspect: bool = True,
    ) -> None:
        last = [Roster({}, core.runtime.clock.now())]

        def note(roster: Roster | Unreachable[Roster]) -> None:
            if not isinstance(roster, Unreachable):
                last[0] = roster
            deliver(roster)

        observing = asyncio.ensure_future(observe_members(core, group, note, suspect=suspect))
        try:
            while True:
                await asyncio.sleep(TTL_S / 6)
                silent_s = core.runtime.clock.now() - last[0].at
                if silent_s > TTL_S:
                    members = {
                        name: replace(member, suspected=True, silent_s=silent_s)
                        for name, member in last[0].members.items()
                    }
                    deliver(Roster(members, last[0].at))
        finally:
            observing.cancel()

    patch.setattr("doyen.manage.observe_members", impatient)


def the_unhealthy_lead(patch: pytest.MonkeyPatch) -> None:
    """A leader does not ask whether its member is healthy."""
    patch.setattr(Leading, "_check_eligibility", lambda self: None)


SEEDS = 60
"""Worlds to try until one shows what is broken."""


@pytest.mark.parametrize(
    ("broken", "first", "error"),
    [
        (published_without_the_token, 0, SafetyViolated),
        (a_new_leader_does_not_write_first, 0, NotReached),
        (members_read_again_before_the_write_is_settled, 58, SafetyViolated),
        (listed_although_the_lease_is_lost, 0, SafetyViolated),
        (does_not_join_again, 19, NotReached),
        (name_taken_from_its_holder, 0, SafetyViolated),
        (suspected_for_the_observers_own_silence, 0, SafetyViolated),
        (the_unhealthy_lead, 3, SafetyViolated),
    ],
)
def test_the_broken_rule_is_detected(
    broken: Callable[[pytest.MonkeyPatch], None],
    first: int,
    error: type[SafetyViolated | NotReached],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seeds = range(first, first + SEEDS)
    assert_oracle_sees(broken, monkeypatch, run_group_world, seeds, error)
