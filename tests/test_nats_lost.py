"""Buckets that are deleted, or whose server comes back without its data, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from doyen.errors import LeaseGone, OutcomeUnknown, StoreUnavailable
from doyen.stores.nats.buckets import Buckets
from doyen.stores.nats.consumer import HEARTBEAT_S, SILENCE_S
from test_nats_adversary import KEY, STREAM, TTL_S, NatsRoom, Outage, meets


@pytest.mark.parametrize(("candidates", "outage_s"), [(1, 20.0), (3, 0.0)])
def test_a_candidate_leads_within_a_ttl_after_the_server_lost_its_data(
    candidates: int, outage_s: float
) -> None:
    """A living client creates the buckets again when the lost leases are over, above all tokens."""
    assert Outage(candidates, outage_s, wiped=True).took_s <= TTL_S + 1.5


def pause_of_the_successor_s() -> float:
    """Only the bucket of entries is deleted, and the leader has not noticed it. How long after its
    last renewal somebody else leads in the new bucket."""
    pause_s = 0.0

    async def test(room: NatsRoom) -> None:
        nonlocal pause_s
        a, b = await room.open(), await room.open()
        lease = await a.grant(TTL_S)
        made = await a.create(KEY, b"a", lease)
        await b.get(KEY)
        room.model.delete(STREAM)
        while True:
            await asyncio.sleep(0.1)
            with contextlib.suppress(StoreUnavailable, LeaseGone):
                sent = room.clock.now()
                await a.renew(lease)
                confirmed = sent
            with contextlib.suppress(StoreUnavailable, OutcomeUnknown):
                if (again := await b.create(KEY, b"b", await b.grant(TTL_S))).won:
                    break
        pause_s = room.clock.now() - confirmed
        assert again.entry.revision > made.entry.revision

    assert meets(test) <= HEARTBEAT_S + SILENCE_S + TTL_S + 1
    return pause_s


def test_renewals_that_outlived_the_entries_keep_no_lease_alive() -> None:
    assert pause_of_the_successor_s() >= TTL_S


def test_buckets_that_are_created_again_at_once_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = Buckets.missing

    async def at_once(self: Buckets, highest: int, ttl_s: float) -> None:
        await missing(self, highest, 0.0)

    monkeypatch.setattr(Buckets, "missing", at_once)
    assert pause_of_the_successor_s() < TTL_S


def test_the_bucket_of_renewals_is_created_again_if_only_it_was_lost() -> None:
    async def test(room: NatsRoom) -> None:
        store = await room.open()
        lease = await store.grant(TTL_S)
        room.model.delete(f"{STREAM}_beats")
        async with asyncio.timeout(3):
            while True:
                with contextlib.suppress(StoreUnavailable):
                    await store.grant(TTL_S)
                    break
                await asyncio.sleep(0.1)
        with pytest.raises(LeaseGone):
            await store.renew(lease)

    meets(test)
