"""A server that is frozen, its sockets open: observers and commands say so within a ttl, and show
the present state when it goes on."""

from __future__ import annotations

import asyncio
import json
import os
import time

import pytest

import doyen
from candidates import following
from doyen import Unreachable
from doyen.model import Leader
from engines import ENGINES
from servers import Server
from stalls import stalled_s, waits_of
from support import until

SLACK_S = 1.0
"""On top of the time for which the processes were ready to run and got no processor."""


@pytest.mark.parametrize(
    "engine",
    [pytest.param(each, marks=[pytest.mark.chaos] * (each != "redis")) for each in sorted(ENGINES)],
)
async def test_a_frozen_server_is_noticed(engine: str) -> None:
    with ENGINES[engine].start() as server:
        await check(server, ENGINES[engine].ttl_s)


async def check(server: Server, ttl_s: float) -> None:
    seen: list[tuple[Leader | Unreachable[Leader] | None, float]] = []

    async def observe(session: doyen.Session) -> None:
        async for leader in session.observe("frozen"):
            seen.append((leader, time.time()))  # noqa: PERF401 - as it comes

    async with doyen.connect(server.url, ttl_s=ttl_s) as session, asyncio.timeout(60):
        default_s = session._opened.store.capabilities.ttl_default_s
        observing = asyncio.create_task(observe(session))
        await until(lambda: seen)
        with (
            following("watch", "frozen", "--store", server.url) as text,
            following("line", "frozen", "--watch", "--json", "--store", server.url) as lines,
        ):
            await asyncio.to_thread(text.until, "frozen has no leader\n")
            await asyncio.to_thread(lines.until, "\n")
            processes = [os.getpid()], [lines.process.pid]
            before = [waits_of(pids) for pids in processes]

            def stalls_s() -> float:
                return SLACK_S + stalled_s(before, [waits_of(pids) for pids in processes])

            server.freeze()
            frozen_at = time.time()
            try:
                lost = json.loads(await asyncio.to_thread(lines.until, "\n"))
                assert time.time() - frozen_at <= default_s + stalls_s()
                await asyncio.to_thread(text.until, "unreachable since .*last known: frozen has no")
            finally:
                server.thaw()
            assert lost["as_of"] == lost["unreachable_since"]
            assert frozen_at - default_s <= lost["unreachable_since"] <= frozen_at
            back = json.loads(await asyncio.to_thread(lines.until, "\n"))
            assert back["unreachable_since"] is None
            await asyncio.to_thread(text.until, "frozen has no leader\n")
            slack_s = stalls_s()
        await until(lambda: len(seen) > 2)
        observing.cancel()
    (first, _), (unreachable, told_at), (again, _) = seen
    assert (first, again) == (None, None)
    assert isinstance(unreachable, Unreachable)
    assert told_at - frozen_at <= ttl_s + slack_s
    assert frozen_at - ttl_s <= unreachable.since <= frozen_at
