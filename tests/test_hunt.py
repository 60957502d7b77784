"""Seeds that kill mutants, found afresh: `make hunt`. The pinned ones are in `test_lab_mutants`.

Each mutant has a minute, from a seed on that nobody has tried.
"""

from __future__ import annotations

import random
import time

import pytest

import mutants_nodes as nodes
from doyen.lab.protocols import Protocol, known
from doyen.lab.runner import hunt_mutant
from test_lab_mutants import DISKS, HUNT_S, OTHERS, RAFT
from test_lab_quorum import MUTANTS, outcome_of

pytestmark = pytest.mark.hunt

VARIANTS: list[tuple[Protocol, str]] = [
    *((known("raft").but(make=mutant), faults) for mutant, _, faults in RAFT),
    *((known(protocol).but(make=mutant), faults) for protocol, mutant, _, faults in OTHERS),
    *((known("raft").but(make_disk=disk), faults) for disk, _, faults in DISKS),
]


def name_of(variant: Protocol | str) -> str:
    if isinstance(variant, str):
        return variant
    broken = variant.make if variant.make is not known(variant.name).make else variant.make_disk
    return f"{variant.name}-{getattr(broken, '__name__', '')}"


@pytest.mark.parametrize(("variant", "faults"), VARIANTS, ids=name_of)
def test_a_minute_of_hunting_kills(variant: Protocol, faults: str) -> None:
    first = random.SystemRandom().randrange(1_000_000)
    found = hunt_mutant(variant, HUNT_S, faults=faults, first=first)
    assert found is not None, f"no seed from {first} on kills it within {HUNT_S:g} s"
    print(f"{name_of(variant)}: seed {found[0]}, the {found[0] - first + 1}. that was tried")


@pytest.mark.parametrize(("broken", "pinned", "kinds"), MUTANTS)
def test_a_minute_of_hunting_kills_a_node(
    broken: nodes.Mutant,
    pinned: int,
    kinds: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = seed = random.SystemRandom().randrange(1_000_000)
    until = time.monotonic() + HUNT_S
    broken(monkeypatch)
    while outcome_of(seed, kinds).ok:
        seed += 1
        assert time.monotonic() < until, f"no seed from {first} on kills it within {HUNT_S:g} s"
    print(f"{broken.__name__}: seed {seed}, the {seed - first + 1}. that was tried")
