"""`doyen leader ELECTION`: show the leader."""

from __future__ import annotations

import argparse
from typing import Any

from doyen.blocking import connect_blocking
from doyen.cli._output import (
    Exit,
    add_election_arguments,
    console,
    print_json,
    printable,
    store_url,
)
from doyen.model import Leader

MANUAL = """\
Reads the store once and prints the leader's name, its token and its metadata. The leader may change
before you act on the answer, so protect writes with the token.

exit codes:
  0    the election has a leader
  1    it has none
  others as for every command: see doyen --help

examples:
  doyen leader billing
  # its name, for a script
  doyen leader billing --json | jq -r .leader.name
  # test whether there is a leader
  doyen leader billing --store sqlite:///var/lib/app/doyen.db >/dev/null
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_election_arguments(parser)


def run(args: argparse.Namespace) -> int:
    with connect_blocking(store_url(args)) as session:
        leader = session.leader(args.election)
    if args.json:
        print_json(as_dict(args.election, leader))
    else:
        console().print(leader_text(args.election, leader))
    return Exit.NO if leader is None else Exit.DONE


def leader_text(election: str, leader: Leader | None) -> str:
    """
    >>> leader_text("billing", Leader("billing", "server1", 7, {"port": 80}))
    'server1 leads billing, token 7, {"port": 80}'
    """
    if leader is None:
        return f"{election} has no leader"
    meta = f", {printable(leader.meta)}" if leader.meta else ""
    return f"{printable(leader.name)} leads {election}, token {leader.token}{meta}"


def leader_dict(leader: Leader | None) -> dict[str, Any] | None:
    """A leader as `--json` prints it; None if there is none."""
    if leader is None:
        return None
    return {"name": leader.name, "token": leader.token, "meta": dict(leader.meta)}


def as_dict(election: str, leader: Leader | None) -> dict[str, Any]:
    return {"election": election, "leader": leader_dict(leader)}
