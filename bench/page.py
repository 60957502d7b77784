"""The page of a store in Chromium: how soon it shows something, and how soon it shows a change.

The store is a quorum of three nodes, and `doyen dash` and the browser are processes of their own,
all on this machine. A change is on the screen when the frame after it has been drawn.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.figures import Figure, spread
from doyen.lease.clock import SystemClock
from doyen.model import Claim, Lease, leader_key
from doyen.stores.port import Context, open_store
from doyen.stores.quorum.store import QuorumStore

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import servers
from servers.chromium import chromium, chromium_environment

__all__ = ["page"]

LEASE_S = 600.0
FIRST = "() => performance.getEntriesByName('doyen-first-rows')[0]?.startTime ?? null"
PAINT = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
OBSERVE = """() => {
    window.drawn = {};
    const look = () => {
        for (const node of document.querySelectorAll('.row:not([hidden]) .tok')) {
            const token = node.textContent;
            if (token in window.drawn) continue;
            window.drawn[token] = null;
            requestAnimationFrame(() => setTimeout(() => {
                window.drawn[token] = performance.timeOrigin + performance.now();
            }));
        }
    };
    look();
    const all = { subtree: true, childList: true, characterData: true };
    new MutationObserver(look).observe(document.getElementById('pad'), all);
}"""


def page(elections: int = 1000, loads: int = 5, changes: int = 100, pages: int = 5) -> list[Figure]:
    """First rows of 1,000 elections, a change on the screen, watches per election (browser)"""
    with servers.Quorum() as quorum:
        return asyncio.run(_measure(quorum.url, elections, loads, changes, pages))


async def _measure(url: str, elections: int, loads: int, changes: int, pages: int) -> list[Figure]:
    from playwright.async_api import async_playwright

    store = await open_store(url, Context(SystemClock(), lambda event: None))
    assert isinstance(store, QuorumStore)
    lease = await store.grant(LEASE_S)
    await asyncio.gather(*(_elect(store, lease, f"e{n:04d}", "a") for n in range(elections)))
    before = await _watches(store)
    program = chromium()
    async with _dash(url) as address, async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=program.path,
            env=dict(chromium_environment(program)),
            args=["--no-sandbox", "--disable-gpu"],
        )
        while await _watches(store) - before < elections:
            await asyncio.sleep(0.1)
        first, paint = [], []
        for _ in range(loads):
            shown = await browser.new_page(viewport={"width": 1440, "height": 1000})
            await shown.goto(address)
            await shown.locator("#list .row:not([hidden])").first.wait_for()
            first.append(await shown.evaluate(FIRST))
            paint.append(await shown.evaluate(PAINT))
            await shown.close()
        opened = [await browser.new_page() for _ in range(pages)]
        for each in opened:
            await each.goto(address)
            await each.locator("#list .row:not([hidden])").first.wait_for()
        watches = await _watches(store) - before
        for each in opened[1:]:
            await each.close()
        times = await _changes(opened[0], store, lease, min(changes, elections))
        await browser.close()
    await store.close()
    worst = sorted(times)[int(len(times) * 0.95)]
    many = f"{elections:,} elections"
    return [
        Figure(
            name=f"page: first rows of {many}, p50",
            value=statistics.median(first),
            unit="ms",
            limit=1000.0,
            details={"first rows": spread(first, 0), "first paint": spread(paint, 0)},
        ),
        Figure(
            name="page: a new leader on the screen, p95",
            value=worst,
            unit="ms",
            limit=100.0,
            details=spread(times, 0),
        ),
        Figure(
            name=f"page: watches for each election, {pages} pages open",
            value=watches / elections,
            unit="watches",
            limit=1.1,
            details={"watches": watches, "elections": elections},
        ),
    ]


async def _elect(store: QuorumStore, lease: Lease, election: str, name: str) -> int:
    claim = Claim(name, f"{name}-{election}", {}, 0, time.time(), LEASE_S)
    created = await store.create(leader_key(election), claim.encode(), lease)
    return created.entry.revision


async def _watches(store: QuorumStore) -> int:
    return sum(state.condition.watches for state in await store.inspect() if state.condition)


async def _changes(shown: Any, store: QuorumStore, lease: Lease, changes: int) -> list[float]:
    """The milliseconds from the answer to the write that decides until it is on the screen."""
    await shown.evaluate(OBSERVE)
    happened: dict[int, float] = {}
    for number in range(changes):
        election = f"e{number % 15:04d}"
        await store.delete(leader_key(election))
        token = await _elect(store, lease, election, f"b{number}")
        happened[token] = time.time() * 1000
        await asyncio.sleep(0.05)
    drawn: dict[str, float | None] = {}
    async with asyncio.timeout(30):
        while any(drawn.get(str(token)) is None for token in list(happened)[-15:]):
            await asyncio.sleep(0.1)
            drawn = await shown.evaluate("() => window.drawn")
    found = {token: drawn.get(str(token)) for token in happened}
    # A term that was replaced before its frame was drawn was never due on the screen.
    return [max(0.0, at - happened[token]) for token, at in found.items() if at is not None]


@asynccontextmanager
async def _dash(url: str) -> AsyncIterator[str]:
    command = [sys.executable, "-m", "doyen", "dash", "--store", url, "--listen", "127.0.0.1:0"]
    process = await asyncio.create_subprocess_exec(
        *command, "--json", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assert process.stdout is not None
    try:
        yield json.loads(await process.stdout.readline())["url"]
    finally:
        process.terminate()
        await process.wait()
