"""The recipes for Redis and for logs in docs/fencing.md, as they stand there, stop a leader that
wakes too late. The same without the comparison does not."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis

import servers
import story
from doyen.errors import StaleToken

PAGE = Path(__file__).parents[1] / "docs" / "fencing.md"


def recipe(section: str, marker: str) -> str:
    (text,) = [
        block.text
        for block in story.blocks(PAGE)
        if block.section == section and marker in block.text
    ]
    return text


EARLIER, LATER = SimpleNamespace(token=2**62 + 1), SimpleNamespace(token=2**62 + 2)


@pytest.mark.parametrize("compared", [True, False])
def test_redis_refuses_the_write_of_an_earlier_term(
    compared: bool, request: pytest.FixtureRequest
) -> None:
    server: servers.Server = request.getfixturevalue("redis")
    text = recipe("Redis", "HGET")
    if not compared:
        text = text.replace("seen > ARGV[1]", "false")
    names: dict[str, Any] = {}
    exec(text, names)
    write, key = names["write"], f"state-{uuid.uuid4().hex}"
    with redis.Redis.from_url(server.url) as client:
        write(client, key, b"first", EARLIER)
        write(client, key, b"new", LATER)
        if compared:
            with pytest.raises(StaleToken, match=f"it has seen {LATER.token}"):
                write(client, key, b"stale", EARLIER)
        else:
            write(client, key, b"stale", EARLIER)
        assert client.hget(key, "value") == (b"new" if compared else b"stale")
        write(client, key, b"newer", LATER)


@pytest.mark.parametrize("compared", [True, False])
def test_a_consumer_that_wakes_too_late_changes_nothing(
    compared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program = recipe("Logs and their consumers", "positions").partition("\nlog = ")[0]
    if not compared:
        program = program.replace('guard.check(database, f"partition {part}", term)', "pass")
    names: dict[str, Any] = {}
    exec(program, names)
    consume, database = names["consume"], names["database"]
    consume(0, ["a", "b"], LATER)
    if compared:
        with pytest.raises(StaleToken):
            consume(0, ["a", "b", "c"], EARLIER)
    else:
        consume(0, ["a", "b", "c"], EARLIER)
    effects = [each for (each,) in database.execute("SELECT message FROM effects")]
    assert effects == (["a", "b"] if compared else ["a", "b", "c"])
    database.close()
