"""Candidates of doyen in one line with those of other programs, on real servers."""

from __future__ import annotations

import asyncio
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

import doyen
from doyen.audit import verify
from doyen.cli import main
from doyen.events import ForeignLeader, Record
from etcd_door import doors
from foreign import BODY, ForeignCandidate
from servers.etcd import ETCDCTL
from servers.fetch import obtain
from support import lead_until_set, until

PATIENCE_S = 60.0
LONG = pytest.mark.chaos


class Others(ABC):
    """A server, and the other program whose candidates take part there."""

    url: str
    ttl_s = 2.0
    shown: str
    """How its candidates show themselves."""

    def __init__(self) -> None:
        self.started: list[ForeignCandidate] = []

    @abstractmethod
    def command(self, name: str) -> ForeignCandidate:
        """A candidate that leads until it is interrupted."""

    def candidate(self, name: str) -> ForeignCandidate:
        return self.keep(self.command(name))

    def ours(self, name: str) -> ForeignCandidate:
        """`doyen run` as a process."""
        command = [sys.executable, "-m", "doyen", "run", "--store", self.url, "--name", "process"]
        command += ["--ttl", f"{self.ttl_s:g}", name, "--", "sh", "-c", BODY]
        return self.keep(ForeignCandidate(command))

    def keep(self, started: ForeignCandidate) -> ForeignCandidate:
        self.started.append(started)
        return started

    def close(self) -> None:
        for each in self.started:
            each.kill()


class Etcdctl(Others):
    """`etcdctl lock`, whose value is empty; `etcdctl elect` has a proposal."""

    shown = ""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.url = f"etcd://{address}?layout=concurrency"
        self._endpoint = address

    def run(self, *arguments: str) -> ForeignCandidate:
        command = [str(obtain(ETCDCTL).path), *arguments]
        return self.keep(
            ForeignCandidate(command, ETCDCTL_API="3", ETCDCTL_ENDPOINTS=self._endpoint)
        )

    def command(self, name: str) -> ForeignCandidate:
        return self.run("lock", "--ttl=2", name, "--", "sh", "-c", BODY)


class Kazoo(Others):
    """kazoo's `Election`, in a process of its own."""

    shown = "theirs"
    PROGRAM = """
import sys, time
from kazoo.client import KazooClient

def lead():
    print("leads", flush=True)
    time.sleep(1000)

client = KazooClient(sys.argv[1], timeout=2)
client.start()
try:
    client.Election(sys.argv[2], "theirs").run(lead)
except KeyboardInterrupt:
    client.stop()
"""

    def __init__(self, address: str) -> None:
        super().__init__()
        self.url = f"zookeeper://{address}/app?layout=kazoo"
        self._address = address

    def command(self, name: str) -> ForeignCandidate:
        return ForeignCandidate([sys.executable, "-c", self.PROGRAM, f"{self._address}/app", name])


@asynccontextmanager
async def others_on(engine: str, request: pytest.FixtureRequest) -> AsyncIterator[Any]:
    if engine == "quorum":
        async with doors(request.getfixturevalue("tmp_path")) as quorum:
            others: Others = Etcdctl(quorum.addresses[0])
            try:
                yield others
            finally:
                others.close()
        return
    kinds: dict[str, Callable[[str], Others]] = {"etcd": Etcdctl, "zookeeper": Kazoo}
    others = kinds[engine](request.getfixturevalue(engine).address)
    try:
        yield others
    finally:
        others.close()


@asynccontextmanager
async def session(others: Others, **options: Any) -> AsyncIterator[doyen.Session]:
    async with (
        asyncio.timeout(PATIENCE_S),
        doyen.connect(others.url, ttl_s=others.ttl_s, **options) as connected,
    ):
        yield connected


async def line_of(session: doyen.Session, name: str, count: int) -> list[tuple[str, bool, bool]]:
    """The candidates, whether they lead and whether they are foreign, once there are so many."""
    async for line in session.observe_line(name):
        if isinstance(line, doyen.Line) and len(line.candidates) == count:
            return [(each.name, each.leads, each.foreign) for each in line.candidates]
    raise AssertionError


async def leader_of(session: doyen.Session, name: str, *, foreign: bool) -> doyen.Leader:
    async for leader in session.observe(name):
        if isinstance(leader, doyen.Leader) and leader.foreign == foreign:
            return leader
    raise AssertionError


@pytest.mark.parametrize("engine", ["etcd", "quorum"])
async def test_etcdctl_elect_and_doyen_see_each_other(
    engine: str, request: pytest.FixtureRequest
) -> None:
    seen: list[ForeignLeader] = []

    def note(record: Record) -> None:
        if isinstance(record.event, ForeignLeader):
            seen.append(record.event)

    async with others_on(engine, request) as etcdctl, session(etcdctl, on_event=note) as ours:
        async with ours.campaign("turns", name="first") as first:
            theirs = etcdctl.run("elect", "turns", "theirs")
            assert await line_of(ours, "turns", 2) == [
                ("first", True, False),
                ("theirs", False, True),
            ]
            observer = etcdctl.run("elect", "--listen", "turns")
            assert await observer.elected() == ("turns", "first")
            await first.publish({"proposal": "first:80"})
            assert await observer.elected() == ("turns", "first:80")
        assert await theirs.elected() == ("turns", "theirs")
        assert await observer.elected() == ("turns", "theirs")
        stop = asyncio.Event()
        waiting = asyncio.create_task(lead_until_set(ours, stop, "turns", name="second"))
        assert await line_of(ours, "turns", 2) == [
            ("theirs", True, True),
            ("second", False, False),
        ]
        leader = await leader_of(ours, "turns", foreign=True)
        await until(lambda: bool(seen))
        assert (seen[0].leader, seen[0].token, seen[0].name) == ("theirs", leader.token, "second")
        await theirs.resign()
        assert await observer.elected() == ("turns", "second")
        stop.set()
        second = await waiting
        assert first.token < leader.token < second.token


