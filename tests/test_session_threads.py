"""Sessions on doyen's own threads: what only threads can show, on the system's clock.

The times are such that a busy machine can keep them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

import doyen
from doyen import LeadershipLost
from doyen.clock import SystemClock
from doyen.presence import Settings
from doyen.runtime import InlineRuntime, ThreadRuntime
from doyen.store import Context
from doyen.stores.memory import MemoryStore
from doyen.testing.faults import Faults, Late
from support import (
    gather_leaders,
    presence_of,
    real_server,
    real_session,
    until,
)


def test_a_blocked_loop_does_not_cost_the_leader_its_term() -> None:
    """The caller's loop stands still for longer than the ttl; doyen renews on its own thread."""

    async def main() -> None:
        session = doyen.connect("memory://blocked", ttl_s=1.0)
        async with session, session.campaign("e") as term:
            time.sleep(1.5)  # noqa: ASYNC251 - this is what is on trial
            assert term.valid
            await asyncio.sleep(0)
            assert term.valid

    asyncio.run(main())


def test_renewing_on_the_callers_loop_would_lose_it() -> None:
    """The same on one loop: what the thread is for."""

    async def main() -> None:
        clock = SystemClock()
        store = MemoryStore(real_server(), Context(clock, lambda event: None))
        settings = Settings(url="memory://", ttl_s=1.0)
        async with doyen.Session(settings, InlineRuntime(clock), store) as session:
            with pytest.raises(LeadershipLost):
                async with session.campaign("e") as term:
                    time.sleep(1.5)  # noqa: ASYNC251 - this is what is on trial
                    assert not term.valid

    asyncio.run(main())


def test_the_watchdog_trips_although_doyens_own_loop_hangs() -> None:
    """A store adapter that blocks, say: the body is told in time by a thread that does no I/O."""

    async def main() -> None:
        async with doyen.connect("memory://hung", ttl_s=1.0) as session:
            release = threading.Event()

            def hang() -> None:
                release.wait(30)

            try:
                with pytest.raises(LeadershipLost, match="no renewal was confirmed in time"):
                    async with session.campaign("e") as term:
                        deadline = term.valid_until
                        presence_of(session).runtime.post(hang)
                        try:
                            await asyncio.sleep(30)
                        finally:
                            told_at = SystemClock().now()
                            release.set()
                assert deadline <= told_at < deadline + 1.0
            finally:
                release.set()

    asyncio.run(main())


def test_a_closed_loop_does_not_break_the_watchdog() -> None:
    """One body's loop is closed in mid-term. The watchdog's word to it goes nowhere; the body
    next to it, on the same lease, is told all the same."""
    server, faults = real_server(), Faults()

    async def main() -> None:
        async with real_session(server, faults, ttl_s=1.0) as session:
            gone = asyncio.new_event_loop()
            abandoned = await asyncio.to_thread(
                gone.run_until_complete, session.campaign("abandoned").__aenter__()
            )
            gone.close()
            with pytest.raises(LeadershipLost):
                async with session.campaign("e"):
                    faults.cut()
                    await asyncio.sleep(30)
            assert not abandoned.valid
            faults.heal()
            async with session.campaign("e", wait_s=5):
                pass
            # That scope can never be left; it would keep doyen's thread for ever.
            presence_of(session).runtime.release()

    asyncio.run(main())


def test_sessions_share_one_thread_that_ends_with_the_last() -> None:
    def threads() -> list[str]:
        return sorted(t.name for t in threading.enumerate() if t.name.startswith("doyen"))

    async def main() -> None:
        first, second = doyen.connect("memory://x"), doyen.connect("memory://y")
        async with first, second, first.campaign("e"), second.campaign("e"):
            assert threads() == ["doyen", "doyen-watchdog"]

    asyncio.run(main())
    assert threads() == []


def test_a_connection_cancelled_half_way_leaves_no_thread(tmp_path: Path) -> None:
    async def main() -> None:
        for _ in range(20):
            entering = asyncio.create_task(doyen.connect(f"sqlite:///{tmp_path}/d.db").__aenter__())
            await asyncio.sleep(0)
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering

    asyncio.run(main())
    assert ThreadRuntime._shared is None


def test_a_body_that_outlives_its_session_still_ends_in_loss() -> None:
    """doyen's thread goes on until the last scope is left."""

    async def main() -> None:
        entered, leave = asyncio.Event(), asyncio.Event()

        async def body() -> None:
            async with session.campaign("e"):
                entered.set()
                try:
                    await asyncio.sleep(30)
                finally:
                    await leave.wait()

        async with doyen.connect("memory://outlived", ttl_s=0.5) as session:
            task = asyncio.create_task(body())
            await entered.wait()
        leave.set()
        with pytest.raises(LeadershipLost, match="the session was closed"):
            await task

    asyncio.run(main())
    assert ThreadRuntime._shared is None


@pytest.mark.parametrize("scheme", ["memory", "sqlite"])
def test_the_whole_way_on_real_threads(scheme: str, tmp_path: Path) -> None:
    url = "memory://whole" if scheme == "memory" else f"sqlite:///{tmp_path}/doyen.db"
    seen: list[str | None] = []
    tokens: list[int] = []

    async def candidate(name: str) -> None:
        async with doyen.connect(url, ttl_s=2.0) as session:
            for _ in range(2):
                async with session.campaign("e", name=name) as term:
                    tokens.append(term.token)
                    leader = await session.leader("e")
                    assert leader is not None
                    assert (leader.name, leader.token) == (name, term.token)

    async def main() -> None:
        async with doyen.connect(url, ttl_s=2.0) as watcher:
            watching = asyncio.create_task(gather_leaders(watcher, seen))
            await until(lambda: seen == [None], 10)
            await asyncio.gather(*(candidate(name) for name in "abc"))
            await until(lambda: len(seen) > 1 and seen[-1] is None, 10)
            watching.cancel()

    asyncio.run(main())
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 6


def test_a_second_cancellation_does_not_stop_the_closing_on_threads() -> None:
    server, faults = real_server(), Faults()

    async def use() -> None:
        async with real_session(server, faults, ttl_s=2.0) as session, session.campaign("e"):
            faults.next("delete", Late(before_s=0.2))
            faults.next("revoke", Late(before_s=0.2))
            entered.set()
            await asyncio.sleep(30)

    async def main() -> None:
        task = asyncio.create_task(use())
        await entered.wait()
        while not task.done():
            task.cancel()
            await asyncio.sleep(0.01)
        assert task.cancelled()

    entered = asyncio.Event()
    asyncio.run(main())
    assert server._leases == {}
    assert ThreadRuntime._shared is None
