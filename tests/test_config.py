"""Configurations: versions, history, types, observers without gaps, and who has applied what."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import pydantic
import pytest

import doyen
from configs import (
    CURRENT,
    Backup,
    Follower,
    Limits,
    Subscriber,
    acknowledgements,
    current_of,
    history_of,
)
from doyen import (
    BadDocument,
    Config,
    ConfigDocument,
    ConfigError,
    Conflict,
    Missed,
    NotApplied,
    OutcomeUnknown,
    Regressed,
    SessionClosed,
    StoreUnavailable,
)
from doyen.model import Entry, Reachable, config_key
from doyen.stores.port import Store, Watch
from doyen.testing.faults import (
    Fault,
    Faults,
    FaultyStore,
    LostCall,
    RefusedCall,
    Stray,
    Unanswered,
)
from support import Place, until, virtual

# Versions and history.


@virtual
async def test_a_document_has_a_version_an_author_and_a_time(place: Place) -> None:
    config = (await place.open()).config("limits", type=Limits, author="ann")
    assert await config.get() is None
    assert await config.history() == []
    document = await config.set(Limits(4))
    assert (document.version, document.author, document.value) == (1, "ann", Limits(4))
    assert document.at.isoformat() == "2023-11-14T22:13:20+00:00"
    assert await config.get() == document
    assert (await config.set(Limits(5))).version == 2
    assert await config.get(1) == document


@virtual
async def test_a_stale_version_is_refused_with_who_wrote_the_newer_one(place: Place) -> None:
    ann = (await place.open()).config("limits", author="ann")
    bob = (await place.open()).config("limits", author="bob")
    await ann.set({"workers": 4}, if_version=0)
    newer = await bob.set({"workers": 5}, if_version=1)
    with pytest.raises(
        Conflict, match=r"'limits' is at version 2, which 'bob' wrote at 2023-11-14 .* not at 1"
    ) as conflict:
        await ann.set({"workers": 6}, if_version=1)
    assert conflict.value.current == newer
    with pytest.raises(Conflict, match="not at 0"):
        await ann.set({"workers": 6}, if_version=0)
    with pytest.raises(Conflict, match="'other' has no version 3: nothing was written yet"):
        await (await place.open()).config("other").set(1, if_version=3)
    assert await ann.get() == newer


@virtual
async def test_writers_at_once_make_one_version_each(place: Place) -> None:
    configs = [(await place.open()).config("limits") for _ in range(5)]
    written = await asyncio.gather(*(config.set(n) for n, config in enumerate(configs)))
    assert sorted(document.version for document in written) == [1, 2, 3, 4, 5]
    ours = await asyncio.gather(
        *(config.set(n, if_version=5) for n, config in enumerate(configs)), return_exceptions=True
    )
    assert sum(isinstance(outcome, ConfigDocument) for outcome in ours) == 1
    assert sum(isinstance(outcome, Conflict) for outcome in ours) == 4


@virtual
async def test_the_history_is_bounded_and_has_the_bytes_of_what_was_current(place: Place) -> None:
    config = (await place.open()).config("limits", history=3)
    was = {}
    for n in range(1, 9):
        await config.set(n)
        was[n] = current_of(place).value
    assert history_of(place) == {n: was[n] for n in (5, 6, 7)}
    assert [(each.version, each.value) for each in await config.history()] == [
        (8, 8),
        (7, 7),
        (6, 6),
        (5, 5),
    ]
    for unknown in (4, 9, 0, -1):
        with pytest.raises(ConfigError, match=f"no version {unknown}: .* versions 5 to 8"):
            await config.get(unknown)
    with pytest.raises(ConfigError, match="nothing has been written yet"):
        await (await place.open()).config("other").rollback(1)


@virtual
async def test_what_a_writer_left_beyond_the_bound_is_deleted_by_a_later_one(place: Place) -> None:
    config = (await place.open()).config("limits", history=3)
    for n in range(1, 7):
        await config.set(n)
    place.server.put(config_key("limits", "history", 1), b"late", None)
    for n in range(7, 10):
        await config.set(n)
    assert [*history_of(place)] == [6, 7, 8]


@virtual
async def test_the_bound_of_the_history_holds_for_later_writers_too(place: Place) -> None:
    service = (await place.open()).config("limits", history=30)
    tool = (await place.open()).config("limits")
    for n in range(1, 26):
        await service.set(n)
    await tool.set("by hand")
    assert len(history_of(place)) == 25
    await (await place.open()).config("limits", history=2).set("fewer")
    await tool.set("by hand")  # an even version: all are looked through
    assert sorted(history_of(place)) == [26, 27]


@virtual
async def test_rollback_writes_the_old_value_as_a_new_version(place: Place) -> None:
    session = await place.open()
    config = session.config("limits", type=Limits, author="ann")
    for workers in (1, 2, 3):
        await config.set(Limits(workers))
    document = await config.rollback(1, if_version=3)
    assert (document.version, document.value) == (4, Limits(1))
    with pytest.raises(Conflict, match="at version 4"):
        await config.rollback(2, if_version=3)
    await session.config("limits").set({"workers": "many"})
    with pytest.raises(BadDocument, match=r"\$\.workers: Expected `int`, got `str`"):
        await config.rollback(5)


class Counting(FaultyStore):
    """Cuts the link before its nth call is carried out, or before that is answered."""

    def __init__(self, store: Store, last: int, *, answered: bool) -> None:
        super().__init__(store, Faults())
        self._left = last
        self._answered = answered

    async def _call(self, operation: str, about: str, do: Any, lease: Any = None) -> Any:
        self._left -= 1
        if self._left <= 0:
            self.faults.cut(answers_only=self._answered and self._left == 0)
        return await super()._call(operation, about, do, lease)


@pytest.mark.parametrize("answered", [False, True], ids=["not_carried_out", "carried_out"])
@pytest.mark.parametrize("last", range(1, 8))
def test_a_writer_may_die_between_any_two_calls(last: int, answered: bool) -> None:
    @virtual
    async def dies(place: Place) -> None:
        other = (await place.open()).config("limits", history=2)
        for n in (1, 2, 3):
            await other.set(n)
        before = current_of(place).value
        seen = Follower(other, since=3)
        session = await place.open(wrap=lambda store: Counting(store, last, answered=answered))
        writing = asyncio.ensure_future(session.config("limits", history=2).set("mine"))
        await asyncio.sleep(0.1)
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)

        after = json.loads(current_of(place).value)
        assert (after["version"], after["value"]) in [(3, 3), (4, "mine")]
        kept = history_of(place)
        assert kept[2]
        assert kept.get(3, before) == before
        assert after["version"] == 3 or 3 in kept
        written = await other.set("next")
        assert written.version == after["version"] + 1
        await until(lambda: seen.versions == [*range(4, written.version + 1)])
        assert [*history_of(place)][-2:] == [written.version - 2, written.version - 1]
        seen.task.cancel()

    dies()


def test_the_calls_of_a_writer_are_all_tried() -> None:
    """Read and see that it is kept, write, copy, delete, and nothing else. One that writes again
    begins with the write."""

    @virtual
    async def counted(place: Place) -> None:
        faults = Faults()
        session = await place.open(faults)
        config = session.config("limits", history=2)
        for n in range(1, 6):
            faults.trace.clear()
            await config.set(n)
        assert [call.split()[0] for call in faults.trace] == ["put", "put", "delete"]
        faults.trace.clear()
        await session.config("limits", history=2).set(6)
        calls = ["get", "get", "put", "put", "list", "delete"]
        assert [call.split()[0] for call in faults.trace] == calls

    counted()


# Unknown outcomes.


@virtual
async def test_an_unknown_outcome_is_resolved_by_reading(place: Place) -> None:
    faults = Faults()
    config = (await place.open(faults)).config("limits")
    await config.set(0)
    lost: list[Fault] = [Unanswered(), Unanswered(raises=True), LostCall(), LostCall(raises=True)]
    for n, fault in enumerate(lost):
        faults.next("put", fault)
        document = await config.set(f"value {n}")
        assert (document.version, document.value) == (n + 2, f"value {n}")


@virtual
async def test_a_write_that_was_replaced_before_its_answer_is_found_in_the_history(
    place: Place,
) -> None:
    faults = Faults()
    mine = (await place.open(faults)).config("limits", author="mine")
    other = (await place.open()).config("limits")
    await other.set(1)
    faults.next("put", Unanswered())
    writing = asyncio.ensure_future(mine.set(2))
    await until(lambda: json.loads(current_of(place).value)["version"] == 2)
    await other.set(3)
    await other.set(4)
    document = await writing
    assert (document.version, document.value, document.author) == (2, 2, "mine")

    faults.next("put", LostCall())
    writing = asyncio.ensure_future(mine.set(5, if_version=4))
    await asyncio.sleep(0.01)
    await other.set(6)
    await other.set(7)
    with pytest.raises(Conflict, match="at version 6"):
        await writing


@virtual
async def test_unavailable_means_that_nothing_was_written(place: Place) -> None:
    """By a writer that has to copy the current version first."""
    faults = Faults()
    session = await place.open(faults)
    await session.config("limits").set(1)

    def forget_copy() -> None:
        key = config_key("limits", "history", 1)
        if (copy := place.server.get(key)) is not None:
            place.server.delete(key, copy.version)

    for operation, fault in (
        ("get", RefusedCall()),
        ("get", LostCall(raises=True)),
        ("put", RefusedCall()),
        ("put", Unanswered(raises=True)),
        ("put", LostCall()),
    ):
        forget_copy()
        faults.next(operation, fault)
        with pytest.raises(StoreUnavailable):
            await session.config("limits").set(2)
    forget_copy()
    faults.next("put", Stray(after_s=0.0), LostCall(raises=True))
    faults.next("get", Stray(after_s=0.0), Stray(after_s=0.0), *[LostCall()] * 50)
    with pytest.raises(OutcomeUnknown, match="did not report whether version 2"):
        await session.config("limits").set(2)
    assert json.loads(current_of(place).value)["version"] == 1


# Observers.


@virtual
async def test_observers_see_every_version_however_slow_they_are(place: Place) -> None:
    config = (await place.open()).config("limits")
    follower = Follower((await place.open()).config("limits"))
    await asyncio.sleep(1)
    for n in range(1, 8):
        await config.set(n)
    await until(lambda: follower.versions == [1, 2, 3, 4, 5, 6, 7])
    late = Follower((await place.open()).config("limits"), since=5)
    latest = Follower((await place.open()).config("limits"))
    await until(lambda: late.versions == [6, 7] and latest.versions == [7])
    for each in (follower, late, latest):
        each.task.cancel()


@virtual
async def test_who_is_older_than_the_history_is_told_what_was_missed(place: Place) -> None:
    config = (await place.open()).config("limits", history=3)
    for n in range(1, 10):
        await config.set(n)
    follower = Follower((await place.open()).config("limits"), since=2)
    await until(lambda: follower.seen)
    assert follower.versions == [Missed(3, 5), 6, 7, 8, 9]
    follower.task.cancel()


@virtual
async def test_one_that_waits_between_changes_misses_none(place: Place) -> None:
    """Its position is its own: what is written while it works is read afterwards."""
    config = (await place.open()).config("limits")
    await config.set(1)
    async with aclosing((await place.open()).config("limits").observe()) as changes:
        seen = [await anext(changes)]
        for n in range(2, 5):
            await config.set(n)
        await asyncio.sleep(5)
        seen += [await anext(changes) for _ in range(3)]
        assert [each.version for each in seen if isinstance(each, ConfigDocument)] == [1, 2, 3, 4]


@virtual
async def test_observing_survives_an_unavailable_store(place: Place) -> None:
    faults = Faults()
    config = (await place.open()).config("limits")
    follower = Follower((await place.open(faults)).config("limits"))
    await config.set(1)
    await until(lambda: follower.versions == [1])
    faults.cut()
    await config.set(2)
    await config.set(3)
    await asyncio.sleep(30)
    first, lost = follower.versions
    assert (first, lost.last.version) == (1, 1)
    faults.heal()
    await until(lambda: len(follower.versions) == 5)
    assert isinstance(follower.versions[2], Reachable)
    assert follower.versions[3:] == [2, 3]
    follower.task.cancel()


@virtual
async def test_closing_ends_observers_and_their_watches(place: Place) -> None:
    session = await place.open()
    follower = Follower(session.config("limits"))
    other = Follower((await place.open()).config("limits"))
    await asyncio.sleep(1)
    assert place.server._watchers.keys() == {CURRENT}
    other.task.cancel()
    await session.__aexit__(None, None, None)
    with pytest.raises(SessionClosed):
        await follower.task
    await asyncio.sleep(0)
    assert not place.server._watchers


# A store that loses confirmed writes.


@virtual
async def test_lost_writes_are_told_and_what_remains_is_applied(place: Place) -> None:
    config = (await place.open()).config("limits")
    await config.set("a")
    await config.set("b")
    backup = Backup(place.server)
    faults = Faults()
    follower = Follower((await place.open(faults)).config("limits"))
    await until(lambda: follower.seen)
    await config.set("c")
    await config.set("d")
    await until(lambda: follower.versions == [2, 3, 4])

    backup.restore()  # a lower version
    await until(lambda: follower.versions[3:] == [Regressed(4, 2), 2])
    assert (await config.set("e")).version == 3
    await until(lambda: follower.versions[5:] == [3])

    faults.cut()
    backup.restore()
    second = await config.set("f")  # the same version again, before the follower has looked
    faults.heal()
    await until(lambda: follower.versions[6:] == [Regressed(3, 3), 3])
    assert follower.seen[-1] == second

    faults.cut()
    backup.restore()
    for value in "ghi":  # even a higher one shows that it does not follow
        await config.set(value)
    faults.heal()
    await until(lambda: len(follower.seen) == 10)
    assert follower.versions[8:] == [Regressed(3, 5), 5]
    # The history is that of the versions that count.
    assert [each.value for each in await config.history()] == ["i", "h", "g", "b", "a"]

    for entry in place.server.list("config/limits"):
        place.server.delete(entry.key)
    await until(lambda: follower.versions[10:] == [Regressed(5, 0)])
    await config.set("j")
    await until(lambda: follower.versions[11:] == [1])
    follower.task.cancel()


@virtual
async def test_what_the_history_kept_of_lost_versions_is_replaced(place: Place) -> None:
    """Where keys are lost independently, the history may have versions that current never had."""
    config = (await place.open()).config("limits")
    for value in "abc":
        await config.set(value)
    lost = current_of(place).value
    place.server.put(config_key("limits", "history", 3), lost, None)
    place.server.put(config_key("limits", "history", 4), lost, None)
    second = place.server.get(config_key("limits", "history", 2))
    assert second is not None
    place.server.put(CURRENT, second.value, current_of(place).version)
    assert [each.version for each in await config.history()] == [2, 1]
    for value in "xyz":
        await config.set(value)
    assert [each.value for each in await config.history()] == ["z", "y", "x", "b", "a"]


class Outdated(FaultyStore):
    """Sometimes an outdated replica answers a read."""

    outdated: Entry | None = None

    async def get(self, key: str) -> Entry | None:
        if key == CURRENT and self.outdated is not None:
            return self.outdated
        return await super().get(key)


@virtual
async def test_an_outdated_replica_is_not_a_lost_write(place: Place) -> None:
    stores: list[Outdated] = []

    def wrap(store: Store) -> Store:
        stores.append(Outdated(store, Faults()))
        stores[-1].capabilities = replace(store.capabilities, linearizable_reads=False)
        return stores[-1]

    config = (await place.open()).config("limits")
    await config.set(1)
    follower = Follower((await place.open(wrap=wrap)).config("limits"))
    await until(lambda: follower.seen)
    before = current_of(place)
    await config.set(2)
    await until(lambda: follower.versions == [1, 2])
    stores[0].outdated = before
    await config.set(3)
    await asyncio.sleep(0.5)
    stores[0].outdated = None
    await until(lambda: follower.versions == [1, 2, 3])
    stores[0].outdated = before  # and this time for good
    await config.set(4)
    await until(lambda: follower.versions == [1, 2, 3, Regressed(3, 1), 1])
    follower.task.cancel()


# Types.


@dataclass
class Plain:
    workers: int


class Model(pydantic.BaseModel):
    """A model of pydantic."""

    workers: int
    zones: list[str] = []


@pytest.mark.parametrize(
    ("kind", "good", "bad", "reason"),
    [
        (Limits, Limits(4), Limits("x"), r"\$\.workers: Expected `int`, got `str`"),  # type: ignore[arg-type]
        (Limits, Limits(4), {"workers": 1.5}, r"\$\.workers: Expected `int`, got `float`"),
        (Plain, Plain(4), Plain("x"), r"\$\.workers: Expected `int`, got `str`"),  # type: ignore[arg-type]
        (dict[str, int], {"a": 1}, {"a": "b"}, r"\$\[\.\.\.\]: Expected `int`, got `str`"),
        (list, [1], {}, r"\$: Expected `array`, got `object`"),
        (Limits, Limits(4), object(), "it is not what JSON can represent"),
        (Model, Model(workers=4), {"workers": "x"}, r"\$\.workers: Input should be a valid int"),
        (Model, Model(workers=4), {"workers": 1, "zones": [2]}, r"\$\.zones\[0\]: Input should be"),
        (pydantic.TypeAdapter(list[int]), [1], ["x"], r"\$\[0\]: Input should be a valid integer"),
        (None, {"any": [1, None]}, object(), "it is not what JSON can represent: .* pass type="),
        (None, 1, float("nan"), "it is not what JSON can represent"),
    ],
)
def test_types_are_checked_when_written_and_when_read(
    kind: Any, good: Any, bad: Any, reason: str
) -> None:
    @virtual
    async def checked(place: Place) -> None:
        config: Config[Any] = (await place.open()).config("limits", type=kind)
        assert (await config.set(good)).value == good
        read = await config.get()
        assert read is not None
        assert read.value == good
        assert type(read.value) is type(good)
        with pytest.raises(BadDocument, match=f"'limits' was not written: {reason}"):
            await config.set(bad)
        if isinstance(bad, dict | list):
            await (await place.open()).config("limits", author="bob").set(bad)
            with pytest.raises(
                BadDocument, match=f"version 2 of 'limits', by 'bob', fails its type: {reason}"
            ) as error:
                await config.get()
            assert (error.value.version, error.value.author) == (2, "bob")

    checked()


@virtual
async def test_a_base_install_checks_the_types_of_json(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await place.open()
    monkeypatch.setitem(sys.modules, "msgspec", None)
    config = session.config("limits", type=dict)
    await config.set({"workers": 4})
    with pytest.raises(BadDocument, match=r"\$: Expected `dict`, got `list`"):
        await config.set([1])  # type: ignore[arg-type]
    with pytest.raises(BadDocument, match=r"\$: Expected `int`, got `bool`"):
        await session.config("n", type=int).set(True)
    with pytest.raises(ConfigError, match="needs msgspec or pydantic: pip install"):
        session.config("limits", type=Plain)


@virtual
async def test_a_bad_document_is_told_and_the_last_good_one_stays_in_force(place: Place) -> None:
    good = (await place.open()).config("limits", type=Limits)
    plain = (await place.open()).config("limits", author="bob")
    follower = Follower(good)
    early = Subscriber(good, "early")
    await good.set(Limits(1))
    await until(lambda: acknowledgements(place) == [("early", 1)])
    with pytest.raises(NotApplied, match=r"'early' refused it .*Expected `int`") as refused:
        await plain.set({"workers": "many"}, wait_applied="all")
    assert [*refused.value.refused] == ["early"]
    assert refused.value.waiting == []
    late = Subscriber((await place.open()).config("limits", type=Limits), "late")
    await until(lambda: late.applied == [1])  # from the history
    await good.set(Limits(3), wait_applied="all")
    assert (early.applied, late.applied) == ([1, 3], [1, 3])
    first, bad, last = follower.seen
    assert (first.version, last.version) == (1, 3)
    assert isinstance(bad, BadDocument)
    assert (bad.version, bad.author) == (2, "bob")
    for task in (follower.task, early.task, late.task):
        task.cancel()


@pytest.mark.parametrize(
    "value",
    [b"", b"[]", b"{}", b'{"schema":1,"version":1,"id":"x","token":0}', b'{"schema":9}'],
)
def test_what_is_no_configuration_is_told_once_and_not_applied(value: bytes) -> None:
    @virtual
    async def garbage(place: Place) -> None:
        config = (await place.open()).config("limits")
        await config.set(1)
        await config.set(2)
        follower = Follower(config)
        await until(lambda: follower.versions == [2])
        place.server.put(CURRENT, value, current_of(place).version)
        await asyncio.sleep(1)
        place.server.put(CURRENT, value, current_of(place).version)
        await asyncio.sleep(1)
        with pytest.raises(BadDocument):
            await config.get()
        bad = [change for change in follower.seen if isinstance(change, BadDocument)]
        assert len(bad) == 1
        late = Follower(config)
        await until(lambda: len(late.seen) == 2)  # the last good one is in force
        assert late.documents == [2]
        # It is not overwritten by accident, and the error says how it is on purpose.
        for write in (config.set(3), config.rollback(1)):
            with pytest.raises(BadDocument, match="doyen config rollback limits VERSION --force"):
                await write
        with pytest.raises(Conflict, match="cannot be read, so it is not at version 2"):
            await config.set(3, if_version=2, force=True)
        assert [each.version for each in await config.history()] == [2, 1]
        restored = await config.rollback(1, force=True)
        assert (restored.version, restored.value) == (4, 1)
        assert (await config.set(5)).version == 5
        assert [each.version for each in await config.history()] == [5, 4, 2, 1]
        await until(lambda: follower.documents == late.documents == [2, 4, 5])
        assert Missed(3, 3) in follower.seen
        assert Missed(3, 3) in late.seen
        for each in (follower, late):
            each.task.cancel()

    garbage()


# What other programs have written.


@virtual
async def test_a_foreign_value_in_the_history_is_left_out(place: Place) -> None:
    config = (await place.open()).config("limits")
    for n in range(1, 5):
        await config.set(n)
    for version, value in ((2, b"garbage"), (3, b'{"schema":1,"version":3,"id":"","token":0}')):
        key = config_key("limits", "history", version)
        entry = place.server.get(key)
        assert entry is not None
        place.server.put(key, value, entry.version)
    assert [each.version for each in await config.history()] == [4, 1]
    with pytest.raises(BadDocument, match="another program has written it"):
        await config.get(2)
    early = Follower(config, since=1)
    await until(lambda: early.seen[1:])
    assert early.seen[0] == Missed(2, 3)
    # The current version is overwritten as well.
    place.server.put(CURRENT, b"garbage", current_of(place).version)
    late = Follower(config)
    await until(lambda: late.seen[1:])
    assert late.documents == [4]
    assert (await config.set(9, force=True)).version == 6  # 5 was the unreadable one
    for key in (CURRENT, config_key("limits", "history", 6)):
        entry = place.server.get(key)
        assert entry is not None
        place.server.put(key, b"garbage", entry.version)
    restored = await config.rollback(1, force=True)
    assert (restored.version, restored.value) == (8, 1)
    await until(lambda: early.documents[-1] == late.documents[-1] == restored.version)
    for follower in (early, late):
        follower.task.cancel()


@pytest.mark.parametrize("name", ["latest", "9" * 5000])
@virtual
async def test_a_key_of_the_history_that_is_no_version_is_left_alone(
    place: Place, name: str
) -> None:
    config = (await place.open()).config("limits", history=2)
    key = config_key("limits", "history", name)
    place.server.put(key, b"x", None)
    for n in range(1, 6):
        assert (await config.set(n)).version == n
    assert len(place.server.list(config_key("limits", "history"))) == 4
    assert place.server.get(key) is not None


# Limits and options.


@virtual
async def test_a_document_beyond_the_limit_of_the_store_is_refused(place: Place) -> None:
    config = (await place.open()).config("limits")
    first = await config.set("small")
    with pytest.raises(ConfigError, match=r"more than 1000000 .*nothing was written"):
        await config.set("x" * 1_000_000)
    assert await config.get() == first
    assert history_of(place) in ({}, {1: current_of(place).value})


@virtual
async def test_wrong_options_are_refused(place: Place) -> None:
    session = await place.open()
    config = session.config("limits")
    with pytest.raises(ConfigError, match="the name of a configuration is a string"):
        session.config("")
    with pytest.raises(ConfigError, match="history is the number of versions to keep"):
        session.config("limits", history=0)
    with pytest.raises(ConfigError, match="wait_applied is 'all', 'majority' or None"):
        await config.set(1, wait_applied="some")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="wait_s is 0 s or more"):
        await config.set(1, wait_applied="all", wait_s=-1)
    with pytest.raises(ConfigError, match="since is a version, 0 or more"):
        await anext(config.observe(since=-1))
    with pytest.raises(ConfigError, match="not a type that msgspec can check"):
        session.config("limits", type=17)  # type: ignore[call-overload]
    assert place.server.list("config") == []


def test_the_blocking_api_does_the_same() -> None:
    with (
        doyen.connect_blocking("memory://config") as session,
        doyen.connect_blocking("memory://config") as other,
    ):
        config = session.config("limits", type=Limits, author="ann", history=5)
        first = config.set(Limits(1))
        assert config.get() == first
        with other.config("limits", type=Limits).subscribe("s") as documents:
            assert next(documents) == first
            documents.refuse("no")
            with pytest.raises(NotApplied, match="'s' has not applied it within 0 s"):
                config.set(Limits(2), if_version=1, wait_applied="all", wait_s=0)
            assert next(documents).version == 2
            documents.applied()
            config.rollback(1)
            assert next(documents).value == Limits(1)
        assert [each.version for each in config.history()] == [3, 2, 1]
        changes = config.observe(since=1)
        assert [next(changes), next(changes)] == [config.get(2), config.get(3)]
        changes.close()
        with pytest.raises(Conflict):
            config.set(Limits(9), if_version=1)


class Carrying(FaultyStore):
    """Notifications carry the entry: what `carries` returns."""

    carries: Callable[[], Entry | None]

    def carried(self, watch: Watch) -> Entry | None:
        return self.carries()


@virtual
async def test_a_document_that_a_notification_carries_is_not_read_again(place: Place) -> None:
    faults = Faults()

    def wrap(store: Store) -> Store:
        carrying = Carrying(store, faults)
        carrying.carries = lambda: place.server.get(CURRENT)
        return carrying

    config = (await place.open()).config("limits")
    await config.set(1)
    follower = Follower((await place.open(wrap=wrap)).config("limits"))
    await until(lambda: follower.versions == [1])
    faults.trace.clear()
    await config.set(2)
    await until(lambda: follower.versions == [1, 2])
    assert faults.trace == []
    for value in (3, 4):  # before the follower gets to it: the version between is in the history
        await config.set(value)
    await until(lambda: follower.versions == [1, 2, 3, 4])
    assert not [call for call in faults.trace if CURRENT in call]


@virtual
async def test_what_a_notification_carries_late_takes_nothing_back(place: Place) -> None:
    """It may be earlier than what was read meanwhile, or something that is not a configuration."""
    late: list[Entry] = []

    def wrap(store: Store) -> Store:
        carrying = Carrying(store, Faults())
        carrying.carries = lambda: late[-1] if late else None
        return carrying

    config = (await place.open()).config("limits")
    await config.set(1)
    first = current_of(place)
    follower = Follower((await place.open(wrap=wrap)).config("limits"))
    await config.set(2)
    await until(lambda: follower.versions[-1:] == [2])
    for carried in (first, first._replace(value=b"{"), first._replace(value=b"[]")):
        late.append(carried)
        await config.set(0)
        await until(lambda: follower.versions[-1] == current_version(place))
    assert all(isinstance(version, int) for version in follower.versions)
    assert follower.versions == sorted(follower.versions)


def current_version(place: Place) -> int:
    return int(json.loads(current_of(place).value)["version"])
