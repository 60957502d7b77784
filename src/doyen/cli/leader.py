"""`doyen leader ELECTION`: say who leads, once."""

from __future__ import annotations

import argparse
from typing import Any

from doyen.blocking import connect_blocking
from doyen.cli._manual import manual
from doyen.cli._output import (
    Exit,
    add_store_option,
    console,
    print_json,
    printable,
    store_url,
)
from doyen.model import Leader

__all__ = ["MANUAL", "as_dict", "configure", "in_words", "run", "told"]

MANUAL = """\
One read of the store: who leads at this moment, its token, and what it tells about itself. By the
time you act on the answer it may be another; what must never be done twice is guarded by the
token.

exit codes:
  0    somebody leads
  1    nobody does
  others as for every command: see doyen --help

examples:
  doyen leader billing
  # its name, for a script
  doyen leader billing --json | jq -r .leader.name
  # does anybody lead?
  doyen leader billing --store sqlite:///var/lib/app/doyen.db >/dev/null
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    manual(parser, MANUAL)
    parser.add_argument("election", metavar="ELECTION", help="the election's name")
    add_store_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print who leads, by one read of the store."""
    with connect_blocking(store_url(args)) as session:
        leader = session.leader(args.election)
    if args.json:
        print_json(as_dict(args.election, leader))
    else:
        console().print(in_words(args.election, leader))
    return Exit.NO if leader is None else Exit.DONE


def in_words(election: str, leader: Leader | None) -> str:
    """
    >>> in_words("billing", Leader("billing", "server1", 7, {"port": 80}))
    'server1 leads billing, token 7, {"port": 80}'
    """
    if leader is None:
        return f"nobody leads {election}"
    meta = f", {printable(leader.meta)}" if leader.meta else ""
    return f"{printable(leader.name)} leads {election}, token {leader.token}{meta}"


def told(leader: Leader | None) -> dict[str, Any] | None:
    """A leader for `--json`; null while nobody leads."""
    if leader is None:
        return None
    return {"name": leader.name, "token": leader.token, "meta": dict(leader.meta)}


def as_dict(election: str, leader: Leader | None) -> dict[str, Any]:
    """What `--json` prints."""
    return {"election": election, "leader": told(leader)}
