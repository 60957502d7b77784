"""Configurations in much trouble: linearizable, never half applied, and everybody is current in the
end.

Processes that write, observe and subscribe join, leave, crash and are cut off, on links that lose,
delay and reorder. The oracle sees every write to the store and every answer that a process got.
That it can see is shown at the end, on variants of the code with one rule broken each.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from builtins import list as list_
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen import (
    Config,
    ConfigDocument,
    Conflict,
    Missed,
    NotApplied,
    OutcomeUnknown,
    Regressed,
    Session,
    StoreError,
    StoreUnavailable,
)
from doyen.lease.clock import Clock
from doyen.manage.applied import Acknowledgement, Applied, WaitApplied, _Waiting
from doyen.manage.config import ConfigReader, ConfigStore
from doyen.manage.documents import Document, Versioned
from doyen.model import Entry, Reachable, Unreachable, Version, config_key
from swarm import (
    TTL_S,
    NotReached,
    Oracle,
    Process,
    SafetyViolated,
    WatchedServer,
    World,
    assert_oracle_sees,
)

NAME, KEEP = "limits", 4
CURRENT = config_key(NAME, "current")
HOW: list[WaitApplied | None] = [None, None, "all", "majority"]
SETTLED_S = 10 * TTL_S


class Limits(msgspec.Struct, forbid_unknown_fields=True):
    """What the configuration holds."""

    n: int


class ConfigOracle(Oracle):
    """What it asks:

    - versions follow one another, and each names the one before it;
    - the history is what current was, none is missing that is within the bound, and nothing in it
      is ever changed;
    - each read, and each write that was confirmed, took effect between its call and its answer;
      what was refused was never written, not even later;
    - acknowledgements are bound to a lease, and say what was applied;
    - who waits for the subscribers is not answered before they have applied it;
    - observers see every version, or are told which they have missed.
    """

    def __init__(self, world: ConfigWorld) -> None:
        super().__init__()
        self._world = world
        self.versions: list[dict[str, Any]] = []
        """Every version there ever was: version v is at index v - 1."""
        self._bytes: list[bytes] = []
        self._standing: list[dict[str, str]] = []
        """The subscribers' entries when each version was written, and their names."""
        self._refused: set[int] = set()
        """Values whose writers were told that they were not written."""
        self._lists: list[tuple[int, dict[str, str]]] = []
        self.in_force: dict[str, int] = {}
        self.waits = 0
        self.missed = 0

    def written(self, before: Entry | None, entry: Entry) -> None:
        """An entry without a lease was written."""
        if entry.key == CURRENT:
            self._current(before, entry)
        elif "/history/" in entry.key:
            version = int(entry.key.rpartition("/")[2])
            if version > len(self.versions) or entry.value != self._bytes[version - 1]:
                self.object(f"{entry.key} is not what current was")
            if before is not None:
                self.object(f"{entry.key} was written again")
        else:
            self.object(f"{entry.key} is bound to no lease")

    def _current(self, before: Entry | None, entry: Entry) -> None:
        document = json.loads(entry.value)
        nothing: dict[str, Any] = {"version": 0, "id": ""}
        last = self.versions[-1] if self.versions else nothing
        if document["version"] != last["version"] + 1 or document["previous"] != last["id"]:
            self.object(f"{document} follows {last}")
        for version in range(max(1, last["version"] - KEEP + 1), last["version"] + 1):
            if self._world.server.get(config_key(NAME, "history", version)) is None:
                self.object(f"version {version} is not in the history of {document}")
        if document["value"]["n"] in self._refused:
            self.object(f"{document} was written after its writer was told that it was not")
        self.versions.append(document)
        self._bytes.append(entry.value)
        self._standing.append(self.standing())

    def standing(self) -> dict[str, str]:
        applied = self._world.server.applied()
        return {entry.key: Applied.decode(entry).name for entry in applied}

    def acknowledged(self, entry: Entry) -> None:
        """A subscriber's entry was made or changed."""
        says = Applied.decode(entry)
        if says.version > self.in_force.get(says.name, 0):
            self.object(f"{says} has not applied that")

    def created(self, entry: Entry) -> None:
        if "/applied/" in entry.key and entry.lease is not None:
            self.acknowledged(entry)

    def gone(self, entry: Entry) -> None:
        if entry.key == CURRENT:
            self.object("current was deleted")
        if "/history/" in entry.key:
            version = int(entry.key.rpartition("/")[2])
            if version >= len(self.versions) - KEEP:
                self.object(f"version {version} of {len(self.versions)} was removed")

    def deleted(self, entry: Entry, *, mine: bool) -> None:
        if not mine and "/history/" not in entry.key:
            self.object(f"{entry.key} was deleted by somebody else")

    def read(self, document: ConfigDocument[Any] | None, since: int) -> None:
        """A read was answered. It began when there were `since` versions."""
        version = 0 if document is None else document.version
        if not since <= version <= len(self.versions):
            self.object(f"{document} was read between {since} and {len(self.versions)}")
        if document is not None:
            self.is_true(document)

    def is_true(self, document: ConfigDocument[Any]) -> None:
        was = self.versions[document.version - 1]
        value = document.value.n if isinstance(document.value, Limits) else document.value["n"]
        if (document.id, document.author, value) != (was["id"], was["author"], was["value"]["n"]):
            self.object(f"{document} was {was}")

    def confirmed(self, document: ConfigDocument[Any], since: int, if_version: int | None) -> None:
        """A write was confirmed."""
        self.is_true(document)
        if not since < document.version or if_version not in (None, document.version - 1):
            self.object(f"{document} was written over {if_version}, begun at {since}")

    def refused(self, value: int) -> None:
        """A writer was told that this was not written."""
        self._refused.add(value)
        if any(document["value"]["n"] == value for document in self.versions):
            self.object(f"{value} was written")

    def listed(self, subscribers: dict[str, str]) -> None:
        """Somebody has listed the subscribers."""
        self._lists.append((len(self.versions), subscribers))

    def waited(self, document: ConfigDocument[Any], how: str) -> None:
        """A writer was told that the subscribers have applied this."""
        version, still = document.version, self.standing()
        self.waits += bool(still)
        if how == "all":
            # Whoever was there when it was written, and is still there, was waited for.
            sets = [self._standing[version - 1]]
        else:
            sets = [listed for since, listed in self._lists if since >= version]
        for waited_for in sets:
            applied = [n for n in waited_for.values() if self.in_force.get(n, 0) >= version]
            lacking = [n for k, n in waited_for.items() if k in still and n not in applied]
            if not lacking or (how == "majority" and len(applied) > len(lacking)):
                return
        self.object(f"{document} was not applied by {how} of {still}: {self.in_force}")


