"""NATS against a scripted server: interleavings and faults, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest

from adversary import Connection, Network, WireLoop, WireWorld, run_contest
from doyen.errors import LeaseGone, OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable
from doyen.events import Event, LeaseEnded
from doyen.lease.clock import VirtualClock
from doyen.model import Lease, leader_key, line_key, order_key
from doyen.stores.nats import jetstream as jetstream_module
from doyen.stores.nats.jetstream import WrongSequence
from doyen.stores.nats.store import NatsStore
from doyen.stores.nats.view import subject_of
from doyen.stores.port import Context, Creation, open_store
from doyen.testing.faults import Faults, LostCall, Odds
from model_nats import FAIR, PORT, NatsModel, build, headers_of
from swarm import SafetyViolated

TTL_S = 3.0
KEY = leader_key("e")
STREAM = "KV_doyen"


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server drops delete markers soon."""
    monkeypatch.setattr(jetstream_module, "MARKER_TTL", "1s")


class NatsRoom:
    """A server that makes no errors, and stores on it."""

    def __init__(self, model: NatsModel, network: Network, clock: VirtualClock) -> None:
        self.model = model
        self.network = network
        self.clock = clock
        self.faults = Faults()
        self.events: list[Event] = []
        self._stores: list[NatsStore] = []

    async def open(self, replicas: int = 1) -> NatsStore:
        context = Context(self.clock, self.events.append)
        url = f"nats://here:{PORT}/doyen?connect_timeout_s=1&replicas={replicas}"
        store = await open_store(url, context)
        assert isinstance(store, NatsStore)
        self._stores.append(store)
        return store

    def foreign(self, subject: str, value: bytes, headers: bytes = b"") -> None:
        """A write by another program."""
        self.model.write(STREAM, subject, headers, value)

    def end_connections(self, before: bytes = b"") -> None:
        for connection in list(self.model.connected):
            connection.send(before)
            connection.close()

    async def close(self) -> None:
        for store in self._stores:
            await store.close()


def meets(
    test: Callable[[NatsRoom], Coroutine[Any, Any, None]], kind: type[NatsModel] = NatsModel
) -> float:
    """Run a test against the model, and return the virtual time that it took."""
    clock = VirtualClock()
    network, loop = Network(), WireLoop(clock)
    loop.network = network
    took_s = 0.0

    async def main() -> None:
        nonlocal took_s
        room = NatsRoom(kind(clock.now), network, clock)
        await network.listen("here", PORT, room.model, room.faults)
        began = clock.now()
        try:
            await test(room)
            took_s = clock.now() - began
        finally:
            await room.close()
        await nothing_is_left(network)

    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())
    finally:
        network.close()
    return took_s


async def nothing_is_left(network: Network) -> None:
    """No connection and no task, once the heartbeats of the server's consumers have ended."""
    await asyncio.sleep(30)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [str(task) for task in left]
    assert not network._connections


async def until_gone(store: NatsStore) -> None:
    """Wait until the key has no entry."""
    changed = asyncio.Event()
    watch = await store.watch(KEY, changed.set)
    while await store.get(KEY) is not None:
        await changed.wait()
        changed.clear()
    watch.close()


async def old_write_new(
    self: NatsStore, key: str, value: bytes, headers: dict[str, str], lease: str | None
) -> int | None:
    """A broken variant: it takes any message for a delete marker."""
    while True:
        if lease is not None:
            self._leases.require(lease)
        if key in self._mirror.view.entries:
            await self._mirror.catch_up()
            if key in self._mirror.view.entries:
                return None
        last = self._mirror.view.markers.get(key, 0)
        try:
            return await self._jetstream.write(self._subject(key), value, last, headers)
        except WrongSequence:
            await self._mirror.catch_up()
            if self._mirror.view.markers.get(key, 0) == last:
                found = await self._jetstream.last(STREAM, self._subject(key))
                self._mirror.view.markers.pop(key, None)
                if found is not None:
                    self._mirror.view.markers[key] = found.sequence


