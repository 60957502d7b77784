"""What live views and JSON lines say when the store does not answer: that, since when, and what was
known last. The session is one whose store is cut off at will."""

from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from rich.console import Console

from candidates import Capture
from doyen.cli import _screen
from doyen.cli._output import Table, console
from doyen.cli._screen import View, show_stream
from doyen.cli.members import change_dict, change_text
from doyen.cli.watch import _print_changes, _print_one
from doyen.model import Member, Reachable, Unreachable
from doyen.testing.faults import Faults
from support import Place, virtual


async def states(*items: str | Unreachable[str]) -> AsyncGenerator[str | Unreachable[str], None]:
    for item in items:
        yield item
        await asyncio.sleep(3.0)


def view(name: str) -> View:
    return View(f"{name} leads", [Table(["name"], [[name]])])


LOST = Unreachable(1_700_000_000.0, "server1", "no answer")


def fields(name: str | None) -> dict[str, Any]:
    return {"leader": name}


@virtual
async def test_states_as_text_and_as_json(place: Place, capsys: Capture) -> None:
    session = await place.open()
    await session.leader("e")
    unknown: Unreachable[str] = Unreachable(LOST.since)
    items = ("server1", LOST, unknown, "server2")
    await show_stream(session, states(*items), view, fields, as_json=False)
    printed = re.sub(r"^\d{4}-.*$", "TIME", capsys.readouterr().out, flags=re.MULTILINE)
    since = _screen.clock_time(LOST.since)
    assert printed.split("\n\n") == [
        "TIME\nserver1 leads",
        "name\nserver1",
        f"TIME\nunreachable since {since} (no answer); last known: server1 leads",
        "name\nserver1",
        f"TIME\nunreachable since {since}; last known: nothing",
        "TIME\nserver2 leads",
        "name\nserver2",
        "",
    ]
    await show_stream(session, states(*items), view, fields, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["leader"] for line in lines] == ["server1", "server1", None, "server2"]
    assert [line["unreachable_since"] for line in lines] == [None, LOST.since, LOST.since, None]
    assert [line["as_of"] for line in lines] == [
        session.as_of,
        LOST.since,
        LOST.since,
        session.as_of,
    ]
    assert lines[1]["error"] == "no answer"


@virtual
async def test_a_terminal_shows_when_the_store_last_answered(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, out = await place.open(), io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=80)
    monkeypatch.setattr(_screen, "console", lambda: terminal)

    async def quiet() -> AsyncGenerator[str | Unreachable[str], None]:
        await session.leader("e")
        yield "server1"
        for _ in range(3):
            await asyncio.sleep(2.0)
            await session.leader("e")
        yield LOST

    await show_stream(session, quiet(), view, fields, as_json=False)
    shown = re.findall(r"as of ([\d:]+); Ctrl-C ends", out.getvalue())
    assert len(set(shown)) == 4, "the time moves although nothing changes"
    assert "unreachable since" in out.getvalue()


@virtual
async def test_watching_many_says_which_leaders_were_known_last(
    place: Place, capsys: Capture
) -> None:
    faults = Faults()
    session, looking = await place.open(), await place.open(faults)
    async with session.campaign("e", name="a") as term:
        out = console()
        watching = asyncio.create_task(_print_changes(out, looking, "elections", [], False))
        await asyncio.sleep(1.0)
        faults.cut()
        await asyncio.sleep(10.0)
        faults.heal()
        await asyncio.sleep(2.0)
        watching.cancel()
    first, lost, again = [line[24:] for line in capsys.readouterr().out.splitlines()]
    leads = f"a leads e, token {term.token}"
    assert (first, again) == (leads, leads)
    assert re.fullmatch(rf"unreachable since [\d:]+ \(.*\); last known: {leads}", lost)


@virtual
async def test_watching_one_that_was_never_read_does_not_say_that_it_had_no_leader(
    place: Place, capsys: Capture
) -> None:
    faults = Faults()
    looking = await place.open(faults)
    faults.cut()
    watching = asyncio.create_task(_print_one(console(), looking, "elections", "e", False))
    await asyncio.sleep(10.0)
    faults.heal()
    await asyncio.sleep(2.0)
    faults.cut()
    await asyncio.sleep(10.0)
    watching.cancel()
    lost, found, again = [line[24:] for line in capsys.readouterr().out.splitlines()]
    assert lost.endswith("last known: nothing")
    assert found == "e has no leader"
    assert again.endswith("last known: e has no leader")
    faults.heal()