class ConfigServer(WatchedServer):
    """A store that tells the oracle of every value that is written."""

    oracle: ConfigOracle

    def __init__(self, clock: Clock, oracle: ConfigOracle) -> None:
        super().__init__(clock, oracle)

    def applied(self) -> list_[Entry]:
        """The subscribers' entries."""
        return super().list(config_key(NAME, "applied"))

    def list(self, prefix: str) -> list_[Entry]:
        found = super().list(prefix)
        if prefix == config_key(NAME, "applied"):
            self.oracle.listed(self.oracle.standing())
        return found

    def put(self, key: str, value: bytes, if_version: Version | None) -> Entry | None:
        before = self.get(key)
        entry = super().put(key, value, if_version)
        if entry is not None:
            self.oracle.written(before, entry)
        return entry

    def update(self, entry: Entry, value: bytes) -> Entry | None:
        updated = super().update(entry, value)
        if updated is not None:
            self.oracle.acknowledged(updated)
        return updated


class Participant(Process):
    """Writes, observes and subscribes."""

    world: ConfigWorld

    def prepare(self) -> None:
        self.observed = 0
        self.slow_s = self.world.rng.choice([0.0, 0.0, 0.5, 2.0])
        self.writes = self.world.rng.random() < 0.6

    async def act(self, session: Session) -> None:
        config = session.config(NAME, type=Limits, author=self.name, history=KEEP)
        plain = session.config(NAME, author=self.name, history=KEEP)
        work = [self._observe(config), self._subscribe(config), self._write(config, plain)]
        # Not in a task group: it cancels in the order of a set, and one seed must give one run.
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if not isinstance(outcome, asyncio.CancelledError):
                    self.world.oracle.object(f"{self.name} ended: {outcome!r}")

    async def _observe(self, config: Config[Limits]) -> None:
        oracle, rng = self.world.oracle, self.world.rng
        at = rng.choice([0, len(oracle.versions)])
        self.observed = at
        async for change in config.observe(since=at):
            if isinstance(change, Unreachable | Reachable):
                continue
            if isinstance(change, Missed):
                oracle.missed += 1
                if change.first != at + 1 or change.last >= len(oracle.versions) - KEEP:
                    oracle.object(f"{change} at {at} of {len(oracle.versions)}")
                at = change.last
                continue
            if isinstance(change, Regressed) or change.version != at + 1:
                oracle.object(f"{self.name} saw {change} after {at}")
                return
            if isinstance(change, ConfigDocument):
                oracle.is_true(change)
            at = self.observed = change.version
            if not self.world.fair:
                await asyncio.sleep(rng.uniform(0, self.slow_s))

    async def _subscribe(self, config: Config[Limits]) -> None:
        oracle, rng = self.world.oracle, self.world.rng
        async with config.subscribe(self.name) as documents:
            async for document in documents:
                oracle.is_true(document)
                if not self.world.fair:
                    await asyncio.sleep(rng.uniform(0, self.slow_s))
                    if rng.random() < 0.1:
                        documents.refuse("not today")
                        continue
                oracle.in_force[self.name] = document.version

    async def _write(self, config: Config[Limits], plain: Config[Any]) -> None:
        rng, oracle = self.world.rng, self.world.oracle
        while True:
            await asyncio.sleep(rng.expovariate(1.0))
            if self.world.fair or not self.writes:
                continue
            since = len(oracle.versions)
            try:
                if rng.random() < 0.3:
                    oracle.read(await plain.get(), since)
                else:
                    self.world.writing += 1
                    try:
                        await self._set(config, plain)
                    finally:
                        self.world.writing -= 1
            except StoreError:
                pass  # of a read

    async def _set(self, config: Config[Limits], plain: Config[Any]) -> None:
        rng, oracle = self.world.rng, self.world.oracle
        known = rng.choice([None, len(oracle.versions), max(0, len(oracle.versions) - 1)])
        how: WaitApplied | None = rng.choice(HOW)
        wait_s = rng.uniform(0, 2 * TTL_S)
        value, since = next(self.world.values), len(oracle.versions)
        try:
            if rng.random() < 0.1:  # a program without the type
                document = await plain.set({"n": value, "unknown": True}, if_version=known)
                how = None
            else:
                document = await config.set(
                    Limits(value), if_version=known, wait_applied=how, wait_s=wait_s
                )
        except (Conflict, StoreUnavailable):
            oracle.refused(value)
        except (NotApplied, OutcomeUnknown):
            pass
        else:
            oracle.confirmed(document, since, known)
            if how is not None:
                oracle.waited(document, how)


