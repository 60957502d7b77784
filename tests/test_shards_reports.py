"""What members of a set of shards report in their entries, which have a limit, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from doyen import ConfigError
from doyen.manage.shards.owner import OwnerSettings
from doyen.manage.shards.slots import ERROR_BYTES, ShardTerm, _shortened
from doyen.model import encode_json
from support import Place, until, virtual
from test_shards import Jobs

SCRIPTS = ["the disk of this host is broken", "базы данных нет: " * 8]


@pytest.mark.parametrize("error", SCRIPTS, ids=["latin", "cyrillic"])
@virtual
async def test_all_shards_that_fail_on_a_member_move_from_it(place: Place, error: str) -> None:
    """However many they are, and whatever the exceptions say."""
    jobs = Jobs(place)
    await jobs.create(60, failures=1)

    async def body(term: ShardTerm) -> None:
        if term.name == "a":
            raise RuntimeError(error)
        await jobs.forever(term)

    jobs.body = body
    await jobs.join("a")
    await jobs.join("b")
    await until(lambda: jobs.loads() == {"b": 60}, 120.0)
    assert not jobs.plan().aside
    assert set(jobs.plan().failed.values()) == {("a",)}


@virtual
async def test_many_moves_at_once_are_all_reported(place: Place) -> None:
    jobs = Jobs(place)
    await jobs.create(2000, moves_at_once=2000)
    await jobs.join("a")
    await jobs.settled(2000, 60.0)
    await jobs.join("b", address="x" * 900)
    await until(lambda: jobs.loads() == {"a": 1001, "b": 999}, 200.0)
    assert not jobs.plan().slow
    await asyncio.sleep(1.0)
    assert not jobs.plan().moves


@pytest.mark.parametrize("text", ["short", "x" * 200, "данных" * 40, '"\\' * 80], ids=len)
def test_errors_are_shortened_by_the_bytes_that_they_take(text: str) -> None:
    shown = _shortened(text)
    assert text.startswith(shown)
    assert len(encode_json(shown)) <= ERROR_BYTES
    assert shown == text or len(encode_json(text[: len(shown) + 1])) > ERROR_BYTES


def test_an_address_that_leaves_no_room_for_reports_is_refused() -> None:
    with pytest.raises(ConfigError, match="room for what it reports"):
        OwnerSettings(shards="jobs", name="a", address="x" * 2000)
