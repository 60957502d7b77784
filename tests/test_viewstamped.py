"""Viewstamped replication: views, logs, and what survives which crash."""

from __future__ import annotations

from typing import Any

import pytest

import mutants_viewstamped as mutants
from doyen.lab.plan import Fault, Latencies, Plan
from doyen.lab.world import run_plan
from doyen.quorum.consensus.common import Later
from doyen.quorum.consensus.core import (
    Elapsed,
    EntryKind,
    LogEntry,
    Membership,
    Persist,
    Persisted,
    Received,
    Recovered,
    Role,
)
from doyen.quorum.consensus.core import Send as Sending
from doyen.quorum.consensus.viewstamped import (
    STALE,
    DoViewChange,
    GetState,
    NewState,
    PrepareOk,
    StartView,
    StartViewChange,
    Viewstamped,
    ViewState,
)
from room import SETTINGS, Room, hear, sent

THREE = ("n0", "n1", "n2")


def entry(view: int) -> LogEntry:
    return LogEntry(view, EntryKind.COMMANDS, b"v%d" % view)


def one(
    name: str,
    state: ViewState | None = None,
    views: tuple[int, ...] = (),
    make: Any = Viewstamped,
    among: tuple[str, ...] = THREE,
) -> Any:
    return make(
        name,
        Membership(among),
        Recovered(state, None, tuple(entry(view) for view in views)),
        settings=SETTINGS,
        jitter=lambda: 0.5,
        now=0.0,
    )


def test_the_primary_is_the_view_modulo_the_servers() -> None:
    room = Room(Viewstamped, THREE)
    room.start()
    room.run(1.0)
    seen = []
    for _ in range(3):
        leader = room.leader() or ""
        view = room.cores[leader].generation
        seen.append(leader)
        assert leader == THREE[view % 3]
        room.crash(leader)
        room.run(2.0)
        room.start(leader)
        room.run(2.0)
    assert seen == ["n1", "n2", "n0"]


def test_a_view_whose_primary_is_gone_is_skipped() -> None:
    names = ("n0", "n1", "n2", "n3", "n4")
    room = Room(Viewstamped, names)
    room.start()
    room.run(1.0)
    assert room.leader() == "n1"
    room.crash("n2")
    room.crash("n1")
    room.run(0.3)
    assert room.leader() == "n3"


@pytest.mark.parametrize("make", [Viewstamped, mutants.LongestLogWins])
def test_a_view_begins_with_the_log_that_was_normal_last(make: Any) -> None:
    """23: a longer log of an earlier view holds nothing that was committed, and lacks what was."""
    core = one("n1", ViewState(3, 2), (1, 2), make)
    hear(core, "n0", DoViewChange(4, 1, 5))
    core.log.durable = core.log.token
    core._written()
    chosen = core._source or core.id
    assert chosen == ("n1" if make is Viewstamped else "n0")


@pytest.mark.parametrize("make", [Viewstamped, mutants.ForgetsView, mutants.ReportsBeforeWriting])
def test_a_view_is_entered_on_disk_before_it_is_reported(make: Any) -> None:
    core = one("n0", make=make)
    core._look()
    core._effects.clear()
    effects = hear(core, "n2", StartViewChange(1, False))
    persist = next(effect for effect in effects if isinstance(effect, Persist))
    report = next(
        e for e in effects if isinstance(e, Sending) and isinstance(e.message, DoViewChange)
    )
    kept = (persist.state, report.after) == (ViewState(1, 0), persist.token)
    assert kept == (make is Viewstamped)


def test_asking_for_a_view_binds_no_server() -> None:
    room = Room(Viewstamped, THREE)
    room.start("n0")
    room.run(20.0)
    assert (room.cores["n0"].generation, room.cores["n0"].wanted) == (0, 1)


