"""`doyen members`, and members on doyen's own thread, on a real store."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from itertools import islice

import pytest

import doyen
from candidates import Capture, eventually, following
from doyen.cli import main
from doyen.cli.members import prometheus_targets
from doyen.model import Member
from support import known

META = {"address": "10.0.0.1:80", "zone": "eu-1"}


def test_members_as_text_json_and_targets(store: str, capsys: Capture) -> None:
    command = ["members", "workers", "--store", store]
    assert main(command) == 1
    assert capsys.readouterr().out == "workers has no members\n"
    with (
        doyen.connect_blocking(store) as session,
        session.member("workers", name="w1", meta=META) as first,
        session.member("workers", name="w2") as second,
    ):
        second.drain()
        assert main(command) == 0
        title, blank, heading, *rows = capsys.readouterr().out.splitlines()
        assert (title, blank) == ("workers has 2 members", "")
        assert heading.split() == ["name", "state", "silent", "incarnation", "meta"]
        assert re.fullmatch(rf"w1 +up +\d\.\d s +{first.incarnation}  .*eu-1.*", rows[0])
        assert re.fullmatch(rf"w2 +draining +\d\.\d s +{second.incarnation}", rows[1])
        assert main([*command, "--json"]) == 0
        printed = json.loads(capsys.readouterr().out)
        assert [each["state"] for each in printed["members"]] == ["up", "draining"]
        assert printed["members"][0]["meta"] == META
        assert main([*command, "--prometheus"]) == 0
        (target,) = json.loads(capsys.readouterr().out)
        assert target["targets"] == ["10.0.0.1:80"]
        assert target["labels"]["__meta_doyen_meta_zone"] == "eu-1"
    assert main([*command, "--watch", "--prometheus"]) == 2
    assert "leave --watch out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "target", "scheme"),
    [
        ("10.0.0.1:80", "10.0.0.1:80", None),
        ("http://10.0.0.1:80", "10.0.0.1:80", "http"),
        ("https://[::1]:443/", "[::1]:443", "https"),
        ("http://user:word@h:80/x", "h:80", "http"),
        ("tcp://h:80", "h:80", None),
    ],
)
def test_targets_of_prometheus_have_no_scheme(
    address: str, target: str, scheme: str | None
) -> None:
    """Prometheus refuses targets that are URLs, and reads the scheme from a label."""
    (printed,) = prometheus_targets("workers", [Member("w1", 7, meta={"address": address})])
    assert printed["targets"] == [target]
    assert printed["labels"].get("__scheme__") == scheme


@pytest.mark.parametrize("address", ["", "unix:///run/w1", 80])
def test_a_member_without_a_host_is_no_target(address: object) -> None:
    assert prometheus_targets("workers", [Member("w1", 7, meta={"address": address})]) == []


def test_every_change_is_printed(store: str) -> None:
    with doyen.connect_blocking(store) as session:
        with following("members", "workers", "--watch", "--store", store) as watching:
            with session.member("workers", name="w1") as member:
                watching.until(rf"w1 joined, incarnation {member.incarnation}\n")
                member.update({"port": 1})
                watching.until(r'w1 changed, .*"port": 1')
            watching.until(r"w1 gone, silent for \d+\.\d s")
            assert watching.interrupt() == 0
        with following("members", "workers", "--watch", "--json", "--store", store) as watching:
            with session.member("workers", name="w1"):
                seen = json.loads(watching.until(r"\n"))
                assert (seen["change"], seen["member"]["name"]) == ("joined", "w1")
            assert watching.interrupt() == 0


def test_a_blocking_member_is_published_and_refused_under_a_name_that_is_taken(store: str) -> None:
    with (
        doyen.connect_blocking(store, ttl_s=3.0) as session,
        doyen.connect_blocking(store, ttl_s=3.0) as other,
        pytest.raises(doyen.LeadershipLost, match="has failed: broken"),
        session.member("workers", name="w1", health=lambda: True) as member,
        session.campaign("workers", member=member) as term,
        session.publisher("workers", term, settle_s=0.0),
    ):
        with pytest.raises(doyen.NameTaken, match="'w1' in the group 'workers' is taken"):
            other.member("workers", name="w1").__enter__()
        for published in other.observe_published("workers"):
            if published and published.members:
                break
        assert published
        assert [each.name for each in published.members] == ["w1"]
        with other.member("workers", name="w2"):
            names = ("w1", "w2")
            eventually(lambda: _names(other.published("workers")) == names, "w2 is published")
            kinds = [known(change).kind for change in islice(other.observe_members("workers"), 2)]
            assert kinds == ["joined", "joined"]
        member.fail("broken")
        assert session.members("workers") == []
        assert term.wait_lost(5.0)


def _names(published: doyen.Published | None) -> tuple[str, ...]:
    return () if published is None else tuple(each.name for each in published.members)


def test_a_health_check_runs_where_it_must(store: str) -> None:
    """A function on a thread of its own, a coroutine function on the caller's loop."""
    threads: list[str] = []

    async def check() -> None:
        threads.append(threading.current_thread().name)

    async def whole() -> list[Member]:
        async with (
            doyen.connect(store) as session,
            session.member("workers", name="a", health=lambda: threads.append(_thread())),
            session.member("workers", name="b", health=check),
        ):
            return await session.members("workers")

    assert [member.state for member in asyncio.run(whole())] == ["up", "up"]
    assert threads == ["doyen-aside", threading.current_thread().name]
    with (
        doyen.connect_blocking(store) as session,
        pytest.raises(doyen.ConfigError, match="an ordinary function"),
    ):
        session.member("workers", health=check)


def _thread() -> str:
    return threading.current_thread().name
