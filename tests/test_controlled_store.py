"""The fixture `doyen_store`: leaders that lose, freeze and cannot reach their store."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import doyen
from doyen.errors import ConfigError, LeadershipLost, OutcomeUnknown, StoreUnavailable
from doyen.lease.runtime import ThreadRuntime
from doyen.testing import ControlledStore
from doyen.testing.faults import RefusedCall
from support import until_blocking


def test_a_leader_loses_and_is_elected_again(doyen_store: ControlledStore) -> None:
    tokens: list[int] = []
    with (
        doyen.connect_blocking() as session,
        session.candidate("e", name="a", on_elected=lambda term: tokens.append(term.token)),
    ):
        first = doyen_store.wait_for_leader("e")
        until_blocking(lambda: tokens)
        assert doyen_store.lose("e") == first
        second = doyen_store.wait_for_leader("e", after=first)
        until_blocking(lambda: len(tokens) == 2)
        assert tokens == [first.token, second.token]
    with pytest.raises(AssertionError, match="no leader of 'e'"):
        doyen_store.lose("e")


async def test_a_body_is_cancelled_by_a_loss(doyen_store: ControlledStore) -> None:
    async with doyen.connect(doyen_store.url) as session:
        with pytest.raises(LeadershipLost):
            async with session.campaign("e"):
                doyen_store.lose("e")
                await asyncio.sleep(60.0)


async def test_a_frozen_leader_finds_a_successor(doyen_store: ControlledStore) -> None:
    """Its term was over before the successor was elected, whose token is higher."""
    async with doyen.connect(doyen_store.url) as session:
        with pytest.raises(LeadershipLost):
            async with session.campaign("e", name="a") as term:
                assert term.valid
                doyen_store.freeze(successor="b")
                assert not term.valid
                await asyncio.sleep(60.0)
        leader = doyen_store.leader("e")
        assert leader is not None
        assert leader.name == "b"
        assert leader.token > term.token
        with pytest.raises(doyen.NotElected):
            async with session.campaign("e", name="a", wait_s=0.0):
                pass
        doyen_store.resign_other("e")
        async with session.campaign("e", name="a") as again:
            assert again.token > leader.token


async def test_a_short_freeze_ends_nothing(doyen_store: ControlledStore) -> None:
    async with doyen.connect(doyen_store.url) as session, session.campaign("e") as term:
        doyen_store.freeze(1.0, successor="b")
        assert term.valid


@pytest.mark.parametrize("silent", [False, True])
def test_a_store_that_fails(doyen_store: ControlledStore, silent: bool) -> None:
    """The leader keeps its term until the deadline, and is elected again when the store is back."""
    with doyen.connect_blocking(request_timeout_s=0.2) as session:
        with pytest.raises(LeadershipLost), session.campaign("e", name="a") as term:
            doyen_store.fail(silent=silent)
            with pytest.raises((StoreUnavailable, OutcomeUnknown)):
                session.leader("e")
            assert term.valid
            doyen_store.freeze()
            assert not term.valid
            doyen_store.heal()
        with session.campaign("e", name="a") as again:
            assert again.token > term.token


def test_single_calls_fail(doyen_store: ControlledStore) -> None:
    with doyen.connect_blocking() as session:
        doyen_store.faults.next("get", RefusedCall())
        with pytest.raises(StoreUnavailable):
            session.leader("e")
        assert session.leader("e") is None


def test_another_process_leads(doyen_store: ControlledStore) -> None:
    other = doyen_store.elect_other("e", meta={"url": "http://b"})
    with doyen.connect_blocking() as session:
        assert session.leader("e") == doyen_store.leader("e")
        assert other.meta == {"url": "http://b"}
        with pytest.raises(AssertionError, match="'other' leads 'e': freeze"):
            doyen_store.elect_other("e", "third")
        doyen_store.resign_other("e")
        assert session.leader("e") is None
    with pytest.raises(AssertionError, match="no other process leads"):
        doyen_store.resign_other("e")
    with pytest.raises(AssertionError, match=r"no leader of 'e' after token \d+ after 0 s"):
        doyen_store.wait_for_leader("e", after=other, within_s=0.0)


def test_what_was_left_open_is_closed_and_all_is_as_before() -> None:
    """A worker that never ends, such as while_leader on a thread, ends with the fixture."""
    before = os.environ.get("DOYEN_STORE")
    store = ControlledStore()

    @doyen.while_leader("e")
    def work(term: doyen.Term) -> None:
        while term.valid:
            pass

    def worker() -> None:
        with pytest.raises(doyen.SessionClosed):
            work()

    with store.installed():
        thread = threading.Thread(target=worker)
        thread.start()
        store.wait_for_leader("e")
        with pytest.raises(ConfigError, match="a session is open already"), store.installed():
            pass
    thread.join(5.0)
    assert not thread.is_alive()
    assert not ThreadRuntime._shared
    assert os.environ.get("DOYEN_STORE") == before
    with pytest.raises(ConfigError, match="no store for controlled://"):
        doyen.connect_blocking(store.url).open()


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    """With the plugin as users have it, and no other fixture."""
    page = Path(__file__).parents[1] / "docs/testing.md"
    blocks = page.read_text().split("```python\n# ")[1:]
    for block in blocks:
        name, _, rest = block.partition("\n")
        (tmp_path / name).write_text(rest.partition("```")[0])
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stdout
    assert "4 passed" in run.stdout
