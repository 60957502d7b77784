"""Work that is due once in a while, on one of several hosts: who runs it, who sees its result."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import doyen
from candidates import DOYEN, Capture
from doyen.cli import main
from doyen.errors import BadDocument, LeadershipLost
from doyen.model import run_key
from doyen.supervise import once
from doyen.supervise.once import RunResult, read_result, run_once
from doyen.testing.faults import Faults, Odds, RefusedCall
from support import TTL_S, Place, now, virtual

NIGHT_S = 8_000.0
"""Shorter than a night, because sessions renew all the time. Clocks and jobs are in proportion."""
WITHIN_S = NIGHT_S / 2


class SkewedClock:
    """The clock of a host, whose wall clock is wrong."""

    def __init__(self, place: Place, skew_s: float) -> None:
        self.now = place.clock.now
        self._wall = place.clock.wall
        self._skew_s = skew_s

    def wall(self) -> float:
        return self._wall() + self._skew_s


class Nights:
    """Hosts that run the same job every night, and the oracle: the job never runs twice at a time,
    never after its result was recorded, and all who see a result see that of the night."""

    def __init__(self, place: Place, seed: int, odds: Odds | None = None) -> None:
        self.place = place
        self.random = random.Random(seed)
        self.odds = odds
        self.working: list[doyen.Term] = []
        self.ended: set[int] = set()
        """The tokens whose work has ended this night."""
        self.recorded = False
        self.seen: list[RunResult | None] = []

    async def host(self, name: str) -> None:
        draw = self.random
        faults = Faults(draw.randrange(2**32), self.odds) if self.odds else None
        clock = SkewedClock(self.place, draw.uniform(-200, 200))
        dies = self.odds is not None and draw.random() < 0.3
        async with self.place.session(faults, clock=clock) as session:
            await asyncio.sleep(draw.uniform(0, 100))
            async for campaign in session.campaigns("nightly", name=name):
                result = None
                async with campaign as term:
                    work = partial(self.work, term, draw.uniform(1, 200), dies)
                    result = await run_once(session, term, within_s=WITHIN_S, work=work)
                    if result is not None and result.token == term.token and term.valid:
                        self.recorded = True
                if result is not None or dies:
                    self.seen.append(result)
                    return

    async def work(self, term: doyen.Term, lasts_s: float, dies: bool) -> int | None:
        assert not [each for each in self.working if each.valid], "two work at a time"
        assert not self.recorded, "the work ran after its result was recorded"
        self.working.append(term)
        try:
            await asyncio.sleep(lasts_s)
            if dies:
                return None  # as if its host had crashed
            self.ended.add(term.token)
            return 7
        finally:
            self.working.remove(term)

    async def run(self, hosts: int = 3, nights: int = 4) -> None:
        start = now()
        for night in range(nights):
            await asyncio.sleep(start + night * NIGHT_S - now())
            self.ended, self.recorded, self.seen = set(), False, []
            await asyncio.gather(*(self.host(f"h{each}") for each in range(hosts)))
            results = {each for each in self.seen if each is not None}
            assert {each.code for each in results} <= {7}
            assert {each.token for each in results} <= self.ended, "a result of another night"
            if self.odds is None:
                assert len(self.ended) == 1
                assert len(results) == 1
                assert len(self.seen) == hosts


@virtual
async def test_the_work_runs_once_a_night_and_all_see_its_result(place: Place) -> None:
    await Nights(place, 1).run()


ODDS = Odds(late=0.05, lost=0.02, unanswered=0.02, refused=0.03, expired=0.01, delay_s=2.0)


@pytest.mark.parametrize("seed", range(4))
def test_faults_make_no_run_follow_a_result(seed: int) -> None:
    @virtual
    async def test(place: Place) -> None:
        await Nights(place, seed, ODDS).run()

    test()


@pytest.mark.parametrize("broken", ["reads nothing", "records nothing", "keeps the old result"])
def test_a_broken_variant_is_detected(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    async def nothing(*_: object) -> None:
        return None

    if broken == "reads nothing":
        monkeypatch.setattr(once, "read_result", nothing)
    elif broken == "records nothing":
        monkeypatch.setattr(once, "_record", nothing)
    else:
        monkeypatch.setattr(sys.modules[__name__], "WITHIN_S", 2 * NIGHT_S)

    @virtual
    async def test(place: Place) -> None:
        await Nights(place, 1).run()

    with pytest.raises((AssertionError, BaseExceptionGroup)):
        test()


@virtual
async def test_a_run_without_a_result_is_repeated(place: Place) -> None:
    session = await place.open()
    runs: list[int | None] = []

    async def once_more(code: int | None) -> RunResult | None:
        async def work() -> int | None:
            runs.append(code)
            return code

        async with session.campaign("e", name="a") as term:
            return await run_once(session, term, within_s=10.0, work=work)

    assert await once_more(None) is None
    first = await once_more(3)
    assert first is not None
    assert (first.name, first.code) == ("a", 3)
    assert await once_more(4) == first
    await asyncio.sleep(10.0)
    later = await once_more(4)
    assert later is not None
    assert later.token > first.token
    assert runs == [None, 3, 4]


@virtual
async def test_a_result_is_recorded_when_the_store_is_back(place: Place) -> None:
    """Unless the term has ended: then the next leader runs the work."""
    faults = Faults()
    session = await place.open(faults)

    async def work() -> int:
        faults.next("put", *[RefusedCall()] * 3)
        return 0

    async with session.campaign("e") as term:
        assert await run_once(session, term, within_s=WITHIN_S, work=work)
    assert await session._run(read_result, "e") is not None

    async def cut() -> int:
        faults.cut()
        return 1

    await asyncio.sleep(100.0)
    with pytest.raises(LeadershipLost):
        async with session.campaign("e") as term:
            await run_once(session, term, within_s=100.0, work=cut)
    faults.heal()
    await asyncio.sleep(2 * TTL_S)
    kept = await session._run(read_result, "e")
    assert kept is not None
    assert kept.code == 0


@virtual
async def test_what_is_no_result_is_an_error(place: Place) -> None:
    session = await place.open()
    document = {"schema": 1, "version": 1, "id": "x", "token": 1, "began": "soon"}
    place.server.put(run_key("e"), json.dumps(document).encode(), None)
    with pytest.raises(BadDocument, match="not the result of a run"):
        await session._run(read_result, "e")
    place.server.delete(run_key("e"))


NIGHTLY = """
import sys
open(sys.argv[1], "a").write("x")
raise SystemExit(3)
"""


def test_all_lines_of_cron_return_the_exit_code_of_the_one_that_ran(
    tmp_path: Path, store: str
) -> None:
    ran = tmp_path / "ran"
    command = [*DOYEN, "run", "nightly", "--store", store, "--once-in", "12h", "--"]
    hosts = [
        subprocess.Popen(
            [*command, sys.executable, "-c", NIGHTLY, str(ran)], stderr=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    outputs = [each.communicate(timeout=60)[1] for each in hosts]
    assert [each.returncode for each in hosts] == [3, 3, 3]
    assert ran.read_text() == "x"
    told = [line for each in outputs for line in each.splitlines() if "has run it" in line]
    assert len(told) == 2
    assert all(line.endswith("with exit code 3") for line in told)


def test_a_command_that_was_stopped_is_run_again(tmp_path: Path, store: str) -> None:
    """Signals are how an operator or a shutdown ends it, so its exit code is no result."""
    options: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    command = [*DOYEN, "run", "nightly", "--store", store, "--once-in", "12h", "--json", "--"]
    wait = "import signal; print('works', flush=True); signal.pause()"
    first = subprocess.Popen([*command, sys.executable, "-c", wait], **options)
    assert first.stdout is not None
    assert first.stdout.readline() == "works\n"
    first.terminate()
    first.communicate(timeout=60)
    assert first.returncode == 128 + signal.SIGTERM
    second = subprocess.run([*command, "echo", "works"], timeout=60, **options)
    assert (second.returncode, second.stdout) == (0, "works\n")
    third = subprocess.run([*command, "echo", "works"], timeout=60, **{**options, "stderr": -1})
    assert (third.returncode, third.stdout) == (0, "")
    events = [json.loads(line) for line in third.stderr.splitlines()]
    [told] = [each for each in events if each["event"] == "has_run"]
    assert told["code"] == 0


def test_a_restart_contradicts(store: str, capsys: Capture) -> None:
    assert os.environ.get("NOTIFY_SOCKET") is None
    assert main(["run", "e", "--store", store, "--once-in", "1h", "--restart", "--", "true"]) == 2
    assert "contradict" in capsys.readouterr().err
