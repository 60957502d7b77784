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
    kind_of,
    print_json,
    printable,
    store_url,
)
from doyen.cli.leader import leader_dict, leader_text
from doyen.errors import ConfigError, OrderFailed
from doyen.model import HAS, LEADER, Leader, described
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
  # have the holder of a lock give it up
  doyen resign migration --lock
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
    add_option(parser, "--wait TIME", "the time in which the leader must resign", "10")
    add_option(parser, "--force", "delete the leader record without an order")
    add_option(parser, "--yes", "with --force: do not ask for confirmation")


def run(args: argparse.Namespace) -> int:
    url = store_url(args, create=False)
    if args.yes and not args.force:
        raise ConfigError("--yes is for --force only: without it there is no confirmation")
    if args.force and not _confirmed(url, args, asked=not args.yes):
        print("doyen: not confirmed, nothing was done", file=sys.stderr)
        return Exit.NO
    old, now = asyncio.run(_resign(url, args))
    if args.json:
        leaders = {"resigned": leader_dict(old), "forced": args.force, "leader": leader_dict(now)}
        print_json({"election": args.election, "kind": kind_of(args), **leaders})
    else:
        console().print(_as_text(old, now, forced=args.force))
    return Exit.DONE


async def _resign(url: str, args: argparse.Namespace) -> tuple[Leader, Leader | None]:
    async with connect(url, create=False) as session:
        old = await session.resign(
            args.election, kind=kind_of(args), wait_s=args.wait, force=args.force
        )
        return old, await _successor(session, old)


async def _successor(session: Session, old: Leader) -> Leader | None:
    """The next leader; None if there is none within `FOLLOWED_WITHIN_S`."""
    try:
        async with (
            asyncio.timeout(FOLLOWED_WITHIN_S),
            aclosing(session.observe(old.election, kind=old.kind)) as leaders,
        ):
            async for leader in leaders:
                if leader and leader.token != old.token:
                    return leader
    except TimeoutError:
        pass
    return None


def _confirmed(url: str, args: argparse.Namespace, *, asked: bool) -> bool:
    """Whether to use force; prints the consequences and asks."""
    election, kind = args.election, kind_of(args)
    with connect_blocking(url, create=False) as session:
        leader = session.leader(election, kind=kind)
        if leader is None:
            raise OrderFailed(f"{described(election, kind)} has no {LEADER[kind]}")
        if not asked:
            return True
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ConfigError("--force asks for confirmation, which needs a terminal: add --yes")
        name = printable(leader.name)
        print(f"{leader_text(election, leader, kind)}.\n{COST}", file=sys.stderr)
        print(f"Delete the leader record of {name}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            return False
        if session.leader(election, kind=kind) != leader:
            raise OrderFailed(f"{leader.name!r} no longer {HAS[kind]} {described(election, kind)}")
        return True


def _as_text(old: Leader, now: Leader | None, *, forced: bool) -> str:
    name, lock = printable(old.name), old.kind == "locks"
    leads = "has it" if lock else "leads"
    if now is None:
        follows = "it is free now" if lock else "there is no leader now"
    elif now.name == old.name:
        follows = f"{name} campaigned again and {leads}, token {now.token}"
    else:
        follows = f"{printable(now.name)} {leads} now, token {now.token}"
    if forced:
        return (
            f"the leader record of {name} (token {old.token}) in {old.election} was deleted;"
            f" {follows}; only tokens protect against writes that {name} may still make"
        )
    resigned = f"gave up the lock {old.election}" if lock else f"resigned from {old.election}"
    return f"{name} (token {old.token}) {resigned}; {follows}"
