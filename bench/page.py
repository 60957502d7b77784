"""The pages in Chromium: how soon the page of a store shows something, and a change; what it costs
the store; how large a page of the lab is; and how many frames a second both draw.

The store is a quorum of three nodes, and `doyen dash` and the browser are processes of their own,
all on this machine. A change happens when the write that decides it is sent, and is on the screen
when the frame after it has been drawn. Frames are those that Chromium's compositor reports in its
trace (`DrawFrame`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.figures import Figure, spread
from doyen.lab.pages.film import record_run
from doyen.lab.pages.page import write_page
from doyen.lab.plan import Latencies, Plan
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


SCROLL = """async seconds => {
    const node = document.getElementById('scroll'), until = performance.now() + seconds * 1000;
    while (performance.now() < until) {
        node.scrollTop = (node.scrollTop + 97) % (node.scrollHeight - node.clientHeight);
        await new Promise(done => requestAnimationFrame(done));
    }
}"""
TRACED = ["-*", "devtools.timeline", "disabled-by-default-devtools.timeline.frame"]
TRACED += ["devtools.timeline.frame"]
FRAMES = 60.0
"""Frames a second: as many as Chromium draws on a screen of 60 Hz. A count over some seconds may
lack one or two at its ends."""


def page(
    elections: int = 1000,
    loads: int = 5,
    changes: int = 100,
    pages: int = 5,
    crowd: int = 5000,
    events: int = 20_000,
    seconds: float = 5.0,
) -> list[Figure]:
    """First rows of 1,000 elections, a change on the screen, watches, frames, pages of the lab"""
    with servers.Quorum() as quorum, tempfile.TemporaryDirectory() as folder:
        film = Path(folder) / "film.html"
        size = _write_film(film, events)
        found = asyncio.run(
            _measure(quorum.url, elections, loads, changes, pages, crowd, film, seconds)
        )
        return [*found, size]


def _write_film(path: Path, events: int) -> Figure:
    """Write the page of a busy run with so many events. The figure is its size."""
    plan = Plan(
        protocol="raft",
        nodes=5,
        seed=1,
        for_s=14.0 * events / 20_000,
        pause_s=0.02,
        latencies=Latencies(latency_s=0.004),
    )
    film = record_run(plan)[2]
    write_page(path, film)
    return Figure(
        name=f"page: size of a lab run of {events:,} events",
        value=path.stat().st_size / 1e6,
        unit="MB",
        limit=5.0,
        details={"events": film["events"]},
    )


async def _measure(
    url: str,
    elections: int,
    loads: int,
    changes: int,
    pages: int,
    crowd: int,
    film: Path,
    seconds: float,
) -> list[Figure]:
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
        scrolled = await _scrolled(browser, opened[0], store, lease, elections, crowd, seconds)
        await opened[0].close()
        played = await _played(browser, film, seconds)
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
        scrolled,
        played,
    ]


async def _frames(browser: Any, shown: Any, work: Awaitable[Any]) -> dict[str, float]:
    """What Chromium says about the frames of a page while something is done: how many it drew and
    dropped in a second, and the processor time of the main thread for each."""
    devtools = await shown.context.new_cdp_session(shown)
    await devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    async def used() -> float:
        metrics = (await devtools.send("Performance.getMetrics"))["metrics"]
        return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")

    before = await used()
    await browser.start_tracing(page=shown, categories=TRACED)
    began = time.monotonic()
    await work
    lasted = time.monotonic() - began
    events = json.loads(await browser.stop_tracing())["traceEvents"]
    spent = await used() - before
    drawn = [each["ts"] for each in events if each["name"] == "DrawFrame"]
    dropped = sum(each["name"] == "DroppedFrame" for each in events)
    between = (max(drawn) - min(drawn)) / 1e6 if len(drawn) > 1 else lasted
    return {
        "a second": (len(drawn) - 1) / between,
        "dropped": dropped / lasted,
        "ms of processor in each": spent / max(1, len(drawn)) * 1000,
    }


async def _scrolled(
    browser: Any,
    shown: Any,
    store: QuorumStore,
    lease: Lease,
    elections: int,
    crowd: int,
    seconds: float,
) -> Figure:
    """Scroll through a long list while twenty elections change in a second."""
    later = range(elections, crowd)
    for at in range(0, len(later), 500):
        some = later[at : at + 500]
        await asyncio.gather(*(_elect(store, lease, f"e{n:04d}", "a") for n in some))
    await shown.wait_for_function(
        "many => +document.getElementById('count').textContent.match(/[\\d,]+$/)?.[0]"
        ".replaceAll(',', '') === many",
        arg=max(crowd, elections),
        timeout=120_000,
    )

    async def change() -> None:
        for number in range(int(seconds * 20)):
            election = f"e{number % crowd:04d}"
            await store.delete(leader_key(election))
            await _elect(store, lease, election, f"c{number}")
            await asyncio.sleep(0.05)

    changing = asyncio.ensure_future(change())
    frames = await _frames(browser, shown, shown.evaluate(SCROLL, seconds))
    await changing
    return Figure(
        name=f"page: frames, {max(crowd, elections):,} elections scrolled",
        value=frames["a second"],
        unit="a second",
        limit=FRAMES * 0.97,
        at_least=True,
        details=frames,
    )


async def _played(browser: Any, film: Path, seconds: float) -> Figure:
    """Play a page of the lab as fast as one can."""
    shown = await browser.new_page(viewport={"width": 1440, "height": 1000})
    await shown.goto(film.as_uri())
    await shown.locator("#speed button").last.click()
    await shown.keyboard.press("Home")
    await shown.click("#go")
    frames = await _frames(browser, shown, asyncio.sleep(seconds))
    await shown.close()
    return Figure(
        name="page: frames of a lab run that is played",
        value=frames["a second"],
        unit="a second",
        limit=FRAMES * 0.97,
        at_least=True,
        details=frames,
    )


async def _elect(store: QuorumStore, lease: Lease, election: str, name: str) -> int:
    claim = Claim(name, f"{name}-{election}", {}, 0, time.time(), LEASE_S)
    created = await store.create(leader_key(election), claim.encode(), lease)
    return created.entry.revision


async def _watches(store: QuorumStore) -> int:
    return sum(state.condition.watches for state in await store.inspect() if state.condition)


async def _changes(shown: Any, store: QuorumStore, lease: Lease, changes: int) -> list[float]:
    """The milliseconds from the write that decides until it is on the screen."""
    await shown.evaluate(OBSERVE)
    happened: dict[int, float] = {}
    replaced: dict[int, float] = {}
    tokens: dict[str, int] = {}
    for number in range(changes):
        election = f"e{number % 15:04d}"
        began = time.time() * 1000
        if election in tokens:
            replaced[tokens[election]] = began
        await store.delete(leader_key(election))
        began = time.time() * 1000
        tokens[election] = token = await _elect(store, lease, election, f"b{number}")
        happened[token] = began
        await asyncio.sleep(0.05)
    drawn: dict[str, float | None] = {}
    async with asyncio.timeout(30):
        while any(drawn.get(str(token)) is None for token in list(happened)[-15:]):
            await asyncio.sleep(0.1)
            drawn = await shown.evaluate("() => window.drawn")
    # A term that was replaced before it was drawn counts as late as that.
    seen = {token: drawn.get(str(token)) or replaced[token] for token in happened}
    return [max(0.0, at - happened[token]) for token, at in seen.items()]


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
