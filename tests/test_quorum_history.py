"""A quorum of real processes, hurt under load: what its clients received could have come from one
machine that never fails.

Judged alike after every trial (see `history`): every answer has its place in one order, nothing
that was acknowledged is lost, nothing was done twice, nothing read was out of date. The long forms
are in test_quorum_history_chaos. That the judge finds what it should is seen on histories made by
hand, and on nodes that are broken on purpose.
"""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from history import NO, OK, UNKNOWN, History, Request, flaws
from trials import Trial


def test_nodes_are_killed_and_frozen(tmp_path: Path) -> None:
    with Trial(tmp_path) as trial:
        trial.progress()
        for hurt in ("kill", "freeze"):
            leader = trial.leader()
            getattr(leader, hurt)()
            trial.leader(after=leader.generation)
            trial.progress()
            trial.mend(leader)
            follower = trial.followers()[0]
            getattr(follower, hurt)()
            trial.progress()
            trial.mend(follower)
        found = trial.judge()
    assert found.count("replace") > 50
    assert found.count("swap") > 50


def test_links_are_cut(tmp_path: Path) -> None:
    """The leader from the others; its words to them; theirs to it; and one of them from it, so that
    the third sees both. The clients reach everybody."""
    with Trial(tmp_path, lan=True) as trial:
        assert trial.lan is not None
        names = {*trial.nodes}
        for how in ("off", "dumb", "deaf"):
            leader = trial.leader()
            others = names - {leader.name}
            if how in ("off", "dumb"):
                trial.lan.cut(leader.name, others)
            if how in ("off", "deaf"):
                trial.lan.cut(others, leader.name)
            trial.leader(*others, after=leader.generation)
            trial.progress(50)
            trial.lan.heal()
        leader, other = trial.leader(), trial.followers()[0]
        trial.lan.part([leader.name], [other.name])
        trial.progress()
        trial.judge()


@pytest.mark.chaos
def test_the_checker_detects_acknowledged_writes_on_no_disk(tmp_path: Path) -> None:
    """Nodes that acknowledge what they have not written, and are killed before they have."""
    with Trial(tmp_path, mutant="AcknowledgesFromMemory") as trial:
        trial.progress(50)
        for name in trial.nodes:
            trial.slow_disk(name, 1.0)
        trial.progress(50)
        for node in trial.nodes.values():
            node.kill()
        for name, node in trial.nodes.items():
            trial.slow_disk(name, 0.0)
            node.restart()
        with pytest.raises(AssertionError, match=r"no order explains|acknowledged at"):
            trial.judge()


class Book:
    """A history made by hand: every request begins and ends at the next tick, unless told
    otherwise."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self._tick = 0

    def add(self, what: str, *, took: int = 1, how: str = OK, **more: object) -> None:
        self._tick += 2
        ended = inf if how == UNKNOWN else self._tick + took
        number = len(self.requests)
        request = Request(number, number, what, "h/1/0", self._tick, how=how, ended=ended)
        for name, value in more.items():
            setattr(request, name, value)
        self.requests.append(request)

    def replace(self, before: int | None, value: int, **more: object) -> None:
        self.add("replace", before=before, value=value, **{"result": before, **more})  # type: ignore[arg-type]

    def swap(self, place: int, value: int, before: int | None, **more: object) -> None:
        self.add("swap", place=place, value=value, result=before, **more)  # type: ignore[arg-type]

    def flaws(self, **ledgers: list[int]) -> str:
        return "\n".join(flaws(History(self.requests, ledgers)))


def test_the_checker_of_the_keyspace() -> None:
    good = Book()
    good.add("read", result=None)
    good.replace(None, 1)
    good.replace(1, 2, how=UNKNOWN)
    good.add("read", result=1)
    good.add("list", key="h/1", result={"h/1/0": 2})
    good.replace(1, 3, how=NO, result="refused")
    good.replace(2, 4, how=UNKNOWN)
    good.add("read", result=2)
    assert not good.flaws()

    stale = Book()
    stale.replace(None, 1)
    stale.replace(1, 2)
    stale.add("read", result=1)
    assert "no order explains" in stale.flaws()

    lost = Book()
    lost.replace(None, 1)
    lost.add("list", key="h", result={})
    assert "no order explains" in lost.flaws()

    twice = Book()
    twice.replace(None, 1)
    twice.replace(1, 2, took=10)
    twice.replace(1, 3, how=UNKNOWN)
    twice.add("read", result=3)
    assert "two requests replaced the same value" in twice.flaws()

    denied = Book()
    denied.replace(None, 1, how=NO, result=None)
    denied.add("read", result=1)
    assert "no order explains" in denied.flaws()

    refused = Book()
    refused.replace(None, 1)
    refused.replace(1, 2, how=NO, result="refused")
    refused.replace(1, 3)
    assert "refused without a reason" in refused.flaws()


def test_the_checker_of_the_ledger() -> None:
    good = Book()
    good.swap(1, 7, None)
    good.add("swap", value=8, how=UNKNOWN)
    good.add("look", place=1, result=7)
    good.add("look", place=2, result=8)
    good.add("swap", value=9, how=NO)
    assert not good.flaws(n1=[7, 8], n2=[7])

    lost = Book()
    lost.swap(1, 7, None)
    assert "acknowledged at 1, but is at None" in lost.flaws(n1=[])
    assert "differs from that of other nodes at 1" in lost.flaws(n1=[7], n2=[8])
    assert "more than once" in lost.flaws(n1=[7, 7])

    stale = Book()
    stale.swap(1, 7, None)
    stale.swap(2, 8, 7)
    stale.add("look", place=1, result=7)
    assert "does not explain" in stale.flaws(n1=[7, 8])

    denied = Book()
    denied.add("swap", value=7, how=NO)
    assert "reported as not executed" in denied.flaws(n1=[7])

    late = Book()
    late.swap(2, 7, 8)
    late.swap(1, 8, None)
    assert "does not explain" in late.flaws(n1=[8, 7])
