"""At most one leader among candidates of doyen and of other programs, on real servers, while they
are killed, interrupted and started at random.

Each leader locks a file for as long as its work runs. The kernel releases the lock when the process
has ended, however that came about, so whoever cannot get it has found two leaders.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from fixtures import shared
from foreign import ForeignCandidate, Others, others_on
from servers import Consul

pytestmark = [pytest.mark.chaos, pytest.mark.usefixtures("programs")]

CANDIDATES = 4
TERMS = 2
"""How many terms candidates of each kind have at least."""
PATIENCE_S = 100.0
ENGINES = ["etcd", "quorum", "zookeeper", "consul", "etcd go", "quorum go"]
PAUSE_S = 1.0
TTL_S = 2.0
STEPS = 20

consul = shared(lambda: Consul(session_ttl_min="1s"))


class Trial:
    """Candidates of both kinds in one election, and what they report in files."""

    def __init__(self, others: Others, folder: Path, seed: int) -> None:
        others.ttl_s = TTL_S
        self._others = others
        self._rng = random.Random(seed)
        self._candidates: list[tuple[ForeignCandidate, bool]] = []
        self._name = f"trial-{seed}"
        self._folder = folder
        self.url = others.url

    def _body(self, who: str) -> str:
        file, terms, violations = (self._folder / name for name in ("lock", "terms", "violations"))
        return (
            f"exec 9>>{file}; flock -n 9 || echo {who} >>{violations};"
            f" echo {who} >>{terms}; exec sleep 1000"
        )

    def reported(self, name: str) -> list[str]:
        file = self._folder / name
        return file.read_text().split() if file.exists() else []

    def start(self) -> None:
        if ours := self._rng.random() < 0.5:
            started = self._others.ours(self._name, self._body("ours"), self.url)
        else:
            started = self._others.candidate(self._name, self._body("theirs"))
        self._candidates.append((started, ours))

    def step(self) -> None:
        """Start a candidate, or end one."""
        if len(self._candidates) < CANDIDATES:
            self.start()
            return
        # The oldest candidate, which probably leads, more often than others.
        chosen = max(0, self._rng.randrange(-CANDIDATES, CANDIDATES))
        candidate, ours = self._candidates.pop(chosen)
        # The session of a foreign candidate that is killed on Consul takes 45 s to end.
        if self._rng.random() < 0.5 and (ours or self._others.has_line):
            candidate.kill()
        else:
            candidate.interrupt()  # consul lock takes up to 15 s to end if it does not lead

    async def run(self) -> None:
        """Run until candidates of both kinds have led."""
        steps = 0
        async with asyncio.timeout(PATIENCE_S):
            while steps < STEPS or not self._both_led():
                steps += 1
                self.step()
                await asyncio.sleep(self._rng.uniform(0, PAUSE_S))

    def _both_led(self) -> bool:
        terms = self.reported("terms")
        return min(terms.count("ours"), terms.count("theirs")) >= TERMS


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("seed", [1, 2])
async def test_one_leads_at_a_time(
    engine: str, seed: int, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with others_on(engine, request) as others:
        trial = Trial(others, tmp_path, seed)
        await trial.run()
        assert not trial.reported("violations")


async def test_a_candidate_without_the_layout_is_detected(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """In doyen's own layout it does not stand in the same line."""
    async with others_on("etcd", request) as others:
        trial = Trial(others, tmp_path, 1)
        trial.url = others.url.partition("?")[0]
        await trial.run()
        assert trial.reported("violations")
