"""Orders among real processes on the local store: killed, frozen, stubborn; judged by audit logs.

Run as a program, this file is one such process: a candidate that campaigns, or takes a lock, again
and again; or somebody who gives one order. It tells what happens, a JSON object a line, and a
candidate lets go when its standard input ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

import doyen
from doyen.audit import Report, verify
from doyen.election.leader import OVERRUN_EXIT_CODE
from doyen.events import Record
from doyen.lease.clock import SystemClock
from frozen import freeze

ELECTION = "e"
PATIENCE_S = 30.0
LONG_TTL_S = 60.0
"""Where nothing is to come about by the end of a lease."""
now = SystemClock().now

Line = dict[str, Any]


class Actor:
    """A process of its own."""

    def __init__(self, stage: Stage, role: str, who: str, options: dict[str, Any]) -> None:
        self.who = who
        self._stage = stage
        self.process = subprocess.Popen(
            [sys.executable, __file__, role, json.dumps({"who": who, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self._stage.hear({"who": self.who, **json.loads(line)})
        self._stage.hear({"who": self.who, "said": "ended", "code": self.process.wait()})

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def freeze(self) -> None:
        freeze(self.process.pid, self._stage.database)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.wait()

    def go(self) -> None:
        """Have one that waits for a word give its order."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def let_go(self) -> None:
        if self.process.poll() is None:
            self.thaw()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self) -> None:
        try:
            self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._reader.join()


