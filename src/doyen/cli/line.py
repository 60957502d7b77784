"""`doyen line ELECTION`: show the line of an election, once or, with `--watch`, at every change."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

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
from doyen.cli._screen import View, print_view, show_stream
from doyen.cli.leader import as_dict, leader_text
from doyen.election.queries import read_line
from doyen.model import Kind, Line
from doyen.session import connect

MANUAL = """\
Shows the line of an election in the order in which candidates will lead: by priority, then by
arrival. The leader keeps its place in the line, so a candidate of higher priority may wait ahead of
it. Candidates with the recipe "race" have no ticket and are not shown until they lead. With
layout=lock on Consul there is no line, and only the leader is shown.

With --watch the line is shown again after every change, until Ctrl-C. If the store does not answer
for a ttl, that is shown, with the line that was known last.

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
    url = store_url(args, create=False)
    if args.watch:
        return follow(_watch(url, args.election, kind_of(args), args.json))
    line = asyncio.run(_once(url, args.election, kind_of(args)))
    if args.json:
        print_json(_as_dict(args.election, line, kind_of(args)))
    else:
        print_view(console(), _view(args.election, line, kind_of(args)))
    return Exit.DONE if line.leader or line.candidates else Exit.NO


async def _once(url: str, election: str, kind: Kind) -> Line:
    async with connect(url, create=False) as session:
        # Without a watch, which some stores have to write, and a full one cannot.
        return await session._run(read_line, election, kind)


async def _watch(url: str, election: str, kind: Kind, as_json: bool) -> None:
    async with connect(url, create=False) as session:
        await show_stream(
            session,
            session.observe_line(election, kind=kind),
            lambda line: _view(election, line, kind),
            lambda line: _as_dict(election, line or Line(None), kind),
            as_json=as_json,
        )


def _table(line: Line) -> Table:
    with_meta = any(each.meta for each in line.candidates)
    table = Table([">#", "name", "state", ">priority", *(["meta"] if with_meta else [])])
    for position, each in enumerate(line.candidates, 1):
        state = ("leads" if each.leads else "waits") + (", foreign" if each.foreign else "")
        row = [str(position), printable(each.name), state]
        meta = [printable(each.meta) if each.meta else ""] if with_meta else []
        table.rows.append([*row, str(each.priority), *meta])
        if each.leads:
            table.styles[position - 1] = "bold green"
    return table


def _title(election: str, line: Line, kind: Kind) -> str:
    count = sum(not each.leads for each in line.candidates)
    waiting = f"{count or 'none'} waiting"
    if not line.complete:
        waiting = "this store does not show who waits"
    return f"{leader_text(election, line.leader, kind)}; {waiting}"


def _view(election: str, line: Line, kind: Kind) -> View:
    return View(_title(election, line, kind), [_table(line)] if line.candidates else [])


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
                **({"foreign": True} if each.foreign else {}),
            }
            for position, each in enumerate(line.candidates, 1)
        ],
        **({} if line.complete else {"complete": False}),
    }
