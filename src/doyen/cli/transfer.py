"""`doyen transfer ELECTION --to NAME`: order the leader to hand over to a candidate."""

from __future__ import annotations

import argparse
from dataclasses import replace

from doyen.blocking import connect_blocking
from doyen.cli._output import (
    Exit,
    add_election_arguments,
    add_option,
    console,
    kind_of,
    print_json,
    printable,
    store_url,
)
from doyen.cli.leader import leader_dict, leader_text
from doyen.model import Leader

MANUAL = """\
Transfers leadership to a candidate at any place in the line. The successor confirms that it is
ready before the leader receives the order, and takes over at once when the leader resigns; if it
fails to, the line continues in its order. The leader resigns when its work has ended.

exit codes:
  0    the candidate leads
  1    it does not: there is no leader, no candidate or more than one has that
       name, it was not ready, or the leader did not resign in time
  others as for every command: see doyen --help

examples:
  # before server1 is shut down
  doyen transfer billing --to server2
  # a leader whose work takes longer to end
  doyen transfer billing --to server2 --wait 120
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_election_arguments(parser)
    add_option(parser, "--to NAME", "the name of the successor (required)", required=True)
    add_option(parser, "--wait TIME", "the time limit of the transfer", "10")


def run(args: argparse.Namespace) -> int:
    with connect_blocking(store_url(args, create=False), create=False) as session:
        before = session.leader(args.election, kind=kind_of(args))
        now = session.transfer(args.election, to=args.to, kind=kind_of(args), wait_s=args.wait)
    if args.json:
        leaders = {"from": leader_dict(before), "leader": leader_dict(now)}
        print_json({"election": args.election, "kind": kind_of(args), **leaders})
    else:
        console().print(_as_text(before, now))
    return Exit.DONE


def _as_text(before: Leader | None, now: Leader) -> str:
    handed = f"{printable(before.name)} handed over: " if before else ""
    return handed + leader_text(now.election, replace(now, meta={}), now.kind)
