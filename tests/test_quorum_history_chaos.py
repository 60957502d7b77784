"""The long forms of test_quorum_history: every way to hurt a quorum, again and again and at random.

Judged as there. A seed that fails is named by the test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import inf
from pathlib import Path

import pytest

from history import UNKNOWN
from trials import Member, Trial

pytestmark = pytest.mark.chaos


@pytest.mark.parametrize("size", [3, 5])
def test_nodes_are_killed_and_frozen_at_random(size: int, tmp_path: Path) -> None:
    """Never so many at a time that the others are no majority; then all at once."""
    chance = random.Random(size)
    with Trial(tmp_path, size) as trial:
        for _ in range(12):
            trial.progress(60)
            count = chance.randint(1, (size - 1) // 2)
            victims = chance.sample([*trial.nodes.values()], count)
            if (leader := trial.leader()) not in victims and chance.random() < 0.6:
                victims[0] = leader
            for victim in victims:
                victim.kill() if chance.random() < 0.5 else victim.freeze()
            trial.progress(60)
            for victim in victims:
                trial.mend(victim)
        for node in trial.nodes.values():
            node.kill()
        found = trial.judge()
    assert found.count("replace") > 300
    assert found.count("swap") > 300


def test_a_majority_is_away_for_a_while(tmp_path: Path) -> None:
    """What is asked then is not answered, or it is true."""
    with Trial(tmp_path) as trial:
        for hurt in ("kill", "freeze", "kill", "freeze"):
            trial.progress(60)
            leader, *others = trial.leader(), *trial.followers()
            for node in others if hurt == "kill" else (leader, others[0]):
                getattr(node, hurt)()
            trial.let_pass(3.0)
            for node in (leader, *others):
                trial.mend(node)
        trial.judge()


def sides(trial: Trial, chance: random.Random) -> tuple[list[str], list[str]]:
    names = [*trial.nodes]
    chance.shuffle(names)
    cut = chance.randint(1, (len(names) - 1) // 2)
    return names[:cut], names[cut:]


def apart(trial: Trial, chance: random.Random) -> None:
    """A minority from the rest."""
    assert trial.lan is not None
    trial.lan.part(*sides(trial, chance))


def one_way(trial: Trial, chance: random.Random) -> None:
    assert trial.lan is not None
    minority, rest = sides(trial, chance)
    way = (minority, rest) if chance.random() < 0.5 else (rest, minority)
    trial.lan.cut(*way)


def bridge(trial: Trial, chance: random.Random) -> None:
    """Two sides, and one in between who sees both."""
    assert trial.lan is not None
    names = [*trial.nodes]
    chance.shuffle(names)
    middle = len(names) // 2
    trial.lan.part(names[:middle], names[middle + 1 :])


def ring(trial: Trial, chance: random.Random) -> None:
    """Everybody sees a majority, and no two the same one."""
    assert trial.lan is not None
    names = [*trial.nodes]
    chance.shuffle(names)
    for at, name in enumerate(names):
        if len(names) > 3:
            trial.lan.part([name], [names[(at + 2) % len(names)]])
        else:
            trial.lan.cut(name, names[(at + 1) % len(names)])


def with_clients(trial: Trial, chance: random.Random) -> None:
    """The clients stay with the minority, so are answered by nobody they reach."""
    assert trial.lan is not None
    minority, rest = sides(trial, chance)
    trial.lan.part([*minority, "clients"], rest)


def unanswered(trial: Trial, chance: random.Random) -> None:
    """A minority, or the leader, hear what they are asked, and their answers are lost: clients ask
    others again, and so do nodes."""
    assert trial.lan is not None
    minority, rest = sides(trial, chance)
    leading = [name for name, node in trial.nodes.items() if node.role == "leading"]
    if leading and chance.random() < 0.5:
        minority = leading[-1:]
    trial.lan.cut(minority, "clients")
    trial.lan.cut(minority, chance.choice(rest))


CUTS = (apart, one_way, bridge, ring, with_clients, unanswered)


@pytest.mark.parametrize("size", [3, 5])
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.__name__)
def test_links_are_cut(
    cut: Callable[[Trial, random.Random], None], size: int, tmp_path: Path
) -> None:
    chance = random.Random(cut.__name__)
    with Trial(tmp_path, size, lan=True) as trial:
        assert trial.lan is not None
        for _ in range(5):
            trial.progress(60)
            cut(trial, chance)
            if cut in (apart, bridge):
                trial.progress(60)
            trial.let_pass(chance.uniform(0.5, 4.0))
            trial.lan.heal()
        trial.judge()


def test_links_that_flap(tmp_path: Path) -> None:
    """A cut of another kind every few tenths of a second: no longer than it takes to elect."""
    chance = random.Random(1)
    with Trial(tmp_path, 5, lan=True) as trial:
        assert trial.lan is not None
        for _ in range(40):
            chance.choice(CUTS)(trial, chance)
            trial.let_pass(chance.uniform(0.1, 0.8))
            trial.lan.heal()
            trial.let_pass(chance.uniform(0.0, 0.2))
        trial.judge()


def test_disks_are_slow(tmp_path: Path) -> None:
    """The leader's, a follower's, all; and whoever has a slow one is killed with what waits for
    it."""
    with Trial(tmp_path) as trial:
        for seconds in (0.05, 0.5, 2.0):
            leader, *others = trial.leader(), *trial.followers()
            for victims in ([leader], [others[0]], [leader, *others]):
                for victim in victims:
                    trial.slow_disk(victim.name, seconds)
                trial.progress(20)
                victims[0].kill()
                for victim in victims:
                    trial.slow_disk(victim.name, 0.0)
                trial.progress(20)
                trial.mend(victims[0])
        trial.judge()


@pytest.mark.parametrize("serve", [False, True], ids=["embedded", "served"])
def test_rolling_restarts(serve: bool, tmp_path: Path) -> None:
    """In good order, the leader first, three times around: nobody waits for an election timeout,
    and nothing that was asked of the others stays without an answer."""
    with Trial(tmp_path, serve=serve) as trial:
        for _ in range(3):
            for node in (trial.leader(), *trial.followers()):
                trial.progress(40)
                assert node.stop() == 0
                trial.progress(40)
                node.restart()
                trial.caught_up(node)
        found = trial.judge()
    assert not [each for each in found.requests if each.how == UNKNOWN and each.ended < inf]


@pytest.mark.parametrize("serve", [False, True], ids=["embedded", "served"])
def test_members_come_and_go(serve: bool, tmp_path: Path) -> None:
    """Every node is replaced by another, one after the other, whoever leads; some are killed in the
    middle of it."""
    with Trial(tmp_path, serve=serve, spare=3) as trial:
        for number, old in enumerate([*trial.nodes], 4):
            new = trial.join(f"n{number}")
            trial.change_member("add", new.name)
            trial.progress(40)
            if number == 5:
                leader = trial.leader()
                leader.kill()
                trial.change_member("promote", new.name)
                trial.mend(leader)
            else:
                trial.change_member("promote", new.name)
            trial.progress(40)
            trial.change_member("remove", old)
            trial.progress(40)
            trial.retire(old)
        found = trial.judge()
    assert found.count("replace") > 100


@pytest.mark.parametrize("seed", [7, 8])
def test_everything_at_once(seed: int, tmp_path: Path) -> None:
    """Cuts, deaths, freezes and slow disks that overlap, for a minute or so."""
    chance = random.Random(seed)
    with Trial(tmp_path, 5, lan=True) as trial:
        assert trial.lan is not None
        nodes = [*trial.nodes.values()]

        def any_node() -> Member:
            return chance.choice(nodes)

        for _ in range(80):
            match chance.randrange(8):
                case 0 | 1:
                    trial.lan.heal()
                    chance.choice(CUTS)(trial, chance)
                case 2:
                    trial.lan.heal()
                case 3 if (node := any_node()).running:
                    node.thaw()
                    node.kill()
                case 4 if (node := any_node()).running:
                    node.freeze()
                case 5:
                    trial.slow_disk(any_node().name, chance.choice((0.0, 0.0, 0.02, 0.3)))
                case _:
                    trial.mend(any_node())
            trial.let_pass(chance.uniform(0.1, 1.2))
        for name in trial.nodes:
            trial.slow_disk(name, 0.0)
        trial.judge()


def test_the_checker_detects_stale_reads(tmp_path: Path) -> None:
    """A leader that is cut off goes on answering from memory."""
    with Trial(tmp_path, lan=True, mutant="AnswersFromMemory") as trial:
        assert trial.lan is not None
        leader = trial.leader()
        trial.progress(60)
        trial.lan.part([leader.name], {*trial.nodes} - {leader.name})
        trial.leader(*({*trial.nodes} - {leader.name}), after=leader.generation)
        trial.progress(100)
        with pytest.raises(AssertionError, match=r"no order explains|does not explain"):
            trial.judge()


def test_the_checker_detects_writes_done_twice(tmp_path: Path) -> None:
    """The answers of one node after the other are lost, so that its clients ask another."""
    with Trial(tmp_path, lan=True, mutant="DoesItAgain") as trial:
        assert trial.lan is not None
        for name in [*trial.nodes] * 3:
            trial.lan.cut(name, "clients")
            trial.let_pass(0.8)
            trial.progress(40)
            trial.lan.heal()
        with pytest.raises(AssertionError, match=r"more than once|no order explains|refused"):
            trial.judge()
