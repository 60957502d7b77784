"""The pages in a real browser: a quorum whose leaders are killed and frozen, a transfer by click, a
store that does not answer, 5,000 elections, hostile names, and foreign pages that are refused.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Browser, CDPSession, Page, expect

import doyen
import servers
import web_scene
from browser import browser, opened, picture
from doyen.cli import main
from doyen.errors import StoreUnavailable
from doyen.lease.clock import SystemClock
from doyen.manage.members import MemberValue
from doyen.model import Claim, Entry, leader_key
from doyen.stores import memory
from doyen.stores.memory import MemoryServer
from doyen.web.observation import StoreObservation
from doyen.web.serving import PageListener, PageThread, listen
from stalls import Stopwatch
from test_cli_up import Terminal, terminal

__all__ = ["browser"]

HOSTILE = ["<script>alert(1)</script>", "تقارير-يومية", "x" * 200, "a/b'\"&amp;", "%2e%2e"]
LONG = [f"{number} <b>تقارير</b> " * 700 for number in range(20)]
"""Longer than doyen lets a name be. Another program may have written it."""
TTL_S = 60.0


@contextmanager
def dash(
    url: str, *, port: int = 0, allow_actions: bool = False, audit: Sequence[Path] = ()
) -> Iterator[PageListener]:
    """The page of a store, served by a thread of this process."""
    listener = listen(f"127.0.0.1:{port}", allow_actions=allow_actions)
    thread = PageThread(lambda: StoreObservation(url, audit=audit), listener)
    thread.start()
    try:
        yield listener
    finally:
        thread.stop()
        listener.socket.close()
    assert thread.error is None


@contextmanager
def crowd(names: list[str], *, leader: str = "server1") -> Iterator[tuple[str, MemoryServer]]:
    """A memory store with elections of these names, each with a leader and two in line."""
    server = MemoryServer(SystemClock())
    memory._servers["crowd", 0] = server
    leases = [server.grant(TTL_S).id for _ in range(3)]
    for number, name in enumerate(names):
        elect(server, name, f"{leader}{number % 7 or ''}", leases[0])
        for place in (1, 2):
            waiting = Claim(f"server{number % 7 + place}", f"{number}-{place}", {"host": "job-1"})
            line = f"elections/{quote(name, safe='')}/line"
            server.enqueue(line, waiting.encode(), leases[place])
    try:
        yield "memory://crowd", server
    finally:
        del memory._servers["crowd", 0]


def elect(server: MemoryServer, election: str, name: str, lease: str) -> None:
    claim = Claim(name, f"{name}-{election}", {"host": "web-1"}, 0, time.time(), TTL_S)
    key = f"elections/{quote(election, safe='')}/leader"
    assert server.create(key, claim.encode(), lease).won


def row(page: Page, name: str) -> Any:
    return page.locator(".row:not([hidden])").filter(has=page.get_by_text(name, exact=True))


@contextmanager
def reading(shown: Terminal) -> Iterator[None]:
    """Read the terminal meanwhile: a program whose output is not read stands still."""
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            shown._read()

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_quorum_whose_leaders_are_killed_and_frozen(tmp_path: Path, browser: Browser) -> None:
    """`doyen up` beside its page: kill, freeze, resign and transfer by click."""
    with terminal(tmp_path, quorum=True) as shown:
        url = shown.seen(r"in a browser: (http://127\.0\.0\.1:\d+/#token=\S+)")[1]
        with reading(shown), opened(browser, url) as page:
            demo = row(page, "demo")
            token = demo.locator(".tok")
            expect(demo.locator(".dot")).to_have_class("dot ")
            expect(page.locator("#nodes-table .role.leader")).to_have_count(1)
            # Each node says how full its disk and its keyspace are, and how long its disk takes.
            expect(page.locator("#nodes-table .disk").filter(has_text="%")).to_have_count(3)
            expect(page.locator("#nodes-table td").filter(has_text="≤")).to_have_count(3)

            def led_anew(act: str, *, by_other: bool = True) -> None:
                """Click, and wait until another term is on the page."""
                expect(page.locator("#detail ol.line li")).to_have_count(2)
                before, who = int(token.inner_text()), demo.locator(".who").inner_text()
                page.locator(act.format(who=who)).click()
                expect(token).not_to_have_text(str(before))
                page.wait_for_function(
                    "before => +document.querySelector('.row .tok').textContent > before",
                    arg=before,
                )
                if by_other:
                    expect(demo.locator(".who")).not_to_have_text(who)

            led_anew("[data-process='ask {who}']")
            led_anew("[data-process='kill {who}']")
            expect(page.locator("#detail tbody tr")).to_have_count(2)
            failed = re.compile("process died|lease ran out")
            expect(page.locator("#detail tbody tr").first).to_contain_text(failed)
            expect(demo.locator(".lease .track")).to_be_visible()
            led_anew("[data-process='freeze {who}']")
            demo.locator(".lane .g").first.hover()
            expect(page.locator("#tip")).to_contain_text("Nobody led for")
            picture(page, "failovers")

            # A leader of the quorum dies; the page and the election go on.
            node = page.locator("#nodes-table tr", has=page.locator(".role.leader"))
            name = node.locator("td").first.inner_text()
            page.locator(f"[data-process='kill {name}']").click()
            expect(
                page.locator("#nodes-table tr", has_text=name).locator(".role")
            ).not_to_have_text("leader")
            expect(page.locator("#nodes-table .role.leader")).to_have_count(1)
            expect(page.locator("#health")).to_have_text("healthy")
            expect(page.locator("#nodes-table .role.silent")).to_have_count(0)

            # Transfer by click: nothing happens until it is confirmed.
            expect(page.locator("#detail ol.line li")).to_have_count(2)
            heir = page.locator("#detail ol.line li").nth(1).locator("span").nth(1).inner_text()
            before = token.inner_text()
            page.locator("#detail ol.line li").nth(1).get_by_text("Hand over").click()
            dialog = page.locator("dialog")
            expect(dialog).to_contain_text(f"Hand demo over to {heir}?")
            expect(dialog).to_contain_text(f"doyen transfer demo --to {heir}")
            expect(dialog.get_by_text("Leave as it is")).to_be_focused()
            picture(page, "transfer")
            page.keyboard.press("Enter")
            expect(dialog).to_be_hidden()
            expect(token).to_have_text(before)
            page.locator("#detail ol.line li").nth(1).get_by_text("Hand over").click()
            dialog.get_by_text(f"Hand over to {heir}").click()
            expect(demo.locator(".who")).to_have_text(heir)
            expect(page.locator("#toasts")).to_contain_text(f"{heir} leads demo")
            expect(page.locator("#detail tbody tr").first).to_contain_text("handed over")
            picture(page, "dash")
        shown.press("q")
        shown.ends()  # the audit logs prove that there was one leader at a time


def test_a_store_that_does_not_answer(browser: Browser) -> None:
    """Within a ttl the page says since when, shows what it knew, and its actions are off."""
    with (
        suppress(doyen.LeadershipLost),  # which is as it should be
        servers.Quorum() as quorum,
        dash(quorum.url, allow_actions=True) as listener,
        doyen.connect_blocking(quorum.url) as session,
        session.campaign("billing", name="a"),
        opened(browser, listener.url) as page,
    ):
        expect(row(page, "billing").locator(".who")).to_have_text("a")
        expect(page.locator("#act-resign")).to_be_enabled()
        expect(page.locator("#banner")).to_be_hidden()
        # Beside other panels, those of the columns are left out that matter less than the disk.
        expect(page.locator("#nodes-table .disk")).not_to_have_count(0)
        assert all(page.evaluate(FITS, width) for width in (430, 560, 640, 700))
        quorum.freeze()
        silent = Stopwatch()
        expect(page.locator("#banner")).to_be_visible()
        assert silent.elapsed_s() < 5.0
        expect(page.locator("#banner")).to_contain_text("Store unreachable since")
        expect(page.locator("#banner")).to_contain_text("last known, as of")
        expect(page.locator("#health")).to_have_text("unreachable")
        expect(page.locator("#act-resign")).to_be_disabled()
        expect(row(page, "billing").locator(".lane .u")).to_have_count(1)
        expect(row(page, "billing").locator(".who")).to_have_text("unknown")
        expect(page.locator("#s-led")).to_have_text("\u2013 of 1, 1 unknown")
        expect(page.locator("#nodes-table .role.silent")).to_have_count(3)
        expect(page.locator("#nodes-table tbody tr").first).to_contain_text("n1")
        picture(page, "unreachable")
        quorum.thaw()
        expect(page.locator("#banner")).to_be_hidden()
        expect(page.locator("#health")).to_have_text("healthy")


def test_a_page_whose_server_has_gone(browser: Browser) -> None:
    quiet = ("Failed to load", "net::")
    with ExitStack() as stack:
        with crowd(["billing"]) as (url, server), dash(url) as listener:
            member = MemberValue("m", "1", "s", "b", TTL_S, time.time(), "up", "", {})
            server.create("members/workers/m", member.encode(), server.grant(TTL_S).id)
            page = stack.enter_context(opened(browser, listener.url, allowed_errors=quiet))
            expect(page.locator("#health")).to_have_text("healthy")
            expect(page.locator("#groups .mem")).to_have_count(1)
        expect(page.locator("#banner")).to_contain_text("This page has lost its server")
        expect(page.locator("#banner-why")).to_have_text("it cannot be reached")
        expect(page.locator("#health")).to_have_text("page offline")
        expect(page.locator("#retry")).to_be_visible()
        # The next server on that port shows another store: nothing of the first one stays.
        with crowd(["reports"]) as (url, server), dash(url, port=listener.port):
            # Without waiting until it can be seen: the page also tries again by itself.
            page.locator("#retry").dispatch_event("click")
            expect(row(page, "reports")).to_be_visible()
            expect(row(page, "billing")).to_have_count(0)
            expect(page.locator("#groups")).to_be_hidden()
            expect(page.locator("#banner")).to_be_hidden()


def test_a_page_that_nobody_sees_gives_up_its_connection(browser: Browser) -> None:
    """A browser has six connections to a server for all its tabs: the seventh would not open."""
    hide = """hidden => {
        Object.defineProperty(document, 'hidden', { get: () => hidden, configurable: true });
        document.dispatchEvent(new Event('visibilitychange'));
    }"""
    with (
        crowd(["billing"]) as (url, server),
        dash(url) as listener,
        opened(browser, listener.url) as page,
    ):
        expect(page.locator("#health")).to_have_text("healthy")
        page.keyboard.press("1")
        expect(page.locator("#scroll")).to_be_focused()
        # What is selected to be copied is not drawn anew.
        page.evaluate("getSelection().selectAllChildren(document.querySelector('#detail .tok'))")
        chosen = page.evaluate("getSelection().toString()")
        with page.expect_event("requestfailed"):
            page.evaluate(hide, True)
        expect(page).to_have_title(re.compile("^paused: "))
        expect(page.locator("#banner")).to_be_hidden()
        assert page.evaluate("getSelection().toString()") == chosen
        server.delete(leader_key("billing"))
        page.evaluate(hide, False)
        expect(row(page, "billing").locator(".who")).to_have_text("nobody")
        expect(page.locator("#health")).to_have_text("healthy")
        # So does one that was opened in the background.
        page.add_init_script(
            "Object.defineProperty(document, 'hidden', { get: () => true, configurable: true })"
        )
        with page.expect_event("requestfailed"):
            page.reload()
        expect(page).to_have_title(re.compile("^paused: "))
        page.evaluate(hide, False)
        expect(page.locator("#health")).to_have_text("healthy")


def test_a_page_that_may_not_be_read_says_so(browser: Browser) -> None:
    listener = listen("127.0.0.1:0")
    listener = replace(listener, access=replace(listener.access, reading_needs_token=True))
    thread = PageThread(lambda: StoreObservation("memory://x"), listener)
    thread.start()
    try:
        address = listener.url.partition("#")[0]
        with opened(browser, address, allowed_errors=("401",)) as page:
            expect(page.locator("#health")).to_have_text("refused")
            expect(page.locator("#banner-what")).to_have_text("The server refuses this page")
            expect(page.locator("#banner-why")).to_contain_text("open the address as printed")
            expect(page.locator("#banner-when")).to_be_hidden()
            expect(page.locator("#banner-stale")).to_be_hidden()
    finally:
        thread.stop()
        listener.socket.close()


def test_a_list_that_cannot_be_read_although_the_store_answers(
    browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    with crowd(["billing", " "]) as (url, server), dash(url) as listener:
        whole = server.list

        def refused(prefix: str) -> list[Entry]:
            if prefix == "elections":
                raise StoreUnavailable("<b>too much</b> to list")
            return whole(prefix)

        with opened(browser, listener.url) as page:
            expect(row(page, "billing")).to_be_visible()
            expect(row(page, "“ ”")).to_be_visible()  # a name of blanks can be seen
            expect(page.locator("#partial")).to_be_hidden()
            with monkeypatch.context() as patched:
                patched.setattr(server, "list", refused)
                expect(page.locator("#partial")).to_contain_text(
                    re.compile(
                        r"the list of elections and locks, last read at [\d:]+ \(<b>too much"
                    )
                )
                expect(page.locator("#health")).to_have_text("healthy")
            expect(page.locator("#partial")).to_be_hidden()


def test_five_thousand_elections_and_hostile_names(browser: Browser) -> None:
    hostile = [*HOSTILE, *LONG]
    names = [*hostile, *(f"cdc/orders-{number:04d}" for number in range(5000 - len(hostile)))]
    alerts: list[str] = []
    with (
        crowd(names, leader="<img src=x onerror=alert(2)>\u202e" + "y" * 10_000) as (url, server),
        dash(url) as listener,
        opened(browser, listener.url) as page,
    ):
        page.on("dialog", lambda dialog: alerts.append(dialog.message))
        expect(page.locator("#count")).to_contain_text("of 5,000")
        # Clocks of two machines differ a little: that is no time with two leaders.
        assert page.evaluate(DRAWN, 0) == [1, 0]
        assert page.evaluate(DRAWN, 1e9) == [0, 1]
        assert page.locator(".row").count() < 60, "only what fits is in the document"
        assert page.evaluate(ALIGNED), "the newest seconds are not behind the scroll bar"
        page.locator("#scroll").focus()
        page.keyboard.press("End")
        expect(row(page, names[-1])).to_be_visible()
        page.keyboard.press("/")
        page.keyboard.type("script")
        expect(page.locator("#count")).to_have_text("1 of 5,000 match")
        expect(row(page, HOSTILE[0])).to_be_visible()
        page.keyboard.press("Enter")
        expect(page.locator("#detail h2")).to_have_text(HOSTILE[0])
        for name in HOSTILE:
            page.locator("#filter").fill(name)
            expect(row(page, name)).to_be_visible()
        page.locator("#filter").fill("<b>تقارير</b>")
        expect(page.locator("#count")).to_have_text("20 of 5,000 match")
        # Their leases are looked at, and their lines are read, as those of others.
        for shown in page.locator(".row:not([hidden]) .lease .track").all():
            expect(shown).to_be_visible()
        page.keyboard.press("Enter")
        expect(page.locator("#detail h2")).to_contain_text("<b>تقارير</b>")
        expect(page.locator("#detail ol.line .faint").first).to_have_text("job-1")
        page.locator("#filter").fill("")
        assert page.locator("main img").count() == 0
        # A candidate cannot turn the direction of what follows its name.
        assert "\u202e" not in page.locator("main").inner_text()
        page.locator(".row:not([hidden]) .lane .t").first.hover()
        expect(page.locator("#tip")).to_contain_text("\ufffd")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        picture(page, "hostile")

        # While the list is scrolled through and hundreds of elections change, each frame costs a
        # few layouts of the rows that are shown. Frame times are measured by the benchmarks.
        session = page.context.new_cdp_session(page)
        session.send("Performance.enable")
        before = metrics(session)
        changing = threading.Thread(target=depose, args=(server, names[100:400]))
        changing.start()
        frames = page.evaluate(SCROLL)
        changing.join()
        after = metrics(session)
        assert after["LayoutCount"] - before["LayoutCount"] < 6 * frames
        assert page.evaluate("document.querySelectorAll('*').length") < 1500
        expect(page.locator("#s-gap")).to_have_text("300")
        stayed, kept = page.evaluate(KEPT)
        assert kept == stayed > 10, "only the rows that scrolling brings in are filled"

        # In another order than by name, the rows are sorted twice a second, not at every change.
        page.locator("[data-sort=last]").click()
        page.evaluate(COUNT_SORTS)
        began = time.monotonic()
        for name in names[400:500]:
            server.delete(leader_key(name))
            page.evaluate("new Promise(requestAnimationFrame)")
        expect(page.locator("#s-gap")).to_have_text("400")
        assert page.evaluate("sorts") <= 2 * (time.monotonic() - began) + 2
        assert not alerts


FITS = """width => {
    const panel = document.getElementById('nodes'), body = panel.querySelector('.body');
    panel.style.width = `${width}px`;
    return body.scrollWidth <= body.clientWidth;
}"""
ALIGNED = """() => {
    const [axis, lane] = ['#axis', '.row:not([hidden]) .lane'].map(
        each => document.querySelector(each).getBoundingClientRect());
    return axis.left === lane.left && axis.right === lane.right;
}"""
DRAWN = """async tolerance => {
    const { drawLane } = await import('/assets/timeline.js'), lane = document.createElement('div');
    const terms = [['a', 1, 0, 10.02, 'expired', '', true], ['b', 2, 10, 20, 'released', '', true]];
    drawLane(lane, terms, { from: 0, to: 30, known: 30, tolerance }, 300);
    return ['.upper', '.g'].map(each => lane.querySelectorAll(each).length);
}"""
KEPT = """async () => {
    const node = document.getElementById('scroll');
    const shown = () => new Map([...node.querySelectorAll('.row:not([hidden])')].map(
        each => [each.row.key, each]));
    const before = shown();
    node.scrollTop += 81;
    await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
    const stayed = [...shown()].filter(([key]) => before.has(key));
    return [stayed.length, stayed.filter(([key, each]) => before.get(key) === each).length];
}"""
COUNT_SORTS = """() => {
    window.sorts = 0;
    const sort = Array.prototype.sort;
    Array.prototype.sort = function (by) {
        sorts += this.length > 1000;
        return sort.call(this, by);
    };
}"""
SCROLL = """async () => {
    const node = document.getElementById('scroll');
    for (let k = 0; k < 60; k++) {
        node.scrollTop += 997;
        await new Promise(done => requestAnimationFrame(done));
    }
    return 60;
}"""


def metrics(session: CDPSession) -> dict[str, float]:
    """Chromium's own figures."""
    found = session.send("Performance.getMetrics")["metrics"]
    return {each["name"]: each["value"] for each in found}


