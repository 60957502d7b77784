"""A server that is frozen, its sockets open: observers and commands say so within a ttl, and show
the present state when it goes on."""

from __future__ import annotations

import asyncio
import json
import time

import doyen
from candidates import following
from doyen import Unreachable
from doyen.model import Leader
from doyen.stores.port import Capabilities
from servers import Redis
from support import until

TTL_S = Capabilities().ttl_default_s
SLACK_S = 1.0
"""For the processes of a busy machine."""


async def test_a_frozen_server_is_noticed(redis: Redis) -> None:
    seen: list[tuple[Leader | Unreachable[Leader] | None, float]] = []

    async def observe(session: doyen.Session) -> None:
        async for leader in session.observe("frozen"):
            seen.append((leader, time.time()))  # noqa: PERF401 - as it comes

    async with doyen.connect(redis.url, ttl_s=2.0) as session, asyncio.timeout(60):
        observing = asyncio.create_task(observe(session))
        await until(lambda: seen)
        with (
            following("watch", "frozen", "--store", redis.url) as text,
            following("line", "frozen", "--watch", "--json", "--store", redis.url) as lines,
        ):
            await asyncio.to_thread(text.until, "frozen has no leader\n")
            await asyncio.to_thread(lines.until, "\n")
            redis.freeze()
            frozen_at = time.time()
            try:
                lost = json.loads(await asyncio.to_thread(lines.until, "\n"))
                assert time.time() - frozen_at <= TTL_S + SLACK_S
                await asyncio.to_thread(text.until, "unreachable since .*last known: frozen has no")
            finally:
                redis.thaw()
            assert lost["as_of"] == lost["unreachable_since"]
            assert frozen_at - TTL_S <= lost["unreachable_since"] <= frozen_at
            back = json.loads(await asyncio.to_thread(lines.until, "\n"))
            assert back["unreachable_since"] is None
            await asyncio.to_thread(text.until, "frozen has no leader\n")
        await until(lambda: len(seen) > 2)
        observing.cancel()
    (first, _), (unreachable, told_at), (again, _) = seen
    assert (first, again) == (None, None)
    assert isinstance(unreachable, Unreachable)
    assert told_at - frozen_at <= 2.0 + SLACK_S
    assert frozen_at - 2.0 <= unreachable.since <= frozen_at
