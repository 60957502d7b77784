"""`doyen resign ELECTION`: end the term of the leader, by an order or by force."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import aclosing

from doyen.blocking import connect_blocking
from doyen.cli._output import (
    Exit,
    add_election_arguments,
    add_option,
    console,
    print_json,
    printable,
    store_url,
)
from doyen.cli.leader import leader_dict
from doyen.errors import ConfigError, OrderFailed
from doyen.model import Leader
from doyen.session import Session, connect

FOLLOWED_WITHIN_S = 1.0
"""How long to wait for the next leader, to name it."""

MANUAL = """\
Orders the leader to resign. The leader stops its work and resigns when the work has ended; then the
next candidate in line leads. The command waits for that and prints the new leader. The old leader
may campaign again, as `doyen run` does; to choose the next leader, use transfer.

With --force the leader record is deleted without an order, while the leader may still be working.
Until the leader notices, another may lead at the same time, and only tokens protect what both
write. Use it for a leader that is frozen or cut off, when waiting for the end of its lease takes
too long.

exit codes:
  0    the leader has resigned
  1    there is no leader; or it did not resign in time and still leads; or
       --force was not confirmed
  others as for every command: see doyen --help

examples:
  # before a reboot: give the leader a minute to finish its work
  doyen resign billing --wait 60
  # a leader that does not respond, in a script
  doyen resign billing --force --yes
"""

COST = """\
With --force the leader record is deleted while the leader may still be working.
Another may lead at the same time, and only tokens protect what both write.
Without --force, the leader resigns when its work has ended. The lease of a
leader that has crashed ends without any command.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_election_arguments(parser)
    add_option(parser, "--wait SECONDS", "the time in which the leader must resign", "10")
    add_option(parser, "--force", "delete the leader record without an order")
    add_option(parser, "--yes", "with --force: do not ask for confirmation")


def run(args: argparse.Namespace) -> int:
    url = store_url(args)
    if args.yes and not args.force:
        raise ConfigError("--yes is for --force only: without it there is no confirmation")
    if args.force and not _confirmed(url, args.election, asked=not args.yes):
        print("doyen: not confirmed, nothing was done", file=sys.stderr)
        return Exit.NO
    old, now = asyncio.run(_resign(url, args))
    if args.json:
        leaders = {"resigned": leader_dict(old), "forced": args.force, "leader": leader_dict(now)}
        print_json({"election": args.election, **leaders})
    else:
        console().print(_as_text(old, now, forced=args.force))
    return Exit.DONE


async def _resign(url: str, args: argparse.Namespace) -> tuple[Leader, Leader | None]:
    async with connect(url) as session:
        old = await session.resign(args.election, wait_s=args.wait, force=args.force)
        return old, await _successor(session, old)


async def _successor(session: Session, old: Leader) -> Leader | None:
    """The next leader; None if there is none within `FOLLOWED_WITHIN_S`."""
    try:
        async with (
            asyncio.timeout(FOLLOWED_WITHIN_S),
            aclosing(session.observe(old.election)) as leaders,
        ):
            async for leader in leaders:
                if leader is not None and leader.token != old.token:
                    return leader
    except TimeoutError:
        pass
    return None


def _confirmed(url: str, election: str, *, asked: bool) -> bool:
    """Whether to use force; prints the consequences and asks."""
    with connect_blocking(url) as session:
        leader = session.leader(election)
        if leader is None:
            raise OrderFailed(f"{election!r} has no leader")
        if not asked:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigError("--force asks for confirmation, which needs a terminal: add --yes")
        name = printable(leader.name)
        print(f"The leader of {election} is {name}, token {leader.token}.\n{COST}", file=sys.stderr)
        print(f"Delete the leader record of {name}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return False
        if session.leader(election) != leader:
            raise OrderFailed(f"{leader.name!r} no longer leads {election!r}")
        return True


def _as_text(old: Leader, now: Leader | None, *, forced: bool) -> str:
    name = printable(old.name)
    if now is None:
        follows = "there is no leader now"
    elif now.name == old.name:
        follows = f"{name} campaigned again and leads, token {now.token}"
    else:
        follows = f"{printable(now.name)} leads now, token {now.token}"
    if forced:
        return (
            f"the leader record of {name} (token {old.token}) in {old.election} was deleted;"
            f" {follows}; only tokens protect against writes that {name} may still make"
        )
    return f"{name} (token {old.token}) resigned from {old.election}; {follows}"