def depose(server: MemoryServer, names: list[str]) -> None:
    for name in names:
        server.delete(leader_key(name))


def test_groups_shards_and_configurations(tmp_path: Path, browser: Browser) -> None:
    with (
        web_scene.scene(tmp_path) as log,
        dash(web_scene.URL, allow_actions=True, audit=[log]) as listener,
        opened(browser, listener.url, viewport={"width": 1440, "height": 960}) as page,
    ):
        expect(page.locator("#list .row:not([hidden])")).to_have_count(10)
        expect(page.locator("#groups .mem")).to_have_count(6)
        expect(page.locator("#shards-sub")).to_contain_text("48 shards")
        expect(page.locator("#shards-state")).to_have_text("at rest")
        expect(page.locator("#owners .n")).to_have_text(["16", "16", "16"])
        expect(row(page, "billing").locator(".lane .t")).not_to_have_count(1)
        row(page, "billing").click()
        expect(page.locator("#detail h2")).to_have_text("billing")
        expect(page.locator("#detail .spark")).to_be_visible()
        gaps = page.locator(".lane .g")
        gaps.nth(2).hover()
        expect(page.locator("#tip")).to_contain_text("Nobody led for")
        picture(page, "page")
        page.mouse.move(5, 5)

        # By the keyboard: a member, whose row stays although it renews, and a shard.
        page.locator("#groups .mem").first.focus()
        expect(page.locator("#tip")).to_contain_text("incarnation")
        beats = page.locator("#groups .mem").first.locator(".beat")
        seen = beats.inner_html()
        page.wait_for_function(
            "([node, seen]) => node.innerHTML !== seen", arg=[beats.element_handle(), seen]
        )
        expect(page.locator("#groups .mem").first).to_be_focused()
        page.locator("#map").focus()
        page.keyboard.press("Home")
        page.keyboard.press("ArrowRight")
        expect(page.locator("#tip")).to_contain_text("Shard 1")
        expect(page.locator("#spoken")).to_contain_text("Shard 1")

        # Move a shard: choose it on the map, and confirm.
        page.locator("#map").click(position={"x": 5, "y": 5})
        dialog = page.locator("dialog")
        expect(dialog).to_contain_text("Move a shard of orders?")
        target = dialog.locator("select").input_value()
        dialog.get_by_text("Move it").click()
        expect(page.locator("#toasts")).to_contain_text(f"{target} owns shard 0 of orders")
        # Drain a member.
        page.locator(".owner", has_text="worker-2").get_by_text("Drain…").click()
        expect(dialog).to_contain_text("gets the weight 0")
        dialog.get_by_text("Drain worker-2", exact=True).click()
        expect(page.locator("#toasts")).to_contain_text("worker-2 owns no shard of orders any more")
        expect(page.locator(".owner", has_text="worker-2").locator(".n")).to_have_text("0")
        expect(page.locator(".owner", has_text="worker-2")).to_contain_text("drained")

        # A configuration: its history, and what changed.
        expect(page.locator("#configs tbody tr")).to_contain_text("2 of 2")
        page.locator("#configs").get_by_text("billing").click()
        expect(dialog.locator(".history button")).to_have_count(3)
        expect(dialog.locator(".diff .minus")).to_have_text('-   "batch": 100,')
        expect(dialog.locator(".diff .plus")).to_have_text('+   "batch": 250,')
        picture(page, "configuration")
        dialog.locator(".history button").nth(1).click()
        expect(dialog).to_contain_text("Version 2, compared with version 1.")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()