def two_creations(found: list[Creation]) -> Callable[[NatsRoom], Coroutine[Any, Any, None]]:
    """The server has dropped a delete marker. Between the refusal of one creation and its read of
    the key, another creation succeeds."""

    async def test(room: NatsRoom) -> None:
        a, b = await room.open(), await room.open()
        mine, other = await a.grant(60), await b.grant(60)
        made = await a.create(KEY, b"before", mine)
        assert await a.delete(KEY, if_version=made.entry.version)
        await b._mirror.catch_up()
        await asyncio.sleep(1.1)
        look = b._jetstream.last
        creating: list[asyncio.Future[Creation]] = []

        async def meanwhile(stream: str, subject: str) -> Any:
            room.model.disturbance = replace(FAIR, late=1.0)
            if not creating:
                creating.append(asyncio.ensure_future(a.create(KEY, b"a", mine)))
                while subject not in room.model.streams[STREAM].messages:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            return await look(stream, subject)

        b._jetstream.last = meanwhile  # type: ignore[method-assign]
        second = await b.create(KEY, b"b", other)
        found.extend([await creating[0], second])

    return test


def test_a_live_record_is_never_taken_for_a_delete_marker(forgetful: None) -> None:
    creations: list[Creation] = []
    meets(two_creations(creations))
    assert [each.won for each in creations] == [True, False]
    assert creations[1].entry == creations[0].entry


def test_the_broken_variant_has_two_winners(
    forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NatsStore, "_write_new", old_write_new)
    creations: list[Creation] = []
    meets(two_creations(creations))
    assert [each.won for each in creations] == [True, True]


def test_a_marker_that_this_copy_has_dropped_is_written_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("doyen.stores.nats.view._MARKERS", 1)

    async def test(room: NatsRoom) -> None:
        store = await room.open()
        lease = await store.grant(TTL_S)
        for _ in range(2):
            for name in ("a", "b", "c"):
                made = await store.create(leader_key(name), b"", lease)
                assert made.won
                await store.delete(leader_key(name), if_version=made.entry.version)
        ended = await store.grant(TTL_S)
        assert (await store.create(KEY, b"void", ended)).won
        await store.revoke(ended)
        await asyncio.sleep(1)
        store._mirror.view.markers.clear()
        assert (await store.create(KEY, b"", lease)).won

    meets(test)


def test_a_copy_that_is_behind_takes_no_live_record_for_a_void_one() -> None:
    """The consumer of a new connection may be on a replica that lacks the latest messages, the
    record of a leader and its lease among them."""

    async def test(room: NatsRoom) -> None:
        b, a = await room.open(), await room.open()
        other, lease = await b.grant(60), await a.grant(60)
        made = await a.create(KEY, b"leader", lease)
        assert made.won
        room.model.disturbance = replace(FAIR, behind=1.0, behind_by=(2, 2), delay_s=5.0)
        room.end_connections()
        await asyncio.sleep(0.5)
        outcome: Creation | None = None
        while outcome is None:
            try:
                outcome = await b.create(KEY, b"b", other)
            except (OutcomeUnknown, StoreUnavailable):
                await asyncio.sleep(0.2)
        assert not outcome.won
        assert outcome.entry == made.entry

    meets(test)


def test_a_copy_that_is_behind_hides_no_entry_of_this_client() -> None:
    async def test(room: NatsRoom) -> None:
        store = await room.open()
        lease = await store.grant(60)
        made = await store.create(KEY, b"leader", lease)
        room.model.disturbance = replace(FAIR, behind=1.0, delay_s=5.0)
        room.end_connections()
        seen = 0
        for _ in range(50):
            try:
                assert await store.get(KEY) == made.entry
                seen += 1
            except (OutcomeUnknown, StoreUnavailable):
                pass
            await asyncio.sleep(0.2)
        assert seen > 10
        room.model.disturbance = FAIR
        await asyncio.sleep(5)
        await store.enqueue(line_key("e"), b"", lease)

    meets(test)


