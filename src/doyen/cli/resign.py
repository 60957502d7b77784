"""`doyen resign ELECTION`: have whoever leads let go, by an order it obeys, or by force."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import aclosing

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
from doyen.errors import ConfigError, OrderFailed
from doyen.model import Leader
from doyen.session import Session, connect

__all__ = ["MANUAL", "configure", "run"]

FOLLOWED_WITHIN_S = 1.0
"""How long to look for a successor, to say who leads now."""

MANUAL = """\
Lays an order for whoever leads. The leader stops its work and lets go when that has ended, and the
next in line leads. This waits until it has let go and says who leads then. The one that let go may
stand again, as `doyen run` does: to choose who follows, use transfer.

With --force the leader is not asked: its record is removed while it may be at work. Then another
may lead at the same time, until the first one notices, and only tokens protect what both write. It
is for a leader that is frozen or out of reach, when waiting for its lease to end takes too long.

exit codes:
  0    the leader has let go
  1    nobody leads; or it did not let go in time and goes on leading; or you
       thought better of --force
  others as for every command: see doyen --help

examples:
  # before a reboot: whoever leads has a minute to finish what it is doing
  doyen resign billing --wait 60
  # a leader that does not answer, with nobody at the terminal to ask
  doyen resign billing --force --yes
"""

COST = """\
By force its record is removed while it may still be at work. Another may lead
at the same time, and only tokens protect what both write. Asked without
--force, it would let go once its work has ended; left alone, a leader that is
gone loses its lease by itself.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    manual(parser, MANUAL)
    parser.add_argument("election", metavar="ELECTION", help="the election's name")
    add_store_option(parser)
    parser.add_argument(
        "--wait",
        type=seconds,
        default=10.0,
        metavar="SECONDS",
        help="how long the leader has to let go (default: 10)",
    )
    parser.add_argument(
        "--force", action="store_true", help="remove the leader's record without asking it"
    )
    parser.add_argument(
        "--yes", action="store_true", help="with --force: do not ask for confirmation"
    )


def run(args: argparse.Namespace) -> int:
    """Have the leader let go, and say who leads now."""
    url = store_url(args)
    if args.yes and not args.force:
        raise ConfigError("--yes goes with --force: nothing else is asked")
    if args.force and not _confirmed(url, args.election, asked=not args.yes):
        print("doyen: nothing was done", file=sys.stderr)
        return Exit.NO
    gone, now = asyncio.run(_resign(url, args))
    if args.json:
        leaders = {"resigned": told(gone), "forced": args.force, "leader": told(now)}
        print_json({"election": args.election, **leaders})
    else:
        console().print(_in_words(gone, now, forced=args.force))
    return Exit.DONE


async def _resign(url: str, args: argparse.Namespace) -> tuple[Leader, Leader | None]:
    async with connect(url) as session:
        gone = await session.resign(args.election, wait_s=args.wait, force=args.force)
        return gone, await _successor(session, gone)


async def _successor(session: Session, gone: Leader) -> Leader | None:
    """Who leads now; None if nobody does so before long."""
    try:
        async with (
            asyncio.timeout(FOLLOWED_WITHIN_S),
            aclosing(session.observe(gone.election)) as leaders,
        ):
            async for leader in leaders:
                if leader is not None and leader.token != gone.token:
                    return leader
    except TimeoutError:
        pass
    return None


def _confirmed(url: str, election: str, *, asked: bool) -> bool:
    """Whether to go on by force; says what that costs."""
    with connect_blocking(url) as session:
        leader = session.leader(election)
        if leader is None:
            raise OrderFailed(f"nobody leads {election!r}")
        if not asked:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigError("--force asks for confirmation, and nobody is there: add --yes")
        name = printable(leader.name)
        print(f"{name} leads {election}, token {leader.token}.\n{COST}", file=sys.stderr)
        print(f"Remove the record of {name}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return False
        if session.leader(election) != leader:
            raise OrderFailed(f"{leader.name!r} no longer leads {election!r}")
        return True


def _in_words(gone: Leader, now: Leader | None, *, forced: bool) -> str:
    name = printable(gone.name)
    if now is None:
        follows = "nobody leads it now"
    elif now.name == gone.name:
        follows = f"{name} stood again and leads it now, token {now.token}"
    else:
        follows = f"{printable(now.name)} leads it now, token {now.token}"
    if forced:
        return (
            f"the record of {name} (token {gone.token}) in {gone.election} was removed by force;"
            f" {follows}; only tokens protect what {name} may still write"
        )
    return f"{name} (token {gone.token}) let go of {gone.election}; {follows}"
