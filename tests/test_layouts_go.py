"""Candidates of doyen in one line with those of Go's concurrency package, on etcd and through the
etcd door of a quorum. The program in Go is built from Debian's packages, once."""

from __future__ import annotations

import asyncio
import signal

import pytest

import doyen
from foreign import Go, Others, others_on
from mixed_line import Go as GoCandidate
from mixed_line import MixedLine, Ours, Run
from support import lead_until_set
from test_layouts import leader_of, line_of, session

pytestmark = [
    pytest.mark.chaos(engine="etcd"),
    pytest.mark.usefixtures("go_program", "etcd3_program"),
]

TURNS = 12
ENGINES = ["etcd go", "quorum go"]


def address_of(others: Others) -> str:
    return others.url.partition("//")[2].partition("?")[0]


@pytest.mark.parametrize("engine", ENGINES)
async def test_order_and_observation(engine: str, request: pytest.FixtureRequest) -> None:
    async with others_on(engine, request) as go, session(go) as ours, session(go) as other:
        assert isinstance(go, Go)
        observer = go.observer("turns")
        stop = asyncio.Event()
        async with ours.campaign("turns", name="first") as first:
            assert await observer.leader() == (first.token, "first")
            theirs = go.candidate("turns")
            await line_of(ours, "turns", 2)
            waiting = asyncio.create_task(lead_until_set(other, stop, "turns", name="third"))
            await line_of(ours, "turns", 3)
            go.run("elect", "turns", "fourth")
            assert await line_of(ours, "turns", 4) == [
                ("first", True, False),
                ("theirs", False, True),
                ("third", False, False),
                ("fourth", False, True),
            ]
            await first.publish({"proposal": "first:80"})
            assert await observer.leader() == (first.token, "first:80")
        revision = await theirs.elected_at()
        second = await leader_of(ours, "turns", foreign=True)
        assert (second.name, second.token) == ("theirs", revision)
        assert await observer.leader() == (revision, "theirs")
        theirs.say("theirs:80")
        assert await observer.leader() == (revision, "theirs:80")
        async for seen in ours.observe("turns"):
            if isinstance(seen, doyen.Leader) and seen.name == "theirs:80":
                break
        await theirs.resign()
        third_seen = await observer.leader()
        stop.set()
        third = await waiting
        assert third_seen == (third.token, "third")
        fourth_revision, name = await observer.leader()
        assert name == "fourth"
        assert first.token < revision < third.token < fourth_revision


@pytest.mark.parametrize("engine", ENGINES)
async def test_a_mutex_is_the_same_line(engine: str, request: pytest.FixtureRequest) -> None:
    """The revision of its header, which is `ETCD_LOCK_REV` of `etcdctl lock`, is no token: after a
    wait it is greater than that of the next in line."""
    async with others_on(engine, request) as go, session(go) as ours, session(go) as other:
        assert isinstance(go, Go)
        stop = asyncio.Event()

        async def hold_next() -> int:
            async with other.lock("mutex", name="next") as term:
                await stop.wait()
                return term.token

        async with ours.lock("mutex") as held:
            theirs = go.mutex("mutex")
            await line_of(ours, "mutex", 2)
            waiting = asyncio.create_task(hold_next())
            await line_of(ours, "mutex", 3)
        revision = await theirs.elected_at()
        leader = await leader_of(ours, "mutex", foreign=True)
        with pytest.raises(doyen.NotElected):
            async with ours.lock("mutex", wait_s=0):
                raise AssertionError
        await theirs.resign()
        stop.set()
        assert held.token < leader.token < await waiting < revision


@pytest.mark.parametrize("engine", ENGINES)
async def test_leaders_of_both_kinds_are_killed(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """Or resign, or lose their links. The oracle compares what they claim with the keys."""
    async with others_on(engine, request) as go:
        address = address_of(go)
        name = f"killed-{engine.replace(' ', '-')}"
        mixed = MixedLine(name, [address], [address])
        async with mixed.running(Ours, Run, GoCandidate, GoCandidate, go=True) as line:
            await line.crowd(3)
            for _ in range(TURNS):
                await line.turn()
            terms = await line.judge()
            print(f"{engine}: {line.samples} samples, terms {terms}")


@pytest.mark.parametrize("engine", ENGINES)
async def test_campaign_of_go_returns_although_its_session_has_expired(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """etcd#11456: `Campaign` waits for the keys before its own, and does not look whether its own
    is still there. So the program believes that it leads, until it looks at `Session.Done()`. The
    line has one leader, which is not it."""
    async with others_on(engine, request) as go, session(go) as ours, session(go) as other:
        go.ttl_s = go.least_ttl_s
        stop = asyncio.Event()
        async with ours.campaign("expired", name="first"):
            theirs = go.candidate("expired", "exec sleep 1000")
            await line_of(ours, "expired", 2)
            theirs.signal(signal.SIGSTOP)
            await line_of(ours, "expired", 1)
            waiting = asyncio.create_task(lead_until_set(other, stop, "expired", name="second"))
            await line_of(ours, "expired", 2)
        second = await leader_of(ours, "expired", foreign=False)
        while second.name != "second":
            second = await leader_of(ours, "expired", foreign=False)
        theirs.signal(signal.SIGCONT)
        assert await theirs.elected_at() < second.token
        assert [name for name, _, _ in await line_of(ours, "expired", 1)] == ["second"]
        assert await theirs.line() == "lost"
        stop.set()
        assert (await waiting).token == second.token
