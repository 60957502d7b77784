"""`doyen shards`: what it shows, and what it asks for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import doyen
from doyen.cli import main, shards
from doyen.manage.shards.plan import PlannedMember
from doyen.manage.shards.routing import ShardMap
from doyen.manage.shards.slots import ShardTerm
from support import until_blocking


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    url = f"sqlite://{tmp_path}/doyen.db"
    doyen.connect_blocking(url).open().close()
    monkeypatch.setenv("DOYEN_STORE", url)
    return url


@pytest.fixture
def servers(store: str) -> Iterator[list[str]]:
    """Two members of the set `jobs`, which has 4 shards."""
    assert main(["shards", "jobs", "create", "4"]) == 0

    def body(term: ShardTerm) -> None:
        term.wait_lost()

    with (
        doyen.connect_blocking(store) as session,
        doyen.connect_blocking(store) as other,
        session.own_shards("jobs", body, name="server1", address="http://one", zone="x"),
        other.own_shards("jobs", body, name="server2"),
    ):
        until_blocking(lambda: set(session.shard_map("jobs").owners) == {"server1", "server2"})
        yield ["server1", "server2"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("jobs/")]


def test_a_set_is_shown_moved_and_drained(
    servers: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shards", "jobs"]) == 0
    out = capsys.readouterr().out
    assert "jobs: 4 shards, generation 1" in out
    assert "http://one" in out
    assert main(["shards", "jobs", "move", "0", "server2"]) == 0
    assert main(["shards", "jobs", "drain", "server1"]) == 0
    capsys.readouterr()
    assert main(["shards", "jobs", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["owners"] == ["server2"] * 4
    assert main(["shards", "jobs", "drain", "server2"]) == 1
    assert "no other member could own" in capsys.readouterr().err
    assert main(["shards", "jobs", "drain", "server1", "--undo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["members"]["server1"]["weight"] == 1
    assert main(["shards", "jobs", "move", "0"]) == 0
    assert main(["shards", "jobs", "pause"]) == 0
    assert main(["shards", "jobs", "rebalance", "--dry-run", "--json"]) == 0
    assert "moves" in json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main(["shards", "jobs", "resume"]) == 0
    assert main(["shards", "jobs", "retry"]) == 0
    assert main(["shards", "jobs", "set", "grace_s=5", "standbys=1"]) == 0
    assert "grace_s=5" in capsys.readouterr().out
    assert main(["shards", "jobs", "resize", "6"]) == 0


@pytest.mark.usefixtures("store")
def test_a_set_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shards", "jobs"]) == 1
    assert "it does not exist" in capsys.readouterr().out
    assert main(["shards", "jobs", "pause"]) == 1
    assert "there is no set of shards 'jobs'" in capsys.readouterr().err


def test_owners_that_are_gone_are_shown() -> None:
    gone = PlannedMember(7, "", "", 1.0)
    seen = ShardMap("jobs", 1, 1, True, ("a",), members={"a": gone}, grace={"a": 12.3})
    assert shards._table(seen).rows[0][0] == "a (gone, 12 s left at most)"
    assert shards.as_dict(seen)["grace"] == {"a": 12.3}


def test_members_on_which_shards_fail_are_shown() -> None:
    owners = ("c",) * 5
    seen = ShardMap("jobs", 1, 1, True, owners, failed={3: ("a", "b")}, slow={4: ("c",)})
    assert shards._notable(seen) == [
        "the body of shard 3 keeps failing on a, b",
        "shard 4 was prepared too slowly on c",
    ]
    shown = shards.as_dict(seen)
    assert (shown["failed"], shown["slow"]) == ({"3": ["a", "b"]}, {"4": ["c"]})


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["create", "0"], "count is an integer of 1 or more"),
        (["create", "many"], "the count is a whole number, 0 or above, not 'many'"),
        (["create"], "wrong number of values for create"),
        (["resize", "4"], "does not exist"),
        (["set", "grace_s"], "is not FIELD=VALUE"),
        (["set", "grace_s=soon"], "is not FIELD=VALUE"),
        (["drain", "a", "--watch"], "--watch is for show only"),
        (["--dry-run"], "--dry-run is for rebalance only"),
    ],
)
def test_wrong_usage(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["shards", "jobs", *arguments]) == 2
    assert complaint in capsys.readouterr().err
