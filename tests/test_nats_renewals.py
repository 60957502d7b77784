"""The beginning of the stream of renewals shows every lease that was not renewed, and no other."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doyen.model import Lease
from doyen.stores.nats.jetstream import StoredMessage
from doyen.stores.nats.renewals import OldRenewals
from doyen.stores.nats.store import NatsStore
from model_nats import Consumer, Stored
from test_nats_adversary import NatsRoom, meets

TTL_S = 3.0
LEASES = "abcde"
DELETED = {"KV-Operation": "DEL"}

steps = st.lists(
    st.tuples(
        st.sampled_from(["renew", "renew", "renew", "end", "look", "read", "mark"]),
        st.sampled_from(LEASES),
    ),
    max_size=60,
)


class TrueStream:
    """The last message of each lease, as the server has it."""

    def __init__(self) -> None:
        self.last: dict[str, StoredMessage] = {}
        self.position = 0

    def write(self, lease: str, headers: dict[str, str]) -> None:
        self.position += 1
        self.last.pop(lease, None)
        self.last[lease] = StoredMessage(self.position, headers, b"")

    def next(self, start: int) -> tuple[str, StoredMessage] | None:
        return next((each for each in self.last.items() if each[1].sequence >= start), None)


def read_until(old: OldRenewals, stream: TrueStream, until: int) -> int:
    """As `NatsLeases` does. Returns the number of requests."""
    requests = 0
    position = old.next_to_read(0, until)
    while position is not None:
        requests += 1
        found = stream.next(position)
        if found is None or found[1].sequence > until:
            old.read(position, until + 1)
            return requests
        lease, message = found
        old.read(position, message.sequence + 1)
        old.found(lease, message)
        position = old.next_to_read(message.sequence, until)
    return requests


def check(script: list[tuple[str, str]]) -> None:
    stream, old, marked = TrueStream(), OldRenewals(0), 0
    for what, lease in script:
        match what:
            case "renew":
                last = stream.last.get(lease)
                if last is None or not last.deleted:  # a lease that has ended is never renewed
                    stream.write(lease, {})
            case "end":
                stream.write(lease, DELETED)
            case "look":
                old.found(lease, stream.last.get(lease))
            case "mark":
                marked = stream.position
            case "read":
                read_until(old, stream, marked)
                live = {n: each for n, each in stream.last.items() if not each.deleted}
                for name in old.known & live.keys():
                    last, seen = live[name], old.unchanged(name)
                    if last.sequence <= marked:
                        assert seen == last, "a lease that was not renewed is not seen"
                    elif seen is not None:
                        assert seen.sequence > marked, "a lease that was renewed seems not to be"


@settings(max_examples=300)
@given(steps)
def test_it_shows_the_leases_that_were_not_renewed(script: list[tuple[str, str]]) -> None:
    check(script)


def test_a_reader_that_does_not_come_back_to_old_renewals_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutant: what was read once is never read again."""

    def forward(self: OldRenewals, after: int, until: int) -> int | None:
        position = max(after, self._read_to) + 1
        return position if position <= until else None

    monkeypatch.setattr(OldRenewals, "next_to_read", forward)
    with pytest.raises(AssertionError, match="seems not to be"):
        check(
            [("renew", "a"), ("look", "a"), ("mark", "a"), ("read", "a"), ("renew", "a"),
             ("renew", "b"), ("look", "b"), ("renew", "b"), ("read", "a")]
        )  # fmt: skip


def test_many_leases_that_are_renewed_cost_one_request() -> None:
    stream, old = TrueStream(), OldRenewals(0)
    names = [f"lease-{number}" for number in range(1000)]
    for name in names:
        stream.write(name, {})
        old.found(name, stream.last[name])
    marked = stream.position
    for name in names:
        stream.write(name, {})
    assert read_until(old, stream, marked) == 1
    assert not any(map(old.unchanged, names))
    assert read_until(old, stream, marked) == 0


def test_clients_that_watch_each_other_cost_requests_in_proportion_to_their_number() -> None:
    async def test(room: NatsRoom) -> None:
        number, prefix = 30, "members/g"
        stores = [await room.open() for _ in range(number)]
        leases = [await store.grant(TTL_S) for store in stores]
        told = [asyncio.Event() for _ in stores]
        for each, (store, lease) in enumerate(zip(stores, leases, strict=True)):
            await store.create(f"{prefix}/{each}", b"", lease)
            await store.watch(prefix, told[each].set)

        async def renewing(store: NatsStore, lease: Lease) -> None:
            while True:
                await asyncio.sleep(TTL_S / 3)
                await store.renew(lease)

        pairs = zip(stores, leases, strict=True)
        tasks = [asyncio.ensure_future(renewing(*each)) for each in pairs]
        await asyncio.sleep(2 * TTL_S)
        for event in told:
            event.clear()
        room.model.requests.clear()
        await asyncio.sleep(2 * TTL_S)
        assert len(room.model.requests) / number / 2 <= 50, "per client and ttl"
        assert not any(each.is_set() for each in told)
        tasks[-1].cancel()  # the last of all entries
        began = room.clock.now()
        for event in told[:-1]:
            await event.wait()
        assert room.clock.now() - began <= 1.2 * TTL_S
        assert len(await stores[0].list(prefix)) == number - 1
        for task in tasks:
            task.cancel()

    meets(test)


def test_the_end_of_a_lease_looks_at_what_was_written_since_it_was_granted() -> None:
    """A warden has no copy of the bucket, which may be large."""

    async def test(room: NatsRoom) -> None:
        holder, warden = await room.open(), await room.open()
        old = await holder.grant(TTL_S)
        for each in range(100):
            await holder.create(f"other/{each}", b"", old)
        lease = await holder.grant(TTL_S)
        mine = await holder.create("elections/e", b"", lease)
        await holder.enqueue("lines/e", b"", lease)
        delivered: list[str] = []
        deliver = room.model._deliver

        def counting(consumer: Consumer, subject: str, stored: Stored, pending: int) -> None:
            if consumer.name not in known:
                delivered.append(subject)
            deliver(consumer, subject, stored, pending)

        known = {*room.model.streams["KV_doyen"].consumers}
        room.model._deliver = counting  # type: ignore[method-assign]
        await warden.end(holder.warrant(lease))
        assert len(delivered) < 10
        bound = room.model.streams["KV_doyen"].messages.values()
        left = [each for each in bound if lease.id in each.headers.decode()]
        assert not left, "its entries are deleted"
        assert mine.won
        assert await warden.get("elections/e") is None
        assert len(await warden.list("other")) == 100
        await warden.end(b"0")  # of nobody

    meets(test)
