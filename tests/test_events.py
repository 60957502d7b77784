"""Events reach every sink in order, and a slow or failing sink never delays the session.

The handling of full queues is tested in virtual time. That a stuck sink does not delay others is
tested with threads.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doyen import LeadershipLost, NotElected, Session
from doyen.audit import verify
from doyen.election.core import SessionCore
from doyen.election.options import SessionSettings
from doyen.events import (
    Elected,
    Event,
    Gap,
    Hindered,
    LeaseLost,
    Lost,
    Record,
    Renewed,
    Resigned,
    Sink,
    Unsure,
    Waiting,
    merge_gap,
)
from doyen.events import telemetry as telemetry_module
from doyen.events.telemetry import (
    AWAIT_S,
    Backlog,
    DeliveryQueue,
    DirectOutlet,
    Outlet,
    Telemetry,
    WaitAllowance,
)
from doyen.lease.clock import SystemClock, VirtualClock
from doyen.lease.runtime import InlineRuntime
from doyen.model import leader_key
from doyen.stores.memory import MemoryStore
from doyen.stores.port import Context
from doyen.testing import Faults
from doyen.testing.faults import Odds
from support import Place, until, until_blocking, virtual

ELECTED = Elected(election="billing", name="server1", token=7, lease="l", valid_until=5.0)


def test_events_are_stamped_and_handed_on_in_order() -> None:
    clock = VirtualClock(wall=1e9)
    first: list[Record] = []
    second: list[Record] = []
    telemetry = Telemetry(clock, "s1", [first.append, second.append])
    telemetry.emit(ELECTED)
    clock.advance(2.0)
    telemetry.emit(Renewed(lease="l", valid_until=7.0))
    assert first == second
    assert [record.event.kind for record in first] == ["elected", "renewed"]
    assert first[1] == Record(Renewed(lease="l", valid_until=7.0), 2.0, 1e9 + 2, "s1", os.getpid())


def test_a_record_is_the_event_with_its_kind() -> None:
    assert Record(ELECTED, 0.0, 0.0, "s", 1).fields() == {
        "event": "elected",
        "election": "billing",
        "election_kind": "elections",
        "name": "server1",
        "token": 7,
        "lease": "l",
        "valid_until": 5.0,
    }


def test_a_sink_that_raises_is_reported_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_record: Record) -> None:
        raise RuntimeError("no")

    reached: list[Record] = []
    Telemetry(VirtualClock(), "s", [broken, reached.append]).emit(ELECTED)
    assert len(reached) == 1
    assert "event=sink_failed on=elected" in caplog.text
    assert "RuntimeError: no" in caplog.text


@pytest.mark.parametrize(
    ("event", "level", "words"),
    [
        (
            ELECTED,
            logging.INFO,
            "event=elected election=billing name=server1 token=7 lease=l"
            " valid_until=2001-09-09T01:46:45.000Z",
        ),
        (
            Renewed(lease="l", valid_until=7.0, took_s=0.002),
            logging.DEBUG,
            "event=lease_renewed lease=l valid_until=2001-09-09T01:46:47.000Z took_s=0.002",
        ),
        (
            Lost(election="e", name="a b", token=1, lease="l", reason='by "x"\n', ended_at=1.5),
            logging.WARNING,
            'event=leadership_lost election=e name="a b" token=1 lease=l'
            r' reason="by \"x\"\n" ended_at=2001-09-09T01:46:41.500Z',
        ),
        (
            Waiting(election="e", election_kind="locks", name="a", behind="b"),
            logging.DEBUG,
            "event=candidate_waiting election=e election_kind=locks name=a behind=b joined=False",
        ),
        (
            LeaseLost(lease="l", reason="", ended_at=-math.inf),
            logging.WARNING,
            'event=lease_lost lease=l reason="" ended_at=2001-09-09T01:46:40.000Z',
        ),
    ],
    ids=lambda value: value.kind if isinstance(value, Event) else "",
)
def test_every_event_is_a_line_in_the_log(
    caplog: pytest.LogCaptureFixture, event: Event, level: int, words: str
) -> None:
    """Values are quoted where needed, and times are wall-clock times."""
    caplog.set_level(logging.DEBUG, "doyen")
    Telemetry(VirtualClock(wall=1e9), "s").emit(event)
    (line,) = caplog.records
    assert (line.name, line.levelno) == ("doyen", level)
    assert line.getMessage() == words
    assert line.__dict__["doyen"].event is event


def test_a_planned_loss_is_not_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "doyen")
    lost = Lost(election="e", name="n", token=1, lease="l", reason="an order", ended_at=1.0)
    Telemetry(VirtualClock(), "s").emit(lost, planned=True)
    assert [line.levelno for line in caplog.records] == [logging.INFO]


@pytest.mark.parametrize("order", ["resign", "transfer", "preempt", "removal"])
@virtual
async def test_a_handover_that_was_ordered_is_not_a_warning(
    place: Place, caplog: pytest.LogCaptureFixture, order: str
) -> None:
    """An obeyed order is logged at level info. The removal of the leader record by another process
    is logged as a warning."""
    caplog.set_level(logging.INFO, "doyen")
    leader, other = await place.open(), await place.open()
    with pytest.raises(LeadershipLost):
        async with leader.campaign("e", name="a"):
            preempt = {"priority": 1, "preempt": True, "cooldown_s": 0.0}
            successor = asyncio.create_task(
                lead(other, "e", name="b", **(preempt if order == "preempt" else {}))
            )
            await asyncio.sleep(1.0)
            if order == "resign":
                asyncio.create_task(other.resign("e"))  # noqa: RUF006 - ends with the term
            elif order == "transfer":
                asyncio.create_task(other.transfer("e", to="b"))  # noqa: RUF006
            elif order == "removal":
                place.server.delete(leader_key("e"))
            await asyncio.sleep(100.0)
    await successor
    levels = {
        line.getMessage().split()[0]: line.levelno
        for line in caplog.records
        if line.getMessage().startswith("event=leadership_lost")
    }
    expected = logging.WARNING if order == "removal" else logging.INFO
    assert levels == {"event=leadership_lost": expected}


@virtual
async def test_an_outage_of_the_store_is_two_lines_in_the_log(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """The store refuses every request for three seconds: renewals fail, and so do two candidates.
    The log has one line for the beginning of the outage and one for its end."""
    faults = Faults(odds=Odds())
    session = await place.open(faults)
    async with session.campaign("led") as term:
        await asyncio.sleep(10.0)
        place.events.clear()
        faults.odds = Odds(refused=0.5, lost=0.5)  # with different errors
        candidates = [asyncio.ensure_future(lead(session, name)) for name in ("e", "f")]
        await asyncio.sleep(3.0)
        faults.odds = Odds()
        await asyncio.sleep(10.0)
        assert term.valid
        await asyncio.gather(*candidates)
    assert len(place.seen(Unsure, Hindered)) > 4
    lines = [line.getMessage() for line in caplog.records]
    assert len(lines) == 2, lines
    assert lines[0].startswith("event=store_unavailable ")
    assert lines[1].startswith("event=store_available after_s=")


@virtual
async def test_a_renewal_without_an_answer_says_how_long_it_waited(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    with pytest.raises(LeadershipLost):
        async with session.campaign("e"):
            faults.cut()
            await asyncio.Event().wait()
    errors = {event.error for event in place.seen(Unsure) if isinstance(event, Unsure)}
    assert errors == {"the store did not answer within 1 s"}


async def lead(session: Session, election: str, **options: Any) -> None:
    async with session.campaign(election, **options):
        pass


def test_failures_during_an_outage_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    telemetry = Telemetry(clock, "s")
    caplog.set_level(logging.DEBUG, "doyen")
    for error in ("refused", "no answer", "refused"):
        telemetry.emit(Unsure(lease="l", remaining_s=3.0, error=error))
        telemetry.emit(Hindered(election="e", name="n", error=error))
        clock.advance(1.0)
    telemetry.emit(Renewed(lease="l", valid_until=7.0))
    telemetry.emit(Waiting(election="e", name="n", behind="m"))
    warnings = [line.getMessage() for line in caplog.records if line.levelno > logging.DEBUG]
    assert warnings == [
        "event=store_unavailable lease=l remaining_s=3.0 error=refused",
        "event=store_available after_s=3.0",
    ]
    assert sum("error=" in line.getMessage() for line in caplog.records) == 6


def test_an_outage_lasts_while_a_candidate_is_hindered(caplog: pytest.LogCaptureFixture) -> None:
    """A candidate reports each error once, so the time of its last report says nothing. When it has
    left, the next success ends the outage: otherwise the next outage would not be reported."""
    clock = VirtualClock()
    telemetry = Telemetry(clock, "s")
    for _ in range(2):
        telemetry.emit(Hindered(election="e", name="n", error="refused"))
        for _ in range(20):
            clock.advance(2.0)
            telemetry.emit(Renewed(lease="l", valid_until=0.0))
        telemetry.left(election_kind="elections", election="e", name="n")
        telemetry.emit(Renewed(lease="l", valid_until=0.0))
    lines = [line.getMessage() for line in caplog.records]
    hindered = "event=store_unavailable election=e name=n error=refused"
    assert lines == [hindered, "event=store_available after_s=40.0"] * 2


@virtual
async def test_a_candidate_that_gave_up_does_not_prolong_an_outage(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    faults = Faults(odds=Odds())
    session = await place.open(faults)
    async with session.campaign("led"):
        for _ in range(2):
            faults.odds = Odds(refused=1.0)
            with pytest.raises(NotElected):
                await lead(session, "e", wait_s=1.0)
            faults.odds = Odds()
            await asyncio.sleep(10.0)
    names = [line.getMessage().split()[0] for line in caplog.records]
    assert names == ["event=store_unavailable", "event=store_available"] * 2


async def test_a_candidate_has_left_after_what_it_emitted(caplog: pytest.LogCaptureFixture) -> None:
    """Its events are delivered a moment later. If it counted as one that still fails, the outage
    would not end in the log, and the next one would not begin there."""
    telemetry = Telemetry(SystemClock(), "s", threads=True)
    for _ in range(2):
        telemetry.emit(Hindered(election="e", name="n", error="refused"))
        telemetry.left(election_kind="elections", election="e", name="n")
        telemetry.emit(Renewed(lease="l", valid_until=0.0))
    await telemetry.close()
    names = [line.getMessage().split()[0] for line in caplog.records]
    assert names == ["event=store_unavailable", "event=store_available"] * 2


def test_annotations_may_be_evaluated() -> None:
    """As those of a module without the future import are."""
    annotations = {"log_name": ClassVar[str], "number": int}
    kind = type("Counted", (Event,), {"__annotations__": annotations})
    assert repr(kind(number=1)) == "Counted(number=1)"
    with pytest.raises(TypeError, match="number"):
        kind()


def test_a_level_that_is_off_costs_no_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "doyen")
    Telemetry(VirtualClock(), "s").emit(ELECTED)
    assert not caplog.records


def numbered(number: int) -> Record:
    """The event emitted at time `number`."""
    return Record(Renewed(lease="l", valid_until=0.0), float(number), 1e9 + number, "s", 1)


@given(limit=st.integers(1, 5), steps=st.lists(st.booleans(), max_size=60))
def test_a_backlog_is_bounded_and_accounts_for_everything(limit: int, steps: list[bool]) -> None:
    """Every item is taken once and in order, or counted by a gap in its place."""
    backlog = Backlog(limit, merge_gap)
    put, out = 0, []
    for more in steps:
        if more:
            backlog.put(numbered(put))
            put += 1
        elif backlog:
            out.append(backlog.take())
        assert len(backlog) <= limit + 1
    while backlog:
        out.append(backlog.take())
    expected = 0
    for record in out:
        if isinstance(record.event, Gap):
            assert record.event.since == expected
            expected += record.event.missed
            assert record.at == expected - 1
        else:
            assert record.at == expected
            expected += 1
    assert expected == put


class SlowDisk(InlineRuntime):
    """A runtime whose sinks are slow in virtual time. It uses the same queue as the threads do."""

    def __init__(self, clock: VirtualClock, takes_s: Callable[[], float], limit: int) -> None:
        super().__init__(clock)
        self._takes_s = takes_s
        self._limit = limit

    def outlet(
        self, sink: Sink, name: str = "", finish: Callable[[], None] = lambda: None
    ) -> Outlet:
        return SlowOutlet(sink, self._takes_s, self._limit, finish)


class SlowOutlet(DirectOutlet):
    def __init__(
        self, sink: Sink, takes_s: Callable[[], float], limit: int, finish: Callable[[], None]
    ) -> None:
        self._sink, self._takes_s, self._finish = sink, takes_s, finish
        self._backlog = Backlog(limit, merge_gap)
        self._some = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        while True:
            await self._some.wait()
            while self._backlog:
                await asyncio.sleep(self._takes_s())
                self._sink(self._backlog.take())
            self._some.clear()

    def put(self, record: Record) -> None:
        self._backlog.put(record)
        self._some.set()

    def flush(self, within_s: float) -> bool:
        return not self._backlog

    async def close(self, within_s: float) -> None:
        while self._backlog:
            self._sink(self._backlog.take())
        self._task.cancel()
        self._finish()


@virtual
async def test_a_disk_that_stalls_costs_no_lease_and_leaves_a_gap(
    place: Place, tmp_path: Path
) -> None:
    """Writes to the disk take 100 s for a while. The leader keeps its lease, the log has a gap
    where events were dropped, and the verdict on the log is "incomplete"."""
    path, takes_s = tmp_path / "audit.jsonl", 0.0
    runtime = SlowDisk(place.clock, lambda: takes_s, limit=8)
    store = MemoryStore(place.server, Context(place.clock, lambda event: None))
    settings = SessionSettings(url="memory://", ttl_s=6.0, audit=path)
    async with Session(settings, runtime, store) as session, session.campaign("e") as term:
        await asyncio.sleep(10.0)
        takes_s = 100.0
        await asyncio.sleep(50.0)
        takes_s = 0.0
        await asyncio.sleep(100.0)
        assert term.valid
    events = [json.loads(line) for line in path.read_bytes().splitlines()]
    (gap,) = (event for event in events if event["event"] == "gap")
    renewals = [event for event in events if event["event"] == "renewed"]
    assert 10.0 < gap["since"] < gap["at"] < 120.0
    assert gap["missed"] > 20
    assert not [event for event in renewals if gap["since"] <= event["at"] <= gap["at"]]
    assert [event["at"] for event in events] == sorted(event["at"] for event in events)
    report = verify([path])
    assert report.verdict == "incomplete"
    assert report.missing == gap["missed"]


def reached(records: list[Record], count: int) -> bool:
    return len(records) == count


def test_one_stuck_sink_does_not_block_the_others() -> None:
    open_again = threading.Event()
    heard: list[Record] = []
    others: list[Record] = []

    def stuck(record: Record) -> None:
        open_again.wait(20.0)
        heard.append(record)

    def outlet(sink: Sink) -> Outlet:
        return DeliveryQueue(DirectOutlet(sink).put, merge=merge_gap, name="test-sink", limit=3)

    telemetry = Telemetry(SystemClock(), "s", [stuck, others.append], outlet=outlet)
    for emitted in range(1, 11):
        telemetry.emit(Renewed(lease="l", valid_until=0.0))
        until_blocking(partial(reached, others, emitted))
    assert not heard
    open_again.set()
    telemetry.flush(20.0)
    *kept, last = heard
    assert kept == others[: len(kept)]
    assert isinstance(last.event, Gap)
    assert len(kept) + last.event.missed == 10
    asyncio.run(telemetry.close())
    until_blocking(lambda: all(t.name != "test-sink" for t in threading.enumerate()))


def test_closing_waits_for_what_is_queued_and_not_for_ever(
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_go_on, heard, finished = threading.Event(), [], threading.Event()

    def slow(item: int) -> None:
        may_go_on.wait(20.0)
        heard.append(item)

    queued = DeliveryQueue(slow, merge=lambda _, item: item, name="test-sink", finish=finished.set)
    for item in range(3):
        queued.put(item)
    asyncio.run(queued.close(0.05))
    assert 'items=3 reason="delivery took longer than 0.05 s"' in caplog.text
    queued.put(3)
    may_go_on.set()
    assert finished.wait(20.0)
    assert heard == [0, 1, 2]


def test_an_awaited_event_is_written_before_its_emitter_goes_on() -> None:
    """This holds as long as the log keeps up. If a process were killed right after it deleted its
    leader record and before it recorded that it resigned, its term would seem to overlap with the
    next."""
    written: list[Record] = []
    resigned = Resigned(election="e", name="n", token=1, lease="l")
    gate = threading.Event()
    gate.set()

    def write(record: Record) -> None:
        gate.wait(20.0)
        written.append(record)

    audit = DeliveryQueue(DirectOutlet(write).put, merge=merge_gap, name="test-audit")
    clock = VirtualClock()
    telemetry = Telemetry(clock, "s", audit=audit)
    for number in range(1, 50):
        telemetry.emit(resigned)
        assert len(written) == number
    gate.clear()
    telemetry.emit(resigned)  # returns although the log is stuck
    assert len(written) == 49
    gate.set()
    asyncio.run(telemetry.close())
    assert len(written) == 50


class Spent(WaitAllowance):
    """An allowance of which nothing is left."""

    def flush(self, audit: Outlet) -> None:
        pass


@pytest.mark.parametrize("url", ["memory://", "sqlite://{path}/x.db"])
async def test_a_record_is_given_up_when_the_end_of_its_term_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """Also if the loop must not wait for the audit log any more: after many terms in a short time,
    say. A log that is stuck delays it for a moment only."""
    writing, may_go_on = threading.Event(), threading.Event()

    class StuckDisk(InlineRuntime):
        def outlet(
            self, sink: Sink, name: str = "", finish: Callable[[], None] = lambda: None
        ) -> Outlet:
            def write(record: Record) -> None:
                if isinstance(record.event, Resigned):
                    writing.set()
                    may_go_on.wait(20.0)

            return DeliveryQueue(write, merge=merge_gap, name="test-audit", finish=finish)

    runtime = StuckDisk(SystemClock())
    runtime.audit_wait = Spent(runtime.clock)
    settings = SessionSettings(url=url.format(path=tmp_path), ttl_s=6.0, audit=os.devnull)
    async with Session(settings, runtime) as session:
        monkeypatch.setattr(telemetry_module, "AWAIT_S", 60.0)
        leading = asyncio.ensure_future(lead(session, "e"))
        await until(writing.is_set)
        assert await session.leader("e") is not None
        assert not leading.done()
        may_go_on.set()
        await leading
        assert await session.leader("e") is None
        writing.clear()
        may_go_on.clear()
        monkeypatch.setattr(telemetry_module, "AWAIT_S", 0.001)
        await lead(session, "e")
        assert await session.leader("e") is None
        await until(writing.is_set)
        may_go_on.set()


def test_a_stuck_log_is_waited_for_within_an_allowance() -> None:
    clock, waits = VirtualClock(), []

    class Stuck(DirectOutlet):
        def flush(self, within_s: float) -> bool:
            waits.append(within_s)
            clock.advance(within_s)
            return False

    telemetry = Telemetry(clock, "s", audit=Stuck(lambda record: None))
    for _ in range(1000):
        telemetry.emit(ELECTED)
        clock.advance(0.001)
    assert sum(waits) < 0.1 * clock.now()


@virtual
async def test_sessions_that_share_a_loop_share_the_allowance(place: Place) -> None:
    """A stuck disk delays the loop no longer if many sessions have audit logs on it than if one
    has."""
    clock, waits = VirtualClock(), []

    class Stuck(DirectOutlet):
        def flush(self, within_s: float) -> bool:
            waits.append(within_s)
            clock.advance(within_s)
            return False

    class StuckDisk(InlineRuntime):
        def outlet(
            self, sink: Sink, name: str = "", finish: Callable[[], None] = lambda: None
        ) -> Outlet:
            return Stuck(sink, finish)

    runtime = StuckDisk(clock)
    settings = SessionSettings(url="memory://", ttl_s=6.0, audit=os.devnull)
    for _ in range(100):
        store = MemoryStore(place.server, Context(place.clock, lambda event: None))
        core = await SessionCore.open(settings, runtime, store=store)
        core.telemetry.emit(ELECTED)
        await core.close()
    assert sum(waits) < 2 * AWAIT_S


def test_a_sink_that_ends_its_thread_is_called_again() -> None:
    heard: list[int] = []

    def leaving(item: int) -> None:
        heard.append(item)
        raise SystemExit

    queued = DeliveryQueue(leaving, merge=lambda _, item: item, name="test-sink")
    queued.put(1)
    queued.put(2)
    assert queued.flush(20.0)
    assert heard == [1, 2]
    asyncio.run(queued.close(20.0))


def test_a_queue_may_be_closed_twice(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[int] = []
    queued = DeliveryQueue(heard.append, merge=lambda _, item: item, name="test-sink")
    queued.put(1)
    for _ in range(2):
        asyncio.run(queued.close(20.0))
    assert heard == [1]
    assert not caplog.records


def test_what_no_thread_could_be_started_for_is_kept(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    heard: list[int] = []
    late = DeliveryQueue(heard.append, merge=lambda _, item: item, name="test-sink")
    never = DeliveryQueue(heard.append, merge=lambda _, item: item, name="test-sink")
    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", refuse)
        late.put(1)
        never.put(3)
    late.put(2)
    for queued in (late, never):
        asyncio.run(queued.close(20.0))
    assert heard == [1, 2]
    assert 'queue=test-sink items=1 reason="no thread could be started' in caplog.text


def test_stuck_sinks_hold_up_the_end_of_the_process_once() -> None:
    """The waits for several stuck sinks at the end of the process do not add up."""
    program = (
        "import threading, time\n"
        "from doyen.events.telemetry import DeliveryQueue\n"
        "stuck = threading.Event()\n"
        "for _ in range(30):\n"
        "    DeliveryQueue(lambda _: stuck.wait(), merge=lambda _, item: item, name='x').put(1)\n"
    )
    began = SystemClock().now()
    subprocess.run([sys.executable, "-c", program], check=True, timeout=25)
    assert SystemClock().now() - began < 15.0


def test_the_last_events_of_a_process_are_delivered(tmp_path: Path) -> None:
    """Also those of its last moments, in a session that is neither closed nor released."""
    program = (
        "import sys, doyen\n"
        "out = open(sys.argv[1], 'w', buffering=1)\n"
        "session = doyen.connect_blocking('memory://exit', release_at_exit=False,"
        " on_event=lambda record: print(record.event.kind, file=out))\n"
        "with session.open().campaign('e'):\n"
        "    pass\n"
    )
    heard = tmp_path / "events"
    subprocess.run([sys.executable, "-c", program, heard], check=True, timeout=25)
    assert heard.read_text().split() == ["granted", "elected", "resigned"]


async def test_an_event_does_not_compete_with_what_is_urgent() -> None:
    """On a loop it is delivered a moment later, and before the next event of another thread. With
    an audit log it is delivered at once."""
    heard: list[Record] = []
    clock = SystemClock()
    telemetry = Telemetry(clock, "s", [heard.append], threads=True)
    before = clock.now()
    telemetry.emit(ELECTED)
    after = clock.now()
    assert not heard
    await asyncio.to_thread(telemetry.emit, Renewed(lease="l", valid_until=0.0))
    assert [record.event.kind for record in heard] == ["elected", "renewed"]
    assert before <= heard[0].at <= after
    telemetry.emit(ELECTED)
    telemetry.flush()
    assert len(heard) == 3
    telemetry.emit(ELECTED)
    await until(lambda: len(heard) == 4)
    telemetry.emit(ELECTED)
    await telemetry.close()
    assert len(heard) == 5
    audited = Telemetry(clock, "s", audit=DirectOutlet(heard.append), threads=True)
    audited.emit(ELECTED)
    assert len(heard) == 6


def test_events_of_several_threads_are_delivered_in_their_order() -> None:
    """The thread that delivers an event also delivers those that other threads emit meanwhile, so
    that no event overtakes another."""
    heard: list[str] = []
    began, goes_on = threading.Event(), threading.Event()

    def sink(record: Record) -> None:
        heard.append(record.event.kind)
        began.set()
        goes_on.wait(20.0)

    telemetry = Telemetry(SystemClock(), "s", [sink], threads=True)
    first = threading.Thread(target=telemetry.emit, args=(ELECTED,))
    first.start()
    assert began.wait(20.0)
    telemetry.emit(Renewed(lease="l", valid_until=0.0))  # returns although the sink is stuck
    telemetry.emit(LeaseLost(lease="l", reason="r", ended_at=0.0))
    assert heard == ["elected"]
    goes_on.set()
    first.join()
    assert heard == ["elected", "renewed", "leaselost"]


def test_an_event_is_delivered_although_the_loop_of_an_earlier_one_was_closed() -> None:
    heard: list[str] = []
    telemetry = Telemetry(
        SystemClock(), "s", [lambda each: heard.append(each.event.kind)], threads=True
    )

    async def emit() -> None:
        telemetry.emit(ELECTED)

    async def emit_and_wait() -> None:
        await emit()
        await until(lambda: len(heard) == 2)

    asyncio.run(emit())
    asyncio.run(emit_and_wait())
