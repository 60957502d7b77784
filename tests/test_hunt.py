"""New seeds that detect mutants: `make hunt`. The pinned ones are in `test_lab_mutants`.

For each mutant the search takes a minute at most, from a random seed on.
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
    *((known("raft").replace(make=mutant), faults) for mutant, _, faults in RAFT),
    *((known(protocol).replace(make=mutant), faults) for protocol, mutant, _, faults in OTHERS),
    *((known("raft").replace(make_disk=disk), faults) for disk, _, faults in DISKS),
]


def name_of(variant: Protocol | str) -> str:
    if isinstance(variant, str):
        return variant
    broken = variant.make if variant.make is not known(variant.name).make else variant.make_disk
    return f"{variant.name}-{getattr(broken, '__name__', '')}"


@pytest.mark.parametrize(("variant", "faults"), VARIANTS, ids=name_of)
def test_a_minute_of_hunting_detects(variant: Protocol, faults: str) -> None:
    first = random.SystemRandom().randrange(1_000_000)
    found = hunt_mutant(variant, HUNT_S, faults=faults, first=first)
    assert found is not None, f"no seed from {first} on detects it within {HUNT_S:g} s"
    print(f"{name_of(variant)}: seed {found[0]} after {found[0] - first + 1} runs")


@pytest.mark.parametrize(("broken", "pinned", "kinds"), MUTANTS)
def test_a_minute_of_hunting_detects_a_mutant_of_nodes(
    broken: nodes.Mutant, pinned: int, kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = seed = random.SystemRandom().randrange(1_000_000)
    until = time.monotonic() + HUNT_S
    broken(monkeypatch)
    while outcome_of(seed, kinds).ok:
        seed += 1
        assert time.monotonic() < until, f"no seed from {first} on detects it within {HUNT_S:g} s"
    print(f"{broken.__name__}: seed {seed} after {seed - first + 1} runs")