def test_log_then_normal_view_then_acknowledgement() -> None:
    core = one("n0", ViewState(1, 1), (1, 1, 1))
    hear(core, "n2", StartView(2, 2, 2, 0))
    effects = hear(core, "n2", NewState(2, 1, 1, (entry(2),)))
    assert sent(effects, GetState) == [GetState(2, 2)]
    more = hear(core, "n2", StartView(2, 2, 2, 0))
    writes = [e for e in effects + more if isinstance(e, Persist)]
    assert [(w.first, w.state) for w in writes] == [(2, None), (0, ViewState(2, 2))]
    ack = next(e for e in more if isinstance(e, Sending) and isinstance(e.message, PrepareOk))
    assert ack.after == writes[-1].token


@pytest.mark.parametrize("make", [Viewstamped, mutants.KeepsTheRest])
def test_nothing_uncommitted_of_an_earlier_view_survives(make: Any) -> None:
    """State transfer into a newer view: entries beyond its log are dropped."""
    core = one("n0", ViewState(1, 1), (1, 1, 1), make)
    hear(core, "n2", StartView(2, 1, 1, 0))
    assert (len(core.log) == 1) == (make is Viewstamped)


def test_a_primary_does_not_lead_on_after_a_restart() -> None:
    """What it prepared last may be committed, and missing on its own disk."""
    room = Room(Viewstamped, THREE)
    room.start()
    room.run(1.0)
    leader = room.leader() or ""
    view = room.cores[leader].generation
    room.disk_s = 10.0
    room.propose(b"x")
    room.disk_s = 5e-4
    room.run(0.05)
    others = [name for name in THREE if name != leader]
    assert room.data(others[0]) == [] or room.data(others[0]) == [b"x"]
    room.crash(leader)
    room.start(leader)
    room.run(3.0)
    assert room.settled()
    assert room.cores[leader].generation > view
    assert room.data(leader) == [b"x"]


@pytest.mark.parametrize("make", [Viewstamped, mutants.LeadsOnAfterRestart])
def test_reports_for_a_view_of_an_earlier_life_are_not_counted(make: Any) -> None:
    core = one("n1", ViewState(4, 2), (1, 2), make)
    hear(core, "n0", DoViewChange(4, 2, 2))
    hear(core, "n2", DoViewChange(4, 2, 2))
    assert bool(core._reports) == (make is not Viewstamped)


def test_a_view_that_was_led_and_given_up_is_not_led_again() -> None:
    core = one("n1")
    hear(core, "n0", DoViewChange(1, 0, 0))
    core.handle(Persisted(1), 0.0)
    core.handle(Persisted(2), 0.0)
    assert core.role is Role.LEADING
    core.handle(Elapsed(), 5.0)  # no answer for this long
    core.handle(Persisted(3), 5.0)  # its disk has completed the write meanwhile
    core.handle(Persisted(4), 5.0)
    assert (core.role, core.generation, core.wanted) == (Role.LOOKING, 1, 2)


def test_a_primary_that_asked_for_another_view_learns_who_has_entered_it() -> None:
    core = one("n1", among=("n0", "n1", "n2", "n3", "n4"))
    hear(core, "n0", DoViewChange(1, 0, 0))
    core.handle(Persisted(1), 0.0)
    hear(core, "n2", StartViewChange(2, False))
    assert (core.generation, core.wanted) == (1, 2)
    hear(core, "n3", DoViewChange(1, 0, 0))
    core.handle(Persisted(2), 0.0)
    assert core.role is Role.LEADING
    effects = hear(core, "n2", Later(2), now=0.9)
    assert core.leader is None
    assert StartViewChange(2, False) in sent(effects, StartViewChange)


def test_an_abandoned_view_does_not_depose_the_primary() -> None:
    """The server that entered it failed at once. The primary goes on in the next view of its
    own."""
    room = Room(Viewstamped, THREE)
    room.start()
    room.run(2.0)
    leader = room.leader()
    assert leader is not None
    room.propose(b"x")
    room.run(0.5)
    other = next(name for name in THREE if name != leader)
    room.crash(other)
    entered = 40 * 3 + (THREE.index(leader) + 1) % 3
    room.states[other] = ViewState(entered, room.states[other].normal)
    room.start(other)
    room.run(1.0)
    assert room.leader() == leader
    assert room.cores[leader].generation > entered
    assert room.settled()
    assert [*map(room.data, THREE)] == [[b"x"]] * 3


