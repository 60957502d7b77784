"""`doyen watch [ELECTION …]`: the leaders of elections, live, or a line for every change."""

from __future__ import annotations

import argparse
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from datetime import datetime

from doyen.cli._output import (
    Console,
    add_option,
    add_store_option,
    console,
    follow,
    kind_of,
    print_json,
    store_url,
)
from doyen.cli._screen import View, lost_text, show_stream, stated
from doyen.cli.leader import as_dict, leader_text
from doyen.cli.list import view
from doyen.manage.inventory import Inventory
from doyen.model import Kind, Leader, Line, Unreachable
from doyen.session import Session, connect

MANUAL = """\
With one ELECTION, prints its leader, then a line for every change, as soon as the store notifies
this process. Times are those at which this process saw the change. Changes in quick succession may
appear as one.

With several, or with none, which means all of the store, it is a live view on a terminal, and a
line for every change of each of them otherwise.

If the store does not answer for a ttl, a line says so, with the leader that was known last, and
another follows when it answers. With --json each line is a JSON object: "as_of" is when the store
last answered. A store without elections has a line of its own, with null for the election.

exit codes:
  0    ended by Ctrl-C, the usual way to end it
  141  the reader of its output has gone
  others as for every command: see doyen --help

examples:
  doyen watch billing
  # every election of the store
  doyen watch
  # act on every change
  doyen watch billing --json | while read -r change; do notify "$change"; done
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "elections", metavar="ELECTION", nargs="*", help="names (default: all of the store)"
    )
    add_option(parser, "--lock", "the names are those of locks; holders are shown as leaders")
    add_store_option(parser)


def run(args: argparse.Namespace) -> int:
    return follow(_watch(store_url(args, create=False), args))


async def _watch(url: str, args: argparse.Namespace) -> None:
    kind, names, out = kind_of(args), args.elections, console()
    async with connect(url, create=False) as session:
        if len(names) == 1:
            await _print_one(out, session, kind, names[0], args.json)
        elif getattr(out, "is_terminal", False) and not args.json:
            seen = _chosen(session, kind, names)
            await show_stream(session, seen, _view(kind), lambda _: {}, as_json=False)
        else:
            await _print_changes(out, session, kind, names, args.json)


async def _print_one(out: Console, session: Session, kind: Kind, name: str, as_json: bool) -> None:
    """A line for each change of one election."""
    known = False
    async for leader in session.observe(name, kind=kind):
        known = known or not isinstance(leader, Unreachable)
        _print(out, session, name, leader, kind, as_json, known=known)


def _print(
    out: Console,
    session: Session,
    election: str,
    leader: Leader | Unreachable[Leader] | None,
    kind: Kind,
    as_json: bool,
    *,
    known: bool = True,
) -> None:
    """Print one change of one election. `known`: who led was read before."""
    if as_json:
        print_json(stated(session, leader, lambda known: as_dict(election, known, kind)))
        return
    if isinstance(leader, Unreachable):
        text = lost_text(leader, leader_text(election, leader.last, kind) if known else "nothing")
    else:
        text = leader_text(election, leader, kind)
    _print_line(out, text)


def _print_line(out: Console, text: str) -> None:
    at = datetime.now().astimezone()
    out.print(f"{at:%Y-%m-%d %H:%M:%S}.{at:%f}"[:-3], text)


async def _chosen(
    session: Session, kind: Kind, names: list[str]
) -> AsyncGenerator[Inventory | Unreachable[Inventory], None]:
    """The elections of these names, or all, live."""
    assert kind in ("elections", "locks")

    def choose(seen: Inventory) -> Inventory:
        lines: Mapping[str, Line] = getattr(seen, kind)
        if names:
            lines = {name: lines.get(name, Line(None)) for name in names}
        return Inventory(**{kind: lines}, as_of=seen.as_of)  # type: ignore[arg-type]

    async with aclosing(session.observe_inventory(kind)) as inventories:
        async for seen in inventories:
            if isinstance(seen, Unreachable):
                last = None if seen.last is None else choose(seen.last)
                yield Unreachable(seen.since, last, seen.error)
            else:
                yield choose(seen)


def _view(kind: Kind) -> Callable[[Inventory], View]:
    def shown(seen: Inventory) -> View:
        lines: Mapping[str, Line] = getattr(seen, kind)
        leaderless = sum(line.leader is None for line in lines.values())
        title, parts = view(seen)
        return View(f"{title}, {leaderless or 'none'} without a leader" if lines else title, parts)

    return shown


async def _print_changes(
    out: Console, session: Session, kind: Kind, names: list[str], as_json: bool
) -> None:
    """Print a line for each election, then one for every change of each of them. A store without
    elections has a line, too."""
    known: dict[str, Leader | None] = {}
    lost = True
    async with aclosing(_chosen(session, kind, names)) as inventories:
        async for seen in inventories:
            if isinstance(seen, Unreachable):
                lost = True
                for name, last in known.items():
                    gone = Unreachable(seen.since, last, seen.error)
                    _print(out, session, name, gone, kind, as_json)
                if not known:
                    _print_none(out, session, seen, kind, as_json)
                continue
            lines: Mapping[str, Line] = getattr(seen, kind)
            for name in sorted({*known, *lines}):
                leader = lines[name].leader if name in lines else None
                if lost or name not in known or known[name] != leader:
                    _print(out, session, name, leader, kind, as_json)
                known[name] = leader
            if lost and not known:
                _print_none(out, session, seen, kind, as_json)
            known = {name: leader for name, leader in known.items() if name in lines}
            lost = False


def _print_none(
    out: Console,
    session: Session,
    seen: Inventory | Unreachable[Inventory],
    kind: Kind,
    as_json: bool,
) -> None:
    """Print that there is no election, or that the store does not answer and none was known."""
    if as_json:
        print_json(
            stated(session, seen, lambda _: {"election": None, "kind": kind, "leader": None})
        )
        return
    text = f"no {kind}"
    if isinstance(seen, Unreachable):
        text = lost_text(seen, text)
    _print_line(out, text)
