"""`doyen leader ELECTION`: say who leads, once."""

from __future__ import annotations

import argparse
import json
from typing import Any

from doyen.blocking import connect_blocking
from doyen.cli._output import Exit, add_store_option, console, print_json, store_url
from doyen.model import Leader

__all__ = ["as_dict", "configure", "in_words", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = "Exit codes: 0 somebody leads, 1 nobody does."
    parser.add_argument("election", metavar="ELECTION")
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
    meta = f", {json.dumps(dict(leader.meta), ensure_ascii=False)}" if leader.meta else ""
    return f"{leader.name} leads {election}, token {leader.token}{meta}"


def as_dict(election: str, leader: Leader | None) -> dict[str, Any]:
    """For `--json`; `leader` is null while nobody leads."""
    if leader is None:
        return {"election": election, "leader": None}
    told = {"name": leader.name, "token": leader.token, "meta": dict(leader.meta)}
    return {"election": election, "leader": told}
