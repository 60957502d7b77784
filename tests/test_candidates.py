"""Candidates that report by callbacks: who is told what and when, and that nobody else leads before
the work has been stopped."""

from __future__ import annotations

import asyncio
import random
import threading
from typing import Any

import pytest

import doyen
from doyen import Leader, Session, Term
from doyen.election.callbacks import CandidateTask
from doyen.errors import ConfigError, SessionClosed, StoreUnusable
from doyen.testing.faults import Faults
from support import Place, now, until, until_blocking, virtual


class Diary:
    """What callbacks were called with, in order."""

    def __init__(self, name: str = "a") -> None:
        self.name = name
        self.lines: list[str] = []
        self.terms: list[Term] = []

    def callbacks(self) -> dict[str, Any]:
        return {"on_elected": self.elected, "on_lost": self.lost, "on_new_leader": self.leader}

    def elected(self, term: Term) -> None:
        self.terms.append(term)
        self.lines.append("elected" if term.valid else "elected too late")

    def lost(self, term: Term) -> None:
        assert term is self.terms[-1]
        self.lines.append("lost" if term.reason else "resigning")

    def leader(self, leader: Leader) -> None:
        self.lines.append(f"{leader.name} leads")


@virtual
async def test_a_candidate_reports_by_callbacks(place: Place) -> None:
    session, other = await place.open(), await place.open()
    diary = Diary()
    async with session.candidate("e", name="a", **diary.callbacks()) as candidate:
        await until(lambda: candidate.leads)
        assert candidate.term is diary.terms[0]
        await until(lambda: len(diary.lines) == 2)
        assert sorted(diary.lines) == ["a leads", "elected"]
        async with asyncio.TaskGroup() as group:
            group.create_task(follow(other))
            await until(lambda: place.line() == ["a", "b"])
            await session.resign("e")
            assert not candidate.leads
        await until(lambda: candidate.leads and len(diary.lines) == 6)
        assert diary.lines[2:] == ["lost", "b leads", "elected", "a leads"]
    assert diary.lines[6:] == ["resigning"]
    assert place.holder() is None
    assert not candidate.leads


async def follow(session: Session) -> None:
    async with session.campaign("e", name="b"):
        await asyncio.sleep(1.0)


@virtual
async def test_callbacks_may_be_coroutine_functions(place: Place) -> None:
    """The one for the election is cancelled by the loss; the work stops before another leads."""
    session, other = await place.open(), await place.open()
    said: list[str] = []

    async def work(term: Term) -> None:
        try:
            await asyncio.sleep(1000.0)
        except asyncio.CancelledError:
            said.append("cancelled")
            raise

    async def stop(term: Term) -> None:
        await asyncio.sleep(0.5)
        said.append(f"stopped while {place.holder()} has the record")

    candidate = await session.candidate("e", name="a", on_elected=work, on_lost=stop).open()
    await until(lambda: candidate.leads)
    waiting = asyncio.ensure_future(follow(other))
    await until(lambda: place.line() == ["a", "b"])
    await session.resign("e")
    await waiting
    assert said == ["cancelled", "stopped while a has the record"]
    await candidate.close()
    assert said[2:] == ["cancelled", "stopped while a has the record"]


@virtual
async def test_closing_does_not_interrupt_the_stopping_of_the_work(place: Place) -> None:
    session = await place.open()
    said: list[str] = []

    async def stop(term: Term) -> None:
        said.append("stopping")
        await asyncio.sleep(0.5)
        said.append("stopped")

    candidate = await session.candidate("e", on_lost=stop).open()
    await until(lambda: candidate.leads)
    resigning = asyncio.ensure_future(session.resign("e"))
    await until(lambda: said)
    await candidate.close()
    assert said == ["stopping", "stopped"]
    await resigning
    await candidate.close()
    with pytest.raises(SessionClosed, match="opened once"):
        await candidate.open()


