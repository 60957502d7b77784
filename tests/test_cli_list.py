"""`doyen list`: tables, JSON, and live."""

from __future__ import annotations

import json
import re

import pytest

import doyen
from candidates import Capture, following
from doyen.cli import main


def test_everything_as_tables_and_as_json(store: str, capsys: Capture) -> None:
    assert main(["list", "--store", store]) == 1
    assert capsys.readouterr().out == "nothing here\n"
    with (
        doyen.connect_blocking(store) as session,
        session.campaign("billing", name="server1", meta={"port": 80}) as term,
        session.lock("migration", name="\x1b[2J") as lock,
        session.semaphore("pool", 2, name="w") as slot,
        session.member("workers", name="w1") as member,
    ):
        session.config("settings", author="ann").set({"n": 1})
        session.shards("jobs").configure(count=8)
        member.drain()
        assert main(["list", "--store", store]) == 0
        title, *lines = capsys.readouterr().out.splitlines()
        assert title == (
            "1 election, 1 lock, 1 semaphore, 1 group, 1 set of shards, 1 configuration"
        )
        rows = [re.sub(r"\d{4}-\d\d-\d\d [\d:]{8}", "TIME", line).split() for line in lines]
        assert rows == [
            [],
            ["election", "leader", "token", "since", "waiting"],
            ["billing", "server1", str(term.token), "TIME"],
            [],
            ["lock", "holder", "token", "since", "waiting"],
            ["migration", r"\x1b[2J", str(lock.token), "TIME"],
            [],
            ["semaphore", "taken", "holders", "waiting"],
            ["pool", "1", "of", "2", "0:", "w"],
            [],
            ["group", "members", "names", "notable"],
            ["workers", "1", "w1", "w1", "draining"],
            [],
            ["shards", "count", "owned", "members", "notable"],
            ["jobs", "8", "0", "0"],
            [],
            ["configuration", "version", "earlier", "subscribers", "written", "by"],
            ["settings", "1", "0", "0", "TIME", "ann"],
        ]
        assert main(["list", "--json", "--store", store]) == 0
        printed = json.loads(capsys.readouterr().out)
        (billing,) = printed["elections"]
        assert billing["name"] == "billing"
        assert billing["leader"]["since"] == pytest.approx(printed["as_of"], abs=5)
        assert [each["name"] for each in billing["line"]] == ["server1"]
        assert printed["locks"][0]["leader"]["name"] == "\x1b[2J", "JSON contains names unchanged"
        assert printed["semaphores"][0]["holders"]["0"]["token"] == slot.token
        assert printed["groups"][0]["members"][0]["state"] == "draining"
        assert printed["shards"][0]["count"] == 8
        assert printed["configs"][0]["author"] == "ann"
        assert printed["barriers"] == []
        assert main(["list", "locks", "--json", "--store", store]) == 0
        assert list(json.loads(capsys.readouterr().out)) == ["as_of", "locks"]
    assert main(["list", "barriers", "--store", store]) == 1
    assert main(["list", "leases", "--store", store]) == 2
    assert "KIND is one of elections, " in capsys.readouterr().err


def test_every_change_in_a_pipe(store: str) -> None:
    with (
        doyen.connect_blocking(store) as session,
        following("list", "--store", store, "--watch") as text,
        following("list", "elections", "--json", "--store", store, "--watch") as lines,
    ):
        text.until("nothing here\n\n")
        assert json.loads(lines.until("\n"))["elections"] == []
        with session.campaign("billing", name="server1"):
            text.until(r"1 election\n\n.*\nbilling +server1 +\d+ +20.*\n\n")
            assert json.loads(lines.until("\n"))["elections"][0]["leader"]["name"] == "server1"
        text.until("nothing here\n\n")
        assert text.interrupt() == 0
        assert lines.interrupt() == 0
