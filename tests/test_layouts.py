"""Candidates of doyen in one line with those of other programs, on real servers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

import doyen
from doyen.audit import verify
from doyen.cli import main
from doyen.events import ForeignLeader, Record
from doyen.stores.consul.lock import FLAGS
from foreign import Others, others_on
from servers import Consul
from servers.wire import http_json
from support import lead_until_set, until

LONG = pytest.mark.chaos


@asynccontextmanager
async def session(others: Others, **options: Any) -> AsyncIterator[doyen.Session]:
    async with (
        asyncio.timeout(others.patience_s),
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
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("engine", ["etcd", "zookeeper", "consul", "etcd go", "quorum go"])
async def test_whoever_is_killed_the_other_follows(
    engine: str, request: pytest.FixtureRequest
) -> None:
    async with others_on(engine, request) as others, session(others) as observer:
        others.ttl_s = others.least_ttl_s
        ours = others.ours("killed")
        await ours.leads()
        first = await leader_of(observer, "killed", foreign=False)
        theirs = others.candidate("killed")
        if others.has_line:
            await line_of(observer, "killed", 2)
        ours.kill()
        await theirs.leads()
        second = await leader_of(observer, "killed", foreign=True)
        assert first.name == "process"
        assert re.fullmatch(others.shown, second.name)
        ours = others.ours("killed")
        if others.has_line:
            await line_of(observer, "killed", 2)
        theirs.kill()
        await ours.leads()
        third = await leader_of(observer, "killed", foreign=False)
        assert first.token < second.token < third.token


@pytest.mark.parametrize("engine", ["etcd", "zookeeper", "consul"])
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
        with pytest.raises(doyen.StoreUnusable, match="no place for the history of terms"):
            await ours.history("refused")
        with pytest.raises(doyen.StoreUnusable, match="no place for lists of elections"):
            await ours.inventory("elections")


@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize(
    "engine",
    ["etcd", *(pytest.param(each, marks=LONG) for each in ("zookeeper", "consul", "quorum go"))],
)
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
            stop = asyncio.Event()
            waiting = asyncio.create_task(lead_until_set(ours, stop, "named"))
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
            stop.set()  # not a cancellation, which could come before the log states the election
            await waiting
    report = verify([log])
    assert report.ok
    assert [each.token for each in report.foreign] == [leader.token]
    assert main(["verify", str(log)]) == 0
    assert re.fullmatch(others.shown, leader.name)
    named = f"of 'named' was foreign: {leader.name!r} (token {leader.token})"
    assert named in capsys.readouterr().out


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


async def test_keys_are_those_of_the_other_program(request: pytest.FixtureRequest) -> None:
    async with others_on("etcd", request) as etcdctl, session(etcdctl) as ours:
        async with ours.campaign("/app/keys", name="ours"):
            found = etcdctl.run("get", "--prefix", "/app/keys/")
            key = await found.line()
            assert int(key.removeprefix("/app/keys/"), 16)
            assert await found.line() == "ours"
        etcdctl.url = etcdctl.url.replace("?", "/app?")
        async with session(etcdctl) as prefixed, prefixed.campaign("keys", name="prefixed"):
            leader = await ours.leader("/app/keys")
            assert leader is not None
            assert leader.name == "prefixed"


async def test_a_claim_without_a_candidate_does_not_hide_others(
    request: pytest.FixtureRequest,
) -> None:
    """An operator has deleted the key of a candidate of doyen. Its claim is there until its lease
    ends."""
    async with others_on("etcd", request) as etcdctl, session(etcdctl) as ours:
        left = etcdctl.run("put", "/doyen/claims/hidden/1", '{"name": "left", "attempt": "1"}')
        assert await left.line() == "OK"
        async with ours.campaign("hidden", name="ours"):
            leader = await ours.leader("hidden")
            assert leader is not None
            assert (leader.name, leader.foreign) == ("ours", False)
            assert await line_of(ours, "hidden", 1) == [("ours", True, False)]


async def test_who_waits_is_not_shown_without_a_line(
    consul: Consul, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        others_on("consul", request) as others,
        session(others) as ours,
        ours.campaign("lineless", name="first") as term,
    ):
        line = ["line", "lineless", "--store", others.url]
        capsys.readouterr()
        assert await asyncio.to_thread(main, line) == 0
        leads = f"first leads lineless, token {term.token}"
        expected = f"{leads}; this store does not show who waits\n"
        assert capsys.readouterr().out == expected
        assert await asyncio.to_thread(main, [*line, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["complete"] is False


async def test_a_key_that_is_not_a_lock_is_refused(
    consul: Consul, request: pytest.FixtureRequest
) -> None:
    consul.put("refused/.lock", b"a value of another program")
    async with others_on("consul", request) as others, session(others) as ours:
        with pytest.raises(doyen.StoreUnusable, match="is not that of a lock"):
            async with ours.campaign("refused"):
                raise AssertionError
        async with ours.campaign("own") as term:
            with pytest.raises(doyen.StoreUnusable, match="changes of what a leader shows"):
                await term.publish({"a": 1})
            key = http_json(consul.port, "GET", "/v1/kv/own/.lock")[0]
            assert (key["Flags"], key["ModifyIndex"]) == (FLAGS, term.token)


async def test_lock_delay_of_a_foreign_leader_is_respected(
    consul: Consul, request: pytest.FixtureRequest
) -> None:
    """Its session was lost, so it may still be at work."""

    def ask(method: str, path: str, body: object = None) -> Any:
        return http_json(consul.port, method, f"/v1/{path}", body)

    def lose(name: str, delay: str) -> None:
        lost = ask("PUT", "session/create", {"LockDelay": delay, "TTL": "10s"})["ID"]
        assert ask("PUT", f"kv/{name}/.lock?acquire={lost}&flags={FLAGS}")
        ask("PUT", f"session/destroy/{lost}")

    async with others_on("consul", request) as others, session(others) as ours:
        lose("long", "60s")
        with pytest.raises(doyen.NotElected, match="lock-delay of Consul"):
            async with ours.campaign("long", wait_s=0):
                raise AssertionError
        assert ours.health == "ok"
        lose("short", "1s")
        async with ours.campaign("short") as term:
            assert term.valid
