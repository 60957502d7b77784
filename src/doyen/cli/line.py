"""`doyen line ELECTION`: show the line of an election, once or, with `--watch`, at every change.

On a terminal with rich, `--watch` redraws the line in place. Otherwise every state of the line is
printed with its time.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, aclosing, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any

from doyen.cli._output import (
    Exit,
    Table,
    add_election_arguments,
    add_option,
    console,
    follow,
    kind_of,
    print_json,
    printable,
    store_url,
)
from doyen.cli.leader import as_dict, leader_text
from doyen.model import Kind, Line
from doyen.session import connect

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

MANUAL = """\
Shows the line of an election in the order in which candidates will lead: by priority, then by
arrival. The leader keeps its place in the line, so a candidate of higher priority may wait ahead of
it. Candidates with the recipe "race" have no ticket and are not shown until they lead.

With --watch the line is shown again after every change, until Ctrl-C; nothing is polled.

exit codes:
  0    the election has a leader or a candidate; with --watch, ended by Ctrl-C
  1    it has neither
  others as for every command: see doyen --help

examples:
  doyen line billing
  # a live view
  doyen line billing --watch
  # the next candidate, for a script
  doyen line billing --json | jq -r '[.line[] | select(.leads | not)][0].name'
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_election_arguments(parser)
    add_option(parser, "--watch", "show every change, until interrupted")


def run(args: argparse.Namespace) -> int:
    url = store_url(args)
    if args.watch:
        return follow(_watch(url, args.election, kind_of(args), _screen(args)))
    line = asyncio.run(_once(url, args.election, kind_of(args)))
    if args.json:
        print_json(_as_dict(args.election, line, kind_of(args)))
    else:
        _print(args.election, line, kind_of(args))
    return Exit.DONE if line.leader or line.candidates else Exit.NO


_Show = Callable[[Line], None]


async def _once(url: str, election: str, kind: Kind) -> Line:
    async with (
        connect(url) as session,
        aclosing(session.observe_line(election, kind=kind)) as lines,
    ):
        return await anext(lines)


async def _watch(
    url: str, election: str, kind: Kind, screen: AbstractContextManager[_Show]
) -> None:
    async with connect(url) as session:
        with screen as show:
            async for line in session.observe_line(election, kind=kind):
                show(line)


def _table(line: Line) -> Table:
    with_meta = any(each.meta for each in line.candidates)
    table = Table([">#", "name", "state", ">priority", *(["meta"] if with_meta else [])])
    for position, each in enumerate(line.candidates, 1):
        row = [str(position), printable(each.name), "leads" if each.leads else "waits"]
        meta = [printable(each.meta) if each.meta else ""] if with_meta else []
        table.rows.append([*row, str(each.priority), *meta])
        if each.leads:
            table.styles[position - 1] = "bold green"
    return table


def _title(election: str, line: Line, kind: Kind) -> str:
    waiting = sum(not each.leads for each in line.candidates)
    return f"{leader_text(election, line.leader, kind)}; {waiting or 'none'} waiting"


def _print(election: str, line: Line, kind: Kind) -> None:
    out = console()
    out.print(_title(election, line, kind))
    if line.candidates:
        out.print()
        out.print(_table(line))


def _as_dict(election: str, line: Line, kind: Kind) -> dict[str, Any]:
    return {
        **as_dict(election, line.leader, kind),
        "line": [
            {
                "position": position,
                "name": each.name,
                "priority": each.priority,
                "leads": each.leads,
                "meta": dict(each.meta),
            }
            for position, each in enumerate(line.candidates, 1)
        ],
    }


def _screen(args: argparse.Namespace) -> AbstractContextManager[_Show]:
    election, kind = args.election, kind_of(args)
    if args.json:
        return nullcontext(
            lambda line: print_json({"at": _now(), **_as_dict(election, line, kind)})
        )
    out: Any = console()
    if getattr(out, "is_terminal", False) and not out.is_dumb_terminal:
        return _Live(election, kind, out)

    def print_state(line: Line) -> None:
        out.print(_now())
        _print(election, line, kind)
        out.print()

    return nullcontext(print_state)


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


class _Live:
    """Redraws the line in place after every change. The last state stays on the screen."""

    def __init__(self, election: str, kind: Kind, out: RichConsole) -> None:
        from rich.live import Live

        self._election = election
        self._kind = kind
        self._live = Live(console=out, auto_refresh=False)

    def __enter__(self) -> _Show:
        self._live.__enter__()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def _show(self, line: Line) -> None:
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [
            Text(_title(self._election, line, self._kind), style="bold"),
            Text(f"as of {datetime.now().astimezone():%H:%M:%S}; Ctrl-C ends", style="dim"),
        ]
        if line.candidates:
            parts += [Text(), _table(line)]
        self._live.update(Group(*parts), refresh=True)
