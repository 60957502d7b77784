"""Pages of the lab in a real browser: stepped to a violation, played, read, and changed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from browser import browser as browser  # a fixture
from browser import opened, picture
from doyen.lab import runner
from doyen.lab.pages.comparison import comparison_film
from doyen.lab.pages.film import record_run, record_scenario
from doyen.lab.pages.page import write_page
from doyen.lab.plan import Plan
from doyen.lab.scenarios import SCENARIOS
from test_lab_pages import HOSTILE, busy_film
from test_lab_recorder import BROKEN, FAILING

FRAME_MS = 1000 / 60
REPLAY = "doyen lab replay lab-raft-1.json"


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The address of the page of a run that violates an invariant."""
    return saved(tmp_path_factory.mktemp("page"), record_run(FAILING, BROKEN, command=REPLAY)[2])


def saved(folder: Path, film: dict[str, Any], name: str = "player") -> str:
    path = folder / f"{name}.html"
    write_page(path, film, name=name)
    return path.as_uri()


def now(page: Page) -> str:
    return page.inner_text("#time")


def test_a_page_is_stepped_to_its_violation(browser: Browser, failing: str) -> None:
    with opened(browser, failing) as page:
        at = page.locator("#story li.at")
        expect(at).to_have_class(re.compile("violation"))
        expect(at).to_contain_text("n2 leads generation 2 without entry 1 of generation 1")
        ends = now(page)
        picture(page, "lab-violation")
        page.keyboard.press("Home")
        assert now(page) == "0.0000 s"
        expect(page.locator(".ln").nth(1)).to_contain_text("not started")
        lines = page.locator("#story li").count()
        seen = []
        for _ in range(lines + 1):
            page.keyboard.press("Shift+ArrowRight")
            seen.append(at.inner_text())
        assert any("n4 leads in generation 1" in line for line in seen)
        assert now(page) == ends
        expect(page.locator(".ln.bad")).to_contain_text("leads, generation 2")
        page.keyboard.press("ArrowLeft")
        assert now(page) < ends
        page.keyboard.press("ArrowRight")
        assert now(page) == ends
        page.keyboard.press("Home")
        page.click("#jump")
        assert now(page) == ends
        causes = page.locator("#chain li")
        assert causes.filter(has_text="cannot reach the others").count()
        causes.filter(has_text="n4 leads in generation 1").get_by_role("button").click()
        assert now(page).startswith("1.18")
        expect(at).to_contain_text("n4 leads in generation 1")


def test_a_message_tells_what_it_says_and_why(browser: Browser, failing: str) -> None:
    with opened(browser, failing) as page:
        text = ""
        for _ in range(40):  # the messages that are under way at the violation
            page.keyboard.press("m")
            text = page.inner_text("#card")
            if "vote reply" in text and "The rule is to refuse" in text:
                break
        assert "You have my vote in generation 2." in text
        assert "this server does not" in text
        expect(page.locator("#card .cmp .missing")).to_have_count(1)
        picture(page, "lab-message")
        page.keyboard.press("Escape")
        expect(page.locator("#card")).to_be_hidden()
        hovered = hover(page)
        expect(page.locator("#card")).to_be_visible()
        assert " → " in hovered
        page.mouse.move(2, 2)
        expect(page.locator("#card")).to_be_hidden()


def hover(page: Page) -> str:
    """Move the pointer over the picture until it meets a message. Returns what its card says."""
    box = page.locator("#view").bounding_box()
    assert box is not None
    for x in range(int(box["width"]) - 10, 0, -9):
        page.mouse.move(box["x"] + x, box["y"] + 56 + 60)
        if page.locator("#card .t").count() and page.locator("#card").is_visible():
            text = page.inner_text("#card")
            if " → " in text:
                return text
    raise AssertionError("no message under the pointer")


def test_a_run_is_played_and_stops_at_its_end(browser: Browser, failing: str) -> None:
    with opened(browser, failing) as page:
        ends = now(page)
        page.locator("#speed button").last.click()
        page.keyboard.press("Home")
        page.locator("#go").click()
        expect(page.get_by_label("Pause")).to_be_visible()
        expect(page.get_by_label("Play", exact=True)).to_be_visible(timeout=30_000)
        assert now(page) == ends
        page.keyboard.press("Home")
        page.locator("body").press(" ")
        expect(page.locator("#time")).not_to_have_text("0.0000 s")
        page.locator("body").press(" ")
        held = now(page)
        expect(page.get_by_label("Play", exact=True)).to_be_visible()
        assert now(page) == held


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    _, _, film = record_run(Plan(protocol="raft", nodes=3, seed=1, for_s=2.0))
    long = "n" * 10_000
    film["title"] = HOSTILE[0]
    film["scenes"][0]["lanes"] = [HOSTILE[0], HOSTILE[1], long]
    film["scenes"][0]["story"].append([1_000_000, "other", f"{HOSTILE[0]} {HOSTILE[2]}"])
    with opened(browser, saved(tmp_path, film)) as page:
        assert page.inner_text("h1") == HOSTILE[0]
        names = page.locator(".ln b")
        assert [names.nth(lane).get_attribute("title") for lane in (0, 1)] == list(HOSTILE[:2])
        assert names.nth(0).inner_text() == "</scrip…script>"
        assert len(names.nth(2).inner_text()) < 20
        assert page.evaluate("document.querySelectorAll('img, iframe').length") == 0
        assert page.evaluate("document.scripts.length") == 2
        fits(page)


def fits(page: Page) -> None:
    """Nothing is wider than the window."""
    wide = page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert wide[0] <= wide[1]


