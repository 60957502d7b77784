"""`doyen transfer ELECTION --to NAME`: have the leader hand over to a candidate of one's choice."""

from __future__ import annotations

import argparse

from doyen.blocking import connect_blocking
from doyen.cli._manual import manual
from doyen.cli._output import (
    Exit,
    add_store_option,
    console,
    print_json,
    printable,
    seconds,
    store_url,
)
from doyen.cli.leader import told
from doyen.model import Leader

__all__ = ["MANUAL", "configure", "run"]

MANUAL = """\
Hands leadership to a candidate in line, whatever its place. The heir says that it is ready before
the leader is asked to let go, and then takes over at once; if it does not, the line goes on in its
order. Nothing is taken from the leader: it lets go when its work has ended.

exit codes:
  0    the candidate leads
  1    it does not: nobody leads, none or more than one in line has that name,
       it was not ready, or the leader did not let go in time
  others as for every command: see doyen --help

examples:
  # before server1 is taken down
  doyen transfer billing --to server2
  # a leader whose work takes a while to end
  doyen transfer billing --to server2 --wait 120
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    manual(parser, MANUAL)
    parser.add_argument("election", metavar="ELECTION", help="the election's name")
    parser.add_argument(
        "--to", required=True, metavar="NAME", help="the candidate that is to lead (required)"
    )
    add_store_option(parser)
    parser.add_argument(
        "--wait",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long it may take altogether (default: 10)",
    )


def run(args: argparse.Namespace) -> int:
    """Have the leader hand over, and say that it did."""
    with connect_blocking(store_url(args)) as session:
        before = session.leader(args.election)
        now = session.transfer(args.election, to=args.to, wait_s=args.wait)
    if args.json:
        print_json({"election": args.election, "from": told(before), "leader": told(now)})
    else:
        console().print(_in_words(before, now))
    return Exit.DONE


def _in_words(before: Leader | None, now: Leader) -> str:
    handed = f"{printable(before.name)} handed over: " if before else ""
    return f"{handed}{printable(now.name)} leads {now.election}, token {now.token}"