class ConfigWorld(World):
    """Participants in one configuration."""

    oracle: ConfigOracle
    server: ConfigServer
    happenings: ClassVar = {"join": 3, "leave": 1, "crash": 2, "cut": 3, "heal": 5, "wall": 1}

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.fair = False
        self.writing = 0
        """Writes under way, which may be such as readers refuse."""
        self.values = itertools.count(1)
        self.oracle = ConfigOracle(self)
        self.server = ConfigServer(self.clock, self.oracle)

    def start(self) -> None:
        self.started += 1
        self.processes.append(Participant(self, f"p{self.started}"))

    def calm(self) -> None:
        self.fair = True
        super().calm()

    def unsettled(self) -> str:
        """What is not as it should be in fair weather; empty if all is well."""
        last = len(self.oracle.versions)
        for process in self.processes:
            assert isinstance(process, Participant)
            if process.observed != last:
                return f"{process.name} has observed {process.observed} of {last}"
            if self.oracle.in_force.get(process.name) != last:
                return f"{process.name} has not applied {last}"
        applied = map(Applied.decode, self.server.applied())
        says = sorted((each.name, each.version) for each in applied)
        if says != sorted((process.name, last) for process in self.processes):
            return f"the acknowledgements are {says}"
        return ""

    async def settle(self) -> None:
        """In fair weather a write comes through, and reaches everybody."""
        async with asyncio.timeout(SETTLED_S):
            while self.writing:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.05)
        self.started += 1
        last = Last(self, f"p{self.started}")
        try:
            async with asyncio.timeout(SETTLED_S):
                await last.task
                while self.unsettled():  # noqa: ASYNC110 - virtual time
                    await asyncio.sleep(0.05)
        except TimeoutError:
            last.task.cancel()
            raise NotReached(f"in fair weather: {self.unsettled()}") from None


