"""`doyen watch ELECTION`: print the leader, then a line for every change."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import datetime

from doyen.cli._output import (
    add_election_arguments,
    console,
    follow,
    kind_of,
    print_json,
    store_url,
)
from doyen.cli.leader import as_dict, leader_text
from doyen.model import Kind, Leader
from doyen.session import connect

MANUAL = """\
Prints the leader, then a line for every change, as soon as the store notifies this process; nothing
is polled. Times are those at which the change was seen here. Changes in quick succession may appear
as one. If the store cannot be reached, the command waits for it. With --json each line is a JSON
object.

exit codes:
  0    ended by Ctrl-C, the usual way to end it
  141  the reader of its output has gone
  others as for every command: see doyen --help

examples:
  doyen watch billing
  # act on every change
  doyen watch billing --json | while read -r change; do notify "$change"; done
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_election_arguments(parser)


def run(args: argparse.Namespace) -> int:
    show = _show_json if args.json else _text_printer()
    return follow(_watch(store_url(args, create=False), args.election, kind_of(args), show))


_Show = Callable[[str, Leader | None, Kind, datetime], None]


def _show_json(election: str, leader: Leader | None, kind: Kind, at: datetime) -> None:
    print_json({"at": at.isoformat(timespec="milliseconds"), **as_dict(election, leader, kind)})


def _text_printer() -> _Show:
    out = console()

    def show(election: str, leader: Leader | None, kind: Kind, at: datetime) -> None:
        out.print(f"{at:%Y-%m-%d %H:%M:%S}.{at:%f}"[:-3], leader_text(election, leader, kind))

    return show


async def _watch(url: str, election: str, kind: Kind, show: _Show) -> None:
    async with connect(url, create=False) as session:
        async for leader in session.observe(election, kind=kind):
            show(election, leader, kind, datetime.now().astimezone())