@LONG
@pytest.mark.parametrize("engine", ["etcd", "zookeeper"])
async def test_whoever_is_killed_the_other_follows(
    engine: str, request: pytest.FixtureRequest
) -> None:
    async with others_on(engine, request) as others, session(others) as observer:
        ours = others.ours("killed")
        await ours.leads()
        first = await leader_of(observer, "killed", foreign=False)
        theirs = others.candidate("killed")
        await line_of(observer, "killed", 2)
        ours.kill()
        await theirs.leads()
        second = await leader_of(observer, "killed", foreign=True)
        assert (first.name, second.name) == ("process", others.shown)
        ours = others.ours("killed")
        await line_of(observer, "killed", 2)
        theirs.kill()
        await ours.leads()
        third = await leader_of(observer, "killed", foreign=False)
        assert first.token < second.token < third.token


@pytest.mark.parametrize("engine", ["etcd", "zookeeper"])
async def test_a_lock_is_the_same_line(engine: str, request: pytest.FixtureRequest) -> None:
    async with others_on(engine, request) as others, session(others) as ours:
        theirs = others.candidate("locked")
        await theirs.leads()
        with pytest.raises(doyen.NotElected):
            async with ours.lock("locked", wait_s=0):
                raise AssertionError
        await theirs.resign()
        async with ours.lock("locked") as held, ours.lock("other") as other:
            assert held.valid
            assert other.valid
            with pytest.raises(doyen.NotElected):  # a second candidate of the same session
                async with ours.campaign("locked", wait_s=0, recipe="race"):
                    raise AssertionError


@pytest.mark.parametrize("engine", ["etcd"])
async def test_what_a_layout_cannot_carry_is_refused(
    engine: str, request: pytest.FixtureRequest
) -> None:
    async with others_on(engine, request) as others, session(others) as ours:
        with pytest.raises(doyen.ConfigError, match="has no priorities"):
            async with ours.campaign("refused", priority=1):
                raise AssertionError
        async with ours.campaign("refused", name="a", wait_s=10):
            with pytest.raises(doyen.StoreUnusable, match="no place for orders and transfers"):
                await ours.resign("refused", wait_s=1)
        with pytest.raises(doyen.StoreUnusable, match="no place for semaphores"):
            async with ours.semaphore("refused", 2):
                raise AssertionError
        with pytest.raises(doyen.StoreUnusable, match="no place for members"):
            await ours.members("refused")
        with pytest.raises(doyen.StoreUnusable, match="no place for trails"):
            await ours.history("refused")
        with pytest.raises(doyen.StoreUnusable, match="no place for lists of elections"):
            await ours.inventory("elections")


@pytest.mark.parametrize("engine", ["etcd", pytest.param("zookeeper", marks=LONG)])
async def test_doctor_and_verify_name_foreign_terms(
    engine: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = tmp_path / "audit.jsonl"
    async with others_on(engine, request) as others:
        theirs = others.candidate("named")
        await theirs.leads()
        async with session(others, audit=log) as ours:
            waiting = asyncio.create_task(lead_until_set(ours, asyncio.Event(), "named"))
            leader = await leader_of(ours, "named", foreign=True)
            arguments = ["doctor", "--store", others.url, "--ttl", f"{others.ttl_s:g}", "--json"]
            capsys.readouterr()
            await asyncio.to_thread(main, [*arguments, "named"])
            findings = json.loads(capsys.readouterr().out)["findings"]
            texts = {each["subject"]: each["text"] for each in findings}
            layout = others.url.partition("?")[2]
            assert "promise less" in texts[layout]
            assert f"(token {leader.token}) is foreign" in texts["term"]
            await theirs.resign()
            await leader_of(ours, "named", foreign=False)
            waiting.cancel()
            await asyncio.wait({waiting})
    report = verify([log])
    assert report.ok
    assert [each.token for each in report.foreign] == [leader.token]
    assert main(["verify", str(log)]) == 0
    assert f"of 'named' were foreign: {others.shown!r} (token {leader.token})" in (
        capsys.readouterr().out
    )


async def test_kazoo_sees_ours_as_contenders(request: pytest.FixtureRequest) -> None:
    async with others_on("zookeeper", request) as others, session(others) as ours:
        client = KazooClient(f"{request.getfixturevalue('zookeeper').address}/app")
        await asyncio.to_thread(client.start)
        try:
            lock = client.Lock("contended", "theirs")
            async with ours.campaign("/contended", name="ours") as term:
                assert await asyncio.to_thread(lock.contenders) == ["ours"]
                assert not await asyncio.to_thread(lock.acquire, blocking=False)
                with pytest.raises(doyen.StoreUnusable, match="changes of what a leader shows"):
                    await term.publish({"proposal": "other"})
            assert await asyncio.to_thread(lock.acquire)
            leader = await leader_of(ours, "contended", foreign=True)
            assert leader.name == "theirs"
            assert leader.token > term.token
            with pytest.raises(doyen.ConfigError, match="has no meta"):
                async with ours.campaign("contended", meta={"port": 80}):
                    raise AssertionError
        finally:
            await asyncio.to_thread(client.stop)
            client.close()
