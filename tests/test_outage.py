"""The store goes away and comes back: who lost a lease to that gives it back as soon as it can."""

from __future__ import annotations

import asyncio

import pytest

import doyen
from doyen.testing import Faults
from support import TTL_S, Place, heart_of, lead_until_told, now, until, virtual


@virtual
async def test_a_lease_that_was_lost_is_given_back_when_the_store_returns(place: Place) -> None:
    """A store that has been restarted may begin all leases anew: nobody should wait for that."""
    faults = Faults()
    cut_off, other = await place.open(faults), await place.open()
    stop = asyncio.Event()
    with pytest.raises(doyen.LeadershipLost):
        async with cut_off.campaign("e", name="old"):
            successor = asyncio.create_task(lead_until_told(other, stop, name="new"))
            faults.cut()
            await asyncio.sleep(2 * TTL_S)
    place.server.renew(heart_of(cut_off).lease.id)
    await asyncio.sleep(TTL_S / 2)
    assert place.holder() == "old"
    faults.heal()
    healed = now()
    await until(lambda: place.holder() == "new")
    assert now() < healed + TTL_S / 3
    stop.set()
    await successor