def test_light_and_dark_and_on_a_phone(browser: Browser, failing: str) -> None:
    def ground(page: Page) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    with opened(browser, failing, color_scheme="dark") as page:
        dark = ground(page)
        picture(page, "lab-violation-dark")
        page.click("#theme")
        assert ground(page) != dark
        page.click("#theme")
        assert ground(page) == dark
    phone = {"width": 390, "height": 844}
    with opened(browser, failing, viewport=phone, has_touch=True) as page:
        fits(page)
        picture(page, "lab-phone")
        for name in ("first", "back", "go", "next", "jump"):
            box = page.locator(f"#{name}").bounding_box()
            assert box is not None
            assert min(box["width"], box["height"]) >= 42
        page.locator("#first").tap()
        page.locator("#next").tap()
        assert now(page) > "0.0000 s"


def test_every_scenario_opens_without_an_error(browser: Browser, tmp_path: Path) -> None:
    elsewhere = ThreadPoolExecutor(1)  # the browser has the event loop of this thread
    for name in SCENARIOS:
        if name == "herd":  # the recording of a thousand candidates takes seconds
            continue
        _, film = elsewhere.submit(record_scenario, name).result()
        with opened(browser, saved(tmp_path, film)) as page:
            assert page.locator("#fact-list li").count() == len(film["facts"])
            for number in range(len(film["scenes"]) if len(film["scenes"]) > 1 else 0):
                page.locator("#scenes button").nth(number).click()
                assert page.locator("#story li").count() == len(film["scenes"][number]["story"])


@pytest.mark.chaos
def test_twenty_thousand_events_take_less_than_a_frame_each_time(
    browser: Browser, tmp_path: Path
) -> None:
    """The main thread computes a frame in less than a sixtieth of a second. This is Chromium's
    measure of the processor time, which does not depend on what else the machine does."""
    with opened(browser, saved(tmp_path, busy_film())) as page:
        for zoom in (0, 40):
            assert frame_ms(page, zoom) < FRAME_MS


def frame_ms(page: Page, zoom: int) -> float:
    """Play for two seconds, as fast as one can. Returns the processor time of one frame."""
    for _ in range(zoom):
        page.keyboard.press("-")
    page.locator("#speed button").last.click()
    page.keyboard.press("Home")
    devtools = page.context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def used() -> float:
        metrics = devtools.send("Performance.getMetrics")["metrics"]
        return next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")

    before = used()
    page.click("#go")
    frames = page.evaluate(
        """() => new Promise(done => { let frames = 0; const until = performance.now() + 2000;
        const tick = now => { frames += 1; if (now < until) requestAnimationFrame(tick);
        else done(frames); }; requestAnimationFrame(tick); })"""
    )
    page.click("#go")
    spent = (used() - before) / int(frames) * 1000
    print(f"zoomed out {zoom} times: {int(frames) / 2:g} frames a second, {spent:.1f} ms in each")
    return spent


def test_plots_of_a_comparison_can_be_switched(browser: Browser, tmp_path: Path) -> None:
    runs = runner.run_protocols(["raft", "paxos"], nodes=3, seeds=range(3), for_s=2.0)
    with opened(browser, saved(tmp_path, comparison_film(runs), "comparison")) as page:
        assert page.locator("#plot circle").count() == 6
        page.get_by_role("button", name="messages per write").click()
        assert page.inner_text("#what") == "messages per write"
        page.get_by_role("button", name="logarithmic").click()
        page.get_by_role("button", name="share of runs").click()
        assert page.locator("#plot path.step").count() == 2
        page.locator("#legend button", has_text="paxos").click()
        assert page.locator("#plot path.step").count() == 1
        page.get_by_role("button", name="table").click()
        assert page.locator("#plot tr").count() == 3


@pytest.fixture
def played() -> Iterator[str]:
    """The address of a server of pages that can be changed."""
    command = [sys.executable, "-m", "doyen", "lab", "play", "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.terminate()


def test_a_reader_drops_a_message_kills_a_server_and_undoes_it(
    browser: Browser, played: str
) -> None:
    with opened(browser, played) as page:
        page.get_by_role("link", name="raft").click()
        story = page.locator("#story")
        leader = re.search(r"(n\d) leads in generation 1", story.inner_text())
        assert leader is not None
        story.get_by_text(f"{leader[1]} votes").or_(story.get_by_text("votes for")).first.click()
        page.keyboard.press("m")
        page.get_by_role("button", name="Drop this message").click()
        expect(page.locator("#done li")).to_have_count(1)
        expect(story).to_contain_text("the network drops message")
        story.get_by_text("leads in generation 1").click()
        page.get_by_label(f"Do something to {leader[1]}").click()
        page.get_by_role("combobox").select_option("60")
        page.get_by_role("button", name="Kill its process").click()
        expect(page.locator("#done li")).to_have_count(2)
        expect(story).to_contain_text(f"{leader[1]} is killed")
        expect(story).to_contain_text("leads in generation 2")
        picture(page, "lab-play")
        page.reload()
        expect(page.locator("#done li")).to_have_count(2)
        page.get_by_label("Undo line 2").click()
        expect(page.locator("#done li")).to_have_count(1)
        expect(story).not_to_contain_text("is killed")

        # What is done while the lab still runs is added to what was done before.
        held: list[Route] = []
        page.route("**/run", lambda route: held.append(route))  # noqa: PLW0108 - it needs a function of Python
        for what in ("Pause its process", "Cut its power"):
            page.get_by_label(f"Do something to {leader[1]}").click()
            page.get_by_role("button", name=what).click()
        for number in (1, 2):
            while len(held) < number:
                page.wait_for_timeout(20)
            held[number - 1].continue_()
            expect(page.locator("#done li")).to_have_count(1 + number)