def test_a_foreign_page_can_neither_read_nor_act(browser: Browser) -> None:
    with (
        crowd(["billing"]) as (url, server),
        dash(url, allow_actions=True) as listener,
        elsewhere() as other,
    ):
        own = f"http://127.0.0.1:{listener.port}"
        token = listener.access.token
        # A name of others that resolves to this address.
        context = browser.new_context()
        page = context.new_page()
        answer = page.goto(f"http://evil.example:{listener.port}/")
        assert answer is not None
        assert answer.status == 421
        # A page of another origin, even one that knows the token.
        page.goto(other)
        for options in ({}, {"mode": "no-cors"}, {"headers": {"authorization": f"Bearer {token}"}}):
            text = page.evaluate(READ, [f"{own}/api/election?key=elections/billing", options])
            assert text in ("refused", ""), text
        act = {"action": "resign", "kind": "elections", "name": "billing", "token": 1}
        posted = {"method": "POST", "body": json.dumps(act), "mode": "no-cors"}
        assert page.evaluate(READ, [f"{own}/api/act", posted]) in ("refused", "")
        framed = page.evaluate(FRAME, own)
        assert framed == "blocked"
        context.close()
        with opened(browser, listener.url) as mine:
            expect(row(mine, "billing").locator(".who")).to_have_text("server1")
            assert "token" not in mine.url, "the token does not stay in the address"
            # For a slot of a semaphore there is no command: one would name an election.
            slot = Claim("server1", "1", {}, 0, time.time(), TTL_S).encode()
            server.create("semaphores/pool/slots/0/leader", slot, server.grant(TTL_S).id)
            for name, commands in (("billing", 1), ("pool/0", 0)):
                row(mine, name).click()
                mine.locator("#act-resign").click()
                dialog = mine.locator("dialog")
                expect(dialog).to_contain_text(f"resign from {name}?")
                expect(dialog.locator("code")).to_have_count(commands)
                mine.keyboard.press("Escape")