class Stage:
    """Actors on one store, and all that they have said, in the order in which it was heard."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.database = folder / "doyen.db"
        self.url = f"sqlite://{self.database}"
        self.heard: list[Line] = []
        self._news = threading.Condition()
        self._actors: list[Actor] = []

    def hear(self, said: Line) -> None:
        with self._news:
            self.heard.append(said)
            self._news.notify_all()

    def join(self, who: str, *, waits: bool = True, **options: Any) -> Actor:
        """A candidate; it leads when this returns, or it `waits`."""
        actor = self._start("candidate", who, options)
        self.wait(who, "waiting" if waits else "entered")
        return actor

    def give(self, who: str, **order: Any) -> Actor:
        """Somebody gives an order."""
        return self._start("giver", who, order)

    def _start(self, role: str, who: str, options: dict[str, Any]) -> Actor:
        where = {"url": self.url, "audit": str(self.folder / f"{who}.audit")}
        actor = Actor(self, role, who, {**where, **options})
        self._actors.append(actor)
        return actor

    def seen(self, who: str, what: str) -> list[Line]:
        return [said for said in self.heard if (said["who"], said["said"]) == (who, what)]

    def wait(self, who: str, what: str, count: int = 1) -> Line:
        """Wait until it has said so, so many times."""
        self.until(lambda: len(self.seen(who, what)) >= count, f"{who} has not said {what}")
        return self.seen(who, what)[count - 1]

    def until(self, condition: Callable[[], object], otherwise: str) -> None:
        with self._news:
            assert self._news.wait_for(condition, PATIENCE_S), f"{otherwise}: {self.heard}"

    def outcome(self, giver: str) -> Line:
        """What came of an order."""
        return self.wait(giver, "outcome")

    def leader(self) -> str | None:
        with doyen.connect_blocking(self.url) as session:
            leader = session.leader(ELECTION)
        return leader.name if leader else None

    def led(self) -> list[str]:
        """Who has led, in order; whoever leads now has entered its body when this returns."""
        leader = self.leader()

        def entered() -> list[str]:
            return [said["who"] for said in self.heard if said["said"] == "entered"]

        self.until(lambda: entered()[-1:] == [leader], f"{leader} has not entered")
        return entered()

    def report(self) -> Report:
        """What the audit logs prove, once everybody has stopped."""
        for actor in self._actors:
            actor.let_go()
        for actor in self._actors:
            actor.close()
        return verify([path for path in self.folder.iterdir() if path.suffix == ".audit"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for actor in self._actors:
            if actor.process.poll() is None:
                actor.kill()
            actor.let_go()
            actor.close()


@pytest.fixture
def stage(tmp_path: Path) -> Any:
    with Stage(tmp_path) as stage:
        yield stage


def is_clean(report: Report) -> None:
    assert not report.violations, "\n".join(v.story for v in report.violations)


def test_an_order_to_a_frozen_leader_waits_for_its_lease(stage: Stage) -> None:
    ttl_s = 3.0
    a = stage.join("a", waits=False, ttl_s=ttl_s)
    stage.join("b", ttl_s=ttl_s)
    giver = stage.give("g", to=None, at_a_word=True)
    stage.wait("g", "ready")
    a.freeze()
    began = now()
    giver.go()
    assert stage.outcome("g")["leader"] == "a"
    entered = stage.wait("b", "entered")["at"]
    assert began + 0.3 < entered < began + 3 * ttl_s
    a.thaw()
    assert stage.wait("a", "left")["at"] > entered, "it was frozen, and could not stop before"
    stage.wait("a", "waiting")
    assert stage.leader() == "b"
    is_clean(stage.report())


def test_the_leader_is_killed_in_the_middle_of_a_transfer(stage: Stage) -> None:
    a = stage.join("a", waits=False, slow_s=60.0)
    stage.join("b")
    stage.join("c")
    stage.give("g", to="c")
    stage.wait("a", "lost")
    assert not stage.seen("a", "left"), "its body takes its time"
    assert stage.led() == ["a"], "and its record stands until then"
    a.kill()
    outcome = stage.outcome("g")
    assert outcome.get("leader") == "c" or "the line went on: 'b'" in outcome["error"]
    assert stage.led() in (["a", "b"], ["a", "c"])
    is_clean(stage.report())


@pytest.mark.parametrize("how", ["killed", "frozen"])
def test_the_successor_fails_in_the_middle_of_a_transfer(stage: Stage, how: str) -> None:
    """The leader has let go for it. The line goes on, in its order."""
    ttl_s = LONG_TTL_S if how == "killed" else 6.0
    stage.join("a", waits=False, slow_s=1.0, ttl_s=ttl_s)
    stage.join("b", ttl_s=ttl_s)
    successor = stage.join("c", ttl_s=ttl_s)
    stage.join("d", ttl_s=ttl_s)
    stage.give("g", to="c")
    stage.wait("a", "lost")
    if how == "killed":
        successor.kill()
    else:
        successor.freeze()
    assert "the line went on: 'b' leads" in stage.outcome("g")["error"]
    assert stage.led() == ["a", "b"]
    if how == "frozen":
        successor.thaw()
        stage.give("h", to="c")
        assert stage.outcome("h")["leader"] == "c"
    is_clean(stage.report())


def test_a_leader_goes_on_while_its_successor_is_not_ready(stage: Stage) -> None:
    stage.join("a", waits=False)
    successor = stage.join("b")
    successor.freeze()
    stage.give("g", to="b", wait_s=1.0)
    assert "did not confirm within 1 s that it is ready" in stage.outcome("g")["error"]
    assert not stage.seen("a", "lost")
    successor.thaw()
    stage.give("h", to="b")
    assert stage.outcome("h")["leader"] == "b"
    is_clean(stage.report())


def test_an_order_dies_with_its_giver(stage: Stage) -> None:
    """Its successor is frozen, so it lies there and keeps others from giving theirs."""
    stage.join("a", waits=False)
    stage.join("b")
    successor = stage.join("c")
    successor.freeze()
    giver = stage.give("g", to="c", wait_s=60.0)
    stage.wait("g", "granted")

    def under_way() -> bool:
        with doyen.connect_blocking(stage.url) as session:
            try:
                session.transfer(ELECTION, to="b", wait_s=0.0)
            except doyen.OrderFailed as error:
                return "is under way" in str(error)
        return False

    stage.until(under_way, "the order was not written")
    giver.kill()
    stage.give("h", to="b")
    assert stage.outcome("h")["leader"] == "b"
    assert stage.led() == ["a", "b"]
    is_clean(stage.report())


def test_two_givers_at_once(stage: Stage) -> None:
    stage.join("a", waits=False, slow_s=0.5)
    stage.join("b")
    stage.join("c")
    givers = [stage.give(who, to=to, at_a_word=True) for who, to in (("g", "b"), ("h", "c"))]
    for who in ("g", "h"):
        stage.wait(who, "ready")  # or one would be too late on a busy machine
    for giver in givers:
        giver.go()
    outcomes = [stage.outcome(giver) for giver in ("g", "h")]
    led = [outcome["leader"] for outcome in outcomes if "leader" in outcome]
    assert led, outcomes
    assert sorted(stage.led()) == ["a", *sorted(led)]
    for outcome in outcomes:
        assert "leader" in outcome or "is under way" in outcome["error"]
    is_clean(stage.report())


def test_a_frozen_holder_of_a_lock_is_succeeded_after_its_lease(stage: Stage) -> None:
    ttl_s = 3.0
    a = stage.join("a", waits=False, ttl_s=ttl_s, lock=True)
    stage.join("b", ttl_s=ttl_s, lock=True)
    a.freeze()
    began = now()
    entered = stage.wait("b", "entered")
    assert began + 0.3 < entered["at"] < began + 3 * ttl_s
    assert entered["token"] > stage.wait("a", "entered")["token"]
    a.thaw()
    stage.wait("a", "left")
    stage.wait("a", "waiting")
    is_clean(stage.report())


def test_preemption_across_processes(stage: Stage) -> None:
    """After the cooldown the favourite leads; when it has gone, the other one leads again."""
    cooldown_s = 0.5
    stage.join("low", waits=False, slow_s=0.2)
    since = stage.wait("low", "entered")["at"]
    favourite = stage.join("high", priority=5, preempt=True, cooldown_s=cooldown_s)
    entered = stage.wait("high", "entered")["at"]
    left = stage.wait("low", "left")["at"]
    assert since + cooldown_s < left < entered, "the old body has ended before the new one begins"
    stage.wait("low", "waiting")
    stage.join("equal", priority=5, preempt=True, cooldown_s=0.0)
    assert stage.led() == ["low", "high"]
    favourite.kill()
    stage.wait("equal", "entered")
    is_clean(stage.report())


def test_a_process_that_ignores_an_order_is_ended_if_it_asked_for_it(stage: Stage) -> None:
    """Its body swallows the cancellation. The stop budget passes; the process goes."""
    budget_s = 0.5
    a = stage.join("a", waits=False, stubborn=True, on_overrun="exit", stop_budget_s=budget_s)
    stage.join("b")
    stage.give("g", to=None)
    assert stage.outcome("g")["leader"] == "a"
    ended = stage.wait("a", "ended")
    assert ended["code"] == OVERRUN_EXIT_CODE
    assert a.process.returncode == OVERRUN_EXIT_CODE
    lost, overrun = stage.wait("a", "lost"), stage.wait("a", "overrun")
    assert overrun["at"] >= lost["at"] + budget_s - 0.01
    assert stage.wait("b", "entered")["at"] > overrun["at"]
    is_clean(stage.report())


def test_a_process_that_ignores_an_order_keeps_its_record(stage: Stage) -> None:
    """Nothing takes it from a live holder, and the giver gets an error."""
    a = stage.join("a", waits=False, stubborn=True, stop_budget_s=0.2)
    stage.join("b")
    stage.give("g", to=None, wait_s=1.0)
    assert "was ordered to give up" in stage.outcome("g")["error"]
    stage.wait("a", "overrun")
    assert stage.leader() == "a"
    assert stage.led() == ["a"]
    a.kill()
    stage.wait("b", "entered")
    is_clean(stage.report())


# The process


def emit(said: str, **fields: Any) -> None:
    os.write(1, (json.dumps({"said": said, "at": now(), **fields}) + "\n").encode())


def sink(record: Record) -> None:
    if record.event.kind in ("granted", "waiting", "lost", "overrun"):
        emit(record.event.kind)


async def body(term: doyen.Term, slow_s: float, stubborn: bool) -> None:
    emit("entered", token=term.token)
    try:
        while True:
            with contextlib.suppress(*[asyncio.CancelledError] * stubborn):
                await asyncio.sleep(3600)
    finally:
        await asyncio.sleep(slow_s)
        emit("left")


async def stand(
    session: doyen.Session, *, lock: bool, slow_s: float, stubborn: bool, **options: Any
) -> None:
    if not lock:
        async for campaign in session.campaigns(ELECTION, **options):
            async with campaign as term:
                await body(term, slow_s, stubborn)
    while True:
        with contextlib.suppress(doyen.LeadershipLost):
            async with session.lock(ELECTION, **options) as term:
                await body(term, slow_s, stubborn)


async def candidate(
    who: str,
    url: str,
    audit: str,
    ttl_s: float = LONG_TTL_S,
    stop_budget_s: float | None = None,
    slow_s: float = 0.0,
    stubborn: bool = False,
    lock: bool = False,
    **options: Any,
) -> None:
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, over.set)
    connection = doyen.connect(
        url, ttl_s=ttl_s, stop_budget_s=stop_budget_s, audit=audit, on_event=sink
    )
    async with connection as session:
        standing = asyncio.ensure_future(
            stand(session, lock=lock, slow_s=slow_s, stubborn=stubborn, name=who, **options)
        )
        waiting = asyncio.ensure_future(over.wait())
        await asyncio.wait({standing, waiting}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        standing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await standing


async def giver(
    who: str,
    url: str,
    audit: str,
    to: str | None,
    wait_s: float = PATIENCE_S,
    at_a_word: bool = False,
) -> None:
    async with doyen.connect(url, ttl_s=LONG_TTL_S, audit=audit, on_event=sink) as session:
        if at_a_word:
            emit("ready")
            await asyncio.to_thread(sys.stdin.readline)
        try:
            if to is None:
                leader = await session.resign(ELECTION, wait_s=wait_s)
            else:
                leader = await session.transfer(ELECTION, to=to, wait_s=wait_s)
        except doyen.OrderFailed as error:
            emit("outcome", error=str(error))
        else:
            emit("outcome", leader=leader.name)


if __name__ == "__main__":
    role = candidate if sys.argv[1] == "candidate" else giver
    asyncio.run(role(**json.loads(sys.argv[2])))