def test_two_primaries_do_not_outbid_each_other_for_ever() -> None:
    """Messages take as long as the heartbeat interval: each hears of the other's view before it has
    committed anything in its own."""
    for seed in range(8):
        plan = Plan(
            protocol="viewstamped",
            nodes=5,
            seed=seed,
            for_s=20.0,
            clients=1,
            latencies=Latencies(latency_s=0.1, spread=0.1, fsync_s=0.003),
            election_timeout_s=1.0,
            heartbeat_s=0.1,
            faults=(Fault("pause", 17.1199, 1.2638, ("leader",)),),
        )
        assert run_plan(plan).ok


def test_a_crash_of_all_is_survived() -> None:
    """Where the diskless protocol waits for ever."""
    room = Room(Viewstamped, THREE)
    room.start()
    room.run(1.0)
    room.propose(b"x")
    room.run(0.5)
    room.crash(*THREE)
    room.run(5.0)
    room.start("n0", "n2")
    room.run(3.0)
    assert room.settled()
    assert room.data("n0") == [b"x"]


def test_a_server_with_a_live_primary_ignores_a_view_change() -> None:
    room = Room(Viewstamped, THREE)
    room.start()
    room.run(1.0)
    follower = next(name for name in THREE if name != room.leader())
    other = next(name for name in THREE if name not in (follower, room.leader()))
    assert room.tell(follower, Received(other, StartViewChange(9, False))) == []
    assert room.cores[follower].role is Role.FOLLOWING


@pytest.mark.parametrize(("stopped_s", "timer_first"), [(1.2, False), (6.0, False), (6.0, True)])
def test_what_a_server_hears_first_after_a_pause_does_not_count(
    stopped_s: float, timer_first: bool
) -> None:
    """Another server missed its primary during the pause, for a moment, and this has waited in the
    connection. A server that counted it would enter a later view alone and depose the primary."""
    core = one("n2")
    hear(core, "n1", StartView(1, 0, 0, 0), now=0.1)
    now = 0.1 + stopped_s
    if timer_first:
        core.handle(Elapsed(), now)
    hear(core, "n0", StartViewChange(2, False), now=now)
    hear(core, "n1", StartView(1, 0, 0, 0), now=now)
    assert (core.role, core.generation, core.leader) == (Role.FOLLOWING, 1, "n1")


def test_what_others_want_counts_in_a_silence() -> None:
    """Nothing is handled for as long when the primary's machine has died."""
    core = one("n2")
    hear(core, "n1", StartView(1, 0, 0, 0), now=0.1)
    core.handle(Elapsed(), core.next_deadline)
    hear(core, "n0", StartViewChange(2, True), now=core._now)
    assert core.generation == 2, "its own timer was in time"
    core = one("n2")
    hear(core, "n1", StartView(1, 0, 0, 0), now=0.1)
    hear(core, "n0", StartViewChange(2, False), now=1.2)
    assert core.generation == 1
    hear(core, "n0", StartViewChange(2, False), now=1.21 + SETTINGS.heartbeat_s)
    assert core.generation == 2, "it was repeated"


def test_what_servers_wanted_before_they_found_their_primary_again_does_not_count() -> None:
    """A server that is cut off would enter a later view alone, and when it is
    connected again, the primary of the others would give up its view."""
    core = one("n0", among=("n0", "n1", "n2", "n3", "n4"))
    core.handle(Elapsed(), 0.0)
    hear(core, "n3", StartViewChange(1, True), now=0.01)
    late = 0.02 + STALE * SETTINGS.heartbeat_s
    while core.next_deadline < late:
        core.handle(Elapsed(), core.next_deadline)
    hear(core, "n4", StartViewChange(1, True), now=late)
    assert (core.wanted, core.generation) == (1, 0)
    hear(core, "n3", StartViewChange(1, True), now=late)
    assert core.generation == 1