def test_a_copy_begins_anew_if_the_last_message_expires_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jetstream_module, "MARKER_TTL", "1s")

    async def test(room: NatsRoom) -> None:
        first = await room.open()
        lease = await first.grant(60)
        made = await first.create(KEY, b"leader", lease)
        await first.delete(KEY, if_version=made.entry.version)
        consume = room.model._consume

        def forgetting(connection: Connection, name: str, config: dict[str, Any]) -> dict[str, Any]:
            room.model.streams[name].messages.pop(subject_of("doyen", "entries", KEY), None)
            return consume(connection, name, config)

        room.model._consume = forgetting  # type: ignore[method-assign]
        store = await room.open()
        assert await store.get(KEY) is None

    assert meets(test) < 5


@pytest.mark.parametrize("whole", [True, False], ids=["bucket", "key"])
def test_what_an_operator_has_purged_can_be_deleted_by_its_holder(whole: bool) -> None:
    """Consumers are not notified of a purge, so copies still have the entry. After its holder has
    deleted it, it is gone from all copies."""

    async def test(room: NatsRoom) -> None:
        a, b = await room.open(), await room.open()
        lease, other = await a.grant(60), await b.grant(60)
        made = await a.create(KEY, b"leader", lease)
        messages = room.model.streams[STREAM].messages
        if whole:
            messages.clear()
        else:
            del messages[subject_of("doyen", "entries", KEY)]
        assert not (await b.create(KEY, b"", other)).won
        async with asyncio.timeout(5):
            await a.delete(KEY, if_version=made.entry.version)
            assert await a.get(KEY) is None
            assert await b.get(KEY) is None
            again = await b.create(KEY, b"", other)
        assert again.won
        assert again.entry.revision > made.entry.revision

    meets(test)


@pytest.mark.parametrize("noticed", [False, True])
def test_a_bucket_that_was_created_again_gives_out_no_tokens(noticed: bool) -> None:
    """Clients that have seen higher sequences refuse to write to it."""

    async def test(room: NatsRoom) -> None:
        store = await room.open()
        lease = await store.grant(60)
        for _ in range(10):
            made = await store.create(KEY, b"leader", lease)
            await store.delete(KEY, if_version=made.entry.version)
        room.model.delete(STREAM)
        new = await room.open()
        if noticed:
            await asyncio.sleep(5)
        with pytest.raises((StoreUnusable, LeaseGone)):
            await store.create(KEY, b"", lease)
        assert await new.get(KEY) is None
        with pytest.raises(StoreUnusable, match="token_floor"):
            await store.grant(60)
        lease = await new.grant(60)
        assert (await new.create(KEY, b"", lease)).won
        async with asyncio.timeout(5):
            while True:
                with contextlib.suppress(OutcomeUnknown, StoreUnavailable):
                    if await store.get(KEY) == await new.get(KEY):
                        break
                await asyncio.sleep(0.1)

    meets(test)


FOREIGN = [
    (subject_of("doyen", "leases", "stray"), b"abc", b""),
    (subject_of("doyen", "leases", "endless"), b"inf", b""),
    (subject_of("doyen", "leases", "nan"), b"nan", b""),
    ("$KV.doyen.leases", b"", b""),
    ("$KV.doyen.notes.mine", b"hello", b""),
    ("$KV.doyen.entries.elections.e.%6Ceader", b"an alias", b""),
    ("$KV.doyen.entries.elections.e.%6Ceader", b"", headers_of([("KV-Operation", "DEL")])),
    (subject_of("doyen", "entries", order_key("x")), b"\xff", b""),
    (subject_of("doyen", "entries", order_key("y")), b"", headers_of([("Doyen-Created", "?")])),
    (subject_of("doyen", "entries", order_key("z")), b"", headers_of([("Status", "100")])),
    (subject_of("doyen", "entries", order_key("z")), b"", b"NATS/1.0 \xff\xff\xff\r\n\r\n"),
]