@virtual
async def test_a_callback_that_fails_is_logged(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """A leader whose start fails lets go, and tries again, more and more slowly."""
    session = await place.open()
    starts: list[float] = []

    def start(term: Term) -> None:
        starts.append(now())
        raise ValueError("no such port")

    def stop(term: Term) -> None:
        raise KeyError("was not started")

    async with session.candidate("e", on_elected=start, on_lost=stop):
        await until(lambda: len(starts) == 4)
    assert starts[3] - starts[2] > starts[1] - starts[0]
    failed = [each for each in caplog.records if "event=callback_failed" in each.getMessage()]
    assert {each.exc_info[0] for each in failed if each.exc_info} == {ValueError, KeyError}


@virtual
async def test_what_ends_a_candidate_is_logged_and_raised(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    session = await place.open()

    async def broken(*_: Any, rank: int) -> None:
        raise StoreUnusable("the tables are gone")

    monkeypatch.setattr(session._opened.store, "enqueue", broken)
    candidate = await session.candidate("e").open()
    await until(lambda: "event=candidate_failed" in caplog.text)
    with pytest.raises(StoreUnusable, match="the tables are gone"):
        await candidate.close()


@virtual
async def test_a_session_that_is_closed_ends_its_candidates(place: Place) -> None:
    session = place.session()
    await session.open()
    diary = Diary()
    candidate = await session.candidate("e", **diary.callbacks()).open()
    await until(lambda: candidate.leads)
    await session.close()
    await until(lambda: diary.lines[-1] == "lost")
    await candidate.close()
    with pytest.raises(SessionClosed):
        session.candidate("e")


@virtual
async def test_wrong_callbacks_are_refused(place: Place) -> None:
    session = await place.open()
    wrong: Any = "start"
    with pytest.raises(ConfigError, match="on_elected is a function"):
        session.candidate("e", on_elected=wrong)
    with pytest.raises(ConfigError, match="recipe"):
        session.candidate("e", recipe=wrong)


class Watch:
    """Which candidates work at present: between `on_elected` and the end of `on_lost`."""

    def __init__(self) -> None:
        self.working: set[str] = set()
        self.violations: list[str] = []
        self.terms = 0

    def begin(self, name: str) -> None:
        if self.working:
            self.violations.append(f"{name} begins while {self.working} work")
        self.working.add(name)
        self.terms += 1

    async def end(self, name: str) -> None:
        await asyncio.sleep(0.5)  # within the stop budget of 1 s
        self.working.discard(name)


async def trouble(place: Place, seed: int) -> int:
    """Candidates whose terms end by orders, lost leases and partitions. Returns how many terms."""
    chance, watch = random.Random(seed), Watch()
    faults = [Faults(seed=seed + number) for number in range(3)]
    sessions = [await place.open(each) for each in faults]
    candidates: list[CandidateTask] = []
    for name, session in zip("abc", sessions, strict=True):
        callbacks: dict[str, Any] = {
            "on_elected": lambda term, name=name: watch.begin(name),
            "on_lost": lambda term, name=name: watch.end(name),
        }
        candidates.append(await session.candidate("e", name=name, **callbacks).open())
    for _ in range(30):
        await asyncio.sleep(chance.uniform(0.0, 4.0))
        match chance.randrange(4):
            case 0:
                admin = await place.open()
                try:
                    await admin.resign("e", wait_s=1.0)
                except doyen.DoyenError:
                    pass
            case 1:
                cut = chance.choice(faults)
                cut.cut()
                asyncio.get_running_loop().call_later(chance.uniform(1.0, 12.0), cut.heal)
            case 2:
                index = chance.randrange(3)
                await candidates[index].close()
                name = "abc"[index]
                callbacks = {
                    "on_elected": lambda term, name=name: watch.begin(name),
                    "on_lost": lambda term, name=name: watch.end(name),
                }
                new = await sessions[index].candidate("e", name=name, **callbacks).open()
                candidates[index] = new
    for each in faults:
        each.heal()
    for candidate in candidates:
        await candidate.close()
    assert not watch.violations
    return watch.terms


@pytest.mark.parametrize("seed", range(4))
def test_nobody_leads_before_the_work_of_another_has_stopped(seed: int) -> None:
    @virtual
    async def test(place: Place) -> None:
        assert await trouble(place, seed) > 5

    test()


def test_stopping_after_the_term_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken rule: `on_lost` is called without waiting for it."""

    async def lead(self: Any, term: Term) -> None:
        self._term = term
        try:
            await self._call("on_elected", term)
            await asyncio.Event().wait()
        finally:
            asyncio.get_running_loop().create_task(self._call("on_lost", term))
            self._term = None

    monkeypatch.setattr(CandidateTask, "_lead", lead)

    @virtual
    async def test(place: Place) -> None:
        await trouble(place, 0)

    with pytest.raises(AssertionError, match=r"begins while .* work"):
        test()


def test_a_thread_reports_by_callbacks() -> None:
    diary, url = Diary(), "memory://candidate-thread"
    with doyen.connect_blocking(url) as session, doyen.connect_blocking(url) as other:
        with session.candidate("e", name="a", **diary.callbacks()) as candidate:
            until_blocking(lambda: candidate.leads)
            until_blocking(lambda: len(diary.lines) == 2)
            assert sorted(diary.lines) == ["a leads", "elected"]
            with other.candidate("e", name="b") as second:
                until_blocking(lambda: len(session.line("e")) == 2)
                session.resign("e")
                until_blocking(lambda: second.leads)
            until_blocking(lambda: candidate.leads)
            until_blocking(lambda: len(diary.lines) == 6)
            assert [each for each in diary.lines[2:] if "leads" not in each] == ["lost", "elected"]
        assert diary.lines[6:] == ["resigning"]
        waiting = session.candidate("e", name="c")
        with other.campaign("e"):
            waiting.open()
            until_blocking(lambda: len(session.line("e")) == 2)
            waiting.close()  # while it waits
            until_blocking(lambda: len(session.line("e")) == 1)
        assert session.leader("e") is None
        with pytest.raises(SessionClosed, match="opened once"):
            waiting.open()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith(("doyen", "candidate-"))]


def test_a_thread_may_close_its_own_candidate(caplog: pytest.LogCaptureFixture) -> None:
    with doyen.connect_blocking("memory://candidate-own") as session:
        candidates: list[Any] = []
        candidate = session.candidate("e", on_elected=lambda term: candidates[0].close())
        candidates.append(candidate)
        candidate.open()
        until_blocking(lambda: candidate.term is None and candidate._closing.is_set())
        candidate.close()
        assert session.leader("e") is None


def test_a_thread_whose_callback_fails_lets_go(caplog: pytest.LogCaptureFixture) -> None:
    starts: list[Term] = []

    def start(term: Term) -> None:
        starts.append(term)
        raise ValueError("no such port")

    with (
        doyen.connect_blocking("memory://candidate-fails") as session,
        session.candidate("e", on_elected=start),
    ):
        until_blocking(lambda: len(starts) == 2)
    assert "event=callback_failed" in caplog.text
    assert "no such port" in caplog.text


def test_a_thread_that_pauses_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause after a body that ended at once grows to several seconds."""
    monkeypatch.setattr("doyen.election.scopes.FIRST_PAUSE_S", 60.0)
    monkeypatch.setattr("doyen.election.scopes.LONGEST_PAUSE_S", 60.0)
    ended = threading.Event()

    def start(term: Term) -> None:
        raise ValueError("no such port")

    with doyen.connect_blocking("memory://candidate-pauses") as session:
        candidate = session.candidate("e", on_elected=start, on_lost=lambda term: ended.set())
        candidate.open()
        assert ended.wait(10.0)
        closing = threading.Thread(target=candidate.close)
        closing.start()
        closing.join(30.0)
        assert not closing.is_alive()


def test_a_thread_keeps_few_leaders_for_a_slow_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    delivered, go_on = threading.Event(), threading.Event()
    seen: list[int] = []

    async def observe(core: object, election: str, kind: str, deliver: Any) -> None:
        for token in range(1, 1001):
            deliver(Leader(election, "a", token, {}, "elections"))
        delivered.set()
        await asyncio.Event().wait()

    def slow(leader: Leader) -> None:
        go_on.wait(10.0)
        seen.append(leader.token)

    monkeypatch.setattr("doyen.election.callbacks.observe_leader", observe)
    with (
        doyen.connect_blocking("memory://candidate-slow") as session,
        session.candidate("e", on_new_leader=slow) as candidate,
    ):
        assert delivered.wait(10.0)
        assert len(candidate._leaders) <= 64
        go_on.set()
        until_blocking(lambda: seen[-1:] == [1000])
        assert len(seen) <= 65
        assert seen == sorted(seen)


def test_a_blocking_session_has_no_loop_for_coroutine_functions() -> None:
    async def start(term: Term) -> None: ...

    with (
        doyen.connect_blocking("memory://candidate-async") as session,
        pytest.raises(ConfigError, match="give it an ordinary function"),
    ):
        session.candidate("e", on_elected=start)


@virtual
async def test_who_waits_for_the_closing_can_be_cancelled(place: Place) -> None:
    """The work is stopped all the same, and the cancellation arrives after that."""
    session = await place.open()
    said: list[str] = []

    async def stop(term: Term) -> None:
        said.append("stopping")
        await asyncio.sleep(0.5)
        said.append("stopped")

    candidate = await session.candidate("e", on_lost=stop).open()
    await until(lambda: candidate.leads)

    async def program() -> None:
        await candidate.close()
        said.append("went on")

    running = asyncio.ensure_future(program())
    await until(lambda: said)
    running.cancel()
    await asyncio.wait({running})
    assert running.cancelled()
    assert said == ["stopping", "stopped"]
    assert place.holder() is None


def test_a_thread_that_cannot_observe_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with doyen.connect_blocking("memory://candidate-blind") as session:

        async def broken(*_: Any) -> None:
            raise StoreUnusable("the tables are gone")

        monkeypatch.setattr("doyen.election.callbacks.observe_leader", broken)
        candidate = session.candidate("e", on_new_leader=print).open()
        until_blocking(lambda: "event=candidate_failed" in caplog.text)
        with pytest.raises(StoreUnusable, match="the tables are gone"):
            candidate.close()


@virtual
async def test_a_candidate_may_be_closed_by_its_own_callbacks(place: Place) -> None:
    session = await place.open()
    candidates: list[CandidateTask] = []

    async def close(term: Term) -> None:
        await candidates[-1].close()

    for callback in ("on_elected", "on_lost"):
        options: Any = {callback: close}
        candidates.append(await session.candidate("e", **options).open())
        if callback == "on_lost":
            await until(lambda: candidates[-1].leads)
            await session.resign("e")
        async with asyncio.timeout(60):
            await asyncio.wait(candidates[-1]._tasks)
        await candidates[-1].close()
        assert place.holder() is None
