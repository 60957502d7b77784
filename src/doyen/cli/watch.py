"""`doyen watch ELECTION`: say who leads, then every change, a line each, until interrupted."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from datetime import datetime

from doyen.cli._manual import manual
from doyen.cli._output import add_store_option, console, follow, print_json, store_url
from doyen.cli.leader import as_dict, in_words
from doyen.model import Leader
from doyen.session import connect

__all__ = ["MANUAL", "configure", "run"]

MANUAL = """\
Prints who leads, then a line for every change, as soon as the store tells of it; nothing is polled.
Times are when the change was seen here. Changes in quick succession may be seen as one. A store
that cannot be reached is waited for. With --json each line is a JSON object.

exit codes:
  0    ended by Ctrl-C, which is how it is meant to end
  141  nobody reads its output any more
  others as for every command: see doyen --help

examples:
  doyen watch billing
  # act on every change
  doyen watch billing --json | while read -r change; do notify "$change"; done
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    manual(parser, MANUAL)
    parser.add_argument("election", metavar="ELECTION", help="the election's name")
    add_store_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print until interrupted, which is how it is meant to end."""
    show = _show_json if args.json else _shower()
    return follow(_watch(store_url(args), args.election, show))


_Show = Callable[[str, Leader | None, datetime], None]


def _show_json(election: str, leader: Leader | None, at: datetime) -> None:
    print_json({"at": at.isoformat(timespec="milliseconds"), **as_dict(election, leader)})


def _shower() -> _Show:
    out = console()

    def show(election: str, leader: Leader | None, at: datetime) -> None:
        out.print(f"{at:%Y-%m-%d %H:%M:%S}.{at:%f}"[:-3], in_words(election, leader))

    return show


async def _watch(url: str, election: str, show: _Show) -> None:
    async with connect(url) as session:
        async for leader in session.observe(election):
            show(election, leader, datetime.now().astimezone())