@pytest.mark.parametrize("before", [True, False], ids=["copied", "followed"])
@pytest.mark.parametrize(("subject", "value", "headers"), FOREIGN)
def test_a_foreign_value_ends_nothing(
    subject: str, value: bytes, headers: bytes, before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(room: NatsRoom) -> None:
        a = await room.open()
        lease = await a.grant(TTL_S)
        made = await a.create(KEY, b"leader", lease)
        if before:
            room.foreign(subject, value, headers)
        b = await room.open()
        if not before:
            room.foreign(subject, value, headers)
        notified = asyncio.Event()
        await b.watch(KEY, notified.set)
        for _ in range(10):
            await asyncio.sleep(1)
            await a.renew(lease)
            assert await b.get(KEY) == made.entry
        notified.clear()
        await a.delete(KEY, if_version=made.entry.version)
        await notified.wait()
        assert (await b.create(KEY, b"", await b.grant(TTL_S))).won

    with caplog.at_level(logging.WARNING, "doyen.nats"):
        meets(test)
    logged = [record.getMessage() for record in caplog.records if record.name == "doyen.nats"]
    if ".entries.elections" not in subject or "%6C" in subject:
        assert len(logged) == 2, "once by each of two clients"
        assert all(subject in line for line in logged)


@pytest.mark.parametrize(("replicas", "ttls"), [(1, 1.9), (3, 1.0)])
def test_what_was_observed_counts_at_another_server_of_a_cluster(
    replicas: int, ttls: float
) -> None:
    """A server that holds the only replica may have lost renewals, so they are void there."""

    async def test(room: NatsRoom) -> None:
        dead, other = await room.open(replicas), await room.open(replicas)
        await dead.create(KEY, b"leader", await dead.grant(TTL_S))
        began = room.clock.now()
        gone = asyncio.ensure_future(until_gone(other))
        await asyncio.sleep(0.9 * TTL_S)
        room.end_connections()
        await gone
        assert ttls <= (room.clock.now() - began) / TTL_S < ttls + 0.3

    meets(test)


def test_a_live_lease_that_was_overwritten_has_not_ended() -> None:
    """Also for a client that connects later: it could lead as well if the record were void."""

    async def test(room: NatsRoom) -> None:
        a = await room.open()
        lease = await a.grant(TTL_S)
        made = await a.create(KEY, b"leader", lease)
        room.foreign(subject_of("doyen", "leases", lease.id), b"rubbish")
        b = await room.open()
        for _ in range(5):
            await asyncio.sleep(1)
            await a.renew(lease)
            assert await b.get(KEY) == made.entry
        await until_gone(b)  # the renewal shows the ttl

    assert 5 + TTL_S <= meets(test) <= 5 + 1.2 * TTL_S


def test_a_renewal_that_was_overwritten_or_lost_ends_no_lease_early() -> None:
    async def test(room: NatsRoom) -> None:
        a, b = await room.open(), await room.open()
        lease = await a.grant(TTL_S)
        made = await a.create(KEY, b"leader", lease)
        beats = room.model.streams["KV_doyen_beats"]
        room.model.write("KV_doyen_beats", f"$KV.doyen_beats.{lease.id}", b"", b"rubbish")
        assert await b.get(KEY) == made.entry
        await a.renew(lease)
        beats.messages.clear()
        began = room.clock.now()
        await until_gone(b)
        assert room.clock.now() - began >= TTL_S
        with pytest.raises(LeaseGone):
            await a.renew(lease)

    meets(test)


@pytest.mark.parametrize("before", [b"", b"-ERR 'User Authentication Expired'\r\n", b"?\r\n"])
def test_a_connection_that_the_server_ends_is_replaced(before: bytes) -> None:
    async def test(room: NatsRoom) -> None:
        store = await room.open()
        lease = await store.grant(TTL_S)
        notified = asyncio.Event()
        await store.watch(KEY, notified.set)
        for _ in range(5):
            room.end_connections(before)
            await asyncio.sleep(0)
            failures = 0
            while True:
                try:
                    await store.renew(lease)
                    assert await store.get(KEY) is None
                    break
                except (StoreUnavailable, OutcomeUnknown):
                    failures += 1
                    await asyncio.sleep(0.05)
            assert failures
            notified.clear()
            room.foreign(subject_of("doyen", "entries", KEY), b"news")
            await notified.wait()
            assert await store.delete(KEY)

    assert meets(test) < 5


def test_a_server_that_keeps_refusing_is_asked_at_growing_intervals() -> None:
    class Refusing(NatsModel):
        refusing = False
        attempts = 0

        async def serve(self, connection: Connection) -> None:
            if self.refusing:
                self.attempts += 1
                connection.send(b"-ERR 'Authorization Violation'\r\n")
                connection.close()
            else:
                await super().serve(connection)

    async def test(room: NatsRoom) -> None:
        model = room.model
        assert isinstance(model, Refusing)
        store = await room.open()
        lease = await store.grant(120)
        model.refusing = True
        room.end_connections()
        await asyncio.sleep(60)
        assert 60 < model.attempts <= 200
        with pytest.raises(StoreUnavailable):
            await store.renew(lease)
        model.refusing = False
        await asyncio.sleep(2)
        await store.renew(lease)

    meets(test, Refusing)


def test_opening_a_store_retries_a_connection_that_ends_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A server that is being stopped accepts a client and closes the connection."""
    accepted = 0
    connect = jetstream_module.NatsConnection.connect

    async def ends(client: Any, *args: Any, **options: Any) -> None:
        nonlocal accepted
        accepted += 1
        await connect(client, *args, **options)
        if accepted <= 2:
            await client.close()

    monkeypatch.setattr(jetstream_module.NatsConnection, "connect", ends)

    async def test(room: NatsRoom) -> None:
        store = await room.open()
        assert accepted == 4  # two that ended, and the two connections of a store
        await store.renew(await store.grant(TTL_S))

    assert meets(test) < 1


def test_a_new_bucket_of_renewals_does_not_end_another_lease() -> None:
    """A lease was found expired. Before it is ended, the bucket of renewals is deleted and created
    again, and the sequence that was seen now belongs to another lease's renewal."""

    async def test(room: NatsRoom) -> None:
        a, b = await room.open(), await room.open()
        over = await a.grant(TTL_S)
        assert (await a.create(KEY, b"a", over)).won
        assert await b.get(KEY) is not None
        await asyncio.sleep(1.2 * TTL_S)
        (row,) = await b._leases.look([over.id])
        assert b._leases.observer.judge(row).over
        room.model.delete(f"{STREAM}_beats")
        c = await room.open()
        live = await c.grant(60)
        assert c._leases._held[live.id] == row.counter
        await b._leases.expire(over.id, row.counter)
        assert not [event for event in room.events if isinstance(event, LeaseEnded)]
        await c.renew(live)
        assert (await c.create(line_key("e"), b"c", live)).won
        with pytest.raises(LeaseGone):  # the new bucket does not revive it either
            await a.renew(over)
        await asyncio.sleep(1.2 * TTL_S)
        await until_gone(b)
        assert [each.lease for each in room.events if isinstance(each, LeaseEnded)] == [over.id]

    meets(test)


Call = Callable[[NatsStore, Lease], Coroutine[Any, Any, Any]]
CALLS: dict[str, Call] = {
    "grant": lambda store, _: store.grant(TTL_S),
    "renew": lambda store, lease: store.renew(lease),
    "create": lambda store, lease: store.create(KEY, b"", lease),
    "enqueue": lambda store, lease: store.enqueue(line_key("e"), b"", lease),
    "put": lambda store, _: store.put(order_key("e"), b"", if_version=None),
    "get": lambda store, _: store.get(KEY),
    "list": lambda store, _: store.list(line_key("e")),
    "delete": lambda store, _: store.delete(KEY),
    "watch": lambda store, _: store.watch(KEY, lambda: None),
    "revoke": lambda store, lease: store.revoke(lease),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_on_a_silent_connection_ends(call: Call) -> None:
    """It fails within the time for responses, and later calls use another connection."""

    async def test(room: NatsRoom) -> None:
        store = await room.open()
        lease = await store.grant(60)
        for operation in ("STREAM", "write"):
            room.faults.next(operation, LostCall())
        with pytest.raises((StoreUnavailable, OutcomeUnknown)):
            await call(store, lease)
        room.faults._next.clear()
        async with asyncio.timeout(10):
            while True:
                try:
                    await store.get(KEY)
                    await store.grant(TTL_S)
                    break
                except StoreError:
                    await asyncio.sleep(0.2)

    assert meets(test) <= 2 * jetstream_module.RESPONSE_S + 10


@pytest.mark.parametrize("silent", [False, True], ids=["responding", "silent"])
def test_a_store_can_be_closed_at_every_moment(silent: bool) -> None:
    """Its opening or a call is cancelled after any number of turns of the loop, or the store is
    closed during a call. No task or connection is left, and nothing hangs."""

    async def life(room: NatsRoom) -> None:
        store = await room.open()
        try:
            lease = await store.grant(TTL_S)
            await store.watch(KEY, lambda: None)
            await store.create(KEY, b"", lease)
            await store.renew(lease)
            await store.revoke(lease)
        finally:
            await store.close()
            await store.close()

    async def test(room: NatsRoom) -> None:
        turns = 0
        while True:
            task = asyncio.get_running_loop().create_task(life(room))
            for _ in range(turns):
                await asyncio.sleep(0)
            if silent:
                room.faults.cut()
                await asyncio.sleep(0.1)
            ended = not task.cancel()
            async with asyncio.timeout(10):
                await asyncio.wait({task})
            assert ended or task.cancelled(), "a cancellation was lost"
            room.faults.heal()
            room.network.healed(room.faults)
            if ended:
                return
            turns += 1 if turns < 60 else 7

    meets(test)


@pytest.mark.parametrize("number", [5, 1_000, pytest.param(100_000, marks=pytest.mark.chaos)])
def test_the_sweep_ends_expired_leases_without_delaying_renewals(number: int) -> None:
    async def test(room: NatsRoom) -> None:
        first = await room.open()
        dead = [await first.grant(TTL_S)]
        await first.close()
        for each in range(number - 1):
            name = f"{each:032x}"
            room.foreign(subject_of("doyen", "leases", name), b"3.0")
            if each % 10:  # the others died before their first renewal
                room.model.write("KV_doyen_beats", f"$KV.doyen_beats.{name}", b"", b"3.0")
        store = await room.open()
        lease = await store.grant(TTL_S)
        assert len(store._mirror.view.leases) == len(dead) + number
        longest_s = 0.0
        while len(store._mirror.view.leases) > 1:
            began = room.clock.now()
            await store.renew(lease)
            longest_s = max(longest_s, room.clock.now() - began)
            await asyncio.sleep(TTL_S / 3)
        assert list(store._mirror.view.leases) == [lease.id]
        assert longest_s < 0.1
        ended = [event for event in room.events if isinstance(event, LeaseEnded)]
        assert len(ended) == number

    # The model responds in no time, so the pauses of the sweep are short.
    assert meets(test) <= TTL_S + 12 + number * 0.01


def test_the_sweep_sends_few_requests_while_no_lease_expires() -> None:
    async def test(room: NatsRoom) -> None:
        store, other = await room.open(), await room.open()
        leases = [await other.grant(60) for _ in range(50)]
        room.model.requests.clear()
        await asyncio.sleep(20)
        assert len(room.model.requests) <= 2 * 10 * 6
        assert set(store._mirror.view.leases) == {lease.id for lease in leases}

    meets(test)


class Outage(WireWorld):
    """An outage of the store: how long after it until a candidate is elected. With `wiped` the
    server comes back without its data."""

    def __init__(self, candidates: int, outage_s: float, *, wiped: bool = False) -> None:
        super().__init__(1, build(FAIR), url, ttl_s=TTL_S, odds=Odds())
        self.body_s = 1e6
        self.took_s = 0.0
        self._wiped = wiped
        self.watch_over(self._life(candidates, outage_s))

    async def _life(self, candidates: int, outage_s: float) -> None:
        for _ in range(candidates):
            self.start()
            await asyncio.sleep(0.05)
        await asyncio.sleep(5)
        self.network.stop()
        await asyncio.sleep(outage_s)
        if self._wiped:
            assert isinstance(self.model, NatsModel)
            self.model.streams.clear()
        self.oracle.somebody_leads.clear()
        self.network.start()
        began = self.clock.now()
        async with asyncio.timeout(20 * TTL_S):
            await self.oracle.somebody_leads.wait()
        self.took_s = self.clock.now() - began
        await self.end()
        await nothing_is_left(self.network)


def url(host: str) -> str:
    return f"nats://{host}:{PORT}/doyen?connect_timeout_s=1"


@pytest.mark.parametrize("candidates", [1, 2, 20])
def test_a_candidate_leads_within_a_ttl_after_an_outage(candidates: int) -> None:
    """Plus the time to reconnect, and for the first in line to create the record."""
    assert Outage(candidates, 20.0).took_s <= TTL_S + 1.5


def contest(seed: int) -> None:
    async def also(world: WireWorld) -> None:
        await world.end()
        await nothing_is_left(world.network)

    run_contest(seed, build(), url, also=also)


@pytest.mark.parametrize("seed", range(5))
def test_contest(seed: int, forgetful: None) -> None:
    contest(seed)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(100, 180))
def test_many_contests(seed: int, forgetful: None) -> None:
    contest(seed)


def race(seed: int, rounds: int = 20) -> None:
    """Three stores create the same key each time the server has dropped its delete marker, while
    responses and changes are late. The one that has created it holds it until it deletes it."""
    chance = random.Random(seed)
    held: dict[int, None] = {}
    tokens = [0]

    async def contend(store: NatsStore, lease: Lease) -> None:
        await asyncio.sleep(chance.uniform(0, 0.05))
        creation = await store.create(KEY, b"", lease)
        if not creation.won:
            return
        token = creation.entry.revision
        if held or token <= tokens[-1]:
            raise SafetyViolated(f"{token} was created while {list(held)} stood, after {tokens}")
        tokens.append(token)
        held[token] = None
        await asyncio.sleep(chance.uniform(0, 0.1))
        del held[token]
        if not await store.delete(KEY, if_version=creation.entry.version):
            raise SafetyViolated(f"{token} was overwritten while it stood")

    async def test(room: NatsRoom) -> None:
        stores = [await room.open() for _ in range(3)]
        leases = [await store.grant(3600) for store in stores]
        room.model.disturbance = replace(FAIR, late=0.5, delay_s=0.1)
        room.faults.odds = Odds(late=0.3, delay_s=0.03)
        for _ in range(rounds):
            async with asyncio.TaskGroup() as group:
                for store, lease in zip(stores, leases, strict=True):
                    group.create_task(contend(store, lease))
            await asyncio.sleep(1.1)
        room.faults.odds, room.model.disturbance = Odds(), FAIR
        assert len(tokens) > rounds

    try:
        meets(test)
    except* SafetyViolated as violations:
        raise violations.exceptions[0] from None


@pytest.mark.parametrize("seed", range(4))
def test_creations_over_dropped_markers(seed: int, forgetful: None) -> None:
    race(seed)


@pytest.mark.parametrize("seed", [2, 6, 7])
def test_the_race_finds_the_broken_variant(
    seed: int, forgetful: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(NatsStore, "_write_new", old_write_new)
    with pytest.raises(SafetyViolated):
        race(seed)
