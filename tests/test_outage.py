"""The store goes away and comes back: how long until somebody leads.

Who lost a lease to the outage gives it back as soon as it can, and whatever nobody gives back
expires together: the bound is `Timing.worst_failover_s`, for any number of candidates. That it can
be missed is shown at the end, on a store that judges stale tickets one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

import doyen
from doyen.events import Elected
from doyen.lease.clock import Clock
from doyen.lease.timing import Timing
from doyen.stores.memory import MemoryServer
from doyen.testing import Faults, run_virtual
from support import TTL_S, Place, keepalive_of, lead_until_set, now, until, virtual


@virtual
async def test_a_lease_that_was_lost_is_given_back_when_the_store_returns(place: Place) -> None:
    """A store that has been restarted may begin all leases anew: nobody should wait for that."""
    faults = Faults()
    cut_off, other = await place.open(faults), await place.open()
    stop = asyncio.Event()
    with pytest.raises(doyen.LeadershipLost):
        async with cut_off.campaign("e", name="old"):
            successor = asyncio.create_task(lead_until_set(other, stop, name="new"))
            faults.cut()
            await asyncio.sleep(2 * TTL_S)
    place.server.renew(keepalive_of(cut_off).lease.id)
    await asyncio.sleep(TTL_S / 2)
    assert place.holder() == "old"
    faults.heal()
    healed = now()
    await until(lambda: place.holder() == "new")
    assert now() < healed + TTL_S / 3
    stop.set()
    await successor


class RestartedServer(MemoryServer):
    """A store that can be gone for a while. When it is back it begins every lease anew."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._down = False

    def stop(self) -> None:
        self._down = True

    def restart(self) -> None:
        self._down = False
        for held in self._leases.values():
            held.expires_at = self.clock.now() + held.ttl_s
        for alarm in list(self._alarms.values()):
            alarm.sooner()

    def next_expiry(self) -> float | None:
        return None if self._down else super().next_expiry()

    def _expire(self, now: float) -> Sequence[str]:
        return [] if self._down else super()._expire(now)


class SerialServer(RestartedServer):
    """The broken variant: of the leases that were silent together, only one is judged at a time.
    Whenever one has expired, the next is given a full ttl."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._stale: set[str] = set()
        self._expiring = False

    def restart(self) -> None:
        super().restart()
        self._stale = set(self._leases)

    def _expire(self, now: float) -> Sequence[str]:
        self._expiring = True
        try:
            return super()._expire(now)
        finally:
            self._expiring = False

    def _end(self, lease: str) -> None:
        super()._end(lease)
        if self._expiring and lease in self._stale:
            for other in self._stale & self._leases.keys():
                held = self._leases[other]
                held.expires_at = self.clock.now() + held.ttl_s


WORST_S = Timing(ttl_s=TTL_S).worst_failover_s()


def recovery_s(server: type[RestartedServer], candidates: int, *, killed: bool) -> float:
    """How long nobody led after an outage of five ttls, with this many candidates: the same ones
    throughout, or killed in the outage and as many new ones started when it is over."""
    place = Place()
    place.server = store = server(place.clock)

    async def whole() -> float:
        async with AsyncExitStack() as stack:
            before = await crowd(stack, "before")
            await until(lambda: len(place.line()) == candidates and place.seen(Elected))
            store.stop()
            for task, faults in before:
                faults.cut()
                if killed:
                    task.cancel()
            await asyncio.sleep(5 * TTL_S)
            place.events.clear()
            store.restart()
            began = now()
            if killed:
                await crowd(stack, "after")
            for _, faults in before if not killed else ():
                faults.heal()
            await until(lambda: place.seen(Elected), 3 * candidates * TTL_S)
            return now() - began

    async def crowd(stack: AsyncExitStack, kind: str) -> list[tuple[asyncio.Task[None], Faults]]:
        tasks = []
        for number in range(candidates):
            faults = Faults()
            task = asyncio.create_task(candidate(faults, f"{kind}-{number}"))
            stack.push_async_callback(end, task, faults)
            tasks.append((task, faults))
        return tasks

    async def candidate(faults: Faults, name: str) -> None:
        async with place.session(faults) as session:
            async for campaign in session.campaigns("e", name=name):
                async with campaign:
                    await asyncio.sleep(1e6)

    async def end(task: asyncio.Task[None], faults: Faults) -> None:
        task.cancel()
        await asyncio.wait({task})

    return run_virtual(whole(), clock=place.clock)


CROWDS = [1, 6, 50]


@pytest.mark.parametrize("candidates", CROWDS)
def test_candidates_that_survive_an_outage_wait_for_no_expiry(candidates: int) -> None:
    """Each gives back its own lost lease, and with it its old ticket, when the store returns."""
    assert recovery_s(RestartedServer, candidates, killed=False) < TTL_S / 2


@pytest.mark.parametrize("candidates", CROWDS)
def test_after_an_outage_one_ttl_and_a_handover_are_enough(candidates: int) -> None:
    """The tickets of killed processes are nobody's to give back: they expire, all together."""
    assert TTL_S <= recovery_s(RestartedServer, candidates, killed=True) <= WORST_S


def test_judging_stale_tickets_one_after_the_other_is_caught() -> None:
    assert recovery_s(SerialServer, 1, killed=True) <= WORST_S
    assert recovery_s(SerialServer, 6, killed=True) > 5 * TTL_S
    # Those who live give theirs back, and need no judge.
    assert recovery_s(SerialServer, 6, killed=False) < TTL_S / 2