@virtual
async def test_watching_a_store_without_elections_says_that_it_does_not_answer(
    place: Place, capsys: Capture
) -> None:
    faults = Faults()
    session, looking = await place.open(), await place.open(faults)
    for as_json in (False, True):
        watching = asyncio.create_task(_print_changes(console(), looking, "elections", [], as_json))
        await asyncio.sleep(1.0)
        faults.cut()
        await asyncio.sleep(10.0)
        faults.heal()
        await asyncio.sleep(2.0)
        async with session.campaign("e", name="a"):
            await asyncio.sleep(1.0)
        await asyncio.sleep(1.0)
        faults.cut()
        await asyncio.sleep(10.0)
        faults.heal()
        await asyncio.sleep(2.0)
        watching.cancel()
        await asyncio.wait({watching})
        lines = capsys.readouterr().out.splitlines()
        if as_json:
            said = [json.loads(line) for line in lines]
            lost = [bool(line["unreachable_since"]) for line in said]
            assert lost == [False, True, False, False, False, True, False]
            assert [line["election"] for line in said][:3] == [None, None, None]
        else:
            nothing, gone, again, led, free, gone_again, _ = [line[24:] for line in lines]
            assert (nothing, again) == ("no elections", "no elections")
            assert re.fullmatch(r"unreachable since [\d:]+ \(.*\); last known: no elections", gone)
            assert led.startswith("a leads e")
            assert free == "e has no leader"
            assert gone_again.endswith("last known: no elections"), "a name is not kept for ever"


@virtual
async def test_a_view_of_thousands_draws_what_fits(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, session = io.StringIO(), await place.open()
    terminal = Console(file=out, force_terminal=True, width=80, height=20)
    monkeypatch.setattr(_screen, "console", lambda: terminal)
    drawn: list[int] = []
    table = Table(["name"], [[f"e{number}"] for number in range(5000)], {4321: "red"})
    whole = Table.__rich__

    def counted(self: Table) -> Any:
        drawn.append(len(self.rows))
        return whole(self)

    monkeypatch.setattr(Table, "__rich__", counted)
    few = Table(["name"], [["x"]])
    await show_stream(
        session, states("s"), lambda _: View("t", [few, table]), fields, as_json=False
    )
    assert "e4321" in out.getvalue(), "what is notable comes first"
    assert "and 4991 more" in out.getvalue()
    assert max(drawn) == 9


@virtual
async def test_on_a_narrow_terminal_each_election_is_one_line(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folded cells would be unreadable, and would push elections off the screen."""
    out, session = io.StringIO(), await place.open()
    terminal = Console(file=out, force_terminal=True, width=40, height=14)
    monkeypatch.setattr(_screen, "console", lambda: terminal)
    rows: list[Sequence[str]]
    rows = [[f"{n}-{'long' * 20}", "server", f"{n}", "2026-11-16 19:01:16", ""] for n in range(6)]
    table = Table(["election", "leader", ">token", "since", "waiting"], rows)
    await show_stream(session, states("s"), lambda _: View("t", [table]), fields, as_json=False)
    last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).rpartition("as of")[2]
    lines = last.splitlines()
    assert [line.split() for line in lines if "server" in line] == [
        [f"{n}-{'long' * 20}"[:22] + "…", "server", f"{n}"] for n in range(6)
    ]
    assert len(lines) <= 14


def test_changes_of_a_group() -> None:
    lost = Unreachable(LOST.since, (Member("w1", 7),), "no answer")
    assert change_text(lost).endswith("; last known: 1 members")
    assert change_text(Reachable(1.0)) == "the store answers again"
    assert change_dict(lost)["members"][0]["name"] == "w1"
    assert change_dict(lost)["unreachable_since"] == LOST.since
    assert change_dict(Reachable(1.0)) == {"change": "reachable", "since": 1.0}
