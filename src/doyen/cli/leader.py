"""`doyen leader ELECTION`: show the leader."""

from __future__ import annotations

import argparse
from typing import Any

from doyen.blocking import connect_blocking
from doyen.cli._output import (
    Exit,
    add_election_arguments,
    console,
    kind_of,
    print_json,
    printable,
    store_url,
)
from doyen.model import Kind, Leader

MANUAL = """\
Reads the store once and prints the leader's name, its token and its metadata. The leader may change
before you act on the answer, so protect writes with the token.

exit codes:
  0    the election has a leader
  1    it has none
  others as for every command: see doyen --help

examples:
  doyen leader billing
  # the holder of a lock
  doyen leader migration --lock
  # its name, for a script
  doyen leader billing --json | jq -r .leader.name
  # test whether there is a leader
  doyen leader billing --store sqlite:///var/lib/app/doyen.db >/dev/null
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_election_arguments(parser)


def run(args: argparse.Namespace) -> int:
    with connect_blocking(store_url(args, create=False), create=False) as session:
        leader = session.leader(args.election, kind=kind_of(args))
    if args.json:
        print_json(as_dict(args.election, leader, kind_of(args)))
    else:
        console().print(leader_text(args.election, leader, kind_of(args)))
    return Exit.NO if leader is None else Exit.DONE


def leader_text(election: str, leader: Leader | None, kind: Kind) -> str:
    """
    >>> leader_text("billing", Leader("billing", "server1", 7, {"port": 80}), "elections")
    'server1 leads billing, token 7, {"port": 80}'
    >>> leader_text("migration", None, "locks")
    'the lock migration is free'
    >>> leader_text("a\\x1b[2J", None, "elections")
    'a\\\\x1b[2J has no leader'
    """
    lock, shown = kind == "locks", printable(election)
    if leader is None:
        return f"the lock {shown} is free" if lock else f"{shown} has no leader"
    meta = f", {printable(leader.meta)}" if leader.meta else ""
    meta += ", foreign" if leader.foreign else ""
    has = "has the lock" if lock else "leads"
    return f"{printable(leader.name)} {has} {shown}, token {leader.token}{meta}"


def leader_dict(leader: Leader | None) -> dict[str, Any] | None:
    """A leader as `--json` prints it; None if there is none."""
    if leader is None:
        return None
    return {
        "name": leader.name,
        "token": leader.token,
        "since": leader.since,
        "meta": dict(leader.meta),
        **({"foreign": True} if leader.foreign else {}),
    }


def as_dict(election: str, leader: Leader | None, kind: Kind) -> dict[str, Any]:
    return {"election": election, "kind": kind, "leader": leader_dict(leader)}