class Last(Process):
    """Writes once, in fair weather."""

    world: ConfigWorld

    def prepare(self) -> None:
        self.calm()

    async def act(self, session: Session) -> None:
        config = session.config(NAME, type=Limits, author=self.name, history=KEEP)
        value = Limits(next(self.world.values))
        document = await config.set(value, wait_applied="all", wait_s=SETTLED_S)
        self.world.oracle.waited(document, "all")


def run_world(seed: int, *, processes: int = 4, steps: int = 60) -> ConfigWorld:
    world = ConfigWorld(seed)

    async def live() -> None:
        await world.trouble(processes, steps)
        world.start()
        world.calm()
        await world.settle()
        await world.end()
        await asyncio.sleep(2 * TTL_S)
        if left := world.oracle.standing():
            raise NotReached(f"{left} was left behind")

    world.watch_over(live())
    return world


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_configurations_in_much_trouble(seed: int) -> None:
    assert run_world(seed).oracle.versions


@pytest.mark.chaos
@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_many_seeds(seed: int) -> None:
    run_world(seed, steps=100)


def test_the_worlds_are_eventful() -> None:
    """What the oracle asks about does happen, and one seed gives one run."""
    worlds = [run_world(seed) for seed in range(6)]
    assert sum(len(world.oracle.versions) for world in worlds) > 100
    assert sum(world.oracle.waits for world in worlds) > 10
    assert sum(world.oracle.missed for world in worlds) > 0
    assert run_world(3).oracle.versions == worlds[3].oracle.versions


# What the oracle must see. Each variant breaks one rule of the code that users run.


def current_before_history(patch: pytest.MonkeyPatch) -> None:
    """The writer moves current first, and copies the version before it then."""
    replace, copy = ConfigStore._replace, ConfigStore._copy

    async def skip(self: ConfigStore[Any], current: Versioned, known: Entry | None = None) -> None:
        pass

    async def late(self: ConfigStore[Any], current: Versioned | None, plain: Any) -> Versioned:
        written = await replace(self, current, plain)
        if current is not None:
            await copy(self, current)
        return written

    patch.setattr(ConfigStore, "_copy", skip)
    patch.setattr(ConfigStore, "_replace", late)


