"""Versioned documents: compare-and-set, tokens, unknown outcomes, and documents that go back."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen import BadDocument, ConfigError, Conflict, OutcomeUnknown, StaleToken, StoreUnavailable
from doyen.manage.documents import Document, Versioned
from doyen.testing.faults import Faults, LostCall, Odds, RefusedCall, Stray, Unanswered
from support import Place, core_of, run_in_place, virtual

KEY = "config/limits/current"


async def document(place: Place, faults: Faults | None = None) -> Document:
    return Document(core_of(await place.open(faults)).calls, KEY)


@virtual
async def test_a_document_is_replaced_by_compare_and_set(place: Place) -> None:
    one, other = await document(place), await document(place)
    assert await one.read() is None
    first = await one.write({"value": 1}, expect=None)
    second = await other.write({"value": 2}, expect=await other.read())
    assert (first.version, second.version) == (1, 2)
    assert first.id != second.id
    assert await one.read() == second
    with pytest.raises(Conflict, match="version 2 instead of 1; read it again") as conflict:
        await one.write({"value": 3}, expect=first)
    assert conflict.value.current == second
    with pytest.raises(Conflict, match="version 2 instead of 0"):
        await one.write({"value": 3}, expect=None)
    assert await one.read() == second


@virtual
async def test_a_lower_token_is_refused_even_if_nobody_interfered(place: Place) -> None:
    here = await document(place)
    written = await here.write({}, expect=None, token=7)
    for token in (6, 0):
        with pytest.raises(StaleToken, match="written with token 7"):
            await here.write({}, expect=written, token=token)
    assert (await here.write({}, expect=written, token=7)).version == 2


@virtual
async def test_an_unknown_outcome_is_resolved_by_reading(place: Place) -> None:
    faults = Faults()
    here = await document(place, faults)
    last = None
    for fault in (Unanswered(), Unanswered(raises=True), LostCall(), LostCall(raises=True)):
        faults.next("put", fault)
        last = await here.write({"fault": str(fault)}, expect=last)
        assert await here.read() == last
    assert last is not None
    assert last.version == 4
    # The first request arrives while the same write is repeated: only one of them has an effect.
    faults.next("put", Stray(after_s=1.1))
    assert (await here.write({}, expect=last)).version == 5
    await asyncio.sleep(2)
    assert [(await here.read() or last).version] == [5]


@virtual
async def test_after_an_unknown_outcome_another_write_is_a_conflict(place: Place) -> None:
    """Version 1 is another's, so ours was not carried out and never will be."""
    faults = Faults()
    here, other = await document(place, faults), await document(place)
    faults.next("put", LostCall())
    writing = asyncio.create_task(here.write({"mine": True}, expect=None))
    await asyncio.sleep(0.1)
    await other.write({"mine": False}, expect=None)
    with pytest.raises(Conflict):
        await writing


@virtual
async def test_an_outcome_that_later_versions_hide_stays_unknown(place: Place) -> None:
    faults = Faults()
    here, other = await document(place, faults), await document(place)
    faults.next("put", Unanswered())
    writing = asyncio.create_task(here.write({"mine": True}, expect=None))
    await asyncio.sleep(0.1)
    await other.write({"mine": False}, expect=await other.read())
    with pytest.raises(OutcomeUnknown, match=r"version 1 .* may have been written, and version 2"):
        await writing


@virtual
async def test_a_store_that_does_not_answer_is_given_one_ttl(place: Place) -> None:
    faults = Faults()
    here = await document(place, faults)
    faults.next("put", RefusedCall())
    with pytest.raises(StoreUnavailable):
        await here.write({}, expect=None)
    faults.cut()
    with pytest.raises(OutcomeUnknown, match="did not report whether version 1"):
        await here.write({}, expect=None)


@virtual
async def test_a_document_that_is_too_large_or_not_json_is_refused(place: Place) -> None:
    here = await document(place)
    store = here._calls.store
    store.capabilities = replace(store.capabilities, value_bytes=300, value_limit="etcd's --limit")
    with pytest.raises(ConfigError, match=r"bytes, more than 300 \(etcd's --limit\); nothing was"):
        await here.write({"value": "x" * 300}, expect=None)
    with pytest.raises(ConfigError, match="what JSON can represent"):
        await here.write({"value": object()}, expect=None)
    assert await here.read() is None


@virtual
async def test_an_observer_sees_the_last_version_and_is_told_of_one_that_went_back(
    place: Place,
) -> None:
    here, server = await document(place), place.server
    seen: list[tuple[Versioned | BadDocument | None, bool]] = []
    observing = asyncio.create_task(here.observe(lambda now, back: seen.append((now, back))))
    await asyncio.sleep(1)
    one = await here.write({}, expect=None, token=3)
    await asyncio.sleep(1)
    two = await here.write({}, expect=one, token=3)
    await asyncio.sleep(1)
    assert seen == [(None, False), (one, False), (two, False)]

    seen.clear()
    restored = server.put(KEY, one.entry.value, two.entry.version)
    await asyncio.sleep(1)
    assert restored is not None
    assert seen == [(Versioned.decode(restored), True)]

    for value in (b"{", b'{"schema": 99, "version": 1, "token": 0, "id": "x"}', one.entry.value):
        restored = server.put(KEY, value, restored.version)
        assert restored is not None
        await asyncio.sleep(1)
    assert [type(now).__name__ for now, _ in seen[1:]] == ["BadDocument"] * 2 + ["Versioned"]
    server.delete(KEY)
    await asyncio.sleep(1)
    assert seen[-1] == (None, True)
    observing.cancel()


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 2**32 - 1))
def test_no_increment_is_lost_or_counted_twice(seed: int) -> None:
    """Writers on failing links increment a number. What each was told is what happened."""

    async def whole(place: Place) -> None:
        told = doubtful = 0

        async def increment(here: Document) -> None:
            nonlocal told, doubtful
            for _ in range(5):
                written = False
                while not written:
                    with contextlib.suppress(OutcomeUnknown, StoreUnavailable):
                        last = await here.read()
                        count = 0 if last is None else int(last.body["count"])
                        try:
                            await here.write({"count": count + 1}, expect=last)
                            written = True
                        except Conflict:
                            pass
                        except OutcomeUnknown:
                            doubtful += 1
                    await asyncio.sleep(0.5)
                told += 1

        odds = Odds(late=0.1, lost=0.1, unanswered=0.1, refused=0.05, stray=0.1, delay_s=2.0)
        writers = [await document(place, Faults(seed + n, odds)) for n in range(3)]
        await asyncio.gather(*map(increment, writers))
        await asyncio.sleep(5)
        last = await (await document(place)).read()
        assert last is not None
        assert last.body["count"] == last.version
        assert told <= last.version <= told + doubtful

    run_in_place(whole)
