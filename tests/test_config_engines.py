"""Configurations on real engines: a change reaches the subscribers, and its writer is told so."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

import doyen
from doyen import ConfigDocument
from fixtures import store_url

WITHIN_S = 30.0

url = store_url("sqlite", "etcd", "quorum")


async def apply(url: str, name: str, started: asyncio.Event, applied: list[int]) -> None:
    async with (
        doyen.connect(url) as session,
        session.config("engines", history=2).subscribe(name) as documents,
    ):
        started.set()
        async for document in documents:
            applied.append(document.version)  # noqa: PERF401 - one at a time


async def test_a_change_is_applied_kept_and_rolled_back(url: str) -> None:
    async with asyncio.timeout(WITHIN_S), doyen.connect(url) as session:
        config = session.config("engines", history=2)
        first = written = await config.set({"n": 0})
        started = [asyncio.Event() for _ in range(3)]
        applied: list[list[int]] = [[] for _ in started]
        subscribers = [
            asyncio.create_task(apply(url, f"s{n}", started[n], applied[n]))
            for n in range(len(started))
        ]
        for each in started:
            await each.wait()
        for n in range(1, 5):
            written = await config.set({"n": n}, wait_applied="all", wait_s=WITHIN_S)
            assert [versions[-1] for versions in applied] == [written.version] * len(applied)
        with pytest.raises(doyen.Conflict):
            await config.set({}, if_version=first.version)
        back = await config.rollback(written.version - 1, wait_applied="majority", wait_s=WITHIN_S)
        assert [each.value for each in await config.history()] == [{"n": 3}, {"n": 4}, {"n": 3}]
        async with aclosing(config.observe(since=first)) as changes:
            missed = await anext(changes)
            assert missed == doyen.Missed(first.version + 1, back.version - 3)
            seen = [await anext(changes) for _ in range(3)]
        assert [each.id for each in seen if isinstance(each, ConfigDocument)][-1] == back.id
        for task in subscribers:
            task.cancel()
        await asyncio.gather(*subscribers, return_exceptions=True)