def kept_although_not_copied(patch: pytest.MonkeyPatch) -> None:
    """The writer begins with the version that it wrote last, whether or not the history has it."""
    tidy = ConfigStore.tidy

    async def careless(self: ConfigStore[Any], written: Versioned) -> None:
        await tidy(self, written)
        self._kept_version = written

    patch.setattr(ConfigStore, "tidy", careless)


def acknowledged_without_a_lease(patch: pytest.MonkeyPatch) -> None:
    """An acknowledgement is written whether or not the subscriber's lease lives."""

    async def write(self: Acknowledgement, says: Applied) -> None:
        core = self._core
        self._key = self._key or config_key(self._config, "applied", core.next_attempt())
        entry = await core.call(core.store.get(self._key))
        version = None if entry is None else entry.version
        await core.call(core.store.put(self._key, says.encode(), if_version=version))

    patch.setattr(Acknowledgement, "_write", write)


def acknowledged_on_a_dead_lease(patch: pytest.MonkeyPatch) -> None:
    """A subscriber does not notice that its entry is gone with its lease."""
    write = Acknowledgement._write

    async def once(self: Acknowledgement, says: Applied) -> None:
        if self._entry is None or self._keepalive is None:
            await write(self, says)
        else:
            updated = await self._core.call(self._core.store.update(self._entry, says.encode()))
            self._entry = updated or self._entry

    patch.setattr(Acknowledgement, "_write", once)


def one_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """The writer does not wait for one of the subscribers."""
    look = _Waiting._look

    async def fewer(self: _Waiting) -> float:
        took_s = await look(self)
        if self.subscribers:
            self.subscribers[0].outcome = "applied"
        return took_s

    patch.setattr(_Waiting, "_look", fewer)


def refused_is_applied(patch: pytest.MonkeyPatch) -> None:
    """What a subscriber has refused counts as applied."""
    judge = _Waiting._judge

    async def lenient(self: _Waiting, subscriber: Any, entry: Entry | None) -> None:
        await judge(self, subscriber, entry)
        if subscriber.outcome == "refused":
            subscriber.outcome = "applied"

    patch.setattr(_Waiting, "_judge", lenient)


def versions_skipped(patch: pytest.MonkeyPatch) -> None:
    """A reader goes on with the current version, and says nothing of those in between."""

    async def skip(
        self: ConfigReader[Any], at: Any, current: Versioned
    ) -> tuple[list[Versioned], list[Any]]:
        return [current], []

    patch.setattr(ConfigReader, "_follow", skip)


def unknown_is_refused(patch: pytest.MonkeyPatch) -> None:
    """A write whose outcome is unknown is taken for one that was not carried out."""
    write = Document.write

    async def give_up(self: Document, *args: Any, **kwargs: Any) -> Versioned:
        try:
            async with asyncio.timeout(self._calls.timing.request_timeout_s / 2):
                return await write(self, *args, **kwargs)
        except TimeoutError:
            raise StoreUnavailable("nothing was written") from None

    patch.setattr(Document, "write", give_up)


def trimmed_too_far(patch: pytest.MonkeyPatch) -> None:
    """The history is shorter than was asked for."""
    trim = ConfigStore._trim
    patch.setattr(ConfigStore, "_trim", lambda self, version, keep: trim(self, version, keep - 2))


SEEDS = 40
"""Worlds to try until one shows what is broken."""


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (current_before_history, SafetyViolated),
        (kept_although_not_copied, SafetyViolated),
        (acknowledged_without_a_lease, SafetyViolated),
        (acknowledged_on_a_dead_lease, NotReached),
        (one_is_ignored, SafetyViolated),
        (refused_is_applied, SafetyViolated),
        (versions_skipped, SafetyViolated),
        (unknown_is_refused, SafetyViolated),
        (trimmed_too_far, SafetyViolated),
    ],
)
def test_the_oracle_sees(
    broken: Callable[[pytest.MonkeyPatch], None],
    error: type[SafetyViolated | NotReached],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert_oracle_sees(broken, monkeypatch, run_world, range(SEEDS), error)