READ = """async ([url, options]) => {
    try { return await (await fetch(url, options)).text(); } catch (error) { return 'refused'; }
}"""
FRAME = """url => new Promise(done => {
    const frame = document.createElement('iframe');
    frame.onload = () => {
        try { frame.contentWindow.location.href; done('own'); } catch { done('blocked'); }
    };
    frame.src = url;
    document.body.append(frame);
})"""


class _Other(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>other</title><body>")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - of the base class
        pass


@contextmanager
def elsewhere() -> Iterator[str]:
    """A page of another origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Other) as server:
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        serving.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/"
        finally:
            server.shutdown()
            serving.join()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_and_both_themes(browser: Browser, scheme: Any) -> None:
    """Nothing is wider than the screen, and text can be read."""
    with crowd(["billing", "reports", *HOSTILE]) as (url, _), dash(url) as listener:
        phone = {"width": 390, "height": 844}
        with opened(
            browser,
            listener.url,
            viewport=phone,
            color_scheme=scheme,
            has_touch=True,
            reduced_motion="reduce",
        ) as page:
            expect(row(page, "billing")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            row(page, "reports").tap()
            expect(page.locator("#detail h2")).to_have_text("reports")
            expect(page.locator("#detail .why")).to_contain_text("without --allow-actions")
            row(page, "billing").locator(".lane .t").tap()
            expect(page.locator("#tip")).to_contain_text("Leads now.")
            page.locator("#detail h2").tap()
            expect(page.locator("#tip")).to_be_hidden()
            assert page.evaluate(ALIGNED)
            low = page.evaluate(CONTRAST)
            assert not low, low
            picture(page, f"phone-{scheme}")


CONTRAST = """() => {
    const parse = c => (c.match(/[\\d.]+/g) || []).map(Number);
    const light = ([r, g, b]) => {
        const [x, y, z] = [r, g, b].map(v => {
            v /= 255;
            return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
        });
        return .2126 * x + .7152 * y + .0722 * z;
    };
    const ground = node => {
        for (let n = node; n; n = n.parentElement) {
            const c = parse(getComputedStyle(n).backgroundColor);
            if (c.length === 3 || c[3] === 1) return c;
        }
        return [255, 255, 255];
    };
    const found = [];
    for (const node of document.querySelectorAll('body *')) {
        const own = [...node.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
        if (!own || !node.checkVisibility() || node.closest('.vh,[disabled],script')) continue;
        const a = light(parse(getComputedStyle(node).color)), b = light(ground(node));
        const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
        if (ratio < 4.45) found.push([node.className, node.textContent.slice(0, 30), ratio]);
    }
    return found;
}"""


def audit_log(path: Path, election: str, *, overlapping: bool) -> None:
    """Two processes that led one after the other, or at the same time."""

    def line(event: str, at: float, session: str, **more: Any) -> str:
        stamp = {"at": at, "wall": 1.7e9 + at, "boot": "b", "pid": len(session), "session": session}
        common = {"election": election, "lease": f"{session}-{at}", "name": f"server-{session}"}
        return json.dumps({"event": event, **common, **more, **stamp}, separators=(",", ":"))

    begins = 5.0 if overlapping else 12.0
    lines = [
        line("elected", 1.0, "a", token=1, valid_until=10.0),
        line("elected", begins, "bb", token=2, valid_until=60.0),
        line("resigned", 50.0, "bb", token=2),
        line("elected", 50.1, "a", token=3, valid_until=90.0),
    ]
    path.write_text("".join(f"{each}\n" for each in lines))


@pytest.mark.parametrize("overlapping", [False, True])
def test_a_report_is_one_file_with_its_proof(
    tmp_path: Path,
    browser: Browser,
    overlapping: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    election = "billing" if overlapping else HOSTILE[0]
    monkeypatch.chdir(tmp_path)
    audit_log(Path("audit.jsonl"), election, overlapping=overlapping)
    code = main(["verify", "audit.jsonl", "--html", "report.html"])
    assert code == (1 if overlapping else 0)
    capsys.readouterr()
    with opened(browser, (tmp_path / "report.html").as_uri()) as page:
        expect(page.locator("#heading")).to_have_text("Disproved" if overlapping else "Proved")
        expect(page.locator(".row:not([hidden]) .clip")).to_have_text(election)
        expect(page.locator(".lane .t")).to_have_count(3)
        assert page.evaluate(ALIGNED)
        words = ["election", "terms", "changes of leader", "processes", "lines read"]
        assert page.locator("#figures span").all_inner_texts()[:5] == words
        if overlapping:
            expect(page.locator("#violations pre").first).to_contain_text("server-bb, token 2")
            page.get_by_text("Show on the timeline").first.click()
            page.locator(".lane .v").hover()
            expect(page.locator("#tip")).to_contain_text("two leaders of")
            expect(page.locator(".lane .upper")).to_have_count(1)
            expect(page.locator(".lane .g")).to_have_count(0)  # two led, and not nobody
        else:
            page.locator("#scroll").focus()
            page.keyboard.press("ArrowRight")
            page.keyboard.press("ArrowRight")
            expect(page.locator("#tip")).to_contain_text(re.compile("Nobody led for 2.0 s"))
        picture(page, f"report-{'disproved' if overlapping else 'proved'}")
        page.set_viewport_size({"width": 390, "height": 844})
        page.wait_for_function(ALIGNED)


def test_a_report_of_damaged_times_and_one_of_a_flapping_election(
    tmp_path: Path, browser: Browser, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clock that was never set, or a time that is damage, makes an axis of centuries; an election
    that changed its leader 10,000 times is no more nodes than there are pixels."""

    def line(event: str, token: int, wall: float, boot: str = "b") -> str:
        term = {"election": "e", "name": f"s{token % 3}", "token": token, "lease": f"l{token}"}
        times = {"at": float(token), "wall": wall, "valid_until": token + 5.0}
        return json.dumps({"event": event, **term, **times, "boot": boot, "pid": 1, "session": "s"})

    damaged = [line("elected", 1, 1.0), line("elected", 2, 9e14, "c")]
    both = ("elected", "resigned")
    flapping = [line(event, token, 1.7e9 + token) for token in range(1, 10_001) for event in both]
    for name, lines in (("damaged", damaged), ("flapping", flapping)):
        log, report = tmp_path / f"{name}.jsonl", tmp_path / f"{name}.html"
        log.write_text("".join(f"{each}\n" for each in lines))
        main(["verify", str(log), "--html", str(report)])
        capsys.readouterr()
        with opened(browser, report.as_uri()) as page:
            expect(page.locator(".lane .t").first).to_be_visible()
            assert page.locator("#axis i").count() < 40
            terms = page.locator(".lane .t").count()
            assert terms < 2000
            if name == "flapping":
                assert terms > 200
                for _ in range(9):
                    page.locator("#in").click()
                expect(page.locator(".lane .t")).to_have_count(20)
